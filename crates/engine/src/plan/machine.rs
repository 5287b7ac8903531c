//! The machine that a plan is for, where nobody says that it is another one.

use crate::generate::memory;
use crate::gpu::Gpu;
use crate::probe::{self, Settings, Subject};
use cuda::device::MemoryInfo;
use place::limits::MEMORY_BYTES_MAX;
use place::profile::{self, Profile, default_profile};

/// Whose rates stand in for those of a GPU that was not measured.
const DEVICE_EXAMPLE: &str = "24gb-pcie4-ddr5";

/// This machine for a model: measured if it was, never measured now; else the default profile with this machine's memory. With
/// `settings`' GPU, if there is one.
pub fn profile(
    subject: &Subject,
    settings: &Settings,
    progress: &mut dyn probe::Progress,
) -> Profile {
    let cached = probe::cached(subject, settings, progress);
    cached.unwrap_or_else(|| unmeasured(settings.gpu.as_ref()))
}

/// The default profile with this machine's memory, and a GPU's. Where the system does not say how much there is, as much as there can be.
pub fn unmeasured(gpu: Option<&Gpu>) -> Profile {
    let mut profile = default_profile();
    let bytes = |found: Option<u64>| found.unwrap_or(MEMORY_BYTES_MAX).clamp(1, MEMORY_BYTES_MAX);
    let total = bytes(memory::total_bytes());
    profile.host.memory_total_bytes = total;
    profile.host.memory_available_bytes = bytes(memory::available_bytes()).min(total);
    profile.device = gpu.and_then(|gpu| {
        let mut device = default_device();
        set_memory(&mut device, gpu.memory().ok()?, gpu.context_bytes());
        profile.key.device = gpu.name().to_owned();
        Some(device)
    });
    profile
}

/// The guess for a GPU that was not measured.
pub(crate) fn default_device() -> profile::Device {
    let example = profile::example(DEVICE_EXAMPLE).expect("it ships");
    example.device.expect("its name says that it has one")
}

/// Says what a device has, and has free.
pub(crate) fn set_memory(device: &mut profile::Device, memory: MemoryInfo, context_bytes: u64) {
    let total = memory.total_bytes.clamp(1, MEMORY_BYTES_MAX);
    device.total_bytes = total;
    // Plans need one byte at least; in it nothing fits.
    device.free_bytes = memory.free_bytes.clamp(1, total);
    device.context_bytes = context_bytes.min(total);
}

#[cfg(test)]
mod tests {
    use super::*;
    use place::profile::Source;

    #[test]
    fn a_machine_that_was_not_measured_is_a_guess_with_true_memory() {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings {
            dir: Some(dir.path().to_owned()),
            ..Settings::default()
        };
        let profile = profile(&Subject::ordinary(), &settings, &mut ());
        assert_eq!(profile.source, Source::Default);
        assert_eq!(profile.device, None);
        assert_eq!(Profile::from_json(&profile.to_json()).unwrap(), profile);
        if let Some(total) = memory::total_bytes() {
            assert_eq!(profile.host.memory_total_bytes, total);
            assert!(profile.host.memory_available_bytes < total);
        }
    }

    #[test]
    fn a_devices_memory_is_what_the_driver_says() {
        let mut profile = default_profile();
        for (free_bytes, total_bytes, expected) in [
            (5 << 30, 8 << 30, (5 << 30, 8 << 30)),
            (0, 8 << 30, (1, 8 << 30)),
            (0, 0, (1, 1)),
            (u64::MAX, u64::MAX, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX)),
        ] {
            let mut device = default_device();
            let memory = MemoryInfo {
                free_bytes,
                total_bytes,
            };
            set_memory(&mut device, memory, 1 << 29);
            assert_eq!((device.free_bytes, device.total_bytes), expected);
            profile.device = Some(device);
            profile.validate().unwrap();
        }
    }
}
