//! Activations as 8-bit blocks on the device (`kernels/acts.cu`), laid out as the products read them.

use std::sync::Arc;

use quant::act::{BLOCK32, BLOCK256, Passes};

use crate::device::{Device, WGMMA_COMPUTE};
use crate::error::{Error, length};
use crate::kernel::{Arg, Kernel, Launch, Module, Start};
use crate::memory::Buffer;
use crate::product::FEW_MAX;
use crate::stream::Stream;

/// Bytes behind the activations that kernels may read, though not use.
const SLACK_BYTES: usize = 4096;

/// Quantised activations of up to so many tokens. One memory serves every K and block up to its size.
#[derive(Debug)]
pub struct Acts {
    pub(crate) q: Buffer<u8>,
    pub(crate) meta: Buffer<u8>,
    pub(crate) d: Buffer<u8>,
    pub(crate) s16: Buffer<u8>,
    /// On devices that have kernels which read arranged activations.
    sharing: Option<Arc<Sharing>>,
    columns_max: usize,
    k_max: usize,
    holds: Shape,
    layout: Layout,
}

/// How quantised activations lie in memory (`kernels/acts.cuh`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// As most kernels read them.
    Blocks,
    /// As the kernels for many columns of devices of 9.0 do.
    Arranged,
}

/// What thread blocks that share a tile hand on (`kernels/gemm_many.cuh`), and whether they have.
#[derive(Debug)]
pub(crate) struct Sharing {
    pub(crate) shares: Buffer<f32>,
    pub(crate) flags: Buffer<i32>,
}

/// Thread blocks of a launch that may share tiles: as many as the largest devices of 9.0 have multiprocessors.
pub(crate) const SHARING_MAX: usize = 132;

/// What each has to hand on: two values for each output of a tile of 128 x 128, and a flag a warp.
const SHARE_VALUES: usize = 2 * 128 * 128;
const SHARE_FLAGS: usize = 8;

/// Columns that are arranged together.
const SET: usize = 16;

/// Values of K that are arranged together.
const ARRANGED_K: usize = 128;

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

    /// A thread for every 4 values, or a warp a block of 256. Where blocks are arranged a thread for every 8.
    pub(crate) fn launch(&self, layout: Layout, threads: usize) -> Launch {
        let values = match layout {
            Layout::Blocks if self.block == BLOCK32 => 4,
            _ => 8,
        };
        let blocks = (self.k / values).div_ceil(threads);
        Launch::grid(
            [blocks as u32, self.tokens as u32, 1],
            [threads as u32, 1, 1],
        )
    }
}

/// Where kernels write blocks, and how.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Written {
    pub(crate) q: Arg,
    pub(crate) meta: Arg,
    pub(crate) d: Arg,
    pub(crate) s16: Arg,
    /// `ActsOut::how`.
    pub(crate) how: Arg,
    pub(crate) layout: Layout,
}

impl Written {
    /// Nowhere.
    pub(crate) const NONE: Self = Self {
        q: Arg::NULL,
        meta: Arg::NULL,
        d: Arg::NULL,
        s16: Arg::NULL,
        how: Arg::NULL,
        layout: Layout::Blocks,
    };
}

impl Acts {
    /// Memory for `tokens` tokens in up to two passes, of up to `k_max` values.
    pub fn new(stream: &Stream, tokens: usize, k_max: usize) -> Result<Self, Error> {
        let device = stream.device();
        let columns = tokens * Passes::Two.count();
        let sharing = if columns > FEW_MAX && device.properties().compute == WGMMA_COMPUTE {
            Some(Arc::new(Sharing {
                shares: Buffer::new(device, SHARING_MAX * SHARE_VALUES)?,
                flags: Buffer::zeroed(stream, SHARING_MAX * SHARE_FLAGS)?,
            }))
        } else {
            None
        };
        Self::with(stream, tokens, k_max, sharing)
    }

    /// The same beside others for as many tokens, used in the same stream.
    pub fn beside(stream: &Stream, other: &Self, k_max: usize) -> Result<Self, Error> {
        let tokens = other.columns_max / Passes::Two.count();
        Self::with(stream, tokens, k_max, other.sharing.clone())
    }

    fn with(
        stream: &Stream,
        tokens: usize,
        k_max: usize,
        sharing: Option<Arc<Sharing>>,
    ) -> Result<Self, Error> {
        let columns_max = (tokens * Passes::Two.count()).next_multiple_of(SET);
        let k = k_max.next_multiple_of(BLOCK256);
        let zeroed = |bytes| Buffer::zeroed(stream, bytes + SLACK_BYTES);
        Ok(Self {
            q: zeroed(columns_max * k)?,
            meta: zeroed(columns_max * k / BLOCK32 * 8)?,
            d: zeroed(columns_max * k / BLOCK256 * 4)?,
            s16: zeroed(columns_max * k / 16 * 2)?,
            sharing,
            columns_max,
            k_max: k,
            holds: Shape {
                tokens: 0,
                k: 0,
                block: BLOCK32,
                passes: Passes::One,
            },
            layout: Layout::Blocks,
        })
    }

    /// The same, never arranged for the kernels that want it: for tests, and for who reads the blocks.
    pub fn in_blocks(self) -> Self {
        Self {
            sharing: None,
            ..self
        }
    }

    /// What is in it.
    pub fn shape(&self) -> Shape {
        self.holds
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    pub(crate) fn sharing(&self) -> Option<&Sharing> {
        self.sharing.as_deref()
    }

    /// Of arranged activations: where scales lie, and sums.
    pub(crate) fn arranged_floats(&self) -> (Arg, Arg) {
        if self.holds.block != BLOCK32 {
            return ((&self.d).into(), (&self.s16).into());
        }
        let columns = self.holds.columns().next_multiple_of(SET);
        let scale_bytes = (self.holds.k / BLOCK32 * columns * 4) as u64;
        let scale = self.meta.address();
        (scale.into(), (scale + scale_bytes).into())
    }

    /// Says that a kernel will write blocks of this shape, and where to.
    ///
    /// # Errors
    /// If there is no room for them.
    pub(crate) fn written(&mut self, op: &'static str, shape: Shape) -> Result<Written, Error> {
        let Shape { k, block, .. } = shape;
        let columns = shape.columns();
        let fits =
            |what, found: usize, room: usize| length(op, what, found.saturating_sub(room), 0);
        fits("columns over the room", columns, self.columns_max)?;
        fits("K over the room", k, self.k_max)?;
        if block != BLOCK32 {
            length(op, "block", block, BLOCK256)?;
        }
        length(op, "values of K past whole blocks", k % block, 0)?;
        let is_arranged =
            self.sharing.is_some() && columns > FEW_MAX && k.is_multiple_of(ARRANGED_K);
        self.holds = shape;
        self.layout = if is_arranged {
            Layout::Arranged
        } else {
            Layout::Blocks
        };
        let groups = match self.layout {
            Layout::Blocks => 0,
            Layout::Arranged => columns.div_ceil(SET) * 2,
        };
        Ok(Written {
            q: (&self.q).into(),
            meta: (&self.meta).into(),
            d: (&self.d).into(),
            s16: (&self.s16).into(),
            how: ((shape.passes.count() + 4 * groups) as i32).into(),
            layout: self.layout,
        })
    }

    /// Bytes of device memory, without what it may have in common with others.
    pub fn device_bytes(&self) -> usize {
        self.q.bytes() + self.meta.bytes() + self.d.bytes() + self.s16.bytes()
    }
}

/// The kernels that quantise, for few tokens and many (whose blocks are arranged).
#[derive(Debug)]
pub struct Quantiser {
    blocks_32: ByLayout,
    blocks_256: ByLayout,
}

/// A kernel for each layout of what it writes.
#[derive(Debug)]
pub(crate) struct ByLayout([Kernel; 2]);

impl ByLayout {
    /// Loads `NAME` and `NAME_many`.
    pub(crate) fn new(module: &Module, name: &str) -> Result<Self, Error> {
        Ok(Self([
            module.kernel(name)?,
            module.kernel(&format!("{name}_many"))?,
        ]))
    }

    pub(crate) fn of(&self, layout: Layout) -> &Kernel {
        match layout {
            Layout::Blocks => &self.0[0],
            Layout::Arranged => &self.0[1],
        }
    }
}

impl Quantiser {
    /// Loads the kernels.
    pub fn new(device: &Device) -> Result<Self, Error> {
        let module = Module::load(device, "acts")?;
        Ok(Self {
            blocks_32: ByLayout::new(&module, "quantise_32")?,
            blocks_256: ByLayout::new(&module, "quantise_256")?,
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
        let last = [(k as i32).into(), to.how];
        let (kernels, args) = if shape.block == BLOCK32 {
            let args = [&[x.into(), to.q, to.meta], &last[..]].concat();
            (&self.blocks_32, args)
        } else {
            let args = [&[x.into(), to.q, to.d, to.s16], &last[..]].concat();
            (&self.blocks_256, args)
        };
        let launch = shape.launch(to.layout, 256).start(start);
        let kernel = kernels.of(to.layout);
        // SAFETY: the kernel reads tokens x K values of `x` and writes that many columns of `acts`; both were checked to have room.
        unsafe { kernel.launch(stream, launch, &args) }
    }
}
