//! A valid file with bytes changed in every way: none may make a reader panic, and what is accepted must be sound.

use std::fs;

use crate::explore::explore;
use crate::raw::Raw;
use gguf::write::Writer;
use gguf::{Array, Error, GgufFile, Header, MapMode, StringArray, TensorType, Value};
use proptest::prelude::*;

/// A file with every type of value and a few tensors, and where its header ends.
fn valid() -> (Vec<u8>, usize) {
    let mut writer = Writer::new(64).unwrap();
    let scalars: [(&str, Value); 12] = [
        ("u8", 200_u8.into()),
        ("i8", (-100_i8).into()),
        ("u16", 60_000_u16.into()),
        ("i16", (-30_000_i16).into()),
        ("u32", 4_000_000_000_u32.into()),
        ("i32", (-2_000_000_000_i32).into()),
        ("f32", 1.5_f32.into()),
        ("bool", true.into()),
        ("string", "text".into()),
        ("u64", u64::MAX.into()),
        ("i64", i64::MIN.into()),
        ("f64", (-0.25_f64).into()),
    ];
    for (key, value) in scalars {
        writer.set(key, value).unwrap();
    }
    let tokens: StringArray = [&b"<s>"[..], b"", b"\xff\xfe", "\u{2581}the".as_bytes()]
        .into_iter()
        .collect();
    let nested: Box<[Array]> = Box::new([
        Array::U8(Box::new([1, 2])),
        Array::String(tokens.clone()),
        Array::Array(Box::new([])),
    ]);
    writer.set("tokens", tokens).unwrap();
    writer.set("nested", nested).unwrap();
    let scores: Box<[f32]> = Box::new([0.0, f32::NAN, f32::NEG_INFINITY]);
    writer.set("scores", scores).unwrap();
    let flags: Box<[bool]> = Box::new([true, false]);
    writer.set("flags", flags).unwrap();
    writer
        .tensor("norm", TensorType::F32, &[4], vec![1; 16])
        .unwrap();
    writer
        .tensor("q4", TensorType::Q4_K, &[256, 2], vec![2; 288])
        .unwrap();
    writer
        .tensor("q8", TensorType::Q8_0, &[32, 1, 2], vec![3; 68])
        .unwrap();
    let mut bytes = Vec::new();
    writer.write_to(&mut bytes).unwrap();
    let data_start = Header::parse(&bytes).unwrap().data_start as usize;
    // The last bytes of the last entry: offset 320 = 0x140.
    let end = bytes[..data_start].iter().rposition(|&b| b == 1).unwrap() + 7;
    (bytes, end)
}

#[test]
fn cut_off_everywhere() {
    let (bytes, end) = valid();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    for len in 0..bytes.len() {
        let cut = &bytes[..len];
        explore(cut);
        let parsed = Header::parse(cut);
        match &parsed {
            Err(Error::NotGguf { .. }) => assert!(len < 4, "{len}"),
            Err(Error::UnexpectedEnd { at, left, .. }) => {
                assert!((4..end).contains(&len), "{len}");
                assert_eq!(at.offset + left, len as u64);
            }
            Err(other) => panic!("{len}: {other}"),
            Ok(_) => assert!(len >= end, "{len}"),
        }
        fs::write(&path, cut).unwrap();
        for mode in [MapMode::Mmap, MapMode::Read] {
            match (GgufFile::open(&path, mode), &parsed) {
                (Ok(model), Ok(_)) => {
                    assert!(!model.has_data() || len >= bytes.len() - 60, "{len}")
                }
                (Err(from_file), Err(parsed)) => {
                    let from_file = from_file.to_string();
                    let from_file = from_file.replace(path.to_str().unwrap(), "<memory>");
                    assert_eq!(from_file, parsed.to_string());
                }
                _ => panic!("{len}: the ways to read disagree"),
            }
        }
    }
}

#[test]
fn every_byte_changed() {
    let (bytes, end) = valid();
    let mut changed = bytes.clone();
    for at in 0..end {
        let flips = (0..8).map(|bit| bytes[at] ^ 1 << bit);
        for byte in flips.chain([0, 0x7f, 0x80, 0xff]) {
            changed[at] = byte;
            explore(&changed);
        }
        changed[at] = bytes[at];
    }
}

#[test]
fn numbers_written_over_everything() {
    let (bytes, end) = valid();
    let len = bytes.len() as u64;
    let mut numbers = vec![
        0,
        1,
        2,
        4,
        5,
        12,
        13,
        0xffff,
        1 << 16,
        1 << 22,
        (1 << 22) + 1,
    ];
    numbers.extend([
        len - 1,
        len,
        len + 1,
        u32::MAX.into(),
        1 << 32,
        1 << 61,
        1 << 63,
    ]);
    numbers.extend([i64::MAX as u64, u64::MAX - 63, u64::MAX]);
    for at in 0..end {
        for number in &numbers {
            let number = number.to_le_bytes();
            for width in [4, 8] {
                let mut changed = bytes.clone();
                changed[at..at + width].copy_from_slice(&number[..width]);
                explore(&changed);
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Edit {
    Set(usize, Vec<u8>),
    Insert(usize, Vec<u8>),
    Remove(usize, usize),
    Copy(usize, usize, usize),
    Cut(usize),
}

impl Edit {
    fn apply(&self, bytes: &mut Vec<u8>) {
        let within = |at: usize| at % (bytes.len() + 1);
        match self {
            Edit::Set(at, new) => {
                let at = within(*at);
                let n = new.len().min(bytes.len() - at);
                bytes[at..at + n].copy_from_slice(&new[..n]);
            }
            Edit::Insert(at, new) => {
                let at = within(*at);
                bytes.splice(at..at, new.iter().copied());
            }
            Edit::Remove(at, n) => {
                let at = within(*at);
                let end = bytes.len().min(at + n);
                bytes.drain(at..end);
            }
            Edit::Copy(from, n, to) => {
                let (from, to) = (within(*from), within(*to));
                let piece = bytes[from..bytes.len().min(from + n)].to_vec();
                bytes.splice(to..to, piece);
            }
            Edit::Cut(len) => bytes.truncate(within(*len)),
        }
    }
}

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let at = 0..2048_usize;
    let new = || proptest::collection::vec(any::<u8>(), 1..9);
    let edit = prop_oneof![
        4 => (at.clone(), new()).prop_map(|(at, new)| Edit::Set(at, new)),
        1 => (at.clone(), new()).prop_map(|(at, new)| Edit::Insert(at, new)),
        1 => (at.clone(), 1..64_usize).prop_map(|(at, n)| Edit::Remove(at, n)),
        1 => (at.clone(), 1..64_usize, at.clone()).prop_map(|(from, n, to)| Edit::Copy(from, n, to)),
        1 => at.prop_map(Edit::Cut),
    ];
    proptest::collection::vec(edit, 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn edited_at_random(edits in edits()) {
        let (mut bytes, _) = valid();
        for edit in &edits {
            edit.apply(&mut bytes);
        }
        explore(&bytes);
    }

    #[test]
    fn random_after_the_counts(n_tensors in 0..4_u64, n_keys in 0..4_u64, rest in proptest::collection::vec(any::<u8>(), 0..256)) {
        explore(&Raw::new(n_tensors, n_keys).bytes(&rest).0);
    }
}
