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

/// Processor time so far, in the system's ticks: of everything, and of the children that this process waited for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ticks {
    all: f64,
    busy: f64,
    children: f64,
}

impl Ticks {
    /// `None` where the system does not say.
    pub fn now() -> Option<Self> {
        Self::parse(&read("/proc/stat"), &read("/proc/self/stat"))
    }

    fn parse(stat: &str, own: &str) -> Option<Self> {
        let cpu: Vec<f64> = stat
            .lines()
            .next()?
            .strip_prefix("cpu ")?
            .split_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()
            .ok()?;
        // user nice system idle iowait irq softirq steal; what follows is counted in user and nice already.
        let cpu = cpu.get(..8)?;
        let all = cpu.iter().sum();
        // After the name in parentheses: state is field 3, the children's user and system time are 16 and 17.
        let own: Vec<&str> = own.rsplit_once(')')?.1.split_whitespace().collect();
        let tick = |i: usize| own.get(i)?.parse::<f64>().ok();
        Some(Self {
            all,
            busy: all - cpu[3] - cpu[4],
            children: tick(13)? + tick(14)?,
        })
    }

    /// The share of the machine's processor time that went to others since `self`: neither idle, nor children.
    pub fn others(&self, now: &Self) -> f64 {
        let others = (now.busy - self.busy) - (now.children - self.children);
        (others / (now.all - self.all).max(1.0)).clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_in_use_is_found() {
        assert_eq!(chosen("always [madvise] never\n"), "madvise");
        assert_eq!(chosen(""), "unknown");
    }

    #[test]
    fn others_are_what_is_neither_idle_nor_ours() {
        let own = |u, s| format!("12 (a b) c) S 1 1 1 0 -1 0 0 0 0 0 5 6 {u} {s} 20 0");
        let before = Ticks::parse("cpu  10 0 5 100 5 0 0 0 9 0\ncpu0 1\n", &own(1, 1)).unwrap();
        assert_eq!(
            before,
            Ticks {
                all: 120.0,
                busy: 15.0,
                children: 2.0
            }
        );
        // 100 ticks more: 40 idle, 60 busy, 50 of them in children.
        let after = Ticks::parse("cpu  60 0 15 140 5 0 0 0 9 0\n", &own(41, 11)).unwrap();
        assert_eq!(before.others(&after), 0.1);
        assert_eq!(Ticks::parse("cpu 1 2", &own(1, 1)), None);
        assert_eq!(Ticks::parse("", ""), None);
    }
}
