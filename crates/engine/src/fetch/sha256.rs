//! SHA-256 over streams.

use std::fmt::Write as _;
use std::io::{self, Read};

use sha2::{Digest, Sha256};

use super::limits::CHUNK_BYTES;

/// A running digest; a clone remembers the state before a part that may turn out bad.
#[derive(Clone, Default)]
pub struct Hasher(Sha256);

impl Hasher {
    /// Takes more bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest so far, in lowercase hex.
    pub fn hex(&self) -> String {
        let mut hex = String::with_capacity(64);
        for byte in self.0.clone().finalize() {
            write!(hex, "{byte:02x}").expect("a String takes everything");
        }
        hex
    }
}

/// Feeds exactly `bytes` bytes of a reader to the hashers. False where the reader ends before.
pub fn hash_exactly(
    reader: &mut dyn Read,
    bytes: u64,
    hashers: &mut [&mut Hasher],
) -> io::Result<bool> {
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut left = bytes;
    while left > 0 {
        let want = left.min(CHUNK_BYTES as u64) as usize;
        let got = match reader.read(&mut buffer[..want]) {
            Ok(0) => return Ok(false),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        for hasher in hashers.iter_mut() {
            hasher.update(&buffer[..got]);
        }
        left -= got as u64;
    }
    Ok(true)
}
