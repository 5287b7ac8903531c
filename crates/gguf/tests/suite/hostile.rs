//! Files that must be refused, each with the error that says what is wrong and where.
//!
//! Every file is read three ways: from memory, mapped, and by reads. All must agree.

use std::fs;
use std::path::Path;

use crate::raw::{Raw, tensor_type, value_type};
use gguf::{Error, GgufFile, Header, MapMode, NameFault, Place, ShapeFault, TensorType, limits};

/// Reads the file in all ways and returns the error, whose text must have all of `fragments`.
fn refusal(raw: &Raw, fragments: &[&str]) -> Error {
    let error = Header::parse(&raw.0).expect_err("a hostile file was accepted");
    let text = error.to_string();
    for fragment in fragments {
        assert!(text.contains(fragment), "`{fragment}` is not in: {text}");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    fs::write(&path, &raw.0).unwrap();
    for mode in [MapMode::Mmap, MapMode::Read] {
        let from_file = GgufFile::open(&path, mode).expect_err("a hostile file was opened");
        let from_file = from_file
            .to_string()
            .replace(path.to_str().unwrap(), "<memory>");
        assert_eq!(from_file, text, "{mode:?}");
    }
    error
}

/// Asserts that a file is refused with an error of a certain form, at a certain place, and a text that has the fragments.
macro_rules! refused {
    ($raw:expr, $fragments:expr, at $offset:expr, $error:ident { $($field:tt)* } $(if $guard:expr)?) => {{
        let (raw, offset): (Raw, u64) = ($raw, $offset);
        let error = refusal(&raw, &$fragments);
        let is_it = matches!(&error, Error::$error { at: Place { offset: found, .. }, $($field)* } if *found == offset $(&& $guard)?);
        assert!(is_it, "at {offset}, got: {error:?}");
    }};
    ($raw:expr, $fragments:expr, $error:ident { $($field:tt)* } $(if $guard:expr)?) => {{
        let error = refusal(&$raw, &$fragments);
        assert!(matches!(&error, Error::$error { $($field)* } $(if $guard)?), "got: {error:?}");
    }};
}

/// Bytes of a header without keys and tensors.
const HEAD: u64 = 24;

#[test]
fn what_is_no_gguf_file() {
    refused!(Raw::default(), ["begins with \"\""], NotGguf { found, .. } if found.is_empty());
    refused!(Raw::default().bytes(b"GG"), ["\"GG\""], NotGguf { found, .. } if found == b"GG");
    refused!(Raw::default().bytes(b"GGML").zeros(40), ["\"GGML\""], NotGguf { found, .. } if found == b"GGML");
    let lfs_pointer = Raw::default().bytes(b"version https://git-lfs.github.com/spec/v1\n");
    refused!(lfs_pointer, ["\"vers\""], NotGguf { .. });
    let binary = Raw::default().bytes(&[0x80, 2, b'}', 0]);
    refused!(binary, ["\\x80\\x02}\\x00"], NotGguf { .. });
}

#[test]
fn versions_that_cannot_be_read() {
    let version = |version: u32| Raw::default().bytes(b"GGUF").u32(version).zeros(16);
    refused!(
        version(3_u32.swap_bytes()),
        ["big-endian", "version 3"],
        BigEndian { version: 3, .. }
    );
    refused!(
        version(2_u32.swap_bytes()),
        ["big-endian", "version 2"],
        BigEndian { version: 2, .. }
    );
    refused!(version(0), ["version 0"], Version { found: 0, .. });
    refused!(
        version(1),
        ["version 1", "convert"],
        Version { found: 1, .. }
    );
    refused!(version(4), ["version 4"], Version { found: 4, .. });
    refused!(
        version(u32::MAX),
        ["version 4294967295"],
        Version {
            found: u32::MAX,
            ..
        }
    );
}

#[test]
fn version_2_is_read() {
    let raw = Raw::default().bytes(b"GGUF").u32(2).u64(0).u64(0);
    assert_eq!(Header::parse(&raw.0).unwrap().version, 2);
}

#[test]
fn headers_that_end_early() {
    let head = Raw::new(0, 0);
    let cut = |n: usize| Raw(head.0[..n].to_vec());
    refused!(cut(6), ["header", "2 left"], at 4, UnexpectedEnd { needs: 4, left: 2, .. });
    refused!(cut(15), ["header", "7 left"], at 8, UnexpectedEnd { needs: 8, left: 7, .. });
    refused!(cut(16), ["header", "0 left"], at 16, UnexpectedEnd { needs: 8, left: 0, .. });
}

#[test]
fn counts_beyond_the_file() {
    refused!(Raw::new(u64::MAX, 0).zeros(99), ["number of tensors", "18446744073709551615"], at 16, Limit { found: u64::MAX, max: limits::TENSORS_MAX, .. });
    refused!(Raw::new(0, u64::MAX).zeros(99), ["number of keys"], at HEAD, Limit { found: u64::MAX, max: limits::METADATA_KEYS_MAX, .. });
    refused!(Raw::new(0, 60_000).zeros(99), ["header", "99 left"], at HEAD, UnexpectedEnd { left: 99, needs: 840_000, .. });
    refused!(Raw::new(200_000, 0).zeros(99), ["header", "99 left"], at HEAD, UnexpectedEnd { left: 99, needs: 6_600_000, .. });
}

#[test]
fn keys() {
    refused!(Raw::new(0, 1).u64(u64::MAX).zeros(99), ["key number 0", "length"], at HEAD, Limit { found: u64::MAX, .. });
    refused!(Raw::new(0, 1).u64(60_000).zeros(99), ["key number 0"], at HEAD + 8, UnexpectedEnd { needs: 60_000, left: 99, .. });
    refused!(Raw::new(0, 1).key("", value_type::U32).u32(0), ["key number 0", "empty"], at HEAD + 8, BadName { fault: NameFault::Empty, .. });
    refused!(Raw::new(0, 1).key(b"a\xff", value_type::U32).u32(0), ["not UTF-8", "a\\xff"], at HEAD + 8, BadName { fault: NameFault::NotUtf8, .. });
    let twice = Raw::new(0, 3)
        .key_u32("a.b", 1)
        .key_u32("c", 2)
        .key_u32("a.b", 1);
    refused!(twice, ["`a.b`", "twice"], at HEAD + 19 + 17, DuplicateKey { key, .. } if key == "a.b");
    let one_too_few = Raw::new(0, 2).key_u32("key", 1).zeros(9);
    refused!(one_too_few, ["key number 1", "empty"], at HEAD + 19 + 8, BadName { fault: NameFault::Empty, .. });
}

#[test]
fn scalar_values() {
    let key = |value_type: u32| Raw::new(0, 1).key("some.key", value_type);
    let value = HEAD + 8 + 8 + 4;
    refused!(key(13).zeros(8), ["`some.key`", "13"], at value - 4, UnknownValueType { found: 13, .. });
    refused!(key(u32::MAX).zeros(8), ["`some.key`"], at value - 4, UnknownValueType { found: u32::MAX, .. });
    refused!(Raw::new(0, 1).string("some.key").zeros(3), ["`some.key`", "3 left"], at value - 4, UnexpectedEnd { needs: 4, left: 3, .. });
    refused!(key(value_type::U64).zeros(7), ["`some.key`", "7 left"], at value, UnexpectedEnd { needs: 8, left: 7, .. });
    refused!(key(value_type::U8), ["`some.key`", "0 left"], at value, UnexpectedEnd { needs: 1, left: 0, .. });
    refused!(key(value_type::BOOL).bytes(&[2]), ["`some.key`", "truth"], at value, BadBool { found: 2, .. });
    refused!(key(value_type::STRING).u64(u64::MAX).zeros(50), ["`some.key`"], at value + 8, UnexpectedEnd { needs: u64::MAX, left: 50, .. });
    refused!(key(value_type::STRING).u64(51).zeros(50), ["`some.key`"], at value + 8, UnexpectedEnd { needs: 51, left: 50, .. });
}

#[test]
fn arrays() {
    let array = |item_type: u32, count: u64| Raw::new(0, 1).key_array("list", item_type, count);
    let items = HEAD + 8 + 4 + 4 + 4 + 8;
    refused!(array(99, 1).zeros(8), ["`list`", "99"], at items - 12, UnknownValueType { found: 99, .. });
    for item_type in 0..=12 {
        refused!(array(item_type, u64::MAX).zeros(8), ["`list`", "items"], at items, Limit { found: u64::MAX, .. });
        refused!(array(item_type, 60_000).zeros(8), ["`list`", "8 left"], at items, UnexpectedEnd { left: 8, .. });
    }
    refused!(array(value_type::F64, 3).zeros(23), ["`list`"], at items, UnexpectedEnd { needs: 24, left: 23, .. });
    refused!(array(value_type::BOOL, 3).bytes(&[0, 1, 255]), ["`list`"], at items + 2, BadBool { found: 255, .. });
    let second_too_long = array(value_type::STRING, 2)
        .string("token")
        .u64(5)
        .bytes(b"toke");
    refused!(second_too_long, ["`list`"], at items + 13 + 8, UnexpectedEnd { needs: 5, left: 4, .. });
    let strings_missing = array(value_type::STRING, 3).string("a").string("a");
    refused!(strings_missing, ["`list`"], at items, UnexpectedEnd { needs: 24, left: 18, .. });
}

#[test]
fn arrays_in_arrays() {
    let nested = |depth: usize| {
        let outer = Raw::new(0, 1).key("list", value_type::ARRAY);
        let arrays = (1..depth).fold(outer, |raw, _| raw.u32(value_type::ARRAY).u64(1));
        arrays.u32(value_type::U8).u64(1).bytes(&[7])
    };
    assert!(Header::parse(&nested(limits::ARRAY_DEPTH_MAX).0).is_ok());
    let too_deep = limits::ARRAY_DEPTH_MAX + 1;
    refused!(
        nested(too_deep),
        ["`list`", "depth"],
        Limit {
            found: 5,
            max: 4,
            ..
        }
    );
    refused!(
        nested(100_000),
        ["`list`", "depth"],
        Limit {
            found: 5,
            max: 4,
            ..
        }
    );

    // Few bytes each, much memory each.
    let wide = Raw::new(0, 1)
        .key_array("list", value_type::ARRAY, 65_537)
        .zeros(65_537 * 12);
    refused!(
        wide,
        ["`list`", "arrays in arrays"],
        Limit {
            found: 65_537,
            max: limits::INNER_ARRAYS_MAX,
            ..
        }
    );
    let key = |raw: Raw, key: &str| {
        raw.key_array(key, value_type::ARRAY, 40_000)
            .zeros(40_000 * 12)
    };
    let in_two_keys = key(key(Raw::new(0, 2), "a"), "b");
    refused!(
        in_two_keys,
        ["`b`", "arrays in arrays"],
        Limit { found: 80_000, .. }
    );
}

#[test]
fn alignments() {
    for found in [0, 1, 4, 24, 33, 1 << 21, u32::MAX] {
        let raw = Raw::new(0, 1).key_u32("general.alignment", found);
        let found = found.to_string();
        refused!(
            raw,
            ["`general.alignment`", found.as_str()],
            Alignment { .. }
        );
    }
    let text = Raw::new(0, 1)
        .key("general.alignment", value_type::STRING)
        .string("32");
    refused!(text, ["`general.alignment`", "string"], WrongType { .. });
    let negative = Raw::new(0, 1)
        .key("general.alignment", value_type::I32)
        .bytes(&(-32_i32).to_le_bytes());
    refused!(
        negative,
        ["`general.alignment`", "-32"],
        OutOfRange { found: -32, .. }
    );
}

#[test]
fn tensor_names() {
    let name = |name: &[u8]| {
        Raw::new(1, 0)
            .tensor(name, &[1], tensor_type::F32, 0)
            .zeros(8)
    };
    refused!(name(b""), ["tensor number 0", "empty"], at HEAD + 8, BadName { fault: NameFault::Empty, .. });
    refused!(name(b"\xc3("), ["tensor number 0", "\\xc3("], at HEAD + 8, BadName { fault: NameFault::NotUtf8, .. });
    refused!(name(&[b'n'; 128]), ["tensor number 0", "128"], at HEAD, Limit { found: 128, .. });
    refused!(Raw::new(1, 0).u64(u64::MAX).zeros(99), ["tensor number 0"], at HEAD, Limit { found: u64::MAX, .. });
    assert!(Header::parse(&name(&[b'n'; 127]).0).is_ok());
    let twice = Raw::new(2, 0)
        .tensor("w", &[1], 0, 0)
        .tensor("w", &[1], 0, 32);
    refused!(twice, ["`w`", "twice"], DuplicateTensor { tensor, .. } if tensor == "w");
}

#[test]
fn tensor_dimensions() {
    let dims = |dims: &[u64], ty: u32| Raw::new(1, 0).tensor("blk.0.w", dims, ty, 0);
    let at = HEAD + 8 + 7;
    for rank in [0, 5, u32::MAX] {
        let raw = Raw::new(1, 0).string("blk.0.w").u32(rank).zeros(99);
        let rank = u64::from(rank);
        refused!(raw, ["`blk.0.w`", "dimensions"], at at, Shape { fault: ShapeFault::Rank(found), .. } if *found == rank);
    }
    for axis in 0..4 {
        let mut zero = [2; 4];
        zero[axis] = 0;
        refused!(dims(&zero, tensor_type::F32), ["`blk.0.w`", "zero"], at at, Shape { fault: ShapeFault::Zero { axis: found }, .. } if *found == axis);
    }
    let product = dims(&[1 << 32, 1 << 32], tensor_type::F32);
    refused!(product, ["`blk.0.w`", "4294967296 x 4294967296"], at at, Shape { fault: ShapeFault::Overflow(_), .. });
    let wraps_to_one = dims(&[u64::MAX, u64::MAX], tensor_type::F32);
    refused!(wraps_to_one, ["`blk.0.w`"], at at, Shape { fault: ShapeFault::Overflow(_), .. });
    let bytes = dims(&[1 << 61, 1], tensor_type::F64);
    refused!(bytes, ["`blk.0.w`"], at at, Shape { fault: ShapeFault::Overflow(_), .. });
    let bytes_signed = dims(&[1 << 60], tensor_type::F64);
    refused!(bytes_signed, ["`blk.0.w`"], at at, Shape { fault: ShapeFault::Overflow(_), .. });
    let partial = dims(&[128, 2], tensor_type::Q4_K);
    refused!(partial, ["`blk.0.w`", "128", "256", "Q4_K"], at at, Shape { fault: ShapeFault::PartialBlock { row_len: 128, ty: TensorType::Q4_K }, .. });
}

#[test]
fn tensor_types() {
    let ty = |ty: u32| Raw::new(1, 0).tensor("w", &[256], ty, 0);
    let at = HEAD + 8 + 1 + 4 + 8;
    refused!(ty(1000), ["`w`", "1000", "unknown"], at at, TensorType { found: 1000, retired: None, .. });
    refused!(ty(u32::MAX), ["`w`", "unknown"], at at, TensorType { retired: None, .. });
    refused!(ty(4), ["`w`", "`Q4_2`", "retired"], at at, TensorType { found: 4, retired: Some("Q4_2"), .. });
    refused!(ty(31), ["`w`", "`Q4_0_4_4`"], at at, TensorType { found: 31, .. });
}

#[test]
fn tensor_offsets() {
    let at = HEAD + 8 + 1 + 4 + 8 + 4;
    let offset = |offset: u64| Raw::new(1, 0).tensor("w", &[8], tensor_type::F32, offset);
    refused!(offset(1), ["`w`", "multiple of 32"], at at, Misaligned { offset: 1, alignment: 32, .. });
    refused!(offset(u64::MAX), ["`w`"], at at, Misaligned { offset: u64::MAX, .. });
    refused!(offset(u64::MAX - 31), ["`w`", "beyond any file"], at at, OffsetOverflow { bytes: 32, .. });
    refused!(offset(i64::MAX as u64 - 31), ["`w`", "beyond any file"], at at, OffsetOverflow { .. });
    let wide = Raw::new(1, 1)
        .key_u32("general.alignment", 64)
        .tensor("w", &[8], 0, 32);
    refused!(
        wide,
        ["`w`", "multiple of 64"],
        Misaligned {
            offset: 32,
            alignment: 64,
            ..
        }
    );
}

#[test]
fn tensors_that_share_bytes() {
    let two = |a: u64, b: u64| {
        Raw::new(2, 0)
            .tensor("a", &[24], 0, a)
            .tensor("b", &[8], 0, b)
            .pad(32)
    };
    let data = two(0, 0).len();
    refused!(two(0, 0), ["`a`", "`b`"], at data, Overlap { .. });
    refused!(two(0, 32), ["`b`", "inside of tensor `a`"], at data + 32, Overlap { .. });
    refused!(two(0, 64), ["`b`", "inside of tensor `a`"], at data + 64, Overlap { .. });
    refused!(two(32, 96), ["`b`", "inside of tensor `a`"], at data + 96, Overlap { .. });
    assert!(Header::parse(&two(0, 96).0).is_ok());
    assert!(
        Header::parse(&two(32, 0).0).is_ok(),
        "the order in the file is free"
    );
    assert!(Header::parse(&two(0, 9600).0).is_ok(), "gaps are free");
}

#[test]
fn tensor_entries_that_end_early() {
    let whole = Raw::new(1, 0).tensor("w", &[8, 2], tensor_type::F32, 0);
    // Enough for the smallest tensor, so that the count alone does not give it away.
    for len in HEAD + 33..whole.len() {
        let cut = Raw(whole.0[..len as usize].to_vec());
        refused!(cut, ["`w`"], UnexpectedEnd { at, left, .. } if at.offset + left == len);
    }
}

#[test]
fn a_header_larger_than_any() {
    // No bytes on disk: the file has a hole.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let raw = Raw::new(0, 1)
        .key("text", value_type::STRING)
        .u64(limits::HEADER_BYTES_MAX);
    fs::write(&path, &raw.0).unwrap();
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(1 << 30)
        .unwrap();
    for mode in [MapMode::Mmap, MapMode::Read] {
        let error = GgufFile::open(&path, mode).unwrap_err();
        let is_it = matches!(
            &error,
            Error::Limit {
                max: limits::HEADER_BYTES_MAX,
                ..
            }
        );
        assert!(is_it && error.to_string().contains("key `text`"), "{error}");
    }
}

/// Two tensors of 96 and 32 bytes, with all their data.
fn two_tensors() -> Raw {
    let raw = Raw::new(2, 0)
        .tensor("a", &[24], 0, 0)
        .tensor("b", &[8], 0, 96);
    let data: Vec<u8> = (0..128).collect();
    raw.pad(32).bytes(&data)
}

#[test]
fn data_that_are_cut_off() {
    let whole = two_tensors();
    let data = whole.len() - 128;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    for (len, first_missing, missing) in [
        (whole.len() - 1, "b", 1),
        (data + 96, "b", 1),
        (data + 95, "a", 2),
        (data, "a", 2),
    ] {
        fs::write(&path, &whole.0[..len as usize]).unwrap();
        for mode in [MapMode::Mmap, MapMode::Read] {
            let model = GgufFile::open(&path, mode).unwrap();
            assert!(!model.has_data());
            let end = if first_missing == "a" {
                data + 96
            } else {
                data + 128
            };
            let is_it = |error: &Error| {
                matches!(error, Error::Truncated { tensor, needs, has, missing: m, of: 2, .. }
                    if tensor == first_missing && *needs == end && *has == len && *m == missing)
            };
            let error = model.check_data().unwrap_err();
            assert!(is_it(&error), "{len}: {error}");
            let text = error.to_string();
            for fragment in [
                format!("`{first_missing}`"),
                end.to_string(),
                len.to_string(),
            ] {
                assert!(text.contains(&fragment), "{text}");
            }
            let tensor = model.tensor(first_missing).unwrap();
            assert!(is_it(&model.bytes(tensor).unwrap_err()));
            assert!(is_it(&model.read_at(tensor, 0, &mut [0]).unwrap_err()));
        }
    }
}

#[test]
fn bytes_that_a_tensor_does_not_have() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    fs::write(&path, two_tensors().0).unwrap();
    let model = GgufFile::open(&path, MapMode::Read).unwrap();
    let b = model.tensor("b").unwrap();
    let mut out = [0; 4];
    model.read_at(b, 28, &mut out).unwrap();
    assert_eq!(out, [124, 125, 126, 127]);
    for offset in [29, 32, u64::MAX - 3, u64::MAX] {
        let error = model.read_at(b, offset, &mut out).unwrap_err();
        let is_it = matches!(&error, Error::OutsideTensor { offset: o, len: 4, bytes: 32, .. } if *o == offset);
        assert!(is_it && error.to_string().contains("`b`"), "{error}");
    }
    let mut of_another_model = b.clone();
    of_another_model.part = 7;
    let error = model.bytes(&of_another_model).unwrap_err();
    assert!(
        matches!(error, Error::OutsideTensor { bytes: 0, .. }),
        "{error}"
    );
    let mut beyond = b.clone();
    beyond.offset = u64::MAX - 8;
    let error = model.bytes(&beyond).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Truncated {
                needs: u64::MAX,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn files_that_shrink_while_open() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    for mode in [MapMode::Mmap, MapMode::Read] {
        let whole = two_tensors();
        fs::write(&path, &whole.0).unwrap();
        let model = GgufFile::open(&path, mode).unwrap();
        model.check_data().unwrap();
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_len(whole.len() - 8).unwrap();
        let b = model.tensor("b").unwrap();
        let error = model.bytes(b).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Io {
                    doing: "read tensor data",
                    ..
                }
            ),
            "{error}"
        );
        let error = model.read_at(b, 0, &mut [0; 32]).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Io {
                    doing: "read tensor data",
                    ..
                }
            ),
            "{error}"
        );
    }
}

#[test]
fn what_is_no_file() {
    let dir = tempfile::tempdir().unwrap();
    for path in [
        dir.path(),
        &dir.path().join("missing.gguf"),
        Path::new("/dev/null"),
    ] {
        for mode in [MapMode::Mmap, MapMode::Read] {
            let error = GgufFile::open(path, mode).unwrap_err();
            let named = error.to_string().contains(path.to_str().unwrap());
            assert!(
                named
                    && matches!(
                        error,
                        Error::Io {
                            doing: "open it",
                            ..
                        }
                    ),
                "{error}"
            );
        }
    }
}
