//! The rules of the gate, one by one.

use super::*;
use proptest::prelude::*;

/// Runs units that take what `ms` says of a share, and returns what all of them took.
fn run(gate: &mut Gate, units: usize, mut ms: impl FnMut(usize, f64) -> f64) -> f64 {
    (0..units)
        .map(|i| {
            let took = ms(i, gate.share());
            gate.read(took);
            took
        })
        .sum()
}

/// What a token takes whose tail is divided: both sides at once, the slower one counts.
fn divided(share: f64, best: f64) -> f64 {
    10.0 + 20.0 * (share / best).max((1.0 - share) / (1.0 - best))
}

#[test]
fn four_units_give_three_ratios_and_a_decision() {
    for (with, shares) in [(9.0, true), (11.0, false), (10.0, false), (f64::NAN, false)] {
        let mut gate = Gate::new(0.5, 0.1);
        let arms: Vec<Arm> = (0..4)
            .map(|_| {
                let arm = gate.arm();
                gate.read(if arm == Arm::Alone { 10.0 } else { with });
                arm
            })
            .collect();
        assert_eq!(arms, [Arm::Alone, Arm::Shared, Arm::Alone, Arm::Shared]);
        let verdict = gate.verdict().expect("three ratios are in");
        assert_eq!(verdict.shares, shares, "{with}");
    }
}

#[test]
fn units_that_were_skipped_are_compared_with_nothing() {
    let mut gate = Gate::new(0.5, 0.1);
    gate.read(10.0);
    gate.skip();
    let reading = gate.read(100.0);
    assert_eq!((reading.arm, reading.ratio), (Arm::Alone, None));
    assert_eq!(gate.read(90.0).ratio, Some(0.9));
}

#[test]
fn units_of_different_cost_do_not_mislead_it() {
    // Costs differ 8 times from unit to unit in a slow wave, the share wins by a tenth.
    let mut gate = Gate::new(1.0, 1.0);
    let wave = |i: usize| 1.0 + 7.0 * ((i as f64 / 40.0).sin() * 0.5 + 0.5);
    run(&mut gate, 200, |i, share| {
        wave(i) * if share > 0.0 { 0.9 } else { 1.0 }
    });
    assert_eq!(gate.verdict().map(|v| v.shares), Some(true));
}

#[test]
fn an_arm_that_loses_costs_less_than_a_hundredth() {
    for loses in [0.8, 1.25] {
        let mut gate = Gate::new(1.0, 1.0);
        let cost = |_: usize, share: f64| if share > 0.0 { loses } else { 1.0 };
        run(&mut gate, 1000, cost);
        let best = f64::min(loses, 1.0) * 10_000.0;
        let took = run(&mut gate, 10_000, cost);
        assert!(took < best * 1.01, "{took} instead of {best}");
    }
}

#[test]
fn it_notices_when_the_other_arm_becomes_the_better_one() {
    let mut gate = Gate::new(1.0, 1.0);
    run(
        &mut gate,
        2000,
        |_, share| if share > 0.0 { 0.9 } else { 1.0 },
    );
    assert_eq!(gate.verdict().map(|v| v.shares), Some(true));
    run(
        &mut gate,
        1000,
        |_, share| if share > 0.0 { 1.1 } else { 1.0 },
    );
    assert_eq!(gate.verdict().map(|v| v.shares), Some(false));
}

#[test]
fn the_amount_moves_to_where_both_sides_end_together() {
    for (planned, best) in [(0.4, 0.3), (0.4, 0.6), (1.0, 0.8)] {
        let mut gate = Gate::new(planned, 0.05);
        run(&mut gate, 20_000, |_, share| divided(share, best));
        let found = gate.verdict().expect("it has decided");
        assert!(found.shares);
        assert!((found.amount - best).abs() < 0.051, "{best}: {found:?}");
    }
}

#[test]
fn what_is_recalled_costs_one_probe() {
    let recalled = Verdict {
        shares: true,
        amount: 0.6,
    };
    let mut gate = Gate::new(1.0, 0.1).recall(&recalled.into());
    let alone = (0..25)
        .filter(|_| {
            let arm = gate.arm();
            gate.read(match arm {
                Arm::Alone => 10.0,
                Arm::Shared => 8.0,
                Arm::More | Arm::Less => 8.5,
            });
            arm == Arm::Alone
        })
        .count();
    assert_eq!(alone, 1);
    assert_eq!(gate.verdict(), Some(recalled));
}

#[test]
fn what_is_recalled_is_dropped_if_it_no_longer_holds() {
    for shares in [false, true] {
        // However well it was known.
        let finding = Finding {
            ratios: vec![if shares { 0.8 } else { 1.2 }; 15].into(),
            ..Finding::from(Verdict {
                shares,
                amount: 0.6,
            })
        };
        let mut gate = Gate::new(1.0, 0.1).recall(&finding);
        let cost = |_: usize, share: f64| {
            if (share > 0.0) == shares { 10.0 } else { 8.0 }
        };
        run(&mut gate, 9, cost);
        assert_eq!(gate.verdict().map(|v| v.shares), Some(shares));
        run(&mut gate, 1, cost);
        assert_eq!(gate.verdict().map(|v| v.shares), Some(!shares));
    }
}

#[test]
fn a_finding_survives_its_text_and_nonsense_in_it_does_not() {
    let mut gate = Gate::new(0.5, 0.1);
    run(&mut gate, 300, |i, share| {
        10.0 * (1.0 + 0.05 * (i as f64).sin()) * if share > 0.0 { 0.9 } else { 1.0 }
    });
    let found = gate.finding().expect("it has decided");
    assert!(found.ratios.as_slice().len() >= 5);
    let text = serde_json::to_string(&found).expect("numbers become JSON");
    let read: Finding = serde_json::from_str(&text).expect("it was just written");
    assert_eq!(read.verdict, found.verdict);
    let ratios = |of: &Finding| of.ratios.as_slice().to_vec();
    assert_eq!(ratios(&read).len(), ratios(&found).len());
    for (a, b) in ratios(&read).iter().zip(ratios(&found)) {
        // Text has the last digit by luck.
        assert!((a - b).abs() < 1e-12, "{a} {b}");
    }
    let again = Gate::new(1.0, 0.1).recall(&read).finding();
    assert_eq!(again, Some(read));
    // What older processes wrote.
    let old: Finding = serde_json::from_str(r#"{"shares":true,"amount":0.5}"#).expect("it is one");
    assert_eq!(
        old.verdict,
        Verdict {
            shares: true,
            amount: 0.5
        }
    );
    let text = r#"{"shares":true,"amount":7,"ratios":[-1,0,1e300],"around":[{"readings":-4,"mean":0,"squares":0},{"readings":1e9,"mean":9,"squares":-1}]}"#;
    let odd: Finding = serde_json::from_str(text).expect("it is one");
    let mut gate = Gate::new(1.0, 0.1).recall(&odd);
    assert_eq!(gate.share(), 1.0);
    run(&mut gate, 300, |_, share| 2.0 - share);
    assert_eq!(gate.verdict().map(|v| v.shares), Some(true));
}

/// A prompt's chunk of `layers`, whose experts take what `ms` says; returns the arms.
fn chunk(gate: &mut Gate, layers: u32, mut ms: impl FnMut(u32, f64) -> f64) -> Vec<Arm> {
    gate.begin_chunk();
    (0..layers)
        .map(|layer| {
            let (arm, share) = (gate.arm(), gate.share());
            gate.read_layer(Unit { layer, parts: 2.0 }, 2.0 * ms(layer, share));
            arm
        })
        .collect()
}

#[test]
fn the_first_layer_of_a_chunk_is_not_read() {
    let mut gate = Gate::new(0.5, 0.1);
    for layer in 0..5 {
        if layer == 0 {
            gate.begin_chunk();
        }
        let arm = gate.arm();
        let ms = if layer == 0 { 100.0 } else { 10.0 };
        let reading = gate.read_layer(Unit { layer, parts: 4.0 }, ms);
        assert_eq!(reading.each_ms, ms / 4.0);
        let expected = [Arm::Alone, Arm::Shared][layer as usize % 2];
        assert_eq!(arm, expected);
        // The second has none to be compared with.
        assert_eq!(reading.ratio.is_some(), layer >= 2, "{layer}");
    }
    assert_eq!(gate.verdict().map(|v| v.shares), Some(false));
}

#[test]
fn nothing_is_compared_from_chunk_to_chunk() {
    let mut gate = Gate::new(0.5, 0.1);
    for _ in 0..50 {
        // One layer that is read a chunk: never a pair.
        chunk(&mut gate, 2, |_, _| 10.0);
    }
    assert_eq!(gate.verdict(), None);
}

#[test]
fn a_layer_that_paid_once_is_compared_with_nothing() {
    let mut gate = Gate::new(0.5, 0.1);
    gate.begin_chunk();
    gate.skip();
    for (layer, ms, ratio) in [(1, 10.0, None), (2, 10.0, Some(1.0))] {
        assert_eq!(gate.read_layer(Unit { layer, parts: 1.0 }, ms).ratio, ratio);
    }
    gate.skip();
    let reading = gate.read_layer(
        Unit {
            layer: 4,
            parts: 1.0,
        },
        10.0,
    );
    assert_eq!(reading.ratio, None);
}

#[test]
fn every_29th_unit_is_a_probe() {
    for wins in [false, true] {
        let mut gate = Gate::new(1.0, 1.0);
        let probe = if wins { Arm::Alone } else { Arm::Shared };
        let mut probes = Vec::new();
        for i in 0..4 + 3 * 29 + 2 * 59 {
            if gate.verdict().is_some() && gate.arm() == probe {
                probes.push(i + 1 - 4);
            }
            gate.read(match gate.arm() {
                Arm::Alone => 10.0,
                _ if wins => 8.0,
                _ => 12.0,
            });
        }
        // After three that agree they become fewer.
        assert_eq!(probes, [29, 58, 87, 87 + 59, 87 + 118], "{wins}");
    }
}

#[test]
fn it_tells_ahead_of_every_unit_that_the_host_has_a_part_in() {
    for wins in [false, true] {
        let mut gate = Gate::new(0.5, 0.1);
        let (mut told, mut quiet) = (Vec::new(), 0);
        for i in 0..400 {
            told.push(gate.may_share_within(5));
            quiet += usize::from(!told[i]);
            let shares = gate.share() > 0.0;
            assert!(!shares || told[i.saturating_sub(4)..].iter().all(|&t| t));
            gate.read(if shares == wins { 9.0 } else { 10.0 });
        }
        assert_eq!(
            quiet > 300,
            !wins,
            "{quiet} units were said to be the device's"
        );
    }
}

#[test]
fn one_probe_that_disagrees_brings_the_others_back() {
    let mut gate = Gate::new(1.0, 1.0);
    let mut probes = Vec::new();
    for i in 0..1000 {
        let is_probe = gate.verdict().is_some() && gate.arm() == Arm::Shared;
        let ms = match gate.arm() {
            Arm::Alone => 10.0,
            // The fourth disagrees.
            _ if is_probe && probes.len() == 3 => 9.0,
            _ => 12.0,
        };
        if is_probe {
            probes.push(i);
        }
        gate.read(ms);
    }
    let gaps: Vec<usize> = probes.windows(2).map(|p| p[1] - p[0]).collect();
    assert_eq!(gaps[..6], [29, 29, 59, 29, 29, 29]);
    assert_eq!(gaps[6], 59);
    assert_eq!(gate.verdict().map(|v| v.shares), Some(false));
}

#[test]
fn the_median_of_five_decides_and_one_outlier_does_not() {
    for (ratios, shares) in [
        (&[0.9, 0.9, 0.9][..], Some(true)),
        (&[1.1, 1.1, 1.1], Some(false)),
        // They differ: two more are asked for.
        (&[0.9, 0.9, 7.0], None),
        (&[0.9, 0.9, 7.0, 0.9, 7.0], Some(true)),
        (&[1.1, 0.1, 1.1, 0.1, 1.1], Some(false)),
        (&[1.0, 1.0, 1.0], Some(false)),
    ] {
        let mut gate = Gate::new(1.0, 1.0);
        // Each pair follows from the unit before.
        let mut ms = 10.0;
        gate.read(ms);
        for &ratio in ratios {
            ms *= if gate.arm() == Arm::Shared {
                ratio
            } else {
                1.0 / ratio
            };
            gate.read(ms);
        }
        assert_eq!(gate.verdict().map(|v| v.shares), shares, "{ratios:?}");
    }
}

/// The rule that was tried elsewhere: a mean time for each arm, the lower one wins, every 29th unit the other way.
struct RunningMean {
    sums: [(f64, f64); 2],
    units: u32,
}

impl RunningMean {
    fn shares(&self) -> bool {
        let [alone, shared] = self.sums.map(|(sum, n)| sum / n);
        shared < alone
    }

    fn next_shares(&self) -> bool {
        if self.units < 4 {
            return self.units % 2 == 1;
        }
        self.shares() != self.units.is_multiple_of(29)
    }

    fn read(&mut self, ms: f64) {
        let (sum, n) = &mut self.sums[usize::from(self.next_shares())];
        (*sum, *n) = (*sum + ms, *n + 1.0);
        self.units += 1;
    }
}

#[test]
fn a_spread_of_layers_fools_a_running_mean_and_not_the_gate() {
    // The share wins by a tenth, and one layer is 8 times as dear as the others: wherever that is.
    let (mut fooled, layers) = (0, 48);
    for dear in 0..layers {
        let ms = |layer: u32, share: f64| {
            let alone = if layer == dear { 8.0 } else { 1.0 };
            alone * if share > 0.0 { 0.9 } else { 1.0 }
        };
        let mut gate = Gate::new(1.0, 1.0);
        chunk(&mut gate, layers, ms);
        assert_eq!(gate.verdict().map(|v| v.shares), Some(true), "layer {dear}");
        let mut mean = RunningMean {
            sums: [(0.0, 0.0); 2],
            units: 0,
        };
        for layer in 0..layers {
            let share = f64::from(u8::from(mean.next_shares()));
            mean.read(ms(layer, share));
        }
        fooled += u32::from(!mean.shares());
        if dear == 3 {
            assert!(!mean.shares(), "the trace that fools it");
        }
    }
    assert!(fooled >= 2, "{fooled}");
}

#[test]
fn what_layers_differ_by_is_learned_and_taken_out() {
    // Neighbours differ by up to half, the share wins by a fiftieth: raw ratios say nothing.
    let dear = |layer: u32| 1.0 + 0.5 * f64::from(layer * 7 % 11) / 10.0;
    for (with, shares) in [(0.98, true), (1.02, false)] {
        let mut gate = Gate::new(1.0, 1.0).of_layers(48);
        for _ in 0..20 {
            chunk(&mut gate, 48, |layer, share| {
                dear(layer) * if share > 0.0 { with } else { 1.0 }
            });
        }
        assert_eq!(gate.verdict().map(|v| v.shares), Some(shares));
        let found = gate.finding().expect("it has decided");
        for ratio in found.ratios.as_slice() {
            assert!((ratio - with).abs() < 1e-6, "{ratio} instead of {with}");
        }
    }
}

/// A layer of `mb` megabytes of experts, streamed at `link` and computed at `cpu` GB/s, with `ms` to hand it over.
fn layer_ms(mb: f64, link: f64, cpu: f64, hand_over_ms: f64, share: f64) -> f64 {
    let shared = if share > 0.0 { hand_over_ms } else { 0.0 };
    f64::max((1.0 - share) * mb / link, share * mb / cpu) + shared
}

#[test]
fn what_was_measured_at_boot_does_not_survive_a_prompt_of_service() {
    // Planned from boot's rates; in service the CPU is slower, or every layer pays for the way to it. GB/s of the link and of the CPU at boot,
    // of the CPU in service, megabytes of a layer's experts, ms to hand them over, and how much dearer the share is than none.
    for (link, boot, cpu, mb, hand_over, dearer) in [
        (12.3, 56.2, 2.0, 400.0, 0.0, 4.0),
        (24.9, 63.8, 63.8, 6.8, 0.235, 1.13),
    ] {
        let ms = |share: f64| layer_ms(mb, link, cpu, hand_over, share);
        let planned = boot / (boot + link);
        assert!(ms(planned) > dearer * ms(0.0));
        let mut gate = Gate::new(planned, 0.1).of_layers(48);
        let arms = chunk(&mut gate, 48, |_, share| ms(share));
        assert_eq!(gate.verdict().map(|v| v.shares), Some(false));
        let shared = arms.iter().filter(|arm| **arm != Arm::Alone).count();
        assert!(shared <= 3, "{shared} layers of the first prompt");
    }
}

proptest! {
    #[test]
    fn whatever_it_reads_it_goes_on(
        readings in prop::collection::vec(prop_oneof![
            8 => (0.0..1e3f64).prop_map(Some),
            1 => Just(Some(f64::NAN)),
            1 => Just(Some(f64::INFINITY)),
            1 => Just(None),
        ], 0..400),
        amount in prop::num::f64::ANY,
        step in prop::num::f64::ANY,
    ) {
        let mut gate = Gate::new(amount, step);
        for reading in readings {
            let share = gate.share();
            prop_assert!((0.0..=1.0).contains(&share));
            match reading {
                Some(ms) => { gate.read(ms); }
                None => gate.skip(),
            }
        }
    }

    #[test]
    fn noise_does_not_hide_a_tenth(seed in any::<u64>(), wins in any::<bool>()) {
        let mut gate = Gate::new(1.0, 1.0);
        let mut s = seed | 1;
        let mut noise = move || {
            s = s.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            1.0 + 0.02 * ((s >> 40) as f64 / f64::from(1u32 << 24) - 0.5)
        };
        let with = if wins { 0.9 } else { 1.1 };
        run(&mut gate, 400, |_, share| noise() * if share > 0.0 { with } else { 1.0 });
        prop_assert_eq!(gate.verdict().map(|v| v.shares), Some(wins));
    }
}
