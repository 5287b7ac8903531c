//! A chunk of tokens through the layers.
//!
//! ```text
//! ids -> embedding -> for each layer: norm -> q, k, v -> rope -> append to KV -> attention over blocks
//!     -> output projection -> add -> norm -> gated feed-forward -> add -> ... -> norm -> logits
//! ```

use crate::backend::Backend;
use crate::error::Error;
use crate::kv::Cache;
use crate::model::{Config, Layer, Model};
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
    /// Values of all of it.
    values: usize,
}

/// What is rotated before it is stored in few bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Rotation {
    /// Q and K.
    pub(super) k: bool,
    /// V, and attention's output back.
    pub(super) v: bool,
}

impl<B: Backend> Work<B> {
    pub(super) fn new(backend: &B, ubatch: usize) -> Result<Self, Error> {
        let c = backend.model().config();
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
                gate: array(ubatch * c.ff)?,
                up: array(ubatch * c.ff)?,
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
    /// their outputs in `x`.
    pub(super) fn forward(
        &mut self,
        backend: &mut B,
        model: &Model,
        cache: &mut Cache<B>,
        rotation: Rotation,
        tokens: &[u32],
    ) {
        let t = tokens.len();
        backend.begin(cache.n(), t);
        backend.embed(tokens, &mut self.x);
        for (i, layer) in model.layers.iter().enumerate() {
            self.attention(backend, model.config(), layer, i, cache, rotation, t);
            let norm = layer.post_attn_norm.as_ref();
            backend.add(&self.delta, norm, t, &mut self.normed, &mut self.x);
            self.feed_forward(backend, layer, t);
            let norm = layer.post_ffn_norm.as_ref();
            backend.add(&self.delta, norm, t, &mut self.normed, &mut self.x);
        }
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "all that a layer's attention is made of"
    )]
    fn attention(
        &mut self,
        backend: &mut B,
        c: &Config,
        layer: &Layer,
        i: usize,
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
            attended,
            delta,
            ..
        } = self;
        backend.norm(x, &layer.attn_norm, t, normed);
        let outputs = [
            (&layer.q, &mut *q),
            (&layer.k, &mut *k),
            (&layer.v, &mut *v),
        ];
        backend.project(normed, t, outputs);
        backend.turn(layer, c.window_of(i).is_some(), t, q, k);
        if rotation.k {
            backend.rotate(c.head_k, t, c.heads * c.head_k, q);
            backend.rotate(c.head_k, t, c.heads_kv * c.head_k, k);
        }
        if rotation.v {
            backend.rotate(c.head_v, t, c.heads_kv * c.head_v, v);
        }
        cache.append(backend, i, t, k, v);
        cache.attend(backend, i, t, q, attended);
        if rotation.v {
            backend.rotate(c.head_v, t, c.heads * c.head_v, attended);
        }
        backend.project(attended, t, [(&layer.output, delta)]);
    }

    fn feed_forward(&mut self, backend: &mut B, layer: &Layer, t: usize) {
        let Self {
            x,
            normed,
            gate,
            up,
            delta,
            ..
        } = self;
        backend.norm(x, &layer.ffn_norm, t, normed);
        let outputs = [(&layer.gate, &mut *gate), (&layer.up, &mut *up)];
        backend.project(normed, t, outputs);
        backend.gate(t, gate, up);
        backend.down(&layer.down, gate, t, delta);
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
