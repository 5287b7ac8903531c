//! The thread that computes: one request after another.

use std::ops::ControlFlow;
use std::time::Instant;

use engine::generate::{Decoder, Finish, GenerateError, Generated, Generator, Request};
use engine::sampler::{Logprobs, logprobs};

use crate::error::ApiError;
use crate::metrics::Outcome;
use crate::queue::Job;
use crate::state::State;

/// What happens to a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Its turn has come.
    Begun,
    /// The answer goes on.
    Piece(Piece),
    /// The answer is complete.
    Done(Done),
    /// There is no answer, or no more of it.
    Failed(ApiError),
}

/// A part of an answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Piece {
    pub text: String,
    /// Its tokens, if probabilities were asked for. Those of a text that may be a stop string come when that is decided.
    pub tokens: Vec<(u32, Logprobs)>,
}

/// How an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    pub finish: Finish,
    pub prompt_tokens: usize,
    /// Those of them that were there from before.
    pub cached_tokens: usize,
    pub generated_tokens: usize,
}

/// Answers requests until there will be none.
pub fn work<D: Decoder>(generator: &mut Generator<'_, D>, state: &State) {
    while let Some(job) = state.queue.take() {
        state.metrics.set_busy(true);
        let outcome = answer(generator, job, state);
        state.metrics.set_busy(false);
        state.metrics.count_outcome(outcome);
    }
}

/// Why a request is not to be computed any further.
fn stopped(job_is_gone: bool, deadline: Instant, state: &State) -> Option<(Outcome, ApiError)> {
    if job_is_gone {
        return Some((Outcome::Cancelled, ApiError::internal("the client left")));
    }
    if Instant::now() >= deadline {
        let seconds = state.options.timeout.as_secs();
        return Some((Outcome::TimedOut, ApiError::timeout(seconds)));
    }
    state.is_cut().then(|| (Outcome::Cut, ApiError::ending()))
}

fn answer<D: Decoder>(generator: &mut Generator<'_, D>, mut job: Job, state: &State) -> Outcome {
    let reply = &job.reply;
    // Whether anybody hears it is asked before each token.
    let tell = |event: Event| {
        let _ = reply.send(event);
    };
    let why_stopped = || stopped(reply.is_closed(), job.deadline, state);
    if let Some((outcome, error)) = why_stopped() {
        tell(Event::Failed(error));
        return outcome;
    }
    tell(Event::Begun);
    let request = Request {
        prompt: &job.prompt,
        tokens_max: job.tokens_max,
        stop: &job.stop,
    };
    let mut piece = Piece::default();
    let mut bad_logits = None;
    let generated = generator.generate_watched(
        request,
        &mut job.sampler,
        &|| why_stopped().is_some(),
        &mut |progress| {
            if let (Some(n_top), Some((token, logits))) = (job.logprobs, progress.chosen) {
                match logprobs(logits, token, n_top) {
                    Ok(of) => piece.tokens.push((token, of)),
                    Err(error) => {
                        bad_logits = Some(error);
                        return ControlFlow::Break(());
                    }
                }
            }
            piece.text.push_str(progress.text);
            if !piece.text.is_empty() {
                tell(Event::Piece(std::mem::take(&mut piece)));
            }
            ControlFlow::Continue(())
        },
    );
    let generated = match (generated, bad_logits) {
        (Ok(generated), None) => generated,
        (Ok(_), Some(error)) => return failed(generator, reply_error(error), &tell),
        (Err(error), _) => {
            let error = match error {
                GenerateError::PromptTooLong { tokens, n_ctx } => {
                    tell(Event::Failed(ApiError::too_long(tokens, n_ctx)));
                    return Outcome::Failed;
                }
                error => reply_error(error),
            };
            return failed(generator, error, &tell);
        }
    };
    log(&generated);
    state.metrics.count_tokens(&generated.timing);
    if generated.finish == Finish::Interrupted {
        let (outcome, error) =
            why_stopped().expect("it was interrupted because of this, which does not change");
        tell(Event::Failed(error));
        return outcome;
    }
    if !piece.tokens.is_empty() {
        tell(Event::Piece(piece));
    }
    let timing = &generated.timing;
    tell(Event::Done(Done {
        finish: generated.finish,
        prompt_tokens: job.prompt.len(),
        cached_tokens: timing.reused_tokens,
        generated_tokens: timing.generated_tokens,
    }));
    Outcome::Done
}

fn reply_error(error: impl std::error::Error) -> ApiError {
    ApiError::internal(error.to_string())
}

/// The model failed. The next request begins anew, with all memory free.
fn failed<D: Decoder>(
    generator: &mut Generator<'_, D>,
    error: ApiError,
    tell: &dyn Fn(Event),
) -> Outcome {
    tracing::error!("a request failed: {error:?}");
    generator.clear();
    tell(Event::Failed(error));
    Outcome::Failed
}

/// What a request cost. Not what it was about.
fn log(generated: &Generated) {
    let timing = &generated.timing;
    tracing::info!(
        "answered: prompt {} tok and {} kept, {:.1} tok/s; {} tok, {:.1} tok/s; first token {:.0} ms; {:?}",
        timing.prompt_tokens,
        timing.reused_tokens,
        timing.prompt_tok_s(),
        timing.generated_tokens,
        timing.decode_tok_s(),
        timing.ttft_s * 1e3,
        generated.finish,
    );
}
