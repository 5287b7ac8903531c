//! The tokens that are still in play, and what cuts them down.
//!
//! Between stages they are in ascending order of id, so that every sum is taken in one order. Selections are partial:
//! of 262 thousand logits only those that may stay are ever sorted.

use std::cmp::Ordering;

/// A token in play.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) id: u32,
    pub(super) logit: f32,
    /// Its share of the probability, as of the last [`Candidates::softmax`].
    p: f64,
}

/// The likelier first, of equals the lower id.
fn likelier(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit
        .partial_cmp(&a.logit)
        .expect("no NaN among the candidates")
        .then(a.id.cmp(&b.id))
}

/// Tokens in play, in ascending order of id. Keeps its memory from draw to draw.
#[derive(Clone, Debug, Default)]
pub(super) struct Candidates {
    items: Vec<Candidate>,
    /// Surprises, for [`Candidates::keep_typical`].
    order: Vec<(f64, u32)>,
}

impl Candidates {
    /// The `k` likeliest, or all with `k` = 0; never tokens whose logit is minus infinity.
    pub(super) fn fill(&mut self, logits: &[f32], k: usize) {
        self.items.clear();
        let all = (0..)
            .zip(logits)
            .map(|(id, &logit)| Candidate { id, logit, p: 0.0 });
        if k == 0 || k >= logits.len() {
            self.items
                .extend(all.filter(|c| c.logit > f32::NEG_INFINITY));
            return;
        }
        // Those that come later lose a tie by their id, so a logit must exceed the k-th best so far.
        let room = (2 * k).max(512);
        let mut floor = f32::NEG_INFINITY;
        for candidate in all {
            if candidate.logit > floor {
                self.items.push(candidate);
                if self.items.len() == room {
                    floor = self.keep_best(k);
                }
            }
        }
        if self.items.len() > k {
            self.keep_best(k);
        }
        self.items.sort_unstable_by_key(|c| c.id);
    }

    /// Leaves the `k` likeliest in any order and returns the least of their logits.
    fn keep_best(&mut self, k: usize) -> f32 {
        let (_, last, _) = self.items.select_nth_unstable_by(k - 1, likelier);
        let floor = last.logit;
        self.items.truncate(k);
        floor
    }

    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    fn highest(&self) -> f32 {
        self.items
            .iter()
            .fold(f32::NEG_INFINITY, |highest, c| highest.max(c.logit))
    }

    fn softmax(&mut self) {
        let highest = f64::from(self.highest());
        let mut sum = 0.0;
        for c in &mut self.items {
            c.p = libm::exp(f64::from(c.logit) - highest);
            sum += c.p;
        }
        for c in &mut self.items {
            c.p /= sum;
        }
    }

    /// Keeps the tokens whose surprise (-ln p) is nearest to the expected surprise, until their probabilities reach `share`.
    pub(super) fn keep_typical(&mut self, share: f32) {
        self.softmax();
        let surprise = |p: f64| {
            if p > 0.0 {
                -libm::log(p)
            } else {
                f64::INFINITY
            }
        };
        let expected: f64 = self
            .items
            .iter()
            .filter(|c| c.p > 0.0)
            .map(|c| c.p * surprise(c.p))
            .sum();
        let distances = (0..)
            .zip(&self.items)
            .map(|(at, c)| ((surprise(c.p) - expected).abs(), at));
        self.order.clear();
        self.order.extend(distances);
        self.order
            .sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let mut sum = 0.0;
        let mut n = 0;
        for &(_, at) in &self.order {
            sum += self.items[at as usize].p;
            n += 1;
            if sum >= f64::from(share) {
                break;
            }
        }
        self.order.truncate(n);
        self.order.sort_unstable_by_key(|&(_, at)| at);
        for (to, &(_, from)) in self.order.iter().enumerate() {
            self.items[to] = self.items[from as usize];
        }
        self.items.truncate(n);
    }

    /// Keeps the likeliest tokens until their probabilities reach `share`.
    pub(super) fn keep_top_p(&mut self, share: f32) {
        self.softmax();
        // Sorts ever larger heads; most often the first is enough.
        let mut sorted = 0;
        let mut sum = 0.0;
        let mut n = 0;
        while n < self.items.len() {
            if n == sorted {
                let rest = &mut self.items[sorted..];
                let more = (4 * sorted).max(64).min(rest.len());
                if more < rest.len() {
                    rest.select_nth_unstable_by(more - 1, likelier);
                }
                rest[..more].sort_unstable_by(likelier);
                sorted += more;
            }
            sum += self.items[n].p;
            n += 1;
            if sum >= f64::from(share) {
                break;
            }
        }
        self.items.truncate(n);
        self.items.sort_unstable_by_key(|c| c.id);
    }

    /// Keeps the tokens that are at least `share` times as likely as the likeliest.
    pub(super) fn keep_min_p(&mut self, share: f32) {
        let highest = f64::from(self.highest());
        let share = f64::from(share);
        // Far below the bound the exact comparison is spared.
        let hopeless = libm::log(share) - 1e-3;
        self.items.retain(|c| {
            let distance = f64::from(c.logit) - highest;
            distance > hopeless && libm::exp(distance) >= share
        });
    }

    /// The token at `u` (0 to 1) of the cumulative probabilities, in order of id, after division by the temperature.
    pub(super) fn draw(&mut self, temperature: f32, u: f64) -> u32 {
        let highest = f64::from(self.highest());
        let temperature = f64::from(temperature);
        let mut sum = 0.0;
        for c in &mut self.items {
            c.p = libm::exp((f64::from(c.logit) - highest) / temperature);
            sum += c.p;
        }
        let target = u * sum;
        let mut cumulative = 0.0;
        let mut last = self.items[0].id;
        for c in self.items.iter().filter(|c| c.p > 0.0) {
            cumulative += c.p;
            last = c.id;
            if cumulative > target {
                break;
            }
        }
        last
    }

    /// What is left, likeliest first.
    pub(super) fn likeliest_first(mut self) -> impl Iterator<Item = Candidate> {
        self.items.sort_unstable_by(likelier);
        self.items.into_iter()
    }

    #[cfg(test)]
    pub(super) fn ids(&self) -> Vec<u32> {
        self.items.iter().map(|c| c.id).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn filled(logits: &[f32], k: usize) -> Candidates {
        let mut candidates = Candidates::default();
        candidates.fill(logits, k);
        candidates
    }

    /// All, likeliest first, with their probabilities.
    fn sorted(logits: &[f32]) -> Vec<(u32, f64)> {
        let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let weights: Vec<f64> = all
            .iter()
            .map(|c| libm::exp(f64::from(c.1) - f64::from(all[0].1)))
            .collect();
        let sum: f64 = weights.iter().sum();
        all.iter()
            .zip(weights)
            .map(|(c, w)| (c.0, w / sum))
            .collect()
    }

    fn ascending(mut ids: Vec<u32>) -> Vec<u32> {
        ids.sort_unstable();
        ids
    }

    /// Few different values, so that ties are common; many or few of them.
    fn logits() -> impl Strategy<Value = Vec<f32>> {
        let value = prop_oneof![(-8_i32..8).prop_map(|x| x as f32 / 2.0), -30.0_f32..10.0];
        prop_oneof![
            proptest::collection::vec(value.clone(), 1..40),
            proptest::collection::vec(value, 1500..2500)
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn top_k_is_the_head_of_the_sorted_list(logits in logits(), k in 1_usize..60) {
            let head = sorted(&logits).into_iter().take(k).map(|c| c.0).collect();
            prop_assert_eq!(filled(&logits, k).ids(), ascending(head));
        }

        #[test]
        fn top_p_is_the_shortest_head_that_reaches_it(logits in logits(), p in 0.0_f32..1.0) {
            let all = sorted(&logits);
            let mut sum = 0.0;
            let n = all.iter().take_while(|c| {
                let goes_on = sum < f64::from(p);
                sum += c.1;
                goes_on
            }).count().max(1);
            let mut candidates = filled(&logits, 0);
            candidates.keep_top_p(p);
            // The order of the sums differs, so a length may differ by one where a sum hits `p` almost exactly.
            let got = candidates.ids();
            prop_assert!(got.len().abs_diff(n) <= 1);
            prop_assert_eq!(ascending(all[..got.len()].iter().map(|c| c.0).collect()), got);
        }

        #[test]
        fn min_p_compares_with_the_likeliest(logits in logits(), p in 0.0_f32..1.0) {
            let all = sorted(&logits);
            let mut candidates = filled(&logits, 0);
            candidates.keep_min_p(p);
            let got = candidates.ids();
            for (id, probability) in &all {
                let ratio = probability / all[0].1;
                if (ratio - f64::from(p)).abs() > 1e-9 {
                    prop_assert_eq!(got.contains(id), ratio > f64::from(p), "{} {}", id, ratio);
                }
            }
        }

        #[test]
        fn typical_keeps_enough_and_no_stranger_token(logits in logits(), p in 0.05_f32..1.0) {
            let all = sorted(&logits);
            let expected: f64 = all.iter().map(|c| -c.1 * c.1.ln()).sum();
            let distance = |p: f64| (-p.ln() - expected).abs();
            let mut candidates = filled(&logits, 0);
            candidates.keep_typical(p);
            let got = candidates.ids();
            let (kept, gone): (Vec<_>, Vec<_>) = all.iter().copied().partition(|c: &(u32, f64)| got.binary_search(&c.0).is_ok());
            let sum: f64 = kept.iter().map(|c: &(u32, f64)| c.1).sum();
            prop_assert!(sum >= f64::from(p) - 1e-9 || gone.is_empty());
            let strangest = kept.iter().map(|c| distance(c.1)).fold(0.0, f64::max);
            prop_assert!(gone.iter().all(|c| distance(c.1) >= strangest - 1e-9));
            prop_assert!(sum - kept.iter().map(|c| c.1).fold(0.0, f64::max) < f64::from(p) + 1e-9);
        }
    }

    #[test]
    fn forbidden_tokens_are_no_candidates() {
        let logits = [f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY, 0.0];
        assert_eq!(filled(&logits, 0).ids(), [1, 3]);
        assert_eq!(filled(&logits, 3).ids(), [1, 3]);
        assert!(filled(&logits[..1], 0).is_empty());
    }

    #[test]
    fn draws_walk_the_probabilities_in_order_of_id() {
        // Weights 1, 3, 0 (too small for f64), 4.
        let logits = [0.0, 3.0_f32.ln(), -1e9, 4.0_f32.ln()];
        for (u, id) in [
            (0.0, 0),
            (0.124, 0),
            (0.126, 1),
            (0.499, 1),
            (0.501, 3),
            (1.0 - 1e-16, 3),
        ] {
            assert_eq!(filled(&logits, 0).draw(1.0, u), id, "{u}");
        }
        assert_eq!(filled(&logits, 0).draw(1e-30, 0.9999), 3);
        // Weights 1, 9, 0, 16 at half the temperature.
        assert_eq!(filled(&logits, 0).draw(0.5, 9.9 / 26.0), 1);
        assert_eq!(filled(&logits, 0).draw(0.5, 10.1 / 26.0), 3);
    }
}
