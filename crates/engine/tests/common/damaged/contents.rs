//! Well-formed files that no model can be made of.

use gguf::{Array, Header, StringArray, TensorType, Value};

use super::{Files, NoticedBy, Sketch, TOKENS};

pub(super) fn add(files: &mut Files<'_>) {
    parameters(files);
    tensors(files);
    mixtures(files);
    tokenizers(files);
}

/// Hyper-parameters that make no sense.
fn parameters(files: &mut Files<'_>) {
    for key in [
        "general.architecture",
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
    ] {
        files.sketch(&format!("without-{key}"), &[key, "missing"], |s| {
            s.remove(key)
        });
    }
    let values: &[(&str, &str, Value, &[&str])] = &[
        (
            "unknown-architecture",
            "general.architecture",
            "mamba".into(),
            &["mamba", "llama", "gemma3"],
        ),
        (
            "architecture-a-number",
            "general.architecture",
            7u32.into(),
            &["u32", "string"],
        ),
        (
            "architecture-not-utf-8",
            "general.architecture",
            Value::String(vec![0xFF, 0xFE].into()),
            &["UTF-8"],
        ),
        ("no-layers", "llama.block_count", 0u32.into(), &["is 0"]),
        (
            "more-layers-than-tensors",
            "llama.block_count",
            3u32.into(),
            &["blk.2."],
        ),
        (
            "absurd-layers",
            "llama.block_count",
            u32::MAX.into(),
            &["4294967295"],
        ),
        (
            "negative-layers",
            "llama.block_count",
            (-1i32).into(),
            &["-1"],
        ),
        (
            "layers-a-text",
            "llama.block_count",
            "two".into(),
            &["string", "integer"],
        ),
        (
            "layers-a-float",
            "llama.block_count",
            2f32.into(),
            &["f32", "integer"],
        ),
        (
            "layers-beyond-32-bits",
            "llama.block_count",
            (1u64 << 32).into(),
            &["4294967296"],
        ),
        (
            "zero-width-key",
            "llama.embedding_length",
            0u32.into(),
            &["is 0"],
        ),
        (
            "other-width",
            "llama.embedding_length",
            32u32.into(),
            &["token_embd.weight", "[64, 301]", "[32, 301]"],
        ),
        (
            "absurd-width-key",
            "llama.embedding_length",
            (1u32 << 31).into(),
            &["2147483648"],
        ),
        (
            "other-ff",
            "llama.feed_forward_length",
            512u32.into(),
            &["ffn_", "512"],
        ),
        ("no-ff", "llama.feed_forward_length", 0u32.into(), &["is 0"]),
        (
            "no-heads",
            "llama.attention.head_count",
            0u32.into(),
            &["is 0"],
        ),
        (
            "more-heads",
            "llama.attention.head_count",
            6u32.into(),
            &["attn_q.weight", "192"],
        ),
        (
            "absurd-heads",
            "llama.attention.head_count",
            1_000_000u32.into(),
            &["1000000"],
        ),
        (
            "heads-per-layer",
            "llama.attention.head_count",
            Value::Array(Array::U32([4, 4].into())),
            &["array of u32"],
        ),
        (
            "no-key-heads",
            "llama.attention.head_count_kv",
            0u32.into(),
            &["is 0"],
        ),
        (
            "key-heads-do-not-divide",
            "llama.attention.head_count_kv",
            3u32.into(),
            &["is 3", "4 heads"],
        ),
        (
            "more-key-heads",
            "llama.attention.head_count_kv",
            8u32.into(),
            &["is 8", "4 heads"],
        ),
        (
            "zero-head",
            "llama.attention.key_length",
            0u32.into(),
            &["is 0"],
        ),
        (
            "absurd-head",
            "llama.attention.value_length",
            1025u32.into(),
            &["1025"],
        ),
        (
            "epsilon-nan",
            "llama.attention.layer_norm_rms_epsilon",
            f32::NAN.into(),
            &["NaN"],
        ),
        (
            "epsilon-negative",
            "llama.attention.layer_norm_rms_epsilon",
            (-1e-5f32).into(),
            &["0 or more"],
        ),
        (
            "epsilon-a-number",
            "llama.attention.layer_norm_rms_epsilon",
            1u32.into(),
            &["u32", "f32"],
        ),
        ("no-context", "llama.context_length", 0u32.into(), &["is 0"]),
        (
            "absurd-context",
            "llama.context_length",
            u32::MAX.into(),
            &["4294967295"],
        ),
        (
            "rope-odd",
            "llama.rope.dimension_count",
            15u32.into(),
            &["is 15", "even"],
        ),
        (
            "rope-beyond-the-head",
            "llama.rope.dimension_count",
            34u32.into(),
            &["is 34", "32"],
        ),
        (
            "rope-base-nan",
            "llama.rope.freq_base",
            f32::NAN.into(),
            &["NaN"],
        ),
        (
            "rope-base-0",
            "llama.rope.freq_base",
            0f32.into(),
            &["is 0"],
        ),
        (
            "rope-base-1",
            "llama.rope.freq_base",
            1f32.into(),
            &["is 1"],
        ),
        (
            "rope-base-negative",
            "llama.rope.freq_base",
            (-10_000f32).into(),
            &["-10000"],
        ),
        (
            "rope-base-infinite",
            "llama.rope.freq_base",
            f64::INFINITY.into(),
            &["inf"],
        ),
        (
            "rope-scaling-unknown",
            "llama.rope.scaling.type",
            "magic".into(),
            &["magic", "yarn"],
        ),
        (
            "rope-scaling-0",
            "llama.rope.scaling.factor",
            0f32.into(),
            &["is 0"],
        ),
        (
            "rope-scaling-nan",
            "llama.rope.scaling.factor",
            f32::NAN.into(),
            &["NaN"],
        ),
    ];
    for (name, key, value, says) in values {
        let says: Vec<&str> = match says.iter().any(|text| {
            text.contains("weight") || text.starts_with("blk") || text.starts_with("ffn")
        }) {
            // A tensor is the place.
            true => says.to_vec(),
            false if *name == "unknown-architecture" => says.to_vec(),
            false => says.iter().copied().chain([*key]).collect(),
        };
        files.sketch(name, &says, |s| s.set(key, value.clone()));
    }
    files.sketch(
        "yarn-without-factor",
        &["llama.rope.scaling.factor", "yarn"],
        |s| {
            s.set("llama.rope.scaling.type", "yarn");
        },
    );
    files.sketch(
        "heads-do-not-divide",
        &["llama.attention.head_count", "is 5", "64"],
        |s| {
            s.remove("llama.attention.key_length");
            s.remove("llama.attention.head_count_kv");
            s.set("llama.attention.head_count", 5u32);
        },
    );
    files.sketch(
        "one-huge-head",
        &["llama.attention.head_count", "2048"],
        |s| {
            s.remove("llama.attention.key_length");
            s.set("llama.attention.head_count", 1u32);
            s.set("llama.attention.head_count_kv", 1u32);
            s.set("llama.embedding_length", 2048u32);
        },
    );
    let head_of_17 = files.sketch("head-of-17", &["multiple of 16", "17"], |s| {
        s.set("llama.attention.value_length", 17u32);
        for i in 0..2 {
            s.tensor(
                &format!("blk.{i}.attn_v.weight"),
                TensorType::F32,
                &[64, 34],
            );
            s.tensor(
                &format!("blk.{i}.attn_output.weight"),
                TensorType::F32,
                &[68, 64],
            );
        }
    });
    head_of_17.noticed_by = NoticedBy::Session;
}

/// Tensors that are not there, or not what they should be.
fn tensors(files: &mut Files<'_>) {
    for name in [
        "token_embd.weight",
        "output_norm.weight",
        "blk.0.attn_norm.weight",
        "blk.1.attn_k.weight",
        "blk.1.ffn_down.weight",
    ] {
        files.sketch(&format!("without-{name}"), &[name, "missing"], |s| {
            s.remove_tensor(name)
        });
    }
    use TensorType::{F32, I8, Q8_0, TQ1_0};
    let down = "blk.1.ffn_down.weight";
    type Case = (
        &'static str,
        &'static str,
        TensorType,
        &'static [u64],
        &'static [&'static str],
    );
    let shapes: &[Case] = &[
        (
            "transposed",
            "blk.0.attn_q.weight",
            F32,
            &[128, 64],
            &["[128, 64]", "[64, 128]"],
        ),
        (
            "short-norm",
            "blk.1.ffn_norm.weight",
            F32,
            &[63],
            &["[63]", "[64]"],
        ),
        (
            "norm-a-matrix",
            "output_norm.weight",
            F32,
            &[64, 2],
            &["[64, 2]", "[64]"],
        ),
        (
            "matrix-a-vector",
            down,
            F32,
            &[256 * 64],
            &["[16384]", "[256, 64]"],
        ),
        (
            "matrix-of-rank-4",
            down,
            F32,
            &[256, 8, 2, 4],
            &["[256, 8, 2, 4]"],
        ),
        (
            "unsupported-type",
            down,
            TQ1_0,
            &[256, 64],
            &["TQ1_0", "supported", "Q4_K", "MXFP4"],
        ),
        (
            "integers",
            down,
            I8,
            &[256, 64],
            &["I8", "supported", "Q4_K"],
        ),
        (
            "unsupported-embedding",
            "token_embd.weight",
            I8,
            &[64, 301],
            &["I8", "supported"],
        ),
        (
            "quantised-norm",
            "output_norm.weight",
            Q8_0,
            &[64],
            &["Q8_0", "F32"],
        ),
        (
            "fewer-rows",
            "token_embd.weight",
            Q8_0,
            &[64, 299],
            &["tokenizer.ggml.tokens", "300", "299"],
        ),
        (
            "embedding-a-vector",
            "token_embd.weight",
            Q8_0,
            &[64],
            &["1"],
        ),
        (
            "output-of-other-size",
            "output.weight",
            F32,
            &[64, 300],
            &["[64, 300]", "[64, 301]"],
        ),
        (
            "bias-of-other-size",
            "blk.0.attn_q.bias",
            F32,
            &[64],
            &["[64]", "[128]"],
        ),
        (
            "rope-factors-too-many",
            "rope_freqs.weight",
            F32,
            &[32],
            &["[32]", "[16]"],
        ),
    ];
    for (name, tensor, ty, dims, says) in shapes {
        let says: Vec<&str> = says.iter().copied().chain([*tensor]).collect();
        files.sketch(name, &says, |s| s.tensor(tensor, *ty, dims));
    }
    // Four zero bytes are the factor 0.
    let mut sketch = Sketch::sound();
    sketch.tensor("rope_freqs.weight", F32, &[16]);
    let mut bytes = sketch.bytes();
    let header = Header::parse(&bytes).expect("it is sound");
    let factors = header.tensors.last().expect("it was added").offset as usize;
    bytes[factors..factors + 4].fill(0);
    files.bytes("rope-factor-0", &bytes, &["rope_freqs.weight", "holds 0"]);
    bytes[factors..factors + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    files.bytes("rope-factor-nan", &bytes, &["rope_freqs.weight", "NaN"]);
}

/// Experts that are not there, or not what they should be.
fn mixtures(files: &mut Files<'_>) {
    type Change = fn(&mut Sketch);
    use TensorType::{F16, F32, Q4_0, Q8_0, TQ1_0};
    let cases: &[(&str, &[&str], Change)] = &[
        ("experts-unused", &["llama.expert_used_count"], |s| {
            s.remove("llama.expert_used_count");
        }),
        (
            "more-experts-used",
            &["llama.expert_used_count", "is 9"],
            |s| {
                s.set("llama.expert_used_count", 9u32);
            },
        ),
        ("absurd-experts", &["llama.expert_count", "is 1025"], |s| {
            s.set("llama.expert_count", 1025u32);
        }),
        ("no-experts", &["blk.1.ffn_gate.weight", "missing"], |s| {
            s.set("llama.expert_count", 0u32);
        }),
        (
            "more-experts",
            &["blk.1.ffn_gate_exps.weight", "[64, 128, 8]", "[64, 128, 9]"],
            |s| {
                s.set("llama.expert_count", 9u32);
            },
        ),
        (
            "experts-everywhere",
            &["blk.0.ffn_gate_exps.weight", "missing"],
            |s| {
                s.set("llama.leading_dense_block_count", 0u32);
            },
        ),
        (
            "groups-do-not-divide",
            &["llama.expert_group_count", "3 groups"],
            |s| {
                s.set("llama.expert_group_count", 3u32);
                s.set("llama.expert_group_used_count", 3u32);
            },
        ),
        (
            "groups-too-small",
            &["llama.expert_group_count", "1 of 8 groups"],
            |s| {
                s.set("llama.expert_group_count", 8u32);
                s.set("llama.expert_group_used_count", 1u32);
            },
        ),
        ("groups-unused", &["llama.expert_group_used_count"], |s| {
            s.set("llama.expert_group_count", 4u32);
        }),
        (
            "unknown-gating",
            &["llama.expert_gating_func", "is 7"],
            |s| {
                s.set("llama.expert_gating_func", 7u32);
            },
        ),
        (
            "weights-scaled-by-nan",
            &["llama.expert_weights_scale", "NaN"],
            |s| {
                s.set("llama.expert_weights_scale", f32::NAN);
            },
        ),
        (
            "absurd-expert-width",
            &["llama.expert_feed_forward_length"],
            |s| {
                s.set("llama.expert_feed_forward_length", u32::MAX);
            },
        ),
        (
            "router-missing",
            &["blk.1.ffn_gate_inp.weight", "missing"],
            |s| {
                s.remove_tensor("blk.1.ffn_gate_inp.weight");
            },
        ),
        (
            "router-of-fewer",
            &["blk.1.ffn_gate_inp.weight", "[64, 7]"],
            |s| {
                s.tensor("blk.1.ffn_gate_inp.weight", F32, &[64, 7]);
            },
        ),
        (
            "router-quantised",
            &["blk.1.ffn_gate_inp.weight", "Q8_0", "F32"],
            |s| {
                s.tensor("blk.1.ffn_gate_inp.weight", Q8_0, &[64, 8]);
            },
        ),
        (
            "stack-of-fewer",
            &["blk.1.ffn_up_exps.weight", "[64, 128, 7]"],
            |s| {
                s.tensor("blk.1.ffn_up_exps.weight", Q4_0, &[64, 128, 7]);
            },
        ),
        (
            "stack-flat",
            &["blk.1.ffn_up_exps.weight", "[64, 1024]"],
            |s| {
                s.tensor("blk.1.ffn_up_exps.weight", Q4_0, &[64, 1024]);
            },
        ),
        (
            "stack-unsupported",
            &["blk.1.ffn_down_exps.weight", "TQ1_0", "Q4_K"],
            |s| {
                s.set("llama.expert_feed_forward_length", 256u32);
                s.tensor("blk.1.ffn_gate_exps.weight", Q4_0, &[64, 256, 8]);
                s.tensor("blk.1.ffn_up_exps.weight", Q4_0, &[64, 256, 8]);
                s.tensor("blk.1.ffn_down_exps.weight", TQ1_0, &[256, 64, 8]);
            },
        ),
        (
            "one-bias-missing",
            &["blk.1.ffn_up_exps.bias", "missing"],
            |s| {
                s.tensor("blk.1.ffn_gate_exps.bias", F32, &[128, 8]);
            },
        ),
        (
            "bias-in-halves",
            &["blk.1.ffn_gate_exps.bias", "F16", "F32"],
            |s| {
                s.tensor("blk.1.ffn_gate_exps.bias", F16, &[128, 8]);
            },
        ),
    ];
    for (name, says, change) in cases {
        let mut sketch = Sketch::mixture();
        change(&mut sketch);
        files.bytes(&format!("mixture-{name}"), &sketch.bytes(), says);
    }
}

/// Vocabularies and templates.
fn tokenizers(files: &mut Files<'_>) {
    for key in ["model", "tokens", "merges"] {
        let key = format!("tokenizer.ggml.{key}");
        files.sketch(&format!("without-{key}"), &[&key], |s| s.remove(&key));
    }
    let strings = |items: &[&str]| Value::from(items.iter().collect::<StringArray>());
    let tokens: Vec<String> = match Sketch::sound()
        .keys
        .into_iter()
        .find(|(k, _)| k == "tokenizer.ggml.tokens")
    {
        Some((_, Value::Array(Array::String(tokens)))) => tokens
            .iter()
            .map(|t| String::from_utf8_lossy(t).into_owned())
            .collect(),
        _ => unreachable!("the sketch has tokens"),
    };
    let changed = |change: fn(&mut Vec<String>)| {
        let mut tokens = tokens.clone();
        change(&mut tokens);
        Value::from(tokens.iter().collect::<StringArray>())
    };
    let values: &[(&str, &str, Value, &[&str])] = &[
        (
            "unknown-tokenizer",
            "model",
            "morse".into(),
            &["morse", "gpt2"],
        ),
        ("tokenizer-a-number", "model", 5u32.into(), &["u32"]),
        (
            "unknown-pre-tokenizer",
            "pre",
            "nobody".into(),
            &["nobody", "llama-bpe"],
        ),
        ("no-vocabulary", "tokens", strings(&[]), &["0 entries"]),
        (
            "vocabulary-of-numbers",
            "tokens",
            Value::Array(Array::U32((0..300).collect())),
            &["array of u32"],
        ),
        (
            "duplicate-token",
            "tokens",
            changed(|t| t[280] = t[270].clone()),
            &["270", "280"],
        ),
        (
            "token-too-long",
            "tokens",
            changed(|t| t[280] = "y".repeat(10_000)),
            &["token 280", "10000"],
        ),
        (
            "fewer-types",
            "token_type",
            Value::Array(Array::I32([1; 299].into())),
            &["299", "300"],
        ),
        (
            "types-of-text",
            "token_type",
            strings(&["normal"]),
            &["array of string"],
        ),
        (
            "merge-without-space",
            "merges",
            strings(&["ab"]),
            &["merge 0", "ab"],
        ),
        (
            "merge-of-unknown",
            "merges",
            strings(&["a d", "zz y"]),
            &["merge 1", "zz"],
        ),
        (
            "merges-of-numbers",
            "merges",
            Value::Array(Array::F32([1.0].into())),
            &["array of f32"],
        ),
        ("bos-beyond", "bos_token_id", 300u32.into(), &["300"]),
        (
            "eos-absurd",
            "eos_token_id",
            (1u64 << 40).into(),
            &["eos_token_id"],
        ),
        ("bos-a-text", "bos_token_id", "<s>".into(), &["string"]),
        (
            "add-bos-a-number",
            "add_bos_token",
            1u32.into(),
            &["u32", "bool"],
        ),
    ];
    for (name, key, value, says) in values {
        let key = format!("tokenizer.ggml.{key}");
        let mut says = says.to_vec();
        // Where a token or a merge is the place, its number says so.
        if !says
            .iter()
            .any(|t| t.starts_with("merge ") || t.starts_with("token "))
            && *name != "duplicate-token"
        {
            says.push(&key);
        }
        files.sketch(name, &says, |s| s.set(&key, value.clone()));
    }
    files.sketch(
        "bos-without-a-token",
        &["tokenizer.ggml.bos_token_id"],
        |s| {
            s.remove("tokenizer.ggml.bos_token_id");
            s.set("tokenizer.ggml.add_bos_token", true);
        },
    );
    files.sketch(
        "more-tokens-than-rows",
        &["tokenizer.ggml.tokens", "302", "301", "token_embd.weight"],
        |s| {
            let more = changed(|t| t.extend(["Q1", "Q2"].map(str::to_owned)));
            s.set("tokenizer.ggml.tokens", more);
            s.set("tokenizer.ggml.token_type", Box::<[i32]>::from([1; 302]));
        },
    );
    files.sketch("scores-missing", &["tokenizer.ggml.scores"], |s| {
        s.set("tokenizer.ggml.model", "llama");
    });
    files.sketch("score-nan", &["score of token 7"], |s| {
        s.set("tokenizer.ggml.model", "llama");
        let score = |i| if i == 7 { f32::NAN } else { -(i as f32) };
        s.set(
            "tokenizer.ggml.scores",
            (0..TOKENS).map(score).collect::<Box<[f32]>>(),
        );
    });
    for (name, template, says) in [
        (
            "template-unclosed",
            Value::from("{% for m in messages %}"),
            "template",
        ),
        ("template-a-number", 3u32.into(), "tokenizer.chat_template"),
        (
            "template-huge",
            "x".repeat(2 << 20).as_str().into(),
            "2097152",
        ),
    ] {
        let file = files.sketch(name, &[says], |s| {
            s.set("tokenizer.chat_template", template)
        });
        file.noticed_by = NoticedBy::Chat;
    }
}
