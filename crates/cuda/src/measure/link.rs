//! Copies between host and device.

use std::time::{Duration, Instant};

use super::Timer;
use crate::device::Device;
use crate::error::Error;
use crate::memory::{Buffer, Pinned};

/// Copies between two marks at most.
const COPIES_MAX: usize = 16_384;

/// Where copies go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// To the device.
    Up,
    /// From the device.
    Down,
}

/// Which host memory they are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Memory that the device copies by itself.
    Pinned,
    /// Any other, which goes through the driver's own buffers.
    Pageable,
}

/// The link between host and device.
#[derive(Debug)]
pub struct Link {
    timer: Timer,
    device: Buffer<u8>,
    pinned: Pinned<u8>,
    pageable: Vec<u8>,
    /// Where the next copy begins.
    at: usize,
}

impl Link {
    /// With buffers of so many bytes, through which copies go round: more than the host's caches hold.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, Error> {
        let timer = Timer::new(device)?;
        Ok(Self {
            device: Buffer::zeroed(&timer.stream, bytes)?,
            pinned: Pinned::new(device, bytes)?,
            // Other than zero, so that every page is one of its own.
            pageable: vec![1; bytes],
            timer,
            at: 0,
        })
    }

    /// GB/s of copies of `bytes` each (at most the buffers' size), one after the other.
    pub fn gb_s(
        &mut self,
        way: Way,
        from: Memory,
        bytes: usize,
        time: Duration,
    ) -> Result<f64, Error> {
        let bytes = bytes.min(self.device.len());
        let wanted = time.as_secs_f64();
        let mut n = 1;
        loop {
            let begun = Instant::now();
            let by_device = self.copies(way, from, bytes, n, |_| ())?.0;
            // Pageable copies are partly the host's work.
            let seconds = match from {
                Memory::Pinned => by_device,
                Memory::Pageable => begun.elapsed().as_secs_f64(),
            };
            if 2.0 * seconds >= wanted || n >= COPIES_MAX {
                return Ok((n * bytes) as f64 / seconds.max(1e-9) / 1e9);
            }
            let more = (n as f64 * wanted / seconds.max(1e-6)).ceil() as usize;
            n = more.clamp(n + 1, COPIES_MAX);
        }
    }

    /// GB/s of `copies` pinned copies to the device of `bytes` each, while `work` is done, which asks whether the copies are done; and what
    /// it returns.
    pub fn beside<R>(
        &mut self,
        bytes: usize,
        copies: usize,
        work: impl FnOnce(&mut dyn FnMut() -> bool) -> R,
    ) -> Result<(f64, R), Error> {
        let bytes = bytes.min(self.device.len());
        let copies = copies.clamp(1, COPIES_MAX);
        let (seconds, result) = self.copies(Way::Up, Memory::Pinned, bytes, copies, work)?;
        Ok(((copies * bytes) as f64 / seconds.max(1e-9) / 1e9, result))
    }

    /// Seconds of `n` copies by the device's clock, and what `work` returned, which was done meanwhile.
    fn copies<R>(
        &mut self,
        way: Way,
        from: Memory,
        bytes: usize,
        n: usize,
        work: impl FnOnce(&mut dyn FnMut() -> bool) -> R,
    ) -> Result<(f64, R), Error> {
        let Timer { stream, start, end } = &self.timer;
        let host: &mut [u8] = match from {
            Memory::Pinned => &mut self.pinned,
            Memory::Pageable => &mut self.pageable,
        };
        let (device, at) = (&mut self.device, &mut self.at);
        let mut give = || {
            stream.record(start)?;
            for _ in 0..n {
                if *at + bytes > device.len() {
                    *at = 0;
                }
                let place = &mut host[*at..*at + bytes];
                // SAFETY: the memory is this link's, and nobody touches it before the stream has been waited for, below.
                unsafe {
                    match way {
                        Way::Up => device.upload_later(stream, *at, place)?,
                        Way::Down => device.download_later(stream, *at, place)?,
                    }
                }
                *at += bytes;
            }
            stream.record(end)
        };
        let given = give();
        let result = work(&mut || given.is_err() || end.is_done().unwrap_or(true));
        let done = stream.synchronise();
        given.and(done)?;
        Ok((f64::from(end.elapsed_ms(start)?) / 1e3, result))
    }
}
