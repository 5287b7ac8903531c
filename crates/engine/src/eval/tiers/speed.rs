//! Tokens a second of several sessions, in turns.

use std::ops::Range;
use std::time::Instant;

use serde::Serialize;

use crate::Error;
use crate::session::{BLOCK_CELLS, Session};

/// Tokens that a session decodes in its turn.
pub const TOKENS_A_ROUND: usize = 8;

/// Rounds. The spread of their medians is a third of that of a round.
pub(super) const ROUNDS: usize = 9;

/// Tokens before those of a turn: weights and cells of the session before are out of the caches then, and a GPU has recorded what a step is.
const WARM_UP: usize = 3;

/// What was measured of one session.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Speed {
    /// The median round.
    pub tok_s_p50: f64,
    /// Every round, in order.
    pub tok_s: Vec<f64>,
    /// The share of tokens a second lost against the first session: the median over the rounds, each against the first session's own of
    /// the same round. `None` without that one.
    pub drop: Option<f64>,
}

/// The depth at which tokens a second of a full context are measured: all tokens of a turn lie in one block, so that nothing moves while time
/// is taken.
pub fn depth(n_ctx: usize) -> usize {
    let needed = WARM_UP + TOKENS_A_ROUND;
    let in_last = match n_ctx % BLOCK_CELLS {
        0 => BLOCK_CELLS,
        n => n,
    };
    let end = if in_last < needed && n_ctx > in_last {
        n_ctx - in_last
    } else {
        n_ctx
    };
    end.saturating_sub(needed)
}

/// Lets every session decode in turns at a depth that all have reached. `tokens` are those to decode, as many as a turn takes. `on_turn` is
/// called after each turn; what it returns ends everything if false, and then there is no result.
pub(super) fn measure(
    sessions: &mut [&mut Session<'_>],
    depth: usize,
    tokens: &[u32],
    on_turn: &mut dyn FnMut() -> bool,
) -> Result<Option<Vec<Vec<f64>>>, Error> {
    let mut rounds = vec![Vec::with_capacity(ROUNDS); sessions.len()];
    for round in 0..ROUNDS {
        // Another one begins each time: none is always first after something else.
        for at in order(round, sessions.len()) {
            let session = &mut *sessions[at];
            session.truncate(depth);
            let (warm_up, timed) = tokens[..WARM_UP + TOKENS_A_ROUND].split_at(WARM_UP);
            warm_up.iter().try_for_each(|&t| session.decode(t))?;
            let begun = Instant::now();
            timed.iter().try_for_each(|&t| session.decode(t))?;
            rounds[at].push(TOKENS_A_ROUND as f64 / begun.elapsed().as_secs_f64());
            if !on_turn() {
                return Ok(None);
            }
        }
    }
    Ok(Some(rounds))
}

/// Who is when in a round.
fn order(round: usize, sessions: usize) -> impl Iterator<Item = usize> {
    let all: Range<usize> = 0..sessions;
    all.map(move |i| (i + round) % sessions)
}

impl Speed {
    /// From rounds of a session and of the one that it is compared with.
    pub(super) fn new(tok_s: Vec<f64>, base: Option<&[f64]>) -> Self {
        let drop = base.map(|base| {
            let drops = base.iter().zip(&tok_s).map(|(base, own)| 1.0 - own / base);
            median(&drops.collect::<Vec<_>>())
        });
        Self {
            tok_s_p50: median(&tok_s),
            tok_s,
            drop,
        }
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    crate::eval::divergence::quantile(&sorted, 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_stays_in_one_block() {
        let turn = WARM_UP + TOKENS_A_ROUND;
        for n_ctx in turn..2000 {
            let depth = depth(n_ctx);
            let last = depth + turn - 1;
            assert!(last < n_ctx, "{n_ctx}");
            assert!(n_ctx < 256 + turn || depth / 256 == last / 256, "{n_ctx}");
            assert!(n_ctx - depth <= 2 * turn, "{n_ctx}");
        }
        assert_eq!((depth(4096), depth(4100), depth(5)), (4085, 4085, 0));
    }

    #[test]
    fn everybody_has_a_turn_and_begins_once() {
        let first: Vec<usize> = (0..3).filter_map(|round| order(round, 3).next()).collect();
        assert_eq!(first, [0, 1, 2]);
        let mut all: Vec<usize> = order(5, 4).collect();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3]);
    }

    #[test]
    fn drops_are_of_rounds_that_were_measured_together() {
        // The machine is half as fast in the second round.
        let base = [10.0, 5.0, 10.0];
        let speed = Speed::new(vec![8.0, 4.0, 9.0], Some(&base));
        assert!((speed.drop.unwrap() - 0.2).abs() < 1e-12);
        assert_eq!(speed.tok_s_p50, 8.0);
        assert_eq!(Speed::new(vec![1.0], None).drop, None);
    }
}
