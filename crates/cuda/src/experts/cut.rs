//! How work on experts is cut into thread blocks. Sizes that kernels have fixed are named as in `kernels/experts_few.cuh`.

use cpu::mixture::Routing;
use gguf::TensorType;
use quant::product::{CHUNK, down_passes, has_min};

use super::Blob;
use crate::device::Properties;
use crate::product::meets_sums;

/// Warps of a thread block at most.
const WARPS_MAX: usize = 16;

/// What kernels hold beside the memory that they are launched with, and what the system keeps of a thread block's.
const SHARED_FIXED: usize = 1 << 10;

/// Shared memory that a thread block of a kernel for few tokens can be launched with, at most.
pub(super) fn shared_bytes_max(device: &Properties) -> usize {
    device.shared_bytes_block_max.saturating_sub(SHARED_FIXED)
}

/// Bytes of a ring and all else of `gate_up`: what it leaves is for `down`, which begins to fetch weights meanwhile.
const GATE_UP_BYTES: usize = 116 << 10;

/// The same of `down`.
const DOWN_BYTES: usize = 128 << 10;

/// Bytes of sums of chunks that wait.
const SUMS_BYTES: usize = 24 << 10;

/// Shared memory of a thread block at most, on devices of 9.0.
const SHARED_MAX: usize = 232_448;

/// `struct ManyStage`: bytes of shared memory of a kernel for so many columns.
pub(super) fn many_shared_bytes(ty: TensorType, columns: usize) -> usize {
    let (len, block) = (ty.block_len(), ty.block_bytes() * 16);
    let ks = if len == 256 { 256 } else { 128 };
    let (blocks, atoms, tiles) = (ks / len, columns / 8, 8);
    let scales = blocks * columns * 4;
    let sums = match (has_min(ty), len) {
        (false, _) => 0,
        (true, 256) => atoms * 256,
        (true, _) => scales,
    };
    let stage = ks / 128 * atoms * 1024 + scales + sums + tiles * blocks * block;
    let stage = stage.next_multiple_of(1024);
    let totals = 256 * columns / 2 * 4;
    let stages = ((SHARED_MAX - 1024 - 256 - totals) / stage).min(8);
    stages * stage + totals + 1024 + 256
}

/// Bytes of a unit.
fn unit_bytes(ty: TensorType) -> usize {
    CHUNK / ty.block_len() * ty.block_bytes() * 16
}

/// Bytes of activations in shared memory.
fn acts_bytes(ty: TensorType, k: usize, columns: usize) -> usize {
    let q = k * columns;
    if ty.block_len() != 256 {
        return q + (k / 32 * columns * 8).next_multiple_of(16);
    }
    let blocks = k / 256 * columns;
    q + if meets_sums(ty) { blocks * 32 } else { 0 } + blocks.next_multiple_of(4) * 4
}

/// Bytes of `struct Choice`, and of a list of `units` units behind it.
fn choice_bytes(routing: &Routing, units: usize) -> usize {
    let choice = 8 * fours(routing) + route_bytes(routing) + 4 * routing.used;
    choice.next_multiple_of(8) + 8 * units
}

fn fours(routing: &Routing) -> usize {
    routing.experts.next_multiple_of(4)
}

/// Bytes of `struct RouteRoom`, with weights.
pub(super) fn route_bytes(routing: &Routing) -> usize {
    let groups = routing.groups.map_or(0, |groups| groups.used);
    8 * fours(routing) + 4 * routing.used.max(groups)
}

/// Shared memory of `scores_*`, with weights of so many bytes.
pub(super) fn score_bytes(weight: usize, tokens: usize) -> usize {
    CHUNK * 16 * weight + tokens * CHUNK * 4
}

/// Shared memory of `normed_scores_*`, with weights of so many bytes.
pub(super) fn normed_score_bytes(weight: usize, width: usize) -> usize {
    CHUNK * 16 * weight + 4 * width
}

/// A launch of one of the kernels for a few tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    /// Thread blocks a token.
    pub(super) grid: usize,
    /// Pairs of tiles a thread block.
    pub(super) per: usize,
    pub(super) warps: usize,
    /// Stages of a warp's ring.
    pub(super) stages: usize,
    pub(super) shared_bytes: usize,
}

impl Cut {
    pub(super) fn gate_up(
        blob: &Blob,
        routing: &Routing,
        tokens: usize,
        device: &Properties,
    ) -> Self {
        let chunks = blob.width.div_ceil(CHUNK);
        let pairs = routing.used * blob.ff / 16;
        let blocks = (device.multiprocessors / tokens.max(1)).max(1);
        let most = (SUMS_BYTES / (128 * chunks)).max(1);
        let per = pairs.div_ceil(blocks).clamp(1, most);
        let units = per * 2 * chunks;
        let rest =
            acts_bytes(blob.inputs, blob.width, 1) + units * 64 + choice_bytes(routing, units);
        // What `down` needs that begins meanwhile, where there is room for both.
        let next = Self::down(blob, routing, device).shared_bytes + 2 * SHARED_FIXED;
        let left = device.shared_bytes.saturating_sub(next) & !127;
        let budget = GATE_UP_BYTES.min(left);
        let cut = Self::rings(blob.inputs, units, 1, rest, budget, device);
        Self {
            grid: pairs.div_ceil(per),
            per,
            ..cut
        }
    }

    pub(super) fn down(blob: &Blob, routing: &Routing, device: &Properties) -> Self {
        let used = routing.used;
        let (chunks, passes) = (blob.ff.div_ceil(CHUNK), down_passes(blob.down).count());
        let rest = used * acts_bytes(blob.down, blob.ff, passes)
            + used * (chunks * passes + 1) * 64
            + choice_bytes(routing, used * chunks);
        // What the warps quantise before they multiply.
        let blocks = used * blob.ff / 256;
        let cut = Self::rings(blob.down, used * chunks, blocks, rest, DOWN_BYTES, device);
        Self {
            grid: blob.width / 16,
            per: 1,
            ..cut
        }
    }

    /// Warps that share `units` units, and their rings. Where there is room for all units at once, each has its own place, and there are as many warps as have
    /// work; else units are done in as few rounds as there can be, each as many as the others, by no fewer warps than `others` where that costs no round.
    fn rings(
        ty: TensorType,
        units: usize,
        others: usize,
        rest: usize,
        budget: usize,
        device: &Properties,
    ) -> Self {
        let place = unit_bytes(ty) + 16;
        let most = shared_bytes_max(device).saturating_sub(rest) / place;
        let budget = budget.saturating_sub(rest) / place;
        let others = others.min(WARPS_MAX);
        let warps = if units <= budget {
            units.min(WARPS_MAX).max(others)
        } else {
            let rounds = units.div_ceil(WARPS_MAX);
            let warps = units.div_ceil(rounds).max(others);
            warps.clamp(1, most.max(1))
        };
        let rounds = units.div_ceil(warps);
        let stages = if units <= budget {
            rounds
        } else {
            (budget / warps).clamp(1, rounds.max(1))
        };
        Self {
            grid: 0,
            per: 0,
            warps,
            stages,
            shared_bytes: units.min(warps * stages) * place + rest,
        }
    }
}

/// Places of one expert that are filled up together, and how the products are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pad(pub(super) usize);

impl Pad {
    /// From the smallest on.
    pub(super) const ALL: [usize; 3] = [32, 64, 128];

    /// Pairs an expert up to which the smaller ones are used.
    const EACH_MAX: [usize; 2] = [24, 96];

    /// The one for so many pairs of experts that are all equally likely.
    pub(super) fn of(pairs: usize, experts: usize) -> Self {
        let each = pairs / experts;
        let at = Self::EACH_MAX.iter().position(|&most| each <= most);
        Self(Self::ALL[at.unwrap_or(2)])
    }

    /// Places that up to so many pairs may need, whichever is used.
    pub(super) fn room(pairs: usize, experts: usize) -> usize {
        let most = Self::EACH_MAX.map(|most| (most + 1) * experts - 1);
        let most = [most[0], most[1], usize::MAX].map(|most| most.min(pairs));
        let room = |(pad, pairs)| Self(pad).blocks(pairs, experts) * pad;
        Self::ALL.into_iter().zip(most).map(room).max().unwrap_or(0)
    }

    /// Blocks of places that so many pairs may need.
    pub(super) fn blocks(self, pairs: usize, experts: usize) -> usize {
        (pairs + (self.0 - 1) * experts.min(pairs)) / self.0
    }

    /// Columns of the kernel for `passes` passes, and its column blocks for each block of places.
    pub(super) fn columns(self, passes: usize) -> (usize, usize) {
        let all = self.0 * passes;
        let columns = all.min(128);
        (columns, all / columns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cpu::mixture::Weighing;

    fn h200() -> Properties {
        Properties {
            name: "a device of 9.0".into(),
            compute: (9, 0),
            multiprocessors: 132,
            l2_bytes: 50 << 20,
            shared_bytes_block_max: 232_448,
            shared_bytes: 233_472,
            total_bytes: 1 << 37,
        }
    }

    fn routing(experts: usize, used: usize) -> Routing {
        Routing {
            experts,
            used,
            weighing: Weighing::Softmax,
            scale: 1.0,
            groups: None,
        }
    }

    #[test]
    fn known_shapes_fit_a_thread_block() {
        use TensorType as T;
        for (inputs, down, width, ff, experts, used) in [
            (T::Q4_K, T::Q6_K, 2048, 768, 128, 8),
            (T::Q4_K, T::Q4_K, 2048, 768, 128, 8),
            (T::MXFP4, T::MXFP4, 2880, 2880, 32, 4),
            (T::Q4_K, T::Q6_K, 4096, 14_336, 8, 2),
            (T::Q8_0, T::Q8_0, 4096, 14_336, 8, 2),
            (T::IQ2_XXS, T::Q2_K, 2048, 1024, 64, 8),
        ] {
            let blob = Blob::new([inputs, inputs, down], width, ff, false).unwrap();
            let (device, routing) = (h200(), routing(experts, used));
            for tokens in [1, 3, 16] {
                let gate_up = Cut::gate_up(&blob, &routing, tokens, &device);
                let downs = Cut::down(&blob, &routing, &device);
                for cut in [gate_up, downs] {
                    assert!(cut.shared_bytes <= shared_bytes_max(&device), "{cut:?}");
                    assert!((1..=WARPS_MAX).contains(&cut.warps), "{cut:?}");
                }
                assert!(gate_up.grid * gate_up.per >= used * ff / 16);
            }
        }
    }

    #[test]
    fn places_hold_any_choice() {
        for pad in Pad::ALL {
            for (pairs, experts) in [(1_usize, 128), (2000, 128), (4096, 8), (33, 32)] {
                let pad = Pad(pad);
                // As uneven as can be: every expert but one has a single pair.
                let alone = experts.min(pairs) - 1;
                let needed = alone + (pairs - alone).div_ceil(pad.0);
                assert!(needed <= pad.blocks(pairs, experts), "{pad:?} {pairs}");
            }
        }
        for (pairs, experts) in [(4096, 128), (33_000, 128), (260, 4), (17, 40)] {
            for few in (1..=pairs).step_by(7) {
                let pad = Pad::of(few, experts);
                assert!(pad.blocks(few, experts) * pad.0 <= Pad::room(pairs, experts));
            }
        }
    }
}
