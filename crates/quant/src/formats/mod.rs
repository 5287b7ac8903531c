//! The block formats of GGML tensors, exactly as files store them: unpacking to integers, decoding, encoding.
//!
//! A quantised format is an *unpacker*: it turns one block of a file into small integers and the one or two `f32`
//! factors that they are multiplied with. Products never look at a format's bytes; they are defined over [`Block32`] and
//! [`Block256`]. The formats differ in three [`Class`]es only:
//!
//! | class | value | formats |
//! |---|---|---|
//! | `Float` | stored | F32, F16, BF16 |
//! | `Block32` | `d * q + m` | Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4 |
//! | `Block256` | `d * scale * q - dmin * min` | Q2_K to Q6_K, IQ4_XS, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S |
//!
//! **Decoding is exact up to one rounding.** A half-precision factor has 11 significant bits; with every format's
//! scales and integers the products `d * q`, `d * scale * q` and `dmin * min` have at most 24, so they are exact in
//! `f32`, in any order and with or without `fma`. Only the addition of an offset rounds. [`decode_row`] therefore
//! equals GGML's dequantisation bit for bit, as long as the factors are finite.
//!
//! File order is kept: a row is its blocks one after the other, and `q[i]` is value `i` of the block.

mod error;
mod float;
pub(crate) mod grids;
mod iq;
mod iq4;
mod kquant;
mod legacy;
mod mxfp4;

use gguf::TensorType;
use half::f16;

pub use error::Error;
pub(crate) use iq4::TABLE as IQ4_NL_VALUES;
pub(crate) use mxfp4::{DOUBLED as MXFP4_VALUES, half_scale as mxfp4_scale};

/// One block of 32 values: `value[i] = d * q[i] + m`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Block32 {
    /// The integers as multiplied (already signed or looked up).
    pub q: [i8; 32],
    /// Scale.
    pub d: f32,
    /// Offset; +0 in the formats without one (all but Q4_1 and Q5_1).
    pub m: f32,
}

impl Block32 {
    /// A block of zeros.
    pub const ZERO: Self = Self {
        q: [0; 32],
        d: 0.0,
        m: 0.0,
    };
}

/// One super-block of 256 values: `value[i] = d * scale[i / 16] * q[i] - dmin * min[i / 16]`.
///
/// Formats with sub-blocks of 32 repeat each scale and minimum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Block256 {
    /// The integers as multiplied (already signed or looked up).
    pub q: [i8; 256],
    /// Integer scale of each 16 values.
    pub scale: [i16; 16],
    /// Integer minimum of each 16 values; 0 in the formats without minima.
    pub min: [u8; 16],
    /// Factor of the scales.
    pub d: f32,
    /// Factor of the minima; +0 in the formats without minima (all but Q2_K, Q4_K and Q5_K).
    pub dmin: f32,
}

impl Block256 {
    /// A block of zeros.
    pub const ZERO: Self = Self {
        q: [0; 256],
        scale: [0; 16],
        min: [0; 16],
        d: 0.0,
        dmin: 0.0,
    };
}

/// How a format's values are made up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// Plain numbers, no blocks.
    Float,
    /// [`Block32`].
    Block32,
    /// [`Block256`].
    Block256,
}

/// The class of a format, or `None` if this crate does not support it.
pub fn class(ty: TensorType) -> Option<Class> {
    use TensorType as T;
    Some(match ty {
        T::F32 | T::F16 | T::BF16 => Class::Float,
        T::Q4_0 | T::Q4_1 | T::Q5_0 | T::Q5_1 | T::Q8_0 | T::IQ4_NL | T::MXFP4 => Class::Block32,
        T::Q2_K | T::Q3_K | T::Q4_K | T::Q5_K | T::Q6_K => Class::Block256,
        T::IQ4_XS | T::IQ2_XXS | T::IQ2_XS | T::IQ2_S | T::IQ3_XXS | T::IQ3_S => Class::Block256,
        _ => return None,
    })
}

/// The class of a format, or an error that names it and lists what is supported.
pub fn require(ty: TensorType) -> Result<Class, Error> {
    class(ty).ok_or(Error::Unsupported { ty })
}

/// All formats that can be decoded.
pub fn supported() -> &'static [TensorType] {
    use TensorType as T;
    &[
        T::F32,
        T::F16,
        T::BF16,
        T::Q4_0,
        T::Q4_1,
        T::Q5_0,
        T::Q5_1,
        T::Q8_0,
        T::Q2_K,
        T::Q3_K,
        T::Q4_K,
        T::Q5_K,
        T::Q6_K,
        T::IQ4_NL,
        T::IQ4_XS,
        T::IQ2_XXS,
        T::IQ2_XS,
        T::IQ2_S,
        T::IQ3_XXS,
        T::IQ3_S,
        T::MXFP4,
    ]
}

/// All formats that can be encoded to: the supported ones but for IQ2 and IQ3, which need a codebook search that is
/// worth nothing without an importance matrix.
pub fn encodable() -> &'static [TensorType] {
    use TensorType as T;
    &[
        T::F32,
        T::F16,
        T::BF16,
        T::Q4_0,
        T::Q4_1,
        T::Q5_0,
        T::Q5_1,
        T::Q8_0,
        T::Q2_K,
        T::Q3_K,
        T::Q4_K,
        T::Q5_K,
        T::Q6_K,
        T::IQ4_NL,
        T::IQ4_XS,
        T::MXFP4,
    ]
}

/// Unpacks one file block of a format of class [`Class::Block32`].
///
/// # Panics
///
/// If the format is of another class, or `bytes` is not exactly one block long.
pub fn unpack32(ty: TensorType, bytes: &[u8], out: &mut Block32) {
    use TensorType as T;
    match ty {
        T::Q4_0 => legacy::unpack_q4_0(block(ty, bytes), out),
        T::Q4_1 => legacy::unpack_q4_1(block(ty, bytes), out),
        T::Q5_0 => legacy::unpack_q5_0(block(ty, bytes), out),
        T::Q5_1 => legacy::unpack_q5_1(block(ty, bytes), out),
        T::Q8_0 => legacy::unpack_q8_0(block(ty, bytes), out),
        T::IQ4_NL => iq4::unpack_nl(block(ty, bytes), out),
        T::MXFP4 => mxfp4::unpack(block(ty, bytes), out),
        _ => panic!("{ty} has no blocks of 32"),
    }
}

/// Unpacks one file block of a format of class [`Class::Block256`].
///
/// # Panics
///
/// If the format is of another class, or `bytes` is not exactly one block long.
pub fn unpack256(ty: TensorType, bytes: &[u8], out: &mut Block256) {
    use TensorType as T;
    match ty {
        T::Q2_K => kquant::unpack_q2_k(block(ty, bytes), out),
        T::Q3_K => kquant::unpack_q3_k(block(ty, bytes), out),
        T::Q4_K => kquant::unpack_q4_k(block(ty, bytes), out),
        T::Q5_K => kquant::unpack_q5_k(block(ty, bytes), out),
        T::Q6_K => kquant::unpack_q6_k(block(ty, bytes), out),
        T::IQ4_XS => iq4::unpack_xs(block(ty, bytes), out),
        T::IQ2_XXS => iq::unpack_iq2_xxs(block(ty, bytes), out),
        T::IQ2_XS => iq::unpack_iq2_xs(block(ty, bytes), out),
        T::IQ2_S => iq::unpack_iq2_s(block(ty, bytes), out),
        T::IQ3_XXS => iq::unpack_iq3_xxs(block(ty, bytes), out),
        T::IQ3_S => iq::unpack_iq3_s(block(ty, bytes), out),
        _ => panic!("{ty} has no blocks of 256"),
    }
}

fn block<const B: usize>(ty: TensorType, bytes: &[u8]) -> &[u8; B] {
    match bytes.try_into() {
        Ok(block) => block,
        Err(_) => panic!("a {ty} block has {B} bytes, not {}", bytes.len()),
    }
}

/// Decodes a row of `out.len()` values.
///
/// Fails if the type is not supported or the lengths do not belong together; `out` is then untouched.
pub fn decode_row(ty: TensorType, bytes: &[u8], out: &mut [f32]) -> Result<(), Error> {
    let class = check_row(ty, out.len(), bytes.len())?;
    let block_bytes = ty.block_bytes();
    match class {
        Class::Float => match ty {
            TensorType::F32 => float::decode_f32(bytes, out),
            TensorType::F16 => float::decode_f16(bytes, out),
            _ => float::decode_bf16(bytes, out),
        },
        Class::Block32 => {
            // Not for all: adding +0 would lose the sign of a negative zero.
            let has_offset = matches!(ty, TensorType::Q4_1 | TensorType::Q5_1);
            let mut unpacked = Block32::ZERO;
            for (bytes, out) in bytes
                .chunks_exact(block_bytes)
                .zip(out.chunks_exact_mut(32))
            {
                unpack32(ty, bytes, &mut unpacked);
                for (out, q) in out.iter_mut().zip(unpacked.q) {
                    *out = unpacked.d * f32::from(q);
                    if has_offset {
                        *out += unpacked.m;
                    }
                }
            }
        }
        Class::Block256 => {
            let mut unpacked = Block256::ZERO;
            for (bytes, out) in bytes
                .chunks_exact(block_bytes)
                .zip(out.chunks_exact_mut(256))
            {
                unpack256(ty, bytes, &mut unpacked);
                for (j, (out, q)) in out
                    .chunks_exact_mut(16)
                    .zip(unpacked.q.chunks_exact(16))
                    .enumerate()
                {
                    let scale = unpacked.d * f32::from(unpacked.scale[j]);
                    // +0 without minima; subtracting that changes nothing, not even a negative zero.
                    let min = unpacked.dmin * f32::from(unpacked.min[j]);
                    for (out, q) in out.iter_mut().zip(q) {
                        *out = scale * f32::from(*q) - min;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Encodes a row of values; `out` must have exactly the bytes that it takes.
///
/// Fails if there is no encoder to the type, the lengths do not belong together, or a block cannot be quantised
/// (a value is not finite, or too large for a half-precision scale). After a failure of the last kind the contents of
/// `out` are unspecified.
pub fn encode_row(ty: TensorType, values: &[f32], out: &mut [u8]) -> Result<(), Error> {
    use TensorType as T;
    check_row(ty, values.len(), out.len())?;
    match ty {
        T::F32 => float::encode_f32(values, out),
        T::F16 => float::encode_f16(values, out),
        T::BF16 => float::encode_bf16(values, out),
        T::Q4_0 => encode_blocks(ty, values, out, legacy::encode_q4_0)?,
        T::Q4_1 => encode_blocks(ty, values, out, legacy::encode_q4_1)?,
        T::Q5_0 => encode_blocks(ty, values, out, legacy::encode_q5_0)?,
        T::Q5_1 => encode_blocks(ty, values, out, legacy::encode_q5_1)?,
        T::Q8_0 => encode_blocks(ty, values, out, legacy::encode_q8_0)?,
        T::IQ4_NL => encode_blocks(ty, values, out, iq4::encode_nl)?,
        T::MXFP4 => encode_blocks(ty, values, out, |x, b| {
            mxfp4::encode(x, b);
            Some(())
        })?,
        T::Q2_K => encode_blocks(ty, values, out, kquant::encode_q2_k)?,
        T::Q3_K => encode_blocks(ty, values, out, kquant::encode_q3_k)?,
        T::Q4_K => encode_blocks(ty, values, out, kquant::encode_q4_k)?,
        T::Q5_K => encode_blocks(ty, values, out, kquant::encode_q5_k)?,
        T::Q6_K => encode_blocks(ty, values, out, kquant::encode_q6_k)?,
        T::IQ4_XS => encode_blocks(ty, values, out, iq4::encode_xs)?,
        _ => return Err(Error::NoEncoder { ty }),
    }
    Ok(())
}

fn check_row(ty: TensorType, values: usize, actual_bytes: usize) -> Result<Class, Error> {
    let class = require(ty)?;
    let block_values = ty.block_len();
    if !values.is_multiple_of(block_values) {
        return Err(Error::RowLength {
            ty,
            values,
            block_values,
        });
    }
    // Cannot overflow: no format takes more than the 4 bytes a value that the f32 side already occupies in memory.
    let expected_bytes = values / block_values * ty.block_bytes();
    if expected_bytes != actual_bytes {
        return Err(Error::ByteLength {
            ty,
            values,
            expected_bytes,
            actual_bytes,
        });
    }
    Ok(class)
}

/// Encodes block after block; an encoder says `None` if a scale does not fit a half.
fn encode_blocks<const V: usize, const B: usize>(
    ty: TensorType,
    values: &[f32],
    out: &mut [u8],
    encode: impl Fn(&[f32; V], &mut [u8; B]) -> Option<()>,
) -> Result<(), Error> {
    let blocks = values.as_chunks().0.iter().zip(out.as_chunks_mut().0);
    for (n, (x, b)) in blocks.enumerate() {
        if let Some(i) = x.iter().position(|x| !x.is_finite()) {
            return Err(Error::NotFinite {
                ty,
                index: V * n + i,
                value: x[i],
            });
        }
        encode(x, b).ok_or(Error::ScaleRange {
            ty,
            index: V * n,
            absmax: absmax(x).abs(),
        })?;
    }
    Ok(())
}

/// The half at byte `at`, exactly.
fn read_f16(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// Stores `x` rounded to a half at byte `at`; `None` if that is not finite.
fn write_f16(b: &mut [u8], at: usize, x: f32) -> Option<()> {
    let half = f16::from_f32(x);
    b[at..at + 2].copy_from_slice(&half.to_le_bytes());
    half.is_finite().then_some(())
}

/// `x` rounded to a half; `None` if that is not finite.
fn round_f16(x: f32) -> Option<f32> {
    let half = f16::from_f32(x);
    half.is_finite().then(|| half.to_f32())
}

/// The value of largest magnitude, with its sign; the first of several.
fn absmax(x: &[f32]) -> f32 {
    x.iter()
        .copied()
        .fold(0.0, |max, x| if x.abs() > max.abs() { x } else { max })
}

/// `1 / d`, or 0 for a zero, which quantises everything to zero.
fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// Signed integer scales of sub-blocks under one half-precision factor.
struct SymmetricScales {
    /// The factor, already rounded to a half.
    d: f32,
    /// One integer for each sub-block (the rest is 0).
    sub: [i16; 16],
}

/// Scales under which each sub-block's value of largest magnitude becomes about `q_extreme`, and the largest scale
/// `scale_min` (the negative limits, which reach one step further than the positive ones). `None` if the factor does not
/// fit a half.
fn symmetric_scales(
    x: &[f32; 256],
    width: usize,
    q_extreme: f32,
    scale_min: f32,
    scale_max: f32,
) -> Option<SymmetricScales> {
    let mut scales = [0f32; 16];
    for (scale, x) in scales.iter_mut().zip(x.chunks_exact(width)) {
        *scale = absmax(x) / q_extreme;
    }
    let d = round_f16(absmax(&scales) / scale_min)?;
    let id = inverse(d);
    let sub = scales.map(|s| (s * id).round().clamp(scale_min, scale_max) as i16);
    Some(SymmetricScales { d, sub })
}
