//! Architectures: what each makes of its keys, and which tensors its layers have. One file each.
//!
//! A dense transformer's layer is always `norm, attention, add, norm, gated feed-forward, add`; the files say where the
//! norms, biases, windows and scales are. To add an architecture, add a file and a line to `ALL`.

mod gemma3;
mod llama;
mod qwen2;
mod qwen3;

use super::config::{Config, Keys};
use crate::error::Error;
use gguf::Metadata;

/// Optional parts of a layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Parts {
    /// Biases of Q, K and V: must be there, or may be there.
    pub(crate) qkv_bias: Presence,
    /// Norm of each Q and K head.
    pub(crate) qk_norm: Presence,
    /// Norms after attention and after the feed-forward, before the additions.
    pub(crate) post_norms: Presence,
}

/// Whether a tensor is part of an architecture.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Presence {
    /// Never.
    #[default]
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
pub(crate) static ALL: [&Arch; 4] = [&llama::ARCH, &qwen2::ARCH, &qwen3::ARCH, &gemma3::ARCH];

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
