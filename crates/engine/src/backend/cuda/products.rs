//! Products of quantised or float activations.

use super::Cuda;
use crate::model::Linear;
use cuda::Buffer;
use cuda::product::{Output, TOGETHER_MAX};
use quant::act::{BLOCK32, BLOCK256, Passes};
use quant::product::act_block;

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
