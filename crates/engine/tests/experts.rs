//! Experts that are not all in device memory: whoever computes them from wherever, the bits are the same.

mod common;
#[path = "common/mixtures.rs"]
#[allow(dead_code, reason = "this program uses a part of it")]
mod small;

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

use cpu::Isa;
use engine::Error;
use engine::experts::{
    Costs, Emulated, ExpertPlacing, Kept, Policy, Recalled, Settings, Share, Sides, Verdicts,
    model_key, placed_layers,
};
use engine::model::{LoadOptions, Model};
use engine::session::{Session, SessionOptions, Verdict, Wanted};
use gguf::{GgufFile, TensorType};
use place::routing;
use place::windows::Recording;
use small::{Kind, Sizes, VOCAB};

const SIZES: Sizes = Sizes {
    width: 256,
    ff: 512,
    expert_ff: 256,
    shared_ff: 512,
    experts: 12,
    used: 3,
};

/// Formats whose experts are of different sizes in layers that follow one another.
const MIXED: [TensorType; 5] = [
    TensorType::Q8_0,
    TensorType::Q4_0,
    TensorType::Q6_K,
    TensorType::Q4_0,
    TensorType::Q4_0,
];

fn load(file: &GgufFile, isa: Isa, pool_workers: Option<usize>) -> Model {
    let options = LoadOptions {
        threads: Some(2),
        isa: Some(isa),
        contents: small::contents(),
        pool_workers,
        ..LoadOptions::default()
    };
    Model::from_file(file, &options, &mut |_| {}).unwrap_or_else(|e| panic!("{e}"))
}

/// Layers have experts of different sizes.
fn file(kind: Kind, types: &[TensorType]) -> GgufFile {
    let file = small::header(kind, SIZES, types, false);
    let model = load(&file, Isa::best(), None);
    let mut sizes: Vec<u64> = model.expert_layers().iter().map(|l| l.blob_bytes).collect();
    sizes.dedup();
    assert!(sizes.len() > 1, "one size of slots would show little");
    file
}

fn tokens(n: usize) -> Vec<u32> {
    let token = |i: usize| (i * i * 7 + i * 13) as u32 % VOCAB as u32;
    (0..n).map(token).collect()
}

fn expert_bytes(model: &Model) -> u64 {
    place::experts::blob_bytes(&placed_layers(&model.expert_layers()))
}

/// `part` of the experts in slots.
fn placing(model: &Model, part: f64, share: Share) -> ExpertPlacing {
    ExpertPlacing {
        settings: Settings {
            cache_bytes: (expert_bytes(model) as f64 * part) as u64,
            staging_slots: 2,
            policy: Policy::Value,
            prompt: share,
            generated: share,
            // As if the CPU were a second processor, so that the balance gives both sides something.
            costs: Costs {
                sides: Sides::Beside,
                ..Costs::UNKNOWN
            },
            reads_in_place: false,
        },
        recalled: Recalled::default(),
        emulated: Emulated::default(),
    }
}

fn session<'m>(model: &'m Model, ubatch: usize, experts: Option<ExpertPlacing>) -> Session<'m> {
    let options = SessionOptions {
        ubatch,
        n_ctx: 1024,
        experts,
        ..SessionOptions::for_model(model.config())
    };
    Session::new(model, &options).unwrap()
}

/// Logits of all positions: a prompt `ubatch` tokens at a time; `None`: token by token.
fn logits(session: &mut Session<'_>, tokens: &[u32], is_prompt: bool) -> Vec<f32> {
    let mut all = Vec::new();
    session.truncate(0);
    if !is_prompt {
        for &token in tokens {
            session.decode(token).unwrap();
            all.extend_from_slice(session.logits());
        }
        return all;
    }
    let mut each = |_, logits: &[f32]| {
        all.extend_from_slice(logits);
        ControlFlow::Continue(())
    };
    session.prefill(tokens, Wanted::All(&mut each)).unwrap();
    all
}

#[test]
fn bits_do_not_depend_on_where_experts_are_and_who_computes_them() {
    use TensorType::{F16, MXFP4, Q4_0, Q4_K, Q6_K, Q8_0};
    let tokens = tokens(70);
    let mut runs = 0;
    for (kind, types) in [
        (Kind::Llama, &[Q4_K, Q6_K, Q4_K, Q8_0, Q4_0][..]),
        (Kind::GptOss, &[MXFP4, MXFP4, Q8_0, MXFP4, Q4_0][..]),
        (Kind::Qwen2Moe, &[Q4_0, F16, Q8_0, Q6_K][..]),
    ] {
        let file = file(kind, types);
        let resident = load(&file, Isa::best(), None);
        let expected = logits(&mut session(&resident, 512, None), &tokens, true);
        assert!(expected.iter().all(|x| x.is_finite()), "{kind:?}");
        for isa in Isa::available() {
            // The plain definition is slow.
            let (n, parts): (_, &[f64]) = match isa {
                Isa::Scalar => (12, &[0.1]),
                _ => (tokens.len(), &[0.0, 0.1, 0.5]),
            };
            // Each kind with fewer threads for the CPU's share, the first one with every instruction set, too.
            for pool_workers in [None, Some(1)] {
                let is_best = isa == Isa::best();
                if pool_workers.is_some() && !is_best
                    || pool_workers.is_none() && kind != Kind::Llama
                {
                    continue;
                }
                let model = load(&file, isa, pool_workers);
                for &part in parts {
                    for share in [
                        Share::Off,
                        Share::Fixed(0.3),
                        Share::Fixed(0.7),
                        Share::Fixed(1.0),
                        Share::Auto,
                        Share::Always,
                    ] {
                        for cut in [1, 8, 64, 512, 0] {
                            if isa == Isa::Scalar && cut != 8 {
                                continue;
                            }
                            let placing = placing(&model, part, share);
                            let mut session = session(&model, cut.max(1), Some(placing));
                            // Again, with whatever is in the cache by then.
                            for again in 0..2 {
                                let found = logits(&mut session, &tokens[..n], cut > 0);
                                assert!(
                                    found == expected[..found.len()],
                                    "{kind:?} {isa}, {pool_workers:?} workers, {part} in slots, {share:?}, chunks of {cut}, run {again}"
                                );
                                runs += 1;
                            }
                            check(&session, part, share, cut == 0);
                        }
                    }
                }
            }
        }
    }
    println!("{runs} runs");
}

/// Whether experts really were where they should be.
fn check(session: &Session<'_>, part: f64, share: Share, is_generated: bool) {
    let counts = session.expert_counts().unwrap();
    let [counts, none] = match is_generated {
        false => counts,
        true => [counts[1], counts[0]],
    };
    assert_eq!(none.experts, 0);
    assert_eq!(
        counts.experts,
        counts.resident + counts.streamed + counts.host
    );
    // A tenth of them may be missed by every one of these few tokens, half may not.
    assert!(part > 0.0 || counts.resident == 0);
    assert!(part < 0.5 || counts.resident > 0);
    assert!(counts.resident < counts.experts);
    match share {
        Share::Off => assert!(counts.host == 0 && counts.streamed > 0),
        Share::Fixed(1.0) => assert!(counts.streamed == 0 && counts.host > 0),
        Share::Fixed(_) => assert!(counts.streamed > 0 && counts.host > 0),
        Share::Auto | Share::Always => assert!(counts.streamed + counts.host > 0),
    }
}

#[test]
fn least_recently_used_is_the_same_too() {
    let file = file(Kind::Olmoe, &MIXED);
    let model = load(&file, Isa::best(), None);
    let tokens = tokens(40);
    let expected = logits(&mut session(&model, 512, None), &tokens, true);
    let mut lru = placing(&model, 0.3, Share::Fixed(0.5));
    lru.settings.policy = Policy::Lru;
    let found = logits(&mut session(&model, 1, Some(lru)), &tokens, false);
    assert!(found == expected);
}

/// What was written, shared with whoever wrote it.
#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Written {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

#[test]
fn records_say_what_was_served() {
    let file = file(Kind::Llama, &MIXED);
    let model = load(&file, Isa::best(), None);
    let tokens = tokens(50);
    let record = |experts: Option<ExpertPlacing>| {
        let mut session = session(&model, 16, experts);
        let [routing, windows] = [Written::default(), Written::default()];
        session.record_routing(Box::new(routing.clone())).unwrap();
        let to = Box::new(windows.clone());
        session.record_windows(to, "here").unwrap();
        session.prefill(&tokens[..40], Wanted::Last).unwrap();
        tokens[40..]
            .iter()
            .for_each(|&t| session.decode(t).unwrap());
        session.finish_records().unwrap();
        let counts = session.expert_counts();
        (routing.text(), windows.text(), counts)
    };
    let (routing, windows, counts) = record(Some(placing(&model, 0.25, Share::Fixed(0.5))));
    let (header, records) = routing::read(&routing).unwrap();
    assert_eq!(header.layers, model.expert_layers());
    assert_eq!(header.model, model.fingerprint());
    // Two layers with experts; chunks of 16, 16 and 8, and ten generated tokens.
    assert_eq!(records.len(), 2 * 13);
    let counts = counts.unwrap();
    for (of, counts) in counts.iter().enumerate() {
        let of_kind = records.iter().filter(|r| usize::from(r.generated) == of);
        let experts: usize = of_kind.clone().map(|r| r.used.len()).sum();
        assert_eq!(experts as u64, counts.experts);
        let pairs: u32 = of_kind.flat_map(|r| &r.used).map(|&(_, n)| n).sum();
        assert_eq!(u64::from(pairs), counts.pairs);
    }
    assert_eq!(counts[0].pairs, 40 * 2 * SIZES.used);
    let positions = |layer: u32| {
        let of = records.iter().filter(|r| r.layer == layer);
        of.map(|r| (r.position, r.tokens)).collect::<Vec<_>>()
    };
    assert_eq!(positions(0), positions(1));
    assert_eq!(positions(0)[..4], [(0, 16), (16, 16), (32, 8), (40, 1)]);

    let windows = Recording::parse(&windows).unwrap().windows;
    let missing: u64 = windows.iter().map(|w| u64::from(w.missing)).sum();
    let all: u64 = counts.iter().map(|c| c.experts - c.resident).sum();
    assert_eq!(missing, all);
    assert!(windows.iter().all(|w| w.ms > 0.0 && w.layer > 0));
    let of = |prompt: u32| windows.iter().filter(move |w| w.prompt == prompt);
    assert_eq!(of(40).count() + of(1).count(), windows.len());
    assert_eq!(of(40).map(|w| w.chunk).max(), Some(2));
    assert_eq!(of(1).map(|w| w.chunk).max(), Some(9));

    // The same routing where all experts are resident, and no windows.
    let (resident, no_windows, none) = record(None);
    assert_eq!((resident, none), (routing, None));
    assert_eq!(Recording::parse(&no_windows).unwrap().windows, []);
}

/// Fails after some bytes.
struct Full(usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0 < bytes.len() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.0 -= bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn what_fails_is_told_and_never_a_wrong_token() {
    let types = MIXED;
    let file = file(Kind::Qwen3Moe, &types);
    let model = load(&file, Isa::best(), None);
    let tokens = tokens(20);
    let expected = logits(&mut session(&model, 512, None), &tokens, true);

    // Slots that nobody needs.
    let mut options = SessionOptions::for_model(model.config());
    for slots in [0, u32::MAX] {
        let mut refused = placing(&model, 0.5, Share::Auto);
        refused.settings.staging_slots = slots;
        options.experts = Some(refused);
        let error = Session::new(&model, &options).unwrap_err().to_string();
        assert!(error.contains("slots"), "{error}");
    }

    let mut refused = placing(&model, 0.5, Share::Auto);
    refused.emulated.staging_fails = true;
    options.experts = Some(refused);
    let error = Session::new(&model, &options).unwrap_err().to_string();
    assert!(error.contains("slots for experts"), "{error}");

    // A thread that panics while it computes the CPU's share.
    let mut panics = placing(&model, 0.5, Share::Fixed(0.5));
    panics.emulated.worker_panics = true;
    let mut broken = session(&model, 16, Some(panics));
    for _ in 0..2 {
        let failed = broken.prefill(&tokens, Wanted::Last);
        assert!(matches!(failed, Err(Error::Panicked)), "{failed:?}");
    }
    assert!(matches!(broken.decode(1), Err(Error::Panicked)));

    // What was learnt of another model.
    let mut other = placing(&model, 0.5, Share::Auto);
    other.recalled.profile = Some(engine::experts::Profile {
        version: 1,
        tokens: 1,
        rates: vec![vec![0.5; 3]],
    });
    options.experts = Some(other);
    assert!(Session::new(&model, &options).is_err());

    // A full disk under records.
    let placing = placing(&model, 0.5, Share::Fixed(0.5));
    let mut session = session(&model, 16, Some(placing));
    session.record_routing(Box::new(Full(400))).unwrap();
    assert!(logits(&mut session, &tokens, true) == expected);
    assert!(session.finish_records().is_err());
    assert!(session.finish_records().is_ok());
}

#[test]
fn what_was_learnt_is_there_for_the_next_session() {
    let file = file(Kind::Qwen3Moe, &MIXED);
    let model = load(&file, Isa::best(), None);
    let tokens = tokens(60);
    let folder = tempfile::tempdir().unwrap();
    let kept = Kept::in_folder(&folder.path().join("new"));
    let key = model_key(&file, small::contents());
    let layers = placed_layers(&model.expert_layers());
    let recall = |placed: &str| kept.recall(&key, &layers, placed);
    assert_eq!(recall("here"), Recalled::default());
    let mut first = session(&model, 64, Some(placing(&model, 0.4, Share::Off)));
    let expected = logits(&mut first, &tokens, true);
    let (profile, verdicts) = first.expert_findings().unwrap();
    assert_eq!(verdicts, Verdicts::default(), "nothing was gated");
    let verdict = Verdict {
        shares: true,
        amount: 0.5,
    };
    let found = Verdicts {
        buckets: [None, None, Some(verdict.into()), None, None],
    };
    kept.keep(&key, "here", profile.clone(), found).unwrap();
    let recalled = recall("here");
    assert_eq!(recalled.profile.as_ref(), Some(&profile));
    assert_eq!(recalled.verdicts, found);
    assert_eq!(recall("there").verdicts, Verdicts::default());
    kept.keep(&key, "there", profile.clone(), verdicts).unwrap();
    assert_eq!(recall("here"), recalled);
    assert_eq!(kept.profile(&key, &layers[1..]), None);
    let other = model_key(&file, engine::model::Contents::File);
    assert_eq!(kept.profile(&other, &layers), None);

    let again = ExpertPlacing {
        recalled,
        ..placing(&model, 0.4, Share::Off)
    };
    let mut again = session(&model, 1, Some(again));
    let found = logits(&mut again, &tokens[..1], false);
    assert!(found == expected[..found.len()]);
    let warm = again.expert_counts().unwrap()[1];
    assert!(
        warm.resident > 0,
        "the first token found something: {warm:?}"
    );

    // A file that makes no sense counts as none.
    let path = std::fs::read_dir(folder.path().join("new")).unwrap().next();
    let path = path.unwrap().unwrap().path();
    for text in ["", "{}", "[[["] {
        std::fs::write(&path, text).unwrap();
        assert_eq!(recall("here"), Recalled::default());
    }
}
