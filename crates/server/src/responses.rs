//! The Responses API, as OpenAI has it. Responses are not kept, so a conversation comes whole with every request.

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
use crate::tools::{Choice, Tools, named_choice};

/// Types of parts that are text.
const TEXTS: [&str; 3] = ["input_text", "output_text", "text"];

/// Reads a request.
pub fn conversation(fields: Fields<'_>) -> Result<Conversation, ApiError> {
    let mut messages = Vec::new();
    if let Some(instructions) = fields.text("instructions")? {
        messages.push(json!({"role": "system", "content": instructions}));
    }
    match fields.get("input") {
        Some(Value::String(text)) => messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) if !items.is_empty() => {
            for (index, item) in items.iter().enumerate() {
                read_item(index, item, &mut messages)?;
            }
        }
        _ => {
            let message = "'input': expected a text, or a list of at least one item";
            return Err(ApiError::field("input", message));
        }
    }
    let mut variables = Map::new();
    if let Some(reasoning) = fields.object("reasoning")?
        && let Some(effort) = reasoning.text("effort")?
    {
        variables.insert("reasoning_effort".to_owned(), json!(effort));
    }
    Ok(Conversation {
        messages,
        tools: tools(fields)?,
        variables,
    })
}

fn read_item(index: usize, item: &Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let name = |rest: &str| format!("input[{index}]{rest}");
    let of = |key: &str| item[key].as_str().unwrap_or_default();
    let kind = match of("type") {
        "" => "message",
        kind => kind,
    };
    match kind {
        "message" => {
            let role = match of("role") {
                "developer" => "system",
                role @ ("system" | "user" | "assistant") => role,
                _ => {
                    let message = format!(
                        "'{}': expected system, developer, user or assistant",
                        name(".role")
                    );
                    return Err(ApiError::field(name(".role"), message));
                }
            };
            let text = content_text(&name(".content"), &item["content"], &TEXTS)?;
            messages.push(json!({"role": role, "content": text}));
        }
        "function_call" => {
            let call = call(of("call_id"), of("name"), item["arguments"].clone());
            match messages.last_mut() {
                // Calls of one answer belong together.
                Some(last) if last["role"] == "assistant" => {
                    match last["tool_calls"].as_array_mut() {
                        Some(calls) => calls.push(call),
                        None => last["tool_calls"] = json!([call]),
                    }
                }
                _ => {
                    messages.push(json!({"role": "assistant", "content": "", "tool_calls": [call]}))
                }
            }
        }
        "function_call_output" => {
            let text = content_text(&name(".output"), &item["output"], &TEXTS)?;
            messages.push(json!({"role": "tool", "tool_call_id": of("call_id"), "content": text}));
        }
        // Models are not shown what they thought before.
        "reasoning" => {}
        kind => {
            let kind: String = kind.chars().take(40).collect();
            let message = format!(
                "'{}': items of type '{kind}' are not supported",
                name(".type")
            );
            return Err(ApiError::unsupported(&name(".type"), message));
        }
    }
    Ok(())
}

fn tools(fields: Fields<'_>) -> Result<Tools, ApiError> {
    let given = fields.list("tools")?.unwrap_or_default();
    for (index, tool) in given.iter().enumerate() {
        if tool["type"] != "function" {
            let message = format!("'tools[{index}].type': only 'function' is supported");
            return Err(ApiError::unsupported("tools", message));
        }
    }
    let tools = given.iter().map(|tool| {
        json!({"type": "function", "function": {
            "name": tool["name"],
            "description": tool["description"].as_str().unwrap_or_default(),
            "parameters": tool["parameters"],
        }})
    });
    let choice = match fields.get("tool_choice") {
        None => Choice::Auto,
        Some(Value::String(choice)) => named_choice(choice)?,
        Some(choice) => match choice["name"].as_str() {
            Some(name) => Choice::Named(name.to_owned()),
            None => named_choice("")?,
        },
    };
    Tools::checked(tools.collect(), choice)
}

/// An answer.
#[derive(Debug)]
pub struct Response {
    id: String,
    created_unix_s: u64,
    model: String,
    /// What the request said of these, repeated.
    asked: Map<String, Value>,
    spoken: Spoken,
    /// Events so far.
    events: usize,
    /// Items of the stream that are complete.
    complete: usize,
}

impl Response {
    pub fn new(
        id: String,
        created_unix_s: u64,
        model: String,
        asked: Map<String, Value>,
        expected: Expected,
    ) -> Self {
        Self {
            id,
            created_unix_s,
            model,
            asked,
            spoken: Spoken::new(expected),
            events: 0,
            complete: 0,
        }
    }

    fn send(&mut self, name: &'static str, mut data: Value, sent: &mut Vec<Sent>) {
        data["type"] = json!(name);
        data["sequence_number"] = json!(self.events);
        self.events += 1;
        sent.push(Sent {
            name: Some(name),
            data: data.to_string(),
        });
    }

    fn item_id(&self, index: usize, item: &Item) -> String {
        let prefix = match item {
            Item::Text(_) => "msg",
            Item::Reasoning(_) => "rs",
            Item::Call { .. } => "fc",
        };
        call_id(&self.id, 0, index).replacen("call", prefix, 1)
    }

    fn item_json(&self, index: usize, item: &Item, status: &str) -> Value {
        let id = self.item_id(index, item);
        match item {
            Item::Text(text) => {
                let content = if status == "in_progress" {
                    json!([])
                } else {
                    json!([text_part(text)])
                };
                json!({"id": id, "type": "message", "role": "assistant", "status": status, "content": content})
            }
            Item::Reasoning(text) => {
                json!({"id": id, "type": "reasoning", "summary": [], "status": status,
                    "content": [{"type": "reasoning_text", "text": text}]})
            }
            Item::Call { name, arguments } => {
                json!({"id": id, "type": "function_call", "call_id": call_id(&self.id, 0, index), "name": name,
                    "arguments": arguments, "status": status})
            }
        }
    }

    fn around(&self, status: &str, output: Value) -> Value {
        let asked = |key: &str, default: Value| self.asked.get(key).cloned().unwrap_or(default);
        let done = self.spoken.done.as_ref();
        let incomplete = match status {
            "incomplete" => json!({"reason": "max_output_tokens"}),
            _ => Value::Null,
        };
        json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created_unix_s,
            "status": status,
            "error": null,
            "incomplete_details": incomplete,
            "instructions": asked("instructions", Value::Null),
            "max_output_tokens": asked("max_output_tokens", Value::Null),
            "metadata": asked("metadata", json!({})),
            "model": self.model,
            "output": output,
            "parallel_tool_calls": asked("parallel_tool_calls", json!(true)),
            "previous_response_id": null,
            "reasoning": asked("reasoning", json!({"effort": null, "summary": null})),
            "store": false,
            "temperature": asked("temperature", Value::Null),
            "text": asked("text", json!({"format": {"type": "text"}})),
            "tool_choice": asked("tool_choice", json!("auto")),
            "tools": asked("tools", json!([])),
            "top_p": asked("top_p", Value::Null),
            "truncation": "disabled",
            "usage": done.map(usage),
        })
    }

    /// Completes the items of the stream before some index.
    fn complete(&mut self, until: usize, sent: &mut Vec<Sent>) {
        while self.complete < until {
            let index = self.complete;
            self.complete += 1;
            let item = self.spoken.items[index].clone();
            let id = self.item_id(index, &item);
            let at = json!({"item_id": id, "output_index": index});
            match &item {
                Item::Text(text) => {
                    let mut data = at.clone();
                    data["content_index"] = json!(0);
                    data["text"] = json!(text);
                    data["logprobs"] = json!([]);
                    self.send("response.output_text.done", data, sent);
                    let mut data = at;
                    data["content_index"] = json!(0);
                    data["part"] = text_part(text);
                    self.send("response.content_part.done", data, sent);
                }
                Item::Reasoning(text) => {
                    let mut data = at;
                    data["content_index"] = json!(0);
                    data["text"] = json!(text);
                    self.send("response.reasoning_text.done", data, sent);
                }
                Item::Call { name, arguments } => {
                    let mut data = at;
                    data["name"] = json!(name);
                    data["arguments"] = json!(arguments);
                    self.send("response.function_call_arguments.done", data, sent);
                }
            }
            let item = self.item_json(index, &item, "completed");
            let data = json!({"output_index": index, "item": item});
            self.send("response.output_item.done", data, sent);
        }
    }

    fn tell(&mut self, told: &[Told], sent: &mut Vec<Sent>) {
        for Told { said, item, begins } in told {
            let index = *item;
            let is_text = matches!(said, Said::Text(_));
            if *begins {
                self.complete(index, sent);
                let empty = match said {
                    Said::Text(_) => Item::Text(String::new()),
                    Said::Reasoning(_) => Item::Reasoning(String::new()),
                    Said::Call(name) | Said::Arguments(name) => Item::Call {
                        name: name.clone(),
                        arguments: String::new(),
                    },
                };
                let item = self.item_json(index, &empty, "in_progress");
                let id = item["id"].clone();
                let data = json!({"output_index": index, "item": item});
                self.send("response.output_item.added", data, sent);
                if is_text {
                    let data = json!({"item_id": id, "output_index": index, "content_index": 0, "part": text_part("")});
                    self.send("response.content_part.added", data, sent);
                }
            }
            let (name, text) = match said {
                Said::Text(text) => ("response.output_text.delta", text),
                Said::Reasoning(text) => ("response.reasoning_text.delta", text),
                Said::Call(_) => continue,
                Said::Arguments(text) => ("response.function_call_arguments.delta", text),
            };
            let id = self.item_id(index, &self.spoken.items[index]);
            let mut data = json!({"item_id": id, "output_index": index, "delta": text});
            if !matches!(said, Said::Arguments(_)) {
                data["content_index"] = json!(0);
            }
            if is_text {
                data["logprobs"] = json!([]);
            }
            self.send(name, data, sent);
        }
    }

    fn status(&self) -> &'static str {
        match self.spoken.done.as_ref().map(|done| done.finish) {
            None => "in_progress",
            Some(Finish::End | Finish::StopString) => "completed",
            Some(Finish::Length | Finish::ContextFull | Finish::Interrupted) => "incomplete",
        }
    }

    fn output(&self) -> Value {
        let items = self.spoken.items.iter().enumerate();
        items
            .map(|(index, item)| self.item_json(index, item, "completed"))
            .collect()
    }
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn usage(done: &Done) -> Value {
    json!({
        "input_tokens": done.prompt_tokens,
        "input_tokens_details": {"cached_tokens": done.cached_tokens},
        "output_tokens": done.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": done.prompt_tokens + done.generated_tokens,
    })
}

impl Telling for Response {
    fn begin(&mut self, sent: &mut Vec<Sent>) {
        for name in ["response.created", "response.in_progress"] {
            let response = self.around("in_progress", json!([]));
            self.send(name, json!({"response": response}), sent);
        }
    }

    fn piece(&mut self, _: usize, piece: &Piece, _: &Tokenizer, sent: &mut Vec<Sent>) {
        let told = self.spoken.take(piece);
        self.tell(&told, sent);
    }

    fn done(&mut self, _: usize, done: Done, sent: &mut Vec<Sent>) {
        let told = self.spoken.end(done);
        self.tell(&told, sent);
        self.complete(self.spoken.items.len(), sent);
        let status = self.status();
        let response = self.around(status, self.output());
        let name = match status {
            "completed" => "response.completed",
            _ => "response.incomplete",
        };
        self.send(name, json!({"response": response}), sent);
    }

    fn is_complete(&self) -> bool {
        self.spoken.done.is_some()
    }

    fn failed(&mut self, error: &ApiError, sent: &mut Vec<Sent>) {
        let mut response = self.around("failed", json!([]));
        response["error"] = json!({"code": "server_error", "message": error.message()});
        self.send("response.failed", json!({"response": response}), sent);
    }

    fn whole(&mut self, _: &Tokenizer) -> Value {
        self.around(self.status(), self.output())
    }
}
