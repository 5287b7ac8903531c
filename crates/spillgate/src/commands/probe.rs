//! `probe`: what this machine can do, measured.

use anyhow::Result;
use clap::Args;
use engine::probe::{self, Formats, Reuse, Settings, Subject};
use place::profile::{Figure, Profile};

use crate::cli::Common;
use crate::flags::MachineFlags;
use crate::output::{human_bytes, print, println, table};
use crate::progress::Steps;
use crate::{interrupt, settings};

/// Measures what this machine can do
///
/// Memory bandwidth, products for each weight format, attention for each cache type, and the disk that holds the model:
/// medians with their spread, half the width of the middle half of the readings. It takes up to 20 seconds; the result is
/// kept in the user's cache and shown from there until something that shapes it changes. Plans are made with it. Without
/// a MODEL an ordinary one of 8 billion weights in Q4_K stands in.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate probe
  spillgate probe smollm2 --reprobe
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
    let settings = Settings {
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
    let row = |cells: &[&dyn ToString]| cells.iter().map(|c| c.to_string()).collect::<Vec<_>>();
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
    text += &table(&memory, &[1, 2, 3]);
    let disk = host
        .disk_read_gb_s
        .map_or("not measured".to_owned(), |f: Figure| format!("{f} GB/s"));
    let staged = host
        .stage_gb_s
        .map_or("not measured".to_owned(), |f: Figure| format!("{f} GB/s"));
    text += &format!(
        "\nfork and join  {} us\nstaging        {staged}\ndisk           {disk}\n\n",
        host.fork_join_us
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
    if host.attention.is_empty() {
        return text;
    }
    let mut attention = vec![row(&[
        &"ATTENTION, K/V",
        &"NS A CELL AND LAYER",
        &"US A LAYER BESIDE",
    ])];
    attention.extend(host.attention.iter().map(|a| {
        let types = format!("{}/{}", a.type_k, a.type_v);
        row(&[&types, &a.ns_cell, &a.engage_us])
    }));
    text.push('\n');
    text += &table(&attention, &[1, 2]);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_is_shown_with_its_spread() {
        let mut profile = place::profile::default_profile();
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
            if path.starts_with("host.") && !path.contains("engage.") {
                assert!(shown.contains(&figure.to_string()), "{path}: {shown}");
            }
        }
        assert!(shown.contains(" ± 3"));
        profile.host.disk_read_gb_s = None;
        profile.host.attention.clear();
        assert!(text(&profile).contains("not measured"));
    }
}
