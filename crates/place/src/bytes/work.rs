//! Bytes that a session computes in.

use serde::Serialize;

use super::BLOCK_CELLS;
use crate::error::Error;
use crate::model::{Experts, Form, Keeps, Layer, Model};

/// Tokens whose logits are computed at a time.
const LOGIT_ROWS: u128 = 8;
/// Tokens that quantised activations come in multiples of.
const ACT_TILE: u128 = 16;
/// Values that rows of quantised activations come in multiples of.
const ACT_BLOCK: u128 = 256;
/// Rows of experts that the CPU computes at a time, unless one expert may have more.
const WAVE_ROWS: u128 = 1024;
/// Tokens up to which experts' weights are read for every token on a device.
const EXPERTS_FEW: u128 = 16;
/// Bytes behind each part of quantised activations on a device, which kernels may read.
const DEVICE_SLACK: u128 = 4096;
/// What thread blocks of a product of many columns hand on, on a device: `cuda`'s `acts::SHARING_MAX`.
const DEVICE_SHARES: u128 = 132 * (4 * 2 * 128 * 128 + 4 * 8);
/// Results of a prompt's attention that a device holds: of the spans that are done side by side, and of those before.
const SPAN_STATES: u128 = 5;

/// Bytes of a session's work space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WorkBytes {
    /// Of everything below.
    pub total: u64,
    /// What goes from operation to operation, `f32`.
    pub activations: u64,
    /// What operations need inside: quantised activations, rope's angles, partial results of attention.
    pub scratch: u64,
    /// What a mixture of experts needs beside that.
    pub experts: u64,
    /// Logits.
    pub logits: u64,
}

/// The widest rows of any layer.
#[derive(Default)]
struct Widest {
    /// Query: H x C.
    q: u128,
    /// K of a token: K x C.
    k: u128,
    /// V of a token: K x C.
    v: u128,
    /// Attention's output: H x C.
    out: u128,
    /// A block's partial result of one token.
    partial: u128,
    /// Query heads.
    heads: u128,
}

/// Bytes of the work space of one session over `n_ctx` cells that takes up to `n_ubatch` tokens at a time (T of them, no more
/// than the context has), on the CPU.
///
/// The buffers are those of `engine`'s `session::forward::Work` and its CPU backend, and a test there compares:
///
/// ```text
/// activations  4 * (T * (4 D + q + k + v + out + 2 F) + 8 D)     x, normed, delta (twice), q, k, v, attended, gate, up; last
/// scratch      1.5 * pad16(max(T, 16)) * pad256(W)                activations in blocks of 32, W = max(F, D, out)
///            + 1.5 * pad16(2 * max(T, 8)) * pad256(W)             activations in blocks of 256, two passes
///            + 4 * 2 * 2 * T * (rope_dims / 2)                    cosines and sines, layers without and with a window
///            + 4 * ceil(n_ctx / 256) * H * (2 + C)                partial results of one token, block by block
/// logits       4 * 2 * min(T, 8) * V
/// experts      4 * T * E + 4 * (4 * T * used + E + 1)             scores; lists of who uses what
///            + 2 * 1.5 * R * pad256(D) + 1.5 * 2 R * pad256(F_e)   tokens of experts, and what they gate, in blocks
///            + 4 * R * (2 F_e + 2 D)                              gate and up, outputs in two passes
/// ```
///
/// A quantised activation takes 1.5 bytes: its code, and for every 32 of them two `f32` and one `i32`, for every 16 one `i16`.
/// `q`, `k`, `v` and `out` are the widest of all layers; F is the widest of layers without experts and all shared experts together.
/// R = max(pad16(T), min(16 * T * used, 1024)) rows are computed at a time (`cpu::mixture`). Linear attention does not run yet: its own buffers
/// are not in it.
///
/// # Errors
/// If `n_ctx` or `n_ubatch` is 0, or the bytes are more than 64 bits hold.
pub fn work_bytes(model: &Model, n_ctx: u64, n_ubatch: u64) -> Result<WorkBytes, Error> {
    let s = Sizes::of(model, n_ctx, n_ubatch)?;
    let Sizes { t, w, .. } = &s;
    let activations = product(&[4, sum([product(&[*t, s.row]), Ok(LOGIT_ROWS * s.width)])?])?;
    let acts = |tokens: u128, width: u128| {
        let tokens = tokens.next_multiple_of(ACT_TILE);
        let values = product(&[tokens, width.next_multiple_of(ACT_BLOCK)])?;
        // Whole blocks of 256, so halves are whole.
        sum([Ok(values), Ok(values / 2)])
    };
    let scratch = sum([
        acts((*t).max(2 * LOGIT_ROWS), s.widest),
        acts(2 * (*t).max(LOGIT_ROWS), s.widest),
        product(&[4, 2, 2, *t, s.pairs]),
        product(&[4, s.blocks, w.partial]),
    ])?;
    let logits = product(&[4, 2, (*t).min(LOGIT_ROWS), s.vocabulary])?;
    s.total(activations, scratch, logits, s.experts_on_cpu(acts)?)
}

/// Sequences that have lists of their own on a device; further ones share the last one's.
pub const SEQUENCE_LISTS: u64 = 8;

/// The same in a device's memory, on the CUDA backend.
///
/// The buffers are those of `engine`'s `session::forward::Work` and `backend::cuda::Cuda::new`. B = 2 ceil(n_ctx / 256) + 1 lists that
/// many spans of cells: a block with cells removed from its middle is several.
///
/// ```text
/// activations  4 * T * (4 D + q + k + v + out + 2 F)             x, normed, delta (twice), q, k, v, attended, gate, up
/// scratch      2 * (89 / 64 * C * pad256(W) + 4 * 4096)           activations in blocks of 32 and of 256, C = pad16(2 max(T, 8)) columns
///            + 132 * (4 * 2 * 128 * 128 + 4 * 8), if C > 16          what thread blocks of products of many columns hand on
///            + L * (24 B + 8 + S * (24 + 32 B + 8))                lists of each layer's blocks and partial results, with their lengths;
///                                                                 some of each of S = min(n_seq, 8) sequences
///            + 4 * B * H * (2 + C_v)                              partial results of one token
///            + 4 * 5 * T * H * (2 + C_v)                          results of a prompt's spans
///            + 4 * 2 * 2 * max(T * rope_dims / 2, 1)              cosines and sines, layers without and with a window
///            + 8 T + 4 H                                          positions, ids, counts of a merge
/// logits       4 * (2 * 8 D + min(T, 8) * V)                      the last rows, normed; logits (the host's copy is not here)
/// experts      4 * T * E + 8 * L * E                            scores; where experts are
///            + 4 * min(T, 16) * ceil(D / 512) * E                parts of scores of a few tokens
///            + 8 * T * used + 4 * min(T, 16) * used * F_e          ids, weights; gated values of a few tokens
///            + 4 * T * used + 8 + 4 * (R + floor(R / 32))           from 17 tokens on: places of pairs, pairs of places, experts of blocks
///            + R * (pad128(D) + 12 * ceil(D / 32))                 inputs of experts
///            + 2 * R * (pad128(F_e) + 12 * ceil(F_e / 32))          what they gate, in two passes
///            + 4 * R * (2 F_e + D)                                gates and ups, outputs
/// ```
///
/// R places are filled up to blocks of 32, 64 or 128 an expert, which depends on T: the largest that any T up to the ubatch needs
/// (`cuda::experts`).
///
/// # Errors
/// As [`work_bytes`].
pub fn device_work_bytes(
    model: &Model,
    n_ctx: u64,
    n_ubatch: u64,
    n_seq: u64,
) -> Result<WorkBytes, Error> {
    let s = Sizes::of(model, n_ctx, n_ubatch)?;
    let Sizes { t, w, .. } = &s;
    let activations = product(&[4, *t, s.row])?;
    let columns = (2 * (*t).max(LOGIT_ROWS)).next_multiple_of(16);
    let shares = if columns > 16 { DEVICE_SHARES } else { 0 };
    // Codes, and for every 32 of them 8 bytes, for every 256 of them 4, for every 16 of them 2: whole, as rows are padded to 256.
    let act_values = product(&[columns, s.widest.next_multiple_of(ACT_BLOCK)])?;
    let acts = sum([product(&[act_values / 64, 89]), Ok(4 * DEVICE_SLACK)])?;
    let spans = 2 * s.blocks + 1;
    let of_sequence = 24 + 32 * spans + 8;
    let list = 24 * spans + 8 + u128::from(n_seq.clamp(1, SEQUENCE_LISTS)) * of_sequence;
    let scratch = sum([
        product(&[2, acts]),
        Ok(shares),
        product(&[s.layers, list]),
        product(&[4, spans, w.partial]),
        product(&[4, SPAN_STATES, *t, w.partial]),
        product(&[4, 2, 2, product(&[*t, s.pairs])?.max(1)]),
        Ok(8 * t + 4 * w.heads),
    ])?;
    let logits = sum([
        product(&[4, 2, LOGIT_ROWS, s.width]),
        product(&[4, (*t).min(LOGIT_ROWS), s.vocabulary]),
    ])?;
    s.total(activations, scratch, logits, s.experts_on_device()?)
}

/// What the formulas above are made of.
struct Sizes {
    t: u128,
    width: u128,
    w: Widest,
    /// Values of a token that go from operation to operation.
    row: u128,
    /// Values of the widest row that is quantised.
    widest: u128,
    pairs: u128,
    /// Blocks of the context.
    blocks: u128,
    layers: u128,
    vocabulary: u128,
    /// Layers with experts.
    mixtures: u128,
    experts: Option<Experts>,
}

/// Places that up to so many pairs of tokens and experts need on a device: in blocks of 32, 64 or 128 an expert, by how many pairs there are.
fn expert_places(pairs: u128, experts: u128) -> Result<u128, Error> {
    let mut most = 0;
    for (block, each_max) in [(32, Some(24)), (64, Some(96)), (128, None)] {
        let pairs = match each_max {
            Some(each) => pairs.min(product(&[each + 1, experts])? - 1),
            None => pairs,
        };
        let spare = product(&[block - 1, experts.min(pairs)])?;
        most = most.max(sum([Ok(pairs), Ok(spare)])? / block * block);
    }
    Ok(most)
}

impl Sizes {
    fn of(model: &Model, n_ctx: u64, n_ubatch: u64) -> Result<Self, Error> {
        for (what, found) in [("a context", n_ctx), ("a ubatch", n_ubatch)] {
            if found == 0 {
                return Err(Error::Option {
                    what,
                    found,
                    expected: "1 or more",
                });
            }
        }
        let t = u128::from(n_ubatch.min(n_ctx));
        let width = u128::from(model.width);
        let w = widest(model)?;
        let is_dense = |layer: &Layer| layer.expert_bytes == 0;
        let dense_ff = if model.layers.iter().any(is_dense) {
            model.ff
        } else {
            0
        };
        let shared_ff = model.experts.map_or(0, |e| e.shared_ff);
        let ff = u128::from(dense_ff.max(shared_ff));
        Ok(Self {
            t,
            width,
            row: sum([
                product(&[4, width]),
                Ok(w.q),
                Ok(w.k),
                Ok(w.v),
                Ok(w.out),
                product(&[2, ff]),
            ])?,
            widest: ff.max(width).max(w.out),
            w,
            pairs: u128::from(model.rope_dims / 2),
            blocks: u128::from(n_ctx).div_ceil(BLOCK_CELLS.into()),
            layers: model.n_layer() as u128,
            vocabulary: model.n_vocab.into(),
            mixtures: model.layers.iter().filter(|layer| !is_dense(layer)).count() as u128,
            experts: model.experts,
        })
    }

    /// What mixtures need on the CPU, where `acts` gives the bytes of quantised rows of some width.
    fn experts_on_cpu(
        &self,
        acts: impl Fn(u128, u128) -> Result<u128, Error>,
    ) -> Result<u128, Error> {
        let Some(e) = self.experts else {
            return Ok(0);
        };
        let (t, total, used, ff) = (self.t, e.total.into(), e.used.into(), e.ff.into());
        let rows = product(&[ACT_TILE, t, used])?.min(WAVE_ROWS);
        let rows = rows.max(t.next_multiple_of(ACT_TILE));
        let lists = sum([product(&[4, t, used]), Ok(total), Ok(1)])?;
        let values = sum([product(&[2, ff]), product(&[2, self.width])])?;
        sum([
            product(&[4, t, total]),
            product(&[4, lists]),
            acts(2 * rows, self.width),
            acts(2 * rows, ff),
            product(&[4, rows, values]),
        ])
    }

    fn experts_on_device(&self) -> Result<u128, Error> {
        let Some(e) = self.experts else {
            return Ok(0);
        };
        let (t, total, used, ff): (_, u128, u128, u128) =
            (self.t, e.total.into(), e.used.into(), e.ff.into());
        let pairs = product(&[t, used])?;
        let few = sum([
            product(&[4, t, total]),
            product(&[8, self.mixtures, total]),
            product(&[8, pairs]),
            product(&[4, t.min(EXPERTS_FEW), self.width.div_ceil(512), total]),
            product(&[4, t.min(EXPERTS_FEW), used, ff]),
        ])?;
        if t <= EXPERTS_FEW {
            return Ok(few);
        }
        let places = expert_places(pairs, total)?;
        let columns = |k: u128| sum([Ok(k.next_multiple_of(128)), product(&[12, k.div_ceil(32)])]);
        sum([
            Ok(few),
            product(&[4, pairs]),
            Ok(8),
            product(&[4, sum([Ok(places), Ok(places / 32)])?]),
            product(&[places, columns(self.width)?]),
            product(&[2, places, columns(ff)?]),
            product(&[4, places, sum([product(&[2, ff]), Ok(self.width)])?]),
        ])
    }

    fn total(
        &self,
        activations: u128,
        scratch: u128,
        logits: u128,
        experts: u128,
    ) -> Result<WorkBytes, Error> {
        let all = [activations, scratch, experts, logits];
        Ok(WorkBytes {
            total: narrow(sum(all.map(Ok))?)?,
            activations: narrow(activations)?,
            scratch: narrow(scratch)?,
            experts: narrow(experts)?,
            logits: narrow(logits)?,
        })
    }
}

/// Bytes that a chunk of tokens carries from one part of its attention to the next, where cells are streamed in parts:
///
/// ```text
/// 4 * T * 2 * H * (2 + C)       partial results of the groups before, and of the group begun
/// ```
///
/// # Errors
/// As [`work_bytes`].
pub fn carried_bytes(model: &Model, n_ctx: u64, n_ubatch: u64) -> Result<u64, Error> {
    let t = u128::from(n_ubatch.min(n_ctx));
    narrow(product(&[4, t, 2, widest(model)?.partial])?)
}

fn widest(model: &Model) -> Result<Widest, Error> {
    let mut widest = Widest::default();
    for layer in &model.layers {
        let keeps = match layer.keeps {
            Keeps::SharedWith { layer } => model.layers[layer].keeps,
            keeps => keeps,
        };
        let Keeps::Cells(cells) = keeps else {
            continue;
        };
        let (heads, heads_kv) = (u128::from(layer.heads), u128::from(cells.heads));
        let head_out = match cells.form {
            Form::Heads => cells.head_v,
            // Attention in the latent space gives vectors of its size, which the file has as V's.
            Form::Latent => model.head_v,
        };
        let (head_k, head_v) = (u128::from(cells.head_k), u128::from(cells.head_v));
        let head_out = u128::from(head_out);
        for (most, row) in [
            (&mut widest.q, product(&[heads, head_k])?),
            (&mut widest.k, product(&[heads_kv, head_k])?),
            (&mut widest.v, product(&[heads_kv, head_v])?),
            (&mut widest.out, product(&[heads, head_out])?),
            (&mut widest.partial, product(&[heads, 2 + head_out])?),
            (&mut widest.heads, heads),
        ] {
            *most = row.max(*most);
        }
    }
    Ok(widest)
}

const WORK: Error = Error::Overflow {
    what: "the work space",
};

fn product(factors: &[u128]) -> Result<u128, Error> {
    factors
        .iter()
        .try_fold(1_u128, |product, &n| product.checked_mul(n))
        .ok_or(WORK)
}

fn sum<const N: usize>(terms: [Result<u128, Error>; N]) -> Result<u128, Error> {
    let mut terms = terms.into_iter();
    terms.try_fold(0_u128, |sum, term| sum.checked_add(term?).ok_or(WORK))
}

fn narrow(n: u128) -> Result<u64, Error> {
    u64::try_from(n).map_err(|_| WORK)
}
