//! How matrices are cut into pieces, each read, permuted and put in its place by one thread.

use gguf::TensorInfo;
use quant::tile::{Layout, ROWS};
use std::ops::Range;

/// Bytes of a piece, about: large enough for the full rate of a disk and of a link; what is read and what it is permuted to are together in a
/// second-level cache of 2 MiB.
pub(super) const PIECE_BYTES: usize = 1 << 20;

/// A matrix that is to be loaded.
#[derive(Debug, Clone, Copy)]
pub(super) struct Job<'a> {
    pub(super) tensor: &'a TensorInfo,
    /// Its first byte in the tensor, of which it may be a part.
    pub(super) offset: u64,
    pub(super) layout: Layout,
    pub(super) n: usize,
    pub(super) k: usize,
    /// Its first byte, where all lie in one piece of host memory.
    pub(super) start: usize,
    /// The expert whose blob it is a part of, if it is.
    pub(super) of_expert: Option<usize>,
}

impl Job<'_> {
    pub(super) fn row_bytes(&self) -> usize {
        self.k / self.layout.block_len() * self.layout.block_bytes()
    }

    pub(super) fn tile_bytes(&self) -> usize {
        ROWS * self.row_bytes()
    }

    pub(super) fn bytes(&self) -> usize {
        self.n * self.row_bytes()
    }

    fn tiles_a_piece(&self) -> usize {
        (PIECE_BYTES / self.tile_bytes().max(1)).max(1)
    }
}

/// Some tiles of a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    /// The matrix's number.
    pub(super) matrix: usize,
    /// The first tile.
    pub(super) first: usize,
    /// Bytes in the matrix, as host memory has it and as the file does.
    pub(super) at: Range<usize>,
}

/// All pieces, in the order of the file: so they are read, too, if those with small numbers are first.
#[derive(Debug)]
pub(super) struct Pieces<'a> {
    jobs: &'a [Job<'a>],
    /// Matrices in the file's order, and the number of the first piece of each.
    order: Vec<(usize, usize)>,
    len: usize,
}

impl<'a> Pieces<'a> {
    pub(super) fn new(jobs: &'a [Job<'a>]) -> Self {
        let mut matrices: Vec<usize> = (0..jobs.len()).collect();
        matrices.sort_by_key(|&i| {
            let Job { tensor, offset, .. } = &jobs[i];
            (tensor.part, tensor.offset + offset)
        });
        let mut len = 0;
        let order = matrices.into_iter().map(|matrix| {
            let job = &jobs[matrix];
            let first = len;
            len += job.n.div_ceil(ROWS).div_ceil(job.tiles_a_piece());
            (matrix, first)
        });
        let order = order.collect();
        Self { jobs, order, len }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn get(&self, number: usize) -> Piece {
        let after = self.order.partition_point(|&(_, first)| first <= number);
        let (matrix, first) = self.order[after - 1];
        let job = &self.jobs[matrix];
        let first = (number - first) * job.tiles_a_piece();
        let start = first * job.tile_bytes();
        let end = (start + job.tiles_a_piece() * job.tile_bytes()).min(job.bytes());
        Piece {
            matrix,
            first,
            at: start..end,
        }
    }

    /// Bytes that the largest piece can have, with all rows of its last tile.
    pub(super) fn bytes_max(&self) -> usize {
        let of_jobs = self.jobs.iter();
        let bytes = of_jobs.map(|job| job.tiles_a_piece() * job.tile_bytes());
        bytes.max().unwrap_or(0)
    }
}
