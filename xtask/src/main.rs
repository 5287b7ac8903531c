//! `xtask`: developer chores, run as `cargo run --release -p xtask -- COMMAND`.

#![forbid(unsafe_code)]

mod bandwidth;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(about = "Developer chores")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measures how fast memory is read, with one thread and with all
    Bandwidth(BandwidthArgs),
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
    /// Threads of the second column
    #[arg(short, long, value_name = "N", default_value_t = all_threads())]
    threads: usize,
}

fn all_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Bandwidth(args) => {
            for mib in args.mib {
                let source = bandwidth::Source::new(mib << 20)?;
                for threads in [1, args.threads] {
                    let read = source.measure(threads)?;
                    println!(
                        "{mib} MiB, {threads} threads: {:.1} GB/s, best {:.1}",
                        read.gb_s_p50, read.gb_s_max
                    );
                }
            }
            Ok(())
        }
    }
}
