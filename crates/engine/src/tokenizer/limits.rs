//! Limits on what a file or a caller may ask of the tokenizer, each with its reason.

/// Tokens in a vocabulary. The largest real ones have 262 thousand; ids must stay below `u32::MAX`, which means "none".
pub const VOCAB_MAX: usize = 4 << 20;

/// Merges in a vocabulary. Real ones have up to 515 thousand.
pub const MERGES_MAX: usize = 8 << 20;

/// Bytes of one token. The longest real ones are runs of some hundred spaces; the bound keeps prefix walks short.
pub const TOKEN_BYTES_MAX: usize = 4096;

/// Bytes of all tokens together: offsets are 32 bits wide, and real vocabularies have 3 MB.
pub const VOCAB_BYTES_MAX: usize = 256 << 20;

/// Bytes of one text. A million tokens are 5 MB; the working memory is about 10 times the text, and 45 times where it is
/// one run that nothing splits.
pub const TEXT_BYTES_MAX: usize = 32 << 20;

/// Bytes of a `precompiled_charsmap`. Real ones have 240 kB.
pub const CHARSMAP_BYTES_MAX: usize = 16 << 20;
