//! The tokens of a vocabulary: their bytes, types and a table from bytes to id.
//!
//! Everything lies in a few flat arrays (262 thousand tokens take 7 MB). Texts are kept as the bytes they decode to:
//! byte-level texts through the byte alphabet, SentencePiece texts with spaces for U+2581. Encoding works on the
//! same bytes, so that nothing is translated there and back.

use super::alphabet;
use super::error::TokenizerError;
use super::hash::Key;
use super::limits;

/// No token.
pub(super) const NONE: u32 = u32::MAX;

/// SentencePiece's sign for a space, U+2581.
pub(super) const SPACE_SIGN: &[u8] = "\u{2581}".as_bytes();

/// What a token is for (`tokenizer.ggml.token_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenKind {
    /// Text.
    Normal,
    /// Stands for what the vocabulary lacks.
    Unknown,
    /// Structure, such as the begin of a text or a turn; not part of the text.
    Control,
    /// Text that is never cut.
    UserDefined,
    /// A place held free.
    Unused,
    /// One byte.
    Byte,
}

impl TokenKind {
    /// The type with this number in the file; what is not known counts as text.
    pub(super) fn from_number(number: i64) -> Self {
        match number {
            2 => TokenKind::Unknown,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            5 => TokenKind::Unused,
            6 => TokenKind::Byte,
            _ => TokenKind::Normal,
        }
    }
}

/// How token texts are written in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// In the byte alphabet.
    ByteLevel,
    /// As they are, with U+2581 for a space.
    SpaceSign,
}

/// The tokens.
#[derive(Debug)]
pub(super) struct Vocab {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    kinds: Vec<TokenKind>,
    /// Token of each single byte, or [`NONE`].
    byte_ids: [u32; 256],
    table: Table,
    /// Tokens that are found in a text before anything else, as the text itself has them.
    verbatim: Vec<u32>,
}

impl Vocab {
    /// Takes texts and types over from a file.
    pub(super) fn build<'a>(
        texts: impl ExactSizeIterator<Item = &'a [u8]>,
        kinds: Vec<TokenKind>,
        spelling: Spelling,
    ) -> Result<Self, TokenizerError> {
        let n_vocab = texts.len();
        let mut vocab = Vocab {
            bytes: Vec::new(),
            ends: Vec::with_capacity(n_vocab),
            kinds,
            byte_ids: [NONE; 256],
            table: Table::with_room_for(n_vocab),
            verbatim: Vec::new(),
        };
        for (id, text) in (0..).zip(texts) {
            vocab.push(id, text, spelling)?;
        }
        vocab.bytes.shrink_to_fit();
        if spelling == Spelling::ByteLevel {
            for byte in 0..=255 {
                vocab.byte_ids[usize::from(byte)] = vocab.find(&[byte]).unwrap_or(NONE);
            }
        }
        Ok(vocab)
    }

    fn push(&mut self, id: u32, text: &[u8], spelling: Spelling) -> Result<(), TokenizerError> {
        if text.len() > limits::TOKEN_BYTES_MAX {
            return Err(TokenizerError::TokenTooLong {
                id,
                len: text.len(),
            });
        }
        let start = self.bytes.len();
        let kind = self.kinds[id as usize];
        // Whether encoding may arrive at it by its bytes.
        let mut reachable = matches!(
            kind,
            TokenKind::Normal | TokenKind::UserDefined | TokenKind::Unused
        );
        let verbatim = match (kind, spelling) {
            (TokenKind::Control | TokenKind::Unknown, _) => {
                self.bytes.extend_from_slice(text);
                true
            }
            (TokenKind::Byte, _) => {
                let byte = byte_of(text).ok_or_else(|| TokenizerError::ByteToken {
                    id,
                    text: lossy(text),
                })?;
                self.bytes.push(byte);
                self.byte_ids[usize::from(byte)] = id;
                false
            }
            (_, Spelling::ByteLevel) => {
                // User-defined tokens are written as they are, not in the alphabet; merges speak of those for which both
                // are the same.
                if kind == TokenKind::UserDefined || !alphabet::decode(text, &mut self.bytes) {
                    reachable &= text.iter().all(u8::is_ascii_graphic);
                    self.bytes.extend_from_slice(text);
                }
                kind == TokenKind::UserDefined
            }
            (_, Spelling::SpaceSign) => {
                // Texts have signs where they had spaces when they are looked up, so a token with a space is never met.
                reachable &= !text.contains(&b' ');
                let mut rest = text;
                while let Some(at) = rest.windows(SPACE_SIGN.len()).position(|w| w == SPACE_SIGN) {
                    self.bytes.extend_from_slice(&rest[..at]);
                    self.bytes.push(b' ');
                    rest = &rest[at + SPACE_SIGN.len()..];
                }
                self.bytes.extend_from_slice(rest);
                // With a sign in it, it is found by its score among the other pieces.
                kind == TokenKind::UserDefined && rest.len() == text.len()
            }
        };
        if self.bytes.len() > limits::VOCAB_BYTES_MAX {
            return Err(TokenizerError::Length {
                key: "tokenizer.ggml.tokens",
                found: self.bytes.len(),
                expected: format!("at most {} bytes of text", limits::VOCAB_BYTES_MAX),
            });
        }
        self.ends.push(self.bytes.len() as u32);
        if start == self.bytes.len() {
            return Ok(());
        }
        if verbatim {
            self.verbatim.push(id);
        }
        if reachable {
            let Vocab {
                bytes, ends, table, ..
            } = self;
            if let Some(first) = table.insert(id, |id| slice(bytes, ends, id)) {
                return Err(TokenizerError::DuplicateToken {
                    first,
                    second: id,
                    text: lossy(text),
                });
            }
        }
        Ok(())
    }

    /// The number of tokens.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// What a token decodes to.
    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        slice(&self.bytes, &self.ends, id)
    }

    /// What a token is for.
    pub(super) fn kind(&self, id: u32) -> TokenKind {
        self.kinds[id as usize]
    }

    /// The token that encoding may make of these bytes.
    pub(super) fn find(&self, bytes: &[u8]) -> Option<u32> {
        self.table.find(bytes, |id| self.bytes(id))
    }

    /// The token of one byte, or [`NONE`].
    pub(super) fn byte_id(&self, byte: u8) -> u32 {
        self.byte_ids[usize::from(byte)]
    }

    /// Tokens that are looked for in the text as it is: control, unknown and user-defined ones.
    pub(super) fn verbatim(&self) -> &[u32] {
        &self.verbatim
    }
}

fn slice<'v>(bytes: &'v [u8], ends: &[u32], id: u32) -> &'v [u8] {
    let at = id as usize;
    let start = if at == 0 { 0 } else { ends[at - 1] as usize };
    &bytes[start..ends[at] as usize]
}

/// Text for a message.
pub(super) fn lossy(text: &[u8]) -> String {
    let shown = &text[..text.len().min(80)];
    String::from_utf8_lossy(shown).into_owned()
}

/// The byte that `<0x41>` means.
pub(super) fn byte_of(text: &[u8]) -> Option<u8> {
    let digits = text.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    if digits.len() != 2 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

/// Ids by their bytes: open addressing, at most half full.
#[derive(Debug)]
struct Table {
    key: Key,
    slots: Vec<u32>,
}

impl Table {
    fn with_room_for(n: usize) -> Self {
        Table {
            key: Key::random(),
            slots: vec![NONE; (2 * n).next_power_of_two().max(2)],
        }
    }

    /// Adds a token; returns the one with the same bytes, if there is one already.
    fn insert<'v>(&mut self, id: u32, bytes_of: impl Fn(u32) -> &'v [u8]) -> Option<u32> {
        let bytes = bytes_of(id);
        let mask = self.slots.len() - 1;
        let mut at = self.key.bytes(bytes) as usize & mask;
        while self.slots[at] != NONE {
            if bytes_of(self.slots[at]) == bytes {
                return Some(self.slots[at]);
            }
            at = (at + 1) & mask;
        }
        self.slots[at] = id;
        None
    }

    fn find<'v>(&self, bytes: &[u8], bytes_of: impl Fn(u32) -> &'v [u8]) -> Option<u32> {
        let mask = self.slots.len() - 1;
        let mut at = self.key.bytes(bytes) as usize & mask;
        while self.slots[at] != NONE {
            if bytes_of(self.slots[at]) == bytes {
                return Some(self.slots[at]);
            }
            at = (at + 1) & mask;
        }
        None
    }
}
