//! Weights in a device's memory.

use super::pieces::{Job, Piece};
use super::staged::{Carrier, Staged, slots};
use super::{Matrix, Vector};
use crate::error::Error;
use crate::model::ExpertHome;
use cpu::mem::ALIGN;
use cuda::{Buffer, Device, Pinned, Slot, Stream, Weights};
use std::sync::{Arc, Mutex, PoisonError};

/// Where all experts of a device's model lie.
#[derive(Debug)]
pub(crate) enum ExpertMemory {
    /// Where they are computed with.
    Device(Arc<Buffer<u8>>),
    /// In host memory that the device copies from by itself.
    Host(Arc<Pinned<u8>>),
}

impl ExpertMemory {
    fn bytes(&self) -> usize {
        match self {
            Self::Device(memory) => memory.bytes(),
            Self::Host(memory) => memory.len(),
        }
    }
}

/// Matrices and vectors on a device.
#[derive(Debug)]
pub(crate) struct OnDevice {
    /// By number; `None` for those of experts.
    matrices: Vec<Option<Weights>>,
    /// All experts' blobs, one behind the other, as host memory would have them.
    experts: ExpertMemory,
    /// Where matrices of experts begin there, by number.
    expert_starts: Vec<Option<usize>>,
    /// By number; `None` where no operation reads one.
    vectors: Vec<Option<Buffer<f32>>>,
}

impl OnDevice {
    /// All matrices, by number; `None` for those of experts.
    pub(crate) fn matrices(&self) -> &[Option<Weights>] {
        &self.matrices
    }

    /// The memory that all experts' blobs lie in.
    pub(crate) fn experts(&self) -> &ExpertMemory {
        &self.experts
    }

    /// Where an expert's matrix begins there.
    ///
    /// # Panics
    /// If it is none of an expert.
    pub(crate) fn expert_start(&self, matrix: &Matrix) -> usize {
        self.expert_starts[matrix.index()].expect("a matrix of an expert")
    }

    /// A vector's values.
    pub(crate) fn vector(&self, vector: &Vector) -> &Buffer<f32> {
        let found = self.vectors[vector.index()].as_ref();
        found.expect("vectors that operations read were copied")
    }

    /// Bytes of memory, the device's or, of experts, the host's.
    pub(super) fn bytes(&self) -> u64 {
        let matrices = self.matrices.iter().flatten().map(|m| m.data().bytes());
        let vectors = self.vectors.iter().flatten().map(Buffer::bytes);
        let all = matrices.chain(vectors).chain([self.experts.bytes()]);
        all.map(|bytes| bytes as u64).sum()
    }
}

/// Memory for all matrices on a device, and what is copied to it.
pub(super) struct Room {
    stream: Stream,
    /// Each is locked for as long as it takes to begin a copy.
    matrices: Vec<Option<Mutex<Weights>>>,
    experts: ExpertRoom,
    expert_starts: Vec<Option<usize>>,
}

/// Memory for experts, locked for as long as it takes to begin a copy, or to make one.
enum ExpertRoom {
    Device(Mutex<Buffer<u8>>),
    Host(Mutex<Pinned<u8>>),
}

impl ExpertRoom {
    fn into_memory(self) -> ExpertMemory {
        fn inner<T>(of: Mutex<T>) -> Arc<T> {
            Arc::new(of.into_inner().unwrap_or_else(PoisonError::into_inner))
        }
        match self {
            Self::Device(memory) => ExpertMemory::Device(inner(memory)),
            Self::Host(memory) => ExpertMemory::Host(inner(memory)),
        }
    }
}

/// Where experts' matrices lie in memory of their own, and where the last one ends.
fn place_experts(jobs: &[Job<'_>]) -> (Vec<Option<usize>>, usize) {
    let mut end = 0_usize;
    let start = |job: &Job<'_>| {
        job.of_expert.then(|| {
            let start = end;
            // What does not fit a number is refused when the memory is taken.
            let after = start.saturating_add(job.bytes());
            end = after.checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX);
            start
        })
    };
    let starts = jobs.iter().map(start).collect();
    (starts, end)
}

impl Room {
    /// Takes memory for all matrices, and slots for `threads` threads, each for a piece of `slot_bytes` at most.
    pub(super) fn new(
        ordinal: usize,
        home: ExpertHome,
        jobs: &[Job<'_>],
        threads: usize,
        slot_bytes: usize,
    ) -> Result<Staged<Self>, Error> {
        let device = Device::open(ordinal)?;
        let (expert_starts, expert_bytes) = place_experts(jobs);
        let others = jobs.iter().filter(|job| !job.of_expert);
        let of_jobs = others.map(|job| Weights::device_bytes(job.layout, job.n, job.k));
        let all_bytes = of_jobs.chain((home == ExpertHome::Device).then_some(expert_bytes));
        let all_bytes = all_bytes.fold(0, |sum: u64, bytes| sum.saturating_add(bytes as u64));
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
            if job.of_expert {
                return Ok(None);
            }
            let made = Weights::new(&device, job.tensor.ty, job.n, job.k);
            let made = made.map_err(no_room(format!("tensor {}", job.tensor.name)))?;
            Ok::<_, Error>(Some(Mutex::new(made)))
        };
        let experts = match home {
            ExpertHome::Device => {
                let memory = Buffer::new(&device, expert_bytes);
                ExpertRoom::Device(Mutex::new(memory.map_err(no_room("experts".to_owned()))?))
            }
            ExpertHome::Host => ExpertRoom::Host(Mutex::new(Pinned::new(&device, expert_bytes)?)),
        };
        let room = Self {
            stream: device.stream()?,
            matrices: jobs.iter().map(matrix).collect::<Result<_, _>>()?,
            experts,
            expert_starts,
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
        let inner = |m: Mutex<Weights>| m.into_inner().unwrap_or_else(PoisonError::into_inner);
        let matrices = self.matrices.into_iter().map(|m| m.map(inner));
        Ok(OnDevice {
            matrices: matrices.collect(),
            experts: self.experts.into_memory(),
            expert_starts: self.expert_starts,
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
        let Some(matrix) = &self.matrices[piece.matrix] else {
            let start = self.expert_starts[piece.matrix].expect("it is an expert's");
            let (at, len) = (start + piece.at.start, piece.at.len());
            match &self.experts {
                ExpertRoom::Device(memory) => {
                    let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
                    slot.send(&self.stream, len, &mut memory, at)?;
                }
                ExpertRoom::Host(memory) => {
                    let bytes = &slot.bytes()?[..len];
                    let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
                    memory[at..at + len].copy_from_slice(bytes);
                }
            }
            return Ok(());
        };
        let mut matrix = matrix.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(matrix.send_tiles(&self.stream, piece.first, slot, piece.at.len())?)
    }
}
