//! Measurements of models that are nowhere: random weights and cells in the shape of a header.

mod common;

use std::fs;

use common::{spillgate, stderr};
use gguf::TensorType;
use gguf::write::Writer;
use serde_json::Value;

/// The header of a small model.
fn header() -> Vec<u8> {
    let mut writer = Writer::new(32).unwrap();
    writer.set("general.architecture", "llama").unwrap();
    for (key, value) in [
        ("block_count", 2_u32),
        ("context_length", 8192),
        ("embedding_length", 256),
        ("feed_forward_length", 512),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
    ] {
        writer.set(&format!("llama.{key}"), value).unwrap();
    }
    let eps = "llama.attention.layer_norm_rms_epsilon";
    writer.set(eps, 1e-5_f32).unwrap();
    let mut add = |name: &str, dims: &[u64]| {
        let ty = match dims.len() {
            1 => TensorType::F32,
            _ => TensorType::Q8_0,
        };
        writer.tensor_from(name, ty, dims, |_| Ok(())).unwrap();
    };
    add("token_embd.weight", &[256, 300]);
    add("output_norm.weight", &[256]);
    for i in 0..2 {
        let mut add = |name: &str, dims: &[u64]| add(&format!("blk.{i}.{name}.weight"), dims);
        add("attn_norm", &[256]);
        add("attn_q", &[256, 256]);
        add("attn_k", &[256, 128]);
        add("attn_v", &[256, 128]);
        add("attn_output", &[256, 256]);
        add("ffn_norm", &[256]);
        add("ffn_gate", &[256, 512]);
        add("ffn_up", &[256, 512]);
        add("ffn_down", &[512, 256]);
    }
    writer.header().unwrap().0
}

#[test]
fn a_shape_alone_is_measured_at_any_depth_wherever_its_cells_are() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.gguf");
    fs::write(&path, header()).unwrap();
    let path = path.to_str().unwrap();
    let typed = format!("{path}:q4_k");
    for (shape, bytes) in [(path, 34.0 / 32.0), (&typed, 144.0 / 256.0)] {
        for placed in [&[][..], &["--window", "512", "--kv-share", "0"]] {
            let base = [
                "bench",
                "--synth",
                shape,
                "--seed",
                "3",
                "-p",
                "8",
                "-n",
                "4",
                "-d",
                "0,2000",
                "--fill-kv",
                "5",
                "-r",
                "2",
                "--json",
            ];
            let output = spillgate(&[&base[..], placed].concat());
            assert!(output.status.success(), "{}", stderr(&output));
            let report: Value = serde_json::from_slice(&output.stdout).unwrap();
            let cases = report["cases"].as_array().unwrap();
            let names: Vec<&str> = cases.iter().map(|c| c["case"].as_str().unwrap()).collect();
            assert_eq!(names, ["pp8", "tg4", "pp8 @ d2000", "tg4 @ d2000"]);
            assert!(
                cases
                    .iter()
                    .all(|c| c["median_tok_s"].as_f64().unwrap() > 0.0),
                "{report}"
            );
            let values = 256 * (300 + 2 * (256 + 128 + 128 + 256 + 3 * 512));
            let weights = report["weight_bytes"].as_f64().unwrap();
            // Norms are F32, five of 256 values.
            let exact = f64::from(values) * bytes + f64::from(5 * 256 * 4);
            assert_eq!(weights, exact, "{shape}");
            for key in ["load_s", "load_gb_s"] {
                assert!(report[key].as_f64().unwrap() > 0.0, "{report}");
            }
            assert!(stderr(&output).contains("loading: "), "{}", stderr(&output));
        }
    }
}

#[test]
fn what_cannot_be_made_is_said() {
    let output = spillgate(&["bench", "--synth", "no-such-shape"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("qwen2.5-14b"),
        "{}",
        stderr(&output)
    );
    let output = spillgate(&["bench", "--synth", "olmoe-1b-7b:q0"]);
    assert!(stderr(&output).contains("Q4_K"), "{}", stderr(&output));
    for usage in [
        &["bench"][..],
        &["bench", "smollm2", "--synth", "qwen3-8b"],
        &["bench", "smollm2", "--seed", "1"],
    ] {
        assert_eq!(spillgate(usage).status.code(), Some(2), "{usage:?}");
    }
}
