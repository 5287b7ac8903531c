//! The HTTP API, in OpenAI's forms: a model that answers over a socket.
//!
//! One thread computes: it owns the session, and answers one request after another (`worker`). Another one speaks HTTP
//! (`routes`) and never computes; prompts are written and cut into tokens beside both (`prepare`). Between them are a
//! bounded queue (`queue`) and, for each request, a channel of events, as many as there are cells in the context at most.
//! A client that leaves closes its channel, which the worker sees before the next token.
//!
//! Start reading at [`run`].
//!
//! Requests come from anywhere: what bounds them stands in `limits`. What is asked and answered is written to no log.
//! **Not bounded** is the time that a client takes for the head of a request: it holds one of the connections.

#![forbid(unsafe_code)]

mod answer;
mod auth;
mod error;
mod fields;
pub mod limits;
mod listener;
mod metrics;
mod prepare;
mod queue;
mod routes;
mod signals;
mod state;
mod stream;
mod worker;

use std::future::Future;
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use engine::generate::{Decoder, Generator};
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
    /// Requests that wait at most, beside the one that is being answered.
    pub queue_len: usize,
    /// The time of a request from its arrival to the end of its answer.
    pub timeout: Duration,
    /// The time that an answer still has once the server is to end.
    pub grace: Duration,
}

/// Answers requests until `shutdown` is there. Then nothing more is accepted, who waits is told, and the running answer
/// has its grace to come to its end.
///
/// # Errors
/// If the socket cannot be used.
pub fn run<D: Decoder>(
    listener: TcpListener,
    decoder: D,
    served: Served,
    options: Options,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), Error> {
    let tokenizer = Arc::clone(&served.tokenizer);
    let state = Arc::new(State::new(served, options, decoder.n_ctx()));
    let mut generator = Generator::new(decoder, &tokenizer);
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
        worker::work(&mut generator, &state);
        drop(closing);
        http.join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
