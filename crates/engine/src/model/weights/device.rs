//! Weights in a device's memory.

use super::Vector;
use super::pieces::{Job, Piece};
use super::staged::{Carrier, Staged, slots};
use crate::error::Error;
use cuda::{Buffer, Device, Slot, Stream, Weights};
use std::sync::{Mutex, PoisonError};

/// Matrices and vectors on a device.
#[derive(Debug)]
pub(crate) struct OnDevice {
    /// By number.
    matrices: Vec<Weights>,
    /// By number; `None` where no operation reads one.
    vectors: Vec<Option<Buffer<f32>>>,
}

impl OnDevice {
    /// All matrices, by number.
    pub(crate) fn matrices(&self) -> &[Weights] {
        &self.matrices
    }

    /// A vector's values.
    pub(crate) fn vector(&self, vector: &Vector) -> &Buffer<f32> {
        let found = self.vectors[vector.index()].as_ref();
        found.expect("vectors that operations read were copied")
    }

    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> u64 {
        let matrices = self.matrices.iter().map(|m| m.data().bytes());
        let vectors = self.vectors.iter().flatten().map(Buffer::bytes);
        matrices.chain(vectors).map(|bytes| bytes as u64).sum()
    }
}

/// Memory for all matrices on a device, and what is copied to it.
pub(super) struct Room {
    stream: Stream,
    /// Each is locked for as long as it takes to begin a copy.
    matrices: Vec<Mutex<Weights>>,
}

impl Room {
    /// Takes memory for all matrices, and slots for `threads` threads, each for a piece of `slot_bytes` at most.
    pub(super) fn new(
        ordinal: usize,
        jobs: &[Job<'_>],
        threads: usize,
        slot_bytes: usize,
    ) -> Result<Staged<Self>, Error> {
        let device = Device::open(ordinal)?;
        let of_jobs = jobs
            .iter()
            .map(|job| Weights::device_bytes(job.layout, job.n, job.k));
        let all_bytes = of_jobs.fold(0, |sum: u64, bytes| sum.saturating_add(bytes as u64));
        let no_room = |what: String| {
            move |source| Error::DeviceRoom {
                what,
                all_bytes,
                source,
            }
        };
        let memory = device.memory()?;
        if all_bytes > memory.free_bytes {
            let source = cuda::Error::OutOfMemory {
                ordinal,
                wanted_bytes: all_bytes,
                free_bytes: memory.free_bytes,
                total_bytes: memory.total_bytes,
            };
            return Err(no_room("weights".to_owned())(source));
        }
        let matrix = |job: &Job<'_>| {
            let made = Weights::new(&device, job.tensor.ty, job.n, job.k);
            let made = made.map_err(no_room(format!("tensor {}", job.tensor.name)))?;
            Ok::<_, Error>(Mutex::new(made))
        };
        let room = Self {
            stream: device.stream()?,
            matrices: jobs.iter().map(matrix).collect::<Result<_, _>>()?,
        };
        let slots = (0..slots(threads)).map(|_| Slot::new(&device, slot_bytes));
        let slots = slots.collect::<Result<Vec<_>, _>>()?;
        Ok(Staged::new(room, slots))
    }

    /// Copies the vectors, and waits for everything.
    pub(super) fn into_weights<'v>(
        self,
        all: impl Iterator<Item = &'v Vector>,
    ) -> Result<OnDevice, Error> {
        let mut vectors = Vec::new();
        for vector in all {
            let room = vectors.len().max(vector.index() + 1);
            vectors.resize_with(room, || None);
            vectors[vector.index()] = Some(Buffer::from_slice(&self.stream, vector)?);
        }
        self.stream.synchronise()?;
        let matrices = self.matrices.into_iter();
        Ok(OnDevice {
            matrices: matrices
                .map(|m| m.into_inner().unwrap_or_else(PoisonError::into_inner))
                .collect(),
            vectors,
        })
    }
}

impl Carrier for Room {
    type Slot = Slot;

    fn memory<'s>(&self, slot: &'s mut Slot) -> Result<&'s mut [u8], Error> {
        Ok(slot.bytes()?)
    }

    fn send(&self, slot: &mut Slot, piece: &Piece) -> Result<(), Error> {
        let matrix = self.matrices[piece.matrix].lock();
        let mut matrix = matrix.unwrap_or_else(PoisonError::into_inner);
        Ok(matrix.send_tiles(&self.stream, piece.first, slot, piece.at.len())?)
    }
}
