//! A pool of workers that forks and joins in about a microsecond.
//!
//! The caller works too. Work is cut into numbered chunks. Each thread has a share of them, neighbours, the same ones in jobs
//! of the same size, and takes them one at a time; who has none left takes those of others. The join counts finished
//! *chunks*, not workers: a worker whose core is busy elsewhere delays nobody who can do its chunks instead. Threads spin
//! briefly after their last chunk and then sleep, so an idle pool takes no processor time.
//!
//! What costs time with many threads is a cache line that all of them write. So a thread claims its chunks by a word of its
//! own, and counts those that it has done once a job; who waits for a job reads a line that is written once a job. With one
//! word for all claims an empty fork of 16 threads took 13 us.
//!
//! A claim is a compare-and-swap on the word of a share, which holds the job's number. While a chunk of a job is unclaimed or
//! has not been counted the job cannot end, so that whoever has claimed one reads that job's function and no other.

use crate::mem::Shared;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a thread looks for work, or for the end of a job, before it sleeps, unless told otherwise.
const SPIN: Duration = Duration::from_micros(60);

/// Pauses between two looks at the clock while spinning.
const PAUSES: u32 = 64;

/// The most chunks a job may have, less one: their number shares a word with the job's, which comes again after 2^40 jobs.
const CHUNKS_MAX: usize = (1 << CHUNK_BITS) - 1;
const CHUNK_BITS: u32 = 24;

/// Values of element-wise work that are one chunk of a fork, at least: with fewer a fork costs more than it saves.
const VALUES_A_CHUNK: usize = 2048;

/// Rows of element-wise work that are one chunk of a fork, at most.
const ROWS_A_CHUNK: usize = 8;

/// Bytes that a thread copies at a time: a block of cells of one layer in 4 bits has some dozen KiB, and all threads should have some of them.
const COPY_BYTES: usize = 8 << 10;

/// Whether threads are bound to processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pinning {
    /// The system's scheduler decides.
    #[default]
    Free,
    /// Each thread stays on one physical core.
    Pinned,
}

/// A value on cache lines of its own (pairs of lines are fetched together), so that who waits for it is not disturbed by others.
#[derive(Default)]
#[repr(align(128))]
struct Apart<T>(T);

/// A function of the chunk's number, type-erased.
#[derive(Default)]
struct Function {
    call: AtomicUsize,
    data: AtomicUsize,
}

/// A job's number, and with it how many chunks it has, or the next one of a share: one word.
#[derive(Clone, Copy, PartialEq)]
struct Ticket(u64);

impl Ticket {
    fn new(job: u64, chunk: usize) -> Self {
        Self(job << CHUNK_BITS | chunk as u64)
    }

    fn job(self) -> u64 {
        self.0 >> CHUNK_BITS
    }

    fn chunk(self) -> usize {
        (self.0 & CHUNKS_MAX as u64) as usize
    }
}

struct State {
    spin: Duration,
    /// A [`Ticket`]: the present job, and its chunks.
    job: Apart<AtomicU64>,
    function: Apart<Function>,
    /// A [`Ticket`] a thread: the last job that one of its chunks was claimed of, and how many of them were.
    claimed: Vec<Apart<AtomicU64>>,
    /// Chunks that are done.
    done: Apart<AtomicUsize>,
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
            job: Apart::default(),
            function: Apart::default(),
            claimed: (0..threads).map(|_| Apart::default()).collect(),
            done: Apart::default(),
            sleepers: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            quit: AtomicBool::new(false),
            panic: Mutex::new(None),
            lock: Mutex::new(()),
            work: Condvar::new(),
            finished: Condvar::new(),
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
                    shared.work_until_quit(index);
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

    /// The chunk that the thread whose share `chunk` is in takes after it, if there is one in its share.
    pub fn after(&self, chunk: usize, chunks: usize) -> Option<usize> {
        let owner = chunk * self.threads() / chunks.max(1);
        let (_, end) = share(owner, chunks, self.threads());
        (chunk + 1 < end).then_some(chunk + 1)
    }

    /// Calls `f(0)`, ..., `f(chunks - 1)`, each once, on any thread, and returns when all have ended.
    ///
    /// A panic in a chunk is raised again here after the join; the pool can be used afterwards. `f` must not itself
    /// fork on the same pool.
    pub fn run(&self, chunks: usize, f: impl Fn(usize) + Sync) {
        assert!(chunks <= CHUNKS_MAX, "{chunks} chunks do not fit a ticket");
        if self.workers.is_empty() || chunks <= 1 {
            return (0..chunks).for_each(f);
        }
        let guard = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let job = self.state.publish(&f, chunks);
        self.state.take_chunks(0, job);
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

    /// Copies bytes, with all threads.
    ///
    /// # Panics
    /// If they are not as many.
    pub fn copy(&self, from: &[u8], to: &mut [u8]) {
        assert_eq!(from.len(), to.len(), "bytes that are copied");
        self.chunks_mut(to, COPY_BYTES, |i, to| {
            to.copy_from_slice(&from[i * COPY_BYTES..][..to.len()]);
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

/// A thread's share of chunks: its first, and the one after its last.
fn share(thread: usize, chunks: usize, threads: usize) -> (usize, usize) {
    let first = |thread: usize| (thread * chunks).div_ceil(threads);
    (first(thread), first(thread + 1))
}

/// Calls the erased function. `data` must point to an `F` that lives until the call returns.
unsafe fn call<F: Fn(usize) + Sync>(data: *const (), chunk: usize) {
    // SAFETY: the caller's promise.
    let f = unsafe { &*data.cast::<F>() };
    f(chunk);
}

type Call = unsafe fn(*const (), usize);

impl State {
    fn publish<F: Fn(usize) + Sync>(&self, f: &F, chunks: usize) -> Ticket {
        // All chunks of the job before are done, so nobody reads these until the ticket is seen.
        let function = &self.function.0;
        function
            .call
            .store(call::<F> as Call as usize, Ordering::Relaxed);
        function
            .data
            .store(std::ptr::from_ref(f) as usize, Ordering::Relaxed);
        self.done.0.store(0, Ordering::Relaxed);
        let job = Ticket::new(self.present().job() + 1, chunks);
        self.job.0.store(job.0, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake_workers();
        }
        job
    }

    fn present(&self) -> Ticket {
        Ticket(self.job.0.load(Ordering::SeqCst))
    }

    fn wake_workers(&self) {
        let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.work.notify_all();
    }

    /// Claims and runs chunks of a job, those of `thread` first, until none is left.
    fn take_chunks(&self, thread: usize, job: Ticket) {
        let threads = self.claimed.len();
        for owner in (thread..threads).chain(0..thread) {
            let mut done = 0;
            while let Some(chunk) = self.claim(owner, job) {
                self.run_chunk(chunk);
                done += 1;
            }
            if done > 0 {
                self.count(done, job);
            }
        }
    }

    /// Claims one of the chunks that are `owner`'s share of the job.
    fn claim(&self, owner: usize, job: Ticket) -> Option<usize> {
        let (first, end) = share(owner, job.chunk(), self.claimed.len());
        let word = &self.claimed[owner].0;
        let mut seen = Ticket(word.load(Ordering::Relaxed));
        loop {
            // Numbers only grow: of a job that is over, all have been claimed, or the share was claimed from by a later one.
            let next = match seen.job().cmp(&job.job()) {
                std::cmp::Ordering::Less => 0,
                std::cmp::Ordering::Equal => seen.chunk(),
                std::cmp::Ordering::Greater => return None,
            };
            if first + next >= end {
                return None;
            }
            let claim = Ticket::new(job.job(), next + 1);
            match word.compare_exchange_weak(seen.0, claim.0, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Some(first + next),
                Err(now) => seen = Ticket(now),
            }
        }
    }

    /// Runs a chunk that this thread has claimed.
    fn run_chunk(&self, chunk: usize) {
        let call = self.function.0.call.load(Ordering::Relaxed);
        let data = self.function.0.data.load(Ordering::Relaxed);
        // SAFETY: the chunk was claimed and is not counted as done, so its job is open: `call` is a `Call` for the `F` at `data`,
        // which lives until the join.
        let outcome = catch_unwind(AssertUnwindSafe(|| unsafe {
            let call = std::mem::transmute::<usize, Call>(call);
            call(data as *const (), chunk);
        }));
        if let Err(panic) = outcome {
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
    }

    /// Counts chunks as done.
    fn count(&self, done: usize, job: Ticket) {
        if self.done.0.fetch_add(done, Ordering::SeqCst) + done == job.chunk()
            && self.caller_sleeps.load(Ordering::SeqCst)
        {
            let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.finished.notify_all();
        }
    }

    fn join(&self, chunks: usize) {
        let is_done = || self.done.0.load(Ordering::Acquire) == chunks;
        if spin(self.spin, is_done) {
            return;
        }
        self.caller_sleeps.store(true, Ordering::SeqCst);
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while self.done.0.load(Ordering::SeqCst) != chunks {
            guard = self
                .finished
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        }
        drop(guard);
        self.caller_sleeps.store(false, Ordering::SeqCst);
    }

    fn work_until_quit(&self, thread: usize) {
        let mut seen = Ticket::new(0, 0);
        let quits = || self.quit.load(Ordering::SeqCst);
        while !quits() {
            if spin(self.spin, || self.present() != seen || quits()) {
                seen = self.present();
                self.take_chunks(thread, seen);
                continue;
            }
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            let guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            if self.present() == seen && !quits() {
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
    fn a_thread_takes_one_chunk_of_its_share_after_the_other() {
        let pool = Pool::new(3, Pinning::Free).unwrap();
        // Shares of 8 chunks: 0, 1, 2; 3, 4, 5; 6, 7.
        let after: Vec<_> = (0..8).map(|chunk| pool.after(chunk, 8)).collect();
        let some = |chunk| (chunk < 8 && chunk != 3 && chunk != 6).then_some(chunk);
        assert_eq!(after, (1..9).map(some).collect::<Vec<_>>());
        assert_eq!(
            [pool.after(0, 1), pool.after(1, 2), pool.after(0, 0)],
            [None; 3]
        );
    }

    #[test]
    fn bytes_are_copied_whole() {
        let pool = Pool::new(3, Pinning::Free).unwrap();
        for n in [0, 1, COPY_BYTES - 1, COPY_BYTES, 3 * COPY_BYTES + 7] {
            let from: Vec<u8> = (0..n).map(|i| (i * 7 + i / 251) as u8).collect();
            let mut to = vec![0xee; n];
            pool.copy(&from, &mut to);
            assert!(from == to, "{n} bytes");
        }
    }

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
