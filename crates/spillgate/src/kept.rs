//! The file that a context is kept in between runs.

use std::path::Path;

use anyhow::Result;
use engine::generate::Generator;
use engine::session::{Session, SessionFileError};

use crate::failure::Advised;

/// Refuses a file that could not be written in the end, before anything is computed.
pub fn check(path: Option<&Path>) -> Result<()> {
    let folder = path.and_then(Path::parent);
    match folder.filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        None => Ok(()),
        Some(folder) => {
            let what = format!("--session: there is no folder {}", folder.display());
            Err(Advised::new(what, "make it first, or name a file elsewhere").into())
        }
    }
}

/// Continues from a file, if one is asked for and exists. Returns the note in it.
pub fn restore(
    generator: &mut Generator<'_, Session<'_>>,
    path: Option<&Path>,
) -> Result<Option<String>> {
    let Some(path) = path.filter(|path| path.exists()) else {
        return Ok(None);
    };
    match generator.restore(path) {
        Ok(note) => {
            let tokens = generator.decoder().n_past();
            tracing::info!("{}: {tokens} tokens of context", path.display());
            Ok(Some(note))
        }
        Err(error @ (SessionFileError::Damaged { .. } | SessionFileError::Foreign { .. })) => {
            let hint = "--session takes another file, or remove this one to begin anew";
            Err(Advised::new(error.to_string(), hint).into())
        }
        Err(error) => Err(error.into()),
    }
}

/// Writes the context to a file, if one is asked for, and a note beside it.
pub fn save(generator: &Generator<'_, Session<'_>>, note: &str, path: Option<&Path>) -> Result<()> {
    path.map_or(Ok(()), |path| Ok(generator.save(note, path)?))
}
