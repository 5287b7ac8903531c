//! What can be asked on the command line.

use clap::{ArgAction, Args, Parser, Subcommand};

use crate::commands::{info::InfoArgs, pull::PullArgs, tokenize::TokenizeArgs};

/// Runs language models on this machine
#[derive(Debug, Parser)]
#[command(
    name = "spillgate",
    version,
    propagate_version = true,
    after_help = "\
MODEL is the path of a GGUF file, a known name (see 'spillgate pull'), or hf:OWNER/REPO/FILE.gguf; what is missing is
fetched into the cache (SPILLGATE_CACHE). Results go to stdout, everything else to stderr.

Examples:
  spillgate run smollm2 \"Why is the sky blue?\"
  spillgate chat qwen2.5-0.5b
  spillgate info model.gguf
  echo -n 'Hello world' | spillgate tokenize smollm2"
)]
pub struct Cli {
    #[command(flatten)]
    pub common: Common,
    #[command(subcommand)]
    pub command: Command,
}

/// Flags of every command.
#[derive(Debug, Args)]
pub struct Common {
    /// Print the result as JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// Say more on stderr; twice for details
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Pull(PullArgs),
    Info(InfoArgs),
    Tokenize(TokenizeArgs),
}
