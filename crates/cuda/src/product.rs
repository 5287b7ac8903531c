//! Products with weights in every format (`kernels/product*.cu`): `y[T, N] = x[T, K] . W[N, K]`, as `quant::product` defines them.
//!
//! A format's kernels are a module of their own, so that a model compiles only what it uses.

mod cut;
mod step;

pub(crate) use cut::meets_sums;
pub use step::StepRecord;

use gguf::TensorType;
use quant::act::Passes;
use quant::formats::{self, Class};
use quant::product::act_block;

use crate::acts::{Acts, Layout, SHARING_MAX, Shape};
use crate::device::Device;
use crate::error::{Error, length};
use crate::kernel::{Arg, Kernel, Launch, Module, Start};
use crate::memory::Buffer;
use crate::stream::Stream;
use crate::weights::Weights;
pub(crate) use cut::NORM_MAX;
use cut::{FewCut, FloatCut, ManyCut, OneCut, Room};

/// Columns that the kernels for few take.
pub const FEW_MAX: usize = 16;

/// Tokens up to which float weights are read again for every four.
const FLOAT_FEW_MAX: usize = 32;

/// Matrices that one launch multiplies.
pub const TOGETHER_MAX: usize = 3;

/// A matrix, and what its product with the activations goes to.
#[derive(Debug)]
pub struct Output<'a> {
    /// `[N, K]`.
    pub w: &'a Weights,
    /// Added to every token's product, `[N]`.
    pub bias: Option<&'a Buffer<f32>>,
    /// `[T, N]`.
    pub y: &'a mut Buffer<f32>,
}

/// What a product's activations are the norm of, of one token: `norm(x + delta) * w`.
#[derive(Debug)]
pub struct Before<'a> {
    /// `[K]`.
    pub x: &'a Buffer<f32>,
    /// What is added to it, and where the sum goes, which must be other memory, `[K]` each.
    pub delta: Option<(&'a Buffer<f32>, &'a mut Buffer<f32>)>,
    /// `[K]`.
    pub w: &'a Buffer<f32>,
    /// Of the norm.
    pub eps: f32,
}

impl Before<'_> {
    /// Whether all of it has K values, and the sum is in memory of its own.
    pub(crate) fn check(&self, op: &'static str, k: usize) -> Result<(), Error> {
        room(op, "values of x", self.x.len(), k)?;
        room(op, "weights", self.w.len(), k)?;
        let Some((delta, sum)) = &self.delta else {
            return Ok(());
        };
        room(op, "values of the delta", delta.len(), k)?;
        room(op, "values of the sum", sum.len(), k)?;
        let is_apart = sum.address() != self.x.address() && sum.address() != delta.address();
        length(
            op,
            "memory of the sum that is another",
            usize::from(is_apart),
            1,
        )
    }

    /// As kernels take it: x, delta, w, sum, eps.
    pub(crate) fn args(&self) -> [Arg; 5] {
        let [delta, sum] = match &self.delta {
            None => [Arg::NULL; 2],
            Some((delta, sum)) => [Arg::from(*delta), Arg::from(&**sum)],
        };
        [self.x.into(), delta, self.w.into(), sum, self.eps.into()]
    }
}

/// The products of one format.
#[derive(Debug)]
pub struct Product {
    ty: TensorType,
    kernels: Kernels,
    decode: Kernel,
    begin: Kernel,
}

#[derive(Debug)]
enum Kernels {
    Quantised {
        few: Few,
        /// For more. Which one is a matter of time alone.
        many: Vec<Many>,
    },
    Float {
        one: Kernel,
        few: Kernel,
        many: Kernel,
    },
}

/// A kernel for many columns.
#[derive(Debug)]
struct Many {
    name: &'static str,
    kernel: Kernel,
    cut: ManyCut,
}

impl Many {
    fn takes(&self, acts: &Acts) -> bool {
        self.cut.reads == acts.layout() && self.cut.takes(acts.shape().k)
    }
}

/// Kernels for few columns.
#[derive(Debug)]
struct Few {
    /// For 1 and 2 columns.
    one: [Kernel; OneCut::COLUMNS_MAX],
    /// For 1 column that it makes itself.
    normed: Kernel,
    /// For up to 8 and up to 16 columns, and registers a thread.
    some: [(Kernel, usize); 2],
}

/// Which compiled kernels are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The best for the device.
    Best,
    /// Those that every supported device runs.
    Portable,
}

impl Target {
    /// The compute capability whose kernels are loaded.
    pub(crate) fn compute(self, device: &Device) -> (u32, u32) {
        match self {
            Self::Best => device.properties().compute,
            Self::Portable => crate::device::COMPUTE_MIN,
        }
    }
}

impl Product {
    /// Loads the kernels of a format.
    pub fn new(device: &Device, ty: TensorType, target: Target) -> Result<Self, Error> {
        let class = formats::class(ty).ok_or(Error::Format {
            op: "product",
            format: ty.name(),
        })?;
        let compute = target.compute(device);
        let name = ty.name().to_ascii_lowercase();
        if class == Class::Float {
            let module = Module::load_for(device, "product_float", compute)?;
            let kernel = |kind: &str| module.kernel(&format!("{kind}_{name}"));
            let few = |name| -> Result<Kernel, Error> {
                let kernel = kernel(name)?;
                kernel.allow_shared(device.properties().shared_bytes_block_max)?;
                Ok(kernel)
            };
            return Ok(Self {
                ty,
                kernels: Kernels::Float {
                    one: few("gemv_1")?,
                    few: few("gemv_4")?,
                    many: kernel("gemm")?,
                },
                decode: kernel("decode")?,
                begin: kernel("begin")?,
            });
        }
        let module = Module::load_for(device, &format!("product_{name}"), compute)?;
        let few = |name| -> Result<Kernel, Error> {
            let kernel = module.kernel(name)?;
            kernel.allow_shared(device.properties().shared_bytes_block_max)?;
            Ok(kernel)
        };
        let some = |name| -> Result<(Kernel, usize), Error> {
            let kernel = few(name)?;
            let registers = kernel.registers()?;
            Ok((kernel, registers))
        };
        let many = |(name, cut): (&'static str, ManyCut)| -> Result<Many, Error> {
            let kernel = module.kernel(name)?;
            kernel.allow_shared(cut.shared_bytes)?;
            Ok(Many { name, kernel, cut })
        };
        Ok(Self {
            ty,
            kernels: Kernels::Quantised {
                few: Few {
                    one: [few("gemv_1")?, few("gemv_2")?],
                    normed: few("gemv_normed")?,
                    some: [some("gemv_8")?, some("gemv_16")?],
                },
                many: ManyCut::all(ty, compute)
                    .into_iter()
                    .map(many)
                    .collect::<Result<_, _>>()?,
            },
            decode: module.kernel("decode")?,
            begin: module.kernel("begin")?,
        })
    }

    /// The format.
    pub fn ty(&self) -> TensorType {
        self.ty
    }

    /// `y[T, N]` of quantised activations.
    pub fn quantised(
        &self,
        stream: &Stream,
        start: Start,
        w: &Weights,
        acts: &Acts,
        y: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        self.quantised_by(None, stream, start, w, acts, y)
    }

    /// The kernels for more than [`FEW_MAX`] columns, for tests and measurements: names for [`Product::quantised_by`].
    pub fn many(&self) -> Vec<&'static str> {
        match &self.kernels {
            Kernels::Quantised { many, .. } => many.iter().map(|many| many.name).collect(),
            Kernels::Float { .. } => Vec::new(),
        }
    }

    /// Whether the kernel of this name takes these activations.
    pub fn takes(&self, name: &str, acts: &Acts) -> bool {
        let many = match &self.kernels {
            Kernels::Quantised { many, .. } => &many[..],
            Kernels::Float { .. } => &[],
        };
        many.iter()
            .any(|many| many.name == name && many.takes(acts))
    }

    /// The same as [`Product::quantised`], of many columns by the kernel of this name.
    ///
    /// # Errors
    /// If there is no such kernel, or it does not take this K.
    pub fn quantised_by(
        &self,
        name: Option<&str>,
        stream: &Stream,
        start: Start,
        w: &Weights,
        acts: &Acts,
        y: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        let bias = None;
        self.together_by(name, stream, start, acts, &mut [Output { w, bias, y }])
    }

    /// Products of the same activations with up to [`TOGETHER_MAX`] matrices, in one launch where the kernel for so many columns can.
    ///
    /// # Errors
    /// If there are more, or the matrices are not all of this format and of the activations' K.
    pub fn together(
        &self,
        stream: &Stream,
        start: Start,
        acts: &Acts,
        outputs: &mut [Output<'_>],
    ) -> Result<(), Error> {
        self.together_by(None, stream, start, acts, outputs)
    }

    /// The same as [`Product::together`], of many columns by the kernel of this name.
    ///
    /// # Errors
    /// As [`Product::together`] and [`Product::quantised_by`].
    pub fn together_by(
        &self,
        name: Option<&str>,
        stream: &Stream,
        start: Start,
        acts: &Acts,
        outputs: &mut [Output<'_>],
    ) -> Result<(), Error> {
        const OP: &str = "products";
        let Kernels::Quantised { few, many } = &self.kernels else {
            return Err(Error::Format {
                op: "product of quantised activations",
                format: self.ty.name(),
            });
        };
        let over = outputs.len().saturating_sub(TOGETHER_MAX);
        length(OP, "matrices over the limit", over, 0)?;
        let shape = acts.shape();
        for output in outputs.iter() {
            let n = output.w.n();
            self.check(OP, output.w)?;
            self.check_acts(OP, output.w, acts)?;
            room(OP, "values of y", output.y.len(), shape.tokens * n)?;
            if let Some(bias) = output.bias {
                room(OP, "bias", bias.len(), n)?;
            }
        }
        let rows: usize = outputs.iter().map(|output| output.w.n()).sum();
        if shape.columns() == 0 || rows == 0 {
            return Ok(());
        }
        room(OP, "K", shape.k, 1)?;
        if shape.columns() <= FEW_MAX {
            self.few(stream, start, acts, few, outputs, None)
        } else {
            self.many_columns(name, stream, start, acts, many, outputs)
        }
    }

    /// Whether [`Product::normed`] takes matrices of this K.
    pub fn norms(&self, k: usize) -> bool {
        matches!(self.kernels, Kernels::Quantised { .. }) && (1..=NORM_MAX).contains(&k)
    }

    /// [`Product::together`] of one token, whose activations are made in the same launch, as
    /// [`Ops::residual_norm_to`](crate::ops::Ops::residual_norm_to) makes them; `acts` has them afterwards.
    ///
    /// # Errors
    /// As [`Product::together`], and if K is not one that [`Product::norms`].
    pub fn normed(
        &self,
        stream: &Stream,
        start: Start,
        before: Before<'_>,
        acts: &mut Acts,
        outputs: &mut [Output<'_>],
    ) -> Result<(), Error> {
        const OP: &str = "products of a norm";
        let (Kernels::Quantised { few, .. }, Some(block)) = (&self.kernels, act_block(self.ty))
        else {
            return Err(Error::Format {
                op: OP,
                format: self.ty.name(),
            });
        };
        let over = outputs.len().saturating_sub(TOGETHER_MAX);
        length(OP, "matrices over the limit", over, 0)?;
        let Some(k) = outputs.first().map(|output| output.w.k()) else {
            return Ok(());
        };
        length(OP, "K over the limit", k.saturating_sub(NORM_MAX), 0)?;
        room(OP, "K", k, 1)?;
        let shape = Shape {
            tokens: 1,
            k,
            block,
            passes: Passes::One,
        };
        acts.written(OP, shape)?;
        before.check(OP, k)?;
        for output in outputs.iter() {
            let n = output.w.n();
            self.check(OP, output.w)?;
            self.check_acts(OP, output.w, acts)?;
            room(OP, "values of y", output.y.len(), n)?;
            room(OP, "rows", n, 1)?;
            if let Some(bias) = output.bias {
                room(OP, "bias", bias.len(), n)?;
            }
        }
        self.few(stream, start, acts, few, outputs, Some(before))
    }

    /// The launches of [`Product::together`] of many columns, whose operands are checked.
    fn many_columns(
        &self,
        name: Option<&str>,
        stream: &Stream,
        start: Start,
        acts: &Acts,
        many: &[Many],
        outputs: &mut [Output<'_>],
    ) -> Result<(), Error> {
        let shape = acts.shape();
        let columns = shape.columns();
        let multiprocessors = stream.device().properties().multiprocessors;
        let mut rows = [0; TOGETHER_MAX];
        for (rows, output) in rows.iter_mut().zip(outputs.iter()) {
            *rows = output.w.n();
        }
        let mut taking = many.iter().filter(|many| many.takes(acts));
        let work = |many: &&Many| many.cut.work(&rows, columns, multiprocessors);
        let chosen = match name {
            Some(name) => taking.find(|many| many.name == name),
            None => taking.min_by_key(work),
        };
        let Many { kernel, cut, .. } = chosen.ok_or_else(|| Error::NoModule {
            module: format!("{}::{}", self.ty.name(), name.unwrap_or("gemm")),
        })?;
        let sizes = [shape.k, columns, shape.passes.count()].map(|n| Arg::from(n as i32));
        let launch = |grid| {
            Launch::grid(grid, [cut.threads as u32, 1, 1])
                .shared(cut.shared_bytes)
                .start(start)
        };
        let Some(sharing) = acts.sharing().filter(|_| cut.reads == Layout::Arranged) else {
            for Output { w, bias, y } in outputs {
                let args = [
                    w.data().into(),
                    (&acts.q).into(),
                    (&acts.meta).into(),
                    (&acts.d).into(),
                    (&acts.s16).into(),
                    (&mut **y).into(),
                    bias.map_or(Arg::NULL, Arg::from),
                    (w.n() as i32).into(),
                    sizes[0],
                    sizes[1],
                    sizes[2],
                ];
                // SAFETY: the arguments are those of `gemm_wide` and `gemm_narrow`; the lengths of all buffers were checked, and both
                // operands have the slack behind them that the kernel may read.
                unsafe { kernel.launch(stream, launch(cut.grid(w.n(), columns)), &args) }?;
            }
            return Ok(());
        };
        let (scale, sums) = acts.arranged_floats();
        let last = [
            (&acts.q).into(),
            scale,
            sums,
            (&sharing.shares).into(),
            (&sharing.flags).into(),
            sizes[0],
            sizes[1],
            sizes[2],
        ];
        let mut args = [Arg::NULL; 4 * TOGETHER_MAX + 8];
        let operands = operands(outputs);
        for (to, from) in args
            .iter_mut()
            .zip(operands.as_flattened().iter().chain(&last))
        {
            *to = *from;
        }
        let grid = cut.tiles(&rows, columns).min(multiprocessors);
        let grid = grid.min(SHARING_MAX) as u32;
        // SAFETY: the arguments are those of `gemm_128` and `gemm_64`; the lengths of all buffers were checked, every thread block has its
        // shares and flags, and there are no more of them than multiprocessors, so that all run at once.
        unsafe { kernel.launch(stream, launch([grid, 1, 1]), &args) }
    }

    /// The launch of [`Product::together`] or [`Product::normed`], whose operands are checked.
    fn few(
        &self,
        stream: &Stream,
        start: Start,
        acts: &Acts,
        few: &Few,
        outputs: &mut [Output<'_>],
        before: Option<Before<'_>>,
    ) -> Result<(), Error> {
        let shape = acts.shape();
        let columns = shape.columns();
        let tiles = outputs.iter().map(|output| output.w.tiles()).sum();
        let properties = stream.device().properties();
        let of = operands(outputs);
        let last: [Arg; LAST] = [
            (&acts.q).into(),
            (&acts.meta).into(),
            (&acts.d).into(),
            (&acts.s16).into(),
            (shape.k as i32).into(),
            (columns as i32).into(),
            (shape.passes.count() as i32).into(),
        ];
        const LAST: usize = 7;
        const ALL: usize = 4 * TOGETHER_MAX + LAST;
        // Those of the kernels for one token come behind, and those of a norm.
        let mut args = [Arg::NULL; ALL + 2 + 5];
        let mut count = ALL;
        for (to, from) in args.iter_mut().zip(of.as_flattened().iter().chain(&last)) {
            *to = *from;
        }
        let (kernel, grid, warps, shared_bytes) = if columns <= OneCut::COLUMNS_MAX {
            let room = Room::of(properties, 0);
            let cut = OneCut::of(self.ty, tiles, shape.k, columns, before.is_some(), &room);
            args[ALL..ALL + 2]
                .copy_from_slice(&[cut.stages as i32, cut.round as i32].map(Arg::from));
            count = ALL + 2;
            let kernel = match &before {
                None => &few.one[columns - 1],
                Some(before) => {
                    args[count..].copy_from_slice(&before.args());
                    count = args.len();
                    &few.normed
                }
            };
            (kernel, cut.grid, cut.warps, cut.shared_bytes)
        } else {
            let (kernel, registers) = &few.some[usize::from(columns > 8)];
            let room = Room::of(properties, *registers);
            let cut = FewCut::of(self.ty, tiles, shape.k, columns, &room);
            (kernel, tiles, cut.warps, cut.shared_bytes)
        };
        let over = shared_bytes.saturating_sub(properties.shared_bytes_block_max);
        length("product", "bytes of shared memory over the limit", over, 0)?;
        let launch = Launch::new(grid, warps * 32)
            .shared(shared_bytes)
            .start(start);
        // SAFETY: the arguments are those of `gemv_*`; the lengths of all buffers were checked.
        unsafe { kernel.launch(stream, launch, &args[..count]) }
    }

    /// `y[T, N]` of `tokens` rows of `x` and float weights.
    pub fn float(
        &self,
        stream: &Stream,
        start: Start,
        w: &Weights,
        x: &Buffer<f32>,
        tokens: usize,
        y: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        const OP: &str = "product";
        let Kernels::Float { one, few, many } = &self.kernels else {
            return Err(Error::Format {
                op: "product of float activations",
                format: self.ty.name(),
            });
        };
        self.check(OP, w)?;
        length(
            OP,
            "values of x over its length",
            (tokens * w.k()).saturating_sub(x.len()),
            0,
        )?;
        room(OP, "values of y", y.len(), tokens * w.n())?;
        if tokens == 0 || w.n() == 0 {
            return Ok(());
        }
        let args = [
            Arg::from(w.data()),
            x.into(),
            y.into(),
            (w.n() as i32).into(),
            (w.k() as i32).into(),
            (tokens as i32).into(),
        ];
        if tokens > FLOAT_FEW_MAX {
            let cut = ManyCut::float();
            let grid = cut.grid(w.n(), tokens);
            let launch = Launch::grid(grid, [cut.threads as u32, 1, 1]).start(start);
            // SAFETY: the arguments are those of `gemm_*`; the lengths of all buffers were checked.
            return unsafe { many.launch(stream, launch, &args) };
        }
        let (kernel, wide) = if tokens == 1 { (one, 1) } else { (few, 4) };
        let cut = FloatCut::of(self.ty, w.k(), wide);
        let grid = [w.tiles() as u32, tokens.div_ceil(wide) as u32, 1];
        let launch = Launch::grid(grid, [cut.threads as u32, 1, 1])
            .shared(cut.shared_bytes)
            .start(start);
        let most = stream.device().properties().shared_bytes_block_max;
        let over = cut.shared_bytes.saturating_sub(most);
        length(OP, "bytes of shared memory over the limit", over, 0)?;
        // SAFETY: the arguments are those of `gemv_*`; the lengths of all buffers were checked.
        unsafe { kernel.launch(stream, launch, &args) }
    }

    /// `y[T, K]`: rows of the weights, decoded, those of the first `tokens` ids. An id that is not a row gives NaN.
    pub fn decode_rows(
        &self,
        stream: &Stream,
        start: Start,
        w: &Weights,
        ids: &Buffer<i32>,
        tokens: usize,
        y: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        const OP: &str = "rows";
        self.check(OP, w)?;
        room(OP, "ids", ids.len(), tokens)?;
        room(OP, "values of y", y.len(), tokens * w.k())?;
        if tokens == 0 || w.k() == 0 {
            return Ok(());
        }
        let args = [
            Arg::from(w.data()),
            ids.into(),
            y.into(),
            (w.n() as i32).into(),
            (w.k() as i32).into(),
        ];
        let launch = self.launch_rows(w.k(), tokens).start(start);
        // SAFETY: the arguments are those of `decode`; the lengths were checked, and the kernel checks the ids.
        unsafe { self.decode.launch(stream, launch, &args) }
    }

    /// What a step of one token begins with, without a copy by the host: the position and the angles that `step` has when the kernel runs
    /// are copied to device memory, and `y[K]` is the row of the token's id, decoded, times `factor`. An id that is not a row
    /// gives NaN.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn begin(
        &self,
        stream: &Stream,
        start: Start,
        w: &Weights,
        step: &StepRecord,
        factor: f32,
        position: &mut Buffer<u32>,
        angles: [Option<[&mut Buffer<f32>; 2]>; 2],
        y: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        const OP: &str = "begin";
        self.check(OP, w)?;
        room(OP, "position", position.len(), 1)?;
        room(OP, "values of y", y.len(), w.k())?;
        let mut to = [Arg::NULL; 4];
        for (i, (angles, pairs)) in angles.into_iter().zip(step.pairs).enumerate() {
            match angles {
                None => length(OP, "pairs of angles that go nowhere", pairs, 0)?,
                Some([cos, sin]) => {
                    room(OP, "cosines", cos.len(), pairs)?;
                    room(OP, "sines", sin.len(), pairs)?;
                    to[2 * i..2 * i + 2].copy_from_slice(&[cos.into(), sin.into()]);
                }
            }
        }
        let [cos0, sin0, cos1, sin1] = to;
        let args = [
            Arg::from(w.data()),
            step.record.address().into(),
            position.into(),
            cos0,
            sin0,
            cos1,
            sin1,
            (step.pairs[0] as i32).into(),
            (step.pairs[1] as i32).into(),
            y.into(),
            (w.n() as i32).into(),
            (w.k() as i32).into(),
            factor.into(),
        ];
        let launch = self.launch_rows(w.k(), 1).start(start);
        // SAFETY: the arguments are those of `begin`; the lengths were checked, and the kernel checks the id.
        unsafe { self.begin.launch(stream, launch, &args) }
    }

    fn launch_rows(&self, k: usize, tokens: usize) -> Launch {
        let threads = match self.kernels {
            Kernels::Quantised { .. } => k / 8,
            Kernels::Float { .. } => k,
        };
        let grid = [threads.div_ceil(128) as u32, tokens as u32, 1];
        Launch::grid(grid, [128, 1, 1])
    }

    /// Registers a thread and bytes of spills of each kernel, for reports.
    pub fn resources(&self) -> Result<Vec<(&'static str, usize, usize)>, Error> {
        let all: Vec<(&'static str, &Kernel)> = match &self.kernels {
            Kernels::Quantised { few, many } => {
                let few = [
                    ("1", &few.one[0]),
                    ("2", &few.one[1]),
                    ("1 normed", &few.normed),
                    ("8", &few.some[0].0),
                    ("16", &few.some[1].0),
                ];
                let many = many.iter().map(|many| (many.name, &many.kernel));
                few.into_iter().chain(many).collect()
            }
            Kernels::Float { one, few, many } => vec![("1", one), ("4", few), ("many", many)],
        };
        all.into_iter()
            .map(|(name, kernel)| Ok((name, kernel.registers()?, kernel.spilled_bytes()?)))
            .collect()
    }

    fn check_acts(&self, op: &'static str, w: &Weights, acts: &Acts) -> Result<(), Error> {
        let shape = acts.shape();
        length(op, "K of the activations", shape.k, w.k())?;
        let block = act_block(self.ty).unwrap_or(0);
        length(op, "block of the activations", shape.block, block)
    }

    fn check(&self, op: &'static str, w: &Weights) -> Result<(), Error> {
        if w.ty() == self.ty {
            Ok(())
        } else {
            Err(Error::Format {
                op,
                format: w.ty().name(),
            })
        }
    }
}

/// What kernels for several matrices take of them: [weights, y, bias, rows][matrix].
fn operands(outputs: &mut [Output<'_>]) -> [[Arg; TOGETHER_MAX]; 4] {
    let mut of = [[Arg::NULL; TOGETHER_MAX]; 4];
    for (m, output) in outputs.iter_mut().enumerate() {
        of[0][m] = output.w.data().into();
        of[1][m] = (&mut *output.y).into();
        of[2][m] = output.bias.map_or(Arg::NULL, Arg::from);
        of[3][m] = (output.w.n() as i32).into();
    }
    of
}

/// Refuses a buffer that is too short.
fn room(op: &'static str, what: &'static str, found: usize, wanted: usize) -> Result<(), Error> {
    if found >= wanted {
        return Ok(());
    }
    length(op, what, found, wanted)
}
