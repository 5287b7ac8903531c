//! How much memory there is, and what of it is taken whatever is decided.

use serde::Serialize;

use super::request::{Request, SpillWeights};
use crate::bytes::{
    BLOCK_CELLS, Cache, KvAlloc, carried_bytes, device_padding_bytes, device_work_bytes,
    kv_alloc_bytes, kv_bytes, recurrent_bytes, work_bytes,
};
use crate::cost::{PIECE_BYTES, Place};
use crate::error::Error;
use crate::limits::DEVICE_RESERVE_BYTES;
use crate::model::Model;
use crate::profile::Profile;
use crate::tier::Tier;

/// Slots of the staging ring without which nothing can be streamed while something is in use.
const STAGING_SLOTS_MIN: u64 = 4;

/// Slots of a block of one layer's cells each, where nothing else is streamed. Where main memory plays a device more would gain nothing:
/// copies cannot run beside the cores that make them.
const STAGING_SLOTS_BLOCKS: u64 = 8;

/// Slots that streamed experts of one layer pass through, where they have some of their own.
pub(super) const EXPERT_SLOTS: u64 = 8;

/// What is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Where the model computes.
    pub place: Place,
    /// Memory that is computed over directly: the device's, or main memory. Bytes.
    pub fast_bytes: u64,
    /// Main memory beyond that, bytes.
    pub host_bytes: u64,
}

impl Memory {
    /// What a request may use of a machine with so much free; of a device, beside what the process has of it already.
    pub fn new(request: &Request, host_available: u64, device: Option<(u64, u64)>) -> Self {
        let cap = |mib: Option<u64>| mib.map_or(u64::MAX, |m| m.saturating_mul(1 << 20));
        let target = cap(Some(request.vram_target_mib).filter(|&mib| mib > 0));
        let asked = cap(request.device_mem_mib);
        let device = device.map(|(free, context)| {
            let target = target.saturating_sub(context);
            free.min(asked).min(target)
        });
        let asked = asked.min(target);
        match device {
            Some(fast_bytes) => Self {
                place: Place::Device,
                fast_bytes,
                host_bytes: host_available,
            },
            None if asked < u64::MAX => {
                let fast_bytes = asked.min(host_available);
                Self {
                    place: Place::VirtualDevice,
                    fast_bytes,
                    host_bytes: host_available - fast_bytes,
                }
            }
            // A window or a cache of experts says how much is inside; all main memory is there for either part.
            None if request.window_cells.is_some() || request.expert_cache.is_some() => Self {
                place: Place::VirtualDevice,
                fast_bytes: host_available,
                host_bytes: host_available,
            },
            None => Self {
                place: Place::Host,
                fast_bytes: host_available,
                host_bytes: 0,
            },
        }
    }

    /// What a request may use of a profile's machine.
    pub fn of_profile(request: &Request, profile: &Profile) -> Self {
        let device = profile.device.as_ref();
        let available = profile.host.memory_available_bytes;
        Self::new(
            request,
            available,
            device.map(|d| (d.free_bytes, d.context_bytes)),
        )
    }
}

/// What a model takes at one tier and context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Needs {
    /// KV as other engines count it.
    pub kv_bytes: u64,
    /// KV as our blocks take it.
    pub kv: KvAlloc,
    /// Recurrent state.
    pub recurrent: u64,
    /// Work space.
    pub work: u64,
    /// Kept free on a device.
    pub reserve: u64,
    /// What a device's allocations take beyond what is asked for.
    pub padding: u64,
    /// Dense weights that are computed with.
    pub dense: u64,
    /// Routed experts.
    pub experts: u64,
    /// Weights that stay in main memory: the embedding, of which a device needs a row a token.
    pub embedding_host: u64,
    /// The largest expert: a slot.
    pub slot: u64,
    /// Slots that streamed experts pass through, where they have some of their own: needed as soon as one is outside.
    pub expert_staging: u64,
    /// What streaming needs, least: slots, and partial results of a chunk's attention.
    pub staging: u64,
    /// The latter.
    pub carried: u64,
    /// Bytes of a staging slot.
    pub piece: u64,
    /// Fewest blocks of a layer in fast memory: those that a chunk of tokens writes.
    pub blocks_min: u64,
}

impl Needs {
    pub(super) fn new(
        model: &Model,
        request: &Request,
        memory: &Memory,
        tier: Tier,
        n_ctx: u64,
    ) -> Result<Self, Error> {
        let place = memory.place;
        let cache = cache(request, tier, n_ctx);
        let kv = kv_alloc_bytes(model, &cache)?;
        let w = &model.weights;
        let spills_all = request.spill_weights == SpillWeights::All;
        // Without a device chunks are cut to what a window holds, which costs little.
        let of_chunk = match place {
            Place::Device => request.n_ubatch.min(n_ctx).div_ceil(BLOCK_CELLS) + 1,
            Place::VirtualDevice | Place::Host => 1,
        };
        let slots = model.layers.iter().map(|l| l.one_expert_bytes);
        let slot = slots.max().unwrap_or(0);
        let (piece, slots, carried) = match place {
            // An expert goes through one slot.
            Place::Device if spills_all => (PIECE_BYTES.max(slot), STAGING_SLOTS_MIN, 0),
            Place::Device => (kv.full_block, STAGING_SLOTS_BLOCKS, 0),
            Place::VirtualDevice => (
                kv.full_block,
                STAGING_SLOTS_BLOCKS,
                carried_bytes(model, n_ctx, request.n_ubatch)?,
            ),
            Place::Host => (0, 0, 0),
        };
        let slots = request.staging_slots.unwrap_or(slots).max(1);
        let mut needs = Self {
            kv_bytes: kv_bytes(model, &cache)?.total,
            kv,
            recurrent: recurrent_bytes(model, request.n_seq, 0)?,
            work: match place {
                Place::Device => {
                    device_work_bytes(model, n_ctx, request.n_ubatch, request.n_seq)?.total
                }
                Place::Host | Place::VirtualDevice => {
                    work_bytes(model, n_ctx, request.n_ubatch)?.total
                }
            },
            reserve: if place == Place::Device {
                DEVICE_RESERVE_BYTES
            } else {
                0
            },
            padding: if place == Place::Device && !spills_all {
                padding(model, &kv)
            } else {
                0
            },
            // No overflow: describing a model checks the sum of all weights.
            dense: w.dense + w.output + w.embedding,
            experts: w.experts,
            embedding_host: 0,
            slot,
            expert_staging: match (place, request.spill_weights) {
                (Place::Host, _) | (_, SpillWeights::None) => 0,
                (Place::Device, SpillWeights::All) => 0,
                _ => slot.saturating_mul(EXPERT_SLOTS),
            },
            staging: slots.saturating_mul(piece).saturating_add(carried),
            carried,
            piece,
            blocks_min: of_chunk.saturating_mul(request.n_seq).min(kv.full_blocks),
        };
        // A device needs a row of the embedding a token: where not everything has room, that goes first. No product may read it, and where all weights are
        // to be in fast memory it is one of them.
        let may_leave = match request.spill_weights {
            SpillWeights::None => false,
            SpillWeights::Experts => needs.resident() > memory.fast_bytes,
            SpillWeights::All => true,
        };
        let tied = w.output == 0;
        let is_pinned = request.pin_max_bytes.is_none_or(|most| w.embedding <= most);
        if place == Place::Device && may_leave && is_pinned && !tied {
            needs.embedding_host = w.embedding;
            needs.dense -= w.embedding;
        }
        Ok(needs)
    }

    /// Fast memory that is taken whatever is decided.
    pub(super) fn fixed(&self) -> u64 {
        let parts = [
            self.kv.windowed,
            self.recurrent,
            self.work,
            self.reserve,
            self.padding,
        ];
        parts.into_iter().fold(0, u64::saturating_add)
    }

    /// Fast memory if all is there.
    pub(super) fn resident(&self) -> u64 {
        let parts = [self.fixed(), self.dense, self.experts, self.kv.full];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

/// What allocations of weights, all in fast memory, and of slabs of cells take beyond their bytes. All others are few: what they take is in
/// the reserve.
fn padding(model: &Model, kv: &KvAlloc) -> u64 {
    let windowed_slab = kv.windowed.checked_div(kv.windowed_blocks).unwrap_or(0);
    let parts = [
        model.weights.device_padding,
        device_padding_bytes(kv.full_slab, kv.full_blocks),
        device_padding_bytes(windowed_slab, kv.windowed_blocks),
    ];
    parts.into_iter().fold(0, u64::saturating_add)
}

/// The cache of a request at a tier.
pub(super) fn cache(request: &Request, tier: Tier, n_ctx: u64) -> Cache {
    Cache {
        n_ctx,
        n_seq: request.n_seq,
        streams: request.streams,
        type_k: tier.type_k,
        type_v: tier.type_v,
        n_ubatch: request.n_ubatch,
    }
}
