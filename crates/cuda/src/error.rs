//! What can go wrong on a device, each with what was wanted and what was found.

use crate::driver::OUT_OF_MEMORY;

const MIB: u64 = 1 << 20;

/// What the driver says where it sees no device.
const NO_DEVICE: i32 = 100;

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
        "cuda:{ordinal} is out of memory: {} MiB ({wanted_bytes} bytes) wanted, {} MiB of {} MiB free",
        wanted_bytes.div_ceil(MIB), free_bytes / MIB, total_bytes / MIB
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
    #[error(
        "out of pinned host memory: {} MiB ({wanted_bytes} bytes) wanted",
        wanted_bytes.div_ceil(MIB)
    )]
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

impl Error {
    /// Whether there simply is no GPU or no driver, which is no fault.
    pub fn is_absence(&self) -> bool {
        match self {
            // A library that is there and cannot be loaded, or lacks another one, is a fault.
            Self::NoDriver { library, reason } => {
                cfg!(windows)
                    || reason.starts_with(library) && reason.contains("No such file or directory")
            }
            Self::NoDevice { count, .. } => *count == 0,
            Self::Call { call, code, .. } => *call == "cuInit" && *code == NO_DEVICE,
            _ => false,
        }
    }

    /// Whether memory ran out, the device's or pinned memory of the host.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } | Self::OutOfPinned { .. } => true,
            Self::Call { code, .. } => *code == OUT_OF_MEMORY,
            _ => false,
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_gpu_is_no_fault_and_a_broken_driver_is() {
        let driver = |reason: &str| Error::NoDriver {
            library: "libcuda.so.1",
            reason: reason.into(),
        };
        let missing = "libcuda.so.1: cannot open shared object file: No such file or directory";
        assert!(driver(missing).is_absence());
        let other = "libnvidia-x.so: cannot open shared object file: No such file or directory";
        for broken in [
            other,
            "libcuda.so.1: file too short",
            "libcuda.so.1: invalid ELF header",
        ] {
            assert_eq!(driver(broken).is_absence(), cfg!(windows), "{broken}");
        }
        let none = |count| Error::NoDevice { ordinal: 0, count };
        assert!(none(0).is_absence() && !none(1).is_absence());
        let call = |call, code| Error::Call {
            call,
            ordinal: 0,
            code,
            name: String::new(),
            message: String::new(),
        };
        assert!(call("cuInit", NO_DEVICE).is_absence());
        assert!(!call("cuInit", 999).is_absence() && !call("cuMemAlloc", NO_DEVICE).is_absence());
        assert!(call("cuCtxCreate", OUT_OF_MEMORY).is_out_of_memory());
    }

    #[test]
    fn exhausted_memory_says_what_was_wanted_and_what_is_free() {
        let error = Error::OutOfMemory {
            ordinal: 1,
            wanted_bytes: (5 << 20) + 1,
            free_bytes: (4 << 20) - 1,
            total_bytes: 8 << 20,
        };
        let text = error.to_string();
        for part in [
            "cuda:1",
            "6 MiB (5242881 bytes) wanted",
            "3 MiB of 8 MiB free",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(error.is_out_of_memory() && !error.is_absence());
    }
}
