//! Flags that several commands share, as they are typed. What they mean is checked in [`crate::settings`].
//!
//! The same flag has the same name, default and unit wherever it appears; the README has them all in one table.

use std::path::PathBuf;

use clap::{Args, Parser, ValueEnum};
use engine::experts::Emulated;
use engine::session::Transfers;
use place::bytes::KvType;
use place::cost::SpillModel;
use place::decide::{self, ExpertCache, Request};
use place::experts::Share;
use place::tier::Tier;

use crate::failure::Advised;

/// A switch that is named both ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnOff {
    On,
    Off,
}

/// Number formats of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CacheType {
    F16,
    Bf16,
    #[value(name = "q8_0")]
    Q8_0,
    #[value(name = "q4_0")]
    Q4_0,
}

impl CacheType {
    /// The engine's name of it.
    pub fn kv_type(self) -> KvType {
        match self {
            Self::F16 => KvType::F16,
            Self::Bf16 => KvType::Bf16,
            Self::Q8_0 => KvType::Q8_0,
            Self::Q4_0 => KvType::Q4_0,
        }
    }
}

/// What `--device` takes.
pub const DEVICES: &str = "auto|cpu|cuda[:N]";

/// What computes, as it is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceName {
    /// A GPU if a usable one is there, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU, by its number.
    Cuda(usize),
}

/// How the machine is used.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Machine")]
pub struct MachineFlags {
    /// Threads that compute [default: the physical cores this process may use]
    #[arg(short, long, value_name = "N")]
    pub threads: Option<usize>,
    /// Instruction set: auto, scalar, avx2, avx512 or amx; results are the same to the last bit
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub isa: String,
    /// Threads that compute the CPU's share of experts [default: all that compute]
    #[arg(long, value_name = "N")]
    pub pool_workers: Option<usize>,
    /// Whether each thread is tied to one core
    #[arg(
        long,
        value_enum,
        value_name = "on|off",
        default_value = "off",
        hide_possible_values = true
    )]
    pub pin_threads: OnOff,
    /// Whether the model's file is mapped into memory; off for files that may change or be cut while in use
    #[arg(
        long,
        value_enum,
        value_name = "on|off",
        default_value = "on",
        hide_possible_values = true
    )]
    pub mmap: OnOff,
}

/// How much a model remembers, and in which form.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Context")]
pub struct ContextFlags {
    /// What computes: cuda, an NVIDIA GPU (cuda:N for another than the first), cpu, or auto: a GPU if a usable one is there
    #[arg(long, value_name = DEVICES, default_value = "auto", value_parser = device)]
    pub device: DeviceName,
    /// Tokens of context [default: the smaller of trained length, 8192 and what fits into memory]
    #[arg(short, long, value_name = "TOKENS")]
    pub ctx: Option<usize>,
    /// Most prompt tokens computed at a time [default: 512; on a GPU 2048 where that moves nothing out, and up to 4096 where cells or experts are copied from host memory for each 512]
    #[arg(long, value_name = "TOKENS")]
    pub ubatch: Option<usize>,
    /// Number format of the keys [default: f16; for run, chat and serve less, where a --ctx has no room otherwise]
    #[arg(long, value_enum, value_name = "TYPE")]
    pub cache_type_k: Option<CacheType>,
    /// Number format of the values [default: as for the keys]
    #[arg(long, value_enum, value_name = "TYPE")]
    pub cache_type_v: Option<CacheType>,
    /// Whether keys and values in 4 bits are rotated first, which spreads outliers over all of a head
    #[arg(
        long,
        value_enum,
        value_name = "on|off",
        default_value = "on",
        hide_possible_values = true
    )]
    pub kv_rotate: OnOff,
    #[command(flatten)]
    pub budget: BudgetFlags,
}

/// What may be used, and what is wanted.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Budget")]
pub struct BudgetFlags {
    /// Without a device: main memory that plays a device's; with one: no more of it than this
    #[arg(long, value_name = "MIB")]
    pub device_mem: Option<u64>,
    /// Cells of the context in device memory, in blocks of 256; what is older is in host memory [default: what is worth most]
    #[arg(long, value_name = "CELLS")]
    pub window: Option<u64>,
    /// What this process may use of the whole device; 0 is no cap
    #[arg(long, value_name = "MIB", default_value_t = 0)]
    pub vram_target: u64,
    /// KV in host memory: off, auto, or up to so many MiB
    #[arg(long, value_name = "off|auto|MIB", default_value = "auto", value_parser = spill)]
    pub spill: decide::Spill,
    /// The share of tokens a second, at full context, that a spill may cost
    #[arg(long, value_name = "X", default_value_t = 0.2, value_parser = share, allow_negative_numbers = true)]
    pub spill_drop: f64,
    /// Largest spill of 'auto' [default: 800 with the additive model, none with the overlapped one]
    #[arg(long, value_name = "MIB")]
    pub spill_max_mib: Option<u64>,
    /// How the cost of a spill is predicted
    #[arg(long, value_enum, value_name = "MODEL", default_value = "overlapped")]
    pub spill_model: SpillModelName,
    /// The least compressed tier within the target, or the fastest plan
    #[arg(long, value_enum, value_name = "WHAT", default_value = "quality")]
    pub prefer: PreferName,
    /// The lowest tier that '--prefer speed' takes
    #[arg(long, value_name = "K/V", default_value = "q8_0/q8_0", value_parser = tier)]
    pub min_tier: Tier,
    /// The part of the cells in host memory that the CPU attends where they lie, for generated tokens; the rest is copied to the device ahead
    /// of use
    #[arg(long, value_name = "auto|0..1", default_value = "auto", value_parser = kv_share)]
    pub kv_share: KvShare,
    /// Copies of blocks of cells that can be on their way to the device or in use [default: what is worth most]
    #[arg(long, value_name = "SLOTS")]
    pub staging: Option<u64>,
    /// Host memory for experts and cells that may be pinned, so that the device copies it by itself [default: all that is needed]
    #[arg(long, value_name = "MIB")]
    pub pin_max: Option<u64>,
    /// Device memory for a mixture's experts, in MiB or as a part of all of them; the others are in host memory [default: what is worth most]
    #[arg(long, value_name = "MIB|N%", value_parser = expert_cache)]
    pub expert_cache: Option<ExpertCache>,
    /// The part of the experts in host memory that the CPU computes where they lie, in prompts; the rest is copied to the device
    #[arg(long, value_name = "off|auto|always|0..1", default_value = "auto", value_parser = cpu_share)]
    pub cpu_share: Share,
    /// The same for generated tokens
    #[arg(long, value_name = "off|auto|always|0..1", default_value = "auto", value_parser = cpu_share)]
    pub cpu_share_decode: Share,
    /// Make this machine a worse one, for measurements: host-copy, link=GB/s, hog=THREADS, pin-max=MIB, staging-fail, worker-panic, separated by commas
    #[arg(long, value_name = "WHAT,...", value_parser = emulate)]
    pub emulate: Option<EmulateFlag>,
}

/// A worse machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct EmulateFlag {
    /// What sessions do about it.
    pub experts: Emulated,
    /// MiB of host memory that may be pinned.
    pub pin_max: Option<u64>,
    /// Threads that copy memory for nothing.
    pub hogs: usize,
}

/// What is written down of a mixture's experts.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Records")]
pub struct RecordFlags {
    /// Write which experts every layer uses, a JSON object a line
    #[arg(long, value_name = "FILE")]
    pub record_routing: Option<PathBuf>,
    /// Write what every layer takes that has experts in host memory, a JSON object a line
    #[arg(long, value_name = "FILE")]
    pub record_windows: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum SpillModelName {
    Additive,
    Overlapped,
}

/// Who attends the cells in host memory; `None`: whatever is fastest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KvShare(pub Option<f64>);

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum PreferName {
    Quality,
    Speed,
}

impl BudgetFlags {
    /// Refuses what leaves no room for anything.
    pub fn check(&self) -> anyhow::Result<()> {
        let nothing = [
            (
                "--device-mem",
                self.device_mem,
                "leave it out for all there is",
            ),
            ("--window", self.window, "leave it out to have it chosen"),
            ("--staging", self.staging, "leave it out to have it chosen"),
        ];
        for (flag, value, hint) in nothing {
            if value == Some(0) {
                return Err(Advised::new(format!("{flag} 0 leaves no room"), hint).into());
            }
        }
        Ok(())
    }

    /// How cells get to host memory and back.
    pub fn transfers(&self) -> Transfers {
        let emulated = self.emulate.unwrap_or_default();
        let worse = emulated.experts;
        let pin_max = [self.pin_max, emulated.pin_max].into_iter().flatten().min();
        Transfers {
            pin_max_bytes: pin_max.map(|mib| mib.saturating_mul(1 << 20)),
            link_gb_s: worse.link_gb_s,
            host_copy: worse.host_copy,
            staging_fails: worse.staging_fails,
        }
    }

    /// Says it in a request.
    pub fn apply(&self, request: Request) -> Request {
        Request {
            device_mem_mib: self.device_mem,
            window_cells: self.window,
            vram_target_mib: self.vram_target,
            spill: self.spill,
            spill_drop: self.spill_drop,
            spill_model: match self.spill_model {
                SpillModelName::Additive => SpillModel::Additive,
                SpillModelName::Overlapped => SpillModel::Overlapped,
            },
            spill_max_mib: self.spill_max_mib,
            prefer: match self.prefer {
                PreferName::Quality => decide::Prefer::Quality,
                PreferName::Speed => decide::Prefer::Speed,
            },
            min_tier: self.min_tier,
            kv_share: self.kv_share.0,
            staging_slots: self.staging,
            expert_cache: self.expert_cache,
            ..request
        }
    }

    /// The CPU's part in experts, in prompts and for generated tokens.
    pub fn expert_shares(&self) -> [Share; 2] {
        [self.cpu_share, self.cpu_share_decode]
    }
}

/// Reads `auto`, `cpu`, `cuda` or `cuda:N`.
pub fn device(text: &str) -> Result<DeviceName, String> {
    let number = match text.split_once(':') {
        None if text == "auto" => return Ok(DeviceName::Auto),
        None if text == "cpu" => return Ok(DeviceName::Cpu),
        None if text == "cuda" => Some(0),
        Some(("cuda", number)) => number.parse().ok(),
        _ => None,
    };
    number
        .map(DeviceName::Cuda)
        .ok_or_else(|| "expected auto, cpu, cuda, or cuda:N".to_owned())
}

fn kv_share(text: &str) -> Result<KvShare, String> {
    match text {
        "auto" => Ok(KvShare(None)),
        x => share(x)
            .map(|x| KvShare(Some(x)))
            .map_err(|e| format!("expected auto, or {}", &e["expected ".len()..])),
    }
}

fn expert_cache(text: &str) -> Result<ExpertCache, String> {
    let percent = |text: &str| {
        let part = text.parse::<f64>().ok();
        part.filter(|part| (0.0..=100.0).contains(part))
    };
    let found = match text.strip_suffix('%') {
        Some(text) => percent(text).map(ExpertCache::Percent),
        None => text.parse().ok().map(ExpertCache::Mib),
    };
    found.ok_or_else(|| "expected a number of MiB, or 0% to 100%".to_owned())
}

fn emulate(text: &str) -> Result<EmulateFlag, String> {
    let mut flag = EmulateFlag::default();
    for part in text.split(',') {
        let unknown = || {
            format!(
                "'{part}': expected host-copy, link=GB/s, hog=THREADS, pin-max=MIB, staging-fail or worker-panic"
            )
        };
        match part.split_once('=') {
            None if part == "host-copy" => flag.experts.host_copy = true,
            None if part == "staging-fail" => flag.experts.staging_fails = true,
            None if part == "worker-panic" => flag.experts.worker_panics = true,
            Some(("link", gb_s)) => {
                let gb_s = gb_s
                    .parse::<f64>()
                    .ok()
                    .filter(|x| *x >= 1e-3 && x.is_finite());
                flag.experts.link_gb_s = Some(gb_s.ok_or_else(unknown)?);
            }
            Some(("pin-max", mib)) => {
                flag.pin_max = Some(mib.parse().ok().ok_or_else(unknown)?);
            }
            Some(("hog", threads)) => {
                let threads = threads.parse().ok().filter(|n| (1..=1024).contains(n));
                flag.hogs = threads.ok_or_else(unknown)?;
            }
            _ => return Err(unknown()),
        }
    }
    Ok(flag)
}

fn cpu_share(text: &str) -> Result<Share, String> {
    match text {
        "off" => Ok(Share::Off),
        "auto" => Ok(Share::Auto),
        "always" => Ok(Share::Always),
        x => share(x)
            .map(Share::Fixed)
            .map_err(|_| "expected off, auto, always, or 0 to 1".to_owned()),
    }
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

/// Context flags beside a command's own, in one argument.
#[derive(Debug, Clone, Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
pub struct OtherContext {
    /// Both types of the cache, as K/V
    #[arg(value_parser = pair, conflicts_with_all = ["cache_type_k", "cache_type_v"])]
    types: Option<(CacheType, CacheType)>,
    #[command(flatten)]
    context: ContextFlags,
}

impl OtherContext {
    /// What was said.
    pub fn flags(&self) -> ContextFlags {
        let mut flags = self.context.clone();
        if let Some((k, v)) = self.types {
            (flags.cache_type_k, flags.cache_type_v) = (Some(k), Some(v));
        }
        flags
    }
}

/// Reads flags that are separated by spaces.
pub fn other_context(text: &str) -> Result<OtherContext, String> {
    OtherContext::try_parse_from(text.split_whitespace()).map_err(|error| {
        let error = error.to_string();
        let first = error.lines().next().unwrap_or_default();
        first.trim_start_matches("error: ").to_owned()
    })
}

fn pair(text: &str) -> Result<(CacheType, CacheType), String> {
    let (k, v) = text.split_once('/').unwrap_or((text, text));
    let ty = |text: &str| {
        CacheType::from_str(text, false)
            .map_err(|_| format!("expected K/V, of f16, bf16, q8_0 and q4_0, not '{text}'"))
    };
    Ok((ty(k)?, ty(v)?))
}

/// How the next token is chosen.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingFlags {
    /// Temperature; 0 always takes the most likely token
    #[arg(long, value_name = "X", default_value_t = 0.7)]
    pub temp: f32,
    /// Keep the K most likely tokens; 0 keeps all
    #[arg(long, value_name = "K", default_value_t = 40)]
    pub top_k: u32,
    /// Keep the most likely tokens that together reach this probability; 1 keeps all
    #[arg(long, value_name = "P", default_value_t = 0.95)]
    pub top_p: f32,
    /// Keep tokens at least this likely, relative to the most likely one; 0 keeps all
    #[arg(long, value_name = "P", default_value_t = 0.05)]
    pub min_p: f32,
    /// Keep the most typical tokens that together reach this probability; 1 keeps all
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub typical: f32,
    /// Divide the logits of repeated tokens by this; 1 is off
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub repeat_penalty: f32,
    /// Tokens that the three penalties look back at; -1 is all
    #[arg(
        long,
        value_name = "TOKENS",
        default_value_t = 64,
        allow_negative_numbers = true
    )]
    pub repeat_last_n: i32,
    /// Subtract this from the logits of tokens that occurred
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub presence_penalty: f32,
    /// Subtract this from a token's logit for each time that it occurred
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    pub frequency_penalty: f32,
    /// Strength of DRY, which discourages repeated sequences; 0 is off
    #[arg(long, value_name = "X", default_value_t = 0.0)]
    pub dry_multiplier: f32,
    /// Growth of the DRY penalty with each token of a repeated sequence
    #[arg(long, value_name = "X", default_value_t = 1.75)]
    pub dry_base: f32,
    /// Longest repeated sequence that DRY leaves alone
    #[arg(long, value_name = "TOKENS", default_value_t = 2)]
    pub dry_allowed_length: u32,
    /// Tokens that DRY searches for repetitions; -1 is all
    #[arg(long, value_name = "TOKENS", default_value_t = -1, allow_negative_numbers = true)]
    pub dry_last_n: i32,
    /// Text that no repetition reaches past; may be repeated [default: the end of a line]
    #[arg(long, value_name = "TEXT")]
    pub dry_breaker: Vec<String>,
    /// Add BIAS to a token's logit; may be repeated
    #[arg(long, value_name = "ID=BIAS", allow_hyphen_values = true)]
    pub logit_bias: Vec<String>,
    /// Seed of the random choice; the same seed gives the same text
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

/// What is generated, and when it ends.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Generation")]
pub struct GenerationFlags {
    /// Most tokens to generate [default: until the model ends or the context is full]
    #[arg(short = 'n', long, value_name = "TOKENS")]
    pub predict: Option<usize>,
    /// End when this text appears; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// A system message before the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Keep the context in a file, which is written at the end: what a prompt has in common with it is not computed again, and a chat goes on
    #[arg(long, value_name = "FILE")]
    pub session: Option<PathBuf>,
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use clap::Parser;

    /// What one gets without a flag.
    pub fn budget() -> BudgetFlags {
        #[derive(Parser)]
        struct Flags {
            #[command(flatten)]
            budget: BudgetFlags,
        }
        Flags::parse_from(["test"]).budget
    }

    #[test]
    fn flags_in_one_argument_are_those_of_a_command() {
        let flags = |text: &str| other_context(text).unwrap().flags();
        let f = flags("q8_0/q4_0 --window 512 --kv-share 0.5");
        let types = (f.cache_type_k, f.cache_type_v);
        assert_eq!(types, (Some(CacheType::Q8_0), Some(CacheType::Q4_0)));
        assert_eq!(
            (f.budget.window, f.budget.kv_share),
            (Some(512), KvShare(Some(0.5)))
        );
        let f = flags(" --cache-type-k q8_0 ");
        assert_eq!(
            (f.cache_type_k, f.cache_type_v),
            (Some(CacheType::Q8_0), None)
        );
        assert_eq!((flags("").cache_type_k, flags("").ubatch), (None, None));
        for (bad, why) in [
            ("q8_0/q9_0", "expected K/V"),
            ("--windows 5", "--windows"),
            ("q8_0 --cache-type-k f16", "cannot be used with"),
            ("f16 q8_0", "q8_0"),
            ("--help", "--help"),
        ] {
            let error = other_context(bad).unwrap_err();
            assert!(
                error.contains(why) && !error.contains('\n'),
                "{bad}: {error}"
            );
        }
    }

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
        assert_eq!(device("auto"), Ok(DeviceName::Auto));
        assert_eq!(device("cpu"), Ok(DeviceName::Cpu));
        assert_eq!(device("cuda"), Ok(DeviceName::Cuda(0)));
        assert_eq!(device("cuda:3"), Ok(DeviceName::Cuda(3)));
        for bad in ["", "cuda:", "cuda:x", "gpu", "cpu:0", "cuda:-1"] {
            assert!(device(bad).is_err(), "{bad}");
        }
        assert_eq!(kv_share("auto"), Ok(KvShare(None)));
        assert_eq!(kv_share("0.3"), Ok(KvShare(Some(0.3))));
        assert!(
            kv_share("x")
                .unwrap_err()
                .starts_with("expected auto, or 0")
        );
        assert_eq!(expert_cache("0"), Ok(ExpertCache::Mib(0)));
        assert_eq!(expert_cache("12.5%"), Ok(ExpertCache::Percent(12.5)));
        for bad in ["", "%", "-1", "101%", "NaN%", "1.5", "x"] {
            assert!(expert_cache(bad).is_err(), "{bad}");
        }
        assert_eq!(cpu_share("off"), Ok(Share::Off));
        assert_eq!(cpu_share("auto"), Ok(Share::Auto));
        assert_eq!(cpu_share("always"), Ok(Share::Always));
        assert_eq!(cpu_share("0.7"), Ok(Share::Fixed(0.7)));
        for bad in ["", "on", "2", "NaN"] {
            assert!(cpu_share(bad).is_err(), "{bad}");
        }
        let worse = emulate("link=0.5,hog=2,host-copy").unwrap();
        assert_eq!((worse.experts.link_gb_s, worse.hogs), (Some(0.5), 2));
        assert!(worse.experts.host_copy && !worse.experts.staging_fails);
        assert_eq!(emulate("pin-max=0").unwrap().pin_max, Some(0));
        for bad in [
            "",
            "link",
            "link=0",
            "link=NaN",
            "hog=0",
            "hog=-1",
            "pin-max",
            "pin-max=x",
            "slow",
        ] {
            assert!(emulate(bad).is_err(), "{bad}");
        }
        for bad in ["", "/", "q8_0/", "q8_0/q9", "a/b/c"] {
            assert!(tier(bad).is_err(), "{bad}");
        }
    }
}
