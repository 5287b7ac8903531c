//! Pieces that go through staging slots: filled by any thread, emptied in the background.
//!
//! Slots are used in turn, first in, first out, so that the next one has had the longest time to arrive. There are more than threads: one
//! that looks for a slot finds one, and waits for its last piece to arrive at most.

use super::load::{Fill, Sink};
use super::pieces::Piece;
use crate::error::Error;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// What carries slots to their places.
pub(super) trait Carrier: Sync {
    /// Memory for a piece, and whether it is under way.
    type Slot: Send;

    /// The slot's memory. Waits until what it carried last has arrived.
    fn memory<'s>(&self, slot: &'s mut Self::Slot) -> Result<&'s mut [u8], Error>;
    /// Sends a slot, filled with a piece, on its way.
    fn send(&self, slot: &mut Self::Slot, piece: &Piece) -> Result<(), Error>;
}

/// A carrier and its slots.
pub(super) struct Staged<C: Carrier> {
    carrier: C,
    slots: Mutex<VecDeque<C::Slot>>,
}

impl<C: Carrier> Staged<C> {
    /// With [`slots`] slots for the threads that will fill them.
    pub(super) fn new(carrier: C, slots: impl IntoIterator<Item = C::Slot>) -> Self {
        Self {
            carrier,
            slots: Mutex::new(slots.into_iter().collect()),
        }
    }

    /// The carrier, without its slots.
    pub(super) fn into_carrier(self) -> C {
        self.carrier
    }

    fn with_slots<T>(&self, f: impl FnOnce(&mut VecDeque<C::Slot>) -> T) -> T {
        // A thread that panics holds no slot's lock: nothing is left half-done.
        f(&mut self.slots.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// How many slots keep `threads` threads filling while as many are under way.
pub(super) fn slots(threads: usize) -> usize {
    2 * threads + 2
}

impl<C: Carrier> Sink for Staged<C> {
    fn put(&self, _: usize, piece: &Piece, fill: Fill<'_>) -> Result<(), Error> {
        let taken = self.with_slots(VecDeque::pop_front);
        let mut slot = taken.expect("there are more slots than threads");
        let memory = self.carrier.memory(&mut slot);
        let filled = memory.and_then(|memory| fill(&mut memory[..piece.at.len()]));
        let sent = filled.and_then(|()| self.carrier.send(&mut slot, piece));
        self.with_slots(|slots| slots.push_back(slot));
        sent
    }
}
