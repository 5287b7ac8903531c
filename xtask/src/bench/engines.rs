//! The engines that are compared: how a case is asked of each, in which settings, and how their answers are read.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::case::{Case, Work};

/// Command lines that are alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    Spillgate,
    LlamaCpp,
    IkLlamaCpp,
}

/// One way to run an engine.
#[derive(Debug, PartialEq)]
pub struct Setting {
    pub family: Family,
    pub name: &'static str,
    pub args: &'static [&'static str],
    /// Quantised caches only pay, and so are only tried, where there is much in them.
    pub depth_only: bool,
}

/// Every setting of every engine. Ours is compared in the first of its own, whatever the others show.
#[rustfmt::skip]
pub const SETTINGS: &[Setting] = &[
    Setting { family: Family::Spillgate,  name: "KV f16",                 args: &[], depth_only: false },
    Setting { family: Family::Spillgate,  name: "KV q8_0",                args: &["--cache-type-k", "q8_0", "--cache-type-v", "q8_0"], depth_only: true },
    Setting { family: Family::LlamaCpp,   name: "fa 0",                   args: &["-fa", "0"], depth_only: false },
    Setting { family: Family::LlamaCpp,   name: "fa 1",                   args: &["-fa", "1"], depth_only: false },
    Setting { family: Family::LlamaCpp,   name: "fa 1, KV q8_0",          args: &["-fa", "1", "-ctk", "q8_0", "-ctv", "q8_0"], depth_only: true },
    Setting { family: Family::IkLlamaCpp, name: "fa 0",                   args: &["-fa", "0"], depth_only: false },
    Setting { family: Family::IkLlamaCpp, name: "fa 1",                   args: &["-fa", "1"], depth_only: false },
    Setting { family: Family::IkLlamaCpp, name: "fa 0, repacked",         args: &["-fa", "0", "-rtr", "1"], depth_only: false },
    Setting { family: Family::IkLlamaCpp, name: "fa 1, repacked",         args: &["-fa", "1", "-rtr", "1"], depth_only: false },
    Setting { family: Family::IkLlamaCpp, name: "fa 1, KV q8_0, repacked", args: &["-fa", "1", "-rtr", "1", "-ctk", "q8_0", "-ctv", "q8_0"], depth_only: true },
];

/// A program to measure.
#[derive(Debug, Clone, Serialize)]
pub struct Engine {
    pub name: String,
    pub path: PathBuf,
    pub family: Family,
    /// Arguments of every run.
    pub args: Vec<String>,
}

/// What one run said.
#[derive(Debug, PartialEq)]
pub struct Answer {
    pub tok_s: f64,
    /// What the engine says of itself: its build, or the instruction set it chose.
    pub about: String,
}

impl Engine {
    /// Our own program.
    pub fn ours(path: &Path, args: Vec<String>) -> Self {
        Self {
            name: "spillgate".to_owned(),
            path: path.to_owned(),
            family: Family::Spillgate,
            args,
        }
    }

    /// A llama-bench; its `--help` says whose.
    pub fn peer(name: &str, path: &Path) -> Result<Self> {
        let out = Command::new(path).arg("--help").output();
        let out = out.with_context(|| format!("cannot run {}", path.display()))?;
        let help = String::from_utf8_lossy(&out.stdout).into_owned()
            + &String::from_utf8_lossy(&out.stderr);
        let family = family(&help)
            .with_context(|| format!("{} is no llama-bench that is known here", path.display()))?;
        Ok(Self {
            name: name.to_owned(),
            path: path.to_owned(),
            family,
            args: Vec::new(),
        })
    }

    /// The settings to try for a case.
    pub fn settings(&self, case: Case) -> impl Iterator<Item = &'static Setting> + use<> {
        let family = self.family;
        let fits = move |s: &&Setting| s.family == family && (case.depth > 0 || !s.depth_only);
        SETTINGS.iter().filter(fits)
    }

    /// The arguments that ask for one sample; `None` if this engine cannot measure the case.
    pub fn command(
        &self,
        setting: &Setting,
        model: &Path,
        case: Case,
        threads: usize,
    ) -> Option<Vec<String>> {
        let (prompt, generate) = match case.work {
            Work::Prompt(n) => (n, 0),
            Work::Generate(n) => (0, n),
        };
        let text = model.display();
        let line = match (self.family, case) {
            (Family::Spillgate, _) => {
                format!("-p {prompt} -n {generate} -d {} --json", case.depth)
            }
            (Family::LlamaCpp, _) => {
                format!("-p {prompt} -n {generate} -d {} -o json", case.depth)
            }
            (Family::IkLlamaCpp, Case { depth: 0, .. }) => {
                format!("-p {prompt} -n {generate} -o json")
            }
            // It times generation after a prompt, but no prompt after another.
            (
                Family::IkLlamaCpp,
                Case {
                    work: Work::Generate(n),
                    depth,
                },
            ) => {
                format!("-p 0 -n 0 -gp {depth},{n} -o json")
            }
            (
                Family::IkLlamaCpp,
                Case {
                    work: Work::Prompt(_),
                    ..
                },
            ) => return None,
        };
        let mut args = match self.family {
            Family::Spillgate => vec!["bench".to_owned(), text.to_string()],
            Family::LlamaCpp | Family::IkLlamaCpp => vec!["-m".to_owned(), text.to_string()],
        };
        args.extend(line.split(' ').map(str::to_owned));
        args.extend([
            "-r".to_owned(),
            "1".to_owned(),
            "-t".to_owned(),
            threads.to_string(),
        ]);
        args.extend(setting.args.iter().map(|&arg| arg.to_owned()));
        args.extend(self.args.iter().cloned());
        Some(args)
    }

    /// Takes one sample.
    pub fn sample(&self, args: &[String]) -> Result<Answer> {
        let out = Command::new(&self.path).args(args).output();
        let out = out.with_context(|| format!("cannot run {}", self.path.display()))?;
        if !out.status.success() {
            let stderr = String::from_utf8_lossy(&out.stderr);
            let last = stderr.lines().rfind(|line| !line.trim().is_empty());
            bail!("{}: {}", out.status, last.unwrap_or("no message"));
        }
        let text = String::from_utf8_lossy(&out.stdout);
        match self.family {
            Family::Spillgate => spillgate_answer(&text),
            Family::LlamaCpp | Family::IkLlamaCpp => llama_answer(&text),
        }
    }
}

fn family(help: &str) -> Option<Family> {
    if help.contains("--run-time-repack") {
        Some(Family::IkLlamaCpp)
    } else if help.contains("--n-depth") {
        Some(Family::LlamaCpp)
    } else {
        None
    }
}

#[derive(Deserialize)]
struct SpillgateReport {
    isa: String,
    cases: Vec<SpillgateCase>,
}

#[derive(Deserialize)]
struct SpillgateCase {
    tok_s: Vec<f64>,
}

fn spillgate_answer(text: &str) -> Result<Answer> {
    let report: SpillgateReport = serde_json::from_str(text).context("unexpected answer")?;
    let [SpillgateCase { tok_s }] = &report.cases[..] else {
        bail!("{} cases answered, expected 1", report.cases.len());
    };
    Ok(Answer {
        tok_s: one(tok_s)?,
        about: report.isa,
    })
}

/// llama-bench writes one array, ik_llama.cpp sometimes with other lines around it.
fn llama_answer(text: &str) -> Result<Answer> {
    let line = |wanted: char| {
        text.match_indices('\n')
            .find(|(i, _)| text[i + 1..].starts_with(wanted))
    };
    let begin = if text.starts_with('[') {
        0
    } else {
        line('[').context("no JSON in the answer")?.0 + 1
    };
    let mut values = serde_json::Deserializer::from_str(&text[begin..]).into_iter::<Vec<Value>>();
    let tests = values.next().context("no JSON in the answer")??;
    let [test] = &tests[..] else {
        bail!("{} tests answered, expected 1", tests.len());
    };
    let samples = test["samples_ts"].as_array();
    let samples = samples.ok_or_else(|| anyhow!("no samples_ts in the answer"))?;
    let rates: Vec<f64> = samples.iter().filter_map(Value::as_f64).collect();
    let commit = test["build_commit"].as_str().unwrap_or("unknown");
    Ok(Answer {
        tok_s: one(&rates)?,
        about: format!("build {commit} ({})", test["build_number"]),
    })
}

fn one(samples: &[f64]) -> Result<f64> {
    match samples {
        &[x] if x.is_finite() && x > 0.0 => Ok(x),
        _ => bail!("samples {samples:?}, expected one rate"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(family: Family) -> Engine {
        Engine {
            name: "x".to_owned(),
            path: PathBuf::from("/bin/x"),
            family,
            args: vec!["--more".to_owned()],
        }
    }

    fn line(family: Family, case: &str, setting: usize) -> Option<String> {
        let case = case.parse().unwrap();
        let engine = engine(family);
        let setting = engine.settings(case).nth(setting).unwrap();
        let args = engine.command(setting, Path::new("m.gguf"), case, 2)?;
        Some(args.join(" "))
    }

    #[test]
    fn each_engine_is_asked_in_its_own_words() {
        let ask = |family, case, setting| line(family, case, setting).unwrap();
        assert_eq!(
            ask(Family::Spillgate, "tg32@d4096", 1),
            "bench m.gguf -p 0 -n 32 -d 4096 --json -r 1 -t 2 --cache-type-k q8_0 --cache-type-v q8_0 --more"
        );
        assert_eq!(
            ask(Family::LlamaCpp, "pp512", 0),
            "-m m.gguf -p 512 -n 0 -d 0 -o json -r 1 -t 2 -fa 0 --more"
        );
        assert_eq!(
            ask(Family::IkLlamaCpp, "tg128", 3),
            "-m m.gguf -p 0 -n 128 -o json -r 1 -t 2 -fa 1 -rtr 1 --more"
        );
        assert_eq!(
            ask(Family::IkLlamaCpp, "tg32@d64", 4),
            "-m m.gguf -p 0 -n 0 -gp 64,32 -o json -r 1 -t 2 -fa 1 -rtr 1 -ctk q8_0 -ctv q8_0 --more"
        );
        assert_eq!(line(Family::IkLlamaCpp, "pp512@d64", 0), None);
    }

    #[test]
    fn quantised_caches_are_for_depth() {
        for family in [Family::Spillgate, Family::LlamaCpp, Family::IkLlamaCpp] {
            let count = |case: &str| engine(family).settings(case.parse().unwrap()).count();
            assert_eq!(count("tg1") + 1, count("tg1@d1"), "{family:?}");
        }
    }

    #[test]
    fn help_tells_peers_apart() {
        let ik = "-rtr, --run-time-repack <0|1>";
        assert_eq!(family(ik), Some(Family::IkLlamaCpp));
        assert_eq!(family("-d, --n-depth <n>"), Some(Family::LlamaCpp));
        assert_eq!(family("usage: ls"), None);
    }

    #[test]
    fn answers_are_read() {
        let test = r#"{"build_commit": "abc", "build_number": 7, "samples_ts": [ 12.5 ]}"#;
        let answer = Answer {
            tok_s: 12.5,
            about: "build abc (7)".to_owned(),
        };
        for text in [
            format!("[\n {test}\n]\n"),
            format!("=== [notice]\n[\n{test}\n]\nbye\n"),
        ] {
            assert_eq!(llama_answer(&text).unwrap(), answer, "{text}");
        }
        for bad in [
            "".to_owned(),
            "no".to_owned(),
            "[]".to_owned(),
            format!("[{test},{test}]"),
            format!("[{}]", test.replace("12.5", "1, 2")),
            format!("[{}]", test.replace("12.5", "0")),
            format!("[{}]", test.replace("samples_ts", "x")),
            format!("[{test}"),
        ] {
            assert!(llama_answer(&bad).is_err(), "{bad}");
        }
        let ours = r#"{"isa": "amx", "cases": [{"case": "tg1", "tok_s": [3.5]}]}"#;
        let answer = spillgate_answer(ours).unwrap();
        assert_eq!((answer.tok_s, &answer.about[..]), (3.5, "amx"));
        assert!(spillgate_answer(r#"{"isa": "amx", "cases": []}"#).is_err());
    }
}
