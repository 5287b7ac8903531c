//! From a header to a [`Model`].

use super::arch::Arch;
use super::layers::Source;
use super::metadata::{Keys, Metadata, PerLayer, Value};
use super::weights::{self, Tensor};
use super::{Experts, Layer, Model};
use crate::error::Error;
use crate::limits::LAYERS_MAX;

const ARCHITECTURE: &str = "general.architecture";

/// Caches beside the usual ones, by the key that says that a model has them.
const NOT_COUNTED: [(&str, &str); 2] = [
    (
        "attention.indexer.key_length",
        "the keys of sparse attention's indexer",
    ),
    ("attention.compress_ratios", "cells of compressed attention"),
];

impl Model {
    /// Reads what a file's header says.
    ///
    /// # Errors
    /// If a key that every model needs is missing, a key or tensor holds what no model can have, or bytes come to more than
    /// 64 bits hold. An architecture that is not known is no error: it is described by the rules that most follow, and
    /// [`Model::assumptions`] says so.
    pub fn describe(meta: &dyn Metadata, tensors: &[Tensor<'_>]) -> Result<Model, Error> {
        let name = match meta.get(ARCHITECTURE) {
            Some(Value::Text(name)) => name.into_owned(),
            Some(_) => {
                return Err(Error::Key {
                    key: ARCHITECTURE.to_owned(),
                    problem: "is no text".to_owned(),
                });
            }
            None => {
                return Err(Error::Missing {
                    key: ARCHITECTURE.to_owned(),
                    wanted: "text",
                });
            }
        };
        let keys = &Keys::new(meta, &name);
        let mut assumptions = Vec::new();
        let unknown = Arch::unknown();
        let arch = Arch::find(&name).unwrap_or_else(|| {
            assumptions.push(format!(
                "architecture {name:?} is not known: planned by the rules that most follow"
            ));
            &unknown
        });
        let (layers, running) = layer_counts(keys, arch, tensors)?;
        for (key, what) in NOT_COUNTED {
            if keys.has(key) {
                assumptions.push(format!("{what} ({name}.{key}) are not counted"));
            }
        }
        let width = keys.require("embedding_length")?;
        if width == 0 {
            return Err(keys.bad("embedding_length", "is 0, expected 1 or more"));
        }
        let per_layer = |key| keys.per_layer(key, layers, running);
        let heads = per_layer("attention.head_count")?.unwrap_or(PerLayer::Same(0));
        let heads_kv = per_layer("attention.head_count_kv")?.unwrap_or_else(|| heads.clone());
        let ff = per_layer("feed_forward_length")?.unwrap_or(PerLayer::Same(0));
        // What the first layer's heads come to; of none where there are none.
        let first = if heads.of(0) > 0 {
            heads.of(0)
        } else {
            heads.max()
        };
        let head = width.checked_div(first).unwrap_or(0);
        let head_k = keys.unsigned("attention.key_length")?.unwrap_or(head);
        let head_v = keys.unsigned("attention.value_length")?.unwrap_or(head);
        let rope_dims = keys.unsigned("rope.dimension_count")?.unwrap_or(head_k);
        let source = Source {
            keys,
            arch,
            tensors,
            layers,
            running,
            width,
            heads: heads.clone(),
            heads_kv: heads_kv.clone(),
            ff: ff.clone(),
            head_k,
            head_v,
            rope_dims,
        };
        let kept = source.layers(&mut assumptions)?;
        let experts = experts(keys, (layers, running), &ff, tensors, &mut assumptions)?;
        let sums = weights::sum(tensors, layers, running, experts)?;
        if sums.beyond > 0 {
            assumptions.push(format!(
                "{} tensors of layers beyond the {layers} that the file says are taken to be unused",
                sums.beyond
            ));
        }
        if sums.routed && experts.is_none() {
            assumptions.push(
                "there are experts and no expert_count: every token is taken to use all".to_owned(),
            );
        }
        let mut state = 0_u64;
        for (_, bytes) in &kept {
            state = state.checked_add(*bytes).ok_or(Error::Overflow {
                what: "the layers' state",
            })?;
        }
        let layer =
            |(i, ((keeps, state_bytes), bytes)): (usize, (_, &weights::LayerBytes))| Layer {
                keeps,
                state_bytes,
                heads: heads.of(i),
                dense_bytes: bytes.dense,
                expert_bytes: bytes.experts,
                one_expert_bytes: bytes.one_expert,
            };
        Ok(Model {
            name: match meta.get("general.name") {
                Some(Value::Text(name)) => Some(name.into_owned()),
                _ => None,
            },
            n_ctx_train: keys.unsigned("context_length")?.unwrap_or(0),
            width,
            ff: ff.max(),
            heads: heads.max(),
            heads_kv: heads_kv.max(),
            head_k,
            head_v,
            rope_dims,
            n_vocab: n_vocab(keys, tensors, &mut assumptions)?,
            experts,
            layers: kept
                .into_iter()
                .zip(&sums.layers)
                .enumerate()
                .map(layer)
                .collect(),
            weights: sums.weights,
            active: sums.active,
            n_params: sums.n_params,
            assumptions,
            arch: name.clone(),
        })
    }
}

/// The file's layers, and how many of them decoding runs.
fn layer_counts(
    keys: &Keys<'_>,
    arch: &Arch,
    tensors: &[Tensor<'_>],
) -> Result<(usize, usize), Error> {
    const COUNT: &str = "block_count";
    const NEXTN: &str = "nextn_predict_layers";
    let layers = keys.require(COUNT)?;
    if layers == 0 || layers > LAYERS_MAX {
        let problem = format!("is {layers}, expected 1 to {LAYERS_MAX}");
        return Err(keys.bad(COUNT, problem));
    }
    let nextn = keys.unsigned(NEXTN)?.unwrap_or(0);
    let Some(running) = layers.checked_sub(nextn).filter(|&n| n > 0) else {
        let problem = format!("is {nextn}, expected fewer than the {layers} layers");
        return Err(keys.bad(NEXTN, problem));
    };
    // Files of this one count predicting layers that they do not have, beside the layers and not among them.
    let probe = format!("blk.{running}.nextn.eh_proj.weight");
    let counted = arch.name != "deepseek4" || tensors.iter().any(|t| t.name == probe);
    let running = if counted { running } else { layers };
    // No loss: both are at most `LAYERS_MAX`.
    Ok((layers as usize, running as usize))
}

fn experts(
    keys: &Keys<'_>,
    (layers, running): (usize, usize),
    ff: &PerLayer,
    tensors: &[Tensor<'_>],
    assumptions: &mut Vec<String>,
) -> Result<Option<Experts>, Error> {
    const USED: &str = "expert_used_count";
    let total = keys.unsigned("expert_count")?.unwrap_or(0);
    if total == 0 {
        return Ok(None);
    }
    let used = match keys.per_layer(USED, layers, running)? {
        Some(PerLayer::Same(used)) => used,
        Some(each) => {
            assumptions.push(format!(
                "{USED} differs by layer: the largest is taken for all"
            ));
            each.max()
        }
        None => {
            assumptions.push(format!(
                "{USED} is missing: every token is taken to use all experts"
            ));
            total
        }
    };
    if used == 0 || used > total {
        return Err(keys.bad(USED, format!("is {used}, expected 1 to {total}")));
    }
    let any_shared = tensors.iter().any(|t| t.name.contains("_shexp."));
    let shared = keys.unsigned("expert_shared_count")?.filter(|&n| n > 0);
    let shared = shared.unwrap_or(u64::from(any_shared));
    let expert_ff = keys.per_layer("expert_feed_forward_length", layers, running)?;
    let expert_ff = expert_ff.map(|each| each.max()).filter(|&n| n > 0);
    let expert_ff = expert_ff.unwrap_or(ff.max());
    let shared_ff = keys.unsigned("expert_shared_feed_forward_length")?;
    Ok(Some(Experts {
        total,
        used,
        shared,
        ff: expert_ff,
        shared_ff: match shared_ff.filter(|&n| n > 0) {
            Some(n) if shared > 0 => n,
            _ => expert_ff.saturating_mul(shared),
        },
    }))
}

/// Rows of the embedding; where the file has none, what it says.
fn n_vocab(
    keys: &Keys<'_>,
    tensors: &[Tensor<'_>],
    assumptions: &mut Vec<String>,
) -> Result<u64, Error> {
    let table = tensors.iter().find(|t| t.name == "token_embd.weight");
    if let Some(&rows) = table.and_then(|table| table.dims.get(1)) {
        return Ok(rows);
    }
    let stated = keys.unsigned("vocab_size")?;
    if stated.is_none() {
        assumptions.push("no embedding and no vocab_size: logits are not counted".to_owned());
    }
    Ok(stated.unwrap_or(0))
}
