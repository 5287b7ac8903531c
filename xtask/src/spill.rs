//! `spill`: what rows of `spillgate bench --tails ... --json` say of the models of a spill: a table, how often they are right, and a plot.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Deserialize;

/// Percentage points of drop that a prediction may be off.
const CLOSE: f64 = 0.05;

/// The share of tokens a second that a spill may cost: `--spill-drop`.
const TARGET: f64 = 0.20;

const PANEL: (f64, f64) = (330.0, 260.0);
const MARGIN: (f64, f64) = (58.0, 44.0);
/// Colours that stay apart for colour-blind readers, and in grey.
const COLOURS: [&str; 4] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];

#[derive(Debug, Args)]
pub struct SpillArgs {
    /// Rows, as `bench --tails ... --json` writes them; less compressed types first
    #[arg(required = true)]
    rows: Vec<PathBuf>,
    /// Draw drop against tail, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

#[derive(Debug, Clone, Deserialize)]
struct Row {
    cache_type_k: String,
    cache_type_v: String,
    depth: u64,
    kv_bytes: u64,
    tail_bytes: u64,
    cpu_share: f64,
    staging_slots: u64,
    median_tok_s: f64,
    drop: f64,
    overlapped: Predicted,
    additive: Predicted,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Predicted {
    ms: f64,
    drop: f64,
}

impl Row {
    fn tier(&self) -> String {
        if self.cache_type_k == self.cache_type_v {
            self.cache_type_k.clone()
        } else {
            format!("{}/{}", self.cache_type_k, self.cache_type_v)
        }
    }

    fn tail_mib(&self) -> f64 {
        self.tail_bytes as f64 / f64::from(1 << 20)
    }

    fn kv_mib(&self) -> f64 {
        self.kv_bytes as f64 / f64::from(1 << 20)
    }

    fn ms(&self) -> f64 {
        1e3 / self.median_tok_s
    }
}

pub fn run(args: &SpillArgs) -> Result<()> {
    let mut rows: Vec<Row> = Vec::new();
    for path in &args.rows {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let more: Vec<Row> =
            serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        rows.extend(more);
    }
    ensure!(!rows.is_empty(), "there are no rows");
    print!("{}", table(&rows));
    println!("\n{}", summary(&rows));
    if let Some(path) = &args.plot {
        fs::write(path, svg(&rows)).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

fn table(rows: &[Row]) -> String {
    let mut text = String::from(
        "| depth | KV | tail, MiB | CPU | slots | tok/s | drop | overlapped | additive |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    for r in rows {
        let _ = writeln!(
            text,
            "| {} | {} | {:.0} | {:.2} | {} | {:.1} | {:.1} % | {:.1} % | {:.1} % |",
            r.depth,
            r.tier(),
            r.tail_mib(),
            r.cpu_share,
            r.staging_slots,
            r.median_tok_s,
            r.drop * 100.0,
            r.overlapped.drop * 100.0,
            r.additive.drop * 100.0,
        );
    }
    text
}

/// How often predictions are close, and what choices by them would have cost.
fn summary(rows: &[Row]) -> String {
    let spilled: Vec<&Row> = rows.iter().filter(|r| r.tail_bytes > 0).collect();
    let close = |predicted: fn(&Row) -> f64| {
        let errors = spilled.iter().map(|r| (predicted(r) - r.drop).abs());
        let worst = errors.clone().fold(0.0, f64::max);
        (errors.filter(|e| *e <= CLOSE).count(), worst)
    };
    let mut text = String::new();
    for (name, (n, worst)) in [
        ("overlapped", close(|r| r.overlapped.drop)),
        ("additive", close(|r| r.additive.drop)),
    ] {
        let _ = writeln!(
            text,
            "{name}: within {:.0} points of drop in {n} of {} cells, at worst {:.1} off",
            CLOSE * 100.0,
            spilled.len(),
            worst * 100.0
        );
    }
    let choices = choices(rows);
    let lost = choices.iter().map(|c| c.speed_ms / c.best_ms - 1.0);
    let _ = writeln!(
        text,
        "speed: of {} budgets the plan that is predicted to be fastest is at most {:.1} % slower than the one that is",
        choices.len(),
        lost.fold(0.0, f64::max) * 100.0
    );
    let same = choices.iter().filter(|c| c.quality_agrees).count();
    let _ = writeln!(
        text,
        "quality: the same tier by predicted and by measured drops (at most {:.0} %) in {same} of {}",
        TARGET * 100.0,
        choices.len()
    );
    text
}

/// What would be chosen in the room that one row leaves.
struct Choice {
    /// Measured: of what is predicted to be fastest, and of what is.
    speed_ms: f64,
    best_ms: f64,
    quality_agrees: bool,
}

/// A tier in some room: what is predicted, and what was measured.
struct Offer {
    predicted_ms: f64,
    measured_ms: f64,
    /// Against the least compressed tier that is all resident.
    predicted_drop: f64,
    measured_drop: f64,
}

fn choices(rows: &[Row]) -> Vec<Choice> {
    let mut by_depth: BTreeMap<u64, Vec<&Row>> = BTreeMap::new();
    for row in rows {
        by_depth.entry(row.depth).or_default().push(row);
    }
    let mut choices = Vec::new();
    for rows in by_depth.values() {
        let first = rows[0].tier();
        let mut tiers: Vec<String> = Vec::new();
        for row in rows {
            if !tiers.contains(&row.tier()) {
                tiers.push(row.tier());
            }
        }
        let cells = |tier: &str| of_tier(rows, tier);
        let resident = |tier: &str| cells(tier).into_iter().find(|r| r.tail_bytes == 0);
        let Some(base) = resident(&first) else {
            continue;
        };
        for row in cells(&first).into_iter().filter(|r| r.tail_bytes > 0) {
            let room_mib = row.kv_mib() - row.tail_mib();
            let offers: Vec<Offer> = tiers
                .iter()
                .filter_map(|tier| {
                    let tail = (resident(tier)?.kv_mib() - room_mib).max(0.0);
                    let at = between(&cells(tier), tail)?;
                    Some(Offer {
                        predicted_ms: at.0,
                        measured_ms: at.1,
                        predicted_drop: 1.0 - base.overlapped.ms / at.0,
                        measured_drop: 1.0 - base.ms() / at.1,
                    })
                })
                .collect();
            let by = |f: fn(&Offer) -> f64| offers.iter().min_by(|a, b| f(a).total_cmp(&f(b)));
            let (Some(speed), Some(best)) = (by(|o| o.predicted_ms), by(|o| o.measured_ms)) else {
                continue;
            };
            let quality = |f: fn(&Offer) -> f64| offers.iter().position(|o| f(o) <= TARGET);
            choices.push(Choice {
                speed_ms: speed.measured_ms,
                best_ms: best.measured_ms,
                quality_agrees: quality(|o| o.predicted_drop) == quality(|o| o.measured_drop),
            });
        }
    }
    choices
}

fn of_tier<'r>(rows: &[&'r Row], tier: &str) -> Vec<&'r Row> {
    rows.iter().filter(|r| r.tier() == tier).copied().collect()
}

/// Predicted and measured milliseconds at a tail, between the rows beside it.
fn between(rows: &[&Row], tail_mib: f64) -> Option<(f64, f64)> {
    let mut sorted = rows.to_vec();
    sorted.sort_by_key(|r| r.tail_bytes);
    let pair = sorted
        .windows(2)
        .find(|w| w[0].tail_mib() <= tail_mib && tail_mib <= w[1].tail_mib())?;
    let (a, b) = (pair[0], pair[1]);
    let width = (b.tail_mib() - a.tail_mib()).max(1e-9);
    let part = (tail_mib - a.tail_mib()) / width;
    let mix = |x: f64, y: f64| x + (y - x) * part;
    Some((mix(a.overlapped.ms, b.overlapped.ms), mix(a.ms(), b.ms())))
}

/// A panel a depth; in each, a colour a tier: marks measured, lines predicted (additive dashed).
fn svg(rows: &[Row]) -> String {
    let mut depths: Vec<u64> = rows.iter().map(|r| r.depth).collect();
    depths.sort_unstable();
    depths.dedup();
    let mut tiers: Vec<String> = Vec::new();
    for row in rows {
        if !tiers.contains(&row.tier()) {
            tiers.push(row.tier());
        }
    }
    let most = rows.iter().map(Row::tail_mib).fold(1.0, f64::max);
    let (width, height) = (PANEL.0 + MARGIN.0, PANEL.1 + 2.0 * MARGIN.1);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{:.0}\" height=\"{:.0}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        width * depths.len() as f64 + 20.0,
        height + 24.0,
    );
    for (i, &depth) in depths.iter().enumerate() {
        let (left, top) = (width * i as f64 + MARGIN.0, MARGIN.1);
        let x = |mib: f64| left + mib / most * (PANEL.0 - 10.0);
        let y = |drop: f64| top + PANEL.1 * (1.0 - drop.clamp(0.0, 1.0));
        let _ = writeln!(
            out,
            "<text x=\"{left:.0}\" y=\"{:.0}\" font-weight=\"bold\">{depth} cells</text>",
            top - 12.0
        );
        for tick in 0..=5 {
            let at = f64::from(tick) / 5.0;
            let (right, line) = (left + PANEL.0 - 10.0, y(at));
            let _ = writeln!(
                out,
                "<line x1=\"{left:.0}\" x2=\"{right:.0}\" y1=\"{line:.1}\" y2=\"{line:.1}\" stroke=\"#ddd\"/><text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{:.0} %</text><text x=\"{:.1}\" y=\"{:.0}\" text-anchor=\"middle\">{:.1}</text>",
                left - 6.0,
                line + 4.0,
                at * 100.0,
                x(at * most),
                top + PANEL.1 + 16.0,
                at * most / 1024.0,
            );
        }
        for (tier, colour) in tiers.iter().zip(COLOURS.iter().cycle()) {
            let mut cells: Vec<&Row> = rows.iter().collect();
            cells.retain(|r| r.depth == depth && r.tier() == *tier);
            cells.sort_by_key(|r| r.tail_bytes);
            let line = |f: fn(&Row) -> f64| {
                let points = cells
                    .iter()
                    .map(|r| format!("{:.1},{:.1}", x(r.tail_mib()), y(f(r))));
                points.collect::<Vec<_>>().join(" ")
            };
            let _ = writeln!(
                out,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\"/><polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-dasharray=\"4 4\"/>",
                line(|r| r.overlapped.drop),
                line(|r| r.additive.drop),
            );
            for r in &cells {
                let _ = writeln!(
                    out,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\" fill=\"{colour}\"/>",
                    x(r.tail_mib()),
                    y(r.drop)
                );
            }
        }
    }
    let names = tiers.iter().zip(COLOURS.iter().cycle());
    let names = names.map(|(tier, colour)| format!("<tspan fill=\"{colour}\">{tier}</tspan>"));
    let _ = writeln!(
        out,
        "<text x=\"{:.0}\" y=\"{:.0}\">drop in tok/s against GiB of KV in host memory; marks measured, lines overlapped, dashes additive: {}</text>\n</svg>",
        MARGIN.0,
        height + 6.0,
        names.collect::<Vec<_>>().join(", ")
    );
    out
}
