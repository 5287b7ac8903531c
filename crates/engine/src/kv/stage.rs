//! The staging ring: which pieces of the tail are copied to the device when.
//!
//! A piece is one layer's part of a slab in host memory. A token needs the same pieces in the same order as the token before, layer after
//! layer, so copies run ahead as far as there are slots: over the layers, and over the end of the token. A piece that is not the one
//! expected (the tail has changed) is dropped, and the right one copied.

use super::store::{Id, Store, Version};
use crate::backend::Backend;
use std::collections::VecDeque;
use std::ops::Range;

/// Bytes that go in one copy, about: what a copy takes to begin is little beside them then.
const RUN_BYTES: usize = 4 << 20;

/// What a piece holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Key {
    layer: usize,
    id: Id,
    version: Version,
}

/// Slots, and what is in them or on its way there.
#[derive(Debug, Default)]
pub(super) struct Stage {
    /// In the order in which they became free: slots are used in turns, so that each piece comes to lie in the same one token after token.
    free: VecDeque<usize>,
    /// Copied ahead, in the order of use.
    ahead: VecDeque<(Key, usize)>,
    /// What is in host memory, in order.
    tail: Vec<(Id, Version)>,
    /// The first of it that each layer streams; it streams all after that, too.
    first: Vec<usize>,
    /// What all layers stream together.
    pieces: usize,
    /// The next piece to copy ahead: a layer, and a place in `tail`.
    next: (usize, usize),
    /// There are so many, and so many of them may be used.
    slots: usize,
    used: usize,
    /// Copied so far.
    copied_bytes: u64,
}

/// Layers that stream, by their bytes in a slab.
pub(super) type Layers = [Range<usize>];

impl Stage {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            free: (0..slots).collect(),
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
        let slots = turns(self.used, self.pieces);
        let first = self.first.get(layer).copied().unwrap_or(0);
        let pieces = self.tail.len().saturating_sub(first);
        if pieces + slots.div_ceil(4) <= slots {
            (pieces.max(1), true)
        } else {
            ((slots / 2).max(1), false)
        }
    }

    /// Says what is in host memory from now on, and from which piece on each layer streams it. What is on its way stays where it is
    /// if it is still of use.
    pub(super) fn set_tail(&mut self, tail: &mut Vec<(Id, Version)>, first: &mut Vec<usize>) {
        if self.tail == *tail && self.first == *first {
            return;
        }
        std::mem::swap(&mut self.tail, tail);
        std::mem::swap(&mut self.first, first);
        let each = self.first.iter().map(|&first| self.tail.len() - first);
        self.pieces = each.sum();
        self.ahead.clear();
        self.free.clear();
        self.free.extend(0..turns(self.used, self.pieces));
        self.next = self.first_of_layer(0);
    }

    /// A slot with a piece; it is the caller's until it is [given back](Self::give_back).
    pub(super) fn take<B: Backend>(
        &mut self,
        backend: &mut B,
        store: &Store<B>,
        layers: &Layers,
        layer: usize,
        at: usize,
    ) -> usize {
        let (id, version) = self.tail[at];
        let key = Key { layer, id, version };
        while let Some((found, slot)) = self.ahead.pop_front() {
            if found == key {
                return slot;
            }
            self.free.push_back(slot);
        }
        let slot = self
            .free
            .pop_front()
            .expect("callers hold fewer slots than there are");
        self.copy(backend, store, layers, &[key], slot);
        self.next = self.after(layer, at);
        slot
    }

    /// Gives slots back, and fills all that are free with what comes next.
    pub(super) fn give_back<B: Backend>(
        &mut self,
        backend: &mut B,
        store: &Store<B>,
        layers: &Layers,
        slots: &mut Vec<usize>,
    ) {
        self.free.extend(slots.drain(..));
        let run_max = (RUN_BYTES / layers.first().map_or(1, Range::len).max(1)).max(1);
        let mut run: Vec<Key> = Vec::with_capacity(run_max);
        let mut first = 0;
        // More than a token's pieces are never ahead.
        while self.ahead.len() < self.pieces
            && let Some(slot) = self.free.pop_front()
        {
            let (layer, at) = self.next;
            let (id, version) = self.tail[at];
            let key = Key { layer, id, version };
            let goes_on = run.last().is_some_and(|last| last.layer == layer)
                && slot == first + run.len()
                && run.len() < run_max;
            if !goes_on {
                self.copy(backend, store, layers, &run, first);
                run.clear();
                first = slot;
            }
            run.push(key);
            self.ahead.push_back((key, slot));
            self.next = self.after(layer, at);
        }
        self.copy(backend, store, layers, &run, first);
    }

    /// Begins to copy pieces of one layer to slots one behind the other.
    fn copy<B: Backend>(
        &mut self,
        backend: &mut B,
        store: &Store<B>,
        layers: &Layers,
        keys: &[Key],
        first_slot: usize,
    ) {
        let Some(Key { layer, .. }) = keys.first() else {
            return;
        };
        let from = |key: &Key| store.host(key.id).expect("the tail is in host memory");
        let from: Vec<&B::HostSlab> = keys.iter().map(from).collect();
        backend.stage(&from, layers[*layer].clone(), first_slot);
        self.copied_bytes += (keys.len() * layers[*layer].len()) as u64;
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

/// How many of `slots` slots are used in turns, if a token streams so many pieces: where nearly all of them divide the pieces evenly,
/// so many. Then every piece has the same slot in each token, and lists of them stay what they are.
fn turns(slots: usize, pieces: usize) -> usize {
    let most = slots.min(pieces);
    let even = (1..=most).rev().find(|n| pieces.is_multiple_of(*n));
    match even {
        Some(n) if 4 * n >= 3 * slots => n,
        _ => slots,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_divide_the_pieces_of_a_token_where_few_are_lost() {
        // 48 layers of 17 pieces; a prime number of pieces; fewer pieces than slots.
        assert_eq!(turns(34, 816), 34);
        assert_eq!(turns(40, 816), 34);
        assert_eq!(turns(32, 817), 32);
        assert_eq!(turns(8, 3), 8);
        assert_eq!(turns(8, 0), 8);
    }

    #[test]
    fn layers_without_pieces_are_passed_over() {
        let mut stage = Stage::new(4);
        let some = |n: u64| Version(n);
        let mut tail: Vec<_> = (0..3).map(|i| (Id(i), some(u64::from(i)))).collect();
        stage.set_tail(&mut tail, &mut vec![3, 1, 3, 2]);
        assert_eq!((stage.pieces, stage.next), (3, (1, 1)));
        assert_eq!(stage.after(1, 1), (1, 2));
        assert_eq!(stage.after(1, 2), (3, 2));
        assert_eq!(stage.after(3, 2), (1, 1));
        // None streams any.
        let mut tail = vec![(Id(0), some(0))];
        stage.set_tail(&mut tail, &mut vec![1, 1, 1, 1]);
        assert_eq!(stage.pieces, 0);
    }
}
