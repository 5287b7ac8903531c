//! What a layer does with its cells: it stores new ones, and attends all.

use super::sequence::Sequence;
use super::stage::Copying;
use super::store::Id;
use super::together::{Part, attending};
use super::{Cache, LayerAt, Lies, Reached};
use crate::backend::{At, Backend, CELLS, GROUP, Placed, Step, Turn};

impl<B: Backend> Cache<B> {
    /// Turns the tokens' queries `q` `[T, H, C]` and stores their cells of a layer, made of `k` `[T, K, C]` and `v` `[T, K, C]`, which need
    /// not hold anything of use afterwards.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub(crate) fn turn_and_append(
        &mut self,
        backend: &mut B,
        layer: usize,
        tokens: usize,
        turn: &Turn<'_>,
        q: &mut B::Array,
        k: &mut B::Array,
        v: &mut B::Array,
    ) {
        if tokens == self.work.len() {
            let (shape, LayerAt { at, .. }) = (self.shape, self.layers[layer].clone());
            let Self {
                work,
                sequences,
                layers,
                full,
                ring,
                ..
            } = self;
            let is_windowed = layers[layer].windowed;
            let written = |part: &Part| written(&sequences[..], part, is_windowed, 0);
            let ids: Vec<Id> = work.iter().map(written).collect();
            let store = if is_windowed { ring } else { full };
            let slabs = store.device_each_mut(&ids).into_iter();
            let tokens = work.iter().zip(slabs).map(|(part, slab)| {
                let attending = attending(part, layer, None, &shape, &at);
                (attending, slab, part.position / CELLS)
            });
            return backend.turn_and_append(turn, tokens.collect(), q, k, v);
        }
        backend.turn(turn, tokens, q, k, v);
        self.append(backend, layer, k, v);
    }

    /// Stores the tokens' cells of a layer: `k` `[T, K, C]`, `v` `[T, K, C]`.
    pub(crate) fn append(&mut self, backend: &mut B, layer: usize, k: &B::Array, v: &B::Array) {
        let (shape, LayerAt { at, .. }) = (self.shape, self.layers[layer].clone());
        for part in 0..self.work.len() {
            let attending = attending(&self.work[part], layer, None, &shape, &at);
            let first = attending.position / CELLS;
            let end = (attending.position + attending.tokens).div_ceil(CELLS);
            let is_windowed = self.layers[layer].windowed;
            let written = |behind| written(&self.sequences, &self.work[part], is_windowed, behind);
            let ids: Vec<Id> = (0..end - first).map(written).collect();
            let store = if is_windowed {
                &mut self.ring
            } else {
                &mut self.full
            };
            let mut slabs = store.device_each_mut(&ids);
            backend.append(&attending, &mut slabs, first, k, v);
        }
    }

    /// Attends the tokens' queries `q` `[T, H, C]` over all cells of a layer.
    pub(crate) fn attend(
        &mut self,
        backend: &mut B,
        layer: usize,
        q: &B::Array,
        out: &mut B::Array,
    ) {
        let is_lone = |part: &Part| self.is_lone(part, layer);
        let lone = self.work.iter().filter(|part| is_lone(part)).count();
        if lone < 2 {
            for part in 0..self.work.len() {
                self.attend_part(backend, part, layer, false, q, out);
            }
            return;
        }
        for part in 0..self.work.len() {
            if !self.is_lone(&self.work[part], layer) {
                self.attend_part(backend, part, layer, false, q, out);
            }
        }
        self.attend_lone(backend, layer, q, out);
    }

    /// The same of the step's last token alone, a prompt's, whose query is the first row.
    pub(crate) fn attend_last(
        &mut self,
        backend: &mut B,
        layer: usize,
        q: &B::Array,
        out: &mut B::Array,
    ) {
        self.attend_part(backend, 0, layer, true, q, out);
    }

    /// Whether all that the step attends is in device memory.
    pub(crate) fn is_all_there(&self) -> bool {
        self.full_spans.iter().all(|span| span.lies == Lies::Device)
    }

    /// Whether a part of the step is one token, whose cells of a layer are all in device memory.
    fn is_lone(&self, part: &Part, layer: usize) -> bool {
        let is_there = |span: &Reached| span.lies == Lies::Device;
        part.taking.tokens == 1
            && (self.layers[layer].windowed
                || self.full_spans[part.full.clone()].iter().all(is_there))
    }

    /// Attends those at once.
    fn attend_lone(&self, backend: &mut B, layer: usize, q: &B::Array, out: &mut B::Array) {
        let LayerAt { windowed, at, .. } = &self.layers[layer];
        let (store, all, window) = if *windowed {
            (&self.ring, &self.ring_spans, self.window)
        } else {
            (&self.full, &self.full_spans, None)
        };
        let placed = |part: &Part| -> Vec<Placed<'_, B>> {
            let range = if *windowed { &part.ring } else { &part.full };
            let spans = all[range.clone()].iter();
            let placed = spans.map(|span| Placed {
                index: span.block,
                cells: span.cells,
                at: At::Device(store.device(span.id).expect("in device memory")),
            });
            placed.collect()
        };
        let lone = self.work.iter().filter(|part| self.is_lone(part, layer));
        let lone: Vec<_> = lone
            .map(|part| {
                let attending = attending(part, layer, window, &self.shape, at);
                (attending, placed(part))
            })
            .collect();
        backend.attend_each(&lone, q, out);
    }

    fn attend_part(
        &mut self,
        backend: &mut B,
        part: usize,
        layer: usize,
        is_last_alone: bool,
        q: &B::Array,
        out: &mut B::Array,
    ) {
        let LayerAt {
            windowed,
            index,
            at,
        } = &self.layers[layer];
        let part = &self.work[part];
        let window = if *windowed { self.window } else { None };
        let mut attending = attending(part, layer, window, &self.shape, at);
        if is_last_alone {
            attending.position += attending.tokens - 1;
            (attending.row, attending.tokens) = (0, 1);
        }
        let (store, spans) = if *windowed {
            (&self.ring, &self.ring_spans[part.ring.clone()])
        } else {
            (&self.full, &self.full_spans[part.full.clone()])
        };
        let by_cpu = if *windowed {
            0
        } else {
            self.cpu_groups[*index]
        };
        let is_streamed = |span: &Reached| match span.lies {
            Lies::Device => false,
            Lies::Host(_) => span.block / GROUP >= by_cpu,
        };
        // Where the slots do not hold all that is streamed, what is there is attended first, if that may be.
        let (at_once, is_all) = self.stage.at_once(*index);
        let streamed_last = attending.generated && B::STREAMED_LAST && !is_all;
        let passes: &[Option<bool>] = if streamed_last {
            &[Some(false), Some(true)]
        } else {
            &[None]
        };
        let layers = &self.full_layers;
        let mut placed: Vec<Placed<'_, B>> = Vec::with_capacity(spans.len());
        let mut held: Vec<usize> = Vec::new();
        let mut is_first = true;
        let mut streamed = None;
        for &pass in passes {
            let of_pass =
                |span: &&Reached| pass.is_none_or(|streamed| is_streamed(span) == streamed);
            for span in spans.iter().filter(of_pass) {
                let at = match span.lies {
                    Lies::Device => {
                        At::Device(store.device(span.id).expect("planned as in device memory"))
                    }
                    Lies::Host(_) if !is_streamed(span) => {
                        At::Host(store.host(span.id).expect("planned as in host memory"))
                    }
                    Lies::Host(n) => {
                        if streamed != Some(n) {
                            let rest_is_streamed = streamed_last && streamed.is_none();
                            if held.len() == at_once || (rest_is_streamed && !placed.is_empty()) {
                                let step = Step {
                                    first: is_first,
                                    last: false,
                                };
                                backend.attend(&attending, q, &placed, step, out);
                                placed.clear();
                                is_first = false;
                                self.stage.give_back(
                                    &mut Copying::new(backend, store, layers),
                                    &mut held,
                                );
                            }
                            let slot = self.stage.take(
                                &mut Copying::new(backend, store, layers),
                                *index,
                                n,
                            );
                            held.push(slot);
                            streamed = Some(n);
                        }
                        At::Staged(*held.last().expect("just taken"))
                    }
                };
                placed.push(Placed {
                    index: span.block,
                    cells: span.cells,
                    at,
                });
            }
        }
        let step = Step {
            first: is_first,
            last: true,
        };
        backend.attend(&attending, q, &placed, step, out);
        if !held.is_empty() {
            self.stage
                .give_back(&mut Copying::new(backend, store, layers), &mut held);
        }
    }
}

/// The number of the slab that a part of the step writes, so many blocks behind its first.
fn written(sequences: &[Option<Sequence>], part: &Part, windowed: bool, behind: usize) -> Id {
    let sequence = sequences[part.taking.sequence].as_ref();
    let sequence = sequence.expect("the one in work exists");
    let track = if windowed {
        &sequence.ring
    } else {
        &sequence.full
    };
    let block = part.position / CELLS + behind;
    track.get(block).expect("reserved")
}
