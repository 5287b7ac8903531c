//! How fast attention is.
//!
//! `cargo run --release -p cuda --example attention -- [--portable]`

use cuda::attention::{
    Attention, CELLS, KvBlock, KvShape, KvType, Params, Part, Partials, Parts, Spans, Step, Table,
};
use cuda::product::Target;
use cuda::stream::{Event, Timing};
use cuda::{Buffer, Device, Stream};

use cuda::kernel::Start;

type Failure = Box<dyn std::error::Error>;

/// As sessions launch.
const START: Start = Start::Overlapped;

/// Layers' caches of a decode measurement have this many bytes together, so that no cache of the device holds them.
const BYTES_MIN: usize = 800 << 20;

fn main() -> Result<(), Failure> {
    let target = if std::env::args().any(|a| a == "--portable") {
        Target::Portable
    } else {
        Target::Best
    };
    let stream = Device::open(0)?.stream()?;
    println!("| decode | KV | depth | us a layer | of it fold | GB/s |\n|---|---|---|---|---|---|");
    for (heads, heads_kv, c) in [
        (40, 8, 128),
        (32, 8, 128),
        (14, 2, 64),
        (8, 4, 256),
        (64, 8, 128),
    ] {
        for ty in [KvType::F16, KvType::Q8_0, KvType::Q4_0] {
            for depth in [256, 1024, 4096, 16_384, 65_536] {
                decode(&stream, target, heads, shape(heads_kv, c, c, ty, ty), depth)?;
            }
        }
    }
    println!("\n| prefill | KV | T | depth | ms a layer | TFLOP/s |\n|---|---|---|---|---|---|");
    for (heads, heads_kv, c) in [(40, 8, 128), (14, 2, 64), (8, 4, 256)] {
        for ty in [KvType::F16, KvType::Q8_0, KvType::Q4_0] {
            for (tokens, depth) in [
                (512, 0),
                (2048, 0),
                (512, 8192),
                (2048, 8192),
                (512, 65_536),
                (2048, 65_536),
            ] {
                prefill(
                    &stream,
                    target,
                    heads,
                    shape(heads_kv, c, c, ty, ty),
                    tokens,
                    depth,
                )?;
            }
        }
    }
    Ok(())
}

/// Median milliseconds of `give`, of 9, after 2 that do not count.
fn median_ms(
    stream: &Stream,
    mut give: impl FnMut() -> Result<(), Failure>,
) -> Result<f32, Failure> {
    let device = stream.device();
    let mut all = Vec::new();
    for i in 0..11 {
        let (start, end) = (
            Event::new(device, Timing::On)?,
            Event::new(device, Timing::On)?,
        );
        stream.record(&start)?;
        give()?;
        stream.record(&end)?;
        end.synchronise()?;
        if i >= 2 {
            all.push(end.elapsed_ms(&start)?);
        }
    }
    all.sort_by(f32::total_cmp);
    Ok(all[all.len() / 2])
}

/// A slab of cells of seeded values: blocks `0 ..` of `layers` layers, one after the other.
fn filled(
    stream: &Stream,
    attention: &Attention,
    layers: usize,
    blocks: usize,
) -> Result<Buffer<u8>, Failure> {
    let shape = attention.shape();
    let bytes = shape.block_bytes();
    let mut slab = Buffer::<u8>::new(stream.device(), layers * blocks * bytes)?;
    let mut one = Buffer::<u8>::new(stream.device(), bytes)?;
    let mut table = Table::new(stream, 1)?;
    // SAFETY: `one` outlives the work that uses the table.
    unsafe { table.set(stream, &[KvBlock::new(shape, &one, 0, 0, 0..CELLS, 0)?])? };
    let k = Buffer::from_slice(stream, &values(CELLS * shape.heads * shape.c_k, 3))?;
    let v = Buffer::from_slice(stream, &values(CELLS * shape.heads * shape.c_v, 4))?;
    let zero = Buffer::from_slice(stream, &[0u32])?;
    attention.append(stream, START, &table, &zero, CELLS, &k, &v)?;
    for i in 0..layers * blocks {
        slab.copy_from(stream, i * bytes, &one, 0..bytes)?;
    }
    stream.synchronise()?;
    one.fill_bytes(stream, 0)?;
    Ok(slab)
}

fn blocks_of(
    shape: &KvShape,
    slab: &Buffer<u8>,
    layer: usize,
    count: usize,
) -> Result<Vec<KvBlock>, cuda::Error> {
    let bytes = shape.block_bytes();
    let block = |i| KvBlock::new(shape, slab, (layer * count + i) * bytes, i, 0..CELLS, i);
    (0..count).map(block).collect()
}

fn decode(
    stream: &Stream,
    target: Target,
    heads: usize,
    shape: KvShape,
    depth: usize,
) -> Result<(), Failure> {
    let device = stream.device();
    let attention = Attention::new(device, target, shape, heads)?;
    let blocks = depth / CELLS;
    let layer_bytes = blocks * shape.block_bytes();
    let layers = BYTES_MIN.div_ceil(layer_bytes).min(256);
    let slab = filled(stream, &attention, layers, blocks)?;
    let mut tables = Vec::new();
    for layer in 0..layers {
        let mut table = Table::new(stream, blocks)?;
        // SAFETY: the slab lives to the end of this function, which waits for the stream.
        unsafe { table.set(stream, &blocks_of(&shape, &slab, layer, blocks)?)? };
        tables.push(table);
    }
    let params = Params {
        scale: 1.0 / (shape.c_k as f32).sqrt(),
        soft_cap: None,
        window: None,
    };
    let q = Buffer::from_slice(stream, &values(heads * shape.c_k, 5))?;
    let position = Buffer::from_slice(stream, &[depth as u32 - 1])?;
    let mut partials = Partials::new(stream, &shape, heads, blocks)?;
    let mut parts = Parts::new(stream, blocks)?;
    parts.set(
        stream,
        &(0..blocks)
            .map(|i| Part::Block { index: i, slot: i })
            .collect::<Vec<_>>(),
    )?;
    let mut out = Buffer::<f32>::new(device, heads * shape.c_v)?;
    let mut times = Vec::new();
    for with_fold in [true, false] {
        let mut graph = stream.capture(|| {
            for table in &tables {
                attention.decode(stream, START, table, &position, &params, &q, &mut partials)?;
                if with_fold {
                    attention.fold(stream, START, &parts, &partials, None, None, &mut out)?;
                }
            }
            Ok(())
        })?;
        let ms = median_ms(stream, || graph.launch(stream).map_err(Into::into))?;
        times.push(ms * 1e3 / layers as f32);
    }
    let us = times[0];
    println!(
        "| {heads}/{}x{} | {} | {depth} | {us:.1} | {:.1} | {:.0} |",
        shape.heads,
        shape.c_k,
        shape.type_k.name(),
        us - times[1],
        layer_bytes as f32 / us / 1e3
    );
    Ok(())
}

fn prefill(
    stream: &Stream,
    target: Target,
    heads: usize,
    shape: KvShape,
    tokens: usize,
    depth: usize,
) -> Result<(), Failure> {
    let device = stream.device();
    let attention = Attention::new(device, target, shape, heads)?;
    let blocks = (depth + tokens) / CELLS;
    let slab = filled(stream, &attention, 1, blocks)?;
    let mut table = Table::new(stream, blocks)?;
    // SAFETY: the slab lives to the end of this function, which waits for the stream.
    unsafe { table.set(stream, &blocks_of(&shape, &slab, 0, blocks)?)? };
    let params = Params {
        scale: 1.0 / (shape.c_k as f32).sqrt(),
        soft_cap: None,
        window: None,
    };
    let q = Buffer::from_slice(stream, &values(tokens * heads * shape.c_k, 5))?;
    let mut out = Buffer::<f32>::new(device, tokens * heads * shape.c_v)?;
    let at_once = if tokens > 1024 { 3 } else { 8 };
    let mut spans = Spans::new(stream, Spans::values(&shape, heads, tokens, at_once))?;
    let repeats = 1 + 3_000_000 / (tokens * (depth + tokens));
    let ms = median_ms(stream, || {
        for _ in 0..repeats {
            let step = Step::ONLY;
            attention.prefill(
                stream, START, &table, &params, depth, tokens, &q, step, None, &mut spans, &mut out,
            )?;
        }
        Ok(())
    })? / repeats as f32;
    let seen = (tokens * depth + tokens * (tokens + 1) / 2) as f32;
    let flops = 4.0 * seen * (heads * shape.c_k) as f32;
    println!(
        "| {heads}/{}x{} | {} | {tokens} | {depth} | {ms:.3} | {:.0} |",
        shape.heads,
        shape.c_k,
        shape.type_k.name(),
        flops / ms / 1e9
    );
    Ok(())
}

fn shape(heads: usize, c_k: usize, c_v: usize, type_k: KvType, type_v: KvType) -> KvShape {
    KvShape {
        heads,
        c_k,
        c_v,
        type_k,
        type_v,
    }
}

/// Seeded numbers between -2 and 2.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            s = s
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (s >> 40) as f32 / (1 << 24) as f32 * 4.0 - 2.0
        })
        .collect()
}
