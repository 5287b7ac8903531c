//! Experts that do not fit: which are in device memory, which are streamed, and which the CPU computes.
//!
//! A state machine without a clock or a device. A backend tells it what each layer's router chose, does what it says, and tells what that
//! took:
//!
//! ```text
//! begin(tokens, generated)                   a chunk of a prompt, or a generated token, is about to go through all layers
//! serve(layer, used) -> served               each expert that is used: resident, streamed through a slot, or the CPU's
//! took(..) -> unit                           what that took: what the gate and the costs learn from
//! copies()                                   experts of layers before that move into the cache, behind what was served
//! ```
//!
//! Bits never depend on any of it: whoever computes an expert gives the same rows, and they are added in the order of ids.

mod assign;
mod behind;
mod cache;
mod simulate;
mod usage;

pub use assign::{Costs, Sides, by_cost, by_share};
pub use cache::{Class, Copy, Policy, Slot, Slots, blob_bytes};
pub use simulate::{HitCurve, Hits, simulate};
pub use usage::{Layer, Profile};

use crate::gate::{self, Finding, Gate, Reading};
use behind::Behind;
use cache::Cache;
use serde::{Deserialize, Serialize};
use usage::Usage;

/// The most tokens of steps that are measured and gated together: what the CPU takes for an expert hangs on them.
const BUCKETS: [u32; 5] = [1, 16, 128, 1024, u32::MAX];

/// The least change of the CPU's share that is tried.
const SHARE_STEP: f64 = 0.1;

/// Measurements of which the middle one counts.
const MEASURED: usize = 9;

/// Measurements of the CPU that its part must rest on before a gate looks at a layer: before that it may be far from where both sides end together, and
/// what it loses then says nothing of what it gives later.
const LEARNT: usize = 2;

/// The CPU's part in experts that are not on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Share {
    /// None.
    Off,
    /// What is fastest by cost, as long as a gate finds that it is.
    #[default]
    Auto,
    /// The same without a gate: what there is to gain, and to lose.
    Always,
    /// A part of them, those with the fewest tokens first.
    Fixed(f64),
}

/// What is wanted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Device memory for experts that stay, bytes.
    pub cache_bytes: u64,
    /// Slots that streamed ones pass through.
    pub staging_slots: u32,
    /// What is thrown out first.
    pub policy: Policy,
    /// The CPU's part in prompts.
    pub prompt: Share,
    /// The CPU's part in generated tokens.
    pub generated: Share,
    /// What serving an expert takes.
    pub costs: Costs,
    /// Whether a generated token's streamed experts are read where they lie, so that one that is to stay is copied beside that.
    pub reads_in_place: bool,
}

/// What gates have found, by size of step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Verdicts {
    /// Up to 1, 16, 128, 1024 and more tokens.
    pub buckets: [Option<Finding>; BUCKETS.len()],
}

/// What was learnt another time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recalled {
    /// What is used.
    pub profile: Option<Profile>,
    /// What gates found.
    pub verdicts: Verdicts,
}

/// Where an expert of a step is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// On the device, where it is.
    Resident(Slot),
    /// On the device, once it is copied to a slot: one of the cache, where it then stays, or one of the staging ring, which later ones of the
    /// same layer take again.
    Streamed(Slot),
    /// By the CPU, where it lies in host memory.
    Host,
}

/// An expert that a layer needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// Its id.
    pub expert: u32,
    /// Tokens that use it.
    pub tokens: u32,
    /// Where it is computed.
    pub way: Way,
}

/// What became of the copies to the cache behind a prompt's layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Copied {
    /// They were there when the next layer was routed, and the host did nothing for them.
    InTime,
    /// Some were not.
    #[default]
    Late,
    /// The host copied them, which held the next layer up.
    ByHost,
}

/// What serving a layer took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Took {
    /// From before the routing was known to after the experts' sum, milliseconds.
    pub ms: f64,
    /// Copying all that was streamed; 0: not known.
    pub stream_ms: f64,
    /// The CPU's part; 0: not known.
    pub host_ms: f64,
    /// What became of what moved into the cache behind it.
    pub copied: Copied,
    /// Whether it paid for something that others do not: memory that was taken or grew.
    pub is_unusual: bool,
}

/// What a layer of a step took whose experts were not all resident: what gates read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Unit {
    /// The layer, among those with experts.
    pub layer: u32,
    /// Tokens of the step.
    pub tokens: u32,
    /// Experts that were not resident.
    pub missing: u32,
    /// Those of them that the CPU computed.
    pub host: u32,
    /// The CPU's share that was asked for, 0 to 1.
    pub share: f64,
    /// What it took.
    pub took: Took,
    /// Whether it is the first of its step, which no gate looks at.
    pub is_first: bool,
}

impl Unit {
    /// Milliseconds for each expert that was not resident.
    pub fn reading(&self) -> f64 {
        self.took.ms / f64::from(self.missing.max(1))
    }
}

/// What was served so far, in pairs of a token and an expert, experts, and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Pairs.
    pub pairs: u64,
    /// Those of them whose expert was resident.
    pub pairs_resident: u64,
    /// Experts, each layer and step by itself.
    pub experts: u64,
    /// Those of them that were resident.
    pub resident: u64,
    /// That were streamed.
    pub streamed: u64,
    /// That the CPU computed.
    pub host: u64,
    /// Bytes that were copied to the device for a step.
    pub streamed_bytes: u64,
    /// Bytes that were copied to the cache behind a step.
    pub copied_bytes: u64,
}

impl Counts {
    /// What came after an earlier count.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            pairs: self.pairs - earlier.pairs,
            pairs_resident: self.pairs_resident - earlier.pairs_resident,
            experts: self.experts - earlier.experts,
            resident: self.resident - earlier.resident,
            streamed: self.streamed - earlier.streamed,
            host: self.host - earlier.host,
            streamed_bytes: self.streamed_bytes - earlier.streamed_bytes,
            copied_bytes: self.copied_bytes - earlier.copied_bytes,
        }
    }

    /// The part of experts that were resident; 1 where none was needed.
    pub fn hits(&self) -> f64 {
        match self.experts {
            0 => 1.0,
            n => self.resident as f64 / n as f64,
        }
    }
}

/// The last few of something measured.
#[derive(Clone, Debug, Default)]
struct Measured {
    last: [f64; MEASURED],
    /// How many there were.
    n: usize,
}

impl Measured {
    fn push(&mut self, x: f64) {
        if x.is_finite() && x > 0.0 {
            self.last[self.n % MEASURED] = x;
            self.n += 1;
        }
    }

    /// The middle one.
    fn middle(&self) -> Option<f64> {
        let mut sorted = self.last;
        let sorted = &mut sorted[..self.n.min(MEASURED)];
        sorted.sort_unstable_by(f64::total_cmp);
        // Of two the lower: what is odd about a first one makes it slow.
        sorted.get(sorted.len().saturating_sub(1) / 2).copied()
    }
}

/// What is learnt from steps of about as many tokens.
#[derive(Clone, Debug, Default)]
struct Bucket {
    gate: Option<Gate>,
    /// What copies and the CPU take, over what the costs say.
    streaming: Measured,
    host: Measured,
    /// The middle ones.
    factors: (f64, f64),
    /// What layers take whose experts are all resident, milliseconds.
    whole: Measured,
}

/// A model's experts.
#[derive(Clone, Debug)]
pub struct Experts {
    settings: Settings,
    usage: Usage,
    cache: Cache,
    slots: Slots,
    buckets: [Bucket; BUCKETS.len()],
    recalled: Verdicts,
    is_known: bool,
    /// The step in work.
    tokens: u32,
    generated: bool,
    /// Layers of it so far that had experts missing.
    eligible: u32,
    /// What is served.
    served: Vec<Served>,
    unit: Option<Unit>,
    /// Whether the gate said how, and the CPU's part rests on what was measured.
    is_gated: bool,
    is_learnt: bool,
    /// What copies and the CPU should take.
    expected: (f64, f64),
    reading: Option<Reading>,
    behind: Behind,
    copies: Vec<Copy>,
    /// Work space: tokens of experts that are missing, and their places in `served`.
    missing: Vec<(u32, u32)>,
    missing_tokens: Vec<u32>,
    next_staging: u32,
    /// Of prompts and of generated tokens.
    counts: [Counts; 2],
}

impl Experts {
    /// Experts of some layers, all in host memory.
    ///
    /// # Panics
    /// If what is recalled is of other layers ([`Profile::check`]), or there is no staging slot.
    pub fn new(layers: &[Layer], settings: &Settings, recalled: &Recalled) -> Self {
        assert!(settings.staging_slots > 0, "streamed experts need a slot");
        let profile = recalled.profile.as_ref();
        let usage = Usage::new(layers, profile);
        let slots = Slots::divide(
            &usage,
            settings.cache_bytes,
            settings.staging_slots,
            profile.is_some(),
        );
        Self {
            settings: *settings,
            cache: Cache::new(settings.policy, &slots, usage.blobs()),
            slots,
            usage,
            buckets: std::array::from_fn(|_| Bucket {
                factors: (1.0, 1.0),
                ..Bucket::default()
            }),
            recalled: recalled.verdicts,
            is_known: profile.is_some(),
            tokens: 0,
            generated: false,
            eligible: 0,
            served: Vec::new(),
            unit: None,
            is_gated: false,
            is_learnt: false,
            expected: (0.0, 0.0),
            reading: None,
            behind: Behind::new(),
            copies: Vec::new(),
            missing: Vec::new(),
            missing_tokens: Vec::new(),
            next_staging: 0,
            counts: [Counts::default(); 2],
        }
    }

    /// The slots that a backend makes.
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// The layers.
    pub fn layers(&self) -> &[Layer] {
        self.usage.layers()
    }

    /// Whether it was known from the beginning what is used.
    pub fn is_known(&self) -> bool {
        self.is_known
    }

    /// Fills the cache with what is expected to be used most: what is to be copied before the first step.
    pub fn fill(&mut self) -> Vec<Copy> {
        let mut copies = Vec::new();
        for blob in cache::best(&self.usage) {
            let (layer, expert) = self.usage.place(blob);
            if self.cache.slot(blob).is_none()
                && let Some(slot) = self.cache.fill(&self.usage, blob)
            {
                copies.push(Copy {
                    layer: layer as u32,
                    expert,
                    slot,
                });
            }
        }
        copies
    }

    /// Where an expert is on the device.
    pub fn slot(&self, layer: usize, expert: u32) -> Option<Slot> {
        self.cache.slot(self.usage.blob(layer, expert))
    }

    /// Begins a step: a chunk of a prompt, or one generated token.
    pub fn begin(&mut self, tokens: u32, generated: bool) {
        (self.tokens, self.generated) = (tokens, generated);
        self.eligible = 0;
        self.usage.begin(tokens);
        if let Some(gate) = &mut self.buckets[bucket(tokens)].gate {
            gate.begin_chunk();
        }
    }

    /// Whether the CPU may compute some of the step that has begun.
    pub fn may_share(&self) -> bool {
        match self.share() {
            Share::Off => false,
            Share::Fixed(share) => share > 0.0,
            Share::Always => true,
            Share::Auto => {
                let layers = self.usage.layers().len() as u32;
                let gate = self.buckets[bucket(self.tokens)].gate.as_ref();
                gate.is_none_or(|gate| gate.may_share_within(layers))
            }
        }
    }

    /// Whether the CPU computes some of most layers of the step, unless a gate has found that it had better not.
    pub fn shares_mostly(&self) -> bool {
        match self.share() {
            Share::Off => false,
            Share::Fixed(share) => share > 0.0,
            Share::Always => true,
            Share::Auto => {
                let gate = self.buckets[bucket(self.tokens)].gate.as_ref();
                let verdict = gate.and_then(Gate::verdict);
                verdict.is_none_or(|verdict| verdict.shares)
            }
        }
    }

    /// The CPU's part that is wanted in the step.
    fn share(&self) -> Share {
        match self.generated {
            true => self.settings.generated,
            false => self.settings.prompt,
        }
    }

    /// Says where each expert that a layer of the step uses is computed. `used` are their ids, ascending, and by how many tokens.
    ///
    /// # Panics
    /// If there are no such layer and experts.
    pub fn serve(&mut self, layer: usize, used: &[(u32, u32)]) -> &[Served] {
        let Layer {
            experts,
            blob_bytes,
            ..
        } = self.usage.layers()[layer];
        let is_ascending = used.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let are_there = used.last().is_none_or(|&(expert, _)| expert < experts);
        assert!(is_ascending && are_there, "experts of layer {layer}");
        self.usage.observe(layer, self.tokens, used);
        let usage = &self.usage;
        let blobs = used.iter().map(|&(expert, _)| usage.blob(layer, expert));
        self.cache.touch(blobs);

        let mib = blob_bytes as f64 / f64::from(1 << 20);
        let costs = &self.settings.costs;
        let mut resident_ms = 0.0;
        self.served.clear();
        self.missing.clear();
        for &(expert, tokens) in used {
            let way = match self.slot(layer, expert) {
                Some(slot) => {
                    resident_ms += costs.device_ms(mib, tokens);
                    Way::Resident(slot)
                }
                None => {
                    self.missing.push((tokens, self.served.len() as u32));
                    Way::Host
                }
            };
            self.served.push(Served {
                expert,
                tokens,
                way,
            });
        }
        // Fewest tokens first; of equal ones the lower id.
        self.missing.sort_unstable();
        let (by_cpu, share) = self.by_cpu(blob_bytes, resident_ms);
        let costs = self.settings.costs;
        let host = self.missing[..by_cpu].iter();
        self.expected = (
            costs.stream_ms(mib) * (self.missing.len() - by_cpu) as f64,
            host.map(|&(tokens, _)| costs.host_ms(mib, tokens)).sum(),
        );
        // In the order of ids, in which slots of the ring are taken.
        self.missing[by_cpu..].sort_unstable_by_key(|&(_, at)| at);
        for i in by_cpu..self.missing.len() {
            let at = self.missing[i].1 as usize;
            let blob = self.usage.blob(layer, self.served[at].expert);
            let is_here = !(self.generated && self.settings.reads_in_place);
            let slot = self.cache.admit(&self.usage, blob, is_here);
            let slot = slot.unwrap_or_else(|| {
                let number = self.next_staging;
                self.next_staging = (number + 1) % self.settings.staging_slots;
                Slot(self.slots.cached() + number)
            });
            self.served[at].way = Way::Streamed(slot);
        }
        self.count(by_cpu, blob_bytes);
        self.unit = (!self.missing.is_empty()).then(|| {
            self.eligible += 1;
            Unit {
                layer: layer as u32,
                tokens: self.tokens,
                missing: self.missing.len() as u32,
                host: by_cpu as u32,
                share,
                took: Took::default(),
                is_first: self.eligible == 1,
            }
        });
        self.choose_copies(layer);
        &self.served
    }

    /// How many of the missing experts the CPU computes, and the share that says so.
    fn by_cpu(&mut self, blob_bytes: u64, resident_ms: f64) -> (usize, f64) {
        self.is_gated = false;
        let n = self.missing.len();
        let share = self.share();
        match share {
            _ if n == 0 => (0, 0.0),
            Share::Off => (0, 0.0),
            Share::Fixed(share) => (by_share(share, n), share),
            Share::Auto | Share::Always => {
                self.missing_tokens.clear();
                let tokens = self.missing.iter().map(|&(tokens, _)| tokens);
                self.missing_tokens.extend(tokens);
                let at = bucket(self.tokens);
                let bucket = &mut self.buckets[at];
                let balance = by_cost(
                    &self.settings.costs,
                    bucket.factors,
                    blob_bytes,
                    &self.missing_tokens,
                    resident_ms,
                );
                if balance == 0 {
                    return (0, 0.0);
                }
                if share == Share::Always {
                    return (balance, balance as f64 / n as f64);
                }
                self.is_gated = true;
                self.is_learnt = bucket.host.n >= LEARNT;
                let (recalled, layers) = (self.recalled.buckets[at], self.usage.layers().len());
                let gate = bucket.gate.get_or_insert_with(|| {
                    let gate = Gate::new(1.0, SHARE_STEP).of_layers(layers);
                    match recalled {
                        Some(finding) => gate.recall(&finding),
                        None => gate,
                    }
                });
                let amount = gate.share();
                if amount <= 0.0 {
                    return (0, 0.0);
                }
                // The gate's amount is a part of the balance: contention moves the best one below it.
                let k = by_share(amount, balance).max(1);
                (k, k as f64 / n as f64)
            }
        }
    }

    fn count(&mut self, by_cpu: usize, blob_bytes: u64) {
        let streamed = (self.missing.len() - by_cpu) as u64;
        let counts = &mut self.counts[usize::from(self.generated)];
        for served in &self.served {
            let pairs = u64::from(served.tokens);
            counts.pairs += pairs;
            if matches!(served.way, Way::Resident(_)) {
                counts.pairs_resident += pairs;
            }
        }
        counts.experts += self.served.len() as u64;
        counts.resident += (self.served.len() - self.missing.len()) as u64;
        counts.streamed += streamed;
        counts.streamed_bytes += streamed * blob_bytes;
        counts.host += by_cpu as u64;
    }

    /// Which of the experts that the CPU computed move to the device, and that this layer's are to, some time.
    fn choose_copies(&mut self, layer: usize) {
        let Self {
            usage,
            cache,
            counts,
            copies,
            behind,
            ..
        } = self;
        copies.clear();
        let counts = &mut counts[usize::from(self.generated)];
        let of_host = self.served.iter().filter(|s| s.way == Way::Host);
        let by_cpu = cache.has_room().then(|| of_host.clone().count());
        behind.choose(usage, layer, self.generated, by_cpu, |blob| {
            if cache.slot(blob).is_some() {
                return false;
            }
            let Some(slot) = cache.admit(usage, blob, false) else {
                return false;
            };
            counts.copied_bytes += usage.bytes(blob);
            let (layer, expert) = usage.place(blob);
            copies.push(Copy {
                layer: layer as u32,
                expert,
                slot,
            });
            true
        });
        if self.slots.cached() > 0 {
            of_host.for_each(|s| behind.push(usage.blob(layer, s.expert)));
        }
    }

    /// Tells what serving took that was said last. Returns it as a unit, if experts were missing.
    pub fn took(&mut self, took: &Took) -> Option<Unit> {
        self.reading = None;
        if !self.generated && !took.is_unusual {
            self.behind.took(took.copied);
        }
        let Some(mut unit) = self.unit.take() else {
            if !took.is_unusual {
                self.buckets[bucket(self.tokens)].whole.push(took.ms);
            }
            return None;
        };
        unit.took = *took;
        // Reading experts where they lie is not measured apart: it is what a layer takes most of whose experts are read and none computed by the CPU. All else
        // that such a layer does counts as theirs, for which the gate's search for the amount makes up.
        let is_read = self.generated && self.settings.reads_in_place && unit.host == 0;
        let stream_ms = match is_read && 2 * unit.missing as usize >= self.served.len() {
            true => took.ms,
            false => took.stream_ms,
        };
        let bucket = &mut self.buckets[bucket(self.tokens)];
        if !took.is_unusual {
            let (streaming, host) = self.expected;
            bucket.streaming.push(stream_ms / streaming);
            bucket.host.push(took.host_ms / host);
            let middle = |measured: &Measured| measured.middle().unwrap_or(1.0);
            bucket.factors = (middle(&bucket.streaming), middle(&bucket.host));
        }
        if self.is_gated
            && let Some(gate) = &mut bucket.gate
        {
            let is_learnt = self.is_learnt || unit.host == 0;
            if unit.is_first || took.is_unusual || !is_learnt {
                gate.skip();
            } else {
                let layer = unit.layer;
                let bytes = self.usage.layers()[layer as usize].blob_bytes;
                let mib = bytes as f64 / f64::from(1 << 20);
                let each_ms = bucket.factors.0 * self.settings.costs.stream_ms(mib);
                // The fewer are missing, the more of the time is not theirs: what all layers take counts as so many experts more.
                let whole = bucket.whole.middle().map_or(0.0, |ms| ms / each_ms);
                let parts = f64::from(unit.missing) + if whole.is_finite() { whole } else { 0.0 };
                self.reading = Some(gate.read_layer(gate::Unit { layer, parts }, took.ms));
            }
        }
        Some(unit)
    }

    /// What the gate made of the last unit.
    pub fn reading(&self) -> Option<&Reading> {
        self.reading.as_ref()
    }

    /// What moves into the cache behind what the layer that was served last has streamed: of layers before, and to slots that no layer in work
    /// reads.
    pub fn copies(&self) -> &[Copy] {
        &self.copies
    }

    /// What was served in prompts, and for generated tokens.
    pub fn counts(&self) -> [Counts; 2] {
        self.counts
    }

    /// What gates have found: of sizes that no gate looked at, what was recalled.
    pub fn verdicts(&self) -> Verdicts {
        let mut verdicts = self.recalled;
        for (found, bucket) in verdicts.buckets.iter_mut().zip(&self.buckets) {
            if let Some(gate) = &bucket.gate {
                *found = gate.finding();
            }
        }
        verdicts
    }

    /// What is used, for another time.
    pub fn profile(&self) -> Profile {
        self.usage.profile()
    }
}

fn bucket(tokens: u32) -> usize {
    BUCKETS.partition_point(|&most| most < tokens)
}

#[cfg(test)]
mod tests;
