//! What a server needs of a model's state: several sequences that grow side by side.

use crate::session::{Finding, Part, SequenceId, Session};
use std::fmt::Debug;

/// Bytes of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheBytes {
    /// In device memory now.
    pub device: u64,
    /// In host memory now.
    pub host: u64,
    /// Most in both.
    pub most: u64,
    /// Copied from host to device memory so far, to be attended there.
    pub streamed: u64,
}

/// The CPU's share of the cells in host memory, as it is now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GateNow {
    /// The share of the present token.
    pub share: f64,
    /// What was found and what that rests on, if enough was measured.
    pub finding: Option<Finding>,
}

/// Sequences of tokens, computed side by side. What comes of one does not depend on the others.
pub trait Sequences {
    /// Why they could not go on.
    type Error: std::error::Error;
    /// The name of one of them.
    type Id: Copy + Eq + Debug;

    /// Tokens that one of them can hold.
    fn n_ctx(&self) -> usize;
    /// Most tokens that are computed at a time.
    fn step_max(&self) -> usize;
    /// Whether a token gives the same as a prompt's and as a generated one.
    fn computes_alike(&self) -> bool;
    /// What the cache takes.
    fn bytes(&self) -> CacheBytes;
    /// The CPU's share, where there is one and it is measured.
    fn gate(&self) -> Option<GateNow>;
    /// Whether there is room for so many tokens more of some of them at the same time.
    fn has_room(&self, growing: &mut dyn Iterator<Item = (Self::Id, usize)>) -> bool;
    /// A new one, empty.
    fn create(&mut self) -> Self::Id;
    /// A new one that begins with the first `n` tokens of another, or with fewer where that is not possible. Returns how many it has.
    fn branch(&mut self, of: Self::Id, n: usize) -> (Self::Id, usize);
    /// Forgets one.
    fn forget(&mut self, sequence: Self::Id);
    /// Takes tokens. `each` gets a part's number, and the logits after its last token where they are wanted.
    ///
    /// # Errors
    /// If they cannot be computed. What the sequences hold is not known then.
    fn step(
        &mut self,
        parts: &[Part<'_, Self::Id>],
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), Self::Error>;
}

/// The selected sequence is nobody's.
impl Sequences for Session<'_> {
    type Error = crate::Error;
    type Id = SequenceId;

    fn n_ctx(&self) -> usize {
        Session::n_ctx(self)
    }

    fn step_max(&self) -> usize {
        self.ubatch()
    }

    fn computes_alike(&self) -> bool {
        Session::computes_alike(self)
    }

    fn bytes(&self) -> CacheBytes {
        let spread = self.spread();
        CacheBytes {
            device: spread.device_bytes,
            host: spread.host_bytes,
            most: self.kv_bytes(),
            streamed: self.streamed_bytes(),
        }
    }

    fn gate(&self) -> Option<GateNow> {
        let share = self.gate_share()?;
        let finding = self.gate_finding();
        Some(GateNow { share, finding })
    }

    fn has_room(&self, growing: &mut dyn Iterator<Item = (SequenceId, usize)>) -> bool {
        Session::has_room(self, growing)
    }

    fn create(&mut self) -> SequenceId {
        Session::create(self)
    }

    fn branch(&mut self, of: SequenceId, n: usize) -> (SequenceId, usize) {
        Session::branch(self, of, n)
    }

    fn forget(&mut self, sequence: SequenceId) {
        let existed = Session::forget(self, sequence);
        debug_assert!(existed, "{sequence:?} is one of them");
    }

    fn step(
        &mut self,
        parts: &[Part<'_, SequenceId>],
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), crate::Error> {
        Session::step(self, parts, each)
    }
}

impl<S: Sequences> Sequences for &mut S {
    type Error = S::Error;
    type Id = S::Id;

    fn n_ctx(&self) -> usize {
        S::n_ctx(self)
    }

    fn step_max(&self) -> usize {
        S::step_max(self)
    }

    fn computes_alike(&self) -> bool {
        S::computes_alike(self)
    }

    fn bytes(&self) -> CacheBytes {
        S::bytes(self)
    }

    fn gate(&self) -> Option<GateNow> {
        S::gate(self)
    }

    fn has_room(&self, growing: &mut dyn Iterator<Item = (S::Id, usize)>) -> bool {
        S::has_room(self, growing)
    }

    fn create(&mut self) -> S::Id {
        S::create(self)
    }

    fn branch(&mut self, of: S::Id, n: usize) -> (S::Id, usize) {
        S::branch(self, of, n)
    }

    fn forget(&mut self, sequence: S::Id) {
        S::forget(self, sequence);
    }

    fn step(
        &mut self,
        parts: &[Part<'_, S::Id>],
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), S::Error> {
        S::step(self, parts, each)
    }
}
