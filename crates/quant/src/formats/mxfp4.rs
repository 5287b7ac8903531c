//! MXFP4: 32 numbers of 4 bits (sign, 2 exponent bits, 1 mantissa bit) under one power-of-two scale.
//!
//! ```text
//! MXFP4  17  [0] e: the scale 2^(e - 127)   [1..17) nibbles, low one value i, high one value i + 16
//! ```
//!
//! The magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 are doubled to be integers, and the scale is halved: `d = 2^(e - 128)`.
//! The two smallest scales are subnormal and exact. `e = 255`, which the OCP standard reserves for NaN, is not
//! special in GGML's files: it is the halved scale 2^127, whose larger products overflow to infinity.

use gguf::TensorType;

use super::{Block32, absmax};

/// Bytes of an MXFP4 block.
pub(super) const MXFP4_BYTES: usize = TensorType::MXFP4.block_bytes();

/// The 16 numbers, doubled. Code 8 is a negative zero in the standard and an integer zero here.
pub(crate) const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// `2^(e - 128)`.
#[inline]
pub(crate) fn half_scale(e: u8) -> f32 {
    f32::from_bits(match e {
        0 => 1 << 21,
        1 => 1 << 22,
        _ => u32::from(e - 1) << 23,
    })
}

/// Unpacks an MXFP4 block.
pub(super) fn unpack(b: &[u8; MXFP4_BYTES], out: &mut Block32) {
    out.d = half_scale(b[0]);
    out.m = 0.0;
    for (i, byte) in b[1..].iter().enumerate() {
        out.q[i] = DOUBLED[usize::from(byte & 15)];
        out.q[i + 16] = DOUBLED[usize::from(byte >> 4)];
    }
}

/// Encodes an MXFP4 block: the scale puts the largest magnitude between 4 and 8, and each value takes the nearest
/// number (so that what lies beyond 6 becomes 6). Every finite block can be encoded.
pub(super) fn encode(x: &[f32; 32], b: &mut [u8; MXFP4_BYTES]) {
    // The biased exponent is floor(log2) + 127 for normal numbers; below 2^-125 the smallest scale serves.
    let exponent = (absmax(x).abs().to_bits() >> 23) as u8;
    b[0] = exponent.saturating_sub(2);
    let d = half_scale(b[0]);
    for i in 0..16 {
        b[1 + i] = nearest(x[i], d) | (nearest(x[i + 16], d) << 4);
    }
}

/// Code of the number nearest to `x`; the lower code on a tie.
fn nearest(x: f32, d: f32) -> u8 {
    let mut best = (f32::INFINITY, 0);
    for (code, q) in DOUBLED.iter().enumerate() {
        let error = (d * f32::from(*q) - x).abs();
        if error < best.0 {
            best = (error, code as u8);
        }
    }
    best.1
}
