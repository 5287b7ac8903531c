//! Perplexity: how surprised a model is by a text.

use std::ops::Range;

use super::{EvalError, log_sum_exp};

/// Sums up how likely the tokens of a text were.
#[derive(Debug, Clone, Copy, Default)]
pub struct Likelihood {
    tokens: usize,
    sum: f64,
    sum_of_squares: f64,
}

impl Likelihood {
    /// Takes the logits after which `token` came.
    pub fn add(&mut self, logits: &[f32], token: u32) {
        self.add_nll(log_sum_exp(logits) - f64::from(logits[token as usize]));
    }

    /// Takes the negative log-likelihood of the next token.
    pub(super) fn add_nll(&mut self, nll: f64) {
        self.tokens += 1;
        self.sum += nll;
        self.sum_of_squares += nll * nll;
    }

    /// Tokens scored.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Mean negative log-likelihood of a token, in nats.
    pub fn mean_nll(&self) -> f64 {
        self.sum / self.tokens as f64
    }

    /// Perplexity, and the standard error that the number of tokens leaves.
    pub fn perplexity(&self) -> (f64, f64) {
        let (n, mean) = (self.tokens as f64, self.mean_nll());
        let variance = (self.sum_of_squares / n - mean * mean).max(0.0);
        let standard_error = if self.tokens > 1 {
            (variance / (n - 1.0)).sqrt()
        } else {
            0.0
        };
        (mean.exp(), mean.exp() * standard_error)
    }
}

/// Cuts a text of `n_tokens` into windows of `n_ctx`, and says from which token of a window on the scores count: the
/// first half of each window only gives context, so that every scored token has some. A text shorter than one window
/// is one window, scored from its second token on; what is left after the last full window is not scored.
pub(super) fn windows(
    n_tokens: usize,
    n_ctx: usize,
) -> Result<Vec<(Range<usize>, usize)>, EvalError> {
    let too_short = |needed| EvalError::TooShort {
        tokens: n_tokens,
        needed,
    };
    if n_ctx < 2 {
        return Err(EvalError::TooShort {
            tokens: n_ctx,
            needed: 2,
        });
    }
    match n_tokens {
        0 | 1 => Err(too_short(2)),
        n if n < n_ctx => Ok(vec![(0..n, 1)]),
        n => Ok((0..n / n_ctx)
            .map(|i| (i * n_ctx..(i + 1) * n_ctx, n_ctx / 2))
            .collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uniform_model_is_as_perplexed_as_its_vocabulary_is_large() {
        let mut score = Likelihood::default();
        for token in 0..10 {
            score.add(&[0.5; 50], token);
        }
        let (perplexity, error) = score.perplexity();
        assert!(
            (perplexity - 50.0).abs() < 1e-9 && error.abs() < 1e-5,
            "{perplexity} {error}"
        );
    }

    #[test]
    fn the_standard_error_is_that_of_the_mean() {
        let mut score = Likelihood::default();
        // Two tokens: nll ln 2 and ln 2 in one model, ln 4 and ln 4/3 in the other.
        score.add(&[0.0, 3f32.ln()], 0);
        score.add(&[0.0, 3f32.ln()], 1);
        let (a, b) = (4f64.ln(), (4.0 / 3.0f64).ln());
        let mean = (a + b) / 2.0;
        assert!((score.mean_nll() - mean).abs() < 1e-6);
        let expected = mean.exp() * ((a - b) / 2.0).abs();
        assert!((score.perplexity().1 - expected).abs() < 1e-6);
    }

    #[test]
    fn windows_do_not_overlap_and_leave_no_token_without_context() {
        assert_eq!(windows(10, 4).unwrap(), [(0..4, 2), (4..8, 2)]);
        assert_eq!(windows(3, 4).unwrap(), [(0..3, 1)]);
        assert_eq!(windows(4, 4).unwrap(), [(0..4, 2)]);
        for bad in [(0, 4), (1, 4), (10, 1), (10, 0)] {
            assert!(windows(bad.0, bad.1).is_err(), "{bad:?}");
        }
    }
}
