//! The gate: whether the host's share of some work is worth having, and how large, from what units of the work take.
//!
//! A *unit* is what is timed: a generated token where cells lie in host memory, a layer of a chunk where experts do. Units differ too
//! much to be averaged by kind, so a unit is compared only with the one before it, done the other way: their ratio is what counts. Layers
//! of a chunk are compared by what each of their experts takes, and not from chunk to chunk; what two neighbours differ by whenever they are
//! done the same way is taken out of their ratio.
//!
//! ```text
//! explore   units without and with the share take turns, until there are three ratios that agree, or five
//! decide    share while the median of the last five ratios is below 1; a decision falls when all five are against it, or when most of
//!           the last fifteen are, too
//! probe     every 29th unit is done the other way; the interval grows to 59 and 113 while probes agree, and falls back to 29 when one
//!           does not
//! amount    while the share wins, every 23rd unit has a bit more of it, and another a bit less; what is better beyond doubt is taken. What
//!           is no better after 16 looks is left alone but for every 113th unit, what is worse beyond doubt but for every 503rd
//!           (units that are tokens: every 113th, 229th and 499th is probed, every 113th has a bit more or less, 229th and 997th later)
//! recall    what was found another time is probed with the second unit that can be compared, and with every second one from then on until
//!           a probe is for it
//! ```
//!
//! A state machine without a clock: it is asked how the next unit is to be done, and told what that took. The numbers are
//! [`Constants`], which [`replay`](crate::replay) compares with others.

mod evidence;
#[cfg(test)]
mod tests;

pub use evidence::{Ratios, Tally};

use evidence::{Changed, Pair, Pairs, Steps};
use serde::{Deserialize, Serialize};

/// What a gate goes by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Constants {
    /// Ratios that a decision is made from, at least.
    pub ratios_least: usize,
    /// At most.
    pub ratios_most: usize,
    /// Ratios most of which must be against a decision, too, up to 15; no more than `ratios_most`: the latest alone count.
    pub ratios_settled: usize,
    /// Units from one probe to the next, while probes agree. Prime, so that they wander over the layers of a model.
    pub intervals: [u32; 3],
    /// Probes in a row that must agree before they become fewer.
    pub agreeing: u32,
    /// Units from one look at more, or at less of a share to the next: while little is known of it, when it seems to be alike, and when
    /// it is worse.
    pub amount_intervals: [u32; 3],
    /// Looks after which an amount seems to be alike.
    pub amount_looks: u32,
    /// Whether what neighbours differ by is taken out.
    pub layers: Layers,
}

/// What is made of what layers are known to differ by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layers {
    /// It is taken out of their ratio.
    Corrected,
    /// Nothing.
    AsTheyAre,
}

impl Constants {
    /// What gates go by.
    pub const CHOSEN: Self = Self {
        ratios_least: 3,
        ratios_most: 5,
        ratios_settled: 15,
        intervals: [29, 59, 113],
        agreeing: 3,
        amount_intervals: [23, 113, 503],
        amount_looks: 16,
        layers: Layers::Corrected,
    };

    /// For tokens: one that is done otherwise costs four there and four back, as copies begin anew and a device's step is recorded anew before it
    /// says anything.
    pub const OF_TOKENS: Self = Self {
        intervals: [113, 229, 499],
        amount_intervals: [113, 229, 997],
        ..Self::CHOSEN
    };
}

/// How a unit is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arm {
    /// Without the host.
    Alone,
    /// With the host's share.
    Shared,
    /// With a step more of it.
    More,
    /// With a step less of it.
    Less,
}

/// What has been found out.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Whether the share is worth having.
    pub shares: bool,
    /// The best amount known, above 0 up to 1.
    pub amount: f64,
}

/// A verdict and what it rests on: what another gate can begin with.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// What has been found out.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// The latest ratios of share to no share.
    #[serde(default)]
    pub ratios: Ratios,
    /// Of more, and of less of it, to the amount.
    #[serde(default)]
    pub around: [Tally; 2],
}

impl From<Verdict> for Finding {
    /// A verdict alone.
    fn from(verdict: Verdict) -> Self {
        Self {
            verdict,
            ratios: Ratios::NONE,
            around: [Tally::default(); 2],
        }
    }
}

/// Which layer of a chunk a unit was.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Unit {
    /// The layer, among all of the model's.
    pub layer: u32,
    /// What its time is divided by: experts that were chosen and not in device memory, and what the layer does anyway as if it were such ones.
    pub parts: f64,
}

/// What a reading said.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Reading {
    /// Which layer it was, unless it was a token.
    pub unit: Option<Unit>,
    /// How the unit was done.
    pub arm: Arm,
    /// With how much of a share.
    pub amount: f64,
    /// What it took.
    pub ms: f64,
    /// What each of its experts took; of a token, the same.
    pub each_ms: f64,
    /// Its time over that of the unit before it, or the reverse: below 1 if the host's share, or the changed amount, was faster. `None`:
    /// the two are not compared.
    pub ratio: Option<f64>,
    /// What is known after it.
    pub verdict: Option<Verdict>,
}

/// A unit that another can be compared with.
#[derive(Debug, Clone, Copy)]
struct Done {
    arm: Arm,
    layer: Option<u32>,
    each_ms: f64,
}

/// Why a unit is done as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Explore,
    Usual,
    Probe,
    Amount,
}

/// The state machine.
#[derive(Debug, Clone)]
pub struct Gate {
    constants: Constants,
    amount: f64,
    step: f64,
    /// The unit before, unless its reading was skipped or it was of another chunk.
    before: Option<Done>,
    /// Whether the next unit is the first of a chunk.
    is_first: bool,
    /// What layers differ by.
    steps: Steps,
    /// Of the share to no share.
    pairs: Pairs,
    /// Of more and of less of the share to the amount.
    around: [Tally; 2],
    /// Whether the share is worth having, once that is known.
    shares: Option<bool>,
    /// Units since the last probe, or since the decision.
    units: u32,
    /// Units since the last look at more, and at less of the share.
    amount_units: [u32; 2],
    /// Which interval, and probes in a row that agreed.
    interval: usize,
    agreed: u32,
    /// Whether nothing has confirmed yet what was found another time.
    is_recalled: bool,
}

impl Gate {
    /// A gate that knows nothing yet, for a share of `amount`, which was planned; `step` is the least change of it that matters.
    pub fn new(amount: f64, step: f64) -> Self {
        Self::with_constants(amount, step, Constants::CHOSEN)
    }

    /// The same for generated tokens.
    pub fn of_tokens(amount: f64, step: f64) -> Self {
        Self::with_constants(amount, step, Constants::OF_TOKENS)
    }

    /// One that goes by other numbers.
    pub fn with_constants(amount: f64, step: f64, constants: Constants) -> Self {
        let step = if step.is_finite() {
            step.clamp(0.01, 1.0)
        } else {
            1.0
        };
        Self {
            constants,
            amount: within(amount, step),
            step,
            before: None,
            is_first: false,
            steps: Steps::default(),
            pairs: Pairs::new(),
            around: [Tally::default(); 2],
            shares: None,
            units: 0,
            amount_units: [0; 2],
            interval: 0,
            agreed: 0,
            is_recalled: false,
        }
    }

    /// The same for layers of a model that has so many.
    #[must_use]
    pub fn of_layers(mut self, n: usize) -> Self {
        self.steps = Steps::of_layers(n);
        self
    }

    /// The same for one that was here before: it begins with what was found then, and looks soon whether it still holds.
    #[must_use]
    pub fn recall(mut self, finding: &Finding) -> Self {
        self.amount = within(finding.verdict.amount, self.step);
        self.shares = Some(finding.verdict.shares);
        self.pairs = Pairs::from_ratios(&finding.ratios);
        self.around = finding.around.map(Tally::checked);
        self.is_recalled = true;
        self
    }

    /// What is known so far.
    pub fn verdict(&self) -> Option<Verdict> {
        self.shares.map(|shares| Verdict {
            shares,
            amount: self.amount,
        })
    }

    /// What is known so far, and what it rests on.
    pub fn finding(&self) -> Option<Finding> {
        self.verdict().map(|verdict| Finding {
            verdict,
            ratios: self.pairs.ratios(&self.steps),
            around: self.around,
        })
    }

    /// Tells that the layers of another chunk follow: nothing is compared with those before, and the first is not read, for it pays for
    /// more than the others.
    pub fn begin_chunk(&mut self) {
        self.before = None;
        self.is_first = true;
    }

    /// How the next unit is to be done.
    pub fn arm(&self) -> Arm {
        self.next().1
    }

    /// The host's part in the next unit, 0 to 1.
    pub fn share(&self) -> f64 {
        self.amount_of(self.arm())
    }

    /// Whether the host may have a part in one of the next `units` units: who computes it is to be awake then.
    pub fn may_share_within(&self, units: u32) -> bool {
        // Where it has none otherwise, it has one in probes.
        self.shares != Some(false) || self.units.saturating_add(units) >= self.interval()
    }

    /// Tells what the unit took that [`arm`](Self::arm) was for, a token.
    pub fn read(&mut self, ms: f64) -> Reading {
        self.take(None, ms)
    }

    /// Tells what the unit took that [`arm`](Self::arm) was for, a layer of a chunk. One that misses no expert is no unit.
    pub fn read_layer(&mut self, unit: Unit, ms: f64) -> Reading {
        self.take(Some(unit), ms)
    }

    /// Tells that the unit's time says nothing: it paid for something that the others do not.
    pub fn skip(&mut self) {
        self.count(self.next().0, false);
        self.before = None;
        self.is_first = false;
    }

    fn take(&mut self, unit: Option<Unit>, ms: f64) -> Reading {
        let (purpose, arm) = self.next();
        let amount = self.amount_of(arm);
        let each_ms = unit.map_or(ms, |unit| ms / unit.parts.max(1.0));
        let mut ratio = None;
        if self.is_first {
            self.skip();
        } else {
            let layer = unit.map(|unit| unit.layer);
            let done = Done {
                arm,
                layer,
                each_ms,
            };
            ratio = self.compare(purpose, done);
            self.before = Some(done);
        }
        Reading {
            unit,
            arm,
            amount,
            ms,
            each_ms,
            ratio,
            verdict: self.verdict(),
        }
    }

    /// Compares a unit with the one before it, and draws conclusions.
    fn compare(&mut self, purpose: Purpose, done: Done) -> Option<f64> {
        let pair = self.before.and_then(|before| pair(before, done));
        // What follows a probe is not compared with it: a probe gives one ratio.
        let pair = pair.filter(|_| purpose != Purpose::Usual);
        self.count(purpose, pair.is_some());
        let Some(pair) = pair else {
            self.learn(done);
            return None;
        };
        let ratio = pair.corrected(&self.steps);
        match purpose {
            Purpose::Amount => self.weigh_amount(done.arm, ratio),
            Purpose::Probe => self.weigh_probe(pair, ratio),
            Purpose::Explore | Purpose::Usual => self.pairs.push(pair, self.kept()),
        }
        self.decide();
        Some(ratio)
    }

    /// Notes what two layers differ by that were done the same way.
    fn learn(&mut self, done: Done) {
        let Some(before) = self.before.filter(|before| before.arm == done.arm) else {
            return;
        };
        if let (Layers::Corrected, Some(from), Some(to)) =
            (self.constants.layers, before.layer, done.layer)
        {
            self.steps.learn(from, to, done.each_ms / before.each_ms);
            // Ratios of these layers say something else now.
            self.decide();
        }
    }

    /// Ratios to keep.
    fn kept(&self) -> usize {
        self.constants
            .ratios_settled
            .max(self.constants.ratios_most)
    }

    fn amount_of(&self, arm: Arm) -> f64 {
        match arm {
            Arm::Alone => 0.0,
            Arm::Shared => self.amount,
            Arm::More => (self.amount + self.step).min(1.0),
            Arm::Less => (self.amount - self.step).max(self.step),
        }
    }

    fn next(&self) -> (Purpose, Arm) {
        let Some(shares) = self.shares else {
            // Turns, the first without.
            let arm = [Arm::Alone, Arm::Shared][self.units as usize % 2];
            return (Purpose::Explore, arm);
        };
        let (usual, other) = if shares {
            (Arm::Shared, Arm::Alone)
        } else {
            (Arm::Alone, Arm::Shared)
        };
        // Only a unit that follows one done as usual can be compared.
        if self.before.is_none_or(|before| before.arm != usual) {
            return (Purpose::Usual, usual);
        }
        if self.units + 1 >= self.interval() {
            return (Purpose::Probe, other);
        }
        match self.due_amount() {
            Some(arm) if shares => (Purpose::Amount, arm),
            _ => (Purpose::Usual, usual),
        }
    }

    fn interval(&self) -> u32 {
        if self.is_recalled {
            1
        } else {
            self.constants.intervals[self.interval]
        }
    }

    /// Which other amount is due to be looked at: more and less have turns of their own.
    fn due_amount(&self) -> Option<Arm> {
        let exists = [self.amount < 1.0, self.amount > self.step];
        let late = |way: usize| {
            let search = self.around[way].search(self.constants.amount_looks);
            let interval = self.constants.amount_intervals[search as usize];
            let units = self.amount_units[way] + 1;
            (exists[way] && units >= interval).then_some(units)
        };
        match [late(0), late(1)] {
            [None, None] => None,
            [more, less] if more >= less => Some(Arm::More),
            _ => Some(Arm::Less),
        }
    }

    /// Counts a unit. A probe without a ratio is still owed.
    fn count(&mut self, purpose: Purpose, has_ratio: bool) {
        self.units = self.units.saturating_add(1);
        self.amount_units = self.amount_units.map(|units| units.saturating_add(1));
        if purpose == Purpose::Probe && has_ratio {
            self.units = 0;
        }
    }

    fn weigh_probe(&mut self, pair: Pair, ratio: f64) {
        self.pairs.push(pair, self.kept());
        let agrees = Some(ratio < 1.0) == self.shares;
        self.space(agrees);
        self.is_recalled &= !agrees;
    }

    /// Looks at the ratios.
    fn decide(&mut self) {
        let found = self
            .pairs
            .is_better(&self.steps, self.shares, &self.constants);
        if let Some(shares) = found.filter(|&found| Some(found) != self.shares) {
            self.shares = Some(shares);
            self.units = 0;
            self.amount_units = [0; 2];
            self.is_recalled = false;
            self.around = [Tally::default(); 2];
        }
    }

    fn weigh_amount(&mut self, arm: Arm, ratio: f64) {
        let amount = self.amount_of(arm);
        let way = usize::from(arm == Arm::Less);
        self.amount_units[way] = 0;
        let tally = &mut self.around[way];
        tally.take(ratio);
        if tally.is_better() {
            self.amount = amount;
            self.around = [Tally::default(); 2];
        }
    }

    /// Spaces probes out while they say nothing new.
    fn space(&mut self, agrees: bool) {
        if !agrees {
            (self.interval, self.agreed) = (0, 0);
            return;
        }
        self.agreed += 1;
        if self.agreed == self.constants.agreeing {
            self.agreed = 0;
            self.interval = (self.interval + 1).min(self.constants.intervals.len() - 1);
        }
    }
}

/// Two units in a row, if they were done differently.
fn pair(before: Done, done: Done) -> Option<Pair> {
    let changed = match (before.arm, done.arm) {
        (Arm::Shared, Arm::Alone) => Changed::First,
        (Arm::Alone, Arm::Shared) | (Arm::Shared, Arm::More | Arm::Less) => Changed::Second,
        _ => return None,
    };
    let ratio = match changed {
        Changed::First => before.each_ms / done.each_ms,
        Changed::Second => done.each_ms / before.each_ms,
    };
    let layers = before.layer.zip(done.layer);
    Some(Pair {
        ratio,
        layers,
        changed,
    })
}

fn within(amount: f64, step: f64) -> f64 {
    if amount.is_finite() {
        amount.clamp(step.min(1.0), 1.0)
    } else {
        1.0
    }
}
