//! Finds special tokens in a text, as the text they are written as.
//!
//! Where several match, the longest wins over the whole text (not the leftmost), then the lower id, then the leftmost
//! place: the order in which llama.cpp cuts a text by one token after another. Here it is one pass: all matches at a
//! place are prefixes of the longest one, so a place that loses to a longer match elsewhere falls back along a chain.

use std::collections::BTreeMap;
use std::ops::Range;

use super::vocab::{NONE, Vocab};

/// A part of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fragment {
    /// Plain text at these bytes.
    Text(Range<usize>),
    /// A special token.
    Token(u32),
}

/// Tokens to look for.
#[derive(Debug)]
pub(super) struct SpecialTokens {
    /// Sorted by their bytes.
    ids: Vec<u32>,
    /// For each of them, the position of the longest other one that it begins with, or [`NONE`].
    shorter: Vec<u32>,
    /// Those that begin with each byte.
    first: Vec<Range<u32>>,
}

impl SpecialTokens {
    /// Takes tokens that are not empty. Of two with the same bytes the lower id counts.
    pub(super) fn new(mut ids: Vec<u32>, vocab: &Vocab) -> Self {
        ids.sort_unstable_by_key(|&id| (vocab.bytes(id), id));
        ids.dedup_by_key(|id| vocab.bytes(*id));
        // Sorted, a token's prefixes come before it; those still open lie on a stack.
        let mut shorter = Vec::with_capacity(ids.len());
        let mut open: Vec<u32> = Vec::new();
        for (at, &id) in (0..).zip(&ids) {
            while open
                .last()
                .is_some_and(|&p| !vocab.bytes(id).starts_with(vocab.bytes(ids[p as usize])))
            {
                open.pop();
            }
            shorter.push(open.last().copied().unwrap_or(NONE));
            open.push(at);
        }
        let begins_below =
            |byte: u32| ids.partition_point(|&id| u32::from(vocab.bytes(id)[0]) < byte) as u32;
        let first = (0..256)
            .map(|byte| begins_below(byte)..begins_below(byte + 1))
            .collect();
        SpecialTokens {
            ids,
            shorter,
            first,
        }
    }

    /// The longest token that `text` begins with, as a position in `ids`.
    fn longest(&self, text: &[u8], vocab: &Vocab) -> Option<u32> {
        let Range { start, end } = self.first[usize::from(text[0])].clone();
        let mut range = &self.ids[start as usize..end as usize];
        let mut base = start;
        let mut found = None;
        let mut depth = 1;
        while let Some(&id) = range.first() {
            if vocab.bytes(id).len() == depth {
                found = Some(base);
                range = &range[1..];
                base += 1;
            }
            let Some(&next) = text.get(depth) else { break };
            let from = range.partition_point(|&id| vocab.bytes(id)[depth] < next);
            let to = range.partition_point(|&id| vocab.bytes(id)[depth] <= next);
            range = &range[from..to];
            base += from as u32;
            depth += 1;
        }
        found
    }

    /// Cuts a text into tokens and what lies between them.
    pub(super) fn cut(&self, text: &[u8], vocab: &Vocab) -> Vec<Fragment> {
        // Length to (token's position, place).
        let mut by_length: BTreeMap<usize, Vec<(u32, usize)>> = BTreeMap::new();
        for at in 0..text.len() {
            if !self.first[usize::from(text[at])].is_empty()
                && let Some(token) = self.longest(&text[at..], vocab)
            {
                let len = vocab.bytes(self.ids[token as usize]).len();
                by_length.entry(len).or_default().push((token, at));
            }
        }
        let mut taken = vec![false; if by_length.is_empty() { 0 } else { text.len() }];
        let mut accepted = Vec::new();
        while let Some((len, mut matches)) = by_length.pop_last() {
            matches.sort_unstable_by_key(|&(token, at)| (self.ids[token as usize], at));
            for (token, at) in matches {
                if taken[at] {
                    continue;
                }
                // What is taken is at least as long, so it cannot lie inside.
                if taken[at + len - 1] {
                    let next = self.shorter[token as usize];
                    if next != NONE {
                        let len = vocab.bytes(self.ids[next as usize]).len();
                        by_length.entry(len).or_default().push((next, at));
                    }
                    continue;
                }
                taken[at..at + len].fill(true);
                accepted.push((at, len, self.ids[token as usize]));
            }
        }
        accepted.sort_unstable();
        let mut fragments = Vec::with_capacity(2 * accepted.len() + 1);
        let mut start = 0;
        for (at, len, id) in accepted {
            if start < at {
                fragments.push(Fragment::Text(start..at));
            }
            fragments.push(Fragment::Token(id));
            start = at + len;
        }
        if start < text.len() {
            fragments.push(Fragment::Text(start..text.len()));
        }
        fragments
    }
}

#[cfg(test)]
mod tests {
    use super::super::vocab::{Spelling, TokenKind};
    use super::*;
    use proptest::prelude::*;

    fn build(texts: &[&str]) -> (Vocab, SpecialTokens) {
        let kinds = vec![TokenKind::Control; texts.len()];
        let vocab = Vocab::build(
            texts.iter().map(|t| t.as_bytes()),
            kinds,
            Spelling::SpaceSign,
        )
        .expect("fits");
        let tokens = SpecialTokens::new(vocab.verbatim().to_vec(), &vocab);
        (vocab, tokens)
    }

    /// The definition: cut by one token after another, longest first.
    fn naive(texts: &[&str], text: &[u8]) -> Vec<Fragment> {
        let mut order: Vec<usize> = (0..texts.len()).collect();
        order.sort_by_key(|&i| (std::cmp::Reverse(texts[i].len()), i));
        let mut fragments = vec![Fragment::Text(0..text.len())];
        for id in order {
            let token = texts[id].as_bytes();
            let mut cut = Vec::new();
            for fragment in fragments {
                let Fragment::Text(range) = fragment else {
                    cut.push(fragment);
                    continue;
                };
                let mut start = range.start;
                while let Some(at) = text[start..range.end]
                    .windows(token.len())
                    .position(|w| w == token)
                {
                    cut.extend((at > 0).then_some(Fragment::Text(start..start + at)));
                    cut.push(Fragment::Token(id as u32));
                    start += at + token.len();
                }
                cut.extend((start < range.end).then_some(Fragment::Text(start..range.end)));
            }
            fragments = cut;
        }
        fragments.retain(|f| *f != Fragment::Text(0..0));
        fragments
    }

    #[test]
    fn longest_wins_over_leftmost() {
        let (vocab, tokens) = build(&["ab", "bcd", "a", "<s>"]);
        use Fragment::{Text, Token};
        assert_eq!(tokens.cut(b"abcd", &vocab), [Token(2), Token(1)]);
        assert_eq!(
            tokens.cut(b"x<s>ab", &vocab),
            [Text(0..1), Token(3), Token(0)]
        );
        assert_eq!(tokens.cut(b"", &vocab), []);
        assert_eq!(tokens.cut(b"\xFFz", &vocab), [Text(0..2)]);
    }

    #[test]
    fn no_tokens() {
        let (vocab, tokens) = build(&[]);
        assert_eq!(tokens.cut(b"abc", &vocab), [Fragment::Text(0..3)]);
    }

    proptest! {
        #[test]
        fn equals_cutting_by_one_after_another(texts in proptest::collection::btree_set("[ab]{1,5}", 1..8), text in "[abc]{0,40}") {
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            let (vocab, tokens) = build(&texts);
            prop_assert_eq!(tokens.cut(text.as_bytes(), &vocab), naive(&texts, text.as_bytes()));
        }
    }

    #[test]
    fn runs_take_linear_time() {
        let runs: Vec<String> = (1..=64).map(|n| "\n".repeat(n)).collect();
        let texts: Vec<&str> = runs.iter().map(String::as_str).collect();
        let (vocab, tokens) = build(&texts);
        let start = std::time::Instant::now();
        let n = tokens.cut("\n".repeat(640_001).as_bytes(), &vocab).len();
        assert_eq!(n, 10_001);
        assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
    }
}
