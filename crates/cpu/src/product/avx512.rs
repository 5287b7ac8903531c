//! Quantised products with AVX-512 VNNI: 16 rows a register, a group of 4 values a lane.

use super::sets::{Set256, Sets, Sets256};
use super::sums::{Ahead, Sums, steps};
use super::unpacked::{CHUNK32, CHUNK256, Chunk32, Super256, TileBlocks};
use crate::acts::{ActsView, FEW};
use crate::mem::Shared;
use crate::simd::array;
use quant::lanes::{Unpack32, Unpack256};
use quant::product::has_min;
use quant::tile::{ROWS, TileMatrix};
use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

/// Tokens, at most, whose codes of a chunk and sums of a group stay in the second-level cache.
const TOKENS: usize = 512;

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

/// Runs `$body` for 8, 4, 2 or 1 tokens, as many as there still are, until all `$tokens` are done: `$n` tokens from `$t` on, of `$s` sets.
macro_rules! by_tokens {
    ($tokens:expr, |$t:ident, $s:ident, $n:ident| $body:block) => {{
        let mut $t = 0;
        while $t < $tokens {
            match $tokens - $t {
                8.. => by_tokens!(@ $t $s $n $body 2 8),
                4.. => by_tokens!(@ $t $s $n $body 1 4),
                2.. => by_tokens!(@ $t $s $n $body 1 2),
                _ => by_tokens!(@ $t $s $n $body 1 1),
            }
        }
    }};
    (@ $t:ident $s:ident $n:ident $body:block $sets:literal $tokens:literal) => {{
        const $s: usize = $sets;
        const $n: usize = $tokens;
        $body
        $t += $n;
    }};
}

/// Tiles of a `Block32` format, of so many tokens that they lie in sets.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn tiles32<U: Unpack32>(
    w: &TileMatrix<'_>,
    acts: &ActsView<'_>,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    let sets = Sets::new(acts);
    let mut chunk = Chunk32::zero();
    let room = acts.tokens().min(TOKENS);
    let mut sums = Sums::new(room);
    let mut starts = vec![[[0; FEW]; CHUNK32]; room.div_ceil(FEW)];
    for begin in (0..acts.tokens()).step_by(TOKENS) {
        let tokens = TOKENS.min(acts.tokens() - begin);
        let mut steps = steps(w, tiles.clone(), CHUNK32).peekable();
        while let Some(step) = steps.next() {
            let n = chunk.unpack::<U, false>(&mut TileBlocks::new(w, step.tile), step.first);
            if U::BIAS != 0 && step.slot() == 0 {
                let starts = &mut starts[..tokens.div_ceil(FEW)];
                starts32::<U>(&sets, begin / FEW, (step.first, n), starts);
            }
            let is_last = steps.peek().is_none_or(|next| next.group != step.group);
            let mut ahead = Ahead::new(w, steps.peek(), CHUNK32, tokens);
            by_tokens!(tokens, |t, S, N| {
                let acc = tokens32::<U, S, N>(
                    &chunk,
                    step.first,
                    n,
                    &sets,
                    &starts[t / FEW..],
                    begin + t,
                    &mut ahead,
                );
                sums.put(t, step.slot(), step.first, &acc);
                if is_last {
                    // Lines are waited for while the next tokens are multiplied.
                    sums.write(w, &step.group, begin, t..t + N, out);
                }
            });
        }
    }
}

/// What sums of products begin with, for sets from `set` on and a chunk, by its first block and their number: codes are raised by BIAS, what that
/// adds is taken off beforehand. In memory, from where it comes to all lanes for nothing; out of a register it would take the place of a product.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn starts32<U: Unpack32>(
    sets: &Sets<'_>,
    set: usize,
    (first, n): (usize, usize),
    starts: &mut [[[i32; FEW]; CHUNK32]],
) {
    for (s, starts) in starts.iter_mut().enumerate() {
        for (b, starts) in starts[..n].iter_mut().enumerate() {
            for (start, sum) in starts.iter_mut().zip(sets.block(set + s, first + b).sum) {
                *start = -U::BIAS * sum;
            }
        }
    }
}

/// A chunk's sums of `N` tokens from `t` on, of `S` sets. They are added to group by group, so that `N` products wait for each other.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn tokens32<U: Unpack32, const S: usize, const N: usize>(
    chunk: &Chunk32,
    first: usize,
    n: usize,
    sets: &Sets<'_>,
    starts: &[[[i32; FEW]; CHUNK32]],
    t: usize,
    ahead: &mut Ahead<'_>,
) -> [__m512; N] {
    let row = t % FEW;
    let begin = array!([0; S], |s| sets.begin(t / FEW + s) + first * sets.stride());
    let mut acc = [_mm512_setzero_ps(); N];
    let starts = array!([&starts[0]; S], |s| &starts[s]);
    for (b, codes) in chunk.q.iter().enumerate().take(n) {
        ahead.fetch();
        let sets = array!([sets.at(begin[0]); S], |s| sets
            .at(begin[s] + b * sets.stride()));
        let q = array!([&sets[0].q[0]; N], |j| &sets[j / FEW].q[row + j % FEW]);
        let mut dots = [_mm512_setzero_si512(); N];
        if U::BIAS != 0 {
            for (j, dot) in dots.iter_mut().enumerate() {
                *dot = _mm512_set1_epi32(starts[j / FEW][b][row + j % FEW]);
            }
        }
        each_group!(|g| {
            let w = load(codes, g);
            for (dot, q) in dots.iter_mut().zip(q) {
                *dot = _mm512_dpbusd_epi32(*dot, w, group(q, g));
            }
            in_order(&mut dots);
        });
        let (d, m) = (load_f32(&chunk.d[b]), load_f32(&chunk.m[b]));
        for (j, acc) in acc.iter_mut().enumerate() {
            let (set, row) = (&sets[j / FEW], row + j % FEW);
            let scale = _mm512_mul_ps(d, _mm512_set1_ps(set.d[row]));
            *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[j]), scale, *acc);
            if has_min(U::TY) {
                *acc = _mm512_fmadd_ps(m, _mm512_set1_ps(set.ds[row]), *acc);
            }
        }
    }
    acc
}

/// Tiles of a `Block256` format, of so many tokens that they lie in sets.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn tiles256<U: Unpack256>(
    w: &TileMatrix<'_>,
    acts: &ActsView<'_>,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    let sets = Sets256::new(acts);
    let mut chunk = [const { Super256::zero() }; CHUNK256];
    let mut sums = Sums::new(acts.tokens().min(TOKENS));
    for begin in (0..acts.tokens()).step_by(TOKENS) {
        let tokens = TOKENS.min(acts.tokens() - begin);
        let mut steps = steps(w, tiles.clone(), CHUNK256).peekable();
        while let Some(step) = steps.next() {
            let chunk = &mut chunk[..CHUNK256.min(w.blocks() - step.first)];
            let mut blocks = TileBlocks::new(w, step.tile);
            for (i, block) in chunk.iter_mut().enumerate() {
                block.unpack::<U>(&mut blocks, step.first + i);
            }
            let is_last = steps.peek().is_none_or(|next| next.group != step.group);
            let mut ahead = Ahead::new(w, steps.peek(), CHUNK256, tokens);
            by_tokens!(tokens, |t, S, N| {
                let acc = tokens256::<U, S, N>(chunk, step.first, &sets, begin + t, &mut ahead);
                sums.put(t, step.slot(), step.first, &acc);
                if is_last {
                    // As above.
                    sums.write(w, &step.group, begin, t..t + N, out);
                }
            });
        }
    }
}

/// As [`tokens32`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn tokens256<U: Unpack256, const S: usize, const N: usize>(
    chunk: &[Super256],
    first: usize,
    sets: &Sets256<'_>,
    t: usize,
    ahead: &mut Ahead<'_>,
) -> [__m512; N] {
    let row = t % FEW;
    let mut acc = [_mm512_setzero_ps(); N];
    for (i, block) in chunk.iter().enumerate() {
        let sets = array!([sets.block(t / FEW, first + i); S], |s| sets
            .block(t / FEW + s, first + i));
        let d_a = array!([0.0; N], |j| sets[j / FEW].d[row + j % FEW]);
        let total = total256::<U, S, N>(block, &sets, row, ahead);
        let d = load_f32(&block.d);
        for (j, acc) in acc.iter_mut().enumerate() {
            let scale = _mm512_mul_ps(d, _mm512_set1_ps(d_a[j]));
            *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[j]), scale, *acc);
        }
        if has_min(U::TY) {
            let sums = array!([&sets[0].sums[0]; N], |j| &sets[j / FEW].sums
                [row + j % FEW]);
            let mut mins = [_mm512_setzero_si512(); N];
            if U::SUB32 {
                // Sums of 32 codes fit 16 bits, too: half the products.
                let mut sums32 = [[[0; 2]; 4]; N];
                for (to, sums) in sums32.iter_mut().zip(sums) {
                    // SAFETY: 16 sums are read, 8 written.
                    unsafe {
                        let sums = _mm256_loadu_si256(sums.as_ptr().cast());
                        let sums = _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
                        _mm_storeu_si128(to.as_mut_ptr().cast(), _mm256_cvtepi32_epi16(sums));
                    }
                }
                for (p, pairs) in block.min_pairs.as_chunks::<2>().0.iter().enumerate() {
                    let [low, high] = [load_i32(&pairs[0]), load_i32(&pairs[1])];
                    let pairs = _mm512_mask_blend_epi16(0xaaaa_aaaa, low, high);
                    for (mins, sums) in mins.iter_mut().zip(&sums32) {
                        *mins = dot_pair(*mins, pairs, &sums[p]);
                    }
                }
            } else {
                for (p, pairs) in block.min_pairs.iter().enumerate() {
                    let pairs = load_i32(pairs);
                    for (mins, sums) in mins.iter_mut().zip(sums) {
                        *mins = dot_pair(*mins, pairs, &sums[p]);
                    }
                }
            }
            let dmin = load_f32(&block.dmin);
            for (j, acc) in acc.iter_mut().enumerate() {
                let scale = _mm512_mul_ps(dmin, _mm512_set1_ps(d_a[j]));
                *acc = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(mins[j]), scale, *acc);
            }
        }
    }
    acc
}

/// The integers of a super-block: sums of its sub-blocks' products times their scales.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn total256<U: Unpack256, const S: usize, const N: usize>(
    block: &Super256,
    sets: &[Set256<'_>; S],
    row: usize,
    ahead: &mut Ahead<'_>,
) -> [__m512i; N] {
    // What BIAS adds to each sub-block's sum, negative.
    let mut starts = [[0; 16]; N];
    if U::BIAS != 0 {
        for (j, starts) in starts.iter_mut().enumerate() {
            let sums = &sets[j / FEW].sums[row + j % FEW];
            // SAFETY: 16 sums are read, 16 or, of pairs of them, 8 values written.
            unsafe {
                let sums = _mm256_loadu_si256(sums.as_ptr().cast());
                let to = starts.as_mut_ptr();
                if U::SUB32 {
                    let start = _mm256_madd_epi16(sums, _mm256_set1_epi16(-U::BIAS as i16));
                    _mm256_storeu_si256(to.cast(), start);
                } else {
                    let sums = _mm512_cvtepi16_epi32(sums);
                    let start = _mm512_mullo_epi32(sums, _mm512_set1_epi32(-U::BIAS));
                    _mm512_storeu_si512(to.cast(), start);
                }
            }
        }
        in_memory(&mut starts);
    }
    let subs = if U::SUB32 { 1 } else { 2 };
    let mut total = [_mm512_setzero_si512(); N];
    for (run, codes) in block.q.iter().enumerate() {
        ahead.fetch();
        let units = array!([sets[0].unit(run / 2); S], |s| sets[s].unit(run / 2));
        let q = array!([&units[0][0][0]; N], |j| &units[j / FEW][row + j % FEW]
            [run % 2]);
        let mut dots = [_mm512_setzero_si512(); N];
        each_group!(|g| {
            let (sub, of_sub) = (subs * run + g * subs / 8, 8 / subs);
            if g.is_multiple_of(of_sub) && (U::BIAS != 0 || g > 0) {
                for (dot, starts) in dots.iter_mut().zip(&starts) {
                    *dot = if U::BIAS == 0 {
                        _mm512_setzero_si512()
                    } else {
                        _mm512_set1_epi32(starts[sub])
                    };
                }
            }
            let w = load(codes, g);
            for (dot, q) in dots.iter_mut().zip(q) {
                *dot = _mm512_dpbusd_epi32(*dot, w, group(q, g));
            }
            in_order(&mut dots);
            if g % of_sub == of_sub - 1 {
                let scale = load_i8(&block.scale[sub]);
                for (total, dot) in total.iter_mut().zip(dots) {
                    *total = _mm512_add_epi32(*total, _mm512_mullo_epi32(dot, scale));
                }
            }
        });
    }
    total
}

/// Keeps the order of the source at this place. Left alone, a compiler computes one token's sum after the other.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
pub(super) fn in_order<const N: usize>(sums: &mut [__m512i; N]) {
    for sum in sums {
        // SAFETY: no instruction at all.
        unsafe {
            asm!(
                "/* {0} */",
                inout(zmm_reg) * sum,
                options(nomem, nostack, preserves_flags)
            );
        }
    }
}

/// Keeps values in memory, from where an instruction brings one to all lanes for nothing; out of a register it takes the place of a product.
#[inline(always)]
fn in_memory<T>(values: &mut T) {
    // SAFETY: no instruction at all.
    unsafe {
        asm!("/* {0} */", in(reg) values, options(nostack, preserves_flags));
    }
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
