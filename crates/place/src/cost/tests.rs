use super::*;
use crate::bytes::KvType;
use crate::profile::{Figure, Profile, Transfer, default_profile, example};
use crate::tier::LADDER;

const SHAPE: HeadShape = HeadShape {
    heads: 32,
    heads_kv: 8,
    head_k: 128,
    head_v: 128,
};

fn cpu(profile: &Profile) -> Processor<'_> {
    Processor::cpu(&profile.host, profile.key.threads, profile.key.threads)
}

#[test]
fn what_was_measured_is_taken_as_it_is() {
    let profile = default_profile();
    for rate in &profile.host.attention {
        let tier = Tier::new(rate.type_k, rate.type_v);
        let a = cpu(&profile).attention(tier, rate.shape);
        assert_eq!(a.ns_cell, rate.ns_cell.value);
        assert_eq!(a.engage_us, rate.engage_us.value);
    }
    let q4 = profile
        .host
        .products
        .iter()
        .find(|p| p.format == "Q4_K")
        .unwrap();
    assert_eq!(cpu(&profile).decode_gb_s("q4_k"), q4.decode_gb_s.value);
}

#[test]
fn other_heads_scale_with_what_grows_more() {
    let profile = default_profile();
    let cpu = cpu(&profile);
    let base = cpu.attention(LADDER[0], SHAPE).ns_cell;
    // Twice the queries over the same cells: the multiply-adds.
    let queries = HeadShape { heads: 64, ..SHAPE };
    assert!((cpu.attention(LADDER[0], queries).ns_cell / base - 2.0).abs() < 1e-9);
    // The same queries over four times the cells' bytes.
    let cells = HeadShape {
        heads_kv: 32,
        ..SHAPE
    };
    assert!((cpu.attention(LADDER[0], cells).ns_cell / base - 4.0).abs() < 1e-9);
    // A tier that was not measured: by its bytes, from some other tier.
    let q5 = Tier::new(KvType::Q5_0, KvType::Q5_0);
    assert!(cpu.attention(q5, SHAPE).ns_cell > 0.0);
}

#[test]
fn cells_of_other_heads_are_not_read_faster_than_memory() {
    let mut profile = default_profile();
    profile.set("cpu_attention_ns_cell", 1e-3).unwrap();
    let a = cpu(&profile).attention(LADDER[0], SHAPE);
    assert_eq!(a.ns_cell, 1e-3, "as it was measured");
    let heads = HeadShape { heads: 16, ..SHAPE };
    let a = cpu(&profile).attention(LADDER[0], heads);
    assert!((a.ns_cell - 4096.0 / profile.host.read_gb_s.all.value).abs() < 1e-9);
}

#[test]
fn formats_that_were_not_measured_are_as_slow_as_the_slowest() {
    let profile = default_profile();
    let slowest = profile.host.products.iter().map(|p| p.decode_gb_s.value);
    let slowest = slowest.fold(f64::INFINITY, f64::min);
    assert_eq!(cpu(&profile).decode_gb_s("no such format"), slowest);
    let mut empty = profile.clone();
    empty.host.products.clear();
    assert_eq!(
        cpu(&empty).decode_gb_s("Q4_K"),
        empty.host.read_gb_s.all.value
    );
}

#[test]
fn fewer_threads_are_slower() {
    let profile = default_profile();
    let with = |threads| Processor::cpu(&profile.host, threads, 4);
    let rates: Vec<f64> = (1..=5).map(|t| with(t).decode_gb_s("Q8_0")).collect();
    assert!(rates.windows(2).all(|w| w[0] <= w[1]), "{rates:?}");
    assert_eq!(rates[3], rates[4]);
    let ns_cell = |threads| with(threads).attention(LADDER[0], SHAPE).ns_cell;
    assert!((ns_cell(1) / ns_cell(4) - 4.0).abs() < 1e-9);
}

#[test]
fn beside_copies_a_tier_keeps_its_own_part() {
    let mut profile = example("h200-pcie5").unwrap();
    let rate = &mut profile.host.attention[0];
    let (tier, shape) = (Tier::new(rate.type_k, rate.type_v), rate.shape);
    (rate.ns_cell, rate.kept) = (Figure::exact(640.0), Some(Figure::exact(0.8)));
    let threads = profile.key.threads;
    let machine = Machine::new(&profile, Place::Device, threads);
    let a = machine.host.attention(tier, shape);
    let fewer = f64::from(threads - 1) / f64::from(threads);
    assert!((a.ns_cell - 640.0 / fewer).abs() < 1e-9);
    // That thread was missing when it was measured.
    assert!((a.beside_ns_cell - 800.0).abs() < 1e-9);
    let mut of_all = profile.clone();
    of_all.host.attention[0].kept = None;
    of_all.device.as_mut().unwrap().kept.attention = Figure::exact(0.5);
    let machine = Machine::new(&of_all, Place::Device, threads);
    let a = machine.host.attention(tier, shape);
    assert!((a.beside_ns_cell - 1280.0).abs() < 1e-9);
}

#[test]
fn copies_of_cells_are_as_fast_as_they_were_measured_with_their_tier() {
    let mut profile = example("h200-pcie5").unwrap();
    let rate = &mut profile.host.attention[0];
    let (tier, shape) = (Tier::new(rate.type_k, rate.type_v), rate.shape);
    let machine = |profile: &Profile| {
        let machine = Machine::new(profile, Place::Device, profile.key.threads);
        let mut copies = Copies::default();
        copies.add(&machine, 4096.0, &machine.host.attention(tier, shape));
        (machine.link_gb_s, copies)
    };
    let (link, copies) = machine(&profile);
    let kept = profile.device.as_ref().unwrap().kept.link_attention.value;
    assert!((copies.ns - 4096.0 / link).abs() < 1e-9);
    assert!((copies.beside_ns - 4096.0 / link / kept).abs() < 1e-9);
    let rate = &mut profile.host.attention[0];
    rate.copies_gb_s = Some(Figure::exact(32.0));
    rate.copies_kept = Some(Figure::exact(0.5));
    let (_, copies) = machine(&profile);
    assert!((copies.ns - 128.0).abs() < 1e-9 && (copies.beside_ns - 256.0).abs() < 1e-9);
    // A link that is made slower is for all.
    profile.slow_link(8.0, "emulated link");
    assert!((machine(&profile).1.ns - 512.0).abs() < 1e-9);
    // Where main memory plays a device's, nothing is copied to one.
    let here = Machine::new(&profile, Place::VirtualDevice, profile.key.threads);
    let host = here.host.attention(tier, shape);
    assert_eq!((host.copies_gb_s, host.copies_kept), (None, None));
}

#[test]
fn links_are_interpolated_by_size() {
    let at = |bytes, gb_s| Transfer {
        bytes,
        gb_s: Figure::exact(gb_s),
    };
    let rates = [at(1 << 20, 40.0), at(4 << 20, 50.0)];
    assert_eq!(link_gb_s(&rates, 1 << 10), 40.0);
    assert!((link_gb_s(&rates, 2 << 20) - 45.0).abs() < 1e-9);
    assert_eq!(link_gb_s(&rates, 1 << 30), 50.0);
    assert_eq!(link_gb_s(&[], 1), 0.0);
}

#[test]
fn a_machine_without_a_device_has_none() {
    let profile = default_profile();
    let machine = Machine::new(&profile, Place::Device, 4);
    assert_eq!(machine.place, Place::Host);
    let h200 = example("h200-pcie5").unwrap();
    assert_eq!(Machine::new(&h200, Place::Device, 16).place, Place::Device);
    assert_eq!(Machine::new(&h200, Place::Host, 16).place, Place::Host);
}
