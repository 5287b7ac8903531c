//! Damaged copies of a real model, without its weights.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use gguf::{GgufFile, MapMode};

use super::{Damaged, Files, after, patched};

/// Damaged files of the size of a real `llama` model, with its header and with zeros, which take no space, for weights.
pub fn of_model(model: &Path, dir: &Path) -> Vec<Damaged> {
    let file = GgufFile::open(model, MapMode::Read).expect("the model is good");
    let first = file.tensors().iter().map(|t| t.offset).min();
    let header_bytes = first.expect("it has tensors");
    let mut header = vec![0; header_bytes as usize];
    File::open(model)
        .and_then(|mut f| f.read_exact(&mut header))
        .expect("it can be read");
    let whole = file.file_bytes();
    let last = file.tensors().iter().max_by_key(|t| t.offset);
    let last = last.expect("it has tensors");
    let end = last.offset + last.n_bytes();
    let n_tensors = file.tensors().len() as u64;
    let n_layer = file.metadata().require_u32("llama.block_count");
    let n_layer = n_layer.expect("a llama model");

    let mut files = Files::new(dir);
    let write = |files: &mut Files<'_>, name: &str, header: &[u8], bytes: u64, says: &[&str]| {
        let name = format!("real-{name}");
        let path = files.dir.join(format!("{name}.gguf"));
        let mut file = File::create(&path).expect("a file");
        let kept = header.len().min(bytes as usize);
        file.write_all(&header[..kept]).expect("it can be written");
        file.set_len(bytes).expect("it can be sized");
        files.add(&name, path, says);
    };
    let tokens = after(&header, "tokenizer.ggml.tokens");
    let merges = after(&header, "tokenizer.ggml.merges");
    let embedding = after(&header, "token_embd.weight");
    let cuts: &[(&str, u64, &[&str])] = &[
        ("cut-in-the-counts", 20, &["byte 16"]),
        (
            "cut-in-the-tokens",
            tokens as u64 + 100_000,
            &["tokenizer.ggml.tokens"],
        ),
        (
            "cut-in-the-merges",
            merges as u64 + 100_000,
            &["tokenizer.ggml.merges"],
        ),
        (
            "cut-in-the-tensors",
            embedding as u64 + 7,
            &["token_embd.weight"],
        ),
        ("cut-after-the-header", header_bytes, &["of 272"]),
        ("cut-in-the-middle", whole / 2, &["of 272"]),
        ("cut-one-byte-short", end - 1, &[&last.name, "1 of 272"]),
    ];
    assert_eq!(n_tensors, 272, "another model than these cases are for");
    for (name, bytes, says) in cuts {
        write(&mut files, name, &header, *bytes, says);
    }
    let layers = after(&header, "llama.block_count") + 4;
    let more_layers = format!("blk.{n_layer}.");
    let last_down = format!("blk.{}.ffn_down.weight", n_layer - 1);
    let down = after(&header, &last_down);
    let (down_type, rows) = (down + 4 + 16, embedding + 4 + 8);
    let patches: &[(&str, usize, &[u8], &[&str])] = &[
        (
            "many-tensors",
            8,
            &(1u64 << 40).to_le_bytes(),
            &["number of tensors"],
        ),
        (
            "one-tensor-more",
            8,
            &273u64.to_le_bytes(),
            &["tensor number 272"],
        ),
        (
            "absurd-keys",
            16,
            &(1u64 << 63).to_le_bytes(),
            &["number of keys"],
        ),
        (
            "many-tokens",
            tokens + 8,
            &(1u64 << 22).to_le_bytes(),
            &["tokenizer.ggml.tokens"],
        ),
        (
            "fewer-rows",
            rows,
            &49_151u64.to_le_bytes(),
            &["tokenizer.ggml.tokens", "49152", "49151"],
        ),
        (
            "layer-missing",
            layers,
            &(n_layer + 1).to_le_bytes(),
            &[&more_layers, "missing"],
        ),
        // The last to be looked at: nothing may have been loaded by then.
        (
            "last-matrix-missing",
            down - 1,
            b"x",
            &[&last_down, "missing"],
        ),
        (
            "last-matrix-unsupported",
            down_type,
            &34u32.to_le_bytes(),
            &[&last_down, "TQ1_0", "Q4_K"],
        ),
    ];
    for (name, at, with, says) in patches {
        write(&mut files, name, &patched(&header, *at, with), whole, says);
    }
    files.list
}
