//! Models with experts on a GPU: the CPU's bits for generated tokens, and the same bits for a prompt however it is cut. Skipped, with a word, where
//! there is no GPU.

mod common;
#[path = "common/mixtures.rs"]
mod small;

use std::ops::ControlFlow;

use engine::gpu::Gpu;
use engine::model::{ComputeDevice, LoadOptions, Model};
use engine::session::{Session, SessionOptions, Wanted};
use gguf::TensorType;
use small::{Kind, Sizes, VOCAB};

const SIZES: Sizes = Sizes {
    width: 256,
    ff: 512,
    expert_ff: 256,
    shared_ff: 512,
    experts: 12,
    used: 4,
};

fn tokens(n: usize) -> Vec<u32> {
    let token = |i: usize| (i * i * 7 + i * 13) as u32 % VOCAB as u32;
    (0..n).map(token).collect()
}

fn load(kind: Kind, ty: TensorType, device: ComputeDevice) -> Model {
    let file = small::header(kind, SIZES, &[ty], false);
    let options = LoadOptions {
        threads: Some(2),
        device,
        contents: small::contents(),
        unproven: true,
        ..LoadOptions::default()
    };
    Model::from_file(&file, &options, &mut |_| {}).unwrap_or_else(|e| panic!("{e}"))
}

/// Logits of all positions: a prompt `ubatch` tokens at a time; `None`: token by token.
fn logits(model: &Model, tokens: &[u32], ubatch: Option<usize>) -> Vec<f32> {
    let options = SessionOptions {
        ubatch: ubatch.unwrap_or(8),
        n_ctx: 1024,
        device: model.device(),
        ..SessionOptions::for_model(model.config())
    };
    let mut session = Session::new(model, &options).unwrap();
    let mut all = Vec::new();
    match ubatch {
        None => {
            for &token in tokens {
                session.decode(token).unwrap();
                all.extend_from_slice(session.logits());
            }
        }
        Some(_) => {
            let mut each = |_, logits: &[f32]| {
                all.extend_from_slice(logits);
                ControlFlow::Continue(())
            };
            session.prefill(tokens, Wanted::All(&mut each)).unwrap();
        }
    }
    all
}

/// How many differ, and the first that does.
fn differing(found: &[f32], wanted: &[f32]) -> Option<(usize, usize)> {
    assert_eq!(found.len(), wanted.len());
    let differs = |i: &usize| found[*i].to_bits() != wanted[*i].to_bits();
    let first = (0..found.len()).find(differs)?;
    Some(((0..found.len()).filter(differs).count(), first))
}

#[test]
fn a_gpu_has_the_bits_of_the_cpu() {
    let gpu = match Gpu::first() {
        Ok(Some(gpu)) => gpu,
        Ok(None) => return common::skipped("a_gpu_has_the_bits_of_the_cpu", "there is no GPU"),
        Err(error) => panic!("a GPU that cannot be used: {error}"),
    };
    let mut wrong = Vec::new();
    for kind in Kind::ALL {
        for ty in [
            TensorType::Q4_K,
            TensorType::Q6_K,
            TensorType::Q8_0,
            TensorType::MXFP4,
        ] {
            let there = load(kind, ty, ComputeDevice::Cuda(gpu.ordinal()));
            let here = load(kind, ty, ComputeDevice::Cpu);
            let few = tokens(40);
            let (found, wanted) = (logits(&there, &few, None), logits(&here, &few, None));
            assert!(wanted.iter().all(|x| x.is_finite()));
            let name = ty.name();
            if let Some((n, first)) = differing(&found, &wanted) {
                wrong.push(format!("{kind:?} {name}: {n} generated, from {first} on"));
            }
            let many = tokens(300);
            let wanted = logits(&there, &many, Some(300));
            for cut in [1, 9, 16, 17, 64] {
                let n = if cut == 1 { 40 } else { 300 };
                let found = logits(&there, &many[..n], Some(cut));
                if let Some((n, first)) = differing(&found, &wanted[..found.len()]) {
                    wrong.push(format!(
                        "{kind:?} {name}: {n} in chunks of {cut}, from {first} on"
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
