//! What is written is read back the same, in one file and in several.

use std::fs;
use std::path::{Path, PathBuf};

use gguf::write::Writer;
use gguf::{
    Array, Error, GgufFile, GgufString, Header, MapMode, Metadata, ShapeFault, StringArray,
    TensorType, Value,
};
use proptest::collection::vec;
use proptest::prelude::*;

const MODES: [MapMode; 2] = [MapMode::Mmap, MapMode::Read];

fn written(writer: Writer<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let n = writer.write_to(&mut bytes).unwrap();
    assert_eq!(n, bytes.len() as u64);
    bytes
}

fn scalar() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<f32>().prop_map(Value::F32),
        any::<bool>().prop_map(Value::Bool),
        vec(any::<u8>(), 0..20).prop_map(|bytes| Value::String(GgufString::from(bytes))),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        any::<f64>().prop_map(Value::F64),
    ]
}

fn array() -> impl Strategy<Value = Array> {
    let flat = prop_oneof![
        vec(any::<u8>(), 0..9).prop_map(|items| Array::U8(items.into())),
        vec(any::<i8>(), 0..9).prop_map(|items| Array::I8(items.into())),
        vec(any::<u16>(), 0..9).prop_map(|items| Array::U16(items.into())),
        vec(any::<i16>(), 0..9).prop_map(|items| Array::I16(items.into())),
        vec(any::<u32>(), 0..9).prop_map(|items| Array::U32(items.into())),
        vec(any::<i32>(), 0..9).prop_map(|items| Array::I32(items.into())),
        vec(any::<f32>(), 0..9).prop_map(|items| Array::F32(items.into())),
        vec(any::<bool>(), 0..9).prop_map(|items| Array::Bool(items.into())),
        vec(vec(any::<u8>(), 0..9), 0..9).prop_map(|items| Array::String(items.iter().collect())),
        vec(any::<u64>(), 0..9).prop_map(|items| Array::U64(items.into())),
        vec(any::<i64>(), 0..9).prop_map(|items| Array::I64(items.into())),
        vec(any::<f64>(), 0..9).prop_map(|items| Array::F64(items.into())),
    ];
    flat.prop_recursive(2, 30, 4, |inner| {
        vec(inner, 0..4).prop_map(|items| Array::Array(items.into()))
    })
}

fn metadata() -> impl Strategy<Value = Metadata> {
    let value = prop_oneof![3 => scalar(), 1 => array().prop_map(Value::Array)];
    vec(("[a-z]{1,3}", value), 0..20).prop_map(|entries| {
        let mut metadata = Metadata::new();
        for (key, value) in entries {
            metadata.set(&key, value);
        }
        metadata
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn metadata_are_the_same(metadata in metadata(), power in 3..=12_u32) {
        let alignment = 1 << power;
        let write = |metadata: &Metadata| {
            let mut writer = Writer::new(alignment).unwrap();
            writer.set_all(metadata);
            written(writer)
        };
        let bytes = write(&metadata);
        prop_assert!((bytes.len() as u64).is_multiple_of(u64::from(alignment)));
        let header = Header::parse(&bytes).unwrap();
        prop_assert_eq!((header.version, header.alignment), (3, alignment));
        let read: Vec<(&str, &Value)> = header.metadata.iter().filter(|(key, _)| *key != "general.alignment").collect();
        let set: Vec<(&str, &Value)> = metadata.iter().collect();
        // As text, in which NaN equals NaN; its bits are in the bytes.
        prop_assert_eq!(format!("{read:?}"), format!("{set:?}"));
        prop_assert_eq!(write(&header.metadata), bytes);
    }
}

/// Names, types, dimensions and bytes of some tensors, of which none has the same bytes as another.
fn some_tensors() -> Vec<(String, TensorType, Vec<u64>, Vec<u8>)> {
    let shapes: [&[u64]; 6] = [
        &[256],
        &[256, 3],
        &[512, 1, 2],
        &[256, 2, 1, 2],
        &[256, 1],
        &[1024],
    ];
    let types = TensorType::ALL.iter().zip(shapes.iter().cycle());
    let tensors = types.enumerate().map(|(i, (&ty, dims))| {
        let n_elements: u64 = dims.iter().product();
        let n_bytes = n_elements as usize / ty.block_len() * ty.block_bytes();
        let bytes = (0..n_bytes).map(|at| (at * 7 + i * 13) as u8).collect();
        (format!("blk.{i}.{ty}"), ty, dims.to_vec(), bytes)
    });
    tensors.collect()
}

fn some_model(alignment: u32) -> Writer<'static> {
    let mut writer = Writer::new(alignment).unwrap();
    writer.set("general.architecture", "llama").unwrap();
    let tokens: StringArray = ["a", "b"].into_iter().collect();
    writer.set("tokenizer.ggml.tokens", tokens).unwrap();
    for (i, (name, ty, dims, bytes)) in some_tensors().into_iter().enumerate() {
        if i % 2 == 0 {
            writer.tensor(&name, ty, &dims, bytes).unwrap();
        } else {
            let in_pieces = move |out: &mut dyn std::io::Write| {
                bytes.chunks(100).try_for_each(|piece| out.write_all(piece))
            };
            writer.tensor_from(&name, ty, &dims, in_pieces).unwrap();
        }
    }
    writer
}

fn check_some_model(path: &Path) -> GgufFile {
    for mode in MODES {
        let model = GgufFile::open(path, mode).unwrap();
        model.check_data().unwrap();
        assert_eq!(
            model
                .metadata()
                .require_str("general.architecture")
                .unwrap(),
            "llama"
        );
        assert_eq!(model.tensors().len(), TensorType::ALL.len());
        for (tensor, (name, ty, dims, bytes)) in model.tensors().iter().zip(some_tensors()) {
            assert_eq!(
                (&tensor.name, tensor.ty, tensor.dims.as_slice()),
                (&name, ty, &dims[..])
            );
            assert_eq!(model.tensor(&name), Some(tensor));
            assert_eq!(*model.bytes(tensor).unwrap(), bytes);
            let mut part = vec![0; bytes.len() / 2];
            model.read_at(tensor, 3, &mut part).unwrap();
            assert_eq!(part, bytes[3..3 + part.len()]);
            assert_eq!(tensor.n_rows() * tensor.row_bytes(), tensor.n_bytes());
        }
        assert_eq!(model.tensor("blk.0"), None);
    }
    GgufFile::open(path, MapMode::Read).unwrap()
}

#[test]
fn headers_of_many_pieces() {
    // A file that is not mapped is read in pieces of 64 KiB: values of every kind lie across their borders.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut writer = Writer::new(32).unwrap();
    let tokens: StringArray = (0..30_000).map(|i| "x".repeat(i % 23)).collect();
    writer.set("tokens", tokens).unwrap();
    writer.set("odd", "odd").unwrap();
    let scores: Box<[f32]> = (0..50_001).map(|i| i as f32).collect();
    writer.set("scores", scores).unwrap();
    let wide: Box<[i64]> = (0..20_001).map(|i| i << 40).collect();
    writer.set("wide", wide).unwrap();
    let flags: Box<[bool]> = (0..70_001).map(|i| i % 3 == 0).collect();
    writer.set("flags", flags).unwrap();
    writer
        .set("text", "0123456789abcdef".repeat(20_000).as_str())
        .unwrap();
    writer.set(&"k".repeat(65_535), 1_u32).unwrap();
    for i in 0..3_000 {
        writer
            .tensor(
                &format!("blk.{i}.weight"),
                TensorType::F32,
                &[1, 1],
                vec![0; 4],
            )
            .unwrap();
    }
    writer.write_file(&path).unwrap();

    let bytes = fs::read(&path).unwrap();
    let header = Header::parse(&bytes).unwrap();
    assert!(header.data_start > 10 * 65_536);
    for mode in MODES {
        let model = GgufFile::open(&path, mode).unwrap();
        assert!(*model.metadata() == header.metadata);
        assert!(model.tensors() == header.tensors);
    }
    assert_eq!(
        header.metadata.require_strings("tokens").unwrap().get(22),
        Some(&[b'x'; 22][..])
    );
    assert_eq!(
        header.metadata.require_floats("scores").unwrap()[50_000],
        50_000.0
    );
    assert_eq!(
        header.metadata.require_ints("wide").unwrap()[20_000],
        20_000 << 40
    );
}

#[test]
fn models_can_be_shared_by_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<GgufFile>();
    shared::<Error>();
}

#[test]
fn one_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    for alignment in [8, 32, 64, 4096] {
        let n = some_model(alignment).write_file(&path).unwrap();
        assert_eq!(n, fs::metadata(&path).unwrap().len());
        assert_eq!(fs::read(&path).unwrap(), written(some_model(alignment)));
        let model = check_some_model(&path);
        assert_eq!(model.file_bytes(), n);
        let aligned = |t: &gguf::TensorInfo| t.offset.is_multiple_of(alignment.into());
        assert!(model.tensors().iter().all(aligned));
    }
}

#[test]
fn several_parts() {
    for (alignment, part_bytes_max) in [(32, 4096), (64, 0), (32, u64::MAX)] {
        let dir = tempfile::tempdir().unwrap();
        let paths = some_model(alignment)
            .write_split(&dir.path().join("some-model"), part_bytes_max)
            .unwrap();
        let n_parts = paths.len();
        match part_bytes_max {
            0 => assert_eq!(n_parts, TensorType::ALL.len(), "one tensor a part"),
            u64::MAX => assert_eq!(n_parts, 1),
            _ => assert!((2..TensorType::ALL.len()).contains(&n_parts)),
        }
        assert_eq!(
            paths[0],
            dir.path()
                .join(format!("some-model-00001-of-{n_parts:05}.gguf"))
        );
        for path in &paths {
            let model = check_some_model(path);
            let parts: Vec<PathBuf> = model.parts().map(|(path, _)| path.to_owned()).collect();
            assert_eq!(parts, paths);
            for no in 0..n_parts {
                let of_part: Vec<u64> = model
                    .tensors()
                    .iter()
                    .filter(|t| t.part == no)
                    .map(|t| t.n_bytes())
                    .collect();
                assert!(of_part.len() == 1 || of_part.iter().sum::<u64>() <= part_bytes_max);
            }
        }
        assert_eq!(
            fs::read_dir(dir.path()).unwrap().count(),
            n_parts,
            "no other files are left"
        );
    }
}

#[test]
fn a_failed_write_leaves_the_old_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    fs::write(&path, "old").unwrap();
    let mut writer = Writer::new(32).unwrap();
    let fail = |_: &mut dyn std::io::Write| Err(std::io::Error::other("disk on fire"));
    writer
        .tensor_from("w", TensorType::F32, &[4], fail)
        .unwrap();
    let error = writer.write_file(&path).unwrap_err();
    assert!(
        matches!(error, Error::Io { .. }) && error.to_string().contains("disk on fire"),
        "{error}"
    );
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(
        fs::read_dir(dir.path()).unwrap().count(),
        1,
        "no other files are left"
    );
}

#[test]
fn tensors_of_the_wrong_size() {
    let size = |found: usize| {
        let mut writer = Writer::new(32).unwrap();
        let fill = move |out: &mut dyn std::io::Write| out.write_all(&vec![0; found]);
        writer
            .tensor_from("w", TensorType::F32, &[4], fill)
            .unwrap();
        writer.write_to(std::io::sink())
    };
    assert!(size(16).is_ok());
    for found in [0, 15, 17] {
        let error = size(found).unwrap_err();
        let is_it = matches!(&error, Error::WrongSize { tensor, found: f, expected: 16 } if tensor == "w" && *f == found as u64);
        assert!(is_it, "{error}");
    }
    let mut writer = Writer::new(32).unwrap();
    let error = writer
        .tensor("w", TensorType::F32, &[4], &[0; 15])
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::WrongSize {
                found: 15,
                expected: 16,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn what_cannot_be_read_is_not_written() {
    let refuse = |change: fn(&mut Writer<'static>) -> Result<(), Error>| {
        let mut writer = Writer::new(32).unwrap();
        let mut out = Vec::new();
        let error = change(&mut writer)
            .and_then(|()| writer.write_to(&mut out))
            .unwrap_err();
        assert!(
            out.is_empty(),
            "nothing is written before everything is checked"
        );
        error
    };
    fn tensor(writer: &mut Writer<'static>, name: &str) -> Result<(), Error> {
        writer.tensor(name, TensorType::F32, &[1], vec![0; 4])
    }
    assert!(matches!(
        Writer::new(24).err(),
        Some(Error::Alignment { found: 24, .. })
    ));
    assert!(matches!(
        refuse(|w| w.set("split.no", 1_u16)),
        Error::ReservedKey { .. }
    ));
    assert!(matches!(
        refuse(|w| w.set("general.alignment", 32_u32)),
        Error::ReservedKey { .. }
    ));
    assert!(matches!(
        refuse(|w| w.set("", 1_u16)),
        Error::BadName { .. }
    ));
    assert!(matches!(
        refuse(|w| w.set(&"k".repeat(65_536), 1_u16)),
        Error::Limit { .. }
    ));
    assert!(matches!(refuse(|w| tensor(w, "")), Error::BadName { .. }));
    assert!(matches!(
        refuse(|w| tensor(w, &"n".repeat(128))),
        Error::Limit { .. }
    ));
    assert!(matches!(
        refuse(|w| tensor(w, "w").and_then(|()| tensor(w, "w"))),
        Error::DuplicateTensor { .. }
    ));
    let shape = |dims: &'static [u64], ty: TensorType| {
        let error = Writer::new(32)
            .unwrap()
            .tensor("w", ty, dims, vec![])
            .unwrap_err();
        let Error::Shape { fault, .. } = error else {
            panic!("{error}");
        };
        fault
    };
    assert_eq!(shape(&[], TensorType::F32), ShapeFault::Rank(0));
    assert_eq!(shape(&[1; 5], TensorType::F32), ShapeFault::Rank(5));
    assert_eq!(
        shape(&[4, 0], TensorType::F32),
        ShapeFault::Zero { axis: 1 }
    );
    let deep = refuse(|w| {
        let array = (0..4).fold(Array::U8(Box::new([])), |inner, _| {
            Array::Array(Box::new([inner]))
        });
        w.set("deep", array)
    });
    assert!(matches!(deep, Error::Limit { found: 5, .. }), "{deep}");
    let too_large = refuse(|w| {
        for name in ["a", "b", "c"] {
            w.tensor_from(name, TensorType::F32, &[1 << 60], |_| Ok(()))?;
        }
        Ok(())
    });
    assert!(
        matches!(&too_large, Error::OffsetOverflow { tensor, .. } if tensor == "b"),
        "{too_large}"
    );

    let dir = tempfile::tempdir().unwrap();
    let mut writer = Writer::new(32).unwrap();
    tensor(&mut writer, "w")
        .and_then(|()| tensor(&mut writer, "w"))
        .unwrap();
    let error = writer
        .write_split(&dir.path().join("model"), 0)
        .unwrap_err();
    assert!(matches!(error, Error::DuplicateTensor { .. }), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn metadata_by_type() {
    let mut m = Metadata::new();
    m.set("u8", 7_u8);
    m.set("negative", -7_i64);
    m.set("large", u64::MAX);
    m.set("half", 0.5_f64);
    m.set("yes", true);
    m.set("text", "t\u{e9}xt");
    m.set("bytes", GgufString::from(vec![b't', 0xe9]));
    m.set("ints", Value::Array(Array::U16(Box::new([1, 65_535]))));
    m.set(
        "large ints",
        Value::Array(Array::U64(Box::new([1, u64::MAX]))),
    );
    m.set("floats", Value::Array(Array::F64(Box::new([0.25]))));
    m.set("bools", Value::Array(Array::Bool(Box::new([true, false]))));
    let strings: StringArray = [&b"a"[..], b"\xff"].into_iter().collect();
    m.set("strings", strings);

    assert_eq!(m.u32("u8").unwrap(), Some(7));
    assert_eq!(m.u64("large").unwrap(), Some(u64::MAX));
    assert_eq!(m.f32("half").unwrap(), Some(0.5));
    assert_eq!(m.bool("yes").unwrap(), Some(true));
    assert_eq!(m.str("text").unwrap(), Some("t\u{e9}xt"));
    assert_eq!(m.ints("ints").unwrap(), Some(vec![1, 65_535]));
    assert_eq!(m.floats("floats").unwrap(), Some(vec![0.25]));
    assert_eq!(m.bools("bools").unwrap(), Some(&[true, false][..]));
    let strings: Vec<&[u8]> = m.require_strings("strings").unwrap().iter().collect();
    assert_eq!(strings, [&b"a"[..], b"\xff"]);
    assert_eq!(m.u32("missing").unwrap(), None);
    assert_eq!(m.get("missing"), None);
    assert_eq!(m.len(), 12);

    let refused = |error: Error, fragments: &[&str]| {
        let text = error.to_string();
        for fragment in fragments {
            assert!(text.contains(fragment), "`{fragment}` is not in: {text}");
        }
    };
    refused(
        m.u32("negative").unwrap_err(),
        &["`negative`", "-7", "0 to 4294967295"],
    );
    refused(
        m.u32("large").unwrap_err(),
        &["`large`", "18446744073709551615"],
    );
    refused(m.u64("negative").unwrap_err(), &["`negative`", "-7"]);
    refused(m.u32("half").unwrap_err(), &["`half`", "f64", "integer"]);
    refused(m.f32("u8").unwrap_err(), &["`u8`", "is u8", "f32 or f64"]);
    refused(m.bool("u8").unwrap_err(), &["`u8`", "is u8", "bool"]);
    refused(
        m.str("ints").unwrap_err(),
        &["`ints`", "array of u16", "string"],
    );
    refused(m.str("bytes").unwrap_err(), &["`bytes`", "not UTF-8"]);
    refused(
        m.ints("large ints").unwrap_err(),
        &["`large ints`", "18446744073709551615"],
    );
    refused(
        m.strings("ints").unwrap_err(),
        &["`ints`", "array of u16", "array of string"],
    );
    refused(
        m.require_u32("missing").unwrap_err(),
        &["`missing`", "is missing", "integer"],
    );
    refused(
        m.require_str("missing").unwrap_err(),
        &["`missing`", "is missing", "string"],
    );
    refused(
        m.require_floats("bools").unwrap_err(),
        &["`bools`", "array of bool", "array of f32"],
    );

    m.set("u8", 8_u8);
    assert_eq!(
        m.iter().next(),
        Some(("u8", &Value::U8(8))),
        "a key that is set again keeps its place"
    );
}
