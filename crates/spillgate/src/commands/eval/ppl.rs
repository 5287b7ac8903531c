//! `eval ppl`: perplexity of a text.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use engine::eval::{Likelihood, excerpts};
use engine::plan::session::Taken;
use serde::Serialize;

use super::logits::{each_position, need};
use crate::cli::Common;
use crate::flags::{ContextFlags, MachineFlags};
use crate::output::{print_json, println};
use crate::settings;

/// Prints the perplexity of a text file
///
/// The text is cut into chunks; the second half of each is scored, the first half gives context.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  spillgate eval ppl smollm2 -f README.md")]
pub struct PplArgs {
    /// Path of a GGUF file, a known name, or hf:OWNER/REPO/FILE.gguf
    model: String,
    /// The text
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Tokens of a chunk
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    chunk: usize,
    #[command(flatten)]
    context: ContextFlags,
    #[command(flatten)]
    machine: MachineFlags,
}

#[derive(Serialize)]
struct Ppl {
    perplexity: f64,
    standard_error: f64,
    mean_nll: f64,
    tokens: usize,
    chunks: usize,
    memory: Taken,
}

pub fn run(args: &PplArgs, common: &Common) -> Result<()> {
    let text = std::fs::read(&args.file)
        .with_context(|| format!("cannot read {}", args.file.display()))?;
    let opened = settings::open(&args.model, &args.machine)?;
    let excerpts = excerpts(&opened.tokenizer, &text, args.chunk)?;
    let texts: Vec<Vec<u32>> = excerpts.iter().map(|e| e.tokens.clone()).collect();
    let loaded = opened.load(&args.context, need(&texts))?;
    let mut score = Likelihood::default();
    let memory = each_position(&loaded, &texts, false, &mut |chunk, pos, _, logits| {
        if let Some(next) = excerpts[chunk].scored_after(pos) {
            score.add(logits, next);
        }
        Ok(())
    })?;
    let (perplexity, standard_error) = score.perplexity();
    let ppl = Ppl {
        perplexity,
        standard_error,
        mean_nll: score.mean_nll(),
        tokens: score.tokens(),
        chunks: excerpts.len(),
        memory,
    };
    if common.json {
        return print_json(&ppl);
    }
    println(&format!(
        "perplexity {perplexity:.4} +- {standard_error:.4} over {} tokens in {} chunks",
        ppl.tokens, ppl.chunks
    ))
}
