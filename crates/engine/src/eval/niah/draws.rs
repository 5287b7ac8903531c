//! What is drawn at random, from a seed and nothing else.

use super::words::{ADJECTIVES, NOUNS};
use crate::sampler::random::uniform;

/// A sequence of draws.
#[derive(Debug, Clone)]
pub(super) struct Draws {
    seed: u64,
    position: u64,
}

impl Draws {
    /// The sequence that a seed and a list of numbers name.
    pub fn new(seed: u64, names: &[u64]) -> Self {
        let seed = names.iter().fold(seed, |seed, &name| {
            (uniform(seed, name) * 2f64.powi(53)) as u64
        });
        Self { seed, position: 0 }
    }

    /// A number in [0, 1).
    pub fn share(&mut self) -> f64 {
        let x = uniform(self.seed, self.position);
        self.position += 1;
        x
    }

    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.share() * n as f64) as usize
    }
}

/// What a key or a value looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// An adjective and a noun.
    Words,
    /// Seven digits, the first no zero.
    Number,
    /// A random UUID.
    Code,
}

impl Kind {
    /// One of its kind.
    pub fn draw(self, draws: &mut Draws) -> String {
        match self {
            Self::Words => {
                let first = ADJECTIVES[draws.below(ADJECTIVES.len())];
                let second = NOUNS[draws.below(NOUNS.len())];
                format!("{first}-{second}")
            }
            Self::Number => (1_000_000 + draws.below(9_000_000)).to_string(),
            Self::Code => uuid(draws),
        }
    }

    /// So many of its kind, all different.
    pub fn draw_different(self, n: usize, draws: &mut Draws) -> Vec<String> {
        let mut drawn: Vec<String> = Vec::with_capacity(n);
        while drawn.len() < n {
            let one = self.draw(draws);
            if !drawn.contains(&one) {
                drawn.push(one);
            }
        }
        drawn
    }
}

/// A version 4 UUID, as text.
fn uuid(draws: &mut Draws) -> String {
    let mut text = String::with_capacity(36);
    for place in 0..32 {
        if matches!(place, 8 | 12 | 16 | 20) {
            text.push('-');
        }
        let digit = match place {
            12 => 4,
            16 => 8 + draws.below(4),
            _ => draws.below(16),
        };
        text.push(char::from(b"0123456789abcdef"[digit]));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn words_are_different_and_plain() {
        for words in [&ADJECTIVES, &NOUNS] {
            let different: HashSet<_> = words.iter().collect();
            assert_eq!(different.len(), words.len());
            assert!(
                words
                    .iter()
                    .all(|w| w.bytes().all(|b| b.is_ascii_lowercase()))
            );
        }
        // So no key is a part of another.
        let pairs = |a: &str, b: &str, part: fn(&str, &str) -> bool| a != b && part(a, b);
        for a in ADJECTIVES {
            assert!(
                !ADJECTIVES
                    .iter()
                    .any(|b| pairs(a, b, |a, b| a.ends_with(b))),
                "{a}"
            );
        }
        for a in NOUNS {
            assert!(
                !NOUNS.iter().any(|b| pairs(a, b, |a, b| a.starts_with(b))),
                "{a}"
            );
        }
    }

    #[test]
    fn every_kind_keeps_its_form() {
        let mut draws = Draws::new(1, &[2]);
        for _ in 0..1000 {
            let number = Kind::Number.draw(&mut draws);
            assert!(number.len() == 7 && !number.starts_with('0'), "{number}");
            assert!(number.parse::<u32>().is_ok(), "{number}");
            let code = Kind::Code.draw(&mut draws);
            let parts: Vec<usize> = code.split('-').map(str::len).collect();
            assert_eq!(parts, [8, 4, 4, 4, 12], "{code}");
            assert!(
                code.as_bytes()[14] == b'4' && b"89ab".contains(&code.as_bytes()[19]),
                "{code}"
            );
            let words = Kind::Words.draw(&mut draws);
            let (first, second) = words.split_once('-').unwrap();
            assert!(
                ADJECTIVES.contains(&first) && NOUNS.contains(&second),
                "{words}"
            );
        }
        // More keys than one in a hundred would be alike by chance.
        let many = Kind::Words.draw_different(500, &mut draws);
        assert_eq!(many.iter().collect::<HashSet<_>>().len(), 500);
    }

    #[test]
    fn other_names_are_other_sequences() {
        let first = |seed, names: &[u64]| Draws::new(seed, names).share();
        let all = [
            first(0, &[]),
            first(1, &[]),
            first(0, &[0]),
            first(0, &[1]),
            first(0, &[0, 1]),
            first(0, &[1, 0]),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b), "{all:?}");
        }
        assert_eq!(first(7, &[1, 2]), first(7, &[1, 2]));
    }
}
