//! Placement never changes a bit: a model's logits are the same on every instruction set, with any number of threads and
//! however its tokens are cut into chunks.
//!
//! Compared are SHA-256 digests over the logits of all positions. The plain definition ([`cpu::Isa::Scalar`]) computes some
//! 0.3 G products a second, so of real models it reads a few tokens; a small made-up model takes it over the edges of
//! blocks of cells.

mod common;
#[path = "common/damaged/mod.rs"]
mod damaged;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cpu::Isa;
use cpu::attention::GROUP;
use engine::eval::LogitsHash;
use engine::model::{LoadOptions, Model};
use engine::session::{BLOCK_CELLS, Gating, KvType, Placing, Session, SessionOptions, Wanted};

/// Models take all cores, one at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How tokens are given to a session.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Cut {
    /// Prefill, so many at a time.
    Ubatch(usize),
    /// One decode step a token.
    Decode,
}

const CUTS: [Cut; 5] = [
    Cut::Ubatch(512),
    Cut::Ubatch(64),
    Cut::Ubatch(7),
    Cut::Ubatch(1),
    Cut::Decode,
];

/// Tokens of a model's reference texts, one after the other, and from the start again where they end.
fn tokens(reference: &str, n: usize) -> Vec<u32> {
    let tokens = common::reference(reference).into_iter().map(|p| p.token);
    tokens
        .collect::<Vec<_>>()
        .into_iter()
        .cycle()
        .take(n)
        .collect()
}

fn load(path: &Path, isa: Isa, threads: usize) -> Model {
    let options = LoadOptions {
        threads: Some(threads),
        isa: Some(isa),
        ..LoadOptions::default()
    };
    Model::load(path, &options, &mut |_| {}).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Instruction sets with two threads and with one; the plain one first.
fn machines() -> impl Iterator<Item = (Isa, usize)> {
    let isas = Isa::available().into_iter();
    isas.flat_map(|isa| [(isa, 2), (isa, 1)])
}

/// A text, and what its logits have to be: those of the first run, as far as both runs go.
struct Same<'a> {
    what: String,
    tokens: &'a [u32],
    /// Logits count from this position on; the tokens before go in as a prompt does.
    first: usize,
    kv: KvType,
    /// Digests of the logits from `first` up to each position.
    expected: Vec<String>,
    runs: usize,
    differ: Vec<String>,
}

impl<'a> Same<'a> {
    fn new(what: &str, tokens: &'a [u32], first: usize, kv: KvType) -> Self {
        Self {
            what: what.to_owned(),
            tokens,
            first,
            kv,
            expected: Vec::new(),
            runs: 0,
            differ: Vec::new(),
        }
    }

    fn run(&mut self, model: &Model, cut: Cut) {
        self.run_short(model, cut, usize::MAX);
    }

    /// A run that ends after `n` positions.
    fn run_short(&mut self, model: &Model, cut: Cut, n: usize) {
        self.run_placed(model, cut, n, Placing::RESIDENT);
    }

    /// The same with cells in host memory.
    fn run_placed(&mut self, model: &Model, cut: Cut, n: usize, placing: Placing) {
        let mut found = self.digests(model, cut, n, placing);
        self.runs += 1;
        let common = found.len().min(self.expected.len());
        // A digest is of all positions up to its own, so the last one tells.
        if common > 0 && found[common - 1] != self.expected[common - 1] {
            let (isa, threads) = (model.isa(), model.threads());
            let at = (0..common).find(|&i| found[i] != self.expected[i]);
            let at = self.first + at.expect("one differs");
            let run =
                format!("{isa}, {threads} threads, {cut:?}, {placing:?}, from position {at} on");
            self.differ.push(run);
        }
        self.expected.extend(found.drain(common..));
    }

    fn digests(&self, model: &Model, cut: Cut, n: usize, placing: Placing) -> Vec<String> {
        let options = SessionOptions {
            n_ctx: self.tokens.len(),
            type_k: self.kv,
            type_v: self.kv,
            ubatch: match cut {
                Cut::Ubatch(n) => n,
                Cut::Decode => 512,
            },
            placing,
            ..SessionOptions::for_model(model.config())
        };
        let mut session = Session::new(model, &options).expect("a session");
        let mut hash = LogitsHash::default();
        let mut digests = Vec::new();
        let (before, after) = self.tokens.split_at(self.first);
        let after = &after[..n.min(after.len())];
        session.prefill(before, Wanted::None).expect("it fits");
        match cut {
            Cut::Ubatch(_) => {
                let mut each = |_, logits: &[f32]| {
                    hash.update(logits);
                    digests.push(hash.hex());
                    ControlFlow::Continue(())
                };
                let done = session.prefill(after, Wanted::All(&mut each));
                done.expect("it fits");
            }
            Cut::Decode => {
                for &token in after {
                    session.decode(token).expect("it fits");
                    hash.update(session.logits());
                    digests.push(hash.hex());
                }
            }
        }
        assert_eq!(digests.len(), after.len());
        let spilled = session.spread().host_bytes > 0;
        let blocks = (self.first + after.len()).div_ceil(BLOCK_CELLS);
        assert_eq!(spilled, placing.window_blocks.is_some_and(|w| w < blocks));
        digests
    }

    fn check(self) {
        let Self {
            what,
            kv,
            runs,
            differ,
            ..
        } = self;
        println!(
            "{what}, {kv}: {runs} runs of up to {} positions",
            self.expected.len()
        );
        assert!(runs > 1, "{what}: nothing to compare");
        assert!(
            differ.is_empty(),
            "{what}, {kv}: of {runs} runs these differ from those before: {}",
            differ.join("; ")
        );
    }
}

/// Every instruction set on a real model. The plain definition reads `n_scalar` tokens; the others read a longer text,
/// with two threads at every cut, with one at `cuts_alone`.
fn on_every_isa(name: &str, reference: &str, cuts_alone: &[Cut], n_scalar: usize) {
    const N_CHUNKS: usize = 70;
    const N_SINGLE: usize = 16;
    let _alone = alone();
    let path = common::model_path(name);
    let tokens = tokens(reference, N_CHUNKS);
    let mut same = Same::new(name, &tokens, 0, KvType::F16);
    for (isa, threads) in machines() {
        match (isa, threads) {
            (Isa::Scalar, 2) => {
                same.run_short(&load(&path, isa, threads), Cut::Ubatch(7), n_scalar);
            }
            // The small model has this one.
            (Isa::Scalar, _) => {}
            _ => {
                let model = load(&path, isa, threads);
                let cuts = if threads == 1 { cuts_alone } else { &CUTS };
                for &cut in cuts {
                    let single = matches!(cut, Cut::Decode | Cut::Ubatch(1));
                    let n = if single { N_SINGLE } else { N_CHUNKS };
                    same.run_short(&model, cut, n);
                }
            }
        }
    }
    same.check();
}

#[test]
fn smollm2_is_the_same_on_every_isa() {
    on_every_isa("smollm2", "smollm2-135m-instruct.q4_1", &CUTS, 16);
}

#[test]
fn gemma3_is_the_same_on_every_isa() {
    let alone = [Cut::Ubatch(64), Cut::Decode];
    on_every_isa("gemma3-270m", "gemma-3-270m.q4_k_m", &alone, 4);
}

#[test]
fn qwen2_is_the_same_on_every_isa() {
    let alone = [Cut::Ubatch(64), Cut::Decode];
    on_every_isa("qwen2.5-0.5b", "qwen2.5-0.5b-instruct.q4_k_m", &alone, 3);
}

/// Over the edge of a block of cells. The small model has the plain definition there.
#[test]
fn smollm2_is_the_same_beyond_a_block() {
    let _alone = alone();
    let path = common::model_path("smollm2");
    let tokens = tokens("smollm2-135m-instruct.q4_1", BLOCK_CELLS + 20);
    let kvs = [KvType::F16, KvType::Q8_0, KvType::Q4_0];
    let mut texts = kvs.map(|kv| Same::new("smollm2", &tokens, BLOCK_CELLS - 20, kv));
    for (isa, threads) in machines().filter(|(isa, _)| *isa != Isa::Scalar) {
        let model = load(&path, isa, threads);
        for same in &mut texts {
            match (same.kv, threads) {
                (KvType::F16, 2) => {
                    CUTS[..3].iter().for_each(|&cut| same.run(&model, cut));
                    same.run(&model, Cut::Decode);
                }
                (_, 2) => {
                    same.run(&model, Cut::Ubatch(64));
                    same.run(&model, Cut::Decode);
                }
                _ => same.run(&model, Cut::Ubatch(512)),
            }
        }
    }
    if Isa::available().len() == 1 {
        let why = "this processor has no fast instruction set";
        return common::skipped("smollm2_is_the_same_beyond_a_block", why);
    }
    texts.into_iter().for_each(Same::check);
}

/// Over the edge of a window of cells, in layers that have one.
#[test]
fn gemma3_is_the_same_beyond_its_window() {
    let _alone = alone();
    let path = common::model_path("gemma3-270m");
    let model = load(&path, Isa::best(), 2);
    let window = model.config().window.expect("it has windows");
    let tokens = tokens("gemma-3-270m.q4_k_m", window + 40);
    let mut same = Same::new("gemma3-270m", &tokens, window - 10, KvType::F16);
    for cut in [Cut::Ubatch(512), Cut::Ubatch(100), Cut::Decode] {
        same.run(&model, cut);
    }
    same.run(&load(&path, Isa::best(), 1), Cut::Ubatch(64));
    same.check();
}

/// A single token over a long past is spread over threads in another way than many are.
#[test]
fn smollm2_is_the_same_over_a_long_past() {
    let _alone = alone();
    let path = common::model_path("smollm2");
    let past = BLOCK_CELLS * GROUP + 100;
    let tokens = tokens("smollm2-135m-instruct.q4_1", past + 12);
    let mut same = Same::new("smollm2", &tokens, past, KvType::F16);
    for threads in [2, 1] {
        let model = load(&path, Isa::best(), threads);
        same.run(&model, Cut::Decode);
        same.run(&model, Cut::Ubatch(512));
    }
    same.check();
}

/// Windows in blocks, all beyond in host memory; slots of the ring; what the CPU attends of the tail, all of it being what a gate makes of
/// it. With two slots the last tokens are a prompt, cut so that chunks cross blocks.
type Place = (usize, usize, f64);

fn placed_anywhere(
    name: &str,
    reference: &str,
    kvs: &[(KvType, &[Place])],
    groups: usize,
    n_last: usize,
) {
    let _alone = alone();
    let path = common::model_path(name);
    let model = load(&path, Isa::best(), 2);
    let past = groups * GROUP * BLOCK_CELLS + 300;
    let tokens = tokens(reference, past + n_last);
    for &(kv, places) in kvs {
        let mut same = Same::new(name, &tokens, past, kv);
        same.run(&model, Cut::Decode);
        for &(window, slots, share) in places {
            let placing = Placing {
                window_blocks: Some(window),
                tail_blocks: 100,
                staging_slots: slots,
                kv_share: share,
                // With and without, by turns.
                gating: if share == 1.0 {
                    Gating::On
                } else {
                    Gating::Off
                },
            };
            let cut = if slots == 2 {
                Cut::Ubatch(200)
            } else {
                Cut::Decode
            };
            same.run_placed(&model, cut, n_last, placing);
        }
        same.check();
    }
}

#[test]
fn smollm2_is_the_same_wherever_its_cells_are() {
    // The last one leaves a block in host memory.
    let f16: [Place; 6] = [
        (1, 1, 0.0),
        (1, 8, 1.0),
        (2, 2, 0.3),
        (4, 8, 0.0),
        (4, 1, 1.0),
        (9, 2, 0.3),
    ];
    let kvs = [
        (KvType::F16, &f16[..]),
        (KvType::Q4_0, &[(1, 1, 0.0), (2, 2, 0.3), (4, 8, 1.0)]),
    ];
    placed_anywhere("smollm2", "smollm2-135m-instruct.q4_1", &kvs, 2, 24);
}

/// Most of its layers have a window, whose rings are never spilled.
#[test]
fn gemma3_is_the_same_wherever_its_cells_are() {
    let kvs: [(KvType, &[Place]); 1] = [(
        KvType::F16,
        &[
            (1, 1, 0.0),
            (1, 8, 1.0),
            (2, 2, 0.3),
            (4, 1, 1.0),
            (5, 2, 0.3),
        ],
    )];
    placed_anywhere("gemma3-270m", "gemma-3-270m.q4_k_m", &kvs, 1, 12);
}

#[test]
fn qwen2_is_the_same_wherever_its_cells_are() {
    let kvs: [(KvType, &[Place]); 1] = [(KvType::Q8_0, &[(1, 8, 1.0), (2, 2, 0.3), (4, 1, 0.0)])];
    placed_anywhere("qwen2.5-0.5b", "qwen2.5-0.5b-instruct.q4_k_m", &kvs, 1, 8);
}

/// Window, slots and share change between tokens.
#[test]
fn cells_may_be_placed_anew_while_tokens_are_generated() {
    const STEPS: usize = 3;
    let _alone = alone();
    let model = load(&common::model_path("smollm2"), Isa::best(), 2);
    let past = 2 * GROUP * BLOCK_CELLS + 300;
    let ways = [
        (4, 8, 0.0),
        (2, 3, 0.5),
        (11, 1, 0.0),
        (1, 5, 1.0),
        (3, 8, 0.26),
    ];
    let tokens = tokens("smollm2-135m-instruct.q4_1", past + STEPS * ways.len());
    let digest = |moves: bool| {
        let placing = Placing {
            window_blocks: Some(9),
            tail_blocks: 100,
            staging_slots: 8,
            kv_share: 1.0,
            ..Placing::RESIDENT
        };
        assert!(placing.spills(tokens.len()), "else no placing is changed");
        let options = SessionOptions {
            n_ctx: tokens.len(),
            placing: if moves { placing } else { Placing::RESIDENT },
            ..SessionOptions::for_model(model.config())
        };
        let mut session = Session::new(&model, &options).expect("a session");
        session
            .prefill(&tokens[..past], Wanted::None)
            .expect("it fits");
        let mut hash = LogitsHash::default();
        for (tokens, (window, slots, share)) in tokens[past..].chunks(STEPS).zip(ways) {
            if moves {
                let placing = Placing {
                    window_blocks: Some(window),
                    staging_slots: slots,
                    kv_share: share,
                    ..placing
                };
                session.place(&placing).expect("host memory has room");
                assert!(session.spread().host_bytes > 0, "{window}");
            }
            for &token in tokens {
                session.decode(token).expect("it fits");
                hash.update(session.logits());
            }
            let in_host = moves && window < past.div_ceil(BLOCK_CELLS);
            assert_eq!(session.spread().host_bytes > 0, in_host, "{window}");
        }
        hash.hex()
    };
    assert_eq!(digest(false), digest(true));
}

/// A small model with several tensor types, odd sizes and a text of more than a block: everything, the plain
/// definition included, in every way.
#[test]
fn a_small_model_is_the_same_everywhere() {
    let _alone = alone();
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("small.gguf");
    damaged::Sketch::sound().write(&path);
    let tokens: Vec<u32> = (0..BLOCK_CELLS as u32 + 20)
        .map(|i| i * i % damaged::TOKENS as u32)
        .collect();
    let mut texts = KvType::ALL.map(|kv| Same::new("small", &tokens, 0, kv));
    for (isa, threads) in machines() {
        let model = load(&path, isa, threads);
        for same in &mut texts {
            let cuts = match same.kv {
                KvType::F16 => &CUTS[..],
                _ => &[Cut::Ubatch(64), Cut::Decode],
            };
            cuts.iter().for_each(|&cut| same.run(&model, cut));
        }
    }
    texts.into_iter().for_each(Same::check);
}
