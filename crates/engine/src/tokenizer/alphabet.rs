//! The byte alphabet of byte-level BPE: every byte is written as one printable character in the file's token texts.
//!
//! The 188 bytes that are printable in Latin-1 stand for themselves; the other 68, in order, are U+0100, U+0101, ...

/// Bytes that stand for themselves.
const fn is_itself(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The byte that each of U+0000 ..= U+0143 stands for, or `None`.
const BYTE_OF: [Option<u8>; 324] = {
    let mut table = [None; 324];
    let mut next = 0x100;
    let mut byte = 0;
    while byte < 256 {
        if is_itself(byte as u8) {
            table[byte] = Some(byte as u8);
        } else {
            table[next] = Some(byte as u8);
            next += 1;
        }
        byte += 1;
    }
    table
};

/// Appends the bytes that `text` stands for; returns false, with `out` as it was, when a character is not in the alphabet.
pub(super) fn decode(text: &[u8], out: &mut Vec<u8>) -> bool {
    let before = out.len();
    let Ok(text) = std::str::from_utf8(text) else {
        return false;
    };
    for c in text.chars() {
        match BYTE_OF.get(c as usize).copied().flatten() {
            Some(byte) => out.push(byte),
            None => {
                out.truncate(before);
                return false;
            }
        }
    }
    true
}

/// How the alphabet writes a byte.
pub(crate) fn encode(byte: u8) -> char {
    let at = BYTE_OF
        .iter()
        .position(|&b| b == Some(byte))
        .expect("every byte is in the alphabet");
    char::from_u32(at as u32).expect("the alphabet ends at U+0143")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        for byte in 0..=255_u8 {
            let mut out = Vec::new();
            assert!(decode(encode(byte).to_string().as_bytes(), &mut out));
            assert_eq!(out, [byte]);
        }
        assert_eq!((encode(b' '), encode(b'\n'), encode(0xAD)), ('Ġ', 'Ċ', 'Ń'));
    }

    #[test]
    fn other_characters_leave_the_output_alone() {
        let mut out = vec![7];
        for text in ["a b", "日", "x\u{144}", "\u{A0}"] {
            assert!(!decode(text.as_bytes(), &mut out), "{text}");
        }
        assert!(!decode(b"a\xFF", &mut out));
        assert_eq!(out, [7]);
    }
}
