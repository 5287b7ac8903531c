//! Decisions: published cases, pins, budgets, what a plan says; and what holds for any request on any machine.

mod common;

use common::Header;
use place::bytes::KvType::{self, F16, Q4_0, Q8_0};
use place::bytes::{BLOCK_CELLS, GROUP_BLOCKS};
use place::cost::{Place, SpillModel};
use place::decide::{
    ExpertCache, Kind, Memory, Plan, Prefer, Request, Spill, SpillWeights, decide, needs_profile,
};
use place::model::Model;
use place::profile::{Profile, default_profile, example, example_names};
use place::tier::{LADDER, Tier, allowed};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A dense model of that many layers, 40 query and 8 key heads of 128, with about `gib` of Q8_0 in its layers.
fn dense(layers: u64, gib: f64) -> Model {
    let width = 5120;
    let rows = (gib * GIB as f64 / layers as f64 / (width as f64 / 32.0 * 34.0)) as u64;
    let mut header = Header::new("qwen2", layers)
        .with("embedding_length", width)
        .heads(40, 8, 128, 128)
        .tensor("token_embd.weight", "Q8_0", &[width, 10_000])
        .tensor("output.weight", "Q8_0", &[width, 10_000]);
    for i in 0..layers {
        header = header.tensor(&format!("blk.{i}.ffn_up.weight"), "Q8_0", &[width, rows]);
    }
    header.model()
}

/// 24 layers of 32 experts, 4 used; `mib` of Q4_0 an expert.
fn experts(mib: u64) -> Model {
    let (width, layers, n) = (2048_u64, 24, 32);
    let rows = mib * MIB / (width / 32 * 18);
    let mut header = Header::new("qwen3moe", layers)
        .with("embedding_length", width)
        .with("expert_count", n)
        .with("expert_used_count", 4)
        .with("expert_feed_forward_length", 768)
        .heads(32, 4, 128, 128)
        .tensor("token_embd.weight", "Q8_0", &[width, 10_000])
        .tensor("output.weight", "Q8_0", &[width, 10_000]);
    for i in 0..layers {
        header = header
            .tensor(&format!("blk.{i}.attn_q.weight"), "Q8_0", &[width, 4096])
            .tensor(
                &format!("blk.{i}.ffn_up_exps.weight"),
                "Q4_0",
                &[width, rows, n],
            );
    }
    header.model()
}

fn machine(name: &str) -> Profile {
    example(name).unwrap()
}

/// The machine with just so much free on its device.
fn with_free(mut profile: Profile, bytes: u64) -> Profile {
    let device = profile.device.as_mut().unwrap();
    device.free_bytes = bytes;
    device.total_bytes = device.total_bytes.max(bytes);
    profile
}

fn ctx(n_ctx: u64) -> Request {
    Request {
        n_ctx,
        ..Request::default()
    }
}

fn plan(request: &Request, model: &Model, profile: &Profile) -> Plan {
    let plan = decide(request, model, profile).unwrap();
    check(request, model, profile, &plan);
    plan
}

/// What holds for every plan.
fn check(request: &Request, model: &Model, profile: &Profile, plan: &Plan) {
    let tiers = allowed(model, request.type_k, request.type_v).unwrap();
    let listed: Vec<Tier> = plan.tiers.iter().map(|t| t.tier()).collect();
    assert_eq!(listed, tiers);
    assert!(tiers.contains(&plan.tier()));
    if let Some(k) = request.type_k {
        assert_eq!(plan.type_k, k);
    }
    if let Some(v) = request.type_v {
        assert_eq!(plan.type_v, v);
        assert_eq!(plan.tiers.len(), 1);
    }
    for t in &plan.tiers {
        assert!(t.spill_bytes <= t.kv_alloc_bytes, "{t:?}");
        assert!(t.max_ctx <= t.max_ctx_spilled);
        for c in &t.candidates {
            assert!(c.spill_bytes <= t.kv_alloc_bytes);
            assert!(c.fast_bytes <= plan.memory.fast_bytes, "{c:?}");
            if request.spill == Spill::Off {
                assert_eq!(c.spill_bytes, 0);
            }
        }
    }
    assert_eq!(plan.memory, Memory::of_profile(request, profile));
    assert_eq!(plan.fits, plan.refusal().is_none());
    if !plan.fits {
        return;
    }
    let l = &plan.layout;
    assert!(l.fast_bytes <= plan.memory.fast_bytes);
    assert!(l.host_bytes <= plan.memory.host_bytes);
    assert_eq!(l.fast.iter().map(|p| p.bytes).sum::<u64>(), l.fast_bytes);
    assert_eq!(l.host.iter().map(|p| p.bytes).sum::<u64>(), l.host_bytes);
    let chosen = plan.chosen().unwrap();
    assert_eq!(l.spill_bytes, chosen.spill_bytes);
    let kv = |parts: &[place::decide::Part]| -> u64 {
        let of_kv = parts.iter().filter(|p| p.what.starts_with("KV"));
        of_kv.map(|p| p.bytes).sum()
    };
    assert_eq!(kv(&l.fast) + kv(&l.host), plan.kv_alloc_bytes);
    if request.prefer == Prefer::Quality {
        // The ladder's order: nothing less compressed was within the target.
        let above = plan.tiers.iter().take_while(|t| t.tier() != plan.tier());
        for t in above {
            assert!(!(t.fits && t.within_target), "{t:?}");
        }
    }
}

#[test]
fn the_published_f16_cache_is_refused_and_q8_0_taken() {
    // A 14B model in Q8_0 at 65536: f16 would spill 1630 MiB, T* is 14 MiB at 10.3 GB/s and 11.2 ms resident.
    let model = dense(48, 13.85);
    let mut profile = machine("published-pcie6.7-ram11.5");
    profile.set("link_gb_s", 10.3).unwrap();
    profile.set("engage_ms", 0.82).unwrap();
    let request = Request {
        spill_model: SpillModel::Additive,
        ..ctx(65536)
    };
    profile = with_free(profile, 64 * GIB);
    let resident = plan(&request, &model, &profile);
    assert_eq!(resident.choice, "f16/f16");
    assert_eq!(resident.kv_bytes, 12_288 * MIB);
    let read = (model.active.bytes + resident.kv_bytes) as f64;
    profile
        .set("device_read_gb_s", read / 11.2e-3 / 1e9)
        .unwrap();
    // Four staging slots of 2 MiB are needed once something is outside.
    let free = resident.layout.fast_bytes + 8 * MIB - 1630 * MIB;
    let plan = plan(&request, &model, &with_free(profile, free));
    let f16 = &plan.tiers[0];
    assert_eq!(f16.over_bytes, 1630 * MIB);
    assert_eq!((f16.t_star_bytes as f64 / MIB as f64).round(), 14.0);
    assert!(!f16.within_target);
    assert_eq!(plan.choice, "q8_0/q8_0");
    assert_eq!(plan.kv_bytes, 6528 * MIB);
    assert_eq!(plan.layout.spill_bytes, 0);
    assert!(plan.reason.contains("1630 MiB"), "{}", plan.reason);
}

#[test]
fn a_larger_target_takes_more_spill_before_it_quantises() {
    let model = dense(48, 13.85);
    let profile = machine("24gb-pcie4-ddr5");
    let request = |spill_drop| Request {
        spill_drop,
        ..ctx(65536)
    };
    let strict = plan(&request(0.0), &model, &profile);
    let lax = plan(&request(0.6), &model, &profile);
    assert_eq!(lax.choice, "f16/f16");
    assert!(lax.layout.spill_bytes > 0);
    assert_ne!(strict.choice, "f16/f16");
}

#[test]
fn the_guard_on_the_spill_is_for_the_additive_model_alone() {
    let model = dense(48, 13.85);
    let mut profile = machine("24gb-pcie4-ddr5");
    profile.set("engage_ms", 0.0).unwrap();
    let t_star = |spill_model, spill_max_mib| {
        let request = Request {
            spill_model,
            spill_max_mib,
            spill_drop: 0.9,
            ..ctx(131_072)
        };
        plan(&request, &model, &profile).tiers[0].t_star_bytes
    };
    assert_eq!(t_star(SpillModel::Additive, None), 800 * MIB);
    assert_eq!(t_star(SpillModel::Additive, Some(10)), 10 * MIB);
    assert!(t_star(SpillModel::Overlapped, None) > 800 * MIB);
    assert_eq!(t_star(SpillModel::Overlapped, Some(10)), 10 * MIB);
}

#[test]
fn a_hybrid_with_a_long_context_fits_a_card() {
    // A public report: 32 layers, 8 of them caching 1024 + 1024 values, a file of 5.6 GB, 22,415 MiB free. The report's tool
    // counted every layer, said over 40 GB, and ran on the CPU.
    let mut header = Header::new("qwen35", 32)
        .heads(16, 4, 256, 256)
        .with("full_attention_interval", 4)
        .with("ssm.conv_kernel", 4)
        .with("ssm.inner_size", 4096)
        .with("ssm.group_count", 16)
        .with("ssm.state_size", 128)
        .tensor("token_embd.weight", "Q8_0", &[4096, 100_000]);
    for i in 0..32 {
        header = header.tensor(&format!("blk.{i}.ffn_up.weight"), "Q4_0", &[4096, 70_000]);
    }
    let model = header.model();
    assert!(model.weights.total() > 5_500_000_000);
    let profile = with_free(machine("24gb-pcie4-ddr5"), 22_415 * MIB);
    let request = ctx(262_144);
    let plan = plan(&request, &model, &profile);
    assert_eq!(plan.kv_bytes, 8192 * MIB);
    assert_eq!(plan.choice, "f16/f16");
    assert_eq!(plan.layout.host.iter().map(|p| p.bytes).sum::<u64>(), 0);
    let memory = Memory::of_profile(&request, &profile);
    assert!(!needs_profile(&request, &model, &memory).unwrap());
}

#[test]
fn nothing_is_decided_when_all_fits() {
    let model = dense(32, 4.0);
    let memory = |gib| Memory::new(&ctx(8192), 64 * GIB, Some((gib * GIB, 0)));
    let asks = |request: &Request, gib| needs_profile(request, &model, &memory(gib)).unwrap();
    assert!(!asks(&ctx(8192), 16));
    assert!(asks(&ctx(8192), 5));
    assert!(asks(&ctx(131_072), 16));
    let speed = Request {
        prefer: Prefer::Speed,
        ..ctx(8192)
    };
    assert!(asks(&speed, 16));
    let pinned = Request {
        type_v: Some(Q8_0),
        ..speed
    };
    assert!(!asks(&pinned, 16));
    let plan = plan(&ctx(8192), &model, &machine("16gb-pcie4-ddr5"));
    assert!(plan.reason.contains("nothing to decide"), "{}", plan.reason);
    assert_eq!(plan.layout.staging_slots, 0);
}

#[test]
fn what_is_pinned_is_kept() {
    let model = dense(48, 13.85);
    let profile = machine("16gb-pcie4-ddr5");
    let request = |type_k, type_v| Request {
        type_k,
        type_v,
        ..ctx(65536)
    };
    let tiers = |type_k, type_v| -> Vec<String> {
        let plan = plan(&request(type_k, type_v), &model, &profile);
        plan.tiers.iter().map(|t| t.tier().to_string()).collect()
    };
    assert_eq!(tiers(None, None), LADDER.map(|t| t.to_string()));
    assert_eq!(tiers(Some(F16), None), ["f16/f16", "f16/q8_0", "f16/q4_0"]);
    assert_eq!(
        tiers(Some(Q8_0), None),
        ["q8_0/f16", "q8_0/q8_0", "q8_0/q4_0"]
    );
    assert_eq!(tiers(None, Some(Q4_0)), ["f16/q4_0"]);
    assert_eq!(tiers(Some(Q4_0), Some(F16)), ["q4_0/f16"]);
}

#[test]
fn types_that_do_not_fit_the_heads_are_skipped_or_refused() {
    let model = Header::new("llama", 16).heads(32, 8, 80, 80).model();
    let profile = default_profile();
    let listed = plan(&ctx(4096), &model, &profile).tiers;
    assert_eq!(listed.len(), 1);
    for (type_k, type_v) in [(Some(Q8_0), None), (None, Some(Q4_0))] {
        let request = Request {
            type_k,
            type_v,
            ..ctx(4096)
        };
        let error = decide(&request, &model, &profile).unwrap_err().to_string();
        assert!(error.contains("80"), "{error}");
    }
}

#[test]
fn what_cannot_fit_says_what_would() {
    let model = dense(48, 9.0);
    let profile = default_profile();
    let request = Request {
        type_k: Some(F16),
        type_v: Some(F16),
        ..ctx(32_768)
    };
    let refused = plan(&request, &model, &profile);
    assert!(!refused.fits);
    assert_eq!(refused.memory.place, Place::Host);
    let text = refused.refusal().unwrap();
    assert!(text.starts_with("needs 1"), "{text}");
    assert!(text.contains("12.0 available"), "{text}");
    // Both hints are true, and the contexts they name are as large as can be.
    let hinted: Vec<u64> = refused
        .hints
        .iter()
        .map(|h| h.split(' ').find_map(|word| word.parse().ok()).unwrap())
        .collect();
    assert!(refused.hints[0].starts_with("with --ctx "), "{text}");
    assert!(
        refused.hints[1].starts_with("with q8_0/q8_0 it fits at "),
        "{text}"
    );
    let fits = |n_ctx, ty| {
        let request = Request {
            n_ctx,
            type_k: Some(ty),
            type_v: Some(ty),
            ..request
        };
        plan(&request, &model, &profile).fits
    };
    assert!(fits(hinted[0], F16) && !fits(hinted[0] + 1024, F16));
    assert!(fits(hinted[1], Q8_0));
    assert_eq!(refused.max_ctx / 1024 * 1024, hinted[0]);
    // And what cannot fit at any context has no hint.
    let huge = plan(&ctx(4096), &dense(48, 40.0), &profile);
    assert!(!huge.fits && huge.hints.is_empty(), "{:?}", huge.hints);
    assert_eq!(huge.max_ctx, 0);
}

#[test]
fn shorter_chunks_are_a_hint_where_they_are_enough() {
    let model = dense(48, 9.0);
    let with = |n_ubatch, bytes| {
        let request = Request {
            type_k: Some(F16),
            type_v: Some(F16),
            n_ubatch,
            ..ctx(8192)
        };
        let mut profile = default_profile();
        profile.host.memory_available_bytes = bytes;
        plan(&request, &model, &profile)
    };
    let (mut low, mut high) = (9 * GIB, 64 * GIB);
    while high - low > MIB {
        let middle = low + (high - low) / 2;
        if with(128, middle).fits {
            high = middle;
        } else {
            low = middle;
        }
    }
    let refused = with(512, high);
    assert!(!refused.fits && !with(256, high).fits);
    let hint = "with --ubatch 128 it fits";
    assert!(
        refused.hints.iter().any(|h| h == hint),
        "{:?}",
        refused.hints
    );
    // Not where it would not be.
    let hints = with(512, low - GIB).hints;
    assert!(!hints.iter().any(|h| h.contains("--ubatch")), "{hints:?}");
}

#[test]
fn the_largest_context_is_the_largest() {
    let model = dense(48, 13.85);
    let profile = machine("24gb-pcie4-ddr5");
    let request = ctx(8192);
    for t in plan(&request, &model, &profile).tiers {
        let at = |n_ctx| {
            let request = Request {
                n_ctx,
                type_k: Some(t.type_k),
                type_v: Some(t.type_v),
                ..request
            };
            plan(&request, &model, &profile).tiers[0].candidates[0].kind
        };
        assert_eq!(at(t.max_ctx), Kind::Resident);
        assert_ne!(at(t.max_ctx + 256), Kind::Resident);
    }
}

#[test]
fn experts_that_do_not_fit_are_cached() {
    let model = experts(16);
    let profile = machine("8gb-pcie4x8-ddr4");
    let plan = plan(&ctx(16_384), &model, &profile);
    assert!(plan.fits, "{plan:#?}");
    let l = &plan.layout;
    assert!(l.expert_slots > 100, "{l:?}");
    assert!(l.expert_cache_bytes < model.weights.experts);
    // Slots change what they hold: all experts are in host memory.
    let arena = l.host.iter().find(|p| p.what == "experts").unwrap();
    assert_eq!(arena.bytes, model.weights.experts);
    assert!(l.staging_slots >= 4);
    assert!(l.staging_slot_bytes >= model.layers[0].one_expert_bytes);
    let less = Request {
        expert_cache: Some(ExpertCache::Mib(256)),
        ..ctx(16_384)
    };
    let less = decide(&less, &model, &profile).unwrap();
    assert!(less.layout.expert_cache_bytes <= 256 * MIB);
    assert!(less.predicted[0].tok_s < plan.predicted[0].tok_s);
}

#[test]
fn weights_and_kv_spilled_are_two_plans_of_one_comparison() {
    let model = dense(48, 13.85);
    let profile = machine("24gb-pcie3-ddr4");
    let request = Request {
        type_v: Some(F16),
        spill_drop: 0.9,
        ..ctx(65_536)
    };
    let plan = plan(&request, &model, &profile);
    let of = |kind| {
        let found = plan.tiers[0].candidates.iter().find(|c| c.kind == kind);
        found.unwrap_or_else(|| panic!("{kind:?} of {:#?}", plan.tiers[0].candidates))
    };
    let (kv, weights) = (of(Kind::KvSpilled), of(Kind::WeightsSpilled));
    assert_eq!(kv.placement.dense_host_bytes, 0);
    assert_eq!(weights.spill_bytes, 0);
    // While few tokens are live a spilled tail costs nothing, and spilled weights always do.
    assert!(kv.predicted[0].tok_s > weights.predicted[0].tok_s);
    let best = plan.tiers[0].best().unwrap();
    let fastest = plan.tiers[0].candidates.iter().filter(|c| c.within_target);
    let fastest = fastest.map(|c| c.mean_ms).fold(f64::INFINITY, f64::min);
    assert_eq!(best.mean_ms, fastest);
}

#[test]
fn what_is_worth_more_gets_more() {
    // The balanced division is never worse than its model's word on the two simple ones, by more than a step.
    for (model, name) in [
        (experts(16), "8gb-pcie4x8-ddr4"),
        (experts(8), "8gb-pcie3-ddr4"),
        (dense(48, 13.85), "16gb-pcie5-ddr5"),
        (dense(48, 20.0), "16gb-pcie4-ddr5"),
    ] {
        let plan = plan(&ctx(65_536), &model, &machine(name));
        for t in &plan.tiers {
            let best = t
                .candidates
                .iter()
                .map(|c| c.mean_ms)
                .fold(f64::INFINITY, f64::min);
            let balanced = t.candidates.iter().find(|c| c.kind == Kind::Balanced);
            if let Some(c) = balanced {
                assert!(
                    c.mean_ms <= best * 1.03,
                    "{name} {}: {:#?}",
                    t.tier(),
                    t.candidates
                );
            }
        }
    }
}

#[test]
fn speed_takes_the_fastest_above_the_floor() {
    let model = dense(48, 13.85);
    let profile = machine("24gb-pcie4-ddr5");
    let request = |min_tier| Request {
        prefer: Prefer::Speed,
        min_tier,
        ..ctx(65_536)
    };
    let fastest = |plan: &Plan, floor: Tier| {
        let above = plan
            .tiers
            .iter()
            .filter(|t| !t.tier().is_below(floor) && t.fits);
        let mean = above.map(|t| t.best().unwrap().mean_ms);
        mean.fold(f64::INFINITY, f64::min)
    };
    for floor in LADDER {
        let plan = plan(&request(floor), &model, &profile);
        assert!(!plan.tier().is_below(floor));
        let mean = plan.chosen().unwrap().best().unwrap().mean_ms;
        assert_eq!(mean, fastest(&plan, floor));
    }
}

#[test]
fn a_cap_is_a_cap_and_0_is_none() {
    let model = dense(32, 4.0);
    let profile = machine("16gb-pcie4-ddr5");
    let with = |vram_target_mib, device_mem_mib| {
        let request = Request {
            vram_target_mib,
            device_mem_mib,
            ..ctx(32_768)
        };
        plan(&request, &model, &profile).memory.fast_bytes
    };
    let free = profile.device.as_ref().unwrap().free_bytes;
    assert_eq!(with(0, None), free);
    assert_eq!(with(6000, None), 6000 * MIB);
    assert_eq!(with(1 << 40, None), free);
    assert_eq!(with(6000, Some(5000)), 5000 * MIB);
}

#[test]
fn chunks_grow_where_nothing_suffers() {
    let model = dense(48, 10.0);
    let request = Request {
        spill_weights: SpillWeights::Experts,
        n_ubatch_max: 4096,
        ..ctx(16_384)
    };
    let on = |request: &Request, free: u64| {
        plan(request, &model, &with_free(machine("h200-pcie5"), free))
    };
    let ample = on(&request, 100 * GIB);
    assert_eq!((ample.layout.spill_bytes, ample.n_ubatch), (0, 2048));
    // As many as were asked for, and no more than the context.
    let asked = Request {
        n_ubatch_max: 0,
        ..request
    };
    assert_eq!(on(&asked, 100 * GIB).n_ubatch, 512);
    let short = Request {
        n_ctx: 1000,
        ..request
    };
    assert_eq!(on(&short, 100 * GIB).n_ubatch, 1024);
    // Answers of others would wait for them.
    let many = Request {
        n_seq: 4,
        ..request
    };
    assert_eq!(on(&many, 100 * GIB).n_ubatch, 512);
    // The work space must not move anything out.
    let plain = on(&asked, 100 * GIB);
    let tight = on(&request, plain.layout.fast_bytes);
    assert_eq!((tight.layout.spill_bytes, tight.n_ubatch), (0, 512));
    // On the CPU a longer chunk gives nothing.
    let cpu = plan(&request, &model, &machine("cpu-16-cores"));
    assert_eq!(cpu.n_ubatch, 512);
}

#[test]
fn chunks_grow_where_experts_are_copied_for_each() {
    let model = experts(16);
    let request = Request {
        n_ubatch_max: 4096,
        expert_cache: Some(ExpertCache::Percent(50.0)),
        ..ctx(16_384)
    };
    let on = |request: &Request| plan(request, &model, &machine("h200-pcie5"));
    let grown = on(&request);
    assert_eq!((grown.fits, grown.n_ubatch), (true, 4096));
    let plain = on(&Request {
        n_ubatch_max: 0,
        ..request
    });
    assert_eq!(plain.n_ubatch, 512);
    let ms = |plan: &Plan| plan.predicted.last().unwrap().token.t_ms;
    assert!(ms(&grown) <= ms(&plain) * 1.02);
}

#[test]
fn chunks_grow_for_a_tail_where_all_experts_are_resident() {
    let model = experts(16);
    let request = Request {
        spill_weights: SpillWeights::None,
        type_k: Some(F16),
        type_v: Some(F16),
        n_seq: 2,
        ..ctx(262_144)
    };
    let on = |n_ubatch_max: u64, free: u64| {
        let request = Request {
            n_ubatch_max,
            ..request
        };
        plan(&request, &model, &with_free(machine("h200-pcie5"), free))
    };
    let all = on(0, 130 * GIB);
    assert_eq!(all.layout.spill_bytes, 0);
    // Experts are more than the tail, which is what is copied.
    let free = all.layout.fast_bytes - 8 * GIB;
    let (plain, grown) = (on(0, free), on(4096, free));
    assert!(plain.layout.spill_bytes > 7 * GIB && plain.layout.expert_cache_bytes > 11 * GIB);
    assert_eq!(plain.n_ubatch, 512);
    assert!(grown.n_ubatch >= 1024, "{}", grown.n_ubatch);
}

#[test]
fn chunks_grow_where_a_long_tail_is_copied_for_each() {
    let model = dense(48, 10.0);
    let request = Request {
        spill_weights: SpillWeights::Experts,
        type_k: Some(KvType::F16),
        type_v: Some(KvType::F16),
        n_ubatch_max: 4096,
        ..ctx(131_072)
    };
    let on = |request: &Request, free: u64| {
        plan(request, &model, &with_free(machine("h200-pcie5"), free))
    };
    let all = on(
        &Request {
            n_ubatch_max: 0,
            ..request
        },
        100 * GIB,
    );
    assert_eq!((all.layout.spill_bytes, all.n_ubatch), (0, 512));
    // 12 GiB of cells in host memory take about 250 ms, a chunk of 512 tokens 40.
    let free = all.layout.fast_bytes - 12 * GIB;
    let grown = on(&request, free);
    assert!(grown.n_ubatch >= 1024, "{}", grown.n_ubatch);
    let asked = Request {
        n_ubatch_max: 0,
        ..request
    };
    let plain = on(&asked, free);
    assert_eq!(plain.n_ubatch, 512);
    // Its work space is planned, and tokens hardly suffer.
    assert!(grown.work_bytes > plain.work_bytes);
    assert!(grown.layout.spill_bytes >= plain.layout.spill_bytes);
    let ms = |plan: &Plan| plan.predicted.last().unwrap().token.t_ms;
    assert!(ms(&grown) <= ms(&plain) * 1.02);
    // A tail of a few blocks is copied beside what a chunk computes.
    let little = on(&request, all.layout.fast_bytes - GIB);
    assert_eq!(little.n_ubatch, 512);
}

#[test]
fn an_embedding_leaves_a_device_where_not_all_has_room() {
    let model = dense(48, 10.0);
    let embedding = model.weights.embedding;
    assert!(embedding > 0);
    let sessions = Request {
        spill_weights: SpillWeights::Experts,
        type_k: Some(KvType::F16),
        type_v: Some(KvType::F16),
        ..ctx(32_768)
    };
    let on = |request: &Request, free: u64| {
        plan(request, &model, &with_free(machine("h200-pcie5"), free))
    };
    let roomy = on(&sessions, 100 * GIB);
    assert_eq!(roomy.layout.embedding_host_bytes, 0);
    let kv = roomy.kv_alloc_bytes;
    // Just not enough for all: what is missing is less than the embedding, and no cell is outside.
    let whole = roomy.layout.fast_bytes;
    let nearly = on(&sessions, whole - embedding / 2);
    assert_eq!(nearly.layout.embedding_host_bytes, embedding);
    assert_eq!(nearly.layout.spill_bytes, 0);
    // With far too little the cells get its room.
    let free = whole - kv / 2;
    let with = on(&sessions, free);
    let none = Request {
        spill_weights: SpillWeights::None,
        ..sessions
    };
    let without = on(&none, free);
    assert_eq!(without.layout.embedding_host_bytes, 0);
    let slab = kv / (32_768 / BLOCK_CELLS);
    let saved = without.layout.spill_bytes - with.layout.spill_bytes;
    assert!(
        saved + slab > embedding && saved < embedding + slab,
        "{saved} of {embedding}"
    );
    // It is pinned, or stays.
    let little = Request {
        pin_max_bytes: Some(embedding - 1),
        ..sessions
    };
    assert_eq!(on(&little, free).layout.embedding_host_bytes, 0);
    // A product reads one that is the output's, too.
    let tied = Header::new("qwen2", 2)
        .with("embedding_length", 5120)
        .heads(40, 8, 128, 128)
        .tensor("token_embd.weight", "Q8_0", &[5120, 100_000])
        .model();
    let tied = plan(&sessions, &tied, &with_free(machine("h200-pcie5"), GIB));
    assert_eq!(tied.layout.embedding_host_bytes, 0);
}

#[test]
fn main_memory_can_play_a_device() {
    let model = dense(24, 3.0);
    let profile = default_profile();
    let request = |spill_model| Request {
        device_mem_mib: Some(4096),
        // Weights outside would cost nothing at all.
        spill_weights: SpillWeights::None,
        spill_model,
        ..ctx(32_768)
    };
    let overlapped = plan(&request(SpillModel::Overlapped), &model, &profile);
    assert_eq!(overlapped.memory.place, Place::VirtualDevice);
    assert_eq!(overlapped.memory.fast_bytes, 4096 * MIB);
    assert_eq!(
        overlapped.memory.fast_bytes + overlapped.memory.host_bytes,
        profile.host.memory_available_bytes
    );
    // The same cores attend over the same memory, wherever its border is drawn, but for blocks that make no whole group: these are copied.
    assert_eq!(overlapped.choice, "f16/f16");
    let blocks = overlapped.layout.tail_cells / BLOCK_CELLS;
    assert!(blocks > 0);
    assert_eq!(overlapped.cpu_share, 1.0);
    let whole = plan(&ctx(32_768), &model, &profile);
    let last = |plan: &Plan| plan.predicted.last().unwrap().token;
    let (spilled, resident) = (last(&overlapped), last(&whole));
    let slab = overlapped.layout.spill_bytes / blocks;
    let copied = (blocks % GROUP_BLOCKS * slab) as f64;
    assert!((spilled.streamed_bytes - copied).abs() < 1.0);
    let link = profile.host.copy_gb_s.all.value * 1e6;
    let forks = (blocks % GROUP_BLOCKS * 24) as f64 * profile.host.fork_join_us.value / 1e3;
    let expected = resident.t_ms + copied / link + forks;
    assert!((spilled.t_ms / expected - 1.0).abs() < 1e-9);
    // All of it is copied where the CPU is to attend nothing.
    let none_asked = Request {
        kv_share: Some(0.0),
        spill: Spill::Auto,
        type_k: Some(KvType::F16),
        type_v: Some(KvType::F16),
        ..request(SpillModel::Overlapped)
    };
    let none = plan(&none_asked, &model, &profile);
    let all = last(&none);
    assert_eq!((all.cpu_bytes, none.cpu_share), (0.0, 0.0));
    assert!((all.streamed_bytes - none.layout.spill_bytes as f64).abs() < 1.0);
    // A plan knows its tokens at any depth: within the window nothing is outside.
    let at = |depth| none.token_at(&none_asked, &model, &profile, depth).unwrap();
    assert_eq!(at(32_768), all);
    assert_eq!(at(none.layout.window_cells).streamed_bytes, 0.0);
    assert!(at(none.layout.window_cells + 1).streamed_bytes > 0.0);
    // The additive model counts every byte outside.
    let additive = plan(&request(SpillModel::Additive), &model, &profile);
    assert_ne!(additive.choice, "f16/f16");
}

#[test]
fn on_the_cpu_a_token_is_its_terms() {
    let model = dense(24, 3.0);
    let profile = default_profile();
    let plan = plan(&ctx(8192), &model, &profile);
    assert_eq!(plan.memory.place, Place::Host);
    let depths: Vec<u64> = plan.predicted.iter().map(|p| p.depth).collect();
    assert_eq!(depths, [2048, 8192]);
    let q8 = profile
        .host
        .products
        .iter()
        .find(|p| p.format == "Q8_0")
        .unwrap();
    let dense_bytes = model.active.bytes - model.active.embedding_row;
    let rate = profile.host.attention[0].clone();
    for p in &plan.predicted {
        let t = &p.token;
        let weights = dense_bytes as f64 / (q8.decode_gb_s.value * 1e6);
        assert!((t.weights_ms / weights - 1.0).abs() < 1e-9);
        let operations = (24.0 * 2.0 + 1.0) * profile.host.fork_join_us.value / 1e3;
        assert!((t.operations_ms - operations).abs() < 1e-9);
        // 40 query heads where 32 were measured.
        let cells_us = rate.ns_cell.value * 40.0 / 32.0 * p.depth as f64 / 1e3;
        let attention = 24.0 * (rate.engage_us.value + cells_us) / 1e3;
        assert!((t.attention_ms / attention - 1.0).abs() < 1e-9);
        let sum = t.weights_ms + t.experts_ms + t.operations_ms + t.attention_ms + t.state_ms;
        assert!((t.t_ms - sum).abs() < 1e-9 && t.spill_ms == 0.0);
        assert!((p.tok_s * t.t_ms / 1e3 - 1.0).abs() < 1e-9);
    }
}

#[test]
fn the_json_has_what_scripts_read() {
    let model = experts(16);
    let plan = plan(&ctx(16_384), &model, &machine("8gb-pcie4x8-ddr4"));
    let json = serde_json::to_value(&plan).unwrap();
    for key in [
        "weight_bytes",
        "expert_bytes",
        "active_bytes_per_token",
        "kv_bytes",
        "kv_alloc_bytes",
        "recurrent_bytes",
        "t_star_bytes",
        "max_ctx",
    ] {
        assert!(json[key].is_u64(), "{key}: {}", json[key]);
    }
    assert!(json["choice"].is_string() && json["reason"].is_string());
    let tiers = json["tiers"].as_array().unwrap();
    assert_eq!(tiers.len(), 4);
    for tier in tiers {
        assert!(tier["type_k"].is_string() && tier["type_v"].is_string());
        assert!(tier["kv_bytes"].is_u64() && tier["spill_bytes"].is_u64());
        assert!(tier["tok_s"].is_f64());
    }
}

#[test]
fn the_explanation_says_everything() {
    let model = dense(48, 13.85);
    let plan = plan(&ctx(65_536), &model, &machine("24gb-pcie4-ddr5"));
    let text = plan.explain().join("\n");
    for t in &plan.tiers {
        for bytes in [t.kv_bytes, t.spill_bytes, t.t_star_bytes] {
            assert!(
                text.contains(&format!("({bytes} bytes)")),
                "{bytes} in {text}"
            );
        }
        assert!(text.contains(&format!("{:.2} tok/s", t.tok_s)));
    }
    for part in plan.layout.fast.iter().chain(&plan.layout.host) {
        assert!(
            text.contains(&format!("{}: ", part.what)) && text.contains(&part.bytes.to_string())
        );
    }
    for said in [
        "binds at",
        "T*",
        "20.0 %",
        &plan.choice,
        &plan.reason,
        "example",
    ] {
        assert!(text.contains(said), "{said} in {text}");
        assert!(said == "20.0 %" || said == "example" || plan.record().contains(said));
    }
    assert!(!plan.record().contains('\n'));
    assert!(!plan.explain().iter().any(|line| line.contains('\n')));
}

#[test]
fn the_plot_has_a_line_for_each_tier() {
    let model = dense(48, 13.85);
    let drawn = plan(&ctx(65_536), &model, &machine("24gb-pcie4-ddr5"));
    let svg = place::plot::svg(&drawn);
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches("<polyline ").count(), 4);
    assert_eq!(
        svg.matches("<text ").count(),
        svg.matches("</text>").count()
    );
    assert!(svg.contains(&format!("{} (chosen)", drawn.choice)));
    assert!(!svg.contains("NaN") && !svg.contains("inf"));
    // And without anything to spill it says so.
    let none = place::plot::svg(&plan(&ctx(4096), &dense(8, 1.0), &default_profile()));
    assert!(none.contains("nothing can be spilled"));
}

fn any_type() -> impl Strategy<Value = Option<KvType>> {
    prop_oneof![
        3 => Just(None),
        1 => Just(Some(F16)),
        1 => Just(Some(Q8_0)),
        1 => Just(Some(Q4_0)),
    ]
}

prop_compose! {
    fn any_request()(
        n_ctx in 1_u64..300_000,
        n_seq in 1_u64..5,
        n_ubatch in prop_oneof![Just(1_u64), Just(512), Just(2048)],
        types in (any_type(), any_type()),
        vram_target_mib in prop_oneof![2 => Just(0_u64), 1 => 1_u64..40_000],
        device_mem_mib in prop_oneof![2 => Just(None), 1 => (1_u64..40_000).prop_map(Some)],
        spill in prop_oneof![3 => Just(Spill::Auto), 1 => Just(Spill::Off), 1 => (0_u64..20_000).prop_map(Spill::Mib)],
        spill_drop in 0.0..1.0_f64,
        additive in any::<bool>(),
        speed in any::<bool>(),
        floor in 0_usize..4,
        expert_cache in prop_oneof![2 => Just(None), 1 => (0_u64..20_000).prop_map(|mib| Some(ExpertCache::Mib(mib))), 1 => (0.0..110.0f64).prop_map(|part| Some(ExpertCache::Percent(part)))],
        threads in prop_oneof![2 => Just(None), 1 => (0_u32..40).prop_map(Some)],
        spill_weights in prop_oneof![2 => Just(SpillWeights::All), 1 => Just(SpillWeights::Experts), 1 => Just(SpillWeights::None)],
        expert_share in prop_oneof![2 => Just(None), 1 => (0.0..=1.0f64).prop_map(Some)],
    ) -> Request {
        Request {
            n_ctx, n_seq, n_ubatch, type_k: types.0, type_v: types.1, vram_target_mib, device_mem_mib, spill, spill_drop,
            spill_model: if additive { SpillModel::Additive } else { SpillModel::Overlapped },
            prefer: if speed { Prefer::Speed } else { Prefer::Quality },
            min_tier: LADDER[floor],
            expert_cache, threads, spill_weights, expert_share,
            ..Request::default()
        }
    }
}

fn any_model() -> impl Strategy<Value = Model> {
    prop_oneof![
        (4_u64..60, 0.5..40.0_f64).prop_map(|(layers, gib)| dense(layers, gib)),
        (1_u64..30).prop_map(experts),
        (8_u64..40).prop_map(|layers| Header::new("gemma3", layers)
            .with("attention.sliding_window", 1024)
            .tensor("token_embd.weight", "Q8_0", &[4096, 20_000])
            .tensor("blk.0.ffn_up.weight", "Q4_0", &[4096, 100_000])
            .model()),
    ]
}

fn any_machine() -> impl Strategy<Value = Profile> {
    let names: Vec<&str> = example_names().into_iter().chain(["default"]).collect();
    proptest::sample::select(names).prop_map(machine)
}

/// Sets a term of a machine's device.
fn faster(profile: &Profile, term: &str, path: &str, by: f64) -> Profile {
    let mut out = profile.clone();
    let old = profile
        .figures()
        .into_iter()
        .find(|(p, ..)| p.starts_with(path))
        .unwrap();
    out.set(term, old.1.value * by).unwrap();
    out
}

fn t_stars(request: &Request, model: &Model, profile: &Profile) -> Vec<u64> {
    let plan = decide(request, model, profile).unwrap();
    plan.tiers.iter().map(|t| t.t_star_bytes).collect()
}

fn never_falls(from: &[u64], to: &[u64]) -> bool {
    // A byte of rounding.
    from.iter().zip(to).all(|(a, b)| *b + 1 >= *a)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_plan_keeps_its_promises(request in any_request(), model in any_model(), profile in any_machine()) {
        let one = decide(&request, &model, &profile).unwrap();
        check(&request, &model, &profile, &one);
        prop_assert_eq!(&one, &decide(&request, &model, &profile).unwrap());
        let memory = Memory::of_profile(&request, &profile);
        if !needs_profile(&request, &model, &memory).unwrap() {
            // Nothing is decided: any machine with as much memory gives the same.
            let first = allowed(&model, request.type_k, request.type_v).unwrap()[0];
            prop_assert!(one.fits && one.tier() == first && one.layout.spill_bytes == 0);
        }
        prop_assert!(place::plot::svg(&one).ends_with("</svg>\n"));
        prop_assert!(!one.explain().is_empty());
    }

    #[test]
    fn t_star_never_falls_as_machine_or_target_get_better(
        request in any_request(), model in any_model(), by in 1.0..3.0_f64, at in 0_usize..9,
    ) {
        let profile = machine(example_names()[at]);
        let request = Request { spill: Spill::Auto, device_mem_mib: None, threads: None, ..request };
        let now = t_stars(&request, &model, &profile);
        let more = Request { spill_drop: (request.spill_drop * by).min(1.0), ..request };
        prop_assert!(never_falls(&now, &t_stars(&more, &model, &profile)));
        for (term, path) in [
            ("link_gb_s", "device.link.to_device_pinned"),
            ("host_read_gb_s", "host.read_gb_s.all"),
        ] {
            // All sizes of the link get the rate of the smallest times `by`: start from one rate for all.
            let base = faster(&profile, term, path, 1.0);
            let better = faster(&base, term, path, by);
            let (now, then) = (t_stars(&request, &model, &base), t_stars(&request, &model, &better));
            prop_assert!(never_falls(&now, &then), "{} {:?} {:?}", term, now, then);
        }
        let base = faster(&profile, "cpu_attention_ns_cell", "host.attention", 1.0);
        let better = faster(&base, "cpu_attention_ns_cell", "host.attention", 1.0 / by);
        prop_assert!(never_falls(&t_stars(&request, &model, &base), &t_stars(&request, &model, &better)));
        let additive = Request { spill_model: SpillModel::Additive, ..request };
        let better = faster(&profile, "device_read_gb_s", "device.read_gb_s", by);
        prop_assert!(never_falls(&t_stars(&additive, &model, &better), &t_stars(&additive, &model, &profile)));
    }

    #[test]
    fn absurd_numbers_are_answered(
        request in any_request(), model in any_model(), profile in any_machine(),
        values in proptest::collection::vec(prop_oneof![
            Just(0.0), Just(f64::NAN), Just(f64::INFINITY), Just(f64::NEG_INFINITY), Just(-1.0), Just(1e300), Just(1e-300), Just(5.0),
        ], 8),
        bytes in proptest::collection::vec(prop_oneof![Just(0_u64), Just(1), Just(u64::MAX), Just(1 << 33)], 4),
        numbers in proptest::collection::vec(prop_oneof![Just(0_u64), Just(1), Just(u64::MAX), Just(1 << 40)], 6),
    ) {
        let mut absurd = profile.clone();
        let mut i = 0;
        absurd.visit_mut(&mut |_, figure, _| {
            figure.value = values[i % values.len()];
            i += 1;
        });
        absurd.host.memory_available_bytes = bytes[0];
        if let Some(device) = &mut absurd.device {
            device.free_bytes = bytes[1];
        }
        absurd.key.threads = bytes[2] as u32;
        let wild = Request {
            n_ctx: numbers[0], n_seq: numbers[1], n_ubatch: numbers[2], vram_target_mib: numbers[3],
            device_mem_mib: Some(numbers[4]), spill: Spill::Mib(numbers[5]), spill_drop: values[0],
            expert_cache: Some(ExpertCache::Mib(numbers[3])), spill_max_mib: Some(numbers[4]),
            ..request
        };
        // A sane request on an absurd machine, an absurd one on a sane machine, and both.
        for (request, profile) in [(&request, &absurd), (&wild, &profile), (&wild, &absurd)] {
            if let Ok(plan) = decide(request, &model, profile) {
                prop_assert!(plan.layout.spill_bytes <= plan.kv_alloc_bytes);
                prop_assert!(place::plot::svg(&plan).ends_with("</svg>\n"));
                prop_assert!(!plan.explain().is_empty() && !plan.record().is_empty());
                prop_assert!(serde_json::to_string(&plan).is_ok());
            }
        }
    }
}
