//! An NVIDIA GPU. Operations are begun in the order of the calls, in one stream; what fails is remembered until
//! [`Backend::finish`].
//!
//! A generated token takes some hundred launches. The second such step over the same blocks is recorded as a graph, the ones after it are
//! that graph: all that differs between them lies in memory, which the graph's work reads (token, position, angles). Where blocks
//! change, every 256 tokens, one step is done without it, and sets the lists of blocks that the graph goes on with.

mod attender;
mod ring;
mod weights;

use self::attender::{Attended, Attender, HostSpan};
use self::ring::Ring;
use self::weights::OnDevice;
use super::{
    Added, At, Attending, Backend, CELLS, GROUP, KvShape, LOGIT_ROWS, Placed, Step, Turn,
    down_passes,
};
use crate::error::Error;
use crate::model::rope::Frequencies;
use crate::model::{Linear, Model, Vector};
use cuda::attention::{
    Attention, KvShape as DeviceShape, KvType as DeviceType, Over, Params, Part, Partials, Parts,
    Spans, Step as DeviceStep, Table, Turn as DeviceTurn,
};
use cuda::kernel::Start;
use cuda::ops::{Angles, Delta, Gate, Heads, Normed, Ops, RopePairs, Rotation as HeadRotation};
use cuda::product::{FEW_MAX, Output, StepRecord, TOGETHER_MAX, Target};
use cuda::{Acts, Buffer, Device, Graph, Mailbox, Outbox, Quantiser, Stream};
use quant::act::{BLOCK32, BLOCK256, Passes};
use quant::product::act_block;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of lists that a step sends before it waits for some: those of a hundred layers of 250 blocks.
const OUTBOX_BYTES: usize = 1 << 20;

/// Spans of a prompt's attention that are done side by side.
const SPANS_AT_ONCE: usize = 4;

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
    attention: Attention,
    /// A list a layer of what its attention reads, and of the block that its cells are written to.
    tables: Vec<[Table; 2]>,
    partials: Partials,
    parts: Parts,
    /// What `parts` holds, and what the step has so far.
    folded: Vec<Part>,
    collected: Vec<Part>,
    /// Partials of the step so far.
    slots_used: usize,
    spans: Spans,
    /// Of the first token.
    position: Buffer<u32>,
    ids: Buffer<i32>,
    /// Cosines and sines of the chunk's positions, for layers without and with a window.
    angles: [[Buffer<f32>; 2]; 2],
    ring: Ring,
    /// The CPU's part, where it has one.
    attender: Option<Attender>,
    /// Lists on their way to the device.
    outbox: Outbox,
    last: [Buffer<f32>; 2],
    logits: Buffer<f32>,
    host_logits: Mailbox<f32>,
    /// What a generated token's step begins with, and its angles on the way there.
    record: StepRecord,
    turns: [[Vec<f32>; 2]; 2],
    /// Whether the operations are those of a generated token. They start while the ones ahead of them still run; a prompt's are long
    /// enough to wait.
    generated: bool,
    start: Start,
    /// A generated token's step, and whether the lists in device memory are those of the last one.
    graph: Option<Graph>,
    is_listed: bool,
    failed: Option<cuda::Error>,
    /// Bytes of all buffers but the weights and the staging ring.
    work_bytes: u64,
}

fn device_shape(shape: &KvShape) -> DeviceShape {
    let ty = |ty: cpu::attention::KvType| {
        let name = ty.name();
        let known = DeviceType::ALL.into_iter().find(|t| t.name() == name);
        known.expect("both know the same types")
    };
    DeviceShape {
        heads: shape.heads,
        c_k: shape.c_k,
        c_v: shape.c_v,
        type_k: ty(shape.type_k),
        type_v: ty(shape.type_v),
    }
}

impl<'m> Cuda<'m> {
    /// Takes work space on the device that a model was loaded to, for up to `ubatch` tokens over up to `n_ctx` cells. `cpu_shares`:
    /// the CPU attends some of what is in host memory.
    pub(crate) fn new(
        model: &'m Model,
        ordinal: usize,
        shape: &KvShape,
        ubatch: usize,
        n_ctx: usize,
        cpu_shares: bool,
    ) -> Result<Self, Error> {
        let c = model.config();
        let device = Device::open(ordinal)?;
        let stream = device.stream()?;
        let attender = if cpu_shares {
            let what = Attended {
                shape: *shape,
                heads: c.heads,
                scale: c.attention_scale,
                soft_cap: c.attention_soft_cap,
                n_ctx,
            };
            // One thread is left to the one that gives work to the device.
            let threads = model.pool.threads().saturating_sub(1).max(1);
            Some(Attender::new(&stream, what, model.isa, threads)?)
        } else {
            None
        };
        let shape = device_shape(shape);
        let before = cuda::memory::taken_bytes();
        let attention = Attention::new(&device, Target::Best, shape, c.heads)?;
        // A block with cells removed from its middle is several.
        let blocks = 2 * n_ctx.div_ceil(CELLS) + 1;
        let table = |capacity| Table::new(&stream, capacity);
        let tables = (0..c.n_layer)
            .map(|_| Ok([table(blocks)?, table(1)?]))
            .collect::<Result<_, cuda::Error>>()?;
        let widest = c.ff.max(c.width).max(c.heads * c.head_v);
        let zeros = |len: usize| Buffer::zeroed(&stream, len);
        let angles = |frequencies: &Frequencies| {
            let n = (ubatch * frequencies.pairs()).max(1);
            Ok::<_, cuda::Error>([zeros(n)?, zeros(n)?])
        };
        let pairs = [model.rope.pairs(), model.rope_windowed.pairs()];
        let spans = Spans::values(&shape, c.heads, ubatch, SPANS_AT_ONCE);
        let rows = LOGIT_ROWS.min(ubatch);
        // What follows takes as many bytes as `place::bytes::device_work_bytes` plans.
        let mut new = Self {
            model,
            weights: OnDevice::new(model, &stream)?,
            quantiser: Quantiser::new(&device)?,
            acts32: Acts::new(&stream, ubatch.max(LOGIT_ROWS), widest)?,
            acts256: Acts::new(&stream, ubatch.max(LOGIT_ROWS), widest)?,
            ops: Ops::new(&device, Target::Best)?,
            tables,
            partials: Partials::new(&stream, &shape, c.heads, blocks)?,
            parts: Parts::new(&stream, blocks)?,
            folded: Vec::new(),
            collected: Vec::new(),
            slots_used: 0,
            spans: Spans::new(&stream, spans)?,
            attention,
            position: zeros_of(&stream, 1)?,
            ids: zeros_of(&stream, ubatch)?,
            angles: [angles(&model.rope)?, angles(&model.rope_windowed)?],
            ring: Ring::new(&device)?,
            attender,
            outbox: Outbox::new(&device, OUTBOX_BYTES)?,
            last: [zeros(LOGIT_ROWS * c.width)?, zeros(LOGIT_ROWS * c.width)?],
            logits: zeros(rows * c.n_vocab)?,
            host_logits: Mailbox::new(&device, rows * c.n_vocab)?,
            record: StepRecord::new(&device, pairs)?,
            turns: pairs.map(|n| [vec![0.0; n], vec![0.0; n]]),
            generated: false,
            start: Start::After,
            graph: None,
            is_listed: false,
            failed: None,
            work_bytes: 0,
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

    /// Quantises `x` `[T, K]` for the formats of some matrices that it is multiplied with.
    fn quantise(
        &mut self,
        x: &Buffer<f32>,
        tokens: usize,
        passes: Passes,
        outputs: &[(&Linear, &mut Buffer<f32>)],
    ) -> Result<(), cuda::Error> {
        for block in [BLOCK32, BLOCK256] {
            let mut of_block = outputs
                .iter()
                .filter(|(linear, _)| act_block(linear.w.ty()) == Some(block));
            let Some((linear, _)) = of_block.next() else {
                continue;
            };
            let shape = cuda::acts::Shape {
                tokens,
                k: linear.w.k(),
                block,
                passes,
            };
            let acts = match block {
                BLOCK32 => &mut self.acts32,
                _ => &mut self.acts256,
            };
            self.quantiser
                .quantise(&self.stream, self.start, x, shape, acts)?;
        }
        Ok(())
    }

    /// Products of one input `x`, which has been quantised, with their biases: neighbours of one format together, where the input is
    /// few columns.
    fn products(
        &mut self,
        x: &Buffer<f32>,
        tokens: usize,
        outputs: &mut [(&Linear, &mut Buffer<f32>)],
    ) -> Result<(), cuda::Error> {
        let (stream, start) = (&self.stream, self.start);
        for outputs in outputs.chunk_by_mut(|a, b| a.0.w.ty() == b.0.w.ty()) {
            let ty = outputs[0].0.w.ty();
            let (_, product) = self.weights.matrix(&outputs[0].0.w);
            let acts = match act_block(ty) {
                None => None,
                Some(BLOCK32) => Some(&self.acts32),
                Some(_) => Some(&self.acts256),
            };
            if let Some(acts) = acts
                && acts.shape().columns() <= FEW_MAX
            {
                for outputs in outputs.chunks_mut(TOGETHER_MAX) {
                    let mut together: Vec<Output<'_>> = outputs
                        .iter_mut()
                        .map(|(linear, y)| Output {
                            w: self.weights.matrix(&linear.w).0,
                            bias: linear.bias.as_ref().map(|b| self.weights.vector(b)),
                            y,
                        })
                        .collect();
                    product.together(stream, start, acts, &mut together)?;
                }
                continue;
            }
            for (linear, out) in outputs {
                let (w, _) = self.weights.matrix(&linear.w);
                match acts {
                    None => product.float(stream, start, w, x, tokens, out)?,
                    Some(acts) => product.quantised(stream, start, w, acts, out)?,
                }
                if let Some(bias) = &linear.bias {
                    let bias = self.weights.vector(bias);
                    let n = linear.w.n();
                    self.ops.add_bias(stream, start, tokens, n, out, bias)?;
                }
            }
        }
        Ok(())
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

    /// Folds a generated token's partial results, and makes of them what `output` multiplies.
    fn fold(
        &mut self,
        output: &Linear,
        rotated: bool,
        attended: &mut Buffer<f32>,
    ) -> Result<(), cuda::Error> {
        let totals = match self.collected.first() {
            Some(Part::Group { .. }) => self.attender.as_ref().map(Attender::totals),
            _ => None,
        };
        let blocks = act_block(output.w.ty()).map(|block| {
            let acts = match block {
                BLOCK32 => &mut self.acts32,
                _ => &mut self.acts256,
            };
            (acts, block, Passes::One)
        });
        self.attention.fold_to(
            &self.stream,
            self.start,
            &self.parts,
            &self.partials,
            totals,
            None,
            attended,
            hadamard(rotated),
            blocks,
        )
    }

    /// Copies what a prompt's chunk reads to the device.
    fn upload_chunk(&mut self, position: usize, tokens: &[u32]) -> Result<(), cuda::Error> {
        let first = u32::try_from(position).unwrap_or(u32::MAX);
        self.position.upload(&self.stream, &[first])?;
        let frequencies = [&self.model.rope, &self.model.rope_windowed];
        for (angles, frequencies) in self.angles.iter_mut().zip(frequencies) {
            let n = tokens.len() * frequencies.pairs();
            let (mut cos, mut sin) = (vec![0.0; n], vec![0.0; n]);
            frequencies.fill(position, tokens.len(), &mut cos, &mut sin);
            for (buffer, values) in angles.iter_mut().zip([cos, sin]) {
                buffer.upload_at(&self.stream, 0, &values)?;
            }
        }
        let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
        self.ids.upload_at(&self.stream, 0, &ids)
    }

    /// Does a generated token's step as it is recorded, or records it.
    fn replay(&mut self, position: usize, token: u32, step: impl FnOnce(&mut Self)) {
        self.run(|b| {
            if b.graph.is_none() {
                let stream = b.stream.clone();
                b.graph = Some(stream.capture(|| {
                    step(b);
                    b.failed.take().map_or(Ok(()), Err)
                })?);
            }
            b.write_step(position, token)?;
            let graph = b.graph.as_mut().expect("just recorded");
            graph.launch(&b.stream)
        });
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

/// How a layer's heads are turned.
fn turning<'a>(
    model: &Model,
    weights: &'a OnDevice<'_>,
    angles: &'a [[Buffer<f32>; 2]; 2],
    turn: &Turn<'a>,
) -> DeviceTurn<'a> {
    let c = model.config();
    let [cos, sin] = &angles[usize::from(turn.windowed)];
    let rope = if turn.windowed {
        &model.rope_windowed
    } else {
        &model.rope
    };
    let norm = |norm: &'a Option<Vector>| norm.as_ref().map(|w| weights.vector(w));
    DeviceTurn {
        bias: [None; 3],
        norm: [norm(&turn.layer.q_norm), norm(&turn.layer.k_norm)],
        eps: c.norm_eps,
        angles: Some(Angles {
            cos,
            sin,
            pairs: rope.pairs(),
            which: match c.rope_pairs {
                cpu::ops::RopePairs::Neighbours => RopePairs::Neighbours,
                cpu::ops::RopePairs::Halves => RopePairs::Halves,
            },
            position: None,
        }),
        rotation_k: hadamard(turn.rotation.k),
        rotation_v: hadamard(turn.rotation.v),
    }
}

fn hadamard(rotates: bool) -> HeadRotation {
    if rotates {
        HeadRotation::Hadamard
    } else {
        HeadRotation::None
    }
}

/// A span that the CPU attends.
fn host_span(span: &Placed<'_, Cuda<'_>>) -> Option<HostSpan> {
    let At::Host(slab) = span.at else {
        return None;
    };
    Some(HostSpan {
        index: span.index,
        cells: span.cells,
        slab: Arc::clone(slab),
    })
}

fn zeros_of<T: cuda::Plain>(stream: &Stream, len: usize) -> Result<Buffer<T>, cuda::Error> {
    Buffer::zeroed(stream, len)
}

impl Backend for Cuda<'_> {
    const CPU_SHARES: bool = true;

    type Array = Buffer<f32>;
    type Slab = Buffer<u8>;
    type HostSlab = Arc<Mailbox<u8>>;

    fn model(&self) -> &Model {
        self.model
    }

    fn bytes(&self) -> u64 {
        self.work_bytes
    }

    fn staging_bytes(&self) -> u64 {
        self.ring.bytes()
    }

    fn array(&self, len: usize) -> Result<Buffer<f32>, Error> {
        Ok(Buffer::zeroed(&self.stream, len)?)
    }

    fn slab(&self, bytes: usize) -> Result<Buffer<u8>, Error> {
        Ok(Buffer::zeroed(&self.stream, bytes)?)
    }

    fn host_slab(&self, bytes: usize) -> Result<Arc<Mailbox<u8>>, Error> {
        Ok(Arc::new(Mailbox::new(self.stream.device(), bytes)?))
    }

    fn spill(&mut self, from: &Buffer<u8>, to: &mut Arc<Mailbox<u8>>) {
        self.run(|b| {
            let work = || to.receive(&b.stream, from, from.len());
            b.ring.between_copies(&b.stream, work)
        });
    }

    fn fetch(&mut self, from: &Arc<Mailbox<u8>>, to: &mut Buffer<u8>) {
        self.run(|b| from.send(&b.stream, 0..from.len(), to));
    }

    fn duplicate(&mut self, from: &Buffer<u8>, to: &mut Buffer<u8>) {
        self.run(|b| to.copy_from(&b.stream, 0, from, 0..from.len()));
    }

    fn save(&self, from: &Buffer<u8>, to: &mut Vec<u8>) -> Result<(), Error> {
        to.extend(from.to_vec(&self.stream)?);
        Ok(())
    }

    fn save_host(&self, from: &Arc<Mailbox<u8>>, to: &mut Vec<u8>) -> Result<(), Error> {
        self.stream.synchronise()?;
        to.extend_from_slice(from);
        Ok(())
    }

    fn restore(&mut self, from: &[u8], to: &mut Buffer<u8>) {
        self.run(|b| to.upload(&b.stream, from));
    }

    fn make_slots(&mut self, slots: usize, bytes: usize) -> Result<(), Error> {
        Ok(self.ring.resize(&self.stream, slots, bytes)?)
    }

    fn stage(&mut self, from: &Arc<Mailbox<u8>>, at: Range<usize>, slot: usize) {
        self.run(|b| b.ring.fill(from, at, slot));
    }

    fn step(&mut self, position: usize, token: u32, again: bool, step: impl FnOnce(&mut Self)) {
        (self.generated, self.start) = (true, Start::Overlapped);
        if again && self.is_listed {
            self.replay(position, token, step);
        } else {
            step(self);
            self.is_listed = self.failed.is_none();
        }
        (self.generated, self.start) = (false, Start::After);
    }

    fn begin(&mut self, position: usize, tokens: &[u32], x: &mut Buffer<f32>) {
        self.run(|b| {
            let (n, c) = (tokens.len(), b.model.config());
            let factor = c.embedding_scale;
            if let [token] = *tokens
                && b.generated
            {
                b.write_step(position, token)?;
                let (w, product) = b.weights.matrix(&b.model.embedding);
                let angles = b.angles.each_mut().map(|[cos, sin]| Some([cos, sin]));
                let (stream, record, at) = (&b.stream, &b.record, &mut b.position);
                return product.begin(stream, b.start, w, record, factor, at, angles, x);
            }
            b.is_listed = false;
            b.upload_chunk(position, tokens)?;
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
            let blocks = outputs
                .each_ref()
                .map(|(linear, _)| act_block(linear.w.ty()));
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
            let (stream, how) = (&b.stream, turning(b.model, &b.weights, &b.angles, turn));
            b.attention
                .turn(stream, b.start, tokens, q, k, v, &how, None)
        });
    }

    fn turn_and_append(
        &mut self,
        turn: &Turn<'_>,
        attending: &Attending<'_>,
        slab: &mut Buffer<u8>,
        block: usize,
        q: &mut Buffer<f32>,
        k: &mut Buffer<f32>,
        v: &mut Buffer<f32>,
    ) {
        self.run(|b| {
            let block = Over {
                slab,
                offset: attending.at.start,
                index: block,
                cells: (0, CELLS),
            };
            let how = turning(b.model, &b.weights, &b.angles, turn);
            let [_, table] = &mut b.tables[attending.layer];
            b.attention.turn_to(
                &b.stream,
                b.start,
                &mut b.outbox,
                table,
                &block,
                &b.position,
                q,
                k,
                v,
                &how,
            )
        });
    }

    fn append(
        &mut self,
        attending: &Attending<'_>,
        slab: &mut Buffer<u8>,
        block: usize,
        _tokens: Range<usize>,
        k: &Buffer<f32>,
        v: &Buffer<f32>,
    ) {
        // The kernel leaves out what is not of this block.
        self.run(|b| {
            let block = Over {
                slab,
                offset: attending.at.start,
                index: block,
                cells: (0, CELLS),
            };
            let [_, table] = &mut b.tables[attending.layer];
            b.attention.append_to(
                &b.stream,
                b.start,
                &mut b.outbox,
                table,
                &block,
                &b.position,
                attending.tokens,
                k,
                v,
            )
        });
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
            let params = Params {
                scale: c.attention_scale,
                soft_cap: c.attention_soft_cap,
                window: attending.window,
            };
            let stream = &b.stream;
            let staged = spans.iter().filter_map(|span| match span.at {
                At::Staged(slot) => Some(slot),
                _ => None,
            });
            let mut slots: Vec<usize> = staged.collect();
            slots.dedup();
            for &slot in &slots {
                b.ring.await_filled(stream, slot)?;
            }
            let over: Vec<Over<'_>> = spans
                .iter()
                .filter_map(|span| {
                    let (slab, offset) = match &span.at {
                        At::Device(slab) => (*slab, attending.at.start),
                        At::Staged(slot) => (b.ring.slot(*slot), 0),
                        At::Host(_) => return None,
                    };
                    Some(Over {
                        slab,
                        offset,
                        index: span.index,
                        cells: span.cells,
                    })
                })
                .collect();
            let [table, _] = &mut b.tables[attending.layer];
            let outbox = &mut b.outbox;
            if !attending.generated {
                let step = DeviceStep {
                    first: step.first,
                    last: step.last,
                };
                b.attention.prefill_over(
                    stream,
                    outbox,
                    table,
                    &over,
                    &params,
                    attending.position,
                    attending.tokens,
                    q,
                    step,
                    &mut b.spans,
                    out,
                )?;
                return slots
                    .iter()
                    .try_for_each(|&slot| b.ring.mark_read(stream, slot));
            }
            if step.first {
                b.slots_used = 0;
                b.collected.clear();
                let host: Vec<HostSpan> = spans.iter().filter_map(host_span).collect();
                if let (Some(last), Some(attender)) = (host.last(), &mut b.attender) {
                    b.collected.push(Part::Group {
                        index: last.index / GROUP,
                        slot: 0,
                    });
                    let (position, at) = (attending.position, attending.at.clone());
                    attender.hand_over(stream, b.start, q, position, at, host)?;
                }
            }
            let first = b.slots_used;
            let position = &b.position;
            let partials = &mut b.partials;
            b.attention.decode_over(
                stream, b.start, outbox, table, &over, first, position, &params, q, partials,
            )?;
            slots
                .iter()
                .try_for_each(|&slot| b.ring.mark_read(stream, slot))?;
            b.slots_used += over.len();
            // What parts there are is known when the last has come; until then they are collected.
            let new = over.iter().enumerate().map(|(i, o)| Part::Block {
                index: o.index,
                slot: first + i,
            });
            b.collected.extend(new);
            if !step.last {
                return Ok(());
            }
            if b.folded != b.collected {
                b.parts.send(stream, outbox, &b.collected)?;
                b.folded.clone_from(&b.collected);
            }
            if let (Some(Part::Group { .. }), Some(attender)) =
                (b.collected.first(), &mut b.attender)
            {
                attender.take_back(stream, b.start)?;
            }
            // Folded on the way out, where it is known what reads the result.
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
                b.fold(output, rotated, attended)?;
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
            };
            let (stream, start) = (&b.stream, b.start);
            match act_block(down.w.ty()) {
                None => b.ops.gated(stream, start, f, tokens * c.ff, gate, up)?,
                Some(block) => {
                    let shape = cuda::acts::Shape {
                        tokens,
                        k: c.ff,
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
            b.ops
                .residual_norm(stream, start, tokens, width, eps, x, added, None, None)
        });
    }

    fn compute_logits(&mut self, x: &Buffer<f32>, rows: Range<usize>) {
        self.run(|b| {
            let (model, n) = (b.model, rows.len());
            let c = model.config();
            let output = model.output();
            let [copied, normed] = &mut b.last;
            let from = if rows.start == 0 {
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
        let waited = match self.failed.take() {
            Some(error) => Err(error),
            None => self.stream.synchronise(),
        };
        let in_time = self.attender.as_ref().is_none_or(Attender::end_step);
        waited?;
        self.outbox.clear();
        if !in_time {
            let seconds = cuda::doorbell::PATIENCE.as_secs();
            return Err(cuda::Error::Late { seconds }.into());
        }
        Ok(())
    }
}
