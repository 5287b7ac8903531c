//! A request in work: its sequence, its tokens, and what its client is told.

use std::time::Instant;

use engine::embed::Pool;
use engine::generate::{Finish, GenerateError, Request, Timing, Writer};
use engine::sampler::{Logprobs, logprobs};
use engine::session::{Part, TokenOrigin, Wants};
use engine::tokenizer::Tokenizer;

use crate::error::ApiError;
use crate::queue::Job;

/// What happens to a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Its turn has come.
    Begun,
    /// The answer goes on.
    Piece(Piece),
    /// The answer is complete.
    Done(Done),
    /// What an embedding is, and of how many tokens.
    Embedded(Pool, usize),
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

/// A request that is answered, or is about to be.
#[derive(Debug)]
pub struct Answering<'t, I> {
    pub job: Job,
    /// Requests that came before it.
    pub number: u64,
    /// Where its cells are, while it has any.
    pub place: Option<Place<I>>,
    /// The prompt, and what was generated.
    pub tokens: Vec<u32>,
    pub timing: Timing,
    writer: Writer<'t>,
    piece: Piece,
    begun: Option<Instant>,
    first: Option<Instant>,
}

/// The cells of a request.
#[derive(Debug, Clone, Copy)]
pub struct Place<I> {
    pub sequence: I,
    /// Tokens that have cells.
    pub done: usize,
    /// How many of them, from the first on, have the cells that a prompt gives.
    pub exact: usize,
}

impl<'t, I: Copy> Answering<'t, I> {
    pub fn new(
        mut job: Job,
        number: u64,
        tokenizer: &'t Tokenizer,
        n_ctx: usize,
    ) -> Result<Self, ApiError> {
        let request = Request {
            prompt: &job.prompt,
            tokens_max: job.tokens_max,
            stop: &job.stop,
        };
        let writer = Writer::new(tokenizer, n_ctx, request, &mut job.sampler);
        let writer = writer.map_err(refusal)?;
        Ok(Self {
            tokens: job.prompt.clone(),
            job,
            number,
            place: None,
            timing: Timing::default(),
            writer,
            piece: Piece::default(),
            begun: None,
            first: None,
        })
    }

    pub fn tell(&self, event: Event) {
        self.job.reply.send(event);
    }

    /// Its turn has come, with so many tokens that have cells.
    pub fn begin(&mut self, place: Place<I>) {
        if self.begun.is_none() {
            self.begun = Some(Instant::now());
            self.timing.reused_tokens = place.done;
            self.tell(Event::Begun);
        }
        if let Some(pool) = &mut self.job.pool {
            pool.clear();
        }
        self.place = Some(place);
    }

    /// Tokens of it that are still without cells.
    pub fn todo(&self) -> usize {
        self.tokens.len() - self.place.as_ref().map_or(0, |place| place.done)
    }

    /// Whether a step gives its next token, and takes one.
    pub fn is_answering(&self) -> bool {
        self.place.is_some() && self.todo() == 1 && self.tokens.len() > self.job.prompt.len()
    }

    /// What it takes in a step: `most` tokens at most, either of the prompt or of the answer.
    pub fn next(&self, most: usize) -> Option<Part<'_, I>> {
        let place = self.place.as_ref()?;
        let n_prompt = self.job.prompt.len();
        let (origin, end) = if place.done < n_prompt {
            (TokenOrigin::Prompt, n_prompt)
        } else {
            (TokenOrigin::Generated, self.tokens.len())
        };
        let end = end.min(place.done + most);
        let is_last = end == self.tokens.len();
        let wants = match &self.job.pool {
            Some(pool) if is_last || pool.wants_all() => Wants::Outputs,
            None if is_last => self.wanted_logits(),
            _ => Wants::Nothing,
        };
        (place.done < end).then(|| Part {
            sequence: place.sequence,
            tokens: &self.tokens[place.done..end],
            origin,
            wants,
        })
    }

    /// The logits to choose from; where the largest is chosen, as it is, that alone.
    fn wanted_logits(&self) -> Wants {
        let job = &self.job;
        let greedy = job.sampler.is_greedy() && job.constraint.is_none() && job.logprobs.is_none();
        if greedy {
            Wants::Largest(self.writer.n_tokens())
        } else {
            Wants::Logits
        }
    }

    /// Says that tokens have cells now.
    pub fn advance(&mut self, tokens: usize) {
        if let Some(place) = &mut self.place {
            let n_prompt = self.job.prompt.len();
            if place.done < n_prompt && place.exact == place.done {
                place.exact += tokens;
            }
            place.done += tokens;
        }
        if self.first.is_none() {
            self.timing.prompt_tokens += tokens;
        }
    }

    /// Whether what another one has computed is of no use.
    pub fn wants_all(&self) -> bool {
        self.job.pool.as_ref().is_some_and(Pool::wants_all)
    }

    /// Takes what a step gave: outputs, or logits to choose the next token from. Returns how it ends, if it does.
    pub fn take(&mut self, values: &[f32]) -> Result<Option<Finish>, ApiError> {
        let is_last = self.todo() == 0;
        let Some(pool) = &mut self.job.pool else {
            return self.choose(values);
        };
        pool.take(values);
        Ok(is_last.then_some(Finish::End))
    }

    /// Chooses the next token. Returns how the answer ends, if it does.
    fn choose(&mut self, logits: &[f32]) -> Result<Option<Finish>, ApiError> {
        let now = Instant::now();
        let since =
            |then: Option<Instant>| then.map_or(0.0, |then| now.duration_since(then).as_secs_f64());
        if self.first.is_none() {
            self.timing.prompt_s = since(self.begun);
        }
        if let Some(finish) = self.writer.finished() {
            return Ok(Some(finish));
        }
        let of_tokens = self.writer.of_tokens(logits);
        let allowed = match &mut self.job.constraint {
            Some(constraint) => constraint.mask(of_tokens)?,
            None => of_tokens,
        };
        let chosen = self.writer.choose(allowed, &mut self.job.sampler);
        let chosen = chosen.map_err(refusal)?;
        if chosen.finish.is_none()
            && let Some(constraint) = &mut self.job.constraint
        {
            constraint.take(chosen.token)?;
        }
        self.first.get_or_insert(now);
        self.timing.generated_tokens += 1;
        self.timing.decode_s = since(self.first);
        self.timing.ttft_s = since(self.begun) - self.timing.decode_s;
        let is_end = chosen.finish == Some(Finish::End);
        if let Some(n_top) = self.job.logprobs
            && !is_end
        {
            let of = logprobs(of_tokens, chosen.token, n_top).map_err(internal)?;
            self.piece.tokens.push((chosen.token, of));
        }
        self.piece.text.push_str(chosen.text);
        let mark = self.job.marks.iter().find(|(id, _)| *id == chosen.token);
        if let Some((_, text)) = mark {
            self.piece.text.push_str(text);
        }
        let finish = chosen.finish;
        if finish.is_none() {
            self.tokens.push(chosen.token);
        }
        if !self.piece.text.is_empty() {
            let piece = std::mem::take(&mut self.piece);
            self.tell(Event::Piece(piece));
        }
        Ok(finish)
    }

    /// Tells the end of the answer.
    pub fn end(&mut self, finish: Finish) {
        if let Some(pool) = self.job.pool.take() {
            return self.tell(Event::Embedded(pool, self.job.prompt.len()));
        }
        let (rest, finish) = self.writer.end(finish);
        self.piece.text.push_str(rest);
        if self.piece != Piece::default() {
            let piece = std::mem::take(&mut self.piece);
            self.tell(Event::Piece(piece));
        }
        self.tell(Event::Done(Done {
            finish,
            prompt_tokens: self.job.prompt.len(),
            cached_tokens: self.timing.reused_tokens,
            generated_tokens: self.timing.generated_tokens,
        }));
        log(&self.timing, finish);
    }
}

fn internal(error: impl std::error::Error) -> ApiError {
    ApiError::internal(error.to_string())
}

/// Why there is no answer.
fn refusal(error: GenerateError<std::convert::Infallible>) -> ApiError {
    match error {
        GenerateError::PromptTooLong { tokens, n_ctx } => ApiError::too_long(tokens, n_ctx),
        error => internal(error),
    }
}

/// What a request cost. Not what it was about.
fn log(timing: &Timing, finish: Finish) {
    tracing::info!(
        "answered: prompt {} tok and {} kept, {:.1} tok/s; {} tok, {:.1} tok/s; first token {:.0} ms; {finish:?}",
        timing.prompt_tokens,
        timing.reused_tokens,
        timing.prompt_tok_s(),
        timing.generated_tokens,
        timing.decode_tok_s(),
        timing.ttft_s * 1e3,
    );
}
