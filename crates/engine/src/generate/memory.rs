//! What the system says about memory.

use std::fs;
use std::path::{Component, Path, PathBuf};

/// The most memory that this process has had resident so far, by the system's own count. `None` where the system does
/// not say.
pub fn peak_bytes() -> Option<u64> {
    kib_line(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// Bytes that this process could still take: what the system has, or its control groups allow if that is less. What
/// caches files counts as free, as it makes room. `None` where the system does not say.
pub fn available_bytes() -> Option<u64> {
    let system = kib_line(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    let groups = Group::of_this_process();
    let free = groups.iter().filter_map(Group::free_bytes).min();
    Some(free.map_or(system, |group| group.min(system)))
}

/// Bytes of memory that the system has, or that its control groups may take if that is less. `None` where the system does
/// not say.
pub fn total_bytes() -> Option<u64> {
    let system = kib_line(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")?;
    let groups = Group::of_this_process();
    let limit = groups.iter().filter_map(Group::limit_bytes).min();
    Some(limit.map_or(system, |group| group.min(system)))
}

/// Where control groups are found.
const GROUPS_ROOT: &str = "/sys/fs/cgroup";

/// One control group that bounds this process's memory.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    folder: PathBuf,
    version: Version,
}

/// Which generation of control groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Group {
    fn of_this_process() -> Vec<Self> {
        let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self::listed(&text, Path::new(GROUPS_ROOT))
    }

    /// The groups of `/proc/self/cgroup` and those above them, which bound it as well.
    fn listed(text: &str, root: &Path) -> Vec<Self> {
        let mut groups = Vec::new();
        for line in text.lines() {
            let mut parts = line.splitn(3, ':');
            let (Some(_), Some(controllers), Some(path)) =
                (parts.next(), parts.next(), parts.next())
            else {
                continue;
            };
            let (version, base) = if controllers.is_empty() {
                (Version::Two, root.to_owned())
            } else if controllers.split(',').any(|c| c == "memory") {
                (Version::One, root.join("memory"))
            } else {
                continue;
            };
            // A container sees its own group as the root, though the path may be the host's: then nothing is found there.
            let mut path = Path::new(path.trim_start_matches('/'));
            let outside = path.components().any(|c| c == Component::ParentDir);
            if outside {
                path = Path::new("");
            }
            for part in path.ancestors() {
                let folder = base.join(part);
                groups.push(Self { folder, version });
            }
        }
        groups
    }

    fn number(&self, one: &str, two: &str) -> Option<u64> {
        let file = match self.version {
            Version::One => one,
            Version::Two => two,
        };
        // "max" is no number: then there is no limit.
        let text = fs::read_to_string(self.folder.join(file)).ok()?;
        text.trim().parse().ok()
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.number("memory.limit_in_bytes", "memory.max")
    }

    fn free_bytes(&self) -> Option<u64> {
        let limit = self.limit_bytes()?;
        let used = self.number("memory.usage_in_bytes", "memory.current")?;
        let stat = fs::read_to_string(self.folder.join("memory.stat")).unwrap_or_default();
        let names = match self.version {
            Version::One => ["total_inactive_file", "total_active_file"],
            Version::Two => ["inactive_file", "active_file"],
        };
        let cached: u64 = stat
            .lines()
            .filter_map(|line| line.split_once(' '))
            .filter(|(name, _)| names.contains(name))
            .filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok())
            .fold(0, u64::saturating_add);
        Some(limit.saturating_sub(used.saturating_sub(cached)))
    }
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

    #[test]
    fn a_group_is_bounded_by_those_above_it() {
        let root = tempfile::tempdir().unwrap();
        let write = |folder: &str, files: &[(&str, &str)]| {
            let folder = root.path().join(folder);
            fs::create_dir_all(&folder).unwrap();
            for (name, text) in files {
                fs::write(folder.join(name), text).unwrap();
            }
        };
        write(
            "a/b",
            &[("memory.max", "max\n"), ("memory.current", "10\n")],
        );
        // 300 of the 900 in use cache files.
        let stat = "anon 600\ninactive_file 200\nactive_file 100\nfile 5000\n";
        write(
            "a",
            &[
                ("memory.max", "1000\n"),
                ("memory.current", "900\n"),
                ("memory.stat", stat),
            ],
        );
        let groups = Group::listed("0::/a/b\n", root.path());
        let free: Vec<_> = groups.iter().map(Group::free_bytes).collect();
        assert_eq!(free, [None, Some(400), None]);
        let limits: Vec<_> = groups.iter().filter_map(Group::limit_bytes).collect();
        assert_eq!(limits, [1000]);

        write(
            "memory/c",
            &[
                ("memory.limit_in_bytes", "500"),
                ("memory.usage_in_bytes", "450"),
                (
                    "memory.stat",
                    "inactive_file 7\ntotal_inactive_file 50\ntotal_active_file 1\n",
                ),
            ],
        );
        let text = "9:name=systemd:/\n4:cpu,memory:/c\nbroken\n";
        let groups = Group::listed(text, root.path());
        assert_eq!(groups.len(), 2, "{groups:?}");
        assert_eq!(groups[0].free_bytes(), Some(101));
        // What lies outside is not looked at.
        let outside = Group::listed("0::/../../x\n", root.path());
        assert_eq!(outside[0].folder, root.path());
        assert_eq!(outside.len(), 1);
    }
}
