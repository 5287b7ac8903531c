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

/// Something said, and where it belongs.
#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    pub said: Said,
    /// The part's number among the answer's.
    pub item: usize,
    /// Whether the part begins with it.
    pub begins: bool,
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
    pub fn take(&mut self, piece: &Piece) -> Vec<Told> {
        let mut said = Vec::new();
        self.reader.push(&piece.text, &mut said);
        self.tokens.extend(piece.tokens.iter().cloned());
        self.add(said)
    }

    /// Takes the end; what was held back until now.
    pub fn end(&mut self, done: Done) -> Vec<Told> {
        let mut said = Vec::new();
        self.reader.finish(&mut said);
        self.done = Some(done);
        self.add(said)
    }

    fn add(&mut self, said: Vec<Said>) -> Vec<Told> {
        said.into_iter()
            .filter_map(|said| self.add_one(said))
            .collect()
    }

    fn add_one(&mut self, said: Said) -> Option<Told> {
        let begun = match (self.items.last_mut(), &said) {
            (Some(Item::Text(text)), Said::Text(more))
            | (Some(Item::Reasoning(text)), Said::Reasoning(more)) => {
                text.push_str(more);
                None
            }
            (Some(Item::Call { arguments, .. }), Said::Arguments(more)) => {
                arguments.push_str(more);
                None
            }
            (_, Said::Text(text)) => Some(Item::Text(text.clone())),
            (_, Said::Reasoning(text)) => Some(Item::Reasoning(text.clone())),
            (_, Said::Call(name)) => Some(Item::Call {
                name: name.clone(),
                arguments: String::new(),
            }),
            // Arguments follow their call.
            (_, Said::Arguments(_)) => return None,
        };
        let begins = begun.is_some();
        self.items.extend(begun);
        Some(Told {
            said,
            item: self.items.len() - 1,
            begins,
        })
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
