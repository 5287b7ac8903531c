//! Lists on their way to the device.
//!
//! A copy of each waits in pinned memory, so that nobody waits for it, and a kernel fetches it from there: a copy of the driver's would
//! queue behind whatever else is on the way to the device.

use crate::device::Device;
use crate::error::{Error, length};
use crate::kernel::{Arg, Kernel, Launch, Module, Start};
use crate::memory::{Buffer, Pinned, Plain};
use crate::stream::Stream;

/// What a list's place is a multiple of, and bytes that the kernel copies at a time.
const WORD: usize = 8;

/// Threads of the kernel: as in `kernels/link.cu`.
const THREADS: usize = 1024;

/// Lists on their way.
#[derive(Debug)]
pub struct Outbox {
    send: Kernel,
    pinned: Pinned<u8>,
    used: usize,
}

impl Outbox {
    /// Room for so many bytes of lists at a time.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, Error> {
        Ok(Self {
            send: Module::load(device, "link")?.kernel("send")?,
            pinned: Pinned::new(device, bytes)?,
            used: 0,
        })
    }

    /// Says that the stream has been waited for: all is sent.
    pub fn clear(&mut self) {
        self.used = 0;
    }

    /// Whether nothing was sent since.
    pub fn is_clear(&self) -> bool {
        self.used == 0
    }

    /// Copies `values`, of whole words of 8 bytes each, to the first of `to`, and their number to `count`, in the stream's order. Waits for
    /// earlier lists only if there is no room beside them.
    pub fn send<T: Plain>(
        &mut self,
        stream: &Stream,
        start: Start,
        values: &[T],
        to: &mut Buffer<T>,
        count: &mut Buffer<u32>,
    ) -> Result<(), Error> {
        const OP: &str = "send";
        let (bytes, n) = (size_of_val(values), values.len() as u32);
        if !size_of::<T>().is_multiple_of(WORD) {
            length(OP, "bytes of a value", size_of::<T>(), WORD)?;
        }
        if values.len() > to.len() || count.is_empty() {
            length(OP, "values", to.len(), values.len())?;
        }
        if bytes > self.pinned.len() {
            to.upload_at(stream, 0, values)?;
            return count.upload_at(stream, 0, &[n]);
        }
        if self.used + bytes > self.pinned.len() {
            stream.synchronise()?;
            self.used = 0;
        }
        let at = self.used;
        let room = &mut self.pinned[at..at + bytes];
        // SAFETY: the room is as long as `values`, whose bytes are numbers without padding.
        unsafe {
            let from = values.as_ptr().cast::<u8>();
            std::ptr::copy_nonoverlapping(from, room.as_mut_ptr(), bytes);
        }
        self.used += bytes.next_multiple_of(WORD);
        let args = [
            Arg::from(self.pinned.address() + at as u64),
            Arg::from(to),
            Arg::from((bytes / WORD) as i32),
            Arg::from(count),
            Arg::from(n),
        ];
        // SAFETY: as the kernel takes them; lengths are checked. What is copied from the room stays there until the stream has been
        // waited for, here or by the caller of `clear`.
        unsafe {
            self.send
                .launch(stream, Launch::new(1, THREADS).start(start), &args)
        }
    }
}
