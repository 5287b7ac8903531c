//! From tensors of a file to weights in memory: first every tensor is looked at, then all matrices are read at once.
//!
//! A file that cannot be used is refused before any memory is taken for its matrices.

use super::device::{Places, Room, in_host};
use super::pieces::{Job, Piece, Pieces};
use super::source::Source;
use super::staged::Staged;
use super::{Matrix, Vector, Weights};
use crate::error::Error;
use crate::model::{ComputeDevice, ExpertHome};
use cpu::mem::{ALIGN, Buffer};
use cpu::pool::Pool;
use cuda::experts::Blobs;
use gguf::{TensorInfo, TensorType};
use quant::formats;
use quant::tile::{Layout, permute_tile};
use sha2::{Digest, Sha256};
use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// Writes a piece, as host memory has it, to where it belongs.
pub(super) type Fill<'a> = &'a mut dyn FnMut(&mut [u8]) -> Result<(), Error>;

/// Where pieces go. Any thread puts any piece, and none twice.
pub(super) trait Sink: Sync {
    /// Has piece `number` filled, and keeps it.
    fn put(&self, number: usize, piece: &Piece, fill: Fill<'_>) -> Result<(), Error>;
}

/// Looks at tensors: whether they are what they should be. Vectors are read at once, matrices by [`load`].
pub(in crate::model) struct Loader<'a> {
    source: &'a Source<'a>,
    jobs: RefCell<Vec<Job<'a>>>,
    /// Bytes of matrices so far, in host memory.
    host_bytes: Cell<usize>,
    vectors: Cell<usize>,
    /// Of vectors, in the file and in memory.
    vector_bytes: Cell<(u64, u64)>,
}

/// Matrices of one shape, stored as one tensor.
pub(in crate::model) struct Stack<'l, 'a> {
    loader: &'l Loader<'a>,
    tensor: &'a TensorInfo,
    /// Of each.
    bytes: u64,
    k: usize,
    n: usize,
}

impl Stack<'_, '_> {
    /// Gives the `e`-th of them its place behind all matrices that have one.
    pub(in crate::model) fn place(&self, e: usize) -> Matrix {
        let offset = e as u64 * self.bytes;
        self.loader
            .place(self.tensor, offset, self.k, self.n, Some(e))
    }
}

/// The matrices that are to be loaded.
pub(in crate::model) struct Planned<'a> {
    source: &'a Source<'a>,
    jobs: Vec<Job<'a>>,
    host_bytes: usize,
    vector_bytes: (u64, u64),
}

impl<'a> Loader<'a> {
    pub(in crate::model) fn new(source: &'a Source<'a>) -> Self {
        Self {
            source,
            jobs: RefCell::default(),
            host_bytes: Cell::new(0),
            vectors: Cell::new(0),
            vector_bytes: Cell::new((0, 0)),
        }
    }

    pub(in crate::model) fn into_planned(self) -> Planned<'a> {
        Planned {
            source: self.source,
            jobs: self.jobs.into_inner(),
            host_bytes: self.host_bytes.get(),
            vector_bytes: self.vector_bytes.get(),
        }
    }

    fn shaped(&self, name: &str, expected: &[usize]) -> Result<&'a TensorInfo, Error> {
        let missing = || Error::MissingTensor {
            name: name.to_owned(),
        };
        let t = self.source.tensor(name).ok_or_else(missing)?;
        let expected: Vec<u64> = expected.iter().map(|&n| n as u64).collect();
        let mut found = t.dims.as_slice().to_vec();
        // Trailing ones are how some writers store fewer dimensions.
        while found.len() > expected.len() && found.last() == Some(&1) {
            found.pop();
        }
        while found.len() < expected.len() && expected[found.len()] == 1 {
            found.push(1);
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
    pub(in crate::model) fn matrix(&self, name: &str, k: usize, n: usize) -> Result<Matrix, Error> {
        let t = self.shaped(name, &[k, n])?;
        self.usable(t)?;
        Ok(self.place(t, 0, k, n, None))
    }

    /// The same of floats, which are multiplied with values as they are.
    pub(in crate::model) fn float_matrix(
        &self,
        name: &str,
        k: usize,
        n: usize,
    ) -> Result<Matrix, Error> {
        let t = self.shaped(name, &[k, n])?;
        self.float(t)?;
        Ok(self.place(t, 0, k, n, None))
    }

    /// `e` matrices of `n` rows of `k` values, stored as one tensor. Each is still to be placed.
    pub(in crate::model) fn stack(
        &self,
        name: &str,
        k: usize,
        n: usize,
        e: usize,
    ) -> Result<Stack<'_, 'a>, Error> {
        let tensor = self.shaped(name, &[k, n, e])?;
        self.usable(tensor)?;
        Ok(Stack {
            loader: self,
            tensor,
            bytes: n as u64 * tensor.row_bytes(),
            k,
            n,
        })
    }

    /// `e` vectors of `n` `f32` values, as matrices of one column: in tiles such a one is the values in a row.
    pub(in crate::model) fn stacked_vectors(
        &self,
        name: &str,
        n: usize,
        e: usize,
    ) -> Result<Stack<'_, 'a>, Error> {
        let tensor = self.shaped(name, &[n, e])?;
        if tensor.ty != TensorType::F32 {
            return Err(Error::NotSingle {
                name: name.to_owned(),
                found: tensor.ty.name(),
            });
        }
        Ok(Stack {
            loader: self,
            tensor,
            bytes: tensor.row_bytes(),
            k: 1,
            n,
        })
    }

    fn usable(&self, t: &TensorInfo) -> Result<(), Error> {
        let format = |source| Error::Format {
            name: t.name.clone(),
            source,
        };
        formats::require(t.ty).map(drop).map_err(format)
    }

    fn float(&self, t: &TensorInfo) -> Result<(), Error> {
        if formats::class(t.ty) != Some(formats::Class::Float) {
            return Err(Error::NotFloat {
                name: t.name.clone(),
                found: t.ty.name(),
            });
        }
        Ok(())
    }

    /// Gives a matrix its place behind those that have one: it is `n` rows of a tensor, from byte `offset` on.
    fn place(
        &self,
        t: &'a TensorInfo,
        offset: u64,
        k: usize,
        n: usize,
        of_expert: Option<usize>,
    ) -> Matrix {
        let start = self.host_bytes.get();
        let job = Job {
            tensor: t,
            offset,
            layout: Layout::of(t.ty).expect("every supported format has a layout"),
            n,
            k,
            start,
            of_expert,
        };
        // What does not fit a number is refused when the memory is taken.
        let end = start.saturating_add(job.bytes());
        let end = end.checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX);
        self.host_bytes.set(end);
        let mut jobs = self.jobs.borrow_mut();
        jobs.push(job);
        Matrix {
            index: jobs.len() - 1,
            ty: t.ty,
            n,
            k,
            start,
        }
    }

    /// A vector of `n` values, as `f32`.
    pub(in crate::model) fn vector(&self, name: &str, n: usize) -> Result<Vector, Error> {
        let t = self.shaped(name, &[n])?;
        self.float(t)?;
        let mut bytes = vec![0; n * t.ty.block_bytes()];
        self.source.read(t, 0, &mut bytes)?;
        let mut values = vec![0.0; n];
        formats::decode_row(t.ty, &bytes, &mut values).map_err(|source| Error::Format {
            name: name.to_owned(),
            source,
        })?;
        let (in_file, in_memory) = self.vector_bytes.get();
        let more = (bytes.len() as u64, size_of_val(&values[..]) as u64);
        self.vector_bytes
            .set((in_file + more.0, in_memory + more.1));
        let index = self.vectors.replace(self.vectors.get() + 1);
        Ok(Vector { values, index })
    }

    pub(in crate::model) fn has(&self, name: &str) -> bool {
        self.source.tensor(name).is_some()
    }
}

/// Weights in their place.
pub(in crate::model) struct Loaded {
    pub(in crate::model) weights: Weights,
    /// Bytes of memory that they take, vectors among them.
    pub(in crate::model) bytes: u64,
    /// A digest of samples of all matrices: the same wherever they are.
    pub(in crate::model) digest: [u8; 32],
}

/// Reads all matrices to where `device` computes, but one that may lie in host memory. `vectors` are those that operations read; `tell` hears of bytes done,
/// of so many in all.
#[allow(clippy::too_many_arguments, reason = "where everything goes")]
pub(in crate::model) fn load<'v>(
    planned: &Planned<'_>,
    device: ComputeDevice,
    home: ExpertHome,
    in_host_matrix: Option<&Matrix>,
    pin_max_bytes: Option<u64>,
    pool: &Pool,
    vectors: impl Iterator<Item = &'v Vector>,
    tell: &mut (dyn FnMut(u64, u64) + Send),
) -> Result<Loaded, Error> {
    let Planned {
        source,
        jobs,
        host_bytes,
        vector_bytes,
    } = planned;
    let total = source.tensors().iter().map(TensorInfo::n_bytes).sum();
    let progress = Progress::new(total, tell);
    progress.add(vector_bytes.0);
    let pieces = Pieces::new(jobs);
    match device {
        ComputeDevice::Cpu => {
            let memory = |source| Error::Memory {
                what: "weights".to_owned(),
                source,
            };
            let mut weights = Buffer::new(*host_bytes).map_err(memory)?;
            let digest = fill(
                source,
                jobs,
                &pieces,
                pool,
                &progress,
                &InHost::new(&mut weights, &all_starts(jobs), &pieces),
            )?;
            Ok(Loaded {
                weights: Weights::Host(weights),
                bytes: *host_bytes as u64 + vector_bytes.1,
                digest,
            })
        }
        ComputeDevice::Cuda(ordinal) => {
            let places = Places::new(jobs);
            let bytes_max = pieces.bytes_max();
            let beside = in_host_matrix.map(Matrix::index);
            let threads = pool.threads();
            let room = Room::new(ordinal, home, beside, jobs, &places, threads, bytes_max)?;
            let mut blobs = match home {
                ExpertHome::Device => None,
                ExpertHome::Host => Some(in_host(ordinal, &places, pin_max_bytes, pool)?),
            };
            let memory = blobs.as_mut().map(Blobs::bytes_mut);
            let sink = Divided {
                experts: memory.map(|memory| InHost::new(memory, &places.starts, &pieces)),
                others: room,
            };
            let digest = fill(source, jobs, &pieces, pool, &progress, &sink)?;
            drop(sink.experts);
            let room = sink.others.into_carrier();
            let weights = room.into_weights(vectors, blobs)?;
            Ok(Loaded {
                bytes: weights.bytes(),
                weights: Weights::Device(weights),
                digest,
            })
        }
    }
}

/// Where loading has got to, told from any thread.
struct Progress<'a> {
    done: AtomicU64,
    total: u64,
    tell: Mutex<&'a mut (dyn FnMut(u64, u64) + Send)>,
}

impl<'a> Progress<'a> {
    fn new(total: u64, tell: &'a mut (dyn FnMut(u64, u64) + Send)) -> Self {
        Self {
            done: AtomicU64::new(0),
            total,
            tell: Mutex::new(tell),
        }
    }

    fn add(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        // A thread that finds another telling has nothing newer to say.
        if let Ok(mut tell) = self.tell.try_lock() {
            tell(done, self.total);
        }
    }
}

/// Bytes of a piece between two samples of it, and of a sample: what tells models apart.
const SAMPLES: (usize, usize) = (32 << 10, 64);

thread_local! {
    /// A thread's piece of the file.
    static ROWS: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Has all pieces read, permuted and put. After a failure no further one is begun. Returns a digest of samples.
fn fill(
    source: &Source<'_>,
    jobs: &[Job<'_>],
    pieces: &Pieces<'_>,
    pool: &Pool,
    progress: &Progress<'_>,
    sink: &impl Sink,
) -> Result<[u8; 32], Error> {
    let failed: Mutex<Option<Error>> = Mutex::new(None);
    let mut digests = vec![[0; 32]; pieces.len()];
    pool.chunks_mut(&mut digests, 1, |number, digest| {
        let failure = || failed.lock().unwrap_or_else(PoisonError::into_inner);
        if failure().is_some() {
            return;
        }
        let piece = pieces.get(number);
        let job = &jobs[piece.matrix];
        let put = sink.put(number, &piece, &mut |out| {
            ROWS.with_borrow_mut(|rows| {
                rows.resize(out.len(), 0);
                source.read(job.tensor, job.offset + piece.at.start as u64, rows)?;
                digest[0] = sample(rows);
                let tiles = out.chunks_mut(job.tile_bytes());
                for (rows, tile) in rows.chunks(job.tile_bytes()).zip(tiles) {
                    permute_tile(job.layout, rows.len() / job.row_bytes(), rows, tile);
                }
                Ok(())
            })
        });
        match put {
            Ok(()) => progress.add(piece.at.len() as u64),
            Err(error) => {
                failure().get_or_insert(error);
            }
        }
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(Sha256::digest(digests.concat()).into()),
    }
}

/// [`fill`] of all jobs' pieces.
#[cfg(test)]
pub(super) fn fill_with(
    source: &Source<'_>,
    jobs: &[Job<'_>],
    pool: &Pool,
    tell: &mut (dyn FnMut(u64, u64) + Send),
    sink: &impl Sink,
) -> Result<[u8; 32], Error> {
    let progress = Progress::new(0, tell);
    fill(source, jobs, &Pieces::new(jobs), pool, &progress, sink)
}

fn sample(rows: &[u8]) -> [u8; 32] {
    let (step, bytes) = SAMPLES;
    let mut hash = Sha256::new();
    for piece in rows.chunks(step) {
        hash.update(&piece[..bytes.min(piece.len())]);
    }
    hash.finalize().into()
}

/// Host memory for matrices: each piece's part of it, by number.
struct InHost<'a>(Vec<Option<Mutex<&'a mut [u8]>>>);

/// Where all matrices begin in one memory.
fn all_starts(jobs: &[Job<'_>]) -> Vec<Option<usize>> {
    jobs.iter().map(|job| Some(job.start)).collect()
}

impl<'a> InHost<'a> {
    /// Matrices begin at `starts`, if they are there.
    fn new(mut memory: &'a mut [u8], starts: &[Option<usize>], pieces: &Pieces<'_>) -> Self {
        let place = |number: usize| {
            let piece = pieces.get(number);
            let start = starts[piece.matrix]?;
            Some((start + piece.at.start, piece.at.len(), number))
        };
        let mut places: Vec<_> = (0..pieces.len()).filter_map(place).collect();
        places.sort_unstable();
        let mut parts: Vec<Option<Mutex<&mut [u8]>>> = Vec::new();
        parts.resize_with(pieces.len(), || None);
        let mut taken = 0;
        for (start, len, number) in places {
            let (_, rest) = std::mem::take(&mut memory).split_at_mut(start - taken);
            let (part, rest) = rest.split_at_mut(len);
            (memory, taken) = (rest, start + len);
            parts[number] = Some(Mutex::new(part));
        }
        Self(parts)
    }
}

impl Sink for InHost<'_> {
    fn put(&self, number: usize, _: &Piece, fill: Fill<'_>) -> Result<(), Error> {
        let part = self.0[number].as_ref().expect("it has a place there");
        fill(&mut part.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Experts in host memory, if they are there, and all others on a device.
struct Divided<'a> {
    experts: Option<InHost<'a>>,
    others: Staged<Room>,
}

impl Sink for Divided<'_> {
    fn put(&self, number: usize, piece: &Piece, fill: Fill<'_>) -> Result<(), Error> {
        match &self.experts {
            Some(experts) if experts.0[number].is_some() => experts.put(number, piece, fill),
            _ => self.others.put(number, piece, fill),
        }
    }
}
