//! A chunk of tokens through the layers.
//!
//! ```text
//! ids -> embedding -> for each layer: norm -> q, k, v -> rope -> append to KV -> attention over blocks
//!     -> output projection -> add -> norm -> gated feed-forward, or router -> experts -> add -> ... -> norm -> logits
//! ```

use crate::backend::{Added, Backend, Rotation, Turn};
use crate::error::Error;
use crate::kv::Cache;
use crate::model::{Config, FeedForward, Layer, Model};
use std::ops::Range;

/// What goes from operation to operation, for up to a ubatch of tokens.
#[derive(Debug)]
pub(super) struct Work<B: Backend> {
    /// Residual stream `[T, D]`.
    x: B::Array,
    /// Normed input of the products `[T, D]`.
    normed: B::Array,
    /// Output of a layer's half before it is added `[T, D]`, and of a second pass over its activations.
    delta: B::Array,
    /// `[T, H, C]`.
    q: B::Array,
    /// `[T, K, C]`.
    k: B::Array,
    /// `[T, K, C]`.
    v: B::Array,
    /// Attention's output `[T, H, C]`.
    attended: B::Array,
    /// `[T, F]`.
    gate: B::Array,
    /// `[T, F]`.
    up: B::Array,
    /// Of experts `[T, E]`, where there are any.
    scores: Option<B::Array>,
    /// Values of all of it.
    values: usize,
}

/// Whose outputs are wanted of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tokens {
    All,
    Last,
    None,
}

impl<B: Backend> Work<B> {
    pub(super) fn new(backend: &B, ubatch: usize) -> Result<Self, Error> {
        let c = backend.model().config();
        let ff = c.common_ff();
        let mut values = 0;
        let mut array = |len: usize| {
            values += len;
            backend.array(len)
        };
        let mut make = || {
            Ok(Self {
                x: array(ubatch * c.width)?,
                normed: array(ubatch * c.width)?,
                delta: array(2 * ubatch * c.width)?,
                q: array(ubatch * c.heads * c.head_k)?,
                k: array(ubatch * c.heads_kv * c.head_k)?,
                v: array(ubatch * c.heads_kv * c.head_v)?,
                attended: array(ubatch * c.heads * c.head_v)?,
                gate: array(ubatch * ff)?,
                up: array(ubatch * ff)?,
                scores: match &c.experts {
                    Some(experts) => Some(array(ubatch * experts.routing.experts)?),
                    None => None,
                },
                values: 0,
            })
        };
        let work: Result<Self, Error> = make();
        let mut work = work?;
        work.values = values;
        Ok(work)
    }

    /// Bytes of all of it.
    pub(super) fn bytes(&self) -> u64 {
        (self.values * size_of::<f32>()) as u64
    }

    /// Runs `tokens` through all layers; their cells are in the cache afterwards, which has room for them and is still to be advanced,
    /// their outputs in `x`. Returns the row of the last one's: of tokens whose outputs are not wanted the last layer makes cells alone, where that
    /// disturbs nothing that is told of all tokens (experts) or of all cells (those that are streamed).
    pub(super) fn forward(
        &mut self,
        backend: &mut B,
        model: &Model,
        cache: &mut Cache<B>,
        rotation: Rotation,
        tokens: &[u32],
        wanted: Tokens,
    ) -> usize {
        let t = tokens.len();
        backend.begin(cache.positions(), tokens, &mut self.x);
        // What each half gives is added on the way into the next.
        let (mut before, mut rows) = (None, t);
        for (i, layer) in model.layers.iter().enumerate() {
            let is_last = i + 1 == model.layers.len();
            let is_cut = is_last
                && t > 1
                && wanted != Tokens::All
                && matches!(layer.ffn, FeedForward::Dense(_))
                && cache.is_all_there();
            self.cells(
                backend,
                model.config(),
                i,
                layer,
                before,
                cache,
                rotation,
                t,
            );
            if is_cut && wanted == Tokens::None {
                return 0;
            }
            if is_cut {
                backend.keep_last(t, &mut self.x, &mut self.q);
                cache.attend_last(backend, i, &self.q, &mut self.attended);
                rows = 1;
            } else {
                cache.attend(backend, i, &self.q, &mut self.attended);
            }
            let (attended, delta) = (&mut self.attended, &mut self.delta);
            backend.leave(&layer.output, rotation.v, rows, attended, delta);
            self.feed_forward(backend, layer, rows);
            before = Some(layer);
        }
        if let Some(layer) = before {
            let added = Added {
                delta: &self.delta,
                norm: layer.post_ffn_norm.as_ref(),
            };
            backend.add(added, rows, &mut self.x, &mut self.normed);
        }
        rows - 1
    }

    /// Queries of a layer, and its cells.
    #[allow(
        clippy::too_many_arguments,
        reason = "all that a layer's attention is made of"
    )]
    fn cells(
        &mut self,
        backend: &mut B,
        c: &Config,
        i: usize,
        layer: &Layer,
        before: Option<&Layer>,
        cache: &mut Cache<B>,
        rotation: Rotation,
        t: usize,
    ) {
        let Self {
            x,
            normed,
            q,
            k,
            v,
            delta,
            ..
        } = self;
        let added = before.map(|layer| Added {
            delta,
            norm: layer.post_ffn_norm.as_ref(),
        });
        let outputs = [
            (&layer.q, &mut *q),
            (&layer.k, &mut *k),
            (&layer.v, &mut *v),
        ];
        backend.enter(added, &layer.attn_norm, t, x, normed, outputs);
        let turn = Turn {
            layer,
            windowed: c.window_of(i).is_some(),
            rotation,
        };
        cache.turn_and_append(backend, i, t, &turn, q, k, v);
    }

    fn feed_forward(&mut self, backend: &mut B, layer: &Layer, t: usize) {
        let Self {
            x,
            normed,
            gate,
            up,
            scores,
            delta,
            ..
        } = self;
        let added = Some(Added {
            delta,
            norm: layer.post_attn_norm.as_ref(),
        });
        let norm = &layer.ffn_norm;
        match &layer.ffn {
            FeedForward::Dense(dense) => {
                let outputs = [(&dense.gate, &mut *gate), (&dense.up, &mut *up)];
                backend.enter(added, norm, t, x, normed, outputs);
                backend.down(&dense.down, t, gate, up, delta);
            }
            FeedForward::Mixture(mixture) => {
                let scores = scores.as_mut().expect("there is room for scores");
                backend.enter_mixture(added, norm, mixture, t, x, normed, scores);
                backend.mix(mixture, t, scores, normed, gate, up, delta);
            }
        }
    }

    /// Computes the logits of the first `n` tokens of the last chunk.
    pub(super) fn compute_logits(&self, backend: &mut B, n: usize) {
        backend.compute_logits(&self.x, 0..n);
    }

    /// The same where only the largest of the first `of` is looked at.
    pub(super) fn compute_largest(&self, backend: &mut B, n: usize, of: usize) {
        backend.compute_largest(&self.x, 0..n, of);
    }

    /// What the last norm gives for the last chunk's `rows`, at the end of `values`.
    pub(super) fn outputs(
        &self,
        backend: &mut B,
        rows: Range<usize>,
        values: &mut Vec<f32>,
    ) -> Result<(), Error> {
        backend.outputs(&self.x, rows, values)?;
        backend.finish()
    }

    /// Logits `[n, V]` of some rows of the last chunk, at most [`LOGIT_ROWS`](crate::backend::LOGIT_ROWS).
    pub(super) fn logits<'b>(
        &self,
        backend: &'b mut B,
        rows: Range<usize>,
    ) -> Result<&'b [f32], Error> {
        let n = rows.len();
        backend.compute_logits(&self.x, rows);
        backend.finish()?;
        Ok(backend.logits(n))
    }
}
