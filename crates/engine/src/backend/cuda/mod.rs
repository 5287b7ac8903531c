//! An NVIDIA GPU. Operations are begun in the order of the calls, in one stream; what fails is remembered until
//! [`Backend::finish`]. Steps of generated tokens are recorded ([`recording`]).

mod attender;
mod attention;
pub(crate) mod batches;
mod experts;
mod mixture;
mod products;
mod recording;
mod ring;
mod tape;
mod weights;

use self::attention::{Attends, Given, turning};
use self::experts::PlacedExperts;
use self::mixture::Mixtures;
use self::recording::Timed;
use self::tape::Recorded;
use self::weights::OnDevice;
use super::{
    Added, Again, Attending, Backend, KvShape, LOGIT_ROWS, Placed, Step, Stepped, Transfers, Turn,
    down_passes,
};
use crate::error::Error;
use crate::experts::Store;
use crate::model::rope::Frequencies;
use crate::model::{Linear, Mixture, Model, Vector};
use cuda::kernel::Start;
use cuda::ops::{Delta, Gate, Heads, Normed, Ops, Rotation as HeadRotation};
use cuda::product::{StepRecord, Target};
use cuda::{Acts, Buffer, Device, Mailbox, Quantiser, Spilled, Stream};
use quant::act::{BLOCK32, BLOCK256, Passes};
use quant::product::act_block;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;

/// Slabs of cells in host memory that are pinned at once: a layer's parts of them go to the device in one copy.
const PINNED_AT_ONCE: usize = 4;

/// A model on a device, and what its operations work in.
#[derive(Debug)]
pub(crate) struct Cuda<'m> {
    model: &'m Model,
    stream: Stream,
    weights: OnDevice<'m>,
    quantiser: Quantiser,
    acts32: Acts,
    acts256: Acts,
    ops: Ops,
    attends: Attends,
    mixtures: Option<Mixtures>,
    /// Tokens at a time, at most.
    ubatch: usize,
    /// Of the chunk's tokens; of a generated token's step, or of one sequence's prompt, the first one's alone is of use.
    position: Buffer<u32>,
    ids: Buffer<i32>,
    /// Cosines and sines of the chunk's positions, for layers without and with a window.
    angles: [[Buffer<f32>; 2]; 2],
    last: [Buffer<f32>; 2],
    /// Whether a generated token's residual stream is in the first of them: products that add to it leave the sum elsewhere.
    summed: bool,
    logits: Buffer<f32>,
    host_logits: Mailbox<f32>,
    /// What a generated token's step begins with, and its angles on the way there.
    record: StepRecord,
    turns: [[Vec<f32>; 2]; 2],
    /// Whether the operations are those of a generated token.
    generated: bool,
    /// Operations start while the ones ahead of them still run.
    start: Start,
    /// Steps of one generated token of each of so many sequences, with all cells in device memory; and of how many the lists in device memory are.
    resident: Vec<Option<Recorded>>,
    listed: usize,
    /// The step before, if it was one token's with cells in host memory, and was recorded.
    spilled: Option<Recorded>,
    /// Whether there was no memory to record a step with.
    is_poor: bool,
    /// Whether what the step in work begins with is on the device already.
    is_uploaded: bool,
    timed: Option<Timed>,
    /// What failed first. It stays: cells that were to be moved or copied meanwhile were not, so nothing later would be of use.
    failed: Option<cuda::Error>,
    /// Bytes of all buffers but the weights and the staging ring.
    work_bytes: u64,
    /// Host memory for cells that may be pinned, and is; and whether it was told that it is all.
    pin_max_bytes: u64,
    pinned_bytes: Cell<u64>,
    /// Pinned memory that was taken and is not used yet.
    pinned: RefCell<Vec<Spilled>>,
    is_told: Cell<bool>,
}

impl<'m> Cuda<'m> {
    /// Takes work space on the device that a model was loaded to, for up to `ubatch` tokens of `n_seq` sequences over up to `n_ctx` cells.
    /// `cpu_shares`: the CPU attends some of what is in host memory.
    #[allow(clippy::too_many_arguments, reason = "what its work space depends on")]
    pub(crate) fn new(
        model: &'m Model,
        ordinal: usize,
        shape: &KvShape,
        ubatch: usize,
        n_ctx: usize,
        n_seq: usize,
        cpu_shares: bool,
        transfers: &Transfers,
    ) -> Result<Self, Error> {
        let c = model.config();
        let device = Device::open(ordinal)?;
        let stream = device.stream()?;
        let before = cuda::memory::taken_bytes();
        let widest = c.common_ff().max(c.width).max(c.heads * c.head_v);
        let zeros = |len: usize| Buffer::zeroed(&stream, len);
        let angles = |frequencies: &Frequencies| {
            let n = (ubatch * frequencies.pairs()).max(1);
            Ok::<_, cuda::Error>([zeros(n)?, zeros(n)?])
        };
        let pairs = [model.rope.pairs(), model.rope_windowed.pairs()];
        let rows = LOGIT_ROWS.min(ubatch);
        let acts32 = Acts::new(&stream, ubatch.max(LOGIT_ROWS), widest)?;
        let acts256 = Acts::beside(&stream, &acts32, widest)?;
        // What follows takes as many bytes as `place::bytes::device_work_bytes` plans.
        let mut new = Self {
            model,
            weights: OnDevice::new(model, &stream)?,
            quantiser: Quantiser::new(&device)?,
            acts32,
            acts256,
            ops: Ops::new(&device, Target::Best)?,
            attends: Attends::new(
                model, &stream, shape, ubatch, n_ctx, n_seq, cpu_shares, transfers,
            )?,
            mixtures: Mixtures::new(model, &stream, ubatch)?,
            ubatch,
            position: zeros_of(&stream, ubatch)?,
            ids: zeros_of(&stream, ubatch)?,
            angles: [angles(&model.rope)?, angles(&model.rope_windowed)?],
            last: [zeros(LOGIT_ROWS * c.width)?, zeros(LOGIT_ROWS * c.width)?],
            summed: false,
            logits: zeros(rows * c.n_vocab)?,
            host_logits: Mailbox::new(&device, rows * c.n_vocab)?,
            record: StepRecord::new(&device, pairs)?,
            turns: pairs.map(|n| [vec![0.0; n], vec![0.0; n]]),
            generated: false,
            start: Start::Overlapped,
            resident: Vec::new(),
            listed: 0,
            spilled: None,
            is_poor: false,
            is_uploaded: false,
            timed: None,
            failed: None,
            work_bytes: 0,
            pin_max_bytes: transfers.pin_max_bytes.map_or(u64::MAX, |most| {
                // Experts came first.
                most.saturating_sub(model.weights.on_device().pinned_bytes())
            }),
            pinned_bytes: Cell::new(0),
            pinned: RefCell::default(),
            is_told: Cell::new(false),
            stream,
        };
        new.work_bytes = cuda::memory::taken_bytes().saturating_sub(before);
        Ok(new)
    }

    /// Remembers the first failure; nothing is begun after it.
    fn run(&mut self, op: impl FnOnce(&mut Self) -> Result<(), cuda::Error>) {
        if self.failed.is_none() {
            self.failed = op(self).err();
        }
    }

    /// Puts down what a generated token's step begins with.
    fn write_step(&mut self, position: usize, token: u32) -> Result<(), cuda::Error> {
        let frequencies = [&self.model.rope, &self.model.rope_windowed];
        for ([cos, sin], frequencies) in self.turns.iter_mut().zip(frequencies) {
            frequencies.fill(position, 1, cos, sin);
        }
        let angles = self.turns.each_ref().map(|[cos, sin]| [&cos[..], &sin[..]]);
        let position = u32::try_from(position).unwrap_or(u32::MAX);
        self.record.write(token, position, angles)
    }

    /// Copies what a chunk reads to the device that is not a generated token alone.
    fn upload_chunk(
        &mut self,
        positions: &[Range<usize>],
        tokens: &[u32],
    ) -> Result<(), cuda::Error> {
        let all = positions.iter().cloned().flatten();
        let all: Vec<u32> = all.map(|p| u32::try_from(p).unwrap_or(u32::MAX)).collect();
        self.position.upload_at(&self.stream, 0, &all)?;
        let frequencies = [&self.model.rope, &self.model.rope_windowed];
        for (angles, frequencies) in self.angles.iter_mut().zip(frequencies) {
            let n = tokens.len() * frequencies.pairs();
            let (mut cos, mut sin) = (vec![0.0; n], vec![0.0; n]);
            let mut first = 0;
            for positions in positions {
                let at = first * frequencies.pairs()..;
                let (cos, sin) = (&mut cos[at.clone()], &mut sin[at]);
                frequencies.fill(positions.start, positions.len(), cos, sin);
                first += positions.len();
            }
            for (buffer, values) in angles.iter_mut().zip([cos, sin]) {
                buffer.upload_at(&self.stream, 0, &values)?;
            }
        }
        let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
        self.ids.upload_at(&self.stream, 0, &ids)
    }

    /// Norms a token's query heads together, and its key heads, where an architecture does.
    fn norm_together(
        &mut self,
        turn: &Turn<'_>,
        tokens: usize,
        q: &mut Buffer<f32>,
        k: &mut Buffer<f32>,
    ) -> Result<(), cuda::Error> {
        let c = self.model.config();
        let layer = turn.layer;
        for (x, norm) in [(q, &layer.q_norm), (k, &layer.k_norm)] {
            let w = norm.as_ref().map(|norm| self.weights.vector(norm));
            let Some(w) = w.filter(|w| w.len() != c.head_k) else {
                continue;
            };
            self.ops
                .norm_rows(&self.stream, self.start, tokens, w.len(), c.norm_eps, x, w)?;
        }
        Ok(())
    }
}

/// What is added to the residual stream.
fn delta<'a>(weights: &'a OnDevice<'_>, added: &Added<'a, Cuda<'_>>) -> Delta<'a> {
    Delta {
        first: added.delta,
        second: None,
        bias: None,
        norm: added.norm.map(|norm| weights.vector(norm)),
    }
}

/// A layer's sinks, one a query head.
fn sinks<'a>(model: &Model, weights: &'a OnDevice<'_>, layer: usize) -> Option<&'a Buffer<f32>> {
    let sinks = model.layers[layer].sinks.as_ref();
    sinks.map(|sinks| weights.vector(sinks))
}

fn zeros_of<T: cuda::Plain>(stream: &Stream, len: usize) -> Result<Buffer<T>, cuda::Error> {
    Buffer::zeroed(stream, len)
}

fn hadamard(rotates: bool) -> HeadRotation {
    if rotates {
        HeadRotation::Hadamard
    } else {
        HeadRotation::None
    }
}

/// Where work is given: a macro, because what it borrows of a backend is less than all of it.
macro_rules! given {
    ($backend:expr) => {
        Given {
            stream: &$backend.stream,
            start: $backend.start,
            position: &$backend.position,
        }
    };
}

impl Backend for Cuda<'_> {
    const CPU_SHARES: bool = true;
    const ALIKE: bool = false;
    const STREAMED_LAST: bool = true;

    type Array = Buffer<f32>;
    type Slab = Buffer<u8>;
    type HostSlab = Arc<Spilled>;

    fn model(&self) -> &Model {
        self.model
    }

    fn bytes(&self) -> u64 {
        self.work_bytes
    }

    fn staging_bytes(&self) -> u64 {
        self.attends.ring.bytes()
    }

    fn array(&self, len: usize) -> Result<Buffer<f32>, Error> {
        Ok(Buffer::zeroed(&self.stream, len)?)
    }

    fn slab(&self, bytes: usize) -> Result<Buffer<u8>, Error> {
        Ok(Buffer::zeroed(&self.stream, bytes)?)
    }

    fn host_slab(&self, bytes: usize) -> Result<Arc<Spilled>, Error> {
        if let Some(slab) = self.pinned.borrow_mut().pop() {
            return Ok(Arc::new(slab));
        }
        let room = self.pin_max_bytes.saturating_sub(self.pinned_bytes.get());
        let n = room.checked_div(bytes as u64).unwrap_or(1);
        let n = usize::try_from(n).unwrap_or(usize::MAX).min(PINNED_AT_ONCE);
        let refused = if n == 0 {
            None
        } else {
            match Spilled::pinned(self.stream.device(), bytes, n) {
                Ok(slabs) => {
                    let pinned = self.pinned_bytes.get() + (n * bytes) as u64;
                    self.pinned_bytes.set(pinned);
                    let mut slabs = slabs.into_iter();
                    let first = slabs.next().expect("at least one");
                    // The next one is taken from the end.
                    self.pinned.borrow_mut().extend(slabs.rev());
                    return Ok(Arc::new(first));
                }
                Err(cuda::Error::OutOfPinned { .. }) => Some("the system pins no more"),
                Err(error) => return Err(error.into()),
            }
        };
        if !self.is_told.replace(true) {
            let why = refused.unwrap_or("no more may be pinned");
            let mib = self.pinned_bytes.get() >> 20;
            tracing::warn!(
                "{mib} MiB of cells are in pinned memory, and {why}: the CPU copies the others, which is slower"
            );
        }
        let memory = |source| Error::Memory {
            what: "a block of the KV cache's tail".to_owned(),
            source,
        };
        Ok(Arc::new(Spilled::pageable(bytes).map_err(memory)?))
    }

    fn spill(&mut self, from: &Buffer<u8>, to: &mut Arc<Spilled>) {
        self.run(|b| {
            let work = || to.receive(&b.stream, from);
            b.attends.ring.between_copies(work)
        });
    }

    fn fetch(&mut self, from: &Arc<Spilled>, to: &mut Buffer<u8>) {
        self.run(|b| from.send(&b.stream, to));
    }

    fn duplicate(&mut self, from: &Buffer<u8>, to: &mut Buffer<u8>) {
        self.run(|b| to.copy_from(&b.stream, 0, from, 0..from.len()));
    }

    fn save(&self, from: &Buffer<u8>, to: &mut Vec<u8>) -> Result<(), Error> {
        to.extend(from.to_vec(&self.stream)?);
        Ok(())
    }

    fn save_host(&self, from: &Arc<Spilled>, to: &mut Vec<u8>) -> Result<(), Error> {
        self.stream.synchronise()?;
        to.extend_from_slice(from);
        Ok(())
    }

    fn restore(&mut self, from: &[u8], to: &mut Buffer<u8>) {
        self.run(|b| to.upload(&b.stream, from));
    }

    fn make_slots(&mut self, slots: usize, bytes: usize) -> Result<(), Error> {
        Ok(self.attends.ring.resize(slots, bytes)?)
    }

    fn begin_batch(&mut self) {
        self.run(|b| b.attends.begin_batch());
    }

    fn stage(&mut self, from: &[&Arc<Spilled>], at: Range<usize>, first_slot: usize) {
        self.run(|b| {
            let from = from.iter().map(|&slab| Arc::clone(slab)).collect();
            b.attends.stage(from, at, first_slot)
        });
    }

    fn place_experts(&mut self, store: Store) -> Result<(), Error> {
        let (model, ubatch) = (self.model, self.ubatch);
        let Some(mixtures) = &mut self.mixtures else {
            return Err(Error::Options("the model has no experts".to_owned()));
        };
        mixtures.place(model, &self.stream, store, ubatch)
    }

    fn experts(&self) -> Option<&Store> {
        Some(&self.mixtures.as_ref()?.placed.as_ref()?.store)
    }

    fn experts_mut(&mut self) -> Option<&mut Store> {
        Some(&mut self.mixtures.as_mut()?.placed.as_mut()?.store)
    }

    fn expert_bytes(&self) -> u64 {
        let placed = self.mixtures.as_ref().and_then(|m| m.placed.as_ref());
        placed.map_or(0, PlacedExperts::bytes)
    }

    fn step(
        &mut self,
        positions: &[Range<usize>],
        tokens: &[u32],
        again: Again,
        mut step: impl FnMut(&mut Self),
    ) -> Stepped {
        let n = tokens.len();
        let mut stepped = Stepped::Given;
        self.generated = n == 1;
        // What layers ask of placed experts is answered once all of a token is given, so each is recorded, if only for one time. Who copies cells through
        // memory of its own cannot answer meanwhile.
        let asks = n == 1 && self.experts().is_some();
        let is_recorded = match again {
            Again::No => false,
            Again::Anew => asks,
            Again::Resident => asks || self.listed == n,
            Again::Spilled => !asks && self.listed == n,
        };
        if is_recorded && !self.is_poor {
            stepped = Stepped::Repeated;
            let step = |b: &mut Self| {
                stepped = Stepped::Recorded;
                step(b);
            };
            self.replay(positions, tokens, again, step);
        } else {
            self.spilled = None;
            step(self);
            self.listed = if self.failed.is_none() && self.records(n) {
                n
            } else {
                0
            };
        }
        self.generated = false;
        stepped
    }

    fn begin(&mut self, positions: &[Range<usize>], tokens: &[u32], x: &mut Buffer<f32>) {
        // Of several sequences the first one counts for records.
        self.run(|b| {
            b.begin_experts(positions[0].start, tokens.len())?;
            let (n, c) = (tokens.len(), b.model.config());
            let factor = c.embedding_scale;
            b.summed = false;
            if let [token] = *tokens
                && b.generated
            {
                b.write_step(positions[0].start, token)?;
                let (w, product) = b.weights.matrix(&b.model.embedding);
                let angles = b.angles.each_mut().map(|[cos, sin]| Some([cos, sin]));
                let (stream, record, at) = (&b.stream, &b.record, &mut b.position);
                return product.begin(stream, b.start, w, record, factor, at, angles, x);
            }
            b.listed = 0;
            if !b.is_uploaded {
                b.upload_chunk(positions, tokens)?;
            }
            let (w, product) = b.weights.matrix(&b.model.embedding);
            product.decode_rows(&b.stream, b.start, w, &b.ids, n, x)?;
            if factor != 1.0 {
                b.ops.scale(&b.stream, b.start, n * c.width, x, factor)?;
            }
            Ok(())
        });
    }

    fn enter<const N: usize>(
        &mut self,
        added: Option<Added<'_, Self>>,
        norm: &Vector,
        tokens: usize,
        x: &mut Buffer<f32>,
        normed: &mut Buffer<f32>,
        mut outputs: [(&Linear, &mut Buffer<f32>); N],
    ) {
        self.run(|b| {
            let c = b.model.config();
            if b.enters_at_once(added.as_ref(), tokens, &outputs) {
                return b.enter_at_once(added, norm, x, normed, &mut outputs);
            }
            let blocks = outputs
                .each_ref()
                .map(|(linear, _)| act_block(linear.w.ty()));
            let x = if b.summed { &mut b.last[0] } else { x };
            let w = Some(b.weights.vector(norm));
            let added = added.map(|added| delta(&b.weights, &added));
            let reads = |block| blocks.contains(&block);
            let out = Normed {
                row: reads(None).then_some(&mut *normed),
                blocks32: reads(Some(BLOCK32)).then_some((&mut b.acts32, Passes::One)),
                blocks256: reads(Some(BLOCK256)).then_some((&mut b.acts256, Passes::One)),
            };
            let (stream, start, width, eps) = (&b.stream, b.start, c.width, c.norm_eps);
            b.ops
                .residual_norm_to(stream, start, tokens, width, eps, x, added, w, out)?;
            b.products(normed, tokens, &mut outputs)
        });
    }

    fn turn(
        &mut self,
        turn: &Turn<'_>,
        tokens: usize,
        q: &mut Buffer<f32>,
        k: &mut Buffer<f32>,
        v: &mut Buffer<f32>,
    ) {
        self.run(|b| {
            b.norm_together(turn, tokens, q, k)?;
            let how = turning(b.model, &b.weights, &b.angles, turn);
            b.attends.turn(given!(b), &how, tokens, [q, k, v])
        });
    }

    fn turn_and_append(
        &mut self,
        turn: &Turn<'_>,
        tokens: Vec<(Attending<'_>, &mut Buffer<u8>, usize)>,
        q: &mut Buffer<f32>,
        k: &mut Buffer<f32>,
        v: &mut Buffer<f32>,
    ) {
        self.run(|b| {
            let n = tokens.len();
            b.norm_together(turn, n, q, k)?;
            let how = turning(b.model, &b.weights, &b.angles, turn);
            if n <= b.attends.sequences() {
                let heads = [q, k, v];
                return b.attends.turn_and_append(given!(b), &how, &tokens, heads);
            }
            b.attends.turn(given!(b), &how, n, [q, &mut *k, &mut *v])?;
            for (attending, slab, block) in &tokens {
                let slabs = std::slice::from_ref(slab);
                b.attends
                    .append(given!(b), attending, slabs, *block, k, v)?;
            }
            Ok(())
        });
    }

    fn append(
        &mut self,
        attending: &Attending<'_>,
        slabs: &mut [&mut Buffer<u8>],
        first: usize,
        k: &Buffer<f32>,
        v: &Buffer<f32>,
    ) {
        self.run(|b| b.attends.append(given!(b), attending, slabs, first, k, v));
    }

    fn attend(
        &mut self,
        attending: &Attending<'_>,
        q: &Buffer<f32>,
        spans: &[Placed<'_, Self>],
        step: Step,
        out: &mut Buffer<f32>,
    ) {
        self.run(|b| {
            let c = b.model.config();
            let sinks = sinks(b.model, &b.weights, attending.layer);
            b.attends
                .attend(c, given!(b), attending, q, spans, step, sinks, out)?;
            // A token that goes with others.
            if attending.generated && !b.generated && step.last {
                b.attends.fold_row(given!(b), attending.row, sinks, out)?;
            }
            Ok(())
        });
    }

    fn leave(
        &mut self,
        output: &Linear,
        rotated: bool,
        tokens: usize,
        attended: &mut Buffer<f32>,
        delta: &mut Buffer<f32>,
    ) {
        self.run(|b| {
            let mut outputs = [(output, delta)];
            if b.generated {
                let block = act_block(output.w.ty());
                let blocks = block.map(|block| match block {
                    BLOCK32 => (&mut b.acts32, block),
                    _ => (&mut b.acts256, block),
                });
                let sinks = sinks(b.model, &b.weights, b.attends.layer());
                b.attends
                    .fold(given!(b), rotated, sinks, blocks, attended)?;
            } else {
                if rotated {
                    let c = b.model.config();
                    let what = Heads {
                        rotation: HeadRotation::Hadamard,
                        ..Heads::default()
                    };
                    let (stream, start, heads, size) = (&b.stream, b.start, c.heads, c.head_v);
                    b.ops
                        .heads(stream, start, tokens, heads, size, 0.0, attended, &what)?;
                }
                b.quantise(attended, tokens, Passes::One, &outputs)?;
            }
            b.products(attended, tokens, &mut outputs)
        });
    }

    fn down(
        &mut self,
        down: &Linear,
        tokens: usize,
        gate: &mut Buffer<f32>,
        up: &Buffer<f32>,
        delta: &mut Buffer<f32>,
    ) {
        self.run(|b| {
            let c = b.model.config();
            let f = match c.gate {
                cpu::ops::Gate::Silu => Gate::Silu,
                cpu::ops::Gate::Gelu => Gate::Gelu,
                cpu::ops::Gate::Clamped => {
                    unreachable!("a gate of experts alone: models with others are refused")
                }
            };
            let (stream, start) = (&b.stream, b.start);
            match act_block(down.w.ty()) {
                None => b
                    .ops
                    .gated(stream, start, f, tokens * down.w.k(), gate, up)?,
                Some(block) => {
                    let shape = cuda::acts::Shape {
                        tokens,
                        k: down.w.k(),
                        block,
                        passes: down_passes(down),
                    };
                    let acts = match block {
                        BLOCK32 => &mut b.acts32,
                        _ => &mut b.acts256,
                    };
                    b.ops
                        .gated_to(stream, start, f, gate, up, false, shape, acts)?;
                }
            }
            b.products(gate, tokens, &mut [(down, delta)])
        });
    }

    fn enter_mixture(
        &mut self,
        added: Option<Added<'_, Self>>,
        norm: &Vector,
        mixture: &Mixture,
        tokens: usize,
        x: &mut Buffer<f32>,
        normed: &mut Buffer<f32>,
        scores: &mut Buffer<f32>,
    ) {
        self.run(|b| b.feed_mixture(added, norm, mixture, tokens, x, normed, scores));
    }

    fn mix(
        &mut self,
        mixture: &Mixture,
        tokens: usize,
        scores: &Buffer<f32>,
        normed: &Buffer<f32>,
        gate: &mut Buffer<f32>,
        up: &mut Buffer<f32>,
        delta: &mut Buffer<f32>,
    ) {
        self.run(|b| b.begin_mixture(mixture, tokens, scores, normed));
        if let Some(shared) = &mixture.shared {
            let ffn = &shared.ffn;
            self.run(|b| {
                let outputs = &mut [(&ffn.gate, &mut *gate), (&ffn.up, &mut *up)];
                b.products(normed, tokens, outputs)
            });
            self.down(&ffn.down, tokens, gate, up, delta);
            if let Some(taken) = &shared.gate {
                self.run(|b| b.products(normed, tokens, &mut [(taken, &mut *up)]));
            }
        }
        self.run(|b| b.finish_mixture(mixture, tokens, scores, normed, up, delta));
    }

    fn keep_last(&mut self, tokens: usize, x: &mut Buffer<f32>, q: &mut Buffer<f32>) {
        self.run(|b| {
            let c = b.model.config();
            for (array, row) in [(x, c.width), (q, c.heads * c.head_k)] {
                array.copy_down(&b.stream, 0, (tokens - 1) * row..tokens * row)?;
            }
            Ok(())
        });
    }

    fn add(
        &mut self,
        added: Added<'_, Self>,
        tokens: usize,
        x: &mut Buffer<f32>,
        _normed: &mut Buffer<f32>,
    ) {
        self.run(|b| {
            let c = b.model.config();
            let (stream, start, width, eps) = (&b.stream, b.start, c.width, c.norm_eps);
            let added = Some(delta(&b.weights, &added));
            let x = if b.summed { &mut b.last[0] } else { x };
            b.ops
                .residual_norm(stream, start, tokens, width, eps, x, added, None, None)
        });
    }

    fn outputs(
        &mut self,
        x: &Buffer<f32>,
        rows: Range<usize>,
        values: &mut Vec<f32>,
    ) -> Result<(), Error> {
        self.run(|b| {
            let c = b.model.config();
            let norm = b.weights.vector(&b.model.output_norm);
            let [copied, normed] = &mut b.last;
            let (stream, start) = (&b.stream, b.start);
            for first in rows.clone().step_by(LOGIT_ROWS) {
                let n = LOGIT_ROWS.min(rows.end - first);
                // Else a generated token's one row is there.
                if !b.summed {
                    copied.copy_from(stream, 0, x, first * c.width..(first + n) * c.width)?;
                }
                let out = Normed {
                    row: Some(&mut *normed),
                    blocks32: None,
                    blocks256: None,
                };
                b.ops
                    .norm_to(stream, start, n, c.width, c.norm_eps, copied, norm, out)?;
                values.extend_from_slice(&normed.to_vec(stream)?[..n * c.width]);
            }
            Ok(())
        });
        Ok(())
    }

    fn compute_logits(&mut self, x: &Buffer<f32>, rows: Range<usize>) {
        self.run(|b| {
            let (model, n) = (b.model, rows.len());
            let c = model.config();
            let output = model.output();
            let [copied, normed] = &mut b.last;
            let from = if b.summed {
                &*copied
            } else if rows.start == 0 {
                x
            } else {
                copied.copy_from(&b.stream, 0, x, rows.start * c.width..rows.end * c.width)?;
                copied
            };
            let block = act_block(output.ty());
            let out = Normed {
                row: block.is_none().then_some(&mut *normed),
                blocks32: (block == Some(BLOCK32)).then_some((&mut b.acts32, Passes::Two)),
                blocks256: (block == Some(BLOCK256)).then_some((&mut b.acts256, Passes::Two)),
            };
            let norm = b.weights.vector(&model.output_norm);
            let (stream, start) = (&b.stream, b.start);
            b.ops
                .norm_to(stream, start, n, c.width, c.norm_eps, from, norm, out)?;
            let (w, product) = b.weights.matrix(output);
            match block {
                None => product.float(stream, start, w, normed, n, &mut b.logits)?,
                Some(BLOCK32) => product.quantised(stream, start, w, &b.acts32, &mut b.logits)?,
                Some(_) => product.quantised(stream, start, w, &b.acts256, &mut b.logits)?,
            }
            let values = n * c.n_vocab;
            if let Some(cap) = c.logit_soft_cap {
                b.ops.soft_cap(stream, start, values, &mut b.logits, cap)?;
            }
            b.host_logits.receive(stream, &b.logits, values)
        });
    }

    fn logits(&self, n: usize) -> &[f32] {
        &self.host_logits[..n * self.model.config().n_vocab]
    }

    fn finish(&mut self) -> Result<(), Error> {
        if self.failed.is_none() {
            self.failed = self.stream.synchronise().err();
        }
        if let (Some(timed), None) = (self.timed.take(), &self.failed) {
            timed.tell();
        }
        let in_time = self.attends.end_step();
        if let Some(error) = &self.failed {
            return Err(error.clone().into());
        }
        let experts_in_time = self.mixtures.as_ref().is_none_or(Mixtures::is_in_time);
        if !in_time || !experts_in_time {
            let seconds = cuda::doorbell::PATIENCE.as_secs();
            return Err(cuda::Error::Late { seconds }.into());
        }
        Ok(())
    }
}
