//! A text in pieces that a context holds.

use crate::tokenizer::{Affix, EncodeOptions, Tokenizer};

use super::EvalError;
use super::likelihood::windows;

/// Tokens that belong together, from the begin of a context on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Excerpt {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// The first one that is scored, at least 1. Those before give context.
    pub scored_from: usize,
}

impl Excerpt {
    /// Tokens that are scored from the second one on.
    pub fn whole(tokens: Vec<u32>) -> Self {
        Self {
            tokens,
            scored_from: 1,
        }
    }

    /// The token at `pos + 1`, if it is scored.
    pub fn scored_after(&self, pos: usize) -> Option<u32> {
        let next = pos + 1;
        let token = self.tokens.get(next);
        token.copied().filter(|_| next >= self.scored_from)
    }
}

/// Cuts a text into excerpts of `n_ctx` tokens, of each of which the second half is scored. A text shorter than that is one, scored
/// from its second token on; what is left after the last whole one is left out.
///
/// # Errors
/// If it has fewer than two tokens, or an excerpt would.
pub fn excerpts(
    tokenizer: &Tokenizer,
    text: &[u8],
    n_ctx: usize,
) -> Result<Vec<Excerpt>, EvalError> {
    let options = EncodeOptions {
        bos: Affix::Never,
        eos: Affix::Never,
        ..EncodeOptions::default()
    };
    let ids = tokenizer.encode(text, options)?;
    // A model that expects BOS gets it at the start of every excerpt, in a place of its own.
    let bos = tokenizer.bos().filter(|_| tokenizer.adds_bos());
    cut(&ids, bos, n_ctx)
}

fn cut(ids: &[u32], bos: Option<u32>, n_ctx: usize) -> Result<Vec<Excerpt>, EvalError> {
    let shift = usize::from(bos.is_some());
    let windows = windows(ids.len(), n_ctx.saturating_sub(shift))?;
    let excerpt = |(range, scored_from): (std::ops::Range<usize>, usize)| Excerpt {
        tokens: bos.into_iter().chain(ids[range].iter().copied()).collect(),
        scored_from: scored_from + shift,
    };
    Ok(windows.into_iter().map(excerpt).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_begin_of_text_has_a_place_of_its_own() {
        let ids: Vec<u32> = (10..20).collect();
        let plain = cut(&ids, None, 4).unwrap();
        assert_eq!(plain.len(), 2);
        assert_eq!(
            (&plain[1].tokens[..], plain[1].scored_from),
            (&ids[4..8], 2)
        );
        let begun = cut(&ids, Some(1), 4).unwrap();
        assert_eq!(begun.len(), 3);
        assert_eq!(begun[1].tokens, [1, 13, 14, 15]);
        assert_eq!(begun[1].scored_from, 2);
        assert!(cut(&ids, Some(1), 2).is_err());
    }

    #[test]
    fn the_last_token_and_those_that_give_context_are_not_scored() {
        let excerpt = Excerpt {
            tokens: vec![5, 6, 7, 8],
            scored_from: 2,
        };
        let scored: Vec<_> = (0..4).map(|pos| excerpt.scored_after(pos)).collect();
        assert_eq!(scored, [None, Some(7), Some(8), None]);
        assert_eq!(Excerpt::whole(vec![5, 6]).scored_after(0), Some(6));
    }
}
