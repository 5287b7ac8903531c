//! From messages to a prompt, by the chat template that comes with the model.
//!
//! Templates are Jinja as Hugging Face's `transformers` runs it: blocks are trimmed, `tojson` does not escape for HTML, values
//! print as in Python, strings have Python's methods, and there are `raise_exception`, `strftime_now` (here in UTC, of a
//! moment that the caller gives) and `{% generation %}`.
//!
//! A template comes from a file, so it may be hostile: its size and depth are bounded, and so are the work of a rendering
//! and the text and values it makes. **Not bounded** is the memory of a list that is added to itself again and again
//! (`l + l`, 40 times): the template engine does not count that. A template can do nothing but make text: it reads no
//! file, no environment, no clock.

mod clock;
mod error;
mod limits;
mod python;

use std::borrow::Cow;
use std::time::SystemTime;

use gguf::Metadata;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::{Map, Value as Json, json};

pub use error::{Place, TemplateError};

use crate::tokenizer::Tokenizer;
use error::Refusal;

/// Whether the prompt ends with the begin of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GenerationPrompt {
    /// It does: the model is to answer.
    #[default]
    Add,
    /// It does not: the messages are only to be written down.
    Omit,
}

/// What a prompt is made of.
#[derive(Clone, Debug)]
pub struct ChatRequest<'a> {
    /// Objects with `role` and most often `content`, as in OpenAI's API; see [`message`].
    pub messages: &'a [Json],
    /// Descriptions of tools; none is an empty list.
    pub tools: &'a [Json],
    /// Whether the prompt ends with the begin of an answer.
    pub generation_prompt: GenerationPrompt,
    /// Other variables that the template may know, such as `enable_thinking`.
    pub variables: Map<String, Json>,
    /// The moment that the template may ask for.
    pub now: SystemTime,
}

impl<'a> ChatRequest<'a> {
    /// A request for an answer to these messages, now.
    pub fn new(messages: &'a [Json]) -> Self {
        ChatRequest {
            messages,
            tools: &[],
            generation_prompt: GenerationPrompt::Add,
            variables: Map::new(),
            now: SystemTime::now(),
        }
    }
}

/// A message of plain text.
pub fn message(role: &str, content: &str) -> Json {
    json!({"role": role, "content": content})
}

const KEY: &str = "tokenizer.chat_template";
const TOOLS_KEY: &str = "tokenizer.chat_template.tool_use";
const CHAT: &str = "chat";
const TOOLS: &str = "tools";

/// A model's chat template, ready to be used.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token` and the like, as templates call them.
    tokens: Vec<(&'static str, String)>,
    source: String,
    /// The one for requests with tools, where the file has one of its own.
    tools_source: Option<String>,
}

impl ChatTemplate {
    /// The file's template, and the texts of its tokens.
    pub fn from_gguf(metadata: &Metadata, tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        let text = |key: &str| {
            metadata.str(key).map_err(|e| TemplateError::BadKey {
                key: key.to_owned(),
                why: e.to_string(),
            })
        };
        let source = text(KEY)?.ok_or(TemplateError::Missing)?;
        let token = |id: Option<u32>| {
            let bytes = id
                .and_then(|id| tokenizer.token_bytes(id))
                .unwrap_or_default();
            String::from_utf8_lossy(bytes).into_owned()
        };
        let tokens = vec![
            ("bos_token", token(tokenizer.bos())),
            ("eos_token", token(tokenizer.eos())),
            ("pad_token", token(tokenizer.pad())),
            ("unk_token", token(tokenizer.unknown())),
        ];
        Self::build(source, text(TOOLS_KEY)?, tokens)
    }

    /// A template of one's own, with the texts that `bos_token` and `eos_token` stand for in it.
    pub fn from_source(source: &str, bos: &str, eos: &str) -> Result<Self, TemplateError> {
        Self::build(
            source,
            None,
            vec![("bos_token", bos.to_owned()), ("eos_token", eos.to_owned())],
        )
    }

    fn build(
        source: &str,
        tools_source: Option<&str>,
        tokens: Vec<(&'static str, String)>,
    ) -> Result<Self, TemplateError> {
        let mut environment = environment();
        for (name, source) in [(CHAT, Some(source)), (TOOLS, tools_source)] {
            let Some(source) = source else { continue };
            if source.len() > limits::TEMPLATE_BYTES_MAX {
                return Err(TemplateError::TooLong { len: source.len() });
            }
            environment
                .add_template_owned(name, without_generation_tags(source).into_owned())
                .map_err(|e| TemplateError::from_engine(&e, source))?;
        }
        Ok(ChatTemplate {
            environment,
            tokens,
            source: source.to_owned(),
            tools_source: tools_source.map(str::to_owned),
        })
    }

    /// The template as the file has it.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Writes the prompt. It has special tokens as text, so encode it with
    /// [`EncodeOptions::CHAT`](crate::tokenizer::EncodeOptions::CHAT).
    pub fn render(&self, request: &ChatRequest<'_>) -> Result<String, TemplateError> {
        for (index, message) in request.messages.iter().enumerate() {
            if !message.get("role").is_some_and(Json::is_string) {
                return Err(TemplateError::Message { index });
            }
        }
        let (name, source) = match &self.tools_source {
            Some(source) if !request.tools.is_empty() => (TOOLS, source),
            _ => (CHAT, &self.source),
        };
        let bytes: usize = request
            .messages
            .iter()
            .chain(request.tools)
            .map(json_bytes)
            .sum();
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(
            limits::FUEL_BASE + limits::FUEL_PER_BYTE * bytes as u64,
        ));
        let failed = |e: Error| TemplateError::from_engine(&e, source);
        let template = environment.get_template(name).map_err(failed)?;
        template.render(self.context(request)).map_err(failed)
    }

    fn context(&self, request: &ChatRequest<'_>) -> Value {
        let variables = request
            .variables
            .iter()
            .map(|(name, value)| (name.clone(), Value::from(Serde(value))));
        let tokens = self
            .tokens
            .iter()
            .map(|(name, text)| ((*name).to_owned(), Value::from(text.as_str())));
        let now = request.now;
        let strftime_now = move |format: &str| {
            clock::format(now, format).map_err(|why| Error::new(ErrorKind::InvalidOperation, why))
        };
        // Templates ask whether there are tools by comparing with none.
        let tools = if request.tools.is_empty() {
            Value::from(())
        } else {
            Value::from(Serde(request.tools))
        };
        let own = [
            ("messages", Value::from(Serde(request.messages))),
            ("tools", tools),
            ("documents", Value::from(())),
            (
                "add_generation_prompt",
                Value::from(request.generation_prompt == GenerationPrompt::Add),
            ),
            ("strftime_now", Value::from_function(strftime_now)),
        ];
        let own = own
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value));
        Value::from_pairs(variables.chain(tokens).chain(own))
    }
}

/// Everything that templates may use, except what belongs to one request.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    environment.set_syntax(syntax.expect("the usual delimiters"));
    environment.set_recursion_limit(limits::DEPTH_MAX);
    environment.set_unknown_method_callback(python::call_method);
    environment.set_formatter(python::print);
    environment.add_filter("tojson", python::to_json);
    environment.add_filter("string", |value: &Value| python::to_text(value));
    environment.add_function(
        "raise_exception",
        |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message.clone())
                .with_source(Refusal(message)))
        },
    );
    environment
}

/// About how many bytes a value has as text.
fn json_bytes(value: &Json) -> usize {
    match value {
        Json::String(text) => text.len() + 16,
        Json::Array(items) => 16 + items.iter().map(json_bytes).sum::<usize>(),
        Json::Object(fields) => {
            16 + fields
                .iter()
                .map(|(key, value)| key.len() + 16 + json_bytes(value))
                .sum::<usize>()
        }
        _ => 16,
    }
}

/// `{% generation %}` marks the model's part for training and writes nothing. The language has no such tag; a condition
/// that always holds has the same form, to the line and to the trimming of spaces.
fn without_generation_tags(source: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let mut copied = 0;
    let mut at = 0;
    while let Some(found) = source[at..].find("{%") {
        let open = at + found + 2;
        at = open;
        let Some(length) = source[open..].find("%}") else {
            break;
        };
        let inner = &source[open..open + length];
        let signs = ['-', '+'];
        let opening = &inner[..usize::from(inner.starts_with(signs))];
        let unopened = &inner[opening.len()..];
        let name = &unopened[..unopened.len() - usize::from(unopened.ends_with(signs))];
        let closing = &unopened[name.len()..];
        let replacement = match name.trim() {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        out.push_str(&source[copied..open]);
        out.push_str(opening);
        // The tag's own spaces stay, and with them its lines.
        out.push_str(&name.replace(name.trim(), &format!(" {replacement} ")));
        out.push_str(closing);
        copied = open + length;
        at = copied;
    }
    if copied == 0 {
        return Cow::Borrowed(source);
    }
    out.push_str(&source[copied..]);
    Cow::Owned(out)
}

#[cfg(test)]
mod tests;
