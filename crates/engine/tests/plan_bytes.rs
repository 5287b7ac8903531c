//! Header-only files of well-known models: every figure of their table, to the byte.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use engine::plan::describe::describe;
use gguf::write::Writer;
use gguf::{GgufFile, MapMode, TensorType};
use place::bytes::{Cache, KvType, Streams, kv_alloc_bytes, kv_bytes, recurrent_bytes};
use place::model::Model;

/// The headers and their table; another folder of the same make can be given.
fn headers() -> PathBuf {
    let own = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../place/tests/data/headers");
    std::env::var_os("SPILLGATE_TEST_HEADERS").map_or_else(own, PathBuf::from)
}

fn described(path: &Path) -> (GgufFile, Model) {
    let file = GgufFile::open(path, MapMode::Read).unwrap_or_else(|e| panic!("{e}"));
    let model = describe(&file).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    (file, model)
}

#[test]
fn every_row_of_the_table() {
    let folder = headers();
    let table = fs::read_to_string(folder.join("expected.tsv")).unwrap();
    let mut lines = table.lines().filter(|line| !line.starts_with('#'));
    let columns: Vec<&str> = lines.next().unwrap().split('\t').collect();
    let mut files: BTreeMap<&str, (GgufFile, Model)> = BTreeMap::new();
    let mut rows = 0;
    for line in lines {
        let fields: Vec<&str> = line.split('\t').collect();
        let field = |name: &str| fields[columns.iter().position(|c| *c == name).unwrap()];
        let number = |name: &str| field(name).parse::<u64>().unwrap();
        let kv_type = |name: &str| field(name).parse::<KvType>().unwrap();
        let name = field("file");
        let (file, model) = files
            .entry(name)
            .or_insert_with(|| described(&folder.join(name)));
        assert!(!file.has_data(), "{name} is a header alone");
        assert_eq!(model.assumptions, [""; 0], "{name}");

        let cache = Cache {
            n_ctx: number("n_ctx"),
            n_seq: number("n_seq"),
            streams: Streams::Shared,
            type_k: kv_type("type_k"),
            type_v: kv_type("type_v"),
            n_ubatch: number("n_ubatch"),
        };
        let kv = kv_bytes(model, &cache).unwrap();
        assert_eq!(kv.total, number("kv_bytes_total"), "{name} {cache:?}");
        let alloc = kv_alloc_bytes(model, &cache).unwrap();
        assert!(alloc.total >= kv.total, "{name} {cache:?}");
        let recurrent = recurrent_bytes(model, cache.n_seq, 0).unwrap();
        assert_eq!(recurrent, number("recurrent_bytes"), "{name}");

        let tensors: u64 = file.tensors().iter().map(|tensor| tensor.n_bytes()).sum();
        assert_eq!(model.weights.total(), tensors, "{name}");
        assert_eq!(tensors, number("weight_bytes_total"), "{name}");
        assert_eq!(model.n_params, number("n_params"), "{name}");
        assert_eq!(
            model.weights.expert_bytes(),
            number("expert_bytes_total"),
            "{name}"
        );
        assert_eq!(
            model.active.bytes,
            number("active_bytes_per_token"),
            "{name}"
        );
        assert_eq!(model.weights.unused, number("unused_bytes"), "{name}");
        rows += 1;
    }
    assert!(rows > 0);
    println!("{rows} rows of {} files", files.len());
}

/// Sums that hold for every model.
#[test]
fn parts_add_up() {
    let mut models = 0;
    for entry in fs::read_dir(headers()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "gguf") {
            continue;
        }
        let (_, model) = described(&path);
        let name = path.display();
        let sum = |of: fn(&place::model::Layer) -> u64| model.layers.iter().map(of).sum::<u64>();
        assert_eq!(sum(|l| l.expert_bytes), model.weights.experts, "{name}");
        assert!(sum(|l| l.dense_bytes) <= model.weights.dense, "{name}");
        let used = model.experts.map_or(0, |e| e.used);
        let types = model.active.by_type.values();
        let read: u64 = types.map(|t| t.dense + used * t.one_expert).sum();
        assert_eq!(
            read + model.active.embedding_row,
            model.active.bytes,
            "{name}"
        );
        let one: u64 = model.active.by_type.values().map(|t| t.one_expert).sum();
        assert_eq!(sum(|l| l.one_expert_bytes), one, "{name}");
        models += 1;
    }
    assert!(models > 0);
}

#[test]
fn mixtures() {
    let (_, model) = described(&headers_of_the_repository("qwen3-30b-a3b.Q4_K_M.gguf"));
    let experts = model.experts.unwrap();
    assert_eq!((experts.total, experts.used, experts.shared), (128, 8, 0));
    assert_eq!((experts.ff, experts.shared_ff), (768, 0));
    assert_eq!((model.width, model.n_vocab), (2048, 151_936));
    assert_eq!((model.heads, model.heads_kv, model.head_k), (32, 4, 128));
    assert_eq!(model.n_ctx_train, 40_960);
    let types: Vec<&str> = model.active.by_type.keys().map(String::as_str).collect();
    assert_eq!(types, ["F32", "Q4_K", "Q6_K"]);
    let (_, model) = described(&headers_of_the_repository("deepseek-r1.mla.Q4_K_M.gguf"));
    let experts = model.experts.unwrap();
    assert_eq!((experts.total, experts.used, experts.shared), (256, 8, 1));
    assert_eq!((experts.ff, experts.shared_ff), (2048, 2048));
    assert_eq!(model.layers[2].expert_bytes, 0);
    assert!(model.layers[3].expert_bytes > 0);
}

fn headers_of_the_repository(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../place/tests/data/headers")
        .join(name)
}

/// Keys of each type arrive as such, and a split model is one model, also when all that its parts have is headers.
#[test]
fn split_files_and_kinds_of_keys() {
    let folder = tempfile::tempdir().unwrap();
    let data = vec![0_u8; 4 * 64];
    let write = |extra: &dyn Fn(&mut Writer<'_>)| {
        let mut writer = Writer::new(32).unwrap();
        writer.set("general.architecture", "gemma4").unwrap();
        writer.set("gemma4.block_count", 3_u32).unwrap();
        writer.set("gemma4.embedding_length", 64_u64).unwrap();
        writer.set("gemma4.attention.head_count", 4_i32).unwrap();
        writer
            .set(
                "gemma4.attention.head_count_kv",
                Box::<[_]>::from([1_i32, 2, 2]),
            )
            .unwrap();
        writer
            .set("gemma4.attention.sliding_window", 16_u16)
            .unwrap();
        writer
            .set(
                "gemma4.attention.sliding_window_pattern",
                Box::<[_]>::from([true, false, true]),
            )
            .unwrap();
        extra(&mut writer);
        for name in ["token_embd.weight", "blk.0.attn_q.weight", "output.weight"] {
            writer
                .tensor(name, TensorType::F32, &[64, 1], &data)
                .unwrap();
        }
        let prefix = folder.path().join("model");
        writer.write_split(&prefix, 256).unwrap()
    };
    let parts = write(&|_| {});
    assert_eq!(parts.len(), 3);
    let (whole, model) = described(&parts[1]);
    assert!(whole.has_data());
    for part in &parts {
        let bytes = fs::metadata(part).unwrap().len();
        let file = OpenOptions::new().write(true).open(part).unwrap();
        file.set_len(bytes - 256).unwrap();
    }
    let (file, header_only) = described(&parts[2]);
    assert!(!file.has_data());
    assert_eq!(header_only, model);
    assert_eq!(model.weights.total(), 3 * 256);
    assert_eq!(model.weights.embedding, 256);
    assert_eq!(model.weights.output, 256);
    let cells: Vec<(u64, Option<u64>)> =
        model.caching().map(|(_, c)| (c.heads, c.window)).collect();
    assert_eq!(cells, [(1, Some(16)), (2, None), (2, Some(16))]);

    // What is no such number is refused by its key, whatever it is instead.
    type Set<'a> = &'a dyn Fn(&mut Writer<'_>, &str);
    let bad: [(&str, Set<'_>); 5] = [
        ("gemma4.attention.head_count", &|w, k| {
            w.set(k, 4.0_f32).unwrap()
        }),
        ("gemma4.block_count", &|w, k| w.set(k, -3_i32).unwrap()),
        ("gemma4.attention.head_count_kv", &|w, k| {
            w.set(k, Box::<[_]>::from([1_i32, -2, 2])).unwrap()
        }),
        ("gemma4.attention.sliding_window", &|w, k| {
            w.set(k, "16").unwrap()
        }),
        ("gemma4.attention.sliding_window_pattern", &|w, k| {
            w.set(k, Box::<[_]>::from([0.5_f32; 3])).unwrap()
        }),
    ];
    for (key, set) in bad {
        let parts = write(&|writer| set(writer, key));
        let file = GgufFile::open(&parts[0], MapMode::Read).unwrap();
        let refused = describe(&file).unwrap_err();
        assert!(matches!(refused, place::Error::Key { .. }), "{key}");
        assert!(refused.to_string().contains(key), "{refused}");
    }
}
