//! A conversation, written down as the model's template wants it.

use anyhow::{Context, Result};
use engine::template::{ChatRequest, ChatTemplate, message};
use engine::tokenizer::{EncodeOptions, Tokenizer};
use gguf::Metadata;
use serde::Deserialize;
use serde_json::Value;

/// A message that was kept.
#[derive(Deserialize)]
struct Message {
    role: String,
    content: String,
}

/// Messages so far, and how they become tokens.
pub struct Chat<'t> {
    template: ChatTemplate,
    tokenizer: &'t Tokenizer,
    system: Option<String>,
    messages: Vec<Value>,
}

impl<'t> Chat<'t> {
    /// A conversation in the file's own template, after a system message if there is one.
    pub fn new(
        metadata: &Metadata,
        tokenizer: &'t Tokenizer,
        system: Option<&str>,
    ) -> Result<Self> {
        let template = ChatTemplate::from_gguf(metadata, tokenizer)?;
        let mut chat = Self {
            template,
            tokenizer,
            system: system.map(str::to_owned),
            messages: Vec::new(),
        };
        chat.clear();
        Ok(chat)
    }

    /// Forgets what was said.
    pub fn clear(&mut self) {
        self.messages.clear();
        self.messages
            .extend(self.system.as_deref().map(|text| message("system", text)));
    }

    /// What was said, to be kept.
    pub fn note(&self) -> Result<String> {
        Ok(serde_json::to_string(&self.messages)?)
    }

    /// Goes on with what was kept, if anything was. A system message that is asked for now takes the place of the one of then. Returns the number of
    /// messages.
    pub fn resume(&mut self, note: &str) -> Result<usize> {
        if note.is_empty() {
            return Ok(0);
        }
        let kept: Vec<Message> =
            serde_json::from_str(note).context("what is kept of the conversation")?;
        let (system, said): (Vec<_>, Vec<_>) = kept.into_iter().partition(|m| m.role == "system");
        self.system = self
            .system
            .take()
            .or(system.into_iter().next().map(|m| m.content));
        self.clear();
        let messages = said.iter().map(|m| message(&m.role, &m.content));
        self.messages.extend(messages);
        Ok(said.len())
    }

    /// The user says something.
    pub fn ask(&mut self, text: &str) {
        self.messages.push(message("user", text));
    }

    /// The model said something.
    pub fn answered(&mut self, text: &str) {
        self.messages.push(message("assistant", text));
    }

    /// Takes the last message back.
    pub fn take_back(&mut self) {
        self.messages.pop();
    }

    /// The prompt for the next answer.
    pub fn tokens(&self) -> Result<Vec<u32>> {
        let text = self.template.render(&ChatRequest::new(&self.messages))?;
        Ok(self.tokenizer.encode(text, EncodeOptions::CHAT)?)
    }
}
