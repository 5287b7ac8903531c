//! Tests every kernel on the present device, or those of some formats, and measures with `--bench`.
//!
//! `cargo run --release -p cuda --example selftest -- [--device N] [--portable] [--bench] [--only products|experts|others] [FORMAT...]`

use std::process::ExitCode;

use cuda::Device;
use cuda::product::Target;
use cuda::selftest::{self, Failure, Options};
use gguf::TensorType;

mod bench;

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<bool, Failure> {
    let (mut ordinal, mut options, mut measure, mut test, mut formats) =
        (0, Options::default(), false, true, vec![]);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--device" => ordinal = args.next().and_then(|n| n.parse().ok()).unwrap_or(0),
            "--portable" => options.target = Target::Portable,
            "--only" => {
                let part = args.next().unwrap_or_default();
                options.products = part == "products";
                options.experts = part == "experts";
                options.others = part == "others";
            }
            "--bench" => (measure, test) = (true, false),
            name => match TensorType::ALL
                .iter()
                .find(|ty| ty.name().eq_ignore_ascii_case(name))
            {
                Some(ty) => formats.push(*ty),
                None => {
                    eprintln!("error: no format or option {name}");
                    return Ok(false);
                }
            },
        }
    }
    if !formats.is_empty() {
        options.formats = formats;
        options.others = false;
    }
    let device = Device::open(ordinal)?;
    println!("{device:?} {:?}", device.properties());
    if measure {
        bench::run(&device, &options)?;
    }
    if !test {
        return Ok(true);
    }
    println!(
        "{:<16} {:<14} {:>10} {:>10} {:>9}  shapes",
        "kernel", "format", "compared", "differing", "NaN"
    );
    let rows = selftest::run(&device, &options, |row| {
        println!(
            "{:<16} {:<14} {:>10} {:>10} {:>9}  {}",
            row.kernel, row.format, row.compared, row.differing, row.nan, row.shapes
        );
        if let Some(first) = &row.first {
            println!("    first difference: {first}");
        }
    })?;
    let differing: usize = rows.iter().map(|row| row.differing).sum();
    let compared: usize = rows.iter().map(|row| row.compared).sum();
    println!("{compared} numbers compared, {differing} differ");
    Ok(differing == 0)
}
