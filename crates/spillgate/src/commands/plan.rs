//! `plan`: what would happen, before anything is loaded.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use engine::model::Contents;
use engine::plan::describe::describe;
use engine::plan::{machine, session};
use engine::probe::{self, Settings, Subject};
use engine::session::{ComputeDevice, UBATCH_DEFAULT};
use engine::tokenizer::Tokenizer;
use gguf::GgufFile;
use place::bytes::{KvType, Streams};
use place::decide::{Plan, Request, decide};
use place::model::Model;
use place::profile::{Profile, Source};
use serde::Serialize;

use super::info;
use crate::cli::Common;
use crate::experts;
use crate::failure::Advised;
use crate::flags::{BudgetFlags, DEVICES, DeviceName, MachineFlags, device};
use crate::output::{print, print_json, write_file};
use crate::profiles::{self, LIST, Listing};
use crate::progress::Steps;
use crate::settings;

/// Says what would go where, how fast it would be, and why
///
/// Only the header is read: files of any size, split ones, ones that end where the weights would begin, and architectures
/// that do not run yet. The machine is this one, as 'spillgate probe' measured it for this model; before it was measured, a
/// default profile with this machine's memory, which the output says. The plan is of what runs there today: on a GPU all weights
/// and the work space are in its memory, cells beyond it streamed; on the CPU experts can be outside of --device-mem, too. --profile plans for another machine (with --device cpu without its GPU) and
/// as if weights could be left in host memory, too; --set NAME=VALUE and SPILLGATE_NAME variables replace single figures. A plan is printed also where nothing fits, with what would; the exit
/// status is 0 then too ('fits' in the JSON tells), and another one only if no plan could be made.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate plan smollm2
  spillgate plan model.gguf --ctx 65536 --profile 16gb-pcie4-ddr5 --plot plan.svg
  spillgate plan model.gguf --ctx 32768 --device-mem 8192 --spill off --json
  spillgate plan model.gguf --profile h200-pcie5 --vram-target 24000 --set link_gb_s=12
  spillgate plan --profile list")]
pub struct PlanArgs {
    /// Path of a GGUF file, a known name, or hf:OWNER/REPO/FILE.gguf
    model: Option<String>,
    #[command(flatten)]
    asked: Asked,
    #[command(flatten)]
    budget: BudgetFlags,
    /// Plan for this machine: a JSON file, or an example's name; 'list' shows them [default: this one]
    #[arg(long, value_name = "FILE|NAME", help_heading = "Machine")]
    profile: Option<String>,
    /// What computes: cuda, an NVIDIA GPU (cuda:N for another than the first), cpu, or auto: a GPU if there is one
    #[arg(long, value_name = DEVICES, default_value = "auto", value_parser = device, help_heading = "Machine")]
    device: DeviceName,
    /// Replace a figure of the machine; may be repeated ('--profile list' shows the names)
    #[arg(
        long,
        value_name = "NAME=VALUE",
        help_heading = "Machine",
        allow_hyphen_values = true
    )]
    set: Vec<String>,
    /// Draw predicted tokens a second against spill, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    machine: MachineFlags,
}

/// What the cache holds.
#[derive(Debug, Args)]
#[command(next_help_heading = "Context")]
struct Asked {
    /// Tokens of context, of all sequences together [default: the smaller of trained length and 8192]
    #[arg(short, long, value_name = "TOKENS")]
    ctx: Option<u64>,
    /// Sequences that share the context
    #[arg(long, value_name = "N", default_value_t = 1)]
    seqs: u64,
    /// Most prompt tokens computed at a time [default: 512; on a GPU 2048 where that moves nothing out, and up to 4096 where cells or experts are copied from host memory for each 512]
    #[arg(long, value_name = "TOKENS")]
    ubatch: Option<u64>,
    /// Number format of the keys, kept as it is given [default: chosen]
    #[arg(long, value_name = "TYPE")]
    cache_type_k: Option<KvType>,
    /// Number format of the values; given, nothing is chosen (keys are f16 then, unless given) [default: chosen]
    #[arg(long, value_name = "TYPE")]
    cache_type_v: Option<KvType>,
}

impl Asked {
    fn ubatch(&self) -> u64 {
        self.ubatch.unwrap_or(UBATCH_DEFAULT as u64)
    }
}

#[derive(Serialize)]
struct Report<'a> {
    file: String,
    architecture: &'a str,
    runs: bool,
    unsupported: Vec<String>,
    notes: Vec<String>,
    #[serde(flatten)]
    plan: &'a Plan,
}

pub fn run(args: &PlanArgs, common: &Common) -> Result<()> {
    if args.profile.as_deref() == Some(LIST) {
        let listing = Listing::new();
        return if common.json {
            print_json(&listing)
        } else {
            print(&listing.text())
        };
    }
    let Some(name) = &args.model else {
        return Err(Advised::new(
            "there is no model to plan for",
            "give a path or a known name",
        )
        .into());
    };
    // What is wrong with the flags is said before anything is fetched.
    settings::check_ubatch(args.asked.ubatch())?;
    args.budget.check()?;
    let profile = args.profile.as_deref().map(profiles::named).transpose()?;
    let file = super::open_header(name)?;
    let model = describe(&file)?;
    let mut profile = match profile {
        Some(profile) => other_machine(args, profile)?,
        None => this_machine(args, &file)?,
    };
    profiles::apply_variables(&mut profile)?;
    profiles::apply_flags(&mut profile, &args.set)?;
    session::slow_down(&mut profile, &args.budget.transfers());
    let mut request = request(args, &model, &profile);
    request.expert_hits = experts::hits(&file, Contents::File);
    let plan = decide(&request, &model, &profile)?;
    if let Some(path) = &args.plot {
        write_file(path, &place::plot::svg(&plan))?;
    }
    let mut unsupported = info::unsupported(&file, &Tokenizer::from_gguf(file.metadata()));
    let stored = |ty: KvType| ty.to_string().parse::<engine::session::KvType>();
    for ty in [plan.type_k, plan.type_v] {
        let what = format!("cache type {ty}");
        if stored(ty).is_err() && !unsupported.contains(&what) {
            unsupported.push(what);
        }
    }
    let report = Report {
        file: file
            .parts()
            .next()
            .map_or(name.clone(), |(path, _)| path.display().to_string()),
        architecture: &model.arch,
        runs: unsupported.is_empty(),
        unsupported,
        notes: notes(args, &profile),
        plan: &plan,
    };
    if !common.json {
        return print(&text(&report));
    }
    // The text has it among its lines.
    if plan.beyond_training() {
        let trained = plan.n_ctx_train;
        tracing::warn!("the model was trained with {trained} tokens of context, not more");
    }
    print_json(&report)
}

/// What is known of this machine, for this model.
fn this_machine(args: &PlanArgs, file: &GgufFile) -> Result<Profile> {
    let load = settings::load_options(&args.machine)?;
    let device = settings::compute_device(args.device)?;
    let settings = Settings {
        gpu: settings::gpu(device),
        threads: load.threads,
        isa: load.isa,
        pinning: load.pinning,
        ubatch: usize::try_from(args.asked.ubatch()).context("--ubatch")?,
        ..Settings::default()
    };
    let mut steps = Steps::new();
    Ok(machine::profile(
        &Subject::of_file(file),
        &settings,
        &mut steps,
    ))
}

/// A machine that was described, without its device if that is not to compute.
fn other_machine(args: &PlanArgs, mut profile: Profile) -> Result<Profile> {
    match args.device {
        DeviceName::Auto => {}
        DeviceName::Cpu => profile.device = None,
        DeviceName::Cuda(_) if profile.device.is_some() => {}
        DeviceName::Cuda(_) => {
            let what = format!("--device cuda: profile {} has no device", profile.name);
            return Err(Advised::new(what, "leave --device out").into());
        }
    }
    Ok(profile)
}

fn request(args: &PlanArgs, model: &Model, profile: &Profile) -> Request {
    let asked = &args.asked;
    let request = args.budget.apply(Request {
        n_ctx: asked.ctx.unwrap_or_else(|| session::usual_context(model)),
        n_seq: asked.seqs,
        streams: Streams::Shared,
        n_ubatch: asked.ubatch(),
        n_ubatch_max: asked.ubatch.map_or(settings::UBATCH_GROWN_MAX, |_| 0),
        type_k: asked.cache_type_k,
        type_v: asked.cache_type_v,
        threads: args
            .machine
            .threads
            .map(|n| u32::try_from(n).unwrap_or(u32::MAX)),
        ..Request::default()
    });
    let asked = session::Asked {
        request,
        device: match profile.device {
            Some(_) => ComputeDevice::Cuda(0),
            None => ComputeDevice::Cpu,
        },
        expert_shares: args.budget.expert_shares(),
        ..session::Asked::default()
    };
    let as_it_runs = session::request(&asked);
    if args.profile.is_none() {
        return as_it_runs;
    }
    // Elsewhere as if weights could be left in host memory, too.
    Request {
        spill_weights: request.spill_weights,
        ..as_it_runs
    }
}

/// What a reader should know of the figures.
fn notes(args: &PlanArgs, profile: &Profile) -> Vec<String> {
    if profile.source != Source::Default || args.profile.is_some() {
        return probe::doubts(profile);
    }
    let name = args.model.as_deref().unwrap_or("MODEL");
    vec![format!(
        "this machine was not measured for this model: rates are the default profile's ('spillgate probe {name}' measures them)"
    )]
}

fn text(report: &Report<'_>) -> String {
    let mut lines = vec![format!(
        "file {}, architecture {}",
        report.file, report.architecture
    )];
    let why = report.unsupported.iter();
    lines.extend(why.map(|what| format!("does not run here: {what}")));
    lines.extend(report.plan.explain());
    lines.extend(report.notes.iter().map(|note| format!("note: {note}")));
    let mut text = String::new();
    for line in lines {
        // Names come from the file; what would move the cursor does not reach the terminal.
        text += &line.replace(char::is_control, "\u{FFFD}");
        text.push('\n');
    }
    text
}
