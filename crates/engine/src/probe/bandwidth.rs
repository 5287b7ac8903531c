//! Memory bandwidth: what streaming through a buffer in huge pages reaches, the same bytes again and again, as decoding
//! reads weights.

use super::Error;
use super::sample::figure;
use cpu::mem::Buffer;
use place::profile::Figure;
use serde::Serialize;
use std::hint::black_box;
use std::sync::Barrier;
use std::thread::{self, ScopedJoinHandle};
use std::time::Instant;

/// Bytes moved in a pass, at least: small buffers are passed several times, so that starting threads does not count.
const PASS_BYTES_MIN: usize = 256 << 20;

/// Smaller buffers would measure the first caches.
const BYTES_MIN: usize = 16 << 20;

/// Bytes that the pattern repeats after: an odd number of cache lines.
const PATTERN_BYTES: usize = (1 << 20) + 64;

/// Independent sums, so that additions do not wait for each other.
const SUMS: usize = 64;

/// How fast memory was read or copied.
#[derive(Debug, Clone, Serialize)]
pub struct Bandwidth {
    /// Bytes of the buffer.
    pub bytes: u64,
    /// Threads that each worked on their part of it.
    pub threads: usize,
    /// Every pass, slowest first. A copy counts each byte once.
    pub gb_s: Vec<f64>,
}

impl Bandwidth {
    /// The median pass.
    pub fn gb_s_p50(&self) -> f64 {
        self.figure().value
    }

    /// The best pass.
    pub fn gb_s_max(&self) -> f64 {
        self.gb_s.last().copied().unwrap_or(f64::NAN)
    }

    /// Median and spread.
    pub fn figure(&self) -> Figure {
        figure(&self.gb_s)
    }
}

/// A filled buffer, and what its words add up to.
///
/// Its bytes are `0x20 ..= 0x3b`: whatever number format they are read as, no float among them is zero, denormal, infinite
/// or NaN, so they also serve as weights whose products take as long as any.
#[derive(Debug)]
pub struct Source {
    bytes: Buffer<u8>,
    sum: u32,
}

impl Source {
    /// A buffer of about `bytes` in huge pages where the system has them.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new(bytes: usize) -> Result<Self, Error> {
        let len = bytes.max(BYTES_MIN).next_multiple_of(4);
        let mut bytes =
            Buffer::<u8>::new(len).map_err(Error::memory("a buffer to measure memory with"))?;
        let (first, rest) = bytes.split_at_mut(PATTERN_BYTES);
        for (i, byte) in first.iter_mut().enumerate() {
            let mixed = (i as u32).wrapping_mul(0x9E37_79B1) >> 24;
            *byte = 0x20 + ((mixed * 28) >> 8) as u8;
        }
        for piece in rest.chunks_mut(PATTERN_BYTES) {
            piece.copy_from_slice(&first[..piece.len()]);
        }
        let sum = sum(&bytes);
        Ok(Self { bytes, sum })
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Reads everything with this many threads, `passes` times. The sum is checked, so that no read can be left out.
    ///
    /// # Errors
    /// If the sum is wrong.
    pub fn read(&self, threads: usize, passes: usize) -> Result<Bandwidth, Error> {
        let parts: Vec<&[u8]> = self.bytes.chunks(self.part(threads)).collect();
        let repeats = PASS_BYTES_MIN.div_ceil(self.bytes.len());
        let (found, bandwidth) = self.timed(parts, passes, repeats, |part| sum(black_box(part)));
        let reads = u32::try_from(repeats * (passes + 1)).unwrap_or(u32::MAX);
        check("reading memory", found, self.sum.wrapping_mul(reads))?;
        Ok(bandwidth)
    }

    /// Copies everything to `to`, which is as long, with this many threads, `passes` times. What arrived is checked.
    ///
    /// # Errors
    /// If it is not what was sent.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy(
        &self,
        to: &mut Buffer<u8>,
        threads: usize,
        passes: usize,
    ) -> Result<Bandwidth, Error> {
        assert_eq!(to.len(), self.bytes.len(), "bytes to copy to");
        let part = self.part(threads);
        let parts: Vec<(&[u8], &mut [u8])> =
            self.bytes.chunks(part).zip(to.chunks_mut(part)).collect();
        let repeats = PASS_BYTES_MIN.div_ceil(self.bytes.len());
        let (_, bandwidth) = self.timed(parts, passes, repeats, |(from, to)| {
            to.copy_from_slice(black_box(from));
            black_box(to);
            0
        });
        check("copying memory", sum(to), self.sum)?;
        Ok(bandwidth)
    }

    /// Bytes a thread, whole words.
    fn part(&self, threads: usize) -> usize {
        self.bytes
            .len()
            .div_ceil(threads.max(1))
            .next_multiple_of(4)
    }

    /// `passes` over all parts after one that warms up, a thread a part.
    fn timed<P: Send>(
        &self,
        parts: Vec<P>,
        passes: usize,
        repeats: usize,
        work: impl Fn(&mut P) -> u32 + Sync,
    ) -> (u32, Bandwidth) {
        let (threads, barrier) = (parts.len(), Barrier::new(parts.len()));
        let each = |mut part| {
            let mut total = 0_u32;
            let mut times = Vec::with_capacity(passes + 1);
            for _ in 0..=passes {
                barrier.wait();
                let begin = Instant::now();
                for _ in 0..repeats {
                    total = total.wrapping_add(work(&mut part));
                }
                let end = Instant::now();
                times.push(Pass { begin, end });
            }
            (total, times)
        };
        let workers: Vec<(u32, Vec<Pass>)> = thread::scope(|scope| {
            let each = &each;
            let workers: Vec<_> = parts
                .into_iter()
                .map(|part| scope.spawn(move || each(part)))
                .collect();
            let join = |w: ScopedJoinHandle<'_, _>| w.join().expect("workers do not panic");
            workers.into_iter().map(join).collect()
        });
        // A pass lasts from the first thread's begin to the last one's end.
        let time = |pass: usize| {
            let ends = workers.iter().map(|w| w.1[pass].end);
            let begins = workers.iter().map(|w| w.1[pass].begin);
            ends.max().zip(begins.min()).map(|(end, begin)| end - begin)
        };
        let moved = (self.bytes.len() * repeats) as f64;
        let mut rates: Vec<f64> = (1..=passes)
            .filter_map(time)
            .map(|t| moved / t.as_secs_f64() / 1e9)
            .collect();
        rates.sort_unstable_by(f64::total_cmp);
        let total = workers.iter().fold(0_u32, |a, w| a.wrapping_add(w.0));
        let bandwidth = Bandwidth {
            bytes: self.bytes.len() as u64,
            threads,
            gb_s: rates,
        };
        (total, bandwidth)
    }
}

/// When one thread did its part in one pass. Threads time themselves: one that only kept the time would have to wait for
/// a core.
#[derive(Debug, Clone, Copy)]
struct Pass {
    begin: Instant,
    end: Instant,
}

fn check(what: &'static str, found: u32, expected: u32) -> Result<(), Error> {
    if found == expected {
        return Ok(());
    }
    Err(Error::Sum {
        what,
        found,
        expected,
    })
}

/// Sum of the words in `bytes`; what is left after the last whole word does not count.
fn sum(bytes: &[u8]) -> u32 {
    let (words, _) = bytes.as_chunks::<4>();
    let mut sums = [0_u32; SUMS];
    let (pieces, rest) = words.as_chunks::<SUMS>();
    for piece in pieces {
        for (sum, word) in sums.iter_mut().zip(piece) {
            *sum = sum.wrapping_add(u32::from_le_bytes(*word));
        }
    }
    let rest = rest.iter().map(|word| u32::from_le_bytes(*word));
    sums.into_iter().chain(rest).fold(0, u32::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read_once() {
        let words: Vec<u32> = (0..1000_u32)
            .map(|i| i.wrapping_mul(i).wrapping_sub(77_777))
            .collect();
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        for n in [0, 1, SUMS - 1, SUMS, SUMS + 1, 1000] {
            let expected = words[..n].iter().fold(0, |a: u32, &w| a.wrapping_add(w));
            assert_eq!(sum(&bytes[..4 * n]), expected, "{n}");
        }
    }

    #[test]
    fn a_wrong_sum_is_refused() {
        let mut source = Source::new(BYTES_MIN + 4).unwrap();
        let mut to = Buffer::new(BYTES_MIN + 4).unwrap();
        for threads in [1, 3] {
            for done in [
                source.read(threads, 3).unwrap(),
                source.copy(&mut to, threads, 3).unwrap(),
            ] {
                assert_eq!(done.gb_s.len(), 3);
                assert!(done.gb_s[0] > 0.0 && done.gb_s_max().is_finite());
                assert!(done.gb_s[0] <= done.gb_s_p50() && done.gb_s_p50() <= done.gb_s_max());
                assert_eq!((done.bytes, done.threads), (BYTES_MIN as u64 + 4, threads));
            }
        }
        assert_eq!(&*to, source.bytes());
        source.bytes[12_345] ^= 1;
        assert!(matches!(source.read(2, 1), Err(Error::Sum { .. })));
        assert!(matches!(source.copy(&mut to, 2, 1), Err(Error::Sum { .. })));
    }

    #[test]
    fn its_bytes_are_ordinary_numbers_in_every_format() {
        let source = Source::new(BYTES_MIN).unwrap();
        assert!(source.bytes().iter().all(|b| (0x20..=0x3b).contains(b)));
        for &ty in quant::formats::supported() {
            let mut values = vec![0.0; 256];
            let bytes = &source.bytes()[..256 / ty.block_len() * ty.block_bytes()];
            quant::formats::decode_row(ty, bytes, &mut values).unwrap();
            // A code in the middle of its range may stand for zero.
            assert!(values.iter().all(|v| v.is_normal() || *v == 0.0), "{ty}");
            assert!(values.iter().any(|v| v.is_normal()), "{ty}");
        }
    }
}
