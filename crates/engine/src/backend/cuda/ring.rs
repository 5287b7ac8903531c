//! The staging ring on a device: slots that copies fill while the device computes.
//!
//! Copies go through a stream of their own; they have some MiB each, so that the link hardly rests between two of them. Nothing waits on the host;
//! who waits for whom on the device is [counted](super::batches).

use super::batches::Batches;
use super::tape::{Op, Tape};
use crate::backend::Transfers;
use cuda::stream::Timing;
use cuda::{Buffer, Error, Event, Pace, Slot as Bounce, Spilled, Stream};
use std::ops::Range;
use std::sync::Arc;

/// Pieces that are on their way through pinned memory at most.
const BOUNCES: usize = 16;

/// Slots, and who fills them.
#[derive(Debug)]
pub(super) struct Ring {
    /// All slots, one behind the other.
    buffer: Option<Buffer<u8>>,
    slot_bytes: usize,
    slots: Vec<Slot>,
    /// What copies, and what computes.
    copying: Stream,
    computing: Stream,
    /// Orders them, where it is needed.
    order: Event,
    batches: Batches,
    /// Pinned memory that what is not pinned goes through, once there is such, and whose turn it is.
    bounces: Vec<Bounce>,
    next_bounce: usize,
    /// Whether everything goes through it.
    host_copy: bool,
    /// A slower link, if that is asked for.
    pace: Option<Pace>,
}

#[derive(Debug)]
struct Slot {
    /// Nobody reads what a batch replaces any more that this slot is the first one of, and it is there.
    free: Event,
    filled: Event,
}

/// What the two streams are given for slots.
#[derive(Debug)]
pub(super) enum Deed {
    /// Slots from `first` on are filled, each from another host slab.
    Fill {
        from: Vec<Arc<Spilled>>,
        at: Range<usize>,
        first: usize,
    },
    /// All of a batch was given that begins with this slot.
    Filled(usize),
    /// What computes waits for that.
    Await(usize),
    /// What copies waits until nobody reads any more what the batch replaces that begins with this slot.
    Follow(usize),
}

impl Ring {
    /// A ring without slots.
    pub(super) fn new(stream: &Stream, transfers: &Transfers) -> Result<Self, Error> {
        let device = stream.device();
        let pace = transfers.link_gb_s.map(|gb_s| Pace::new(stream, gb_s));
        Ok(Self {
            buffer: None,
            slot_bytes: 0,
            slots: Vec::new(),
            copying: device.stream()?,
            computing: stream.clone(),
            order: Event::new(device, Timing::Off)?,
            batches: Batches::default(),
            bounces: Vec::new(),
            next_bounce: 0,
            host_copy: transfers.host_copy,
            pace: pace.transpose()?,
        })
    }

    /// Makes `slots` slots of `bytes` each.
    pub(super) fn resize(&mut self, slots: usize, bytes: usize) -> Result<(), Error> {
        let stream = self.computing.clone();
        let device = stream.device();
        (self.buffer, self.slot_bytes) = (None, bytes);
        self.slots.clear();
        self.batches.resize(slots);
        self.bounces.clear();
        if slots == 0 {
            return Ok(());
        }
        let slot = |_| {
            Ok(Slot {
                free: Event::new(device, Timing::Off)?,
                filled: Event::new(device, Timing::Off)?,
            })
        };
        self.buffer = Some(Buffer::zeroed(&stream, slots.saturating_mul(bytes))?);
        self.slots = (0..slots).map(slot).collect::<Result<_, Error>>()?;
        // The zeros are written before anything is copied.
        self.begin_batch(None)
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
        tape: Option<&mut Tape>,
        from: Vec<Arc<Spilled>>,
        at: Range<usize>,
        first: usize,
    ) -> Result<(), Error> {
        let mut tape = tape;
        if let Some(slot) = self.batches.fill(first, from.len()) {
            self.mark_free(tape.as_deref_mut(), slot)?;
        }
        self.act(tape, Deed::Fill { from, at, first })
    }

    /// What is given to compute with from here on finds slots filled.
    pub(super) fn await_filled(
        &mut self,
        mut tape: Option<&mut Tape>,
        slots: &[usize],
    ) -> Result<(), Error> {
        if let Some((ended, begins)) = self.batches.await_filled(slots) {
            if let Some(ended) = ended {
                self.act(tape.as_deref_mut(), Deed::Filled(ended))?;
            }
            self.act(tape, Deed::Await(begins))?;
        }
        Ok(())
    }

    /// A new batch begins, which waits for all that was given to compute with until then, for that reads what is in the slots.
    pub(super) fn begin_batch(&mut self, tape: Option<&mut Tape>) -> Result<(), Error> {
        match self.batches.begin() {
            Some(ended) => self.act(tape, Deed::Filled(ended)),
            None => Ok(()),
        }
    }

    /// What is copied to a batch of slots, which begins with `slot`, waits for all that was given to compute with so far.
    fn mark_free(&mut self, tape: Option<&mut Tape>, slot: usize) -> Result<(), Error> {
        let free = &self.slots[slot].free;
        match &tape {
            Some(tape) => tape.stream().record_in_graph(free)?,
            None => self.computing.record(free)?,
        }
        self.act(tape, Deed::Follow(slot))
    }

    /// Does it, or records it.
    fn act(&mut self, tape: Option<&mut Tape>, deed: Deed) -> Result<(), Error> {
        let Some(tape) = tape else {
            return self.execute(&deed);
        };
        let is_waiting = matches!(deed, Deed::Await(_));
        let op = Op::Ring(deed);
        if is_waiting {
            return tape.cut(op);
        }
        tape.behind(op);
        Ok(())
    }

    /// Does what was recorded.
    pub(super) fn execute(&mut self, deed: &Deed) -> Result<(), Error> {
        match deed {
            Deed::Fill { from, at, first } => self.copy(from, at.clone(), *first),
            Deed::Filled(slot) => self.copying.record(&self.slots[*slot].filled),
            Deed::Await(slot) => self.computing.wait(&self.slots[*slot].filled),
            Deed::Follow(slot) => self.copying.wait(&self.slots[*slot].free),
        }
    }

    fn copy(&mut self, from: &[Arc<Spilled>], at: Range<usize>, first: usize) -> Result<(), Error> {
        let (stream, slot_bytes) = (&self.copying, self.slot_bytes);
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
            None => copy(),
            Some(pace) => pace.copy(stream, bytes, copy),
        }
    }

    /// What was copied so far is there for what is given to compute with from here on, and read: what was recorded of it since was not done.
    pub(super) fn catch_up(&mut self) -> Result<(), Error> {
        self.copying.record(&self.order)?;
        self.computing.wait(&self.order)?;
        self.batches.catch_up();
        Ok(())
    }

    /// Gives work to compute with that writes host memory which slots are filled from: after the copies that were begun, before those that
    /// are to begin.
    pub(super) fn between_copies(
        &self,
        work: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.copying.record(&self.order)?;
        self.computing.wait(&self.order)?;
        work()?;
        self.computing.record(&self.order)?;
        self.copying.wait(&self.order)
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
