//! Activation blocks against `quant::act`.

use quant::act::{ActRow, BLOCK32, Passes};

use super::Row;
use crate::acts::{Acts, Layout, Shape};
use crate::error::Error;
use crate::stream::Stream;

/// The codes of tokens, column by column, as the definition has them.
pub(super) fn columns(x: &[f32], k: usize, block: usize, passes: Passes) -> Vec<ActRow> {
    let mut columns = Vec::new();
    for token in x.chunks_exact(k) {
        let first = ActRow::new(token, block);
        let second = (passes == Passes::Two).then(|| first.second(token));
        columns.push(first);
        columns.extend(second);
    }
    columns
}

/// Compares what is in `acts`, read as `product.cuh` does or `gemm_many.cuh`, with the blocks that the definition makes of `x`.
pub fn compare_acts(stream: &Stream, acts: &Acts, x: &[f32], row: &mut Row) -> Result<(), Error> {
    let Shape {
        k, block, passes, ..
    } = acts.shape();
    let wanted = columns(x, k, block, passes);
    let (q, meta) = (acts.q.to_vec(stream)?, acts.meta.to_vec(stream)?);
    let (d, s16) = (acts.d.to_vec(stream)?, acts.s16.to_vec(stream)?);
    let int = |bytes: &[u8], at: usize| {
        i32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
    };
    let float = |bytes: &[u8], at: usize| f32::from_bits(int(bytes, at) as u32);
    if acts.layout() == Layout::Arranged {
        let columns = wanted.len().next_multiple_of(16);
        for (c, wanted) in wanted.iter().enumerate() {
            let n = c / 16 * 16 + 8 * (c / 2 % 2) + 2 * (c % 16 / 4) + c % 2;
            for (i, code) in wanted.q.iter().enumerate() {
                let piece = (i % 128 / 16) ^ (n % 8);
                let at = ((i / 128 * columns + n) * 8 + piece) * 16 + i % 16;
                row.compare_int(i32::from(q[at] as i8), i32::from(*code), || {
                    format!("arranged column {c}, code {i}")
                });
            }
            for (b, scale) in wanted.d.iter().enumerate() {
                let at = (b * columns + c) * 4;
                let codes = &wanted.q[b * block..(b + 1) * block];
                let sum = |codes: &[i8]| codes.iter().map(|&q| i32::from(q)).sum::<i32>() as f32;
                let what = || format!("arranged column {c}, block {b}");
                if block == BLOCK32 {
                    let sums = k / block * columns * 4;
                    row.compare(float(&meta, at), *scale, what);
                    row.compare(float(&meta, sums + at), scale * sum(codes), what);
                    continue;
                }
                row.compare(float(&d, at), *scale, what);
                for (j, codes) in codes.chunks_exact(16).enumerate() {
                    let at = ((b * columns + n) * 16 + j) * 2;
                    let found = half::f16::from_le_bytes([s16[at], s16[at + 1]]);
                    row.compare(found.to_f32(), sum(codes), what);
                }
            }
        }
        return Ok(());
    }
    for (c, wanted) in wanted.iter().enumerate() {
        let (group, gid) = (c / 8, c % 8);
        for (i, code) in wanted.q.iter().enumerate() {
            let (run, word) = (i / 32, i % 32 / 4);
            let lane = gid * 4 + word % 4;
            let at = (((group * (k / 32) + run) * 32 + lane) * 2 + word / 4) * 4 + i % 4;
            row.compare_int(i32::from(q[at] as i8), i32::from(*code), || {
                format!("column {c}, code {i}")
            });
        }
        for (b, scale) in wanted.d.iter().enumerate() {
            let at = (group * (k / block) + b) * 8 + gid;
            let codes = &wanted.q[b * block..(b + 1) * block];
            let sum = |codes: &[i8]| codes.iter().map(|&q| i32::from(q)).sum::<i32>();
            if block == BLOCK32 {
                row.compare(float(&meta, at * 8 + 4), *scale, || {
                    format!("column {c}, scale {b}")
                });
                row.compare_int(int(&meta, at * 8), sum(codes), || {
                    format!("column {c}, sum {b}")
                });
                continue;
            }
            row.compare(float(&d, at * 4), *scale, || {
                format!("column {c}, scale {b}")
            });
            for (j, codes) in codes.chunks_exact(16).enumerate() {
                let lane = gid * 4 + j / 4;
                let at = (((group * (k / block) + b) * 32 + lane) * 4 + j % 4) * 2;
                let found = half::f16::from_le_bytes([s16[at], s16[at + 1]]);
                row.compare(found.to_f32(), sum(codes) as f32, || {
                    format!("column {c}, block {b}, sum {j}")
                });
            }
        }
    }
    Ok(())
}
