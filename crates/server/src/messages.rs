//! The Messages API, as Anthropic has it.

use engine::generate::Finish;
use engine::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

use crate::answer::{Sent, Telling, call_id};
use crate::answering::{Done, Piece};
use crate::conversation::{Conversation, call, content_text};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::read::{Expected, Said};
use crate::spoken::{Item, Spoken, Told};
use crate::tools::{Choice, Tools};

/// Reads a request.
pub fn conversation(fields: Fields<'_>) -> Result<Conversation, ApiError> {
    let mut messages = Vec::new();
    if let Some(system) = fields.get("system") {
        let text = content_text("system", system, &["text"])?;
        if !text.is_empty() {
            messages.push(json!({"role": "system", "content": text}));
        }
    }
    let given = fields.list("messages")?.unwrap_or_default();
    if given.is_empty() {
        let message = "'messages': expected a list of at least one message";
        return Err(ApiError::field("messages", message));
    }
    for (index, message) in given.iter().enumerate() {
        read_message(index, message, &mut messages)?;
    }
    let mut variables = Map::new();
    if let Some(thinking) = fields.object("thinking")? {
        // Templates that can switch it call it so.
        let is_on = thinking.text("type")? != Some("disabled");
        variables.insert("enable_thinking".to_owned(), json!(is_on));
    }
    Ok(Conversation {
        messages,
        tools: tools(fields)?,
        variables,
    })
}

fn read_message(index: usize, message: &Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let name = |rest: &str| format!("messages[{index}]{rest}");
    let role = match message["role"].as_str() {
        Some(role @ ("user" | "assistant" | "system")) => role,
        _ => {
            let message = format!("'{}': expected user or assistant", name(".role"));
            return Err(ApiError::field(name(".role"), message));
        }
    };
    let Value::Array(blocks) = &message["content"] else {
        let text = content_text(&name(".content"), &message["content"], &["text"])?;
        messages.push(json!({"role": role, "content": text}));
        return Ok(());
    };
    let (mut text, mut thinking, mut calls) = (String::new(), String::new(), Vec::new());
    for block in blocks {
        let of = |key: &str| block[key].as_str().unwrap_or_default();
        match (of("type"), role) {
            ("text", _) => text.push_str(of("text")),
            ("thinking", "assistant") => thinking.push_str(of("thinking")),
            ("redacted_thinking", "assistant") => {}
            ("tool_use", "assistant") => {
                calls.push(call(of("id"), of("name"), block["input"].clone()));
            }
            ("tool_result", "user") => {
                let name = name(".content");
                let result = match &block["content"] {
                    Value::Null => String::new(),
                    content => content_text(&name, content, &["text"])?,
                };
                // Results come before what the user says.
                messages.push(
                    json!({"role": "tool", "tool_call_id": of("tool_use_id"), "content": result}),
                );
            }
            (kind, _) => {
                let kind: String = kind.chars().take(40).collect();
                let message = format!(
                    "'{}': blocks of type '{kind}' are not supported here",
                    name(".content")
                );
                return Err(ApiError::unsupported(&name(".content"), message));
            }
        }
    }
    let said_nothing = text.is_empty() && calls.is_empty() && thinking.is_empty();
    if said_nothing && messages.last().is_some_and(|last| last["role"] == "tool") {
        return Ok(());
    }
    let mut message = json!({"role": role, "content": text});
    if !thinking.is_empty() {
        message["reasoning_content"] = json!(thinking);
    }
    if !calls.is_empty() {
        message["tool_calls"] = json!(calls);
    }
    messages.push(message);
    Ok(())
}

fn tools(fields: Fields<'_>) -> Result<Tools, ApiError> {
    let given = fields.list("tools")?.unwrap_or_default();
    let tools = given.iter().map(|tool| {
        json!({"type": "function", "function": {
            "name": tool["name"],
            "description": tool["description"].as_str().unwrap_or_default(),
            "parameters": tool["input_schema"],
        }})
    });
    let choice = match fields.object("tool_choice")? {
        None => Choice::Auto,
        Some(choice) => match choice.text("type")? {
            Some("auto") => Choice::Auto,
            Some("none") => Choice::None,
            Some("any") => Choice::Required,
            Some("tool") => Choice::Named(choice.text("name")?.unwrap_or_default().to_owned()),
            _ => {
                let message = "'tool_choice': expected type auto, any, tool or none";
                return Err(ApiError::field("tool_choice", message));
            }
        },
    };
    Tools::checked(tools.collect(), choice)
}

/// An answer.
#[derive(Debug)]
pub struct Message {
    id: String,
    model: String,
    stop: Vec<String>,
    spoken: Spoken,
    /// The stream's block that is open.
    open: Option<usize>,
}

impl Message {
    pub fn new(id: String, model: String, stop: Vec<String>, expected: Expected) -> Self {
        Self {
            id,
            model,
            stop,
            spoken: Spoken::new(expected),
            open: None,
        }
    }

    fn send(name: &'static str, mut data: Value, sent: &mut Vec<Sent>) {
        data["type"] = json!(name);
        sent.push(Sent {
            name: Some(name),
            data: data.to_string(),
        });
    }

    fn close(&mut self, sent: &mut Vec<Sent>) {
        if let Some(index) = self.open.take() {
            Self::send("content_block_stop", json!({"index": index}), sent);
        }
    }

    fn tell(&mut self, told: &[Told], sent: &mut Vec<Sent>) {
        for Told { said, item, begins } in told {
            if *begins {
                self.close(sent);
                let block = match said {
                    Said::Call(name) => {
                        let id = call_id(&self.id, 0, *item);
                        json!({"type": "tool_use", "id": id, "name": name, "input": {}})
                    }
                    Said::Reasoning(_) => {
                        json!({"type": "thinking", "thinking": "", "signature": ""})
                    }
                    Said::Text(_) | Said::Arguments(_) => json!({"type": "text", "text": ""}),
                };
                let data = json!({"index": item, "content_block": block});
                Self::send("content_block_start", data, sent);
                self.open = Some(*item);
            }
            let delta = match said {
                Said::Text(text) => json!({"type": "text_delta", "text": text}),
                Said::Reasoning(text) => json!({"type": "thinking_delta", "thinking": text}),
                Said::Call(_) => continue,
                Said::Arguments(text) => json!({"type": "input_json_delta", "partial_json": text}),
            };
            let data = json!({"index": item, "delta": delta});
            Self::send("content_block_delta", data, sent);
        }
    }

    fn stop_reason(&self) -> (Option<&'static str>, Option<&str>) {
        let Some(done) = &self.spoken.done else {
            return (None, None);
        };
        match done.finish {
            Finish::End | Finish::StopString if self.spoken.has_called() => {
                (Some("tool_use"), None)
            }
            Finish::End => (Some("end_turn"), None),
            // Which of several it was is not known.
            Finish::StopString => (
                Some("stop_sequence"),
                match &self.stop[..] {
                    [stop] => Some(stop.as_str()),
                    _ => None,
                },
            ),
            Finish::Length | Finish::ContextFull | Finish::Interrupted => {
                (Some("max_tokens"), None)
            }
        }
    }

    fn content(&self) -> Value {
        let block = |(index, item): (usize, &Item)| match item {
            Item::Text(text) => json!({"type": "text", "text": text}),
            Item::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
            Item::Call { name, arguments } => {
                let input: Value = serde_json::from_str(arguments).unwrap_or_else(|_| json!({}));
                json!({"type": "tool_use", "id": call_id(&self.id, 0, index), "name": name, "input": input})
            }
        };
        self.spoken.items.iter().enumerate().map(block).collect()
    }

    fn around(&self, content: Value) -> Value {
        let (reason, sequence) = self.stop_reason();
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage(self.spoken.done.as_ref()),
        })
    }
}

fn usage(done: Option<&Done>) -> Value {
    let (prompt, cached, generated) = done.map_or((0, 0, 0), |done| {
        (
            done.prompt_tokens,
            done.cached_tokens,
            done.generated_tokens,
        )
    });
    // What was there from before is counted apart.
    json!({
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": generated,
    })
}

/// An error as this API says it.
pub fn error_json(error: &ApiError) -> Value {
    let kind = match error.status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        400..500 => "invalid_request_error",
        _ => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.message()}})
}

impl Telling for Message {
    fn begin(&mut self, sent: &mut Vec<Sent>) {
        let message = self.around(json!([]));
        Self::send("message_start", json!({"message": message}), sent);
    }

    fn piece(&mut self, _: usize, piece: &Piece, _: &Tokenizer, sent: &mut Vec<Sent>) {
        let told = self.spoken.take(piece);
        self.tell(&told, sent);
    }

    fn done(&mut self, _: usize, done: Done, sent: &mut Vec<Sent>) {
        let told = self.spoken.end(done);
        self.tell(&told, sent);
        self.close(sent);
        let (reason, sequence) = self.stop_reason();
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        let data = json!({"delta": delta, "usage": usage(Some(&done))});
        Self::send("message_delta", data, sent);
        Self::send("message_stop", json!({}), sent);
    }

    fn is_complete(&self) -> bool {
        self.spoken.done.is_some()
    }

    fn failed(&mut self, error: &ApiError, sent: &mut Vec<Sent>) {
        Self::send("error", error_json(error), sent);
    }

    fn whole(&mut self, _: &Tokenizer) -> Value {
        self.around(self.content())
    }
}
