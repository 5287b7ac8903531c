//! Headers that lie: an error or figures, never a panic, and the laws that figures obey.

mod common;

use std::borrow::Cow;
use std::collections::BTreeMap;

use common::{Header, cache};
use place::Error;
use place::bytes::{
    Cache, KvType, Streams, device_work_bytes, kv_alloc_bytes, kv_bytes, recurrent_bytes,
    work_bytes,
};
use place::limits::LAYERS_MAX;
use place::model::{Model, Tensor, Value};
use proptest::prelude::*;

const ARCHS: [&str; 12] = [
    "llama",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "exaone4",
    "laguna",
    "deepseek2",
    "deepseek4",
    "qwen35",
    "bailingmoe3",
    "unheard-of",
];

const KEYS: [&str; 33] = [
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "context_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "attention.kv_lora_rank",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attention.shared_kv_layers",
    "attention.recurrent_layers",
    "full_attention_interval",
    "nextn_predict_layers",
    "rope.dimension_count",
    "expert_count",
    "expert_used_count",
    "expert_shared_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "vocab_size",
    "ssm.conv_kernel",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.group_count",
    "kda.head_dim",
    "wkv.head_size",
    "shortconv.l_cache",
];

const NAMES: [&str; 14] = [
    "token_embd.weight",
    "output.weight",
    "output_norm.weight",
    "per_layer_token_embd.weight",
    "blk.0.attn_q.weight",
    "blk.1.ffn_up_exps.weight",
    "blk.1.ffn_up.3.weight",
    "blk.2.ssm_a",
    "blk.3.nextn.eh_proj.weight",
    "blk.18446744073709551615.x",
    "blk.18446744073709551616.x",
    "blk..",
    "blk.1.ffn_gate_shexp.weight",
    "",
];

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        0_u64..8,
        Just(32),
        Just(128),
        Just(256),
        Just(u64::from(u32::MAX)),
        Just(1 << 40),
        Just(u64::MAX / 2),
        Just(u64::MAX),
        any::<u64>(),
    ]
}

fn value() -> impl Strategy<Value = Value<'static>> {
    prop_oneof![
        8 => number().prop_map(Value::Unsigned),
        1 => prop::collection::vec(number(), 0..9).prop_map(|v| Value::Unsigneds(Cow::Owned(v))),
        1 => prop::collection::vec(any::<bool>(), 0..9).prop_map(|v| Value::Bools(Cow::Owned(v))),
        1 => any::<bool>().prop_map(Value::Bool),
        1 => Just(Value::Text("x".into())),
        1 => Just(Value::Other("a float".to_owned())),
    ]
}

fn kv_type() -> impl Strategy<Value = KvType> {
    (0..KvType::ALL.len()).prop_map(|i| KvType::ALL[i])
}

fn any_cache() -> impl Strategy<Value = Cache> {
    let streams = prop_oneof![Just(Streams::Shared), Just(Streams::Own)];
    (number(), number(), streams, kv_type(), kv_type(), number()).prop_map(
        |(n_ctx, n_seq, streams, type_k, type_v, n_ubatch)| Cache {
            n_ctx,
            n_seq,
            streams,
            type_k,
            type_v,
            n_ubatch,
        },
    )
}

/// A small model with every number valid; layers of all kinds.
fn sane() -> impl Strategy<Value = Model> {
    let arch = prop_oneof![
        Just("llama"),
        Just("gemma3"),
        Just("gemma3n"),
        Just("laguna"),
        Just("qwen35"),
        Just("deepseek4"),
    ];
    (arch, 1_u64..30, 1_u64..5, 1_u64..9, 1_u64..9, 1_u64..3000).prop_map(
        |(arch, layers, heads, k, v, window)| {
            Header::new(arch, layers)
                .heads(heads * 2, heads, 32 * k, 32 * v)
                .with("attention.sliding_window", window)
                .with("ssm.inner_size", 64)
                .with("ssm.state_size", 16)
                .model()
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn absurd_headers_never_panic(
        arch in 0..ARCHS.len(),
        layers in 1_u64..8,
        keys in prop::collection::btree_map(0..KEYS.len(), value(), 0..20),
        tensors in prop::collection::vec(
            (0..NAMES.len(), prop::collection::vec(number(), 0..5), number(), number()),
            0..12,
        ),
        cache in any_cache(),
        rollback in number(),
    ) {
        let header = Header::new(ARCHS[arch], layers);
        let mut meta: BTreeMap<String, Value<'static>> = header.keys;
        for (key, value) in keys {
            meta.insert(format!("{}.{}", ARCHS[arch], KEYS[key]), value);
        }
        let tensors: Vec<Tensor<'_>> = tensors
            .iter()
            .map(|(name, dims, bytes, elements)| Tensor {
                name: NAMES[*name],
                ty: "Q4_0",
                dims,
                bytes: *bytes,
                elements: *elements,
            })
            .collect();
        if let Ok(model) = Model::describe(&meta, &tensors) {
            let _ = kv_bytes(&model, &cache);
            let _ = kv_alloc_bytes(&model, &cache);
            let _ = recurrent_bytes(&model, cache.n_seq, rollback);
            let _ = work_bytes(&model, cache.n_ctx, cache.n_ubatch);
            let _ = device_work_bytes(&model, cache.n_ctx, cache.n_ubatch, cache.n_seq);
            let sum: u64 = tensors.iter().map(|t| t.bytes).sum();
            prop_assert_eq!(model.weights.total(), sum);
            prop_assert!(model.layers.len() as u64 <= LAYERS_MAX);
        }
    }

    #[test]
    fn more_context_never_takes_less(
        model in sane(),
        n_ctx in 1_u64..100_000,
        more in 0_u64..100_000,
        n_seq in 1_u64..6,
        n_ubatch in 1_u64..5000,
    ) {
        for streams in [Streams::Shared, Streams::Own] {
            for (type_k, type_v) in [(KvType::F16, KvType::F16), (KvType::Q8_0, KvType::Q4_0)] {
                let at = |n_ctx| Cache { streams, ..cache(n_ctx, n_seq, type_k, type_v, n_ubatch) };
                let (less, greater) = (at(n_ctx), at(n_ctx + more));
                let kv = [kv_bytes(&model, &less).unwrap(), kv_bytes(&model, &greater).unwrap()];
                prop_assert!(kv[0].total <= kv[1].total);
                prop_assert_eq!(kv[0].total, kv[0].full + kv[0].windowed);
                let alloc = [
                    kv_alloc_bytes(&model, &less).unwrap(),
                    kv_alloc_bytes(&model, &greater).unwrap(),
                ];
                prop_assert!(alloc[0].total <= alloc[1].total);
                // What other engines take fits into our blocks, and those that see everything take no more than a block a
                // sequence on top.
                prop_assert!(kv[0].windowed <= alloc[0].windowed && kv[0].full <= alloc[0].full);
                prop_assert!(alloc[0].full <= kv[0].full + (n_seq - 1) * alloc[0].full_slab);
                let work = [work_bytes(&model, n_ctx, n_ubatch), work_bytes(&model, n_ctx + more, n_ubatch)];
                prop_assert!(work[0].clone().unwrap().total <= work[1].clone().unwrap().total);
            }
        }
    }

    #[test]
    fn fewer_bits_never_take_more(model in sane(), n_ctx in 1_u64..100_000) {
        // The ladder, and the same for the types that are only compared.
        let of = |type_k, type_v| kv_bytes(&model, &cache(n_ctx, 1, type_k, type_v, 512)).unwrap().total;
        for pair in KvType::ALL.windows(2) {
            prop_assert!(of(pair[1], pair[1]) <= of(pair[0], pair[0]));
            prop_assert!(of(pair[0], pair[1]) <= of(pair[0], pair[0]));
        }
    }
}

#[test]
fn numbers_of_layers_are_bounded() {
    for layers in [0, LAYERS_MAX + 1, 1_000_000_000, u64::MAX] {
        let refused = Header::new("llama", layers).describe().unwrap_err();
        assert!(matches!(refused, Error::Key { .. }), "{layers}");
        assert!(
            refused.to_string().contains("llama.block_count"),
            "{refused}"
        );
    }
    assert_eq!(
        Header::new("llama", LAYERS_MAX).model().n_layer() as u64,
        LAYERS_MAX
    );
}

#[test]
fn keys_that_must_be_there() {
    for key in ["block_count", "embedding_length"] {
        let refused = Header::new("llama", 2).without(key).describe().unwrap_err();
        assert!(matches!(&refused, Error::Missing { .. }), "{key}");
        assert!(refused.to_string().contains(key), "{refused}");
    }
    let none: BTreeMap<String, Value<'_>> = BTreeMap::new();
    assert!(matches!(
        Model::describe(&none, &[]),
        Err(Error::Missing { .. })
    ));
    let mut header = Header::new("llama", 2);
    header
        .keys
        .insert("general.architecture".to_owned(), Value::Unsigned(3));
    assert!(matches!(header.describe(), Err(Error::Key { .. })));
}

#[test]
fn values_that_no_model_has() {
    let bad = |header: Header, key: &str| {
        let refused = header.describe().unwrap_err();
        assert!(matches!(&refused, Error::Key { .. }), "{key}: {refused}");
        assert!(refused.to_string().contains(key), "{refused}");
    };
    let new = || Header::new("llama", 4);
    bad(new().with("embedding_length", 0), "embedding_length");
    bad(
        new().with("attention.key_length", 0),
        "attention.key_length",
    );
    bad(
        new().list("attention.head_count_kv", vec![1, 2, 3]),
        "attention.head_count_kv",
    );
    bad(
        new().flags("attention.head_count", vec![true; 4]),
        "attention.head_count",
    );
    bad(
        new().with("full_attention_interval", 0),
        "full_attention_interval",
    );
    bad(
        new().with("expert_count", 8).with("expert_used_count", 9),
        "expert_used_count",
    );
    bad(
        new().with("expert_count", 8).with("expert_used_count", 0),
        "expert_used_count",
    );
}

#[test]
fn sizes_beyond_64_bits_are_errors() {
    let huge = Header::new("llama", 4)
        .heads(1 << 40, 1 << 40, 1 << 30, 1 << 30)
        .model();
    let overflow = |result: Result<u64, Error>| matches!(result, Err(Error::Overflow { .. }));
    let cache = Cache::new(u64::MAX, KvType::F16, KvType::F16, u64::MAX);
    assert!(overflow(kv_bytes(&huge, &cache).map(|kv| kv.total)));
    assert!(overflow(kv_alloc_bytes(&huge, &cache).map(|kv| kv.total)));
    assert!(overflow(
        work_bytes(&huge, u64::MAX, u64::MAX).map(|work| work.total)
    ));
    let tensor = |name, bytes| Tensor {
        name,
        ty: "F32",
        dims: &[4],
        bytes,
        elements: 4,
    };
    let header = Header::new("llama", 4);
    let twice = [tensor("a", u64::MAX), tensor("b", 1)];
    let refused = Model::describe(&header.keys, &twice).unwrap_err();
    assert!(matches!(refused, Error::Overflow { .. }), "{refused}");
    let state = Header::new("qwen35", 4)
        .with("ssm.inner_size", u64::MAX)
        .with("ssm.state_size", u64::MAX);
    assert!(matches!(state.describe(), Err(Error::Overflow { .. })));
}
