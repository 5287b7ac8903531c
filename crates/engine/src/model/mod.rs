//! Models: hyper-parameters, weights in memory, and what computes with them.

pub mod arch;
mod config;
mod layer;
mod limits;
pub(crate) mod rope;
mod weights;

pub use config::{Config, Experts};
pub(crate) use layer::{FeedForward, Layer, Linear, Mixture, Shared};
pub use rope::{Rope, Scaling};

use crate::error::Error;
use crate::synth::{Generator, Recipe};
use arch::Arch;
use cpu::Isa;
use cpu::pool::{Pinning, Pool, default_threads};
use cuda::experts::Blob;
use gguf::{GgufFile, MapMode};
use rope::Frequencies;
use sha2::{Digest, Sha256};
use std::path::Path;
use std::time::Duration;
pub(crate) use weights::{ExpertMemory, Matrix, OnDevice, Vector};
use weights::{Loader, Source, Weights};

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

/// Where the experts of a device's model lie. On the CPU there is one memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExpertHome {
    /// In the device's memory, all of them.
    #[default]
    Device,
    /// In host memory, from where sessions bring them to slots on the device, or compute them on the CPU.
    Host,
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

/// How long threads to whom a GPU hands a part of layers look for work before they sleep: as long as a token takes, since waking them would make each layer slow.
const HANDED_SPIN: Duration = Duration::from_millis(20);

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
    /// Where experts lie, if a device computes.
    pub experts: ExpertHome,
    /// Whether the embedding lies in pinned host memory then, where no product reads it: a token needs one row.
    pub embedding_in_host: bool,
    /// Host memory for experts that may be pinned for a device; `None`: all that they need.
    pub pin_max_bytes: Option<u64>,
    /// Threads that compute the host's share of experts; `None`: all.
    pub pool_workers: Option<usize>,
}

/// How far loading is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of weights in memory.
    pub done_bytes: u64,
    /// Of these many.
    pub total_bytes: u64,
}

/// A model, ready to compute.
#[derive(Debug)]
pub struct Model {
    config: Config,
    pub(crate) pool: Pool,
    /// What computes the host's share of experts, if that is not all of the pool.
    host_pool: Option<Pool>,
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

    /// Why a file's model does not run on a device that others may run on; `None` if it does.
    ///
    /// # Errors
    /// If it runs nowhere.
    pub fn problem_on(file: &GgufFile, device: ComputeDevice) -> Result<Option<String>, Error> {
        Ok(problem_on(file, &read_arch(file)?.1, device))
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
        if let Some(problem) = problem_on(file, &config, options.device) {
            return Err(Error::Options(format!("{problem} (see --device cpu)")));
        }
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
        let is_handed_work = matches!(options.device, ComputeDevice::Cuda(_))
            && matches!(options.experts, ExpertHome::Host);
        let new_pool = |threads| match is_handed_work {
            true => Pool::with_spin(threads, options.pinning, HANDED_SPIN),
            false => Pool::new(threads, options.pinning),
        };
        let pool = new_pool(options.threads.unwrap_or_else(default_threads))?;
        let host_pool = match options.pool_workers {
            Some(threads) if threads < pool.threads() => Some(new_pool(threads)?),
            _ => None,
        };
        let mut tell = |done_bytes, total_bytes| {
            progress(LoadProgress {
                done_bytes,
                total_bytes,
            })
        };
        let vectors = tensors.vectors();
        let is_read_by_rows = options.embedding_in_host && tensors.output.is_some();
        let loaded = weights::load(
            &planned,
            options.device,
            options.experts,
            is_read_by_rows.then_some(&tensors.embedding),
            options.pin_max_bytes,
            &pool,
            vectors,
            &mut tell,
        )?;
        let factors = tensors.rope_factors.as_deref();
        Ok(Self {
            rope: config.rope.frequencies(factors),
            rope_windowed: config.rope_windowed.frequencies(factors),
            config,
            pool,
            host_pool,
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

    /// Threads that compute the host's share of experts.
    pub(crate) fn host_pool(&self) -> &Pool {
        self.host_pool.as_ref().unwrap_or(&self.pool)
    }

    /// A mixture of experts, by its number among them.
    pub(crate) fn mixture(&self, index: usize) -> &Mixture {
        let experts = self.config.experts.as_ref();
        let dense = experts.map_or(0, |experts| experts.leading_dense);
        match &self.layers[dense + index].ffn {
            FeedForward::Mixture(mixture) => mixture,
            FeedForward::Dense(_) => unreachable!("layers behind the dense ones have experts"),
        }
    }

    pub(crate) fn output(&self) -> &Matrix {
        self.output.as_ref().unwrap_or(&self.embedding)
    }
}

/// Why a file's model does not run on a device; `None` if it does, or runs nowhere.
fn problem_on(file: &GgufFile, config: &Config, device: ComputeDevice) -> Option<String> {
    let (ComputeDevice::Cuda(_), Some(experts)) = (device, &config.experts) else {
        return None;
    };
    if let Some(gates) = config.gates_without_kernels() {
        return Some(format!("{gates} do not run on {device}"));
    }
    (experts.leading_dense..config.n_layer).find_map(|layer| {
        let part = |part: &str| file.tensor(&format!("blk.{layer}.ffn_{part}"));
        let types = [
            part("gate_exps.weight"),
            part("up_exps.weight"),
            part("down_exps.weight"),
        ];
        let [Some(gate), Some(up), Some(down)] = types else {
            return None;
        };
        let types = [gate, up, down].map(|tensor| tensor.ty);
        let has_biases = part("gate_exps.bias").is_some();
        let problem = Blob::new(types, config.width, experts.ff, has_biases).err()?;
        Some(format!("{problem} do not run on {device}"))
    })
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
                .map(|i| Layer::look(loader, arch, c, i))
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
