//! What a gate knows: ratios of units done both ways, how layers differ, and what other amounts of a share are like.

use serde::{Deserialize, Serialize};

use super::Constants;

/// Ratios that are kept at most.
const RATIOS_MAX: usize = 15;

/// A ratio beyond these is a hiccup: of an amount, no more than this is believed.
const LOG_MAX: f64 = 0.5;

/// Readings that an average of how layers differ is over, and what one of them is believed to change in it.
const STEP_READINGS: f64 = 8.0;
const STEP_CHANGE_MAX: f64 = 0.25;

/// Readings of an amount that are looked back at.
const TALLY_READINGS: f64 = 64.0;

/// What readings of an amount are believed to scatter by before they show it, as if this many had shown it.
const SCATTER: f64 = 0.05;
const SCATTER_READINGS: f64 = 2.0;

/// Standard errors by which another amount must be better.
const SURE: f64 = 2.5;

/// How much dearer a layer's unit is than that of the layer before it, done the same way.
#[derive(Debug, Clone, Copy, Default)]
struct Step {
    /// The layer before: with another one, what was known says nothing.
    from: u32,
    /// Of the ratio, natural logarithm.
    log: f64,
    readings: f64,
}

/// Such steps by layer.
#[derive(Debug, Clone, Default)]
pub(super) struct Steps(Vec<Step>);

impl Steps {
    pub(super) fn of_layers(n: usize) -> Self {
        Self(vec![Step::default(); n])
    }

    /// Two layers in a row were done the same way, the second in `ratio` times the time of the first.
    pub(super) fn learn(&mut self, from: u32, to: u32, ratio: f64) {
        let log = ratio.ln();
        let Some(step) = self.0.get_mut(to as usize).filter(|_| log.is_finite()) else {
            return;
        };
        if step.readings == 0.0 || step.from != from {
            let readings = 1.0;
            *step = Step {
                from,
                log,
                readings,
            };
            return;
        }
        step.readings = (step.readings + 1.0).min(STEP_READINGS);
        let change = (log - step.log) / step.readings;
        let most = STEP_CHANGE_MAX / step.readings;
        // The second reading may be the first that is sound.
        step.log += if step.readings > 2.0 {
            change.clamp(-most, most)
        } else {
            change
        };
    }

    /// How many times dearer the second layer is, as far as is known.
    pub(super) fn ratio(&self, from: u32, to: u32) -> f64 {
        match self.0.get(to as usize) {
            Some(step) if step.readings > 0.0 && step.from == from => step.log.exp(),
            _ => 1.0,
        }
    }
}

/// Two units in a row that were done differently.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Pair {
    /// The changed way's time over the usual one's.
    pub(super) ratio: f64,
    /// Their layers, the changed one's first or last.
    pub(super) layers: Option<(u32, u32)>,
    pub(super) changed: Changed,
}

/// Which of a pair was done the changed way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Changed {
    First,
    Second,
}

impl Pair {
    /// A ratio alone.
    fn of(ratio: f64) -> Self {
        Self {
            ratio,
            layers: None,
            changed: Changed::Second,
        }
    }

    /// The ratio without what the two layers differ by anyway.
    pub(super) fn corrected(&self, steps: &Steps) -> f64 {
        let step = self.layers.map_or(1.0, |(from, to)| steps.ratio(from, to));
        let ratio = match self.changed {
            Changed::First => self.ratio * step,
            Changed::Second => self.ratio / step,
        };
        // What says nothing says nothing for a change.
        if ratio.is_nan() { f64::INFINITY } else { ratio }
    }
}

/// The latest ratios, the oldest first: those that tell anything.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(from = "Vec<f64>", into = "Vec<f64>")]
pub struct Ratios {
    ratios: [f64; RATIOS_MAX],
    n: usize,
}

impl Ratios {
    /// None.
    pub const NONE: Self = Self {
        ratios: [1.0; RATIOS_MAX],
        n: 0,
    };

    /// All of them.
    pub fn as_slice(&self) -> &[f64] {
        &self.ratios[..self.n]
    }
}

impl Default for Ratios {
    fn default() -> Self {
        Self::NONE
    }
}

impl From<Vec<f64>> for Ratios {
    fn from(mut ratios: Vec<f64>) -> Self {
        ratios.retain(|ratio| ratio.is_finite() && *ratio > 0.0);
        ratios.drain(..ratios.len().saturating_sub(RATIOS_MAX));
        let mut all = Self::NONE;
        all.n = ratios.len();
        all.ratios[..all.n].copy_from_slice(&ratios);
        all
    }
}

impl From<Ratios> for Vec<f64> {
    fn from(ratios: Ratios) -> Self {
        ratios.as_slice().to_vec()
    }
}

/// The last pairs, the oldest first.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pairs {
    pairs: [Pair; RATIOS_MAX],
    n: usize,
}

impl Pairs {
    pub(super) fn new() -> Self {
        Self {
            pairs: [Pair::of(1.0); RATIOS_MAX],
            n: 0,
        }
    }

    pub(super) fn from_ratios(ratios: &Ratios) -> Self {
        let mut pairs = Self::new();
        for &ratio in ratios.as_slice() {
            pairs.push(Pair::of(ratio), RATIOS_MAX);
        }
        pairs
    }

    fn as_slice(&self) -> &[Pair] {
        &self.pairs[..self.n]
    }

    pub(super) fn push(&mut self, pair: Pair, most: usize) {
        let most = most.min(RATIOS_MAX);
        if self.n >= most {
            self.keep(most - 1);
        }
        self.pairs[self.n] = pair;
        self.n += 1;
    }

    /// Keeps the latest.
    fn keep(&mut self, n: usize) {
        let drop = self.n.saturating_sub(n);
        self.pairs.copy_within(drop..self.n, 0);
        self.n -= drop;
    }

    pub(super) fn ratios(&self, steps: &Steps) -> Ratios {
        let pairs = self.as_slice().iter();
        let ratios: Vec<f64> = pairs.map(|pair| pair.corrected(steps)).collect();
        ratios.into()
    }

    /// Whether the changed way is the better one. `None`: the ratios do not say.
    pub(super) fn is_better(
        &self,
        steps: &Steps,
        so_far: Option<bool>,
        constants: &Constants,
    ) -> Option<bool> {
        let mut sorted = [0.0; RATIOS_MAX];
        let mut look = |latest: usize| {
            let pairs = &self.as_slice()[self.n.saturating_sub(latest)..];
            let sorted = &mut sorted[..pairs.len()];
            for (to, pair) in sorted.iter_mut().zip(pairs) {
                *to = pair.corrected(steps);
            }
            let below = sorted.iter().filter(|r| **r < 1.0).count();
            let is_unanimous = below == 0 || below == sorted.len();
            (median(sorted) < 1.0, is_unanimous, sorted.len())
        };
        let (is_better, is_unanimous, n) = look(constants.ratios_most);
        if n < constants.ratios_least {
            return None;
        }
        match so_far {
            // A little more is asked for where the first ratios differ.
            None if !is_unanimous && n < constants.ratios_most => None,
            // What is known is not given up for a few ratios that happen to agree.
            Some(so_far)
                if is_better != so_far
                    && !(is_unanimous && n >= constants.ratios_most)
                    && look(constants.ratios_settled).0 == so_far =>
            {
                Some(so_far)
            }
            _ => Some(is_better),
        }
    }
}

fn median(ratios: &mut [f64]) -> f64 {
    ratios.sort_by(f64::total_cmp);
    match ratios.len() {
        0 => f64::INFINITY,
        n => f64::midpoint(ratios[(n - 1) / 2], ratios[n / 2]),
    }
}

/// What is known of another amount, unless it is the better one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Search {
    /// Too little.
    Open,
    /// Many looks have not shown it to be better.
    Alike,
    /// It is worse, beyond doubt.
    Worse,
}

/// What readings of another amount come to: how many, their mean and their squared distances from it; of logarithms of ratios.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tally {
    readings: f64,
    mean: f64,
    squares: f64,
}

impl Tally {
    /// Nothing, if it is none that a tally can have become.
    pub(super) fn checked(self) -> Self {
        let is_sound = (0.0..=TALLY_READINGS).contains(&self.readings)
            && self.mean.abs() <= LOG_MAX
            && (0.0..=TALLY_READINGS * 4.0 * LOG_MAX * LOG_MAX).contains(&self.squares);
        if is_sound { self } else { Self::default() }
    }

    /// Takes a ratio, its time over that of the usual amount.
    pub(super) fn take(&mut self, ratio: f64) {
        let log = ratio.ln();
        let log = if log.is_nan() {
            LOG_MAX
        } else {
            log.clamp(-LOG_MAX, LOG_MAX)
        };
        if self.readings >= TALLY_READINGS {
            self.readings /= 2.0;
            self.squares /= 2.0;
        }
        self.readings += 1.0;
        let off = log - self.mean;
        self.mean += off / self.readings;
        self.squares += off * (log - self.mean);
    }

    /// Whether that amount is the better one, beyond doubt.
    pub(super) fn is_better(&self) -> bool {
        self.is_known() && self.mean < -self.doubt()
    }

    /// How far the search is with it.
    pub(super) fn search(&self, looks: u32) -> Search {
        if self.is_known() && self.mean > self.doubt() {
            Search::Worse
        } else if self.readings >= f64::from(looks) {
            Search::Alike
        } else {
            Search::Open
        }
    }

    fn is_known(&self) -> bool {
        self.readings >= 3.0
    }

    fn doubt(&self) -> f64 {
        let known = (self.readings - 1.0).max(0.0) + SCATTER_READINGS;
        let variance = (self.squares + SCATTER_READINGS * SCATTER * SCATTER) / known;
        SURE * (variance / self.readings).sqrt()
    }
}
