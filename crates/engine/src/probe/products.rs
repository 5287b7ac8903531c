//! Products: weights that one token passes a second, and multiply-adds with many tokens.
//!
//! Weights are a stretch of the [`Source`], a new one for each product: between two visits of the same bytes a whole
//! token's weights pass, as in a session. What a session does around a product belongs to it here, too: quantising the
//! input, and adding up where that passes twice.

use super::Error;
use super::bandwidth::Source;
use super::sample::{Clock, Which, seconds_a_call};
use super::subject::Fork;
use cpu::acts::Acts;
use cpu::mem::{ALIGN, Buffer};
use cpu::product::{Operand, Task, products};
use cpu::{Isa, Pool, ops};
use gguf::TensorType;
use place::profile::Figure;
use quant::act::{BLOCK32, Passes};
use quant::product::act_block;
use quant::tile::{ROWS, TileMatrix};
use std::time::{Duration, Instant};

/// Rows a thread of a product of many tokens: enough for its work items to be of even size.
const PREFILL_ROWS_A_THREAD: usize = 16 * ROWS;

/// Without vectors a token takes as long as any other, so few tell as much as many.
const PREFILL_TOKENS_SCALAR: usize = 16;

/// Measures the products of one format.
pub(super) struct Bench<'a> {
    /// The instruction set to measure with.
    pub(super) isa: Isa,
    weights: &'a [u8],
    /// Where the next matrix lies.
    at: usize,
    x: Buffer<f32>,
    acts: Acts,
    out: Buffer<f32>,
    forks: Vec<Fork>,
    /// The next fork.
    next: usize,
    ubatch: usize,
}

impl<'a> Bench<'a> {
    /// Room for a format's products of one token and of `ubatch` tokens.
    pub(super) fn new(
        source: &'a Source,
        forks: Vec<Fork>,
        isa: Isa,
        threads: usize,
        ubatch: usize,
    ) -> Result<Self, Error> {
        let k_max = forks.iter().map(|f| f.k).max().unwrap_or(0);
        let rows: usize = forks
            .iter()
            .map(|f| f.rows.iter().sum::<usize>() * f.passes.count())
            .max()
            .unwrap_or(0);
        let room = || {
            let mut x = Buffer::new(ubatch * k_max)?;
            for (i, x) in x.iter_mut().enumerate() {
                *x = ((i * 7919 % 2001) as f32 - 1000.0) / 1000.0;
            }
            Ok((
                x,
                Acts::new(ubatch.max(2), k_max)?,
                Buffer::new(rows.max(ubatch * threads * PREFILL_ROWS_A_THREAD))?,
            ))
        };
        let (x, acts, out) = room().map_err(Error::memory("a product to measure"))?;
        Ok(Self {
            isa,
            weights: source.bytes(),
            at: 0,
            x,
            acts,
            out,
            forks,
            next: 0,
            ubatch,
        })
    }

    /// GB/s of weights that one token passes.
    pub(super) fn decode(
        &mut self,
        pool: &Pool,
        clock: &mut Clock<'_>,
        which: Which<'_>,
    ) -> Result<Figure, Error> {
        let mut forks = Vec::new();
        clock.sample(which, |time| {
            if forks.is_empty() {
                forks = self.short_forks(pool, time);
                self.next = 0;
            }
            let (begun, mut bytes) = (Instant::now(), 0);
            loop {
                bytes += self.product(pool, &forks[self.next], 1);
                self.next = (self.next + 1) % forks.len();
                let spent = begun.elapsed();
                // Forks differ, so whole rounds are better, as long as one does not take too long.
                if spent >= time && (self.next == 0 || spent >= 3 * time / 2) {
                    return Ok(bytes as f64 / spent.as_secs_f64() / 1e9);
                }
            }
        })
    }

    /// Passes weights with one token until `is_done`; says how many bytes.
    pub(super) fn pass_until(&mut self, pool: &Pool, is_done: &mut dyn FnMut() -> bool) -> usize {
        let forks = self.forks.clone();
        let mut bytes = 0;
        while !is_done() {
            bytes += self.product(pool, &forks[self.next % forks.len()], 1);
            self.next = (self.next + 1) % forks.len();
        }
        bytes
    }

    /// The forks, with fewer rows where one would take longer than `time`.
    fn short_forks(&mut self, pool: &Pool, time: Duration) -> Vec<Fork> {
        let n_min = pool.threads() * ROWS;
        let mut least = self.forks[0].clone();
        least.rows = vec![n_min.min(least.rows[0])];
        // The first call reads its instructions.
        self.product(pool, &least, 1);
        let begun = Instant::now();
        let bytes = self.product(pool, &least, 1) as f64;
        let bytes_max = bytes * time.as_secs_f64() / begun.elapsed().as_secs_f64();
        let mut forks = self.forks.clone();
        for fork in &mut forks {
            let part = bytes_max / fork.bytes() as f64;
            if part < 1.0 {
                for n in &mut fork.rows {
                    *n = ((*n as f64 * part) as usize).max(n_min).min(*n);
                }
            }
        }
        forks
    }

    /// GMAC/s of products of a ubatch.
    pub(super) fn prefill(
        &mut self,
        pool: &Pool,
        clock: &mut Clock<'_>,
        which: Which<'_>,
    ) -> Result<Figure, Error> {
        // What reads the model's width stands for all.
        let k = self.forks[0].k;
        let n = pool.threads() * PREFILL_ROWS_A_THREAD;
        let fork = Fork {
            ty: self.forks[0].ty,
            k,
            rows: vec![n],
            passes: Passes::One,
        };
        let tokens = if self.isa == Isa::Scalar {
            self.ubatch.min(PREFILL_TOKENS_SCALAR)
        } else {
            self.ubatch
        };
        let macs = (n * k * tokens) as f64;
        clock.sample(which, |time: Duration| {
            let each = seconds_a_call(time, || {
                self.product(pool, &fork, tokens);
            });
            Ok(macs / each / 1e9)
        })
    }

    /// One fork of products of `tokens` tokens; returns the bytes of its weights.
    fn product(&mut self, pool: &Pool, fork: &Fork, tokens: usize) -> usize {
        let &Fork { ty, k, passes, .. } = fork;
        let x = &self.x[..tokens * k];
        let block = act_block(ty);
        if let Some(block) = block {
            self.acts.quantise(pool, self.isa, x, tokens, block, passes);
        }
        let acts = block.map(|block| (block, self.acts.view()));
        let of = |wanted: bool| acts.filter(|(b, _)| (*b == BLOCK32) == wanted).map(|a| a.1);
        let operand = Operand {
            x,
            tokens: acts.map_or(tokens, |(_, acts)| acts.tokens()),
            k,
            acts32: of(true),
            acts256: of(false),
        };
        let (mut out, mut tasks, mut total) = (&mut self.out[..], Vec::new(), 0);
        for &n in &fork.rows {
            let bytes = fork.matrix_bytes(n);
            if self.at + bytes > self.weights.len() {
                self.at = 0;
            }
            let (mine, rest) = out.split_at_mut(operand.tokens * n);
            out = rest;
            tasks.push(Task {
                w: TileMatrix::new(ty, n, k, &self.weights[self.at..self.at + bytes]),
                out: mine,
            });
            self.at += bytes.next_multiple_of(ALIGN);
            total += bytes;
        }
        products(pool, self.isa, &operand, &mut tasks);
        for task in tasks {
            let (first, second) = task.out.split_at_mut(tokens * task.w.n());
            if !second.is_empty() {
                ops::add(self.isa, first, second);
            }
        }
        total
    }
}

/// Formats that a kernel computes, in the order of their number.
pub(super) fn all_formats() -> Vec<TensorType> {
    let mut formats = quant::formats::supported().to_vec();
    formats.sort_unstable_by_key(|ty| ty.id());
    formats
}

#[cfg(test)]
mod tests {
    use super::super::subject::Subject;
    use super::*;
    use cpu::pool::Pinning;

    #[test]
    fn forks_that_would_take_too_long_get_fewer_rows() {
        let source = Source::new(16 << 20).unwrap();
        let pool = Pool::new(1, Pinning::Free).unwrap();
        let mut forks = Subject::ordinary().forks_of(TensorType::Q4_0);
        forks.truncate(2);
        let mut bench = Bench::new(&source, forks.clone(), Isa::Scalar, 1, 1).unwrap();
        let unchanged = bench.short_forks(&pool, Duration::from_secs(3600));
        assert_eq!(unchanged, forks);
        let short = bench.short_forks(&pool, Duration::from_nanos(1));
        assert_eq!(short[0].rows, [ROWS; 3]);
        assert_eq!(short[1].rows, [ROWS]);
    }

    #[test]
    fn every_format_is_multiplied_through_all_of_the_memory_and_gives_numbers() {
        let source = Source::new(16 << 20).unwrap();
        let pool = Pool::new(2, Pinning::Free).unwrap();
        for ty in all_formats() {
            // Two rows of each matrix are enough to see every path.
            let mut forks = Subject::ordinary().forks_of(ty);
            forks.truncate(4);
            for n in forks.iter_mut().flat_map(|f| &mut f.rows) {
                *n = 2 * ROWS + 2;
            }
            let mut bench = Bench::new(&source, forks.clone(), Isa::best(), 2, 20).unwrap();
            let mut visited = 0;
            while visited < source.bytes().len() + (2 << 20) {
                for fork in &forks {
                    bench.out.fill(0.0);
                    let bytes = bench.product(&pool, fork, 1);
                    let matrices: usize = fork.rows.iter().map(|&n| fork.matrix_bytes(n)).sum();
                    assert_eq!(bytes, matrices, "{ty}");
                    assert!(bench.at <= source.bytes().len());
                    visited += bytes;
                    let out = &bench.out[..fork.rows.iter().sum()];
                    assert!(out.iter().all(|x| x.is_finite()), "{ty}");
                    assert!(out.iter().all(|x| *x != 0.0), "{ty}: every row is computed");
                }
            }
        }
    }
}
