//! Replay: the gate over prompts whose layers' times are known in every arm, many times, with noise.
//!
//! It says what a gate costs and keeps, before one runs on a machine, and what its [`Constants`] are chosen by. Prompts are recorded ones
//! ([`windows`](crate::windows)), or generated to be like those of published machines ([`PUBLISHED`]).
//!
//! Times are relative to the same prompt without the share. The gate reads them with noise; what a prompt took is counted without, so that
//! only decisions make a difference.

mod published;
mod random;
#[cfg(test)]
mod tests;
mod trace;

pub use published::{PUBLISHED, Published};
pub use trace::{Depth, Layer, Trace};

use serde::Serialize;

use crate::gate::{Constants, Finding, Gate, Layers};
use random::Random;

/// Prompts of a process, before the next one begins with what it found.
const PROCESS_PROMPTS: usize = 4;

/// Prompts that are there before those that count as later ones, and those.
const EARLY_PROMPTS: usize = 8;
const LATER_PROMPTS: usize = 24;

/// Amounts that the best one is looked for among.
const AMOUNTS: u32 = 20;

/// How a replay is done.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Settings {
    /// How often.
    pub runs: u32,
    /// Standard deviation of a reading, as part of it.
    pub noise: f64,
    /// The least change of the share that the gate tries.
    pub step: f64,
    /// What runs are repeated by.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            runs: 300,
            noise: 0.04,
            step: 0.1,
            seed: 1,
        }
    }
}

/// Where prompts come from.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// Each run has another model, where the share has this effect at the balance.
    Generated {
        /// Time over time without it.
        effect: f64,
        /// How its layers differ.
        depth: Depth,
    },
    /// All runs are of what was recorded.
    Recorded(Trace),
}

/// Of all runs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// Their mean.
    pub mean: f64,
    /// The longest time.
    pub worst: f64,
}

/// What a replay came to: times over those without the share.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Outcome {
    /// With the planned share in every layer.
    pub every: f64,
    /// With the best amount of it in every layer, or none.
    pub best: f64,
    /// With a gate that knows nothing: the first prompt.
    pub first: Spread,
    /// With gates that begin with what others found.
    pub later: Spread,
}

impl Outcome {
    /// Where the planned share wins: how much of what it saves a mean saves.
    pub fn kept(&self, spread: Spread) -> Option<f64> {
        (self.every < 1.0).then(|| (1.0 - spread.mean) / (1.0 - self.every))
    }

    /// Where it does not: what a mean costs.
    pub fn lost(&self, spread: Spread) -> Option<f64> {
        (self.every >= 1.0).then_some(spread.mean - 1.0)
    }
}

/// Runs gates over prompts.
pub fn replay(source: &Source, constants: Constants, settings: &Settings) -> Outcome {
    let mut sums = [0.0; 4];
    let [mut first_worst, mut later_worst] = [0.0, 0.0f64];
    let runs = settings.runs.max(1);
    for run in 0..runs {
        let number = u64::from(run);
        let generated;
        let (trace, unsteady) = match source {
            Source::Generated { effect, depth } => {
                generated = Trace::generated(*effect, *depth, settings.seed, number);
                (&generated, true)
            }
            Source::Recorded(trace) => (trace, false),
        };
        let mut prompts = Prompts {
            trace,
            unsteady,
            noise: settings.noise,
            random: Random::new(!settings.seed, number),
        };
        let alone = trace.ms(0.0);
        let amounts = (1..=AMOUNTS).map(|i| trace.ms(f64::from(i) / f64::from(AMOUNTS)) / alone);
        let (first, later) = prompts.lives(constants, settings.step);
        let of_run = [
            trace.ms(trace.planned) / alone,
            amounts.fold(1.0, f64::min),
            first,
            later,
        ];
        for (sum, of_run) in sums.iter_mut().zip(of_run) {
            *sum += of_run;
        }
        first_worst = f64::max(first_worst, first);
        later_worst = f64::max(later_worst, later);
    }
    let [every, best, first, later] = sums.map(|sum| sum / f64::from(runs));
    let spread = |mean, worst| Spread { mean, worst };
    Outcome {
        every,
        best,
        first: spread(first, first_worst),
        later: spread(later, later_worst),
    }
}

/// Prompts of one run.
struct Prompts<'t> {
    trace: &'t Trace,
    /// Whether layers take another time in each prompt.
    unsteady: bool,
    noise: f64,
    random: Random,
}

impl Prompts<'_> {
    /// Processes one after another, each with some prompts: the first prompt's time, and the mean of later ones'.
    fn lives(&mut self, constants: Constants, step: f64) -> (f64, f64) {
        let mut found: Option<Finding> = None;
        let (mut first, mut later) = (0.0, 0.0);
        let layers = self.trace.layers.iter().map(|l| l.unit.layer).max();
        let layers = layers.map_or(0, |last| last as usize + 1);
        for process in 0..(EARLY_PROMPTS + LATER_PROMPTS) / PROCESS_PROMPTS {
            let mut gate =
                Gate::with_constants(self.trace.planned, step, constants).of_layers(layers);
            if let Some(found) = &found {
                gate = gate.recall(found);
            }
            for prompt in process * PROCESS_PROMPTS..(process + 1) * PROCESS_PROMPTS {
                let took = self.prompt(&mut gate);
                if prompt == 0 {
                    first = took;
                }
                if prompt >= EARLY_PROMPTS {
                    later += took / LATER_PROMPTS as f64;
                }
            }
            found = gate.finding();
        }
        (first, later)
    }

    /// What a prompt takes, over what it takes without the share.
    fn prompt(&mut self, gate: &mut Gate) -> f64 {
        let (mut took, mut alone) = (0.0, 0.0);
        let mut chunk = None;
        for layer in &self.trace.layers {
            if chunk != Some(layer.chunk) {
                gate.begin_chunk();
                chunk = Some(layer.chunk);
            }
            let times = if self.unsteady {
                trace::unsteady(&mut self.random)
            } else {
                1.0
            };
            let ms = times * layer.ms(gate.share());
            alone += times * layer.ms(0.0);
            took += ms;
            let noisy = ms * (1.0 + self.noise * self.random.normal()).max(0.1);
            gate.read_layer(layer.unit, noisy);
        }
        took / alone
    }
}

/// A gate that goes by some numbers, over the generated cases at full effect: the worst of them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Compared {
    /// What differs from [`Constants::CHOSEN`].
    pub name: &'static str,
    /// What it goes by.
    pub constants: Constants,
    /// With neighbours that are alike.
    pub smooth: Worst,
    /// With neighbours that are not.
    pub rough: Worst,
}

/// The worst case of several.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Worst {
    /// Where the share wins: the least part of the gain that is kept, by the first prompt and by later ones.
    pub kept: [f64; 2],
    /// Where it loses: the most that is lost.
    pub lost: [f64; 2],
}

/// The gate's numbers, and some that it could go by instead.
pub fn candidates() -> Vec<(&'static str, Constants)> {
    let chosen = Constants::CHOSEN;
    let every = |interval: u32| Constants {
        intervals: [interval; 3],
        ..chosen
    };
    let ratios = |least: usize, most: usize, settled: usize| Constants {
        ratios_least: least,
        ratios_most: most,
        ratios_settled: settled,
        ..chosen
    };
    vec![
        ("chosen", chosen),
        ("probes every 13th unit", every(13)),
        ("probes every 29th unit", every(29)),
        ("probes every 113th unit", every(113)),
        ("three ratios", ratios(3, 3, 15)),
        ("five ratios at once", ratios(5, 5, 15)),
        ("no ratios but the last five", ratios(3, 5, 5)),
        (
            "layers as they are",
            Constants {
                layers: Layers::AsTheyAre,
                ..chosen
            },
        ),
        (
            "the published gate",
            Constants {
                intervals: [29; 3],
                layers: Layers::AsTheyAre,
                amount_intervals: [u32::MAX; 3],
                ..ratios(3, 5, 5)
            },
        ),
    ]
}

/// Runs every candidate over the cases at full effect.
pub fn compare(settings: &Settings) -> Vec<Compared> {
    let compared = candidates().into_iter().map(|(name, constants)| Compared {
        name,
        constants,
        smooth: worst(constants, Depth::Smooth, settings),
        rough: worst(constants, Depth::Rough, settings),
    });
    compared.collect()
}

fn worst(constants: Constants, depth: Depth, settings: &Settings) -> Worst {
    let mut worst = Worst {
        kept: [f64::INFINITY; 2],
        lost: [f64::NEG_INFINITY; 2],
    };
    for case in PUBLISHED.iter().filter(|case| case.scale == 1.0) {
        let effect = case.every;
        let outcome = replay(&Source::Generated { effect, depth }, constants, settings);
        for (i, spread) in [outcome.first, outcome.later].into_iter().enumerate() {
            if let Some(kept) = outcome.kept(spread) {
                worst.kept[i] = worst.kept[i].min(kept);
            }
            if let Some(lost) = outcome.lost(spread) {
                worst.lost[i] = worst.lost[i].max(lost);
            }
        }
    }
    worst
}
