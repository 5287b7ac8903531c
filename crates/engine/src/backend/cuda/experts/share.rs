//! The CPU's part in a layer's experts, computed where they lie.

use crate::model::{Mixture, Model};
use cpu::acts::Acts;
use cpu::mem::OutOfMemory;
use cpu::mixture::{self, Expert, Pools, Side, Source};
use cpu::product::Operand;
use cuda::experts::Blobs;
use quant::act::{BLOCK32, BLOCK256, Passes};
use quant::product::act_block;

/// Experts where they lie.
pub(super) struct InBlobs<'a> {
    pub(super) mixture: &'a Mixture,
    pub(super) blobs: &'a Blobs,
    pub(super) starts: &'a [usize],
}

impl Source for InBlobs<'_> {
    fn make_ready(&mut self, experts: &[u32]) -> usize {
        experts.len()
    }

    fn expert(&self, expert: u32) -> Expert<'_> {
        let start = self.starts[expert as usize];
        self.mixture.experts[expert as usize].view_in(&self.blobs.bytes()[start..])
    }

    fn side(&self, _: u32) -> Side {
        Side::Host
    }
}

/// What computes.
#[derive(Debug)]
pub(super) struct Computing {
    mixer: mixture::Mixer,
    acts: [Acts; 2],
}

impl Computing {
    /// For up to `tokens` tokens at a time.
    pub(super) fn new(shape: mixture::Shape, tokens: usize) -> Result<Self, OutOfMemory> {
        let acts = || Acts::new(tokens, shape.width);
        Ok(Self {
            mixer: mixture::Mixer::new(shape, tokens)?,
            acts: [acts()?, acts()?],
        })
    }

    /// What experts give tokens of `x`: of pairs of an expert and a token, by expert. `give` gets each pair's number and output.
    pub(super) fn outputs(
        &mut self,
        model: &Model,
        source: &mut InBlobs<'_>,
        x: &[f32],
        tokens: usize,
        pairs: &[(u32, u32)],
        give: &mut dyn FnMut(usize, &[f32]),
    ) {
        let pool = model.host_pool();
        let types = source.mixture.experts[0].inputs().map(|w| w.ty());
        let [acts32, acts256] = &mut self.acts;
        let fill = |acts: &mut Acts, block: usize| {
            let is_read = types.iter().any(|&ty| act_block(ty) == Some(block));
            if is_read {
                acts.quantise(pool, model.isa, x, tokens, block, Passes::One);
            }
            is_read
        };
        let (reads32, reads256) = (fill(acts32, BLOCK32), fill(acts256, BLOCK256));
        let operand = Operand {
            x,
            tokens,
            k: model.config().width,
            acts32: reads32.then(|| acts32.view()),
            acts256: reads256.then(|| acts256.view()),
        };
        let (isa, gate) = (model.isa, model.config().gate);
        let pools = Pools::from(pool);
        self.mixer
            .outputs(pools, isa, gate, &operand, source, pairs, give);
    }
}
