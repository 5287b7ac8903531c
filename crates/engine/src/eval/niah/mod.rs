//! Needles in a haystack: whether a model finds, in a long text, what it is then asked for.
//!
//! The eight retrieval tasks of RULER (Hsieh et al. 2024, arXiv 2404.06654), with wording and text of our own: facts of
//! the form "the secret number of KEY is VALUE" are hidden in a text at random depths, and some are asked for.
//!
//! | task | haystack | keys | values | hidden | asked |
//! |---|---|---|---|---|---|
//! | `niah_single_1` | the same few sentences | words | number | 1 | 1 |
//! | `niah_single_2` | a novel | words | number | 1 | 1 |
//! | `niah_single_3` | a novel | words | UUID | 1 | 1 |
//! | `niah_multikey_1` | a novel | words | number | 4 keys | 1 |
//! | `niah_multikey_2` | other such facts | words | number | 1 | 1 |
//! | `niah_multikey_3` | other such facts | UUID | UUID | 1 | 1 |
//! | `niah_multivalue` | a novel | words | number | 1 key, 4 values | all 4 |
//! | `niah_multiquery` | a novel | words | number | 4 keys | all 4 |
//!
//! A prompt is a function of task, length, seed and how tokens are counted ([`Prompt::generate`]), the same on every
//! machine. [`run`] asks a model and scores its answers ([`score`]).

mod draws;
mod prompt;
mod run;
mod words;

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

pub use prompt::Prompt;
pub use run::{Asked, Format, NiahError, Outcome, Report, TaskScore, run};

use crate::template::TemplateError;
use crate::tokenizer::TokenizerError;
use draws::Kind;

/// Most tokens of an answer, as in RULER: enough for four numbers with their keys, or for some words before a UUID.
pub const ANSWER_TOKENS_MAX: usize = 128;

/// One of the tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Task {
    /// A number in sentences that repeat.
    #[serde(rename = "niah_single_1")]
    Single1,
    /// A number in a novel.
    #[serde(rename = "niah_single_2")]
    Single2,
    /// A UUID in a novel.
    #[serde(rename = "niah_single_3")]
    Single3,
    /// One of four numbers in a novel.
    #[serde(rename = "niah_multikey_1")]
    MultiKey1,
    /// A number in nothing but such facts.
    #[serde(rename = "niah_multikey_2")]
    MultiKey2,
    /// A UUID in nothing but such facts, and the keys are UUIDs as well.
    #[serde(rename = "niah_multikey_3")]
    MultiKey3,
    /// Four numbers of one key.
    #[serde(rename = "niah_multivalue")]
    MultiValue,
    /// The numbers of four keys.
    #[serde(rename = "niah_multiquery")]
    MultiQuery,
}

/// What surrounds the needles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Haystack {
    /// A few sentences, again and again.
    Noise,
    /// A novel, again and again.
    Book,
    /// Needles that nobody asks for.
    Needles,
}

/// What a task is made of.
#[derive(Debug, Clone, Copy)]
struct Shape {
    haystack: Haystack,
    key: Kind,
    value: Kind,
    keys: usize,
    values_per_key: usize,
    keys_asked: usize,
}

impl Task {
    /// All of them, in RULER's order.
    pub const ALL: [Self; 8] = [
        Self::Single1,
        Self::Single2,
        Self::Single3,
        Self::MultiKey1,
        Self::MultiKey2,
        Self::MultiKey3,
        Self::MultiValue,
        Self::MultiQuery,
    ];

    /// RULER's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Single1 => "niah_single_1",
            Self::Single2 => "niah_single_2",
            Self::Single3 => "niah_single_3",
            Self::MultiKey1 => "niah_multikey_1",
            Self::MultiKey2 => "niah_multikey_2",
            Self::MultiKey3 => "niah_multikey_3",
            Self::MultiValue => "niah_multivalue",
            Self::MultiQuery => "niah_multiquery",
        }
    }

    fn shape(self) -> Shape {
        let single = Shape {
            haystack: Haystack::Book,
            key: Kind::Words,
            value: Kind::Number,
            keys: 1,
            values_per_key: 1,
            keys_asked: 1,
        };
        match self {
            Self::Single1 => Shape {
                haystack: Haystack::Noise,
                ..single
            },
            Self::Single2 => single,
            Self::Single3 => Shape {
                value: Kind::Code,
                ..single
            },
            Self::MultiKey1 => Shape { keys: 4, ..single },
            Self::MultiKey2 => Shape {
                haystack: Haystack::Needles,
                ..single
            },
            Self::MultiKey3 => Shape {
                haystack: Haystack::Needles,
                key: Kind::Code,
                value: Kind::Code,
                ..single
            },
            Self::MultiValue => Shape {
                values_per_key: 4,
                ..single
            },
            Self::MultiQuery => Shape {
                keys: 4,
                keys_asked: 4,
                ..single
            },
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Task {
    type Err = UnknownTask;

    fn from_str(name: &str) -> Result<Self, UnknownTask> {
        let named = |task: &Self| task.name() == name;
        Self::ALL
            .into_iter()
            .find(named)
            .ok_or_else(|| UnknownTask(name.to_owned()))
    }
}

/// A name that no task has.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no task {0:?}, expected niah_single_1 to 3, niah_multikey_1 to 3, niah_multivalue or niah_multiquery"
)]
pub struct UnknownTask(String);

/// Why a prompt cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// Not even the question has room.
    #[error(
        "{task}: the question alone has {needed} tokens, there is room for {room} beside an answer of {ANSWER_TOKENS_MAX}"
    )]
    TooShort {
        /// The task.
        task: Task,
        /// Tokens of the shortest prompt.
        needed: usize,
        /// Tokens that it may have.
        room: usize,
    },
    /// The prompt does not grow with its text.
    #[error("{task}: the chat template leaves out what the user says")]
    TextIgnored {
        /// The task.
        task: Task,
    },
    /// The text has no tokens.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The template cannot write it down.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

/// The share of the expected answers that an output contains, whatever the case of their letters.
pub fn score(output: &str, answers: &[String]) -> f64 {
    let output = output.to_lowercase();
    let found = answers
        .iter()
        .filter(|answer| output.contains(&answer.to_lowercase()))
        .count();
    found as f64 / answers.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for task in Task::ALL {
            assert_eq!(task.name().parse(), Ok(task));
            assert_eq!(
                serde_json::to_value(task).unwrap(),
                serde_json::Value::from(task.name())
            );
        }
        let error = "niah_single_4".parse::<Task>().unwrap_err().to_string();
        assert!(error.contains("niah_single_4"), "{error}");
    }

    #[test]
    fn the_score_is_the_share_of_answers_found() {
        let answers = |texts: &[&str]| texts.iter().map(|&t| t.to_owned()).collect::<Vec<_>>();
        let four = answers(&["1111111", "2222222", "3333333", "4444444"]);
        assert_eq!(score(" 1111111, 3333333 and 9999999.", &four), 0.5);
        assert_eq!(score("4444444 3333333\n2222222 1111111", &four), 1.0);
        // A part of an answer is none.
        assert_eq!(score("111111 222222 333333 444444", &four), 0.0);
        assert_eq!(score("", &four), 0.0);
        let code = answers(&["0a1b2c3d-aaaa-4bbb-8ccc-0123456789ab"]);
        assert_eq!(
            score("It is 0A1B2C3D-AAAA-4BBB-8CCC-0123456789AB", &code),
            1.0
        );
    }
}
