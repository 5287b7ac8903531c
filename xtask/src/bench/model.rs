//! What a model makes an engine read for each token.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use engine::model::Model;
use gguf::{GgufFile, MapMode, TensorInfo};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::case::{Case, Work};

/// Bytes of a value in the cache that floors assume: f16, the default of every engine here.
const CACHE_VALUE_BYTES: u64 = 2;

/// A model file.
#[derive(Debug, Clone, Serialize)]
pub struct ModelFile {
    pub name: String,
    pub path: PathBuf,
    pub sha256: String,
    /// Bytes of all tensors.
    pub weight_bytes: u64,
    /// Bytes of what each token reads of them.
    pub token_bytes: u64,
    /// Bytes of a cell of a layer's cache.
    pub cell_bytes: u64,
    /// Cells that each layer sees at most.
    pub windows: Vec<Option<usize>>,
}

impl ModelFile {
    /// Reads the header, and everything once for the digest (so that all engines find it in the page cache).
    pub fn open(path: &Path) -> Result<Self> {
        let context = || format!("cannot use {}", path.display());
        let file = GgufFile::open(path, MapMode::Mmap).with_context(context)?;
        let c = Model::read_config(&file).with_context(context)?;
        ensure!(
            file.parts().len() == 1,
            "{} is split: a digest of one part would not name it",
            path.display()
        );
        let name = path.file_stem().unwrap_or(path.as_os_str());
        Ok(Self {
            name: name.to_string_lossy().into_owned(),
            path: path.to_owned(),
            sha256: sha256(path).with_context(context)?,
            weight_bytes: file.tensors().iter().map(TensorInfo::n_bytes).sum(),
            token_bytes: token_bytes(file.tensors()),
            cell_bytes: (c.heads_kv * (c.head_k + c.head_v)) as u64 * CACHE_VALUE_BYTES,
            windows: (0..c.n_layer).map(|i| c.window_of(i)).collect(),
        })
    }

    /// Bytes that a generated token of this case reads on average; `None` for prompts, which are not bound by it.
    pub fn case_bytes(&self, case: Case) -> Option<u64> {
        match case.work {
            Work::Prompt(_) => None,
            Work::Generate(n) => Some(self.token_bytes + self.cache_bytes(case.depth + n / 2)),
        }
    }

    /// Bytes of the cells that a token at this position sees.
    fn cache_bytes(&self, position: usize) -> u64 {
        let seen = |window: &Option<usize>| window.map_or(position, |w| w.min(position)) as u64;
        self.windows.iter().map(seen).sum::<u64>() * self.cell_bytes
    }
}

/// All weights, but of an embedding that is not the output matrix too only one row.
fn token_bytes(tensors: &[TensorInfo]) -> u64 {
    let untied = tensors.iter().any(|t| t.name == "output.weight");
    let bytes = |t: &TensorInfo| match t.name.as_str() {
        "token_embd.weight" if untied => t.row_bytes(),
        _ => t.n_bytes(),
    };
    tensors.iter().map(bytes).sum()
}

fn sha256(path: &Path) -> Result<String> {
    let mut hasher = Sha256::new();
    io::copy(&mut File::open(path)?, &mut Hash(&mut hasher))?;
    let digest = hasher.finalize();
    Ok(digest.iter().map(|byte| format!("{byte:02x}")).collect())
}

struct Hash<'a>(&'a mut Sha256);

impl io::Write for Hash<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gguf::TensorType;

    fn tensor(name: &str) -> TensorInfo {
        TensorInfo::new(name, TensorType::F32, &[8, 10]).unwrap()
    }

    #[test]
    fn an_embedding_is_read_whole_only_as_output() {
        let tied = [tensor("token_embd.weight"), tensor("blk.0.ffn_up.weight")];
        assert_eq!(token_bytes(&tied), 2 * 320);
        let [a, b] = tied;
        assert_eq!(token_bytes(&[a, b, tensor("output.weight")]), 2 * 320 + 32);
    }

    #[test]
    fn windows_bound_what_is_read_of_the_cache() {
        let file = ModelFile {
            name: String::new(),
            path: PathBuf::new(),
            sha256: String::new(),
            weight_bytes: 0,
            token_bytes: 1_000_000,
            cell_bytes: 10,
            windows: vec![Some(512), None],
        };
        let bytes = |case: &str| file.case_bytes(case.parse().unwrap());
        assert_eq!(bytes("tg128"), Some(1_000_000 + 2 * 64 * 10));
        assert_eq!(bytes("tg32@d4096"), Some(1_000_000 + (512 + 4112) * 10));
        assert_eq!(bytes("pp512"), None);
    }
}
