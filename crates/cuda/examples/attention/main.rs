//! Attention and element-wise operations on a GPU: against the CPU's definition bit for bit, and how fast.
//!
//! ```text
//! attention                 compares; exits non-zero if anything differs
//! attention --bench         compares, then measures
//! attention --bench-only    measures
//! ```

mod bench;
mod cases;
mod elementwise;
mod prompts;

use std::process::ExitCode;

use cuda::Device;

/// All launches may overlap what is ahead of them: so that is tested, too.
const START: cuda::kernel::Start = cuda::kernel::Start::Overlapped;

type Failure = Box<dyn std::error::Error>;

/// What one comparison found.
struct Row {
    kernel: &'static str,
    shape: String,
    compared: usize,
    differing: usize,
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<bool, Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let has = |flag: &str| args.iter().any(|a| a == flag);
    let device = Device::open(0)?;
    let mut is_equal = true;
    if !has("--bench-only") {
        let mut rows = elementwise::rows(&device)?;
        rows.extend(cases::rows(&device)?);
        rows.extend(prompts::rows(&device)?);
        println!("| kernel | shape | compared | differing |\n|---|---|---|---|");
        for row in &rows {
            println!(
                "| {} | {} | {} | {} |",
                row.kernel, row.shape, row.compared, row.differing
            );
            is_equal &= row.differing == 0 && row.compared > 0;
        }
        println!(
            "{} comparisons, {} differ\n",
            rows.len(),
            rows.iter().filter(|r| r.differing > 0).count()
        );
    }
    if has("--bench") || has("--bench-only") {
        bench::run(&device)?;
    }
    Ok(is_equal)
}

/// Numbers that differ; NaN equals NaN.
fn differing(a: &[f32], b: &[f32]) -> usize {
    let same = |x: f32, y: f32| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
    a.iter().zip(b).filter(|(x, y)| !same(**x, **y)).count() + a.len().abs_diff(b.len())
}

/// Seeded numbers between -2 and 2, some of them much larger or smaller.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        s = s
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (s >> 40) as f32 / (1 << 24) as f32
    };
    (0..n)
        .map(|_| {
            let x = next() * 4.0 - 2.0;
            match (next() * 64.0) as u32 {
                0 => x * 20.0,
                1 => x * 1e-3,
                2 => x * 1e-8,
                3 => -0.0,
                _ => x,
            }
        })
        .collect()
}
