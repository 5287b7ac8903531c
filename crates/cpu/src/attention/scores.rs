//! `s[r][n] = sum_c q[r][c] k[n][c]`, not yet scaled, for one panel of 64 cells.

use super::kernel::{
    Ahead, F16, F32, ROWS_FEW, Values, convert_float, row_groups, union, vectors_a_row, with_rows,
};
use super::layout::{Cells, PANEL};
use super::{CELLS, KvType};
use crate::acts::quantise_block;
use crate::simd::{F32x16, array, simd_kernel};
use quant::act::BLOCK32;
use std::ops::Range;

simd_kernel! {
    /// Scores against float K. Row `r`'s query is `q[q_at[r]..][..c]`.
    pub(super) fn scores(ty: KvType, c: usize, k: &[u8], panel: usize, q: &[f32], q_at: &[usize], cells: &[Cells], k32: &mut [f32], s: &mut [f32], ahead: Ahead) = scores_with;
}
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "one operation's operands")]
fn scores_with<V: F32x16>(
    ty: KvType,
    c: usize,
    k: &[u8],
    panel: usize,
    q: &[f32],
    q_at: &[usize],
    cells: &[Cells],
    k32: &mut [f32],
    s: &mut [f32],
    mut ahead: Ahead,
) {
    let is_few = q_at.len() <= ROWS_FEW;
    let groups = row_groups::<V>(q_at.len()).count();
    let tiles = groups * (4 / vectors_a_row::<V>(q_at.len().div_ceil(groups)));
    let is_direct = ty == KvType::F16 && is_few;
    ahead.share(if is_direct { tiles * c } else { PANEL / 16 * c });
    let pass = match is_few {
        true if tiles == 1 => c,
        true => C_A_PASS_FEW,
        false => C_A_PASS_MANY,
    };
    for first in (0..c).step_by(pass) {
        let part = first..c.min(first + pass);
        let k = &k[2 * PANEL * part.start..2 * PANEL * part.end];
        let pass = (panel, part);
        if is_direct {
            pass_scores::<V, _>(F16(k), pass, q, q_at, cells, s, &mut ahead);
        } else {
            let k32 = &mut k32[..k.len() / 2];
            convert_float::<V>(ty, k, k32, &mut ahead);
            pass_scores::<V, _>(F32(k32), pass, q, q_at, cells, s, &mut ahead);
        }
    }
}

/// Values that few rows attend at a time, so that K's lines are read in order: 4 KiB of half precision.
const C_A_PASS_FEW: usize = 32;

/// Values that many rows attend at a time: 16 KiB once converted, which stay in the nearest cache.
const C_A_PASS_MANY: usize = 64;

/// Adds values `part`, of which `k` is made, to the scores.
#[inline(always)]
fn pass_scores<V: F32x16, L: Values>(
    k: L,
    (panel, part): (usize, Range<usize>),
    q: &[f32],
    q_at: &[usize],
    cells: &[Cells],
    s: &mut [f32],
    ahead: &mut Ahead,
) {
    for group in row_groups::<V>(q_at.len()) {
        let seen = union(&cells[group.clone()]).within(panel);
        if seen.is_empty() {
            continue;
        }
        let s = &mut s.as_chunks_mut::<CELLS>().0[group.clone()];
        let (q_at, at) = (&q_at[group], panel * PANEL);
        with_rows!(V, q_at.len(), N => {
            let s: &mut [[f32; CELLS]; N] = s.try_into().expect("the group's rows");
            let q = array!([&q[..0]; N], |r| &q[q_at[r] + part.start..][..part.len()]);
            let is_first = part.start == 0;
            let (is_whole, width) = (seen.start < 16 && seen.end > PANEL - 16, vectors_a_row::<V>(N));
            if is_whole && width == 4 {
                tile::<V, L, N, 4>(k, is_first, &q, s, at, ahead);
            } else if is_whole && width == 2 {
                tile::<V, L, N, 2>(k, is_first, &q, s, at, ahead);
                tile::<V, L, N, 2>(k.skip(32), is_first, &q, s, at + 32, ahead);
            } else {
                for first in (seen.start / 16 * 16..seen.end).step_by(16) {
                    tile::<V, L, N, 1>(k.skip(first), is_first, &q, s, at + first, ahead);
                }
            }
        });
    }
}

/// Adds some values to the scores of `N` rows and the `16 W` cells from the block's cell `at` on, where `k` begins.
#[inline(always)]
fn tile<V: F32x16, L: Values, const N: usize, const W: usize>(
    k: L,
    is_first: bool,
    q: &[&[f32]; N],
    s: &mut [[f32; CELLS]; N],
    at: usize,
    ahead: &mut Ahead,
) {
    let c = q[0].len();
    let q = array!([&q[0][..0]; N], |r| &q[r][..c]);
    let mut acc = [[V::splat(0.0); W]; N];
    if !is_first {
        for r in 0..N {
            for w in 0..W {
                acc[r][w] = V::load(&s[r][at + 16 * w..]);
            }
        }
    }
    let mut walk = *ahead;
    for i in 0..c {
        if L::STREAMS {
            walk.step();
        }
        let k = k.part(i * PANEL, 16 * W);
        let k = array!([V::splat(0.0); W], |w| k.load(16 * w));
        for r in 0..N {
            let q = V::splat(q[r][i]);
            for w in 0..W {
                acc[r][w] = q.fma(k[w], acc[r][w]);
            }
        }
    }
    *ahead = walk;
    for r in 0..N {
        for w in 0..W {
            acc[r][w].store(&mut s[r][at + 16 * w..]);
        }
    }
}

/// Queries of some rows as quantised K reads them.
#[derive(Default)]
pub(super) struct Quantised {
    /// Four codes a word: `[rows][C/4]`.
    codes: Vec<i32>,
    /// `[rows][C/32]`.
    scale: Vec<f32>,
    /// What the sum over a block begins with, to make up for what K's codes are raised by: `[rows][C/32]`.
    start: Vec<i32>,
}

impl Quantised {
    /// Makes room for `values` values.
    pub(super) fn reserve(&mut self, values: usize) {
        if self.codes.len() < values / 4 {
            self.codes.resize(values / 4, 0);
            self.scale.resize(values / BLOCK32, 0.0);
            self.start.resize(values / BLOCK32, 0);
        }
    }

    /// Codes, scales and starts of `N` rows that have `runs` blocks each.
    #[inline(always)]
    fn rows<const N: usize>(&self, row: usize, runs: usize) -> [Query<'_>; N] {
        let codes = self.codes.as_chunks::<8>().0;
        array!(
            [(&codes[..0], &self.scale[..0], &self.start[..0]); N],
            |r| {
                let at = (row + r) * runs..(row + r + 1) * runs;
                (&codes[at.clone()], &self.scale[at.clone()], &self.start[at])
            }
        )
    }
}

/// A row's codes, scales and starts, block by block.
type Query<'a> = (&'a [[i32; 8]], &'a [f32], &'a [i32]);

simd_kernel! {
    /// Quantises the rows' queries.
    pub(super) fn quantise(ty: KvType, c: usize, q: &[f32], q_at: &[usize], out: &mut Quantised) = quantise_with;
}
#[inline(always)]
fn quantise_with<V: F32x16>(ty: KvType, c: usize, q: &[f32], q_at: &[usize], out: &mut Quantised) {
    let bias = if ty == KvType::Q8_0 {
        V::SIGNED_BIAS
    } else {
        8
    };
    for (r, at) in q_at.iter().enumerate() {
        for (run, x) in q[*at..][..c].chunks_exact(BLOCK32).enumerate() {
            let (mut codes, at) = ([0; BLOCK32], r * c / BLOCK32 + run);
            out.scale[at] = quantise_block::<V>(x, &mut codes);
            out.start[at] = -bias * codes.iter().map(|&q| i32::from(q)).sum::<i32>();
            for (word, codes) in out.codes[at * 8..][..8]
                .iter_mut()
                .zip(codes.as_chunks::<4>().0)
            {
                *word = i32::from_le_bytes(codes.map(i8::cast_unsigned));
            }
        }
    }
}

simd_kernel! {
    /// Scores against quantised K.
    pub(super) fn quantised_scores(ty: KvType, c: usize, k: (&[u8], &[u8]), panel: usize, q: &Quantised, cells: &[Cells], s: &mut [f32], ahead: Ahead) = quantised_scores_with;
}
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "one operation's operands")]
fn quantised_scores_with<V: F32x16>(
    ty: KvType,
    c: usize,
    k: (&[u8], &[u8]),
    panel: usize,
    q: &Quantised,
    cells: &[Cells],
    s: &mut [f32],
    mut ahead: Ahead,
) {
    ahead.share(row_groups::<V>(cells.len()).count() * k.1.len() / 256);
    for group in row_groups::<V>(cells.len()) {
        let seen = union(&cells[group.clone()]).within(panel);
        if seen.is_empty() {
            continue;
        }
        let s = &mut s.as_chunks_mut::<CELLS>().0[group.clone()];
        with_rows!(V, group.len(), N => {
            let s: &mut [[f32; CELLS]; N] = s.try_into().expect("the group's rows");
            let q = q.rows::<N>(group.start, c / BLOCK32);
            for first in (seen.start / 16 * 16..seen.end).step_by(16) {
                let at = panel * PANEL + first;
                if ty == KvType::Q8_0 {
                    dots::<V, N, false>(k, first, &q, s, at, &mut ahead);
                } else {
                    dots::<V, N, true>(k, first, &q, s, at, &mut ahead);
                }
            }
        });
    }
}

/// The scores of `N` rows and the 16 cells from the panel's cell `first` on, the block's cell `at`.
#[inline(always)]
fn dots<V: F32x16, const N: usize, const NIBBLES: bool>(
    (scales, codes): (&[u8], &[u8]),
    first: usize,
    q: &[Query<'_>; N],
    s: &mut [[f32; CELLS]; N],
    at: usize,
    ahead: &mut Ahead,
) {
    let words = if NIBBLES { 4 } else { 8 };
    let runs = q[0].0.len();
    // Of one length, so that what is checked is checked once.
    let codes_of = array!([&q[0].0[..0]; N], |r| &q[r].0[..runs]);
    let scale_of = array!([&q[0].1[..0]; N], |r| &q[r].1[..runs]);
    let start_of = array!([&q[0].2[..0]; N], |r| &q[r].2[..runs]);
    let mut acc = [V::splat(0.0); N];
    let mut walk = *ahead;
    for run in 0..runs {
        let codes = &codes[run * words * PANEL * 4..][..words * PANEL * 4];
        // Two sums a row, as one alone would wait for itself.
        let mut low = [V::dots(0); N];
        let mut high = [V::dots(0); N];
        for r in 0..N {
            low[r] = V::dots(start_of[r][run]);
        }
        macro_rules! word {
            ($word:literal) => {
                let word = |i: usize| &codes[(i * PANEL + first) * 4..][..64];
                if NIBBLES {
                    let (l, h) = V::nibbles(word($word));
                    for r in 0..N {
                        low[r] = V::dot_nibbles(low[r], l, codes_of[r][run][$word]);
                        high[r] = V::dot_nibbles(high[r], h, codes_of[r][run][$word + 4]);
                    }
                } else {
                    let (l, h) = (
                        V::signed_bytes(word($word)),
                        V::signed_bytes(word($word + 4)),
                    );
                    for r in 0..N {
                        low[r] = V::dot_signed(low[r], l, codes_of[r][run][$word]);
                        high[r] = V::dot_signed(high[r], h, codes_of[r][run][$word + 4]);
                    }
                }
            };
        }
        walk.step();
        word!(0);
        word!(1);
        if !NIBBLES {
            walk.step();
        }
        word!(2);
        word!(3);
        let k_scale = V::load_f16(&scales[(run * PANEL + first) * 2..][..32]);
        for r in 0..N {
            let scale = V::splat(scale_of[r][run]).mul(k_scale);
            acc[r] = V::from_dots(low[r], high[r]).fma(scale, acc[r]);
        }
    }
    *ahead = walk;
    for r in 0..N {
        acc[r].store(&mut s[r][at..]);
    }
}
