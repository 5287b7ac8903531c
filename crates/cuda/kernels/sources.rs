// What the PTX of a kernel source depends on. Used by `xtask ptx`, which writes the digest, and by a test, which compares it.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use sha2::{Digest, Sha256};

/// First line of compiled files, before the digest.
pub const MARK: &str = "// sources: sha256 ";

/// Names of all sources (`NAME.cu`) in a folder, in order.
pub fn names(folder: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "cu")
            && let Some(name) = path.file_stem().and_then(|n| n.to_str())
        {
            names.push(name.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// SHA-256, in hexadecimal, of a source and of all headers beside it that it includes, directly or not.
pub fn digest(folder: &Path, name: &str) -> io::Result<String> {
    let mut files = BTreeMap::new();
    let mut wanted = vec![format!("{name}.cu")];
    while let Some(file) = wanted.pop() {
        if files.contains_key(&file) {
            continue;
        }
        let text = std::fs::read_to_string(folder.join(&file))?;
        let included = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix("#include \"")?.strip_suffix('"'));
        wanted.extend(included.map(str::to_owned));
        files.insert(file, text);
    }
    let mut hash = Sha256::new();
    for (file, text) in files {
        hash.update(format!("{file} {}\n{text}", text.len()));
    }
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}
