//! `eval`: how good a model's output is.

mod against;
mod kld;
mod logits;
mod niah;
mod ppl;
mod tiers;

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::cli::Common;

/// Evaluates a model and its cache: logits, perplexity, distances, retrieval from long texts
#[derive(Debug, Args)]
pub struct EvalArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Logits(logits::LogitsArgs),
    Ppl(ppl::PplArgs),
    // Boxed: it has the flags of two settings.
    Kld(Box<kld::KldArgs>),
    Niah(niah::NiahArgs),
    Tiers(tiers::TiersArgs),
}

pub fn run(args: &EvalArgs, common: &Common) -> Result<()> {
    match &args.what {
        What::Logits(args) => logits::run(args, common),
        What::Ppl(args) => ppl::run(args, common),
        What::Kld(args) => kld::run(args, common),
        What::Niah(args) => niah::run(args, common),
        What::Tiers(args) => tiers::run(args, common),
    }
}
