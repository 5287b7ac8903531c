//! Hyper-parameters from a file's metadata, checked.

use super::limits::{CONTEXT_MAX, HEAD_MAX, HEADS_MAX, LAYERS_MAX, WIDTH_MAX};
use super::rope::{Rope, Scaling};
use crate::error::Error;
use cpu::mixture::{EXPERTS_MAX, Groups, Routing, Weighing};
use cpu::ops::{Gate, RopePairs};
use gguf::{Array, Metadata, Value};

/// What the layers of a transformer have in common.
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
    /// Feed-forward width F of layers without experts.
    pub ff: usize,
    /// Experts, if there are any.
    pub experts: Option<Experts>,
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

/// Mixtures of experts of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    /// How tokens are routed.
    pub routing: Routing,
    /// Feed-forward width of an expert.
    pub ff: usize,
    /// Feed-forward width of what all tokens use beside that; `None`: nothing.
    pub shared_ff: Option<usize>,
    /// Layers from the start that have one feed-forward for all tokens.
    pub leading_dense: usize,
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

    /// A count that may be 0, which is as good as none.
    pub(super) fn zero_or_count(&self, key: &str, max: u32) -> Result<Option<usize>, Error> {
        match self.meta.u32(&self.name(key))? {
            None | Some(0) => Ok(None),
            Some(n) => self.in_range(key, n, max).map(Some),
        }
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
    fn flags(&self, key: &str, n: usize) -> Result<Option<Vec<bool>>, Error> {
        match self.meta.get(&self.name(key)) {
            Some(Value::Array(Array::Bool(flags))) if flags.len() != n => {
                Err(self.bad(key, format!("lists {} layers, expected {n}", flags.len())))
            }
            Some(Value::Array(Array::Bool(flags))) => Ok(Some(flags.to_vec())),
            _ => Ok(None),
        }
    }

    /// Which of `n` layers have a window: files say it for each layer, or how many layers there are from one without to the next; those that
    /// say nothing mean `pattern`.
    pub(super) fn windowed(&self, n: usize, pattern: usize) -> Result<Vec<bool>, Error> {
        const KEY: &str = "attention.sliding_window_pattern";
        if let Some(flags) = self.flags(KEY, n)? {
            return Ok(flags);
        }
        let pattern = self.optional_count(KEY, u32::MAX)?.unwrap_or(pattern);
        Ok((0..n).map(|i| i % pattern < pattern - 1).collect())
    }

    pub(super) fn bool(&self, key: &str) -> Result<Option<bool>, Error> {
        Ok(self.meta.bool(&self.name(key))?)
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
            experts: None,
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

    /// Reads what a mixture's keys say; a file that does not say how scores become weights means `weighing`.
    pub(super) fn read_experts(
        &mut self,
        keys: &Keys<'_>,
        weighing: Weighing,
    ) -> Result<(), Error> {
        const GATING: &str = "expert_gating_func";
        const GROUPS: &str = "expert_group_count";
        let experts = keys.count("expert_count", EXPERTS_MAX as u32)?;
        let used = keys.count("expert_used_count", experts as u32)?;
        let is_normalised = keys.bool("expert_weights_norm")?;
        let of_chosen = is_normalised.unwrap_or(weighing == Weighing::SoftmaxOfChosen);
        let weighing = match (keys.zero_or_count(GATING, u32::MAX)?, of_chosen) {
            (None | Some(1), false) => Weighing::Softmax,
            (None | Some(1), true) | (Some(3), _) => Weighing::SoftmaxOfChosen,
            (Some(2), false) => Weighing::Sigmoid,
            (Some(2), true) => Weighing::SigmoidOfChosen,
            (Some(n), _) => {
                let problem = format!(
                    "is {n}, expected 1 (softmax), 2 (sigmoid) or 3 (softmax of the chosen)"
                );
                return Err(keys.bad(GATING, problem));
            }
        };
        let groups = keys.zero_or_count(GROUPS, EXPERTS_MAX as u32)?;
        let groups = groups.filter(|&n| n > 1).map(|total| {
            let used = keys.count("expert_group_used_count", total as u32)?;
            Ok::<_, Error>(Groups { total, used })
        });
        let routing = Routing {
            experts,
            used,
            weighing,
            // 0 is how some files say that there is none.
            scale: keys
                .f32("expert_weights_scale")?
                .filter(|&scale| scale != 0.0)
                .unwrap_or(1.0),
            groups: groups.transpose()?,
        };
        routing
            .check()
            .map_err(|problem| keys.bad(GROUPS, problem))?;
        let ff = keys.optional_count("expert_feed_forward_length", WIDTH_MAX)?;
        let leading = keys.zero_or_count("leading_dense_block_count", LAYERS_MAX)?;
        self.experts = Some(Experts {
            routing,
            ff: ff.unwrap_or(self.ff),
            shared_ff: None,
            leading_dense: leading.unwrap_or(0),
        });
        Ok(())
    }

    /// The widest feed-forward that all tokens take; 0 if there is none.
    pub(crate) fn common_ff(&self) -> usize {
        match &self.experts {
            None => self.ff,
            Some(experts) => {
                let has_dense = experts.leading_dense > 0;
                let dense = if has_dense { self.ff } else { 0 };
                dense.max(experts.shared_ff.unwrap_or(0))
            }
        }
    }

    /// Gates that devices have no kernels for: those that clamp are in the experts' alone.
    pub(crate) fn gates_without_kernels(&self) -> Option<&'static str> {
        (self.gate == Gate::Clamped && self.common_ff() > 0)
            .then_some("clamped gates of all but experts that tokens choose")
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
