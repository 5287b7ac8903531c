//! What was accepted so far, and the penalties that follow from it.

use std::collections::HashMap;

use super::params::SamplerParams;

/// Accepted tokens, the prompt's included if the caller accepts them.
#[derive(Clone, Debug, Default)]
pub(super) struct History {
    tokens: Vec<u32>,
    /// How often each token occurs among the last `penalty_last_n`.
    counts: HashMap<u32, u32>,
}

impl History {
    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    pub(super) fn clear(&mut self) {
        self.tokens.clear();
        self.counts.clear();
    }

    pub(super) fn push(&mut self, token: u32, params: &SamplerParams) {
        self.tokens.push(token);
        if !params.penalises() {
            return;
        }
        *self.counts.entry(token).or_insert(0) += 1;
        if let Some(n) = window(params.penalty_last_n)
            && let Some(at) = self.tokens.len().checked_sub(n + 1)
        {
            let gone = self.tokens[at];
            match self.counts.get_mut(&gone) {
                Some(count) if *count > 1 => *count -= 1,
                _ => {
                    self.counts.remove(&gone);
                }
            }
        }
    }

    /// Repetition, presence and frequency: each token that occurred is penalised by how often it did. A token's own new
    /// logit is all that is written, so the order of the map does not matter.
    pub(super) fn penalise(&self, logits: &mut [f32], params: &SamplerParams) {
        for (&token, &count) in &self.counts {
            let logit = &mut logits[token as usize];
            let scaled = if *logit <= 0.0 {
                *logit * params.repeat_penalty
            } else {
                *logit / params.repeat_penalty
            };
            let penalty = count as f32 * params.frequency_penalty + params.presence_penalty;
            replace(logit, f64::from(scaled - penalty));
        }
    }

    /// DRY: a token that would continue a repetition of at least `dry_allowed_length` tokens is penalised, the more the
    /// longer the repetition is.
    pub(super) fn penalise_repetitions(
        &self,
        logits: &mut [f32],
        params: &SamplerParams,
        breakers: &[u32],
    ) {
        for (token, length) in self.repetitions(params, breakers) {
            let over = length - params.dry_allowed_length as usize;
            let penalty = f64::from(params.dry_multiplier)
                * libm::pow(f64::from(params.dry_base), over as f64);
            let logit = &mut logits[token as usize];
            replace(logit, f64::from(*logit) - penalty);
        }
    }

    /// Each token that followed an earlier occurrence of what the history ends with, and the longest such occurrence.
    fn repetitions(&self, params: &SamplerParams, breakers: &[u32]) -> HashMap<u32, usize> {
        let n = window(params.dry_last_n).map_or(self.tokens.len(), |n| n.min(self.tokens.len()));
        // From the newest to the oldest; a repetition never reaches past a breaker.
        let backward: Vec<u32> = self.tokens.iter().rev().take(n).copied().collect();
        let limit = backward
            .iter()
            .position(|token| breakers.binary_search(token).is_ok())
            .unwrap_or(n);
        let mut longest = HashMap::new();
        for (at, length) in prefix_lengths(&backward).into_iter().enumerate().skip(1) {
            let length = length.min(limit);
            if length >= (params.dry_allowed_length as usize).max(1) {
                let best = longest.entry(backward[at - 1]).or_insert(0);
                *best = length.max(*best);
            }
        }
        longest
    }
}

/// Writes a changed logit. Forbidden tokens stay so, and no others become so: changes end at the largest finite numbers.
pub(super) fn replace(logit: &mut f32, new: f64) {
    if *logit != f32::NEG_INFINITY {
        *logit = new.clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32;
    }
}

/// A window in tokens: `None` is all of them.
fn window(last_n: i32) -> Option<usize> {
    usize::try_from(last_n).ok()
}

/// For each position, how many items from there on equal those from the start on (the Z function): linear time.
fn prefix_lengths(items: &[u32]) -> Vec<usize> {
    let mut lengths = vec![0; items.len()];
    // The match that reaches furthest so far.
    let (mut start, mut end) = (0, 0);
    for i in 1..items.len() {
        let mut length = if i < end {
            lengths[i - start].min(end - i)
        } else {
            0
        };
        while i + length < items.len() && items[length] == items[i + length] {
            length += 1;
        }
        lengths[i] = length;
        if i + length > end {
            (start, end) = (i, i + length);
        }
    }
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn history(tokens: &[u32], params: &SamplerParams) -> History {
        let mut history = History::default();
        for &token in tokens {
            history.push(token, params);
        }
        history
    }

    #[test]
    fn penalties_by_hand() {
        let params = SamplerParams {
            penalty_last_n: 3,
            repeat_penalty: 2.0,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            ..SamplerParams::default()
        };
        // Token 0 has left the window.
        let history = history(&[0, 1, 1, 2], &params);
        let mut logits = [4.0, 4.0, -4.0, 4.0];
        history.penalise(&mut logits, &params);
        assert_eq!(logits, [4.0, 2.0 - 0.5 - 0.5, -8.0 - 0.75, 4.0]);
    }

    #[test]
    fn repetitions_by_hand() {
        let params = SamplerParams {
            dry_multiplier: 1.0,
            dry_base: 2.0,
            dry_allowed_length: 2,
            ..SamplerParams::default()
        };
        // "1 2 3" was followed by 4 and is here again; "2 3" was followed by 5.
        let history = history(&[1, 2, 3, 4, 2, 3, 5, 1, 2, 3], &params);
        assert_eq!(
            history.repetitions(&params, &[]),
            HashMap::from([(4, 3), (5, 2)])
        );
        let mut logits = [0.0; 6];
        history.penalise_repetitions(&mut logits, &params, &[]);
        assert_eq!(logits, [0.0, 0.0, 0.0, 0.0, -2.0, -1.0]);
        assert_eq!(
            history.repetitions(&params, &[1]),
            HashMap::from([(4, 2), (5, 2)])
        );
        assert_eq!(history.repetitions(&params, &[3]), HashMap::new());
        let short = SamplerParams {
            dry_last_n: 6,
            ..params
        };
        assert_eq!(history.repetitions(&short, &[]), HashMap::from([(5, 2)]));
    }

    #[test]
    fn a_huge_penalty_is_finite() {
        let params = SamplerParams {
            dry_multiplier: 1e30,
            dry_base: 1e30,
            dry_allowed_length: 1,
            ..SamplerParams::default()
        };
        let history = history(&[1; 50], &params);
        let mut logits = [0.0, 1.0];
        history.penalise_repetitions(&mut logits, &params, &[]);
        assert_eq!(logits, [0.0, f32::MIN]);
        let mut forbidden = [0.0, f32::NEG_INFINITY];
        history.penalise_repetitions(&mut forbidden, &params, &[]);
        assert_eq!(forbidden, [0.0, f32::NEG_INFINITY]);
    }

    proptest! {
        #[test]
        fn counts_are_those_of_the_window(tokens in proptest::collection::vec(0_u32..4, 0..40), last_n in -1_i32..10) {
            let params = SamplerParams { penalty_last_n: last_n, frequency_penalty: 1.0, ..SamplerParams::default() };
            let n = window(last_n).unwrap_or(tokens.len()).min(tokens.len());
            let mut expected = HashMap::new();
            for &token in &tokens[tokens.len() - n..] {
                *expected.entry(token).or_insert(0) += 1;
            }
            prop_assert_eq!(history(&tokens, &params).counts, expected);
        }

        #[test]
        fn prefix_lengths_equal_the_definition(items in proptest::collection::vec(0_u32..3, 0..30)) {
            let lengths = prefix_lengths(&items);
            for i in 1..items.len() {
                let expected = items[i..].iter().zip(&items).take_while(|(a, b)| a == b).count();
                prop_assert_eq!(lengths[i], expected);
            }
        }
    }
}
