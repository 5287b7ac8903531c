//! The HTTP API, in OpenAI's forms: a model that answers over a socket.
//!
//! One thread computes (`worker`): it owns the sequences of all requests that are in work, and takes them on side by side, a step at a
//! time (`batch`). Another one speaks HTTP (`routes`) and never computes; prompts are written and cut into tokens beside both
//! (`prepare`). Between them are a bounded queue (`queue`) and, for each request, a channel of events, as many as there are cells in
//! the context at most. A client that leaves closes its channel, which the worker sees before the next token.
//!
//! Start reading at [`run`].
//!
//! Requests come from anywhere: what bounds them stands in `limits`. What is asked and answered is written to no log.
//! **Not bounded** is the time that a client takes for the head of a request: it holds one of the connections.

#![forbid(unsafe_code)]

mod answer;
mod answering;
mod auth;
mod batch;
mod constraint;
mod conversation;
mod embeddings;
mod error;
mod fields;
mod kept;
pub mod limits;
mod listener;
mod messages;
mod metrics;
mod page;
mod prepare;
mod queue;
mod read;
mod responses;
mod routes;
mod signals;
mod spoken;
mod state;
mod status;
mod stream;
mod tools;
mod worker;

use std::future::Future;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use engine::embed::Pool;
use engine::generate::Sequences;
use engine::sampler::SamplerParams;
use engine::template::ChatTemplate;
use engine::tokenizer::Tokenizer;

pub use auth::{ApiKey, Hosts};
pub use error::Error;
pub use signals::asked_to_end;

use state::State;

/// What answers, beside the session.
#[derive(Debug)]
pub struct Served {
    /// What clients call the model.
    pub id: String,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template, where it has one.
    pub template: Option<ChatTemplate>,
    /// How tokens are chosen where a request does not say.
    pub sampling: SamplerParams,
    /// What makes embeddings, where the model can.
    pub embedder: Option<Pool>,
    /// What lies where, and why.
    pub plan: serde_json::Value,
}

/// Who may ask, and how much.
#[derive(Debug)]
pub struct Options {
    /// What a request must carry.
    pub key: Option<ApiKey>,
    /// The names by which the server may be called.
    pub hosts: Hosts,
    /// Requests that wait at most, beside those in work.
    pub queue_len: usize,
    /// Requests in work at the same time, at most.
    pub parallel: usize,
    /// Tokens that one request may have, answer included.
    pub n_ctx: usize,
    /// Whether the cells of generated tokens are never reused where a prompt's would differ.
    pub exact_reuse: bool,
    /// The time of a request from its arrival to the end of its answer.
    pub timeout: Duration,
    /// The time that an answer still has once the server is to end.
    pub grace: Duration,
}

/// Answers requests until `shutdown` is there. Then nothing more is accepted, who waits is told, and running answers
/// have their grace to come to their end. `begun` are sequences that are there already, and their tokens, for requests that begin like
/// them.
///
/// # Errors
/// If the socket cannot be used.
pub fn run<S: Sequences>(
    listener: TcpListener,
    sequences: S,
    begun: Vec<(S::Id, Vec<u32>)>,
    served: Served,
    options: Options,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), Error> {
    let n_ctx = options.n_ctx.min(sequences.n_ctx());
    let state = State::new(served, options, n_ctx).map_err(Error::Thread)?;
    let state = Arc::new(state);
    thread::scope(|scope| {
        let http = {
            let state = Arc::clone(&state);
            thread::Builder::new()
                .name("http".to_owned())
                .spawn_scoped(scope, move || {
                    let closing = state::Closing(&state);
                    let served = routes::serve(listener, Arc::clone(&state), shutdown);
                    drop(closing);
                    served
                })
                .map_err(Error::Thread)?
        };
        let closing = state::Closing(&state);
        worker::work(sequences, begun, &state);
        drop(closing);
        http.join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
