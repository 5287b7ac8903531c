//! Activations of several tokens as 8-bit blocks (`quant::act`), laid out as product kernels read them.
//!
//! ```text
//! codes   [token tile][K / unit][tile height][unit]      unit 32 (blocks of 32) or 64 (blocks of 256)
//! scales  [token tile][K / block][tile height]           f32 d
//! sums    [token tile][K / block][tile height][..]       blocks of 32: one i32; of 256: 16 i16, one for each 16 values
//! ```
//!
//! The tile height is 1 for up to [`LONE`] tokens, so that a token's codes are contiguous; [`TILE`] from as many tokens on, which is what
//! an AMX tile loads; and [`FEW`] in between, as many as vectors without a wide register file pass over at once. The last tile is filled up
//! with zero tokens.

use crate::isa::Isa;
use crate::mem::{Buffer, OutOfMemory, Shared};
use crate::pool::Pool;
use crate::simd::{F32x16, simd_kernel};
use quant::act::{AMAX_MIN, ActRow, BLOCK32, BLOCK256, Passes};

/// Tokens a tile when there are many.
pub const TILE: usize = 16;

/// Tokens a tile when there are more than [`LONE`], but not many.
pub const FEW: usize = 4;

/// Up to this many tokens are each a tile of its own.
pub const LONE: usize = 3;

/// The quantised activations of up to a maximum of tokens, reused from product to product.
#[derive(Debug)]
pub struct Acts {
    block: usize,
    tokens: usize,
    k: usize,
    q: Buffer<i8>,
    d: Buffer<f32>,
    ds: Buffer<f32>,
    sum32: Buffer<i32>,
    sum16: Buffer<i16>,
}

/// Quantised activations of some tokens, as kernels read them.
#[derive(Debug, Clone, Copy)]
pub struct ActsView<'a> {
    block: usize,
    tokens: usize,
    k: usize,
    /// Of the tile height, which is a power of two.
    height_log2: u32,
    pub(crate) q: &'a [i8],
    pub(crate) d: &'a [f32],
    /// Blocks of 32: `d * sum`, what formats with an offset multiply it with.
    pub(crate) ds: &'a [f32],
    pub(crate) sum32: &'a [i32],
    pub(crate) sum16: &'a [i16],
}

/// Some rows of [`Acts`] that are multiplied by themselves: an expert's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    /// The first row, a multiple of [`TILE`].
    pub(crate) first: usize,
    /// Rows: tokens times passes.
    pub(crate) rows: usize,
}

impl Segment {
    fn height(self) -> usize {
        match self.rows {
            0..=LONE => 1,
            TILE.. => TILE,
            _ => FEW,
        }
    }

    /// Tiles of tokens, each written by one thread.
    pub(crate) fn tiles(self) -> usize {
        self.rows.div_ceil(self.height())
    }

    /// Rows with those that fill the last tile up.
    fn padded(self) -> usize {
        self.tiles() * self.height()
    }
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

    /// All of them.
    pub fn view(&self) -> ActsView<'_> {
        self.segment(Segment {
            first: 0,
            rows: self.tokens,
        })
    }

    /// Those of one segment.
    pub(crate) fn segment(&self, segment: Segment) -> ActsView<'_> {
        let Self { block, k, .. } = *self;
        let (first, rows) = (segment.first, segment.padded());
        let scales = first * (k / block)..(first + rows) * (k / block);
        let halves = block / BLOCK256 * 16;
        ActsView {
            block,
            tokens: segment.rows,
            k,
            height_log2: segment.height().ilog2(),
            q: &self.q[first * k..(first + rows) * k],
            d: &self.d[scales.clone()],
            ds: &self.ds[scales.clone()],
            sum32: &self.sum32[scales.clone()],
            sum16: &self.sum16[scales.start * halves..scales.end * halves],
        }
    }

    /// Makes room for segments of `rows` rows in all, of `k` values in blocks of `block`, in the place of what was here.
    ///
    /// # Panics
    /// If the room is too small, or `k` is not whole blocks.
    pub(crate) fn write(&mut self, rows: usize, k: usize, block: usize) -> Writer<'_> {
        assert!(block == BLOCK32 || block == BLOCK256, "blocks of {block}");
        assert_eq!(k % block, 0, "rows of {k} values in blocks of {block}");
        let room = rows.next_multiple_of(TILE) * k;
        assert!(
            room <= self.q.len(),
            "{rows} rows of {k} values in a room of {}",
            self.q.len()
        );
        (self.block, self.tokens, self.k) = (block, rows, k);
        Writer {
            block,
            k,
            q: Shared::new(&mut self.q),
            d: Shared::new(&mut self.d),
            ds: Shared::new(&mut self.ds),
            sum32: Shared::new(&mut self.sum32),
            sum16: Shared::new(&mut self.sum16),
        }
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
        assert_eq!(x.len(), tokens * k, "values of {tokens} tokens");
        let rows = tokens * passes.count();
        let writer = self.write(rows, k, block);
        let all = Segment { first: 0, rows };
        // SAFETY: each tile is written once.
        let tile = |tile| unsafe { writer.quantise(isa, all, tile, x, passes) };
        spread(pool, all.tiles(), rows * k, tile);
    }
}

/// Makes rows of `x` `[tokens, k]` and quantises each where it was made, in one fork: `make` gets a token, its row of `a` `[tokens, len_a]` and
/// its row of `x`. `into` are for blocks of 32 and of 256.
///
/// # Panics
/// If a room is too small, or `k` is not whole blocks.
#[allow(clippy::too_many_arguments, reason = "one operation's operands")]
pub fn make_and_quantise<A: Send>(
    pool: &Pool,
    isa: Isa,
    a: &mut [A],
    len_a: usize,
    x: &mut [f32],
    tokens: usize,
    into: [Option<&mut Acts>; 2],
    make: impl Fn(usize, &mut [A], &mut [f32]) + Sync,
) {
    let k = x.len() / tokens;
    assert_eq!((a.len(), x.len()), (tokens * len_a, tokens * k), "rows");
    let [into32, into256] = into;
    let writers = [
        into32.map(|acts| acts.write(tokens, k, BLOCK32)),
        into256.map(|acts| acts.write(tokens, k, BLOCK256)),
    ];
    let all = Segment {
        first: 0,
        rows: tokens,
    };
    let (a, x) = (Shared::new(a), Shared::new(x));
    // Making a value takes about as long as quantising it.
    spread(pool, all.tiles(), 2 * tokens * k, |tile| {
        let first = tile * all.height();
        let n = all.height().min(tokens - first);
        // SAFETY: each row is in one tile, and each tile is one item.
        let (a, x) = unsafe { (a.part(first * len_a, n * len_a), x.part(first * k, n * k)) };
        for t in 0..n {
            make(
                first + t,
                &mut a[t * len_a..][..len_a],
                &mut x[t * k..][..k],
            );
        }
        for writer in writers.iter().flatten() {
            // SAFETY: each tile is written once.
            unsafe { writer.quantise_some(isa, all, tile, x) };
        }
    });
}

/// Below some thousand values a fork costs more than it saves.
pub(crate) fn spread(pool: &Pool, items: usize, values: usize, f: impl Fn(usize) + Sync) {
    if values < 8192 {
        (0..items).for_each(f);
    } else {
        pool.run(items, f);
    }
}

/// Writes segments, tile by tile, on any thread.
pub(crate) struct Writer<'a> {
    block: usize,
    k: usize,
    q: Shared<'a, i8>,
    d: Shared<'a, f32>,
    ds: Shared<'a, f32>,
    sum32: Shared<'a, i32>,
    sum16: Shared<'a, i16>,
}

impl Writer<'_> {
    /// # Safety
    /// Nobody else may have this tile.
    unsafe fn tile(&self, segment: Segment, tile: usize) -> TileOut<'_> {
        let (height, blocks) = (segment.height(), self.k / self.block);
        let first = segment.first + tile * height;
        let (scales, n) = (first * blocks, height * blocks);
        let halves = self.block / BLOCK256 * 16;
        // SAFETY: rows of one tile lie together, and the tile is the caller's alone.
        unsafe {
            TileOut {
                first: tile * height,
                height,
                q: self.q.part(first * self.k, height * self.k),
                d: self.d.part(scales, n),
                ds: self.ds.part(scales, n),
                sum32: self.sum32.part(scales, n),
                sum16: self.sum16.part(scales * halves, n * halves),
            }
        }
    }

    /// Quantises tile `tile` of a segment whose tokens have the values `x`, pass by pass.
    ///
    /// # Safety
    /// Each tile of a segment may be written by one thread only, and segments may not overlap.
    pub(crate) unsafe fn quantise(
        &self,
        isa: Isa,
        segment: Segment,
        tile: usize,
        x: &[f32],
        passes: Passes,
    ) {
        // SAFETY: the caller's promise.
        let mut out = unsafe { self.tile(segment, tile) };
        let (tokens, passes) = (x.len() / self.k, passes.count());
        quantise_tile(isa, x, 0, tokens, self.k, self.block, passes, &mut out);
    }

    /// The same with one pass, of which only the tile's tokens are there.
    ///
    /// # Safety
    /// As [`Writer::quantise`].
    unsafe fn quantise_some(&self, isa: Isa, segment: Segment, tile: usize, x: &[f32]) {
        // SAFETY: the caller's promise.
        let mut out = unsafe { self.tile(segment, tile) };
        let (first, tokens) = (out.first, segment.rows);
        quantise_tile(isa, x, first, tokens, self.k, self.block, 1, &mut out);
    }

    /// Fills tile `tile` of a segment whose row `r` is row `rows[r]` of `from`.
    ///
    /// # Safety
    /// As [`Writer::quantise`].
    pub(crate) unsafe fn gather(
        &self,
        segment: Segment,
        tile: usize,
        from: &ActsView<'_>,
        rows: impl Fn(usize) -> usize,
    ) {
        assert_eq!(
            (self.block, self.k),
            (from.block, from.k),
            "rows of one kind"
        );
        // SAFETY: the caller's promise.
        let mut out = unsafe { self.tile(segment, tile) };
        for row in 0..out.height {
            let r = out.first + row;
            let from_row = (r < segment.rows).then(|| rows(r));
            match self.block {
                BLOCK32 => out.copy::<32>(row, from, from_row),
                _ => out.copy::<64>(row, from, from_row),
            }
        }
    }
}

/// Codes that lie together.
fn unit(block: usize) -> usize {
    if block == BLOCK32 { 32 } else { 64 }
}

impl ActsView<'_> {
    /// Rows of codes: tokens times passes.
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

    #[inline(always)]
    pub(crate) fn height(&self) -> usize {
        1 << self.height_log2
    }

    /// The tile of a token, and its row there.
    #[inline(always)]
    fn place(&self, t: usize) -> (usize, usize) {
        (t >> self.height_log2, t & (self.height() - 1))
    }

    #[inline(always)]
    pub(crate) fn blocks(&self) -> usize {
        self.k / self.block
    }

    /// Where token `t`'s codes begin in `q`; value `k` (a multiple of the unit) lies `k * height` further.
    #[inline(always)]
    pub(crate) fn q_base(&self, t: usize) -> usize {
        let (tile, row) = self.place(t);
        ((tile * self.k) << self.height_log2) + row * unit(self.block)
    }

    /// Where value `k` (a multiple of the unit) of token `t` lies in `q`.
    #[inline(always)]
    pub(crate) fn q_at(&self, t: usize, k: usize) -> usize {
        self.q_base(t) + (k << self.height_log2)
    }

    /// Where token `t`'s scales begin in `d`; block `b`'s lies `b * height` further.
    #[inline(always)]
    pub(crate) fn d_base(&self, t: usize) -> usize {
        let (tile, row) = self.place(t);
        ((tile * self.blocks()) << self.height_log2) + row
    }

    /// Where block `b` of token `t` lies in `d`, `ds` and `sum32` (and, times 16, in `sum16`).
    #[inline(always)]
    pub(crate) fn d_at(&self, t: usize, b: usize) -> usize {
        self.d_base(t) + (b << self.height_log2)
    }

    /// One token in the form of the definition.
    pub fn row(&self, t: usize) -> ActRow {
        let unit = unit(self.block);
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
    height: usize,
    q: &'a mut [i8],
    d: &'a mut [f32],
    ds: &'a mut [f32],
    sum32: &'a mut [i32],
    sum16: &'a mut [i16],
}

impl TileOut<'_> {
    /// Copies row `t` of `from` to row `row`; `None`: zeros.
    fn copy<const UNIT: usize>(&mut self, row: usize, from: &ActsView<'_>, t: Option<usize>) {
        let height = self.height;
        let (units, blocks) = (from.k / UNIT, from.blocks());
        let Some(t) = t else {
            for u in 0..units {
                self.q[(u * height + row) * UNIT..][..UNIT].fill(0);
            }
            for at in (0..blocks).map(|b| b * height + row) {
                (self.d[at], self.ds[at], self.sum32[at]) = (0.0, 0.0, 0);
                if from.block == BLOCK256 {
                    self.sum16[at * 16..][..16].fill(0);
                }
            }
            return;
        };
        let base = from.q_base(t);
        for u in 0..units {
            let codes: &[i8; UNIT] = from.q[base + u * UNIT * from.height()..]
                .first_chunk()
                .expect("whole units");
            self.q[(u * height + row) * UNIT..][..UNIT].copy_from_slice(codes);
        }
        for b in 0..blocks {
            let (to, at) = (b * height + row, from.d_at(t, b));
            self.d[to] = from.d[at];
            if from.block == BLOCK32 {
                (self.ds[to], self.sum32[to]) = (from.ds[at], from.sum32[at]);
            } else {
                self.sum16[to * 16..][..16].copy_from_slice(&from.sum16[at * 16..][..16]);
            }
        }
    }
}

/// `x` are the values of tokens from `x_first` on, of `tokens` in all.
#[allow(
    clippy::too_many_arguments,
    reason = "shapes and strides of one operation"
)]
#[inline(always)]
fn quantise_tile_of<V: F32x16, const BLOCK: usize>(
    x: &[f32],
    x_first: usize,
    tokens: usize,
    k: usize,
    passes: usize,
    out: &mut TileOut<'_>,
) {
    let (height, unit) = (out.height, unit(BLOCK));
    let (scratch, lost) = (&mut [0i8; BLOCK], &mut [0f32; BLOCK]);
    for row in 0..height {
        let pass = (out.first + row) / tokens;
        let pass = if pass < passes { pass } else { 2 };
        for b in 0..k / BLOCK {
            let to = (b * BLOCK) * height + row * unit;
            // A block of 32 lies where it is written, one of 256 does not lie together.
            let codes = if BLOCK == BLOCK32 {
                &mut out.q[to..][..BLOCK]
            } else {
                &mut scratch[..]
            };
            let (d, sum) = if pass < 2 {
                let t = (out.first + row) % tokens - x_first;
                let x = &x[t * k + b * BLOCK..][..BLOCK];
                let quantise = |x: &[f32], codes: &mut [i8]| {
                    if BLOCK == BLOCK32 {
                        quantise_and_sum::<V, true>(x, codes)
                    } else {
                        (quantise_block::<V>(x, codes), 0.0)
                    }
                };
                let (d, sum) = quantise(x, codes);
                if pass == 0 {
                    (d, sum)
                } else {
                    for ((lost, x), q) in lost.iter_mut().zip(x).zip(&*codes) {
                        *lost = (-d).mul_add(f32::from(*q), *x);
                    }
                    quantise(lost, codes)
                }
            } else {
                // The last tile is filled up with zeros.
                codes.fill(0);
                (0.0, 0.0)
            };
            let at = b * height + row;
            out.d[at] = d;
            if BLOCK == BLOCK32 {
                out.sum32[at] = sum as i32;
                out.ds[at] = d * sum;
            } else {
                for (u, codes) in scratch.chunks_exact(unit).enumerate() {
                    out.q[to + u * unit * height..][..unit].copy_from_slice(codes);
                }
                let sum = |codes: &[i8]| codes.iter().map(|&q| i32::from(q)).sum::<i32>();
                for (codes, out) in scratch
                    .chunks_exact(16)
                    .zip(&mut out.sum16[at * 16..][..16])
                {
                    // 16 codes of at most 127.
                    *out = sum(codes) as i16;
                }
            }
        }
    }
}

#[allow(
    clippy::too_many_arguments,
    reason = "shapes and strides of one operation"
)]
#[inline(always)]
fn quantise_tile_with<V: F32x16>(
    x: &[f32],
    x_first: usize,
    tokens: usize,
    k: usize,
    block: usize,
    passes: usize,
    out: &mut TileOut<'_>,
) {
    if block == BLOCK32 {
        quantise_tile_of::<V, BLOCK32>(x, x_first, tokens, k, passes, out);
    } else {
        quantise_tile_of::<V, BLOCK256>(x, x_first, tokens, k, passes, out);
    }
}
simd_kernel! { fn quantise_tile(x: &[f32], x_first: usize, tokens: usize, k: usize, block: usize, passes: usize, out: &mut TileOut<'_>) = quantise_tile_with; }

/// [`quant::act::quantise_block`] in lanes.
#[inline(always)]
pub(crate) fn quantise_block<V: F32x16>(x: &[f32], q: &mut [i8]) -> f32 {
    quantise_and_sum::<V, false>(x, q).0
}

/// The same, and with `SUM` the sum of the codes (exact: they are integers, and small).
#[inline(always)]
fn quantise_and_sum<V: F32x16, const SUM: bool>(x: &[f32], q: &mut [i8]) -> (f32, f32) {
    let mut amax = V::splat(0.0);
    // A NaN or an infinity times zero is NaN and stays in this sum.
    let mut fault = V::splat(0.0);
    for x in x.chunks_exact(16) {
        let x = V::load(x);
        fault = x.fma(V::splat(0.0), fault);
        amax = x.abs().max(amax);
    }
    if fault.any_nan() {
        q.fill(0);
        return (f32::NAN, 0.0);
    }
    let amax = amax.max_lane();
    if amax < AMAX_MIN {
        q.fill(0);
        return (0.0, 0.0);
    }
    let inverse = V::splat(127.0 / amax);
    let mut sum = V::splat(0.0);
    for (x, q) in x.chunks_exact(16).zip(q.chunks_exact_mut(16)) {
        let x = V::load(x).mul(inverse);
        x.store_i8(q);
        if SUM {
            sum = sum.add(x.round());
        }
    }
    (amax / 127.0, sum.sum())
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
                let acts = acts.view();
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

    #[test]
    fn rows_that_are_made_are_quantised_like_others() {
        let pool = Pool::new(2, Pinning::Free).unwrap();
        let (k, isa) = (512, Isa::best());
        for tokens in [1, 2, 4, 5, 8, 15, 16, 33] {
            let value = |i: usize| (i * 37 % 1009) as f32 - 500.0;
            let want: Vec<f32> = (0..tokens * k).map(value).collect();
            let (mut seen, mut x) = (vec![0; tokens], vec![f32::NAN; tokens * k]);
            let [mut a32, mut a256] = [(); 2].map(|()| Acts::new(tokens, k).unwrap());
            let into = [Some(&mut a32), Some(&mut a256)];
            let make = |t: usize, seen: &mut [i32], x: &mut [f32]| {
                seen[0] += 1;
                x.copy_from_slice(&want[t * k..][..k]);
            };
            make_and_quantise(&pool, isa, &mut seen, 1, &mut x, tokens, into, make);
            assert!(x == want && seen.iter().all(|&n| n == 1), "{tokens} tokens");
            for (made, block) in [(&a32, BLOCK32), (&a256, BLOCK256)] {
                let mut acts = Acts::new(tokens, k).unwrap();
                acts.quantise(&pool, isa, &want, tokens, block, Passes::One);
                let (made, acts) = (made.view(), acts.view());
                assert_eq!((made.tokens(), made.k()), (tokens, k));
                assert!(made.q == acts.q && made.d == acts.d && made.ds == acts.ds);
                assert!(made.sum32 == acts.sum32 && made.sum16 == acts.sum16);
            }
        }
    }

    #[test]
    fn gathered_rows_are_those_that_were_quantised() {
        let (tokens, k) = (21, 512);
        let x: Vec<f32> = (0..tokens * k)
            .map(|i| (i * 37 % 1009) as f32 - 500.0)
            .collect();
        let pool = Pool::new(1, Pinning::Free).unwrap();
        let segments =
            [(0, 3), (16, 17), (48, 1), (64, 16)].map(|(first, rows)| Segment { first, rows });
        let source = |i: usize, r: usize| (i * 11 + r * 5) % tokens;
        for block in [BLOCK32, BLOCK256] {
            for of in [tokens, 9] {
                let mut all = Acts::new(tokens, k).unwrap();
                all.quantise(&pool, Isa::best(), &x[..of * k], of, block, Passes::One);
                let mut acts = Acts::new(80, k).unwrap();
                let writer = acts.write(80, k, block);
                for (i, &segment) in segments.iter().enumerate() {
                    for tile in 0..segment.tiles() {
                        // SAFETY: one thread, each tile once.
                        unsafe {
                            writer.gather(segment, tile, &all.view(), |r| source(i, r) % of);
                        }
                    }
                }
                for (i, &segment) in segments.iter().enumerate() {
                    let (got, all) = (acts.segment(segment), all.view());
                    assert_eq!(got.tokens(), segment.rows);
                    for r in 0..segment.rows {
                        let t = source(i, r) % of;
                        let (have, want) = (got.row(r), all.row(t));
                        assert_eq!((have.q, have.d), (want.q, want.d));
                        for b in 0..got.blocks() {
                            let (at, from) = (got.d_at(r, b), all.d_at(t, b));
                            if block == BLOCK32 {
                                assert_eq!(got.sum32[at], all.sum32[from]);
                                assert_eq!(got.ds[at], all.ds[from]);
                            } else {
                                assert_eq!(
                                    got.sum16[at * 16..][..16],
                                    all.sum16[from * 16..][..16]
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}
