//! Attention over lists of blocks of cells, with the CPU's bits for generated tokens.
//!
//! A token is attended in two steps: [`Attention::decode`] leaves a partial result for every block of a list (there may be
//! several lists: resident, streamed), [`Attention::fold`] merges them in ascending order, groups that another device
//! computed among them. Kernels read the lists and the token's position from device memory and launch as many thread blocks
//! as the device holds, whatever the depth: so both steps can be captured in a graph.

mod layout;
mod over;
mod prefill;

pub use layout::{CELLS, GROUP, HEAD_MAX, KvBlock, KvShape, KvType, Part, Partials, Parts, Table};
pub use over::Over;
pub use prefill::{Spans, Step};

use prefill::Prefill;

use quant::act::Passes;

use crate::acts::{Acts, Shape, Written};
use crate::device::Device;
use crate::error::{Error, length};
use crate::kernel::{Arg, Kernel, Launch, Module, Start};
use crate::memory::{Buffer, Plain};
use crate::ops::{Angles, Rotation, THREADS_TURN, optional, rope_args};
use crate::product::Target;
use crate::stream::Stream;

/// Query heads that are attended together at most, by the size of V's heads; the kernels exist for each number up to it.
fn heads_max(c_v: usize) -> usize {
    if c_v > 128 { 4 } else { 8 }
}

/// Threads of a decode thread block, bytes of its rings: as in `kernels/attention_decode.cuh`.
const DECODE_THREADS: usize = 128;
const RING_BYTES: usize = 4 * 3 * (2048 + 256);

/// Threads of a fold's thread block: as in `kernels/attention.cu`.
const FOLD_THREADS: u32 = 288;

/// Tokens from which on a warp turns several heads of a token, and how many.
const TURN_MANY: usize = 32;
const TURN_EACH: usize = 4;

/// Shared memory that the driver keeps a thread block for itself.
const SHARED_RESERVED: usize = 1024;

/// What attention needs to know of a layer, beside its cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Params {
    /// Factor of the scores.
    pub scale: f32,
    /// Soft-cap of the scores.
    pub soft_cap: Option<f32>,
    /// A query sees this many cells, itself included; `None`: all before it.
    pub window: Option<usize>,
}

impl Params {
    fn cap(&self) -> f32 {
        self.soft_cap.unwrap_or(0.0)
    }

    fn window(&self) -> i32 {
        self.window
            .map_or(0, |w| i32::try_from(w).unwrap_or(i32::MAX))
    }
}

/// What is done to a layer's heads before they are attended, in this order.
#[derive(Debug, Clone, Copy, Default)]
pub struct Turn<'a> {
    /// Added to q `[H, C]`, k `[K, C]`, v `[K, C]`.
    pub bias: [Option<&'a Buffer<f32>>; 3],
    /// Weights of a norm of every head of q and of k, `[C]`.
    pub norm: [Option<&'a Buffer<f32>>; 2],
    /// Of the norms.
    pub eps: f32,
    /// Rope of q and k.
    pub angles: Option<Angles<'a>>,
    /// Of q and k.
    pub rotation_k: Rotation,
    /// Of v.
    pub rotation_v: Rotation,
}

/// The kernels for one shape of cache and number of query heads.
#[derive(Debug)]
pub struct Attention {
    shape: KvShape,
    heads: usize,
    attend: Kernel,
    grid: usize,
    shared_bytes: usize,
    append: Kernel,
    turn: Kernel,
    turn_many: Kernel,
    fold: Kernel,
    /// Counts of the fold's thread blocks, zero between launches.
    done: Buffer<u32>,
    prefill: Prefill,
}

impl Attention {
    /// Loads the kernels.
    ///
    /// # Errors
    /// If there are none for the head sizes, or the query heads are not a multiple of the KV heads.
    pub fn new(
        device: &Device,
        target: Target,
        shape: KvShape,
        heads: usize,
    ) -> Result<Self, Error> {
        let compute = target.compute(device);
        shape.check()?;
        let gqa = heads / shape.heads;
        length("attention", "query heads", heads, gqa.max(1) * shape.heads)?;
        let together = gqa.div_ceil(gqa.div_ceil(heads_max(shape.c_v)));
        let width = match shape.c_v {
            0..=64 => 2,
            65..=128 => 4,
            _ => 8,
        };
        let name = format!("attention_g{together}_w{width}");
        let attend = Module::load_for(device, &name, compute)?.kernel("attend")?;
        let shared_bytes = shared_bytes(together, &shape);
        attend.allow_shared(shared_bytes)?;
        let properties = device.properties();
        // As `blocks_a_multiprocessor` in the kernels' source.
        let by_registers = if together * width <= 28 { 4 } else { 3 };
        let by_shared = properties.shared_bytes / (shared_bytes + SHARED_RESERVED);
        let others = Module::load_for(device, "attention", compute)?;
        let stream = device.stream()?;
        let done = Buffer::zeroed(&stream, heads)?;
        stream.synchronise()?;
        Ok(Self {
            shape,
            heads,
            attend,
            grid: properties.multiprocessors * by_registers.min(by_shared).max(1),
            shared_bytes,
            append: others.kernel("append")?,
            turn: others.kernel("turn")?,
            turn_many: others.kernel("turn_many")?,
            done,
            fold: others.kernel("fold")?,
            prefill: Prefill::new(device, compute, &shape)?,
        })
    }

    /// The shape of the cache.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// The decode kernel: for its registers and spills.
    pub fn decode_kernel(&self) -> &Kernel {
        &self.attend
    }

    /// Writes cells `position ..` of `tokens` tokens: `k` `[T, K, C]`, `v` `[T, K, C]`, to the blocks of `table` that hold
    /// them; cells whose block is not in it are left out.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn append(
        &self,
        stream: &Stream,
        start: Start,
        table: &Table,
        position: &Buffer<u32>,
        tokens: usize,
        k: &Buffer<f32>,
        v: &Buffer<f32>,
    ) -> Result<(), Error> {
        let shape = &self.shape;
        at_least("append", "K", k.len(), tokens * shape.heads * shape.c_k)?;
        at_least("append", "V", v.len(), tokens * shape.heads * shape.c_v)?;
        at_least("append", "position", position.len(), 1)?;
        if tokens == 0 {
            return Ok(());
        }
        let runs = shape.c_k.max(shape.c_v).div_ceil(32);
        // Tokens may begin in the middle of 32 cells.
        let grid = [tokens.div_ceil(32) + 1, shape.heads, 2].map(|n| n as u32);
        let args = [
            Arg::from(k),
            Arg::from(v),
            Arg::from(&table.entries),
            Arg::from(&table.count),
            Arg::from(position),
            int(tokens),
            int(shape.heads),
            int(shape.c_k),
            int(shape.c_v),
            int(shape.type_k as usize),
            int(shape.type_v as usize),
        ];
        // SAFETY: as the kernel takes them; lengths are checked, the table's blocks are vouched for by who set it.
        unsafe {
            self.append.launch(
                stream,
                Launch::grid(grid, [32, runs as u32, 1]).start(start),
                &args,
            )
        }
    }

    /// Turns `q` `[T, H, C]`, `k` `[T, K, C]`, `v` `[T, K, C]`, as [`Ops::heads`](crate::ops::Ops::heads) does, all in one launch. In
    /// place; with `append` each token's `k` and `v` go to the cell at its position, as by [`Attention::append`], and the buffers keep what they
    /// had: one token's to the last block of the list or one before it, those of several to a block each, in their order.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn turn(
        &self,
        stream: &Stream,
        start: Start,
        tokens: usize,
        q: &mut Buffer<f32>,
        k: &mut Buffer<f32>,
        v: &mut Buffer<f32>,
        how: &Turn<'_>,
        append: Option<(&Table, &Buffer<u32>)>,
    ) -> Result<(), Error> {
        const OP: &str = "turn";
        let (shape, heads) = (&self.shape, self.heads);
        let KvShape { c_k, c_v, .. } = *shape;
        at_least(OP, "queries", q.len(), tokens * heads * c_k)?;
        at_least(OP, "K", k.len(), tokens * shape.heads * c_k)?;
        at_least(OP, "V", v.len(), tokens * shape.heads * c_v)?;
        for (rotation, c) in [(how.rotation_k, c_k), (how.rotation_v, c_v)] {
            if rotation == Rotation::Hadamard && !c.is_power_of_two() {
                length(OP, "head size to be rotated", c, c.next_power_of_two())?;
            }
        }
        let rope = rope_args(OP, how.angles.as_ref(), tokens, c_k)?;
        let list = match append {
            None => [Arg::NULL; 3],
            Some((table, position)) => {
                if tokens > 1 {
                    length(
                        OP,
                        "blocks that are appended to",
                        table.blocks().len(),
                        tokens,
                    )?;
                }
                at_least(OP, "position", position.len(), tokens)?;
                [
                    Arg::from(&table.entries),
                    (&table.count).into(),
                    position.into(),
                ]
            }
        };
        if tokens == 0 {
            return Ok(());
        }
        // As in the kernel.
        let is_v_alike =
            append.is_none() && how.bias[2].is_none() && how.rotation_v == Rotation::None;
        let all = heads + if is_v_alike { 1 } else { 2 } * shape.heads;
        let rotates = |rotation| Arg::from(i32::from(rotation == Rotation::Hadamard));
        let args = [
            Arg::from(q),
            Arg::from(k),
            Arg::from(v),
            optional(OP, "bias", how.bias[0], heads * c_k)?,
            optional(OP, "bias", how.bias[1], shape.heads * c_k)?,
            optional(OP, "bias", how.bias[2], shape.heads * c_v)?,
            optional(OP, "weights", how.norm[0], c_k)?,
            optional(OP, "weights", how.norm[1], c_k)?,
            rope.cos,
            rope.sin,
            rope.position,
            int(tokens),
            int(heads),
            int(shape.heads),
            int(c_k),
            int(c_v),
            rope.pairs,
            rope.halves,
            Arg::from(how.eps),
            rotates(how.rotation_k),
            rotates(how.rotation_v),
            list[0],
            list[1],
            list[2],
            int(shape.type_k as usize),
            int(shape.type_v as usize),
        ];
        let warps = THREADS_TURN / 32;
        let shared = 4 * warps * c_k.max(c_v);
        if append.is_none() && tokens >= TURN_MANY {
            let of_token = heads.div_ceil(TURN_EACH) + 2 * shape.heads.div_ceil(TURN_EACH);
            let grid = [of_token.div_ceil(warps) as u32, tokens as u32, 1];
            let launch = Launch::grid(grid, [THREADS_TURN as u32, 1, 1])
                .shared(shared)
                .start(start);
            // Without the number of tokens, and what belongs to the list.
            let args = [&args[..11], &args[12..21], &[int(TURN_EACH)]].concat();
            // SAFETY: as the kernel takes them; lengths are checked.
            return unsafe { self.turn_many.launch(stream, launch, &args) };
        }
        let launch = Launch::new((tokens * all).div_ceil(warps), THREADS_TURN)
            .shared(shared)
            .start(start);
        // SAFETY: as the kernel takes them; lengths are checked, the table's blocks are vouched for by who set it.
        unsafe { self.turn.launch(stream, launch, &args) }
    }

    /// Leaves the partial results of the token at `position`, `q` `[H, C]`, over the blocks of `table`.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn decode(
        &self,
        stream: &Stream,
        start: Start,
        table: &Table,
        position: &Buffer<u32>,
        params: &Params,
        q: &Buffer<f32>,
        partials: &mut Partials,
    ) -> Result<(), Error> {
        self.decode_row(stream, start, table, position, params, q, 0, partials)
    }

    /// [`Attention::decode`] of the token of one row of `q` `[T, H, C]`, whose position is that row of `position` `[T]`.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    fn decode_row(
        &self,
        stream: &Stream,
        start: Start,
        table: &Table,
        position: &Buffer<u32>,
        params: &Params,
        q: &Buffer<f32>,
        row: usize,
        partials: &mut Partials,
    ) -> Result<(), Error> {
        let shape = &self.shape;
        let values = self.heads * shape.c_k;
        at_least("decode", "queries", q.len(), (row + 1) * values)?;
        at_least("decode", "position", position.len(), row + 1)?;
        at_least("decode", "partials", partials.count, table.end)?;
        let wanted = partials.count * self.heads * (2 + shape.c_v);
        at_least("decode", "partials", partials.buffer.len(), wanted)?;
        let args = [
            from_value(q, row * values),
            Arg::from(&table.entries),
            Arg::from(&table.count),
            from_value(position, row),
            Arg::from(&partials.buffer),
            Arg::from(partials.count as u32),
            int(shape.heads),
            int(self.heads / shape.heads),
            int(shape.c_k),
            int(shape.c_v),
            int(shape.type_k as usize),
            int(shape.type_v as usize),
            Arg::from(params.scale),
            Arg::from(params.cap()),
            Arg::from(params.window()),
        ];
        let launch = Launch::new(self.grid, DECODE_THREADS)
            .shared(self.shared_bytes)
            .start(start);
        // SAFETY: as the kernel takes them; lengths are checked, the table's blocks are vouched for by who set it.
        unsafe { self.attend.launch(stream, launch, &args) }
    }

    /// Merges the partials of `parts`: of blocks from `partials`, of groups from `groups`. Then sinks, one a query head, and
    /// the division: `out` `[H, C]`.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn fold(
        &self,
        stream: &Stream,
        start: Start,
        parts: &Parts,
        partials: &Partials,
        groups: Option<&Partials>,
        sinks: Option<&Buffer<f32>>,
        out: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        self.fold_row(stream, start, parts, partials, groups, sinks, out, 0)
    }

    /// [`Attention::fold`] to a row of `out` `[T, H, C]`.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn fold_row(
        &self,
        stream: &Stream,
        start: Start,
        parts: &Parts,
        partials: &Partials,
        groups: Option<&Partials>,
        sinks: Option<&Buffer<f32>>,
        out: &mut Buffer<f32>,
        row: usize,
    ) -> Result<(), Error> {
        let none = Rotation::None;
        self.fold_any(
            stream, start, parts, partials, groups, sinks, out, row, none, None,
        )
    }

    /// [`Attention::fold`], then `rotation` of every head of `out`; and its values in blocks of some size, in one pass or two, as
    /// [`Quantiser::quantise`](crate::Quantiser::quantise) makes them. Folds of one [`Attention`] do not run side by side.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn fold_to(
        &self,
        stream: &Stream,
        start: Start,
        parts: &Parts,
        partials: &Partials,
        groups: Option<&Partials>,
        sinks: Option<&Buffer<f32>>,
        out: &mut Buffer<f32>,
        rotation: Rotation,
        blocks: Option<(&mut Acts, usize, Passes)>,
    ) -> Result<(), Error> {
        self.fold_any(
            stream, start, parts, partials, groups, sinks, out, 0, rotation, blocks,
        )
    }

    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    fn fold_any(
        &self,
        stream: &Stream,
        start: Start,
        parts: &Parts,
        partials: &Partials,
        groups: Option<&Partials>,
        sinks: Option<&Buffer<f32>>,
        out: &mut Buffer<f32>,
        row: usize,
        rotation: Rotation,
        blocks: Option<(&mut Acts, usize, Passes)>,
    ) -> Result<(), Error> {
        let (shape, heads) = (&self.shape, self.heads);
        let one = heads * (2 + shape.c_v);
        let values = heads * shape.c_v;
        at_least("fold", "outputs", out.len(), (row + 1) * values)?;
        let of_groups = groups.map_or(0, |g| g.buffer.len());
        at_least(
            "fold",
            "partials",
            partials.buffer.len(),
            parts.end[0] * one,
        )?;
        at_least("fold", "groups", of_groups, parts.end[1] * one)?;
        if let Some(sinks) = sinks {
            at_least("fold", "sinks", sinks.len(), heads)?;
        }
        let c = shape.c_v;
        let hadamard = rotation == Rotation::Hadamard;
        if hadamard && !c.is_power_of_two() {
            length("fold", "head size to be rotated", c, c.next_power_of_two())?;
        }
        let (written, block) = match blocks {
            None => (Written::NONE, 0),
            Some((acts, block, passes)) => {
                let shape = Shape {
                    tokens: 1,
                    k: heads * c,
                    block,
                    passes,
                };
                (acts.written("fold", shape)?, block)
            }
        };
        // Heads that are whole blocks together.
        let unit = (1..=heads)
            .find(|u| block == 0 || (u * c).is_multiple_of(block))
            .unwrap_or(heads);
        let args = [
            Arg::from(&partials.buffer),
            groups.map_or(Arg::from(0u64), |g| Arg::from(&g.buffer)),
            Arg::from(&parts.entries),
            Arg::from(&parts.count),
            sinks.map_or(Arg::from(0u64), Arg::from),
            from_value(out, row * values),
            int(heads),
            int(c),
            int(usize::from(hadamard)),
            int(block),
            int(unit),
            Arg::from(&self.done),
            written.q,
            written.meta,
            written.d,
            written.s16,
            written.how,
        ];
        let grid = [heads, c.div_ceil(32), 1].map(|n| n as u32);
        // SAFETY: as the kernel takes them; lengths are checked.
        unsafe {
            self.fold.launch(
                stream,
                Launch::grid(grid, [FOLD_THREADS, 1, 1]).start(start),
                &args,
            )
        }
    }
}

/// Prompts.
impl Attention {
    /// Attends `q` `[T, H, C]`, whose first token is at `position`, over the blocks of `table`, the chunk's own among them:
    /// `out` `[T, H, C]`. The tokens' own cells are already in the blocks.
    ///
    /// Blocks may come in several calls, in ascending order, all with the same queries: `step` says which is the first and which
    /// the last, `spans` carries what was attended so far. A token's result depends neither on that, nor on how a prompt was
    /// cut into chunks. It is not [`Attention::decode`]'s: sums are those of tensor cores, operands half precision.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn prefill(
        &self,
        stream: &Stream,
        start: Start,
        table: &Table,
        params: &Params,
        position: usize,
        tokens: usize,
        q: &Buffer<f32>,
        step: Step,
        sinks: Option<&Buffer<f32>>,
        spans: &mut Spans,
        out: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        self.prefill.attend(
            stream,
            start,
            &self.shape,
            self.heads,
            params,
            position,
            tokens,
            q,
            table,
            0,
            step,
            sinks,
            spans,
            out,
        )
    }
}

/// Bytes of dynamic shared memory of the decode kernel: the larger of what its two ways take.
fn shared_bytes(together: usize, shape: &KvShape) -> usize {
    let many = RING_BYTES + 4 * (together * (shape.c_k + CELLS + 4 * shape.c_v) + 5 * 8);
    let few = 4 * (shape.c_k + CELLS + 4 * shape.c_v + 4 + 1);
    many.max(few)
}

/// What a kernel reads from a buffer's `first` value on.
fn from_value<T: Plain>(buffer: &Buffer<T>, first: usize) -> Arg {
    Arg::from(buffer.address() + (first * size_of::<T>()) as u64)
}

fn int(n: usize) -> Arg {
    Arg::from(n as i32)
}

fn at_least(
    op: &'static str,
    what: &'static str,
    found: usize,
    wanted: usize,
) -> Result<(), Error> {
    if found >= wanted {
        return Ok(());
    }
    length(op, what, found, wanted)
}
