//! Limits on what clients may ask for, each with its reason.

/// Connections at the same time; further ones wait to be accepted. Bounds memory and open files.
pub const CONNECTIONS_MAX: usize = 256;

/// Requests that may wait. More would wait for hours.
pub const QUEUE_MAX: usize = 1024;

/// Bytes of a body that any context allows.
const BODY_BYTES_BASE: usize = 1 << 20;

/// Bytes of a body more for each token of context. A token has some four bytes of text, up to six times that as JSON.
const BODY_BYTES_PER_TOKEN: usize = 32;

/// Bytes of the largest body, whatever the context.
const BODY_BYTES_MAX: usize = 64 << 20;

/// Bytes of a body: what cannot fit into the context is not read.
pub fn body_bytes_max(n_ctx: usize) -> usize {
    n_ctx
        .saturating_mul(BODY_BYTES_PER_TOKEN)
        .saturating_add(BODY_BYTES_BASE)
        .min(BODY_BYTES_MAX)
}

/// Bytes of a body that is too large which are read before the connection is closed.
pub const BODY_BYTES_READ_MAX: usize = 128 << 20;

/// Seconds that a body may take to arrive.
pub const BODY_S_MAX: u64 = 60;

/// Prompts that are written and cut into tokens at the same time: it takes a core that computes otherwise.
pub const PREPARING_MAX: usize = 2;

/// Likeliest tokens listed for each token: the API's own bound.
pub const TOP_LOGPROBS_MAX: i64 = 20;

/// Answers to one prompt.
pub const CHOICES_MAX: i64 = 16;

/// Texts of a request for embeddings: the API's own bound.
pub const EMBEDDED_MAX: usize = 2048;

/// Lists and objects of a schema in one another.
pub const SCHEMA_DEPTH_MAX: usize = 64;

/// Biased tokens of a request: each costs a step for each token.
pub const LOGIT_BIAS_MAX: usize = 1024;

/// Seconds that connections have to end after the last answer was cut.
pub const LEAVE_S_MAX: u64 = 2;

/// Seconds after which a client that was refused may try again.
pub const RETRY_S: u64 = 2;

/// Requests in work at the same time. A step has no more tokens of answers than this.
pub const PARALLEL_MAX: usize = 256;

/// Sequences that are kept for requests that begin like them. Each is compared with every new prompt.
pub const KEPT_MAX: usize = 64;

/// Tokens that somebody else must be about to compute for a request to wait for them. Fewer are computed as quickly.
pub const SHARED_MIN: usize = 256;

/// Milliseconds that a chunk of prompts may take which goes with running answers: they come a token a step.
pub const CHUNK_MS: f64 = 100.0;

/// Tokens of such a chunk that are allowed in any case: a few cost hardly less.
pub const CHUNK_MIN: usize = 32;
