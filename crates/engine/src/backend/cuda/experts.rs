//! Experts that come and go: what a store says of a layer, done with slots in device memory, copies, and the CPU.
//!
//! All blobs lie in host memory, which is pinned as far as the system lets it. The device tells the host a layer's routing (bells in mapped memory, no call of the driver), the store says
//! where each expert that is used is computed:
//!
//! ```text
//! a prompt's chunk     stream   who is used -> resident experts -> streamed ones, batch by batch, each behind its copies -> sum
//!                      copies   blobs to slots, behind the launches that read what was in them
//!                      side     inputs to the host, outputs of the CPU's experts back to their places
//! a generated token    stream   who is used -> where they are -> gate and up -> down and sum, once the CPU's outputs are there
//!                      host     answers where: in a slot, in host memory, from where the device then reads a streamed one itself, or with the CPU
//! ```
//!
//! A layer of a generated token that finds all its experts in slots, as they were when the token began, goes on by itself, and the host hears of it; only others ask. So
//! slots keep what they have until the token's last layer is past, whatever is decided meanwhile.
//!
//! So a generated token is given, or launched as a graph, ahead of all answers, and **the driver is not called while a layer may be waiting for one**: a call may
//! last until the device has nothing to do, if anybody else in the process gives memory back meanwhile, loads kernels or has memory pinned, and then the
//! device would wait for the host, and the host for the device. What moves into the cache is copied when a later layer's routing is known, as all
//! launches of the layers before are past then, and slots and lists that they read may be written: a prompt's behind what its layer streams, a generated token's
//! behind its last answer.
//!
//! What is not pinned the device neither reads nor copies by itself. A prompt's goes through a few pinned slots that the host fills; for a generated token the
//! host copies it to pinned memory, where the device reads it.

use super::mixture::{Lying, Mixtures};
use crate::error::Error;
use crate::experts::Store;
use crate::model::{Mixture, Model};
use cpu::acts::Acts;
use cpu::mixture::{self, Expert, Pools, Side, Source};
use cpu::product::Operand;
use cuda::Stream;
use cuda::experts::{Blob, Blobs, Foreign, Mixer, Near, Place, Shared, Slots, Tokens};
use cuda::kernel::Start;
use cuda::stream::{Event, Timing};
use cuda::{Buffer, Mailbox, Pinned, Slot as Bounce};
use place::experts::{Copy, Experts, Served, Slot, Took, Way};
use quant::act::{BLOCK32, BLOCK256, Passes};
use quant::product::act_block;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The list of resident experts; a generated token's list, too.
const RESIDENT: usize = 0;

/// What places a session's experts.
#[derive(Debug)]
pub(super) struct PlacedExperts {
    pub(super) store: Store,
    slots: Slots,
    /// First byte of each slot, and how many are of the cache.
    places: Vec<usize>,
    cached: u32,
    /// Slots of a batch of streamed experts.
    batch: usize,
    copies: Stream,
    side: Stream,
    /// Of each batch of a layer: its copies are there; its products are done.
    arrived: Vec<Event>,
    done: Vec<Event>,
    /// Begin and end of a layer's copies.
    streaming: [Event; 2],
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
    routed: Event,
    adopted: Event,
    /// Inputs `[T, D]` of many tokens, and their experts `[T, used]`; whether those of the layer in work are on their way.
    x: Mailbox<f32>,
    ids: Mailbox<u32>,
    are_sent: bool,
    cpu: CpuShare,
    /// The layer in work: how its experts are served, and since when.
    served: Vec<Served>,
    answers: Vec<Option<Place>>,
    pending: Option<Pending>,
    /// Tokens generated so far, from which on a prompt's chunk counts anew.
    generated: u64,
    /// A generated token's layers are given to be recorded: nobody is to be answered.
    pub(super) is_recording: bool,
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

/// What is to be told to the store of the layer before.
#[derive(Debug, Clone, Copy)]
struct Pending {
    since: Instant,
    host: Duration,
    is_streamed: bool,
    is_unusual: bool,
}

/// What the CPU computes its experts with.
#[derive(Debug)]
struct CpuShare {
    computing: Computing,
    /// Of many tokens: outputs `[rows, D]`, in mapped memory, and whose they are.
    rows: Pinned<f32>,
    pairs: Pinned<u32>,
}

#[derive(Debug)]
struct Computing {
    mixer: mixture::Mixer,
    acts: [Acts; 2],
}

/// Experts where they lie.
struct InBlobs<'a> {
    mixture: &'a Mixture,
    blobs: &'a Blobs,
    starts: &'a [usize],
}

impl Source for InBlobs<'_> {
    fn make_ready(&mut self, experts: &[u32]) -> usize {
        experts.len()
    }

    fn expert(&self, expert: u32) -> Expert<'_> {
        let start = self.starts[expert as usize];
        self.mixture.experts[expert as usize].view_in(&self.blobs.bytes()[start..])
    }

    fn side(&self, _: u32) -> Side {
        Side::Host
    }
}

/// Whose layer is in work, and where work is given.
pub(super) struct At<'a> {
    pub(super) model: &'a Model,
    pub(super) mixture: &'a Mixture,
    pub(super) mixer: &'a mut Mixer,
    pub(super) lying: &'a Lying,
    pub(super) stream: &'a Stream,
    pub(super) start: Start,
}

impl At<'_> {
    /// The number of the layer's question.
    fn number(&self) -> u32 {
        self.mixture.index as u32 + 1
    }
}

/// Copies that pass through pinned memory at a time.
const BOUNCES: usize = 4;

/// Rows that the CPU's part of many tokens is computed in, at a time, unless there are more tokens.
const ROWS: usize = 2048;

impl PlacedExperts {
    /// Makes a store's slots for experts that lie in `blobs`, and fills them with what is known to be used.
    pub(super) fn new(
        model: &Model,
        stream: &Stream,
        mixtures: &Mixtures,
        blobs: Arc<Blobs>,
        store: Store,
        ubatch: usize,
    ) -> Result<Self, Error> {
        let device = stream.device();
        let c = model.config();
        let of = c.experts.as_ref().expect("a model with experts");
        let Some(slots) = store.slots() else {
            let what = "experts in host memory need slots on the device";
            return Err(Error::Options(what.to_owned()));
        };
        let (ring, cached) = (slots.staging().slots, slots.cached());
        let (experts, used) = (of.routing.experts, of.routing.used);
        let layers = mixtures.lying.blobs.len();
        let mut end = 0_usize;
        let place = |number| {
            let start = end;
            let bytes = usize::try_from(slots.bytes_of(Slot(number))).unwrap_or(usize::MAX);
            // What is beyond a number is refused when the memory is taken.
            end = end.saturating_add(bytes);
            start
        };
        let places: Vec<usize> = (0..cached + ring).map(place).collect();
        if store.emulated().staging_fails {
            end = usize::MAX;
        }
        let event = |timing| Event::new(device, timing);
        let events = |n: usize| -> Result<Vec<Event>, cuda::Error> {
            (0..n).map(|_| event(Timing::Off)).collect()
        };
        let memory = |source| Error::Memory {
            what: "experts that the CPU computes".to_owned(),
            source,
        };
        let (shape, rows) = (
            mixture::Shape {
                width: c.width,
                ff: of.ff,
                routing: of.routing,
            },
            ROWS.max(ubatch),
        );
        let acts = || Acts::new(ubatch, c.width).map_err(memory);
        let has_pageable = blobs.pinned_bytes() < blobs.len();
        let (bounces, pieces) = match has_pageable || store.emulated().host_copy {
            true => (BOUNCES, used),
            false => (0, 0),
        };
        let bytes = mixtures.lying.blobs.iter().map(Blob::bytes).max();
        let bytes = bytes.unwrap_or(0);
        let bounces = (0..bounces).map(|_| Bounce::new(device, bytes));
        let mut this = Self {
            slots: Slots::new(stream, blobs, end, [layers, experts], experts + 2)?,
            settling: vec![None; places.len()],
            held: vec![None; cached as usize],
            cached,
            batch: (ring as usize / 2).max(1),
            copies: device.stream()?,
            side: device.stream()?,
            arrived: events(experts)?,
            done: events(experts)?,
            streaming: [event(Timing::On)?, event(Timing::On)?],
            behind: Vec::new(),
            due: Vec::new(),
            moving: VecDeque::new(),
            number: 0,
            settled: events(layers)?,
            routed: event(Timing::Off)?,
            adopted: event(Timing::Off)?,
            x: Mailbox::new(device, ubatch * c.width)?,
            ids: Mailbox::new(device, ubatch * used)?,
            are_sent: false,
            cpu: CpuShare {
                computing: Computing {
                    mixer: mixture::Mixer::new(shape, ubatch).map_err(memory)?,
                    acts: [acts()?, acts()?],
                },
                rows: Pinned::new(device, rows * c.width)?,
                pairs: Pinned::new(device, rows)?,
            },
            served: Vec::new(),
            answers: Vec::new(),
            pending: None,
            generated: 0,
            is_recording: false,
            bounces: bounces.collect::<Result<_, _>>()?,
            next_bounce: 0,
            near: Near::new(device, pieces, bytes)?,
            places,
            store,
        };
        for copy in this.store.fill() {
            this.fetch(&mixtures.lying, copy)?;
            this.hold(&mixtures.lying, copy)?;
        }
        this.copies.synchronise()?;
        Ok(this)
    }

    /// Bytes of slots.
    pub(super) fn bytes(&self) -> u64 {
        self.slots.bytes() as u64
    }

    /// Begins a step. What the last layer of the step before took is not known: the next one's routing says when it ended.
    pub(super) fn begin_step(
        &mut self,
        stream: &Stream,
        lying: &Lying,
        position: usize,
        tokens: usize,
        generated: bool,
    ) -> Result<(), cuda::Error> {
        if let Some(pending) = self.pending.take() {
            self.store.took(&Took {
                ms: ms(pending.since.elapsed()),
                is_unusual: true,
                ..Took::default()
            });
        }
        // What is given launch by launch, and by threads that slept, says nothing of the tokens after it.
        self.generated = if generated { self.generated + 1 } else { 0 };
        self.store.begin(position, tokens, generated);
        self.settle(lying)?;
        match generated {
            true => self.slots.publish_held(stream),
            false => Ok(()),
        }
    }

    /// A slot of the cache has an expert.
    fn hold(&mut self, lying: &Lying, copy: Copy) -> Result<(), cuda::Error> {
        let (layer, expert) = (copy.layer, copy.expert);
        let slot = copy.slot.0 as usize;
        let place = self
            .slots
            .place(&lying.blobs[layer as usize], self.places[slot])?;
        self.held[slot] = Some((layer, expert));
        self.slots
            .hold(layer as usize, expert as usize, Some(place))
    }

    /// It will have another one; says whose it had.
    fn release(&mut self, slot: Slot) -> Result<Option<u32>, cuda::Error> {
        let Some((layer, expert)) = self.held[slot.0 as usize].take() else {
            return Ok(None);
        };
        self.slots.hold(layer as usize, expert as usize, None)?;
        Ok(Some(layer))
    }

    /// A layer's routing is known: ends the one before, and asks how this one's experts are served. Calls the driver only behind a prompt's layer.
    fn serve(
        &mut self,
        at: &At<'_>,
        used: impl Iterator<Item = (u32, u32)>,
    ) -> Result<(), cuda::Error> {
        let now = Instant::now();
        let are_copied = self.moving.is_empty() && self.bounces.is_empty() && !self.is_slowed();
        if let Some(pending) = self.pending.take() {
            let [begun, ended] = &self.streaming;
            let stream_ms = match pending.is_streamed {
                true => f64::from(ended.elapsed_ms(begun)?),
                false => 0.0,
            };
            self.store.took(&Took {
                ms: ms(now - pending.since),
                stream_ms,
                host_ms: ms(pending.host),
                are_copied,
                is_unusual: pending.is_unusual || self.generated == 1,
            });
        }
        self.due.append(&mut self.behind);
        let served = self.store.serve(at.mixture.index, used);
        self.served.clear();
        self.served.extend(served.unwrap_or_default());
        self.pending = Some(Pending {
            since: now,
            host: Duration::ZERO,
            is_streamed: false,
            is_unusual: false,
        });
        Ok(())
    }

    /// Has an expert moved into the cache some time.
    fn moving(&mut self, copy: Copy) -> Result<Moving, cuda::Error> {
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
    fn move_behind(&mut self, copy: Copy) -> Result<(), cuda::Error> {
        let moving = self.moving(copy)?;
        self.behind.push(moving);
        Ok(())
    }

    /// Whether copies are slower than they need be.
    fn is_slowed(&self) -> bool {
        let emulated = self.store.emulated();
        emulated.host_copy || emulated.link_gb_s.is_some()
    }

    /// Looks which copies to the cache are there by now.
    fn settle(&mut self, lying: &Lying) -> Result<(), cuda::Error> {
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
    fn move_in(&mut self, lying: &Lying) -> Result<(), cuda::Error> {
        for moving in std::mem::take(&mut self.due) {
            let Moving { copy, .. } = moving;
            // A later one takes the slot.
            if self.settling[copy.slot.0 as usize] != Some(moving) {
                continue;
            }
            self.fetch(lying, copy)?;
            self.copies.record(&self.settled[copy.layer as usize])?;
            self.moving.push_back(moving);
        }
        Ok(())
    }

    /// Has what the store moves into the cache copied, to slots that the layer in work does not use, as soon as that may be begun.
    fn move_chosen(&mut self) -> Result<(), cuda::Error> {
        for i in 0..self.store.copies().len() {
            let moving = self.moving(self.store.copies()[i])?;
            self.due.push(moving);
        }
        Ok(())
    }

    /// A generated token's layer needs no more answers. Behind the last one the driver may be called again.
    fn end_one(&mut self, at: &At<'_>) -> Result<(), cuda::Error> {
        self.move_chosen()?;
        let last = at.mixture.index as u32;
        if last as usize + 1 < at.lying.blobs.len() {
            return Ok(());
        }
        // It may still be reading what it found when the token began.
        let is_read = |moving: &Moving| moving.from == Some(last);
        let (read, free): (Vec<_>, _) = self.due.drain(..).partition(is_read);
        self.due = free;
        self.move_in(at.lying)?;
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

    /// Whether the device reaches the blob that begins there.
    fn is_pinned(&self, start: usize) -> bool {
        start < self.slots.blobs().pinned_bytes()
    }

    /// Begins to copy an expert to a slot.
    fn fetch(&mut self, lying: &Lying, copy: Copy) -> Result<(), cuda::Error> {
        let (layer, slot) = (copy.layer as usize, copy.slot.0 as usize);
        let start = lying.starts[layer][copy.expert as usize];
        let (bytes, to) = (lying.blobs[layer].bytes(), self.places[slot]);
        let begun = Instant::now();
        if !self.store.emulated().host_copy && self.is_pinned(start) {
            self.slots.fetch(&self.copies, start..start + bytes, to)?;
        } else {
            let bounce = &mut self.bounces[self.next_bounce];
            self.next_bounce = (self.next_bounce + 1) % BOUNCES;
            self.slots
                .fetch_through(&self.copies, bounce, start..start + bytes, to)?;
        }
        self.pace(begun, bytes);
        Ok(())
    }

    /// Waits as long as a slower link would have taken for so many bytes, if one is emulated.
    fn pace(&self, begun: Instant, bytes: usize) {
        if let Some(gb_s) = self.store.emulated().link_gb_s {
            let took = Duration::from_secs_f64(bytes as f64 / gb_s / 1e9);
            while begun.elapsed() < took {
                std::hint::spin_loop();
            }
        }
    }

    /// A generated token: has the host asked, and gives all that reads the layer's input in blocks. Says where experts are, unless it is recorded.
    pub(super) fn begin_one(
        &mut self,
        at: &mut At<'_>,
        tokens: &Tokens<'_>,
        x: &Buffer<f32>,
    ) -> Result<(), cuda::Error> {
        let blob = &at.lying.blobs[at.mixture.index];
        let layer = self.slots.layer(blob, RESIDENT);
        let number = at.number();
        let held = self.slots.held(at.mixture.index);
        at.mixer
            .ask(at.stream, at.start, number, &layer, held, tokens.scores, x)?;
        // Before anything else is given: what was never launched may not be while the device waits.
        if !self.is_recording {
            self.say_where(at)?;
        }
        let layer = self.slots.layer(blob, RESIDENT);
        at.mixer.gate_up(at.stream, at.start, &layer, tokens)
    }

    /// The rest of it, with the CPU's part, unless it is recorded.
    pub(super) fn finish_one(
        &mut self,
        at: &mut At<'_>,
        tokens: &Tokens<'_>,
        shared: Shared<'_>,
        y: &mut Buffer<f32>,
    ) -> Result<(), cuda::Error> {
        let blob = &at.lying.blobs[at.mixture.index];
        let layer = self.slots.layer(blob, RESIDENT);
        let foreign = Foreign::Asked(at.number());
        at.mixer
            .down(at.stream, at.start, &layer, tokens, foreign, shared, y)?;
        if self.is_recording {
            return Ok(());
        }
        self.share_one(at)?;
        self.end_one(at)
    }

    /// Wakes the threads that compute the CPU's part of a step, if it may have one: they sleep through tokens without, and a layer that has to wake them is
    /// slower than one without the CPU.
    pub(super) fn rouse(&self, model: &Model) {
        if self.store.experts().is_some_and(Experts::may_share) {
            let pool = model.host_pool();
            pool.run(pool.threads(), |_| ());
        }
    }

    /// Answers a layer's question: where its experts are, and what the CPU's give.
    pub(super) fn answer(&mut self, at: &mut At<'_>) -> Result<(), cuda::Error> {
        self.say_where(at)?;
        self.share_one(at)?;
        self.end_one(at)
    }

    /// Where the experts are that a layer asks about.
    fn say_where(&mut self, at: &mut At<'_>) -> Result<(), cuda::Error> {
        let (number, index) = (at.number(), at.mixture.index);
        let question = at.mixer.question(at.stream, number)?;
        let (ids, waits) = (question.ids.to_vec(), question.waits);
        self.serve(at, ids.iter().map(|&id| (id, 1)))?;
        for i in 0..self.served.len() {
            let Served { expert, way, .. } = self.served[i];
            if let Way::Streamed(slot) = way
                && slot.0 < self.cached
            {
                self.move_behind(Copy {
                    layer: index as u32,
                    expert,
                    slot,
                })?;
            }
        }
        if !waits {
            // It found them all, though some are given up since.
            let is_resident = |s: &Served| matches!(s.way, Way::Resident(_));
            if let Some(pending) = &mut self.pending {
                pending.is_unusual = !self.served.iter().all(is_resident);
            }
            self.served.clear();
            return Ok(());
        }
        self.answers.clear();
        for i in 0..self.served.len() {
            let place = self.place_one(at.lying, index, i)?;
            self.answers.push(place);
        }
        at.mixer.answer(number, &self.answers);
        Ok(())
    }

    /// Where an expert is that was served a generated token's layer `index`: in a slot, or in host memory, from where the device reads it in few reads;
    /// `None`: the CPU computes it.
    fn place_one(
        &mut self,
        lying: &Lying,
        index: usize,
        i: usize,
    ) -> Result<Option<Place>, cuda::Error> {
        let Served { expert, way, .. } = self.served[i];
        let (Way::Resident(slot) | Way::Streamed(slot)) = way else {
            return Ok(None);
        };
        let (blob, start) = (&lying.blobs[index], lying.starts[index][expert as usize]);
        let at = slot.0 as usize;
        if matches!(way, Way::Resident(_)) && self.settling[at].is_none() {
            return self.slots.place(blob, self.places[at]).map(Some);
        }
        let begun = Instant::now();
        let in_host = self.slots.place_in_host(blob, start)?;
        let place = match in_host.filter(|_| !self.store.emulated().host_copy) {
            Some(place) => place,
            // What the layer before had there is read: its successor's routing is known.
            None => {
                let bytes = start..start + blob.bytes();
                self.near.bring(self.slots.blobs(), bytes, i)?
            }
        };
        self.pace(begun, blob.bytes());
        Ok(Some(place))
    }

    /// The CPU's part of a generated token's experts.
    fn share_one(&mut self, at: &mut At<'_>) -> Result<(), cuda::Error> {
        if self.served.iter().all(|served| served.way != Way::Host) {
            return Ok(());
        }
        let (number, begun) = (at.number(), Instant::now());
        let starts = &at.lying.starts[at.mixture.index];
        let question = at.mixer.question(at.stream, number)?;
        let (width, rows) = (at.model.config().width, question.rows);
        let of_host = self.served.iter().enumerate();
        let of_host = of_host.filter(|(_, served)| served.way == Way::Host);
        let pairs: Vec<(u32, u32)> = of_host.map(|(j, s)| (s.expert, j as u32)).collect();
        let of_tokens: Vec<(u32, u32)> = pairs.iter().map(|&(expert, _)| (expert, 0)).collect();
        let mut source = InBlobs {
            mixture: at.mixture,
            blobs: self.slots.blobs(),
            starts,
        };
        let mut give = |i: usize, row: &[f32]| {
            rows[pairs[i].1 as usize * width..][..width].copy_from_slice(row);
        };
        let (model, x) = (at.model, question.x);
        let computing = &mut self.cpu.computing;
        computing.outputs(model, &mut source, x, 1, &of_tokens, &mut give);
        self.emulate_panic(model);
        at.mixer.give(number);
        if let Some(pending) = &mut self.pending {
            pending.host = begun.elapsed();
        }
        Ok(())
    }

    fn emulate_panic(&self, model: &Model) {
        if self.store.emulated().worker_panics {
            let at = |i| assert!(i < 1, "a worker panics because that is emulated");
            model.host_pool().run(2, at);
        }
    }

    /// A prompt's chunk: groups its tokens.
    pub(super) fn begin_many(
        &mut self,
        at: &mut At<'_>,
        tokens: &Tokens<'_>,
        x: &Buffer<f32>,
    ) -> Result<(), cuda::Error> {
        let blob = &at.lying.blobs[at.mixture.index];
        let layer = self.slots.layer(blob, RESIDENT);
        at.mixer.group(at.stream, at.start, &layer, tokens)?;
        at.stream.record(&self.routed)?;
        // They are there, then, when the routing is known.
        let experts = self.store.experts();
        self.are_sent = experts.is_some_and(Experts::shares_mostly);
        if self.are_sent {
            self.send_inputs(at, tokens.n, x)?;
        }
        Ok(())
    }

    /// Sends the host what the CPU's part of many tokens' experts is computed from.
    fn send_inputs(&mut self, at: &At<'_>, n: usize, x: &Buffer<f32>) -> Result<(), cuda::Error> {
        let c = at.model.config();
        let used = c.experts.as_ref().map_or(0, |experts| experts.routing.used);
        self.side.wait(&self.routed)?;
        self.x.receive(&self.side, x, n * c.width)?;
        let (ids, _) = at.mixer.chosen();
        self.ids.receive(&self.side, ids, n * used)
    }

    /// Everything else. `x` `[T, D]` are their inputs.
    pub(super) fn finish_many(
        &mut self,
        at: &mut At<'_>,
        n: usize,
        x: &Buffer<f32>,
        shared: Shared<'_>,
        y: &mut Buffer<f32>,
    ) -> Result<(), cuda::Error> {
        let counts = at.mixer.told_many(at.stream)?.to_vec();
        let used = counts.iter().enumerate().filter(|&(_, &n)| n > 0);
        self.settle(at.lying)?;
        self.serve(at, used.map(|(e, &n)| (e as u32, n)))?;
        self.move_in(at.lying)?;
        let index = at.mixture.index;
        let (blob, starts) = (&at.lying.blobs[index], &at.lying.starts[index]);
        let mut last_of = vec![None; self.places.len()];
        for served in &self.served {
            if let Way::Streamed(slot) = served.way {
                last_of[slot.0 as usize] = Some(served.expert);
            }
        }
        // The sum reads biases: of those whose slot others take, where they lie. What the device does not reach there the CPU computes.
        for served in self.served.iter_mut().filter(|_| blob.has_biases()) {
            if let Way::Streamed(slot) = served.way
                && last_of[slot.0 as usize] != Some(served.expert)
                && starts[served.expert as usize] >= self.slots.blobs().pinned_bytes()
            {
                served.way = Way::Host;
            }
        }
        let batches = self.batches();
        let lists = 2 + batches.len();
        self.slots.clear(lists);
        let mut resident = false;
        for i in 0..self.served.len() {
            let Served { expert, way, .. } = self.served[i];
            let e = expert as usize;
            match way {
                Way::Host => {}
                Way::Resident(slot) => {
                    if let Some(moving) = self.settling[slot.0 as usize].take() {
                        at.stream.wait(&self.settled[moving.copy.layer as usize])?;
                        self.hold(at.lying, moving.copy)?;
                    }
                    let place = self.slots.place(blob, self.places[slot.0 as usize])?;
                    for list in [RESIDENT, lists - 1] {
                        self.slots.put(list, e, place)?;
                    }
                    resident = true;
                }
                // Biases, which the sum reads, are still where they lie.
                Way::Streamed(slot) if last_of[slot.0 as usize] != Some(expert) => {
                    if let Some(place) = self.slots.place_in_host(blob, starts[e])? {
                        self.slots.put(lists - 1, e, place)?;
                    }
                }
                Way::Streamed(slot) => {
                    let place = self.slots.place(blob, self.places[slot.0 as usize])?;
                    self.slots.put(lists - 1, e, place)?;
                }
            }
        }
        for (b, batch) in batches.iter().enumerate() {
            for &(expert, slot) in batch {
                let place = self.slots.place(blob, self.places[slot.0 as usize])?;
                self.slots.put(1 + b, expert as usize, place)?;
            }
        }
        self.slots.publish(at.stream, lists)?;
        if resident {
            let layer = self.slots.layer(blob, RESIDENT);
            at.mixer.multiply(at.stream, at.start, &layer, n)?;
        }
        self.stream_batches(at, n, &batches)?;
        if self.served.iter().any(|s| s.way == Way::Host) {
            let begun = Instant::now();
            self.share_many(at, n, x)?;
            if let Some(pending) = &mut self.pending {
                pending.host += begun.elapsed();
            }
        }
        self.move_chosen()?;
        self.move_in(at.lying)?;
        let layer = self.slots.layer(blob, lists - 1);
        at.mixer.combine(at.stream, at.start, &layer, n, shared, y)
    }

    /// Streamed experts that are copied and multiplied together: no slot twice.
    fn batches(&self) -> Vec<Vec<(u32, Slot)>> {
        let mut batches: Vec<Vec<(u32, Slot)>> = Vec::new();
        for served in &self.served {
            let Way::Streamed(slot) = served.way else {
                continue;
            };
            let is_full = |batch: &Vec<(u32, Slot)>| {
                batch.len() >= self.batch || batch.iter().any(|&(_, taken)| taken == slot)
            };
            match batches.last_mut() {
                Some(batch) if !is_full(batch) => batch.push((served.expert, slot)),
                _ => batches.push(vec![(served.expert, slot)]),
            }
        }
        batches
    }

    /// Copies and multiplies them.
    fn stream_batches(
        &mut self,
        at: &mut At<'_>,
        n: usize,
        batches: &[Vec<(u32, Slot)>],
    ) -> Result<(), cuda::Error> {
        if batches.is_empty() {
            return Ok(());
        }
        let index = at.mixture.index;
        let blob = &at.lying.blobs[index];
        let mut batch_of: Vec<Option<usize>> = vec![None; self.places.len()];
        self.copies.record(&self.streaming[0])?;
        if let Some(pending) = &mut self.pending {
            pending.is_streamed = true;
        }
        for (b, batch) in batches.iter().enumerate() {
            for &(expert, slot) in batch {
                if let Some(before) = batch_of[slot.0 as usize].replace(b) {
                    self.copies.wait(&self.done[before])?;
                }
                let copy = Copy {
                    layer: index as u32,
                    expert,
                    slot,
                };
                self.settling[slot.0 as usize] = None;
                self.fetch(at.lying, copy)?;
                if slot.0 < self.cached {
                    self.release(slot)?;
                    self.hold(at.lying, copy)?;
                }
            }
            if b + 1 == batches.len() {
                self.copies.record(&self.streaming[1])?;
            }
            self.copies.record(&self.arrived[b])?;
            at.stream.wait(&self.arrived[b])?;
            let layer = self.slots.layer(blob, 1 + b);
            at.mixer.multiply(at.stream, at.start, &layer, n)?;
            at.stream.record(&self.done[b])?;
        }
        Ok(())
    }

    /// The CPU's part of many tokens' experts.
    fn share_many(
        &mut self,
        at: &mut At<'_>,
        n: usize,
        x: &Buffer<f32>,
    ) -> Result<(), cuda::Error> {
        let of = at.model.config().experts.as_ref();
        let used = of.map_or(0, |experts| experts.routing.used);
        let width = at.model.config().width;
        if !self.are_sent {
            self.send_inputs(at, n, x)?;
        }
        self.side.synchronise()?;
        let (x, ids) = (&self.x[..n * width], &self.ids[..n * used]);
        let mut of_expert: Vec<Vec<u32>> = vec![Vec::new(); at.mixture.experts.len()];
        for (pair, &id) in ids.iter().enumerate() {
            of_expert[id as usize].push(pair as u32);
        }
        let of_host = self.served.iter().filter(|s| s.way == Way::Host);
        let pairs: Vec<(u32, u32)> = of_host
            .flat_map(|s| {
                let pairs = of_expert[s.expert as usize].iter();
                pairs.map(|&pair| (s.expert, pair))
            })
            .collect();
        let mut source = InBlobs {
            mixture: at.mixture,
            blobs: self.slots.blobs(),
            starts: &at.lying.starts[at.mixture.index],
        };
        for (round, pairs) in pairs.chunks(self.cpu.pairs.len()).enumerate() {
            // The rows of the round before are read.
            if round > 0 {
                self.side.synchronise()?;
            }
            self.cpu.many(at.model, &mut source, x, n, pairs, used);
            self.emulate_panic(at.model);
            let CpuShare {
                rows, pairs: whose, ..
            } = &self.cpu;
            at.mixer
                .adopt(&self.side, Start::After, whose, rows, pairs.len())?;
        }
        self.side.record(&self.adopted)?;
        at.stream.wait(&self.adopted)
    }
}

impl CpuShare {
    /// Outputs of pairs of an expert and a pair of a token and one of its experts, `token * used + j`, by expert: one behind the other.
    fn many(
        &mut self,
        model: &Model,
        source: &mut InBlobs<'_>,
        x: &[f32],
        tokens: usize,
        pairs: &[(u32, u32)],
        used: usize,
    ) {
        let Self {
            computing,
            rows,
            pairs: whose,
        } = self;
        for (to, &(_, pair)) in whose.iter_mut().zip(pairs) {
            *to = pair;
        }
        let pairs = pairs.iter();
        let of_tokens: Vec<_> = pairs.map(|&(e, pair)| (e, pair / used as u32)).collect();
        let width = model.config().width;
        let mut give = |i: usize, row: &[f32]| rows[i * width..][..width].copy_from_slice(row);
        computing.outputs(model, source, x, tokens, &of_tokens, &mut give);
    }
}

impl Computing {
    /// What experts give tokens of `x`: of pairs of an expert and a token, by expert. `give` gets each pair's number and output.
    fn outputs(
        &mut self,
        model: &Model,
        source: &mut InBlobs<'_>,
        x: &[f32],
        tokens: usize,
        pairs: &[(u32, u32)],
        give: &mut dyn FnMut(usize, &[f32]),
    ) {
        let pool = model.host_pool();
        let types = source.mixture.experts[0].inputs().map(|w| w.ty());
        let [acts32, acts256] = &mut self.acts;
        let fill = |acts: &mut Acts, block: usize| {
            let is_read = types.iter().any(|&ty| act_block(ty) == Some(block));
            if is_read {
                acts.quantise(pool, model.isa, x, tokens, block, Passes::One);
            }
            is_read
        };
        let (reads32, reads256) = (fill(acts32, BLOCK32), fill(acts256, BLOCK256));
        let operand = Operand {
            x,
            tokens,
            k: model.config().width,
            acts32: reads32.then(|| acts32.view()),
            acts256: reads256.then(|| acts256.view()),
        };
        let (isa, gate) = (model.isa, model.config().gate);
        let pools = Pools::from(pool);
        self.mixer
            .outputs(pools, isa, gate, &operand, source, pairs, give);
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
