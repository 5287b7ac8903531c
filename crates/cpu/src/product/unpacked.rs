//! A tile's weights, unpacked into the first-level cache: what the quantised kernels multiply.

use crate::mem::fetch_ahead;
use quant::lanes::{Minima, RowF32, Run, Scales, Unpack32, Unpack256};
use quant::product::{CHUNK, has_min};
use quant::tile::{MAX_BLOCK_BYTES, ROWS, TileMatrix};

/// Blocks of 32 a chunk.
pub(super) const CHUNK32: usize = CHUNK / 32;

/// Super-blocks a chunk.
pub(super) const CHUNK256: usize = CHUNK / 256;

/// Blocks of one tile of a matrix, each of 16 rows (a last tile of fewer rows is filled up with zeros).
pub(super) struct TileBlocks<'a> {
    w: &'a TileMatrix<'a>,
    tile: &'a [u8],
    rows: usize,
    padded: Option<[u8; MAX_BLOCK_BYTES * ROWS]>,
}

impl<'a> TileBlocks<'a> {
    pub(super) fn new(w: &'a TileMatrix<'a>, tile: usize) -> Self {
        Self {
            w,
            tile: w.tile(tile),
            rows: w.tile_rows(tile),
            padded: None,
        }
    }

    /// Fetches a `1 / PARTS` of what lies some way behind block `b`. Large blocks are fetched part by part between the
    /// products, since a long burst of fetches would wait for itself.
    #[inline(always)]
    pub(super) fn ahead<const PARTS: usize>(&self, b: usize, part: usize) {
        let bytes = self.rows * self.w.layout().block_bytes();
        let start = b * bytes;
        for at in (start + bytes * part / PARTS..start + bytes * (part + 1) / PARTS).step_by(64) {
            fetch_ahead(&self.tile[at..]);
        }
    }

    #[inline(always)]
    pub(super) fn block(&mut self, b: usize) -> &[u8] {
        let bytes = self.w.layout().block_bytes();
        let block = &self.tile[b * self.rows * bytes..][..self.rows * bytes];
        if self.rows == ROWS {
            return block;
        }
        let padded = self.padded.get_or_insert([0; MAX_BLOCK_BYTES * ROWS]);
        let padded = &mut padded[..ROWS * bytes];
        self.w.layout().pad(self.rows, block, padded);
        padded
    }
}

/// A chunk of a tile of a `Block32` format.
#[repr(align(64))]
pub(super) struct Chunk32 {
    pub(super) q: [Run; CHUNK32],
    pub(super) d: [RowF32; CHUNK32],
    pub(super) m: [RowF32; CHUNK32],
}

impl Chunk32 {
    pub(super) const fn zero() -> Self {
        Self {
            q: [[0; 512]; CHUNK32],
            d: [[0.0; ROWS]; CHUNK32],
            m: [[0.0; ROWS]; CHUNK32],
        }
    }

    /// Unpacks blocks `first ..` of a tile, returns how many. `FETCHES`: and fetches what lies some way behind them.
    #[inline(always)]
    pub(super) fn unpack<U: Unpack32, const FETCHES: bool>(
        &mut self,
        blocks: &mut TileBlocks<'_>,
        first: usize,
    ) -> usize {
        let n = CHUNK32.min(blocks.w.blocks() - first);
        for i in 0..n {
            if FETCHES {
                blocks.ahead::<1>(first + i, 0);
            }
            let block = blocks.block(first + i);
            U::codes(block, &mut self.q[i]);
            U::scales(block, &mut self.d[i]);
            if has_min(U::TY) {
                U::offsets(block, &mut self.m[i]);
            }
        }
        n
    }
}

/// One super-block of a tile of a `Block256` format.
#[repr(align(64))]
pub(super) struct Super256 {
    pub(super) q: [Run; 8],
    /// One for each 32 or 16 values.
    pub(super) scale: Scales,
    /// Minima of twice 16 values, two 16-bit numbers a lane: what 16-bit dot products with pairs of sums want.
    pub(super) min_pairs: [[i32; ROWS]; 8],
    pub(super) d: RowF32,
    pub(super) dmin: RowF32,
}

impl Super256 {
    pub(super) const fn zero() -> Self {
        Self {
            q: [[0; 512]; 8],
            scale: [[0; ROWS]; 16],
            min_pairs: [[0; ROWS]; 8],
            d: [0.0; ROWS],
            dmin: [0.0; ROWS],
        }
    }

    /// Unpacks super-block `b` of a tile.
    #[inline(always)]
    pub(super) fn unpack<U: Unpack256>(&mut self, blocks: &mut TileBlocks<'_>, b: usize) {
        let block = blocks.block(b);
        for (run, q) in self.q.iter_mut().enumerate() {
            U::codes(block, run, q);
        }
        let mut min: Minima = [[0; ROWS]; 16];
        U::subs(block, &mut self.scale, &mut min);
        U::factors(block, &mut self.d, &mut self.dmin);
        if has_min(U::TY) {
            let subs = if U::SUB32 { [0, 0] } else { [0, 1] };
            for (i, pairs) in self.min_pairs.iter_mut().enumerate() {
                let at = if U::SUB32 { i } else { 2 * i };
                let [low, high] = subs.map(|sub| min[at + sub]);
                for r in 0..ROWS {
                    pairs[r] = i32::from(low[r]) | i32::from(high[r]) << 16;
                }
            }
        }
    }
}
