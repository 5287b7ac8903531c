//! `completions` and `man`: what shells and manuals need to know of the command line.

use std::io;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::cli::Cli;

/// Writes a script with which a shell completes commands and flags
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate completions bash > ~/.local/share/bash-completion/completions/spillgate
  spillgate completions zsh > ~/.zfunc/_spillgate
  spillgate completions fish > ~/.config/fish/completions/spillgate.fish")]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Writes the manual: the page of spillgate, or a page a command to a folder
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate man | man -l -
  spillgate man --to ~/.local/share/man/man1")]
pub struct ManArgs {
    /// A folder for all pages
    #[arg(long, value_name = "FOLDER")]
    to: Option<PathBuf>,
}

pub fn completions(args: &CompletionsArgs) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "spillgate", &mut script);
    Ok(io::Write::write_all(&mut io::stdout(), &script)?)
}

pub fn man(args: &ManArgs) -> Result<()> {
    let Some(folder) = &args.to else {
        let mut page = Vec::new();
        clap_mangen::Man::new(Cli::command()).render(&mut page)?;
        return Ok(io::Write::write_all(&mut io::stdout(), &page)?);
    };
    std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), folder))
        .with_context(|| format!("cannot write to {}", folder.display()))
}
