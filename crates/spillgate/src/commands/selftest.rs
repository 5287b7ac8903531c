//! `selftest`: whether this machine's GPU computes what is defined.

use anyhow::Result;
use clap::Args;
use cuda::Device;
use cuda::selftest::{Options, Row, run as test};
use serde::Serialize;

use crate::cli::Common;
use crate::failure::Advised;
use crate::flags::{DeviceName, device};
use crate::output::{print, print_json, table};
use crate::progress::Kernels;

/// Compares every kernel on a GPU with the definition, bit for bit
///
/// Inputs are random and extreme: odd sizes, subnormals, huge scales, NaN and infinities. A row is a kernel and a format. The
/// exit status is 0 only if nothing differs: what differs is a fault of the driver, the GPU or the program, and worth a report.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate selftest
  spillgate selftest --device cuda:1 --json")]
pub struct SelftestArgs {
    /// The GPU that is tested
    #[arg(long, value_name = "cuda[:N]", default_value = "cuda", value_parser = device)]
    device: DeviceName,
}

#[derive(Serialize)]
struct Report {
    device: String,
    rows: Vec<Compared>,
    compared: u64,
    differing: u64,
}

#[derive(Serialize)]
struct Compared {
    kernel: String,
    format: String,
    shapes: String,
    compared: u64,
    differing: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    first: Option<String>,
}

impl Compared {
    fn of(row: &Row) -> Self {
        Self {
            kernel: row.kernel.to_owned(),
            format: row.format.clone(),
            shapes: row.shapes.clone(),
            compared: row.compared as u64,
            differing: row.differing as u64,
            first: row.first.clone(),
        }
    }
}

pub fn run(args: &SelftestArgs, common: &Common) -> Result<()> {
    let ordinal = match args.device {
        DeviceName::Cuda(ordinal) => ordinal,
        DeviceName::Auto => 0,
        DeviceName::Cpu => {
            let what = "--device cpu: the CPU's kernels are compared by the project's tests";
            return Err(Advised::new(what, "leave it out for the first GPU").into());
        }
    };
    let device = Device::open(ordinal)?;
    let mut rows: Vec<Compared> = Vec::new();
    let progress = Kernels::new();
    test(&device, &Options::default(), |row| {
        progress.done(format!("{} {}", row.kernel, row.format));
        tracing::info!("{} {}: {} differ", row.kernel, row.format, row.differing);
        rows.push(Compared::of(row));
    })
    .map_err(anyhow::Error::from_boxed)?;
    drop(progress);
    let report = Report {
        device: device.properties().name.clone(),
        compared: rows.iter().map(|r| r.compared).sum(),
        differing: rows.iter().map(|r| r.differing).sum(),
        rows,
    };
    if common.json {
        print_json(&report)?;
    } else {
        print(&text(&report))?;
    }
    if report.differing > 0 {
        let what = format!("{} of {} results differ", report.differing, report.compared);
        return Err(Advised::new(what, "try another driver; the rows say which kernels").into());
    }
    Ok(())
}

fn text(report: &Report) -> String {
    let mut lines = vec![
        ["KERNEL", "FORMAT", "COMPARED", "DIFFERING", "SHAPES"]
            .map(str::to_owned)
            .to_vec(),
    ];
    lines.extend(report.rows.iter().map(|r| {
        vec![
            r.kernel.clone(),
            r.format.clone(),
            r.compared.to_string(),
            r.differing.to_string(),
            r.shapes.clone(),
        ]
    }));
    let first = report.rows.iter().filter_map(|r| {
        let first = r.first.as_ref()?;
        Some(format!("{} {}: {first}\n", r.kernel, r.format))
    });
    format!(
        "{}\n{}{}{} results compared, {} differ\n",
        report.device,
        table(&lines, &[2, 3]),
        first.collect::<String>(),
        report.compared,
        report.differing
    )
}
