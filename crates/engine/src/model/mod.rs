//! Models: hyper-parameters, weights in memory, and what computes with them.

pub mod arch;
mod config;
mod limits;
pub(crate) mod rope;
mod weights;

pub use config::Config;
pub use rope::{Rope, Scaling};

use crate::error::Error;
use crate::synth::{Generator, Recipe};
use arch::{Arch, Presence};
use cpu::Isa;
use cpu::pool::{Pinning, Pool, default_threads};
use gguf::{GgufFile, MapMode};
use rope::Frequencies;
use sha2::{Digest, Sha256};
use std::path::Path;
use weights::{Loader, Source, Weights};
pub(crate) use weights::{Matrix, OnDevice, Vector};

/// What computes with a model, and so in which memory its weights are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ComputeDevice {
    /// The CPU.
    #[default]
    Cpu,
    /// An NVIDIA GPU, by its number.
    Cuda(usize),
}

impl std::fmt::Display for ComputeDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// What a model's tensors hold.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Contents {
    /// What the file says.
    #[default]
    File,
    /// Random weights in the shapes that the file's header says: what `xtask synth` would write after it.
    Synthetic(Recipe),
}

/// How a model is loaded and computed.
#[derive(Debug, Clone, Default)]
pub struct LoadOptions {
    /// Threads that compute; `None`: the physical cores at hand.
    pub threads: Option<usize>,
    /// Instruction set; `None`: the best.
    pub isa: Option<Isa>,
    /// Whether threads are pinned.
    pub pinning: Pinning,
    /// How the file is read.
    pub map: MapMode,
    /// What computes: sessions on anything else are refused.
    pub device: ComputeDevice,
    /// What tensors hold.
    pub contents: Contents,
}

/// How far loading is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of weights in memory.
    pub done_bytes: u64,
    /// Of these many.
    pub total_bytes: u64,
}

/// A product's weights and what is added to its result.
#[derive(Debug)]
pub(crate) struct Linear {
    pub(crate) w: Matrix,
    pub(crate) bias: Option<Vector>,
}

/// One layer.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) attn_norm: Vector,
    pub(crate) q: Linear,
    pub(crate) k: Linear,
    pub(crate) v: Linear,
    pub(crate) q_norm: Option<Vector>,
    pub(crate) k_norm: Option<Vector>,
    pub(crate) output: Linear,
    pub(crate) post_attn_norm: Option<Vector>,
    pub(crate) ffn_norm: Vector,
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
    pub(crate) post_ffn_norm: Option<Vector>,
}

impl Layer {
    fn linears(&self) -> [&Linear; 7] {
        [
            &self.q,
            &self.k,
            &self.v,
            &self.output,
            &self.gate,
            &self.up,
            &self.down,
        ]
    }

    fn vectors(&self) -> impl Iterator<Item = &Vector> {
        let biases = self.linears().map(|linear| linear.bias.as_ref());
        let norms = [
            Some(&self.attn_norm),
            self.q_norm.as_ref(),
            self.k_norm.as_ref(),
            self.post_attn_norm.as_ref(),
            Some(&self.ffn_norm),
            self.post_ffn_norm.as_ref(),
        ];
        biases.into_iter().chain(norms).flatten()
    }
}

/// A model, ready to compute.
#[derive(Debug)]
pub struct Model {
    config: Config,
    pub(crate) pool: Pool,
    pub(crate) isa: Isa,
    pub(crate) weights: Weights,
    pub(crate) embedding: Matrix,
    pub(crate) layers: Vec<Layer>,
    pub(crate) output_norm: Vector,
    /// `None`: the embedding serves.
    output: Option<Matrix>,
    pub(crate) rope: Frequencies,
    pub(crate) rope_windowed: Frequencies,
    weight_bytes: u64,
    memory_bytes: u64,
    /// Of samples of the weights.
    digest: [u8; 32],
    device: ComputeDevice,
}

impl Model {
    /// Reads a model's hyper-parameters without its weights.
    ///
    /// # Errors
    /// If the file is damaged or its architecture not supported.
    pub fn read_config(file: &GgufFile) -> Result<Config, Error> {
        Ok(read_arch(file)?.1)
    }

    /// Opens a file and loads its weights, permuted, over the pool, to where they will be computed with.
    ///
    /// # Errors
    /// If the file is damaged or unsupported, or memory, a device or threads are refused.
    pub fn load(
        path: &Path,
        options: &LoadOptions,
        progress: &mut (dyn FnMut(LoadProgress) + Send),
    ) -> Result<Self, Error> {
        Self::from_file(&GgufFile::open(path, options.map)?, options, progress)
    }

    /// [`Model::load`] of an open file.
    ///
    /// # Errors
    /// As there.
    pub fn from_file(
        file: &GgufFile,
        options: &LoadOptions,
        progress: &mut (dyn FnMut(LoadProgress) + Send),
    ) -> Result<Self, Error> {
        let (arch, config) = read_arch(file)?;
        let source = match options.contents {
            Contents::File => {
                file.check_data()?;
                Source::File(file)
            }
            Contents::Synthetic(recipe) => {
                Source::Synthetic(file, Generator::new(recipe, file.tensors())?)
            }
        };
        let loader = Loader::new(&source);
        let tensors = Tensors::look(&loader, arch, &config)?;
        let planned = loader.into_planned();
        let pool = Pool::new(
            options.threads.unwrap_or_else(default_threads),
            options.pinning,
        )?;
        let mut tell = |done_bytes, total_bytes| {
            progress(LoadProgress {
                done_bytes,
                total_bytes,
            })
        };
        let vectors = tensors.vectors();
        let loaded = weights::load(&planned, options.device, &pool, vectors, &mut tell)?;
        let factors = tensors.rope_factors.as_deref();
        Ok(Self {
            rope: config.rope.frequencies(factors),
            rope_windowed: config.rope_windowed.frequencies(factors),
            config,
            pool,
            isa: options.isa.unwrap_or_else(Isa::best),
            weights: loaded.weights,
            embedding: tensors.embedding,
            layers: tensors.layers,
            output_norm: tensors.output_norm,
            output: tensors.output,
            weight_bytes: source.tensors().iter().map(gguf::TensorInfo::n_bytes).sum(),
            memory_bytes: loaded.bytes,
            digest: loaded.digest,
            device: options.device,
        })
    }

    /// Hyper-parameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Bytes of all tensors.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Bytes that the weights take in memory.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// What computes, and has the weights.
    pub fn device(&self) -> ComputeDevice {
        self.device
    }

    /// The instruction set that computes.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// A digest of the model's parameters and of samples of its weights: what tells files of cells of one model from those of another.
    pub fn fingerprint(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(format!("{:?}", self.config));
        hash.update(self.digest);
        let norms = self.layers.iter().map(|l| &*l.attn_norm);
        for value in norms.chain([&*self.output_norm]).flatten() {
            hash.update(value.to_le_bytes());
        }
        hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
    }

    pub(crate) fn output(&self) -> &Matrix {
        self.output.as_ref().unwrap_or(&self.embedding)
    }
}

fn read_arch(file: &GgufFile) -> Result<(&'static Arch, Config), Error> {
    let meta = file.metadata();
    let name = meta.require_str("general.architecture")?;
    let embedding = file
        .tensor("token_embd.weight")
        .ok_or_else(|| Error::MissingTensor {
            name: "token_embd.weight".to_owned(),
        });
    let n_vocab = embedding.map(|t| t.ne(1));
    let unsupported = || Error::Architecture {
        file: file
            .parts()
            .next()
            .map(|(path, _)| path.to_owned())
            .unwrap_or_default(),
        found: name.to_owned(),
        supported: arch::supported(),
    };
    if !arch::ALL.iter().any(|a| a.name == name) {
        return Err(unsupported());
    }
    let n_vocab = n_vocab?;
    let n_vocab = u32::try_from(n_vocab).map_err(|_| Error::Parameter {
        key: "tensor token_embd.weight".to_owned(),
        problem: format!("has {n_vocab} rows, more than there can be token ids"),
    })?;
    // A tokenizer may have fewer tokens than the embedding has rows (padding), but each token needs a row.
    if let Some(tokens) = meta.strings("tokenizer.ggml.tokens")?
        && tokens.len() > n_vocab as usize
    {
        return Err(Error::Parameter {
            key: "tokenizer.ggml.tokens".to_owned(),
            problem: format!(
                "lists {} tokens, but tensor token_embd.weight has rows for {n_vocab}",
                tokens.len()
            ),
        });
    }
    arch::read(meta, name, n_vocab as usize).ok_or_else(unsupported)?
}

/// The tensors of a model.
struct Tensors {
    rope_factors: Option<Vector>,
    embedding: Matrix,
    output: Option<Matrix>,
    output_norm: Vector,
    layers: Vec<Layer>,
}

impl Tensors {
    /// Every vector that operations read, in no order.
    fn vectors(&self) -> impl Iterator<Item = &Vector> {
        let of_layers = self.layers.iter().flat_map(Layer::vectors);
        of_layers.chain([&self.output_norm])
    }

    /// Finds and checks all of them. Matrices are yet to be loaded.
    fn look(loader: &Loader<'_>, arch: &Arch, c: &Config) -> Result<Self, Error> {
        let (d, v) = (c.width, c.n_vocab);
        Ok(Self {
            rope_factors: rope_factors(loader, c)?,
            embedding: loader.matrix("token_embd.weight", d, v)?,
            output: if loader.has("output.weight") {
                Some(loader.matrix("output.weight", d, v)?)
            } else {
                None
            },
            output_norm: loader.vector("output_norm.weight", d)?,
            layers: (0..c.n_layer)
                .map(|i| layer(loader, arch, c, i))
                .collect::<Result<_, _>>()?,
        })
    }
}

fn rope_factors(loader: &Loader<'_>, c: &Config) -> Result<Option<Vector>, Error> {
    if !loader.has("rope_freqs.weight") {
        return Ok(None);
    }
    let factors = loader.vector("rope_freqs.weight", c.rope.dims / 2)?;
    if let Some(bad) = factors.iter().find(|f| !f.is_finite() || **f <= 0.0) {
        return Err(Error::Parameter {
            key: "tensor rope_freqs.weight".to_owned(),
            problem: format!("holds {bad}, expected positive factors"),
        });
    }
    Ok(Some(factors))
}

fn layer(loader: &Loader<'_>, arch: &Arch, c: &Config, i: usize) -> Result<Layer, Error> {
    let name = |part: &str| format!("blk.{i}.{part}");
    let has = |presence: Presence, part: &str| match presence {
        Presence::Never => false,
        Presence::Optional => loader.has(&name(part)),
        Presence::Always => true,
    };
    let linear = |part: &str, k: usize, n: usize, bias: Presence| {
        let b = format!("{part}.bias");
        Ok::<_, Error>(Linear {
            w: loader.matrix(&name(&format!("{part}.weight")), k, n)?,
            bias: if has(bias, &b) {
                Some(loader.vector(&name(&b), n)?)
            } else {
                None
            },
        })
    };
    let norm = |part: &str, n: usize| loader.vector(&name(part), n);
    let optional = |presence: Presence, part: &str, n: usize| {
        if has(presence, part) {
            norm(part, n).map(Some)
        } else {
            Ok(None)
        }
    };
    let parts = arch.parts;
    let (heads, kv) = (c.heads, c.heads_kv);
    Ok(Layer {
        attn_norm: norm("attn_norm.weight", c.width)?,
        q: linear("attn_q", c.width, heads * c.head_k, parts.qkv_bias)?,
        k: linear("attn_k", c.width, kv * c.head_k, parts.qkv_bias)?,
        v: linear("attn_v", c.width, kv * c.head_v, parts.qkv_bias)?,
        q_norm: optional(parts.qk_norm, "attn_q_norm.weight", c.head_k)?,
        k_norm: optional(parts.qk_norm, "attn_k_norm.weight", c.head_k)?,
        output: linear("attn_output", heads * c.head_v, c.width, Presence::Optional)?,
        post_attn_norm: optional(parts.post_norms, "post_attention_norm.weight", c.width)?,
        ffn_norm: norm("ffn_norm.weight", c.width)?,
        gate: linear("ffn_gate", c.width, c.ff, Presence::Optional)?,
        up: linear("ffn_up", c.width, c.ff, Presence::Optional)?,
        down: linear("ffn_down", c.ff, c.width, Presence::Optional)?,
        post_ffn_norm: optional(parts.post_norms, "post_ffw_norm.weight", c.width)?,
    })
}
