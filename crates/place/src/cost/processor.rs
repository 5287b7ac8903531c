//! Rates of one processor, looked up for a model's formats and heads.

use crate::drop::{amount, ms, part};
use crate::profile::{AttentionRate, Device, Figure, HeadShape, Host};
use crate::tier::Tier;

/// What a layer does on the CPU beside products and attention, in empty forks: norms, rope, gated activation, additions and
/// writing cells stay on the calling thread for one token, and together take about as long as two. The forks of products and
/// attention are in their own measurements.
const SMALL_OPERATIONS_A_LAYER: f64 = 2.0;
/// Small operations of a dense layer on a device beside products and attention, whose own are in their measurements: a norm with the
/// addition before it for either half, which are part of the product behind them and take half as long there, and gated activation; and what attention and products
/// take longer beside each other than alone. Measured on four H200s with a shape of 14B at 16352 to 131040 cells: 2.1 to 3.0, in the mean 2.6.
const LAUNCHES_A_LAYER: f64 = 2.6;
/// More of them where a layer has routed experts: router and combine.
const MORE_WITH_EXPERTS: f64 = 2.0;

/// What computes: the CPU, or a device.
#[derive(Clone, Debug)]
pub struct Processor<'a> {
    /// Format and weights passed at one token, GB/s.
    decode_gb_s: Vec<(&'a str, f64)>,
    /// Format and multiply-adds of many tokens, G a second.
    prefill_gmac_s: Vec<(&'a str, f64)>,
    attention: &'a [AttentionRate],
    read_gb_s: f64,
    operation_us: f64,
    operations_a_layer: f64,
    /// What a token takes beside its operations.
    token_us: f64,
    /// Attention's rate with the threads in use, as a part of what was measured with all.
    attention_part: f64,
    /// The same for what is measured beside a device's copies: with one thread less there.
    beside_part: f64,
    /// Beside a device: the part of its rate that attention keeps while copies go there, where its tier has no figure of its own.
    attention_kept: Option<f64>,
}

/// One layer's attention for one token: `engage_us + ns_cell * cells`, and at least `least_us`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Attention {
    /// A cell more.
    pub ns_cell: f64,
    /// No cells.
    pub engage_us: f64,
    /// Few cells.
    pub least_us: f64,
    /// A cell more while copies to a device run.
    pub beside_ns_cell: f64,
    /// Copies of such cells to a device, if they were measured.
    pub copies_gb_s: Option<f64>,
    /// The part of that rate that they keep while the CPU attends.
    pub copies_kept: Option<f64>,
}

impl Attention {
    /// Over so many cells.
    pub fn ms(&self, cells: f64) -> f64 {
        (self.engage_us + self.ns_cell * cells / 1e3).max(self.least_us) / 1e3
    }
}

impl<'a> Processor<'a> {
    /// The CPU with this many of the `all` threads that were measured.
    pub fn cpu(host: &'a Host, threads: u32, all: u32) -> Self {
        let (threads, all) = (f64::from(threads.max(1)), f64::from(all.max(1)));
        let part = (threads / all).min(1.0);
        // Memory saturates before the cores do.
        let with = |one: f64, most: f64| {
            if part < 1.0 {
                most.min(one * threads)
            } else {
                most
            }
        };
        let of_isa = host.products.iter().filter(|p| p.isa == host.isa);
        Self {
            decode_gb_s: of_isa
                .map(|p| {
                    let rate = with(p.decode_one_gb_s.value, p.decode_gb_s.value);
                    (p.format.as_str(), rate)
                })
                .collect(),
            prefill_gmac_s: host
                .products
                .iter()
                .filter(|p| p.isa == host.isa)
                .map(|p| (p.format.as_str(), p.prefill_gmac_s.value * part))
                .collect(),
            attention: &host.attention,
            read_gb_s: with(host.read_gb_s.one.value, host.read_gb_s.all.value),
            operation_us: host.fork_join_us.value,
            operations_a_layer: SMALL_OPERATIONS_A_LAYER,
            token_us: 0.0,
            attention_part: part,
            beside_part: part,
            attention_kept: None,
        }
    }

    /// The same with one thread less for attention: the one that gives work to a device. `kept` is the part of its rate that attention keeps
    /// while copies go there, where its tier has no figure of its own.
    #[must_use]
    pub fn beside_a_device(self, threads: u32, kept: f64) -> Self {
        let threads = f64::from(threads.max(2));
        Self {
            attention_part: self.attention_part * (threads - 1.0) / threads,
            attention_kept: Some(kept),
            ..self
        }
    }

    /// A device.
    pub fn device(device: &'a Device) -> Self {
        let rates = device.products.iter();
        Self {
            decode_gb_s: rates
                .map(|p| (p.format.as_str(), p.decode_gb_s.value))
                .collect(),
            prefill_gmac_s: device
                .products
                .iter()
                .map(|p| (p.format.as_str(), p.prefill_gmac_s.value))
                .collect(),
            attention: &device.attention,
            read_gb_s: device.read_gb_s.value,
            operation_us: device.launch_us.value,
            operations_a_layer: LAUNCHES_A_LAYER,
            token_us: device.token_us.value,
            attention_part: 1.0,
            beside_part: 1.0,
            attention_kept: None,
        }
    }

    /// Streaming reads of this processor's memory.
    pub fn read_gb_s(&self) -> f64 {
        self.read_gb_s
    }

    /// Weights of a format that a product of one token passes. A format that was not measured is taken as the slowest one
    /// that was.
    pub fn decode_gb_s(&self, format: &str) -> f64 {
        let mut rates = self.decode_gb_s.iter();
        let known = rates.find(|(f, _)| f.eq_ignore_ascii_case(format));
        known.map_or_else(
            || {
                let rates = self.decode_gb_s.iter().map(|(_, rate)| *rate);
                rates.fold(self.read_gb_s, f64::min)
            },
            |(_, rate)| *rate,
        )
    }

    /// Multiply-adds of a product of many tokens in the slowest of some formats, G a second; those that were not measured are taken as the
    /// slowest one that was.
    pub fn prefill_gmac_s<'f>(&self, formats: impl Iterator<Item = &'f str>) -> f64 {
        let slowest = self.prefill_gmac_s.iter().map(|(_, rate)| *rate);
        let slowest = slowest.fold(f64::INFINITY, f64::min);
        let of = |format: &str| {
            let mut rates = self.prefill_gmac_s.iter();
            let known = rates.find(|(f, _)| f.eq_ignore_ascii_case(format));
            known.map_or(slowest, |(_, rate)| *rate)
        };
        formats.map(of).fold(f64::INFINITY, f64::min)
    }

    /// Starting the operations of `layers` layers, of which `with_experts` have routed experts, and of the output; and what a token takes
    /// beside them.
    pub fn operations_ms(&self, layers: f64, with_experts: f64) -> f64 {
        let operations = layers * self.operations_a_layer + with_experts * MORE_WITH_EXPERTS + 1.0;
        (operations * amount(self.operation_us) + amount(self.token_us)) / 1e3
    }

    /// One operation that has nothing to do.
    pub fn operation_ms(&self) -> f64 {
        amount(self.operation_us) / 1e3
    }

    /// Attention of a layer with such heads.
    ///
    /// What was measured with the same heads and types is taken as it is. Otherwise the nearest measurement of the types is
    /// scaled by what grows more, the multiply-adds of a cell or its bytes: one of them binds, and which one is not known.
    /// It is then taken that cells are not read faster than memory is.
    pub fn attention(&self, tier: Tier, heads: HeadShape) -> Attention {
        let bytes = cell_bytes(tier, heads);
        let floor_ns = amount(bytes / self.read_gb_s);
        let same_tier = |a: &&AttentionRate| (a.type_k, a.type_v) == (tier.type_k, tier.type_v);
        let far = |a: &AttentionRate| {
            let measured = cell_bytes(Tier::new(a.type_k, a.type_v), a.shape);
            let (macs, bytes) = (macs(heads) / macs(a.shape), bytes / measured);
            macs.ln().abs() + bytes.ln().abs()
        };
        let nearest = |rates: &mut dyn Iterator<Item = &'a AttentionRate>| {
            rates.min_by(|a, b| far(a).total_cmp(&far(b)))
        };
        let found = nearest(&mut self.attention.iter().filter(same_tier))
            .or_else(|| nearest(&mut self.attention.iter()));
        let Some(rate) = found else {
            return Attention {
                ns_cell: floor_ns,
                engage_us: amount(self.operation_us),
                least_us: 0.0,
                beside_ns_cell: floor_ns,
                ..Attention::default()
            };
        };
        let measured = cell_bytes(Tier::new(rate.type_k, rate.type_v), rate.shape);
        let (scale, floor_ns) = if rate.shape == heads && same_tier(&rate) {
            (1.0, 0.0)
        } else {
            let scale = (macs(heads) / macs(rate.shape)).max(bytes / measured);
            (scale, floor_ns)
        };
        let all = amount(rate.ns_cell.value) * scale;
        let kept = self.attention_kept.map_or(1.0, |of_all| {
            rate.kept.map_or(of_all, |of_tier| of_tier.value)
        });
        let beside = |figure: Option<Figure>| self.attention_kept.and(figure).map(|f| f.value);
        Attention {
            ns_cell: (all / self.attention_part).max(floor_ns),
            beside_ns_cell: amount((all / self.beside_part).max(floor_ns) / part(kept)),
            engage_us: amount(rate.engage_us.value),
            least_us: rate.least_us.map_or(0.0, |least| amount(least.value)),
            copies_gb_s: beside(rate.copies_gb_s),
            copies_kept: beside(rate.copies_kept),
        }
    }

    /// Reading and writing recurrent state.
    pub fn state_ms(&self, bytes: f64) -> f64 {
        ms(2.0 * bytes, self.read_gb_s)
    }
}

/// Multiply-adds of one cell: a score and a weighted sum for each query head.
fn macs(s: HeadShape) -> f64 {
    (s.heads.max(1) as f64) * (s.head_k as f64 + s.head_v as f64).max(1.0)
}

/// Bytes of one cell of a layer.
fn cell_bytes(tier: Tier, s: HeadShape) -> f64 {
    let values = |n: u64, bits: f64| s.heads_kv.max(1) as f64 * n as f64 * bits / 8.0;
    let bytes = values(s.head_k, tier.type_k.bits()) + values(s.head_v, tier.type_v.bits());
    bytes.max(1.0)
}
