//! `info`: what a model file is, and what of it would not run.

use std::collections::BTreeMap;

use anyhow::Result;
use clap::Args;
use engine::model::Model;
use engine::tokenizer::{Tokenizer, TokenizerError};
use gguf::{Array, GgufFile, Metadata, TensorInfo, Value};
use serde::Serialize;
use serde_json::json;

use crate::cli::Common;
use crate::output::{human_bytes, print, print_json, table};
use crate::settings;

/// Characters of a metadata value that '--metadata' shows without '--json'.
const VALUE_CHARS_SHOWN: usize = 100;

/// Says what a model file is, and what of it would not run
///
/// Only the headers are read, so that files of any size are described at once.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate info smollm2
  spillgate info model-00001-of-00003.gguf --tensors
  spillgate info model.gguf --json --metadata")]
pub struct InfoArgs {
    /// Path of a GGUF file, a known name, or hf:OWNER/REPO/FILE.gguf
    model: String,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// List every metadata key (long values are cut, except with --json)
    #[arg(long)]
    metadata: bool,
}

#[derive(Serialize)]
struct Info {
    files: Vec<FileInfo>,
    gguf_version: u32,
    architecture: Option<String>,
    name: Option<String>,
    file_bytes: u64,
    parameters: u64,
    weight_bytes: u64,
    shape: BTreeMap<&'static str, u64>,
    tensor_types: Vec<TypeInfo>,
    tokenizer: Option<TokenizerInfo>,
    chat_template_bytes: Option<usize>,
    unsupported: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<Vec<serde_json::Value>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<serde_json::Map<String, serde_json::Value>>,
}

#[derive(Serialize)]
struct FileInfo {
    path: String,
    bytes: u64,
}

#[derive(Serialize)]
struct TypeInfo {
    #[serde(rename = "type")]
    ty: String,
    tensors: usize,
    parameters: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct TokenizerInfo {
    model: String,
    pre: Option<String>,
    tokens: usize,
    bos: Option<u32>,
    eos: Option<u32>,
    ends: Vec<u32>,
    adds_bos: bool,
    warnings: Vec<String>,
}

/// Numbers of the model's shape: a label, and the key after the architecture's name.
const SHAPE: &[(&str, &str)] = &[
    ("layers", "block_count"),
    ("width", "embedding_length"),
    ("heads", "attention.head_count"),
    ("kv_heads", "attention.head_count_kv"),
    ("head_size", "attention.key_length"),
    ("ff_width", "feed_forward_length"),
    ("experts", "expert_count"),
    ("experts_used", "expert_used_count"),
    ("window", "attention.sliding_window"),
    ("trained_ctx", "context_length"),
];

pub fn run(args: &InfoArgs, common: &Common) -> Result<()> {
    let file = super::open_header(&args.model)?;
    let info = collect(&file, args);
    if common.json {
        print_json(&info)
    } else {
        print(&text(&info, &file, args))
    }
}

fn collect(file: &GgufFile, args: &InfoArgs) -> Info {
    let metadata = file.metadata();
    let string = |key: &str| metadata.str(key).ok().flatten().map(str::to_owned);
    let architecture = string("general.architecture");
    let tokenizer = Tokenizer::from_gguf(metadata);
    Info {
        files: file
            .parts()
            .map(|(path, bytes)| FileInfo {
                path: path.display().to_string(),
                bytes,
            })
            .collect(),
        gguf_version: file.version(),
        name: string("general.name"),
        file_bytes: file.file_bytes(),
        parameters: file.tensors().iter().map(TensorInfo::n_elements).sum(),
        weight_bytes: file.tensors().iter().map(TensorInfo::n_bytes).sum(),
        shape: shape(metadata, architecture.as_deref()),
        architecture,
        tensor_types: types(file.tensors()),
        unsupported: unsupported(file, &tokenizer),
        tokenizer: tokenizer.ok().map(|t| describe(&t, metadata)),
        chat_template_bytes: string("tokenizer.chat_template").map(|t| t.len()),
        tensors: args
            .tensors
            .then(|| file.tensors().iter().map(tensor_json).collect()),
        metadata: args.metadata.then(|| {
            metadata
                .iter()
                .map(|(key, value)| (key.to_owned(), value_json(value)))
                .collect()
        }),
    }
}

/// What of a file would not run, and why.
pub fn unsupported(file: &GgufFile, tokenizer: &Result<Tokenizer, TokenizerError>) -> Vec<String> {
    let mut unsupported = Vec::new();
    if let Err(error) = file.check_data() {
        unsupported.push(error.to_string());
    }
    let config = Model::read_config(file);
    if let Err(error) = &config {
        unsupported.push(error.to_string());
    }
    for TypeInfo { ty, tensors, .. } in types(file.tensors()) {
        if !quant::formats::supported().iter().any(|t| t.name() == ty) {
            unsupported.push(format!("{tensors} tensors of type {ty}"));
        }
    }
    match tokenizer {
        Ok(tokenizer) => {
            if let Ok(config) = &config
                && let Err(error) = settings::check_vocabulary(config, tokenizer)
            {
                unsupported.push(error.to_string());
            }
        }
        Err(error) => unsupported.push(format!("tokenizer: {error}")),
    }
    unsupported
}

fn shape(metadata: &Metadata, architecture: Option<&str>) -> BTreeMap<&'static str, u64> {
    let value = |key: &str| {
        let value = metadata.get(&format!("{}.{key}", architecture?))?;
        // Some architectures have a number a layer here; the largest says most.
        let largest = || {
            metadata
                .ints(&format!("{}.{key}", architecture?))
                .ok()??
                .into_iter()
                .max()
        };
        let number = value.as_integer().or_else(|| largest().map(i128::from))?;
        u64::try_from(number).ok()
    };
    SHAPE
        .iter()
        .filter_map(|&(label, key)| Some((label, value(key)?)))
        .collect()
}

fn types(tensors: &[TensorInfo]) -> Vec<TypeInfo> {
    let mut types: Vec<TypeInfo> = Vec::new();
    for tensor in tensors {
        let at = types
            .iter()
            .position(|t| t.ty == tensor.ty.name())
            .unwrap_or_else(|| {
                types.push(TypeInfo {
                    ty: tensor.ty.name().to_owned(),
                    tensors: 0,
                    parameters: 0,
                    bytes: 0,
                });
                types.len() - 1
            });
        types[at].tensors += 1;
        types[at].parameters += tensor.n_elements();
        types[at].bytes += tensor.n_bytes();
    }
    types.sort_by_key(|t| std::cmp::Reverse(t.bytes));
    types
}

fn describe(tokenizer: &Tokenizer, metadata: &Metadata) -> TokenizerInfo {
    let string = |key: &str| metadata.str(key).ok().flatten().map(str::to_owned);
    TokenizerInfo {
        model: string("tokenizer.ggml.model").unwrap_or_default(),
        pre: string("tokenizer.ggml.pre"),
        tokens: tokenizer.n_vocab(),
        bos: tokenizer.bos(),
        eos: tokenizer.eos(),
        ends: tokenizer.eog().to_vec(),
        adds_bos: tokenizer.adds_bos(),
        warnings: tokenizer.warnings().to_vec(),
    }
}

fn tensor_json(tensor: &TensorInfo) -> serde_json::Value {
    json!({
        "name": tensor.name,
        "type": tensor.ty.name(),
        "dims": tensor.dims.as_slice(),
        "part": tensor.part,
        "offset": tensor.offset,
        "bytes": tensor.n_bytes(),
    })
}

fn value_json(value: &Value) -> serde_json::Value {
    match value {
        Value::F32(x) => json!(x),
        Value::F64(x) => json!(x),
        Value::Bool(b) => json!(b),
        Value::String(s) => json!(String::from_utf8_lossy(s.as_bytes())),
        Value::Array(array) => array_json(array),
        integer => match integer.as_integer().map(i64::try_from) {
            Some(Ok(n)) => json!(n),
            _ => json!(integer.as_integer().map(|n| n as u64)),
        },
    }
}

fn array_json(array: &Array) -> serde_json::Value {
    match array {
        Array::U8(v) => json!(v),
        Array::I8(v) => json!(v),
        Array::U16(v) => json!(v),
        Array::I16(v) => json!(v),
        Array::U32(v) => json!(v),
        Array::I32(v) => json!(v),
        Array::U64(v) => json!(v),
        Array::I64(v) => json!(v),
        Array::F32(v) => json!(v),
        Array::F64(v) => json!(v),
        Array::Bool(v) => json!(v),
        Array::String(v) => v
            .iter()
            .map(|s| json!(String::from_utf8_lossy(s)))
            .collect(),
        Array::Array(v) => v.iter().map(array_json).collect(),
    }
}

fn text(info: &Info, file: &GgufFile, args: &InfoArgs) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut row = |label: &str, value: String| rows.push(vec![label.to_owned(), value]);
    for part in &info.files {
        row(
            "file",
            format!("{} ({})", part.path, human_bytes(part.bytes)),
        );
    }
    row("format", format!("GGUF version {}", info.gguf_version));
    row(
        "architecture",
        info.architecture
            .clone()
            .unwrap_or_else(|| "(none)".to_owned()),
    );
    if let Some(name) = &info.name {
        row("name", name.clone());
    }
    row(
        "parameters",
        format!("{:.1} million", info.parameters as f64 / 1e6),
    );
    let bits = info.weight_bytes as f64 * 8.0 / info.parameters.max(1) as f64;
    row(
        "weights",
        format!("{}, {bits:.2} bits each", human_bytes(info.weight_bytes)),
    );
    for (label, _) in SHAPE {
        if let Some(value) = info.shape.get(label) {
            row(&label.replace('_', " "), value.to_string());
        }
    }
    if let Some(t) = &info.tokenizer {
        let pre = t
            .pre
            .as_ref()
            .map(|p| format!(", pre-tokenizer {p}"))
            .unwrap_or_default();
        row(
            "tokenizer",
            format!("{}{pre}, {} tokens", t.model, t.tokens),
        );
        let ends: Vec<String> = t.ends.iter().map(u32::to_string).collect();
        let bos = t.bos.map_or("none".to_owned(), |b| b.to_string());
        row(
            "special tokens",
            format!(
                "begin {bos}{}, end {}",
                if t.adds_bos { " (added)" } else { "" },
                ends.join(" ")
            ),
        );
        for warning in &t.warnings {
            row("note", warning.clone());
        }
    }
    row(
        "chat template",
        info.chat_template_bytes
            .map_or("none".to_owned(), |n| format!("{n} bytes")),
    );
    if info.unsupported.is_empty() {
        row("unsupported", "nothing".to_owned());
    }
    for what in &info.unsupported {
        row("unsupported", what.clone());
    }
    let mut out = table(&rows, &[]);

    let mut rows = vec![
        ["TYPE", "TENSORS", "PARAMETERS", "BYTES"]
            .map(str::to_owned)
            .to_vec(),
    ];
    rows.extend(info.tensor_types.iter().map(|t| {
        vec![
            t.ty.clone(),
            t.tensors.to_string(),
            t.parameters.to_string(),
            t.bytes.to_string(),
        ]
    }));
    out.push('\n');
    out += &table(&rows, &[1, 2, 3]);

    if args.tensors {
        let mut rows = vec![
            ["TENSOR", "TYPE", "DIMENSIONS", "BYTES"]
                .map(str::to_owned)
                .to_vec(),
        ];
        rows.extend(file.tensors().iter().map(|t| {
            let dims: Vec<String> = t.dims.as_slice().iter().map(u64::to_string).collect();
            vec![
                t.name.clone(),
                t.ty.name().to_owned(),
                dims.join(" x "),
                t.n_bytes().to_string(),
            ]
        }));
        out.push('\n');
        out += &table(&rows, &[3]);
    }
    if args.metadata {
        let mut rows = vec![["KEY", "TYPE", "VALUE"].map(str::to_owned).to_vec()];
        rows.extend(
            file.metadata()
                .iter()
                .map(|(k, v)| vec![k.to_owned(), v.type_name(), shown(v)]),
        );
        out.push('\n');
        out += &table(&rows, &[]);
    }
    out
}

/// A value in a line: control characters escaped, long ones cut.
fn shown(value: &Value) -> String {
    let whole = match value {
        Value::Array(array) => format!("{} items", array.len()),
        Value::String(s) => String::from_utf8_lossy(s.as_bytes())
            .escape_debug()
            .to_string(),
        other => value_json(other).to_string(),
    };
    match whole.char_indices().nth(VALUE_CHARS_SHOWN) {
        Some((cut, _)) => format!("{}...", &whole[..cut]),
        None => whole,
    }
}
