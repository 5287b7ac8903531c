//! All experts of a model in host memory.

use cpu::mem;

use crate::memory::Pinned;

/// Host memory of blobs, one behind the other: the first ones pinned, so that the device copies and reads them by itself, those behind them not, where no
/// more may be pinned. A blob lies in one of both.
#[derive(Debug)]
pub struct Blobs {
    pinned: Pinned<u8>,
    pageable: mem::Buffer<u8>,
}

impl Blobs {
    /// Of both memories.
    pub fn new(pinned: Pinned<u8>, pageable: mem::Buffer<u8>) -> Self {
        Self { pinned, pageable }
    }

    /// Where all of them are pinned.
    pub fn all_pinned(pinned: Pinned<u8>) -> Self {
        let nothing = mem::Buffer::new(0).expect("nothing takes no memory");
        Self::new(pinned, nothing)
    }

    /// How many bytes to pin if at most `most` may be: whole blobs, which begin at `starts`, ascending, and end at `bytes`.
    pub fn pinned_part(starts: &[usize], bytes: usize, most: usize) -> usize {
        if most >= bytes {
            return bytes;
        }
        let after = starts.partition_point(|&start| start <= most);
        starts[..after].last().copied().unwrap_or(0)
    }

    /// Bytes of all.
    pub fn len(&self) -> usize {
        self.pinned.len() + self.pageable.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that are pinned.
    pub fn pinned_bytes(&self) -> usize {
        self.pinned.len()
    }

    /// What lies from byte `at` on in the same memory; nothing beyond all of it.
    pub fn from(&self, at: usize) -> &[u8] {
        let of_rest = |at| self.pageable.get(at..).unwrap_or_default();
        match at.checked_sub(self.pinned.len()) {
            None => &self.pinned[at..],
            Some(at) => of_rest(at),
        }
    }

    /// Both memories, to be written.
    pub fn memories(&mut self) -> [&mut [u8]; 2] {
        [&mut self.pinned, &mut self.pageable]
    }

    /// The device's address of byte `at`, which must be pinned with the `len` bytes from there on.
    pub(super) fn address(&self, at: usize, len: usize) -> Option<u64> {
        let is_pinned = at.checked_add(len)? <= self.pinned.len();
        is_pinned.then(|| self.pinned.address() + at as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_blobs_are_pinned() {
        let starts = [0, 128, 192, 512];
        let found = [0, 1, 127, 128, 200, 511, 512, 639, 640, usize::MAX];
        let expected = [0, 0, 0, 128, 192, 192, 512, 512, 640, 640];
        assert_eq!(
            found.map(|most| Blobs::pinned_part(&starts, 640, most)),
            expected
        );
        // Behind other memory the first blob may begin later.
        assert_eq!(Blobs::pinned_part(&[64, 128], 200, 63), 0);
        assert_eq!(Blobs::pinned_part(&[], 0, 7), 0);
    }
}
