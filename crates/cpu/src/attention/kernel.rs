//! One work item: some rows (tokens times the query heads of one KV head) over some blocks of one group.
//!
//! A block is attended panel by panel (64 cells of K), then segment by segment (64 cells of V), so that what many rows
//! share, converted to `f32`, stays in the nearest cache. Up to [`ROWS_A_GROUP`] rows share registers: each load serves all
//! of them. With no more rows than that, half precision is converted in registers, for its one use.

use super::layout::{Cells, PANEL};
use super::scores::{Quantised, quantise, quantised_scores, scores};
use super::soft_max::{exp_weight, soft_max};
use super::weighted::{Work, weighted};
use super::{CELLS, KvShape, KvType, Params, Span};
use crate::isa::Isa;
use crate::math::exp;
use crate::simd::{F32x16, fetch, fetch_far, simd_kernel};
use std::mem::swap;
use std::ops::Range;

/// Rows that share registers: 6 rows of 4 vectors of sums fill 24 of 32 wide registers and leave some for 4 vectors of K or
/// V and a factor; 6 rows of one vector (two registers) fill 12 of 16 narrow ones.
pub(super) const ROWS_A_GROUP: usize = 6;

/// Rows that share wide registers if there are no others: two vectors of sums each, so that K and V are decoded once.
const ROWS_ALONE: usize = 7;

/// Up to this many rows work is bound by reading K and V, so that these are gone through once, in order, and converted as they
/// come; more rows are bound by arithmetic, and share what is converted.
pub(super) const ROWS_FEW: usize = 2 * ROWS_A_GROUP;

/// Vectors of sums that each of `rows` rows has in registers, so that these are well used and chains of sums are many.
#[inline(always)]
pub(super) fn vectors_a_row<V: F32x16>(rows: usize) -> usize {
    match rows {
        ..=ROWS_A_GROUP if V::WIDE => 4,
        _ if V::WIDE => 2,
        1 => 4,
        2 => 2,
        _ => 1,
    }
}

/// Rows in groups of nearly equal size.
#[inline(always)]
pub(super) fn row_groups<V: F32x16>(rows: usize) -> impl Iterator<Item = Range<usize>> {
    let groups = if V::WIDE && rows <= ROWS_ALONE {
        1
    } else {
        rows.div_ceil(ROWS_A_GROUP)
    };
    (0..groups).map(move |g| g * rows / groups..(g + 1) * rows / groups)
}

/// Evaluates an expression with the constant `$n` equal to `$rows`, at most [`ROWS_A_GROUP`], or [`ROWS_ALONE`] if registers
/// are wide.
macro_rules! with_rows {
    ($v:ty, $rows:expr, $n:ident => $call:expr) => {
        match $rows {
            7 if <$v>::WIDE => with_rows!(@ $n, 7, $call),
            1 => with_rows!(@ $n, 1, $call),
            2 => with_rows!(@ $n, 2, $call),
            3 => with_rows!(@ $n, 3, $call),
            4 => with_rows!(@ $n, 4, $call),
            5 => with_rows!(@ $n, 5, $call),
            _ => with_rows!(@ $n, 6, $call),
        }
    };
    (@ $n:ident, $value:literal, $call:expr) => {{
        const $n: usize = $value;
        $call
    }};
}
pub(super) use with_rows;

/// The cells from the first to the last that any of some rows sees.
#[inline(always)]
pub(super) fn union(cells: &[Cells]) -> Cells {
    let mut all = Cells {
        start: CELLS,
        end: 0,
    };
    for cells in cells {
        if !cells.is_empty() {
            all.start = all.start.min(cells.start);
            all.end = all.end.max(cells.end);
        }
    }
    all
}

/// Values of a matrix, from any storage.
pub(super) trait Values: Copy {
    /// Whether they come from memory as they are used, so that what follows has to be fetched.
    const STREAMS: bool;
    /// From value `n` on.
    fn skip(self, n: usize) -> Self;
    /// `len` values from `at` on.
    fn part(self, at: usize, len: usize) -> Self;
    /// Sixteen values from `at` on.
    fn load<V: F32x16>(self, at: usize) -> V;
}
#[derive(Clone, Copy)]
pub(super) struct F32<'a>(pub(super) &'a [f32]);
impl Values for F32<'_> {
    // Converted a moment ago, which is when what follows was fetched.
    const STREAMS: bool = false;
    #[inline(always)]
    fn skip(self, n: usize) -> Self {
        Self(&self.0[n..])
    }
    #[inline(always)]
    fn part(self, at: usize, len: usize) -> Self {
        Self(&self.0[at..at + len])
    }
    #[inline(always)]
    fn load<V: F32x16>(self, at: usize) -> V {
        V::load(&self.0[at..])
    }
}
#[derive(Clone, Copy)]
pub(super) struct F16<'a>(pub(super) &'a [u8]);
impl Values for F16<'_> {
    const STREAMS: bool = true;
    #[inline(always)]
    fn skip(self, n: usize) -> Self {
        Self(&self.0[2 * n..])
    }
    #[inline(always)]
    fn part(self, at: usize, len: usize) -> Self {
        Self(&self.0[2 * at..2 * (at + len)])
    }
    #[inline(always)]
    fn load<V: F32x16>(self, at: usize) -> V {
        V::load_f16(&self.0[2 * at..])
    }
}

/// Converts float values; a step of `ahead` for each 16.
#[inline(always)]
pub(super) fn convert_float<V: F32x16>(ty: KvType, from: &[u8], to: &mut [f32], ahead: &mut Ahead) {
    let (from, to) = (from.as_chunks::<32>().0, to.as_chunks_mut::<16>().0);
    let mut walk = *ahead;
    for (from, to) in from.iter().zip(to) {
        walk.step();
        if ty == KvType::F16 {
            V::load_f16(from).store(to);
        } else {
            V::load_bf16(from).store(to);
        }
    }
    *ahead = walk;
}

/// How far ahead of the bytes in work their stream is fetched, where what follows is not fetched a whole block ahead.
const AHEAD_BYTES: usize = 4096;

/// A walk over the cache lines that are read soon: some of them are fetched with each step of a kernel.
///
/// Hardware prefetchers alone will not do for one token: they start anew with every head's part of a block, and stop where a
/// kernel computes. Lines go to the second-level cache, since the first level waits for too few at a time.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    line: *const u8,
    /// Where the stretch in work ends, and where the walk then goes on.
    end: *const u8,
    next: *const u8,
    /// Bytes of the walk, and of one step.
    len: usize,
    stride: usize,
}

impl Ahead {
    /// Over `len` bytes, from byte `at` of `first` and then `second` on.
    fn new(first: &[u8], second: &[u8], at: usize, len: usize) -> Self {
        let mut ahead = Self {
            line: first.as_ptr().wrapping_add(at),
            end: first.as_ptr_range().end,
            next: second.as_ptr(),
            len,
            stride: 0,
        };
        if let Some(beyond) = at.checked_sub(first.len()) {
            ahead.go_on();
            ahead.line = ahead.line.wrapping_add(beyond);
        }
        ahead
    }

    #[inline(always)]
    fn go_on(&mut self) {
        self.line = self.next;
        self.end = std::ptr::without_provenance(usize::MAX);
    }

    /// Shares the lines out to `steps` steps.
    #[inline(always)]
    pub(super) fn share(&mut self, steps: usize) {
        self.stride = self.len.div_ceil(steps);
    }

    /// Fetches a step's share: at most four lines.
    #[inline(always)]
    pub(super) fn step(&mut self) {
        fetch_far(self.line);
        if self.stride > 64 {
            fetch_far(self.line.wrapping_add(64));
            if self.stride > 128 {
                fetch_far(self.line.wrapping_add(128));
                fetch_far(self.line.wrapping_add(192));
            }
        }
        self.line = self.line.wrapping_add(self.stride);
        if self.line >= self.end {
            self.go_on();
        }
    }
}

/// One head's K and V of the block that is read after the one in work. With few rows, wide registers and quantised K it is fetched
/// meanwhile, evenly over time: integer scores pass over K faster than memory gives it, while the weighted sum takes its time.
struct Following<'a> {
    k: &'a [u8],
    v: &'a [u8],
    /// Bytes that are fetched during scores.
    with_scores: usize,
}

impl<'a> Following<'a> {
    fn new(shape: &KvShape, next: Next<'a>) -> Self {
        let (k, v) = (
            shape.k(next.span.bytes, next.head).all(),
            shape.v(next.span.bytes, next.head).all(),
        );
        let len = k.len() + v.len();
        Self {
            k,
            v,
            // Scores take a third of the time of the weighted sum.
            with_scores: len / 4,
        }
    }

    /// The walk beside panel `i` of `n`.
    fn beside_scores(&self, i: usize, n: usize) -> Ahead {
        let len = self.with_scores / n;
        Ahead::new(self.k, self.v, i * len, len)
    }

    /// The walk beside segment `i` of `n`.
    fn beside_sums(&self, i: usize, n: usize) -> Ahead {
        let len = (self.k.len() + self.v.len() - self.with_scores) / n;
        Ahead::new(self.k, self.v, self.with_scores + i * len, len)
    }
}

/// Which span and KV head an item reads next, or the item that the same thread probably does next.
#[derive(Clone, Copy)]
pub(super) struct Next<'a> {
    pub(super) span: Span<'a>,
    pub(super) head: usize,
}

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

    /// Cells of a span that token `t` of the item sees.
    fn visible(&self, t: usize, span: &Span<'_>) -> Cells {
        let cells = self.params.visible(self.position + self.first + t);
        let (first, end) = span.cells;
        let inside = |n: usize| n.saturating_sub(span.index * CELLS).clamp(first, end);
        Cells {
            start: inside(cells.start),
            end: inside(cells.end),
        }
    }

    /// Cells of a span that any row sees.
    fn any(&self, span: &Span<'_>) -> Cells {
        Cells {
            start: self.visible(0, span).start,
            end: self.visible(self.tokens - 1, span).end,
        }
    }
}

/// Partial results of some rows.
#[derive(Default)]
pub(super) struct State {
    /// Padded to whole vectors, as is `l`.
    m: Vec<f32>,
    /// Zero: nothing seen yet.
    l: Vec<f32>,
    o: Vec<f32>,
}

impl State {
    fn reserve(&mut self, rows: usize, c: usize) {
        let padded = rows.next_multiple_of(16);
        reserve(&mut self.m, padded);
        reserve(&mut self.l, padded);
        reserve(&mut self.o, rows * c);
    }

    pub(super) fn clear(&mut self) {
        self.l.fill(0.0);
    }

    /// Writes row `r`: m, l, o.
    pub(super) fn save(&self, r: usize, out: &mut [f32]) {
        let c = out.len() - 2;
        out[0] = self.m[r];
        out[1] = self.l[r];
        out[2..].copy_from_slice(&self.o[r * c..][..c]);
    }

    /// Reads row `r`.
    pub(super) fn load(&mut self, r: usize, from: &[f32]) {
        let c = from.len() - 2;
        self.m[r] = from[0];
        self.l[r] = from[1];
        self.o[r * c..][..c].copy_from_slice(&from[2..]);
    }
}

/// Room for `n` values; never shrinks, so that what is there need not be cleared again.
pub(super) fn reserve<T: Copy + Default>(v: &mut Vec<T>, n: usize) {
    if v.len() < n {
        v.resize(n, T::default());
    }
}

/// A thread's work space; grows to the largest shape seen and is then reused.
#[derive(Default)]
pub(super) struct Scratch {
    /// A panel of K: `[C][64]`.
    k32: Vec<f32>,
    work: Work,
    /// Where each row's query begins.
    q_at: Vec<usize>,
    quantised: Quantised,
    /// What each row sees of the block in work.
    cells: Vec<Cells>,
    /// Scores, then weights: `[rows][256]`.
    s: Vec<f32>,
    pub(super) block: State,
    pub(super) group: State,
    pub(super) total: State,
}

impl Scratch {
    /// Makes room for the partials of the item's rows.
    pub(super) fn reserve(&mut self, rows: &Rows<'_>) {
        for state in [&mut self.block, &mut self.group, &mut self.total] {
            state.reserve(rows.count(), rows.shape.c_v);
        }
    }

    /// Makes room for the item's rows and takes their queries from `q`.
    pub(super) fn prepare(&mut self, rows: &Rows<'_>, q: &[f32]) {
        let (n, shape) = (rows.count(), &rows.shape);
        self.reserve(rows);
        reserve(&mut self.k32, PANEL * shape.c_k);
        self.work.reserve(n, shape.c_v);
        reserve(&mut self.s, n * CELLS);
        self.q_at.clear();
        for r in 0..n {
            let (t, h) = rows.token_head(r);
            self.q_at.push((t * rows.params.heads + h) * shape.c_k);
        }
        if !shape.type_k.is_float() {
            self.quantised.reserve(n * shape.c_k);
            let (ty, c) = (shape.type_k, shape.c_k);
            quantise(rows.isa, ty, c, q, &self.q_at, &mut self.quantised);
        }
    }
}

/// Leaves in `scratch.group` the rows' partials over some spans of one group, after those that it holds if it `goes_on`;
/// `next` is what is read afterwards.
pub(super) fn attend_spans(
    rows: &Rows<'_>,
    q: &[f32],
    spans: &[Span<'_>],
    next: Option<Next<'_>>,
    goes_on: bool,
    scratch: &mut Scratch,
) {
    if !goes_on {
        scratch.group.clear();
    }
    let mut is_first = !goes_on;
    for (i, span) in spans.iter().enumerate() {
        if rows.any(span).is_empty() {
            continue;
        }
        let inside = spans.get(i + 1).map(|span| Next {
            span: *span,
            head: rows.head,
        });
        attend_span(rows, q, span, inside.or(next), scratch);
        let (group, block) = (&mut scratch.group, &mut scratch.block);
        if is_first {
            swap(group, block);
            is_first = false;
        } else {
            merge(rows.isa, rows.count(), rows.shape.c_v, group, block);
        }
    }
}

/// Leaves in `scratch.block` the rows' partials over a span; `next` follows.
fn attend_span(
    rows: &Rows<'_>,
    q: &[f32],
    span: &Span<'_>,
    next: Option<Next<'_>>,
    scratch: &mut Scratch,
) {
    let (n, shape, head, isa) = (rows.count(), &rows.shape, rows.head, rows.isa);
    let (c_k, c_v) = (shape.c_k, shape.c_v);
    let (k, v) = (shape.k(span.bytes, head), shape.v(span.bytes, head));
    let Scratch {
        k32,
        work,
        q_at,
        quantised,
        cells,
        s,
        block,
        ..
    } = scratch;
    cells.clear();
    for t in 0..rows.tokens {
        let of_token = rows.visible(t, span);
        cells.extend(std::iter::repeat_n(of_token, rows.gqa));
    }
    let any = rows.any(span);
    let panels = any.start / PANEL..any.end.div_ceil(PANEL);
    let following = match next {
        Some(next) if n <= ROWS_FEW && !shape.type_k.is_float() && is_wide(isa) => {
            Some(Following::new(shape, next))
        }
        _ => None,
    };
    for panel in panels.clone() {
        fetch_all(k.scales((panel + 1).min(panels.end - 1)));
        let codes = k.codes(panel..panel + 1);
        let ahead = match &following {
            Some(following) => following.beside_scores(panel - panels.start, panels.len()),
            None => {
                let after = v.codes(panels.start..panels.start + 1);
                Ahead::new(k.codes(panel..panels.end), after, AHEAD_BYTES, codes.len())
            }
        };
        let ty = shape.type_k;
        if ty.is_float() {
            scores(isa, ty, c_k, codes, panel, q, q_at, cells, k32, s, ahead);
        } else {
            let k = (k.scales(panel), codes);
            quantised_scores(isa, ty, c_k, k, panel, quantised, cells, s, ahead);
        }
    }
    fetch_all(v.scales(panels.start));
    let (m, l) = (&mut block.m, &mut block.l);
    soft_max(isa, &rows.params, cells, &mut s[..n * CELLS], m, l);
    for segment in panels.clone() {
        fetch_all(v.scales((segment + 1).min(panels.end - 1)));
        let codes = v.codes(segment..segment + 1);
        let ahead = match &following {
            Some(following) => following.beside_sums(segment - panels.start, panels.len()),
            None => {
                let after = next.map_or(codes, |next| {
                    shape.k(next.span.bytes, next.head).codes(0..1)
                });
                Ahead::new(
                    v.codes(segment..panels.end),
                    after,
                    AHEAD_BYTES,
                    codes.len(),
                )
            }
        };
        let v = (v.scales(segment), codes);
        let o = &mut block.o[..n * c_v];
        weighted(isa, shape.type_v, c_v, v, segment, s, cells, work, o, ahead);
    }
}

simd_kernel! { fn is_wide() -> bool = is_wide_with; }
#[inline(always)]
fn is_wide_with<V: F32x16>() -> bool {
    V::WIDE
}

/// Fetches every line of these bytes.
fn fetch_all(bytes: &[u8]) {
    bytes.chunks(64).for_each(|line| fetch(line.as_ptr()));
}

simd_kernel! {
    /// Folds `b` into `a`, row by row.
    pub(super) fn merge(rows: usize, c: usize, a: &mut State, b: &State) = merge_with;
}
#[inline(always)]
fn merge_with<V: F32x16>(rows: usize, c: usize, a: &mut State, b: &State) {
    for first in (0..rows).step_by(16) {
        let (mut f_a, mut f_b) = ([0.0; 16], [0.0; 16]);
        let (mut m_both, mut l_both) = ([0.0; 16], [0.0; 16]);
        let (m_a, m_b) = (V::load(&a.m[first..]), V::load(&b.m[first..]));
        let m = m_a.max(m_b);
        let (e_a, e_b) = (exp_weight(m_a.sub(m)), exp_weight(m_b.sub(m)));
        let l = V::load(&a.l[first..]).mul(e_a);
        V::load(&b.l[first..]).fma(e_b, l).store(&mut l_both);
        m.store(&mut m_both);
        e_a.store(&mut f_a);
        e_b.store(&mut f_b);
        for i in 0..16.min(rows - first) {
            let r = first + i;
            if b.l[r] == 0.0 {
                continue;
            }
            let (o_a, o_b) = (&mut a.o[r * c..(r + 1) * c], &b.o[r * c..(r + 1) * c]);
            if a.l[r] == 0.0 {
                (a.m[r], a.l[r]) = (b.m[r], b.l[r]);
                o_a.copy_from_slice(o_b);
                continue;
            }
            (a.m[r], a.l[r]) = (m_both[i], l_both[i]);
            let (f_a, f_b) = (V::splat(f_a[i]), V::splat(f_b[i]));
            for (o_a, o_b) in o_a
                .as_chunks_mut::<16>()
                .0
                .iter_mut()
                .zip(o_b.as_chunks::<16>().0)
            {
                V::load(o_b).fma(f_b, V::load(o_a).mul(f_a)).store(o_a);
            }
        }
    }
}

/// Merges row `r`'s sink, divides, writes the result: zeros if the row saw no cell.
pub(super) fn finish(rows: &Rows<'_>, r: usize, state: &mut State, out: &mut [f32]) {
    let sink = rows.params.sinks.map(|sinks| sinks[rows.token_head(r).1]);
    let c = out.len();
    if state.l[r] == 0.0 {
        // It saw nothing.
        out.fill(0.0);
        return;
    }
    finish_row(
        rows.isa,
        sink,
        state.m[r],
        state.l[r],
        &mut state.o[r * c..][..c],
        out,
    );
}

simd_kernel! { fn finish_row(sink: Option<f32>, m_a: f32, l: f32, o: &mut [f32], out: &mut [f32]) = finish_row_with; }
#[inline(always)]
fn finish_row_with<V: F32x16>(sink: Option<f32>, m_a: f32, l: f32, o: &mut [f32], out: &mut [f32]) {
    let mut l = V::splat(l);
    let (o, out) = (o.as_chunks_mut::<16>().0, out.as_chunks_mut::<16>().0);
    if let Some(sink) = sink {
        let m = if m_a > sink { m_a } else { sink };
        let (f, f_sink) = (exp(V::splat(m_a - m)), exp(V::splat(sink - m)));
        l = f_sink.add(l.mul(f));
        for o in o.iter_mut() {
            V::load(o).mul(f).store(o);
        }
    }
    for (o, out) in o.iter().zip(out) {
        V::load(o).div(l).store(out);
    }
}
