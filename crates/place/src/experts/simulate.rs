//! Recorded routing, served again: how many experts a cache of some size would have had.

use super::usage::{Layer, Profile};
use super::{Costs, Counts, Experts, Policy, Recalled, Settings, Share};
use crate::routing::{Header, LayerShape, Routed};
use serde::{Deserialize, Serialize};

/// What a cache of some size comes to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Hits {
    /// Bytes of the cache.
    pub cache_bytes: u64,
    /// Of prompts.
    pub prompt: Counts,
    /// Of generated tokens.
    pub generated: Counts,
}

/// The layers of a recording.
pub(super) fn layers(header: &Header) -> Vec<Layer> {
    let layer = |shape: &LayerShape| Layer {
        experts: shape.experts,
        used: shape.used,
        blob_bytes: shape.blob_bytes,
    };
    header.layers.iter().map(layer).collect()
}

/// Serves a recording with a cache of `cache_bytes`, where all that is missing is streamed. `recalled`: what was known before.
pub fn simulate(
    header: &Header,
    records: &[Routed],
    cache_bytes: u64,
    policy: Policy,
    recalled: Option<Profile>,
) -> Hits {
    let layers = layers(header);
    let settings = Settings {
        cache_bytes,
        staging_slots: 1,
        policy,
        prompt: Share::Off,
        generated: Share::Off,
        costs: Costs::UNKNOWN,
        reads_in_place: false,
    };
    let recalled = Recalled {
        profile: recalled.filter(|profile| profile.check(&layers).is_ok()),
        ..Recalled::default()
    };
    let mut experts = Experts::new(&layers, &settings, &recalled);
    if recalled.profile.is_some() {
        experts.fill();
    }
    let mut before: Option<u32> = None;
    for record in records {
        // Layers of a step ascend.
        if before.is_none_or(|layer| record.layer <= layer) {
            experts.begin(record.tokens, record.generated);
        }
        before = Some(record.layer);
        experts.serve(record.layer as usize, &record.used);
    }
    let [prompt, generated] = experts.counts();
    Hits {
        cache_bytes,
        prompt,
        generated,
    }
}

/// Points of a curve.
const POINTS: usize = 16;

/// The part of a token's experts, by bytes, that a cache is expected to have which holds what is used most: at equal steps of the part of all
/// experts that it holds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct HitCurve([f64; POINTS]);

impl HitCurve {
    /// From what was learnt of some layers.
    pub fn new(layers: &[Layer], profile: &Profile) -> Self {
        let of = |(layer, rates): (&Layer, &Vec<f32>)| {
            let bytes = layer.blob_bytes as f64;
            let blob = |&rate: &f32| (f64::from(rate), bytes);
            rates.iter().map(blob).collect::<Vec<_>>()
        };
        let mut blobs: Vec<(f64, f64)> = layers.iter().zip(&profile.rates).flat_map(of).collect();
        blobs.sort_by(|a, b| b.0.total_cmp(&a.0));
        let all: f64 = blobs.iter().map(|(_, bytes)| bytes).sum();
        let needed: f64 = blobs.iter().map(|(rate, bytes)| rate * bytes).sum();
        let (mut held, mut had, mut next) = (0.0, 0.0, blobs.iter().peekable());
        Self(std::array::from_fn(|i| {
            let room = all * (i + 1) as f64 / POINTS as f64;
            while let Some((rate, bytes)) = next.next_if(|(_, bytes)| held + bytes <= room + 0.5) {
                held += bytes;
                had += rate * bytes;
            }
            if needed > 0.0 { had / needed } else { 1.0 }
        }))
    }

    /// At a part of all bytes.
    pub fn at(&self, part: f64) -> f64 {
        let at = crate::drop::part(part) * POINTS as f64;
        let low = (at as usize).min(POINTS - 1);
        let before = if low == 0 { 0.0 } else { self.0[low - 1] };
        before + (self.0[low] - before) * (at - low as f64).clamp(0.0, 1.0)
    }
}
