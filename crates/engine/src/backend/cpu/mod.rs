//! The CPU: everything is in main memory, operations are over when they return.

mod experts;
mod largest;

use self::experts::{Experts, Serving};
use self::largest::Largest;
use super::{
    Added, Again, At, Attending, Backend, CELLS, LOGIT_ROWS, Placed, Stepped, Turn, down_passes,
};
use crate::error::Error;
use crate::experts::Store;
use crate::model::rope::Frequencies;
use crate::model::{Linear, Mixture, Model, Shared, Vector};
use cpu::acts::{Acts, make_and_quantise};
use cpu::attention::{
    KvShape, Lone, NewCell, Params, Partials, Span, Step, append, append_each, attend, attend_each,
};
use cpu::mem::{Buffer, OutOfMemory};
use cpu::mixture::{InMemory, Mixer, Pools, Shape as MixtureShape};
use cpu::ops;
use cpu::product::{Operand, Task, products};
use gguf::TensorType;
use place::experts::{Copied, Took};
use quant::act::{BLOCK32, BLOCK256, Passes};
use quant::product::act_block;
use std::ops::Range;
use std::time::{Duration, Instant};

/// A model on the CPU, and what its operations work in.
#[derive(Debug)]
pub(crate) struct Cpu<'m> {
    model: &'m Model,
    acts32: Acts,
    acts256: Acts,
    /// Cosines and sines of the chunk's positions, for layers without and with a window.
    angles: [Angles; 2],
    partials: Partials,
    /// What mixtures are computed in, where the model has any.
    mixer: Option<Mixer>,
    /// What says where experts are, where they are not simply there.
    experts: Option<Box<Experts>>,
    /// Whether the step in work is a generated token.
    generated: bool,
    slots: Vec<Buffer<u8>>,
    /// A slower link to them, GB/s, if that is asked for.
    link_gb_s: Option<f64>,
    /// Normed outputs of the last layer `[LOGIT_ROWS, D]`.
    last: Buffer<f32>,
    /// `[2 * LOGIT_ROWS or fewer, V]`.
    logits: Buffer<f32>,
    largest: Largest,
}

impl<'m> Cpu<'m> {
    /// Work space for up to `ubatch` tokens over up to `n_ctx` cells. `in_parts`: spans may come in several calls.
    pub(crate) fn new(
        model: &'m Model,
        shape: &KvShape,
        ubatch: usize,
        n_ctx: usize,
        in_parts: bool,
    ) -> Result<Self, OutOfMemory> {
        let c = model.config();
        let widest = c.common_ff().max(c.width).max(c.heads * c.head_v);
        let mixer = c.experts.as_ref().map(|experts| {
            let shape = MixtureShape {
                width: c.width,
                ff: experts.ff,
                routing: experts.routing,
            };
            Mixer::new(shape, ubatch)
        });
        let carried = if in_parts { ubatch } else { 0 };
        Ok(Self {
            model,
            acts32: Acts::new(ubatch.max(2 * LOGIT_ROWS), widest)?,
            acts256: Acts::new(2 * ubatch.max(LOGIT_ROWS), widest)?,
            angles: [
                Angles::new(&model.rope, ubatch)?,
                Angles::new(&model.rope_windowed, ubatch)?,
            ],
            partials: Partials::new(shape, c.heads, n_ctx, carried)?,
            mixer: mixer.transpose()?,
            experts: None,
            generated: false,
            slots: Vec::new(),
            link_gb_s: None,
            last: Buffer::new(LOGIT_ROWS * c.width)?,
            logits: Buffer::new(2 * LOGIT_ROWS.min(ubatch) * c.n_vocab)?,
            largest: Largest::default(),
        })
    }
}

impl Cpu<'_> {
    /// The same with a slower link to the staging ring.
    pub(crate) fn with_link(self, link_gb_s: Option<f64>) -> Self {
        Self { link_gb_s, ..self }
    }

    /// Products of one input `x` `[T, K]`, with their biases.
    fn project<const N: usize>(
        &mut self,
        x: &Buffer<f32>,
        tokens: usize,
        outputs: [(&Linear, &mut Buffer<f32>); N],
    ) {
        let types = outputs.each_ref().map(|(linear, _)| linear.w.ty());
        let (acts32, acts256) = (&mut self.acts32, &mut self.acts256);
        let x = &x[..tokens * outputs[0].0.w.k()];
        let operand = quantise(self.model, acts32, acts256, x, tokens, &types, Passes::One);
        multiply(self.model, &operand, tokens, outputs);
    }

    /// What the last norm gives for rows of `x`.
    fn norm_last(&mut self, x: &Buffer<f32>, rows: Range<usize>) {
        let (model, c) = (self.model, self.model.config());
        for (t, row) in rows.enumerate() {
            let x = &x[row * c.width..][..c.width];
            let out = &mut self.last[t * c.width..][..c.width];
            ops::rms_norm(model.isa, x, Some(&model.output_norm), c.norm_eps, out);
        }
    }

    /// Computes the logits of some of `n` tokens, at most half of them, anew, in two passes.
    fn compute_some(&mut self, n: usize, some: &[usize]) {
        let (model, c) = (self.model, self.model.config());
        let w = model.output().view(&model.weights);
        let rows = some
            .iter()
            .flat_map(|t| &self.last[t * c.width..][..c.width]);
        let x: Vec<f32> = rows.copied().collect();
        let (acts32, acts256) = (&mut self.acts32, &mut self.acts256);
        let operand = quantise(
            model,
            acts32,
            acts256,
            &x,
            some.len(),
            &[w.ty()],
            Passes::Two,
        );
        let (logits, out) = self.logits.split_at_mut(n * c.n_vocab);
        let out = &mut out[..operand.tokens * c.n_vocab];
        products(&model.pool, model.isa, &operand, &mut [Task { w, out }]);
        let (firsts, seconds) = out.split_at_mut(some.len() * c.n_vocab);
        let passes = firsts
            .chunks_exact(c.n_vocab)
            .zip(seconds.chunks_exact(c.n_vocab));
        for (t, (first, second)) in some.iter().zip(passes) {
            let logits = &mut logits[t * c.n_vocab..][..c.n_vocab];
            model.pool.chunks_mut(logits, LOGITS_A_CHUNK, |i, logits| {
                let at = i * LOGITS_A_CHUNK..i * LOGITS_A_CHUNK + logits.len();
                logits.copy_from_slice(&first[at.clone()]);
                ops::add(model.isa, logits, &second[at]);
            });
        }
    }

    /// Multiplies what it gave with the output matrix. Returns how many rows came of it, one a token and pass.
    fn multiply_last(&mut self, n: usize, passes: Passes) -> usize {
        let (model, c) = (self.model, self.model.config());
        let w = model.output().view(&model.weights);
        let (acts32, acts256) = (&mut self.acts32, &mut self.acts256);
        let last = &self.last[..n * c.width];
        let operand = quantise(model, acts32, acts256, last, n, &[w.ty()], passes);
        let rows = operand.tokens;
        let out = &mut self.logits[..rows * c.n_vocab];
        products(&model.pool, model.isa, &operand, &mut [Task { w, out }]);
        rows
    }
}

/// Products of an operand, with their biases.
fn multiply<const N: usize>(
    model: &Model,
    operand: &Operand<'_>,
    tokens: usize,
    outputs: [(&Linear, &mut Buffer<f32>); N],
) {
    let linears = outputs.each_ref().map(|(linear, _)| *linear);
    let mut tasks = outputs.map(|(linear, out)| Task {
        out: &mut out[..tokens * linear.w.n()],
        w: linear.w.view(&model.weights),
    });
    products(&model.pool, model.isa, operand, &mut tasks);
    for (linear, task) in linears.into_iter().zip(tasks) {
        add_bias(model, linear, task.out);
    }
}

impl Cpu<'_> {
    /// What the shared expert gives, as much as each token takes of it.
    fn share(
        &mut self,
        shared: &Shared,
        tokens: usize,
        normed: &Buffer<f32>,
        gate: &mut Buffer<f32>,
        up: &mut Buffer<f32>,
        delta: &mut Buffer<f32>,
    ) {
        let (model, width) = (self.model, self.model.config().width);
        let ffn = &shared.ffn;
        let outputs = [(&ffn.gate, &mut *gate), (&ffn.up, &mut *up)];
        self.project(normed, tokens, outputs);
        self.down(&ffn.down, tokens, gate, up, delta);
        if let Some(taken) = &shared.gate {
            self.project(normed, tokens, [(taken, &mut *up)]);
            let delta = &mut delta[..tokens * width];
            model.pool.rows(delta, width, |t, delta| {
                ops::scale_by_sigmoid(model.isa, delta, up[t]);
            });
        }
    }
}

#[derive(Debug)]
struct Angles {
    cos: Buffer<f32>,
    sin: Buffer<f32>,
    pairs: usize,
}

impl Angles {
    fn new(frequencies: &Frequencies, tokens: usize) -> Result<Self, OutOfMemory> {
        let pairs = frequencies.pairs();
        Ok(Self {
            cos: Buffer::new(tokens * pairs)?,
            sin: Buffer::new(tokens * pairs)?,
            pairs,
        })
    }

    fn of(&self, t: usize) -> (&[f32], &[f32]) {
        let at = t * self.pairs..(t + 1) * self.pairs;
        (&self.cos[at.clone()], &self.sin[at])
    }

    fn bytes(&self) -> u64 {
        (size_of_val(&*self.cos) + size_of_val(&*self.sin)) as u64
    }
}

impl Backend for Cpu<'_> {
    const CPU_SHARES: bool = true;
    const ALIKE: bool = true;
    // What spans fold to goes from one call to the next.
    const STREAMED_LAST: bool = false;

    type Array = Buffer<f32>;
    type Slab = Buffer<u8>;
    type HostSlab = Buffer<u8>;

    fn model(&self) -> &Model {
        self.model
    }

    fn bytes(&self) -> u64 {
        let angles: u64 = self.angles.iter().map(Angles::bytes).sum();
        let logits = (size_of_val(&*self.last) + size_of_val(&*self.logits)) as u64;
        let mixer = self.mixer.as_ref().map_or(0, Mixer::bytes);
        let acts = self.acts32.bytes() + self.acts256.bytes();
        acts + self.partials.bytes() + mixer + angles + logits
    }

    fn staging_bytes(&self) -> u64 {
        let slots: u64 = self.slots.iter().map(|s| s.len() as u64).sum();
        slots + self.partials.carried_bytes()
    }

    fn array(&self, len: usize) -> Result<Buffer<f32>, Error> {
        Buffer::new(len).map_err(memory("work space"))
    }

    fn slab(&self, bytes: usize) -> Result<Buffer<u8>, Error> {
        Buffer::new(bytes).map_err(memory("a block of the KV cache"))
    }

    fn host_slab(&self, bytes: usize) -> Result<Buffer<u8>, Error> {
        Buffer::new(bytes).map_err(memory("a block of the KV cache's tail"))
    }

    fn spill(&mut self, from: &Buffer<u8>, to: &mut Buffer<u8>) {
        self.model.pool.copy(from, to);
    }

    fn fetch(&mut self, from: &Buffer<u8>, to: &mut Buffer<u8>) {
        self.model.pool.copy(from, to);
    }

    fn duplicate(&mut self, from: &Buffer<u8>, to: &mut Buffer<u8>) {
        self.model.pool.copy(from, to);
    }

    fn save(&self, from: &Buffer<u8>, to: &mut Vec<u8>) -> Result<(), Error> {
        to.extend_from_slice(from);
        Ok(())
    }

    fn save_host(&self, from: &Buffer<u8>, to: &mut Vec<u8>) -> Result<(), Error> {
        to.extend_from_slice(from);
        Ok(())
    }

    fn restore(&mut self, from: &[u8], to: &mut Buffer<u8>) {
        to.copy_from_slice(from);
    }

    fn make_slots(&mut self, slots: usize, bytes: usize) -> Result<(), Error> {
        self.slots = (0..slots)
            .map(|_| Buffer::new(bytes))
            .collect::<Result<_, _>>()
            .map_err(memory("the staging ring"))?;
        Ok(())
    }

    fn stage(&mut self, from: &[&Buffer<u8>], at: Range<usize>, first_slot: usize) {
        let begun = Instant::now();
        for (from, slot) in from.iter().zip(&mut self.slots[first_slot..]) {
            self.model.pool.copy(&from[at.clone()], slot);
        }
        if let Some(gb_s) = self.link_gb_s {
            let bytes = (from.len() * at.len()) as f64;
            let takes = Duration::from_secs_f64(bytes / gb_s.max(1e-3) / 1e9);
            while begun.elapsed() < takes {
                std::hint::spin_loop();
            }
        }
    }

    fn place_experts(&mut self, store: Store) -> Result<(), Error> {
        self.experts = Some(Box::new(Experts::new(self.model, store)?));
        Ok(())
    }

    fn experts(&self) -> Option<&Store> {
        self.experts.as_ref().map(|experts| &experts.store)
    }

    fn experts_mut(&mut self) -> Option<&mut Store> {
        self.experts.as_mut().map(|experts| &mut experts.store)
    }

    fn expert_bytes(&self) -> u64 {
        self.experts.as_ref().map_or(0, |experts| experts.bytes())
    }

    fn step(
        &mut self,
        positions: &[Range<usize>],
        _: &[u32],
        _: Again,
        mut step: impl FnMut(&mut Self),
    ) -> Stepped {
        self.generated = positions.len() == 1;
        step(self);
        self.generated = false;
        Stepped::Given
    }

    fn begin(&mut self, positions: &[Range<usize>], tokens: &[u32], x: &mut Buffer<f32>) {
        let (model, c) = (self.model, self.model.config());
        if let Some(experts) = &mut self.experts {
            // Of several sequences the first one counts for records.
            let position = positions[0].start;
            experts.store.begin(position, tokens.len(), self.generated);
        }
        let frequencies = [&model.rope, &model.rope_windowed];
        for (angles, frequencies) in self.angles.iter_mut().zip(frequencies) {
            let mut first = 0;
            for positions in positions {
                let at = first * angles.pairs..;
                let (cos, sin) = (&mut angles.cos[at.clone()], &mut angles.sin[at]);
                frequencies.fill(positions.start, positions.len(), cos, sin);
                first += positions.len();
            }
        }
        let view = model.embedding.view(&model.weights);
        let x = &mut x[..tokens.len() * c.width];
        model.pool.rows(x, c.width, |t, x| {
            view.decode_row(tokens[t] as usize, x);
            if c.embedding_scale != 1.0 {
                ops::scale(model.isa, x, c.embedding_scale);
            }
        });
    }

    fn enter<const N: usize>(
        &mut self,
        added: Option<Added<'_, Self>>,
        norm: &Vector,
        tokens: usize,
        x: &mut Buffer<f32>,
        normed: &mut Buffer<f32>,
        outputs: [(&Linear, &mut Buffer<f32>); N],
    ) {
        let (model, c) = (self.model, self.model.config());
        let n = tokens * c.width;
        let (x, out) = (&mut x[..n], &mut normed[..n]);
        let types = outputs.each_ref().map(|(linear, _)| linear.w.ty());
        let (acts32, acts256) = (&mut self.acts32, &mut self.acts256);
        let make = |t: usize, x: &mut [f32], out: &mut [f32]| {
            if let Some(added) = &added {
                add_row(model, added, t, x, out);
            }
            ops::rms_norm(model.isa, x, Some(norm), c.norm_eps, out);
        };
        let operand = made(
            model,
            acts32,
            acts256,
            (x, c.width),
            out,
            tokens,
            &types,
            make,
        );
        multiply(model, &operand, tokens, outputs);
    }

    fn turn(
        &mut self,
        turn: &Turn<'_>,
        tokens: usize,
        q: &mut Buffer<f32>,
        k: &mut Buffer<f32>,
        v: &mut Buffer<f32>,
    ) {
        let (model, c) = (self.model, self.model.config());
        let Turn {
            layer,
            windowed,
            rotation,
        } = *turn;
        let angles = &self.angles[usize::from(windowed)];
        let (row_q, row_k) = (c.heads * c.head_k, c.heads_kv * c.head_k);
        let (q, k) = (&mut q[..tokens * row_q], &mut k[..tokens * row_k]);
        model.pool.rows2(q, row_q, k, row_k, |t, q, k| {
            let (cos, sin) = angles.of(t);
            for (x, norm) in [(q, &layer.q_norm), (k, &layer.k_norm)] {
                if let Some(norm) = norm {
                    ops::rms_norm_heads(model.isa, x, norm, c.norm_eps);
                }
                ops::rope(model.isa, c.rope_pairs, c.head_k, cos, sin, x);
                if rotation.k {
                    ops::hadamard_heads(model.isa, c.head_k, x);
                }
            }
        });
        if rotation.v {
            rotate(model, c.head_v, tokens, c.heads_kv * c.head_v, v);
        }
    }

    fn append(
        &mut self,
        attending: &Attending<'_>,
        slabs: &mut [&mut Buffer<u8>],
        first: usize,
        k: &Buffer<f32>,
        v: &Buffer<f32>,
    ) {
        let (shape, position) = (attending.shape, attending.position);
        for (block, slab) in (first..).zip(slabs) {
            let cells =
                position.max(block * CELLS)..(position + attending.tokens).min((block + 1) * CELLS);
            let from = attending.row + cells.start - position;
            let rows = |row: usize| from * row..(from + cells.len()) * row;
            let (k, v) = (
                &k[rows(shape.heads * shape.c_k)],
                &v[rows(shape.heads * shape.c_v)],
            );
            let at = &mut slab[attending.at.clone()];
            append(&self.model.pool, shape, at, cells.start % CELLS, k, v);
        }
    }

    fn turn_and_append(
        &mut self,
        turn: &Turn<'_>,
        tokens: Vec<(Attending<'_>, &mut Buffer<u8>, usize)>,
        q: &mut Buffer<f32>,
        k: &mut Buffer<f32>,
        v: &mut Buffer<f32>,
    ) {
        self.turn(turn, tokens.len(), q, k, v);
        let Some((Attending { shape, .. }, ..)) = tokens.first() else {
            return;
        };
        let shape = *shape;
        let (row_k, row_v) = (shape.heads * shape.c_k, shape.heads * shape.c_v);
        let cells = tokens.into_iter().map(|(attending, slab, block)| NewCell {
            block: &mut slab[attending.at.clone()],
            cell: attending.position - block * CELLS,
            k: &k[attending.row * row_k..][..row_k],
            v: &v[attending.row * row_v..][..row_v],
        });
        let mut cells: Vec<NewCell<'_>> = cells.collect();
        append_each(&self.model.pool, shape, &mut cells);
    }

    fn attend(
        &mut self,
        attending: &Attending<'_>,
        q: &Buffer<f32>,
        spans: &[Placed<'_, Self>],
        step: Step,
        out: &mut Buffer<f32>,
    ) {
        let (model, c) = (self.model, self.model.config());
        let Attending {
            shape,
            position,
            row,
            tokens,
            ..
        } = *attending;
        let rows = |size: usize| row * size..(row + tokens) * size;
        let params = params(model, attending);
        let spans = bytes_of(&self.slots, attending.at, spans);
        attend(
            &model.pool,
            model.isa,
            shape,
            &params,
            position,
            &q[rows(c.heads * c.head_k)],
            &spans,
            step,
            &mut self.partials,
            &mut out[rows(c.heads * c.head_v)],
        );
    }

    fn attend_each(
        &mut self,
        sequences: &[(Attending<'_>, Vec<Placed<'_, Self>>)],
        q: &Buffer<f32>,
        out: &mut Buffer<f32>,
    ) {
        let (model, slots) = (self.model, &self.slots);
        let Some((first, _)) = sequences.first() else {
            return;
        };
        // Where heads of sequences give threads too little to share, each sequence is spread over all of them.
        let spans = sequences.iter().map(|(_, spans)| spans.len());
        if !goes_by_heads(spans, first.shape.heads, model.pool.threads()) {
            for (attending, spans) in sequences {
                self.attend(attending, q, spans, Step::ONLY, out);
            }
            return;
        }
        let spans: Vec<Vec<Span<'_>>> = sequences
            .iter()
            .map(|(attending, spans)| bytes_of(slots, attending.at, spans))
            .collect();
        let tokens: Vec<Lone<'_>> = sequences
            .iter()
            .zip(&spans)
            .map(|((attending, _), spans)| Lone {
                row: attending.row,
                position: attending.position,
                spans,
            })
            .collect();
        let params = params(model, first);
        attend_each(
            &model.pool,
            model.isa,
            first.shape,
            &params,
            q,
            &tokens,
            out,
        );
    }

    fn leave(
        &mut self,
        output: &Linear,
        rotated: bool,
        tokens: usize,
        attended: &mut Buffer<f32>,
        delta: &mut Buffer<f32>,
    ) {
        let (model, c) = (self.model, self.model.config());
        if rotated {
            rotate(model, c.head_v, tokens, c.heads * c.head_v, attended);
        }
        self.project(attended, tokens, [(output, delta)]);
    }

    fn down(
        &mut self,
        down: &Linear,
        tokens: usize,
        gate: &mut Buffer<f32>,
        up: &Buffer<f32>,
        delta: &mut Buffer<f32>,
    ) {
        let (model, c) = (self.model, self.model.config());
        let (ff, gate_function) = (down.w.k(), c.gate);
        let gate = &mut gate[..tokens * ff];
        let types = [down.w.ty()];
        let (acts32, acts256) = (&mut self.acts32, &mut self.acts256);
        let make = |t: usize, gate: &mut [f32]| {
            ops::gated(model.isa, gate_function, gate, &up[t * ff..(t + 1) * ff]);
        };
        let operand = match down_passes(down) {
            Passes::One => {
                let make = |t: usize, _: &mut [()], gate: &mut [f32]| make(t, gate);
                let nothing: &mut [()] = &mut [];
                made(
                    model,
                    acts32,
                    acts256,
                    (nothing, 0),
                    gate,
                    tokens,
                    &types,
                    make,
                )
            }
            passes => {
                model.pool.rows(gate, ff, make);
                quantise(model, acts32, acts256, gate, tokens, &types, passes)
            }
        };
        let rows = operand.tokens;
        let task = Task {
            w: down.w.view(&model.weights),
            out: &mut delta[..rows * c.width],
        };
        products(&model.pool, model.isa, &operand, &mut [task]);
        let (first, second) = delta.split_at_mut(tokens * c.width);
        if rows > tokens {
            ops::add(model.isa, first, &second[..tokens * c.width]);
        }
        add_bias(model, down, first);
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
        let (model, c) = (self.model, self.model.config());
        match &mixture.shared {
            Some(shared) => self.share(shared, tokens, normed, gate, up, delta),
            None => delta[..tokens * c.width].fill(0.0),
        }
        let Self {
            acts32,
            acts256,
            mixer,
            experts,
            ..
        } = self;
        let mixer = mixer.as_mut().expect("a model with mixtures has one");
        let x = &normed[..tokens * c.width];
        let types = mixture.experts[0].inputs().map(|w| w.ty());
        let operand = quantise(model, acts32, acts256, x, tokens, &types, Passes::One);
        let scores = &scores[..tokens * mixture.experts.len()];
        let begun = Instant::now();
        mixer.route(&model.pool, model.isa, scores);
        let pools = Pools {
            device: &model.pool,
            host: model.host_pool(),
        };
        if let Some(Experts { store, arena }) = experts.as_deref_mut() {
            let served = store.serve(mixture.index, mixer.used());
            if let (Some(served), Some(arena)) = (served, arena) {
                let mut serving = Serving {
                    model,
                    mixture,
                    arena,
                    served,
                    streaming: Duration::ZERO,
                    is_unusual: false,
                };
                mixer.add(pools, model.isa, c.gate, &operand, &mut serving, delta);
                let (streaming, is_unusual) = (serving.streaming, serving.is_unusual);
                if store.emulated().worker_panics && !mixer.host_took().is_zero() {
                    let at = |i| assert!(i < 1, "a worker panics because that is emulated");
                    model.host_pool().run(2, at);
                }
                let ms = |time: Duration| time.as_secs_f64() * 1e3;
                let took = Took {
                    ms: ms(begun.elapsed()),
                    stream_ms: ms(streaming),
                    host_ms: ms(mixer.host_took()),
                    // The host makes them.
                    copied: Copied::ByHost,
                    is_unusual,
                };
                store.took(&took);
                if let Some(experts) = experts {
                    experts.copy_behind(model);
                }
                return;
            }
        }
        let expert = |e: u32| mixture.experts[e as usize].view(&model.weights);
        let mut all = InMemory::new(expert);
        mixer.add(pools, model.isa, c.gate, &operand, &mut all, delta);
    }

    fn keep_last(&mut self, tokens: usize, x: &mut Buffer<f32>, q: &mut Buffer<f32>) {
        let c = self.model.config();
        for (array, row) in [(x, c.width), (q, c.heads * c.head_k)] {
            array.copy_within((tokens - 1) * row..tokens * row, 0);
        }
    }

    fn add(
        &mut self,
        added: Added<'_, Self>,
        tokens: usize,
        x: &mut Buffer<f32>,
        normed: &mut Buffer<f32>,
    ) {
        let (model, width) = (self.model, self.model.config().width);
        let n = tokens * width;
        let (x, normed) = (&mut x[..n], &mut normed[..n]);
        model.pool.rows2(x, width, normed, width, |t, x, normed| {
            add_row(model, &added, t, x, normed);
        });
    }

    fn outputs(
        &mut self,
        x: &Buffer<f32>,
        rows: Range<usize>,
        values: &mut Vec<f32>,
    ) -> Result<(), Error> {
        let (model, c) = (self.model, self.model.config());
        let before = values.len();
        values.resize(before + rows.len() * c.width, 0.0);
        let outputs = values[before..].chunks_exact_mut(c.width);
        for (row, out) in rows.zip(outputs) {
            let x = &x[row * c.width..][..c.width];
            ops::rms_norm(model.isa, x, Some(&model.output_norm), c.norm_eps, out);
        }
        Ok(())
    }

    fn compute_logits(&mut self, x: &Buffer<f32>, rows: Range<usize>) {
        let n = rows.len();
        self.norm_last(x, rows);
        // What rounding the last activations to 8 bits loses goes straight into the logits, so they are carried in two passes.
        let rows = self.multiply_last(n, Passes::Two);
        let (model, c) = (self.model, self.model.config());
        let (logits, lost) = self.logits.split_at_mut(n * c.n_vocab);
        if rows > n {
            model.pool.chunks_mut(logits, LOGITS_A_CHUNK, |i, logits| {
                let lost = &lost[i * LOGITS_A_CHUNK..][..logits.len()];
                ops::add(model.isa, logits, lost);
            });
        }
        if let Some(cap) = c.logit_soft_cap {
            ops::soft_cap(model.isa, logits, cap);
        }
    }

    fn compute_largest(&mut self, x: &Buffer<f32>, rows: Range<usize>, of: usize) {
        let (model, n) = (self.model, rows.len());
        if !self.largest.serves(model) {
            return self.compute_logits(x, rows);
        }
        self.norm_last(x, rows.clone());
        self.multiply_last(n, Passes::One);
        let (last, logits) = (&self.last, &mut self.logits);
        let left = self.largest.settle(model, last, n, of, logits);
        if 2 * left.len() > n {
            self.largest.pause();
            self.compute_logits(x, rows);
        } else if !left.is_empty() {
            self.compute_some(n, &left);
        }
    }

    fn logits(&self, n: usize) -> &[f32] {
        &self.logits[..n * self.model.config().n_vocab]
    }

    fn finish(&mut self) -> Result<(), Error> {
        Ok(())
    }
}

/// Logits that a thread adds at a time what their second pass gave.
const LOGITS_A_CHUNK: usize = 16 << 10;

/// Whether sequences of so many spans are attended sooner in one fork, each KV head of each by one thread, than one after the other, each over all
/// threads: in spans of a head, of which a fork costs about one.
fn goes_by_heads(spans: impl Iterator<Item = usize>, heads: usize, threads: usize) -> bool {
    let (mut all, mut longest, mut in_turns) = (0, 0, 0);
    for spans in spans {
        all += spans * heads;
        longest = longest.max(spans);
        in_turns += (spans * heads).div_ceil(threads) + 1;
    }
    // The longest is one thread's work; and threads do not end together.
    longest.max(all.div_ceil(threads) + longest / 4) <= in_turns
}

/// What a layer's attention is, beside its cells.
fn params<'m>(model: &'m Model, attending: &Attending<'_>) -> Params<'m> {
    let c = model.config();
    Params {
        heads: c.heads,
        scale: c.attention_scale,
        soft_cap: c.attention_soft_cap,
        window: attending.window,
        sinks: model.layers[attending.layer].sinks.as_deref(),
    }
}

/// Where spans of a layer are.
fn bytes_of<'a>(
    slots: &'a [Buffer<u8>],
    at: &Range<usize>,
    spans: &[Placed<'a, Cpu<'_>>],
) -> Vec<Span<'a>> {
    let bytes = |span: &Placed<'a, Cpu<'_>>| match span.at {
        At::Device(slab) | At::Host(slab) => &slab[at.clone()],
        At::Staged(slot) => &slots[slot][..at.len()],
    };
    let spans = spans.iter().map(|span| Span {
        index: span.index,
        cells: span.cells,
        bytes: bytes(span),
    });
    spans.collect()
}

/// Adds row `t` of what a half of a layer gave to a row of the residual stream. `normed` is work space.
fn add_row(model: &Model, added: &Added<'_, Cpu<'_>>, t: usize, x: &mut [f32], normed: &mut [f32]) {
    let c = model.config();
    let delta = &added.delta[t * c.width..][..c.width];
    match added.norm {
        Some(norm) => {
            ops::rms_norm(model.isa, delta, Some(norm), c.norm_eps, normed);
            ops::add(model.isa, x, normed);
        }
        None => ops::add(model.isa, x, delta),
    }
}

/// Multiplies each head of `head` values of `x` `[T, row]` with a Hadamard matrix.
fn rotate(model: &Model, head: usize, tokens: usize, row: usize, x: &mut [f32]) {
    model.pool.rows(&mut x[..tokens * row], row, |_, x| {
        ops::hadamard_heads(model.isa, head, x);
    });
}

/// Says what memory was wanted for.
fn memory(what: &'static str) -> impl Fn(OutOfMemory) -> Error {
    move |source| Error::Memory {
        what: what.to_owned(),
        source,
    }
}

/// Adds a bias to each row of `out` `[T, N]`, if there is one.
fn add_bias(model: &Model, linear: &Linear, out: &mut [f32]) {
    if let Some(bias) = &linear.bias {
        for row in out.chunks_exact_mut(bias.len()) {
            ops::add(model.isa, row, bias);
        }
    }
}

/// Makes `x` `[T, K]` row by row, each beside a row of `a`, and quantises it into the blocks that weights of some types read.
#[allow(clippy::too_many_arguments, reason = "one operation's operands")]
fn made<'a, A: Send>(
    model: &Model,
    acts32: &'a mut Acts,
    acts256: &'a mut Acts,
    (a, len_a): (&mut [A], usize),
    x: &'a mut [f32],
    tokens: usize,
    types: &[TensorType],
    make: impl Fn(usize, &mut [A], &mut [f32]) + Sync,
) -> Operand<'a> {
    let reads = |block: usize| types.iter().any(|&ty| act_block(ty) == Some(block));
    let (is32, is256) = (reads(BLOCK32), reads(BLOCK256));
    let into = [is32.then_some(&mut *acts32), is256.then_some(&mut *acts256)];
    make_and_quantise(&model.pool, model.isa, a, len_a, x, tokens, into, make);
    let (acts32, acts256): (&'a Acts, &'a Acts) = (acts32, acts256);
    Operand {
        k: x.len() / tokens,
        x,
        tokens,
        acts32: is32.then(|| acts32.view()),
        acts256: is256.then(|| acts256.view()),
    }
}

/// Quantises `x` `[T, K]` into the blocks that weights of some types read. With two passes the operand has `2 T` rows,
/// unless all weights are float.
fn quantise<'a>(
    model: &Model,
    acts32: &'a mut Acts,
    acts256: &'a mut Acts,
    x: &'a [f32],
    tokens: usize,
    types: &[TensorType],
    passes: Passes,
) -> Operand<'a> {
    let k = x.len() / tokens;
    let fill = |acts: &'a mut Acts, block: usize| {
        types
            .iter()
            .any(|&ty| act_block(ty) == Some(block))
            .then(|| {
                acts.quantise(&model.pool, model.isa, x, tokens, block, passes);
                acts.view()
            })
    };
    let (acts32, acts256) = (fill(acts32, BLOCK32), fill(acts256, BLOCK256));
    let rows = acts32.or(acts256).map_or(tokens, |acts| acts.tokens());
    Operand {
        x,
        tokens: rows,
        k,
        acts32,
        acts256,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_sequences_go_by_heads_and_few_long_ones_in_turns() {
        let equal = |n: usize, spans: usize| std::iter::repeat_n(spans, n);
        // Short ones cannot be spread; many long ones need not be.
        assert!(goes_by_heads(equal(8, 1), 3, 16));
        assert!(goes_by_heads(equal(2, 1), 2, 16));
        assert!(goes_by_heads(equal(8, 32), 3, 2));
        // Two long ones would leave threads without work; nor does a long one wait for one thread while others are done.
        assert!(!goes_by_heads(equal(2, 16), 2, 16));
        assert!(!goes_by_heads(equal(7, 1).chain([32]), 3, 16));
    }
}
