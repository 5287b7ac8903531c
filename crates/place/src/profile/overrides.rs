//! Short names for the measured terms, so that flags and environment variables can replay a decision.

use super::{Figure, Profile};
use crate::error::Error;

/// A term that can be set by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Override {
    /// What flags call it, with its unit.
    pub name: &'static str,
    /// Which figures it sets: paths, in which `*` stands for anything.
    paths: &'static [&'static str],
    /// One line of help.
    pub about: &'static str,
}

const fn term(name: &'static str, paths: &'static [&'static str], about: &'static str) -> Override {
    Override { name, paths, about }
}

/// Bytes are no figures; these names set them, in MiB.
const MEMORY: [&str; 4] = [
    "memory_total_mib",
    "memory_available_mib",
    "device_total_mib",
    "device_free_mib",
];

/// Every term that [`Profile::set`] knows. A full path as in [`Profile::figures`] is taken too.
pub static OVERRIDES: &[Override] = &[
    term(MEMORY[0], &[], "memory of the machine"),
    term(MEMORY[1], &[], "memory that the process may take"),
    term(MEMORY[2], &[], "memory of the device"),
    term(MEMORY[3], &[], "free memory of the device"),
    term(
        "host_read_gb_s",
        &["host.read_gb_s.all"],
        "reads of host memory, all threads",
    ),
    term(
        "host_read_half_gb_s",
        &["host.read_gb_s.half"],
        "the same, half of the threads",
    ),
    term(
        "host_read_one_gb_s",
        &["host.read_gb_s.one"],
        "the same, one thread",
    ),
    term(
        "host_copy_gb_s",
        &["host.copy_gb_s.all"],
        "copies in host memory, all threads",
    ),
    term(
        "host_copy_half_gb_s",
        &["host.copy_gb_s.half"],
        "the same, half of the threads",
    ),
    term(
        "host_copy_one_gb_s",
        &["host.copy_gb_s.one"],
        "the same, one thread",
    ),
    term(
        "host_stage_gb_s",
        &["host.stage_gb_s"],
        "copies of cells into the staging ring, where main memory plays a device",
    ),
    term(
        "fork_join_us",
        &["host.fork_join_us"],
        "an empty operation over all threads",
    ),
    term(
        "cpu_decode_gb_s",
        &["host.products[*].decode_gb_s"],
        "CPU products of one token, all formats",
    ),
    term(
        "cpu_decode_one_gb_s",
        &["host.products[*].decode_one_gb_s"],
        "the same, one thread",
    ),
    term(
        "cpu_prefill_gmac_s",
        &["host.products[*].prefill_gmac_s"],
        "CPU products of many tokens, all formats",
    ),
    term(
        "cpu_attention_ns_cell",
        &["host.attention[*].ns_cell"],
        "CPU attention, a cell of a layer, all tiers",
    ),
    term(
        "cpu_attention_engage_us",
        &["host.attention[*].engage_us"],
        "CPU attention, fixed cost of a layer",
    ),
    term(
        "slope_ms_cell",
        &["host.engage.slope_ms_cell"],
        "slope of the attention microbenchmark",
    ),
    term(
        "engage_ms",
        &["host.engage.engage_ms"],
        "fixed cost of attending in windows, a token",
    ),
    term(
        "disk_read_gb_s",
        &["host.disk_read_gb_s"],
        "reads of the disk that holds models",
    ),
    term(
        "device_read_gb_s",
        &["device.read_gb_s"],
        "reads of device memory",
    ),
    term(
        "link_gb_s",
        &[
            "device.link.to_device_pinned[*].gb_s",
            "host.attention[*].copies_gb_s",
        ],
        "pinned copies to the device, all sizes, and of each tier's blocks",
    ),
    term(
        "link_pageable_gb_s",
        &["device.link.to_device_pageable[*].gb_s"],
        "pageable copies to the device",
    ),
    term(
        "link_back_gb_s",
        &["device.link.from_device_pinned[*].gb_s"],
        "pinned copies from the device",
    ),
    term(
        "link_back_pageable_gb_s",
        &["device.link.from_device_pageable[*].gb_s"],
        "pageable copies from the device",
    ),
    term(
        "link_kept_attention",
        &[
            "device.kept.link_attention",
            "host.attention[*].copies_kept",
        ],
        "part of its rate that the link keeps beside CPU attention",
    ),
    term(
        "attention_kept",
        &["device.kept.attention", "host.attention[*].kept"],
        "part of its rate that CPU attention keeps beside the link",
    ),
    term(
        "device_kept",
        &["device.kept.device"],
        "part of its rate that the device keeps while the link is busy",
    ),
    term(
        "link_kept_products",
        &["device.kept.link_products"],
        "part of its rate that the link keeps beside CPU products",
    ),
    term(
        "products_kept",
        &["device.kept.products"],
        "part of their rate that CPU products keep beside the link",
    ),
    term(
        "device_decode_gb_s",
        &["device.products[*].decode_gb_s"],
        "device products of one token, all formats",
    ),
    term(
        "device_prefill_gmac_s",
        &["device.products[*].prefill_gmac_s"],
        "device products of many tokens, all formats",
    ),
    term(
        "device_attention_ns_cell",
        &["device.attention[*].ns_cell"],
        "device attention, a cell of a layer, all tiers",
    ),
    term(
        "device_attention_engage_us",
        &["device.attention[*].engage_us"],
        "device attention, fixed cost of a layer",
    ),
    term(
        "t_sync_us",
        &["device.t_sync_us"],
        "handing a layer's work to the CPU and back",
    ),
    term(
        "launch_us",
        &["device.launch_us"],
        "a small operation of one token on the device",
    ),
    term(
        "token_us",
        &["device.token_us"],
        "a token on the device, beside its operations",
    ),
];

impl Profile {
    /// Sets a term by its name in [`OVERRIDES`] (or by its full path) to an exact value.
    ///
    /// # Errors
    /// If there is no such term, this profile has no such figure (one of a device, without a device), or no machine can
    /// have the value. The profile is unchanged then.
    pub fn set(&mut self, name: &str, value: f64) -> Result<(), Error> {
        let wrong = |problem: &str| Error::Profile {
            field: name.to_owned(),
            problem: problem.to_owned(),
        };
        let mut changed = self.clone();
        if MEMORY.contains(&name) {
            changed.set_memory(name, value)?;
        } else {
            let known = OVERRIDES.iter().find(|o| o.name == name);
            let full = [name];
            let paths: &[&str] = known.map_or(&full, |o| o.paths);
            // Terms that need not have been measured.
            for path in paths {
                let host = &mut changed.host;
                let term = match *path {
                    "host.engage.slope_ms_cell" => &mut host.engage.slope_ms_cell,
                    "host.engage.engage_ms" => &mut host.engage.engage_ms,
                    "host.disk_read_gb_s" => &mut host.disk_read_gb_s,
                    "host.stage_gb_s" => &mut host.stage_gb_s,
                    _ => continue,
                };
                term.get_or_insert_default();
            }
            let mut found = 0;
            changed.visit_mut(&mut |path, figure, _| {
                if paths.iter().any(|p| matches(p, path)) {
                    *figure = Figure::exact(value);
                    found += 1;
                }
            });
            if found == 0 {
                let of_device = paths.iter().any(|p| p.starts_with("device."));
                return Err(match known {
                    None => wrong("is no measured term"),
                    Some(_) if of_device && self.device.is_none() => {
                        wrong("is a term of a device, and this machine has none")
                    }
                    Some(_) => wrong("was not measured on this machine, so there is none to set"),
                });
            }
        }
        changed.validate()?;
        *self = changed;
        Ok(())
    }

    fn set_memory(&mut self, name: &str, mib: f64) -> Result<(), Error> {
        let wrong = |problem: String| Error::Profile {
            field: name.to_owned(),
            problem,
        };
        let most = (crate::limits::MEMORY_BYTES_MAX >> 20) as f64;
        if !(1.0..=most).contains(&mib) {
            return Err(wrong(format!("is {mib}, expected 1 to {most} MiB")));
        }
        let bytes = (mib * f64::from(1 << 20)) as u64;
        // A total below what is free (or the other way round) follows: the one that was set is meant.
        let (part, whole, sets_part) = match name {
            "memory_total_mib" | "memory_available_mib" => (
                &mut self.host.memory_available_bytes,
                &mut self.host.memory_total_bytes,
                name == "memory_available_mib",
            ),
            _ => {
                let none = || wrong("is a term of a device, and this machine has none".to_owned());
                let device = self.device.as_mut().ok_or_else(none)?;
                (
                    &mut device.free_bytes,
                    &mut device.total_bytes,
                    name == "device_free_mib",
                )
            }
        };
        if sets_part {
            *part = bytes;
            *whole = (*whole).max(bytes);
        } else {
            *whole = bytes;
            *part = (*part).min(bytes);
        }
        Ok(())
    }
}

/// Whether `path` is `pattern`, in which one `*` stands for anything.
fn matches(pattern: &str, path: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == path,
        Some((head, tail)) => {
            path.len() >= head.len() + tail.len() && path.starts_with(head) && path.ends_with(tail)
        }
    }
}
