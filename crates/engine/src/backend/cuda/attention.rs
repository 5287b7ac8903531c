//! Attention over blocks in device memory, in the staging ring and, by the CPU, in host memory.

use super::attender::{Attended, Attender, HostSpan, Part as CpuPart};
use super::ring::Ring;
use super::tape::{Op, Recorded, Tape};
use super::weights::OnDevice;
use super::{Cuda, hadamard};
use crate::backend::{At, Attending, CELLS, GROUP, KvShape, Placed, Step, Transfers, Turn};
use crate::error::Error;
use crate::model::{Config, Model, Vector};
use cuda::attention::{
    Attention, KvShape as DeviceShape, KvType as DeviceType, Over, Params, Part, Partials, Parts,
    Spans, Step as DeviceStep, Table, Turn as DeviceTurn,
};
use cuda::kernel::Start;
use cuda::ops::{Angles, RopePairs};
use cuda::product::Target;
use cuda::{Acts, Buffer, Outbox, Spilled, Stream};
use place::bytes::SEQUENCE_LISTS;
use quant::act::Passes;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of lists that a step sends before it waits for some, at least: those of a hundred layers of 250 blocks. A token that is recorded cannot wait, so there
/// is always room for all of one's.
const OUTBOX_BYTES: usize = 1 << 20;

/// Spans of a prompt's attention that are done side by side.
const SPANS_AT_ONCE: usize = 4;

/// The kernels, and what they work in.
#[derive(Debug)]
pub(super) struct Attends {
    kernels: Attention,
    layers: Vec<LayerLists>,
    partials: Partials,
    /// The layer in work, and whose lists are in use: their numbers, the parts, and how many partials, and lists of the staging ring, they have so far.
    at: (usize, usize),
    collected: Vec<Part>,
    slots_used: usize,
    staged_used: usize,
    /// Blocks that a list has room for.
    blocks: usize,
    spans: Spans,
    pub(super) ring: Ring,
    /// The step in work, if it is recorded.
    tape: Option<Tape>,
    /// The CPU's part, where it has one.
    attender: Option<Attender>,
    /// Lists on their way to the device.
    outbox: Outbox,
}

/// A layer's lists in device memory. They rarely change, so each layer has its own.
#[derive(Debug)]
struct LayerLists {
    /// Of the sequences of a step, one after the other; the last of these also that of those for which there are none.
    sequences: Vec<Lists>,
    /// What a generated token reads of the staging ring after all else, as often as it does: a recorded step finds each list as it was.
    staged: Vec<Table>,
    /// The blocks that cells are written to of as many tokens, one a sequence.
    written: Table,
}

/// A sequence's.
#[derive(Debug)]
struct Lists {
    /// What its attention reads; for a generated token, what of it is read at once with what is in device memory.
    there: Table,
    /// What a generated token's partial results are folded from.
    parts: Parts,
    /// The same.
    folded: Vec<Part>,
}

/// Where work is given, and when it starts; and the positions of the step's tokens: of the first at least, of all if they are of several sequences.
#[derive(Debug, Clone, Copy)]
pub(super) struct Given<'a> {
    pub(super) stream: &'a Stream,
    pub(super) start: Start,
    pub(super) position: &'a Buffer<u32>,
}

impl Attends {
    /// For up to `ubatch` tokens of `n_seq` sequences over up to `n_ctx` cells.
    #[allow(clippy::too_many_arguments, reason = "what its work space depends on")]
    pub(super) fn new(
        model: &Model,
        stream: &Stream,
        shape: &KvShape,
        ubatch: usize,
        n_ctx: usize,
        n_seq: usize,
        cpu_shares: bool,
        transfers: &Transfers,
    ) -> Result<Self, Error> {
        let (c, device) = (model.config(), stream.device());
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
            Some(Attender::new(stream, what, model.isa, threads)?)
        } else {
            None
        };
        let shape = device_shape(shape);
        // A block with cells removed from its middle is several.
        let blocks = 2 * n_ctx.div_ceil(CELLS) + 1;
        let lists = |_| {
            Ok(Lists {
                there: Table::new(stream, blocks)?,
                parts: Parts::new(stream, blocks)?,
                folded: Vec::new(),
            })
        };
        let sequences = n_seq.clamp(1, SEQUENCE_LISTS as usize);
        let layer = |_| {
            Ok(LayerLists {
                sequences: (0..sequences)
                    .map(lists)
                    .collect::<Result<_, cuda::Error>>()?,
                staged: vec![Table::new(stream, blocks)?],
                written: Table::new(stream, sequences)?,
            })
        };
        let layers = (0..c.n_layer).map(layer);
        let layers = layers.collect::<Result<Vec<LayerLists>, cuda::Error>>()?;
        let of_token = |layer: &LayerLists| {
            let lists = &layer.sequences[0];
            lists.there.bytes() + lists.parts.bytes() + layer.written.bytes()
        };
        let outbox_bytes = layers.iter().map(of_token).sum::<usize>().max(OUTBOX_BYTES);
        let spans = Spans::values(&shape, c.heads, ubatch, SPANS_AT_ONCE);
        Ok(Self {
            kernels: Attention::new(device, Target::Best, shape, c.heads)?,
            layers,
            partials: Partials::new(stream, &shape, c.heads, blocks)?,
            at: (0, 0),
            collected: Vec::new(),
            slots_used: 0,
            staged_used: 0,
            blocks,
            spans: Spans::new(stream, spans)?,
            ring: Ring::new(stream, transfers)?,
            tape: None,
            attender,
            outbox: Outbox::new(device, outbox_bytes)?,
        })
    }

    /// Attends some spans of a layer, for [`Attends::fold`] to go on with if it is a generated token's, or [`Attends::fold_row`].
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub(super) fn attend(
        &mut self,
        c: &Config,
        given: Given<'_>,
        attending: &Attending<'_>,
        q: &Buffer<f32>,
        spans: &[Placed<'_, Cuda<'_>>],
        step: Step,
        sinks: Option<&Buffer<f32>>,
        out: &mut Buffer<f32>,
    ) -> Result<(), cuda::Error> {
        let params = Params {
            scale: c.attention_scale,
            soft_cap: c.attention_soft_cap,
            window: attending.window,
        };
        let stream = given.stream;
        let staged = spans.iter().filter_map(|span| match span.at {
            At::Staged(slot) => Some(slot),
            _ => None,
        });
        let mut slots: Vec<usize> = staged.collect();
        slots.dedup();
        let lists = self.layers[attending.layer].sequences.len();
        let place = attending.part.min(lists - 1);
        if attending.generated && step.first {
            self.at = (attending.layer, place);
            (self.slots_used, self.staged_used) = (0, 0);
            self.collected.clear();
            let host: Vec<HostSpan> = spans.iter().filter_map(host_span).collect();
            if let (Some(last), Some(attender)) = (host.last(), &mut self.attender) {
                self.collected.push(Part::Group {
                    index: last.index / GROUP,
                    slot: 0,
                });
                let part = CpuPart {
                    at: attending.at.clone(),
                    spans: host.into(),
                };
                match &mut self.tape {
                    None => attender.give(part, attending.position),
                    Some(tape) => tape.before(Op::Attend(part)),
                }
                attender.hand_over(stream, given.start, q)?;
            }
        }
        // The CPU has its part by then, however late copies come.
        self.ring.await_filled(self.tape.as_mut(), &slots)?;
        let over: Vec<Over<'_>> = spans
            .iter()
            .filter_map(|span| {
                let (slab, offset) = match &span.at {
                    At::Device(slab) => (*slab, attending.at.start),
                    At::Staged(slot) => self.ring.slot(*slot),
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
        let layer = &mut self.layers[attending.layer];
        if attending.generated {
            let all_staged = over.len() == spans.iter().filter(|s| is_staged(s)).count();
            let table = if all_staged {
                let number = self.staged_used;
                self.staged_used += 1;
                // The step before one that is recorded has made all that it needs.
                if layer.staged.len() == number {
                    layer.staged.push(Table::new(stream, self.blocks)?);
                }
                &mut layer.staged[number]
            } else {
                &mut layer.sequences[place].there
            };
            self.kernels.decode_over(
                stream,
                given.start,
                &mut self.outbox,
                table,
                &over,
                self.slots_used,
                given.position,
                &params,
                q,
                attending.row,
                &mut self.partials,
            )?;
            let new = over.iter().enumerate().map(|(i, o)| Part::Block {
                index: o.index,
                slot: self.slots_used + i,
            });
            self.collected.extend(new);
            self.slots_used += over.len();
            if step.last {
                self.collect(given)?;
            }
        } else {
            let step = DeviceStep {
                first: step.first,
                last: step.last,
            };
            self.kernels.prefill_over(
                stream,
                &mut self.outbox,
                &mut layer.sequences[place].there,
                &over,
                &params,
                attending.position,
                attending.tokens,
                q,
                attending.row,
                step,
                sinks,
                &mut self.spans,
                out,
            )?;
        }
        Ok(())
    }

    /// Sends the list of a layer's parts, which is known when the last has come.
    fn collect(&mut self, given: Given<'_>) -> Result<(), cuda::Error> {
        // What was streamed came last. Parts of one block stay in their order.
        self.collected.sort_by_key(|part| match *part {
            Part::Block { index, .. } => index,
            Part::Group { index, .. } => index * GROUP,
        });
        let (layer, place) = self.at;
        let lists = &mut self.layers[layer].sequences[place];
        if lists.folded != self.collected {
            lists
                .parts
                .send(given.stream, given.start, &mut self.outbox, &self.collected)?;
            lists.folded.clone_from(&self.collected);
        }
        Ok(())
    }

    /// The list of what is folded.
    fn parts(&self) -> &Parts {
        let (layer, place) = self.at;
        &self.layers[layer].sequences[place].parts
    }

    /// Sequences of a step that have lists of their own.
    pub(super) fn sequences(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.sequences.len())
    }

    /// The layer whose attention was given last.
    pub(super) fn layer(&self) -> usize {
        self.at.0
    }

    /// Takes the CPU's part of a generated token's attention, if it has one, folds it with the others and sinks, rotates heads back if asked, and quantises what
    /// comes of it in blocks of some size. What was read of the staging ring is copied anew meanwhile.
    pub(super) fn fold(
        &mut self,
        given: Given<'_>,
        rotated: bool,
        sinks: Option<&Buffer<f32>>,
        blocks: Option<(&mut Acts, usize)>,
        attended: &mut Buffer<f32>,
    ) -> Result<(), cuda::Error> {
        if let (Some(Part::Group { .. }), Some(attender)) =
            (self.collected.first(), &mut self.attender)
        {
            attender.take_back(given.stream, given.start)?;
        }
        let totals = self.attender.as_ref().map(Attender::totals);
        self.kernels.fold_to(
            given.stream,
            given.start,
            self.parts(),
            &self.partials,
            totals,
            sinks,
            attended,
            hadamard(rotated),
            blocks.map(|(acts, block)| (acts, block, Passes::One)),
        )
    }

    /// Folds the partial results of a generated token that goes with others, and sinks.
    pub(super) fn fold_row(
        &self,
        given: Given<'_>,
        row: usize,
        sinks: Option<&Buffer<f32>>,
        attended: &mut Buffer<f32>,
    ) -> Result<(), cuda::Error> {
        self.kernels.fold_row(
            given.stream,
            given.start,
            self.parts(),
            &self.partials,
            None,
            sinks,
            attended,
            row,
        )
    }

    /// Stores the cells of a chunk in their blocks of a layer.
    pub(super) fn append(
        &mut self,
        given: Given<'_>,
        attending: &Attending<'_>,
        slabs: &[&mut Buffer<u8>],
        first: usize,
        k: &Buffer<f32>,
        v: &Buffer<f32>,
    ) -> Result<(), cuda::Error> {
        let blocks: Vec<Over<'_>> = (first..)
            .zip(slabs)
            .map(|(block, slab)| whole(attending, slab, block))
            .collect();
        self.kernels.append_to(
            given.stream,
            given.start,
            &blocks,
            attending.position,
            attending.tokens,
            attending.row,
            k,
            v,
        )
    }

    /// Turns the heads of `tokens` tokens.
    pub(super) fn turn(
        &self,
        given: Given<'_>,
        how: &DeviceTurn<'_>,
        tokens: usize,
        [q, k, v]: [&mut Buffer<f32>; 3],
    ) -> Result<(), cuda::Error> {
        self.kernels
            .turn(given.stream, given.start, tokens, q, k, v, how, None)
    }

    /// Turns the heads of one token of each of some sequences, which have lists of their own, and stores their cells in blocks of a layer.
    pub(super) fn turn_and_append(
        &mut self,
        given: Given<'_>,
        how: &DeviceTurn<'_>,
        tokens: &[(Attending<'_>, &mut Buffer<u8>, usize)],
        [q, k, v]: [&mut Buffer<f32>; 3],
    ) -> Result<(), cuda::Error> {
        let Some((first, ..)) = tokens.first() else {
            return Ok(());
        };
        let blocks: Vec<Over<'_>> = tokens
            .iter()
            .map(|(attending, slab, block)| whole(attending, slab, *block))
            .collect();
        let table = &mut self.layers[first.layer].written;
        self.kernels.turn_to(
            given.stream,
            given.start,
            &mut self.outbox,
            table,
            &blocks,
            given.position,
            q,
            k,
            v,
            how,
        )
    }

    /// Begins to fill slots of the staging ring from `first` on, each from another host slab.
    pub(super) fn stage(
        &mut self,
        from: Vec<Arc<Spilled>>,
        at: Range<usize>,
        first: usize,
    ) -> Result<(), cuda::Error> {
        self.ring.fill(self.tape.as_mut(), from, at, first)
    }

    /// Slots are filled from here on which may still be read.
    pub(super) fn begin_batch(&mut self) -> Result<(), cuda::Error> {
        self.ring.begin_batch(self.tape.as_mut())
    }

    /// Records what `step` gives to the stream, to the staging ring and to the CPU, instead of doing it.
    pub(super) fn begin_recording(&mut self, stream: &Stream) -> Result<(), cuda::Error> {
        self.tape = Some(Tape::new(stream)?);
        Ok(())
    }

    /// What was recorded, and whether it can be done again: lists that it sends are for one time.
    pub(super) fn end_recording(&mut self) -> Result<(Recorded, bool), cuda::Error> {
        let tape = self.tape.take().expect("a recording was begun");
        Ok((tape.end()?, self.outbox.is_clear()))
    }

    /// Lists that were recorded were not sent: all are sent anew.
    pub(super) fn forget_lists(&mut self) {
        for layer in &mut self.layers {
            layer.written.forget();
            layer.staged.iter_mut().for_each(Table::forget);
            for lists in &mut layer.sequences {
                lists.there.forget();
                lists.folded.clear();
            }
        }
    }

    /// Does a recorded step for the token at a position.
    pub(super) fn repeat(
        &mut self,
        stream: &Stream,
        step: &mut Recorded,
        position: usize,
    ) -> Result<(), cuda::Error> {
        for op in &mut step.0 {
            match op {
                Op::Work(graph) => graph.launch(stream)?,
                Op::Ring(deed) => self.ring.execute(deed)?,
                Op::Attend(part) => {
                    let attender = self.attender.as_mut().expect("who was given parts");
                    attender.give(part.clone(), position);
                }
            }
        }
        Ok(())
    }

    /// Says that the stream was waited for, or has failed. Returns whether the CPU gave its parts in time.
    pub(super) fn end_step(&mut self) -> bool {
        self.outbox.clear();
        self.attender.as_ref().is_none_or(Attender::end_step)
    }
}

/// A layer's part of a slab that cells are written to.
fn whole<'a>(attending: &Attending<'_>, slab: &'a Buffer<u8>, block: usize) -> Over<'a> {
    Over {
        slab,
        offset: attending.at.start,
        index: block,
        cells: (0, CELLS),
    }
}

/// How a layer's heads are turned.
pub(super) fn turning<'a>(
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
    // Norms of all heads together are a step of their own.
    let norm = |norm: &'a Option<Vector>| {
        let norm = norm.as_ref().map(|w| weights.vector(w));
        norm.filter(|w| w.len() == c.head_k)
    };
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

fn is_staged(span: &Placed<'_, Cuda<'_>>) -> bool {
    matches!(span.at, At::Staged(_))
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

/// A shape as the device's kernels know it.
pub(super) fn device_shape(shape: &KvShape) -> DeviceShape {
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
