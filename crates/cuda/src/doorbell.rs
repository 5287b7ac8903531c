//! Work that the CPU does in the midst of a step: the device hands values over, goes on, and takes results back when it needs them.
//!
//! Both directions go through mapped host memory, each with a *bell*, a word that is set to the number of the hand-over when its values are
//! there. Neither side calls the driver for it, so a hand-over costs two trips over the link. The device's wait is bounded.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::device::Device;
use crate::error::{Error, length};
use crate::kernel::{Arg, Kernel, Launch, Module, Start};
use crate::memory::{Buffer, Pinned};
use crate::product::Target;
use crate::stream::Stream;

/// How long the device waits for a result, unless told otherwise.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// Threads of both kernels: as in `kernels/doorbell.cu`.
const THREADS: usize = 1024;

/// Words between two bells, so that each has a cache line, or two, of its own.
const BELL_WORDS: usize = 32;

/// The bells, by their places.
#[derive(Debug, Clone, Copy)]
enum Bell {
    /// The device has handed over.
    Given,
    /// The CPU has answered.
    Answered,
    /// The device has given up waiting.
    Late,
}

/// Mapped memory between a stream of a device and one thread of the host, which answers: it reads and writes where the device does, for a copy of some
/// KiB by one thread takes as long as the way over the link.
#[derive(Debug)]
pub struct Doorbell {
    hand_over: Kernel,
    take_back: Kernel,
    /// Hand-overs so far, which the kernels count: so they may be part of a graph.
    count: Buffer<u32>,
    bells: Pinned<u32>,
    given: Pinned<f32>,
    /// Its address, for whoever does not answer.
    answer: Mutex<Pinned<f32>>,
    answer_address: u64,
    answer_len: usize,
    patience: Duration,
}

impl Doorbell {
    /// Room for `given` values in one direction and `answer` in the other.
    pub fn new(
        device: &Device,
        target: Target,
        given: usize,
        answer: usize,
    ) -> Result<Self, Error> {
        let module = Module::load_for(device, "doorbell", target.compute(device))?;
        let stream = device.stream()?;
        let count = Buffer::zeroed(&stream, 1)?;
        stream.synchronise()?;
        let answer_len = answer;
        let answer = Pinned::new(device, answer_len)?;
        Ok(Self {
            hand_over: module.kernel("hand_over")?,
            take_back: module.kernel("take_back")?,
            count,
            bells: Pinned::new(device, 3 * BELL_WORDS)?,
            given: Pinned::new(device, given)?,
            answer_address: answer.address(),
            answer: Mutex::new(answer),
            answer_len,
            patience: PATIENCE,
        })
    }

    /// The same, waiting so long for an answer.
    pub fn patient(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    /// Hands the first `n` of `values` over. The first hand-over is number 1, and the one before has been taken back.
    pub fn hand_over(
        &self,
        stream: &Stream,
        start: Start,
        values: &Buffer<f32>,
        n: usize,
    ) -> Result<(), Error> {
        if n > values.len().min(self.given.len()) {
            length("hand_over", "values", n, values.len().min(self.given.len()))?;
        }
        let args = [
            Arg::from(values),
            Arg::from(n as i32),
            Arg::from(self.given.address()),
            Arg::from(self.bell_address(Bell::Given)),
            Arg::from(&self.count),
        ];
        let launch = Launch::new(1, THREADS).start(start);
        // SAFETY: as the kernel takes them; lengths are checked.
        unsafe { self.hand_over.launch(stream, launch, &args) }
    }

    /// Waits, on the device, for the answer to the last hand-over, and copies its first `n` values to `values`.
    pub fn take_back(
        &self,
        stream: &Stream,
        start: Start,
        values: &mut Buffer<f32>,
        n: usize,
    ) -> Result<(), Error> {
        let room = values.len().min(self.answer_len);
        if n > room {
            length("take_back", "values", n, room)?;
        }
        let args = [
            Arg::from(self.bell_address(Bell::Answered)),
            Arg::from(&self.count),
            Arg::from(self.answer_address),
            Arg::from(values),
            Arg::from(n as i32),
            Arg::from(self.patience.as_nanos() as u64),
            Arg::from(self.bell_address(Bell::Late)),
        ];
        let launch = Launch::new(1, THREADS).start(start);
        // SAFETY: as the kernel takes them; lengths are checked.
        unsafe { self.take_back.launch(stream, launch, &args) }
    }

    /// Whether number `number` has been handed over. For the thread that answers.
    pub fn is_given(&self, number: u32) -> bool {
        let given = self.bell(Bell::Given).load(Ordering::Acquire);
        (given.wrapping_sub(number) as i32) >= 0
    }

    /// Answers number `number`, which [is given](Self::is_given): `make` gets the first `n_given` values of the last hand-over, and writes the first
    /// `n_answer` of the answer. Where the device has given up and hands over anew meanwhile, values are torn, and the answer is one that nobody takes.
    ///
    /// # Panics
    /// If there is no room for so many.
    pub fn answer(
        &self,
        number: u32,
        n_given: usize,
        n_answer: usize,
        make: impl FnOnce(&[f32], &mut [f32]),
    ) {
        let mut answer = self.answer.lock().unwrap_or_else(PoisonError::into_inner);
        make(&self.given[..n_given], &mut answer[..n_answer]);
        self.bell(Bell::Answered).store(number, Ordering::Release);
    }

    /// Whether the device has given up waiting for an answer; asking forgets it.
    pub fn was_late(&self) -> bool {
        self.bell(Bell::Late).swap(0, Ordering::AcqRel) != 0
    }

    fn bell(&self, bell: Bell) -> &AtomicU32 {
        let word = &self.bells[bell as usize * BELL_WORDS];
        // SAFETY: aligned, inside memory that lives as long as `self`, and everyone's access to it is atomic.
        unsafe { AtomicU32::from_ptr(std::ptr::from_ref(word).cast_mut()) }
    }

    fn bell_address(&self, bell: Bell) -> u64 {
        self.bells.address() + (bell as usize * BELL_WORDS * size_of::<u32>()) as u64
    }
}
