//! Recorded routing, served again from caches of several sizes and kinds.

use place::experts::{Policy, simulate};
use place::routing::{Header, Routed};
use serde::Serialize;

use crate::output::table;

/// Parts of all experts' bytes that caches have room for, in percent.
const PARTS: [u64; 4] = [10, 25, 50, 75];

/// What a cache is called by what it throws out first.
const POLICIES: [(&str, Policy); 2] = [("value", Policy::Value), ("lru", Policy::Lru)];

/// What a cache had of a recording.
#[derive(Serialize)]
pub struct Hits {
    recording: String,
    part_percent: u64,
    cache_bytes: u64,
    policy: &'static str,
    /// Of the experts that layers needed, those that were there: for prompts, and for generated tokens.
    prompt: Option<f64>,
    generated: Option<f64>,
    /// Bytes that were copied: for a step, and behind one.
    copied_bytes: u64,
}

/// Serves a recording from every cache.
pub fn serve(recording: &str, header: &Header, records: &[Routed]) -> Vec<Hits> {
    let layers = header.layers.iter();
    let all: u64 = layers
        .map(|layer| layer.blob_bytes.saturating_mul(u64::from(layer.experts)))
        .fold(0, u64::saturating_add);
    let caches = PARTS
        .into_iter()
        .flat_map(|part| POLICIES.map(|p| (part, p)));
    caches
        .map(|(part_percent, (name, policy))| {
            let cache_bytes = all / 100 * part_percent;
            let hits = simulate(header, records, cache_bytes, policy, None);
            let of = |counts: &place::experts::Counts| (counts.experts > 0).then(|| counts.hits());
            let copied = [hits.prompt, hits.generated]
                .map(|counts| counts.streamed_bytes + counts.copied_bytes);
            Hits {
                recording: recording.to_owned(),
                part_percent,
                cache_bytes,
                policy: name,
                prompt: of(&hits.prompt),
                generated: of(&hits.generated),
                copied_bytes: copied.iter().sum(),
            }
        })
        .collect()
}

/// All of it as a table.
pub fn text(hits: &[Hits]) -> String {
    let head = [
        "RECORDING",
        "CACHE",
        "POLICY",
        "HITS, PROMPT",
        "GENERATED",
        "COPIED, GB",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let percent =
        |part: Option<f64>| part.map_or_else(String::new, |part| format!("{:.1} %", 100.0 * part));
    rows.extend(hits.iter().map(|hits| {
        vec![
            hits.recording.clone(),
            format!("{} %", hits.part_percent),
            hits.policy.to_owned(),
            percent(hits.prompt),
            percent(hits.generated),
            format!("{:.3}", hits.copied_bytes as f64 / 1e9),
        ]
    }));
    table(&rows, &[1, 3, 4, 5])
}
