//! The GPU that computes, where there is a usable one.

use cuda::device::{MemoryInfo, Properties};
use cuda::{Device, Error, Module};
use std::fs;

/// What a context takes of a device at most: 527 MiB on an H200 with driver 580.159.04, less on small GPUs. What others have taken is not
/// mistaken for it beyond this.
const CONTEXT_BYTES_MAX: u64 = 640 << 20;

/// A GPU that runs the kernels. It stays open, and its context with it, while this or a clone exists.
#[derive(Debug, Clone)]
pub struct Gpu {
    device: Device,
    opened: MemoryInfo,
}

impl Gpu {
    /// Opens a GPU by its number.
    ///
    /// # Errors
    /// If there is none, it is too old, or the driver does not run the kernels. [`Error::is_absence`] tells a machine that has none.
    pub fn open(ordinal: usize) -> Result<Self, Error> {
        let device = Device::open(ordinal)?;
        // The smallest module: a driver that refuses the kernels refuses this one.
        Module::load(&device, "read")?.kernel("read_only")?;
        let opened = device.memory()?;
        Ok(Self { device, opened })
    }

    /// The first GPU; `None` if the machine has none.
    ///
    /// # Errors
    /// If there is a driver or a GPU, and it cannot be used.
    pub fn first() -> Result<Option<Self>, Error> {
        match Self::open(0) {
            Ok(gpu) => Ok(Some(gpu)),
            Err(error) if error.is_absence() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.device.ordinal()
    }

    /// What reports call it.
    pub fn name(&self) -> &str {
        &self.properties().name
    }

    /// What a measurement of it is shaped by: its name, compute capability and size.
    pub fn key(&self) -> String {
        let p = self.properties();
        let (major, minor) = p.compute;
        format!(
            "{}, compute {major}.{minor}, {} multiprocessors",
            p.name, p.multiprocessors
        )
    }

    /// The driver: its version, and that of the CUDA it is for.
    pub fn driver(&self) -> String {
        let cuda = Device::cuda_version().map_or("CUDA".to_owned(), |(major, minor)| {
            format!("CUDA {major}.{minor}")
        });
        let text = fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
        match version_in(&text) {
            Some(version) => format!("{version}, {cuda}"),
            None => cuda,
        }
    }

    /// Bytes free and in all, now.
    ///
    /// # Errors
    /// If the driver does not say.
    pub fn memory(&self) -> Result<MemoryInfo, Error> {
        self.device.memory()
    }

    /// Bytes free when it was opened: with its context, before anything else.
    pub fn free_at_first_bytes(&self) -> u64 {
        self.opened.free_bytes
    }

    /// What the process takes of the device before anything is allocated, about.
    pub fn context_bytes(&self) -> u64 {
        let MemoryInfo {
            free_bytes,
            total_bytes,
        } = self.opened;
        total_bytes
            .saturating_sub(free_bytes)
            .min(CONTEXT_BYTES_MAX)
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    fn properties(&self) -> &Properties {
        self.device.properties()
    }
}

/// The driver's version in what its module says of itself.
fn version_in(text: &str) -> Option<&str> {
    let line = text
        .lines()
        .find(|line| line.starts_with("NVRM version:"))?;
    let is_version =
        |word: &&str| word.contains('.') && word.chars().all(|c| c == '.' || c.is_ascii_digit());
    line.split_whitespace().find(is_version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drivers_version_is_found() {
        let text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (a@b)\nGCC version:  gcc version 12.2.0\n";
        assert_eq!(version_in(text), Some("580.159.04"));
        assert_eq!(version_in("GCC version: 12.2.0"), None);
        assert_eq!(version_in(""), None);
    }

    #[test]
    fn a_machine_without_a_gpu_has_none() {
        match Gpu::first() {
            Ok(Some(gpu)) => eprintln!("skipped: this machine has a {}", gpu.name()),
            Ok(None) => assert!(Gpu::open(0).unwrap_err().is_absence()),
            Err(error) => panic!("a driver that cannot be used: {error}"),
        }
    }
}
