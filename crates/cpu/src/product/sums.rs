//! Sums of many tokens over the chunks of K, of some tiles of rows side by side: what kernels of 16 rows a register keep between chunks, and the order
//! of these.

use super::unpacked::CHUNK32;
use crate::mem::{Shared, fetch_all};
use quant::tile::{ROWS, TileMatrix};
use std::arch::x86_64::*;
use std::cell::Cell;
use std::ops::Range;

/// Tiles of rows that are summed side by side: for each chunk of K the tokens' codes come into the second-level cache once for
/// all of them.
const GROUP: usize = 8;

/// A token's sums of a group.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Kept([[f32; ROWS]; GROUP]);

thread_local! {
    /// What [`Sums`] keeps, while no product runs: it grows to the most tokens seen and is then reused.
    static SUMS: Cell<Vec<Kept>> = const { Cell::new(Vec::new()) };
}

/// Sums of up to [`GROUP`] tiles of rows for all tokens over the chunks of K so far: `[tokens][tiles]`. They lie close together;
/// the results do not, and are written once, at the end.
pub(super) struct Sums {
    kept: Vec<Kept>,
    tokens: usize,
}

impl Drop for Sums {
    fn drop(&mut self) {
        SUMS.set(std::mem::take(&mut self.kept));
    }
}

impl Sums {
    pub(super) fn new(tokens: usize) -> Self {
        let mut kept = SUMS.take();
        if kept.len() < tokens {
            kept.resize(tokens, Kept([[0.0; ROWS]; GROUP]));
        }
        Self { kept, tokens }
    }

    /// Stores a chunk's sums of tokens from `t` on and the group's tile `slot`, or adds them to those of the chunks before. Those that fill a
    /// tile of tokens up are left out.
    #[target_feature(enable = "avx512f")]
    #[inline]
    pub(super) fn put(&mut self, t: usize, slot: usize, first: usize, acc: &[__m512]) {
        let tokens = &mut self.kept[..self.tokens][t..];
        for (Kept(kept), acc) in tokens.iter_mut().zip(acc) {
            let kept = kept[slot].as_mut_ptr();
            // SAFETY: 16 values are there.
            unsafe {
                let sum = if first == 0 {
                    *acc
                } else {
                    _mm512_add_ps(_mm512_loadu_ps(kept), *acc)
                };
                _mm512_storeu_ps(kept, sum);
            }
        }
    }

    /// Writes the results of a group of tiles, of some of the tokens, which are those of the product from `begin` on. Each token's lie in lines
    /// of their own, which are in no near cache: they are asked for some tokens ahead.
    #[target_feature(enable = "avx512f")]
    pub(super) fn write(
        &self,
        w: &TileMatrix<'_>,
        group: &Range<usize>,
        begin: usize,
        tokens: Range<usize>,
        out: &Shared<'_, f32>,
    ) {
        const AHEAD: usize = 16;
        let rows = (group.len() - 1) * ROWS + w.tile_rows(group.end - 1);
        let first = begin + tokens.start;
        for (t, Kept(sums)) in self.kept[tokens].iter().enumerate() {
            // SAFETY: each tile writes its own rows of every token.
            let out = unsafe { out.part((first + t) * w.n() + group.start * ROWS, rows) };
            for line in 0..group.len() {
                let ahead = out.as_ptr().wrapping_add(AHEAD * w.n() + line * ROWS);
                _mm_prefetch::<_MM_HINT_ET0>(ahead.cast());
            }
            for (out, sums) in out.chunks_mut(ROWS).zip(sums) {
                if let Some(out) = out.first_chunk_mut::<ROWS>() {
                    *out = *sums;
                } else {
                    out.copy_from_slice(&sums[..out.len()]);
                }
            }
        }
    }
}

/// Groups of up to [`GROUP`] tiles.
pub(super) fn groups(tiles: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    tiles
        .clone()
        .step_by(GROUP)
        .map(move |start| start..tiles.end.min(start + GROUP))
}

/// A chunk of a tile.
pub(super) struct Step {
    /// The tile's group.
    pub(super) group: Range<usize>,
    /// The chunk's first block.
    pub(super) first: usize,
    pub(super) tile: usize,
}

impl Step {
    /// The tile's place in its group.
    pub(super) fn slot(&self) -> usize {
        self.tile - self.group.start
    }
}

/// All chunks of tiles, each of `chunk` blocks: group by group, in each chunk by chunk, in each tile by tile.
pub(super) fn steps(
    w: &TileMatrix<'_>,
    tiles: Range<usize>,
    chunk: usize,
) -> impl Iterator<Item = Step> {
    let blocks = w.blocks();
    groups(tiles).flat_map(move |group| {
        (0..blocks).step_by(chunk).flat_map(move |first| {
            let group = group.clone();
            group.clone().map(move |tile| Step {
                group: group.clone(),
                first,
                tile,
            })
        })
    })
}

/// The bytes of a chunk that is unpacked next: a few are fetched with each 32 values of the one before, since a long burst of fetches would wait
/// for itself.
pub(super) struct Ahead<'a>(std::slice::Chunks<'a, u8>);

impl<'a> Ahead<'a> {
    /// Of `next`, a chunk of `chunk` blocks, beside products of `tokens` tokens, eight at a time; `None`: of nothing.
    pub(super) fn new(
        w: &TileMatrix<'a>,
        next: Option<&Step>,
        chunk: usize,
        tokens: usize,
    ) -> Self {
        let bytes = next.map_or(&[][..], |&Step { tile, first, .. }| {
            let block = w.tile_rows(tile) * w.layout().block_bytes();
            let end = w.blocks().min(first + chunk);
            &w.tile(tile)[first * block..end * block]
        });
        let fetches = tokens.div_ceil(8) * CHUNK32;
        let lines = bytes.len().div_ceil(fetches * 64).max(1);
        Self(bytes.chunks(lines * 64))
    }

    /// Fetches some more of them.
    #[inline(always)]
    pub(super) fn fetch(&mut self) {
        if let Some(lines) = self.0.next() {
            fetch_all(lines);
        }
    }
}
