//! Damaged model files, and what the message about each has to name.
//!
//! Tests of other crates can take this module over by its path; it needs `gguf` only:
//!
//! ```text
//! #[path = "../../engine/tests/common/damaged/mod.rs"]
//! mod damaged;
//! for file in damaged::made_up(dir) { ... }
//! ```
#![allow(dead_code, unused_imports, reason = "each test program uses a part")]

mod contents;
mod headers;
mod parts;
mod real;
mod sketch;

pub use real::of_model;
pub use sketch::{Sketch, TOKENS};

use std::fs;
use std::path::{Path, PathBuf};

use gguf::Header;

/// A file that cannot be run.
pub struct Damaged {
    /// What was done to it.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// Texts that the message has to hold, all of them: the place, and what was found or expected there.
    pub says: Vec<String>,
    /// Who notices.
    pub noticed_by: NoticedBy,
}

/// Who notices a damage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoticedBy {
    /// Everybody who loads the model with its tokenizer.
    Load,
    /// Only who makes a session with the default cache.
    Session,
    /// Only who asks for the chat template.
    Chat,
}

/// All damaged files that are made from the made-up model, written to `dir`.
pub fn made_up(dir: &Path) -> Vec<Damaged> {
    let mut files = Files::new(dir);
    headers::add(&mut files);
    contents::add(&mut files);
    parts::add(&mut files);
    files.list
}

/// Collects files in a folder.
struct Files<'a> {
    dir: &'a Path,
    list: Vec<Damaged>,
}

impl<'a> Files<'a> {
    fn new(dir: &'a Path) -> Self {
        Self {
            dir,
            list: Vec::new(),
        }
    }

    fn add(&mut self, name: &str, path: PathBuf, says: &[&str]) -> &mut Damaged {
        assert!(self.list.iter().all(|d| d.name != name), "{name} twice");
        self.list.push_mut(Damaged {
            name: name.to_owned(),
            path,
            says: says.iter().map(|&text| text.to_owned()).collect(),
            noticed_by: NoticedBy::Load,
        })
    }

    fn bytes(&mut self, name: &str, bytes: &[u8], says: &[&str]) {
        let path = self.dir.join(format!("{name}.gguf"));
        fs::write(&path, bytes).expect("it can be written");
        self.add(name, path, says);
    }

    /// A sketch with something changed.
    fn sketch(
        &mut self,
        name: &str,
        says: &[&str],
        change: impl FnOnce(&mut Sketch),
    ) -> &mut Damaged {
        let mut sketch = Sketch::sound();
        change(&mut sketch);
        let path = self.dir.join(format!("{name}.gguf"));
        sketch.write(&path);
        self.add(name, path, says)
    }
}

/// Where the bytes after a text begin; the text's last place counts.
fn after(bytes: &[u8], text: &str) -> usize {
    let at = bytes
        .windows(text.len())
        .rposition(|w| w == text.as_bytes());
    at.unwrap_or_else(|| panic!("{text} is there")) + text.len()
}

/// `bytes` with some of them replaced.
fn patched(bytes: &[u8], at: usize, with: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + with.len()].copy_from_slice(with);
    bytes
}

/// Where the last tensor ends.
pub fn data_end(bytes: &[u8]) -> usize {
    let header = Header::parse(bytes).expect("it is sound");
    let ends = header.tensors.iter().map(|t| t.offset + t.n_bytes());
    ends.max().expect("it has tensors") as usize
}
