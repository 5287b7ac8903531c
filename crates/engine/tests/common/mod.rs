//! What tests on real models share.
#![allow(dead_code, reason = "each test program uses a part")]

use std::io::Write;
use std::path::{Path, PathBuf};

use engine::eval::{Position, read_positions};
use engine::gpu::Gpu;
use engine::model::ComputeDevice;
use gguf::{GgufFile, MapMode};

/// The path of a known model, fetched into the cache first where it is missing.
pub fn model_path(name: &str) -> PathBuf {
    engine::fetch::cached_or_pull(name, &mut ()).unwrap_or_else(|e| panic!("the model {name}: {e}"))
}

/// A known model's file, opened.
pub fn model(name: &str) -> GgufFile {
    let path = model_path(name);
    GgufFile::open(&path, MapMode::Mmap).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Stored logits of a model (`data/reference/MODEL.logits.jsonl`).
pub fn reference(model: &str) -> Vec<Position> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/reference")
        .join(format!("{model}.logits.jsonl"));
    read_positions(&path).unwrap_or_else(|e| panic!("{e}"))
}

/// The GPU; `None`, with a word, where there is none.
pub fn gpu(test: &str) -> Option<ComputeDevice> {
    match Gpu::first() {
        Ok(Some(gpu)) => Some(ComputeDevice::Cuda(gpu.ordinal())),
        Ok(None) => {
            skipped(test, "there is no GPU");
            None
        }
        Err(error) => panic!("a GPU that cannot be used: {error}"),
    }
}

/// Says that a test, or a part of it, cannot run here.
pub fn skipped(test: &str, why: &str) {
    // Not eprintln!, which the harness swallows where a test passes.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
}
