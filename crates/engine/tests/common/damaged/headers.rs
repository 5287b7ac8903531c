//! Files whose header is cut off or breaks the format's rules.

use gguf::Header;

use super::{Files, Sketch, after, data_end, patched};

pub(super) fn add(files: &mut Files<'_>) {
    truncated(files);
    headers(files);
    tensor_infos(files);
}

/// Cut off in every kind of place.
fn truncated(files: &mut Files<'_>) {
    let bytes = Sketch::sound().bytes();
    let header = Header::parse(&bytes).expect("it is sound");
    let data = header.data_start as usize;
    let end = data_end(&bytes);
    let tokens = after(&bytes, "tokenizer.ggml.tokens");
    let embedding = after(&bytes, "token_embd.weight");
    let cuts: &[(&str, usize, &[&str])] = &[
        ("nothing", 0, &["not a GGUF file"]),
        ("in-the-magic", 2, &["not a GGUF file", "GG"]),
        ("after-the-magic", 4, &["byte 4", "header"]),
        ("in-the-version", 6, &["byte 4", "header"]),
        ("in-the-tensor-count", 12, &["byte 8", "header"]),
        ("in-the-key-count", 20, &["byte 16", "header"]),
        ("after-the-counts", 24, &["byte 24", "0 left"]),
        (
            "in-a-key",
            after(&bytes, "tokenizer.ggml.eos_token_id") - 4,
            &["key number"],
        ),
        (
            "in-a-value",
            after(&bytes, "llama.block_count") + 6,
            &["left"],
        ),
        (
            "in-a-list-of-strings",
            tokens + 1000,
            &["tokenizer.ggml.tokens"],
        ),
        (
            "in-a-list-of-numbers",
            after(&bytes, "tokenizer.ggml.token_type") + 100,
            &["tokenizer.ggml.token_type"],
        ),
        (
            "in-the-template",
            after(&bytes, "tokenizer.chat_template") + 40,
            &["tokenizer.chat_template"],
        ),
        ("in-a-tensor's-name", embedding - 4, &["tensor number 0"]),
        ("in-the-rank", embedding + 2, &["token_embd.weight"]),
        (
            "in-the-dimensions",
            embedding + 4 + 11,
            &["token_embd.weight"],
        ),
        (
            "in-the-type",
            embedding + 4 + 16 + 2,
            &["token_embd.weight"],
        ),
        (
            "in-the-offset",
            embedding + 4 + 16 + 4 + 5,
            &["token_embd.weight"],
        ),
        (
            "in-the-padding",
            data - 1,
            &["token_embd.weight", "20 of 20"],
        ),
        ("before-the-data", data, &["token_embd.weight", "20 of 20"]),
        ("in-the-data", data + (end - data) / 2, &["blk.", "of 20"]),
        (
            "one-byte-short",
            end - 1,
            &["output_norm.weight", "1 of 20"],
        ),
    ];
    for (name, len, says) in cuts {
        files.bytes(&format!("cut-{name}"), &bytes[..*len], says);
    }
}

/// Wrong before the tensors.
fn headers(files: &mut Files<'_>) {
    let bytes = Sketch::sound().bytes();
    let tokens = after(&bytes, "tokenizer.ggml.tokens");
    let layers = after(&bytes, "llama.block_count");
    let name = after(&bytes, "general.name");
    let begin = after(&bytes, "tokenizer.ggml.add_bos_token");
    let patches: &[(&str, usize, &[u8], &[&str])] = &[
        ("other-magic", 0, b"GGML", &["not a GGUF file", "GGML"]),
        ("version-0", 4, &0u32.to_le_bytes(), &["version 0"]),
        (
            "version-1",
            4,
            &1u32.to_le_bytes(),
            &["version 1", "convert"],
        ),
        ("version-99", 4, &99u32.to_le_bytes(), &["version 99"]),
        ("big-endian", 4, &3u32.to_be_bytes(), &["big-endian"]),
        (
            "no-tensors",
            8,
            &0u64.to_le_bytes(),
            &["token_embd.weight", "missing"],
        ),
        (
            "one-tensor-more",
            8,
            &21u64.to_le_bytes(),
            &["tensor number 20"],
        ),
        (
            "many-tensors",
            8,
            &(1u64 << 18).to_le_bytes(),
            &["byte", "left"],
        ),
        (
            "absurd-tensors",
            8,
            &u64::MAX.to_le_bytes(),
            &["number of tensors"],
        ),
        (
            "absurd-keys",
            16,
            &u64::MAX.to_le_bytes(),
            &["number of keys"],
        ),
        (
            "absurd-key-length",
            24,
            &u64::MAX.to_le_bytes(),
            &["key number 0", "length"],
        ),
        (
            "empty-key",
            24,
            &0u64.to_le_bytes(),
            &["key number 0", "empty"],
        ),
        ("key-not-utf-8", 32, b"\xFF", &["key number 0", "UTF-8"]),
        (
            "absurd-string-length",
            name + 4,
            &(1u64 << 60).to_le_bytes(),
            &["general.name"],
        ),
        (
            "unknown-value-type",
            layers,
            &13u32.to_le_bytes(),
            &["llama.block_count", "13"],
        ),
        (
            "bad-truth-value",
            begin + 4,
            &[2],
            &["tokenizer.ggml.add_bos_token", "2"],
        ),
        (
            "absurd-list",
            tokens + 8,
            &u64::MAX.to_le_bytes(),
            &["tokenizer.ggml.tokens", "items"],
        ),
        (
            "long-list",
            tokens + 8,
            &(1u64 << 22).to_le_bytes(),
            &["tokenizer.ggml.tokens", "left"],
        ),
        (
            "absurd-token-length",
            tokens + 16,
            &(1u64 << 40).to_le_bytes(),
            &["tokenizer.ggml.tokens"],
        ),
        (
            "list-of-unknown-type",
            tokens + 4,
            &77u32.to_le_bytes(),
            &["tokenizer.ggml.tokens", "77"],
        ),
        (
            "key-twice",
            after(&bytes, "llama.attention.key_length") - 10,
            b"head_count",
            &["llama.attention.head_count", "twice"],
        ),
    ];
    for (name, at, with, says) in patches {
        files.bytes(name, &patched(&bytes, *at, with), says);
    }
    // Lists in lists in lists, as deep as the bytes go.
    let mut nested = bytes[..24].to_vec();
    nested[16..24].copy_from_slice(&1u64.to_le_bytes());
    nested.extend(1u64.to_le_bytes());
    nested.push(b'k');
    nested.extend(9u32.to_le_bytes());
    for _ in 0..100_000 {
        nested.extend(9u32.to_le_bytes());
        nested.extend(1u64.to_le_bytes());
    }
    files.bytes("nested-lists", &nested, &["`k`", "depth"]);
    for (name, alignment) in [
        ("alignment-0", 0u32),
        ("alignment-3", 3),
        ("alignment-huge", 1 << 31),
    ] {
        // The name of another key with a number is as long, or it is made so.
        let key = after(&bytes, "llama.context_length") - "llama.context_length".len();
        let mut changed = bytes.clone();
        let renamed = b"general.alignment";
        let len = renamed.len() as u64;
        changed.splice(
            key - 8..key + "llama.context_length".len(),
            len.to_le_bytes().into_iter().chain(*renamed),
        );
        let at = after(&changed, "general.alignment") + 4;
        files.bytes(
            name,
            &patched(&changed, at, &alignment.to_le_bytes()),
            &["general.alignment", &alignment.to_string()],
        );
    }
}

/// Wrong in what the header says of a tensor.
fn tensor_infos(files: &mut Files<'_>) {
    let bytes = Sketch::sound().bytes();
    // After a name: rank, dimensions (width, rows), type, offset.
    let embedding = after(&bytes, "token_embd.weight");
    let (dims, ty) = (embedding + 4, embedding + 4 + 16);
    let offset = ty + 4;
    let patches: &[(&str, usize, &[u8], &[&str])] = &[
        ("rank-0", embedding, &0u32.to_le_bytes(), &["0 dimensions"]),
        ("rank-5", embedding, &5u32.to_le_bytes(), &["5 dimensions"]),
        (
            "absurd-rank",
            embedding,
            &u32::MAX.to_le_bytes(),
            &["dimensions"],
        ),
        (
            "zero-width",
            dims,
            &0u64.to_le_bytes(),
            &["dimension 0", "zero"],
        ),
        (
            "zero-rows",
            dims + 8,
            &0u64.to_le_bytes(),
            &["dimension 1", "zero"],
        ),
        (
            "absurd-width",
            dims,
            &(!31u64).to_le_bytes(),
            &["dimensions"],
        ),
        (
            "absurd-rows",
            dims + 8,
            &(1u64 << 57).to_le_bytes(),
            &["dimensions", "more than any file"],
        ),
        (
            "many-rows",
            dims + 8,
            &(1u64 << 40).to_le_bytes(),
            &["token_embd.weight"],
        ),
        (
            "part-of-a-block",
            dims,
            &65u64.to_le_bytes(),
            &["65", "Q8_0"],
        ),
        (
            "unknown-type",
            ty,
            &999u32.to_le_bytes(),
            &["999", "unknown"],
        ),
        (
            "retired-type",
            ty,
            &4u32.to_le_bytes(),
            &["Q4_2", "retired"],
        ),
        (
            "unaligned-offset",
            offset,
            &1u64.to_le_bytes(),
            &["offset 1", "multiple of 32"],
        ),
        (
            "absurd-offset",
            offset,
            &(u64::MAX - 31).to_le_bytes(),
            &["beyond any file"],
        ),
        (
            "far-offset",
            offset,
            &(1u64 << 40).to_le_bytes(),
            &["token_embd.weight", "1 of 20"],
        ),
        (
            "overlap",
            offset,
            &32u64.to_le_bytes(),
            &["token_embd.weight", "inside"],
        ),
        (
            "tensor-twice",
            after(&bytes, "blk.1.attn_q.weight") - 8,
            b"v",
            &["blk.1.attn_v.weight", "twice"],
        ),
    ];
    for (name, at, with, says) in patches {
        let mut says = says.to_vec();
        if !says.iter().any(|text| text.contains("weight")) {
            says.push("token_embd.weight");
        }
        files.bytes(name, &patched(&bytes, *at, with), &says);
    }
    let long = "x".repeat(200);
    let at = embedding - "token_embd.weight".len();
    let mut named = bytes.clone();
    named.splice(
        at - 8..embedding,
        200u64.to_le_bytes().into_iter().chain(long.bytes()),
    );
    files.bytes("long-tensor-name", &named, &["tensor number 0", "200"]);
}
