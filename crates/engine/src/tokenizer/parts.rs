//! What a file's metadata says about its tokenizer, checked for type and length.

use gguf::{Array, Metadata, StringArray, Value};

use super::error::TokenizerError;
use super::limits;
use super::vocab::TokenKind;

/// What `tokenizer.ggml.model` may say.
pub(super) const MODELS: &[&str] = &["gpt2", "llama", "t5", "gemma4"];

/// How the vocabulary is searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Model {
    /// Byte-level BPE.
    ByteLevel,
    /// SentencePiece BPE with scores.
    SentencePiece,
    /// SentencePiece unigram.
    Unigram,
    /// BPE with merges over SentencePiece's spelling.
    SpacedMerges,
}

const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
pub(super) const BOS: &str = "tokenizer.ggml.bos_token_id";
pub(super) const EOS: &str = "tokenizer.ggml.eos_token_id";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const CHARSMAP: &str = "tokenizer.ggml.precompiled_charsmap";

/// The tokens that the file names by role.
#[derive(Clone, Debug, Default)]
pub(super) struct Roles {
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) eot: Option<u32>,
    pub(super) eom: Option<u32>,
    pub(super) unknown: Option<u32>,
    pub(super) pad: Option<u32>,
}

/// Everything about the tokenizer, as the file has it.
pub(super) struct Parts<'a> {
    pub(super) model: Model,
    pub(super) pre: Option<&'a str>,
    pub(super) tokens: &'a StringArray,
    pub(super) kinds: Vec<TokenKind>,
    pub(super) scores: Option<Vec<f32>>,
    pub(super) merges: Option<&'a StringArray>,
    pub(super) charsmap: Option<Vec<u8>>,
    pub(super) roles: Roles,
    pub(super) add_bos: Option<bool>,
    pub(super) add_eos: Option<bool>,
    pub(super) add_space_prefix: Option<bool>,
    pub(super) remove_extra_whitespaces: bool,
    pub(super) whitespace_as_suffix: bool,
}

fn bad_key(key: &str) -> impl FnOnce(gguf::Error) -> TokenizerError {
    let key = key.to_owned();
    move |error| TokenizerError::BadKey {
        key,
        why: error.to_string(),
    }
}

impl<'a> Parts<'a> {
    pub(super) fn read(metadata: &'a Metadata) -> Result<Self, TokenizerError> {
        let flag = |key: &str| metadata.bool(key).map_err(bad_key(key));
        let name = metadata
            .str("tokenizer.ggml.model")
            .map_err(bad_key("tokenizer.ggml.model"))?;
        let Some(name) = name else {
            return Err(TokenizerError::MissingKey {
                key: "tokenizer.ggml.model",
                model: "usable".to_owned(),
            });
        };
        let missing = |key| TokenizerError::MissingKey {
            key,
            model: name.to_owned(),
        };
        let model = match name {
            "gpt2" => Model::ByteLevel,
            "llama" => Model::SentencePiece,
            "t5" => Model::Unigram,
            "gemma4" => Model::SpacedMerges,
            _ => {
                return Err(TokenizerError::UnknownModel {
                    model: name.to_owned(),
                });
            }
        };
        let tokens = metadata
            .strings(TOKENS)
            .map_err(bad_key(TOKENS))?
            .ok_or_else(|| missing(TOKENS))?;
        let n_vocab = tokens.len();
        if n_vocab == 0 || n_vocab > limits::VOCAB_MAX {
            let expected = format!("1 to {}", limits::VOCAB_MAX);
            return Err(TokenizerError::Length {
                key: TOKENS,
                found: n_vocab,
                expected,
            });
        }
        let same_length = |key, found: usize| {
            if found == n_vocab {
                return Ok(());
            }
            Err(TokenizerError::Length {
                key,
                found,
                expected: format!("{n_vocab}, one for each token"),
            })
        };
        let kinds = match metadata.ints(TYPES).map_err(bad_key(TYPES))? {
            Some(types) => {
                same_length(TYPES, types.len())?;
                types.into_iter().map(TokenKind::from_number).collect()
            }
            None => vec![TokenKind::Normal; n_vocab],
        };
        let needs_scores = matches!(model, Model::SentencePiece | Model::Unigram);
        let scores = if needs_scores {
            read_scores(metadata)?
        } else {
            None
        };
        if let Some(scores) = &scores {
            same_length(SCORES, scores.len())?;
            if let Some(id) = scores.iter().position(|score| !score.is_finite()) {
                return Err(TokenizerError::ScoreNotANumber { id: id as u32 });
            }
        } else if needs_scores {
            return Err(missing(SCORES));
        }
        let needs_merges = matches!(model, Model::ByteLevel | Model::SpacedMerges);
        let merges = if needs_merges {
            metadata.strings(MERGES).map_err(bad_key(MERGES))?
        } else {
            None
        };
        if needs_merges && merges.is_none() {
            return Err(missing(MERGES));
        }
        Ok(Parts {
            model,
            pre: metadata
                .str("tokenizer.ggml.pre")
                .map_err(bad_key("tokenizer.ggml.pre"))?,
            tokens,
            kinds,
            scores,
            merges,
            charsmap: if model == Model::Unigram {
                read_bytes(metadata)?
            } else {
                None
            },
            roles: read_roles(metadata, model, n_vocab)?,
            add_bos: flag(ADD_BOS)?,
            add_eos: flag(ADD_EOS)?,
            add_space_prefix: flag("tokenizer.ggml.add_space_prefix")?,
            remove_extra_whitespaces: flag("tokenizer.ggml.remove_extra_whitespaces")?
                .unwrap_or(false),
            whitespace_as_suffix: flag("tokenizer.ggml.treat_whitespace_as_suffix")?
                .unwrap_or(false),
        })
    }
}

/// Scores are floats; some files have integers.
fn read_scores(metadata: &Metadata) -> Result<Option<Vec<f32>>, TokenizerError> {
    match metadata.floats(SCORES) {
        Ok(scores) => Ok(scores),
        Err(error) => match metadata.ints(SCORES) {
            Ok(Some(scores)) => Ok(Some(scores.into_iter().map(|score| score as f32).collect())),
            _ => Err(bad_key(SCORES)(error)),
        },
    }
}

fn read_bytes(metadata: &Metadata) -> Result<Option<Vec<u8>>, TokenizerError> {
    match metadata.get(CHARSMAP) {
        None => Ok(None),
        Some(Value::Array(Array::U8(bytes))) => Ok(Some(bytes.to_vec())),
        Some(Value::Array(Array::I8(bytes))) => {
            Ok(Some(bytes.iter().map(|&b| b.cast_unsigned()).collect()))
        }
        Some(other) => Err(TokenizerError::BadKey {
            key: CHARSMAP.to_owned(),
            why: format!("found {}, expected array of u8", other.type_name()),
        }),
    }
}

fn read_roles(metadata: &Metadata, model: Model, n_vocab: usize) -> Result<Roles, TokenizerError> {
    // Where a file does not say: the places that these tokens have in SentencePiece's and T5's vocabularies.
    let (bos, eos, unknown, pad) = match model {
        Model::SentencePiece => (Some(1), Some(2), Some(0), None),
        Model::Unigram => (None, Some(1), Some(2), Some(0)),
        Model::ByteLevel | Model::SpacedMerges => (None, None, None, None),
    };
    let role = |key: &'static str, default: Option<u32>| {
        // Minus one is how some converters write "none".
        let id = match metadata.get(key).and_then(Value::as_integer) {
            Some(-1 | 0xFFFF_FFFF) => None,
            _ => metadata.u32(key).map_err(bad_key(key))?,
        };
        match id {
            Some(id) if id as usize >= n_vocab => {
                Err(TokenizerError::SpecialIdOutOfRange { key, id, n_vocab })
            }
            Some(id) => Ok(Some(id)),
            None if metadata.get(key).is_some() => Ok(None),
            None => Ok(default.filter(|&id| (id as usize) < n_vocab)),
        }
    };
    Ok(Roles {
        bos: role(BOS, bos)?,
        eos: role(EOS, eos)?,
        eot: role("tokenizer.ggml.eot_token_id", None)?,
        eom: role("tokenizer.ggml.eom_token_id", None)?,
        unknown: role("tokenizer.ggml.unknown_token_id", unknown)?,
        pad: role("tokenizer.ggml.padding_token_id", pad)?,
    })
}
