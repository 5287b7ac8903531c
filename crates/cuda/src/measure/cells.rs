//! Attention of one token in one layer at several depths, as a session gives it: heads turned and written to the cache, partial results,
//! their merge, quantised for the product that follows. What is stored in 4 bits is rotated, and so is what is computed with it.
//!
//! Each call attends over another layer's cells, so that they come from where a session's would: not from the device's caches.

use std::time::Duration;

use quant::act::{BLOCK32, BLOCK256, Passes};

use super::{START, Timer};
use crate::acts::Acts;
use crate::attention::{
    Attention, CELLS, KvBlock, KvShape, KvType, Params, Part, Partials, Parts, Table, Turn,
};
use crate::device::Device;
use crate::error::Error;
use crate::graph::Graph;
use crate::memory::Buffer;
use crate::ops::Rotation;
use crate::product::Target;

/// Layers of a graph at most.
const LAYERS_MAX: usize = 256;

/// Cells of some layers.
#[derive(Debug)]
pub struct Cells {
    timer: Timer,
    attention: Attention,
    heads: usize,
    slab: Buffer<u8>,
    blocks: usize,
}

/// Attention at one depth, ready to be timed.
#[derive(Debug)]
pub struct Depth<'c> {
    timer: &'c Timer,
    graph: Graph,
    layers: usize,
    // What the graph reads and writes.
    _operands: Operands,
}

#[derive(Debug)]
struct Operands {
    /// Of each layer all blocks, and the one that is written to.
    tables: Vec<[Table; 2]>,
    partials: Partials,
    parts: Parts,
    /// Q, K and V.
    inputs: [Buffer<f32>; 3],
    out: Buffer<f32>,
    acts: Acts,
    position: Buffer<u32>,
}

fn values(n: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 7919 % 2001) as f32 - 1000.0) / 1000.0;
    (0..n).map(value).collect()
}

impl Cells {
    /// Cells of about so many bytes.
    pub fn new(device: &Device, shape: KvShape, heads: usize, bytes: usize) -> Result<Self, Error> {
        let timer = Timer::new(device)?;
        let stream = &timer.stream;
        let attention = Attention::new(device, Target::Best, shape, heads)?;
        let block = shape.block_bytes();
        let blocks = (bytes / block).max(1);
        let mut slab = Buffer::<u8>::zeroed(stream, blocks * block)?;
        let mut one = Buffer::<u8>::zeroed(stream, block)?;
        let mut table = Table::new(stream, 1)?;
        let whole = KvBlock::new(&shape, &one, 0, 0, 0..CELLS, 0)?;
        // SAFETY: `one` outlives the work that uses the table, which is waited for below.
        unsafe { table.set(stream, &[whole])? };
        let k = Buffer::from_slice(stream, &values(CELLS * shape.heads * shape.c_k))?;
        let v = Buffer::from_slice(stream, &values(CELLS * shape.heads * shape.c_v))?;
        let zero = Buffer::from_slice(stream, &[0u32])?;
        attention.append(stream, START, &table, &zero, CELLS, &k, &v)?;
        for i in 0..blocks {
            slab.copy_from(stream, i * block, &one, 0..block)?;
        }
        stream.synchronise()?;
        one.fill_bytes(stream, 0)?;
        Ok(Self {
            timer,
            attention,
            heads,
            slab,
            blocks,
        })
    }

    /// Cells of a layer at most.
    pub fn depth_max(&self) -> usize {
        self.blocks * CELLS
    }

    /// One token over `cells` cells, in whole blocks.
    pub fn at(&self, cells: usize) -> Result<Depth<'_>, Error> {
        let stream = &self.timer.stream;
        let (attention, shape) = (&self.attention, self.attention.shape());
        let n = (cells / CELLS).clamp(1, self.blocks);
        let layers = (self.blocks / n).clamp(1, LAYERS_MAX);
        let block = shape.block_bytes();
        let mut tables = Vec::with_capacity(layers);
        for layer in 0..layers {
            let blocks = (0..n)
                .map(|i| KvBlock::new(shape, &self.slab, (layer * n + i) * block, i, 0..CELLS, i))
                .collect::<Result<Vec<_>, _>>()?;
            let of_layer = [&blocks[..], &blocks[n - 1..]].map(|blocks| {
                let mut table = Table::new(stream, blocks.len())?;
                // SAFETY: the slab is borrowed for as long as what is returned, which holds the table.
                unsafe { table.set(stream, blocks)? };
                Ok::<_, Error>(table)
            });
            let [all, last] = of_layer;
            tables.push([all?, last?]);
        }
        let params = Params {
            scale: 1.0 / (shape.c_k as f32).sqrt(),
            soft_cap: None,
            window: None,
        };
        let floats = |n: usize| Buffer::from_slice(stream, &values(n));
        let mut parts = Parts::new(stream, n)?;
        let part = |i| Part::Block { index: i, slot: i };
        parts.set(stream, &(0..n).map(part).collect::<Vec<_>>())?;
        let width = self.heads * shape.c_v;
        let mut o = Operands {
            tables,
            partials: Partials::new(stream, shape, self.heads, n)?,
            parts,
            inputs: [
                floats(self.heads * shape.c_k)?,
                floats(shape.heads * shape.c_k)?,
                floats(shape.heads * shape.c_v)?,
            ],
            out: Buffer::zeroed(stream, width)?,
            acts: Acts::new(stream, 1, width)?,
            position: Buffer::from_slice(stream, &[(n * CELLS - 1) as u32])?,
        };
        let rotation = |ty: KvType, c: usize| {
            if ty == KvType::Q4_0 && c.is_power_of_two() {
                Rotation::Hadamard
            } else {
                Rotation::None
            }
        };
        let turn = Turn {
            rotation_k: rotation(shape.type_k, shape.c_k),
            rotation_v: rotation(shape.type_v, shape.c_v),
            ..Turn::default()
        };
        let block = [BLOCK256, BLOCK32]
            .into_iter()
            .find(|block| width.is_multiple_of(*block));
        stream.synchronise()?;
        let graph = stream.capture(|| {
            o.tables.iter().try_for_each(|[all, last]| {
                let [q, k, v] = &mut o.inputs;
                let (at, partials) = (&o.position, &mut o.partials);
                let append = Some((last, at));
                attention.turn(stream, START, 1, q, k, v, &turn, append)?;
                attention.decode(stream, START, all, at, &params, q, partials)?;
                let blocks = block.map(|block| (&mut o.acts, block, Passes::One));
                attention.fold_to(
                    stream,
                    START,
                    &o.parts,
                    partials,
                    None,
                    None,
                    &mut o.out,
                    turn.rotation_v,
                    blocks,
                )
            })
        })?;
        Ok(Depth {
            timer: &self.timer,
            graph,
            layers,
            _operands: o,
        })
    }
}

impl Depth<'_> {
    /// Microseconds of a layer.
    pub fn us(&mut self, time: Duration) -> Result<f64, Error> {
        let seconds = self.timer.seconds_a_replay(&mut self.graph, time)?;
        Ok(1e6 * seconds / self.layers as f64)
    }
}
