//! Lists a model's metadata and tensors: `cargo run --release -p gguf --example list -- MODEL.gguf [--no-mmap]`.

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use gguf::{Error, GgufFile, MapMode, Value};

fn main() -> ExitCode {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let n_args = args.len();
    args.retain(|arg| arg != "--no-mmap");
    let mode = if args.len() < n_args {
        MapMode::Read
    } else {
        MapMode::Mmap
    };
    let [path] = &args[..] else {
        eprintln!("usage: list MODEL.gguf [--no-mmap]");
        return ExitCode::from(2);
    };
    match list(Path::new(path), mode) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn list(path: &Path, mode: MapMode) -> Result<(), Error> {
    let start = Instant::now();
    let model = GgufFile::open(path, mode)?;
    let opened_us = start.elapsed().as_micros();
    for (key, value) in model.metadata().iter() {
        match value {
            Value::Array(array) => {
                println!("{key}: {} with {} items", value.type_name(), array.len());
            }
            other => println!("{key}: {other:?}"),
        }
    }
    for tensor in model.tensors() {
        println!(
            "{} {} {}: {} bytes at {} of part {}",
            tensor.name,
            tensor.ty,
            tensor.dims,
            tensor.n_bytes(),
            tensor.offset,
            tensor.part
        );
    }
    eprintln!(
        "version {}, {} bytes in {} files, opened in {opened_us} us",
        model.version(),
        model.file_bytes(),
        model.parts().len()
    );
    model.check_data()
}
