//! The staging ring on a device: slots that copies fill while the device computes.
//!
//! Copies go through streams of their own, in turns, so that the link does not rest between two of them. Nothing waits on the host: a copy
//! to a slot waits, on the device, for the work that reads what was in it, and work that reads a slot for the copy that fills it.

use cuda::stream::Timing;
use cuda::{Buffer, Device, Error, Event, Mailbox, Stream};
use std::ops::Range;

/// Streams that copy.
const STREAMS: usize = 2;

/// Slots, and who fills them.
#[derive(Debug)]
pub(super) struct Ring {
    slots: Vec<Slot>,
    streams: [Stream; STREAMS],
    /// Orders the streams that copy and the one that computes, where it is needed.
    order: Event,
    /// Whose turn it is.
    next: usize,
}

#[derive(Debug)]
struct Slot {
    buffer: Buffer<u8>,
    /// The copy that fills it is done.
    filled: Event,
    /// The work that reads it is done.
    read: Event,
}

impl Ring {
    /// A ring without slots.
    pub(super) fn new(device: &Device) -> Result<Self, Error> {
        Ok(Self {
            slots: Vec::new(),
            streams: [device.stream()?, device.stream()?],
            order: Event::new(device, Timing::Off)?,
            next: 0,
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
        let slot = |_| {
            Ok(Slot {
                buffer: Buffer::zeroed(stream, bytes)?,
                filled: Event::new(device, Timing::Off)?,
                read: Event::new(device, Timing::Off)?,
            })
        };
        self.slots = (0..slots).map(slot).collect::<Result<_, Error>>()?;
        // The zeros are written before anything is copied.
        self.slots
            .iter()
            .try_for_each(|slot| stream.record(&slot.read))
    }

    pub(super) fn bytes(&self) -> u64 {
        self.slots.iter().map(|s| s.buffer.bytes() as u64).sum()
    }

    pub(super) fn slot(&self, slot: usize) -> &Buffer<u8> {
        &self.slots[slot].buffer
    }

    /// Begins to fill a slot.
    pub(super) fn fill(
        &mut self,
        from: &Mailbox<u8>,
        at: Range<usize>,
        slot: usize,
    ) -> Result<(), Error> {
        let stream = &self.streams[self.next];
        self.next = (self.next + 1) % STREAMS;
        let Slot {
            buffer,
            filled,
            read,
        } = &mut self.slots[slot];
        stream.wait(read)?;
        from.send(stream, at, buffer)?;
        stream.record(filled)
    }

    /// What is given to `stream` from here on finds a slot filled.
    pub(super) fn await_filled(&self, stream: &Stream, slot: usize) -> Result<(), Error> {
        stream.wait(&self.slots[slot].filled)
    }

    /// What was given to `stream` so far was the last to read a slot.
    pub(super) fn mark_read(&self, stream: &Stream, slot: usize) -> Result<(), Error> {
        stream.record(&self.slots[slot].read)
    }

    /// Does work on `stream` that writes host memory which slots are filled from: after the copies that were begun, before those that
    /// are to begin.
    pub(super) fn between_copies(
        &self,
        stream: &Stream,
        work: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        for copying in &self.streams {
            copying.record(&self.order)?;
            stream.wait(&self.order)?;
        }
        work()?;
        stream.record(&self.order)?;
        self.streams
            .iter()
            .try_for_each(|copying| copying.wait(&self.order))
    }
}
