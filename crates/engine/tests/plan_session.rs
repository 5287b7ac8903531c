//! A session takes what was planned for it, and what has no room is refused before anything is loaded.

#[path = "common/damaged/mod.rs"]
mod damaged;

use damaged::Sketch;
use engine::model::{LoadOptions, Model};
use engine::plan::machine;
use engine::plan::session::{Asked, SessionPlan, Taken, plan};
use engine::session::{KvType, Session};
use gguf::{GgufFile, MapMode};
use place::profile::{Profile, example, example_names};
use std::path::PathBuf;
use tempfile::TempDir;

fn sketch() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    Sketch::sound().write(&path);
    (folder, path)
}

fn with_memory(bytes: u64) -> Profile {
    let mut machine = machine::unmeasured();
    machine.host.memory_available_bytes = bytes;
    machine.host.memory_total_bytes = machine.host.memory_total_bytes.max(bytes);
    machine
}

const ANYTHING: Asked = Asked {
    n_ctx: None,
    type_k: None,
    type_v: None,
    ubatch: 16,
};

fn planned(file: &GgufFile, asked: Asked, bytes: u64) -> SessionPlan {
    plan(file, &asked, &with_memory(bytes)).unwrap()
}

/// What a plan takes in all.
fn needs(plan: &SessionPlan) -> u64 {
    let plan = &plan.plan;
    plan.weight_bytes + plan.kv_alloc_bytes + plan.work_bytes
}

#[test]
fn planned_and_taken_are_the_same() {
    let (_folder, path) = sketch();
    let file = GgufFile::open(&path, MapMode::Read).unwrap();
    let options = LoadOptions {
        threads: Some(1),
        ..LoadOptions::default()
    };
    let model = Model::from_file(&file, &options, &mut |_| {}).unwrap();
    for (n_ctx, ty) in [(None, KvType::F16), (Some(700), KvType::Bf16)] {
        let asked = Asked {
            n_ctx,
            type_k: Some(ty),
            type_v: Some(ty),
            ..ANYTHING
        };
        let planned = planned(&file, asked, 1 << 40);
        let usual = model.config().n_ctx_train.min(8192) as u64;
        assert_eq!(planned.options.n_ctx as u64, n_ctx.unwrap_or(usual));
        assert_eq!((planned.options.type_k, planned.options.type_v), (ty, ty));
        assert_eq!(planned.cut_from, None);
        let session = Session::new(&model, &planned.options).unwrap();
        let Taken { planned, real } = Taken::of(&planned.plan, &session);
        assert_eq!(
            (planned.kv_bytes, planned.work_bytes),
            (real.kv_bytes, real.work_bytes)
        );
        // Each matrix begins at a cache line.
        let lines = 64 * file.tensors().len() as u64;
        let weights = planned.weight_bytes..=planned.weight_bytes + lines;
        assert!(weights.contains(&real.weight_bytes), "{planned:?} {real:?}");
    }
}

#[test]
fn a_default_context_is_cut_to_what_fits_at_f16() {
    let (_folder, path) = sketch();
    let file = GgufFile::open(&path, MapMode::Read).unwrap();
    let whole = planned(&file, ANYTHING, 1 << 40);
    assert_eq!(whole.cut_from, None);
    let usual = whole.plan.n_ctx;
    assert!(usual > 256, "the made-up model has some context: {usual}");
    let enough = planned(&file, ANYTHING, needs(&whole));
    assert_eq!((enough.plan.n_ctx, enough.cut_from), (usual, None));
    let cut = planned(&file, ANYTHING, needs(&whole) - 1);
    assert!(cut.plan.fits && cut.plan.n_ctx < usual, "{:?}", cut.plan);
    assert_eq!(cut.cut_from, Some(usual));
    assert_eq!(cut.options.type_k, KvType::F16);
    assert!(needs(&cut) < needs(&whole));
    let nothing = planned(&file, ANYTHING, 1);
    assert!(!nothing.plan.fits);
    assert!(nothing.plan.refusal().unwrap().contains("needs"));
}

#[test]
fn a_context_that_was_asked_for_is_kept_in_fewer_bits_unless_they_are_pinned() {
    let (_folder, path) = sketch();
    let file = GgufFile::open(&path, MapMode::Read).unwrap();
    let asked = Asked {
        n_ctx: Some(1 << 20),
        ..ANYTHING
    };
    let whole = planned(&file, asked, 1 << 40);
    assert_eq!(whole.plan.choice, "f16/f16");
    let less = planned(&file, asked, needs(&whole) - 1);
    assert_eq!((less.plan.fits, less.plan.n_ctx), (true, 1 << 20));
    assert_eq!(less.plan.choice, "q8_0/q8_0");
    let pinned = Asked {
        type_k: Some(KvType::F16),
        type_v: Some(KvType::F16),
        ..asked
    };
    let refused = planned(&file, pinned, needs(&whole) - 1);
    let message = refused.plan.refusal().unwrap();
    for part in [
        "needs ",
        " available: with --ctx ",
        "with q8_0/q8_0 it fits at 1048576",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

/// That is why none is measured for a session in main memory.
#[test]
fn no_rate_changes_what_is_chosen_in_main_memory() {
    let (_folder, path) = sketch();
    let file = GgufFile::open(&path, MapMode::Read).unwrap();
    let asked = Asked {
        n_ctx: Some(1 << 20),
        ..ANYTHING
    };
    let most = needs(&planned(&file, asked, 1 << 40));
    let mut choices = Vec::new();
    for bytes in (1..=10).map(|i| most / 10 * i + 10) {
        let expected = planned(&file, asked, bytes).plan;
        choices.push(expected.choice.clone());
        for name in example_names() {
            let mut machine = example(name).unwrap();
            machine.device = None;
            machine.host.memory_available_bytes = bytes;
            let found = plan(&file, &asked, &machine).unwrap().plan;
            assert_eq!(
                (found.fits, &found.choice, found.max_ctx),
                (expected.fits, &expected.choice, expected.max_ctx),
                "{name}, {bytes} bytes"
            );
        }
    }
    choices.dedup();
    assert!(choices.len() > 2, "several tiers were met: {choices:?}");
}
