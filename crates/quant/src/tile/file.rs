//! Codes and header fields in the order of the files.

use gguf::TensorType;

/// A block's header bytes, in the order of [`super::Layout`]'s fields.
pub(super) struct Header {
    bytes: [u8; 32],
    len: usize,
}

impl Header {
    fn of(parts: &[&[u8]]) -> Self {
        let mut h = Self {
            bytes: [0; 32],
            len: 0,
        };
        for p in parts {
            h.bytes[h.len..h.len + p.len()].copy_from_slice(p);
            h.len += p.len();
        }
        h
    }
    pub(super) fn len(&self) -> usize {
        self.len
    }
    pub(super) fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Offset of the nibbles and of the high bits in a legacy block (values i and i + 16 share a byte).
fn legacy(ty: TensorType) -> Option<(usize, Option<usize>)> {
    Some(match ty {
        TensorType::Q4_0 | TensorType::IQ4_NL => (2, None),
        TensorType::Q4_1 => (4, None),
        TensorType::Q5_0 => (6, Some(2)),
        TensorType::Q5_1 => (8, Some(4)),
        TensorType::MXFP4 => (1, None),
        _ => return None,
    })
}

/// Splits a file's block into its codes (unsigned, in value order) and its header.
pub(super) fn split(ty: TensorType, b: &[u8], codes: &mut [u8]) -> Header {
    if let Some((qs, high)) = legacy(ty) {
        for i in 0..16 {
            codes[i] = b[qs + i] & 15;
            codes[i + 16] = b[qs + i] >> 4;
        }
        if let Some(at) = high {
            let bits = u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
            for (i, c) in codes.iter_mut().enumerate() {
                *c |= ((bits >> i & 1) << 4) as u8;
            }
        }
        return Header::of(&[&b[..high.unwrap_or(qs)]]);
    }
    // Codes come in runs of consecutive bytes with one shift each, in every format.
    for (run, codes) in codes.chunks_exact_mut(16).enumerate() {
        let [(lo, lo_shift, lo_bits), (hi, hi_shift, hi_bits)] = pieces(ty, 16 * run);
        let (lo, lo_mask) = (&b[lo..lo + 16], (1 << lo_bits) - 1);
        let (hi, hi_mask) = (&b[hi..hi + 16], ((1u16 << hi_bits) - 1) as u8);
        for ((code, lo), hi) in codes.iter_mut().zip(lo).zip(hi) {
            *code = lo >> lo_shift & lo_mask | (hi >> hi_shift & hi_mask) << lo_bits;
        }
    }
    match ty {
        TensorType::Q2_K => Header::of(&[&b[..16], &b[80..84]]),
        TensorType::Q3_K => Header::of(&[&b[96..108], &b[108..110]]),
        TensorType::Q4_K | TensorType::Q5_K => Header::of(&[&b[..16]]),
        TensorType::Q6_K => Header::of(&[&b[192..208], &b[208..210]]),
        TensorType::IQ4_XS => Header::of(&[&b[..8]]),
        _ => unreachable!("{} has no planes", ty.name()),
    }
}

/// Where code `i` of a 256-block lies: up to two (byte, shift, bits) pieces, low bits first.
fn pieces(ty: TensorType, i: usize) -> [(usize, u32, u32); 2] {
    const NONE: (usize, u32, u32) = (0, 0, 0);
    // Most formats store 32 values of each quarter of a byte (or half) in 32 consecutive bytes.
    let (half, in_half) = (i / 128, i % 128);
    match ty {
        TensorType::Q2_K => [
            (16 + 32 * half + in_half % 32, 2 * (in_half / 32) as u32, 2),
            NONE,
        ],
        TensorType::Q3_K => [
            (32 + 32 * half + in_half % 32, 2 * (in_half / 32) as u32, 2),
            (i % 32, (i / 32) as u32, 1),
        ],
        TensorType::Q4_K => [
            (16 + 32 * (i / 64) + i % 32, 4 * (i / 32 % 2) as u32, 4),
            NONE,
        ],
        TensorType::Q5_K => [
            (48 + 32 * (i / 64) + i % 32, 4 * (i / 32 % 2) as u32, 4),
            (16 + i % 32, (i / 32) as u32, 1),
        ],
        TensorType::Q6_K => [
            (64 * half + in_half % 64, 4 * (in_half / 64) as u32, 4),
            (128 + 32 * half + in_half % 32, 2 * (in_half / 32) as u32, 2),
        ],
        TensorType::IQ4_XS => [
            (8 + 16 * (i / 32) + i % 16, 4 * (i / 16 % 2) as u32, 4),
            NONE,
        ],
        _ => unreachable!("{} has no planes", ty.name()),
    }
}

/// The inverse of [`split`].
pub(super) fn join(ty: TensorType, header: &[u8], codes: &[u8], b: &mut [u8]) {
    b.fill(0);
    if let Some((qs, high)) = legacy(ty) {
        b[..header.len()].copy_from_slice(header);
        let mut bits = 0u32;
        for i in 0..16 {
            b[qs + i] = codes[i] & 15 | (codes[i + 16] & 15) << 4;
        }
        if let Some(at) = high {
            for (i, c) in codes.iter().enumerate() {
                bits |= u32::from(c >> 4) << i;
            }
            b[at..at + 4].copy_from_slice(&bits.to_le_bytes());
        }
        return;
    }
    for (i, c) in codes.iter().enumerate() {
        let [(lo, lo_shift, lo_bits), (hi, hi_shift, hi_bits)] = pieces(ty, i);
        b[lo] |= (c & ((1 << lo_bits) - 1)) << lo_shift;
        if hi_bits > 0 {
            b[hi] |= (c >> lo_bits) << hi_shift;
        }
    }
    match ty {
        TensorType::Q2_K => {
            b[..16].copy_from_slice(&header[..16]);
            b[80..84].copy_from_slice(&header[16..]);
        }
        TensorType::Q3_K => b[96..110].copy_from_slice(header),
        TensorType::Q4_K | TensorType::Q5_K => b[..16].copy_from_slice(header),
        TensorType::Q6_K => b[192..210].copy_from_slice(header),
        TensorType::IQ4_XS => b[..8].copy_from_slice(header),
        _ => unreachable!("{} has no planes", ty.name()),
    }
}
