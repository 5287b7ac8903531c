//! Layers: their weights, found in a file and checked.

use super::arch::{Arch, Presence, QkNorm};
use super::config::{Config, Experts};
use super::weights::{Loader, Matrix, Vector, Weights};
use crate::error::Error;
use cpu::mixture::Expert as ExpertView;
use cuda::experts::Blob;
use std::ops::Range;

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
    /// A score a query head that no cell has.
    pub(crate) sinks: Option<Vector>,
    pub(crate) output: Linear,
    pub(crate) post_attn_norm: Option<Vector>,
    pub(crate) ffn_norm: Vector,
    pub(crate) ffn: FeedForward,
    pub(crate) post_ffn_norm: Option<Vector>,
}

/// A layer's second half.
#[derive(Debug)]
pub(crate) enum FeedForward {
    /// One for all tokens.
    Dense(Gated),
    /// Some experts for each token.
    Mixture(Mixture),
}

/// A gated feed-forward.
#[derive(Debug)]
pub(crate) struct Gated {
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
}

/// A mixture of experts.
#[derive(Debug)]
pub(crate) struct Mixture {
    /// Its number among a model's mixtures.
    pub(crate) index: usize,
    /// What scores experts, `[E, D]`.
    pub(crate) router: Linear,
    pub(crate) experts: Vec<Expert>,
    pub(crate) shared: Option<Shared>,
}

/// An expert that all tokens use.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) ffn: Gated,
    /// What says how much of it a token takes, `[1, D]`; `None`: all.
    pub(crate) gate: Option<Linear>,
}

/// A routed expert: a *blob* of weights, which lie together: gate, up, down, then their biases.
#[derive(Debug)]
pub(crate) struct Expert {
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    /// Columns of `f32`.
    biases: Option<[Matrix; 3]>,
}

impl Expert {
    /// Its weights in host memory.
    ///
    /// # Panics
    /// If they are on a device.
    pub(crate) fn view<'a>(&self, weights: &'a Weights) -> ExpertView<'a> {
        let biases = self.biases.as_ref();
        ExpertView {
            gate: self.gate.view(weights),
            up: self.up.view(weights),
            down: self.down.view(weights),
            biases: biases.map(|biases| biases.each_ref().map(|bias| bias.bytes(weights))),
        }
    }

    /// Its bytes in host memory, where it lies there: all its matrices and what lies between them.
    pub(crate) fn blob(&self) -> Range<usize> {
        let last = self.biases.as_ref().map_or(&self.down, |b| &b[2]);
        self.gate.place().start..last.place().end
    }

    /// Its weights in a copy of [`blob`](Self::blob).
    pub(crate) fn view_in<'a>(&self, copy: &'a [u8]) -> ExpertView<'a> {
        let first = self.gate.place().start;
        let biases = self.biases.as_ref();
        ExpertView {
            gate: self.gate.view_in(copy, first),
            up: self.up.view_in(copy, first),
            down: self.down.view_in(copy, first),
            biases: biases.map(|biases| biases.each_ref().map(|bias| bias.bytes_in(copy, first))),
        }
    }

    /// Gate, the first of its matrices.
    pub(crate) fn first(&self) -> &Matrix {
        &self.gate
    }

    /// How it lies in memory, for a device.
    ///
    /// # Errors
    /// If devices have no kernels for it: says why.
    pub(crate) fn layout(&self) -> Result<Blob, String> {
        let types = [&self.gate, &self.up, &self.down].map(Matrix::ty);
        let (width, ff) = (self.gate.k(), self.gate.n());
        Blob::new(types, width, ff, self.biases.is_some())
    }

    /// The matrices that read a layer's normed input.
    pub(crate) fn inputs(&self) -> [&Matrix; 2] {
        [&self.gate, &self.up]
    }
}

impl Layer {
    /// Every vector that operations read.
    pub(super) fn vectors(&self) -> impl Iterator<Item = &Vector> {
        let ffn: Vec<&Linear> = match &self.ffn {
            FeedForward::Dense(dense) => dense.linears().into(),
            FeedForward::Mixture(mixture) => {
                let shared = mixture.shared.iter();
                let shared = shared.flat_map(|s| s.ffn.linears().into_iter().chain(&s.gate));
                std::iter::once(&mixture.router).chain(shared).collect()
            }
        };
        let attention = [&self.q, &self.k, &self.v, &self.output];
        let biases = attention.into_iter().chain(ffn);
        let norms = [
            Some(&self.attn_norm),
            self.q_norm.as_ref(),
            self.k_norm.as_ref(),
            self.sinks.as_ref(),
            self.post_attn_norm.as_ref(),
            Some(&self.ffn_norm),
            self.post_ffn_norm.as_ref(),
        ];
        let biases = biases.map(|linear| linear.bias.as_ref());
        biases.chain(norms).flatten()
    }

    /// Finds and checks layer `i`. Matrices are yet to be loaded.
    pub(super) fn look(
        loader: &Loader<'_>,
        arch: &Arch,
        c: &Config,
        i: usize,
    ) -> Result<Self, Error> {
        let find = Finder { loader, layer: i };
        let parts = arch.parts;
        let (heads, kv) = (c.heads, c.heads_kv);
        let qk_norm = |part: &str, heads: usize| match parts.qk_norm {
            QkNorm::None => Ok(None),
            QkNorm::EachHead => find.vector(part, c.head_k).map(Some),
            QkNorm::AllHeads => find.vector(part, heads * c.head_k).map(Some),
        };
        Ok(Self {
            attn_norm: find.vector("attn_norm.weight", c.width)?,
            q: find.linear("attn_q", c.width, heads * c.head_k, parts.qkv_bias)?,
            k: find.linear("attn_k", c.width, kv * c.head_k, parts.qkv_bias)?,
            v: find.linear("attn_v", c.width, kv * c.head_v, parts.qkv_bias)?,
            q_norm: qk_norm("attn_q_norm.weight", heads)?,
            k_norm: qk_norm("attn_k_norm.weight", kv)?,
            sinks: find.optional(parts.sinks, "attn_sinks.weight", heads)?,
            output: find.linear("attn_output", heads * c.head_v, c.width, Presence::Optional)?,
            post_attn_norm: find.optional(
                parts.post_norms,
                "post_attention_norm.weight",
                c.width,
            )?,
            ffn_norm: find.vector(parts.ffn_norm, c.width)?,
            ffn: match &c.experts {
                Some(experts) if i >= experts.leading_dense => {
                    FeedForward::Mixture(find.mixture(c, experts)?)
                }
                _ => FeedForward::Dense(find.gated("", c.width, c.ff)?),
            },
            post_ffn_norm: find.optional(parts.post_norms, "post_ffw_norm.weight", c.width)?,
        })
    }
}

impl Gated {
    fn linears(&self) -> [&Linear; 3] {
        [&self.gate, &self.up, &self.down]
    }
}

/// Finds tensors of one layer.
struct Finder<'a, 'f> {
    loader: &'a Loader<'f>,
    layer: usize,
}

impl Finder<'_, '_> {
    fn name(&self, part: &str) -> String {
        format!("blk.{}.{part}", self.layer)
    }

    fn has(&self, presence: Presence, part: &str) -> bool {
        match presence {
            Presence::Never => false,
            Presence::Optional => self.loader.has(&self.name(part)),
            Presence::Always => true,
        }
    }

    fn vector(&self, part: &str, n: usize) -> Result<Vector, Error> {
        self.loader.vector(&self.name(part), n)
    }

    fn optional(&self, presence: Presence, part: &str, n: usize) -> Result<Option<Vector>, Error> {
        self.has(presence, part)
            .then(|| self.vector(part, n))
            .transpose()
    }

    fn linear(&self, part: &str, k: usize, n: usize, bias: Presence) -> Result<Linear, Error> {
        Ok(Linear {
            w: self
                .loader
                .matrix(&self.name(&format!("{part}.weight")), k, n)?,
            bias: self.optional(bias, &format!("{part}.bias"), n)?,
        })
    }

    /// A gated feed-forward of `ff`, whose tensors' names end with `suffix`.
    fn gated(&self, suffix: &str, width: usize, ff: usize) -> Result<Gated, Error> {
        let linear = |part: &str, k, n| {
            let part = format!("ffn_{part}{suffix}");
            self.linear(&part, k, n, Presence::Optional)
        };
        Ok(Gated {
            gate: linear("gate", width, ff)?,
            up: linear("up", width, ff)?,
            down: linear("down", ff, width)?,
        })
    }

    /// What reads a token's values as they are, and gives few.
    fn scorer(&self, part: &str, c: &Config, n: usize) -> Result<Linear, Error> {
        let name = self.name(&format!("{part}.weight"));
        Ok(Linear {
            w: self.loader.float_matrix(&name, c.width, n)?,
            bias: self.optional(Presence::Optional, &format!("{part}.bias"), n)?,
        })
    }

    fn mixture(&self, c: &Config, experts: &Experts) -> Result<Mixture, Error> {
        let total = experts.routing.experts;
        let stack = |part: &str, k: usize, n: usize| {
            let name = self.name(&format!("ffn_{part}_exps.weight"));
            self.loader.stack(&name, k, n, total)
        };
        let bias = |part: &str, n: usize| {
            let name = self.name(&format!("ffn_{part}_exps.bias"));
            self.loader.stacked_vectors(&name, n, total)
        };
        let (width, ff) = (c.width, experts.ff);
        let [gate, up] = [stack("gate", width, ff)?, stack("up", width, ff)?];
        let down = stack("down", ff, width)?;
        let biases = if self.has(Presence::Optional, "ffn_gate_exps.bias") {
            Some([bias("gate", ff)?, bias("up", ff)?, bias("down", width)?])
        } else {
            None
        };
        let router = self.scorer("ffn_gate_inp", c, total)?;
        let shared = experts.shared_ff.map(|ff| {
            let gate = "ffn_gate_inp_shexp";
            Ok::<_, Error>(Shared {
                ffn: self.gated("_shexp", width, ff)?,
                gate: if self.has(Presence::Optional, &format!("{gate}.weight")) {
                    Some(self.scorer(gate, c, 1)?)
                } else {
                    None
                },
            })
        });
        let shared = shared.transpose()?;
        // One blob after the other.
        let blob = |e: usize| Expert {
            gate: gate.place(e),
            up: up.place(e),
            down: down.place(e),
            biases: biases
                .as_ref()
                .map(|biases| biases.each_ref().map(|bias| bias.place(e))),
        };
        Ok(Mixture {
            index: self.layer - experts.leading_dense,
            router,
            experts: (0..total).map(blob).collect(),
            shared,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Contents, LoadOptions, Model};
    use crate::synth::Recipe;
    use cpu::mem::ALIGN;
    use gguf::write::Writer;
    use gguf::{GgufFile, TensorType};

    /// A `gpt-oss` model of one layer and 5 experts, whose matrices have sizes that no line of a cache divides.
    fn small() -> GgufFile {
        let mut writer = Writer::new(32).unwrap();
        writer.set("general.architecture", "gpt-oss").unwrap();
        for (key, n) in [
            ("block_count", 1_u32),
            ("context_length", 64),
            ("embedding_length", 96),
            ("feed_forward_length", 32),
            ("attention.head_count", 2),
            ("attention.key_length", 16),
            ("attention.value_length", 16),
            ("expert_count", 5),
            ("expert_used_count", 2),
        ] {
            writer.set(&format!("gpt-oss.{key}"), n).unwrap();
        }
        let eps = "gpt-oss.attention.layer_norm_rms_epsilon";
        writer.set(eps, 1e-5_f32).unwrap();
        let mut add = |name: &str, ty, dims: &[u64]| {
            writer.tensor_from(name, ty, dims, |_| Ok(())).unwrap();
        };
        let (f32, mxfp4) = (TensorType::F32, TensorType::MXFP4);
        add("token_embd.weight", f32, &[96, 40]);
        add("output_norm.weight", f32, &[96]);
        let mut add = |name: &str, ty, dims: &[u64]| add(&format!("blk.0.{name}"), ty, dims);
        for part in ["attn_q", "attn_k", "attn_v"] {
            add(&format!("{part}.weight"), f32, &[96, 32]);
            add(&format!("{part}.bias"), f32, &[32]);
        }
        add("attn_output.weight", f32, &[32, 96]);
        add("attn_sinks.weight", f32, &[2]);
        add("attn_norm.weight", f32, &[96]);
        add("post_attention_norm.weight", f32, &[96]);
        add("ffn_gate_inp.weight", f32, &[96, 5]);
        for (part, k, n) in [("gate", 96, 32), ("up", 96, 32), ("down", 32, 96)] {
            add(&format!("ffn_{part}_exps.weight"), mxfp4, &[k, n, 5]);
            add(&format!("ffn_{part}_exps.bias"), f32, &[n, 5]);
        }
        let (header, _) = writer.header().unwrap();
        GgufFile::from_header("small", &header).unwrap()
    }

    #[test]
    fn an_experts_weights_lie_together_and_in_the_order_of_ids() {
        let options = LoadOptions {
            threads: Some(1),
            contents: Contents::Synthetic(Recipe::default()),
            ..LoadOptions::default()
        };
        let model = Model::from_file(&small(), &options, &mut |_| {}).unwrap();
        let FeedForward::Mixture(mixture) = &model.layers[0].ffn else {
            panic!("it has experts");
        };
        assert_eq!(mixture.experts.len(), 5);
        let mut end = None;
        for expert in &mixture.experts {
            let biases = expert.biases.as_ref().expect("it has biases");
            let matrices = [&expert.gate, &expert.up, &expert.down];
            let blob = expert.blob();
            let copy = model.weights.in_host()[blob.clone()].to_vec();
            for matrix in matrices.into_iter().chain(biases) {
                let bytes = matrix.bytes(&model.weights);
                assert_eq!(matrix.bytes_in(&copy, blob.start), bytes);
                let bytes = matrix.bytes(&model.weights).as_ptr_range();
                let (start, after) = (bytes.start as usize, bytes.end as usize);
                assert!(start.is_multiple_of(ALIGN));
                if let Some(end) = end {
                    assert_eq!(start, usize::next_multiple_of(end, ALIGN));
                }
                end = Some(after);
            }
        }
    }
}
