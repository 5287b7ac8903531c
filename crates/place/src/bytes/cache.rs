//! Bytes of keys, values and recurrent state.

use serde::{Deserialize, Serialize};

use super::KvType;
use crate::error::Error;
use crate::model::{Cells, Model};

/// Cells of a block of our cache, and what other engines round numbers of cells up to.
pub const BLOCK_CELLS: u64 = 256;

/// Blocks that the CPU attends as one, where it attends some of those outside fast memory: what is left of them is copied.
pub const GROUP_BLOCKS: u64 = 4;

/// What is asked of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Cache {
    /// Tokens that all sequences have room for together.
    pub n_ctx: u64,
    /// Sequences.
    pub n_seq: u64,
    /// Whether they share the room.
    pub streams: Streams,
    /// Type of K.
    pub type_k: KvType,
    /// Type of V.
    pub type_v: KvType,
    /// Tokens of a prompt that go through the layers at a time.
    pub n_ubatch: u64,
}

/// How sequences divide a cache's room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Streams {
    /// All sequences share all cells (a unified cache).
    #[default]
    Shared,
    /// Each sequence has an equal part for itself.
    Own,
}

impl Cache {
    /// A cache for one sequence.
    pub fn new(n_ctx: u64, type_k: KvType, type_v: KvType, n_ubatch: u64) -> Cache {
        Cache {
            n_ctx,
            n_seq: 1,
            streams: Streams::Shared,
            type_k,
            type_v,
            n_ubatch,
        }
    }

    fn check(&self) -> Result<(), Error> {
        for (what, found) in [
            ("a context", self.n_ctx),
            ("a number of sequences", self.n_seq),
            ("a ubatch", self.n_ubatch),
        ] {
            if found == 0 {
                return Err(Error::Option {
                    what,
                    found,
                    expected: "1 or more",
                });
            }
        }
        Ok(())
    }
}

/// Bytes of a cache as other engines count them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct KvBytes {
    /// Of all layers.
    pub total: u64,
    /// Of layers that see everything.
    pub full: u64,
    /// Of layers with a window.
    pub windowed: u64,
    /// The part of `total` that is K.
    pub k: u64,
    /// The part of `total` that is V.
    pub v: u64,
}

/// Bytes of a cache as our blocks take them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct KvAlloc {
    /// Of all layers.
    pub total: u64,
    /// Of layers that see everything.
    pub full: u64,
    /// Of layers with a window.
    pub windowed: u64,
    /// Blocks of each layer that sees everything, of all sequences.
    pub full_blocks: u64,
    /// Bytes of the same 256 cells in all layers that see everything: what one step of a window over the cache moves.
    pub full_slab: u64,
    /// Bytes of 256 cells in the largest of these layers: what is streamed at a time.
    pub full_block: u64,
    /// Blocks of each layer with a window, of all sequences: of the one with most.
    pub windowed_blocks: u64,
}

/// Checks that blocks of the types divide the heads that they would store: a head then is whole blocks wherever it begins.
///
/// # Errors
/// [`Error::KvBlock`] with the first layer that a type does not fit. V of a latent cache is a view of K, so its type is moot.
pub fn check_types(model: &Model, type_k: KvType, type_v: KvType) -> Result<(), Error> {
    for (layer, cells) in model.caching() {
        for (side, ty, head) in [("K", type_k, cells.head_k), ("V", type_v, cells.head_v)] {
            if !head.is_multiple_of(ty.block_len()) {
                return Err(Error::KvBlock {
                    ty,
                    side,
                    layer,
                    head,
                });
            }
        }
    }
    Ok(())
}

const KV: Error = Error::Overflow { what: "the cache" };

fn times(a: u128, b: u128) -> Result<u128, Error> {
    a.checked_mul(b).ok_or(KV)
}

fn plus(a: u128, b: u128) -> Result<u128, Error> {
    a.checked_add(b).ok_or(KV)
}

fn narrow(n: u128) -> Result<u64, Error> {
    u64::try_from(n).map_err(|_| KV)
}

/// Bytes of K and of V of one cell in one layer. [`check_types`] has passed.
fn cell_bytes(cells: &Cells, cache: &Cache) -> Result<(u128, u128), Error> {
    let row = |values: Option<u64>, ty: KvType| values.and_then(|n| ty.row_bytes(n)).ok_or(KV);
    let k = row(cells.k_values(), cache.type_k)?;
    let v = row(cells.v_values(), cache.type_v)?;
    Ok((k.into(), v.into()))
}

/// `n` rounded up to whole blocks.
fn padded(n: u128) -> u128 {
    n.next_multiple_of(BLOCK_CELLS.into())
}

/// Bytes of K and V as other engines count and print them.
///
/// A layer that sees everything has `pad256(n_ctx)` cells, one with a window `pad256(min(n_ctx, window * n_seq + n_ubatch))`.
/// With streams of their own each of `n_seq` sequences has `n_ctx / n_seq` tokens of room, padded so, and its own rings, with
/// `n_seq` = 1.
///
/// # Errors
/// If the cache is impossible, a type does not fit ([`check_types`]), or the bytes are more than 64 bits hold.
pub fn kv_bytes(model: &Model, cache: &Cache) -> Result<KvBytes, Error> {
    cache.check()?;
    check_types(model, cache.type_k, cache.type_v)?;
    let (streams, room, n_seq) = match cache.streams {
        Streams::Shared => (1, cache.n_ctx, cache.n_seq),
        Streams::Own => (cache.n_seq, cache.n_ctx.div_ceil(cache.n_seq), 1),
    };
    let (mut k_full, mut v_full, mut k_windowed, mut v_windowed) = (0, 0, 0, 0);
    for (_, cells) in model.caching() {
        let n = match cells.window {
            None => room.into(),
            Some(window) => {
                let ring = plus(times(window.into(), n_seq.into())?, cache.n_ubatch.into())?;
                ring.min(room.into())
            }
        };
        let n = times(padded(n), streams.into())?;
        let (k, v) = cell_bytes(cells, cache)?;
        let (k, v) = (times(n, k)?, times(n, v)?);
        let (k_sum, v_sum) = match cells.window {
            None => (&mut k_full, &mut v_full),
            Some(_) => (&mut k_windowed, &mut v_windowed),
        };
        *k_sum = plus(*k_sum, k)?;
        *v_sum = plus(*v_sum, v)?;
    }
    let (full, windowed) = (plus(k_full, v_full)?, plus(k_windowed, v_windowed)?);
    Ok(KvBytes {
        total: narrow(plus(full, windowed)?)?,
        full: narrow(full)?,
        windowed: narrow(windowed)?,
        k: narrow(plus(k_full, k_windowed)?)?,
        v: narrow(plus(v_full, v_windowed)?)?,
    })
}

/// Bytes of K and V as our blocks of 256 cells take them when the context is full.
///
/// A block's bytes are those of its 256 cells, with nothing between them. A layer that sees everything needs
/// `ceil(n_ctx / 256)` blocks; where sequences share the room, each but one may leave a block begun, so there are `n_seq - 1`
/// more. A layer with a window keeps, for each sequence, a ring of the window and the chunk that is being computed. It moves
/// cell by cell while blocks stay where they are, so it can reach into one block more than `ceil((window + ubatch) / 256)`;
/// it never needs more blocks than the context.
///
/// # Errors
/// As [`kv_bytes`].
pub fn kv_alloc_bytes(model: &Model, cache: &Cache) -> Result<KvAlloc, Error> {
    cache.check()?;
    check_types(model, cache.type_k, cache.type_v)?;
    let block = u128::from(BLOCK_CELLS);
    let n_seq = u128::from(cache.n_seq);
    let room: u128 = match cache.streams {
        Streams::Shared => cache.n_ctx.into(),
        Streams::Own => cache.n_ctx.div_ceil(cache.n_seq).into(),
    };
    let of_room = room.div_ceil(block);
    let full_blocks = match cache.streams {
        // A sequence has a block only if it has a token.
        Streams::Shared => of_room + (n_seq.min(room) - 1),
        Streams::Own => times(of_room, n_seq)?,
    };
    let (mut full_slab, mut full_block, mut windowed, mut windowed_blocks) = (0, 0, 0, 0);
    for (_, cells) in model.caching() {
        let (k, v) = cell_bytes(cells, cache)?;
        let bytes = times(block, plus(k, v)?)?;
        match cells.window {
            None => {
                full_slab = plus(full_slab, bytes)?;
                full_block = bytes.max(full_block);
            }
            Some(window) => {
                let chunk = u128::from(cache.n_ubatch).min(room);
                let ring = plus(window.into(), chunk)?.div_ceil(block) + 1;
                let blocks = times(ring, n_seq)?.min(full_blocks);
                windowed = plus(windowed, times(blocks, bytes)?)?;
                windowed_blocks = blocks.max(windowed_blocks);
            }
        }
    }
    let full = times(full_slab, full_blocks)?;
    Ok(KvAlloc {
        total: narrow(plus(full, windowed)?)?,
        full: narrow(full)?,
        windowed: narrow(windowed)?,
        full_blocks: narrow(full_blocks)?,
        full_slab: narrow(full_slab)?,
        full_block: narrow(full_block)?,
        windowed_blocks: narrow(windowed_blocks)?,
    })
}

/// Bytes of the recurrent state of `n_seq` sequences, each with `rollback` states to return to beside its own, as speculation
/// needs one for each token that it drafts. Neither the context nor the cache's types change them.
///
/// # Errors
/// If the bytes are more than 64 bits hold.
pub fn recurrent_bytes(model: &Model, n_seq: u64, rollback: u64) -> Result<u64, Error> {
    let states = times(n_seq.into(), u128::from(rollback) + 1)?;
    narrow(times(model.state_bytes().into(), states)?)
}
