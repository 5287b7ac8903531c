//! What one token's step begins with, in host memory that kernels read: so a captured step needs no copies.

use crate::device::Device;
use crate::error::{Error, length};
use crate::memory::Pinned;

/// A token's id, its position, and the angles of up to two ropes. Written by the host before a step, read by
/// [`Product::begin`](super::Product::begin).
#[derive(Debug)]
pub struct StepRecord {
    pub(super) record: Pinned<u32>,
    pub(super) pairs: [usize; 2],
}

impl StepRecord {
    /// A record for ropes of so many pairs (0: there is no such rope).
    pub fn new(device: &Device, pairs: [usize; 2]) -> Result<Self, Error> {
        let words = 2 + 2 * (pairs[0] + pairs[1]);
        Ok(Self {
            record: Pinned::new(device, words)?,
            pairs,
        })
    }

    /// Writes a step: cosines and sines of each rope. The step before must have read its own: a stream that was synchronised, or an
    /// event after the step's `begin` that was waited for.
    pub fn write(&mut self, id: u32, position: u32, angles: [[&[f32]; 2]; 2]) -> Result<(), Error> {
        for (angles, pairs) in angles.iter().zip(self.pairs) {
            for values in angles {
                length("step", "pairs of angles", values.len(), pairs)?;
            }
        }
        let words = angles.into_iter().flatten().flatten().map(|x| x.to_bits());
        let all = [id, position].into_iter().chain(words);
        for (to, word) in self.record.iter_mut().zip(all) {
            *to = word;
        }
        Ok(())
    }
}
