//! What can go wrong while the machine is measured.

use std::path::PathBuf;

/// Errors of probes.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,
    /// Not enough memory.
    #[error("{what}: {source}")]
    Memory {
        /// What it was for.
        what: &'static str,
        /// How much.
        source: cpu::mem::OutOfMemory,
    },
    /// The system would not start threads.
    #[error(transparent)]
    Threads(#[from] cpu::pool::SpawnError),
    /// Memory did not hold what was written to it, or a read was left out.
    #[error("{what} gave the sum {found:#x}, expected {expected:#x}")]
    Sum {
        /// Which measurement.
        what: &'static str,
        /// Of what was read.
        found: u32,
        /// Of what was written.
        expected: u32,
    },
    /// A GPU could not be measured.
    #[error(transparent)]
    Device(#[from] cuda::Error),
    /// No session takes chunks of that size.
    #[error("a ubatch of {0} tokens: expected 1 to {max}", max = crate::session::UBATCH_MAX)]
    Ubatch(usize),
    /// Without it nothing can be planned.
    #[error("the system does not say how much memory it has")]
    MemoryUnknown,
    /// There is no folder for the cache.
    #[error("no cache folder is known: set SPILLGATE_CACHE or HOME")]
    NoCacheDir,
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
}

impl Error {
    pub(super) fn memory(what: &'static str) -> impl FnOnce(cpu::mem::OutOfMemory) -> Self {
        move |source| Self::Memory { what, source }
    }

    pub(super) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}
