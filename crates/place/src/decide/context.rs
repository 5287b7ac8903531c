//! The largest context that fits, and what to say when the one asked for does not.

use super::memory::{Memory, Needs};
use super::request::{Request, Spill, SpillWeights};
use super::split::window_blocks;
use crate::bytes::{BLOCK_CELLS, check_types};
use crate::limits::CTX_SEARCH_MAX;
use crate::model::Model;
use crate::tier::{LADDER, Tier};

/// Where a context's KV may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kv {
    /// In fast memory.
    Resident,
    /// What does not fit there in main memory, where the request allows it.
    Spilled,
}

/// Whether a context has room.
fn fits(
    model: &Model,
    request: &Request,
    memory: &Memory,
    tier: Tier,
    n_ctx: u64,
    kv: Kv,
    weights_resident: bool,
) -> bool {
    // Beyond 64 bits nothing has room.
    let Ok(needs) = Needs::new(model, request, memory, tier, n_ctx) else {
        return false;
    };
    let window = window_blocks(request, &needs);
    let whole = window == needs.kv.full_blocks;
    if whole && needs.resident() <= memory.fast_bytes && needs.embedding_host <= memory.host_bytes {
        return true;
    }
    if !whole && kv == Kv::Resident {
        return false;
    }
    let staging = needs.staging;
    let spill_max = match (kv, request.spill) {
        (Kv::Resident, _) | (_, Spill::Off) => 0,
        (Kv::Spilled, Spill::Auto) => u64::MAX,
        (Kv::Spilled, Spill::Mib(mib)) => mib.saturating_mul(1 << 20),
    };
    let slab = needs.kv.full_slab.max(1);
    let movable = needs.kv.full_blocks - needs.blocks_min;
    let asked = needs.kv.full_blocks - window;
    if asked > spill_max / slab {
        return false;
    }
    let movable = if whole { movable } else { asked };
    let tail = (spill_max / slab).min(movable).saturating_mul(slab);
    let kv_in = needs.kv.full - tail.min(needs.kv.full);
    let fixed = needs.fixed().saturating_add(staging).saturating_add(kv_in);
    let Some(room) = memory.fast_bytes.checked_sub(fixed) else {
        return false;
    };
    let fits_host = |parts: [u64; 2]| {
        let outside = parts
            .into_iter()
            .fold(needs.embedding_host, u64::saturating_add);
        outside <= memory.host_bytes
    };
    // Weights first: only KV is outside, in whole blocks.
    let weights = needs.dense.saturating_add(needs.experts);
    if let Some(free) = room.checked_sub(weights)
        && fits_host([tail.saturating_sub(free / slab * slab), 0])
    {
        return true;
    }
    // KV first: all experts are outside, for slots change what they hold, and what else has no room.
    let inside = needs.dense.saturating_add(needs.expert_staging);
    let over = inside.saturating_add(tail).saturating_sub(room);
    match request.spill_weights {
        SpillWeights::None => false,
        SpillWeights::Experts => {
            let dense_fits = inside <= room;
            !weights_resident && dense_fits && fits_host([needs.experts, over])
        }
        SpillWeights::All => !weights_resident && fits_host([needs.experts, over]),
    }
}

/// The largest context that fits, in whole blocks; 0 if none does. Weights stay in fast memory if they have room there with
/// the shortest context.
pub(super) fn max_ctx(
    model: &Model,
    request: &Request,
    memory: &Memory,
    tier: Tier,
    kv: Kv,
) -> u64 {
    let at = |blocks: u64, weights_resident| {
        let n_ctx = blocks * BLOCK_CELLS;
        fits(model, request, memory, tier, n_ctx, kv, weights_resident)
    };
    let weights_resident = at(1, true);
    if !weights_resident && !at(1, false) {
        return 0;
    }
    let (mut low, mut high) = (1, CTX_SEARCH_MAX / BLOCK_CELLS + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if at(middle, weights_resident) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low * BLOCK_CELLS
}

/// A context that people ask for, at most `n`.
fn round_down(n: u64) -> u64 {
    if n >= 1024 { n / 1024 * 1024 } else { n }
}

/// The least chunk of a prompt that is proposed.
const UBATCH_LEAST: u64 = 32;

/// What would fit instead: less context at the tiers allowed, or the whole context, or as much as can be, at lower tiers; all of it with less work
/// space, which shorter chunks of a prompt need.
pub(super) fn hints(
    model: &Model,
    request: &Request,
    memory: &Memory,
    allowed: &[Tier],
) -> Vec<String> {
    let most = |request: &Request, tier| max_ctx(model, request, memory, tier, Kv::Spilled);
    let mut hints = Vec::new();
    // The first tier is what one would get; the last one has the most room.
    let mut best = 0;
    for &tier in [allowed.first(), allowed.last()].into_iter().flatten() {
        let n = round_down(most(request, tier)).min(request.n_ctx);
        if n > best {
            best = n;
            let with = if Some(&tier) == allowed.first() {
                String::new()
            } else {
                format!(" and {tier}")
            };
            hints.push(format!("with --ctx {n}{with} it fits"));
        }
    }
    let of_allowed = best;
    for tier in LADDER {
        let usable = check_types(model, tier.type_k, tier.type_v).is_ok();
        if !usable || allowed.contains(&tier) {
            continue;
        }
        let n = round_down(most(request, tier)).min(request.n_ctx);
        if n > best {
            best = n;
            hints.push(format!("with {tier} it fits at {n}"));
        }
    }
    if request.spill != Spill::Auto {
        let auto = Request {
            spill: Spill::Auto,
            ..*request
        };
        let n = allowed
            .last()
            .map_or(0, |&tier| round_down(most(&auto, tier)).min(request.n_ctx));
        // The other way beside lower tiers: what was pinned stays.
        if n > of_allowed {
            hints.push(format!("with --spill auto it fits at {n}"));
        }
    }
    if let Some(&tier) = allowed.first() {
        let halves = std::iter::successors(Some(request.n_ubatch / 2), |n| Some(n / 2));
        let fitting = halves.take_while(|&n| n >= UBATCH_LEAST).find(|&n_ubatch| {
            let shorter = Request {
                n_ubatch,
                ..*request
            };
            most(&shorter, tier) >= request.n_ctx
        });
        hints.extend(fitting.map(|n| format!("with --ubatch {n} it fits")));
    }
    hints
}
