//! The CPU's part of a generated token's attention, done while the device does its own.
//!
//! A layer's queries are handed over when they are ready. A thread that waits for them attends, over a pool of its own, the groups of cells
//! that lie in host memory and are the CPU's, and leaves what they fold to; the device goes on from there when it has come to its
//! own cells. All that is given to the stream ahead of time, so nobody waits on the way there.

use cpu::attention::{KvShape, Params, Partials, Span, attend_first_groups};
use cpu::isa::Isa;
use cpu::pool::{Pinning, Pool};
use cuda::attention::Partials as DevicePartials;
use cuda::kernel::Start;
use cuda::product::Target;
use cuda::{Buffer, Doorbell, Error, Spilled, Stream};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long threads look for the next layer's queries before they sleep: longer than a layer takes.
const SPIN: Duration = Duration::from_millis(1);

/// How long the thread that waits for the device sleeps between two looks, after that.
const SLEEP: Duration = Duration::from_micros(50);

/// Looks between two looks at the clock.
const LOOKS: u32 = 64;

/// Cells that the CPU attends.
#[derive(Debug)]
pub(super) struct HostSpan {
    pub(super) index: usize,
    pub(super) cells: (usize, usize),
    pub(super) slab: Arc<Spilled>,
}

/// The CPU's part of a layer.
#[derive(Debug, Clone)]
pub(super) struct Part {
    /// The layer's bytes in a slab.
    pub(super) at: Range<usize>,
    pub(super) spans: Arc<[HostSpan]>,
}

/// The same for one token.
#[derive(Debug)]
struct Job {
    number: u32,
    position: usize,
    part: Part,
}

/// What the CPU must know of attention.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attended {
    pub(super) shape: KvShape,
    pub(super) heads: usize,
    pub(super) scale: f32,
    pub(super) soft_cap: Option<f32>,
    pub(super) n_ctx: usize,
}

/// The thread, and the way to it and back.
#[derive(Debug)]
pub(super) struct Attender {
    bell: Arc<Doorbell>,
    /// `None` once it is to end.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// The last number that is not waited for any more.
    dropped: Arc<AtomicU32>,
    /// Of the last hand-over.
    number: u32,
    what: Attended,
    /// What the CPU's groups fold to.
    totals: DevicePartials,
}

impl Attender {
    /// Starts the thread, with a pool of `threads` threads.
    pub(super) fn new(
        stream: &Stream,
        what: Attended,
        isa: Isa,
        threads: usize,
    ) -> Result<Self, crate::error::Error> {
        let (queries, total) = (
            what.heads * what.shape.c_k,
            what.heads * (2 + what.shape.c_v),
        );
        let device = stream.device();
        let bell = Arc::new(Doorbell::new(device, Target::Best, queries, total)?);
        let dropped = Arc::new(AtomicU32::new(0));
        let memory = |source| crate::error::Error::Memory {
            what: "partial results of attention".to_owned(),
            source,
        };
        let worker = Worker {
            bell: Arc::clone(&bell),
            dropped: Arc::clone(&dropped),
            what,
            isa,
            pool: Pool::with_spin(threads, Pinning::Free, SPIN)?,
            partials: Partials::new(&what.shape, what.heads, what.n_ctx, 0).map_err(memory)?,
        };
        let (jobs, taken) = channel();
        let thread = std::thread::Builder::new()
            .name("attend".to_owned())
            .spawn(move || worker.answer_all(&taken))
            .map_err(|source| cpu::pool::SpawnError {
                index: 0,
                wanted: threads,
                source,
            })?;
        let shape = super::attention::device_shape(&what.shape);
        Ok(Self {
            bell,
            jobs: Some(jobs),
            thread: Some(thread),
            dropped,
            number: 0,
            what,
            totals: DevicePartials::new(stream, &shape, what.heads, 1)?,
        })
    }

    /// Says that a part of a token's attention is to be done, once [its queries](Self::hand_over) are there: whole groups of spans.
    pub(super) fn give(&mut self, part: Part, position: usize) {
        self.number = self.number.wrapping_add(1);
        let job = Job {
            number: self.number,
            position,
            part,
        };
        if let Some(jobs) = &self.jobs {
            // A thread that is gone does not answer, and that is told of.
            let _ = jobs.send(job);
        }
    }

    /// Hands a layer's queries `[H, C]` over, which are ready when `stream` comes to it.
    pub(super) fn hand_over(
        &mut self,
        stream: &Stream,
        start: Start,
        q: &Buffer<f32>,
    ) -> Result<(), Error> {
        let n = self.what.heads * self.what.shape.c_k;
        self.bell.hand_over(stream, start, q, n)
    }

    /// Waits, on the device, for what they fold to.
    pub(super) fn take_back(&mut self, stream: &Stream, start: Start) -> Result<(), Error> {
        let n = self.what.heads * (2 + self.what.shape.c_v);
        let values = self.totals.values_mut();
        self.bell.take_back(stream, start, values, n)
    }

    /// What was taken back last.
    pub(super) fn totals(&self) -> &DevicePartials {
        &self.totals
    }

    /// Nothing that was handed over so far is waited for any more. Says whether all of it was answered in time.
    pub(super) fn end_step(&self) -> bool {
        self.dropped.store(self.number, Ordering::Release);
        !self.bell.was_late()
    }
}

impl Drop for Attender {
    fn drop(&mut self) {
        self.dropped.store(self.number, Ordering::Release);
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // If it panicked, whoever waited for its answer was told.
            let _ = thread.join();
        }
    }
}

/// What the thread has.
struct Worker {
    bell: Arc<Doorbell>,
    dropped: Arc<AtomicU32>,
    what: Attended,
    isa: Isa,
    pool: Pool,
    partials: Partials,
}

impl Worker {
    fn answer_all(mut self, jobs: &Receiver<Job>) {
        for job in jobs {
            // Before there is something to be late for.
            let spans = job.part.spans.iter().map(|span| Span {
                index: span.index,
                cells: span.cells,
                bytes: &span.slab[job.part.at.clone()],
            });
            let spans: Vec<Span<'_>> = spans.collect();
            if self.is_given(job.number) {
                self.answer(&job, &spans);
            }
        }
    }

    /// Waits until queries are handed over, or nobody waits for an answer any more.
    fn is_given(&self, number: u32) -> bool {
        let start = Instant::now();
        loop {
            for _ in 0..LOOKS {
                if self.bell.is_given(number) {
                    return true;
                }
                std::hint::spin_loop();
            }
            if self.dropped.load(Ordering::Acquire).wrapping_sub(number) as i32 >= 0 {
                return false;
            }
            if start.elapsed() > SPIN {
                std::thread::sleep(SLEEP);
            }
        }
    }

    /// Attends what the CPU has of a layer.
    fn answer(&mut self, job: &Job, spans: &[Span<'_>]) {
        let Self {
            bell,
            what,
            isa,
            pool,
            partials,
            ..
        } = self;
        let Attended {
            shape,
            heads,
            scale,
            soft_cap,
            ..
        } = *what;
        let params = Params {
            heads,
            scale,
            soft_cap,
            window: None,
            sinks: None,
        };
        let (n_given, n_answer) = (heads * shape.c_k, heads * (2 + shape.c_v));
        bell.answer(job.number, n_given, n_answer, |queries, totals| {
            let position = job.position;
            attend_first_groups(
                pool, *isa, &shape, &params, position, queries, spans, partials, totals,
            );
        });
    }
}
