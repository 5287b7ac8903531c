//! What can be wrong with what a decision is made from.

use crate::bytes::KvType;

/// Every way in which a model or a machine cannot be planned for.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A key that every plan needs is missing.
    #[error("key `{key}` is missing, expected {wanted}")]
    Missing {
        /// The whole key.
        key: String,
        /// What it should hold.
        wanted: &'static str,
    },

    /// A key holds what no model can have.
    #[error("key `{key}` {problem}")]
    Key {
        /// The whole key.
        key: String,
        /// What is wrong, as in "key ... is 0, expected 1 to 2048".
        problem: String,
    },

    /// A tensor does not fit the rest.
    #[error("tensor `{tensor}` {problem}")]
    Tensor {
        /// Its name.
        tensor: String,
        /// What is wrong.
        problem: String,
    },

    /// A number of bytes beyond 64 bits.
    #[error("{what} would take more than 2^64 bytes")]
    Overflow {
        /// What was added up.
        what: &'static str,
    },

    /// A block of a KV type does not divide the heads that it would store.
    #[error(
        "cache type {ty} needs heads of a multiple of {block}, but the {side} heads of layer {layer} have {head}: use f16",
        block = ty.block_len()
    )]
    KvBlock {
        /// The type.
        ty: KvType,
        /// `K` or `V`.
        side: &'static str,
        /// The first layer that it does not fit.
        layer: usize,
        /// Values of its heads.
        head: u64,
    },

    /// No such KV type.
    #[error(
        "cache type {found:?}: expected f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl"
    )]
    KvTypeName {
        /// What was given.
        found: String,
    },

    /// A cache that no engine makes.
    #[error("{what} of {found}: expected {expected}")]
    Option {
        /// Which one.
        what: &'static str,
        /// Its value.
        found: u64,
        /// What it can be.
        expected: &'static str,
    },

    /// A number of a machine's profile that no machine has.
    #[error("profile: {field} {problem}")]
    Profile {
        /// Its path, or the name it was set by.
        field: String,
        /// What is wrong, as in "is 0, expected 0.001 to 1000000 GB/s".
        problem: String,
    },

    /// A text that is no profile.
    #[error("profile: {problem}")]
    ProfileText {
        /// What is wrong, with line and column where there are any.
        problem: String,
    },

    /// A text that is no recording of windows, or of routing.
    #[error("recording: line {line} {problem}")]
    Recording {
        /// Which line, from 1.
        line: usize,
        /// What is wrong, as in "has version 2, expected 1".
        problem: String,
    },

    /// A profile that does not ship.
    #[error("no example profile {found:?}: expected one of {}", known.join(", "))]
    ProfileName {
        /// What was asked for.
        found: String,
        /// What there is.
        known: Vec<&'static str>,
    },
}
