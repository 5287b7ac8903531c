//! Answers in the forms of the chat and text APIs: whole, or in chunks.

use engine::generate::Finish;
use engine::sampler::Logprobs;
use engine::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

use crate::answering::{Done, Piece};
use crate::error::ApiError;
use crate::read::{Expected, Said};
use crate::spoken::{Item, Spoken, Told};

/// An event of a stream.
#[derive(Debug, Clone, PartialEq)]
pub struct Sent {
    /// Its name, where the API has names.
    pub name: Option<&'static str>,
    pub data: String,
}

impl Sent {
    pub fn data(data: &Value) -> Self {
        Self {
            name: None,
            data: data.to_string(),
        }
    }
}

/// An answer in the form of some API.
pub trait Telling: Send {
    /// What a stream begins with.
    fn begin(&mut self, sent: &mut Vec<Sent>);
    /// A choice goes on.
    fn piece(&mut self, choice: usize, piece: &Piece, tokenizer: &Tokenizer, sent: &mut Vec<Sent>);
    /// A choice is complete.
    fn done(&mut self, choice: usize, done: Done, sent: &mut Vec<Sent>);
    /// Whether all choices are complete.
    fn is_complete(&self) -> bool;
    /// What a stream ends with if nothing more comes.
    fn failed(&mut self, error: &ApiError, sent: &mut Vec<Sent>) {
        sent.push(Sent::data(&error.json()));
    }
    /// The answer as one, once it is complete.
    fn whole(&mut self, tokenizer: &Tokenizer) -> Value;
}

/// Which of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Text,
}

/// Whether a stream ends with what was used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usage {
    Told,
    Untold,
}

/// What an answer's choices have in common, and how far they are.
#[derive(Debug)]
pub struct Answer {
    kind: Kind,
    id: String,
    created_unix_s: u64,
    model: String,
    usage: Usage,
    with_logprobs: bool,
    choices: Vec<Choice>,
}

#[derive(Debug)]
struct Choice {
    spoken: Spoken,
    /// Characters of the tokens so far, which `text_offset` counts.
    offset: usize,
    /// Calls that were told.
    calls: usize,
}

/// The lowest logarithm that is told; JSON has no infinity.
const LOGPROB_MIN: f32 = -9999.0;

impl Answer {
    #[allow(clippy::too_many_arguments, reason = "all that an answer is made of")]
    pub fn new(
        kind: Kind,
        id: String,
        created_unix_s: u64,
        model: String,
        usage: Usage,
        with_logprobs: bool,
        expected: &Expected,
        n: usize,
    ) -> Self {
        let choice = |_| Choice {
            spoken: Spoken::new(expected.clone()),
            offset: 0,
            calls: 0,
        };
        Self {
            kind,
            id,
            created_unix_s,
            model,
            usage,
            with_logprobs,
            choices: (0..n).map(choice).collect(),
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

    fn chunk(&self, choice: usize, what: Value, logprobs: Value, finish: Option<&str>) -> Sent {
        let (object, key) = match self.kind {
            Kind::Chat => ("chat.completion.chunk", "delta"),
            Kind::Text => ("text_completion", "text"),
        };
        let mut of_choice = json!({"index": choice});
        of_choice[key] = what;
        of_choice["logprobs"] = logprobs;
        of_choice["finish_reason"] = json!(finish);
        Sent::data(&self.around(object, json!([of_choice])))
    }

    /// Tells what was said, in chunks. Probabilities go with the first.
    fn tell(&mut self, choice: usize, told: &[Told], mut logprobs: Value, sent: &mut Vec<Sent>) {
        if told.is_empty() && !logprobs.is_null() {
            let nothing = match self.kind {
                Kind::Chat => json!({}),
                Kind::Text => json!(""),
            };
            sent.push(self.chunk(choice, nothing, logprobs, None));
            return;
        }
        for Told { said, .. } in told {
            let what = match (self.kind, said) {
                (Kind::Text, Said::Text(text)) => json!(text),
                // Without expectations there is nothing else in a text.
                (Kind::Text, _) => continue,
                (Kind::Chat, Said::Text(text)) => json!({"content": text}),
                (Kind::Chat, Said::Reasoning(text)) => json!({"reasoning_content": text}),
                (Kind::Chat, Said::Call(name)) => {
                    let index = self.choices[choice].calls;
                    self.choices[choice].calls += 1;
                    let id = call_id(&self.id, choice, index);
                    json!({"tool_calls": [{"index": index, "id": id, "type": "function",
                        "function": {"name": name, "arguments": ""}}]})
                }
                (Kind::Chat, Said::Arguments(text)) => {
                    let index = self.choices[choice].calls.saturating_sub(1);
                    json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
                }
            };
            sent.push(self.chunk(choice, what, logprobs.take(), None));
        }
    }

    fn finish_reason(&self, choice: usize) -> Option<&'static str> {
        let spoken = &self.choices[choice].spoken;
        let done = spoken.done.as_ref()?;
        Some(match done.finish {
            Finish::End | Finish::StopString if spoken.has_called() => "tool_calls",
            Finish::End | Finish::StopString => "stop",
            Finish::Length | Finish::ContextFull | Finish::Interrupted => "length",
        })
    }

    fn usage_json(&self) -> Value {
        let all = self.choices.iter().filter_map(|c| c.spoken.done.as_ref());
        usage(&all.copied().collect::<Vec<_>>())
    }

    fn message(&self, choice: usize) -> Value {
        let spoken = &self.choices[choice].spoken;
        let text = spoken.joined(Item::text);
        let content = if text.is_empty() && spoken.has_called() {
            Value::Null
        } else {
            json!(text)
        };
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        let reasoning = spoken.joined(Item::reasoning);
        if !reasoning.is_empty() {
            message["reasoning_content"] = json!(reasoning);
        }
        let calls = spoken.items.iter().filter_map(|item| match item {
            Item::Call { name, arguments } => Some((name, arguments)),
            _ => None,
        });
        let calls = calls.enumerate().map(|(index, (name, arguments))| {
            json!({"id": call_id(&self.id, choice, index), "type": "function",
                "function": {"name": name, "arguments": arguments}})
        });
        let calls: Vec<Value> = calls.collect();
        if !calls.is_empty() {
            message["tool_calls"] = json!(calls);
        }
        message
    }

    fn logprobs(
        &mut self,
        choice: usize,
        tokens: &[(u32, Logprobs)],
        tokenizer: &Tokenizer,
    ) -> Value {
        let bytes = |id: u32| tokenizer.token_bytes(id).unwrap_or_default();
        let text = |id: u32| String::from_utf8_lossy(bytes(id)).into_owned();
        match self.kind {
            Kind::Chat => {
                let entry = |id: u32, logprob: f32| json!({"token": text(id), "logprob": logprob.max(LOGPROB_MIN), "bytes": bytes(id)});
                let content = tokens.iter().map(|(id, of)| {
                    let mut of_token = entry(*id, of.token);
                    let top = of.top.iter().map(|&(id, x)| entry(id, x));
                    of_token["top_logprobs"] = top.collect();
                    of_token
                });
                json!({"content": content.collect::<Vec<_>>(), "refusal": null})
            }
            Kind::Text => {
                let texts: Vec<String> = tokens.iter().map(|(id, _)| text(*id)).collect();
                let offset = &mut self.choices[choice].offset;
                let offsets = texts.iter().map(|text| {
                    let before = *offset;
                    *offset += text.chars().count();
                    before
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

impl Telling for Answer {
    fn begin(&mut self, sent: &mut Vec<Sent>) {
        if self.kind == Kind::Chat {
            for choice in 0..self.choices.len() {
                let delta = json!({"role": "assistant", "content": ""});
                sent.push(self.chunk(choice, delta, Value::Null, None));
            }
        }
    }

    fn piece(&mut self, choice: usize, piece: &Piece, tokenizer: &Tokenizer, sent: &mut Vec<Sent>) {
        let told = self.choices[choice].spoken.take(piece);
        let logprobs = if piece.tokens.is_empty() {
            Value::Null
        } else {
            self.logprobs(choice, &piece.tokens, tokenizer)
        };
        self.tell(choice, &told, logprobs, sent);
    }

    fn done(&mut self, choice: usize, done: Done, sent: &mut Vec<Sent>) {
        let told = self.choices[choice].spoken.end(done);
        self.tell(choice, &told, Value::Null, sent);
        let nothing = match self.kind {
            Kind::Chat => json!({}),
            Kind::Text => json!(""),
        };
        let finish = self.finish_reason(choice);
        sent.push(self.chunk(choice, nothing, Value::Null, finish));
        if !self.is_complete() {
            return;
        }
        if self.usage == Usage::Told {
            let object = match self.kind {
                Kind::Chat => "chat.completion.chunk",
                Kind::Text => "text_completion",
            };
            let mut chunk = self.around(object, json!([]));
            chunk["usage"] = self.usage_json();
            sent.push(Sent::data(&chunk));
        }
        sent.push(Sent {
            name: None,
            data: "[DONE]".to_owned(),
        });
    }

    fn is_complete(&self) -> bool {
        self.choices.iter().all(|c| c.spoken.done.is_some())
    }

    fn whole(&mut self, tokenizer: &Tokenizer) -> Value {
        let choices = (0..self.choices.len()).map(|choice| {
            let logprobs = if self.with_logprobs {
                self.choices[choice].offset = 0;
                let tokens = std::mem::take(&mut self.choices[choice].spoken.tokens);
                self.logprobs(choice, &tokens, tokenizer)
            } else {
                Value::Null
            };
            let finish = self.finish_reason(choice);
            match self.kind {
                Kind::Chat => json!({"index": choice, "message": self.message(choice), "logprobs": logprobs, "finish_reason": finish}),
                Kind::Text => {
                    let text = self.choices[choice].spoken.joined(Item::text);
                    json!({"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish})
                }
            }
        });
        let choices: Value = choices.collect();
        let object = match self.kind {
            Kind::Chat => "chat.completion",
            Kind::Text => "text_completion",
        };
        let mut whole = self.around(object, choices);
        whole["usage"] = self.usage_json();
        whole
    }
}

/// The name of a call, which no other answer has.
pub fn call_id(answer: &str, choice: usize, index: usize) -> String {
    let unique = answer.split_once('-').map_or(answer, |(_, unique)| unique);
    format!("call_{}_{choice}_{index}", unique.replace('-', "_"))
}

/// What answers to the same prompt have used.
fn usage(done: &[Done]) -> Value {
    let prompt = done.first().map_or(0, |d| d.prompt_tokens);
    let cached = done.first().map_or(0, |d| d.cached_tokens);
    let generated: usize = done.iter().map(|d| d.generated_tokens).sum();
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    })
}
