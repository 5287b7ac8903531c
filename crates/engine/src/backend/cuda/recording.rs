//! Steps of generated tokens, recorded and done again.
//!
//! A generated token takes some hundred launches, one of each of eight sequences twice a thousand. The second such step over the same blocks is
//! recorded as a graph, the ones after it are that graph: all that differs between them lies in memory, which the graph's work reads (tokens,
//! positions, angles). Where blocks change, every 256 tokens of a sequence, one step is done without it, and sets the lists of blocks that the
//! graph goes on with. There is a graph for each number of sequences. With cells in host memory a step of one sequence is several graphs, between
//! which streams wait for each other, and others whenever blocks change ([`tape`](super::tape)); it is the third step that is recorded then, for only that
//! one waits for the batches of copies that all later ones wait for.
//!
//! A token whose layers ask the host about placed experts is recorded whether or not there will be others like it: it is given in one call before anybody answers.

use super::Cuda;
use super::tape::Recorded;
use crate::backend::Again;
use cuda::Event;
use cuda::stream::Timing;
use std::ops::Range;
use std::time::{Duration, Instant};

/// A recorded step whose time is asked for (`-vv`): marks around its work on the device, when it was given, and how long that took.
#[derive(Debug)]
pub(super) struct Timed {
    marks: [Event; 2],
    given: Instant,
    giving: Duration,
}

impl Timed {
    /// Says how long the step took, which has ended.
    pub(super) fn tell(self) {
        let device_ms = self.marks[1].elapsed_ms(&self.marks[0]).ok();
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let (all_ms, giving_ms) = (ms(self.given.elapsed()), ms(self.giving));
        tracing::debug!(target: "step", ?device_ms, all_ms, giving_ms);
    }
}

impl Cuda<'_> {
    /// Whether steps of one token of each of so many sequences can be recorded: each has lists of its own, and the host has nothing to
    /// decide meanwhile.
    pub(super) fn records(&self, sequences: usize) -> bool {
        !self.is_poor
            && sequences <= self.attends.sequences()
            && (sequences == 1 || self.mixtures.is_none())
    }

    /// Does a step of generated tokens as it is recorded, or records it.
    pub(super) fn replay(
        &mut self,
        positions: &[Range<usize>],
        tokens: &[u32],
        again: Again,
        mut step: impl FnMut(&mut Self),
    ) {
        let n = tokens.len();
        self.run(|b| {
            if n > 1 {
                b.upload_chunk(positions, tokens)?;
            }
            if b.resident.len() <= n {
                b.resident.resize_with(n + 1, || None);
            }
            let is_spilled = again == Again::Spilled;
            let known = match again {
                _ if b.listed != n => None,
                Again::No | Again::Anew => None,
                Again::Resident => b.resident[n].take(),
                Again::Spilled => b.spilled.take(),
            };
            let (mut recorded, is_lasting) = match known {
                Some(recorded) => (recorded, true),
                None => match b.recorded(n, &mut step) {
                    Err(error) if error.is_out_of_memory() => {
                        tracing::warn!(
                            "{error}: steps are given launch by launch, which is slower"
                        );
                        b.is_poor = true;
                        b.attends.ring.catch_up()?;
                        b.attends.forget_lists();
                        step(b);
                        return Ok(());
                    }
                    recorded => recorded?,
                },
            };
            if n == 1 {
                b.write_step(positions[0].start, tokens[0])?;
                b.begin_experts(positions[0].start, 1)?;
            }
            let mark = || Event::new(b.stream.device(), Timing::On);
            let is_timed = tracing::enabled!(target: "step", tracing::Level::DEBUG);
            let marks = is_timed.then(|| Ok::<_, cuda::Error>([mark()?, mark()?]));
            let marks = marks.transpose()?;
            let given = Instant::now();
            if let Some([first, _]) = &marks {
                b.stream.record(first)?;
            }
            b.attends
                .repeat(&b.stream, &mut recorded, positions[0].start)?;
            let giving = given.elapsed();
            let once = if !is_lasting {
                Some(recorded)
            } else if is_spilled {
                b.spilled.replace(recorded)
            } else {
                b.resident[n].replace(recorded)
            };
            b.listed = n;
            // The driver is not called before.
            b.answer_mixtures()?;
            drop(once);
            if let Some(marks) = marks {
                b.stream.record(&marks[1])?;
                b.timed = Some(Timed {
                    marks,
                    given,
                    giving,
                });
            }
            Ok(())
        });
    }

    /// Records a step of generated tokens. Says whether it can be done more than once.
    fn recorded(
        &mut self,
        n: usize,
        step: impl FnOnce(&mut Self),
    ) -> Result<(Recorded, bool), cuda::Error> {
        self.attends.begin_recording(&self.stream)?;
        self.is_uploaded = n > 1;
        self.set_recording(true);
        step(self);
        self.set_recording(false);
        self.is_uploaded = false;
        let recorded = self.attends.end_recording();
        self.failed.take().map_or(recorded, Err)
    }
}
