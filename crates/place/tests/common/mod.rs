//! Headers made up for tests.

#![allow(dead_code, reason = "each test binary uses some of the helpers")]

use std::borrow::Cow;
use std::collections::BTreeMap;

use place::Error;
use place::bytes::{Cache, KvType, Streams};
use place::model::{Keeps, Model, Tensor, Value};

/// A header that exists only here.
#[derive(Clone, Debug, Default)]
pub struct Header {
    pub arch: String,
    pub keys: BTreeMap<String, Value<'static>>,
    pub tensors: Vec<(String, &'static str, Vec<u64>)>,
}

/// Values and bytes of a block of a tensor type.
fn block(ty: &str) -> (u64, u64) {
    match ty {
        "F32" => (1, 4),
        "F16" => (1, 2),
        "Q8_0" => (32, 34),
        "Q4_0" => (32, 18),
        _ => panic!("no test uses {ty}"),
    }
}

impl Header {
    /// A model with `layers` layers of width 4096, 32 heads, 8 of them key heads, of 128 values.
    pub fn new(arch: &str, layers: u64) -> Header {
        let mut header = Header {
            arch: arch.to_owned(),
            ..Header::default()
        };
        header.keys.insert(
            "general.architecture".to_owned(),
            Value::Text(arch.to_owned().into()),
        );
        header
            .with("block_count", layers)
            .with("context_length", 131_072)
            .with("vocab_size", 100_000)
            .with("embedding_length", 4096)
            .with("feed_forward_length", 14_336)
            .heads(32, 8, 128, 128)
    }

    fn set(mut self, key: &str, value: Value<'static>) -> Header {
        self.keys.insert(format!("{}.{key}", self.arch), value);
        self
    }

    pub fn with(self, key: &str, n: u64) -> Header {
        self.set(key, Value::Unsigned(n))
    }

    pub fn list(self, key: &str, list: Vec<u64>) -> Header {
        self.set(key, Value::Unsigneds(Cow::Owned(list)))
    }

    pub fn flags(self, key: &str, list: Vec<bool>) -> Header {
        self.set(key, Value::Bools(Cow::Owned(list)))
    }

    pub fn without(mut self, key: &str) -> Header {
        self.keys.remove(&format!("{}.{key}", self.arch));
        self
    }

    pub fn heads(self, heads: u64, heads_kv: u64, head_k: u64, head_v: u64) -> Header {
        self.with("attention.head_count", heads)
            .with("attention.head_count_kv", heads_kv)
            .with("attention.key_length", head_k)
            .with("attention.value_length", head_v)
    }

    pub fn tensor(mut self, name: &str, ty: &'static str, dims: &[u64]) -> Header {
        self.tensors.push((name.to_owned(), ty, dims.to_vec()));
        self
    }

    pub fn describe(&self) -> Result<Model, Error> {
        let tensors: Vec<Tensor<'_>> = self
            .tensors
            .iter()
            .map(|(name, ty, dims)| {
                let elements = dims.iter().product();
                let (values, bytes) = block(ty);
                Tensor {
                    name,
                    ty,
                    dims,
                    bytes: elements / values * bytes,
                    elements,
                }
            })
            .collect();
        Model::describe(&self.keys, &tensors)
    }

    pub fn model(&self) -> Model {
        self.describe().unwrap()
    }
}

/// Layers with cells and no window.
pub fn full(model: &Model) -> Vec<usize> {
    let full = model.caching().filter(|(_, cells)| cells.window.is_none());
    full.map(|(i, _)| i).collect()
}

/// Layers with cells and a window.
pub fn windowed(model: &Model) -> Vec<usize> {
    let windowed = model.caching().filter(|(_, cells)| cells.window.is_some());
    windowed.map(|(i, _)| i).collect()
}

/// Layers that keep just this.
pub fn keeping(model: &Model, keeps: Keeps) -> Vec<usize> {
    let same = |&i: &usize| model.layers[i].keeps == keeps;
    (0..model.layers.len()).filter(same).collect()
}

pub fn cache(n_ctx: u64, n_seq: u64, type_k: KvType, type_v: KvType, n_ubatch: u64) -> Cache {
    Cache {
        n_seq,
        streams: Streams::Shared,
        ..Cache::new(n_ctx, type_k, type_v, n_ubatch)
    }
}

pub const MIB: f64 = 1_048_576.0;
