//! Products with F32, F16 and BF16 weights: 16 rows a register, one `fma` a value of K.

use crate::isa::Isa;
use crate::mem::Shared;
use crate::simd::{F32x16, simd_kernel};
use gguf::TensorType;
use quant::product::CHUNK;
use quant::tile::{MAX_BLOCK_BYTES, ROWS, TileMatrix};
use std::ops::Range;

/// Tiles of a float format.
pub(super) fn tiles(
    isa: Isa,
    w: &TileMatrix<'_>,
    x: &[f32],
    tokens: usize,
    tiles: &Range<usize>,
    out: &Shared<'_, f32>,
) {
    match w.ty() {
        TensorType::F32 => tiles_f32(isa, w, x, tokens, tiles, out),
        TensorType::F16 => tiles_f16(isa, w, x, tokens, tiles, out),
        TensorType::BF16 => tiles_bf16(isa, w, x, tokens, tiles, out),
        ty => unreachable!("{} is not a float format", ty.name()),
    }
}

simd_kernel! { fn tiles_f32(w: &TileMatrix<'_>, x: &[f32], tokens: usize, tiles: &Range<usize>, out: &Shared<'_, f32>) = all::<F32>; }
simd_kernel! { fn tiles_f16(w: &TileMatrix<'_>, x: &[f32], tokens: usize, tiles: &Range<usize>, out: &Shared<'_, f32>) = all::<F16>; }
simd_kernel! { fn tiles_bf16(w: &TileMatrix<'_>, x: &[f32], tokens: usize, tiles: &Range<usize>, out: &Shared<'_, f32>) = all::<Bf16>; }

/// How 16 rows' values of one k are loaded.
trait Load {
    const BYTES: usize;
    fn load<V: F32x16>(bytes: &[u8]) -> V;
}
enum F32 {}
enum F16 {}
enum Bf16 {}

impl Load for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    fn load<V: F32x16>(bytes: &[u8]) -> V {
        let values: [f32; 16] = std::array::from_fn(|i| {
            f32::from_le_bytes(bytes[4 * i..4 * i + 4].try_into().expect("4 bytes"))
        });
        V::load(&values)
    }
}
impl Load for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn load<V: F32x16>(bytes: &[u8]) -> V {
        V::load_f16(bytes)
    }
}
impl Load for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn load<V: F32x16>(bytes: &[u8]) -> V {
        V::load_bf16(bytes)
    }
}

/// Tiles times tokens that one pass accumulates in registers: enough independent sums to hide the latency of an `fma`.
const SUMS: usize = 8;

#[inline(always)]
fn all<V: F32x16, L: Load>(
    w: &TileMatrix<'_>,
    x: &[f32],
    tokens: usize,
    tiles: &Range<usize>,
    out: &Shared<'_, f32>,
) {
    for t in (0..tokens).step_by(SUMS) {
        let n = SUMS.min(tokens - t);
        if n == 1 {
            // One token: several tiles side by side instead.
            for tile in tiles.clone().step_by(SUMS) {
                several_tiles::<V, L>(w, x, t, tile..tiles.end.min(tile + SUMS), out);
            }
        } else {
            for tile in tiles.clone() {
                several_tokens::<V, L>(w, x, t..t + n, tile, out);
            }
        }
    }
}

/// A tile's bytes of K values `k..`, of 16 rows (filled up with zeros).
#[inline(always)]
fn column<'a>(
    w: &TileMatrix<'_>,
    tile: &'a [u8],
    rows: usize,
    k: usize,
    bytes: usize,
    pad: &'a mut [u8],
) -> &'a [u8] {
    let column = &tile[k * rows * bytes..][..rows * bytes];
    if rows == ROWS {
        return column;
    }
    w.layout().pad(rows, column, &mut pad[..ROWS * bytes]);
    &pad[..ROWS * bytes]
}

#[inline(always)]
fn put<V: F32x16>(
    w: &TileMatrix<'_>,
    tile: usize,
    t: usize,
    first: bool,
    acc: V,
    out: &Shared<'_, f32>,
) {
    let sums = acc.to_array();
    // SAFETY: each tile writes its own rows of every token.
    let out = unsafe { out.part(t * w.n() + tile * ROWS, w.tile_rows(tile)) };
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = if first { sum } else { *out + sum };
    }
}

#[inline(always)]
fn several_tokens<V: F32x16, L: Load>(
    w: &TileMatrix<'_>,
    x: &[f32],
    tokens: Range<usize>,
    tile: usize,
    out: &Shared<'_, f32>,
) {
    let (rows, data) = (w.tile_rows(tile), w.tile(tile));
    let mut pad = [0u8; MAX_BLOCK_BYTES];
    for first in (0..w.k()).step_by(CHUNK) {
        let mut acc = [V::splat(0.0); SUMS];
        for k in first..w.k().min(first + CHUNK) {
            let v = L::load::<V>(column(w, data, rows, k, L::BYTES, &mut pad));
            for (acc, t) in acc.iter_mut().zip(tokens.clone()) {
                *acc = v.fma(V::splat(x[t * w.k() + k]), *acc);
            }
        }
        for (acc, t) in acc.into_iter().zip(tokens.clone()) {
            put(w, tile, t, first == 0, acc, out);
        }
    }
}

#[inline(always)]
fn several_tiles<V: F32x16, L: Load>(
    w: &TileMatrix<'_>,
    x: &[f32],
    t: usize,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    let x = &x[t * w.k()..][..w.k()];
    let mut pad = [0u8; MAX_BLOCK_BYTES];
    for first in (0..w.k()).step_by(CHUNK) {
        let mut acc = [V::splat(0.0); SUMS];
        for k in first..w.k().min(first + CHUNK) {
            let x = V::splat(x[k]);
            for (acc, tile) in acc.iter_mut().zip(tiles.clone()) {
                let v = L::load::<V>(column(
                    w,
                    w.tile(tile),
                    w.tile_rows(tile),
                    k,
                    L::BYTES,
                    &mut pad,
                ));
                *acc = v.fma(x, *acc);
            }
        }
        for (acc, tile) in acc.into_iter().zip(tiles.clone()) {
            put(w, tile, t, first == 0, acc, out);
        }
    }
}
