//! Models with experts on a GPU: the CPU's bits for generated tokens, and the same bits for a prompt however it is cut. Skipped, with a word, where
//! there is no GPU.

mod common;
#[path = "common/mixtures.rs"]
mod small;

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use engine::Error;
use engine::experts::{
    Costs, Emulated, ExpertPlacing, Policy, Recalled, Settings, Share, placed_layers,
};
use engine::model::{ComputeDevice, ExpertHome, LoadOptions, Model};
use engine::session::{Session, SessionOptions, Wanted};
use gguf::TensorType;
use small::{Kind, Sizes, VOCAB};

const SIZES: Sizes = Sizes {
    width: 256,
    ff: 512,
    expert_ff: 256,
    shared_ff: 512,
    experts: 12,
    used: 4,
};

fn tokens(n: usize) -> Vec<u32> {
    let token = |i: usize| (i * i * 7 + i * 13) as u32 % VOCAB as u32;
    (0..n).map(token).collect()
}

fn load(kind: Kind, ty: TensorType, device: ComputeDevice, experts: ExpertHome) -> Model {
    load_pinned(kind, ty, device, experts, None)
}

/// The same with so many bytes of host memory pinned for experts, at most.
fn load_pinned(
    kind: Kind,
    ty: TensorType,
    device: ComputeDevice,
    experts: ExpertHome,
    pin_max_bytes: Option<u64>,
) -> Model {
    let file = small::header(kind, SIZES, &[ty], false);
    let options = LoadOptions {
        threads: Some(2),
        device,
        experts,
        pin_max_bytes,
        contents: small::contents(),
        ..LoadOptions::default()
    };
    Model::from_file(&file, &options, &mut |_| {}).unwrap_or_else(|e| panic!("{e}"))
}

/// Logits of all positions: a prompt `ubatch` tokens at a time; `None`: token by token.
fn logits(
    model: &Model,
    tokens: &[u32],
    ubatch: Option<usize>,
    experts: Option<ExpertPlacing>,
) -> Vec<f32> {
    let options = SessionOptions {
        ubatch: ubatch.unwrap_or(8),
        n_ctx: 1024,
        device: model.device(),
        experts,
        ..SessionOptions::for_model(model.config())
    };
    let mut session = Session::new(model, &options).unwrap();
    let mut all = Vec::new();
    match ubatch {
        None => {
            for &token in tokens {
                session.decode(token).unwrap();
                all.extend_from_slice(session.logits());
            }
        }
        Some(_) => {
            let mut each = |_, logits: &[f32]| {
                all.extend_from_slice(logits);
                ControlFlow::Continue(())
            };
            session.prefill(tokens, Wanted::All(&mut each)).unwrap();
        }
    }
    all
}

/// How many differ, and the first that does.
fn differing(found: &[f32], wanted: &[f32]) -> Option<(usize, usize)> {
    assert_eq!(found.len(), wanted.len());
    let differs = |i: &usize| found[*i].to_bits() != wanted[*i].to_bits();
    let first = (0..found.len()).find(differs)?;
    Some(((0..found.len()).filter(differs).count(), first))
}

#[test]
fn a_gpu_has_the_bits_of_the_cpu() {
    let Some(device) = common::gpu("a_gpu_has_the_bits_of_the_cpu") else {
        return;
    };
    let mut wrong = Vec::new();
    for kind in Kind::ALL {
        for ty in [
            TensorType::Q4_K,
            TensorType::Q6_K,
            TensorType::Q8_0,
            TensorType::MXFP4,
        ] {
            let there = load(kind, ty, device, ExpertHome::Device);
            let here = load(kind, ty, ComputeDevice::Cpu, ExpertHome::Device);
            let few = tokens(40);
            let (found, wanted) = (
                logits(&there, &few, None, None),
                logits(&here, &few, None, None),
            );
            assert!(wanted.iter().all(|x| x.is_finite()));
            let name = ty.name();
            if let Some((n, first)) = differing(&found, &wanted) {
                wrong.push(format!("{kind:?} {name}: {n} generated, from {first} on"));
            }
            let many = tokens(300);
            let wanted = logits(&there, &many, Some(300), None);
            for cut in [1, 9, 16, 17, 64] {
                let n = if cut == 1 { 40 } else { 300 };
                let found = logits(&there, &many[..n], Some(cut), None);
                if let Some((n, first)) = differing(&found, &wanted[..found.len()]) {
                    wrong.push(format!(
                        "{kind:?} {name}: {n} in chunks of {cut}, from {first} on"
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// `part` of the experts in slots.
fn placing(model: &Model, part: f64, share: Share) -> ExpertPlacing {
    let all = place::experts::blob_bytes(&placed_layers(&model.expert_layers()));
    ExpertPlacing {
        settings: Settings {
            cache_bytes: (all as f64 * part) as u64,
            staging_slots: 3,
            policy: Policy::Value,
            prompt: share,
            generated: share,
            costs: Costs::UNKNOWN,
            reads_in_place: true,
        },
        recalled: Recalled::default(),
        emulated: Emulated::default(),
    }
}

#[test]
fn experts_of_a_gpu_are_the_same_wherever_they_are() {
    let Some(device) = common::gpu("experts_of_a_gpu_are_the_same_wherever_they_are") else {
        return;
    };
    let mut wrong = Vec::new();
    for (kind, ty) in [
        (Kind::Qwen3Moe, TensorType::Q4_K),
        (Kind::Qwen2Moe, TensorType::Q8_0),
        (Kind::GptOss, TensorType::MXFP4),
        (Kind::Llama, TensorType::Q6_K),
    ] {
        let there = load(kind, ty, device, ExpertHome::Device);
        let placed = load(kind, ty, device, ExpertHome::Host);
        let (few, many) = (tokens(30), tokens(200));
        let generated = logits(&there, &few, None, None);
        let prompt = logits(&there, &many, Some(200), None);
        let shares = [
            Share::Off,
            Share::Fixed(0.3),
            Share::Fixed(0.7),
            Share::Fixed(1.0),
            Share::Auto,
            Share::Always,
        ];
        // Where all have slots, there is little to share.
        for (part, shares) in [
            (0.0, &shares[..]),
            (0.1, &shares[..]),
            (0.5, &shares[..]),
            (1.0, &[Share::Auto][..]),
        ] {
            for &share in shares {
                let what = format!("{kind:?} {}, {part} in slots, {share:?}", ty.name());
                let experts = || Some(placing(&placed, part, share));
                if let Some((n, first)) =
                    differing(&logits(&placed, &few, None, experts()), &generated)
                {
                    wrong.push(format!("{what}: {n} generated, from {first} on"));
                }
                // A session takes longer to make than to use.
                let cuts = match share {
                    Share::Auto => &[5, 64, 200][..],
                    _ => &[64],
                };
                for &cut in cuts {
                    let found = logits(&placed, &many, Some(cut), experts());
                    if let Some((n, first)) = differing(&found, &prompt) {
                        wrong.push(format!("{what}: {n} in chunks of {cut}, from {first} on"));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn experts_that_no_gpu_reaches_are_the_same_too() {
    let Some(device) = common::gpu("experts_that_no_gpu_reaches_are_the_same_too") else {
        return;
    };
    let mut wrong = Vec::new();
    // Without biases and with them, which the sum reads where they lie.
    for (kind, ty) in [
        (Kind::Qwen3Moe, TensorType::Q4_K),
        (Kind::GptOss, TensorType::MXFP4),
    ] {
        let there = load(kind, ty, device, ExpertHome::Device);
        let all = place::experts::blob_bytes(&placed_layers(&there.expert_layers()));
        let (few, many) = (tokens(30), tokens(200));
        let generated = logits(&there, &few, None, None);
        let prompt = logits(&there, &many, Some(200), None);
        for pin_max in [0, all / 2] {
            let placed = load_pinned(kind, ty, device, ExpertHome::Host, Some(pin_max));
            for (part, share, emulated) in [
                (0.0, Share::Off, Emulated::default()),
                (0.5, Share::Off, Emulated::default()),
                (0.3, Share::Fixed(0.5), Emulated::default()),
                (0.5, Share::Auto, Emulated::default()),
                (
                    0.3,
                    Share::Fixed(0.5),
                    Emulated {
                        host_copy: true,
                        ..Emulated::default()
                    },
                ),
            ] {
                let what = format!("{kind:?}, {pin_max} pinned, {part} in slots, {share:?}");
                let experts = || {
                    Some(ExpertPlacing {
                        emulated,
                        ..placing(&placed, part, share)
                    })
                };
                if let Some((n, first)) =
                    differing(&logits(&placed, &few, None, experts()), &generated)
                {
                    wrong.push(format!("{what}: {n} generated, from {first} on"));
                }
                for cut in [64, 200] {
                    let found = logits(&placed, &many, Some(cut), experts());
                    if let Some((n, first)) = differing(&found, &prompt) {
                        wrong.push(format!("{what}: {n} in chunks of {cut}, from {first} on"));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// What makes, uses and drops models in the same process has the driver wait until the GPU has nothing to do: nobody who answers a GPU that waits may then be
/// in a call of the driver.
#[test]
fn models_that_come_and_go_hold_nobody_up() {
    let Some(device) = common::gpu("models_that_come_and_go_hold_nobody_up") else {
        return;
    };
    let (kind, ty) = (Kind::Qwen3Moe, TensorType::Q4_K);
    let there = load(kind, ty, device, ExpertHome::Device);
    let all = place::experts::blob_bytes(&placed_layers(&there.expert_layers()));
    let few = tokens(30);
    let expected = logits(&there, &few, None, None);
    let placed = load_pinned(kind, ty, device, ExpertHome::Host, Some(all / 2));
    let (is_over, gone) = (AtomicBool::new(false), AtomicUsize::new(0));
    let come_and_go = || {
        while !is_over.load(Ordering::Relaxed) {
            let other = load(Kind::Llama, TensorType::Q6_K, device, ExpertHome::Host);
            let experts = Some(placing(&other, 0.5, Share::Auto));
            logits(&other, &tokens(3), None, experts);
            drop(other);
            gone.fetch_add(1, Ordering::Relaxed);
        }
    };
    let generate = || {
        let _over = Over(&is_over);
        let mut rounds = 0;
        while gone.load(Ordering::Relaxed) < 5 || rounds < 3 {
            for (part, share) in [(0.3, Share::Off), (0.3, Share::Auto), (0.6, Share::Off)] {
                let found = logits(&placed, &few, None, Some(placing(&placed, part, share)));
                assert_eq!(differing(&found, &expected), None, "{part}, {share:?}");
            }
            rounds += 1;
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(come_and_go);
        generate();
    });
}

/// Says that it is over when it is dropped.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn what_fails_on_a_gpu_is_told_and_never_a_wrong_token() {
    let Some(device) = common::gpu("what_fails_on_a_gpu_is_told_and_never_a_wrong_token") else {
        return;
    };
    let placed = load(Kind::Qwen3Moe, TensorType::Q4_K, device, ExpertHome::Host);
    let many = tokens(64);
    let expected = logits(
        &placed,
        &many,
        Some(64),
        Some(placing(&placed, 0.5, Share::Off)),
    );
    let new = |emulated| {
        let options = SessionOptions {
            ubatch: 64,
            n_ctx: 1024,
            device,
            experts: Some(ExpertPlacing {
                emulated,
                ..placing(&placed, 0.2, Share::Fixed(0.5))
            }),
            ..SessionOptions::for_model(placed.config())
        };
        Session::new(&placed, &options)
    };

    // No memory for slots.
    let refused = Emulated {
        staging_fails: true,
        ..Emulated::default()
    };
    let error = new(refused).unwrap_err().to_string();
    assert!(error.contains("out of memory"), "{error}");

    // A thread that panics while it computes the CPU's share, and the device waits for it.
    let panics = Emulated {
        worker_panics: true,
        ..Emulated::default()
    };
    let mut broken = new(panics).unwrap();
    let failed = broken.prefill(&many, Wanted::Last);
    assert!(matches!(failed, Err(Error::Panicked)), "{failed:?}");
    let mut broken = new(panics).unwrap();
    let failed = many.iter().try_for_each(|&token| broken.decode(token));
    assert!(matches!(failed, Err(Error::Panicked)), "{failed:?}");

    // Others are as they were.
    let mut session = new(Emulated::default()).unwrap();
    let mut found = Vec::new();
    let mut each = |_, logits: &[f32]| {
        found.extend_from_slice(logits);
        ControlFlow::Continue(())
    };
    session.prefill(&many, Wanted::All(&mut each)).unwrap();
    assert_eq!(differing(&found, &expected), None);
}
