//! One budget of fast memory, divided between dense weights, expert slots, the KV window and staging slots.

use super::memory::{Memory, Needs};
use super::request::{Request, Spill, SpillWeights};
use crate::bytes::BLOCK_CELLS;
use crate::cost::{Costs, Place, Placement, TierCost};

/// Steps that a budget is given away in: finer ones change predictions by less than their error.
const STEPS: u64 = 96;

/// More staging than this much of the budget is never tried: it only bounds how far copies run ahead.
const STAGING_PART_MAX: u64 = 8;

/// Slots for what a layer streams, as multiples of that: while one layer's are attended, the next one's are filled. Layers differ a little in what
/// they stream, and fewer slots than a layer needs have it attended in parts. More of them are filled in fewer batches, but take room from the window.
const STAGING_LAYERS: [f64; 3] = [2.0, 4.0, 8.0];

/// What slots come in.
const STAGING_STEP: u64 = 4;

/// How a budget is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Weights first: KV is what is spilled.
    WeightsFirst,
    /// KV first: weights are what is spilled.
    KvFirst,
    /// A step goes to whatever it saves most time.
    Worth,
}

/// What can be divided: bytes in fast memory of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Given {
    pub dense: u64,
    pub experts: u64,
    pub blocks: u64,
    pub staging: u64,
}

impl Given {
    pub(super) fn bytes(&self, needs: &Needs) -> u64 {
        let window = self.blocks.saturating_mul(needs.kv.full_slab);
        let through = self.expert_staging(needs);
        let parts = [self.dense, self.experts, window, self.staging, through];
        parts.into_iter().fold(0, u64::saturating_add)
    }

    /// Slots that streamed experts pass through.
    pub(super) fn expert_staging(&self, needs: &Needs) -> u64 {
        if self.experts < needs.experts {
            needs.expert_staging
        } else {
            0
        }
    }

    pub(super) fn placement(&self, needs: &Needs) -> Placement {
        let window_cells = if self.blocks >= needs.kv.full_blocks {
            u64::MAX
        } else {
            self.blocks.saturating_mul(BLOCK_CELLS)
        };
        Placement {
            dense_host_bytes: needs.dense - self.dense,
            expert_cache_bytes: self.experts,
            window_cells,
            staging_bytes: self.staging,
        }
    }

    /// KV outside fast memory.
    pub(super) fn tail_bytes(&self, needs: &Needs) -> u64 {
        let outside = needs.kv.full_blocks.saturating_sub(self.blocks);
        outside.saturating_mul(needs.kv.full_slab)
    }

    pub(super) fn all_weights(&self, needs: &Needs) -> bool {
        self.dense == needs.dense && self.experts == needs.experts
    }

    pub(super) fn all(&self, needs: &Needs) -> bool {
        self.all_weights(needs) && self.blocks == needs.kv.full_blocks
    }

    /// Main memory for what is outside. Experts that are not all resident are all there: slots change what they hold.
    pub(super) fn host_bytes(&self, needs: &Needs) -> u64 {
        let experts = if self.experts < needs.experts {
            needs.experts
        } else {
            0
        };
        let parts = [
            needs.embedding_host,
            needs.dense - self.dense,
            experts,
            self.tail_bytes(needs),
        ];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

/// Blocks of each layer that sees everything that may be in fast memory.
pub(super) fn window_blocks(request: &Request, needs: &Needs) -> u64 {
    let asked = request
        .window_cells
        .map(|cells| cells.div_ceil(BLOCK_CELLS).max(1));
    asked.unwrap_or(u64::MAX).min(needs.kv.full_blocks)
}

/// What a division is judged by.
pub(super) struct Judge<'a> {
    pub costs: &'a Costs<'a>,
    pub tier: &'a TierCost,
    pub depths: &'a [u64],
}

impl Judge<'_> {
    /// Mean time of a token over the depths.
    pub(super) fn mean_ms(&self, placement: &Placement) -> f64 {
        let times = self.depths.iter();
        let sum: f64 = times
            .map(|&depth| self.costs.token(self.tier, placement, depth).t_ms)
            .sum();
        sum / self.depths.len().max(1) as f64
    }

    /// Slots that hold what so many layers stream at full context from this placement.
    fn staging_slots(&self, needs: &Needs, given: &Given, layers: f64) -> u64 {
        let ample = Placement {
            staging_bytes: u64::MAX,
            ..given.placement(needs)
        };
        let depth = self.depths.last().copied().unwrap_or(0);
        let streamed = self.costs.token(self.tier, &ample, depth).streamed_bytes;
        let slots = streamed / self.tier.full_layers() / needs.piece.max(1) as f64;
        // As integers are made of floats: NaN is 0.
        ((slots * layers).ceil() as u64).next_multiple_of(STAGING_STEP)
    }

    /// The same, with a little for work that is hidden: among equal times the one that leaves more room wins.
    fn objective(&self, placement: &Placement) -> f64 {
        let hidden = self.depths.iter();
        let hidden: f64 = hidden
            .map(|&depth| self.costs.hidden_ms(self.tier, placement, depth))
            .sum();
        self.mean_ms(placement) + 1e-4 * hidden
    }
}

/// Divides what is left of fast memory; `None` if not even what must be there has room.
pub(super) fn split(
    request: &Request,
    memory: &Memory,
    needs: &Needs,
    order: Order,
    judge: &Judge<'_>,
) -> Option<Given> {
    let capacity = memory.fast_bytes.checked_sub(needs.fixed())?;
    let experts_max = request
        .expert_cache
        .map_or(needs.experts, |cache| cache.bytes(needs.experts));
    let window = window_blocks(request, needs);
    let most = Given {
        dense: needs.dense,
        experts: experts_max,
        blocks: window,
        staging: 0,
    };
    let whole = window == needs.kv.full_blocks && most.experts == needs.experts;
    if most.bytes(needs) <= capacity && whole {
        return Some(most);
    }
    let blocks_min = match request.spill {
        Spill::Off => needs.kv.full_blocks,
        Spill::Auto => needs.blocks_min,
        Spill::Mib(mib) => {
            let tail = mib.saturating_mul(1 << 20) / needs.kv.full_slab.max(1);
            needs
                .kv
                .full_blocks
                .saturating_sub(tail)
                .max(needs.blocks_min)
        }
    };
    let blocks_min = match request.window_cells {
        None => blocks_min,
        // What was asked for is kept, unless that leaves more outside than may be.
        Some(_) if blocks_min <= window || request.spill == Spill::Auto => window,
        Some(_) => return None,
    };
    let least = Given {
        dense: 0,
        experts: 0,
        blocks: blocks_min,
        staging: needs.staging,
    };
    let hand = |staging: u64| {
        let given = Given { staging, ..least };
        Some(Hand {
            needs,
            most,
            given,
            left: capacity.checked_sub(given.bytes(needs))?,
        })
    };
    let mut hand_least = hand(least.staging)?;
    // A dense model is all in fast memory, or not at all.
    let is_whole = match request.spill_weights {
        SpillWeights::None => true,
        SpillWeights::Experts => needs.experts == 0,
        SpillWeights::All => false,
    };
    if is_whole {
        let with = |mut hand: Hand<'_>| {
            hand.give(What::Dense, u64::MAX);
            hand.give(What::Experts, u64::MAX);
            hand.give(What::Window, u64::MAX);
            hand.given.all_weights(needs).then_some(hand.given)
        };
        let least = with(hand_least)?;
        if memory.place != Place::Device || request.staging_slots.is_some() {
            return Some(least);
        }
        let more = STAGING_LAYERS.into_iter().filter_map(|layers| {
            let slots = judge.staging_slots(needs, &least, layers);
            let staging = slots.saturating_mul(needs.piece);
            let staging = staging
                .min(capacity / STAGING_PART_MAX)
                .saturating_add(needs.carried);
            hand(staging.max(needs.staging)).and_then(with)
        });
        let ms = |given: &Given| judge.mean_ms(&given.placement(needs));
        // The fewest of those that are equal.
        let best = more.min_by(|a, b| ms(a).total_cmp(&ms(b)));
        return Some(best.unwrap_or(least));
    }
    let hand = &mut hand_least;
    if request.spill_weights == SpillWeights::Experts {
        hand.give(What::Dense, u64::MAX);
        if hand.given.dense < needs.dense {
            return None;
        }
    }
    match order {
        Order::WeightsFirst => {
            hand.give(What::Dense, u64::MAX);
            hand.give(What::Experts, u64::MAX);
            hand.give(What::Window, u64::MAX);
        }
        Order::KvFirst => {
            hand.give(What::Window, u64::MAX);
            hand.give(What::Dense, u64::MAX);
            hand.give(What::Experts, u64::MAX);
        }
        Order::Worth => hand.give_by_worth(judge, capacity),
    }
    if request.spill_weights == SpillWeights::Experts && hand.given.blocks == needs.kv.full_blocks {
        // No cells are streamed, and experts have slots of their own.
        hand.left += std::mem::take(&mut hand.given.staging);
        hand.give(What::Experts, u64::MAX);
    }
    Some(hand.given)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Dense,
    Experts,
    Window,
    Staging,
}

impl What {
    const ALL: [Self; 4] = [Self::Dense, Self::Window, Self::Experts, Self::Staging];
}

/// A budget being given away.
struct Hand<'a> {
    needs: &'a Needs,
    most: Given,
    given: Given,
    left: u64,
}

impl Hand<'_> {
    /// Gives at most `step` bytes, in whole units; says how many.
    fn give(&mut self, what: What, step: u64) -> u64 {
        let step = step.min(self.left);
        let (now, most, unit) = match what {
            What::Dense => (&mut self.given.dense, self.most.dense, 1),
            What::Experts => (
                &mut self.given.experts,
                self.most.experts,
                self.needs.slot.max(1),
            ),
            What::Window => (
                &mut self.given.blocks,
                self.most.blocks,
                self.needs.kv.full_slab,
            ),
            What::Staging => (
                &mut self.given.staging,
                // What bounds it is not a need, but what is left.
                u64::MAX,
                self.needs.piece.max(1),
            ),
        };
        let bytes = if what == What::Window {
            if unit == 0 {
                // No layer has cells: nothing to place.
                return 0;
            }
            let blocks = (step / unit).min(most - *now);
            *now += blocks;
            blocks * unit
        } else {
            let room = most - *now;
            // The last slot may be smaller than a whole one.
            let bytes = if room <= step {
                room
            } else {
                step / unit * unit
            };
            *now += bytes;
            bytes
        };
        self.left -= bytes;
        bytes
    }

    fn give_by_worth(&mut self, judge: &Judge<'_>, capacity: u64) {
        let unit = [self.needs.slot, self.needs.kv.full_slab, self.needs.piece];
        let largest = unit.into_iter().max().unwrap_or(1);
        let step = (self.left / STEPS).max(largest).max(1);
        let staging_most = capacity / STAGING_PART_MAX;
        loop {
            let now = judge.objective(&self.given.placement(self.needs));
            let mut best: Option<(f64, What)> = None;
            for what in What::ALL {
                if what == What::Staging && self.given.staging >= staging_most {
                    continue;
                }
                let mut tried = Hand {
                    needs: self.needs,
                    most: self.most,
                    given: self.given,
                    left: self.left,
                };
                let bytes = tried.give(what, step);
                if bytes == 0 {
                    continue;
                }
                let saved = now - judge.objective(&tried.given.placement(self.needs));
                let worth = saved / bytes as f64;
                if worth > 0.0 && best.is_none_or(|(b, _)| worth > b) {
                    best = Some((worth, what));
                }
            }
            let Some((_, what)) = best else { break };
            self.give(what, step);
        }
        // What saves nothing by itself still makes room elsewhere.
        for what in [What::Dense, What::Window, What::Experts] {
            self.give(what, u64::MAX);
        }
    }
}
