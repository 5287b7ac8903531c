//! Pinned memory that is filled again and again, each time to be copied to a device in the background.

use crate::device::Device;
use crate::error::{Error, length};
use crate::memory::{Buffer, Pinned};
use crate::stream::{Event, Stream, Timing};

/// A piece of pinned memory: free, or on its way to a device.
#[derive(Debug)]
pub struct Slot {
    pinned: Pinned<u8>,
    arrived: Event,
    under_way: bool,
}

impl Slot {
    /// A free slot of `bytes` bytes.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, Error> {
        Ok(Self {
            pinned: Pinned::new(device, bytes)?,
            arrived: Event::new(device, Timing::Off)?,
            under_way: false,
        })
    }

    /// The slot's bytes, to be read and written. Waits until what was sent last has arrived.
    pub fn bytes(&mut self) -> Result<&mut [u8], Error> {
        self.wait()?;
        Ok(&mut self.pinned)
    }

    /// Copies the first `len` bytes to byte `at` of `to` and on, in the stream's order. Returns at once.
    pub fn send(
        &mut self,
        stream: &Stream,
        len: usize,
        to: &mut Buffer<u8>,
        at: usize,
    ) -> Result<(), Error> {
        self.wait()?;
        length(
            "staging",
            "bytes sent beyond the slot's",
            len.saturating_sub(self.pinned.len()),
            0,
        )?;
        // Set before anything is begun: what fails half-way is waited for as well.
        self.under_way = true;
        // SAFETY: the slot owns the memory, and neither gives it out nor frees it before it has waited.
        unsafe { to.upload_later(stream, at, &self.pinned[..len]) }?;
        let marked = stream.record(&self.arrived);
        if marked.is_err() {
            // Without the mark, only the stream knows when the copy is over.
            let _ = stream.synchronise();
        }
        marked
    }

    fn wait(&mut self) -> Result<(), Error> {
        if self.under_way {
            self.arrived.synchronise()?;
            self.under_way = false;
        }
        Ok(())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // What fails has been told by the stream; the driver frees pinned memory only when copies from it are over.
        let _ = self.wait();
    }
}
