//! Asking a model.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::time::{Duration, SystemTime};

use gguf::Metadata;
use serde::Serialize;
use serde_json::{Map, Value};

use super::{ANSWER_TOKENS_MAX, Prompt, PromptError, Task, score};
use crate::generate::{Decoder, GenerateError, Generator, Request, Timing};
use crate::sampler::{Sampler, SamplerError, SamplerParams};
use crate::template::{ChatRequest, ChatTemplate, TemplateError, message};
use crate::tokenizer::{Affix, EncodeOptions, Tokenizer};

/// How a question becomes a model's tokens.
#[derive(Debug)]
pub struct Format<'t> {
    tokenizer: &'t Tokenizer,
    template: Option<ChatTemplate>,
}

impl<'t> Format<'t> {
    /// Text that goes on: for models that were not taught to chat.
    pub fn raw(tokenizer: &'t Tokenizer) -> Self {
        Self {
            tokenizer,
            template: None,
        }
    }

    /// In the file's chat template, where it has one.
    pub fn of_file(metadata: &Metadata, tokenizer: &'t Tokenizer) -> Result<Self, TemplateError> {
        let template = match ChatTemplate::from_gguf(metadata, tokenizer) {
            Ok(template) => Some(template),
            Err(TemplateError::Missing) => None,
            Err(error) => return Err(error),
        };
        Ok(Self {
            tokenizer,
            template,
        })
    }

    /// Whether a chat template is used.
    pub fn is_chat(&self) -> bool {
        self.template.is_some()
    }

    /// The tokens of a question and of the begin of its answer.
    pub fn tokens(&self, question: &str, prefix: &str) -> Result<Vec<u32>, PromptError> {
        let Some(template) = &self.template else {
            let options = EncodeOptions {
                eos: Affix::Never,
                ..EncodeOptions::default()
            };
            return Ok(self
                .tokenizer
                .encode(format!("{question} {prefix}"), options)?);
        };
        let messages = [message("user", question)];
        let mut request = ChatRequest::new(&messages);
        // The answer has begun: there is nothing left to think about.
        request.variables = Map::from_iter([("enable_thinking".to_owned(), Value::from(false))]);
        // Templates that tell the date would make another prompt every day. This is the begin of 2026.
        request.now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_767_225_600);
        let text = template.render(&request)? + prefix;
        Ok(self.tokenizer.encode(text, EncodeOptions::CHAT)?)
    }
}

/// What is asked of a model.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// Tasks, in order.
    pub tasks: &'a [Task],
    /// Prompts a task.
    pub samples: usize,
    /// Of keys, values and depths.
    pub seed: u64,
}

/// One answer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Outcome {
    /// The task.
    pub task: Task,
    /// Which of its prompts.
    pub index: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// What was expected.
    pub answers: Vec<String>,
    /// What the model said, after the begin of the answer. It was not asked to go on once everything was found.
    pub output: String,
    /// The share of the answers found.
    pub score: f64,
    /// How long it took. Cells of a prompt that began like the one before were kept.
    pub timing: Timing,
}

/// The score of a task.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TaskScore {
    /// The task.
    pub task: Task,
    /// Prompts answered.
    pub samples: usize,
    /// Mean share of the answers found, in percent.
    pub score_percent: f64,
    /// Mean length of the prompts.
    pub prompt_tokens_mean: f64,
}

/// The scores of a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Of each task with at least one answer.
    pub tasks: Vec<TaskScore>,
    /// Mean over these tasks; `None` if there are none.
    pub score_percent_mean: Option<f64>,
    /// Whether everything that was asked for is in it.
    pub complete: bool,
}

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
pub enum NiahError<E: std::error::Error> {
    /// A prompt cannot be made.
    #[error(transparent)]
    Prompt(#[from] PromptError),
    /// The model failed.
    #[error(transparent)]
    Generate(#[from] GenerateError<E>),
    /// No token can be chosen.
    #[error(transparent)]
    Sampler(#[from] SamplerError),
}

/// Asks a model and scores what it says. Prompts are as long as its context allows. The most likely token is taken each
/// time. `on_outcome` hears of each answer as it is there. `interrupted` is asked before each token, and often in a prompt;
/// after a yes, what is done is reported.
///
/// # Errors
/// If the context is too short for a question, or the model fails.
pub fn run<D: Decoder>(
    generator: &mut Generator<'_, D>,
    format: &Format<'_>,
    asked: &Asked<'_>,
    interrupted: &dyn Fn() -> bool,
    on_outcome: &mut dyn FnMut(&Outcome),
) -> Result<Report, NiahError<D::Error>> {
    let room = generator
        .decoder()
        .n_ctx()
        .saturating_sub(ANSWER_TOKENS_MAX);
    let mut sampler = Sampler::new(SamplerParams::greedy(), format.tokenizer.n_vocab())?;
    let mut tasks = Vec::with_capacity(asked.tasks.len());
    let mut complete = true;
    'tasks: for &task in asked.tasks {
        let mut sum = Sum::default();
        for index in 0..asked.samples {
            let prompt =
                Prompt::generate(task, asked.seed, index, room, &mut |question, prefix| {
                    Ok(format.tokens(question, prefix)?.len())
                })?;
            let answered = answer(generator, format, &mut sampler, &prompt, interrupted)?;
            let Some((output, timing)) = answered else {
                complete = false;
                tasks.extend(sum.score(task));
                break 'tasks;
            };
            let outcome = Outcome {
                task,
                index,
                prompt_tokens: prompt.tokens,
                score: score(&output, &prompt.answers),
                answers: prompt.answers,
                output,
                timing,
            };
            sum.add(&outcome);
            on_outcome(&outcome);
        }
        tasks.extend(sum.score(task));
    }
    let total: f64 = tasks.iter().map(|t: &TaskScore| t.score_percent).sum();
    Ok(Report {
        score_percent_mean: (!tasks.is_empty()).then(|| total / tasks.len() as f64),
        tasks,
        complete,
    })
}

/// What the model says, and how long it took; `None` if it was interrupted.
fn answer<D: Decoder>(
    generator: &mut Generator<'_, D>,
    format: &Format<'_>,
    sampler: &mut Sampler,
    prompt: &Prompt,
    interrupted: &dyn Fn() -> bool,
) -> Result<Option<(String, Timing)>, NiahError<D::Error>> {
    let tokens = format.tokens(&prompt.question, &prompt.prefix)?;
    let request = Request {
        prompt: &tokens,
        tokens_max: Some(ANSWER_TOKENS_MAX),
        stop: &[],
    };
    sampler.reset();
    // Generations end as interrupted for two reasons here, of which one is none.
    let stopped = Cell::new(false);
    let asked = || {
        let yes = interrupted();
        stopped.set(stopped.get() || yes);
        yes
    };
    let mut text = String::new();
    let generated = generator.generate(request, sampler, &asked, &mut |piece| {
        text.push_str(piece);
        // More text cannot lower the score.
        if score(&text, &prompt.answers) == 1.0 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    Ok((!stopped.get()).then_some((generated.text, generated.timing)))
}

/// Outcomes of one task.
#[derive(Default)]
struct Sum {
    samples: usize,
    score: f64,
    prompt_tokens: usize,
}

impl Sum {
    fn add(&mut self, outcome: &Outcome) {
        self.samples += 1;
        self.score += outcome.score;
        self.prompt_tokens += outcome.prompt_tokens;
    }

    fn score(&self, task: Task) -> Option<TaskScore> {
        let n = self.samples as f64;
        (self.samples > 0).then(|| TaskScore {
            task,
            samples: self.samples,
            score_percent: 100.0 * self.score / n,
            prompt_tokens_mean: self.prompt_tokens as f64 / n,
        })
    }
}
