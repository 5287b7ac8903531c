//! Attention of many tokens on tensor cores: `kernels/attention_prefill.cuh`.

use super::layout::{CELLS, HEAD_MAX, KvBlock, KvShape, KvType, Table};
use super::{Params, at_least, from_value, int};
use crate::device::{Device, WGMMA_COMPUTE};
use crate::error::{Error, length};
use crate::kernel::{Arg, Kernel, Launch, Module, Start};
use crate::memory::Buffer;
use crate::stream::Stream;

/// Cells after which a row's softmax begins anew: as in the kernel.
const SPAN: usize = 4096;

/// Cells of a tile.
const TILE: usize = 64;

/// Blocks that a launch writes cells to: as in the kernel.
const WRITTEN: usize = 16;

/// Where a call stands among those that attend one layer's cells in parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Whether nothing was attended before.
    pub first: bool,
    /// Whether nothing follows: the result is written.
    pub last: bool,
}

impl Step {
    /// All cells in one call.
    pub const ONLY: Self = Self {
        first: true,
        last: true,
    };
}

/// Room for results of spans that are not merged yet.
#[derive(Debug)]
pub struct Spans {
    states: Buffer<f32>,
    /// The span that an earlier call left in the middle.
    open: Option<usize>,
    /// Whether spans were merged.
    begun: bool,
}

impl Spans {
    /// Numbers that `tokens` tokens take, with room for `at_once` spans to be done side by side: more keep a large device
    /// busy, the result is the same.
    pub fn values(shape: &KvShape, heads: usize, tokens: usize, at_once: usize) -> usize {
        (at_once.max(1) + 1) * tokens * heads * (2 + shape.c_v)
    }

    /// Room as [`Spans::values`] says.
    pub fn new(stream: &Stream, values: usize) -> Result<Self, Error> {
        Ok(Self {
            states: Buffer::new(stream.device(), values)?,
            open: None,
            begun: false,
        })
    }
}

/// The kernels for one shape of cache.
#[derive(Debug)]
pub(super) struct Prefill {
    attend: Kernel,
    merge: Kernel,
    append: Kernel,
    rows: usize,
    threads: usize,
    shared_bytes: usize,
}

impl Prefill {
    pub(super) fn new(
        device: &Device,
        compute: (u32, u32),
        shape: &KvShape,
    ) -> Result<Self, Error> {
        let c = [64, 96, 128, HEAD_MAX]
            .into_iter()
            .find(|c| shape.c_k.max(shape.c_v) <= *c)
            .unwrap_or(HEAD_MAX);
        let is_direct = shape.type_k == KvType::F16 && shape.type_v == KvType::F16;
        let module = Module::load_for(device, "attention_prefill", compute)?;
        let suffix = if is_direct { "" } else { "_converted" };
        let attend = module.kernel(&format!("prefill_{c}{suffix}"))?;
        // Groups of four warps multiply together on 9.0, but for heads of odd sizes; else two warps' rows are one's.
        let has_groups = compute == WGMMA_COMPUTE && (c == 64 || c == 128);
        let (rows, threads) = (
            128,
            if c == HEAD_MAX || has_groups {
                256
            } else {
                128
            },
        );
        // As `Kernel` in the source.
        let stride = c.next_multiple_of(64);
        let tile = TILE * stride;
        let shared_bytes = if is_direct {
            2 * (rows * stride + 4 * tile)
        } else {
            2 * (rows * stride + 2 * tile) + 2 * (TILE * c * 2 + 512)
        };
        attend.allow_shared(shared_bytes)?;
        Ok(Self {
            attend,
            merge: module.kernel("merge_spans")?,
            append: module.kernel("append_blocks")?,
            rows,
            threads,
            shared_bytes,
        })
    }

    /// Stores those of `tokens` tokens that are cells of `blocks`, which follow one another: `k` `[T, K, C]`, `v` `[T, K, C]` from row `row` on, the
    /// first token's cell being `position`.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub(super) fn append(
        &self,
        stream: &Stream,
        start: Start,
        shape: &KvShape,
        blocks: &[KvBlock],
        position: usize,
        tokens: usize,
        row: usize,
        k: &Buffer<f32>,
        v: &Buffer<f32>,
    ) -> Result<(), Error> {
        let op = "append";
        let rows = row + tokens;
        at_least(op, "K", k.len(), rows * shape.heads * shape.c_k)?;
        at_least(op, "V", v.len(), rows * shape.heads * shape.c_v)?;
        for some in blocks.chunks(WRITTEN) {
            for (i, block) in some.iter().enumerate() {
                length(op, "number of a block", block.index(), some[0].index() + i)?;
            }
            let base = some[0].index() * CELLS;
            let from = position.max(base);
            let end = (position + tokens).min(base + some.len() * CELLS);
            if from >= end {
                continue;
            }
            let mut args = vec![
                Arg::from(k),
                Arg::from(v),
                int(from - base),
                int(row + from - position),
                int(end - from),
                int(shape.heads),
                int(shape.c_k),
                int(shape.c_v),
                int(shape.type_k as usize),
                int(shape.type_v as usize),
            ];
            args.extend(some.iter().map(|block| Arg::from(block.address())));
            args.extend((some.len()..WRITTEN).map(|_| Arg::NULL));
            let grid = [CELLS / 32 * some.len(), shape.heads, 2].map(|n| n as u32);
            let launch = Launch::grid(grid, [32, 4, 1]).start(start);
            // SAFETY: as the kernel takes them, the last parameter being the blocks' addresses; lengths are checked, and a block lies inside its slab,
            // which the caller vouches for.
            unsafe { self.append.launch(stream, launch, &args)? };
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub(super) fn attend(
        &self,
        stream: &Stream,
        start: Start,
        shape: &KvShape,
        heads: usize,
        params: &Params,
        position: usize,
        tokens: usize,
        q: &Buffer<f32>,
        table: &Table,
        row: usize,
        step: Step,
        sinks: Option<&Buffer<f32>>,
        spans: &mut Spans,
        out: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        let op = "prefill";
        let rows = row + tokens;
        at_least(op, "queries", q.len(), rows * heads * shape.c_k)?;
        at_least(op, "outputs", out.len(), rows * heads * shape.c_v)?;
        if let Some(sinks) = sinks {
            at_least(op, "sinks", sinks.len(), heads)?;
        }
        if i32::try_from(position + tokens).is_err() {
            length(op, "position", position + tokens, i32::MAX as usize)?;
        }
        if step.first {
            (spans.open, spans.begun) = (None, false);
        }
        let slots = spans.states.len() / (tokens * heads * (2 + shape.c_v)).max(1);
        at_least(op, "room for spans", slots, 2)?;
        let slots = slots - 1;
        if tokens == 0 {
            return Ok(());
        }
        // Spans of which the list has cells that some token sees; all that are seen if it is the only list.
        let seen = params
            .window
            .map_or(0, |w| (position + 1).saturating_sub(w));
        let listed = table.blocks();
        let (from, end) = match (listed.first(), listed.last()) {
            _ if step == Step::ONLY => (seen, position + tokens),
            (Some(first), Some(last)) => (
                seen.max(first.cells().start),
                last.cells().end.min(position + tokens),
            ),
            _ => (0, 0),
        };
        let (mut next, end) = match from < end {
            true => (from / SPAN, end.div_ceil(SPAN)),
            false => (0, 0),
        };
        let call = Call {
            prefill: self,
            stream,
            start,
            shape,
            heads,
            params,
            position,
            tokens,
            q,
            table,
            row,
            sinks,
            slots,
        };
        if step == Step::ONLY && end - next == 1 {
            return call.attend(next, 1, false, spans, Some(out));
        }
        // What an earlier call left is complete if this one goes on behind it.
        if let Some(open) = spans.open
            && (next >= end || next > open)
        {
            call.merge(open, 1, spans, None)?;
            spans.open = None;
        }
        while next < end {
            let count = slots.min(end - next);
            let resumes = spans.open == Some(next);
            call.attend(next, count, resumes, spans, None)?;
            spans.open = None;
            let mut whole = count;
            if next + count == end && !step.last {
                whole -= 1;
                spans.open = Some(end - 1);
            }
            if whole > 0 {
                call.merge(next, whole, spans, None)?;
            }
            next += count;
        }
        if step.last {
            call.merge(0, 0, spans, Some(out))?;
        }
        Ok(())
    }
}

/// The operands of a call.
struct Call<'a> {
    prefill: &'a Prefill,
    stream: &'a Stream,
    start: Start,
    shape: &'a KvShape,
    heads: usize,
    params: &'a Params,
    position: usize,
    tokens: usize,
    q: &'a Buffer<f32>,
    table: &'a Table,
    /// The first token's row of queries and outputs.
    row: usize,
    sinks: Option<&'a Buffer<f32>>,
    slots: usize,
}

impl Call<'_> {
    /// Spans `first .. first + count`: their states, or the result if it is one span.
    fn attend(
        &self,
        first: usize,
        count: usize,
        resumes: bool,
        spans: &Spans,
        out: Option<&Buffer<f32>>,
    ) -> Result<(), Error> {
        let (shape, prefill) = (self.shape, self.prefill);
        let gqa = self.heads / shape.heads;
        let args = [
            from_value(self.q, self.row * self.heads * shape.c_k),
            Arg::from(&self.table.entries),
            Arg::from(&spans.states),
            self.out(out),
            self.sinks.map_or(Arg::from(0u64), Arg::from),
            int(self.table.blocks().len()),
            int(self.position),
            int(self.tokens),
            int(shape.heads),
            int(gqa),
            int(shape.c_k),
            int(shape.c_v),
            int(shape.type_k as usize),
            int(shape.type_v as usize),
            Arg::from(self.params.scale),
            Arg::from(self.params.cap()),
            Arg::from(self.params.window()),
            int(first),
            int(self.slots),
            int(usize::from(resumes)),
        ];
        let tiles = (self.tokens * gqa).div_ceil(prefill.rows);
        let grid = [tiles, shape.heads, count].map(|n| n as u32);
        let launch = Launch::grid(grid, [prefill.threads as u32, 1, 1])
            .shared(prefill.shared_bytes)
            .start(self.start);
        // SAFETY: as the kernel takes them; lengths are checked, the table's blocks are vouched for by who set it.
        unsafe { prefill.attend.launch(self.stream, launch, &args) }
    }

    /// Where the result goes, if it is written.
    fn out(&self, out: Option<&Buffer<f32>>) -> Arg {
        let first = self.row * self.heads * self.shape.c_v;
        out.map_or(Arg::from(0u64), |out| from_value(out, first))
    }

    /// Merges the states of spans into the total; writes the result if there is an `out`.
    fn merge(
        &self,
        first: usize,
        count: usize,
        spans: &mut Spans,
        out: Option<&Buffer<f32>>,
    ) -> Result<(), Error> {
        let rows = self.tokens * self.heads;
        let args = [
            Arg::from(&spans.states),
            self.out(out),
            self.sinks.map_or(Arg::from(0u64), Arg::from),
            int(rows),
            int(self.heads),
            int(self.shape.c_v),
            int(first),
            int(count),
            int(self.slots),
            int(usize::from(spans.begun)),
        ];
        spans.begun = true;
        let launch = Launch::new(rows.div_ceil(8), 256).start(self.start);
        // SAFETY: as the kernel takes them; the states have a slot more than `slots`.
        unsafe { self.prefill.merge.launch(self.stream, launch, &args) }
    }
}
