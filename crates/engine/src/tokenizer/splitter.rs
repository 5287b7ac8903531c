//! Cuts text into the pieces that merges must not cross, by patterns like those of [`super::patterns`].
//!
//! A regular-expression engine of our own, because ours must take any bytes (a byte that is no UTF-8 counts as U+FFFD,
//! and stays the byte it is), must be linear on hostile text, and needs little of the language: sequences of character
//! sets with greedy repetition, optional groups of literals, alternatives tried in order, `(?!\S)`, and `\s+$`.
//!
//! Each character is looked up once and becomes a bit mask, one bit for each set of the stage; matching is then tests of
//! bits. Time is linear: a repetition that fails gives back its characters one by one, and in every pattern of the table
//! what follows it fails or succeeds at once, and what it ran over is consumed by a later alternative.

use unicode_general_category::get_general_category;

use super::pattern::Parser;

/// Marks bytes of a character after its first.
const INSIDE: u32 = 1 << 31;

/// Most sets that one stage may use: one bit each, beside [`INSIDE`].
pub(super) const SETS_MAX: usize = 31;

/// Stands for every byte that is no UTF-8.
const REPLACEMENT: char = '\u{FFFD}';

/// A set of characters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CharSet {
    pub(super) negated: bool,
    pub(super) space: bool,
    pub(super) not_space: bool,
    /// Bit `c` for the general category with discriminant `c`.
    pub(super) categories: u32,
    pub(super) ranges: Vec<(char, char)>,
}

impl CharSet {
    fn contains(&self, c: char, category_bit: u32) -> bool {
        let inside = self.categories & category_bit != 0
            || (self.space && c.is_whitespace())
            || (self.not_space && !c.is_whitespace())
            || self
                .ranges
                .iter()
                .any(|&(first, last)| first <= c && c <= last);
        inside != self.negated
    }
}

#[derive(Debug)]
pub(super) enum Item {
    /// `min` to `max` characters of the set with this bit, as many as possible.
    Repeat { bit: u32, min: u32, max: u32 },
    /// One of several sequences of fixed length, or (if optional) nothing.
    Group {
        alternatives: Vec<Vec<Item>>,
        optional: bool,
    },
    /// The next character, if there is one, is not in the set.
    NotFollowedBy { bit: u32 },
    /// Everything up to the end of the piece, if all of it is in the set [`Stage::run_to_end`].
    RunToEnd,
}

#[derive(Debug)]
pub(super) struct Alternative {
    /// The sets that its first character may be in.
    pub(super) first: u32,
    pub(super) items: Vec<Item>,
}

/// One stage, compiled.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) sets: Vec<CharSet>,
    /// Masks of the first 128 characters.
    pub(super) ascii: [u32; 128],
    pub(super) alternatives: Vec<Alternative>,
    /// The set of its [`Item::RunToEnd`], or 0.
    pub(super) run_to_end: u32,
}

/// Cuts text into pieces.
#[derive(Debug)]
pub(super) struct Splitter {
    stages: Vec<Stage>,
}

impl Splitter {
    /// Compiles patterns; the error says what in them is not understood.
    pub(super) fn new(patterns: &[&str]) -> Result<Self, String> {
        let stages = patterns
            .iter()
            .map(|p| Parser::compile(p))
            .collect::<Result<_, _>>()?;
        Ok(Splitter { stages })
    }

    /// The end of each piece of `text`, ascending; the last is `text.len()`.
    pub(super) fn piece_ends(&self, text: &[u8]) -> Vec<usize> {
        if text.is_empty() {
            return Vec::new();
        }
        let mut ends = vec![text.len()];
        let mut masks = Vec::with_capacity(text.len());
        for stage in &self.stages {
            stage.fill_masks(text, &mut masks);
            let mut start = 0;
            let mut cut = Vec::with_capacity(ends.len());
            for &end in &ends {
                stage.cut(&masks[start..end], start, &mut cut);
                start = end;
            }
            ends = cut;
        }
        ends
    }
}

impl Stage {
    pub(super) fn mask(&self, c: char) -> u32 {
        let category_bit = 1_u32 << (get_general_category(c) as u32);
        let bits = self.sets.iter().enumerate();
        bits.fold(0, |mask, (bit, set)| {
            mask | (u32::from(set.contains(c, category_bit)) << bit)
        })
    }

    fn fill_masks(&self, text: &[u8], masks: &mut Vec<u32>) {
        masks.clear();
        let broken = self.mask(REPLACEMENT);
        for chunk in text.utf8_chunks() {
            for c in chunk.valid().chars() {
                let code = c as usize;
                masks.push(if code < 128 {
                    self.ascii[code]
                } else {
                    self.mask(c)
                });
                masks.extend(std::iter::repeat_n(INSIDE, c.len_utf8() - 1));
            }
            masks.extend(std::iter::repeat_n(broken, chunk.invalid().len()));
        }
    }

    /// Cuts one piece, whose masks these are, into matches and what lies between them.
    fn cut(&self, masks: &[u32], offset: usize, ends: &mut Vec<usize>) {
        // Where the run up to the end begins is found once a piece; looking for it at every start would be quadratic.
        let inside = |mask: &&u32| **mask & (self.run_to_end | INSIDE) != 0;
        let piece = Piece {
            masks,
            tail: masks.len() - masks.iter().rev().take_while(inside).count(),
        };
        let mut at = 0;
        let mut gap = 0;
        while at < masks.len() {
            let may_begin = self
                .alternatives
                .iter()
                .filter(|a| masks[at] & a.first != 0);
            let found = may_begin
                .filter_map(|a| piece.match_items(&a.items, at))
                .find(|&end| end > at);
            match found {
                Some(end) => {
                    if gap < at {
                        ends.push(offset + at);
                    }
                    ends.push(offset + end);
                    at = end;
                    gap = end;
                }
                None => at = next(masks, at),
            }
        }
        if gap < masks.len() {
            ends.push(offset + masks.len());
        }
    }
}

/// The start of the character after the one at `at`.
fn next(masks: &[u32], at: usize) -> usize {
    let mut at = at + 1;
    while at < masks.len() && masks[at] & INSIDE != 0 {
        at += 1;
    }
    at
}

/// The start of the character before `at`.
fn previous(masks: &[u32], at: usize) -> usize {
    let mut at = at - 1;
    while masks[at] & INSIDE != 0 {
        at -= 1;
    }
    at
}

/// What a stage is cutting.
struct Piece<'m> {
    masks: &'m [u32],
    /// From here on, all is in the set [`Stage::run_to_end`].
    tail: usize,
}

impl Piece<'_> {
    /// Where a match of all items that begins at `at` ends.
    fn match_items(&self, items: &[Item], at: usize) -> Option<usize> {
        let Some((item, rest)) = items.split_first() else {
            return Some(at);
        };
        let masks = self.masks;
        match item {
            Item::Repeat { bit, min, max } => {
                let mut count = 0;
                let mut end = at;
                while count < *max && end < masks.len() && masks[end] & bit != 0 {
                    end = next(masks, end);
                    count += 1;
                }
                if rest.is_empty() {
                    return (count >= *min).then_some(end);
                }
                while count >= *min {
                    if let Some(found) = self.match_items(rest, end) {
                        return Some(found);
                    }
                    if count == 0 {
                        break;
                    }
                    end = previous(masks, end);
                    count -= 1;
                }
                None
            }
            Item::Group {
                alternatives,
                optional,
            } => alternatives
                .iter()
                .find_map(|a| {
                    self.match_items(a, at)
                        .and_then(|end| self.match_items(rest, end))
                })
                .or_else(|| optional.then(|| self.match_items(rest, at)).flatten()),
            Item::NotFollowedBy { bit } => match masks.get(at) {
                Some(mask) if mask & bit != 0 => None,
                _ => self.match_items(rest, at),
            },
            Item::RunToEnd => (at >= self.tail).then_some(masks.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::patterns::{self, PATTERNS};
    use super::*;
    use proptest::prelude::*;

    fn pieces<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        let splitter =
            Splitter::new(patterns::find(name).expect("known").stages).expect("compiles");
        let mut start = 0;
        let cut = |end| &text[std::mem::replace(&mut start, end)..end];
        splitter
            .piece_ends(text.as_bytes())
            .into_iter()
            .map(cut)
            .collect()
    }

    #[test]
    fn every_pattern_compiles_and_every_name_is_used_once() {
        for pattern in PATTERNS {
            Splitter::new(pattern.stages).unwrap_or_else(|e| panic!("{:?}: {e}", pattern.names));
        }
        let mut names = patterns::names();
        names.sort_unstable();
        let n = names.len();
        names.dedup();
        assert_eq!(names.len(), n);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for pattern in [
            "(a+)", "(?:a+)b", "a)", "[a", "[z-a]", r"\q", r"\p{Xx}", "a{x}", "a*", r"a?$", "",
            "a|", r"\u12",
        ] {
            assert!(Splitter::new(&[pattern]).is_err(), "{pattern}");
        }
    }

    #[test]
    fn gpt2() {
        let text = "I'll go,  2024 items\t\n x";
        assert_eq!(
            pieces("gpt-2", text),
            ["I", "'ll", " go", ",", " ", " 2024", " items", "\t\n", " x"]
        );
        assert_eq!(
            pieces("gpt-2", "don'T \u{3000}x  "),
            ["don", "'", "T", " ", "\u{3000}", "x", "  "]
        );
    }

    #[test]
    fn llama3_and_qwen2_differ_in_digits() {
        assert_eq!(
            pieces("llama-bpe", "a1234 (x)\r\n\r\n  y"),
            ["a", "123", "4", " (", "x", ")\r\n\r\n", " ", " y"]
        );
        assert_eq!(
            pieces("qwen2", "a12 I'M\u{2028}z"),
            ["a", "1", "2", " I", "'M", "\u{2028}z"]
        );
        assert_eq!(pieces("qwen2", "e\u{301}x"), ["e", "\u{301}x"]);
        assert_eq!(pieces("qwen35", "e\u{301}x"), ["e\u{301}x"]);
    }

    #[test]
    fn smollm_takes_digits_alone() {
        assert_eq!(pieces("smollm", "v 12b"), ["v", " ", "1", "2", "b"]);
    }

    #[test]
    fn gpt4o_splits_at_capitals() {
        assert_eq!(
            pieces("gpt-4o", "HelloWorld don't ABCdef X's /a//\n12345"),
            [
                "Hello", "World", " don't", " ABCdef", " X's", " /", "a", "//\n", "123", "45"
            ]
        );
        assert_eq!(
            pieces("tekken", "don't ABC 12"),
            ["don", "'t", " ABC", " ", "1", "2"]
        );
        assert_eq!(pieces("gpt-4o", "Äpfel日本ABCんx"), ["Äpfel日本", "ABCんx"]);
    }

    #[test]
    fn deepseek() {
        assert_eq!(
            pieces("deepseek-v3", "x=foo(日本,1234) ok\n"),
            ["x", "=foo", "(", "日本", ",", "123", "4", ")", " ok", "\n"]
        );
        assert_eq!(
            pieces("deepseek-llm", "Hi, you\n日本  "),
            ["Hi", ",", " you", "\n", "日本", "  "]
        );
        assert_eq!(pieces("deepseek-coder", "a+ b1"), ["a", "+", " b", "1"]);
    }

    #[test]
    fn other_patterns() {
        assert_eq!(
            pieces("falcon", "a<=b 1234567 `"),
            ["a", "<=", "b", " ", "123", "456", "7", " ", "`"]
        );
        assert_eq!(
            pieces("bloom", "Hi there, you"),
            ["Hi", " there", ",", " you"]
        );
        assert_eq!(pieces("default", "1234 a"), ["123", "4", " a"]);
    }

    #[test]
    fn bytes_that_are_no_utf8_count_as_symbols() {
        let splitter = Splitter::new(&[QWEN2_LIKE]).expect("compiles");
        assert_eq!(splitter.piece_ends(b"ab\xFF\xFEc \xE6\x97"), [2, 4, 5, 8]);
        assert_eq!(splitter.piece_ends(b""), [0_usize; 0]);
    }

    const QWEN2_LIKE: &str = r"\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

    #[test]
    fn hostile_runs_take_linear_time() {
        let n = 200_000;
        let texts = [
            "a".repeat(n),
            " ".repeat(n) + "5",
            "A".repeat(n),
            "\n ".repeat(n),
            " \u{3000}".repeat(n),
            "'".repeat(n),
        ];
        let start = std::time::Instant::now();
        for pattern in PATTERNS {
            let splitter = Splitter::new(pattern.stages).expect("compiles");
            for text in &texts {
                let ends = splitter.piece_ends(text.as_bytes());
                assert_eq!(ends.last(), Some(&text.len()));
            }
        }
        // Quadratic behaviour would take hours; the bound is far above what linear work takes on a slow, busy machine.
        assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
    }

    proptest! {
        #[test]
        fn pieces_cover_the_text(bytes in proptest::collection::vec(any::<u8>(), 0..200), which in 0..PATTERNS.len()) {
            let splitter = Splitter::new(PATTERNS[which].stages).expect("compiles");
            let ends = splitter.piece_ends(&bytes);
            prop_assert!(ends.windows(2).all(|w| w[0] < w[1]));
            prop_assert_eq!(ends.last().copied().unwrap_or(0), bytes.len());
        }
    }
}
