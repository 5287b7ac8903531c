//! Activations as 8-bit blocks: what every quantised product multiplies its weights with.
//!
//! A block is 32 or 256 consecutive values of one token. With `amax` the largest magnitude in it,
//!
//! ```text
//! d    = amax / 127                      (f32 division)
//! q[i] = round_ties_even(x[i] * (127 / amax))
//! sum  = q[0] + q[1] + ...               (exact)
//! ```
//!
//! A block whose `amax` is below [`AMAX_MIN`] is all zero: `127 / amax` would not be finite. A block with a NaN or an
//! infinity in it has `q = 0`, `d = NaN`, so that every product which reads it is NaN and the fault is seen.
//!
//! Where 8 bits are too coarse, activations are carried in two [`Passes`]: what the codes lose, `fma(-d, q, x)`, is quantised
//! by the same rule as if it were another token, and the two products are added. That is 15 bits and a sign for twice
//! the multiplications, over one pass of the weights.

/// How finely activations are carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passes {
    /// As codes.
    One,
    /// As codes, and the codes of what those lose.
    Two,
}

impl Passes {
    /// Rows of codes a token.
    pub fn count(self) -> usize {
        match self {
            Self::One => 1,
            Self::Two => 2,
        }
    }
}

/// Below this largest magnitude a block is stored as zeros (2^-100; a value that small cannot matter to an `f32` sum).
pub const AMAX_MIN: f32 = f32::from_bits((127 - 100) << 23);

/// Activations a block of the formats of class `Block32`.
pub const BLOCK32: usize = 32;

/// Activations a block of the formats of class `Block256`.
pub const BLOCK256: usize = 256;

/// Quantises one block (`x.len() == q.len()`, 32 or 256 values): writes `q`, returns the scale `d`.
///
/// This is the definition. Fast versions equal it bit for bit.
pub fn quantise_block(x: &[f32], q: &mut [i8]) -> f32 {
    assert_eq!(x.len(), q.len(), "one code a value");
    // The magnitudes' bit patterns order like the magnitudes, with infinity and NaN above all finite ones.
    let amax = f32::from_bits(
        x.iter()
            .map(|v| v.to_bits() & 0x7fff_ffff)
            .max()
            .unwrap_or(0),
    );
    if !amax.is_finite() {
        q.fill(0);
        return f32::NAN;
    }
    if amax < AMAX_MIN {
        q.fill(0);
        return 0.0;
    }
    let inverse = 127.0 / amax;
    for (q, x) in q.iter_mut().zip(x) {
        *q = (x * inverse).round_ties_even() as i8;
    }
    amax / 127.0
}

/// Exact sums of each run of `run` codes.
pub fn sums(q: &[i8], run: usize) -> impl Iterator<Item = i32> + '_ {
    q.chunks(run).map(|c| c.iter().map(|&v| i32::from(v)).sum())
}

/// One token's activations, quantised: the scalar form, used by the definition and its tests.
#[derive(Debug, Clone)]
pub struct ActRow {
    /// Values a block: 32 or 256.
    pub block: usize,
    /// Codes, one a value.
    pub q: Vec<i8>,
    /// Scales, one a block.
    pub d: Vec<f32>,
}

impl ActRow {
    /// Quantises a token's values. A last block may be shorter.
    pub fn new(x: &[f32], block: usize) -> Self {
        let mut q = vec![0; x.len()];
        let d = x
            .chunks(block)
            .zip(q.chunks_mut(block))
            .map(|(x, q)| quantise_block(x, q))
            .collect();
        Self { block, q, d }
    }

    /// The second pass: what the codes of `x` lose, quantised.
    pub fn second(&self, x: &[f32]) -> Self {
        let lost: Vec<f32> = x
            .chunks(self.block)
            .zip(self.q.chunks(self.block))
            .zip(&self.d)
            .flat_map(|((x, q), d)| {
                x.iter()
                    .zip(q)
                    .map(move |(x, q)| (-d).mul_add(f32::from(*q), *x))
            })
            .collect();
        Self::new(&lost, self.block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn faulty_blocks_become_nan_and_tiny_ones_zero() {
        let mut q = [1i8; 32];
        let mut x = [0.5f32; 32];
        x[7] = f32::NAN;
        assert!(quantise_block(&x, &mut q).is_nan());
        assert_eq!(q, [0; 32]);
        x[7] = f32::NEG_INFINITY;
        assert!(quantise_block(&x, &mut q).is_nan());
        assert_eq!(quantise_block(&[1e-38; 32], &mut q), 0.0);
        assert_eq!(quantise_block(&[0.0; 32], &mut q), 0.0);
        assert_eq!(quantise_block(&[f32::MAX; 32], &mut q), f32::MAX / 127.0);
        assert_eq!(q, [127; 32]);
    }

    proptest! {
        #[test]
        fn error_is_at_most_half_a_step(x in proptest::collection::vec(-1e6f32..1e6, 32), e in -60i32..60) {
            let x: Vec<f32> = x.iter().map(|v| v * 2f32.powi(e)).collect();
            let mut q = [0; 32];
            let d = quantise_block(&x, &mut q);
            for (q, x) in q.iter().zip(&x) {
                prop_assert!((f32::from(*q) * d - x).abs() <= d * 0.5001, "{q} * {d} against {x}");
            }
        }
    }
}
