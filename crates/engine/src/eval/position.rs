//! What a model answers at one position, in the form in which it is stored: one JSON object a line.

use std::cmp::Ordering;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::EvalError;

/// Longest line that is read: 20 candidates take 500 bytes, a text of a million ids seven million.
const LINE_BYTES_MAX: u64 = 64 << 20;

/// The most likely tokens after one position.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Position {
    /// Index of the text.
    pub text: usize,
    /// Position in the text.
    pub pos: usize,
    /// The token there.
    pub token: u32,
    /// Logarithm of the sum of the exponentials of all logits.
    pub logsumexp: f64,
    /// The highest logits, highest first; equal ones in the order of the ids.
    pub top: Vec<(u32, f32)>,
}

impl Position {
    /// Summarises the logits of one position by its `n_top` highest.
    pub fn new(
        text: usize,
        pos: usize,
        token: u32,
        logits: &[f32],
        n_top: usize,
    ) -> Result<Self, EvalError> {
        if let Some((token, &value)) = logits.iter().enumerate().find(|(_, x)| !x.is_finite()) {
            return Err(EvalError::NotFinite {
                text,
                pos,
                token,
                value,
            });
        }
        let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
        let n_top = n_top.min(ids.len());
        let descending = |a: &u32, b: &u32| {
            logits[*b as usize]
                .total_cmp(&logits[*a as usize])
                .then(a.cmp(b))
        };
        if n_top < ids.len() {
            ids.select_nth_unstable_by(n_top, descending);
            ids.truncate(n_top);
        }
        ids.sort_unstable_by(descending);
        let top = ids
            .into_iter()
            .map(|id| (id, logits[id as usize]))
            .collect();
        Ok(Self {
            text,
            pos,
            token,
            logsumexp: log_sum_exp(logits),
            top,
        })
    }

    fn check(&self) -> Result<(), &'static str> {
        if self.top.is_empty() {
            return Err("\"top\" is empty");
        }
        if !self.logsumexp.is_finite() || self.top.iter().any(|(_, x)| !x.is_finite()) {
            return Err("a logit is no finite number");
        }
        if self
            .top
            .windows(2)
            .any(|w| w[0].1.partial_cmp(&w[1].1) == Some(Ordering::Less))
        {
            return Err("\"top\" is not in descending order");
        }
        Ok(())
    }
}

/// `ln(sum(exp(x)))` in f64, free of overflow.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits
        .iter()
        .map(|&x| (f64::from(x) - f64::from(max)).exp())
        .sum();
    f64::from(max) + sum.ln()
}

/// Reads stored positions, one JSON object a line.
pub fn read_positions(file: &Path) -> Result<Vec<Position>, EvalError> {
    read_lines(file, |line| {
        let position: Position = serde_json::from_str(line).map_err(|e| e.to_string())?;
        position.check()?;
        Ok(position)
    })
}

/// Reads texts as token ids: a line a text, decimal ids separated by spaces. Ids must be below `n_vocab`.
pub fn read_token_lines(file: &Path, n_vocab: usize) -> Result<Vec<Vec<u32>>, EvalError> {
    read_lines(file, |line| {
        line.split_ascii_whitespace()
            .map(|word| match word.parse::<u32>() {
                Ok(id) if (id as usize) < n_vocab => Ok(id),
                Ok(id) => Err(format!("token {id}, expected less than {n_vocab}")),
                Err(_) => Err(format!(
                    "'{}' is no token id",
                    word.escape_debug().take(40).collect::<String>()
                )),
            })
            .collect()
    })
}

/// Reads the lines of a file that are not blank.
fn read_lines<T>(
    file: &Path,
    mut parse: impl FnMut(&str) -> Result<T, String>,
) -> Result<Vec<T>, EvalError> {
    let io = |source| EvalError::Io {
        file: file.to_path_buf(),
        source,
    };
    let mut reader = BufReader::new(File::open(file).map_err(io)?);
    let mut items = Vec::new();
    let mut line = String::new();
    for number in 1.. {
        line.clear();
        let read = reader
            .by_ref()
            .take(LINE_BYTES_MAX)
            .read_line(&mut line)
            .map_err(io)?;
        if read == 0 {
            break;
        }
        let bad = |why| EvalError::Line {
            file: file.to_path_buf(),
            line: number,
            why,
        };
        if read as u64 == LINE_BYTES_MAX {
            return Err(bad(format!("longer than {LINE_BYTES_MAX} bytes")));
        }
        if !line.trim().is_empty() {
            items.push(parse(line.trim()).map_err(bad)?);
        }
    }
    Ok(items)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    #[test]
    fn a_position_keeps_the_highest_in_order() {
        let logits = [1.0, 3.0, -2.0, 3.0, 2.5];
        let p = Position::new(0, 7, 42, &logits, 3).unwrap();
        assert_eq!(p.top, [(1, 3.0), (3, 3.0), (4, 2.5)]);
        let naive: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
        assert!((p.logsumexp - naive).abs() < 1e-12);
        assert_eq!(Position::new(0, 0, 0, &logits, 99).unwrap().top.len(), 5);
        let error = Position::new(1, 2, 0, &[0.0, f32::NAN], 2).unwrap_err();
        assert!(
            matches!(
                error,
                EvalError::NotFinite {
                    text: 1,
                    pos: 2,
                    token: 1,
                    ..
                }
            ),
            "{error}"
        );
        assert!((log_sum_exp(&[1000.0, 1000.0]) - (1000.0 + 2f64.ln())).abs() < 1e-9);
    }

    #[test]
    fn the_stored_form_is_read_back() {
        let mut p = Position::new(2, 1, 9, &[0.25, 0.1, 7.3], 2).unwrap();
        // A number whose decimal form is exact: the JSON reader may be off in the last bit.
        p.logsumexp = 7.375;
        let line = serde_json::to_string(&p).unwrap();
        assert!(
            line.starts_with(r#"{"text":2,"pos":1,"token":9,"logsumexp":"#),
            "{line}"
        );
        let stored = file(&format!("{line}\n\n{line}\n"));
        assert_eq!(read_positions(stored.path()).unwrap(), [p.clone(), p]);
        for bad in [
            "{}",
            "nonsense",
            r#"{"text":0,"pos":0,"token":1,"logsumexp":1.0,"top":[]}"#,
            r#"{"text":0,"pos":0,"token":1,"logsumexp":1.0,"top":[[1,1.0],[2,2.0]]}"#,
            r#"{"text":0,"pos":0,"token":-1,"logsumexp":1.0,"top":[[1,1.0]]}"#,
        ] {
            let error = read_positions(file(bad).path()).unwrap_err();
            assert!(
                matches!(error, EvalError::Line { line: 1, .. }),
                "{bad}: {error}"
            );
        }
    }

    #[test]
    fn ids_are_checked_against_the_vocabulary() {
        let good = file("1 2 3\r\n\n  4 \n");
        assert_eq!(
            read_token_lines(good.path(), 5).unwrap(),
            [vec![1, 2, 3], vec![4]]
        );
        for bad in ["1 5", "1 -2", "1,2", "1 x", "99999999999"] {
            let error = read_token_lines(file(bad).path(), 5).unwrap_err();
            assert!(
                matches!(error, EvalError::Line { line: 1, .. }),
                "{bad}: {error}"
            );
        }
    }
}
