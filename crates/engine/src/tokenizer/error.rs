//! What can be wrong with a tokenizer in a file, or with a text for it.

use super::limits;

/// Why a tokenizer could not be built, or a text not be encoded or decoded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The metadata lacks something that every tokenizer of this model needs.
    #[error("the file has no `{key}`, which a `{model}` tokenizer needs")]
    MissingKey {
        /// The metadata key.
        key: &'static str,
        /// `tokenizer.ggml.model`, or what is known of it.
        model: String,
    },
    /// A metadata value has the wrong type or content.
    #[error("`{key}`: {why}")]
    BadKey {
        /// The metadata key.
        key: String,
        /// What was found and what was expected.
        why: String,
    },
    /// `tokenizer.ggml.model` names something else.
    #[error("tokenizer model `{model}` (`tokenizer.ggml.model`) is not supported; supported are {}", super::parts::MODELS.join(", "))]
    UnknownModel {
        /// The name in the file.
        model: String,
    },
    /// `tokenizer.ggml.pre` names something else.
    #[error("pre-tokenizer `{pre}` (`tokenizer.ggml.pre`) is not known; known are {}", super::patterns::names().join(", "))]
    UnknownPreTokenizer {
        /// The name in the file.
        pre: String,
    },
    /// An array beside the token list has another length, or the list is empty or absurdly long.
    #[error("`{key}` has {found} entries, expected {expected}")]
    Length {
        /// The metadata key.
        key: &'static str,
        /// Entries found.
        found: usize,
        /// What would have been right.
        expected: String,
    },
    /// A token is longer than any real one.
    #[error(
        "token {id} has {len} bytes, more than the {} that a token may have",
        limits::TOKEN_BYTES_MAX
    )]
    TokenTooLong {
        /// The token.
        id: u32,
        /// Its length.
        len: usize,
    },
    /// Two tokens have the same text, so that encoding would be ambiguous.
    #[error("tokens {first} and {second} have the same text {text:?}")]
    DuplicateToken {
        /// The lower id.
        first: u32,
        /// The higher id.
        second: u32,
        /// Their text, as far as it is UTF-8.
        text: String,
    },
    /// A merge is not two texts separated by a space.
    #[error("merge {index} ({text:?}) is not two texts with a space between them")]
    MergeSyntax {
        /// Its place in `tokenizer.ggml.merges`.
        index: usize,
        /// The merge as it stands there.
        text: String,
    },
    /// A merge names a text that is no token.
    #[error("merge {index} ({text:?}): {part:?} is not in the vocabulary of {n_vocab} tokens")]
    MergeUnknownPart {
        /// Its place in `tokenizer.ggml.merges`.
        index: usize,
        /// The merge as it stands there.
        text: String,
        /// The missing text.
        part: String,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// A special token's id lies outside the vocabulary.
    #[error("`{key}` is {id}, but the vocabulary has only {n_vocab} tokens")]
    SpecialIdOutOfRange {
        /// The metadata key.
        key: &'static str,
        /// The id found.
        id: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// A score cannot be ordered.
    #[error("the score of token {id} is not a number")]
    ScoreNotANumber {
        /// The token.
        id: u32,
    },
    /// A byte token does not read `<0xXX>`.
    #[error("token {id} is marked as a byte but reads {text:?}, expected <0x00> to <0xFF>")]
    ByteToken {
        /// The token.
        id: u32,
        /// Its text.
        text: String,
    },
    /// `tokenizer.ggml.precompiled_charsmap` leads outside itself.
    #[error("`tokenizer.ggml.precompiled_charsmap`: {why}")]
    Charsmap {
        /// What and where.
        why: String,
    },
    /// The text holds a byte for which the vocabulary has neither a token nor an unknown token.
    #[error(
        "the vocabulary has no token for byte 0x{byte:02X} (byte {offset} of the piece) and no unknown token"
    )]
    NoTokenForByte {
        /// The byte.
        byte: u8,
        /// Where in the normalised piece of text it is.
        offset: usize,
    },
    /// The text is too long to be a prompt.
    #[error(
        "the text has {len} bytes, more than the {} that are encoded at once",
        limits::TEXT_BYTES_MAX
    )]
    TextTooLong {
        /// Its length.
        len: usize,
    },
    /// A BOS or EOS was asked for and the vocabulary has none.
    #[error("a {which} token was asked for, but the file names none (`{key}`)")]
    NoSuchSpecial {
        /// `BOS` or `EOS`.
        which: &'static str,
        /// The metadata key that would name it.
        key: &'static str,
    },
    /// An id to decode lies outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {n_vocab} tokens")]
    IdOutOfRange {
        /// The id.
        id: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
}
