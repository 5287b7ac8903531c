//! The staging ring on a device: slots that copies fill while the device computes.
//!
//! Copies go through a stream of their own; they have some MiB each, so that the link hardly rests between two of them. Nothing waits on the host, but on
//! the device a batch of copies waits for all work that was given before it, and work that reads a slot for the copy that fills it. Waits are given
//! once: a stream that waited for a copy is past all copies before it.

use crate::backend::Transfers;
use cuda::stream::Timing;
use cuda::{Buffer, Error, Event, Pace, Slot as Bounce, Spilled, Stream};
use std::ops::Range;

/// Pieces that are on their way through pinned memory at most.
const BOUNCES: usize = 16;

/// Slots, and who fills them.
#[derive(Debug)]
pub(super) struct Ring {
    /// All slots, one behind the other.
    buffer: Option<Buffer<u8>>,
    slot_bytes: usize,
    slots: Vec<Slot>,
    copying: Copying,
    /// Orders the stream that copies and the one that computes, where it is needed.
    order: Event,
    /// Pinned memory that what is not pinned goes through, once there is such, and whose turn it is.
    bounces: Vec<Bounce>,
    next_bounce: usize,
    /// Whether everything goes through it.
    host_copy: bool,
    /// A slower link, if that is asked for.
    pace: Option<Pace>,
}

/// The stream that copies.
#[derive(Debug)]
struct Copying {
    stream: Stream,
    /// Copies that were given to it.
    copies: u64,
    /// The last of them that was waited for.
    awaited: u64,
}

#[derive(Debug)]
struct Slot {
    /// A copy is done that this slot is the last one of.
    filled: Event,
    /// Which copy fills this slot, and whose event says that it is done.
    by: (u64, usize),
}

impl Ring {
    /// A ring without slots.
    pub(super) fn new(stream: &Stream, transfers: &Transfers) -> Result<Self, Error> {
        let device = stream.device();
        let pace = transfers.link_gb_s.map(|gb_s| Pace::new(stream, gb_s));
        let copying = Copying {
            stream: device.stream()?,
            copies: 0,
            awaited: 0,
        };
        Ok(Self {
            buffer: None,
            slot_bytes: 0,
            slots: Vec::new(),
            copying,
            order: Event::new(device, Timing::Off)?,
            bounces: Vec::new(),
            next_bounce: 0,
            host_copy: transfers.host_copy,
            pace: pace.transpose()?,
        })
    }

    /// Makes `slots` slots of `bytes` each.
    pub(super) fn resize(
        &mut self,
        stream: &Stream,
        slots: usize,
        bytes: usize,
    ) -> Result<(), Error> {
        let device = stream.device();
        (self.buffer, self.slot_bytes) = (None, bytes);
        self.slots.clear();
        self.bounces.clear();
        if slots == 0 {
            return Ok(());
        }
        let slot = |_| {
            Ok(Slot {
                filled: Event::new(device, Timing::Off)?,
                by: (0, 0),
            })
        };
        self.buffer = Some(Buffer::zeroed(stream, slots.saturating_mul(bytes))?);
        self.slots = (0..slots).map(slot).collect::<Result<_, Error>>()?;
        // The zeros are written before anything is copied.
        self.begin_batch(stream)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.buffer.as_ref().map_or(0, |b| b.bytes() as u64)
    }

    /// What holds a slot, and from which byte on.
    pub(super) fn slot(&self, slot: usize) -> (&Buffer<u8>, usize) {
        let buffer = self.buffer.as_ref().expect("there are slots");
        (buffer, slot * self.slot_bytes)
    }

    /// Begins to fill slots from `first` on, each from another host slab.
    pub(super) fn fill(
        &mut self,
        from: &[&Spilled],
        at: Range<usize>,
        first: usize,
    ) -> Result<(), Error> {
        let copying = &mut self.copying;
        let slots = first..first + from.len();
        let (stream, slot_bytes) = (&copying.stream, self.slot_bytes);
        let buffer = self.buffer.as_mut().expect("there are slots");
        let direct = !self.host_copy && from.iter().all(|slab| slab.is_pinned());
        let bytes = at.len() * from.len();
        let (bounces, next_bounce) = (&mut self.bounces, &mut self.next_bounce);
        let mut copy = || {
            let mut done = 0;
            while done < from.len() {
                let to = (first + done) * slot_bytes;
                if direct {
                    let rest = &from[done..];
                    done += Spilled::send_even(rest, stream, at.clone(), buffer, to)?;
                } else {
                    let bounce = bounce(bounces, next_bounce, stream, slot_bytes)?;
                    bounce.bytes()?[..at.len()].copy_from_slice(&from[done][at.clone()]);
                    bounce.send(stream, at.len(), buffer, to)?;
                    done += 1;
                }
            }
            Ok(())
        };
        match &mut self.pace {
            None => copy()?,
            Some(pace) => pace.copy(stream, bytes, copy)?,
        }
        copying.copies += 1;
        let last = slots.end - 1;
        for slot in &mut self.slots[slots] {
            slot.by = (copying.copies, last);
        }
        copying.stream.record(&self.slots[last].filled)
    }

    /// What is given to `stream` from here on finds slots filled.
    pub(super) fn await_filled(&mut self, stream: &Stream, slots: &[usize]) -> Result<(), Error> {
        let last = slots.iter().map(|&slot| self.slots[slot].by).max();
        if let Some((copy, whose)) = last.filter(|by| by.0 > self.copying.awaited) {
            stream.wait(&self.slots[whose].filled)?;
            self.copying.awaited = copy;
        }
        Ok(())
    }

    /// What is copied from here on waits for all that was given to `stream` so far, which reads what is in the slots.
    pub(super) fn begin_batch(&self, stream: &Stream) -> Result<(), Error> {
        stream.record(&self.order)?;
        self.copying.stream.wait(&self.order)
    }

    /// Does work on `stream` that writes host memory which slots are filled from: after the copies that were begun, before those that
    /// are to begin.
    pub(super) fn between_copies(
        &self,
        stream: &Stream,
        work: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let copying = &self.copying.stream;
        copying.record(&self.order)?;
        stream.wait(&self.order)?;
        work()?;
        stream.record(&self.order)?;
        copying.wait(&self.order)
    }
}

/// The next piece of pinned memory to go through; all are made when the first is needed.
fn bounce<'b>(
    bounces: &'b mut Vec<Bounce>,
    next: &mut usize,
    stream: &Stream,
    bytes: usize,
) -> Result<&'b mut Bounce, Error> {
    if bounces.is_empty() {
        let made = (0..BOUNCES).map(|_| Bounce::new(stream.device(), bytes));
        *bounces = made.collect::<Result<_, Error>>()?;
    }
    let at = *next % BOUNCES;
    *next = at + 1;
    Ok(&mut bounces[at])
}
