//! Random numbers by their place: number `i` of a key, in any order, on any thread.

/// An odd number without pattern: steps of it visit all of 64 bits.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Another one, to be multiplied with.
const MIX: u64 = 0xd1b5_4a32_d192_ed03;

/// Both halves of a product, folded: every bit of the result depends on all of both factors.
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ (product >> 64) as u64
}

/// Number `i` of a key.
#[inline]
pub(crate) fn word(key: u64, i: u64) -> u64 {
    let x = key.wrapping_add(i.wrapping_mul(STEP));
    fold(x, x ^ MIX)
}

/// A key of its own for each part of what a key is for.
pub(crate) fn part(key: u64, part: u64) -> u64 {
    fold(key ^ MIX, part.wrapping_add(STEP) ^ key.rotate_left(32))
}

/// A key for a name.
pub(crate) fn named(seed: u64, name: &str) -> u64 {
    let of_bytes = name.bytes();
    of_bytes.fold(part(seed, 0), |key, byte| part(key, u64::from(byte)))
}

/// Fills `out` with the key's bytes from `offset` on.
pub(crate) fn fill(key: u64, offset: u64, out: &mut [u8]) {
    let ahead = (offset.next_multiple_of(8) - offset) as usize;
    let (head, rest) = out.split_at_mut(ahead.min(out.len()));
    if !head.is_empty() {
        let bytes = word(key, offset / 8).to_le_bytes();
        head.copy_from_slice(&bytes[8 - ahead..][..head.len()]);
    }
    let mut i = offset.div_ceil(8);
    let mut words = rest.chunks_exact_mut(8);
    for bytes in &mut words {
        bytes.copy_from_slice(&word(key, i).to_le_bytes());
        i += 1;
    }
    let tail = words.into_remainder();
    tail.copy_from_slice(&word(key, i).to_le_bytes()[..tail.len()]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_do_not_depend_on_where_one_begins() {
        let mut whole = [0; 100];
        fill(7, 0, &mut whole);
        for start in 0..40 {
            for len in 0..40 {
                let mut part = vec![0; len];
                fill(7, start as u64, &mut part);
                assert_eq!(part, whole[start..start + len], "{start} + {len}");
            }
        }
    }

    #[test]
    fn bits_are_even_and_keys_differ() {
        let mut bytes = vec![0; 1 << 16];
        for key in [0, 1, named(0, "a"), named(0, "b"), named(1, "a")] {
            fill(key, 0, &mut bytes);
            for bit in 0..8 {
                let ones = bytes.iter().filter(|b| **b >> bit & 1 == 1).count();
                assert!(ones.abs_diff(1 << 15) < 700, "bit {bit}: {ones}");
            }
            let mut counts = [0_usize; 256];
            bytes.iter().for_each(|&b| counts[usize::from(b)] += 1);
            assert!(counts.iter().all(|n| (170..350).contains(n)), "{counts:?}");
        }
        assert_ne!(word(named(0, "a"), 0), word(named(0, "b"), 0));
        assert_ne!(word(named(0, "a"), 0), word(named(1, "a"), 0));
        assert_ne!(part(0, 1), part(1, 0));
    }
}
