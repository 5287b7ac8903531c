//! What decode attention costs: nanoseconds a cell and layer, and the rate at which cells are read in % of a plain read of the same
//! memory in the same run. Rounds of all cases in turns, medians.
//!
//!     cargo run --release -p cpu --example decode_attention -- [THREADS] [DEPTH ...]

use cpu::attention::{CELLS, KvShape, KvType, Params, Partials, Span, Step, attend, tame};
use cpu::mem::Buffer;
use cpu::{Isa, Pool};
use std::time::Instant;

/// Bytes of cells that a case goes round: beyond the second-level cache, and what a guest gets of the third.
const BYTES: usize = 512 << 20;
const ROUNDS: usize = 7;
/// Query heads, KV heads, head size.
const HEADS: [(usize, usize, usize); 4] = [(9, 3, 64), (14, 2, 64), (12, 2, 128), (4, 1, 256)];

struct Case {
    heads: usize,
    shape: KvShape,
    depth: usize,
    layers: usize,
    near: bool,
}

impl Case {
    /// Seconds a layer.
    fn time(&self, pool: &Pool, isa: Isa, memory: &[u8]) -> f64 {
        let (block, blocks) = (self.shape.block_bytes(), self.depth / CELLS);
        let params = Params {
            heads: self.heads,
            scale: 0.125,
            soft_cap: None,
            window: None,
            sinks: None,
        };
        let q: Vec<f32> = (0..self.heads * self.shape.c_k)
            .map(|i| ((i * 7919 % 2001) as f32 - 1000.0) / 1000.0)
            .collect();
        let mut out = vec![0.0; self.heads * self.shape.c_v];
        let mut partials =
            Partials::new(&self.shape, self.heads, self.depth, 1).expect("memory for partials");
        let mut seconds = 0.0;
        for layer in 0..=self.layers {
            let first = layer % self.layers * blocks;
            let spans: Vec<_> = (0..blocks)
                .map(|i| {
                    let at = if self.near { 0 } else { first + i };
                    Span::whole(i, &memory[at * block..][..block])
                })
                .collect();
            let start = Instant::now();
            attend(
                pool,
                isa,
                &self.shape,
                &params,
                self.depth - 1,
                &q,
                &spans,
                Step::ONLY,
                &mut partials,
                &mut out,
            );
            if layer > 0 {
                seconds += start.elapsed().as_secs_f64();
            }
        }
        seconds / self.layers as f64
    }
}

/// GB/s of a plain read of `memory` by all threads.
fn plain(pool: &Pool, memory: &[u8]) -> f64 {
    let part = memory.len() / (8 * pool.threads());
    let start = Instant::now();
    let sums: Vec<_> = (0..8 * pool.threads())
        .map(|_| std::sync::atomic::AtomicU64::new(0))
        .collect();
    pool.run(8 * pool.threads(), |i| {
        let mut lanes = [0u64; 8];
        for chunk in memory[i * part..][..part].as_chunks::<64>().0 {
            for (lane, bytes) in lanes.iter_mut().zip(chunk.as_chunks::<8>().0) {
                *lane = lane.wrapping_add(u64::from_le_bytes(*bytes));
            }
        }
        let sum = lanes.iter().fold(0u64, |a, b| a.wrapping_add(*b));
        sums[i].store(sum, std::sync::atomic::Ordering::Relaxed);
    });
    let seconds = start.elapsed().as_secs_f64();
    std::hint::black_box(&sums);
    memory.len() as f64 / seconds / 1e9
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

fn main() {
    let mut args = std::env::args()
        .skip(1)
        .map(|a| a.parse().expect("a number"));
    let threads = args.next().unwrap_or(2);
    let mut depths: Vec<usize> = args.collect();
    if depths.is_empty() {
        depths = vec![8192, 32768];
    }
    let isa = Isa::best();
    let pool = Pool::new(threads, cpu::pool::Pinning::Free).expect("threads");
    let mut memory = Buffer::<u8>::new(BYTES).expect("memory for cells");
    for (heads, kv, c) in HEADS {
        for depth in &depths {
            let mut rows = Vec::new();
            for ty in [KvType::F16, KvType::Q8_0, KvType::Q4_0] {
                let shape = KvShape::new(kv, c, c, ty, ty).expect("a shape");
                let block = shape.block_bytes();
                let mut x = 1u64;
                for word in memory[..block].as_chunks_mut::<8>().0 {
                    x = x
                        .wrapping_mul(6364136223846793005)
                        .wrapping_add(1442695040888963407);
                    *word = (x ^ x >> 29).to_le_bytes();
                }
                tame(&shape, &mut memory[..block]);
                let (first, rest) = memory.split_at_mut(block);
                for to in rest.chunks_exact_mut(block) {
                    to.copy_from_slice(first);
                }
                let layers = (BYTES / (block * (depth / CELLS))).clamp(1, 24);
                let mut far = Vec::new();
                let mut near = Vec::new();
                let mut reads = Vec::new();
                for _ in 0..ROUNDS {
                    let mut case = Case {
                        heads,
                        shape,
                        depth: *depth,
                        layers,
                        near: false,
                    };
                    far.push(case.time(&pool, isa, &memory));
                    case.near = true;
                    near.push(case.time(&pool, isa, &memory));
                    reads.push(plain(&pool, &memory));
                }
                let bytes = (block / CELLS) as f64;
                let (far, near, read) = (median(far), median(near), median(reads));
                let ns = far / *depth as f64 * 1e9;
                rows.push(format!(
                    "{ty} {ns:6.1} ns ({:5.1} from cache) {:3.0} % of {read:.1} GB/s",
                    near / *depth as f64 * 1e9,
                    100.0 * bytes / ns / read
                ));
            }
            println!("{heads}/{kv} x {c} @ {depth}: {}", rows.join("; "));
        }
    }
}
