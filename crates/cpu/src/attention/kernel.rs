//! The arithmetic of one work item: some rows (tokens times the query heads of one KV head) over one group of blocks.

use super::layout::PANEL;
use super::{Blocks, CELLS, GROUP, KvShape, KvType, Params};
use crate::isa::Isa;
use crate::math::{exp, tanh};
use crate::mem::fetch_ahead;
use crate::simd::{F32x16, array, simd_kernel};
use quant::act::{BLOCK32, quantise_block};
use std::ops::Range;

/// Segment of cells whose weighted values are summed from zero.
const SEGMENT: usize = 64;

/// With this many rows it pays to convert a head's K and V to `f32` once.
const CONVERT_ROWS: usize = 8;

/// Rows of one work item.
pub(super) struct Rows<'a> {
    pub(super) shape: KvShape,
    pub(super) params: Params<'a>,
    pub(super) isa: Isa,
    /// First token, counted from the first of the call.
    pub(super) first: usize,
    pub(super) tokens: usize,
    /// KV head.
    pub(super) head: usize,
    /// Query heads a KV head.
    pub(super) gqa: usize,
    /// Position of the call's first token.
    pub(super) position: usize,
}

impl Rows<'_> {
    pub(super) fn count(&self) -> usize {
        self.tokens * self.gqa
    }

    /// Token (of the call) and query head of row `r`.
    pub(super) fn token_head(&self, r: usize) -> (usize, usize) {
        (
            self.first + r / self.gqa,
            self.head * self.gqa + r % self.gqa,
        )
    }

    /// Cells of block `b` that row `r` sees, counted from the block's first.
    fn visible(&self, r: usize, b: usize) -> Range<usize> {
        let cells = self
            .params
            .visible(self.position + self.first + r / self.gqa);
        let start = b * CELLS;
        cells.start.saturating_sub(start).min(CELLS)..cells.end.saturating_sub(start).min(CELLS)
    }
}

/// Partial results of some rows.
#[derive(Default)]
pub(super) struct State {
    c: usize,
    m: Vec<f32>,
    /// Zero: nothing seen yet.
    l: Vec<f32>,
    o: Vec<f32>,
}

impl State {
    fn resize(&mut self, rows: usize, c: usize) {
        self.c = c;
        self.m.resize(rows, 0.0);
        self.l.resize(rows, 0.0);
        self.o.resize(rows * c, 0.0);
    }

    pub(super) fn clear(&mut self) {
        self.l.fill(0.0);
    }

    pub(super) fn save(&self, r: usize, out: &mut [f32]) {
        out[0] = self.m[r];
        out[1] = self.l[r];
        out[2..].copy_from_slice(&self.o[r * self.c..][..self.c]);
    }

    pub(super) fn load(&mut self, r: usize, from: &[f32]) {
        self.m[r] = from[0];
        self.l[r] = from[1];
        self.o[r * self.c..][..self.c].copy_from_slice(&from[2..]);
    }
}

/// A thread's work space; grows to the largest shape seen and is then reused.
#[derive(Default)]
pub(super) struct Scratch {
    /// K of one head and block: `[4 panels][C][64]`, integers for quantised types.
    k: Vec<f32>,
    /// Scales of quantised K: `[4][C/32][64]`.
    k_scale: Vec<f32>,
    /// V: `[256][C]`.
    v: Vec<f32>,
    /// Queries `[rows][C]`, integers for quantised K.
    q: Vec<f32>,
    /// Scales of quantised queries `[rows][C/32]`.
    q_scale: Vec<f32>,
    /// Scores, then weights: `[rows][256]`.
    s: Vec<f32>,
    block: State,
    pub(super) group: State,
    pub(super) total: State,
}

impl Scratch {
    pub(super) fn prepare(&mut self, rows: &Rows<'_>) {
        let (n, shape) = (rows.count(), &rows.shape);
        self.k.resize(CELLS * shape.c_k, 0.0);
        self.k_scale.resize(CELLS * shape.c_k / 32, 0.0);
        self.v.resize(CELLS * shape.c_v, 0.0);
        self.q.resize(n * shape.c_k, 0.0);
        self.q_scale.resize(n * shape.c_k / 32, 0.0);
        self.s.resize(n * CELLS, 0.0);
        for state in [&mut self.block, &mut self.group, &mut self.total] {
            state.resize(n, shape.c_v);
        }
    }
}

/// Leaves in `scratch.group` the rows' partials over the blocks of `group`.
pub(super) fn attend_group(
    rows: &Rows<'_>,
    q: &[f32],
    blocks: Blocks<'_>,
    group: usize,
    scratch: &mut Scratch,
) {
    let shape = &rows.shape;
    load_queries(rows, q, scratch);
    scratch.group.clear();
    for b in group * GROUP..blocks.count().min((group + 1) * GROUP) {
        let block = blocks.get(b);
        let any = rows.visible(0, b).start..rows.visible(rows.count() - 1, b).end;
        if any.is_empty() {
            continue;
        }
        let (k, v) = (shape.k(block, rows.head), shape.v(block, rows.head));
        attend_block(rows.isa, rows, b, k, v, scratch);
        merge(
            rows.isa,
            rows.count(),
            shape.c_v,
            &mut scratch.group,
            &scratch.block,
        );
    }
}

/// Copies the item's queries, quantised if K is.
fn load_queries(rows: &Rows<'_>, q: &[f32], scratch: &mut Scratch) {
    let c = rows.shape.c_k;
    for r in 0..rows.count() {
        let (t, h) = rows.token_head(r);
        let from = &q[(t * rows.params.heads + h) * c..][..c];
        let to = &mut scratch.q[r * c..][..c];
        if rows.shape.type_k.is_float() {
            to.copy_from_slice(from);
            continue;
        }
        for (run, (from, to)) in from
            .chunks_exact(BLOCK32)
            .zip(to.chunks_exact_mut(BLOCK32))
            .enumerate()
        {
            let mut codes = [0; BLOCK32];
            scratch.q_scale[r * c / BLOCK32 + run] = quantise_block(from, &mut codes);
            for (to, code) in to.iter_mut().zip(codes) {
                *to = f32::from(code);
            }
        }
    }
}

simd_kernel! {
    /// Leaves in `scratch.block` the rows' partials over block `b`.
    fn attend_block(rows: &Rows<'_>, b: usize, k: &[u8], v: &[u8], scratch: &mut Scratch) = attend_block_with;
}
#[inline(always)]
fn attend_block_with<V: F32x16>(
    rows: &Rows<'_>,
    b: usize,
    k: &[u8],
    v: &[u8],
    scratch: &mut Scratch,
) {
    let (n, shape) = (rows.count(), &rows.shape);
    let convert = n >= CONVERT_ROWS;
    let end = rows.visible(n - 1, b).end;
    let panels = rows.visible(0, b).start / PANEL..end.div_ceil(PANEL);
    let Scratch {
        k: k32,
        k_scale,
        v: v32,
        q,
        q_scale,
        s,
        block,
        ..
    } = scratch;
    match shape.type_k {
        KvType::F16 if !convert => scores::<V, _>(F16(k), shape.c_k, q, n, panels, s),
        KvType::F16 | KvType::Bf16 => {
            convert_float::<V>(shape.type_k, k, k32);
            scores::<V, _>(F32(k32), shape.c_k, q, n, panels, s);
        }
        KvType::Q8_0 | KvType::Q4_0 => {
            convert_k(shape, k, k32, k_scale);
            quantised_scores::<V>(k32, k_scale, shape.c_k, q, q_scale, n, panels, s);
        }
    }
    for r in 0..n {
        let cells = rows.visible(r, b);
        (block.m[r], block.l[r]) = soft_max::<V>(&rows.params, cells, &mut s[r * CELLS..][..CELLS]);
    }
    let cells = |r: usize| rows.visible(r, b);
    match shape.type_v {
        KvType::F16 if !convert => weighted::<V, _>(F16(v), shape.c_v, s, n, &cells, &mut block.o),
        KvType::F16 | KvType::Bf16 => {
            convert_float::<V>(
                shape.type_v,
                &v[..end * shape.c_v * 2],
                &mut v32[..end * shape.c_v],
            );
            weighted::<V, _>(F32(v32), shape.c_v, s, n, &cells, &mut block.o);
        }
        KvType::Q8_0 | KvType::Q4_0 => {
            convert_v(shape, v, end, v32);
            weighted::<V, _>(F32(v32), shape.c_v, s, n, &cells, &mut block.o);
        }
    }
}

/// Sixteen consecutive values of a matrix, from any storage.
trait Load: Copy {
    fn load<V: F32x16>(self, at: usize) -> V;
    /// Fetches what the stream will need soon after `at`.
    fn ahead(self, at: usize);
}
#[derive(Clone, Copy)]
struct F32<'a>(&'a [f32]);
impl Load for F32<'_> {
    #[inline(always)]
    fn load<V: F32x16>(self, at: usize) -> V {
        V::load(&self.0[at..])
    }
    #[inline(always)]
    fn ahead(self, _: usize) {
        // Converted a moment ago: in the cache.
    }
}
#[derive(Clone, Copy)]
struct F16<'a>(&'a [u8]);
impl Load for F16<'_> {
    #[inline(always)]
    fn load<V: F32x16>(self, at: usize) -> V {
        V::load_f16(&self.0[2 * at..])
    }
    #[inline(always)]
    fn ahead(self, at: usize) {
        fetch_ahead(&self.0[2 * at..]);
    }
}

#[inline(always)]
fn convert_float<V: F32x16>(ty: KvType, from: &[u8], to: &mut [f32]) {
    for (from, to) in from.chunks_exact(32).zip(to.chunks_exact_mut(16)) {
        if ty == KvType::F16 {
            V::load_f16(from).store(to)
        } else {
            V::load_bf16(from).store(to)
        }
    }
}

#[inline(always)]
fn half(bytes: &[u8], i: usize) -> f32 {
    quant::lanes::f16_to_f32(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]))
}

/// Quantised K to integers and scales.
#[inline(always)]
fn convert_k(shape: &KvShape, k: &[u8], out: &mut [f32], scale: &mut [f32]) {
    let (scales, codes) = k.split_at(CELLS * shape.c_k / 32 * 2);
    for (i, scale) in scale.iter_mut().enumerate() {
        *scale = half(scales, i);
    }
    match shape.type_k {
        KvType::Q8_0 => {
            for (out, codes) in out
                .chunks_exact_mut(4 * PANEL)
                .zip(codes.chunks_exact(4 * PANEL))
            {
                for (i, out) in out.chunks_exact_mut(PANEL).enumerate() {
                    for (out, codes) in out.iter_mut().zip(codes.chunks_exact(4)) {
                        *out = f32::from(codes[i] as i8);
                    }
                }
            }
        }
        _ => {
            for (out, codes) in out
                .chunks_exact_mut(32 * PANEL)
                .zip(codes.chunks_exact(16 * PANEL))
            {
                for (word, codes) in codes.chunks_exact(4 * PANEL).enumerate() {
                    for (cell, codes) in codes.chunks_exact(4).enumerate() {
                        for (i, code) in codes.iter().enumerate() {
                            out[(4 * word + i) * PANEL + cell] = f32::from((code & 15) as i8 - 8);
                            out[(4 * word + i + 16) * PANEL + cell] =
                                f32::from((code >> 4) as i8 - 8);
                        }
                    }
                }
            }
        }
    }
}

/// Quantised V to values: scale times integer, exact in `f32`.
#[inline(always)]
fn convert_v(shape: &KvShape, v: &[u8], cells: usize, out: &mut [f32]) {
    let runs = shape.c_v / 32;
    let (scales, codes) = v.split_at(CELLS * runs * 2);
    let q8 = shape.type_v == KvType::Q8_0;
    let bytes = if q8 { 32 } else { 16 };
    for (i, (out, codes)) in out
        .chunks_exact_mut(32)
        .zip(codes.chunks_exact(bytes))
        .take(cells * runs)
        .enumerate()
    {
        let d = half(scales, i);
        for (j, code) in codes.iter().enumerate() {
            if q8 {
                out[j] = d * f32::from(*code as i8);
            } else {
                out[j] = d * f32::from((code & 15) as i8 - 8);
                out[j + 16] = d * f32::from((code >> 4) as i8 - 8);
            }
        }
    }
}

/// Calls `$f::<.., N>` for the next 4, 3, 2 or 1 of `$rows` rows.
macro_rules! by_rows {
    ($rows:expr, |$r:ident, $n:ident| $call:expr) => {{
        let mut $r = 0;
        while $r < $rows {
            match $rows - $r {
                4.. => {
                    const $n: usize = 4;
                    $call;
                    $r += 4;
                }
                3 => {
                    const $n: usize = 3;
                    $call;
                    $r += 3;
                }
                2 => {
                    const $n: usize = 2;
                    $call;
                    $r += 2;
                }
                _ => {
                    const $n: usize = 1;
                    $call;
                    $r += 1;
                }
            }
        }
    }};
}

/// `s[r][n] = sum_c q[r][c] k[n][c]`, not yet scaled, for the cells of some panels.
#[inline(always)]
fn scores<V: F32x16, L: Load>(
    k: L,
    c: usize,
    q: &[f32],
    rows: usize,
    panels: Range<usize>,
    s: &mut [f32],
) {
    for panel in panels {
        let base = panel * c * PANEL;
        by_rows!(rows, |r, N| {
            let (q, s) = (&q[r * c..(r + N) * c], &mut s[r * CELLS + panel * PANEL..]);
            // Registers: 4 rows x 4 vectors of sums fit 32 wide registers, 4 x 1 fit 16 narrow ones.
            if V::WIDE {
                panel_scores::<V, L, N, 4>(k, base, c, q, s);
            } else {
                for i in 0..PANEL / 16 {
                    panel_scores::<V, L, N, 1>(k, base + 16 * i, c, q, &mut s[16 * i..]);
                }
            }
        });
    }
}

#[inline(always)]
fn panel_scores<V: F32x16, L: Load, const N: usize, const W: usize>(
    k: L,
    base: usize,
    c: usize,
    q: &[f32],
    s: &mut [f32],
) {
    let mut acc = [[V::splat(0.0); W]; N];
    let q = array!([&q[..0]; N], |r| &q[r * c..(r + 1) * c]);
    for i in 0..c {
        for w in (0..W).step_by(2) {
            k.ahead(base + i * PANEL + 16 * w);
        }
        let k = array!([V::splat(0.0); W], |w| k.load(base + i * PANEL + 16 * w));
        for r in 0..N {
            let q = V::splat(q[r][i]);
            for w in 0..W {
                acc[r][w] = q.fma(k[w], acc[r][w]);
            }
        }
    }
    for (r, acc) in acc.iter().enumerate() {
        for (w, acc) in acc.iter().enumerate() {
            acc.store(&mut s[r * CELLS + 16 * w..]);
        }
    }
}

/// Scores against quantised K: the dot of 32 integers is exact in `f32`, in any order.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "both operands have scales")]
fn quantised_scores<V: F32x16>(
    k: &[f32],
    k_scale: &[f32],
    c: usize,
    q: &[f32],
    q_scale: &[f32],
    rows: usize,
    panels: Range<usize>,
    s: &mut [f32],
) {
    let runs = c / 32;
    for panel in panels {
        let (k, k_scale) = (&k[panel * c * PANEL..], &k_scale[panel * runs * PANEL..]);
        by_rows!(rows, |r, N| {
            let (q, q_scale) = (&q[r * c..(r + N) * c], &q_scale[r * runs..(r + N) * runs]);
            for part in 0..PANEL / 32 {
                let s = &mut s[r * CELLS + panel * PANEL + 32 * part..];
                quantised_part::<V, N>(&k[32 * part..], &k_scale[32 * part..], c, q, q_scale, s);
            }
        });
    }
}

/// Scores of `N` rows and 32 cells of a panel.
#[inline(always)]
fn quantised_part<V: F32x16, const N: usize>(
    k: &[f32],
    k_scale: &[f32],
    c: usize,
    q: &[f32],
    q_scale: &[f32],
    s: &mut [f32],
) {
    let runs = c / 32;
    let mut acc = [[V::splat(0.0); 2]; N];
    for run in 0..runs {
        let mut dots = [[V::splat(0.0); 2]; N];
        for i in run * 32..run * 32 + 32 {
            let k = array!([V::splat(0.0); 2], |w| V::load(&k[i * PANEL + 16 * w..]));
            for r in 0..N {
                let q = V::splat(q[r * c + i]);
                for w in 0..2 {
                    dots[r][w] = q.fma(k[w], dots[r][w]);
                }
            }
        }
        for w in 0..2 {
            let k_scale = V::load(&k_scale[run * PANEL + 16 * w..]);
            for r in 0..N {
                let scale = V::splat(q_scale[r * runs + run]).mul(k_scale);
                acc[r][w] = dots[r][w].fma(scale, acc[r][w]);
            }
        }
    }
    for (r, acc) in acc.iter().enumerate() {
        for (w, acc) in acc.iter().enumerate() {
            acc.store(&mut s[r * CELLS + 16 * w..]);
        }
    }
}

/// Scales a row's scores and turns them into weights; the weights of cells not seen become zero. Returns `(m, l)`.
#[inline(always)]
fn soft_max<V: F32x16>(params: &Params<'_>, cells: Range<usize>, s: &mut [f32]) -> (f32, f32) {
    if cells.is_empty() {
        return (0.0, 0.0);
    }
    let vectors = cells.start / 16..cells.end.div_ceil(16);
    s[vectors.start * 16..cells.start].fill(f32::NEG_INFINITY);
    s[cells.end..vectors.end * 16].fill(f32::NEG_INFINITY);
    let mut m = V::splat(f32::NEG_INFINITY);
    for s in s[vectors.start * 16..vectors.end * 16].chunks_exact_mut(16) {
        let mut x = V::load(s).mul(V::splat(params.scale));
        if let Some(cap) = params.soft_cap {
            // Cells not seen stay below all others: tanh(-inf) is -1, so they are set again below.
            x = tanh(x.div(V::splat(cap))).mul(V::splat(cap));
        }
        x.store(s);
        m = x.max(m);
    }
    if params.soft_cap.is_some() {
        s[vectors.start * 16..cells.start].fill(f32::NEG_INFINITY);
        s[cells.end..vectors.end * 16].fill(f32::NEG_INFINITY);
        m = V::splat(f32::NEG_INFINITY);
        for s in s[vectors.start * 16..vectors.end * 16].chunks_exact(16) {
            m = V::load(s).max(m);
        }
    }
    let m = m.max_lane();
    let mut l = V::splat(0.0);
    for s in s[vectors.start * 16..vectors.end * 16].chunks_exact_mut(16) {
        let e = exp(V::load(s).sub(V::splat(m)));
        e.store(s);
        l = l.add(e);
    }
    (m, l.sum())
}

/// `o[r][c] = sum_n w[r][n] v[n][c]`.
#[inline(always)]
fn weighted<V: F32x16, L: Load>(
    v: L,
    c: usize,
    w: &[f32],
    rows: usize,
    cells: &impl Fn(usize) -> Range<usize>,
    o: &mut [f32],
) {
    by_rows!(rows, |r, N| {
        let cells = array!([(0, 0); N], |i| {
            let cells = cells(r + i);
            (cells.start, cells.end)
        });
        let (w, o) = (&w[r * CELLS..(r + N) * CELLS], &mut o[r * c..(r + N) * c]);
        let mut at = 0;
        while at < c {
            if V::WIDE && c - at >= 64 {
                columns::<V, L, N, 4>(v, c, at, w, &cells, o);
                at += 64;
            } else {
                columns::<V, L, N, 1>(v, c, at, w, &cells, o);
                at += 16;
            }
        }
    });
}

#[inline(always)]
fn columns<V: F32x16, L: Load, const N: usize, const W: usize>(
    v: L,
    c: usize,
    at: usize,
    w: &[f32],
    cells: &[(usize, usize); N],
    o: &mut [f32],
) {
    let w = array!([&w[..0]; N], |r| &w[r * CELLS..(r + 1) * CELLS]);
    for segment in 0..CELLS / SEGMENT {
        let (start, end) = (segment * SEGMENT, (segment + 1) * SEGMENT);
        let cells = array!([(0, 0); N], |r| {
            (cells[r].0.clamp(start, end), cells[r].1.clamp(start, end))
        });
        // What all rows see, and before and after it what only some do.
        let low = cells.iter().map(|c| c.0).max().unwrap_or(start);
        let high = cells.iter().map(|c| c.1).min().unwrap_or(start).max(low);
        let mut acc = [[V::splat(0.0); W]; N];
        for r in 0..N {
            let before = cells[r].0..cells[r].1.min(low);
            add_cells(v, c, at, w[r], before, &mut acc[r]);
        }
        for n in low..high {
            for i in (0..W).step_by(2) {
                v.ahead(n * c + at + 16 * i);
            }
            let v = array!([V::splat(0.0); W], |i| v.load(n * c + at + 16 * i));
            for r in 0..N {
                let w = V::splat(w[r][n]);
                for i in 0..W {
                    acc[r][i] = w.fma(v[i], acc[r][i]);
                }
            }
        }
        for r in 0..N {
            let after = cells[r].0.max(high)..cells[r].1;
            add_cells(v, c, at, w[r], after, &mut acc[r]);
        }
        for (r, acc) in acc.iter().enumerate() {
            for (i, acc) in acc.iter().enumerate() {
                let o = &mut o[r * c + at + 16 * i..];
                if segment == 0 {
                    acc.store(o)
                } else {
                    V::load(o).add(*acc).store(o)
                }
            }
        }
    }
}

/// One row's weighted cells.
#[inline(always)]
fn add_cells<V: F32x16, L: Load, const W: usize>(
    v: L,
    c: usize,
    at: usize,
    w: &[f32],
    cells: Range<usize>,
    acc: &mut [V; W],
) {
    for n in cells {
        let w = V::splat(w[n]);
        for (i, acc) in acc.iter_mut().enumerate() {
            *acc = w.fma(v.load(n * c + at + 16 * i), *acc);
        }
    }
}

simd_kernel! {
    /// Folds `b` into `a`, row by row.
    pub(super) fn merge(rows: usize, c: usize, a: &mut State, b: &State) = merge_with;
}
#[inline(always)]
fn merge_with<V: F32x16>(rows: usize, c: usize, a: &mut State, b: &State) {
    for r in 0..rows {
        if b.l[r] == 0.0 {
            continue;
        }
        let (o_a, o_b) = (&mut a.o[r * c..(r + 1) * c], &b.o[r * c..(r + 1) * c]);
        if a.l[r] == 0.0 {
            (a.m[r], a.l[r]) = (b.m[r], b.l[r]);
            o_a.copy_from_slice(o_b);
            continue;
        }
        let m = if a.m[r] > b.m[r] { a.m[r] } else { b.m[r] };
        let (f_a, f_b) = (exp(V::splat(a.m[r] - m)), exp(V::splat(b.m[r] - m)));
        let l = V::splat(b.l[r]).fma(f_b, V::splat(a.l[r]).mul(f_a));
        (a.m[r], a.l[r]) = (m, l.to_array()[0]);
        for (o_a, o_b) in o_a.chunks_exact_mut(16).zip(o_b.chunks_exact(16)) {
            V::load(o_b).fma(f_b, V::load(o_a).mul(f_a)).store(o_a);
        }
    }
}

/// Merges row `r`'s sink, divides, writes the result.
pub(super) fn finish(rows: &Rows<'_>, r: usize, state: &mut State, out: &mut [f32]) {
    if let Some(sinks) = rows.params.sinks {
        let (_, head) = rows.token_head(r);
        add_sink(rows.isa, sinks[head], r, state);
    }
    divide(
        rows.isa,
        &state.o[r * state.c..][..state.c],
        state.l[r],
        out,
    );
}

simd_kernel! { fn add_sink(sink: f32, r: usize, state: &mut State) = add_sink_with; }
#[inline(always)]
fn add_sink_with<V: F32x16>(sink: f32, r: usize, state: &mut State) {
    let m = if state.m[r] > sink { state.m[r] } else { sink };
    let (f, f_sink) = (exp(V::splat(state.m[r] - m)), exp(V::splat(sink - m)));
    state.l[r] = f_sink.add(V::splat(state.l[r]).mul(f)).to_array()[0];
    state.m[r] = m;
    for o in state.o[r * state.c..][..state.c].chunks_exact_mut(16) {
        V::load(o).mul(f).store(o);
    }
}

simd_kernel! { fn divide(o: &[f32], l: f32, out: &mut [f32]) = divide_with; }
#[inline(always)]
fn divide_with<V: F32x16>(o: &[f32], l: f32, out: &mut [f32]) {
    for (o, out) in o.chunks_exact(16).zip(out.chunks_exact_mut(16)) {
        V::load(o).div(V::splat(l)).store(out);
    }
}
