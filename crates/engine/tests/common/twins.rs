//! A dense `llama` model as a mixture that computes the same function.
//!
//! Its feed-forward is cut into [`SPLIT`] experts, each there twice, with router rows `+r` and `-r`: of each pair exactly one is among the
//! chosen, which one depends on the token. Down projections are multiplied with [`SPLIT`], exactly, and `r` is so small that
//! weights are all but 1 / SPLIT. A wrong expert, weight or offset shows in the logits.

use std::path::Path;

use gguf::write::Writer;
use gguf::{GgufFile, MapMode, TensorInfo, TensorType};
use half::f16;

/// Experts that a token uses, and half of all.
const SPLIT: usize = 8;

/// Scores are about this.
const SCORE: f32 = 1e-3;

/// Writes the mixture of the model `from`, with one of many routers.
pub fn write(from: &Path, to: &Path, router: u64) {
    let file = GgufFile::open(from, MapMode::Mmap).expect("the model is good");
    let meta = file.metadata();
    let ff = meta.require_u32("llama.feed_forward_length").unwrap() as usize;
    let mut writer = Writer::new(32).unwrap();
    writer.set_all(meta);
    for (key, n) in [
        ("feed_forward_length", ff / SPLIT),
        ("expert_count", 2 * SPLIT),
        ("expert_used_count", SPLIT),
    ] {
        writer.set(&format!("llama.{key}"), n as u32).unwrap();
    }
    for t in file.tensors() {
        let mut bytes = vec![0; t.n_bytes() as usize];
        file.read_at(t, 0, &mut bytes).unwrap();
        let width = t.ne(0);
        let part = t.name.split('.').nth(2).unwrap_or_default();
        let stacked = t.name.replace(part, &format!("{part}_exps"));
        match part {
            "ffn_gate" | "ffn_up" => {
                let dims = [width, (ff / SPLIT) as u64, 2 * SPLIT as u64];
                writer
                    .tensor(&stacked, t.ty, &dims, bytes.repeat(2))
                    .unwrap();
                if part == "ffn_gate" {
                    let name = t.name.replace(part, "ffn_gate_inp");
                    let dims = [width, 2 * SPLIT as u64];
                    let rows = router_rows(router, &name, width as usize);
                    writer.tensor(&name, TensorType::F32, &dims, rows).unwrap();
                }
            }
            "ffn_down" => {
                let dims = [(ff / SPLIT) as u64, t.ne(1), 2 * SPLIT as u64];
                let experts = split_columns(t, &bytes).repeat(2);
                writer.tensor(&stacked, t.ty, &dims, experts).unwrap();
            }
            _ => writer
                .tensor(&t.name, t.ty, t.dims.as_slice(), bytes)
                .unwrap(),
        }
    }
    writer.write_file(to).unwrap();
}

fn router_rows(router: u64, name: &str, width: usize) -> Vec<u8> {
    let mut state = name
        .bytes()
        .fold(router, |state, byte| state * 31 + u64::from(byte));
    let mut noise = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f32 / (1u64 << 30) as f32 - 1.0
    };
    let scale = SCORE / (width as f32).sqrt();
    let rows: Vec<f32> = (0..SPLIT * width).map(|_| noise() * scale).collect();
    let both = rows.iter().copied().chain(rows.iter().map(|r| -r));
    both.flat_map(f32::to_le_bytes).collect()
}

/// Columns of a `[N, F]` matrix in Q4_1, some for each expert, with its scales multiplied.
fn split_columns(t: &TensorInfo, bytes: &[u8]) -> Vec<u8> {
    assert_eq!(t.ty, TensorType::Q4_1, "{}: two scales a block", t.name);
    let block = t.ty.block_bytes();
    let row = bytes.len() / t.ne(1) as usize;
    let part = row / SPLIT;
    assert_eq!(part % block, 0, "{}: whole blocks for each", t.name);
    let mut experts = Vec::with_capacity(bytes.len());
    for expert in 0..SPLIT {
        for row in bytes.chunks(row) {
            experts.extend_from_slice(&row[expert * part..][..part]);
        }
    }
    for block in experts.chunks_mut(block) {
        for at in [0, 2] {
            let scale = f16::from_le_bytes([block[at], block[at + 1]]);
            let scaled = f16::from_f32(scale.to_f32() * SPLIT as f32);
            block[at..at + 2].copy_from_slice(&scaled.to_le_bytes());
        }
    }
    experts
}
