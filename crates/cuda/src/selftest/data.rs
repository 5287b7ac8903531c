//! Inputs: random ones of ordinary size, and every kind of extreme.

use gguf::TensorType;
use quant::formats::{self, Class};
use quant::tile::{Layout, ROWS, permute_tile};

/// A small generator of random numbers.
#[derive(Debug, Clone)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// 64 random bits (xorshift*).
    pub(super) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Below `n`.
    pub(super) fn below(&mut self, n: usize) -> usize {
        (((self.bits() >> 32) * n as u64) >> 32) as usize
    }

    /// In -1..1.
    pub(super) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let bits = self.bits().to_le_bytes();
            chunk.copy_from_slice(&bits[..chunk.len()]);
        }
    }
}

/// Kinds of tokens.
pub(super) const TOKEN_KINDS: usize = 11;

/// `tokens` rows of `k` values. Every token is of one kind, and all kinds come in turn.
pub(super) fn activations(random: &mut Random, tokens: usize, k: usize) -> Vec<f32> {
    let mut x = vec![0.0; tokens * k];
    for (t, row) in x.chunks_exact_mut(k).enumerate() {
        for v in row.iter_mut() {
            let u = random.unit();
            *v = match t % TOKEN_KINDS {
                // Heavy tails, as real activations have.
                0 | 1 => u * u * u * 8.0,
                2 => u,
                // The block's scale is subnormal or the block is all zero.
                3 => u * 1e-30,
                4 => u * 1e-36,
                5 => u * 1e-42,
                // Sums overflow.
                6 => u * f32::MAX,
                // Ties in rounding, extreme codes.
                7 => [127.0, -127.0, 0.5, 1.5, -2.5, 63.5][random.below(6)],
                8 => f32::copysign(1.0, u),
                _ => u * 3.0,
            };
        }
        let at = random.below(k);
        match t % TOKEN_KINDS {
            1 => row[at] = 1e4,
            9 => row[at] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][random.below(3)],
            10 => row[..k / 2].fill(-0.0),
            _ => {}
        }
    }
    x
}

/// Where a block of a file has its half-precision factors.
fn halves(ty: TensorType) -> &'static [usize] {
    use TensorType as T;
    match ty {
        T::Q4_1 | T::Q5_1 | T::Q4_K | T::Q5_K => &[0, 2],
        T::Q2_K => &[80, 82],
        T::Q3_K => &[108],
        T::Q6_K => &[208],
        T::MXFP4 | T::F32 | T::F16 | T::BF16 => &[],
        _ => &[0],
    }
}

/// Rows of ordinary, subnormal, huge and arbitrary factors, of random codes, of all ones, of all zeros.
fn extreme_block(random: &mut Random, ty: TensorType, row: usize, block: &mut [u8]) {
    match row % 7 {
        5 => block.fill(0xff),
        6 => block.fill(0),
        _ => random.fill(block),
    }
    let half = |random: &mut Random| -> Option<u16> {
        let sign = (random.bits() & 0x8000) as u16;
        Some(match row % 5 {
            0 | 1 => sign | (0x2000 + random.below(0x1000)) as u16,
            2 => sign | random.below(0x400) as u16,
            3 => sign | (0x7800 + random.below(0x400)) as u16,
            // Whatever the bytes are: infinities and NaNs among them.
            _ => return None,
        })
    };
    for &at in halves(ty) {
        if let Some(half) = half(random) {
            block[at..at + 2].copy_from_slice(&half.to_le_bytes());
        }
    }
    match ty {
        TensorType::MXFP4 => {
            block[0] = match row % 5 {
                0 | 1 => 120 + random.below(16) as u8,
                2 => random.below(4) as u8,
                3 => 255 - random.below(4) as u8,
                _ => block[0],
            }
        }
        TensorType::F32 if row % 5 < 3 => block.copy_from_slice(&random.unit().to_le_bytes()),
        TensorType::F16 => {
            if let Some(half) = half(random) {
                block.copy_from_slice(&half.to_le_bytes());
            }
        }
        TensorType::BF16 if row % 5 < 3 => block.copy_from_slice(&random.unit().to_le_bytes()[2..]),
        _ => {}
    }
}

/// Tiles of `n` rows of `k` values, ordinary and extreme ones.
pub(super) fn weights(random: &mut Random, ty: TensorType, n: usize, k: usize) -> Vec<u8> {
    weights_of(random, ty, n, k, |row| row)
}

/// The same of ordinary ones, for what reads all rows' products: nearly all would be NaN.
pub(super) fn plain_weights(random: &mut Random, ty: TensorType, n: usize, k: usize) -> Vec<u8> {
    weights_of(random, ty, n, k, |_| 0)
}

/// Each row is of the kind of another one.
fn weights_of(
    random: &mut Random,
    ty: TensorType,
    n: usize,
    k: usize,
    kind: impl Fn(usize) -> usize,
) -> Vec<u8> {
    let layout = Layout::of(ty).expect("a supported format");
    let (bytes, blocks) = (layout.block_bytes(), k / layout.block_len());
    let row_bytes = bytes * blocks;
    let mut file = vec![0; n * row_bytes];
    for (row, out) in file.chunks_exact_mut(row_bytes).enumerate() {
        for block in out.chunks_exact_mut(bytes) {
            extreme_block(random, ty, kind(row), block);
        }
    }
    let mut tiles = vec![0; file.len()];
    let tile_bytes = ROWS * row_bytes;
    for (rows, tile) in file.chunks(tile_bytes).zip(tiles.chunks_mut(tile_bytes)) {
        permute_tile(layout, rows.len() / row_bytes, rows, tile);
    }
    tiles
}

/// Lengths of rows around the edges of blocks, pieces and chunks.
pub(super) fn lengths(ty: TensorType) -> &'static [usize] {
    match formats::class(ty) {
        Some(Class::Block256) => &[256, 512, 768, 2304, 5120],
        Some(Class::Block32) => &[32, 256, 480, 512, 544, 800, 1056, 2080, 5120],
        _ => &[1, 17, 512, 515, 1100],
    }
}
