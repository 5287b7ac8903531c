//! How fast a device is: what plans are made with.
//!
//! Each measurement returns one reading of about the time that it is given; who asks repeats it. Kernels are timed by the device's own
//! clock, in recorded graphs, as sessions give them.
//!
//! | module | what it measures |
//! |---|---|
//! | this one | reads of the device's memory, small operations, a token's way to the device and back |
//! | [`link`] | copies between host and device, alone and while the host works |
//! | [`products`] | weights that one token passes, multiply-adds of many tokens |
//! | [`cells`] | attention of one token in one layer |
//! | [`hand_over`] | a layer's way to the CPU and back |

pub mod cells;
pub mod hand_over;
pub mod link;
pub mod products;

pub use cells::Cells;
pub use hand_over::HandOver;
pub use link::{Link, Memory, Rows, Way};
pub use products::{Fork, Products};

use std::time::{Duration, Instant};

use quant::act::{BLOCK256, Passes};

use crate::acts::{Acts, Shape};
use crate::device::Device;
use crate::error::Error;
use crate::graph::Graph;
use crate::kernel::{Arg, Launch, Module, Start};
use crate::memory::{Buffer, Mailbox};
use crate::ops::{Delta, Gate, Normed, Ops};
use crate::product::Target;
use crate::stream::{Event, Stream, Timing};

/// When the operations of a generated token start, as a session gives them: while the ones ahead of them still run.
const START: Start = Start::Overlapped;

/// Replays of a graph between two marks at most.
const REPLAYS_MAX: usize = 4096;

/// Small operations of a graph.
const LAUNCHES: usize = 256;

/// Bytes after which patterns repeat: an odd number of cache lines.
const PATTERN_BYTES: usize = (1 << 20) + 64;

/// Threads of a block that reads memory: which is best depends on the device.
const READ_THREADS: [usize; 3] = [128, 256, 512];

/// A stream and two marks in it.
#[derive(Debug)]
struct Timer {
    stream: Stream,
    start: Event,
    end: Event,
}

impl Timer {
    fn new(device: &Device) -> Result<Self, Error> {
        Ok(Self {
            stream: device.stream()?,
            start: Event::new(device, Timing::On)?,
            end: Event::new(device, Timing::On)?,
        })
    }

    /// Seconds of the work that `give` gives to the stream.
    fn seconds(&self, give: impl FnOnce() -> Result<(), Error>) -> Result<f64, Error> {
        self.stream.record(&self.start)?;
        give()?;
        self.stream.record(&self.end)?;
        self.end.synchronise()?;
        Ok(f64::from(self.end.elapsed_ms(&self.start)?) / 1e3)
    }

    /// Seconds of one replay, of as many as take about `time`.
    fn seconds_a_replay(&self, graph: &mut Graph, time: Duration) -> Result<f64, Error> {
        let wanted = time.as_secs_f64();
        let mut n = 1;
        loop {
            let seconds = self.seconds(|| (0..n).try_for_each(|_| graph.launch(&self.stream)))?;
            if 2.0 * seconds >= wanted || n >= REPLAYS_MAX {
                return Ok(seconds / n as f64);
            }
            let more = (n as f64 * wanted / seconds.max(1e-6)).ceil() as usize;
            n = more.clamp(n + 1, REPLAYS_MAX);
        }
    }
}

/// Bytes that no number format reads as zero, subnormal, infinite or NaN, so that products over them take as long as any.
fn pattern(bytes: usize) -> Vec<u8> {
    let byte = |i: usize| {
        let mixed = (i as u32).wrapping_mul(0x9e37_79b1) >> 24;
        0x20 + ((mixed * 28) >> 8) as u8
    };
    let first: Vec<u8> = (0..bytes.min(PATTERN_BYTES)).map(byte).collect();
    let mut all = Vec::with_capacity(bytes);
    while all.len() < bytes {
        let more = first.len().min(bytes - all.len());
        all.extend_from_slice(&first[..more]);
    }
    all
}

/// Reads of the device's memory.
#[derive(Debug)]
pub struct Reads {
    timer: Timer,
    bytes: usize,
    graphs: Vec<Graph>,
    // What the graphs read and write.
    _buffers: (Buffer<u8>, Buffer<u32>),
}

impl Reads {
    /// Over so many bytes, which should be far more than the device's caches hold.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, Error> {
        let timer = Timer::new(device)?;
        let kernel = Module::load(device, "read")?.kernel("read_only")?;
        let data = Buffer::<u8>::zeroed(&timer.stream, bytes)?;
        let word = Buffer::<u32>::zeroed(&timer.stream, 1)?;
        let pieces = bytes / 16;
        let graph = |threads: usize| {
            let launch = Launch::new(pieces.div_ceil(threads * 8), threads).start(START);
            let args = [Arg::from(&data), (pieces as u64).into(), (&word).into()];
            // SAFETY: the kernel reads whole pieces of the buffer and may write one word.
            timer
                .stream
                .capture(|| unsafe { kernel.launch(&timer.stream, launch, &args) })
        };
        let graphs = READ_THREADS
            .into_iter()
            .map(graph)
            .collect::<Result<_, _>>()?;
        Ok(Self {
            timer,
            bytes: pieces * 16,
            graphs,
            _buffers: (data, word),
        })
    }

    /// GB/s.
    pub fn gb_s(&mut self, time: Duration) -> Result<f64, Error> {
        let each = time / self.graphs.len() as u32;
        let mut best = f64::INFINITY;
        for graph in &mut self.graphs {
            best = best.min(self.timer.seconds_a_replay(graph, each)?);
        }
        Ok(self.bytes as f64 / best / 1e9)
    }
}

/// What the small operations of a token take.
#[derive(Debug)]
pub struct Small {
    timer: Timer,
    many: Graph,
    one: Graph,
    position: (Mailbox<u32>, Buffer<u32>),
    logits: (Buffer<f32>, Mailbox<f32>),
    // What the graphs read and write.
    _operands: (Ops, [Buffer<f32>; 5], [Acts; 2]),
}

impl Small {
    /// For a model of this width, feed-forward width and vocabulary.
    pub fn new(device: &Device, width: usize, ff: usize, vocabulary: usize) -> Result<Self, Error> {
        let timer = Timer::new(device)?;
        let stream = &timer.stream;
        let ops = Ops::new(device, Target::Best)?;
        let [width, ff] = [width, ff].map(|n| n.next_multiple_of(BLOCK256));
        let ones = |n: usize| Buffer::from_slice(stream, &vec![1.0f32; n]);
        let (mut x, delta, norm) = (ones(width)?, ones(width)?, ones(width)?);
        let (mut gate, up) = (ones(ff)?, ones(ff)?);
        let (mut normed, mut gated) = (Acts::new(stream, 1, width)?, Acts::new(stream, 1, ff)?);
        let shape = Shape {
            tokens: 1,
            k: ff,
            block: BLOCK256,
            passes: Passes::One,
        };
        let many = stream.capture(|| {
            (0..LAUNCHES / 2).try_for_each(|_| {
                let added = Delta {
                    first: &delta,
                    second: None,
                    bias: None,
                    norm: None,
                };
                let to = Normed {
                    blocks256: Some((&mut normed, Passes::One)),
                    ..Normed::default()
                };
                ops.residual_norm_to(
                    stream,
                    START,
                    1,
                    width,
                    1e-5,
                    &mut x,
                    Some(added),
                    Some(&norm),
                    to,
                )?;
                let (gate, acts) = (&mut gate, &mut gated);
                ops.gated_to(stream, START, Gate::Silu, gate, &up, false, shape, acts)
            })
        })?;
        let position = Buffer::<u32>::zeroed(stream, 1)?;
        let kernel = Module::load(device, "read")?.kernel("read_only")?;
        // No pieces: the kernel reads nothing.
        let args = [Arg::from(&position), 0u64.into(), (&position).into()];
        let launch = Launch::new(1, 128);
        // SAFETY: the kernel reads nothing, and writes nothing, as the sum of nothing is 0.
        let one = stream.capture(|| unsafe { kernel.launch(stream, launch, &args) })?;
        Ok(Self {
            many,
            one,
            logits: (
                Buffer::zeroed(stream, vocabulary)?,
                Mailbox::new(device, vocabulary)?,
            ),
            position: (Mailbox::new(device, 1)?, position),
            _operands: (ops, [x, delta, norm, gate, up], [normed, gated]),
            timer,
        })
    }

    /// Microseconds of an operation, norms and gates in turns, each of which waits for the one before.
    pub fn launch_us(&mut self, time: Duration) -> Result<f64, Error> {
        let seconds = self.timer.seconds_a_replay(&mut self.many, time)?;
        Ok(1e6 * seconds / LAUNCHES as f64)
    }

    /// Microseconds of a token without operations, by the host's clock: its position to the device, a graph, its logits back.
    pub fn token_us(&mut self, time: Duration) -> Result<f64, Error> {
        let stream = &self.timer.stream;
        let (begun, mut tokens) = (Instant::now(), 0_u32);
        loop {
            self.position.0.send(stream, 0..1, &mut self.position.1)?;
            self.one.launch(stream)?;
            let n = self.logits.0.len();
            self.logits.1.receive(stream, &self.logits.0, n)?;
            stream.synchronise()?;
            tokens += 1;
            let spent = begun.elapsed();
            if spent >= time {
                return Ok(1e6 * spent.as_secs_f64() / f64::from(tokens));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_ordinary_numbers_in_every_format() {
        let bytes = pattern(4096);
        assert!(bytes.iter().all(|b| (0x20..0x3c).contains(b)));
        for pair in bytes.chunks_exact(2) {
            let half = half::f16::from_le_bytes([pair[0], pair[1]]);
            assert!(half.is_normal(), "{half}");
        }
        for four in bytes.chunks_exact(4) {
            let float = f32::from_le_bytes(four.try_into().unwrap());
            assert!(float.is_normal(), "{float}");
        }
    }
}
