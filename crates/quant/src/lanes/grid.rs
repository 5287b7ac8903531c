//! Codes of the formats whose values are entries of a codebook ("grid") under signs: IQ2 and IQ3.
//!
//! A tile keeps the bytes of 16 rows' blocks interleaved: byte `i` of 16 rows is 16 neighbouring bytes. So indices and signs of
//! a run of 32 values are put together for all rows at once. Then each group of 4 values of 16 rows is 16 look-ups in a table of
//! 4-byte words (of 1 to 8 KiB), which wait for nothing and which AVX-512 gathers. IQ2's entries of 8 values count as two words:
//! taking 8 bytes at once halves the look-ups, but sorting the words by group afterwards costs more than that.
//!
//! Closures are avoided here, `map` of arrays too: they do not take over the vector features of the kernel that calls.

use super::{Run, Scales, fixed};
use crate::formats::grids;
use crate::tile::ROWS;

/// What codes are raised by. The largest magnitude is 62.
pub(super) const BIAS: u8 = 64;

/// Grids as words of 4 raised magnitudes.
static IQ2_XXS: [u32; 512] = words(grids::IQ2_XXS.as_flattened());
static IQ2_XS: [u32; 1024] = words(grids::IQ2_XS.as_flattened());
static IQ2_S: [u32; 2048] = words(grids::IQ2_S.as_flattened());
static IQ3_XXS: [u32; 256] = words(grids::IQ3_XXS.as_flattened());
static IQ3_S: [u32; 512] = words(grids::IQ3_S.as_flattened());

const fn words<const N: usize>(magnitudes: &[i8]) -> [u32; N] {
    assert!(magnitudes.len() == 4 * N);
    let mut words = [0; N];
    let mut i = 0;
    while i < N {
        let mut bytes = [0; 4];
        let mut j = 0;
        while j < 4 {
            bytes[j] = BIAS + magnitudes[4 * i + j] as u8;
            j += 1;
        }
        words[i] = u32::from_le_bytes(bytes);
        i += 1;
    }
    words
}

/// Where the blocks' bytes begin: behind the scales of 16 rows.
const FIRST: usize = 2 * ROWS;

/// Four bytes of each row: indices or signs.
type Bytes4 = [u8; 4 * ROWS];

/// Bytes `i..i + N / 16` of every row's block, counted from behind the scale.
#[inline(always)]
fn bytes<const N: usize>(block: &[u8], i: usize) -> &[u8; N] {
    fixed(&block[FIRST + ROWS * i..])
}

/// Sets the bit that a sign index leaves out: the number of ones in a sign byte is even.
#[inline(always)]
fn even(signs: &mut Bytes4) {
    for s in signs {
        let mut parity = *s & 0x7f;
        parity ^= parity << 4;
        parity ^= parity << 2;
        parity ^= parity << 1;
        *s = *s & 0x7f | parity & 0x80;
    }
}

/// The sign bytes in a word of four sign indices of 7 bits a row.
#[inline(always)]
fn signs_of_words(words: &Bytes4) -> Bytes4 {
    let mut signs = *words;
    for g in 1..4 {
        for r in 0..ROWS {
            let (last, this) = (words[ROWS * (g - 1) + r], words[ROWS * g + r]);
            signs[ROWS * g + r] = last >> (8 - g) | this << g;
        }
    }
    even(&mut signs);
    signs
}

/// A row's byte at each of the row's four values.
#[inline(always)]
fn spread(signs: &[u8; ROWS]) -> [u8; 64] {
    let mut out = [0; 64];
    for r in 0..ROWS {
        let word = u32::from(signs[r]) * 0x0101_0101;
        out[4 * r..4 * r + 4].copy_from_slice(&word.to_le_bytes());
    }
    out
}

/// Takes raised magnitudes to the codes of their negatives where the value's bit is set: bit `j + FIRST` for a row's value `j`.
#[inline(always)]
fn negate<const FIRST: usize>(group: &mut [u8], signs: &[u8; 64]) {
    for (i, code) in group.iter_mut().enumerate() {
        let bit = signs[i] & 1 << (i % 4 + FIRST);
        *code = if bit == 0 { *code } else { 2 * BIAS - *code };
    }
}

/// Codes of a run: the words of a table, and signs for two words each.
#[inline(always)]
fn look_up<const N: usize, I: Copy + Into<usize>>(
    table: &[u32; N],
    indices: &[I; 8 * ROWS],
    signs: &Bytes4,
    out: &mut Run,
) {
    for (word, index) in out.as_chunks_mut::<4>().0.iter_mut().zip(indices) {
        *word = table[(*index).into() % N].to_le_bytes();
    }
    for (g, pair) in out.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let (low, high) = pair.split_at_mut(64);
        let signs = spread(fixed(&signs[ROWS * g..]));
        negate::<0>(low, &signs);
        negate::<4>(high, &signs);
    }
}

/// 1 at the second word of every entry of two words.
static SECOND: [u16; 8 * ROWS] = {
    let mut second = [0; 8 * ROWS];
    let mut i = 0;
    while i < second.len() {
        second[i] = (i / ROWS % 2) as u16;
        i += 1;
    }
    second
};

/// Of indices of entries of two words, those of the words.
#[inline(always)]
fn both_words<I: Copy + Default + Into<u16>>(indices: &[I; 4 * ROWS]) -> [u16; 8 * ROWS] {
    let mut twice = [I::default(); 8 * ROWS];
    for (g, twice) in twice
        .as_chunks_mut::<{ 2 * ROWS }>()
        .0
        .iter_mut()
        .enumerate()
    {
        twice[..ROWS].copy_from_slice(&indices[ROWS * g..][..ROWS]);
        twice[ROWS..].copy_from_slice(&indices[ROWS * g..][..ROWS]);
    }
    let mut words = [0; 8 * ROWS];
    for i in 0..8 * ROWS {
        words[i] = 2 * twice[i].into() + SECOND[i];
    }
    words
}

/// Indices of lower bits of their own and upper bits that `N / 16` of them share a byte of, `BITS` each.
#[inline(always)]
fn join<const N: usize, const BITS: usize>(low: &[u8; N], upper: &[u8; ROWS]) -> [u16; N] {
    let mut repeated = [0; N];
    for part in repeated.as_chunks_mut::<ROWS>().0 {
        *part = *upper;
    }
    let mut indices = [0; N];
    for i in 0..N {
        // A product instead of a shift: not every processor shifts 16-bit lanes by different amounts.
        let upper = u16::from(repeated[i]) * (0x100 >> (i / ROWS * BITS));
        indices[i] = u16::from(low[i]) | upper & ((1 << BITS) - 1) << 8;
    }
    indices
}

#[inline(always)]
pub(super) fn iq2_xxs(block: &[u8], run: usize, out: &mut Run) {
    let indices = bytes::<64>(block, 8 * run);
    let signs = signs_of_words(bytes(block, 8 * run + 4));
    look_up(&IQ2_XXS, &both_words(indices), &signs, out);
}

#[inline(always)]
pub(super) fn iq2_xs(block: &[u8], run: usize, out: &mut Run) {
    let words = bytes::<128>(block, 8 * run);
    let (mut low, mut high) = ([0; 64], [0; 64]);
    for (g, word) in words.as_chunks::<{ 2 * ROWS }>().0.iter().enumerate() {
        low[ROWS * g..][..ROWS].copy_from_slice(&word[..ROWS]);
        high[ROWS * g..][..ROWS].copy_from_slice(&word[ROWS..]);
    }
    let (mut indices, mut signs) = ([0; 64], [0; 64]);
    for i in 0..64 {
        indices[i] = u16::from(low[i]) | u16::from(high[i] & 1) << 8;
        signs[i] = high[i] >> 1;
    }
    even(&mut signs);
    look_up(&IQ2_XS, &both_words(&indices), &signs, out);
}

#[inline(always)]
pub(super) fn iq2_s(block: &[u8], run: usize, out: &mut Run) {
    let indices = join::<64, 2>(bytes(block, 4 * run), bytes(block, 64 + run));
    let signs = bytes(block, 32 + 4 * run);
    look_up(&IQ2_S, &both_words(&indices), signs, out);
}

#[inline(always)]
pub(super) fn iq3_xxs(block: &[u8], run: usize, out: &mut Run) {
    let indices = bytes::<128>(block, 8 * run);
    let signs = signs_of_words(bytes(block, 64 + 4 * run));
    look_up(&IQ3_XXS, indices, &signs, out);
}

#[inline(always)]
pub(super) fn iq3_s(block: &[u8], run: usize, out: &mut Run) {
    let indices = join::<128, 1>(bytes(block, 8 * run), bytes(block, 64 + run));
    look_up(&IQ3_S, &indices, bytes(block, 72 + 4 * run), out);
}

/// Odd sub-scales, `2 s + 1`: two a byte, `N` bytes from byte `i` on.
#[inline(always)]
pub(super) fn subs_nibbles<const N: usize>(block: &[u8], i: usize, scale: &mut Scales) {
    for j in 0..N {
        let pairs = bytes::<ROWS>(block, i + j);
        for r in 0..ROWS {
            scale[2 * j][r] = ((pairs[r] & 15) << 1 | 1) as i8;
            scale[2 * j + 1][r] = (pairs[r] >> 4 << 1 | 1) as i8;
        }
    }
}

/// Odd sub-scales in the upper nibble of bytes `i`, `i + step`, ...: the top bits of the words of signs.
#[inline(always)]
pub(super) fn subs_upper(block: &[u8], i: usize, step: usize, scale: &mut Scales) {
    for (j, scale) in scale[..8].iter_mut().enumerate() {
        let tops = bytes::<ROWS>(block, i + step * j);
        for r in 0..ROWS {
            scale[r] = (tops[r] >> 4 << 1 | 1) as i8;
        }
    }
}
