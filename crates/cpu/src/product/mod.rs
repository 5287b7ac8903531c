//! Matrix products: weights `[N, K]` in tile layout times activations `[T, K]` gives `[T, N]`.
//!
//! `quant::product` is the definition; every kernel here equals it bit for bit, for any number of rows and tokens.
//!
//! | kernel | for | idea |
//! |---|---|---|
//! | `scalar` | any processor | the definition itself, row by row |
//! | `avx2` | super-blocks | `vpmaddubsw` on 8 rows a register, 16-bit sums for as long as they fit, both halves of a tile and 4 tokens a pass over unpacked weights |
//! | `avx2_32` | blocks of 32 | the same, block by block, which are unpacked on the way through the first tokens' products |
//! | `gemv256` | up to 4 tokens, of blocks of 32 up to 3 | the same, weights unpacked in registers |
//! | `avx512` | quantised | `vpdpbusd` on 16 rows a register, up to 8 tokens a pass over unpacked weights |
//! | `gemv512` | quantised, up to 8 tokens | the same, weights unpacked in registers; of blocks of 32 all tokens side by side, from 4 on |
//! | `amx` | quantised, many tokens | 16 x 16 tiles; super-blocks as two planes, so that a tile runs over all 256 values |
//! | `float` | F32, F16, BF16 | 16 rows a register, `fma` along K |
//!
//! All unpack a tile's weights once into the first-level cache and pass over the tokens there.

/// The body for each group of a run: a loop of such bodies would stay one.
#[cfg(target_arch = "x86_64")]
macro_rules! each_group {
    (|$g:ident| $body:block) => {
        each_group!(@ $g $body 0 1 2 3 4 5 6 7)
    };
    (@ $g:ident $body:block $($i:literal)*) => {
        $({
            let $g: usize = $i;
            $body
        })*
    };
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx2_32;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod float;
#[cfg(target_arch = "x86_64")]
mod gemv256;
#[cfg(target_arch = "x86_64")]
mod gemv512;
mod norm;
#[cfg(target_arch = "x86_64")]
mod sets;
#[cfg(target_arch = "x86_64")]
mod sums;
mod unpacked;

#[cfg(test)]
mod tests;

pub use norm::row_norms;

use crate::acts::ActsView;
use crate::isa::Isa;
use crate::mem::Shared;
use crate::pool::Pool;
use quant::formats::{Class, class};
use quant::product::{dot_float, dot_quantised};
use quant::tile::{ROWS, TileMatrix};
use quant::{with_format32, with_format256};
use std::ops::Range;

/// Work items a thread, so that a late thread can be helped out.
const ITEMS_A_THREAD: usize = 6;

/// The same for prompts, whose items are longer: fewer read the tokens' codes less often.
const PROMPT_ITEMS_A_THREAD: usize = 4;

/// Tiles of one work item.
fn tiles_an_item(pool: &Pool, tiles: usize, tokens: usize) -> usize {
    if tokens < crate::acts::TILE {
        tiles.div_ceil(pool.threads() * ITEMS_A_THREAD)
    } else {
        // AMX multiplies tiles two by two.
        tiles
            .div_ceil(pool.threads() * PROMPT_ITEMS_A_THREAD)
            .next_multiple_of(2)
    }
}

/// Fewer tokens than this go to vectors even where there is AMX: a 16-row tile would be mostly empty.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
const AMX_TOKENS_MIN: usize = crate::acts::TILE;

/// The right-hand side of products: one set of activations, in every form that the weights at hand read.
#[derive(Debug, Clone, Copy)]
pub struct Operand<'a> {
    /// The values, `[tokens, k]`; read by float weights.
    pub x: &'a [f32],
    /// Tokens.
    pub tokens: usize,
    /// Values a token.
    pub k: usize,
    /// In blocks of 32, if any weights are of class `Block32`.
    pub acts32: Option<ActsView<'a>>,
    /// In blocks of 256, if any weights are of class `Block256`.
    pub acts256: Option<ActsView<'a>>,
}

impl Operand<'_> {
    fn acts(&self, block: usize) -> &ActsView<'_> {
        let acts = if block == quant::act::BLOCK32 {
            &self.acts32
        } else {
            &self.acts256
        };
        let acts = acts
            .as_ref()
            .expect("the operand has the blocks that its weights read");
        assert_eq!(
            (acts.tokens(), acts.k(), acts.block()),
            (self.tokens, self.k, block),
            "activations of this operand"
        );
        acts
    }
}

/// One product of a group that shares its activations.
#[derive(Debug)]
pub struct Task<'a> {
    /// Weights `[N, K]`.
    pub w: TileMatrix<'a>,
    /// Result `[tokens, N]`.
    pub out: &'a mut [f32],
}

/// Computes a group of products over the pool, in one fork.
///
/// # Panics
/// If shapes do not agree or the operand lacks a form that some weights read.
pub fn products(pool: &Pool, isa: Isa, operand: &Operand<'_>, tasks: &mut [Task<'_>]) {
    let tiles: usize = tasks.iter().map(|t| t.w.tiles()).sum();
    let per_item = tiles_an_item(pool, tiles, operand.tokens).max(1);
    let jobs: Vec<Job<'_>> = tasks
        .iter_mut()
        .map(|task| Job::new(*operand, task.w, task.out, per_item))
        .collect();
    run(pool, isa, &jobs);
}

/// A product of a group in which each has activations of its own.
#[derive(Debug)]
pub struct OwnTask<'a> {
    /// Activations.
    pub operand: Operand<'a>,
    /// Weights `[N, K]`.
    pub w: TileMatrix<'a>,
    /// Result `[tokens, N]`.
    pub out: &'a mut [f32],
}

/// What a tile of weights costs before it is multiplied, in tokens that it is multiplied with.
const TILE_TOKENS: usize = 8;

/// Computes products of different activations over the pool, in one fork: those of a mixture's experts.
///
/// # Panics
/// If shapes do not agree or an operand lacks a form that its weights read.
pub fn own_products(pool: &Pool, isa: Isa, tasks: &mut [OwnTask<'_>]) {
    let cost = |task: &OwnTask<'_>| TILE_TOKENS + task.operand.tokens;
    let all: usize = tasks.iter().map(|t| t.w.tiles() * cost(t)).sum();
    let item = all.div_ceil(pool.threads() * ITEMS_A_THREAD);
    let jobs: Vec<Job<'_>> = tasks
        .iter_mut()
        .map(|task| {
            let tiles = (item / cost(task)).max(1);
            // AMX multiplies tiles two by two.
            let pairs = task.operand.tokens >= crate::acts::TILE;
            let per_item = tiles.next_multiple_of(if pairs { 2 } else { 1 });
            Job::new(task.operand, task.w, task.out, per_item)
        })
        .collect();
    run(pool, isa, &jobs);
}

fn run(pool: &Pool, isa: Isa, jobs: &[Job<'_>]) {
    let n_items = jobs.iter().map(Job::items).sum();
    pool.run(n_items, |mut item| {
        for job in jobs {
            if item < job.items() {
                let first = item * job.per_item;
                let end = job.w.tiles().min(first + job.per_item);
                return job.run(isa, first..end);
            }
            item -= job.items();
        }
    });
}

/// A task while it runs.
struct Job<'a> {
    operand: Operand<'a>,
    w: TileMatrix<'a>,
    out: Shared<'a, f32>,
    /// Tiles of a work item.
    per_item: usize,
}

impl<'a> Job<'a> {
    fn new(operand: Operand<'a>, w: TileMatrix<'a>, out: &'a mut [f32], per_item: usize) -> Self {
        assert_eq!(
            w.k(),
            operand.k,
            "columns of the weights and values a token"
        );
        assert_eq!(
            out.len(),
            operand.tokens * w.n(),
            "outputs of {} tokens",
            operand.tokens
        );
        Self {
            operand,
            w,
            out: Shared::new(out),
            per_item,
        }
    }

    fn items(&self) -> usize {
        self.w.tiles().div_ceil(self.per_item)
    }

    fn run(&self, isa: Isa, tiles: Range<usize>) {
        let operand = &self.operand;
        match class(self.w.ty()).expect("a tile matrix has a supported format") {
            Class::Float => match isa {
                Isa::Scalar => self.scalar(operand.tokens, tiles, |row, t| {
                    dot_float(&self.w, row, &operand.x[t * operand.k..][..operand.k])
                }),
                isa => float::tiles(isa, &self.w, operand.x, operand.tokens, &tiles, &self.out),
            },
            Class::Block32 => self.quantised(
                isa,
                operand.acts(quant::act::BLOCK32),
                tiles,
                Class::Block32,
            ),
            Class::Block256 => self.quantised(
                isa,
                operand.acts(quant::act::BLOCK256),
                tiles,
                Class::Block256,
            ),
        }
    }

    fn quantised(&self, isa: Isa, acts: &ActsView<'_>, tiles: Range<usize>, class: Class) {
        let is32 = class == Class::Block32;
        let (w, out) = (&self.w, &self.out);
        match isa {
            Isa::Scalar => {
                let rows: Vec<_> = (0..acts.tokens()).map(|t| acts.row(t)).collect();
                self.scalar(acts.tokens(), tiles, |row, t| {
                    dot_quantised(w, row, &rows[t])
                });
            }
            // SAFETY (all below): the token in `isa` proves that the processor has the features.
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Isa::Amx(_) if acts.tokens() >= AMX_TOKENS_MIN => {
                if is32 {
                    // SAFETY: see above.
                    with_format32!(w.ty(), U => unsafe { amx::tiles32::<U>(w, acts, tiles, out) })
                } else {
                    // SAFETY: see above.
                    with_format256!(w.ty(), U => unsafe { amx::tiles256::<U>(w, acts, tiles, out) })
                }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(_) | Isa::Amx(_) if acts.tokens() <= gemv512::TOKENS_MAX => {
                if is32 {
                    // SAFETY: see above.
                    with_format32!(w.ty(), U => unsafe { gemv512::tiles32::<U>(w, acts, tiles, out) })
                } else {
                    // SAFETY: see above.
                    with_format256!(w.ty(), U => unsafe { gemv512::tiles256::<U>(w, acts, tiles, out) })
                }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(_) | Isa::Amx(_) => {
                if is32 {
                    // SAFETY: see above.
                    with_format32!(w.ty(), U => unsafe { avx512::tiles32::<U>(w, acts, tiles, out) })
                } else {
                    // SAFETY: see above.
                    with_format256!(w.ty(), U => unsafe { avx512::tiles256::<U>(w, acts, tiles, out) })
                }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) if is32 && acts.tokens() <= crate::acts::LONE => {
                // SAFETY: see above.
                with_format32!(w.ty(), U => unsafe { gemv256::tiles32::<U>(w, acts, tiles, out) })
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) if is32 => {
                // SAFETY: see above.
                with_format32!(w.ty(), U => unsafe { avx2_32::tiles32::<U>(w, acts, tiles, out) })
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) if acts.tokens() <= gemv256::TOKENS_MAX => {
                // SAFETY: see above.
                with_format256!(w.ty(), U => unsafe { gemv256::tiles256::<U>(w, acts, tiles, out) })
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) => {
                // SAFETY: see above.
                with_format256!(w.ty(), U => unsafe { avx2::tiles256::<U>(w, acts, tiles, out) })
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("tokens of other processors cannot be had"),
        }
    }

    fn scalar(&self, tokens: usize, tiles: Range<usize>, dot: impl Fn(usize, usize) -> f32) {
        for tile in tiles {
            for t in 0..tokens {
                // SAFETY: each tile writes its own rows of every token.
                let out = unsafe {
                    self.out
                        .part(t * self.w.n() + tile * ROWS, self.w.tile_rows(tile))
                };
                for (r, out) in out.iter_mut().enumerate() {
                    *out = dot(tile * ROWS + r, t);
                }
            }
        }
    }
}
