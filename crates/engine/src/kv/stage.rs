//! The staging ring: which pieces of the tail are copied to the device when.
//!
//! A piece is one layer's part of a slab in host memory. A token needs the same pieces in the same order as the token before, layer after
//! layer, so copies run ahead as far as there are slots: over the layers, and over the end of the token. A piece that is not the one
//! expected (the tail has changed) is dropped, and the right one copied.
//!
//! Copies go in batches, of half of the slots or a quarter where these hold much more than a layer streams: a device's two streams meet once a batch.

use super::store::{Id, Store, Version};
use crate::backend::Backend;
use std::collections::VecDeque;
use std::ops::Range;

/// Bytes that go in one copy, about: what a copy takes to begin is little beside them then.
const RUN_BYTES: usize = 4 << 20;

/// Pieces of so many bytes that go in one copy, at most.
pub(crate) fn pieces_a_run(piece_bytes: usize) -> usize {
    (RUN_BYTES / piece_bytes.max(1)).max(1)
}

/// What a piece holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Key {
    layer: usize,
    id: Id,
    version: Version,
}

/// Slots, and what is in them or on its way there.
///
/// A token's pieces are numbered through, and the next token's go on from the next multiple of the slots in use: so each piece lies in the same slot token
/// after token, and lists of them stay what they are. Slots are used in turns: a number's slot is free once the number so many before it was given back.
#[derive(Debug, Default)]
pub(super) struct Stage {
    /// Copied ahead, in the order of use.
    ahead: VecDeque<(Key, usize)>,
    /// What is in host memory, in order.
    tail: Vec<(Id, Version)>,
    /// The first of it that each layer streams; it streams all after that, too.
    first: Vec<usize>,
    /// What all layers stream together.
    pieces: u64,
    /// The next piece to copy ahead: a layer, and a place in `tail`; and its number.
    next: (usize, usize),
    next_number: u64,
    /// The number of the first piece whose slot is not free.
    oldest: u64,
    /// Pieces that were given back, and become free with the next batch.
    returned: usize,
    /// Whether what was begun may still read slots that are free.
    is_read: bool,
    /// Whether the token in work began, and the next one begins, with all slots filled. Two such tokens cut what they copy into batches at the same places, so
    /// what the second one waits for, of what the first one copied, is what every later one waits for.
    began_even: bool,
    is_even: bool,
    /// There are so many, and so many of them may be used.
    slots: usize,
    used: usize,
    /// Copied so far.
    copied_bytes: u64,
}

/// Layers that stream, by their bytes in a slab.
pub(super) type Layers = [Range<usize>];

/// What a stage has done.
pub(super) trait Copies {
    /// Bytes of a piece.
    fn piece_bytes(&self) -> usize;
    /// Slots are filled from here on that operations which were begun may still read.
    fn begin_batch(&mut self);
    /// Begins to copy a layer's pieces to slots from `first_slot` on, one behind the other.
    fn copy(&mut self, layer: usize, pieces: &[Id], first_slot: usize);
}

/// Copies by a backend, of what a store has in host memory.
pub(super) struct Copying<'a, B: Backend> {
    backend: &'a mut B,
    store: &'a Store<B>,
    layers: &'a Layers,
}

impl<'a, B: Backend> Copying<'a, B> {
    pub(super) fn new(backend: &'a mut B, store: &'a Store<B>, layers: &'a Layers) -> Self {
        Self {
            backend,
            store,
            layers,
        }
    }
}

impl<B: Backend> Copies for Copying<'_, B> {
    fn piece_bytes(&self) -> usize {
        self.layers.first().map_or(0, Range::len)
    }

    fn begin_batch(&mut self) {
        self.backend.begin_batch();
    }

    fn copy(&mut self, layer: usize, pieces: &[Id], first_slot: usize) {
        let from = |&id: &Id| self.store.host(id).expect("the tail is in host memory");
        let from: Vec<&B::HostSlab> = pieces.iter().map(from).collect();
        let at = self.layers[layer].clone();
        self.backend.stage(&from, at, first_slot);
    }
}

impl Stage {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            slots,
            used: slots,
            ..Self::default()
        }
    }

    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// What was copied so far.
    pub(super) fn copied_bytes(&self) -> u64 {
        self.copied_bytes
    }

    /// Uses only the first so many slots, at least one if there are any. Only between two steps.
    pub(super) fn limit(&mut self, slots: usize) {
        self.used = slots.clamp(1, self.slots.max(1)).min(self.slots);
        // The next step says anew what it streams.
        self.first.clear();
    }

    /// Pieces of a layer that are attended at once, and whether that is all of them. Where a quarter of the slots is left to be filled meanwhile
    /// they are; else while one half of the slots is attended the other is filled.
    pub(super) fn at_once(&self, layer: usize) -> (usize, bool) {
        let slots = self.used;
        let first = self.first.get(layer).copied().unwrap_or(0);
        let pieces = self.tail.len().saturating_sub(first);
        if pieces + slots.div_ceil(4) <= slots {
            (pieces.max(1), true)
        } else {
            ((slots / 2).max(1), false)
        }
    }

    /// Says what is in host memory from now on, and from which piece on each layer streams it. What is on its way stays where it is
    /// if it is still of use. Returns whether the next token copies what the one before copied, in the same batches, and waits for the same: that one must have begun
    /// with all slots filled, too.
    pub(super) fn set_tail(
        &mut self,
        tail: &mut Vec<(Id, Version)>,
        first: &mut Vec<usize>,
    ) -> bool {
        if self.tail == *tail && self.first == *first {
            let before = std::mem::replace(&mut self.began_even, self.is_even);
            return (before && self.is_even) || self.pieces == 0;
        }
        std::mem::swap(&mut self.tail, tail);
        std::mem::swap(&mut self.first, first);
        let each = self.first.iter().map(|&first| self.tail.len() - first);
        self.pieces = each.sum::<usize>() as u64;
        self.restart(self.first_of_layer(0));
        false
    }

    /// Says that what the token before had copied was copied again.
    pub(super) fn repeat(&mut self, layers: &Layers) {
        let bytes = layers.first().map_or(0, Range::len) as u64;
        self.copied_bytes += self.pieces * bytes;
    }

    /// Forgets what was copied ahead, and goes on from a piece.
    fn restart(&mut self, next: (usize, usize)) {
        let (layer, at) = next;
        let before = self.first.iter().take(layer);
        let before: usize = before.map(|&first| self.tail.len() - first).sum();
        let own = at.saturating_sub(self.first.get(layer).copied().unwrap_or(0));
        self.next = next;
        self.next_number = (before + own) as u64;
        self.oldest = self.next_number;
        self.returned = 0;
        self.is_read = true;
        (self.began_even, self.is_even) = (false, false);
        self.ahead.clear();
    }

    /// Slots that are used in turns: no more than there are pieces.
    fn turn(&self) -> u64 {
        (self.used as u64).min(self.pieces).max(1)
    }

    /// Numbers from a token's first piece to the next token's.
    fn token(&self) -> u64 {
        self.pieces.max(1).next_multiple_of(self.turn())
    }

    /// The number of the piece after that of some number.
    fn number_after(&self, number: u64) -> u64 {
        let token = self.token();
        if (number + 1) % token < self.pieces {
            number + 1
        } else {
            (number + 1).next_multiple_of(token)
        }
    }

    /// A slot with a piece; it is the caller's until it is [given back](Self::give_back).
    pub(super) fn take(&mut self, copies: &mut impl Copies, layer: usize, at: usize) -> usize {
        let (id, version) = self.tail[at];
        let key = Key { layer, id, version };
        match self.ahead.pop_front() {
            Some((found, slot)) if found == key => return slot,
            // A step that was not ended.
            Some(_) => self.restart((layer, at)),
            None if self.next != (layer, at) => self.restart((layer, at)),
            None => {}
        }
        let slot = self.free_slot();
        let slot = slot.or_else(|| {
            self.recycle();
            self.free_slot()
        });
        let slot = slot.expect("callers hold fewer slots than there are");
        self.copy(copies, &[key], slot);
        self.advance();
        slot
    }

    /// The next piece's slot, if it is free.
    fn free_slot(&self) -> Option<usize> {
        let turn = self.turn();
        (self.next_number < self.oldest + turn).then_some((self.next_number % turn) as usize)
    }

    /// The next piece is the one after it.
    fn advance(&mut self) {
        let (layer, at) = self.next;
        self.next = self.after(layer, at);
        self.next_number = self.number_after(self.next_number);
    }

    /// Slots that were given back are free.
    fn recycle(&mut self) {
        self.is_read |= self.returned > 0;
        for _ in 0..std::mem::take(&mut self.returned) {
            self.oldest = self.number_after(self.oldest);
        }
    }

    /// Gives the slots of so many pieces back, the oldest ones, and fills all that are free with what comes next, unless so much is there that it can wait
    /// and the token goes on.
    pub(super) fn give_back(&mut self, copies: &mut impl Copies, slots: &mut Vec<usize>) {
        let given = slots.len();
        self.returned += given;
        slots.clear();
        // What the next layer needs is there then, and as much again. Where the CPU takes a part of the tail, which is where the link has as much to do as
        // can be done meanwhile, it must not rest: it is told of free slots sooner.
        let turn = self.turn() as usize;
        let shares = self.first.iter().any(|&first| first > 0);
        let enough = if shares { turn * 3 / 4 } else { turn / 2 };
        let enough = enough.max(2 * given);
        let coming = (0..self.returned).fold(self.oldest, |number, _| self.number_after(number));
        let ends_token = coming.is_multiple_of(self.token());
        self.is_even = false;
        if self.ahead.len() > enough && !ends_token {
            return;
        }
        self.recycle();
        let run_max = pieces_a_run(copies.piece_bytes());
        let mut run: Vec<Key> = Vec::with_capacity(run_max);
        let mut first = 0;
        while self.pieces > 0
            && let Some(slot) = self.free_slot()
        {
            let (layer, at) = self.next;
            let (id, version) = self.tail[at];
            let key = Key { layer, id, version };
            let goes_on = run.last().is_some_and(|last| last.layer == layer)
                && slot == first + run.len()
                && run.len() < run_max;
            if !goes_on {
                self.copy(copies, &run, first);
                run.clear();
                first = slot;
            }
            run.push(key);
            self.ahead.push_back((key, slot));
            self.advance();
        }
        self.copy(copies, &run, first);
        self.is_even = ends_token;
    }

    /// Begins to copy pieces of one layer to slots one behind the other.
    fn copy(&mut self, copies: &mut impl Copies, keys: &[Key], first_slot: usize) {
        let Some(Key { layer, .. }) = keys.first() else {
            return;
        };
        if std::mem::take(&mut self.is_read) {
            copies.begin_batch();
        }
        let pieces: Vec<Id> = keys.iter().map(|key| key.id).collect();
        copies.copy(*layer, &pieces, first_slot);
        self.copied_bytes += (keys.len() * copies.piece_bytes()) as u64;
    }

    fn after(&self, layer: usize, at: usize) -> (usize, usize) {
        if at + 1 < self.tail.len() {
            (layer, at + 1)
        } else {
            self.first_of_layer(layer + 1)
        }
    }

    /// The first piece of a layer, or of the next one that streams any.
    fn first_of_layer(&self, layer: usize) -> (usize, usize) {
        let n = self.first.len();
        let layers = (0..n).map(|i| (layer + i) % n);
        let mut streaming = layers.filter(|&layer| self.first[layer] < self.tail.len());
        streaming
            .next()
            .map_or((0, 0), |layer| (layer, self.first[layer]))
    }
}

#[cfg(test)]
mod tests;
