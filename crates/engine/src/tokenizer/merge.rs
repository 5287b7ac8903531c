//! Byte-pair encoding: merges neighbours, the best pair first, until no pair merges.
//!
//! One algorithm serves byte-level BPE (pairs ranked by a list of merges) and SentencePiece BPE (pairs ranked by the
//! score of the token that they make). A heap of candidate pairs makes it O(n log n) on any input.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use super::alphabet;
use super::error::TokenizerError;
use super::hash::PairHash;
use super::limits;
use super::vocab::{NONE, SPACE_SIGN, Spelling, Vocab, lossy};

/// Which neighbours merge, and into what.
pub(super) trait Pairs {
    /// Rank (lower merges first) and token of the merge of `left` and `right`, whose bytes together are `bytes`.
    fn merged(&self, vocab: &Vocab, left: u32, right: u32, bytes: &[u8]) -> Option<(u32, u32)>;
}

/// Pairs ranked by the file's list of merges.
#[derive(Debug)]
pub(super) struct MergeList {
    /// `left << 32 | right` to rank and token.
    pairs: HashMap<u64, (u32, u32), PairHash>,
}

impl MergeList {
    pub(super) fn build<'a>(
        merges: impl ExactSizeIterator<Item = &'a [u8]>,
        vocab: &Vocab,
        spelling: Spelling,
    ) -> Result<Self, TokenizerError> {
        if merges.len() > limits::MERGES_MAX {
            return Err(TokenizerError::Length {
                key: "tokenizer.ggml.merges",
                found: merges.len(),
                expected: format!("at most {}", limits::MERGES_MAX),
            });
        }
        let mut pairs = HashMap::with_capacity_and_hasher(merges.len(), PairHash::random());
        let mut verbatim = vocab.verbatim().to_vec();
        verbatim.sort_unstable_by_key(|&id| vocab.bytes(id));
        let mut both = Vec::new();
        for (index, merge) in merges.enumerate() {
            // The first byte may itself be a space.
            let space = merge
                .iter()
                .skip(1)
                .position(|&b| b == b' ')
                .map(|at| at + 1);
            let Some((left, right)) = space
                .map(|at| (&merge[..at], &merge[at + 1..]))
                .filter(|(_, r)| !r.is_empty())
            else {
                return Err(TokenizerError::MergeSyntax {
                    index,
                    text: lossy(merge),
                });
            };
            let unknown = |part: &[u8]| TokenizerError::MergeUnknownPart {
                index,
                text: lossy(merge),
                part: lossy(part),
                n_vocab: vocab.len(),
            };
            both.clear();
            let left_len = spell(left, spelling, &mut both).ok_or_else(|| unknown(left))?;
            spell(right, spelling, &mut both).ok_or_else(|| unknown(right))?;
            let left_id = vocab.find(&both[..left_len]).ok_or_else(|| unknown(left))?;
            let right_id = vocab
                .find(&both[left_len..])
                .ok_or_else(|| unknown(right))?;
            let Some(id) = vocab.find(&both) else {
                // A token that text must not turn into, such as a control token.
                if verbatim
                    .binary_search_by_key(&&both[..], |&id| vocab.bytes(id))
                    .is_ok()
                {
                    continue;
                }
                return Err(unknown(&[left, right].concat()));
            };
            let rank = index as u32;
            pairs
                .entry(u64::from(left_id) << 32 | u64::from(right_id))
                .or_insert((rank, id));
        }
        Ok(MergeList { pairs })
    }
}

/// Appends the bytes that a text of the file stands for and returns how many there are now.
fn spell(text: &[u8], spelling: Spelling, out: &mut Vec<u8>) -> Option<usize> {
    match spelling {
        Spelling::ByteLevel => alphabet::decode(text, out).then_some(out.len()),
        Spelling::SpaceSign => {
            let mut rest = text;
            while let Some((&first, others)) = rest.split_first() {
                if let Some(after) = rest.strip_prefix(SPACE_SIGN) {
                    out.push(b' ');
                    rest = after;
                } else {
                    out.push(first);
                    rest = others;
                }
            }
            Some(out.len())
        }
    }
}

impl Pairs for MergeList {
    fn merged(&self, _: &Vocab, left: u32, right: u32, _: &[u8]) -> Option<(u32, u32)> {
        self.pairs
            .get(&(u64::from(left) << 32 | u64::from(right)))
            .copied()
    }
}

/// Pairs ranked by the scores of what they make.
#[derive(Debug)]
pub(super) struct Scores {
    /// For each token; higher scores have lower ranks.
    ranks: Vec<u32>,
    /// Bit `a << 8 | b`: some token has byte `a` followed by byte `b`. Where no token has, no merge can cross.
    joined: Vec<u64>,
}

impl Scores {
    /// `scores` has an entry for each token, none of them NaN.
    pub(super) fn build(scores: &[f32], vocab: &Vocab) -> Self {
        let mut joined = vec![0_u64; 1 << 10];
        for id in 0..vocab.len() as u32 {
            for pair in vocab.bytes(id).windows(2) {
                let bit = usize::from(pair[0]) << 8 | usize::from(pair[1]);
                joined[bit >> 6] |= 1 << (bit & 63);
            }
        }
        Scores {
            ranks: scores.iter().map(|&s| !ascending(s)).collect(),
            joined,
        }
    }

    /// Whether a token may have `left` and `right` as neighbours.
    pub(super) fn may_join(&self, left: u8, right: u8) -> bool {
        let bit = usize::from(left) << 8 | usize::from(right);
        self.joined[bit >> 6] & (1 << (bit & 63)) != 0
    }
}

/// A number that orders like the float; both zeros are one.
fn ascending(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 0 {
        bits | 1 << 31
    } else {
        !bits
    }
}

impl Pairs for Scores {
    fn merged(&self, vocab: &Vocab, _: u32, _: u32, bytes: &[u8]) -> Option<(u32, u32)> {
        vocab.find(bytes).map(|id| (self.ranks[id as usize], id))
    }
}

/// A run of bytes that is one token, or (`id` = [`NONE`]) part of none yet.
#[derive(Clone, Copy, Debug)]
struct Symbol {
    start: u32,
    /// 0 once it has been merged into the one before it.
    len: u32,
    id: u32,
    previous: u32,
    next: u32,
}

/// A pair that may merge; ordered by rank, then from left to right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    left: u32,
    right: u32,
    /// Bytes of both; another number later means that one of them has grown since.
    len: u32,
    id: u32,
}

/// Working memory, to be used for one piece after another.
#[derive(Default)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
    heap: BinaryHeap<Reverse<Candidate>>,
}

impl Merger {
    /// Appends a symbol of the next `len` bytes; `id` is its token or [`NONE`].
    pub(super) fn push(&mut self, len: usize, id: u32) {
        let at = self.symbols.len() as u32;
        let start = self.symbols.last().map_or(0, |s| s.start + s.len);
        let previous = at.wrapping_sub(1);
        self.symbols.push(Symbol {
            start,
            len: len as u32,
            id,
            previous,
            next: at + 1,
        });
    }

    /// Merges the symbols pushed, which are those of `piece`, hands each result (its token and bytes) to `emit`, and
    /// forgets them.
    pub(super) fn run<E>(
        &mut self,
        pairs: &impl Pairs,
        vocab: &Vocab,
        piece: &[u8],
        mut emit: impl FnMut(u32, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.heap.clear();
        for right in 1..self.symbols.len() as u32 {
            self.consider(pairs, vocab, piece, right - 1, right);
        }
        let n = self.symbols.len() as u32;
        while let Some(Reverse(best)) = self.heap.pop() {
            let left = self.symbols[best.left as usize];
            let right = self.symbols[best.right as usize];
            if left.len == 0 || right.len == 0 || left.len + right.len != best.len {
                continue;
            }
            let merged = Symbol {
                len: best.len,
                id: best.id,
                next: right.next,
                ..left
            };
            self.symbols[best.left as usize] = merged;
            self.symbols[best.right as usize].len = 0;
            if merged.next < n {
                self.symbols[merged.next as usize].previous = best.left;
                self.consider(pairs, vocab, piece, best.left, merged.next);
            }
            if merged.previous != NONE {
                self.consider(pairs, vocab, piece, merged.previous, best.left);
            }
        }
        for symbol in &self.symbols {
            if symbol.len != 0 {
                emit(
                    symbol.id,
                    &piece[symbol.start as usize..][..symbol.len as usize],
                )?;
            }
        }
        self.symbols.clear();
        Ok(())
    }

    fn consider(&mut self, pairs: &impl Pairs, vocab: &Vocab, piece: &[u8], left: u32, right: u32) {
        let (l, r) = (self.symbols[left as usize], self.symbols[right as usize]);
        let len = l.len + r.len;
        let bytes = &piece[l.start as usize..][..len as usize];
        if let Some((rank, id)) = pairs.merged(vocab, l.id, r.id, bytes) {
            self.heap.push(Reverse(Candidate {
                rank,
                left,
                right,
                len,
                id,
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::vocab::TokenKind;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn floats_order() {
        let floats = [
            f32::NEG_INFINITY,
            -2.5,
            -1e-40,
            0.0,
            1e-40,
            1.0,
            f32::INFINITY,
        ];
        assert!(floats.windows(2).all(|w| ascending(w[0]) < ascending(w[1])));
        assert_eq!(ascending(-0.0), ascending(0.0));
    }

    /// The definition: look at all neighbours, merge the best, leftmost first, until none merges.
    fn naive(pairs: &impl Pairs, vocab: &Vocab, piece: &[u8]) -> Vec<u32> {
        let mut parts: Vec<(usize, usize, u32)> = (0..piece.len())
            .map(|i| (i, i + 1, vocab.byte_id(piece[i])))
            .collect();
        loop {
            let candidates = parts.windows(2).enumerate().filter_map(|(i, w)| {
                let (rank, id) = pairs.merged(vocab, w[0].2, w[1].2, &piece[w[0].0..w[1].1])?;
                Some((rank, i, id))
            });
            let Some((_, i, id)) = candidates.min() else {
                break;
            };
            parts[i] = (parts[i].0, parts[i + 1].1, id);
            parts.remove(i + 1);
        }
        parts.into_iter().map(|p| p.2).collect()
    }

    fn vocab() -> Vocab {
        let texts: [&[u8]; 11] = [
            b"a", b"b", b"ab", b"ba", b"aa", b"aba", b"abab", b"bb", b"aab", b"c", b"abc",
        ];
        Vocab::build(
            texts.into_iter(),
            vec![TokenKind::Normal; 11],
            Spelling::ByteLevel,
        )
        .expect("fits")
    }

    fn run(pairs: &impl Pairs, vocab: &Vocab, piece: &[u8]) -> Vec<u32> {
        let mut merger = Merger::default();
        let mut out = Vec::new();
        for &byte in piece {
            merger.push(1, vocab.byte_id(byte));
        }
        let emit = |id, _: &[u8]| {
            out.push(id);
            Ok::<_, ()>(())
        };
        merger
            .run(pairs, vocab, piece, emit)
            .expect("emit does not fail");
        out
    }

    proptest! {
        #[test]
        fn equals_the_definition(piece in "[abc]{0,40}", scores in proptest::collection::vec(-3_i8..3, 11), order in Just((0..7).collect::<Vec<_>>()).prop_shuffle()) {
            let vocab = vocab();
            let scores: Vec<f32> = scores.into_iter().map(f32::from).collect();
            let by_score = Scores::build(&scores, &vocab);
            prop_assert_eq!(run(&by_score, &vocab, piece.as_bytes()), naive(&by_score, &vocab, piece.as_bytes()));

            let merges: [&[u8]; 7] = [b"a b", b"b a", b"a a", b"ab a", b"ab ab", b"b b", b"a ab"];
            let shuffled: Vec<&[u8]> = order.iter().map(|&i: &usize| merges[i]).collect();
            let by_list = MergeList::build(shuffled.into_iter(), &vocab, Spelling::ByteLevel).expect("all known");
            prop_assert_eq!(run(&by_list, &vocab, piece.as_bytes()), naive(&by_list, &vocab, piece.as_bytes()));
        }
    }

    #[test]
    fn bad_merges_are_named() {
        let vocab = vocab();
        let build = |merge: &'static [u8]| {
            MergeList::build([merge].into_iter(), &vocab, Spelling::ByteLevel)
        };
        for (merge, part) in [(b"a x".as_slice(), "x"), (b"x a", "x"), (b"b c", "bc")] {
            match build(merge) {
                Err(TokenizerError::MergeUnknownPart {
                    index: 0,
                    part: found,
                    ..
                }) => assert_eq!(found, part),
                other => panic!("{other:?}"),
            }
        }
        for merge in [b"ab".as_slice(), b"", b" ", b"a "] {
            assert!(
                matches!(
                    build(merge),
                    Err(TokenizerError::MergeSyntax { index: 0, .. })
                ),
                "{merge:?}"
            );
        }
    }
}
