//! How fast the products are: few tokens against reading the same bytes, many tokens in operations a second.

use std::time::Instant;

use cuda::acts::Shape;
use cuda::kernel::Start;
use cuda::product::Product;
use cuda::selftest::Options;
use cuda::stream::Timing;
use cuda::{Acts, Buffer, Device, Error, Event, Launch, Module, Quantiser, Stream, Weights};
use gguf::TensorType;
use quant::act::Passes;
use quant::product::act_block;

/// `[N, K]`.
const SHAPES: [(usize, usize); 4] = [(5120, 5120), (13824, 5120), (5120, 13824), (1024, 5120)];

/// Bytes of weights that launches take turns in, so that the second-level cache holds none of them.
const BYTES: usize = 400 << 20;

/// Replays of a graph that count.
const REPLAYS: usize = 7;

/// Microseconds a launch: median over replays of a graph of `n` launches.
fn time_us(
    stream: &Stream,
    n: usize,
    mut launch: impl FnMut(usize) -> Result<(), Error>,
) -> Result<f64, Error> {
    let mut graph = stream.capture(|| (0..n).try_for_each(&mut launch))?;
    let device = stream.device();
    let (start, end) = (
        Event::new(device, Timing::On)?,
        Event::new(device, Timing::On)?,
    );
    let mut ms = Vec::new();
    for replay in 0..=REPLAYS {
        stream.record(&start)?;
        graph.launch(stream)?;
        stream.record(&end)?;
        end.synchronise()?;
        if replay > 0 {
            ms.push(end.elapsed_ms(&start)?);
        }
    }
    ms.sort_by(f32::total_cmp);
    Ok(f64::from(ms[REPLAYS / 2]) * 1e3 / n as f64)
}

fn read_us(stream: &Stream, weights: &[Weights], out: &mut Buffer<u32>) -> Result<f64, Error> {
    let kernel = Module::load(stream.device(), "read")?.kernel("read_only")?;
    let mut best = f64::MAX;
    for threads in [128, 256, 512] {
        let us = time_us(stream, weights.len().max(16), |i| {
            let data = weights[i % weights.len()].data();
            let pieces = data.bytes() / 16;
            let launch = Launch::new(pieces.div_ceil(threads * 8), threads);
            // SAFETY: the kernel reads whole pieces of the buffer and may write one word.
            unsafe {
                kernel.launch(
                    stream,
                    launch,
                    &[data.into(), (pieces as u64).into(), (&mut *out).into()],
                )
            }
        })?;
        best = best.min(us);
    }
    Ok(best)
}

pub fn run(device: &Device, options: &Options) -> Result<(), Error> {
    let stream = device.stream()?;
    let mut word = Buffer::new(device, 1)?;
    let mut random = vec![0u32; BYTES / 4];
    let mut state = 0x1234_5678_9abc_def1u64;
    for word in &mut random {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        // No factor becomes infinite: the second bit of every half is clear.
        *word = (state >> 32) as u32 & 0xbfff_bfff;
    }
    let bytes: Vec<u8> = random.iter().flat_map(|w| w.to_le_bytes()).collect();
    for &ty in &options.formats {
        let Some(block) = act_block(ty) else {
            float(&stream, ty, &bytes, options, &mut word)?;
            continue;
        };
        let begin = Instant::now();
        let product = Product::new(device, ty, options.target)?;
        println!(
            "{}: loaded in {:.0} ms; (kernel, registers, spills) {:?}",
            ty.name(),
            begin.elapsed().as_secs_f64() * 1e3,
            product.resources()?
        );
        let quantiser = Quantiser::new(device)?;
        for (n, k) in SHAPES {
            let weights = copies(&stream, ty, n, k, &bytes)?;
            let size = weights[0].n() * weights[0].row_bytes();
            let limit = read_us(&stream, &weights, &mut word)?;
            print!(
                "gemv {:<7} {n:>5}x{k:<5} read {limit:6.2} us {:5.0} GB/s |",
                ty.name(),
                size as f64 / limit / 1e3
            );
            for tokens in [1, 2, 4, 8, 16] {
                let (acts, mut y) = quantised(&stream, &quantiser, tokens, k, block, n)?;
                let mut time = |start| {
                    time_us(&stream, weights.len().max(16), |i| {
                        product.quantised(
                            &stream,
                            start,
                            &weights[i % weights.len()],
                            &acts,
                            &mut y,
                        )
                    })
                };
                let (after, overlapped) = (time(Start::After)?, time(Start::Overlapped)?);
                print!(
                    " T{tokens} {after:6.2} us {:3.0}% ({overlapped:6.2} us {:3.0}%)",
                    100.0 * limit / after,
                    100.0 * limit / overlapped
                );
            }
            println!();
        }
        for (n, k) in SHAPES {
            let weights = copies(&stream, ty, n, k, &bytes)?;
            for tokens in [32, 128, 512, 2048] {
                let (acts, mut y) = quantised(&stream, &quantiser, tokens, k, block, n)?;
                print!("gemm {:<7} {n:>5}x{k:<5} T{tokens:<4}", ty.name());
                // The one that is chosen, then each that reads activations as they lie.
                for name in std::iter::once(None).chain(product.many().into_iter().map(Some)) {
                    let us = time_us(&stream, 8, |i| {
                        let w = &weights[i % weights.len()];
                        product.quantised_by(name, &stream, Start::After, w, &acts, &mut y)
                    });
                    let us = match us {
                        Err(Error::NoModule { .. }) => continue,
                        us => us?,
                    };
                    print!(
                        " | {} {us:.1} us {:.0} TOP/s",
                        name.unwrap_or("chosen"),
                        2.0 * (n * k * tokens) as f64 / us / 1e6
                    );
                }
                println!();
            }
        }
    }
    for block in [32, 256] {
        for (tokens, k) in [(1, 5120), (512, 5120), (512, 13824)] {
            let quantiser = Quantiser::new(device)?;
            let x = Buffer::from_slice(&stream, &vec![0.5f32; tokens * k])?;
            let mut acts = Acts::new(&stream, tokens, k)?;
            let shape = Shape {
                tokens,
                k,
                block,
                passes: Passes::One,
            };
            let us = time_us(&stream, 16, |_| {
                quantiser.quantise(&stream, Start::After, &x, shape, &mut acts)
            })?;
            println!(
                "quantise {block} T {tokens} K {k}: {us:.2} us, {:.0} GB/s",
                (tokens * k) as f64 * 5.0 / us / 1e3
            );
        }
    }
    Ok(())
}

fn copies(
    stream: &Stream,
    ty: TensorType,
    n: usize,
    k: usize,
    bytes: &[u8],
) -> Result<Vec<Weights>, Error> {
    let size = n * k / ty.block_len() * ty.block_bytes();
    (0..(BYTES / size + 2).min(40))
        .map(|i| {
            let mut weights = Weights::new(stream.device(), ty, n, k)?;
            let at = (i * 4096) % (bytes.len() - size);
            weights.upload_tiles(stream, 0, &bytes[at..at + size])?;
            Ok(weights)
        })
        .collect()
}

fn quantised(
    stream: &Stream,
    quantiser: &Quantiser,
    tokens: usize,
    k: usize,
    block: usize,
    n: usize,
) -> Result<(Acts, Buffer<f32>), Error> {
    let x: Vec<f32> = (0..tokens * k)
        .map(|i| ((i * 7919 % 2003) as f32 - 1000.0) * 1e-3)
        .collect();
    let x = Buffer::from_slice(stream, &x)?;
    let mut acts = Acts::new(stream, tokens, k)?;
    let shape = Shape {
        tokens,
        k,
        block,
        passes: Passes::One,
    };
    quantiser.quantise(stream, Start::After, &x, shape, &mut acts)?;
    stream.synchronise()?;
    Ok((acts, Buffer::new(stream.device(), tokens * n)?))
}

fn float(
    stream: &Stream,
    ty: TensorType,
    bytes: &[u8],
    options: &Options,
    word: &mut Buffer<u32>,
) -> Result<(), Error> {
    let product = Product::new(stream.device(), ty, options.target)?;
    for (n, k) in SHAPES {
        let weights = copies(stream, ty, n, k, bytes)?;
        let size = weights[0].n() * weights[0].row_bytes();
        let limit = read_us(stream, &weights, word)?;
        print!(
            "float {:<6} {n:>5}x{k:<5} read {limit:6.2} us {:5.0} GB/s |",
            ty.name(),
            size as f64 / limit / 1e3
        );
        for tokens in [1, 4, 16, 512] {
            let x = Buffer::from_slice(stream, &vec![0.5f32; tokens * k])?;
            let mut y = Buffer::new(stream.device(), tokens * n)?;
            let us = time_us(stream, 8, |i| {
                product.float(
                    stream,
                    Start::After,
                    &weights[i % weights.len()],
                    &x,
                    tokens,
                    &mut y,
                )
            })?;
            print!(
                " T{tokens} {us:7.2} us {:3.0}% {:.1} TFLOP/s",
                100.0 * limit / us,
                2.0 * (n * k * tokens) as f64 / us / 1e6
            );
        }
        println!();
    }
    Ok(())
}
