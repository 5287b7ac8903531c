//! `bench --place`, `bench --tails`: tokens a second with the same cells placed in several ways, beside what was predicted.
//!
//! Weights are made once, and cells once a depth: what changes between two rows is where they lie and who attends them. So all rows of a depth must
//! have the same logits, to the bit, which is looked at.

use std::time::Instant;

use anyhow::{Result, ensure};
use engine::eval::LogitsHash;
use engine::model::Model;
use engine::plan::session::{self, Asked, SessionPlan};
use engine::session::{BLOCK_CELLS, Gating, Placing, Session, Wanted};
use gguf::GgufFile;
use place::cost::SpillModel;
use place::decide::Request;
use place::profile::Profile;
use serde::Serialize;

use crate::failure::{Advised, Interrupted};
use crate::flags::OtherContext;
use crate::interrupt;
use crate::output::table;

/// Untimed tokens before a row: what is copied ahead is what it needs then.
const WARM_UP: usize = 3;

/// What is to be measured.
pub struct Task<'a> {
    pub file: &'a GgufFile,
    pub machine: &'a Profile,
    /// What all rows have in common; the context is the depth's.
    pub asked: Asked,
    pub ways: &'a [Way],
    pub depth: usize,
    pub tokens: usize,
    pub repetitions: usize,
    /// Random cells, or a prompt's.
    pub fill: Option<u64>,
}

/// One way to place cells.
#[derive(Debug, Clone)]
pub enum Way {
    /// So much KV in host memory, MiB.
    Tail(u64),
    /// By flags.
    Flags(Box<OtherContext>),
}

impl Way {
    /// What is asked of its plan.
    fn of(&self, asked: &Asked, kv_bytes: u64, n_ctx: u64) -> Asked {
        let request = match self {
            Self::Tail(mib) => {
                let cell = (kv_bytes / n_ctx.max(1)).max(1);
                let tail = (mib << 20) / cell / BLOCK_CELLS as u64 * BLOCK_CELLS as u64;
                let window = n_ctx.saturating_sub(tail).max(1);
                Request {
                    window_cells: (*mib > 0).then_some(window),
                    ..asked.request
                }
            }
            Self::Flags(flags) => {
                let budget = flags.flags().budget;
                Request {
                    window_cells: budget.window.or(asked.request.window_cells),
                    kv_share: budget.kv_share.0.or(asked.request.kv_share),
                    staging_slots: budget.staging.or(asked.request.staging_slots),
                    ..asked.request
                }
            }
        };
        Asked { request, ..*asked }
    }
}

/// A row of the table.
#[derive(Debug, Serialize)]
pub struct Row {
    pub cache_type_k: String,
    pub cache_type_v: String,
    pub depth: usize,
    /// All KV.
    pub kv_bytes: u64,
    /// KV in host memory.
    pub tail_bytes: u64,
    pub window_cells: u64,
    /// The part of it that the CPU attends.
    pub cpu_share: f64,
    pub staging_slots: usize,
    pub tok_s: Vec<f64>,
    pub median_tok_s: f64,
    /// Of the tokens a second, against the depth's first row.
    pub drop: f64,
    /// The tail over what a token takes longer than with the depth's first row.
    pub tail_gb_s: Option<f64>,
    /// SHA-256 of the last token's logits.
    pub logits: String,
    pub overlapped: Predicted,
    pub additive: Predicted,
}

/// What a model says of a row.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Predicted {
    pub ms: f64,
    /// Against the depth's first row.
    pub drop: f64,
}

/// Measures all ways at one depth.
pub fn measure(model: &Model, task: &Task<'_>) -> Result<Vec<Row>> {
    let n_ctx = (task.depth + task.tokens.max(WARM_UP)).next_multiple_of(BLOCK_CELLS);
    let asked = Asked {
        n_ctx: Some(n_ctx as u64),
        ..task.asked
    };
    let plan = |asked: &Asked| session::plan(task.file, asked, task.machine);
    let kv_bytes = plan(&asked)?.plan.kv_bytes;
    let mut plans = Vec::with_capacity(task.ways.len());
    for way in task.ways {
        let asked = way.of(&asked, kv_bytes, n_ctx as u64);
        let planned = plan(&asked)?;
        if let Some(refusal) = planned.plan.refusal() {
            return Err(Advised::new(refusal, "leave this row out").into());
        }
        plans.push((asked, planned));
    }
    let mut session = session_for(model, n_ctx, &plans)?;
    fill(&mut session, model, task)?;
    let mut rows: Vec<Row> = Vec::with_capacity(plans.len());
    for (asked, planned) in &plans {
        let placing = placed(planned, n_ctx);
        session.truncate(task.depth);
        session.place(&placing)?;
        let tok_s = decode(&mut session, model, task)?;
        let mut logits = LogitsHash::default();
        logits.update(session.logits());
        let logits = logits.hex();
        let predicted = |model: SpillModel, first: Option<Predicted>| {
            let asked = Asked {
                request: Request {
                    spill_model: model,
                    ..asked.request
                },
                ..*asked
            };
            let planned = plan(&asked)?;
            let depth = task.depth as u64;
            let token = session::token_at(task.file, &asked, task.machine, &planned, depth)?;
            let ms = token.map_or(f64::NAN, |token| token.t_ms);
            let drop = 1.0 - first.map_or(ms, |first| first.ms) / ms;
            Ok::<_, anyhow::Error>(Predicted { ms, drop })
        };
        let first = rows.first();
        let overlapped = predicted(SpillModel::Overlapped, first.map(|r| r.overlapped))?;
        let additive = predicted(SpillModel::Additive, first.map(|r| r.additive))?;
        let median_tok_s = median(&tok_s);
        let base = first.map_or(median_tok_s, |r| r.median_tok_s);
        let tail_bytes = session.spread().host_bytes;
        let more_s = 1.0 / median_tok_s - 1.0 / base;
        let same = first.is_none_or(|r| r.logits == logits);
        ensure!(
            same,
            "with {} MiB in host memory, of which the CPU attends {:.2}, logits are not those of the first row",
            tail_bytes >> 20,
            placing.kv_share
        );
        rows.push(Row {
            cache_type_k: session.options().type_k.to_string(),
            cache_type_v: session.options().type_v.to_string(),
            depth: task.depth,
            kv_bytes: planned.plan.kv_bytes,
            tail_bytes,
            window_cells: planned.plan.layout.window_cells,
            cpu_share: placing.kv_share,
            staging_slots: placing.staging_slots,
            tok_s,
            median_tok_s,
            drop: 1.0 - median_tok_s / base,
            tail_gb_s: (tail_bytes > 0 && more_s > 0.0).then(|| tail_bytes as f64 / more_s / 1e9),
            logits,
            overlapped,
            additive,
        });
    }
    Ok(rows)
}

/// Where a plan has the cells, as a session has it that may spill.
fn placed(planned: &SessionPlan, n_ctx: usize) -> Placing {
    let placing = planned.options.placing;
    Placing {
        window_blocks: placing.window_blocks.or(Some(n_ctx / BLOCK_CELLS)),
        gating: Gating::Off,
        ..placing
    }
}

/// A session that can be placed in all ways.
fn session_for<'m>(
    model: &'m Model,
    n_ctx: usize,
    plans: &[(Asked, SessionPlan)],
) -> Result<Session<'m>> {
    let placings = plans.iter().map(|(_, planned)| planned.options.placing);
    let spills = placings.clone().any(|p| p.spills(n_ctx));
    let share = placings.clone().map(|p| p.kv_share).fold(0.0, f64::max);
    let (_, first) = &plans[0];
    let mut options = first.options.clone();
    if spills {
        options.placing = Placing {
            window_blocks: Some(n_ctx / BLOCK_CELLS - 1),
            tail_blocks: placings.clone().map(|p| p.tail_blocks).max().unwrap_or(0) + 1,
            staging_slots: placings.map(|p| p.staging_slots).max().unwrap_or(0),
            kv_share: share,
            gating: Gating::Off,
        };
    }
    Ok(Session::new(model, &options)?)
}

fn ids(model: &Model, n: usize) -> Vec<u32> {
    // Any ids will do for a dense model; these touch rows all over the embedding.
    let n_vocab = model.config().n_vocab;
    (0..n).map(|i| ((i * 7919 + 13) % n_vocab) as u32).collect()
}

fn fill(session: &mut Session<'_>, model: &Model, task: &Task<'_>) -> Result<()> {
    match task.fill {
        Some(seed) => session.fill(task.depth, seed)?,
        None => session.prefill(&ids(model, task.depth), Wanted::None)?,
    }
    Ok(())
}

fn decode(session: &mut Session<'_>, model: &Model, task: &Task<'_>) -> Result<Vec<f64>> {
    let ids = ids(model, task.tokens.max(WARM_UP));
    ids[..WARM_UP]
        .iter()
        .try_for_each(|&id| session.decode(id))?;
    let mut tok_s = Vec::with_capacity(task.repetitions);
    for _ in 0..task.repetitions {
        if interrupt::asked() {
            return Err(Interrupted.into());
        }
        session.truncate(task.depth);
        session.decode(ids[0])?;
        let begun = Instant::now();
        let timed = &ids[1..task.tokens.max(2)];
        timed.iter().try_for_each(|&id| session.decode(id))?;
        tok_s.push(timed.len() as f64 / begun.elapsed().as_secs_f64());
    }
    Ok(tok_s)
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
    f64::midpoint(low, high)
}

/// The rows for people.
pub fn text(rows: &[Row]) -> String {
    let head = [
        "DEPTH",
        "KV",
        "TAIL, MIB",
        "CPU",
        "SLOTS",
        "TOK/S",
        "MS",
        "DROP",
        "OVERLAPPED",
        "ADDITIVE",
        "TAIL, GB/S",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    let percent = |x: f64| format!("{:.1} %", x * 100.0);
    lines.extend(rows.iter().map(|r| {
        vec![
            r.depth.to_string(),
            format!("{}/{}", r.cache_type_k, r.cache_type_v),
            (r.tail_bytes >> 20).to_string(),
            format!("{:.2}", r.cpu_share),
            r.staging_slots.to_string(),
            format!("{:.2}", r.median_tok_s),
            format!("{:.2}", 1e3 / r.median_tok_s),
            percent(r.drop),
            percent(r.overlapped.drop),
            percent(r.additive.drop),
            r.tail_gb_s
                .map_or_else(|| "-".to_owned(), |x| format!("{x:.0}")),
        ]
    }));
    table(&lines, &[0, 2, 3, 4, 5, 6, 7, 8, 9, 10])
}
