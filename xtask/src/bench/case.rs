//! What is measured: `pp512`, `tg128`, `tg32@d4096`.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

/// One case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    pub work: Work,
    /// Tokens in the context before.
    pub depth: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// A prompt of this many tokens.
    Prompt(usize),
    /// The generation of this many tokens.
    Generate(usize),
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.work {
            Work::Prompt(n) => write!(f, "pp{n}")?,
            Work::Generate(n) => write!(f, "tg{n}")?,
        }
        match self.depth {
            0 => Ok(()),
            depth => write!(f, "@d{depth}"),
        }
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let parse = || {
            let (work, depth) = match s.split_once('@') {
                Some((work, depth)) => (work, depth.trim_start().strip_prefix('d')?.parse().ok()?),
                None => (s, 0),
            };
            let (kind, n) = work.trim_end().split_at_checked(2)?;
            let n = n.parse().ok().filter(|&n| n > 0)?;
            let work = match kind {
                "pp" => Work::Prompt(n),
                "tg" => Work::Generate(n),
                _ => return None,
            };
            Some(Self { work, depth })
        };
        parse().ok_or_else(|| format!("{s:?} is no case: expected ppN, tgN, ppN@dD or tgN@dD"))
    }
}

impl Serialize for Case {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_cases_belong_together() {
        for name in ["pp512", "tg1", "pp64@d128", "tg32@d4096"] {
            assert_eq!(name.parse::<Case>().unwrap().to_string(), name);
        }
        let depth = Case {
            work: Work::Generate(32),
            depth: 4096,
        };
        assert_eq!("tg32 @ d4096".parse(), Ok(depth));
        for bad in [
            "", "p", "pp", "pp0", "ppx", "xx12", "tg1@", "tg1@4", "tg1@dx", "é12", "tg-1",
        ] {
            assert!(bad.parse::<Case>().is_err(), "{bad}");
        }
    }
}
