use proptest::prelude::*;

use super::*;
use crate::profile::{Profile, example};

const MIB: f64 = 1_048_576.0;

/// Both published hosts: link, host memory, slope, engage cost.
fn published(name: &str) -> (Profile, f64, f64) {
    let profile = example(name).unwrap();
    let link = profile.device.as_ref().unwrap().link.to_device_pinned[0]
        .gb_s
        .value;
    let host = profile.host.read_gb_s.all.value;
    (profile, link, host)
}

#[test]
fn the_first_published_host_is_bound_by_its_link() {
    let (profile, link, host) = published("published-pcie6.7-ram11.5");
    assert_eq!(bw_eff_gb_s(link, host), (6.7, Binding::Link));
    assert_eq!(host, 11.5);
    assert_eq!(profile.host.engage.slope_ms_cell.unwrap().value, 6.2e-4);
    assert_eq!(profile.host.engage.engage_ms.unwrap().value, 0.80);
    // A cell of one layer of the published model, 8 KV heads of 128 in f16, at that rate is the measured slope.
    let slope = ms(4096.0, 6.7);
    assert!((slope / 6.2e-4 - 1.0).abs() < 0.02, "{slope}");
}

#[test]
fn the_second_published_host_is_bound_by_its_memory() {
    let (profile, link, host) = published("published-pcie51.2-ram9.3");
    assert_eq!(bw_eff_gb_s(link, host), (9.3, Binding::HostMemory));
    assert_eq!(link, 51.2);
    assert_eq!(profile.host.engage.slope_ms_cell.unwrap().value, 2.6e-4);
    assert_eq!(profile.host.engage.engage_ms.unwrap().value, 0.82);
}

#[test]
fn t_star_of_the_first_host_at_106k() {
    let (profile, link, host) = published("published-pcie6.7-ram11.5");
    let model = Additive {
        t_resident_ms: 37.0,
        engage_ms: profile.host.engage.engage_ms.unwrap().value,
        bw_eff_gb_s: bw_eff_gb_s(link, host).0,
    };
    for (target, published) in [(0.02, 0.0), (0.30, 62.0), (0.70, 157.0), (0.99, 235.0)] {
        let t_star = model.t_star_bytes(target) / MIB;
        assert!(
            (t_star - published).abs() <= 0.07 * published,
            "{target}: {t_star}"
        );
        // The largest tail within the target is at the target.
        if t_star > 0.0 {
            assert!((model.slow_down(t_star * MIB) - target).abs() < 1e-9);
        }
    }
}

#[test]
fn a_short_context_refuses_by_itself() {
    // 11.2 ms resident, 10.3 GB/s, target 0.20: 14 MiB, against a spill of 1630.
    let model = Additive {
        t_resident_ms: 11.2,
        engage_ms: 0.82,
        bw_eff_gb_s: 10.3,
    };
    let t_star = model.t_star_bytes(0.20) / MIB;
    assert_eq!(t_star.round(), 14.0);
    assert!(t_star < 1630.0);
    // The context is halved: the engage cost eats the whole allowance.
    let short = Additive {
        t_resident_ms: 4.0,
        ..model
    };
    assert_eq!(short.t_star_bytes(0.20), 0.0);
}

#[test]
fn slow_down_and_drop_are_two_figures() {
    assert_eq!(drop_of_slow_down(0.0), 0.0);
    assert_eq!(drop_of_slow_down(1.0), 0.5);
    assert!((drop_of_slow_down(0.25) - 0.20).abs() < 1e-15);
    assert_eq!(drop_of_slow_down(f64::INFINITY), 1.0);
    let model = Additive {
        t_resident_ms: 10.0,
        engage_ms: 1.0,
        bw_eff_gb_s: 10.0,
    };
    // 1 ms to engage and 1 ms for 10 MB: a fifth slower.
    assert!((model.slow_down(1e7) - 0.2).abs() < 1e-12);
    assert!((model.drop(1e7) - 0.2 / 1.2).abs() < 1e-12);
    assert_eq!(model.drop(0.0), 0.0);
}

#[test]
fn resident_time_is_bytes_over_the_device_rate() {
    assert!((t_resident_ms(14.0e9, 6.0e9, 1000.0) - 20.0).abs() < 1e-12);
    assert_eq!(t_resident_ms(1.0, 0.0, 0.0), f64::INFINITY);
    assert_eq!(t_resident_ms(0.0, 0.0, 0.0), 0.0);
}

/// A machine with round numbers: 20 ms for all else, 1000 GB/s of attention over 1 GB.
fn round() -> Overlapped {
    Overlapped {
        link_gb_s: 50.0,
        cpu_gb_s: 80.0,
        link_kept: 1.0,
        cpu_kept: 1.0,
        device_kept: 1.0,
        t_sync_ms: 0.0,
        layers: 32.0,
        t_other_ms: 20.0,
        attention_engage_ms: 0.0,
        attention_least_ms: 0.0,
        attention_gb_s: 1000.0,
        kv_bytes: 1e9,
        copied_bytes: 0.0,
        staging_bytes: f64::INFINITY,
        share_ms: 0.0,
        batch_ms: 0.0,
        group_bytes: 0.0,
        least_gain: 0.0,
    }
}

#[test]
fn copies_that_end_in_time_cost_nothing() {
    let model = round();
    assert!((model.t_resident_ms() - 21.0).abs() < 1e-12);
    // 21 ms of the link are 1.05 GB: all of the KV. The CPU helps a little on top.
    assert!((model.split(1e9, 0.0).t_ms - 21.0).abs() < 1e-12);
    let best = model.best_split(1e9).t_ms;
    assert!(best > 20.9 && best < 21.0, "{best}");
    assert_eq!(model.drop(1e9), 0.0);
    assert_eq!(model.t_star_bytes(0.0), 1e9);
}

#[test]
fn copies_bind_when_there_is_more_than_they_carry() {
    let model = Overlapped {
        kv_bytes: 4e9,
        cpu_gb_s: 0.0,
        ..round()
    };
    // 24 ms resident; 2 GB take 40 ms.
    let split = model.best_split(2e9);
    assert!((split.t_ms - 40.0).abs() < 1e-9 && split.link_binds);
    assert!((model.drop(2e9) - 16.0 / 40.0).abs() < 1e-9);
    // A drop of 0.2 allows 30 ms: 1.5 GB.
    assert!((model.t_star_bytes(0.2) - 1.5e9).abs() < 1.0);
}

#[test]
fn the_cpu_takes_what_makes_both_end_together() {
    let model = Overlapped {
        kv_bytes: 4e9,
        ..round()
    };
    let split = model.best_split(4e9);
    // (4 - C) / 50 = 20 ms + C / 80 in GB and ms.
    let cpu = (4e9 / 50e6 - 20.0) / (1.0 / 50e6 + 1.0 / 80e6);
    assert!((split.cpu_bytes / cpu - 1.0).abs() < 1e-9, "{split:?}");
    assert!((split.t_ms - split.streamed_bytes / 50e6).abs() < 1e-6);
    // Neither alone is better.
    assert!(split.t_ms < model.split(4e9, 0.0).t_ms);
    assert!(split.t_ms < model.split(0.0, 4e9).t_ms);
}

#[test]
fn handing_over_costs() {
    let model = Overlapped {
        kv_bytes: 4e9,
        t_sync_ms: 0.235,
        ..round()
    };
    let without = round();
    let without = Overlapped {
        kv_bytes: 4e9,
        ..without
    };
    let lost = model.best_split(4e9).t_ms - without.best_split(4e9).t_ms;
    // At most the hand-overs of 32 layers, less what the link takes back.
    assert!(lost > 1.0 && lost < 0.235 * 32.0, "{lost}");
}

#[test]
fn many_staging_slots_are_filled_in_few_batches() {
    // 320 MB in 32 layers: 10 MB each.
    let ms = |staging_mb: f64| {
        let model = Overlapped {
            staging_bytes: staging_mb * 1e6,
            batch_ms: 0.01,
            ..round()
        };
        model.split(320e6, 0.0).t_ms - 21.0
    };
    // A batch a layer, or one for four, and one with which a token begins.
    assert!((ms(20.0) - 0.33).abs() < 1e-9, "{}", ms(20.0));
    assert!((ms(80.0) - 0.09).abs() < 1e-9, "{}", ms(80.0));
    assert!((ms(f64::INFINITY) - 0.01).abs() < 1e-9);
}

#[test]
fn a_share_that_saves_next_to_nothing_is_not_taken() {
    let model = |least_gain: f64| Overlapped {
        kv_bytes: 4e9,
        share_ms: 0.01,
        least_gain,
        ..round()
    };
    // Copies of 1.25 GB take 25 ms, everything else 24.
    let cpu = |least_gain: f64| model(least_gain).best_split(1.25e9).cpu_bytes;
    assert!(cpu(0.0) > 0.0);
    assert_eq!(cpu(0.05), 0.0);
    // Where it saves more it is.
    assert!(model(0.05).best_split(2e9).cpu_bytes > 0.0);
}

#[test]
fn a_layer_waits_for_whole_groups() {
    // 0.1 GB a group over all layers: 1.25 ms by the CPU; the device attends all of it in 4 ms.
    let model = Overlapped {
        kv_bytes: 4e9,
        group_bytes: 0.1e9,
        ..round()
    };
    // Half of the layers have three groups and half have four: 3.75 ms and 5, the former hidden.
    let (three, four) = ((4e9 - 0.3e9) / 1e9, 0.4e9 / 80e6);
    let t = model.split(0.0, 0.35e9).t_ms;
    assert!(
        (t - 20.0 - (3.75_f64.max(three) + four) / 2.0).abs() < 1e-9,
        "{t}"
    );
    // Of a tail of two and a half the CPU can have two.
    let all = model.shared(0.25e9, 1.0);
    assert!((all.cpu_bytes - 0.2e9).abs() < 1.0 && (all.streamed_bytes - 0.05e9).abs() < 1.0);
    assert_eq!(model.shared(0.09e9, 1.0).cpu_bytes, 0.0);
    let half = model.shared(0.25e9, 0.5);
    assert!((half.cpu_bytes - 0.125e9).abs() < 1.0);
}

#[test]
fn copies_slow_the_device_while_they_come() {
    let model = Overlapped {
        device_kept: 0.9,
        cpu_gb_s: 0.0,
        ..round()
    };
    // 10 ms of copies beside 21 ms of everything else.
    assert!((model.split(0.5e9, 0.0).t_ms - 22.0).abs() < 1e-9);
    // A drop of 0.05 allows 21 / 0.95 ms, ten times what is more than 21 of copies.
    let star = (21.0 / 0.95 - 21.0) / 0.1 * 50e6;
    assert!((model.t_star_bytes(0.05) / star - 1.0).abs() < 1e-9);
}

#[test]
fn few_staging_slots_make_layers_wait() {
    let all = Overlapped {
        kv_bytes: 2e9,
        cpu_gb_s: 0.0,
        ..round()
    };
    let few = Overlapped {
        staging_bytes: 16e6,
        share_ms: 0.0,
        batch_ms: 0.0,
        least_gain: 0.0,
        ..all
    };
    // 0.9 GB fit into the 22 ms beside everything else, but in halves of the slots only 256 MB of them can be there early.
    assert!((all.split(0.9e9, 0.0).t_ms - 22.0).abs() < 1e-9);
    let waits = (0.9e9 - 32.0 * 8e6) / 50e6;
    assert!((few.split(0.9e9, 0.0).t_ms - (20.0 + waits)).abs() < 1e-9);
    // What three quarters of the slots hold is there all at once.
    assert!((few.split(0.38e9, 0.0).t_ms - 22.0).abs() < 1e-9);
    assert!(few.t_star_bytes(0.1) < all.t_star_bytes(0.1));
}

#[test]
fn the_published_machine_is_not_as_slow_as_the_additive_model_says() {
    // One-thread memcpy 10.9 GB/s against 54 GB/s of DMA and 84 of CPU attention, 119 together (16 cores, PCIe 5).
    let resident = 13.0;
    let tail = 1.0e9;
    let additive = Additive {
        t_resident_ms: resident,
        engage_ms: 0.8,
        bw_eff_gb_s: 10.9,
    };
    let overlapped = Overlapped {
        link_gb_s: 54.5,
        cpu_gb_s: 83.6,
        link_kept: 51.7 / 54.5,
        cpu_kept: 67.6 / 83.6,
        device_kept: 1.0,
        t_sync_ms: 0.0037,
        layers: 48.0,
        t_other_ms: 9.0,
        attention_engage_ms: 0.2,
        attention_least_ms: 0.0,
        attention_gb_s: 3000.0,
        kv_bytes: 11.4e9,
        copied_bytes: 0.0,
        staging_bytes: f64::INFINITY,
        share_ms: 0.0,
        batch_ms: 0.0,
        group_bytes: 0.0,
        least_gain: 0.0,
    };
    assert!((overlapped.t_resident_ms() - resident).abs() < 0.1);
    assert!(additive.drop(tail) > 0.85);
    assert!(overlapped.drop(tail) < 0.20);
}

#[test]
fn the_link_is_slower_only_while_the_cpu_attends() {
    let m = Overlapped {
        link_kept: 0.8,
        ..round()
    };
    // 30 ms of copies at the full rate, 10 ms of the CPU's: a fifth of them is lost.
    assert!((m.split(1.5e9, 0.8e9).t_ms - 32.0).abs() < 1e-9);
    // The CPU binds, and copies are slower all the time: 5 ms take 6.25.
    let all = m.copies_ms(0.25e9, 1000.0);
    assert!((all - 6.25).abs() < 1e-9, "{all}");
    assert_eq!(m.copies_ms(0.25e9, 0.0), 5.0);
}

/// Any number: ordinary ones mostly, absurd ones often.
fn any_number() -> impl Strategy<Value = f64> {
    prop_oneof![
        6 => (-2.0..9.0_f64).prop_map(|e| 10_f64.powf(e)),
        1 => Just(0.0),
        1 => Just(f64::NAN),
        1 => Just(f64::INFINITY),
        1 => Just(f64::NEG_INFINITY),
        1 => Just(-1.0),
        1 => Just(f64::MAX),
        1 => Just(f64::MIN_POSITIVE),
    ]
}

prop_compose! {
    fn any_overlapped()(n in proptest::collection::vec(any_number(), 12)) -> Overlapped {
        Overlapped {
            link_gb_s: n[0],
            cpu_gb_s: n[1],
            link_kept: n[2],
            cpu_kept: n[3],
            device_kept: 1.0,
            t_sync_ms: n[4],
            layers: n[5],
            t_other_ms: n[6],
            attention_engage_ms: n[7],
            attention_least_ms: 0.0,
            attention_gb_s: n[8],
            kv_bytes: n[9],
            copied_bytes: n[10],
            staging_bytes: n[11],
            share_ms: 0.0,
            batch_ms: 0.0,
            group_bytes: 0.0,
            least_gain: 0.0,
        }
    }
}

prop_compose! {
    fn sane_overlapped()(
        rates in proptest::collection::vec(0.5..200.0_f64, 2),
        kept in proptest::collection::vec(0.3..1.0_f64, 2),
        sync in 0.0..0.3_f64,
        layers in 1_u32..80,
        other in 0.5..60.0_f64,
        attention in 20.0..4000.0_f64,
        kv in 1e6..3e10_f64,
        copied in prop_oneof![Just(0.0), 1e6..1e9_f64],
        staging in prop_oneof![Just(f64::INFINITY), 1e6..1e9_f64],
    ) -> Overlapped {
        Overlapped {
            link_gb_s: rates[0],
            cpu_gb_s: rates[1],
            link_kept: kept[0],
            cpu_kept: kept[1],
            device_kept: 1.0,
            t_sync_ms: sync,
            layers: f64::from(layers),
            t_other_ms: other,
            attention_engage_ms: 0.1,
            attention_least_ms: 0.0,
            attention_gb_s: attention,
            kv_bytes: kv,
            copied_bytes: copied,
            staging_bytes: staging,
            share_ms: 0.0,
            batch_ms: 0.0,
            group_bytes: 0.0,
            least_gain: 0.0,
        }
    }
}

proptest! {
    #[test]
    fn absurd_numbers_give_numbers(m in any_overlapped(), tail in any_number(), target in any_number()) {
        let t_star = m.t_star_bytes(target);
        prop_assert!(t_star >= 0.0 && t_star <= amount(m.kv_bytes));
        let split = m.best_split(tail);
        prop_assert!(split.cpu_bytes >= 0.0 && split.streamed_bytes >= 0.0);
        prop_assert!(split.t_ms.is_nan() || split.t_ms >= 0.0);
        let additive = Additive { t_resident_ms: m.t_other_ms, engage_ms: m.t_sync_ms, bw_eff_gb_s: m.link_gb_s };
        prop_assert!(additive.t_star_bytes(target) >= 0.0);
        let drop = additive.drop(tail);
        prop_assert!(drop.is_nan() || drop >= 0.0);
    }

    #[test]
    fn the_best_split_is_the_best(m in sane_overlapped(), tail in 0.0..1.0_f64, other in 0.0..1.0_f64) {
        let tail = tail * m.kv_bytes;
        let best = m.best_split(tail);
        prop_assert!((best.cpu_bytes + best.streamed_bytes - tail).abs() <= 1e-6 * tail);
        let tried = m.split(tail * other, tail * (1.0 - other));
        prop_assert!(best.t_ms <= tried.t_ms * (1.0 + 1e-9), "{best:?} {tried:?}");
    }

    #[test]
    fn a_tail_of_t_star_is_within_the_target(m in sane_overlapped(), target in 0.0..0.95_f64) {
        let t_star = m.t_star_bytes(target);
        let limit = m.t_resident_ms() / (1.0 - target);
        let t = m.best_split(t_star).t_ms;
        prop_assert!(t <= limit * (1.0 + 1e-9), "{t} > {limit}");
        // And it is the largest: a little more is beyond, unless that is all there is.
        let more = t_star * 1.01 + 1e4;
        if more < m.kv_bytes {
            let t = m.best_split(more).t_ms;
            prop_assert!(t > limit * (1.0 - 1e-9), "{t} {limit}");
        }
    }

    #[test]
    fn t_star_never_falls_as_anything_gets_better(
        m in sane_overlapped(), target in 0.0..0.9_f64, by in 1.0..3.0_f64,
    ) {
        let before = m.t_star_bytes(target) * (1.0 - 1e-12);
        prop_assert!(m.t_star_bytes((target * by).min(1.0)) >= before);
        let better = Overlapped { link_gb_s: m.link_gb_s * by, ..m };
        prop_assert!(better.t_star_bytes(target) >= before || m.copied_bytes > 0.0);
        let better = Overlapped { cpu_gb_s: m.cpu_gb_s * by, ..m };
        prop_assert!(better.t_star_bytes(target) >= before);
        let better = Overlapped { staging_bytes: m.staging_bytes * by, ..m };
        prop_assert!(better.t_star_bytes(target) >= before);
    }

    #[test]
    fn additive_t_star_moves_one_way(
        active in 1e8..1e11_f64, kv in 0.0..1e11_f64, vram in 50.0..5000.0_f64,
        engage in 0.0..3.0_f64, link in 0.5..60.0_f64, host in 0.5..100.0_f64,
        target in 0.0..1.5_f64, by in 1.0..3.0_f64,
    ) {
        let t_star = |vram: f64, link: f64, host: f64, target: f64| Additive {
            t_resident_ms: t_resident_ms(active, kv, vram),
            engage_ms: engage,
            bw_eff_gb_s: bw_eff_gb_s(link, host).0,
        }.t_star_bytes(target);
        let now = t_star(vram, link, host, target);
        prop_assert!(t_star(vram, link * by, host, target) >= now);
        prop_assert!(t_star(vram, link, host * by, target) >= now);
        prop_assert!(t_star(vram, link, host, target * by) >= now);
        prop_assert!(t_star(vram * by, link, host, target) <= now);
    }
}
