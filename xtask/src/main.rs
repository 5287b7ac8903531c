//! `xtask`: developer chores, run as `cargo run --release -p xtask -- COMMAND`.

#![forbid(unsafe_code)]

mod bench;
mod load;
mod machine;
mod ptx;
mod spill;
mod synth;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use engine::probe::bandwidth::Source;

/// Passes over memory that count.
const PASSES: usize = 7;

#[derive(Debug, Parser)]
#[command(about = "Developer chores")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measures spillgate and other engines side by side
    Bench(bench::BenchArgs),
    /// Measures how fast memory is read, with one thread and with several
    Bandwidth(BandwidthArgs),
    /// Serves a model, and asks it from many clients: speed, waits, and whether answers are those of the same prompts alone
    Load(load::LoadArgs),
    /// Compiles the CUDA kernels to PTX, beside their sources
    Ptx(ptx::PtxArgs),
    /// Writes a model file in the shape of a known model, with random weights
    Synth(synth::SynthArgs),
    /// Compares measured spills of KV with what was predicted
    Spill(spill::SpillArgs),
}

#[derive(Debug, Args)]
struct BandwidthArgs {
    /// Sizes of the buffers read, separated by commas
    #[arg(
        long,
        value_name = "MIB,...",
        value_delimiter = ',',
        default_value = "98,400,2048"
    )]
    mib: Vec<usize>,
    /// Threads of the second figure
    #[arg(short, long, value_name = "N", default_value_t = machine::cores())]
    threads: usize,
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Bench(args) => bench::run(&args),
        Command::Bandwidth(args) => bandwidth(&args),
        Command::Load(args) => load::run(&args),
        Command::Ptx(args) => ptx::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Spill(args) => spill::run(&args),
    };
    if let Err(error) = done {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn bandwidth(args: &BandwidthArgs) -> Result<()> {
    for mib in &args.mib {
        let source = Source::new(mib << 20)?;
        for threads in [1, args.threads] {
            let read = source.read(threads, PASSES)?;
            println!(
                "{mib} MiB, {} threads: {:.1} GB/s, best {:.1}",
                read.threads,
                read.gb_s_p50(),
                read.gb_s_max()
            );
        }
    }
    Ok(())
}
