//! Servers that run on this machine: each leaves a note of itself.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What a server says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    pub pid: u32,
    pub url: String,
    pub model: String,
}

/// A note that is there. Dropped, it is taken away.
pub struct Left(PathBuf);

impl Drop for Left {
    fn drop(&mut self) {
        // Whoever reads it will see that nobody answers.
        let _ = fs::remove_file(&self.0);
    }
}

fn folder() -> Option<PathBuf> {
    let base = dirs::runtime_dir().or_else(dirs::cache_dir)?;
    Some(base.join("spillgate").join("servers"))
}

/// Leaves a note; `None` where there is no place for it.
pub fn leave(note: &Note) -> io::Result<Option<Left>> {
    let Some(folder) = folder() else {
        return Ok(None);
    };
    fs::create_dir_all(&folder)?;
    let path = folder.join(format!("{}.json", note.pid));
    let mut file = fs::File::create(&path)?;
    file.write_all(serde_json::to_string(note)?.as_bytes())?;
    Ok(Some(Left(path)))
}

/// All notes. Those of processes that are gone are taken away.
pub fn all() -> Vec<Note> {
    let Some(folder) = folder() else {
        return Vec::new();
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut notes: Vec<Note> = entries
        .filter_map(|entry| {
            let text = fs::read_to_string(entry.path()).ok()?;
            let note: Note = serde_json::from_str(&text).ok()?;
            if cfg!(target_os = "linux") && !PathBuf::from(format!("/proc/{}", note.pid)).exists() {
                // Another reader may have done so already.
                let _ = fs::remove_file(entry.path());
                return None;
            }
            Some(note)
        })
        .collect();
    notes.sort_by_key(|note| note.pid);
    notes
}
