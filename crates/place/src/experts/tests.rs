use super::*;
use crate::routing;
use proptest::prelude::*;
use std::collections::HashMap;

const MIB: u64 = 1 << 20;

/// Layers of two sizes, as files with several formats have them.
fn layers(n: usize, experts: u32, used: u32) -> Vec<Layer> {
    let layer = |i: usize| Layer {
        experts,
        used,
        blob_bytes: if i.is_multiple_of(3) {
            3 * MIB
        } else {
            2 * MIB
        },
    };
    (0..n).map(layer).collect()
}

fn settings(cache_bytes: u64, share: Share) -> Settings {
    Settings {
        cache_bytes,
        staging_slots: 3,
        policy: Policy::Value,
        prompt: share,
        generated: share,
        costs: Costs::UNKNOWN,
        reads_in_place: false,
    }
}

/// Numbers that look random.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f64 / f64::from(1u32 << 24)
    }

    /// What `tokens` tokens use of a layer whose experts are the less popular the further they are from `favourite`.
    fn used(&mut self, layer: &Layer, tokens: u32, favourite: u32, skew: f64) -> Vec<(u32, u32)> {
        let mut counts = vec![0; layer.experts as usize];
        for _ in 0..tokens {
            let mut chosen = Vec::new();
            while chosen.len() < layer.used as usize {
                let at = (self.next().powf(skew) * f64::from(layer.experts)) as u32;
                let e = (favourite + at) % layer.experts;
                if !chosen.contains(&e) {
                    chosen.push(e);
                    counts[e as usize] += 1;
                }
            }
        }
        let used = counts.into_iter().enumerate();
        used.filter(|&(_, n)| n > 0)
            .map(|(e, n)| (e as u32, n))
            .collect()
    }
}

/// Device memory, which holds what it was told to copy.
#[derive(Default)]
struct Memory(HashMap<Slot, (usize, u32)>);

impl Memory {
    fn copy(&mut self, experts: &Experts, copies: &[Copy]) {
        for copy in copies {
            let layer = copy.layer as usize;
            let bytes = experts.layers()[layer].blob_bytes;
            assert!(bytes <= experts.slots().bytes_of(copy.slot));
            self.0.insert(copy.slot, (layer, copy.expert));
        }
    }

    /// Serves a layer as a backend does, and looks whether everything is there.
    fn serve(&mut self, experts: &mut Experts, layer: usize, used: &[(u32, u32)]) -> Vec<Served> {
        let served = experts.serve(layer, used).to_vec();
        let found: Vec<(u32, u32)> = served.iter().map(|s| (s.expert, s.tokens)).collect();
        assert_eq!(found, used, "all of them, and nothing else");
        let cached = experts.slots().cached();
        let mut of_cache = Vec::new();
        for s in &served {
            match s.way {
                Way::Resident(slot) => {
                    assert_eq!(self.0.get(&slot), Some(&(layer, s.expert)));
                    of_cache.push(slot);
                }
                Way::Streamed(slot) => {
                    let bytes = experts.layers()[layer].blob_bytes;
                    assert!(bytes <= experts.slots().bytes_of(slot));
                    self.0.insert(slot, (layer, s.expert));
                    if slot.0 < cached {
                        of_cache.push(slot);
                    }
                }
                Way::Host => {}
            }
        }
        // What a layer uses stays until it is done.
        for s in &served {
            if let Way::Resident(slot) = s.way {
                assert_eq!(self.0.get(&slot), Some(&(layer, s.expert)));
            }
        }
        let n = of_cache.len();
        of_cache.sort_unstable();
        of_cache.dedup();
        assert_eq!(of_cache.len(), n);
        let copies = experts.copies().to_vec();
        self.copy(experts, &copies);
        served
    }
}

proptest! {
    #[test]
    fn what_is_said_to_be_there_is_there(
        seed in any::<u64>(),
        cache_mib in 0_u64..150,
        share in prop_oneof![
            Just(Share::Off), Just(Share::Auto), Just(Share::Always), (0.0..=1.0f64).prop_map(Share::Fixed)
        ],
        lru in any::<bool>(),
        known in any::<bool>(),
        reads_in_place in any::<bool>(),
        steps in prop::collection::vec(prop_oneof![Just(1_u32), 2_u32..40], 1..40),
    ) {
        let layers = layers(5, 8, 2);
        let mut dice = Dice(seed);
        let settings = Settings {
            policy: if lru { Policy::Lru } else { Policy::Value },
            reads_in_place,
            ..settings(cache_mib * MIB, share)
        };
        let rates = |l: &Layer| (0..l.experts).map(|e| 1.0 / (e + 1) as f32).collect();
        let recalled = Recalled {
            profile: known.then(|| Profile {
                version: Profile::VERSION,
                tokens: 100,
                rates: layers.iter().map(rates).collect(),
            }),
            verdicts: Verdicts::default(),
        };
        let mut experts = Experts::new(&layers, &settings, &recalled);
        prop_assert!(experts.slots().cache_bytes() <= settings.cache_bytes);
        let mut memory = Memory::default();
        let copies = experts.fill();
        memory.copy(&experts, &copies);
        for tokens in steps {
            experts.begin(tokens, tokens == 1);
            for (i, layer) in layers.iter().enumerate() {
                let used = dice.used(layer, tokens, 3, 2.0);
                let served = memory.serve(&mut experts, i, &used);
                let took = Took { ms: 1.0 + dice.next(), stream_ms: 0.5, host_ms: 0.5, copied: if dice.next() < 0.5 { Copied::InTime } else { Copied::Late }, is_unusual: false };
                let unit = experts.took(&took);
                let missing = served.iter().filter(|s| !matches!(s.way, Way::Resident(_))).count();
                prop_assert_eq!(unit.map_or(0, |u| u.missing as usize), missing);
                let host = served.iter().filter(|s| s.way == Way::Host).count();
                match share {
                    Share::Off => prop_assert_eq!(host, 0),
                    Share::Fixed(x) => prop_assert_eq!(host, by_share(x, missing)),
                    Share::Auto | Share::Always => {}
                }
            }
        }
    }
}

#[test]
fn slots_divide_what_there_is() {
    let layers = layers(6, 8, 2);
    let all = blob_bytes(&layers);
    assert_eq!(all, (2 * 3 + 4 * 2) * 8 * MIB);
    for part in [0, 1, 10, 50, 99, 100, 150] {
        let cache_bytes = all * part / 100;
        let experts = Experts::new(
            &layers,
            &settings(cache_bytes, Share::Off),
            &Recalled::default(),
        );
        let slots = experts.slots();
        assert!(slots.cache_bytes() <= cache_bytes.min(all));
        assert!(
            cache_bytes.min(all) - slots.cache_bytes() < 3 * MIB,
            "{part} %: {slots:?}"
        );
        assert_eq!(slots.bytes(), slots.cache_bytes() + 9 * MIB);
        if part >= 100 {
            assert_eq!(slots.cached(), 48);
        }
    }
}

#[test]
fn the_first_ones_that_come_fill_the_cache_whoever_computes_them() {
    for share in [Share::Off, Share::Fixed(1.0)] {
        let layers = layers(2, 4, 2);
        let mut experts = Experts::new(&layers, &settings(100 * MIB, share), &Recalled::default());
        for pass in 0..2 {
            experts.begin(8, false);
            for i in 0..2 {
                let served = experts.serve(i, &[(0, 4), (1, 4), (3, 8)]);
                let resident = served.iter().all(|s| matches!(s.way, Way::Resident(_)));
                assert_eq!(resident, pass == 1, "{share:?}");
            }
        }
        assert_eq!(experts.counts()[0].resident, 6);
    }
}

/// Hits of generated tokens of a popular few, after one prompt that used everything.
fn hits(policy: Policy, part: u64) -> f64 {
    let layers = layers(12, 32, 4);
    let cache = blob_bytes(&layers) * part / 100;
    let settings = Settings {
        policy,
        ..settings(cache, Share::Off)
    };
    let mut experts = Experts::new(&layers, &settings, &Recalled::default());
    let mut dice = Dice(5);
    let step = |experts: &mut Experts, dice: &mut Dice, tokens| {
        experts.begin(tokens, tokens == 1);
        for (i, layer) in layers.iter().enumerate() {
            let used = dice.used(layer, tokens, 7 * i as u32, 3.0);
            experts.serve(i, &used);
        }
    };
    step(&mut experts, &mut dice, 256);
    (0..300).for_each(|_| step(&mut experts, &mut dice, 1));
    experts.counts()[1].hits()
}

#[test]
fn value_keeps_more_of_what_is_used_than_time_does() {
    for part in [10, 25, 50, 75] {
        let (value, lru) = (hits(Policy::Value, part), hits(Policy::Lru, part));
        println!("{part} % of the experts: value {value:.3}, LRU {lru:.3}");
        assert!(value > lru, "{part} %: {value} {lru}");
    }
}

#[test]
fn what_was_learnt_another_time_is_there_from_the_beginning() {
    let layers = layers(4, 16, 2);
    let cache = blob_bytes(&layers) / 4;
    let mut dice = Dice(9);
    let mut step = |experts: &mut Experts, tokens| {
        experts.begin(tokens, tokens == 1);
        for (i, layer) in layers.iter().enumerate() {
            let used = dice.used(layer, tokens, 5, 3.0);
            experts.serve(i, &used);
        }
    };
    let mut first = Experts::new(&layers, &settings(cache, Share::Off), &Recalled::default());
    (0..400).for_each(|_| step(&mut first, 1));
    let recalled = Recalled {
        profile: Some(first.profile()),
        verdicts: Verdicts::default(),
    };
    let mut again = Experts::new(&layers, &settings(cache, Share::Off), &recalled);
    let copies = again.fill();
    assert_eq!(copies.len(), again.slots().cached() as usize);
    (0..3).for_each(|_| step(&mut again, 1));
    let mut cold = Experts::new(&layers, &settings(cache, Share::Off), &Recalled::default());
    (0..3).for_each(|_| step(&mut cold, 1));
    let (warm, cold) = (again.counts()[1].hits(), cold.counts()[1].hits());
    assert!(warm > 0.5 && warm > cold + 0.1, "{warm} {cold}");
    let curve = HitCurve::new(&layers, &first.profile());
    let at = curve.at(0.25);
    assert!((at - warm).abs() < 0.2, "expected {at}, had {warm}");
    assert!(curve.at(0.0).abs() < 1e-9 && (curve.at(1.0) - 1.0).abs() < 1e-9);
    assert!(curve.at(0.1) < curve.at(0.2) && curve.at(f64::NAN).abs() < 1e-9);
}

/// A machine: what it takes for a layer, by what each side has to do.
struct Machine {
    link_gb_s: f64,
    host_gb_s: f64,
    hand_over_ms: f64,
    /// What a busy CPU makes of the link's rate.
    link_kept: f64,
    /// What a layer takes besides.
    rest_ms: f64,
}

impl Machine {
    fn took(&self, served: &[Served], blob_bytes: u64) -> Took {
        let n = |f: fn(&Way) -> bool| served.iter().filter(|s| f(&s.way)).count() as f64;
        let ms = |bytes: f64, gb_s: f64| bytes / gb_s / 1e6;
        let streamed = n(|way| matches!(way, Way::Streamed(_))) * blob_bytes as f64;
        let host = n(|way| *way == Way::Host) * blob_bytes as f64;
        let link = if host > 0.0 {
            self.link_gb_s * self.link_kept
        } else {
            self.link_gb_s
        };
        let stream_ms = ms(streamed, link);
        let host_ms = ms(host, self.host_gb_s);
        let sync = if host > 0.0 { self.hand_over_ms } else { 0.0 };
        Took {
            ms: self.rest_ms + stream_ms.max(host_ms + sync),
            stream_ms,
            host_ms,
            copied: Copied::InTime,
            is_unusual: false,
        }
    }
}

fn boot(link_gb_s: f64, host_gb_s: f64) -> Costs {
    let ms_mib = |gb_s: f64| MIB as f64 / gb_s / 1e6;
    Costs {
        link_ms_mib: ms_mib(link_gb_s),
        device_ms_mib: ms_mib(3000.0),
        device_ms_mib_token: 0.0,
        host_ms_mib: ms_mib(host_gb_s),
        host_ms_mib_token: 0.0,
        sync_ms: 0.01,
        sides: Sides::Beside,
    }
}

/// One prompt's chunk through 48 layers; returns time, and what was found.
fn prompt(costs: Costs, machine: &Machine, share: Share) -> (f64, Option<bool>) {
    let layers = vec![
        Layer {
            experts: 64,
            used: 8,
            blob_bytes: 2 * MIB,
        };
        48
    ];
    let settings = Settings {
        costs,
        ..settings(0, share)
    };
    let mut experts = Experts::new(&layers, &settings, &Recalled::default());
    experts.begin(600, false);
    let used: Vec<(u32, u32)> = (0..64).map(|e| (e, 75)).collect();
    let mut all = 0.0;
    for i in 0..48 {
        let served = experts.serve(i, &used).to_vec();
        let took = machine.took(&served, 2 * MIB);
        all += took.ms;
        experts.took(&took);
    }
    let verdicts = experts.verdicts();
    let found: Vec<_> = verdicts.buckets.into_iter().flatten().collect();
    assert!(found.len() <= 1);
    (all, found.first().map(|found| found.verdict.shares))
}

/// Published: machines whose CPU looked faster than it then was.
#[test]
fn measurements_at_boot_that_do_not_hold_end_on_no_share_within_a_prompt() {
    let slow = Machine {
        link_gb_s: 12.3,
        host_gb_s: 2.0,
        hand_over_ms: 0.01,
        link_kept: 0.5,
        rest_ms: 0.05,
    };
    let far = Machine {
        link_gb_s: 24.9,
        host_gb_s: 20.0,
        hand_over_ms: 2.5,
        link_kept: 0.6,
        rest_ms: 0.05,
    };
    for (costs, machine) in [(boot(12.3, 56.2), slow), (boot(24.9, 63.8), far)] {
        let (always, found) = prompt(costs, &machine, Share::Auto);
        let (off, _) = prompt(costs, &machine, Share::Off);
        assert_eq!(found, Some(false));
        assert!(always < off * 1.25, "{always} {off}");
    }
}

#[test]
fn a_cpu_that_helps_is_used() {
    let machine = Machine {
        link_gb_s: 12.0,
        host_gb_s: 12.0,
        hand_over_ms: 0.01,
        link_kept: 0.95,
        rest_ms: 0.05,
    };
    let (shared, found) = prompt(boot(12.0, 12.0), &machine, Share::Auto);
    let (off, _) = prompt(boot(12.0, 12.0), &machine, Share::Off);
    assert_eq!(found, Some(true));
    assert!(shared < off * 0.65, "{shared} {off}");
}

/// A CPU whose first layer takes ten times as long as others, as threads sleep: what it gets of the next one is too little to gain anything.
#[test]
fn what_a_wrong_balance_loses_is_not_held_against_the_cpu() {
    let machine = Machine {
        link_gb_s: 12.0,
        host_gb_s: 12.0,
        hand_over_ms: 0.01,
        link_kept: 0.88,
        rest_ms: 0.05,
    };
    for layers in [16, 48] {
        let one = Layer {
            experts: 64,
            used: 8,
            blob_bytes: 2 * MIB,
        };
        let settings = Settings {
            costs: boot(12.0, 12.0),
            ..settings(0, Share::Auto)
        };
        let mut experts = Experts::new(&vec![one; layers], &settings, &Recalled::default());
        experts.begin(600, false);
        let used: Vec<(u32, u32)> = (0..64).map(|e| (e, 75)).collect();
        let mut is_cold = true;
        for layer in 0..layers {
            let served = experts.serve(layer, &used).to_vec();
            let mut took = machine.took(&served, 2 * MIB);
            if took.host_ms > 0.0 && std::mem::take(&mut is_cold) {
                took.host_ms *= 10.0;
                took.ms += took.host_ms;
            }
            experts.took(&took);
        }
        let found = experts.verdicts().buckets.into_iter().flatten().next();
        assert_eq!(found.map(|found| found.verdict.shares), Some(true));
    }
}

/// A machine whose link copies one after the other: what a layer streams waits for what was copied behind the layers before.
struct Filling {
    /// An expert's copy, and what the CPU takes for one.
    link_ms: f64,
    host_ms: f64,
    /// What a layer takes besides, and what the CPU's part takes besides.
    rest_ms: f64,
    hand_over_ms: f64,
    /// Whether the host makes all copies, and does nothing else meanwhile.
    copies_by_host: bool,
}

impl Filling {
    /// Milliseconds of each of some prompts that use the same experts, about so many of 128 a layer, while a cache that has room for 64 fills.
    fn prompts(&self, used: u32, share: Share) -> Vec<f64> {
        let one = Layer {
            experts: 128,
            used: 8,
            blob_bytes: 2 * MIB,
        };
        let layers = [one; 48];
        let settings = Settings {
            costs: Costs {
                link_ms_mib: self.link_ms / 2.0,
                host_ms_mib: self.host_ms / 2.0,
                host_ms_mib_token: 0.0,
                ..Costs::UNKNOWN
            },
            ..settings(blob_bytes(&layers) / 2, share)
        };
        let mut experts = Experts::new(&layers, &settings, &Recalled::default());
        let mut dice = Dice(7);
        let used: Vec<Vec<(u32, u32)>> = (0..48)
            .map(|_| {
                let part = f64::from(used) / 128.0 * (0.8 + 0.4 * dice.next());
                let all = (0..128).map(|e| (e, 33));
                all.filter(|_| dice.next() < part).collect()
            })
            .collect();
        let (mut now, mut link_free) = (0.0_f64, 0.0_f64);
        let mut prompts = Vec::new();
        for _ in 0..8 {
            let begun = now;
            experts.begin(250, false);
            for (layer, used) in used.iter().enumerate() {
                let served = experts.serve(layer, used);
                let n = |f: fn(&Way) -> bool| served.iter().filter(|s| f(&s.way)).count() as f64;
                let stream_ms = self.link_ms * n(|way| matches!(way, Way::Streamed(_)));
                let by_host = n(|way| *way == Way::Host);
                let hand_over_ms = self.hand_over_ms * f64::from(by_host > 0.0);
                let host_ms = self.host_ms * by_host + hand_over_ms;
                let behind_ms = self.link_ms * experts.copies().len() as f64;
                let streamed = now.max(link_free) + stream_ms;
                let mut end = now + stream_ms + host_ms + behind_ms;
                if !self.copies_by_host {
                    link_free = streamed + behind_ms;
                    end = (streamed * f64::from(stream_ms > 0.0)).max(now + host_ms);
                }
                end += self.rest_ms;
                experts.took(&Took {
                    ms: end - now,
                    stream_ms,
                    host_ms,
                    copied: match link_free <= end {
                        _ if self.copies_by_host => Copied::ByHost,
                        true => Copied::InTime,
                        false => Copied::Late,
                    },
                    is_unusual: false,
                });
                now = end;
            }
            prompts.push(now - begun);
        }
        prompts
    }
}

/// What the CPU computes is missing in the prompts after: they may be slower, by less than the first one was faster.
#[test]
fn a_cache_fills_beside_the_cpus_share_and_nothing_is_lost_by_it() {
    for (link_ms, host_ms, rest_ms, hand_over_ms) in [
        (0.05, 0.07, 0.6, 0.0),
        (0.05, 0.05, 0.3, 0.0),
        (0.05, 0.15, 0.6, 0.0),
        (0.058, 0.075, 0.35, 0.1),
    ] {
        let machine = Filling {
            link_ms,
            host_ms,
            rest_ms,
            hand_over_ms,
            copies_by_host: false,
        };
        // There is room for all that is used, and there is not.
        for used in [52, 72, 84] {
            let off = machine.prompts(used, Share::Off);
            let auto = machine.prompts(used, Share::Auto);
            println!("{used} used: off {off:.1?}, auto {auto:.1?}");
            let sum = |of: &[f64]| of.iter().sum::<f64>();
            assert!(auto[0] < 0.9 * off[0], "the first prompt has the CPU");
            // The second finds what was streamed, and what the link had time for besides; where there is room for all, that is most of it.
            let found = if used == 52 { 0.23 } else { 0.4 };
            assert!(auto[1] < found * off[0], "{used}: {off:?} {auto:?}");
            for n in 2..=8 {
                assert!(
                    sum(&auto[..n]) < 1.01 * sum(&off[..n]),
                    "{n}: {off:?} {auto:?}"
                );
            }
            assert!(auto[3..].iter().zip(&off[3..]).all(|(a, o)| *a < 1.01 * o));
        }
    }
}

/// Where the host makes all copies, too, the third prompt finds what fits.
#[test]
fn a_cache_that_the_host_fills_is_full_in_the_third_prompt() {
    let machine = Filling {
        link_ms: 0.07,
        host_ms: 0.04,
        rest_ms: 0.35,
        hand_over_ms: 0.1,
        copies_by_host: true,
    };
    for used in [40, 52] {
        let off = machine.prompts(used, Share::Off);
        let auto = machine.prompts(used, Share::Always);
        println!("{used} used: off {off:.1?}, auto {auto:.1?}");
        assert!(auto[0] < 1.2 * off[0], "{off:?} {auto:?}");
        assert!(auto[2..].iter().zip(&off[2..]).all(|(a, o)| *a < 1.02 * o));
    }
}

/// A cache that fills over some prompts, until few experts are missing, here more and there fewer: what a layer takes besides is most of its time then.
#[test]
fn layers_that_miss_little_do_not_mislead_the_gate() {
    let one = Layer {
        experts: 64,
        used: 8,
        blob_bytes: 2 * MIB,
    };
    let layers = [one; 48];
    for (host_gb_s, shares) in [(12.0, true), (3.0, false)] {
        let machine = Machine {
            link_gb_s: 12.0,
            host_gb_s,
            hand_over_ms: 0.01,
            link_kept: if shares { 0.9 } else { 0.4 },
            rest_ms: 1.5,
        };
        let mut wrong = 0;
        for seed in 0..40 {
            let mut dice = Dice(seed);
            let settings = Settings {
                costs: boot(12.0, 12.0),
                ..settings(blob_bytes(&layers) * 95 / 100, Share::Auto)
            };
            let mut experts = Experts::new(&layers, &settings, &Recalled::default());
            for prompt in 0..8 {
                experts.begin(600, false);
                for layer in 0..48 {
                    let used: Vec<(u32, u32)> = (0..64)
                        .filter(|_| dice.next() < 0.8)
                        .map(|e| (e, 75))
                        .collect();
                    let served = experts.serve(layer, &used).to_vec();
                    experts.took(&machine.took(&served, 2 * MIB));
                }
                let found = experts.verdicts().buckets.into_iter().flatten().next();
                wrong += usize::from(prompt > 0 && found.map(|f| f.verdict.shares) != Some(shares));
            }
            let [counts, _] = experts.counts();
            assert!(counts.resident > counts.experts / 2);
        }
        assert!(
            wrong <= 14,
            "{wrong} of 280 prompts ended on another verdict"
        );
    }
}

#[test]
fn what_reading_in_place_takes_is_learnt_from_layers_without_the_cpu() {
    let one = Layer {
        experts: 64,
        used: 8,
        blob_bytes: 2 * MIB,
    };
    let used: Vec<(u32, u32)> = (0..8).map(|e| (e, 1)).collect();
    // Reading takes 1.6 times what was measured, and a layer 0.05 ms beside it.
    let ms = 0.05 + 1.6 * 2.0 * Costs::UNKNOWN.link_ms_mib * 8.0;
    for (reads_in_place, by_cpu) in [(true, 5), (false, 4)] {
        let settings = Settings {
            reads_in_place,
            ..settings(0, Share::Off)
        };
        let mut experts = Experts::new(&[one; 4], &settings, &Recalled::default());
        experts.begin(1, true);
        for layer in 0..4 {
            experts.serve(layer, &used);
            experts.took(&Took {
                ms,
                ..Took::default()
            });
        }
        let factors = experts.buckets[0].factors;
        let best = by_cost(&settings.costs, factors, 2 * MIB, &[1; 8], 0.0);
        assert_eq!(best, by_cpu, "{factors:?}");
    }
}

#[test]
fn the_first_unit_of_a_step_is_not_read_and_resident_layers_have_none() {
    let layers = layers(3, 4, 2);
    let half = settings(0, Share::Fixed(0.5));
    let mut experts = Experts::new(&layers, &half, &Recalled::default());
    let took = Took {
        ms: 2.0,
        ..Took::default()
    };
    for _ in 0..2 {
        experts.begin(1, true);
        for i in 0..3 {
            experts.serve(i, &[(0, 1), (2, 1)]);
            let unit = experts.took(&took).expect("all are missing");
            assert_eq!((unit.is_first, unit.missing, unit.host), (i == 0, 2, 1));
            assert!((unit.reading() - 1.0).abs() < 1e-12);
        }
    }
    let all = settings(100 * MIB, Share::Off);
    let mut all = Experts::new(&layers, &all, &Recalled::default());
    for pass in 0..2 {
        all.begin(1, true);
        all.serve(0, &[(0, 1), (2, 1)]);
        assert_eq!(all.took(&took).is_none(), pass == 1);
    }
}

#[test]
fn a_recording_is_served_as_it_was_recorded() {
    let layers = layers(3, 4, 2);
    let shape = |(i, layer): (usize, &Layer)| routing::LayerShape {
        layer: i as u32,
        experts: layer.experts,
        used: layer.used,
        blob_bytes: layer.blob_bytes,
    };
    let header = routing::Header {
        routing: routing::VERSION,
        model: "m".to_owned(),
        layers: layers.iter().enumerate().map(shape).collect(),
    };
    let record = |layer, tokens| routing::Routed {
        layer,
        position: 0,
        tokens,
        generated: tokens == 1,
        used: vec![(0, 1), (1, tokens)],
    };
    let steps = [4, 1, 1];
    let records: Vec<_> = steps
        .into_iter()
        .flat_map(|tokens| (0..3).map(move |layer| record(layer, tokens)))
        .collect();
    for policy in [Policy::Value, Policy::Lru] {
        let hits = simulate(&header, &records, 1 << 30, policy, None);
        assert_eq!((hits.prompt.experts, hits.prompt.resident), (6, 0));
        assert_eq!((hits.generated.experts, hits.generated.resident), (12, 12));
        let none = simulate(&header, &records, 0, policy, None);
        assert_eq!((none.generated.resident, none.generated.streamed), (0, 12));
    }
}
