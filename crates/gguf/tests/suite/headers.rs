//! Headers of published models: files that end where tensor data would begin.

use std::path::{Path, PathBuf};

use gguf::{Error, GgufFile, MapMode, TensorType};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name)
}

#[test]
fn olmoe() {
    for mode in [MapMode::Mmap, MapMode::Read] {
        let model = GgufFile::open(&data("olmoe-1b-7b.Q8_0.gguf"), mode).unwrap();
        let m = model.metadata();
        assert_eq!(model.version(), 3);
        assert_eq!(m.require_str("general.architecture").unwrap(), "olmoe");
        assert_eq!(m.require_u32("olmoe.block_count").unwrap(), 16);
        assert_eq!(m.require_u32("olmoe.expert_count").unwrap(), 64);
        assert_eq!(m.require_f32("olmoe.rope.freq_base").unwrap(), 10_000.0);
        assert_eq!(model.tensors().len(), 195);
        let experts = model.tensor("blk.15.ffn_down_exps.weight").unwrap();
        assert_eq!(experts.ty, TensorType::Q8_0);
        assert_eq!(experts.dims.as_slice(), [1024, 2048, 64]);
        assert_eq!(experts.n_bytes(), 1024 * 2048 * 64 / 32 * 34);
        assert_eq!(
            (experts.row_len(), experts.n_rows(), experts.ne(3)),
            (1024, 2048 * 64, 1)
        );
        let n_bytes: u64 = model.tensors().iter().map(|t| t.n_bytes()).sum();
        let n_elements: u64 = model.tensors().iter().map(|t| t.n_elements()).sum();
        assert_eq!((n_bytes, n_elements), (7_358_160_896, 6_919_161_856));

        assert!(!model.has_data());
        let error = model.check_data().unwrap_err();
        let has_all = matches!(&error, Error::Truncated { tensor, needs: 109_474_368, has: 12_864, missing: 195, of: 195, .. }
            if tensor == "token_embd.weight");
        assert!(has_all, "{error}");
    }
}

#[test]
fn gpt_oss() {
    let model = GgufFile::open(&data("gpt-oss-20b.MXFP4.gguf"), MapMode::Mmap).unwrap();
    assert_eq!(model.tensors().len(), 459);
    let experts = model.tensor("blk.0.ffn_gate_exps.weight").unwrap();
    assert_eq!(experts.ty, TensorType::MXFP4);
    assert_eq!(experts.n_bytes(), experts.n_elements() / 32 * 17);
    assert!(!model.has_data());
}
