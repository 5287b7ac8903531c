//! `replay`: decisions over what was recorded, or made up: the gate over prompts whose layers' times are known, caches over known routing.

mod routing;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use place::limits;
use place::replay::{self, Compared, Depth, Outcome, Published, Settings, Source, Trace};
use place::windows::{Recording, Summary};
use serde::Serialize;

use crate::cli::Common;
use crate::failure::Advised;
use crate::output::{print, print_json, table};

/// Replays the gate over prompts: what sharing with the CPU would save, and what deciding it costs
///
/// A prompt is a list of layers whose experts are in host memory, with what each takes alone and with a share of the work on the CPU. It is run
/// with the share in every layer, with a gate that knows nothing (FIRST), and with gates that begin with what others found (LATER); all times are
/// over those without the share. Readings get noise. Without a RECORDING, prompts are generated in the image of published machines, whose
/// figures are shown beside. Recordings of routing ('--record-routing') are served from caches of several sizes, which throw out what has least value,
/// or what was used longest ago. The last table compares
/// the gate's constants with others over the generated cases, the worst of them: layers are like their neighbours, or (ROUGH) are not.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate replay
  spillgate replay windows.jsonl --effect 1
  spillgate replay alone.jsonl shared.jsonl --noise 2 --json
  spillgate replay routing.jsonl")]
pub struct ReplayArgs {
    /// Files of windows, of runs without the share and with some of it, taken together; or of routing
    #[arg(value_name = "RECORDING")]
    recordings: Vec<PathBuf>,
    /// Times that each prompt is replayed
    #[arg(short, long, value_name = "N", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    repetitions: u32,
    /// Standard deviation of a reading, in percent of it
    #[arg(long, value_name = "PERCENT", default_value_t = 4.0, value_parser = percent)]
    noise: f64,
    /// How much of the share's effect there is
    #[arg(long, value_name = "X,...", value_delimiter = ',', default_value = "1,0.3", value_parser = part)]
    effect: Vec<f64>,
    /// The share that is planned, where it was recorded [default: the middle one recorded]
    #[arg(long, value_name = "X", requires = "recordings", value_parser = part)]
    planned_share: Option<f64>,
    /// The least change of the share that is tried
    #[arg(long, value_name = "X", default_value_t = 0.1, value_parser = part)]
    share_step: f64,
    /// The same seed gives the same replay
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

fn percent(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(x) if (0.0..=100.0).contains(&x) => Ok(x),
        _ => Err("expected 0 to 100".to_owned()),
    }
}

fn part(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(x) if x > 0.0 && x <= 1.0 => Ok(x),
        _ => Err("expected more than 0, up to 1".to_owned()),
    }
}

#[derive(Serialize)]
struct Report {
    settings: Settings,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    recorded: Vec<Summary>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cases: Vec<Case>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    constants: Vec<Compared>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    caches: Vec<routing::Hits>,
}

/// What was recorded, all of a kind together.
#[derive(Default)]
struct Recorded {
    windows: Option<Recording>,
    caches: Vec<routing::Hits>,
}

/// A prompt, replayed.
#[derive(Serialize)]
struct Case {
    case: String,
    tokens: u32,
    scale: f64,
    #[serde(flatten)]
    outcome: Outcome,
    /// What is kept of the gain, by the first prompt and by later ones, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    kept: Option<[f64; 2]>,
    /// What is lost, where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost: Option<[f64; 2]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    published: Option<Published>,
}

pub fn run(args: &ReplayArgs, common: &Common) -> Result<()> {
    let settings = Settings {
        runs: args.repetitions,
        noise: args.noise / 100.0,
        step: args.share_step,
        seed: args.seed,
    };
    let found = read(&args.recordings)?;
    let is_of_gate = args.recordings.is_empty() || found.windows.is_some();
    let cases = match &found.windows {
        Some(recording) => replayed(args, recording, &settings)?,
        None if is_of_gate => generated(args, &settings),
        None => Vec::new(),
    };
    let constants = if is_of_gate {
        replay::compare(&settings)
    } else {
        Vec::new()
    };
    let report = Report {
        settings,
        recorded: found
            .windows
            .as_ref()
            .map_or_else(Vec::new, Recording::summaries),
        cases,
        constants,
        caches: found.caches,
    };
    if common.json {
        print_json(&report)
    } else {
        print(&text(&report))
    }
}

/// All files: those of windows as one recording.
fn read(paths: &[PathBuf]) -> Result<Recorded> {
    let mut all = Recorded::default();
    for path in paths {
        let of_file = || format!("cannot read {}", path.display());
        let text = bounded(path)?;
        // Each kind begins with its name.
        if text.trim_start().starts_with("{\"routing\"") {
            let (header, records) = place::routing::read(&text).with_context(of_file)?;
            let name = path.file_name().unwrap_or(path.as_os_str());
            let hits = routing::serve(&name.to_string_lossy(), &header, &records);
            all.caches.extend(hits);
            continue;
        }
        let recording = Recording::parse(&text).with_context(of_file)?;
        let windows = all.windows.get_or_insert_default();
        windows.headers.extend(recording.headers);
        windows.windows.extend(recording.windows);
    }
    Ok(all)
}

/// A file's text, if it can be a recording's.
fn bounded(path: &Path) -> Result<String> {
    let of_file = || format!("cannot read {}", path.display());
    let bytes = fs::metadata(path).with_context(of_file)?.len();
    if bytes > limits::WINDOWS_TEXT_BYTES_MAX as u64 {
        let what = format!("{} is too large for a recording", path.display());
        return Err(Advised::new(what, "record fewer prompts").into());
    }
    fs::read_to_string(path).with_context(of_file)
}

fn generated(args: &ReplayArgs, settings: &Settings) -> Vec<Case> {
    let machines = replay::PUBLISHED.iter().filter(|case| case.scale == 1.0);
    let scales = args.effect.iter();
    let cases = scales.flat_map(|&scale| machines.clone().map(move |machine| (scale, machine)));
    cases
        .map(|(scale, machine)| {
            let source = Source::Generated {
                effect: 1.0 + scale * (machine.every - 1.0),
                depth: Depth::Smooth,
            };
            let published = replay::PUBLISHED.iter().find(|case| {
                (case.machine, case.tokens, case.scale) == (machine.machine, machine.tokens, scale)
            });
            let case = Case::new(
                machine.machine.to_owned(),
                machine.tokens,
                scale,
                &source,
                settings,
            );
            Case {
                published: published.copied(),
                ..case
            }
        })
        .collect()
}

fn replayed(args: &ReplayArgs, recording: &Recording, settings: &Settings) -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for &scale in &args.effect {
        for (tokens, trace) in Trace::recorded(recording, args.planned_share, scale) {
            let what = "recorded".to_owned();
            let source = Source::Recorded(trace);
            cases.push(Case::new(what, tokens, scale, &source, settings));
        }
    }
    if cases.is_empty() {
        let what = "no layer was recorded both without a share and with one";
        let hint = "record the same prompt twice, with --cpu-share off and with --cpu-share 0.5";
        return Err(Advised::new(what, hint).into());
    }
    Ok(cases)
}

impl Case {
    fn new(case: String, tokens: u32, scale: f64, source: &Source, settings: &Settings) -> Self {
        let outcome = replay::replay(source, place::gate::Constants::CHOSEN, settings);
        let both = [outcome.first, outcome.later];
        let kept = both.map(|spread| outcome.kept(spread));
        let lost = both.map(|spread| outcome.lost(spread));
        Self {
            case,
            tokens,
            scale,
            outcome,
            kept: kept[0].zip(kept[1]).map(Into::into),
            lost: lost[0].zip(lost[1]).map(Into::into),
            published: None,
        }
    }
}

fn text(report: &Report) -> String {
    let tables = [
        (report.recorded.len(), recorded_text(&report.recorded)),
        (report.cases.len(), cases_text(&report.cases)),
        (report.constants.len(), constants_text(&report.constants)),
        (report.caches.len(), routing::text(&report.caches)),
    ];
    let tables = tables.into_iter().filter(|(rows, _)| *rows > 0);
    tables.map(|(_, text)| text).collect::<Vec<_>>().join("\n")
}

fn recorded_text(recorded: &[Summary]) -> String {
    let head = [
        "TOKENS",
        "SHARE",
        "PROMPTS",
        "WINDOWS",
        "SUM, MS",
        "EXPERT, US",
        "HOST, US",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let rest = recorded.iter().map(|summary| {
        vec![
            summary.prompt.to_string(),
            format!("{:.2}", summary.share),
            summary.prompts.to_string(),
            summary.windows.to_string(),
            format!("{:.2}", summary.sum_ms),
            format!("{:.1}", summary.expert_us),
            summary
                .host_us
                .map_or_else(String::new, |us| format!("{us:.1}")),
        ]
    });
    rows.extend(rest);
    table(&rows, &[0, 1, 2, 3, 4, 5, 6])
}

fn cases_text(cases: &[Case]) -> String {
    let head = [
        "CASE",
        "TOKENS",
        "EFFECT",
        "EVERY LAYER",
        "BEST",
        "FIRST",
        "WORST",
        "LATER",
        "WORST",
        "KEPT",
        "LOST",
        "PUBLISHED",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let pair = |both: Option<[f64; 2]>| {
        both.map_or_else(String::new, |[first, later]| {
            format!("{:.1}, {:.1} %", 100.0 * first, 100.0 * later)
        })
    };
    let rest = cases.iter().map(|case| {
        let outcome = &case.outcome;
        let times = [
            outcome.every,
            outcome.best,
            outcome.first.mean,
            outcome.first.worst,
            outcome.later.mean,
            outcome.later.worst,
        ];
        let mut row = vec![
            case.case.clone(),
            case.tokens.to_string(),
            case.scale.to_string(),
        ];
        row.extend(times.map(|time| format!("{time:.3}")));
        row.push(pair(case.kept));
        row.push(pair(case.lost));
        row.push(case.published.map_or_else(String::new, |published| {
            let worst = published.worst.map(|w| format!(", worst {w:.3}"));
            format!(
                "{:.3} ({:.3}{})",
                published.every,
                published.gate,
                worst.unwrap_or_default()
            )
        }));
        row
    });
    rows.extend(rest);
    table(&rows, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
}

fn constants_text(constants: &[Compared]) -> String {
    let head = [
        "CONSTANTS",
        "KEPT, FIRST",
        "LATER",
        "LOST, FIRST",
        "LATER",
        "ROUGH: KEPT",
        "LOST",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let percent = |x: f64| format!("{:.1} %", 100.0 * x);
    rows.extend(constants.iter().map(|compared| {
        let (smooth, rough) = (compared.smooth, compared.rough);
        let mut row = vec![compared.name.to_owned()];
        row.extend(smooth.kept.map(percent));
        row.extend(smooth.lost.map(percent));
        row.extend([rough.kept[1], rough.lost[1]].map(percent));
        row
    }));
    table(&rows, &[1, 2, 3, 4, 5, 6])
}
