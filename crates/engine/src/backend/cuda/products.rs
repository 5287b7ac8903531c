//! Products of quantised or float activations.

use super::Cuda;
use crate::backend::Added;
use crate::model::{Linear, Vector};
use cuda::Buffer;
use cuda::product::{Before, Output, TOGETHER_MAX};
use quant::act::{BLOCK32, BLOCK256, Passes};
use quant::product::act_block;

/// What a generated token's launch norms that adds to the residual stream, which is in the first of `x` or, once it is `summed`, in the other: the sum
/// goes to the one that it is not in.
pub(super) fn before<'a>(
    summed: &mut bool,
    [first, other]: [&'a mut Buffer<f32>; 2],
    delta: Option<&'a Buffer<f32>>,
    w: &'a Buffer<f32>,
    eps: f32,
) -> Before<'a> {
    let (x, sum) = if *summed {
        (other, first)
    } else {
        (first, other)
    };
    *summed ^= delta.is_some();
    Before {
        x,
        delta: delta.map(|delta| (delta, sum)),
        w,
        eps,
    }
}

impl Cuda<'_> {
    /// Quantises `x` `[T, K]` for the formats of some matrices that it is multiplied with.
    pub(super) fn quantise(
        &mut self,
        x: &Buffer<f32>,
        tokens: usize,
        passes: Passes,
        outputs: &[(&Linear, &mut Buffer<f32>)],
    ) -> Result<(), cuda::Error> {
        for block in [BLOCK32, BLOCK256] {
            let mut of_block = outputs
                .iter()
                .filter(|(linear, _)| act_block(linear.w.ty()) == Some(block));
            let Some((linear, _)) = of_block.next() else {
                continue;
            };
            let shape = cuda::acts::Shape {
                tokens,
                k: linear.w.k(),
                block,
                passes,
            };
            let acts = match block {
                BLOCK32 => &mut self.acts32,
                _ => &mut self.acts256,
            };
            self.quantiser
                .quantise(&self.stream, self.start, x, shape, acts)?;
        }
        Ok(())
    }

    /// Whether one launch can norm a generated token's residual stream and multiply what comes of it with the first of these.
    pub(super) fn enters_at_once(
        &self,
        added: Option<&Added<'_, Self>>,
        tokens: usize,
        outputs: &[(&Linear, &mut Buffer<f32>)],
    ) -> bool {
        let Some((first, _)) = outputs.first() else {
            return false;
        };
        let block = act_block(first.w.ty());
        self.generated
            && tokens == 1
            && added.is_none_or(|added| added.norm.is_none())
            && self.weights.matrix(&first.w).1.norms(first.w.k())
            && outputs
                .iter()
                .all(|(linear, _)| act_block(linear.w.ty()) == block)
    }

    /// [`Backend::enter`](crate::backend::Backend::enter) of a generated token, where that is so.
    pub(super) fn enter_at_once(
        &mut self,
        added: Option<Added<'_, Self>>,
        norm: &Vector,
        x: &mut Buffer<f32>,
        normed: &Buffer<f32>,
        outputs: &mut [(&Linear, &mut Buffer<f32>)],
    ) -> Result<(), cuda::Error> {
        let ty = outputs[0].0.w.ty();
        let same = outputs
            .iter()
            .take(TOGETHER_MAX)
            .take_while(|(linear, _)| linear.w.ty() == ty)
            .count();
        let (first, rest) = outputs.split_at_mut(same);
        let before = before(
            &mut self.summed,
            [x, &mut self.last[0]],
            added.map(|added| added.delta),
            self.weights.vector(norm),
            self.model.config().norm_eps,
        );
        let acts = match act_block(ty) {
            Some(BLOCK32) => &mut self.acts32,
            _ => &mut self.acts256,
        };
        let (_, product) = self.weights.matrix(&first[0].0.w);
        let mut together: Vec<Output<'_>> = first
            .iter_mut()
            .map(|(linear, y)| Output {
                w: self.weights.matrix(&linear.w).0,
                bias: linear.bias.as_ref().map(|b| self.weights.vector(b)),
                y,
            })
            .collect();
        product.normed(&self.stream, self.start, before, acts, &mut together)?;
        self.products(normed, 1, rest)
    }

    /// Products of one input `x`, which has been quantised, with their biases: neighbours of one format together.
    pub(super) fn products(
        &mut self,
        x: &Buffer<f32>,
        tokens: usize,
        outputs: &mut [(&Linear, &mut Buffer<f32>)],
    ) -> Result<(), cuda::Error> {
        let (stream, start) = (&self.stream, self.start);
        for outputs in outputs.chunk_by_mut(|a, b| a.0.w.ty() == b.0.w.ty()) {
            let ty = outputs[0].0.w.ty();
            let (_, product) = self.weights.matrix(&outputs[0].0.w);
            let acts = match act_block(ty) {
                None => None,
                Some(BLOCK32) => Some(&self.acts32),
                Some(_) => Some(&self.acts256),
            };
            if let Some(acts) = acts {
                for outputs in outputs.chunks_mut(TOGETHER_MAX) {
                    let mut together: Vec<Output<'_>> = outputs
                        .iter_mut()
                        .map(|(linear, y)| Output {
                            w: self.weights.matrix(&linear.w).0,
                            bias: linear.bias.as_ref().map(|b| self.weights.vector(b)),
                            y,
                        })
                        .collect();
                    product.together(stream, start, acts, &mut together)?;
                }
                continue;
            }
            for (linear, out) in outputs {
                let (w, _) = self.weights.matrix(&linear.w);
                product.float(stream, start, w, x, tokens, out)?;
                if let Some(bias) = &linear.bias {
                    let bias = self.weights.vector(bias);
                    let n = linear.w.n();
                    self.ops.add_bias(stream, start, tokens, n, out, bias)?;
                }
            }
        }
        Ok(())
    }
}
