//! The definition of every matrix product: readable, slow, exact. Every fast kernel equals it bit for bit.
//!
//! For one row of weights and one token, along K in chunks of [`CHUNK`] values:
//!
//! ```text
//! Block32, block b:   acc = fma(f32(sum_k q_w[k] * q_a[k]), d_w * d_a, acc)
//!         with m:     acc = fma(m_w, d_a * f32(sum_k q_a[k]), acc)
//! Block256, block b:  acc = fma(f32(sum_j scale[j] * sum_k q_w[k] * q_a[k]), d_w * d_a, acc)
//!         with min:   acc = fma(f32(sum_j min[j] * sum_k q_a[k]), -(dmin_w * d_a), acc)
//! Float, value k:     acc = fma(w[k], x[k], acc)
//! ```
//!
//! `acc` starts each chunk at +0; the result is the first chunk's `acc`, to which the others are added in order. Sums of
//! integers are exact (32 bits suffice for every format), so they may be taken in any order. A row's result does not
//! depend on how many rows or tokens are computed with it. `docs/arithmetic.md` says why the order is this one.

use crate::act::{ActRow, BLOCK32, BLOCK256, Passes};
use crate::formats::{self, Block32, Block256, Class};
use crate::tile::{MAX_BLOCK_BYTES, TileMatrix};
use gguf::TensorType;

/// Values of K that one `f32` accumulator runs over before it is added to the result.
pub const CHUNK: usize = 512;

/// The activation block that products with this format read: 32 or 256; `None` for float weights, which read `f32`.
pub fn act_block(ty: TensorType) -> Option<usize> {
    match formats::class(ty)? {
        Class::Float => None,
        Class::Block32 => Some(BLOCK32),
        Class::Block256 => Some(BLOCK256),
    }
}

/// How a down projection's activations are quantised.
///
/// Gated activations have heavy tails: with one scale for 256 of them 8 bits lose three times what the rest of the layer does
/// (docs/arithmetic.md).
pub fn down_passes(ty: TensorType) -> Passes {
    if act_block(ty) == Some(BLOCK256) {
        Passes::Two
    } else {
        Passes::One
    }
}

/// Weights row `row` times one token's quantised activations.
///
/// # Panics
/// If the format is a float one, or the activations' length or block are not the row's.
pub fn dot_quantised(w: &TileMatrix<'_>, row: usize, act: &ActRow) -> f32 {
    assert_eq!(w.k(), act.q.len(), "activations a row");
    assert_eq!(
        act_block(w.ty()),
        Some(act.block),
        "activation block of {}",
        w.ty().name()
    );
    let len = w.layout().block_len();
    let mut bytes = [0u8; MAX_BLOCK_BYTES];
    chunked(w.blocks(), CHUNK / len, |b, acc| {
        w.file_block(row, b, &mut bytes);
        let bytes = &bytes[..w.layout().block_bytes()];
        let (q_a, d_a) = (&act.q[b * len..(b + 1) * len], act.d[b]);
        if len == BLOCK32 {
            let mut block = Block32::ZERO;
            formats::unpack32(w.ty(), bytes, &mut block);
            block32(&block, q_a, d_a, has_min(w.ty()), acc)
        } else {
            let mut block = Block256::ZERO;
            formats::unpack256(w.ty(), bytes, &mut block);
            block256(&block, q_a, d_a, has_min(w.ty()), acc)
        }
    })
}

/// Weights row `row` (F32, F16, BF16) times one token's values.
///
/// # Panics
/// If the format is not a float one or the length is not the row's.
pub fn dot_float(w: &TileMatrix<'_>, row: usize, x: &[f32]) -> f32 {
    assert_eq!(
        formats::class(w.ty()),
        Some(Class::Float),
        "{} is a float format",
        w.ty().name()
    );
    let mut values = vec![0.0; w.k()];
    w.decode_row(row, &mut values);
    chunked(values.len(), CHUNK, |k, acc| values[k].mul_add(x[k], acc))
}

/// Folds `n` blocks in order, `per_chunk` of them into each accumulator, and adds the accumulators in order.
fn chunked(n: usize, per_chunk: usize, mut step: impl FnMut(usize, f32) -> f32) -> f32 {
    let mut sum = 0.0;
    for start in (0..n).step_by(per_chunk) {
        let acc = (start..n.min(start + per_chunk)).fold(0.0, |acc, b| step(b, acc));
        sum = if start == 0 { acc } else { sum + acc };
    }
    sum
}

/// Whether a format subtracts or adds a minimum times the sum of the activations.
#[inline]
pub const fn has_min(ty: TensorType) -> bool {
    matches!(
        ty,
        TensorType::Q4_1
            | TensorType::Q5_1
            | TensorType::Q2_K
            | TensorType::Q4_K
            | TensorType::Q5_K
    )
}

fn dot_int(w: &[i8], a: &[i8]) -> i32 {
    w.iter()
        .zip(a)
        .map(|(&w, &a)| i32::from(w) * i32::from(a))
        .sum()
}

fn sum_int(a: &[i8]) -> i32 {
    a.iter().map(|&a| i32::from(a)).sum()
}

fn block32(w: &Block32, q_a: &[i8], d_a: f32, min: bool, acc: f32) -> f32 {
    let acc = (dot_int(&w.q, q_a) as f32).mul_add(w.d * d_a, acc);
    if min {
        w.m.mul_add(d_a * sum_int(q_a) as f32, acc)
    } else {
        acc
    }
}

fn block256(w: &Block256, q_a: &[i8], d_a: f32, min: bool, acc: f32) -> f32 {
    let subs = || {
        w.q.chunks(16)
            .zip(q_a.chunks(16))
            .zip(w.scale.iter().zip(&w.min))
    };
    let dot: i32 = subs()
        .map(|((w, a), (&scale, _))| i32::from(scale) * dot_int(w, a))
        .sum();
    let acc = (dot as f32).mul_add(w.d * d_a, acc);
    if !min {
        return acc;
    }
    let mins: i32 = subs()
        .map(|((_, a), (_, &min))| i32::from(min) * sum_int(a))
        .sum();
    (mins as f32).mul_add(-(w.dmin * d_a), acc)
}
