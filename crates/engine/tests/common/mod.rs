//! What tests on real models share.

use std::path::PathBuf;

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
