//! What a cache holds for a cell, and where its blocks lie. The layout of a block stands in `kernels/attention_cache.cuh`.

use std::ops::Range;

use crate::error::Error;
use crate::kernel::Start;
use crate::memory::{Buffer, Plain};
use crate::outbox::Outbox;
use crate::stream::Stream;

/// Cells a block.
pub const CELLS: usize = 256;

/// Blocks a group of the fold.
pub const GROUP: usize = 4;

/// The largest head that kernels attend.
pub const HEAD_MAX: usize = 256;

/// How the values of a cache are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// 8 bits, a scale for each 32 values.
    Q8_0,
    /// 4 bits, a scale for each 32 values.
    Q4_0,
}

impl KvType {
    /// All, in the order of the kernels' numbers.
    pub const ALL: [Self; 4] = [Self::F16, Self::Bf16, Self::Q8_0, Self::Q4_0];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
        }
    }

    fn multiple(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 16,
            Self::Q8_0 | Self::Q4_0 => 32,
        }
    }

    fn bytes(self, values: usize) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2 * values,
            Self::Q8_0 => values / 32 * 34,
            Self::Q4_0 => values / 32 * 18,
        }
    }
}

/// What one layer's cache holds for a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// KV heads.
    pub heads: usize,
    /// Values of a K head.
    pub c_k: usize,
    /// Values of a V head.
    pub c_v: usize,
    /// Type of K.
    pub type_k: KvType,
    /// Type of V.
    pub type_v: KvType,
}

impl KvShape {
    /// Bytes of one block.
    pub fn block_bytes(&self) -> usize {
        self.heads * CELLS * (self.type_k.bytes(self.c_k) + self.type_v.bytes(self.c_v))
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        for (ty, c) in [(self.type_k, self.c_k), (self.type_v, self.c_v)] {
            if self.heads == 0 || c == 0 || c > HEAD_MAX || c % ty.multiple() != 0 {
                return Err(Error::Head {
                    format: ty.name(),
                    found: c,
                    multiple: ty.multiple(),
                    most: HEAD_MAX,
                });
            }
        }
        Ok(())
    }
}

/// One block of one layer, somewhere that the device can read (and write, if cells are appended to it).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct KvBlock {
    address: u64,
    index: u32,
    first: u16,
    end: u16,
    slot: u32,
    reserved: u32,
}

// SAFETY: numbers without padding; any bits are a value.
unsafe impl Plain for KvBlock {}

impl KvBlock {
    /// Block `index`, the cells `256 index ..` of a sequence, at byte `offset` of `slab`; of its cells, `cells` are there, or will
    /// be when they are first seen. Its partial result goes to `slot`. A block with cells removed from its middle is several.
    ///
    /// # Errors
    /// If it does not lie inside the slab, or is not aligned to 16 bytes.
    pub fn new(
        shape: &KvShape,
        slab: &Buffer<u8>,
        offset: usize,
        index: usize,
        cells: Range<usize>,
        slot: usize,
    ) -> Result<Self, Error> {
        let end = offset.saturating_add(shape.block_bytes());
        if end > slab.bytes() || !offset.is_multiple_of(16) || cells.end > CELLS {
            return Err(Error::Length {
                op: "attention",
                what: "end of a block, at a multiple of 16 bytes,",
                found: end,
                wanted: slab.bytes(),
            });
        }
        Ok(Self {
            address: slab.address() + offset as u64,
            index: u32::try_from(index).map_err(|_| too_many(index, u32::MAX as usize))?,
            first: cells.start.min(CELLS) as u16,
            end: cells.end as u16,
            slot: u32::try_from(slot).map_err(|_| too_many(slot, u32::MAX as usize))?,
            reserved: 0,
        })
    }

    /// Where it lies.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The cells of the sequence that it has.
    pub fn cells(&self) -> Range<usize> {
        let base = self.index() * CELLS;
        base + usize::from(self.first)..base + usize::from(self.end)
    }

    /// Its number in the sequence.
    pub fn index(&self) -> usize {
        self.index as usize
    }
}

/// A list of blocks in device memory: what a launch attends, ascending, or where the cells of several sequences' tokens go, in the tokens' order.
/// Its length is read by the kernels, so that a captured graph goes on with whatever the list is then.
#[derive(Debug)]
pub struct Table {
    pub(super) entries: Buffer<KvBlock>,
    pub(super) count: Buffer<u32>,
    /// One more than the largest slot that the list ever had.
    pub(super) end: usize,
    host: Vec<KvBlock>,
    is_known: bool,
}

impl Table {
    /// An empty list with room for `capacity` blocks.
    pub fn new(stream: &Stream, capacity: usize) -> Result<Self, Error> {
        Ok(Self {
            entries: Buffer::new(stream.device(), capacity)?,
            count: Buffer::zeroed(stream, 1)?,
            end: 0,
            host: Vec::with_capacity(capacity),
            is_known: true,
        })
    }

    /// Makes the list these blocks, after the stream's earlier work.
    ///
    /// # Errors
    /// If they are more than there is room for, or not ascending.
    ///
    /// # Safety
    /// The blocks' memory exists, and belongs to the table's users, until the work that uses the list is done.
    pub unsafe fn set(&mut self, stream: &Stream, blocks: &[KvBlock]) -> Result<(), Error> {
        ascending(blocks)?;
        // SAFETY: the caller vouches for the blocks.
        unsafe { self.set_each(stream, blocks) }
    }

    /// The same with a block for each token of as many sequences, in their order.
    ///
    /// # Errors
    /// If they are more than there is room for.
    ///
    /// # Safety
    /// As [`Table::set`].
    pub unsafe fn set_each(&mut self, stream: &Stream, blocks: &[KvBlock]) -> Result<(), Error> {
        self.accept(blocks)?;
        self.entries.upload_at(stream, 0, blocks)?;
        self.count.upload(stream, &[blocks.len() as u32])
    }

    /// The same, not waited for.
    ///
    /// # Errors
    /// As [`Table::set`].
    ///
    /// # Safety
    /// As [`Table::set`].
    pub unsafe fn send(
        &mut self,
        stream: &Stream,
        start: Start,
        outbox: &mut Outbox,
        blocks: &[KvBlock],
    ) -> Result<(), Error> {
        ascending(blocks)?;
        // SAFETY: the caller vouches for the blocks.
        unsafe { self.send_each(stream, start, outbox, blocks) }
    }

    /// [`Table::set_each`], not waited for.
    ///
    /// # Errors
    /// As [`Table::set_each`].
    ///
    /// # Safety
    /// As [`Table::set`].
    pub unsafe fn send_each(
        &mut self,
        stream: &Stream,
        start: Start,
        outbox: &mut Outbox,
        blocks: &[KvBlock],
    ) -> Result<(), Error> {
        self.accept(blocks)?;
        outbox.send(stream, start, blocks, &mut self.entries, &mut self.count)
    }

    fn accept(&mut self, blocks: &[KvBlock]) -> Result<(), Error> {
        if blocks.len() > self.entries.len() {
            return Err(too_many(blocks.len(), self.entries.len()));
        }
        let end = blocks.iter().map(|b| b.slot as usize + 1).max();
        self.end = self.end.max(end.unwrap_or(0));
        self.host.clear();
        self.host.extend_from_slice(blocks);
        self.is_known = true;
        Ok(())
    }

    /// The blocks.
    pub fn blocks(&self) -> &[KvBlock] {
        &self.host
    }

    /// Says that what was to be sent last never was: the list is whatever it is, until it is sent again.
    pub fn forget(&mut self) {
        self.is_known = false;
    }

    /// Whether the list is these blocks.
    pub(super) fn has(&self, blocks: &[KvBlock]) -> bool {
        self.is_known && self.host == blocks
    }

    /// Bytes of a full list.
    pub fn bytes(&self) -> usize {
        self.entries.bytes()
    }
}

fn ascending(blocks: &[KvBlock]) -> Result<(), Error> {
    if blocks.is_sorted_by(|a, b| (a.index, a.end) <= (b.index, b.first)) {
        return Ok(());
    }
    Err(Error::Length {
        op: "attention",
        what: "a block's index, in ascending order,",
        found: blocks.first().map_or(0, KvBlock::index),
        wanted: blocks.last().map_or(0, KvBlock::index),
    })
}

/// What a fold takes a result from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// A block's partial.
    Block {
        /// Its number in the sequence.
        index: usize,
        /// Where its partial is.
        slot: usize,
    },
    /// A whole group's, blocks `4 index .. 4 index + 4`, folded elsewhere.
    Group {
        /// Its number.
        index: usize,
        /// Where its partial is among those of groups.
        slot: usize,
    },
}

impl Part {
    fn group(self) -> usize {
        match self {
            Self::Block { index, .. } => index / GROUP,
            Self::Group { index, .. } => index,
        }
    }

    fn slot(self) -> usize {
        match self {
            Self::Block { slot, .. } | Self::Group { slot, .. } => slot,
        }
    }
}

/// A [`Part`] as the kernel reads it.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Entry {
    slot: u32,
    group: u32,
}

// SAFETY: numbers without padding; any bits are a value.
unsafe impl Plain for Entry {}

/// The list of parts that a fold takes, in device memory.
#[derive(Debug)]
pub struct Parts {
    pub(super) entries: Buffer<Entry>,
    pub(super) count: Buffer<u32>,
    /// One more than the largest slot of blocks and of groups in the list.
    pub(super) end: [usize; 2],
}

/// Parts a group at most: a batch of the fold kernel holds a group and the first part of the next.
const GROUP_PARTS_MAX: usize = 255;

impl Parts {
    /// An empty list with room for `capacity` parts.
    pub fn new(stream: &Stream, capacity: usize) -> Result<Self, Error> {
        Ok(Self {
            entries: Buffer::new(stream.device(), capacity)?,
            count: Buffer::zeroed(stream, 1)?,
            end: [0; 2],
        })
    }

    /// Makes the list these, after the stream's earlier work.
    ///
    /// # Errors
    /// If they are more than there is room for, not in ascending order of blocks, a group stands beside one of its blocks, or
    /// has too many parts.
    pub fn set(&mut self, stream: &Stream, parts: &[Part]) -> Result<(), Error> {
        let entries = self.accept(parts)?;
        self.entries.upload_at(stream, 0, &entries)?;
        self.count.upload(stream, &[parts.len() as u32])
    }

    /// The same, not waited for.
    ///
    /// # Errors
    /// As [`Parts::set`].
    pub fn send(
        &mut self,
        stream: &Stream,
        start: Start,
        outbox: &mut Outbox,
        parts: &[Part],
    ) -> Result<(), Error> {
        let entries = self.accept(parts)?;
        outbox.send(stream, start, &entries, &mut self.entries, &mut self.count)
    }

    /// Bytes of a full list.
    pub fn bytes(&self) -> usize {
        self.entries.bytes()
    }

    fn accept(&mut self, parts: &[Part]) -> Result<Vec<Entry>, Error> {
        if parts.len() > self.entries.len() {
            return Err(too_many(parts.len(), self.entries.len()));
        }
        let follows = |a: &Part, b: &Part| match (a, b) {
            (Part::Block { index: a, .. }, Part::Block { index: b, .. }) => a <= b,
            (a, b) => a.group() < b.group(),
        };
        if !parts.is_sorted_by(follows) {
            return Err(Error::Length {
                op: "fold",
                what: "a part's group, in ascending order,",
                found: parts.first().map_or(0, |p| p.group()),
                wanted: parts.last().map_or(0, |p| p.group()),
            });
        }
        for group in parts.chunk_by(|a, b| a.group() == b.group()) {
            if group.len() > GROUP_PARTS_MAX {
                return Err(too_many(group.len(), GROUP_PARTS_MAX));
            }
        }
        let mut entries = Vec::with_capacity(parts.len());
        let mut ends = [0; 2];
        for part in parts {
            let (slot, group) = (part.slot(), part.group());
            if slot.max(group) >= 1 << 31 {
                return Err(too_many(slot.max(group), 1 << 31));
            }
            let of_groups = matches!(part, Part::Group { .. });
            let end = &mut ends[usize::from(of_groups)];
            *end = (*end).max(slot + 1);
            entries.push(Entry {
                slot: slot as u32,
                group: group as u32 | u32::from(of_groups) << 31,
            });
        }
        self.end = ends;
        Ok(entries)
    }
}

/// Partial results in device memory: `[slot][H][2 + C]`, of each m, l, o.
#[derive(Debug)]
pub struct Partials {
    pub(super) buffer: Buffer<f32>,
    pub(super) count: usize,
}

impl Partials {
    /// Room for `count` partials.
    pub fn new(
        stream: &Stream,
        shape: &KvShape,
        heads: usize,
        count: usize,
    ) -> Result<Self, Error> {
        Ok(Self {
            buffer: Buffer::new(stream.device(), count * heads * (2 + shape.c_v))?,
            count,
        })
    }

    /// The numbers.
    pub fn values(&self) -> &Buffer<f32> {
        &self.buffer
    }

    /// The numbers, to be written.
    pub fn values_mut(&mut self) -> &mut Buffer<f32> {
        &mut self.buffer
    }
}

fn too_many(found: usize, wanted: usize) -> Error {
    Error::Length {
        op: "attention",
        what: "number of blocks",
        found,
        wanted,
    }
}
