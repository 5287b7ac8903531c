//! Shapes of known models: what their files say before the tensor data.

use super::SynthError;
use crate::tokenizer::alphabet;
use flate2::read::GzDecoder;
use gguf::write::Writer;
use gguf::{GgufFile, Header, MapMode, Metadata, TensorInfo, TensorType};
use quant::formats;
use std::io::Read;
use std::path::Path;

/// Words that are made for a shape without a vocabulary, at most: more than any model has.
const VOCABULARY_MAX: u64 = 1 << 20;

/// A name and the bytes of its header, packed.
macro_rules! shape {
    ($name:literal, $file:literal) => {
        (
            $name,
            include_bytes!(concat!("../../data/shapes/", $file, ".gguf.gz")).as_slice(),
        )
    };
}

/// Headers as `crates/engine/data/shapes/README.md` describes them, by the names that they are asked for with.
static KNOWN: [(&str, &[u8]); 10] = [
    shape!("llama-3.1-8b", "llama-3.1-8b.Q4_K_M"),
    shape!("llama-3.1-70b", "llama-3.1-70b.Q4_K_M"),
    shape!("qwen2.5-1.5b", "qwen2.5-1.5b.Q4_K_M"),
    shape!("qwen2.5-14b", "qwen2.5-14b-instruct-1m.Q8_0"),
    shape!("qwen3-8b", "qwen3-8b.Q4_K_M"),
    shape!("qwen3-30b-a3b", "qwen3-30b-a3b.Q4_K_M"),
    shape!("gemma-3-27b", "gemma-3-27b.Q4_0"),
    shape!("gpt-oss-20b", "gpt-oss-20b.MXFP4"),
    shape!("mixtral-8x7b", "mixtral-8x7b.Q4_0"),
    shape!("olmoe-1b-7b", "olmoe-1b-7b.Q8_0"),
];

/// Bytes that a packed header may unpack to: the largest known has 72 KiB.
const HEADER_BYTES_MAX: u64 = 1 << 20;

/// Names and shapes of a model's tensors, and its hyper-parameters.
#[derive(Debug, Clone)]
pub struct Shape {
    name: String,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
}

impl Shape {
    /// Names of the known ones.
    pub fn known() -> Vec<&'static str> {
        KNOWN.iter().map(|(name, _)| *name).collect()
    }

    /// Finds a shape by `NAME` or `NAME:TYPE`, where NAME is that of a known one or the path of a GGUF file, with or without tensor data,
    /// and TYPE is that of all quantised matrices whose rows it divides.
    ///
    /// # Errors
    /// If there is none, or no such type.
    pub fn find(name: &str) -> Result<Self, SynthError> {
        if let Some(shape) = Self::named(name)? {
            return Ok(shape);
        }
        let unknown = || SynthError::Unknown {
            name: name.to_owned(),
            known: Self::known(),
        };
        let (first, ty) = name.rsplit_once(':').ok_or_else(unknown)?;
        let shape = Self::named(first)?.ok_or_else(unknown)?;
        shape.with_type(ty)
    }

    fn named(name: &str) -> Result<Option<Self>, SynthError> {
        if let Some((_, packed)) = KNOWN.iter().find(|(known, _)| *known == name) {
            let mut bytes = Vec::new();
            let unpacked = GzDecoder::new(*packed)
                .take(HEADER_BYTES_MAX)
                .read_to_end(&mut bytes);
            unpacked.expect("headers are packed as they were tested");
            let header = Header::parse(&bytes)?;
            return Ok(Some(Self {
                name: name.to_owned(),
                metadata: header.metadata,
                tensors: header.tensors,
            }));
        }
        let path = Path::new(name);
        if !path.is_file() {
            return Ok(None);
        }
        let file = GgufFile::open(path, MapMode::Read)?;
        let stem = path.file_stem().unwrap_or_default();
        Ok(Some(Self {
            name: stem.to_string_lossy().into_owned(),
            metadata: file.metadata().clone(),
            tensors: file.tensors().to_vec(),
        }))
    }

    /// The same with all quantised matrices of another type, but for those whose rows are not whole blocks of it.
    ///
    /// # Errors
    /// If there is no such type, or it cannot be made.
    pub fn with_type(self, ty: &str) -> Result<Self, SynthError> {
        let unknown = || SynthError::ty(ty);
        let ty = TensorType::from_name(ty).ok_or_else(unknown)?;
        formats::class(ty).ok_or_else(unknown)?;
        let Self {
            name,
            metadata,
            tensors,
        } = self;
        let retyped = tensors.into_iter().map(|t| {
            let is_quantised = t.ty.block_len() > 1;
            if is_quantised && t.row_len().is_multiple_of(ty.block_len() as u64) {
                TensorInfo::new(&t.name, ty, t.dims.as_slice())
            } else {
                Ok(t)
            }
        });
        let tensors = retyped.collect::<Result<_, _>>()?;
        Ok(Self {
            name: format!("{name}:{}", ty.name().to_lowercase()),
            // What the key says of the types no longer holds.
            metadata: without(metadata, "general.file_type"),
            tensors,
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The bytes of its file before the tensor data, and what they say. A shape without a vocabulary gets one of single bytes,
    /// and of as many unused words as its embedding has room for.
    ///
    /// # Errors
    /// If it is one that no file can have.
    pub fn header(&self) -> Result<(Vec<u8>, Header), SynthError> {
        let mut writer = Writer::new(gguf::limits::ALIGNMENT_DEFAULT)?;
        writer.set_all(&self.metadata);
        if self.metadata.get("tokenizer.ggml.tokens").is_none() {
            let bytes = (0..=u8::MAX).map(|byte| alphabet::encode(byte).to_string());
            let embedding = self.tensors.iter().find(|t| t.name == "token_embd.weight");
            let rows = embedding.and_then(|t| t.dims.as_slice().get(1).copied());
            // Some other engines want a word for every row.
            let words = (bytes.len() as u64..rows.unwrap_or(0).min(VOCABULARY_MAX))
                .map(|word| format!("[unused{word}]"));
            let tokens = bytes.chain(words);
            writer.set("tokenizer.ggml.model", "gpt2")?;
            writer.set("tokenizer.ggml.pre", "default")?;
            writer.set(
                "tokenizer.ggml.tokens",
                gguf::StringArray::from_iter(tokens),
            )?;
            writer.set(
                "tokenizer.ggml.merges",
                gguf::StringArray::from_iter([""; 0]),
            )?;
        }
        for tensor in &self.tensors {
            let dims = tensor.dims;
            writer.tensor_from(&tensor.name, tensor.ty, dims.as_slice(), |_| Ok(()))?;
        }
        Ok(writer.header()?)
    }

    /// A model file of which there is a header alone, in memory.
    ///
    /// # Errors
    /// As [`Shape::header`].
    pub fn file(&self) -> Result<GgufFile, SynthError> {
        let (header, _) = self.header()?;
        Ok(GgufFile::from_header(&self.name, &header)?)
    }
}

impl SynthError {
    pub(super) fn ty(name: &str) -> Self {
        let known: Vec<&str> = formats::supported().iter().map(|t| t.name()).collect();
        Self::Type {
            name: name.to_owned(),
            known: known.join(", "),
        }
    }
}

fn without(metadata: Metadata, key: &str) -> Metadata {
    let mut rest = Metadata::new();
    for (name, value) in metadata.iter().filter(|(name, _)| *name != key) {
        rest.set(name, value.clone());
    }
    rest
}
