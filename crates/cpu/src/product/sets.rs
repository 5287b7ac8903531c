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
#[derive(Clone, Copy)]
pub(super) struct Set<'a> {
    pub(super) q: &'a [[i8; 32]; FEW],
    pub(super) d: &'a [f32; FEW],
    pub(super) ds: &'a [f32; FEW],
    pub(super) sum: &'a [i32; FEW],
}

impl<'a> Sets<'a> {
    pub(super) fn new(acts: &'a ActsView<'_>) -> Self {
        assert!(acts.height().is_multiple_of(FEW), "tiles of whole sets");
        let new = Self {
            q: acts.q.as_chunks().0.as_chunks().0,
            d: acts.d.as_chunks().0,
            ds: acts.ds.as_chunks().0,
            sum: acts.sum32.as_chunks().0,
            blocks: acts.blocks(),
            of_tile_log2: (acts.height() / FEW).ilog2(),
        };
        let scales = [new.d.len(), new.ds.len(), new.sum.len()];
        assert_eq!(scales, [new.q.len(); 3], "a scale and a sum a block");
        new
    }

    /// Where a set's first block is, for [`Sets::at`].
    #[inline(always)]
    pub(super) fn begin(&self, set: usize) -> usize {
        let tile = set >> self.of_tile_log2;
        let row = set - (tile << self.of_tile_log2);
        ((tile * self.blocks) << self.of_tile_log2) + row
    }

    /// How far a set's blocks are apart.
    #[inline(always)]
    pub(super) fn stride(&self) -> usize {
        1 << self.of_tile_log2
    }

    #[inline(always)]
    pub(super) fn at(&self, at: usize) -> Set<'a> {
        assert!(at < self.q.len(), "a block of a set");
        // SAFETY: `at` is one of `q`, of which there are as many as of the others.
        unsafe {
            Set {
                q: self.q.get_unchecked(at),
                d: self.d.get_unchecked(at),
                ds: self.ds.get_unchecked(at),
                sum: self.sum.get_unchecked(at),
            }
        }
    }

    #[inline(always)]
    pub(super) fn block(&self, set: usize, b: usize) -> Set<'a> {
        self.at(self.begin(set) + b * self.stride())
    }
}

/// The activations of all tokens, in blocks of 256.
pub(super) struct Sets256<'a> {
    q: &'a [Unit],
    d: &'a [[f32; FEW]],
    sums: &'a [[[[i16; 2]; 8]; FEW]],
    blocks: usize,
    /// Sets of a tile of tokens, of which there is a power of two.
    of_tile_log2: u32,
}

/// 64 codes of a set, in runs of 32.
pub(super) type Unit = [[[i8; 32]; 2]; FEW];

/// A block of 256 of a set.
#[derive(Clone, Copy)]
pub(super) struct Set256<'a> {
    /// From the first of its four units on, which are as many apart as a tile has sets.
    q: &'a [Unit],
    of_tile_log2: u32,
    pub(super) d: &'a [f32; FEW],
    /// Sums of 16 codes, in pairs.
    pub(super) sums: &'a [[[i16; 2]; 8]; FEW],
}

impl<'a> Sets256<'a> {
    pub(super) fn new(acts: &'a ActsView<'_>) -> Self {
        assert!(acts.height().is_multiple_of(FEW), "tiles of whole sets");
        Self {
            q: acts.q.as_chunks().0.as_chunks().0.as_chunks().0,
            d: acts.d.as_chunks().0,
            sums: acts.sum16.as_chunks().0.as_chunks().0.as_chunks().0,
            blocks: acts.blocks(),
            of_tile_log2: (acts.height() / FEW).ilog2(),
        }
    }

    #[inline(always)]
    pub(super) fn block(&self, set: usize, b: usize) -> Set256<'a> {
        let tile = set >> self.of_tile_log2;
        let row = set - (tile << self.of_tile_log2);
        let at = tile * self.blocks + b;
        let scale = (at << self.of_tile_log2) + row;
        Set256 {
            q: &self.q[((4 * at) << self.of_tile_log2) + row..],
            of_tile_log2: self.of_tile_log2,
            d: &self.d[scale],
            sums: &self.sums[scale],
        }
    }
}

impl<'a> Set256<'a> {
    /// Unit `u` of four.
    #[inline(always)]
    pub(super) fn unit(&self, u: usize) -> &'a Unit {
        &self.q[u << self.of_tile_log2]
    }
}
