//! A session's experts: what is decided of them ([`place::experts`]), told to a backend layer by layer, and recorded.

mod kept;

pub use kept::{Kept, model_key, placed};
pub use place::experts::{
    Costs, Counts, HitCurve, Policy, Profile, Recalled, Settings, Share, Sides, Verdicts,
};

use crate::error::Error;
use crate::model::{FeedForward, Model};
use cpu::mem::ALIGN;
pub use place::experts::Layer;
use place::experts::{Copy, Experts, Served, Slots, Took};
use place::routing::{self, LayerShape, Routed};
use place::windows;
use serde::Serialize;
use std::io::{self, Write};

/// Slots that streamed experts pass through, at most: more than any layer has experts would gain nothing.
pub const STAGING_SLOTS_MAX: u32 = 1024;

/// Where a session's experts may be.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertPlacing {
    /// How much of them stays on the device, and who computes the others.
    pub settings: Settings,
    /// What was learnt another time.
    pub recalled: Recalled,
    /// What is made worse than it is.
    pub emulated: Emulated,
}

/// A worse machine than this one, for measurements and tests.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Emulated {
    /// GB/s that copies of experts are slowed down to.
    pub link_gb_s: Option<f64>,
    /// Whether copies of experts go through a buffer on their way, as where drivers do not reach memory themselves.
    pub host_copy: bool,
    /// Whether there is no memory for slots.
    pub staging_fails: bool,
    /// Whether a thread panics that computes the CPU's share.
    pub worker_panics: bool,
}

impl Model {
    /// Layers with experts.
    pub fn expert_layers(&self) -> Vec<LayerShape> {
        let used = self.config().experts.as_ref();
        let used = used.map_or(0, |experts| experts.routing.used) as u32;
        let layer = |(i, layer): (usize, &crate::model::Layer)| match &layer.ffn {
            FeedForward::Dense(_) => None,
            FeedForward::Mixture(mixture) => Some(LayerShape {
                layer: i as u32,
                experts: mixture.experts.len() as u32,
                used,
                blob_bytes: mixture.experts[0].blob().len().next_multiple_of(ALIGN) as u64,
            }),
        };
        self.layers.iter().enumerate().filter_map(layer).collect()
    }
}

/// What placement must know of layers.
pub fn placed_layers(shapes: &[LayerShape]) -> Vec<Layer> {
    let layer = |shape: &LayerShape| Layer {
        experts: shape.experts,
        used: shape.used,
        blob_bytes: shape.blob_bytes,
    };
    shapes.iter().map(layer).collect()
}

/// Where records go, and what became of it.
struct Records {
    to: Box<dyn Write + Send>,
    failed: Option<io::Error>,
}

impl std::fmt::Debug for Records {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Records")
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}

impl Records {
    /// Writes a line. After a failure nothing more is written.
    fn write(&mut self, record: &impl Serialize) {
        if self.failed.is_some() {
            return;
        }
        let line = serde_json::to_string(record).expect("records are JSON");
        self.failed = writeln!(self.to, "{line}").err();
    }

    fn finish(mut self) -> io::Result<()> {
        match self.failed.take() {
            Some(error) => Err(error),
            None => self.to.flush(),
        }
    }
}

/// The experts of one session: what its backend asks.
#[derive(Debug)]
pub(crate) struct Store {
    model: String,
    layers: Vec<LayerShape>,
    emulated: Emulated,
    /// `None`: all of them are computed where they are.
    experts: Option<Experts>,
    position: usize,
    tokens: u32,
    generated: bool,
    /// Tokens of the prompt in work, and its chunk; of generated tokens 1, and which of them.
    prompt: u32,
    chunk: u32,
    used: Vec<(u32, u32)>,
    routing: Option<Records>,
    windows: Option<Records>,
}

impl Store {
    /// Of a model's experts, placed as is said, or all where they are computed.
    pub(crate) fn new(model: &Model, placing: Option<&ExpertPlacing>) -> Result<Self, Error> {
        let layers = model.expert_layers();
        if layers.is_empty() {
            return Err(Error::Options("the model has no experts".to_owned()));
        }
        let experts = placing.map(|placing| {
            let placed = placed_layers(&layers);
            if let Some(profile) = &placing.recalled.profile {
                let other = |e: place::Error| Error::Options(e.to_string());
                profile.check(&placed).map_err(other)?;
            }
            let slots = placing.settings.staging_slots;
            if !(1..=STAGING_SLOTS_MAX).contains(&slots) {
                let what = format!(
                    "{slots} slots for streamed experts: expected 1 to {STAGING_SLOTS_MAX}"
                );
                return Err(Error::Options(what));
            }
            Ok(Experts::new(&placed, &placing.settings, &placing.recalled))
        });
        Ok(Self {
            model: model.fingerprint(),
            experts: experts.transpose()?,
            emulated: placing.map_or_else(Emulated::default, |placing| placing.emulated),
            layers,
            position: 0,
            tokens: 0,
            generated: false,
            prompt: 0,
            chunk: 0,
            used: Vec::new(),
            routing: None,
            windows: None,
        })
    }

    /// What is made worse than it is.
    pub(crate) fn emulated(&self) -> Emulated {
        self.emulated
    }

    /// The slots to be made, where some experts are not where they are computed.
    pub(crate) fn slots(&self) -> Option<&Slots> {
        self.experts.as_ref().map(Experts::slots)
    }

    /// What to copy to begin with: all that was learnt another time to be worth it.
    pub(crate) fn fill(&mut self) -> Vec<Copy> {
        let known = self.experts.as_mut().filter(|experts| experts.is_known());
        known.map_or_else(Vec::new, Experts::fill)
    }

    /// Tells how many tokens a prompt has whose chunks are next.
    pub(crate) fn begin_prompt(&mut self, tokens: usize) {
        self.prompt = tokens as u32;
        self.generated = true;
    }

    /// Begins a step.
    pub(crate) fn begin(&mut self, position: usize, tokens: usize, generated: bool) {
        if generated == self.generated {
            self.chunk += 1;
        } else {
            self.chunk = 0;
        }
        if generated {
            self.prompt = 1;
        }
        (self.position, self.tokens, self.generated) = (position, tokens as u32, generated);
        if let Some(experts) = &mut self.experts {
            experts.begin(self.tokens, generated);
        }
    }

    /// Says where each expert is computed that the mixture of this number uses: `used` are their ids, ascending, and by how many tokens.
    /// `None`: where they are.
    pub(crate) fn serve(
        &mut self,
        mixture: usize,
        used: impl Iterator<Item = (u32, u32)>,
    ) -> Option<&[Served]> {
        if self.experts.is_none() && self.routing.is_none() {
            return None;
        }
        self.used.clear();
        self.used.extend(used);
        if let Some(routing) = &mut self.routing {
            routing.write(&Routed {
                layer: mixture as u32,
                position: self.position as u64,
                tokens: self.tokens,
                generated: self.generated,
                used: self.used.clone(),
            });
        }
        let experts = self.experts.as_mut()?;
        Some(experts.serve(mixture, &self.used))
    }

    /// Tells what that took.
    pub(crate) fn took(&mut self, took: &Took) {
        let Some(experts) = &mut self.experts else {
            return;
        };
        let Some(unit) = experts.took(took) else {
            return;
        };
        let reading = experts.reading();
        let layer = self.layers[unit.layer as usize].layer;
        tracing::debug!(
            target: "gate", layer, share = unit.share, missing = unit.missing, ms = took.ms,
            stream_ms = took.stream_ms, host_ms = took.host_ms, copied = ?took.copied, each_ms = unit.reading(), ?reading
        );
        if let Some(windows) = &mut self.windows {
            windows.write(&windows::Window {
                prompt: self.prompt,
                chunk: self.chunk,
                tokens: unit.tokens,
                layer,
                missing: unit.missing,
                on_cpu: unit.host,
                share: unit.share,
                ms: took.ms,
                host_ms: (took.stream_ms > 0.0).then_some(took.stream_ms),
                one_time: took.is_unusual,
            });
        }
    }

    /// What is to be copied behind what was served last.
    pub(crate) fn copies(&self) -> &[Copy] {
        self.experts.as_ref().map_or(&[], Experts::copies)
    }

    /// What is known of the experts, where some are not where they are computed.
    pub(crate) fn experts(&self) -> Option<&Experts> {
        self.experts.as_ref()
    }

    /// Records which experts are used from now on.
    pub(crate) fn record_routing(&mut self, to: Box<dyn Write + Send>) {
        let mut records = Records { to, failed: None };
        records.write(&routing::Header {
            routing: routing::VERSION,
            model: self.model.clone(),
            layers: self.layers.clone(),
        });
        self.routing = Some(records);
    }

    /// Records what layers take from now on.
    pub(crate) fn record_windows(&mut self, to: Box<dyn Write + Send>, machine: &str) {
        let mut records = Records { to, failed: None };
        records.write(&windows::Header::new(&*self.model, machine));
        self.windows = Some(records);
    }

    /// Ends all records.
    pub(crate) fn finish_records(&mut self) -> io::Result<()> {
        let records = [self.routing.take(), self.windows.take()];
        let ends = records.map(|r| r.map_or(Ok(()), Records::finish));
        ends.into_iter().collect()
    }
}
