//! When a generation ends: an end token, a stop string, or enough tokens.
//!
//! Stop strings are looked for in the text, across the borders of tokens. Text that may be the begin of one is held back
//! until that is decided, so that no part of a stop string is ever shown. The first one to be complete counts (of two
//! that are complete at the same byte, the longer), which does not depend on how the text was cut into pieces.

/// Most stop strings that are taken, and most bytes of one: each byte of text costs a step for each string.
pub const STOP_STRINGS_MAX: usize = 64;

/// Most bytes of a stop string: so much text at most is held back.
pub const STOP_BYTES_MAX: usize = 4096;

/// What is wrong with stop settings.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// An empty string is everywhere.
    #[error("stop string {index} is empty")]
    Empty {
        /// Its place in the list.
        index: usize,
    },
    /// A string is too long.
    #[error("stop string {index} has {len} bytes, at most {STOP_BYTES_MAX} are allowed")]
    TooLong {
        /// Its place in the list.
        index: usize,
        /// Its length.
        len: usize,
    },
    /// There are too many.
    #[error("{found} stop strings, at most {STOP_STRINGS_MAX} are allowed")]
    TooMany {
        /// How many there are.
        found: usize,
    },
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The model gave this end token.
    EndToken(u32),
    /// The text reached the stop string at this place in the list.
    StopString(usize),
    /// As many tokens as were asked for.
    MaxTokens,
}

/// One stop string and how much of it the text ends with.
#[derive(Debug, Clone)]
struct Matcher {
    bytes: Vec<u8>,
    /// For each length matched, the length of the longest shorter match that is still there when the next byte differs.
    fallback: Vec<usize>,
    matched: usize,
}

impl Matcher {
    fn new(text: &str) -> Self {
        let bytes = text.as_bytes().to_vec();
        let mut fallback = vec![0; bytes.len() + 1];
        let mut length = 0;
        for i in 1..bytes.len() {
            while length > 0 && bytes[i] != bytes[length] {
                length = fallback[length];
            }
            length += usize::from(bytes[i] == bytes[length]);
            fallback[i + 1] = length;
        }
        Matcher {
            bytes,
            fallback,
            matched: 0,
        }
    }

    /// Takes a byte; whether the string is complete with it.
    fn step(&mut self, byte: u8) -> bool {
        while self.matched > 0 && byte != self.bytes[self.matched] {
            self.matched = self.fallback[self.matched];
        }
        self.matched += usize::from(byte == self.bytes[self.matched]);
        let complete = self.matched == self.bytes.len();
        if complete {
            self.matched = self.fallback[self.matched];
        }
        complete
    }
}

/// Watches a generation token by token. After it said stop, it begins anew with the text that comes.
#[derive(Debug, Clone)]
pub struct Stopper {
    /// Sorted.
    ends: Vec<u32>,
    tokens_left: Option<u64>,
    matchers: Vec<Matcher>,
    held: String,
    shown: String,
}

/// What a token leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step<'s> {
    /// The text to show now.
    pub text: &'s str,
    /// Why the generation ends with this token, if it does.
    pub stop: Option<StopReason>,
}

impl Stopper {
    /// `ends` are the tokens that end a generation (none to go on past them), `tokens_max` the most tokens.
    pub fn new<S: AsRef<str>>(
        ends: &[u32],
        strings: &[S],
        tokens_max: Option<u64>,
    ) -> Result<Self, StopError> {
        if strings.len() > STOP_STRINGS_MAX {
            return Err(StopError::TooMany {
                found: strings.len(),
            });
        }
        for (index, string) in strings.iter().enumerate() {
            match string.as_ref().len() {
                0 => return Err(StopError::Empty { index }),
                len if len > STOP_BYTES_MAX => return Err(StopError::TooLong { index, len }),
                _ => {}
            }
        }
        let mut ends = ends.to_vec();
        ends.sort_unstable();
        Ok(Stopper {
            ends,
            tokens_left: tokens_max,
            matchers: strings.iter().map(|s| Matcher::new(s.as_ref())).collect(),
            held: String::new(),
            shown: String::new(),
        })
    }

    /// Takes a token and the text that became complete with it. An end token counts as a token, its text (if any) is
    /// not shown.
    pub fn step(&mut self, token: u32, text: &str) -> Step<'_> {
        self.shown.clear();
        if self.ends.binary_search(&token).is_ok() {
            self.release();
            return Step {
                text: &self.shown,
                stop: Some(StopReason::EndToken(token)),
            };
        }
        let mut stop = self.take(text).map(StopReason::StopString);
        if let Some(left) = &mut self.tokens_left {
            *left = left.saturating_sub(1);
            if *left == 0 && stop.is_none() {
                self.release();
                stop = Some(StopReason::MaxTokens);
            }
        }
        Step {
            text: &self.shown,
            stop,
        }
    }

    /// Takes text that comes without a token, such as what a detokenizer still had at the end; the generation is over
    /// then, so nothing is held back.
    pub fn finish(&mut self, text: &str) -> Step<'_> {
        self.shown.clear();
        let stop = self.take(text).map(StopReason::StopString);
        self.release();
        Step {
            text: &self.shown,
            stop,
        }
    }

    /// Shows what is held back and begins anew.
    fn release(&mut self) {
        self.shown.push_str(&self.held);
        self.held.clear();
        for matcher in &mut self.matchers {
            matcher.matched = 0;
        }
    }

    /// Moves what can be shown from `held` and `text` to `shown`; the stop string that is complete, if one is.
    fn take(&mut self, text: &str) -> Option<usize> {
        let before = self.held.len();
        self.held.push_str(text);
        for (at, byte) in text.bytes().enumerate() {
            let mut found: Option<(usize, usize)> = None;
            for (index, matcher) in self.matchers.iter_mut().enumerate() {
                let longer = found.is_none_or(|(_, len)| matcher.bytes.len() > len);
                if matcher.step(byte) && longer {
                    found = Some((index, matcher.bytes.len()));
                }
            }
            if let Some((index, len)) = found {
                // A match begins where a character begins, since stop strings are whole characters.
                self.shown.push_str(&self.held[..before + at + 1 - len]);
                self.held.clear();
                self.release();
                return Some(index);
            }
        }
        let undecided = self.matchers.iter().map(|m| m.matched).max().unwrap_or(0);
        self.shown
            .extend(self.held.drain(..self.held.len() - undecided));
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stopper(strings: &[&str]) -> Stopper {
        Stopper::new(&[9], strings, None).expect("good settings")
    }

    /// All that is shown of a text that comes in these pieces, and why it ended.
    fn run(mut stopper: Stopper, pieces: &[&str]) -> (String, Option<StopReason>) {
        let mut shown = String::new();
        for piece in pieces {
            let Step { text, stop } = stopper.step(0, piece);
            shown.push_str(text);
            if stop.is_some() {
                return (shown, stop);
            }
        }
        let Step { text, stop } = stopper.finish("");
        shown.push_str(text);
        (shown, stop)
    }

    #[test]
    fn a_stop_string_across_pieces_is_never_shown() {
        let mut stopper = stopper(&["END"]);
        assert_eq!(
            stopper.step(0, "an E"),
            Step {
                text: "an ",
                stop: None
            }
        );
        assert_eq!(
            stopper.step(0, "N"),
            Step {
                text: "",
                stop: None
            }
        );
        assert_eq!(
            stopper.step(0, "EN"),
            Step {
                text: "EN",
                stop: None
            }
        );
        assert_eq!(
            stopper.step(0, "D of"),
            Step {
                text: "",
                stop: Some(StopReason::StopString(0))
            }
        );
    }

    #[test]
    fn the_first_to_be_complete_counts() {
        assert_eq!(
            run(stopper(&["abcd", "bc"]), &["xabcd"]),
            ("xa".into(), Some(StopReason::StopString(1)))
        );
        assert_eq!(
            run(stopper(&["c", "bc"]), &["abc"]),
            ("a".into(), Some(StopReason::StopString(1)))
        );
        assert_eq!(
            run(stopper(&["aab"]), &["aaab"]),
            ("a".into(), Some(StopReason::StopString(0)))
        );
    }

    #[test]
    fn what_was_held_back_comes_when_it_is_no_stop() {
        assert_eq!(
            run(stopper(&["\n\nUser:"]), &["hi\n", "\nUse"]),
            ("hi\n\nUse".into(), None)
        );
        let mut at_end = stopper(&["ab"]);
        assert_eq!(at_end.step(0, "xa").text, "x");
        assert_eq!(
            at_end.step(9, ""),
            Step {
                text: "a",
                stop: Some(StopReason::EndToken(9))
            }
        );
        let mut late = stopper(&["ab"]);
        assert_eq!(late.step(0, "xa").text, "x");
        assert_eq!(
            late.finish("b"),
            Step {
                text: "",
                stop: Some(StopReason::StopString(0))
            }
        );
    }

    #[test]
    fn enough_tokens() {
        let mut stopper = Stopper::new(&[], &["yz"], Some(2)).expect("good settings");
        assert_eq!(
            stopper.step(9, "x"),
            Step {
                text: "x",
                stop: None
            }
        );
        assert_eq!(
            stopper.step(9, "y"),
            Step {
                text: "y",
                stop: Some(StopReason::MaxTokens)
            }
        );
        let mut both = Stopper::new(&[], &["y"], Some(1)).expect("good settings");
        assert_eq!(both.step(0, "y").stop, Some(StopReason::StopString(0)));
    }

    #[test]
    fn after_a_stop_it_begins_anew() {
        let mut stopper = stopper(&["aba"]);
        assert!(stopper.step(0, "xaba").stop.is_some());
        assert_eq!(
            stopper.step(0, "baba"),
            Step {
                text: "b",
                stop: Some(StopReason::StopString(0))
            }
        );
        assert_eq!(stopper.step(0, "ab").text, "");
        assert_eq!(stopper.step(9, "").text, "ab");
        assert_eq!(stopper.step(0, "a").text, "");
        assert_eq!(stopper.finish("").text, "a");
    }

    #[test]
    fn bad_settings_are_refused() {
        let new = |strings: &[String]| Stopper::new(&[], strings, None).map(|_| ());
        assert_eq!(
            new(&["a".into(), String::new()]),
            Err(StopError::Empty { index: 1 })
        );
        assert_eq!(
            new(&["a".repeat(5000)]),
            Err(StopError::TooLong {
                index: 0,
                len: 5000
            })
        );
        assert_eq!(
            new(&vec!["a".into(); 65]),
            Err(StopError::TooMany { found: 65 })
        );
    }

    /// The definition: the shortest head of the text that ends with a stop string, less the longest such string.
    fn naive(strings: &[String], text: &str) -> (String, Option<StopReason>) {
        for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let complete = strings
                .iter()
                .enumerate()
                .filter(|(_, s)| text[..end].ends_with(s.as_str()));
            if let Some((index, s)) = complete.min_by_key(|(i, s)| (std::cmp::Reverse(s.len()), *i))
            {
                return (
                    text[..end - s.len()].to_owned(),
                    Some(StopReason::StopString(index)),
                );
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(
            strings in proptest::collection::vec("[abé]{1,4}", 0..4),
            pieces in proptest::collection::vec("[abé日]{0,5}", 0..8),
        ) {
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let stopper = Stopper::new(&[9], &strings, None).expect("good settings");
            prop_assert_eq!(run(stopper, &pieces), naive(&strings, &pieces.concat()));
        }
    }
}
