//! F32, F16 and BF16 rows: little-endian numbers, one after the other, without blocks.
//!
//! ```text
//! F32   [0..4)  f32
//! F16   [0..2)  IEEE half
//! BF16  [0..2)  the upper half of an f32
//! ```
//!
//! Encoding rounds to nearest, ties to even; magnitudes beyond the largest half become infinity, and NaN stays NaN.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Decodes `out.len()` little-endian `f32`.
pub(super) fn decode_f32(bytes: &[u8], out: &mut [f32]) {
    for (out, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *out = f32::from_le_bytes(*b);
    }
}

/// Decodes `out.len()` little-endian halves (exact).
pub(super) fn decode_f16(bytes: &[u8], out: &mut [f32]) {
    for (out, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *out = f16::from_le_bytes(*b).to_f32();
    }
}

/// Decodes `out.len()` little-endian bfloat16 numbers. A shift of the bits, so that a signalling NaN stays as it is.
pub(super) fn decode_bf16(bytes: &[u8], out: &mut [f32]) {
    for (out, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *out = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
    }
}

/// Encodes as little-endian `f32`.
pub(super) fn encode_f32(values: &[f32], out: &mut [u8]) {
    for (b, x) in out.as_chunks_mut::<4>().0.iter_mut().zip(values) {
        *b = x.to_le_bytes();
    }
}

/// Encodes as little-endian halves.
pub(super) fn encode_f16(values: &[f32], out: &mut [u8]) {
    // Several at a time: a call for each would cost more than the conversion.
    let mut halves = [f16::ZERO; 64];
    for (out, values) in out.chunks_mut(128).zip(values.chunks(64)) {
        let halves = &mut halves[..values.len()];
        halves.convert_from_f32_slice(values);
        for (b, half) in out.as_chunks_mut::<2>().0.iter_mut().zip(halves) {
            *b = half.to_le_bytes();
        }
    }
}

/// Encodes as little-endian bfloat16 numbers.
pub(super) fn encode_bf16(values: &[f32], out: &mut [u8]) {
    for (b, x) in out.as_chunks_mut::<2>().0.iter_mut().zip(values) {
        *b = bf16::from_f32(*x).to_le_bytes();
    }
}
