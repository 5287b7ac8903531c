//! What the threads of the server share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::constraint::Grammars;
use crate::metrics::Metrics;
use crate::queue::Queue;
use crate::tools::{self, Style};
use crate::{Options, Served};

/// Everything but the session.
#[derive(Debug)]
pub struct State {
    pub served: Served,
    pub options: Options,
    pub n_ctx: usize,
    pub queue: Queue,
    pub grammars: Grammars,
    /// How the model writes calls.
    pub style: Style,
    /// Control tokens that are shown all the same to whoever looks for calls.
    pub marks: Arc<Vec<(u32, &'static str)>>,
    pub metrics: Metrics,
    /// Seconds since 1970 at which the server began.
    pub begun_unix_s: u64,
    pub begun: Instant,
    answers: AtomicU64,
    is_cut: AtomicBool,
}

impl State {
    /// # Errors
    /// If the system would not start a thread.
    pub fn new(served: Served, options: Options, n_ctx: usize) -> std::io::Result<Self> {
        let tokenizer = &served.tokenizer;
        let source = served.template.as_ref().map_or("", |t| t.source());
        Ok(Self {
            grammars: Grammars::new(Arc::clone(tokenizer))?,
            style: Style::of_template(source, tokenizer),
            marks: Arc::new(tools::marks(tokenizer)),
            queue: Queue::new(options.queue_len),
            served,
            options,
            n_ctx,
            metrics: Metrics::default(),
            begun_unix_s: unix_s(),
            begun: Instant::now(),
            answers: AtomicU64::new(0),
            is_cut: AtomicBool::new(false),
        })
    }

    /// A name that no other answer of this server has, and hardly one of another.
    pub fn answer_id(&self, prefix: &str) -> String {
        let n = self.answers.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}-{:x}-{n:x}", self.begun_unix_s)
    }

    /// Running answers are to end where they are.
    pub fn cut(&self) {
        self.is_cut.store(true, Ordering::Relaxed);
    }

    pub fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::Relaxed)
    }
}

/// Seconds since 1970.
pub fn unix_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// Closes the queue when a thread ends, however it ends, so that the other one ends too.
pub struct Closing<'s>(pub &'s State);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.queue.close();
    }
}
