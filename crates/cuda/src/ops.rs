//! Element-wise operations and small reductions, with the CPU's bits: norms, rope, gated activations, additions.

use quant::act::{BLOCK32, BLOCK256, Passes};

use crate::acts::{Acts, ByLayout, Layout, Shape, Written};
use crate::device::Device;
use crate::error::{Error, length};
use crate::kernel::{Arg, Kernel, Launch, Module, Start};
use crate::memory::Buffer;
use crate::product::Target;
use crate::stream::Stream;

/// Threads of a thread block: as in `kernels/ops.cu`.
const THREADS: usize = 256;

/// Nothing to add.
const NO_DELTA: [Arg; 4] = [Arg::NULL; 4];

/// The longest row of a norm: it lies in shared memory (48 KiB without asking, less a factor).
pub const WIDTH_MAX: usize = 12 * 1024 - 16;

/// Threads of a thread block that turns the heads of q, k and v.
pub(crate) const THREADS_TURN: usize = 128;

/// Threads of a norm's thread block at most: no more than fit beside a thread block of the product that follows (`OneCut`).
const NORM_THREADS_MAX: usize = 640;

/// Rows from which on norms have fewer threads each, and how many, of blocks in order and arranged: a row's sum of squares is one chain, so that what
/// counts is how many rows are under way.
const NORM_ROWS_MANY: usize = 64;
const NORM_THREADS_MANY: [usize; 2] = [256, 128];

/// Threads of a thread block that gates and quantises: few, so that one token's values are spread over the device.
const GATED_THREADS: usize = 128;

/// The function that a gated feed-forward applies to its gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// `x * sigmoid(x)`.
    Silu,
    /// The tanh form of GELU.
    Gelu,
}

/// Which values of a head rope turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairs {
    /// Neighbours `2i`, `2i + 1`.
    Neighbours,
    /// Halves `i`, `i + n/2`.
    Halves,
}

/// What is added to the residual stream, `[T, D]` each but for the vectors.
#[derive(Debug, Clone, Copy)]
pub struct Delta<'a> {
    /// The product.
    pub first: &'a Buffer<f32>,
    /// Its second pass.
    pub second: Option<&'a Buffer<f32>>,
    /// Its bias, `[D]`.
    pub bias: Option<&'a Buffer<f32>>,
    /// Weights of the norm that it passes before it is added, `[D]`.
    pub norm: Option<&'a Buffer<f32>>,
}

/// What is made of a norm's result `[T, D]`, in the launch that computes it.
#[derive(Debug, Default)]
pub struct Normed<'a> {
    /// The values.
    pub row: Option<&'a mut Buffer<f32>>,
    /// Blocks of 32, and rows of codes a token.
    pub blocks32: Option<(&'a mut Acts, Passes)>,
    /// Blocks of 256, and rows of codes a token.
    pub blocks256: Option<(&'a mut Acts, Passes)>,
}

/// Cosines and sines, `[positions, pairs]`.
#[derive(Debug, Clone, Copy)]
pub struct Angles<'a> {
    /// Cosines.
    pub cos: &'a Buffer<f32>,
    /// Sines.
    pub sin: &'a Buffer<f32>,
    /// Pairs of values that are turned.
    pub pairs: usize,
    /// Which.
    pub which: RopePairs,
    /// The first token's row, in device memory; `None`: row 0.
    pub position: Option<&'a Buffer<u32>>,
}

/// What is done to heads, in this order.
#[derive(Debug, Clone, Copy, Default)]
pub struct Heads<'a> {
    /// Added, `[H, C]`.
    pub bias: Option<&'a Buffer<f32>>,
    /// Weights of a norm of every head, `[C]`.
    pub norm: Option<&'a Buffer<f32>>,
    /// Rope.
    pub angles: Option<Angles<'a>>,
    /// What is done last.
    pub rotation: Rotation,
}

/// What spreads a head's large values over all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Rotation {
    /// Nothing.
    #[default]
    None,
    /// The product with the normalised Hadamard matrix, of heads whose size is a power of two.
    Hadamard,
}

/// The kernels.
#[derive(Debug)]
pub struct Ops {
    residual_norm: ByLayout,
    heads: Kernel,
    gated: Kernel,
    gated_32: ByLayout,
    gated_256: ByLayout,
    add: Kernel,
    soft_cap: Kernel,
    scale: Kernel,
}

impl Ops {
    /// Loads the kernels.
    pub fn new(device: &Device, target: Target) -> Result<Self, Error> {
        let module = Module::load_for(device, "ops", target.compute(device))?;
        Ok(Self {
            residual_norm: ByLayout::new(&module, "residual_norm")?,
            heads: module.kernel("heads")?,
            gated: module.kernel("gated")?,
            gated_32: ByLayout::new(&module, "gated_32")?,
            gated_256: ByLayout::new(&module, "gated_256")?,
            add: module.kernel("add")?,
            soft_cap: module.kernel("soft_cap")?,
            scale: module.kernel("scale")?,
        })
    }

    /// `x += delta`, then `out = norm(x) * w`, row by row of `x` `[T, D]`; without `w` the norm is not scaled.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn residual_norm(
        &self,
        stream: &Stream,
        start: Start,
        tokens: usize,
        width: usize,
        eps: f32,
        x: &mut Buffer<f32>,
        delta: Option<Delta<'_>>,
        w: Option<&Buffer<f32>>,
        out: Option<&mut Buffer<f32>>,
    ) -> Result<(), Error> {
        let out = Normed {
            row: out,
            ..Normed::default()
        };
        self.residual_norm_to(stream, start, tokens, width, eps, x, delta, w, out)
    }

    /// [`Ops::residual_norm`], whose result is quantised as well, as [`Quantiser::quantise`](crate::Quantiser::quantise) does.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn residual_norm_to(
        &self,
        stream: &Stream,
        start: Start,
        tokens: usize,
        width: usize,
        eps: f32,
        x: &mut Buffer<f32>,
        delta: Option<Delta<'_>>,
        w: Option<&Buffer<f32>>,
        out: Normed<'_>,
    ) -> Result<(), Error> {
        let (op, n) = ("residual_norm", tokens * width);
        at_least(op, "x", x.len(), n)?;
        let delta = match &delta {
            None => NO_DELTA,
            Some(delta) => [
                optional(op, "delta", Some(delta.first), n)?,
                optional(op, "second pass", delta.second, n)?,
                optional(op, "bias", delta.bias, width)?,
                optional(op, "weights of the delta", delta.norm, width)?,
            ],
        };
        let w = optional(op, "weights", w, width)?;
        // SAFETY: lengths are checked.
        unsafe {
            self.rows(
                stream,
                start,
                tokens,
                width,
                eps,
                Arg::from(x),
                delta,
                w,
                out,
            )
        }
    }

    /// `out = norm(x) * w`, row by row of `x` `[T, D]`, as values, quantised, or both.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn norm_to(
        &self,
        stream: &Stream,
        start: Start,
        tokens: usize,
        width: usize,
        eps: f32,
        x: &Buffer<f32>,
        w: &Buffer<f32>,
        out: Normed<'_>,
    ) -> Result<(), Error> {
        let op = "norm";
        at_least(op, "x", x.len(), tokens * width)?;
        let w = optional(op, "weights", Some(w), width)?;
        let x = Arg::from(x);
        // SAFETY: lengths are checked; without a delta `x` is only read.
        unsafe { self.rows(stream, start, tokens, width, eps, x, NO_DELTA, w, out) }
    }

    /// `x = norm(x) * w`, row by row of `x` `[T, D]`.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn norm_rows(
        &self,
        stream: &Stream,
        start: Start,
        tokens: usize,
        width: usize,
        eps: f32,
        x: &mut Buffer<f32>,
        w: &Buffer<f32>,
    ) -> Result<(), Error> {
        let op = "norm of rows";
        at_least(op, "x", x.len(), tokens * width)?;
        let w = optional(op, "weights", Some(w), width)?;
        let from = Arg::from(&*x);
        let out = Normed {
            row: Some(x),
            ..Normed::default()
        };
        // SAFETY: lengths are checked; a thread block writes its row when all of it has been read.
        unsafe { self.rows(stream, start, tokens, width, eps, from, NO_DELTA, w, out) }
    }

    /// A thread block a row.
    ///
    /// # Safety
    /// The arguments are 0 or as long as `kernels/ops.cu` says.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    unsafe fn rows(
        &self,
        stream: &Stream,
        start: Start,
        tokens: usize,
        width: usize,
        eps: f32,
        x: Arg,
        [first, second, bias, norm]: [Arg; 4],
        w: Arg,
        out: Normed<'_>,
    ) -> Result<(), Error> {
        const OP: &str = "norm";
        if width > WIDTH_MAX {
            length(OP, "width", width, WIDTH_MAX)?;
        }
        let row = optional(OP, "outputs", out.row.as_deref(), tokens * width)?;
        let written = |to: Option<(&mut Acts, Passes)>, block| match to {
            None => Ok(Written::NONE),
            Some((acts, passes)) => acts.written(
                OP,
                Shape {
                    tokens,
                    k: width,
                    block,
                    passes,
                },
            ),
        };
        let blocks32 = written(out.blocks32, BLOCK32)?;
        let blocks256 = written(out.blocks256, BLOCK256)?;
        if tokens == 0 {
            return Ok(());
        }
        let mut args = vec![x, first, second, bias];
        let is_written = [&blocks32, &blocks256].map(|blocks| !blocks.q.is_null());
        let is_arranged =
            |blocks: &Written| blocks.q.is_null() || blocks.layout == Layout::Arranged;
        let all_arranged = is_arranged(&blocks32) && is_arranged(&blocks256);
        let has_many = tokens >= NORM_ROWS_MANY;
        let layout = if has_many && norm.is_null() && is_written.contains(&true) && all_arranged {
            Layout::Arranged
        } else {
            args.push(norm);
            Layout::Blocks
        };
        args.extend([
            w,
            row,
            Arg::from(width as i32),
            Arg::from(eps),
            blocks32.q,
            blocks32.meta,
            blocks32.how,
            blocks256.q,
            blocks256.d,
            blocks256.s16,
            blocks256.how,
        ]);
        // Two pieces of 4 values a thread.
        let threads = width.div_ceil(8).next_multiple_of(32);
        let most = match layout {
            _ if !has_many => NORM_THREADS_MAX,
            Layout::Blocks => NORM_THREADS_MANY[0],
            Layout::Arranged => NORM_THREADS_MANY[1],
        };
        let launch = Launch::new(tokens, threads.clamp(128, most))
            .shared(4 * width)
            .start(start);
        let kernel = self.residual_norm.of(layout);
        // SAFETY: the caller's promise.
        unsafe { kernel.launch(stream, launch, &args) }
    }

    /// Bias, norm, rope and rotation of `x` `[T, H, C]`, in place.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn heads(
        &self,
        stream: &Stream,
        start: Start,
        tokens: usize,
        count: usize,
        c: usize,
        eps: f32,
        x: &mut Buffer<f32>,
        what: &Heads<'_>,
    ) -> Result<(), Error> {
        let op = "heads";
        at_least(op, "x", x.len(), tokens * count * c)?;
        if c > 1024 {
            length(op, "head size", c, 1024)?;
        }
        let hadamard = what.rotation == Rotation::Hadamard;
        if hadamard && !c.is_power_of_two() {
            length(op, "head size to be rotated", c, c.next_power_of_two())?;
        }
        let rope = rope_args(op, what.angles.as_ref(), tokens, c)?;
        let args = [
            Arg::from(x),
            optional(op, "bias", what.bias, count * c)?,
            optional(op, "weights", what.norm, c)?,
            rope.cos,
            rope.sin,
            rope.position,
            Arg::from(tokens as i32),
            Arg::from(count as i32),
            Arg::from(c as i32),
            rope.pairs,
            rope.halves,
            Arg::from(eps),
            Arg::from(i32::from(hadamard)),
        ];
        if tokens * count == 0 {
            return Ok(());
        }
        let warps = THREADS / 32;
        let launch = Launch::new((tokens * count).div_ceil(warps), THREADS)
            .shared(4 * warps * c)
            .start(start);
        // SAFETY: as the kernel takes them; lengths are checked.
        unsafe { self.heads.launch(stream, launch, &args) }
    }

    /// `gate = f(gate) * up`, `n` values.
    pub fn gated(
        &self,
        stream: &Stream,
        start: Start,
        f: Gate,
        n: usize,
        gate: &mut Buffer<f32>,
        up: &Buffer<f32>,
    ) -> Result<(), Error> {
        at_least("gated", "gates", gate.len(), n)?;
        at_least("gated", "ups", up.len(), n)?;
        let f = i32::from(f == Gate::Gelu);
        let args = [
            Arg::from(gate),
            Arg::from(up),
            Arg::from(f),
            Arg::from(n as u64),
        ];
        self.each(stream, start, &self.gated, n, &args)
    }

    /// [`Ops::gated`] of `[T, K]`, quantised, as [`Quantiser::quantise`](crate::Quantiser::quantise) does. `gate` holds the result
    /// only if it `is_kept`.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn gated_to(
        &self,
        stream: &Stream,
        start: Start,
        f: Gate,
        gate: &mut Buffer<f32>,
        up: &Buffer<f32>,
        is_kept: bool,
        shape: Shape,
        acts: &mut Acts,
    ) -> Result<(), Error> {
        let op = "gated";
        let n = shape.tokens.saturating_mul(shape.k);
        at_least(op, "gates", gate.len(), n)?;
        at_least(op, "ups", up.len(), n)?;
        let to = acts.written(op, shape)?;
        if n == 0 {
            return Ok(());
        }
        let f = i32::from(f == Gate::Gelu);
        let first = [
            Arg::from(gate),
            up.into(),
            f.into(),
            i32::from(is_kept).into(),
            to.q,
        ];
        let last = [Arg::from(shape.k as i32), to.how];
        let (kernels, args) = if shape.block == BLOCK32 {
            (&self.gated_32, [&first, &[to.meta][..], &last].concat())
        } else {
            let args = [&first, &[to.d, to.s16][..], &last].concat();
            (&self.gated_256, args)
        };
        let launch = shape.launch(to.layout, GATED_THREADS).start(start);
        let kernel = kernels.of(to.layout);
        // SAFETY: as the kernels take them; lengths are checked.
        unsafe { kernel.launch(stream, launch, &args) }
    }

    /// `x += y`, both `[T, D]`.
    pub fn add(
        &self,
        stream: &Stream,
        start: Start,
        n: usize,
        x: &mut Buffer<f32>,
        y: &Buffer<f32>,
    ) -> Result<(), Error> {
        at_least("add", "x", x.len(), n)?;
        at_least("add", "y", y.len(), n)?;
        let args = [
            Arg::from(x),
            Arg::from(y),
            Arg::from(1i32),
            Arg::from(1i32),
            Arg::from(n as u64),
        ];
        self.each(stream, start, &self.add, n, &args)
    }

    /// Adds `bias` `[D]` to each of `tokens` rows of `x`.
    pub fn add_bias(
        &self,
        stream: &Stream,
        start: Start,
        tokens: usize,
        width: usize,
        x: &mut Buffer<f32>,
        bias: &Buffer<f32>,
    ) -> Result<(), Error> {
        let n = tokens * width;
        at_least("add_bias", "x", x.len(), n)?;
        at_least("add_bias", "bias", bias.len(), width)?;
        let args = [
            Arg::from(x),
            Arg::from(bias),
            Arg::from(width as i32),
            Arg::from(0i32),
            Arg::from(n as u64),
        ];
        self.each(stream, start, &self.add, n, &args)
    }

    /// `x = cap * tanh(x / cap)`, `n` values.
    pub fn soft_cap(
        &self,
        stream: &Stream,
        start: Start,
        n: usize,
        x: &mut Buffer<f32>,
        cap: f32,
    ) -> Result<(), Error> {
        at_least("soft_cap", "x", x.len(), n)?;
        let args = [Arg::from(x), Arg::from(cap), Arg::from(n as u64)];
        self.each(stream, start, &self.soft_cap, n, &args)
    }

    /// `x *= factor`, `n` values.
    pub fn scale(
        &self,
        stream: &Stream,
        start: Start,
        n: usize,
        x: &mut Buffer<f32>,
        factor: f32,
    ) -> Result<(), Error> {
        at_least("scale", "x", x.len(), n)?;
        let args = [Arg::from(x), Arg::from(factor), Arg::from(n as u64)];
        self.each(stream, start, &self.scale, n, &args)
    }

    /// A thread a value.
    fn each(
        &self,
        stream: &Stream,
        start: Start,
        kernel: &Kernel,
        n: usize,
        args: &[Arg],
    ) -> Result<(), Error> {
        if n == 0 {
            return Ok(());
        }
        // SAFETY: the callers give what the kernel takes and have checked lengths.
        unsafe {
            kernel.launch(
                stream,
                Launch::new(n.div_ceil(THREADS), THREADS).start(start),
                args,
            )
        }
    }
}

/// A rope as kernels take it.
pub(crate) struct RopeArgs {
    pub(crate) cos: Arg,
    pub(crate) sin: Arg,
    pub(crate) position: Arg,
    pub(crate) pairs: Arg,
    pub(crate) halves: Arg,
}

/// A rope of heads of `c` values; none: no pairs.
pub(crate) fn rope_args(
    op: &'static str,
    angles: Option<&Angles<'_>>,
    tokens: usize,
    c: usize,
) -> Result<RopeArgs, Error> {
    let Some(angles) = angles else {
        return Ok(RopeArgs {
            cos: Arg::NULL,
            sin: Arg::NULL,
            position: Arg::NULL,
            pairs: Arg::NULL,
            halves: Arg::NULL,
        });
    };
    let pairs = angles.pairs;
    at_least(op, "head size", c, 2 * pairs)?;
    // With a position in device memory its row is the caller's affair: the host does not know it.
    let rows = if angles.position.is_some() { 1 } else { tokens };
    let position = match angles.position {
        None => Arg::NULL,
        Some(position) => {
            at_least(op, "position", position.len(), 1)?;
            Arg::from(position)
        }
    };
    Ok(RopeArgs {
        cos: optional(op, "cosines", Some(angles.cos), rows * pairs)?,
        sin: optional(op, "sines", Some(angles.sin), rows * pairs)?,
        position,
        pairs: Arg::from(pairs as i32),
        halves: Arg::from(i32::from(angles.which == RopePairs::Halves)),
    })
}

/// An operand that may be absent: null.
pub(crate) fn optional(
    op: &'static str,
    what: &'static str,
    buffer: Option<&Buffer<f32>>,
    wanted: usize,
) -> Result<Arg, Error> {
    let Some(buffer) = buffer else {
        return Ok(Arg::from(0u64));
    };
    at_least(op, what, buffer.len(), wanted)?;
    Ok(Arg::from(buffer))
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
