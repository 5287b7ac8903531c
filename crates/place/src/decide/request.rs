//! What is asked of a plan.

use serde::{Deserialize, Serialize};

use crate::bytes::{KvType, Streams};
use crate::cost::SpillModel;
use crate::experts::HitCurve;
use crate::tier::{LADDER, Tier};

/// Whether KV may be left in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Spill {
    /// Never.
    Off,
    /// As much as costs at most `spill_drop`, more only if nothing else helps.
    #[default]
    Auto,
    /// As many MiB, whatever they cost.
    Mib(u64),
}

/// Which weights may be left in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SpillWeights {
    /// None.
    None,
    /// Routed experts; and the embedding, of which a device reads a row a token.
    Experts,
    /// Any.
    #[default]
    All,
}

/// Slots for routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExpertCache {
    /// As many MiB.
    Mib(u64),
    /// A part of all of them, 0 to 100.
    Percent(f64),
}

impl ExpertCache {
    /// Bytes, where all experts have so many.
    pub fn bytes(self, all: u64) -> u64 {
        match self {
            Self::Mib(mib) => mib.saturating_mul(1 << 20).min(all),
            Self::Percent(percent) if percent >= 100.0 => all,
            // As integers are made of floats: NaN is 0.
            Self::Percent(percent) => ((all as f64 * percent / 100.0) as u64).min(all),
        }
    }
}

/// Which of the plans that fit is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Prefer {
    /// The least compressed tier within the target.
    #[default]
    Quality,
    /// The fastest not below `min_tier`.
    Speed,
}

/// What is asked of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Request {
    /// Tokens that all sequences have room for together.
    pub n_ctx: u64,
    /// Sequences.
    pub n_seq: u64,
    /// Whether sequences share the room.
    pub streams: Streams,
    /// Tokens of a prompt that go through the layers at a time.
    pub n_ubatch: u64,
    /// As many as that may become on a device: no more if it is not larger.
    pub n_ubatch_max: u64,
    /// K, if it is pinned.
    pub type_k: Option<KvType>,
    /// V, if it is pinned.
    pub type_v: Option<KvType>,
    /// On a machine without a device: main memory that plays one, MiB. With one: no more of it than this.
    pub device_mem_mib: Option<u64>,
    /// What this process may use of the whole device, MiB; 0 is no cap.
    pub vram_target_mib: u64,
    /// Whether KV may be left in host memory.
    pub spill: Spill,
    /// The share of tokens a second, at full context, that a spill may cost.
    pub spill_drop: f64,
    /// How that cost is predicted.
    pub spill_model: SpillModel,
    /// The largest spill, MiB; `None`: 800 in the additive model, none in the overlapped one.
    pub spill_max_mib: Option<u64>,
    /// Which of the plans that fit is wanted.
    pub prefer: Prefer,
    /// What [`Prefer::Speed`] does not go below.
    pub min_tier: Tier,
    /// Cells of the layers that see everything in fast memory, rounded up to whole blocks; `None`: what is worth most. Without a device
    /// main memory then plays one.
    pub window_cells: Option<u64>,
    /// The part of the tail that the CPU attends for generated tokens, 0 to 1; `None`: what is fastest.
    pub kv_share: Option<f64>,
    /// Slots of the staging ring; `None`: what is worth most.
    pub staging_slots: Option<u64>,
    /// Which weights may be left in host memory, too.
    pub spill_weights: SpillWeights,
    /// Slots for routed experts; `None`: what is worth most. Without a device main memory then plays one.
    pub expert_cache: Option<ExpertCache>,
    /// The part of the experts outside that the CPU computes for generated tokens, 0 to 1; `None`: what is fastest.
    pub expert_share: Option<f64>,
    /// What is known of their use; `None`: nothing.
    pub expert_hits: Option<HitCurve>,
    /// Host memory that may be pinned for a device, bytes; `None`: any.
    pub pin_max_bytes: Option<u64>,
    /// Threads; `None`: those that the profile was measured with.
    pub threads: Option<u32>,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            n_ctx: 8192,
            n_seq: 1,
            streams: Streams::Shared,
            n_ubatch: 512,
            n_ubatch_max: 0,
            type_k: None,
            type_v: None,
            device_mem_mib: None,
            vram_target_mib: 0,
            spill: Spill::Auto,
            spill_drop: 0.20,
            spill_model: SpillModel::default(),
            spill_max_mib: None,
            prefer: Prefer::Quality,
            min_tier: LADDER[1],
            window_cells: None,
            kv_share: None,
            staging_slots: None,
            spill_weights: SpillWeights::All,
            expert_cache: None,
            expert_share: None,
            expert_hits: None,
            pin_max_bytes: None,
            threads: None,
        }
    }
}
