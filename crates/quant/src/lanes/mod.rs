//! From a tile's block to integers in lanes: the unpacker of each format, in the shape that vector code wants.
//!
//! A run of 32 values of 16 rows becomes 8 groups of 64 bytes, `[group][row][value in group]`: one 512-bit register a
//! group. Codes are unsigned, `code = q + BIAS`; a kernel that multiplies codes subtracts `BIAS * sum(activations)`,
//! which is exact. The loops are written so that a compiler vectorises them under any target feature; the generic
//! functions are `inline(always)` so that they are compiled with the features of the kernel that calls them.

mod grid;

use crate::formats;
use crate::tile::ROWS;
use gguf::TensorType;

/// Codes of 32 values of 16 rows: `[8 groups][16 rows][4 values]`.
pub type Run = [u8; 512];

/// One `f32` a row of a tile.
pub type RowF32 = [f32; ROWS];

/// How a format codes its values.
pub trait Codes {
    /// The format.
    const TY: TensorType;
    /// What codes have been raised by.
    const BIAS: i32;
    /// Bits a code.
    const BITS: u32;
    /// Where the codes are; `None` for indices of a grid.
    const PLANES: Option<Planes>;
}

/// A format of class `Block32`.
pub trait Unpack32: Codes {
    /// Codes of a block of a full tile.
    #[inline(always)]
    fn codes(block: &[u8], out: &mut Run) {
        Self::PLANES
            .expect("blocks of 32 have planes")
            .unpack(block, 0, out);
    }
    /// Scale of each row.
    fn scales(block: &[u8], out: &mut RowF32);
    /// Offset of each row; not called for formats without one.
    fn offsets(block: &[u8], out: &mut RowF32);
}

/// Sub-scales of a block: one for each 32 values of each row, the rest unused, or one for each 16.
pub type Scales = [[i8; ROWS]; 16];

/// Sub-minima of a block, as [`Scales`].
pub type Minima = [[u8; ROWS]; 16];

/// Where the codes of a block of a full tile are, for formats that keep them in planes.
#[derive(Debug, Clone, Copy)]
pub struct Planes {
    /// First byte of run 0; the runs follow each other.
    pub at: usize,
    /// Bits of a code in the low plane: 2, 4, or 8 (signed: raised by 128 to a code).
    pub low_bits: usize,
    /// Bits of a code in the high plane, which lies before the low one: 0, 1 or 2.
    pub high_bits: usize,
    /// What the bits are an index of; themselves codes without.
    pub table: Option<[u8; 16]>,
}

impl Planes {
    /// High and low plane of run `run`.
    #[inline(always)]
    pub fn of<'b>(&self, block: &'b [u8], run: usize) -> (&'b [u8], &'b [u8]) {
        let bytes = 64 * (self.high_bits + self.low_bits);
        block[self.at + run * bytes..][..bytes].split_at(64 * self.high_bits)
    }

    #[inline(always)]
    fn unpack(&self, block: &[u8], run: usize, out: &mut Run) {
        let (high, low) = self.of(block, run);
        match self.low_bits {
            8 => {
                for (out, code) in out.iter_mut().zip(low) {
                    *out = code ^ 0x80;
                }
            }
            4 => nibbles(low, out),
            _ => two_bits(low, out),
        }
        if self.high_bits > 0 {
            add_high(high, self.high_bits, self.low_bits as u32, out);
        }
        if let Some(table) = self.table {
            for code in out.iter_mut() {
                *code = table[usize::from(*code & 15)];
            }
        }
    }
}

/// A table of values as one of codes.
const fn raise(values: &[i8; 16], bias: u8) -> [u8; 16] {
    let mut codes = [0; 16];
    let mut i = 0;
    while i < 16 {
        codes[i] = (values[i] as u8).wrapping_add(bias);
        i += 1;
    }
    codes
}

/// Planes of codes that are not looked up.
const fn planes(at: usize, low_bits: usize, high_bits: usize) -> Planes {
    Planes {
        at,
        low_bits,
        high_bits,
        table: None,
    }
}

/// A format of class `Block256`.
pub trait Unpack256: Codes {
    /// Whether sub-blocks have 32 values (else 16).
    const SUB32: bool;
    /// Factor of the scales in the file: `d`, at this byte, times this.
    const D: (usize, f32);
    /// Byte of the factor of the minima, for formats that have them.
    const DMIN: Option<usize>;
    /// Codes of run `run` (of 8) of a block of a full tile.
    #[inline(always)]
    fn codes(block: &[u8], run: usize, out: &mut Run) {
        Self::PLANES
            .expect("a format without planes has its own way")
            .unpack(block, run, out);
    }
    /// Integer scales and, for formats with minima, integer minima.
    fn subs(block: &[u8], scale: &mut Scales, min: &mut Minima);
    /// Factor of the scales and, for formats with minima, of the minima.
    #[inline(always)]
    fn factors(block: &[u8], d: &mut RowF32, dmin: &mut RowF32) {
        let (at, factor) = Self::D;
        halves(&block[at..], d);
        if factor != 1.0 {
            for d in d.iter_mut() {
                *d *= factor;
            }
        }
        if let Some(at) = Self::DMIN {
            halves(&block[at..], dmin);
        }
    }
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

/// The first `N` bytes, checked once and not at every use.
#[inline(always)]
fn fixed<const N: usize>(bytes: &[u8]) -> &[u8; N] {
    bytes[..N].try_into().expect("a slice of N bytes")
}

#[inline(always)]
fn halves(bytes: &[u8], out: &mut RowF32) {
    let bytes: &[u8; 2 * ROWS] = fixed(bytes);
    for (r, out) in out.iter_mut().enumerate() {
        *out = f16_to_f32(u16::from_le_bytes([bytes[2 * r], bytes[2 * r + 1]]));
    }
}

#[inline(always)]
fn nibbles(plane: &[u8], out: &mut Run) {
    let plane: &[u8; 256] = fixed(plane);
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

macro_rules! format32 {
    ($(#[$doc:meta])* $name:ident, bias $bias:expr, bits $bits:expr, $planes:expr, d $d:expr, m $m:expr) => {
        $(#[$doc])*
        #[allow(non_camel_case_types)]
        #[derive(Debug)]
        pub enum $name {}
        impl Codes for $name {
            const TY: TensorType = TensorType::$name;
            const BIAS: i32 = $bias;
            const BITS: u32 = $bits;
            const PLANES: Option<Planes> = Some($planes);
        }
        impl Unpack32 for $name {
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
    Q4_0, bias 8, bits 4, planes(32, 4, 0), d halves, m None);
format32!(/// 4 bits, scale and offset.
    Q4_1, bias 0, bits 4, planes(64, 4, 0), d halves, m Some(32));
format32!(/// 5 bits, one scale.
    Q5_0, bias 16, bits 5, planes(32, 4, 1), d halves, m None);
format32!(/// 5 bits, scale and offset.
    Q5_1, bias 0, bits 5, planes(64, 4, 1), d halves, m Some(32));
format32!(/// 8 bits, one scale.
    Q8_0, bias 128, bits 8, planes(32, 8, 0), d halves, m None);
format32!(/// 4-bit index into a table of 8-bit values, one scale.
    IQ4_NL, bias 128, bits 8, Planes { table: Some(raise(&formats::IQ4_NL_VALUES, 128)), ..planes(32, 4, 0) }, d halves, m None);
format32!(/// 4-bit floats (E2M1, doubled to integers), one power of two.
    MXFP4, bias 12, bits 5, Planes { table: Some(raise(&formats::MXFP4_VALUES, 12)), ..planes(16, 4, 0) },
    d |b, out| {
        for (out, e) in out.iter_mut().zip(b) {
            *out = formats::mxfp4_scale(*e);
        }
    }, m None);

/// The 6-bit scale and minimum of Q4_K and Q5_K, `bytes[12][16 rows]`.
#[inline(always)]
fn subs_6bit(bytes: &[u8], scale: &mut Scales, min: &mut Minima) {
    let bytes: &[u8; 192] = fixed(bytes);
    for j in 0..4 {
        for r in 0..ROWS {
            let at = |i: usize| bytes[16 * i + r];
            let (s, m, x) = (at(j), at(j + 4), at(j + 8));
            scale[j][r] = (s & 63) as i8;
            min[j][r] = m & 63;
            scale[j + 4][r] = (x & 15 | s >> 6 << 4) as i8;
            min[j + 4][r] = x >> 4 | m >> 6 << 4;
        }
    }
}

/// Signed 6-bit scale of a nibble and the two bits above it, which are bits 4 and 5 of `high`.
#[inline(always)]
fn signed_6bit(low: u8, high: u8) -> i8 {
    (low | high & 0x30) as i8 - 32
}

macro_rules! format256 {
    ($(#[$doc:meta])* $name:ident, bias $bias:expr, bits $bits:expr, sub32 $sub32:expr, $planes:expr,
     |$sb:ident, $scale:ident, $min:ident| $subs:block, d $d:expr, dmin $dmin:expr $(, |$b:ident, $run:ident, $out:ident| $codes:block)?) => {
        $(#[$doc])*
        #[allow(non_camel_case_types)]
        #[derive(Debug)]
        pub enum $name {}
        impl Codes for $name {
            const TY: TensorType = TensorType::$name;
            const BIAS: i32 = $bias;
            const BITS: u32 = $bits;
            const PLANES: Option<Planes> = $planes;
        }
        impl Unpack256 for $name {
            const SUB32: bool = $sub32;
            const D: (usize, f32) = $d;
            const DMIN: Option<usize> = $dmin;
            $(#[inline(always)]
            fn codes($b: &[u8], $run: usize, $out: &mut Run) $codes)?
            #[inline(always)]
            fn subs($sb: &[u8], $scale: &mut Scales, $min: &mut Minima) $subs
        }
    };
}

format256!(/// 2 bits, 4-bit scales and minima of 16 values.
    Q2_K, bias 0, bits 2, sub32 false, Some(planes(320, 2, 0)),
    |b, scale, min| {
        let b: &[u8; 256] = fixed(b);
        for j in 0..16 {
            for r in 0..ROWS {
                scale[j][r] = (b[16 * j + r] & 15) as i8;
                min[j][r] = b[16 * j + r] >> 4;
            }
        }
    }, d (256, 1.0), dmin Some(288));
format256!(/// 3 bits, 6-bit signed scales of 16 values.
    Q3_K, bias 4, bits 3, sub32 false, Some(planes(224, 2, 1)),
    |b, scale, _min| {
        // Scales 0..8 are the low nibbles of bytes 0..8, 8..16 the high ones; bytes 8..12 hold the top two bits, of scales
        // j, j + 4, j + 8 and j + 12 each.
        let b: &[u8; 192] = fixed(b);
        for j in 0..4 {
            for r in 0..ROWS {
                let (first, second) = (b[16 * j + r], b[16 * (4 + j) + r]);
                let high = b[16 * (8 + j) + r];
                scale[j][r] = signed_6bit(first & 15, high << 4);
                scale[4 + j][r] = signed_6bit(second & 15, high << 2);
                scale[8 + j][r] = signed_6bit(first >> 4, high);
                scale[12 + j][r] = signed_6bit(second >> 4, high >> 2);
            }
        }
    }, d (192, 1.0), dmin None);
format256!(/// 4 bits, 6-bit scales and minima of 32 values.
    Q4_K, bias 0, bits 4, sub32 true, Some(planes(256, 4, 0)),
    |b, scale, min| { subs_6bit(&b[64..], scale, min) }, d (0, 1.0), dmin Some(32));
format256!(/// 5 bits, 6-bit scales and minima of 32 values.
    Q5_K, bias 0, bits 5, sub32 true, Some(planes(256, 4, 1)),
    |b, scale, min| { subs_6bit(&b[64..], scale, min) }, d (0, 1.0), dmin Some(32));
format256!(/// 6 bits, 8-bit signed scales of 16 values.
    Q6_K, bias 32, bits 6, sub32 false, Some(planes(288, 4, 2)),
    |b, scale, _min| {
        let b: &[u8; 256] = fixed(b);
        for j in 0..16 {
            for r in 0..ROWS {
                scale[j][r] = b[16 * j + r] as i8;
            }
        }
    }, d (256, 1.0), dmin None);
format256!(/// 4-bit index into a table of 8-bit values, 6-bit signed scales of 32 values.
    IQ4_XS, bias 128, bits 8, sub32 true,
    Some(Planes { table: Some(raise(&formats::IQ4_NL_VALUES, 128)), ..planes(128, 4, 0) }),
    |b, scale, _min| {
        let b: &[u8; 128] = fixed(b);
        let mut high = [[0; ROWS]; 2];
        for r in 0..ROWS {
            let word = u16::from_le_bytes([b[32 + 2 * r], b[33 + 2 * r]]);
            high[0][r] = word as u8;
            high[1][r] = (word >> 8) as u8;
        }
        for half in 0..2 {
            for r in 0..ROWS {
                let (first, second) = (b[64 + 32 * half + r], b[80 + 32 * half + r]);
                let high = high[half][r];
                scale[4 * half][r] = signed_6bit(first & 15, high << 4);
                scale[4 * half + 1][r] = signed_6bit(first >> 4, high << 2);
                scale[4 * half + 2][r] = signed_6bit(second & 15, high);
                scale[4 * half + 3][r] = signed_6bit(second >> 4, high >> 2);
            }
        }
    }, d (0, 1.0), dmin None);

macro_rules! grid {
    ($($(#[$doc:meta])* $name:ident, factor $factor:expr, sub32 $sub32:expr, $codes:path, |$sb:ident, $scale:ident| $subs:block;)*) => {$(
        format256!($(#[$doc])* $name, bias grid::BIAS as i32, bits 7, sub32 $sub32, None,
            |$sb, $scale, _min| $subs,
            d (0, $factor), dmin None,
            |b, run, out| { $codes(b, run, out) });
    )*};
}

// Scales of grids are (2s + 1) times a power of two: the odd integer is the sub-scale, the power belongs to d.
grid! {
    /// Grid of 256 groups of 8 values, 4-bit scales of 32 values.
    IQ2_XXS, factor 0.125, sub32 true, grid::iq2_xxs, |b, scale| { grid::subs_upper(b, 7, 8, scale) };
    /// Grid of 512 groups of 8 values, 4-bit scales of 16 values.
    IQ2_XS, factor 0.125, sub32 false, grid::iq2_xs, |b, scale| { grid::subs_nibbles::<8>(b, 64, scale) };
    /// Grid of 1024 groups of 8 values, 4-bit scales of 16 values.
    IQ2_S, factor 0.125, sub32 false, grid::iq2_s, |b, scale| { grid::subs_nibbles::<8>(b, 72, scale) };
    /// Grid of 256 groups of 4 values, 4-bit scales of 32 values.
    IQ3_XXS, factor 0.25, sub32 true, grid::iq3_xxs, |b, scale| { grid::subs_upper(b, 67, 4, scale) };
    /// Grid of 512 groups of 4 values, 4-bit scales of 32 values.
    IQ3_S, factor 1.0, sub32 true, grid::iq3_s, |b, scale| { grid::subs_nibbles::<4>(b, 104, scale) };
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
    use crate::tile::{Layout, permute_tile};

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
                let sub = if U::SUB32 { j / 2 } else { j };
                assert_eq!(
                    i16::from(scale[sub][r]),
                    block.scale[j],
                    "{} row {r} scale {j}",
                    U::TY.name()
                );
                assert_eq!(
                    i32::from(min[sub][r]),
                    i32::from(block.min[j]),
                    "{} row {r} min {j}",
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
