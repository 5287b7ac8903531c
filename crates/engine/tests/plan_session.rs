//! A session takes what was planned for it, and what has no room is refused before anything is loaded.

#[path = "common/damaged/mod.rs"]
mod damaged;

use damaged::Sketch;
use engine::eval::tiers::{Row, rows};
use engine::model::{LoadOptions, Model};
use engine::plan::machine;
use engine::plan::session::{Asked, SessionPlan, Taken, needs_rates, plan};
use engine::session::{self, ComputeDevice, Placing, Session};
use gguf::{GgufFile, MapMode};
use place::bytes::KvType;
use place::cost::Place;
use place::decide::{Prefer, Request, Spill};
use place::limits::DEVICE_RESERVE_BYTES;
use place::profile::{Profile, example, example_names};
use place::tier::LADDER;
use std::path::PathBuf;
use tempfile::TempDir;

fn sketch() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    Sketch::sound().write(&path);
    (folder, path)
}

fn with_memory(bytes: u64) -> Profile {
    let mut machine = machine::unmeasured(None);
    machine.host.memory_available_bytes = bytes;
    machine.host.memory_total_bytes = machine.host.memory_total_bytes.max(bytes);
    machine
}

fn anything() -> Asked {
    with_types(None)
}

fn with_types(ty: Option<KvType>) -> Asked {
    Asked {
        request: Request {
            n_ubatch: 16,
            type_k: ty,
            type_v: ty,
            ..Request::default()
        },
        ..Asked::default()
    }
}

fn planned(file: &GgufFile, asked: Asked, bytes: u64) -> SessionPlan {
    plan(file, &asked, &with_memory(bytes)).unwrap()
}

fn session_type(ty: KvType) -> session::KvType {
    ty.to_string().parse().unwrap()
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
            ..with_types(Some(ty))
        };
        let planned = planned(&file, asked, 1 << 40);
        let usual = model.config().n_ctx_train.min(8192) as u64;
        assert_eq!(planned.options.n_ctx as u64, n_ctx.unwrap_or(usual));
        let types = (planned.options.type_k, planned.options.type_v);
        assert_eq!(types, (session_type(ty), session_type(ty)));
        assert_eq!(planned.cut_from, None);
        let session = Session::new(&model, &planned.options).unwrap();
        let Taken { planned, real } = Taken::of(&planned.plan, &session);
        assert_eq!(
            (planned.kv_bytes, planned.work_bytes, planned.staging_bytes),
            (real.kv_bytes, real.work_bytes, real.staging_bytes)
        );
        // Each matrix begins at a cache line.
        let lines = 64 * file.tensors().len() as u64;
        let weights = planned.weight_bytes..=planned.weight_bytes + lines;
        assert!(weights.contains(&real.weight_bytes), "{planned:?} {real:?}");
    }
}

/// With too little memory that plays a device's, and with a window.
#[test]
fn what_is_spilled_is_planned_and_taken_alike() {
    let (_folder, path) = sketch();
    let file = GgufFile::open(&path, MapMode::Read).unwrap();
    let options = LoadOptions {
        threads: Some(1),
        ..LoadOptions::default()
    };
    let model = Model::from_file(&file, &options, &mut |_| {}).unwrap();
    let asked = |change: &dyn Fn(&mut Request)| {
        let mut asked = Asked {
            n_ctx: Some(40_000),
            ..with_types(Some(KvType::F16))
        };
        change(&mut asked.request);
        asked
    };
    let whole = planned(&file, asked(&|_| ()), 1 << 40);
    let mib = needs(&whole) >> 20;
    assert!(mib > 4, "the context takes some memory: {mib} MiB");
    let windowed = planned(&file, asked(&|r| r.window_cells = Some(700)), 1 << 40);
    assert_eq!(windowed.options.placing.window_blocks, Some(3));
    for (what, planned) in [
        ("a window", windowed),
        (
            "little memory",
            planned(&file, asked(&|r| r.device_mem_mib = Some(mib / 2)), 1 << 40),
        ),
        (
            "slots and a share",
            planned(
                &file,
                asked(&|r| {
                    r.window_cells = Some(512);
                    r.staging_slots = Some(3);
                    r.kv_share = Some(0.25);
                }),
                1 << 40,
            ),
        ),
    ] {
        assert!(planned.plan.fits, "{what}");
        let placing = planned.options.placing;
        let blocks = placing.window_blocks.unwrap() + placing.tail_blocks;
        assert_eq!(blocks, 40_000_usize.div_ceil(256), "{what}");
        if what == "slots and a share" {
            assert_eq!((placing.staging_slots, placing.kv_share), (3, 0.25));
        }
        let session = Session::new(&model, &planned.options).unwrap();
        let Taken { planned, real } = Taken::of(&planned.plan, &session);
        assert!(planned.staging_bytes > 0, "{what}");
        assert_eq!(
            (planned.kv_bytes, planned.work_bytes, planned.staging_bytes),
            (real.kv_bytes, real.work_bytes, real.staging_bytes),
            "{what}"
        );
    }
    let off = asked(&|r| {
        r.window_cells = Some(700);
        r.spill = place::decide::Spill::Off;
    });
    assert!(!planned(&file, off, 1 << 40).plan.fits, "nowhere to go");
}

#[test]
fn a_default_context_is_cut_to_what_fits_at_f16() {
    let (_folder, path) = sketch();
    let file = GgufFile::open(&path, MapMode::Read).unwrap();
    let whole = planned(&file, anything(), 1 << 40);
    assert_eq!(whole.cut_from, None);
    let usual = whole.plan.n_ctx;
    assert!(usual > 256, "the made-up model has some context: {usual}");
    let enough = planned(&file, anything(), needs(&whole));
    assert_eq!((enough.plan.n_ctx, enough.cut_from), (usual, None));
    let cut = planned(&file, anything(), needs(&whole) - 1);
    assert!(cut.plan.fits && cut.plan.n_ctx < usual, "{:?}", cut.plan);
    assert_eq!(cut.cut_from, Some(usual));
    assert_eq!(cut.options.type_k, session_type(KvType::F16));
    assert!(needs(&cut) < needs(&whole));
    let nothing = planned(&file, anything(), 1);
    assert!(!nothing.plan.fits);
    assert!(nothing.plan.refusal().unwrap().contains("needs"));
}

#[test]
fn a_context_that_was_asked_for_is_kept_in_fewer_bits_unless_they_are_pinned() {
    let (_folder, path) = sketch();
    let file = GgufFile::open(&path, MapMode::Read).unwrap();
    let asked = Asked {
        n_ctx: Some(1 << 20),
        ..anything()
    };
    let whole = planned(&file, asked, 1 << 40);
    assert_eq!(whole.plan.choice, "f16/f16");
    let less = planned(&file, asked, needs(&whole) - 1);
    assert_eq!((less.plan.fits, less.plan.n_ctx), (true, 1 << 20));
    assert_eq!(less.plan.choice, "q8_0/q8_0");
    let pinned = Asked {
        n_ctx: asked.n_ctx,
        ..with_types(Some(KvType::F16))
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
        ..anything()
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

#[test]
fn a_table_of_tiers_has_rows_for_what_has_room() {
    let (_folder, path) = sketch();
    let file = GgufFile::open(&path, MapMode::Read).unwrap();
    let asked = Asked {
        n_ctx: Some(4000),
        request: Request {
            window_cells: Some(512),
            kv_share: Some(0.0),
            ..with_types(None).request
        },
        ..Asked::default()
    };
    let table = |bytes: u64| rows(&file, &asked, &with_memory(bytes), 3991).unwrap();
    let all = table(1 << 40);
    let names: Vec<String> = all.iter().map(|row| row.setting.to_string()).collect();
    assert_eq!(
        names[..4],
        ["f16 resident", "f16 spilled", "q8_0 resident", "auto"]
    );
    let tail = |row: &Row| row.planned.options.placing.tail_blocks;
    assert_eq!((tail(&all[0]), tail(&all[1]), tail(&all[2])), (0, 14, 0));
    let ms = |row: &Row| row.token.unwrap().t_ms;
    assert!(ms(&all[1]) > ms(&all[0]), "what is copied costs something");
    for row in &all {
        assert_eq!(
            (row.left_out.as_deref(), row.planned.plan.n_ctx),
            (None, 4000)
        );
        let same = row.same_as.map(|at| &all[at]);
        assert!(same.is_none_or(|other| other.planned.options == row.planned.options));
    }
    // Without a border nothing is spilled, and two rows are one.
    let whole = Asked {
        request: with_types(None).request,
        ..asked
    };
    let same = rows(&file, &whole, &with_memory(1 << 40), 3991).unwrap();
    assert_eq!((same[1].same_as, same[3].same_as), (Some(0), Some(0)));
    // Room for weights and the first row alone.
    let first = &all[0].planned;
    let some = table(first.plan.weight_bytes + first.session_bytes());
    let why = |row: &Row| row.left_out.clone();
    assert_eq!((why(&some[0]), some[0].planned.plan.fits), (None, true));
    for row in &some[1..] {
        let why = row
            .same_as
            .map_or(why(row), |_| Some("MiB are left".to_owned()));
        assert!(
            why.as_ref().is_some_and(|w| w.contains("MiB")),
            "{}: {why:?}",
            row.setting
        );
    }
    let none = table(1);
    assert!(
        none.iter()
            .all(|row| row.left_out.is_some() && row.token.is_none())
    );
}

/// A machine with a GPU of which so much is free, beside 64 GiB of main memory.
fn with_device(free_bytes: u64) -> Profile {
    let mut machine = example("h200-pcie5").unwrap();
    machine.host.memory_available_bytes = 64 << 30;
    let device = machine.device.as_mut().unwrap();
    device.free_bytes = free_bytes;
    device.total_bytes = device.total_bytes.max(free_bytes);
    machine
}

fn on_device(n_ctx: u64, change: impl FnOnce(&mut Request)) -> Asked {
    let mut asked = Asked {
        n_ctx: Some(n_ctx),
        device: ComputeDevice::Cuda(0),
        ..with_types(Some(KvType::F16))
    };
    change(&mut asked.request);
    asked
}

#[test]
fn on_a_gpu_its_memory_counts_and_what_has_no_room_is_outside_or_refused() {
    let (_folder, path) = sketch();
    let file = GgufFile::open(&path, MapMode::Read).unwrap();
    let roomy = plan(&file, &on_device(40_000, |_| ()), &with_device(8 << 30)).unwrap();
    let layout = &roomy.plan.layout;
    assert_eq!(roomy.plan.memory.place, Place::Device);
    assert_eq!(
        (roomy.options.placing, roomy.options.device),
        (Placing::RESIDENT, ComputeDevice::Cuda(0))
    );
    let part = |name: &str| {
        let found = layout.fast.iter().find(|p| p.what == name);
        found.map_or(0, |p| p.bytes)
    };
    // All weights are there, the embedding among them, and parts add up.
    assert_eq!(part("dense weights"), roomy.plan.weight_bytes);
    assert_eq!(part("reserve"), DEVICE_RESERVE_BYTES);
    assert!(part("padding of allocations") > 0 && layout.host.is_empty());
    assert_eq!(
        layout.fast.iter().map(|p| p.bytes).sum::<u64>(),
        layout.fast_bytes
    );
    assert_eq!(
        roomy.shared_bytes() + roomy.session_bytes(),
        layout.fast_bytes
    );

    // As much as it takes fits; a little less is outside, in whole blocks, some of it for the CPU.
    let exact = plan(
        &file,
        &on_device(40_000, |_| ()),
        &with_device(layout.fast_bytes),
    )
    .unwrap();
    assert_eq!(exact.options.placing, Placing::RESIDENT);
    let asked = on_device(40_000, |r| r.kv_share = Some(0.7));
    let less = plan(&file, &asked, &with_device(layout.fast_bytes - 1)).unwrap();
    assert!(less.plan.fits && less.plan.layout.fast_bytes < layout.fast_bytes);
    let placing = less.options.placing;
    assert!(placing.tail_blocks > 0 && placing.staging_slots > 0);
    assert!((placing.kv_share - 0.7).abs() < 1e-9, "{placing:?}");
    let blocks = placing.window_blocks.unwrap() + placing.tail_blocks;
    assert_eq!(blocks, 40_000_usize.div_ceil(256));

    // Without a spill, or without room for the weights, it is refused with both figures and what would fit.
    let off = on_device(40_000, |r| r.spill = Spill::Off);
    let refused = plan(&file, &off, &with_device(layout.fast_bytes - 1)).unwrap();
    let message = refused.plan.refusal().unwrap();
    for part in [
        "needs ",
        "available on the device",
        "with --ctx ",
        "q8_0",
        "--spill auto",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let tiny = plan(&file, &on_device(512, |_| ()), &with_device(1 << 20)).unwrap();
    let message = tiny.plan.refusal().unwrap();
    assert!(
        message.contains("MiB of device memory") && message.contains("1 available"),
        "{message}"
    );
}

#[test]
fn a_gpus_memory_is_cut_by_flags_and_the_processs_context() {
    let (_folder, path) = sketch();
    let file = GgufFile::open(&path, MapMode::Read).unwrap();
    let mut machine = with_device(8 << 30);
    machine.device.as_mut().unwrap().context_bytes = 500 << 20;
    let memory = |change: &dyn Fn(&mut Request)| {
        let planned = plan(&file, &on_device(512, change), &machine).unwrap();
        planned.plan.memory.fast_bytes >> 20
    };
    assert_eq!(memory(&|_| ()), 8192);
    assert_eq!(memory(&|r| r.device_mem_mib = Some(1000)), 1000);
    assert_eq!(memory(&|r| r.vram_target_mib = 1000), 500);
    assert_eq!(memory(&|r| r.vram_target_mib = 400), 0);
    assert_eq!(memory(&|r| r.vram_target_mib = 8600), 8100);
    // Where the CPU computes the GPU counts for nothing.
    let cpu = Asked {
        device: ComputeDevice::Cpu,
        ..on_device(512, |_| ())
    };
    let planned = plan(&file, &cpu, &machine).unwrap();
    assert_eq!(planned.plan.memory.place, Place::Host);
    assert_eq!(planned.plan.memory.fast_bytes, 64 << 30);
}

#[test]
fn rates_are_needed_where_a_gpu_has_no_room_for_everything() {
    let (_folder, path) = sketch();
    let file = GgufFile::open(&path, MapMode::Read).unwrap();
    let asked = Asked {
        n_ctx: Some(40_000),
        device: ComputeDevice::Cuda(0),
        ..anything()
    };
    let all = plan(&file, &asked, &with_device(8 << 30)).unwrap();
    let needs = |free| needs_rates(&file, &asked, &with_device(free)).unwrap();
    assert!(!needs(all.plan.layout.fast_bytes));
    assert!(needs(all.plan.layout.fast_bytes - 1));
}

/// What the device's own attention costs decides, where speed is asked for.
#[test]
fn a_tier_is_chosen_by_the_devices_costs() {
    let (_folder, path) = sketch();
    let file = GgufFile::open(&path, MapMode::Read).unwrap();
    let asked = Asked {
        n_ctx: Some(40_000),
        device: ComputeDevice::Cuda(0),
        request: Request {
            prefer: Prefer::Speed,
            min_tier: LADDER[3],
            ..anything().request
        },
        ..Asked::default()
    };
    for fastest in &LADDER {
        let mut machine = with_device(8 << 30);
        for rate in &mut machine.device.as_mut().unwrap().attention {
            let is_it = (rate.type_k, rate.type_v) == (fastest.type_k, fastest.type_v);
            rate.ns_cell.value = if is_it { 1.0 } else { 2.0 };
        }
        let planned = plan(&file, &asked, &machine).unwrap();
        assert_eq!(planned.plan.tier(), *fastest);
    }
}
