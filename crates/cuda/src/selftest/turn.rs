//! What is done to heads before they are attended, against `cpu::ops` and `cpu::attention`.

use super::Row;
use crate::attention::{Attention, CELLS, KvBlock, KvType, Table, Turn};
use crate::ops::{Angles, RopePairs, Rotation};
use crate::product::Target;
use crate::{Buffer, Stream};
use cpu::attention as want;
use cpu::isa::Isa;
use cpu::ops;

use super::attention::{compare_bytes, cpu_type, shape};
use super::{Failure, START, row, values};

/// What is done to the heads of q, k and v; and for one token, that its cell is written.
pub(super) fn rows(
    stream: &Stream,
    target: Target,
    report: &mut dyn FnMut(Row),
) -> Result<(), Failure> {
    let (isa, eps) = (Isa::best(), 1e-6);
    let mut seed = 500;
    for (c_k, c_v, type_k, type_v) in [
        (128, 128, KvType::F16, KvType::F16),
        (64, 64, KvType::Q8_0, KvType::Q4_0),
        (256, 128, KvType::Q4_0, KvType::Q8_0),
        (80, 112, KvType::Bf16, KvType::F16),
        (96, 32, KvType::Q4_0, KvType::Q8_0),
    ] {
        let shape = shape(3, c_k, c_v, type_k, type_v);
        let heads = 6;
        let attention = Attention::new(stream.device(), target, shape, heads)?;
        // A position for one token that is appended; else so many tokens that are not.
        for (i, (tokens, position)) in [
            (1, Some(0)),
            (1, Some(63)),
            (1, Some(64)),
            (1, Some(511)),
            (1, Some(1000)),
            (1, None),
            (7, None),
            (33, None),
            (40, None),
        ]
        .into_iter()
        .enumerate()
        {
            seed += 10;
            let pairs = if i % 3 == 2 { c_k / 4 } else { c_k / 2 };
            let (with_bias, with_norm) = (i % 2 == 1, i % 4 >= 2);
            let (rotates_k, rotates_v) = (
                i % 3 == 1 && c_k.is_power_of_two(),
                i % 2 == 0 && c_v.is_power_of_two(),
            );
            let rows = [heads * c_k, 3 * c_k, 3 * c_v];
            let mut wanted = [0, 1, 2].map(|x| values(tokens * rows[x], seed + x as u64));
            if i == 3 {
                // Heads that cannot be stored in few bits, one of zeros, one of minus zeros.
                wanted[1][5] = f32::NAN;
                wanted[1][c_k..2 * c_k].fill(-0.0);
                wanted[2][c_v + 1] = f32::INFINITY;
                wanted[2][..c_v].fill(0.0);
            }
            let up = |v: &[f32]| Buffer::from_slice(stream, v);
            let mut on_device = [up(&wanted[0])?, up(&wanted[1])?, up(&wanted[2])?];
            let bias = [0, 1, 2].map(|x| values(rows[x], seed + 3 + x as u64));
            let norm = [0, 1].map(|x| values(c_k, seed + 6 + x as u64));
            let angles = values(tokens * pairs, seed + 8);
            let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
            let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
            for (x, of) in wanted.iter_mut().enumerate() {
                for (t, of) in of.chunks_exact_mut(rows[x]).enumerate() {
                    if with_bias {
                        ops::add(isa, of, &bias[x]);
                    }
                    if with_norm && x < 2 {
                        ops::rms_norm_heads(isa, of, &norm[x], eps);
                    }
                    let at = t * pairs..(t + 1) * pairs;
                    if x < 2 {
                        let (cos, sin) = (&cos[at.clone()], &sin[at]);
                        ops::rope(isa, ops::RopePairs::Halves, c_k, cos, sin, of);
                    }
                    if x < 2 && rotates_k {
                        ops::hadamard_heads(isa, c_k, of);
                    }
                    if x == 2 && rotates_v {
                        ops::hadamard_heads(isa, c_v, of);
                    }
                }
            }
            let bias = [up(&bias[0])?, up(&bias[1])?, up(&bias[2])?];
            let norm = [up(&norm[0])?, up(&norm[1])?];
            let (cos, sin) = (up(&cos)?, up(&sin)?);
            let rotation = |rotates| match rotates {
                true => Rotation::Hadamard,
                false => Rotation::None,
            };
            let how = Turn {
                bias: bias.each_ref().map(|b| with_bias.then_some(b)),
                norm: norm.each_ref().map(|n| with_norm.then_some(n)),
                eps,
                angles: Some(Angles {
                    cos: &cos,
                    sin: &sin,
                    pairs,
                    which: RopePairs::Halves,
                    position: None,
                }),
                rotation_k: rotation(rotates_k),
                rotation_v: rotation(rotates_v),
            };
            let [q, k, v] = &mut on_device;
            let shapes = format!(
                "6/3x{c_k}/{c_v} T {tokens} at {position:?} bias {with_bias} norm {with_norm} rotation {rotates_k} {rotates_v}"
            );
            let types = format!("{}/{}", type_k.name(), type_v.name());
            let Some(position) = position else {
                attention.turn(stream, START, tokens, q, k, v, &how, None)?;
                for (x, got) in on_device.iter().enumerate() {
                    let name = ["turn, q", "turn, k", "turn, v"][x];
                    let got = got.to_vec(stream)?;
                    report(row(name, String::new(), shapes.clone(), &got, &wanted[x]));
                }
                continue;
            };
            // The last block of the list is the cell's, or one before it.
            let (index, cell) = (position / CELLS, position % CELLS);
            let bytes = shape.block_bytes();
            let mut slab = Buffer::<u8>::zeroed(stream, 3 * bytes)?;
            let mut blocks = vec![KvBlock::new(&shape, &slab, bytes, index, 0..CELLS, 0)?];
            if i % 2 == 0 {
                blocks.push(KvBlock::new(&shape, &slab, 0, index + 1, 0..CELLS, 1)?);
            }
            let mut table = Table::new(stream, 2)?;
            // SAFETY: the slab outlives the work that uses the table.
            unsafe { table.set(stream, &blocks)? };
            let at = Buffer::from_slice(stream, &[position as u32])?;
            attention.turn(stream, START, 1, q, k, v, &how, Some((&table, &at)))?;
            let got = on_device[0].to_vec(stream)?;
            report(row(
                "turn, q",
                types.clone(),
                shapes.clone(),
                &got,
                &wanted[0],
            ));
            let cpu = want::KvShape::new(3, c_k, c_v, cpu_type(type_k), cpu_type(type_v))
                .expect("shapes of cases divide");
            let mut block = cpu::mem::Buffer::<u8>::new(bytes)?;
            block.fill(0);
            want::write_cell(&cpu, &mut block, cell, &wanted[1], &wanted[2]);
            let mut row = Row::new("turn, cell", types, shapes);
            let all = slab.to_vec(stream)?;
            compare_bytes(&all[bytes..2 * bytes], &block, "cell", &mut row);
            for (i, byte) in all[..bytes].iter().chain(&all[2 * bytes..]).enumerate() {
                row.compare_int((*byte).into(), 0, || format!("byte {i} outside"));
            }
            report(row);
            slab.fill_bytes(stream, 0)?;
        }
        for tokens in [2, 8] {
            seed += 10;
            several(stream, &attention, heads, tokens, seed, report)?;
        }
    }
    Ok(())
}

/// Tokens of several sequences, each with its own block and position.
fn several(
    stream: &Stream,
    attention: &Attention,
    heads: usize,
    tokens: usize,
    seed: u64,
    report: &mut dyn FnMut(Row),
) -> Result<(), Failure> {
    let (isa, shape) = (Isa::best(), *attention.shape());
    let (c_k, c_v, heads_kv) = (shape.c_k, shape.c_v, shape.heads);
    let (pairs, bytes) = (c_k / 2, shape.block_bytes());
    let rows = [heads * c_k, heads_kv * c_k, heads_kv * c_v];
    let mut wanted = [0, 1, 2].map(|x| values(tokens * rows[x], seed + x as u64));
    let up = |v: &[f32]| Buffer::from_slice(stream, v);
    let mut on_device = [up(&wanted[0])?, up(&wanted[1])?, up(&wanted[2])?];
    let [q, k, v] = &mut on_device;
    let angles = values(tokens * pairs, seed + 8);
    let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
    let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
    for (x, of) in wanted.iter_mut().take(2).enumerate() {
        for (t, of) in of.chunks_exact_mut(rows[x]).enumerate() {
            let at = t * pairs..(t + 1) * pairs;
            let (cos, sin) = (&cos[at.clone()], &sin[at]);
            ops::rope(isa, ops::RopePairs::Halves, c_k, cos, sin, of);
        }
    }
    // Blocks in any order, of indexes that come again and go down, cells at both ends and between.
    let positions: Vec<usize> = (0..tokens)
        .map(|t| (tokens - t) / 2 * 3 * CELLS + [0, 63, 64, 255][t % 4])
        .collect();
    let place = |t: usize| (t * 5 + 1) % tokens;
    let mut slab = Buffer::<u8>::zeroed(stream, tokens * bytes)?;
    let block = |(t, position): (usize, &usize)| {
        KvBlock::new(
            &shape,
            &slab,
            place(t) * bytes,
            position / CELLS,
            0..CELLS,
            0,
        )
    };
    let blocks: Vec<KvBlock> = positions
        .iter()
        .enumerate()
        .map(block)
        .collect::<Result<_, _>>()?;
    let mut table = Table::new(stream, tokens)?;
    // SAFETY: the slab outlives the work that uses the table.
    unsafe { table.set_each(stream, &blocks)? };
    let at: Vec<u32> = positions.iter().map(|&p| p as u32).collect();
    let at = Buffer::from_slice(stream, &at)?;
    let (cos, sin) = (
        Buffer::from_slice(stream, &cos)?,
        Buffer::from_slice(stream, &sin)?,
    );
    let how = Turn {
        bias: [None; 3],
        norm: [None; 2],
        eps: 1e-6,
        angles: Some(Angles {
            cos: &cos,
            sin: &sin,
            pairs,
            which: RopePairs::Halves,
            position: None,
        }),
        rotation_k: Rotation::None,
        rotation_v: Rotation::None,
    };
    attention.turn(stream, START, tokens, q, k, v, &how, Some((&table, &at)))?;
    let types = format!("{}/{}", shape.type_k.name(), shape.type_v.name());
    let shapes = format!("{heads}/{heads_kv}x{c_k}/{c_v} T {tokens} of as many sequences");
    let got = q.to_vec(stream)?;
    report(row(
        "turn, q",
        types.clone(),
        shapes.clone(),
        &got,
        &wanted[0],
    ));
    let (type_k, type_v) = (cpu_type(shape.type_k), cpu_type(shape.type_v));
    let cpu =
        want::KvShape::new(heads_kv, c_k, c_v, type_k, type_v).expect("shapes of cases divide");
    let mut blocks = cpu::mem::Buffer::<u8>::new(tokens * bytes)?;
    for (t, position) in positions.iter().enumerate() {
        let block = &mut blocks[place(t) * bytes..][..bytes];
        let (k, v) = (
            &wanted[1][t * rows[1]..][..rows[1]],
            &wanted[2][t * rows[2]..][..rows[2]],
        );
        want::write_cell(&cpu, block, position % CELLS, k, v);
    }
    let mut row = Row::new("turn, cells", types, shapes);
    compare_bytes(&slab.to_vec(stream)?, &blocks, "cells", &mut row);
    report(row);
    slab.fill_bytes(stream, 0)?;
    Ok(())
}
