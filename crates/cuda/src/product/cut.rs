//! How the kernels cut their work into thread blocks. Sizes that kernels have fixed are named as in `product.cuh`.

use gguf::TensorType;
use quant::product::{CHUNK, has_min};

use crate::acts::Layout;
use crate::device::{Properties, WGMMA_COMPUTE};

/// Threads of a multiprocessor, on every device from 8.0 on at least.
const THREADS_MAX: usize = 1536;

/// Shared memory of a thread block at most, on devices of 9.0.
const SHARED_MAX: usize = 232_448;

/// Registers of a multiprocessor.
const REGISTERS: usize = 65536;

/// Shared memory that the driver keeps for itself, a thread block.
const RESERVED_BYTES: usize = 1024;

/// Width of a norm that a product of one token makes itself.
pub(crate) const NORM_MAX: usize = 8192;

/// Bytes on the way that keep a multiprocessor's share of the memory busy.
const WAY_BYTES: usize = 96 << 10;

/// What a device has for a kernel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    pub(super) shared_bytes_block: usize,
    pub(super) shared_bytes: usize,
    pub(super) multiprocessors: usize,
    /// A thread of the kernel.
    pub(super) registers: usize,
}

impl Room {
    pub(super) fn of(properties: &Properties, registers: usize) -> Self {
        Self {
            shared_bytes_block: properties.shared_bytes_block_max,
            shared_bytes: properties.shared_bytes,
            multiprocessors: properties.multiprocessors,
            registers,
        }
    }

    /// Thread blocks that a multiprocessor holds at once.
    fn blocks(&self, warps: usize, shared_bytes: usize) -> usize {
        let registers = self.registers.next_multiple_of(8) * 32 * warps;
        (THREADS_MAX / (32 * warps))
            .min(REGISTERS / registers.max(1))
            .min(self.shared_bytes / (shared_bytes + RESERVED_BYTES))
    }
}

/// `struct Gemm`, `struct Many`.
#[derive(Debug, Clone, Copy)]
pub(super) struct ManyCut {
    pub(super) threads: usize,
    pub(super) shared_bytes: usize,
    /// In which layout it reads activations. Thread blocks take a tile of one matrix, or where they are arranged shares of all tiles of all matrices.
    pub(super) reads: Layout,
    /// What K is a multiple of.
    k_step: usize,
    rows: usize,
    columns: usize,
    /// How long an output takes, in percent of one of `gemm_wide`, where thread blocks are many.
    slowness: usize,
}

impl ManyCut {
    /// The kernels for many columns, by their names.
    pub(super) fn all(ty: TensorType, compute: (u32, u32)) -> Vec<(&'static str, Self)> {
        let (wide, narrow) = (Self::wide(ty, compute), Self::narrow(ty));
        let wide = ("gemm_wide", wide);
        let narrow = ("gemm_narrow", narrow);
        if compute != WGMMA_COMPUTE {
            return vec![wide, narrow];
        }
        if ty.block_len() == 256 {
            vec![
                ("gemm_128", Self::tiles_of(ty, 128, 66)),
                ("gemm_64", Self::tiles_of(ty, 64, 84)),
                narrow,
            ]
        } else {
            vec![
                ("gemm_128", Self::tiles_of(ty, 128, 75)),
                ("gemm_64", Self::tiles_of(ty, 64, 87)),
                wide,
                narrow,
            ]
        }
    }

    /// The kernels of `gemm_many.cuh`: columns of a tile.
    fn tiles_of(ty: TensorType, columns: usize, slowness: usize) -> Self {
        const ROWS: usize = 128;
        let (len, block) = (ty.block_len(), ty.block_bytes() * 16);
        let k_step = if len == 256 { 256 } else { 128 };
        let (blocks, atoms) = (k_step / len, columns / 8);
        let scales = blocks * columns * 4;
        let sums = match (has_min(ty), len) {
            (false, _) => 0,
            (true, 256) => atoms * 256,
            (true, _) => scales,
        };
        let stage = k_step / 128 * atoms * 1024 + scales + sums + ROWS / 16 * blocks * block;
        let stage = stage.next_multiple_of(1024);
        let totals = ROWS * columns * 4;
        let stages = ((SHARED_MAX - 1024 - 256 - totals) / stage).min(4);
        Self {
            threads: 384,
            shared_bytes: stages * stage + totals + 1024 + 256,
            reads: Layout::Arranged,
            k_step,
            rows: ROWS,
            columns,
            slowness,
        }
    }

    fn wide(ty: TensorType, compute: (u32, u32)) -> Self {
        if compute >= (9, 0) {
            Self::of(ty, (2, 4), (5, 4), 100)
        } else {
            Self::of(ty, (2, 4), (2, 2), 100)
        }
    }

    fn narrow(ty: TensorType) -> Self {
        Self::of(ty, (4, 1), (1, 4), 200)
    }

    /// Warps a thread block, pieces of 16 rows and of 8 columns a warp.
    fn of(ty: TensorType, warps: (usize, usize), pieces: (usize, usize), slowness: usize) -> Self {
        let (tiles, groups) = (warps.0 * pieces.0, warps.1 * pieces.1);
        let threads = 32 * warps.0 * warps.1;
        let (len, block) = (ty.block_len(), ty.block_bytes() * 16);
        let (ks, stages) = if len == 256 { (256, 2) } else { (64, 4) };
        let blocks = ks / len;
        let a = tiles * blocks * block;
        let q = groups * ks / 32 * 256;
        let d = groups * if len == 256 { 32 } else { blocks * 64 };
        let sums = if meets_sums(ty) { groups * 256 } else { 0 };
        let totals = threads * pieces.0 * pieces.1 * 16;
        Self {
            threads,
            shared_bytes: stages * (a + q + d + sums) + totals + a / 16 * 4,
            reads: Layout::Blocks,
            k_step: len,
            rows: 16 * tiles,
            columns: 8 * groups,
            slowness,
        }
    }

    /// `gemm_tiles` in `product_float.cu`.
    pub(super) fn float() -> Self {
        Self {
            threads: 256,
            shared_bytes: 0,
            reads: Layout::Blocks,
            k_step: 1,
            rows: 64,
            columns: 64,
            slowness: 100,
        }
    }

    /// Whether it takes this K.
    pub(super) fn takes(&self, k: usize) -> bool {
        k.is_multiple_of(self.k_step)
    }

    /// For one matrix, where a thread block is a tile.
    pub(super) fn grid(&self, n: usize, columns: usize) -> [u32; 3] {
        [
            n.div_ceil(self.rows) as u32,
            columns.div_ceil(self.columns) as u32,
            1,
        ]
    }

    /// Tiles of matrices of so many rows.
    pub(super) fn tiles(&self, rows: &[usize], columns: usize) -> usize {
        let row_blocks: usize = rows.iter().map(|n| n.div_ceil(self.rows)).sum();
        row_blocks * columns.div_ceil(self.columns)
    }

    /// What the busiest multiprocessor has to do: outputs, times their slowness. Tiles of a launch may be cut to come out even.
    pub(super) fn work(&self, rows: &[usize], columns: usize, multiprocessors: usize) -> usize {
        let tile = self.rows * self.columns * self.slowness;
        match self.reads {
            Layout::Arranged => {
                let tiles = self.tiles(rows, columns);
                tile * tiles.max(multiprocessors) / multiprocessors
            }
            Layout::Blocks => {
                let rounds = rows
                    .iter()
                    .map(|&n| self.tiles(&[n], columns).div_ceil(multiprocessors));
                tile * rounds.sum::<usize>()
            }
        }
    }
}

/// Whether a format of class `Block256` has minima or a bias, which meet sums of activations.
pub(crate) fn meets_sums(ty: TensorType) -> bool {
    use TensorType as T;
    matches!(ty, T::Q2_K | T::Q3_K | T::Q4_K | T::Q5_K | T::Q6_K)
}

/// `struct Stage` and the shared memory of `one::gemv`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OneCut {
    pub(super) grid: usize,
    pub(super) warps: usize,
    /// Stages of a warp's ring.
    pub(super) stages: usize,
    /// Tiles whose sums wait at a time.
    pub(super) round: usize,
    pub(super) shared_bytes: usize,
}

impl OneCut {
    /// Columns that the kernels take.
    pub(super) const COLUMNS_MAX: usize = 2;

    /// Warps of a thread block: as many as leave registers to the small kernels between products.
    const WARPS_MAX: usize = 16;

    const STAGES_MAX: usize = 8;

    /// Tenths of a multiprocessor's shared memory that are left to the small kernels between products, so that they start while a product
    /// still runs. Measured in whole layers: 70 of 228 KB against 26 save 3.6 of 104 us (Q8_0) and 3.7 of 73 (Q4_K).
    const SPARED_TENTHS: usize = 3;

    /// Bytes of sums that wait.
    const SUMS_BYTES: usize = 12 << 10;

    /// `normed`: the activations are made of a row that lies where sums will.
    pub(super) fn of(
        ty: TensorType,
        tiles: usize,
        k: usize,
        columns: usize,
        normed: bool,
        room: &Room,
    ) -> Self {
        let grid = room.multiprocessors.min(tiles).max(1);
        let (of_block, chunks) = (tiles.div_ceil(grid), k.div_ceil(CHUNK).max(1));
        let sums = chunks * columns * 64;
        let round = (Self::SUMS_BYTES / sums).clamp(1, of_block);
        let turns = if of_block > round { 2 } else { 1 };
        // The row, which begins at whole 16 bytes, and a factor.
        let row = if normed { 4 * k + 4 + 12 } else { 0 };
        let rest = all_acts_bytes(ty, k, columns) + (turns * round * sums).max(row);
        let most = room.shared_bytes / 10 * (10 - Self::SPARED_TENTHS);
        let budget = most.min(room.shared_bytes_block).saturating_sub(rest);
        let stage = stage_bytes(ty) + 16;
        let warps = Self::WARPS_MAX
            .min(of_block * chunks)
            .min(budget / (2 * stage))
            .max(1);
        let stages = (budget / (warps * stage)).clamp(2, Self::STAGES_MAX);
        Self {
            grid,
            warps,
            stages,
            round,
            shared_bytes: warps * stages * stage + rest,
        }
    }
}

/// `Stage::BYTES`.
fn stage_bytes(ty: TensorType) -> usize {
    let block = ty.block_bytes() * 16;
    match ty.block_len() {
        256 => block,
        _ if block > 512 => 4 * block,
        _ => 8 * block,
    }
}

/// Bytes of the activations of so many columns in shared memory, as `one::gemv` lays them out.
fn all_acts_bytes(ty: TensorType, k: usize, columns: usize) -> usize {
    let q = k * columns;
    if ty.block_len() != 256 {
        return q + k / 32 * columns * 8;
    }
    let blocks = k / 256 * columns;
    q + if meets_sums(ty) { blocks * 32 } else { 0 } + blocks.next_multiple_of(4) * 4
}

/// `struct Piece` and the shared memory of `gemv`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FewCut {
    pub(super) warps: usize,
    pub(super) shared_bytes: usize,
}

impl FewCut {
    /// Warps of a thread block at most.
    const WARPS_MAX: usize = 16;

    pub(super) fn of(ty: TensorType, tiles: usize, k: usize, columns: usize, room: &Room) -> Self {
        let chunks = k.div_ceil(CHUNK).max(1);
        let ring = ring_bytes(ty);
        // A warp takes every so many chunks. The fewer warps, the more thread blocks are held at once; what counts is that none
        // begins when the others are nearly done, and that enough bytes are on the way.
        let cut = |rounds: usize| {
            let warps = chunks.div_ceil(rounds);
            Self {
                warps,
                shared_bytes: warps * ring + chunks * columns * 64,
            }
        };
        let worth = |cut: &Self| {
            let held = room.blocks(cut.warps, cut.shared_bytes);
            let once = held * room.multiprocessors;
            if once == 0 || cut.shared_bytes > room.shared_bytes_block {
                return 0.0;
            }
            let full = if tiles <= once {
                1.0
            } else {
                tiles as f64 / (tiles.div_ceil(once) * once) as f64
            };
            full * (held * cut.warps * ring).min(WAY_BYTES) as f64
        };
        let least = chunks.div_ceil(Self::WARPS_MAX);
        let mut best = cut(least);
        for rounds in least + 1..=chunks {
            let next = cut(rounds);
            if worth(&next) > worth(&best) {
                best = next;
            }
        }
        best
    }
}

/// Bytes of a warp's ring.
fn ring_bytes(ty: TensorType) -> usize {
    let blocks = match ty.block_len() {
        256 => 1,
        _ if ty.block_bytes() > 32 => 4,
        _ => 8,
    };
    2 * blocks * ty.block_bytes() * 16
}

/// The shared memory of `gemv_rows` in `product_float.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FloatCut {
    pub(super) threads: usize,
    pub(super) shared_bytes: usize,
}

impl FloatCut {
    /// Half-warps of a thread block at most.
    const HALVES_MAX: usize = 8;

    /// For kernels that take `wide` tokens.
    pub(super) fn of(ty: TensorType, k: usize, wide: usize) -> Self {
        let chunks = k.div_ceil(CHUNK).max(1);
        let rounds = chunks.div_ceil(Self::HALVES_MAX);
        let halves = chunks.div_ceil(rounds).next_multiple_of(2);
        let stage = 32 * (16 * ty.block_bytes() + wide * 4);
        Self {
            threads: halves * 16,
            shared_bytes: halves * 4 * stage + chunks * wide * 64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quant::formats::{self, Class};

    /// Devices: of 9.0, and the least of those from 8.0 on (8.6, 8.9).
    const ROOMS: [((u32, u32), Room); 2] = [
        (
            (9, 0),
            Room {
                shared_bytes_block: 232_448,
                shared_bytes: 233_472,
                multiprocessors: 132,
                registers: 128,
            },
        ),
        (
            (8, 0),
            Room {
                shared_bytes_block: 101_376,
                shared_bytes: 102_400,
                multiprocessors: 20,
                registers: 128,
            },
        ),
    ];

    /// What `struct Many` comes to, as its compiler says.
    #[test]
    fn tiles_have_the_shared_memory_of_their_kernels() {
        use TensorType as T;
        for (ty, columns, bytes) in [
            (T::Q2_K, 128, 211200),
            (T::Q2_K, 64, 152832),
            (T::Q3_K, 128, 211200),
            (T::Q3_K, 64, 156928),
            (T::Q4_K, 128, 179456),
            (T::Q4_K, 64, 185600),
            (T::Q5_K, 128, 187648),
            (T::Q5_K, 64, 201984),
            (T::Q6_K, 128, 187648),
            (T::Q6_K, 64, 210176),
            (T::IQ4_XS, 128, 220416),
            (T::IQ4_XS, 64, 173312),
            (T::IQ2_XXS, 128, 192768),
            (T::IQ2_XXS, 64, 136448),
            (T::IQ3_S, 128, 211200),
            (T::IQ3_S, 64, 156928),
            (T::Q4_0, 128, 177408),
            (T::Q4_0, 64, 107776),
            (T::Q4_1, 128, 189696),
            (T::Q4_1, 64, 115968),
            (T::Q5_1, 128, 197888),
            (T::Q5_1, 64, 124160),
            (T::Q8_0, 128, 210176),
            (T::Q8_0, 64, 140544),
            (T::MXFP4, 128, 177408),
            (T::MXFP4, 64, 107776),
        ] {
            let cut = ManyCut::tiles_of(ty, columns, 100);
            assert_eq!(cut.shared_bytes, bytes, "{} x {columns}", ty.name());
        }
    }

    #[test]
    fn shared_tiles_come_out_even() {
        let cut = ManyCut::tiles_of(TensorType::Q8_0, 128, 100);
        assert_eq!(cut.tiles(&[5120, 1024, 1000], 512), 56 * 4);
        // 160 tiles on 132 multiprocessors; 32 tiles are a round.
        let tile = 128 * 128 * 100;
        assert_eq!(cut.work(&[5120], 512, 132), tile * 160 / 132);
        assert_eq!(cut.work(&[1024], 512, 132), tile);
        assert!(cut.takes(640) && !cut.takes(576));
    }

    #[test]
    fn every_format_fits_every_device() {
        for &ty in formats::supported() {
            for (compute, room) in ROOMS {
                for k in [256, 512, 2048, 5120, 13824, 28672] {
                    if formats::class(ty) == Some(Class::Float) {
                        for wide in [1, 4] {
                            let cut = FloatCut::of(ty, k, wide);
                            assert!(
                                cut.shared_bytes <= room.shared_bytes_block,
                                "{} {k}: {cut:?}",
                                ty.name()
                            );
                            assert!(cut.threads.is_multiple_of(32) && cut.threads <= 256);
                        }
                        continue;
                    }
                    for columns in 1..=OneCut::COLUMNS_MAX {
                        for (tiles, normed) in [1, 64, 320, 1728, 9504]
                            .into_iter()
                            .flat_map(|tiles| [(tiles, false), (tiles, true)])
                        {
                            if normed && (columns > 1 || k > NORM_MAX) {
                                continue;
                            }
                            let cut = OneCut::of(ty, tiles, k, columns, normed, &room);
                            assert!(
                                cut.shared_bytes <= room.shared_bytes_block,
                                "{} {k} {columns}: {cut:?}",
                                ty.name()
                            );
                            assert!((1..=OneCut::WARPS_MAX).contains(&cut.warps));
                        }
                    }
                    for columns in OneCut::COLUMNS_MAX + 1..=16 {
                        let cut = FewCut::of(ty, 320, k, columns, &room);
                        assert!(
                            room.blocks(cut.warps, cut.shared_bytes) > 0,
                            "{} {k} {columns}: {cut:?}",
                            ty.name()
                        );
                        assert!(
                            cut.shared_bytes <= room.shared_bytes_block,
                            "{} {k} {columns}: {cut:?}",
                            ty.name()
                        );
                        assert!((1..=FewCut::WARPS_MAX).contains(&cut.warps));
                    }
                }
                if formats::class(ty) != Some(Class::Float) {
                    for (name, many) in ManyCut::all(ty, compute) {
                        assert!(
                            many.shared_bytes <= room.shared_bytes_block,
                            "{} {name}: {many:?}",
                            ty.name()
                        );
                    }
                }
            }
        }
    }
}
