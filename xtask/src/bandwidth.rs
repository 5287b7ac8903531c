//! Memory read bandwidth: what a streaming read of a buffer in huge pages reaches, the same bytes again and again, as
//! decoding reads weights.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use cpu::mem::Buffer;
use serde::Serialize;

/// Passes over the buffer that count; the first one before them does not.
const PASSES: usize = 7;

/// Buffers below this would be read within the noise of starting a pass.
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

    /// Reads everything with this many threads. Every pass checks the sum, so that no read can be left out.
    pub fn measure(&self, threads: usize) -> Result<Bandwidth> {
        let part = self.words.len().div_ceil(threads.max(1));
        let parts: Vec<&[i32]> = self.words.chunks(part).collect();
        let barrier = Barrier::new(parts.len() + 1);
        let (times, sums) = thread::scope(|scope| {
            let workers: Vec<_> = parts
                .iter()
                .map(|part| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        let mut total = 0_i32;
                        for _ in 0..=PASSES {
                            barrier.wait();
                            total = total.wrapping_add(sum(black_box(part)));
                            barrier.wait();
                        }
                        total
                    })
                })
                .collect();
            let times: Vec<Duration> = (0..=PASSES)
                .map(|_| {
                    barrier.wait();
                    let begun = Instant::now();
                    barrier.wait();
                    begun.elapsed()
                })
                .skip(1)
                .collect();
            let sums = workers.into_iter().map(|w| w.join().expect("sums only"));
            (times, sums.fold(0, i32::wrapping_add))
        });
        let expected = self.sum.wrapping_mul(PASSES as i32 + 1);
        ensure!(
            sums == expected,
            "memory read as {sums:#x}, expected {expected:#x}"
        );
        let bytes = self.words.len() * size_of::<i32>();
        let mut rates: Vec<f64> = times
            .iter()
            .map(|t| bytes as f64 / t.as_secs_f64() / 1e9)
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
