//! Experts in memory that plays a device's: slots, and a layer's experts served from them, or from where they lie.

use super::memory;
use crate::error::Error;
use crate::experts::{Emulated, Store};
use crate::model::{Mixture, Model};
use cpu::mem::Buffer;
use cpu::mixture::{Expert, Side, Source};
use place::experts::{Copy, Served, Slot, Slots, Way};
use std::ops::Range;
use std::time::{Duration, Instant};

/// What decides of the experts, and the slots that it says things of.
#[derive(Debug)]
pub(super) struct Experts {
    pub(super) store: Store,
    pub(super) arena: Option<Arena>,
}

impl Experts {
    /// Makes the slots, and fills them with what is known to be used.
    pub(super) fn new(model: &Model, store: Store) -> Result<Self, Error> {
        let slots = store.slots();
        let arena = slots.map(|slots| Arena::new(slots, store.emulated()));
        let arena = arena.transpose()?;
        let mut this = Self { arena, store };
        let fill = this.store.fill();
        this.copy(model, &fill);
        Ok(this)
    }

    pub(super) fn bytes(&self) -> u64 {
        let arena = self.arena.as_ref();
        arena.map_or(0, |arena| arena.bytes.len() as u64)
    }

    fn copy(&mut self, model: &Model, copies: &[Copy]) {
        let Some(arena) = &mut self.arena else { return };
        for copy in copies {
            let mixture = model.mixture(copy.layer as usize);
            arena.fill(model, mixture, copy.expert, copy.slot);
        }
    }

    /// Copies what moves into the cache behind what was served.
    pub(super) fn copy_behind(&mut self, model: &Model) {
        let Self { store, arena } = self;
        let Some(arena) = arena else { return };
        for copy in store.copies() {
            let mixture = model.mixture(copy.layer as usize);
            arena.fill(model, mixture, copy.expert, copy.slot);
        }
    }
}

/// Slots, one behind the other.
#[derive(Debug)]
pub(super) struct Arena {
    bytes: Buffer<u8>,
    /// Of each slot.
    places: Vec<Range<usize>>,
    /// Whether it was ever written: the system gives memory when it is.
    written: Vec<bool>,
    emulated: Emulated,
    /// What copies pass through where that is emulated.
    bounce: Vec<u8>,
}

impl Arena {
    fn new(slots: &Slots, emulated: Emulated) -> Result<Self, Error> {
        let mut end = 0_usize;
        let n = slots.cached() + slots.staging().slots;
        let place = |number| {
            let start = end;
            let bytes = usize::try_from(slots.bytes_of(Slot(number))).unwrap_or(usize::MAX);
            // What is beyond a number is refused when the memory is taken.
            end = end.saturating_add(bytes);
            start..end
        };
        let places: Vec<_> = (0..n).map(place).collect();
        if emulated.staging_fails {
            end = usize::MAX;
        }
        Ok(Self {
            bytes: Buffer::new(end).map_err(memory("slots for experts"))?,
            written: vec![false; places.len()],
            places,
            emulated,
            bounce: Vec::new(),
        })
    }

    fn slot(&self, slot: Slot) -> &[u8] {
        &self.bytes[self.places[slot.0 as usize].clone()]
    }

    /// Copies an expert to a slot. Returns whether that was the first of this slot.
    fn fill(&mut self, model: &Model, mixture: &Mixture, expert: u32, slot: Slot) -> bool {
        let blob = mixture.experts[expert as usize].blob();
        let begun = Instant::now();
        let mut from = &model.weights.in_host()[blob];
        if self.emulated.host_copy {
            self.bounce.resize(from.len().max(self.bounce.len()), 0);
            self.bounce[..from.len()].copy_from_slice(from);
            from = &self.bounce[..from.len()];
        }
        let place = self.places[slot.0 as usize].clone();
        model.pool.copy(from, &mut self.bytes[place][..from.len()]);
        if let Some(gb_s) = self.emulated.link_gb_s {
            let took = Duration::from_secs_f64(from.len() as f64 / gb_s / 1e9);
            while begun.elapsed() < took {
                std::hint::spin_loop();
            }
        }
        !std::mem::replace(&mut self.written[slot.0 as usize], true)
    }
}

/// A layer's experts, as they are served.
pub(super) struct Serving<'a> {
    pub(super) model: &'a Model,
    pub(super) mixture: &'a Mixture,
    pub(super) arena: &'a mut Arena,
    pub(super) served: &'a [Served],
    /// What copies took.
    pub(super) streaming: Duration,
    /// Whether memory was taken for one.
    pub(super) is_unusual: bool,
}

impl Serving<'_> {
    fn of(&self, expert: u32) -> &Served {
        let at = self.served.binary_search_by_key(&expert, |s| s.expert);
        &self.served[at.expect("experts that are used are served")]
    }
}

impl Source for Serving<'_> {
    /// Streams experts through their slots: up to the first one whose slot has another of them.
    fn make_ready(&mut self, experts: &[u32]) -> usize {
        let begun = Instant::now();
        let mut taken = Vec::new();
        let mut ready = 0;
        for &expert in experts {
            if let Way::Streamed(slot) = self.of(expert).way {
                if taken.contains(&slot) {
                    break;
                }
                taken.push(slot);
                self.is_unusual |= self.arena.fill(self.model, self.mixture, expert, slot);
            }
            ready += 1;
        }
        if !taken.is_empty() {
            self.streaming += begun.elapsed();
        }
        ready
    }

    fn expert(&self, expert: u32) -> Expert<'_> {
        let found = &self.mixture.experts[expert as usize];
        match self.of(expert).way {
            Way::Resident(slot) | Way::Streamed(slot) => found.view_in(self.arena.slot(slot)),
            Way::Host => found.view(&self.model.weights),
        }
    }

    fn side(&self, expert: u32) -> Side {
        match self.of(expert).way {
            Way::Host => Side::Host,
            Way::Resident(_) | Way::Streamed(_) => Side::Device,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use place::experts::{self, Costs, Layer, Policy, Recalled, Settings, Share};

    #[test]
    fn slots_that_have_no_room_are_an_error() {
        let layer = Layer {
            experts: 4,
            used: 2,
            blob_bytes: 1 << 60,
        };
        for cache_bytes in [0, 1 << 62] {
            let settings = Settings {
                cache_bytes,
                staging_slots: 2,
                policy: Policy::Value,
                prompt: Share::Auto,
                generated: Share::Auto,
                costs: Costs::UNKNOWN,
                reads_in_place: false,
            };
            let experts = experts::Experts::new(&[layer], &settings, &Recalled::default());
            let none = Emulated::default();
            let error = Arena::new(experts.slots(), none).unwrap_err().to_string();
            assert!(error.contains("slots for experts"), "{error}");
        }
    }
}
