//! IQ2 and IQ3: indices into codebooks of short magnitude vectors, sign bits, and 4-bit scales.
//!
//! Bytes of one block of 256 values; `d` is an IEEE half and all words are little-endian. A *group* is one codebook
//! entry: 8 values in IQ2, 4 values in IQ3. Groups come in order, and so do their signs. A *sub-block* is the range of
//! values under one scale `s`, of 4 bits (the first sub-block of a byte in its low nibble).
//!
//! ```text
//! IQ2_XXS  66  [0..2) d  8 x 8 bytes, one for each 32 values:
//!                        4 bytes: indices of 4 groups; u32: 4 sign indices of 7 bits (lowest first), s in the top 4 bits
//! IQ2_XS   74  [0..2) d  [2..66) 32 x u16: index (9 bits), sign index (7 bits)    [66..74) s, sub-blocks of 16
//! IQ2_S    82  [0..2) d  [2..34) indices, lower 8 bits   [34..66) sign bytes
//!                        [66..74) indices, upper 2 bits: group g at bit 2(g % 4) of byte g / 4   [74..82) s, of 16
//! IQ3_XXS  98  [0..2) d  [2..66) indices
//!                        [66..98) 8 x u32, one for each 32 values: 4 sign indices of 7 bits, s in the top 4 bits
//! IQ3_S   110  [0..2) d  [2..66) indices, lower 8 bits   [66..74) index bit 8: group g at bit g % 8 of byte g / 8
//!                        [74..106) sign bytes            [106..110) s, sub-blocks of 32
//! ```
//!
//! A sign index stands for a byte with an even number of ones; bit `i` of a sign byte makes value `i` of eight negative.
//!
//! The scale is `d * (s + 1/2) / 4` in IQ2, `d * (s + 1/2) / 2` in IQ3_XXS and `d * (2s + 1)` in IQ3_S. All three are
//! the integer `2s + 1` times `d` over a power of two, which is exact: a half divided by 8 is a normal `f32`.

use gguf::TensorType;

use super::{Block256, grids, read_f16};

/// Bytes of an IQ2_XXS block.
pub(super) const IQ2_XXS_BYTES: usize = TensorType::IQ2_XXS.block_bytes();
/// Bytes of an IQ2_XS block.
pub(super) const IQ2_XS_BYTES: usize = TensorType::IQ2_XS.block_bytes();
/// Bytes of an IQ2_S block.
pub(super) const IQ2_S_BYTES: usize = TensorType::IQ2_S.block_bytes();
/// Bytes of an IQ3_XXS block.
pub(super) const IQ3_XXS_BYTES: usize = TensorType::IQ3_XXS.block_bytes();
/// Bytes of an IQ3_S block.
pub(super) const IQ3_S_BYTES: usize = TensorType::IQ3_S.block_bytes();

/// Unpacks an IQ2_XXS block.
pub(super) fn unpack_iq2_xxs(b: &[u8; IQ2_XXS_BYTES], out: &mut Block256) {
    start(out, read_f16(b, 0) / 8.0);
    for (s, bytes) in b[2..].as_chunks::<8>().0.iter().enumerate() {
        let (indices, word) = bytes.split_at(4);
        let word = read_u32(word, 0);
        out.scale[2 * s..2 * s + 2].fill(odd(word >> 28));
        for (g, index) in indices.iter().enumerate() {
            let signs = grids::SIGNS[(word >> (7 * g)) as usize & 127];
            put(out, 4 * s + g, &grids::IQ2_XXS[usize::from(*index)], signs);
        }
    }
}

/// Unpacks an IQ2_XS block.
pub(super) fn unpack_iq2_xs(b: &[u8; IQ2_XS_BYTES], out: &mut Block256) {
    start(out, read_f16(b, 0) / 8.0);
    for (g, word) in b[2..66].as_chunks::<2>().0.iter().enumerate() {
        let word = usize::from(u16::from_le_bytes(*word));
        put(out, g, &grids::IQ2_XS[word & 511], grids::SIGNS[word >> 9]);
    }
    scales_of_16(&b[66..], out);
}

/// Unpacks an IQ2_S block.
pub(super) fn unpack_iq2_s(b: &[u8; IQ2_S_BYTES], out: &mut Block256) {
    start(out, read_f16(b, 0) / 8.0);
    for g in 0..32 {
        let upper = (b[66 + g / 4] >> (2 * (g % 4))) & 3;
        let index = usize::from(b[2 + g]) | usize::from(upper) << 8;
        put(out, g, &grids::IQ2_S[index], b[34 + g]);
    }
    scales_of_16(&b[74..], out);
}

/// Unpacks an IQ3_XXS block.
pub(super) fn unpack_iq3_xxs(b: &[u8; IQ3_XXS_BYTES], out: &mut Block256) {
    start(out, read_f16(b, 0) / 4.0);
    for s in 0..8 {
        let word = read_u32(b, 66 + 4 * s);
        out.scale[2 * s..2 * s + 2].fill(odd(word >> 28));
        for g in 0..4 {
            let signs = grids::SIGNS[(word >> (7 * g)) as usize & 127];
            let first = usize::from(b[2 + 8 * s + 2 * g]);
            let second = usize::from(b[2 + 8 * s + 2 * g + 1]);
            put(out, 8 * s + 2 * g, &grids::IQ3_XXS[first], signs);
            put(out, 8 * s + 2 * g + 1, &grids::IQ3_XXS[second], signs >> 4);
        }
    }
}

/// Unpacks an IQ3_S block.
pub(super) fn unpack_iq3_s(b: &[u8; IQ3_S_BYTES], out: &mut Block256) {
    start(out, read_f16(b, 0));
    for g in 0..64 {
        let upper = (b[66 + g / 8] >> (g % 8)) & 1;
        let index = usize::from(b[2 + g]) | usize::from(upper) << 8;
        put(out, g, &grids::IQ3_S[index], b[74 + g / 2] >> (4 * (g % 2)));
    }
    for s in 0..8 {
        let nibble = (b[106 + s / 2] >> (4 * (s % 2))) & 15;
        out.scale[2 * s..2 * s + 2].fill(odd(nibble.into()));
    }
}

fn start(out: &mut Block256, d: f32) {
    out.d = d;
    out.dmin = 0.0;
    out.min = [0; 16];
}

fn read_u32(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// The integer sub-scale of the stored 4-bit `s`.
fn odd(s: u32) -> i16 {
    2 * (s & 15) as i16 + 1
}

fn scales_of_16(bytes: &[u8], out: &mut Block256) {
    for (pair, byte) in out.scale.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
        *pair = [odd((byte & 15).into()), odd((byte >> 4).into())];
    }
}

/// Writes codebook entry number `group` of the block with the lowest `W` of `signs`.
fn put<const W: usize>(out: &mut Block256, group: usize, magnitudes: &[i8; W], signs: u8) {
    for (i, (q, magnitude)) in out.q[W * group..W * group + W]
        .iter_mut()
        .zip(magnitudes)
        .enumerate()
    {
        // 0 or -1, so that x ^ n - n is x or -x.
        let negative = -((signs >> i & 1) as i8);
        *q = (magnitude ^ negative) - negative;
    }
}
