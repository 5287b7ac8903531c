//! A pool of workers that forks and joins in about a microsecond.
//!
//! The caller works too. Work is cut into numbered chunks that threads take one at a time, and the join counts finished
//! *chunks*, not workers: a worker whose core is busy elsewhere delays nobody who can do its chunks instead. Threads spin
//! briefly after their last chunk and then sleep, so an idle pool takes no processor time.
//!
//! A chunk is claimed by a compare-and-swap on one word, the *ticket*, which holds the job's number and the next chunk.
//! While a chunk of a job is unclaimed the job cannot end, and the ticket is closed before the next job's fields are
//! written, so a worker that wins a claim has read that job's function and no other.

use crate::mem::Shared;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a thread looks for work, or for the end of a job, before it sleeps, unless told otherwise.
const SPIN: Duration = Duration::from_micros(60);

/// Pauses between two looks at the clock while spinning.
const PAUSES: u32 = 64;

/// Lower half of the ticket while a job's fields are being written: beyond any chunk.
const CLOSED: u64 = u32::MAX as u64;

/// The most chunks a job may have: their number shares a word with the job's.
const CHUNKS_MAX: usize = CLOSED as usize;

/// Values of element-wise work that are one chunk of a fork, at least: with fewer a fork costs more than it saves.
const VALUES_A_CHUNK: usize = 2048;

/// Rows of element-wise work that are one chunk of a fork, at most.
const ROWS_A_CHUNK: usize = 8;

/// Whether threads are bound to processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pinning {
    /// The system's scheduler decides.
    #[default]
    Free,
    /// Each thread stays on one physical core.
    Pinned,
}

/// A job as workers see it: a function of the chunk's number, type-erased, and the number of chunks.
#[derive(Default)]
struct Job {
    call: AtomicUsize,
    data: AtomicUsize,
    chunks: AtomicUsize,
}

#[derive(Default)]
struct State {
    spin: Duration,
    /// Upper half: number of the job. Lower half: next chunk to claim.
    ticket: AtomicU64,
    job: Job,
    done: AtomicUsize,
    /// Threads asleep, or about to be.
    sleepers: AtomicUsize,
    caller_sleeps: AtomicBool,
    quit: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    lock: Mutex<()>,
    work: Condvar,
    finished: Condvar,
}

/// A pool of `threads() - 1` workers and the calling thread.
pub struct Pool {
    state: Arc<State>,
    workers: Vec<JoinHandle<()>>,
    /// One fork at a time.
    busy: Mutex<()>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("threads", &self.threads())
            .finish()
    }
}

/// Threads could not be started.
#[derive(Debug, thiserror::Error)]
#[error("could not start worker thread {index} of {wanted}: {source}")]
pub struct SpawnError {
    /// Which one.
    pub index: usize,
    /// How many were wanted.
    pub wanted: usize,
    /// The system's reason.
    pub source: std::io::Error,
}

impl Pool {
    /// A pool that computes with `threads` threads, the caller's among them.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn new(threads: usize, pinning: Pinning) -> Result<Self, SpawnError> {
        Self::with_spin(threads, pinning, SPIN)
    }

    /// The same with threads that look for work, or for the end of a job, for `spin` before they sleep.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn with_spin(threads: usize, pinning: Pinning, spin: Duration) -> Result<Self, SpawnError> {
        let threads = threads.max(1);
        let state = Arc::new(State {
            spin,
            ..State::default()
        });
        let cores = match pinning {
            Pinning::Free => Vec::new(),
            Pinning::Pinned => physical_cores(),
        };
        let core = |i: usize| (!cores.is_empty()).then(|| cores[i % cores.len()]);
        if let Some(core) = core(0) {
            core_affinity::set_for_current(core);
        }
        let mut workers = Vec::with_capacity(threads - 1);
        for index in 1..threads {
            let (shared, core) = (Arc::clone(&state), core(index));
            let spawned = std::thread::Builder::new()
                .name(format!("compute-{index}"))
                .spawn(move || {
                    if let Some(core) = core {
                        core_affinity::set_for_current(core);
                    }
                    shared.work_until_quit();
                });
            match spawned {
                Ok(handle) => workers.push(handle),
                Err(source) => {
                    stop(&state, workers);
                    return Err(SpawnError {
                        index,
                        wanted: threads,
                        source,
                    });
                }
            }
        }
        Ok(Self {
            state,
            workers,
            busy: Mutex::new(()),
        })
    }

    /// Threads that compute, the caller's among them.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(0)`, ..., `f(chunks - 1)`, each once, on any thread, and returns when all have ended.
    ///
    /// A panic in a chunk is raised again here after the join; the pool can be used afterwards. `f` must not itself
    /// fork on the same pool.
    pub fn run(&self, chunks: usize, f: impl Fn(usize) + Sync) {
        assert!(chunks < CHUNKS_MAX, "{chunks} chunks do not fit a ticket");
        if self.workers.is_empty() || chunks <= 1 {
            return (0..chunks).for_each(f);
        }
        let guard = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        self.state.publish(&f, chunks);
        self.state.take_chunks();
        self.state.join(chunks);
        let panic = self
            .state
            .panic
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        drop(guard);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Pool {
    /// Calls `f(i, chunk i)` for each chunk of `len` values (the last may be shorter), over the pool.
    pub fn chunks_mut<T: Send>(
        &self,
        data: &mut [T],
        len: usize,
        f: impl Fn(usize, &mut [T]) + Sync,
    ) {
        let total = data.len();
        let shared = Shared::new(data);
        self.run(total.div_ceil(len), |i| {
            // SAFETY: chunks do not overlap.
            f(i, unsafe { shared.part(i * len, len.min(total - i * len)) });
        });
    }

    /// Calls `f(i, row i of a)` for each row of `len_a` values; few values stay on this thread.
    pub fn rows<T: Send>(&self, a: &mut [T], len_a: usize, f: impl Fn(usize, &mut [T]) + Sync) {
        self.rows2(a, len_a, &mut [(); 0], 0, |i, a, _| f(i, a));
    }

    /// Calls `f(i, row i of a, row i of b)`; few values stay on this thread.
    pub fn rows2<T: Send, U: Send>(
        &self,
        a: &mut [T],
        len_a: usize,
        b: &mut [U],
        len_b: usize,
        f: impl Fn(usize, &mut [T], &mut [U]) + Sync,
    ) {
        let n = a.len() / len_a;
        let (a, b) = (Shared::new(a), Shared::new(b));
        let row = |i| {
            // SAFETY: rows do not overlap.
            let (a, b) = unsafe { (a.part(i * len_a, len_a), b.part(i * len_b, len_b)) };
            f(i, a, b);
        };
        let chunks = (n * len_a.max(len_b) / VALUES_A_CHUNK).clamp(1, n.max(1));
        let rows = n.div_ceil(chunks).clamp(1, ROWS_A_CHUNK);
        self.run(n.div_ceil(rows), |chunk| {
            let first = chunk * rows;
            (first..n.min(first + rows)).for_each(&row);
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        stop(&self.state, std::mem::take(&mut self.workers));
    }
}

fn stop(state: &State, workers: Vec<JoinHandle<()>>) {
    state.quit.store(true, Ordering::SeqCst);
    state.wake_workers();
    for worker in workers {
        // A worker catches its chunks' panics; its own end is all that is waited for.
        let _ = worker.join();
    }
}

/// Calls the erased function. `data` must point to an `F` that lives until the call returns.
unsafe fn call<F: Fn(usize) + Sync>(data: *const (), chunk: usize) {
    // SAFETY: the caller's promise.
    let f = unsafe { &*data.cast::<F>() };
    f(chunk);
}

type Call = unsafe fn(*const (), usize);

impl State {
    fn publish<F: Fn(usize) + Sync>(&self, f: &F, chunks: usize) {
        let number = (self.ticket.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        // No chunk can be claimed by the old ticket once a new field can be seen.
        self.ticket.store(number << 32 | CLOSED, Ordering::Relaxed);
        fence(Ordering::Release);
        self.done.store(0, Ordering::Relaxed);
        self.job
            .call
            .store(call::<F> as Call as usize, Ordering::Relaxed);
        self.job
            .data
            .store(std::ptr::from_ref(f) as usize, Ordering::Relaxed);
        self.job.chunks.store(chunks, Ordering::Relaxed);
        self.ticket.store((number + 1) << 32, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake_workers();
        }
    }

    fn wake_workers(&self) {
        let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.work.notify_all();
    }

    /// Claims and runs chunks until none is left. Returns whether there was one.
    fn take_chunks(&self) -> bool {
        let mut any = false;
        loop {
            let ticket = self.ticket.load(Ordering::Acquire);
            let chunk = (ticket & 0xffff_ffff) as usize;
            let chunks = self.job.chunks.load(Ordering::Relaxed);
            let function = self.job.call.load(Ordering::Relaxed);
            let data = self.job.data.load(Ordering::Relaxed);
            if chunk >= chunks {
                return any;
            }
            // The reads above must not move below the claim that vouches for them.
            fence(Ordering::Acquire);
            if self
                .ticket
                .compare_exchange_weak(ticket, ticket + 1, Ordering::AcqRel, Ordering::Relaxed)
                .is_err()
            {
                continue;
            }
            any = true;
            // SAFETY: the claim succeeded, so the job that `ticket` names was still open after its fields were read, and
            // it stays open until `done` counts this chunk: `function` is a `Call` for the `F` at `data`, which lives.
            let outcome = catch_unwind(AssertUnwindSafe(|| unsafe {
                let function = std::mem::transmute::<usize, Call>(function);
                function(data as *const (), chunk);
            }));
            if let Err(panic) = outcome {
                *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
            }
            if self.done.fetch_add(1, Ordering::SeqCst) + 1 == chunks
                && self.caller_sleeps.load(Ordering::SeqCst)
            {
                let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
                self.finished.notify_all();
            }
        }
    }

    fn join(&self, chunks: usize) {
        let is_done = || self.done.load(Ordering::Acquire) == chunks;
        if spin(self.spin, is_done) {
            return;
        }
        self.caller_sleeps.store(true, Ordering::SeqCst);
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while self.done.load(Ordering::SeqCst) != chunks {
            guard = self
                .finished
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        }
        drop(guard);
        self.caller_sleeps.store(false, Ordering::SeqCst);
    }

    fn has_work(&self) -> bool {
        let ticket = self.ticket.load(Ordering::SeqCst);
        ((ticket & 0xffff_ffff) as usize) < self.job.chunks.load(Ordering::SeqCst)
            || self.quit.load(Ordering::SeqCst)
    }

    fn work_until_quit(&self) {
        while !self.quit.load(Ordering::SeqCst) {
            if self.take_chunks() || spin(self.spin, || self.has_work()) {
                continue;
            }
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            let guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            if !self.has_work() {
                let woken = self.work.wait(guard);
                drop(woken.unwrap_or_else(PoisonError::into_inner));
            }
            // Whoever is woken looks for work for a while, also if others have done it meanwhile: else work that is shorter than a wake-up would
            // never find anybody awake.
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Looks at `ready` until it holds or so much time has passed.
fn spin(most: Duration, ready: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..PAUSES {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > most {
            return ready();
        }
    }
}

/// One processor of each physical core that this process may run on.
fn physical_cores() -> Vec<core_affinity::CoreId> {
    let allowed = core_affinity::get_core_ids().unwrap_or_default();
    let mut seen = std::collections::BTreeSet::new();
    allowed
        .into_iter()
        .filter(|core| {
            let path = format!(
                "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list",
                core.id
            );
            // Without the file every processor counts as a core of its own.
            seen.insert(std::fs::read_to_string(path).unwrap_or_else(|_| core.id.to_string()))
        })
        .collect()
}

/// The number of threads to compute with unless told otherwise: the physical cores that affinity and the control group
/// leave to this process.
pub fn default_threads() -> usize {
    let quota = std::thread::available_parallelism().map_or(1, usize::from);
    let cores = physical_cores().len();
    if cores == 0 { quota } else { quota.min(cores) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_chunk_runs_once() {
        let pool = Pool::new(4, Pinning::Free).unwrap();
        for chunks in [0, 1, 2, 3, 7, 64, 1000] {
            let hits: Vec<AtomicU32> = (0..chunks).map(|_| AtomicU32::new(0)).collect();
            pool.run(chunks, |i| {
                hits[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(
                hits.iter().all(|h| h.load(Ordering::Relaxed) == 1),
                "{chunks} chunks"
            );
        }
    }

    #[test]
    fn many_short_jobs_lose_nothing() {
        let pool = Pool::new(3, Pinning::Free).unwrap();
        let sum = AtomicU64::new(0);
        for job in 0..20_000u64 {
            pool.run(5, |i| {
                sum.fetch_add(job * i as u64, Ordering::Relaxed);
            });
            if job % 1000 == 0 {
                // Long enough that the workers fall asleep.
                std::thread::sleep(SPIN * 3);
            }
        }
        assert_eq!(sum.into_inner(), (0..20_000u64).sum::<u64>() * 10);
    }

    #[test]
    fn who_wakes_too_late_for_a_job_is_awake_for_the_next() {
        let pool = Pool::with_spin(3, Pinning::Free, Duration::from_millis(50)).unwrap();
        let begun = Instant::now();
        let until = |sleepers: usize| {
            while pool.state.sleepers.load(Ordering::SeqCst) != sleepers {
                assert!(begun.elapsed() < Duration::from_secs(30), "{sleepers}");
                std::thread::yield_now();
            }
        };
        until(2);
        // Done before anybody has woken.
        pool.state.publish(&|_| (), 0);
        until(0);
        until(2);
    }

    #[test]
    fn a_panic_comes_back_and_the_pool_lives() {
        let pool = Pool::new(3, Pinning::Free).unwrap();
        for bad in 0..8 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                pool.run(8, |i| assert_ne!(i, bad, "chunk {i}"))
            }));
            assert!(caught.is_err(), "chunk {bad} panicked");
            let count = AtomicU32::new(0);
            pool.run(8, |_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 8);
        }
    }

    #[test]
    fn pinned_threads_compute_too() {
        let pool = Pool::new(default_threads(), Pinning::Pinned).unwrap();
        let count = AtomicU32::new(0);
        pool.run(100, |_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 100);
    }
}
