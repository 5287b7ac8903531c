//! Our own elementary functions: the same bits on every instruction set, no libm, no approximate reciprocals.

use crate::simd::F32x16;

/// Below this the exponential is taken as zero. It keeps every non-zero result, times any half-precision value, well
/// above the smallest subnormal, so that skipped and multiplied zeros cannot be told apart.
pub(crate) const EXP_MIN: f32 = -80.0;

/// Above this the argument is clamped.
pub(crate) const EXP_MAX: f32 = 88.0;

/// `ln 2` in two parts: the first has few bits, so that small multiples of it are exact.
pub(crate) const LN2_HIGH: f32 = 355.0 / 512.0;
pub(crate) const LN2_LOW: f32 = -2.121_944_4e-4;

/// Coefficients of the Taylor polynomial of `e^r`, highest power first.
pub(crate) const EXP_TAYLOR: [f32; 8] = [
    1.0 / 5040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
    1.0,
    1.0,
];

/// `e^x` within 2 units in the last place; 0 below [`EXP_MIN`], `e^88` above 88; NaN stays NaN.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`, `e^r` by its Taylor polynomial of degree 7 (remainder below 6e-9), `ln 2` in
/// two parts (Cody and Waite).
#[inline(always)]
pub(crate) fn exp<V: F32x16>(x: V) -> V {
    let clamped = V::splat(EXP_MAX).select_lt(x, V::splat(EXP_MAX), x);
    let clamped = clamped.select_lt(V::splat(EXP_MIN), V::splat(EXP_MIN), clamped);
    let n = clamped.mul(V::splat(std::f32::consts::LOG2_E)).round();
    let r = n.fma(V::splat(-LN2_HIGH), clamped);
    let r = n.fma(V::splat(-LN2_LOW), r);
    let [highest, lower @ ..] = EXP_TAYLOR;
    let mut p = V::splat(highest);
    for c in lower {
        p = p.fma(r, V::splat(c));
    }
    // A NaN has passed every select and sits in p; its n is not an integer, but NaN times anything is NaN.
    let y = p.mul(n.exp2_int());
    x.select_lt(V::splat(EXP_MIN), V::splat(0.0), y)
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn silu<V: F32x16>(x: V) -> V {
    let e = exp(V::splat(0.0).sub(x));
    x.div(V::splat(1.0).add(e))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid<V: F32x16>(x: V) -> V {
    let e = exp(V::splat(0.0).sub(x));
    V::splat(1.0).div(V::splat(1.0).add(e))
}

/// What [`Gate::Clamped`](crate::ops::Gate::Clamped) multiplies.
#[inline(always)]
pub(crate) fn clamped<V: F32x16>(gate: V, up: V) -> (V, V) {
    let limit = V::splat(7.0);
    let g = limit.select_lt(gate, limit, gate);
    let u = limit.select_lt(up, limit, up);
    let low = V::splat(-7.0);
    let u = u.select_lt(low, low, u);
    let e = exp(V::splat(0.0).sub(g.mul(V::splat(1.702))));
    (g.div(V::splat(1.0).add(e)), u.add(V::splat(1.0)))
}

/// Hyperbolic tangent: an odd polynomial below 1/8 (where `1 - 2 / (e^2x + 1)` would cancel), that formula above.
#[inline(always)]
pub(crate) fn tanh<V: F32x16>(x: V) -> V {
    let a = x.abs();
    let e = exp(a.add(a));
    let big = V::splat(1.0).sub(V::splat(2.0).div(e.add(V::splat(1.0))));
    let x2 = x.mul(x);
    let mut p = V::splat(-17.0 / 315.0);
    for c in [2.0 / 15.0, -1.0 / 3.0, 1.0] {
        p = p.fma(x2, V::splat(c));
    }
    let small = x.mul(p);
    let signed = x.select_lt(V::splat(0.0), V::splat(0.0).sub(big), big);
    a.select_lt(V::splat(0.125), small, signed)
}

/// The tanh form of GELU: `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`.
#[inline(always)]
pub(crate) fn gelu<V: F32x16>(x: V) -> V {
    let x2 = x.mul(x);
    let inner = x2
        .fma(V::splat(0.044_715), V::splat(1.0))
        .mul(x)
        .mul(V::splat(0.797_884_6));
    x.mul(V::splat(0.5)).mul(V::splat(1.0).add(tanh(inner)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::simd::simd_kernel;

    type All = [[f32; 16]; 4];

    #[inline(always)]
    fn all<V: F32x16>(x: &[f32; 16]) -> All {
        let x = V::load(x);
        [
            exp(x).to_array(),
            silu(x).to_array(),
            tanh(x).to_array(),
            gelu(x).to_array(),
        ]
    }
    simd_kernel! { fn run(x: &[f32; 16]) -> All = all; }

    fn arguments() -> impl Iterator<Item = [f32; 16]> {
        let special = [
            0.0,
            -0.0,
            1e-40,
            -1e-40,
            f32::MAX,
            f32::MIN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            -79.99,
            -80.0,
            -80.01,
            88.0,
            88.1,
            0.124_999,
            0.125,
            -0.125,
        ];
        std::iter::once(special)
            .chain((0..4000).map(|i| std::array::from_fn(|j| (i * 16 + j) as f32 * 0.004 - 128.0)))
    }

    #[test]
    fn every_isa_gives_the_same_bits() {
        for x in arguments() {
            let want = run(Isa::Scalar, &x);
            for isa in Isa::available() {
                let got = run(isa, &x);
                assert_eq!(
                    got.map(|a| a.map(f32::to_bits)),
                    want.map(|a| a.map(f32::to_bits)),
                    "{isa} at {x:?}"
                );
            }
        }
        assert!(
            run(Isa::best(), &[f32::NAN; 16])
                .iter()
                .flatten()
                .all(|y| y.is_nan())
        );
    }

    #[test]
    fn close_to_the_true_functions() {
        for x in arguments().skip(1) {
            let [e, u, t, g] = run(Isa::best(), &x);
            for i in 0..16 {
                let x64 = f64::from(x[i]);
                let near = |got: f32, want: f64, rel: f64| {
                    assert!(
                        (f64::from(got) - want).abs() <= rel * want.abs() + 1e-30,
                        "{got} against {want} at {x64}"
                    );
                };
                if (-79.9..87.9).contains(&x64) {
                    near(e[i], x64.exp(), 3e-7);
                    near(u[i], x64 / (1.0 + (-x64).exp()), 3e-7);
                }
                near(t[i], x64.tanh(), 3e-6);
                let want =
                    0.5 * x64 * (1.0 + (0.797_884_560_8 * (x64 + 0.044_715 * x64.powi(3))).tanh());
                assert!(
                    (f64::from(g[i]) - want).abs() <= 1e-6 * x64.abs().max(1.0),
                    "gelu {} against {want} at {x64}",
                    g[i]
                );
            }
        }
    }
}
