//! How long the rows of a matrix are: what products of them with anything are bounded by.

use super::unpacked::{CHUNK32, Chunk32, Super256, TileBlocks};
use crate::pool::Pool;
use quant::formats::{Class, class};
use quant::lanes::{RowF32, Unpack32, Unpack256};
use quant::tile::{ROWS, TileMatrix};
use quant::{with_format32, with_format256};

/// Tiles of a work item.
const TILES_AN_ITEM: usize = 16;

/// The Euclidean norm of each row of `|d q| + |m|`: of its weights, or above that where they have offsets. `None` for float formats; NaN where
/// a weight is.
pub fn row_norms(pool: &Pool, w: &TileMatrix<'_>) -> Option<Vec<f32>> {
    let class = class(w.ty()).filter(|class| *class != Class::Float)?;
    let mut squares = vec![[0.0; ROWS]; w.tiles()];
    pool.chunks_mut(&mut squares, TILES_AN_ITEM, |item, squares| {
        for (i, squares) in squares.iter_mut().enumerate() {
            let tile = item * TILES_AN_ITEM + i;
            *squares = if class == Class::Block32 {
                with_format32!(w.ty(), U => squares32::<U>(w, tile))
            } else {
                with_format256!(w.ty(), U => squares256::<U>(w, tile))
            };
        }
    });
    // Of each square that is subnormal as much may be missing as the smallest of these.
    let lost = w.k() as f32 * f32::from_bits(1);
    let squares = squares.as_flattened()[..w.n()].iter();
    Some(squares.map(|square| (square + lost).sqrt()).collect())
}

/// Adds the squares of a run's `terms`, each a function of row, value and code.
#[inline(always)]
fn add_run(squares: &mut RowF32, run: &[u8; 512], term: impl Fn(usize, usize, f32) -> f32) {
    for (g, group) in run.chunks_exact(4 * ROWS).enumerate() {
        for (r, square) in squares.iter_mut().enumerate() {
            for (i, code) in group[4 * r..][..4].iter().enumerate() {
                let term = term(r, 4 * g + i, f32::from(*code));
                *square += term * term;
            }
        }
    }
}

fn squares32<U: Unpack32>(w: &TileMatrix<'_>, tile: usize) -> RowF32 {
    let mut blocks = TileBlocks::new(w, tile);
    let (mut chunk, mut squares) = (Chunk32::zero(), [0.0; ROWS]);
    for first in (0..w.blocks()).step_by(CHUNK32) {
        for i in 0..chunk.unpack::<U, false>(&mut blocks, first) {
            let (d, m) = (&chunk.d[i], &chunk.m[i]);
            add_run(&mut squares, &chunk.q[i], |r, _, code| {
                (d[r] * (code - U::BIAS as f32)).abs() + m[r].abs()
            });
        }
    }
    squares
}

fn squares256<U: Unpack256>(w: &TileMatrix<'_>, tile: usize) -> RowF32 {
    let mut blocks = TileBlocks::new(w, tile);
    let (mut sb, mut squares) = (Super256::zero(), [0.0; ROWS]);
    for b in 0..w.blocks() {
        sb.unpack::<U>(&mut blocks, b);
        for (run, codes) in sb.q.iter().enumerate() {
            let pairs = &sb.min_pairs[run];
            add_run(&mut squares, codes, |r, i, code| {
                let half = i / 16;
                let scale = sb.scale[if U::SUB32 { run } else { 2 * run + half }][r];
                let min = pairs[r] >> (16 * half) & 0xffff;
                let q = code - U::BIAS as f32;
                (sb.d[r] * f32::from(scale) * q).abs() + (sb.dmin[r] * min as f32).abs()
            });
        }
    }
    squares
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Pinning;
    use quant::formats::supported;
    use quant::tile::Layout;

    /// Of weights without an offset they are the norms of the decoded rows; of the others they are not below these.
    #[test]
    fn they_are_the_rows_norms() {
        let pool = Pool::new(2, Pinning::Free).unwrap();
        for &ty in supported() {
            let (n, k) = (37, 512);
            let layout = Layout::of(ty).unwrap();
            let bytes = n * k / layout.block_len() * layout.block_bytes();
            // Of such bytes scales are finite in any format, and far from subnormal.
            let data: Vec<u8> = (0..bytes).map(|i| (96 + i * 37 % 23) as u8).collect();
            let w = TileMatrix::new(ty, n, k, &data);
            let Some(norms) = row_norms(&pool, &w) else {
                assert_eq!(class(ty), Some(Class::Float), "{}", ty.name());
                continue;
            };
            assert_eq!(norms.len(), n);
            let mut row = vec![0.0; k];
            for (r, norm) in norms.into_iter().enumerate() {
                w.decode_row(r, &mut row);
                let squares = row.iter().map(|&x| f64::from(x).powi(2));
                let ratio = f64::from(norm) / squares.sum::<f64>().sqrt();
                let most = if quant::product::has_min(ty) {
                    1e9
                } else {
                    1.0 + 1e-4
                };
                assert!(
                    (1.0 - 1e-4..most).contains(&ratio),
                    "{} row {r}: {norm}, {ratio} times its norm",
                    ty.name()
                );
            }
        }
    }
}
