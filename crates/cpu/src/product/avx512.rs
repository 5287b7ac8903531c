//! Quantised products with AVX-512 VNNI: 16 rows a register, a group of 4 values a lane.

use super::unpacked::{CHUNK32, CHUNK256, Chunk32, Super256, TileBlocks};
use crate::acts::ActsView;
use crate::mem::Shared;
use crate::simd::array;
use quant::lanes::{Unpack32, Unpack256};
use quant::product::has_min;
use quant::tile::{ROWS, TileMatrix};
use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

/// Where a tile's results go.
#[derive(Clone, Copy)]
pub(super) struct Out<'a> {
    out: &'a Shared<'a, f32>,
    n: usize,
    row: usize,
    rows: usize,
}

impl<'a> Out<'a> {
    pub(super) fn new(w: &TileMatrix<'_>, tile: usize, out: &'a Shared<'a, f32>) -> Self {
        Self {
            out,
            n: w.n(),
            row: tile * ROWS,
            rows: w.tile_rows(tile),
        }
    }

    /// Stores a chunk's sums of token `t`, or adds them to what the chunks before gave.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    #[inline]
    pub(super) fn put(self, t: usize, first: bool, acc: __m512) {
        let mask = ((1u32 << self.rows) - 1) as u16;
        // SAFETY: each tile writes its own rows of every token; masked lanes are not touched.
        unsafe {
            let p = self.out.part(t * self.n + self.row, self.rows).as_mut_ptr();
            let sum = if first {
                acc
            } else {
                _mm512_add_ps(_mm512_maskz_loadu_ps(mask, p), acc)
            };
            _mm512_mask_storeu_ps(p, mask, sum);
        }
    }
}

/// Calls `$f::<U, N>(.., t)` with the largest N of 8, 4, 2, 1 until all tokens are done.
macro_rules! by_tokens {
    ($tokens:expr, |$t:ident, $n:ident| $call:expr) => {{
        let mut $t = 0;
        while $t < $tokens {
            match $tokens - $t {
                8.. => {
                    const $n: usize = 8;
                    $call;
                    $t += 8;
                }
                4.. => {
                    const $n: usize = 4;
                    $call;
                    $t += 4;
                }
                2.. => {
                    const $n: usize = 2;
                    $call;
                    $t += 2;
                }
                _ => {
                    const $n: usize = 1;
                    $call;
                    $t += 1;
                }
            }
        }
    }};
}

/// Tiles of a `Block32` format.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn tiles32<U: Unpack32>(
    w: &TileMatrix<'_>,
    acts: &ActsView<'_>,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    let mut chunk = Chunk32::zero();
    for tile in tiles {
        let mut blocks = TileBlocks::new(w, tile);
        let out = Out::new(w, tile, out);
        for first in (0..w.blocks()).step_by(CHUNK32) {
            let n = chunk.unpack::<U, false>(&mut blocks, first);
            by_tokens!(acts.tokens(), |t, N| tokens32::<U, N>(
                &blocks, &chunk, first, n, acts, t, out
            ));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn tokens32<U: Unpack32, const N: usize>(
    blocks: &TileBlocks<'_>,
    chunk: &Chunk32,
    first: usize,
    n: usize,
    acts: &ActsView<'_>,
    t: usize,
    out: Out<'_>,
) {
    let mut acc = [_mm512_setzero_ps(); N];
    let height = acts.height();
    let q_base = array!([0; N], |j| acts.q_base(t + j));
    let d_base = array!([0; N], |j| acts.d_base(t + j));
    for b in 0..n {
        if t == 0 {
            blocks.ahead_of_chunk(first + b);
        }
        let k = (first + b) * 32 * height;
        let a = array!([&[0i8; 32]; N], |j| {
            acts.q[q_base[j] + k..][..32].try_into().expect("32 codes")
        });
        let d_at = array!([0; N], |j| d_base[j] + (first + b) * height);
        // Codes are raised by BIAS; what that adds is taken off beforehand.
        let mut dot = array!([_mm512_setzero_si512(); N], |j| {
            if U::BIAS == 0 {
                _mm512_setzero_si512()
            } else {
                _mm512_set1_epi32(-U::BIAS * acts.sum32[d_at[j]])
            }
        });
        for g in 0..8 {
            let w = load(&chunk.q[b], g);
            for j in 0..N {
                dot[j] = _mm512_dpbusd_epi32(dot[j], w, group(a[j], g));
            }
        }
        let d = load_f32(&chunk.d[b]);
        for j in 0..N {
            let scale = _mm512_mul_ps(d, _mm512_set1_ps(acts.d[d_at[j]]));
            acc[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[j]), scale, acc[j]);
            if has_min(U::TY) {
                acc[j] = _mm512_fmadd_ps(
                    load_f32(&chunk.m[b]),
                    _mm512_set1_ps(acts.ds[d_at[j]]),
                    acc[j],
                );
            }
        }
    }
    for (j, acc) in acc.into_iter().enumerate() {
        out.put(t + j, first == 0, acc);
    }
}

/// Tiles of a `Block256` format.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn tiles256<U: Unpack256>(
    w: &TileMatrix<'_>,
    acts: &ActsView<'_>,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    let mut chunk = [const { Super256::zero() }; CHUNK256];
    for tile in tiles {
        let mut blocks = TileBlocks::new(w, tile);
        let out = Out::new(w, tile, out);
        for first in (0..w.blocks()).step_by(CHUNK256) {
            let n = CHUNK256.min(w.blocks() - first);
            for (i, block) in chunk[..n].iter_mut().enumerate() {
                block.unpack::<U>(&mut blocks, first + i);
            }
            by_tokens!(acts.tokens(), |t, N| tokens256::<U, N>(
                &blocks,
                &chunk[..n],
                first,
                acts,
                t,
                out
            ));
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn tokens256<U: Unpack256, const N: usize>(
    blocks: &TileBlocks<'_>,
    chunk: &[Super256],
    first: usize,
    acts: &ActsView<'_>,
    t: usize,
    out: Out<'_>,
) {
    let mut acc = [_mm512_setzero_ps(); N];
    let height = acts.height();
    let q_base = array!([0; N], |j| acts.q_base(t + j));
    let d_base = array!([0; N], |j| acts.d_base(t + j));
    for (i, block) in chunk.iter().enumerate() {
        let b = first + i;
        let d_at = array!([0; N], |j| d_base[j] + b * height);
        let mut total = [_mm512_setzero_si512(); N];
        for run in 0..8 {
            if t == 0 {
                blocks.ahead::<8>(b, run);
            }
            let k = (b * 256 + run / 2 * 64) * height + run % 2 * 32;
            let a = array!([&[0i8; 32]; N], |j| {
                acts.q[q_base[j] + k..][..32].try_into().expect("32 codes")
            });
            let subs = if U::SUB32 { 1 } else { 2 };
            let groups = 8 / subs;
            for sub in 0..subs {
                let mut dot = array!([_mm512_setzero_si512(); N], |j| {
                    if U::BIAS == 0 {
                        _mm512_setzero_si512()
                    } else {
                        let sums = &acts.sum16[d_at[j] * 16 + 2 * run + sub..];
                        let second = if U::SUB32 { i32::from(sums[1]) } else { 0 };
                        _mm512_set1_epi32(-U::BIAS * (i32::from(sums[0]) + second))
                    }
                });
                for g in sub * groups..(sub + 1) * groups {
                    let w = load(&block.q[run], g);
                    for j in 0..N {
                        dot[j] = _mm512_dpbusd_epi32(dot[j], w, group(a[j], g));
                    }
                }
                let scale = load_i8(&block.scale[subs * run + sub]);
                for j in 0..N {
                    total[j] = _mm512_add_epi32(total[j], _mm512_mullo_epi32(dot[j], scale));
                }
            }
        }
        let d = load_f32(&block.d);
        for j in 0..N {
            let scale = _mm512_mul_ps(d, _mm512_set1_ps(acts.d[d_at[j]]));
            acc[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[j]), scale, acc[j]);
            if has_min(U::TY) {
                acc[j] = subtract_min(block, acts, d_at[j], acc[j]);
            }
        }
    }
    for (j, acc) in acc.into_iter().enumerate() {
        out.put(t + j, first == 0, acc);
    }
}

/// `fma(f32(sum of minima times sums of activations), -(dmin * d_a), acc)`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn subtract_min(block: &Super256, acts: &ActsView<'_>, d_at: usize, acc: __m512) -> __m512 {
    let sums = acts.sum16[d_at * 16..][..16].try_into().expect("16 sums");
    let pairs = array!([_mm512_setzero_si512(); 8], |i| load_i32(
        &block.min_pairs[i]
    ));
    let scale = _mm512_mul_ps(load_f32(&block.dmin), _mm512_set1_ps(acts.d[d_at]));
    _mm512_fnmadd_ps(_mm512_cvtepi32_ps(weigh_minima(&pairs, sums)), scale, acc)
}

/// Sum of a super-block's minima, in pairs, times a token's sums of activations.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
pub(super) fn weigh_minima(pairs: &[__m512i; 8], sums: &[i16; 16]) -> __m512i {
    let mut mins = _mm512_setzero_si512();
    for (pairs, sums) in pairs.iter().zip(sums.as_chunks::<2>().0) {
        mins = dot_pair(mins, *pairs, sums);
    }
    mins
}

/// `vpdpwssd` with one pair for all lanes. As an intrinsic it becomes a product, a broadcast and a sum of its own.
#[target_feature(enable = "avx512f,avx512vnni")]
#[inline]
pub(super) fn dot_pair(mut acc: __m512i, pairs: __m512i, sums: &[i16; 2]) -> __m512i {
    // SAFETY: reads the 4 bytes of `sums`; the instruction exists (target feature).
    unsafe {
        asm!("vpdpwssd {acc}, {pairs}, dword ptr [{sums}]{{1to16}}", acc = inout(zmm_reg) acc, pairs = in(zmm_reg) pairs,
            sums = in(reg) sums, options(pure, readonly, nostack));
    }
    acc
}

/// Group `g` of a run of activations in every lane.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn group(a: &[i8; 32], g: usize) -> __m512i {
    let group: [i8; 4] = a[4 * g..][..4].try_into().expect("4 codes");
    _mm512_set1_epi32(i32::from_le_bytes(group.map(|a| a as u8)))
}

/// Group `g` of a run of weights.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn load(run: &[u8; 512], g: usize) -> __m512i {
    let bytes: &[u8; 64] = run[64 * g..][..64].try_into().expect("64 bytes");
    // SAFETY: 64 bytes are there.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn load_f32(x: &[f32; 16]) -> __m512 {
    // SAFETY: 16 values are there.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}

#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn load_i32(x: &[i32; 16]) -> __m512i {
    // SAFETY: 16 values are there.
    unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
}

/// Sixteen bytes as integers.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn load_i8(x: &[i8; 16]) -> __m512i {
    // SAFETY: 16 bytes are there.
    _mm512_cvtepi8_epi32(unsafe { _mm_loadu_si128(x.as_ptr().cast()) })
}
