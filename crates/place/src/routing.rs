//! Which experts tokens used: the record that an engine writes, and that caches of experts are compared with.
//!
//! As text it is one line of JSON a record: a [`Header`], then a [`Routed`] for each layer of each step, in the order in which they were computed.
//!
//! ```text
//! {"routing":1,"model":"3f..","layers":[{"layer":1,"experts":64,"used":8,"blob_bytes":1327104}, ..]}
//! {"layer":0,"position":0,"tokens":512,"generated":false,"used":[[0,70],[3,12], ..]}
//! ```
//!
//! A record's `layer` is a number among the header's layers: those with experts, from 0 on.

use crate::error::Error;
use crate::limits::{EXPERTS_MAX, LAYERS_MAX, ROUTED_LINES_MAX};
use serde::{Deserialize, Serialize};

/// Version of the text that this code writes and reads.
pub const VERSION: u32 = 1;

/// The first line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// [`VERSION`].
    pub routing: u32,
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
pub struct Routed {
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

/// Reads a recording.
///
/// # Errors
/// If a line is not what it should be.
pub fn read(text: &str) -> Result<(Header, Vec<Routed>), Error> {
    let problem = |line: usize, problem: String| Error::Recording {
        line: line + 1,
        problem,
    };
    let mut lines = text.lines().enumerate();
    let empty = || problem(0, "is empty, expected a header".to_owned());
    let (_, first) = lines.next().ok_or_else(empty)?;
    let header: Header =
        serde_json::from_str(first).map_err(|e| problem(0, format!("is no header: {e}")))?;
    header.check().map_err(|what| problem(0, what))?;
    let mut records = Vec::new();
    for (i, line) in lines {
        if i > ROUTED_LINES_MAX {
            let what = format!("is one too many, expected at most {ROUTED_LINES_MAX} records");
            return Err(problem(i, what));
        }
        let record: Routed =
            serde_json::from_str(line).map_err(|e| problem(i, format!("is no record: {e}")))?;
        record.check(&header).map_err(|what| problem(i, what))?;
        records.push(record);
    }
    Ok((header, records))
}

impl Header {
    fn check(&self) -> Result<(), String> {
        if self.routing != VERSION {
            return Err(format!("has version {}, expected {VERSION}", self.routing));
        }
        let is_sound = |s: &LayerShape| {
            (1..=EXPERTS_MAX).contains(&s.experts) && (1..=s.experts).contains(&s.used)
        };
        if self.layers.len() as u64 > LAYERS_MAX || !self.layers.iter().all(is_sound) {
            return Err("has layers that no model has".to_owned());
        }
        Ok(())
    }
}

impl Routed {
    fn check(&self, header: &Header) -> Result<(), String> {
        let Some(layer) = header.layers.get(self.layer as usize) else {
            let n = header.layers.len();
            return Err(format!("layer is {}, expected less than {n}", self.layer));
        };
        let mut before = None;
        for &(expert, tokens) in &self.used {
            if expert >= layer.experts || before.is_some_and(|before| before >= expert) {
                let most = layer.experts - 1;
                return Err(format!(
                    "expert {expert}: expected ascending ids up to {most}"
                ));
            }
            if tokens == 0 || tokens > self.tokens {
                let all = self.tokens;
                return Err(format!(
                    "expert {expert} is used by {tokens} of {all} tokens"
                ));
            }
            before = Some(expert);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: &str = r#""layers":[{"layer":1,"experts":4,"used":2,"blob_bytes":100}]"#;

    #[test]
    fn what_is_written_is_read() {
        let header = Header {
            routing: VERSION,
            model: "m".to_owned(),
            layers: vec![LayerShape {
                layer: 1,
                experts: 4,
                used: 2,
                blob_bytes: 100,
            }],
        };
        let record = Routed {
            layer: 0,
            position: 7,
            tokens: 3,
            generated: false,
            used: vec![(0, 3), (2, 1), (3, 2)],
        };
        let line = |x: String| x + "\n";
        let text = line(serde_json::to_string(&header).unwrap())
            + &line(serde_json::to_string(&record).unwrap());
        assert_eq!(read(&text).unwrap(), (header, vec![record]));
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_its_line() {
        let header = format!(r#"{{"routing":1,"model":"m",{SHAPE}}}"#);
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
            let error = read(&format!("{header}\n{record}\n")).unwrap_err();
            assert!(
                matches!(error, Error::Recording { line: l, .. } if l == line),
                "{record}: {error}"
            );
        }
        for text in [
            "",
            "{}",
            &header.replace("routing\":1", "routing\":2"),
            &header.replace(":4", ":0"),
        ] {
            let error = read(text).unwrap_err();
            assert!(matches!(error, Error::Recording { line: 1, .. }), "{text}");
        }
    }
}
