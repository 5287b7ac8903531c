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
//! left; blocks without a visible cell are left out. Merging `a` and `b` with `m = max(m_a, m_b)`,
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

pub use layout::{KvShape, KvShapeError, KvType, write_cell};

use crate::isa::Isa;
use crate::mem::{Buffer, OutOfMemory, Shared};
use crate::pool::Pool;
use kernel::{ROWS_A_GROUP, Rows, State, attend_blocks, finish, merge};
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

/// Partial results of blocks or groups, when a single token's past is spread over threads.
#[derive(Debug)]
pub struct Partials {
    /// `[block or group][head][2 + C]`: m, l, o. Pages that are not written take no memory.
    buffer: Buffer<f32>,
}

impl Partials {
    /// Room for one token's partials over a cache of `cells` cells.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new(shape: &KvShape, heads: usize, cells: usize) -> Result<Self, OutOfMemory> {
        let blocks = cells.div_ceil(CELLS).max(1);
        Ok(Self {
            buffer: Buffer::new(blocks * heads * (2 + shape.c_v))?,
        })
    }

    /// Bytes of the buffer.
    pub fn bytes(&self) -> u64 {
        size_of_val(&*self.buffer) as u64
    }
}

/// One layer's blocks: a slice of the same place in each of some slabs.
#[derive(Debug, Clone, Copy)]
pub struct Blocks<'a> {
    slabs: &'a [Buffer<u8>],
    start: usize,
    bytes: usize,
}

impl<'a> Blocks<'a> {
    /// Block `i` is bytes `start .. start + bytes` of slab `i`.
    pub fn new(slabs: &'a [Buffer<u8>], start: usize, bytes: usize) -> Self {
        Self {
            slabs,
            start,
            bytes,
        }
    }

    /// Number of blocks.
    pub fn count(&self) -> usize {
        self.slabs.len()
    }

    /// Block `i`: cells `256 i ..`.
    pub fn get(&self, i: usize) -> &'a [u8] {
        &self.slabs[i][self.start..self.start + self.bytes]
    }
}

thread_local! {
    static SCRATCH: RefCell<kernel::Scratch> = RefCell::default();
}

/// Attends `q` `[T, heads, C]`, whose first token is at `position`, over `blocks` (block `i` holds cells `256 i ..`); writes
/// `out` `[T, heads, C]`. The tokens' own cells are already in the blocks.
///
/// # Panics
/// If lengths do not agree or a visible cell has no block.
#[allow(clippy::too_many_arguments, reason = "one operation's operands")]
pub fn attend(
    pool: &Pool,
    isa: Isa,
    shape: &KvShape,
    params: &Params<'_>,
    position: usize,
    q: &[f32],
    blocks: Blocks<'_>,
    partials: &mut Partials,
    out: &mut [f32],
) {
    let tokens = q.len() / (params.heads * shape.c_k);
    assert_eq!(q.len(), tokens * params.heads * shape.c_k, "queries");
    assert_eq!(out.len(), tokens * params.heads * shape.c_v, "outputs");
    assert_eq!(params.heads % shape.heads, 0, "query heads a KV head");
    assert!(
        blocks.count() * CELLS >= position + tokens,
        "{} blocks for cell {}",
        blocks.count(),
        position + tokens
    );
    let gqa = params.heads / shape.heads;
    let threads = pool.threads();
    let tokens_a_tile = tile_tokens(tokens, gqa, shape, threads);
    let tiles = tokens.div_ceil(tokens_a_tile);
    let out = Shared::new(out);
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
    let store = |rows: &Rows<'_>, state: &mut State| {
        for r in 0..rows.count() {
            let (t, h) = rows.token_head(r);
            // SAFETY: each token and head belongs to one work item.
            let out = unsafe { out.part((t * params.heads + h) * shape.c_v, shape.c_v) };
            finish(rows, r, state, out);
        }
    };
    let seen = params.visible(position);
    let seen_blocks = seen.start / CELLS..seen.end.div_ceil(CELLS);
    if tokens != 1 || threads == 1 || seen_blocks.len() < 2 {
        pool.run(tiles * shape.heads, |item| {
            // Later tiles see more cells: they go first.
            let rows = rows(tiles - 1 - item / shape.heads, item % shape.heads);
            let first = params.visible(position + rows.first).start / CELLS;
            let end = (position + rows.first + rows.tokens).div_ceil(CELLS);
            SCRATCH.with_borrow_mut(|scratch| {
                scratch.prepare(&rows, q);
                scratch.total.clear();
                for part in parts(first..end, GROUP) {
                    attend_blocks(&rows, q, blocks, part, end, scratch);
                    let (total, partial) = (&mut scratch.total, &scratch.group);
                    merge(isa, rows.count(), shape.c_v, total, partial);
                }
                store(&rows, &mut scratch.total);
            });
        });
        return;
    }
    // One token over a long past: its groups, or its blocks if those are too few, are spread and folded afterwards.
    let groups = parts(seen_blocks.clone(), GROUP).count();
    let unit = if groups * shape.heads >= ITEMS_A_THREAD * threads {
        GROUP
    } else {
        1
    };
    let spread: usize = parts(seen_blocks.clone(), unit).count();
    let first = seen_blocks.start / unit;
    let size = 2 + shape.c_v;
    let saved = Shared::new(&mut partials.buffer);
    pool.run(spread * shape.heads, |item| {
        let (head, part) = (item % shape.heads, item / shape.heads);
        let rows = rows(0, head);
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.prepare(&rows, q);
            let start = seen_blocks.start.max((first + part) * unit);
            let end = seen_blocks.end.min((first + part + 1) * unit);
            attend_blocks(&rows, q, blocks, start..end, end, scratch);
            for r in 0..gqa {
                let at = (part * params.heads + head * gqa + r) * size;
                // SAFETY: each part and head belongs to one work item.
                scratch.group.save(r, unsafe { saved.part(at, size) });
            }
        });
    });
    let saved = &partials.buffer;
    pool.run(shape.heads, |head| {
        let rows = rows(0, head);
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.prepare(&rows, q);
            scratch.total.clear();
            for group in parts(seen_blocks.clone(), GROUP) {
                scratch.group.clear();
                for part in parts(group, unit) {
                    let part = part.start / unit - first;
                    for r in 0..gqa {
                        let at = (part * params.heads + head * gqa + r) * size;
                        scratch.block.load(r, &saved[at..][..size]);
                    }
                    let (group, partial) = (&mut scratch.group, &scratch.block);
                    merge(isa, gqa, shape.c_v, group, partial);
                }
                let (total, partial) = (&mut scratch.total, &scratch.group);
                merge(isa, gqa, shape.c_v, total, partial);
            }
            store(&rows, &mut scratch.total);
        });
    });
}

/// Tokens that one work item attends together: as many as [`VALUES_MAX`] allows, fewer if that leaves threads too little to
/// share, but then enough to fill the registers.
fn tile_tokens(tokens: usize, gqa: usize, shape: &KvShape, threads: usize) -> usize {
    let most = (VALUES_MAX / (gqa * shape.c_k.max(shape.c_v))).max(1);
    let least = (2 * ROWS_A_GROUP).div_ceil(gqa).min(most);
    let tiles = (ITEMS_A_THREAD * threads).div_ceil(shape.heads);
    tokens.div_ceil(tiles).clamp(least, most).min(tokens.max(1))
}

/// Cuts a range of blocks at multiples of `len`.
fn parts(blocks: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    (blocks.start / len..blocks.end.div_ceil(len))
        .map(move |i| blocks.start.max(i * len)..blocks.end.min((i + 1) * len))
}
