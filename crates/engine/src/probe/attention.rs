//! Attention of one token in one layer, at two depths: what one more cell costs, and what is left at none.
//!
//! Each call attends over another layer's cells, so that they come from where a session's would: not from the first
//! caches.

use super::Error;
use super::sample::{Clock, Which, seconds_a_call};
use super::subject::Heads;
use cpu::attention::{CELLS, KvShape, Params, Partials, Span, Step, attend, write_cell};
use cpu::mem::Buffer;
use cpu::{Isa, Pool};
use place::profile::{AttentionRate, Figure};

/// The large depth.
const CELLS_LARGE: usize = 8192;

/// The small one.
const CELLS_SMALL: usize = 256;

/// Slots of the staging ring, as many as sessions have.
pub(super) const SLOTS: usize = 8;

/// Bytes of cells, at most: beyond the caches of large servers (some have more than 300 MiB, and what fits there is attended half as fast
/// again), and filled in a moment.
const BYTES_MAX: usize = 768 << 20;

/// Cells of some layers, and a query.
pub(super) struct Bench {
    isa: Isa,
    shape: KvShape,
    heads: usize,
    layers: usize,
    /// Slab `i` holds cells `256 i ..` of all layers.
    slabs: Vec<Buffer<u8>>,
    /// The staging ring, a block of one layer each.
    slots: Vec<Buffer<u8>>,
    q: Buffer<f32>,
    out: Buffer<f32>,
    partials: Partials,
    /// Next layer, and next slab of the small depth.
    next: usize,
}

impl Bench {
    pub(super) fn new(
        heads: Heads,
        shape: KvShape,
        layers: usize,
        isa: Isa,
    ) -> Result<Self, Error> {
        let n_slabs = CELLS_LARGE / CELLS;
        let block = shape.block_bytes();
        let layers = layers.min(BYTES_MAX / (n_slabs * block)).max(1);
        let value = |i: usize| ((i * 7919 % 2001) as f32 - 1000.0) / 1000.0;
        let room = || {
            let mut first = Buffer::<u8>::new(block)?;
            let (mut k, mut v) = (
                vec![0.0; shape.heads * shape.c_k],
                vec![0.0; shape.heads * shape.c_v],
            );
            for cell in 0..CELLS {
                for (i, x) in k.iter_mut().chain(&mut v).enumerate() {
                    *x = value(i * 31 + cell * 17);
                }
                write_cell(&shape, &mut first, cell, &k, &v);
            }
            let mut slabs = Vec::with_capacity(n_slabs);
            for _ in 0..n_slabs {
                let mut slab = Buffer::<u8>::new(layers * block)?;
                for of_layer in slab.chunks_exact_mut(block) {
                    of_layer.copy_from_slice(&first);
                }
                slabs.push(slab);
            }
            let mut q = Buffer::new(heads.heads * heads.head_k)?;
            for (i, x) in q.iter_mut().enumerate() {
                *x = value(i);
            }
            let slots: Result<Vec<_>, _> = (0..SLOTS).map(|_| Buffer::new(block)).collect();
            Ok((
                slabs,
                slots?,
                q,
                Buffer::new(heads.heads * heads.head_v)?,
                Partials::new(&shape, heads.heads, CELLS_LARGE, 1)?,
            ))
        };
        let (slabs, slots, q, out, partials) =
            room().map_err(Error::memory("cells to attend over"))?;
        Ok(Self {
            isa,
            shape,
            heads: heads.heads,
            layers,
            slabs,
            slots,
            q,
            out,
            partials,
            next: 0,
        })
    }

    /// Nanoseconds a cell, and microseconds at none; those of `guess` if there is no time. `name` is what paths call it.
    pub(super) fn slope_and_engage(
        &mut self,
        pool: &Pool,
        clock: &mut Clock<'_>,
        name: &str,
        guess: &AttentionRate,
    ) -> Result<(Figure, Figure), Error> {
        let mut at = |cells| {
            let (path, what) = (
                format!(
                    "host.attention[{name}].{}",
                    if cells == CELLS_LARGE {
                        "ns_cell"
                    } else {
                        "engage_us"
                    }
                ),
                format!("attention over {name}, {cells} cells"),
            );
            let us = guess.engage_us.value + guess.ns_cell.value * cells as f64 / 1e3;
            let which = Which {
                path: &path,
                what: &what,
                guess: Figure::exact(us),
            };
            clock.sample(which, |time| {
                Ok(1e6 * seconds_a_call(time, || self.attend(pool, cells)))
            })
        };
        let large = at(CELLS_LARGE)?;
        let small = at(CELLS_SMALL)?;
        Ok(slope_and_engage(small, large))
    }

    /// Attends one token over the large depth until `is_done`; says how often.
    pub(super) fn attend_until(&mut self, pool: &Pool, is_done: &mut dyn FnMut() -> bool) -> usize {
        let mut calls = 0;
        while !is_done() {
            self.attend(pool, CELLS_LARGE);
            calls += 1;
        }
        calls
    }

    /// Copies of cells into the staging ring: what attention over the large depth takes more where all cells come through it. Both ways in
    /// turns, as a machine's memory is not the same all the time. `None` if noise hides it, or there is no time.
    pub(super) fn stage(
        &mut self,
        pool: &Pool,
        clock: &mut Clock<'_>,
        fork_us: f64,
    ) -> Result<Option<Figure>, Error> {
        let which = Which {
            path: "host.stage_gb_s",
            what: "staging of cells",
            guess: Figure::default(),
        };
        let more = clock.sample(which, |time| {
            let there = seconds_a_call(time / 2, || self.attend(pool, CELLS_LARGE));
            let staged = seconds_a_call(time / 2, || self.attend_staged(pool));
            Ok(1e6 * (staged - there))
        })?;
        // Then it is taken as other copies are.
        let guessed = clock.guessed.len();
        clock.guessed.retain(|path| path != which.path);
        if clock.guessed.len() < guessed {
            return Ok(None);
        }
        let blocks = CELLS_LARGE / CELLS;
        let bytes = blocks * self.shape.block_bytes();
        Ok(stage_gb_s(more, bytes, blocks, fork_us))
    }

    /// One token over the large depth of some layer, block by block through the ring, as a session does.
    fn attend_staged(&mut self, pool: &Pool) {
        let block = self.shape.block_bytes();
        let blocks = CELLS_LARGE / CELLS;
        let (layer, _) = self.turn(blocks);
        let params = self.params();
        for first in (0..blocks).step_by(SLOTS) {
            let slabs = &self.slabs[first..blocks.min(first + SLOTS)];
            for (slab, slot) in slabs.iter().zip(&mut self.slots) {
                pool.copy(&slab[layer * block..][..block], slot);
            }
            let slots = self.slots.iter().take(slabs.len()).enumerate();
            let spans: Vec<_> = slots
                .map(|(i, slot)| Span::whole(first + i, slot))
                .collect();
            let step = Step {
                first: first == 0,
                last: first + SLOTS >= blocks,
            };
            attend(
                pool,
                self.isa,
                &self.shape,
                &params,
                CELLS_LARGE - 1,
                &self.q,
                &spans,
                step,
                &mut self.partials,
                &mut self.out,
            );
        }
    }

    /// The next layer, and the first slab of `n`.
    fn turn(&mut self, n: usize) -> (usize, usize) {
        let next = self.next;
        self.next += 1;
        (
            next % self.layers,
            next / self.layers * n % self.slabs.len(),
        )
    }

    fn params(&self) -> Params<'static> {
        Params {
            heads: self.heads,
            scale: 1.0 / (self.shape.c_k as f32).sqrt(),
            soft_cap: None,
            window: None,
            sinks: None,
        }
    }

    /// One token over the first `cells` cells of some layer.
    fn attend(&mut self, pool: &Pool, cells: usize) {
        let n = cells / CELLS;
        let block = self.shape.block_bytes();
        let (layer, first) = self.turn(n);
        let params = self.params();
        let slabs = self.slabs[first..first + n].iter().enumerate();
        let spans: Vec<_> = slabs
            .map(|(i, slab)| Span::whole(i, &slab[layer * block..][..block]))
            .collect();
        attend(
            pool,
            self.isa,
            &self.shape,
            &params,
            cells - 1,
            &self.q,
            &spans,
            Step::ONLY,
            &mut self.partials,
            &mut self.out,
        );
    }
}

/// The large depth was attended again, some time later: the line goes through the mean of both, as a machine's memory is not the same all the time.
pub(super) fn again(rate: &mut AttentionRate, large: Figure) {
    let thousands = CELLS_LARGE as f64 / 1e3;
    let before = rate.engage_us.value + rate.ns_cell.value * thousands;
    let more = (large.value - before) / 2.0 / thousands;
    let least = place::profile::Unit::NsCell.range().0;
    rate.ns_cell = Figure {
        value: (rate.ns_cell.value + more).max(least),
        spread: rate.ns_cell.spread.max(more.abs()),
    };
}

/// The rate of copies, from what `bytes` of them take more, and how long the `forks` that they are take. `None` if noise hides it.
fn stage_gb_s(more_us: Figure, bytes: usize, forks: usize, fork_us: f64) -> Option<Figure> {
    let copies_us = more_us.value - forks as f64 * fork_us;
    let value = bytes as f64 / 1e3 / copies_us;
    let (low, high) = place::profile::Unit::GbS.range();
    (low..=high).contains(&value).then_some(Figure {
        value,
        spread: value * more_us.spread / copies_us,
    })
}

/// The line through two depths; what noise makes negative is next to nothing.
fn slope_and_engage(small: Figure, large: Figure) -> (Figure, Figure) {
    let cells = (CELLS_LARGE - CELLS_SMALL) as f64;
    let least = place::profile::Unit::NsCell.range().0;
    let slope = Figure {
        value: (1e3 * (large.value - small.value) / cells).max(least),
        spread: 1e3 * (large.spread + small.spread) / cells,
    };
    let us_small = CELLS_SMALL as f64 / 1e3;
    let engage = Figure {
        value: (small.value - slope.value * us_small).max(0.0),
        spread: small.spread + slope.spread * us_small,
    };
    (slope, engage)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cpu::attention::KvType;
    use cpu::pool::Pinning;

    #[test]
    fn the_line_goes_through_both_depths() {
        let us = |value, spread| Figure { value, spread };
        let (slope, engage) = slope_and_engage(us(5.0, 0.1), us(84.36, 0.9));
        assert!((slope.value - 10.0).abs() < 1e-9 && (engage.value - 2.44).abs() < 1e-9);
        assert!(slope.spread > 0.0 && engage.spread >= 0.1);
        let (slope, engage) = slope_and_engage(us(5.0, 0.0), us(4.0, 0.0));
        assert!(slope.value > 0.0 && slope.value < 1e-3 && engage.value <= 5.0);
    }

    #[test]
    fn a_second_reading_counts_as_much_as_the_first() {
        let mut rate = place::profile::example("h200-pcie5")
            .unwrap()
            .host
            .attention[0]
            .clone();
        let us = |value| Figure { value, spread: 0.1 };
        (rate.engage_us, rate.ns_cell) = (us(10.0), us(50.0));
        // It took 10 + 8.192 * 50 us, and now as if a cell took 60 ns.
        again(&mut rate, us(10.0 + 8.192 * 60.0));
        assert!(
            (rate.ns_cell.value - 55.0).abs() < 1e-9 && (rate.ns_cell.spread - 5.0).abs() < 1e-9
        );
        assert_eq!(rate.engage_us, us(10.0));
        again(&mut rate, us(0.0));
        assert!(rate.ns_cell.value > 0.0);
    }

    #[test]
    fn what_copies_take_is_a_rate_unless_noise_hides_it() {
        let us = |value, spread| Figure { value, spread };
        let rate = stage_gb_s(us(1100.0, 100.0), 10_000_000, 50, 2.0).unwrap();
        assert!((rate.value - 10.0).abs() < 1e-9 && (rate.spread - 1.0).abs() < 1e-9);
        for hidden in [100.0, 0.0, -5.0] {
            assert_eq!(stage_gb_s(us(hidden, 1.0), 10_000_000, 50, 2.0), None);
        }
    }

    #[test]
    fn every_slab_is_attended_over_and_results_are_numbers() {
        let heads = Heads {
            heads: 4,
            heads_kv: 2,
            head_k: 32,
            head_v: 32,
        };
        let pool = Pool::new(2, Pinning::Free).unwrap();
        for ty in [KvType::F16, KvType::Q8_0, KvType::Q4_0] {
            let shape = KvShape::new(2, 32, 32, ty, ty).unwrap();
            let mut bench = Bench::new(heads, shape, 3, Isa::best()).unwrap();
            assert_eq!((bench.layers, bench.slabs.len()), (3, 32));
            // All blocks hold the same cells, so each is worth the same, wherever it lies.
            bench.attend(&pool, CELLS_SMALL);
            let first = bench.out.to_vec();
            assert!(first.iter().all(|x| x.is_finite()) && first.iter().any(|x| *x != 0.0));
            for _ in 0..3 * 32 {
                bench.out.fill(0.0);
                bench.attend(&pool, CELLS_SMALL);
                assert_eq!(bench.out[..], first[..]);
            }
            bench.attend(&pool, CELLS_LARGE);
            let there = bench.out.to_vec();
            bench.out.fill(0.0);
            bench.attend_staged(&pool);
            assert_eq!(bench.out[..], there[..], "the same bits through the ring");
            let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-3;
            assert!(bench.out.iter().zip(&first).all(close), "{ty}");
        }
    }
}
