//! The KV cache: for each layer a list of blocks of 256 cells, taken as the context grows.
//!
//! The blocks of all layers for the same 256 cells are one *slab* of memory, so that small blocks share huge pages.

use crate::error::Error;
use crate::model::Config;
use cpu::attention::{Blocks, CELLS, KvShape, KvType, write_cell};
use cpu::mem::Buffer;

/// The cache of one sequence.
#[derive(Debug)]
pub(super) struct Cache {
    shape: KvShape,
    n_layer: usize,
    n_ctx: usize,
    /// Slab `i` holds the cells `256 i ..` of all layers.
    slabs: Vec<Buffer<u8>>,
}

impl Cache {
    pub(super) fn new(
        config: &Config,
        n_ctx: usize,
        type_k: KvType,
        type_v: KvType,
    ) -> Result<Self, Error> {
        let shape = KvShape::new(
            config.heads_kv,
            config.head_k,
            config.head_v,
            type_k,
            type_v,
        )?;
        Ok(Self {
            shape,
            n_layer: config.n_layer,
            n_ctx,
            slabs: Vec::with_capacity(n_ctx.div_ceil(CELLS)),
        })
    }

    pub(super) fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Bytes of a full context.
    pub(super) fn bytes(&self) -> u64 {
        (self.n_ctx.div_ceil(CELLS) * self.slab_bytes()) as u64
    }

    fn slab_bytes(&self) -> usize {
        self.n_layer * self.shape.block_bytes()
    }

    /// Makes room for cells `.. n`.
    pub(super) fn reserve(&mut self, n: usize) -> Result<(), Error> {
        while self.slabs.len() * CELLS < n {
            let slab = Buffer::new(self.slab_bytes()).map_err(|source| Error::Memory {
                what: format!(
                    "KV cache of cells {} to {}",
                    self.slabs.len() * CELLS,
                    (self.slabs.len() + 1) * CELLS
                ),
                source,
            })?;
            self.slabs.push(slab);
        }
        Ok(())
    }

    /// One layer's blocks.
    pub(super) fn blocks(&self, layer: usize) -> Blocks<'_> {
        Blocks::new(
            &self.slabs,
            layer * self.shape.block_bytes(),
            self.shape.block_bytes(),
        )
    }

    /// Writes a layer's cells `position ..` of some tokens: `k` `[T, K, C]`, `v` `[T, K, C]`.
    pub(super) fn append(&mut self, layer: usize, position: usize, k: &[f32], v: &[f32]) {
        let shape = self.shape;
        let (row_k, row_v) = (shape.heads * shape.c_k, shape.heads * shape.c_v);
        for (t, (k, v)) in k.chunks_exact(row_k).zip(v.chunks_exact(row_v)).enumerate() {
            let cell = position + t;
            let slab = &mut self.slabs[cell / CELLS];
            let block = &mut slab[layer * shape.block_bytes()..][..shape.block_bytes()];
            write_cell(&shape, block, cell % CELLS, k, v);
        }
    }
}
