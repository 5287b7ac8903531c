//! Tokens to text, as they come.

use std::borrow::Borrow;

use super::error::TokenizerError;
use super::vocab::TokenKind;
use super::{ControlText, DecodeOptions, LeadingSpace, Tokenizer};

/// Turns tokens into bytes one by one, with what that needs to know of the ones before.
#[derive(Clone, Debug)]
pub(super) struct ByteDecoder {
    options: DecodeOptions,
    at_start: bool,
}

impl ByteDecoder {
    pub(super) fn new(options: DecodeOptions) -> Self {
        ByteDecoder {
            options,
            at_start: true,
        }
    }

    /// What the next token adds.
    pub(super) fn next<'t>(
        &mut self,
        tokenizer: &'t Tokenizer,
        id: u32,
    ) -> Result<&'t [u8], TokenizerError> {
        let n_vocab = tokenizer.n_vocab();
        if id as usize >= n_vocab {
            return Err(TokenizerError::IdOutOfRange { id, n_vocab });
        }
        let bytes = tokenizer.vocab.bytes(id);
        let structure = matches!(
            tokenizer.vocab.kind(id),
            TokenKind::Control | TokenKind::Unknown
        );
        if structure && self.options.control == ControlText::Hide {
            return Ok(&[]);
        }
        let first = std::mem::replace(&mut self.at_start, false);
        let strip = first
            && !structure
            && tokenizer.space_prefix
            && self.options.leading_space == LeadingSpace::Strip;
        Ok(if strip {
            bytes.strip_prefix(b" ").unwrap_or(bytes)
        } else {
            bytes
        })
    }
}

/// Turns tokens into text as they come. A character appears when its last byte is there, never in parts; bytes that are
/// no UTF-8 appear as U+FFFD. All pieces together are the lossy text of [`Tokenizer::decode`].
#[derive(Clone, Debug)]
pub struct Detokenizer<T> {
    tokenizer: T,
    decoder: ByteDecoder,
    /// The first bytes of a character.
    pending: Vec<u8>,
    text: String,
}

impl<T: Borrow<Tokenizer>> Detokenizer<T> {
    /// Starts a text. `tokenizer` is a reference, or an `Arc` for a stream that outlives its maker.
    pub fn new(tokenizer: T, options: DecodeOptions) -> Self {
        Detokenizer {
            tokenizer,
            decoder: ByteDecoder::new(options),
            pending: Vec::new(),
            text: String::new(),
        }
    }

    /// Takes the next token and returns the text that is complete now, often one word, sometimes nothing.
    pub fn push(&mut self, id: u32) -> Result<&str, TokenizerError> {
        self.text.clear();
        let bytes = self.decoder.next(self.tokenizer.borrow(), id)?;
        self.pending.extend_from_slice(bytes);
        let mut rest = &self.pending[..];
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    self.text.push_str(text);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    self.text
                        .push_str(std::str::from_utf8(valid).expect("valid up to here"));
                    rest = after;
                    let Some(n) = error.error_len() else { break };
                    self.text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[n..];
                }
            }
        }
        let done = self.pending.len() - rest.len();
        self.pending.drain(..done);
        Ok(&self.text)
    }

    /// Ends the text: what is left of an incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> &str {
        self.text.clear();
        if !self.pending.is_empty() {
            self.pending.clear();
            self.text.push(char::REPLACEMENT_CHARACTER);
        }
        &self.text
    }
}
