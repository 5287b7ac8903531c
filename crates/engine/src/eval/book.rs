//! The text that needles are hidden in, and that settings are compared over where no other is given.

use std::sync::LazyLock;

/// A novel, one paragraph a line: see the README beside it.
pub const BOOK: &str = include_str!("../../data/persuasion.txt");

/// The book's sentences, in order.
pub(super) static SENTENCES: LazyLock<Vec<&'static str>> =
    LazyLock::new(|| BOOK.lines().flat_map(sentences).collect());

/// Cuts a paragraph after each full stop, question mark or exclamation mark, with its closing quotes, unless what follows
/// begins in lower case.
fn sentences(paragraph: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut start = 0;
    for (at, _) in paragraph.match_indices(' ') {
        let before = paragraph[..at].trim_end_matches(['"', '\'', ')']);
        let goes_on = paragraph[at + 1..].starts_with(|c: char| c.is_lowercase());
        if before.ends_with(['.', '!', '?']) && !goes_on {
            found.push(&paragraph[start..at]);
            start = at + 1;
        }
    }
    found.push(&paragraph[start..]);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::{Digest, Sha256};

    #[test]
    fn a_paragraph_is_cut_at_the_ends_of_its_sentences() {
        let text = r#"He came. "Did he?" asked she. "No!" (So it was.) But--Yes"#;
        let expected = [
            "He came.",
            r#""Did he?" asked she."#,
            r#""No!""#,
            "(So it was.)",
            "But--Yes",
        ];
        assert_eq!(sentences(text), expected);
        assert_eq!(sentences("One"), ["One"]);
    }

    #[test]
    fn the_book_is_the_one_that_scores_are_compared_on() {
        let hex: String = Sha256::digest(BOOK)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        assert_eq!(
            hex,
            "e49512fd72b4b5c3b0436987a55cd697c69b9a9e3850719ca142b05e01a3ca66"
        );
        assert!(BOOK.is_ascii());
        assert!(SENTENCES.len() > 3000, "{}", SENTENCES.len());
        assert!(SENTENCES.iter().all(|s| !s.is_empty() && s.trim() == *s));
        // Nothing is lost by cutting.
        let words = |text: &str| text.split_whitespace().count();
        assert_eq!(words(&SENTENCES.join(" ")), words(BOOK));
    }
}
