//! Quantised products with AMX: 16 tokens x 16 rows a tile.
//!
//! *Blocks of 32*: each block is one tile product whose 256 integers go through the first-level cache to the vector units,
//! which scale and accumulate them. The tile products of the next 16 tokens are issued between the scaling of these, so
//! that both units work.
//!
//! *Super-blocks*: weights times sub-scales need 13 bits and a sign. They are split into two planes of bytes,
//! `w = 64 * high + low`, so that tiles run over all 256 values before anything leaves them: exact, and an eighth
//! of the scaling.

use super::avx512::{load_f32, subtract_min};
use super::unpacked::{CHUNK32, CHUNK256, Chunk32, Super256, TileBlocks};
use crate::acts::{Acts, TILE};
use crate::amx;
use crate::mem::Shared;
use quant::lanes::{Run, Unpack32, Unpack256};
use quant::product::has_min;
use quant::tile::{ROWS, TileMatrix};
use std::arch::x86_64::*;
use std::ops::Range;

/// One tile of results.
type Tile = [i32; 256];

#[repr(align(64))]
struct Aligned<T>(T);

/// Blocks whose tile products are under way at a time: their results and the next ones' must stay in the first-level cache.
const BLOCKS: usize = 8;

/// Tiles of rows that are summed side by side. For each chunk of K the tokens' codes come into the second-level cache once
/// for all of them, and results are written in runs of 512 bytes.
const GROUP: usize = 8;

/// Sums of up to [`GROUP`] tiles of rows for all tokens: `[tokens][tiles]`.
struct Sums(Vec<[[f32; ROWS]; GROUP]>);

impl Sums {
    fn new(tokens: usize) -> Self {
        Self(vec![[[0.0; ROWS]; GROUP]; tokens])
    }

    /// Stores a chunk's sums of token `t` and the group's tile `slot`, or adds them to what the chunks before gave.
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn put(&mut self, t: usize, slot: usize, first: bool, acc: __m512) {
        let p = self.0[t][slot].as_mut_ptr();
        // SAFETY: 16 values are there.
        unsafe {
            let sum = if first {
                acc
            } else {
                _mm512_add_ps(_mm512_loadu_ps(p), acc)
            };
            _mm512_storeu_ps(p, sum);
        }
    }

    /// Writes the results of a group of tiles.
    fn write(&self, w: &TileMatrix<'_>, group: &Range<usize>, out: &Shared<'_, f32>) {
        let rows = (group.len() - 1) * ROWS + w.tile_rows(group.end - 1);
        for (t, sums) in self.0.iter().enumerate() {
            // SAFETY: each tile writes its own rows of every token.
            let out = unsafe { out.part(t * w.n() + group.start * ROWS, rows) };
            out.copy_from_slice(&sums.as_flattened()[..rows]);
        }
    }
}

/// Groups of up to [`GROUP`] tiles.
fn groups(tiles: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    tiles
        .clone()
        .step_by(GROUP)
        .map(move |start| start..tiles.end.min(start + GROUP))
}

/// Tiles of a `Block32` format. At least [`TILE`] tokens.
///
/// # Safety
/// The process must have AMX's permission (an `Amx` token proves it).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn tiles32<U: Unpack32>(
    w: &TileMatrix<'_>,
    acts: &Acts,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    assert_eq!(acts.height(), TILE, "activations in tiles");
    let mut chunk = Chunk32::zero();
    let mut results = Aligned([[[0i32; 256]; BLOCKS]; 2]);
    let mut sums = Sums::new(acts.tokens());
    // SAFETY: the caller's promise.
    unsafe { amx::configure(32) };
    let token_tiles = acts.tokens().div_ceil(TILE);
    for group in groups(tiles) {
        let chunks = (0..w.blocks()).step_by(CHUNK32);
        for (first, tile) in chunks.flat_map(|first| group.clone().map(move |tile| (first, tile))) {
            let (mut blocks, slot) = (TileBlocks::new(w, tile), tile - group.start);
            let n = chunk.unpack::<U>(&mut blocks, first);
            lower_codes(&mut chunk.q[..n], U::BIAS as u8);
            // A unit is up to BLOCKS blocks of one token tile.
            let a_unit = n.div_ceil(BLOCKS);
            let units = token_tiles * a_unit;
            let place = |unit: usize| {
                let (tt, start) = (unit / a_unit, unit % a_unit * BLOCKS);
                (tt, start, BLOCKS.min(n - start))
            };
            let issue = |results: &mut [Tile; BLOCKS], unit: usize, i: usize| {
                let (tt, start, count) = place(unit);
                if i < count {
                    let at = acts.q_at(tt * TILE, (first + start + i) * 32);
                    let (a, w) = (&acts.q[at..at + 512], chunk.q[start + i].as_ptr().cast());
                    // SAFETY: 512 codes, a run of 512 weights, and 256 results; tiles are configured for 32 values.
                    unsafe { amx::product32(a.as_ptr(), w, results[i].as_mut_ptr(), i) };
                }
            };
            for i in 0..BLOCKS {
                issue(&mut results.0[0], 0, i);
            }
            let mut acc = [_mm512_setzero_ps(); TILE];
            for unit in 0..units {
                let (tt, start, count) = place(unit);
                let [even, odd] = &mut results.0;
                let (this, next) = if unit % 2 == 0 {
                    (even, odd)
                } else {
                    (odd, even)
                };
                if start == 0 {
                    acc = [_mm512_setzero_ps(); TILE];
                }
                for (i, this) in this.iter().enumerate() {
                    if unit + 1 < units {
                        issue(next, unit + 1, i);
                    }
                    if i >= count {
                        continue;
                    }
                    let b = start + i;
                    let d_at = acts.d_at(tt * TILE, first + b);
                    let d_a: &[f32; TILE] = acts.d[d_at..][..TILE]
                        .try_into()
                        .expect("scales of 16 tokens");
                    let ds: &[f32; TILE] = acts.ds[d_at..][..TILE]
                        .try_into()
                        .expect("sums of 16 tokens");
                    let (d, m) = (load_f32(&chunk.d[b]), load_f32(&chunk.m[b]));
                    for j in 0..TILE {
                        let scale = _mm512_mul_ps(d, _mm512_set1_ps(d_a[j]));
                        let dot = _mm512_cvtepi32_ps(load_row(this, j));
                        acc[j] = _mm512_fmadd_ps(dot, scale, acc[j]);
                        if has_min(U::TY) {
                            acc[j] = _mm512_fmadd_ps(m, _mm512_set1_ps(ds[j]), acc[j]);
                        }
                    }
                }
                if start + count == n {
                    for (j, acc) in acc.iter().enumerate().take(acts.tokens() - tt * TILE) {
                        sums.put(tt * TILE + j, slot, first == 0, *acc);
                    }
                }
            }
        }
        sums.write(w, &group, out);
    }
    // SAFETY: the caller's promise.
    unsafe { amx::release() };
}

/// Takes the bias off codes, which makes them signed.
#[inline(always)]
fn lower_codes(runs: &mut [Run], bias: u8) {
    if bias != 0 {
        for run in runs {
            for code in run.iter_mut() {
                *code = code.wrapping_sub(bias);
            }
        }
    }
}

/// A super-block's weights times sub-scales, in two planes.
#[repr(align(64))]
struct Planes {
    high: [i8; 4096],
    low: [u8; 4096],
}

impl Planes {
    /// Splits `scale * (code - BIAS)` into `64 * high + low`.
    #[inline(always)]
    fn split<U: Unpack256>(&mut self, block: &Super256) {
        for (run, q) in block.q.iter().enumerate() {
            for (g, q) in q.chunks_exact(64).enumerate() {
                let scale = &block.scale[if U::SUB32 { run } else { 2 * run + g / 4 }];
                let at = run * 512 + g * 64;
                let (high, low) = (&mut self.high[at..at + 64], &mut self.low[at..at + 64]);
                let mut wide = [0i16; 64];
                for r in 0..16 {
                    for i in 0..4 {
                        wide[4 * r + i] = i16::from(scale[r]);
                    }
                }
                for i in 0..64 {
                    let v = wide[i] * (i16::from(q[i]) - U::BIAS as i16);
                    high[i] = (v >> 6) as i8;
                    low[i] = (v & 63) as u8;
                }
            }
        }
    }
}

/// Tiles of a `Block256` format. At least [`TILE`] tokens.
///
/// # Safety
/// The process must have AMX's permission (an `Amx` token proves it).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn tiles256<U: Unpack256>(
    w: &TileMatrix<'_>,
    acts: &Acts,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    assert_eq!(acts.height(), TILE, "activations in tiles");
    let mut chunk = [const { Super256::zero() }; CHUNK256];
    let mut planes = [const {
        Planes {
            high: [0; 4096],
            low: [0; 4096],
        }
    }; CHUNK256];
    let mut results = Aligned([[[[0i32; 256]; 4]; CHUNK256]; 2]);
    let mut sums = Sums::new(acts.tokens());
    // SAFETY: the caller's promise.
    unsafe { amx::configure(64) };
    let token_tiles = acts.tokens().div_ceil(TILE);
    let pairs = token_tiles.div_ceil(2);
    for group in groups(tiles) {
        let chunks = (0..w.blocks()).step_by(CHUNK256);
        for (first, tile) in chunks.flat_map(|first| group.clone().map(move |tile| (first, tile))) {
            let (mut blocks, slot) = (TileBlocks::new(w, tile), tile - group.start);
            let n = CHUNK256.min(w.blocks() - first);
            for i in 0..n {
                chunk[i].unpack::<U>(&mut blocks, first + i);
                planes[i].split::<U>(&chunk[i]);
            }
            let issue = |results: &mut [[Tile; 4]; CHUNK256], pair: usize| {
                for i in 0..n {
                    // A last tile without a partner is multiplied twice; the second result is not used.
                    let tt = [2 * pair, (2 * pair + 1).min(token_tiles - 1)];
                    let [a0, a1] = tt.map(|tt| {
                        let at = acts.q_at(tt * TILE, (first + i) * 256);
                        acts.q[at..at + 4096].as_ptr()
                    });
                    let (high, low) = (planes[i].high.as_ptr(), planes[i].low.as_ptr());
                    // SAFETY: 4096 codes and weights each, 4 tiles of results; tiles are configured for 64 values.
                    unsafe { amx::planes256(a0, a1, high, low, results[i].as_mut_ptr().cast()) };
                }
            };
            issue(&mut results.0[0], 0);
            for pair in 0..pairs {
                let [even, odd] = &mut results.0;
                let (this, next) = if pair % 2 == 0 {
                    (even, odd)
                } else {
                    (odd, even)
                };
                if pair + 1 < pairs {
                    issue(next, pair + 1);
                }
                let tokens = (2 * TILE).min(acts.tokens() - pair * 2 * TILE);
                for j in 0..tokens {
                    let t = pair * 2 * TILE + j;
                    let mut acc = _mm512_setzero_ps();
                    for i in 0..n {
                        let at = j / TILE * 2;
                        let high = _mm512_slli_epi32::<6>(load_row(&this[i][at], j % TILE));
                        let dot = _mm512_add_epi32(high, load_row(&this[i][at + 1], j % TILE));
                        let d_at = acts.d_at(t, first + i);
                        let scale =
                            _mm512_mul_ps(load_f32(&chunk[i].d), _mm512_set1_ps(acts.d[d_at]));
                        acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, acc);
                        if has_min(U::TY) {
                            acc = subtract_min(&chunk[i], acts, d_at, acc);
                        }
                    }
                    sums.put(t, slot, first == 0, acc);
                }
            }
        }
        sums.write(w, &group, out);
    }
    // SAFETY: the caller's promise.
    unsafe { amx::release() };
}

/// Token `j`'s 16 results.
#[target_feature(enable = "avx512f")]
#[inline]
fn load_row(tile: &Tile, j: usize) -> __m512i {
    let row: &[i32; 16] = tile[16 * j..][..16].try_into().expect("16 results");
    // SAFETY: 16 values are there.
    unsafe { _mm512_loadu_si512(row.as_ptr().cast()) }
}
