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
#[cfg(test)]
mod tests;

pub use layout::{KvShape, KvShapeError, KvType, write_cell};

use crate::isa::Isa;
use crate::mem::{Buffer, OutOfMemory, Shared};
use crate::pool::Pool;
use kernel::{Rows, State, attend_group, finish, merge};
use std::cell::RefCell;
use std::ops::Range;

/// Cells a block.
pub const CELLS: usize = 256;

/// Blocks a group of the fold.
pub const GROUP: usize = 4;

/// Query rows (tokens times heads of one KV head) that one work item attends together.
const ROWS_MAX: usize = 32;

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

/// Partial results of groups, when a single token's groups are spread over threads.
#[derive(Debug)]
pub struct Partials {
    /// `[group][head][2 + C]`: m, l, o.
    buffer: Buffer<f32>,
}

impl Partials {
    /// Room for one token's partials over a cache of `cells` cells.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new(shape: &KvShape, heads: usize, cells: usize) -> Result<Self, OutOfMemory> {
        let groups = cells.div_ceil(CELLS * GROUP).max(1);
        Ok(Self {
            buffer: Buffer::new(groups * heads * (2 + shape.c_v))?,
        })
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
    let tokens_a_tile = (ROWS_MAX / gqa).clamp(1, tokens.max(1));
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
    let last = rows(tiles.saturating_sub(1), 0);
    let groups = |rows: &Rows<'_>| {
        let first = params.visible(position + rows.first).start;
        first / (CELLS * GROUP)..(position + rows.first + rows.tokens).div_ceil(CELLS * GROUP)
    };
    let all_groups = groups(&last);
    if tiles * shape.heads >= 2 * pool.threads() || all_groups.len() < 2 || tokens > 1 {
        pool.run(tiles * shape.heads, |item| {
            // Later tiles see more cells: they go first.
            let rows = rows(tiles - 1 - item / shape.heads, item % shape.heads);
            SCRATCH.with_borrow_mut(|scratch| {
                scratch.prepare(&rows);
                scratch.total.clear();
                for group in groups(&rows) {
                    attend_group(&rows, q, blocks, group, scratch);
                    let (total, partial) = (&mut scratch.total, &scratch.group);
                    merge(isa, rows.count(), shape.c_v, total, partial);
                }
                store(&rows, &mut scratch.total);
            });
        });
        return;
    }
    // One token over a long past: its groups are spread, too, and folded afterwards.
    let size = 2 + shape.c_v;
    let parts = Shared::new(&mut partials.buffer);
    let n = all_groups.len();
    pool.run(n * shape.heads, |item| {
        let (head, group) = (item % shape.heads, all_groups.start + item / shape.heads);
        let rows = rows(0, head);
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.prepare(&rows);
            attend_group(&rows, q, blocks, group, scratch);
            for r in 0..gqa {
                let at = ((group - all_groups.start) * params.heads + head * gqa + r) * size;
                // SAFETY: each group and head belongs to one work item.
                scratch.group.save(r, unsafe { parts.part(at, size) });
            }
        });
    });
    let parts = &partials.buffer;
    pool.run(shape.heads, |head| {
        let rows = rows(0, head);
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.prepare(&rows);
            scratch.total.clear();
            for group in 0..n {
                for r in 0..gqa {
                    scratch.group.load(
                        r,
                        &parts[(group * params.heads + head * gqa + r) * size..][..size],
                    );
                }
                let (total, partial) = (&mut scratch.total, &scratch.group);
                merge(isa, gqa, shape.c_v, total, partial);
            }
            store(&rows, &mut scratch.total);
        });
    });
}
