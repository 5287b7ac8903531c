//! How fast a token is generated: a captured graph of all layers of a model's shape, with random weights, none of which stays in a cache.
//!
//! `cargo run --release -p cuda --example layer -- [--shape 14b|8b|8b-q4_0|1.5b|30b-a3b] [--depth N,N,..] [--kv f16|q8_0|q4_0] [--layers N] [--parts]`
//!
//! A line a depth. The graph's launches overlap; its logits are compared with those of launches that do not. `--parts` leaves out each operation of a layer
//! in turn, and says what that saves; and what layers of that operation alone take.

use std::process::ExitCode;
use std::sync::Arc;

use cpu::mixture::{Routing, Weighing};
use cuda::acts::Shape as ActsShape;
use cuda::attention::{
    Attention, CELLS, KvBlock, KvShape, KvType, Params, Part, Partials, Parts, Table, Turn,
};
use cuda::experts::{Arena, Blob, Mixer, Scores, Shape, Shared, Tokens};
use cuda::kernel::Start;
use cuda::ops::{Angles, Delta, Gate, Normed, Ops, RopePairs, Rotation};
use cuda::product::{Before, Output, Product, StepRecord, Target};
use cuda::stream::{Event, Timing};
use cuda::{Acts, Buffer, Device, Stream, Weights};
use gguf::TensorType;
use quant::act::{BLOCK256, Passes};
use quant::formats::encode_row;
use quant::product::act_block;
use quant::tile::{Layout, ROWS, permute_tile};

type Failure = Box<dyn std::error::Error>;

/// Bytes a second that an H200 was seen to read.
const READ_RATE: f64 = 4.1e12;

/// Replays of a graph that count.
const REPLAYS: usize = 9;

const EPS: f32 = 1e-6;

/// The operations of a layer, in order: of a dense one, of a mixture.
const PARTS: [&[&str]; 2] = [
    &[
        "norm, q, k, v",
        "turn",
        "attend",
        "fold",
        "output",
        "norm, gate, up",
        "gated",
        "down",
    ],
    &[
        "norm, q, k, v",
        "turn",
        "attend",
        "fold",
        "output",
        "norm, scores",
        "experts' gate, up",
        "experts' down",
    ],
];

/// Which operations of a layer run.
#[derive(Debug, Clone, Copy)]
enum Run {
    All,
    Without(&'static str),
    Only(&'static str),
}

/// A model's dimensions: layers, width, feed-forward width (of an expert, if it has any), query heads, KV heads, head size, vocabulary.
#[derive(Debug, Clone, Copy)]
struct Model {
    layers: usize,
    d: usize,
    f: usize,
    heads: usize,
    heads_kv: usize,
    c: usize,
    vocabulary: usize,
    has_bias: bool,
    routing: Option<Routing>,
    /// Of most matrices; of v and down in some layers; of the output.
    types: [TensorType; 3],
}

impl Model {
    fn named(name: &str) -> Option<Self> {
        use TensorType as T;
        let llama = Self {
            layers: 32,
            d: 4096,
            f: 14_336,
            heads: 32,
            heads_kv: 8,
            c: 128,
            vocabulary: 128_256,
            has_bias: false,
            routing: None,
            types: [T::Q4_K, T::Q6_K, T::Q6_K],
        };
        match name {
            "14b" => Some(Self {
                layers: 48,
                d: 5120,
                f: 13_824,
                heads: 40,
                vocabulary: 152_064,
                has_bias: true,
                types: [T::Q8_0; 3],
                ..llama
            }),
            "8b" => Some(llama),
            "8b-q4_0" => Some(Self {
                types: [T::Q4_0, T::Q4_0, T::Q6_K],
                ..llama
            }),
            "1.5b" => Some(Self {
                layers: 28,
                d: 1536,
                f: 8960,
                heads: 12,
                heads_kv: 2,
                vocabulary: 151_936,
                has_bias: true,
                ..llama
            }),
            "30b-a3b" => Some(Self {
                layers: 48,
                d: 2048,
                f: 768,
                heads_kv: 4,
                vocabulary: 151_936,
                routing: Some(Routing {
                    experts: 128,
                    used: 8,
                    weighing: Weighing::SoftmaxOfChosen,
                    scale: 1.0,
                    groups: None,
                }),
                ..llama
            }),
            _ => None,
        }
    }

    /// The operations of its layers.
    fn parts(&self) -> &'static [&'static str] {
        PARTS[usize::from(self.routing.is_some())]
    }

    /// What computes its mixtures.
    fn shape(&self) -> Option<Shape> {
        let shape = |routing| Shape {
            width: self.d,
            ff: self.f,
            routing,
            gate: cpu::ops::Gate::Silu,
        };
        self.routing.map(shape)
    }

    /// The format of v and down: Q4_K_M has better ones in the first and last eighth, and in every third layer between.
    fn better(&self, layer: usize) -> TensorType {
        let eighth = self.layers / 8;
        let has = layer < eighth || layer >= 7 * eighth || (layer - eighth) % 3 == 2;
        self.types[usize::from(has)]
    }
}

/// One layer's weights and cache.
struct Layer {
    q: Weights,
    k: Weights,
    v: Weights,
    output: Weights,
    ffn: FeedForward,
    bias: [Buffer<f32>; 3],
    norms: [Buffer<f32>; 2],
    table: Table,
    /// All blocks that there is room for.
    blocks: Vec<KvBlock>,
    _slab: Buffer<u8>,
}

enum FeedForward {
    Dense {
        gate: Weights,
        up: Weights,
        down: Weights,
    },
    Mixture(Experts),
}

/// A mixture, whose experts are all the same bytes at their own places.
struct Experts {
    router: Weights,
    blob: Blob,
    arena: Arena,
}

impl Experts {
    fn new(
        stream: &Stream,
        model: &Model,
        [inputs, down]: [TensorType; 2],
        experts: usize,
        seed: u64,
    ) -> Result<Self, Failure> {
        let Model { d, f, .. } = *model;
        let blob = Blob::new([inputs, inputs, down], d, f, false)?;
        let mut bytes = Vec::new();
        for (ty, n, k, seed) in [
            (inputs, f, d, seed),
            (inputs, f, d, seed + 1),
            (down, d, f, seed + 2),
        ] {
            bytes.resize(bytes.len().next_multiple_of(cpu::mem::ALIGN), 0);
            bytes.extend(tile(ty, k, seed)?.repeat(n / ROWS));
        }
        let one = Buffer::from_slice(stream, &bytes)?;
        let mut memory = Buffer::<u8>::new(stream.device(), experts * blob.bytes())?;
        for e in 0..experts {
            memory.copy_from(stream, e * blob.bytes(), &one, 0..bytes.len())?;
        }
        let mut arena = Arena::new(stream, Arc::new(memory), experts)?;
        for e in 0..experts {
            arena.place(e, &blob, Some(e * blob.bytes()))?;
        }
        arena.publish(stream)?;
        // Every row of its own, so that no two experts have one score.
        let rows = values(experts * d, seed + 3, 1.0);
        let (mut plain, mut tiles) = (Vec::new(), vec![0; 4 * experts * d]);
        plain.extend(rows.iter().flat_map(|x| x.to_le_bytes()));
        let layout = Layout::of(TensorType::F32).ok_or("no such format")?;
        let of_tile = 4 * d * ROWS;
        for (from, to) in plain.chunks(of_tile).zip(tiles.chunks_mut(of_tile)) {
            permute_tile(layout, ROWS, from, to);
        }
        let mut router = Weights::new(stream.device(), TensorType::F32, experts, d)?;
        router.upload_tiles(stream, 0, &tiles)?;
        Ok(Self {
            router,
            blob,
            arena,
        })
    }
}

struct Bench {
    model: Model,
    mixer: Option<Mixer>,
    normed: Buffer<f32>,
    ops: Ops,
    attention: Attention,
    products: Vec<Product>,
    layers: Vec<Layer>,
    head: Weights,
    last_norm: Buffer<f32>,
    step: StepRecord,
    position: Buffer<u32>,
    angles: [Buffer<f32>; 2],
    partials: Partials,
    parts: Parts,
    /// What layers add up, now in one and now in the other.
    x: [Buffer<f32>; 2],
    q: Buffer<f32>,
    k: Buffer<f32>,
    v: Buffer<f32>,
    attended: Buffer<f32>,
    gate: Buffer<f32>,
    up: Buffer<f32>,
    delta: Buffer<f32>,
    logits: Buffer<f32>,
    /// Of a layer's inputs, of attention's results, of gated activations, of what logits are made of.
    acts: [Acts; 4],
    rotation: Rotation,
}

/// Seeded numbers around 0, bell-shaped enough.
fn values(n: usize, seed: u64, size: f32) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut unit = || {
        s ^= s >> 12;
        s ^= s << 25;
        s ^= s >> 27;
        (s.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| (unit() + unit() + unit()) * size).collect()
}

/// A tile of 16 rows.
fn tile(ty: TensorType, k: usize, seed: u64) -> Result<Vec<u8>, Failure> {
    let layout = Layout::of(ty).ok_or("no such format")?;
    let row_bytes = k / layout.block_len() * layout.block_bytes();
    let mut rows = vec![0; ROWS * row_bytes];
    for (r, row) in rows.chunks_exact_mut(row_bytes).enumerate() {
        let values = values(k, seed * 100 + r as u64, 1.0 / (k as f32).sqrt());
        encode_row(ty, &values, row)?;
    }
    let mut tile = vec![0; rows.len()];
    permute_tile(layout, ROWS, &rows, &mut tile);
    Ok(tile)
}

/// A matrix whose tiles are all the same.
fn weights(
    stream: &Stream,
    ty: TensorType,
    n: usize,
    k: usize,
    seed: u64,
) -> Result<Weights, Failure> {
    let tile = tile(ty, k, seed)?;
    let mut weights = Weights::new(stream.device(), ty, n, k)?;
    const TILES: usize = 64;
    let many = tile.repeat(TILES);
    for first in (0..n / ROWS).step_by(TILES) {
        let tiles = TILES.min(n / ROWS - first);
        weights.upload_tiles(stream, first, &many[..tiles * tile.len()])?;
    }
    Ok(weights)
}

impl Layer {
    fn blob(&self) -> Option<Blob> {
        match &self.ffn {
            FeedForward::Dense { .. } => None,
            FeedForward::Mixture(experts) => Some(experts.blob),
        }
    }

    /// Bytes of weights that a token reads.
    fn bytes(&self, used: usize) -> usize {
        let of = |w: &Weights| w.n() * w.row_bytes();
        let attention = [&self.q, &self.k, &self.v, &self.output].map(of);
        let ffn = match &self.ffn {
            FeedForward::Dense { gate, up, down } => of(gate) + of(up) + of(down),
            FeedForward::Mixture(experts) => of(&experts.router) + used * experts.blob.bytes(),
        };
        attention.iter().sum::<usize>() + ffn
    }
}

impl Bench {
    /// With room for a token at `deepest`.
    fn new(
        stream: &Stream,
        model: Model,
        deepest: usize,
        ty: KvType,
        layers: usize,
    ) -> Result<Self, Failure> {
        let Model { d, f, c, .. } = model;
        let device = stream.device();
        let shape = KvShape {
            heads: model.heads_kv,
            c_k: c,
            c_v: c,
            type_k: ty,
            type_v: ty,
        };
        let attention = Attention::new(device, Target::Best, shape, model.heads)?;
        let (row_q, row_k) = (model.heads * c, model.heads_kv * c);
        let blocks = deepest / CELLS + 1;
        let bytes = shape.block_bytes();
        let block = filled_block(stream, &attention)?;
        let up = |values: &[f32]| Buffer::from_slice(stream, values);
        let ones = |n: usize| up(&vec![1.0; n]);
        let make = |i: usize| -> Result<Layer, Failure> {
            let seed = 10 * i as u64;
            let (most, better) = (model.types[0], model.better(i));
            let mut slab = Buffer::<u8>::new(device, blocks * bytes)?;
            for b in 0..blocks {
                slab.copy_from(stream, b * bytes, &block, 0..bytes)?;
            }
            let all: Vec<KvBlock> = (0..blocks)
                .map(|b| KvBlock::new(&shape, &slab, b * bytes, b, 0..CELLS, b))
                .collect::<Result<_, _>>()?;
            Ok(Layer {
                q: weights(stream, most, row_q, d, seed)?,
                k: weights(stream, most, row_k, d, seed + 1)?,
                v: weights(stream, better, row_k, d, seed + 2)?,
                output: weights(stream, most, d, row_q, seed + 3)?,
                ffn: match model.routing {
                    None => FeedForward::Dense {
                        gate: weights(stream, most, f, d, seed + 4)?,
                        up: weights(stream, most, f, d, seed + 5)?,
                        down: weights(stream, better, d, f, seed + 6)?,
                    },
                    Some(routing) => {
                        let (types, experts) = ([most, better], routing.experts);
                        let experts = Experts::new(stream, &model, types, experts, seed + 4)?;
                        FeedForward::Mixture(experts)
                    }
                },
                bias: [
                    up(&values(row_q, seed + 7, 0.1))?,
                    up(&values(row_k, seed + 8, 0.1))?,
                    up(&values(row_k, seed + 9, 0.1))?,
                ],
                norms: [ones(d)?, ones(d)?],
                table: Table::new(stream, blocks)?,
                blocks: all,
                _slab: slab,
            })
        };
        let layers: Vec<Layer> = (0..layers).map(make).collect::<Result<_, _>>()?;
        let blobs: Vec<Blob> = layers.iter().filter_map(Layer::blob).collect();
        let mixer = model.shape().filter(|_| !blobs.is_empty());
        let mixer = mixer.map(|shape| Mixer::new(stream, Target::Best, shape, &blobs, 1));
        let mut products: Vec<Product> = Vec::new();
        for ty in model.types {
            if !products.iter().any(|p| p.ty() == ty) {
                products.push(Product::new(device, ty, Target::Best)?);
            }
        }
        let zeros = |n: usize| Buffer::<f32>::zeroed(stream, n);
        Ok(Self {
            ops: Ops::new(device, Target::Best)?,
            products,
            layers,
            mixer: mixer.transpose()?,
            normed: zeros(d)?,
            head: weights(stream, model.types[2], model.vocabulary, d, 9999)?,
            last_norm: ones(d)?,
            step: StepRecord::new(device, [c / 2, 0])?,
            position: Buffer::zeroed(stream, 1)?,
            angles: [zeros(c / 2)?, zeros(c / 2)?],
            partials: Partials::new(stream, &shape, model.heads, blocks)?,
            parts: Parts::new(stream, blocks)?,
            x: [zeros(d)?, zeros(d)?],
            q: zeros(row_q)?,
            k: zeros(row_k)?,
            v: zeros(row_k)?,
            attended: zeros(row_q)?,
            gate: zeros(f)?,
            up: zeros(f)?,
            delta: zeros(d)?,
            logits: zeros(model.vocabulary)?,
            acts: [
                Acts::new(stream, 1, d)?,
                Acts::new(stream, 1, row_q)?,
                Acts::new(stream, 1, f)?,
                Acts::new(stream, 1, d)?,
            ],
            rotation: match ty {
                KvType::Q8_0 | KvType::Q4_0 => Rotation::Hadamard,
                _ => Rotation::None,
            },
            attention,
            model,
        })
    }

    /// Makes the token the one at `depth`.
    fn go_to(&mut self, stream: &Stream, depth: usize) -> Result<(), Failure> {
        let angles = values(self.model.c / 2, 5, 1.0);
        let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
        let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
        stream.synchronise()?;
        self.step
            .write(4711, depth as u32, [[&cos, &sin], [&[], &[]]])?;
        let blocks = depth / CELLS + 1;
        let part = |b| Part::Block { index: b, slot: b };
        let all: Vec<Part> = (0..blocks).map(part).collect();
        self.parts.set(stream, &all)?;
        for layer in &mut self.layers {
            // SAFETY: the slab is kept beside the table.
            unsafe { layer.table.set(stream, &layer.blocks[..blocks])? };
        }
        Ok(())
    }

    /// Bytes of weights and cells that a layer reads, on average; of the output matrix.
    fn bytes(&self, depth: usize) -> (f64, f64) {
        let of = |w: &Weights| (w.n() * w.row_bytes()) as f64;
        let used = self.model.routing.map_or(0, |routing| routing.used);
        let layers = self.layers.iter().map(|l| l.bytes(used) as f64);
        let cells = self.attention.shape().block_bytes() as f64 / CELLS as f64 * depth as f64;
        let count = self.layers.len().max(1) as f64;
        (layers.sum::<f64>() / count + cells, of(&self.head))
    }

    /// A token, with some parts of the layers.
    fn token(
        &mut self,
        stream: &Stream,
        start: Start,
        layers: usize,
        parts: Run,
    ) -> Result<(), cuda::Error> {
        let Self {
            model,
            ops,
            attention,
            products,
            acts: [acts_d, acts_h, acts_f, acts_last],
            ..
        } = self;
        let product_of = |w: &Weights| {
            let found = products.iter().find(|p| p.ty() == w.ty());
            found.expect("the kernels of all formats are loaded")
        };
        let does = |part: &str| match parts {
            Run::All => true,
            Run::Without(other) => other != part,
            Run::Only(other) => other == part,
        };
        let Model { d, f, .. } = *model;
        let [cos, sin] = &mut self.angles;
        product_of(&self.head).begin(
            stream,
            Start::After,
            &self.head,
            &self.step,
            1.0,
            &mut self.position,
            [Some([&mut *cos, &mut *sin]), None],
            &mut self.x[0],
        )?;
        let params = Params {
            scale: 1.0 / (model.c as f32).sqrt(),
            soft_cap: None,
            window: None,
        };
        let mut at = 0;
        for (i, layer) in self.layers[..layers].iter().enumerate() {
            if does("norm, q, k, v") {
                let before = before(
                    &mut self.x,
                    &mut at,
                    (i > 0).then_some(&self.delta),
                    &layer.norms[0],
                );
                let bias = layer.bias.each_ref().map(|b| model.has_bias.then_some(b));
                let outputs = [
                    (&layer.q, bias[0], &mut self.q),
                    (&layer.k, bias[1], &mut self.k),
                    (&layer.v, bias[2], &mut self.v),
                ];
                let mut outputs = outputs.map(|(w, bias, y)| Output { w, bias, y });
                let same = if layer.v.ty() == layer.q.ty() { 3 } else { 2 };
                let (first, rest) = outputs.split_at_mut(same);
                product_of(first[0].w).normed(stream, start, before, acts_d, first)?;
                if let Some(other) = rest.first() {
                    product_of(other.w).together(stream, start, acts_d, rest)?;
                }
            }
            if does("turn") {
                let how = Turn {
                    angles: Some(Angles {
                        cos,
                        sin,
                        pairs: model.c / 2,
                        which: RopePairs::Halves,
                        position: None,
                    }),
                    rotation_k: self.rotation,
                    rotation_v: self.rotation,
                    ..Turn::default()
                };
                let to = Some((&layer.table, &self.position));
                let (q, k, v) = (&mut self.q, &mut self.k, &mut self.v);
                attention.turn(stream, start, 1, q, k, v, &how, to)?;
            }
            if does("attend") {
                let (table, at, partials) = (&layer.table, &self.position, &mut self.partials);
                attention.decode(stream, start, table, at, &params, &self.q, partials)?;
            }
            if does("fold") {
                let block = act_block(layer.output.ty()).expect("quantised");
                attention.fold_to(
                    stream,
                    start,
                    &self.parts,
                    &self.partials,
                    None,
                    None,
                    &mut self.attended,
                    self.rotation,
                    Some((&mut *acts_h, block, Passes::One)),
                )?;
            }
            if does("output") {
                let mut output = [Output {
                    w: &layer.output,
                    bias: None,
                    y: &mut self.delta,
                }];
                product_of(&layer.output).together(stream, start, acts_h, &mut output)?;
            }
            match &layer.ffn {
                FeedForward::Dense { gate, up, down } => {
                    if does("norm, gate, up") {
                        let before =
                            before(&mut self.x, &mut at, Some(&self.delta), &layer.norms[1]);
                        let outputs = [(gate, &mut self.gate), (up, &mut self.up)];
                        let mut outputs = outputs.map(|(w, y)| Output { w, bias: None, y });
                        product_of(gate).normed(stream, start, before, acts_d, &mut outputs)?;
                    }
                    if does("gated") {
                        let block = act_block(down.ty()).expect("quantised");
                        let passes = match block {
                            BLOCK256 => Passes::Two,
                            _ => Passes::One,
                        };
                        let shape = ActsShape {
                            tokens: 1,
                            k: f,
                            block,
                            passes,
                        };
                        let (gate, up) = (&mut self.gate, &self.up);
                        ops.gated_to(stream, start, Gate::Silu, gate, up, false, shape, acts_f)?;
                    }
                    if does("down") {
                        let mut output = [Output {
                            w: down,
                            bias: None,
                            y: &mut self.delta,
                        }];
                        product_of(down).together(stream, start, acts_f, &mut output)?;
                    }
                }
                FeedForward::Mixture(experts) => {
                    let mixer = self.mixer.as_mut().expect("made for its layers");
                    let blobs = experts.arena.layer(&experts.blob, 0..experts.router.n());
                    if does("norm, scores") {
                        let block = act_block(experts.blob.types()[0]);
                        let out = Normed {
                            row: Some(&mut self.normed),
                            ..normed(&mut *acts_d, block, Passes::One)
                        };
                        let delta = Some(&self.delta);
                        let before = before(&mut self.x, &mut at, delta, &layer.norms[1]);
                        mixer.score_normed(stream, start, &experts.router, before, out)?;
                    }
                    let tokens = Tokens {
                        n: 1,
                        scores: Scores::Parts(None),
                        acts: &*acts_d,
                    };
                    if does("experts' gate, up") {
                        mixer.begin(stream, start, &blobs, &tokens)?;
                    }
                    if does("experts' down") {
                        let y = &mut self.delta;
                        mixer.finish(stream, start, &blobs, &tokens, Shared::None, y)?;
                    }
                }
            }
        }
        let delta = (layers > 0).then(|| add(&self.delta));
        let w = Some(&self.last_norm);
        let out = normed(&mut *acts_last, act_block(self.head.ty()), Passes::Two);
        ops.residual_norm_to(stream, start, 1, d, EPS, &mut self.x[at], delta, w, out)?;
        let mut output = [Output {
            w: &self.head,
            bias: None,
            y: &mut self.logits,
        }];
        product_of(&self.head).together(stream, start, acts_last, &mut output)
    }

    /// Microseconds of a token: median over replays of a graph.
    fn time_us(&mut self, stream: &Stream, layers: usize, parts: Run) -> Result<f64, Failure> {
        let mut graph = stream.capture(|| self.token(stream, Start::Overlapped, layers, parts))?;
        let device = stream.device();
        let (start, end) = (
            Event::new(device, Timing::On)?,
            Event::new(device, Timing::On)?,
        );
        let mut all = Vec::new();
        for replay in 0..REPLAYS + 2 {
            stream.record(&start)?;
            graph.launch(stream)?;
            stream.record(&end)?;
            end.synchronise()?;
            if replay >= 2 {
                all.push(f64::from(end.elapsed_ms(&start)?) * 1e3);
            }
        }
        all.sort_by(f64::total_cmp);
        Ok(all[REPLAYS / 2])
    }
}

/// What a half of a layer begins with; `at` says which of `x` has the sum so far.
fn before<'a>(
    x: &'a mut [Buffer<f32>; 2],
    at: &mut usize,
    delta: Option<&'a Buffer<f32>>,
    w: &'a Buffer<f32>,
) -> Before<'a> {
    let [a, b] = x;
    let (x, sum) = if *at == 0 { (&*a, b) } else { (&*b, a) };
    *at ^= usize::from(delta.is_some());
    Before {
        x,
        delta: delta.map(|delta| (delta, sum)),
        w,
        eps: EPS,
    }
}

fn add(first: &Buffer<f32>) -> Delta<'_> {
    Delta {
        first,
        second: None,
        bias: None,
        norm: None,
    }
}

fn normed(acts: &mut Acts, block: Option<usize>, passes: Passes) -> Normed<'_> {
    let mut to = Normed::default();
    match block {
        Some(BLOCK256) => to.blocks256 = Some((acts, passes)),
        _ => to.blocks32 = Some((acts, passes)),
    }
    to
}

/// A block of seeded cells.
fn filled_block(stream: &Stream, attention: &Attention) -> Result<Buffer<u8>, Failure> {
    let shape = attention.shape();
    let block = Buffer::<u8>::zeroed(stream, shape.block_bytes())?;
    let mut table = Table::new(stream, 1)?;
    let list = [KvBlock::new(shape, &block, 0, 0, 0..CELLS, 0)?];
    // SAFETY: the block outlives the work that uses the table.
    unsafe { table.set(stream, &list)? };
    let row = shape.heads * shape.c_k;
    let k = Buffer::from_slice(stream, &values(CELLS * row, 3, 1.0))?;
    let v = Buffer::from_slice(stream, &values(CELLS * row, 4, 1.0))?;
    let zero = Buffer::from_slice(stream, &[0u32])?;
    attention.append(stream, Start::After, &table, &zero, CELLS, &k, &v)?;
    stream.synchronise()?;
    Ok(block)
}

fn run() -> Result<bool, Failure> {
    let (mut name, mut depths, mut ty) = ("14b".to_owned(), vec![0], KvType::F16);
    let (mut layers, mut is_in_parts) = (None, false);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        if arg == "--parts" {
            is_in_parts = true;
            continue;
        }
        let value = args.next().ok_or(format!("{arg} wants a value"))?;
        match arg.as_str() {
            "--shape" => name = value,
            "--depth" => depths = value.split(',').map(str::parse).collect::<Result<_, _>>()?,
            "--layers" => layers = Some(value.parse()?),
            "--kv" => {
                let found = KvType::ALL.into_iter().find(|ty| ty.name() == value);
                ty = found.ok_or(format!("no cache type {value}"))?;
            }
            _ => return Err(format!("no option {arg}").into()),
        }
    }
    let model = Model::named(&name).ok_or(format!("no shape {name}"))?;
    let layers = layers.unwrap_or(model.layers);
    let device = Device::open(0)?;
    let stream = device.stream()?;
    let deepest = depths.iter().copied().max().unwrap_or(0);
    let mut bench = Bench::new(&stream, model, deepest, ty, layers)?;
    let mut is_equal = true;
    for depth in depths {
        bench.go_to(&stream, depth)?;
        bench.token(&stream, Start::After, layers, Run::All)?;
        let wanted = bench.logits.to_vec(&stream)?;
        let all = bench.time_us(&stream, layers, Run::All)?;
        let found = bench.logits.to_vec(&stream)?;
        let differ = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits();
        let differing = found.iter().zip(&wanted).filter(|p| differ(*p)).count();
        is_equal &= differing == 0;
        let rest = bench.time_us(&stream, 0, Run::All)?;
        let (of_layer, of_head) = bench.bytes(depth);
        let a_layer = (all - rest) / layers as f64;
        let read = (of_layer * layers as f64 + of_head) / READ_RATE * 1e6;
        println!(
            "{name} depth {depth} {}: {:.3} ms a token, {:.1} % of {:.1} TB/s; {a_layer:.2} us a layer (reading its {:.1} MB: {:.2} us), the rest {rest:.1} us; \
             logits {} .., {differing} differ from those of launches that do not overlap",
            ty.name(),
            all / 1e3,
            100.0 * read / all,
            READ_RATE / 1e12,
            of_layer / 1e6,
            of_layer / READ_RATE * 1e6,
            found[0],
        );
        if is_in_parts {
            let mut line = format!("{name} depth {depth} {}: without", ty.name());
            for &part in model.parts() {
                let without = bench.time_us(&stream, layers, Run::Without(part))?;
                let alone = bench.time_us(&stream, layers, Run::Only(part))?;
                line += &format!(
                    " {part} {:.2} us less, {:.2} alone;",
                    (all - without) / layers as f64,
                    (alone - rest) / layers as f64
                );
            }
            println!("{line}");
        }
    }
    Ok(is_equal)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
