//! IQ4_NL and IQ4_XS: 4-bit indices into one table of 16 unevenly spaced integers.
//!
//! Bytes of one block (`d` is an IEEE half, little-endian, like all words here). IQ4_XS has a signed 6-bit scale for
//! each 32 values; the 16 bytes of nibbles of those 32 hold value `i` low and value `i + 16` high, as IQ4_NL's do.
//!
//! ```text
//! IQ4_NL   18  [0..2) d  [2..18) nibbles
//! IQ4_XS  136  [0..2) d  [2..4) scales, upper 2 bits: sub-block s at bit 2s
//!              [4..8) scales, lower 4 bits: sub-block s in nibble s (low first)   [8..136) nibbles, 16 bytes a sub-block
//!              value = d * (scale - 32) * table[n]
//! ```

use gguf::TensorType;

use super::{Block32, Block256, absmax, inverse, read_f16, symmetric_scales, write_f16};

/// Bytes of an IQ4_NL block.
pub(super) const IQ4_NL_BYTES: usize = TensorType::IQ4_NL.block_bytes();
/// Bytes of an IQ4_XS block.
pub(super) const IQ4_XS_BYTES: usize = TensorType::IQ4_XS.block_bytes();

/// The integers that the 4-bit codes stand for, in ascending order.
pub(crate) const TABLE: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Unpacks an IQ4_NL block.
pub(super) fn unpack_nl(b: &[u8; IQ4_NL_BYTES], out: &mut Block32) {
    out.d = read_f16(b, 0);
    out.m = 0.0;
    unpack_nibbles(&b[2..], &mut out.q);
}

/// Unpacks an IQ4_XS block.
pub(super) fn unpack_xs(b: &[u8; IQ4_XS_BYTES], out: &mut Block256) {
    out.d = read_f16(b, 0);
    out.dmin = 0.0;
    out.min = [0; 16];
    let high = u16::from_le_bytes([b[2], b[3]]);
    for s in 0..8 {
        let low = (b[4 + s / 2] >> (4 * (s % 2))) & 15;
        let scale = i16::from(low) | ((high >> (2 * s) & 3) << 4) as i16;
        out.scale[2 * s..2 * s + 2].fill(scale - 32);
        unpack_nibbles(&b[8 + 16 * s..24 + 16 * s], &mut out.q[32 * s..32 * s + 32]);
    }
}

fn unpack_nibbles(nibbles: &[u8], q: &mut [i8]) {
    for (i, byte) in nibbles.iter().enumerate() {
        q[i] = TABLE[usize::from(byte & 15)];
        q[i + 16] = TABLE[usize::from(byte >> 4)];
    }
}

/// Encodes an IQ4_NL block: nearest table values under the scale that maps the largest magnitude to -127, then the
/// scale that fits those best, larger values weighing more. `None` if the scale does not fit a half.
pub(super) fn encode_nl(x: &[f32; 32], b: &mut [u8; IQ4_NL_BYTES]) -> Option<()> {
    let d = absmax(x) / f32::from(TABLE[0]);
    // Below the smallest half nothing is left to fit (and 1 / d might overflow).
    write_f16(b, 0, d)?;
    let id = if read_f16(b, 0) == 0.0 {
        0.0
    } else {
        inverse(d)
    };
    let (mut num, mut den) = (0f32, 0f32);
    for i in 0..16 {
        let (t, u) = (x[i] * id, x[i + 16] * id);
        let (low, high) = (nearest(t), nearest(u));
        b[2 + i] = low | (high << 4);
        for (t, code) in [(t, low), (u, high)] {
            let q = f32::from(TABLE[usize::from(code)]);
            num += t * t * t * q;
            den += t * t * q * q;
        }
    }
    if den > 0.0 {
        write_f16(b, 0, d * (num / den))?;
    }
    Some(())
}

/// Encodes an IQ4_XS block, without a search for better scales. `None` if the scale does not fit a half.
pub(super) fn encode_xs(x: &[f32; 256], b: &mut [u8; IQ4_XS_BYTES]) -> Option<()> {
    let scales = symmetric_scales(x, 32, f32::from(TABLE[0]), -32.0, 31.0)?;
    b.fill(0);
    write_f16(b, 0, scales.d)?;
    let mut high = 0u16;
    for s in 0..8 {
        let stored = (scales.sub[s] + 32) as u16;
        b[4 + s / 2] |= ((stored & 15) << (4 * (s % 2))) as u8;
        high |= (stored >> 4) << (2 * s);
        let id = inverse(scales.d * scales.sub[s] as f32);
        let x = &x[32 * s..32 * s + 32];
        for i in 0..16 {
            b[8 + 16 * s + i] = nearest(x[i] * id) | (nearest(x[i + 16] * id) << 4);
        }
    }
    b[2..4].copy_from_slice(&high.to_le_bytes());
    Some(())
}

/// Code of the table value nearest to `t`; the lower code on a tie.
fn nearest(t: f32) -> u8 {
    let above = TABLE.partition_point(|q| f32::from(*q) < t);
    match above {
        0 => 0,
        16 => 15,
        _ if t - f32::from(TABLE[above - 1]) <= f32::from(TABLE[above]) - t => above as u8 - 1,
        _ => above as u8,
    }
}
