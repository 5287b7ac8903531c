//! A small keyed hash for tables that are filled from files.
//!
//! The key is drawn once a process, so that a file cannot aim at collisions; no result depends on it, since tables are
//! only ever looked up, never walked.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};

/// Two odd numbers that a file's author cannot know.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key(u64, u64);

impl Key {
    pub(super) fn random() -> Self {
        let state = RandomState::new();
        Key(state.hash_one(1_u8) | 1, state.hash_one(2_u8) | 1)
    }

    /// Multiplies to 128 bits and folds the halves: every bit of the result depends on every bit of the input.
    fn mix(self, a: u64, b: u64) -> u64 {
        let product = u128::from(a ^ self.0) * u128::from(b ^ self.1);
        (product as u64) ^ ((product >> 64) as u64)
    }

    pub(super) fn bytes(self, bytes: &[u8]) -> u64 {
        let mut state = bytes.len() as u64;
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            state = self.mix(state, u64::from_le_bytes(*word));
        }
        let mut last = [0_u8; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.mix(state, u64::from_le_bytes(last))
    }
}

/// Makes hashers for maps keyed by one `u64`.
#[derive(Clone, Debug)]
pub(super) struct PairHash(Key);

impl PairHash {
    pub(super) fn random() -> Self {
        PairHash(Key::random())
    }
}

impl BuildHasher for PairHash {
    type Hasher = PairHasher;

    fn build_hasher(&self) -> PairHasher {
        PairHasher {
            key: self.0,
            state: 0,
        }
    }
}

/// The hasher of [`PairHash`].
pub(super) struct PairHasher {
    key: Key,
    state: u64,
}

impl Hasher for PairHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.state = self.key.mix(self.state, self.key.bytes(bytes));
    }

    fn write_u64(&mut self, value: u64) {
        self.state = self.key.mix(self.state, value);
    }

    fn finish(&self) -> u64 {
        self.state
    }
}
