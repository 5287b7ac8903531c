//! A chunk of tokens through the layers.
//!
//! ```text
//! ids -> embedding -> for each layer: norm -> q, k, v -> rope -> append to KV -> attention over blocks
//!     -> output projection -> add -> norm -> gated feed-forward -> add -> ... -> norm -> logits
//! ```

use super::kv::Cache;
use crate::error::Error;
use crate::model::rope::Frequencies;
use crate::model::{Config, Layer, Linear, Model};
use cpu::acts::Acts;
use cpu::attention::{Params, Partials, attend};
use cpu::mem::Buffer;
use cpu::ops;
use cpu::product::{Operand, Task, products};
use gguf::TensorType;
use quant::act::{BLOCK32, BLOCK256, Passes};
use quant::product::act_block;

/// Tokens whose logits are computed at a time: with what their codes lose just enough for AMX's tiles, few enough for a
/// large vocabulary.
pub(super) const LOGIT_ROWS: usize = 8;

/// Work space for up to a ubatch of tokens.
#[derive(Debug)]
pub(super) struct Work {
    /// Residual stream `[T, D]`.
    x: Buffer<f32>,
    /// Normed input of the products `[T, D]`.
    normed: Buffer<f32>,
    /// Output of a layer's half before it is added `[T, D]`, and of a second pass over its activations.
    delta: Buffer<f32>,
    /// `[T, H, C]`.
    q: Buffer<f32>,
    /// `[T, K, C]`.
    k: Buffer<f32>,
    /// `[T, K, C]`.
    v: Buffer<f32>,
    /// Attention's output `[T, H, C]`.
    attended: Buffer<f32>,
    /// `[T, F]`.
    gate: Buffer<f32>,
    /// `[T, F]`.
    up: Buffer<f32>,
    acts32: Acts,
    acts256: Acts,
    /// Cosines and sines of the chunk's positions, for layers without and with a window.
    angles: [Angles; 2],
    partials: Partials,
    /// Normed outputs of the last layer `[LOGIT_ROWS, D]`.
    last: Buffer<f32>,
    /// `[2 * LOGIT_ROWS or fewer, V]`.
    pub(super) logits: Buffer<f32>,
}

#[derive(Debug)]
struct Angles {
    cos: Buffer<f32>,
    sin: Buffer<f32>,
    pairs: usize,
}

impl Angles {
    fn new(frequencies: &Frequencies, tokens: usize) -> Result<Self, cpu::mem::OutOfMemory> {
        let pairs = frequencies.pairs();
        Ok(Self {
            cos: Buffer::new(tokens * pairs)?,
            sin: Buffer::new(tokens * pairs)?,
            pairs,
        })
    }

    fn fill(&mut self, frequencies: &Frequencies, position: usize, tokens: usize) {
        let n = self.pairs;
        for t in 0..tokens {
            let at = t * n..(t + 1) * n;
            frequencies.at(position + t, &mut self.cos[at.clone()], &mut self.sin[at]);
        }
    }

    fn of(&self, t: usize) -> (&[f32], &[f32]) {
        let at = t * self.pairs..(t + 1) * self.pairs;
        (&self.cos[at.clone()], &self.sin[at])
    }
}

impl Work {
    pub(super) fn new(
        model: &Model,
        cache: &Cache,
        ubatch: usize,
        n_ctx: usize,
    ) -> Result<Self, Error> {
        let c = model.config();
        let memory = |source| Error::Memory {
            what: format!("work space for {ubatch} tokens"),
            source,
        };
        let make = || {
            let (row_q, row_out) = (c.heads * c.head_k, c.heads * c.head_v);
            let widest = c.ff.max(c.width).max(row_out);
            Ok(Self {
                x: Buffer::new(ubatch * c.width)?,
                normed: Buffer::new(ubatch * c.width)?,
                delta: Buffer::new(2 * ubatch * c.width)?,
                q: Buffer::new(ubatch * row_q)?,
                k: Buffer::new(ubatch * c.heads_kv * c.head_k)?,
                v: Buffer::new(ubatch * c.heads_kv * c.head_v)?,
                attended: Buffer::new(ubatch * row_out)?,
                gate: Buffer::new(ubatch * c.ff)?,
                up: Buffer::new(ubatch * c.ff)?,
                acts32: Acts::new(ubatch.max(2 * LOGIT_ROWS), widest)?,
                acts256: Acts::new(2 * ubatch.max(LOGIT_ROWS), widest)?,
                angles: [
                    Angles::new(&model.rope, ubatch)?,
                    Angles::new(&model.rope_windowed, ubatch)?,
                ],
                partials: Partials::new(cache.shape(), c.heads, n_ctx)?,
                last: Buffer::new(LOGIT_ROWS * c.width)?,
                logits: Buffer::new(2 * LOGIT_ROWS.min(ubatch) * c.n_vocab)?,
            })
        };
        make().map_err(memory)
    }

    /// Bytes of all of it.
    pub(super) fn bytes(&self) -> u64 {
        let [plain, windowed] = &self.angles;
        let buffers = [
            &self.x,
            &self.normed,
            &self.delta,
            &self.q,
            &self.k,
            &self.v,
            &self.attended,
            &self.gate,
            &self.up,
            &plain.cos,
            &plain.sin,
            &windowed.cos,
            &windowed.sin,
            &self.last,
            &self.logits,
        ];
        let floats: u64 = buffers.iter().map(|b| size_of_val(&***b) as u64).sum();
        floats + self.acts32.bytes() + self.acts256.bytes() + self.partials.bytes()
    }

    /// Runs `tokens`, whose first is at `position`, through all layers; their cells are in the cache afterwards, their
    /// outputs in `x`.
    pub(super) fn forward(
        &mut self,
        model: &Model,
        cache: &mut Cache,
        position: usize,
        tokens: &[u32],
    ) {
        let (c, t) = (model.config(), tokens.len());
        self.embed(model, tokens);
        self.angles[0].fill(&model.rope, position, t);
        self.angles[1].fill(&model.rope_windowed, position, t);
        for (i, layer) in model.layers.iter().enumerate() {
            self.attention(model, layer, i, cache, position, t);
            self.add_delta(model, layer.post_attn_norm.as_deref(), t);
            self.feed_forward(model, layer, t);
            self.add_delta(model, layer.post_ffn_norm.as_deref(), t);
        }
        debug_assert_eq!(c.n_layer, model.layers.len());
    }

    fn embed(&mut self, model: &Model, tokens: &[u32]) {
        let c = model.config();
        let view = model.embedding.view(&model.weights);
        model
            .pool
            .rows(&mut self.x[..tokens.len() * c.width], c.width, |t, x| {
                view.decode_row(tokens[t] as usize, x);
                if c.embedding_scale != 1.0 {
                    ops::scale(model.isa, x, c.embedding_scale);
                }
            });
    }

    fn attention(
        &mut self,
        model: &Model,
        layer: &Layer,
        i: usize,
        cache: &mut Cache,
        position: usize,
        t: usize,
    ) {
        let c = model.config();
        let isa = model.isa;
        self.norm(model, &layer.attn_norm, t);
        let (row_q, row_k, row_v) = (
            c.heads * c.head_k,
            c.heads_kv * c.head_k,
            c.heads_kv * c.head_v,
        );
        let Self {
            normed,
            q,
            k,
            v,
            attended,
            delta,
            acts32,
            acts256,
            angles,
            partials,
            ..
        } = self;
        let (q, k, v) = (
            &mut q[..t * row_q],
            &mut k[..t * row_k],
            &mut v[..t * row_v],
        );
        project(
            model,
            acts32,
            acts256,
            &normed[..t * c.width],
            t,
            [
                (&layer.q, &mut *q),
                (&layer.k, &mut *k),
                (&layer.v, &mut *v),
            ],
        );
        let windowed = c.window_of(i).is_some();
        let angles = &angles[usize::from(windowed)];
        model.pool.rows2(q, row_q, k, row_k, |t, q, k| {
            let (cos, sin) = angles.of(t);
            for (x, norm) in [(q, &layer.q_norm), (k, &layer.k_norm)] {
                if let Some(norm) = norm {
                    ops::rms_norm_heads(isa, x, norm, c.norm_eps);
                }
                ops::rope(isa, c.rope_pairs, c.head_k, cos, sin, x);
            }
        });
        cache.append(i, position, k, v);
        let params = Params {
            heads: c.heads,
            scale: c.attention_scale,
            soft_cap: c.attention_soft_cap,
            window: c.window_of(i),
            sinks: None,
        };
        let attended = &mut attended[..t * c.heads * c.head_v];
        attend(
            &model.pool,
            isa,
            cache.shape(),
            &params,
            position,
            q,
            cache.blocks(i),
            partials,
            attended,
        );
        project(
            model,
            acts32,
            acts256,
            attended,
            t,
            [(&layer.output, &mut delta[..t * c.width])],
        );
    }

    fn feed_forward(&mut self, model: &Model, layer: &Layer, t: usize) {
        let c = model.config();
        self.norm(model, &layer.ffn_norm, t);
        let Self {
            normed,
            gate,
            up,
            delta,
            acts32,
            acts256,
            ..
        } = self;
        let (gate, up) = (&mut gate[..t * c.ff], &mut up[..t * c.ff]);
        let normed = &normed[..t * c.width];
        project(
            model,
            acts32,
            acts256,
            normed,
            t,
            [(&layer.gate, &mut *gate), (&layer.up, &mut *up)],
        );
        model.pool.rows(gate, c.ff, |t, gate| {
            ops::gated(model.isa, c.gate, gate, &up[t * c.ff..(t + 1) * c.ff]);
        });
        let down = &layer.down;
        // Gated activations have heavy tails: with one scale for 256 of them 8 bits lose three times what the rest of the
        // layer does (docs/measurements.md).
        let passes = if act_block(down.w.ty()) == Some(BLOCK256) {
            Passes::Two
        } else {
            Passes::One
        };
        let operand = quantise(model, acts32, acts256, gate, t, &[down.w.ty()], passes);
        let task = Task {
            w: down.w.view(&model.weights),
            out: &mut delta[..operand.tokens * c.width],
        };
        products(&model.pool, model.isa, &operand, &mut [task]);
        let (first, second) = delta.split_at_mut(t * c.width);
        if operand.tokens > t {
            ops::add(model.isa, first, &second[..t * c.width]);
        }
        add_bias(model, down, first);
    }

    /// `normed = norm(x)`.
    fn norm(&mut self, model: &Model, weight: &[f32], t: usize) {
        let c = model.config();
        let x = &self.x;
        model
            .pool
            .rows(&mut self.normed[..t * c.width], c.width, |t, out| {
                ops::rms_norm(
                    model.isa,
                    &x[t * c.width..][..c.width],
                    Some(weight),
                    c.norm_eps,
                    out,
                );
            });
    }

    /// `x += delta`, normed first if the architecture norms there.
    fn add_delta(&mut self, model: &Model, norm: Option<&[f32]>, t: usize) {
        let c = model.config();
        let (delta, n) = (&self.delta, t * c.width);
        model.pool.rows2(
            &mut self.x[..n],
            c.width,
            &mut self.normed[..n],
            c.width,
            |t, x, normed| {
                let delta = &delta[t * c.width..][..c.width];
                match norm {
                    Some(norm) => {
                        ops::rms_norm(model.isa, delta, Some(norm), c.norm_eps, normed);
                        ops::add(model.isa, x, normed);
                    }
                    None => ops::add(model.isa, x, delta),
                }
            },
        );
    }

    /// Logits of rows `first .. first + n` of the last chunk (at most [`LOGIT_ROWS`]), `[n, V]`.
    ///
    /// What rounding the last activations to 8 bits loses goes straight into the logits, so they are carried in two passes.
    pub(super) fn logits(&mut self, model: &Model, first: usize, n: usize) -> &[f32] {
        let c: &Config = model.config();
        let (width, w) = (c.width, model.output().view(&model.weights));
        let Self {
            x,
            last,
            logits,
            acts32,
            acts256,
            ..
        } = self;
        for t in 0..n {
            let (x, out) = (
                &x[(first + t) * width..][..width],
                &mut last[t * width..][..width],
            );
            ops::rms_norm(model.isa, x, Some(&model.output_norm), c.norm_eps, out);
        }
        let ty = [w.ty()];
        let operand = quantise(
            model,
            acts32,
            acts256,
            &last[..n * width],
            n,
            &ty,
            Passes::Two,
        );
        let rows = operand.tokens;
        let task = Task {
            w,
            out: &mut logits[..rows * c.n_vocab],
        };
        products(&model.pool, model.isa, &operand, &mut [task]);
        let (logits, lost) = logits.split_at_mut(n * c.n_vocab);
        if rows > n {
            ops::add(model.isa, logits, &lost[..n * c.n_vocab]);
        }
        if let Some(cap) = c.logit_soft_cap {
            ops::soft_cap(model.isa, logits, cap);
        }
        logits
    }
}

/// Quantises `x` `[T, K]` into the blocks that weights of some types read. With two passes the operand has `2 T` rows,
/// unless all weights are float.
fn quantise<'a>(
    model: &Model,
    acts32: &'a mut Acts,
    acts256: &'a mut Acts,
    x: &'a [f32],
    tokens: usize,
    types: &[TensorType],
    passes: Passes,
) -> Operand<'a> {
    let k = x.len() / tokens;
    let fill = |acts: &'a mut Acts, block: usize| {
        types
            .iter()
            .any(|&ty| act_block(ty) == Some(block))
            .then(|| {
                acts.quantise(&model.pool, model.isa, x, tokens, block, passes);
                &*acts
            })
    };
    let (acts32, acts256) = (fill(acts32, BLOCK32), fill(acts256, BLOCK256));
    let rows = acts32.or(acts256).map_or(tokens, Acts::tokens);
    Operand {
        x,
        tokens: rows,
        k,
        acts32,
        acts256,
    }
}

/// Products that share an input `x` `[T, K]`, with their biases.
fn project<const N: usize>(
    model: &Model,
    acts32: &mut Acts,
    acts256: &mut Acts,
    x: &[f32],
    tokens: usize,
    outputs: [(&Linear, &mut [f32]); N],
) {
    let types = outputs.each_ref().map(|(linear, _)| linear.w.ty());
    let operand = quantise(model, acts32, acts256, x, tokens, &types, Passes::One);
    let linears = outputs.each_ref().map(|(linear, _)| *linear);
    let mut tasks = outputs.map(|(linear, out)| Task {
        w: linear.w.view(&model.weights),
        out,
    });
    products(&model.pool, model.isa, &operand, &mut tasks);
    for (linear, task) in linears.into_iter().zip(tasks) {
        add_bias(model, linear, task.out);
    }
}

/// Adds a bias to each row of `out` `[T, N]`, if there is one.
fn add_bias(model: &Model, linear: &Linear, out: &mut [f32]) {
    if let Some(bias) = &linear.bias {
        for row in out.chunks_exact_mut(bias.len()) {
            ops::add(model.isa, row, bias);
        }
    }
}
