//! Products of super-blocks of many tokens with AVX2: 8 rows a register, a group of 4 values a lane. A chunk of a tile is unpacked into the
//! first-level cache and multiplied with [`FEW`] tokens after [`FEW`] tokens, with both halves of the tile at once: what is read of a token
//! serves 16 rows.
//!
//! `vpmaddubsw` multiplies unsigned bytes with signed ones and adds neighbours into 16 bits. What is free is which of the two
//! is unsigned, and how many groups share a 16-bit sum before `vpmaddwd` widens it, with the sub-scale as its factor. Sums wrap;
//! only a group's products (which saturate) and the sum at the end must fit.
//!
//! | form | codes | products | |
//! |---|---|---|---|
//! | `Unsigned` | not raised | code times activation | |
//! | `Signed` | other raised ones, up to 7 bits | activation + 128 times value | 128 times the values' sums are taken off, once a tile |
//! | `Wide` | 8 bits | `vpmaddwd` of 16-bit values | its sums are 32 bits; sub-scales are in the values |

#![allow(
    clippy::needless_range_loop,
    reason = "rows, halves and tokens of several arrays at once"
)]

use super::gemv256::{
    Blocks, Out, ahead, byte_pairs, codes, group, halves, pairs, sum_pairs, twice, word,
};
use super::unpacked::CHUNK256;
use crate::acts::{ActsView, FEW};
use crate::mem::Shared;
use crate::simd::array;
use quant::act::BLOCK256;
use quant::lanes::{Codes, Minima, Run, Scales, Unpack256};
use quant::product::CHUNK;
use quant::tile::{ROWS, TileMatrix};
use std::arch::x86_64::*;
use std::ops::Range;

/// Runs of 32 values a chunk.
const RUNS: usize = CHUNK / 32;

/// Largest magnitude of an activation's code.
const ACT_MAX: u32 = 127;

/// What `Signed` adds to activations.
const ACT_BIAS: i8 = -128;

/// How codes are multiplied.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Unsigned,
    Signed,
    Wide,
}

const fn form<U: Codes>() -> Form {
    match (U::BITS, U::BIAS) {
        (8, _) => Form::Wide,
        (_, 0) => Form::Unsigned,
        _ => Form::Signed,
    }
}

/// Registers a group of weights.
const fn registers<U: Codes>() -> usize {
    match form::<U>() {
        Form::Wide => 2,
        _ => 1,
    }
}

/// Groups (a power of two) whose products with activations fit a 16-bit sum, within the smallest sub-block.
const fn groups_a_sum<U: Codes>() -> usize {
    let (codes, bias) = ((1 << U::BITS) - 1, U::BIAS as u32);
    let mut largest = match form::<U>() {
        Form::Signed if bias > codes - bias => bias,
        Form::Signed => codes - bias,
        _ => codes,
    };
    if let Some(planes) = U::PLANES
        && let Some(table) = planes.table
    {
        largest = 0;
        let mut i = 0;
        while i < table.len() {
            let value = (table[i] as i32 - U::BIAS).unsigned_abs();
            largest = if value > largest { value } else { largest };
            i += 1;
        }
    }
    // What `Signed` begins a sum with is kept for each sum, whose scale may be that of 16 values.
    let may_be_8 = matches!(form::<U>(), Form::Unsigned);
    match i16::MAX as u32 / (2 * ACT_MAX * largest) {
        8.. if may_be_8 => 8,
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

/// A chunk of half a tile after half a tile, as the forms multiply it.
struct Weights {
    /// `[run][half][register of a group]`, as many as the form has.
    q: [__m256i; RUNS * 2 * 16],
    /// `Signed`: what sums begin with, `[run][half][sum]`.
    start: [__m256i; RUNS * 2 * 4],
}

impl Weights {
    #[target_feature(enable = "avx2,fma,f16c")]
    fn new() -> Self {
        Self {
            q: [_mm256_setzero_si256(); RUNS * 2 * 16],
            start: [_mm256_setzero_si256(); RUNS * 2 * 4],
        }
    }

    /// Sets a run of half a tile; `scale(group)` is what `Wide` multiplies its values with.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn set<U: Codes>(
        &mut self,
        run: usize,
        half: usize,
        codes: [__m256i; 8],
        scale: Option<__m256i>,
    ) {
        let n = 8 * registers::<U>();
        let at = 2 * run + half;
        let q = &mut self.q[at * n..][..n];
        match form::<U>() {
            Form::Unsigned => q.copy_from_slice(&codes),
            Form::Signed => {
                let sums = 8 / groups_a_sum::<U>();
                let start = &mut self.start[at * sums..][..sums];
                start.fill(_mm256_setzero_si256());
                for (g, code) in codes.into_iter().enumerate() {
                    q[g] = _mm256_sub_epi8(code, _mm256_set1_epi8(U::BIAS as i8));
                    let raised = _mm256_maddubs_epi16(_mm256_set1_epi8(ACT_BIAS), q[g]);
                    let start = &mut start[g / groups_a_sum::<U>()];
                    *start = _mm256_sub_epi16(*start, raised);
                }
            }
            Form::Wide => {
                for (g, code) in codes.into_iter().enumerate() {
                    let mut wide = even_odd(code);
                    if let Some(scale) = scale {
                        wide = [
                            _mm256_mullo_epi16(wide[0], scale),
                            _mm256_mullo_epi16(wide[1], scale),
                        ];
                    }
                    [q[2 * g], q[2 * g + 1]] = wide;
                }
            }
        }
    }

    /// A run: of half a tile what is multiplied, and what sums begin with.
    #[inline(always)]
    fn of<U: Codes>(&self, run: usize) -> [Half<'_>; 2] {
        let n = 8 * registers::<U>();
        let sums = 8 / groups_a_sum::<U>();
        std::array::from_fn(|half| {
            let at = 2 * run + half;
            let start: &[__m256i] = match form::<U>() {
                Form::Signed => &self.start[at * sums..][..sums],
                _ => &[],
            };
            (&self.q[at * n..][..n], start)
        })
    }
}

/// Weights of a run of half a tile, and what `Signed` begins sums with.
type Half<'a> = (&'a [__m256i], &'a [__m256i]);

/// What a set's products with a tile sum up to: `[half][token]`, 8 rows a register.
pub(super) type Sums<T> = [[T; FEW]; 2];

/// Bytes as 16-bit numbers: those of even and those of odd places.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn even_odd(x: __m256i) -> [__m256i; 2] {
    [
        _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x)),
        _mm256_srai_epi16::<8>(x),
    ]
}

/// Room for a chunk of a set's activations.
#[repr(align(64))]
struct Room {
    q: [i8; 2 * CHUNK * FEW],
}

impl Room {
    const ZERO: Self = Self {
        q: [0; 2 * CHUNK * FEW],
    };
}

/// A chunk of the activations of a set of tokens, as the form multiplies them.
struct Tokens<'a> {
    /// `[unit][token][unit bytes]`, unit as in [`ActsView`].
    q: &'a [i8],
    /// Bytes from a unit to the next.
    q_step: usize,
    /// Bytes to the tokens after these, if those are read from where they are.
    next: Option<usize>,
    /// `[block][token]`, as in [`ActsView`].
    d: &'a [f32],
    /// Numbers from a block to the next.
    d_step: usize,
    /// `[block][token]`, of formats with minima: sums of pairs of sub-blocks.
    sums: [[[i32; 8]; FEW]; CHUNK256],
}

/// Values of a unit of activations.
const UNIT: usize = 64;

impl<'a> Tokens<'a> {
    /// `blocks` blocks of the chunk that begins with block `first`, of the set that begins with token `t`.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn new<U: Unpack256>(
        acts: &'a ActsView<'a>,
        t: usize,
        first: usize,
        blocks: usize,
        room: &'a mut Room,
    ) -> Self {
        let height = acts.height();
        let (d_at, q_at) = (acts.d_at(t, first), acts.q_at(t, first * BLOCK256));
        let (d, d_step) = (&acts.d[d_at..], height);
        let (q, q_step) = (&acts.q[q_at..], UNIT * height);
        // The tokens after these, if there are any: the same place, some bytes on.
        let next = acts.q_at(t + FEW, first * BLOCK256) - q_at;
        let mut sums = [[[0; 8]; FEW]; CHUNK256];
        if U::DMIN.is_some() {
            for (i, sums) in sums[..blocks].iter_mut().enumerate() {
                for (j, sums) in sums.iter_mut().enumerate() {
                    *sums = sum_pairs::<U>(acts, d_at + i * height + j);
                }
            }
        }
        if form::<U>() == Form::Unsigned {
            return Self {
                q,
                q_step,
                next: Some(next),
                d,
                d_step,
                sums,
            };
        }
        let bytes = UNIT * registers::<U>();
        let units = blocks * BLOCK256 / UNIT;
        for (u, out) in room.q.chunks_exact_mut(FEW * bytes).take(units).enumerate() {
            let q = &q[u * q_step..];
            fetch(q, next, FEW * UNIT);
            prepare::<U>(&q[..FEW * UNIT], out);
        }
        Self {
            q: &room.q,
            q_step: FEW * bytes,
            next: None,
            d,
            d_step,
            sums,
        }
    }

    #[inline(always)]
    fn d(&self, b: usize) -> &'a [f32; FEW] {
        let d = &self.d[b * self.d_step..][..FEW];
        d.try_into().expect("a scale a token")
    }

    /// A unit of the set.
    #[inline(always)]
    fn unit<U: Codes>(&self, u: usize) -> &'a [i8] {
        let q = &self.q[u * self.q_step..];
        if let Some(next) = self.next {
            fetch(q, next, FEW * UNIT);
        }
        &q[..FEW * UNIT * registers::<U>()]
    }
}

/// Fetches the cache lines of `bytes` bytes that lie `ahead` bytes on.
#[inline(always)]
fn fetch(q: &[i8], ahead: usize, bytes: usize) {
    for at in (0..bytes).step_by(64) {
        // SAFETY: a prefetch of any address is only a hint and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(q.as_ptr().wrapping_add(ahead + at)) };
    }
}

/// Writes activations as the form multiplies them.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn prepare<U: Codes>(q: &[i8], out: &mut [i8]) {
    let out = out.chunks_exact_mut(32 * registers::<U>());
    for (q, out) in q.chunks_exact(32).zip(out) {
        // SAFETY: 32 codes are there.
        let q = unsafe { _mm256_loadu_si256(q.as_ptr().cast()) };
        match form::<U>() {
            Form::Unsigned => store(q, out),
            Form::Signed => store(_mm256_xor_si256(q, _mm256_set1_epi8(ACT_BIAS)), out),
            Form::Wide => {
                let [even, odd] = even_odd(q);
                store(even, &mut out[..32]);
                store(odd, &mut out[32..]);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn store(x: __m256i, out: &mut [i8]) {
    let out: &mut [i8; 32] = out.try_into().expect("32 bytes");
    // SAFETY: 32 bytes are there.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), x) };
}

/// Keeps the order of the source at this place. Left alone, a compiler computes one token's sum after the other; sums side by
/// side are a third faster.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn in_order(sums: &mut Sums<__m256i>) {
    for sum in sums.as_flattened_mut() {
        // SAFETY: no instruction at all.
        unsafe {
            std::arch::asm!(
                "/* {0} */",
                inout(ymm_reg) * sum,
                options(nomem, nostack, preserves_flags)
            );
        }
    }
}

/// Adds a run's products, times a scale (twice a lane) for each `8 / SCALES` groups. `a` is a unit of the set, the run begins at
/// byte `at` of each token's.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_run<U: Codes, const SCALES: usize>(
    total: &mut Sums<__m256i>,
    halves: [Half<'_>; 2],
    (a, at): (&[i8], usize),
    scales: &[[__m256i; 2]],
) {
    let next = UNIT * registers::<U>();
    if form::<U>() == Form::Wide {
        each_group!(|g| {
            for odd in 0..2 {
                for j in 0..FEW {
                    let a = group(&a[j * next + at..], 8 * odd + g);
                    for half in 0..2 {
                        let products = _mm256_madd_epi16(halves[half].0[2 * g + odd], a);
                        total[half][j] = _mm256_add_epi32(total[half][j], products);
                    }
                }
                in_order(total);
            }
        });
        return;
    }
    let a_sum = groups_a_sum::<U>().min(8 / SCALES);
    let mut words = [[_mm256_setzero_si256(); FEW]; 2];
    each_group!(|g| {
        let first = g.is_multiple_of(a_sum);
        for j in 0..FEW {
            let a = group(&a[j * next + at..], g);
            for half in 0..2 {
                let (q, start) = halves[half];
                let word = &mut words[half][j];
                *word = match form::<U>() {
                    Form::Signed => {
                        let before = if first {
                            start[g / groups_a_sum::<U>()]
                        } else {
                            *word
                        };
                        _mm256_add_epi16(before, _mm256_maddubs_epi16(a, q[g]))
                    }
                    _ if first => _mm256_maddubs_epi16(q[g], a),
                    _ => _mm256_add_epi16(*word, _mm256_maddubs_epi16(q[g], a)),
                };
            }
        }
        in_order(&mut words);
        if (g + 1).is_multiple_of(a_sum) {
            for half in 0..2 {
                for j in 0..FEW {
                    let scaled = _mm256_madd_epi16(words[half][j], scales[g * SCALES / 8][half]);
                    total[half][j] = _mm256_add_epi32(total[half][j], scaled);
                }
            }
        }
    });
}

/// A super-block of a tile of a `Block256` format, but for its codes.
#[derive(Clone, Copy)]
struct Super {
    /// Sub-scales, twice a lane.
    scale: [[__m256i; 2]; 16],
    /// Minima of pairs of sub-blocks.
    min: [[__m256i; 2]; 8],
    d: [__m256; 2],
    dmin: [__m256; 2],
}

/// A chunk of a tile of a `Block256` format.
struct Chunk256 {
    q: Weights,
    blocks: [Super; CHUNK256],
}

impl Chunk256 {
    #[target_feature(enable = "avx2,fma,f16c")]
    fn new() -> Self {
        let block = Super {
            scale: [[_mm256_setzero_si256(); 2]; 16],
            min: [[_mm256_setzero_si256(); 2]; 8],
            d: [_mm256_setzero_ps(); 2],
            dmin: [_mm256_setzero_ps(); 2],
        };
        Self {
            q: Weights::new(),
            blocks: [block; CHUNK256],
        }
    }

    /// Unpacks a super-block, `i` of the chunk.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn unpack<U: Unpack256>(&mut self, i: usize, block: &[u8]) {
        let subs = if U::SUB32 { 1 } else { 2 };
        let (mut scale, mut min): (Scales, Minima) = ([[0; ROWS]; 16], [[0; ROWS]; 16]);
        U::subs(block, &mut scale, &mut min);
        for (scale, out) in scale.iter().zip(&mut self.blocks[i].scale).take(8 * subs) {
            *out = [twice(scale, 0), twice(scale, 1)];
        }
        for run in 0..8 {
            ahead::<U, 8>(block, run);
            let mut unpacked: Run = [0; 512];
            if U::PLANES.is_none() {
                U::codes(block, run, &mut unpacked);
            }
            for half in 0..2 {
                let codes = if U::PLANES.is_some() {
                    codes::<U>(block, run, half)
                } else {
                    array!([_mm256_setzero_si256(); 8], |g| word(&unpacked, g, half))
                };
                // Of the formats of 8 bits none has sub-blocks of 16.
                let scale = self.blocks[i].scale[subs * run][half];
                self.q.set::<U>(8 * i + run, half, codes, Some(scale));
            }
        }
        let (at, factor) = U::D;
        for half in 0..2 {
            let d = halves(block, at, half);
            self.blocks[i].d[half] = _mm256_mul_ps(d, _mm256_set1_ps(factor));
            if let Some(at) = U::DMIN {
                self.blocks[i].dmin[half] = halves(block, at, half);
                for p in 0..pairs::<U>() {
                    let pair = byte_pairs(&min[2 * p], &min[2 * p + 1], half);
                    self.blocks[i].min[p][half] = _mm256_cvtepu8_epi16(pair);
                }
            }
        }
    }

    /// Adds the products of super-block `i` of the chunk with a set of tokens.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn multiply<U: Unpack256>(&self, i: usize, tokens: &Tokens<'_>, sums: &mut Sums<__m256>) {
        let block = &self.blocks[i];
        let mut total = [[_mm256_setzero_si256(); FEW]; 2];
        for two_runs in 0..4 {
            let a = tokens.unit::<U>(4 * i + two_runs);
            for odd in 0..2 {
                let run = 2 * two_runs + odd;
                let a = (a, odd * 32 * registers::<U>());
                let halves = self.q.of::<U>(8 * i + run);
                if U::SUB32 {
                    add_run::<U, 1>(&mut total, halves, a, &block.scale[run..][..1]);
                } else {
                    add_run::<U, 2>(&mut total, halves, a, &block.scale[2 * run..][..2]);
                }
            }
        }
        let d = tokens.d(i);
        for half in 0..2 {
            for j in 0..FEW {
                let scale = _mm256_mul_ps(block.d[half], _mm256_set1_ps(d[j]));
                let total = _mm256_cvtepi32_ps(total[half][j]);
                sums[half][j] = _mm256_fmadd_ps(total, scale, sums[half][j]);
            }
        }
        if U::DMIN.is_none() {
            return;
        }
        let mut mins = [[_mm256_setzero_si256(); FEW]; 2];
        for (p, pair) in block.min[..pairs::<U>()].iter().enumerate() {
            for j in 0..FEW {
                let of_pair = _mm256_set1_epi32(tokens.sums[i][j][p]);
                for half in 0..2 {
                    let products = _mm256_madd_epi16(pair[half], of_pair);
                    mins[half][j] = _mm256_add_epi32(mins[half][j], products);
                }
            }
        }
        for half in 0..2 {
            for j in 0..FEW {
                let scale = _mm256_mul_ps(block.dmin[half], _mm256_set1_ps(d[j]));
                let mins = _mm256_cvtepi32_ps(mins[half][j]);
                sums[half][j] = _mm256_fnmadd_ps(mins, scale, sums[half][j]);
            }
        }
    }
}

/// Sets of [`FEW`] tokens, at most, that a chunk is multiplied with once it is unpacked: their sums over the chunks stay in the first-level
/// cache.
const SETS: usize = 16;

/// Bytes of activations that stay in the second-level cache while tile after tile is multiplied with them.
const TOKENS_BYTES: usize = 384 << 10;

/// Tiles of a `Block256` format.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tiles256<U: Unpack256>(
    w: &TileMatrix<'_>,
    acts: &ActsView<'_>,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    const {
        assert!(U::BITS < 8 || U::SUB32, "one scale for a run of `Wide`");
    }
    let mut chunk = Chunk256::new();
    let mut room = Room::ZERO;
    let zero = [[_mm256_setzero_ps(); FEW]; 2];
    let mut totals = [zero; SETS];
    let together = FEW * (TOKENS_BYTES / (FEW * acts.k())).clamp(1, SETS);
    for first_token in (0..acts.tokens()).step_by(together) {
        let end = acts.tokens().min(first_token + together);
        let sets = (first_token..end).step_by(FEW);
        for tile in tiles.clone() {
            let mut blocks = Blocks::<U>::new(w, tile);
            let out = Out::new(w, tile, out);
            for first in (0..w.blocks()).step_by(CHUNK256) {
                let n = CHUNK256.min(w.blocks() - first);
                for i in 0..n {
                    chunk.unpack::<U>(i, blocks.block(first + i));
                }
                for (t, total) in sets.clone().zip(&mut totals) {
                    let tokens = Tokens::new::<U>(acts, t, first, n, &mut room);
                    let mut sums = zero;
                    for i in 0..n {
                        chunk.multiply::<U>(i, &tokens, &mut sums);
                    }
                    if first == 0 {
                        *total = sums;
                        continue;
                    }
                    let total = total.as_flattened_mut().iter_mut();
                    for (total, sum) in total.zip(sums.as_flattened()) {
                        *total = _mm256_add_ps(*total, *sum);
                    }
                }
            }
            for (t, [low, high]) in sets.clone().zip(&totals) {
                for (j, t) in (t..end.min(t + FEW)).enumerate() {
                    out.put(t, true, [[low[j]], [high[j]]]);
                }
            }
        }
    }
}
