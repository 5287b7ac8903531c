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

/// What one copy brings: rows that lie apart in the host's memory, one behind the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Bytes of a row.
    pub width: usize,
    /// From one row to the next.
    pub pitch: usize,
    /// How many.
    pub rows: usize,
}

impl Rows {
    /// One row.
    pub fn one(bytes: usize) -> Self {
        Self {
            width: bytes,
            pitch: bytes,
            rows: 1,
        }
    }

    /// Bytes of a copy.
    pub fn bytes(&self) -> usize {
        self.width * self.rows
    }

    /// Of host memory, from the first row to the end of the last.
    fn span(&self) -> usize {
        self.pitch * (self.rows - 1) + self.width
    }

    /// The same, no further apart than so much memory has room for, and no more rows.
    fn within(self, bytes: usize) -> Self {
        let width = self.width.clamp(1, bytes.max(1));
        let rows = self.rows.clamp(1, (bytes / width).max(1));
        let room = (bytes - width.min(bytes)) / (rows - 1).max(1);
        Self {
            width,
            pitch: self.pitch.clamp(width, room.max(width)),
            rows,
        }
    }
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
        self.rate(way, from, Rows::one(bytes), time)
    }

    /// GB/s of pinned copies of such rows to the device, no more and no further apart than the buffers have room for, one after the other.
    pub fn rows_gb_s(&mut self, rows: Rows, time: Duration) -> Result<f64, Error> {
        self.rate(Way::Up, Memory::Pinned, rows, time)
    }

    fn rate(&mut self, way: Way, from: Memory, rows: Rows, time: Duration) -> Result<f64, Error> {
        let rows = rows.within(self.device.len());
        let wanted = time.as_secs_f64();
        let mut n = 1;
        loop {
            let begun = Instant::now();
            let by_device = self.copies(way, from, rows, n, |_| ())?.0;
            // Pageable copies are partly the host's work.
            let seconds = match from {
                Memory::Pinned => by_device,
                Memory::Pageable => begun.elapsed().as_secs_f64(),
            };
            if 2.0 * seconds >= wanted || n >= COPIES_MAX {
                return Ok((n * rows.bytes()) as f64 / seconds.max(1e-9) / 1e9);
            }
            let more = (n as f64 * wanted / seconds.max(1e-6)).ceil() as usize;
            n = more.clamp(n + 1, COPIES_MAX);
        }
    }

    /// GB/s of `copies` pinned copies of such rows to the device, while `work` is done, which asks whether the copies are done; and what
    /// it returns.
    pub fn beside<R>(
        &mut self,
        rows: Rows,
        copies: usize,
        work: impl FnOnce(&mut dyn FnMut() -> bool) -> R,
    ) -> Result<(f64, R), Error> {
        let rows = rows.within(self.device.len());
        let copies = copies.clamp(1, COPIES_MAX);
        let (seconds, result) = self.copies(Way::Up, Memory::Pinned, rows, copies, work)?;
        let bytes = copies * rows.bytes();
        Ok((bytes as f64 / seconds.max(1e-9) / 1e9, result))
    }

    /// Seconds of `n` copies by the device's clock, and what `work` returned, which was done meanwhile.
    fn copies<R>(
        &mut self,
        way: Way,
        from: Memory,
        rows: Rows,
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
                if *at + rows.span() > device.len() {
                    *at = 0;
                }
                let place = &mut host[*at..*at + rows.span()];
                // SAFETY: the memory is this link's, and nobody touches it before the stream has been waited for, below. All rows are
                // within the place.
                unsafe {
                    match way {
                        Way::Up if rows.rows > 1 => device.upload_rows(
                            stream,
                            *at,
                            place.as_ptr(),
                            rows.width,
                            rows.pitch,
                            rows.rows,
                        )?,
                        Way::Up => device.upload_later(stream, *at, place)?,
                        Way::Down => device.download_later(stream, *at, place)?,
                    }
                }
                *at += rows.width;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_as_far_apart_as_there_is_room() {
        let rows = |width, pitch, rows| Rows { width, pitch, rows };
        assert_eq!(Rows::one(5).within(100), rows(5, 5, 1));
        assert_eq!(Rows::one(500).within(100), rows(100, 100, 1));
        assert_eq!(rows(10, 20, 4).within(100), rows(10, 20, 4));
        assert_eq!(rows(10, 50, 4).within(100), rows(10, 30, 4));
        assert_eq!(rows(10, 50, 40).within(100), rows(10, 10, 10));
        for case in [rows(7, 11, 9), rows(64, 64, 1), rows(1, 1000, 3)] {
            let within = case.within(64);
            assert!(within.span() <= 64 && within.bytes() <= 64, "{within:?}");
        }
    }
}
