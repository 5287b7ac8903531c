//! Activations in sets of [`FEW`] tokens, which lie side by side: what vectors pass over at once.

use crate::acts::{ActsView, FEW};

/// The activations of all tokens, in blocks of 32.
pub(super) struct Sets<'a> {
    q: &'a [[[i8; 32]; FEW]],
    d: &'a [[f32; FEW]],
    ds: &'a [[f32; FEW]],
    sum: &'a [[i32; FEW]],
    blocks: usize,
    /// Sets of a tile of tokens, of which there is a power of two.
    of_tile_log2: u32,
}

/// A block of a set.
pub(super) struct Set<'a> {
    pub(super) q: &'a [[i8; 32]; FEW],
    pub(super) d: &'a [f32; FEW],
    pub(super) ds: &'a [f32; FEW],
    pub(super) sum: &'a [i32; FEW],
}

impl<'a> Sets<'a> {
    pub(super) fn new(acts: &'a ActsView<'_>) -> Self {
        assert!(acts.height().is_multiple_of(FEW), "tiles of whole sets");
        Self {
            q: acts.q.as_chunks().0.as_chunks().0,
            d: acts.d.as_chunks().0,
            ds: acts.ds.as_chunks().0,
            sum: acts.sum32.as_chunks().0,
            blocks: acts.blocks(),
            of_tile_log2: (acts.height() / FEW).ilog2(),
        }
    }

    #[inline(always)]
    pub(super) fn block(&self, set: usize, b: usize) -> Set<'a> {
        let tile = set >> self.of_tile_log2;
        let row = set - (tile << self.of_tile_log2);
        let at = ((tile * self.blocks + b) << self.of_tile_log2) + row;
        Set {
            q: &self.q[at],
            d: &self.d[at],
            ds: &self.ds[at],
            sum: &self.sum[at],
        }
    }
}
