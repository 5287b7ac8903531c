//! What a machine can do, as measured: the numbers that every decision is a function of.
//!
//! A [`Profile`] is filled by probes, or written by hand for a machine that one does not have. As text it is JSON; each
//! name carries its unit (`gb_s` is 1e9 bytes a second, `gmac_s` 1e9 multiply-adds a second, `us` and `ns` times).
//!
//! | term | what is measured |
//! |---|---|
//! | `read_gb_s`, `copy_gb_s` | streaming reads and copies of host memory; copies count each byte once |
//! | `decode_gb_s` | bytes of weights that a product of one token passes a second, as a session runs it: with its fork and the quantisation of its input |
//! | `prefill_gmac_s` | multiply-adds of a product of many tokens |
//! | `stage_gb_s` | cells that attention gets through the staging ring, by what that takes more than attending them where they lie, forks not counted |
//! | `fork_join_us` | an operation that has nothing to do |
//! | `ns_cell`, `engage_us` | attention of one token in one layer: `engage_us + ns_cell * cells` |
//! | `slope_ms_cell`, `engage_ms` | the attention microbenchmark of two sizes, for the additive model |
//! | `link` | copies between host and device by size of the transfer |
//! | `kept` | what part of their rates link and CPU keep while both run |
//! | `t_sync_us` | handing one layer's work to the CPU and back |
//! | `launch_us`, `token_us` | a small operation of a token on a device, in a recorded graph; what a token takes beside all operations |
//!
//! A device's attention includes turning heads and writing cells, with the rotation of what is stored in 4 bits. Its products are measured in the shapes of the model, and `decode_gb_s` includes starting them; quantising their input is a part
//! of the small operation before them.

mod accept;
mod builtin;
mod figure;
mod overrides;
#[cfg(test)]
mod tests;
mod visit;

pub use accept::{Accepted, Change};
pub use builtin::{default_profile, example, example_names};
pub use figure::Figure;
pub use overrides::{OVERRIDES, Override};
pub use visit::Unit;

use serde::{Deserialize, Serialize};

use crate::bytes::KvType;
use crate::error::Error;
use crate::limits;

/// Version of the text that this code writes and reads.
pub const VERSION: u32 = 1;

/// Everything known of a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// [`VERSION`].
    pub version: u32,
    /// What reports call it.
    pub name: String,
    /// Where its numbers come from.
    pub source: Source,
    /// What the numbers hold for; a cached profile with another key is measured anew.
    #[serde(default)]
    pub key: Key,
    /// Memory and processor.
    pub host: Host,
    /// The accelerator, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<Device>,
    /// Paths of the figures that were measured while other processes used the processor.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disturbed: Vec<String>,
    /// Paths of the figures that were not measured for lack of time, and are those of a built-in profile.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guessed: Vec<String>,
}

/// Where a profile's numbers come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// Probes, on this machine.
    Measured,
    /// The built-in guess for a machine that was not measured.
    Default,
    /// A built-in example of a kind of machine.
    Example,
    /// A file that somebody wrote.
    HandWritten,
}

impl Source {
    /// As reports say it.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Default => "default, not measured",
            Self::Example => "example",
            Self::HandWritten => "hand-written",
        }
    }
}

/// What shaped a measurement.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Key {
    /// Name of the processor.
    pub cpu: String,
    /// Physical cores that the process may use.
    pub cores: u32,
    /// Threads of the worker pool.
    pub threads: u32,
    /// Name of the device; empty without one.
    pub device: String,
    /// Version of its driver; empty without one.
    pub driver: String,
    /// Head sizes, GQA ratio, attention variant, sizes of the probes: whatever else changes the result.
    pub shaped_by: String,
}

/// A rate by how many threads take part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ByThreads {
    /// One thread.
    pub one: Figure,
    /// Half of them.
    pub half: Figure,
    /// All.
    pub all: Figure,
}

/// Memory and processor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Memory of the machine (of the container, if it is less), bytes.
    pub memory_total_bytes: u64,
    /// What of it a process could take without others being paged out, bytes.
    pub memory_available_bytes: u64,
    /// Instruction set that products use: `scalar`, `avx2`, `avx512` or `amx`.
    pub isa: String,
    /// Streaming read.
    pub read_gb_s: ByThreads,
    /// Copy; each byte counts once.
    pub copy_gb_s: ByThreads,
    /// Copies of cells into the staging ring, ahead of their use: what attending them takes more than where they lie, without the fork that
    /// each copy is. Where it was not measured, as fast as other copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stage_gb_s: Option<Figure>,
    /// An operation over all threads that has nothing to do.
    pub fork_join_us: Figure,
    /// Products, a line for each format and instruction set that was measured.
    #[serde(default)]
    pub products: Vec<ProductRate>,
    /// Attention of one token in one layer, a line for each tier and shape of heads that was measured.
    #[serde(default)]
    pub attention: Vec<AttentionRate>,
    /// The attention microbenchmark of the additive model.
    #[serde(default)]
    pub engage: Engage,
    /// Read rate of the disk that holds models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_read_gb_s: Option<Figure>,
}

/// Products with the weights of one format on the CPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProductRate {
    /// As files name it: `Q4_K`, `F16`, ...
    pub format: String,
    /// `scalar`, `avx2`, `avx512` or `amx`.
    pub isa: String,
    /// Weights that a product of one token passes, all threads, its fork and the quantisation of its input included.
    pub decode_gb_s: Figure,
    /// The same with one thread.
    pub decode_one_gb_s: Figure,
    /// Products of many tokens, all threads.
    pub prefill_gmac_s: Figure,
}

/// The heads that attention was measured with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadShape {
    /// Query heads.
    pub heads: u64,
    /// KV heads.
    pub heads_kv: u64,
    /// Values of a K head.
    pub head_k: u64,
    /// Values of a V head.
    pub head_v: u64,
}

/// Attention of one token over the cells of one layer: `engage_us + ns_cell * cells`, and at least `least_us`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionRate {
    /// Type of K.
    pub type_k: KvType,
    /// Type of V.
    pub type_v: KvType,
    /// What it was measured with.
    pub shape: HeadShape,
    /// One more cell, for all heads.
    pub ns_cell: Figure,
    /// What is left at no cells: fork and join, softmax, merge.
    pub engage_us: Figure,
    /// What it takes over few cells: a device's multiprocessors have a block each then, or none. `None`: what the line says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least_us: Option<Figure>,
    /// Part of its rate that CPU attention keeps while the link is busy, with one thread less: that gives the device its work. `None`: [`Kept::attention`], and on a device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<Figure>,
    /// Copies of the tier's blocks to a device, as sessions make them. `None`: what [`Link`] says of pieces, and on a device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies_gb_s: Option<Figure>,
    /// Part of that rate that they keep while the CPU attends. `None`: [`Kept::link_attention`], and on a device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies_kept: Option<Figure>,
}

/// The attention microbenchmark: one token over 8192 cells, then over 256. What is `None` is derived from
/// [`Host::attention`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Engage {
    /// Attending over one more cell in a layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slope_ms_cell: Option<Figure>,
    /// The fixed cost of attending in windows at all, a token: `c_engage`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engage_ms: Option<Figure>,
}

impl Engage {
    /// Slope and intercept from times at two numbers of cells; `None` if the numbers are the same. What noise makes
    /// negative is 0.
    pub fn of_two_sizes(small: (u64, Figure), large: (u64, Figure)) -> Option<Self> {
        let cells = large.0.checked_sub(small.0).filter(|&n| n > 0)? as f64;
        let slope = ((large.1.value - small.1.value) / cells).max(0.0);
        let slope_spread = (large.1.spread + small.1.spread) / cells;
        let small_cells = small.0 as f64;
        Some(Self {
            slope_ms_cell: Some(Figure {
                value: slope,
                spread: slope_spread,
            }),
            engage_ms: Some(Figure {
                value: (small.1.value - slope * small_cells).max(0.0),
                spread: small.1.spread + slope_spread * small_cells,
            }),
        })
    }
}

/// An accelerator with memory of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Its memory, bytes.
    pub total_bytes: u64,
    /// What of it is free, bytes: once the process has its context there.
    pub free_bytes: u64,
    /// What the process takes of it before anything is allocated, bytes: the driver's context. It counts where the process's share of
    /// the whole device is capped.
    #[serde(default)]
    pub context_bytes: u64,
    /// Streaming read of its memory.
    pub read_gb_s: Figure,
    /// Copies between host and device.
    pub link: Link,
    /// What link and CPU keep of their rates while both run.
    pub kept: Kept,
    /// Products, a line for each format.
    #[serde(default)]
    pub products: Vec<DeviceProduct>,
    /// Attention of one token in one layer, a line for each tier and shape of heads.
    #[serde(default)]
    pub attention: Vec<AttentionRate>,
    /// Handing one layer's work to the CPU and getting its result.
    pub t_sync_us: Figure,
    /// A small operation of one token, as decoding starts them: norms and gates.
    pub launch_us: Figure,
    /// What a token takes beside its operations: giving them to the device, and getting its logits.
    #[serde(default)]
    pub token_us: Figure,
}

/// Products with the weights of one format on the device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceProduct {
    /// As files name it.
    pub format: String,
    /// Weights that a product of one token passes.
    pub decode_gb_s: Figure,
    /// Products of many tokens.
    pub prefill_gmac_s: Figure,
}

/// Copies between host and device, by size of the transfer, ascending.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// From pinned host memory to the device.
    pub to_device_pinned: Vec<Transfer>,
    /// From pageable host memory to the device.
    #[serde(default)]
    pub to_device_pageable: Vec<Transfer>,
    /// From the device to pinned host memory.
    #[serde(default)]
    pub from_device_pinned: Vec<Transfer>,
    /// From the device to pageable host memory.
    #[serde(default)]
    pub from_device_pageable: Vec<Transfer>,
}

/// The rate of copies of one size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Transfer {
    /// Bytes of each copy.
    pub bytes: u64,
    /// Its rate.
    pub gb_s: Figure,
}

/// Rates while link and CPU both run, as parts of the rates alone: 0.96 keeps 96 %. They share the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kept {
    /// The link, while the CPU attends: beside tiers that have no figure of their own ([`AttentionRate::copies_kept`]).
    pub link_attention: Figure,
    /// CPU attention, while the link is busy, with one thread less: of tiers that have no figure of their own ([`AttentionRate::kept`]).
    pub attention: Figure,
    /// The link, while the CPU computes products.
    pub link_products: Figure,
    /// CPU products, while the link is busy.
    pub products: Figure,
    /// The device, reading its own memory, while the link is busy.
    #[serde(default = "all_of_it")]
    pub device: Figure,
}

fn all_of_it() -> Figure {
    Figure::exact(1.0)
}

impl Profile {
    /// The same machine with a link of at most so many GB/s, of which the name then says `why`.
    pub fn slow_link(&mut self, gb_s: f64, why: &str) {
        use std::fmt::Write as _;
        let slow = |figure: &mut Figure| {
            if figure.value > gb_s {
                *figure = Figure {
                    value: gb_s,
                    ..*figure
                };
            }
        };
        match &mut self.device {
            Some(device) => {
                let pinned = device.link.to_device_pinned.iter_mut();
                pinned.for_each(|transfer| slow(&mut transfer.gb_s));
                let tiers = self.host.attention.iter_mut();
                tiers.for_each(|rate| rate.copies_gb_s.iter_mut().for_each(slow));
            }
            None => {
                // Without a device, what is staged is copied in host memory.
                let all = self.host.copy_gb_s.all;
                slow(self.host.stage_gb_s.get_or_insert(all));
            }
        }
        let _ = write!(self.name, ", {why} at {gb_s:.1} GB/s");
    }
}

impl Profile {
    /// Reads a profile from text and checks every number.
    ///
    /// # Errors
    /// If the text is no profile of this version, or a number cannot be: the error names the field.
    pub fn from_json(text: &str) -> Result<Self, Error> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let broken = |e: serde_json::Error| Error::ProfileText {
            problem: e.to_string(),
        };
        if text.len() > limits::PROFILE_TEXT_BYTES_MAX {
            return Err(Error::ProfileText {
                problem: format!(
                    "{} bytes, expected at most {}",
                    text.len(),
                    limits::PROFILE_TEXT_BYTES_MAX
                ),
            });
        }
        let Versioned { version } = serde_json::from_str(text).map_err(broken)?;
        if version != VERSION {
            return Err(Error::ProfileText {
                problem: format!("version {version}, expected {VERSION}"),
            });
        }
        let profile: Self = serde_json::from_str(text).map_err(broken)?;
        profile.validate()?;
        Ok(profile)
    }

    /// As text that [`Profile::from_json`] reads.
    ///
    /// # Panics
    /// Never: every field is a number, a text or a list of them.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("numbers, texts and lists have a JSON form")
    }
}
