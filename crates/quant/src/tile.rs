//! The one layout of weights in memory, shared by every CPU and GPU kernel.
//!
//! Rows are grouped by [`ROWS`] into *tiles*; a tile holds its blocks (of 32 or 256 values) one after the other along K,
//! and inside a block the rows' fields are interleaved, so that one vector register holds the same field of 16 rows.
//! A matrix takes exactly as many bytes as in its file.
//!
//! ```text
//! matrix [N, K]        tile 0 | tile 1 | ... | last tile (N mod 16 rows, if not zero)
//! tile                 block 0 | block 1 | ... | block K/32-1 (or K/256-1)
//! block, R rows        field 0: [n][R][w bytes] | field 1: [n][R][w bytes] | ...
//! ```
//!
//! The fields of a row's block are those of the file, except that codes are regrouped into *planes* of 4-byte words.
//! A *group* is 4 consecutive values: group `g` of a run of 32 is values `4g..4g+4`, and byte `j` of a word belongs to
//! value `4g+j`. A 32-bit lane then holds 4 values of one row, as `vpdpbusd`, AMX and `mma.m16n8k32` want them.
//!
//! ```text
//! 8-bit plane  8 words: word g = group g
//! 4-bit plane  4 words: word g = group g (low nibbles) and group g+4 (high nibbles)
//! 2-bit plane  2 words: word h = groups 4h+i in bits 2i, 2i+1 of each byte
//! 1-bit plane  1 word:  group i in bit i of each byte
//! ```
//!
//! | format | fields `[n] x w`, a row's block | codes |
//! |---|---|---|
//! | Q4_0, IQ4_NL | d `1x2`, nibbles `4x4` | 4 bits |
//! | Q4_1 | d `1x2`, m `1x2`, nibbles `4x4` | 4 bits |
//! | Q5_0 | d `1x2`, high `1x4`, nibbles `4x4` | 5 bits |
//! | Q5_1 | d `1x2`, m `1x2`, high `1x4`, nibbles `4x4` | 5 bits |
//! | Q8_0 | d `1x2`, bytes `8x4` | 8 bits, signed |
//! | MXFP4 | e `1x1`, nibbles `4x4` | 4 bits |
//! | Q2_K | scales `16x1`, d `1x2`, dmin `1x2`, then 8 of (2-bit `2x4`) | 2 bits |
//! | Q3_K | scales `12x1`, d `1x2`, then 8 of (high `1x4`, 2-bit `2x4`) | 3 bits |
//! | Q4_K | d `1x2`, dmin `1x2`, scales `12x1`, then 8 of (nibbles `4x4`) | 4 bits |
//! | Q5_K | d `1x2`, dmin `1x2`, scales `12x1`, then 8 of (high `1x4`, nibbles `4x4`) | 5 bits |
//! | Q6_K | scales `16x1`, d `1x2`, then 8 of (2-bit high `2x4`, nibbles `4x4`) | 6 bits |
//! | IQ4_XS | d `1x2`, scales_h `1x2`, scales_l `4x1`, then 8 of (nibbles `4x4`) | 4 bits |
//! | IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S | d `1x2`, the file's bytes `n x 1` | grid indices |
//! | F32, F16, BF16 | a block is one value: `1x4` or `1x2` | |

mod direct;
mod file;

use gguf::TensorType;

/// Rows a tile.
pub const ROWS: usize = 16;

/// How many items, each of how many bytes, a field of a row's block has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    /// Items.
    pub n: usize,
    /// Bytes an item.
    pub w: usize,
}

const fn f(n: usize, w: usize) -> Field {
    Field { n, w }
}

/// How a format's codes are regrouped into planes, run of 32 values by run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Planes {
    /// Bits a code kept in the low plane: 2 or 4.
    low_bits: u32,
    /// Bits a code kept in the high plane: 0, 1 or 2.
    high_bits: u32,
}

/// A format's layout: the fields before the planes, then the planes of each run of 32 values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    ty: TensorType,
    // Kept, since looking them up by format takes a jump that kernels would make for every block.
    block_bytes: usize,
    block_len: usize,
    header: &'static [Field],
    planes: Option<Planes>,
}

impl Layout {
    /// The layout of a supported format; `None` for one that products cannot use.
    pub const fn of(ty: TensorType) -> Option<Self> {
        const fn planes(low_bits: u32, high_bits: u32) -> Option<Planes> {
            Some(Planes {
                low_bits,
                high_bits,
            })
        }
        let (header, planes): (&'static [Field], Option<Planes>) = match ty {
            TensorType::F32 => (const { &[f(1, 4)] }, None),
            TensorType::F16 | TensorType::BF16 => (const { &[f(1, 2)] }, None),
            TensorType::Q4_0 | TensorType::IQ4_NL => (const { &[f(1, 2)] }, planes(4, 0)),
            TensorType::Q4_1 => (const { &[f(1, 2), f(1, 2)] }, planes(4, 0)),
            TensorType::Q5_0 => (const { &[f(1, 2)] }, planes(4, 1)),
            TensorType::Q5_1 => (const { &[f(1, 2), f(1, 2)] }, planes(4, 1)),
            TensorType::Q8_0 => (const { &[f(1, 2), f(8, 4)] }, None),
            TensorType::MXFP4 => (const { &[f(1, 1)] }, planes(4, 0)),
            TensorType::Q2_K => (const { &[f(16, 1), f(1, 2), f(1, 2)] }, planes(2, 0)),
            TensorType::Q3_K => (const { &[f(12, 1), f(1, 2)] }, planes(2, 1)),
            TensorType::Q4_K => (const { &[f(1, 2), f(1, 2), f(12, 1)] }, planes(4, 0)),
            TensorType::Q5_K => (const { &[f(1, 2), f(1, 2), f(12, 1)] }, planes(4, 1)),
            TensorType::Q6_K => (const { &[f(16, 1), f(1, 2)] }, planes(4, 2)),
            TensorType::IQ4_XS => (const { &[f(1, 2), f(1, 2), f(4, 1)] }, planes(4, 0)),
            TensorType::IQ2_XXS => (const { &[f(1, 2), f(64, 1)] }, None),
            TensorType::IQ2_XS => (const { &[f(1, 2), f(72, 1)] }, None),
            TensorType::IQ2_S => (const { &[f(1, 2), f(80, 1)] }, None),
            TensorType::IQ3_XXS => (const { &[f(1, 2), f(96, 1)] }, None),
            TensorType::IQ3_S => (const { &[f(1, 2), f(108, 1)] }, None),
            _ => return None,
        };
        Some(Self {
            ty,
            block_bytes: ty.block_bytes(),
            block_len: ty.block_len(),
            header,
            planes,
        })
    }

    /// Bytes of one row's block, as in the file.
    #[inline]
    pub const fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Values of one block: 1, 32 or 256.
    #[inline]
    pub const fn block_len(&self) -> usize {
        self.block_len
    }

    /// All fields in order.
    fn fields(&self) -> impl Iterator<Item = Field> + '_ {
        let planes: [Option<Field>; 2] = match self.planes {
            None => [None, None],
            Some(Planes {
                low_bits,
                high_bits,
            }) => [
                (high_bits > 0).then(|| f(high_bits as usize, 4)),
                Some(f(low_bits as usize, 4)),
            ],
        };
        let runs = if self.planes.is_some() {
            self.block_len() / 32
        } else {
            0
        };
        self.header
            .iter()
            .copied()
            .chain((0..runs).flat_map(move |_| planes.into_iter().flatten()))
    }

    /// Interleaves `rows` rows' records of one block, `stride` bytes apart, into a tile's block.
    ///
    /// A record is a row's block, regrouped by [`Layout::regroup`].
    fn interleave(&self, rows: usize, stride: usize, records: &[u8], tile_block: &mut [u8]) {
        let (mut from, mut to) = (0, 0);
        for Field { n, w } in self.fields() {
            let out = &mut tile_block[to..to + n * w * rows];
            match (w, rows) {
                // Nearly all: what is known when it is compiled is several times as fast.
                (1, ROWS) => interleave_items::<1>(ROWS, stride, from, records, out),
                (2, ROWS) => interleave_items::<2>(ROWS, stride, from, records, out),
                (4, ROWS) => interleave_items::<4>(ROWS, stride, from, records, out),
                (1, _) => interleave_items::<1>(rows, stride, from, records, out),
                (2, _) => interleave_items::<2>(rows, stride, from, records, out),
                _ => interleave_items::<4>(rows, stride, from, records, out),
            }
            from += n * w;
            to += n * w * rows;
        }
        debug_assert_eq!(to, tile_block.len());
    }

    /// Takes row `r`'s record of one block out of a tile's block of `rows` rows.
    fn pick(&self, rows: usize, r: usize, tile_block: &[u8], record: &mut [u8]) {
        let (mut from, mut to) = (0, 0);
        for Field { n, w } in self.fields() {
            for i in 0..n {
                let src = from + (i * rows + r) * w;
                record[to..to + w].copy_from_slice(&tile_block[src..src + w]);
                to += w;
            }
            from += n * w * rows;
        }
    }

    /// Takes row `r`'s block out of a tile's block of `rows` rows, in the file's own form.
    pub fn pick_file(&self, rows: usize, r: usize, tile_block: &[u8], block: &mut [u8]) {
        let mut record = [0u8; MAX_BLOCK_BYTES];
        let record = &mut record[..self.block_bytes()];
        self.pick(rows, r, tile_block, record);
        self.ungroup(record, block);
    }

    /// A tile's block of fewer rows as one of [`ROWS`] rows, the missing ones zero.
    pub fn pad(&self, rows: usize, tile_block: &[u8], padded: &mut [u8]) {
        let (mut from, mut to) = (0, 0);
        for Field { n, w } in self.fields() {
            for _ in 0..n {
                let (have, want) = (rows * w, ROWS * w);
                padded[to..to + have].copy_from_slice(&tile_block[from..from + have]);
                padded[to + have..to + want].fill(0);
                from += have;
                to += want;
            }
        }
    }

    /// One row's block from file order to planes.
    fn regroup(&self, block: &[u8], record: &mut [u8]) {
        let Some(planes) = self.planes else {
            return record.copy_from_slice(block);
        };
        if direct::regroup(self.ty, block, record) {
            return;
        }
        let mut codes = [0u8; 256];
        let codes = &mut codes[..self.block_len()];
        let header = file::split(self.ty, block, codes);
        let mut at = header.len();
        record[..at].copy_from_slice(header.as_slice());
        for run in codes.chunks_exact(32) {
            at += planes.write(run, &mut record[at..]);
        }
        debug_assert_eq!(at, record.len());
    }

    /// The inverse of [`Layout::regroup`].
    fn ungroup(&self, record: &[u8], block: &mut [u8]) {
        let Some(planes) = self.planes else {
            return block.copy_from_slice(record);
        };
        let mut codes = [0u8; 256];
        let codes = &mut codes[..self.block_len()];
        let mut at = self.header.iter().map(|f| f.n * f.w).sum();
        let header = &record[..at];
        for run in codes.chunks_exact_mut(32) {
            at += planes.read(&record[at..], run);
        }
        file::join(self.ty, header, codes, block);
    }
}

/// Item `i` of every row, then item `i + 1` of every row, ...
#[inline(always)]
fn interleave_items<const W: usize>(
    rows: usize,
    stride: usize,
    from: usize,
    records: &[u8],
    out: &mut [u8],
) {
    let len = out.len() / rows;
    for r in 0..rows {
        let items = &records[r * stride + from..][..len];
        let places = out.chunks_exact_mut(W * rows);
        for (item, place) in items.chunks_exact(W).zip(places) {
            place[r * W..(r + 1) * W].copy_from_slice(item);
        }
    }
}

impl Planes {
    /// Writes a run's planes, returns the bytes written.
    fn write(&self, codes: &[u8], out: &mut [u8]) -> usize {
        let Self {
            low_bits,
            high_bits,
        } = *self;
        let codes: &[u8; 32] = codes.try_into().expect("a run of 32 codes");
        let high_bytes = 4 * high_bits as usize;
        let bytes = high_bytes + 4 * low_bits as usize;
        let (high, low) = out[..bytes].split_at_mut(high_bytes);
        match high_bits {
            1 => {
                for (byte, high) in high.iter_mut().enumerate() {
                    *high = (0..8).fold(0, |word, group| {
                        word | (codes[4 * group + byte] >> low_bits) << group
                    });
                }
            }
            2 => pack_two_bits(codes, low_bits, high),
            _ => {}
        }
        if low_bits == 4 {
            for (i, low) in low.iter_mut().enumerate() {
                *low = codes[i] & 15 | codes[i + 16] << 4;
            }
        } else {
            pack_two_bits(codes, 0, low);
        }
        bytes
    }

    /// Reads a run's planes, returns the bytes read.
    fn read(&self, planes: &[u8], codes: &mut [u8]) -> usize {
        let Self {
            low_bits,
            high_bits,
        } = *self;
        let high_bytes = 4 * high_bits as usize;
        for (i, code) in codes.iter_mut().enumerate() {
            let (group, byte) = (i / 4, i % 4);
            let per_word = 8 / low_bits as usize;
            let (word, slot) = low_place(low_bits, group, per_word);
            *code = planes[high_bytes + 4 * word + byte] >> (low_bits as usize * slot)
                & ((1 << low_bits) - 1);
            if high_bits > 0 {
                let per_word = 8 / high_bits as usize;
                let shift = high_bits as usize * (group % per_word);
                let high = planes[4 * (group / per_word) + byte] >> shift & ((1 << high_bits) - 1);
                *code |= high << low_bits;
            }
        }
        4 * (low_bits + high_bits) as usize
    }
}

/// Two bits of each code, from bit `shift` on: 4 neighbouring groups a word.
fn pack_two_bits(codes: &[u8; 32], shift: u32, out: &mut [u8]) {
    for (i, out) in out.iter_mut().enumerate() {
        let (word, byte) = (i / 4, i % 4);
        *out = (0..4).fold(0, |bits, i| {
            bits | (codes[16 * word + 4 * i + byte] >> shift & 3) << (2 * i)
        });
    }
}

/// Word and slot of a group in the low plane: nibbles pair group g with g + 4; two bits pack 4 neighbours.
fn low_place(low_bits: u32, group: usize, per_word: usize) -> (usize, usize) {
    if low_bits == 4 {
        (group % 4, group / 4)
    } else {
        (group / per_word, group % per_word)
    }
}

/// A weight matrix `[N, K]` in tile layout, borrowed.
#[derive(Debug, Clone, Copy)]
pub struct TileMatrix<'a> {
    layout: Layout,
    n: usize,
    k: usize,
    data: &'a [u8],
}

impl<'a> TileMatrix<'a> {
    /// Wraps tile data of `n` rows of `k` values.
    ///
    /// # Panics
    /// If the format is not supported, `k` is not whole blocks or the length of `data` is not that of `n` rows: the
    /// loader has checked all three.
    pub fn new(ty: TensorType, n: usize, k: usize, data: &'a [u8]) -> Self {
        let layout = Layout::of(ty).unwrap_or_else(|| panic!("{} has no tile layout", ty.name()));
        assert_eq!(
            k % layout.block_len(),
            0,
            "rows of {} are whole blocks",
            ty.name()
        );
        let m = Self { layout, n, k, data };
        assert_eq!(
            data.len(),
            n * m.row_bytes(),
            "bytes of {n} rows of {k} {} values",
            ty.name()
        );
        m
    }

    /// The format.
    #[inline]
    pub fn ty(&self) -> TensorType {
        self.layout.ty
    }

    /// The format's layout.
    #[inline]
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Rows (outputs).
    #[inline]
    pub fn n(&self) -> usize {
        self.n
    }

    /// Values a row (inputs).
    #[inline]
    pub fn k(&self) -> usize {
        self.k
    }

    /// Blocks a row.
    #[inline]
    pub fn blocks(&self) -> usize {
        self.k / self.layout.block_len()
    }

    /// Bytes a row.
    #[inline]
    pub fn row_bytes(&self) -> usize {
        self.blocks() * self.layout.block_bytes()
    }

    /// All bytes.
    #[inline]
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// Number of tiles.
    #[inline]
    pub fn tiles(&self) -> usize {
        self.n.div_ceil(ROWS)
    }

    /// Rows of tile `i`: [`ROWS`] except perhaps in the last.
    #[inline]
    pub fn tile_rows(&self, i: usize) -> usize {
        ROWS.min(self.n - i * ROWS)
    }

    /// Bytes of tile `i`.
    #[inline]
    pub fn tile(&self, i: usize) -> &'a [u8] {
        let start = i * ROWS * self.row_bytes();
        &self.data[start..start + self.tile_rows(i) * self.row_bytes()]
    }

    /// Row `row`'s block `b` in the file's own form.
    pub fn file_block(&self, row: usize, b: usize, out: &mut [u8]) {
        let (tile, rows, bytes) = (
            row / ROWS,
            self.tile_rows(row / ROWS),
            self.layout.block_bytes(),
        );
        let tile_block = &self.tile(tile)[b * rows * bytes..(b + 1) * rows * bytes];
        self.layout
            .pick_file(rows, row % ROWS, tile_block, &mut out[..bytes]);
    }

    /// Decodes row `row` to `f32` (embedding look-up).
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.k, "one value a column");
        let (len, bytes) = (self.layout.block_len(), self.layout.block_bytes());
        let mut block = [0u8; MAX_BLOCK_BYTES];
        for (b, out) in out.chunks_exact_mut(len).enumerate() {
            self.file_block(row, b, &mut block);
            crate::formats::decode_row(self.ty(), &block[..bytes], out)
                .expect("a supported format and one whole block");
        }
    }
}

/// The largest block of any supported format (Q8_K-like sizes are not among them): Q6_K has 210 bytes.
pub const MAX_BLOCK_BYTES: usize = 256;

/// Permutes up to [`ROWS`] rows of a file into one tile.
///
/// `rows` are the file's bytes of `n` whole rows; `tile` has the same length.
pub fn permute_tile(layout: Layout, n: usize, rows: &[u8], tile: &mut [u8]) {
    assert!(
        (1..=ROWS).contains(&n) && rows.len() == tile.len() && rows.len().is_multiple_of(n),
        "whole rows of one tile"
    );
    let (row_bytes, bytes) = (rows.len() / n, layout.block_bytes());
    if layout.block_len() == 1 {
        return match (bytes, n) {
            (2, ROWS) => transpose::<2>(ROWS, row_bytes, rows, tile),
            (4, ROWS) => transpose::<4>(ROWS, row_bytes, rows, tile),
            (2, _) => transpose::<2>(n, row_bytes, rows, tile),
            _ => transpose::<4>(n, row_bytes, rows, tile),
        };
    }
    let mut records = [0u8; ROWS * MAX_BLOCK_BYTES];
    for (b, tile_block) in tile.chunks_exact_mut(n * bytes).enumerate() {
        if layout.planes.is_none() || direct::is_as_in_file(layout.ty) {
            layout.interleave(n, row_bytes, &rows[b * bytes..], tile_block);
            continue;
        }
        for r in 0..n {
            let block = &rows[r * row_bytes + b * bytes..][..bytes];
            layout.regroup(block, &mut records[r * bytes..][..bytes]);
        }
        layout.interleave(n, bytes, &records[..n * bytes], tile_block);
    }
}

/// Plain numbers of `W` bytes: the first of every row, then the second of every row, ...
#[inline(always)]
fn transpose<const W: usize>(n: usize, row_bytes: usize, rows: &[u8], tile: &mut [u8]) {
    for (i, out) in tile.chunks_exact_mut(n * W).enumerate() {
        for (r, out) in out.chunks_exact_mut(W).enumerate() {
            let at = r * row_bytes + i * W;
            let item: [u8; W] = rows[at..at + W].try_into().expect("W bytes");
            out.copy_from_slice(&item);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(n: usize, mut seed: u64) -> Vec<u8> {
        (0..n)
            .map(|_| {
                seed = seed
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (seed >> 56) as u8
            })
            .collect()
    }

    #[test]
    fn fields_cover_every_block_exactly() {
        for &ty in crate::formats::supported() {
            let layout = Layout::of(ty).expect("every supported format has a layout");
            let sum: usize = layout.fields().map(|f| f.n * f.w).sum();
            assert_eq!(sum, layout.block_bytes(), "{}", ty.name());
        }
    }

    #[test]
    fn every_file_block_comes_back() {
        for &ty in crate::formats::supported() {
            let layout = Layout::of(ty).expect("every supported format has a layout");
            for n in [1, 5, 16, 23, 32] {
                let k = layout.block_len() * 3;
                let row_bytes = 3 * layout.block_bytes();
                let file = bytes(n * row_bytes, n as u64 + u64::from(ty.id()));
                let mut data = vec![0; file.len()];
                for (rows, tile) in file
                    .chunks(ROWS * row_bytes)
                    .zip(data.chunks_mut(ROWS * row_bytes))
                {
                    permute_tile(layout, rows.len() / row_bytes, rows, tile);
                }
                let m = TileMatrix::new(ty, n, k, &data);
                for row in 0..n {
                    for b in 0..3 {
                        let mut block = vec![0; layout.block_bytes()];
                        m.file_block(row, b, &mut block);
                        let at = row * row_bytes + b * layout.block_bytes();
                        assert_eq!(
                            block,
                            file[at..at + block.len()],
                            "{} row {row} of {n}, block {b}",
                            ty.name()
                        );
                    }
                }
            }
        }
    }
}
