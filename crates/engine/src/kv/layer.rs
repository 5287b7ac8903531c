//! What a layer does with its cells: it stores new ones, and attends all.

use super::{Cache, LayerAt, Lies, Reached};
use crate::backend::{At, Attending, Backend, CELLS, GROUP, KvShape, Placed, Step, Turn};
use std::ops::Range;

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
        if tokens == 1 {
            let (shape, LayerAt { at, .. }) = (self.shape, self.layers[layer].clone());
            let attending = self.appending(layer, 1, &shape, &at);
            let block = self.n() / CELLS;
            let slab = self.writable(layer, block);
            return backend.turn_and_append(turn, &attending, slab, block, q, k, v);
        }
        backend.turn(turn, tokens, q, k, v);
        self.append(backend, layer, tokens, k, v);
    }

    /// Stores the tokens' cells of a layer: `k` `[T, K, C]`, `v` `[T, K, C]`.
    pub(crate) fn append(
        &mut self,
        backend: &mut B,
        layer: usize,
        tokens: usize,
        k: &B::Array,
        v: &B::Array,
    ) {
        let (n, shape, LayerAt { at, .. }) = (self.n(), self.shape, self.layers[layer].clone());
        let attending = self.appending(layer, tokens, &shape, &at);
        let mut done = 0;
        while done < tokens {
            let cell = n + done;
            let count = (CELLS - cell % CELLS).min(tokens - done);
            let slab = self.writable(layer, cell / CELLS);
            backend.append(&attending, slab, cell / CELLS, done..done + count, k, v);
            done += count;
        }
    }

    fn appending<'a>(
        &self,
        layer: usize,
        tokens: usize,
        shape: &'a KvShape,
        at: &'a Range<usize>,
    ) -> Attending<'a> {
        Attending {
            shape,
            at,
            window: None,
            position: self.n(),
            tokens,
            generated: self.generated,
            layer,
        }
    }

    /// The slab that a layer's part of a block is written to.
    fn writable(&mut self, layer: usize, block: usize) -> &mut B::Slab {
        let windowed = self.layers[layer].windowed;
        let (sequence, full, ring) = self.parts();
        let (store, track) = if windowed {
            (ring, &sequence.ring)
        } else {
            (full, &sequence.full)
        };
        store.device_mut(track.get(block).expect("reserved"))
    }

    /// Attends the tokens' queries `q` `[T, H, C]` over all cells of a layer.
    pub(crate) fn attend(
        &mut self,
        backend: &mut B,
        layer: usize,
        tokens: usize,
        q: &B::Array,
        out: &mut B::Array,
    ) {
        let LayerAt {
            windowed,
            index,
            at,
        } = &self.layers[layer];
        let attending = Attending {
            shape: &self.shape,
            at,
            window: if *windowed { self.window } else { None },
            position: self.sequences[self.current].as_ref().map_or(0, |s| s.n),
            tokens,
            generated: self.generated,
            layer,
        };
        let (store, spans) = if *windowed {
            (&self.ring, &self.ring_spans)
        } else {
            (&self.full, &self.full_spans)
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
        let streamed_last = self.generated && B::STREAMED_LAST && !is_all;
        let passes: &[Option<bool>] = if streamed_last {
            &[Some(false), Some(true)]
        } else {
            &[None]
        };
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
                                self.stage
                                    .give_back(backend, store, &self.full_layers, &mut held);
                            }
                            let slot =
                                self.stage
                                    .take(backend, store, &self.full_layers, *index, n);
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
                .give_back(backend, store, &self.full_layers, &mut held);
        }
    }
}
