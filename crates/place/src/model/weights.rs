//! Tensors by kind: what they take, and what of them a generated token reads.

use std::collections::BTreeMap;

use super::{Active, Experts, TypeBytes, Weights};
use crate::bytes::device_tensor_bytes;
use crate::error::Error;
use crate::limits::TENSORS_MAX;

/// A tensor, as the file's header lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// The name of its type, such as `Q4_K`.
    pub ty: &'a str,
    /// Its dimensions, the innermost first.
    pub dims: &'a [u64],
    /// Its bytes, without padding.
    pub bytes: u64,
    /// Its values.
    pub elements: u64,
}

/// Tables of which a token reads one row: of the vocabulary, of positions, and the per-layer embeddings of gemma3n and kin.
const ROW_TABLES: [&str; 4] = [
    "token_embd.weight",
    "per_layer_token_embd.weight",
    "position_embd.weight",
    "token_types.weight",
];

impl Tensor<'_> {
    /// The layer that it belongs to, and the rest of its name.
    pub(super) fn layer(&self) -> Option<(u64, &str)> {
        let (digits, rest) = self.name.strip_prefix("blk.")?.split_once('.')?;
        Some((digits.parse().ok()?, rest))
    }

    /// Whether it is routed experts: all of a layer in one tensor, or (older files) one expert in one tensor.
    fn is_routed(&self) -> Routed {
        let Some((_, rest)) = self.layer() else {
            return Routed::No;
        };
        if rest.contains("_exps.") {
            return Routed::All;
        }
        // `ffn_gate.3.weight`: expert 3.
        let mut parts = rest.split('.');
        match (parts.next(), parts.next(), parts.next()) {
            (Some("ffn_gate" | "ffn_up" | "ffn_down"), Some(expert), Some(_))
                if expert.bytes().all(|b| b.is_ascii_digit()) =>
            {
                Routed::One
            }
            _ => Routed::No,
        }
    }

    fn row_bytes(&self) -> Result<u64, Error> {
        let bad = |problem: &str| Error::Tensor {
            tensor: self.name.to_owned(),
            problem: problem.to_owned(),
        };
        let row_len = self.dims.first().copied().unwrap_or(0);
        let rows = self
            .elements
            .checked_div(row_len)
            .ok_or_else(|| bad("has a dimension of 0"))?;
        self.bytes
            .checked_div(rows)
            .ok_or_else(|| bad("has fewer values than a row"))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Routed {
    No,
    All,
    One,
}

/// Bytes of one layer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LayerBytes {
    pub(super) dense: u64,
    pub(super) experts: u64,
    pub(super) one_expert: u64,
}

/// What all tensors come to.
#[derive(Debug, Default)]
pub(super) struct Sums {
    pub(super) weights: Weights,
    pub(super) active: Active,
    pub(super) n_params: u64,
    pub(super) layers: Vec<LayerBytes>,
    /// Tensors of layers beyond the last one.
    pub(super) beyond: u64,
    /// Whether there are routed experts.
    pub(super) routed: bool,
}

fn add(to: &mut u64, bytes: u64) -> Result<(), Error> {
    *to = to.checked_add(bytes).ok_or(Error::Overflow {
        what: "the tensors",
    })?;
    Ok(())
}

/// Adds all tensors up. Decoding runs the first `running` of `layers` layers.
pub(super) fn sum(
    tensors: &[Tensor<'_>],
    layers: usize,
    running: usize,
    experts: Option<Experts>,
) -> Result<Sums, Error> {
    if tensors.len() > TENSORS_MAX {
        return Err(Error::Option {
            what: "a number of tensors",
            found: tensors.len() as u64,
            expected: "up to 262144",
        });
    }
    let tied = !tensors.iter().any(|t| t.name == "output.weight");
    let total_experts = experts.map_or(1, |e| e.total).max(1);
    let used_experts = experts.map_or(1, |e| e.used);
    let mut sums = Sums {
        layers: vec![LayerBytes::default(); layers],
        ..Sums::default()
    };
    // One expert's tensors of older files, which are many, by layer and type: they are divided once they are all there.
    let mut single: BTreeMap<(usize, &str), u64> = BTreeMap::new();
    let mut total = 0;
    for t in tensors {
        add(&mut total, t.bytes)?;
        add(&mut sums.n_params, t.elements)?;
        let routed = t.is_routed();
        sums.routed |= routed != Routed::No;
        let layer = t
            .layer()
            .map(|(i, _)| usize::try_from(i).unwrap_or(usize::MAX));
        let weights = &mut sums.weights;
        if let Some(i) = layer.filter(|&i| i >= running) {
            sums.beyond += u64::from(i >= layers);
            weights.unused += t.bytes;
            if routed != Routed::No {
                weights.unused_experts += t.bytes;
            }
            continue;
        }
        let on_device = device_tensor_bytes(t.dims, t.elements, t.bytes);
        add(
            &mut weights.device_padding,
            on_device.saturating_sub(t.bytes),
        )?;
        let types = &mut sums.active.by_type;
        // Most tensors have one of few types; names are copied once a type.
        if !types.contains_key(t.ty) {
            types.insert(t.ty.to_owned(), TypeBytes::default());
        }
        let of_type = types.get_mut(t.ty).expect("it was put there");
        match (layer, routed) {
            (Some(i), Routed::All) => {
                let one = t.bytes / total_experts;
                weights.experts += t.bytes;
                sums.layers[i].experts += t.bytes;
                sums.layers[i].one_expert += one;
                of_type.one_expert += one;
            }
            (Some(i), Routed::One) => {
                weights.experts += t.bytes;
                sums.layers[i].experts += t.bytes;
                *single.entry((i, t.ty)).or_default() += t.bytes;
            }
            (Some(i), Routed::No) => {
                weights.dense += t.bytes;
                sums.layers[i].dense += t.bytes;
                of_type.dense += t.bytes;
            }
            (None, _) if ROW_TABLES.contains(&t.name) => {
                weights.embedding += t.bytes;
                add(&mut sums.active.embedding_row, t.row_bytes()?)?;
                if tied && t.name == "token_embd.weight" {
                    of_type.dense += t.bytes;
                }
            }
            (None, _) if t.name == "output.weight" => {
                weights.output += t.bytes;
                of_type.dense += t.bytes;
            }
            (None, _) => {
                weights.dense += t.bytes;
                of_type.dense += t.bytes;
            }
        }
    }
    for ((i, ty), bytes) in single {
        let one = bytes / total_experts;
        sums.layers[i].one_expert += one;
        let of_type = sums.active.by_type.get_mut(ty).expect("it was put there");
        of_type.one_expert += one;
    }
    let active = &mut sums.active;
    active
        .by_type
        .retain(|_, of_type| *of_type != TypeBytes::default());
    let mut bytes = active.embedding_row;
    for of_type in active.by_type.values() {
        add(&mut bytes, of_type.dense)?;
        // No overflow: no more are used than there are, and all of them were added up above.
        add(&mut bytes, of_type.one_expert * used_experts)?;
    }
    active.bytes = bytes;
    Ok(sums)
}
