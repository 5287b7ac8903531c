//! `eval logits`: what a model expects after each token of given texts.

use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use engine::eval::{LogitsHash, Position, read_token_lines};
use engine::plan::session::Taken;
use engine::session::Wanted;

use crate::cli::Common;
use crate::failure::{Advised, Interrupted};
use crate::flags::{ContextFlags, MachineFlags};
use crate::output::{print_json, println};
use crate::settings::{Loaded, Need};
use crate::{interrupt, settings};

/// Prints the logits after each token of given texts
///
/// One JSON object a position: text, pos, token, logsumexp, and the highest logits. With --hash instead one SHA-256 over
/// the logits of all positions as little-endian f32: equal only where every bit is.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate tokenize smollm2 'Hello world' > ids.txt
  spillgate eval logits smollm2 --tokens ids.txt --top 20 > logits.jsonl
  spillgate eval logits smollm2 --tokens ids.txt --hash
  spillgate eval logits smollm2 --tokens ids.txt --hash --by-token --isa scalar")]
pub struct LogitsArgs {
    /// Path of a GGUF file, a known name, or hf:OWNER/REPO/FILE.gguf
    model: String,
    /// Token ids: a line a text, decimal, separated by spaces
    #[arg(long, value_name = "FILE")]
    tokens: PathBuf,
    /// Candidates listed at each position
    #[arg(long, value_name = "N", default_value_t = 20)]
    top: usize,
    /// Print one SHA-256 over all logits instead
    #[arg(long, conflicts_with = "top")]
    hash: bool,
    /// Take one decode step a token instead of prefill
    #[arg(long)]
    by_token: bool,
    #[command(flatten)]
    context: ContextFlags,
    #[command(flatten)]
    machine: MachineFlags,
}

pub fn run(args: &LogitsArgs, common: &Common) -> Result<()> {
    if args.top == 0 {
        return Err(Advised::new("--top 0 lists nothing", "give at least 1, or --hash").into());
    }
    let opened = settings::open(&args.model, &args.machine)?;
    let texts = read_token_lines(&args.tokens, opened.config.n_vocab)?;
    if texts.is_empty() {
        let what = format!("{} has no token ids", args.tokens.display());
        return Err(Advised::new(what, "'spillgate tokenize' writes them, a line a text").into());
    }
    let loaded = opened.load(&args.context, need(&texts))?;
    let mut hash = LogitsHash::default();
    let memory = each_position(
        &loaded,
        &texts,
        args.by_token,
        &mut |text, pos, token, logits| {
            if args.hash {
                hash.update(logits);
                return Ok(());
            }
            print_json(&Position::new(text, pos, token, logits, args.top)?)
        },
    )?;
    match (args.hash, common.json) {
        (true, true) => print_json(&serde_json::json!({ "sha256": hash.hex(), "memory": memory })),
        (true, false) => println(&hash.hex()),
        // The lines are JSON either way.
        (false, _) => Ok(()),
    }
}

/// Takes text, position, token, and the logits after it.
type OnLogits<'f> = dyn FnMut(usize, usize, u32, &[f32]) -> Result<()> + 'f;

/// Room for the longest of some texts.
pub fn need(texts: &[Vec<u32>]) -> Need {
    let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
    Need::Cells(longest.max(1))
}

/// Feeds texts to a model and hands on the logits after each token.
pub fn each_position(
    loaded: &Loaded,
    texts: &[Vec<u32>],
    by_token: bool,
    on_logits: &mut OnLogits<'_>,
) -> Result<Taken> {
    let (mut session, memory) = loaded.session()?;
    for (index, tokens) in texts.iter().enumerate() {
        session.truncate(0);
        if by_token {
            for (pos, &token) in tokens.iter().enumerate() {
                if interrupt::asked() {
                    return Err(Interrupted.into());
                }
                session.decode(token)?;
                on_logits(index, pos, token, session.logits())?;
            }
            continue;
        }
        let mut failed = None;
        session.prefill(
            tokens,
            Wanted::All(&mut |pos, logits| {
                let result = match interrupt::asked() {
                    true => Err(Interrupted.into()),
                    false => on_logits(index, pos, tokens[pos], logits),
                };
                match result {
                    Ok(()) => ControlFlow::Continue(()),
                    Err(error) => {
                        failed = Some(error);
                        ControlFlow::Break(())
                    }
                }
            }),
        )?;
        if let Some(error) = failed {
            return Err(error);
        }
    }
    Ok(memory)
}
