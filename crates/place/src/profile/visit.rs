//! Every figure of a profile with its name and unit: what checks, overrides and comparisons walk over.

use serde::Serialize;

use super::{
    AttentionRate, ByThreads, Device, DeviceProduct, Engage, Figure, Host, Kept, Link, ProductRate,
    Profile, Transfer,
};
use crate::error::Error;
use crate::limits;

/// What a figure is measured in, and so what it can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// 1e9 bytes a second.
    GbS,
    /// 1e9 multiply-adds a second.
    GmacS,
    /// Microseconds.
    Us,
    /// Milliseconds.
    Ms,
    /// Nanoseconds a cell.
    NsCell,
    /// Milliseconds a cell.
    MsCell,
    /// A part of a whole.
    Part,
}

impl Unit {
    /// As reports write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GbS => "GB/s",
            Self::GmacS => "GMAC/s",
            Self::Us => "us",
            Self::Ms => "ms",
            Self::NsCell => "ns/cell",
            Self::MsCell => "ms/cell",
            Self::Part => "of 1",
        }
    }

    /// The least and the greatest value that a machine can have. Fixed costs can be 0: a fit through noise gives that.
    pub const fn range(self) -> (f64, f64) {
        match self {
            Self::GbS => (1e-3, 1e6),
            Self::GmacS => (1e-3, 1e7),
            Self::Us => (0.0, 1e6),
            Self::Ms => (0.0, 1e4),
            Self::NsCell => (1e-4, 1e7),
            Self::MsCell => (0.0, 10.0),
            // Noise can make the busy rate look better than the idle one.
            Self::Part => (1e-3, 1.25),
        }
    }
}

/// Called with the path, the figure and its unit.
type Visitor<'v> = &'v mut dyn FnMut(&str, &mut Figure, Unit);

impl Profile {
    /// Calls `f` with every figure: its path (`host.read_gb_s.all`, `host.products[Q4_K avx512].decode_gb_s`) and unit.
    pub fn visit_mut(&mut self, f: &mut dyn FnMut(&str, &mut Figure, Unit)) {
        let Self { host, device, .. } = self;
        visit_host(host, f);
        if let Some(device) = device {
            visit_device(device, f);
        }
    }

    /// Every figure with its path and unit.
    pub fn figures(&self) -> Vec<(String, Figure, Unit)> {
        let mut out = Vec::new();
        self.clone()
            .visit_mut(&mut |path, figure, unit| out.push((path.to_owned(), *figure, unit)));
        out
    }

    /// Checks every number.
    ///
    /// # Errors
    /// The first field that no machine can have: NaN, 0, negative, absurd, a list out of order or too long.
    pub fn validate(&self) -> Result<(), Error> {
        let field = |field: &str, problem: String| {
            Err(Error::Profile {
                field: field.to_owned(),
                problem,
            })
        };
        self.validate_lists()?;
        self.validate_bytes()?;
        for (path, figure, unit) in self.figures() {
            let (low, high) = unit.range();
            if !(low..=high).contains(&figure.value) {
                let problem = format!(
                    "is {}, expected {low} to {high} {}",
                    figure.value,
                    unit.name()
                );
                return field(&path, problem);
            }
            if !figure.spread.is_finite() || figure.spread < 0.0 {
                let problem = format!("has a spread of {}, expected 0 or more", figure.spread);
                return field(&path, problem);
            }
        }
        Ok(())
    }

    fn validate_bytes(&self) -> Result<(), Error> {
        let device = self.device.as_ref();
        let fields = [
            (
                "host.memory_total_bytes",
                Some(self.host.memory_total_bytes),
            ),
            (
                "host.memory_available_bytes",
                Some(self.host.memory_available_bytes),
            ),
            ("device.total_bytes", device.map(|d| d.total_bytes)),
            ("device.free_bytes", device.map(|d| d.free_bytes)),
        ];
        for (field, bytes) in fields {
            if let Some(bytes) = bytes
                && !(1..=limits::MEMORY_BYTES_MAX).contains(&bytes)
            {
                return Err(Error::Profile {
                    field: field.to_owned(),
                    problem: format!("is {bytes}, expected 1 to {}", limits::MEMORY_BYTES_MAX),
                });
            }
        }
        for (of, part, whole) in [
            (
                "host.memory_available_bytes",
                Some(self.host.memory_available_bytes),
                Some(self.host.memory_total_bytes),
            ),
            (
                "device.free_bytes",
                device.map(|d| d.free_bytes),
                device.map(|d| d.total_bytes),
            ),
            (
                "device.context_bytes",
                device.map(|d| d.context_bytes),
                device.map(|d| d.total_bytes),
            ),
        ] {
            if part > whole {
                return Err(Error::Profile {
                    field: of.to_owned(),
                    problem: "is more than the total".to_owned(),
                });
            }
        }
        Ok(())
    }

    fn validate_lists(&self) -> Result<(), Error> {
        let wrong = |field: &str, problem: String| Error::Profile {
            field: field.to_owned(),
            problem,
        };
        let host = &self.host;
        let device = self.device.as_ref();
        let lengths = [
            ("host.products", host.products.len()),
            ("host.attention", host.attention.len()),
            ("device.products", device.map_or(0, |d| d.products.len())),
            ("device.attention", device.map_or(0, |d| d.attention.len())),
        ]
        .map(|(field, n)| (field, n, limits::PROFILE_LIST_MAX));
        let doubts = [
            (
                "disturbed",
                self.disturbed.len(),
                limits::PROFILE_DOUBTS_MAX,
            ),
            ("guessed", self.guessed.len(), limits::PROFILE_DOUBTS_MAX),
        ];
        for (field, n, most) in lengths.into_iter().chain(doubts) {
            if n > most {
                return Err(wrong(
                    field,
                    format!("has {n} entries, expected at most {most}"),
                ));
            }
        }
        let rates = host.attention.iter().map(|a| ("host.attention", a));
        let of_device = device.into_iter().flat_map(|d| &d.attention);
        for (field, a) in rates.chain(of_device.map(|a| ("device.attention", a))) {
            let s = a.shape;
            let counts = [s.heads, s.heads_kv, s.head_k];
            let sane = |n: u64| (1..=limits::HEADS_MAX).contains(&n);
            if !counts.into_iter().all(sane) || s.head_v > limits::HEADS_MAX {
                let most = limits::HEADS_MAX;
                return Err(wrong(
                    &format!("{field}[{}].shape", a.name()),
                    format!("has {s:?}, expected counts of 1 to {most}"),
                ));
            }
        }
        let Some(device) = device else { return Ok(()) };
        for (name, transfers, needed) in link_lists(&device.link) {
            let field = format!("device.link.{name}");
            if needed && transfers.is_empty() {
                return Err(wrong(&field, "is empty, expected a rate".to_owned()));
            }
            let ascending = transfers.windows(2).all(|w| w[0].bytes < w[1].bytes);
            if transfers.len() > limits::PROFILE_LIST_MAX || !ascending {
                let problem = "is not sorted by ascending bytes, each size once".to_owned();
                return Err(wrong(&field, problem));
            }
        }
        Ok(())
    }
}

fn link_lists(link: &Link) -> [(&'static str, &[Transfer], bool); 4] {
    [
        ("to_device_pinned", &link.to_device_pinned, true),
        ("to_device_pageable", &link.to_device_pageable, false),
        ("from_device_pinned", &link.from_device_pinned, false),
        ("from_device_pageable", &link.from_device_pageable, false),
    ]
}

impl AttentionRate {
    /// What paths of its figures call it: types, and the shape of heads.
    pub fn name(&self) -> String {
        let s = self.shape;
        format!(
            "{}/{} {}/{}x{}+{}",
            self.type_k, self.type_v, s.heads, s.heads_kv, s.head_k, s.head_v
        )
    }
}

fn visit_host(host: &mut Host, f: Visitor<'_>) {
    let Host {
        memory_total_bytes: _,
        memory_available_bytes: _,
        isa: _,
        read_gb_s,
        copy_gb_s,
        stage_gb_s,
        fork_join_us,
        products,
        attention,
        engage,
        disk_read_gb_s,
    } = host;
    visit_by_threads("host.read_gb_s", read_gb_s, f);
    visit_by_threads("host.copy_gb_s", copy_gb_s, f);
    if let Some(rate) = stage_gb_s {
        f("host.stage_gb_s", rate, Unit::GbS);
    }
    f("host.fork_join_us", fork_join_us, Unit::Us);
    for product in products {
        let ProductRate {
            format,
            isa,
            decode_gb_s,
            decode_one_gb_s,
            prefill_gmac_s,
        } = product;
        let path = |field: &str| format!("host.products[{format} {isa}].{field}");
        f(&path("decode_gb_s"), decode_gb_s, Unit::GbS);
        f(&path("decode_one_gb_s"), decode_one_gb_s, Unit::GbS);
        f(&path("prefill_gmac_s"), prefill_gmac_s, Unit::GmacS);
    }
    visit_attention("host", attention, f);
    let Engage {
        slope_ms_cell,
        engage_ms,
    } = engage;
    if let Some(slope) = slope_ms_cell {
        f("host.engage.slope_ms_cell", slope, Unit::MsCell);
    }
    if let Some(engage) = engage_ms {
        f("host.engage.engage_ms", engage, Unit::Ms);
    }
    if let Some(rate) = disk_read_gb_s {
        f("host.disk_read_gb_s", rate, Unit::GbS);
    }
}

fn visit_by_threads(path: &str, rates: &mut ByThreads, f: Visitor<'_>) {
    let ByThreads { one, half, all } = rates;
    f(&format!("{path}.one"), one, Unit::GbS);
    f(&format!("{path}.half"), half, Unit::GbS);
    f(&format!("{path}.all"), all, Unit::GbS);
}

fn visit_attention(of: &str, rates: &mut [AttentionRate], f: Visitor<'_>) {
    for rate in rates {
        let name = rate.name();
        let path = |field: &str| format!("{of}.attention[{name}].{field}");
        f(&path("ns_cell"), &mut rate.ns_cell, Unit::NsCell);
        f(&path("engage_us"), &mut rate.engage_us, Unit::Us);
        if let Some(least) = &mut rate.least_us {
            f(&path("least_us"), least, Unit::Us);
        }
        if let Some(kept) = &mut rate.kept {
            f(&path("kept"), kept, Unit::Part);
        }
        if let Some(copies) = &mut rate.copies_gb_s {
            f(&path("copies_gb_s"), copies, Unit::GbS);
        }
        if let Some(kept) = &mut rate.copies_kept {
            f(&path("copies_kept"), kept, Unit::Part);
        }
    }
}

fn visit_device(device: &mut Device, f: Visitor<'_>) {
    let Device {
        total_bytes: _,
        free_bytes: _,
        context_bytes: _,
        read_gb_s,
        link,
        kept,
        products,
        attention,
        t_sync_us,
        launch_us,
        token_us,
    } = device;
    f("device.read_gb_s", read_gb_s, Unit::GbS);
    let Link {
        to_device_pinned,
        to_device_pageable,
        from_device_pinned,
        from_device_pageable,
    } = link;
    for (name, transfers) in [
        ("to_device_pinned", to_device_pinned),
        ("to_device_pageable", to_device_pageable),
        ("from_device_pinned", from_device_pinned),
        ("from_device_pageable", from_device_pageable),
    ] {
        for transfer in transfers {
            let path = format!("device.link.{name}[{}].gb_s", transfer.bytes);
            f(&path, &mut transfer.gb_s, Unit::GbS);
        }
    }
    let Kept {
        link_attention,
        attention: cpu_attention,
        link_products,
        products: cpu_products,
        device: device_reads,
    } = kept;
    f("device.kept.link_attention", link_attention, Unit::Part);
    f("device.kept.attention", cpu_attention, Unit::Part);
    f("device.kept.link_products", link_products, Unit::Part);
    f("device.kept.products", cpu_products, Unit::Part);
    f("device.kept.device", device_reads, Unit::Part);
    for product in products {
        let DeviceProduct {
            format,
            decode_gb_s,
            prefill_gmac_s,
        } = product;
        let path = |field: &str| format!("device.products[{format}].{field}");
        f(&path("decode_gb_s"), decode_gb_s, Unit::GbS);
        f(&path("prefill_gmac_s"), prefill_gmac_s, Unit::GmacS);
    }
    visit_attention("device", attention, f);
    f("device.t_sync_us", t_sync_us, Unit::Us);
    f("device.launch_us", launch_us, Unit::Us);
    f("device.token_us", token_us, Unit::Us);
}
