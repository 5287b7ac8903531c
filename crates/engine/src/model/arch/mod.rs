//! Architectures: what each makes of its keys, and which tensors its layers have. One file each.
//!
//! A transformer's layer is always `norm, attention, add, norm, gated feed-forward (or a mixture of them), add`; the files say where the
//! norms, biases, windows and scales are, and how experts are weighed. To add an architecture, add a file and a line to `ALL`.

mod gemma3;
mod gpt_oss;
mod llama;
mod olmoe;
mod qwen2;
mod qwen2moe;
mod qwen3;
mod qwen3moe;

use super::config::{Config, Keys};
use crate::error::Error;
use gguf::Metadata;

/// Parts of a layer that not all architectures have, or have elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parts {
    /// Biases of Q, K and V: must be there, or may be there.
    pub(crate) qkv_bias: Presence,
    /// Norms of Q and K.
    pub(crate) qk_norm: QkNorm,
    /// A score a query head that no cell has.
    pub(crate) sinks: Presence,
    /// Norms after attention and after the feed-forward, before the additions.
    pub(crate) post_norms: Presence,
    /// The name of the norm before the feed-forward.
    pub(crate) ffn_norm: &'static str,
}

impl Parts {
    /// None of them.
    const PLAIN: Self = Self {
        qkv_bias: Presence::Never,
        qk_norm: QkNorm::None,
        sinks: Presence::Never,
        post_norms: Presence::Never,
        ffn_norm: "ffn_norm.weight",
    };
}

/// How Q and K are normed before rope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QkNorm {
    /// Not at all.
    None,
    /// Each head by itself.
    EachHead,
    /// A token's heads together.
    AllHeads,
}

/// Whether a tensor is part of an architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    /// Never.
    Never,
    /// In some files.
    Optional,
    /// In all.
    Always,
}

/// An architecture.
pub(crate) struct Arch {
    /// `general.architecture`.
    pub(crate) name: &'static str,
    /// Tensors beyond the common ones.
    pub(crate) parts: Parts,
    /// Changes the common hyper-parameters.
    pub(super) adjust: fn(&Keys<'_>, &mut Config) -> Result<(), Error>,
}

/// All that can run.
pub(crate) static ALL: [&Arch; 8] = [
    &llama::ARCH,
    &qwen2::ARCH,
    &qwen2moe::ARCH,
    &qwen3::ARCH,
    &qwen3moe::ARCH,
    &olmoe::ARCH,
    &gpt_oss::ARCH,
    &gemma3::ARCH,
];

/// The names of all that can run.
pub fn supported() -> String {
    ALL.map(|a| a.name).join(", ")
}

/// Reads a file's hyper-parameters. `None`: the architecture is not supported.
pub(crate) fn read(
    meta: &Metadata,
    name: &str,
    n_vocab: usize,
) -> Option<Result<(&'static Arch, Config), Error>> {
    let arch = ALL.into_iter().find(|a| a.name == name)?;
    let keys = Keys::new(meta, name);
    Some(Config::common(meta, &keys, n_vocab).and_then(|mut config| {
        (arch.adjust)(&keys, &mut config)?;
        Ok((arch, config))
    }))
}
