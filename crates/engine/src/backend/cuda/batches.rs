//! Who waits for whom at the staging ring: a stream that copies to its slots, and one that computes with them.
//!
//! A batch of copies waits for all work that was given before it, and work that reads a slot for the batch that fills it. Waits are given
//! once: a stream that waited for a batch is past all batches before it.

/// Batches of copies, counted.
#[derive(Debug, Default)]
pub(crate) struct Batches {
    /// Those that were begun.
    begun: u64,
    /// The first slot of the last one, if it goes on.
    open: Option<usize>,
    /// Whether the next one waits for what computes.
    is_read: bool,
    /// The last one that was waited for.
    awaited: u64,
    /// Which batch fills each slot, and the first slot of that.
    by: Vec<(u64, usize)>,
}

impl Batches {
    /// There are so many slots, all new.
    pub(crate) fn resize(&mut self, slots: usize) {
        self.open = None;
        self.by.clear();
        self.by.resize(slots, (0, 0));
    }

    /// So many slots from `first` on are to be filled. Copies wait, before that, until nobody reads any more what a batch replaces, if one begins here: it is
    /// known by the slot that is returned.
    pub(crate) fn fill(&mut self, first: usize, slots: usize) -> Option<usize> {
        let mut waits = false;
        let begins = *self.open.get_or_insert_with(|| {
            self.begun += 1;
            waits = std::mem::take(&mut self.is_read);
            first
        });
        self.by[first..first + slots].fill((self.begun, begins));
        waits.then_some(first)
    }

    /// What is given to compute with from here on reads slots. It waits, if it has not yet, for a batch, which is known by its first slot; and that ends
    /// before, if it was open (the first of the two).
    pub(crate) fn await_filled(&mut self, slots: &[usize]) -> Option<(Option<usize>, usize)> {
        let last = slots.iter().map(|&slot| self.by[slot]).max();
        let (batch, begins) = last.filter(|by| by.0 > self.awaited)?;
        self.awaited = batch;
        let is_last = batch == self.begun;
        Some((self.open.take_if(|_| is_last), begins))
    }

    /// What is filled from here on waits for all that was given to compute with until then. Returns the batch that ends, if one does.
    pub(crate) fn begin(&mut self) -> Option<usize> {
        self.is_read = true;
        self.open.take()
    }

    /// All that was copied is there for what computes, and was read.
    pub(crate) fn catch_up(&mut self) {
        (self.open, self.awaited, self.is_read) = (None, self.begun, true);
    }
}
