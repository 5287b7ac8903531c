//! What the shared flags mean: checked, and in the engine's own types.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use anyhow::Result;
use cpu::Isa;
use cpu::pool::Pinning;
use engine::gpu::Gpu;
use engine::model::{Config, Contents, ExpertHome, LoadOptions, Model};
use engine::plan::machine;
use engine::plan::session::{self, Asked, DeviceTaken, SessionPlan, Taken};
use engine::probe;
use engine::remembered::{self, Remembered};
use engine::sampler::SamplerParams;
use engine::session::{ComputeDevice, Gating, Session, SessionOptions, UBATCH_DEFAULT, UBATCH_MAX};
use engine::synth::{Recipe, Shape};
use engine::tokenizer::{EncodeOptions, Tokenizer};
use gguf::{GgufFile, MapMode};
use place::bytes::KvType;
use place::decide::{Plan, Request, TierPlan};
use place::profile::Profile;
use serde::Serialize;

use crate::experts::{self, Experts};
use crate::failure::Advised;
use crate::flags::{CacheType, ContextFlags, DeviceName, MachineFlags, OnOff, SamplingFlags};
use crate::output::human_bytes;
use crate::progress::{Bar, Steps};
use crate::{interrupt, profiles};

/// A model's file, opened and understood, its weights not yet read.
pub struct Opened {
    name: String,
    path: PathBuf,
    file: GgufFile,
    options: LoadOptions,
    pub tokenizer: Tokenizer,
    pub config: Config,
}

/// A model ready to be used, and what its file says beside the weights.
pub struct Loaded {
    pub path: PathBuf,
    pub model: Model,
    /// Shared with threads that outlive their maker.
    pub tokenizer: Arc<Tokenizer>,
    pub file: GgufFile,
    pub loading: Loading,
    plan: SessionPlan,
    experts: Experts,
}

/// How long the weights took to get where they are.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Loading {
    #[serde(rename = "load_s")]
    pub seconds: f64,
    #[serde(rename = "load_gb_s")]
    pub gb_s: f64,
}

impl Loading {
    /// The same for people.
    pub fn line(&self, model: &Model) -> String {
        let Self { seconds, gb_s } = self;
        let (bytes, device) = (human_bytes(model.weight_bytes()), model.device());
        format!("loading: {bytes} to {device} in {seconds:.2} s, {gb_s:.2} GB/s")
    }
}

/// Sequences that share a context unless told otherwise.
pub const SEQUENCES_DEFAULT: usize = 8;

/// Tokens of a context that each of them should have: a question with its answer.
const SHARE_TOKENS_MIN: u64 = 1024;

/// How much room a command needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// As much as the flags ask for, or the default; in fewer bits where it has no room otherwise.
    Chosen,
    /// The same, for so many sequences that share it; `None`: for [`SEQUENCES_DEFAULT`], or fewer where each had too little of a context that
    /// nobody asked for.
    Shared(Option<usize>),
    /// So many cells, in the types that the flags say: what is measured is what was asked for.
    Cells(usize),
}

/// Fetches a model where it is missing, and opens it.
pub fn open(name: &str, flags: &MachineFlags) -> Result<Opened> {
    interrupt::catch()?;
    let path = crate::commands::model_path(name)?;
    let options = load_options(flags)?;
    let file = GgufFile::open(&path, options.map)?;
    file.check_data()?;
    understand(name, path, file, options)
}

/// A model of random weights in the shape of a known one, or of a file.
pub fn open_synthetic(name: &str, recipe: Recipe, flags: &MachineFlags) -> Result<Opened> {
    interrupt::catch()?;
    let shape = Shape::find(name)?;
    let options = LoadOptions {
        contents: Contents::Synthetic(recipe),
        ..load_options(flags)?
    };
    understand(name, shape.name().into(), shape.file()?, options)
}

/// The tokenizer first: a file that cannot be used should be refused before its weights are read.
fn understand(name: &str, path: PathBuf, file: GgufFile, options: LoadOptions) -> Result<Opened> {
    let tokenizer = Tokenizer::from_gguf(file.metadata())?;
    for warning in tokenizer.warnings() {
        tracing::warn!("{warning}");
    }
    let config = Model::read_config(&file)?;
    check_vocabulary(&config, &tokenizer)?;
    Ok(Opened {
        name: name.to_owned(),
        path,
        file,
        options,
        tokenizer,
        config,
    })
}

impl Opened {
    /// Plans what is needed, and loads the weights if it has room.
    pub fn load(self, flags: &ContextFlags, need: Need) -> Result<Loaded> {
        let plan = self.plan(flags, need)?;
        self.load_planned(plan)
    }

    /// Loads the weights for something that was planned.
    pub fn load_planned(self, plan: SessionPlan) -> Result<Loaded> {
        let options = LoadOptions {
            device: plan.options.device,
            experts: match plan.options.experts {
                None => ExpertHome::Device,
                Some(_) => ExpertHome::Host,
            },
            embedding_in_host: plan.plan.layout.embedding_host_bytes > 0,
            pin_max_bytes: plan.options.transfers.pin_max_bytes,
            ..self.options
        };
        let (model, loading) = load_model(&self.path, &self.file, &options)?;
        let experts = Experts::new(&self.file, options.contents, model.threads());
        Ok(Loaded {
            experts,
            path: self.path,
            model,
            loading,
            tokenizer: Arc::new(self.tokenizer),
            file: self.file,
            plan,
        })
    }

    /// Plans what is needed. What has no room is an error.
    pub fn plan(&self, flags: &ContextFlags, need: Need) -> Result<SessionPlan> {
        let mut asked = asked(flags, need)?;
        asked.request.expert_hits = experts::hits(&self.file, self.options.contents);
        // A file that runs nowhere is refused when it is loaded.
        if flags.device == DeviceName::Auto
            && let Ok(Some(problem)) = Model::problem_on(&self.file, asked.device)
        {
            tracing::warn!("{problem}: the CPU computes, as with --device cpu");
            asked.device = ComputeDevice::Cpu;
        }
        let mut machine = self.machine(&asked)?;
        profiles::apply_variables(&mut machine)?;
        let mut planned = session::plan(&self.file, &asked, &machine)?;
        if need == Need::Shared(None) {
            // Every sequence takes room of its own.
            let has_little = |planned: &SessionPlan| {
                let plan = &planned.plan;
                let is_cut = planned.cut_from.is_some();
                plan.refusal().is_some() || is_cut && plan.n_ctx < SHARE_TOKENS_MIN * plan.n_seq
            };
            while asked.request.n_seq > 1 && has_little(&planned) {
                asked.request.n_seq /= 2;
                planned = session::plan(&self.file, &asked, &machine)?;
            }
        }
        let plan = &planned.plan;
        if let Some(refusal) = plan.refusal() {
            let elsewhere = match asked.device {
                ComputeDevice::Cpu => "",
                ComputeDevice::Cuda(_) => "; with --device cpu it is in main memory",
            };
            let hint = format!(
                "'spillgate plan {} --ctx {}' shows what would go where{elsewhere}",
                self.name, plan.n_ctx
            );
            return Err(Advised::new(refusal, hint).into());
        }
        if need == Need::Shared(None) && plan.n_seq < SEQUENCES_DEFAULT as u64 {
            tracing::warn!(
                "{} requests at a time instead of {SEQUENCES_DEFAULT}, so that each has some context: --parallel says otherwise",
                plan.n_seq
            );
        }
        if let Some(usual) = planned.cut_from {
            let n_ctx = plan.n_ctx;
            tracing::warn!("a context of {n_ctx} tokens instead of {usual}: more does not fit");
        }
        if plan.beyond_training() {
            let trained = plan.n_ctx_train;
            tracing::warn!("the model was trained with {trained} tokens of context, not more");
        }
        if plan.tiers.first().map(TierPlan::tier) == Some(plan.tier()) {
            tracing::info!("{}", plan.record());
        } else {
            tracing::warn!("{}", plan.record());
        }
        Ok(planned)
    }
}

impl Opened {
    /// This machine: measured, now if it was not before, where rates decide; else only its memory counts.
    fn machine(&self, asked: &Asked) -> Result<Profile> {
        let mut machine = machine::unmeasured(gpu(asked.device).as_ref());
        profiles::apply_variables(&mut machine)?;
        if !session::needs_rates(&self.file, asked, &machine)? {
            return Ok(machine);
        }
        self.measured(usize::try_from(asked.request.n_ubatch)?, asked.device)
    }

    /// This machine, measured now if it was not before.
    pub fn measured(&self, ubatch: usize, device: ComputeDevice) -> Result<Profile> {
        let settings = probe::Settings {
            threads: self.options.threads,
            isa: self.options.isa,
            pinning: self.options.pinning,
            ubatch,
            gpu: gpu(device),
            ..probe::Settings::default()
        };
        let subject = probe::Subject::of_file(&self.file);
        let mut steps = Steps::new();
        Ok(probe::profile(
            &subject,
            &settings,
            probe::Reuse::Cached,
            &mut steps,
        )?)
    }
}

/// GPUs that were opened, so that their contexts stay.
static OPENED: Mutex<Vec<Gpu>> = Mutex::new(Vec::new());

/// What computes. What `auto` found holds for the process, and a GPU that cannot be used is told of once.
pub fn compute_device(name: DeviceName) -> Result<ComputeDevice> {
    static AUTO: OnceLock<ComputeDevice> = OnceLock::new();
    let keep = |gpu: Gpu| {
        let device = ComputeDevice::Cuda(gpu.ordinal());
        OPENED
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(gpu);
        device
    };
    match name {
        DeviceName::Cpu => Ok(ComputeDevice::Cpu),
        DeviceName::Cuda(ordinal) => {
            let device = ComputeDevice::Cuda(ordinal);
            if gpu(device).is_some() {
                return Ok(device);
            }
            let opened = Gpu::open(ordinal).map_err(|error| {
                let hint = "--device cpu computes without a GPU";
                Advised::new(format!("--device cuda:{ordinal}: {error}"), hint)
            })?;
            Ok(keep(opened))
        }
        DeviceName::Auto => Ok(*AUTO.get_or_init(|| match Gpu::first() {
            Ok(Some(gpu)) => keep(gpu),
            Ok(None) => ComputeDevice::Cpu,
            Err(error) => {
                tracing::warn!(
                    "the GPU cannot be used, so the CPU computes, as with --device cpu: {error}"
                );
                ComputeDevice::Cpu
            }
        })),
    }
}

/// The GPU of a device that was opened.
pub fn gpu(device: ComputeDevice) -> Option<Gpu> {
    let ComputeDevice::Cuda(ordinal) = device else {
        return None;
    };
    let opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    opened.iter().find(|gpu| gpu.ordinal() == ordinal).cloned()
}

impl Opened {
    /// What the file says beside the weights.
    pub fn file(&self) -> &GgufFile {
        &self.file
    }

    /// Refuses several sessions at the same time that have no room beside the weights.
    pub fn check_room(&self, plans: &[&SessionPlan]) -> Result<()> {
        for device in plans.iter().map(|p| p.options.device) {
            let mut machine = machine::unmeasured(gpu(device).as_ref());
            profiles::apply_variables(&mut machine)?;
            let there = plans.iter().filter(|p| p.options.device == device);
            let plans: Vec<&SessionPlan> = there.copied().collect();
            let needed = session::together_bytes(&plans);
            let available = session::available_bytes(device, &machine);
            if needed > available {
                let what = format!(
                    "all sessions together need {}, {} available",
                    human_bytes(needed),
                    human_bytes(available)
                );
                let hint = "they are there at the same time: a smaller --ctx helps";
                return Err(Advised::new(what, hint).into());
            }
        }
        Ok(())
    }
}

/// What the flags ask a session to be.
pub fn asked(flags: &ContextFlags, need: Need) -> Result<Asked> {
    let ubatch = flags.ubatch.unwrap_or(UBATCH_DEFAULT) as u64;
    check_ubatch(ubatch)?;
    flags.budget.check()?;
    let (type_k, type_v) = (
        flags.cache_type_k.map(CacheType::kv_type),
        flags.cache_type_v.map(CacheType::kv_type),
    );
    let ctx = flags.ctx.map(|n| n as u64);
    let request = flags.budget.apply(Request {
        n_ubatch: ubatch,
        n_ubatch_max: flags.ubatch.map_or(UBATCH_GROWN_MAX, |_| 0),
        ..Request::default()
    });
    let rotate = flags.kv_rotate == OnOff::On;
    let device = compute_device(flags.device)?;
    let expert_shares = flags.budget.expert_shares();
    let worse = flags.budget.emulate.unwrap_or_default();
    experts::start_hogs(worse.hogs);
    let emulated = worse.experts;
    let transfers = flags.budget.transfers();
    Ok(match need {
        Need::Chosen | Need::Shared(_) => Asked {
            n_ctx: ctx,
            request: Request {
                type_k,
                type_v,
                n_seq: match need {
                    Need::Shared(n_seq) => n_seq.unwrap_or(SEQUENCES_DEFAULT) as u64,
                    _ => request.n_seq,
                },
                ..request
            },
            rotate,
            device,
            expert_shares,
            emulated,
            transfers,
        },
        Need::Cells(needed) => {
            let needed = needed as u64;
            if let Some(n_ctx) = ctx.filter(|&n| n < needed) {
                let what = format!("--ctx {n_ctx} is too small: {needed} tokens are needed");
                return Err(Advised::new(what, "leave --ctx out to have it chosen").into());
            }
            Asked {
                n_ctx: Some(ctx.unwrap_or(needed)),
                request: Request {
                    type_k: type_k.or(Some(KvType::F16)),
                    type_v: type_v.or(Some(KvType::F16)),
                    ..request
                },
                rotate,
                device,
                expert_shares,
                emulated,
                transfers,
            }
        }
    })
}

/// Threads at most. No machine has more cores, and a system that has no room for a thread's stack may end the process.
const THREADS_MAX: usize = 1024;

/// Tokens of a chunk that nobody asked for, at most.
pub const UBATCH_GROWN_MAX: u64 = 4096;

/// Refuses chunks that no session takes.
pub fn check_ubatch(tokens: u64) -> Result<()> {
    if (1..=UBATCH_MAX as u64).contains(&tokens) {
        return Ok(());
    }
    let what = format!("--ubatch {tokens}: expected 1 to {UBATCH_MAX}");
    Err(Advised::new(what, "leave it out for 512").into())
}

impl Loaded {
    /// An empty session as it was planned. Says on stderr what was planned and what was taken.
    pub fn session(&self) -> Result<(Session<'_>, Taken)> {
        self.session_of(&self.plan)
    }

    /// What lies where, and why.
    pub fn plan(&self) -> &Plan {
        &self.plan.plan
    }

    /// The same as another plan has it.
    pub fn session_of(&self, plan: &SessionPlan) -> Result<(Session<'_>, Taken)> {
        let mut options = plan.options.clone();
        if let Some((remembered, of)) = self.remembered(&options)
            && let Some(finding) = remembered.recall(&of)
        {
            options.placing.gating = Gating::Recalling(finding);
        }
        if let Some(placing) = &mut options.experts {
            self.experts.recall(options.device, placing);
        }
        let session = Session::new(&self.model, &options)?;
        let taken = Taken::of(&plan.plan, &session);
        eprintln!("{}", memory_line(&taken));
        Ok((session, taken))
    }
}

impl Loaded {
    /// Keeps what the session's gates have found, and which experts are used, for the next process.
    pub fn remember(&self, session: &Session<'_>) {
        self.experts.keep(session);
        if let Some(finding) = session.gate_finding()
            && let Some((remembered, of)) = self.remembered(session.options())
            && let Err(error) = remembered.keep(&of, finding)
        {
            tracing::warn!("what was found of the CPU's share could not be kept: {error}");
        }
    }

    /// Where verdicts of sessions that have a gate are, and under which name.
    fn remembered(&self, options: &SessionOptions) -> Option<(Remembered, String)> {
        if options.placing.gating == Gating::Off || options.placing.tail_blocks == 0 {
            return None;
        }
        let machine = machine::unmeasured(gpu(options.device).as_ref());
        let of = remembered::of_session(&machine.key, &self.model, options);
        Some((Remembered::open().ok()?, of))
    }

    /// Planned against taken in a device's memory, where a session of this plan alone is there; a line of it on stderr.
    pub fn device_taken(&self, session: &Session<'_>) -> Result<Option<DeviceTaken>> {
        let Some(gpu) = gpu(self.plan.options.device) else {
            return Ok(None);
        };
        let taken = DeviceTaken::of(&self.plan.plan, session, &gpu)?;
        eprintln!("{}", device_line(&taken));
        if taken.is_over() {
            tracing::warn!("the GPU holds more than was planned and kept free: please report it");
        }
        Ok(Some(taken))
    }
}

fn device_line(taken: &DeviceTaken) -> String {
    format!(
        "device memory: {} less is free, {} of it in buffers (planned {}, and {} in reserve)",
        human_bytes(taken.driver_bytes),
        human_bytes(taken.buffer_bytes),
        human_bytes(taken.planned_bytes),
        human_bytes(taken.reserve_bytes),
    )
}

/// Planned against real, in one line.
fn memory_line(taken: &Taken) -> String {
    let Taken { planned, real } = taken;
    let part = |what: &str, planned: u64, real: u64| {
        let (planned, real) = (human_bytes(planned), human_bytes(real));
        format!("{what} {real} (planned {planned})")
    };
    let staging = match (planned.staging_bytes, real.staging_bytes) {
        (0, 0) => String::new(),
        (planned, real) => format!(", {}", part("staging", planned, real)),
    };
    let experts = match (planned.expert_slot_bytes, real.expert_slot_bytes) {
        (0, 0) => String::new(),
        (planned, real) => format!(", {}", part("slots for experts", planned, real)),
    };
    format!(
        "memory: {}, {}, {}{staging}{experts}",
        part("weights", planned.weight_bytes, real.weight_bytes),
        part("KV", planned.kv_bytes, real.kv_bytes),
        part("work", planned.work_bytes, real.work_bytes),
    )
}

/// Every token of the tokenizer needs a row of the embedding. Rows beyond the last token are padding, and never chosen.
pub fn check_vocabulary(config: &Config, tokenizer: &Tokenizer) -> Result<()> {
    let (rows, tokens) = (config.n_vocab, tokenizer.n_vocab());
    if rows < tokens {
        let what = format!("the tokenizer has {tokens} tokens, the embedding rows for {rows}");
        return Err(Advised::new(what, "the file is damaged, or was put together wrongly").into());
    }
    Ok(())
}

/// Loads the weights, with a bar.
fn load_model(path: &Path, file: &GgufFile, options: &LoadOptions) -> Result<(Model, Loading)> {
    let begun = Instant::now();
    let mut bar = Bar::on_terminal("loading");
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let mut started = false;
    let model = Model::from_file(file, options, &mut |progress| {
        if !started {
            bar.start(&name, 0, progress.total_bytes);
            started = true;
        }
        bar.set(progress.done_bytes);
    })?;
    bar.clear();
    let seconds = begun.elapsed().as_secs_f64();
    let gb_s = model.weight_bytes() as f64 / 1e9 / seconds;
    let loading = Loading { seconds, gb_s };
    tracing::info!("{}", loading.line(&model));
    Ok((model, loading))
}

pub fn load_options(flags: &MachineFlags) -> Result<LoadOptions> {
    let some = [
        (
            "--threads",
            flags.threads,
            "leave it out to use every physical core",
        ),
        (
            "--pool-workers",
            flags.pool_workers,
            "--cpu-share off has the CPU compute no experts",
        ),
    ];
    for (flag, threads, hint) in some {
        if let Some(n) = threads.filter(|n| !(1..=THREADS_MAX).contains(n)) {
            let what = format!("{flag} {n}: expected 1 to {THREADS_MAX}");
            return Err(Advised::new(what, hint).into());
        }
    }
    Ok(LoadOptions {
        pool_workers: flags.pool_workers,
        threads: flags.threads,
        isa: match flags.isa.as_str() {
            "auto" => None,
            name => Some(name.parse::<Isa>()?),
        },
        pinning: match flags.pin_threads {
            OnOff::On => Pinning::Pinned,
            OnOff::Off => Pinning::Free,
        },
        map: match flags.mmap {
            OnOff::On => MapMode::Mmap,
            OnOff::Off => MapMode::Read,
        },
        ..LoadOptions::default()
    })
}

/// The sampling that the flags ask for. Ranges are checked by the sampler, which knows them.
pub fn sampler_params(flags: &SamplingFlags, tokenizer: &Tokenizer) -> Result<SamplerParams> {
    let end_of_line = ["\n".to_owned()];
    let breakers = if flags.dry_breaker.is_empty() {
        &end_of_line[..]
    } else {
        &flags.dry_breaker
    };
    let mut dry_breakers = Vec::new();
    for text in breakers {
        dry_breakers.extend(tokenizer.encode(text, EncodeOptions::VERBATIM)?);
    }
    Ok(SamplerParams {
        logit_bias: flags
            .logit_bias
            .iter()
            .map(|text| logit_bias(text))
            .collect::<Result<_>>()?,
        repeat_penalty: flags.repeat_penalty,
        presence_penalty: flags.presence_penalty,
        frequency_penalty: flags.frequency_penalty,
        penalty_last_n: flags.repeat_last_n,
        dry_multiplier: flags.dry_multiplier,
        dry_base: flags.dry_base,
        dry_allowed_length: flags.dry_allowed_length,
        dry_last_n: flags.dry_last_n,
        dry_breakers,
        top_k: flags.top_k,
        typical_p: flags.typical,
        top_p: flags.top_p,
        min_p: flags.min_p,
        temperature: flags.temp,
        seed: flags.seed,
    })
}

/// `ID=BIAS` as a token and what is added to its logit.
fn logit_bias(text: &str) -> Result<(u32, f32)> {
    let parsed = text
        .split_once('=')
        .and_then(|(id, bias)| Some((id.parse().ok()?, bias.parse().ok()?)));
    parsed.ok_or_else(|| {
        let what = format!("--logit-bias {text} is not ID=BIAS");
        Advised::new(
            what,
            "for example --logit-bias 13=-5, or 13=-inf to forbid a token",
        )
        .into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::plan::session::Bytes;

    #[test]
    fn biases_are_a_token_and_a_number() {
        assert_eq!(logit_bias("13=-2.5").unwrap(), (13, -2.5));
        assert_eq!(logit_bias("13=-inf").unwrap(), (13, f32::NEG_INFINITY));
        for bad in ["13", "=1", "13=", "-1=2", "x=1"] {
            assert!(logit_bias(bad).is_err(), "{bad}");
        }
    }

    fn flags(ctx: Option<usize>, ubatch: usize) -> ContextFlags {
        ContextFlags {
            ctx,
            ubatch: Some(ubatch),
            cache_type_k: None,
            cache_type_v: None,
            kv_rotate: OnOff::On,
            device: DeviceName::Cpu,
            budget: crate::flags::tests::budget(),
        }
    }

    #[test]
    fn measurements_are_of_the_types_asked_for() {
        let chosen = asked(&flags(None, 512), Need::Chosen).unwrap();
        let types = |asked: &Asked| (asked.request.type_k, asked.request.type_v);
        assert_eq!((chosen.n_ctx, types(&chosen)), (None, (None, None)));
        let cells = asked(&flags(None, 512), Need::Cells(640)).unwrap();
        let f16 = Some(KvType::F16);
        assert_eq!((cells.n_ctx, types(&cells)), (Some(640), (f16, f16)));
        let more = asked(&flags(Some(1000), 512), Need::Cells(640)).unwrap();
        assert_eq!(more.n_ctx, Some(1000));
        assert!(asked(&flags(Some(639), 512), Need::Cells(640)).is_err());
        for ubatch in [0, UBATCH_MAX + 1] {
            assert!(asked(&flags(None, ubatch), Need::Chosen).is_err());
        }
    }

    #[test]
    fn planned_and_real_are_in_one_line() {
        let bytes = |n: u64| Bytes {
            weight_bytes: n << 20,
            kv_bytes: (n + 1) << 20,
            work_bytes: (n + 2) << 20,
            staging_bytes: 0,
            expert_slot_bytes: 0,
        };
        let taken = Taken {
            planned: bytes(1),
            real: bytes(4),
        };
        assert_eq!(
            memory_line(&taken),
            "memory: weights 4.0 MiB (planned 1.0 MiB), KV 5.0 MiB (planned 2.0 MiB), \
             work 6.0 MiB (planned 3.0 MiB)"
        );
    }
}
