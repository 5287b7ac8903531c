//! Steps over tokens of several sequences give each sequence what it would get alone, to the last bit.

mod common;
#[path = "common/damaged/mod.rs"]
mod damaged;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::ControlFlow;
use std::path::Path;

use engine::model::{ComputeDevice, LoadOptions, Model};
use engine::session::{
    BLOCK_CELLS, Gating, KvType, Part, Placing, SequenceId, Session, SessionOptions, TokenOrigin,
    Wanted, Wants,
};

fn load(path: &Path) -> Model {
    load_to(path, ComputeDevice::Cpu)
}

fn load_to(path: &Path, device: ComputeDevice) -> Model {
    let options = LoadOptions {
        threads: Some(2),
        device,
        ..LoadOptions::default()
    };
    Model::load(path, &options, &mut |_| {}).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// A small model.
fn sketched(device: ComputeDevice) -> Model {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    damaged::Sketch::sound().write(&path);
    load_to(&path, device)
}

fn digest(logits: &[f32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    logits.iter().for_each(|x| x.to_bits().hash(&mut hasher));
    hasher.finish()
}

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) as usize % n
    }
}

/// What a text gives alone, as a prompt: a digest of the logits of each position.
fn as_prompt(model: &Model, options: &SessionOptions, text: &[u32]) -> Vec<u64> {
    let mut session = Session::new(model, options).unwrap();
    let mut digests = Vec::new();
    session
        .prefill(
            text,
            Wanted::All(&mut |_, logits| {
                digests.push(digest(logits));
                ControlFlow::Continue(())
            }),
        )
        .unwrap();
    digests
}

/// What a text gives alone, as prompt and as generated tokens in turn, where a digest is there to be compared with.
fn compare_alone(model: &Model, options: &SessionOptions, text: &[u32], taken: &[Taken]) {
    let mut session = Session::new(model, options).unwrap();
    for one in taken {
        let position = session.n_past();
        let tokens = &text[position..][..one.tokens];
        match one.origin {
            TokenOrigin::Prompt => session.prefill(tokens, Wanted::Last).unwrap(),
            TokenOrigin::Generated => tokens.iter().for_each(|&t| session.decode(t).unwrap()),
        }
        if let Some(digest_there) = one.digest {
            let what = format!("{} {:?} after {position}", one.tokens, one.origin);
            assert_eq!(digest_there, digest(session.logits()), "{what}");
        }
    }
}

/// Tokens that a sequence took, and what came of them where that was asked.
#[derive(Debug, Clone)]
struct Taken {
    tokens: usize,
    origin: TokenOrigin,
    digest: Option<u64>,
}

/// The first `n` tokens.
fn begin_of(taken: &[Taken], n: usize) -> Vec<Taken> {
    let mut left = n;
    let mut begin = Vec::new();
    for one in taken {
        let tokens = one.tokens.min(left);
        left -= tokens;
        if tokens > 0 {
            begin.push(Taken {
                tokens,
                origin: one.origin,
                digest: one.digest.filter(|_| tokens == one.tokens),
            });
        }
    }
    begin
}

#[derive(Debug)]
struct Running {
    sequence: SequenceId,
    text: usize,
    done: usize,
    taken: Vec<Taken>,
}

/// Texts side by side, in parts of random sizes, some of them begun from others, until all have ended.
fn side_by_side(model: &Model, options: &SessionOptions, texts: &[Vec<u32>], seed: u64) {
    let mut session = Session::new(model, options).unwrap();
    let alike = session.computes_alike();
    let expected: Vec<Vec<u64>> = texts
        .iter()
        .filter(|_| alike)
        .map(|text| as_prompt(model, options, text))
        .collect();
    let mut random = Random(seed);
    let mut running: Vec<Running> = (0..texts.len())
        .map(|text| Running {
            sequence: session.create(),
            text,
            done: 0,
            taken: Vec::new(),
        })
        .collect();
    let (mut compared, mut branches) = (0, 0);
    while !running.is_empty() {
        let mut parts = Vec::new();
        let mut room = options.ubatch;
        for (i, one) in running.iter().enumerate() {
            let left = texts[one.text].len() - one.done;
            let n = match random.below(4) {
                0 => 0,
                1 => 1,
                _ => random.below(70),
            };
            let n = n.min(left).min(room);
            if n > 0 {
                room -= n;
                parts.push((i, n));
            }
        }
        let given: Vec<Part<'_>> = parts
            .iter()
            .map(|&(i, n)| Part {
                sequence: running[i].sequence,
                tokens: &texts[running[i].text][running[i].done..][..n],
                origin: if n == 1 {
                    TokenOrigin::Generated
                } else {
                    TokenOrigin::Prompt
                },
                wants: if n == 1 || n % 2 == 0 {
                    Wants::Logits
                } else {
                    Wants::Nothing
                },
            })
            .collect();
        let wants = |part: &&Part<'_>| part.wants == Wants::Logits;
        let wanted = given.iter().filter(wants).count();
        let mut seen = vec![None; parts.len()];
        session
            .step(&given, &mut |part, logits| {
                seen[part] = Some(digest(logits));
            })
            .unwrap();
        assert_eq!(seen.iter().flatten().count(), wanted);
        compared += wanted;
        let origins: Vec<TokenOrigin> = given.iter().map(|part| part.origin).collect();
        for ((&(i, n), digest), origin) in parts.iter().zip(seen).zip(origins) {
            let Running { text, done, .. } = running[i];
            if let (true, Some(digest)) = (alike, digest) {
                let (position, n) = (done + n - 1, parts.len());
                let wanted = expected[text][position];
                assert_eq!(digest, wanted, "text {text} at {position}, {n} parts");
            }
            running[i].taken.push(Taken {
                tokens: n,
                origin,
                digest,
            });
            running[i].done += n;
            assert_eq!(
                session.n_past_of(running[i].sequence),
                Some(running[i].done)
            );
        }
        // One begins anew with what it has in common with another.
        if random.below(6) == 0 && branches < 4 {
            let of = random.below(running.len());
            let Running {
                sequence,
                text,
                done,
                ..
            } = running[of];
            let (branch, kept) = session.branch(sequence, random.below(done + 1));
            branches += 1;
            let taken = begin_of(&running[of].taken, kept);
            running.push(Running {
                sequence: branch,
                text,
                done: kept,
                taken,
            });
        }
        running.retain(|one| {
            let goes_on = one.done < texts[one.text].len();
            if !goes_on {
                assert!(session.forget(one.sequence));
                if !alike {
                    compare_alone(model, options, &texts[one.text], &one.taken);
                }
            }
            goes_on
        });
    }
    assert!(
        compared > texts.len() * 4 && branches > 0,
        "{compared}, {branches}"
    );
    let spread = session.spread();
    assert_eq!(
        (spread.device_bytes, spread.host_bytes),
        (0, 0),
        "no block is left"
    );
}

fn texts(n_vocab: usize, lengths: &[usize]) -> Vec<Vec<u32>> {
    let text = |(i, n): (usize, &usize)| {
        let mut random = Random(i as u64 + 1);
        (0..*n).map(|_| random.below(n_vocab) as u32).collect()
    };
    lengths.iter().enumerate().map(text).collect()
}

/// The first of the largest.
fn best(logits: &[f32]) -> (usize, u32) {
    let first = |best: (usize, f32), (i, &x): (usize, &f32)| if x > best.1 { (i, x) } else { best };
    let (i, x) = logits
        .iter()
        .enumerate()
        .fold((0, f32::NEG_INFINITY), first);
    (i, x.to_bits())
}

/// With real models, whose texts are their own: what is chosen among the largest logits alone is what is chosen among all.
#[test]
fn the_largest_logits_are_those_of_all() {
    // Output matrices of blocks of 32 and of super-blocks.
    for (name, steps) in [("smollm2", 80), ("qwen2.5-0.5b", 20)] {
        largest_are_those_of_all(&load(&common::model_path(name)), steps);
    }
}

fn largest_are_those_of_all(model: &Model, steps: usize) {
    let options = SessionOptions {
        n_ctx: 512,
        n_seq: 5,
        ..SessionOptions::for_model(model.config())
    };
    let n_vocab = model.config().n_vocab;
    let (mut session, mut other) = (
        Session::new(model, &options).unwrap(),
        Session::new(model, &options).unwrap(),
    );
    let prompts = texts(n_vocab, &[3, 11, 7, 20, 2]);
    let sequences: Vec<_> = prompts
        .iter()
        .map(|_| (session.create(), other.create()))
        .collect();
    let mut next = prompts;
    for step in 0..steps {
        let origin = if step == 0 {
            TokenOrigin::Prompt
        } else {
            TokenOrigin::Generated
        };
        let run = |session: &mut Session<'_>, which: usize, wants: Wants| {
            let parts: Vec<Part<'_>> = next
                .iter()
                .zip(&sequences)
                .map(|(tokens, pair)| Part {
                    sequence: [pair.0, pair.1][which],
                    tokens,
                    origin,
                    wants,
                })
                .collect();
            let mut chosen = vec![None; parts.len()];
            session
                .step(&parts, &mut |part, logits| {
                    chosen[part] = Some(best(&logits[..n_vocab - 100]))
                })
                .unwrap();
            chosen
        };
        let all = run(&mut session, 0, Wants::Logits);
        let largest = run(&mut other, 1, Wants::Largest(n_vocab - 100));
        assert_eq!(all, largest, "step {step}");
        next = all
            .into_iter()
            .map(|chosen| vec![chosen.unwrap().0 as u32])
            .collect();
    }
}

#[test]
fn several_sequences_get_what_each_gets_alone_wherever_cells_are() {
    wherever_cells_are(ComputeDevice::Cpu);
}

#[test]
fn on_a_gpu_too() {
    if let Some(device) = common::gpu("on_a_gpu_too") {
        wherever_cells_are(device);
    }
}

fn wherever_cells_are(device: ComputeDevice) {
    let model = sketched(device);
    let texts = texts(damaged::TOKENS, &[40, 300, 7, 600, 1500, 129]);
    let spilled = |window, share| Placing {
        window_blocks: Some(window),
        tail_blocks: 100,
        staging_slots: 3,
        kv_share: share,
        gating: Gating::Off,
    };
    let kvs = [KvType::F16, KvType::Q8_0, KvType::Q4_0];
    // With one block of device memory, sequences go one after another.
    let placings = [
        Placing::RESIDENT,
        spilled(7, 0.0),
        spilled(3, 1.0),
        spilled(1, 0.5),
    ];
    for (seed, (kv, placing)) in kvs.into_iter().cycle().zip(placings).enumerate() {
        let options = SessionOptions {
            n_ctx: 2 * 1500,
            n_seq: 10,
            type_k: kv,
            type_v: kv,
            ubatch: 100,
            placing,
            device,
            ..SessionOptions::for_model(model.config())
        };
        side_by_side(&model, &options, &texts, seed as u64 + 5);
    }
}

#[test]
fn answers_side_by_side_get_what_each_gets_alone() {
    answers(ComputeDevice::Cpu);
}

#[test]
fn answers_on_a_gpu() {
    if let Some(device) = common::gpu("answers_on_a_gpu") {
        answers(device);
    }
}

/// Steps of one token of each of the same sequences, which a GPU does again as they were recorded; over the ends of blocks, with one that
/// comes and goes, with prompts and tokens alone between.
fn answers(device: ComputeDevice) {
    let model = sketched(device);
    let options = SessionOptions {
        n_ctx: 4096,
        n_seq: 3,
        ubatch: 512,
        device,
        ..SessionOptions::for_model(model.config())
    };
    let texts = texts(damaged::TOKENS, &[600, 600, 600]);
    let mut session = Session::new(&model, &options).unwrap();
    let mut running: Vec<Running> = (0..texts.len())
        .map(|text| Running {
            sequence: session.create(),
            text,
            done: 0,
            taken: Vec::new(),
        })
        .collect();
    let mut step = |taking: &[(usize, usize, TokenOrigin)]| {
        let given: Vec<Part<'_>> = taking
            .iter()
            .map(|&(i, n, origin)| Part {
                sequence: running[i].sequence,
                tokens: &texts[i][running[i].done..][..n],
                origin,
                wants: Wants::Logits,
            })
            .collect();
        let mut seen = vec![None; given.len()];
        let mut each = |part: usize, logits: &[f32]| seen[part] = Some(digest(logits));
        session.step(&given, &mut each).unwrap();
        for (&(i, tokens, origin), digest) in taking.iter().zip(seen) {
            running[i].done += tokens;
            running[i].taken.push(Taken {
                tokens,
                origin,
                digest,
            });
        }
    };
    let (prompt, one) = (TokenOrigin::Prompt, TokenOrigin::Generated);
    step(&[(0, 250, prompt), (1, 3, prompt), (2, 100, prompt)]);
    for among in [[0, 1, 2], [2, 1, 0], [0, 1, 2]] {
        for _ in 0..30 {
            step(&among.map(|i| (i, 1, one)));
        }
        for _ in 0..5 {
            step(&[(0, 1, one), (2, 1, one)]);
        }
        step(&[(1, 1, one)]);
        step(&[(0, 1, one), (1, 70, prompt), (2, 1, one)]);
        step(&[(1, 1, one)]);
    }
    for Running { text, taken, .. } in &running {
        assert!(taken.iter().all(|one| one.digest.is_some()));
        compare_alone(&model, &options, &texts[*text], taken);
    }
}

#[test]
fn sequences_with_a_window_get_what_each_gets_alone() {
    let model = load(&common::model_path("gemma3-270m"));
    let window = model.config().window.expect("it has windows");
    let texts = texts(1000, &[window + 40, 30, BLOCK_CELLS + 3]);
    let options = SessionOptions {
        n_ctx: 1024,
        n_seq: 8,
        ubatch: 96,
        ..SessionOptions::for_model(model.config())
    };
    side_by_side(&model, &options, &texts, 3);
}

#[test]
fn what_cells_will_take_is_known_before() {
    let model = sketched(ComputeDevice::Cpu);
    let options = SessionOptions {
        n_ctx: 2048,
        n_seq: 3,
        ..SessionOptions::for_model(model.config())
    };
    let mut session = Session::new(&model, &options).unwrap();
    let used = |session: &Session<'_>| session.spread().device_bytes;
    let take = |session: &mut Session<'_>, sequence: SequenceId, n: usize| {
        let tokens = vec![1; n];
        let (before, growth) = (used(session), session.growth_bytes(sequence, n));
        let part = Part {
            sequence,
            tokens: &tokens,
            origin: TokenOrigin::Prompt,
            wants: Wants::Nothing,
        };
        session.step(&[part], &mut |_, _| {}).unwrap();
        assert_eq!(used(session) - before, growth, "{n} tokens");
        growth
    };
    let one = session.create();
    let block = take(&mut session, one, 1);
    assert!(block > 0);
    assert_eq!(take(&mut session, one, BLOCK_CELLS - 1), 0);
    assert_eq!(take(&mut session, one, 2 * BLOCK_CELLS - 56), 2 * block);
    // What is shared is copied when it is written to, whole blocks are not.
    let (two, kept) = session.branch(one, BLOCK_CELLS + 10);
    assert_eq!(kept, BLOCK_CELLS + 10);
    assert_eq!(take(&mut session, two, 3), block);
    assert_eq!(take(&mut session, one, 3), 0);
    // The first block is both's.
    assert!(session.forget(one));
    assert_eq!(used(&session), 2 * block);
    assert!(session.forget(two));
    assert_eq!(used(&session), 0);
    // Two more sequences may each leave a block begun.
    assert_eq!(session.kv_bytes(), (2048 / BLOCK_CELLS as u64 + 2) * block);
}

/// Layers with a window leave bytes that the others cannot use where those have a bound of their own.
#[test]
fn there_is_room_as_long_as_steps_find_some() {
    let model = load(&common::model_path("gemma3-270m"));
    let options = SessionOptions {
        n_ctx: 8 * BLOCK_CELLS,
        n_seq: 3,
        ubatch: BLOCK_CELLS,
        placing: Placing {
            window_blocks: Some(2),
            tail_blocks: 8,
            staging_slots: 3,
            kv_share: 1.0,
            gating: Gating::Off,
        },
        ..SessionOptions::for_model(model.config())
    };
    let mut session = Session::new(&model, &options).unwrap();
    let used = |session: &Session<'_>| {
        let spread = session.spread();
        spread.device_bytes + spread.host_bytes
    };
    let take = |session: &mut Session<'_>, sequence: SequenceId, n: usize| {
        let (before, growth) = (used(session), session.growth_bytes(sequence, n));
        let part = Part {
            sequence,
            tokens: &vec![7; n],
            origin: TokenOrigin::Prompt,
            wants: Wants::Nothing,
        };
        session.step(&[part], &mut |_, _| {})?;
        assert_eq!(used(session) - before, growth, "{n} tokens");
        Ok::<(), engine::Error>(())
    };
    let has_room = |session: &Session<'_>, sequence| session.has_room([(sequence, 1)].into_iter());
    let long = session.create();
    for _ in 0..7 {
        assert!(has_room(&session, long));
        take(&mut session, long, BLOCK_CELLS - 20).unwrap();
    }
    // Three of ten blocks are left, and more bytes, since of this sequence's seven blocks four are kept of layers with a window.
    for _ in 0..3 {
        let short = session.create();
        assert!(has_room(&session, short));
        take(&mut session, short, 1).unwrap();
    }
    let one_more = session.create();
    assert!(!has_room(&session, one_more));
    let error = take(&mut session, one_more, 1).unwrap_err();
    assert!(error.to_string().contains("cache is full"), "{error}");
}

#[test]
fn outputs_do_not_depend_on_the_pieces_that_a_text_comes_in() {
    outputs_in_any_pieces(ComputeDevice::Cpu);
}

#[test]
fn outputs_on_a_gpu() {
    if let Some(device) = common::gpu("outputs_on_a_gpu") {
        outputs_in_any_pieces(device);
    }
}

fn outputs_in_any_pieces(device: ComputeDevice) {
    let model = sketched(device);
    let width = model.config().width;
    let texts = texts(damaged::TOKENS, &[70, 33]);
    let options = SessionOptions {
        n_ctx: 512,
        n_seq: 4,
        ubatch: 24,
        device,
        ..SessionOptions::for_model(model.config())
    };
    let mut session = Session::new(&model, &options).unwrap();
    let mut alone = Vec::new();
    for text in &texts {
        let mut outputs = Vec::new();
        session.truncate(0);
        let wanted = Wanted::Outputs(&mut outputs);
        session.prefill(text, wanted).unwrap();
        assert_eq!(outputs.len(), text.len() * width);
        assert!(outputs.iter().all(|x| x.is_finite()));
        alone.push(outputs);
    }
    assert_ne!(alone[0][..width], alone[0][width..2 * width]);
    let sequences = [session.create(), session.create()];
    let mut found = [Vec::new(), Vec::new()];
    for (from, until) in [(0, 1), (1, 11), (11, 33)] {
        let part = |i: usize| Part {
            sequence: sequences[i],
            tokens: &texts[i][from..until],
            origin: TokenOrigin::Prompt,
            wants: Wants::Outputs,
        };
        let parts = [part(0), part(1)];
        let mut each = |i: usize, outputs: &[f32]| found[i].extend_from_slice(outputs);
        session.step(&parts, &mut each).unwrap();
    }
    for (found, alone) in found.iter().zip(&alone) {
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(found), bits(&alone[..33 * width]));
    }
}
