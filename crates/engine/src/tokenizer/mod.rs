//! Text to token ids and back, from the vocabulary in a GGUF file.
//!
//! Our own code rather than the `tokenizers` crate: built from flat arrays in a fraction of the time and memory,
//! defined on any bytes, and linear on hostile text. Start reading at [`Tokenizer::encode`].
//!
//! | file says (`tokenizer.ggml.model`) | text is cut by | tokens are found by |
//! |---|---|---|
//! | `gpt2` | a pre-tokenizer's patterns (`splitter`, `patterns`) | a list of merges (`merge`) |
//! | `llama` | places that no token spans | scores (`merge`) |
//! | `t5` | nothing | the best sum of scores (`unigram`) |
//! | `gemma4` | lines | a list of merges |
//!
//! Special tokens are cut out first (`special`).
//!
//! **Bytes that are no UTF-8** are encoded one by one: byte-level vocabularies have a token for each, SentencePiece ones
//! have byte tokens; only where neither exists do they become the unknown token. Pre-tokenizers see each of them as U+FFFD.

pub(crate) mod alphabet;
mod charsmap;
mod detokenize;
mod ends;
mod error;
mod hash;
mod limits;
mod merge;
mod parts;
mod pattern;
mod patterns;
mod special;
mod splitter;
mod unigram;
mod vocab;

use std::borrow::Cow;

use gguf::Metadata;

pub use detokenize::Detokenizer;
pub use error::TokenizerError;
pub use vocab::TokenKind;

use charsmap::Charsmap;
use detokenize::ByteDecoder;
use merge::{MergeList, Merger, Pairs, Scores};
use parts::{Model, Parts, Roles};
use special::{Fragment, SpecialTokens};
use splitter::Splitter;
use unigram::{Spaces, Unigram, char_len};
use vocab::{NONE, SPACE_SIGN, Spelling, Vocab};

/// What texts of special tokens within a text mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Specials {
    /// The special tokens. For templates and trusted prompts.
    #[default]
    Parse,
    /// Ordinary text that never becomes a control token. User-defined tokens are found all the same.
    Text,
}

/// Whether a token is put at an end of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Affix {
    /// As the model expects it.
    #[default]
    AsModel,
    /// As the model expects it, unless the text has it there already.
    Once,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// How to encode a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeOptions {
    /// What texts of special tokens mean.
    pub specials: Specials,
    /// Whether BOS goes before the text.
    pub bos: Affix,
    /// Whether EOS goes after it.
    pub eos: Affix,
}

impl EncodeOptions {
    /// For what a chat template wrote: special tokens as their text says, and BOS where the model expects one and the
    /// template leaves it to the tokenizer.
    pub const CHAT: EncodeOptions = EncodeOptions {
        specials: Specials::Parse,
        bos: Affix::Once,
        eos: Affix::Never,
    };

    /// Special tokens as their text says, and none added.
    pub const VERBATIM: EncodeOptions = EncodeOptions {
        specials: Specials::Parse,
        bos: Affix::Never,
        eos: Affix::Never,
    };
}

/// Whether control and unknown tokens appear in a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ControlText {
    /// They do not.
    #[default]
    Hide,
    /// They appear as they are written in the vocabulary.
    Show,
}

/// What happens to the space that some vocabularies add before a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeadingSpace {
    /// It goes: the tokens are a whole text.
    #[default]
    Strip,
    /// It stays: the tokens go on with a text.
    Keep,
}

/// How to decode tokens. The default is for whole texts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeOptions {
    /// Whether control tokens appear.
    pub control: ControlText,
    /// What happens to an added leading space.
    pub leading_space: LeadingSpace,
}

impl DecodeOptions {
    /// For tokens that go on with a text, such as generated ones.
    pub const CONTINUATION: DecodeOptions = DecodeOptions {
        control: ControlText::Hide,
        leading_space: LeadingSpace::Keep,
    };
}

/// How tokens are found in plain text.
#[derive(Debug)]
enum Algorithm {
    ByteLevel {
        splitter: Splitter,
        merges: MergeList,
        whole_words_first: bool,
    },
    SentencePiece {
        scores: Scores,
    },
    Unigram(Unigram),
    SpacedMerges {
        splitter: Splitter,
        merges: MergeList,
    },
}

/// A model's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    algorithm: Algorithm,
    /// All special tokens, and those that count in plain text too.
    specials: SpecialTokens,
    user_defined: SpecialTokens,
    roles: Roles,
    /// Sorted.
    ends: Vec<u32>,
    add_bos: bool,
    add_eos: bool,
    space_prefix: bool,
    warnings: Vec<String>,
}

impl Tokenizer {
    /// Builds it from a file's metadata (`tokenizer.ggml.*`).
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TokenizerError> {
        let mut parts = Parts::read(metadata)?;
        let ends::Ends {
            ids: ends,
            mut warnings,
        } = ends::find(&mut parts);
        let spelling = if parts.model == Model::ByteLevel {
            Spelling::ByteLevel
        } else {
            Spelling::SpaceSign
        };
        let vocab = Vocab::build(
            parts.tokens.iter(),
            std::mem::take(&mut parts.kinds),
            spelling,
        )?;

        let mut add_bos = matches!(parts.model, Model::SentencePiece | Model::SpacedMerges);
        let space_prefix = match parts.model {
            Model::SentencePiece => parts.add_space_prefix.unwrap_or(true),
            Model::Unigram => parts.add_space_prefix.unwrap_or(false),
            Model::ByteLevel | Model::SpacedMerges => false,
        };
        let algorithm = match parts.model {
            Model::ByteLevel => {
                let name = parts.pre.filter(|name| !name.is_empty()).unwrap_or_else(|| {
                    warnings.push("the file names no pre-tokenizer (`tokenizer.ggml.pre`); `default` is taken".to_owned());
                    "default"
                });
                let pattern =
                    patterns::find(name).ok_or_else(|| TokenizerError::UnknownPreTokenizer {
                        pre: name.to_owned(),
                    })?;
                add_bos = pattern.add_bos;
                Algorithm::ByteLevel {
                    splitter: Splitter::new(pattern.stages)
                        .expect("a test compiles every pattern of the table"),
                    merges: merge_list(&parts, &vocab, spelling)?,
                    whole_words_first: pattern.whole_words_first,
                }
            }
            Model::SentencePiece => {
                let scores = parts.scores.take().expect("read for this model");
                Algorithm::SentencePiece {
                    scores: Scores::build(&scores, &vocab),
                }
            }
            Model::Unigram => {
                let scores = parts.scores.take().expect("read for this model");
                let charsmap = parts
                    .charsmap
                    .as_deref()
                    .filter(|blob| !blob.is_empty())
                    .map(Charsmap::parse);
                let spaces = Spaces {
                    add: space_prefix,
                    squeeze: parts.remove_extra_whitespaces,
                    as_suffix: parts.whitespace_as_suffix,
                };
                Algorithm::Unigram(Unigram::build(
                    scores,
                    parts.roles.unknown,
                    charsmap.transpose()?,
                    spaces,
                    &vocab,
                ))
            }
            Model::SpacedMerges => Algorithm::SpacedMerges {
                splitter: Splitter::new(&[patterns::LINES]).expect("it compiles"),
                merges: merge_list(&parts, &vocab, spelling)?,
            },
        };
        // Gemma 4 does not work without, whatever its file says.
        let add_bos = parts.model == Model::SpacedMerges || parts.add_bos.unwrap_or(add_bos);
        let add_eos = parts.add_eos.unwrap_or(parts.model == Model::Unigram);
        for (add, id, key) in [
            (add_bos, parts.roles.bos, parts::BOS),
            (add_eos, parts.roles.eos, parts::EOS),
        ] {
            if add && id.is_none() {
                return Err(TokenizerError::MissingKey {
                    key,
                    model: "text-delimiting".to_owned(),
                });
            }
        }
        let user_defined = |&id: &u32| vocab.kind(id) == TokenKind::UserDefined;
        Ok(Tokenizer {
            specials: SpecialTokens::new(vocab.verbatim().to_vec(), &vocab),
            user_defined: SpecialTokens::new(
                vocab
                    .verbatim()
                    .iter()
                    .copied()
                    .filter(user_defined)
                    .collect(),
                &vocab,
            ),
            vocab,
            algorithm,
            roles: parts.roles,
            ends,
            add_bos,
            add_eos,
            space_prefix,
            warnings,
        })
    }

    /// The number of tokens.
    pub fn n_vocab(&self) -> usize {
        self.vocab.len()
    }

    /// What a token decodes to, its added space and all; `None` outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.kind(id).map(|_| self.vocab.bytes(id))
    }

    /// What a token is for; `None` outside the vocabulary.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        ((id as usize) < self.n_vocab()).then(|| self.vocab.kind(id))
    }

    /// Whether a generation ends with this token.
    pub fn is_eog(&self, id: u32) -> bool {
        self.ends.binary_search(&id).is_ok()
    }

    /// All tokens that end a generation, ascending.
    pub fn eog(&self) -> &[u32] {
        &self.ends
    }

    /// The begin of a text.
    pub fn bos(&self) -> Option<u32> {
        self.roles.bos
    }

    /// The end of a text.
    pub fn eos(&self) -> Option<u32> {
        self.roles.eos
    }

    /// The end of a turn.
    pub fn eot(&self) -> Option<u32> {
        self.roles.eot
    }

    /// The end of a message that is not the end of a turn.
    pub fn eom(&self) -> Option<u32> {
        self.roles.eom
    }

    /// Padding.
    pub fn pad(&self) -> Option<u32> {
        self.roles.pad
    }

    /// What stands for text that the vocabulary lacks.
    pub fn unknown(&self) -> Option<u32> {
        self.roles.unknown
    }

    /// Whether the model expects BOS before a text.
    pub fn adds_bos(&self) -> bool {
        self.add_bos
    }

    /// Whether the model expects EOS after a text.
    pub fn adds_eos(&self) -> bool {
        self.add_eos
    }

    /// What in the file had to be assumed or corrected, in sentences for the user.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// All tokens whose bytes contain `text`, ascending: what a text that breaks sequences (as for DRY) means in tokens.
    pub fn tokens_with(&self, text: &str) -> Vec<u32> {
        let contains = |bytes: &[u8]| {
            bytes
                .windows(text.len().max(1))
                .any(|w| w == text.as_bytes())
        };
        (0..self.n_vocab() as u32)
            .filter(|&id| contains(self.vocab.bytes(id)))
            .collect()
    }

    /// The tokens of a text, which may be any bytes.
    pub fn encode(
        &self,
        text: impl AsRef<[u8]>,
        options: EncodeOptions,
    ) -> Result<Vec<u32>, TokenizerError> {
        let text = text.as_ref();
        if text.len() > limits::TEXT_BYTES_MAX {
            return Err(TokenizerError::TextTooLong { len: text.len() });
        }
        let mut out = Vec::with_capacity(text.len() / 3 + 2);
        let specials = match options.specials {
            Specials::Parse => &self.specials,
            Specials::Text => &self.user_defined,
        };
        let mut merger = Merger::default();
        let mut after_special = true;
        for fragment in specials.cut(text, &self.vocab) {
            match fragment {
                Fragment::Token(id) => {
                    out.push(id);
                    after_special = true;
                }
                Fragment::Text(range) => {
                    self.encode_plain(&text[range], after_special, &mut merger, &mut out)?;
                    after_special = false;
                }
            }
        }
        let Roles { bos, eos, .. } = self.roles;
        if let Some(bos) = affix(
            "BOS",
            parts::BOS,
            options.bos,
            self.add_bos,
            bos,
            out.first(),
        )? {
            out.insert(0, bos);
        }
        out.extend(affix(
            "EOS",
            parts::EOS,
            options.eos,
            self.add_eos,
            eos,
            out.last(),
        )?);
        Ok(out)
    }

    /// Text without special tokens.
    fn encode_plain(
        &self,
        text: &[u8],
        after_special: bool,
        merger: &mut Merger,
        out: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        match &self.algorithm {
            Algorithm::ByteLevel {
                splitter,
                merges,
                whole_words_first,
            } => self.each_piece(splitter, text, |piece| {
                if *whole_words_first && let Some(id) = self.vocab.find(piece) {
                    out.push(id);
                    return Ok(());
                }
                for &byte in piece {
                    merger.push(1, self.vocab.byte_id(byte));
                }
                self.merge(merger, merges, piece, out)
            }),
            Algorithm::SentencePiece { scores } => {
                let text = with_spaces(text, self.space_prefix && after_special);
                let mut start = 0;
                let mut at = 0;
                while at < text.len() {
                    // No token spans this place, so what lies before it is cut as if it stood alone.
                    if at > start && !scores.may_join(text[at - 1], text[at]) {
                        self.merge(merger, scores, &text[start..at], out)?;
                        start = at;
                    }
                    at += self.push_char(merger, &text[at..]);
                }
                self.merge(merger, scores, &text[start..], out)
            }
            Algorithm::Unigram(unigram) => unigram.encode(text, &self.vocab, out),
            Algorithm::SpacedMerges { splitter, merges } => {
                let text = with_spaces(text, false);
                self.each_piece(splitter, &text, |piece| {
                    // Runs of line ends are tokens that no merges lead to.
                    if piece[0] == b'\n'
                        && let Some(id) = self.vocab.find(piece)
                    {
                        out.push(id);
                        return Ok(());
                    }
                    let mut at = 0;
                    while at < piece.len() {
                        at += self.push_char(merger, &piece[at..]);
                    }
                    self.merge(merger, merges, piece, out)
                })
            }
        }
    }

    fn each_piece<'t>(
        &self,
        splitter: &Splitter,
        text: &'t [u8],
        mut encode: impl FnMut(&'t [u8]) -> Result<(), TokenizerError>,
    ) -> Result<(), TokenizerError> {
        let mut start = 0;
        for end in splitter.piece_ends(text) {
            encode(&text[start..end])?;
            start = end;
        }
        Ok(())
    }

    /// Pushes the first character of `text` (or a byte that is none) and returns its length.
    fn push_char(&self, merger: &mut Merger, text: &[u8]) -> usize {
        let len = char_len(text).unwrap_or(1);
        merger.push(len, self.vocab.find(&text[..len]).unwrap_or(NONE));
        len
    }

    fn merge(
        &self,
        merger: &mut Merger,
        pairs: &impl Pairs,
        piece: &[u8],
        out: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        merger.run(pairs, &self.vocab, piece, |id, bytes| {
            if id != NONE {
                out.push(id);
                return Ok(());
            }
            match bytes
                .iter()
                .position(|&byte| self.vocab.byte_id(byte) == NONE)
            {
                None => out.extend(bytes.iter().map(|&byte| self.vocab.byte_id(byte))),
                Some(offset) => match self.roles.unknown {
                    Some(id) => out.push(id),
                    None => {
                        return Err(TokenizerError::NoTokenForByte {
                            byte: bytes[offset],
                            offset,
                        });
                    }
                },
            }
            Ok(())
        })
    }

    /// The bytes of a list of tokens.
    pub fn decode(&self, ids: &[u32], options: DecodeOptions) -> Result<Vec<u8>, TokenizerError> {
        let mut decoder = ByteDecoder::new(options);
        let mut out = Vec::with_capacity(4 * ids.len());
        for &id in ids {
            out.extend_from_slice(decoder.next(self, id)?);
        }
        Ok(out)
    }
}

fn merge_list(
    parts: &Parts<'_>,
    vocab: &Vocab,
    spelling: Spelling,
) -> Result<MergeList, TokenizerError> {
    MergeList::build(
        parts.merges.expect("read for this model").iter(),
        vocab,
        spelling,
    )
}

/// The token that goes to one end of a text, if any.
fn affix(
    which: &'static str,
    key: &'static str,
    affix: Affix,
    as_model: bool,
    id: Option<u32>,
    there: Option<&u32>,
) -> Result<Option<u32>, TokenizerError> {
    match affix {
        Affix::Never => Ok(None),
        Affix::AsModel => Ok(id.filter(|_| as_model)),
        Affix::Once => Ok(id.filter(|id| as_model && there != Some(id))),
        Affix::Always => id
            .map(Some)
            .ok_or(TokenizerError::NoSuchSpecial { which, key }),
    }
}

/// The text with spaces for U+2581, as the vocabulary has them, and one in front if asked for.
fn with_spaces(text: &[u8], prefix: bool) -> Cow<'_, [u8]> {
    let mut signs = text
        .windows(SPACE_SIGN.len())
        .enumerate()
        .filter(|(_, w)| *w == SPACE_SIGN)
        .map(|(at, _)| at)
        .peekable();
    if !prefix && signs.peek().is_none() {
        return Cow::Borrowed(text);
    }
    let mut out = Vec::with_capacity(text.len() + 1);
    out.extend(prefix.then_some(b' '));
    let mut start = 0;
    for at in signs {
        out.extend_from_slice(&text[start..at]);
        out.push(b' ');
        start = at + SPACE_SIGN.len();
    }
    out.extend_from_slice(&text[start..]);
    Cow::Owned(out)
}

#[cfg(test)]
mod tests;
