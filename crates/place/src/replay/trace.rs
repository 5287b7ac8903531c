//! A prompt as a replay runs it: what each layer takes with any share.

use std::collections::BTreeMap;

use serde::Serialize;

use super::random::Random;
use crate::gate::Unit;
use crate::windows::{Recording, Window, median};

/// Layers of a generated model.
const LAYERS: usize = 48;

/// One of them takes so many times what the others do.
const DEAR: f64 = 6.0;

/// The dearest of the others over the cheapest.
const SPREAD: f64 = 1.5;

/// How often dear and cheap layers take turns over the depth of a smooth model.
const WAVES: (f64, f64) = (1.0, 2.0);

/// How far a layer's time is from itself, up or down.
const UNSTEADY: f64 = 0.02;

/// Share of the missing experts where both sides end together, as far as their rates say.
const BALANCE: f64 = 0.5;

/// Where the share is best, as part of the balance: a busy host makes streaming dearer, so both sides end together before it.
const BEST: f64 = 0.8;

/// How layers of a generated model differ, all but one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Depth {
    /// Neighbours are alike.
    Smooth,
    /// Each has nothing to do with the one before.
    Rough,
}

/// What a layer takes.
#[derive(Debug, Clone, PartialEq)]
enum Curve {
    /// Alone, and what that is multiplied by at the balance.
    Shaped { alone_ms: f64, effect: f64 },
    /// Shares and times in between which it is straight; the first is alone.
    Points(Vec<(f64, f64)>),
}

/// A layer of a chunk.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// Which chunk it is of.
    pub chunk: u32,
    /// What it is.
    pub unit: Unit,
    curve: Curve,
}

impl Layer {
    /// What it takes with a share, alone with 0.
    pub fn ms(&self, share: f64) -> f64 {
        match &self.curve {
            Curve::Shaped { alone_ms, effect } => alone_ms * shaped(*effect, share / BALANCE),
            Curve::Points(points) => straight(points, share),
        }
    }
}

/// A layer's time with `x` times the balance, over its time alone; `effect` is that at the balance. Up to there a parabola with its top at
/// [`BEST`], which fits the published machine where the share loses: 2.1, 3.5 and 4.5 % at 0.10, 0.20 and 0.47 (2.2, 3.8 and 4.5 % here). Beyond
/// it everything waits for the host, whose time grows with its share.
fn shaped(effect: f64, x: f64) -> f64 {
    if x > 1.0 {
        return effect * x;
    }
    1.0 + (effect - 1.0) * x * (2.0 * BEST - x) / (2.0 * BEST - 1.0)
}

fn straight(points: &[(f64, f64)], share: f64) -> f64 {
    let after = points.partition_point(|&(at, _)| at < share);
    match (after.checked_sub(1).map(|i| points[i]), points.get(after)) {
        (Some((x0, y0)), Some(&(x1, y1))) => y0 + (y1 - y0) * (share - x0) / (x1 - x0),
        (Some((_, y)), None) => y,
        (None, Some(&(_, y))) => y,
        (None, None) => 0.0,
    }
}

/// Layers in the order in which a prompt goes through them.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// All of them.
    pub layers: Vec<Layer>,
    /// The share that is planned.
    pub planned: f64,
}

impl Trace {
    /// A prompt's layers as they are generated: times of their own for each `number`, and an effect of the share that is the same for all.
    pub fn generated(effect: f64, depth: Depth, seed: u64, number: u64) -> Self {
        let mut random = Random::new(seed, number);
        let dear = random.below(LAYERS);
        let (phase, waves) = (random.unit(), random.between(WAVES.0, WAVES.1));
        let layers = (0..LAYERS)
            .map(|layer| {
                let at = phase + waves * layer as f64 / LAYERS as f64;
                let spread = SPREAD.powf(match depth {
                    Depth::Smooth => f64::midpoint(1.0, (std::f64::consts::TAU * at).sin()),
                    Depth::Rough => random.unit(),
                });
                let alone_ms = if layer == dear {
                    // Over the median of the others.
                    DEAR * SPREAD.sqrt()
                } else {
                    spread
                };
                Layer {
                    chunk: 0,
                    unit: Unit {
                        layer: layer as u32,
                        parts: 1.0,
                    },
                    curve: Curve::Shaped { alone_ms, effect },
                }
            })
            .collect();
        Self {
            layers,
            planned: BALANCE,
        }
    }

    /// Prompts as they were recorded, by their tokens: layers that were recorded both alone and with a share, and their median times. `planned`: the
    /// share to begin with, or the middle one of those recorded. `scale`: how much of the share's effect there is.
    pub fn recorded(recording: &Recording, planned: Option<f64>, scale: f64) -> Vec<(u32, Self)> {
        let mut prompts: BTreeMap<u32, BTreeMap<(u32, u32), Vec<&Window>>> = BTreeMap::new();
        for window in recording.windows.iter().filter(|w| !w.one_time) {
            let layers = prompts.entry(window.prompt).or_default();
            let at = (window.chunk, window.layer);
            layers.entry(at).or_default().push(window);
        }
        let traces = prompts.into_iter().filter_map(|(prompt, layers)| {
            let shares = layers.values().flatten().map(|w| w.share);
            let mut shares: Vec<f64> = shares.filter(|&share| share > 0.0).collect();
            shares.sort_by(f64::total_cmp);
            shares.dedup();
            let planned = planned.or_else(|| shares.get(shares.len() / 2).copied())?;
            let layers: Vec<Layer> = layers
                .into_iter()
                .filter_map(|((chunk, layer), windows)| recorded(chunk, layer, &windows, scale))
                .collect();
            (!layers.is_empty()).then_some((prompt, Self { layers, planned }))
        });
        traces.collect()
    }

    /// What the prompt takes with one share everywhere.
    pub fn ms(&self, share: f64) -> f64 {
        self.layers.iter().map(|layer| layer.ms(share)).sum()
    }
}

/// What a generated layer's time is multiplied by in one prompt.
pub(super) fn unsteady(random: &mut Random) -> f64 {
    random.between(1.0 - UNSTEADY, 1.0 + UNSTEADY)
}

fn recorded(chunk: u32, layer: u32, windows: &[&Window], scale: f64) -> Option<Layer> {
    let mut shares: Vec<f64> = windows.iter().map(|w| w.share).collect();
    shares.sort_by(f64::total_cmp);
    shares.dedup();
    let points: Vec<(f64, f64)> = shares
        .iter()
        .map(|&share| {
            let of_share = windows.iter().filter(|w| w.share == share);
            let mut ms: Vec<f64> = of_share.map(|w| w.ms).collect();
            (share, median(&mut ms))
        })
        .collect();
    let &(first, alone_ms) = points.first()?;
    if first != 0.0 || points.len() < 2 {
        return None;
    }
    let scaled = |(share, ms): (f64, f64)| (share, (alone_ms + scale * (ms - alone_ms)).max(0.0));
    let missing = windows.iter().map(|w| w.missing).max()?;
    Some(Layer {
        chunk,
        unit: Unit {
            layer,
            parts: f64::from(missing),
        },
        curve: Curve::Points(points.into_iter().map(scaled).collect()),
    })
}
