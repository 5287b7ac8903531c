//! What layers took whose experts were not all in device memory: the record that an engine writes and a replay reads.
//!
//! As text it is one line of JSON a record: a [`Header`], then [`Window`]s in the order in which they were computed. Recordings of several
//! runs may follow one another in a file, each with its header.
//!
//! ```text
//! {"windows":1,"model":"qwen3-30b-a3b","machine":"H200, 16 cores"}
//! {"prompt":900,"chunk":0,"tokens":512,"layer":0,"missing":96,"on_cpu":0,"share":0.0,"ms":9.41}
//! {"prompt":900,"chunk":0,"tokens":512,"layer":1,"missing":97,"on_cpu":44,"share":0.45,"ms":5.02,"host_ms":4.8}
//! ```
//!
//! For a replay the share is forced: the same prompt is run with none, and with one or several amounts of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::limits;

/// Version of the text that this code writes and reads.
pub const VERSION: u32 = 1;

/// What a recording is of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// [`VERSION`].
    pub windows: u32,
    /// The model's name.
    pub model: String,
    /// The machine's.
    pub machine: String,
    /// What else shaped the times, such as what was emulated.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
}

/// A layer of a chunk of tokens, from before its routing is known to after its experts' outputs are added up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Tokens of the prompt; 1 for a generated token.
    pub prompt: u32,
    /// Which chunk of the prompt, from 0. For generated tokens: which of them.
    pub chunk: u32,
    /// Tokens of the chunk.
    pub tokens: u32,
    /// The layer, among all of the model's.
    pub layer: u32,
    /// Experts that the chunk's tokens chose and that were not in device memory. Layers without any are not recorded.
    pub missing: u32,
    /// Of those, experts that the CPU computed.
    pub on_cpu: u32,
    /// The host's share that was asked for, 0 to 1.
    pub share: f64,
    /// What it took.
    pub ms: f64,
    /// The host's time for streaming the other missing experts, where that was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_ms: Option<f64>,
    /// Whether it paid for something that the others do not: memory taken for the first time, or grown.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub one_time: bool,
}

/// Windows as they were recorded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recording {
    /// What they are of: at least one.
    pub headers: Vec<Header>,
    /// All windows.
    pub windows: Vec<Window>,
}

impl Header {
    /// Of a recording that begins now.
    pub fn new(model: impl Into<String>, machine: impl Into<String>) -> Self {
        Self {
            windows: VERSION,
            model: model.into(),
            machine: machine.into(),
            note: String::new(),
        }
    }

    /// As a line of a recording, without its end.
    pub fn line(&self) -> String {
        serde_json::to_string(self).expect("texts and numbers become JSON")
    }
}

impl Window {
    /// As a line of a recording, without its end. Times must be finite.
    pub fn line(&self) -> String {
        serde_json::to_string(self).expect("numbers become JSON")
    }

    /// What is wrong with it, as in "ms is -1, expected ...".
    fn problem(&self) -> Option<String> {
        let time = |ms: f64| ms.is_finite() && ms >= 0.0;
        if !time(self.ms) {
            return Some(format!("ms is {}, expected a time", self.ms));
        }
        if let Some(ms) = self.host_ms.filter(|&ms| !time(ms)) {
            return Some(format!("host_ms is {ms}, expected a time"));
        }
        if !(0.0..=1.0).contains(&self.share) {
            return Some(format!("share is {}, expected 0 to 1", self.share));
        }
        if u64::from(self.layer) >= limits::LAYERS_MAX {
            let most = limits::LAYERS_MAX - 1;
            return Some(format!("layer is {}, expected 0 to {most}", self.layer));
        }
        if self.missing == 0 || self.on_cpu > self.missing {
            return Some(format!(
                "on_cpu is {} and missing {}, expected at least one missing and no more on the CPU",
                self.on_cpu, self.missing
            ));
        }
        None
    }
}

impl Recording {
    /// Reads a recording's text.
    ///
    /// # Errors
    /// If it is too long, a line is neither header nor window or holds what cannot be, or there is no header first.
    pub fn parse(text: &str) -> Result<Self, Error> {
        if text.len() > limits::WINDOWS_TEXT_BYTES_MAX {
            let (found, most) = (text.len(), limits::WINDOWS_TEXT_BYTES_MAX);
            let problem = format!("has {found} bytes, expected at most {most}");
            return Err(Error::Recording { line: 1, problem });
        }
        let mut recording = Self::default();
        for (line, text) in (1..).zip(text.lines()) {
            if !text.trim().is_empty() {
                recording
                    .take(text)
                    .map_err(|problem| Error::Recording { line, problem })?;
            }
        }
        if recording.headers.is_empty() {
            let problem = "is empty, expected a header".to_owned();
            return Err(Error::Recording { line: 1, problem });
        }
        Ok(recording)
    }

    fn take(&mut self, line: &str) -> Result<(), String> {
        let broken = |error: serde_json::Error| format!("is no window: {error}");
        // Whatever is no window may be a header; of what is neither, the first problem is told.
        match serde_json::from_str::<Window>(line) {
            Ok(_) if self.headers.is_empty() => Err("is a window, expected a header first".into()),
            Ok(window) => match window.problem() {
                Some(problem) => Err(problem),
                None => {
                    self.windows.push(window);
                    Ok(())
                }
            },
            Err(error) => {
                let header: Header = serde_json::from_str(line).map_err(|_| broken(error))?;
                if header.windows != VERSION {
                    return Err(format!(
                        "has version {}, expected {VERSION}",
                        header.windows
                    ));
                }
                self.headers.push(header);
                Ok(())
            }
        }
    }
}

/// Windows of prompts of the same length that were run with the same share.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Tokens of the prompts.
    pub prompt: u32,
    /// The share that was asked for.
    pub share: f64,
    /// How many prompts.
    pub prompts: usize,
    /// Windows of all of them, those that paid a one-time cost not counted.
    pub windows: usize,
    /// What a prompt's windows take together: the sum, over each layer of each chunk, of its median.
    pub sum_ms: f64,
    /// What a missing expert takes, over all windows.
    pub expert_us: f64,
    /// The host's time for each streamed expert, where that was measured.
    pub host_us: Option<f64>,
}

impl Recording {
    /// What was recorded, by length of the prompt and share.
    pub fn summaries(&self) -> Vec<Summary> {
        let mut groups: BTreeMap<(u32, u64), Vec<&Window>> = BTreeMap::new();
        for window in self.windows.iter().filter(|w| !w.one_time) {
            // Of numbers that are not negative the bits are in order, too.
            let group = (window.prompt, window.share.abs().to_bits());
            groups.entry(group).or_default().push(window);
        }
        groups.into_values().map(|of| summary(&of)).collect()
    }
}

fn summary(windows: &[&Window]) -> Summary {
    let mut layers: BTreeMap<(u32, u32), Vec<f64>> = BTreeMap::new();
    for window in windows {
        let at = (window.chunk, window.layer);
        layers.entry(at).or_default().push(window.ms);
    }
    let sum = |of: &dyn Fn(&Window) -> f64| windows.iter().map(|w| of(w)).sum::<f64>();
    let streamed = |w: &Window| f64::from(w.missing - w.on_cpu);
    let timed = |w: &Window| w.host_ms.map_or(0.0, |_| streamed(w));
    let (host_ms, timed) = (sum(&|w| w.host_ms.unwrap_or(0.0)), sum(&timed));
    Summary {
        prompt: windows[0].prompt,
        share: windows[0].share,
        prompts: layers.values().map(Vec::len).max().unwrap_or(0),
        windows: windows.len(),
        sum_ms: layers.values_mut().map(|ms| median(ms)).sum(),
        expert_us: 1e3 * sum(&|w| w.ms) / sum(&|w| f64::from(w.missing)),
        host_us: (timed > 0.0).then(|| 1e3 * host_ms / timed),
    }
}

/// Of some, at least one.
pub(crate) fn median(of: &mut [f64]) -> f64 {
    of.sort_by(f64::total_cmp);
    f64::midpoint(of[(of.len() - 1) / 2], of[of.len() / 2])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WINDOW: Window = Window {
        prompt: 900,
        chunk: 1,
        tokens: 388,
        layer: 7,
        missing: 90,
        on_cpu: 40,
        share: 0.45,
        ms: 5.25,
        host_ms: None,
        one_time: false,
    };

    #[test]
    fn what_is_written_is_read_again() {
        let header = Header {
            note: "host copy".into(),
            ..Header::new("a model", "a machine")
        };
        let windows = [
            WINDOW,
            Window {
                host_ms: Some(4.5),
                one_time: true,
                share: 0.0,
                on_cpu: 0,
                ..WINDOW
            },
        ];
        let text = format!(
            "{}\n{}\n\n{}\n",
            header.line(),
            windows[0].line(),
            windows[1].line()
        );
        let recording = Recording::parse(&text).unwrap();
        assert_eq!(recording.headers, [header]);
        assert_eq!(recording.windows, windows);
        assert!(!windows[0].line().contains("one_time"));
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_line() {
        let header = Header::new("m", "n").line();
        let with = |window: Window| format!("{header}\n{}\n", window.line());
        let newer = Header {
            windows: 2,
            ..Header::new("m", "n")
        };
        for (text, line, what) in [
            (String::new(), 1, "empty"),
            (WINDOW.line(), 1, "header first"),
            (newer.line(), 1, "version 2"),
            (format!("{header}\n{{\"prompt\":1}}"), 2, "no window"),
            (format!("{header}\n\nx"), 3, "no window"),
            (with(Window { ms: -1.0, ..WINDOW }), 2, "ms is -1"),
            (
                with(Window {
                    host_ms: Some(-2.0),
                    ..WINDOW
                }),
                2,
                "host_ms is -2",
            ),
            (
                with(Window {
                    share: 1.5,
                    ..WINDOW
                }),
                2,
                "share is 1.5",
            ),
            (
                with(Window {
                    layer: 4096,
                    ..WINDOW
                }),
                2,
                "layer is 4096",
            ),
            (
                with(Window {
                    on_cpu: 91,
                    ..WINDOW
                }),
                2,
                "on_cpu is 91",
            ),
            (
                with(Window {
                    missing: 0,
                    on_cpu: 0,
                    ..WINDOW
                }),
                2,
                "missing 0",
            ),
        ] {
            let error = Recording::parse(&text).unwrap_err();
            let Error::Recording {
                line: found,
                problem,
            } = &error
            else {
                panic!("{error}");
            };
            assert_eq!(*found, line, "{text}: {problem}");
            assert!(problem.contains(what), "{text}: {problem}");
        }
    }

    #[test]
    fn a_recording_is_summed_up_by_prompt_and_share() {
        let mut windows = Vec::new();
        for (prompt, share, on_cpu, host_ms) in [
            (900, 0.0, 0, Some(9.0)),
            (900, 0.5, 45, Some(9.0)),
            (250, 0.0, 0, None),
        ] {
            for (layer, ms) in [(0, 9.0), (0, 11.0), (1, 4.5), (1, 4.5)] {
                windows.push(Window {
                    prompt,
                    share,
                    on_cpu,
                    host_ms,
                    layer,
                    ms,
                    ..WINDOW
                });
            }
        }
        windows.push(Window {
            one_time: true,
            ms: 1e6,
            ..WINDOW
        });
        let recording = Recording {
            headers: vec![Header::new("m", "n")],
            windows,
        };
        let summaries = recording.summaries();
        let keys: Vec<(u32, f64)> = summaries.iter().map(|s| (s.prompt, s.share)).collect();
        assert_eq!(keys, [(250, 0.0), (900, 0.0), (900, 0.5)]);
        for summary in &summaries {
            assert_eq!((summary.prompts, summary.windows), (2, 4));
            assert_eq!(summary.sum_ms, 14.5);
            assert!((summary.expert_us - 1e3 * 29.0 / 360.0).abs() < 1e-9);
        }
        assert_eq!(summaries[0].host_us, None);
        assert_eq!(summaries[1].host_us, Some(100.0));
        assert_eq!(summaries[2].host_us, Some(200.0));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(lines in prop::collection::vec(prop_oneof![
            Just(Header::new("m", "n").line()),
            Just(WINDOW.line()),
            Just(WINDOW.line().replace('7', "-7")),
            Just(WINDOW.line().replace("5.25", "1e999")),
            "[ -~]{0,40}",
        ], 0..12)) {
            let _ = Recording::parse(&lines.join("\n"));
        }
    }
}
