//! How far one run's answers lie from another's.

use serde::Serialize;

use super::{EvalError, Position};

/// The reference's first choice counts only where its logit leads the second by more than this: closer than that, two
/// correct programs may differ.
pub const MARGIN_MIN: f32 = 0.1;

/// Least probability of "any other token". The lists are rounded to five digits, so their sum may exceed one.
const REST_MIN: f64 = 1e-9;

/// KL divergence of `other` from `reference` in nats, over the reference's listed tokens that the other lists too; all
/// other tokens count as one.
pub fn kl_nats(reference: &Position, other: &Position) -> f64 {
    let probability = |p: &Position, logit: f32| (f64::from(logit) - p.logsumexp).exp();
    let (mut kl, mut rest_p, mut rest_q) = (0.0, 1.0, 1.0);
    for &(id, logit) in &reference.top {
        let Some(&(_, other_logit)) = other.top.iter().find(|(i, _)| *i == id) else {
            continue;
        };
        let (p, q) = (
            probability(reference, logit),
            probability(other, other_logit),
        );
        // The quotient from the logits themselves: exact where q would underflow.
        let log_quotient =
            (f64::from(logit) - reference.logsumexp) - (f64::from(other_logit) - other.logsumexp);
        kl += p * log_quotient;
        rest_p -= p;
        rest_q -= q;
    }
    let (rest_p, rest_q) = (rest_p.max(REST_MIN), rest_q.max(REST_MIN));
    kl + rest_p * (rest_p / rest_q).ln()
}

/// Collects the comparison of two runs position by position.
#[derive(Debug, Clone, Default)]
pub struct Divergence {
    kl: Vec<f64>,
    clear: usize,
    agreed: usize,
}

/// Mean and spread of the KL divergence, in nats.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct KlSummary {
    /// Positions compared.
    pub positions: usize,
    /// Mean over all positions.
    pub mean: f64,
    /// Half of the positions lie below.
    pub median: f64,
    /// 90 of 100 positions lie below.
    pub p90: f64,
    /// 99 of 100 positions lie below.
    pub p99: f64,
    /// The worst position.
    pub max: f64,
}

/// How often both runs have the same first choice.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Top1 {
    /// Positions where the reference's first choice is clear.
    pub clear: usize,
    /// Those among them where the other run agrees.
    pub agreed: usize,
    /// The quotient; 1 where no position is clear.
    pub share: f64,
}

impl KlSummary {
    /// Of the divergences at some positions; `None` of none.
    pub(super) fn of(kl_nats: &[f64]) -> Option<Self> {
        let mut sorted = kl_nats.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        Some(Self {
            positions: sorted.len(),
            max: *sorted.last()?,
            mean: sorted.iter().sum::<f64>() / sorted.len() as f64,
            median: quantile(&sorted, 0.5),
            p90: quantile(&sorted, 0.9),
            p99: quantile(&sorted, 0.99),
        })
    }
}

impl Divergence {
    /// Takes the next position of both runs.
    pub fn add(&mut self, reference: &Position, other: &Position) -> Result<(), EvalError> {
        let place = |p: &Position| (p.text, p.pos, p.token);
        if place(reference) != place(other) {
            let show =
                |p: &Position| format!("text {}, position {}, token {}", p.text, p.pos, p.token);
            let why = format!("{} against {}", show(reference), show(other));
            return Err(EvalError::Mismatch {
                line: self.kl.len() + 1,
                why,
            });
        }
        self.kl.push(kl_nats(reference, other));
        let margin = match reference.top[..] {
            [(_, first), (_, second), ..] => first - second,
            _ => f32::INFINITY,
        };
        if margin > MARGIN_MIN {
            self.clear += 1;
            self.agreed += usize::from(reference.top[0].0 == other.top[0].0);
        }
        Ok(())
    }

    /// Mean and spread; `None` before the first position.
    pub fn kl(&self) -> Option<KlSummary> {
        KlSummary::of(&self.kl)
    }

    /// Agreement of the first choices.
    pub fn top1(&self) -> Top1 {
        let share = if self.clear == 0 {
            1.0
        } else {
            self.agreed as f64 / self.clear as f64
        };
        Top1 {
            clear: self.clear,
            agreed: self.agreed,
            share,
        }
    }
}

/// The `q` quantile of sorted values, between the two nearest ranks.
pub(super) fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = q * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn position(logits: &[f32], n_top: usize) -> Position {
        Position::new(0, 0, 0, logits, n_top).unwrap()
    }

    fn full_kl(a: &[f32], b: &[f32]) -> f64 {
        let (la, lb) = (super::super::log_sum_exp(a), super::super::log_sum_exp(b));
        let terms = a.iter().zip(b).map(|(&x, &y)| {
            let (p, q) = (f64::from(x) - la, f64::from(y) - lb);
            p.exp() * (p - q)
        });
        terms.sum()
    }

    #[test]
    fn with_everything_listed_it_is_the_textbook_sum() {
        let a = [1.0, 0.5, -1.0, 2.0];
        let b = [0.8, 0.7, -1.5, 2.1];
        let got = kl_nats(&position(&a, 4), &position(&b, 4));
        assert!((got - full_kl(&a, &b)).abs() < 1e-7, "{got}");
        assert!(kl_nats(&position(&a, 4), &position(&a, 4)).abs() < 1e-12);
    }

    #[test]
    fn tokens_that_are_not_listed_by_both_count_as_one() {
        let a = [3.0, 2.0, 1.0, 0.0, -1.0];
        let b = [3.1, 0.5, 1.2, 2.0, -0.5];
        // a lists 0, 1, 2; b lists 0, 3, 2: tokens 0 and 2 are common, the rest is one.
        let lumped = |x: &[f32]| {
            let all = super::super::log_sum_exp(x);
            let p = |i: usize| (f64::from(x[i]) - all).exp();
            [p(0), p(2), p(1) + p(3) + p(4)]
        };
        let expected: f64 = lumped(&a)
            .iter()
            .zip(lumped(&b))
            .map(|(p, q)| p * (p / q).ln())
            .sum();
        let got = kl_nats(&position(&a, 3), &position(&b, 3));
        assert!((got - expected).abs() < 1e-7, "{got} {expected}");
        assert!(
            got <= full_kl(&a, &b),
            "a coarser partition cannot be farther"
        );
    }

    #[test]
    fn only_clear_choices_count() {
        let mut d = Divergence::default();
        d.add(&position(&[1.0, 0.95], 2), &position(&[0.0, 1.0], 2))
            .unwrap();
        assert_eq!(
            d.top1(),
            Top1 {
                clear: 0,
                agreed: 0,
                share: 1.0
            }
        );
        d.add(&position(&[1.0, 0.5], 2), &position(&[1.0, 0.0], 2))
            .unwrap();
        d.add(&position(&[1.0, 0.5], 2), &position(&[0.0, 1.0], 2))
            .unwrap();
        assert_eq!(
            d.top1(),
            Top1 {
                clear: 2,
                agreed: 1,
                share: 0.5
            }
        );
        let kl = d.kl().unwrap();
        assert_eq!(kl.positions, 3);
        assert!(kl.median <= kl.p90 && kl.p90 <= kl.p99 && kl.p99 <= kl.max);
        assert_eq!(quantile(&[0.0, 1.0, 2.0, 4.0], 0.5), 1.5);
        assert!(Divergence::default().kl().is_none());
    }

    #[test]
    fn runs_of_different_texts_are_refused() {
        let a = position(&[1.0, 0.5], 2);
        let b = Position {
            token: 1,
            ..a.clone()
        };
        assert!(matches!(
            Divergence::default().add(&a, &b),
            Err(EvalError::Mismatch { line: 1, .. })
        ));
    }
}
