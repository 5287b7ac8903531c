//! Quantised products of a few tokens with AVX-512 VNNI: weights go from memory through registers once, and nowhere else.
//!
//! A token alone is bound by memory: 16 rows of a block of 32 are some 300 bytes, 20 to 30 instructions for the vector units
//! against 70 cycles for the bytes at 4 bytes a cycle and thread.

use super::avx512::{Out, dot_pair, group, in_order, load, load_f32, load_i8};
use super::gemv256::Bases;
use super::sets::{Set, Sets};
use super::unpacked::TileBlocks;
use crate::acts::{ActsView, FEW, LONE};
use crate::mem::Shared;
use crate::simd::array;
use gguf::TensorType;
use quant::lanes::{Codes, Unpack32, Unpack256};
use quant::product::{CHUNK, has_min};
use quant::tile::{ROWS, TileMatrix};
use std::arch::x86_64::*;
use std::ops::Range;

/// Up to this many tokens are computed here: sums and codes of more do not fit 32 registers.
pub(super) const TOKENS_MAX: usize = 2 * FEW;

/// Tiles of a `Block32` format.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn tiles32<U: Unpack32>(
    w: &TileMatrix<'_>,
    acts: &ActsView<'_>,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    match acts.tokens() {
        1 => tiles32_of::<U, 1>(w, acts, tiles, out),
        2 => tiles32_of::<U, 2>(w, acts, tiles, out),
        LONE => tiles32_of::<U, LONE>(w, acts, tiles, out),
        FEW => tiles32_of_sets::<U, 1>(w, acts, tiles, out),
        _ => tiles32_of_sets::<U, 2>(w, acts, tiles, out),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn tiles32_of<U: Unpack32, const N: usize>(
    w: &TileMatrix<'_>,
    acts: &ActsView<'_>,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    const BLOCKS: usize = CHUNK / 32;
    let at = Bases::<N>::new(acts);
    for tile in tiles {
        let mut blocks = TileBlocks::new(w, tile);
        let out = Out::new(w, tile, out);
        for first in (0..w.blocks()).step_by(BLOCKS) {
            let mut acc = [_mm512_setzero_ps(); N];
            for b in first..w.blocks().min(first + BLOCKS) {
                blocks.ahead::<1>(b, 0);
                acc = block32::<U, N>(blocks.block(b), acts, &at, b, acc);
            }
            for (t, acc) in acc.into_iter().enumerate() {
                out.put(t, first == 0, acc);
            }
        }
    }
}

/// The same of `S` sets of tokens: sums of a set side by side, its codes broadcast where they are multiplied.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn tiles32_of_sets<U: Unpack32, const S: usize>(
    w: &TileMatrix<'_>,
    acts: &ActsView<'_>,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    const BLOCKS: usize = CHUNK / 32;
    let sets = Sets::new(acts);
    for tile in tiles {
        let mut blocks = TileBlocks::new(w, tile);
        let out = Out::new(w, tile, out);
        for first in (0..w.blocks()).step_by(BLOCKS) {
            let mut acc = [[_mm512_setzero_ps(); FEW]; S];
            for b in first..w.blocks().min(first + BLOCKS) {
                blocks.ahead::<1>(b, 0);
                let block = blocks.block(b);
                let (codes, scales) = (codes::<U>(block, 0), scales::<U>(block));
                let sets = std::array::from_fn(|s| sets.block(s, b));
                add_sets::<U, S>(&codes, scales, &sets, &mut acc);
            }
            let acc = acc.as_flattened().iter().take(acts.tokens());
            for (t, acc) in acc.enumerate() {
                out.put(t, first == 0, *acc);
            }
        }
    }
}

/// Adds a block's products with sets, group by group: as many sums as tokens wait for each other, instead of those of a token.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn add_sets<U: Unpack32, const S: usize>(
    codes: &[__m512i; 8],
    [d, m]: [__m512; 2],
    sets: &[Set<'_>; S],
    acc: &mut [[__m512; FEW]; S],
) {
    let mut dots = [[_mm512_setzero_si512(); FEW]; S];
    if U::BIAS != 0 {
        // Codes are raised by BIAS; what that adds is taken off beforehand.
        for (dots, set) in dots.iter_mut().zip(sets) {
            for (dot, sum) in dots.iter_mut().zip(set.sum) {
                *dot = _mm512_set1_epi32(-U::BIAS * sum);
            }
        }
    }
    each_group!(|g| {
        for (dots, set) in dots.iter_mut().zip(sets) {
            for (dot, q) in dots.iter_mut().zip(set.q) {
                *dot = _mm512_dpbusd_epi32(*dot, codes[g], group(q, g));
            }
        }
        dots.iter_mut().for_each(|dots| in_order(dots));
    });
    for (s, set) in sets.iter().enumerate() {
        for j in 0..FEW {
            let acc = &mut acc[s][j];
            let scale = _mm512_mul_ps(d, _mm512_set1_ps(set.d[j]));
            *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[s][j]), scale, *acc);
            if has_min(U::TY) {
                *acc = _mm512_fmadd_ps(m, _mm512_set1_ps(set.ds[j]), *acc);
            }
        }
    }
}

/// Scales of a block, and its offsets if there are any.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn scales<U: Unpack32>(block: &[u8]) -> [__m512; 2] {
    let d = if matches!(U::TY, TensorType::MXFP4) {
        // Powers of two, a byte each.
        let mut d = [0.0; ROWS];
        U::scales(block, &mut d);
        load_f32(&d)
    } else {
        halves(block, 0)
    };
    let m = if has_min(U::TY) {
        halves(block, 32)
    } else {
        _mm512_setzero_ps()
    };
    [d, m]
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn block32<U: Unpack32, const N: usize>(
    block: &[u8],
    acts: &ActsView<'_>,
    at: &Bases<N>,
    b: usize,
    mut acc: [__m512; N],
) -> [__m512; N] {
    let (codes, [d, m]) = (codes::<U>(block, 0), scales::<U>(block));
    for (t, acc) in acc.iter_mut().enumerate() {
        let d_at = at.d(t, b);
        // What may be missing is found so before codes are loaded: else these go by way of scalar registers, not as operands.
        let (d_a, ds_a, sum) = (acts.d[d_at], acts.ds[d_at], acts.sum32[d_at]);
        let a = run_of(acts, at.q(t, b * 32));
        let mut dot = [_mm512_setzero_si512(); 2];
        if U::BIAS != 0 {
            // Codes are raised by BIAS; what that adds is taken off beforehand.
            dot[0] = _mm512_set1_epi32(-U::BIAS * sum);
        }
        for g in 0..8 {
            dot[g % 2] = _mm512_dpbusd_epi32(dot[g % 2], codes[g], group(a, g));
        }
        let dot = _mm512_cvtepi32_ps(_mm512_add_epi32(dot[0], dot[1]));
        let scale = _mm512_mul_ps(d, _mm512_set1_ps(d_a));
        *acc = _mm512_fmadd_ps(dot, scale, *acc);
        if has_min(U::TY) {
            *acc = _mm512_fmadd_ps(m, _mm512_set1_ps(ds_a), *acc);
        }
    }
    acc
}

/// Tiles of a `Block256` format.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn tiles256<U: Unpack256>(
    w: &TileMatrix<'_>,
    acts: &ActsView<'_>,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    // Of tokens, or of tokens and those that fill their tiles up.
    match acts.tokens() {
        1 => tiles256_of::<U, 1>(w, acts, tiles, out),
        2 => tiles256_of::<U, 2>(w, acts, tiles, out),
        3 => tiles256_of::<U, 3>(w, acts, tiles, out),
        FEW => tiles256_of::<U, FEW>(w, acts, tiles, out),
        _ => tiles256_of::<U, TOKENS_MAX>(w, acts, tiles, out),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn tiles256_of<U: Unpack256, const N: usize>(
    w: &TileMatrix<'_>,
    acts: &ActsView<'_>,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    const BLOCKS: usize = CHUNK / 256;
    let at = Bases::<N>::new(acts);
    for tile in tiles {
        let mut blocks = TileBlocks::new(w, tile);
        let out = Out::new(w, tile, out);
        for first in (0..w.blocks()).step_by(BLOCKS) {
            let mut acc = [_mm512_setzero_ps(); N];
            for b in first..w.blocks().min(first + BLOCKS) {
                acc = block256::<U, N>(&mut blocks, acts, &at, b, acc);
            }
            for (t, acc) in acc.into_iter().enumerate() {
                if N <= FEW || t < acts.tokens() {
                    out.put(t, first == 0, acc);
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn block256<U: Unpack256, const N: usize>(
    blocks: &mut TileBlocks<'_>,
    acts: &ActsView<'_>,
    at: &Bases<N>,
    b: usize,
    mut acc: [__m512; N],
) -> [__m512; N] {
    let subs = if U::SUB32 { 1 } else { 2 };
    let groups = 8 / subs;
    let (mut scale, mut min) = ([[0; ROWS]; 16], [[0; ROWS]; 16]);
    U::subs(blocks.block(b), &mut scale, &mut min);
    let d_at = array!([0; N], |t| at.d(t, b));
    let bias = array!([[0; 16]; N], |t| bias_sums::<U>(acts, d_at[t]));
    let mut total = [_mm512_setzero_si512(); N];
    for run in 0..8 {
        blocks.ahead::<8>(b, run);
        let codes = if U::PLANES.is_some() {
            codes::<U>(blocks.block(b), run)
        } else {
            let mut codes = [0; 512];
            U::codes(blocks.block(b), run, &mut codes);
            array!([_mm512_setzero_si512(); 8], |g| load(&codes, g))
        };
        for t in 0..N {
            let a = run_of(acts, at.q(t, b * 256 + run / 2 * 64) + run % 2 * 32);
            for sub in 0..subs {
                let j = subs * run + sub;
                let mut dot = [_mm512_setzero_si512(); 2];
                if U::BIAS != 0 {
                    dot[0] = _mm512_set1_epi32(bias[t][j]);
                }
                for g in sub * groups..(sub + 1) * groups {
                    dot[g % 2] = _mm512_dpbusd_epi32(dot[g % 2], codes[g], group(a, g));
                }
                let dot = _mm512_add_epi32(dot[0], dot[1]);
                let scaled = _mm512_mullo_epi32(dot, load_i8(&scale[j]));
                total[t] = _mm512_add_epi32(total[t], scaled);
            }
        }
    }
    let block = blocks.block(b);
    let (d_byte, factor) = U::D;
    let d = _mm512_mul_ps(halves(block, d_byte), _mm512_set1_ps(factor));
    for t in 0..N {
        let scale = _mm512_mul_ps(d, _mm512_set1_ps(acts.d[d_at[t]]));
        acc[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[t]), scale, acc[t]);
    }
    let Some(dmin_byte) = U::DMIN else {
        return acc;
    };
    let mut mins = [_mm512_setzero_si512(); N];
    for i in 0..8 {
        let pair = if U::SUB32 {
            [&min[i]; 2]
        } else {
            [&min[2 * i], &min[2 * i + 1]]
        };
        let pair = _mm512_or_si512(load_u8(pair[0]), _mm512_slli_epi32::<16>(load_u8(pair[1])));
        for t in 0..N {
            let sums: &[i16; 2] = acts.sum16[d_at[t] * 16 + 2 * i..][..2]
                .try_into()
                .expect("2 sums");
            mins[t] = dot_pair(mins[t], pair, sums);
        }
    }
    let dmin = halves(block, dmin_byte);
    for t in 0..N {
        let scale = _mm512_mul_ps(dmin, _mm512_set1_ps(acts.d[d_at[t]]));
        acc[t] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(mins[t]), scale, acc[t]);
    }
    acc
}

/// What the codes' bias adds to the dot of each sub-block, negative.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn bias_sums<U: Unpack256>(acts: &ActsView<'_>, d_at: usize) -> [i32; 16] {
    let sums: &[i16; 16] = acts.sum16[d_at * 16..][..16].try_into().expect("16 sums");
    let mut bias = [0; 16];
    if U::SUB32 {
        for (bias, sums) in bias.iter_mut().zip(sums.chunks_exact(2)) {
            *bias = -U::BIAS * (i32::from(sums[0]) + i32::from(sums[1]));
        }
    } else {
        for (bias, sum) in bias.iter_mut().zip(sums) {
            *bias = -U::BIAS * i32::from(*sum);
        }
    }
    bias
}

/// Codes of run `run`: a group of 4 values of 16 rows a register.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn codes<U: Codes>(block: &[u8], run: usize) -> [__m512i; 8] {
    let planes = U::PLANES.expect("a format with planes");
    let (high, low) = planes.of(block, run);
    let mut codes = [_mm512_setzero_si512(); 8];
    match planes.low_bits {
        8 => {
            for (g, code) in codes.iter_mut().enumerate() {
                *code = _mm512_xor_si512(word(low, g), _mm512_set1_epi8(-128));
            }
        }
        4 => {
            let mask = _mm512_set1_epi8(15);
            for g in 0..4 {
                let word = word(low, g);
                codes[g] = _mm512_and_si512(word, mask);
                codes[g + 4] = _mm512_and_si512(_mm512_srli_epi16::<4>(word), mask);
            }
        }
        _ => {
            let mask = _mm512_set1_epi8(3);
            for h in 0..2 {
                let word = word(low, h);
                codes[4 * h] = _mm512_and_si512(word, mask);
                codes[4 * h + 1] = _mm512_and_si512(_mm512_srli_epi16::<2>(word), mask);
                codes[4 * h + 2] = _mm512_and_si512(_mm512_srli_epi16::<4>(word), mask);
                codes[4 * h + 3] = _mm512_and_si512(_mm512_srli_epi16::<6>(word), mask);
            }
        }
    }
    if planes.high_bits > 0 {
        let bits = planes.high_bits;
        let mask = _mm512_set1_epi8((((1 << bits) - 1) << planes.low_bits) as i8);
        for (g, code) in codes.iter_mut().enumerate() {
            let per_word = 8 / bits;
            let word = word(high, g / per_word);
            // The group's bits go where the code's high bits belong.
            let (from, to) = (bits * (g % per_word), planes.low_bits);
            let moved = if from > to {
                _mm512_srl_epi16(word, _mm_cvtsi32_si128((from - to) as i32))
            } else {
                _mm512_sll_epi16(word, _mm_cvtsi32_si128((to - from) as i32))
            };
            // (moved & mask) | code
            *code = _mm512_ternarylogic_epi32::<0xEA>(moved, mask, *code);
        }
    }
    if let Some(table) = &planes.table {
        // SAFETY: 16 bytes are there.
        let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
        for code in &mut codes {
            *code = _mm512_shuffle_epi8(table, *code);
        }
    }
    codes
}

/// Word `i` of a plane, of 16 rows.
#[target_feature(enable = "avx512f")]
#[inline]
fn word(plane: &[u8], i: usize) -> __m512i {
    let word: &[u8; 64] = plane[64 * i..][..64].try_into().expect("64 bytes");
    // SAFETY: 64 bytes are there.
    unsafe { _mm512_loadu_si512(word.as_ptr().cast()) }
}

/// Sixteen halves from byte `at` on, in single precision (exact, subnormals too).
#[target_feature(enable = "avx512f,avx512vl")]
#[inline]
fn halves(block: &[u8], at: usize) -> __m512 {
    let bytes: &[u8; 32] = block[at..][..32].try_into().expect("16 halves");
    // SAFETY: 32 bytes are there.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) })
}

/// Sixteen unsigned bytes as integers.
#[target_feature(enable = "avx512f")]
#[inline]
fn load_u8(x: &[u8; 16]) -> __m512i {
    // SAFETY: 16 bytes are there.
    _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(x.as_ptr().cast()) })
}

/// A token's codes of one run.
#[inline(always)]
fn run_of<'a>(acts: &'a ActsView<'_>, at: usize) -> &'a [i8; 32] {
    acts.q[at..at + 32].try_into().expect("32 codes")
}
