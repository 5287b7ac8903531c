//! Mixtures of experts: all of them in device memory, or placed by a store ([`super::experts`]).

use super::experts::{At, PlacedExperts};
use super::products::before;
use super::weights::OnDevice;
use super::{Cuda, delta};
use crate::backend::Added;
use crate::error::Error;
use crate::experts::Store;
use crate::model::{ExpertMemory, FeedForward, Mixture, Model, Vector};
use cuda::experts::{Arena, Blob, FEW_MAX, Layer, Mixer, Scores, Shape, Shared, Tokens};
use cuda::kernel::Start;
use cuda::ops::Normed;
use cuda::product::Target;
use cuda::{Acts, Buffer, Stream};
use quant::act::{BLOCK32, BLOCK256, Passes};
use quant::product::act_block;

/// What computes a model's mixtures, and where its experts are.
#[derive(Debug)]
pub(super) struct Mixtures {
    mixer: Mixer,
    /// Where experts are that are all on the device.
    arena: Option<Arena>,
    /// What places the others.
    pub(super) placed: Option<PlacedExperts>,
    pub(super) lying: Lying,
    /// Of a mixture.
    experts: usize,
}

/// How experts lie in the memory that has all of them.
#[derive(Debug)]
pub(super) struct Lying {
    /// The layout of each mixture's.
    pub(super) blobs: Vec<Blob>,
    /// Where each mixture's begin.
    pub(super) starts: Vec<Vec<usize>>,
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
        let starts = mixtures.iter().map(|mixture| {
            let starts = mixture.experts.iter();
            starts.map(|e| weights.expert_start(e.first())).collect()
        });
        let starts: Vec<Vec<usize>> = starts.collect();
        let arena = match weights.experts() {
            ExpertMemory::Host(_) => None,
            ExpertMemory::Device(memory) => {
                let all = mixtures.len() * experts;
                let mut arena = Arena::new(stream, memory.clone(), all)?;
                for (i, (starts, blob)) in starts.iter().zip(&blobs).enumerate() {
                    for (e, &at) in starts.iter().enumerate() {
                        arena.place(i * experts + e, blob, Some(at))?;
                    }
                }
                arena.publish(stream)?;
                Some(arena)
            }
        };
        let shape = Shape {
            width: c.width,
            ff: of.ff,
            routing: of.routing,
            gate: c.gate,
        };
        Ok(Some(Self {
            mixer: Mixer::new(stream, Target::Best, shape, &blobs, ubatch)?,
            arena,
            placed: None,
            lying: Lying { blobs, starts },
            experts,
        }))
    }

    /// Has experts placed by a store from now on.
    pub(super) fn place(
        &mut self,
        model: &Model,
        stream: &Stream,
        store: Store,
        ubatch: usize,
    ) -> Result<(), Error> {
        let ExpertMemory::Host(blobs) = model.weights.on_device().experts() else {
            let what = match store.slots() {
                Some(_) => "experts are in the device's memory, and cannot be elsewhere",
                None => "a GPU tells which experts are used only where some are in host memory",
            };
            return Err(Error::Options(what.to_owned()));
        };
        if !self.mixer.takes_many() {
            let what = "experts in host memory need a GPU of compute capability 9.0";
            return Err(Error::Options(what.to_owned()));
        }
        self.placed = Some(PlacedExperts::new(
            model,
            stream,
            self,
            blobs.clone(),
            store,
            ubatch,
        )?);
        self.mixer.tell_host(stream, self.lying.blobs.len())?;
        Ok(())
    }

    /// Begins a step of experts that are placed.
    fn begin_step(
        &mut self,
        stream: &Stream,
        position: usize,
        tokens: usize,
        generated: bool,
    ) -> Result<(), cuda::Error> {
        if let Some(placed) = self.placed.as_mut().filter(|placed| !placed.is_recording) {
            placed.begin_step(stream, &self.lying, position, tokens, generated)?;
            self.mixer.begin_token();
        }
        Ok(())
    }

    /// Whether the device has never given up waiting for the host.
    pub(super) fn is_in_time(&self) -> bool {
        !self.mixer.was_late()
    }

    /// The experts of a mixture, and what computes them.
    fn on_device(&mut self, mixture: &Mixture) -> (&mut Mixer, Layer<'_>) {
        let first = mixture.index * self.experts;
        let blob = &self.lying.blobs[mixture.index];
        let arena = self.arena.as_ref();
        let arena = arena.expect("experts of a device are all there, or placed");
        (
            &mut self.mixer,
            arena.layer(blob, first..first + self.experts),
        )
    }

    /// What places experts, and a mixture to be placed.
    pub(super) fn placing<'a>(
        &'a mut self,
        model: &'a Model,
        mixture: &'a Mixture,
        stream: &'a Stream,
        start: Start,
    ) -> Option<(&'a mut PlacedExperts, At<'a>)> {
        let at = At {
            model,
            mixture,
            mixer: &mut self.mixer,
            lying: &self.lying,
            stream,
            start,
        };
        Some((self.placed.as_mut()?, at))
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

/// Which of the activations in blocks of 32 and of 256 a mixture's experts read.
fn inputs_of<'a>(mixture: &Mixture, [acts32, acts256]: [&'a Acts; 2]) -> &'a Acts {
    match act_block(mixture.experts[0].first().ty()) {
        Some(BLOCK32) => acts32,
        _ => acts256,
    }
}

impl Cuda<'_> {
    /// The way into a mixture: the norm's result as values and as blocks for whoever reads it, and the router's product; of a generated token in one launch.
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
        let (stream, start, width, eps) = (&self.stream, self.start, c.width, c.norm_eps);
        let mixtures = self.mixtures.as_mut();
        let mixer = &mut mixtures.expect("a model with mixtures has them").mixer;
        if self.generated
            && tokens == 1
            && mixer.norms()
            && added.as_ref().is_none_or(|added| added.norm.is_none())
        {
            let added = added.map(|added| added.delta);
            let w = self.weights.vector(norm);
            let x = [x, &mut self.last[0]];
            let before = before(&mut self.summed, x, added, w, eps);
            let (router, _) = self.weights.matrix(&mixture.router.w);
            return mixer.score_normed(stream, start, router, before, out);
        }
        let w = Some(self.weights.vector(norm));
        let added = added.map(|added| delta(&self.weights, &added));
        let x = if self.summed { &mut self.last[0] } else { x };
        self.ops
            .residual_norm_to(stream, start, tokens, width, eps, x, added, w, out)?;
        if tokens > FEW_MAX {
            return self.products(normed, tokens, &mut [(&mixture.router, scores)]);
        }
        let (router, _) = self.weights.matrix(&mixture.router.w);
        mixer.score(stream, start, router, normed, tokens)
    }

    /// All of a mixture that reads its input, `normed` `[T, D]`, in blocks.
    pub(super) fn begin_mixture(
        &mut self,
        mixture: &Mixture,
        n: usize,
        scores: &Buffer<f32>,
        normed: &Buffer<f32>,
    ) -> Result<(), cuda::Error> {
        let acts = inputs_of(mixture, [&self.acts32, &self.acts256]);
        let scores = scores_of(&self.weights, mixture, n, scores);
        let tokens = Tokens { n, scores, acts };
        let (stream, start) = (&self.stream, self.start);
        let mixtures = self
            .mixtures
            .as_mut()
            .expect("a model with mixtures has them");
        if let Some((placed, mut at)) = mixtures.placing(self.model, mixture, stream, start) {
            return match self.generated {
                true => placed.begin_one(&mut at, &tokens, normed),
                false => placed.begin_many(&mut at, &tokens, normed),
            };
        }
        let (mixer, layer) = mixtures.on_device(mixture);
        mixer.begin(stream, start, &layer, &tokens)
    }

    /// Begins a step, as [`Backend::begin`](crate::backend::Backend::begin) does.
    pub(super) fn begin_experts(
        &mut self,
        position: usize,
        tokens: usize,
    ) -> Result<(), cuda::Error> {
        let generated = self.generated;
        match &mut self.mixtures {
            Some(mixtures) => mixtures.begin_step(&self.stream, position, tokens, generated),
            None => Ok(()),
        }
    }

    /// Layers that are given are recorded, or no more so.
    pub(super) fn set_recording(&mut self, is_recording: bool) {
        if let Some(placed) = self.mixtures.as_mut().and_then(|m| m.placed.as_mut()) {
            placed.is_recording = is_recording;
        }
    }

    /// Answers what a generated token's layers ask that were launched as a graph.
    pub(super) fn answer_mixtures(&mut self) -> Result<(), cuda::Error> {
        let (model, stream, start) = (self.model, &self.stream, self.start);
        let Some(mixtures) = &mut self.mixtures else {
            return Ok(());
        };
        if let Some(placed) = &mixtures.placed {
            placed.rouse(model);
        }
        for index in 0..mixtures.lying.blobs.len() {
            let mixture = model.mixture(index);
            if let Some((placed, mut at)) = mixtures.placing(model, mixture, stream, start) {
                placed.answer(&mut at)?;
            }
        }
        Ok(())
    }

    /// The rest, behind the shared expert, whose output is in `delta`; `taken` `[T]` is the product of its gate.
    pub(super) fn finish_mixture(
        &mut self,
        mixture: &Mixture,
        n: usize,
        scores: &Buffer<f32>,
        normed: &Buffer<f32>,
        taken: &Buffer<f32>,
        delta: &mut Buffer<f32>,
    ) -> Result<(), cuda::Error> {
        let shared = match &mixture.shared {
            None => Shared::None,
            Some(shared) if shared.gate.is_none() => Shared::All,
            Some(_) => Shared::Part(taken),
        };
        let acts = inputs_of(mixture, [&self.acts32, &self.acts256]);
        let scores = scores_of(&self.weights, mixture, n, scores);
        let tokens = Tokens { n, scores, acts };
        let (stream, start) = (&self.stream, self.start);
        let mixtures = self
            .mixtures
            .as_mut()
            .expect("a model with mixtures has them");
        if let Some((placed, mut at)) = mixtures.placing(self.model, mixture, stream, start) {
            return match self.generated {
                true => placed.finish_one(&mut at, &tokens, shared, delta),
                false => placed.finish_many(&mut at, n, normed, shared, delta),
            };
        }
        let (mixer, layer) = mixtures.on_device(mixture);
        mixer.finish(stream, start, &layer, &tokens, shared, delta)
    }
}
