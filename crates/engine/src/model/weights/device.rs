//! Weights in a device's memory.

use super::pieces::{Job, Piece};
use super::staged::{Carrier, Staged, slots};
use super::{Matrix, Vector};
use crate::error::Error;
use crate::model::ExpertHome;
use cpu::mem::{self, ALIGN};
use cpu::pool::Pool;
use cuda::experts::Blobs;
use cuda::{Buffer, Device, Slot, Stream, Weights};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of a page, at least, and of pages that a thread has the system give at a time.
const PAGE_BYTES: usize = 4 << 10;
const PAGES_BYTES: usize = 32 << 20;

/// Where all experts of a device's model lie.
#[derive(Debug)]
pub(crate) enum ExpertMemory {
    /// Where they are computed with.
    Device(Arc<Buffer<u8>>),
    /// In host memory, from where they are copied, or read.
    Host(Arc<Blobs>),
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

    /// Bytes of host memory that are pinned.
    pub(crate) fn pinned_bytes(&self) -> u64 {
        let experts = match &self.experts {
            ExpertMemory::Device(_) => 0,
            ExpertMemory::Host(blobs) => blobs.pinned_bytes(),
        };
        let matrices = self.matrices.iter().flatten().map(Weights::host_bytes);
        (experts + matrices.sum::<usize>()) as u64
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
    /// `None`: they are in host memory.
    experts: Option<Mutex<Buffer<u8>>>,
    expert_starts: Vec<Option<usize>>,
}

/// Where experts' matrices lie in memory of their own.
#[derive(Debug)]
pub(super) struct Places {
    /// Of each job; `None`: it is no expert's.
    pub(super) starts: Vec<Option<usize>>,
    /// Where each expert begins.
    pub(super) blobs: Vec<usize>,
    /// Where the last one ends.
    pub(super) end: usize,
}

impl Places {
    pub(super) fn new(jobs: &[Job<'_>]) -> Self {
        let mut this = Self {
            starts: Vec::with_capacity(jobs.len()),
            blobs: Vec::new(),
            end: 0,
        };
        let mut before = None;
        for job in jobs {
            let start = job.of_expert.map(|_| this.end);
            if let Some(start) = start {
                if job.of_expert != before {
                    this.blobs.push(start);
                }
                // What does not fit a number is refused when the memory is taken.
                let after = start.saturating_add(job.bytes());
                this.end = after.checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX);
            }
            this.starts.push(start);
            before = job.of_expert;
        }
        this
    }
}

/// Host memory for experts, of which `pin_max_bytes` may be pinned, and as much is as the system lets it.
pub(super) fn in_host(
    ordinal: usize,
    places: &Places,
    pin_max_bytes: Option<u64>,
    pool: &Pool,
) -> Result<Blobs, Error> {
    let device = Device::open(ordinal)?;
    let refused = |source| Error::Memory {
        what: "experts".to_owned(),
        source,
    };
    let mut memory = mem::Buffer::new(places.end).map_err(refused)?;
    // The system gives pages as they are written, and would have one thread take them all when they are pinned.
    pool.chunks_mut(&mut memory, PAGES_BYTES, |_, pages| {
        pages
            .iter_mut()
            .step_by(PAGE_BYTES)
            .for_each(|byte| *byte = 0);
    });
    let most = pin_max_bytes.map_or(usize::MAX, |most| {
        usize::try_from(most).unwrap_or(usize::MAX)
    });
    let blobs = Blobs::new(&device, memory, &places.blobs, most)?;
    if blobs.pinned_bytes() < blobs.len() {
        let (mib, of) = (blobs.pinned_bytes() >> 20, blobs.len() >> 20);
        tracing::warn!(
            "{mib} of {of} MiB of experts are in pinned memory, and no more may be: the CPU computes or copies the others, which is slower"
        );
    }
    Ok(blobs)
}

fn inner<T>(of: Mutex<T>) -> T {
    of.into_inner().unwrap_or_else(PoisonError::into_inner)
}

impl Room {
    /// Takes memory for all matrices, host memory for the one with number `beside`, and slots for `threads` threads, each for a piece of `slot_bytes` at most.
    pub(super) fn new(
        ordinal: usize,
        home: ExpertHome,
        beside: Option<usize>,
        jobs: &[Job<'_>],
        places: &Places,
        threads: usize,
        slot_bytes: usize,
    ) -> Result<Staged<Self>, Error> {
        let device = Device::open(ordinal)?;
        let expert_bytes = places.end;
        let others = jobs
            .iter()
            .enumerate()
            .filter(|(number, job)| job.of_expert.is_none() && beside != Some(*number));
        let of_jobs = others.map(|(_, job)| Weights::device_bytes(job.layout, job.n, job.k));
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
        let matrix = |(number, job): (usize, &Job<'_>)| {
            if job.of_expert.is_some() {
                return Ok(None);
            }
            let (ty, n, k) = (job.tensor.ty, job.n, job.k);
            if beside == Some(number) {
                match Weights::in_host(&device, ty, n, k) {
                    Err(refused @ cuda::Error::OutOfPinned { .. }) => {
                        let name = &job.tensor.name;
                        tracing::warn!("{refused}: {name} goes to the device's memory instead");
                    }
                    made => return Ok(Some(Mutex::new(made?))),
                }
            }
            let made = Weights::new(&device, ty, n, k);
            let made = made.map_err(no_room(format!("tensor {}", job.tensor.name)))?;
            Ok::<_, Error>(Some(Mutex::new(made)))
        };
        let experts = match home {
            ExpertHome::Device => {
                let memory = Buffer::new(&device, expert_bytes);
                Some(Mutex::new(memory.map_err(no_room("experts".to_owned()))?))
            }
            ExpertHome::Host => None,
        };
        let room = Self {
            stream: device.stream()?,
            matrices: jobs
                .iter()
                .enumerate()
                .map(matrix)
                .collect::<Result<_, _>>()?,
            experts,
            expert_starts: places.starts.clone(),
        };
        let slots = (0..slots(threads)).map(|_| Slot::new(&device, slot_bytes));
        let slots = slots.collect::<Result<Vec<_>, _>>()?;
        Ok(Staged::new(room, slots))
    }

    /// Copies the vectors, and waits for everything. `blobs` are the experts that are in host memory.
    pub(super) fn into_weights<'v>(
        self,
        all: impl Iterator<Item = &'v Vector>,
        blobs: Option<Blobs>,
    ) -> Result<OnDevice, Error> {
        let mut vectors = Vec::new();
        for vector in all {
            let room = vectors.len().max(vector.index() + 1);
            vectors.resize_with(room, || None);
            vectors[vector.index()] = Some(Buffer::from_slice(&self.stream, vector)?);
        }
        self.stream.synchronise()?;
        let matrices = self.matrices.into_iter().map(|m| m.map(inner));
        let on_device = self.experts.map(inner).map(Arc::new);
        let experts = match blobs {
            Some(blobs) => ExpertMemory::Host(Arc::new(blobs)),
            None => ExpertMemory::Device(on_device.expect("experts are somewhere")),
        };
        Ok(OnDevice {
            matrices: matrices.collect(),
            experts,
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
            let memory = self.experts.as_ref().expect("no others come here");
            let mut memory = memory.lock().unwrap_or_else(PoisonError::into_inner);
            slot.send(&self.stream, len, &mut memory, at)?;
            return Ok(());
        };
        let mut matrix = matrix.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(matrix.send_tiles(&self.stream, piece.first, slot, piece.at.len())?)
    }
}
