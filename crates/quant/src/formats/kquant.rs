//! The K-quants: super-blocks of 256 values, with small integer scales (and minima) for sub-blocks.
//!
//! Bytes of one block; `d` and `dmin` are IEEE halves, little-endian. `r` is the number of a *run* of 32 values (0..8)
//! and `l` the place in it (0..32), so that value `32 r + l` is meant.
//!
//! ```text
//! Q2_K   84  sub-blocks of 16: value = d * s * q - dmin * m
//!            [0..16) s low nibble, m high nibble   [16..80) q: byte 32(r / 4) + l, bits 2(r % 4)..
//!            [80..82) d   [82..84) dmin
//! Q3_K  110  sub-blocks of 16: value = d * (s - 32) * (q + 4h - 4)
//!            [0..32) h: byte l, bit r              [32..96) q: as in Q2_K
//!            [96..108) s, 6 bits: low 4 of s[j] in nibble j / 8 of byte j % 8; upper 2 in byte 8 + j % 4 at bit 2(j / 4)
//!            [108..110) d
//! Q4_K  144  sub-blocks of 32: value = d * s * q - dmin * m
//!            [0..2) d  [2..4) dmin  [4..16) s and m, 6 bits  [16..144) q: byte 32(r / 2) + l, nibble r % 2
//! Q5_K  176  sub-blocks of 32: value = d * s * (q + 16h) - dmin * m
//!            [0..2) d  [2..4) dmin  [4..16) s and m, 6 bits  [16..48) h: byte l, bit r   [48..176) q: as in Q4_K
//! Q6_K  210  sub-blocks of 16: value = d * s * (q + 16h - 32), s an i8
//!            [0..128) q: byte 64(r / 4) + 32(r % 2) + l, nibble (r % 4) / 2
//!            [128..192) h: byte 32(r / 4) + l, bits 2(r % 4)..   [192..208) s   [208..210) d
//! ```
//!
//! The 12 bytes of 6-bit `s` and `m` (sub-blocks a to h; upper case are scales, lower case minima):
//!
//! ```text
//! byte  0 EEAAAAAA   1 FFBBBBBB   2 GGCCCCCC   3 HHDDDDDD     upper two bits of E..H on top of A..D
//!       4 eeaaaaaa   5 ffbbbbbb   6 ggcccccc   7 hhdddddd     the same for the minima
//!       8 eeeeEEEE   9 ffffFFFF  10 ggggGGGG  11 hhhhHHHH     lower four bits of both
//! ```
//!
//! The encoders take scales and minima from the extreme values of each sub-block. They are sound (every value lands
//! near itself) but do not search for the scales with the least error, as the usual conversion tools do.

use gguf::TensorType;

use super::{Block256, inverse, read_f16, round_f16, symmetric_scales, write_f16};

/// Bytes of a Q2_K block.
pub(super) const Q2_K_BYTES: usize = TensorType::Q2_K.block_bytes();
/// Bytes of a Q3_K block.
pub(super) const Q3_K_BYTES: usize = TensorType::Q3_K.block_bytes();
/// Bytes of a Q4_K block.
pub(super) const Q4_K_BYTES: usize = TensorType::Q4_K.block_bytes();
/// Bytes of a Q5_K block.
pub(super) const Q5_K_BYTES: usize = TensorType::Q5_K.block_bytes();
/// Bytes of a Q6_K block.
pub(super) const Q6_K_BYTES: usize = TensorType::Q6_K.block_bytes();

/// Unpacks a Q2_K block.
pub(super) fn unpack_q2_k(b: &[u8; Q2_K_BYTES], out: &mut Block256) {
    out.d = read_f16(b, 80);
    out.dmin = read_f16(b, 82);
    for (j, byte) in b[..16].iter().enumerate() {
        out.scale[j] = i16::from(byte & 15);
        out.min[j] = byte >> 4;
    }
    for (r, run) in runs(&mut out.q) {
        for (q, byte) in run.iter_mut().zip(&b[16 + 32 * (r / 4)..]) {
            *q = ((byte >> (2 * (r % 4))) & 3) as i8;
        }
    }
}

/// Unpacks a Q3_K block.
pub(super) fn unpack_q3_k(b: &[u8; Q3_K_BYTES], out: &mut Block256) {
    out.d = read_f16(b, 108);
    no_min(out);
    for j in 0..16 {
        let low = (b[96 + j % 8] >> (4 * (j / 8))) & 15;
        let high = (b[104 + j % 4] >> (2 * (j / 4))) & 3;
        out.scale[j] = i16::from(low | (high << 4)) - 32;
    }
    for (r, run) in runs(&mut out.q) {
        for (l, q) in run.iter_mut().enumerate() {
            let low = (b[32 + 32 * (r / 4) + l] >> (2 * (r % 4))) & 3;
            let high = (b[l] >> r) & 1;
            *q = (low | (high << 2)) as i8 - 4;
        }
    }
}

/// Unpacks a Q4_K block.
pub(super) fn unpack_q4_k(b: &[u8; Q4_K_BYTES], out: &mut Block256) {
    out.d = read_f16(b, 0);
    out.dmin = read_f16(b, 2);
    unpack_6_bits(&b[4..16], out);
    for (r, run) in runs(&mut out.q) {
        for (q, byte) in run.iter_mut().zip(&b[16 + 32 * (r / 2)..]) {
            *q = ((byte >> (4 * (r % 2))) & 15) as i8;
        }
    }
}

/// Unpacks a Q5_K block.
pub(super) fn unpack_q5_k(b: &[u8; Q5_K_BYTES], out: &mut Block256) {
    out.d = read_f16(b, 0);
    out.dmin = read_f16(b, 2);
    unpack_6_bits(&b[4..16], out);
    for (r, run) in runs(&mut out.q) {
        for (l, q) in run.iter_mut().enumerate() {
            let low = (b[48 + 32 * (r / 2) + l] >> (4 * (r % 2))) & 15;
            let high = (b[16 + l] >> r) & 1;
            *q = (low | (high << 4)) as i8;
        }
    }
}

/// Unpacks a Q6_K block.
pub(super) fn unpack_q6_k(b: &[u8; Q6_K_BYTES], out: &mut Block256) {
    out.d = read_f16(b, 208);
    no_min(out);
    for j in 0..16 {
        out.scale[j] = i16::from(b[192 + j] as i8);
    }
    for (r, run) in runs(&mut out.q) {
        for (l, q) in run.iter_mut().enumerate() {
            let low = (b[64 * (r / 4) + 32 * (r % 2) + l] >> (4 * (r % 4 / 2))) & 15;
            let high = (b[128 + 32 * (r / 4) + l] >> (2 * (r % 4))) & 3;
            *q = (low | (high << 4)) as i8 - 32;
        }
    }
}

/// The eight runs of 32 values with their numbers.
fn runs<T>(q: &mut [T; 256]) -> impl Iterator<Item = (usize, &mut [T; 32])> {
    q.as_chunks_mut::<32>().0.iter_mut().enumerate()
}

fn no_min(out: &mut Block256) {
    out.dmin = 0.0;
    out.min = [0; 16];
}

fn unpack_6_bits(b: &[u8], out: &mut Block256) {
    for s in 0..4 {
        let (upper_s, upper_m, lower) = (b[s], b[4 + s], b[8 + s]);
        fill_pair(out, s, upper_s & 63, upper_m & 63);
        fill_pair(
            out,
            s + 4,
            (lower & 15) | ((upper_s >> 6) << 4),
            (lower >> 4) | ((upper_m >> 6) << 4),
        );
    }
}

/// Scale and minimum of sub-block `s` of 32, for both its halves of 16.
fn fill_pair(out: &mut Block256, s: usize, scale: u8, min: u8) {
    out.scale[2 * s..2 * s + 2].fill(scale.into());
    out.min[2 * s..2 * s + 2].fill(min);
}

fn pack_6_bits(scale: &[u8; 16], min: &[u8; 16], b: &mut [u8]) {
    for s in 0..4 {
        b[s] = scale[s] | ((scale[s + 4] >> 4) << 6);
        b[4 + s] = min[s] | ((min[s + 4] >> 4) << 6);
        b[8 + s] = (scale[s + 4] & 15) | ((min[s + 4] & 15) << 4);
    }
}

/// Encodes a Q2_K block; `None` if a scale does not fit a half.
pub(super) fn encode_q2_k(x: &[f32; 256], b: &mut [u8; Q2_K_BYTES]) -> Option<()> {
    let a = affine(x, 16, 3.0, 15.0)?;
    b.fill(0);
    write_f16(b, 80, a.d)?;
    write_f16(b, 82, a.dmin)?;
    for (j, byte) in b[..16].iter_mut().enumerate() {
        *byte = a.scale[j] | (a.min[j] << 4);
    }
    pack_2_bits(&a.q, &mut b[16..80]);
    Some(())
}

/// Encodes a Q3_K block; `None` if the scale does not fit a half.
pub(super) fn encode_q3_k(x: &[f32; 256], b: &mut [u8; Q3_K_BYTES]) -> Option<()> {
    let (d, scale, q) = symmetric(x, -4.0, 3.0, -32.0, 31.0)?;
    b.fill(0);
    write_f16(b, 108, d)?;
    for (j, scale) in scale.iter().enumerate() {
        let stored = (scale + 32) as u8;
        b[96 + j % 8] |= (stored & 15) << (4 * (j / 8));
        b[104 + j % 4] |= (stored >> 4) << (2 * (j / 4));
    }
    let stored = q.map(|q| (q + 4) as u8);
    for (i, q) in stored.iter().enumerate() {
        b[i % 32] |= (q >> 2) << (i / 32);
    }
    pack_2_bits(&stored.map(|q| q & 3), &mut b[32..96]);
    Some(())
}

/// Encodes a Q4_K block; `None` if a scale does not fit a half.
pub(super) fn encode_q4_k(x: &[f32; 256], b: &mut [u8; Q4_K_BYTES]) -> Option<()> {
    let a = affine(x, 32, 15.0, 63.0)?;
    write_f16(b, 0, a.d)?;
    write_f16(b, 2, a.dmin)?;
    pack_6_bits(&a.scale, &a.min, &mut b[4..16]);
    pack_4_bits(&a.q, &mut b[16..]);
    Some(())
}

/// Encodes a Q5_K block; `None` if a scale does not fit a half.
pub(super) fn encode_q5_k(x: &[f32; 256], b: &mut [u8; Q5_K_BYTES]) -> Option<()> {
    let a = affine(x, 32, 31.0, 63.0)?;
    b.fill(0);
    write_f16(b, 0, a.d)?;
    write_f16(b, 2, a.dmin)?;
    pack_6_bits(&a.scale, &a.min, &mut b[4..16]);
    for (i, q) in a.q.iter().enumerate() {
        b[16 + i % 32] |= (q >> 4) << (i / 32);
    }
    pack_4_bits(&a.q, &mut b[48..]);
    Some(())
}

/// Encodes a Q6_K block; `None` if the scale does not fit a half.
pub(super) fn encode_q6_k(x: &[f32; 256], b: &mut [u8; Q6_K_BYTES]) -> Option<()> {
    let (d, scale, q) = symmetric(x, -32.0, 31.0, -128.0, 127.0)?;
    b.fill(0);
    write_f16(b, 208, d)?;
    for (byte, scale) in b[192..208].iter_mut().zip(scale) {
        *byte = scale as i8 as u8;
    }
    for (i, q) in q.iter().enumerate() {
        let (r, l) = (i / 32, i % 32);
        let stored = (q + 32) as u8;
        b[64 * (r / 4) + 32 * (r % 2) + l] |= (stored & 15) << (4 * (r % 4 / 2));
        b[128 + 32 * (r / 4) + l] |= (stored >> 4) << (2 * (r % 4));
    }
    Some(())
}

fn pack_2_bits(q: &[u8; 256], b: &mut [u8]) {
    for (i, q) in q.iter().enumerate() {
        let (r, l) = (i / 32, i % 32);
        b[32 * (r / 4) + l] |= q << (2 * (r % 4));
    }
}

fn pack_4_bits(q: &[u8; 256], b: &mut [u8]) {
    for (pair, bytes) in q.as_chunks::<64>().0.iter().zip(b.as_chunks_mut::<32>().0) {
        for (l, byte) in bytes.iter_mut().enumerate() {
            *byte = (pair[l] & 15) | (pair[l + 32] << 4);
        }
    }
}

/// A block under `value = d * scale * q - dmin * min`. Of scales and minima as many count as there are sub-blocks.
struct Affine {
    q: [u8; 256],
    scale: [u8; 16],
    min: [u8; 16],
    d: f32,
    dmin: f32,
}

/// Quantises to `0..=q_max` between the smallest value (or 0, as minima have no sign) and the largest of each sub-block.
/// `None` if `d` or `dmin` do not fit a half.
fn affine(x: &[f32; 256], width: usize, q_max: f32, scale_max: f32) -> Option<Affine> {
    let (mut scales, mut mins) = ([0f32; 16], [0f32; 16]);
    for (j, x) in x.chunks_exact(width).enumerate() {
        let low = x.iter().copied().fold(0.0, f32::min);
        let high = x.iter().copied().fold(low, f32::max);
        scales[j] = (high - low) / q_max;
        mins[j] = -low;
    }
    let largest = |v: &[f32; 16]| v.iter().copied().fold(0.0, f32::max);
    let d = round_f16(largest(&scales) / scale_max)?;
    let dmin = round_f16(largest(&mins) / scale_max)?;
    let (id, idmin) = (inverse(d), inverse(dmin));
    let scale = scales.map(|s| (s * id).round().min(scale_max) as u8);
    let min = mins.map(|m| (m * idmin).round().min(scale_max) as u8);
    let mut q = [0; 256];
    for (i, (q, x)) in q.iter_mut().zip(x).enumerate() {
        let j = i / width;
        let id = inverse(d * f32::from(scale[j]));
        let offset = dmin * f32::from(min[j]);
        *q = ((x + offset) * id).round().clamp(0.0, q_max) as u8;
    }
    Some(Affine {
        q,
        scale,
        min,
        d,
        dmin,
    })
}

/// Quantises to `q_min..=q_max` under signed scales for sub-blocks of 16. `None` if `d` does not fit a half.
fn symmetric(
    x: &[f32; 256],
    q_min: f32,
    q_max: f32,
    scale_min: f32,
    scale_max: f32,
) -> Option<(f32, [i16; 16], [i8; 256])> {
    let scales = symmetric_scales(x, 16, q_min, scale_min, scale_max)?;
    let mut q = [0; 256];
    for (i, (q, x)) in q.iter_mut().zip(x).enumerate() {
        let id = inverse(scales.d * f32::from(scales.sub[i / 16]));
        *q = (x * id).round().clamp(q_min, q_max) as i8;
    }
    Some((scales.d, scales.sub, q))
}
