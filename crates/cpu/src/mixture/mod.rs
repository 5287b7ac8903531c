//! Mixtures of experts: tokens are routed, those of one expert multiplied together, its outputs weighted and summed.
//!
//! `definition` is one token's arithmetic, and what everything here equals bit for bit, however many tokens there are. Experts are taken in
//! ascending order, as many at a time (a *wave*) as the work space has rows for: so it stays in the caches over a long prompt, and
//! sums have the order that is defined.
//!
//! ```text
//! scores -> ids, weights -> for each wave: gather codes by expert -> gate, up -> f(gate) * up -> codes -> down -> y = fma(w, o, y)
//! ```
//!
//! Where an expert's weights are, and which threads multiply with them, is a [`Source`]'s: it changes no bit.

pub mod definition;
mod router;
#[cfg(test)]
mod tests;

pub use router::{EXPERTS_MAX, Groups, Routing, Weighing, route};

use crate::acts::{Acts, ActsView, Segment, TILE, spread};
use crate::isa::Isa;
use crate::mem::{Buffer, OutOfMemory, Shared};
use crate::ops::{self, Gate};
use crate::pool::Pool;
use crate::product::{Operand, OwnTask, own_products};
use quant::act::{BLOCK32, BLOCK256, Passes};
use quant::product::{act_block, down_passes};
use quant::tile::TileMatrix;
use std::marker::PhantomData;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Rows of a wave, unless one expert may have more: what lies between its products takes some ten megabytes.
const WAVE_ROWS: usize = 1024;

/// An expert's weights.
#[derive(Debug, Clone, Copy)]
pub struct Expert<'a> {
    /// `[F, D]`.
    pub gate: TileMatrix<'a>,
    /// `[F, D]`.
    pub up: TileMatrix<'a>,
    /// `[D, F]`.
    pub down: TileMatrix<'a>,
    /// Biases of the three, `f32` in little endian.
    pub biases: Option<[&'a [u8]; 3]>,
}

/// Which threads multiply with an expert's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Those that compute all else.
    Device,
    /// Those that take the CPU's share.
    Host,
}

/// Threads by side.
#[derive(Debug, Clone, Copy)]
pub struct Pools<'a> {
    /// Those that compute all else.
    pub device: &'a Pool,
    /// Those that take the CPU's share: the same ones, or fewer.
    pub host: &'a Pool,
}

impl<'a> From<&'a Pool> for Pools<'a> {
    fn from(pool: &'a Pool) -> Self {
        Self {
            device: pool,
            host: pool,
        }
    }
}

/// Where the weights of a layer's experts are.
pub trait Source {
    /// Makes some of these experts ready to be multiplied with, the first ones in order, at least one, and returns how many. Those
    /// that were made ready before are done with.
    fn make_ready(&mut self, experts: &[u32]) -> usize;
    /// An expert that is ready.
    fn expert(&self, expert: u32) -> Expert<'_>;
    /// Whose it is.
    fn side(&self, expert: u32) -> Side;
}

/// Experts that all lie in memory for good, which a function finds.
pub struct InMemory<'w, F> {
    find: F,
    life: PhantomData<&'w ()>,
}

impl<'w, F: Fn(u32) -> Expert<'w>> InMemory<'w, F> {
    /// Those that `find` finds.
    pub fn new(find: F) -> Self {
        Self {
            find,
            life: PhantomData,
        }
    }
}

impl<F> std::fmt::Debug for InMemory<'_, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("InMemory")
    }
}

impl<'w, F: Fn(u32) -> Expert<'w>> Source for InMemory<'w, F> {
    fn make_ready(&mut self, experts: &[u32]) -> usize {
        experts.len()
    }

    fn expert(&self, expert: u32) -> Expert<'_> {
        (self.find)(expert)
    }

    fn side(&self, _: u32) -> Side {
        Side::Device
    }
}

/// Value `i` of a bias.
fn value(bias: &[u8], i: usize) -> f32 {
    let (values, _) = bias.as_chunks::<4>();
    f32::from_le_bytes(values[i])
}

/// `x += bias`: the same bits on any instruction set, being plain additions.
fn add_bias(x: &mut [f32], bias: &[u8]) {
    let (values, _) = bias.as_chunks::<4>();
    for (x, bias) in x.iter_mut().zip(values) {
        *x += f32::from_le_bytes(*bias);
    }
}

/// Sizes of a mixture.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Width D.
    pub width: usize,
    /// Feed-forward width F of an expert.
    pub ff: usize,
    /// How tokens are routed.
    pub routing: Routing,
}

impl Shape {
    /// Rows that the work space of `tokens` tokens has: each expert's are filled up to whole tiles.
    fn rows(&self, tokens: usize) -> usize {
        let all = TILE * tokens * self.routing.used;
        all.min(WAVE_ROWS).max(tokens.next_multiple_of(TILE))
    }
}

/// Computes mixtures of one shape.
#[derive(Debug)]
pub struct Mixer {
    shape: Shape,
    rows: usize,
    /// Of the chunk at hand.
    tokens: usize,
    /// Each token's experts, ascending, `[T, used]`. An entry is a *pair*, of a token and an expert.
    ids: Vec<u32>,
    weights: Vec<f32>,
    /// Pairs by expert, those of one expert by token.
    order: Vec<u32>,
    /// Where each pair is in `order`.
    place: Vec<u32>,
    /// Where each expert's pairs begin in `order`, and where the last one's end.
    starts: Vec<u32>,
    /// A wave's tokens, gathered.
    acts32: Acts,
    acts256: Acts,
    /// `[rows, F]`.
    gate: Buffer<f32>,
    up: Buffer<f32>,
    /// What `down` multiplies, in one or two passes.
    gated: Acts,
    /// `[2 rows, D]`; before the down projection, a wave's tokens for weights that read values.
    out: Buffer<f32>,
    /// A wave's experts.
    wave: Vec<u32>,
    /// What products of the host's side took.
    host: Duration,
}

/// One expert's part of a wave.
#[derive(Debug, Clone, Copy)]
struct Part<'w> {
    expert: Expert<'w>,
    side: Side,
    /// Its first row of the wave, and how many there are.
    row: usize,
    n: usize,
    /// Its first row among quantised ones.
    first: usize,
}

impl Part<'_> {
    fn input(&self) -> Segment {
        Segment {
            first: self.first,
            rows: self.n,
        }
    }

    fn gated(&self) -> Segment {
        Segment {
            first: 2 * self.first,
            rows: self.n * self.passes().count(),
        }
    }

    fn passes(&self) -> Passes {
        down_passes(self.expert.down.ty())
    }

    fn bias(&self, i: usize) -> Option<&[u8]> {
        self.expert.biases.map(|biases| biases[i])
    }

    fn reads(&self, block: Option<usize>) -> bool {
        [&self.expert.gate, &self.expert.up]
            .map(|w| act_block(w.ty()))
            .contains(&block)
    }
}

impl Mixer {
    /// Work space for up to `tokens` tokens.
    ///
    /// # Errors
    /// If there is no memory.
    ///
    /// # Panics
    /// If the routing makes no sense.
    pub fn new(shape: Shape, tokens: usize) -> Result<Self, OutOfMemory> {
        shape.routing.check().unwrap_or_else(|e| panic!("{e}"));
        let rows = shape.rows(tokens);
        let pairs = tokens * shape.routing.used;
        Ok(Self {
            rows,
            tokens: 0,
            ids: vec![0; pairs],
            weights: vec![0.0; pairs],
            order: vec![0; pairs],
            place: vec![0; pairs],
            starts: vec![0; shape.routing.experts + 1],
            acts32: Acts::new(rows, shape.width)?,
            acts256: Acts::new(rows, shape.width)?,
            gate: Buffer::new(rows * shape.ff)?,
            up: Buffer::new(rows * shape.ff)?,
            gated: Acts::new(2 * rows, shape.ff)?,
            out: Buffer::new(2 * rows * shape.width)?,
            wave: Vec::with_capacity(shape.routing.experts.min(rows / TILE)),
            host: Duration::ZERO,
            shape,
        })
    }

    /// Bytes of all of it.
    pub fn bytes(&self) -> u64 {
        let acts = [&self.acts32, &self.acts256, &self.gated].map(Acts::bytes);
        let values = [&self.gate, &self.up, &self.out].map(|b| size_of_val(&**b) as u64);
        let lists = 4 * (4 * self.ids.len() + self.starts.len()) as u64;
        acts.into_iter().chain(values).sum::<u64>() + lists
    }

    /// Chooses the experts of each token by its scores `z` `[T, E]`.
    pub fn route(&mut self, pool: &Pool, isa: Isa, z: &[f32]) {
        let Routing { experts, used, .. } = self.shape.routing;
        self.tokens = z.len() / experts;
        let pairs = self.tokens * used;
        let routing = &self.shape.routing;
        let (ids, weights) = (&mut self.ids[..pairs], &mut self.weights[..pairs]);
        pool.rows2(ids, used, weights, used, |t, ids, weights| {
            route(isa, routing, &z[t * experts..][..experts], ids, weights);
        });
        self.starts.fill(0);
        for &id in &*ids {
            self.starts[id as usize + 1] += 1;
        }
        for e in 0..experts {
            self.starts[e + 1] += self.starts[e];
        }
        // Each start moves to where the next expert's pairs begin, then all are moved back.
        for (pair, &id) in ids.iter().enumerate() {
            let place = &mut self.starts[id as usize];
            self.order[*place as usize] = pair as u32;
            self.place[pair] = *place;
            *place += 1;
        }
        self.starts.copy_within(..experts, 1);
        self.starts[0] = 0;
    }

    /// Each token's experts, ascending, and their weights, as routed last.
    pub fn chosen(&self) -> (&[u32], &[f32]) {
        let pairs = self.tokens * self.shape.routing.used;
        (&self.ids[..pairs], &self.weights[..pairs])
    }

    /// Experts that were chosen, ascending, and by how many tokens.
    pub fn used(&self) -> impl Iterator<Item = (u32, u32)> {
        let pairs = self.starts.windows(2).enumerate();
        pairs
            .map(|(e, starts)| (e as u32, starts[1] - starts[0]))
            .filter(|&(_, n)| n > 0)
    }

    /// What products of the [host's side](Side::Host) took in the last [`add`](Self::add).
    pub fn host_took(&self) -> Duration {
        self.host
    }

    /// Adds what their experts give the tokens `x` `[T, D]`, routed before, to `y` `[T, D]`. The operand has the forms that the
    /// experts' gate and up matrices read.
    pub fn add(
        &mut self,
        pools: Pools<'_>,
        isa: Isa,
        f: Gate,
        x: &Operand<'_>,
        source: &mut impl Source,
        y: &mut [f32],
    ) {
        assert_eq!(x.tokens, self.tokens, "tokens that were routed");
        self.host = Duration::ZERO;
        self.waves(pools, isa, f, x, source, |mixer, parts, pairs| {
            mixer.combine(pools.device, isa, parts, &pairs, y);
        });
    }

    /// What experts give tokens of `x`, without weights: of pairs of an expert and a token, by expert, ascending. `give` gets each pair's number and
    /// output. For whoever computes a share of somebody else's mixture; what was routed before is forgotten.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn outputs(
        &mut self,
        pools: Pools<'_>,
        isa: Isa,
        f: Gate,
        x: &Operand<'_>,
        source: &mut impl Source,
        pairs: &[(u32, u32)],
        give: &mut dyn FnMut(usize, &[f32]),
    ) {
        let Routing { experts, used, .. } = self.shape.routing;
        assert!(
            pairs.len() <= self.order.len(),
            "pairs that tokens can have"
        );
        assert!(pairs.is_sorted_by_key(|pair| pair.0), "pairs by expert");
        self.tokens = 0;
        self.starts.fill(0);
        for (order, &(e, token)) in self.order.iter_mut().zip(pairs) {
            self.starts[e as usize + 1] += 1;
            *order = token * used as u32;
        }
        for e in 0..experts {
            self.starts[e + 1] += self.starts[e];
        }
        let width = self.shape.width;
        self.waves(pools, isa, f, x, source, |mixer, parts, rows| {
            let out = Shared::new(&mut mixer.out);
            for pair in rows.clone() {
                // SAFETY: one row after the other.
                give(pair, unsafe {
                    finish(isa, &out, parts, width, pair - rows.start)
                });
            }
        });
    }

    /// Computes what experts give the tokens that are ordered by them, as many experts at a time as are ready and there are rows for. `done` gets
    /// their parts, whose outputs are there but for the last step, and their pairs.
    fn waves(
        &mut self,
        pools: Pools<'_>,
        isa: Isa,
        f: Gate,
        x: &Operand<'_>,
        source: &mut impl Source,
        mut done: impl FnMut(&mut Self, &[Part<'_>], Range<usize>),
    ) {
        let mut next = 0;
        loop {
            self.choose_wave(next);
            if self.wave.is_empty() {
                return;
            }
            let ready = source.make_ready(&self.wave);
            assert!((1..=self.wave.len()).contains(&ready), "experts are ready");
            self.wave.truncate(ready);
            next = self.wave[ready - 1] as usize + 1;
            let (parts, pairs) = self.parts(source);
            self.gather(pools.device, x, &parts, pairs.start);
            self.gate_and_up(pools, isa, &parts);
            self.gate(pools.device, isa, f, &parts);
            self.down(pools, isa, &parts);
            done(self, &parts, pairs);
        }
    }

    /// The next experts that have tokens, from `next` on, as many as there are rows for.
    fn choose_wave(&mut self, next: usize) {
        self.wave.clear();
        let mut rows = 0;
        for e in next..self.shape.routing.experts {
            let n = (self.starts[e + 1] - self.starts[e]) as usize;
            if n == 0 {
                continue;
            }
            rows += n.next_multiple_of(TILE);
            if rows > self.rows {
                break;
            }
            self.wave.push(e as u32);
        }
    }

    /// The wave's parts, and their pairs.
    fn parts<'s>(&self, source: &'s impl Source) -> (Vec<Part<'s>>, Range<usize>) {
        let of = |e: u32| self.starts[e as usize] as usize..self.starts[e as usize + 1] as usize;
        let start = of(self.wave[0]).start;
        let mut end = start;
        let mut first = 0;
        let part = |&e: &u32| {
            let n = of(e).len();
            let part = Part {
                expert: source.expert(e),
                side: source.side(e),
                row: end - start,
                n,
                first,
            };
            first += n.next_multiple_of(TILE);
            end += n;
            part
        };
        let parts = self.wave.iter().map(part).collect();
        (parts, start..end)
    }

    /// Copies the wave's tokens, expert by expert.
    fn gather(&mut self, pool: &Pool, x: &Operand<'_>, parts: &[Part<'_>], start: usize) {
        let (used, width) = (self.shape.routing.used, self.shape.width);
        let order = &self.order;
        let token = |row: usize| order[start + row] as usize / used;
        for (acts, from) in [
            (&mut self.acts32, &x.acts32),
            (&mut self.acts256, &x.acts256),
        ] {
            let Some(from) = from else { continue };
            let block = from.block();
            if !parts.iter().any(|p| p.reads(Some(block))) {
                continue;
            }
            let rows = parts.iter().map(|p| p.n.next_multiple_of(TILE)).sum();
            let writer = acts.write(rows, width, block);
            let tiles = Tiles::new(parts, Part::input);
            let values = parts.iter().map(|p| p.n).sum::<usize>() * width;
            spread(pool, tiles.n, values, |item| {
                let (part, tile) = tiles.at(item);
                // SAFETY: each tile of each part is one item.
                unsafe { writer.gather(part.input(), tile, from, |r| token(part.row + r)) };
            });
        }
        if parts.iter().any(|p| p.reads(None)) {
            let rows = parts.iter().map(|p| p.n).sum::<usize>();
            pool.rows(&mut self.out[..rows * width], width, |row, out| {
                out.copy_from_slice(&x.x[token(row) * width..][..width]);
            });
        }
    }

    fn gate_and_up(&mut self, pools: Pools<'_>, isa: Isa, parts: &[Part<'_>]) {
        let Shape { width, ff, .. } = self.shape;
        let (mut gate, mut up) = (&mut self.gate[..], &mut self.up[..]);
        let mut tasks = Tasks::new(parts, 2);
        for part in parts {
            let operand = Operand {
                x: &self.out[part.row * width..][..part.n * width],
                tokens: part.n,
                k: width,
                acts32: segment(&self.acts32, part, BLOCK32),
                acts256: segment(&self.acts256, part, BLOCK256),
            };
            for (w, outs) in [(part.expert.gate, &mut gate), (part.expert.up, &mut up)] {
                let (out, rest) = std::mem::take(outs).split_at_mut(part.n * ff);
                *outs = rest;
                tasks.of(part.side).push(OwnTask { operand, w, out });
            }
        }
        self.host += tasks.run(pools, isa);
    }

    /// Gates rows, and quantises them for the down projection.
    fn gate(&mut self, pool: &Pool, isa: Isa, f: Gate, parts: &[Part<'_>]) {
        let ff = self.shape.ff;
        let rows = parts.iter().map(|p| p.n).sum::<usize>();
        let part_of = |row: usize| &parts[parts.partition_point(|p| p.row <= row) - 1];
        let (gate, up) = (&mut self.gate[..rows * ff], &mut self.up[..rows * ff]);
        pool.rows2(gate, ff, up, ff, |row, gate, up| {
            let part = part_of(row);
            if let (Some(of_gate), Some(of_up)) = (part.bias(0), part.bias(1)) {
                add_bias(gate, of_gate);
                add_bias(up, of_up);
            }
            ops::gated(isa, f, gate, up);
        });
        let gate = &*gate;
        // Matrices of one layer are of one format but for files whose experts are tensors of their own.
        for block in [BLOCK32, BLOCK256] {
            let of_block = |part: &Part<'_>| act_block(part.expert.down.ty()) == Some(block);
            if !parts.iter().any(of_block) {
                continue;
            }
            assert!(parts.iter().all(of_block), "down projections of one kind");
            let writer = self.gated.write(2 * self.rows, ff, block);
            let tiles = Tiles::new(parts, Part::gated);
            let n = parts.iter().map(|p| p.gated().rows).sum::<usize>();
            spread(pool, tiles.n, n * ff, |item| {
                let (part, tile) = tiles.at(item);
                let x = &gate[part.row * ff..][..part.n * ff];
                // SAFETY: each tile of each part is one item.
                unsafe { writer.quantise(isa, part.gated(), tile, x, part.passes()) };
            });
        }
    }

    fn down(&mut self, pools: Pools<'_>, isa: Isa, parts: &[Part<'_>]) {
        let Shape { width, ff, .. } = self.shape;
        let mut outs = &mut self.out[..];
        let mut tasks = Tasks::new(parts, 1);
        for part in parts {
            let block = act_block(part.expert.down.ty());
            let of = |of| (block == Some(of)).then(|| self.gated.segment(part.gated()));
            let tokens = part.n * part.passes().count();
            let operand = Operand {
                x: &self.gate[part.row * ff..][..part.n * ff],
                tokens,
                k: ff,
                acts32: of(BLOCK32),
                acts256: of(BLOCK256),
            };
            // Room for two passes each.
            let (room, rest) = std::mem::take(&mut outs).split_at_mut(2 * part.n * width);
            outs = rest;
            tasks.of(part.side).push(OwnTask {
                operand,
                w: part.expert.down,
                out: &mut room[..tokens * width],
            });
        }
        self.host += tasks.run(pools, isa);
    }

    /// Adds the wave's outputs to their tokens.
    fn combine(
        &mut self,
        pool: &Pool,
        isa: Isa,
        parts: &[Part<'_>],
        pairs: &Range<usize>,
        y: &mut [f32],
    ) {
        let (used, width) = (self.shape.routing.used, self.shape.width);
        let out = Shared::new(&mut self.out);
        // SAFETY: each row of the wave is one token's.
        let finish = |row: usize| unsafe { finish(isa, &out, parts, width, row) };
        let (weights, place) = (&self.weights, &self.place);
        let y = &mut y[..self.tokens * width];
        pool.rows(y, width, |t, y| {
            for pair in t * used..(t + 1) * used {
                let place = place[pair] as usize;
                if pairs.contains(&place) {
                    ops::add_scaled(isa, y, weights[pair], finish(place - pairs.start));
                }
            }
        });
    }
}

/// First and second pass of a wave's row become its output, where the first one is.
///
/// # Safety
/// Nobody else looks at the row meanwhile.
unsafe fn finish<'o>(
    isa: Isa,
    out: &'o Shared<'o, f32>,
    parts: &[Part<'_>],
    width: usize,
    row: usize,
) -> &'o [f32] {
    let part = &parts[parts.partition_point(|p| p.row <= row) - 1];
    let at = 2 * part.row + row - part.row;
    // SAFETY: a row's two passes are its own.
    let first = unsafe { out.part(at * width, width) };
    if part.passes() == Passes::Two {
        // SAFETY: as above.
        let second = unsafe { out.part((at + part.n) * width, width) };
        ops::add(isa, first, second);
    }
    if let Some(bias) = part.bias(2) {
        add_bias(first, bias);
    }
    first
}

/// Products of a wave, by whose they are.
struct Tasks<'a> {
    device: Vec<OwnTask<'a>>,
    host: Vec<OwnTask<'a>>,
}

impl<'a> Tasks<'a> {
    fn new(parts: &[Part<'_>], each: usize) -> Self {
        let of_device = parts.iter().filter(|p| p.side == Side::Device).count();
        Self {
            device: Vec::with_capacity(each * of_device),
            host: Vec::with_capacity(each * (parts.len() - of_device)),
        }
    }

    fn of(&mut self, side: Side) -> &mut Vec<OwnTask<'a>> {
        match side {
            Side::Device => &mut self.device,
            Side::Host => &mut self.host,
        }
    }

    /// Returns what the host's side took.
    fn run(mut self, pools: Pools<'_>, isa: Isa) -> Duration {
        if !self.device.is_empty() {
            own_products(pools.device, isa, &mut self.device);
        }
        if self.host.is_empty() {
            return Duration::ZERO;
        }
        let begun = Instant::now();
        own_products(pools.host, isa, &mut self.host);
        begun.elapsed()
    }
}

/// A part's gathered rows, if it reads them in this form.
fn segment<'a>(acts: &'a Acts, part: &Part<'_>, block: usize) -> Option<ActsView<'a>> {
    part.reads(Some(block)).then(|| acts.segment(part.input()))
}

/// Tiles of the segments of all parts, numbered.
struct Tiles<'a, 'w> {
    parts: &'a [Part<'w>],
    segment: fn(&Part<'w>) -> Segment,
    n: usize,
}

impl<'a, 'w> Tiles<'a, 'w> {
    fn new(parts: &'a [Part<'w>], segment: fn(&Part<'w>) -> Segment) -> Self {
        let n = parts.iter().map(|part| segment(part).tiles()).sum();
        Self { parts, segment, n }
    }

    fn at(&self, mut item: usize) -> (&'a Part<'w>, usize) {
        for part in self.parts {
            let tiles = (self.segment)(part).tiles();
            if item < tiles {
                return (part, item);
            }
            item -= tiles;
        }
        unreachable!("items of these parts")
    }
}
