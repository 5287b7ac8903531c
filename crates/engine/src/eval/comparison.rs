//! Settings of one model side by side over the same tokens: how far their answers are apart, over the whole vocabulary.
//!
//! Start at [`compare`]: it feeds a chunk to the base, keeps its logits, feeds the same chunk to each other session, and compares position
//! by position. So no more than a chunk's logits of two sessions are ever in memory.

use std::ops::ControlFlow;

use serde::Serialize;

use super::{EvalError, Excerpt, KlSummary, Likelihood};
use crate::session::{Session, Wanted};

/// Logits of one session that are kept, at most, unless one position has more.
const KEPT_BYTES_MAX: usize = 64 << 20;

/// How tokens reach the sessions. Neither way changes a bit, but cells in host memory are attended in different ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feed {
    /// As prompts.
    Chunks,
    /// A decode step each.
    Tokens,
}

/// How far one setting's answers lie from the base's.
#[derive(Debug, Clone, Default)]
pub struct Comparison {
    kl_nats: Vec<f64>,
    agreed: usize,
    base: Likelihood,
    other: Likelihood,
}

/// How often two settings have the same first choice.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Agreement {
    /// Positions compared.
    pub positions: usize,
    /// Those where the most likely token is the same.
    pub agreed: usize,
    /// The quotient.
    pub share: f64,
}

/// A comparison in a few numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Compared {
    /// Divergence of the other setting from the base, over the whole vocabulary.
    pub kl_nats: KlSummary,
    /// Agreement of the first choices.
    pub top1: Agreement,
    /// The base's perplexity; `None` if no token was scored.
    pub perplexity_base: Option<f64>,
    /// The other setting's.
    pub perplexity_other: Option<f64>,
}

impl Comparison {
    fn add(&mut self, pair: &Pair) {
        self.kl_nats.push(pair.kl_nats);
        self.agreed += usize::from(pair.agrees);
        if let Some((base, other)) = pair.nll {
            self.base.add_nll(base);
            self.other.add_nll(other);
        }
    }

    /// The numbers; `None` before the first position.
    pub fn summary(&self) -> Option<Compared> {
        let positions = self.kl_nats.len();
        let perplexity = |l: &Likelihood| (l.tokens() > 0).then(|| l.perplexity().0);
        Some(Compared {
            kl_nats: KlSummary::of(&self.kl_nats)?,
            top1: Agreement {
                positions,
                agreed: self.agreed,
                share: self.agreed as f64 / positions as f64,
            },
            perplexity_base: perplexity(&self.base),
            perplexity_other: perplexity(&self.other),
        })
    }
}

/// Both settings at one position.
#[derive(Debug)]
struct Pair {
    kl_nats: f64,
    /// Whether the most likely token is the same.
    agrees: bool,
    /// How unlikely the token was that came then, to either.
    nll: Option<(f64, f64)>,
}

impl Pair {
    /// Of the logits of both at a position, and the token that came then, if it is scored. `text` and `pos` say where this is.
    fn new(
        (text, pos): (usize, usize),
        base: &[f32],
        other: &[f32],
        next: Option<u32>,
    ) -> Result<Self, EvalError> {
        let top = |logits: &[f32]| {
            let infinite = logits.iter().enumerate().find(|(_, x)| !x.is_finite());
            match infinite {
                None => Ok(top(logits)),
                Some((token, &value)) => Err(EvalError::NotFinite {
                    text,
                    pos,
                    token,
                    value,
                }),
            }
        };
        let (top_base, top_other) = (top(base)?, top(other)?);
        let Both {
            kl_nats,
            log_sum_base,
            log_sum_other,
        } = both(base, base[top_base], other, other[top_other]);
        let nll = next.map(|next| {
            let at = next as usize;
            let (base, other) = (f64::from(base[at]), f64::from(other[at]));
            (log_sum_base - base, log_sum_other - other)
        });
        Ok(Self {
            kl_nats,
            agrees: top_base == top_other,
            nll,
        })
    }
}

/// What `pair` makes of each of `n` positions, in order, on all processors: with 150,000 tokens one of them takes 4 ms a position, and a GPU far less to compute
/// its logits.
fn pairs(
    n: usize,
    pair: impl Fn(usize) -> Result<Pair, EvalError> + Sync,
) -> Result<Vec<Pair>, EvalError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = n.div_ceil(threads).max(1);
    let of_part = |first: usize| {
        let positions = first..n.min(first + share);
        positions.map(&pair).collect::<Result<Vec<_>, _>>()
    };
    let of_part = &of_part;
    std::thread::scope(|scope| {
        let begin = |first| {
            let thread = std::thread::Builder::new();
            // A part for which there is no thread is done here.
            let begun = thread.spawn_scoped(scope, move || of_part(first));
            (first, begun.ok())
        };
        let begun: Vec<_> = (0..n).step_by(share).map(begin).collect();
        let mut all = Vec::with_capacity(n);
        for (first, thread) in begun {
            let part = match thread.map(|thread| thread.join()) {
                None => of_part(first),
                Some(Ok(part)) => part,
                Some(Err(panic)) => std::panic::resume_unwind(panic),
            };
            all.extend(part?);
        }
        Ok(all)
    })
}

/// The first of the most likely tokens.
fn top(logits: &[f32]) -> usize {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best
}

/// What is known of two lists of logits.
struct Both {
    kl_nats: f64,
    log_sum_base: f64,
    log_sum_other: f64,
}

/// ```text
/// KL = sum_i p_i (ln p_i - ln q_i),   p = softmax(base), q = softmax(other)
///    = sum_i e^(x_i - X) ((x_i - X) - (y_i - Y)) / P - ln P + ln Q,   X = max x, P = sum_i e^(x_i - X), Y and Q likewise
/// ```
/// Equal logits give exactly 0.
fn both(base: &[f32], max_base: f32, other: &[f32], max_other: f32) -> Both {
    let (mut sum_base, mut sum_other, mut weighted) = (0.0, 0.0, 0.0);
    let (max_base, max_other) = (f64::from(max_base), f64::from(max_other));
    for (&x, &y) in base.iter().zip(other) {
        let (x, y) = (f64::from(x) - max_base, f64::from(y) - max_other);
        let e = x.exp();
        sum_base += e;
        sum_other += y.exp();
        weighted += e * (x - y);
    }
    let (log_base, log_other) = (sum_base.ln(), sum_other.ln());
    Both {
        // Rounding may leave a little less than nothing.
        kl_nats: (weighted / sum_base - log_base + log_other).max(0.0),
        log_sum_base: max_base + log_base,
        log_sum_other: max_other + log_other,
    }
}

/// Feeds excerpts to a base and to other sessions of the same model, and compares each of these with the base at the positions whose next
/// token is scored, and at the last one. `on_tokens` gets how many tokens one session has taken now; with
/// [`Break`](ControlFlow::Break) it ends the comparison, with what is done by then.
///
/// # Errors
/// If a session fails, or a logit is no finite number.
pub fn compare<'m>(
    base: &mut Session<'m>,
    others: &mut [&mut Session<'m>],
    excerpts: &[Excerpt],
    feed: Feed,
    on_tokens: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> Result<Vec<Comparison>, EvalError> {
    let n_vocab = base.model().config().n_vocab;
    let chunk = (KEPT_BYTES_MAX / size_of::<f32>() / n_vocab.max(1)).clamp(1, base.ubatch());
    let mut comparisons = vec![Comparison::default(); others.len()];
    let (mut of_base, mut of_other) = (Vec::new(), Vec::new());
    for (text, excerpt) in excerpts.iter().enumerate() {
        let compared_from = excerpt.scored_from.max(1) - 1;
        let (context, compared) = excerpt
            .tokens
            .split_at(compared_from.min(excerpt.tokens.len()));
        for session in others.iter_mut().map(|s| &mut **s).chain([&mut *base]) {
            session.truncate(0);
            // What only gives context needs no logits.
            for tokens in context.chunks(session.ubatch()) {
                match feed {
                    Feed::Chunks => session.prefill(tokens, Wanted::None)?,
                    Feed::Tokens => tokens.iter().try_for_each(|&t| session.decode(t))?,
                }
                if on_tokens(tokens.len()).is_break() {
                    return Ok(comparisons);
                }
            }
        }
        for (at, tokens) in compared.chunks(chunk).enumerate() {
            let first = compared_from + at * chunk;
            logits_of(base, tokens, feed, &mut of_base)?;
            if on_tokens(tokens.len()).is_break() {
                return Ok(comparisons);
            }
            for (session, comparison) in others.iter_mut().zip(&mut comparisons) {
                logits_of(session, tokens, feed, &mut of_other)?;
                let pairs = pairs(tokens.len(), |i| {
                    let [base, other] =
                        [&of_base, &of_other].map(|all| &all[i * n_vocab..][..n_vocab]);
                    let next = excerpt.scored_after(first + i);
                    Pair::new((text, first + i), base, other, next)
                })?;
                pairs.iter().for_each(|pair| comparison.add(pair));
                if on_tokens(tokens.len()).is_break() {
                    return Ok(comparisons);
                }
            }
        }
    }
    Ok(comparisons)
}

/// Feeds tokens to a session, and takes the logits after each, `[tokens, vocabulary]`.
fn logits_of(
    session: &mut Session<'_>,
    tokens: &[u32],
    feed: Feed,
    all: &mut Vec<f32>,
) -> Result<(), EvalError> {
    all.clear();
    if feed == Feed::Tokens {
        for &token in tokens {
            session.decode(token)?;
            all.extend_from_slice(session.logits());
        }
        return Ok(());
    }
    let mut on_position = |_, logits: &[f32]| {
        all.extend_from_slice(logits);
        ControlFlow::Continue(())
    };
    session.prefill(tokens, Wanted::All(&mut on_position))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eval::log_sum_exp;

    fn compared(pairs: &[(&[f32], &[f32], Option<u32>)]) -> Compared {
        let mut comparison = Comparison::default();
        for (pos, (base, other, next)) in pairs.iter().enumerate() {
            comparison.add(&Pair::new((0, pos), base, other, *next).unwrap());
        }
        comparison.summary().unwrap()
    }

    #[test]
    fn it_is_the_textbook_sum_over_all_tokens() {
        let base: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.7).sin() * 8.0).collect();
        let other: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.71).sin() * 7.0).collect();
        let (all_base, all_other) = (log_sum_exp(&base), log_sum_exp(&other));
        let terms = base.iter().zip(&other).map(|(&x, &y)| {
            let (p, q) = (f64::from(x) - all_base, f64::from(y) - all_other);
            p.exp() * (p - q)
        });
        let expected: f64 = terms.sum();
        let c = compared(&[(&base, &other, Some(3))]);
        assert!((c.kl_nats.max - expected).abs() < 1e-12 * expected.max(1.0));
        let perplexity = (all_base - f64::from(base[3])).exp();
        assert!((c.perplexity_base.unwrap() / perplexity - 1.0).abs() < 1e-12);
        let perplexity = (all_other - f64::from(other[3])).exp();
        assert!((c.perplexity_other.unwrap() / perplexity - 1.0).abs() < 1e-12);
    }

    #[test]
    fn equal_logits_are_at_no_distance_at_all() {
        let logits: Vec<f32> = (0..5000).map(|i| (i as f32).cos() * 300.0 - 7e3).collect();
        let c = compared(&[(&logits, &logits, None), (&[0.1; 7], &[0.1; 7], None)]);
        assert_eq!((c.kl_nats.mean, c.kl_nats.max), (0.0, 0.0));
        assert_eq!((c.top1.positions, c.top1.agreed, c.top1.share), (2, 2, 1.0));
        assert_eq!((c.perplexity_base, c.perplexity_other), (None, None));
        // Nor are those that differ by a constant: soft-max does not see it.
        let shifted: Vec<f32> = logits.iter().map(|x| x + 64.0).collect();
        assert!(compared(&[(&logits, &shifted, None)]).kl_nats.max < 1e-3);
    }

    #[test]
    fn ties_go_to_the_first_token_and_no_number_is_refused() {
        let c = compared(&[
            (&[1.0, 1.0], &[1.0, 0.5], None),
            (&[0.0, 1.0], &[1.0, 0.0], None),
        ]);
        assert_eq!((c.top1.agreed, c.top1.share), (1, 0.5));
        let error = Pair::new((2, 7), &[0.0, 1.0], &[0.0, f32::NAN], None);
        assert!(
            matches!(
                error,
                Err(EvalError::NotFinite {
                    text: 2,
                    pos: 7,
                    token: 1,
                    ..
                })
            ),
            "{error:?}"
        );
        assert!(Comparison::default().summary().is_none());
    }

    #[test]
    fn all_positions_are_compared_in_order_and_the_first_error_is_told() {
        let at = |i: usize| {
            let other = if i == 40 || i == 90 {
                f32::NAN
            } else {
                i as f32
            };
            Pair::new((0, i), &[0.0, 1.0], &[other, 1.0], Some(1))
        };
        for n in [0, 1, 2, 7, 40] {
            let found = pairs(n, at).unwrap();
            let alone: Vec<Pair> = (0..n).map(|i| at(i).unwrap()).collect();
            let bits = |p: &Pair| (p.kl_nats.to_bits(), p.agrees, p.nll.unwrap().1.to_bits());
            assert!(found.iter().map(bits).eq(alone.iter().map(bits)), "{n}");
        }
        let error = pairs(100, at);
        assert!(
            matches!(error, Err(EvalError::NotFinite { pos: 40, .. })),
            "{error:?}"
        );
    }
}
