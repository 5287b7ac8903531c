//! What of the processor's time others took while something was measured.

use std::fs;

/// Processor time so far, in the system's ticks: of everything, and of this process and the children that it waited for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ticks {
    all: f64,
    busy: f64,
    own: f64,
}

impl Ticks {
    /// `None` where the system does not say.
    pub fn now() -> Option<Self> {
        let read = |path| fs::read_to_string(path).ok();
        Self::parse(&read("/proc/stat")?, &read("/proc/self/stat")?)
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
        // After the name in parentheses: state is field 3, user and system time are 14 and 15, the children's 16 and 17.
        let own: Vec<&str> = own.rsplit_once(')')?.1.split_whitespace().collect();
        let ticks = own.get(11..15)?.iter().map(|n| n.parse::<f64>().ok());
        Some(Self {
            all,
            busy: all - cpu[3] - cpu[4],
            own: ticks.sum::<Option<f64>>()?,
        })
    }

    /// Ticks of others since `self`: neither idle, nor of this process and its children.
    pub fn of_others(&self, now: &Self) -> f64 {
        ((now.busy - self.busy) - (now.own - self.own)).max(0.0)
    }

    /// The same as a share of the machine's processor time.
    pub fn others(&self, now: &Self) -> f64 {
        (self.of_others(now) / (now.all - self.all).max(1.0)).clamp(0.0, 1.0)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// So many ticks of everything, of which this process and others took some.
    pub(crate) fn ticks(all: f64, own: f64, others: f64) -> Ticks {
        Ticks {
            all,
            busy: own + others,
            own,
        }
    }

    #[test]
    fn others_are_what_is_neither_idle_nor_ours() {
        let own = |own, u, s| format!("12 (a b) c) S 1 1 1 0 -1 0 0 0 0 0 {own} 6 {u} {s} 20 0");
        let stat = "cpu  10 0 5 100 5 0 0 0 9 0\ncpu0 1\n";
        let before = Ticks::parse(stat, &own(5, 1, 1)).unwrap();
        let expected = Ticks {
            all: 120.0,
            busy: 15.0,
            own: 13.0,
        };
        assert_eq!(before, expected);
        // 100 ticks more: 40 idle, 60 busy, 10 of them in this process and 40 in children.
        let stat = "cpu  60 0 15 140 5 0 0 0 9 0\n";
        let after = Ticks::parse(stat, &own(15, 31, 11)).unwrap();
        assert_eq!(before.others(&after), 0.1);
        assert_eq!(before.of_others(&after), 10.0);
        assert_eq!(after.others(&before), 0.0);
        assert_eq!(Ticks::parse("cpu 1 2", &own(1, 1, 1)), None);
        assert_eq!(Ticks::parse("", ""), None);
        assert_eq!(Ticks::parse("cpu  1 2 3 4 5 6 7 8", "1 (a) S 1"), None);
    }

    #[test]
    fn this_system_counts_or_says_nothing() {
        if let Some(now) = Ticks::now() {
            assert!(now.all >= now.busy && now.own >= 0.0);
        }
    }
}
