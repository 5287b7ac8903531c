//! `eval tiers`: what every form of the cache costs, predicted and measured.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use engine::eval::niah::{self, Format, Task};
use engine::eval::tiers::{self, Needles, Outcome, Row};
use engine::eval::{BOOK, excerpts};
use serde::Serialize;

use super::niah::{N_CTX_DEFAULT, task_parser, tasks};
use crate::cli::Common;
use crate::failure::{Advised, Interrupted};
use crate::flags::{ContextFlags, MachineFlags};
use crate::output::{print, print_json, table};
use crate::profiles;
use crate::progress::Parts;
use crate::settings::{self, Need};

/// Needles that are asked for unless others are named: from easy to hard, and none that a small model never finds.
const TASKS: [Task; 4] = [
    Task::Single2,
    Task::MultiKey1,
    Task::MultiValue,
    Task::MultiQuery,
];

/// Less context than this measures nothing.
const N_CTX_MIN: usize = 64;

/// Measures what each tier of the cache, and a spill, costs in speed and quality
///
/// Rows: f16 with everything in fast memory (whatever --device-mem and --window say: what the others are measured against), f16 spilled as
/// these flags have it, q8_0, what a plan chooses under the same flags, and the other tiers. Columns: tokens a second near the end of the
/// context, measured in turns of 8 tokens, 9 times each, after a text was read (medians); the share of them that is lost against f16,
/// as planned from the measured machine and as seen; KL divergence and agreement of the first choice over the second half of that text;
/// the mean score of needles, as 'eval niah' asks for them. All sessions are in memory at the same time. Ctrl-C ends it and prints what is
/// done.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate eval tiers qwen2.5-0.5b --ctx 4096 --window 1024
  spillgate eval tiers qwen2.5-0.5b --ctx 4096 --device-mem 600 --kv-share 0 --samples 3
  spillgate eval tiers smollm2 --ctx 1024 --window 256 --samples 0 --json")]
pub struct TiersArgs {
    /// Path of a GGUF file, a known name, or hf:OWNER/REPO/FILE.gguf
    model: String,
    /// The text that is read and compared over [default: a novel that is part of the program]
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Pieces of that text, of --ctx tokens each
    #[arg(long, value_name = "N", default_value_t = 1)]
    excerpts: usize,
    /// A task of 'eval niah'; may be repeated [default: niah_single_2, niah_multikey_1, niah_multivalue, niah_multiquery]
    #[arg(long, value_name = "NAME", value_parser = task_parser())]
    task: Vec<Task>,
    /// Prompts a task; 0 leaves needles out
    #[arg(long, value_name = "N", default_value_t = 1)]
    samples: usize,
    /// Seed of what is hidden and where
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Ask for needles without chat template
    #[arg(long)]
    raw: bool,
    #[command(flatten)]
    context: ContextFlags,
    #[command(flatten)]
    machine: MachineFlags,
}

/// What is printed as JSON.
#[derive(Serialize)]
struct Report {
    model: String,
    profile: String,
    n_ctx: usize,
    /// Cells in use where tokens a second are measured.
    depth: usize,
    tokens_a_round: usize,
    excerpts: usize,
    tasks: Vec<Task>,
    samples: usize,
    seed: u64,
    rows: Vec<Line>,
    complete: bool,
}

/// A row of the table.
#[derive(Serialize)]
struct Line {
    setting: String,
    type_k: String,
    type_v: String,
    /// Why it is not measured.
    left_out: Option<String>,
    /// The row whose session it shares.
    same_as: Option<String>,
    /// Why the plan chose this.
    reason: String,
    kv_bytes: u64,
    /// The part of the cells in host memory that the CPU attends.
    cpu_share: f64,
    tok_s_predicted: Option<f64>,
    drop_predicted: Option<f64>,
    #[serde(flatten)]
    measured: Outcome,
}

pub fn run(args: &TiersArgs, common: &Common) -> Result<()> {
    if args.excerpts == 0 {
        return Err(Advised::new("--excerpts 0 compares nothing", "give at least 1").into());
    }
    let text = match &args.file {
        None => BOOK.as_bytes().to_vec(),
        Some(file) => {
            std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?
        }
    };
    let opened = settings::open(&args.model, &args.machine)?;
    let usual = opened.config.n_ctx_train.min(N_CTX_DEFAULT);
    let n_ctx = args.context.ctx.unwrap_or(usual);
    if n_ctx < N_CTX_MIN {
        let what = format!("--ctx {n_ctx} is too small: nothing is measured below {N_CTX_MIN}");
        return Err(Advised::new(what, "4096 is usual").into());
    }
    let mut texts = excerpts(&opened.tokenizer, &text, n_ctx)?;
    texts.truncate(args.excerpts);
    let last = texts.last().map_or(0, |e| e.tokens.len());
    let depth = tiers::depth(last);
    if depth < N_CTX_MIN / 2 {
        let what = format!("the text has {last} tokens, which is too short");
        return Err(Advised::new(what, "leave --file out for a novel").into());
    }

    let context = ContextFlags {
        ctx: Some(n_ctx),
        ..args.context.clone()
    };
    let asked = settings::asked(&context, Need::Chosen)?;
    let mut machine = opened.measured(usize::try_from(asked.request.n_ubatch)?, asked.device)?;
    profiles::apply_variables(&mut machine)?;
    let rows = tiers::rows(opened.file(), &asked, &machine, depth as u64)?;
    for row in &rows {
        tracing::info!("{}: {}", row.setting, row.planned.plan.record());
    }
    let Some(first) = rows.iter().find(|row| row.left_out.is_none()) else {
        let why = rows.first().and_then(|row| row.left_out.clone());
        let what = format!("no row has room: {}", why.unwrap_or_default());
        return Err(Advised::new(what, "a smaller --ctx helps").into());
    };
    let loaded = opened.load_planned(first.planned.clone())?;
    let format = if args.raw {
        Format::raw(&loaded.tokenizer)
    } else {
        Format::of_file(loaded.file.metadata(), &loaded.tokenizer)?
    };
    let tasks = tasks(&args.task, &TASKS);
    let needles = Needles {
        format: &format,
        tokenizer: &loaded.tokenizer,
        asked: niah::Asked {
            tasks: &tasks,
            samples: args.samples,
            seed: args.seed,
        },
    };
    let task = tiers::Task {
        rows: &rows,
        excerpts: &texts,
        needles: (args.samples > 0).then_some(needles),
        depth,
    };
    let mut progress = Parts::new();
    let measured = tiers::run(&loaded.model, &task, &mut progress)?;
    progress.clear();
    let report = Report {
        model: loaded.path.display().to_string(),
        profile: machine.name.clone(),
        n_ctx,
        depth,
        tokens_a_round: tiers::TOKENS_A_ROUND,
        excerpts: texts.len(),
        samples: args.samples,
        seed: args.seed,
        rows: lines(&rows, measured.rows),
        complete: measured.complete,
        tasks,
    };
    if common.json {
        print_json(&report)?;
    } else {
        print(&page(&report))?;
    }
    if report.complete {
        Ok(())
    } else {
        Err(Interrupted.into())
    }
}

fn lines(rows: &[Row], measured: Vec<Outcome>) -> Vec<Line> {
    let base_ms = rows.first().and_then(|row| row.token).map(|t| t.t_ms);
    let line = |(row, measured): (&Row, Outcome)| {
        let plan = &row.planned.plan;
        Line {
            setting: row.setting.to_string(),
            type_k: plan.type_k.to_string(),
            type_v: plan.type_v.to_string(),
            left_out: row.left_out.clone(),
            same_as: row.same_as.map(|at| rows[at].setting.to_string()),
            reason: plan.reason.clone(),
            kv_bytes: plan.kv_alloc_bytes,
            cpu_share: row.planned.options.placing.kv_share,
            tok_s_predicted: row.token.map(|t| t.tok_s()),
            // In tokens a second, and below 0 for what is faster.
            drop_predicted: base_ms.zip(row.token).map(|(base, t)| 1.0 - base / t.t_ms),
            measured,
        }
    };
    rows.iter().zip(measured).map(line).collect()
}

fn page(report: &Report) -> String {
    let mut text = format!(
        "{}, context {}, tokens a second at depth {} in turns of {}, {} needles, profile {}\n\n",
        report.model,
        report.n_ctx,
        report.depth,
        report.tokens_a_round,
        report.tasks.len() * report.samples,
        report.profile,
    );
    let head = [
        "SETTING",
        "K/V",
        "KV MIB",
        "SPILLED MIB",
        "NEEDLES %",
        "TOK/S",
        "PREDICTED",
        "DROP %",
        "PREDICTED",
        "KL MEAN",
        "TOP-1 %",
        "PERPLEXITY",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let said = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let fixed = |value: Option<f64>, digits: usize| said(value.map(|x| format!("{x:.digits$}")));
    let percent = |value: Option<f64>| fixed(value.map(|x| 100.0 * x), 1);
    let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    for line in &report.rows {
        let m = &line.measured;
        let speed = m.speed.as_ref();
        rows.push(vec![
            line.setting.clone(),
            format!("{}/{}", line.type_k, line.type_v),
            format!("{:.1}", mib(line.kv_bytes)),
            fixed(m.spilled_bytes.map(mib), 1),
            fixed(m.needles_percent, 1),
            fixed(speed.map(|s| s.tok_s_p50), 2),
            fixed(line.tok_s_predicted, 2),
            percent(speed.and_then(|s| s.drop)),
            percent(line.drop_predicted),
            said(m.compared.map(|c| format!("{:.2e}", c.kl_nats.mean))),
            fixed(m.compared.map(|c| 100.0 * c.top1.share), 2),
            fixed(m.perplexity, 4),
        ]);
    }
    text += &table(&rows, &[2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
    let mut notes = String::new();
    for line in &report.rows {
        if let Some(why) = &line.left_out {
            notes += &format!("{} is left out: {why}\n", line.setting);
        }
        if let Some(other) = &line.same_as {
            notes += &format!("{} is the same as {other}: {}\n", line.setting, line.reason);
        } else if line.setting == "auto" {
            notes += &format!("auto: {}\n", line.reason);
        }
    }
    if !notes.is_empty() {
        text = format!("{text}\n{notes}");
    }
    text
}
