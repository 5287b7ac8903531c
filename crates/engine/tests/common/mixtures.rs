//! Small models with experts, of every architecture that has any: headers, whose weights are made by `engine::synth`.

use engine::model::Contents;
use engine::synth::Recipe;
use gguf::write::Writer;
use gguf::{GgufFile, TensorType};

/// Rows of the vocabulary.
pub const VOCAB: u64 = 120;
pub const LAYERS: usize = 3;
pub const HEADS: u64 = 8;
pub const HEADS_KV: u64 = 2;
pub const HEAD: u64 = 32;
/// Cells that a layer with a window sees.
pub const WINDOW: u32 = 20;

/// Architectures, and what else makes a model of theirs another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Mixtral; its first layer has no experts.
    Llama,
    Qwen2Moe,
    Qwen3Moe,
    /// `qwen3moe` with sigmoids, a scale and groups, as its keys say.
    Grouped,
    Olmoe,
    GptOss,
}

impl Kind {
    pub const ALL: [Self; 6] = [
        Self::Llama,
        Self::Qwen2Moe,
        Self::Qwen3Moe,
        Self::Grouped,
        Self::Olmoe,
        Self::GptOss,
    ];

    pub fn arch(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2Moe => "qwen2moe",
            Self::Qwen3Moe | Self::Grouped => "qwen3moe",
            Self::Olmoe => "olmoe",
            Self::GptOss => "gpt-oss",
        }
    }
}

/// Sizes of a model.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub width: u64,
    /// Of layers without experts.
    pub ff: u64,
    pub expert_ff: u64,
    pub shared_ff: u64,
    pub experts: u64,
    pub used: u64,
}

/// A header: matrices have the types, one after the other. With `yarn` rope is scaled.
pub fn header(kind: Kind, sizes: Sizes, types: &[TensorType], yarn: bool) -> GgufFile {
    let Sizes {
        width,
        ff,
        expert_ff,
        shared_ff,
        experts,
        used,
    } = sizes;
    let arch = kind.arch();
    let mut writer = Writer::new(32).unwrap();
    writer.set("general.architecture", arch).unwrap();
    let mut set = |key: &str, value: u64| {
        let value = u32::try_from(value).unwrap();
        writer.set(&format!("{arch}.{key}"), value).unwrap();
    };
    set("block_count", LAYERS as u64);
    set("context_length", 4096);
    set("embedding_length", width);
    set("feed_forward_length", ff);
    set("attention.head_count", HEADS);
    set("attention.head_count_kv", HEADS_KV);
    set("attention.key_length", HEAD);
    set("attention.value_length", HEAD);
    set("expert_count", experts);
    set("expert_used_count", used);
    set("expert_feed_forward_length", expert_ff);
    match kind {
        Kind::Llama => set("leading_dense_block_count", 1),
        Kind::Qwen2Moe => set("expert_shared_feed_forward_length", shared_ff),
        Kind::GptOss => set("attention.sliding_window", u64::from(WINDOW)),
        Kind::Grouped => {
            set("expert_gating_func", 2);
            set("expert_group_count", 3);
            set("expert_group_used_count", 2);
        }
        Kind::Qwen3Moe | Kind::Olmoe => {}
    }
    let mut set = |key: &str, value: gguf::Value| {
        writer.set(&format!("{arch}.{key}"), value).unwrap();
    };
    set("attention.layer_norm_rms_epsilon", 1e-5_f32.into());
    if kind == Kind::Grouped {
        set("expert_weights_norm", true.into());
        set("expert_weights_scale", 2.5_f32.into());
    }
    if yarn {
        set("rope.scaling.type", "yarn".into());
        set("rope.scaling.factor", 4_f32.into());
        set("rope.scaling.original_context_length", 64_u32.into());
    }
    let mut next = types.iter().copied().cycle();
    let mut add = |name: &str, dims: &[u64]| {
        let is_float = dims.len() == 1 || name.ends_with("bias") || name.contains("gate_inp");
        let ty = match is_float {
            true => TensorType::F32,
            false => next.next().unwrap(),
        };
        writer.tensor_from(name, ty, dims, |_| Ok(())).unwrap();
    };
    add("token_embd.weight", &[width, VOCAB]);
    add("output_norm.weight", &[width]);
    add("output.weight", &[width, VOCAB]);
    let (q, kv) = (HEADS * HEAD, HEADS_KV * HEAD);
    for i in 0..LAYERS {
        let mut add = |name: &str, dims: &[u64]| add(&format!("blk.{i}.{name}"), dims);
        add("attn_norm.weight", &[width]);
        add("attn_q.weight", &[width, q]);
        add("attn_k.weight", &[width, kv]);
        add("attn_v.weight", &[width, kv]);
        add("attn_output.weight", &[q, width]);
        if matches!(kind, Kind::Qwen2Moe | Kind::GptOss) {
            add("attn_q.bias", &[q]);
            add("attn_k.bias", &[kv]);
            add("attn_v.bias", &[kv]);
        }
        match kind {
            Kind::Qwen3Moe | Kind::Grouped => {
                add("attn_q_norm.weight", &[HEAD]);
                add("attn_k_norm.weight", &[HEAD]);
            }
            Kind::Olmoe => {
                add("attn_q_norm.weight", &[q]);
                add("attn_k_norm.weight", &[kv]);
            }
            Kind::GptOss => {
                add("attn_output.bias", &[width]);
                add("attn_sinks.weight", &[HEADS]);
            }
            Kind::Llama | Kind::Qwen2Moe => {}
        }
        add(
            match kind {
                Kind::GptOss => "post_attention_norm.weight",
                _ => "ffn_norm.weight",
            },
            &[width],
        );
        if kind == Kind::Llama && i == 0 {
            add("ffn_gate.weight", &[width, ff]);
            add("ffn_up.weight", &[width, ff]);
            add("ffn_down.weight", &[ff, width]);
            continue;
        }
        add("ffn_gate_inp.weight", &[width, experts]);
        add("ffn_gate_exps.weight", &[width, expert_ff, experts]);
        add("ffn_up_exps.weight", &[width, expert_ff, experts]);
        add("ffn_down_exps.weight", &[expert_ff, width, experts]);
        if kind == Kind::GptOss {
            add("ffn_gate_inp.bias", &[experts]);
            add("ffn_gate_exps.bias", &[expert_ff, experts]);
            add("ffn_up_exps.bias", &[expert_ff, experts]);
            add("ffn_down_exps.bias", &[width, experts]);
        }
        if kind == Kind::Qwen2Moe {
            add("ffn_gate_inp_shexp.weight", &[width]);
            add("ffn_gate_shexp.weight", &[width, shared_ff]);
            add("ffn_up_shexp.weight", &[width, shared_ff]);
            add("ffn_down_shexp.weight", &[shared_ff, width]);
        }
    }
    let (header, _) = writer.header().unwrap();
    GgufFile::from_header("small", &header).unwrap()
}

/// What makes the weights of all of them.
pub fn recipe() -> Recipe {
    Recipe {
        seed: 11,
        router_skew: 0.0,
    }
}

pub fn contents() -> Contents {
    Contents::Synthetic(recipe())
}
