//! Products of blocks of 32 with AVX2 and more than three tokens. A block is unpacked into the first-level cache and multiplied with
//! [`FEW`] tokens after [`FEW`] tokens, with both halves of the tile at once: what is read of a token serves 16 rows. Sums over blocks stay in
//! memory, since a block's products take all registers.
//!
//! `vpmaddubsw` multiplies unsigned codes of up to 7 bits with activations; the bias times the activations' sum is taken off. Codes of 8 bits are signed:
//! their magnitudes are multiplied with activations that take their signs, two products a sum of 16 bits.

#![allow(
    clippy::needless_range_loop,
    reason = "rows, halves and tokens of several arrays at once"
)]

use super::avx2::{Sums, in_order};
use super::gemv256::{Blocks, Out, ahead, bias, code, group, groups_a_sum, halves, scales};
use super::sets::{Set, Sets};
use super::unpacked::CHUNK32;
use crate::acts::{ActsView, FEW};
use crate::mem::Shared;
use quant::lanes::{Codes, Unpack32};
use quant::product::has_min;
use quant::tile::{ROWS, TileMatrix};
use std::arch::x86_64::*;
use std::ops::Range;

/// Sets of [`FEW`] tokens that a block is multiplied with once it is unpacked.
const SETS: usize = 8;

/// A tile's block, `R` registers a half: what its products with the first set leave for those with the others.
struct Weights<const R: usize> {
    q: [[__m256i; R]; 2],
    d: [__m256; 2],
    m: [__m256; 2],
}

/// Tiles of a `Block32` format.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tiles32<U: Unpack32>(
    w: &TileMatrix<'_>,
    acts: &ActsView<'_>,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    if U::BITS == 8 {
        tiles32_of::<U, 16>(w, acts, tiles, out);
    } else {
        tiles32_of::<U, 8>(w, acts, tiles, out);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn tiles32_of<U: Unpack32, const R: usize>(
    w: &TileMatrix<'_>,
    acts: &ActsView<'_>,
    tiles: Range<usize>,
    out: &Shared<'_, f32>,
) {
    let (sets, n_sets) = (Sets::new(acts), acts.tokens().div_ceil(FEW));
    let zero = [[_mm256_setzero_ps(); FEW]; 2];
    let (mut sums, mut totals) = ([zero; SETS], [zero; SETS]);
    let mut weights = Weights::<R>::zero();
    for tile in tiles {
        let mut blocks = Blocks::<U>::new(w, tile);
        let out = Out::new(w, tile, out);
        for first_set in (0..n_sets).step_by(SETS) {
            let n = SETS.min(n_sets - first_set);
            let (totals, sums) = (&mut totals[..n], &mut sums[..n]);
            let begins: [usize; SETS] =
                std::array::from_fn(|i| sets.begin((first_set + i).min(n_sets - 1)));
            let tokens = |i: usize| {
                let t = (first_set + i) * FEW;
                t..acts.tokens().min(t + FEW)
            };
            (0..n).flat_map(tokens).for_each(|t| out.fetch(t));
            for first in (0..w.blocks()).step_by(CHUNK32) {
                sums.fill(zero);
                for b in first..w.blocks().min(first + CHUNK32) {
                    let block = blocks.block(b);
                    if first_set == 0 {
                        ahead::<U, 1>(block, 0);
                    }
                    let at = b * sets.stride();
                    let (first, others) = sums.split_first_mut().expect("sets");
                    weights.multiply::<U, true>(block, &sets.at(begins[0] + at), first);
                    for (sums, begin) in others.iter_mut().zip(&begins[1..]) {
                        weights.multiply::<U, false>(block, &sets.at(begin + at), sums);
                    }
                }
                if first == 0 {
                    totals.copy_from_slice(sums);
                    continue;
                }
                let totals = totals.as_flattened_mut().as_flattened_mut();
                for (total, sum) in totals.iter_mut().zip(sums.as_flattened().as_flattened()) {
                    *total = _mm256_add_ps(*total, *sum);
                }
            }
            for (i, [low, high]) in totals.iter().enumerate() {
                for (j, t) in tokens(i).enumerate() {
                    out.put(t, true, [[low[j]], [high[j]]]);
                }
            }
        }
    }
}

impl<const R: usize> Weights<R> {
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn zero() -> Self {
        Self {
            q: [[_mm256_setzero_si256(); R]; 2],
            d: [_mm256_setzero_ps(); 2],
            m: [_mm256_setzero_ps(); 2],
        }
    }

    /// Adds a block's products. `FIRST`: of the first set, for which the block is unpacked on the way.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn multiply<U: Unpack32, const FIRST: bool>(
        &mut self,
        block: &[u8],
        set: &Set<'_>,
        sums: &mut Sums<__m256>,
    ) {
        let dot = if U::BITS == 8 {
            self.signed::<U, FIRST>(block, set)
        } else {
            self.unsigned::<U, FIRST>(block, set)
        };
        if FIRST {
            for half in 0..2 {
                self.d[half] = scales::<U>(block, half);
                if has_min(U::TY) {
                    self.m[half] = halves(block, 2 * ROWS, half);
                }
            }
        }
        for j in 0..FEW {
            let (d_a, ds_a) = (_mm256_set1_ps(set.d[j]), _mm256_set1_ps(set.ds[j]));
            for half in 0..2 {
                let (mut dot, sum) = (dot[half][j], &mut sums[half][j]);
                if bias::<U>() != 0 {
                    dot = _mm256_sub_epi32(dot, _mm256_set1_epi32(bias::<U>() * set.sum[j]));
                }
                let scale = _mm256_mul_ps(self.d[half], d_a);
                *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, *sum);
                if has_min(U::TY) {
                    *sum = _mm256_fmadd_ps(self.m[half], ds_a, *sum);
                }
            }
        }
    }

    /// Sums of products of unsigned codes.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn unsigned<U: Codes, const FIRST: bool>(
        &mut self,
        block: &[u8],
        set: &Set<'_>,
    ) -> Sums<__m256i> {
        let a_sum = groups_a_sum(U::BITS);
        let zero = [[_mm256_setzero_si256(); FEW]; 2];
        let (mut words, mut dot) = (zero, zero);
        each_group!(|i| {
            // The two that share a word of nibbles follow each other.
            let g = i / 2 + i % 2 * 4;
            if FIRST {
                for half in 0..2 {
                    self.q[half][g] = code::<U>(block, 0, g, half);
                }
            }
            for j in 0..FEW {
                let a = group(&set.q[j], g);
                let products = [0, 1].map(|half| _mm256_maddubs_epi16(self.q[half][g], a));
                for half in 0..2 {
                    let word = &mut words[half][j];
                    *word = if i.is_multiple_of(a_sum) {
                        products[half]
                    } else {
                        _mm256_add_epi16(*word, products[half])
                    };
                }
            }
            in_order(&mut words);
            if (i + 1).is_multiple_of(a_sum) {
                for half in 0..2 {
                    for j in 0..FEW {
                        let sum = _mm256_madd_epi16(words[half][j], _mm256_set1_epi16(1));
                        let dot = &mut dot[half][j];
                        *dot = if i < a_sum {
                            sum
                        } else {
                            _mm256_add_epi32(*dot, sum)
                        };
                    }
                }
            }
        });
        dot
    }

    /// Sums of products of signed codes. Those of 8 bits are read where they are, of the others both magnitudes and codes are kept.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn signed<U: Codes, const FIRST: bool>(
        &mut self,
        block: &[u8],
        set: &Set<'_>,
    ) -> Sums<__m256i> {
        let in_place = U::PLANES.is_some_and(|planes| planes.low_bits == 8);
        let mut dot = [[_mm256_setzero_si256(); FEW]; 2];
        each_group!(|g| {
            let mut codes = [_mm256_setzero_si256(); 2];
            for half in 0..2 {
                codes[half] = if FIRST || in_place {
                    code::<U>(block, 0, g, half)
                } else {
                    self.q[half][8 + g]
                };
                if FIRST {
                    self.q[half][g] = _mm256_abs_epi8(codes[half]);
                    if !in_place {
                        self.q[half][8 + g] = codes[half];
                    }
                }
            }
            for j in 0..FEW {
                let a = group(&set.q[j], g);
                for half in 0..2 {
                    // At most 128 * 127 twice.
                    let a = _mm256_sign_epi8(a, codes[half]);
                    let sums = _mm256_maddubs_epi16(self.q[half][g], a);
                    let sums = _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
                    dot[half][j] = _mm256_add_epi32(dot[half][j], sums);
                }
            }
            in_order(&mut dot);
        });
        dot
    }
}
