//! Norms, rope, gates and additions against `cpu::ops`.

use super::{Row, compare_acts};
use crate::acts::Shape;
use crate::ops::{Angles, Delta, Gate, Heads, Normed, Ops, RopePairs, Rotation};
use crate::product::Target;
use crate::{Acts, Buffer, Device, Stream};
use cpu::isa::Isa;
use cpu::ops as want;
use quant::act::Passes;

use super::{Failure, START, row, values};

pub(super) fn rows(
    device: &Device,
    target: Target,
    report: &mut dyn FnMut(Row),
) -> Result<(), Failure> {
    let (stream, ops) = (device.stream()?, Ops::new(device, target)?);
    for (tokens, width) in [
        (1, 576),
        (3, 2048),
        (2, 5120),
        (5, 1000),
        (1, 8192),
        (4, 17),
        (19, 256),
        (1, 12_000),
        (70, 5120),
        (67, 640),
    ] {
        residual_norm(&stream, &ops, tokens, width, report)?;
    }
    for (tokens, count, c) in [
        (1, 40, 128),
        (7, 3, 64),
        (2, 4, 80),
        (3, 1, 256),
        (2, 5, 96),
    ] {
        heads(&stream, &ops, tokens, count, c, report)?;
    }
    gates(&stream, &ops, report)?;
    gated_blocks(&stream, &ops, report)
}

/// Gated activations that are quantised at once.
fn gated_blocks(stream: &Stream, ops: &Ops, report: &mut dyn FnMut(Row)) -> Result<(), Failure> {
    for (i, (tokens, k, block, passes)) in [
        (1, 13_824, 32, Passes::One),
        (1, 14_336, 256, Passes::Two),
        (5, 96, 32, Passes::Two),
        (11, 768, 256, Passes::One),
        // Of many tokens, which have kernels of their own.
        (40, 13_824, 32, Passes::One),
        (33, 1024, 256, Passes::Two),
        (19, 384, 32, Passes::Two),
        (65, 768, 256, Passes::One),
    ]
    .into_iter()
    .enumerate()
    {
        let n = tokens * k;
        let (mut gate, up) = (values(n, 81), values(n, 82));
        for (at, x) in [(3, f32::NAN), (n / 2, 1e30), (n - 40, f32::INFINITY)] {
            if i % 2 == 1 {
                gate[at] = x;
            }
        }
        let (f, of) = [
            (Gate::Silu, want::Gate::Silu),
            (Gate::Gelu, want::Gate::Gelu),
        ][i / 2 % 2];
        for is_kept in [false, true] {
            let mut wanted = gate.clone();
            want::gated(Isa::best(), of, &mut wanted, &up);
            let mut got = Buffer::from_slice(stream, &gate)?;
            let (up, shape) = (
                Buffer::from_slice(stream, &up)?,
                Shape {
                    tokens,
                    k,
                    block,
                    passes,
                },
            );
            let mut acts = Acts::new(stream, tokens, k)?;
            ops.gated_to(stream, START, f, &mut got, &up, is_kept, shape, &mut acts)?;
            let format = format!("{f:?}, blocks of {block}, {passes:?}");
            let mut row = Row::new("gated", format, format!("{tokens}x{k}"));
            compare_acts(stream, &acts, &wanted, &mut row)?;
            let left = if is_kept { &wanted } else { &gate };
            for (at, (found, wanted)) in got.to_vec(stream)?.iter().zip(left).enumerate() {
                row.compare(*found, *wanted, || format!("value {at}"));
            }
            report(row);
        }
    }
    Ok(())
}

fn residual_norm(
    stream: &Stream,
    ops: &Ops,
    tokens: usize,
    width: usize,
    report: &mut dyn FnMut(Row),
) -> Result<(), Failure> {
    let n = tokens * width;
    let (isa, eps) = (Isa::best(), 1e-6);
    let [x, first, second] = [1, 2, 3].map(|seed| values(n, seed));
    let [bias, post, w] = [4, 5, 6].map(|seed| values(width, seed));
    let up = |v: &[f32]| Buffer::from_slice(stream, v);
    let on_device = [up(&first)?, up(&second)?, up(&bias)?, up(&post)?, up(&w)?];
    for (with_second, with_bias, with_post, with_w) in [
        (false, false, false, true),
        (true, false, false, true),
        (true, true, true, true),
        (false, true, true, false),
    ] {
        let (mut want_x, mut want_out) = (x.clone(), vec![0.0; n]);
        for t in 0..tokens {
            let at = t * width..(t + 1) * width;
            let mut delta = first[at.clone()].to_vec();
            if with_second {
                want::add(isa, &mut delta, &second[at.clone()]);
            }
            if with_bias {
                want::add(isa, &mut delta, &bias);
            }
            if with_post {
                let mut normed = vec![0.0; width];
                want::rms_norm(isa, &delta, Some(&post), eps, &mut normed);
                delta = normed;
            }
            want::add(isa, &mut want_x[at.clone()], &delta);
            let w = with_w.then_some(&w[..]);
            want::rms_norm(isa, &want_x[at.clone()], w, eps, &mut want_out[at]);
        }
        let (mut got_x, mut got) = (up(&x)?, up(&vec![f32::NAN; n])?);
        let [first, second, bias, post, w] = &on_device;
        let delta = Delta {
            first,
            second: with_second.then_some(second),
            bias: with_bias.then_some(bias),
            norm: with_post.then_some(post),
        };
        let w = with_w.then_some(w);
        let mut acts = [
            Acts::new(stream, tokens, width)?,
            Acts::new(stream, tokens, width)?,
        ];
        let [acts32, acts256] = &mut acts;
        // Two passes go with a second product here, for no reason.
        let passes = [Passes::One, Passes::Two];
        let out = Normed {
            row: (!width.is_multiple_of(32) || with_w).then_some(&mut got),
            blocks32: width
                .is_multiple_of(32)
                .then_some((acts32, passes[usize::from(with_second)])),
            blocks256: width
                .is_multiple_of(256)
                .then_some((acts256, passes[usize::from(with_bias)])),
        };
        let has_row = out.row.is_some();
        ops.residual_norm_to(
            stream,
            START,
            tokens,
            width,
            eps,
            &mut got_x,
            Some(delta),
            w,
            out,
        )?;
        let shapes = format!("{tokens}x{width}");
        for acts in acts.iter().filter(|acts| acts.shape().tokens > 0) {
            let format = format!("blocks of {}", acts.shape().block);
            let mut row = Row::new("residual_norm", format, &shapes);
            compare_acts(stream, acts, &want_out, &mut row)?;
            report(row);
        }
        if !has_row {
            want_out.fill(f32::NAN);
        }
        let format = format!(
            "second {with_second} bias {with_bias} post {with_post} w {}",
            w.is_some()
        );
        let (x, out) = (got_x.to_vec(stream)?, got.to_vec(stream)?);
        report(row(
            "residual_norm",
            format,
            shapes,
            &[x, out].concat(),
            &[want_x, want_out].concat(),
        ));
    }
    Ok(())
}

fn heads(
    stream: &Stream,
    ops: &Ops,
    tokens: usize,
    count: usize,
    c: usize,
    report: &mut dyn FnMut(Row),
) -> Result<(), Failure> {
    let (isa, eps, position) = (Isa::best(), 1e-5, 9usize);
    let x = values(tokens * count * c, 11);
    let (bias, norm) = (values(count * c, 12), values(c, 13));
    let up = |v: &[f32]| Buffer::from_slice(stream, v);
    for (i, (with_bias, with_norm, pairs, which)) in [
        (false, false, c / 2, want::RopePairs::Neighbours),
        (true, false, c / 2, want::RopePairs::Halves),
        (true, true, c / 4, want::RopePairs::Halves),
        (false, true, c / 4, want::RopePairs::Neighbours),
    ]
    .into_iter()
    .enumerate()
    {
        let rotates = i % 2 == 1 && c.is_power_of_two();
        let angles = values((position + tokens) * pairs, 14);
        let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
        let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
        let mut wanted = x.clone();
        for (t, x) in wanted.chunks_exact_mut(count * c).enumerate() {
            if with_bias {
                want::add(isa, x, &bias);
            }
            if with_norm {
                want::rms_norm_heads(isa, x, &norm, eps);
            }
            let at = (position + t) * pairs..(position + t + 1) * pairs;
            want::rope(isa, which, c, &cos[at.clone()], &sin[at], x);
            if rotates {
                want::hadamard_heads(isa, c, x);
            }
        }
        let mut got = up(&x)?;
        let (bias, norm) = (up(&bias)?, up(&norm)?);
        let (cos, sin) = (up(&cos)?, up(&sin)?);
        let at = Buffer::from_slice(stream, &[position as u32])?;
        let what = Heads {
            bias: with_bias.then_some(&bias),
            norm: with_norm.then_some(&norm),
            angles: Some(Angles {
                cos: &cos,
                sin: &sin,
                pairs,
                which: match which {
                    want::RopePairs::Neighbours => RopePairs::Neighbours,
                    want::RopePairs::Halves => RopePairs::Halves,
                },
                position: Some(&at),
            }),
            rotation: if rotates {
                Rotation::Hadamard
            } else {
                Rotation::None
            },
        };
        ops.heads(stream, START, tokens, count, c, eps, &mut got, &what)?;
        let shapes = format!("{tokens}x{count}x{c}");
        let format = format!(
            "bias {with_bias} norm {with_norm} {which:?} of {pairs} pairs rotation {rotates}"
        );
        report(row("heads", format, shapes, &got.to_vec(stream)?, &wanted));
    }
    Ok(())
}

/// Functions of one value, over values that include the ends of their ranges.
fn gates(stream: &Stream, ops: &Ops, report: &mut dyn FnMut(Row)) -> Result<(), Failure> {
    let isa = Isa::best();
    let special = [
        0.0,
        -0.0,
        1e-40,
        -1e-40,
        f32::MAX,
        f32::MIN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        -79.99,
        -80.0,
        -80.01,
        88.0,
        88.1,
        0.124_999,
        0.125,
        -0.125,
        79.99,
        80.01,
    ];
    let mut x = special.to_vec();
    x.extend((0..400_000).map(|i| i as f32 * 0.0006 - 120.0));
    x.extend(values(100_001, 21));
    let n = x.len();
    let y = values(n, 22);
    let up = |v: &[f32]| Buffer::from_slice(stream, v);
    let on_device = up(&y)?;
    let mut push = |kernel, got: Buffer<f32>, wanted: &[f32]| -> Result<(), Failure> {
        report(row(
            kernel,
            String::new(),
            n.to_string(),
            &got.to_vec(stream)?,
            wanted,
        ));
        Ok(())
    };
    for (f, of) in [
        (Gate::Silu, want::Gate::Silu),
        (Gate::Gelu, want::Gate::Gelu),
    ] {
        let (mut wanted, mut got) = (x.clone(), up(&x)?);
        want::gated(isa, of, &mut wanted, &y);
        ops.gated(stream, START, f, n, &mut got, &on_device)?;
        push(
            if f == Gate::Silu {
                "gated silu"
            } else {
                "gated gelu"
            },
            got,
            &wanted,
        )?;
    }
    let (mut wanted, mut got) = (x.clone(), up(&x)?);
    want::soft_cap(isa, &mut wanted, 30.0);
    ops.soft_cap(stream, START, n, &mut got, 30.0)?;
    push("soft_cap", got, &wanted)?;
    let (mut wanted, mut got) = (x.clone(), up(&x)?);
    want::add(isa, &mut wanted, &y);
    ops.add(stream, START, n, &mut got, &on_device)?;
    push("add", got, &wanted)?;
    let (mut wanted, mut got) = (x.clone(), up(&x)?);
    want::scale(isa, &mut wanted, 1.7);
    ops.scale(stream, START, n, &mut got, 1.7)?;
    push("scale", got, &wanted)?;
    let width = 1000;
    let (mut wanted, mut got) = (x.clone(), up(&x)?);
    for row in wanted.chunks_exact_mut(width) {
        want::add(isa, row, &y[..width]);
    }
    ops.add_bias(stream, START, n / width, width, &mut got, &on_device)?;
    push("add_bias", got, &wanted)
}
