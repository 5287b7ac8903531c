//! One token with things where a placement has them.

use serde::{Deserialize, Serialize, Serializer};

use super::{Costs, PIECE_BYTES, Place, TierCost};
use crate::bytes::{BLOCK_CELLS, GROUP_BLOCKS};
use crate::drop::{Additive, Overlapped, amount, bw_eff_gb_s, drop_of_slow_down, ms, part};

/// What a layer takes more on a device where the CPU has a share, in its small operations: two more kernels, which hand over and take back, and the CPU's result in
/// the fold. Measured on an H200 with 1024 cells a layer, less than the device attends meanwhile: 11 us, where a small operation takes 3.8.
const SHARE_OPERATIONS: f64 = 2.9;

/// A batch of copies: a recorded step is cut there, and kernels on both sides do not overlap. There: 6.5 us.
const BATCH_OPERATIONS: f64 = 1.7;

/// Predictions of a token are right to about so much of it.
const LEAST_GAIN: f64 = 0.02;

/// How the cost of what is in host memory is predicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SpillModel {
    /// Read on top of everything else, at the slower of link and host memory.
    Additive,
    /// Copied ahead of use and attended by the CPU where it lies.
    #[default]
    Overlapped,
}

/// What is in fast memory, as far as it is flexible. All else that computes is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Placement {
    /// Dense weights that are left in host memory.
    pub dense_host_bytes: u64,
    /// Slots for routed experts.
    pub expert_cache_bytes: u64,
    /// Cells of the layers that see everything; `u64::MAX`, written as null, for all of them.
    #[serde(serialize_with = "null_for_all")]
    pub window_cells: u64,
    /// Slots that streamed pieces land in.
    pub staging_bytes: u64,
}

/// No number of a plan is a stand-in.
fn null_for_all<S: Serializer>(cells: &u64, to: S) -> Result<S::Ok, S::Error> {
    match *cells {
        u64::MAX => to.serialize_none(),
        cells => to.serialize_u64(cells),
    }
}

/// What a token waits for most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bound {
    /// Fast memory and what computes over it.
    Compute,
    /// Copies from host memory.
    Link,
    /// Host memory, in the additive model.
    HostMemory,
}

/// A token's predicted time and where it goes. The terms add up to `t_ms`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Token {
    /// All of it.
    pub t_ms: f64,
    /// Dense weights in fast memory.
    pub weights_ms: f64,
    /// Routed experts in fast memory.
    pub experts_ms: f64,
    /// Starting operations.
    pub operations_ms: f64,
    /// Attention, as if all cells were in fast memory.
    pub attention_ms: f64,
    /// Recurrent state.
    pub state_ms: f64,
    /// What is added because something is in host memory; negative where the CPU's help makes more than up for it.
    pub spill_ms: f64,
    /// KV that is copied to fast memory.
    pub streamed_bytes: f64,
    /// KV that the CPU attends over where it lies.
    pub cpu_bytes: f64,
    /// What binds.
    pub bound: Bound,
}

impl Token {
    /// Tokens a second; 0 if a token never ends.
    pub fn tok_s(&self) -> f64 {
        let rate = 1e3 / self.t_ms;
        if rate.is_finite() { rate } else { 0.0 }
    }
}

/// Times that add up to a token with everything in fast memory.
#[derive(Clone, Copy)]
struct Resident {
    weights: f64,
    experts: f64,
    operations: f64,
    state: f64,
    windowed: f64,
    full_engage: f64,
    full: f64,
}

impl Resident {
    fn attention(&self) -> f64 {
        self.windowed + self.full
    }

    fn total(&self) -> f64 {
        self.weights + self.experts + self.operations + self.state + self.attention()
    }
}

impl Costs<'_> {
    fn resident(&self, tier: &TierCost, depth: f64) -> Resident {
        let c = &self.common;
        let windowed = tier.windowed.iter().map(|w| w.fast.ms(w.cells(depth)));
        Resident {
            weights: c.dense_fast_ms,
            experts: c.expert_fast_ms,
            operations: c.operations_ms,
            state: c.state_ms,
            windowed: windowed.sum(),
            full_engage: tier.full_fast.engage_us / 1e3,
            full: tier.full_fast.ms(depth),
        }
    }

    /// A token at `depth` cells with everything in fast memory.
    pub fn resident_token(&self, tier: &TierCost, depth: u64) -> Token {
        let all = Placement {
            dense_host_bytes: 0,
            expert_cache_bytes: u64::MAX,
            window_cells: u64::MAX,
            staging_bytes: 0,
        };
        self.token(tier, &all, depth)
    }

    /// A token at `depth` cells.
    pub fn token(&self, tier: &TierCost, placement: &Placement, depth: u64) -> Token {
        let r = self.resident(tier, depth as f64);
        let mut token = Token {
            t_ms: 0.0,
            weights_ms: r.weights,
            experts_ms: r.experts,
            operations_ms: r.operations,
            attention_ms: r.attention(),
            state_ms: r.state,
            spill_ms: 0.0,
            streamed_bytes: 0.0,
            cpu_bytes: 0.0,
            bound: Bound::Compute,
        };
        // The block that is begun is one of those inside.
        let blocks = depth.next_multiple_of(BLOCK_CELLS);
        let tail_cells = blocks.saturating_sub(placement.window_cells).min(depth) as f64;
        let tail = tail_cells * tier.full_cell_bytes * tier.full_reads;
        let missing = self.common.expert_bytes * self.missing_part(placement.expert_cache_bytes);
        // Of the dense weights a token reads all but the rows of the embedding, which never leave host memory.
        let dense = (placement.dense_host_bytes as f64).min(self.common.dense_bytes);
        if tail + missing + dense > 0.0 {
            match (self.machine.place, self.spill_model) {
                (Place::Host, _) => token.cpu_bytes = tail,
                // The same cores attend over the same memory; only what they copy first costs more.
                (Place::VirtualDevice, SpillModel::Overlapped) => {
                    (token.streamed_bytes, token.cpu_bytes) =
                        self.virtual_tail(tier, placement.window_cells, depth);
                    let copied = missing * (1.0 - self.expert_share.unwrap_or(1.0));
                    token.spill_ms = self.virtual_copy_ms(tier, token.streamed_bytes)
                        + ms(copied, self.machine.link_gb_s);
                }
                (_, SpillModel::Additive) => {
                    self.add_additive(tier, &mut token, tail, missing + dense);
                }
                (Place::Device, SpillModel::Overlapped) => {
                    let outside = Outside {
                        tail,
                        missing,
                        dense,
                    };
                    self.add_overlapped(tier, placement, &mut token, &r, depth, outside);
                }
            }
        }
        if self.spill_model == SpillModel::Additive && self.machine.place != Place::Host {
            // The additive model has one term for all that is resident.
            token = self.additive_resident(tier, token, depth);
        }
        token.t_ms = token.weights_ms
            + token.experts_ms
            + token.operations_ms
            + token.attention_ms
            + token.state_ms
            + token.spill_ms;
        token
    }

    /// Bytes of a tail that are copied, and bytes that are attended where they lie, where main memory plays a device: whole blocks, and of
    /// these the CPU's share in whole groups.
    fn virtual_tail(&self, tier: &TierCost, window_cells: u64, depth: u64) -> (f64, f64) {
        let blocks = depth
            .div_ceil(BLOCK_CELLS)
            .saturating_sub(window_cells / BLOCK_CELLS);
        let groups = blocks as f64 / GROUP_BLOCKS as f64 * self.kv_share.unwrap_or(1.0);
        let groups = groups.min((blocks / GROUP_BLOCKS) as f64);
        // Of whole groups a layer, which all layers together come as near to the share with as can be.
        let layers = tier.full_layers.max(1.0);
        let attended = (groups * layers).round() / layers * GROUP_BLOCKS as f64;
        let block = tier.full_cell_bytes * tier.full_reads * BLOCK_CELLS as f64;
        ((blocks as f64 - attended) * block, attended * block)
    }

    /// Copying so many bytes of a tail where main memory plays a device: each layer's part of a block is an operation.
    fn virtual_copy_ms(&self, tier: &TierCost, bytes: f64) -> f64 {
        let block = tier.full_cell_bytes * tier.full_reads * BLOCK_CELLS as f64;
        let pieces = if block > 0.0 {
            bytes / block * tier.full_layers
        } else {
            0.0
        };
        ms(bytes, self.machine.link_gb_s) + pieces * self.machine.host.operation_ms()
    }

    /// The part of a token's experts that is not in fast memory: by what is known of their use, or as if all were used alike, which none
    /// of them is, so that this is the most.
    fn missing_part(&self, cache_bytes: u64) -> f64 {
        1.0 - self.expert_hits(cache_bytes)
    }

    /// The part of a token's experts that a cache is expected to have.
    pub fn expert_hits(&self, cache_bytes: u64) -> f64 {
        let all = self.common.all_expert_bytes;
        if all <= 0.0 {
            return 1.0;
        }
        let held = part(cache_bytes as f64 / all);
        self.hits.map_or(held, |hits| part(hits.at(held)))
    }

    /// The additive model's formula for tail and tier at `depth`.
    pub fn additive(&self, tier: &TierCost, depth: u64) -> Additive {
        let kv = depth as f64 * tier.full_cell_bytes * tier.full_reads;
        let windowed = tier.windowed.iter();
        let windowed = windowed.map(|w| w.cells(depth as f64) * w.cell_bytes);
        let active = self.common.dense_bytes + self.common.expert_bytes;
        let (bw_eff, _) = bw_eff_gb_s(self.machine.link_gb_s, self.machine.host_read_gb_s);
        let engage = self.machine.engage_ms.unwrap_or_else(|| {
            let engage_us = tier.full_fast.engage_us;
            engage_us / 1e3 + self.machine.t_sync_ms * tier.full_layers
        });
        Additive {
            t_resident_ms: crate::drop::t_resident_ms(
                active,
                kv + windowed.sum::<f64>(),
                self.machine.fast.read_gb_s(),
            ),
            engage_ms: engage,
            bw_eff_gb_s: bw_eff,
        }
    }

    fn additive_resident(&self, tier: &TierCost, token: Token, depth: u64) -> Token {
        let resident = self.additive(tier, depth).t_resident_ms;
        let active = self.common.dense_bytes + self.common.expert_bytes;
        let weights = ms(active, self.machine.fast.read_gb_s());
        Token {
            weights_ms: weights,
            experts_ms: 0.0,
            operations_ms: 0.0,
            attention_ms: resident - weights,
            state_ms: 0.0,
            ..token
        }
    }

    fn add_additive(&self, tier: &TierCost, token: &mut Token, tail: f64, weights: f64) {
        let model = self.additive(tier, 0);
        let engage = if tail > 0.0 { model.engage_ms } else { 0.0 };
        token.spill_ms = amount(engage) + ms(tail + weights, model.bw_eff_gb_s);
        token.streamed_bytes = tail;
        let (_, binding) = bw_eff_gb_s(self.machine.link_gb_s, self.machine.host_read_gb_s);
        token.bound = match binding {
            crate::drop::Binding::Link => Bound::Link,
            crate::drop::Binding::HostMemory => Bound::HostMemory,
        };
    }

    /// The overlapped model's formula for a tier at `depth`, with everything else resident.
    pub fn overlapped(&self, tier: &TierCost, depth: u64) -> Overlapped {
        let r = self.resident(tier, depth as f64);
        self.overlapped_with(tier, &r, depth, r.total() - r.full, 0.0, f64::INFINITY)
    }

    fn overlapped_with(
        &self,
        tier: &TierCost,
        r: &Resident,
        depth: u64,
        t_other_ms: f64,
        copied_bytes: f64,
        staging_bytes: f64,
    ) -> Overlapped {
        let m = &self.machine;
        let read_bytes = tier.full_cell_bytes * tier.full_reads;
        let gb_s = |ns_cell: f64| {
            if ns_cell > 0.0 {
                read_bytes / ns_cell
            } else {
                0.0
            }
        };
        let of_all = (m.link_gb_s, m.link_kept_attention);
        let (link_gb_s, link_kept) = tier.copies().unwrap_or(of_all);
        let as_cells = link_gb_s / m.link_gb_s;
        Overlapped {
            link_gb_s,
            cpu_gb_s: gb_s(tier.full_host.ns_cell),
            link_kept,
            cpu_kept: tier.cpu_kept(),
            device_kept: m.kept_device,
            // The CPU begins with all its threads, however few the cells.
            t_sync_ms: m.t_sync_ms + tier.full_host.engage_us / 1e3 / tier.full_layers(),
            layers: tier.full_layers,
            t_other_ms,
            attention_engage_ms: r.full_engage,
            attention_least_ms: tier.full_fast.least_us / 1e3,
            attention_gb_s: gb_s(tier.full_fast.ns_cell),
            kv_bytes: depth as f64 * read_bytes,
            // As many cells would take as long.
            copied_bytes: copied_bytes * if as_cells.is_finite() { as_cells } else { 1.0 },
            staging_bytes,
            share_ms: m.fast.operation_ms() * SHARE_OPERATIONS,
            batch_ms: m.fast.operation_ms() * BATCH_OPERATIONS,
            group_bytes: (GROUP_BLOCKS * BLOCK_CELLS) as f64 * read_bytes,
            least_gain: LEAST_GAIN,
        }
    }

    fn add_overlapped(
        &self,
        tier: &TierCost,
        placement: &Placement,
        token: &mut Token,
        r: &Resident,
        depth: u64,
        outside: Outside,
    ) {
        let other = r.operations + r.state + r.windowed;
        let (experts, experts_copied) = self.experts_ms(outside.missing);
        let c = &self.common;
        // Slices of dense weights: some parts of them by the CPU, the rest copied ahead as the tail is.
        let host_part = if c.dense_bytes > 0.0 {
            outside.dense / c.dense_bytes
        } else {
            0.0
        };
        let staging = placement.staging_bytes as f64;
        let mut best: Option<crate::drop::Split> = None;
        for quarter in 0..=4 {
            let by_cpu = if host_part > 0.0 {
                f64::from(quarter) / 4.0
            } else {
                0.0
            };
            let cpu_ms = if by_cpu > 0.0 {
                let rate = part(self.machine.kept_products.1);
                c.dense_host_ms * host_part * by_cpu / rate + self.machine.t_sync_ms * c.layers
            } else {
                0.0
            };
            let fast_ms = c.dense_fast_ms * (1.0 - host_part * by_cpu);
            let dense_ms = fast_ms.max(cpu_ms);
            let copied = experts_copied + outside.dense * (1.0 - by_cpu);
            let model =
                self.overlapped_with(tier, r, depth, other + dense_ms + experts, copied, staging);
            let split = match self.kv_share {
                None => model.best_split(outside.tail),
                Some(share) => model.shared(outside.tail, share),
            };
            if best.is_none_or(|b| split.t_ms < b.t_ms) {
                best = Some(split);
            }
            if host_part == 0.0 {
                break;
            }
        }
        let best = best.expect("the first quarter was tried");
        token.spill_ms = best.t_ms - r.total();
        token.streamed_bytes = best.streamed_bytes;
        token.cpu_bytes = best.cpu_bytes;
        token.bound = if best.link_binds {
            Bound::Link
        } else {
            Bound::Compute
        };
    }

    /// Routed experts with `missing` bytes of them outside, and how many bytes of these are copied. They are known only after
    /// routing, so their copies run beside their own layer alone.
    fn experts_ms(&self, missing: f64) -> (f64, f64) {
        let (c, m) = (&self.common, &self.machine);
        if missing == 0.0 {
            return (c.expert_fast_ms, 0.0);
        }
        let part_missing = missing / c.expert_bytes;
        let (link_kept, cpu_kept) = m.kept_products;
        let sync = m.t_sync_ms * c.expert_layers;
        let time = |by_cpu: f64| {
            let both = by_cpu > 0.0 && by_cpu < 1.0;
            let (link_kept, cpu_kept) = if both {
                (part(link_kept), part(cpu_kept))
            } else {
                (1.0, 1.0)
            };
            let copied = missing * (1.0 - by_cpu);
            let copies = ms(copied, m.link_gb_s * link_kept);
            let host = if by_cpu > 0.0 {
                c.expert_host_ms * part_missing * by_cpu / cpu_kept + sync
            } else {
                0.0
            };
            let fast = c.expert_fast_ms * (1.0 - part_missing * by_cpu);
            (fast.max(copies).max(host), copied)
        };
        let copies = ms(missing, m.link_gb_s * part(link_kept));
        let host = c.expert_host_ms * part_missing / part(cpu_kept);
        // Copies and CPU end together.
        let balance = part((copies - sync) / (copies + host));
        if let Some(share) = self.expert_share {
            return time(share);
        }
        let mut best = time(0.0);
        for by_cpu in [1.0, balance] {
            let t = time(by_cpu);
            if t.0 < best.0 {
                best = t;
            }
        }
        best
    }

    /// `T*` of a tier at full context `n_ctx`: bytes of stored KV whose cost is at most `target`, before any limit.
    pub fn t_star_bytes(&self, tier: &TierCost, n_ctx: u64, target: f64) -> f64 {
        let kv = n_ctx as f64 * tier.full_cell_bytes;
        let star = match (self.machine.place, self.spill_model) {
            (Place::Host, _) => 0.0,
            (_, SpillModel::Additive) => self.additive(tier, n_ctx).t_star_bytes(target),
            // Outside costs what inside does, but for what is copied.
            (Place::VirtualDevice, SpillModel::Overlapped) => {
                let resident = self.resident_token(tier, n_ctx).t_ms;
                let copied = 1.0 - self.kv_share.unwrap_or(1.0);
                let allowed_ms = resident / (1.0 - part(target)) - resident;
                if copied > 0.0 {
                    const GB: f64 = 1e9;
                    GB * allowed_ms / (self.virtual_copy_ms(tier, GB) * copied)
                } else {
                    f64::INFINITY
                }
            }
            (Place::Device, SpillModel::Overlapped) => {
                self.overlapped(tier, n_ctx).t_star_bytes(target)
            }
        };
        amount(star / tier.full_reads).min(kv)
    }

    /// The share of tokens a second that `tail_bytes` of stored KV cost at `depth`.
    pub fn tail_drop(&self, tier: &TierCost, depth: u64, tail_bytes: f64) -> f64 {
        let tail = tail_bytes * tier.full_reads;
        match (self.machine.place, self.spill_model) {
            (Place::Host, _) => 0.0,
            (Place::VirtualDevice, SpillModel::Overlapped) => {
                let resident = self.resident_token(tier, depth).t_ms;
                let copied = tail * (1.0 - self.kv_share.unwrap_or(1.0));
                drop_between(resident, resident + self.virtual_copy_ms(tier, copied))
            }
            (_, SpillModel::Additive) => self.additive(tier, depth).drop(tail),
            (Place::Device, SpillModel::Overlapped) => self.overlapped(tier, depth).drop(tail),
        }
    }

    /// Milliseconds of work of a placement that the overlapped model may hide: what decides between plans of equal time.
    pub fn hidden_ms(&self, tier: &TierCost, placement: &Placement, depth: u64) -> f64 {
        let tail = depth.saturating_sub(placement.window_cells) as f64 * tier.full_cell_bytes;
        let missing = self.common.expert_bytes * self.missing_part(placement.expert_cache_bytes);
        let outside = tail * tier.full_reads + missing + placement.dense_host_bytes as f64;
        // More slots are worth something until they hold what one layer needs.
        let staged = (placement.staging_bytes as f64 + PIECE_BYTES as f64) * self.common.layers;
        ms(outside, self.machine.link_gb_s) * (1.0 + part(outside / staged) * 0.1)
    }
}

/// Bytes that a token needs from outside fast memory.
#[derive(Clone, Copy)]
struct Outside {
    tail: f64,
    missing: f64,
    dense: f64,
}

/// The share of tokens a second lost from one time to another.
pub fn drop_between(resident_ms: f64, t_ms: f64) -> f64 {
    drop_of_slow_down(amount(t_ms / resident_ms - 1.0))
}
