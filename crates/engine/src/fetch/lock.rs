//! One process at a time works on a file.

use std::fs::{self, File, TryLockError};
use std::path::Path;
use std::thread;

use super::{FetchError, Progress, limits, with_suffix};

/// Holds the lock of one model's file; dropping it (or the end of the process) frees it.
///
/// The lock file stays: removing it would let a third process lock a new file while the second holds the old one.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Waits until no other process works on `path`, which need not exist; its folder is made.
    pub fn acquire(path: &Path, progress: &mut dyn Progress) -> Result<Self, FetchError> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).map_err(|e| FetchError::io("create the folder", dir, e))?;
        }
        let lock_path = with_suffix(path, ".lock");
        let file = File::options()
            .create(true)
            .append(true)
            .open(&lock_path)
            .map_err(|e| FetchError::io("open the lock", &lock_path, e))?;
        let mut told = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { _file: file }),
                Err(TryLockError::WouldBlock) => {
                    if !told {
                        progress.note(&format!(
                            "another process is fetching {}; waiting for it",
                            path.display()
                        ));
                        told = true;
                    }
                }
                Err(TryLockError::Error(e)) => return Err(FetchError::io("lock", &lock_path, e)),
            }
            if progress.interrupted() {
                return Err(FetchError::Interrupted);
            }
            thread::sleep(limits::POLL);
        }
    }
}
