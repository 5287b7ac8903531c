//! Activation blocks, products, decoded rows.

use cpu::isa::Isa;
use cpu::ops as want;
use gguf::TensorType;
use quant::act::{BLOCK32, BLOCK256, Passes};
use quant::formats::{self, Class};
use quant::product::{act_block, dot_float, dot_quantised};
use quant::tile::TileMatrix;

use super::acts::{columns, compare_acts};
use super::data::{self, Random};
use super::{Options, Row};
use crate::acts::{Acts, Quantiser, Shape};
use crate::error::Error;
use crate::kernel::Start;
use crate::memory::Buffer;
use crate::product::{Before, FEW_MAX, Output, Product, StepRecord};
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
const MANY: [(usize, Passes); 4] = [
    (17, Passes::One),
    (43, Passes::Two),
    (150, Passes::One),
    (197, Passes::One),
];

/// Matrices of one launch and tokens that make more tiles of 128 x 128 than there are multiprocessors.
const SHARED_ROWS: [usize; 3] = [1408, 37, 1000];
const SHARED_TOKENS: usize = 800;
const SHARED_K: usize = 768;

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
                compare_acts(stream, &acts, &x, &mut row)?;
            }
        }
        done(row);
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
    let mut many = rows("product, many", "T 17..197");
    let mut decoded = rows("rows", "T 9");
    let mut together = rows("products", "T 1..70, 1 to 3 matrices, bias");
    let mut normed = rows("norm, products", "T 1, 2 and 3 matrices, bias");
    let mut shared = Row::new(
        "products, shared",
        ty.name(),
        format!("N {SHARED_ROWS:?}, K {SHARED_K}, T {SHARED_TOKENS}, against gemm_narrow"),
    );
    let mut begun = rows("begin", "T 1");
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
            compare_begin(stream, &product, &weights, &matrix, &mut random, &mut begun)?;
            if n == ROWS[1] && formats::class(ty) != Some(Class::Float) {
                compare_together(stream, options, &product, k, &mut random, &mut together)?;
                compare_normed(stream, options, &product, k, &mut random, &mut normed)?;
            }
            // Long rows by many tokens would only take the definition long.
            let long = k >= 5120 && n > 37;
            for (tokens, passes) in FEW.iter().chain(&MANY).copied() {
                if long && tokens > FEW_MAX {
                    continue;
                }
                let x = data::activations(&mut random, tokens, k);
                let input = Buffer::from_slice(stream, &x)?;
                // What each kernel that takes this many columns makes of it.
                let mut found = Vec::new();
                let mut y = Buffer::new(stream.device(), tokens * n)?;
                let wanted = if formats::class(ty) == Some(Class::Float) {
                    if passes == Passes::Two {
                        continue;
                    }
                    y.fill_bytes(stream, 0x55)?;
                    product.float(stream, Start::After, &weights, &input, tokens, &mut y)?;
                    found.push(("", y.to_vec(stream)?));
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
                    let arranged = Acts::new(stream, tokens, k)?;
                    let in_blocks = Acts::new(stream, tokens, k)?.in_blocks();
                    for mut acts in [arranged, in_blocks] {
                        quantiser.quantise(stream, Start::After, &input, shape, &mut acts)?;
                        let names = if shape.columns() > FEW_MAX {
                            product.many()
                        } else {
                            vec![""]
                        };
                        for name in names {
                            if !name.is_empty() && !product.takes(name, &acts) {
                                continue;
                            }
                            let which = (!name.is_empty()).then_some(name);
                            let start = Start::Overlapped;
                            y.fill_bytes(stream, 0x55)?;
                            product.quantised_by(which, stream, start, &weights, &acts, &mut y)?;
                            found.push((name, y.to_vec(stream)?));
                        }
                    }
                    let columns = columns(&x, k, block, passes);
                    each(tokens * n, |i| {
                        let of = |column: usize| dot_quantised(&matrix, i % n, &columns[column]);
                        match passes {
                            Passes::One => of(i / n),
                            Passes::Two => of(i / n * 2) + of(i / n * 2 + 1),
                        }
                    })
                };
                let row = if tokens * passes.count() > FEW_MAX {
                    &mut many
                } else {
                    &mut few
                };
                for (name, found) in found {
                    for (i, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
                        let (row_of, token) = (i % n, i / n);
                        row.compare(*found, *wanted, || {
                            format!("{name} N {n}, K {k}, T {tokens}, {passes:?} pass: row {row_of}, token {token}")
                        });
                    }
                }
            }
        }
    }
    done(few);
    done(many);
    done(decoded);
    done(begun);
    if together.compared > 0 {
        compare_shared(stream, options, &product, &mut shared)?;
        done(together);
        done(normed);
        done(shared);
    }
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

/// Several matrices in one launch, some with a bias: against single products, then the bias.
fn compare_together(
    stream: &Stream,
    options: &Options,
    product: &Product,
    k: usize,
    random: &mut Random,
    row: &mut Row,
) -> Result<(), Error> {
    let (ty, quantiser) = (product.ty(), Quantiser::new(stream.device())?);
    let block = act_block(ty).expect("a quantised format");
    for (tokens, passes, rows) in [
        (1, Passes::One, &[37, 16, 1][..]),
        (1, Passes::Two, &[5, 48]),
        (3, Passes::One, &[16, 33, 64]),
        (8, Passes::Two, &[100, 7]),
        (1, Passes::One, &[130]),
        (17, Passes::Two, &[37, 200]),
        (70, Passes::One, &[130, 5, 16]),
    ] {
        let x = data::activations(random, tokens, k);
        let shape = Shape {
            tokens,
            k,
            block,
            passes,
        };
        let mut acts = Acts::new(stream, tokens, k)?;
        let input = Buffer::from_slice(stream, &x)?;
        quantiser.quantise(stream, Start::After, &input, shape, &mut acts)?;
        let mut matrices = Vec::new();
        for (i, &n) in rows.iter().enumerate() {
            let mut random = Random::new(options.seed + (n * 31 + k + i) as u64);
            let bytes = data::weights(&mut random, ty, n, k);
            let weights = Weights::upload(stream, &TileMatrix::new(ty, n, k, &bytes))?;
            let bias = (i != 1).then(|| data::activations(&mut random, 1, n));
            let on_device = bias.as_ref().map(|b| Buffer::from_slice(stream, b));
            let mut y = Buffer::new(stream.device(), tokens * n)?;
            y.fill_bytes(stream, 0x55)?;
            matrices.push((n, bytes, weights, bias, on_device.transpose()?, y));
        }
        let mut outputs: Vec<Output<'_>> = matrices
            .iter_mut()
            .map(|(_, _, w, _, bias, y)| Output {
                w,
                bias: bias.as_ref(),
                y,
            })
            .collect();
        product.together(stream, Start::Overlapped, &acts, &mut outputs)?;
        let columns = columns(&x, k, block, passes);
        for (m, (n, bytes, _, bias, _, y)) in matrices.iter().enumerate() {
            let (n, matrix) = (*n, TileMatrix::new(ty, *n, k, bytes));
            for (i, found) in y.to_vec(stream)?.iter().enumerate() {
                let of = |column: usize| dot_quantised(&matrix, i % n, &columns[column]);
                let product = match passes {
                    Passes::One => of(i / n),
                    Passes::Two => of(i / n * 2) + of(i / n * 2 + 1),
                };
                let wanted = bias.as_ref().map_or(product, |b| product + b[i % n]);
                row.compare(*found, wanted, || {
                    format!("K {k}, T {tokens}, matrix {m} of N {n}: row {}", i % n)
                });
            }
        }
    }
    Ok(())
}

/// One token's products that make their activations, of a sum or of a row alone, with weights of the norm.
fn compare_normed(
    stream: &Stream,
    options: &Options,
    product: &Product,
    k: usize,
    random: &mut Random,
    row: &mut Row,
) -> Result<(), Error> {
    const EPS: f32 = 1e-6;
    let (ty, isa) = (product.ty(), Isa::best());
    let block = act_block(ty).expect("a quantised format");
    let up = |values: &[f32]| Buffer::from_slice(stream, values);
    let kinds = data::TOKEN_KINDS;
    let x = data::activations(random, kinds, k);
    let delta = data::activations(random, kinds, k);
    let w = data::activations(random, 1, k);
    let w_there = up(&w)?;
    let mut matrices = Vec::new();
    for (i, n) in [37, 16, 130].into_iter().enumerate() {
        let mut random = Random::new(options.seed + (n * 37 + k + i) as u64);
        let bytes = data::weights(&mut random, ty, n, k);
        let weights = Weights::upload(stream, &TileMatrix::new(ty, n, k, &bytes))?;
        let bias = (i == 1).then(|| data::activations(&mut random, 1, n));
        let on_device = bias.as_ref().map(|b| up(b)).transpose()?;
        let y = Buffer::new(stream.device(), n)?;
        matrices.push((n, bytes, weights, bias, on_device, y));
    }
    let mut acts = Acts::new(stream, 1, k)?;
    let mut found_sum = Buffer::new(stream.device(), k)?;
    for t in 0..2 * kinds {
        let with_delta = t >= kinds;
        let at = t % kinds * k..(t % kinds + 1) * k;
        let mut sum = x[at.clone()].to_vec();
        let on_device = [up(&sum)?, up(&delta[at.clone()])?];
        let [x, delta_there] = &on_device;
        if with_delta {
            want::add(isa, &mut sum, &delta[at]);
        }
        let mut normed = vec![0.0; k];
        want::rms_norm(isa, &sum, Some(&w), EPS, &mut normed);
        for (.., y) in &mut matrices {
            y.fill_bytes(stream, 0x55)?;
        }
        found_sum.fill_bytes(stream, 0x55)?;
        // All matrices, or two of them.
        let count = 3 - t % 2;
        let mut outputs: Vec<Output<'_>> = matrices[..count]
            .iter_mut()
            .map(|(_, _, w, _, bias, y)| Output {
                w,
                bias: bias.as_ref(),
                y,
            })
            .collect();
        let before = Before {
            x,
            delta: with_delta.then_some((delta_there, &mut found_sum)),
            w: &w_there,
            eps: EPS,
        };
        product.normed(stream, Start::Overlapped, before, &mut acts, &mut outputs)?;
        compare_acts(stream, &acts, &normed, row)?;
        if with_delta {
            for (i, (found, wanted)) in found_sum.to_vec(stream)?.iter().zip(&sum).enumerate() {
                row.compare(*found, *wanted, || format!("K {k}, kind {t}: sum {i}"));
            }
        }
        let columns = columns(&normed, k, block, Passes::One);
        for (m, (n, bytes, _, bias, _, y)) in matrices[..count].iter().enumerate() {
            let matrix = TileMatrix::new(ty, *n, k, bytes);
            for (i, found) in y.to_vec(stream)?.iter().enumerate() {
                let product = dot_quantised(&matrix, i, &columns[0]);
                let wanted = bias.as_ref().map_or(product, |b| product + b[i]);
                row.compare(*found, wanted, || {
                    format!("K {k}, kind {t}, matrix {m} of N {n}: row {i}")
                });
            }
        }
    }
    Ok(())
}

/// Products whose tiles are more than a device has multiprocessors, and no multiple of them: every kernel against `gemm_narrow`, which was
/// compared with the definition.
fn compare_shared(
    stream: &Stream,
    options: &Options,
    product: &Product,
    row: &mut Row,
) -> Result<(), Error> {
    const NARROW: &str = "gemm_narrow";
    let (ty, quantiser) = (product.ty(), Quantiser::new(stream.device())?);
    let block = act_block(ty).expect("a quantised format");
    let k = SHARED_K;
    let mut random = Random::new(options.seed + k as u64);
    let shape = Shape {
        tokens: SHARED_TOKENS,
        k,
        block,
        passes: Passes::One,
    };
    let x = data::activations(&mut random, SHARED_TOKENS, k);
    let input = Buffer::from_slice(stream, &x)?;
    let mut arranged = Acts::new(stream, SHARED_TOKENS, k)?;
    let mut in_blocks = Acts::new(stream, SHARED_TOKENS, k)?.in_blocks();
    for acts in [&mut arranged, &mut in_blocks] {
        quantiser.quantise(stream, Start::After, &input, shape, acts)?;
    }
    let mut matrices = Vec::new();
    for n in SHARED_ROWS {
        let bytes = data::weights(&mut random, ty, n, k);
        let weights = Weights::upload(stream, &TileMatrix::new(ty, n, k, &bytes))?;
        let bias = Buffer::from_slice(stream, &data::activations(&mut random, 1, n))?;
        let y = Buffer::new(stream.device(), SHARED_TOKENS * n)?;
        matrices.push((weights, bias, y));
    }
    let mut by = |name| -> Result<Vec<Vec<f32>>, Error> {
        let mut outputs = Vec::new();
        for (w, bias, y) in &mut matrices {
            y.fill_bytes(stream, 0x55)?;
            let bias = Some(&*bias);
            outputs.push(Output { w, bias, y });
        }
        let acts = if product.takes(name, &arranged) {
            &arranged
        } else {
            &in_blocks
        };
        product.together_by(Some(name), stream, Start::After, acts, &mut outputs)?;
        matrices.iter().map(|(_, _, y)| y.to_vec(stream)).collect()
    };
    let wanted = by(NARROW)?;
    for name in product.many() {
        if name == NARROW {
            continue;
        }
        for (m, (found, wanted)) in by(name)?.iter().zip(&wanted).enumerate() {
            let n = SHARED_ROWS[m];
            for (i, (found, wanted)) in found.iter().zip(wanted).enumerate() {
                row.compare(*found, *wanted, || {
                    format!("{name} K {k}, matrix {m}: row {}, token {}", i % n, i / n)
                });
            }
        }
    }
    Ok(())
}

/// A step's beginning: the row of its id, its position, its angles.
fn compare_begin(
    stream: &Stream,
    product: &Product,
    weights: &Weights,
    matrix: &TileMatrix<'_>,
    random: &mut Random,
    row: &mut Row,
) -> Result<(), Error> {
    let (n, k) = (matrix.n(), matrix.k());
    for (i, (id, pairs)) in [(random.below(n), [64, 3]), (n, [5, 0]), (n - 1, [0, 0])]
        .into_iter()
        .enumerate()
    {
        let factor = [1.0, 33.5, -0.1][i];
        let angles = pairs.map(|n| [0, 1].map(|_| data::activations(random, 1, n.max(1))));
        let mut step = StepRecord::new(stream.device(), pairs)?;
        let host = [0, 1].map(|r| [0, 1].map(|a| &angles[r][a][..pairs[r]]));
        step.write(id as u32, 77 + i as u32, host)?;
        let poisoned = |len: usize| -> Result<Buffer<f32>, Error> {
            let mut buffer = Buffer::new(stream.device(), len)?;
            buffer.fill_bytes(stream, 0x55)?;
            Ok(buffer)
        };
        let mut position = Buffer::from_slice(stream, &[0u32])?;
        let [mut cos0, mut sin0] = [poisoned(pairs[0])?, poisoned(pairs[0])?];
        let [mut cos1, mut sin1] = [poisoned(pairs[1])?, poisoned(pairs[1])?];
        let mut y = poisoned(k)?;
        let to = [Some([&mut cos0, &mut sin0]), Some([&mut cos1, &mut sin1])];
        product.begin(
            stream,
            Start::After,
            weights,
            &step,
            factor,
            &mut position,
            to,
            &mut y,
        )?;
        let found = [cos0, sin0, cos1, sin1]
            .iter()
            .map(|b| b.to_vec(stream))
            .collect::<Result<Vec<_>, _>>()?
            .concat();
        for (found, wanted) in found.iter().zip(host.as_flattened().concat()) {
            row.compare(*found, wanted, || format!("step {i}: angles"));
        }
        let at = position.to_vec(stream)?[0];
        row.compare_int(at as i32, 77 + i as i32, || format!("step {i}: position"));
        let mut wanted = vec![f32::NAN; k];
        if id < n {
            matrix.decode_row(id, &mut wanted);
        }
        for (c, (found, wanted)) in y.to_vec(stream)?.iter().zip(&wanted).enumerate() {
            row.compare(*found, wanted * factor, || {
                format!("N {n}, K {k}: row {id}, value {c}")
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
