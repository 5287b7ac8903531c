//! The unigram model of SentencePiece: of all ways to cut a text into tokens, the one with the highest sum of scores.

use super::charsmap::Charsmap;
use super::error::TokenizerError;
use super::vocab::{NONE, TokenKind, Vocab};
use std::cmp::Reverse;

/// How far the score of an unknown character lies below the lowest score of a token.
const UNKNOWN_PENALTY: f64 = 10.0;

/// What happens to spaces before a text is cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spaces {
    /// One is put before the text (or after it, see `as_suffix`).
    pub(super) add: bool,
    /// Several become one, and those at the ends go.
    pub(super) squeeze: bool,
    /// The one that is added stands at the end.
    pub(super) as_suffix: bool,
}

/// Scores and a sorted list to walk, which serves as the trie.
#[derive(Debug)]
pub(super) struct Unigram {
    sorted: Vec<u32>,
    scores: Vec<f32>,
    unknown_score: f64,
    unknown: u32,
    charsmap: Option<Charsmap>,
    spaces: Spaces,
    /// Unknown characters become byte tokens; only where all 256 are there.
    bytes: bool,
}

/// The best way to cut a text up to some place: the last token, where it begins, the sum of scores.
#[derive(Clone, Copy)]
struct Best {
    id: u32,
    start: u32,
    score: f64,
}

impl Unigram {
    /// `scores` has an entry for each token, all of them finite.
    pub(super) fn build(
        scores: Vec<f32>,
        unknown: Option<u32>,
        charsmap: Option<Charsmap>,
        spaces: Spaces,
        vocab: &Vocab,
    ) -> Self {
        let all = 0..vocab.len() as u32;
        let normal = all
            .clone()
            .filter(|&id| vocab.kind(id) == TokenKind::Normal);
        let lowest = normal
            .map(|id| f64::from(scores[id as usize]))
            .reduce(f64::min)
            .unwrap_or(0.0);
        let reachable = |&id: &u32| {
            matches!(
                vocab.kind(id),
                TokenKind::Normal | TokenKind::UserDefined | TokenKind::Unused
            )
        };
        let mut sorted: Vec<u32> = all
            .filter(reachable)
            .filter(|&id| !vocab.bytes(id).is_empty())
            .collect();
        // An unused token may have another's text, which no other two may. The later one counts, as for llama.cpp.
        sorted.sort_unstable_by_key(|&id| (vocab.bytes(id), Reverse(id)));
        sorted.dedup_by_key(|id| vocab.bytes(*id));
        let bytes = (0..=255).all(|byte| vocab.byte_id(byte) != NONE);
        let unknown_score = lowest - UNKNOWN_PENALTY;
        Unigram {
            sorted,
            scores,
            unknown_score,
            unknown: unknown.unwrap_or(NONE),
            charsmap,
            spaces,
            bytes,
        }
    }

    /// Calls `found` with every token that `text` begins with, shortest first.
    fn prefixes(&self, text: &[u8], vocab: &Vocab, mut found: impl FnMut(u32)) {
        let mut range = &self.sorted[..];
        for (depth, byte) in text.iter().enumerate() {
            let at = |id: u32| vocab.bytes(id)[depth];
            let from = range.partition_point(|&id| at(id) < *byte);
            let to = range.partition_point(|&id| at(id) <= *byte);
            range = &range[from..to];
            match range.split_first() {
                None => return,
                Some((&id, longer)) if vocab.bytes(id).len() == depth + 1 => {
                    found(id);
                    range = longer;
                }
                Some(_) => {}
            }
        }
    }

    fn normalise(&self, text: &[u8]) -> Vec<u8> {
        let Spaces {
            add,
            squeeze,
            as_suffix,
        } = self.spaces;
        let mut out = Vec::with_capacity(text.len() + 1);
        let mut in_word = false;
        let mut started = false;
        let mut take = |replacement: &[u8]| {
            for &byte in replacement {
                if byte == b' ' {
                    in_word = false;
                    if !squeeze {
                        out.push(b' ');
                    }
                    continue;
                }
                if !in_word {
                    in_word = true;
                    let first = add && !as_suffix && !started;
                    let between = squeeze && (started || (add && !as_suffix));
                    if first || between {
                        out.push(b' ');
                    }
                    started = true;
                }
                out.push(byte);
            }
        };
        let mut at = 0;
        while at < text.len() {
            let rest = &text[at..];
            if let Some((n, replacement)) = self.charsmap.as_ref().and_then(|map| map.replace(rest))
            {
                take(replacement);
                at += n;
                continue;
            }
            match char_len(rest) {
                Some(n) => {
                    // A sign in the text is a space, as it is in the vocabulary.
                    let c = &rest[..n];
                    take(if c == super::vocab::SPACE_SIGN {
                        b" "
                    } else {
                        c
                    });
                    at += n;
                }
                None => {
                    take(if self.bytes {
                        &rest[..1]
                    } else {
                        "\u{FFFD}".as_bytes()
                    });
                    at += 1;
                }
            }
        }
        if add && as_suffix {
            out.push(b' ');
        }
        out
    }

    /// Appends the tokens of `text`.
    pub(super) fn encode(
        &self,
        text: &[u8],
        vocab: &Vocab,
        out: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let text = self.normalise(text);
        let nothing = Best {
            id: NONE,
            start: 0,
            score: f64::NEG_INFINITY,
        };
        let mut best = vec![nothing; text.len() + 1];
        best[0].score = 0.0;
        let mut at = 0;
        while at < text.len() {
            let here = best[at].score;
            let char_end = at + char_len(&text[at..]).unwrap_or(1);
            let mut whole_char = false;
            self.prefixes(&text[at..], vocab, |id| {
                let end = at + vocab.bytes(id).len();
                whole_char |= end == char_end;
                // User-defined tokens are to be taken wherever they can be; the scores of others are logarithms below 0.
                let own = if vocab.kind(id) == TokenKind::UserDefined {
                    0.0
                } else {
                    f64::from(self.scores[id as usize])
                };
                if here + own > best[end].score {
                    best[end] = Best {
                        id,
                        start: at as u32,
                        score: here + own,
                    };
                }
            });
            if !whole_char && here + self.unknown_score > best[char_end].score {
                best[char_end] = Best {
                    id: self.unknown,
                    start: at as u32,
                    score: here + self.unknown_score,
                };
            }
            at = char_end;
        }
        self.collect(&text, &best, vocab, out)
    }

    fn collect(
        &self,
        text: &[u8],
        best: &[Best],
        vocab: &Vocab,
        out: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let first = out.len();
        let mut end = text.len();
        let mut after_unknown = false;
        while end > 0 {
            let Best { id, start, .. } = best[end];
            let start = start as usize;
            let unknown = id == self.unknown;
            if unknown && self.bytes {
                out.extend(
                    text[start..end]
                        .iter()
                        .rev()
                        .map(|&byte| vocab.byte_id(byte)),
                );
            } else if id == NONE {
                return Err(TokenizerError::NoTokenForByte {
                    byte: text[start],
                    offset: start,
                });
            } else if !(unknown && after_unknown) {
                out.push(id);
            }
            after_unknown = unknown;
            end = start;
        }
        out[first..].reverse();
        Ok(())
    }
}

/// Bytes of the character that `text` begins with; `None` if it is no UTF-8.
pub(super) fn char_len(text: &[u8]) -> Option<usize> {
    let n = match text.first()? {
        0..=0x7F => return Some(1),
        0xC2..=0xDF => 2,
        0xE0..=0xEF => 3,
        0xF0..=0xF4 => 4,
        _ => return None,
    };
    text.get(..n)
        .filter(|c| std::str::from_utf8(c).is_ok())
        .map(|_| n)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::vocab::Spelling;

    const PLAIN: Spaces = Spaces {
        add: false,
        squeeze: false,
        as_suffix: false,
    };

    fn build(tokens: &[(&str, f32)], spaces: Spaces) -> (Vocab, Unigram) {
        let mut kinds = vec![TokenKind::Normal; tokens.len()];
        kinds[0] = TokenKind::Unknown;
        let texts = tokens.iter().map(|t| t.0.as_bytes());
        let vocab = Vocab::build(texts, kinds, Spelling::SpaceSign).expect("fits");
        let scores = tokens.iter().map(|t| t.1).collect();
        let unigram = Unigram::build(scores, Some(0), None, spaces, &vocab);
        (vocab, unigram)
    }

    fn encode(text: &str, tokens: &[(&str, f32)], spaces: Spaces) -> Vec<u32> {
        let (vocab, unigram) = build(tokens, spaces);
        let mut out = Vec::new();
        unigram
            .encode(text.as_bytes(), &vocab, &mut out)
            .expect("encodes");
        out
    }

    #[test]
    fn the_best_sum_wins_not_the_longest_token() {
        let tokens = [
            ("<unk>", 0.0),
            ("a", -1.0),
            ("b", -1.0),
            ("c", -1.0),
            ("abc", -9.0),
            ("ab", -1.5),
            ("bc", -1.9),
        ];
        assert_eq!(encode("abc", &tokens, PLAIN), [5, 3]);
        assert_eq!(encode("bc", &tokens, PLAIN), [6]);
        assert_eq!(encode("", &tokens, PLAIN), [0_u32; 0]);
    }

    #[test]
    fn unknown_characters_become_one_token() {
        let tokens = [("<unk>", 0.0), ("a", -1.0)];
        assert_eq!(encode("a日本a本", &tokens, PLAIN), [1, 0, 1, 0]);
    }

    #[test]
    fn spaces() {
        let tokens = [
            ("<unk>", 0.0),
            ("a", -1.0),
            ("\u{2581}", -1.0),
            ("\u{2581}a", -1.0),
        ];
        let add = Spaces {
            add: true,
            squeeze: false,
            as_suffix: false,
        };
        let squeeze = Spaces {
            add: true,
            squeeze: true,
            as_suffix: false,
        };
        let suffix = Spaces {
            add: true,
            squeeze: false,
            as_suffix: true,
        };
        assert_eq!(encode("a  a ", &tokens, PLAIN), [1, 2, 3, 2]);
        assert_eq!(encode("a  a", &tokens, add), [3, 2, 3]);
        assert_eq!(encode("  a \u{2581} a  ", &tokens, squeeze), [3, 3]);
        assert_eq!(encode("a a", &tokens, suffix), [1, 3, 2]);
    }

    #[test]
    fn bytes_where_the_vocabulary_has_them() {
        let texts: Vec<String> = std::iter::once("<unk>".to_owned())
            .chain((0..=255).map(|b| format!("<0x{b:02X}>")))
            .collect();
        let mut kinds = vec![TokenKind::Byte; 257];
        kinds[0] = TokenKind::Unknown;
        let vocab = Vocab::build(
            texts.iter().map(|t| t.as_bytes()),
            kinds,
            Spelling::SpaceSign,
        )
        .expect("fits");
        let unigram = Unigram::build(vec![0.0; 257], Some(0), None, PLAIN, &vocab);
        let mut out = Vec::new();
        unigram
            .encode(b"\xE6\x97\xA5\xFF", &vocab, &mut out)
            .expect("encodes");
        assert_eq!(out, [0xE7, 0x98, 0xA6, 0x100]);
    }

    #[test]
    fn without_unknown_token_a_strange_character_is_an_error() {
        let vocab = Vocab::build(
            [b"a".as_slice()].into_iter(),
            vec![TokenKind::Normal],
            Spelling::SpaceSign,
        )
        .expect("fits");
        let unigram = Unigram::build(vec![0.0], None, None, PLAIN, &vocab);
        let error = unigram.encode(b"ax", &vocab, &mut Vec::new());
        assert!(
            matches!(
                error,
                Err(TokenizerError::NoTokenForByte {
                    byte: b'x',
                    offset: 1
                })
            ),
            "{error:?}"
        );
    }

    #[test]
    fn long_runs_take_linear_time() {
        let (vocab, unigram) = build(&[("<unk>", 0.0), ("a", -1.0), ("aaaaaaaa", -2.0)], PLAIN);
        let mut out = Vec::new();
        unigram
            .encode("a".repeat(400_000).as_bytes(), &vocab, &mut out)
            .expect("encodes");
        assert_eq!(out.len(), 50_000);
    }
}
