//! What the server counts, as Prometheus reads it.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use axum::http::StatusCode;
use engine::generate::{GateNow, Timing};

use crate::state::State;

/// How a request that came to its turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// With an answer.
    Done,
    /// The client left.
    Cancelled,
    /// It took too long.
    TimedOut,
    /// The server ended.
    Cut,
    /// The model failed.
    Failed,
}

const OUTCOMES: [(Outcome, &str); 5] = [
    (Outcome::Done, "done"),
    (Outcome::Cancelled, "cancelled"),
    (Outcome::TimedOut, "timed_out"),
    (Outcome::Cut, "cut"),
    (Outcome::Failed, "failed"),
];

/// Upper bounds of the classes of times to the first token, from the begin of the computation.
const TTFT_MS: [u64; 8] = [25, 100, 250, 1000, 2500, 10_000, 30_000, 120_000];

/// Counters since the begin.
#[derive(Debug, Default)]
pub struct Metrics {
    outcomes: [AtomicU64; OUTCOMES.len()],
    /// By the first digit of the status.
    responses: [AtomicU64; 5],
    queue_full: AtomicU64,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    prompt_us: AtomicU64,
    decode_us: AtomicU64,
    /// Tokens of answers that have ended, beside their first.
    decoded_tokens: AtomicU64,
    /// Not cumulative; the last class has no bound.
    ttft: [AtomicU64; TTFT_MS.len() + 1],
    ttft_us: AtomicU64,
    steps: AtomicU64,
    gave_way: AtomicU64,
    live: Mutex<Live>,
}

/// What is in work now.
#[derive(Debug, Clone, Copy, Default)]
pub struct Live {
    /// Requests that have cells.
    pub running: usize,
    /// Requests that wait for room, or for what another one computes.
    pub waiting: usize,
    /// Sequences that are kept for their beginnings.
    pub kept: usize,
    /// Bytes of the cache.
    pub device_bytes: u64,
    pub host_bytes: u64,
    pub bytes_max: u64,
    /// Bytes of it that were copied to the device so far, to be attended there.
    pub streamed_bytes: u64,
    /// The CPU's share of cells in host memory, where there may be any.
    pub gate: Option<GateNow>,
}

/// Some of the counts.
#[derive(Debug, Clone, Copy)]
pub struct Counts {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub generated_tokens: u64,
    /// Tokens of answers that have ended, beside their first, and the time that they took.
    pub decoded_tokens: u64,
    pub decode_s: f64,
    /// Requests with an answer, and the others that came to their turn.
    pub done: u64,
    pub ended_early: u64,
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

fn us(seconds: f64) -> u64 {
    (seconds * 1e6) as u64
}

impl Metrics {
    pub fn set_live(&self, live: Live) {
        *self.live.lock().unwrap_or_else(PoisonError::into_inner) = live;
    }

    pub fn counts(&self) -> Counts {
        let all: u64 = self.outcomes.iter().map(get).sum();
        let done = get(&self.outcomes[0]);
        Counts {
            prompt_tokens: get(&self.prompt_tokens),
            cached_tokens: get(&self.cached_tokens),
            generated_tokens: get(&self.generated_tokens),
            decoded_tokens: get(&self.decoded_tokens),
            decode_s: get(&self.decode_us) as f64 / 1e6,
            done,
            ended_early: all - done,
        }
    }

    pub fn live(&self) -> Live {
        *self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tokens of prompts, and generated ones, that a step has computed.
    pub fn count_step(&self, prompt_tokens: usize, generated_tokens: usize) {
        add(&self.steps, 1);
        add(&self.prompt_tokens, prompt_tokens as u64);
        add(&self.generated_tokens, generated_tokens as u64);
    }

    pub fn count_cached(&self, tokens: usize) {
        add(&self.cached_tokens, tokens as u64);
    }

    pub fn count_gave_way(&self) {
        add(&self.gave_way, 1);
    }

    pub fn count_outcome(&self, outcome: Outcome) {
        let index = OUTCOMES.iter().position(|&(o, _)| o == outcome);
        add(&self.outcomes[index.expect("the list has all")], 1);
    }

    pub fn count_response(&self, status: StatusCode) {
        let class = usize::from(status.as_u16() / 100).clamp(1, 5);
        add(&self.responses[class - 1], 1);
        if status == StatusCode::TOO_MANY_REQUESTS {
            add(&self.queue_full, 1);
        }
    }

    pub fn count_timing(&self, timing: &Timing) {
        add(&self.prompt_us, us(timing.prompt_s));
        add(&self.decode_us, us(timing.decode_s));
        let decoded = timing.generated_tokens.saturating_sub(1);
        add(&self.decoded_tokens, decoded as u64);
        if timing.generated_tokens > 0 {
            let ms = timing.ttft_s * 1e3;
            let class = TTFT_MS.iter().position(|&bound| ms <= bound as f64);
            add(&self.ttft[class.unwrap_or(TTFT_MS.len())], 1);
            add(&self.ttft_us, us(timing.ttft_s));
        }
    }

    /// In Prometheus' text format.
    pub fn text(&self, state: &State) -> String {
        let mut text = String::new();
        let mut one = |name: &str, kind: &str, help: &str, value: f64| {
            head(&mut text, name, kind, help);
            line(&mut text, name, "", value);
        };
        let seconds = |us: &AtomicU64| get(us) as f64 / 1e6;
        let live = self.live();
        let counts = [
            (
                "prompt_tokens_total",
                "Prompt tokens that were computed",
                get(&self.prompt_tokens) as f64,
            ),
            (
                "cached_tokens_total",
                "Prompt tokens that were there from before",
                get(&self.cached_tokens) as f64,
            ),
            (
                "generated_tokens_total",
                "Generated tokens",
                get(&self.generated_tokens) as f64,
            ),
            (
                "prompt_seconds_total",
                "Time from the begin of requests to the end of their prompts",
                seconds(&self.prompt_us),
            ),
            (
                "decode_seconds_total",
                "Time from their first token to their last",
                seconds(&self.decode_us),
            ),
            (
                "queue_full_total",
                "Requests that found the queue full",
                get(&self.queue_full) as f64,
            ),
            (
                "steps_total",
                "Steps through the model, each with tokens of one or several requests",
                get(&self.steps) as f64,
            ),
            (
                "gave_way_total",
                "Times that a request gave its cells to others, to compute them again later",
                get(&self.gave_way) as f64,
            ),
            (
                "kv_streamed_bytes_total",
                "Bytes of keys and values that were copied to the device to be attended there",
                live.streamed_bytes as f64,
            ),
        ];
        for (name, help, value) in counts {
            one(name, "counter", help, value);
        }
        let gauges = [
            (
                "queue_length",
                "Requests that wait",
                (state.queue.len() + live.waiting) as f64,
            ),
            (
                "queue_length_max",
                "Requests that may wait",
                state.options.queue_len as f64,
            ),
            (
                "busy",
                "Whether requests are being answered",
                f64::from(u8::from(live.running > 0)),
            ),
            ("running", "Requests in work", live.running as f64),
            (
                "kept_sequences",
                "Sequences that are kept for requests that begin like them",
                live.kept as f64,
            ),
            (
                "kv_device_bytes",
                "Bytes of keys and values in device memory",
                live.device_bytes as f64,
            ),
            (
                "kv_host_bytes",
                "Bytes of keys and values in host memory",
                live.host_bytes as f64,
            ),
            (
                "kv_bytes_max",
                "Bytes that keys and values may take",
                live.bytes_max as f64,
            ),
            (
                "context_tokens",
                "Tokens that the context holds",
                state.n_ctx as f64,
            ),
        ];
        for (name, help, value) in gauges {
            one(name, "gauge", help, value);
        }
        head(
            &mut text,
            "answers_total",
            "counter",
            "Requests that came to their turn, by how they ended",
        );
        for ((_, label), count) in OUTCOMES.iter().zip(&self.outcomes) {
            line(
                &mut text,
                "answers_total",
                &format!("{{outcome=\"{label}\"}}"),
                get(count) as f64,
            );
        }
        head(
            &mut text,
            "http_responses_total",
            "counter",
            "Responses, by the class of their status",
        );
        for (class, count) in self.responses.iter().enumerate() {
            let labels = format!("{{class=\"{}xx\"}}", class + 1);
            line(
                &mut text,
                "http_responses_total",
                &labels,
                get(count) as f64,
            );
        }
        let name = "time_to_first_token_seconds";
        head(
            &mut text,
            name,
            "histogram",
            "Time to the first token, without the wait in the queue",
        );
        let bounds = TTFT_MS.iter().map(|&ms| (ms as f64 / 1e3).to_string());
        let mut sum = 0;
        for (bound, count) in bounds.chain(["+Inf".to_owned()]).zip(&self.ttft) {
            sum += get(count);
            line(
                &mut text,
                &format!("{name}_bucket"),
                &format!("{{le=\"{bound}\"}}"),
                sum as f64,
            );
        }
        line(
            &mut text,
            &format!("{name}_sum"),
            "",
            seconds(&self.ttft_us),
        );
        line(&mut text, &format!("{name}_count"), "", sum as f64);
        text
    }
}

fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(
        text,
        "# HELP spillgate_{name} {help}\n# TYPE spillgate_{name} {kind}"
    );
}

fn line(text: &mut String, name: &str, labels: &str, value: f64) {
    let _ = writeln!(text, "spillgate_{name}{labels} {value}");
}
