//! The operations that no elementary function's test reaches, on every instruction set.

use super::*;
use crate::isa::Isa;

/// Everything made of 64 bytes, four factors and 16 floats.
type All = ([i32; 32], [[f32; 16]; 4], [u32; 2]);

#[inline(always)]
fn all<V: F32x16>(bytes: &[u8; 64], q: i32, x: &[f32; 16]) -> All {
    let sum: i32 = q.to_le_bytes().iter().map(|&q| i32::from(q as i8)).sum();
    let start = V::dots(7 - V::SIGNED_BIAS * sum);
    let signed =
        V::from_dots(V::dot_signed(start, V::signed_bytes(bytes), q), V::dots(0)).to_array();
    let (low, high) = V::nibbles(bytes);
    let (low, high) = (
        V::dot_nibbles(V::dots(-3), low, q),
        V::dot_nibbles(V::dots(0), high, q),
    );
    let nibbles = V::from_dots(low, high).to_array();
    let mut dots = [0; 32];
    for i in 0..16 {
        (dots[i], dots[16 + i]) = (signed[i] as i32, nibbles[i] as i32);
    }
    let (low, high) = V::load_nibbles(bytes);
    let mut bits = [0.0; 16];
    for (i, bits) in bits.iter_mut().enumerate() {
        *bits = f32::from_bits(0x4b40_0000 + u32::from(bytes[i]));
    }
    let floats = [
        V::load_i8(bytes).to_array(),
        low.to_array(),
        high.to_array(),
        V::load(&bits).exp2_bits().to_array(),
    ];
    let x = V::load(x);
    (dots, floats, [x.sum().to_bits(), x.max_lane().to_bits()])
}
simd_kernel! { fn run(bytes: &[u8; 64], q: i32, x: &[f32; 16]) -> All = all; }

#[test]
fn every_isa_computes_what_the_names_say() {
    let mut state = 1u64;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    for round in 0..300 {
        let mut bytes = [0u8; 64];
        let mut q = [0i8; 4];
        let mut x = [0f32; 16];
        bytes.fill_with(|| next() as u8);
        q.fill_with(|| (next() % 255) as i8);
        q = q.map(|q| q.max(-127));
        x.fill_with(|| (next() % 2001) as f32 / 7.0 - 100.0);
        if round % 3 == 0 {
            // The extremes, where 16 bits would saturate.
            bytes.fill(if round % 2 == 0 { 0x80 } else { 0xff });
            q = [127, 127, -127, 127];
        }
        if round % 7 == 0 {
            x[round % 16] = f32::NAN;
        }
        let word = i32::from_le_bytes(q.map(|q| q as u8));
        let want = run(Isa::Scalar, &bytes, word, &x);
        for lane in 0..16 {
            let of = |f: &dyn Fn(u8) -> i32| -> i32 {
                (0..4)
                    .map(|i| f(bytes[4 * lane + i]) * i32::from(q[i]))
                    .sum()
            };
            assert_eq!(want.0[lane], 7 + of(&|b| i32::from(b as i8)));
            assert_eq!(
                want.0[16 + lane],
                of(&|b| i32::from((b & 15) + (b >> 4))) - 3
            );
            assert_eq!(want.1[0][lane], f32::from(bytes[lane] as i8));
            assert_eq!(want.1[1][lane], f32::from(bytes[lane] & 15) - 8.0);
            assert_eq!(want.1[2][lane], f32::from(bytes[lane] >> 4) - 8.0);
        }
        for isa in Isa::available() {
            let got = run(isa, &bytes, word, &x);
            assert_eq!(got.0, want.0, "{isa} dots");
            let bits = |floats: [[f32; 16]; 4]| floats.map(|f| f.map(f32::to_bits));
            assert_eq!(bits(got.1), bits(want.1), "{isa} floats");
            let same = |i: usize| {
                let (got, want) = (f32::from_bits(got.2[i]), f32::from_bits(want.2[i]));
                got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan()
            };
            assert!(same(0) && same(1), "{isa} sum or largest of {x:?}");
        }
    }
}
