//! Weights on the device, in the layout that the CPU's kernels use as well (`quant::tile`).
//!
//! Only the last tile differs: on the device it always has 16 rows, the missing ones zero, so that kernels know one shape of tile.

use gguf::TensorType;
use quant::tile::{Layout, ROWS, TileMatrix};

use crate::device::Device;
use crate::error::{Error, length};
use crate::memory::Buffer;
use crate::stream::Stream;

/// Bytes behind a matrix that kernels may read, though not use: a step of 64 values of K, 10 tiles at once.
const SLACK_BYTES: usize = 4096;

/// A matrix `[N, K]` of weights in a device's memory.
#[derive(Debug)]
pub struct Weights {
    ty: TensorType,
    layout: Layout,
    n: usize,
    k: usize,
    data: Buffer<u8>,
}

impl Weights {
    /// Memory for a matrix, to be filled by [`Weights::upload_tiles`].
    ///
    /// Fails if there are no kernels for the format, or K is not whole blocks.
    pub fn new(device: &Device, ty: TensorType, n: usize, k: usize) -> Result<Self, Error> {
        const OP: &str = "weights";
        let layout = Layout::of(ty).ok_or(Error::Format {
            op: OP,
            format: ty.name(),
        })?;
        length(
            OP,
            "values of K past whole blocks",
            k % layout.block_len(),
            0,
        )?;
        // Kernels count rows, values and tokens in 32 bits, and 16 bytes of up to 10 tiles in 30.
        let max = i32::MAX as usize / 16;
        if n > max || k > max / 16 {
            return Err(Error::Length {
                op: OP,
                what: "larger of N and 16 K",
                found: n.max(k.saturating_mul(16)),
                wanted: max,
            });
        }
        let bytes = Self::device_bytes(layout, n, k);
        Ok(Self {
            ty,
            layout,
            n,
            k,
            data: Buffer::new(device, bytes)?,
        })
    }

    /// A copy of a matrix.
    pub fn upload(stream: &Stream, matrix: &TileMatrix<'_>) -> Result<Self, Error> {
        let mut weights = Self::new(stream.device(), matrix.ty(), matrix.n(), matrix.k())?;
        weights.upload_tiles(stream, 0, matrix.data())?;
        Ok(weights)
    }

    /// Copies tiles as the host has them to the tiles from `first` on. Waits for it.
    pub fn upload_tiles(
        &mut self,
        stream: &Stream,
        first: usize,
        tiles: &[u8],
    ) -> Result<(), Error> {
        let row_bytes = self.row_bytes();
        let tile_bytes = ROWS * row_bytes;
        let whole = tiles.len() - tiles.len() % tile_bytes.max(1);
        self.data
            .upload_at(stream, first * tile_bytes, &tiles[..whole])?;
        let rest = &tiles[whole..];
        if rest.is_empty() {
            return Ok(());
        }
        let rows = self.n % ROWS;
        length(
            "weights",
            "bytes of the last tile",
            rest.len(),
            rows * row_bytes,
        )?;
        length(
            "weights",
            "tiles before the last",
            first + whole / tile_bytes,
            self.n / ROWS,
        )?;
        let block = self.layout.block_bytes();
        let mut padded = vec![0; tile_bytes];
        for (from, to) in rest
            .chunks_exact(rows * block)
            .zip(padded.chunks_exact_mut(ROWS * block))
        {
            self.layout.pad(rows, from, to);
        }
        self.data
            .upload_at(stream, first * tile_bytes + whole, &padded)
    }

    /// Bytes of device memory that a matrix takes.
    pub fn device_bytes(layout: Layout, n: usize, k: usize) -> usize {
        n.next_multiple_of(ROWS) * (k / layout.block_len()) * layout.block_bytes() + SLACK_BYTES
    }

    /// The format.
    pub fn ty(&self) -> TensorType {
        self.ty
    }

    /// Rows (outputs).
    pub fn n(&self) -> usize {
        self.n
    }

    /// Values a row (inputs).
    pub fn k(&self) -> usize {
        self.k
    }

    /// Tiles of 16 rows.
    pub fn tiles(&self) -> usize {
        self.n.div_ceil(ROWS)
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.k / self.layout.block_len() * self.layout.block_bytes()
    }

    /// The bytes.
    pub fn data(&self) -> &Buffer<u8> {
        &self.data
    }
}
