//! What a GPU can do, and its link, alone and while the CPU works.

use super::host::{self, guessed_attention, head_shape};
use super::sample::{Clock, Which, figure};
use super::subject::{Fork, Heads};
use super::{Error, Subject, TIERS, attention};
use crate::gpu::Gpu;
use crate::kv::pieces_a_run;
use crate::plan::machine::{default_device, set_memory};
use cuda::Product;
use cuda::attention::{Attention, KvShape, KvType as DeviceType};
use cuda::measure::{self, Cells, HandOver, Link, Memory, Products, Reads, Rows, Small, Way};
use cuda::product::Target;
use gguf::TensorType;
use place::bytes::KvType;
use place::cost::{PIECE_BYTES, Processor};
use place::profile::{Device, DeviceProduct, Figure, Transfer, Unit};
use std::time::{Duration, Instant};

/// Bytes that reads of the device's memory pass: no cache holds them.
const READ_BYTES: usize = 1 << 30;

/// The largest matrix measured whole, and bytes of one format's, about. Large ones are what the device is best at.
const MATRIX_BYTES_MAX: usize = 256 << 20;
const FORMAT_BYTES: usize = 512 << 20;

/// Weights that pass between two visits of the same ones, at least: as many as no device's cache holds.
const PASSING_BYTES: u64 = 256 << 20;

/// Cells of all layers together that attention is measured over.
const CELL_BYTES: usize = 512 << 20;

/// The depths of attention: one at which a multiprocessor has not even a block, and two that a line goes through. From the first of these on all
/// multiprocessors have work, and what they read is more than a cache holds.
const SMALL_DEPTH: usize = 2048;
const DEPTHS: [usize; 2] = [16_384, 65_536];

/// Part of the free memory that a measurement may take: there are up to three buffers.
const MEMORY_PART: u64 = 8;

/// Bytes of the link's buffers on both sides: more than the host's caches hold.
const LINK_BYTES: usize = 256 << 20;

/// Sizes of the copies from pinned memory to the device.
const UP_BYTES: [usize; 5] = [
    64 << 10,
    512 << 10,
    PIECE_BYTES as usize,
    16 << 20,
    64 << 20,
];

/// Sizes of all others.
const OTHER_BYTES: [usize; 2] = [PIECE_BYTES as usize, 64 << 20];

/// What link and CPU do beside each other.
struct Keeps {
    /// Copies alone, GB/s.
    link_gb_s: Option<Figure>,
    /// The part of its rate that the link keeps.
    link: Figure,
    /// And the CPU.
    cpu: Figure,
    /// Microseconds of a call of the CPU's work alone; `None` if there was no time.
    call_us: Option<Figure>,
}

/// A device that is being measured.
pub(super) struct Probe {
    gpu: Gpu,
    forks: Vec<(TensorType, Vec<measure::Fork>)>,
    heads: Option<Heads>,
    /// Of the model and its feed-forward.
    widths: [usize; 2],
    vocabulary: usize,
    passing_bytes: u64,
    ubatch: usize,
    /// Bytes that a measurement may take.
    room: usize,
    link: Option<Link>,
    device: Device,
}

/// How many figures that is.
pub(super) fn steps(subject: &Subject, formats: usize) -> usize {
    let tiers = subject.heads.map_or(0, |heads| tiers(heads).count());
    // The device's, and beside products and each tier's attention.
    let kept = 2 + tiers;
    let hand_over = usize::from(subject.heads.is_some());
    3 + 2 * formats + 3 * tiers + hand_over + UP_BYTES.len() + 3 * OTHER_BYTES.len() + kept
}

/// Makes the driver compile what is measured below, which it remembers: that is no part of any figure's time.
pub(super) fn compile(gpu: &Gpu, subject: &Subject, formats: &[TensorType]) -> Result<(), Error> {
    for &ty in formats {
        known(Product::new(gpu.device(), ty, Target::Best))?;
    }
    let Some(heads) = subject.heads else {
        return Ok(());
    };
    for (_, _, shape) in tiers(heads).take(1) {
        known(Attention::new(
            gpu.device(),
            Target::Best,
            shape,
            heads.heads,
        ))?;
    }
    Ok(())
}

/// What kernels do not compute is no fault of the device: it is left out.
fn known<T>(made: Result<T, cuda::Error>) -> Result<Option<T>, Error> {
    match made {
        Ok(made) => Ok(Some(made)),
        Err(
            cuda::Error::Format { .. } | cuda::Error::Head { .. } | cuda::Error::NoModule { .. },
        ) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The tiers that the heads can be stored in, as the device's kernels know them.
fn tiers(heads: Heads) -> impl Iterator<Item = (KvType, KvType, KvShape)> {
    TIERS.into_iter().filter_map(move |(k, v)| {
        let shape = heads.shape_of(k, v)?;
        let ty = |ty: KvType| {
            let name = ty.to_string();
            DeviceType::ALL.into_iter().find(|t| t.name() == name)
        };
        let shape = KvShape {
            heads: shape.heads,
            c_k: shape.c_k,
            c_v: shape.c_v,
            type_k: ty(k)?,
            type_v: ty(v)?,
        };
        Some((k, v, shape))
    })
}

impl Probe {
    /// Measures nothing yet.
    pub(super) fn new(
        gpu: &Gpu,
        subject: &Subject,
        formats: &[TensorType],
        ubatch: usize,
    ) -> Result<Self, Error> {
        let memory = gpu.memory()?;
        let room = usize::try_from(memory.free_bytes / MEMORY_PART).unwrap_or(usize::MAX);
        let mut device = default_device();
        set_memory(&mut device, memory, gpu.context_bytes());
        let of_format = |&ty: &TensorType| {
            let forks =
                subject.forks_within(ty, MATRIX_BYTES_MAX.min(room), FORMAT_BYTES.min(room));
            let fork = |f: Fork| measure::Fork {
                k: f.k,
                rows: f.rows,
                passes: f.passes,
            };
            (ty, forks.into_iter().map(fork).collect())
        };
        Ok(Self {
            gpu: gpu.clone(),
            forks: formats.iter().map(of_format).collect(),
            heads: subject.heads,
            widths: subject.widths(),
            vocabulary: subject.vocabulary,
            passing_bytes: subject.passing_bytes(),
            ubatch,
            room,
            link: None,
            device,
        })
    }

    /// What every plan needs: reads, starting operations, products of one token, attention, the link.
    pub(super) fn first(mut self, clock: &mut Clock<'_>) -> Result<Self, Error> {
        let guess = self.device.clone();
        let device = self.gpu.device();
        let mut reads = Reads::new(device, READ_BYTES.min(self.room))?;
        let which = Which {
            path: "device.read_gb_s",
            what: "reading the GPU's memory",
            guess: guess.read_gb_s,
        };
        self.device.read_gb_s = clock.sample(which, |time| Ok(reads.gb_s(time)?))?;
        drop(reads);
        let [width, ff] = self.widths;
        let mut small = Small::new(device, width, ff, self.vocabulary)?;
        let which = Which {
            path: "device.launch_us",
            what: "a small operation on the GPU",
            guess: guess.launch_us,
        };
        self.device.launch_us = clock.sample(which, |time| Ok(small.launch_us(time)?))?;
        let which = Which {
            path: "device.token_us",
            what: "a token's way to the GPU and back",
            guess: guess.token_us,
        };
        self.device.token_us = clock.sample(which, |time| Ok(small.token_us(time)?))?;
        drop(small);
        self.device.products.clear();
        let processor = Processor::device(&guess);
        for i in 0..self.forks.len() {
            let ty = self.forks[i].0;
            let mut rate = guessed_product(&guess, ty);
            if let Some(mut products) = self.products(i, clock)? {
                let which = Which {
                    path: &format!("device.products[{ty}].decode_gb_s"),
                    what: &format!("products on the GPU, {ty}, one token"),
                    guess: Figure::exact(processor.decode_gb_s(ty.name())),
                };
                rate.decode_gb_s = clock.sample(which, |time| Ok(products.decode_gb_s(time)?))?;
                // The same weights serve both; what they take is given back before the next format's.
                let which = Which {
                    path: &format!("device.products[{ty}].prefill_gmac_s"),
                    what: &format!("products on the GPU, {ty}, many tokens"),
                    guess: rate.prefill_gmac_s,
                };
                rate.prefill_gmac_s =
                    clock.sample(which, |time| Ok(products.prefill_gmac_s(time)?))?;
                self.device.products.push(rate);
            }
        }
        self.device.attention.clear();
        if let Some(heads) = self.heads {
            for (type_k, type_v, shape) in tiers(heads) {
                self.attention(heads, type_k, type_v, shape, &processor, clock)?;
            }
        }
        if let Some(heads) = self.heads {
            let values = heads.heads * heads.head_k;
            let mut hand_over = HandOver::new(self.gpu.device(), values)?;
            let which = Which {
                path: "device.t_sync_us",
                what: "a layer's way to the CPU and back",
                guess: guess.t_sync_us,
            };
            self.device.t_sync_us = clock.sample(which, |time| Ok(hand_over.us(time)?))?;
        }
        let bytes = LINK_BYTES.min(self.room);
        self.link = Some(Link::new(self.gpu.device(), bytes)?);
        self.device.link.to_device_pinned = self.transfers(
            Way::Up,
            Memory::Pinned,
            &UP_BYTES,
            "to_device_pinned",
            clock,
        )?;
        Ok(self)
    }

    fn products(&self, i: usize, clock: &Clock<'_>) -> Result<Option<Products>, Error> {
        clock.check()?;
        let (ty, forks) = &self.forks[i];
        let bytes = self.passing_bytes.min(PASSING_BYTES) as usize;
        let bytes = bytes.min(self.room);
        let made = Products::new(self.gpu.device(), *ty, forks, bytes, self.ubatch);
        known(made)
    }

    fn attention(
        &mut self,
        heads: Heads,
        type_k: KvType,
        type_v: KvType,
        shape: KvShape,
        processor: &Processor<'_>,
        clock: &mut Clock<'_>,
    ) -> Result<(), Error> {
        clock.check()?;
        let mut rate = guessed_attention(processor, type_k, type_v, head_shape(heads));
        let bytes = CELL_BYTES.min(self.room);
        let Some(cells) = known(Cells::new(self.gpu.device(), shape, heads.heads, bytes))? else {
            return Ok(());
        };
        let name = rate.name();
        let mut at = |depth: usize, field: &str| {
            let us = rate.engage_us.value + rate.ns_cell.value * depth as f64 / 1e3;
            let which = Which {
                path: &format!("device.attention[{name}].{field}"),
                what: &format!("attention on the GPU over {name}, {depth} cells"),
                guess: Figure::exact(us),
            };
            let mut bench = cells.at(depth)?;
            clock.sample(which, |time| Ok(bench.us(time)?))
        };
        let [small, large] = DEPTHS.map(|depth| depth.min(cells.depth_max()));
        let least_us = at(SMALL_DEPTH.min(small), "least_us")?;
        let us = [at(small, "engage_us")?, at(large, "ns_cell")?];
        (rate.ns_cell, rate.engage_us) = line([small, large], us);
        rate.least_us = Some(least_us);
        self.device.attention.push(rate);
        Ok(())
    }

    fn transfers(
        &mut self,
        way: Way,
        memory: Memory,
        sizes: &[usize],
        field: &str,
        clock: &mut Clock<'_>,
    ) -> Result<Vec<Transfer>, Error> {
        let link = self.link.as_mut().expect("made with the first figures");
        let guess = self.device.link.to_device_pinned.last();
        let guess = guess.map_or(Figure::exact(1.0), |t| t.gb_s);
        let mut transfers = Vec::new();
        for &bytes in sizes
            .iter()
            .filter(|bytes| **bytes <= self.room.min(LINK_BYTES))
        {
            let which = Which {
                path: &format!("device.link.{field}[{bytes}].gb_s"),
                what: &format!("copies of {} KiB, {field}", bytes >> 10),
                guess,
            };
            let gb_s = clock.sample(which, |time| Ok(link.gb_s(way, memory, bytes, time)?))?;
            transfers.push(Transfer {
                bytes: bytes as u64,
                gb_s,
            });
        }
        Ok(transfers)
    }

    /// What link and CPU keep of their rates beside each other, and the device beside the link.
    pub(super) fn beside(
        &mut self,
        host: &mut host::Probe<'_>,
        clock: &mut Clock<'_>,
    ) -> Result<(), Error> {
        self.device.kept.device = self.device_keeps(clock)?;
        for i in 0..TIERS.len() {
            let Some(of_tier) = host.attention(i)? else {
                break;
            };
            let host::BesideCopies {
                mut bench,
                all,
                fewer,
                rate,
                block_bytes,
                layers,
            } = of_tier;
            // As a session's ring copies a layer's blocks.
            let rows = Rows {
                width: block_bytes,
                pitch: block_bytes * layers,
                rows: pieces_a_run(block_bytes),
            };
            let mut until = |beside: bool, is_done: &mut dyn FnMut() -> bool| {
                bench.attend_until(if beside { fewer } else { all }, is_done)
            };
            let kept = &mut self.device.kept;
            let guess = [kept.link_attention, kept.attention];
            let name = rate.name();
            let what = format!("attention over {name}");
            let path = format!("host.attention[{name}].kept");
            let keeps = self.keeps(&path, &what, rows, guess, &mut until, clock)?;
            (rate.kept, rate.copies_gb_s, rate.copies_kept) =
                (Some(keeps.cpu), keeps.link_gb_s, Some(keeps.link));
            for field in ["copies_gb_s", "copies_kept"] {
                clock.doubt_like(&path, &format!("host.attention[{name}].{field}"));
            }
            if let Some(call_us) = keeps.call_us {
                attention::again(rate, call_us);
                clock.doubt_like(&path, &format!("host.attention[{name}].ns_cell"));
            }
            if i == 0 {
                // What is said of tiers that are not measured.
                for of_all in ["link_attention", "attention"] {
                    clock.doubt_like(&path, &format!("device.kept.{of_all}"));
                }
                (self.device.kept.link_attention, self.device.kept.attention) =
                    (keeps.link, keeps.cpu);
            }
        }
        if let Some((mut bench, pool)) = host.weights()? {
            let mut until = |_, is_done: &mut dyn FnMut() -> bool| bench.pass_until(pool, is_done);
            let kept = &mut self.device.kept;
            let guess = [kept.link_products, kept.products];
            let path = "device.kept.products";
            let rows = Rows::one(PIECE_BYTES as usize);
            let keeps = self.keeps(path, "products", rows, guess, &mut until, clock)?;
            clock.doubt_like(path, "device.kept.link_products");
            (self.device.kept.link_products, self.device.kept.products) = (keeps.link, keeps.cpu);
        }
        Ok(())
    }

    /// The part of its rate that the device keeps while copies are written to its memory: products of one token, which are most of what it does, or plain
    /// reads, if there are none.
    fn device_keeps(&mut self, clock: &mut Clock<'_>) -> Result<Figure, Error> {
        let products = match self.forks.is_empty() {
            true => None,
            false => self.products(0, clock)?,
        };
        let link = self.link.as_mut().expect("made with the first figures");
        let link_gb_s = self.device.link.to_device_pinned.last();
        let link_gb_s = link_gb_s.map_or(1.0, |t| t.gb_s.value);
        let mut rate: Box<dyn FnMut(Duration) -> Result<f64, cuda::Error>> = match products {
            Some(mut products) => Box::new(move |time| products.decode_gb_s(time)),
            None => {
                let mut reads = Reads::new(self.gpu.device(), READ_BYTES.min(self.room))?;
                Box::new(move |time| reads.gb_s(time))
            }
        };
        let which = Which {
            path: "device.kept.device",
            what: "products on the GPU beside copies",
            guess: self.device.kept.device,
        };
        let piece = PIECE_BYTES as usize;
        clock.sample(which, |time| {
            let third = time / 3;
            let alone = rate(third)?;
            let copies = copies(2 * third, link_gb_s, piece);
            let (_, beside) = link.beside(Rows::one(piece), copies, |_| rate(third))?;
            Ok(possible(beside? / alone))
        })
    }

    /// The parts of their rates that link and CPU keep. Copies are of such `rows`. `until` works, beside copies or alone, until it is told that it is done, and says how many calls that was. `path` is the
    /// CPU's part.
    fn keeps(
        &mut self,
        path: &str,
        what: &str,
        rows: Rows,
        guess: [Figure; 2],
        until: &mut dyn FnMut(bool, &mut dyn FnMut() -> bool) -> usize,
        clock: &mut Clock<'_>,
    ) -> Result<Keeps, Error> {
        let link = self.link.as_mut().expect("made with the first figures");
        let which = Which {
            path,
            what: &format!("copies beside the CPU's {what}"),
            guess: guess[0],
        };
        let mut rate = |beside: bool, is_done: &mut dyn FnMut() -> bool| {
            let begun = Instant::now();
            let work = until(beside, is_done);
            work as f64 / begun.elapsed().as_secs_f64()
        };
        let (mut kept, mut calls_us, mut gbs_alone) = (Vec::new(), Vec::new(), Vec::new());
        let link = clock.sample(which, |time| {
            let third = time / 3;
            let alone_gb_s = link.rows_gb_s(rows, third)?;
            let begun = Instant::now();
            let alone = rate(false, &mut || begun.elapsed() >= third);
            let copies = copies(third, alone_gb_s, rows.bytes());
            let (gb_s, beside) = link.beside(rows, copies, |is_done| rate(true, is_done))?;
            gbs_alone.push(alone_gb_s);
            kept.push(possible(beside / alone));
            calls_us.push(1e6 / alone);
            Ok(possible(gb_s / alone_gb_s))
        })?;
        // The first one warmed up.
        let later = |readings: &[f64]| match readings.split_first() {
            Some((_, rest)) if !rest.is_empty() => Some(figure(rest)),
            _ => None,
        };
        Ok(Keeps {
            link_gb_s: later(&gbs_alone),
            link,
            cpu: later(&kept).unwrap_or(guess[1]),
            call_us: later(&calls_us),
        })
    }

    /// The rest: other copies.
    pub(super) fn second(mut self, clock: &mut Clock<'_>) -> Result<Device, Error> {
        let all = [
            (Way::Down, Memory::Pinned, "from_device_pinned"),
            (Way::Up, Memory::Pageable, "to_device_pageable"),
            (Way::Down, Memory::Pageable, "from_device_pageable"),
        ];
        let [from_pinned, to_pageable, from_pageable] =
            all.map(|(way, memory, field)| self.transfers(way, memory, &OTHER_BYTES, field, clock));
        let link = &mut self.device.link;
        link.from_device_pinned = from_pinned?;
        link.to_device_pageable = to_pageable?;
        link.from_device_pageable = from_pageable?;
        Ok(self.device)
    }
}

/// Copies that take about `time`.
fn copies(time: Duration, gb_s: f64, bytes: usize) -> usize {
    (time.as_secs_f64() * gb_s * 1e9 / bytes as f64).ceil() as usize
}

/// A part that profiles may hold: noise can make a busy rate look better than an idle one.
fn possible(part: f64) -> f64 {
    let (low, high) = Unit::Part.range();
    if part.is_finite() {
        part.clamp(low, high)
    } else {
        high
    }
}

/// What another device does with a format, in place of what was not measured.
fn guessed_product(guess: &Device, ty: TensorType) -> DeviceProduct {
    let found = guess.products.iter().find(|p| p.format == ty.name());
    let mut rate = found.unwrap_or(&guess.products[0]).clone();
    ty.name().clone_into(&mut rate.format);
    rate
}

/// Nanoseconds a cell and microseconds at none of the line through two depths; what noise makes negative is next to nothing.
fn line(cells: [usize; 2], us: [Figure; 2]) -> (Figure, Figure) {
    let [small, large] = us;
    let least = Unit::NsCell.range().0;
    let more = (cells[1] - cells[0].min(cells[1])) as f64;
    if more == 0.0 {
        // One depth alone: all of it is what a cell costs.
        let each = 1e3 / cells[1].max(1) as f64;
        let slope = Figure {
            value: (large.value * each).max(least),
            spread: large.spread * each,
        };
        return (slope, Figure::default());
    }
    let slope = Figure {
        value: (1e3 * (large.value - small.value) / more).max(least),
        spread: 1e3 * (large.spread + small.spread) / more,
    };
    let thousands = cells[0] as f64 / 1e3;
    let engage = Figure {
        value: (small.value - slope.value * thousands).max(0.0),
        spread: small.spread + slope.spread * thousands,
    };
    (slope, engage)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_goes_through_both_depths() {
        let us = |value| Figure { value, spread: 0.1 };
        let (slope, engage) = line([2000, 32_000], [us(8.0), us(68.0)]);
        assert!((slope.value - 2.0).abs() < 1e-9 && (engage.value - 4.0).abs() < 1e-9);
        assert!(slope.spread > 0.0 && engage.spread > 0.1);
        let (slope, engage) = line([2000, 32_000], [us(8.0), us(7.0)]);
        assert!(slope.value > 0.0 && engage.value < 8.01);
        let (slope, engage) = line([1000, 1000], [us(5.0), us(5.0)]);
        assert_eq!((slope.value, engage.value), (5.0, 0.0));
    }

    #[test]
    fn copies_fill_the_time_and_parts_are_possible() {
        assert_eq!(copies(Duration::from_millis(10), 50.0, 2_000_000), 250);
        assert_eq!((possible(0.5), possible(9.0)), (0.5, 1.25));
        assert_eq!((possible(f64::NAN), possible(-1.0)), (1.25, 1e-3));
    }

    #[test]
    fn every_tier_is_known_to_the_devices_kernels() {
        let heads = Heads {
            heads: 32,
            heads_kv: 8,
            head_k: 128,
            head_v: 128,
        };
        assert_eq!(tiers(heads).count(), TIERS.len());
        let guess = default_device();
        for ty in quant::formats::supported() {
            assert_eq!(guessed_product(&guess, *ty).format, ty.name());
        }
    }
}
