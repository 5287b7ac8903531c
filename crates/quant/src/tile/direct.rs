//! Regrouping of the formats that models are mostly made of, many codes at a time: what `split` and `Planes::write` do code by code.

use gguf::TensorType;

/// The low nibble of every byte.
const LOW: u128 = 0x0f0f_0f0f_0f0f_0f0f_0f0f_0f0f_0f0f_0f0f;

/// The lowest bit of every byte.
const ONE_BIT: u32 = 0x0101_0101;

/// Two bits of every byte.
const TWO_BITS: u32 = 0x0303_0303;

/// Whether records are the file's blocks, though they have planes: the file pairs value i with value i + 16, as planes of four bits do.
pub(super) fn is_as_in_file(ty: TensorType) -> bool {
    use TensorType as T;
    matches!(ty, T::Q4_0 | T::Q4_1 | T::IQ4_NL | T::IQ4_XS | T::MXFP4)
}

/// Writes the record of a block; returns whether there is a direct way for its format.
pub(super) fn regroup(ty: TensorType, block: &[u8], record: &mut [u8]) -> bool {
    match ty {
        TensorType::Q4_K => {
            record[..16].copy_from_slice(&block[..16]);
            let runs = record[16..].chunks_exact_mut(32);
            for (codes, runs) in block[16..].chunks_exact(32).zip(runs) {
                let (low, high) = nibbles(codes);
                runs[..16].copy_from_slice(&low.to_le_bytes());
                runs[16..].copy_from_slice(&high.to_le_bytes());
            }
        }
        TensorType::Q5_K => q5_k(block, record),
        TensorType::Q6_K => q6_k(block, record),
        _ => return false,
    }
    true
}

/// The nibble planes of the runs whose codes are the low nibbles of 32 bytes, and the high ones.
fn nibbles(codes: &[u8]) -> (u128, u128) {
    let half = |at: usize| u128::from_le_bytes(codes[at..at + 16].try_into().expect("16 bytes"));
    let (first, second) = (half(0), half(16));
    (
        first & LOW | (second & LOW) << 4,
        first >> 4 & LOW | second & !LOW,
    )
}

fn q5_k(block: &[u8], record: &mut [u8]) {
    const HEADER: usize = 16;
    const RUN: usize = 20;
    record[..HEADER].copy_from_slice(&block[..HEADER]);
    let high = &block[HEADER..48];
    let pairs = record[HEADER..].chunks_exact_mut(2 * RUN);
    for (pair, (runs, codes)) in pairs.zip(block[48..].chunks_exact(32)).enumerate() {
        let (first, second) = nibbles(codes);
        for (i, (run, low)) in runs.chunks_exact_mut(RUN).zip([first, second]).enumerate() {
            let r = 2 * pair + i;
            let groups = high.chunks_exact(4).enumerate();
            let bits = groups.fold(0, |bits, (group, word)| {
                let word = u32::from_le_bytes(word.try_into().expect("4 bytes"));
                bits | (word >> r & ONE_BIT) << group
            });
            run[..4].copy_from_slice(&bits.to_le_bytes());
            run[4..].copy_from_slice(&low.to_le_bytes());
        }
    }
}

fn q6_k(block: &[u8], record: &mut [u8]) {
    const HEADER: usize = 18;
    const RUN: usize = 24;
    record[..HEADER].copy_from_slice(&block[192..]);
    let halves = record[HEADER..].chunks_exact_mut(4 * RUN);
    let codes = block[..128].chunks_exact(64);
    let high = block[128..192].chunks_exact(32);
    for ((runs, codes), high) in halves.zip(codes).zip(high) {
        let (run_0, run_2) = nibbles(&codes[..32]);
        let (run_1, run_3) = nibbles(&codes[32..]);
        let low = [run_0, run_1, run_2, run_3];
        for ((r, run), low) in runs.chunks_exact_mut(RUN).enumerate().zip(low) {
            let (upper, lower) = run.split_at_mut(8);
            for (upper, high) in upper.chunks_exact_mut(4).zip(high.chunks_exact(16)) {
                let group = |i: usize| {
                    let word = high[4 * i..4 * i + 4].try_into().expect("4 bytes");
                    (u32::from_le_bytes(word) >> (2 * r) & TWO_BITS) << (2 * i)
                };
                let word = group(0) | group(1) | group(2) | group(3);
                upper.copy_from_slice(&word.to_le_bytes());
            }
            lower.copy_from_slice(&low.to_le_bytes());
        }
    }
}
