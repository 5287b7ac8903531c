//! Answers in the forms of the API: whole, or in chunks.

use engine::generate::Finish;
use engine::sampler::Logprobs;
use engine::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

use crate::answering::{Done, Piece};
use crate::prepare::Form;

/// What an answer's parts have in common, and how far it is.
#[derive(Debug)]
pub struct Answer {
    pub form: Form,
    pub id: String,
    pub created_unix_s: u64,
    pub model: String,
    /// Characters of the tokens so far, which `text_offset` counts.
    offset: usize,
}

/// The lowest logarithm that is told; JSON has no infinity.
const LOGPROB_MIN: f32 = -9999.0;

impl Answer {
    pub fn new(form: Form, id: String, created_unix_s: u64, model: String) -> Self {
        Self {
            form,
            id,
            created_unix_s,
            model,
            offset: 0,
        }
    }

    fn around(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created_unix_s,
            "model": self.model,
            "choices": choices,
        })
    }

    /// The complete answer; `logprobs` are given if they were asked for.
    pub fn whole(
        &mut self,
        piece: &Piece,
        done: &Done,
        with_logprobs: bool,
        tokenizer: &Tokenizer,
    ) -> Value {
        let logprobs = if with_logprobs {
            self.logprobs(&piece.tokens, tokenizer)
        } else {
            Value::Null
        };
        let finish = finish_reason(done.finish);
        let mut whole = match self.form {
            Form::Chat => {
                let message = json!({"role": "assistant", "content": piece.text, "refusal": null});
                self.around(
                    "chat.completion",
                    json!([{"index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish}]),
                )
            }
            Form::Text => self.around(
                "text_completion",
                json!([{"index": 0, "text": piece.text, "logprobs": logprobs, "finish_reason": finish}]),
            ),
        };
        whole["usage"] = usage(done);
        whole
    }

    fn chunk(&self, choices: Value) -> Value {
        let object = match self.form {
            Form::Chat => "chat.completion.chunk",
            Form::Text => "text_completion",
        };
        self.around(object, choices)
    }

    /// What a stream begins with, before there is text.
    pub fn first_chunk(&self) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        (self.form == Form::Chat).then(|| {
            self.chunk(
                json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": null}]),
            )
        })
    }

    /// Text as it comes.
    pub fn text_chunk(&mut self, piece: &Piece, tokenizer: &Tokenizer) -> Value {
        let logprobs = if piece.tokens.is_empty() {
            Value::Null
        } else {
            self.logprobs(&piece.tokens, tokenizer)
        };
        match self.form {
            Form::Chat => self.chunk(json!([{
                "index": 0, "delta": {"content": piece.text}, "logprobs": logprobs, "finish_reason": null,
            }])),
            Form::Text => self.chunk(json!([{
                "index": 0, "text": piece.text, "logprobs": logprobs, "finish_reason": null,
            }])),
        }
    }

    /// How it ended.
    pub fn last_chunk(&self, done: &Done) -> Value {
        let finish = finish_reason(done.finish);
        match self.form {
            Form::Chat => self.chunk(json!([{
                "index": 0, "delta": {}, "logprobs": null, "finish_reason": finish,
            }])),
            Form::Text => self.chunk(json!([{
                "index": 0, "text": "", "logprobs": null, "finish_reason": finish,
            }])),
        }
    }

    /// What it used, in a chunk of its own.
    pub fn usage_chunk(&self, done: &Done) -> Value {
        let mut chunk = self.chunk(json!([]));
        chunk["usage"] = usage(done);
        chunk
    }

    fn logprobs(&mut self, tokens: &[(u32, Logprobs)], tokenizer: &Tokenizer) -> Value {
        let bytes = |id: u32| tokenizer.token_bytes(id).unwrap_or_default();
        let text = |id: u32| String::from_utf8_lossy(bytes(id)).into_owned();
        match self.form {
            Form::Chat => {
                let entry = |id: u32, logprob: f32| json!({"token": text(id), "logprob": logprob.max(LOGPROB_MIN), "bytes": bytes(id)});
                let content = tokens.iter().map(|(id, of)| {
                    let mut of_token = entry(*id, of.token);
                    let top = of.top.iter().map(|&(id, x)| entry(id, x));
                    of_token["top_logprobs"] = top.collect();
                    of_token
                });
                json!({"content": content.collect::<Vec<_>>(), "refusal": null})
            }
            Form::Text => {
                let texts: Vec<String> = tokens.iter().map(|(id, _)| text(*id)).collect();
                let offsets = texts.iter().map(|text| {
                    let offset = self.offset;
                    self.offset += text.chars().count();
                    offset
                });
                let offsets: Vec<usize> = offsets.collect();
                let of_tokens = tokens.iter().map(|(_, of)| of.token.max(LOGPROB_MIN));
                let top = tokens.iter().map(|(_, of)| {
                    let top = of.top.iter();
                    top.map(|&(id, x)| (text(id), json!(x.max(LOGPROB_MIN))))
                        .collect::<Map<String, Value>>()
                });
                json!({
                    "tokens": texts,
                    "token_logprobs": of_tokens.collect::<Vec<f32>>(),
                    "top_logprobs": top.collect::<Vec<_>>(),
                    "text_offset": offsets,
                })
            }
        }
    }
}

fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::End | Finish::StopString => "stop",
        Finish::Length | Finish::ContextFull | Finish::Interrupted => "length",
    }
}

fn usage(done: &Done) -> Value {
    json!({
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.generated_tokens,
        "total_tokens": done.prompt_tokens + done.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
    })
}
