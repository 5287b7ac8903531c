//! All experts of a model in host memory.

use cpu::mem;

use crate::device::{Device, Owned};
use crate::error::Error;
use crate::memory::Pinned;

/// Host memory of blobs, one behind the other: the first ones pinned, so that the device copies and reads them by itself, those behind them not, where no
/// more may be pinned.
///
/// It is memory in huge pages that is registered with the driver, which is done in a fraction of the time that the driver takes to give as much; where that
/// is refused, what the driver gives.
#[derive(Debug)]
pub struct Blobs {
    device: Device,
    memory: Memory,
    pinned: usize,
}

#[derive(Debug)]
enum Memory {
    Registered(mem::Buffer<u8>),
    Given(Pinned<u8>),
}

impl Blobs {
    /// Of memory of blobs that begin at `starts`, ascending. Pins at most `most` bytes, and as much as the system lets it.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn new(
        device: &Device,
        mut memory: mem::Buffer<u8>,
        starts: &[usize],
        most: usize,
    ) -> Result<Self, Error> {
        let bytes = memory.len();
        let mut pinned = Self::pinned_part(starts, bytes, most);
        let new = |memory, pinned| Self {
            device: device.clone(),
            memory,
            pinned,
        };
        while pinned > 0 && !device.register(&mut memory, pinned)? {
            if pinned == bytes
                && let Ok(given) = Pinned::unset(device, bytes)
            {
                return Ok(new(Memory::Given(given), bytes));
            }
            pinned = Self::pinned_part(starts, bytes, pinned / 2);
        }
        Ok(new(Memory::Registered(memory), pinned))
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
        self.bytes().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that are pinned.
    pub fn pinned_bytes(&self) -> usize {
        self.pinned
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.memory {
            Memory::Registered(memory) => memory,
            Memory::Given(memory) => memory,
        }
    }

    /// All bytes, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Memory::Registered(memory) => memory,
            Memory::Given(memory) => memory,
        }
    }

    /// The device's address of byte `at`, which must be pinned with the `len` bytes from there on.
    pub(super) fn address(&self, at: usize, len: usize) -> Option<u64> {
        let is_pinned = at.checked_add(len)? <= self.pinned;
        is_pinned.then(|| self.bytes()[at..].as_ptr().addr() as u64)
    }
}

impl Drop for Blobs {
    fn drop(&mut self) {
        let Memory::Registered(memory) = &mut self.memory else {
            return;
        };
        if self.pinned > 0 {
            let nothing = mem::Buffer::new(0).expect("nothing takes no memory");
            let memory = std::mem::replace(memory, nothing);
            self.device.give_back(Owned::Registered(memory));
        }
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
