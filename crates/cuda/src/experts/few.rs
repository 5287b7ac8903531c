//! A few tokens: products pair by pair of token and expert.

use quant::product::CHUNK;

use super::cut::{self, Cut};
use super::told::Foreign;
use super::{FEW_MAX, Layer, Mixer, Shape, Shared, Tokens, shared_args};
use crate::acts::{Acts, Layout, Shape as ActsShape, Written};
use crate::error::{Error, length};
use crate::kernel::{Arg, Launch, Start};
use crate::memory::Buffer;
use crate::ops::{Normed, optional};
use crate::product::{Before, NORM_MAX};
use crate::stream::Stream;
use crate::weights::Weights;
use gguf::TensorType;
use quant::act::{BLOCK32, BLOCK256, Passes};

/// Threads of `scores_*` and `normed_scores_*`: as in `kernels/experts.cu`.
const SCORE_THREADS: usize = 128;

impl Mixer {
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
        let which = self.check_router(OP, router)?;
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
        let kernel = &self.common.scores[which];
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

    /// Checks a router, and says which of the kernels for scores are of its type.
    fn check_router(&self, op: &'static str, router: &Weights) -> Result<usize, Error> {
        let Shape { width, routing, .. } = self.shape;
        length(op, "rows of the router", router.n(), routing.experts)?;
        length(op, "K of the router", router.k(), width)?;
        length(op, "values of a token past whole fours", width % 4, 0)?;
        match router.ty() {
            TensorType::F32 => Ok(0),
            TensorType::F16 => Ok(1),
            TensorType::BF16 => Ok(2),
            other => Err(Error::Format {
                op,
                format: other.name(),
            }),
        }
    }

    /// Whether [`Mixer::score_normed`] takes mixtures of this width.
    pub fn norms(&self) -> bool {
        self.shape.width <= NORM_MAX
    }

    /// [`Mixer::score`] of one token, whose norm is made in the same launch, as
    /// [`Ops::residual_norm_to`](crate::ops::Ops::residual_norm_to) makes it, and kept in `out`, in one pass.
    ///
    /// # Errors
    /// As [`Mixer::score`], and if the width is not one that [`Mixer::norms`].
    pub fn score_normed(
        &mut self,
        stream: &Stream,
        start: Start,
        router: &Weights,
        before: Before<'_>,
        out: Normed<'_>,
    ) -> Result<(), Error> {
        const OP: &str = "scores of experts behind a norm";
        let Shape { width, routing, .. } = self.shape;
        let kernel = &self.common.normed_scores[self.check_router(OP, router)?];
        let over = width.saturating_sub(NORM_MAX);
        length(OP, "width over the limit", over, 0)?;
        before.check(OP, width)?;
        let normed = optional(OP, "values of the norm", out.row.as_deref(), width)?;
        let written = |to: Option<(&mut Acts, Passes)>, block| match to {
            None => Ok(Written::NONE),
            Some((acts, passes)) => {
                length(OP, "passes", passes.count(), 1)?;
                let shape = ActsShape {
                    tokens: 1,
                    k: width,
                    block,
                    passes,
                };
                acts.written(OP, shape)
            }
        };
        let blocks32 = written(out.blocks32, BLOCK32)?;
        let blocks256 = written(out.blocks256, BLOCK256)?;
        let args = [
            &[Arg::from(router.data())][..],
            &before.args(),
            &[
                normed,
                (&self.parts).into(),
                (routing.experts as i32).into(),
                (width as i32).into(),
                blocks32.q,
                blocks32.meta,
                blocks256.q,
                blocks256.d,
                blocks256.s16,
            ],
        ]
        .concat();
        let grid = [router.tiles() as u32, width.div_ceil(CHUNK) as u32, 1];
        let launch = Launch::grid(grid, [SCORE_THREADS as u32, 1, 1])
            .shared(cut::normed_score_bytes(router.ty().block_bytes(), width))
            .start(start);
        // SAFETY: the arguments are those of `normed_scores_*`; lengths are checked, and the sum is written where nobody reads.
        unsafe { kernel.launch(stream, launch, &args) }
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
        if tokens.acts.layout() == Layout::Arranged {
            length(OP, "arranged columns", tokens.n, 0)?;
        }
        let choosing = self.choosing(OP, tokens.n, tokens.scores)?;
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
        let cut = Cut::gate_up(blob, &routing, tokens.n, stream.device().properties());
        let [gate_bias, up_bias, _] = blob.biases_at.unwrap_or_default();
        let acts = tokens.acts;
        let args = [
            &choosing[..],
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
                (cut.per as i32).into(),
                (cut.stages as i32).into(),
            ],
        ]
        .concat();
        let launch = cut_launch(OP, stream, &cut, tokens.n)?.start(start);
        let kernel = &self.format(OP, blob.inputs)?.gate_up;
        // SAFETY: the arguments are those of `gate_up`; lengths are checked, and the list holds addresses of whole blobs of this layout.
        unsafe { kernel.launch(stream, launch, &args) }
    }

    /// Behind [`Mixer::gate_up`] of the same tokens, with none of other tokens between: their down projections, weighted and summed.
    /// `foreign` are the outputs of experts that are not in the list.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn down(
        &mut self,
        stream: &Stream,
        start: Start,
        layer: &Layer<'_>,
        tokens: &Tokens<'_>,
        foreign: Foreign<'_>,
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
        let choosing = self.choosing(OP, tokens.n, tokens.scores)?;
        let short =
            |what, found: usize, wanted: usize| length(OP, what, wanted.saturating_sub(found), 0);
        short("values of y that are missing", y.len(), tokens.n * width)?;
        let foreign = self.foreign(OP, tokens.n, foreign)?;
        let [is_shared, taken] = shared_args(OP, shared, tokens.n)?;
        if tokens.n == 0 {
            return Ok(());
        }
        let cut = Cut::down(blob, &routing, stream.device().properties());
        let [.., bias] = blob.biases_at.unwrap_or_default();
        let args = [
            &choosing[..],
            &[
                list.into(),
                (blob.down_at as u32).into(),
                (bias as u32).into(),
                (&self.gated).into(),
            ],
            &foreign,
            &[
                taken,
                is_shared,
                y.into(),
                (width as i32).into(),
                (ff as i32).into(),
                (&self.ids).into(),
                (&self.weights).into(),
                (cut.stages as i32).into(),
            ],
        ]
        .concat();
        let launch = cut_launch(OP, stream, &cut, tokens.n)?.start(start);
        let kernel = &self.format(OP, blob.down)?.down;
        // SAFETY: as in `gate_up`.
        unsafe { kernel.launch(stream, launch, &args) }
    }
}

/// A launch of what a cut says, for `n` tokens.
fn cut_launch(op: &'static str, stream: &Stream, cut: &Cut, n: usize) -> Result<Launch, Error> {
    let most = cut::shared_bytes_max(stream.device().properties());
    let over = cut.shared_bytes.saturating_sub(most);
    length(op, "bytes of shared memory over the limit", over, 0)?;
    let grid = [cut.grid as u32, n as u32, 1];
    let launch = Launch::grid(grid, [cut.warps as u32 * 32, 1, 1]);
    Ok(launch.shared(cut.shared_bytes))
}
