//! Host memory that holds what a device has no room for: pinned, so that the device copies it by itself, or not, where no more may be pinned.

use std::ops::{Deref, Range};
use std::sync::Arc;

use cpu::mem::OutOfMemory;

use crate::device::Device;
use crate::error::{Error, length};
use crate::memory::{Buffer, Pinned};
use crate::stream::Stream;

/// Bytes in host memory.
#[derive(Debug)]
pub enum Spilled {
    /// Copies from and to it are given to a stream, and not waited for.
    Pinned(Part),
    /// Copies go through memory of the driver's, and are waited for.
    Pageable(Pageable),
}

/// A part of pinned memory.
#[derive(Debug)]
pub struct Part {
    of: Arc<Pinned<u8>>,
    at: usize,
    len: usize,
}

/// Host memory that may be paged out.
#[derive(Debug)]
pub struct Pageable {
    /// Where `memory` lies, as it was found while it was borrowed uniquely.
    at: *mut u8,
    memory: cpu::mem::Buffer<u8>,
}

// SAFETY: it owns its memory.
unsafe impl Send for Pageable {}
// SAFETY: writers are `receive` alone, which ends before anybody is told that there is something to read.
unsafe impl Sync for Pageable {}

impl Part {
    fn address(&self) -> *mut u8 {
        (self.of.address() + self.at as u64) as *mut u8
    }
}

impl Spilled {
    /// `n` parts of pinned memory of `bytes` each, one behind the other, all bytes zero.
    pub fn pinned(device: &Device, bytes: usize, n: usize) -> Result<Vec<Self>, Error> {
        let of = Arc::new(Pinned::new(device, bytes.saturating_mul(n))?);
        let part = |i| Part {
            of: Arc::clone(&of),
            at: i * bytes,
            len: bytes,
        };
        Ok((0..n).map(part).map(Self::Pinned).collect())
    }

    /// Other memory, all bytes zero.
    ///
    /// # Errors
    /// If the system has none.
    pub fn pageable(bytes: usize) -> Result<Self, OutOfMemory> {
        let mut memory = cpu::mem::Buffer::new(bytes)?;
        let at = memory.as_mut_ptr();
        Ok(Self::Pageable(Pageable { at, memory }))
    }

    /// Whether the device copies it by itself.
    pub fn is_pinned(&self) -> bool {
        matches!(self, Self::Pinned(_))
    }

    fn at(&self) -> *mut u8 {
        match self {
            Self::Pinned(part) => part.address(),
            Self::Pageable(pageable) => pageable.at,
        }
    }

    /// Copies all bytes of `from` here, in the stream's order.
    pub fn receive(&self, stream: &Stream, from: &Buffer<u8>) -> Result<(), Error> {
        if from.len() > self.len() {
            return length("receive", "bytes", self.len(), from.len());
        }
        // SAFETY: the memory is as long. Pinned memory is not freed before the copies to it are done; that whoever reads it meanwhile
        // finds old bytes among new ones is the reader's affair. Other memory lives until the stream has been waited for, below.
        unsafe { from.download_to(stream, 0, self.at(), from.len()) }?;
        match self {
            Self::Pinned(_) => Ok(()),
            Self::Pageable(_) => stream.synchronise(),
        }
    }

    /// Copies all bytes to the first ones of `to`, in the stream's order.
    pub fn send(&self, stream: &Stream, to: &mut Buffer<u8>) -> Result<(), Error> {
        match self {
            // SAFETY: pinned memory is not freed before the copies from it are done.
            Self::Pinned(_) => unsafe { to.upload_later(stream, 0, self) },
            Self::Pageable(_) => to.upload_at(stream, 0, self),
        }
    }

    /// Copies the bytes `range` of each of some to byte `first` of `to` and on, one behind the other, in the stream's order. They must be
    /// pinned. How many of the first ones this is for: as many as lie in the same pinned memory at even distances.
    pub fn send_even(
        all: &[Arc<Self>],
        stream: &Stream,
        range: Range<usize>,
        to: &mut Buffer<u8>,
        first: usize,
    ) -> Result<usize, Error> {
        const OP: &str = "send";
        let part = |i: usize| match all.get(i).map(|slab| &**slab) {
            Some(Self::Pinned(part)) => Some(part),
            _ => None,
        };
        let Some(base) = part(0) else {
            return length(OP, "pinned parts", 0, 1).map(|()| 0);
        };
        if range.end > base.len || range.start > range.end {
            length(OP, "bytes of a part", base.len, range.end)?;
        }
        let step = |i: usize| {
            let (before, part) = (part(i - 1)?, part(i)?);
            let same = Arc::ptr_eq(&before.of, &part.of) && part.len == base.len;
            // Rows do not overlap and lie in ascending order.
            let pitch = part.at.checked_sub(before.at)?;
            (same && pitch >= base.len).then_some(pitch)
        };
        let pitch = step(1).unwrap_or(base.len);
        let rows = (1..all.len())
            .take_while(|&i| step(i) == Some(pitch))
            .count()
            + 1;
        // SAFETY: every row is inside a part of the same pinned memory, which is not freed before the copies from it are done.
        unsafe {
            let from = base.address().add(range.start);
            to.upload_rows(stream, first, from, range.len(), pitch, rows)?;
        }
        Ok(rows)
    }
}

impl Deref for Spilled {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let len = match self {
            Self::Pinned(part) => part.len,
            Self::Pageable(pageable) => pageable.memory.len(),
        };
        // SAFETY: the memory's own bytes, all initialised.
        unsafe { std::slice::from_raw_parts(self.at(), len) }
    }
}
