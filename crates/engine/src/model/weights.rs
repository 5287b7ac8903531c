//! Tensors in memory: read in pieces, permuted into tiles on the way, never held twice.

use crate::error::Error;
use cpu::mem::{ALIGN, Buffer};
use cpu::pool::Pool;
use gguf::{GgufFile, TensorInfo, TensorType};
use quant::formats;
use quant::tile::{Layout, ROWS, TileMatrix, permute_tile};
use std::cell::{Cell, RefCell};
use std::ops::Deref;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes read from the file at a time, about: large enough for a disk's full rate, small beside the model.
const PIECE_BYTES: usize = 1 << 20;

/// A vector of weights, as `f32`, and its number among a model's vectors.
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

    pub(crate) fn view<'a>(&self, weights: &'a Weights) -> TileMatrix<'a> {
        let layout = Layout::of(self.ty).expect("loaded matrices have a layout");
        let bytes = self.n * (self.k / layout.block_len() * layout.block_bytes());
        TileMatrix::new(
            self.ty,
            self.n,
            self.k,
            &weights.0[self.start..self.start + bytes],
        )
    }
}

/// The bytes of all matrices of a model, in one piece: small tensors share huge pages.
#[derive(Debug)]
pub(crate) struct Weights(Buffer<u8>);

/// Pieces of the weights that are looked at to tell models apart, and their bytes.
const SAMPLES: (usize, usize) = (4096, 64);

impl Weights {
    /// Shows pieces from all over the weights.
    pub(super) fn sample(&self, show: &mut dyn FnMut(&[u8])) {
        let (pieces, bytes) = SAMPLES;
        let step = (self.0.len() / pieces).max(bytes);
        for start in (0..self.0.len()).step_by(step) {
            show(&self.0[start..self.0.len().min(start + bytes)]);
        }
    }
}

/// Where loading has got to, told from any worker.
pub(super) struct Progress<'a> {
    done: AtomicU64,
    total: u64,
    tell: Mutex<&'a mut (dyn FnMut(u64, u64) + Send)>,
}

impl<'a> Progress<'a> {
    pub(super) fn new(total: u64, tell: &'a mut (dyn FnMut(u64, u64) + Send)) -> Self {
        Self {
            done: AtomicU64::new(0),
            total,
            tell: Mutex::new(tell),
        }
    }

    fn add(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        // A worker that finds another telling has nothing newer to say.
        if let Ok(mut tell) = self.tell.try_lock() {
            tell(done, self.total);
        }
    }
}

/// Loads tensors of one file, or only checks that they are what they should be: a file that cannot be used is refused
/// before any memory is taken for its weights.
pub(super) struct Loader<'a> {
    file: &'a GgufFile,
    /// `None`: nothing is read.
    target: Option<Target<'a>>,
    /// Matrices and vectors given out.
    matrices: Cell<usize>,
    vectors: Cell<usize>,
}

fn next(count: &Cell<usize>) -> usize {
    count.replace(count.get() + 1)
}

/// Where tensors go.
struct Target<'a> {
    pool: &'a Pool,
    progress: Progress<'a>,
    weights: RefCell<Weights>,
    used: Cell<usize>,
    /// Bytes of vectors, which are memory of their own.
    vector_bytes: Cell<u64>,
}

thread_local! {
    /// A worker's piece of the file.
    static PIECE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl<'a> Loader<'a> {
    /// Checks names, shapes and types, and gives out empty tensors.
    pub(super) fn checking(file: &'a GgufFile) -> Self {
        Self {
            file,
            target: None,
            matrices: Cell::new(0),
            vectors: Cell::new(0),
        }
    }

    /// Takes memory for all matrices of a file.
    pub(super) fn new(
        file: &'a GgufFile,
        pool: &'a Pool,
        tell: &'a mut (dyn FnMut(u64, u64) + Send),
    ) -> Result<Self, Error> {
        let total: u64 = file.tensors().iter().map(TensorInfo::n_bytes).sum();
        let matrices = file.tensors().iter().filter(|t| t.dims.rank() > 1);
        let bytes: u64 = matrices
            .map(|t| t.n_bytes().next_multiple_of(ALIGN as u64))
            .sum();
        let memory = |source| Error::Memory {
            what: "weights".to_owned(),
            source,
        };
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        Ok(Self {
            file,
            target: Some(Target {
                pool,
                progress: Progress::new(total, tell),
                weights: RefCell::new(Weights(Buffer::new(bytes).map_err(memory)?)),
                used: Cell::new(0),
                vector_bytes: Cell::new(0),
            }),
            matrices: Cell::new(0),
            vectors: Cell::new(0),
        })
    }

    /// The memory, with what was loaded, and the bytes of it and of all vectors.
    pub(super) fn into_weights(self) -> (Weights, u64) {
        let target = self.target.expect("only asked of a loader that reads");
        let weights = target.weights.into_inner();
        let bytes = weights.0.len() as u64 + target.vector_bytes.get();
        (weights, bytes)
    }

    fn find(&self, name: &str) -> Result<&TensorInfo, Error> {
        self.file.tensor(name).ok_or_else(|| Error::MissingTensor {
            name: name.to_owned(),
        })
    }

    fn shaped(&self, name: &str, expected: &[usize]) -> Result<&TensorInfo, Error> {
        let t = self.find(name)?;
        let expected: Vec<u64> = expected.iter().map(|&n| n as u64).collect();
        let mut found = t.dims.as_slice().to_vec();
        // Trailing ones are how some writers store fewer dimensions.
        while found.len() > expected.len() && found.last() == Some(&1) {
            found.pop();
        }
        if found != expected {
            return Err(Error::Shape {
                name: name.to_owned(),
                found,
                expected,
            });
        }
        Ok(t)
    }

    /// A matrix of `n` rows of `k` values.
    pub(super) fn matrix(&self, name: &str, k: usize, n: usize) -> Result<Matrix, Error> {
        let t = self.shaped(name, &[k, n])?;
        let format = |source| Error::Format {
            name: name.to_owned(),
            source,
        };
        formats::require(t.ty).map_err(format)?;
        let Some(target) = &self.target else {
            return Ok(Matrix {
                index: next(&self.matrices),
                ty: t.ty,
                n,
                k,
                start: 0,
            });
        };
        let layout = Layout::of(t.ty).expect("every supported format has a layout");
        let row_bytes = k / layout.block_len() * layout.block_bytes();
        let place = target.used.get();
        target
            .used
            .set(place + (n * row_bytes).next_multiple_of(ALIGN));
        let mut weights = target.weights.borrow_mut();
        let data = &mut weights.0[place..place + n * row_bytes];
        let tile_bytes = ROWS * row_bytes;
        let per_piece = (PIECE_BYTES / tile_bytes).max(1);
        let (failed, file, progress) = (Mutex::new(None), self.file, &target.progress);
        target
            .pool
            .chunks_mut(data, per_piece * tile_bytes, |piece, out| {
                let (start, bytes) = (piece * per_piece * tile_bytes, out.len());
                let read = PIECE.with_borrow_mut(|rows| {
                    rows.resize(bytes, 0);
                    file.read_at(t, start as u64, rows)?;
                    for (rows, tile) in rows.chunks(tile_bytes).zip(out.chunks_mut(tile_bytes)) {
                        permute_tile(layout, rows.len() / row_bytes, rows, tile);
                    }
                    Ok(())
                });
                match read {
                    Ok(()) => progress.add(bytes as u64),
                    Err(error) => {
                        *failed
                            .lock()
                            .unwrap_or_else(std::sync::PoisonError::into_inner) = Some(error)
                    }
                }
            });
        match failed
            .into_inner()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
        {
            Some(error) => Err(Error::Gguf(error)),
            None => Ok(Matrix {
                index: next(&self.matrices),
                ty: t.ty,
                n,
                k,
                start: place,
            }),
        }
    }

    /// A vector of `n` values, as `f32`.
    pub(super) fn vector(&self, name: &str, n: usize) -> Result<Vector, Error> {
        let t = self.shaped(name, &[n])?;
        if formats::class(t.ty) != Some(formats::Class::Float) {
            return Err(Error::NotFloat {
                name: name.to_owned(),
                found: t.ty.name(),
            });
        }
        let index = next(&self.vectors);
        let Some(target) = &self.target else {
            let values = Vec::new();
            return Ok(Vector { values, index });
        };
        let mut bytes = vec![0; n * t.ty.block_bytes()];
        self.file.read_at(t, 0, &mut bytes)?;
        let mut values = vec![0.0; n];
        formats::decode_row(t.ty, &bytes, &mut values).map_err(|source| Error::Format {
            name: name.to_owned(),
            source,
        })?;
        target.progress.add(bytes.len() as u64);
        let taken = target.vector_bytes.get() + size_of_val(&values[..]) as u64;
        target.vector_bytes.set(taken);
        Ok(Vector { values, index })
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.file.tensor(name).is_some()
    }
}
