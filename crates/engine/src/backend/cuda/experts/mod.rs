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
//! So a generated token is launched as a graph ahead of all answers, and **the driver is not called while a layer may be waiting for one**: a call may
//! last until the device has nothing to do, if anybody else in the process gives memory back meanwhile, loads kernels or has memory pinned, and then the
//! device would wait for the host, and the host for the device. What moves into the cache is copied when a later layer's routing is known, as all
//! launches of the layers before are past then, and slots and lists that they read may be written: a prompt's behind what its layer streams, a generated token's
//! behind its last answer.
//!
//! What is not pinned the device neither reads nor copies by itself. A prompt's goes through a few pinned slots that the host fills; for a generated token the
//! host copies it to pinned memory, where the device reads it.

mod held;
mod share;

use self::held::Held;
use self::share::{Computing, InBlobs};
use super::mixture::{Lying, Mixtures};
use crate::error::Error;
use crate::experts::Store;
use crate::model::{Mixture, Model};
use cpu::mixture;
use cuda::Stream;
use cuda::experts::{Blobs, Foreign, Mixer, Place, Shared, Tokens};
use cuda::kernel::Start;
use cuda::stream::{Event, Timing};
use cuda::{Buffer, Mailbox, Pinned};
use place::experts::{Copy, Experts, Served, Slot, Took, Way};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The list of resident experts; a generated token's list, too.
const RESIDENT: usize = 0;

/// What places a session's experts.
#[derive(Debug)]
pub(super) struct PlacedExperts {
    pub(super) store: Store,
    held: Held,
    /// Slots of a batch of streamed experts.
    batch: usize,
    side: Stream,
    /// Of each batch of a layer: its copies are there; its products are done.
    arrived: Vec<Event>,
    done: Vec<Event>,
    /// Begin and end of a layer's copies.
    streaming: [Event; 2],
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
    /// Work space: of one token the experts, each with the token, and which of its experts they are.
    of_one: Vec<(u32, u32)>,
    places: Vec<usize>,
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
        let ring = slots.staging().slots;
        let (experts, used) = (of.routing.experts, of.routing.used);
        let emulated = store.emulated();
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
        let (lying, pool) = (&mixtures.lying, model.host_pool());
        let mut this = Self {
            held: Held::new(stream, lying, blobs, slots, [experts, used], emulated)?,
            batch: (ring as usize / 2).max(1),
            side: device.stream()?,
            arrived: events(experts)?,
            done: events(experts)?,
            streaming: [event(Timing::On)?, event(Timing::On)?],
            routed: event(Timing::Off)?,
            adopted: event(Timing::Off)?,
            x: Mailbox::new(device, ubatch * c.width)?,
            ids: Mailbox::new(device, ubatch * used)?,
            are_sent: false,
            cpu: CpuShare {
                computing: Computing::new(shape, ubatch).map_err(memory)?,
                rows: Pinned::new(device, rows * c.width)?,
                pairs: Pinned::new(device, rows)?,
                of_one: Vec::with_capacity(used),
                places: Vec::with_capacity(used),
            },
            served: Vec::new(),
            answers: Vec::new(),
            pending: None,
            generated: 0,
            is_recording: false,
            store,
        };
        let fill = this.store.fill();
        this.held.fill(pool, lying, fill)?;
        Ok(this)
    }

    /// Bytes of slots.
    pub(super) fn bytes(&self) -> u64 {
        self.held.slots.bytes() as u64
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
        self.held.settle(lying)?;
        match generated {
            true => self.held.slots.publish_held(stream),
            false => Ok(()),
        }
    }

    /// A layer's routing is known: ends the one before, and asks how this one's experts are served. Calls the driver only behind a prompt's layer.
    fn serve(
        &mut self,
        index: usize,
        used: impl Iterator<Item = (u32, u32)>,
    ) -> Result<(), cuda::Error> {
        let now = Instant::now();
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
                copied: self.held.copied(),
                is_unusual: pending.is_unusual || self.generated == 1,
            });
        }
        self.held.next_layer();
        let served = self.store.serve(index, used);
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

    /// A generated token's layer needs no more answers. Behind the last one the driver may be called again.
    fn end_one(&mut self, at: &At<'_>) -> Result<(), cuda::Error> {
        self.held.move_chosen(self.store.copies())?;
        let last = at.mixture.index + 1 == at.lying.blobs.len();
        match last {
            true => {
                let layer = at.mixture.index as u32;
                self.held
                    .move_in_behind(at.model.host_pool(), at.lying, layer)
            }
            false => Ok(()),
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
        let layer = self.held.slots.layer(blob, RESIDENT);
        let number = at.number();
        let held = self.held.slots.held(at.mixture.index);
        at.mixer
            .ask(at.stream, at.start, number, &layer, held, tokens.scores, x)?;
        // Before anything else is given: what was never launched may not be while the device waits.
        if !self.is_recording {
            self.say_where(at)?;
        }
        let layer = self.held.slots.layer(blob, RESIDENT);
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
        let layer = self.held.slots.layer(blob, RESIDENT);
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
        let waits = question.waits;
        self.serve(index, question.ids.iter().map(|&id| (id, 1)))?;
        for &Served { expert, way, .. } in &self.served {
            if let Way::Streamed(slot) = way
                && slot.0 < self.held.cached
            {
                self.held.move_behind(Copy {
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
        let pool = at.model.host_pool();
        for (i, &served) in self.served.iter().enumerate() {
            let place = self.held.place_one(pool, at.lying, index, i, served)?;
            self.answers.push(place);
        }
        at.mixer.answer(number, &self.answers);
        Ok(())
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
        let CpuShare {
            computing,
            of_one,
            places,
            ..
        } = &mut self.cpu;
        of_one.clear();
        places.clear();
        for (j, served) in self.served.iter().enumerate() {
            if served.way == Way::Host {
                of_one.push((served.expert, 0));
                places.push(j);
            }
        }
        let mut source = InBlobs {
            mixture: at.mixture,
            blobs: self.held.slots.blobs(),
            starts,
        };
        let mut give = |i: usize, row: &[f32]| {
            rows[places[i] * width..][..width].copy_from_slice(row);
        };
        let (model, x) = (at.model, question.x);
        computing.outputs(model, &mut source, x, 1, of_one, &mut give);
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
        let layer = self.held.slots.layer(blob, RESIDENT);
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
        let (pool, index) = (at.model.host_pool(), at.mixture.index);
        self.held.settle(at.lying)?;
        self.serve(index, used.map(|(e, &n)| (e as u32, n)))?;
        self.held.move_in(pool, at.lying)?;
        let (blob, starts) = (&at.lying.blobs[index], &at.lying.starts[index]);
        let mut last_of = vec![None; self.held.len()];
        for served in &self.served {
            if let Way::Streamed(slot) = served.way {
                last_of[slot.0 as usize] = Some(served.expert);
            }
        }
        // The sum reads biases: of those whose slot others take, where they lie. What the device does not reach there the CPU computes.
        for served in self.served.iter_mut().filter(|_| blob.has_biases()) {
            if let Way::Streamed(slot) = served.way
                && last_of[slot.0 as usize] != Some(served.expert)
                && starts[served.expert as usize] >= self.held.slots.blobs().pinned_bytes()
            {
                served.way = Way::Host;
            }
        }
        let batches = self.batches();
        let lists = 2 + batches.len();
        self.held.slots.clear(lists);
        let mut resident = false;
        for i in 0..self.served.len() {
            let Served { expert, way, .. } = self.served[i];
            let e = expert as usize;
            match way {
                Way::Host => {}
                Way::Resident(slot) => {
                    self.held.await_settled(at.stream, at.lying, slot)?;
                    let place = self.held.place(blob, slot)?;
                    for list in [RESIDENT, lists - 1] {
                        self.held.slots.put(list, e, place)?;
                    }
                    resident = true;
                }
                // Biases, which the sum reads, are still where they lie.
                Way::Streamed(slot) if last_of[slot.0 as usize] != Some(expert) => {
                    if let Some(place) = self.held.slots.place_in_host(blob, starts[e])? {
                        self.held.slots.put(lists - 1, e, place)?;
                    }
                }
                Way::Streamed(slot) => {
                    let place = self.held.place(blob, slot)?;
                    self.held.slots.put(lists - 1, e, place)?;
                }
            }
        }
        for (b, batch) in batches.iter().enumerate() {
            for &(expert, slot) in batch {
                let place = self.held.place(blob, slot)?;
                self.held.slots.put(1 + b, expert as usize, place)?;
            }
        }
        self.held.slots.publish(at.stream, lists)?;
        if resident {
            let layer = self.held.slots.layer(blob, RESIDENT);
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
        self.held.move_chosen(self.store.copies())?;
        self.held.move_in(pool, at.lying)?;
        let layer = self.held.slots.layer(blob, lists - 1);
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
        let mut batch_of: Vec<Option<usize>> = vec![None; self.held.len()];
        self.held.copies.record(&self.streaming[0])?;
        if let Some(pending) = &mut self.pending {
            pending.is_streamed = true;
        }
        for (b, batch) in batches.iter().enumerate() {
            for &(expert, slot) in batch {
                let before = batch_of[slot.0 as usize].replace(b);
                let copy = Copy {
                    layer: index as u32,
                    expert,
                    slot,
                };
                let after = before.map(|before| &self.done[before]);
                self.held
                    .stream(at.model.host_pool(), at.lying, copy, after)?;
            }
            if b + 1 == batches.len() {
                self.held.copies.record(&self.streaming[1])?;
            }
            self.held.copies.record(&self.arrived[b])?;
            at.stream.wait(&self.arrived[b])?;
            let layer = self.held.slots.layer(blob, 1 + b);
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
            blobs: self.held.slots.blobs(),
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
            ..
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

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
