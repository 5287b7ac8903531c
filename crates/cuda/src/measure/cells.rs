//! Attention of one token in one layer, partial results and their merge, at several depths.
//!
//! Each call attends over another layer's cells, so that they come from where a session's would: not from the device's caches.

use std::time::Duration;

use super::{START, Timer};
use crate::attention::{Attention, CELLS, KvBlock, KvShape, Params, Part, Partials, Parts, Table};
use crate::device::Device;
use crate::error::Error;
use crate::graph::Graph;
use crate::memory::Buffer;
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
    _operands: (
        Vec<Table>,
        Partials,
        Parts,
        Buffer<f32>,
        Buffer<f32>,
        Buffer<u32>,
    ),
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
            let mut table = Table::new(stream, n)?;
            // SAFETY: the slab is borrowed for as long as what is returned, which holds the table.
            unsafe { table.set(stream, &blocks)? };
            tables.push(table);
        }
        let params = Params {
            scale: 1.0 / (shape.c_k as f32).sqrt(),
            soft_cap: None,
            window: None,
        };
        let q = Buffer::from_slice(stream, &values(self.heads * shape.c_k))?;
        let position = Buffer::from_slice(stream, &[(n * CELLS - 1) as u32])?;
        let mut partials = Partials::new(stream, shape, self.heads, n)?;
        let mut parts = Parts::new(stream, n)?;
        let part = |i| Part::Block { index: i, slot: i };
        parts.set(stream, &(0..n).map(part).collect::<Vec<_>>())?;
        let mut out = Buffer::<f32>::zeroed(stream, self.heads * shape.c_v)?;
        stream.synchronise()?;
        let graph = stream.capture(|| {
            tables.iter().try_for_each(|table| {
                attention.decode(stream, START, table, &position, &params, &q, &mut partials)?;
                attention.fold(stream, START, &parts, &partials, None, None, &mut out)
            })
        })?;
        Ok(Depth {
            timer: &self.timer,
            graph,
            layers,
            _operands: (tables, partials, parts, q, out, position),
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
