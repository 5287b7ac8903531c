//! Quantised products of a few tokens with AVX2: weights go from memory through registers once, and nowhere else.
//!
//! A register holds 8 rows, half a tile. The halves take turns block by block, so that a half's codes and the tokens' sums fit
//! 16 registers; what they read of a block then lies in the first-level cache.

use super::unpacked::TileBlocks;
use crate::acts::{ActsView, LONE};
use crate::mem::{ALIGN as LINE, Plain, Shared, fetch_ahead};
use crate::simd::array;
use gguf::TensorType;
use quant::lanes::{Codes, Minima, Run, Scales, Unpack32, Unpack256};
use quant::product::{CHUNK, has_min};
use quant::tile::{ROWS, TileMatrix};
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

/// Up to this many tokens of super-blocks are computed here; and of blocks of 32 up to [`LONE`].
pub(super) const TOKENS_MAX: usize = 4;

/// Rows a register: half a tile.
pub(super) const HALF: usize = ROWS / 2;

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

    /// Fetches what [`Self::put`] will write.
    #[inline(always)]
    pub(super) fn fetch(self, t: usize) {
        // SAFETY: each tile writes its own rows of every token.
        let out = unsafe { self.out.part(t * self.n + self.row, self.rows) };
        // SAFETY: a prefetch is only a hint and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(out.as_ptr().cast()) };
    }

    /// Stores a chunk's sums of tokens `t ..`, or adds them to what the chunks before gave.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    pub(super) fn put<const N: usize>(self, t: usize, first: bool, acc: [[__m256; N]; 2]) {
        let [low, high] = acc;
        for (j, halves) in low.into_iter().zip(high).enumerate() {
            // SAFETY: each tile writes its own rows of every token.
            let out = unsafe { self.out.part((t + j) * self.n + self.row, self.rows) };
            if let Ok(out) = <&mut [f32; ROWS]>::try_from(&mut *out) {
                put_half(&mut out[..HALF], first, halves.0);
                put_half(&mut out[HALF..], first, halves.1);
                continue;
            }
            // A last tile of fewer rows.
            let mut sums = [0.0; ROWS];
            put_half(&mut sums[..HALF], true, halves.0);
            put_half(&mut sums[HALF..], true, halves.1);
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = if first { sum } else { *out + sum };
            }
        }
    }
}

/// Sets the first chunk's sums of half a tile, adds another's.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn put_half(out: &mut [f32], first: bool, mut sums: __m256) {
    assert_eq!(out.len(), HALF, "half a tile");
    // SAFETY: 8 values are there.
    unsafe {
        if !first {
            sums = _mm256_add_ps(_mm256_loadu_ps(out.as_ptr()), sums);
        }
        _mm256_storeu_ps(out.as_mut_ptr(), sums);
    }
}

/// Where the tokens' codes and scales begin.
pub(super) struct Bases<const N: usize> {
    q: [usize; N],
    d: [usize; N],
    height: usize,
}

impl<const N: usize> Bases<N> {
    /// Of the first `N` tokens, those that fill the last tile up among them.
    pub(super) fn new(acts: &ActsView<'_>) -> Self {
        Self {
            q: array!([0; N], |t| acts.q_base(t)),
            d: array!([0; N], |t| acts.d_base(t)),
            height: acts.height(),
        }
    }

    /// Where block `b` of token `t` lies, as in [`ActsView::d_at`].
    #[inline(always)]
    pub(super) fn d(&self, t: usize, b: usize) -> usize {
        self.d[t] + b * self.height
    }

    /// Where value `k` of token `t` lies, as in [`ActsView::q_at`].
    #[inline(always)]
    pub(super) fn q(&self, t: usize, k: usize) -> usize {
        self.q[t] + k * self.height
    }
}

/// Tiles of a `Block32` format.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tiles32<U: Unpack32>(
    w: &TileMatrix<'_>,
    acts: &ActsView<'_>,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    match acts.tokens() {
        1 => tiles32_of::<U, 1>(w, acts, tiles, out),
        2 => tiles32_of::<U, 2>(w, acts, tiles, out),
        _ => tiles32_of::<U, LONE>(w, acts, tiles, out),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn tiles32_of<U: Unpack32, const N: usize>(
    w: &TileMatrix<'_>,
    acts: &ActsView<'_>,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    const BLOCKS: usize = CHUNK / 32;
    let at = Bases::<N>::new(acts);
    for tile in tiles {
        let mut blocks = Blocks::<U>::new(w, tile);
        let out = Out::new(w, tile, out);
        for first in (0..w.blocks()).step_by(BLOCKS) {
            let mut acc = [[_mm256_setzero_ps(); N]; 2];
            for b in first..w.blocks().min(first + BLOCKS) {
                let block = blocks.block(b);
                ahead::<U, 1>(block, 0);
                for (half, acc) in acc.iter_mut().enumerate() {
                    *acc = block32::<U, N>(block, half, acts, &at, b, *acc);
                }
            }
            out.put(0, first == 0, acc);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn block32<U: Unpack32, const N: usize>(
    block: &[u8],
    half: usize,
    acts: &ActsView<'_>,
    at: &Bases<N>,
    b: usize,
    mut acc: [__m256; N],
) -> [__m256; N] {
    let codes = codes::<U>(block, 0, half);
    let d = scales::<U>(block, half);
    for (t, acc) in acc.iter_mut().enumerate() {
        let d_at = at.d(t, b);
        let a = run_of(acts, at.q(t, b * 32));
        let mut dot = dot::<U>(&codes, a, 0..8, _mm256_set1_epi16(1));
        if bias::<U>() != 0 {
            let off = _mm256_set1_epi32(bias::<U>() * acts.sum32[d_at]);
            dot = _mm256_sub_epi32(dot, off);
        }
        let scale = _mm256_mul_ps(d, _mm256_set1_ps(acts.d[d_at]));
        *acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, *acc);
        if has_min(U::TY) {
            let m = halves(block, 2 * ROWS, half);
            *acc = _mm256_fmadd_ps(m, _mm256_set1_ps(acts.ds[d_at]), *acc);
        }
    }
    acc
}

/// Tiles of a `Block256` format.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tiles256<U: Unpack256>(
    w: &TileMatrix<'_>,
    acts: &ActsView<'_>,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    match acts.tokens() {
        1 => tiles256_of::<U, 1>(w, acts, tiles, out),
        2 => tiles256_of::<U, 2>(w, acts, tiles, out),
        3 => tiles256_of::<U, 3>(w, acts, tiles, out),
        _ => tiles256_of::<U, TOKENS_MAX>(w, acts, tiles, out),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn tiles256_of<U: Unpack256, const N: usize>(
    w: &TileMatrix<'_>,
    acts: &ActsView<'_>,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    const BLOCKS: usize = CHUNK / 256;
    let at = Bases::<N>::new(acts);
    for tile in tiles {
        let mut blocks = Blocks::<U>::new(w, tile);
        let out = Out::new(w, tile, out);
        for first in (0..w.blocks()).step_by(BLOCKS) {
            let mut acc = [[_mm256_setzero_ps(); N]; 2];
            for b in first..w.blocks().min(first + BLOCKS) {
                block256::<U, N>(blocks.block(b), acts, &at, b, &mut acc);
            }
            out.put(0, first == 0, acc);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn block256<U: Unpack256, const N: usize>(
    block: &[u8],
    acts: &ActsView<'_>,
    at: &Bases<N>,
    b: usize,
    acc: &mut [[__m256; N]; 2],
) {
    let subs = if U::SUB32 { 1 } else { 2 };
    let groups = 8 / subs;
    let block = of_size::<U>(block);
    let (mut scale, mut min): (Scales, Minima) = ([[0; ROWS]; 16], [[0; ROWS]; 16]);
    U::subs(block, &mut scale, &mut min);
    let mut runs: [Run; 8] = [[0; 512]; 8];
    if U::PLANES.is_none() {
        for (run, codes) in runs.iter_mut().enumerate() {
            U::codes(block, run, codes);
        }
    }
    let d_at = array!([0; N], |t| at.d(t, b));
    let mut sums = [[0; 8]; N];
    if U::DMIN.is_some() || bias::<U>() != 0 {
        sums = array!([[0; 8]; N], |t| sum_pairs::<U>(acts, d_at[t]));
    }
    for (half, acc) in acc.iter_mut().enumerate() {
        let mut total = [_mm256_setzero_si256(); N];
        for run in 0..8 {
            ahead::<U, 16>(block, 8 * half + run);
            let codes = if U::PLANES.is_some() {
                codes::<U>(block, run, half)
            } else {
                array!([_mm256_setzero_si256(); 8], |g| word(&runs[run], g, half))
            };
            for sub in 0..subs {
                let scale = twice(&scale[subs * run + sub], half);
                for (t, total) in total.iter_mut().enumerate() {
                    let a = run_of(acts, at.q(t, b * 256 + run / 2 * 64) + run % 2 * 32);
                    let of_sub = sub * groups..(sub + 1) * groups;
                    let dot = dot::<U>(&codes, a, of_sub, scale);
                    *total = _mm256_add_epi32(*total, dot);
                }
            }
        }
        let (d_byte, factor) = U::D;
        let d = _mm256_mul_ps(halves(block, d_byte, half), _mm256_set1_ps(factor));
        if bias::<U>() != 0 {
            let mut off = [_mm256_setzero_si256(); N];
            for i in 0..pairs::<U>() {
                let pair = _mm256_cvtepi8_epi16(byte_pairs(&scale[2 * i], &scale[2 * i + 1], half));
                for t in 0..N {
                    let sums = _mm256_set1_epi32(sums[t][i]);
                    off[t] = _mm256_add_epi32(off[t], _mm256_madd_epi16(pair, sums));
                }
            }
            for t in 0..N {
                let off = _mm256_mullo_epi32(off[t], _mm256_set1_epi32(bias::<U>()));
                total[t] = _mm256_sub_epi32(total[t], off);
            }
        }
        for t in 0..N {
            let scale = _mm256_mul_ps(d, _mm256_set1_ps(acts.d[d_at[t]]));
            acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total[t]), scale, acc[t]);
        }
        let Some(dmin_byte) = U::DMIN else {
            continue;
        };
        let mut mins = [_mm256_setzero_si256(); N];
        for i in 0..pairs::<U>() {
            let pair = _mm256_cvtepu8_epi16(byte_pairs(&min[2 * i], &min[2 * i + 1], half));
            for t in 0..N {
                let sums = _mm256_set1_epi32(sums[t][i]);
                mins[t] = _mm256_add_epi32(mins[t], _mm256_madd_epi16(pair, sums));
            }
        }
        let dmin = halves(block, dmin_byte, half);
        for t in 0..N {
            let scale = _mm256_mul_ps(dmin, _mm256_set1_ps(acts.d[d_at[t]]));
            acc[t] = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(mins[t]), scale, acc[t]);
        }
    }
}

/// How many pairs of sub-blocks a super-block has.
pub(super) const fn pairs<U: Unpack256>() -> usize {
    if U::SUB32 { 4 } else { 8 }
}

/// Sums of the activations of pairs of sub-blocks, a pair of 16-bit numbers each.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn sum_pairs<U: Unpack256>(acts: &ActsView<'_>, d_at: usize) -> [i32; 8] {
    let sums: &[i16; 16] = acts.sum16[d_at * 16..][..16].try_into().expect("16 sums");
    // SAFETY: 16 sums are there.
    let mut pairs = unsafe { _mm256_loadu_si256(sums.as_ptr().cast()) };
    if U::SUB32 {
        let sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        pairs = _mm256_permute4x64_epi64::<0b1000>(_mm256_packs_epi32(sums, sums));
    }
    let mut out = [0; 8];
    // SAFETY: room for 8 numbers is there.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), pairs) };
    out
}

/// Groups whose products fit a 16-bit sum: `groups * 2 * (2^bits - 1) * 127 <= 32767`, and half as much for eight bits, where
/// codes are signed.
pub(super) const fn groups_a_sum(bits: u32) -> usize {
    match bits {
        0..=4 => 8,
        5 => 4,
        6 => 2,
        _ => 1,
    }
}

/// What codes multiplied by [`dot`] are raised by: 8-bit ones are not.
pub(super) const fn bias<U: Codes>() -> i32 {
    if U::BITS == 8 { 0 } else { U::BIAS }
}

/// Sum over groups of codes times activations, times a scale (twice a lane).
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn dot<U: Codes>(
    codes: &[__m256i; 8],
    a: &[i8; 32],
    groups: Range<usize>,
    scale: __m256i,
) -> __m256i {
    let a_sum = groups_a_sum(U::BITS);
    let mut total = _mm256_setzero_si256();
    let mut words = _mm256_setzero_si256();
    for g in groups.clone() {
        let (w, a) = (codes[g], group(a, g));
        let products = if U::BITS == 8 {
            // Unsigned times signed it must be: the sign moves. |w| <= 128 and |a| <= 127 give at most 32512 a pair.
            _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w))
        } else {
            _mm256_maddubs_epi16(w, a)
        };
        words = _mm256_add_epi16(words, products);
        if (g + 1) % a_sum == 0 || g + 1 == groups.end {
            total = _mm256_add_epi32(total, _mm256_madd_epi16(words, scale));
            words = _mm256_setzero_si256();
        }
    }
    total
}

/// Bytes of a full tile's block.
const fn bytes<U: Codes>() -> usize {
    ROWS * U::TY.block_bytes()
}

/// A full tile's block, its size known to the compiler.
#[inline(always)]
fn of_size<U: Codes>(block: &[u8]) -> &[u8] {
    &block[..bytes::<U>()]
}

/// Blocks of a tile, of a size known to the compiler.
pub(super) struct Blocks<'a, U> {
    tile: &'a [u8],
    /// For a last tile of fewer rows.
    padded: Option<TileBlocks<'a>>,
    format: PhantomData<U>,
}

impl<'a, U: Codes> Blocks<'a, U> {
    pub(super) fn new(w: &'a TileMatrix<'a>, tile: usize) -> Self {
        Self {
            tile: w.tile(tile),
            padded: (w.tile_rows(tile) < ROWS).then(|| TileBlocks::new(w, tile)),
            format: PhantomData,
        }
    }

    #[inline(always)]
    pub(super) fn block(&mut self, b: usize) -> &[u8] {
        match &mut self.padded {
            None => of_size::<U>(&self.tile[b * bytes::<U>()..]),
            Some(padded) => of_size::<U>(padded.block(b)),
        }
    }
}

/// Fetches a `1 / PARTS` of what lies some way behind a block.
#[inline(always)]
pub(super) fn ahead<U: Codes, const PARTS: usize>(block: &[u8], part: usize) {
    let lines = bytes::<U>().div_ceil(LINE);
    for line in lines * part / PARTS..lines * (part + 1) / PARTS {
        fetch_ahead(&block[line * LINE..]);
    }
}

/// Codes of run `run` of half a tile, a group of 4 values of 8 rows a register; those of 8 bits signed, not raised.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn codes<U: Codes>(block: &[u8], run: usize, half: usize) -> [__m256i; 8] {
    let mut codes = [_mm256_setzero_si256(); 8];
    each_group!(|g| {
        codes[g] = code::<U>(block, run, g, half);
    });
    codes
}

/// Group `g` of [`codes`].
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn code<U: Codes>(block: &[u8], run: usize, g: usize, half: usize) -> __m256i {
    let planes = U::PLANES.expect("a format with planes");
    let (high, low) = planes.of(block, run);
    let mut code = plane(low, planes.low_bits, g, half, 0);
    if planes.high_bits > 0 {
        let high = plane(high, planes.high_bits, g, half, planes.low_bits);
        code = _mm256_or_si256(high, code);
    }
    if let Some(table) = &planes.table {
        // SAFETY: 16 bytes are there.
        let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
        let raised = _mm256_set1_epi8(if U::BITS == 8 { -128 } else { 0 });
        code = _mm256_shuffle_epi8(_mm256_xor_si256(table, raised), code);
    }
    code
}

/// Group `g`'s bits of a plane of `bits` a code, moved up to bit `to`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn plane(plane: &[u8], bits: usize, g: usize, half: usize, to: usize) -> __m256i {
    // Nibbles lie with those of the group four further, fewer bits with those of their neighbours.
    let (i, from) = match bits {
        8 => return word(plane, g, half),
        4 => (g % 4, g / 4 * 4),
        bits => (g / (8 / bits), g % (8 / bits) * bits),
    };
    let word = word(plane, i, half);
    let moved = if from > to {
        _mm256_srl_epi16(word, _mm_cvtsi32_si128((from - to) as i32))
    } else {
        _mm256_sll_epi16(word, _mm_cvtsi32_si128((to - from) as i32))
    };
    let mask = _mm256_set1_epi8((((1 << bits) - 1) << to) as i8);
    _mm256_and_si256(moved, mask)
}

/// Word `i` of a plane, of half a tile.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn word(plane: &[u8], i: usize, half: usize) -> __m256i {
    let word: &[u8; 32] = plane[64 * i + 32 * half..][..32]
        .try_into()
        .expect("32 bytes");
    // SAFETY: 32 bytes are there.
    unsafe { _mm256_loadu_si256(word.as_ptr().cast()) }
}

/// Scales of a `Block32` format.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn scales<U: Unpack32>(block: &[u8], half: usize) -> __m256 {
    if matches!(U::TY, TensorType::MXFP4) {
        // Powers of two, a byte each.
        let mut d = [0.0; ROWS];
        U::scales(block, &mut d);
        // SAFETY: 8 values are there.
        unsafe { _mm256_loadu_ps(d[HALF * half..][..HALF].as_ptr()) }
    } else {
        halves(block, 0, half)
    }
}

/// Half a tile's halves, which begin at byte `at`, in single precision (exact, subnormals too).
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn halves(block: &[u8], at: usize, half: usize) -> __m256 {
    let bytes: &[u8; 16] = block[at + 16 * half..][..16].try_into().expect("8 halves");
    // SAFETY: 16 bytes are there.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
}

/// Half a tile's bytes, in the lower half of a register.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn half_of<T: Plain>(bytes: &[T; ROWS], half: usize) -> __m128i {
    let bytes = &bytes[HALF * half..][..HALF];
    // SAFETY: 8 bytes are there.
    unsafe { _mm_loadl_epi64(bytes.as_ptr().cast()) }
}

/// Bytes of two sub-blocks of half a tile, row by row.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn byte_pairs<T: Plain>(low: &[T; ROWS], high: &[T; ROWS], half: usize) -> __m128i {
    _mm_unpacklo_epi8(half_of(low, half), half_of(high, half))
}

/// Half a tile's scales, each twice in its lane: 16-bit dot products with it scale both words.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn twice(scale: &[i8; ROWS], half: usize) -> __m256i {
    // The low word of each lane, over both.
    let low = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13,
    ));
    _mm256_shuffle_epi8(_mm256_cvtepi8_epi32(half_of(scale, half)), low)
}

/// A token's codes of one run.
#[inline(always)]
pub(super) fn run_of<'a>(acts: &'a ActsView<'_>, at: usize) -> &'a [i8; 32] {
    acts.q[at..at + 32].try_into().expect("32 codes")
}

/// Group `g` of activations in every lane.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn group(a: &[i8], g: usize) -> __m256i {
    let group: [i8; 4] = a[4 * g..][..4].try_into().expect("4 codes");
    _mm256_set1_epi32(i32::from_le_bytes([
        group[0] as u8,
        group[1] as u8,
        group[2] as u8,
        group[3] as u8,
    ]))
}
