//! One module a command: its flags, and what it does.

pub mod bench;
pub mod chat;
pub mod eval;
pub mod info;
mod placings;
pub mod plan;
pub mod probe;
pub mod ps;
pub mod pull;
pub mod replay;
pub mod run;
pub mod selftest;
pub mod serve;
mod servings;
pub mod shell;
pub mod tokenize;

use std::path::PathBuf;

use anyhow::Result;
use engine::fetch;
use gguf::{GgufFile, MapMode};

use crate::cli::{Cli, Command};
use crate::interrupt;
use crate::progress::Bar;

pub fn dispatch(cli: &Cli) -> Result<()> {
    let common = &cli.common;
    match &cli.command {
        Command::Pull(args) => pull::run(args, common),
        Command::Replay(args) => replay::run(args, common),
        Command::Run(args) => run::run(args, common),
        Command::Chat(args) => chat::run(args, common),
        Command::Bench(args) => bench::run(args, common),
        Command::Eval(args) => eval::run(args, common),
        Command::Info(args) => info::run(args, common),
        Command::Plan(args) => plan::run(args, common),
        Command::Probe(args) => probe::run(args, common),
        Command::Ps(args) => ps::run(args, common),
        Command::Selftest(args) => selftest::run(args, common),
        Command::Serve(args) => serve::run(args, common),
        Command::Tokenize(args) => tokenize::run(args, common),
        Command::Completions(args) => shell::completions(args),
        Command::Man(args) => shell::man(args),
    }
}

/// The path of a model argument, fetched first where it is missing.
pub fn model_path(model: &str) -> Result<PathBuf> {
    Ok(fetch::cached_or_pull(model, &mut Bar::new("fetching"))?)
}

/// Opens a model's file for its header alone.
fn open_header(model: &str) -> Result<GgufFile> {
    interrupt::catch()?;
    Ok(GgufFile::open(&model_path(model)?, MapMode::Read)?)
}
