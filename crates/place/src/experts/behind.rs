//! Experts that the CPU computed and that are to be copied to the cache while the link has nothing more urgent.
//!
//! What the CPU computes does not come to the device by itself, so a cache that has room would fill with the streamed ones alone, and the next
//! prompt would miss the others again. They wait here until there is time: behind each layer's streamed experts so many are copied as the link
//! gets done before the next layer needs it, which is found by trying. Layers that are next come first: by then they are there.

use super::usage::{Blob, Usage};
use std::collections::BTreeSet;

/// Copies behind a layer of a prompt: to begin with and at least, and at most.
const LEAST: usize = 4;
const MOST: usize = 32;

/// What one more try adds, once some did not get done in time; twice as many are tried before.
const MORE: usize = 2;

/// Copies behind a generated token's layer, at most: what they take delays the next one, which reads over the same link.
const GENERATED: usize = 4;

/// What waits, and how many are copied at a time.
#[derive(Clone, Debug)]
pub(super) struct Behind {
    waiting: BTreeSet<Blob>,
    prompt: usize,
    /// Whether some did not get done in time.
    is_tried: bool,
    /// Copies that were chosen last.
    chosen: usize,
}

impl Behind {
    pub(super) fn new() -> Self {
        Self {
            waiting: BTreeSet::new(),
            prompt: LEAST,
            is_tried: false,
            chosen: 0,
        }
    }

    /// Has an expert wait.
    pub(super) fn push(&mut self, blob: Blob) {
        self.waiting.insert(blob);
    }

    /// Takes those whose turn it is behind a layer: `take` says whether one is copied. What is not worth it waits no longer.
    pub(super) fn choose(
        &mut self,
        usage: &Usage,
        layer: usize,
        generated: bool,
        mut take: impl FnMut(Blob) -> bool,
    ) {
        let layers = usage.layers().len();
        // A token's neighbours use what it used, so what was missing just now comes first; a prompt goes on to layers that have not been.
        let (most, from) = match generated {
            true => (GENERATED, (layer + layers - 1) % layers),
            false => (self.prompt, (layer + 1) % layers),
        };
        let from = usage.blob(from, 0);
        self.chosen = 0;
        while self.chosen < most {
            let next = self.waiting.range(from..).next();
            let Some(&blob) = next.or_else(|| self.waiting.first()) else {
                break;
            };
            self.waiting.remove(&blob);
            self.chosen += usize::from(take(blob));
        }
    }

    /// Tells whether all copies behind a prompt's layer were there when the next one was routed.
    pub(super) fn took(&mut self, are_there: bool) {
        let more = if self.is_tried { MORE } else { self.prompt };
        self.is_tried |= !are_there;
        self.prompt = match are_there {
            false => (self.prompt / 2).max(LEAST),
            true if self.chosen >= self.prompt => (self.prompt + more).min(MOST),
            true => self.prompt,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experts::Layer;

    fn usage() -> Usage {
        let layer = Layer {
            experts: 16,
            used: 2,
            blob_bytes: 1,
        };
        Usage::new(&[layer; 4], None)
    }

    fn chosen(behind: &mut Behind, layer: usize, generated: bool) -> Vec<(usize, u32)> {
        let usage = usage();
        let mut chosen = Vec::new();
        behind.choose(&usage, layer, generated, |blob| {
            chosen.push(usage.place(blob));
            true
        });
        chosen
    }

    #[test]
    fn the_next_layers_come_first_and_a_tokens_last_one() {
        let usage = usage();
        let fill = |behind: &mut Behind| {
            for (layer, expert) in [(0, 3), (1, 5), (2, 7), (3, 2), (3, 9)] {
                behind.push(usage.blob(layer, expert));
            }
        };
        let mut behind = Behind::new();
        fill(&mut behind);
        assert_eq!(
            chosen(&mut behind, 1, false),
            [(2, 7), (3, 2), (3, 9), (0, 3)]
        );
        assert_eq!(chosen(&mut behind, 2, false), [(1, 5)]);
        assert_eq!(chosen(&mut behind, 3, false), []);
        fill(&mut behind);
        assert_eq!(
            chosen(&mut behind, 0, true),
            [(3, 2), (3, 9), (0, 3), (1, 5)]
        );
    }

    #[test]
    fn what_is_not_worth_it_is_not_asked_for_twice() {
        let usage = usage();
        let mut behind = Behind::new();
        (0..9).for_each(|expert| behind.push(usage.blob(1, expert)));
        let mut asked = 0;
        let mut none = |_| {
            asked += 1;
            false
        };
        behind.choose(&usage, 0, false, &mut none);
        behind.choose(&usage, 0, false, &mut none);
        assert_eq!(asked, 9);
    }

    #[test]
    fn as_many_are_copied_as_the_link_gets_done() {
        let usage = usage();
        let all = |behind: &mut Behind| (0..64).for_each(|blob| behind.push(blob));
        // A link that gets eleven done.
        let mut behind = Behind::new();
        let mut most = Vec::new();
        for layer in 0..64 {
            all(&mut behind);
            behind.choose(&usage, layer % 4, false, |_| true);
            behind.took(behind.chosen <= 11);
            most.push(behind.prompt);
        }
        assert!(most[8..].iter().all(|&n| (4..=12).contains(&n)), "{most:?}");
        assert!(most[8..].iter().sum::<usize>() > 7 * most[8..].len());
        // Layers with fewer to copy say nothing of more.
        let before = behind.prompt;
        for _ in 0..64 {
            behind.waiting.clear();
            behind.push(1);
            behind.choose(&usage, 0, false, |_| true);
            behind.took(true);
        }
        assert_eq!(behind.prompt, before);
        // No link is so fast that a layer has more than so many.
        for _ in 0..64 {
            all(&mut behind);
            behind.choose(&usage, 0, false, |_| true);
            behind.took(true);
        }
        assert_eq!(behind.prompt, MOST);
    }
}
