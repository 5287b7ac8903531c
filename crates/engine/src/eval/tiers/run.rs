//! Measuring the rows: divergence first, then tokens a second in the cells that this leaves, then needles.

use std::ops::ControlFlow;

use serde::Serialize;

use super::row::Row;
use super::speed::{self, ROUNDS, Speed, TOKENS_A_ROUND};
use crate::Error;
use crate::eval::niah::{self, Asked, Format, NiahError};
use crate::eval::{Compared, EvalError, Excerpt, Feed, compare};
use crate::generate::Generator;
use crate::model::Model;
use crate::session::Session;
use crate::tokenizer::Tokenizer;

/// A generated token takes about as long as so many of a prompt, for the time that is left.
const PROMPT_TOKENS_A_DECODE: u64 = 16;

/// What is to be measured.
#[derive(Debug, Clone, Copy)]
pub struct Task<'a> {
    /// The rows, as planned.
    pub rows: &'a [Row],
    /// What they are compared over. The last one leads to the depth that tokens a second are measured at.
    pub excerpts: &'a [Excerpt],
    /// What they are asked to find.
    pub needles: Option<Needles<'a>>,
    /// The depth that tokens a second are measured at, of which [`depth`](super::depth) says how large it may be.
    pub depth: usize,
}

/// Needles to find.
#[derive(Debug, Clone, Copy)]
pub struct Needles<'a> {
    /// How a question is asked.
    pub format: &'a Format<'a>,
    /// The model's.
    pub tokenizer: &'a Tokenizer,
    /// Which questions.
    pub asked: Asked<'a>,
}

/// What was measured of a row. All is `None` if it was left out, what comes later if it was interrupted.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// Bytes of cells that were in host memory at the depth measured.
    pub spilled_bytes: Option<u64>,
    /// Against the first row; `None` for itself.
    pub compared: Option<Compared>,
    /// Perplexity of the scored part of the text.
    pub perplexity: Option<f64>,
    /// Tokens a second.
    pub speed: Option<Speed>,
    /// Mean score of the needles.
    pub needles_percent: Option<f64>,
}

/// What was measured of all rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// In their order.
    pub rows: Vec<Outcome>,
    /// Whether everything that was asked for is in it.
    pub complete: bool,
}

/// Why the table cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum TiersError {
    /// A comparison failed.
    #[error(transparent)]
    Eval(#[from] EvalError),
    /// A session failed.
    #[error(transparent)]
    Model(#[from] Error),
    /// Needles could not be asked for.
    #[error(transparent)]
    Niah(#[from] NiahError<Error>),
}

/// Where it is told how far things are. All methods have empty defaults, so `()` is a silent one.
pub trait Progress {
    /// Something new begins; `total` is all work there is.
    fn step(&mut self, _what: &str, _total: u64) {}
    /// So much more of the work is done.
    fn advance(&mut self, _work: u64) {}
    /// Asked often: whether to stop, with what is done by then.
    fn interrupted(&self) -> bool {
        false
    }
}

impl Progress for () {}

/// Measures all rows but those that are left out.
///
/// # Errors
/// If a session fails.
pub fn run(
    model: &Model,
    task: &Task<'_>,
    progress: &mut dyn Progress,
) -> Result<Report, TiersError> {
    let rows = task.rows;
    let measured: Vec<usize> = (0..rows.len())
        .filter(|&at| rows[at].left_out.is_none() && rows[at].same_as.is_none())
        .collect();
    let mut sessions = Vec::with_capacity(measured.len());
    for &at in &measured {
        sessions.push(Session::new(model, &rows[at].planned.options)?);
    }
    let mut table = Table {
        task,
        total: work(task, &sessions),
        has_base: measured.first() == Some(&0),
        outcomes: vec![Outcome::default(); sessions.len()],
        sessions,
    };
    let complete = table.divergence(progress)?
        && table.speed(progress)?
        && table.needles(progress)?
        && !progress.interrupted();
    let outcome = |at: usize| {
        let at = rows[at].same_as.unwrap_or(at);
        let session = measured.iter().position(|&row| row == at);
        session.map_or_else(Outcome::default, |s| table.outcomes[s].clone())
    };
    Ok(Report {
        rows: (0..rows.len()).map(outcome).collect(),
        complete,
    })
}

/// All work there is, in tokens of prompts.
fn work(task: &Task<'_>, sessions: &[Session<'_>]) -> u64 {
    let text: usize = task.excerpts.iter().map(|e| e.tokens.len()).sum();
    let prompts = task
        .needles
        .map_or(0, |n| n.asked.tasks.len() * n.asked.samples);
    let each = |session: &Session<'_>| {
        let decoded = (ROUNDS * TOKENS_A_ROUND) as u64 * PROMPT_TOKENS_A_DECODE;
        (text + prompts * session.n_ctx()) as u64 + decoded
    };
    sessions.iter().map(each).sum()
}

/// A table that is being filled.
struct Table<'a, 'm> {
    task: &'a Task<'a>,
    total: u64,
    /// Whether the first session is the one that the others are compared with.
    has_base: bool,
    /// Of each session.
    outcomes: Vec<Outcome>,
    sessions: Vec<Session<'m>>,
}

// Each phase says whether it came to its end.
impl Table<'_, '_> {
    fn divergence(&mut self, progress: &mut dyn Progress) -> Result<bool, TiersError> {
        let [base, others @ ..] = &mut self.sessions[..] else {
            return Ok(true);
        };
        if !self.has_base {
            return Ok(true);
        }
        progress.step("divergence", self.total);
        let mut others: Vec<&mut Session<'_>> = others.iter_mut().collect();
        let mut complete = true;
        let comparisons = compare(
            base,
            &mut others,
            self.task.excerpts,
            Feed::Chunks,
            &mut |tokens| {
                progress.advance(tokens as u64);
                complete = !progress.interrupted();
                if complete {
                    ControlFlow::Continue(())
                } else {
                    ControlFlow::Break(())
                }
            },
        )?;
        for (outcome, comparison) in self.outcomes[1..].iter_mut().zip(&comparisons) {
            outcome.compared = comparison.summary();
        }
        let [base, others @ ..] = &mut self.outcomes[..] else {
            return Ok(complete);
        };
        for outcome in others {
            outcome.perplexity = outcome.compared.and_then(|c| c.perplexity_other);
            base.perplexity = outcome.compared.and_then(|c| c.perplexity_base);
        }
        Ok(complete)
    }

    fn speed(&mut self, progress: &mut dyn Progress) -> Result<bool, TiersError> {
        let Some(excerpt) = self.task.excerpts.last() else {
            return Ok(true);
        };
        let depth = self.task.depth;
        let (before, tokens) = excerpt.tokens.split_at(depth);
        for (session, outcome) in self.sessions.iter_mut().zip(&mut self.outcomes) {
            // Usually they hold this text.
            let mut held = session.truncate(depth);
            while held < depth {
                if progress.interrupted() {
                    return Ok(false);
                }
                let chunk = session.ubatch().min(depth - held);
                session.prefill(&before[held..held + chunk], crate::session::Wanted::None)?;
                held += chunk;
            }
            outcome.spilled_bytes = Some(session.spread().host_bytes);
        }
        progress.step("tokens a second", self.total);
        let mut sessions: Vec<&mut Session<'_>> = self.sessions.iter_mut().collect();
        let rounds = speed::measure(&mut sessions, depth, tokens, &mut || {
            progress.advance(TOKENS_A_ROUND as u64 * PROMPT_TOKENS_A_DECODE);
            !progress.interrupted()
        })?;
        let Some(rounds) = rounds else {
            return Ok(false);
        };
        let base = self.has_base.then(|| rounds[0].clone());
        for (outcome, tok_s) in self.outcomes.iter_mut().zip(rounds) {
            outcome.speed = Some(Speed::new(tok_s, base.as_deref()));
        }
        Ok(true)
    }

    fn needles(&mut self, progress: &mut dyn Progress) -> Result<bool, TiersError> {
        let Some(needles) = &self.task.needles else {
            return Ok(true);
        };
        progress.step("needles", self.total);
        for (session, outcome) in self.sessions.iter_mut().zip(&mut self.outcomes) {
            let n_ctx = session.n_ctx() as u64;
            let mut generator = Generator::new(session, needles.tokenizer);
            let progress = std::cell::RefCell::new(&mut *progress);
            let report = niah::run(
                &mut generator,
                needles.format,
                &needles.asked,
                &|| progress.borrow().interrupted(),
                &mut |_| progress.borrow_mut().advance(n_ctx),
            )?;
            if !report.complete {
                return Ok(false);
            }
            outcome.needles_percent = report.score_percent_mean;
        }
        Ok(true)
    }
}
