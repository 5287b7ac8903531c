//! Random numbers that are the same everywhere: a replay is repeated by its seed.

/// SplitMix64.
#[derive(Debug, Clone)]
pub(super) struct Random(u64);

impl Random {
    /// A sequence of its own for each seed and number.
    pub(super) fn new(seed: u64, number: u64) -> Self {
        let mut random = Self(seed ^ number.wrapping_mul(0xD1B5_4A32_D192_ED03));
        random.next();
        random
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// From 0 up to 1.
    pub(super) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(super) fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        ((self.unit() * n as f64) as usize).min(n.saturating_sub(1))
    }

    /// Around 0, with a standard deviation of 1.
    pub(super) fn normal(&mut self) -> f64 {
        let (r, angle) = (1.0 - self.unit(), std::f64::consts::TAU * self.unit());
        (-2.0 * r.ln()).sqrt() * angle.cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_spread_as_they_should_be() {
        let mut random = Random::new(1, 2);
        let n = 20_000;
        let normal: Vec<f64> = (0..n).map(|_| random.normal()).collect();
        let mean = normal.iter().sum::<f64>() / f64::from(n);
        let variance = normal.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / f64::from(n);
        assert!(mean.abs() < 0.03, "{mean}");
        assert!((variance - 1.0).abs() < 0.05, "{variance}");
        let unit: f64 = (0..n).map(|_| random.unit()).sum();
        assert!((unit / f64::from(n) - 0.5).abs() < 0.01);
        assert!((0..n).all(|_| random.below(3) < 3));
        assert_ne!(Random::new(1, 2).next(), Random::new(1, 3).next());
        assert_eq!(Random::new(1, 2).next(), Random::new(1, 2).next());
    }
}
