//! How the kernels cut their work into thread blocks. Sizes that kernels have fixed are named as in `product.cuh`.

use gguf::TensorType;
use quant::product::{CHUNK, has_min};

use crate::device::{Properties, WGMMA_COMPUTE};

/// Threads of a multiprocessor, on every device from 8.0 on at least.
const THREADS_MAX: usize = 1536;

/// Shared memory of a thread block at most, on devices of 9.0.
const SHARED_MAX: usize = 232_448;

/// Registers of a multiprocessor.
const REGISTERS: usize = 65536;

/// Shared memory that the driver keeps for itself, a thread block.
const RESERVED_BYTES: usize = 1024;

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

/// In which layout a kernel reads activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reads {
    /// As `acts.cu` writes them.
    Blocks,
    /// As `gemm_acts.cu` arranges them.
    Arranged,
}

/// `struct Gemm`, `struct ManyStage`.
#[derive(Debug, Clone, Copy)]
pub(super) struct ManyCut {
    pub(super) threads: usize,
    pub(super) shared_bytes: usize,
    pub(super) reads: Reads,
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
                ("gemm_2x128", Self::groups(ty, 2, 128, 66)),
                ("gemm_3x64", Self::groups(ty, 3, 64, 78)),
                ("gemm_2x64", Self::groups(ty, 2, 64, 87)),
                narrow,
            ]
        } else {
            vec![wide, ("gemm_3x112", Self::groups(ty, 3, 112, 86)), narrow]
        }
    }

    /// The kernels of `gemm_many.cuh`: warpgroups a thread block, columns.
    fn groups(ty: TensorType, groups: usize, columns: usize, slowness: usize) -> Self {
        let (len, block) = (ty.block_len(), ty.block_bytes() * 16);
        let ks = if len == 256 { 256 } else { 128 };
        let (blocks, atoms, tiles) = (ks / len, columns / 8, 4 * groups);
        let scales = blocks * columns * 4;
        let sums = match (has_min(ty), len) {
            (false, _) => 0,
            (true, 256) => atoms * 256,
            (true, _) => scales,
        };
        let stage = ks / 128 * atoms * 1024 + scales + sums + tiles * blocks * block;
        let stage = stage.next_multiple_of(1024);
        let totals = groups * 128 * columns / 2 * 4;
        let stages = ((SHARED_MAX - 1024 - 256 - totals) / stage).min(8);
        Self {
            threads: 128 * (groups + 1),
            shared_bytes: stages * stage + totals + 1024 + 256,
            reads: Reads::Arranged,
            rows: 16 * tiles,
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
            reads: Reads::Blocks,
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
            reads: Reads::Blocks,
            rows: 64,
            columns: 64,
            slowness: 100,
        }
    }

    pub(super) fn grid(&self, n: usize, columns: usize) -> [u32; 3] {
        [
            n.div_ceil(self.rows) as u32,
            columns.div_ceil(self.columns) as u32,
            1,
        ]
    }

    /// What the busiest multiprocessor has to do: outputs, times their slowness.
    pub(super) fn work(&self, n: usize, columns: usize, multiprocessors: usize) -> usize {
        let blocks = n.div_ceil(self.rows) * columns.div_ceil(self.columns);
        blocks.div_ceil(multiprocessors) * self.rows * self.columns * self.slowness
    }
}

/// Whether a format of class `Block256` has minima or a bias, which meet sums of activations.
fn meets_sums(ty: TensorType) -> bool {
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

    pub(super) fn of(ty: TensorType, tiles: usize, k: usize, columns: usize, room: &Room) -> Self {
        let grid = room.multiprocessors.min(tiles).max(1);
        let (of_block, chunks) = (tiles.div_ceil(grid), k.div_ceil(CHUNK).max(1));
        let sums = chunks * columns * 64;
        let round = (Self::SUMS_BYTES / sums).clamp(1, of_block);
        let turns = if of_block > round { 2 } else { 1 };
        let rest = all_acts_bytes(ty, k, columns) + turns * round * sums;
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

    /// What `struct ManyStage` comes to, as its compiler says.
    #[test]
    fn groups_have_the_shared_memory_of_their_kernels() {
        use TensorType as T;
        for (ty, groups, columns, bytes) in [
            (T::Q2_K, 2, 64, 212_224),
            (T::Q3_K, 3, 64, 201_984),
            (T::Q4_K, 2, 128, 179_456),
            (T::Q5_K, 3, 64, 210_176),
            (T::Q6_K, 3, 64, 222_464),
            (T::IQ4_XS, 2, 128, 220_416),
            (T::IQ2_XXS, 2, 64, 213_248),
            (T::IQ3_S, 2, 128, 211_200),
            (T::Q4_0, 3, 112, 210_176),
            (T::Q4_1, 3, 112, 222_464),
            (T::Q5_1, 3, 112, 197_888),
            (T::Q8_0, 3, 112, 216_320),
            (T::MXFP4, 3, 112, 206_080),
        ] {
            let cut = ManyCut::groups(ty, groups, columns, 100);
            assert_eq!(
                cut.shared_bytes,
                bytes,
                "{} {groups} x {columns}",
                ty.name()
            );
            assert_eq!(cut.threads, 128 * (groups + 1));
        }
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
                        for tiles in [1, 64, 320, 1728, 9504] {
                            let cut = OneCut::of(ty, tiles, k, columns, &room);
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
