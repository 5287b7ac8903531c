//! What the device tells the host of a layer's routing, without the driver: whoever places experts, or computes some, must know who is used.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use crate::device::Device;
use crate::doorbell::PATIENCE;
use crate::error::Error;
use crate::memory::Pinned;
use crate::stream::Stream;

/// Looks at the bell between two at the clock.
const LOOKS: u32 = 1000;

/// Mapped memory that a mixer's kernels write and the host reads.
#[derive(Debug)]
pub(super) struct Told {
    bell: Pinned<u32>,
    /// Ids of a few tokens' experts `[T, used]`, or of many tokens how many use each expert, `[E]`.
    pub(super) numbers: Pinned<u32>,
    /// Inputs of a few tokens, `[T, D]`.
    pub(super) x: Pinned<f32>,
    /// Of what was told last, or is about to be.
    number: u32,
}

impl Told {
    pub(super) fn new(device: &Device, numbers: usize, values: usize) -> Result<Self, Error> {
        Ok(Self {
            bell: Pinned::new(device, 1)?,
            numbers: Pinned::new(device, numbers)?,
            x: Pinned::new(device, values)?,
            number: 0,
        })
    }

    /// Where the next one's bell is, and its number. The one before has been waited for.
    pub(super) fn next(&mut self) -> (u64, u32) {
        self.number = self.number.wrapping_add(1);
        (self.bell.address(), self.number)
    }

    /// Waits until it was told.
    ///
    /// # Errors
    /// If the device does not: what failed there.
    pub(super) fn wait(&self, stream: &Stream) -> Result<(), Error> {
        // SAFETY: aligned, inside memory that lives as long as `self`, and the host's access to it is atomic.
        let bell = unsafe { AtomicU32::from_ptr(std::ptr::from_ref(&self.bell[0]).cast_mut()) };
        let is_told = || bell.load(Ordering::Acquire) == self.number;
        let begun = Instant::now();
        loop {
            for _ in 0..LOOKS {
                if is_told() {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            if begun.elapsed() > PATIENCE {
                stream.synchronise()?;
                return if is_told() {
                    Ok(())
                } else {
                    Err(Error::Late {
                        seconds: PATIENCE.as_secs(),
                    })
                };
            }
        }
    }
}
