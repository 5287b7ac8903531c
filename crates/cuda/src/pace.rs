//! The pace of a slower link, for measurements: copies of one stream take as long as they would there.

use crate::error::Error;
use crate::kernel::{Arg, Kernel, Launch, Module};
use crate::memory::Buffer;
use crate::stream::Stream;

/// A link that was free for less has not rested: so long it may take from the end of one copy to the beginning of the next.
const SLACK_NS: u64 = 20_000;

/// A slower link.
#[derive(Debug)]
pub struct Pace {
    begin: Kernel,
    end: Kernel,
    free_at: Buffer<u64>,
    gb_s: f64,
}

impl Pace {
    /// A link of so many GB/s.
    pub fn new(stream: &Stream, gb_s: f64) -> Result<Self, Error> {
        let module = Module::load(stream.device(), "link")?;
        Ok(Self {
            begin: module.kernel("pace_begin")?,
            end: module.kernel("pace_end")?,
            free_at: Buffer::zeroed(stream, 1)?,
            gb_s,
        })
    }

    /// Gives `copy`, of so many bytes, to `stream`: always the same one.
    pub fn copy(
        &mut self,
        stream: &Stream,
        bytes: usize,
        copy: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let ns = (bytes as f64 / self.gb_s.max(1e-3)) as u64;
        let free_at = Arg::from(&mut self.free_at);
        // SAFETY: as the kernels take them.
        unsafe {
            self.begin
                .launch(stream, Launch::new(1, 1), &[free_at, Arg::from(SLACK_NS)])?;
        }
        copy()?;
        // SAFETY: as above.
        unsafe {
            self.end
                .launch(stream, Launch::new(1, 1), &[free_at, Arg::from(ns)])
        }
    }
}
