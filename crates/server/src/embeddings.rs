//! Texts as vectors: what is asked, and what is answered.

use std::sync::Arc;
use std::time::Instant;

use engine::sampler::{Sampler, SamplerParams};
use engine::tokenizer::EncodeOptions;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::fields::Fields;
use crate::limits;
use crate::prepare::{check_model, object, token_ids};
use crate::queue::{Job, Reply};
use crate::state::State;

/// A request that makes sense.
#[derive(Debug)]
pub struct Asked {
    /// Tokens of each text.
    pub inputs: Vec<Vec<u32>>,
    /// Values of a vector.
    pub dimensions: usize,
    pub encoding: Encoding,
}

/// How a vector is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// A list of numbers.
    Floats,
    /// Their bytes, little end first, in base64.
    Base64,
}

/// Reads a request.
pub fn read(body: &[u8], state: &State) -> Result<Asked, ApiError> {
    let object = object(body)?;
    let fields = Fields(&object);
    check_model(fields, state)?;
    let Some(embedder) = &state.served.embedder else {
        return Err(ApiError::no_embeddings());
    };
    let width = embedder.width();
    let dimensions = fields.integer("dimensions", 1, width as i64)?;
    let encoding = match fields.text("encoding_format")? {
        None | Some("float") => Encoding::Floats,
        Some("base64") => Encoding::Base64,
        Some(_) => {
            let message = "'encoding_format': expected 'float' or 'base64'";
            return Err(ApiError::field("encoding_format", message));
        }
    };
    Ok(Asked {
        inputs: inputs(fields, state)?,
        dimensions: dimensions.map_or(width, |n| n as usize),
        encoding,
    })
}

/// A text, or tokens, or a list of one of these.
fn inputs(fields: Fields<'_>, state: &State) -> Result<Vec<Vec<u32>>, ApiError> {
    let wrong = || {
        let message =
            "'input': expected a text, a list of token ids, or a list of some of one of these";
        ApiError::field("input", message)
    };
    let tokenizer = &state.served.tokenizer;
    let one = |input: &Value| {
        let tokens = match input {
            Value::String(text) => tokenizer
                .encode(text, EncodeOptions::default())
                .map_err(|e| ApiError::field("input", e.to_string()))?,
            Value::Array(ids) => token_ids("input", ids, tokenizer)?,
            _ => return Err(wrong()),
        };
        if tokens.is_empty() {
            return Err(ApiError::field("input", "'input': a text has no tokens"));
        }
        if tokens.len() >= state.n_ctx {
            return Err(ApiError::too_long(tokens.len(), state.n_ctx));
        }
        Ok(tokens)
    };
    match fields.get("input").ok_or_else(wrong)? {
        Value::Array(all) if all.len() > limits::EMBEDDED_MAX && !all[0].is_number() => {
            let message = format!("'input': at most {} texts", limits::EMBEDDED_MAX);
            Err(ApiError::field("input", message))
        }
        Value::Array(all) if all.is_empty() => Err(wrong()),
        Value::Array(all) if !all[0].is_number() => all.iter().map(one).collect(),
        input => Ok(vec![one(input)?]),
    }
}

/// One text's job.
pub fn job(
    state: &State,
    tokens: &[u32],
    deadline: Instant,
    reply: Reply,
) -> Result<Job, ApiError> {
    // Nothing is chosen.
    let sampler = Sampler::new(SamplerParams::greedy(), state.served.tokenizer.n_vocab());
    Ok(Job {
        prompt: tokens.to_vec(),
        tokens_max: None,
        stop: Vec::new(),
        sampler: sampler.map_err(|e| ApiError::internal(e.to_string()))?,
        logprobs: None,
        deadline,
        constraint: None,
        marks: Arc::default(),
        pool: state.served.embedder.clone(),
        reply,
    })
}

/// The answer.
pub fn answer(model: &str, vectors: &[Vec<f32>], encoding: Encoding, tokens: usize) -> Value {
    let written = |vector: &[f32]| match encoding {
        Encoding::Floats => json!(vector),
        Encoding::Base64 => {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            json!(base64(&bytes))
        }
    };
    let data: Vec<Value> = vectors
        .iter()
        .enumerate()
        .map(|(i, v)| json!({"object": "embedding", "index": i, "embedding": written(v)}))
        .collect();
    json!({
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    })
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let byte = |i: usize| u32::from(three.get(i).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for i in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * i) & 63) as usize];
            text.push(if i <= three.len() { digit as char } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_as_everybody_has_it() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }
}
