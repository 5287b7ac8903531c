//! Weights on the device, in the layout that the CPU's kernels use as well (`quant::tile`).
//!
//! Only the last tile differs: on the device it always has 16 rows, the missing ones zero, so that kernels know one shape of tile.

use gguf::TensorType;
use quant::tile::{Layout, ROWS, TileMatrix};

use crate::device::Device;
use crate::error::{Error, length};
use crate::memory::Buffer;
use crate::staging::Slot;
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
        Self::made(ty, n, k, |bytes| Buffer::new(device, bytes))
    }

    /// The same in host memory, for a matrix of which a step reads some rows.
    pub fn in_host(device: &Device, ty: TensorType, n: usize, k: usize) -> Result<Self, Error> {
        Self::made(ty, n, k, |bytes| Buffer::in_host(device, bytes))
    }

    fn made(
        ty: TensorType,
        n: usize,
        k: usize,
        memory: impl FnOnce(usize) -> Result<Buffer<u8>, Error>,
    ) -> Result<Self, Error> {
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
            data: memory(bytes)?,
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
        let tile_bytes = self.tile_bytes();
        let whole = self.whole_tiles(first, tiles.len())? * tile_bytes;
        self.data
            .upload_at(stream, first * tile_bytes, &tiles[..whole])?;
        if whole == tiles.len() {
            return Ok(());
        }
        let mut padded = vec![0; tile_bytes];
        self.pad(&tiles[whole..], &mut padded);
        self.data
            .upload_at(stream, first * tile_bytes + whole, &padded)
    }

    /// Copies a slot's first `len` bytes, tiles as the host has them, to the tiles from `first` on, in the stream's order. Returns at
    /// once. The slot has room for whole tiles.
    pub fn send_tiles(
        &mut self,
        stream: &Stream,
        first: usize,
        slot: &mut Slot,
        len: usize,
    ) -> Result<(), Error> {
        let tile_bytes = self.tile_bytes();
        let whole = self.whole_tiles(first, len)? * tile_bytes;
        let mut sent = len;
        if whole < len {
            sent = whole + tile_bytes;
            let bytes = slot.bytes()?;
            length(
                "weights",
                "bytes of tiles beyond the slot's",
                sent.saturating_sub(bytes.len()),
                0,
            )?;
            let rest = bytes[whole..len].to_vec();
            self.pad(&rest, &mut bytes[whole..sent]);
        }
        slot.send(stream, sent, &mut self.data, first * tile_bytes)
    }

    /// How many of the tiles from `first` on, `len` bytes as the host has them, have all rows. What is left are the last tile's.
    fn whole_tiles(&self, first: usize, len: usize) -> Result<usize, Error> {
        let tile_bytes = self.tile_bytes();
        let (whole, rest) = (len / tile_bytes.max(1), len % tile_bytes.max(1));
        if rest > 0 {
            let rows = self.n % ROWS;
            length(
                "weights",
                "bytes of the last tile",
                rest,
                rows * self.row_bytes(),
            )?;
            length(
                "weights",
                "tiles before the last",
                first + whole,
                self.n / ROWS,
            )?;
        }
        Ok(whole)
    }

    /// The last tile with zeros for the rows that are missing.
    fn pad(&self, rest: &[u8], padded: &mut [u8]) {
        let (rows, block) = (self.n % ROWS, self.layout.block_bytes());
        for (from, to) in rest
            .chunks_exact(rows * block)
            .zip(padded.chunks_exact_mut(ROWS * block))
        {
            self.layout.pad(rows, from, to);
        }
    }

    fn tile_bytes(&self) -> usize {
        ROWS * self.row_bytes()
    }

    /// Bytes of device memory that a matrix takes.
    pub fn device_bytes(layout: Layout, n: usize, k: usize) -> usize {
        n.next_multiple_of(ROWS) * (k / layout.block_len()) * layout.block_bytes() + SLACK_BYTES
    }

    /// Bytes of pinned host memory that it takes.
    pub fn host_bytes(&self) -> usize {
        self.data.host_bytes()
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
