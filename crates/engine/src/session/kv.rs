//! The KV cache: for each layer a list of blocks of 256 cells, taken as the context grows.

use crate::error::Error;
use crate::model::Config;
use cpu::attention::{CELLS, KvShape, KvType, write_cell};
use cpu::mem::Buffer;

/// One layer's cells.
#[derive(Debug)]
pub(super) struct LayerCache {
    pub(super) shape: KvShape,
    pub(super) blocks: Vec<Buffer<u8>>,
}

/// The cache of one sequence.
#[derive(Debug)]
pub(super) struct Cache {
    pub(super) layers: Vec<LayerCache>,
    n_ctx: usize,
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
        let blocks = n_ctx.div_ceil(CELLS);
        let layers = (0..config.n_layer)
            .map(|_| LayerCache {
                shape,
                blocks: Vec::with_capacity(blocks),
            })
            .collect();
        Ok(Self { layers, n_ctx })
    }

    /// Bytes of a full context.
    pub(super) fn bytes(&self) -> u64 {
        let blocks = self.n_ctx.div_ceil(CELLS);
        self.layers
            .iter()
            .map(|l| (l.shape.block_bytes() * blocks) as u64)
            .sum()
    }

    /// Makes room for cells `.. n`.
    pub(super) fn reserve(&mut self, n: usize) -> Result<(), Error> {
        for (i, layer) in self.layers.iter_mut().enumerate() {
            while layer.blocks.len() * CELLS < n {
                let block =
                    Buffer::new(layer.shape.block_bytes()).map_err(|source| Error::Memory {
                        what: format!("KV cache of layer {i}"),
                        source,
                    })?;
                layer.blocks.push(block);
            }
        }
        Ok(())
    }
}

impl LayerCache {
    /// Writes the cells `position ..` of some tokens: `k` `[T, K, C]`, `v` `[T, K, C]`.
    pub(super) fn append(&mut self, position: usize, k: &[f32], v: &[f32]) {
        let (row_k, row_v) = (
            self.shape.heads * self.shape.c_k,
            self.shape.heads * self.shape.c_v,
        );
        for (t, (k, v)) in k.chunks_exact(row_k).zip(v.chunks_exact(row_v)).enumerate() {
            let cell = position + t;
            write_cell(
                &self.shape,
                &mut self.blocks[cell / CELLS],
                cell % CELLS,
                k,
                v,
            );
        }
    }
}
