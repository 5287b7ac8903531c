//! What a generated token takes, term by term, for any placement.
//!
//! ```text
//! t = weights      sum over formats of active bytes / the product's rate at one token
//!   + experts      the same for the routed experts of a token, wherever they are
//!   + operations   everything small, in empty operations * what an empty one takes
//!   + attention    sum over layers of (engage + slope * cells)
//!   + state        recurrent state, read and written
//!   + spill        what leaving something in host memory adds
//! ```
//!
//! The terms are physical and separate, so that a wrong prediction says which of them is wrong.

mod experts;
mod processor;
#[cfg(test)]
mod tests;
mod token;

pub use processor::{Attention, Processor};
pub use token::{Bound, Placement, SpillModel, Token, drop_between};

use std::collections::HashMap;

use crate::bytes::KvType;
use crate::drop::{amount, ms, part};
use crate::experts::HitCurve;
use crate::model::{Cells, Keeps, Model};
use crate::profile::{HeadShape, Profile};
use crate::tier::Tier;

/// Transfers go in pieces of this size: the link is near its best rate, and the first piece does not take long.
pub const PIECE_BYTES: u64 = 2 << 20;

/// Where a model computes, and what of it is beyond fast memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// On the CPU, everything in main memory.
    Host,
    /// On the CPU; part of main memory plays a device's, so that what lies outside can be tested. The same cores attend over both parts,
    /// unless they are told to copy some of the tail first.
    VirtualDevice,
    /// On a device with memory of its own.
    Device,
}

/// A machine as cost functions see it.
#[derive(Clone, Debug)]
pub struct Machine<'a> {
    /// Where the model computes.
    pub place: Place,
    /// The CPU.
    pub host: Processor<'a>,
    /// What computes over fast memory.
    pub fast: Processor<'a>,
    /// Copies into fast memory, never faster than host memory is read.
    pub link_gb_s: f64,
    /// Host memory, as the additive model counts it.
    pub host_read_gb_s: f64,
    /// The part that the link keeps beside CPU attention.
    pub link_kept_attention: f64,
    /// The part that the device keeps while copies are written to its memory.
    pub kept_device: f64,
    /// The parts that link and CPU products keep beside each other.
    pub kept_products: (f64, f64),
    /// Handing a layer's work to the CPU and back.
    pub t_sync_ms: f64,
    /// `c_engage` of the additive model, if it was measured.
    pub engage_ms: Option<f64>,
}

impl<'a> Machine<'a> {
    /// The machine of a profile. A device is used if there is one, unless `place` says otherwise.
    pub fn new(profile: &'a Profile, place: Place, threads: u32) -> Self {
        let host = &profile.host;
        let cpu = Processor::cpu(host, threads, profile.key.threads);
        let host_read = host.read_gb_s.all.value;
        let engage_ms = host.engage.engage_ms.map(|f| f.value);
        match (place, &profile.device) {
            (Place::Device, Some(device)) => {
                let link = link_gb_s(&device.link.to_device_pinned, PIECE_BYTES);
                let kept = &device.kept;
                Self {
                    place,
                    host: cpu.beside_a_device(threads, kept.attention.value),
                    fast: Processor::device(device),
                    link_gb_s: link.min(host_read),
                    host_read_gb_s: host_read,
                    link_kept_attention: kept.link_attention.value,
                    kept_device: kept.device.value,
                    kept_products: (kept.link_products.value, kept.products.value),
                    t_sync_ms: amount(device.t_sync_us.value) / 1e3,
                    engage_ms,
                }
            }
            (place, _) => Self {
                place: if place == Place::VirtualDevice {
                    place
                } else {
                    Place::Host
                },
                fast: cpu.clone(),
                host: cpu,
                link_gb_s: host
                    .stage_gb_s
                    .map_or(host.copy_gb_s.all.value, |staged| staged.value)
                    .min(host_read),
                host_read_gb_s: host_read,
                link_kept_attention: 1.0,
                kept_device: 1.0,
                kept_products: (1.0, 1.0),
                t_sync_ms: 0.0,
                engage_ms,
            },
        }
    }
}

/// The rate of transfers of `bytes`: between the measured sizes by the logarithm of the size, the nearest one outside them.
fn link_gb_s(rates: &[crate::profile::Transfer], bytes: u64) -> f64 {
    let above = rates.iter().position(|t| t.bytes >= bytes);
    match above {
        Some(0) => rates[0].gb_s.value,
        Some(i) => {
            let (low, high) = (&rates[i - 1], &rates[i]);
            let log = |n: u64| (n.max(1) as f64).ln();
            let at = (log(bytes) - log(low.bytes)) / (log(high.bytes) - log(low.bytes));
            low.gb_s.value + (high.gb_s.value - low.gb_s.value) * at
        }
        None => rates.last().map_or(0.0, |t| t.gb_s.value),
    }
}

/// What of a token's cost no placement changes, for one tier: sums over the layers.
#[derive(Clone, Debug)]
pub struct TierCost {
    /// The tier.
    pub tier: Tier,
    /// Layers whose cells can be outside fast memory: those that see everything.
    full_layers: f64,
    /// Bytes of one cell of all of those.
    full_cell_bytes: f64,
    /// How often a token reads each of these bytes: more than once where later layers share cells.
    full_reads: f64,
    /// Their attention in fast memory and by the CPU.
    full_fast: Attention,
    full_host: Attention,
    /// Copies of them into fast memory.
    full_copies: Copies,
    windowed: Vec<Windowed>,
}

/// Copies of one cell of some layers, alone and while the CPU attends.
#[derive(Clone, Copy, Debug, Default)]
struct Copies {
    ns: f64,
    beside_ns: f64,
}

impl Copies {
    /// Adds those of a layer, of `bytes`: as fast as they were measured with its tier, else as any others are.
    fn add(&mut self, machine: &Machine<'_>, bytes: f64, host: &Attention) {
        let own = |gb_s: f64| gb_s.min(machine.host_read_gb_s);
        let gb_s = host.copies_gb_s.map_or(machine.link_gb_s, own);
        let kept = host.copies_kept.unwrap_or(machine.link_kept_attention);
        let ns = amount(bytes / amount(gb_s));
        self.ns += ns;
        self.beside_ns += amount(ns / part(kept));
    }
}

/// A layer with a window.
#[derive(Clone, Copy, Debug)]
struct Windowed {
    cells_max: f64,
    cell_bytes: f64,
    fast: Attention,
}

impl Windowed {
    fn cells(&self, depth: f64) -> f64 {
        depth.min(self.cells_max)
    }
}

/// What of a token's cost neither tier nor placement changes.
#[derive(Clone, Copy, Debug)]
struct Common {
    layers: f64,
    expert_layers: f64,
    dense_bytes: f64,
    dense_fast_ms: f64,
    dense_host_ms: f64,
    expert_bytes: f64,
    expert_fast_ms: f64,
    expert_host_ms: f64,
    all_expert_bytes: f64,
    operations_ms: f64,
    state_ms: f64,
}

/// The cost of a model's tokens on a machine.
#[derive(Clone, Debug)]
pub struct Costs<'a> {
    machine: Machine<'a>,
    common: Common,
    spill_model: SpillModel,
    /// The part of the tail that the CPU attends; `None`: what is fastest.
    kv_share: Option<f64>,
    /// The part of the experts outside that the CPU computes; `None`: what is fastest.
    expert_share: Option<f64>,
    /// What is expected of a cache of experts; `None`: as if all were used alike.
    hits: Option<HitCurve>,
}

impl<'a> Costs<'a> {
    /// Looks up every rate that the model needs.
    pub fn new(
        model: &Model,
        machine: Machine<'a>,
        spill_model: SpillModel,
        kv_share: Option<f64>,
    ) -> Self {
        let used = model.experts.map_or(0, |e| e.used) as f64;
        let layers = model.n_layer() as f64;
        let routed = model.layers.iter();
        let expert_layers = routed
            .filter(|l| l.keeps != Keeps::Unused && l.expert_bytes > 0)
            .count() as f64;
        let mut c = Common {
            layers,
            expert_layers,
            dense_bytes: 0.0,
            dense_fast_ms: 0.0,
            dense_host_ms: 0.0,
            expert_bytes: 0.0,
            expert_fast_ms: 0.0,
            expert_host_ms: 0.0,
            all_expert_bytes: model.weights.experts as f64,
            operations_ms: machine.fast.operations_ms(layers, expert_layers),
            state_ms: machine.fast.state_ms(model.state_bytes() as f64),
        };
        for (format, bytes) in &model.active.by_type {
            let (fast, host) = (
                machine.fast.decode_gb_s(format),
                machine.host.decode_gb_s(format),
            );
            let (dense, expert) = (bytes.dense as f64, bytes.one_expert as f64 * used);
            c.dense_bytes += dense;
            c.dense_fast_ms += ms(dense, fast);
            c.dense_host_ms += ms(dense, host);
            c.expert_bytes += expert;
            c.expert_fast_ms += ms(expert, fast);
            c.expert_host_ms += ms(expert, host);
        }
        Self {
            machine,
            common: c,
            spill_model,
            kv_share: kv_share.map(part),
            expert_share: None,
            hits: None,
        }
    }

    /// The same with the CPU's part in experts outside, and with what is known of their use.
    #[must_use]
    pub fn with_experts(self, share: Option<f64>, hits: Option<HitCurve>) -> Self {
        Self {
            expert_share: share.map(part),
            hits,
            ..self
        }
    }

    /// The machine.
    pub fn machine(&self) -> &Machine<'a> {
        &self.machine
    }

    /// Looks up the attention of every kind of layer.
    pub fn tier(&self, model: &Model, tier: Tier) -> TierCost {
        let mut cost = TierCost {
            tier,
            full_layers: 0.0,
            full_cell_bytes: 0.0,
            full_reads: 0.0,
            full_fast: Attention::default(),
            full_host: Attention::default(),
            full_copies: Copies::default(),
            windowed: Vec::new(),
        };
        // Deep models repeat few kinds of layers.
        let mut known: HashMap<HeadShape, (Attention, Attention)> = HashMap::new();
        for layer in &model.layers {
            let (cells, own) = match &layer.keeps {
                Keeps::Cells(cells) => (cells, true),
                Keeps::SharedWith { layer } => match model.layers.get(*layer).map(|l| &l.keeps) {
                    Some(Keeps::Cells(cells)) => (cells, false),
                    _ => continue,
                },
                Keeps::Nothing | Keeps::Unused => continue,
            };
            let shape = head_shape(layer.heads, cells);
            let (fast, host) = *known.entry(shape).or_insert_with(|| {
                let of = |processor: &Processor<'_>| processor.attention(tier, shape);
                (of(&self.machine.fast), of(&self.machine.host))
            });
            let bytes = cell_bytes(cells, tier);
            if let Some(window) = cells.window {
                cost.windowed.push(Windowed {
                    cells_max: window as f64,
                    cell_bytes: bytes,
                    fast,
                });
                continue;
            }
            cost.full_layers += 1.0;
            cost.full_reads += bytes;
            cost.full_fast.ns_cell += fast.ns_cell;
            cost.full_fast.engage_us += fast.engage_us;
            cost.full_fast.least_us += fast.least_us;
            cost.full_host.ns_cell += host.ns_cell;
            cost.full_host.engage_us += host.engage_us;
            cost.full_host.beside_ns_cell += host.beside_ns_cell;
            cost.full_copies.add(&self.machine, bytes, &host);
            if own {
                cost.full_cell_bytes += bytes;
            }
        }
        cost.full_reads = if cost.full_cell_bytes > 0.0 {
            cost.full_reads / cost.full_cell_bytes
        } else {
            1.0
        };
        cost
    }
}

fn head_shape(heads: u64, cells: &Cells) -> HeadShape {
    HeadShape {
        heads,
        heads_kv: cells.heads,
        head_k: cells.head_k,
        head_v: cells.head_v,
    }
}

/// Bytes of one cell of a layer.
fn cell_bytes(cells: &Cells, tier: Tier) -> f64 {
    let row = |values: Option<u64>, ty: KvType| values.map_or(0.0, |n| n as f64) * ty.bits() / 8.0;
    row(cells.k_values(), tier.type_k) + row(cells.v_values(), tier.type_v)
}

impl TierCost {
    /// Layers that see everything, at least 1.
    pub(crate) fn full_layers(&self) -> f64 {
        self.full_layers.max(1.0)
    }

    /// The part of its rate that CPU attention keeps while copies to the device run.
    pub(crate) fn cpu_kept(&self) -> f64 {
        let Attention {
            ns_cell,
            beside_ns_cell,
            ..
        } = self.full_host;
        if beside_ns_cell > 0.0 {
            ns_cell / beside_ns_cell
        } else {
            1.0
        }
    }

    /// Copies of cells of the layers that see everything, GB/s, and the part of that rate that they keep while the CPU attends. `None`
    /// without such layers.
    pub(crate) fn copies(&self) -> Option<(f64, f64)> {
        let Copies { ns, beside_ns } = self.full_copies;
        let bytes = self.full_cell_bytes * self.full_reads;
        (ns > 0.0 && ns.is_finite()).then(|| (bytes / ns, ns / beside_ns))
    }

    /// CPU attention over the layers that see everything, in bytes of KV; 0 without such layers.
    pub fn cpu_attention_gb_s(&self) -> f64 {
        if self.full_host.ns_cell > 0.0 {
            self.full_cell_bytes * self.full_reads / self.full_host.ns_cell
        } else {
            0.0
        }
    }
}
