//! A sequence: which slabs hold its cells, and which of these are removed.

use super::store::Id;
use crate::backend::CELLS;
use std::collections::VecDeque;
use std::ops::Range;

/// The slabs of one kind of layer, from some block on.
#[derive(Debug, Clone, Default)]
pub(super) struct Track {
    /// Number of the first block that is kept.
    pub(super) first: usize,
    /// `None`: all cells of the block are removed.
    pub(super) slabs: VecDeque<Option<Id>>,
}

impl Track {
    /// One more than the last block.
    pub(super) fn end(&self) -> usize {
        self.first + self.slabs.len()
    }

    pub(super) fn get(&self, block: usize) -> Option<Id> {
        self.slabs[block - self.first]
    }

    pub(super) fn set(&mut self, block: usize, id: Option<Id>) {
        self.slabs[block - self.first] = id;
    }

    /// Blocks and their slabs, ascending.
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = (usize, Id)> {
        let slabs = self.slabs.iter().enumerate();
        slabs.filter_map(|(i, id)| id.map(|id| (self.first + i, id)))
    }
}

/// One sequence's cells.
#[derive(Debug, Clone, Default)]
pub(super) struct Sequence {
    /// Positions taken: the next token's.
    pub(super) n: usize,
    /// Of layers that see everything.
    pub(super) full: Track,
    /// Of layers with a window: blocks behind it are given up.
    pub(super) ring: Track,
    /// Cells that were removed: ascending, neither overlapping nor touching.
    pub(super) holes: Vec<Range<usize>>,
}

impl Sequence {
    /// Removes cells; their positions stay taken.
    pub(super) fn add_hole(&mut self, mut hole: Range<usize>) {
        if hole.is_empty() {
            return;
        }
        self.holes.retain(|other| {
            let apart = other.end < hole.start || hole.end < other.start;
            if !apart {
                hole = hole.start.min(other.start)..hole.end.max(other.end);
            }
            apart
        });
        let at = self.holes.partition_point(|other| other.end < hole.start);
        self.holes.insert(at, hole);
    }

    /// Forgets what is removed from cell `n` on, since these cells are gone altogether.
    pub(super) fn cut_holes(&mut self, n: usize) {
        self.holes.retain(|hole| hole.start < n);
        if let Some(last) = self.holes.last_mut() {
            last.end = last.end.min(n);
        }
    }

    /// The parts of a block's cells that are there, before position `n`.
    pub(super) fn parts(&self, block: usize, n: usize) -> impl Iterator<Item = (usize, usize)> {
        let start = block * CELLS;
        let end = (start + CELLS).min(n).max(start);
        let first = self.holes.partition_point(|hole| hole.end <= start);
        let mut at = start;
        let mut holes = self.holes[first..]
            .iter()
            .take_while(move |hole| hole.start < end);
        let mut done = false;
        std::iter::from_fn(move || {
            loop {
                if done {
                    return None;
                }
                let (part_end, next) = match holes.next() {
                    Some(hole) => (hole.start.max(start), hole.end),
                    None => {
                        done = true;
                        (end, end)
                    }
                };
                let part = at..part_end;
                at = next.max(at);
                if part.start < part.end {
                    return Some((part.start - start, part.end - start));
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn holes_and_parts_are_what_a_list_of_cells_says(
            holes in proptest::collection::vec((0usize..1000, 0usize..400), 0..8),
            n in 0usize..1100,
            cut in proptest::option::of(0usize..1000),
        ) {
            let mut sequence = Sequence::default();
            let mut there = vec![true; 1400];
            for (start, len) in holes {
                sequence.add_hole(start..start + len);
                there[start..start + len].fill(false);
            }
            if let Some(cut) = cut {
                sequence.cut_holes(cut);
                there[cut..].fill(true);
            }
            prop_assert!(sequence.holes.windows(2).all(|w| w[0].end < w[1].start));
            for block in 0..5 {
                let mut got = [false; CELLS];
                let mut last = 0;
                for (start, end) in sequence.parts(block, n) {
                    prop_assert!(last <= start && start < end && end <= CELLS);
                    last = end + 1;
                    got[start..end].fill(true);
                }
                for (i, got) in got.iter().enumerate() {
                    let cell = block * CELLS + i;
                    prop_assert_eq!(*got, cell < n && there[cell], "cell {}", cell);
                }
            }
        }
    }
}
