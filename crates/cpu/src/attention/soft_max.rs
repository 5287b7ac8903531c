//! Scores to weights.

use super::kernel::union;
use super::layout::Cells;
use super::{CELLS, Params};
use crate::math::{EXP_MIN, EXP_TAYLOR, LN2_HIGH, LN2_LOW, tanh};
use crate::simd::{F32x16, simd_kernel};
use std::ops::Range;

simd_kernel! {
    /// Scales each row's scores and turns them into weights; `m` and `l` are the rows' largest scores and sums of weights,
    /// 0 for a row that sees no cell.
    pub(super) fn soft_max(params: &Params<'_>, cells: &[Cells], s: &mut [f32], m: &mut [f32], l: &mut [f32]) = soft_max_with;
}
#[inline(always)]
fn soft_max_with<V: F32x16>(
    params: &Params<'_>,
    cells: &[Cells],
    s: &mut [f32],
    m: &mut [f32],
    l: &mut [f32],
) {
    let s = s.as_chunks_mut::<CELLS>().0;
    let mut first = 0;
    while first < cells.len() {
        if V::WIDE && cells.len() - first >= 4 {
            rows::<V, 4>(params, first, cells, s, m, l);
            first += 4;
        } else if cells.len() - first >= 2 {
            rows::<V, 2>(params, first, cells, s, m, l);
            first += 2;
        } else {
            rows::<V, 1>(params, first, cells, s, m, l);
            first += 1;
        }
    }
}

/// `N` rows from `first` on, side by side: each has chains of operations (its maximum, its sum, every exponential) that
/// alone would leave the processor waiting.
#[inline(always)]
fn rows<V: F32x16, const N: usize>(
    params: &Params<'_>,
    first: usize,
    cells: &[Cells],
    s: &mut [[f32; CELLS]],
    m: &mut [f32],
    l: &mut [f32],
) {
    let cells: &[Cells; N] = cells[first..][..N].try_into().expect("N rows");
    let s: &mut [[f32; CELLS]; N] = (&mut s[first..][..N]).try_into().expect("N rows");
    let seen = union(cells);
    if seen.is_empty() {
        m[first..][..N].fill(0.0);
        l[first..][..N].fill(0.0);
        return;
    }
    let vectors = seen.start / 16..seen.end.div_ceil(16);
    hide(&vectors, cells, s);
    let scale = V::splat(params.scale);
    let mut largest = [V::splat(f32::NEG_INFINITY); N];
    match params.soft_cap {
        None => {
            for i in vectors.clone() {
                for r in 0..N {
                    let s = &mut s[r].as_chunks_mut::<16>().0[i];
                    let x = V::load(s).mul(scale);
                    x.store(s);
                    largest[r] = x.max(largest[r]);
                }
            }
        }
        Some(cap) => {
            let cap = V::splat(cap);
            for s in s.iter_mut() {
                for s in &mut s.as_chunks_mut::<16>().0[vectors.clone()] {
                    tanh(V::load(s).mul(scale).div(cap)).mul(cap).store(s);
                }
            }
            // The hyperbolic tangent has brought hidden cells back among the others.
            hide(&vectors, cells, s);
            for i in vectors.clone() {
                for r in 0..N {
                    largest[r] = V::load(&s[r].as_chunks::<16>().0[i]).max(largest[r]);
                }
            }
        }
    }
    let mut sum = [V::splat(0.0); N];
    for r in 0..N {
        let lane = largest[r].max_lane();
        m[first + r] = if cells[r].is_empty() { 0.0 } else { lane };
        largest[r] = V::splat(lane);
    }
    for i in vectors {
        for r in 0..N {
            let s = &mut s[r].as_chunks_mut::<16>().0[i];
            let e = exp_weight(V::load(s).sub(largest[r]));
            e.store(s);
            sum[r] = sum[r].add(e);
        }
    }
    for r in 0..N {
        let sum = sum[r].sum();
        l[first + r] = if cells[r].is_empty() { 0.0 } else { sum };
    }
}

/// Gives the cells that a row does not see weight 0, beside cells that it or another row sees.
#[inline(always)]
fn hide<const N: usize>(vectors: &Range<usize>, cells: &[Cells; N], s: &mut [[f32; CELLS]; N]) {
    for (cells, s) in cells.iter().zip(s) {
        let (start, end) = (16 * vectors.start, 16 * vectors.end);
        s[start..cells.start.clamp(start, end)].fill(f32::NEG_INFINITY);
        s[cells.end.clamp(start, end)..end].fill(f32::NEG_INFINITY);
    }
}

/// [`crate::math::exp`] of what is not above 0, bit for bit, in two thirds of the operations.
///
/// Nothing is clamped: what lies below [`EXP_MIN`] comes out wrong and is replaced by 0. The sum with [`SHIFT`] rounds to
/// an integer, ties to even, and has it in its last bits, raised by one less than the exponent's bias; the polynomial has
/// doubled coefficients (exactly twice its value) to make up for that one.
#[inline(always)]
pub(super) fn exp_weight<V: F32x16>(x: V) -> V {
    /// `1.5 * 2^23`, where floats are the integers, and 126: even, so that ties go to even integers.
    const SHIFT: f32 = 12_582_912.0 + 126.0;
    let shifted = x
        .mul(V::splat(std::f32::consts::LOG2_E))
        .add(V::splat(SHIFT));
    let n = shifted.sub(V::splat(SHIFT));
    let r = n.fma(V::splat(-LN2_HIGH), x);
    let r = n.fma(V::splat(-LN2_LOW), r);
    let [highest, lower @ ..] = EXP_TAYLOR;
    let mut p = V::splat(2.0 * highest);
    for c in lower {
        p = p.fma(r, V::splat(2.0 * c));
    }
    let y = p.mul(shifted.exp2_bits());
    x.select_lt(V::splat(EXP_MIN), V::splat(0.0), y)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::math::exp;

    #[inline(always)]
    fn both<V: F32x16>(x: &[f32; 16]) -> [[f32; 16]; 2] {
        let x = V::load(x);
        [exp_weight(x).to_array(), exp(x).to_array()]
    }
    simd_kernel! { fn run(x: &[f32; 16]) -> [[f32; 16]; 2] = both; }

    #[test]
    fn weights_are_the_exponential_of_the_definition() {
        let special = [
            0.0,
            -0.0,
            -1e-45,
            -1e-38,
            f32::MIN,
            f32::NEG_INFINITY,
            -79.999_99,
            -80.0,
            -80.000_01,
            f32::NAN,
            -f32::NAN,
            f32::from_bits(0x7f80_0001),
            f32::from_bits(0xffff_ffff),
            f32::from_bits(0x7fc0_0155),
            -0.5,
            -200.0,
        ];
        // Products with log2(e) that end in a half are ties of the rounding.
        let ties = (0..116).map(|n| -((n as f32 + 0.5) / std::f32::consts::LOG2_E));
        let near = ties.flat_map(|x| (0..16u32).map(move |i| f32::from_bits(x.to_bits() - 8 + i)));
        let spread = (0..400_000u32).map(|i| -f32::from_bits(0x42b0_0000 - i * 1973));
        let all: Vec<f32> = special.into_iter().chain(near).chain(spread).collect();
        for x in all.as_chunks::<16>().0 {
            for isa in Isa::available() {
                let [got, want] = run(isa, x);
                for i in 0..16 {
                    assert!(
                        got[i].to_bits() == want[i].to_bits()
                            || got[i].is_nan() && want[i].is_nan(),
                        "{isa}: {} against {} at {}",
                        got[i],
                        want[i],
                        x[i]
                    );
                }
            }
        }
    }
}
