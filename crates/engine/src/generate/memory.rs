//! What the system says about memory.

use std::fs;

/// The most memory that this process has had resident so far, by the system's own count. `None` where the system does
/// not say.
pub fn peak_bytes() -> Option<u64> {
    kib_line(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// Bytes that this process could still take: what the system has, or its control group allows if that is less. `None`
/// where the system does not say.
pub fn available_bytes() -> Option<u64> {
    let system = kib_line(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    Some(cgroup_free_bytes().map_or(system, |group| group.min(system)))
}

/// Bytes of memory that the system has, or that its control group may take if that is less. `None` where the system does
/// not say.
pub fn total_bytes() -> Option<u64> {
    let system = kib_line(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")?;
    Some(cgroup_bytes("memory.max").map_or(system, |group| group.min(system)))
}

fn cgroup_free_bytes() -> Option<u64> {
    Some(cgroup_bytes("memory.max")?.saturating_sub(cgroup_bytes("memory.current")?))
}

/// A number of this process's control group.
fn cgroup_bytes(file: &str) -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    // "max" is no number: then there is no limit.
    fs::read_to_string(format!("/sys/fs/cgroup{path}/{file}"))
        .ok()?
        .trim()
        .parse()
        .ok()
}

/// A line of the form `Key:   123 kB`.
fn kib_line(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn the_peak_follows_what_is_touched() {
        let before = peak_bytes().unwrap();
        let ballast = std::hint::black_box(vec![1u8; 64 << 20]);
        let after = peak_bytes().unwrap();
        assert!(ballast.iter().all(|&b| b == 1));
        // Other tests run beside this one, so the peak may have been higher before; it never falls.
        assert!(after >= before && after >= 64 << 20, "{before} {after}");
        assert!(available_bytes().unwrap() > 0);
        assert!(total_bytes().unwrap() >= after);
    }

    #[test]
    fn lines_of_the_system_are_read() {
        let text = "MemTotal:  100 kB\nMemAvailable:    7 kB\n";
        assert_eq!(kib_line(text, "MemAvailable:"), Some(7168));
        assert_eq!(kib_line(text, "MemFree:"), None);
        assert_eq!(kib_line("X: 1", "X:"), None);
    }
}
