//! Attention against plain code that follows the definition word by word, and against `f64`.

use super::*;
use crate::pool::Pinning;
use proptest::prelude::*;

struct Case {
    shape: KvShape,
    heads: usize,
    n: usize,
    window: Option<usize>,
    soft_cap: Option<f32>,
    sinks: Option<Vec<f32>>,
    /// `[n][heads][C]` each.
    q: Vec<f32>,
    blocks: Vec<Buffer<u8>>,
    /// Cells that were removed, in order.
    holes: Vec<Range<usize>>,
}

fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed | 1;
    (0..n)
        .map(|_| {
            s = s
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (s >> 40) as f32 / (1 << 24) as f32 * 4.0 - 2.0
        })
        .collect()
}

impl Case {
    fn new(
        shape: KvShape,
        gqa: usize,
        n: usize,
        window: Option<usize>,
        soft_cap: Option<f32>,
        sinks: bool,
        seed: u64,
    ) -> Self {
        let heads = shape.heads * gqa;
        let (k, v) = (
            values(n * shape.heads * shape.c_k, seed),
            values(n * shape.heads * shape.c_v, seed + 1),
        );
        let mut blocks: Vec<_> = (0..n.div_ceil(CELLS))
            .map(|_| Buffer::new(shape.block_bytes()).unwrap())
            .collect();
        for i in 0..n {
            let (ck, cv) = (shape.heads * shape.c_k, shape.heads * shape.c_v);
            write_cell(
                &shape,
                &mut blocks[i / CELLS],
                i % CELLS,
                &k[i * ck..(i + 1) * ck],
                &v[i * cv..(i + 1) * cv],
            );
        }
        let sinks = sinks.then(|| values(heads, seed + 3));
        Self {
            shape,
            heads,
            n,
            window,
            soft_cap,
            sinks,
            q: values(n * heads * shape.c_k, seed + 2),
            blocks,
            holes: Vec::new(),
        }
    }

    /// What of the cells before `n` is there.
    fn spans(&self, n: usize) -> Vec<Span<'_>> {
        let whole = |index: usize| Span::whole(index, &self.blocks[index][..]);
        let mut spans: Vec<_> = (0..n.div_ceil(CELLS)).map(whole).collect();
        for hole in &self.holes {
            spans = spans.into_iter().flat_map(|s| without(s, hole)).collect();
        }
        spans
    }

    fn params(&self) -> Params<'_> {
        Params {
            heads: self.heads,
            scale: 1.0 / (self.shape.c_k as f32).sqrt(),
            soft_cap: self.soft_cap,
            window: self.window,
            sinks: self.sinks.as_deref(),
        }
    }

    /// All positions, `chunk` tokens at a time.
    fn run(&self, isa: Isa, threads: usize, chunk: usize) -> Vec<u32> {
        self.run_in_parts(isa, threads, chunk, &[usize::MAX])
    }

    /// The same, in calls over so many spans each, the last number for all that follow.
    fn run_in_parts(&self, isa: Isa, threads: usize, chunk: usize, parts: &[usize]) -> Vec<u32> {
        let pool = Pool::new(threads, Pinning::Free).unwrap();
        let mut partials = Partials::new(&self.shape, self.heads, self.n, chunk).unwrap();
        let (row, row_out) = (self.heads * self.shape.c_k, self.heads * self.shape.c_v);
        let mut out = vec![0.0; self.n * row_out];
        for first in (0..self.n).step_by(chunk) {
            let tokens = chunk.min(self.n - first);
            let q = &self.q[first * row..(first + tokens) * row];
            let out = &mut out[first * row_out..(first + tokens) * row_out];
            let spans = self.spans(first + tokens);
            let mut rest = &spans[..];
            let mut parts = parts.iter().copied();
            let mut part = usize::MAX;
            let mut is_first = true;
            while is_first || !rest.is_empty() {
                part = parts.next().unwrap_or(part);
                let (now, later) = rest.split_at(part.min(rest.len()));
                let step = Step {
                    first: is_first,
                    last: later.is_empty(),
                };
                (rest, is_first) = (later, false);
                attend(
                    &pool,
                    isa,
                    &self.shape,
                    &self.params(),
                    first,
                    q,
                    now,
                    step,
                    &mut partials,
                    out,
                );
            }
        }
        out.iter().map(|x| x.to_bits()).collect()
    }

    /// The stored K or V of a cell and head, decoded.
    fn stored(&self, cell: usize, head: usize, is_k: bool) -> Vec<f64> {
        let (ty, c) = if is_k {
            (self.shape.type_k, self.shape.c_k)
        } else {
            (self.shape.type_v, self.shape.c_v)
        };
        let block = &self.blocks[cell / CELLS];
        let (k, v) = (self.shape.k_bytes(), self.shape.v_bytes());
        let bytes = if is_k {
            &block[head * k..][..k]
        } else {
            &block[self.shape.heads * k + head * v..][..v]
        };
        let n = cell % CELLS;
        let half =
            |at: usize| f64::from(half::f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32());
        let scales = CELLS * c / 32 * 2;
        (0..c)
            .map(|i| {
                let (panel, lane, run) = (n / 64, n % 64, i / 32);
                let scale = if is_k {
                    half(((panel * c / 32 + run) * 64 + lane) * 2 % scales.max(1))
                } else {
                    half((n * c / 32 + run) * 2 % scales.max(1))
                };
                match (ty, is_k) {
                    (KvType::F16, true) => half(((panel * c + i) * 64 + lane) * 2),
                    (KvType::F16, false) => half((n * c + i) * 2),
                    (KvType::Bf16, _) => {
                        let at = if is_k {
                            ((panel * c + i) * 64 + lane) * 2
                        } else {
                            (n * c + i) * 2
                        };
                        f64::from(f32::from_bits(u32::from_le_bytes([
                            0,
                            0,
                            bytes[at],
                            bytes[at + 1],
                        ])))
                    }
                    (KvType::Q8_0, true) => {
                        scale
                            * f64::from(
                                bytes[scales + ((panel * c / 4 + i / 4) * 64 + lane) * 4 + i % 4]
                                    as i8,
                            )
                    }
                    (KvType::Q8_0, false) => scale * f64::from(bytes[scales + n * c + i] as i8),
                    (KvType::Q4_0, true) => {
                        let byte = bytes[scales
                            + (((panel * c / 32 + run) * 4 + i % 16 / 4) * 64 + lane) * 4
                            + i % 4];
                        scale * (f64::from(if i % 32 < 16 { byte & 15 } else { byte >> 4 }) - 8.0)
                    }
                    (KvType::Q4_0, false) => {
                        let byte = bytes[scales + (n * c / 32 + run) * 16 + i % 16];
                        scale * (f64::from(if i % 32 < 16 { byte & 15 } else { byte >> 4 }) - 8.0)
                    }
                }
            })
            .collect()
    }

    /// One token and head in `f64`.
    fn exact(&self, t: usize, h: usize) -> Vec<f64> {
        let (p, kv) = (self.params(), h / (self.heads / self.shape.heads));
        let q = &self.q[(t * self.heads + h) * self.shape.c_k..][..self.shape.c_k];
        let gone = |n: &usize| self.holes.iter().any(|hole| hole.contains(n));
        let cells: Vec<usize> = p.visible(t).filter(|n| !gone(n)).collect();
        let mut s: Vec<f64> = cells
            .iter()
            .map(|&n| {
                let s = q
                    .iter()
                    .zip(self.stored(n, kv, true))
                    .map(|(q, k)| f64::from(*q) * k)
                    .sum::<f64>()
                    * f64::from(p.scale);
                p.soft_cap
                    .map_or(s, |cap| f64::from(cap) * (s / f64::from(cap)).tanh())
            })
            .collect();
        s.extend(p.sinks.map(|s| f64::from(s[h])));
        let m = s.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let l: f64 = s.iter().map(|s| (s - m).exp()).sum();
        let mut o = vec![0.0; self.shape.c_v];
        for (n, s) in cells.into_iter().zip(&s) {
            for (o, v) in o.iter_mut().zip(self.stored(n, kv, false)) {
                *o += (s - m).exp() / l * v;
            }
        }
        o
    }
}

/// A span less some cells.
fn without<'a>(span: Span<'a>, hole: &Range<usize>) -> Vec<Span<'a>> {
    let inside = |n: usize| n.saturating_sub(span.index * CELLS).min(CELLS);
    let (start, end) = span.cells;
    let parts = [
        (start, end.min(inside(hole.start))),
        (start.max(inside(hole.end)), end),
    ];
    let parts = parts.into_iter().filter(|(start, end)| start < end);
    parts.map(|cells| Span { cells, ..span }).collect()
}

fn types() -> impl Strategy<Value = (KvType, KvType)> {
    (0usize..4, 0usize..4).prop_map(|(k, v)| (KvType::ALL[k], KvType::ALL[v]))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn bits_do_not_depend_on_isa_threads_or_chunks(
        (type_k, type_v) in types(),
        heads in 1usize..3, gqa in 1usize..9, c_k in 1usize..6, c_v in 1usize..6,
        n in 1usize..330,
        window in proptest::option::of(1usize..300),
        cap in proptest::option::of(5f32..50.0),
        sinks in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let shape = KvShape::new(heads, 32 * c_k, 32 * c_v, type_k, type_v).unwrap();
        let case = Case::new(shape, gqa, n, window, cap, sinks, seed / 2);
        let want = case.run(Isa::Scalar, 1, n);
        for isa in Isa::available() {
            prop_assert!(case.run(isa, 2, n) == want, "{} all at once", isa);
        }
        prop_assert!(case.run(Isa::best(), 1, 37) == want, "chunks of 37");
        prop_assert!(case.run(Isa::best(), 2, 1) == want, "token by token");
    }

    #[test]
    fn bits_do_not_depend_on_how_spans_come(
        (type_k, type_v) in types(),
        heads in 1usize..3, gqa in 1usize..4,
        n in 1usize..1700,
        window in proptest::option::of(1usize..900),
        sinks in any::<bool>(),
        holes in proptest::collection::vec((0usize..1700, 1usize..600), 0..3),
        parts in proptest::collection::vec(1usize..6, 1..4),
        chunk in 1usize..5,
        threads in 1usize..4,
        seed in any::<u64>(),
    ) {
        let shape = KvShape::new(heads, 32, 32, type_k, type_v).unwrap();
        let mut case = Case::new(shape, gqa, n, window, None, sinks, seed / 2);
        case.holes = holes.into_iter().map(|(start, len)| start..start + len).collect();
        let isa = Isa::best();
        let want = case.run(isa, 1, n);
        for chunk in [chunk.min(n), n] {
            // Every position token by token takes long.
            if n / chunk > 400 { continue; }
            let got = case.run_in_parts(isa, threads, chunk, &parts);
            prop_assert!(got == want, "chunks of {}", chunk);
        }
    }
}

#[test]
fn removed_cells_are_not_attended() {
    let shape = KvShape::new(2, 64, 32, KvType::F16, KvType::F16).unwrap();
    let mut case = Case::new(shape, 2, 1100, None, None, true, 11);
    case.holes = vec![3..9, 200..700, 800..801];
    let got = case.run(Isa::best(), 2, 1100);
    for (t, h) in [(0, 0), (17, 3), (750, 1), (801, 2), (1099, 3)] {
        for (c, want) in case.exact(t, h).into_iter().enumerate() {
            let got = f64::from(f32::from_bits(got[(t * case.heads + h) * 32 + c]));
            assert!(
                (got - want).abs() < 1e-5,
                "token {t} head {h}: {got} against {want}"
            );
        }
    }
}

#[test]
fn tokens_of_several_sequences_get_what_each_gets_alone() {
    for (ty, window, sinks) in [
        (KvType::F16, None, false),
        (KvType::Q8_0, Some(300), true),
        (KvType::Q4_0, None, true),
    ] {
        let shape = KvShape::new(2, 64, 32, ty, ty).unwrap();
        let mut case = Case::new(shape, 3, 1500, window, None, sinks, 21);
        case.holes.push(40..700);
        let want = case.run(Isa::best(), 1, 1500);
        // Positions of one text stand for sequences; their rows are in another order, and one row is nobody's.
        let positions = [1499, 0, 255, 256, 1024];
        let rows = [5, 0, 3, 1, 2];
        let (row_q, row_out) = (case.heads * shape.c_k, case.heads * shape.c_v);
        let mut q = vec![f32::NAN; 6 * row_q];
        for (position, row) in positions.iter().zip(rows) {
            q[row * row_q..][..row_q].copy_from_slice(&case.q[position * row_q..][..row_q]);
        }
        let spans = positions.map(|position| case.spans(position + 1));
        let tokens: Vec<Lone<'_>> = (0..positions.len())
            .map(|i| Lone {
                row: rows[i],
                position: positions[i],
                spans: &spans[i],
            })
            .collect();
        for isa in Isa::available() {
            let pool = Pool::new(3, Pinning::Free).unwrap();
            let mut out = vec![7.0; 6 * row_out];
            attend_each(&pool, isa, &shape, &case.params(), &q, &tokens, &mut out);
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            for (position, row) in positions.iter().zip(rows) {
                let got = bits(&out[row * row_out..][..row_out]);
                assert_eq!(
                    got,
                    want[position * row_out..][..row_out],
                    "{isa}: {position}"
                );
            }
            assert!(out[4 * row_out..][..row_out].iter().all(|&x| x == 7.0));
        }
    }
}

#[test]
fn long_pasts_split_over_threads_give_the_same_bits() {
    // One KV head leaves 3 threads too few groups, so that blocks are spread; of four heads groups are.
    for (heads, window, what) in [
        (1, None, "blocks"),
        (4, None, "groups"),
        (1, Some(700), "blocks in a window"),
    ] {
        let shape = KvShape::new(heads, 64, 64, KvType::F16, KvType::F16).unwrap();
        let case = Case::new(shape, 3, 2600, window, None, heads == 4, 5);
        let want = case.run(Isa::best(), 1, 512);
        assert!(
            case.run(Isa::best(), 3, 1) == want,
            "token by token, {what} over 3 threads"
        );
    }
}

#[test]
fn stale_cells_outside_the_window_or_behind_the_token_do_not_matter() {
    let shape = KvShape::new(1, 64, 64, KvType::F16, KvType::F16).unwrap();
    for window in [None, Some(70)] {
        let mut case = Case::new(shape, 5, 256, window, None, false, 3);
        let row = case.heads * 64;
        for (first, tokens) in [(150, 1), (150, 20)] {
            let run = |case: &Case| {
                let pool = Pool::new(1, Pinning::Free).unwrap();
                let mut partials = Partials::new(&shape, case.heads, 256, 0).unwrap();
                let mut out = vec![0.0; tokens * row];
                attend(
                    &pool,
                    Isa::best(),
                    &shape,
                    &case.params(),
                    first,
                    &case.q[first * row..][..tokens * row],
                    &case.spans(256),
                    Step::ONLY,
                    &mut partials,
                    &mut out,
                );
                out
            };
            let want = run(&case);
            assert!(want.iter().all(|x| x.is_finite()));
            let hidden = first + tokens..256;
            let before = 0..window.map_or(0, |w| first + 1 - w);
            for cell in hidden.chain(before) {
                let stale = [f32::NAN; 64];
                write_cell(&shape, &mut case.blocks[0], cell, &stale, &stale);
            }
            assert!(run(&case) == want, "window {window:?}, {tokens} tokens");
            let fresh = Case::new(shape, 5, 256, window, None, false, 3);
            case.blocks = fresh.blocks;
        }
    }
}

#[test]
fn close_to_exact_attention() {
    for (type_k, type_v, tolerance) in [
        (KvType::F16, KvType::F16, 1e-5),
        (KvType::Bf16, KvType::Bf16, 1e-5),
        // The query is quantised to 8 bits: about 1/254 of its largest value an element.
        (KvType::Q8_0, KvType::Q4_0, 2e-2),
        (KvType::Q4_0, KvType::Q8_0, 2e-2),
    ] {
        for (window, cap, sinks) in [
            (None, None, false),
            (Some(100), None, true),
            (None, Some(20.0), false),
        ] {
            let shape = KvShape::new(2, 64, 32, type_k, type_v).unwrap();
            let case = Case::new(shape, 2, 300, window, cap, sinks, 9);
            let got = case.run(Isa::best(), 2, 300);
            for (t, h) in [(0, 0), (17, 3), (255, 1), (256, 2), (299, 3)] {
                for (c, want) in case.exact(t, h).into_iter().enumerate() {
                    let got = f64::from(f32::from_bits(got[(t * case.heads + h) * 32 + c]));
                    assert!(
                        (got - want).abs() < tolerance,
                        "{type_k}/{type_v} token {t} head {h} value {c}: {got} against {want}"
                    );
                }
            }
        }
    }
}

#[test]
fn what_the_first_groups_fold_to_is_gone_on_with() {
    let (f16, q8) = (KvType::F16, KvType::Q8_0);
    // In the last one threads get whole groups.
    let cases = [
        (1, f16, 1, 1),
        (2, q8, 3, 1),
        (4, f16, 3, 2),
        (4, f16, 2, 2),
    ];
    for (heads, ty, threads, groups) in cases {
        let shape = KvShape::new(heads, 64, 32, ty, ty).unwrap();
        let case = Case::new(shape, 2, 2700, None, None, heads == 1, 23);
        let pool = Pool::new(threads, Pinning::Free).unwrap();
        let (t, size) = (case.n - 1, 2 + shape.c_v);
        let q = &case.q[t * case.heads * shape.c_k..];
        let spans = case.spans(case.n);
        let (first, rest) = spans.split_at(groups * GROUP);
        let (params, isa) = (case.params(), Isa::best());
        let mut partials = Partials::new(&shape, case.heads, case.n, 1).unwrap();
        let mut totals = vec![0.0; case.heads * size];
        attend_first_groups(
            &pool,
            isa,
            &shape,
            &params,
            t,
            q,
            first,
            &mut partials,
            &mut totals,
        );
        for (row, total) in totals.chunks_exact(size).enumerate() {
            partials.carry[row * 2 * size..][..size].copy_from_slice(total);
            // No group is open.
            partials.carry[row * 2 * size + size..][..size].fill(0.0);
        }
        partials.open = None;
        let step = Step {
            first: false,
            last: true,
        };
        let mut out = vec![0.0; case.heads * shape.c_v];
        attend(
            &pool,
            isa,
            &shape,
            &params,
            t,
            q,
            rest,
            step,
            &mut partials,
            &mut out,
        );
        let got: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
        let all = case.run(isa, 1, 512);
        assert_eq!(
            got,
            all[all.len() - got.len()..],
            "{heads} heads, {groups} groups"
        );
    }
}
