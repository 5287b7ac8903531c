//! The KV cache: blocks of 256 cells, each in device or host memory, for any number of sequences.
//!
//! The blocks of all layers for the same 256 cells are one slab, which moves as a whole. Layers with a window have slabs of their own, of
//! which each sequence keeps a ring. New cells are written in device memory; when that is full, the oldest block goes to host
//! memory: not before, so nothing is spilled until the context has really grown that long. What is there is attended from there:
//! streamed through the staging ring, or, for generated tokens, by the CPU in whole groups of blocks.
//!
//! None of this changes a bit of any result: spans are attended in the order of positions, wherever they are.

pub(crate) mod file;
mod layer;
mod random;
mod sequence;
mod stage;
mod store;
#[cfg(test)]
mod tests;
mod together;

use crate::backend::{Again, Backend, CELLS, GROUP, KvShape};
use crate::error::Error;
use crate::model::Config;
use place::gate::Finding;
use sequence::Sequence;
use stage::Stage;
pub(crate) use stage::pieces_a_run;
use std::ops::Range;
use store::{Id, Store, Version};
use together::Part;
pub(crate) use together::Taking;

/// Where cells may be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Placing {
    /// Blocks of each layer that sees everything, in device memory; `None`: all.
    pub window_blocks: Option<usize>,
    /// Such blocks in host memory, at most.
    pub tail_blocks: usize,
    /// Slots of the staging ring, a block of one layer each.
    pub staging_slots: usize,
    /// The part of the tail that the CPU attends for generated tokens, 0 to 1.
    pub kv_share: f64,
    /// Whether that stays so.
    pub gating: Gating,
}

/// Whether the CPU's part of a tail is what it was set to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gating {
    /// It stays as it is.
    Off,
    /// It is where to begin only: measurements while running keep it, change it or drop it.
    On,
    /// They begin with what they found another time.
    Recalling(Finding),
}

impl Placing {
    /// Everything in device memory.
    pub const RESIDENT: Self = Self {
        window_blocks: None,
        tail_blocks: 0,
        staging_slots: 0,
        kv_share: 0.0,
        gating: Gating::Off,
    };

    /// Whether a context of so many cells may have some in host memory.
    pub fn spills(&self, n_ctx: usize) -> bool {
        self.window_blocks
            .is_some_and(|blocks| blocks < n_ctx.div_ceil(CELLS))
    }
}

/// How the cells of a session are spread, for reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Spread {
    /// Bytes of blocks in device memory.
    pub device_bytes: u64,
    /// Bytes of blocks in host memory.
    pub host_bytes: u64,
}

/// A layer's place in its slabs.
#[derive(Debug, Clone)]
struct LayerAt {
    windowed: bool,
    /// Among layers of its kind.
    index: usize,
    at: Range<usize>,
}

/// Where a span is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lies {
    Device,
    /// In host memory, as the `n`th piece of the tail: either the CPU attends it there, or it is streamed.
    Host(usize),
}

/// A span of the step in work, and where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reached {
    block: usize,
    cells: (usize, usize),
    id: Id,
    lies: Lies,
}

/// The cells of some sequences, one of which is in work.
#[derive(Debug)]
pub(crate) struct Cache<B: Backend> {
    shape: KvShape,
    n_ctx: usize,
    /// Sequences that there is room for.
    n_seq: usize,
    window: Option<usize>,
    /// The part of the tail that the CPU attends for generated tokens.
    kv_share: f64,
    layers: Vec<LayerAt>,
    /// Bytes in a slab of each layer that sees everything.
    full_layers: Vec<Range<usize>>,
    /// Blocks that a sequence keeps of layers with a window.
    ring_blocks: usize,
    full: Store<B>,
    ring: Store<B>,
    stage: Stage,
    sequences: Vec<Option<Sequence>>,
    current: usize,
    /// What the step in work takes, and its positions.
    work: Vec<Part>,
    positions: Vec<Range<usize>>,
    /// Whether the step in work is one generated token of each of some sequences.
    generated: bool,
    /// Whether it does what the step before did, that being such tokens, too.
    again: Again,
    /// What the step in work attends, in layers that see everything and in the others.
    full_spans: Vec<Reached>,
    ring_spans: Vec<Reached>,
    /// What the step before attended, and which part of it.
    spans_before: [Vec<Reached>; 2],
    work_before: Vec<Part>,
    is_unusual: bool,
    /// What the stores had moved when the step in work was planned.
    moves: (u64, u64),
    /// Groups of the tail that the CPU attends in the step in work, by layers that see everything.
    cpu_groups: Vec<usize>,
    /// Work space: what is in host memory, and from which piece on each layer streams it.
    tail: Vec<(Id, Version)>,
    first_streamed: Vec<usize>,
}

impl<B: Backend> Cache<B> {
    pub(crate) fn new(
        config: &Config,
        shape: KvShape,
        n_ctx: usize,
        n_seq: usize,
        ubatch: usize,
        placing: Placing,
    ) -> Self {
        let block = shape.block_bytes();
        let mut counts = [0, 0];
        let layers: Vec<LayerAt> = (0..config.n_layer)
            .map(|layer| {
                let windowed = config.window_of(layer).is_some();
                let count = &mut counts[usize::from(windowed)];
                let index = *count;
                *count += 1;
                LayerAt {
                    windowed,
                    index,
                    at: index * block..(index + 1) * block,
                }
            })
            .collect();
        let [n_full, n_ring] = counts;
        let full_blocks = n_ctx.div_ceil(CELLS);
        let ring_blocks = config.window.map_or(0, |window| {
            ((window + ubatch.min(n_ctx)).div_ceil(CELLS) + 1).min(full_blocks)
        });
        let spills = placing.spills(n_ctx) && n_full > 0;
        let (device_max, host_max, slots) = if spills {
            let window = placing.window_blocks.unwrap_or(usize::MAX);
            (
                window.max(1),
                placing.tail_blocks,
                placing.staging_slots.max(1),
            )
        } else {
            (usize::MAX, 0, 0)
        };
        Self {
            shape,
            n_ctx,
            n_seq,
            window: config.window,
            kv_share: placing.kv_share,
            layers,
            full_layers: (0..n_full).map(|i| i * block..(i + 1) * block).collect(),
            ring_blocks,
            full: Store::new(n_full * block, device_max, host_max),
            ring: Store::new(n_ring * block, usize::MAX, 0),
            stage: Stage::new(slots),
            sequences: vec![Some(Sequence::default())],
            current: 0,
            work: Vec::new(),
            positions: Vec::new(),
            generated: false,
            again: Again::No,
            spans_before: [Vec::new(), Vec::new()],
            work_before: Vec::new(),
            is_unusual: false,
            moves: (0, 0),
            full_spans: Vec::new(),
            ring_spans: Vec::new(),
            cpu_groups: Vec::new(),
            tail: Vec::new(),
            first_streamed: Vec::new(),
        }
    }

    pub(crate) fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// Staging slots, each a block of one layer.
    pub(crate) fn slots(&self) -> usize {
        self.stage.slots()
    }

    /// Bytes that were streamed to the staging slots so far.
    pub(crate) fn streamed_bytes(&self) -> u64 {
        self.stage.copied_bytes()
    }

    /// There are so many slots instead, before any is used.
    pub(crate) fn set_slots(&mut self, slots: usize) {
        self.stage = Stage::new(slots);
    }

    /// Bytes with a full context.
    pub(crate) fn bytes(&self) -> u64 {
        let (full, ring) = self.blocks_max();
        self.bytes_of(full, ring)
    }

    /// Blocks with a full context, which all sequences share: each but one may leave a block begun. No rings have more blocks than there are.
    fn blocks_max(&self) -> (usize, usize) {
        let full = self.n_ctx.div_ceil(CELLS) + self.n_seq.min(self.n_ctx) - 1;
        (full, (self.n_seq * self.ring_blocks).min(full))
    }

    /// Bytes of so many blocks of layers that see everything, and of the others.
    fn bytes_of(&self, full: usize, ring: usize) -> u64 {
        (full * self.full.slab_bytes() + ring * self.ring.slab_bytes()) as u64
    }

    /// Where what is there is now.
    pub(crate) fn spread(&self) -> Spread {
        let device = self.full.in_device() * self.full.slab_bytes()
            + self.ring.in_device() * self.ring.slab_bytes();
        Spread {
            device_bytes: device as u64,
            host_bytes: (self.full.in_host() * self.full.slab_bytes()) as u64,
        }
    }

    fn sequence(&self) -> &Sequence {
        self.sequences[self.current]
            .as_ref()
            .expect("the one in work exists")
    }

    fn parts(&mut self) -> (&mut Sequence, &mut Store<B>, &mut Store<B>) {
        let sequence = self.sequences[self.current].as_mut();
        (
            sequence.expect("the one in work exists"),
            &mut self.full,
            &mut self.ring,
        )
    }

    /// Positions that the sequence in work has taken.
    pub(crate) fn n(&self) -> usize {
        self.sequence().n
    }

    /// Tokens that can be taken at once: their blocks must all be in device memory.
    pub(crate) fn chunk_max(&self) -> usize {
        let room = self.full.device_max().saturating_mul(CELLS);
        room - self.n() % CELLS
    }

    /// Makes room for `tokens` more tokens of the sequence in work, at most [`chunk_max`](Self::chunk_max), and decides how the step reaches
    /// every cell. `generated`: the CPU takes its share.
    pub(crate) fn begin(
        &mut self,
        backend: &mut B,
        tokens: usize,
        generated: bool,
    ) -> Result<(), Error> {
        let taking = Taking {
            sequence: self.current,
            tokens,
            generated,
        };
        self.begin_all(backend, &[taking])
    }

    /// The same for tokens of several sequences, each of which is there once. All blocks that they
    /// [write](Self::blocks_written) have room in device memory.
    pub(crate) fn begin_all(&mut self, backend: &mut B, takings: &[Taking]) -> Result<(), Error> {
        let current = self.current;
        let reserved = self.reserve(backend, takings);
        self.current = current;
        reserved?;
        let is_generated = |taking: &Taking| taking.generated && taking.tokens == 1;
        let generated = takings.iter().all(is_generated);
        let was_generated = std::mem::replace(&mut self.generated, generated);
        let [full, ring] = &mut self.spans_before;
        std::mem::swap(full, &mut self.full_spans);
        std::mem::swap(ring, &mut self.ring_spans);
        std::mem::swap(&mut self.work_before, &mut self.work);
        let moves = (self.full.moves(), self.ring.moves());
        let groups_before = std::mem::take(&mut self.cpu_groups);
        let streams_again = self.plan(takings);
        let has_moved = moves != std::mem::replace(&mut self.moves, moves);
        let spans = |part: &Part| (part.full.clone(), part.ring.clone());
        self.is_unusual = has_moved || !was_generated || self.work.len() != self.work_before.len();
        let reaches_again = generated
            && !self.is_unusual
            && self
                .work
                .iter()
                .map(spans)
                .eq(self.work_before.iter().map(spans))
            && self.full_spans == self.spans_before[0]
            && self.ring_spans == self.spans_before[1];
        self.again = if self.is_all_there() {
            match reaches_again {
                true => Again::Resident,
                false => Again::Anew,
            }
        } else if reaches_again
            && takings.len() == 1
            && streams_again
            && self.cpu_groups == groups_before
        {
            Again::Spilled
        } else {
            Again::No
        };
        Ok(())
    }

    /// Whether the step in work does what others do not: it is the first after a prompt, or something had to be given memory, or moved, for it.
    pub(crate) fn is_unusual(&self) -> bool {
        self.is_unusual
    }

    /// Whether there are groups in host memory that the CPU can take.
    pub(crate) fn has_tail(&self) -> bool {
        self.first_in_host(self.sequence()) >= GROUP
    }

    /// Changes window, share and slots. Cells beyond the window go to host memory; those of the last block stay.
    pub(crate) fn place(&mut self, backend: &mut B, placing: &Placing) -> Result<(), Error> {
        self.kv_share = placing.kv_share;
        self.stage.limit(placing.staging_slots);
        if self.stage.slots() > 0 {
            let window = placing.window_blocks.unwrap_or(usize::MAX);
            self.full.set_device_max(window.max(1));
        }
        let last = self.sequence().full.iter().map(|(_, id)| id).next_back();
        self.make_room(backend, 0, last.as_slice())
    }

    /// Changes the part of the tail that the CPU attends.
    pub(crate) fn set_share(&mut self, share: f64) {
        self.kv_share = share;
    }

    /// Whether the step in work does what the step before did.
    pub(crate) fn again(&self) -> Again {
        self.again
    }

    /// Says that the step in work was done as the step before was, by someone who knew how.
    pub(crate) fn was_repeated(&mut self) {
        self.stage.repeat(&self.full_layers);
    }

    /// `kept`: slabs of other sequences that stay in device memory. Those of this one join them.
    fn reserve_full(
        &mut self,
        backend: &mut B,
        blocks: &Range<usize>,
        kept: &mut Vec<Id>,
    ) -> Result<(), Error> {
        let full = &self.sequence().full;
        let ready: Vec<Id> = full
            .iter()
            .filter(|(block, _)| blocks.contains(block))
            .map(|(_, id)| id)
            .filter(|&id| self.full.is_on_device(id) && !self.full.is_shared(id))
            .collect();
        let missing = blocks.len() - ready.len();
        kept.extend(ready);
        self.make_room(backend, missing, kept)?;
        let (sequence, store, _) = self.parts();
        for block in blocks.clone() {
            if block == sequence.full.end() {
                sequence.full.slabs.push_back(None);
            }
            let id = match sequence.full.get(block) {
                None => store.add(backend)?,
                Some(id) if store.is_shared(id) => store.unshare(backend, id)?,
                Some(id) => {
                    if !store.is_on_device(id) {
                        store.fetch(backend, id)?;
                    }
                    id
                }
            };
            sequence.full.set(block, Some(id));
            kept.push(id);
        }
        // After a sequence was cut device memory may have room for what had to go.
        for (_, id) in sequence.full.iter().rev() {
            if store.device_room() == 0 {
                break;
            }
            if store.is_on_device(id) {
                continue;
            }
            if store.provide(backend, 1).is_err() {
                store.stay();
                break;
            }
            store.fetch(backend, id)?;
        }
        Ok(())
    }

    /// Spills until device memory has room for `needed` slabs: the oldest blocks of the sequence in work first, then those of others,
    /// never some to keep. Where it has less memory than was planned, and cells may be in host memory, there is less room from then on.
    fn make_room(&mut self, backend: &mut B, needed: usize, keep: &[Id]) -> Result<(), Error> {
        self.spill_for(backend, needed, keep)?;
        while let Err(error) = self.full.provide(backend, needed) {
            if self.full.host_room() == 0 {
                return Err(error);
            }
            self.full.stay();
            let cells = self.full.device_max() * CELLS;
            tracing::warn!(
                "{error}: {cells} cells stay in device memory, others go to host memory"
            );
            self.spill_for(backend, needed, keep)?;
            self.full.trim();
        }
        Ok(())
    }

    fn spill_for(&mut self, backend: &mut B, needed: usize, keep: &[Id]) -> Result<(), Error> {
        while self.full.is_over() || self.full.device_room() < needed {
            let sequence = self.sequence();
            let others = self.sequences.iter().flatten();
            let victim = sequence
                .full
                .iter()
                .chain(others.flat_map(|s| s.full.iter()))
                .map(|(_, id)| id)
                .find(|id| self.full.is_on_device(*id) && !keep.contains(id));
            let window = self.full.device_max() * CELLS;
            let Some(victim) = victim else {
                return Err(Error::Window { window });
            };
            if self.full.host_room() == 0 {
                let tail = self.full.host_max() * CELLS;
                return Err(Error::TailFull { window, tail });
            }
            self.full.spill(backend, victim)?;
        }
        Ok(())
    }

    fn reserve_ring(&mut self, backend: &mut B, blocks: &Range<usize>) -> Result<(), Error> {
        let ring_blocks = self.ring_blocks;
        let (sequence, _, store) = self.parts();
        for block in blocks.clone() {
            if block == sequence.ring.end() {
                sequence.ring.slabs.push_back(None);
            }
            while sequence.ring.slabs.len() > ring_blocks {
                sequence.ring.first += 1;
                if let Some(id) = sequence.ring.slabs.pop_front().flatten() {
                    store.release(id);
                }
            }
            let id = match sequence.ring.get(block) {
                None => store.add(backend)?,
                Some(id) if store.is_shared(id) => store.unshare(backend, id)?,
                Some(id) => id,
            };
            sequence.ring.set(block, Some(id));
        }
        Ok(())
    }

    /// What the step attends: all blocks, also cells that are still to be written, which nobody sees before. Returns whether it streams what the step before
    /// streamed.
    fn plan(&mut self, takings: &[Taking]) -> bool {
        // The CPU takes its share of one generated token alone.
        let blocks = match takings {
            [taking] if taking.generated && B::CPU_SHARES => {
                let sequence = self.sequences[taking.sequence].as_ref();
                sequence.map_or(0, |sequence| self.first_in_host(sequence))
            }
            _ => 0,
        };
        let layers = self.full_layers.len();
        self.cpu_groups.clear();
        // A share of all of them, in whole groups.
        let each = blocks as f64 * self.kv_share / GROUP as f64;
        let each = each.min((blocks / GROUP) as f64);
        let groups = (0..layers).map(|layer| cpu_groups(each, layer));
        self.cpu_groups.extend(groups);
        self.first_streamed.clear();
        self.first_streamed.resize(layers, 0);
        self.tail.clear();
        self.full_spans.clear();
        self.ring_spans.clear();
        self.work.clear();
        self.positions.clear();
        let mut row = 0;
        for taking in takings {
            let sequence = self.sequences[taking.sequence].as_ref();
            let position = sequence.map_or(0, |s| s.n);
            let (full, ring) = (self.full_spans.len(), self.ring_spans.len());
            self.plan_part(taking);
            self.work.push(Part {
                taking: *taking,
                index: self.work.len(),
                row,
                position,
                full: full..self.full_spans.len(),
                ring: ring..self.ring_spans.len(),
            });
            self.positions.push(position..position + taking.tokens);
            row += taking.tokens;
        }
        self.stage
            .set_tail(&mut self.tail, &mut self.first_streamed)
    }

    fn plan_part(&mut self, taking: &Taking) {
        let n = usize::MAX;
        let sequence = self.sequences[taking.sequence].as_ref();
        let sequence = sequence.expect("the one in work exists");
        for (block, id) in sequence.full.iter() {
            let mut parts = sequence.parts(block, n).peekable();
            if parts.peek().is_none() {
                continue;
            }
            let lies = if self.full.is_on_device(id) {
                Lies::Device
            } else {
                let groups = self.cpu_groups.iter();
                for (first, &groups) in self.first_streamed.iter_mut().zip(groups) {
                    *first += usize::from(block / GROUP < groups);
                }
                self.tail.push((id, self.full.version(id)));
                Lies::Host(self.tail.len() - 1)
            };
            self.full_spans.extend(parts.map(|cells| Reached {
                block,
                cells,
                id,
                lies,
            }));
        }
        for (block, id) in sequence.ring.iter() {
            let parts = sequence.parts(block, n);
            self.ring_spans.extend(parts.map(|cells| Reached {
                block,
                cells,
                id,
                lies: Lies::Device,
            }));
        }
    }

    /// Blocks that are in host memory, from the first on.
    fn first_in_host(&self, sequence: &Sequence) -> usize {
        if self.full.in_host() == 0 {
            return 0;
        }
        let on_device = sequence
            .full
            .iter()
            .find(|&(_, id)| self.full.is_on_device(id));
        on_device.map_or(0, |(block, _)| block)
    }

    /// Forgets the cells from position `n` on. Where a layer with a window no longer has what a token at `n` would see, everything is
    /// forgotten. Returns how many positions are kept.
    pub(crate) fn truncate(&mut self, n: usize) -> usize {
        let window = self.window;
        let (sequence, full, ring) = self.parts();
        let n = n.min(sequence.n);
        let seen_from = window.map_or(0, |w| (n + 1).saturating_sub(w));
        let n = if sequence.ring.first * CELLS > seen_from {
            0
        } else {
            n
        };
        for (track, store) in [(&mut sequence.full, full), (&mut sequence.ring, ring)] {
            while track.end() > n.div_ceil(CELLS).max(track.first) {
                if let Some(id) = track.slabs.pop_back().flatten() {
                    store.release(id);
                }
            }
        }
        if n == 0 {
            sequence.ring.first = 0;
        }
        sequence.n = n;
        sequence.cut_holes(n);
        n
    }

    /// Removes the cells of some positions, which later tokens then no longer see; a range that reaches the end is cut off. Returns how
    /// many positions are still taken.
    pub(crate) fn remove(&mut self, range: Range<usize>) -> usize {
        let (sequence, full, ring) = self.parts();
        if range.end >= sequence.n {
            return self.truncate(range.start);
        }
        sequence.add_hole(range);
        let n = sequence.n;
        for (is_ring, store) in [(false, full), (true, ring)] {
            let track = if is_ring {
                &sequence.ring
            } else {
                &sequence.full
            };
            let gone: Vec<(usize, Id)> = track
                .iter()
                // The block that the next token is written to stays.
                .filter(|&(block, _)| block < n / CELLS)
                .filter(|&(block, _)| sequence.parts(block, n).next().is_none())
                .collect();
            for (block, id) in gone {
                let track = if is_ring {
                    &mut sequence.ring
                } else {
                    &mut sequence.full
                };
                track.set(block, None);
                store.release(id);
            }
        }
        n
    }

    fn add(&mut self, sequence: Sequence) -> usize {
        match self.sequences.iter().position(Option::is_none) {
            Some(free) => {
                self.sequences[free] = Some(sequence);
                free
            }
            None => {
                self.sequences.push(Some(sequence));
                self.sequences.len() - 1
            }
        }
    }

    /// A sequence that begins as a copy of the one in work. Their blocks are shared until one of them writes.
    pub(crate) fn fork(&mut self) -> usize {
        let copy = self.sequence().clone();
        for (track, store) in [(&copy.full, &mut self.full), (&copy.ring, &mut self.ring)] {
            for (_, id) in track.iter() {
                store.share(id);
            }
        }
        self.add(copy)
    }

    /// Puts another sequence in work. Returns whether there is one of this number.
    pub(crate) fn select(&mut self, sequence: usize) -> bool {
        let exists = matches!(self.sequences.get(sequence), Some(Some(_)));
        if exists {
            self.current = sequence;
        }
        exists
    }

    /// The sequence in work.
    pub(crate) fn selected(&self) -> usize {
        self.current
    }

    /// Forgets a sequence other than the one in work. Returns whether there was one of this number.
    pub(crate) fn forget(&mut self, sequence: usize) -> bool {
        if sequence == self.current {
            return false;
        }
        let Some(gone) = self.sequences.get_mut(sequence).and_then(Option::take) else {
            return false;
        };
        for (track, store) in [(&gone.full, &mut self.full), (&gone.ring, &mut self.ring)] {
            for (_, id) in track.iter() {
                store.release(id);
            }
        }
        true
    }
}

/// The groups of the tail that the CPU attends in a layer, of `each` on average: their share goes round so that all layers together come as
/// near to it as can be.
fn cpu_groups(each: f64, layer: usize) -> usize {
    let until = |layers: usize| (each * layers as f64).round() as usize;
    until(layer + 1) - until(layer)
}
