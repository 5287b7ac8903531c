//! Prompt attention: near the CPU's, and the same bits however a prompt and its cells are cut.

use super::Row;
use crate::attention::{Attention, CELLS, KvType, Spans, Step};
use crate::product::Target;
use crate::{Buffer, Device, Stream};
use cpu::pool::{Pinning, Pool};

use super::attention::{Case, OnDevice, describe, shape, types};
use super::{Failure, START, row};

/// Seeded numbers between -1 and 1.
fn calm(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let step = |s: &mut u64| {
        *s = s
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (*s >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| step(&mut s)).collect()
}

pub(super) fn rows(
    device: &Device,
    target: Target,
    report: &mut dyn FnMut(Row),
) -> Result<(), Failure> {
    let stream = device.stream()?;
    let threads = std::thread::available_parallelism()?.get();
    let pool = Pool::new(threads, Pinning::Free)?;
    let mut add = |case: Case| prompt(&stream, target, &pool, &case, report);
    for ty_k in KvType::ALL {
        for ty_v in KvType::ALL {
            add(case(2, 128, 128, (ty_k, ty_v), 5, 400, 400)?)?;
        }
    }
    for ty in [KvType::F16, KvType::Q8_0, KvType::Q4_0] {
        let heads: &[(usize, usize)] = match ty {
            KvType::F16 => &[
                (64, 64),
                (80, 80),
                (96, 96),
                (112, 112),
                (256, 256),
                (192, 128),
                (16, 48),
                (240, 208),
            ],
            _ => &[
                (64, 64),
                (96, 96),
                (256, 256),
                (192, 128),
                (32, 64),
                (224, 160),
            ],
        };
        for (i, (c_k, c_v)) in heads.iter().enumerate() {
            add(case(2, *c_k, *c_v, (ty, ty), 1 + i, 300 + 41 * i, 200)?)?;
        }
        for (window, cap, sinks) in [
            (Some(1), None, false),
            (Some(100), None, true),
            (Some(700), Some(5.0), false),
            (None, Some(3.0), true),
        ] {
            let mut case = case(1, 64, 64, (ty, ty), 3, 1000, 600)?;
            (case.params.window, case.params.soft_cap) = (window, cap);
            case.sinks = sinks.then(|| calm(case.heads, 7));
            add(case)?;
        }
        // Several spans; tokens on both sides of the border between two.
        add(case(1, 64, 64, (ty, ty), 7, 20_000, 150)?)?;
        add(case(2, 128, 128, (ty, ty), 2, 16_384 + 40, 90)?)?;
        let mut windowed = case(1, 64, 64, (ty, ty), 2, 9000, 900)?;
        windowed.params.window = Some(500);
        add(windowed)?;
        let mut holes = case(1, 64, 64, (ty, ty), 2, 9000, 300)?;
        holes.removed = vec![5..6, 90..700, 4000..4200, 8100..8300, 8500..8501];
        add(holes)?;
    }
    Ok(())
}

fn case(
    heads: usize,
    c_k: usize,
    c_v: usize,
    (ty_k, ty_v): (KvType, KvType),
    gqa: usize,
    n: usize,
    tokens: usize,
) -> Result<Case, Failure> {
    let mut case = Case::new(shape(heads, c_k, c_v, ty_k, ty_v), gqa, n, 17)?;
    case.q = calm(tokens * case.heads * c_k, 18)
        .iter()
        .map(|x| x * 3.0)
        .collect();
    case.k = calm(case.k.len(), 19);
    case.v = calm(case.v.len(), 20);
    case.write()?;
    Ok(case)
}

/// How a run is cut.
#[derive(Clone, Copy)]
struct Cut {
    /// Tokens a call.
    tokens: usize,
    /// Blocks a list.
    blocks: usize,
    /// Spans at once.
    spans: usize,
}

fn run(
    stream: &Stream,
    attention: &Attention,
    case: &Case,
    there: &OnDevice,
    cut: Cut,
) -> Result<Vec<f32>, Failure> {
    let (row, row_out) = (case.heads * case.shape.c_k, case.heads * case.shape.c_v);
    let all = case.q.len() / row;
    let sinks = case
        .sinks
        .as_ref()
        .map(|s| Buffer::from_slice(stream, s))
        .transpose()?;
    let mut result = Vec::new();
    for first in (0..all).step_by(cut.tokens) {
        let tokens = cut.tokens.min(all - first);
        let position = case.n - all + first;
        let q = Buffer::from_slice(stream, &case.q[first * row..][..tokens * row])?;
        let mut out = Buffer::from_slice(stream, &vec![f32::NAN; tokens * row_out])?;
        let room = Spans::values(&case.shape, case.heads, tokens, cut.spans);
        let mut spans = Spans::new(stream, room)?;
        // Lists end where the chunk ends: what comes later need not be there.
        let there_are = there
            .blocks
            .iter()
            .filter(|b| b.index() * CELLS < position + tokens)
            .count();
        for start in (0..there_are).step_by(cut.blocks) {
            let end = there_are.min(start + cut.blocks);
            let table = there.table_of(stream, &there.blocks[start..end])?;
            let step = Step {
                first: start == 0,
                last: end == there_are,
            };
            attention.prefill(
                stream,
                START,
                &table,
                &case.params,
                position,
                tokens,
                &q,
                step,
                sinks.as_ref(),
                &mut spans,
                &mut out,
            )?;
            stream.synchronise()?;
        }
        result.extend(out.to_vec(stream)?);
    }
    Ok(result)
}

fn prompt(
    stream: &Stream,
    target: Target,
    pool: &Pool,
    case: &Case,
    report: &mut dyn FnMut(Row),
) -> Result<(), Failure> {
    let attention = Attention::new(stream.device(), target, case.shape, case.heads)?;
    let there = OnDevice::new(stream, case)?;
    there.append(stream, &attention, case, 1000)?;
    let wanted = case.wanted(pool)?;
    let whole = Cut {
        tokens: usize::MAX,
        blocks: usize::MAX,
        spans: 4,
    };
    let got = run(stream, &attention, case, &there, whole)?;
    let norm = |x: &mut dyn Iterator<Item = f32>| {
        x.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
    };
    let error =
        norm(&mut got.iter().zip(&wanted).map(|(a, b)| a - b)) / norm(&mut wanted.iter().copied());
    let is_float = |ty: KvType| matches!(ty, KvType::F16 | KvType::Bf16);
    // With quantised K the CPU quantises queries, too.
    let most = if is_float(case.shape.type_k) {
        2e-3
    } else {
        2e-2
    };
    let tokens = case.q.len() / (case.heads * case.shape.c_k);
    let shapes = format!("{} T {tokens}", describe(case));
    let mut near = Row::new(
        "prefill, near",
        types(case),
        format!("{shapes}, error {error:.1e}"),
    );
    near.compared = wanted.len();
    if error.is_nan() || error > most {
        near.differing = wanted.len();
    }
    report(near);
    for (what, cut) in [
        (
            "chunks of 37",
            Cut {
                tokens: 37,
                ..whole
            },
        ),
        (
            "chunks of 64, spans one by one",
            Cut {
                tokens: 64,
                spans: 1,
                ..whole
            },
        ),
        ("lists of 3 blocks", Cut { blocks: 3, ..whole }),
        (
            "chunks of 128, lists of 20 blocks",
            Cut {
                tokens: 128,
                blocks: 20,
                spans: 1,
            },
        ),
    ] {
        let found = run(stream, &attention, case, &there, cut)?;
        report(row(
            "prefill, cut",
            types(case),
            format!("{shapes}, {what}"),
            &found,
            &got,
        ));
    }
    Ok(())
}
