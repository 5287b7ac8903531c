//! Hyper-parameters from a file's metadata, checked.

use super::limits::{CONTEXT_MAX, HEAD_MAX, HEADS_MAX, LAYERS_MAX, WIDTH_MAX};
use super::rope::{Rope, Scaling};
use crate::error::Error;
use cpu::ops::{Gate, RopePairs};
use gguf::{Array, Metadata, Value};

/// What the layers of a dense transformer have in common.
#[derive(Debug, Clone)]
pub struct Config {
    /// `general.architecture`.
    pub arch: String,
    /// `general.name`, if any.
    pub name: Option<String>,
    /// Layers.
    pub n_layer: usize,
    /// Context that the model was trained with.
    pub n_ctx_train: usize,
    /// Tokens of the vocabulary (rows of the embedding).
    pub n_vocab: usize,
    /// Width D.
    pub width: usize,
    /// Feed-forward width F.
    pub ff: usize,
    /// Query heads H.
    pub heads: usize,
    /// Key heads K.
    pub heads_kv: usize,
    /// Values of a K head.
    pub head_k: usize,
    /// Values of a V head.
    pub head_v: usize,
    /// Epsilon of the norms.
    pub norm_eps: f32,
    /// Factor of the scores.
    pub attention_scale: f32,
    /// Soft-cap of the scores.
    pub attention_soft_cap: Option<f32>,
    /// Soft-cap of the logits.
    pub logit_soft_cap: Option<f32>,
    /// What embeddings are multiplied with.
    pub embedding_scale: f32,
    /// The feed-forward's gate function.
    pub gate: Gate,
    /// Which values rope turns together.
    pub rope_pairs: RopePairs,
    /// Rope of layers that see everything.
    pub rope: Rope,
    /// Rope of layers with a window, where it differs.
    pub rope_windowed: Rope,
    /// Cells that a windowed layer sees.
    pub window: Option<usize>,
    /// Whether layer i is windowed.
    pub windowed: Vec<bool>,
}

/// Reads an architecture's keys, `ARCH.key`.
pub(super) struct Keys<'a> {
    meta: &'a Metadata,
    arch: &'a str,
}

impl<'a> Keys<'a> {
    pub(super) fn new(meta: &'a Metadata, arch: &'a str) -> Self {
        Self { meta, arch }
    }

    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    pub(super) fn bad(&self, key: &str, problem: impl Into<String>) -> Error {
        Error::Parameter {
            key: self.name(key),
            problem: problem.into(),
        }
    }

    /// A count in `1..=max`.
    fn count(&self, key: &str, max: u32) -> Result<usize, Error> {
        let n = self.meta.require_u32(&self.name(key))?;
        self.in_range(key, n, max)
    }

    fn in_range(&self, key: &str, n: u32, max: u32) -> Result<usize, Error> {
        if n == 0 || n > max {
            return Err(self.bad(key, format!("is {n}, expected 1 to {max}")));
        }
        Ok(n as usize)
    }

    pub(super) fn optional_count(&self, key: &str, max: u32) -> Result<Option<usize>, Error> {
        self.meta
            .u32(&self.name(key))?
            .map(|n| self.in_range(key, n, max))
            .transpose()
    }

    pub(super) fn f32(&self, key: &str) -> Result<Option<f32>, Error> {
        match self.meta.f32(&self.name(key))? {
            Some(x) if !x.is_finite() => Err(self.bad(key, format!("is {x}"))),
            x => Ok(x),
        }
    }

    pub(super) fn positive(&self, key: &str) -> Result<Option<f32>, Error> {
        match self.f32(key)? {
            Some(x) if x <= 0.0 => Err(self.bad(key, format!("is {x}, expected more than 0"))),
            x => Ok(x),
        }
    }

    /// A truth value for each of `n` layers; `None` if the key is missing or is no such list.
    pub(super) fn flags(&self, key: &str, n: usize) -> Result<Option<Vec<bool>>, Error> {
        match self.meta.get(&self.name(key)) {
            Some(Value::Array(Array::Bool(flags))) if flags.len() != n => {
                Err(self.bad(key, format!("lists {} layers, expected {n}", flags.len())))
            }
            Some(Value::Array(Array::Bool(flags))) => Ok(Some(flags.to_vec())),
            _ => Ok(None),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, Error> {
        Ok(self.meta.str(&self.name(key))?)
    }
}

impl Config {
    /// Reads what all supported architectures share; `vocab` is the number of rows of the embedding. The plain choices (no
    /// windows, no caps, SiLU, NeoX rope) are what an architecture's file then changes.
    pub(super) fn common(meta: &Metadata, keys: &Keys<'_>, n_vocab: usize) -> Result<Self, Error> {
        let n_layer = keys.count("block_count", LAYERS_MAX)?;
        let width = keys.count("embedding_length", WIDTH_MAX)?;
        let heads = keys.count("attention.head_count", HEADS_MAX)?;
        let heads_kv = keys
            .optional_count("attention.head_count_kv", HEADS_MAX)?
            .unwrap_or(heads);
        if heads % heads_kv != 0 {
            return Err(keys.bad(
                "attention.head_count_kv",
                format!("is {heads_kv}, which does not divide {heads} heads"),
            ));
        }
        let head = |key| match keys.optional_count(key, HEAD_MAX)? {
            Some(n) => Ok(n),
            None if width % heads != 0 => Err(keys.bad(
                "attention.head_count",
                format!(
                    "is {heads}, which does not divide the width of {width}, and {key} is missing"
                ),
            )),
            None if width / heads > HEAD_MAX as usize => Err(keys.bad(
                "attention.head_count",
                format!(
                    "is {heads}, which makes heads of {}, expected up to {HEAD_MAX}",
                    width / heads
                ),
            )),
            None => Ok(width / heads),
        };
        let head_k = head("attention.key_length")?;
        let head_v = head("attention.value_length")?;
        let eps = keys.f32("attention.layer_norm_rms_epsilon")?;
        let norm_eps =
            eps.ok_or_else(|| keys.bad("attention.layer_norm_rms_epsilon", "is missing"))?;
        if norm_eps < 0.0 {
            return Err(keys.bad(
                "attention.layer_norm_rms_epsilon",
                format!("is {norm_eps}, expected 0 or more"),
            ));
        }
        let n_ctx_train = keys.count("context_length", CONTEXT_MAX)?;
        let rope = rope(keys, head_k, n_ctx_train)?;
        Ok(Self {
            arch: keys.arch.to_owned(),
            name: meta.str("general.name")?.map(str::to_owned),
            n_layer,
            n_ctx_train,
            n_vocab,
            width,
            ff: keys.count("feed_forward_length", WIDTH_MAX)?,
            heads,
            heads_kv,
            head_k,
            head_v,
            norm_eps,
            attention_scale: 1.0 / (head_k as f32).sqrt(),
            attention_soft_cap: None,
            logit_soft_cap: None,
            embedding_scale: 1.0,
            gate: Gate::Silu,
            rope_pairs: RopePairs::Halves,
            rope_windowed: rope.clone(),
            rope,
            window: None,
            windowed: vec![false; n_layer],
        })
    }

    /// The window of layer `i`, if it has one.
    pub fn window_of(&self, layer: usize) -> Option<usize> {
        self.window.filter(|_| self.windowed[layer])
    }
}

/// Rope's parameters: `rope.dimension_count`, `rope.freq_base`, `rope.scaling.*`.
fn rope(keys: &Keys<'_>, head: usize, n_ctx_train: usize) -> Result<Rope, Error> {
    let dims = keys
        .optional_count("rope.dimension_count", HEAD_MAX)?
        .unwrap_or(head);
    if dims > head || dims % 2 != 0 {
        return Err(keys.bad(
            "rope.dimension_count",
            format!("is {dims}, expected an even number up to the head size {head}"),
        ));
    }
    let factor = match keys.positive("rope.scaling.factor")? {
        Some(f) => Some(f),
        None => keys.positive("rope.scale_linear")?,
    };
    let scaling = match (keys.text("rope.scaling.type")?, factor) {
        (None, None) | (Some("none"), _) => Scaling::None,
        (None | Some("linear"), factor) => {
            factor.map_or(Scaling::None, |factor| Scaling::Linear { factor })
        }
        (Some("yarn"), factor) => Scaling::Yarn {
            factor: factor.ok_or_else(|| {
                keys.bad(
                    "rope.scaling.factor",
                    "is missing, and rope.scaling.type is yarn",
                )
            })?,
            n_ctx_original: keys
                .optional_count("rope.scaling.original_context_length", CONTEXT_MAX)?
                .unwrap_or(n_ctx_train),
            attention_factor: keys.positive("rope.scaling.attn_factor")?.unwrap_or(1.0),
            beta_fast: keys
                .positive("rope.scaling.yarn_beta_fast")?
                .unwrap_or(32.0),
            beta_slow: keys.positive("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
        },
        (Some(other), _) => {
            return Err(keys.bad(
                "rope.scaling.type",
                format!("is {other:?}, expected none, linear or yarn"),
            ));
        }
    };
    Ok(Rope {
        dims,
        freq_base: freq_base(keys, "rope.freq_base")?,
        scaling,
    })
}

/// A base of rope's frequencies. At 1 all pairs would turn alike, and YaRN's ramp would divide by its logarithm.
pub(super) fn freq_base(keys: &Keys<'_>, key: &str) -> Result<f32, Error> {
    match keys.f32(key)? {
        Some(base) if base <= 1.0 => Err(keys.bad(key, format!("is {base}, expected more than 1"))),
        base => Ok(base.unwrap_or(10_000.0)),
    }
}

#[cfg(test)]
mod tests;
