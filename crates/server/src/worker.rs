//! The thread that computes.

use engine::generate::Sequences;

use crate::batch::Batch;
use crate::state::State;

/// Answers requests until there will be none. `begun` are sequences that are there already, and their tokens.
pub fn work<S: Sequences>(sequences: S, begun: Vec<(S::Id, Vec<u32>)>, state: &State) {
    let mut batch = Batch::new(sequences, begun, state);
    loop {
        while batch.has_place() {
            let job = if batch.is_idle() {
                match state.queue.take() {
                    Some(job) => job,
                    None => return,
                }
            } else {
                match state.queue.try_take() {
                    Some(job) => job,
                    None => break,
                }
            };
            batch.add(job);
        }
        batch.go_on();
    }
}
