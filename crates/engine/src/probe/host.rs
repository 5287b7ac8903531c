//! What the host can do, what matters most first.

use super::attention;
use super::bandwidth::Source;
use super::disk::{self, Disk};
use super::products;
use super::sample::{Clock, Which, seconds_a_call};
use super::subject::Heads;
use super::{Error, Settings, Subject, TIERS};
use cpu::Isa;
use cpu::attention::KvShape;
use cpu::mem::Buffer;
use cpu::pool::{Pinning, Pool};
use gguf::TensorType;
use place::bytes::KvType;
use place::cost::Processor;
use place::profile::{
    AttentionRate, ByThreads, Engage, Figure, HeadShape, Host, ProductRate, Profile,
    default_profile,
};
use place::tier::Tier;
use std::path::PathBuf;

/// Weights pass through at least this much memory, and at most this much; in between through as much as a session with the
/// model reads for a token, whose caches hold what they can of it.
const WEIGHT_BYTES: (u64, u64) = (64 << 20, 1 << 30);

/// Part of the free memory that a buffer may take; there are two, and cells.
const MEMORY_PART: u64 = 6;

/// Passes over memory; fewer over much.
const PASSES: (usize, usize) = (5, 3);

/// Work items a thread of an empty fork, as many as products have.
const ITEMS_A_THREAD: usize = 6;

/// A tier, and the shape of cells that it gives a model's layers.
type TierShape = (KvType, KvType, KvShape);

/// A host that is being measured.
pub(super) struct Probe<'s> {
    subject: &'s Subject,
    isas: Vec<Isa>,
    formats: Vec<TensorType>,
    threads: usize,
    ubatch: usize,
    tiers: Vec<TierShape>,
    guess: Profile,
    source: Source,
    pool: Pool,
    one: Pool,
    /// All threads but one.
    fewer: Pool,
    file: Option<PathBuf>,
    host: Host,
}

/// The tiers that the subject's heads can be stored in.
fn tiers(heads: Option<Heads>) -> Vec<TierShape> {
    let all = TIERS.into_iter();
    all.filter_map(|(k, v)| Some((k, v, heads?.shape_of(k, v)?)))
        .collect()
}

/// Attention over a tier, to be done beside a GPU's copies.
pub(super) struct BesideCopies<'p> {
    /// Calls of one token in one layer.
    pub(super) bench: attention::Bench,
    /// All threads.
    pub(super) all: &'p Pool,
    /// All but the one that gives a GPU its work, as in a session.
    pub(super) fewer: &'p Pool,
    /// What is known of the tier.
    pub(super) rate: &'p mut AttentionRate,
    /// Bytes of one of its blocks.
    pub(super) block_bytes: usize,
    /// Layers of the model.
    pub(super) layers: usize,
}

/// Heads as profiles have them.
pub(super) fn head_shape(heads: Heads) -> HeadShape {
    HeadShape {
        heads: heads.heads as u64,
        heads_kv: heads.heads_kv as u64,
        head_k: heads.head_k as u64,
        head_v: heads.head_v as u64,
    }
}

/// How many figures that is.
pub(super) fn steps(subject: &Subject, settings: &Settings, formats: usize) -> usize {
    let memory = 1 + 2 * thread_counts(settings.threads()).len();
    let tiers = tiers(subject.heads).len();
    let products = 3 * formats * settings.isas().len();
    // An empty fork, staging, the disk.
    memory + 1 + products + 2 * tiers + tiers.min(1) + usize::from(subject.file.is_some())
}

impl<'s> Probe<'s> {
    /// Fills memory. `memory_bytes`: in all, and free.
    pub(super) fn new(
        subject: &'s Subject,
        settings: &Settings,
        formats: &[TensorType],
        memory_bytes: (u64, u64),
        clock: &mut Clock<'_>,
    ) -> Result<Self, Error> {
        let (total, available) = memory_bytes;
        let (low, high) = WEIGHT_BYTES;
        let bytes = subject.passing_bytes().clamp(low, high);
        let bytes = bytes.min(available / MEMORY_PART) as usize;
        clock.step("filling memory")?;
        let source = Source::new(bytes)?;
        let isas = settings.isas();
        let guess = default_profile();
        let mut host = guess.host.clone();
        host.memory_total_bytes = total;
        host.memory_available_bytes = available;
        isas[0].name().clone_into(&mut host.isa);
        host.products.clear();
        host.attention.clear();
        host.engage = Engage::default();
        (host.stage_gb_s, host.disk_read_gb_s) = (None, None);
        Ok(Self {
            subject,
            isas,
            formats: formats.to_vec(),
            threads: settings.threads(),
            ubatch: settings.ubatch,
            tiers: tiers(subject.heads),
            guess,
            source,
            pool: Pool::new(settings.threads(), settings.pinning)?,
            one: Pool::new(1, Pinning::Free)?,
            fewer: Pool::new(settings.threads().max(2) - 1, settings.pinning)?,
            file: subject.file.clone(),
            host,
        })
    }

    /// Reads of memory with all threads, an empty fork, products of one token, attention.
    pub(super) fn first(&mut self, clock: &mut Clock<'_>) -> Result<(), Error> {
        let counts = thread_counts(self.threads);
        self.host.read_gb_s.all = self.read(counts[counts.len() - 1], "all", clock)?;
        let (pool, items) = (&self.pool, self.threads * ITEMS_A_THREAD);
        let fork = Which {
            path: "host.fork_join_us",
            what: "an empty fork",
            guess: self.guess.host.fork_join_us,
        };
        self.host.fork_join_us = clock.sample(fork, |time| {
            Ok(1e6 * seconds_a_call(time, || pool.run(items, |_| ())))
        })?;
        let mut products = Vec::new();
        for &ty in &self.formats {
            let mut bench = self.products(ty)?;
            for &isa in &self.isas {
                bench.isa = isa;
                let mut rate = self.guessed_product(ty, isa);
                let guess = rate.decode_gb_s;
                rate.decode_gb_s = figure(ty, isa, "decode_gb_s", guess, |which| {
                    bench.decode(&self.pool, clock, which)
                })?;
                products.push(rate);
            }
        }
        self.host.products = products;
        for &(type_k, type_v, shape) in &self.tiers {
            let Some(heads) = self.subject.heads else {
                break;
            };
            let mut rate = self.guessed_attention(type_k, type_v, heads);
            let name = rate.name();
            let mut bench = attention::Bench::new(heads, shape, self.subject.layers, self.isas[0])?;
            (rate.ns_cell, rate.engage_us) =
                bench.slope_and_engage(&self.pool, clock, &name, &rate)?;
            self.host.attention.push(rate);
        }
        Ok(())
    }

    /// Products of many tokens and of one thread.
    pub(super) fn second(&mut self, clock: &mut Clock<'_>) -> Result<(), Error> {
        let mut rates = std::mem::take(&mut self.host.products);
        for (rates, &ty) in rates.chunks_mut(self.isas.len()).zip(&self.formats) {
            let mut bench = self.products(ty)?;
            for (rate, &isa) in rates.iter_mut().zip(&self.isas) {
                bench.isa = isa;
                let guess = rate.prefill_gmac_s;
                rate.prefill_gmac_s = figure(ty, isa, "prefill_gmac_s", guess, |which| {
                    bench.prefill(&self.pool, clock, which)
                })?;
                let guess = rate.decode_one_gb_s;
                rate.decode_one_gb_s = figure(ty, isa, "decode_one_gb_s", guess, |which| {
                    bench.decode(&self.one, clock, which)
                })?;
            }
        }
        self.host.products = rates;
        Ok(())
    }

    /// The rest: reads with fewer threads, copies, staging, the disk.
    pub(super) fn third(mut self, clock: &mut Clock<'_>) -> Result<Host, Error> {
        let counts = thread_counts(self.threads);
        let mut reads = vec![self.host.read_gb_s.all];
        for (&n, name) in counts.iter().zip(["one", "half"]).rev() {
            if n < self.threads {
                reads.insert(0, self.read(n, name, clock)?);
            }
        }
        self.host.read_gb_s = by_threads(&reads);
        let mut to =
            Buffer::new(self.source.bytes().len()).map_err(Error::memory("memory to copy to"))?;
        let mut copies = Vec::new();
        let names = ["one", "half", "all"];
        for (i, &n) in counts.iter().enumerate() {
            let name = if i + 1 == counts.len() {
                "all"
            } else {
                names[i]
            };
            let guess = &self.guess.host.copy_gb_s;
            let which = Which {
                path: &format!("host.copy_gb_s.{name}"),
                what: &format!("copying memory, {n} threads"),
                guess: if n == 1 { guess.one } else { guess.all },
            };
            let (source, passes) = (&self.source, self.passes());
            copies.push(clock.once(which, |_, _| Ok(source.copy(&mut to, n, passes)?.figure()))?);
        }
        self.host.copy_gb_s = by_threads(&copies);
        for field in ["read_gb_s", "copy_gb_s"] {
            for [of, path] in shared_counts(&counts, field) {
                clock.doubt_like(&of, &path);
            }
        }
        drop(to);
        if let (Some(heads), Some(&(_, _, shape))) = (self.subject.heads, self.tiers.first()) {
            let mut bench = attention::Bench::new(heads, shape, self.subject.layers, self.isas[0])?;
            let fork_us = self.host.fork_join_us.value;
            self.host.stage_gb_s = bench.stage(&self.pool, clock, fork_us)?;
        }
        if let Some(file) = &self.file {
            match disk::measure(file, clock)? {
                Disk::Rate(rate) => self.host.disk_read_gb_s = Some(rate),
                Disk::Cached => {
                    clock.note("the disk was not measured: the model's file lies in the page cache")
                }
                Disk::Unknown => {}
            }
        }
        Ok(self.host)
    }

    /// What a GPU's link runs beside: attention over each tier, as calls of one token in one layer.
    pub(super) fn attention(&mut self, i: usize) -> Result<Option<BesideCopies<'_>>, Error> {
        let known = self.subject.heads.zip(self.tiers.get(i));
        let Some(((heads, &(_, _, shape)), rate)) = known.zip(self.host.attention.get_mut(i))
        else {
            return Ok(None);
        };
        let bench = attention::Bench::new(heads, shape, self.subject.layers, self.isas[0])?;
        Ok(Some(BesideCopies {
            bench,
            all: &self.pool,
            fewer: &self.fewer,
            rate,
            block_bytes: shape.block_bytes(),
            layers: self.subject.layers,
        }))
    }

    /// And products with the weights of the first format.
    pub(super) fn weights(&self) -> Result<Option<(products::Bench<'_>, &Pool)>, Error> {
        let Some(&ty) = self.formats.first() else {
            return Ok(None);
        };
        Ok(Some((self.products(ty)?, &self.pool)))
    }

    fn products(&self, ty: TensorType) -> Result<products::Bench<'_>, Error> {
        let forks = self.subject.forks_of(ty);
        products::Bench::new(&self.source, forks, self.isas[0], self.threads, self.ubatch)
    }

    fn passes(&self) -> usize {
        if self.source.bytes().len() > (WEIGHT_BYTES.1 / 2) as usize {
            PASSES.1
        } else {
            PASSES.0
        }
    }

    fn read(&self, n: usize, name: &str, clock: &mut Clock<'_>) -> Result<Figure, Error> {
        let guess = &self.guess.host.read_gb_s;
        let which = Which {
            path: &format!("host.read_gb_s.{name}"),
            what: &format!("reading memory, {n} threads"),
            guess: if n == 1 { guess.one } else { guess.all },
        };
        clock.once(which, |_, _| {
            Ok(self.source.read(n, self.passes())?.figure())
        })
    }

    /// What the default profile says of a format.
    fn guessed_product(&self, ty: TensorType, isa: Isa) -> ProductRate {
        let known = &self.guess.host.products;
        let found = known.iter().find(|p| p.format == ty.name());
        // Every format that kernels compute is in it; of another one the first is as good a guess as any.
        let mut rate = found.unwrap_or(&known[0]).clone();
        ty.name().clone_into(&mut rate.format);
        isa.name().clone_into(&mut rate.isa);
        rate
    }

    fn guessed_attention(&self, type_k: KvType, type_v: KvType, heads: Heads) -> AttentionRate {
        let shape = head_shape(heads);
        let threads = self.guess.key.threads;
        let processor = Processor::cpu(&self.guess.host, threads, threads);
        guessed_attention(&processor, type_k, type_v, shape)
    }
}

/// What a processor that was not measured takes for attention.
pub(super) fn guessed_attention(
    processor: &Processor<'_>,
    type_k: KvType,
    type_v: KvType,
    shape: HeadShape,
) -> AttentionRate {
    let found = processor.attention(Tier::new(type_k, type_v), shape);
    AttentionRate {
        type_k,
        type_v,
        shape,
        ns_cell: Figure::exact(found.ns_cell),
        engage_us: Figure::exact(found.engage_us),
        least_us: None,
        kept: None,
        copies_gb_s: None,
        copies_kept: None,
    }
}

/// Measures a figure of a format's products.
fn figure(
    ty: TensorType,
    isa: Isa,
    field: &str,
    guess: Figure,
    measure: impl FnOnce(Which<'_>) -> Result<Figure, Error>,
) -> Result<Figure, Error> {
    let isa = isa.name();
    measure(Which {
        path: &format!("host.products[{} {isa}].{field}", ty.name()),
        what: &format!("products, {ty} {isa}, {field}"),
        guess,
    })
}

/// One thread, half of them, all; each number once.
fn thread_counts(threads: usize) -> Vec<usize> {
    let mut counts = vec![1, (threads / 2).max(1), threads];
    counts.dedup();
    counts
}

/// Paths of rates with a number of threads that has no rate of its own, each with that of the rate it is.
fn shared_counts(counts: &[usize], field: &str) -> Vec<[String; 2]> {
    let path = |name: &str| format!("host.{field}.{name}");
    match counts.len() {
        1 => vec![[path("all"), path("one")], [path("all"), path("half")]],
        2 => vec![[path("one"), path("half")]],
        _ => Vec::new(),
    }
}

/// Rates with the numbers of threads that there are.
fn by_threads(figures: &[Figure]) -> ByThreads {
    ByThreads {
        one: figures[0],
        half: figures[figures.len().saturating_sub(2)],
        all: figures[figures.len() - 1],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_counted_once() {
        assert_eq!(thread_counts(1), [1]);
        assert_eq!(thread_counts(2), [1, 2]);
        assert_eq!(thread_counts(3), [1, 3]);
        assert_eq!(thread_counts(16), [1, 8, 16]);
    }
}
