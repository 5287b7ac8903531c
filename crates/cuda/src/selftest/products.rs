//! Activation blocks, products, decoded rows.

use gguf::TensorType;
use quant::act::{ActRow, BLOCK32, BLOCK256, Passes};
use quant::formats::{self, Class};
use quant::product::{act_block, dot_float, dot_quantised};
use quant::tile::TileMatrix;

use super::data::{self, Random};
use super::{Options, Row};
use crate::acts::{Acts, Quantiser, Shape};
use crate::error::Error;
use crate::kernel::Start;
use crate::memory::Buffer;
use crate::product::{FEW_MAX, Product};
use crate::stream::Stream;
use crate::weights::Weights;

/// Rows of a matrix: fewer than a tile, ragged, more than a thread block of the kernel for many tokens takes.
const ROWS: [usize; 3] = [1, 37, 200];

/// Tokens and passes: around the edges of groups of 8 columns, of the kernels, of 128 columns.
const FEW: [(usize, Passes); 8] = [
    (1, Passes::One),
    (1, Passes::Two),
    (2, Passes::One),
    (7, Passes::One),
    (8, Passes::One),
    (5, Passes::Two),
    (15, Passes::One),
    (8, Passes::Two),
];
const MANY: [(usize, Passes); 3] = [(17, Passes::One), (43, Passes::Two), (150, Passes::One)];

/// The codes of tokens, column by column, as the definition has them.
fn columns(x: &[f32], k: usize, block: usize, passes: Passes) -> Vec<ActRow> {
    let mut columns = Vec::new();
    for token in x.chunks_exact(k) {
        let first = ActRow::new(token, block);
        let second = (passes == Passes::Two).then(|| first.second(token));
        columns.push(first);
        columns.extend(second);
    }
    columns
}

/// The activation kernels against `quant::act`.
pub(super) fn activations(
    stream: &Stream,
    options: &Options,
    done: &mut impl FnMut(Row),
) -> Result<(), Error> {
    let quantiser = Quantiser::new(stream.device())?;
    for (block, lengths) in [(BLOCK32, [32, 96, 5120]), (BLOCK256, [256, 768, 5120])] {
        let mut row = Row::new(
            "quantise",
            format!("blocks of {block}"),
            "T 1..33, K 32..5120, passes 1, 2",
        );
        for k in lengths {
            for (tokens, passes) in [(1, Passes::One), (13, Passes::Two), (33, Passes::One)] {
                let mut random = Random::new(options.seed + (k + tokens) as u64);
                let x = data::activations(&mut random, tokens, k);
                let shape = Shape {
                    tokens,
                    k,
                    block,
                    passes,
                };
                let mut acts = Acts::new(stream, tokens, k)?;
                let input = Buffer::from_slice(stream, &x)?;
                quantiser.quantise(stream, Start::After, &input, shape, &mut acts)?;
                compare_activations(stream, &acts, &columns(&x, k, block, passes), &mut row)?;
            }
        }
        done(row);
    }
    Ok(())
}

/// Reads what the kernel wrote as `product.cuh` does.
fn compare_activations(
    stream: &Stream,
    acts: &Acts,
    wanted: &[ActRow],
    row: &mut Row,
) -> Result<(), Error> {
    let Shape { k, block, .. } = acts.shape();
    let (q, meta) = (acts.q.to_vec(stream)?, acts.meta.to_vec(stream)?);
    let (d, s16) = (acts.d.to_vec(stream)?, acts.s16.to_vec(stream)?);
    let int = |bytes: &[u8], at: usize| {
        i32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
    };
    let float = |bytes: &[u8], at: usize| f32::from_bits(int(bytes, at) as u32);
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

/// All kernels of a format.
pub(super) fn format(
    stream: &Stream,
    options: &Options,
    ty: TensorType,
    done: &mut impl FnMut(Row),
) -> Result<(), Error> {
    let product = Product::new(stream.device(), ty, options.target)?;
    let quantiser = Quantiser::new(stream.device())?;
    let lengths = data::lengths(ty);
    let rows = |kernel, tokens: &str| {
        let (first, last) = (lengths[0], lengths[lengths.len() - 1]);
        Row::new(
            kernel,
            ty.name(),
            format!("N {}..{}, K {first}..{last}, {tokens}", ROWS[0], ROWS[2]),
        )
    };
    let mut few = rows("product, few", "T 1..16");
    let mut many = rows("product, many", "T 17..150");
    let mut decoded = rows("rows", "T 9");
    for &k in lengths {
        for n in ROWS {
            let mut random = Random::new(options.seed + (n * 31 + k) as u64);
            let bytes = data::weights(&mut random, ty, n, k);
            let matrix = TileMatrix::new(ty, n, k, &bytes);
            let weights = Weights::upload(stream, &matrix)?;
            compare_rows(
                stream,
                &product,
                &weights,
                &matrix,
                &mut random,
                &mut decoded,
            )?;
            // Long rows by many tokens would only take the definition long.
            let long = k >= 5120 && n > 37;
            for (tokens, passes) in FEW.iter().chain(&MANY).copied() {
                if long && tokens > FEW_MAX {
                    continue;
                }
                let row = if tokens * passes.count() > FEW_MAX {
                    &mut many
                } else {
                    &mut few
                };
                let x = data::activations(&mut random, tokens, k);
                let input = Buffer::from_slice(stream, &x)?;
                let mut y = Buffer::new(stream.device(), tokens * n)?;
                y.fill_bytes(stream, 0x55)?;
                let wanted = if formats::class(ty) == Some(Class::Float) {
                    if passes == Passes::Two {
                        continue;
                    }
                    product.float(stream, Start::After, &weights, &input, tokens, &mut y)?;
                    each(tokens * n, |i| {
                        dot_float(&matrix, i % n, &x[i / n * k..(i / n + 1) * k])
                    })
                } else {
                    let block = act_block(ty).expect("a quantised format");
                    let shape = Shape {
                        tokens,
                        k,
                        block,
                        passes,
                    };
                    let mut acts = Acts::new(stream, tokens, k)?;
                    quantiser.quantise(stream, Start::After, &input, shape, &mut acts)?;
                    product.quantised(stream, Start::Overlapped, &weights, &acts, &mut y)?;
                    let columns = columns(&x, k, block, passes);
                    each(tokens * n, |i| {
                        let of = |column: usize| dot_quantised(&matrix, i % n, &columns[column]);
                        match passes {
                            Passes::One => of(i / n),
                            Passes::Two => of(i / n * 2) + of(i / n * 2 + 1),
                        }
                    })
                };
                for (i, (found, wanted)) in y.to_vec(stream)?.iter().zip(&wanted).enumerate() {
                    row.compare(*found, *wanted, || {
                        format!(
                            "N {n}, K {k}, T {tokens}, {passes:?} pass: row {}, token {}",
                            i % n,
                            i / n
                        )
                    });
                }
            }
        }
    }
    done(few);
    done(many);
    done(decoded);
    Ok(())
}

fn compare_rows(
    stream: &Stream,
    product: &Product,
    weights: &Weights,
    matrix: &TileMatrix<'_>,
    random: &mut Random,
    row: &mut Row,
) -> Result<(), Error> {
    let (n, k) = (matrix.n(), matrix.k());
    let mut ids: Vec<i32> = (0..7).map(|_| random.below(n) as i32).collect();
    ids.extend([-1, n as i32]);
    let mut y = Buffer::new(stream.device(), ids.len() * k)?;
    y.fill_bytes(stream, 0x55)?;
    product.decode_rows(
        stream,
        Start::After,
        weights,
        &Buffer::from_slice(stream, &ids)?,
        ids.len(),
        &mut y,
    )?;
    let mut wanted = vec![0.0; k];
    for (found, id) in y.to_vec(stream)?.chunks_exact(k).zip(&ids) {
        match usize::try_from(*id) {
            Ok(id) if id < n => matrix.decode_row(id, &mut wanted),
            _ => wanted.fill(f32::NAN),
        }
        for (i, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            row.compare(*found, *wanted, || {
                format!("N {n}, K {k}: row {id}, value {i}")
            });
        }
    }
    Ok(())
}

/// `f` of 0 to `n`, on all processors.
fn each(n: usize, f: impl Fn(usize) -> f32 + Sync) -> Vec<f32> {
    let mut out = vec![0.0; n];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = n.div_ceil(threads).max(64);
    std::thread::scope(|scope| {
        for (part, out) in out.chunks_mut(share).enumerate() {
            let f = &f;
            scope.spawn(move || {
                for (i, out) in out.iter_mut().enumerate() {
                    *out = f(part * share + i);
                }
            });
        }
    });
    out
}
