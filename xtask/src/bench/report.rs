//! Results, and the tables made of them.

use std::fmt::Write;

use engine::probe::bandwidth::Bandwidth;
use serde::Serialize;

use super::case::Case;
use super::engines::{Engine, Family, SETTINGS};
use super::model::ModelFile;
use super::{DISTURBED_SHARE, file_name};
use crate::machine::Machine;

/// All that was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    pub machine: Machine,
    pub threads: usize,
    pub rounds: usize,
    pub models: Vec<ModelFile>,
    /// Ours first.
    pub engines: Vec<Engine>,
    pub readings: Vec<Reading>,
    pub series: Vec<Series>,
}

/// Bandwidths at one time: for each model, then for the memory, with one thread and with all.
#[derive(Debug, Serialize)]
pub struct Reading {
    pub when: &'static str,
    pub reads: Vec<Bandwidth>,
}

/// One engine in one setting, in one case.
#[derive(Debug, Serialize)]
pub struct Series {
    /// Index into the report's models.
    pub model: usize,
    pub case: Case,
    /// Index into the report's engines.
    pub engine: usize,
    pub setting: &'static str,
    pub args: Vec<String>,
    pub about: String,
    /// Whether it is measured in every round.
    pub kept: bool,
    pub samples: Vec<Sample>,
    pub failure: Option<String>,
}

/// One sample.
#[derive(Debug, Serialize)]
pub struct Sample {
    pub round: usize,
    pub tok_s: f64,
    /// The share of the machine that others took meanwhile.
    pub others: Option<f64>,
}

impl Series {
    pub fn going_on(&self) -> bool {
        self.kept && self.failure.is_none()
    }

    /// The same engine at the same work.
    pub fn same_subject(&self, other: &Self) -> bool {
        (self.model, self.case, self.engine) == (other.model, other.case, other.engine)
    }

    fn rates(&self) -> Option<Spread> {
        Spread::of(self.samples.iter().map(|s| s.tok_s))
    }

    fn disturbed(&self) -> usize {
        let is = |s: &&Sample| s.others.is_some_and(|share| share > DISTURBED_SHARE);
        self.samples.iter().filter(is).count()
    }
}

/// The middle and the ends of some figures.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Spread {
    p50: f64,
    min: f64,
    max: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Option<Self> {
        let mut v: Vec<f64> = values.collect();
        v.sort_unstable_by(f64::total_cmp);
        let (&min, &max) = (v.first()?, v.last()?);
        let p50 = (v[(v.len() - 1) / 2] + v[v.len() / 2]) / 2.0;
        Some(Self { p50, min, max })
    }
}

impl Report {
    /// Ours and the best peer in each case of each model.
    fn pairs(&self) -> Vec<(&Series, Option<&Series>)> {
        let first = SETTINGS.iter().find(|s| s.family == Family::Spillgate);
        let first = first.map(|s| s.name);
        let is_ours = |s: &&Series| s.engine == 0 && Some(s.setting) == first;
        let ours = self.series.iter().filter(is_ours);
        let rate = |s: &Series| s.rates().map_or(0.0, |r| r.p50);
        ours.map(|ours| {
            let rivals = self.series.iter().filter(|s| {
                s.engine != 0 && (s.model, s.case) == (ours.model, ours.case) && s.going_on()
            });
            let best = rivals.max_by(|a, b| rate(a).total_cmp(&rate(b)));
            (ours, best.filter(|s| !s.samples.is_empty()))
        })
        .collect()
    }

    /// Bandwidth of reading what a token of a model reads, all threads: the median of all readings.
    fn model_bytes_s(&self, model: usize) -> Option<f64> {
        let reads = self
            .readings
            .iter()
            .map(|r| r.reads[2 * model + 1].gb_s_p50() * 1e9);
        Spread::of(reads).map(|s| s.p50)
    }
}

/// The report as it goes into a document.
pub fn markdown(report: &Report) -> String {
    let mut text = String::new();
    machine(&mut text, report);
    comparison(&mut text, report);
    details(&mut text, report);
    bandwidths(&mut text, report);
    commands(&mut text, report);
    text
}

/// Writing to a string cannot fail.
macro_rules! line {
    ($text:expr, $($arg:tt)*) => {
        writeln!($text, $($arg)*).expect("strings take everything")
    };
}

fn machine(text: &mut String, r: &Report) {
    let m = &r.machine;
    line!(
        text,
        "{}. Commit {}. {}, {} cores, {:.1} GiB, huge pages on `{}`, {}. {} threads, {} rounds: medians (least-most) of {} samples.\n",
        m.date,
        m.commit,
        m.cpu,
        m.cores,
        m.memory_gib,
        m.huge_pages,
        m.kernel,
        r.threads,
        r.rounds,
        r.rounds
    );
}

fn comparison(text: &mut String, r: &Report) {
    line!(
        text,
        "| model | case | ours, tok/s | better peer, tok/s | which | ratio (by round) | floor, tok/s | ours of the floor |\n\
         |---|---|---|---|---|---|---|---|"
    );
    for (ours, peer) in r.pairs() {
        let ours_rates = ours.rates();
        let (peer_rate, which, ratio) = match peer {
            Some(peer) => (
                rates(peer.rates()),
                format!("{}, {}", r.engines[peer.engine].name, peer.setting),
                ratio(ours, peer),
            ),
            None => Default::default(),
        };
        let model = &r.models[ours.model];
        let bytes = model.case_bytes(ours.case);
        let floor = bytes.and_then(|bytes| Some(r.model_bytes_s(ours.model)? / bytes as f64));
        let share = floor.zip(ours_rates).map(|(floor, ours)| ours.p50 / floor);
        line!(
            text,
            "| {} | {} | {} | {peer_rate} | {which} | {ratio} | {} | {} |",
            model.name,
            ours.case,
            rates(ours_rates),
            floor.map_or(String::new(), rate),
            share.map_or(String::new(), |share| format!("{:.0} %", share * 100.0)),
        );
    }
    line!(
        text,
        "\n*ratio*: ours to the better peer, of medians; in parentheses the least and the most of a round's own ratio. *floor* of tgN: the bytes that a token \
         reads (weights, and f16 cells at depth), at the rate at which a streaming read of as many bytes as the weights ran in the same session.\n"
    );
}

fn details(text: &mut String, r: &Report) {
    line!(
        text,
        "| model | case | engine | setting | tok/s | spread | n | disturbed |\n|---|---|---|---|---|---|---|---|"
    );
    for s in &r.series {
        let spread = s.rates().filter(|_| s.samples.len() > 1);
        let spread = spread.map(|r| format!("{:.0} %", (r.max - r.min) / r.p50 * 100.0));
        line!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {} |",
            r.models[s.model].name,
            s.case,
            r.engines[s.engine].name,
            s.setting,
            s.failure
                .as_ref()
                .map_or_else(|| rates(s.rates()), |f| format!("failed: {f}")),
            spread.unwrap_or_default(),
            s.samples.len(),
            s.disturbed(),
        );
    }
    line!(
        text,
        "\n*spread*: most less least, of the median. *disturbed*: samples during which other processes took more than {:.0} % of the machine. Settings with \
         fewer samples were not near their engine's best in the first round.\n",
        DISTURBED_SHARE * 100.0
    );
}

fn bandwidths(text: &mut String, r: &Report) {
    let mut head = "| read bandwidth, GB/s | threads |".to_owned();
    let mut under = "|---|---|".to_owned();
    for reading in &r.readings {
        write!(head, " {} |", reading.when).expect("strings take everything");
        under += "---|";
    }
    line!(text, "{head}\n{under}");
    let rows = r.readings.first().map_or(0, |reading| reading.reads.len());
    for i in 0..rows {
        let first = &r.readings[0].reads[i];
        let mut row = format!("| {} MiB | {} |", first.bytes >> 20, first.threads);
        for reading in &r.readings {
            let read = &reading.reads[i];
            write!(
                row,
                " {:.1}, best {:.1} |",
                read.gb_s_p50(),
                read.gb_s_max()
            )
            .expect("strings take everything");
        }
        line!(text, "{row}");
    }
    line!(text, "");
}

fn commands(text: &mut String, r: &Report) {
    line!(
        text,
        "| model | sha256 | bytes of weights | bytes a token |\n|---|---|---|---|"
    );
    for m in &r.models {
        line!(
            text,
            "| {} | {} | {} | {} |",
            m.name,
            m.sha256,
            m.weight_bytes,
            m.token_bytes
        );
    }
    line!(text, "");
    for (i, engine) in r.engines.iter().enumerate() {
        let runs = r
            .series
            .iter()
            .filter(|s| s.engine == i && !s.samples.is_empty());
        let about = runs.clone().map(|s| s.about.as_str()).next();
        line!(
            text,
            "{} ({}), a process a sample:\n",
            engine.name,
            about.unwrap_or("never ran")
        );
        let mut seen: Vec<String> = Vec::new();
        for s in runs {
            // The same command line serves all models.
            let path = r.models[s.model].path.display().to_string();
            let args = s.args.iter().map(|a| if *a == path { "MODEL" } else { a });
            let command = args.fold(file_name(&engine.path), |line, arg| line + " " + arg);
            if !seen.contains(&command) {
                line!(text, "    {command}");
                seen.push(command);
            }
        }
        line!(text, "");
    }
}

/// Three digits, as more are noise.
fn rate(x: f64) -> String {
    match x {
        x if x < 10.0 => format!("{x:.2}"),
        x if x < 100.0 => format!("{x:.1}"),
        x => format!("{x:.0}"),
    }
}

fn rates(spread: Option<Spread>) -> String {
    let text = |s: Spread| format!("{} ({}-{})", rate(s.p50), rate(s.min), rate(s.max));
    spread.map_or(String::new(), text)
}

fn ratio(ours: &Series, peer: &Series) -> String {
    let by_round = ours.samples.iter().filter_map(|a| {
        let b = peer.samples.iter().find(|b| b.round == a.round)?;
        Some(a.tok_s / b.tok_s)
    });
    match (ours.rates(), peer.rates(), Spread::of(by_round)) {
        (Some(a), Some(b), Some(by_round)) => format!(
            "**{:.2}** ({:.2}-{:.2})",
            a.p50 / b.p50,
            by_round.min,
            by_round.max
        ),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    fn series(engine: usize, case: &str, setting: &'static str, samples: &[f64]) -> Series {
        let sample = |(round, &tok_s)| Sample {
            round,
            tok_s,
            others: Some(if tok_s == 9.0 { 0.5 } else { 0.0 }),
        };
        Series {
            model: 0,
            case: case.parse().unwrap(),
            engine,
            setting,
            args: vec![
                "-m".to_owned(),
                "/models/m.gguf".to_owned(),
                case.to_owned(),
            ],
            about: "build 1".to_owned(),
            kept: true,
            samples: samples.iter().enumerate().map(sample).collect(),
            failure: None,
        }
    }

    fn report() -> Report {
        let engine = |name: &str, family| Engine {
            name: name.to_owned(),
            path: PathBuf::from("/somewhere/bin"),
            family,
            args: Vec::new(),
        };
        let read = |gb_s_p50| Bandwidth {
            bytes: 1 << 20,
            threads: 1,
            gb_s: vec![gb_s_p50, gb_s_p50, 99.0],
        };
        let reading = |when, all| Reading {
            when,
            reads: vec![read(1.0), read(all), read(3.0), read(4.0)],
        };
        let mut dropped = series(1, "tg10", "dropped", &[30.0]);
        dropped.kept = false;
        let mut failed = series(2, "tg10", "fa 1", &[]);
        failed.failure = Some("no".to_owned());
        Report {
            machine: Machine::read(),
            threads: 2,
            rounds: 3,
            models: vec![ModelFile {
                name: "m".to_owned(),
                path: PathBuf::from("/models/m.gguf"),
                sha256: "abc".to_owned(),
                weight_bytes: 2_000_000_000,
                token_bytes: 1_000_000_000,
                cell_bytes: 0,
                windows: vec![],
            }],
            engines: vec![
                engine("ours", Family::Spillgate),
                engine("a", Family::LlamaCpp),
                engine("b", Family::LlamaCpp),
            ],
            readings: vec![
                reading("start", 20.0),
                reading("middle", 40.0),
                reading("end", 25.0),
            ],
            series: vec![
                series(0, "tg10", "KV f16", &[10.0, 9.0, 20.0]),
                series(0, "tg10", "KV q8_0", &[500.0]),
                series(1, "tg10", "fa 0", &[8.0, 8.0, 8.0]),
                dropped,
                failed,
                series(2, "tg10", "fa 0", &[5.0, 6.0, 7.0]),
                series(0, "pp5@d1", "KV f16", &[1.0, 2.0, 3.0]),
            ],
        }
    }

    #[test]
    fn ours_is_compared_with_the_best_peer_that_was_measured_throughout() {
        let text = markdown(&report());
        for line in [
            // The floor: 1 GB a token at the median of 20, 25 and 40 GB/s.
            "| m | tg10 | 10.0 (9.00-20.0) | 8.00 (8.00-8.00) | a, fa 0 | **1.25** (1.12-2.50) | 25.0 | 40 % |",
            "| m | pp5@d1 | 2.00 (1.00-3.00) |  |  |  |  |  |",
            "| m | tg10 | ours | KV f16 | 10.0 (9.00-20.0) | 110 % | 3 | 1 |",
            "| m | tg10 | ours | KV q8_0 | 500 (500-500) |  | 1 | 0 |",
            "| m | tg10 | b | fa 1 | failed: no |  | 0 | 0 |",
            "| read bandwidth, GB/s | threads | start | middle | end |",
            "| 1 MiB | 1 | 20.0, best 99.0 | 40.0, best 99.0 | 25.0, best 99.0 |",
            "a (build 1), a process a sample:",
            "    bin -m MODEL tg10",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n\n{text}");
        }
        // Where programs and models lie is nobody's business.
        assert!(!text.contains("/models") && !text.contains("/somewhere"));
    }

    #[test]
    fn the_middle_of_an_even_number_is_between() {
        let of = |v: &[f64]| Spread::of(v.iter().copied()).map(|s| (s.p50, s.min, s.max));
        assert_eq!(of(&[4.0, 1.0, 3.0, 2.0]), Some((2.5, 1.0, 4.0)));
        assert_eq!(of(&[3.0, 1.0, 2.0]), Some((2.0, 1.0, 3.0)));
        assert_eq!(of(&[]), None);
    }
}
