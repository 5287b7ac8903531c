//! What is happening, as JSON: for the page, and for `spillgate ps`.

use std::fs;
use std::time::Instant;

use serde_json::{Value, json};

use crate::state::State;

/// What the server does now, and has done so far.
pub fn json(state: &State) -> Value {
    let live = state.metrics.live();
    let counts = state.metrics.counts();
    let process = Process::now();
    json!({
        "model": state.served.id,
        "n_ctx": state.n_ctx,
        "uptime_s": Instant::now().duration_since(state.begun).as_secs(),
        "requests": {
            "running": live.running,
            "waiting": live.waiting + state.queue.len(),
            "parallel": state.options.parallel,
            "kept": live.kept,
            "done": counts.done,
            "ended_early": counts.ended_early,
        },
        "tokens": {
            "prompt": counts.prompt_tokens,
            "cached": counts.cached_tokens,
            "generated": counts.generated_tokens,
            "decoded": counts.decoded_tokens,
            "decode_s": counts.decode_s,
        },
        "kv": {
            "device_bytes": live.device_bytes,
            "host_bytes": live.host_bytes,
            "bytes_max": live.bytes_max,
            "streamed_bytes": live.streamed_bytes,
        },
        "gate": live.gate.map(|gate| json!({
            "share": gate.share,
            "verdict": gate.finding.map(|finding| finding.verdict),
            "ratios": gate.finding.map(|finding| finding.ratios),
        })),
        "threads": std::thread::available_parallelism().map_or(1, usize::from),
        "cpu_s": process.as_ref().map(|p| p.cpu_s),
        "resident_bytes": process.as_ref().map(|p| p.resident_bytes),
        "pid": std::process::id(),
    })
}

/// What the system says about this process.
struct Process {
    cpu_s: f64,
    resident_bytes: u64,
}

/// Clock ticks and bytes that Linux counts in, on every architecture that matters here.
const TICKS_A_SECOND: f64 = 100.0;
const PAGE_BYTES: u64 = 4096;

impl Process {
    /// `None` where the system does not say.
    fn now() -> Option<Self> {
        let stat = fs::read_to_string("/proc/self/stat").ok()?;
        // The name of the program, in brackets, may hold anything.
        let (_, rest) = stat.rsplit_once(')')?;
        let field = |n: usize| rest.split_whitespace().nth(n)?.parse::<u64>().ok();
        Some(Self {
            cpu_s: (field(11)? + field(12)?) as f64 / TICKS_A_SECOND,
            resident_bytes: field(21)? * PAGE_BYTES,
        })
    }
}
