//! `ptx`: compiles `crates/cuda/kernels/*.cu` to compressed PTX beside them. Needs `nvcc`, but no GPU.
//!
//! The toolkit's own PTX version would demand a driver of the same age. The kernels use nothing newer than [`PTX_VERSION`], so that
//! is what their PTX says; the toolkit's assembler is asked whether it agrees.

#[path = "../../crates/cuda/kernels/sources.rs"]
mod sources;

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

/// Compute capabilities compiled for: the oldest supported, and the one with instructions of its own.
const TARGETS: [&str; 2] = ["80", "90a"];

/// Understood by drivers for CUDA 12.0 and newer.
const PTX_VERSION: &str = ".version 8.0";

const FLAGS: [&str; 4] = ["--ptx", "-O3", "-std=c++17", "--fmad=false"];

#[derive(Debug, Args)]
pub struct PtxArgs {
    /// Sources without their `.cu`; all whose PTX is not theirs if none is named
    names: Vec<String>,
    /// The CUDA compiler; `ptxas` is looked for beside it
    #[arg(long, value_name = "PATH", default_value = "nvcc")]
    nvcc: PathBuf,
    /// Folder of the sources
    #[arg(long, value_name = "PATH", default_value = "crates/cuda/kernels")]
    kernels: PathBuf,
}

pub fn run(args: &PtxArgs) -> Result<()> {
    let folder = &args.kernels;
    let all = sources::names(folder).with_context(|| format!("reading {}", folder.display()))?;
    for name in &args.names {
        ensure!(
            all.contains(name),
            "there is no {name}.cu in {}",
            folder.display()
        );
    }
    for name in &all {
        let digest = sources::digest(folder, name)
            .with_context(|| format!("reading the sources of {name}"))?;
        let mark = format!("{}{digest}", sources::MARK);
        let wanted = if args.names.is_empty() {
            TARGETS
                .iter()
                .any(|target| !is_of(&compiled(folder, name, target), &mark))
        } else {
            args.names.contains(name)
        };
        if wanted {
            for target in TARGETS {
                compile(&args.nvcc, folder, name, target, &mark)?;
            }
        }
    }
    write_index(folder, &all)
}

fn compiled(folder: &Path, name: &str, target: &str) -> PathBuf {
    folder
        .join("ptx")
        .join(format!("{name}.sm_{target}.ptx.gz"))
}

fn is_of(path: &Path, mark: &str) -> bool {
    let mut text = String::new();
    let read = File::open(path).map(|file| GzDecoder::new(file).read_to_string(&mut text));
    read.is_ok_and(|read| read.is_ok()) && text.lines().next() == Some(mark)
}

fn compile(nvcc: &Path, folder: &Path, name: &str, target: &str, mark: &str) -> Result<()> {
    let path = compiled(folder, name, target);
    let raw = path.with_extension("raw");
    let output = Command::new(nvcc)
        .args(FLAGS)
        .arg(format!(
            "-gencode=arch=compute_{target},code=compute_{target}"
        ))
        .arg(folder.join(format!("{name}.cu")))
        .arg("-o")
        .arg(&raw)
        .output()
        .with_context(|| format!("starting {}", nvcc.display()))?;
    ensure!(
        output.status.success(),
        "{name} for sm_{target}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text =
        std::fs::read_to_string(&raw).with_context(|| format!("reading {}", raw.display()))?;
    std::fs::remove_file(&raw)?;
    let tidied = format!("{mark}\n{}", tidy(&text)?);
    std::fs::write(&raw, &tidied)?;
    let used = assemble(nvcc, &raw, target)?;
    std::fs::remove_file(&raw)?;
    let mut to = GzEncoder::new(File::create(&path)?, Compression::best());
    to.write_all(tidied.as_bytes())?;
    to.finish()?;
    println!("{name} sm_{target}: {} KB; {used}", text.len() / 1000);
    Ok(())
}

/// The same PTX without comments and indentation, under the version that drivers must understand.
fn tidy(text: &str) -> Result<String> {
    let mut out = String::with_capacity(text.len());
    let mut versions = 0;
    for line in text.lines().map(str::trim) {
        if line.is_empty()
            || line.starts_with("//")
            || line.starts_with(".pragma \"used_bytes_mask")
        {
            continue;
        }
        if line.starts_with(".version ") {
            versions += 1;
            out.push_str(PTX_VERSION);
        } else {
            out.push_str(line);
        }
        out.push('\n');
    }
    if versions != 1 {
        bail!("{versions} lines with a version");
    }
    Ok(out)
}

/// Asks the assembler, and says what it says of registers and spills.
fn assemble(nvcc: &Path, ptx: &Path, target: &str) -> Result<String> {
    let ptxas = nvcc.with_file_name("ptxas");
    let cubin = ptx.with_extension("cubin");
    let output = Command::new(&ptxas)
        .arg("-v")
        .arg(format!("-arch=sm_{target}"))
        .arg(ptx)
        .arg("-o")
        .arg(&cubin)
        .output()
        .with_context(|| format!("starting {}", ptxas.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {said}", ptx.display());
    std::fs::remove_file(&cubin)?;
    let after = |line: &str, mark: &str| line.split(mark).nth(1).map(str::to_owned);
    let (mut used, mut name, mut spilled) = (String::new(), String::new(), String::new());
    for line in said.lines() {
        if let Some(rest) = after(line, "Compiling entry function '") {
            name = rest.split('\'').next().unwrap_or_default().to_owned();
        } else if line.contains("bytes spill stores") && !line.contains(" 0 bytes spill stores") {
            spilled = " SPILLS".into();
        } else if let Some(rest) = after(line, "Used ") {
            let registers = rest.split(' ').next().unwrap_or_default();
            write!(used, "{name} {registers}{spilled}, ")?;
            spilled.clear();
        }
    }
    Ok(used.trim_end_matches(", ").to_owned())
}

/// Lists what is compiled, for `cuda/src/ptx.rs`.
fn write_index(folder: &Path, all: &[String]) -> Result<()> {
    let mut text =
        String::from("// Written by `xtask ptx`.\nstatic ALL: &[Compiled] = compiled! {\n");
    for name in all {
        if TARGETS
            .iter()
            .all(|target| compiled(folder, name, target).exists())
        {
            writeln!(text, "    {name:?}")?;
        }
    }
    text.push_str("};\n");
    std::fs::write(folder.join("ptx/index.rs"), text)?;
    Ok(())
}
