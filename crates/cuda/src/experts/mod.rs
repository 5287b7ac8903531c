//! Mixtures of experts on a device (`kernels/experts*`), with the bits of `cpu::mixture`.
//!
//! A few tokens: two launches behind the router's product ([`Mixer::gate_up`], [`Mixer::down`]), which read scores where they are. More: tokens are
//! grouped by their experts ([`Mixer::group`]), whose products are those of many columns ([`Mixer::multiply`]), then each token's are summed
//! ([`Mixer::combine`]). Neither way tells the host who was chosen.

mod blob;
mod cut;
mod told;

pub use blob::{Arena, Blob, Layer, Slots};

use cpu::mixture::{Routing, Weighing};
use cpu::ops::Gate;
use gguf::TensorType;
use quant::act::{BLOCK32, BLOCK256};
use quant::product::{CHUNK, act_block, down_passes};

use self::cut::{Cut, Pad};
use self::told::Told;
use crate::acts::{Acts, Layout};
use crate::device::{Device, WGMMA_COMPUTE};
use crate::error::{Error, length};
use crate::kernel::{Arg, Kernel, Launch, Module, Start};
use crate::memory::{Buffer, Pinned};
use crate::product::Target;
use crate::stream::Stream;
use crate::weights::Weights;

/// Tokens up to which every pair of token and expert reads the expert's weights.
pub const FEW_MAX: usize = 16;

/// Tokens that `route` takes in a thread block: as in `kernels/experts.cu`.
const ROUTE_WARPS: usize = 8;

/// Threads of `scores_*`: as in `kernels/experts.cu`.
const SCORE_THREADS: usize = 128;

/// Threads of `group`: as in `kernels/experts.cu`.
const GROUP_THREADS: usize = 1024;

/// Threads of the kernels for gated values.
const GATED_THREADS: usize = 128;

/// Threads of the kernels that gather and combine.
const THREADS: usize = 256;

/// Thread blocks that a grid has at most in its second direction.
const GRID_Y_MAX: usize = 65_535;

/// What the shared expert gives, which is what the sum of the others starts from.
#[derive(Debug, Clone, Copy)]
pub enum Shared<'a> {
    /// There is none.
    None,
    /// Its output is where the result goes.
    All,
    /// The same, of which a token takes the sigmoid of this `[T]`.
    Part(&'a Buffer<f32>),
}

/// The kernels of one format.
#[derive(Debug)]
struct Format {
    ty: TensorType,
    gate_up: Kernel,
    down: Kernel,
    /// By [`Pad::ALL`]; none where the device lacks the instructions.
    many: Vec<Kernel>,
}

impl Format {
    fn new(device: &Device, ty: TensorType, target: Target) -> Result<Self, Error> {
        let name = format!("experts_{}", ty.name().to_ascii_lowercase());
        let compute = target.compute(device);
        let module = Module::load_for(device, &name, compute)?;
        let few = |name: &str| {
            let kernel = module.kernel(name)?;
            kernel.allow_shared(cut::shared_bytes_max(device.properties()))?;
            Ok::<_, Error>(kernel)
        };
        let many = |columns: usize| {
            let kernel = module.kernel(&format!("many_{columns}"))?;
            kernel.allow_shared(cut::many_shared_bytes(ty, columns))?;
            Ok::<_, Error>(kernel)
        };
        let columns: &[usize] = if compute == WGMMA_COMPUTE {
            &Pad::ALL
        } else {
            &[]
        };
        Ok(Self {
            ty,
            gate_up: few("gate_up")?,
            down: few("down")?,
            many: columns.iter().map(|&n| many(n)).collect::<Result<_, _>>()?,
        })
    }

    fn of_columns(&self, columns: usize) -> Result<&Kernel, Error> {
        let at = Pad::ALL.iter().position(|&n| n == columns);
        at.and_then(|at| self.many.get(at))
            .ok_or_else(|| Error::NoModule {
                module: format!("experts_{}::many_{columns}", self.ty.name()),
            })
    }
}

/// Columns of activations, arranged (`kernels/acts.cuh`).
#[derive(Debug)]
struct Columns {
    image: Buffer<u8>,
    /// Of blocks of 32 with their sums behind.
    scale: Buffer<f32>,
    /// Of blocks of 256.
    sums: Buffer<u8>,
}

impl Columns {
    fn new(stream: &Stream, columns: usize, k: usize) -> Result<Self, Error> {
        Ok(Self {
            image: Buffer::zeroed(stream, columns * k.next_multiple_of(128))?,
            scale: Buffer::zeroed(stream, 2 * columns * k.div_ceil(BLOCK32))?,
            sums: Buffer::zeroed(stream, columns * k.div_ceil(BLOCK32) * 4)?,
        })
    }

    /// As products read `columns` columns of `k` values.
    fn read(&self, block: usize, columns: usize, k: usize) -> [Arg; 3] {
        let sums = match block {
            BLOCK32 => Arg::from(self.scale.address() + (k / BLOCK32 * columns * 4) as u64),
            _ => (&self.sums).into(),
        };
        [(&self.image).into(), (&self.scale).into(), sums]
    }

    /// As kernels write them.
    fn write(&self, block: usize) -> Vec<Arg> {
        let both = vec![Arg::from(&self.image), (&self.scale).into()];
        match block {
            BLOCK32 => both,
            _ => [both, vec![(&self.sums).into()]].concat(),
        }
    }

    fn bytes(&self) -> usize {
        self.image.bytes() + self.scale.bytes() + self.sums.bytes()
    }
}

/// What products of many tokens work in.
#[derive(Debug)]
struct Many {
    place: Buffer<u32>,
    pair: Buffer<u32>,
    experts: Buffer<u32>,
    count: Buffer<u32>,
    inputs: Columns,
    /// `[places, 2 F]`.
    gated: Buffer<f32>,
    activations: Columns,
    /// `[places, D]`.
    outputs: Buffer<f32>,
}

/// Kernels that are the same for all formats.
#[derive(Debug)]
struct Common {
    /// For routers of F32, F16 and BF16.
    scores: [Kernel; 3],
    tell: Kernel,
    route: Kernel,
    group: Kernel,
    gather_32: Kernel,
    gather_256: Kernel,
    gated_32: Kernel,
    gated_256: Kernel,
    adopt: Kernel,
    combine: Kernel,
}

/// Sizes of a model's mixtures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Width D.
    pub width: usize,
    /// Feed-forward width F of an expert.
    pub ff: usize,
    /// How tokens are routed.
    pub routing: Routing,
    /// What gates.
    pub gate: Gate,
}

/// Computes a model's mixtures, up to so many tokens at a time.
#[derive(Debug)]
pub struct Mixer {
    shape: Shape,
    tokens_max: usize,
    formats: Vec<Format>,
    common: Common,
    /// Each token's experts, ascending, `[T, used]`.
    ids: Buffer<u32>,
    weights: Buffer<f32>,
    /// `[T, used, F]` of few tokens.
    gated: Buffer<f32>,
    /// Parts of scores, `[T, chunks, E]` of few tokens.
    parts: Buffer<f32>,
    many: Option<Many>,
    told: Option<Told>,
}

/// A router's scores of some tokens.
#[derive(Debug, Clone, Copy)]
pub enum Scores<'a> {
    /// `[T, E]`.
    Whole(&'a Buffer<f32>),
    /// What [`Mixer::score`] made last, and the bias to be added, `[E]`.
    Parts(Option<&'a Buffer<f32>>),
}

/// Tokens of one call.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    /// How many.
    pub n: usize,
    /// The router's scores.
    pub scores: Scores<'a>,
    /// The layer's input in blocks for gate and up, in one pass. [`Mixer::finish`] does not read it.
    pub acts: &'a Acts,
}

impl Mixer {
    /// Loads kernels for experts of such layouts, and takes work space for up to `tokens` tokens.
    pub fn new(
        stream: &Stream,
        target: Target,
        shape: Shape,
        blobs: &[Blob],
        tokens: usize,
    ) -> Result<Self, Error> {
        let device = stream.device();
        let Routing { experts, used, .. } = shape.routing;
        let mut formats: Vec<Format> = Vec::new();
        for ty in blobs.iter().flat_map(Blob::types) {
            if formats.iter().all(|format| format.ty != ty) {
                formats.push(Format::new(device, ty, target)?);
            }
        }
        let module = Module::load_for(device, "experts", target.compute(device))?;
        let rooms = cut::route_bytes(&shape.routing);
        let scores = |name: &str| {
            let kernel = module.kernel(name)?;
            kernel.allow_shared(cut::score_bytes(4, FEW_MAX))?;
            Ok::<_, Error>(kernel)
        };
        let common = Common {
            scores: [
                scores("scores_f32")?,
                scores("scores_f16")?,
                scores("scores_bf16")?,
            ],
            tell: {
                let tell = module.kernel("tell")?;
                tell.allow_shared(ROUTE_WARPS * (rooms + 4 * used))?;
                tell
            },
            route: {
                let route = module.kernel("route")?;
                route.allow_shared(ROUTE_WARPS * rooms)?;
                route
            },
            group: module.kernel("group")?,
            gather_32: module.kernel("gather_32")?,
            gather_256: module.kernel("gather_256")?,
            gated_32: module.kernel("gated_32")?,
            gated_256: module.kernel("gated_256")?,
            adopt: module.kernel("adopt")?,
            combine: module.kernel("combine")?,
        };
        let pairs = tokens * used;
        let has_many = formats.iter().all(|format| !format.many.is_empty());
        let few = if has_many {
            tokens.min(FEW_MAX)
        } else {
            tokens
        };
        let many = if tokens > few {
            // Which padding is chosen depends on the tokens: there is room for any.
            let places = Pad::room(pairs, experts);
            let zeroed = |n| Buffer::zeroed(stream, n);
            Some(Many {
                place: zeroed(pairs)?,
                pair: zeroed(places)?,
                experts: zeroed(places / Pad::ALL[0] + 1)?,
                count: zeroed(1)?,
                inputs: Columns::new(stream, places, shape.width)?,
                gated: Buffer::zeroed(stream, places * 2 * shape.ff)?,
                activations: Columns::new(stream, 2 * places, shape.ff)?,
                outputs: Buffer::zeroed(stream, places * shape.width)?,
            })
        } else {
            None
        };
        Ok(Self {
            shape,
            tokens_max: tokens,
            formats,
            common,
            ids: Buffer::zeroed(stream, pairs)?,
            weights: Buffer::zeroed(stream, pairs)?,
            gated: Buffer::zeroed(stream, few * used * shape.ff)?,
            parts: Buffer::zeroed(
                stream,
                few.min(FEW_MAX) * shape.width.div_ceil(CHUNK) * experts,
            )?,
            many,
            told: None,
        })
    }

    /// From now on the host is told who is used: by [`Mixer::tell`] of a few tokens, and by [`Mixer::group`].
    pub fn tell_host(&mut self, device: &Device) -> Result<(), Error> {
        let Routing { experts, used, .. } = self.shape.routing;
        let few = FEW_MAX.min(self.tokens_max);
        let numbers = experts.max(few * used);
        self.told = Some(Told::new(device, numbers, few * self.shape.width)?);
        Ok(())
    }

    fn told(&mut self, op: &'static str) -> Result<&mut Told, Error> {
        self.told.as_mut().ok_or_else(|| Error::NoModule {
            module: format!("{op} without anybody to be told"),
        })
    }

    /// Has the host told which experts a few tokens use, and, if `x` `[T, D]` is given, their inputs.
    pub fn tell(
        &mut self,
        stream: &Stream,
        start: Start,
        n: usize,
        scores: Scores<'_>,
        x: Option<&Buffer<f32>>,
    ) -> Result<(), Error> {
        const OP: &str = "routing of a few tokens";
        let Shape { width, routing, .. } = self.shape;
        let over = n.saturating_sub(FEW_MAX.min(self.tokens_max));
        length(OP, "tokens over the room", over, 0)?;
        let short =
            |what, found: usize, wanted: usize| length(OP, what, wanted.saturating_sub(found), 0);
        if let Some(x) = x {
            short("inputs that are missing", x.len(), n * width)?;
        }
        let scores = self.scores(OP, n, scores)?;
        let routed = self.routing(scores);
        let told = self.told(OP)?;
        let (bell, number) = told.next();
        let x_told = x.map_or(Arg::NULL, |_| told.x.address().into());
        let args = [
            &scores[..1],
            &routed[..],
            &[
                (n as i32).into(),
                x.map_or(Arg::NULL, Arg::from),
                (width as i32).into(),
                told.numbers.address().into(),
                x_told,
                bell.into(),
                number.into(),
            ],
        ]
        .concat();
        let room = cut::route_bytes(&routing) + 4 * routing.used;
        let launch = Launch::new(1, 32 * ROUTE_WARPS)
            .shared(ROUTE_WARPS * room)
            .start(start);
        // SAFETY: the arguments are those of `tell`; lengths are checked, and the host's memory has room for as many tokens.
        unsafe { self.common.tell.launch(stream, launch, &args) }
    }

    /// Waits for what was told last of `n` few tokens: each one's experts `[T, used]`, ascending, and their inputs, if they were given.
    pub fn told_few(&self, stream: &Stream, n: usize) -> Result<(&[u32], &[f32]), Error> {
        let Some(told) = &self.told else {
            return Ok((&[], &[]));
        };
        told.wait(stream)?;
        let Shape { width, routing, .. } = self.shape;
        Ok((&told.numbers[..n * routing.used], &told.x[..n * width]))
    }

    /// Waits for what [`Mixer::group`] told last: how many tokens use each expert.
    pub fn told_many(&self, stream: &Stream) -> Result<&[u32], Error> {
        let Some(told) = &self.told else {
            return Ok(&[]);
        };
        told.wait(stream)?;
        Ok(&told.numbers[..self.shape.routing.experts])
    }

    /// Bytes of device memory.
    pub fn device_bytes(&self) -> usize {
        let many = self.many.as_ref().map_or(0, |many| {
            let lists = [&many.place, &many.pair, &many.experts, &many.count];
            let lists: usize = lists.map(Buffer::bytes).iter().sum();
            let rows = many.gated.bytes() + many.outputs.bytes();
            lists + rows + many.inputs.bytes() + many.activations.bytes()
        });
        let few = self.gated.bytes() + self.parts.bytes();
        self.ids.bytes() + self.weights.bytes() + few + many
    }

    /// Each token's experts, ascending, and their weights `[T, used]`, as chosen last.
    pub fn chosen(&self) -> (&Buffer<u32>, &Buffer<f32>) {
        (&self.ids, &self.weights)
    }

    /// What a layer's experts give: to `y` `[T, D]`. Launches may overlap what is ahead of them.
    pub fn mix(
        &mut self,
        stream: &Stream,
        start: Start,
        layer: &Layer<'_>,
        tokens: &Tokens<'_>,
        shared: Shared<'_>,
        y: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        self.begin(stream, start, layer, tokens)?;
        self.finish(stream, start, layer, tokens, shared, y)
    }

    /// The first part of [`Mixer::mix`]: all that reads the layer's input in blocks.
    pub fn begin(
        &mut self,
        stream: &Stream,
        start: Start,
        layer: &Layer<'_>,
        tokens: &Tokens<'_>,
    ) -> Result<(), Error> {
        if self.is_few(tokens.n) {
            return self.gate_up(stream, start, layer, tokens);
        }
        self.group(stream, start, layer, tokens)
    }

    /// The rest of it, of the same tokens. Others may have worked meanwhile, and what the shared expert gives be made.
    pub fn finish(
        &mut self,
        stream: &Stream,
        start: Start,
        layer: &Layer<'_>,
        tokens: &Tokens<'_>,
        shared: Shared<'_>,
        y: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        if self.is_few(tokens.n) {
            return self.down(stream, start, layer, tokens, None, shared, y);
        }
        self.multiply(stream, start, layer, tokens.n)?;
        self.combine(stream, start, layer, tokens.n, shared, y)
    }

    /// Whether so many tokens are computed pair by pair.
    pub fn is_few(&self, tokens: usize) -> bool {
        tokens <= FEW_MAX || self.many.is_none()
    }

    fn format(&self, op: &'static str, ty: TensorType) -> Result<&Format, Error> {
        let found = self.formats.iter().find(|format| format.ty == ty);
        found.ok_or(Error::Format {
            op,
            format: ty.name(),
        })
    }

    /// What the kernels take for granted.
    fn check(&self, op: &'static str, layer: &Layer<'_>, tokens: usize) -> Result<u64, Error> {
        let blob = layer.blob;
        length(op, "width of the experts", blob.width, self.shape.width)?;
        length(
            op,
            "feed-forward width of the experts",
            blob.ff,
            self.shape.ff,
        )?;
        let over = tokens.saturating_sub(self.tokens_max.min(GRID_Y_MAX));
        length(op, "tokens over the room", over, 0)?;
        layer.list(op, self.shape.routing.experts)
    }

    fn check_tokens(
        &self,
        op: &'static str,
        blob: &Blob,
        tokens: &Tokens<'_>,
    ) -> Result<(), Error> {
        let of = tokens.acts.shape();
        length(op, "K of the activations", of.k, blob.width)?;
        length(op, "columns of the activations", of.columns(), tokens.n)?;
        length(
            op,
            "block of the activations",
            of.block,
            act_block(blob.inputs).unwrap_or(0),
        )
    }

    /// The scores of `n` tokens, and how they are made of parts.
    fn scores(&self, op: &'static str, n: usize, scores: Scores<'_>) -> Result<[Arg; 3], Error> {
        let Shape { width, routing, .. } = self.shape;
        let (values, parts, bias) = match scores {
            Scores::Whole(values) => (values, 1, None),
            Scores::Parts(bias) => (&self.parts, width.div_ceil(CHUNK), bias),
        };
        let short = (n * parts * routing.experts).saturating_sub(values.len());
        length(op, "scores that are missing", short, 0)?;
        if let Some(bias) = bias {
            length(op, "bias of the scores", bias.len(), routing.experts)?;
        }
        Ok([
            values.into(),
            (parts as i32).into(),
            bias.map_or(Arg::NULL, Arg::from),
        ])
    }

    /// Parts of the scores of up to [`FEW_MAX`] tokens: products of a router's weights `[E, D]`, floats, with `x` `[T, D]`.
    pub fn score(
        &mut self,
        stream: &Stream,
        start: Start,
        router: &Weights,
        x: &Buffer<f32>,
        n: usize,
    ) -> Result<(), Error> {
        const OP: &str = "scores of experts";
        let Shape { width, routing, .. } = self.shape;
        length(OP, "rows of the router", router.n(), routing.experts)?;
        length(OP, "K of the router", router.k(), width)?;
        length(OP, "values of a token past whole fours", width % 4, 0)?;
        length(
            OP,
            "tokens over the room",
            n.saturating_sub(FEW_MAX.min(self.tokens_max)),
            0,
        )?;
        length(
            OP,
            "inputs that are missing",
            (n * width).saturating_sub(x.len()),
            0,
        )?;
        let kernel = match router.ty() {
            TensorType::F32 => &self.common.scores[0],
            TensorType::F16 => &self.common.scores[1],
            TensorType::BF16 => &self.common.scores[2],
            other => {
                return Err(Error::Format {
                    op: OP,
                    format: other.name(),
                });
            }
        };
        if n == 0 {
            return Ok(());
        }
        let args = [
            Arg::from(router.data()),
            x.into(),
            (&self.parts).into(),
            (routing.experts as i32).into(),
            (width as i32).into(),
            (n as i32).into(),
        ];
        let grid = [router.tiles() as u32, width.div_ceil(CHUNK) as u32, 1];
        let launch = Launch::grid(grid, [SCORE_THREADS as u32, 1, 1])
            .shared(cut::score_bytes(router.ty().block_bytes(), n))
            .start(start);
        // SAFETY: the arguments are those of `scores_*`; lengths are checked.
        unsafe { kernel.launch(stream, launch, &args) }
    }

    fn routing(&self, [_, parts, bias]: [Arg; 3]) -> [Arg; 8] {
        let Routing {
            experts,
            used,
            weighing,
            scale,
            groups,
        } = self.shape.routing;
        let weighing = match weighing {
            Weighing::Softmax => 0,
            Weighing::SoftmaxOfChosen => 1,
            Weighing::Sigmoid => 2,
            Weighing::SigmoidOfChosen => 3,
        };
        let groups = groups.map_or((0, 0), |groups| (groups.total, groups.used));
        [
            (experts as i32).into(),
            (used as i32).into(),
            Arg::from(weighing),
            scale.into(),
            (groups.0 as i32).into(),
            (groups.1 as i32).into(),
            parts,
            bias,
        ]
    }

    fn gate(&self) -> Arg {
        Arg::from(match self.shape.gate {
            Gate::Silu => 0,
            Gate::Gelu => 1,
            Gate::Clamped => 2,
        })
    }

    /// A few tokens: chooses their experts, and multiplies their gates and ups.
    pub fn gate_up(
        &mut self,
        stream: &Stream,
        start: Start,
        layer: &Layer<'_>,
        tokens: &Tokens<'_>,
    ) -> Result<(), Error> {
        const OP: &str = "gates and ups of experts";
        let list = self.check(OP, layer, tokens.n)?;
        let (
            blob,
            Shape {
                width, ff, routing, ..
            },
        ) = (layer.blob, self.shape);
        self.check_tokens(OP, blob, tokens)?;
        let scores = self.scores(OP, tokens.n, tokens.scores)?;
        let rows = tokens.n * routing.used * ff;
        length(
            OP,
            "gated values over the room",
            rows.saturating_sub(self.gated.len()),
            0,
        )?;
        if tokens.n == 0 {
            return Ok(());
        }
        let device = stream.device().properties();
        let cut = Cut::gate_up(blob, &routing, tokens.n, device);
        length(
            OP,
            "bytes of shared memory over the limit",
            cut.shared_bytes
                .saturating_sub(cut::shared_bytes_max(device)),
            0,
        )?;
        let [gate_bias, up_bias, _] = blob.biases_at.unwrap_or_default();
        let acts = tokens.acts;
        let args = [
            &scores[..1],
            &self.routing(scores)[..],
            &[
                list.into(),
                (blob.up_at as u32).into(),
                (gate_bias as u32).into(),
                (up_bias as u32).into(),
                (&acts.q).into(),
                (&acts.meta).into(),
                (&acts.d).into(),
                (&acts.s16).into(),
                (width as i32).into(),
                (ff as i32).into(),
                self.gate(),
                (&self.gated).into(),
                (&self.ids).into(),
                (&self.weights).into(),
                (cut.per as i32).into(),
                (cut.stages as i32).into(),
            ],
        ]
        .concat();
        let grid = [cut.grid as u32, tokens.n as u32, 1];
        let launch = Launch::grid(grid, [cut.warps as u32 * 32, 1, 1])
            .shared(cut.shared_bytes)
            .start(start);
        let kernel = &self.format(OP, blob.inputs)?.gate_up;
        // SAFETY: the arguments are those of `gate_up`; lengths are checked, and the list holds addresses of whole blobs of this layout.
        unsafe { kernel.launch(stream, launch, &args) }
    }

    /// Behind [`Mixer::gate_up`] of the same tokens, with none of other tokens between: their down projections, weighted and summed.
    /// `foreign` `[T, used, D]`, in
    /// host memory, has the outputs of experts that are not in the list.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn down(
        &mut self,
        stream: &Stream,
        start: Start,
        layer: &Layer<'_>,
        tokens: &Tokens<'_>,
        foreign: Option<&Pinned<f32>>,
        shared: Shared<'_>,
        y: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        const OP: &str = "down projections of experts";
        let list = self.check(OP, layer, tokens.n)?;
        let (
            blob,
            Shape {
                width, ff, routing, ..
            },
        ) = (layer.blob, self.shape);
        let scores = self.scores(OP, tokens.n, tokens.scores)?;
        let short =
            |what, found: usize, wanted: usize| length(OP, what, wanted.saturating_sub(found), 0);
        short("values of y that are missing", y.len(), tokens.n * width)?;
        if let Some(foreign) = foreign {
            let wanted = tokens.n * routing.used * width;
            short("outputs that are missing", foreign.len(), wanted)?;
        }
        let [is_shared, taken] = shared_args(OP, shared, tokens.n)?;
        if tokens.n == 0 {
            return Ok(());
        }
        let device = stream.device().properties();
        let cut = Cut::down(blob, &routing, device);
        length(
            OP,
            "bytes of shared memory over the limit",
            cut.shared_bytes
                .saturating_sub(cut::shared_bytes_max(device)),
            0,
        )?;
        let [.., bias] = blob.biases_at.unwrap_or_default();
        let args = [
            &scores[..1],
            &self.routing(scores)[..],
            &[
                list.into(),
                (blob.down_at as u32).into(),
                (bias as u32).into(),
                (&self.gated).into(),
                foreign.map_or(Arg::NULL, |rows| rows.address().into()),
                taken,
                is_shared,
                y.into(),
                (width as i32).into(),
                (ff as i32).into(),
                (cut.stages as i32).into(),
            ],
        ]
        .concat();
        let grid = [cut.grid as u32, tokens.n as u32, 1];
        let launch = Launch::grid(grid, [cut.warps as u32 * 32, 1, 1])
            .shared(cut.shared_bytes)
            .start(start);
        let kernel = &self.format(OP, blob.down)?.down;
        // SAFETY: as in `gate_up`.
        unsafe { kernel.launch(stream, launch, &args) }
    }

    fn many(&self, op: &'static str) -> Result<&Many, Error> {
        self.many.as_ref().ok_or_else(|| Error::NoModule {
            module: format!("{op} of many tokens"),
        })
    }

    /// Many tokens: chooses their experts, and gathers the tokens of each.
    pub fn group(
        &mut self,
        stream: &Stream,
        start: Start,
        layer: &Layer<'_>,
        tokens: &Tokens<'_>,
    ) -> Result<(), Error> {
        const OP: &str = "groups of experts";
        self.check(OP, layer, tokens.n)?;
        self.check_tokens(OP, layer.blob, tokens)?;
        let scores = self.scores(OP, tokens.n, tokens.scores)?;
        let Routing { experts, used, .. } = self.shape.routing;
        let pairs = tokens.n * used;
        let pad = Pad::of(pairs, experts);
        let places = pad.blocks(pairs, experts) * pad.0;
        let args = [
            &scores[..1],
            &self.routing(scores)[..],
            &[
                (tokens.n as i32).into(),
                (&self.ids).into(),
                (&self.weights).into(),
            ],
        ]
        .concat();
        let launch = Launch::new(tokens.n.div_ceil(ROUTE_WARPS), 32 * ROUTE_WARPS)
            .shared(ROUTE_WARPS * cut::route_bytes(&self.shape.routing))
            .start(start);
        // SAFETY: the arguments are those of the kernels; lengths are checked, and the work space has room for every choice of as many tokens.
        unsafe { self.common.route.launch(stream, launch, &args) }?;
        let told = match &mut self.told {
            None => [Arg::NULL; 3],
            Some(told) => {
                let (bell, number) = told.next();
                [told.numbers.address().into(), bell.into(), number.into()]
            }
        };
        let many = self.many(OP)?;
        let args = [
            &[
                Arg::from(&self.ids),
                (pairs as i32).into(),
                (experts as i32).into(),
                (pad.0 as i32).into(),
                (&many.place).into(),
                (&many.pair).into(),
                (&many.experts).into(),
                (&many.count).into(),
            ][..],
            &told,
        ]
        .concat();
        let launch = Launch::new(1, GROUP_THREADS).start(start);
        // SAFETY: as above.
        unsafe { self.common.group.launch(stream, launch, &args) }?;
        let (acts, k) = (tokens.acts, self.shape.width);
        let block = act_block(layer.blob.inputs).unwrap_or(BLOCK256);
        let from_atoms = match acts.layout() {
            Layout::Blocks => 0,
            Layout::Arranged => tokens.n.next_multiple_of(16) / 8,
        };
        let first = [
            Arg::from(&many.pair),
            (&many.count).into(),
            (pad.0 as i32).into(),
            (used as i32).into(),
            (&acts.q).into(),
        ];
        let (kernel, own) = if block == BLOCK32 {
            (&self.common.gather_32, vec![Arg::from(&acts.meta)])
        } else {
            let own = vec![Arg::from(&acts.d), (&acts.s16).into()];
            (&self.common.gather_256, own)
        };
        let last = [Arg::from(k as i32), (places as i32).into()];
        let from_atoms = [Arg::from(from_atoms as i32)];
        let to = many.inputs.write(block);
        let args = [&first[..], &own, &from_atoms, &to, &last].concat();
        let runs = (k / 32).next_multiple_of(4);
        let grid = [(runs * 16).div_ceil(THREADS), places / 16, 1];
        let launch = Launch::grid(grid.map(|n| n as u32), [THREADS as u32, 1, 1]).start(start);
        // SAFETY: as above.
        unsafe { kernel.launch(stream, launch, &args) }
    }

    /// Products of those experts that the layer's list says are here, for tokens that were grouped.
    pub fn multiply(
        &mut self,
        stream: &Stream,
        start: Start,
        layer: &Layer<'_>,
        tokens: usize,
    ) -> Result<(), Error> {
        const OP: &str = "products of experts";
        let list = self.check(OP, layer, tokens)?;
        let (
            blob,
            Shape {
                width, ff, routing, ..
            },
        ) = (layer.blob, self.shape);
        let Routing { experts, used, .. } = routing;
        let (many, pairs) = (self.many(OP)?, tokens * used);
        let pad = Pad::of(pairs, experts);
        let blocks = pad.blocks(pairs, experts);
        let places = blocks * pad.0;
        let product = |ty,
                       at: usize,
                       columns: &Columns,
                       y: &Buffer<f32>,
                       n: usize,
                       k: usize,
                       passes: usize| {
            let (wide, per) = pad.columns(passes);
            let kernel = self.format(OP, ty)?.of_columns(wide)?;
            let args = [
                &[
                    Arg::from(&many.experts),
                    (&many.count).into(),
                    (per as i32).into(),
                    list.into(),
                    (at as u32).into(),
                ][..],
                &columns.read(act_block(ty).unwrap_or(BLOCK256), places * passes, k)[..],
                &[
                    y.into(),
                    (n as i32).into(),
                    (k as i32).into(),
                    ((places * passes) as i32).into(),
                    (passes as i32).into(),
                ],
            ]
            .concat();
            let grid = [n.div_ceil(128) as u32, (blocks * per) as u32, 1];
            let launch = Launch::grid(grid, [384, 1, 1])
                .shared(cut::many_shared_bytes(ty, wide))
                .start(start);
            // SAFETY: the arguments are those of `many_*`; the work space has room for all places, and the list holds addresses of whole blobs.
            unsafe { kernel.launch(stream, launch, &args) }
        };
        product(blob.inputs, 0, &many.inputs, &many.gated, 2 * ff, width, 1)?;
        let passes = down_passes(blob.down).count();
        let [gate_bias, up_bias, _] = blob.biases_at.unwrap_or_default();
        let args = [
            &[
                Arg::from(&many.pair),
                (&many.count).into(),
                (pad.0 as i32).into(),
                (&many.experts).into(),
                list.into(),
                (gate_bias as u32).into(),
                (up_bias as u32).into(),
                (&many.gated).into(),
                self.gate(),
            ][..],
            &many
                .activations
                .write(act_block(blob.down).unwrap_or(BLOCK256)),
            &[(ff as i32).into(), ((places * passes) as i32).into()],
        ]
        .concat();
        let (kernel, threads) = match act_block(blob.down) {
            Some(BLOCK256) => (&self.common.gated_256, ff / 256 * 32),
            _ => (&self.common.gated_32, ff / 4),
        };
        let grid = [threads.div_ceil(GATED_THREADS) as u32, places as u32, 1];
        length(
            OP,
            "places over the limit",
            places.saturating_sub(GRID_Y_MAX),
            0,
        )?;
        let launch = Launch::grid(grid, [GATED_THREADS as u32, 1, 1]).start(start);
        // SAFETY: as above.
        unsafe { kernel.launch(stream, launch, &args) }?;
        product(
            blob.down,
            blob.down_at,
            &many.activations,
            &many.outputs,
            width,
            ff,
            passes,
        )
    }

    /// Puts outputs of tokens that were grouped to their places: `rows` `[n, D]` with their biases, computed elsewhere, of `pairs` `token * used + j`.
    /// Whoever works in another stream waits for the group, and has the sum wait for this.
    pub fn adopt(
        &self,
        stream: &Stream,
        start: Start,
        pairs: &Pinned<u32>,
        rows: &Pinned<f32>,
        n: usize,
    ) -> Result<(), Error> {
        const OP: &str = "outputs from elsewhere";
        let (many, width) = (self.many(OP)?, self.shape.width);
        let known = many.place.len() as u32;
        let short =
            |what, found: usize, wanted: usize| length(OP, what, wanted.saturating_sub(found), 0);
        short("rows that are missing", rows.len(), n * width)?;
        short("pairs that are missing", pairs.len(), n)?;
        length(OP, "rows over the limit", n.saturating_sub(GRID_Y_MAX), 0)?;
        let foreign = pairs[..n].iter().filter(|&&pair| pair >= known).count();
        length(OP, "pairs that are none", foreign, 0)?;
        if n == 0 {
            return Ok(());
        }
        let args = [
            Arg::from(pairs.address()),
            rows.address().into(),
            (&many.place).into(),
            (&many.outputs).into(),
            (width as i32).into(),
        ];
        let grid = [(width / 4).div_ceil(THREADS) as u32, n as u32, 1];
        let launch = Launch::grid(grid, [THREADS as u32, 1, 1]).start(start);
        // SAFETY: the arguments are those of `adopt`; lengths are checked, and places lie in the work space.
        unsafe { self.common.adopt.launch(stream, launch, &args) }
    }

    /// What the experts of tokens that were grouped and multiplied give, weighted and summed.
    pub fn combine(
        &mut self,
        stream: &Stream,
        start: Start,
        layer: &Layer<'_>,
        tokens: usize,
        shared: Shared<'_>,
        y: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        const OP: &str = "sum of experts";
        let list = self.check(OP, layer, tokens)?;
        let (many, width) = (self.many(OP)?, self.shape.width);
        let short = (tokens * width).saturating_sub(y.len());
        length(OP, "values of y that are missing", short, 0)?;
        let [is_shared, taken] = shared_args(OP, shared, tokens)?;
        let [.., bias] = layer.blob.biases_at.unwrap_or_default();
        let args = [
            Arg::from(&self.ids),
            (&self.weights).into(),
            (&many.place).into(),
            (self.shape.routing.used as i32).into(),
            list.into(),
            (bias as u32).into(),
            (&many.outputs).into(),
            taken,
            is_shared,
            y.into(),
            (width as i32).into(),
        ];
        let grid = [(width / 4).div_ceil(THREADS) as u32, tokens as u32, 1];
        let launch = Launch::grid(grid, [THREADS as u32, 1, 1]).start(start);
        // SAFETY: the arguments are those of `combine`; lengths are checked.
        unsafe { self.common.combine.launch(stream, launch, &args) }
    }
}

/// `is_shared` and `taken`.
fn shared_args(op: &'static str, shared: Shared<'_>, tokens: usize) -> Result<[Arg; 2], Error> {
    Ok(match shared {
        Shared::None => [Arg::from(0_i32), Arg::NULL],
        Shared::All => [Arg::from(1_i32), Arg::NULL],
        Shared::Part(taken) => {
            let short = tokens.saturating_sub(taken.len());
            length(op, "shares that are missing", short, 0)?;
            [Arg::from(1_i32), taken.into()]
        }
    })
}
