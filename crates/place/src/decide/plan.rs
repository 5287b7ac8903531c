//! What a decision comes to.

use serde::Serialize;

use super::memory::Memory;
use super::request::{Prefer, Spill};
use crate::bytes::KvType;
use crate::cost::{Bound, Placement, SpillModel, Token};
use crate::drop::Binding;
use crate::tier::Tier;

/// A plan: what goes where, what it will do, and why.
///
/// Bytes unless a name says otherwise. As JSON a figure that is no number is `null`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Name of the model, or its architecture.
    pub model: String,
    /// Name of the profile.
    pub profile: String,
    /// Where the profile's numbers come from.
    pub profile_source: &'static str,
    /// Tokens that all sequences have room for together.
    pub n_ctx: u64,
    /// Context that the model was trained with; 0 if not known.
    pub n_ctx_train: u64,
    /// Sequences.
    pub n_seq: u64,
    /// Tokens of a prompt that go through the layers at a time.
    pub n_ubatch: u64,
    /// All tensors of the file.
    pub weight_bytes: u64,
    /// Routed experts of the file.
    pub expert_bytes: u64,
    /// What a generated token reads of the weights.
    pub active_bytes_per_token: u64,
    /// KV at the chosen tier, as other engines count it.
    pub kv_bytes: u64,
    /// KV at the chosen tier, as our blocks take it.
    pub kv_alloc_bytes: u64,
    /// Recurrent state of all sequences.
    pub recurrent_bytes: u64,
    /// Activations, scratch, logits.
    pub work_bytes: u64,
    /// What is free.
    pub memory: Memory,
    /// Fast memory that is left for KV beside all weights, work space, state and reserve; 0 if not even these fit.
    pub kv_budget_bytes: u64,
    /// Every tier that could have been chosen, least compressing first.
    pub tiers: Vec<TierPlan>,
    /// `T*` of the chosen tier.
    pub t_star_bytes: u64,
    /// The share of tokens a second that a spill may cost.
    pub spill_drop: f64,
    /// Whether KV may be left in host memory.
    pub spill: Spill,
    /// How the cost of that is predicted.
    pub spill_model: SpillModel,
    /// Which of the plans that fit is wanted.
    pub prefer: Prefer,
    /// The rates that bind a spill.
    pub rates: Rates,
    /// The chosen tier, `K/V`.
    pub choice: String,
    /// Its K.
    pub type_k: KvType,
    /// Its V.
    pub type_v: KvType,
    /// Why it was chosen.
    pub reason: String,
    /// Whether everything has room.
    pub fits: bool,
    /// What would fit, if this does not.
    pub hints: Vec<String>,
    /// Where everything goes.
    pub layout: Layout,
    /// Whether it was learnt which experts are used; else they are taken to be used alike.
    pub expert_use_known: bool,
    /// The chosen plan at several live depths.
    pub predicted: Vec<Predicted>,
    /// Threads of the worker pool.
    pub threads: u32,
    /// The part of the tail that the CPU attends over at full context, as far as whole groups of blocks allow it.
    pub cpu_share: f64,
    /// The largest context that fits at the chosen tier with all KV in fast memory.
    pub max_ctx: u64,
    /// The same with what may be left in host memory.
    pub max_ctx_spilled: u64,
    /// What the model's file does not say and was taken as usual.
    pub assumptions: Vec<String>,
}

/// Rates that a spill meets.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// From host memory into fast memory.
    pub link_gb_s: f64,
    /// Reads of host memory.
    pub host_read_gb_s: f64,
    /// The slower of both.
    pub bw_eff_gb_s: f64,
    /// Which one that is.
    pub binds: Binding,
    /// Reads of fast memory.
    pub fast_read_gb_s: f64,
    /// CPU attention at the chosen tier, in bytes of KV; 0 without such layers.
    pub cpu_attention_gb_s: f64,
}

/// One tier of the comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TierPlan {
    /// Its K.
    pub type_k: KvType,
    /// Its V.
    pub type_v: KvType,
    /// KV as other engines count it.
    pub kv_bytes: u64,
    /// KV as our blocks take it.
    pub kv_alloc_bytes: u64,
    /// KV beyond what fast memory holds beside all weights.
    pub over_bytes: u64,
    /// KV that the tier's best plan leaves in host memory.
    pub spill_bytes: u64,
    /// The largest spill whose cost is within the target.
    pub t_star_bytes: u64,
    /// Predicted tokens a second at full context; 0 if nothing fits.
    pub tok_s: f64,
    /// The share of tokens a second that placement costs at full context, against KV that takes no room.
    pub drop: f64,
    /// Whether some plan fits.
    pub fits: bool,
    /// Whether some plan that fits is within the target.
    pub within_target: bool,
    /// The largest context with all KV in fast memory.
    pub max_ctx: u64,
    /// The largest context with what may be left in host memory.
    pub max_ctx_spilled: u64,
    /// The plans that were compared, the best first.
    pub candidates: Vec<Candidate>,
    /// Predicted against spill, for plots: with all weights in fast memory.
    pub curve: Vec<CurvePoint>,
}

/// What a spill of so much would do at full context.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CurvePoint {
    /// KV in host memory.
    pub spill_bytes: u64,
    /// Predicted tokens a second.
    pub tok_s: f64,
}

/// What a candidate leaves in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Nothing.
    Resident,
    /// KV rather than weights.
    KvSpilled,
    /// Weights rather than KV.
    WeightsSpilled,
    /// Both, as much of each as costs least.
    Balanced,
}

impl Kind {
    /// As reports say it.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Resident => "all resident",
            Self::KvSpilled => "KV spilled",
            Self::WeightsSpilled => "weights spilled",
            Self::Balanced => "balanced",
        }
    }
}

/// One way to place a tier.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// What it leaves in host memory.
    pub kind: Kind,
    /// What is in fast memory.
    pub placement: Placement,
    /// KV in host memory.
    pub spill_bytes: u64,
    /// Fast memory that it takes.
    pub fast_bytes: u64,
    /// Main memory beyond that.
    pub host_bytes: u64,
    /// Whether both have room.
    pub fits: bool,
    /// Whether what it costs is within the target.
    pub within_target: bool,
    /// The share of tokens a second that it costs at full context, against KV that takes no room.
    pub drop: f64,
    /// Mean of the times below: what candidates are compared by.
    pub mean_ms: f64,
    /// Predictions by live depth.
    pub predicted: Vec<Predicted>,
}

/// A prediction at one live depth.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Predicted {
    /// Cells in use.
    pub depth: u64,
    /// Tokens a second.
    pub tok_s: f64,
    /// A token's time, and where it goes.
    pub token: Token,
}

impl Predicted {
    /// What a token waits for.
    pub fn bound(&self) -> Bound {
        self.token.bound
    }
}

/// What goes where. All parts of one memory add up to its total.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Layout {
    /// Parts of fast memory.
    pub fast: Vec<Part>,
    /// Parts of main memory beyond it.
    pub host: Vec<Part>,
    /// All of fast memory that is taken.
    pub fast_bytes: u64,
    /// All of main memory beyond it that is taken.
    pub host_bytes: u64,
    /// Of that, an embedding of which a device reads a row a token.
    pub embedding_host_bytes: u64,
    /// Cells of the layers that see everything that stay in fast memory.
    pub window_cells: u64,
    /// Cells of these layers in host memory when the context is full.
    pub tail_cells: u64,
    /// KV in host memory when the context is full.
    pub spill_bytes: u64,
    /// Slots for routed experts, of the largest one's size.
    pub expert_slots: u64,
    /// Bytes of these slots.
    pub expert_cache_bytes: u64,
    /// Slots that streamed experts pass through, of the largest one's size.
    pub expert_staging_slots: u64,
    /// Bytes of these.
    pub expert_staging_bytes: u64,
    /// The part of a token's routed experts that is expected to be in fast memory; `None` without experts.
    pub expert_hits: Option<f64>,
    /// Slots that streamed pieces land in.
    pub staging_slots: u64,
    /// What one of them holds.
    pub staging_slot_bytes: u64,
    /// All that streaming needs: slots, and partial results of a chunk's attention.
    pub staging_bytes: u64,
}

/// One part of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// What it is.
    pub what: &'static str,
    /// How much.
    pub bytes: u64,
}

impl TierPlan {
    /// The pair.
    pub fn tier(&self) -> Tier {
        Tier::new(self.type_k, self.type_v)
    }

    /// The best plan that fits.
    pub fn best(&self) -> Option<&Candidate> {
        self.candidates.iter().find(|c| c.fits)
    }
}

impl Plan {
    /// The chosen tier.
    pub fn tier(&self) -> Tier {
        Tier::new(self.type_k, self.type_v)
    }

    /// The chosen tier's part of the comparison.
    pub fn chosen(&self) -> Option<&TierPlan> {
        self.tiers.iter().find(|t| t.tier() == self.tier())
    }

    /// Whether a sequence has more cells than the model was trained with.
    pub fn beyond_training(&self) -> bool {
        self.n_ctx_train > 0 && self.n_ctx / self.n_seq.max(1) > self.n_ctx_train
    }

    /// Why nothing can be loaded, with what would help; `None` if everything has room.
    pub fn refusal(&self) -> Option<String> {
        if self.fits {
            return None;
        }
        let mut text = self.reason.clone();
        if !self.hints.is_empty() {
            text.push_str(": ");
            text.push_str(&self.hints.join(", "));
        }
        Some(text)
    }
}
