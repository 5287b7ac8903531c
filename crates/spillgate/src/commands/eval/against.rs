//! `eval kld --against`: two settings of a model, side by side.

use std::ops::ControlFlow;

use anyhow::{Context, Result};
use engine::eval::tiers::Progress;
use engine::eval::{Agreement, Excerpt, Feed, KlSummary, compare, excerpts, read_token_lines};
use engine::plan::session::Taken;
use engine::session::{Session, Spread};
use serde::Serialize;

use super::kld::{KldArgs, kl_table};
use crate::cli::Common;
use crate::failure::{Advised, Interrupted};
use crate::flags::ContextFlags;
use crate::output::{print, print_json};
use crate::progress::Parts;
use crate::settings::{self, Need, Opened};

#[derive(Serialize)]
struct Report {
    kl_nats: KlSummary,
    top1: Agreement,
    base: Side,
    other: Side,
}

/// One of the settings.
#[derive(Serialize)]
struct Side {
    cache_type_k: String,
    cache_type_v: String,
    /// `None` if no token was scored.
    perplexity: Option<f64>,
    /// Where cells were after the last token.
    cells: Spread,
    memory: Taken,
}

pub fn run(args: &KldArgs, other: &ContextFlags, common: &Common) -> Result<()> {
    let opened = settings::open(&args.model, &args.machine)?;
    let excerpts = texts(args, &opened)?;
    let longest = excerpts.iter().map(|e| e.tokens.len()).max().unwrap_or(0);
    let need = Need::Cells(longest.max(1));
    let plans = [opened.plan(&args.context, need)?, opened.plan(other, need)?];
    opened.check_room(&[&plans[0], &plans[1]])?;
    let [plan, other] = plans;
    let loaded = opened.load_planned(plan)?;
    let (mut base, base_memory) = loaded.session()?;
    let (mut other, other_memory) = loaded.session_of(&other)?;

    let feed = if args.by_token {
        Feed::Tokens
    } else {
        Feed::Chunks
    };
    let mut progress = Parts::new();
    let tokens: usize = excerpts.iter().map(|e| e.tokens.len()).sum();
    progress.step("divergence", 2 * tokens as u64);
    let comparisons = compare(
        &mut base,
        &mut [&mut other],
        &excerpts,
        feed,
        &mut |tokens| {
            progress.advance(tokens as u64);
            if progress.interrupted() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        },
    )?;
    progress.clear();
    if progress.interrupted() {
        return Err(Interrupted.into());
    }
    let compared = comparisons.first().and_then(|c| c.summary());
    let Some(compared) = compared else {
        return Err(
            Advised::new("there are no tokens to compare over", "give a longer text").into(),
        );
    };
    let side = |session: &Session<'_>, perplexity, memory| Side {
        cache_type_k: session.options().type_k.to_string(),
        cache_type_v: session.options().type_v.to_string(),
        perplexity,
        cells: session.spread(),
        memory,
    };
    let report = Report {
        kl_nats: compared.kl_nats,
        top1: compared.top1,
        base: side(&base, compared.perplexity_base, base_memory),
        other: side(&other, compared.perplexity_other, other_memory),
    };
    if common.json {
        print_json(&report)
    } else {
        print(&text(&report))
    }
}

/// What to compare over.
fn texts(args: &KldArgs, opened: &Opened) -> Result<Vec<Excerpt>> {
    if let Some(file) = &args.tokens {
        let lines = read_token_lines(file, opened.config.n_vocab)?;
        return Ok(lines.into_iter().map(Excerpt::whole).collect());
    }
    let file = args.file.as_deref().context("--file")?;
    let text = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(excerpts(&opened.tokenizer, &text, args.chunk)?)
}

fn text(report: &Report) -> String {
    let Agreement {
        positions,
        agreed,
        share,
    } = report.top1;
    let mut text = kl_table(&report.kl_nats);
    text += &format!(
        "first choice agrees {agreed} of {positions} times ({:.2} %)\n",
        share * 100.0
    );
    let side = |side: &Side| {
        side.perplexity
            .map(|p| format!("{p:.4} ({}/{})", side.cache_type_k, side.cache_type_v))
    };
    if let (Some(base), Some(other)) = (side(&report.base), side(&report.other)) {
        text += &format!("perplexity {base}, against {other}\n");
    }
    text
}
