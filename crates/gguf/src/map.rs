//! The only unsafe code here: mapping a file.

#![allow(
    unsafe_code,
    reason = "a mapping cannot be made without; the reasons are at the call"
)]

use std::fs::File;
use std::io;

use memmap2::{Mmap, MmapOptions};

/// Maps the first `len` bytes of a file, read-only.
pub(crate) fn map(file: &File, len: usize) -> io::Result<Mmap> {
    // SAFETY: The mapping is private and read-only, so nothing in this process changes its bytes, and `len` is at most the
    // file's size as its caller has just read it, so all pages have a file behind them. What remains is another process that
    // changes or cuts off the file while it is in use. That cannot be excluded by any reader. It is documented at `MapMode`,
    // `Part::bytes` looks at the size again before it gives bytes out, and `MapMode::Read` is there for who cannot rule it out.
    // Nothing that this crate checks and later relies on is read from the mapping twice.
    unsafe { MmapOptions::new().len(len).map(file) }
}
