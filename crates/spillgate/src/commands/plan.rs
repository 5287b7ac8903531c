//! `plan`: what would happen, before anything is loaded.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use engine::plan::describe::describe;
use engine::plan::{machine, session};
use engine::probe::{Settings, Subject};
use engine::tokenizer::Tokenizer;
use gguf::GgufFile;
use place::bytes::{Cache, KvType, Streams, kv_alloc_bytes};
use place::cost::SpillModel;
use place::decide::{self, Plan, Request, decide};
use place::model::Model;
use place::profile::{Profile, Source};
use place::tier::Tier;
use serde::Serialize;

use super::info;
use crate::cli::Common;
use crate::failure::Advised;
use crate::flags::MachineFlags;
use crate::output::{human_bytes, print, print_json, write_file};
use crate::profiles::{self, LIST, Listing};
use crate::progress::Steps;
use crate::settings;

/// Says what would go where, how fast it would be, and why
///
/// Only the header is read: files of any size, split ones, ones that end where the weights would begin, and architectures
/// that do not run yet. The machine is this one, as 'spillgate probe' measured it for this model; before it was measured, a
/// default profile with this machine's memory, which the output says. --profile plans for another machine, --set NAME=VALUE
/// and SPILLGATE_NAME variables replace single figures. A plan is printed also where nothing fits, with what would; the exit
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
    budget: Budget,
    /// Plan for this machine: a JSON file, or an example's name; 'list' shows them [default: this one]
    #[arg(long, value_name = "FILE|NAME", help_heading = "Machine")]
    profile: Option<String>,
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
    /// Most prompt tokens computed at a time
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    ubatch: u64,
    /// Number format of the keys, kept as it is given [default: chosen]
    #[arg(long, value_name = "TYPE")]
    cache_type_k: Option<KvType>,
    /// Number format of the values; given, nothing is chosen (keys are f16 then, unless given) [default: chosen]
    #[arg(long, value_name = "TYPE")]
    cache_type_v: Option<KvType>,
}

/// What may be used, and what is wanted.
#[derive(Debug, Args)]
#[command(next_help_heading = "Budget")]
struct Budget {
    /// Without a device: main memory that plays a device's; with one: no more of it than this
    #[arg(long, value_name = "MIB")]
    device_mem: Option<u64>,
    /// What this process may use of the whole device; 0 is no cap
    #[arg(long, value_name = "MIB", default_value_t = 0)]
    vram_target: u64,
    /// KV in host memory: off, auto, or up to so many MiB
    #[arg(long, value_name = "off|auto|MIB", default_value = "auto", value_parser = spill)]
    spill: decide::Spill,
    /// The share of tokens a second, at full context, that a spill may cost
    #[arg(long, value_name = "X", default_value_t = 0.2, value_parser = share, allow_negative_numbers = true)]
    spill_drop: f64,
    /// Largest spill of 'auto' [default: 800 with the additive model, none with the overlapped one]
    #[arg(long, value_name = "MIB")]
    spill_max_mib: Option<u64>,
    /// How the cost of a spill is predicted
    #[arg(long, value_enum, value_name = "MODEL", default_value = "overlapped")]
    spill_model: SpillModelName,
    /// The least compressed tier within the target, or the fastest plan
    #[arg(long, value_enum, value_name = "WHAT", default_value = "quality")]
    prefer: PreferName,
    /// The lowest tier that '--prefer speed' takes
    #[arg(long, value_name = "K/V", default_value = "q8_0/q8_0", value_parser = tier)]
    min_tier: Tier,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum SpillModelName {
    Additive,
    Overlapped,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum PreferName {
    Quality,
    Speed,
}

fn spill(text: &str) -> Result<decide::Spill, String> {
    match text {
        "off" => Ok(decide::Spill::Off),
        "auto" => Ok(decide::Spill::Auto),
        mib => mib
            .parse()
            .map(decide::Spill::Mib)
            .map_err(|_| "expected off, auto, or a number of MiB".to_owned()),
    }
}

fn share(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|x| (0.0..=1.0).contains(x))
        .ok_or_else(|| "expected 0 to 1".to_owned())
}

fn tier(text: &str) -> Result<Tier, String> {
    let (k, v) = text.split_once('/').unwrap_or((text, text));
    let ty = |text: &str| text.parse::<KvType>().map_err(|e| e.to_string());
    Ok(Tier::new(ty(k)?, ty(v)?))
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
    settings::check_ubatch(args.asked.ubatch)?;
    if args.budget.device_mem == Some(0) {
        return Err(Advised::new(
            "--device-mem 0 leaves no room",
            "leave it out for all there is",
        )
        .into());
    }
    let profile = args.profile.as_deref().map(profiles::named).transpose()?;
    let file = super::open_header(name)?;
    let model = describe(&file)?;
    let mut profile = match profile {
        Some(profile) => profile,
        None => this_machine(args, &file)?,
    };
    profiles::apply_variables(&mut profile)?;
    profiles::apply_flags(&mut profile, &args.set)?;
    let request = request(args, &model);
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
        notes: notes(args, &plan, model.clone(), &profile)?,
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
    let settings = Settings {
        threads: load.threads,
        isa: load.isa,
        pinning: load.pinning,
        ubatch: usize::try_from(args.asked.ubatch).context("--ubatch")?,
        ..Settings::default()
    };
    let mut steps = Steps::new();
    Ok(machine::profile(
        &Subject::of_file(file),
        &settings,
        &mut steps,
    ))
}

fn request(args: &PlanArgs, model: &Model) -> Request {
    let (asked, budget) = (&args.asked, &args.budget);
    Request {
        n_ctx: asked.ctx.unwrap_or_else(|| session::usual_context(model)),
        n_seq: asked.seqs,
        streams: Streams::Shared,
        n_ubatch: asked.ubatch,
        type_k: asked.cache_type_k,
        type_v: asked.cache_type_v,
        device_mem_mib: budget.device_mem,
        vram_target_mib: budget.vram_target,
        spill: budget.spill,
        spill_drop: budget.spill_drop,
        spill_model: match budget.spill_model {
            SpillModelName::Additive => SpillModel::Additive,
            SpillModelName::Overlapped => SpillModel::Overlapped,
        },
        spill_max_mib: budget.spill_max_mib,
        prefer: match budget.prefer {
            PreferName::Quality => decide::Prefer::Quality,
            PreferName::Speed => decide::Prefer::Speed,
        },
        min_tier: budget.min_tier,
        threads: args
            .machine
            .threads
            .map(|n| u32::try_from(n).unwrap_or(u32::MAX)),
        ..Request::default()
    }
}

/// What a reader should know of the figures.
fn notes(args: &PlanArgs, plan: &Plan, mut model: Model, profile: &Profile) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    if profile.source == Source::Default && args.profile.is_none() {
        let name = args.model.as_deref().unwrap_or("MODEL");
        notes.push(format!(
            "this machine was not measured for this model: rates are the default profile's ('spillgate probe {name}' measures them)"
        ));
    }
    if session::keep_all_cells(&mut model) {
        let cache = Cache {
            n_seq: plan.n_seq,
            ..Cache::new(plan.n_ctx, plan.type_k, plan.type_v, plan.n_ubatch)
        };
        let all = kv_alloc_bytes(&model, &cache)?.total;
        if all > plan.kv_alloc_bytes {
            notes.push(format!(
                "'spillgate run' does not drop cells behind a window yet: its KV would take {} ({all} bytes)",
                human_bytes(all)
            ));
        }
    }
    Ok(notes)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spills_tiers_and_shares_are_read() {
        assert_eq!(spill("off"), Ok(decide::Spill::Off));
        assert_eq!(spill("auto"), Ok(decide::Spill::Auto));
        assert_eq!(spill("800"), Ok(decide::Spill::Mib(800)));
        for bad in ["", "on", "-1", "1.5", "NaN", "99999999999999999999"] {
            assert!(spill(bad).is_err(), "{bad}");
        }
        assert_eq!(share("0.2"), Ok(0.2));
        assert_eq!(share("1"), Ok(1.0));
        for bad in ["", "NaN", "-0.1", "1.1", "inf", "x"] {
            assert!(share(bad).is_err(), "{bad}");
        }
        let expected = Tier::new(KvType::Q8_0, KvType::Q4_0);
        assert_eq!(tier("q8_0/q4_0"), Ok(expected));
        assert_eq!(tier("f16"), Ok(Tier::new(KvType::F16, KvType::F16)));
        for bad in ["", "/", "q8_0/", "q8_0/q9", "a/b/c"] {
            assert!(tier(bad).is_err(), "{bad}");
        }
    }
}
