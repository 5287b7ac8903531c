//! Cells that no prompt was computed for: random ones, for measurements at a depth that a prompt would take minutes to reach.

use super::Cache;
use crate::backend::{Backend, CELLS};
use crate::error::Error;
use crate::synth::random;
use cpu::attention::tame;
use cpu::pool::Pool;

impl<B: Backend> Cache<B> {
    /// Makes the sequence in work one of `n` positions with random cells, which depend on the seed, the layer and the position's block alone.
    /// Blocks come to lie where those of a prompt would.
    pub(crate) fn fill(
        &mut self,
        backend: &mut B,
        pool: &Pool,
        n: usize,
        seed: u64,
    ) -> Result<(), Error> {
        self.truncate(0);
        let shape = self.shape;
        let block_bytes = shape.block_bytes();
        let mut bytes = Vec::new();
        while self.n() < n {
            let block = self.n() / CELLS;
            let tokens = CELLS.min(n - self.n());
            self.begin(backend, tokens, false)?;
            let (sequence, full, ring) = self.parts();
            for (kind, track, store) in [(0, &sequence.full, full), (1, &sequence.ring, ring)] {
                if store.slab_bytes() == 0 {
                    continue;
                }
                let id = track.get(block).expect("room was just made for it");
                let key = random::part(random::part(seed, kind), block as u64);
                bytes.resize(store.slab_bytes(), 0);
                pool.chunks_mut(&mut bytes, block_bytes, |layer, bytes| {
                    random::fill(random::part(key, layer as u64), 0, bytes);
                    tame(&shape, bytes);
                });
                backend.restore(&bytes, store.device_mut(id));
            }
            self.advance();
        }
        Ok(())
    }
}
