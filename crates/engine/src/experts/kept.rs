//! What was learnt of a model's experts, kept for later processes: which of them are used, and what gates found.
//!
//! A file for each model, told from others by its header, for plans are made before weights are read. It is only where a session begins, so one
//! that cannot be read, or is of something else, counts as none.

use super::{Profile, Recalled, Verdicts};
use crate::model::Contents;
use crate::probe;
use gguf::{GgufFile, Value};
use place::experts::Layer;
use place::profile;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Bytes of a file at most: a hundred layers of 1024 experts, and what is beside them.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// A folder of what was learnt.
#[derive(Debug, Clone)]
pub struct Kept {
    folder: PathBuf,
}

/// What was learnt, and of what.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    version: u32,
    of: String,
    profile: Profile,
    /// By machine, and how much has room.
    verdicts: Vec<(String, Verdicts)>,
}

/// The version that is written and read.
const VERSION: u32 = 2;

/// Machines and placements whose verdicts a file has, at most: those that came last.
const VERDICTS_MAX: usize = 32;

impl Kept {
    /// The one beside the probes.
    ///
    /// # Errors
    /// If the platform has no folder for caches.
    pub fn open() -> Result<Self, probe::Error> {
        Ok(Self {
            folder: probe::dir()?.with_file_name("experts"),
        })
    }

    /// Another folder.
    pub fn in_folder(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
        }
    }

    fn path(&self, model: &str) -> PathBuf {
        self.folder.join(format!("{model}.json"))
    }

    fn read(&self, model: &str) -> Option<Entry> {
        let file = fs::File::open(self.path(model)).ok()?;
        let mut text = String::new();
        file.take(FILE_BYTES_MAX).read_to_string(&mut text).ok()?;
        let entry: Entry = serde_json::from_str(&text).ok()?;
        (entry.version == VERSION && entry.of == model).then_some(entry)
    }

    /// What was learnt of a model with these layers.
    pub fn profile(&self, model: &str, layers: &[Layer]) -> Option<Profile> {
        let profile = self.read(model)?.profile;
        profile.check(layers).is_ok().then_some(profile)
    }

    /// The same, and what was found where it was placed so.
    pub fn recall(&self, model: &str, layers: &[Layer], placed: &str) -> Recalled {
        let Some(entry) = self.read(model) else {
            return Recalled::default();
        };
        let found = entry.verdicts.iter().find(|(of, _)| of == placed);
        let mut verdicts = found.map_or_else(Verdicts::default, |(_, verdicts)| *verdicts);
        for verdict in &mut verdicts.buckets {
            *verdict = verdict.filter(|v| v.verdict.amount > 0.0 && v.verdict.amount <= 1.0);
        }
        Recalled {
            profile: Some(entry.profile).filter(|profile| profile.check(layers).is_ok()),
            verdicts,
        }
    }

    /// Keeps what was learnt. Whatever happens, the file is then the old or the new one.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn keep(
        &self,
        model: &str,
        placed: &str,
        profile: Profile,
        verdicts: Verdicts,
    ) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let path = self.path(model);
        let mut all = self.read(model).map_or_else(Vec::new, |e| e.verdicts);
        all.retain(|(of, _)| of != placed);
        all.push((placed.to_owned(), verdicts));
        let more = all.len().saturating_sub(VERDICTS_MAX);
        all.drain(..more);
        let entry = Entry {
            version: VERSION,
            of: model.to_owned(),
            profile,
            verdicts: all,
        };
        let text = serde_json::to_string(&entry)?;
        // Another process may keep its own at the same time.
        let part = path.with_extension(format!("{}.part", std::process::id()));
        let written = fs::write(&part, text).and_then(|()| fs::rename(&part, &path));
        if written.is_err() {
            let _ = fs::remove_file(&part);
        }
        written
    }
}

/// What tells a model from others by its header: its parameters, lists such as the vocabulary not among them, and its tensors.
pub fn model_key(file: &GgufFile, contents: Contents) -> String {
    let mut hash = Sha256::new();
    hash.update(format!("{contents:?}"));
    for (key, value) in file.metadata().iter() {
        hash.update(key);
        if !matches!(value, Value::Array(_)) {
            hash.update(format!("{value:?}"));
        }
    }
    for tensor in file.tensors() {
        hash.update(format!("{tensor:?}"));
    }
    let digest = hash.finalize();
    digest.iter().take(16).map(|b| format!("{b:02x}")).collect()
}

/// What verdicts are of, beside the model: the machine and its threads, and about how much of the experts has room.
pub fn placed(
    machine: &profile::Key,
    threads: usize,
    layers: &[Layer],
    cache_bytes: u64,
) -> String {
    let all = place::experts::blob_bytes(layers).max(1);
    let part = (cache_bytes as f64 / all as f64 * 20.0).round() * 5.0;
    format!(
        "{}, {threads} threads, {}, {}, {part:.0} % of the experts",
        machine.cpu, machine.device, machine.driver,
    )
}
