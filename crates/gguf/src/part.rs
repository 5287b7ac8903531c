//! One open file.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::cursor::{FileSource, read_exact_at};
use crate::error::Error;
use crate::file::MapMode;
use crate::header::Header;
use crate::map::map;

/// A file that is open, and mapped where that was asked for.
#[derive(Debug)]
pub(crate) struct Part {
    path: PathBuf,
    /// `None`: there is a header alone, which was in memory.
    file: Option<File>,
    /// The file's size when it was opened.
    bytes: u64,
    map: Option<Mmap>,
}

impl Part {
    pub(crate) fn open(path: &Path, mode: MapMode) -> io::Result<Part> {
        // Asked before opening, because opening a pipe waits for somebody to write.
        if !fs::metadata(path)?.is_file() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "it is not a file",
            ));
        }
        let file = File::open(path)?;
        let bytes = file.metadata()?.len();
        let map = match mode {
            // Nothing can be mapped of an empty file; its header is refused soon enough.
            MapMode::Mmap if bytes > 0 => {
                let len = usize::try_from(bytes).map_err(|_| io::ErrorKind::FileTooLarge)?;
                Some(map(&file, len)?)
            }
            MapMode::Mmap | MapMode::Read => None,
        };
        Ok(Part {
            path: path.to_owned(),
            file: Some(file),
            bytes,
            map,
        })
    }

    /// A file that ends with its header, of `bytes` bytes, and was never on a disk.
    pub(crate) fn header_alone(name: &str, bytes: u64) -> Part {
        Part {
            path: name.into(),
            file: None,
            bytes,
            map: None,
        }
    }

    fn file(&self) -> io::Result<&File> {
        let none = || io::Error::new(io::ErrorKind::Unsupported, "there is a header alone");
        self.file.as_ref().ok_or_else(none)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The file's size when it was opened.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.bytes
    }

    /// What tells this file from every other one, whatever its name.
    pub(crate) fn identity(&self) -> io::Result<(u64, u64)> {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            let metadata = self.file()?.metadata()?;
            Ok((metadata.dev(), metadata.ino()))
        }
        // Where there is no cheap identity, the parts' own numbers have to tell them apart.
        #[cfg(not(unix))]
        {
            use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
            let hasher = BuildHasherDefault::<DefaultHasher>::default();
            Ok((0, hasher.hash_one(&self.path)))
        }
    }

    pub(crate) fn header(&self) -> Result<Header, Error> {
        match &self.map {
            Some(map) => Header::read(&self.path, &map[..], self.bytes),
            None => {
                let file = self.file().map_err(|source| self.read_error(source))?;
                Header::read(&self.path, FileSource::new(file, self.bytes), self.bytes)
            }
        }
    }

    fn read_error(&self, source: io::Error) -> Error {
        Error::Io {
            file: self.path.clone(),
            doing: "read tensor data",
            source,
        }
    }

    /// `len` bytes from `start`, both checked against the size that the file had when it was opened.
    pub(crate) fn bytes(&self, start: u64, len: u64) -> Result<Cow<'_, [u8]>, Error> {
        let len =
            usize::try_from(len).map_err(|_| self.read_error(io::ErrorKind::OutOfMemory.into()))?;
        if let Some(map) = &self.map {
            // A mapped page that the file no longer has ends the process, so look again; it costs less than a microsecond.
            let now = self
                .file()
                .and_then(File::metadata)
                .map_err(|source| self.read_error(source))?
                .len();
            if now < self.bytes {
                let message = format!(
                    "it had {} bytes when it was opened and has {now} now",
                    self.bytes
                );
                return Err(self.read_error(io::Error::new(io::ErrorKind::UnexpectedEof, message)));
            }
            return Ok(Cow::Borrowed(&map[start as usize..][..len]));
        }
        let mut bytes = Vec::new();
        if bytes.try_reserve_exact(len).is_err() {
            return Err(self.read_error(io::ErrorKind::OutOfMemory.into()));
        }
        bytes.resize(len, 0);
        self.read_at(start, &mut bytes)?;
        Ok(Cow::Owned(bytes))
    }

    /// Fills `out` from `start` without touching the mapping.
    pub(crate) fn read_at(&self, start: u64, out: &mut [u8]) -> Result<(), Error> {
        self.file()
            .and_then(|file| read_exact_at(file, out, start))
            .map_err(|source| self.read_error(source))
    }
}
