//! A conversation that is to be continued, whatever API it came by: its messages as templates expect them.

use std::time::SystemTime;

use engine::template::{ChatRequest, ChatTemplate, GenerationPrompt, TemplateError};
use engine::tokenizer::EncodeOptions;
use serde_json::{Map, Value, json};

use crate::Served;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::read::Expected;
use crate::tools::{self, Tools};

/// What a template writes.
#[derive(Debug)]
pub struct Conversation {
    pub messages: Vec<Value>,
    pub tools: Tools,
    pub variables: Map<String, Value>,
}

/// The tokens of a conversation, and what its answer may be.
#[derive(Debug)]
pub struct Written {
    pub tokens: Vec<u32>,
    pub expected: Expected,
}

impl Conversation {
    /// Reads a request to the chat API.
    pub fn of_chat(fields: Fields<'_>) -> Result<Self, ApiError> {
        let given = fields.list("messages")?.unwrap_or_default();
        if given.is_empty() {
            let message = "'messages': expected a list of at least one message";
            return Err(ApiError::field("messages", message));
        }
        let messages = given
            .iter()
            .enumerate()
            .map(|(index, message)| usual_message(index, message))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            messages,
            tools: Tools::of_chat(fields)?,
            variables: variables(fields)?,
        })
    }

    /// Writes it as the model's template has it.
    pub fn write(mut self, served: &Served) -> Result<Written, ApiError> {
        let Some(template) = &served.template else {
            let message = "this model has no chat template; /v1/completions continues a text";
            return Err(ApiError::invalid(message));
        };
        let shown = self.tools.shown();
        if !shown.is_empty() && !template.source().contains("tools") {
            let description = tools::description(shown);
            self.describe(&description);
        }
        let text = self.render(template)?;
        let source = template.source();
        let reasons = source.contains("</think>");
        let expected = Expected {
            reasons,
            begins_reasoning: reasons && text.trim_end().ends_with("<think>"),
            has_channels: source.contains("<|channel|>"),
            tools: self.tools.callable(),
        };
        let tokens = served.tokenizer.encode(text, EncodeOptions::CHAT);
        let tokens = tokens.map_err(|error| ApiError::invalid(error.to_string()))?;
        Ok(Written { tokens, expected })
    }

    /// Tells the model something before all else.
    fn describe(&mut self, text: &str) {
        match self.messages.first_mut() {
            Some(first) if first["role"] == "system" => {
                let content = first["content"].as_str().unwrap_or_default();
                first["content"] = json!(format!("{content}\n\n{text}"));
            }
            _ => self
                .messages
                .insert(0, json!({"role": "system", "content": text})),
        }
    }

    fn render(&self, template: &ChatTemplate) -> Result<String, ApiError> {
        template
            .render(&ChatRequest {
                messages: &self.messages,
                tools: self.tools.shown(),
                generation_prompt: GenerationPrompt::Add,
                variables: self.variables.clone(),
                now: SystemTime::now(),
            })
            .map_err(|error| {
                let what = match error {
                    TemplateError::Refused { message } => {
                        format!("refuses these messages: {message}")
                    }
                    TemplateError::Render { why, place } => format!("fails: {why}{place}"),
                    TemplateError::Endless { place } => format!("does not come to an end{place}"),
                    error => format!("cannot be used: {error}"),
                };
                ApiError::field("messages", format!("the model's chat template {what}"))
            })
    }
}

fn variables(fields: Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let mut variables = match fields.object("chat_template_kwargs")? {
        Some(variables) => variables.0.clone(),
        None => Map::new(),
    };
    // Templates that know it call it the same.
    if let Some(effort) = fields.text("reasoning_effort")? {
        variables.insert("reasoning_effort".to_owned(), json!(effort));
    }
    Ok(variables)
}

/// A call as templates expect it: arguments as an object.
pub fn call(id: &str, name: &str, arguments: Value) -> Value {
    let arguments = match arguments {
        Value::String(text) => match serde_json::from_str::<Map<String, Value>>(&text) {
            Ok(object) => Value::Object(object),
            Err(_) => Value::String(text),
        },
        arguments => arguments,
    };
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// The text of a content, which may come in parts of certain types.
pub fn content_text(name: &str, content: &Value, types: &[&str]) -> Result<String, ApiError> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let texts = parts.iter().map(|part| {
                let ty = part.get("type").and_then(Value::as_str).unwrap_or_default();
                let text = part.get("text").and_then(Value::as_str);
                text.filter(|_| types.contains(&ty))
            });
            let text: Option<String> = texts.collect();
            text.ok_or_else(|| {
                let message = format!("'{name}': only parts of type '{}' are supported", types[0]);
                ApiError::unsupported(name, message)
            })
        }
        _ => {
            let message = format!("'{name}': expected a text");
            Err(ApiError::field(name, message))
        }
    }
}

/// A message as templates expect it: plain text, arguments of calls as objects, and the roles that they know.
fn usual_message(index: usize, message: &Value) -> Result<Value, ApiError> {
    let name = |rest: &str| format!("messages[{index}]{rest}");
    let Some(object) = message.as_object() else {
        let message = format!("'{}': expected an object", name(""));
        return Err(ApiError::field(name(""), message));
    };
    let mut object = object.clone();
    let role = match object.get("role").and_then(Value::as_str) {
        Some("developer") => "system",
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
        _ => {
            let message = format!(
                "'{}': expected system, developer, user, assistant or tool",
                name(".role")
            );
            return Err(ApiError::field(name(".role"), message));
        }
    };
    let role = json!(role);
    let content = match object.get("content") {
        // An answer that was nothing but calls.
        None | Some(Value::Null) if object.contains_key("tool_calls") => String::new(),
        content => content_text(
            &name(".content"),
            content.unwrap_or(&Value::Null),
            &["text"],
        )?,
    };
    object.insert("role".to_owned(), role);
    object.insert("content".to_owned(), json!(content));
    if let Some(calls) = object.get_mut("tool_calls").and_then(Value::as_array_mut) {
        for call in calls {
            let arguments = call.pointer_mut("/function/arguments");
            if let Some(arguments) = arguments
                && let Some(parsed) = arguments
                    .as_str()
                    .and_then(|text| serde_json::from_str::<Map<_, _>>(text).ok())
            {
                *arguments = Value::Object(parsed);
            }
        }
    }
    Ok(Value::Object(object))
}
