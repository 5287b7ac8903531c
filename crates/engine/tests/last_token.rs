//! A prompt whose last token's logits alone are wanted: the last layer leaves the others out, and the bits are those of a prompt that does not. On the CPU,
//! and on a GPU where there is one.

mod common;

use std::ops::ControlFlow;

use engine::model::{ComputeDevice, Contents, LoadOptions, Model};
use engine::session::{KvType, Session, SessionOptions, Wanted};
use engine::synth::Recipe;
use gguf::write::Writer;
use gguf::{GgufFile, TensorType, Value};

const VOCAB: u64 = 320;

/// A model of two layers.
fn header(ty: TensorType) -> GgufFile {
    const WIDTH: u64 = 256;
    const FF: u64 = 512;
    let mut writer = Writer::new(32).unwrap();
    writer.set("general.architecture", "llama").unwrap();
    for (key, value) in [
        ("block_count", 2),
        ("context_length", 4096),
        ("embedding_length", WIDTH),
        ("feed_forward_length", FF),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 64),
        ("attention.value_length", 64),
    ] {
        let value = Value::from(u32::try_from(value).unwrap());
        writer.set(&format!("llama.{key}"), value).unwrap();
    }
    let eps = "llama.attention.layer_norm_rms_epsilon";
    writer.set(eps, Value::from(1e-5_f32)).unwrap();
    let mut add = |name: &str, dims: &[u64]| {
        let ty = if dims.len() == 1 { TensorType::F32 } else { ty };
        writer.tensor_from(name, ty, dims, |_| Ok(())).unwrap();
    };
    add("token_embd.weight", &[WIDTH, VOCAB]);
    add("output_norm.weight", &[WIDTH]);
    add("output.weight", &[WIDTH, VOCAB]);
    for i in 0..2 {
        for (name, dims) in [
            ("attn_norm", &[WIDTH][..]),
            ("attn_q", &[WIDTH, 256]),
            ("attn_k", &[WIDTH, 128]),
            ("attn_v", &[WIDTH, 128]),
            ("attn_output", &[256, WIDTH]),
            ("ffn_norm", &[WIDTH]),
            ("ffn_gate", &[WIDTH, FF]),
            ("ffn_up", &[WIDTH, FF]),
            ("ffn_down", &[FF, WIDTH]),
        ] {
            add(&format!("blk.{i}.{name}.weight"), dims);
        }
    }
    let (header, _) = writer.header().unwrap();
    GgufFile::from_header("small", &header).unwrap()
}

fn check(device: ComputeDevice, ty: TensorType, kv: KvType) {
    let options = LoadOptions {
        threads: Some(2),
        device,
        contents: Contents::Synthetic(Recipe {
            seed: 5,
            router_skew: 0.0,
        }),
        ..LoadOptions::default()
    };
    let model = Model::from_file(&header(ty), &options, &mut |_| {}).unwrap();
    let tokens: Vec<u32> = (0..700).map(|i| i * i % VOCAB as u32).collect();
    for (n, ubatch) in [(2, 512), (300, 512), (300, 64), (513, 256), (700, 300)] {
        let options = SessionOptions {
            ubatch,
            n_ctx: 1024,
            device: model.device(),
            type_k: kv,
            type_v: kv,
            ..SessionOptions::for_model(model.config())
        };
        let mut session = Session::new(&model, &options).unwrap();
        let mut wanted = Vec::new();
        let mut each = |_, logits: &[f32]| {
            wanted = logits.to_vec();
            ControlFlow::Continue(())
        };
        session
            .prefill(&tokens[..n], Wanted::All(&mut each))
            .unwrap();
        session.decode(7).unwrap();
        let after = session.logits().to_vec();
        session.truncate(0);
        session.prefill(&tokens[..n], Wanted::Last).unwrap();
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let what = format!("{device:?} {} {kv:?} {n} tokens, {ubatch}", ty.name());
        assert!(wanted.iter().all(|x| x.is_finite()), "{what}");
        assert_eq!(bits(session.logits()), bits(&wanted), "{what}");
        // All cells are there.
        session.decode(7).unwrap();
        assert_eq!(
            bits(session.logits()),
            bits(&after),
            "{what}: the token after"
        );
    }
}

const FORMS: [(TensorType, KvType); 3] = [
    (TensorType::Q8_0, KvType::F16),
    (TensorType::Q4_K, KvType::F16),
    (TensorType::Q6_K, KvType::Q8_0),
];

#[test]
fn the_last_token_alone_has_the_same_logits() {
    for (ty, kv) in FORMS {
        check(ComputeDevice::Cpu, ty, kv);
    }
}

#[test]
fn the_last_token_alone_has_the_same_logits_on_a_gpu() {
    let Some(device) = common::gpu("the_last_token_alone_has_the_same_logits_on_a_gpu") else {
        return;
    };
    for (ty, kv) in FORMS {
        check(device, ty, kv);
    }
}
