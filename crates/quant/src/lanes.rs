//! From a tile's block to integers in lanes: the unpacker of each format, in the shape that vector code wants.
//!
//! A run of 32 values of 16 rows becomes 8 groups of 64 bytes, `[group][row][value in group]`: one 512-bit register a
//! group. Codes are unsigned, `code = q + BIAS`; a kernel that multiplies codes subtracts `BIAS * sum(activations)`,
//! which is exact. The loops are written so that a compiler vectorises them under any target feature; the generic
//! functions are `inline(always)` so that they are compiled with the features of the kernel that calls them.

use crate::formats;
use crate::tile::{Layout, MAX_BLOCK_BYTES, ROWS};
use gguf::TensorType;

/// Codes of 32 values of 16 rows: `[8 groups][16 rows][4 values]`.
pub type Run = [u8; 512];

/// One `f32` a row of a tile.
pub type RowF32 = [f32; ROWS];

/// One integer a row of a tile.
pub type RowI32 = [i32; ROWS];

/// A format of class `Block32`.
pub trait Unpack32 {
    /// The format.
    const TY: TensorType;
    /// What codes have been raised by.
    const BIAS: i32;
    /// Bits a code.
    const BITS: u32;
    /// Codes of a block of a full tile.
    fn codes(block: &[u8], out: &mut Run);
    /// Scale of each row.
    fn scales(block: &[u8], out: &mut RowF32);
    /// Offset of each row; not called for formats without one.
    fn offsets(block: &[u8], out: &mut RowF32);
}

/// Sub-scales or sub-minima of a block: one integer for each 16 values of each row.
pub type Subs = [RowI32; 16];

/// A format of class `Block256`.
pub trait Unpack256 {
    /// The format.
    const TY: TensorType;
    /// What codes have been raised by.
    const BIAS: i32;
    /// Bits a code.
    const BITS: u32;
    /// Whether sub-blocks have 32 values (else 16).
    const SUB32: bool;
    /// Codes of run `run` (of 8) of a block of a full tile.
    fn codes(block: &[u8], run: usize, out: &mut Run);
    /// Integer scales and, for formats with minima, integer minima.
    fn subs(block: &[u8], scale: &mut Subs, min: &mut Subs);
    /// Factor of the scales and, for formats with minima, of the minima.
    fn factors(block: &[u8], d: &mut RowF32, dmin: &mut RowF32);
}

/// Half to single precision, exact, subnormals, infinities and NaNs included, without branches.
///
/// No step has a subnormal operand: processors take a hundred cycles for those, and scales of super-blocks are often
/// subnormal halves.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff);
    let subnormal = (magnitude as i32 as f32 * f32::from_bits((127 - 24) << 23)).to_bits();
    let normal = (magnitude << 13) + (112 << 23);
    let special = 0x7f80_0000 | magnitude << 13;
    f32::from_bits(
        sign | match magnitude {
            0x7c00.. => special,
            0x0400.. => normal,
            _ => subnormal,
        },
    )
}

#[inline(always)]
fn halves(bytes: &[u8], out: &mut RowF32) {
    let bytes: &[u8; 2 * ROWS] = bytes[..2 * ROWS].try_into().expect("16 halves");
    for (r, out) in out.iter_mut().enumerate() {
        *out = f16_to_f32(u16::from_le_bytes([bytes[2 * r], bytes[2 * r + 1]]));
    }
}

#[inline(always)]
fn nibbles(plane: &[u8], out: &mut Run) {
    let plane: &[u8; 256] = plane[..256].try_into().expect("4 words of 16 rows");
    let (low, high) = out.split_at_mut(256);
    for i in 0..256 {
        low[i] = plane[i] & 15;
        high[i] = plane[i] >> 4;
    }
}

/// Adds `bits` (1 or 2) high bits a code, above bit 4 or (three-bit codes) above bit 2.
#[inline(always)]
fn add_high(plane: &[u8], bits: usize, low_bits: u32, out: &mut Run) {
    let per_word = 8 / bits;
    let mask = (1u8 << bits) - 1;
    for (group, out) in out.chunks_exact_mut(64).enumerate() {
        let word = &plane[64 * (group / per_word)..][..64];
        let shift = (bits * (group % per_word)) as u32;
        for (out, word) in out.iter_mut().zip(word) {
            *out |= (word >> shift & mask) << low_bits;
        }
    }
}

#[inline(always)]
fn two_bits(plane: &[u8], out: &mut Run) {
    for (group, out) in out.chunks_exact_mut(64).enumerate() {
        let word = &plane[64 * (group / 4)..][..64];
        let shift = 2 * (group % 4) as u32;
        for (out, word) in out.iter_mut().zip(word) {
            *out = word >> shift & 3;
        }
    }
}

#[inline(always)]
fn look_up(table: &[i8; 16], bias: u8, out: &mut Run) {
    for code in out.iter_mut() {
        *code = (table[usize::from(*code & 15)] as u8).wrapping_add(bias);
    }
}

macro_rules! format32 {
    ($(#[$doc:meta])* $name:ident, bias $bias:expr, bits $bits:expr, |$b:ident, $out:ident| $codes:block, d $d:expr, m $m:expr) => {
        $(#[$doc])*
        #[allow(non_camel_case_types)]
        #[derive(Debug)]
        pub enum $name {}
        impl Unpack32 for $name {
            const TY: TensorType = TensorType::$name;
            const BIAS: i32 = $bias;
            const BITS: u32 = $bits;
            #[inline(always)]
            fn codes($b: &[u8], $out: &mut Run) $codes
            #[inline(always)]
            fn scales(block: &[u8], out: &mut RowF32) {
                let scale: fn(&[u8], &mut RowF32) = $d;
                scale(block, out);
            }
            #[inline(always)]
            fn offsets(block: &[u8], out: &mut RowF32) {
                let at: Option<usize> = $m;
                if let Some(at) = at { halves(&block[at..], out) }
            }
        }
    };
}

format32!(/// 4 bits, one scale.
    Q4_0, bias 8, bits 4, |b, out| { nibbles(&b[32..], out) }, d halves, m None);
format32!(/// 4 bits, scale and offset.
    Q4_1, bias 0, bits 4, |b, out| { nibbles(&b[64..], out) }, d halves, m Some(32));
format32!(/// 5 bits, one scale.
    Q5_0, bias 16, bits 5, |b, out| { nibbles(&b[96..], out); add_high(&b[32..96], 1, 4, out) }, d halves, m None);
format32!(/// 5 bits, scale and offset.
    Q5_1, bias 0, bits 5, |b, out| { nibbles(&b[128..], out); add_high(&b[64..128], 1, 4, out) }, d halves, m Some(32));
format32!(/// 8 bits, one scale.
    Q8_0, bias 128, bits 8, |b, out| {
        for (out, code) in out.iter_mut().zip(&b[32..544]) {
            *out = code ^ 0x80;
        }
    }, d halves, m None);
format32!(/// 4-bit index into a table of 8-bit values, one scale.
    IQ4_NL, bias 128, bits 8, |b, out| { nibbles(&b[32..], out); look_up(&formats::IQ4_NL_VALUES, 128, out) }, d halves, m None);
format32!(/// 4-bit floats (E2M1, doubled to integers), one power of two.
    MXFP4, bias 12, bits 5, |b, out| { nibbles(&b[16..], out); look_up(&formats::MXFP4_VALUES, 12, out) },
    d |b, out| {
        for (out, e) in out.iter_mut().zip(b) {
            *out = formats::mxfp4_scale(*e);
        }
    }, m None);

/// The 6-bit scale and minimum of Q4_K and Q5_K, `bytes[12][16 rows]`.
#[inline(always)]
fn subs_6bit(bytes: &[u8], scale: &mut Subs, min: &mut Subs) {
    let bytes: &[u8; 192] = bytes[..192].try_into().expect("12 bytes of 16 rows");
    for j in 0..4 {
        for r in 0..ROWS {
            let at = |i: usize| i32::from(bytes[16 * i + r]);
            let (s, m, x) = (at(j), at(j + 4), at(j + 8));
            let lo = (s & 63, m & 63);
            let hi = (x & 15 | s >> 6 << 4, x >> 4 | m >> 6 << 4);
            scale[2 * j][r] = lo.0;
            scale[2 * j + 1][r] = lo.0;
            min[2 * j][r] = lo.1;
            min[2 * j + 1][r] = lo.1;
            scale[2 * j + 8][r] = hi.0;
            scale[2 * j + 9][r] = hi.0;
            min[2 * j + 8][r] = hi.1;
            min[2 * j + 9][r] = hi.1;
        }
    }
}

macro_rules! format256 {
    ($(#[$doc:meta])* $name:ident, bias $bias:expr, bits $bits:expr, sub32 $sub32:expr, |$b:ident, $run:ident, $out:ident| $codes:block,
     |$sb:ident, $scale:ident, $min:ident| $subs:block, d $d:expr, factor $factor:expr, dmin $dmin:expr) => {
        $(#[$doc])*
        #[allow(non_camel_case_types)]
        #[derive(Debug)]
        pub enum $name {}
        impl Unpack256 for $name {
            const TY: TensorType = TensorType::$name;
            const BIAS: i32 = $bias;
            const BITS: u32 = $bits;
            const SUB32: bool = $sub32;
            #[inline(always)]
            fn codes($b: &[u8], $run: usize, $out: &mut Run) $codes
            #[inline(always)]
            fn subs($sb: &[u8], $scale: &mut Subs, $min: &mut Subs) $subs
            #[inline(always)]
            fn factors(block: &[u8], d: &mut RowF32, dmin: &mut RowF32) {
                let at: Option<usize> = $dmin;
                halves(&block[$d..], d);
                if $factor != 1.0 {
                    for d in d.iter_mut() {
                        *d *= $factor;
                    }
                }
                if let Some(at) = at { halves(&block[at..], dmin) }
            }
        }
    };
}

format256!(/// 2 bits, 4-bit scales and minima of 16 values.
    Q2_K, bias 0, bits 2, sub32 false, |b, run, out| { two_bits(&b[320 + 128 * run..], out) },
    |b, scale, min| {
        for j in 0..16 {
            for r in 0..ROWS {
                scale[j][r] = i32::from(b[16 * j + r] & 15);
                min[j][r] = i32::from(b[16 * j + r] >> 4);
            }
        }
    }, d 256, factor 1.0, dmin Some(288));
format256!(/// 3 bits, 6-bit signed scales of 16 values.
    Q3_K, bias 4, bits 3, sub32 false,
    |b, run, out| { let b = &b[224 + 192 * run..]; two_bits(&b[64..], out); add_high(&b[..64], 1, 2, out) },
    |b, scale, _min| {
        for j in 0..16 {
            for r in 0..ROWS {
                // Scales 0..8 are the low nibbles of bytes 0..8, 8..16 the high ones; bytes 8..12 hold the top two bits.
                let low = b[16 * (j % 8) + r] >> (4 * (j / 8)) & 15;
                let high = b[16 * (8 + j % 4) + r] >> (2 * (j / 4)) & 3;
                scale[j][r] = i32::from(low | high << 4) - 32;
            }
        }
    }, d 192, factor 1.0, dmin None);
format256!(/// 4 bits, 6-bit scales and minima of 32 values.
    Q4_K, bias 0, bits 4, sub32 true, |b, run, out| { nibbles(&b[256 + 256 * run..], out) },
    |b, scale, min| { subs_6bit(&b[64..], scale, min) }, d 0, factor 1.0, dmin Some(32));
format256!(/// 5 bits, 6-bit scales and minima of 32 values.
    Q5_K, bias 0, bits 5, sub32 true,
    |b, run, out| { let b = &b[256 + 320 * run..]; nibbles(&b[64..], out); add_high(&b[..64], 1, 4, out) },
    |b, scale, min| { subs_6bit(&b[64..], scale, min) }, d 0, factor 1.0, dmin Some(32));
format256!(/// 6 bits, 8-bit signed scales of 16 values.
    Q6_K, bias 32, bits 6, sub32 false,
    |b, run, out| { let b = &b[288 + 384 * run..]; nibbles(&b[128..], out); add_high(&b[..128], 2, 4, out) },
    |b, scale, _min| {
        for j in 0..16 {
            for r in 0..ROWS {
                scale[j][r] = i32::from(b[16 * j + r] as i8);
            }
        }
    }, d 256, factor 1.0, dmin None);
format256!(/// 4-bit index into a table of 8-bit values, 6-bit signed scales of 32 values.
    IQ4_XS, bias 128, bits 8, sub32 true,
    |b, run, out| { nibbles(&b[128 + 256 * run..], out); look_up(&formats::IQ4_NL_VALUES, 128, out) },
    |b, scale, _min| {
        for j in 0..8 {
            for r in 0..ROWS {
                let high = u16::from_le_bytes([b[32 + 2 * r], b[33 + 2 * r]]) >> (2 * j) & 3;
                let low = b[64 + 16 * (j / 2) + r] >> (4 * (j % 2)) & 15;
                let s = i32::from(u16::from(low) | high << 4) - 32;
                scale[2 * j][r] = s;
                scale[2 * j + 1][r] = s;
            }
        }
    }, d 0, factor 1.0, dmin None);

/// Runs a format's row-wise unpacker over the rows of a tile's block. Grid scales are (2s + 1) times a power of two: the odd
/// integer is the sub-scale, the power belongs to d.
#[inline(always)]
fn by_row(ty: TensorType, block: &[u8], mut each: impl FnMut(usize, &formats::Block256)) {
    let layout = Layout::of(ty).expect("a format with a layout");
    let mut bytes = [0u8; MAX_BLOCK_BYTES];
    let bytes = &mut bytes[..layout.block_bytes()];
    let mut unpacked = formats::Block256::ZERO;
    for r in 0..ROWS {
        layout.pick_file(ROWS, r, block, bytes);
        formats::unpack256(ty, bytes, &mut unpacked);
        each(r, &unpacked);
    }
}

macro_rules! grid {
    ($($(#[$doc:meta])* $name:ident, factor $factor:expr, sub32 $sub32:expr;)*) => {$(
        format256!($(#[$doc])* $name, bias 64, bits 7, sub32 $sub32,
            |b, run, out| {
                by_row(TensorType::$name, b, |r, row| {
                    for (i, q) in row.q[32 * run..32 * (run + 1)].iter().enumerate() {
                        out[64 * (i / 4) + 4 * r + i % 4] = (*q + 64) as u8;
                    }
                })
            },
            |b, scale, _min| {
                by_row(TensorType::$name, b, |r, row| {
                    for (j, s) in row.scale.iter().enumerate() {
                        scale[j][r] = i32::from(*s);
                    }
                })
            },
            d 0, factor $factor, dmin None);
    )*};
}

grid! {
    /// Grid of 256 groups of 8 values, 4-bit scales of 32 values.
    IQ2_XXS, factor 0.125, sub32 true;
    /// Grid of 512 groups of 8 values, 4-bit scales of 16 values.
    IQ2_XS, factor 0.125, sub32 false;
    /// Grid of 1024 groups of 8 values, 4-bit scales of 16 values.
    IQ2_S, factor 0.125, sub32 false;
    /// Grid of 256 groups of 4 values, 4-bit scales of 32 values.
    IQ3_XXS, factor 0.25, sub32 true;
    /// Grid of 512 groups of 4 values, 4-bit scales of 32 values.
    IQ3_S, factor 1.0, sub32 true;
}

/// Calls a generic function with the unpacker of a format of class `Block32`.
#[macro_export]
macro_rules! with_format32 {
    ($ty:expr, $u:ident => $body:expr) => {
        match $ty {
            gguf::TensorType::Q4_0 => {
                type $u = $crate::lanes::Q4_0;
                $body
            }
            gguf::TensorType::Q4_1 => {
                type $u = $crate::lanes::Q4_1;
                $body
            }
            gguf::TensorType::Q5_0 => {
                type $u = $crate::lanes::Q5_0;
                $body
            }
            gguf::TensorType::Q5_1 => {
                type $u = $crate::lanes::Q5_1;
                $body
            }
            gguf::TensorType::Q8_0 => {
                type $u = $crate::lanes::Q8_0;
                $body
            }
            gguf::TensorType::IQ4_NL => {
                type $u = $crate::lanes::IQ4_NL;
                $body
            }
            gguf::TensorType::MXFP4 => {
                type $u = $crate::lanes::MXFP4;
                $body
            }
            ty => unreachable!("{} is not of class Block32", ty.name()),
        }
    };
}

/// Calls a generic function with the unpacker of a format of class `Block256`.
#[macro_export]
macro_rules! with_format256 {
    ($ty:expr, $u:ident => $body:expr) => {
        match $ty {
            gguf::TensorType::Q2_K => {
                type $u = $crate::lanes::Q2_K;
                $body
            }
            gguf::TensorType::Q3_K => {
                type $u = $crate::lanes::Q3_K;
                $body
            }
            gguf::TensorType::Q4_K => {
                type $u = $crate::lanes::Q4_K;
                $body
            }
            gguf::TensorType::Q5_K => {
                type $u = $crate::lanes::Q5_K;
                $body
            }
            gguf::TensorType::Q6_K => {
                type $u = $crate::lanes::Q6_K;
                $body
            }
            gguf::TensorType::IQ4_XS => {
                type $u = $crate::lanes::IQ4_XS;
                $body
            }
            gguf::TensorType::IQ2_XXS => {
                type $u = $crate::lanes::IQ2_XXS;
                $body
            }
            gguf::TensorType::IQ2_XS => {
                type $u = $crate::lanes::IQ2_XS;
                $body
            }
            gguf::TensorType::IQ2_S => {
                type $u = $crate::lanes::IQ2_S;
                $body
            }
            gguf::TensorType::IQ3_XXS => {
                type $u = $crate::lanes::IQ3_XXS;
                $body
            }
            gguf::TensorType::IQ3_S => {
                type $u = $crate::lanes::IQ3_S;
                $body
            }
            ty => unreachable!("{} is not of class Block256", ty.name()),
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tile::permute_tile;

    fn random(n: usize, mut seed: u64) -> Vec<u8> {
        (0..n)
            .map(|_| {
                seed = seed
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (seed >> 56) as u8
            })
            .collect()
    }

    /// One block of 16 rows: file bytes by row, tile bytes.
    fn tile(ty: TensorType) -> (Vec<Vec<u8>>, Vec<u8>) {
        let layout = Layout::of(ty).expect("a supported format");
        let file = random(16 * layout.block_bytes(), u64::from(ty.id()));
        let mut tile = vec![0; file.len()];
        permute_tile(layout, 16, &file, &mut tile);
        (
            file.chunks(layout.block_bytes())
                .map(<[u8]>::to_vec)
                .collect(),
            tile,
        )
    }

    /// Bits of a number, with all NaNs alike.
    fn bits(x: f32) -> u32 {
        if x.is_nan() {
            f32::NAN.to_bits()
        } else {
            x.to_bits()
        }
    }

    fn check32<U: Unpack32>() {
        let (rows, tile) = tile(U::TY);
        let (mut run, mut d, mut m) = ([0; 512], [0.0; 16], [0.0; 16]);
        U::codes(&tile, &mut run);
        U::scales(&tile, &mut d);
        U::offsets(&tile, &mut m);
        for (r, file) in rows.iter().enumerate() {
            let mut block = formats::Block32::ZERO;
            formats::unpack32(U::TY, file, &mut block);
            for (i, q) in block.q.iter().enumerate() {
                let code = i32::from(run[64 * (i / 4) + 4 * r + i % 4]);
                assert_eq!(
                    code - U::BIAS,
                    i32::from(*q),
                    "{} row {r} value {i}",
                    U::TY.name()
                );
                assert!(code < 1 << U::BITS, "{} code {code}", U::TY.name());
            }
            assert_eq!(
                d[r].to_bits(),
                block.d.to_bits(),
                "{} row {r} scale",
                U::TY.name()
            );
            assert_eq!(bits(m[r]), bits(block.m), "{} row {r} offset", U::TY.name());
        }
    }

    fn check256<U: Unpack256>() {
        let (rows, tile) = tile(U::TY);
        let (mut scale, mut min) = ([[0; 16]; 16], [[0; 16]; 16]);
        let (mut d, mut dmin) = ([0.0; 16], [0.0; 16]);
        U::subs(&tile, &mut scale, &mut min);
        U::factors(&tile, &mut d, &mut dmin);
        for (r, file) in rows.iter().enumerate() {
            let mut block = formats::Block256::ZERO;
            formats::unpack256(U::TY, file, &mut block);
            for run in 0..8 {
                let mut codes = [0; 512];
                U::codes(&tile, run, &mut codes);
                for i in 0..32 {
                    let code = i32::from(codes[64 * (i / 4) + 4 * r + i % 4]);
                    let q = i32::from(block.q[32 * run + i]);
                    assert_eq!(
                        code - U::BIAS,
                        q,
                        "{} row {r} run {run} value {i}",
                        U::TY.name()
                    );
                    assert!(code < 1 << U::BITS, "{} code {code}", U::TY.name());
                }
            }
            for j in 0..16 {
                assert_eq!(
                    scale[j][r],
                    i32::from(block.scale[j]),
                    "{} row {r} scale {j}",
                    U::TY.name()
                );
                assert_eq!(
                    min[j][r],
                    i32::from(block.min[j]),
                    "{} row {r} min {j}",
                    U::TY.name()
                );
                assert!(
                    !U::SUB32 || scale[j][r] == scale[j ^ 1][r],
                    "{} sub-blocks of 32",
                    U::TY.name()
                );
            }
            assert_eq!(bits(d[r]), bits(block.d), "{} row {r} d", U::TY.name());
            assert_eq!(
                bits(dmin[r]),
                bits(block.dmin),
                "{} row {r} dmin",
                U::TY.name()
            );
        }
    }

    #[test]
    fn lanes_equal_the_row_wise_unpackers() {
        for &ty in formats::supported() {
            match formats::class(ty) {
                Some(formats::Class::Block32) => with_format32!(ty, U => check32::<U>()),
                Some(formats::Class::Block256) => with_format256!(ty, U => check256::<U>()),
                Some(formats::Class::Float) | None => {}
            }
        }
    }

    #[test]
    fn every_half_converts_exactly() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "{bits:#x}"
            );
        }
    }
}
