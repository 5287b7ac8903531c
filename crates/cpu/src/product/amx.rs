//! Quantised products with AMX: 16 tokens x 16 rows a tile.
//!
//! *Blocks of 32*: the 256 integers of each tile product go through the first-level cache to the vector units, which scale and
//! accumulate them. Two tiles of tokens are multiplied with two of rows, a few blocks at a time, and then scaled: tile
//! products block one of the two vector units, so mixing both kinds of work finely gains nothing.
//!
//! *Super-blocks*: weights times sub-scales need 13 bits and a sign. They are split into two planes of bytes,
//! `w = 64 * high + low`, so that tiles run over all 256 values before anything leaves them: exact, and an eighth
//! of the scaling.

use super::avx512::{load_f32, load_i32, weigh_minima};
use super::sums::{Sums, groups};
use super::unpacked::{CHUNK32, CHUNK256, Chunk32, Super256, TileBlocks};
use crate::acts::{ActsView, TILE};
use crate::amx;
use crate::mem::Shared;
use crate::simd::array;
use quant::lanes::{Run, Unpack32, Unpack256};
use quant::product::has_min;
use quant::tile::TileMatrix;
use std::arch::x86_64::*;
use std::ops::Range;

/// One tile of results.
type Tile = [i32; 256];

#[repr(align(64))]
struct Aligned<T>(T);

/// Blocks that are multiplied before they are scaled: their results, 16 KiB, must stay in the first-level cache.
const BLOCKS: usize = 4;

/// Tiles of a `Block32` format. At least [`TILE`] tokens.
///
/// # Safety
/// The process must have AMX's permission (an `Amx` token proves it).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn tiles32<U: Unpack32>(
    w: &TileMatrix<'_>,
    acts: &ActsView<'_>,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    assert_eq!(acts.height(), TILE, "activations in tiles");
    let mut pair = [const { Chunk32::zero() }; 2];
    let mut results = Aligned([[[0i32; 256]; 4]; BLOCKS]);
    let mut sums = Sums::new(acts.tokens());
    // SAFETY: the caller's promise.
    unsafe { amx::configure(32) };
    let token_tiles = acts.tokens().div_ceil(TILE);
    for group in groups(tiles) {
        let chunks = (0..w.blocks()).step_by(CHUNK32);
        let pairs =
            chunks.flat_map(|first| group.clone().step_by(2).map(move |tile| (first, tile)));
        for (first, tile) in pairs {
            let slots = tile - group.start..(tile + 2).min(group.end) - group.start;
            let mut n = 0;
            for (chunk, slot) in pair.iter_mut().zip(slots.clone()) {
                let mut blocks = TileBlocks::new(w, group.start + slot);
                n = chunk.unpack::<U, true>(&mut blocks, first);
                lower_codes(&mut chunk.q[..n], U::BIAS as u8);
            }
            for tt in (0..token_tiles).step_by(2) {
                // A last tile without a partner is multiplied twice; the second result is not used.
                let tts = [tt, (tt + 1).min(token_tiles - 1)];
                let a = tts.map(|tt| {
                    let at = acts.q_at(tt * TILE, first * 32);
                    acts.q[at..at + n * 512].as_ptr()
                });
                let second = slots.len() - 1;
                let mut acc = [[_mm512_setzero_ps(); TILE]; 4];
                for start in (0..n).step_by(BLOCKS) {
                    let blocks = start..n.min(start + BLOCKS);
                    let block = |b: usize| amx::Block32 {
                        a: a.map(|a| a.wrapping_add(b * 512)),
                        w: [
                            pair[0].q[b].as_ptr().cast(),
                            pair[second].q[b].as_ptr().cast(),
                        ],
                    };
                    // SAFETY: 512 codes and 512 weights of each block, 1024 results of each; tiles are configured for 32 values.
                    unsafe {
                        amx::first32(block(start));
                        for b in start + 1..blocks.end {
                            amx::next32(block(b), results.0[b - 1 - start].as_mut_ptr().cast());
                        }
                        amx::last32(results.0[blocks.len() - 1].as_mut_ptr().cast());
                    }
                    let used = 2 * (token_tiles - tt).min(2);
                    for (i, acc) in acc.iter_mut().take(used).enumerate() {
                        let (tt, chunk) = (tts[i / 2], &pair[i % 2 * second]);
                        let mut sums = *acc;
                        for b in blocks.clone() {
                            let d_at = acts.d_at(tt * TILE, first + b);
                            sums = add_block::<U>(
                                sums,
                                &results.0[b - start][i],
                                chunk,
                                b,
                                acts,
                                d_at,
                            );
                        }
                        *acc = sums;
                    }
                }
                for (half, tt) in (tt..token_tiles.min(tt + 2)).enumerate() {
                    for (i, slot) in slots.clone().enumerate() {
                        sums.put(tt * TILE, slot, first, &acc[2 * half + i]);
                    }
                }
            }
        }
        sums.write(w, &group, 0, 0..acts.tokens(), out);
    }
    // SAFETY: the caller's promise.
    unsafe { amx::release() };
}

/// Scales a block's integers of 16 tokens and adds them to `acc`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn add_block<U: Unpack32>(
    mut acc: [__m512; TILE],
    dots: &Tile,
    chunk: &Chunk32,
    b: usize,
    acts: &ActsView<'_>,
    d_at: usize,
) -> [__m512; TILE] {
    let d_a: &[f32; TILE] = acts.d[d_at..][..TILE].try_into().expect("16 scales");
    let ds: &[f32; TILE] = acts.ds[d_at..][..TILE].try_into().expect("16 sums");
    let (d, m) = (load_f32(&chunk.d[b]), load_f32(&chunk.m[b]));
    for (j, acc) in acc.iter_mut().enumerate() {
        let scale = _mm512_mul_ps(d, _mm512_set1_ps(d_a[j]));
        *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(load_row(dots, j)), scale, *acc);
        if has_min(U::TY) {
            *acc = _mm512_fmadd_ps(m, _mm512_set1_ps(ds[j]), *acc);
        }
    }
    acc
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
    acts: &ActsView<'_>,
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
    let mut results = Aligned([[[0i32; 256]; 4]; CHUNK256]);
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
            for (i, (block, planes)) in chunk.iter_mut().zip(&mut planes).take(n).enumerate() {
                block.unpack::<U>(&mut blocks, first + i);
                planes.split::<U>(block);
            }
            for pair in 0..pairs {
                // A last tile without a partner is multiplied twice; the second result is not used.
                let tts = [2 * pair, (2 * pair + 1).min(token_tiles - 1)];
                for (i, (planes, results)) in planes.iter().zip(&mut results.0).take(n).enumerate()
                {
                    let [a0, a1] = tts.map(|tt| {
                        let at = acts.q_at(tt * TILE, (first + i) * 256);
                        acts.q[at..at + 4096].as_ptr()
                    });
                    let (high, low) = (planes.high.as_ptr(), planes.low.as_ptr());
                    // SAFETY: 4096 codes and weights each, 4 tiles of results; tiles are configured for 64 values.
                    unsafe { amx::planes256(a0, a1, high, low, results.as_mut_ptr().cast()) };
                }
                for (half, tt) in (2 * pair..token_tiles.min(2 * pair + 2)).enumerate() {
                    let mut acc = [_mm512_setzero_ps(); TILE];
                    for (i, (block, results)) in chunk.iter().zip(&results.0).take(n).enumerate() {
                        let d_at = acts.d_at(tt * TILE, first + i);
                        let [high, low] = [&results[2 * half], &results[2 * half + 1]];
                        acc = add_super::<U>(acc, high, low, block, acts, d_at);
                    }
                    sums.put(tt * TILE, slot, first, &acc);
                }
            }
        }
        sums.write(w, &group, 0, 0..acts.tokens(), out);
    }
    // SAFETY: the caller's promise.
    unsafe { amx::release() };
}

/// Scales a super-block's integers of 16 tokens and adds them to `acc`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn add_super<U: Unpack256>(
    mut acc: [__m512; TILE],
    high: &Tile,
    low: &Tile,
    block: &Super256,
    acts: &ActsView<'_>,
    d_at: usize,
) -> [__m512; TILE] {
    let d_a: &[f32; TILE] = acts.d[d_at..][..TILE].try_into().expect("16 scales");
    let d = load_f32(&block.d);
    for (j, acc) in acc.iter_mut().enumerate() {
        let high = _mm512_slli_epi32::<6>(load_row(high, j));
        let dot = _mm512_add_epi32(high, load_row(low, j));
        let scale = _mm512_mul_ps(d, _mm512_set1_ps(d_a[j]));
        *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, *acc);
    }
    if has_min(U::TY) {
        let sums: &[i16; 16 * TILE] = acts.sum16[d_at * 16..][..16 * TILE]
            .try_into()
            .expect("16 sums of 16 tokens");
        let pairs = array!([_mm512_setzero_si512(); 8], |i| load_i32(
            &block.min_pairs[i]
        ));
        let dmin = load_f32(&block.dmin);
        for (j, acc) in acc.iter_mut().enumerate() {
            let mins = weigh_minima(&pairs, sums[16 * j..][..16].try_into().expect("16 sums"));
            let scale = _mm512_mul_ps(dmin, _mm512_set1_ps(d_a[j]));
            *acc = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(mins), scale, *acc);
        }
    }
    acc
}

/// Token `j`'s 16 results.
#[target_feature(enable = "avx512f")]
#[inline]
fn load_row(tile: &Tile, j: usize) -> __m512i {
    let row: &[i32; 16] = tile[16 * j..][..16].try_into().expect("16 results");
    // SAFETY: 16 values are there.
    unsafe { _mm512_loadu_si512(row.as_ptr().cast()) }
}
