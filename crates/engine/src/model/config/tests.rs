//! Every key that is read: what a sound file gives, and that a value out of range is refused by name.

use super::*;
use crate::model::arch;

const VOCAB: usize = 100;

/// A file with what all architectures need, and nothing else.
fn sound(arch: &str) -> Metadata {
    let mut meta = Metadata::new();
    for (key, n) in [
        ("block_count", 7_u32),
        ("context_length", 1024),
        ("embedding_length", 128),
        ("feed_forward_length", 256),
        ("attention.head_count", 4),
    ] {
        meta.set(&format!("{arch}.{key}"), n);
    }
    meta.set(
        &format!("{arch}.attention.layer_norm_rms_epsilon"),
        1e-5_f32,
    );
    meta
}

fn read(arch: &str, changes: &[(&str, Value)]) -> Result<Config, Error> {
    let mut meta = sound(arch);
    for (key, value) in changes {
        meta.set(&format!("{arch}.{key}"), value.clone());
    }
    let read = arch::read(&meta, arch, VOCAB).expect("the architecture is known");
    read.map(|(_, config)| config)
}

fn error(arch: &str, changes: &[(&str, Value)]) -> String {
    match read(arch, changes) {
        Ok(_) => panic!("{arch} takes {changes:?}"),
        Err(error) => error.to_string(),
    }
}

/// A change is refused, and the message has the key's full name and this text.
fn refused(arch: &str, key: &str, value: impl Into<Value>, text: &str) {
    let message = error(arch, &[(key, value.into())]);
    assert!(
        message.contains(&format!("{arch}.{key}")) && message.contains(text),
        "{arch}.{key}, {text}: {message}"
    );
}

#[test]
fn plain_choices_are_made_where_keys_are_missing() {
    let c = read("llama", &[]).unwrap();
    assert_eq!((c.n_layer, c.n_ctx_train, c.n_vocab), (7, 1024, VOCAB));
    assert_eq!((c.width, c.ff, c.heads, c.heads_kv), (128, 256, 4, 4));
    assert_eq!((c.head_k, c.head_v), (32, 32));
    assert_eq!((c.rope.dims, c.rope.freq_base), (32, 10_000.0));
    assert_eq!(c.rope.scaling, Scaling::None);
    assert_eq!((c.window, c.windowed), (None, vec![false; 7]));
}

#[test]
fn counts_are_bounded() {
    for (key, max) in [
        ("block_count", LAYERS_MAX),
        ("context_length", CONTEXT_MAX),
        ("embedding_length", WIDTH_MAX),
        ("feed_forward_length", WIDTH_MAX),
        ("attention.head_count", HEADS_MAX),
        ("attention.head_count_kv", HEADS_MAX),
        ("attention.key_length", HEAD_MAX),
        ("attention.value_length", HEAD_MAX),
        ("rope.dimension_count", HEAD_MAX),
    ] {
        let expected = format!("expected 1 to {max}");
        refused("llama", key, 0_u32, &expected);
        refused("llama", key, max + 1, &expected);
        refused("llama", key, -1_i32, "-1");
        refused("llama", key, u64::MAX, &u64::MAX.to_string());
        refused("llama", key, "many", "string");
    }
    // What no other key depends on may be as large as it can be.
    for (key, max) in [
        ("block_count", LAYERS_MAX),
        ("context_length", CONTEXT_MAX),
        ("feed_forward_length", WIDTH_MAX),
        ("attention.value_length", HEAD_MAX),
    ] {
        assert!(read("llama", &[(key, max.into())]).is_ok(), "{key}");
    }
}

#[test]
fn what_cannot_be_guessed_must_be_there() {
    for key in [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ] {
        let mut meta = Metadata::new();
        let full = format!("llama.{key}");
        for (name, value) in sound("llama").iter().filter(|(name, _)| *name != full) {
            meta.set(name, value.clone());
        }
        let read = arch::read(&meta, "llama", VOCAB).expect("the architecture is known");
        let message = read.err().expect("something is missing").to_string();
        assert!(message.contains(&full), "{message}");
    }
}

#[test]
fn heads_divide_what_they_share() {
    refused(
        "llama",
        "attention.head_count_kv",
        3_u32,
        "does not divide 4 heads",
    );
    refused(
        "llama",
        "attention.head_count_kv",
        8_u32,
        "does not divide 4 heads",
    );
    refused(
        "llama",
        "attention.head_count",
        3_u32,
        "does not divide the width of 128",
    );
    let wide = [
        ("embedding_length", 8192_u32.into()),
        ("attention.head_count", 4_u32.into()),
    ];
    let message = error("llama", &wide);
    assert!(
        message.contains("llama.attention.head_count") && message.contains("2048"),
        "{message}"
    );
    // With sizes of heads of their own, nothing needs to divide the width.
    let own = [
        ("attention.head_count", 3_u32.into()),
        ("attention.key_length", 48_u32.into()),
        ("attention.value_length", 64_u32.into()),
    ];
    let c = read("llama", &own).unwrap();
    assert_eq!((c.heads, c.heads_kv, c.head_k, c.head_v), (3, 3, 48, 64));
}

#[test]
fn floats_are_bounded() {
    let eps = "attention.layer_norm_rms_epsilon";
    refused("llama", eps, -1e-9_f32, "expected 0 or more");
    for bad in [f32::NAN, f32::INFINITY] {
        for key in [
            eps,
            "rope.freq_base",
            "rope.scaling.factor",
            "rope.scale_linear",
        ] {
            refused("llama", key, bad, &format!("is {bad}"));
        }
    }
    for bad in [-5.0_f32, 0.0, 1.0] {
        refused("llama", "rope.freq_base", bad, "expected more than 1");
        refused("gemma3", "rope.freq_base_swa", bad, "expected more than 1");
    }
    for bad in [-5.0_f32, 0.0] {
        for key in ["rope.scaling.factor", "rope.scale_linear"] {
            refused("llama", key, bad, "expected more than 0");
        }
        for key in ["final_logit_softcapping", "attn_logit_softcapping"] {
            refused("gemma3", key, bad, "expected more than 0");
        }
    }
    refused("llama", "rope.freq_base", "fast", "string");
}

#[test]
fn rope_turns_pairs_of_a_head() {
    refused("llama", "rope.dimension_count", 31_u32, "even");
    refused(
        "llama",
        "rope.dimension_count",
        34_u32,
        "up to the head size 32",
    );
    let part = read("llama", &[("rope.dimension_count", 16_u32.into())]).unwrap();
    assert_eq!(part.rope.dims, 16);
}

#[test]
fn rope_scaling_is_of_a_known_type() {
    let scaling = |changes: &[(&str, Value)]| read("llama", changes).unwrap().rope.scaling;
    let factor = || ("rope.scaling.factor", Value::from(4.0_f32));
    let ty = |name: &str| ("rope.scaling.type", Value::from(name));
    let linear = Scaling::Linear { factor: 4.0 };
    assert_eq!(scaling(&[factor()]), linear);
    assert_eq!(scaling(&[("rope.scale_linear", 4.0_f32.into())]), linear);
    assert_eq!(scaling(&[factor(), ty("linear")]), linear);
    assert_eq!(scaling(&[factor(), ty("none")]), Scaling::None);
    let yarn = Scaling::Yarn {
        factor: 4.0,
        n_ctx_original: 1024,
        attention_factor: 1.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
    };
    assert_eq!(scaling(&[factor(), ty("yarn")]), yarn);
    refused(
        "llama",
        "rope.scaling.type",
        "bent",
        "expected none, linear or yarn",
    );
    let message = error("llama", &[ty("yarn")]);
    assert!(message.contains("llama.rope.scaling.factor"), "{message}");
    for key in ["attn_factor", "yarn_beta_fast", "yarn_beta_slow"] {
        let key = format!("rope.scaling.{key}");
        let message = error("llama", &[factor(), ty("yarn"), (&key, 0.0_f32.into())]);
        assert!(message.contains(&format!("llama.{key}")), "{message}");
    }
    let key = "rope.scaling.original_context_length";
    for bad in [0, CONTEXT_MAX + 1] {
        let message = error("llama", &[factor(), ty("yarn"), (key, bad.into())]);
        assert!(message.contains(&format!("llama.{key}")), "{message}");
    }
}

/// A model of 16 experts, of which 4 are used, and some keys more.
fn routing(arch: &str, more: &[(&str, Value)]) -> Routing {
    let mut changes = vec![
        ("expert_count", 16_u32.into()),
        ("expert_used_count", 4_u32.into()),
    ];
    changes.extend_from_slice(more);
    let experts = read(arch, &changes).unwrap().experts;
    experts.expect("it has experts").routing
}

#[test]
fn experts_are_weighed_as_the_architecture_does_unless_the_file_says() {
    for (arch, weighing) in [
        ("llama", Weighing::SoftmaxOfChosen),
        ("qwen2moe", Weighing::Softmax),
        ("qwen3moe", Weighing::SoftmaxOfChosen),
        ("olmoe", Weighing::Softmax),
        ("gpt-oss", Weighing::SoftmaxOfChosen),
    ] {
        let plain = routing(arch, &[]);
        let expected = Routing {
            experts: 16,
            used: 4,
            weighing,
            scale: 1.0,
            groups: None,
        };
        assert_eq!(plain, expected, "{arch}");
    }
    let gating = |n: u32| ("expert_gating_func", Value::from(n));
    let norm = |is: bool| ("expert_weights_norm", Value::from(is));
    for (arch, keys, weighing) in [
        ("olmoe", vec![norm(true)], Weighing::SoftmaxOfChosen),
        ("qwen3moe", vec![norm(false)], Weighing::Softmax),
        ("olmoe", vec![gating(0)], Weighing::Softmax),
        ("olmoe", vec![gating(2)], Weighing::Sigmoid),
        (
            "olmoe",
            vec![gating(2), norm(true)],
            Weighing::SigmoidOfChosen,
        ),
        ("olmoe", vec![gating(3)], Weighing::SoftmaxOfChosen),
    ] {
        assert_eq!(routing(arch, &keys).weighing, weighing, "{arch} {keys:?}");
    }
    for (scale, read) in [(0.0_f32, 1.0), (1.0, 1.0), (2.5, 2.5)] {
        let keys = [("expert_weights_scale", scale.into())];
        assert_eq!(routing("llama", &keys).scale, read);
    }
    let groups = |total: u32, used: u32| {
        let total = ("expert_group_count", total.into());
        let keys = [total, ("expert_group_used_count", used.into())];
        routing("qwen3moe", &keys).groups
    };
    assert_eq!(groups(4, 2), Some(Groups { total: 4, used: 2 }));
    assert_eq!((groups(1, 1), groups(0, 0)), (None, None));
}

#[test]
fn sizes_of_experts_and_layers_without() {
    fn of(changes: &[(&'static str, Value)]) -> Vec<(&'static str, Value)> {
        let mut all = vec![
            ("expert_count", 8_u32.into()),
            ("expert_used_count", 2_u32.into()),
        ];
        all.extend_from_slice(changes);
        all
    }
    let c = read("llama", &of(&[])).unwrap();
    assert_eq!(c.common_ff(), 0);
    let experts = c.experts.unwrap();
    assert_eq!(
        (experts.ff, experts.shared_ff, experts.leading_dense),
        (256, None, 0)
    );
    let own = ("expert_feed_forward_length", 64_u32.into());
    let dense = ("leading_dense_block_count", 2_u32.into());
    let c = read("llama", &of(&[own.clone(), dense])).unwrap();
    assert_eq!(c.common_ff(), 256);
    let experts = c.experts.unwrap();
    assert_eq!((experts.ff, experts.leading_dense), (64, 2));
    let shared = ("expert_shared_feed_forward_length", 96_u32.into());
    let c = read("qwen2moe", &of(&[own, shared])).unwrap();
    assert_eq!(
        (c.common_ff(), c.experts.unwrap().shared_ff),
        (96, Some(96))
    );
    // Every other layer has a window, the first among them.
    let window = ("attention.sliding_window", 128_u32.into());
    let c = read("gpt-oss", &of(&[window])).unwrap();
    assert_eq!(c.window_of(0), Some(128));
    assert_eq!((c.window_of(1), c.window_of(2)), (None, Some(128)));
    // Its gate is the experts' alone on a device.
    assert_eq!(c.gates_without_kernels(), None);
    let dense = ("leading_dense_block_count", 1_u32.into());
    let c = read("gpt-oss", &of(&[dense])).unwrap();
    let gates = c.gates_without_kernels().expect("a dense layer has one");
    assert!(gates.contains("clamped"), "{gates}");
    // A dense file may say that it has no experts.
    assert_eq!(
        read("llama", &[("expert_count", 0_u32.into())])
            .unwrap()
            .experts,
        None
    );
}

#[test]
fn windows_are_given_by_a_number_or_layer_by_layer() {
    const KEY: &str = "attention.sliding_window_pattern";
    let window = || ("attention.sliding_window", Value::from(512_u32));
    let windowed = |pattern: Option<Value>| {
        let changes = [window()].into_iter().chain(pattern.map(|p| (KEY, p)));
        let c = read("gemma3", &changes.collect::<Vec<_>>()).unwrap();
        assert_eq!(c.window, Some(512));
        c.windowed
    };
    let (yes, no) = (true, false);
    assert_eq!(windowed(None), [yes, yes, yes, yes, yes, no, yes]);
    assert_eq!(
        windowed(Some(3_u32.into())),
        [yes, yes, no, yes, yes, no, yes]
    );
    assert_eq!(windowed(Some(1_u32.into())), [no; 7]);
    let flags = [no, yes, yes, no, no, yes, no];
    assert_eq!(
        windowed(Some(Value::Array(Array::Bool(flags.into())))),
        flags
    );

    let list = |n| Value::Array(Array::Bool(vec![yes; n].into()));
    refused("gemma3", KEY, list(6), "lists 6 layers, expected 7");
    refused("gemma3", KEY, list(0), "lists 0 layers, expected 7");
    refused("gemma3", KEY, 0_u32, "expected 1 to");
    refused("gemma3", KEY, "all", "string");
    refused("gemma3", "attention.sliding_window", 0_u32, "expected 1 to");
}
