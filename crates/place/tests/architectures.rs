//! What layers keep, architecture by architecture, and public reports replayed.

mod common;

use common::{Header, MIB, cache, full, keeping, windowed};
use place::Error;
use place::bytes::{
    Cache, KvType, Streams, device_alloc_bytes, device_work_bytes, kv_alloc_bytes, kv_bytes,
    recurrent_bytes, work_bytes,
};
use place::model::{Form, Keeps};

use KvType::{F16, Q4_0, Q8_0};

fn every(layers: usize, keep: impl Fn(usize) -> bool) -> Vec<usize> {
    (0..layers).filter(|&i| keep(i)).collect()
}

fn flags(layers: usize, windowed: impl Fn(usize) -> bool) -> Vec<bool> {
    (0..layers).map(windowed).collect()
}

fn one(n_ctx: u64, type_k: KvType, type_v: KvType) -> Cache {
    Cache::new(n_ctx, type_k, type_v, 512)
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB
}

#[test]
fn windows_that_the_architecture_decides() {
    let window = |arch, layers| Header::new(arch, layers).with("attention.sliding_window", 1024);
    for (arch, layers, first_full, period) in [
        ("gpt-oss", 24, 1, 2),
        ("gemma2", 42, 1, 2),
        ("cohere2", 32, 3, 4),
        ("llama4", 48, 3, 4),
        ("exaone4", 64, 3, 4),
        ("gemma3", 62, 5, 6),
        ("laguna", 40, 0, 4),
        ("cohere2moe", 49, 0, 4),
    ] {
        let model = window(arch, layers as u64).model();
        let is_full = |i: usize| i % period == first_full;
        assert_eq!(full(&model), every(layers, is_full), "{arch}");
        assert_eq!(windowed(&model), every(layers, |i| !is_full(i)), "{arch}");
        assert_eq!(model.assumptions, [""; 0], "{arch}");
    }
    assert_eq!(full(&window("gemma3", 62).model()).len(), 10);
    assert_eq!(
        windowed(&window("deepseek4", 43).model()),
        every(43, |_| true)
    );
    // A window in the file means nothing here.
    for arch in ["phi3", "qwen2", "llama", "qwen3moe"] {
        assert_eq!(windowed(&window(arch, 32).model()), [0; 0], "{arch}");
    }
    // Only the large model of the family has windows.
    assert_eq!(windowed(&window("exaone4", 30).model()), [0; 0]);
    // Their last layer is for next-token prediction.
    let model = window("exaone4", 65)
        .with("nextn_predict_layers", 1)
        .model();
    assert_eq!(full(&model).len(), 16);
}

#[test]
fn windows_of_a_length_that_the_file_does_not_say() {
    let lengths = |header: &Header| {
        let model = header.model();
        let mut lengths: Vec<u64> = model.caching().filter_map(|(_, c)| c.window).collect();
        lengths.dedup();
        lengths
    };
    assert_eq!(lengths(&Header::new("gemma2", 42)), [4096]);
    assert_eq!(lengths(&Header::new("llama4", 48)), [8192]);
    assert_eq!(lengths(&Header::new("exaone4", 64)), [4096]);
    for arch in ["exaone4", "gemma3", "laguna", "gpt-oss", "llama"] {
        assert_eq!(lengths(&Header::new(arch, 30)), [0; 0], "{arch}");
    }
    // 0 says that there is none.
    for arch in ["gemma2", "llama4", "gemma3", "laguna"] {
        let header = Header::new(arch, 48).with("attention.sliding_window", 0);
        assert_eq!(lengths(&header), [0; 0], "{arch}");
    }
}

#[test]
fn the_files_pattern_wins() {
    const PATTERN: &str = "attention.sliding_window_pattern";
    let window = |arch, layers| Header::new(arch, layers).with("attention.sliding_window", 1024);
    let period = |arch, period| full(&window(arch, 12).with(PATTERN, period).model());
    assert_eq!(period("gemma3", 3), [2, 5, 8, 11]);
    assert_eq!(period("llama", 4), [3, 7, 11]);
    assert_eq!(period("laguna", 3), [0, 3, 6, 9]);
    assert_eq!(period("gemma3", 1), every(12, |_| true));
    assert_eq!(period("gemma3", 0), [0; 0]);
    let own = |i: usize| i != 2 && i != 7;
    let header = window("gemma4", 12).flags(PATTERN, flags(12, own));
    assert_eq!(full(&header.model()), [2, 7]);
    // Integers do as truth values, and a list may leave out the layer that is never run.
    let list = (0..12).map(|i| u64::from(own(i))).collect();
    let header = window("mimo2", 13)
        .list(PATTERN, list)
        .with("nextn_predict_layers", 1);
    assert_eq!(full(&header.model()), [2, 7]);
    let wrong = window("gemma4", 12).flags(PATTERN, flags(11, own));
    assert!(matches!(wrong.describe(), Err(Error::Key { .. })));
    // Without a pattern nothing is known of this one.
    let silent = window("gemma4", 12).model();
    assert_eq!(windowed(&silent), [0; 0]);
    assert_eq!(silent.assumptions.len(), 1);
}

#[test]
fn cells_of_windows() {
    // (architecture, window, sequences, ubatch, cells of a ring)
    for (arch, window, n_seq, n_ubatch, cells) in [
        ("gpt-oss", 128, 1, 512, 768),
        ("gemma3", 1024, 1, 512, 1536),
        ("gemma3", 1024, 4, 512, 4608),
        ("gemma3", 1024, 1, 2048, 3072),
        ("gemma2", 4096, 1, 512, 4608),
        ("llama4", 8192, 1, 512, 8704),
    ] {
        let header = Header::new(arch, 12).with("attention.sliding_window", window);
        let model = header.model();
        let bytes = kv_bytes(&model, &cache(65_536, n_seq, F16, F16, n_ubatch)).unwrap();
        let layer = 2 * 2 * 1024;
        assert_eq!(
            bytes.windowed,
            windowed(&model).len() as u64 * cells * layer,
            "{arch}"
        );
        assert_eq!(
            bytes.full,
            full(&model).len() as u64 * 65_536 * layer,
            "{arch}"
        );
        // A context shorter than the ring is all there is.
        let short = kv_bytes(&model, &cache(300, n_seq, F16, F16, n_ubatch)).unwrap();
        assert_eq!(short.total, 12 * 512 * layer, "{arch}");
    }
}

#[test]
fn streams_of_their_own() {
    let model = Header::new("gemma3", 12)
        .with("attention.sliding_window", 1024)
        .model();
    let own = |n_ctx, n_seq| {
        let cache = Cache {
            streams: Streams::Own,
            ..cache(n_ctx, n_seq, F16, F16, 512)
        };
        kv_bytes(&model, &cache).unwrap()
    };
    let layer = 2 * 2 * 1024;
    assert_eq!(own(65_536, 4).full, 2 * 65_536 * layer);
    assert_eq!(own(65_536, 4).windowed, 10 * 4 * 1536 * layer);
    // 1000 / 3 is padded for each.
    assert_eq!(own(1000, 3).full, 2 * 3 * 512 * layer);
    assert_eq!(own(1000, 3).windowed, 10 * 3 * 512 * layer);
}

#[test]
fn head_sizes() {
    // Without lengths, the width over the heads.
    let plain = |heads, width| {
        let header = Header::new("qwen2", 2)
            .with("embedding_length", width)
            .heads(heads, 8, 0, 0)
            .without("attention.key_length")
            .without("attention.value_length");
        let model = header.model();
        let (_, cells) = model.caching().next().unwrap();
        (cells.head_k, cells.head_v)
    };
    assert_eq!(plain(40, 5120), (128, 128));
    assert_eq!(plain(14, 896), (64, 64));
    // With them the width does not matter: 64 heads of 128 and a width of 5120.
    let model = Header::new("qwen3", 64)
        .with("embedding_length", 5120)
        .heads(64, 8, 128, 128)
        .model();
    assert_eq!(model.caching().next().unwrap().1.k_values(), Some(1024));
    // Without a number of key heads all heads are.
    let model = Header::new("llama", 40)
        .heads(40, 0, 128, 128)
        .without("attention.head_count_kv")
        .model();
    assert_eq!(model.caching().next().unwrap().1.k_values(), Some(5120));
    // A list of them; none: no cache.
    let model = Header::new("unheard-of", 4)
        .list("attention.head_count_kv", vec![8, 0, 2, 1])
        .model();
    assert_eq!(full(&model), [0, 2, 3]);
    assert_eq!(keeping(&model, Keeps::Nothing), [1]);
    let bytes = kv_bytes(&model, &one(256, F16, F16)).unwrap();
    assert_eq!(bytes.total, 256 * (8 + 2 + 1) * 128 * 2 * 2);
}

#[test]
fn gemma4_12b_at_262144() {
    // unslothai/unsloth#10489: 40 windowed layers take 255 MiB at q8_0; with 8 global ones at 262144 2176 MiB more.
    let is_windowed = |i: usize| i % 6 != 5;
    let kv_heads = (0..48).map(|i| if is_windowed(i) { 8 } else { 1 });
    let header = Header::new("gemma4", 48)
        .with("embedding_length", 3840)
        .heads(16, 0, 512, 512)
        .list("attention.head_count_kv", kv_heads.collect())
        .with("attention.key_length_swa", 256)
        .with("attention.value_length_swa", 256)
        .with("attention.sliding_window", 1024)
        .flags("attention.sliding_window_pattern", flags(48, is_windowed));
    let bytes = kv_bytes(&header.model(), &one(262_144, Q8_0, Q8_0)).unwrap();
    assert_eq!((mib(bytes.full), mib(bytes.windowed)), (2176.0, 255.0));
}

#[test]
fn gemma4_that_shares_cells() {
    // 42 layers, the last 18 of which use earlier cells; its 4 full layers took 1600 MiB at 102400.
    let is_windowed = |i: usize| i % 6 != 5;
    let header = Header::new("gemma4", 42)
        .heads(8, 2, 512, 512)
        .with("attention.key_length_swa", 256)
        .with("attention.value_length_swa", 256)
        .with("attention.sliding_window", 512)
        .with("attention.shared_kv_layers", 18)
        .flags("attention.sliding_window_pattern", flags(42, is_windowed));
    let model = header.model();
    assert_eq!(full(&model), [5, 11, 17, 23]);
    assert_eq!(windowed(&model).len(), 20);
    assert_eq!(
        keeping(&model, Keeps::SharedWith { layer: 23 }),
        [29, 35, 41]
    );
    assert_eq!(keeping(&model, Keeps::SharedWith { layer: 22 }).len(), 15);
    let bytes = kv_bytes(&model, &one(102_400, F16, F16)).unwrap();
    assert_eq!(mib(bytes.full), 1600.0);
    for shared in [42, 43, u64::MAX] {
        let header = header.clone().with("attention.shared_kv_layers", shared);
        assert!(
            matches!(header.describe(), Err(Error::Key { .. })),
            "{shared}"
        );
    }
    // No earlier layer of its kind has cells.
    let header = header.with("attention.shared_kv_layers", 37);
    assert!(matches!(header.describe(), Err(Error::Key { .. })));
}

#[test]
fn gemma3n_shares_cells() {
    let header = Header::new("gemma3n", 35).with("attention.sliding_window", 512);
    let model = header.model();
    assert_eq!(full(&model), [4, 9, 14, 19]);
    assert_eq!(windowed(&model).len(), 16);
    assert_eq!(
        keeping(&model, Keeps::SharedWith { layer: 19 }),
        [24, 29, 34]
    );
    assert_eq!(keeping(&model, Keeps::SharedWith { layer: 18 }).len(), 12);
}

/// A hybrid of gated delta nets and attention.
fn hybrid(arch: &str, layers: u64, inner: u64) -> Header {
    Header::new(arch, layers)
        .heads(16, 4, 256, 256)
        .with("full_attention_interval", 4)
        .with("ssm.conv_kernel", 4)
        .with("ssm.inner_size", inner)
        .with("ssm.group_count", 16)
        .with("ssm.state_size", 128)
}

#[test]
fn hybrid_9b_at_262144() {
    // A report on a 9B hybrid of 5.6 GB: a tool that counted every layer said over 40 GB and left the card, of which 22415 MiB
    // were free, unused.
    let model = hybrid("qwen35", 32, 4096)
        .tensor("output_norm.weight", "F32", &[4096])
        .model();
    assert_eq!(full(&model), every(32, |i| i % 4 == 3));
    let kv = kv_bytes(&model, &one(262_144, F16, F16)).unwrap();
    assert_eq!(mib(kv.total), 8192.0);
    let state = recurrent_bytes(&model, 1, 0).unwrap();
    let work = work_bytes(&model, 262_144, 512).unwrap();
    let alloc = kv_alloc_bytes(&model, &one(262_144, F16, F16)).unwrap();
    let all = 5_600_000_000 + alloc.total + state + work.total;
    assert!(mib(all) < 22_415.0, "{} MiB", mib(all));
}

/// The buffers of the CUDA backend one by one, and what pages make of weights and slabs.
#[test]
fn a_devices_work_space_and_padding() {
    // 32 layers, width 4096, feed-forward 14336, heads 32 x 128 over 8, vocabulary 100000; B = 2 * 16 + 1 spans of 4096 cells.
    let model = Header::new("llama", 32)
        .tensor("output.weight", "Q8_0", &[4096, 100_000])
        .tensor("blk.0.attn_q.weight", "Q8_0", &[4096, 4096])
        .tensor("blk.0.attn_norm.weight", "F32", &[4096])
        .model();
    let work = device_work_bytes(&model, 4096, 512, 1).unwrap();
    let activations = 4 * 512 * (4 * 4096 + 4096 + 1024 + 1024 + 4096 + 2 * 14_336);
    assert_eq!(work.activations, activations);
    let values = 1024 * 14_336;
    let acts = values + values / 32 * 8 + values / 256 * 4 + values / 16 * 2 + 4 * 4096;
    let lists = 32 * (2 * (24 * 33 + 4) + 24 + 4 + 8 * 33 + 4);
    let partial = 4 * 32 * (2 + 128);
    let angles = 4 * 4 * 512 * 64;
    let ids = 8 * 512 + 4 * 32;
    let shares = 132 * (4 * 2 * 128 * 128 + 4 * 8);
    let scratch = 2 * acts + shares + lists + 33 * partial + 5 * 512 * partial + angles + ids;
    assert_eq!(work.scratch, scratch);
    assert_eq!(work.logits, 4 * (2 * 8 * 4096 + 8 * 100_000));
    assert_eq!(work.total, activations + scratch + work.logits);
    // Lists of every sequence, up to 8.
    for (n_seq, lists) in [(3, 2), (8, 7), (9, 7)] {
        let work_of_some = device_work_bytes(&model, 4096, 512, n_seq).unwrap();
        let more = lists * 32 * (24 + 32 * 33 + 8);
        assert_eq!(work_of_some.scratch, scratch + more, "{n_seq}");
    }
    // More of either never takes less, and a chunk is no longer than the context.
    for (n_ctx, n_ubatch) in [(4096, 513), (4352, 512)] {
        assert!(device_work_bytes(&model, n_ctx, n_ubatch, 1).unwrap().total > work.total);
    }
    let short = device_work_bytes(&model, 100, 512, 1).unwrap();
    assert_eq!(short, device_work_bytes(&model, 100, 100, 1).unwrap());
    assert!(device_work_bytes(&model, 0, 1, 1).is_err());
    // 425000 KiB and 4 KiB, in pages of 2 MiB: 416 MiB; 17 MiB and 4 KiB: 18 MiB; a norm is small.
    let padding = (416 << 20) - 100_000 * 4352 + (18 << 20) - 4096 * 4352;
    assert_eq!(model.weights.device_padding, padding);
    assert_eq!(device_alloc_bytes((17 << 20) + 4096), 18 << 20);
}

#[test]
fn hybrid_27b_at_262144() {
    // lmstudio-bug-tracker#1862 for the cache, the same model's logs for its state. Its last block predicts tokens.
    let header = hybrid("qwen35", 65, 6144)
        .heads(24, 4, 256, 256)
        .with("nextn_predict_layers", 1);
    let model = header.model();
    assert_eq!(model.n_layer(), 64);
    assert_eq!(keeping(&model, Keeps::Unused), [64]);
    assert_eq!(keeping(&model, Keeps::Nothing), every(64, |i| i % 4 != 3));
    let kv = kv_bytes(&model, &one(262_144, F16, F16)).unwrap();
    assert_eq!(mib(kv.total), 16_384.0);
    let state = |n_seq, rollback| recurrent_bytes(&model, n_seq, rollback).unwrap();
    assert_eq!(state(1, 0), 5_898_240 + 150_994_944);
    assert_eq!(mib(state(4, 0)), 598.5);
    assert_eq!(state(1, 3), 4 * state(1, 0));
    // Without the key every fourth layer attends, with it as it says.
    assert_eq!(
        header.clone().without("full_attention_interval").model(),
        model
    );
    let other = header.clone().with("full_attention_interval", 2).model();
    assert_eq!(full(&other).len(), 32);
    // A list of the layers wins.
    let listed = header
        .clone()
        .flags("attention.recurrent_layers", flags(65, |i| i < 60));
    assert_eq!(full(&listed.model()), [60, 61, 62, 63]);
    for arch in ["qwen3next", "qwen35moe"] {
        let model = hybrid(arch, 48, 4096)
            .without("full_attention_interval")
            .model();
        assert_eq!(full(&model).len(), 12, "{arch}");
        assert_eq!(model.assumptions, [""; 0], "{arch}");
    }
}

fn mla(layers: u64) -> Header {
    Header::new("deepseek2", layers)
        .heads(128, 1, 576, 512)
        .with("attention.key_length_mla", 192)
        .with("attention.value_length_mla", 128)
        .with("attention.kv_lora_rank", 512)
        .with("rope.dimension_count", 64)
}

#[test]
fn mla_671b_at_8192() {
    // ik_llama.cpp#305 for the latent, the arithmetic of ik_llama.cpp#389 for whole heads.
    let model = mla(61).model();
    assert!(model.caching().all(|(_, cells)| cells.form == Form::Latent));
    let kv = kv_bytes(&model, &one(8192, F16, F16)).unwrap();
    assert_eq!(mib(kv.total), 549.0);
    assert_eq!(kv.v, 0);
    // The type of V is moot.
    assert_eq!(kv_bytes(&model, &one(8192, F16, Q4_0)).unwrap(), kv);
    let whole = Header::new("deepseek2", 61)
        .heads(128, 128, 192, 128)
        .model();
    let kv = kv_bytes(&whole, &one(8192, F16, F16)).unwrap();
    assert_eq!(mib(kv.total), 39_040.0);
    // One length alone is not enough.
    let half = mla(61).without("attention.value_length_mla").model();
    assert!(half.caching().all(|(_, cells)| cells.form == Form::Heads));
    let missing = mla(61).without("attention.kv_lora_rank").describe();
    assert!(matches!(missing, Err(Error::Missing { .. })));
}

#[test]
fn latent_and_linear_attention() {
    // Ling-3.0-tiny: 3 layers of Kimi's delta attention for each latent one; those have no key heads.
    let header = mla(24);
    let keys = header
        .keys
        .into_iter()
        .map(|(key, value)| (key.replace("deepseek2", "bailingmoe3"), value));
    let mut header = Header {
        arch: "bailingmoe3".to_owned(),
        keys: keys.collect(),
        tensors: Vec::new(),
    };
    header.keys.insert(
        "general.architecture".to_owned(),
        place::model::Value::Text("bailingmoe3".into()),
    );
    let heads = (0..24).map(|i| u64::from(i % 4 == 3)).collect();
    let mut header = header
        .with("attention.head_count", 16)
        .list("attention.head_count_kv", heads)
        .with("ssm.conv_kernel", 4)
        .with("kda.head_dim", 128);
    for i in (0..24).filter(|i| i % 4 != 3) {
        header = header.tensor(&format!("blk.{i}.ssm_a"), "F32", &[1, 16]);
    }
    let model = header.model();
    assert_eq!(full(&model), [3, 7, 11, 15, 19, 23]);
    assert_eq!(model.assumptions, [""; 0]);
    // Six latent layers, in two streams of 4096 (the log of T62 in the table).
    let streams = Cache {
        streams: Streams::Own,
        ..cache(8192, 2, F16, F16, 512)
    };
    assert_eq!(mib(kv_bytes(&model, &streams).unwrap().total), 54.0);
    let state = 3 * 3 * 16 * 128 + 16 * 128 * 128;
    assert_eq!(recurrent_bytes(&model, 1, 0).unwrap(), 18 * state * 4);
}

#[test]
fn prediction_layers_are_not_run() {
    let header = Header::new("glm4moe", 47)
        .with("nextn_predict_layers", 1)
        .with("expert_count", 128)
        .with("expert_used_count", 8)
        .with("expert_feed_forward_length", 1408)
        .tensor("token_embd.weight", "Q8_0", &[4096, 1000])
        .tensor("output.weight", "Q8_0", &[4096, 1000])
        .tensor("blk.45.ffn_up_exps.weight", "Q4_0", &[4096, 1408, 128])
        .tensor("blk.46.ffn_up_exps.weight", "Q4_0", &[4096, 1408, 128])
        .tensor("blk.46.nextn.embed_tokens.weight", "Q8_0", &[4096, 1000])
        .tensor("blk.46.nextn.eh_proj.weight", "F16", &[8192, 4096]);
    let model = header.model();
    assert_eq!(full(&model), every(46, |_| true));
    let (experts, table) = (4096 * 1408 * 128 / 32 * 18, 4096 * 1000 / 32 * 34);
    assert_eq!(model.weights.unused, experts + table + 8192 * 4096 * 2);
    assert_eq!(model.weights.unused_experts, experts);
    assert_eq!(model.weights.expert_bytes(), 2 * experts);
    assert_eq!(model.weights.experts, experts);
    assert_eq!(model.active.bytes, table + table / 1000 + experts / 128 * 8);
    assert_eq!(
        model.weights.total(),
        2 * experts + 3 * table + 8192 * 4096 * 2
    );
    for all in [47, 48, u64::MAX] {
        let header = header.clone().with("nextn_predict_layers", all);
        assert!(matches!(header.describe(), Err(Error::Key { .. })), "{all}");
    }
    // deepseek4 files count layers that they do not have, beside the others.
    let header = Header::new("deepseek4", 43).with("attention.sliding_window", 128);
    let model = header.clone().with("nextn_predict_layers", 1).model();
    assert_eq!(windowed(&model).len(), 43);
    let has = header.with("nextn_predict_layers", 1).tensor(
        "blk.42.nextn.eh_proj.weight",
        "F16",
        &[8192, 4096],
    );
    assert_eq!(windowed(&has.model()).len(), 42);
}

#[test]
fn weights_by_kind() {
    let header = Header::new("llama", 2)
        .with("expert_count", 4)
        .with("expert_used_count", 2)
        .tensor("token_embd.weight", "Q8_0", &[4096, 1000])
        .tensor("per_layer_token_embd.weight", "F16", &[512, 1000])
        .tensor("output_norm.weight", "F32", &[4096])
        .tensor("blk.0.attn_q.weight", "Q4_0", &[4096, 4096])
        .tensor("blk.0.ffn_gate_shexp.weight", "Q8_0", &[4096, 1024])
        .tensor("blk.0.ffn_gate_exps.weight", "Q4_0", &[4096, 1024, 4])
        .tensor("blk.0.ffn_gate_exps.bias", "F32", &[1024, 4])
        // Older files have a tensor an expert.
        .tensor("blk.1.ffn_up.0.weight", "Q4_0", &[4096, 1024])
        .tensor("blk.1.ffn_up.1.weight", "Q4_0", &[4096, 1024])
        .tensor("blk.1.ffn_up.2.weight", "Q4_0", &[4096, 1024])
        .tensor("blk.1.ffn_up.3.weight", "Q4_0", &[4096, 1024]);
    let model = header.model();
    let (q8, q4) = (4096 * 1000 / 32 * 34, 4096 * 1024 / 32 * 18);
    let table = 512 * 1000 * 2;
    assert_eq!(model.weights.embedding, q8 + table);
    assert_eq!(model.weights.output, 0);
    assert_eq!(model.weights.experts, 8 * q4 + 4 * 4096);
    let shared = 4096 * 1024 / 32 * 34;
    assert_eq!(model.weights.dense, 4 * q4 + shared + 4 * 4096);
    assert_eq!(model.n_vocab, 1000);
    let layer = &model.layers[0];
    assert_eq!(
        (layer.dense_bytes, layer.one_expert_bytes),
        (4 * q4 + shared, q4 + 4096)
    );
    assert_eq!(model.layers[1].one_expert_bytes, q4);
    assert_eq!(model.layers[1].expert_bytes, 4 * q4);
    // The embedding is the output too, so it is read whole; of it and of the other table a row.
    assert_eq!(model.active.embedding_row, 4096 / 32 * 34 + 512 * 2);
    let of = |ty: &str| model.active.by_type[ty];
    assert_eq!(of("Q8_0").dense, q8 + shared);
    assert_eq!((of("Q4_0").dense, of("Q4_0").one_expert), (4 * q4, 2 * q4));
    assert_eq!((of("F32").dense, of("F32").one_expert), (4 * 4096, 4096));
    assert!(!model.active.by_type.contains_key("F16"));
    let sum: u64 = model
        .active
        .by_type
        .values()
        .map(|t| t.dense + 2 * t.one_expert)
        .sum();
    assert_eq!(model.active.bytes, sum + model.active.embedding_row);
    let experts = model.experts.unwrap();
    assert_eq!((experts.total, experts.used, experts.shared), (4, 2, 1));
    assert_eq!(experts.ff, 14_336);
    // With an output of its own, the embedding is not.
    let own = header.tensor("output.weight", "F16", &[4096, 1000]).model();
    assert_eq!(own.weights.output, 4096 * 1000 * 2);
    assert_eq!(own.active.by_type["Q8_0"].dense, shared);
    assert_eq!(own.active.by_type["F16"].dense, 4096 * 1000 * 2);
}

#[test]
fn types_that_do_not_fit_are_refused() {
    let model = Header::new("llama", 3).heads(32, 4, 80, 96).model();
    let refused = |type_k, type_v| kv_bytes(&model, &one(256, type_k, type_v)).unwrap_err();
    assert_eq!(
        refused(Q8_0, F16),
        Error::KvBlock {
            ty: Q8_0,
            side: "K",
            layer: 0,
            head: 80
        }
    );
    let text = refused(KvType::Iq4Nl, Q4_0).to_string();
    assert!(
        text.contains("iq4_nl") && text.contains("32") && text.contains("80"),
        "{text}"
    );
    // 4 heads of 80 would be 10 whole blocks, but one head is not.
    assert!(Q8_0.row_bytes(4 * 80).is_some());
    assert!(kv_bytes(&model, &one(256, F16, Q8_0)).is_ok());
    assert!(kv_alloc_bytes(&model, &one(256, Q4_0, F16)).is_err());
    for (n_ctx, n_seq, n_ubatch) in [(0, 1, 1), (1, 0, 1), (1, 1, 0)] {
        let cache = cache(n_ctx, n_seq, F16, F16, n_ubatch);
        assert!(matches!(
            kv_bytes(&model, &cache),
            Err(Error::Option { .. })
        ));
        assert!(matches!(
            kv_alloc_bytes(&model, &cache),
            Err(Error::Option { .. })
        ));
    }
}

#[test]
fn what_our_blocks_take() {
    let model = Header::new("gemma3", 12)
        .with("attention.sliding_window", 1024)
        .model();
    let block = 256 * 2 * 2 * 1024;
    let alloc = |cache: Cache| kv_alloc_bytes(&model, &cache).unwrap();
    let plain = alloc(one(65_536, F16, F16));
    assert_eq!((plain.full_blocks, plain.full_slab), (256, 2 * block));
    assert_eq!(plain.full, 2 * 256 * block);
    // A window of 1024 and a chunk of 512 that are not aligned: 6 blocks and one.
    assert_eq!(plain.windowed, 10 * 7 * block);
    assert_eq!(plain.total, plain.full + plain.windowed);
    // Not more than the context has.
    assert_eq!(alloc(one(1025, F16, F16)).windowed, 10 * 5 * block);
    // Three sequences may leave two blocks begun.
    let shared = alloc(cache(65_536, 3, F16, F16, 512));
    assert_eq!(shared.full_blocks, 258);
    assert_eq!(shared.windowed, 10 * 3 * 7 * block);
    let own = alloc(Cache {
        streams: Streams::Own,
        ..cache(1000, 3, F16, F16, 512)
    });
    assert_eq!(own.full_blocks, 6);
    // 3 tokens are in 3 blocks at most, however many sequences there may be.
    assert_eq!(alloc(cache(3, 100, F16, F16, 512)).full_blocks, 3);
}

#[test]
fn architectures_that_are_not_known_are_marked() {
    let model = Header::new("unheard-of", 4).model();
    assert_eq!(full(&model), [0, 1, 2, 3]);
    assert_eq!(model.assumptions.len(), 1);
    assert!(model.assumptions[0].contains("unheard-of"));
    // Recurrent layers tell themselves apart by their tensors, beside attention or without key heads.
    let header = Header::new("nemotron_h", 4)
        .list("attention.head_count_kv", vec![0, 8, 0, 8])
        .with("ssm.conv_kernel", 4)
        .with("ssm.inner_size", 8192)
        .with("ssm.state_size", 128)
        .with("ssm.group_count", 8);
    let state = 4 * (3 * (8192 + 2 * 8 * 128) + 128 * 8192);
    let mixed = header
        .clone()
        .tensor("blk.0.ssm_in.weight", "F16", &[4096, 64])
        .tensor("blk.3.ssm_in.weight", "F16", &[4096, 64])
        .model();
    let states: Vec<u64> = mixed.layers.iter().map(|layer| layer.state_bytes).collect();
    assert_eq!(states, [state, 0, 0, state]);
    assert_eq!(full(&mixed), [1, 3]);
    // With keys alone: those without key heads, unless they are a feed-forward layer.
    let guessed = header
        .list("feed_forward_length", vec![0, 0, 4096, 0])
        .model();
    let states: Vec<u64> = guessed
        .layers
        .iter()
        .map(|layer| layer.state_bytes)
        .collect();
    assert_eq!(states, [state, 0, 0, 0]);
    assert_eq!(guessed.assumptions.len(), 2);
    // Tensors of layers that the file does not count.
    let model = Header::new("deepseek2", 2)
        .tensor("blk.2.attn_q.weight", "F16", &[64, 64])
        .model();
    assert_eq!(model.weights.unused, 64 * 64 * 2);
    assert_eq!(model.assumptions.len(), 1);
    // Caches that the rules do not have, state of an unknown size, a vocabulary that nothing says.
    for (header, word) in [
        (
            Header::new("deepseek2", 2).with("attention.indexer.key_length", 128),
            "indexer",
        ),
        (
            Header::new("qwen35", 4).without("ssm.inner_size"),
            "recurrent state",
        ),
        (
            Header::new("llama", 2).without("vocab_size"),
            "logits are not counted",
        ),
        (
            Header::new("llama", 2).tensor("blk.0.ffn_up_exps.weight", "F16", &[64, 64, 2]),
            "expert_count",
        ),
        (
            Header::new("llama", 2).with("expert_count", 4),
            "expert_used_count",
        ),
    ] {
        let assumptions = header.model().assumptions;
        assert_eq!(assumptions.len(), 1, "{word}: {assumptions:?}");
        assert!(assumptions[0].contains(word), "{assumptions:?}");
    }
}
