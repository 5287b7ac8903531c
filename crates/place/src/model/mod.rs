//! What a plan must know of a model, all of it from a file's header.
//!
//! [`Model::describe`] reads keys and the list of tensors; it never needs tensor data. The rules by architecture are in
//! `arch`, what each layer keeps of a token is [`Keeps`].

mod arch;
mod describe;
mod layers;
mod metadata;
mod weights;

use std::collections::BTreeMap;

use serde::Serialize;

pub use metadata::{Metadata, Value};
pub use weights::Tensor;

/// A model as placement sees it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Model {
    /// `general.architecture`.
    pub arch: String,
    /// `general.name`, if any.
    pub name: Option<String>,
    /// Context that the model was trained with; 0 if the file does not say.
    pub n_ctx_train: u64,
    /// Model width D.
    pub width: u64,
    /// The widest dense feed-forward layer F; 0 without one.
    pub ff: u64,
    /// The most query heads H of any layer.
    pub heads: u64,
    /// The most key heads K of any layer.
    pub heads_kv: u64,
    /// Values of a K head in layers that see everything.
    pub head_k: u64,
    /// Values of a V head in layers that see everything.
    pub head_v: u64,
    /// Values of a head that rope turns.
    pub rope_dims: u64,
    /// Tokens of the vocabulary V: rows of the embedding.
    pub n_vocab: u64,
    /// Routed experts, if any.
    pub experts: Option<Experts>,
    /// Every layer of the file, in order, those that decoding never runs too.
    pub layers: Vec<Layer>,
    /// Bytes of the file's tensors.
    pub weights: Weights,
    /// What one generated token reads of them.
    pub active: Active,
    /// Values of all tensors.
    pub n_params: u64,
    /// What the header does not say and was taken as usual, in words. Empty for a model that is fully known.
    pub assumptions: Vec<String>,
}

/// A mixture's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Experts {
    /// Routed experts E of a layer.
    pub total: u64,
    /// How many of them a token uses.
    pub used: u64,
    /// Experts that every token uses, beside those.
    pub shared: u64,
    /// Feed-forward width of a routed expert.
    pub ff: u64,
    /// Feed-forward width of all shared experts together; 0 without any.
    pub shared_ff: u64,
}

/// One layer of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Layer {
    /// What it keeps of past tokens' keys and values.
    pub keeps: Keeps,
    /// Bytes of recurrent state a sequence, `f32`; 0 for layers without.
    pub state_bytes: u64,
    /// Query heads H.
    pub heads: u64,
    /// Bytes of tensors that every token reads.
    pub dense_bytes: u64,
    /// Bytes of all routed experts.
    pub expert_bytes: u64,
    /// Bytes of one routed expert.
    pub one_expert_bytes: u64,
}

/// What a layer keeps of past tokens' keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Keeps {
    /// Cells of its own.
    Cells(Cells),
    /// Nothing: it attends over an earlier layer's cells.
    SharedWith {
        /// That layer.
        layer: usize,
    },
    /// Nothing: it does not attend (its state, if it has one, is [`Layer::state_bytes`]).
    Nothing,
    /// Nothing: decoding never runs it. It belongs to next-token prediction.
    Unused,
}

/// A layer's cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Cells {
    /// Key heads K.
    pub heads: u64,
    /// Values of a K head.
    pub head_k: u64,
    /// Values of a V head; 0 where V is a view of K.
    pub head_v: u64,
    /// What the values are.
    pub form: Form,
    /// Tokens that a query sees, itself included; `None`: all before it.
    pub window: Option<u64>,
}

/// What a cell's values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// K and V of every key head.
    Heads,
    /// The latent vector that K and V are made from (MLA).
    Latent,
}

/// Bytes of all tensors by kind. The kinds have no tensor in common.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Weights {
    /// Tables of which a token reads one row. A tied embedding is here too, and not in `output`.
    pub embedding: u64,
    /// What every token reads whole, the output excepted.
    pub dense: u64,
    /// Routed experts.
    pub experts: u64,
    /// The output matrix, where it has one of its own.
    pub output: u64,
    /// Layers that decoding never runs, their experts included.
    pub unused: u64,
    /// The part of `unused` that is routed experts.
    pub unused_experts: u64,
    /// What all but the unused ones take of a device's memory beyond their bytes: whole tiles of rows, whole pages. Not in any sum.
    pub device_padding: u64,
}

impl Weights {
    /// Bytes of all tensors.
    pub fn total(&self) -> u64 {
        // No overflow: describing a model checks this sum.
        self.embedding + self.dense + self.experts + self.output + self.unused
    }

    /// Bytes of all routed experts of the file, unused ones too.
    pub fn expert_bytes(&self) -> u64 {
        self.experts + self.unused_experts
    }
}

/// What one generated token reads of the weights.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Active {
    /// All of it.
    pub bytes: u64,
    /// The part that is rows of embeddings.
    pub embedding_row: u64,
    /// The rest by tensor type, such as `Q4_K`. With `used` experts of each layer,
    /// `bytes = embedding_row + sum(dense) + used * sum(one_expert)`.
    pub by_type: BTreeMap<String, TypeBytes>,
}

/// Bytes of one tensor type that a generated token reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TypeBytes {
    /// Of tensors that every token reads, the output (tied or not) included.
    pub dense: u64,
    /// Of one routed expert in every layer that has them.
    pub one_expert: u64,
}

impl Model {
    /// The layers that have cells of their own, with their positions.
    pub fn caching(&self) -> impl Iterator<Item = (usize, &Cells)> {
        self.layers
            .iter()
            .enumerate()
            .filter_map(|(i, layer)| match &layer.keeps {
                Keeps::Cells(cells) => Some((i, cells)),
                _ => None,
            })
    }

    /// Layers that decoding runs.
    pub fn n_layer(&self) -> usize {
        let runs = |layer: &&Layer| layer.keeps != Keeps::Unused;
        self.layers.iter().filter(runs).count()
    }

    /// Bytes of recurrent state a sequence, over all layers.
    pub fn state_bytes(&self) -> u64 {
        // No overflow: describing a model checks this sum.
        self.layers.iter().map(|layer| layer.state_bytes).sum()
    }
}

impl Cells {
    /// Values of K a cell; `None` beyond 64 bits.
    pub fn k_values(&self) -> Option<u64> {
        self.heads.checked_mul(self.head_k)
    }

    /// Values of V a cell; `None` beyond 64 bits.
    pub fn v_values(&self) -> Option<u64> {
        self.heads.checked_mul(self.head_v)
    }
}
