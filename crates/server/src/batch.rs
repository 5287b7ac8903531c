//! The requests in work, side by side: who begins, what goes into a step, who has to give way.
//!
//! A step takes one token of every answer, and beside them a chunk of the prompts that are not computed yet, shared evenly: a short prompt
//! waits for a long one no longer than a step or two, and answers wait for prompts no longer than [`limits::CHUNK_MS`] a token.
//!
//! All share one cache. A request begins when its prompt has room beside what the others need for theirs. When room ends, sequences that are
//! kept for their beginnings go first, then the youngest request gives its cells back, and has them computed anew later: its prompt as a
//! prompt, its answer as generated tokens, so that no bit changes.

use std::time::Instant;

use engine::generate::{Finish, Sequences};
use engine::session::{BLOCK_CELLS, Part, TokenOrigin};

use crate::answering::{Answering, Event, Place};
use crate::error::ApiError;
use crate::kept::{Generated, Kept, Reuse, Shelf, common, reuse};
use crate::limits;
use crate::metrics::{Live, Outcome};
use crate::queue::Job;
use crate::state::State;

/// Requests in work, and the sequences that they are in.
pub struct Batch<'t, S: Sequences> {
    sequences: S,
    state: &'t State,
    generated: Generated,
    /// By age.
    running: Vec<Answering<'t, S::Id>>,
    /// By age: those that have no cells yet, or no more.
    waiting: Vec<Answering<'t, S::Id>>,
    shelf: Shelf<S::Id>,
    requests: u64,
    /// Seconds that a token of a prompt takes, lately.
    row_s: Option<f64>,
}

/// What an answer's part in a step came to.
struct Came {
    at: usize,
    tokens: usize,
    finish: Option<Result<Finish, ApiError>>,
}

impl<'t, S: Sequences> Batch<'t, S> {
    /// `begun` are sequences that are there already, and their tokens.
    pub fn new(sequences: S, begun: Vec<(S::Id, Vec<u32>)>, state: &'t State) -> Self {
        let generated = if sequences.computes_alike() {
            Generated::Alike
        } else if state.options.exact_reuse {
            Generated::Recomputed
        } else {
            Generated::Continued
        };
        let kept = begun.into_iter().map(|(sequence, tokens)| Kept {
            sequence,
            tokens,
            exact: 0,
        });
        Self {
            shelf: Shelf::new(kept.collect()),
            sequences,
            state,
            generated,
            running: Vec::new(),
            waiting: Vec::new(),
            requests: 0,
            row_s: None,
        }
    }

    /// Whether another request can be in work.
    pub fn has_place(&self) -> bool {
        let most = self.state.options.parallel.min(self.sequences.step_max());
        self.running.len() + self.waiting.len() < most.max(1)
    }

    /// Whether nothing is in work.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Takes a request.
    pub fn add(&mut self, job: Job) {
        let number = self.requests;
        self.requests += 1;
        let tokenizer = &self.state.served.tokenizer;
        let reply = job.reply.clone();
        match Answering::new(job, number, tokenizer, self.state.n_ctx) {
            Ok(answering) => self.waiting.push(answering),
            Err(error) => {
                reply.send(Event::Failed(error));
                self.state.metrics.count_outcome(Outcome::Failed);
            }
        }
    }

    /// Does whatever is next.
    pub fn go_on(&mut self) {
        self.drop_stopped();
        self.start();
        self.state.metrics.set_live(self.live());
        self.step();
        self.state.metrics.set_live(self.live());
    }

    fn live(&self) -> Live {
        let bytes = self.sequences.bytes();
        Live {
            running: self.running.len(),
            waiting: self.waiting.len(),
            kept: self.shelf.len(),
            device_bytes: bytes.device,
            host_bytes: bytes.host,
            bytes_max: bytes.most,
            streamed_bytes: bytes.streamed,
            gate: self.sequences.gate(),
        }
    }

    /// Ends what is not to be computed any further. Its cells may be of use to others.
    fn drop_stopped(&mut self) {
        let state = self.state;
        let mut stopped = Vec::new();
        for list in [&mut self.running, &mut self.waiting] {
            let gone = list.extract_if(.., |answering| {
                let Some((outcome, error)) = why_stopped(&answering.job, state) else {
                    return false;
                };
                answering.tell(Event::Failed(error));
                state.metrics.count_outcome(outcome);
                state.metrics.count_timing(&answering.timing);
                true
            });
            stopped.extend(gone);
        }
        for answering in stopped {
            self.keep(answering);
        }
    }

    /// Keeps what a request's cells hold.
    fn keep(&mut self, mut answering: Answering<'t, S::Id>) {
        let Some(place) = answering.place.take() else {
            return;
        };
        if place.done == 0 {
            return self.sequences.forget(place.sequence);
        }
        answering.tokens.truncate(place.done);
        let kept = Kept {
            sequence: place.sequence,
            tokens: answering.tokens,
            exact: place.exact,
        };
        self.shelf.keep(kept, limits::KEPT_MAX, &mut self.sequences);
    }

    /// What a text can take of a sequence that is there.
    fn find(&self, tokens: &[u32]) -> Option<Reuse<S::Id>> {
        let of_running = self.running.iter().filter_map(|other| {
            let place = other.place.as_ref()?;
            let held = &other.tokens[..place.done];
            // It goes on itself, so nobody continues it.
            let generated = match self.generated {
                Generated::Continued => Generated::Recomputed,
                generated => generated,
            };
            Some(reuse(tokens, place.sequence, held, place.exact, generated))
        });
        let of_kept = self.shelf.find(tokens, self.generated);
        of_running
            .chain(of_kept)
            .max_by_key(|reuse| reuse.len)
            .filter(|reuse| reuse.len > 0)
    }

    /// Whether somebody is computing much of what these tokens begin with.
    fn is_being_computed(&self, tokens: &[u32], there: usize) -> bool {
        self.running.iter().any(|other| {
            let done = other.place.as_ref().map_or(0, |place| place.done);
            let soon = common(tokens, &other.job.prompt).min(tokens.len() - 1);
            done < soon && soon >= there + limits::SHARED_MIN
        })
    }

    /// Begins with those that wait, as far as there is room. Nobody passes one that waits for room.
    fn start(&mut self) {
        let mut at = 0;
        while at < self.waiting.len() {
            let (tokens, wants_all) = (&self.waiting[at].tokens, self.waiting[at].wants_all());
            let found = if wants_all { None } else { self.find(tokens) };
            let there = found.map_or(0, |reuse| reuse.len);
            if !wants_all && self.is_being_computed(tokens, there) {
                at += 1;
                continue;
            }
            let place = self.place(found);
            if !self.make_room(place.sequence, self.waiting[at].tokens.len() - place.done) {
                self.sequences.forget(place.sequence);
                return;
            }
            if let Some(found) = found {
                self.shelf.touch(found.sequence);
            }
            let mut answering = self.waiting.remove(at);
            answering.begin(place);
            self.state.metrics.count_cached(place.done);
            let by_age = self
                .running
                .partition_point(|other| other.number < answering.number);
            self.running.insert(by_age, answering);
        }
    }

    /// A sequence that begins with what was found.
    fn place(&mut self, found: Option<Reuse<S::Id>>) -> Place<S::Id> {
        let (sequence, done) = match found {
            Some(reuse) => self.sequences.branch(reuse.sequence, reuse.len),
            None => (self.sequences.create(), 0),
        };
        Place {
            sequence,
            done,
            exact: found.map_or(0, |reuse| reuse.exact).min(done),
        }
    }

    /// Whether a sequence has room for so many tokens beside what is in work, each with a block more for its answer. Sequences that are
    /// only kept make way.
    fn make_room(&mut self, sequence: S::Id, tokens: usize) -> bool {
        loop {
            let of_running = self.running.iter().filter_map(|other| {
                let sequence = other.place.as_ref()?.sequence;
                Some((sequence, other.todo()))
            });
            let mut growing = of_running
                .chain([(sequence, tokens)])
                .map(|(sequence, n)| (sequence, n + BLOCK_CELLS));
            if self.sequences.has_room(&mut growing) {
                return true;
            }
            if !self.shelf.drop_oldest(&mut self.sequences) {
                // Who is alone has all room that there is, which holds any context.
                return self.running.is_empty();
            }
        }
    }

    /// The most tokens that each of those in work takes in the next step.
    fn shares(&mut self) -> Vec<usize> {
        let step_max = self.sequences.step_max();
        let mut shares: Vec<usize> = self
            .running
            .iter()
            .map(|answering| usize::from(answering.is_answering()))
            .collect();
        let answers: usize = shares.iter().sum();
        let mut room = step_max.saturating_sub(answers);
        if answers > 0 {
            room = room.min(self.chunk());
        }
        let mut wanting: Vec<usize> = (0..shares.len())
            .filter(|&i| !self.running[i].is_answering())
            .collect();
        // Those that want least get it; what they leave is the others'.
        wanting.sort_by_key(|&i| self.running[i].todo());
        for (before, &i) in wanting.iter().enumerate() {
            let fair = room.div_ceil(wanting.len() - before);
            let takes = self.running[i].todo().min(fair);
            shares[i] = takes;
            room -= takes;
        }
        shares
    }

    /// Tokens of prompts that go with answers.
    fn chunk(&self) -> usize {
        let rows = self
            .row_s
            .map(|row_s| (limits::CHUNK_MS / 1e3 / row_s) as usize);
        rows.unwrap_or(limits::CHUNK_MIN).max(limits::CHUNK_MIN)
    }

    /// Gives way until the step has room. Whoever gives way has no share.
    fn give_way(&mut self, shares: &mut Vec<usize>) {
        loop {
            let parts = self.running.iter().zip(shares.iter());
            let mut growing = parts.filter_map(|(answering, &most)| {
                let part = answering.next(most)?;
                Some((part.sequence, part.tokens.len()))
            });
            if self.sequences.has_room(&mut growing) {
                return;
            }
            if self.shelf.drop_oldest(&mut self.sequences) {
                continue;
            }
            if self.running.len() < 2 {
                return;
            }
            let mut youngest = self.running.pop().expect("there are two");
            shares.pop();
            if let Some(place) = youngest.place.take() {
                self.sequences.forget(place.sequence);
            }
            self.state.metrics.count_gave_way();
            let by_age = self
                .waiting
                .partition_point(|other| other.number < youngest.number);
            self.waiting.insert(by_age, youngest);
        }
    }

    fn step(&mut self) {
        let mut shares = self.shares();
        self.give_way(&mut shares);
        // The tokens are copied, since they grow within the step.
        let mut tokens = Vec::new();
        let mut parts = Vec::new();
        for (at, (answering, &most)) in self.running.iter().zip(&shares).enumerate() {
            if let Some(part) = answering.next(most) {
                let first = tokens.len();
                tokens.extend_from_slice(part.tokens);
                let range = first..tokens.len();
                parts.push((at, range, part.sequence, part.origin, part.wants));
            }
        }
        if parts.is_empty() {
            return;
        }
        let mut came: Vec<Came> = parts
            .iter()
            .map(|(at, range, ..)| Came {
                at: *at,
                tokens: range.len(),
                finish: None,
            })
            .collect();
        let given: Vec<Part<'_, S::Id>> = parts
            .into_iter()
            .map(|(_, range, sequence, origin, wants)| Part {
                sequence,
                tokens: &tokens[range],
                origin,
                wants,
            })
            .collect();
        let of_prompts = given
            .iter()
            .filter(|part| part.origin == TokenOrigin::Prompt)
            .map(|part| part.tokens.len())
            .sum();
        let begun = Instant::now();
        let running = &mut self.running;
        let mut generated = 0;
        let stepped = self.sequences.step(&given, &mut |i, values| {
            let came = &mut came[i];
            let answering = &mut running[came.at];
            answering.advance(came.tokens);
            came.tokens = 0;
            generated += usize::from(given[i].wants.is_logits());
            came.finish = answering.take(values).transpose();
        });
        if let Err(error) = stepped {
            return self.fail(&ApiError::internal(error.to_string()));
        }
        self.state.metrics.count_step(of_prompts, generated);
        self.pace(tokens.len(), begun);
        for came in came.iter().rev() {
            self.running[came.at].advance(came.tokens);
        }
        for came in came.into_iter().rev() {
            if let Some(finish) = came.finish {
                self.end(came.at, finish);
            }
        }
    }

    /// Learns what a token of a chunk takes.
    fn pace(&mut self, rows: usize, begun: Instant) {
        if rows >= limits::CHUNK_MIN {
            let row_s = begun.elapsed().as_secs_f64() / rows as f64;
            let before = self.row_s.unwrap_or(row_s);
            self.row_s = Some(0.5 * (before + row_s));
        }
    }

    fn end(&mut self, at: usize, finish: Result<Finish, ApiError>) {
        let mut answering = self.running.remove(at);
        let outcome = match finish {
            Ok(finish) => {
                answering.end(finish);
                Outcome::Done
            }
            Err(error) => {
                answering.tell(Event::Failed(error));
                Outcome::Failed
            }
        };
        self.state.metrics.count_outcome(outcome);
        self.state.metrics.count_timing(&answering.timing);
        self.keep(answering);
    }

    /// The model failed. Whoever was in the step is told, and what comes next begins anew, with all memory free.
    fn fail(&mut self, error: &ApiError) {
        tracing::error!("a step failed: {error:?}");
        for answering in std::mem::take(&mut self.running) {
            answering.tell(Event::Failed(error.clone()));
            self.state.metrics.count_outcome(Outcome::Failed);
            if let Some(place) = answering.place {
                self.sequences.forget(place.sequence);
            }
        }
        while self.shelf.drop_oldest(&mut self.sequences) {}
    }
}

/// Why a request is not to be computed any further.
fn why_stopped(job: &Job, state: &State) -> Option<(Outcome, ApiError)> {
    if job.reply.is_closed() {
        return Some((Outcome::Cancelled, ApiError::internal("the client left")));
    }
    if Instant::now() >= job.deadline {
        let seconds = state.options.timeout.as_secs();
        return Some((Outcome::TimedOut, ApiError::timeout(seconds)));
    }
    state.is_cut().then(|| (Outcome::Cut, ApiError::ending()))
}
