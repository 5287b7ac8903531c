//! Mixtures of experts, all of them in device memory.

use super::weights::OnDevice;
use super::{Cuda, delta};
use crate::backend::Added;
use crate::error::Error;
use crate::model::{FeedForward, Mixture, Model, Vector};
use cuda::experts::{Arena, Blob, FEW_MAX, Layer, Mixer, Scores, Shape, Shared, Tokens};
use cuda::ops::Normed;
use cuda::product::Target;
use cuda::{Buffer, Stream};
use quant::act::{BLOCK32, BLOCK256, Passes};
use quant::product::act_block;

/// What computes a model's mixtures, and where its experts are.
#[derive(Debug)]
pub(super) struct Mixtures {
    mixer: Mixer,
    arena: Arena,
    /// Of each mixture.
    blobs: Vec<Blob>,
    /// Of a mixture.
    experts: usize,
}

impl Mixtures {
    /// Of a model, if it has any; for up to `ubatch` tokens at a time.
    pub(super) fn new(
        model: &Model,
        stream: &Stream,
        ubatch: usize,
    ) -> Result<Option<Self>, Error> {
        let c = model.config();
        let Some(of) = &c.experts else {
            return Ok(None);
        };
        let mixtures = model.layers.iter().filter_map(|layer| match &layer.ffn {
            FeedForward::Mixture(mixture) => Some(mixture),
            FeedForward::Dense(_) => None,
        });
        let mixtures: Vec<&Mixture> = mixtures.collect();
        let blob = |mixture: &&Mixture| mixture.experts[0].layout().map_err(Error::Options);
        let blobs = mixtures.iter().map(blob).collect::<Result<Vec<_>, _>>()?;
        let (weights, experts) = (model.weights.on_device(), of.routing.experts);
        let memory = weights.experts().clone();
        let mut arena = Arena::new(stream, memory, mixtures.len() * experts)?;
        for (mixture, blob) in mixtures.iter().zip(&blobs) {
            for (e, expert) in mixture.experts.iter().enumerate() {
                let at = weights.expert_start(expert.first());
                arena.place(mixture.index * experts + e, blob, Some(at))?;
            }
        }
        arena.publish(stream)?;
        let shape = Shape {
            width: c.width,
            ff: of.ff,
            routing: of.routing,
            gate: c.gate,
        };
        Ok(Some(Self {
            mixer: Mixer::new(stream, Target::Best, shape, &blobs, ubatch)?,
            arena,
            blobs,
            experts,
        }))
    }

    /// What computes, and a mixture's experts.
    fn of(&mut self, mixture: &Mixture) -> (&mut Mixer, Layer<'_>) {
        let first = mixture.index * self.experts;
        let blob = &self.blobs[mixture.index];
        let layer = self.arena.layer(blob, first..first + self.experts);
        (&mut self.mixer, layer)
    }
}

/// What `feed_mixture` made of `n` tokens' scores.
fn scores_of<'a>(
    weights: &'a OnDevice<'_>,
    mixture: &Mixture,
    n: usize,
    whole: &'a Buffer<f32>,
) -> Scores<'a> {
    if n > FEW_MAX {
        return Scores::Whole(whole);
    }
    let bias = mixture.router.bias.as_ref();
    Scores::Parts(bias.map(|bias| weights.vector(bias)))
}

impl Cuda<'_> {
    /// The way into a mixture: the norm's result as values and as blocks for whoever reads it, and the router's product.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub(super) fn feed_mixture(
        &mut self,
        added: Option<Added<'_, Self>>,
        norm: &Vector,
        mixture: &Mixture,
        tokens: usize,
        x: &mut Buffer<f32>,
        normed: &mut Buffer<f32>,
        scores: &mut Buffer<f32>,
    ) -> Result<(), cuda::Error> {
        let c = self.model.config();
        let shared = mixture.shared.iter();
        let shared = shared.flat_map(|shared| [&shared.ffn.gate.w, &shared.ffn.up.w]);
        let readers = mixture.experts[0].inputs().into_iter().chain(shared);
        let blocks: Vec<_> = readers.map(|w| act_block(w.ty())).collect();
        let reads = |block| blocks.contains(&Some(block));
        let out = Normed {
            row: Some(&mut *normed),
            blocks32: reads(BLOCK32).then_some((&mut self.acts32, Passes::One)),
            blocks256: reads(BLOCK256).then_some((&mut self.acts256, Passes::One)),
        };
        let w = Some(self.weights.vector(norm));
        let added = added.map(|added| delta(&self.weights, &added));
        let (stream, start, width, eps) = (&self.stream, self.start, c.width, c.norm_eps);
        let x = if self.summed { &mut self.last[0] } else { x };
        self.ops
            .residual_norm_to(stream, start, tokens, width, eps, x, added, w, out)?;
        if tokens > FEW_MAX {
            return self.products(normed, tokens, &mut [(&mixture.router, scores)]);
        }
        let (router, _) = self.weights.matrix(&mixture.router.w);
        let mixtures = self
            .mixtures
            .as_mut()
            .expect("a model with mixtures has them");
        let mixer = &mut mixtures.mixer;
        mixer.score(stream, start, router, normed, tokens)
    }

    /// All of a mixture that reads its input in blocks.
    pub(super) fn begin_mixture(
        &mut self,
        mixture: &Mixture,
        n: usize,
        scores: &Buffer<f32>,
    ) -> Result<(), cuda::Error> {
        let acts = match act_block(mixture.experts[0].first().ty()) {
            Some(BLOCK32) => &self.acts32,
            _ => &self.acts256,
        };
        let scores = scores_of(&self.weights, mixture, n, scores);
        let tokens = Tokens { n, scores, acts };
        let mixtures = self
            .mixtures
            .as_mut()
            .expect("a model with mixtures has them");
        let (mixer, layer) = mixtures.of(mixture);
        mixer.begin(&self.stream, self.start, &layer, &tokens)
    }

    /// The rest, behind the shared expert, whose output is in `delta`; `taken` `[T]` is the product of its gate.
    pub(super) fn finish_mixture(
        &mut self,
        mixture: &Mixture,
        n: usize,
        scores: &Buffer<f32>,
        taken: &Buffer<f32>,
        delta: &mut Buffer<f32>,
    ) -> Result<(), cuda::Error> {
        let shared = match &mixture.shared {
            None => Shared::None,
            Some(shared) if shared.gate.is_none() => Shared::All,
            Some(_) => Shared::Part(taken),
        };
        let acts = &self.acts256;
        let scores = scores_of(&self.weights, mixture, n, scores);
        let tokens = Tokens { n, scores, acts };
        let mixtures = self
            .mixtures
            .as_mut()
            .expect("a model with mixtures has them");
        let (mixer, layer) = mixtures.of(mixture);
        mixer.finish(&self.stream, self.start, &layer, &tokens, shared, delta)
    }
}
