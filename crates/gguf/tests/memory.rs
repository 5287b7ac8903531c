//! What a file costs in memory before it is refused or accepted. Alone in its program: the allocator counts for all threads.

#[path = "suite/raw.rs"]
#[allow(dead_code, reason = "made for other tests")]
mod raw;

use gguf::{Header, MapMode, limits};
use peak_alloc::PeakAlloc;
use raw::{Raw, tensor_type, value_type};

#[global_allocator]
static ALLOCATOR: PeakAlloc = PeakAlloc;

/// Memory that reading may take beside a multiple of the file.
const BASE_BYTES: usize = 256 << 10;

/// Runs `read` and returns the most memory that it took.
fn peak_bytes(read: impl FnOnce()) -> usize {
    let before = ALLOCATOR.current_usage();
    ALLOCATOR.reset_peak_usage();
    read();
    ALLOCATOR.peak_usage().saturating_sub(before)
}

#[derive(Debug, PartialEq)]
enum Outcome {
    Accepted,
    Refused,
}

/// Reads a file, and checks that it took at most `times` the file's bytes.
fn check(what: &str, raw: Raw, expected: Outcome, times: usize) {
    let mut outcome = Outcome::Refused;
    let peak = peak_bytes(|| {
        if Header::parse(&raw.0).is_ok() {
            outcome = Outcome::Accepted;
        }
    });
    assert_eq!(outcome, expected, "{what}");
    let file = raw.0.len();
    assert!(
        peak <= BASE_BYTES + times * file,
        "{what}: {peak} bytes for a file of {file}"
    );
}

fn keys(n: u64, value: fn(Raw, &str) -> Raw) -> Raw {
    (0..n).fold(Raw::new(0, n), |raw, i| value(raw, &format!("{i:x}")))
}

// One test, because tests run at the same time.
#[test]
fn memory_follows_the_bytes_that_are_there() {
    // Counts that promise much: refused before anything is allocated for them.
    for n in [1, 1 << 16, 1 << 22, 1 << 32, u64::MAX] {
        check("keys", Raw::new(0, n).zeros(100), Outcome::Refused, 0);
        check("tensors", Raw::new(n, 0).zeros(100), Outcome::Refused, 0);
        check(
            "string",
            Raw::new(0, 1)
                .key("k", value_type::STRING)
                .u64(n.max(101))
                .zeros(100),
            Outcome::Refused,
            0,
        );
        for item_type in 0..=12 {
            let array = Raw::new(0, 1)
                .key_array("k", item_type, n.max(101))
                .zeros(100);
            check("array", array, Outcome::Refused, 0);
        }
    }

    // The smallest of everything, as many as there may be: each costs more memory than file, and the multiple is bounded.
    let small_keys = |n| keys(n, |raw, key| raw.key(key, value_type::U8).bytes(&[0]));
    check(
        "small keys",
        small_keys(limits::METADATA_KEYS_MAX),
        Outcome::Accepted,
        16,
    );
    check(
        "too many keys",
        small_keys(limits::METADATA_KEYS_MAX + 1),
        Outcome::Refused,
        0,
    );
    let n = limits::TENSORS_MAX;
    let name = |i: u64| format!("{i:x}");
    let entry = |raw: Raw, i: u64| raw.tensor(name(i), &[1], tensor_type::F32, 32 * i);
    check(
        "small tensors",
        (0..n).fold(Raw::new(n, 0), entry),
        Outcome::Accepted,
        16,
    );
    let inner = limits::INNER_ARRAYS_MAX;
    let arrays = Raw::new(0, 1).key_array("k", value_type::ARRAY, inner);
    check(
        "inner arrays",
        arrays.zeros(12 * inner as usize),
        Outcome::Accepted,
        16,
    );
    let strings = 1 << 20;
    let empty = Raw::new(0, 1).key_array("k", value_type::STRING, strings);
    check(
        "empty strings",
        empty.zeros(8 * strings as usize),
        Outcome::Accepted,
        1,
    );

    // A vocabulary as large models have: less than its bytes in the file in the end, twice as many while its text grows.
    let tokens = 262_144;
    let vocabulary = Raw::new(0, 1).key_array("tokenizer.ggml.tokens", value_type::STRING, tokens);
    let vocabulary = (0..tokens).fold(vocabulary, |raw, i| raw.string(format!("token {i}")));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, &vocabulary.0).unwrap();
    for mode in [MapMode::Mmap, MapMode::Read] {
        let peak = peak_bytes(|| drop(gguf::GgufFile::open(&path, mode).unwrap()));
        let file = vocabulary.0.len();
        assert!(
            peak <= BASE_BYTES + 2 * file,
            "{mode:?}: {peak} bytes for a header of {file}"
        );
    }
}
