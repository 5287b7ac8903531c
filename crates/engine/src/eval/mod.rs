//! How good a model's output is: teacher-forced logits, their distance from a reference, perplexity.
//!
//! A model is told what to read and asked at each position what it expected next. [`Position`] is the summary of one
//! answer, as it is stored; [`Divergence`] compares two of them; [`Likelihood`] scores a text; [`LogitsHash`] tells
//! whether two runs agree to the last bit. [`compare`] runs two settings of a model side by side. [`niah`] asks it for what
//! was hidden in long texts. [`tiers`] does all of this for every form that a cache can have, and measures speed.

mod book;
mod comparison;
mod divergence;
mod excerpt;
mod likelihood;
pub mod niah;
mod position;
pub mod tiers;

use sha2::{Digest, Sha256};

pub use book::BOOK;
pub use comparison::{Agreement, Compared, Comparison, Feed, compare};
pub use divergence::{Divergence, KlSummary, MARGIN_MIN, Top1, kl_nats};
pub use excerpt::{Excerpt, excerpts};
pub use likelihood::Likelihood;
pub use position::{Position, log_sum_exp, read_positions, read_token_lines};

use crate::error::Error;
use crate::tokenizer::TokenizerError;
use std::path::PathBuf;

/// Why an evaluation cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvalError {
    /// A line of a file is not what it should be.
    #[error("{}, line {line}: {why}", file.display())]
    Line {
        /// The file.
        file: PathBuf,
        /// Counted from 1.
        line: usize,
        /// What was found and what was expected.
        why: String,
    },
    /// A file cannot be read.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A logit is not a number.
    #[error(
        "text {text}, position {pos}: the logit of token {token} is {value}, expected a finite number"
    )]
    NotFinite {
        /// Index of the text.
        text: usize,
        /// Position in the text.
        pos: usize,
        /// The token.
        token: usize,
        /// Its logit.
        value: f32,
    },
    /// Two runs do not belong together.
    #[error("the two runs differ at line {line}: {why}")]
    Mismatch {
        /// Counted from 1.
        line: usize,
        /// What differs.
        why: String,
    },
    /// A text has no tokens.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The model failed.
    #[error(transparent)]
    Model(#[from] Error),
    /// A text is too short to be scored.
    #[error("{tokens} tokens are too few: at least {needed} are needed")]
    TooShort {
        /// Tokens of the text.
        tokens: usize,
        /// What is needed at least.
        needed: usize,
    },
}

/// SHA-256 over the logits of all positions as little-endian f32: equal only where every bit is.
#[derive(Clone, Default)]
pub struct LogitsHash(Sha256);

impl LogitsHash {
    /// Takes the logits of the next position.
    pub fn update(&mut self, logits: &[f32]) {
        let mut bytes = [0; 4096];
        for chunk in logits.chunks(bytes.len() / 4) {
            for (to, x) in bytes.chunks_exact_mut(4).zip(chunk) {
                to.copy_from_slice(&x.to_le_bytes());
            }
            self.0.update(&bytes[..chunk.len() * 4]);
        }
    }

    /// The digest in lowercase hex.
    pub fn hex(&self) -> String {
        self.0
            .clone()
            .finalize()
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_that_of_the_little_endian_bytes() {
        let logits: Vec<f32> = (0..3000).map(|i| (i as f32).sin()).collect();
        let bytes: Vec<u8> = logits.iter().flat_map(|x| x.to_le_bytes()).collect();
        let expected: String = Sha256::digest(&bytes)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        let mut hash = LogitsHash::default();
        hash.update(&logits[..1001]);
        hash.update(&logits[1001..]);
        assert_eq!(hash.hex(), expected);
        let mut other = LogitsHash::default();
        other.update(&[0.0]);
        let mut negative = LogitsHash::default();
        negative.update(&[-0.0]);
        assert_ne!(other.hex(), negative.hex(), "bits, not values");
    }
}
