//! The staging ring: which pieces of the tail are copied to the device when.
//!
//! A piece is one layer's part of a slab in host memory. A token needs the same pieces in the same order as the token before, layer after
//! layer, so copies run ahead as far as there are slots: over the layers, and over the end of the token. A piece that is not the one
//! expected (the tail has changed) is dropped, and the right one copied.

use super::store::{Id, Store, Version};
use crate::backend::Backend;
use std::collections::VecDeque;
use std::ops::Range;

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
    free: Vec<usize>,
    /// Copied ahead, in the order of use.
    ahead: VecDeque<(Key, usize)>,
    /// What each layer streams, in order.
    tail: Vec<(Id, Version)>,
    /// The next piece to copy ahead: a layer, and a place in `tail`.
    next: (usize, usize),
    slots: usize,
}

/// Layers that stream, by their bytes in a slab.
pub(super) type Layers = [Range<usize>];

impl Stage {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            free: (0..slots).collect(),
            slots,
            ..Self::default()
        }
    }

    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// Says what every layer streams from now on.
    pub(super) fn set_tail(&mut self, tail: &mut Vec<(Id, Version)>) {
        if self.tail != *tail {
            std::mem::swap(&mut self.tail, tail);
            self.free.extend(self.ahead.drain(..).map(|(_, slot)| slot));
            self.next = (0, 0);
        }
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
            self.free.push(slot);
        }
        let slot = self
            .free
            .pop()
            .expect("callers hold fewer slots than there are");
        self.copy(backend, store, layers, key, slot);
        self.next = self.after(layers, layer, at);
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
        self.free.append(slots);
        // More than a token's pieces are never ahead.
        let most = (self.tail.len() * layers.len()).min(self.slots);
        while self.ahead.len() < most
            && let Some(slot) = self.free.pop()
        {
            let (layer, at) = self.next;
            let (id, version) = self.tail[at];
            let key = Key { layer, id, version };
            self.copy(backend, store, layers, key, slot);
            self.ahead.push_back((key, slot));
            self.next = self.after(layers, layer, at);
        }
    }

    fn copy<B: Backend>(
        &self,
        backend: &mut B,
        store: &Store<B>,
        layers: &Layers,
        key: Key,
        slot: usize,
    ) {
        let from = store.host(key.id).expect("the tail is in host memory");
        backend.stage(from, layers[key.layer].clone(), slot);
    }

    fn after(&self, layers: &Layers, layer: usize, at: usize) -> (usize, usize) {
        if at + 1 < self.tail.len() {
            (layer, at + 1)
        } else {
            ((layer + 1) % layers.len(), 0)
        }
    }
}
