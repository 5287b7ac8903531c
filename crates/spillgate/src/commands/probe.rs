//! `probe`: what this machine can do, measured.

use std::fmt::Write as _;

use anyhow::Result;
use clap::Args;
use engine::probe::{self, Formats, Reuse, Settings, Subject};
use place::profile::{AttentionRate, Device, Figure, Host, Profile, Transfer};

use crate::cli::Common;
use crate::flags::{DEVICES, DeviceName, MachineFlags, device};
use crate::output::{human_bytes, print, println, table};
use crate::progress::Steps;
use crate::{interrupt, settings};

/// Measures what this machine can do
///
/// Memory bandwidth, products for each weight format, attention for each cache type, and the disk that holds the model:
/// medians with their spread, half the width of the middle half of the readings. Of a GPU the same, and its link, alone and while the CPU
/// works. It takes up to 20 seconds, and once a driver the time to compile a GPU's kernels; what there was no time for is a built-in
/// profile's, and said to be. The result is kept in the user's cache and shown from there until something that shapes it changes. A figure
/// that was measured while other processes used the processor is measured again, then marked, and replaces no clean one. Plans are made
/// with it. Without a MODEL an ordinary one of 8 billion weights in Q4_K stands in.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate probe
  spillgate probe smollm2 --reprobe
  spillgate probe smollm2 --device cpu
  spillgate probe --all -t 1 --isa avx2 --json")]
pub struct ProbeArgs {
    /// Path of a GGUF file, a known name, or hf:OWNER/REPO/FILE.gguf
    model: Option<String>,
    /// Measure every weight format, with every vector instruction set unless --isa says which
    #[arg(long)]
    all: bool,
    /// Measure anew; what differs by no more than noise stays as it was
    #[arg(long)]
    reprobe: bool,
    /// What is measured: the CPU alone, or a GPU, too; auto: if a usable one is there
    #[arg(long, value_name = DEVICES, default_value = "auto", value_parser = device)]
    device: DeviceName,
    /// Prompt tokens computed at a time
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    ubatch: usize,
    #[command(flatten)]
    machine: MachineFlags,
}

pub fn run(args: &ProbeArgs, common: &Common) -> Result<()> {
    let load = settings::load_options(&args.machine)?;
    let subject = match &args.model {
        None => {
            interrupt::catch()?;
            Subject::ordinary()
        }
        Some(model) => Subject::of_file(&super::open_header(model)?),
    };
    let device = settings::compute_device(args.device)?;
    let settings = Settings {
        gpu: settings::gpu(device),
        threads: load.threads,
        isa: load.isa,
        pinning: load.pinning,
        ubatch: args.ubatch,
        formats: if args.all {
            Formats::All
        } else {
            Formats::OfModel
        },
        ..Settings::default()
    };
    let reuse = if args.reprobe {
        Reuse::Anew
    } else {
        Reuse::Cached
    };
    let profile = probe::profile(&subject, &settings, reuse, &mut Steps::new())?;
    if common.json {
        println(&profile.to_json())
    } else {
        print(&text(&profile))
    }
}

fn text(profile: &Profile) -> String {
    let (key, host) = (&profile.key, &profile.host);
    let mut text = format!(
        "{}\n{} of {} cores, {} of memory, {} free\n{}\n\n",
        profile.name,
        key.threads,
        key.cores,
        human_bytes(host.memory_total_bytes),
        human_bytes(host.memory_available_bytes),
        key.shaped_by,
    );
    text += &host_text(host);
    if let Some(device) = &profile.device {
        text += &format!("\n{}, driver {}\n", key.device, key.driver);
        text += &device_text(device, &profile.host.attention);
    }
    for note in probe::doubts(profile) {
        text += &format!("\nnote: {note}\n");
    }
    text
}

fn row(cells: &[&dyn ToString]) -> Vec<String> {
    cells.iter().map(|c| c.to_string()).collect()
}

fn host_text(host: &Host) -> String {
    let memory = [
        row(&[&"MEMORY, GB/S", &"1 THREAD", &"HALF", &"ALL"]),
        row(&[
            &"read",
            &host.read_gb_s.one,
            &host.read_gb_s.half,
            &host.read_gb_s.all,
        ]),
        row(&[
            &"copy",
            &host.copy_gb_s.one,
            &host.copy_gb_s.half,
            &host.copy_gb_s.all,
        ]),
    ];
    let mut text = table(&memory, &[1, 2, 3]);
    let rate = |found: Option<Figure>| {
        found.map_or("not measured".to_owned(), |f: Figure| format!("{f} GB/s"))
    };
    text += &format!(
        "\nfork and join  {} us\nstaging        {}\ndisk           {}\n\n",
        host.fork_join_us,
        rate(host.stage_gb_s),
        rate(host.disk_read_gb_s),
    );
    let mut products = vec![row(&[
        &"WEIGHTS",
        &"ISA",
        &"1 TOKEN, GB/S",
        &"1 THREAD",
        &"PREFILL, GMAC/S",
    ])];
    products.extend(host.products.iter().map(|p| {
        row(&[
            &p.format,
            &p.isa,
            &p.decode_gb_s,
            &p.decode_one_gb_s,
            &p.prefill_gmac_s,
        ])
    }));
    text += &table(&products, &[2, 3, 4]);
    text += &attention_text(&host.attention);
    text
}

fn attention_text(rates: &[AttentionRate]) -> String {
    if rates.is_empty() {
        return String::new();
    }
    let mut attention = vec![row(&[
        &"ATTENTION, K/V",
        &"NS A CELL AND LAYER",
        &"US A LAYER BESIDE",
        &"AT LEAST",
    ])];
    attention.extend(rates.iter().map(|a| {
        let types = format!("{}/{}", a.type_k, a.type_v);
        let least = a
            .least_us
            .map_or_else(|| "-".to_owned(), |us| us.to_string());
        row(&[&types, &a.ns_cell, &a.engage_us, &least])
    }));
    format!("\n{}", table(&attention, &[1, 2, 3]))
}

fn device_text(device: &Device, tiers: &[AttentionRate]) -> String {
    let mut text = format!(
        "{} of memory, {} free, read at {} GB/s\nan operation {} us, a token beside its operations {} us, a layer to the CPU and back {} us\n\n",
        human_bytes(device.total_bytes),
        human_bytes(device.free_bytes),
        device.read_gb_s,
        device.launch_us,
        device.token_us,
        device.t_sync_us,
    );
    let mut products = vec![row(&[&"WEIGHTS", &"1 TOKEN, GB/S", &"PREFILL, GMAC/S"])];
    let rates = device.products.iter();
    products.extend(rates.map(|p| row(&[&p.format, &p.decode_gb_s, &p.prefill_gmac_s])));
    text += &table(&products, &[1, 2]);
    text += &attention_text(&device.attention);
    let link = &device.link;
    let ways: [(&str, &[Transfer]); 4] = [
        ("to the device, pinned", &link.to_device_pinned),
        ("to the device, pageable", &link.to_device_pageable),
        ("from the device, pinned", &link.from_device_pinned),
        ("from the device, pageable", &link.from_device_pageable),
    ];
    let mut copies = vec![row(&[&"COPIES", &"BYTES EACH", &"GB/S"])];
    for (way, transfers) in ways {
        copies.extend(transfers.iter().map(|t| row(&[&way, &t.bytes, &t.gb_s])));
    }
    text.push('\n');
    text += &table(&copies, &[1, 2]);
    let kept = &device.kept;
    let none = || "-".to_owned();
    let known = |figure: Option<Figure>| figure.map_or_else(none, |f| f.to_string());
    let head = [
        "WHILE BOTH RUN, OF 1",
        "COPIES, GB/S",
        "LINK KEEPS",
        "CPU KEEPS",
    ];
    let beside = [
        head.map(str::to_owned).to_vec(),
        row(&[
            &"CPU attention",
            &"-",
            &kept.link_attention,
            &kept.attention,
        ]),
        row(&[&"CPU products", &"-", &kept.link_products, &kept.products]),
    ]
    .into_iter();
    let of_tiers = tiers.iter().filter_map(|rate| {
        let name = format!("CPU attention, {}/{}", rate.type_k, rate.type_v);
        let (copies, link) = (known(rate.copies_gb_s), known(rate.copies_kept));
        rate.kept.map(|kept| row(&[&name, &copies, &link, &kept]))
    });
    let beside: Vec<_> = beside.chain(of_tiers).collect();
    text.push('\n');
    text += &table(&beside, &[1, 2, 3]);
    let _ = writeln!(
        text,
        "\nthe device keeps {} of its memory's rate while copies come",
        kept.device
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_is_shown_with_its_spread() {
        let mut profile = place::profile::example("h200-pcie5").unwrap();
        let mut n = 100.0;
        profile.visit_mut(&mut |_, figure, _| {
            n += 1.0;
            *figure = Figure {
                value: n,
                spread: 3.0,
            };
        });
        let shown = text(&profile);
        for (path, figure, _) in profile.figures() {
            if !path.contains("engage.") {
                assert!(shown.contains(&figure.to_string()), "{path}: {shown}");
            }
        }
        assert!(shown.contains(" ± 3"));
        profile.host.disk_read_gb_s = None;
        profile.host.attention.clear();
        profile.guessed = ["a", "b", "c", "d"].map(str::to_owned).to_vec();
        let shown = text(&profile);
        assert!(
            shown.contains("not measured") && shown.contains("(a, b, c, ...)"),
            "{shown}"
        );
    }
}
