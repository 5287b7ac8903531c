//! What a measurement ran on, and whether it had the machine to itself.

use std::fs;
use std::process::Command;

use engine::probe::machine::{cpu_name, field};
use serde::Serialize;

/// Threads that this process may run at a time.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The machine and the source tree.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    pub cpu: String,
    pub cores: usize,
    pub memory_gib: f64,
    /// The setting of transparent huge pages in use.
    pub huge_pages: String,
    pub kernel: String,
    /// When the measurement began, UTC.
    pub date: String,
    /// The source tree's commit, "+" after it if there are changes that are not committed.
    pub commit: String,
}

impl Machine {
    pub fn read() -> Self {
        let meminfo = read("/proc/meminfo");
        let kib =
            field(&meminfo, "MemTotal").and_then(|v| v.split(' ').next()?.parse::<f64>().ok());
        let mut commit = output("git", &["rev-parse", "--short=12", "HEAD"]);
        if output("git", &["status", "--porcelain", "--untracked-files=no"]) != UNKNOWN {
            commit.push('+');
        }
        Self {
            cpu: cpu_name(),
            cores: cores(),
            memory_gib: kib.unwrap_or(f64::NAN) / (1 << 20) as f64,
            huge_pages: chosen(&read("/sys/kernel/mm/transparent_hugepage/enabled")),
            kernel: output("uname", &["-sr"]),
            date: output("date", &["-u", "+%Y-%m-%d %H:%M UTC"]),
            commit,
        }
    }
}

const UNKNOWN: &str = "unknown";

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The first line that a command writes.
fn output(program: &str, args: &[&str]) -> String {
    let out = Command::new(program).args(args).output();
    let line = out.ok().filter(|out| out.status.success()).and_then(|out| {
        let text = String::from_utf8_lossy(&out.stdout);
        text.lines().next().map(str::to_owned)
    });
    line.unwrap_or_else(|| UNKNOWN.to_owned())
}

/// `madvise` of `always [madvise] never`.
fn chosen(setting: &str) -> String {
    let inner = setting.split_once('[').and_then(|(_, s)| s.split_once(']'));
    inner.map_or(UNKNOWN, |(name, _)| name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_in_use_is_found() {
        assert_eq!(chosen("always [madvise] never\n"), "madvise");
        assert_eq!(chosen(""), "unknown");
    }
}
