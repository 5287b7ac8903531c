//! What can go wrong on a device, each with what was wanted and what was found.

/// Errors of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The CPU did not answer a hand-over.
    #[error(
        "the CPU did not give its part of attention back within {seconds} s: it is too busy, or stopped"
    )]
    Late {
        /// How long the device waited.
        seconds: u64,
    },
    /// The driver's library is not there or cannot be loaded.
    #[error("no CUDA driver: {library} cannot be loaded ({reason})")]
    NoDriver {
        /// File name looked for.
        library: &'static str,
        /// What the system says.
        reason: String,
    },
    /// The driver lacks a function.
    #[error("the CUDA driver is too old: it has no {symbol}; CUDA {}.{} or newer is needed", .wanted.0, .wanted.1)]
    MissingFunction {
        /// The function.
        symbol: &'static str,
        /// The version that is needed.
        wanted: (u32, u32),
    },
    /// The driver is older than what the kernels were compiled for.
    #[error("the CUDA driver is too old: it is for CUDA {}.{}, but {}.{} or newer is needed", .found.0, .found.1, .wanted.0, .wanted.1)]
    OldDriver {
        /// The version found.
        found: (u32, u32),
        /// The version that is needed.
        wanted: (u32, u32),
    },
    /// There is no such device.
    #[error("there is no device cuda:{ordinal}: the driver sees {count}")]
    NoDevice {
        /// The number asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The device is older than what the kernels were compiled for.
    #[error("cuda:{ordinal} ({name}) has compute capability {}.{}, but {}.{} or newer is needed", .found.0, .found.1, .wanted.0, .wanted.1)]
    OldDevice {
        /// Its number.
        ordinal: usize,
        /// Its name.
        name: String,
        /// Its compute capability.
        found: (u32, u32),
        /// The one needed.
        wanted: (u32, u32),
    },
    /// Device memory is exhausted.
    #[error(
        "cuda:{ordinal} is out of memory: {wanted_bytes} bytes wanted, {free_bytes} of {total_bytes} free"
    )]
    OutOfMemory {
        /// The device.
        ordinal: usize,
        /// Bytes that were asked for.
        wanted_bytes: u64,
        /// Bytes free at that time.
        free_bytes: u64,
        /// Bytes the device has.
        total_bytes: u64,
    },
    /// The driver gives no pinned host memory.
    #[error("out of pinned host memory: {wanted_bytes} bytes wanted")]
    OutOfPinned {
        /// Bytes that were asked for.
        wanted_bytes: u64,
    },
    /// A call of the driver failed.
    #[error("{call} failed on cuda:{ordinal}: {name} ({code}): {message}")]
    Call {
        /// The function.
        call: &'static str,
        /// The device.
        ordinal: usize,
        /// The driver's number.
        code: i32,
        /// The driver's name of it.
        name: String,
        /// The driver's explanation.
        message: String,
    },
    /// PTX does not compile on this device.
    #[error("kernels of {module} do not compile on cuda:{ordinal}: {log}")]
    Compile {
        /// The module's name.
        module: String,
        /// The device.
        ordinal: usize,
        /// What the driver's compiler says.
        log: String,
    },
    /// There is no PTX of this name.
    #[error("there is no kernel module {module}")]
    NoModule {
        /// The name.
        module: String,
    },
    /// A length does not fit an operation.
    #[error("{op}: {what} is {found}, expected {wanted}")]
    Length {
        /// The operation.
        op: &'static str,
        /// Of what.
        what: &'static str,
        /// As given.
        found: usize,
        /// As it must be.
        wanted: usize,
    },
    /// A head size that a cache type cannot store or a kernel cannot attend.
    #[error(
        "attention over {format}: the head size is {found}, expected a multiple of {multiple} up to {most}"
    )]
    Head {
        /// The cache type's name.
        format: &'static str,
        /// The head size.
        found: usize,
        /// What divides the sizes that can be stored.
        multiple: usize,
        /// The largest.
        most: usize,
    },
    /// A format that an operation has no kernel for.
    #[error("{op}: no kernel for {format}")]
    Format {
        /// The operation.
        op: &'static str,
        /// The format's name.
        format: &'static str,
    },
}

/// Checks a length.
pub(crate) fn length(
    op: &'static str,
    what: &'static str,
    found: usize,
    wanted: usize,
) -> Result<(), Error> {
    if found == wanted {
        Ok(())
    } else {
        Err(Error::Length {
            op,
            what,
            found,
            wanted,
        })
    }
}
