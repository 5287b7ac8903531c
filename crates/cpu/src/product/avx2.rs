//! Quantised products with AVX2: 8 rows a register, a group of 4 values a lane.
//!
//! `vpmaddubsw` multiplies unsigned codes with signed activations and adds neighbours into 16 bits. Codes of few bits
//! leave room there for several groups; 8-bit codes would overflow at once, so the sign is moved to the activation:
//! `|w| <= 128` and `|a| <= 127` give at most 32512.

use super::unpacked::{CHUNK32, CHUNK256, Chunk32, Super256, TileBlocks};
use crate::acts::Acts;
use crate::mem::Shared;
use quant::lanes::{Run, Unpack32, Unpack256};
use quant::product::has_min;
use quant::tile::{ROWS, TileMatrix};
use std::arch::x86_64::*;
use std::ops::Range;

/// Sixteen 32-bit lanes.
type I32x16 = [__m256i; 2];
/// Sixteen floats.
type F32x16 = [__m256; 2];

/// Groups whose products fit a 16-bit sum: `groups * 2 * (2^bits - 1) * 127 <= 32767`.
const fn groups_a_sum(bits: u32) -> usize {
    match bits {
        0..=4 => 8,
        5 => 4,
        6 => 2,
        _ => 1,
    }
}

/// Sum over groups of codes times activations, raised codes included: `sum_k code[k] * a[k]`, or, for 8-bit codes,
/// already with the bias of 128 taken off.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dot(bits: u32, run: &Run, a: &[i8; 32], groups: Range<usize>) -> I32x16 {
    let ones = _mm256_set1_epi16(1);
    let mut total = [_mm256_setzero_si256(); 2];
    for first in groups.clone().step_by(groups_a_sum(bits)) {
        let mut words = [_mm256_setzero_si256(); 2];
        for g in first..groups.end.min(first + groups_a_sum(bits)) {
            let a = _mm256_set1_epi32(i32::from_le_bytes([
                a[4 * g] as u8,
                a[4 * g + 1] as u8,
                a[4 * g + 2] as u8,
                a[4 * g + 3] as u8,
            ]));
            let bytes: &[u8; 64] = run[64 * g..][..64].try_into().expect("64 bytes");
            for (half, words) in words.iter_mut().enumerate() {
                // SAFETY: 64 bytes are there.
                let w = unsafe { _mm256_loadu_si256(bytes.as_ptr().add(32 * half).cast()) };
                let pairs = if bits == 8 {
                    let w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
                    _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w))
                } else {
                    _mm256_maddubs_epi16(w, a)
                };
                *words = _mm256_add_epi16(*words, pairs);
            }
        }
        for half in 0..2 {
            total[half] = _mm256_add_epi32(total[half], _mm256_madd_epi16(words[half], ones));
        }
    }
    total
}

/// What [`dot`] has not taken off yet.
const fn bias(bias: i32, bits: u32) -> i32 {
    if bits == 8 { 0 } else { bias }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_f32(x: &[f32; 16]) -> F32x16 {
    // SAFETY: 16 values are there.
    unsafe {
        [
            _mm256_loadu_ps(x.as_ptr()),
            _mm256_loadu_ps(x.as_ptr().add(8)),
        ]
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_i32(x: &[i32; 16]) -> I32x16 {
    // SAFETY: 16 values are there.
    unsafe {
        [
            _mm256_loadu_si256(x.as_ptr().cast()),
            _mm256_loadu_si256(x.as_ptr().add(8).cast()),
        ]
    }
}

/// Sixteen bytes as integers.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load_i8(x: &[i8; 16]) -> I32x16 {
    // SAFETY: 16 bytes are there.
    let x = unsafe { _mm_loadu_si128(x.as_ptr().cast()) };
    [
        _mm256_cvtepi8_epi32(x),
        _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(x)),
    ]
}

/// Stores a chunk's sums of token `t`, or adds them to what the chunks before gave.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn put(w: &TileMatrix<'_>, tile: usize, out: &Shared<'_, f32>, t: usize, first: bool, acc: F32x16) {
    let mut sums = [0.0; 16];
    // SAFETY: 16 values are there.
    unsafe {
        _mm256_storeu_ps(sums.as_mut_ptr(), acc[0]);
        _mm256_storeu_ps(sums.as_mut_ptr().add(8), acc[1]);
    }
    // SAFETY: each tile writes its own rows of every token.
    let out = unsafe { out.part(t * w.n() + tile * ROWS, w.tile_rows(tile)) };
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = if first { sum } else { *out + sum };
    }
}

/// Tiles of a `Block32` format.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tiles32<U: Unpack32>(
    w: &TileMatrix<'_>,
    acts: &Acts,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    let mut chunk = Chunk32::zero();
    for tile in tiles {
        let mut blocks = TileBlocks::new(w, tile);
        for first in (0..w.blocks()).step_by(CHUNK32) {
            let n = chunk.unpack::<U>(&mut blocks, first);
            for t in 0..acts.tokens() {
                let mut acc = [_mm256_setzero_ps(); 2];
                for b in 0..n {
                    let (at, d_at) = (acts.q_at(t, (first + b) * 32), acts.d_at(t, first + b));
                    let a: &[i8; 32] = acts.q[at..at + 32].try_into().expect("32 codes");
                    let dots = dot(U::BITS, &chunk.q[b], a, 0..8);
                    let off = _mm256_set1_epi32(-bias(U::BIAS, U::BITS) * acts.sum32[d_at]);
                    let (d, d_a) = (load_f32(&chunk.d[b]), _mm256_set1_ps(acts.d[d_at]));
                    let (m, ds) = (load_f32(&chunk.m[b]), _mm256_set1_ps(acts.ds[d_at]));
                    for half in 0..2 {
                        let dot = _mm256_cvtepi32_ps(_mm256_add_epi32(dots[half], off));
                        acc[half] = _mm256_fmadd_ps(dot, _mm256_mul_ps(d[half], d_a), acc[half]);
                        if has_min(U::TY) {
                            acc[half] = _mm256_fmadd_ps(m[half], ds, acc[half]);
                        }
                    }
                }
                put(w, tile, out, t, first == 0, acc);
            }
        }
    }
}

/// Tiles of a `Block256` format.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tiles256<U: Unpack256>(
    w: &TileMatrix<'_>,
    acts: &Acts,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    let mut chunk = [const { Super256::zero() }; CHUNK256];
    for tile in tiles {
        let mut blocks = TileBlocks::new(w, tile);
        for first in (0..w.blocks()).step_by(CHUNK256) {
            let n = CHUNK256.min(w.blocks() - first);
            for (i, block) in chunk[..n].iter_mut().enumerate() {
                block.unpack::<U>(&mut blocks, first + i);
            }
            for t in 0..acts.tokens() {
                let mut acc = [_mm256_setzero_ps(); 2];
                for (i, block) in chunk[..n].iter().enumerate() {
                    if t == 0 {
                        blocks.ahead::<1>(first + i, 0);
                    }
                    acc = super256::<U>(block, acts, t, first + i, acc);
                }
                put(w, tile, out, t, first == 0, acc);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn super256<U: Unpack256>(
    block: &Super256,
    acts: &Acts,
    t: usize,
    b: usize,
    mut acc: F32x16,
) -> F32x16 {
    let d_at = acts.d_at(t, b);
    let sums: &[i16; 16] = acts.sum16[d_at * 16..][..16].try_into().expect("16 sums");
    let mut total = [_mm256_setzero_si256(); 2];
    let subs = if U::SUB32 { 1 } else { 2 };
    for run in 0..8 {
        let at = acts.q_at(t, b * 256 + run / 2 * 64) + run % 2 * 32;
        let a: &[i8; 32] = acts.q[at..at + 32].try_into().expect("32 codes");
        for sub in 0..subs {
            let groups = 8 / subs;
            let dots = dot(U::BITS, &block.q[run], a, sub * groups..(sub + 1) * groups);
            let mut sum = i32::from(sums[2 * run + sub]);
            if U::SUB32 {
                sum += i32::from(sums[2 * run + 1]);
            }
            let off = _mm256_set1_epi32(-bias(U::BIAS, U::BITS) * sum);
            let scale = load_i8(&block.scale[subs * run + sub]);
            for half in 0..2 {
                let scaled = _mm256_mullo_epi32(_mm256_add_epi32(dots[half], off), scale[half]);
                total[half] = _mm256_add_epi32(total[half], scaled);
            }
        }
    }
    let (d, d_a) = (load_f32(&block.d), _mm256_set1_ps(acts.d[d_at]));
    for half in 0..2 {
        acc[half] = _mm256_fmadd_ps(
            _mm256_cvtepi32_ps(total[half]),
            _mm256_mul_ps(d[half], d_a),
            acc[half],
        );
    }
    if has_min(U::TY) {
        let mut mins = [_mm256_setzero_si256(); 2];
        for (i, pairs) in block.min_pairs.iter().enumerate() {
            let pair = _mm256_set1_epi32(
                i32::from(sums[2 * i]) & 0xffff | i32::from(sums[2 * i + 1]) << 16,
            );
            let pairs = load_i32(pairs);
            for half in 0..2 {
                mins[half] = _mm256_add_epi32(mins[half], _mm256_madd_epi16(pairs[half], pair));
            }
        }
        let dmin = load_f32(&block.dmin);
        for half in 0..2 {
            acc[half] = _mm256_fnmadd_ps(
                _mm256_cvtepi32_ps(mins[half]),
                _mm256_mul_ps(dmin[half], d_a),
                acc[half],
            );
        }
    }
    acc
}
