//! A conversation, written down as the model's template wants it.

use anyhow::Result;
use engine::template::{ChatRequest, ChatTemplate, message};
use engine::tokenizer::{EncodeOptions, Tokenizer};
use gguf::Metadata;
use serde_json::Value;

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
