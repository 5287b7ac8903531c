//! The gate: whether the host's share of some work is worth having, and how large, from what units of the work take.
//!
//! A *unit* is what is timed: a generated token where cells lie in host memory, a layer of a prompt's chunk where experts do. Units differ too
//! much to be averaged by kind, so a unit is compared only with the one before it, done the other way: their ratio is what counts.
//!
//! ```text
//! explore   units without and with the share take turns, until there are three ratios
//! decide    share while the median of the last five ratios, at least three, is below 1
//! climb     a share that has just won is compared with a bit more and a bit less of it, three times each, and moves to the better one, until
//!           neither is better
//! probe     every 29th unit is done the other way, or with a bit more or less of a share that wins; the interval grows to 59 and 113
//!           while probes agree, and falls back to 29 when one does not
//! ```
//!
//! A state machine without a clock: it is asked how the next unit is to be done, and told what that took.

use std::collections::VecDeque;

/// Ratios that a decision is made from, at least and at most.
const RATIOS: (usize, usize) = (3, 5);

/// Units from one probe to the next, while probes agree. Prime, so that they wander over the layers of a model.
const INTERVALS: [u32; 3] = [29, 59, 113];

/// Probes in a row that must agree before they become fewer.
const AGREEING: u32 = 3;

/// Changes of the amount until the search for the best one ends in any case.
const MOVES_MAX: u32 = 16;

/// A changed amount is better if its ratio is below this: what is gained by less is noise.
const BETTER: f64 = 0.995;

/// How a unit is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
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

/// The ways that an amount can be changed.
const AROUND: [Arm; 2] = [Arm::More, Arm::Less];

/// What has been found out.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Verdict {
    /// Whether the share is worth having.
    pub shares: bool,
    /// The best amount known, above 0 up to 1.
    pub amount: f64,
}

/// What a reading said.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Reading {
    /// How the unit was done.
    pub arm: Arm,
    /// With how much of a share.
    pub amount: f64,
    /// What it took.
    pub ms: f64,
    /// Its time over that of the unit before it, or the reverse: below 1 if the host's share, or the changed amount, was faster. `None`:
    /// the two are not compared.
    pub ratio: Option<f64>,
    /// What is known after it.
    pub verdict: Option<Verdict>,
}

/// The state machine.
#[derive(Debug, Clone)]
pub struct Gate {
    amount: f64,
    step: f64,
    /// The unit before, unless its reading was to be skipped.
    before: Option<(Arm, f64)>,
    /// Of the share to no share.
    ratios: VecDeque<f64>,
    /// Of more and of less of the share to the amount.
    around: [VecDeque<f64>; 2],
    /// Whether the share is worth having, once that is known.
    shares: Option<bool>,
    /// Units since the last probe, or since the beginning.
    units: u32,
    /// What the next probe is.
    turn: u32,
    /// Which interval, and probes in a row that agreed.
    interval: usize,
    agreed: u32,
    /// Changes of the amount that the search may still make; 0: it is over.
    moves_left: u32,
    /// The way of the last change, which the search goes on with: the other one leads back.
    way: Option<usize>,
    /// Units until the first probe of a verdict from another time, which nothing here has confirmed yet.
    recalled: bool,
}

impl Gate {
    /// A gate that knows nothing yet, for a share of `amount`, which was planned; `step` is the least change of it that matters.
    pub fn new(amount: f64, step: f64) -> Self {
        let step = if step.is_finite() {
            step.clamp(0.01, 1.0)
        } else {
            1.0
        };
        Self {
            amount: within(amount, step),
            step,
            before: None,
            ratios: VecDeque::with_capacity(RATIOS.1),
            around: [VecDeque::new(), VecDeque::new()],
            shares: None,
            units: 0,
            turn: 0,
            interval: 0,
            agreed: 0,
            moves_left: 0,
            way: None,
            recalled: false,
        }
    }

    /// A gate that was here before: it begins with that verdict, and looks with its second unit whether it still holds.
    pub fn recalling(verdict: Verdict, step: f64) -> Self {
        Self {
            shares: Some(verdict.shares),
            recalled: true,
            ..Self::new(verdict.amount, step)
        }
    }

    /// What is known so far.
    pub fn verdict(&self) -> Option<Verdict> {
        self.shares.map(|shares| Verdict {
            shares,
            amount: self.amount,
        })
    }

    /// How the next unit is to be done.
    pub fn arm(&self) -> Arm {
        let usual = match self.shares {
            Some(true) => Arm::Shared,
            _ => Arm::Alone,
        };
        let Some(shares) = self.shares else {
            // Turns, the first without.
            return match self.units % 2 {
                0 => Arm::Alone,
                _ => Arm::Shared,
            };
        };
        if let Some(way) = self.climbs() {
            return AROUND[way];
        }
        if !self.probes() {
            return usual;
        }
        match (shares, self.turn % 4) {
            (false, _) => Arm::Shared,
            (true, 1) if self.can_move(0) => Arm::More,
            (true, 3) if self.can_move(1) => Arm::Less,
            (true, _) => Arm::Alone,
        }
    }

    /// The host's part in the next unit, 0 to 1.
    pub fn share(&self) -> f64 {
        self.amount_of(self.arm())
    }

    /// Tells what the unit took that [`arm`](Self::arm) was for.
    pub fn read(&mut self, ms: f64) -> Reading {
        let arm = self.arm();
        let amount = self.amount_of(arm);
        let climbs = self.climbs();
        let is_probe = climbs.is_none() && self.shares.is_some() && self.probes();
        let pair = self.before.map(|(before, before_ms)| match (before, arm) {
            (Arm::Alone, Arm::Shared) => Some(ms / before_ms),
            (Arm::Shared, Arm::Alone) => Some(before_ms / ms),
            (Arm::Shared, Arm::More | Arm::Less) => Some(ms / before_ms),
            _ => None,
        });
        // What follows a probe is not compared with it: a probe gives one ratio.
        let ratio = pair
            .flatten()
            .filter(|_| is_probe || climbs.is_some() || self.shares.is_none());
        self.count(is_probe, ratio.is_some());
        self.before = Some((arm, ms));
        if let (Some(ratio), Some(way)) = (ratio, climbs) {
            self.climb(way, ratio);
        } else if let Some(ratio) = ratio {
            match arm {
                Arm::Alone | Arm::Shared => self.weigh(ratio, is_probe),
                Arm::More => self.weigh_amount(0, ratio),
                Arm::Less => self.weigh_amount(1, ratio),
            }
        }
        Reading {
            arm,
            amount,
            ms,
            ratio,
            verdict: self.verdict(),
        }
    }

    /// Tells that the unit's time says nothing: it paid for something that the others do not.
    pub fn skip(&mut self) {
        self.count(false, false);
        self.before = None;
    }

    fn amount_of(&self, arm: Arm) -> f64 {
        match arm {
            Arm::Alone => 0.0,
            Arm::Shared => self.amount,
            Arm::More => (self.amount + self.step).min(1.0),
            Arm::Less => (self.amount - self.step).max(self.step),
        }
    }

    fn can_move(&self, way: usize) -> bool {
        if way == 0 {
            self.amount < 1.0
        } else {
            self.amount > self.step
        }
    }

    /// The way that the search looks next, if it is on and the unit before was done as usual: where fewer ratios are in.
    fn climbs(&self) -> Option<usize> {
        if self.moves_left == 0 || !matches!(self.before, Some((Arm::Shared, _))) {
            return None;
        }
        self.ways().min_by_key(|&way| self.around[way].len())
    }

    fn ways(&self) -> impl Iterator<Item = usize> {
        (0..2).filter(|&way| self.can_move(way) && self.way.is_none_or(|only| only == way))
    }

    /// A ratio of the search.
    fn climb(&mut self, way: usize, ratio: f64) {
        push(&mut self.around[way], ratio, RATIOS.0);
        if self.ways().any(|way| self.around[way].len() < RATIOS.0) {
            return;
        }
        let median = |way: usize| median(&self.around[way]);
        let better = self.ways().filter(|&way| median(way) < BETTER);
        let best = better.min_by(|&a, &b| median(a).total_cmp(&median(b)));
        match best {
            Some(way) => {
                self.amount = self.amount_of(AROUND[way]);
                self.way = Some(way);
                self.moves_left -= 1;
                if self.ways().next().is_none() {
                    self.moves_left = 0;
                }
            }
            None => self.moves_left = 0,
        }
        self.around.iter_mut().for_each(VecDeque::clear);
        self.units = 0;
    }

    /// Whether the next unit is a probe: it follows one done as usual, which it can be compared with.
    fn probes(&self) -> bool {
        let due = if self.recalled {
            1
        } else {
            INTERVALS[self.interval] - 1
        };
        self.units >= due && self.before.is_some()
    }

    /// Counts a unit. A probe without a ratio is still owed.
    fn count(&mut self, is_probe: bool, has_ratio: bool) {
        if is_probe && has_ratio {
            self.units = 0;
            self.turn = self.turn.wrapping_add(1);
        } else {
            self.units = self.units.saturating_add(1);
        }
    }

    fn weigh(&mut self, ratio: f64, is_probe: bool) {
        if is_probe && self.recalled {
            self.recalled = false;
            if Some(ratio < 1.0) != self.shares {
                // It no longer measures true: begin anew.
                *self = Self::new(self.amount, self.step);
                return;
            }
        }
        push(&mut self.ratios, ratio, RATIOS.1);
        if self.ratios.len() < RATIOS.0 {
            return;
        }
        let shares = median(&self.ratios) < 1.0;
        if is_probe {
            self.space(Some(ratio < 1.0) == self.shares && Some(shares) == self.shares);
        }
        if self.shares != Some(shares) {
            self.shares = Some(shares);
            self.units = 0;
            self.around.iter_mut().for_each(VecDeque::clear);
            self.way = None;
            let moves = shares && self.ways().next().is_some();
            self.moves_left = if moves { MOVES_MAX } else { 0 };
        }
    }

    fn weigh_amount(&mut self, way: usize, ratio: f64) {
        let amount = self.amount_of(AROUND[way]);
        let ratios = &mut self.around[way];
        push(ratios, ratio, RATIOS.0);
        let is_better = ratios.len() == RATIOS.0 && median(ratios) < 1.0;
        self.space(ratio >= 1.0);
        if is_better {
            self.amount = amount;
            self.around.iter_mut().for_each(VecDeque::clear);
        }
    }

    /// Spaces probes out while they say nothing new.
    fn space(&mut self, agrees: bool) {
        if !agrees {
            (self.interval, self.agreed) = (0, 0);
            return;
        }
        self.agreed += 1;
        if self.agreed == AGREEING {
            self.agreed = 0;
            self.interval = (self.interval + 1).min(INTERVALS.len() - 1);
        }
    }
}

fn within(amount: f64, step: f64) -> f64 {
    if amount.is_finite() {
        amount.clamp(step.min(1.0), 1.0)
    } else {
        1.0
    }
}

fn push(ratios: &mut VecDeque<f64>, ratio: f64, most: usize) {
    if ratios.len() == most {
        ratios.pop_front();
    }
    ratios.push_back(ratio);
}

/// NaN if more than half of them are.
fn median(ratios: &VecDeque<f64>) -> f64 {
    let mut sorted: Vec<f64> = ratios.iter().copied().collect();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
    f64::midpoint(low, high)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Runs units that take what `ms` says of a share, and returns what all of them took.
    fn run(gate: &mut Gate, units: usize, mut ms: impl FnMut(usize, f64) -> f64) -> f64 {
        (0..units)
            .map(|i| {
                let took = ms(i, gate.share());
                gate.read(took);
                took
            })
            .sum()
    }

    /// What a token takes whose tail is divided: both sides at once, the slower one counts.
    fn divided(share: f64, best: f64) -> f64 {
        10.0 + 20.0 * (share / best).max((1.0 - share) / (1.0 - best))
    }

    #[test]
    fn four_units_give_three_ratios_and_a_decision() {
        for (with, shares) in [(9.0, true), (11.0, false), (10.0, false), (f64::NAN, false)] {
            let mut gate = Gate::new(0.5, 0.1);
            let arms: Vec<Arm> = (0..4)
                .map(|_| {
                    let arm = gate.arm();
                    gate.read(if arm == Arm::Alone { 10.0 } else { with });
                    arm
                })
                .collect();
            assert_eq!(arms, [Arm::Alone, Arm::Shared, Arm::Alone, Arm::Shared]);
            let verdict = gate.verdict().expect("three ratios are in");
            assert_eq!(verdict.shares, shares, "{with}");
        }
    }

    #[test]
    fn units_that_were_skipped_are_compared_with_nothing() {
        let mut gate = Gate::new(0.5, 0.1);
        gate.read(10.0);
        gate.skip();
        let reading = gate.read(100.0);
        assert_eq!((reading.arm, reading.ratio), (Arm::Alone, None));
        assert_eq!(gate.read(90.0).ratio, Some(0.9));
    }

    #[test]
    fn units_of_different_cost_do_not_mislead_it() {
        // Costs differ 8 times from unit to unit in a slow wave, the share wins by a tenth.
        let mut gate = Gate::new(1.0, 1.0);
        let wave = |i: usize| 1.0 + 7.0 * ((i as f64 / 40.0).sin() * 0.5 + 0.5);
        run(&mut gate, 200, |i, share| {
            wave(i) * if share > 0.0 { 0.9 } else { 1.0 }
        });
        assert_eq!(gate.verdict().map(|v| v.shares), Some(true));
    }

    #[test]
    fn an_arm_that_loses_costs_less_than_a_hundredth() {
        for loses in [0.8, 1.25] {
            let mut gate = Gate::new(1.0, 1.0);
            let cost = |_: usize, share: f64| if share > 0.0 { loses } else { 1.0 };
            run(&mut gate, 1000, cost);
            let best = f64::min(loses, 1.0) * 10_000.0;
            let took = run(&mut gate, 10_000, cost);
            assert!(took < best * 1.01, "{took} instead of {best}");
        }
    }

    #[test]
    fn it_notices_when_the_other_arm_becomes_the_better_one() {
        let mut gate = Gate::new(1.0, 1.0);
        run(
            &mut gate,
            2000,
            |_, share| if share > 0.0 { 0.9 } else { 1.0 },
        );
        assert_eq!(gate.verdict().map(|v| v.shares), Some(true));
        run(
            &mut gate,
            1000,
            |_, share| if share > 0.0 { 1.1 } else { 1.0 },
        );
        assert_eq!(gate.verdict().map(|v| v.shares), Some(false));
    }

    #[test]
    fn the_amount_moves_to_where_both_sides_end_together() {
        for (planned, best) in [(0.4, 0.3), (0.4, 0.6), (1.0, 0.8)] {
            let mut gate = Gate::new(planned, 0.05);
            run(&mut gate, 20_000, |_, share| divided(share, best));
            let found = gate.verdict().expect("it has decided");
            assert!(found.shares);
            assert!((found.amount - best).abs() < 0.051, "{best}: {found:?}");
        }
    }

    #[test]
    fn a_share_that_wins_is_soon_the_best_one() {
        for (planned, best) in [(0.5, 0.5), (0.4, 0.3), (0.3, 0.65), (0.7, 0.45)] {
            let mut gate = Gate::new(planned, 0.05);
            let mut seed = 7_u64;
            let mut noise = move || {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                1.0 + 0.01 * ((seed >> 40) as f64 / f64::from(1u32 << 24) - 0.5)
            };
            run(&mut gate, 120, |_, share| noise() * divided(share, best));
            let found = gate.verdict().expect("it has decided");
            let (got, least) = (divided(found.amount, best), divided(best, best));
            assert!(
                found.shares && got < 1.04 * least,
                "{planned}, {best}: {found:?}"
            );
        }
    }

    #[test]
    fn what_is_recalled_costs_one_probe() {
        let recalled = Verdict {
            shares: true,
            amount: 0.6,
        };
        let mut gate = Gate::recalling(recalled, 0.1);
        let alone = (0..25)
            .filter(|_| {
                let arm = gate.arm();
                gate.read(if arm == Arm::Alone { 10.0 } else { 8.0 });
                arm == Arm::Alone
            })
            .count();
        assert_eq!(alone, 1);
        assert_eq!(gate.verdict(), Some(recalled));
        // And is dropped if it no longer holds.
        let mut gate = Gate::recalling(recalled, 0.1);
        run(
            &mut gate,
            2,
            |_, share| if share > 0.0 { 10.0 } else { 8.0 },
        );
        assert_eq!(gate.verdict(), None);
    }

    proptest! {
        #[test]
        fn whatever_it_reads_it_goes_on(
            readings in prop::collection::vec(prop_oneof![
                8 => (0.0..1e3f64).prop_map(Some),
                1 => Just(Some(f64::NAN)),
                1 => Just(Some(f64::INFINITY)),
                1 => Just(None),
            ], 0..400),
            amount in prop::num::f64::ANY,
            step in prop::num::f64::ANY,
        ) {
            let mut gate = Gate::new(amount, step);
            for reading in readings {
                let share = gate.share();
                prop_assert!((0.0..=1.0).contains(&share));
                match reading {
                    Some(ms) => { gate.read(ms); }
                    None => gate.skip(),
                }
            }
        }

        #[test]
        fn noise_does_not_hide_a_tenth(seed in any::<u64>(), wins in any::<bool>()) {
            let mut gate = Gate::new(1.0, 1.0);
            let mut s = seed | 1;
            let mut noise = move || {
                s = s.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                1.0 + 0.02 * ((s >> 40) as f64 / f64::from(1u32 << 24) - 0.5)
            };
            let with = if wins { 0.9 } else { 1.1 };
            run(&mut gate, 400, |_, share| noise() * if share > 0.0 { with } else { 1.0 });
            prop_assert_eq!(gate.verdict().map(|v| v.shares), Some(wins));
        }
    }
}
