//! Attention over blocks that are borrowed for the call, so that nothing dangles.

use super::layout::{KvBlock, Partials, Table};
use super::prefill::{Spans, Step};
use super::{Attention, Params, Turn};
use crate::error::Error;
use crate::kernel::Start;
use crate::memory::Buffer;
use crate::outbox::Outbox;
use crate::stream::Stream;

/// Some cells of a block.
#[derive(Debug, Clone)]
pub struct Over<'a> {
    /// What holds the block, from byte `offset` on.
    pub slab: &'a Buffer<u8>,
    /// Where in the slab.
    pub offset: usize,
    /// The block's number in the sequence.
    pub index: usize,
    /// Cells of it that are there: first, and one past the last.
    pub cells: (usize, usize),
}

impl Attention {
    /// Blocks as kernels read them; partial results go to slots from `first_slot` on.
    fn blocks(&self, over: &[Over<'_>], first_slot: usize) -> Result<Vec<KvBlock>, Error> {
        let block = |(slot, o): (usize, &Over<'_>)| {
            let cells = o.cells.0..o.cells.1;
            KvBlock::new(&self.shape, o.slab, o.offset, o.index, cells, slot)
        };
        (first_slot..).zip(over).map(block).collect()
    }

    /// Makes `table` the list of these blocks, unless it is; partial results go to slots from `first_slot` on.
    fn list(
        &self,
        stream: &Stream,
        start: Start,
        outbox: &mut Outbox,
        table: &mut Table,
        over: &[Over<'_>],
        first_slot: usize,
    ) -> Result<(), Error> {
        let blocks = self.blocks(over, first_slot)?;
        if table.has(&blocks) {
            return Ok(());
        }
        // SAFETY: the slabs are borrowed while the work that uses the list is given to the stream; a buffer that is dropped
        // later waits for that work, and every use of the table comes through here, with blocks that live.
        unsafe { table.send(stream, start, outbox, &blocks) }
    }

    /// [`Attention::append`] to blocks that follow one another, which needs no list: of `tokens` tokens, from row `row` of `k` and `v` on, the first
    /// one's cell being `position`, those that are cells of them.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn append_to(
        &self,
        stream: &Stream,
        start: Start,
        blocks: &[Over<'_>],
        position: usize,
        tokens: usize,
        row: usize,
        k: &Buffer<f32>,
        v: &Buffer<f32>,
    ) -> Result<(), Error> {
        let blocks = self.blocks(blocks, 0)?;
        let shape = &self.shape;
        self.prefill
            .append(stream, start, shape, &blocks, position, tokens, row, k, v)
    }

    /// [`Attention::turn`] of one token of each of as many sequences as there are blocks, to which their cells go.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn turn_to(
        &self,
        stream: &Stream,
        start: Start,
        outbox: &mut Outbox,
        table: &mut Table,
        blocks: &[Over<'_>],
        position: &Buffer<u32>,
        q: &mut Buffer<f32>,
        k: &mut Buffer<f32>,
        v: &mut Buffer<f32>,
        how: &Turn<'_>,
    ) -> Result<(), Error> {
        let listed = self.blocks(blocks, 0)?;
        if !table.has(&listed) {
            // SAFETY: as of lists that are attended.
            unsafe { table.send_each(stream, start, outbox, &listed)? };
        }
        let append = Some((&*table, position));
        self.turn(stream, start, blocks.len(), q, k, v, how, append)
    }

    /// [`Attention::decode`] of the token of one row of `q` `[T, H, C]`, whose position is that row of `position` `[T]`, over some blocks, whose
    /// partial results go to slots from `first_slot` on.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn decode_over(
        &self,
        stream: &Stream,
        start: Start,
        outbox: &mut Outbox,
        table: &mut Table,
        over: &[Over<'_>],
        first_slot: usize,
        position: &Buffer<u32>,
        params: &Params,
        q: &Buffer<f32>,
        row: usize,
        partials: &mut Partials,
    ) -> Result<(), Error> {
        self.list(stream, start, outbox, table, over, first_slot)?;
        self.decode_row(stream, start, table, position, params, q, row, partials)
    }

    /// [`Attention::prefill`] over some blocks, of tokens that have rows of `q` and `out` from `row` on.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn prefill_over(
        &self,
        stream: &Stream,
        outbox: &mut Outbox,
        table: &mut Table,
        over: &[Over<'_>],
        params: &Params,
        position: usize,
        tokens: usize,
        q: &Buffer<f32>,
        row: usize,
        step: Step,
        sinks: Option<&Buffer<f32>>,
        spans: &mut Spans,
        out: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        self.list(stream, Start::After, outbox, table, over, 0)?;
        self.prefill.attend(
            stream,
            Start::After,
            &self.shape,
            self.heads,
            params,
            position,
            tokens,
            q,
            table,
            row,
            step,
            sinks,
            spans,
            out,
        )
    }
}
