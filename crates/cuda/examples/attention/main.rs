//! Attention and element-wise operations on a GPU: against the CPU's definition bit for bit, and how fast.
//!
//! `cargo run --release -p cuda --example attention -- [--portable] [--bench] [elementwise] [turn] [decode] [prompts]`; the exit status is 0
//! only if nothing differs.

mod bench;
mod cases;
mod elementwise;
mod prompts;
mod turn;

use std::process::ExitCode;

use cuda::Device;
use cuda::product::Target;
use cuda::selftest::Row;

/// All launches may overlap what is ahead of them: so that is tested, too.
const START: cuda::kernel::Start = cuda::kernel::Start::Overlapped;

type Failure = Box<dyn std::error::Error>;

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
    let has = |flag: &str| std::env::args().skip(1).any(|a| a == flag);
    let device = Device::open(0)?;
    let target = if has("--portable") {
        Target::Portable
    } else {
        Target::Best
    };
    if has("--bench") {
        bench::run(&device, target)?;
        return Ok(true);
    }
    println!(
        "| kernel | format | shapes | compared | differing | NaN |\n|---|---|---|---|---|---|"
    );
    let (mut rows, mut differing) = (0, 0);
    let mut report = |row: Row| {
        println!(
            "| {} | {} | {} | {} | {} | {} |",
            row.kernel, row.format, row.shapes, row.compared, row.differing, row.nan
        );
        if let Some(first) = &row.first {
            println!("first: {first}");
        }
        rows += 1;
        differing += usize::from(row.differing > 0 || row.compared == 0);
    };
    let all = !["elementwise", "turn", "decode", "prompts"]
        .into_iter()
        .any(has);
    if all || has("elementwise") {
        elementwise::rows(&device, target, &mut report)?;
    }
    if all || has("turn") {
        turn::rows(&device.stream()?, target, &mut report)?;
    }
    if all || has("decode") {
        cases::rows(&device, target, &mut report)?;
    }
    if all || has("prompts") {
        prompts::rows(&device, target, &mut report)?;
    }
    println!("{rows} rows, {differing} differ");
    Ok(differing == 0)
}

/// A row of all numbers of two lists.
fn row(kernel: &'static str, format: String, shapes: String, found: &[f32], wanted: &[f32]) -> Row {
    let mut row = Row::new(kernel, format, shapes);
    assert_eq!(found.len(), wanted.len(), "both have the same numbers");
    for (i, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        row.compare(*found, *wanted, || format!("number {i}"));
    }
    row
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
