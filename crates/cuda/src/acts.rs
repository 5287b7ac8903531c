//! Activations as 8-bit blocks on the device (`kernels/acts.cu`), laid out as the products read them.

use std::sync::atomic::{AtomicBool, Ordering};

use quant::act::{BLOCK32, BLOCK256, Passes};

use crate::device::{Device, WGMMA_COMPUTE};
use crate::error::{Error, length};
use crate::kernel::{Arg, Kernel, Launch, Module, Start};
use crate::memory::Buffer;
use crate::product::FEW_MAX;
use crate::stream::Stream;

/// Columns (rows of codes) that lie together.
const GROUP: usize = 8;

/// Bytes behind the activations that kernels may read, though not use.
const SLACK_BYTES: usize = 4096;

/// Quantised activations of up to so many tokens. One memory serves every K and block up to its size.
#[derive(Debug)]
pub struct Acts {
    pub(crate) q: Buffer<u8>,
    pub(crate) meta: Buffer<u8>,
    pub(crate) d: Buffer<u8>,
    pub(crate) s16: Buffer<u8>,
    arranged: Option<Arranged>,
    columns_max: usize,
    k_max: usize,
    holds: Shape,
}

/// The same activations as the kernels for many columns of devices of 9.0 read them (`kernels/gemm_acts.cu`).
#[derive(Debug)]
pub(crate) struct Arranged {
    pub(crate) image: Buffer<u8>,
    pub(crate) scale: Buffer<u8>,
    pub(crate) sums: Buffer<u8>,
    blocks_32: Kernel,
    blocks_256: Kernel,
    /// Whether it holds what was quantised last.
    current: AtomicBool,
}

/// Columns that are arranged together.
const SET: usize = 16;

impl Arranged {
    /// Memory for as many columns of as many values, for devices that have the kernels.
    fn new(stream: &Stream, columns: usize, k: usize) -> Result<Option<Self>, Error> {
        let device = stream.device();
        if columns <= FEW_MAX || device.properties().compute != WGMMA_COMPUTE {
            return Ok(None);
        }
        let module = Module::load(device, "gemm_acts")?;
        let columns = columns.next_multiple_of(SET);
        Ok(Some(Self {
            image: Buffer::new(device, columns * k)?,
            scale: Buffer::new(device, columns * k / BLOCK32 * 4)?,
            sums: Buffer::new(device, columns * k / BLOCK32 * 4)?,
            blocks_32: module.kernel("arrange_32")?,
            blocks_256: module.kernel("arrange_256")?,
            current: AtomicBool::new(false),
        }))
    }

    fn bytes(&self) -> usize {
        self.image.bytes() + self.scale.bytes() + self.sums.bytes()
    }
}

/// What activations are in an [`Acts`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Tokens.
    pub tokens: usize,
    /// Values of a token.
    pub k: usize,
    /// Values of a block: 32 or 256.
    pub block: usize,
    /// Rows of codes a token.
    pub passes: Passes,
}

impl Shape {
    /// Rows of codes.
    pub fn columns(&self) -> usize {
        self.tokens * self.passes.count()
    }

    /// A thread for every 4 values, or a warp a block of 256.
    pub(crate) fn launch(&self, threads: usize) -> Launch {
        let blocks = if self.block == BLOCK32 {
            (self.k / 4).div_ceil(threads)
        } else {
            (self.k / BLOCK256).div_ceil(threads / 32)
        };
        Launch::grid(
            [blocks as u32, self.tokens as u32, 1],
            [threads as u32, 1, 1],
        )
    }
}

/// Where kernels write blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Written {
    pub(crate) q: Arg,
    pub(crate) meta: Arg,
    pub(crate) d: Arg,
    pub(crate) s16: Arg,
    pub(crate) passes: Arg,
}

impl Written {
    /// Nowhere.
    pub(crate) const NONE: Self = Self {
        q: Arg::NULL,
        meta: Arg::NULL,
        d: Arg::NULL,
        s16: Arg::NULL,
        passes: Arg::NULL,
    };
}

impl Acts {
    /// Memory for `tokens` tokens in up to two passes, of up to `k_max` values.
    pub fn new(stream: &Stream, tokens: usize, k_max: usize) -> Result<Self, Error> {
        let columns_max = (tokens * Passes::Two.count()).next_multiple_of(GROUP);
        let k = k_max.next_multiple_of(BLOCK256);
        let zeroed = |bytes| Buffer::zeroed(stream, bytes + SLACK_BYTES);
        Ok(Self {
            q: zeroed(columns_max * k)?,
            meta: zeroed(columns_max * k / BLOCK32 * 8)?,
            d: zeroed(columns_max * k / BLOCK256 * 4)?,
            s16: zeroed(columns_max * k / 16 * 2)?,
            arranged: Arranged::new(stream, columns_max, k)?,
            columns_max,
            k_max: k,
            holds: Shape {
                tokens: 0,
                k: 0,
                block: BLOCK32,
                passes: Passes::One,
            },
        })
    }

    /// What is in it.
    pub fn shape(&self) -> Shape {
        self.holds
    }

    /// Says that a kernel will write blocks of this shape, and where to.
    ///
    /// # Errors
    /// If there is no room for them.
    pub(crate) fn written(&mut self, op: &'static str, shape: Shape) -> Result<Written, Error> {
        let Shape { k, block, .. } = shape;
        let fits =
            |what, found: usize, room: usize| length(op, what, found.saturating_sub(room), 0);
        fits("columns over the room", shape.columns(), self.columns_max)?;
        fits("K over the room", k, self.k_max)?;
        if block != BLOCK32 {
            length(op, "block", block, BLOCK256)?;
        }
        length(op, "values of K past whole blocks", k % block, 0)?;
        self.holds = shape;
        if let Some(arranged) = &self.arranged {
            arranged.current.store(false, Ordering::Relaxed);
        }
        Ok(Written {
            q: (&self.q).into(),
            meta: (&self.meta).into(),
            d: (&self.d).into(),
            s16: (&self.s16).into(),
            passes: (shape.passes.count() as i32).into(),
        })
    }

    /// The activations in the layout of the kernels for many columns; made when they are first asked for.
    ///
    /// # Errors
    /// If the device has no such kernels.
    pub(crate) fn arranged(&self, stream: &Stream, start: Start) -> Result<&Arranged, Error> {
        let arranged = self.arranged.as_ref().ok_or_else(|| Error::NoModule {
            module: "gemm_acts".into(),
        })?;
        if arranged.current.swap(true, Ordering::Relaxed) {
            return Ok(arranged);
        }
        let Shape { k, block, .. } = self.holds;
        let columns = self.holds.columns();
        let last = [
            Arg::from(&arranged.image),
            (&arranged.scale).into(),
            (&arranged.sums).into(),
            (k as i32).into(),
            (columns as i32).into(),
        ];
        // A thread takes a run of 32 values of a column; a thread block whole lines of 128 bytes of 16 columns.
        let (kernel, args) = if block == BLOCK32 {
            let args = [&[Arg::from(&self.q), (&self.meta).into()], &last[..]].concat();
            (&arranged.blocks_32, args)
        } else {
            let args = [
                &[Arg::from(&self.q), (&self.d).into(), (&self.s16).into()],
                &last[..],
            ]
            .concat();
            (&arranged.blocks_256, args)
        };
        let runs = (k / 32).next_multiple_of(4);
        let grid = [(runs * SET).div_ceil(256), columns.div_ceil(SET), 1];
        let launch = Launch::grid(grid.map(|n| n as u32), [256, 1, 1]).start(start);
        // SAFETY: the kernel reads the columns that `self` holds and writes as many, filled up to whole sets, for which there is room.
        unsafe { kernel.launch(stream, launch, &args) }?;
        Ok(arranged)
    }

    /// Bytes of device memory.
    pub fn device_bytes(&self) -> usize {
        let arranged = self.arranged.as_ref().map_or(0, Arranged::bytes);
        self.q.bytes() + self.meta.bytes() + self.d.bytes() + self.s16.bytes() + arranged
    }
}

/// The kernels that quantise.
#[derive(Debug)]
pub struct Quantiser {
    blocks_32: Kernel,
    blocks_256: Kernel,
}

impl Quantiser {
    /// Loads the kernels.
    pub fn new(device: &Device) -> Result<Self, Error> {
        let module = Module::load(device, "acts")?;
        Ok(Self {
            blocks_32: module.kernel("quantise_32")?,
            blocks_256: module.kernel("quantise_256")?,
        })
    }

    /// Quantises `x`, `shape.tokens` rows of `shape.k` values, into `acts`.
    pub fn quantise(
        &self,
        stream: &Stream,
        start: Start,
        x: &Buffer<f32>,
        shape: Shape,
        acts: &mut Acts,
    ) -> Result<(), Error> {
        const OP: &str = "quantise";
        let Shape { tokens, k, .. } = shape;
        let over = tokens.saturating_mul(k).saturating_sub(x.len());
        length(OP, "tokens x K over the input", over, 0)?;
        let to = acts.written(OP, shape)?;
        if tokens == 0 || k == 0 {
            return Ok(());
        }
        let last = [(k as i32).into(), to.passes];
        let (kernel, args) = if shape.block == BLOCK32 {
            let args = [&[x.into(), to.q, to.meta], &last[..]].concat();
            (&self.blocks_32, args)
        } else {
            let args = [&[x.into(), to.q, to.d, to.s16], &last[..]].concat();
            (&self.blocks_256, args)
        };
        let launch = shape.launch(256).start(start);
        // SAFETY: the kernel reads tokens x K values of `x` and writes that many columns of `acts`; both were checked to have room.
        unsafe { kernel.launch(stream, launch, &args) }
    }
}
