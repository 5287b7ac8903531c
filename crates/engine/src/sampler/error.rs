//! What can be wrong with sampling settings or with logits.

/// Why a sampler could not be made or no token be chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SamplerError {
    /// A setting lies outside its range.
    #[error("sampling: {name} is {found}, expected {expected}")]
    Setting {
        /// The setting's name.
        name: &'static str,
        /// Its value.
        found: String,
        /// Its range.
        expected: &'static str,
    },
    /// A token in the settings, or accepted, lies outside the vocabulary.
    #[error("sampling: {name} names token {id}, but the vocabulary has {n_vocab} tokens")]
    TokenOutOfRange {
        /// Where it was named.
        name: &'static str,
        /// The token.
        id: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// There are more or fewer logits than tokens.
    #[error("{found} logits, expected {expected}, one for each token")]
    Length {
        /// Logits given.
        found: usize,
        /// Size of the vocabulary.
        expected: usize,
    },
    /// A logit is NaN or plus infinity: the model or its computation is broken.
    #[error(
        "the logit of token {id} is {logit}; the model's weights or its computation are broken"
    )]
    BadLogit {
        /// The lowest such token.
        id: u32,
        /// Its logit.
        logit: f32,
    },
    /// All logits are minus infinity.
    #[error("no token can be chosen: every logit is minus infinity")]
    NothingLeft,
}
