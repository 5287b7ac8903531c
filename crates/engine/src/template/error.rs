//! What can go wrong between messages and a prompt.

use super::limits;

/// What helps in every case.
const HINT: &str = "`--raw` sends the prompt as it is, without a template";

/// Why there is no prompt.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The file has none; most such models are not trained to chat.
    #[error("the file has no chat template (`tokenizer.chat_template`); {HINT}")]
    Missing,
    /// The metadata value is no text.
    #[error("`{key}`: {why}")]
    BadKey {
        /// The metadata key.
        key: String,
        /// What was found and what was expected.
        why: String,
    },
    /// The template is longer than any real one.
    #[error(
        "the chat template has {len} bytes, at most {} are read; {HINT}",
        limits::TEMPLATE_BYTES_MAX
    )]
    TooLong {
        /// Its length.
        len: usize,
    },
    /// The template is not in the language.
    #[error("the chat template cannot be read: {why}{place}; {HINT}")]
    Syntax {
        /// What is wrong.
        why: String,
        /// In which line, with its text.
        place: Place,
    },
    /// The template itself refuses the messages.
    #[error("the chat template refuses these messages: {message}")]
    Refused {
        /// In the template's words.
        message: String,
    },
    /// The template fails on the messages.
    #[error("the chat template fails: {why}{place}; {HINT}")]
    Render {
        /// What is wrong.
        why: String,
        /// In which line, with its text.
        place: Place,
    },
    /// The template does more work, or makes more text, than any real one would.
    #[error("the chat template does not come to an end{place}; {HINT}")]
    Endless {
        /// Where it was stopped.
        place: Place,
    },
    /// A message is not an object with a role.
    #[error("message {index} has no `role`, a text such as \"user\"")]
    Message {
        /// Its place in the list.
        index: usize,
    },
}

/// A line of a template, for messages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// Its number, from 1; `None` where it is not known.
    pub line: Option<usize>,
    /// Its text, shortened.
    pub text: String,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.line {
            Some(line) if self.text.is_empty() => write!(f, " (line {line})"),
            Some(line) => write!(f, " (line {line}: `{}`)", self.text),
            None => Ok(()),
        }
    }
}

/// The template's own refusal, carried through the template engine.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Refusal(pub(super) String);

impl TemplateError {
    /// What an error of the template engine means; `source` is the template.
    pub(super) fn from_engine(error: &minijinja::Error, source: &str) -> Self {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(error) = cause {
            if let Some(Refusal(message)) = error.downcast_ref() {
                return TemplateError::Refused {
                    message: message.clone(),
                };
            }
            cause = error.source();
        }
        let line = error.line();
        let text = line
            .and_then(|n| source.lines().nth(n.saturating_sub(1)))
            .unwrap_or_default()
            .trim();
        let mut shown: String = text.chars().take(limits::SHOWN_CHARS_MAX).collect();
        if shown.len() < text.len() {
            shown.push('…');
        }
        let place = Place { line, text: shown };
        let why = match error.detail() {
            Some(detail) => format!("{}: {detail}", error.kind()),
            None => error.kind().to_string(),
        };
        match error.kind() {
            minijinja::ErrorKind::SyntaxError => TemplateError::Syntax { why, place },
            minijinja::ErrorKind::OutOfFuel => TemplateError::Endless { place },
            _ => TemplateError::Render { why, place },
        }
    }
}
