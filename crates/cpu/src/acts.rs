//! Activations of several tokens as 8-bit blocks (`quant::act`), laid out as product kernels read them.
//!
//! ```text
//! codes   [token tile][K / unit][tile height][unit]      unit 32 (blocks of 32) or 64 (blocks of 256)
//! scales  [token tile][K / block][tile height]           f32 d
//! sums    [token tile][K / block][tile height][..]       blocks of 32: one i32; of 256: 16 i16, one for each 16 values
//! ```
//!
//! With fewer than [`TILE`] tokens the tile height is 1, so that a token's codes are contiguous; else it is [`TILE`], which
//! is what an AMX tile loads, and the last tile is filled up with zero tokens.

use crate::isa::Isa;
use crate::mem::{Buffer, OutOfMemory, Shared};
use crate::pool::Pool;
use crate::simd::{F32x16, simd_kernel};
use quant::act::{AMAX_MIN, ActRow, BLOCK32, BLOCK256, Passes};

/// Tokens a tile when there are many.
pub const TILE: usize = 16;

/// The quantised activations of up to a maximum of tokens, reused from product to product.
#[derive(Debug)]
pub struct Acts {
    block: usize,
    tokens: usize,
    k: usize,
    height: usize,
    pub(crate) q: Buffer<i8>,
    pub(crate) d: Buffer<f32>,
    /// Blocks of 32: `d * sum`, what formats with an offset multiply it with.
    pub(crate) ds: Buffer<f32>,
    pub(crate) sum32: Buffer<i32>,
    pub(crate) sum16: Buffer<i16>,
}

impl Acts {
    /// Room for `tokens` tokens of `k` values.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new(tokens: usize, k: usize) -> Result<Self, OutOfMemory> {
        let tokens = tokens.next_multiple_of(TILE);
        let k = k.next_multiple_of(BLOCK256);
        Ok(Self {
            block: BLOCK32,
            tokens: 0,
            k: 0,
            height: 1,
            q: Buffer::new(tokens * k)?,
            d: Buffer::new(tokens * k / BLOCK32)?,
            ds: Buffer::new(tokens * k / BLOCK32)?,
            sum32: Buffer::new(tokens * k / BLOCK32)?,
            sum16: Buffer::new(tokens * k / 16)?,
        })
    }

    /// Bytes of all buffers.
    pub fn bytes(&self) -> u64 {
        let sums = size_of_val(&*self.sum32) + size_of_val(&*self.sum16);
        let scales = size_of_val(&*self.d) + size_of_val(&*self.ds);
        (size_of_val(&*self.q) + scales + sums) as u64
    }

    /// Rows of codes held: tokens times passes.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Values a token.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Values a block: 32 or 256.
    pub fn block(&self) -> usize {
        self.block
    }

    pub(crate) fn height(&self) -> usize {
        self.height
    }

    pub(crate) fn blocks(&self) -> usize {
        self.k / self.block
    }

    fn unit(&self) -> usize {
        if self.block == BLOCK32 { 32 } else { 64 }
    }

    /// Where token `t`'s codes begin in `q`; value `k` (a multiple of the unit) lies `k * height` further.
    #[inline(always)]
    pub(crate) fn q_base(&self, t: usize) -> usize {
        let (tile, row) = (t / self.height, t % self.height);
        tile * self.height * self.k + row * self.unit()
    }

    /// Where value `k` (a multiple of the unit) of token `t` lies in `q`.
    #[inline(always)]
    pub(crate) fn q_at(&self, t: usize, k: usize) -> usize {
        self.q_base(t) + k * self.height
    }

    /// Where token `t`'s scales begin in `d`; block `b`'s lies `b * height` further.
    #[inline(always)]
    pub(crate) fn d_base(&self, t: usize) -> usize {
        let (tile, row) = (t / self.height, t % self.height);
        tile * self.blocks() * self.height + row
    }

    /// Where block `b` of token `t` lies in `d`, `ds` and `sum32` (and, times 16, in `sum16`).
    #[inline(always)]
    pub(crate) fn d_at(&self, t: usize, b: usize) -> usize {
        self.d_base(t) + b * self.height
    }

    /// Quantises `x`, `[tokens, k]`, in blocks of `block` (32 or 256), over the pool. With two passes the second pass of
    /// token `t` is row `tokens + t`.
    ///
    /// # Panics
    /// If the room is too small, or `k` is not whole blocks.
    pub fn quantise(
        &mut self,
        pool: &Pool,
        isa: Isa,
        x: &[f32],
        tokens: usize,
        block: usize,
        passes: Passes,
    ) {
        let k = x.len() / tokens;
        assert!(block == BLOCK32 || block == BLOCK256, "blocks of {block}");
        assert_eq!(k % block, 0, "rows of {k} values in blocks of {block}");
        assert_eq!(x.len(), tokens * k, "values of {tokens} tokens");
        let rows = tokens * passes.count();
        let room = rows.next_multiple_of(TILE) * k;
        assert!(
            room <= self.q.len(),
            "{rows} rows of {k} values in a room of {}",
            self.q.len()
        );
        (self.block, self.tokens, self.k) = (block, rows, k);
        self.height = if rows < TILE { 1 } else { TILE };
        let (height, blocks, unit) = (self.height, self.blocks(), self.unit());
        let tiles = rows.div_ceil(height);
        let (q, d) = (Shared::new(&mut self.q), Shared::new(&mut self.d));
        let (ds, sum32, sum16) = (
            Shared::new(&mut self.ds),
            Shared::new(&mut self.sum32),
            Shared::new(&mut self.sum16),
        );
        let tile = |tile: usize| {
            let scales = tile * height * blocks;
            // SAFETY: each tile writes its own part of every buffer.
            let mut out = unsafe {
                TileOut {
                    first: tile * height,
                    passes: passes.count(),
                    height,
                    unit,
                    q: q.part(tile * height * k, height * k),
                    d: d.part(scales, height * blocks),
                    ds: ds.part(scales, height * blocks),
                    sum32: sum32.part(scales, height * blocks),
                    sum16: sum16.part(
                        scales * 16 * (block / BLOCK256),
                        height * blocks * 16 * (block / BLOCK256),
                    ),
                }
            };
            quantise_tile(isa, x, k, block, &mut out);
        };
        // Below some thousand values a fork costs more than it saves.
        if rows * k < 8192 {
            (0..tiles).for_each(tile)
        } else {
            pool.run(tiles, tile)
        }
    }

    /// One token in the form of the definition.
    pub fn row(&self, t: usize) -> ActRow {
        let unit = self.unit();
        let units = (0..self.k).step_by(unit);
        ActRow {
            block: self.block,
            q: units
                .flat_map(|k| self.q[self.q_at(t, k)..][..unit].iter().copied())
                .collect(),
            d: (0..self.blocks())
                .map(|b| self.d[self.d_at(t, b)])
                .collect(),
        }
    }
}

/// A tile's part of every buffer of [`Acts`].
struct TileOut<'a> {
    /// First row.
    first: usize,
    passes: usize,
    height: usize,
    unit: usize,
    q: &'a mut [i8],
    d: &'a mut [f32],
    ds: &'a mut [f32],
    sum32: &'a mut [i32],
    sum16: &'a mut [i16],
}

#[inline(always)]
fn quantise_tile_with<V: F32x16>(x: &[f32], k: usize, block: usize, out: &mut TileOut<'_>) {
    let (height, unit, tokens) = (out.height, out.unit, x.len() / k);
    let (mut codes, mut lost) = ([0i8; BLOCK256], [0f32; BLOCK256]);
    let (codes, lost) = (&mut codes[..block], &mut lost[..block]);
    for row in 0..height {
        let pass = (out.first + row) / tokens;
        let pass = if pass < out.passes { pass } else { 2 };
        for b in 0..k / block {
            let d = if pass < 2 {
                let x = &x[(out.first + row) % tokens * k + b * block..][..block];
                let d = quantise_block::<V>(x, codes);
                if pass == 0 {
                    d
                } else {
                    for ((lost, x), q) in lost.iter_mut().zip(x).zip(&*codes) {
                        *lost = (-d).mul_add(f32::from(*q), *x);
                    }
                    quantise_block::<V>(lost, codes)
                }
            } else {
                // The last tile is filled up with zeros.
                codes.fill(0);
                0.0
            };
            for (u, codes) in codes.chunks_exact(unit).enumerate() {
                out.q[(b * block + u * unit) * height + row * unit..][..unit]
                    .copy_from_slice(codes);
            }
            let at = b * height + row;
            out.d[at] = d;
            let sum = |codes: &[i8]| codes.iter().map(|&q| i32::from(q)).sum::<i32>();
            if block == BLOCK32 {
                let sum = sum(codes);
                out.sum32[at] = sum;
                out.ds[at] = d * sum as f32;
            } else {
                for (codes, out) in codes.chunks_exact(16).zip(&mut out.sum16[at * 16..][..16]) {
                    // 16 codes of at most 127.
                    *out = sum(codes) as i16;
                }
            }
        }
    }
}
simd_kernel! { fn quantise_tile(x: &[f32], k: usize, block: usize, out: &mut TileOut<'_>) = quantise_tile_with; }

/// [`quant::act::quantise_block`] in lanes.
#[inline(always)]
pub(crate) fn quantise_block<V: F32x16>(x: &[f32], q: &mut [i8]) -> f32 {
    let mut amax = V::splat(0.0);
    // A NaN or an infinity times zero is NaN and stays in this sum.
    let mut fault = V::splat(0.0);
    for x in x.chunks_exact(16) {
        let x = V::load(x);
        fault = x.fma(V::splat(0.0), fault);
        amax = x.abs().max(amax);
    }
    let (amax, fault) = (amax.max_lane(), fault.sum());
    if fault.is_nan() {
        q.fill(0);
        return f32::NAN;
    }
    if amax < AMAX_MIN {
        q.fill(0);
        return 0.0;
    }
    let inverse = V::splat(127.0 / amax);
    for (x, q) in x.chunks_exact(16).zip(q.chunks_exact_mut(16)) {
        V::load(x).mul(inverse).store_i8(q);
    }
    amax / 127.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Pinning;
    use proptest::prelude::*;

    fn value() -> impl Strategy<Value = f32> {
        prop_oneof![
            20 => -10f32..10.0,
            2 => any::<f32>(),
            1 => Just(f32::NAN),
            1 => Just(f32::INFINITY),
            1 => Just(1e-40),
            2 => Just(0.0),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn equals_the_definition(
            tokens in 1usize..40,
            blocks in 1usize..4,
            block in prop_oneof![Just(BLOCK32), Just(BLOCK256)],
            pool in proptest::collection::vec(value(), 4096),
            scale in -80i32..80,
            passes in prop_oneof![Just(Passes::One), Just(Passes::Two)],
        ) {
            let k = blocks * block;
            let x: Vec<f32> = (0..tokens * k).map(|i| pool[i * 7 % 4096] * 2f32.powi(scale)).collect();
            let workers = Pool::new(2, Pinning::Free).unwrap();
            for isa in Isa::available() {
                let mut acts = Acts::new(2 * tokens, k).unwrap();
                acts.quantise(&workers, isa, &x, tokens, block, passes);
                for t in 0..tokens * passes.count() {
                    let token = &x[t % tokens * k..][..k];
                    let first = ActRow::new(token, block);
                    let want = if t < tokens { first } else { first.second(token) };
                    let got = acts.row(t);
                    prop_assert_eq!(&got.q, &want.q, "{} token {}", isa, t);
                    for (b, (got, d)) in got.d.iter().zip(&want.d).enumerate() {
                        prop_assert!(got.to_bits() == d.to_bits() || got.is_nan() && d.is_nan());
                        let sums: Vec<i32> = quant::act::sums(&want.q[b * block..(b + 1) * block], 16).collect();
                        if block == BLOCK32 {
                            prop_assert_eq!(acts.sum32[acts.d_at(t, b)], sums.iter().sum::<i32>());
                        } else {
                            let at = acts.d_at(t, b) * 16;
                            let have: Vec<i32> = acts.sum16[at..at + 16].iter().map(|s| i32::from(*s)).collect();
                            prop_assert_eq!(have, sums);
                        }
                    }
                }
            }
        }
    }
}
