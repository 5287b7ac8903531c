//! Memory read bandwidth: what a streaming read of a buffer in huge pages reaches, the same bytes again and again, as
//! decoding reads weights.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread::{self, ScopedJoinHandle};
use std::time::Instant;

use anyhow::{Result, ensure};
use cpu::mem::Buffer;
use serde::Serialize;

/// Passes over the buffer that count; the first one before them does not.
const PASSES: usize = 7;

/// Bytes read in a pass, at least: small buffers are read several times, so that starting threads does not count.
const PASS_BYTES_MIN: usize = 512 << 20;

/// Smaller buffers would measure the first caches.
const BYTES_MIN: usize = 16 << 20;

/// Independent sums, so that additions do not wait for each other.
const SUMS: usize = 64;

/// How fast one buffer was read.
#[derive(Debug, Clone, Serialize)]
pub struct Bandwidth {
    /// Bytes of the buffer.
    pub bytes: u64,
    /// Threads that each read their part of it.
    pub threads: usize,
    /// Median over passes.
    pub gb_s_p50: f64,
    /// The best pass.
    pub gb_s_max: f64,
}

/// A filled buffer, and what its values add up to.
pub struct Source {
    words: Buffer<i32>,
    sum: i32,
}

impl Source {
    /// A buffer of about `bytes` in huge pages where the system has them.
    pub fn new(bytes: usize) -> Result<Self> {
        let n = bytes.max(BYTES_MIN) / size_of::<i32>();
        let mut words = Buffer::<i32>::new(n)?;
        let mut sum = 0_i32;
        for (i, word) in words.iter_mut().enumerate() {
            *word = (i as i32).wrapping_mul(0x9E37_79B1_u32 as i32);
            sum = sum.wrapping_add(*word);
        }
        Ok(Self { words, sum })
    }

    /// Reads everything with this many threads. The sum is checked, so that no read can be left out.
    pub fn measure(&self, threads: usize) -> Result<Bandwidth> {
        let bytes = self.words.len() * size_of::<i32>();
        let repeats = PASS_BYTES_MIN.div_ceil(bytes);
        let part = self.words.len().div_ceil(threads.max(1));
        let parts: Vec<&[i32]> = self.words.chunks(part).collect();
        let barrier = Barrier::new(parts.len());
        let workers: Vec<(i32, Vec<Pass>)> = thread::scope(|scope| {
            let read = |part| {
                let barrier = &barrier;
                scope.spawn(move || read(part, repeats, barrier))
            };
            let workers: Vec<_> = parts.iter().copied().map(read).collect();
            let join = |w: ScopedJoinHandle<'_, _>| w.join().expect("summing does not panic");
            workers.into_iter().map(join).collect()
        });
        let sum = workers.iter().fold(0_i32, |a, w| a.wrapping_add(w.0));
        let reads = (repeats * (PASSES + 1)) as i32;
        let expected = self.sum.wrapping_mul(reads);
        ensure!(
            sum == expected,
            "memory read as {sum:#x}, expected {expected:#x}"
        );
        // A pass lasts from the first thread's begin to the last one's end; the first pass warms up.
        let time = |pass: usize| {
            let ends = workers.iter().map(|w| w.1[pass].end);
            let begins = workers.iter().map(|w| w.1[pass].begin);
            ends.max().zip(begins.min()).map(|(end, begin)| end - begin)
        };
        let times = (1..=PASSES).filter_map(time);
        let mut rates: Vec<f64> = times
            .map(|t| (bytes * repeats) as f64 / t.as_secs_f64() / 1e9)
            .collect();
        rates.sort_unstable_by(f64::total_cmp);
        Ok(Bandwidth {
            bytes: bytes as u64,
            threads: parts.len(),
            gb_s_p50: rates[PASSES / 2],
            gb_s_max: rates[PASSES - 1],
        })
    }
}

/// When one thread read its part in one pass. Threads time themselves: one that only kept the time would have to wait for
/// a core.
#[derive(Debug, Clone, Copy)]
struct Pass {
    begin: Instant,
    end: Instant,
}

/// What a thread does: all passes over its part, and what they add up to.
fn read(part: &[i32], repeats: usize, barrier: &Barrier) -> (i32, Vec<Pass>) {
    let mut total = 0_i32;
    let mut passes = Vec::with_capacity(PASSES + 1);
    for _ in 0..=PASSES {
        barrier.wait();
        let begin = Instant::now();
        for _ in 0..repeats {
            total = total.wrapping_add(sum(black_box(part)));
        }
        let end = Instant::now();
        passes.push(Pass { begin, end });
    }
    (total, passes)
}

fn sum(words: &[i32]) -> i32 {
    let mut sums = [0_i32; SUMS];
    let pieces = words.chunks_exact(SUMS);
    let rest = pieces.remainder();
    for piece in pieces {
        for (s, &w) in sums.iter_mut().zip(piece) {
            *s = s.wrapping_add(w);
        }
    }
    sums.iter().chain(rest).fold(0, |a, &w| a.wrapping_add(w))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read_once() {
        let words: Vec<i32> = (0..1000).map(|i| i * i - 77_777).collect();
        for n in [0, 1, SUMS - 1, SUMS, SUMS + 1, 1000] {
            assert_eq!(sum(&words[..n]), words[..n].iter().sum::<i32>(), "{n}");
        }
    }

    #[test]
    fn a_wrong_sum_is_refused() {
        let mut source = Source::new(BYTES_MIN + 4).unwrap();
        for threads in [1, 3] {
            let read = source.measure(threads).unwrap();
            assert!(read.gb_s_p50 > 0.0 && read.gb_s_max >= read.gb_s_p50);
            assert_eq!((read.bytes, read.threads), (BYTES_MIN as u64 + 4, threads));
        }
        source.words[12_345] ^= 1;
        assert!(source.measure(2).is_err());
    }
}
