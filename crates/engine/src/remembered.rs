//! What gates have found, kept for later processes: a file for each machine, model and kind of spill.
//!
//! A verdict is only where a session begins: its gate looks with the second token whether it still holds. So a file that cannot be read, or is
//! of something else, counts as none, and one that cannot be written is no failure of what was asked for.

use crate::model::Model;
use crate::probe;
use crate::session::{Finding, SessionOptions};
use place::profile;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Bytes of a file at most.
const FILE_BYTES_MAX: u64 = 1 << 16;

/// Verdicts in a folder.
#[derive(Debug, Clone)]
pub struct Remembered {
    folder: PathBuf,
}

/// What was found, and what it is of.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    of: String,
    #[serde(rename = "verdict")]
    found: Finding,
}

impl Remembered {
    /// Those beside the probes.
    ///
    /// # Errors
    /// If the platform has no folder for caches.
    pub fn open() -> Result<Self, probe::Error> {
        Ok(Self {
            folder: probe::dir()?.with_file_name("gate"),
        })
    }

    /// Those in another folder.
    pub fn in_folder(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
        }
    }

    fn path(&self, of: &str) -> PathBuf {
        let digest = Sha256::digest(of.as_bytes());
        let name: String = digest.iter().take(8).map(|b| format!("{b:02x}")).collect();
        self.folder.join(format!("{name}.json"))
    }

    /// What was found, if it makes sense.
    pub fn recall(&self, of: &str) -> Option<Finding> {
        let file = fs::File::open(self.path(of)).ok()?;
        let mut text = String::new();
        file.take(FILE_BYTES_MAX).read_to_string(&mut text).ok()?;
        let entry: Entry = serde_json::from_str(&text).ok()?;
        let amount = entry.found.verdict.amount;
        let is_amount = amount > 0.0 && amount <= 1.0;
        (entry.of == of && is_amount).then_some(entry.found)
    }

    /// Keeps what was found.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn keep(&self, of: &str, found: Finding) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let entry = Entry {
            of: of.to_owned(),
            found,
        };
        let text = serde_json::to_string(&entry)?;
        let path = self.path(of);
        // Another process may keep its own at the same time.
        let part = path.with_extension(format!("{}.part", std::process::id()));
        let written = fs::write(&part, text).and_then(|()| fs::rename(&part, &path));
        if written.is_err() {
            let _ = fs::remove_file(&part);
        }
        written
    }
}

/// What a session's verdict is of: the machine, the model, how its cells are stored, and about how many of them are in host memory.
pub fn of_session(machine: &profile::Key, model: &Model, options: &SessionOptions) -> String {
    let placing = &options.placing;
    format!(
        "{}, {} threads, {}, {}, model {}, {}/{}, window {}, tail {}",
        machine.cpu,
        model.threads(),
        machine.device,
        machine.driver,
        model.fingerprint(),
        options.type_k,
        options.type_v,
        placing.window_blocks.map_or(0, usize::next_power_of_two),
        placing.tail_blocks.next_power_of_two(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::Verdict;

    fn found(shares: bool) -> Finding {
        Finding {
            ratios: vec![0.8, 0.9].into(),
            ..Finding::from(Verdict {
                shares,
                amount: 0.6,
            })
        }
    }

    #[test]
    fn what_was_kept_is_recalled_for_the_same_thing_alone() {
        let folder = tempfile::tempdir().unwrap();
        let remembered = Remembered::in_folder(&folder.path().join("new"));
        assert_eq!(remembered.recall("a"), None);
        remembered.keep("a", found(true)).unwrap();
        remembered.keep("b", found(false)).unwrap();
        assert_eq!(remembered.recall("a"), Some(found(true)));
        assert_eq!(remembered.recall("b"), Some(found(false)));
        assert_eq!(remembered.recall("c"), None);
    }

    #[test]
    fn files_that_make_no_sense_count_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let remembered = Remembered::in_folder(folder.path());
        let path = remembered.path("a");
        for text in [
            "",
            "{}",
            r#"{"of":"b","verdict":{"shares":true,"amount":0.5}}"#,
            r#"{"of":"a","verdict":{"shares":true,"amount":0}}"#,
            r#"{"of":"a","verdict":{"shares":true,"amount":1e300}}"#,
            r#"{"of":"a","verdict":{"shares":1,"amount":0.5}}"#,
        ] {
            fs::write(&path, text).unwrap();
            assert_eq!(remembered.recall("a"), None, "{text}");
        }
        fs::write(&path, vec![b'['; 1 << 20]).unwrap();
        assert_eq!(remembered.recall("a"), None);
    }
}
