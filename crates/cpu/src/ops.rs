//! Element-wise operations and small reductions: norms, rope, gated activations, additions.
//!
//! Each works on one token's values; callers spread tokens over the pool.

use crate::math;
use crate::simd::{F32x16, simd_kernel};

simd_kernel! {
    /// `out = x / sqrt(mean(x^2) + eps) * w`, `x`, `w`, `out` `[D]`.
    ///
    /// The sum of squares runs in 16 lanes (value `i` in lane `i mod 16`), which are added by halves. Without `w` the
    /// result is not scaled.
    pub fn rms_norm(x: &[f32], w: Option<&[f32]>, eps: f32, out: &mut [f32]) = rms_norm_with;
}
#[inline(always)]
fn rms_norm_with<V: F32x16>(x: &[f32], w: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    let scale = inverse_rms::<V>(x, eps);
    match w {
        Some(w) => {
            for ((x, w), out) in x.chunks(16).zip(w.chunks(16)).zip(out.chunks_mut(16)) {
                store(load::<V>(x).mul(scale).mul(load(w)), out);
            }
        }
        None => {
            for (x, out) in x.chunks(16).zip(out.chunks_mut(16)) {
                store(load::<V>(x).mul(scale), out);
            }
        }
    }
}

#[inline(always)]
fn inverse_rms<V: F32x16>(x: &[f32], eps: f32) -> V {
    let mut sum = V::splat(0.0);
    for x in x.chunks(16) {
        let x = load::<V>(x);
        sum = x.fma(x, sum);
    }
    V::splat(1.0 / (sum.sum() / x.len() as f32 + eps).sqrt())
}

simd_kernel! {
    /// [`rms_norm`] in place, head by head: `x` `[heads, C]`, `w` `[C]`.
    pub fn rms_norm_heads(x: &mut [f32], w: &[f32], eps: f32) = rms_norm_heads_with;
}
#[inline(always)]
fn rms_norm_heads_with<V: F32x16>(x: &mut [f32], w: &[f32], eps: f32) {
    for head in x.chunks_exact_mut(w.len()) {
        let scale = inverse_rms::<V>(head, eps);
        for (x, w) in head.chunks_mut(16).zip(w.chunks(16)) {
            store(load::<V>(x).mul(scale).mul(load(w)), x);
        }
    }
}

simd_kernel! {
    /// `x += y`.
    pub fn add(x: &mut [f32], y: &[f32]) = add_with;
}
#[inline(always)]
fn add_with<V: F32x16>(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.chunks_mut(16).zip(y.chunks(16)) {
        store(load::<V>(x).add(load(y)), x);
    }
}

simd_kernel! {
    /// `x *= factor`.
    pub fn scale(x: &mut [f32], factor: f32) = scale_with;
}
#[inline(always)]
fn scale_with<V: F32x16>(x: &mut [f32], factor: f32) {
    for x in x.iter_mut() {
        *x *= factor;
    }
}

/// The function that a gated feed-forward applies to its gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// `x * sigmoid(x)`.
    Silu,
    /// The tanh form of GELU.
    Gelu,
    /// `x * sigmoid(1.702 x)` of `x = min(gate, 7)`, times 1 more than `up`, which is brought within -7 and 7.
    Clamped,
}

simd_kernel! {
    /// `gate = f(gate) * up`.
    pub fn gated(f: Gate, gate: &mut [f32], up: &[f32]) = gated_with;
}
#[inline(always)]
fn gated_with<V: F32x16>(f: Gate, gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.chunks_mut(16).zip(up.chunks(16)) {
        let (g, u) = (load::<V>(gate), load(up));
        let (g, u) = match f {
            Gate::Silu => (math::silu(g), u),
            Gate::Gelu => (math::gelu(g), u),
            Gate::Clamped => math::clamped(g, u),
        };
        store(g.mul(u), gate);
    }
}

simd_kernel! {
    /// `x *= sigmoid(gate)`.
    pub fn scale_by_sigmoid(x: &mut [f32], gate: f32) = scale_by_sigmoid_with;
}
#[inline(always)]
fn scale_by_sigmoid_with<V: F32x16>(x: &mut [f32], gate: f32) {
    let factor = math::sigmoid(V::splat(gate));
    for x in x.chunks_mut(16) {
        store(load::<V>(x).mul(factor), x);
    }
}

simd_kernel! {
    /// `y = fma(w, x, y)`.
    pub fn add_scaled(y: &mut [f32], w: f32, x: &[f32]) = add_scaled_with;
}
#[inline(always)]
fn add_scaled_with<V: F32x16>(y: &mut [f32], w: f32, x: &[f32]) {
    let w = V::splat(w);
    for (y, x) in y.chunks_mut(16).zip(x.chunks(16)) {
        store(w.fma(load(x), load(y)), y);
    }
}

simd_kernel! {
    /// `x = cap * tanh(x / cap)`.
    pub fn soft_cap(x: &mut [f32], cap: f32) = soft_cap_with;
}
#[inline(always)]
fn soft_cap_with<V: F32x16>(x: &mut [f32], cap: f32) {
    let cap = V::splat(cap);
    for x in x.chunks_mut(16) {
        store(math::tanh(load::<V>(x).div(cap)).mul(cap), x);
    }
}

/// Which values of a head rope turns together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairs {
    /// Neighbours `2i`, `2i + 1` (the `llama` files' order).
    Neighbours,
    /// Halves `i`, `i + n/2` (NeoX).
    Halves,
}

simd_kernel! {
    /// Turns the first `2 * cos.len()` values of each head of `x` `[heads, C]` by the angles of one position.
    pub fn rope(pairs: RopePairs, head: usize, cos: &[f32], sin: &[f32], x: &mut [f32]) = rope_with;
}
#[inline(always)]
fn rope_with<V: F32x16>(pairs: RopePairs, head: usize, cos: &[f32], sin: &[f32], x: &mut [f32]) {
    let half = cos.len();
    for x in x.chunks_exact_mut(head) {
        match pairs {
            RopePairs::Neighbours => {
                for ((x, c), s) in x.chunks_exact_mut(2).zip(cos).zip(sin) {
                    (x[0], x[1]) = turn(x[0], x[1], *c, *s);
                }
            }
            RopePairs::Halves => {
                let (low, high) = x[..2 * half].split_at_mut(half);
                for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
                    (*a, *b) = turn(*a, *b, *c, *s);
                }
            }
        }
    }
}

simd_kernel! {
    /// Multiplies each head of `x` `[heads, C]`, C a power of two, with the normalised Hadamard matrix (Sylvester's order), which is
    /// its own inverse: a stage of sums and differences for each power of two from 1 on, then a factor of `1 / sqrt(C)`.
    ///
    /// It spreads what is large in one value over all of a head, so that few bits store it better.
    pub fn hadamard_heads(head: usize, x: &mut [f32]) = hadamard_heads_with;
}
#[inline(always)]
fn hadamard_heads_with<V: F32x16>(head: usize, x: &mut [f32]) {
    let factor = V::splat(1.0 / (head as f32).sqrt());
    for x in x.chunks_exact_mut(head) {
        let mut step = 1;
        while step < head {
            for pair in x.chunks_exact_mut(2 * step) {
                let (low, high) = pair.split_at_mut(step);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            step *= 2;
        }
        for x in x.chunks_mut(16) {
            store(load::<V>(x).mul(factor), x);
        }
    }
}

/// `(a cos - b sin, a sin + b cos)`, each product rounded, then one `fma`.
#[inline(always)]
fn turn(a: f32, b: f32, cos: f32, sin: f32) -> (f32, f32) {
    ((-b).mul_add(sin, a * cos), a.mul_add(sin, b * cos))
}

/// Sixteen values, or what is left of them and zeros.
#[inline(always)]
fn load<V: F32x16>(x: &[f32]) -> V {
    if x.len() == 16 {
        V::load(x)
    } else {
        V::load_part(x)
    }
}

/// Stores as many lanes as there are places.
#[inline(always)]
fn store<V: F32x16>(v: V, out: &mut [f32]) {
    if out.len() == 16 {
        v.store(out)
    } else {
        out.copy_from_slice(&v.to_array()[..out.len()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use proptest::prelude::*;

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter()
            .map(|v| {
                if v.is_nan() {
                    f32::NAN.to_bits()
                } else {
                    v.to_bits()
                }
            })
            .collect()
    }

    /// Every operation of this module on `x` and `y` (same length), one after the other.
    fn all(isa: Isa, x: &[f32], y: &[f32]) -> Vec<u32> {
        let mut out = vec![0.0; x.len()];
        let mut result = Vec::new();
        rms_norm(isa, x, Some(y), 1e-6, &mut out);
        result.extend(bits(&out));
        rms_norm(isa, x, None, 1e-6, &mut out);
        result.extend(bits(&out));
        for f in [Gate::Silu, Gate::Gelu, Gate::Clamped] {
            let mut g = x.to_vec();
            gated(isa, f, &mut g, y);
            result.extend(bits(&g));
        }
        let mut z = x.to_vec();
        add(isa, &mut z, y);
        soft_cap(isa, &mut z, 30.0);
        add_scaled(isa, &mut z, y[0], x);
        scale_by_sigmoid(isa, &mut z, y[1]);
        scale(isa, &mut z, 1.7);
        result.extend(bits(&z));
        let head = x.len() / 2 * 2;
        for pairs in [RopePairs::Neighbours, RopePairs::Halves] {
            let mut z = x[..head].to_vec();
            rope(isa, pairs, head, &y[..head / 2], &x[..head / 2], &mut z);
            rms_norm_heads(isa, &mut z, &y[..head], 1e-5);
            result.extend(bits(&z));
        }
        let head = 1 << x.len().ilog2();
        let mut z = x[..head].to_vec();
        hadamard_heads(isa, head, &mut z);
        result.extend(bits(&z));
        result
    }

    proptest! {
        #[test]
        fn every_isa_gives_the_same_bits(
            x in proptest::collection::vec(prop_oneof![9 => -20f32..20.0, 1 => any::<f32>()], 2..100),
            seed in any::<u32>(),
        ) {
            let y: Vec<f32> = x.iter().enumerate().map(|(i, v)| v * 0.3 + (i as u32 ^ seed) as f32 * 1e-9).collect();
            let want = all(Isa::Scalar, &x, &y);
            for isa in Isa::available() {
                prop_assert_eq!(all(isa, &x, &y), want.clone(), "{}", isa);
            }
        }
    }

    #[test]
    fn the_hadamard_matrix_is_its_own_inverse_and_spreads() {
        for head in [1, 2, 64, 128, 256] {
            let x: Vec<f32> = (0..3 * head)
                .map(|i| (i * 37 % 101) as f32 - 50.0)
                .collect();
            let mut z = x.clone();
            hadamard_heads(Isa::best(), head, &mut z);
            hadamard_heads(Isa::best(), head, &mut z);
            assert!(
                z.iter().zip(&x).all(|(z, x)| (z - x).abs() < 1e-4),
                "{head}"
            );
            let mut one = vec![0.0; head];
            one[head / 3] = 1.0;
            hadamard_heads(Isa::best(), head, &mut one);
            let each = 1.0 / (head as f32).sqrt();
            assert!(one.iter().all(|x| x.abs() == each), "{head}");
        }
    }

    #[test]
    fn norm_of_known_values() {
        let mut out = [0.0; 2];
        rms_norm(Isa::best(), &[3.0, 4.0], Some(&[1.0, 2.0]), 0.0, &mut out);
        let rms = 12.5f32.sqrt();
        assert!((out[0] - 3.0 / rms).abs() < 1e-6 && (out[1] - 8.0 / rms).abs() < 1e-6);
    }
}
