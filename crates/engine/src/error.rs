//! What can go wrong with a model or its state.

use std::path::PathBuf;

/// Errors of models and sessions.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file is not what it should be.
    #[error(transparent)]
    Gguf(#[from] gguf::Error),
    /// Nothing here runs this kind of model.
    #[error("{}: architecture {found:?} is not supported; supported are {supported}", file.display())]
    Architecture {
        /// The file.
        file: PathBuf,
        /// `general.architecture`.
        found: String,
        /// Names of those that are.
        supported: String,
    },
    /// A hyper-parameter makes no sense, or something here cannot handle it.
    #[error("key {key}: {problem}")]
    Parameter {
        /// The metadata key.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor that the architecture needs is not there.
    #[error("tensor {name} is missing")]
    MissingTensor {
        /// Its name.
        name: String,
    },
    /// A tensor's shape is not what the hyper-parameters say.
    #[error("tensor {name} has shape {found:?}, expected {expected:?} (innermost first)")]
    Shape {
        /// Its name.
        name: String,
        /// What the file says.
        found: Vec<u64>,
        /// What the architecture wants.
        expected: Vec<u64>,
    },
    /// Tensors in formats that no kernel reads.
    #[error("tensor {name}: {source}")]
    Format {
        /// The first such tensor.
        name: String,
        /// The format, and the supported ones.
        source: quant::formats::Error,
    },
    /// A tensor that must be float is not.
    #[error("tensor {name} has type {found}, expected F32, F16 or BF16")]
    NotFloat {
        /// Its name.
        name: String,
        /// Its type.
        found: &'static str,
    },
    /// A tensor that must be of single precision is not.
    #[error("tensor {name} has type {found}, expected F32")]
    NotSingle {
        /// Its name.
        name: String,
        /// Its type.
        found: &'static str,
    },
    /// Not enough memory.
    #[error("{what}: {source}")]
    Memory {
        /// What it was for.
        what: String,
        /// How much.
        source: cpu::mem::OutOfMemory,
    },
    /// The system would not start threads.
    #[error(transparent)]
    Threads(#[from] cpu::pool::SpawnError),
    /// The cache cannot be of this type.
    #[error(transparent)]
    Cache(#[from] cpu::attention::KvShapeError),
    /// The context is full.
    #[error(
        "the context holds {n_ctx} tokens and {n_past} are in it: {tokens} more do not fit (see --ctx)"
    )]
    ContextFull {
        /// Cells.
        n_ctx: usize,
        /// Cells taken.
        n_past: usize,
        /// Tokens that were to be added.
        tokens: usize,
    },
    /// A device failed, or there is none.
    #[error(transparent)]
    Device(#[from] cuda::Error),
    /// A device has no room for a model's weights.
    #[error("{what}: {source}; all of the model's weights take {all_bytes} bytes there")]
    DeviceRoom {
        /// What it was for.
        what: String,
        /// Bytes of all weights.
        all_bytes: u64,
        /// How much was wanted, and is free.
        source: cuda::Error,
    },
    /// Random weights cannot be made.
    #[error(transparent)]
    Synth(#[from] crate::synth::SynthError),
    /// The cells in work do not fit into device memory.
    #[error(
        "device memory has room for {window} cells of the KV cache, the step needs more (see --window and --device-mem)"
    )]
    Window {
        /// Cells.
        window: usize,
    },
    /// Neither device memory nor what host memory may take has room for more cells.
    #[error(
        "the KV cache is full: {window} cells in device memory and {tail} in host memory (see --spill, --window and --device-mem)"
    )]
    TailFull {
        /// Cells in device memory.
        window: usize,
        /// Cells in host memory.
        tail: usize,
    },
    /// A token that the vocabulary does not have.
    #[error("token {token} is not in the vocabulary of {n_vocab}")]
    Token {
        /// The id.
        token: u32,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// A thread that computes has panicked, which said why.
    #[error("a thread that computes has panicked: this session computes nothing more")]
    Panicked,
    /// A session was asked for something impossible.
    #[error("{0}")]
    Options(String),
}
