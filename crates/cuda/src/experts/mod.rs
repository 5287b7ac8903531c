//! Mixtures of experts on a device (`kernels/experts*`), with the bits of `cpu::mixture`.
//!
//! A few tokens: two launches behind the router's product ([`Mixer::gate_up`], [`Mixer::down`]), which read scores where they are. More: tokens are
//! grouped by their experts ([`Mixer::group`]), whose products are those of many columns ([`Mixer::multiply`]), then each token's are summed
//! ([`Mixer::combine`]). Neither way waits for the host, unless it is to be told who was chosen ([`Mixer::tell_host`]).

mod blob;
mod blobs;
mod cut;
mod few;
mod many;
mod told;

pub use blob::{Arena, Blob, Held, Layer, Near, Place, Slots};
pub use blobs::Blobs;
pub use told::{Foreign, Question};

use cpu::mixture::{Routing, Weighing};
use cpu::ops::Gate;
use gguf::TensorType;
use quant::product::{CHUNK, act_block};

use self::cut::Pad;
use self::many::Many;
use self::told::{Asked, Told};
use crate::acts::Acts;
use crate::device::{Device, WGMMA_COMPUTE};
use crate::error::{Error, length};
use crate::kernel::{Arg, Kernel, Module, Start};
use crate::memory::Buffer;
use crate::product::{NORM_MAX, Target};
use crate::stream::Stream;

/// Tokens up to which every pair of token and expert reads the expert's weights.
pub const FEW_MAX: usize = 16;

/// Tokens that `route` takes in a thread block: as in `kernels/experts.cu`.
const ROUTE_WARPS: usize = 8;

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

/// Kernels that are the same for all formats.
#[derive(Debug)]
struct Common {
    /// For routers of F32, F16 and BF16.
    scores: [Kernel; 3],
    /// The same behind a norm.
    normed_scores: [Kernel; 3],
    ask: Kernel,
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
    asked: Option<Asked>,
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
        let scores = |name: &str, shared_bytes: usize| {
            let kernel = |ty| module.kernel(&format!("{name}_{ty}"));
            let kernels = [kernel("f32")?, kernel("f16")?, kernel("bf16")?];
            for kernel in &kernels {
                kernel.allow_shared(shared_bytes)?;
            }
            Ok::<_, Error>(kernels)
        };
        let common = Common {
            scores: scores("scores", cut::score_bytes(4, FEW_MAX))?,
            normed_scores: scores("normed_scores", cut::normed_score_bytes(4, NORM_MAX))?,
            ask: {
                let ask = module.kernel("ask")?;
                ask.allow_shared(told::ask_bytes(&shape.routing))?;
                ask
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
        let takes_many = formats.iter().all(|format| !format.many.is_empty());
        let few = if takes_many {
            tokens.min(FEW_MAX)
        } else {
            tokens
        };
        let many = (tokens > few).then(|| Many::new(stream, &shape, tokens));
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
            many: many.transpose()?,
            told: None,
            asked: None,
        })
    }

    /// Bytes of device memory.
    pub fn device_bytes(&self) -> usize {
        let many = self.many.as_ref().map_or(0, Many::bytes);
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
            return self.down(stream, start, layer, tokens, Foreign::None, shared, y);
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

    /// What kernels choose by: the scores of `n` tokens, and their `ROUTING_PARAMETERS`.
    fn choosing(&self, op: &'static str, n: usize, scores: Scores<'_>) -> Result<[Arg; 9], Error> {
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
        let Routing {
            experts,
            used,
            weighing,
            scale,
            groups,
        } = routing;
        let weighing = match weighing {
            Weighing::Softmax => 0,
            Weighing::SoftmaxOfChosen => 1,
            Weighing::Sigmoid => 2,
            Weighing::SigmoidOfChosen => 3,
        };
        let groups = groups.map_or((0, 0), |groups| (groups.total, groups.used));
        Ok([
            values.into(),
            (experts as i32).into(),
            (used as i32).into(),
            Arg::from(weighing),
            scale.into(),
            (groups.0 as i32).into(),
            (groups.1 as i32).into(),
            (parts as i32).into(),
            bias.map_or(Arg::NULL, Arg::from),
        ])
    }

    fn gate(&self) -> Arg {
        Arg::from(match self.shape.gate {
            Gate::Silu => 0,
            Gate::Gelu => 1,
            Gate::Clamped => 2,
        })
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
