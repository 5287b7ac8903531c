//! What an answer has said so far: its parts, in order.

use engine::sampler::Logprobs;

use crate::answering::{Done, Piece};
use crate::read::{Expected, Reader, Said};

/// A part of an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Item {
    Text(String),
    Reasoning(String),
    Call {
        name: String,
        /// JSON.
        arguments: String,
    },
}

/// One answer of a request, as it comes.
#[derive(Debug)]
pub struct Spoken {
    reader: Reader,
    pub items: Vec<Item>,
    /// Its tokens, if probabilities were asked for.
    pub tokens: Vec<(u32, Logprobs)>,
    pub done: Option<Done>,
}

impl Spoken {
    pub fn new(expected: Expected) -> Self {
        Self {
            reader: Reader::new(expected),
            items: Vec::new(),
            tokens: Vec::new(),
            done: None,
        }
    }

    /// Takes a piece; what it says.
    pub fn take(&mut self, piece: &Piece) -> Vec<Said> {
        let mut said = Vec::new();
        self.reader.push(&piece.text, &mut said);
        self.add(&said);
        self.tokens.extend(piece.tokens.iter().cloned());
        said
    }

    /// Takes the end; what was held back until now.
    pub fn end(&mut self, done: Done) -> Vec<Said> {
        let mut said = Vec::new();
        self.reader.finish(&mut said);
        self.add(&said);
        self.done = Some(done);
        said
    }

    fn add(&mut self, said: &[Said]) {
        for said in said {
            match (self.items.last_mut(), said) {
                (Some(Item::Text(text)), Said::Text(more))
                | (Some(Item::Reasoning(text)), Said::Reasoning(more)) => text.push_str(more),
                (Some(Item::Call { arguments, .. }), Said::Arguments(more)) => {
                    arguments.push_str(more);
                }
                (_, Said::Text(text)) => self.items.push(Item::Text(text.clone())),
                (_, Said::Reasoning(text)) => self.items.push(Item::Reasoning(text.clone())),
                (_, Said::Call(name)) => self.items.push(Item::Call {
                    name: name.clone(),
                    arguments: String::new(),
                }),
                // Arguments follow their call.
                (_, Said::Arguments(_)) => {}
            }
        }
    }

    /// Whether tools were called.
    pub fn has_called(&self) -> bool {
        self.reader.has_called()
    }

    /// All text, or all reasoning.
    pub fn joined(&self, of: fn(&Item) -> Option<&str>) -> String {
        self.items.iter().filter_map(of).collect()
    }
}

impl Item {
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn reasoning(&self) -> Option<&str> {
        match self {
            Self::Reasoning(text) => Some(text),
            _ => None,
        }
    }
}
