//! How far a model's logits lie from those of the same weights without any rounding of activations.
//!
//! `data/reference` has the exact logits of three dense models, teacher-forced, and says how far another engine's
//! quantised run lies from them. Ours may not lie much farther: 1.1 times its mean, 1.3 times its 99th percentile, half a
//! point of agreement.

mod common;

use std::ops::ControlFlow;
use std::sync::Mutex;

use engine::eval::{Divergence, KlSummary, Position, Top1};
use engine::model::{LoadOptions, Model};
use engine::session::{Session, SessionOptions, Wanted};

/// What the other engine's run has, from the table in `data/reference/README.md`.
struct Rival {
    mean: f64,
    p99: f64,
    top1: f64,
}

/// Models take all cores, one at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Reads the reference's texts with an f16 cache and compares every position.
fn measure(name: &str, reference: &[Position]) -> (KlSummary, Top1) {
    let model = Model::load(
        &common::model_path(name),
        &LoadOptions::default(),
        &mut |_| {},
    )
    .unwrap_or_else(|e| panic!("{name}: {e}"));
    let mut session = Session::new(&model, &SessionOptions::for_model(model.config()))
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    let mut divergence = Divergence::default();
    for text in reference.chunk_by(|a, b| a.text == b.text) {
        let tokens: Vec<u32> = text.iter().map(|p| p.token).collect();
        session.truncate(0);
        let mut each = |pos: usize, logits: &[f32]| {
            let theirs = &text[pos];
            let ours = Position::new(theirs.text, pos, tokens[pos], logits, theirs.top.len())
                .unwrap_or_else(|e| panic!("{name}: {e}"));
            divergence
                .add(theirs, &ours)
                .unwrap_or_else(|e| panic!("{name}: {e}"));
            ControlFlow::Continue(())
        };
        session
            .prefill(&tokens, Wanted::All(&mut each))
            .unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    let kl = divergence.kl().expect("the reference is not empty");
    assert_eq!(
        kl.positions,
        reference.len(),
        "{name}: every position counts"
    );
    (kl, divergence.top1())
}

fn check(name: &str, file: &str, rival: &Rival) {
    let _alone = ONE_AT_A_TIME
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let (kl, top1) = measure(name, &common::reference(file));
    let (mean_max, p99_max, top1_min) = (1.1 * rival.mean, 1.3 * rival.p99, rival.top1 - 0.005);
    let figures = format!(
        "{name}: {} positions, KL mean {:.3e} (at most {mean_max:.3e}), p99 {:.3e} (at most {p99_max:.3e}), max {:.3e}; \
         top-1 {:.4} of {} clear ones (at least {top1_min:.4})",
        kl.positions, kl.mean, kl.p99, kl.max, top1.share, top1.clear
    );
    println!("{figures}");
    assert!(kl.mean <= mean_max, "mean: {figures}");
    assert!(kl.p99 <= p99_max, "p99: {figures}");
    assert!(top1.share >= top1_min, "top-1: {figures}");
}

#[test]
fn smollm2() {
    check(
        "smollm2",
        "smollm2-135m-instruct.q4_1",
        &Rival {
            mean: 2.99e-3,
            p99: 1.74e-2,
            top1: 0.9856,
        },
    );
}

#[test]
fn gemma3_270m() {
    check(
        "gemma3-270m",
        "gemma-3-270m.q4_k_m",
        &Rival {
            mean: 5.84e-3,
            p99: 4.80e-2,
            top1: 0.9732,
        },
    );
}

#[test]
fn qwen2_5_0_5b() {
    check(
        "qwen2.5-0.5b",
        "qwen2.5-0.5b-instruct.q4_k_m",
        &Rival {
            mean: 7.5e-4,
            p99: 5.1e-3,
            top1: 1.0,
        },
    );
}
