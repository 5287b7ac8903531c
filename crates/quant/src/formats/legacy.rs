//! The formats with one half-precision scale for 32 values: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
//!
//! Bytes of one block. `d` is the scale and `m` the offset, both IEEE half, little-endian. Of a byte that holds two
//! nibbles, the low one belongs to value `i` and the high one to value `i + 16`. Bit `i` of the 32-bit word `h` is the
//! fifth bit of value `i`.
//!
//! ```text
//! Q4_0  18  [0..2) d                          [2..18) nibbles   value = d * (n - 8)
//! Q4_1  20  [0..2) d  [2..4) m                [4..20) nibbles   value = d * n + m
//! Q5_0  22  [0..2) d           [2..6) h       [6..22) nibbles   value = d * (n + 16*h - 16)
//! Q5_1  24  [0..2) d  [2..4) m [4..8) h       [8..24) nibbles   value = d * (n + 16*h) + m
//! Q8_0  34  [0..2) d                          [2..34) i8        value = d * q
//! ```
//!
//! The encoders give the same bytes as GGML's reference encoders (tested against fixtures).

use gguf::TensorType;

use super::{Block32, absmax, inverse, read_f16, write_f16};

/// Bytes of a Q4_0 block.
pub(super) const Q4_0_BYTES: usize = TensorType::Q4_0.block_bytes();
/// Bytes of a Q4_1 block.
pub(super) const Q4_1_BYTES: usize = TensorType::Q4_1.block_bytes();
/// Bytes of a Q5_0 block.
pub(super) const Q5_0_BYTES: usize = TensorType::Q5_0.block_bytes();
/// Bytes of a Q5_1 block.
pub(super) const Q5_1_BYTES: usize = TensorType::Q5_1.block_bytes();
/// Bytes of a Q8_0 block.
pub(super) const Q8_0_BYTES: usize = TensorType::Q8_0.block_bytes();

/// Unpacks a Q4_0 block.
pub(super) fn unpack_q4_0(b: &[u8; Q4_0_BYTES], out: &mut Block32) {
    out.d = read_f16(b, 0);
    out.m = 0.0;
    for (i, byte) in b[2..].iter().enumerate() {
        out.q[i] = (byte & 15) as i8 - 8;
        out.q[i + 16] = (byte >> 4) as i8 - 8;
    }
}

/// Unpacks a Q4_1 block.
pub(super) fn unpack_q4_1(b: &[u8; Q4_1_BYTES], out: &mut Block32) {
    out.d = read_f16(b, 0);
    out.m = read_f16(b, 2);
    for (i, byte) in b[4..].iter().enumerate() {
        out.q[i] = (byte & 15) as i8;
        out.q[i + 16] = (byte >> 4) as i8;
    }
}

/// Unpacks a Q5_0 block.
pub(super) fn unpack_q5_0(b: &[u8; Q5_0_BYTES], out: &mut Block32) {
    out.d = read_f16(b, 0);
    out.m = 0.0;
    unpack_5_bits(&b[2..], -16, &mut out.q);
}

/// Unpacks a Q5_1 block.
pub(super) fn unpack_q5_1(b: &[u8; Q5_1_BYTES], out: &mut Block32) {
    out.d = read_f16(b, 0);
    out.m = read_f16(b, 2);
    unpack_5_bits(&b[4..], 0, &mut out.q);
}

/// Unpacks a Q8_0 block.
pub(super) fn unpack_q8_0(b: &[u8; Q8_0_BYTES], out: &mut Block32) {
    out.d = read_f16(b, 0);
    out.m = 0.0;
    for (q, byte) in out.q.iter_mut().zip(&b[2..]) {
        *q = *byte as i8;
    }
}

/// `bits` is the word of fifth bits followed by the 16 bytes of nibbles.
fn unpack_5_bits(bits: &[u8], offset: i8, q: &mut [i8; 32]) {
    let (high, nibbles) = bits.split_at(4);
    for (i, byte) in nibbles.iter().enumerate() {
        let low_fifth = (high[i / 8] >> (i % 8)) & 1;
        let high_fifth = (high[2 + i / 8] >> (i % 8)) & 1;
        q[i] = ((byte & 15) | (low_fifth << 4)) as i8 + offset;
        q[i + 16] = ((byte >> 4) | (high_fifth << 4)) as i8 + offset;
    }
}

/// Encodes a Q4_0 block; `None` if the scale does not fit a half.
pub(super) fn encode_q4_0(x: &[f32; 32], b: &mut [u8; Q4_0_BYTES]) -> Option<()> {
    let d = absmax(x) / -8.0;
    write_f16(b, 0, d)?;
    let q = quantise(x, 0.0, inverse(d), 8.5, 15);
    pack_nibbles(&q, &mut b[2..]);
    Some(())
}

/// Encodes a Q4_1 block; `None` if scale or offset do not fit a half.
pub(super) fn encode_q4_1(x: &[f32; 32], b: &mut [u8; Q4_1_BYTES]) -> Option<()> {
    let (min, max) = min_max(x);
    let d = (max - min) / 15.0;
    write_f16(b, 0, d)?;
    write_f16(b, 2, min)?;
    let q = quantise(x, min, inverse(d), 0.5, 15);
    pack_nibbles(&q, &mut b[4..]);
    Some(())
}

/// Encodes a Q5_0 block; `None` if the scale does not fit a half.
pub(super) fn encode_q5_0(x: &[f32; 32], b: &mut [u8; Q5_0_BYTES]) -> Option<()> {
    let d = absmax(x) / -16.0;
    write_f16(b, 0, d)?;
    let q = quantise(x, 0.0, inverse(d), 16.5, 31);
    pack_5_bits(&q, &mut b[2..]);
    Some(())
}

/// Encodes a Q5_1 block; `None` if scale or offset do not fit a half.
pub(super) fn encode_q5_1(x: &[f32; 32], b: &mut [u8; Q5_1_BYTES]) -> Option<()> {
    let (min, max) = min_max(x);
    let d = (max - min) / 31.0;
    write_f16(b, 0, d)?;
    write_f16(b, 2, min)?;
    let q = quantise(x, min, inverse(d), 0.5, 31);
    pack_5_bits(&q, &mut b[4..]);
    Some(())
}

/// Encodes a Q8_0 block; `None` if the scale does not fit a half.
pub(super) fn encode_q8_0(x: &[f32; 32], b: &mut [u8; Q8_0_BYTES]) -> Option<()> {
    let d = absmax(x).abs() / 127.0;
    write_f16(b, 0, d)?;
    let id = inverse(d);
    for (byte, x) in b[2..].iter_mut().zip(x) {
        // GGML rounds halves away from zero here.
        *byte = (x * id).round().clamp(-127.0, 127.0) as i8 as u8;
    }
    Some(())
}

/// `trunc((x - min) * id + bias)`, limited to `q_max`. The scale used is the one before rounding to a half, as in GGML.
fn quantise(x: &[f32; 32], min: f32, id: f32, bias: f32, q_max: u8) -> [u8; 32] {
    x.map(|x| (((x - min) * id + bias) as u8).min(q_max))
}

fn min_max(x: &[f32; 32]) -> (f32, f32) {
    x.iter()
        .fold((f32::INFINITY, f32::NEG_INFINITY), |(min, max), x| {
            (min.min(*x), max.max(*x))
        })
}

fn pack_nibbles(q: &[u8; 32], nibbles: &mut [u8]) {
    for (i, byte) in nibbles.iter_mut().enumerate() {
        *byte = (q[i] & 15) | (q[i + 16] << 4);
    }
}

fn pack_5_bits(q: &[u8; 32], bits: &mut [u8]) {
    let (high, nibbles) = bits.split_at_mut(4);
    let word = (0..32).fold(0u32, |word, i| word | (u32::from(q[i] >> 4) << i));
    high.copy_from_slice(&word.to_le_bytes());
    pack_nibbles(q, nibbles);
}
