//! A model's weights: what they are to those who compute, and where they lie.
//!
//! Matrices lie once, in tiles ([`quant::tile`]): in host memory, or in a device's. They get there in pieces, on all threads ([`load`]), and
//! through pinned memory where a device has them ([`staged`]), so that host memory never holds them twice, nor what is on a device.

mod device;
mod load;
mod pieces;
mod source;
mod staged;
#[cfg(test)]
mod tests;

pub(crate) use device::{ExpertMemory, OnDevice};
pub(super) use load::{Loader, load};
pub(super) use source::Source;

use cpu::mem::Buffer;
use gguf::TensorType;
use quant::tile::{Layout, TileMatrix};
use std::ops::{Deref, Range};

/// A vector of weights, as `f32`, and its number among a model's vectors. Devices have copies.
#[derive(Debug)]
pub(crate) struct Vector {
    values: Vec<f32>,
    index: usize,
}

impl Vector {
    /// Its number among a model's vectors, from 0 on.
    pub(crate) fn index(&self) -> usize {
        self.index
    }
}

impl Deref for Vector {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &self.values
    }
}

/// A weight matrix, `[N, K]`: its place among a model's [`Weights`].
#[derive(Debug)]
pub(crate) struct Matrix {
    index: usize,
    ty: TensorType,
    n: usize,
    k: usize,
    start: usize,
}

impl Matrix {
    /// Its number among a model's matrices, from 0 on.
    pub(crate) fn index(&self) -> usize {
        self.index
    }

    pub(crate) fn ty(&self) -> TensorType {
        self.ty
    }

    /// Rows: outputs of its product.
    pub(crate) fn n(&self) -> usize {
        self.n
    }

    /// Values of a row: inputs of its product.
    pub(crate) fn k(&self) -> usize {
        self.k
    }

    /// Its tiles in host memory.
    ///
    /// # Panics
    /// If the weights are on a device: sessions on the CPU are refused such a model.
    pub(crate) fn view<'a>(&self, weights: &'a Weights) -> TileMatrix<'a> {
        TileMatrix::new(self.ty, self.n, self.k, self.bytes(weights))
    }

    /// The same as bytes.
    ///
    /// # Panics
    /// As [`Matrix::view`].
    pub(crate) fn bytes<'a>(&self, weights: &'a Weights) -> &'a [u8] {
        &weights.in_host()[self.place()]
    }

    /// Its tiles in a copy of those bytes of host memory that begin with the byte `first`.
    pub(crate) fn view_in<'a>(&self, copy: &'a [u8], first: usize) -> TileMatrix<'a> {
        TileMatrix::new(self.ty, self.n, self.k, self.bytes_in(copy, first))
    }

    /// The same as bytes.
    pub(crate) fn bytes_in<'a>(&self, copy: &'a [u8], first: usize) -> &'a [u8] {
        let Range { start, end } = self.place();
        &copy[start - first..end - first]
    }

    /// Its bytes in host memory, where it lies there.
    pub(crate) fn place(&self) -> Range<usize> {
        let layout = Layout::of(self.ty).expect("loaded matrices have a layout");
        let len = self.n * (self.k / layout.block_len() * layout.block_bytes());
        self.start..self.start + len
    }
}

/// The bytes of all matrices of a model.
#[derive(Debug)]
pub(crate) enum Weights {
    /// In one piece: small tensors share huge pages.
    Host(Buffer<u8>),
    /// In a device's memory, with the vectors.
    Device(OnDevice),
}

impl Weights {
    /// The bytes in host memory.
    ///
    /// # Panics
    /// If they are on a device: sessions on the CPU are refused such a model.
    pub(crate) fn in_host(&self) -> &[u8] {
        match self {
            Self::Host(bytes) => bytes,
            Self::Device(_) => unreachable!("the CPU computes with weights in host memory only"),
        }
    }

    /// The weights on a device.
    ///
    /// # Panics
    /// If they are in host memory: sessions on a device are refused such a model.
    pub(crate) fn on_device(&self) -> &OnDevice {
        match self {
            Self::Device(weights) => weights,
            Self::Host(_) => unreachable!("a device computes with weights in its own memory only"),
        }
    }
}
