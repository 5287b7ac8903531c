//! Steps over tokens of several sequences.

use super::Cache;
use super::sequence::{Sequence, Track};
use super::store::{Id, Store};
use crate::backend::{Attending, Backend, CELLS, KvShape};
use crate::error::Error;
use std::ops::Range;

/// What one sequence takes in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Taking {
    pub(crate) sequence: usize,
    pub(crate) tokens: usize,
    /// Whether they are generated tokens, not a prompt's: the CPU takes its share.
    pub(crate) generated: bool,
}

/// The same in the step in work.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub(super) taking: Taking,
    /// Its number.
    pub(super) index: usize,
    /// The first token's row among those of the step, and its position.
    pub(super) row: usize,
    pub(super) position: usize,
    /// Which spans it attends, in layers that see everything and in the others.
    pub(super) full: Range<usize>,
    pub(super) ring: Range<usize>,
}

impl<B: Backend> Cache<B> {
    /// A sequence without tokens.
    pub(crate) fn create(&mut self) -> usize {
        self.add(Sequence::default())
    }

    /// Positions that a sequence has taken; `None`: there is none of this number.
    pub(crate) fn n_of(&self, sequence: usize) -> Option<usize> {
        Some(self.sequences.get(sequence)?.as_ref()?.n)
    }

    /// Bytes that a sequence takes beside those that it has, for so many tokens more.
    pub(crate) fn growth_bytes(&self, sequence: usize, tokens: usize) -> u64 {
        let (full, ring) = self.growth(sequence, tokens);
        self.bytes_of(full, ring)
    }

    /// Whether there is room for so many tokens more of some sequences at the same time.
    pub(crate) fn has_room(&self, growing: impl Iterator<Item = (usize, usize)>) -> bool {
        let there = (
            self.full.in_device() + self.full.in_host(),
            self.ring.in_device(),
        );
        let (full, ring) = growing
            .map(|(sequence, tokens)| self.growth(sequence, tokens))
            .fold(there, |all, one| (all.0 + one.0, all.1 + one.1));
        if self.full.device_max() == usize::MAX {
            return self.bytes_of(full, ring) <= self.bytes();
        }
        // What rings leave is no room for blocks that host memory may not take, and host memory none for rings.
        let (_, ring_max) = self.blocks_max();
        full <= self.full.device_max() + self.full.host_max() && ring <= ring_max
    }

    /// Blocks that a sequence takes beside those that it has, for so many tokens more: of layers that see everything, and of the others.
    fn growth(&self, sequence: usize, tokens: usize) -> (usize, usize) {
        let Some(Some(sequence)) = self.sequences.get(sequence) else {
            return (0, 0);
        };
        let blocks = sequence.n / CELLS..(sequence.n + tokens).div_ceil(CELLS);
        let wanting = |track: &Track, store: &Store<B>| {
            let is_there = |&block: &usize| {
                (track.first..track.end()).contains(&block)
                    && track.get(block).is_some_and(|id| !store.is_shared(id))
            };
            blocks.len() - blocks.clone().filter(is_there).count()
        };
        let full = if self.full_layers.is_empty() {
            0
        } else {
            wanting(&sequence.full, &self.full)
        };
        let ring = if self.ring_blocks == 0 {
            0
        } else {
            let ring = &sequence.ring;
            // Those behind the window are given up first.
            let first = blocks.end.saturating_sub(self.ring_blocks);
            let is_given_up =
                |&(block, id): &(usize, Id)| block < first && !self.ring.is_shared(id);
            let given_up = ring.iter().filter(is_given_up).count();
            let wanted = wanting(ring, &self.ring).min(self.ring_blocks);
            wanted.saturating_sub(given_up)
        };
        (full, ring)
    }

    /// Blocks that must be in device memory for so many tokens more of a sequence, and how many there can be.
    pub(crate) fn blocks_written(&self, taking: &Taking) -> (usize, usize) {
        let n = self.sequences[taking.sequence].as_ref().map_or(0, |s| s.n);
        let blocks = (n + taking.tokens).div_ceil(CELLS) - n / CELLS;
        (blocks, self.full.device_max())
    }

    /// Positions of the step in work, of one sequence after another.
    pub(crate) fn positions(&self) -> &[Range<usize>] {
        &self.positions
    }

    pub(super) fn reserve(&mut self, backend: &mut B, takings: &[Taking]) -> Result<(), Error> {
        let mut kept = Vec::new();
        for taking in takings {
            self.current = taking.sequence;
            let n = self.n();
            let blocks = n / CELLS..(n + taking.tokens).div_ceil(CELLS);
            if !self.full_layers.is_empty() {
                self.reserve_full(backend, &blocks, &mut kept)?;
            }
            if self.ring_blocks > 0 {
                self.reserve_ring(backend, &blocks)?;
            }
        }
        Ok(())
    }

    /// Says that the step's cells of all layers are written.
    pub(crate) fn advance(&mut self) {
        for Part { taking, .. } in &self.work {
            if let Some(sequence) = &mut self.sequences[taking.sequence] {
                sequence.n += taking.tokens;
            }
        }
    }
}

/// What a part of the step has to do with a layer's attention.
pub(super) fn attending<'a>(
    part: &Part,
    layer: usize,
    window: Option<usize>,
    shape: &'a KvShape,
    at: &'a Range<usize>,
) -> Attending<'a> {
    Attending {
        shape,
        at,
        window,
        position: part.position,
        part: part.index,
        row: part.row,
        tokens: part.taking.tokens,
        generated: part.taking.generated,
        layer,
    }
}
