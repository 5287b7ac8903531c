//! `eval kld`: how far a run lies from a reference.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{ArgGroup, Args};
use engine::eval::{Divergence, EvalError, KlSummary, MARGIN_MIN, Position, Top1, read_positions};
use engine::plan::session::Taken;
use serde::Serialize;

use super::against;
use super::logits::{each_position, need};
use crate::cli::Common;
use crate::failure::Advised;
use crate::flags::{ContextFlags, MachineFlags, OtherContext, other_context};
use crate::output::{print, print_json, table};
use crate::settings;

/// Prints the KL divergence from stored logits or from other settings, and how often the first choice agrees
///
/// With --against two settings of a model run side by side over the same tokens: the command's own context flags, which are the base, and
/// those in --against. The divergence is that of the latter from the base, over the whole vocabulary, and the first choice is compared at
/// every position. A text is cut into chunks, of each of which the second half is compared.
///
/// With --reference both sides are lists of the highest logits: the divergence is that over the reference's listed tokens which the other
/// lists too, all other tokens counting as one. The first choice is compared where the reference's lead exceeds 0.1.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("other").required(true).args(["reference", "against"]))]
#[command(group = ArgGroup::new("text").args(["file", "tokens"]).conflicts_with("reference"))]
#[command(after_help = "\
Examples:
  spillgate eval kld smollm2 --against q8_0/q4_0 -f README.md
  spillgate eval kld smollm2 --against 'q4_0/q4_0 --kv-rotate off' --cache-type-k q4_0 --cache-type-v q4_0 -f README.md
  spillgate eval kld smollm2 --against '--window 256' --chunk 1024 -f README.md --by-token
  spillgate eval logits smollm2 --tokens ids.txt > f16.jsonl
  spillgate eval kld smollm2 --reference f16.jsonl --cache-type-k q8_0
  spillgate eval kld other.jsonl --reference f16.jsonl")]
pub struct KldArgs {
    /// The model to compare, or stored logits of one (FILE.jsonl)
    pub model: String,
    /// Stored logits, in the form of 'eval logits'
    #[arg(long, value_name = "FILE")]
    reference: Option<PathBuf>,
    /// Other settings, in one argument: context flags, or K/V for both types of the cache; what is not said is as by default
    #[arg(long, value_name = "FLAGS", value_parser = other_context, allow_hyphen_values = true, requires = "text")]
    pub against: Option<OtherContext>,
    /// With --against: a text to compare over
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// With --against: tokens of a chunk of the text
    #[arg(
        long,
        value_name = "TOKENS",
        default_value_t = 512,
        conflicts_with = "reference"
    )]
    pub chunk: usize,
    /// With --against: token ids to compare over, a line a text, decimal, separated by spaces; all positions are compared
    #[arg(long, value_name = "FILE")]
    pub tokens: Option<PathBuf>,
    /// With --against: take one decode step a token instead of prefill
    #[arg(long, requires = "against")]
    pub by_token: bool,
    #[command(flatten)]
    pub context: ContextFlags,
    #[command(flatten)]
    pub machine: MachineFlags,
}

#[derive(Serialize)]
struct Report {
    kl_nats: KlSummary,
    top1: Top1,
    /// `None` where both sides were stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<Taken>,
}

pub fn run(args: &KldArgs, common: &Common) -> Result<()> {
    match (&args.reference, &args.against) {
        (Some(reference), _) => from_reference(args, reference, common),
        (None, Some(against)) => against::run(args, &against.flags(), common),
        (None, None) => unreachable!("the flags' group demands one of them"),
    }
}

fn from_reference(args: &KldArgs, reference: &Path, common: &Common) -> Result<()> {
    let reference = read_positions(reference)?;
    let (other, memory) = if Path::new(&args.model).extension() == Some(OsStr::new("jsonl")) {
        (read_positions(Path::new(&args.model))?, None)
    } else {
        let (positions, memory) = compute(args, &reference)?;
        (positions, Some(memory))
    };
    if reference.len() != other.len() {
        let why = format!("{} positions against {}", reference.len(), other.len());
        return Err(EvalError::Mismatch {
            line: reference.len().min(other.len()) + 1,
            why,
        }
        .into());
    }
    let mut divergence = Divergence::default();
    for (reference, other) in reference.iter().zip(&other) {
        divergence.add(reference, other)?;
    }
    let Some(kl_nats) = divergence.kl() else {
        return Err(Advised::new(
            "the reference has no positions",
            "make one with 'spillgate eval logits'",
        )
        .into());
    };
    let report = Report {
        kl_nats,
        top1: divergence.top1(),
        memory,
    };
    if common.json {
        print_json(&report)
    } else {
        print(&text(&report))
    }
}

/// The model's answers to the reference's tokens, as many candidates each as the reference lists.
fn compute(args: &KldArgs, reference: &[Position]) -> Result<(Vec<Position>, Taken)> {
    let texts = texts(reference)?;
    let opened = settings::open(&args.model, &args.machine)?;
    let n_vocab = opened.config.n_vocab;
    if let Some(&token) = texts.iter().flatten().find(|&&t| t as usize >= n_vocab) {
        let what = format!("the reference has token {token}, the model has {n_vocab}");
        return Err(
            Advised::new(what, "a reference is for models with the same vocabulary").into(),
        );
    }
    let loaded = opened.load(&args.context, need(&texts))?;
    let mut positions = Vec::with_capacity(reference.len());
    let memory = each_position(&loaded, &texts, false, &mut |text, pos, token, logits| {
        let n_top = reference[positions.len()].top.len();
        positions.push(Position::new(text, pos, token, logits, n_top)?);
        Ok(())
    })?;
    Ok((positions, memory))
}

/// The texts that a reference was made from. Its lines must be complete and in order.
fn texts(reference: &[Position]) -> Result<Vec<Vec<u32>>> {
    let mut texts: Vec<Vec<u32>> = Vec::new();
    for (index, p) in reference.iter().enumerate() {
        if p.pos == 0 {
            texts.push(Vec::new());
        }
        let expected = (
            texts.len().wrapping_sub(1),
            texts.last().map_or(0, Vec::len),
        );
        if (p.text, p.pos) != expected {
            let why = format!(
                "text {}, position {}, expected text {}, position {}",
                p.text, p.pos, expected.0, expected.1
            );
            return Err(EvalError::Mismatch {
                line: index + 1,
                why,
            }
            .into());
        }
        texts[p.text].push(p.token);
    }
    Ok(texts)
}

/// Mean and spread, a line each.
pub fn kl_table(kl: &KlSummary) -> String {
    let row = |label: &str, value: f64| vec![label.to_owned(), format!("{value:.3e}")];
    let rows = [
        row("mean", kl.mean),
        row("median", kl.median),
        row("p90", kl.p90),
        row("p99", kl.p99),
        row("max", kl.max),
    ];
    format!(
        "KL divergence in nats, {} positions\n{}",
        kl.positions,
        table(&rows, &[1])
    )
}

fn text(report: &Report) -> String {
    let mut text = kl_table(&report.kl_nats);
    let top1 = &report.top1;
    text += &format!(
        "first choice agrees {} of {} times ({:.2} %) where the lead exceeds {MARGIN_MIN}\n",
        top1.agreed,
        top1.clear,
        top1.share * 100.0
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: usize, pos: usize) -> Position {
        Position {
            text,
            pos,
            token: (10 * text + pos) as u32,
            logsumexp: 0.0,
            top: vec![(0, 0.0)],
        }
    }

    #[test]
    fn texts_are_taken_from_complete_references_only() {
        let good = [at(0, 0), at(0, 1), at(1, 0)];
        assert_eq!(texts(&good).unwrap(), [vec![0, 1], vec![10]]);
        for bad in [
            &[at(0, 1)][..],
            &[at(1, 0)],
            &[at(0, 0), at(0, 2)],
            &[at(0, 0), at(1, 1)],
            &[at(0, 0), at(0, 0)],
        ] {
            assert!(texts(bad).is_err(), "{bad:?}");
        }
    }
}
