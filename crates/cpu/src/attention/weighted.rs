//! `o[r][c] = sum_n w[r][n] v[n][c]`, one segment of 64 cells after another.

use super::kernel::{
    Ahead, F16, F32, ROWS_A_GROUP, ROWS_FEW, Values, convert_float, reserve, row_groups, union,
    vectors_a_row, with_rows,
};
use super::layout::{Cells, PANEL};
use super::{CELLS, KvType};
use crate::simd::{F32x16, array, simd_kernel};
use std::ops::Range;

/// Cells a segment: the cells of a panel, whose weighted values are summed from zero.
const SEGMENT: usize = PANEL;

/// Bytes of V, as it is multiplied, that few rows go through at a time, columns after columns: few enough to stay in the nearest cache.
const PASS_BYTES: usize = 16 << 10;

/// The same where it is decoded in wide registers.
const WIDE_PASS_BYTES: usize = 4 << 10;

/// Values of a cell that many rows attend at a time: 16 KiB of a segment once converted, which stay in the nearest cache.
const COLUMNS: usize = 64;

/// Work space.
#[derive(Default)]
pub(super) struct Work {
    /// What is attended at a time, as values.
    v: Vec<f32>,
    /// Scales of those cells.
    d: Vec<f32>,
    /// Sums over a segment that have been put aside: `[rows][C]`.
    sums: Vec<f32>,
}

impl Work {
    pub(super) fn reserve(&mut self, rows: usize, c: usize) {
        reserve(&mut self.v, SEGMENT * c);
        reserve(&mut self.d, SEGMENT * c / 32);
        reserve(&mut self.sums, rows * c);
    }
}

simd_kernel! {
    /// Adds one segment's weighted values to `o` `[rows][C]`.
    pub(super) fn weighted(ty: KvType, c: usize, v: (&[u8], &[u8]), segment: usize, w: &[f32], cells: &[Cells], work: &mut Work, o: &mut [f32], ahead: Ahead) = weighted_with;
}
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "one operation's operands")]
fn weighted_with<V: F32x16>(
    ty: KvType,
    c: usize,
    (scales, codes): (&[u8], &[u8]),
    segment: usize,
    w: &[f32],
    cells: &[Cells],
    work: &mut Work,
    o: &mut [f32],
    mut ahead: Ahead,
) {
    let Work { v, d, sums } = work;
    let sums = &mut sums[..cells.len() * c];
    let groups = row_groups::<V>(cells.len()).count();
    let is_few = cells.len() <= ROWS_FEW;
    let is_float = ty == KvType::F16 || ty == KvType::Bf16;
    let seen = union(cells).within(segment);
    if !is_float {
        let scales = scales.as_chunks::<32>().0.iter();
        for (scales, d) in scales.zip(d.as_chunks_mut::<16>().0) {
            V::load_f16(scales).store(d);
        }
    }
    if V::WIDE && is_few && c.is_multiple_of(32) && cells.iter().all(|row| *row == cells[0]) {
        let part = (segment, cells[0]);
        match ty {
            KvType::F16 => in_registers::<V, _>(Halves(codes), c, part, w, sums, o, ahead),
            KvType::Bf16 => in_registers::<V, _>(Bfloats(codes), c, part, w, sums, o, ahead),
            KvType::Q8_0 => in_registers::<V, _>(Bytes(codes, d), c, part, w, sums, o, ahead),
            KvType::Q4_0 => {
                in_registers::<V, _>(Nibbles(codes, d), c, part, w, sums, o, ahead);
            }
        }
        return;
    }
    let width = 16 * vectors_a_row::<V>(cells.len().div_ceil(groups));
    let tiles = groups * c.div_ceil(width);
    let is_direct = ty == KvType::F16 && is_few;
    ahead.share(match is_float {
        true if is_direct => tiles * SEGMENT,
        true => SEGMENT * c / 16,
        false => SEGMENT * c / 32,
    });
    // Few rows go through V in order, by as much as stays in the nearest cache.
    let values_a_pass = PASS_BYTES / if is_direct { 2 } else { 4 };
    let pass = if !is_few || tiles == 1 && ty == KvType::F16 {
        SEGMENT
    } else {
        (values_a_pass / c).max(1)
    };
    for first in (0..SEGMENT).step_by(pass) {
        let pass = Pass {
            segment,
            first,
            end: SEGMENT.min(first + pass),
        };
        let part = pass.of(seen);
        if part.is_empty() {
            continue;
        }
        if is_direct {
            let v = F16(&codes[2 * c * first..]);
            pass_sums::<V, _>(v, c, 0..c, pass, w, cells, sums, o, &mut ahead);
            continue;
        }
        let width = if is_few { c } else { COLUMNS };
        for start in (0..c).step_by(width) {
            let columns = start..c.min(start + width);
            let width = columns.len();
            if width == c {
                let (from, to) = (
                    part.start * c..part.end * c,
                    part.start - first..part.end - first,
                );
                let to = &mut v[to.start * c..to.end * c];
                convert::<V>(ty, codes, d, from, to, &mut ahead);
            } else {
                for n in part.start..part.end {
                    let to = &mut v[(n - first) * width..][..width];
                    let from = n * c + columns.start..n * c + columns.end;
                    convert::<V>(ty, codes, d, from, to, &mut ahead);
                }
            }
            pass_sums::<V, _>(F32(v), width, columns, pass, w, cells, sums, o, &mut ahead);
        }
    }
}

/// Values of a segment of V, from codes and scales.
#[inline(always)]
fn convert<V: F32x16>(
    ty: KvType,
    codes: &[u8],
    d: &[f32],
    values: Range<usize>,
    to: &mut [f32],
    ahead: &mut Ahead,
) {
    match ty {
        KvType::F16 | KvType::Bf16 => {
            convert_float::<V>(ty, &codes[2 * values.start..2 * values.end], to, ahead);
        }
        KvType::Q8_0 => {
            let d = &d[values.start / 32..];
            decode::<V, 32>(d, &codes[values], to, ahead);
        }
        KvType::Q4_0 => {
            let d = &d[values.start / 32..];
            decode::<V, 16>(d, &codes[values.start / 2..values.end / 2], to, ahead);
        }
    }
}

/// Some cells of a segment.
#[derive(Clone, Copy)]
struct Pass {
    segment: usize,
    first: usize,
    end: usize,
}

impl Pass {
    /// Which of some cells, counted from the segment's first, lie in the pass.
    fn of(self, cells: Cells) -> Cells {
        Cells {
            start: cells.start.clamp(self.first, self.end),
            end: cells.end.clamp(self.first, self.end),
        }
    }

    /// Which cells of a block lie in the pass, counted from the pass's first.
    fn within(self, cells: Cells) -> Cells {
        let cells = self.of(cells.within(self.segment));
        Cells {
            start: cells.start - self.first,
            end: cells.end - self.first,
        }
    }
}

/// Quantised V to values: scale times integer, exact in `f32`. A block of 32 values has `BYTES` bytes and is a step of `ahead`.
#[inline(always)]
fn decode<V: F32x16, const BYTES: usize>(
    d: &[f32],
    codes: &[u8],
    out: &mut [f32],
    ahead: &mut Ahead,
) {
    let mut walk = *ahead;
    let codes = codes.as_chunks::<BYTES>().0;
    for ((codes, d), out) in codes.iter().zip(d).zip(out.as_chunks_mut::<32>().0) {
        walk.step();
        let (low, high) = if BYTES == 32 {
            (V::load_i8(&codes[..16]), V::load_i8(&codes[BYTES - 16..]))
        } else {
            V::load_nibbles(codes)
        };
        let d = V::splat(*d);
        low.mul(d).store(&mut out[..16]);
        high.mul(d).store(&mut out[16..]);
    }
    *ahead = walk;
}

/// How a pass begins and ends.
#[derive(Clone, Copy)]
struct Join {
    /// Whether the segment's sums go on from those put aside.
    goes_on: bool,
    /// If the segment is done, how its sums join those of the segments before.
    end: Option<End>,
}

/// How a segment's sums join the segments before. That segments without a visible cell are +0 shows only in signs of zeros:
/// -0 is what changes no sum.
#[derive(Clone, Copy)]
struct End {
    /// What the first segment of the block with a visible cell is added to; `None`: to the sums so far.
    before: Option<f32>,
    /// What is added to the result.
    after: f32,
}

impl End {
    /// Of segment `segment`, for rows that see `cells` of the block.
    #[inline(always)]
    fn of(cells: Cells, segment: usize) -> Self {
        let is_first = cells.start / SEGMENT == segment;
        let is_last = cells.end <= (segment + 1) * SEGMENT;
        Self {
            before: is_first.then_some(if segment == 0 { -0.0 } else { 0.0 }),
            after: if is_last && cells.end <= CELLS - SEGMENT {
                0.0
            } else {
                -0.0
            },
        }
    }

    /// Joins some columns of the sums of `rows` rows to `o`.
    #[inline(always)]
    fn join<V: F32x16>(
        self,
        rows: usize,
        c: usize,
        columns: Range<usize>,
        sums: &[f32],
        o: &mut [f32],
    ) {
        for r in 0..rows {
            let sums = sums[r * c..][columns.clone()].as_chunks::<16>().0;
            let o = o[r * c..][columns.clone()].as_chunks_mut::<16>().0;
            for (o, sum) in o.iter_mut().zip(sums) {
                let before = match self.before {
                    Some(zero) => V::splat(zero),
                    None => V::load(o),
                };
                before.add(V::load(sum)).add(V::splat(self.after)).store(o);
            }
        }
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "one operation's operands")]
fn pass_sums<V: F32x16, L: Values>(
    v: L,
    width: usize,
    part: Range<usize>,
    pass: Pass,
    w: &[f32],
    cells: &[Cells],
    sums: &mut [f32],
    o: &mut [f32],
    ahead: &mut Ahead,
) {
    for group in row_groups::<V>(cells.len()) {
        let block = union(&cells[group.clone()]);
        let seen = block.within(pass.segment);
        if pass.of(seen).is_empty() {
            continue;
        }
        let end = End::of(block, pass.segment);
        let join = Join {
            goes_on: seen.start < pass.first,
            end: (seen.end <= pass.end).then_some(end),
        };
        let c = sums.len() / cells.len();
        let rows = group.start * c..group.end * c;
        let (sums, o) = (&mut sums[rows.clone()], &mut o[rows]);
        let (w, cells) = (&w.as_chunks::<CELLS>().0[group.clone()], &cells[group]);
        with_rows!(V, cells.len(), N => {
            let w: &[[f32; CELLS]; N] = w.try_into().expect("the group's rows");
            let cells = array!([cells[0]; N], |r| pass.within(cells[r]));
            let first = pass.segment * SEGMENT + pass.first;
            let mut at = part.start;
            while at < part.end {
                let v = v.skip(at - part.start);
                let (left, row) = (part.end - at, vectors_a_row::<V>(N));
                if row == 4 && left >= 64 {
                    columns::<V, L, N, 4>(v, width, c, at, w, first, &cells, join, sums, o, ahead);
                    at += 64;
                } else if row == 2 && left >= 32 {
                    columns::<V, L, N, 2>(v, width, c, at, w, first, &cells, join, sums, o, ahead);
                    at += 32;
                } else {
                    columns::<V, L, N, 1>(v, width, c, at, w, first, &cells, join, sums, o, ahead);
                    at += 16;
                }
            }
        });
    }
}

/// The values `at .. at + 16 W` of `N` rows; the pass begins at the block's cell `first`. `v` begins with them, and has `width`
/// values a cell.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "one operation's operands")]
fn columns<V: F32x16, L: Values, const N: usize, const W: usize>(
    v: L,
    width: usize,
    c: usize,
    at: usize,
    w: &[[f32; CELLS]; N],
    first: usize,
    cells: &[Cells; N],
    join: Join,
    sums: &mut [f32],
    o: &mut [f32],
    ahead: &mut Ahead,
) {
    // What all rows see, and before and after it what only some do.
    let all = union(cells);
    let mut low = all.start;
    let mut high = all.end;
    for cells in cells {
        low = low.max(cells.start);
        high = high.min(cells.end);
    }
    if low >= high {
        (low, high) = (all.end, all.end);
    }
    let mut acc = [[V::splat(0.0); W]; N];
    if join.goes_on {
        for r in 0..N {
            for i in 0..W {
                acc[r][i] = V::load(&sums[r * c + at + 16 * i..]);
            }
        }
    }
    macro_rules! some {
        ($range:expr) => {
            for n in $range {
                let v = v.part(n * width, 16 * W);
                let v = array!([V::splat(0.0); W], |i| v.load(16 * i));
                for r in 0..N {
                    if cells[r].start <= n && n < cells[r].end {
                        let w = V::splat(w[r][first + n]);
                        for i in 0..W {
                            acc[r][i] = w.fma(v[i], acc[r][i]);
                        }
                    }
                }
            }
        };
    }
    some!(all.start..low);
    let mut walk = *ahead;
    for n in low..high {
        if L::STREAMS {
            walk.step();
        }
        let v = v.part(n * width, 16 * W);
        let v = array!([V::splat(0.0); W], |i| v.load(16 * i));
        for r in 0..N {
            let w = V::splat(w[r][first + n]);
            for i in 0..W {
                acc[r][i] = w.fma(v[i], acc[r][i]);
            }
        }
    }
    *ahead = walk;
    some!(high..all.end);
    // By way of memory: sums stay in registers only if all loops over them unroll, which longer ones do not.
    for r in 0..N {
        for i in 0..W {
            acc[r][i].store(&mut sums[r * c + at + 16 * i..]);
        }
    }
    if let Some(end) = join.end {
        end.join::<V>(N, c, at..at + 16 * W, sums, o);
    }
}

/// V as it is stored, decoded as it is used.
trait Stored: Copy {
    /// Bits of a value.
    const BITS: usize;
    /// Some cells of `c` values each, alone.
    fn cells(self, c: usize, cells: Cells) -> Self;
    /// 32 values of cell `n`, from value `at` on. Lengths are not checked, as that would cost as much as all the rest.
    ///
    /// # Safety
    /// The cell is one of [`Stored::cells`], and has so many values.
    unsafe fn load<V: F32x16>(self, n: usize, c: usize, at: usize) -> (V, V);
}

/// What belongs to some cells, `a_cell` each.
#[inline(always)]
fn of_cells<T>(all: &[T], a_cell: usize, cells: Cells) -> &[T] {
    &all[a_cell * cells.start..a_cell * cells.end]
}

#[derive(Clone, Copy)]
struct Halves<'a>(&'a [u8]);
impl Stored for Halves<'_> {
    const BITS: usize = 16;
    #[inline(always)]
    fn cells(self, c: usize, cells: Cells) -> Self {
        Self(of_cells(self.0, 2 * c, cells))
    }
    #[inline(always)]
    unsafe fn load<V: F32x16>(self, n: usize, c: usize, at: usize) -> (V, V) {
        let at = 2 * (n * c + at);
        // SAFETY: the caller's.
        let codes = unsafe { self.0.get_unchecked(at..at + 64) };
        (V::load_f16(&codes[..32]), V::load_f16(&codes[32..]))
    }
}
#[derive(Clone, Copy)]
struct Bfloats<'a>(&'a [u8]);
impl Stored for Bfloats<'_> {
    const BITS: usize = 16;
    #[inline(always)]
    fn cells(self, c: usize, cells: Cells) -> Self {
        Self(of_cells(self.0, 2 * c, cells))
    }
    #[inline(always)]
    unsafe fn load<V: F32x16>(self, n: usize, c: usize, at: usize) -> (V, V) {
        let at = 2 * (n * c + at);
        // SAFETY: the caller's.
        let codes = unsafe { self.0.get_unchecked(at..at + 64) };
        (V::load_bf16(&codes[..32]), V::load_bf16(&codes[32..]))
    }
}
/// Codes, and scales as values.
#[derive(Clone, Copy)]
struct Bytes<'a>(&'a [u8], &'a [f32]);
impl Stored for Bytes<'_> {
    const BITS: usize = 8;
    #[inline(always)]
    fn cells(self, c: usize, cells: Cells) -> Self {
        Self(of_cells(self.0, c, cells), of_cells(self.1, c / 32, cells))
    }
    #[inline(always)]
    unsafe fn load<V: F32x16>(self, n: usize, c: usize, at: usize) -> (V, V) {
        let run = n * (c / 32) + at / 32;
        let at = n * c + at;
        // SAFETY: the caller's.
        let (codes, d) = unsafe { (self.0.get_unchecked(at..at + 32), self.1.get_unchecked(run)) };
        let d = V::splat(*d);
        (
            V::load_i8(&codes[..16]).mul(d),
            V::load_i8(&codes[16..]).mul(d),
        )
    }
}
/// Codes, and scales as values.
#[derive(Clone, Copy)]
struct Nibbles<'a>(&'a [u8], &'a [f32]);
impl Stored for Nibbles<'_> {
    const BITS: usize = 4;
    #[inline(always)]
    fn cells(self, c: usize, cells: Cells) -> Self {
        let (codes, scales) = (
            of_cells(self.0, c / 2, cells),
            of_cells(self.1, c / 32, cells),
        );
        Self(codes, scales)
    }
    #[inline(always)]
    unsafe fn load<V: F32x16>(self, n: usize, c: usize, at: usize) -> (V, V) {
        let run = n * (c / 32) + at / 32;
        let at = n * (c / 2) + at / 2;
        // SAFETY: the caller's.
        let (codes, d) = unsafe { (self.0.get_unchecked(at..at + 16), self.1.get_unchecked(run)) };
        V::load_scaled_nibbles(codes, *d)
    }
}

/// A segment for few rows that all see the same cells: read once, from its storage to registers.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "one operation's operands")]
fn in_registers<V: F32x16, L: Stored>(
    v: L,
    c: usize,
    (segment, cells): (usize, Cells),
    w: &[f32],
    sums: &mut [f32],
    o: &mut [f32],
    mut ahead: Ahead,
) {
    let seen = cells.within(segment);
    if seen.is_empty() {
        return;
    }
    let (end, rows) = (End::of(cells, segment), o.len() / c);
    let groups = row_groups::<V>(rows).count();
    let width = vectors_a_row::<V>(rows.div_ceil(groups));
    let wide = if width == 4 { c / 64 } else { 0 };
    ahead.share(groups * (c / 32 - wide) * SEGMENT);
    let pass = (WIDE_PASS_BYTES * 8 / L::BITS / c).clamp(1, SEGMENT);
    for first in (0..SEGMENT).step_by(pass) {
        let part = Cells {
            start: seen.start.clamp(first, first + pass),
            end: seen.end.clamp(first, first + pass),
        };
        if part.is_empty() {
            continue;
        }
        let goes_on = part.start > seen.start;
        for group in row_groups::<V>(rows) {
            let w = &w.as_chunks::<CELLS>().0[group.clone()];
            let sums = &mut sums[group.start * c..group.end * c];
            with_rows!(V, w.len(), N => {
                let w: &[[f32; CELLS]; N] = w.try_into().expect("the group's rows");
                if N <= ROWS_A_GROUP {
                    for i in 0..wide {
                        decoded::<V, L, N, 4>(v, c, 64 * i, w, (segment, part), goes_on, sums, &mut ahead);
                    }
                }
                for i in 2 * wide..c / 32 {
                    decoded::<V, L, N, 2>(v, c, 32 * i, w, (segment, part), goes_on, sums, &mut ahead);
                }
            });
        }
    }
    end.join::<V>(rows, c, 0..c, sums, o);
}

/// The values `at .. at + 16 W` of `N` rows, summed over some cells of a segment.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "one operation's operands")]
fn decoded<V: F32x16, L: Stored, const N: usize, const W: usize>(
    v: L,
    c: usize,
    at: usize,
    w: &[[f32; CELLS]; N],
    (segment, seen): (usize, Cells),
    goes_on: bool,
    sums: &mut [f32],
    ahead: &mut Ahead,
) {
    let mut acc = [[V::splat(0.0); W]; N];
    if goes_on {
        for r in 0..N {
            for i in 0..W {
                acc[r][i] = V::load(&sums[r * c + at + 16 * i..]);
            }
        }
    }
    let (cells, first) = (seen.end - seen.start, segment * SEGMENT + seen.start);
    let v = v.cells(c, seen);
    assert!(
        at + 16 * W <= c && first + cells <= CELLS,
        "cells and values"
    );
    let mut walk = *ahead;
    for n in 0..cells {
        walk.step();
        let mut x = [V::splat(0.0); W];
        for i in 0..W / 2 {
            // SAFETY: of the cells that `v` has, and values that each has.
            (x[2 * i], x[2 * i + 1]) = unsafe { v.load::<V>(n, c, at + 32 * i) };
        }
        for r in 0..N {
            // SAFETY: a row has a weight for each of the block's cells.
            let w = V::splat(unsafe { *w[r].get_unchecked(first + n) });
            for i in 0..W {
                acc[r][i] = w.fma(x[i], acc[r][i]);
            }
        }
    }
    *ahead = walk;
    for r in 0..N {
        for i in 0..W {
            acc[r][i].store(&mut sums[r * c + at + 16 * i..]);
        }
    }
}
