//! The machine that a plan is for, where nobody says that it is another one.

use crate::generate::memory;
use crate::probe::{self, Settings, Subject};
use place::limits::MEMORY_BYTES_MAX;
use place::profile::{Profile, default_profile};

/// This machine for a model: measured if it was, never measured now; else the default profile with this machine's memory.
pub fn profile(
    subject: &Subject,
    settings: &Settings,
    progress: &mut dyn probe::Progress,
) -> Profile {
    probe::cached(subject, settings, progress).unwrap_or_else(unmeasured)
}

/// The default profile with this machine's memory. Where the system does not say how much there is, as much as there can be.
pub fn unmeasured() -> Profile {
    let mut profile = default_profile();
    let bytes = |found: Option<u64>| found.unwrap_or(MEMORY_BYTES_MAX).clamp(1, MEMORY_BYTES_MAX);
    let total = bytes(memory::total_bytes());
    profile.host.memory_total_bytes = total;
    profile.host.memory_available_bytes = bytes(memory::available_bytes()).min(total);
    profile
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
        assert_eq!(Profile::from_json(&profile.to_json()).unwrap(), profile);
        if let Some(total) = memory::total_bytes() {
            assert_eq!(profile.host.memory_total_bytes, total);
            assert!(profile.host.memory_available_bytes < total);
        }
    }
}
