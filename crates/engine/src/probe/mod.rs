//! Probes: what this machine can do, measured.
//!
//! A [`place::profile::Profile`] is what every placement decision is a function of. [`profile()`] takes it from the user's
//! cache or measures it, which takes up to [`TIME_MAX`]; it is for decisions that need one, and for who asks. [`cached`]
//! never measures.
//!
//! | module | what it measures |
//! |---|---|
//! | [`bandwidth`] | streaming reads and copies of memory |
//! | `products` | weights that one token passes, multiply-adds of many tokens |
//! | `attention` | one token in one layer, at two depths; copies into the staging ring |
//! | `disk` | the model's file |
//! | `sample` | repetitions, and how they share the time |

mod attention;
pub mod bandwidth;
mod cache;
mod disk;
mod error;
pub mod machine;
mod products;
mod sample;
mod subject;

pub use cache::dir;
pub use error::Error;
pub use sample::REPETITIONS_MIN;
pub use subject::Subject;

use crate::generate::memory;
use crate::session::{UBATCH_DEFAULT, UBATCH_MAX};
use bandwidth::Source;
use cpu::pool::{Pinning, Pool, default_threads};
use cpu::{Isa, mem::Buffer};
use disk::Disk;
use gguf::TensorType;
use place::bytes::KvType;
use place::profile::{
    self, Accepted, AttentionRate, ByThreads, Engage, Figure, HeadShape, Host, Key, ProductRate,
    Profile,
};
use sample::{Clock, seconds_a_call};
use std::path::PathBuf;
use std::time::Duration;

/// How long all probes together take at most, where memory and processor are not very slow.
pub const TIME_MAX: Duration = Duration::from_secs(17);

/// Weights pass through at least this much memory, and at most this much; in between through as much as a session with the
/// model reads for a token, whose caches hold what they can of it.
const WEIGHT_BYTES: (u64, u64) = (64 << 20, 1 << 30);

/// Part of the free memory that a buffer may take; there are two, and cells.
const MEMORY_PART: u64 = 6;

/// Passes over memory; fewer over much.
const PASSES: (usize, usize) = (5, 3);

/// Work items a thread of an empty fork, as many as products have.
const ITEMS_A_THREAD: usize = 6;

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
    /// How long all probes together may take, about: a slow machine still repeats each three times.
    pub time_max: Duration,
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
            device: String::new(),
            driver: String::new(),
            shaped_by: format!(
                "engine {}, {isas}, {pinned}, ubatch {}, {heads}, {formats}, {} MiB of weights, {} slots",
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
/// # Errors
/// If the user interrupts, memory or threads are refused, or the cache cannot be written.
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
    let dir = settings.dir()?;
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
    cache::store(&dir, &profile)?;
    Ok(profile)
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
    let (threads, isas) = (settings.threads(), settings.isas());
    let formats = settings.formats(subject);
    let tiers: Vec<_> = TIERS
        .into_iter()
        .filter_map(|(k, v)| {
            let heads = subject.heads?;
            Some((k, v, heads, heads.shape_of(k, v)?))
        })
        .collect();
    let memory_steps = 1 + 2 * thread_counts(threads).len();
    let product_steps = 3 * formats.len() * isas.len();
    let steps = memory_steps + 1 + product_steps + 2 * tiers.len() + tiers.len().min(1);
    let steps = steps + usize::from(subject.file.is_some());
    let mut clock = Clock::new(progress, steps, settings.time_max);

    let (low, high) = WEIGHT_BYTES;
    let bytes = subject.passing_bytes().clamp(low, high);
    let bytes = bytes.min(available / MEMORY_PART) as usize;
    clock.step("filling memory")?;
    let source = Source::new(bytes)?;
    let (read_gb_s, copy_gb_s) = memory_rates(&source, threads, &mut clock)?;

    let pool = Pool::new(threads, settings.pinning)?;
    let fork_join_us = clock.sample("an empty fork", |time| {
        1e6 * seconds_a_call(time, || pool.run(threads * ITEMS_A_THREAD, |_| ()))
    })?;
    let one = Pool::new(1, Pinning::Free)?;
    let mut products = Vec::new();
    for ty in formats {
        let forks = subject.forks_of(ty);
        let mut bench = products::Bench::new(&source, forks, isas[0], threads, settings.ubatch)?;
        for &isa in &isas {
            bench.isa = isa;
            let what = |work: &str| format!("{ty} {isa} {work}");
            products.push(ProductRate {
                format: ty.name().to_owned(),
                isa: isa.name().to_owned(),
                decode_gb_s: bench.decode(&pool, &mut clock, &what("decode"))?,
                decode_one_gb_s: bench.decode(&one, &mut clock, &what("decode, one thread"))?,
                prefill_gmac_s: bench.prefill(&pool, &mut clock, &what("prefill"))?,
            });
        }
    }
    drop(source);
    let (mut attention, mut stage_gb_s) = (Vec::new(), None);
    for (type_k, type_v, heads, shape) in tiers {
        let mut bench = attention::Bench::new(heads, shape, subject.layers, isas[0])?;
        let what = format!("attention over {type_k}/{type_v}");
        let (ns_cell, engage_us) = bench.slope_and_engage(&pool, &mut clock, &what)?;
        if attention.is_empty() {
            let what = format!("staging {type_k}/{type_v}");
            stage_gb_s = bench.stage(&pool, &mut clock, &what, fork_join_us.value)?;
        }
        attention.push(AttentionRate {
            type_k,
            type_v,
            shape: HeadShape {
                heads: heads.heads as u64,
                heads_kv: heads.heads_kv as u64,
                head_k: heads.head_k as u64,
                head_v: heads.head_v as u64,
            },
            ns_cell,
            engage_us,
        });
    }
    let disk = match &subject.file {
        None => Disk::Unknown,
        Some(file) => disk::measure(file, &mut clock)?,
    };
    if disk == Disk::Cached {
        progress.note("the disk was not measured: the model's file lies in the page cache");
    }
    let key = settings.key(subject);
    let mut profile = Profile {
        version: profile::VERSION,
        name: key.cpu.clone(),
        source: profile::Source::Measured,
        key,
        host: Host {
            memory_total_bytes: total,
            memory_available_bytes: available,
            isa: isas[0].name().to_owned(),
            read_gb_s,
            copy_gb_s,
            stage_gb_s,
            fork_join_us,
            products,
            attention,
            engage: Engage::default(),
            disk_read_gb_s: match disk {
                Disk::Rate(rate) => Some(rate),
                Disk::Cached | Disk::Unknown => None,
            },
        },
        device: None,
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

/// One thread, half of them, all; each number once.
fn thread_counts(threads: usize) -> Vec<usize> {
    let mut counts = vec![1, (threads / 2).max(1), threads];
    counts.dedup();
    counts
}

/// Read and copy rates.
fn memory_rates(
    source: &Source,
    threads: usize,
    clock: &mut Clock<'_>,
) -> Result<(ByThreads, ByThreads), Error> {
    let mut to = Buffer::new(source.bytes().len()).map_err(Error::memory("memory to copy to"))?;
    let passes = if source.bytes().len() > (WEIGHT_BYTES.1 / 2) as usize {
        PASSES.1
    } else {
        PASSES.0
    };
    let (mut reads, mut copies) = (Vec::new(), Vec::new());
    for n in thread_counts(threads) {
        clock.step(&format!("reading memory, {n} threads"))?;
        reads.push(source.read(n, passes)?.figure());
        clock.step(&format!("copying memory, {n} threads"))?;
        copies.push(source.copy(&mut to, n, passes)?.figure());
    }
    let by_threads = |figures: Vec<Figure>| ByThreads {
        one: figures[0],
        half: figures[figures.len().saturating_sub(2)],
        all: figures[figures.len() - 1],
    };
    Ok((by_threads(reads), by_threads(copies)))
}

#[cfg(test)]
mod tests;
