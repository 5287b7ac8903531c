//! Sequences that were answered: a prompt that begins like one of them takes its cells from there.

use engine::generate::Sequences;

/// A sequence that nobody is in work with, and its tokens, all of which have cells.
#[derive(Debug)]
pub struct Kept<I> {
    pub sequence: I,
    pub tokens: Vec<u32>,
    /// How many of them, from the first on, have the cells that a prompt gives.
    pub exact: usize,
}

/// What a prompt can take of another sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reuse<I> {
    pub sequence: I,
    /// Tokens.
    pub len: usize,
    /// How many of these have the cells that a prompt gives.
    pub exact: usize,
}

/// Whether cells of generated tokens count where they differ from a prompt's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Generated {
    /// They are the same.
    Alike,
    /// For those who continue the whole sequence.
    Continued,
    /// Never.
    Recomputed,
}

/// The sequences, the one that was used last at the end.
#[derive(Debug)]
pub struct Shelf<I> {
    kept: Vec<Kept<I>>,
}

/// Tokens that two texts begin with alike.
pub fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// What `tokens`, the last of which is computed in any case, can take of a sequence.
pub fn reuse<I>(
    tokens: &[u32],
    sequence: I,
    held: &[u32],
    exact: usize,
    generated: Generated,
) -> Reuse<I> {
    let same = common(tokens, held).min(tokens.len() - 1);
    let len = match generated {
        Generated::Alike => same,
        Generated::Continued if same == held.len() => same,
        Generated::Continued | Generated::Recomputed => same.min(exact),
    };
    Reuse {
        sequence,
        len,
        exact: exact.min(len),
    }
}

impl<I: Copy + Eq> Shelf<I> {
    pub fn new(kept: Vec<Kept<I>>) -> Self {
        Self { kept }
    }

    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// The one that `tokens` can take most of.
    pub fn find(&self, tokens: &[u32], generated: Generated) -> Option<Reuse<I>> {
        let all = self
            .kept
            .iter()
            .map(|kept| reuse(tokens, kept.sequence, &kept.tokens, kept.exact, generated));
        all.max_by_key(|reuse| reuse.len)
            .filter(|reuse| reuse.len > 0)
    }

    /// Says that a sequence was of use.
    pub fn touch(&mut self, sequence: I) {
        let at = self.kept.iter().position(|kept| kept.sequence == sequence);
        if let Some(at) = at {
            let kept = self.kept.remove(at);
            self.kept.push(kept);
        }
    }

    /// Keeps a sequence. Those that are beginnings of it are of no more use, and there are `len_max` at most.
    pub fn keep<S: Sequences<Id = I>>(&mut self, new: Kept<I>, len_max: usize, sequences: &mut S) {
        self.kept.retain(|kept| {
            let stays = !new.tokens.starts_with(&kept.tokens) || kept.exact > new.exact;
            if !stays {
                sequences.forget(kept.sequence);
            }
            stays
        });
        self.kept.push(new);
        while self.kept.len() > len_max {
            self.drop_oldest(sequences);
        }
    }

    /// Forgets the one that was of use longest ago. Returns whether there was one.
    pub fn drop_oldest<S: Sequences<Id = I>>(&mut self, sequences: &mut S) -> bool {
        if self.kept.is_empty() {
            return false;
        }
        sequences.forget(self.kept.remove(0).sequence);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_prompt_takes_of_another_sequence() {
        // Three tokens of a prompt, two of an answer.
        let held = [1, 2, 3, 8, 9];
        let take = |tokens: &[u32], generated| reuse(tokens, 0, &held, 3, generated);
        let is = |len, exact| Reuse {
            sequence: 0,
            len,
            exact,
        };
        use Generated::{Alike, Continued, Recomputed};
        // The last token is computed in any case.
        for generated in [Alike, Continued, Recomputed] {
            assert_eq!(take(&[1, 2, 3], generated), is(2, 2));
            assert_eq!(take(&[5, 2, 3], generated), is(0, 0));
        }
        // The conversation goes on.
        let on = [1, 2, 3, 8, 9, 4, 5];
        assert_eq!(take(&on, Alike), is(5, 3));
        assert_eq!(take(&on, Continued), is(5, 3));
        assert_eq!(take(&on, Recomputed), is(3, 3));
        // It takes another turn in the midst of the answer.
        let turn = [1, 2, 3, 8, 4, 5];
        assert_eq!(take(&turn, Alike), is(4, 3));
        assert_eq!(take(&turn, Continued), is(3, 3));
    }
}
