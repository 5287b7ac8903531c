//! `bench`: spillgate and its peers, side by side.
//!
//! Machines drift, so the engines take turns within a round, case by case, one process a sample, and ratios are formed of
//! what was measured together. In the first round each peer runs in all its settings; those near its best go on.

mod case;
mod engines;
mod model;
mod report;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use engine::probe::bandwidth::{Bandwidth, Source};

use crate::machine::{self, Machine};
use case::Case;
use engine::probe::busy::Ticks;
use engines::{Engine, Family, Setting};
use model::ModelFile;
use report::{Reading, Report, Sample, Series};

/// Settings of a peer that stay after the first round, at most.
const KEPT_MAX: usize = 2;

/// A setting stays if its first sample is at least this share of the best one's: one sample says no more.
const KEPT_SHARE: f64 = 0.85;

/// A sample during which others took more than this share of the machine is reported as disturbed: threads that spin at
/// barriers lose far more time than was taken from them.
pub const DISTURBED_SHARE: f64 = 0.05;

/// Bytes of a buffer much larger than caches.
const MEMORY_BYTES: usize = 2 << 30;

#[derive(Debug, Args)]
pub struct BenchArgs {
    /// GGUF files; repeatable
    #[arg(long, required = true, num_args = 1.., value_name = "PATH")]
    model: Vec<PathBuf>,
    /// Our program
    #[arg(long, value_name = "PATH", default_value = "target/release/spillgate")]
    ours: PathBuf,
    /// More arguments for our program, separated by spaces, such as "--isa avx2"
    #[arg(
        long,
        value_name = "ARGS",
        default_value = "",
        allow_hyphen_values = true
    )]
    ours_args: String,
    /// A llama-bench of llama.cpp or ik_llama.cpp; repeatable
    #[arg(long, value_name = "NAME=PATH", value_parser = peer)]
    peer: Vec<(String, PathBuf)>,
    /// Threads of every engine
    #[arg(short, long, value_name = "N", default_value_t = machine::cores())]
    threads: usize,
    /// Cases, separated by commas
    #[arg(
        long,
        value_name = "CASE,...",
        value_delimiter = ',',
        default_value = "pp512,tg128,tg32@d4096"
    )]
    cases: Vec<Case>,
    /// Samples of each engine in each case
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: usize,
    /// Also write every sample and command to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn peer(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => {
            Ok((name.to_owned(), PathBuf::from(path)))
        }
        _ => Err("expected NAME=PATH".to_owned()),
    }
}

pub fn run(args: &BenchArgs) -> Result<()> {
    ensure!(args.rounds > 0 && args.threads > 0, "nothing to measure");
    let ours_args = args.ours_args.split_whitespace().map(str::to_owned);
    let mut engines = vec![Engine::ours(&args.ours, ours_args.collect())];
    for (name, path) in &args.peer {
        if engines.iter().any(|e| e.name == *name) {
            bail!("two engines have the name {name}");
        }
        engines.push(Engine::peer(name, path)?);
    }
    let models: Vec<ModelFile> = args
        .model
        .iter()
        .map(|path| ModelFile::open(path))
        .collect::<Result<_>>()?;
    let series = series(&models, &engines, &args.cases, args.threads);
    let mut report = Report {
        machine: Machine::read(),
        threads: args.threads,
        rounds: args.rounds,
        models,
        engines,
        readings: Vec::new(),
        series,
    };
    report.read_memory("start")?;
    measure(&mut report)?;
    report.read_memory("end")?;
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    print!("{}", report::markdown(&report));
    Ok(())
}

/// Everything to measure, in the order of a round: model, case, engine, setting.
fn series(models: &[ModelFile], engines: &[Engine], cases: &[Case], threads: usize) -> Vec<Series> {
    let mut all = Vec::new();
    for (model, file) in models.iter().enumerate() {
        for &case in cases {
            for (engine, e) in engines.iter().enumerate() {
                for setting in e.settings(case) {
                    if let Some(args) = e.command(setting, &file.path, case, threads) {
                        all.push(Series::new(model, case, engine, setting, args));
                    }
                }
            }
        }
    }
    all
}

fn measure(report: &mut Report) -> Result<()> {
    let half = (report.rounds * report.series.len()).div_ceil(2);
    let mut done = 0;
    for round in 0..report.rounds {
        for i in 0..report.series.len() {
            if done == half {
                report.read_memory("middle")?;
            }
            done += 1;
            if report.series[i].going_on() {
                report.take_sample(i, round)?;
            }
        }
        if round == 0 {
            keep_the_best(&mut report.series, &report.engines);
        }
    }
    Ok(())
}

/// Drops settings of peers that are clearly not their best. Ours all stay.
fn keep_the_best(series: &mut [Series], engines: &[Engine]) {
    let rates: Vec<_> = series
        .iter()
        .map(|s| s.samples.first().map(|s| s.tok_s))
        .collect();
    for i in 0..series.len() {
        let is_rival = |j: &usize| series[*j].same_subject(&series[i]);
        let Some(rate) = rates[i].filter(|_| engines[series[i].engine].family != Family::Spillgate)
        else {
            continue;
        };
        let rivals = (0..series.len()).filter(is_rival).filter_map(|j| rates[j]);
        let best = rivals.clone().fold(0.0, f64::max);
        let better = rivals.filter(|&r| r > rate).count();
        series[i].kept = better < KEPT_MAX && rate >= KEPT_SHARE * best;
    }
}

impl Report {
    fn read_memory(&mut self, when: &'static str) -> Result<()> {
        eprintln!("reading memory");
        let mut reads: Vec<Bandwidth> = Vec::new();
        let models = self.models.iter().map(|m| m.token_bytes as usize);
        for bytes in models.chain([MEMORY_BYTES]) {
            let source = Source::new(bytes)?;
            for threads in [1, self.threads] {
                reads.push(source.read(threads, crate::PASSES)?);
            }
        }
        self.readings.push(Reading { when, reads });
        Ok(())
    }

    fn take_sample(&mut self, i: usize, round: usize) -> Result<()> {
        let series = &mut self.series[i];
        let engine = &self.engines[series.engine];
        let before = Ticks::now();
        let answer = engine.sample(&series.args);
        let others = before.zip(Ticks::now()).map(|(a, b)| a.others(&b));
        let what = format!(
            "round {}: {}, {}, {}, {}",
            round + 1,
            self.models[series.model].name,
            series.case,
            engine.name,
            series.setting
        );
        match answer {
            Ok(answer) => {
                let taken = others.filter(|&share| share > DISTURBED_SHARE);
                let note = taken.map_or(String::new(), |share| {
                    format!(
                        " (DISTURBED: others took {:.0} % of the machine)",
                        share * 100.0
                    )
                });
                eprintln!("{what}: {:.2} tok/s{note}", answer.tok_s);
                series.about = answer.about;
                series.samples.push(Sample {
                    round,
                    tok_s: answer.tok_s,
                    others,
                });
            }
            // Without ours there is nothing to compare; a peer that cannot do something is a result.
            Err(error) if engine.family == Family::Spillgate => return Err(error.context(what)),
            Err(error) => {
                eprintln!("{what}: {error:#}");
                series.failure = Some(format!("{error:#}"));
            }
        }
        Ok(())
    }
}

impl Series {
    fn new(model: usize, case: Case, engine: usize, setting: &Setting, args: Vec<String>) -> Self {
        Self {
            model,
            case,
            engine,
            setting: setting.name,
            args,
            about: String::new(),
            kept: true,
            samples: Vec::new(),
            failure: None,
        }
    }
}

/// The last part of a path, which is what may be printed in documents.
fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_have_names() {
        assert_eq!(
            peer("ik=/a=b"),
            Ok(("ik".to_owned(), PathBuf::from("/a=b")))
        );
        for bad in ["ik", "=x", "ik="] {
            assert!(peer(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn settings_near_the_best_stay() {
        let engine = |family| Engine {
            name: String::new(),
            path: PathBuf::new(),
            family,
            args: Vec::new(),
        };
        let engines = [engine(Family::Spillgate), engine(Family::IkLlamaCpp)];
        let case = "tg1".parse().unwrap();
        let series = |engine, rate: Option<f64>| {
            let mut series = Series::new(0, case, engine, &engines::SETTINGS[0], Vec::new());
            series.samples.extend(rate.map(|tok_s| Sample {
                round: 0,
                tok_s,
                others: None,
            }));
            series
        };
        let rates = [Some(84.0), Some(100.0), None, Some(90.0), Some(86.0)];
        let mut all = vec![series(0, Some(1.0)), series(0, Some(99.0))];
        all.extend(rates.map(|rate| series(1, rate)));
        keep_the_best(&mut all, &engines);
        let kept: Vec<bool> = all.iter().map(|s| s.kept).collect();
        // Ours; below the share; the best; no sample (judged by its failure); the second; one too many.
        assert_eq!(kept, [true, true, false, true, true, true, false]);
    }
}
