//! Experts that the CPU computed and that are to be copied to the cache while the link has nothing more urgent.
//!
//! What the CPU computes does not come to the device by itself, so a cache that has room would fill with the streamed ones alone, and the next
//! prompt would miss the others again. They wait here until there is time: behind each layer's streamed experts so many are copied as the link
//! gets done before the next layer needs it, which is found by trying. Layers that are next come first: by then they are there.

use super::Copied;
use super::usage::{Blob, Usage};
use std::collections::BTreeSet;

/// Copies behind a layer of a prompt: to begin with and at least, and at most.
const LEAST: usize = 4;
const MOST: usize = 32;

/// What one more try adds, once some did not get done in time; twice as many are tried before.
const MORE: usize = 2;

/// Copies behind a prompt's layer for which the host works, so that they hold the next layer up, while the cache has room. They are worth it from the second
/// prompt on that finds them there: all of them at once would make the first one as slow as without the CPU's share, while so many, or half of what the CPU computes of
/// a layer if that is more, fill the cache in two.
const BY_HOST: usize = 16;

/// Copies behind a generated token's layer, at most: what they take delays the next one, which reads over the same link.
const GENERATED: usize = 4;

/// What waits, and how many are copied at a time.
#[derive(Clone, Debug)]
pub(super) struct Behind {
    waiting: BTreeSet<Blob>,
    prompt: usize,
    /// Whether some did not get done in time.
    is_tried: bool,
    is_by_host: bool,
    /// Copies that were chosen last.
    chosen: usize,
}

impl Behind {
    pub(super) fn new() -> Self {
        Self {
            waiting: BTreeSet::new(),
            prompt: LEAST,
            is_tried: false,
            is_by_host: false,
            chosen: 0,
        }
    }

    /// Has an expert wait.
    pub(super) fn push(&mut self, blob: Blob) {
        self.waiting.insert(blob);
    }

    /// Takes those whose turn it is behind a layer: `take` says whether one is copied. What is not worth it waits no longer. `by_cpu`: experts of the layer that the CPU
    /// computes, if the cache has room for more.
    pub(super) fn choose(
        &mut self,
        usage: &Usage,
        layer: usize,
        generated: bool,
        by_cpu: Option<usize>,
        mut take: impl FnMut(Blob) -> bool,
    ) {
        let layers = usage.layers().len();
        let of_prompt = match (self.is_by_host, by_cpu) {
            (false, _) => self.prompt,
            (true, Some(n)) => n.div_ceil(2).max(BY_HOST),
            (true, None) => LEAST,
        };
        // A token's neighbours use what it used, so what was missing just now comes first; a prompt goes on to layers that have not been.
        let (most, from) = match generated {
            true => (GENERATED, (layer + layers - 1) % layers),
            false => (of_prompt, (layer + 1) % layers),
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

    /// Tells what became of the copies behind a prompt's layer.
    pub(super) fn took(&mut self, copied: Copied) {
        self.is_by_host = copied == Copied::ByHost;
        let more = if self.is_tried { MORE } else { self.prompt };
        match copied {
            Copied::ByHost => {}
            Copied::Late => {
                self.is_tried = true;
                self.prompt = (self.prompt / 2).max(LEAST);
            }
            Copied::InTime if self.chosen >= self.prompt => {
                self.prompt = (self.prompt + more).min(MOST);
            }
            Copied::InTime => {}
        }
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
        behind.choose(&usage, layer, generated, None, |blob| {
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
        behind.choose(&usage, 0, false, None, &mut none);
        behind.choose(&usage, 0, false, None, &mut none);
        assert_eq!(asked, 9);
    }

    fn in_time(is_in_time: bool) -> Copied {
        match is_in_time {
            true => Copied::InTime,
            false => Copied::Late,
        }
    }

    #[test]
    fn what_the_host_copies_fills_a_cache_and_changes_few() {
        let usage = usage();
        let mut behind = Behind::new();
        behind.took(Copied::ByHost);
        for (by_cpu, expected) in [
            (Some(0), BY_HOST),
            (None, LEAST),
            (Some(2 * BY_HOST), BY_HOST),
            (Some(51), 26),
        ] {
            (0..64).for_each(|blob| behind.push(blob));
            behind.choose(&usage, 0, false, by_cpu, |_| true);
            assert_eq!(behind.chosen, expected);
        }
        behind.took(Copied::Late);
        behind.choose(&usage, 0, false, None, |_| true);
        assert_eq!(behind.chosen, LEAST);
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
            behind.choose(&usage, layer % 4, false, None, |_| true);
            behind.took(in_time(behind.chosen <= 11));
            most.push(behind.prompt);
        }
        assert!(most[8..].iter().all(|&n| (4..=12).contains(&n)), "{most:?}");
        assert!(most[8..].iter().sum::<usize>() > 7 * most[8..].len());
        // Layers with fewer to copy say nothing of more.
        let before = behind.prompt;
        for _ in 0..64 {
            behind.waiting.clear();
            behind.push(1);
            behind.choose(&usage, 0, false, None, |_| true);
            behind.took(Copied::InTime);
        }
        assert_eq!(behind.prompt, before);
        // No link is so fast that a layer has more than so many.
        for _ in 0..64 {
            all(&mut behind);
            behind.choose(&usage, 0, false, None, |_| true);
            behind.took(Copied::InTime);
        }
        assert_eq!(behind.prompt, MOST);
    }
}
