//! `spillgate`: language models from the command line.
//!
//! A thin shell over [`engine`]: [`cli`] says what can be asked, [`commands`] has one module a command, and every
//! command writes its result to stdout and everything else to stderr.

#![forbid(unsafe_code)]

mod cli;
mod commands;
mod config;
mod experts;
mod failure;
mod flags;
mod interrupt;
mod kept;
mod output;
mod profiles;
mod progress;
mod prompt;
mod running;
mod settings;

use std::env;
use std::process::ExitCode;

use tracing_subscriber::filter::LevelFilter as Level;

fn main() -> ExitCode {
    let cli = match config::arguments(env::args_os().collect()) {
        Ok(words) => cli::Cli::read(words),
        Err(error) => return failure::report(&error),
    };
    let level = match cli.common.verbose {
        0 => Level::WARN,
        1 => Level::INFO,
        _ => Level::DEBUG,
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .with_ansi(output::stderr_has_colour())
        .without_time()
        .init();
    match commands::dispatch(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure::report(&error),
    }
}
