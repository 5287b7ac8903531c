use super::*;
use crate::model::{Contents, LoadOptions, Model};
use crate::session::{Gating, KvType, Placing, Session, SessionOptions, Wanted};
use gguf::write::Writer;
use gguf::{GgufFile, MapMode, TensorInfo, TensorType};
use quant::formats;

/// A header of a small model in which the matrices have all formats, one after the other.
fn small(arch: &str) -> GgufFile {
    let mut writer = Writer::new(32).unwrap();
    let gemma = arch == "gemma3";
    writer.set("general.architecture", arch).unwrap();
    let mut set = |key: &str, value: u32| writer.set(&format!("{arch}.{key}"), value).unwrap();
    set("block_count", 3);
    set("context_length", 4096);
    set("embedding_length", 256);
    set("feed_forward_length", 512);
    set("attention.head_count", 4);
    set("attention.head_count_kv", 2);
    set("attention.key_length", 64);
    set("attention.value_length", 64);
    if gemma {
        set("attention.sliding_window", 300);
        set("attention.sliding_window_pattern", 2);
    }
    let eps = format!("{arch}.attention.layer_norm_rms_epsilon");
    writer.set(&eps, 1e-5_f32).unwrap();
    let mut next = formats::supported().iter().copied().cycle();
    let mut add = |name: &str, dims: &[u64]| {
        let ty = match dims.len() {
            1 => TensorType::F32,
            _ => next.next().unwrap(),
        };
        writer.tensor_from(name, ty, dims, |_| Ok(())).unwrap();
    };
    add("token_embd.weight", &[256, 320]);
    add("output_norm.weight", &[256]);
    if !gemma {
        add("output.weight", &[256, 320]);
    }
    for i in 0..3 {
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
        if gemma {
            add("attn_q_norm", &[64]);
            add("attn_k_norm", &[64]);
            add("post_attention_norm", &[256]);
            add("post_ffw_norm", &[256]);
        }
    }
    let (header, _) = writer.header().unwrap();
    GgufFile::from_header("small", &header).unwrap()
}

fn load(file: &GgufFile, contents: Contents, threads: usize) -> Model {
    let options = LoadOptions {
        threads: Some(threads),
        contents,
        ..LoadOptions::default()
    };
    Model::from_file(file, &options, &mut |_| {}).unwrap()
}

fn recipe(seed: u64) -> Recipe {
    Recipe {
        seed,
        router_skew: 0.0,
    }
}

fn logits(model: &Model) -> Vec<f32> {
    let options = SessionOptions::for_model(model.config());
    let mut session = Session::new(model, &options).unwrap();
    session.prefill(&[1, 5, 300, 7, 7], Wanted::None).unwrap();
    session.decode(19).unwrap();
    session.logits().to_vec()
}

#[test]
fn a_model_of_all_formats_is_its_file_and_has_sound_logits() {
    for arch in ["llama", "gemma3"] {
        let header = small(arch);
        let made = load(&header, Contents::Synthetic(recipe(4)), 1);
        let generator = Generator::new(recipe(4), header.tensors()).unwrap();
        let mut writer = Writer::new(32).unwrap();
        writer.set_all(header.metadata());
        for t in header.tensors() {
            let mut bytes = vec![0; t.n_bytes() as usize];
            generator.fill(t, 0, &mut bytes);
            writer
                .tensor(&t.name, t.ty, t.dims.as_slice(), bytes)
                .unwrap();
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("small.gguf");
        writer.write_file(&path).unwrap();
        let file = GgufFile::open(&path, MapMode::Read).unwrap();
        let read = load(&file, Contents::File, 3);
        assert_eq!(made.fingerprint(), read.fingerprint(), "{arch}");
        let values = logits(&made);
        assert_eq!(values, logits(&read), "{arch}");
        let other = load(&header, Contents::Synthetic(recipe(5)), 2);
        assert_ne!(made.fingerprint(), other.fingerprint(), "{arch}");
        assert_ne!(values, logits(&other), "{arch}");
        let squares: f32 = values.iter().map(|x| x * x).sum();
        let deviation = (squares / values.len() as f32).sqrt();
        assert!((1.5..6.0).contains(&deviation), "{arch}: {deviation}");
    }
}

fn values(generator: &Generator, t: &TensorInfo) -> Vec<f32> {
    let mut bytes = vec![0; t.n_bytes() as usize];
    generator.fill(t, 0, &mut bytes);
    let mut values = vec![0.0; t.n_elements() as usize];
    formats::decode_row(t.ty, &bytes, &mut values).unwrap();
    values
}

fn mean_and_deviation(values: &[f32]) -> (f32, f32) {
    let n = values.len() as f32;
    let mean = values.iter().sum::<f32>() / n;
    let squares: f32 = values.iter().map(|x| (x - mean) * (x - mean)).sum();
    (mean, (squares / n).sqrt())
}

#[test]
fn values_have_the_deviation_that_keeps_the_size_of_inputs() {
    for &ty in formats::supported() {
        for k in [256_u64, 28_672] {
            let rows = (1 << 20) / k;
            let tensor = TensorInfo::new("blk.0.ffn_up.weight", ty, &[k, rows]).unwrap();
            let output = TensorInfo::new("output.weight", ty, &[k, rows]).unwrap();
            let tensors = [tensor, output];
            let generator = Generator::new(recipe(1), &tensors).unwrap();
            for (t, factor) in tensors.iter().zip([1.0, 3.0]) {
                let wanted = factor / (k as f32).sqrt();
                let (mean, deviation) = mean_and_deviation(&values(&generator, t));
                assert!(
                    (deviation / wanted - 1.0).abs() < 0.08,
                    "{ty} {k}: {deviation}"
                );
                assert!((mean / wanted).abs() < 0.02, "{ty} {k}: {mean}");
            }
        }
    }
}

#[test]
fn bytes_do_not_depend_on_pieces_and_differ_by_name() {
    for &ty in formats::supported() {
        let tensor = |name| TensorInfo::new(name, ty, &[512, 40]).unwrap();
        let tensors = [tensor("a"), tensor("b")];
        let generator = Generator::new(recipe(9), &tensors).unwrap();
        let mut whole = vec![0; tensors[0].n_bytes() as usize];
        generator.fill(&tensors[0], 0, &mut whole);
        let mut other = whole.clone();
        generator.fill(&tensors[1], 0, &mut other);
        assert_ne!(whole, other, "{ty}");
        let mut pieces = vec![0; whole.len()];
        let piece = 3 * tensors[0].row_bytes() as usize;
        for (i, out) in pieces.chunks_mut(piece).enumerate() {
            generator.fill(&tensors[0], (i * piece) as u64, out);
        }
        assert_eq!(whole, pieces, "{ty}");
    }
}

#[test]
fn a_skew_spreads_the_rows_of_routers() {
    let router = TensorInfo::new("blk.3.ffn_gate_inp.weight", TensorType::F32, &[1024, 16]);
    let tensors = [router.unwrap()];
    let spreads = |router_skew| {
        let recipe = Recipe {
            seed: 1,
            router_skew,
        };
        let generator = Generator::new(recipe, &tensors).unwrap();
        let values = values(&generator, &tensors[0]);
        let rows = values.chunks(1024);
        rows.map(|row| mean_and_deviation(row).1 * 32.0)
            .collect::<Vec<f32>>()
    };
    assert!(spreads(0.0).iter().all(|s| (s - 1.0).abs() < 0.1));
    let skewed = spreads(1.0);
    assert!(!skewed.is_sorted_by(|a, b| a >= b), "ranks are shuffled");
    let mut sorted = skewed;
    sorted.sort_unstable_by(|a, b| b.total_cmp(a));
    for (rank, s) in (1..).zip(sorted) {
        assert!((s * rank as f32 - 1.0).abs() < 0.1, "rank {rank}: {s}");
    }
    for skew in [-1.0, f32::NAN, f32::INFINITY] {
        let recipe = Recipe {
            seed: 1,
            router_skew: skew,
        };
        assert!(Generator::new(recipe, &tensors).is_err(), "{skew}");
    }
}

#[test]
fn known_shapes_are_whole_and_take_other_types() {
    let bytes = |name: &str| {
        let file = Shape::find(name).unwrap().file().unwrap();
        assert!(!file.has_data(), "{name}");
        crate::tokenizer::Tokenizer::from_gguf(file.metadata()).unwrap();
        Generator::new(recipe(0), file.tensors()).unwrap();
        file.tensors().iter().map(TensorInfo::n_bytes).sum::<u64>()
    };
    for name in Shape::known() {
        assert!(bytes(name) > 1 << 30, "{name}");
    }
    // As many values as the model is known for, 34 bytes for 32 of them.
    let gib = bytes("llama-3.1-70b:q8_0") as f64 / f64::from(1 << 30);
    assert!((69.0..71.0).contains(&gib), "{gib}");
    for (name, named) in [
        ("no-such-model", "llama-3.1-8b"),
        ("no-such-model:q8_0", "llama-3.1-8b"),
        ("llama-3.1-8b:q9_9", "Q8_0"),
        ("llama-3.1-8b:iq1_s", "Q8_0"),
    ] {
        let error = Shape::find(name).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn random_cells_are_the_same_wherever_they_lie() {
    for arch in ["llama", "gemma3"] {
        let model = load(&small(arch), Contents::Synthetic(recipe(2)), 2);
        for (type_k, type_v) in [
            (KvType::F16, KvType::F16),
            (KvType::Bf16, KvType::Q8_0),
            (KvType::Q8_0, KvType::Q4_0),
            (KvType::Q4_0, KvType::F16),
        ] {
            let after = |placing, seed| {
                let options = SessionOptions {
                    n_ctx: 2048,
                    type_k,
                    type_v,
                    placing,
                    ..SessionOptions::for_model(model.config())
                };
                let mut session = Session::new(&model, &options).unwrap();
                session.fill(1500, seed).unwrap();
                assert_eq!(session.n_past(), 1500);
                session.decode(3).unwrap();
                session.prefill(&[4, 5, 6], Wanted::Last).unwrap();
                let host_bytes = session.spread().host_bytes;
                (session.logits().to_vec(), host_bytes)
            };
            let (resident, host_bytes) = after(Placing::RESIDENT, 1);
            assert_eq!(host_bytes, 0);
            let squares: f32 = resident.iter().map(|x| x * x).sum();
            let deviation = (squares / resident.len() as f32).sqrt();
            assert!((1.0..8.0).contains(&deviation), "{arch}: {deviation}");
            for kv_share in [0.0, 1.0] {
                let placing = Placing {
                    window_blocks: Some(2),
                    tail_blocks: 6,
                    staging_slots: 2,
                    kv_share,
                    gating: Gating::Off,
                };
                let (spilled, host_bytes) = after(placing, 1);
                assert!(host_bytes > 0, "{arch}");
                assert_eq!(resident, spilled, "{arch} {type_k}/{type_v} {kv_share}");
            }
            assert_ne!(resident, after(Placing::RESIDENT, 2).0, "{arch}");
        }
        let options = SessionOptions::for_model(model.config());
        let mut session = Session::new(&model, &options).unwrap();
        assert!(session.fill(options.n_ctx + 1, 1).is_err());
    }
}
