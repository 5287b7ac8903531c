//! What sessions record of mixtures of experts, for replay: JSON objects, one a line, the first of them a [`Header`].
//!
//! ```text
//! {"trace":"routing","version":1,"model":"3f..","layers":[{"layer":1,"experts":64,"used":8,"blob_bytes":1327104}, ..]}
//! {"layer":0,"position":0,"tokens":512,"generated":false,"used":[[0,70],[3,12], ..]}
//!
//! {"trace":"windows","version":1,"model":"3f..","layers":[..]}
//! {"step":0,"layer":0,"tokens":512,"generated":false,"needed":60,"missing":20,"host":9,"share":0.45,"ms":12.3,"skipped":true}
//! ```
//!
//! A record's `layer` is a number among the header's layers: those with experts, from 0 on.

use crate::error::Error;
use crate::limits::{EXPERTS_MAX, LAYERS_MAX, TRACE_LINES_MAX};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The version of both kinds.
pub const VERSION: u32 = 1;

/// What a trace is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Which experts were used.
    Routing,
    /// What layers took.
    Windows,
}

/// The first line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// What the lines after it are.
    pub trace: Kind,
    /// [`VERSION`].
    pub version: u32,
    /// What tells the model from others.
    pub model: String,
    /// Layers with experts, in order.
    pub layers: Vec<LayerShape>,
}

/// A layer with experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerShape {
    /// Its number among all layers of the model.
    pub layer: u32,
    /// Experts E.
    pub experts: u32,
    /// Experts that a token uses.
    pub used: u32,
    /// Bytes of one expert.
    pub blob_bytes: u64,
}

/// Which experts a layer used for the tokens of one step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Routing {
    /// The layer's number among the header's.
    pub layer: u32,
    /// Position of the first token.
    pub position: u64,
    /// Tokens.
    pub tokens: u32,
    /// Whether it is one generated token, not a part of a prompt.
    pub generated: bool,
    /// Experts that are used, ascending, and by how many of the tokens.
    pub used: Vec<(u32, u32)>,
}

/// What a layer of one step took, from before its routing to after its experts' sum. Layers whose experts were all resident are not among them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// The step's number: windows of one step are of one chunk of a prompt, or of one generated token.
    pub step: u64,
    /// The layer's number among the header's.
    pub layer: u32,
    /// Tokens.
    pub tokens: u32,
    /// Whether it is one generated token, not a part of a prompt.
    pub generated: bool,
    /// Experts that were used.
    pub needed: u32,
    /// Those of them that were not resident.
    pub missing: u32,
    /// Those of these that the CPU computed.
    pub host: u32,
    /// The CPU's share that was asked for, 0 to 1; 0: this was the arm without it.
    pub share: f64,
    /// Milliseconds.
    pub ms: f64,
    /// Whether the gate does not look at it: it is the first of its step, or paid for something that others do not.
    pub skipped: bool,
}

impl Window {
    /// What the gate reads: milliseconds for each expert that was not resident.
    pub fn reading(&self) -> f64 {
        self.ms / f64::from(self.missing.max(1))
    }
}

/// Reads recorded routing.
///
/// # Errors
/// If a line is not what it should be.
pub fn routing(text: &str) -> Result<(Header, Vec<Routing>), Error> {
    let (header, records) = read::<Routing>(text, Kind::Routing)?;
    for (i, record) in records.iter().enumerate() {
        let problem = |problem: String| Error::Trace {
            line: i + 2,
            problem,
        };
        let Some(layer) = header.layers.get(record.layer as usize) else {
            return Err(problem(format!("there is no layer {}", record.layer)));
        };
        let mut before = None;
        for &(expert, tokens) in &record.used {
            if expert >= layer.experts || before.is_some_and(|before| before >= expert) {
                return Err(problem(format!(
                    "expert {expert}: expected ascending ids below {}",
                    layer.experts
                )));
            }
            if tokens == 0 || tokens > record.tokens {
                return Err(problem(format!(
                    "expert {expert} is used by {tokens} of {} tokens",
                    record.tokens
                )));
            }
            before = Some(expert);
        }
    }
    Ok((header, records))
}

/// Reads recorded windows.
///
/// # Errors
/// If a line is not what it should be.
pub fn windows(text: &str) -> Result<(Header, Vec<Window>), Error> {
    let (header, records) = read::<Window>(text, Kind::Windows)?;
    for (i, w) in records.iter().enumerate() {
        let is_sound = (w.layer as usize) < header.layers.len()
            && w.host <= w.missing
            && w.missing <= w.needed
            && (0.0..=1.0).contains(&w.share)
            && w.ms.is_finite()
            && w.ms >= 0.0;
        if !is_sound {
            return Err(Error::Trace {
                line: i + 2,
                problem: "has a window that cannot be".to_owned(),
            });
        }
    }
    Ok((header, records))
}

fn read<T: DeserializeOwned>(text: &str, kind: Kind) -> Result<(Header, Vec<T>), Error> {
    let problem = |line: usize, problem: String| Error::Trace {
        line: line + 1,
        problem,
    };
    let parsed = |line: usize, e: serde_json::Error| problem(line, e.to_string());
    let mut lines = text.lines().enumerate();
    let (_, first) = lines
        .next()
        .ok_or_else(|| problem(0, "is empty".to_owned()))?;
    let header: Header = serde_json::from_str(first).map_err(|e| parsed(0, e))?;
    if header.trace != kind || header.version != VERSION {
        let what = format!("expected a trace of {kind:?}, version {VERSION}");
        return Err(problem(0, what.to_lowercase()));
    }
    let shapes = header.layers.iter();
    let is_sound = |s: &LayerShape| (1..=EXPERTS_MAX).contains(&s.experts) && s.used <= s.experts;
    if header.layers.len() as u64 > LAYERS_MAX || !shapes.clone().all(is_sound) {
        return Err(problem(0, "has layers that no model has".to_owned()));
    }
    let mut records = Vec::new();
    for (i, line) in lines {
        if i > TRACE_LINES_MAX {
            return Err(problem(
                i,
                format!("expected at most {TRACE_LINES_MAX} records"),
            ));
        }
        records.push(serde_json::from_str(line).map_err(|e| parsed(i, e))?);
    }
    Ok((header, records))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: &str = r#""layers":[{"layer":1,"experts":4,"used":2,"blob_bytes":100}]"#;

    #[test]
    fn what_is_written_is_read() {
        let header = Header {
            trace: Kind::Routing,
            version: VERSION,
            model: "m".to_owned(),
            layers: vec![LayerShape {
                layer: 1,
                experts: 4,
                used: 2,
                blob_bytes: 100,
            }],
        };
        let record = Routing {
            layer: 0,
            position: 7,
            tokens: 3,
            generated: false,
            used: vec![(0, 3), (2, 1), (3, 2)],
        };
        let line = |x: String| x + "\n";
        let text = line(serde_json::to_string(&header).unwrap())
            + &line(serde_json::to_string(&record).unwrap());
        assert_eq!(routing(&text).unwrap(), (header.clone(), vec![record]));
        assert!(windows(&text).is_err());

        let header = Header {
            trace: Kind::Windows,
            ..header
        };
        let window = Window {
            step: 1,
            layer: 0,
            tokens: 512,
            generated: false,
            needed: 4,
            missing: 2,
            host: 1,
            share: 0.5,
            ms: 3.0,
            skipped: false,
        };
        let text = line(serde_json::to_string(&header).unwrap())
            + &line(serde_json::to_string(&window).unwrap());
        assert_eq!(windows(&text).unwrap(), (header, vec![window]));
        assert!((window.reading() - 1.5).abs() < 1e-12);
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_line() {
        let header = format!(r#"{{"trace":"routing","version":1,"model":"m",{SHAPE}}}"#);
        for (record, line) in [
            (
                r#"{"layer":1,"position":0,"tokens":1,"generated":false,"used":[]}"#,
                2,
            ),
            (
                r#"{"layer":0,"position":0,"tokens":1,"generated":false,"used":[[4,1]]}"#,
                2,
            ),
            (
                r#"{"layer":0,"position":0,"tokens":1,"generated":false,"used":[[1,2]]}"#,
                2,
            ),
            (
                r#"{"layer":0,"position":0,"tokens":1,"generated":false,"used":[[1,1],[1,1]]}"#,
                2,
            ),
            ("{}", 2),
        ] {
            let error = routing(&format!("{header}\n{record}\n")).unwrap_err();
            assert!(
                matches!(error, Error::Trace { line: l, .. } if l == line),
                "{record}: {error}"
            );
        }
        for text in [
            "",
            "{}",
            &header.replace(":1,\"m", ":2,\"m"),
            &header.replace(":4", ":0"),
        ] {
            let error = routing(text).unwrap_err();
            assert!(matches!(error, Error::Trace { line: 1, .. }), "{text}");
        }
    }
}
