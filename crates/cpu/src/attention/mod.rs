//! Attention as partial results over blocks of cells, and their merge.
//!
//! The definition, for one query head at position `p` and the cells `lo..hi` that it may see of one block:
//!
//! ```text
//! f16, bf16 K:  a[n] = fma(q[c], k[n][c], a[n])                 c ascending, from +0
//! q8_0, q4_0 K: a[n] = fma(f32(sum_c q8[c] * k[n][c]), d_q * d_k[n], a[n])    blocks of 32 ascending, from +0
//! s[n] = a[n] * scale; with a soft-cap: s[n] = cap * tanh(s[n] / cap)
//! m = max s[n];  e[n] = exp(s[n] - m)
//! l = sum e[n]: cell n of the block in lane n mod 16, ascending; lanes by halves
//! o[c] = sum e[n] * v[n][c]: fma, ascending, from +0 in each segment of 64 cells; segments added in order
//! ```
//!
//! Partials `(m, l, o)` fold to the left inside groups of [`GROUP`] blocks at absolute positions, and groups fold to the
//! left; blocks without a visible cell are left out, one with cells removed from its middle counts as several. Merging `a` and `b` with `m = max(m_a, m_b)`,
//! `f_a = exp(m_a - m)`, `f_b = exp(m_b - m)`: `l = fma(l_b, f_b, l_a * f_a)`, `o` alike. A sink merges last, as
//! `(sink, 1, 0)`. The result is `o / l`.
//!
//! So a token's result depends on its position and the cells alone: not on how many tokens are attended at once, which
//! thread did which group, or where a block lies.

mod kernel;
mod layout;
mod scores;
mod soft_max;
#[cfg(test)]
mod tests;
mod weighted;

pub use layout::{KvShape, KvShapeError, KvType, NewCell, append, append_each, tame, write_cell};

use crate::isa::Isa;
use crate::mem::{Buffer, OutOfMemory, Shared, fetch_all};
use crate::pool::Pool;
use kernel::{Next, ROWS_A_GROUP, Rows, Scratch, attend_spans, finish, merge};
use std::cell::RefCell;
use std::ops::Range;

/// Cells a block.
pub const CELLS: usize = 256;

/// Blocks a group of the fold.
pub const GROUP: usize = 4;

/// Query values (tokens times heads of one KV head times C) that one work item attends together: enough that converting K and
/// V is little beside attending them, few enough that scores and sums stay in the second-level cache.
const VALUES_MAX: usize = 12 * 1024;

/// Work items a thread, so that threads of unequal speed end together.
const ITEMS_A_THREAD: usize = 4;

/// Partial results that are fetched ahead of the one that is folded: each lies in the cache of the thread that made it.
const PARTS_AHEAD: usize = 8;

/// What attention needs to know of a layer, beside its cache.
#[derive(Debug, Clone, Copy)]
pub struct Params<'a> {
    /// Query heads.
    pub heads: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Soft-cap of the scores.
    pub soft_cap: Option<f32>,
    /// A query sees this many cells, itself included; `None`: all before it.
    pub window: Option<usize>,
    /// One sink a query head.
    pub sinks: Option<&'a [f32]>,
}

impl Params<'_> {
    /// The cells that the query at `position` sees.
    pub fn visible(&self, position: usize) -> Range<usize> {
        let end = position + 1;
        self.window.map_or(0, |w| end.saturating_sub(w))..end
    }
}

/// A block of cells as attention meets it. A block with cells removed from its middle is several spans.
#[derive(Debug, Clone, Copy)]
pub struct Span<'a> {
    /// The block holds the cells `256 index ..`.
    pub index: usize,
    /// The first of its cells that is there, and where those end.
    pub cells: (usize, usize),
    /// One layer's bytes of the block.
    pub bytes: &'a [u8],
}

impl<'a> Span<'a> {
    /// A block with all its cells.
    pub fn whole(index: usize, bytes: &'a [u8]) -> Self {
        Self {
            index,
            cells: (0, CELLS),
            bytes,
        }
    }

    fn group(&self) -> usize {
        self.index / GROUP
    }
}

/// Where a call stands among those that attend one layer's spans in parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Whether nothing was attended before.
    pub first: bool,
    /// Whether nothing follows: the result is written.
    pub last: bool,
}

impl Step {
    /// All spans in one call.
    pub const ONLY: Self = Self {
        first: true,
        last: true,
    };
}

/// Partial results: of blocks or groups, when a single token's past is spread over threads; and of what has been attended so
/// far, when the spans come in several calls.
#[derive(Debug)]
pub struct Partials {
    /// `[block or group][head][2 + C]`: m, l, o. Pages that are not written take no memory.
    buffer: Buffer<f32>,
    /// `[token][head][total, group][2 + C]`.
    carry: Buffer<f32>,
    /// The group that `carry` holds the beginning of.
    open: Option<usize>,
}

impl Partials {
    /// Room for one token's partials over a cache of `cells` cells, and for what `tokens` tokens carry from call to call: 0
    /// where all spans always come at once.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new(
        shape: &KvShape,
        heads: usize,
        cells: usize,
        tokens: usize,
    ) -> Result<Self, OutOfMemory> {
        let (blocks, row) = (cells.div_ceil(CELLS).max(1), heads * (2 + shape.c_v));
        Ok(Self {
            buffer: Buffer::new(blocks * row)?,
            carry: Buffer::new(tokens * 2 * row)?,
            open: None,
        })
    }

    /// Bytes of results that are spread over threads.
    pub fn bytes(&self) -> u64 {
        size_of_val(&*self.buffer) as u64
    }

    /// Bytes of what is carried from call to call.
    pub fn carried_bytes(&self) -> u64 {
        size_of_val(&*self.carry) as u64
    }
}

thread_local! {
    static SCRATCH: RefCell<kernel::Scratch> = RefCell::default();
}

/// Attends `q` `[T, heads, C]`, whose first token is at `position`, over `spans`, in ascending order; writes `out`
/// `[T, heads, C]`. The tokens' own cells are already in the blocks.
///
/// Spans may come in several calls, all with the same queries: `step` says which is the first and which the last, and `partials`
/// carries what was attended so far. The result does not depend on how they are divided.
///
/// # Panics
/// If lengths do not agree, or several calls were not foreseen in `partials`.
#[allow(clippy::too_many_arguments, reason = "one operation's operands")]
pub fn attend(
    pool: &Pool,
    isa: Isa,
    shape: &KvShape,
    params: &Params<'_>,
    position: usize,
    q: &[f32],
    spans: &[Span<'_>],
    step: Step,
    partials: &mut Partials,
    out: &mut [f32],
) {
    let out = Out::Values(out);
    attend_to(
        pool, isa, shape, params, position, q, spans, step, partials, out,
    );
}

/// The beginning of one token's attention: attends `q` `[heads, C]` over `spans`, all in whole groups, and leaves what they fold to,
/// `totals` `[heads][2 + C]`, each m, l, o. Folding what the later groups give onto it goes on as if it had been done here.
///
/// # Panics
/// If lengths do not agree.
#[allow(clippy::too_many_arguments, reason = "one operation's operands")]
pub fn attend_first_groups(
    pool: &Pool,
    isa: Isa,
    shape: &KvShape,
    params: &Params<'_>,
    position: usize,
    q: &[f32],
    spans: &[Span<'_>],
    partials: &mut Partials,
    totals: &mut [f32],
) {
    let (step, out) = (Step::ONLY, Out::Totals(totals));
    assert_eq!(q.len(), params.heads * shape.c_k, "queries of one token");
    attend_to(
        pool, isa, shape, params, position, q, spans, step, partials, out,
    );
}

/// What is left of an attention.
enum Out<'a> {
    /// Its result `[T, heads, C]`.
    Values(&'a mut [f32]),
    /// What its groups fold to, `[T, heads][2 + C]`.
    Totals(&'a mut [f32]),
}

#[allow(clippy::too_many_arguments, reason = "one operation's operands")]
fn attend_to(
    pool: &Pool,
    isa: Isa,
    shape: &KvShape,
    params: &Params<'_>,
    position: usize,
    q: &[f32],
    spans: &[Span<'_>],
    step: Step,
    partials: &mut Partials,
    out: Out<'_>,
) {
    let (out, is_total, out_size) = match out {
        Out::Values(out) => (out, false, shape.c_v),
        Out::Totals(out) => (out, true, 2 + shape.c_v),
    };
    let tokens = q.len() / (params.heads * shape.c_k);
    assert_eq!(q.len(), tokens * params.heads * shape.c_k, "queries");
    assert_eq!(out.len(), tokens * params.heads * out_size, "outputs");
    assert_eq!(params.heads % shape.heads, 0, "query heads a KV head");
    debug_assert!(spans.is_sorted_by_key(|s| (s.index, s.cells.0)), "order");
    let gqa = params.heads / shape.heads;
    let threads = pool.threads();
    let tokens_a_tile = tile_tokens(tokens, gqa, shape, threads);
    let tiles = tokens.div_ceil(tokens_a_tile);
    let size = 2 + shape.c_v;
    let Partials {
        buffer,
        carry,
        open,
    } = partials;
    let opened = if step.first { None } else { *open };
    *open = spans.last().map(Span::group).or(opened);
    let (out, carry) = (Shared::new(out), Shared::new(carry));
    let rows = |tile: usize, head: usize| Rows {
        shape: *shape,
        params: *params,
        isa,
        first: tile * tokens_a_tile,
        tokens: tokens_a_tile.min(tokens - tile * tokens_a_tile),
        head,
        gqa,
        position,
    };
    let resume = |rows: &Rows<'_>, scratch: &mut Scratch| {
        if step.first {
            scratch.total.clear();
            scratch.group.clear();
            return;
        }
        for r in 0..rows.count() {
            let (t, h) = rows.token_head(r);
            // SAFETY: each token and head belongs to one work item.
            let saved = unsafe { carry.part((t * params.heads + h) * 2 * size, 2 * size) };
            let (total, group) = saved.split_at(size);
            scratch.total.load(r, total);
            scratch.group.load(r, group);
        }
    };
    let leave = |rows: &Rows<'_>, scratch: &mut Scratch| {
        let (total, group) = (&mut scratch.total, &scratch.group);
        if step.last {
            merge(isa, rows.count(), shape.c_v, total, group);
        }
        for r in 0..rows.count() {
            let (t, h) = rows.token_head(r);
            let at = t * params.heads + h;
            if step.last {
                // SAFETY: each token and head belongs to one work item.
                let out = unsafe { out.part(at * out_size, out_size) };
                if is_total {
                    total.save(r, out);
                } else {
                    finish(rows, r, total, out);
                }
            } else {
                // SAFETY: as above.
                let saved = unsafe { carry.part(at * 2 * size, 2 * size) };
                let (into_total, into_group) = saved.split_at_mut(size);
                total.save(r, into_total);
                group.save(r, into_group);
            }
        }
    };
    let spans = seen(spans, params, position, tokens);
    // One token over a long past: its groups, or its spans if those are too few, are spread and folded afterwards. A group that
    // comes in several calls goes on span by span.
    let groups = match (spans.first(), spans.last()) {
        (Some(first), Some(last)) => first.group()..last.group() + 1,
        _ => 0..0,
    };
    let whole_groups = step == Step::ONLY && groups.len() * shape.heads >= ITEMS_A_THREAD * threads;
    let parts = if whole_groups {
        groups.len()
    } else {
        spans.len()
    };
    let room = buffer.len() / (params.heads * size);
    if tokens != 1 || threads == 1 || spans.len() < 2 || parts > room {
        pool.run(tiles * shape.heads, |item| {
            // Later tiles see more cells: they go first.
            let rows = rows(tiles - 1 - item / shape.heads, item % shape.heads);
            let spans = seen(spans, params, position + rows.first, rows.tokens);
            SCRATCH.with_borrow_mut(|scratch| {
                scratch.prepare(&rows, q);
                resume(&rows, scratch);
                attend_rows(&rows, q, spans, opened, scratch);
                leave(&rows, scratch);
            });
        });
        return;
    }
    let part = |i: usize| {
        if whole_groups {
            of_group(spans, groups.start + i)
        } else {
            i..i + 1
        }
    };
    let group_of = |i: usize| {
        if whole_groups {
            groups.start + i
        } else {
            spans[part(i).start].group()
        }
    };
    let saved = Shared::new(buffer);
    let items = parts * shape.heads;
    pool.run(items, |item| {
        let (head, i) = (item % shape.heads, item / shape.heads);
        let rows = rows(0, head);
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.prepare(&rows, q);
            let next = pool.after(item, items).map(|later| Next {
                span: spans[part(later / shape.heads).start],
                head: later % shape.heads,
            });
            attend_spans(&rows, q, &spans[part(i)], next, false, scratch);
            for r in 0..gqa {
                let at = (i * params.heads + head * gqa + r) * size;
                // SAFETY: each part and head belongs to one work item.
                scratch.group.save(r, unsafe { saved.part(at, size) });
            }
        });
    });
    // Folding is spread over query heads, each as if it had a KV head of its own: what others' caches hold comes from there to many threads
    // at once.
    let saved = &*buffer;
    pool.run(params.heads, |head| {
        let rows = Rows {
            head,
            gqa: 1,
            ..rows(0, 0)
        };
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.reserve(&rows);
            resume(&rows, scratch);
            let mut open = opened;
            let of_part = |i: usize| &saved[(i * params.heads + head) * size..][..size];
            (0..parts.min(PARTS_AHEAD)).for_each(|i| fetch_all(of_part(i)));
            for i in 0..parts {
                if i + PARTS_AHEAD < parts {
                    fetch_all(of_part(i + PARTS_AHEAD));
                }
                let group = group_of(i);
                if open != Some(group) {
                    let (total, partial) = (&mut scratch.total, &scratch.group);
                    merge(isa, 1, shape.c_v, total, partial);
                    scratch.group.clear();
                }
                open = Some(group);
                scratch.block.load(0, of_part(i));
                let (group, partial) = (&mut scratch.group, &scratch.block);
                merge(isa, 1, shape.c_v, group, partial);
            }
            leave(&rows, scratch);
        });
    });
}

/// A token of a sequence of its own.
#[derive(Debug, Clone, Copy)]
pub struct Lone<'a> {
    /// Its row of queries and outputs.
    pub row: usize,
    /// Its position in its sequence.
    pub position: usize,
    /// The sequence's cells.
    pub spans: &'a [Span<'a>],
}

/// [`attend`] for some tokens of `q` `[T, heads, C]`, each of a sequence of its own, in one fork. The other tokens' rows of `out`
/// `[T, heads, C]` stay as they are.
///
/// # Panics
/// If lengths do not agree.
pub fn attend_each(
    pool: &Pool,
    isa: Isa,
    shape: &KvShape,
    params: &Params<'_>,
    q: &[f32],
    tokens: &[Lone<'_>],
    out: &mut [f32],
) {
    assert_eq!(params.heads % shape.heads, 0, "query heads a KV head");
    let (row_q, row_out) = (params.heads * shape.c_k, params.heads * shape.c_v);
    for (i, token) in tokens.iter().enumerate() {
        let is_there = token.row < (q.len() / row_q).min(out.len() / row_out);
        let is_own = tokens[..i].iter().all(|other| other.row != token.row);
        assert!(is_there && is_own, "a row of its own");
    }
    let gqa = params.heads / shape.heads;
    let out = Shared::new(out);
    pool.run(tokens.len() * shape.heads, |item| {
        let token = &tokens[item / shape.heads];
        let rows = Rows {
            shape: *shape,
            params: *params,
            isa,
            first: 0,
            tokens: 1,
            head: item % shape.heads,
            gqa,
            position: token.position,
        };
        let q = &q[token.row * row_q..][..row_q];
        let spans = seen(token.spans, params, token.position, 1);
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.prepare(&rows, q);
            scratch.total.clear();
            scratch.group.clear();
            attend_rows(&rows, q, spans, None, scratch);
            let (total, group) = (&mut scratch.total, &scratch.group);
            merge(isa, rows.count(), shape.c_v, total, group);
            for r in 0..rows.count() {
                let (_, head) = rows.token_head(r);
                let at = token.row * row_out + head * shape.c_v;
                // SAFETY: each row and head belongs to one work item.
                let out = unsafe { out.part(at, shape.c_v) };
                finish(&rows, r, total, out);
            }
        });
    });
}

/// Attends rows over all their spans, group by group; `opened` is the group that `scratch` has begun.
fn attend_rows(
    rows: &Rows<'_>,
    q: &[f32],
    spans: &[Span<'_>],
    opened: Option<usize>,
    scratch: &mut Scratch,
) {
    let mut open = opened;
    let mut after = 0;
    for part in spans.chunk_by(|a, b| a.group() == b.group()) {
        after += part.len();
        let goes_on = open == Some(part[0].group());
        if !goes_on {
            let (total, group) = (&mut scratch.total, &scratch.group);
            merge(rows.isa, rows.count(), rows.shape.c_v, total, group);
        }
        open = Some(part[0].group());
        let next = spans.get(after).map(|span| Next {
            span: *span,
            head: rows.head,
        });
        attend_spans(rows, q, part, next, goes_on, scratch);
    }
}

/// The spans with cells that one of `tokens` tokens from `position` on sees.
fn seen<'s, 'a>(
    spans: &'s [Span<'a>],
    params: &Params<'_>,
    position: usize,
    tokens: usize,
) -> &'s [Span<'a>] {
    let (start, end) = (
        params.visible(position).start,
        params.visible(position + tokens - 1).end,
    );
    let first = spans.partition_point(|s| s.index * CELLS + s.cells.1 <= start);
    let end = spans.partition_point(|s| s.index * CELLS + s.cells.0 < end);
    &spans[first.min(end)..end]
}

/// Which spans lie in a group.
fn of_group(spans: &[Span<'_>], group: usize) -> Range<usize> {
    let before = |group: usize| spans.partition_point(|s| s.group() < group);
    before(group)..before(group + 1)
}

/// Tokens that one work item attends together: as many as [`VALUES_MAX`] allows, fewer if that leaves threads too little to
/// share, but then enough to fill the registers.
fn tile_tokens(tokens: usize, gqa: usize, shape: &KvShape, threads: usize) -> usize {
    let most = (VALUES_MAX / (gqa * shape.c_k.max(shape.c_v))).max(1);
    let least = (2 * ROWS_A_GROUP).div_ceil(gqa).min(most);
    let tiles = (ITEMS_A_THREAD * threads).div_ceil(shape.heads);
    tokens.div_ceil(tiles).clamp(least, most).min(tokens.max(1))
}
