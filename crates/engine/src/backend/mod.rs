//! What sessions compute on: memory, copies, and the operations of a layer.
//!
//! [`session::forward`](crate::session) and [`kv`](crate::kv) are written once over [`Backend`]. A backend has *device memory*, which its
//! operations read and write, and *host memory*, which they reach by copies, or through the CPU where it lies. On the CPU both are
//! main memory, and what separates them is a budget: so everything that places blocks runs, and is tested, without a device.
//!
//! A mixture of experts is one coarse operation, so that a backend may have experts wherever it likes.
//!
//! Operations take effect in the order of the calls. A backend may return from one before it is done, as long as
//! [`logits`](Backend::logits), [`save`](Backend::save) and the like see its effect. What fails is told by [`finish`](Backend::finish).

mod cpu;
mod cuda;

pub(crate) use self::cpu::Cpu;
pub(crate) use self::cuda::Cuda;
#[cfg(test)]
pub(crate) use self::cuda::batches::Batches;
pub(crate) use ::cpu::attention::{CELLS, GROUP, KvShape, Step};

use crate::error::Error;
use crate::experts::Store;
use crate::model::{Layer, Linear, Mixture, Model, Vector};
use quant::act::Passes;
use std::fmt::Debug;
use std::ops::Range;

/// Where a span's bytes are.
#[derive(Debug)]
pub(crate) enum At<'a, B: Backend> {
    /// In device memory, at the layer's place in a slab.
    Device(&'a B::Slab),
    /// In host memory, where the CPU attends it.
    Host(&'a B::HostSlab),
    /// In a slot of the staging ring, by itself.
    Staged(usize),
}

/// Cells of one block, and where they are.
#[derive(Debug)]
pub(crate) struct Placed<'a, B: Backend> {
    /// The block holds the cells `256 index ..`.
    pub(crate) index: usize,
    /// The first of its cells that is there, and where those end.
    pub(crate) cells: (usize, usize),
    pub(crate) at: At<'a, B>,
}

/// One layer's attention, beside its queries and cells.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attending<'a> {
    pub(crate) shape: &'a KvShape,
    /// The layer's bytes in a slab.
    pub(crate) at: &'a Range<usize>,
    /// Cells that a query sees, itself included; `None`: all.
    pub(crate) window: Option<usize>,
    /// Position of the first token.
    pub(crate) position: usize,
    /// The sequence's number among those of the step, and the row of its first token.
    pub(crate) part: usize,
    pub(crate) row: usize,
    pub(crate) tokens: usize,
    /// Whether it is one generated token, not a prompt, alone or among others of its step; where a token is [alike](Backend::ALIKE), also several.
    pub(crate) generated: bool,
    pub(crate) layer: usize,
}

/// What half a layer adds to the residual stream.
#[derive(Debug)]
pub(crate) struct Added<'a, B: Backend> {
    /// `[T, D]`.
    pub(crate) delta: &'a B::Array,
    /// The norm that it passes first.
    pub(crate) norm: Option<&'a Vector>,
}

/// What is multiplied with a Hadamard matrix, head by head, before it is stored in few bits. The matrix is its own inverse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Rotation {
    /// Q and K.
    pub(crate) k: bool,
    /// V, and attention's output back.
    pub(crate) v: bool,
}

/// What is done to a layer's queries and cells before they are attended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turn<'a> {
    pub(crate) layer: &'a Layer,
    /// Whether its rope is that of layers with a window.
    pub(crate) windowed: bool,
    pub(crate) rotation: Rotation,
}

/// Whether a step attends what the step before attended, writes where that wrote, and streams what that streamed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Again {
    No,
    /// It does not, but all that it attends is in device memory.
    Anew,
    /// It does, and all of it is in device memory.
    Resident,
    /// It does, and some of it is in host memory.
    Spilled,
}

/// How a step was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stepped {
    /// Operation by operation.
    Given,
    /// It was recorded first, which takes longer.
    Recorded,
    /// As it had been recorded.
    Repeated,
}

/// How cells get to the device and back: what a slower machine is bound by, or is told to be.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Transfers {
    /// Host memory for cells that may be pinned; the rest goes to the device through pinned memory that is filled by the CPU.
    pub pin_max_bytes: Option<u64>,
    /// A slower link than there is.
    pub link_gb_s: Option<f64>,
    /// As if nothing could be pinned but what all copies go through.
    pub host_copy: bool,
    /// As if the device refused a staging ring of more than two slots.
    pub staging_fails: bool,
}

/// What sessions compute on. Shapes: T tokens, D width, H query heads, K KV heads, C head size, F feed-forward width, V vocabulary.
///
/// Matrices and vectors of weights are those of [`Backend::model`].
pub(crate) trait Backend: Debug + Sized {
    /// Whether the CPU can attend cells in host memory beside the device.
    const CPU_SHARES: bool;
    /// Whether a token's bits are the same as a prompt's and as a generated one.
    const ALIKE: bool;
    /// Whether a generated token's spans that are streamed may come after all others, whatever their positions.
    const STREAMED_LAST: bool;

    /// `f32` values in device memory.
    type Array: Debug;
    /// KV cells in device memory.
    type Slab: Debug;
    /// KV cells in host memory.
    type HostSlab: Debug;

    /// The model whose operations these are.
    fn model(&self) -> &Model;

    /// Bytes of what the backend keeps for its own operations.
    fn bytes(&self) -> u64;

    /// Bytes of what streaming needs beside that: the staging ring, and what is carried from one part of an attention to the next.
    fn staging_bytes(&self) -> u64;

    /// `len` zeros.
    fn array(&self, len: usize) -> Result<Self::Array, Error>;

    /// A slab of zeros in device memory.
    fn slab(&self, bytes: usize) -> Result<Self::Slab, Error>;
    /// A slab of zeros in host memory.
    fn host_slab(&self, bytes: usize) -> Result<Self::HostSlab, Error>;
    /// Copies a slab to host memory.
    fn spill(&mut self, from: &Self::Slab, to: &mut Self::HostSlab);
    /// Copies a slab to device memory.
    fn fetch(&mut self, from: &Self::HostSlab, to: &mut Self::Slab);
    /// Copies a slab within device memory.
    fn duplicate(&mut self, from: &Self::Slab, to: &mut Self::Slab);
    /// A slab's bytes.
    fn save(&self, from: &Self::Slab, to: &mut Vec<u8>) -> Result<(), Error>;
    /// A host slab's bytes.
    fn save_host(&self, from: &Self::HostSlab, to: &mut Vec<u8>) -> Result<(), Error>;
    /// Sets a slab's bytes.
    fn restore(&mut self, from: &[u8], to: &mut Self::Slab);

    /// Makes a staging ring of `slots` slots of `bytes` each.
    fn make_slots(&mut self, slots: usize, bytes: usize) -> Result<(), Error>;
    /// Says that slots are filled from here on which operations that were begun may still read: copies wait for these.
    fn begin_batch(&mut self) {}
    /// Begins to copy bytes of each of some host slabs to slots from `first_slot` on.
    fn stage(&mut self, from: &[&Self::HostSlab], at: Range<usize>, first_slot: usize);

    /// Has experts placed as a store says: makes its slots, and fills them with what it knows to be used. [`mix`](Self::mix) then serves
    /// experts as the store says.
    fn place_experts(&mut self, store: Store) -> Result<(), Error> {
        drop(store);
        let what = "experts are where the model is on this device, and cannot be elsewhere";
        Err(Error::Options(what.to_owned()))
    }
    /// That store.
    fn experts(&self) -> Option<&Store> {
        None
    }
    /// The same to change it.
    fn experts_mut(&mut self) -> Option<&mut Store> {
        None
    }
    /// Bytes of slots for experts.
    fn expert_bytes(&self) -> u64 {
        0
    }

    /// Does the operations of one generated token of each of some sequences, `step`, which begin with [`begin`](Self::begin) for them. `again`: whether they
    /// are those of the step before, so that a backend which has recorded it may do it again, without `step`. Where recording fails `step` is called again.
    fn step(
        &mut self,
        positions: &[Range<usize>],
        tokens: &[u32],
        again: Again,
        mut step: impl FnMut(&mut Self),
    ) -> Stepped {
        let _ = (positions, tokens, again);
        step(self);
        Stepped::Given
    }
    /// Says which positions the operations that follow are for, of one sequence after another; `x` `[T, D]` becomes the tokens' rows of the embedding, scaled as the architecture does.
    fn begin(&mut self, positions: &[Range<usize>], tokens: &[u32], x: &mut Self::Array);
    /// The way into a half of a layer: adds what the half before gave to `x` `[T, D]`; then products of `normed = norm(x)`, with
    /// their biases.
    fn enter<const N: usize>(
        &mut self,
        added: Option<Added<'_, Self>>,
        norm: &Vector,
        tokens: usize,
        x: &mut Self::Array,
        normed: &mut Self::Array,
        outputs: [(&Linear, &mut Self::Array); N],
    );
    /// The same before a mixture of experts: its router's product. What else the mixture reads of the norm's result is made ready, too.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    fn enter_mixture(
        &mut self,
        added: Option<Added<'_, Self>>,
        norm: &Vector,
        mixture: &Mixture,
        tokens: usize,
        x: &mut Self::Array,
        normed: &mut Self::Array,
        scores: &mut Self::Array,
    ) {
        let outputs = [(&mixture.router, scores)];
        self.enter(added, norm, tokens, x, normed, outputs);
    }
    /// Norms (where the architecture does) and turns `q` `[T, H, C]` and `k` `[T, K, C]`, then rotates what is to be rotated.
    fn turn(
        &mut self,
        turn: &Turn<'_>,
        tokens: usize,
        q: &mut Self::Array,
        k: &mut Self::Array,
        v: &mut Self::Array,
    );
    /// Stores the sequence's tokens, whose rows of `k` `[T, K, C]` and `v` `[T, K, C]` begin at the first one's, in the blocks to which they belong:
    /// `slabs` are theirs, the first one that of block `first`.
    fn append(
        &mut self,
        attending: &Attending<'_>,
        slabs: &mut [&mut Self::Slab],
        first: usize,
        k: &Self::Array,
        v: &Self::Array,
    );
    /// Both for one token of each of some sequences, with the slab and block that it belongs to. What `k` and `v` hold afterwards does not
    /// matter.
    fn turn_and_append(
        &mut self,
        turn: &Turn<'_>,
        tokens: Vec<(Attending<'_>, &mut Self::Slab, usize)>,
        q: &mut Self::Array,
        k: &mut Self::Array,
        v: &mut Self::Array,
    ) {
        self.turn(turn, tokens.len(), q, k, v);
        for (attending, slab, block) in tokens {
            self.append(&attending, &mut [slab], block, k, v);
        }
    }
    /// Attends the sequence's rows of `q` `[T, H, C]` over spans in ascending order, in one call or several (where
    /// [`STREAMED_LAST`](Self::STREAMED_LAST) holds, the streamed ones of a generated token, ascending, in calls after that for all others);
    /// after the last, the same rows of `out` `[T, H, C]` are the result, for [`leave`](Self::leave) to go on with.
    fn attend(
        &mut self,
        attending: &Attending<'_>,
        q: &Self::Array,
        spans: &[Placed<'_, Self>],
        step: Step,
        out: &mut Self::Array,
    );
    /// The same for several sequences of a step, each with one token and all its spans in device memory.
    fn attend_each(
        &mut self,
        sequences: &[(Attending<'_>, Vec<Placed<'_, Self>>)],
        q: &Self::Array,
        out: &mut Self::Array,
    ) {
        for (attending, spans) in sequences {
            self.attend(attending, q, spans, Step::ONLY, out);
        }
    }
    /// The way out of attention: the product of `attended` `[T, H, C]`, which is first rotated back if V was rotated.
    fn leave(
        &mut self,
        output: &Linear,
        rotated: bool,
        tokens: usize,
        attended: &mut Self::Array,
        delta: &mut Self::Array,
    );
    /// The way out of a feed-forward: the down projection of `f(gate) * up`, both `[T, F]`, to `delta` `[T, D]`, whose room is twice that.
    fn down(
        &mut self,
        down: &Linear,
        tokens: usize,
        gate: &mut Self::Array,
        up: &Self::Array,
        delta: &mut Self::Array,
    );
    /// The way through a mixture of experts and out of it, behind [`enter_mixture`](Self::enter_mixture): what the experts that `scores` `[T, E]` choose, and the shared one, give of
    /// `normed` `[T, D]`, weighted and summed, to `delta` `[T, D]`, whose room is twice that. `gate` and `up` `[T, F]` are work space.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    fn mix(
        &mut self,
        mixture: &Mixture,
        tokens: usize,
        scores: &Self::Array,
        normed: &Self::Array,
        gate: &mut Self::Array,
        up: &mut Self::Array,
        delta: &mut Self::Array,
    );
    /// Leaves of `x` `[T, D]` and `q` `[T, H, C]`, of two tokens or more, the last token's rows, as the first ones.
    fn keep_last(&mut self, tokens: usize, x: &mut Self::Array, q: &mut Self::Array);
    /// Adds what the last half gave to `x` `[T, D]`. `normed` is work space.
    fn add(
        &mut self,
        added: Added<'_, Self>,
        tokens: usize,
        x: &mut Self::Array,
        normed: &mut Self::Array,
    );
    /// What the last norm gives for some rows of `x` `[T, D]`, at the end of `values`.
    fn outputs(
        &mut self,
        x: &Self::Array,
        rows: Range<usize>,
        values: &mut Vec<f32>,
    ) -> Result<(), Error>;
    /// Computes the logits of rows `rows` of `x`, at most [`LOGIT_ROWS`].
    fn compute_logits(&mut self, x: &Self::Array, rows: Range<usize>);
    /// The same where only the largest of the first `of` is looked at: it is exact, and so are all that could be it; others may be coarser.
    fn compute_largest(&mut self, x: &Self::Array, rows: Range<usize>, of: usize) {
        let _ = of;
        self.compute_logits(x, rows);
    }
    /// The first `n` rows `[n, V]` of the logits that were computed last.
    fn logits(&self, n: usize) -> &[f32];
    /// Waits for what was begun. An operation that failed is told of here and from then on: those after it did
    /// nothing of use.
    fn finish(&mut self) -> Result<(), Error>;
}

/// Tokens whose logits are computed at a time: with what their codes lose just enough for AMX's tiles, few enough for a
/// large vocabulary.
pub(crate) const LOGIT_ROWS: usize = 8;

/// How a down projection's activations are quantised.
fn down_passes(down: &Linear) -> Passes {
    quant::product::down_passes(down.w.ty())
}
