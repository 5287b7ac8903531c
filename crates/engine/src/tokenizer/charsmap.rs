//! SentencePiece's compiled normalisation (`tokenizer.ggml.precompiled_charsmap`): prefixes of a text and what replaces them.
//!
//! ```text
//! u32 n | n bytes: units of a double-array trie, u32 each | replacements, each ended by a zero byte
//! unit:  bits 0-7 label, bit 8 has a value, bit 9 offset is shifted by 8, bits 10-30 offset, bit 31 is a value (bits 0-30)
//! ```
//! All is little endian. Nothing of it can be trusted: a walk that leaves the array ends there.

use super::error::TokenizerError;
use super::limits;

/// The trie and the replacements.
#[derive(Debug)]
pub(super) struct Charsmap {
    units: Vec<u32>,
    replacements: Vec<u8>,
}

impl Charsmap {
    pub(super) fn parse(blob: &[u8]) -> Result<Self, TokenizerError> {
        let wrong = |why: String| TokenizerError::Charsmap { why };
        if blob.len() > limits::CHARSMAP_BYTES_MAX {
            return Err(wrong(format!(
                "{} bytes, at most {} are read",
                blob.len(),
                limits::CHARSMAP_BYTES_MAX
            )));
        }
        let Some((size, rest)) = blob.split_first_chunk::<4>() else {
            return Err(wrong(format!(
                "{} bytes, too few for its own size",
                blob.len()
            )));
        };
        let size = u32::from_le_bytes(*size) as usize;
        let (trie, replacements) = rest.split_at_checked(size).ok_or_else(|| {
            wrong(format!(
                "a trie of {size} bytes where {} are left",
                rest.len()
            ))
        })?;
        let (units, odd) = trie.as_chunks::<4>();
        if !odd.is_empty() {
            return Err(wrong(format!(
                "a trie of {size} bytes, which four does not divide"
            )));
        }
        if !replacements.is_empty() && replacements.last() != Some(&0) {
            return Err(wrong("the last replacement does not end".to_owned()));
        }
        let units = units.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
        Ok(Charsmap {
            units,
            replacements: replacements.to_vec(),
        })
    }

    /// How many bytes of `text` the longest known prefix has, and what replaces them.
    pub(super) fn replace(&self, text: &[u8]) -> Option<(usize, &[u8])> {
        let offset = |unit: u32| (unit >> 10) << ((unit & (1 << 9)) >> 6);
        let mut at = offset(*self.units.first()?);
        let mut found = None;
        for (i, &byte) in text.iter().enumerate() {
            at ^= u32::from(byte);
            let Some(&unit) = self.units.get(at as usize) else {
                break;
            };
            if byte == 0 || unit & (1 << 31 | 0xFF) != u32::from(byte) {
                break;
            }
            at ^= offset(unit);
            if unit & (1 << 8) != 0 {
                let value = self.units.get(at as usize).map(|unit| unit & !(1 << 31));
                let replacement = value.and_then(|v| self.replacements.get(v as usize..));
                let Some(replacement) = replacement else {
                    break;
                };
                let end = replacement
                    .iter()
                    .position(|&b| b == 0)
                    .unwrap_or(replacement.len());
                found = Some((i + 1, &replacement[..end]));
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A trie that replaces `a` by `bc` and `ab` by nothing.
    fn blob() -> Vec<u8> {
        let mut units = [0_u32; 1024];
        let (leaf, shift) = (1 << 8, 10);
        units[0] = 256 << shift;
        // Root's children at 256 ^ byte; `a` sends on to 512 (its value there, its children at 512 ^ byte).
        units[256 ^ 0x61] = 0x61 | leaf | ((256 ^ 0x61 ^ 512) << shift);
        units[512] = 1 << 31;
        units[512 ^ 0x62] = 0x62 | leaf | ((512 ^ 0x62 ^ 768) << shift);
        units[768] = 1 << 31 | 3;
        let mut blob = (4 * units.len() as u32).to_le_bytes().to_vec();
        blob.extend(units.iter().flat_map(|u| u.to_le_bytes()));
        blob.extend(b"bc\0\0");
        blob
    }

    #[test]
    fn longest_prefix_is_replaced() {
        let map = Charsmap::parse(&blob()).expect("well formed");
        assert_eq!(map.replace(b"ax"), Some((1, b"bc".as_slice())));
        assert_eq!(map.replace(b"abx"), Some((2, b"".as_slice())));
        assert_eq!(
            (map.replace(b"ba"), map.replace(b""), map.replace(b"\0")),
            (None, None, None)
        );
    }

    #[test]
    fn damaged_ones_are_refused() {
        for bad in [
            &b"\x01\0"[..],
            b"\x08\0\0\0abcd",
            b"\x03\0\0\0abc",
            b"\x04\0\0\0abcdx",
        ] {
            assert!(
                matches!(Charsmap::parse(bad), Err(TokenizerError::Charsmap { .. })),
                "{bad:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn any_trie_is_walked_safely(mut trie in proptest::collection::vec(any::<u8>(), 0..400), text in proptest::collection::vec(any::<u8>(), 0..20)) {
            trie.truncate(trie.len() / 4 * 4);
            let mut blob = (trie.len() as u32).to_le_bytes().to_vec();
            blob.extend(&trie);
            blob.extend(b"x\0");
            let map = Charsmap::parse(&blob).expect("well formed");
            if let Some((n, _)) = map.replace(&text) {
                prop_assert!(n <= text.len());
            }
        }
    }
}
