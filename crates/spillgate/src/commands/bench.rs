//! `bench`: tokens a second at given sizes and depths, in the cases and under the names that llama-bench uses.

use std::time::Instant;

use anyhow::Result;
use clap::Args;
use clap::builder::RangedU64ValueParser;
use engine::model::Model;
use engine::plan::session::{self, DeviceTaken, Taken};
use engine::session::{Session, Verdict, Wanted};
use engine::synth::Recipe;
use serde::Serialize;

use crate::cli::Common;
use crate::commands::placings::{self, Way};
use crate::commands::servings;
use crate::failure::{Advised, Interrupted};
use crate::flags::{ContextFlags, MachineFlags, OtherContext, RecordFlags, other_context};
use crate::output::{human_bytes, print, print_json, table};
use crate::settings::{Loading, Need, Opened};
use crate::{experts, interrupt, profiles, settings};

/// Untimed decode steps before a case: caches are warm and threads awake then.
pub const WARM_UP_STEPS: usize = 4;

/// Times that a case is measured at most: their results are kept until the end.
const REPETITIONS_MAX: u64 = 100_000;

/// Measures tokens a second
///
/// ppN is a prompt of N tokens, tgN the generation of N tokens, '@ dD' with D tokens in the context before. Each case is
/// measured several times: median, least, most, and the spread between those as a share of the median. A machine that
/// does something else meanwhile measures that: look at the spread.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate bench smollm2
  spillgate bench smollm2 -p 512 -n 128 -d 0,4096 -r 5
  spillgate bench qwen2.5-0.5b -p 0 -n 64 -t 1 --isa avx2 --json
  spillgate bench --synth qwen2.5-14b --device cuda -p 0 -n 64 -d 0,65536 --fill-kv 1
  spillgate bench --synth qwen2.5-14b --device cuda -n 8 -d 65504 --fill-kv 1 --tails 0,512,1632,4096")]
pub struct BenchArgs {
    /// Path of a GGUF file, a known name, or hf:OWNER/REPO/FILE.gguf
    #[arg(required_unless_present = "synth")]
    model: Option<String>,
    /// Instead of a file, random weights in the shape of a known model (or of a GGUF file), made where they are needed; with :TYPE behind it
    /// quantised matrices have that type
    #[arg(long, value_name = "NAME[:TYPE]", conflicts_with = "model")]
    synth: Option<String>,
    /// What the random weights begin from
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "model")]
    seed: u64,
    /// How unevenly a mixture's experts are used, 0 being evenly: see 'xtask synth'
    #[arg(
        long,
        value_name = "S",
        default_value_t = 0.0,
        conflicts_with = "model"
    )]
    router_skew: f32,
    /// Fills the context before with random cells, made from this number, instead of a prompt's
    #[arg(long, value_name = "N")]
    fill_kv: Option<u64>,
    /// Prompt sizes, separated by commas; 0 leaves prompts out
    #[arg(
        short = 'p',
        long,
        value_name = "TOKENS",
        value_delimiter = ',',
        default_value = "512"
    )]
    prompt: Vec<usize>,
    /// Numbers of generated tokens, separated by commas; 0 leaves generation out
    #[arg(
        short = 'n',
        long,
        value_name = "TOKENS",
        value_delimiter = ',',
        default_value = "128"
    )]
    predict: Vec<usize>,
    /// Tokens in the context before, separated by commas
    #[arg(
        short,
        long,
        value_name = "TOKENS",
        value_delimiter = ',',
        default_value = "0"
    )]
    depth: Vec<usize>,
    /// Measures generation with so much KV in host memory, MiB, separated by commas, beside what was predicted: over the same cells, which
    /// are filled once a depth. The first one is what the others are compared with
    #[arg(long, value_name = "MIB", value_delimiter = ',')]
    tails: Vec<u64>,
    /// The same with cells placed by flags in one argument: --window, --kv-share, --staging; may be repeated
    #[arg(long, value_name = "FLAGS", value_parser = other_context, allow_hyphen_values = true)]
    place: Vec<OtherContext>,
    /// Measures each case with a mixture's experts served by flags in one argument: --expert-cache, --cpu-share, --cpu-share-decode,
    /// --emulate; may be repeated. Ways take turns, over one model in memory
    #[arg(long, value_name = "FLAGS", value_parser = servings::Way::read, allow_hyphen_values = true, conflicts_with_all = ["tails", "place", "fill_kv"])]
    pub serve: Vec<servings::Way>,
    /// Times that each case is measured
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = RangedU64ValueParser::<usize>::new().range(0..=REPETITIONS_MAX))]
    pub repetitions: usize,
    #[command(flatten)]
    pub context: ContextFlags,
    #[command(flatten)]
    records: RecordFlags,
    #[command(flatten)]
    machine: MachineFlags,
}

/// One case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    pub work: Work,
    pub depth: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    Prompt(usize),
    Generate(usize),
}

impl Case {
    pub fn name(self) -> String {
        let work = match self.work {
            Work::Prompt(n) => format!("pp{n}"),
            Work::Generate(n) => format!("tg{n}"),
        };
        if self.depth == 0 {
            work
        } else {
            format!("{work} @ d{}", self.depth)
        }
    }

    pub fn tokens(self) -> usize {
        match self.work {
            Work::Prompt(n) | Work::Generate(n) => n,
        }
    }

    /// Does it, with `work` of the ids that [`work_of`] it, behind those before.
    pub fn run(self, session: &mut Session<'_>, work: &[u32]) -> Result<(), engine::Error> {
        match self.work {
            Work::Prompt(n) => session.prefill(&work[..n], Wanted::Last),
            Work::Generate(n) => work[..n].iter().try_for_each(|&id| session.decode(id)),
        }
    }

    /// Cells that the case needs.
    fn cells(self) -> usize {
        self.depth.saturating_add(self.tokens().max(WARM_UP_STEPS))
    }
}

#[derive(Serialize)]
struct Report {
    model: String,
    weight_bytes: u64,
    isa: String,
    threads: usize,
    ubatch: usize,
    cache_type_k: String,
    cache_type_v: String,
    #[serde(flatten)]
    loading: Loading,
    cases: Vec<Measured>,
    memory: Taken,
    device_memory: Option<DeviceTaken>,
    /// Whether the CPU's share of spilled cells is worth having, where that was measured.
    gate: Option<Verdict>,
    /// How experts were served, where not all are where they are computed.
    experts: Option<experts::Report>,
}

#[derive(Debug, Serialize)]
pub struct Measured {
    pub case: String,
    tokens: usize,
    depth: usize,
    pub tok_s: Vec<f64>,
    pub median_tok_s: f64,
    pub min_tok_s: f64,
    pub max_tok_s: f64,
    spread: f64,
}

pub fn run(args: &BenchArgs, common: &Common) -> Result<()> {
    let cases = cases(args);
    if cases.is_empty() || args.repetitions == 0 {
        return Err(Advised::new(
            "there is nothing to measure",
            "-p, -n and -r must not all be 0",
        )
        .into());
    }
    let needed = cases.iter().map(|case| case.cells()).max().unwrap_or(0);
    let opened = match (&args.synth, &args.model) {
        (Some(shape), _) => {
            let recipe = Recipe {
                seed: args.seed,
                router_skew: args.router_skew,
            };
            settings::open_synthetic(shape, recipe, &args.machine)?
        }
        (None, Some(model)) => settings::open(model, &args.machine)?,
        (None, None) => unreachable!("one of both is required"),
    };
    if !args.tails.is_empty() || !args.place.is_empty() {
        return measure_placings(args, opened, common);
    }
    if !args.serve.is_empty() {
        let plans = servings::plan(args, &opened, needed)?;
        let loaded = opened.load_planned(plans[0].clone())?;
        eprintln!("{}", loaded.loading.line(&loaded.model));
        let rows = servings::measure(args, &loaded, &plans, &cases)?;
        return if common.json {
            print_json(&rows)
        } else {
            print(&servings::text(&rows))
        };
    }
    let loaded = opened.load(&args.context, Need::Cells(needed))?;
    let model = &loaded.model;
    eprintln!("{}", loaded.loading.line(model));
    let (mut session, memory) = loaded.session()?;
    experts::record(&mut session, &args.records)?;
    let mut measured = Vec::with_capacity(cases.len());
    for case in cases {
        measured.push(measure(&mut session, model, case, args)?);
    }
    loaded.remember(&session);
    let report = Report {
        model: loaded.path.display().to_string(),
        weight_bytes: model.weight_bytes(),
        isa: model.isa().to_string(),
        threads: model.threads(),
        ubatch: session.ubatch(),
        cache_type_k: session.options().type_k.to_string(),
        cache_type_v: session.options().type_v.to_string(),
        loading: loaded.loading,
        cases: measured,
        memory,
        device_memory: loaded.device_taken(&session)?,
        gate: session.gate_verdict(),
        experts: experts::Report::of(&session),
    };
    if common.json {
        print_json(&report)?;
    } else {
        print(&text(&report))?;
    }
    experts::recorded(session.finish_records())
}

/// The same cells placed in several ways.
fn measure_placings(args: &BenchArgs, opened: Opened, common: &Common) -> Result<()> {
    let tails = args.tails.iter().map(|&mib| Way::Tail(mib));
    let flags = args.place.iter().map(|f| Way::Flags(Box::new(f.clone())));
    let ways: Vec<Way> = tails.chain(flags).collect();
    let deepest = args.depth.iter().max().copied().unwrap_or(0);
    let tokens = args.predict.iter().max().copied().unwrap_or(0);
    let asked = settings::asked(&args.context, Need::Cells(deepest + tokens))?;
    let mut machine = opened.measured(usize::try_from(asked.request.n_ubatch)?, asked.device)?;
    profiles::apply_variables(&mut machine)?;
    let planned = session::plan(opened.file(), &asked, &machine)?;
    let loaded = opened.load_planned(planned)?;
    eprintln!("{}", loaded.loading.line(&loaded.model));
    let mut rows = Vec::new();
    for &depth in &args.depth {
        let task = placings::Task {
            file: &loaded.file,
            machine: &machine,
            asked,
            ways: &ways,
            depth,
            tokens,
            repetitions: args.repetitions,
            fill: args.fill_kv,
        };
        rows.extend(placings::measure(&loaded.model, &task)?);
    }
    if common.json {
        print_json(&rows)
    } else {
        print(&placings::text(&rows))
    }
}

fn cases(args: &BenchArgs) -> Vec<Case> {
    let mut cases = Vec::new();
    for &depth in &args.depth {
        let prompts = args.prompt.iter().map(|&n| Work::Prompt(n));
        let generations = args.predict.iter().map(|&n| Work::Generate(n));
        let works = prompts.chain(generations).map(|work| Case { work, depth });
        cases.extend(works.filter(|case| case.tokens() > 0));
    }
    cases
}

/// The ids of a case, and of the context before it.
pub fn work_of(model: &Model, case: Case) -> Vec<u32> {
    let n_vocab = model.config().n_vocab;
    // Any ids will do for a dense model; these touch rows all over the embedding.
    let id = |i: usize| ((i * 7919 + 13) % n_vocab) as u32;
    (0..case.cells()).map(id).collect()
}

fn measure(
    session: &mut Session<'_>,
    model: &Model,
    case: Case,
    args: &BenchArgs,
) -> Result<Measured> {
    let ids = work_of(model, case);
    let (before, work) = ids.split_at(case.depth);
    session.truncate(0);
    match args.fill_kv {
        Some(seed) => session.fill(before.len(), seed)?,
        None => session.prefill(before, Wanted::None)?,
    }
    for &id in &work[..WARM_UP_STEPS] {
        session.decode(id)?;
    }
    let mut tok_s = Vec::with_capacity(args.repetitions);
    for _ in 0..args.repetitions {
        if interrupt::asked() {
            return Err(Interrupted.into());
        }
        session.truncate(case.depth);
        let begun = Instant::now();
        case.run(session, work)?;
        tok_s.push(case.tokens() as f64 / begun.elapsed().as_secs_f64());
    }
    Ok(Measured::new(case, tok_s))
}

impl Measured {
    pub fn new(case: Case, tok_s: Vec<f64>) -> Self {
        let mut sorted = tok_s.clone();
        sorted.sort_unstable_by(f64::total_cmp);
        let (min, max) = (sorted[0], sorted[sorted.len() - 1]);
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 {
            sorted[middle]
        } else {
            (sorted[middle - 1] + sorted[middle]) / 2.0
        };
        Self {
            case: case.name(),
            tokens: case.tokens(),
            depth: case.depth,
            tok_s,
            median_tok_s: median,
            min_tok_s: min,
            max_tok_s: max,
            spread: (max - min) / median,
        }
    }
}

fn text(report: &Report) -> String {
    let mut text = format!(
        "{}, {} of weights, {}, {} threads, ubatch {}, cache {}/{}\n\n",
        report.model,
        human_bytes(report.weight_bytes),
        report.isa,
        report.threads,
        report.ubatch,
        report.cache_type_k,
        report.cache_type_v,
    );
    let mut rows = vec![
        ["CASE", "TOK/S (MEDIAN)", "MIN", "MAX", "SPREAD", "N"]
            .map(str::to_owned)
            .to_vec(),
    ];
    rows.extend(report.cases.iter().map(|m| {
        vec![
            m.case.clone(),
            format!("{:.2}", m.median_tok_s),
            format!("{:.2}", m.min_tok_s),
            format!("{:.2}", m.max_tok_s),
            format!("{:.1} %", m.spread * 100.0),
            m.tok_s.len().to_string(),
        ]
    }));
    text += &table(&rows, &[1, 2, 3, 4, 5]);
    text += &match report.gate {
        Some(Verdict {
            shares: true,
            amount,
        }) => format!("\nthe CPU's share of spilled cells is kept: {amount:.2}\n"),
        Some(_) => {
            "\nthe CPU's share of spilled cells is dropped: tokens were faster without\n".to_owned()
        }
        None => String::new(),
    };
    if let Some(experts) = &report.experts {
        text.push('\n');
        text += &experts.lines();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_have_the_names_that_others_use() {
        let case = |work, depth| Case { work, depth }.name();
        assert_eq!(case(Work::Prompt(512), 0), "pp512");
        assert_eq!(case(Work::Generate(128), 4096), "tg128 @ d4096");
    }

    #[test]
    fn the_median_is_the_middle() {
        let case = Case {
            work: Work::Prompt(1),
            depth: 0,
        };
        let odd = Measured::new(case, vec![3.0, 1.0, 2.0]);
        assert_eq!(
            (odd.median_tok_s, odd.min_tok_s, odd.max_tok_s, odd.spread),
            (2.0, 1.0, 3.0, 1.0)
        );
        assert_eq!(
            Measured::new(case, vec![4.0, 1.0, 2.0, 3.0]).median_tok_s,
            2.5
        );
        assert_eq!(Measured::new(case, vec![5.0]).spread, 0.0);
    }
}
