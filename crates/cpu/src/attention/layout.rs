//! How a block of 256 cells lies in memory.
//!
//! One block belongs to one layer and holds, KV head by KV head, first all K, then all V:
//!
//! ```text
//! K, f16 or bf16   [4 panels][C][64 cells]                   2 bytes
//! K, q8_0          scales [4][C/32][64] f16, then codes [4][C/4][64 cells][4 values]        1 byte
//! K, q4_0          scales [4][C/32][64] f16, then nibbles [4][C/32][4 words][64 cells][4]   low: group g, high: group g + 4
//! V, f16 or bf16   [256 cells][C]                            2 bytes
//! V, q8_0          scales [256][C/32] f16, then codes [256][C]
//! V, q4_0          scales [256][C/32] f16, then nibbles [256][C/32][16]    low: value i, high: value i + 16
//! ```
//!
//! K has cells in lanes, so that scores need no sums across lanes; V has values in lanes. Scales and codes are GGML's.

use super::CELLS;
use crate::mem::Shared;
use crate::pool::Pool;
use gguf::TensorType;
use quant::formats;
use std::ops::Range;

/// Cells a panel of K.
pub(super) const PANEL: usize = 64;

/// Cells of a block that a row sees, or of a panel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Cells {
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Cells {
    pub(super) fn is_empty(self) -> bool {
        self.start >= self.end
    }

    /// Those of panel `panel`, counted from its first.
    pub(super) fn within(self, panel: usize) -> Self {
        let inside = |n: usize| n.saturating_sub(panel * PANEL).min(PANEL);
        Self {
            start: inside(self.start),
            end: inside(self.end),
        }
    }
}

/// How the values of a cache are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// 8 bits, a scale for each 32 values.
    Q8_0,
    /// 4 bits, a scale for each 32 values.
    Q4_0,
}

impl KvType {
    /// All, least compressing first.
    pub const ALL: [Self; 4] = [Self::F16, Self::Bf16, Self::Q8_0, Self::Q4_0];

    /// Its name in flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
        }
    }

    /// Bytes of `values` values (whole blocks).
    pub fn bytes(self, values: usize) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2 * values,
            Self::Q8_0 => values / 32 * 34,
            Self::Q4_0 => values / 32 * 18,
        }
    }

    pub(super) fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16)
    }

    fn tensor_type(self) -> TensorType {
        match self {
            Self::F16 => TensorType::F16,
            Self::Bf16 => TensorType::BF16,
            Self::Q8_0 => TensorType::Q8_0,
            Self::Q4_0 => TensorType::Q4_0,
        }
    }
}

impl std::fmt::Display for KvType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for KvType {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|t| t.name() == s)
            .ok_or_else(|| format!("unknown cache type {s:?}: one of f16, bf16, q8_0, q4_0"))
    }
}

/// What one layer's cache holds for a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// KV heads.
    pub heads: usize,
    /// Values of a K head.
    pub c_k: usize,
    /// Values of a V head.
    pub c_v: usize,
    /// Type of K.
    pub type_k: KvType,
    /// Type of V.
    pub type_v: KvType,
}

/// A head size that a cache type cannot store or a kernel cannot attend.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a {which} cache of type {ty} needs a head size that is a multiple of {multiple}, the model's is {size}"
)]
pub struct KvShapeError {
    which: char,
    ty: KvType,
    multiple: usize,
    size: usize,
}

impl KvShape {
    /// Checks that the types divide the head sizes.
    ///
    /// # Errors
    /// If they do not, or a head is empty or not a multiple of 16 values.
    pub fn new(
        heads: usize,
        c_k: usize,
        c_v: usize,
        type_k: KvType,
        type_v: KvType,
    ) -> Result<Self, KvShapeError> {
        for (which, ty, size) in [('K', type_k, c_k), ('V', type_v, c_v)] {
            let multiple = if ty.is_float() { 16 } else { 32 };
            if size == 0 || size % multiple != 0 {
                return Err(KvShapeError {
                    which,
                    ty,
                    multiple,
                    size,
                });
            }
        }
        Ok(Self {
            heads,
            c_k,
            c_v,
            type_k,
            type_v,
        })
    }

    pub(super) fn k_bytes(&self) -> usize {
        CELLS * self.type_k.bytes(self.c_k)
    }

    pub(super) fn v_bytes(&self) -> usize {
        CELLS * self.type_v.bytes(self.c_v)
    }

    /// Bytes of one block.
    pub fn block_bytes(&self) -> usize {
        self.heads * (self.k_bytes() + self.v_bytes())
    }

    /// K of one head in a block.
    pub(super) fn k<'a>(&self, block: &'a [u8], head: usize) -> Quarters<'a> {
        let bytes = &block[head * self.k_bytes()..][..self.k_bytes()];
        Quarters::new(self.type_k, self.c_k, bytes)
    }

    /// V of one head in a block.
    pub(super) fn v<'a>(&self, block: &'a [u8], head: usize) -> Quarters<'a> {
        let bytes = &block[self.heads * self.k_bytes() + head * self.v_bytes()..];
        Quarters::new(self.type_v, self.c_v, &bytes[..self.v_bytes()])
    }
}

/// One head's K or V of a block: scales (none for float types) and codes, each in four quarters of 64 cells.
#[derive(Clone, Copy)]
pub(super) struct Quarters<'a> {
    all: &'a [u8],
    scales: &'a [u8],
    codes: &'a [u8],
}

impl<'a> Quarters<'a> {
    fn new(ty: KvType, c: usize, bytes: &'a [u8]) -> Self {
        let scales = if ty.is_float() { 0 } else { CELLS * c / 32 * 2 };
        let (scales, codes) = bytes.split_at(scales);
        Self {
            all: bytes,
            scales,
            codes,
        }
    }

    /// All bytes.
    pub(super) fn all(self) -> &'a [u8] {
        self.all
    }

    /// Scales of quarter `i`.
    pub(super) fn scales(self, i: usize) -> &'a [u8] {
        let len = self.scales.len() / (CELLS / PANEL);
        &self.scales[i * len..(i + 1) * len]
    }

    /// Codes of some quarters.
    pub(super) fn codes(self, quarters: Range<usize>) -> &'a [u8] {
        let len = self.codes.len() / (CELLS / PANEL);
        &self.codes[quarters.start * len..quarters.end * len]
    }
}

/// Turns a block of random bytes into one whose cells could be those of a prompt: values about 0 with deviations near 1.
///
/// Codes are good as they are. Floats keep sign and mantissa, with exponents that make them 1/8 to 2; scales become one, with a random sign
/// where codes are not even about 0.
///
/// # Panics
/// If the block has another length.
pub fn tame(shape: &KvShape, block: &mut [u8]) {
    assert_eq!(block.len(), shape.block_bytes(), "bytes of a block");
    let (of_k, of_v) = block.split_at_mut(shape.heads * shape.k_bytes());
    for (all, bytes, ty, c) in [
        (of_k, shape.k_bytes(), shape.type_k, shape.c_k),
        (of_v, shape.v_bytes(), shape.type_v, shape.c_v),
    ] {
        let halves = match ty {
            KvType::F16 | KvType::Bf16 => bytes,
            KvType::Q8_0 | KvType::Q4_0 => CELLS * c / 32 * 2,
        };
        // Bits that stay, and bits that are set.
        let (keep, set): (u16, u16) = match ty {
            KvType::F16 => (0x8fff, 0x3000),
            KvType::Bf16 => (0x81ff, 0x3e00),
            // 1 / 73.9 and 1 / 4.6: what even codes have for a deviation.
            KvType::Q8_0 => (0, 0x22ee),
            KvType::Q4_0 => (0x8000, 0x32f1),
        };
        for head in all.chunks_exact_mut(bytes) {
            for half in head[..halves].chunks_exact_mut(2) {
                let bits = u16::from_le_bytes([half[0], half[1]]);
                half.copy_from_slice(&(bits & keep | set).to_le_bytes());
            }
        }
    }
}

/// The largest head that any cache stores at once: bounds a buffer on the stack.
const HEAD_BYTES_MAX: usize = 2 * 1024;

/// Stores one cell: `k` `[heads, C_k]`, `v` `[heads, C_v]`.
///
/// Conversion to half rounds to nearest even (out of range becomes infinite); 8 and 4 bits are GGML's encoders.
///
/// # Panics
/// If lengths do not agree.
pub fn write_cell(shape: &KvShape, block: &mut [u8], cell: usize, k: &[f32], v: &[f32]) {
    let (of_k, of_v) = block.split_at_mut(shape.heads * shape.k_bytes());
    for (head, out) in of_k.chunks_exact_mut(shape.k_bytes()).enumerate() {
        write_k(shape, out, cell, &k[head * shape.c_k..][..shape.c_k]);
    }
    for (head, out) in of_v.chunks_exact_mut(shape.v_bytes()).enumerate() {
        write_v(shape, out, cell, &v[head * shape.c_v..][..shape.c_v]);
    }
}

/// Stores cells `first ..` of a block: `k` `[T, heads, C_k]`, `v` `[T, heads, C_v]`. Heads are spread over the pool.
///
/// # Panics
/// If lengths do not agree, or the cells go beyond the block.
pub fn append(pool: &Pool, shape: &KvShape, block: &mut [u8], first: usize, k: &[f32], v: &[f32]) {
    let (row_k, row_v) = (shape.heads * shape.c_k, shape.heads * shape.c_v);
    let tokens = k.len() / row_k;
    assert!(
        v.len() == tokens * row_v && first + tokens <= CELLS,
        "cells"
    );
    if tokens == 1 {
        return write_cell(shape, block, first, k, v);
    }
    assert_eq!(block.len(), shape.block_bytes(), "a block");
    let heads = shape.heads;
    let block = Shared::new(block);
    pool.run(2 * heads, |item| {
        let head = item / 2;
        if item % 2 == 0 {
            // SAFETY: each head's K is one item's alone.
            let out = unsafe { block.part(head * shape.k_bytes(), shape.k_bytes()) };
            for t in 0..tokens {
                let k = &k[t * row_k + head * shape.c_k..][..shape.c_k];
                write_k(shape, out, first + t, k);
            }
        } else {
            let start = heads * shape.k_bytes() + head * shape.v_bytes();
            // SAFETY: as above, its V.
            let out = unsafe { block.part(start, shape.v_bytes()) };
            for t in 0..tokens {
                let v = &v[t * row_v + head * shape.c_v..][..shape.c_v];
                write_v(shape, out, first + t, v);
            }
        }
    });
}

/// One token's cell of a block of its own.
#[derive(Debug)]
pub struct NewCell<'a> {
    /// The block's bytes.
    pub block: &'a mut [u8],
    /// Which of its cells.
    pub cell: usize,
    /// `[heads, C_k]`.
    pub k: &'a [f32],
    /// `[heads, C_v]`.
    pub v: &'a [f32],
}

/// Stores cells of several sequences, spread over the pool.
///
/// # Panics
/// If lengths do not agree.
pub fn append_each(pool: &Pool, shape: &KvShape, cells: &mut [NewCell<'_>]) {
    pool.chunks_mut(cells, 1, |_, cells| {
        for NewCell { block, cell, k, v } in cells {
            write_cell(shape, block, *cell, k, v);
        }
    });
}

/// Stores a cell of one head's K.
fn write_k(shape: &KvShape, out: &mut [u8], cell: usize, k: &[f32]) {
    let mut bytes = [0u8; HEAD_BYTES_MAX];
    let bytes = &mut bytes[..shape.type_k.bytes(shape.c_k)];
    encode(shape.type_k, k, bytes);
    let (panel, lane) = (cell / PANEL, cell % PANEL);
    if shape.type_k.is_float() {
        for (c, value) in bytes.chunks_exact(2).enumerate() {
            out[((panel * shape.c_k + c) * PANEL + lane) * 2..][..2].copy_from_slice(value);
        }
        return;
    }
    let runs = shape.c_k / 32;
    let (scales, codes) = out.split_at_mut(CELLS * runs * 2);
    let words = (bytes.len() / runs - 2) / 4;
    for (run, bytes) in bytes.chunks_exact(2 + 4 * words).enumerate() {
        scales[((panel * runs + run) * PANEL + lane) * 2..][..2].copy_from_slice(&bytes[..2]);
        for (word, bytes) in bytes[2..].chunks_exact(4).enumerate() {
            codes[(((panel * runs + run) * words + word) * PANEL + lane) * 4..][..4]
                .copy_from_slice(bytes);
        }
    }
}

/// Stores a cell of one head's V.
fn write_v(shape: &KvShape, out: &mut [u8], cell: usize, v: &[f32]) {
    let mut bytes = [0u8; HEAD_BYTES_MAX];
    let bytes = &mut bytes[..shape.type_v.bytes(shape.c_v)];
    encode(shape.type_v, v, bytes);
    if shape.type_v.is_float() {
        out[cell * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
        return;
    }
    let runs = shape.c_v / 32;
    let (scales, codes) = out.split_at_mut(CELLS * runs * 2);
    let run_bytes = bytes.len() / runs - 2;
    for (run, bytes) in bytes.chunks_exact(2 + run_bytes).enumerate() {
        scales[(cell * runs + run) * 2..][..2].copy_from_slice(&bytes[..2]);
        codes[(cell * runs + run) * run_bytes..][..run_bytes].copy_from_slice(&bytes[2..]);
    }
}

/// Encodes values; a head with a NaN or an infinity, which 8 and 4 bits cannot hold, becomes NaN as a whole.
fn encode(ty: KvType, values: &[f32], out: &mut [u8]) {
    if formats::encode_row(ty.tensor_type(), values, out).is_err() {
        let run = out.len() / (values.len() / 32);
        for run in out.chunks_exact_mut(run) {
            run.fill(0);
            run[..2].copy_from_slice(&0x7e00u16.to_le_bytes());
        }
    }
}
