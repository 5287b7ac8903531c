//! Cells written, decode attention and its fold against `cpu::attention`.

use super::{Row, compare_acts};
use crate::attention::{
    Attention, CELLS, GROUP, KvBlock, KvShape, KvType, Over, Params, Part, Partials, Parts, Table,
};
use crate::ops::Rotation;
use crate::product::Target;
use crate::{Acts, Buffer, Device, Stream};
use cpu::attention as want;
use cpu::isa::Isa;
use cpu::ops;
use cpu::pool::{Pinning, Pool};
use quant::act::Passes;

use super::{Failure, START, row, values};

/// One layer with a past of `n` cells, on both sides.
pub(super) struct Case {
    pub(super) shape: KvShape,
    pub(super) heads: usize,
    pub(super) n: usize,
    pub(super) params: Params,
    pub(super) sinks: Option<Vec<f32>>,
    /// `[T, H, C]` of the last tokens.
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
    /// Cells that are not there.
    pub(super) removed: Vec<std::ops::Range<usize>>,
    blocks: Vec<cpu::mem::Buffer<u8>>,
}

pub(super) fn cpu_type(ty: KvType) -> want::KvType {
    match ty {
        KvType::F16 => want::KvType::F16,
        KvType::Bf16 => want::KvType::Bf16,
        KvType::Q8_0 => want::KvType::Q8_0,
        KvType::Q4_0 => want::KvType::Q4_0,
    }
}

impl Case {
    pub(super) fn new(shape: KvShape, gqa: usize, n: usize, seed: u64) -> Result<Self, Failure> {
        let (row_k, row_v) = (shape.heads * shape.c_k, shape.heads * shape.c_v);
        let mut case = Self {
            shape,
            heads: shape.heads * gqa,
            n,
            params: Params {
                scale: 1.0 / (shape.c_k as f32).sqrt(),
                soft_cap: None,
                window: None,
            },
            sinks: None,
            q: values(shape.heads * gqa * shape.c_k, seed),
            k: values(n * row_k, seed + 1),
            v: values(n * row_v, seed + 2),
            removed: Vec::new(),
            blocks: Vec::new(),
        };
        case.write()?;
        Ok(case)
    }

    pub(super) fn cpu_shape(&self) -> want::KvShape {
        let s = &self.shape;
        want::KvShape::new(
            s.heads,
            s.c_k,
            s.c_v,
            cpu_type(s.type_k),
            cpu_type(s.type_v),
        )
        .expect("shapes of cases divide")
    }

    /// Writes the cells on the CPU.
    pub(super) fn write(&mut self) -> Result<(), Failure> {
        let (shape, s) = (self.cpu_shape(), &self.shape);
        assert_eq!(
            shape.block_bytes(),
            s.block_bytes(),
            "both sides have one layout"
        );
        self.blocks.clear();
        for _ in 0..self.n.div_ceil(CELLS) {
            self.blocks
                .push(cpu::mem::Buffer::new(shape.block_bytes())?);
        }
        let rows = self
            .k
            .chunks_exact(s.heads * s.c_k)
            .zip(self.v.chunks_exact(s.heads * s.c_v));
        for (i, (k, v)) in rows.enumerate() {
            want::write_cell(&shape, &mut self.blocks[i / CELLS], i % CELLS, k, v);
        }
        Ok(())
    }

    /// Blocks by number, and of their cells those that are there: several times the same block where cells are removed.
    pub(super) fn spans(&self) -> Vec<(usize, std::ops::Range<usize>)> {
        let mut spans = Vec::new();
        for i in 0..self.n.div_ceil(CELLS) {
            let mut start = 0;
            for gap in &self.removed {
                let inside = |n: usize| n.saturating_sub(i * CELLS).min(CELLS);
                let (from, to) = (inside(gap.start), inside(gap.end));
                if from < to {
                    spans.push((i, start..from));
                    start = to;
                }
            }
            spans.push((i, start..CELLS));
        }
        spans.retain(|(_, cells)| !cells.is_empty());
        spans
    }

    /// The last token, or tokens, by the CPU.
    pub(super) fn wanted(&self, pool: &Pool) -> Result<Vec<f32>, Failure> {
        let shape = self.cpu_shape();
        let params = want::Params {
            heads: self.heads,
            scale: self.params.scale,
            soft_cap: self.params.soft_cap,
            window: self.params.window,
            sinks: self.sinks.as_deref(),
        };
        let mut partials = want::Partials::new(&shape, self.heads, self.n + 8 * CELLS, 0)?;
        let tokens = self.q.len() / (self.heads * self.shape.c_k);
        let mut out = vec![0.0; tokens * self.heads * self.shape.c_v];
        let span = |(index, cells): (usize, std::ops::Range<usize>)| want::Span {
            index,
            cells: (cells.start, cells.end),
            bytes: &self.blocks[index],
        };
        let spans: Vec<_> = self.spans().into_iter().map(span).collect();
        let (isa, step, at) = (Isa::best(), want::Step::ONLY, self.n - tokens);
        want::attend(
            pool,
            isa,
            &shape,
            &params,
            at,
            &self.q,
            &spans,
            step,
            &mut partials,
            &mut out,
        );
        Ok(out)
    }
}

/// A case's blocks on the device, in a shuffled order, with NaN where nothing is written.
pub(super) struct OnDevice {
    slab: Buffer<u8>,
    pub(super) blocks: Vec<KvBlock>,
    pub(super) position: Buffer<u32>,
}

impl OnDevice {
    pub(super) fn new(stream: &Stream, case: &Case) -> Result<Self, Failure> {
        let count = case.n.div_ceil(CELLS);
        let bytes = case.shape.block_bytes();
        let mut slab = Buffer::new(stream.device(), count * bytes)?;
        slab.fill_bytes(stream, 0xff)?;
        // An odd step visits every place once if the count is a power of two, so go round the next one.
        let round = count.next_power_of_two();
        let places: Vec<usize> = (0..round)
            .map(|i| i * 5 % round)
            .filter(|p| *p < count)
            .collect();
        let mut blocks = Vec::new();
        for (slot, (i, cells)) in case.spans().into_iter().enumerate() {
            blocks.push(KvBlock::new(
                &case.shape,
                &slab,
                places[i] * bytes,
                i,
                cells,
                slot,
            )?);
        }
        Ok(Self {
            slab,
            blocks,
            position: Buffer::from_slice(stream, &[case.n as u32 - 1])?,
        })
    }

    pub(super) fn table(
        &self,
        stream: &Stream,
        which: impl Fn(usize) -> bool,
    ) -> Result<Table, Failure> {
        let blocks: Vec<_> = self
            .blocks
            .iter()
            .filter(|b| which(b.index()))
            .copied()
            .collect();
        self.table_of(stream, &blocks)
    }

    pub(super) fn table_of(&self, stream: &Stream, blocks: &[KvBlock]) -> Result<Table, Failure> {
        let mut table = Table::new(stream, blocks.len().max(1))?;
        // SAFETY: the slab lives as long as `self`, and tables are dropped before it.
        unsafe { table.set(stream, blocks)? };
        Ok(table)
    }

    /// Writes all cells, in chunks of some tokens.
    pub(super) fn append(
        &self,
        stream: &Stream,
        attention: &Attention,
        case: &Case,
        chunk: usize,
    ) -> Result<(), Failure> {
        // Cells that are removed later are written, too.
        let mut whole = Vec::new();
        for block in &self.blocks {
            let offset = (block.address() - self.slab.address()) as usize;
            whole.push(KvBlock::new(
                &case.shape,
                &self.slab,
                offset,
                block.index(),
                0..CELLS,
                0,
            )?);
        }
        whole.dedup();
        let mut table = Table::new(stream, whole.len())?;
        // SAFETY: the slab lives as long as `self`; the table is dropped before.
        unsafe { table.set(stream, &whole)? };
        let (row_k, row_v) = (
            case.shape.heads * case.shape.c_k,
            case.shape.heads * case.shape.c_v,
        );
        for first in (0..case.n).step_by(chunk) {
            let tokens = chunk.min(case.n - first);
            let k = Buffer::from_slice(stream, &case.k[first * row_k..][..tokens * row_k])?;
            let v = Buffer::from_slice(stream, &case.v[first * row_v..][..tokens * row_v])?;
            let at = Buffer::from_slice(stream, &[first as u32])?;
            // Every other chunk block by block, as prompts do.
            if (first / chunk).is_multiple_of(2) {
                attention.append(stream, START, &table, &at, tokens, &k, &v)?;
            } else {
                let over = |block: &KvBlock| Over {
                    slab: &self.slab,
                    offset: (block.address() - self.slab.address()) as usize,
                    index: block.index(),
                    cells: (0, CELLS),
                };
                // Blocks that are gone interrupt a row of them.
                for blocks in whole.chunk_by(|a, b| a.index() + 1 == b.index()) {
                    let over: Vec<Over<'_>> = blocks.iter().map(over).collect();
                    attention.append_to(stream, START, &over, first, tokens, 0, &k, &v)?;
                }
            }
            stream.synchronise()?;
        }
        Ok(())
    }

    /// Compares the bytes of full blocks with the CPU's. NaN halves are equal.
    fn compare(
        &self,
        stream: &Stream,
        case: &Case,
        shapes: String,
    ) -> Result<Option<Row>, Failure> {
        if !case.removed.is_empty() || case.n < CELLS {
            return Ok(None);
        }
        let all = self.slab.to_vec(stream)?;
        let bytes = case.shape.block_bytes();
        let mut row = Row::new("append", types(case), shapes);
        for (i, block) in self.blocks[..case.n / CELLS].iter().enumerate() {
            let got = &all[(block.address() - self.slab.address()) as usize..][..bytes];
            let wanted = &case.blocks[i][..];
            compare_bytes(got, wanted, &format!("block {i}"), &mut row);
        }
        Ok(Some(row))
    }
}

pub(super) fn rows(
    device: &Device,
    target: Target,
    report: &mut dyn FnMut(Row),
) -> Result<(), Failure> {
    let stream = device.stream()?;
    let threads = std::thread::available_parallelism()?.get();
    let pool = Pool::new(threads, Pinning::Free)?;
    for ty_k in KvType::ALL {
        for ty_v in KvType::ALL {
            let shape = shape(2, 128, 128, ty_k, ty_v);
            let case = Case::new(shape, 5, 1500, 31)?;
            decode(&stream, target, &pool, &case, report)?;
        }
    }
    // Long pasts: many items a thread block, several batches of the fold. The pairs of types that kernels know, and one that they do not.
    let float = KvType::F16;
    for (ty_k, ty_v) in [
        (float, float),
        (KvType::Q8_0, KvType::Q8_0),
        (KvType::Q8_0, KvType::Q4_0),
        (KvType::Q4_0, KvType::Q4_0),
        (KvType::Q4_0, KvType::Q8_0),
    ] {
        for (heads, gqa, c, n) in [(8, 5, 128, 20_001), (2, 7, 64, 70_000), (4, 4, 256, 9_001)] {
            let case = Case::new(shape(heads, c, c, ty_k, ty_v), gqa, n, 81)?;
            decode(&stream, target, &pool, &case, report)?;
        }
    }
    for (ty_k, ty_v) in [
        (float, float),
        (KvType::Q8_0, KvType::Q8_0),
        (KvType::Q4_0, KvType::Q4_0),
    ] {
        let heads: &[(usize, usize)] = if ty_k == float {
            &[
                (64, 64),
                (80, 80),
                (96, 96),
                (112, 112),
                (128, 128),
                (256, 256),
                (192, 128),
                (16, 48),
                (240, 208),
            ]
        } else {
            &[
                (64, 64),
                (96, 96),
                (128, 128),
                (256, 256),
                (192, 128),
                (32, 64),
                (224, 160),
            ]
        };
        for (i, (c_k, c_v)) in heads.iter().enumerate() {
            for gqa in [1 + i % 8, 1 + (i + 4) % 8] {
                let case = Case::new(
                    shape(2, *c_k, *c_v, ty_k, ty_v),
                    gqa,
                    300 + 97 * i,
                    41 + i as u64,
                )?;
                decode(&stream, target, &pool, &case, report)?;
            }
        }
        for gqa in [1, 2, 3, 4, 6, 7, 8, 9, 12, 16] {
            for c in [64, 128, 256] {
                let case = Case::new(shape(1, c, c, ty_k, ty_v), gqa, 530, 51 + gqa as u64)?;
                decode(&stream, target, &pool, &case, report)?;
            }
        }
        for (window, cap, sinks) in [
            (Some(1), None, false),
            (Some(100), None, true),
            (Some(700), Some(30.0), false),
            (Some(1024), None, false),
            (None, Some(20.0), true),
            (None, None, true),
        ] {
            for n in [1, 63, 64, 65, 256, 257, 1024, 2900] {
                let mut case = Case::new(shape(3, 64, 64, ty_k, ty_v), 3, n, 61 + n as u64)?;
                (case.params.window, case.params.soft_cap) = (window, cap);
                case.sinks = sinks.then(|| values(case.heads, 71));
                decode(&stream, target, &pool, &case, report)?;
            }
        }
        for (n, removed) in [
            (700, vec![10..20, 100..101, 250..530]),
            (3000, vec![0..300, 1100..1101, 1110..1111, 2048..2100]),
        ] {
            let mut case = Case::new(shape(2, 64, 64, ty_k, ty_v), 4, n, 91)?;
            case.removed = removed;
            decode(&stream, target, &pool, &case, report)?;
        }
        // Long pasts: many items a thread block, several batches of the fold.
        for (heads, gqa, c, n) in [(8, 5, 128, 20_001), (2, 7, 64, 70_000)] {
            let case = Case::new(shape(heads, c, c, ty_k, ty_v), gqa, n, 81)?;
            decode(&stream, target, &pool, &case, report)?;
        }
    }
    // Few blocks, as many as are folded by single threads, and one more; of all types, and for each number of query heads.
    for blocks in 1..=13 {
        let ty = KvType::ALL[blocks % KvType::ALL.len()];
        let gqa = 1 + (blocks * 3) % 8;
        let c = [64, 128, 256][blocks % 3];
        for (heads, gqa, c, n) in [
            (4, gqa, c, blocks * CELLS - 7),
            (8, 1 + gqa % 8, 128, (blocks - 1) * CELLS + 1 + 2 * blocks),
        ] {
            let mut case = Case::new(shape(heads, c, c, ty, ty), gqa, n, 101 + blocks as u64)?;
            if blocks % 4 == 3 {
                case.sinks = Some(values(case.heads, 73));
            }
            decode(&stream, target, &pool, &case, report)?;
        }
    }
    faulty(&stream, target, report)
}

pub(super) fn shape(
    heads: usize,
    c_k: usize,
    c_v: usize,
    type_k: KvType,
    type_v: KvType,
) -> KvShape {
    KvShape {
        heads,
        c_k,
        c_v,
        type_k,
        type_v,
    }
}

pub(super) fn types(case: &Case) -> String {
    format!("{}/{}", case.shape.type_k.name(), case.shape.type_v.name())
}

pub(super) fn describe(case: &Case) -> String {
    let (s, p) = (&case.shape, &case.params);
    let mut text = format!(
        "{}/{}x{}/{} n {}",
        case.heads, s.heads, s.c_k, s.c_v, case.n
    );
    if let Some(w) = p.window {
        text += &format!(" window {w}");
    }
    if let Some(cap) = p.soft_cap {
        text += &format!(" cap {cap}");
    }
    if !case.removed.is_empty() {
        text += " with holes";
    }
    if case.sinks.is_some() {
        text += " sinks";
    }
    text
}

/// Cells, then the last token: over one list, and over lists of which some groups come folded.
fn decode(
    stream: &Stream,
    target: Target,
    pool: &Pool,
    case: &Case,
    report: &mut dyn FnMut(Row),
) -> Result<(), Failure> {
    let attention = Attention::new(stream.device(), target, case.shape, case.heads)?;
    let there = OnDevice::new(stream, case)?;
    there.append(stream, &attention, case, 1 + case.n / 3)?;
    if let Some(row) = there.compare(stream, case, describe(case))? {
        report(row);
    }
    let wanted = case.wanted(pool)?;
    let count = there.blocks.len();
    let indices: Vec<usize> = there.blocks.iter().map(KvBlock::index).collect();
    let q = Buffer::from_slice(stream, &case.q)?;
    let sinks = case
        .sinks
        .as_ref()
        .map(|s| Buffer::from_slice(stream, s))
        .transpose()?;
    let mut out = Buffer::from_slice(stream, &vec![f32::NAN; wanted.len()])?;
    let groups = case.n.div_ceil(GROUP * CELLS);
    let mut partials = Partials::new(stream, &case.shape, case.heads, count)?;
    let mut of_groups = Partials::new(stream, &case.shape, case.heads, groups)?;
    let first = groups.div_ceil(3);
    // How blocks are shared: all in one list; two lists that alternate; the middle third of the groups folded by the host; the first third folded
    // to one result.
    for kind in [
        "one list",
        "two lists",
        "groups by the host",
        "first groups by the host",
    ] {
        let by_host = |b: usize| match kind {
            "groups by the host" => (groups / 3..2 * groups / 3).contains(&(b / GROUP)),
            "first groups by the host" => b / GROUP < first,
            _ => false,
        };
        partials.values_mut().fill_bytes(stream, 0xff)?;
        for list in 0..2 {
            let table = there.table(stream, |b| match kind {
                "two lists" => b % 2 == list,
                _ => list == 0,
            })?;
            attention.decode(
                stream,
                START,
                &table,
                &there.position,
                &case.params,
                &q,
                &mut partials,
            )?;
            stream.synchronise()?;
        }
        let mut parts: Vec<Part> = Vec::new();
        for (slot, &index) in indices.iter().enumerate() {
            let group = index / GROUP;
            if !by_host(index) {
                parts.push(Part::Block { index, slot });
            } else if kind == "first groups by the host" {
                if parts.is_empty() {
                    parts.push(Part::Group {
                        index: first - 1,
                        slot: 0,
                    });
                }
            } else if slot == 0 || indices[slot - 1] / GROUP != group {
                parts.push(Part::Group {
                    index: group,
                    slot: group,
                });
            }
        }
        if parts.iter().any(|p| matches!(p, Part::Group { .. })) {
            let mut folded =
                fold_groups(&partials.values().to_vec(stream)?, case, &indices, groups);
            if kind == "first groups by the host" {
                let one = case.heads * (2 + case.shape.c_v);
                folded = fold_groups(&folded[..first * one], case, &vec![0; first], 1);
            }
            of_groups.values_mut().upload_at(stream, 0, &folded)?;
        }
        let mut list = Parts::new(stream, count)?;
        list.set(stream, &parts)?;
        out.fill_bytes(stream, 0xff)?;
        attention.fold(
            stream,
            START,
            &list,
            &partials,
            Some(&of_groups),
            sinks.as_ref(),
            &mut out,
        )?;
        let got = out.to_vec(stream)?;
        let shapes = format!("{}, {kind}", describe(case));
        report(row("decode, fold", types(case), shapes, &got, &wanted));
        for (rotation, block, passes) in [
            (Rotation::None, 32, Passes::One),
            (Rotation::None, 256, Passes::Two),
            (Rotation::Hadamard, 32, Passes::Two),
            (Rotation::Hadamard, 256, Passes::One),
        ] {
            let c = case.shape.c_v;
            let rotates = rotation == Rotation::Hadamard;
            if rotates && !c.is_power_of_two() || !wanted.len().is_multiple_of(block) {
                continue;
            }
            let mut wanted = wanted.clone();
            if rotates {
                ops::hadamard_heads(Isa::best(), c, &mut wanted);
            }
            out.fill_bytes(stream, 0xff)?;
            let mut acts = Acts::new(stream, 1, wanted.len())?;
            attention.fold_to(
                stream,
                START,
                &list,
                &partials,
                Some(&of_groups),
                sinks.as_ref(),
                &mut out,
                rotation,
                Some((&mut acts, block, passes)),
            )?;
            let mut row = Row::new(
                "fold, blocks",
                format!("{} {rotation:?} {block} {passes:?}", types(case)),
                describe(case),
            );
            compare_acts(stream, &acts, &wanted, &mut row)?;
            for (i, (found, wanted)) in out.to_vec(stream)?.iter().zip(&wanted).enumerate() {
                row.compare(*found, *wanted, || format!("value {i}"));
            }
            report(row);
        }
    }
    Ok(())
}

/// Bytes of a block; NaN halves are equal.
pub(super) fn compare_bytes(got: &[u8], wanted: &[u8], what: &str, row: &mut Row) {
    let is_nan = |b: &[u8], at: usize| {
        let two = [b[at & !1], b[at | 1]];
        half::f16::from_le_bytes(two).is_nan() || half::bf16::from_le_bytes(two).is_nan()
    };
    for at in 0..wanted.len() {
        let both_nan = got[at] != wanted[at] && is_nan(got, at) && is_nan(wanted, at);
        let found = if both_nan { wanted[at] } else { got[at] };
        row.nan += usize::from(both_nan);
        row.compare_int(found.into(), wanted[at].into(), || {
            format!("{what}, byte {at}")
        });
    }
}

/// The exponential of the definition, for merges.
fn exp(x: f32) -> f32 {
    if x < -80.0 {
        return 0.0;
    }
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = n.mul_add(2.121_944_4e-4, n.mul_add(-355.0 / 512.0, x));
    let terms = [
        1.0 / 5040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ];
    let p = terms[1..]
        .iter()
        .fold(terms[0], |p: f32, c| p.mul_add(r, *c));
    p * f32::from_bits(((n as i32 + 127) as u32) << 23)
}

/// Blocks' partials folded inside groups, as a CPU that shares the work would.
fn fold_groups(partials: &[f32], case: &Case, indices: &[usize], groups: usize) -> Vec<f32> {
    let size = 2 + case.shape.c_v;
    let one = case.heads * size;
    let mut groups = vec![0.0; groups * one];
    for (index, block) in indices.iter().zip(partials.chunks_exact(one)) {
        let group = &mut groups[index / GROUP * one..][..one];
        for (a, b) in group.chunks_exact_mut(size).zip(block.chunks_exact(size)) {
            if b[1] == 0.0 {
                continue;
            }
            if a[1] == 0.0 {
                a.copy_from_slice(b);
                continue;
            }
            let m = if a[0] > b[0] { a[0] } else { b[0] };
            let (f_a, f_b) = (exp(a[0] - m), exp(b[0] - m));
            a[0] = m;
            for (a, b) in a[1..].iter_mut().zip(&b[1..]) {
                *a = b.mul_add(f_b, *a * f_a);
            }
        }
    }
    groups
}

/// Heads that cannot be stored, and values at the ends of formats.
fn faulty(stream: &Stream, target: Target, report: &mut dyn FnMut(Row)) -> Result<(), Failure> {
    for ty in KvType::ALL {
        let mut case = Case::new(shape(2, 64, 96, ty, ty), 1, 256, 91)?;
        let bad = [
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::MAX,
            70_000.0,
            1e-40,
            8.4e6,
            65_519.0,
            65_520.0,
            1e-30,
            3e-8,
        ];
        for (i, x) in bad.iter().enumerate() {
            case.k[i * 5 * 128 + 7 * i] = *x;
            case.v[i * 6 * 192 + 9 * i] = *x;
            // A whole head of them.
            case.k[(100 + i) * 128..][..64].fill(*x);
            case.v[(100 + i) * 192 + 96..][..96].fill(-*x);
        }
        case.write()?;
        let attention = Attention::new(stream.device(), target, case.shape, case.heads)?;
        let there = OnDevice::new(stream, &case)?;
        there.append(stream, &attention, &case, 37)?;
        let shapes = format!("{}, faulty values", describe(&case));
        if let Some(row) = there.compare(stream, &case, shapes)? {
            report(row);
        }
    }
    Ok(())
}
