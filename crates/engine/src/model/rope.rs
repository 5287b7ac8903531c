//! Rope's angles: plain, linear and YaRN scaling, and the frequency factors of Llama 3.
//!
//! For pair `i` of `n` values at position `p`: `angle = p * base^(-2i/n)`, divided by the pair's frequency factor where the
//! file has them (Llama 3's long-context rule is stored as such factors, tensor `rope_freqs`). Linear scaling divides
//! the position. YaRN (arXiv 2309.00071) blends both by frequency and scales the result. Angles are computed in `f64`
//! and rounded once, after sine and cosine, so that far positions lose nothing.

/// How positions beyond the trained context are brought back into it.
#[derive(Debug, Clone, PartialEq)]
pub enum Scaling {
    /// Not at all.
    None,
    /// Positions are divided.
    Linear {
        /// By this.
        factor: f32,
    },
    /// High frequencies are kept, low ones divided, with a ramp in between.
    Yarn {
        /// Of low frequencies.
        factor: f32,
        /// Context before the extension.
        n_ctx_original: usize,
        /// Further factor of sine and cosine.
        attention_factor: f32,
        /// Turns over the original context above which a frequency is kept.
        beta_fast: f32,
        /// Turns below which it is divided.
        beta_slow: f32,
    },
}

/// Rope of one kind of layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Values of a head that are turned.
    pub dims: usize,
    /// Base of the frequencies.
    pub freq_base: f32,
    /// Context extension.
    pub scaling: Scaling,
}

/// Angle a position of every pair, and the magnitude of sine and cosine.
#[derive(Debug, Clone)]
pub(crate) struct Frequencies {
    per_position: Vec<f64>,
    magnitude: f64,
}

impl Rope {
    pub(crate) fn frequencies(&self, factors: Option<&[f32]>) -> Frequencies {
        let (n, base) = (self.dims as f64, f64::from(self.freq_base));
        let mut magnitude = 1.0;
        let per_position = (0..self.dims / 2)
            .map(|i| {
                let plain =
                    libm::pow(base, -2.0 * i as f64 / n) / factors.map_or(1.0, |f| f64::from(f[i]));
                match self.scaling {
                    Scaling::None => plain,
                    Scaling::Linear { factor } => plain / f64::from(factor),
                    Scaling::Yarn {
                        factor,
                        n_ctx_original,
                        attention_factor,
                        beta_fast,
                        beta_slow,
                    } => {
                        let factor = f64::from(factor);
                        // The pair that makes `turns` turns over the original context.
                        let pair = |turns: f32| {
                            let turns = n_ctx_original as f64
                                / (f64::from(turns) * 2.0 * std::f64::consts::PI);
                            n * libm::log(turns) / (2.0 * libm::log(base))
                        };
                        let low = libm::floor(pair(beta_fast)).max(0.0);
                        let high = libm::ceil(pair(beta_slow)).min(n - 1.0);
                        let keep =
                            1.0 - ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                        magnitude = f64::from(attention_factor) * (1.0 + 0.1 * libm::log(factor));
                        plain / factor * (1.0 - keep) + plain * keep
                    }
                }
            })
            .collect();
        Frequencies {
            per_position,
            magnitude,
        }
    }
}

impl Frequencies {
    /// Pairs that are turned.
    pub(crate) fn pairs(&self) -> usize {
        self.per_position.len()
    }

    /// Cosines and sines of one position.
    /// Cosines and sines `[T, pairs]` of `tokens` positions from `position` on.
    pub(crate) fn fill(&self, position: usize, tokens: usize, cos: &mut [f32], sin: &mut [f32]) {
        let n = self.pairs();
        for t in 0..tokens {
            let at = t * n..(t + 1) * n;
            self.at(position + t, &mut cos[at.clone()], &mut sin[at]);
        }
    }

    fn at(&self, position: usize, cos: &mut [f32], sin: &mut [f32]) {
        for ((f, cos), sin) in self.per_position.iter().zip(cos).zip(sin) {
            let (s, c) = libm::sincos(f * position as f64);
            *cos = (c * self.magnitude) as f32;
            *sin = (s * self.magnitude) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn angle(rope: &Rope, factors: Option<&[f32]>, pair: usize) -> f64 {
        rope.frequencies(factors).per_position[pair]
    }

    #[test]
    fn plain_linear_and_factors() {
        let rope = Rope {
            dims: 8,
            freq_base: 10_000.0,
            scaling: Scaling::None,
        };
        for (i, want) in [1.0, 0.1, 0.01, 0.001].into_iter().enumerate() {
            assert!((angle(&rope, None, i) - want).abs() < 1e-12);
            assert!(
                (angle(&rope, Some(&[1.0, 2.0, 4.0, 8.0]), i) - want / f64::from(1 << i)).abs()
                    < 1e-12
            );
        }
        let linear = Rope {
            scaling: Scaling::Linear { factor: 4.0 },
            ..rope
        };
        assert!((angle(&linear, None, 1) - 0.025).abs() < 1e-12);
    }

    #[test]
    fn yarn_keeps_fast_pairs_and_divides_slow_ones() {
        let scaling = Scaling::Yarn {
            factor: 4.0,
            n_ctx_original: 4096,
            attention_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
        };
        let yarn = Rope {
            dims: 128,
            freq_base: 10_000.0,
            scaling,
        };
        let plain = Rope {
            scaling: Scaling::None,
            ..yarn.clone()
        };
        assert_eq!(angle(&yarn, None, 0), angle(&plain, None, 0));
        assert!((angle(&yarn, None, 63) - angle(&plain, None, 63) / 4.0).abs() < 1e-12);
        let (mut cos, mut sin) = ([0.0; 64], [0.0; 64]);
        yarn.frequencies(None).at(0, &mut cos, &mut sin);
        assert!(
            (f64::from(cos[0]) - (1.0 + 0.1 * 4f64.ln())).abs() < 1e-6,
            "YaRN's magnitude"
        );
    }
}
