//! Probes: what this machine can do, measured.
//!
//! A [`place::profile::Profile`] is what every placement decision is a function of. [`profile()`] takes it from the user's
//! cache or measures it, which takes up to [`TIME_MAX`]; it is for decisions that need one, and for who asks. [`cached`]
//! never measures. What there is no time for is taken from a built-in profile, and what was measured while others used the processor is
//! marked: [`Profile::guessed`], [`Profile::disturbed`].
//!
//! | module | what it measures |
//! |---|---|
//! | [`bandwidth`] | streaming reads and copies of memory |
//! | `products` | weights that one token passes, multiply-adds of many tokens |
//! | `attention` | one token in one layer, at two depths; copies into the staging ring |
//! | `disk` | the model's file |
//! | `host` | all of that, what matters most first |
//! | `device` | the same of a GPU; its link, alone and beside the CPU |
//! | `sample` | repetitions, and how they share the time |
//! | [`busy`] | what others use of the processor meanwhile |

mod attention;
pub mod bandwidth;
pub mod busy;
mod cache;
mod device;
mod disk;
mod error;
mod host;
pub mod machine;
mod products;
mod sample;
mod subject;

pub use cache::dir;
pub use error::Error;
pub use sample::REPETITIONS_MIN;
pub use subject::Subject;

use crate::generate::memory;
use crate::gpu::Gpu;
use crate::plan::machine::set_memory;
use crate::session::{UBATCH_DEFAULT, UBATCH_MAX};
use cpu::Isa;
use cpu::pool::{Pinning, default_threads};
use gguf::TensorType;
use place::bytes::KvType;
use place::profile::{self, Accepted, Figure, Key, Profile};
use sample::Clock;
use std::path::PathBuf;
use std::time::Duration;

/// How long all probes together take at most: what is not measured by then is guessed. Compiling a GPU's kernels, which happens once a
/// driver, is not in it.
pub const TIME_MAX: Duration = Duration::from_secs(17);

/// The most that one figure takes, warm-up included.
const FIGURE_MAX: Duration = Duration::from_millis(300);

/// Pairs of K and V types that attention is measured with: the ladder's.
const TIERS: [(KvType, KvType); 4] = [
    (KvType::F16, KvType::F16),
    (KvType::Q8_0, KvType::Q8_0),
    (KvType::Q8_0, KvType::Q4_0),
    (KvType::Q4_0, KvType::Q4_0),
];

/// Where a probe tells how far it is. All methods have empty defaults, so `()` is a silent one.
pub trait Progress {
    /// The next of `total` measurements begins; `done` are behind.
    fn step(&mut self, _what: &str, _done: usize, _total: usize) {}
    /// All are done.
    fn finish(&mut self) {}
    /// Something worth a line.
    fn note(&mut self, _text: &str) {}
    /// Asked often: whether to stop. The probe then ends with [`Error::Interrupted`].
    fn interrupted(&self) -> bool {
        false
    }
}

impl Progress for () {}

/// Which formats' products are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Formats {
    /// Those of the model, with the instruction set in use.
    OfModel,
    /// All that there are, with every vector instruction set of this processor if none is asked for.
    All,
}

/// Whether a cached profile serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reuse {
    /// It does, if there is one.
    Cached,
    /// The machine is measured anew. What differs from the cached profile by no more than noise stays as it was.
    Anew,
}

/// How a machine is measured.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Threads that compute; `None`: the physical cores at hand.
    pub threads: Option<usize>,
    /// Instruction set; `None`: the best.
    pub isa: Option<Isa>,
    /// Whether threads are pinned.
    pub pinning: Pinning,
    /// Tokens of a prompt's chunk.
    pub ubatch: usize,
    /// Which products.
    pub formats: Formats,
    /// How long all probes together may take.
    pub time_max: Duration,
    /// How long each figure may take at most.
    pub figure_max: Duration,
    /// The GPU that is measured, too.
    pub gpu: Option<Gpu>,
    /// Where profiles are kept; `None`: [`dir`].
    pub dir: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            threads: None,
            isa: None,
            pinning: Pinning::Free,
            ubatch: UBATCH_DEFAULT,
            formats: Formats::OfModel,
            time_max: TIME_MAX,
            figure_max: FIGURE_MAX,
            gpu: None,
            dir: None,
        }
    }
}

impl Settings {
    fn threads(&self) -> usize {
        self.threads.unwrap_or_else(default_threads).max(1)
    }

    /// The instruction set in use first.
    fn isas(&self) -> Vec<Isa> {
        let used = self.isa.unwrap_or_else(Isa::best);
        let mut isas = vec![used];
        if self.formats == Formats::All && self.isa.is_none() {
            let others = Isa::available().into_iter().rev();
            isas.extend(others.filter(|isa| *isa != used && *isa != Isa::Scalar));
        }
        isas
    }

    fn formats(&self, subject: &Subject) -> Vec<TensorType> {
        match self.formats {
            Formats::OfModel => subject.formats(),
            Formats::All => products::all_formats(),
        }
    }

    fn key(&self, subject: &Subject) -> Key {
        let join = |names: Vec<&str>| names.join("+");
        let isas = join(self.isas().into_iter().map(Isa::name).collect());
        let formats = self.formats(subject);
        let formats = join(formats.into_iter().map(TensorType::name).collect());
        let heads = subject.heads.map_or("no attention".to_owned(), |h| {
            let layers = subject.layers;
            format!(
                "{}/{} heads of {}/{} in {layers} layers",
                h.heads, h.heads_kv, h.head_k, h.head_v
            )
        });
        let pinned = match self.pinning {
            Pinning::Free => "free",
            Pinning::Pinned => "pinned",
        };
        Key {
            cpu: machine::cpu_name(),
            cores: u32::try_from(default_threads()).unwrap_or(u32::MAX),
            threads: u32::try_from(self.threads()).unwrap_or(u32::MAX),
            device: self.gpu.as_ref().map_or(String::new(), Gpu::key),
            driver: self.gpu.as_ref().map_or(String::new(), Gpu::driver),
            shaped_by: format!(
                "engine {}, {isas}, {pinned}, ubatch {}, {heads}, {formats}, {} MiB of weights, {} slots, each tier beside copies of its blocks",
                env!("CARGO_PKG_VERSION"),
                self.ubatch,
                subject.active_bytes >> 20,
                attention::SLOTS,
            ),
        }
    }

    fn dir(&self) -> Result<PathBuf, Error> {
        self.dir.clone().map_or_else(dir, Ok)
    }
}

/// The profile of this machine for a model: the cached one, or measured now.
///
/// A cache that cannot be written is told of, and is no failure.
///
/// # Errors
/// If the user interrupts, or memory or threads are refused.
pub fn profile(
    subject: &Subject,
    settings: &Settings,
    reuse: Reuse,
    progress: &mut dyn Progress,
) -> Result<Profile, Error> {
    let old = cached(subject, settings, progress);
    if let Some(old) = &old
        && reuse == Reuse::Cached
    {
        return Ok(old.clone());
    }
    let new = measure(subject, settings, progress)?;
    progress.finish();
    let profile = match old.filter(|old| old.key == new.key) {
        None => new,
        Some(old) => {
            let figures = new.figures().len();
            let Accepted { profile, changes } = old.accept(&new);
            progress.note(&format!(
                "{} of {figures} figures differ from before by more than twice their spread",
                changes.len()
            ));
            profile
        }
    };
    for note in doubts(&profile) {
        progress.note(&note);
    }
    let kept = settings.dir().and_then(|dir| cache::store(&dir, &profile));
    if let Err(error) = kept {
        progress.note(&format!(
            "this is not kept, and will be measured again: {error}"
        ));
    }
    Ok(profile)
}

/// What a reader of a profile should doubt, in words.
pub fn doubts(profile: &Profile) -> Vec<String> {
    let mut notes = Vec::new();
    let all = profile.figures().len();
    let count = |what: &[String]| format!("{} of {all} figures", what.len());
    if !profile.disturbed.is_empty() {
        notes.push(format!(
            "{} were measured while other processes used the processor ({}): measure again when it is idle, with 'probe --reprobe'",
            count(&profile.disturbed),
            few(&profile.disturbed),
        ));
    }
    if !profile.guessed.is_empty() {
        notes.push(format!(
            "{} were not measured for lack of time, or cannot be measured yet, and are a built-in profile's ({})",
            count(&profile.guessed),
            few(&profile.guessed),
        ));
    }
    notes
}

/// The first of some names.
fn few(names: &[String]) -> String {
    let shown = names.iter().take(3).cloned().collect::<Vec<_>>();
    let more = if names.len() > shown.len() {
        ", ..."
    } else {
        ""
    };
    format!("{}{more}", shown.join(", "))
}

/// The profile of this machine for a model, if it was measured before: with the model's formats, or with all.
pub fn cached(
    subject: &Subject,
    settings: &Settings,
    progress: &mut dyn Progress,
) -> Option<Profile> {
    let dir = settings.dir().ok()?;
    let all = Settings {
        formats: Formats::All,
        ..settings.clone()
    };
    let (mut own, all) = (settings.key(subject), all.key(subject));
    let mut found = cache::load(&dir, &own, progress);
    if found.is_none() && own != all {
        own = all;
        found = cache::load(&dir, &own, progress);
    }
    let mut profile = found?;
    // What is free changes all the time.
    if let Some((total, available)) = memory_bytes() {
        (
            profile.host.memory_total_bytes,
            profile.host.memory_available_bytes,
        ) = (total, available);
    }
    if let (Some(device), Some(gpu)) = (&mut profile.device, &settings.gpu) {
        set_memory(device, gpu.memory().ok()?, gpu.context_bytes());
    }
    Some(profile)
}

/// Bytes of memory in all, and free; `None` where the system does not say.
fn memory_bytes() -> Option<(u64, u64)> {
    let total = memory::total_bytes()?;
    Some((total, memory::available_bytes()?.clamp(1, total)))
}

fn measure(
    subject: &Subject,
    settings: &Settings,
    progress: &mut dyn Progress,
) -> Result<Profile, Error> {
    if !(1..=UBATCH_MAX).contains(&settings.ubatch) {
        return Err(Error::Ubatch(settings.ubatch));
    }
    let (total, available) = memory_bytes().ok_or(Error::MemoryUnknown)?;
    let formats = settings.formats(subject);
    if let Some(gpu) = &settings.gpu {
        progress.step("compiling the GPU's kernels, once a driver", 0, 1);
        device::compile(gpu, subject, &formats)?;
    }
    let steps = host::steps(subject, settings, formats.len())
        + settings
            .gpu
            .as_ref()
            .map_or(0, |_| device::steps(subject, formats.len()));
    let mut clock = Clock::new(progress, steps, settings.time_max, settings.figure_max);
    // What matters most first: that is what a decision waits for, and what has time left for sure.
    let device = settings.gpu.as_ref().map(|gpu| {
        let probe = device::Probe::new(gpu, subject, &formats, settings.ubatch);
        probe.and_then(|probe| probe.first(&mut clock))
    });
    let mut device = device.transpose()?;
    let mut host = host::Probe::new(subject, settings, &formats, (total, available), &mut clock)?;
    host.first(&mut clock)?;
    if let Some(device) = &mut device {
        device.beside(&mut host, &mut clock)?;
    }
    host.second(&mut clock)?;
    let device = device.map(|device| device.second(&mut clock)).transpose()?;
    let host = host.third(&mut clock)?;
    let key = settings.key(subject);
    let mut profile = Profile {
        version: profile::VERSION,
        name: match &settings.gpu {
            None => key.cpu.clone(),
            Some(gpu) => format!("{} and {}", key.cpu, gpu.name()),
        },
        source: profile::Source::Measured,
        key,
        host,
        device,
        disturbed: std::mem::take(&mut clock.disturbed),
        guessed: std::mem::take(&mut clock.guessed),
    };
    profile.visit_mut(&mut |_, figure, _| *figure = rounded(*figure));
    Ok(profile)
}

/// Five digits: what no clock knows is not kept, and text gives back what was written.
fn rounded(figure: Figure) -> Figure {
    let round = |x: f64| format!("{x:.4e}").parse().unwrap_or(x);
    Figure {
        value: round(figure.value),
        spread: round(figure.spread),
    }
}

#[cfg(test)]
mod tests;
