//! Which experts are on the device: slots over all layers, and what moves into them.
//!
//! A slot has the bytes of a class, the sizes that experts have; an expert may be in any slot that it fits. What has most value stays:
//! the part of tokens that is expected to use an expert, times the bytes that each of them would have to wait for otherwise.

use super::usage::{Blob, Layer, Usage};
use serde::Serialize;

/// Uses that an expert must have more than the one it replaces, to be copied for that alone: a copy costs about what a use costs that finds it
/// missing, and is paid back if what was used goes on being used.
const USES_MORE: f64 = 2.0;

/// What is thrown out first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// What has least value.
    #[default]
    Value,
    /// What was used longest ago: what others do, to compare with.
    Lru,
}

/// The number of a slot: those of the cache first, then those that streamed experts pass through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot(pub u32);

/// Slots of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Class {
    /// Bytes of each.
    pub bytes: u64,
    /// How many there are.
    pub slots: u32,
}

/// Slots of device memory for experts, by number: the cache's, class by class, then those of the staging ring.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Slots {
    classes: Vec<Class>,
    staging: Class,
}

impl Slots {
    /// Divides memory for the cache: every class gets slots for the same part of its experts or, where it is known what is used, for
    /// those of most value. Staging slots hold any expert.
    pub(super) fn divide(usage: &Usage, cache_bytes: u64, staging: u32, is_known: bool) -> Self {
        let mut sizes: Vec<u64> = usage.layers().iter().map(|l| l.blob_bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes.retain(|&bytes| bytes > 0);
        let class_of = |bytes: u64| sizes.partition_point(|&size| size < bytes);
        let mut counts = vec![0_u32; sizes.len()];
        let mut all = vec![0_u32; sizes.len()];
        for layer in usage.layers().iter().filter(|l| l.blob_bytes > 0) {
            all[class_of(layer.blob_bytes)] += layer.experts;
        }
        let mut left = cache_bytes;
        if is_known {
            // Bytes of any expert cost what they are, so rates are the value of a byte.
            let mut blobs: Vec<(f64, u64)> = (0..usage.blobs())
                .map(|blob| (usage.rate(blob), usage.bytes(blob)))
                .filter(|&(_, bytes)| bytes > 0)
                .collect();
            blobs.sort_by(|a, b| b.0.total_cmp(&a.0));
            for (_, bytes) in blobs {
                if bytes <= left {
                    left -= bytes;
                    counts[class_of(bytes)] += 1;
                }
            }
        } else {
            let total: u128 = sizes
                .iter()
                .zip(&all)
                .map(|(&bytes, &n)| u128::from(bytes) * u128::from(n))
                .sum();
            for (class, &bytes) in sizes.iter().enumerate() {
                let part = u128::from(cache_bytes) * u128::from(all[class]) / total.max(1);
                let n = u32::try_from(part).unwrap_or(u32::MAX).min(all[class]);
                counts[class] = n;
                left -= u64::from(n) * bytes;
            }
            // What is left over, the largest first.
            for (class, &bytes) in sizes.iter().enumerate().rev() {
                let more = u32::try_from(left / bytes).unwrap_or(u32::MAX);
                let more = more.min(all[class] - counts[class]);
                counts[class] += more;
                left -= u64::from(more) * bytes;
            }
        }
        let classes = sizes.iter().zip(counts);
        Self {
            classes: classes
                .map(|(&bytes, slots)| Class { bytes, slots })
                .filter(|class| class.slots > 0)
                .collect(),
            staging: Class {
                bytes: sizes.last().copied().unwrap_or(0),
                slots: staging,
            },
        }
    }

    /// Those of the cache, the smallest first.
    pub fn classes(&self) -> &[Class] {
        &self.classes
    }

    /// Those that streamed experts pass through.
    pub fn staging(&self) -> Class {
        self.staging
    }

    /// Slots of the cache.
    pub fn cached(&self) -> u32 {
        self.classes.iter().map(|class| class.slots).sum()
    }

    /// Bytes of the cache's.
    pub fn cache_bytes(&self) -> u64 {
        let of = |class: &Class| class.bytes * u64::from(class.slots);
        self.classes.iter().map(of).sum()
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> u64 {
        self.cache_bytes() + self.staging.bytes * u64::from(self.staging.slots)
    }

    /// Bytes of one.
    ///
    /// # Panics
    /// If there is no such slot.
    pub fn bytes_of(&self, slot: Slot) -> u64 {
        let mut number = slot.0;
        for class in self.classes.iter().chain([&self.staging]) {
            if number < class.slots {
                return class.bytes;
            }
            number -= class.slots;
        }
        panic!("slot {} of {}", slot.0, self.cached() + self.staging.slots)
    }
}

/// An expert that is to be copied to a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// The layer's number among those with experts.
    pub layer: u32,
    /// The expert.
    pub expert: u32,
    /// Where to.
    pub slot: Slot,
}

/// What is in the cache's slots.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    policy: Policy,
    /// The first slot of each class, and its bytes; then where the last one ends.
    classes: Vec<(u64, usize)>,
    /// What each slot holds.
    held: Vec<Option<Blob>>,
    /// Where each expert is.
    slots: Vec<Option<u32>>,
    /// When each expert was used last.
    used: Vec<u64>,
    /// Now: the number of what is being served.
    now: u64,
    /// Slots that hold nothing, by class, the last one first.
    free: Vec<Vec<u32>>,
    /// What would be thrown out of each class next.
    victims: Vec<Victims>,
}

/// What has least value of a class, looked for once for many of them.
#[derive(Clone, Debug, Default)]
struct Victims {
    /// When.
    looked: u64,
    /// Value, slot, and when what it holds was used last; the least comes last.
    found: Vec<(f64, u32, u64)>,
    /// When the whole class was looked through and nothing found.
    nothing: Option<u64>,
}

/// Victims that are looked for at a time.
const VICTIMS: usize = 64;

/// Tokens after which they are looked for anew: by then others have less value.
const LOOK_TOKENS: u64 = 2;

impl Cache {
    pub(super) fn new(policy: Policy, slots: &Slots, blobs: usize) -> Self {
        let mut first = 0;
        let mut classes = Vec::new();
        let mut free = Vec::new();
        for class in slots.classes() {
            classes.push((class.bytes, first));
            let end = first + class.slots as usize;
            free.push((first as u32..end as u32).rev().collect());
            first = end;
        }
        Self {
            policy,
            held: vec![None; first],
            slots: vec![None; blobs],
            used: vec![0; blobs],
            now: 0,
            victims: vec![Victims::default(); classes.len()],
            classes,
            free,
        }
    }

    pub(super) fn slot(&self, blob: Blob) -> Option<Slot> {
        self.slots[blob].map(Slot)
    }

    /// Tells that some experts of a layer are used together from now on: none of them is thrown out for another.
    pub(super) fn touch(&mut self, blobs: impl Iterator<Item = Blob>) {
        self.now += 1;
        for blob in blobs {
            self.used[blob] = self.now;
        }
    }

    fn value(&self, usage: &Usage, blob: Blob) -> f64 {
        match self.policy {
            Policy::Value => usage.worth(blob) * usage.bytes(blob) as f64,
            Policy::Lru => self.used[blob] as f64,
        }
    }

    /// Whether some slots hold nothing.
    pub(super) fn has_room(&self) -> bool {
        self.free.iter().any(|slots| !slots.is_empty())
    }

    /// Takes a slot that holds nothing for an expert that is not there.
    pub(super) fn fill(&mut self, usage: &Usage, blob: Blob) -> Option<Slot> {
        let bytes = usage.bytes(blob);
        let fitting = self.classes.partition_point(|&(size, _)| size < bytes);
        let slot = self.free[fitting..].iter_mut().find_map(Vec::pop)?;
        self.hold(slot, blob);
        Some(Slot(slot))
    }

    fn hold(&mut self, slot: u32, blob: Blob) {
        self.held[slot as usize] = Some(blob);
        self.slots[blob] = Some(slot);
    }

    /// Takes a slot for an expert that is not there, if it is worth what must go for it. `is_here`: it is copied to the device anyway.
    pub(super) fn admit(&mut self, usage: &Usage, blob: Blob, is_here: bool) -> Option<Slot> {
        if let Some(slot) = self.fill(usage, blob) {
            return Some(slot);
        }
        let bytes = usage.bytes(blob);
        let fitting = self.classes.partition_point(|&(size, _)| size < bytes);
        let slot = self.victim(usage, fitting)?;
        let victim = self.held[slot].expect("victims hold something");
        if !self.is_worth(usage, blob, victim, is_here) {
            return None;
        }
        self.slots[victim] = None;
        self.hold(slot as u32, blob);
        Some(Slot(slot as u32))
    }

    fn is_worth(&self, usage: &Usage, blob: Blob, victim: Blob, is_here: bool) -> bool {
        if self.policy == Policy::Lru {
            return true;
        }
        if is_here {
            return self.value(usage, blob) > self.value(usage, victim);
        }
        let uses = |blob: Blob| {
            let (layer, _) = usage.place(blob);
            usage.rate(blob) * usage.tokens_counted(layer) * usage.bytes(blob) as f64
        };
        uses(blob) - uses(victim) > USES_MORE * usage.bytes(blob) as f64
    }

    /// The slot of least value among those of some classes, the smallest of which is `from`, that hold nothing in use.
    fn victim(&mut self, usage: &Usage, from: usize) -> Option<usize> {
        let mut best: Option<(f64, usize)> = None;
        for class in from..self.classes.len() {
            let Some((value, slot)) = self.least(usage, class) else {
                continue;
            };
            if best.is_none_or(|(least, _)| value < least) {
                best = Some((value, slot));
            }
        }
        best.map(|(_, slot)| slot)
    }

    /// The slot of least value of a class.
    fn least(&mut self, usage: &Usage, class: usize) -> Option<(f64, usize)> {
        let is_stale =
            self.now - self.victims[class].looked > LOOK_TOKENS * usage.layers().len() as u64;
        if is_stale {
            self.look(usage, class);
        }
        loop {
            let victims = &mut self.victims[class];
            while let Some(&(_, slot, used)) = victims.found.last() {
                let slot = slot as usize;
                match self.held[slot] {
                    Some(blob) if self.used[blob] == used && used != self.now => {
                        return Some((self.value(usage, blob), slot));
                    }
                    // It was used since, or holds another.
                    _ => victims.found.pop(),
                };
            }
            if victims.nothing == Some(self.now) {
                return None;
            }
            self.look(usage, class);
        }
    }

    /// Looks for victims of a class.
    fn look(&mut self, usage: &Usage, class: usize) {
        let first = self.classes[class].1;
        let end = self.classes.get(class + 1).map_or(self.held.len(), |c| c.1);
        let mut found = std::mem::take(&mut self.victims[class].found);
        found.clear();
        for slot in first..end {
            let Some(blob) = self.held[slot] else {
                continue;
            };
            if self.used[blob] != self.now {
                found.push((self.value(usage, blob), slot as u32, self.used[blob]));
            }
        }
        let by_value = |a: &(f64, u32, u64), b: &(f64, u32, u64)| b.0.total_cmp(&a.0);
        if found.len() > VICTIMS {
            let others = found.len() - VICTIMS;
            found.select_nth_unstable_by(others, by_value);
            found.drain(..others);
        }
        found.sort_unstable_by(by_value);
        let nothing = found.is_empty().then_some(self.now);
        self.victims[class] = Victims {
            looked: self.now,
            found,
            nothing,
        };
    }
}

/// What the cache should hold to begin with, most valuable first.
pub(super) fn best(usage: &Usage) -> Vec<Blob> {
    let mut blobs: Vec<(f64, Blob)> = (0..usage.blobs())
        .map(|blob| (usage.rate(blob), blob))
        .collect();
    blobs.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    blobs.into_iter().map(|(_, blob)| blob).collect()
}

/// Layers whose experts have so many bytes.
pub fn blob_bytes(layers: &[Layer]) -> u64 {
    let of = |l: &Layer| l.blob_bytes.saturating_mul(u64::from(l.experts));
    layers.iter().map(of).fold(0, u64::saturating_add)
}
