//! Random operations on a cache, against lists of what each cell must hold.

#[path = "../../tests/common/damaged/mod.rs"]
mod damaged;

use super::file::Origin;
use super::*;
use crate::backend::{Cpu, Step};
use crate::model::{LoadOptions, Model};
use ::cpu::attention::{KvType, Params, Partials, Span, attend, write_cell};
use ::cpu::mem::Buffer;
use proptest::prelude::*;
use std::collections::HashMap;
use std::path::PathBuf;

const N_CTX: usize = 3000;
const UBATCH: usize = 300;
const SEQUENCES_MAX: usize = 4;

/// One operation; numbers are taken modulo what there is.
#[derive(Debug, Clone)]
enum Op {
    /// Tokens, and whether they were generated.
    Append(usize, bool),
    Truncate(usize),
    Remove(usize, usize),
    Fork,
    Select(usize),
    Forget(usize),
    /// A block goes to host memory before it must.
    Spill(usize),
    /// One comes back before it must.
    Fetch(usize),
    /// Another window, other slots, another share.
    Place(usize, usize, f64),
    /// To a file.
    Save,
    /// From a file, if one was written.
    Restore,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (1..2 * UBATCH, any::<bool>()).prop_map(|(n, generated)| Op::Append(n, generated)),
        4 => (1usize..4).prop_map(|n| Op::Append(n, true)),
        2 => any::<usize>().prop_map(Op::Truncate),
        2 => (any::<usize>(), 1usize..900).prop_map(|(start, len)| Op::Remove(start, len)),
        2 => Just(Op::Fork),
        3 => any::<usize>().prop_map(Op::Select),
        1 => any::<usize>().prop_map(Op::Forget),
        2 => any::<usize>().prop_map(Op::Spill),
        2 => any::<usize>().prop_map(Op::Fetch),
        2 => (1usize..8, 1usize..6, 0.0..=1.0).prop_map(|(w, slots, share)| Op::Place(w, slots, share)),
        1 => Just(Op::Save),
        1 => Just(Op::Restore),
    ]
}

/// What a sequence must hold: for each position the number of its token, unless it was removed.
#[derive(Debug, Clone, Default)]
struct Expected(Vec<Option<u32>>);

/// A value of a cell; f16 holds all of them exactly.
fn value(token: u32, layer: usize, head: usize, c: usize, is_k: bool) -> f32 {
    let mut x = u64::from(token) * 1009 + (layer * 4001 + head * 401 + c * 7) as u64 + 1;
    x = (x ^ (x >> 7)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    if is_k {
        (x % 5) as f32 - 2.0
    } else {
        (x % 2001) as f32 - 1000.0
    }
}

fn rows(tokens: &[u32], layer: usize, heads: usize, c: usize, is_k: bool) -> Vec<f32> {
    let mut rows = Vec::with_capacity(tokens.len() * heads * c);
    for &token in tokens {
        for head in 0..heads {
            rows.extend((0..c).map(|c| value(token, layer, head, c, is_k)));
        }
    }
    rows
}

fn array(values: &[f32]) -> Buffer<f32> {
    let mut array = Buffer::new(values.len()).unwrap();
    array.copy_from_slice(values);
    array
}

struct World<'m> {
    model: &'m Model,
    config: Config,
    cache: Cache<Cpu<'m>>,
    backend: Cpu<'m>,
    expected: HashMap<usize, Expected>,
    /// What the file holds.
    saved: Option<Expected>,
    folder: tempfile::TempDir,
    tokens: u32,
}

impl<'m> World<'m> {
    fn new(model: &'m Model, placing: Placing, window: Option<usize>) -> Self {
        let mut config = model.config().clone();
        config.window = window;
        config.windowed = vec![window.is_some(), false];
        let shape = KvShape::new(
            config.heads_kv,
            config.head_k,
            config.head_v,
            KvType::F16,
            KvType::F16,
        )
        .unwrap();
        let cache: Cache<Cpu<'m>> = Cache::new(&config, shape, N_CTX, 1, UBATCH, placing);
        let mut backend = Cpu::new(model, &shape, UBATCH, N_CTX, cache.slots() > 0).unwrap();
        backend
            .make_slots(cache.slots(), shape.block_bytes())
            .unwrap();
        Self {
            model,
            config,
            cache,
            backend,
            expected: HashMap::from([(0, Expected::default())]),
            saved: None,
            folder: tempfile::tempdir().unwrap(),
            tokens: 0,
        }
    }

    fn expected(&mut self) -> &mut Expected {
        self.expected.get_mut(&self.cache.selected()).unwrap()
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("sequence.kv")
    }

    fn origin() -> Origin {
        Origin {
            model: "made up".to_owned(),
            rotated: (false, false),
        }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Append(n, generated) => self.append(n, generated),
            Op::Truncate(n) => {
                let held = self.expected().0.len();
                let wanted = n % (held + 1);
                let kept = self.cache.truncate(wanted);
                assert!(kept == wanted || kept == 0);
                if self.config.window.is_none() {
                    assert_eq!(kept, wanted);
                }
                self.expected().0.truncate(kept);
            }
            Op::Remove(start, len) => {
                let held = self.expected().0.len();
                if held == 0 {
                    return;
                }
                let range = start % held..start % held + len;
                let n = self.cache.remove(range.clone());
                let expected = self.expected();
                if range.end >= held {
                    assert!(n == range.start || n == 0);
                    expected.0.truncate(n);
                } else {
                    assert_eq!(n, held);
                    expected.0[range].fill(None);
                }
            }
            Op::Fork => {
                if self.expected.len() < SEQUENCES_MAX {
                    let copy = self.expected().clone();
                    let id = self.cache.fork();
                    assert!(self.expected.insert(id, copy).is_none(), "a new number");
                }
            }
            Op::Select(n) => {
                let id = n % (SEQUENCES_MAX + 1);
                let exists = self.expected.contains_key(&id);
                assert_eq!(self.cache.select(id), exists);
            }
            Op::Forget(n) => {
                let id = n % (SEQUENCES_MAX + 1);
                let can = self.expected.contains_key(&id) && id != self.cache.selected();
                assert_eq!(self.cache.forget(id), can);
                if can {
                    self.expected.remove(&id);
                }
            }
            Op::Spill(n) | Op::Fetch(n) => {
                if self.cache.slots() == 0 {
                    return;
                }
                let spills = matches!(op, Op::Spill(_));
                let all: Vec<Id> = self
                    .cache
                    .sequence()
                    .full
                    .iter()
                    .map(|(_, id)| id)
                    .filter(|&id| self.cache.full.is_on_device(id) == spills)
                    .collect();
                if all.is_empty() || !spills && self.cache.full.device_room() == 0 {
                    return;
                }
                let id = all[n % all.len()];
                let (store, backend) = (&mut self.cache.full, &mut self.backend);
                if spills {
                    store.spill(backend, id).unwrap();
                } else {
                    store.fetch(backend, id).unwrap();
                }
            }
            Op::Place(window, slots, share) => {
                if self.cache.slots() == 0 {
                    return;
                }
                let placing = Placing {
                    window_blocks: Some(window),
                    staging_slots: slots,
                    kv_share: share,
                    ..Placing::RESIDENT
                };
                self.cache.place(&mut self.backend, &placing).unwrap();
                assert!(self.cache.full.in_device() <= window);
            }
            Op::Save => {
                let expected = self.expected().clone();
                // Removed tokens are still tokens of the text.
                let tokens: Vec<u32> = expected.0.iter().map(|t| t.unwrap_or(0)).collect();
                self.cache
                    .save(
                        &self.backend,
                        &Self::origin(),
                        &tokens,
                        "note",
                        &self.path(),
                    )
                    .unwrap();
                self.saved = Some(expected);
            }
            Op::Restore => {
                let Some(saved) = self.saved.clone() else {
                    return;
                };
                let path = self.path();
                let restored = self
                    .cache
                    .restore(&mut self.backend, &Self::origin(), &path)
                    .unwrap();
                assert_eq!(restored.tokens.len(), saved.0.len());
                assert_eq!(restored.note, "note");
                *self.expected() = saved;
            }
        }
    }

    fn append(&mut self, n: usize, generated: bool) {
        let held = self.expected().0.len();
        let n = n.min(N_CTX - held).min(UBATCH).min(self.cache.chunk_max());
        if n == 0 {
            return;
        }
        let first = self.tokens;
        self.tokens += n as u32;
        let tokens: Vec<u32> = (first..self.tokens).collect();
        self.expected().0.extend(tokens.iter().map(|&t| Some(t)));
        self.cache.begin(&mut self.backend, n, generated).unwrap();
        let c = self.config.clone();
        for layer in 0..c.n_layer {
            let k = array(&rows(&tokens, layer, c.heads_kv, c.head_k, true));
            let v = array(&rows(&tokens, layer, c.heads_kv, c.head_v, false));
            self.cache.append(&mut self.backend, layer, &k, &v);
            let q = array(&rows(&tokens, layer + 7, c.heads, c.head_k, true));
            let mut out = Buffer::new(n * c.heads * c.head_v).unwrap();
            self.cache.attend(&mut self.backend, layer, &q, &mut out);
            let expected = self.expected().clone();
            // The reference is slow: not every prompt is compared.
            if n < 4 || first.is_multiple_of(8) {
                let wanted = self.attended(layer, held, &expected, &q);
                assert!(
                    out[..] == wanted[..],
                    "layer {layer}, {n} tokens from {held}"
                );
            }
        }
        self.cache.advance();
    }

    /// Attention over blocks made anew from what must be there.
    fn attended(&self, layer: usize, position: usize, expected: &Expected, q: &[f32]) -> Vec<f32> {
        let (c, shape) = (&self.config, self.cache.shape);
        let n = expected.0.len();
        let mut blocks: Vec<Buffer<u8>> = (0..n.div_ceil(CELLS))
            .map(|_| Buffer::new(shape.block_bytes()).unwrap())
            .collect();
        let mut spans: Vec<(usize, usize, usize)> = Vec::new();
        for (cell, token) in expected.0.iter().enumerate() {
            let Some(token) = *token else { continue };
            let (block, at) = (cell / CELLS, cell % CELLS);
            let k = rows(&[token], layer, c.heads_kv, c.head_k, true);
            let v = rows(&[token], layer, c.heads_kv, c.head_v, false);
            write_cell(&shape, &mut blocks[block], at, &k, &v);
            match spans.last_mut() {
                Some(last) if last.0 == block && last.2 == at => last.2 = at + 1,
                _ => spans.push((block, at, at + 1)),
            }
        }
        let spans: Vec<Span<'_>> = spans
            .iter()
            .map(|&(index, start, end)| Span {
                index,
                cells: (start, end),
                bytes: &blocks[index],
            })
            .collect();
        let params = Params {
            heads: c.heads,
            scale: c.attention_scale,
            soft_cap: c.attention_soft_cap,
            window: c.window_of(layer),
            sinks: None,
        };
        let mut partials = Partials::new(&shape, c.heads, n, 0).unwrap();
        let mut out = vec![0.0; q.len() / c.head_k * c.head_v];
        attend(
            &self.model.pool,
            self.model.isa,
            &shape,
            &params,
            position,
            q,
            &spans,
            Step::ONLY,
            &mut partials,
            &mut out,
        );
        out
    }

    /// Every cell of every sequence, and every count.
    fn check(&self) {
        let mut owners: HashMap<(bool, Id), usize> = HashMap::new();
        for (number, sequence) in self.cache.sequences.iter().enumerate() {
            let Some(sequence) = sequence else {
                assert!(!self.expected.contains_key(&number));
                continue;
            };
            let expected = &self.expected[&number];
            assert_eq!(sequence.n, expected.0.len());
            for (track, store, is_ring) in [
                (&sequence.full, &self.cache.full, false),
                (&sequence.ring, &self.cache.ring, true),
            ] {
                let mut seen = 0;
                for (block, id) in track.iter() {
                    *owners.entry((is_ring, id)).or_default() += 1;
                    let mut bytes = Vec::new();
                    store.save(&self.backend, id, &mut bytes).unwrap();
                    let cells: Vec<(usize, u32)> = sequence
                        .parts(block, sequence.n)
                        .flat_map(|(start, end)| start..end)
                        .map(|cell| {
                            let token = expected.0[block * CELLS + cell];
                            (cell, token.expect("a cell that was not removed"))
                        })
                        .collect();
                    seen += cells.len();
                    self.check_cells(&bytes, is_ring, &cells);
                }
                let from = track.first * CELLS;
                let wanted = expected.0.iter().skip(from).flatten().count();
                let has_layers = !is_ring || self.config.window.is_some();
                assert_eq!(
                    seen,
                    if has_layers { wanted } else { 0 },
                    "cells of {number}"
                );
                if is_ring {
                    assert!(track.slabs.len() <= self.cache.ring_blocks);
                    let w = self.config.window.unwrap_or(usize::MAX);
                    assert!(
                        from <= (sequence.n + 1).saturating_sub(w),
                        "what is seen is kept"
                    );
                }
            }
        }
        for (&(is_ring, id), &count) in &owners {
            let store = if is_ring {
                &self.cache.ring
            } else {
                &self.cache.full
            };
            assert!(store.is_owned(id));
            assert_eq!(store.is_shared(id), count > 1, "owners of {id:?}");
        }
        for (is_ring, store) in [(false, &self.cache.full), (true, &self.cache.ring)] {
            let slabs = owners.keys().filter(|(ring, _)| *ring == is_ring).count();
            assert_eq!(store.in_device() + store.in_host(), slabs, "no leak");
            assert!(store.in_device() <= store.device_max());
        }
    }

    fn check_cells(&self, slab: &[u8], is_ring: bool, cells: &[(usize, u32)]) {
        let (c, shape) = (&self.config, self.cache.shape);
        let layers = self.cache.layers.iter().enumerate();
        for (layer, place) in layers.filter(|(_, l)| l.windowed == is_ring) {
            let mut block = Buffer::new(shape.block_bytes()).unwrap();
            for &(cell, token) in cells {
                let k = rows(&[token], layer, c.heads_kv, c.head_k, true);
                let v = rows(&[token], layer, c.heads_kv, c.head_v, false);
                write_cell(&shape, &mut block, cell, &k, &v);
            }
            let found = &slab[place.at.clone()];
            // Values that are not zero are those of these cells.
            for (at, (wanted, found)) in block.chunks(2).zip(found.chunks(2)).enumerate() {
                assert!(
                    wanted == [0, 0] || wanted == found,
                    "bytes {} of layer {layer}, cells {cells:?}",
                    2 * at
                );
            }
        }
    }
}

fn model() -> Model {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    damaged::Sketch::sound().write(&path);
    let options = LoadOptions {
        threads: Some(2),
        ..LoadOptions::default()
    };
    Model::load(&path, &options, &mut |_| {}).unwrap()
}

fn placing() -> impl Strategy<Value = Placing> {
    (1usize..8, 1usize..6, 0.0..=1.0).prop_map(|(window, slots, share)| Placing {
        window_blocks: Some(window),
        tail_blocks: 1000,
        staging_slots: slots,
        kv_share: share,
        gating: Gating::Off,
    })
}

#[test]
fn ten_thousand_operations_leave_every_cell_where_it_belongs() {
    let model = model();
    let config = ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(40)
    };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let cases = (
        prop_oneof![5 => placing(), 1 => Just(Placing::RESIDENT)],
        proptest::option::of(1usize..700),
        proptest::collection::vec(op(), 250),
    );
    runner
        .run(&cases, |(placing, window, ops)| {
            let mut world = World::new(&model, placing, window);
            for (i, op) in ops.iter().enumerate() {
                world.apply(op);
                if i % 25 == 24 {
                    world.check();
                }
            }
            world.check();
            for id in 0..=SEQUENCES_MAX {
                world.cache.forget(id);
            }
            world.cache.truncate(0);
            assert_eq!(
                (world.cache.full.in_device(), world.cache.full.in_host()),
                (0, 0)
            );
            assert_eq!(world.cache.ring.in_device(), 0);
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_full_tail_and_a_small_window_are_errors() {
    let model = model();
    let placing = Placing {
        window_blocks: Some(2),
        tail_blocks: 1,
        staging_slots: 2,
        kv_share: 0.0,
        gating: Gating::Off,
    };
    let mut world = World::new(&model, placing, None);
    for _ in 0..3 {
        world.append(CELLS, false);
    }
    world.check();
    let error = world.cache.begin(&mut world.backend, 1, true).unwrap_err();
    assert!(
        matches!(
            error,
            Error::TailFull {
                window: 512,
                tail: 256
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("--spill"));
    world.check();
}

#[test]
fn steps_that_stream_what_the_step_before_streamed_are_told_of() {
    use crate::backend::Again::{Anew, No, Resident, Spilled};
    let model = model();
    let again = |world: &mut World<'_>| {
        world.append(1, true);
        world.cache.again()
    };
    for (staging_slots, kv_share) in [(1, 0.0), (2, 0.0), (5, 0.0), (40, 0.0), (4, 0.5), (4, 1.0)] {
        let placing = Placing {
            window_blocks: Some(3),
            tail_blocks: 1000,
            staging_slots,
            kv_share,
            gating: Gating::Off,
        };
        let mut world = World::new(&model, placing, None);
        for _ in 0..7 {
            world.append(CELLS, false);
        }
        let mut next = || again(&mut world);
        // A block is begun, and one goes to host memory; then nothing changes. The first token found no slot filled, so what it copied came in other batches.
        assert_eq!([next(), next(), next(), next()], [No, No, Spilled, Spilled]);
        world.cache.set_share(1.0 - kv_share);
        let mut next = || again(&mut world);
        let changes = kv_share != 0.5;
        let first = if changes { No } else { Spilled };
        assert_eq!([next(), next(), next()], [first, first, Spilled]);
        // What was copied ahead is of no use, or is what is there.
        world
            .cache
            .place(
                &mut world.backend,
                &Placing {
                    staging_slots: 1,
                    ..placing
                },
            )
            .unwrap();
        let mut next = || again(&mut world);
        assert_eq!([next(), next(), next()], [No, No, Spilled]);
    }
    let mut world = World::new(&model, Placing::RESIDENT, None);
    world.append(CELLS, false);
    let mut next = || again(&mut world);
    assert_eq!([next(), next(), next()], [Anew, Resident, Resident]);
}

#[test]
fn where_memory_is_gone_cells_go_to_host_memory() {
    let model = model();
    let placing = Placing {
        window_blocks: Some(8),
        tail_blocks: 3,
        staging_slots: 2,
        kv_share: 0.0,
        gating: Gating::Off,
    };
    let mut world = World::new(&model, placing, None);
    world.append(CELLS, false);
    world.cache.full.memory_slabs = 4;
    for _ in 0..4 {
        world.append(CELLS, false);
    }
    world.append(2, true);
    world.check();
    // A slab's memory is left for what else a step needs.
    let store = &mut world.cache.full;
    assert_eq!((store.in_device(), store.in_host()), (3, 3));
    assert!(store.provide(&world.backend, 1).is_ok());
    assert!(store.provide(&world.backend, 2).is_err());
    world.append(CELLS - 2, false);
    // The tail is full.
    let error = world.cache.begin(&mut world.backend, 1, true).unwrap_err();
    assert!(matches!(error, Error::TailFull { .. }), "{error}");
}

#[test]
fn damaged_and_foreign_files_are_refused_and_change_nothing() {
    let model = model();
    let mut world = World::new(&model, Placing::RESIDENT, Some(300));
    world.append(UBATCH, false);
    world.append(200, false);
    world.apply(&Op::Save);
    let path = world.path();
    let sound = std::fs::read(&path).unwrap();
    world.append(7, false);
    let restore = |world: &mut World<'_>, origin: &Origin| {
        let path = world.path();
        let result = world.cache.restore(&mut world.backend, origin, &path);
        if result.is_ok() {
            *world.expected() = world.saved.clone().unwrap();
        }
        world.check();
        result.map_err(|e| e.to_string())
    };
    let origin = World::origin();
    for at in [
        0,
        3,
        7,
        8,
        15,
        20,
        200,
        sound.len() / 2,
        sound.len() - 33,
        sound.len() - 1,
    ] {
        let mut bad = sound.clone();
        bad[at] ^= 1;
        std::fs::write(&path, &bad).unwrap();
        let error = restore(&mut world, &origin).unwrap_err();
        assert!(
            error.contains("no sound session file"),
            "byte {at}: {error}"
        );
    }
    for len in [0, 1, 15, 16, 47, 48, 300, sound.len() / 2, sound.len() - 1] {
        std::fs::write(&path, &sound[..len]).unwrap();
        let error = restore(&mut world, &origin).unwrap_err();
        assert!(
            error.contains("no sound session file"),
            "{len} bytes: {error}"
        );
    }
    std::fs::write(&path, &sound).unwrap();
    for other in [
        Origin {
            model: "another".to_owned(),
            ..origin.clone()
        },
        Origin {
            rotated: (true, false),
            ..origin.clone()
        },
    ] {
        let error = restore(&mut world, &other).unwrap_err();
        assert!(error.contains("is of another"), "{error}");
    }
    assert_eq!(world.cache.n(), UBATCH + 207);
    let restored = restore(&mut world, &origin).unwrap();
    assert_eq!(restored.tokens.len(), UBATCH + 200);
    std::fs::remove_file(&path).unwrap();
    assert!(
        restore(&mut world, &origin)
            .unwrap_err()
            .contains("sequence.kv")
    );
}
