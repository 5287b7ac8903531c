//! What slots hold, and what moves into them: the cache's copies of experts, from where they are chosen until tokens find them there.
//!
//! ```text
//! chosen     a slot is taken for an expert: tokens no longer find there what it had
//! due        no layer in work may read the slot any more: the copy may be begun
//! moving     it was begun
//! held       it is there: tokens find it
//! ```

use super::super::mixture::Lying;
use crate::experts::Emulated;
use cpu::pool::Pool;
use cuda::experts::{Blob, Blobs, Near, Place, Slots};
use cuda::stream::{Event, Timing};
use cuda::{Error, Slot as Bounce, Stream};
use place::experts::{Copied, Copy, Served, Slot, Way};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Copies that pass through pinned memory at a time.
const BOUNCES: usize = 4;

/// Slots, and what comes into them.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) slots: Slots,
    /// First byte of each slot, and how many are of the cache.
    places: Vec<usize>,
    pub(super) cached: u32,
    /// What copies.
    pub(super) copies: Stream,
    /// What moves into the cache behind the layer that was served last, and behind the one before.
    behind: Vec<Moving>,
    due: Vec<Moving>,
    /// Copies that were begun, and by mixture: those that are there.
    moving: VecDeque<Moving>,
    settled: Vec<Event>,
    /// The last copy to each slot behind a layer, until it is known to be there.
    settling: Vec<Option<Moving>>,
    /// The layer and expert that generated tokens find in each slot of the cache.
    held: Vec<Option<(u32, u32)>>,
    /// Of the last one.
    number: u64,
    emulated: Emulated,
    /// Pinned memory that copies of what is not pinned pass through, and whose turn it is.
    bounces: Vec<Bounce>,
    next_bounce: usize,
    /// Where a generated token's experts are read that are not pinned, one piece for each of a layer's.
    near: Near,
}

/// A copy to the cache behind a layer, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Moving {
    copy: Copy,
    number: u64,
    /// Whose expert the slot had.
    from: Option<u32>,
}

impl Held {
    /// Slots for copies of what lies in `blobs`, of which a token uses so many a layer.
    pub(super) fn new(
        stream: &Stream,
        lying: &Lying,
        blobs: Arc<Blobs>,
        slots: &place::experts::Slots,
        [experts, used]: [usize; 2],
        emulated: Emulated,
    ) -> Result<Self, Error> {
        let (device, layers) = (stream.device(), lying.blobs.len());
        let (ring, cached) = (slots.staging().slots, slots.cached());
        let mut end = 0_usize;
        let place = |number| {
            let start = end;
            let bytes = usize::try_from(slots.bytes_of(Slot(number))).unwrap_or(usize::MAX);
            // What is beyond a number is refused when the memory is taken.
            end = end.saturating_add(bytes);
            start
        };
        let places: Vec<usize> = (0..cached + ring).map(place).collect();
        if emulated.staging_fails {
            end = usize::MAX;
        }
        let has_pageable = blobs.pinned_bytes() < blobs.len();
        let (bounces, pieces) = match has_pageable || emulated.host_copy {
            true => (BOUNCES, used),
            false => (0, 0),
        };
        let bytes = lying.blobs.iter().map(Blob::bytes).max().unwrap_or(0);
        let bounces = (0..bounces).map(|_| Bounce::new(device, bytes));
        let settled = (0..layers).map(|_| Event::new(device, Timing::Off));
        Ok(Self {
            slots: Slots::new(stream, blobs, end, [layers, experts], experts + 2)?,
            settling: vec![None; places.len()],
            held: vec![None; cached as usize],
            places,
            cached,
            copies: device.stream()?,
            behind: Vec::new(),
            due: Vec::new(),
            moving: VecDeque::new(),
            settled: settled.collect::<Result<_, _>>()?,
            number: 0,
            emulated,
            bounces: bounces.collect::<Result<_, _>>()?,
            next_bounce: 0,
            near: Near::new(device, pieces, bytes)?,
        })
    }

    /// Slots, of the cache and of the ring.
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// Fills slots before anything is served.
    pub(super) fn fill(
        &mut self,
        pool: &Pool,
        lying: &Lying,
        copies: Vec<Copy>,
    ) -> Result<(), Error> {
        for copy in copies {
            self.fetch(pool, lying, copy)?;
            self.hold(lying, copy)?;
        }
        self.copies.synchronise()
    }

    /// Where a slot is that has a blob of this layout.
    pub(super) fn place(&self, blob: &Blob, slot: Slot) -> Result<Place, Error> {
        self.slots.place(blob, self.places[slot.0 as usize])
    }

    /// Tokens find an expert in a slot of the cache from now on.
    fn hold(&mut self, lying: &Lying, copy: Copy) -> Result<(), Error> {
        let (layer, expert) = (copy.layer, copy.expert);
        let place = self.place(&lying.blobs[layer as usize], copy.slot)?;
        self.held[copy.slot.0 as usize] = Some((layer, expert));
        self.slots
            .hold(layer as usize, expert as usize, Some(place))
    }

    /// It will have another one; says whose it had.
    fn release(&mut self, slot: Slot) -> Result<Option<u32>, Error> {
        let Some((layer, expert)) = self.held[slot.0 as usize].take() else {
            return Ok(None);
        };
        self.slots.hold(layer as usize, expert as usize, None)?;
        Ok(Some(layer))
    }

    /// Another layer is served: what was chosen behind the one before is due.
    pub(super) fn next_layer(&mut self) {
        self.due.append(&mut self.behind);
    }

    /// Has an expert moved into the cache some time.
    fn moving(&mut self, copy: Copy) -> Result<Moving, Error> {
        self.number += 1;
        let released = self.release(copy.slot)?;
        let settling = &mut self.settling[copy.slot.0 as usize];
        let moving = Moving {
            copy,
            number: self.number,
            // What was to have it meanwhile never came.
            from: released.or(settling.and_then(|before| before.from)),
        };
        *settling = Some(moving);
        Ok(moving)
    }

    /// Has an expert moved into the cache when the layer in work is done.
    pub(super) fn move_behind(&mut self, copy: Copy) -> Result<(), Error> {
        let moving = self.moving(copy)?;
        self.behind.push(moving);
        Ok(())
    }

    /// Has experts moved to slots that the layer in work does not use, as soon as that may be begun.
    pub(super) fn move_chosen(&mut self, copies: &[Copy]) -> Result<(), Error> {
        for &copy in copies {
            let moving = self.moving(copy)?;
            self.due.push(moving);
        }
        Ok(())
    }

    /// What became of the copies behind the layer before.
    pub(super) fn copied(&self) -> Copied {
        if !self.bounces.is_empty() || self.emulated.link_gb_s.is_some() {
            Copied::ByHost
        } else if self.moving.is_empty() {
            Copied::InTime
        } else {
            Copied::Late
        }
    }

    /// Looks which copies to the cache are there by now.
    pub(super) fn settle(&mut self, lying: &Lying) -> Result<(), Error> {
        while let Some(&moving) = self.moving.front() {
            let Moving { copy, .. } = moving;
            if !self.settled[copy.layer as usize].is_done()? {
                break;
            }
            let settling = &mut self.settling[copy.slot.0 as usize];
            if *settling == Some(moving) {
                *settling = None;
                self.hold(lying, copy)?;
            }
            self.moving.pop_front();
        }
        Ok(())
    }

    /// Begins to copy what moves into the cache behind earlier layers.
    pub(super) fn move_in(&mut self, pool: &Pool, lying: &Lying) -> Result<(), Error> {
        for moving in std::mem::take(&mut self.due) {
            let Moving { copy, .. } = moving;
            // A later one takes the slot.
            if self.settling[copy.slot.0 as usize] != Some(moving) {
                continue;
            }
            self.fetch(pool, lying, copy)?;
            self.copies.record(&self.settled[copy.layer as usize])?;
            self.moving.push_back(moving);
        }
        Ok(())
    }

    /// The same behind the last answer to a generated token, whose layer `last` may still be reading what it found when the token began.
    pub(super) fn move_in_behind(
        &mut self,
        pool: &Pool,
        lying: &Lying,
        last: u32,
    ) -> Result<(), Error> {
        let is_read = |moving: &Moving| moving.from == Some(last);
        let (read, free): (Vec<_>, _) = self.due.drain(..).partition(is_read);
        self.due = free;
        self.move_in(pool, lying)?;
        let past = read.into_iter().map(|moving| Moving {
            from: None,
            ..moving
        });
        for moving in past {
            let settling = &mut self.settling[moving.copy.slot.0 as usize];
            if settling.is_some_and(|last| last.number == moving.number) {
                *settling = Some(moving);
                self.due.push(moving);
            }
        }
        Ok(())
    }

    /// What `stream` is given from here on finds the slot's expert there, if it is on its way.
    pub(super) fn await_settled(
        &mut self,
        stream: &Stream,
        lying: &Lying,
        slot: Slot,
    ) -> Result<(), Error> {
        if let Some(moving) = self.settling[slot.0 as usize].take() {
            stream.wait(&self.settled[moving.copy.layer as usize])?;
            self.hold(lying, moving.copy)?;
        }
        Ok(())
    }

    /// Begins to copy an expert that a prompt's chunk streams, after `after`: to a slot of the ring, or to one of the cache, where it stays.
    pub(super) fn stream(
        &mut self,
        pool: &Pool,
        lying: &Lying,
        copy: Copy,
        after: Option<&Event>,
    ) -> Result<(), Error> {
        if let Some(after) = after {
            self.copies.wait(after)?;
        }
        self.settling[copy.slot.0 as usize] = None;
        self.fetch(pool, lying, copy)?;
        if copy.slot.0 < self.cached {
            self.release(copy.slot)?;
            self.hold(lying, copy)?;
        }
        Ok(())
    }

    /// Begins to copy an expert to a slot.
    fn fetch(&mut self, pool: &Pool, lying: &Lying, copy: Copy) -> Result<(), Error> {
        let (layer, slot) = (copy.layer as usize, copy.slot.0 as usize);
        let start = lying.starts[layer][copy.expert as usize];
        let (bytes, to) = (lying.blobs[layer].bytes(), self.places[slot]);
        let begun = Instant::now();
        if !self.emulated.host_copy && start < self.slots.blobs().pinned_bytes() {
            self.slots.fetch(&self.copies, start..start + bytes, to)?;
        } else {
            let bounce = &mut self.bounces[self.next_bounce];
            self.next_bounce = (self.next_bounce + 1) % BOUNCES;
            self.slots
                .fetch_through(&self.copies, pool, bounce, start..start + bytes, to)?;
        }
        self.pace(begun, bytes);
        Ok(())
    }

    /// Waits as long as a slower link would have taken for so many bytes, if one is emulated.
    fn pace(&self, begun: Instant, bytes: usize) {
        if let Some(gb_s) = self.emulated.link_gb_s {
            let took = Duration::from_secs_f64(bytes as f64 / gb_s / 1e9);
            while begun.elapsed() < took {
                std::hint::spin_loop();
            }
        }
    }

    /// Where an expert is, the `i`-th of a generated token's layer: in a slot, or in host memory, from where the device reads it in few reads; `None`: the CPU
    /// computes it. Calls no function of the driver.
    pub(super) fn place_one(
        &mut self,
        pool: &Pool,
        lying: &Lying,
        layer: usize,
        i: usize,
        served: Served,
    ) -> Result<Option<Place>, Error> {
        let (Way::Resident(slot) | Way::Streamed(slot)) = served.way else {
            return Ok(None);
        };
        let blob = &lying.blobs[layer];
        let start = lying.starts[layer][served.expert as usize];
        let is_settled = self.settling[slot.0 as usize].is_none();
        if matches!(served.way, Way::Resident(_)) && is_settled {
            return self.place(blob, slot).map(Some);
        }
        let begun = Instant::now();
        let in_host = self.slots.place_in_host(blob, start)?;
        let place = match in_host.filter(|_| !self.emulated.host_copy) {
            Some(place) => place,
            // What the layer before had there is read: its successor's routing is known.
            None => {
                let bytes = start..start + blob.bytes();
                self.near.bring(pool, self.slots.blobs(), bytes, i)?
            }
        };
        self.pace(begun, blob.bytes());
        Ok(Some(place))
    }
}
