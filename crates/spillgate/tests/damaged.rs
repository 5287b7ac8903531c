//! Damaged model files: each is a clear error, never a panic.

mod common;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use common::{smollm2, spillgate, stderr};
use gguf::{GgufFile, MapMode};
use tempfile::TempDir;

/// The header of a real model. With zeros where its weights would be it is a model that runs, so that what a case
/// changes is the only thing wrong with it.
struct Base {
    header: Vec<u8>,
    file_bytes: u64,
    dir: TempDir,
}

impl Base {
    fn new(model: &Path) -> Self {
        let file = GgufFile::open(model, MapMode::Read).expect("the model is good");
        let header_bytes = file
            .tensors()
            .iter()
            .map(|t| t.offset)
            .min()
            .expect("it has tensors");
        let mut header = vec![0; header_bytes as usize];
        File::open(model)
            .and_then(|mut f| f.read_exact(&mut header))
            .expect("it can be read");
        Self {
            header,
            file_bytes: file.file_bytes(),
            dir: TempDir::new().expect("a folder"),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file with this header and this size; what the header does not fill is zeros that take no space.
    fn write(&self, name: &str, header: &[u8], bytes: u64) -> PathBuf {
        let path = self.path(name);
        let mut file = File::create(&path).expect("a file");
        file.write_all(&header[..header.len().min(bytes as usize)])
            .expect("it can be written");
        file.set_len(bytes).expect("it can be sized");
        path
    }

    /// The header with bytes replaced.
    fn with(&self, at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut header = self.header.clone();
        header[at..at + bytes.len()].copy_from_slice(bytes);
        header
    }

    /// Where the bytes after this text begin.
    fn after(&self, text: &str) -> usize {
        let at = self
            .header
            .windows(text.len())
            .rposition(|w| w == text.as_bytes())
            .expect("it is there");
        at + text.len()
    }
}

#[test]
fn damaged_files_are_clear_errors() {
    let Some(model) = smollm2("damaged_files_are_clear_errors") else {
        return;
    };
    let base = Base::new(&model);
    let whole = base.file_bytes;

    // Without damage it runs.
    let sound = base.write("sound.gguf", &base.header, whole);
    let output = run(&sound);
    assert!(output.status.success(), "{}", stderr(&output));

    let mut cases: Vec<(String, PathBuf)> = Vec::new();
    let header_bytes = base.header.len() as u64;
    let places = [
        0,
        1,
        3,
        4,
        7,
        8,
        15,
        16,
        20,
        24,
        31,
        100,
        5_000,
        700_000,
        header_bytes - 100,
    ];
    for bytes in places
        .into_iter()
        .chain([header_bytes, header_bytes + 1, whole / 2, whole - 1])
    {
        let name = format!("cut-at-{bytes}.gguf");
        cases.push((name.clone(), base.write(&name, &base.header, bytes)));
    }
    // In the description of a tensor the name is followed by rank, dimensions (width, vocabulary), type and offset.
    let embedding = base.after("token_embd.weight");
    let dims = embedding + 4;
    let changes: &[(&str, usize, &[u8])] = &[
        ("magic", 0, b"GGML"),
        ("version-0", 4, &0u32.to_le_bytes()),
        ("version-1", 4, &1u32.to_le_bytes()),
        ("version-99", 4, &99u32.to_le_bytes()),
        ("big-endian", 4, &3u32.to_be_bytes()),
        ("no-tensors", 8, &0u64.to_le_bytes()),
        ("a-tensor-too-many", 8, &273u64.to_le_bytes()),
        ("absurd-tensor-count", 8, &u64::MAX.to_le_bytes()),
        ("large-tensor-count", 8, &(1u64 << 40).to_le_bytes()),
        ("absurd-key-count", 16, &u64::MAX.to_le_bytes()),
        ("large-key-count", 16, &(1u64 << 32).to_le_bytes()),
        ("absurd-key-length", 24, &u64::MAX.to_le_bytes()),
        ("rank-0", embedding, &0u32.to_le_bytes()),
        ("rank-5", embedding, &5u32.to_le_bytes()),
        ("zero-width", dims, &0u64.to_le_bytes()),
        ("zero-vocabulary", dims + 8, &0u64.to_le_bytes()),
        ("absurd-width", dims, &u64::MAX.to_le_bytes()),
        ("odd-width", dims, &577u64.to_le_bytes()),
        ("other-width", dims, &608u64.to_le_bytes()),
        ("smaller-vocabulary", dims + 8, &49_151u64.to_le_bytes()),
        ("unknown-type", dims + 16, &999u32.to_le_bytes()),
        ("other-type", dims + 16, &24u32.to_le_bytes()),
        ("absurd-offset", dims + 20, &(u64::MAX - 31).to_le_bytes()),
        ("unaligned-offset", dims + 20, &1u64.to_le_bytes()),
        ("missing-tensor", embedding - 1, b"x"),
        (
            "other-architecture",
            base.after("general.architecture") + 12,
            b"mamba",
        ),
        (
            "wrong-key-type",
            base.after("llama.block_count"),
            &6u32.to_le_bytes(),
        ),
        (
            "no-layers",
            base.after("llama.block_count") + 4,
            &0u32.to_le_bytes(),
        ),
        (
            "too-many-layers",
            base.after("llama.block_count") + 4,
            &31u32.to_le_bytes(),
        ),
        (
            "no-heads",
            base.after("llama.attention.head_count_kv") + 4,
            &0u32.to_le_bytes(),
        ),
        (
            "absurd-token-count",
            base.after("tokenizer.ggml.tokens") + 8,
            &u64::MAX.to_le_bytes(),
        ),
    ];
    for (name, at, bytes) in changes {
        cases.push((
            (*name).to_owned(),
            base.write(&format!("{name}.gguf"), &base.with(*at, bytes), whole),
        ));
    }
    // A part that says that there are two, alone; and two that are the same one.
    cases.push(("part-alone".to_owned(), split_parts(&base, "alone", false)));
    cases.push(("part-twice".to_owned(), split_parts(&base, "twice", true)));
    cases.push(("folder".to_owned(), base.dir.path().to_path_buf()));

    assert!(cases.len() >= 50, "{}", cases.len());
    for (name, path) in &cases {
        let output = run(path);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{name}: {text}");
        assert!(
            text.contains("error: ") && !text.contains("panicked"),
            "{name}: {text}"
        );
        assert!(output.stdout.is_empty(), "{name}");
    }
}

fn run(path: &Path) -> std::process::Output {
    spillgate(&[
        "run",
        path.to_str().expect("UTF-8"),
        "--raw",
        "hello",
        "-n",
        "1",
        "--ctx",
        "16",
    ])
}

/// The first part of a small model in two, beside a copy of itself in the second's place or beside nothing.
fn split_parts(base: &Base, stem: &str, twice: bool) -> PathBuf {
    let bytes = vec![0u8; 4096];
    let mut writer = gguf::write::Writer::new(32).expect("32 is an alignment");
    writer
        .set("general.architecture", "llama")
        .expect("a good key");
    for name in ["a", "b"] {
        writer
            .tensor(name, gguf::TensorType::F32, &[1024], &bytes)
            .expect("a good tensor");
    }
    let parts = writer
        .write_split(&base.path(&format!("{stem}.gguf")), 5000)
        .expect("two parts");
    assert_eq!(parts.len(), 2);
    if twice {
        fs::copy(&parts[0], &parts[1]).expect("a copy");
    } else {
        fs::remove_file(&parts[1]).expect("it was there");
    }
    parts[0].clone()
}
