//! A position in a file's bytes that cannot pass their end: every read names what it is for and is checked first.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::Path;

use crate::error::{Error, Place};
use crate::limits::{HEADER_BYTES_MAX, READ_CHUNK_BYTES};

/// Where a header's bytes come from, from the first one on.
pub(crate) trait Source {
    /// The next `n` bytes; at most [`READ_CHUNK_BYTES`] are asked for, and never more than the file has.
    fn take(&mut self, n: usize) -> io::Result<&[u8]>;
}

/// Bytes in memory, perhaps mapped.
impl Source for &[u8] {
    fn take(&mut self, n: usize) -> io::Result<&[u8]> {
        let (taken, rest) = self
            .split_at_checked(n)
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        *self = rest;
        Ok(taken)
    }
}

/// A file, a piece of which is in memory at a time.
pub(crate) struct FileSource<'a> {
    file: &'a File,
    file_bytes: u64,
    /// Where the next piece begins in the file.
    next: u64,
    piece: Box<[u8]>,
    /// The part of `piece` that was read and not taken.
    ready: std::ops::Range<usize>,
}

impl FileSource<'_> {
    pub(crate) fn new(file: &File, file_bytes: u64) -> FileSource<'_> {
        FileSource {
            file,
            file_bytes,
            next: 0,
            piece: vec![0; READ_CHUNK_BYTES].into_boxed_slice(),
            ready: 0..0,
        }
    }
}

impl Source for FileSource<'_> {
    fn take(&mut self, n: usize) -> io::Result<&[u8]> {
        if self.ready.len() < n {
            let kept = self.ready.len();
            self.piece.copy_within(self.ready.clone(), 0);
            let room = (self.piece.len() - kept) as u64;
            let fresh = room.min(self.file_bytes - self.next) as usize;
            read_exact_at(self.file, &mut self.piece[kept..kept + fresh], self.next)?;
            self.next += fresh as u64;
            self.ready = 0..kept + fresh;
        }
        if self.ready.len() < n {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let start = self.ready.start;
        self.ready.start += n;
        Ok(&self.piece[start..start + n])
    }
}

/// Fills `out` from a position, without the file's own position, so that threads can share the file.
#[cfg(unix)]
pub(crate) fn read_exact_at(file: &File, out: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

/// Fills `out` from a position.
#[cfg(windows)]
pub(crate) fn read_exact_at(file: &File, mut out: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !out.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, out, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                out = &mut out[n..];
                offset += n as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// What is being read, for messages.
#[derive(Clone, Copy)]
pub(crate) enum Item<'a> {
    Header,
    KeyNo(u64),
    Key(&'a str),
    TensorNo(u64),
    Tensor(&'a str),
}

impl fmt::Display for Item<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Item::Header => write!(f, "header"),
            Item::KeyNo(no) => write!(f, "key number {no}"),
            Item::Key(key) => write!(f, "key `{key}`"),
            Item::TensorNo(no) => write!(f, "tensor number {no}"),
            Item::Tensor(name) => write!(f, "tensor `{name}`"),
        }
    }
}

/// A position in a header, whose reads are all checked against the end of the file first.
pub(crate) struct Cursor<'a, S> {
    pub(crate) file: &'a Path,
    source: S,
    file_bytes: u64,
    /// The last byte that a header may reach: that of the file, or of any header.
    end_max: u64,
    pos: u64,
}

impl<'a, S: Source> Cursor<'a, S> {
    pub(crate) fn new(file: &'a Path, source: S, file_bytes: u64) -> Self {
        Cursor {
            file,
            source,
            file_bytes,
            end_max: file_bytes.min(HEADER_BYTES_MAX),
            pos: 0,
        }
    }

    pub(crate) fn pos(&self) -> u64 {
        self.pos
    }

    /// Bytes that the file has from here.
    pub(crate) fn left(&self) -> u64 {
        self.file_bytes - self.pos
    }

    pub(crate) fn place(&self) -> Place {
        Place::new(self.file, self.pos)
    }

    /// Checks that the header can go on for `needs` bytes.
    #[inline]
    pub(crate) fn check_left(&self, item: Item<'_>, needs: u64) -> Result<(), Error> {
        // No underflow: nothing is read beyond.
        if needs <= self.end_max - self.pos {
            return Ok(());
        }
        Err(self.no_more(item, needs))
    }

    #[cold]
    fn no_more(&self, item: Item<'_>, needs: u64) -> Error {
        let at = self.place();
        let item = item.to_string();
        let left = self.left();
        if needs > left {
            return Error::UnexpectedEnd {
                at,
                item,
                needs,
                left,
            };
        }
        Error::Limit {
            at,
            item,
            what: "end of the header",
            found: self.pos + needs,
            max: HEADER_BYTES_MAX,
        }
    }

    pub(crate) fn check_limit(
        &self,
        item: Item<'_>,
        what: &'static str,
        found: u64,
        max: u64,
    ) -> Result<(), Error> {
        if found <= max {
            return Ok(());
        }
        Err(Error::Limit {
            at: self.place(),
            item: item.to_string(),
            what,
            found,
            max,
        })
    }

    /// The next `n` bytes, at most [`READ_CHUNK_BYTES`].
    pub(crate) fn take(&mut self, item: Item<'_>, n: usize) -> Result<&[u8], Error> {
        debug_assert!(n <= READ_CHUNK_BYTES);
        self.check_left(item, n as u64)?;
        self.pos += n as u64;
        self.source.take(n).map_err(|source| Error::Io {
            file: self.file.to_owned(),
            doing: "read the header",
            source,
        })
    }

    fn array<const N: usize>(&mut self, item: Item<'_>) -> Result<[u8; N], Error> {
        let bytes = self.take(item, N)?;
        Ok(bytes
            .try_into()
            .expect("take returns as many bytes as asked for"))
    }

    pub(crate) fn u8(&mut self, item: Item<'_>) -> Result<u8, Error> {
        Ok(self.array::<1>(item)?[0])
    }

    pub(crate) fn u32(&mut self, item: Item<'_>) -> Result<u32, Error> {
        self.array(item).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, item: Item<'_>) -> Result<u64, Error> {
        self.array(item).map(u64::from_le_bytes)
    }

    /// One number of `N` bytes.
    pub(crate) fn number<T, const N: usize>(
        &mut self,
        item: Item<'_>,
        decode: fn([u8; N]) -> T,
    ) -> Result<T, Error> {
        self.array(item).map(decode)
    }

    /// `count` numbers of `N` bytes each.
    pub(crate) fn numbers<T, const N: usize>(
        &mut self,
        item: Item<'_>,
        count: u64,
        decode: fn([u8; N]) -> T,
    ) -> Result<Box<[T]>, Error> {
        self.check_left(item, count.saturating_mul(N as u64))?;
        // The file has the bytes, so the count is below the header's bound and fits any `usize`.
        let count = count as usize;
        let mut numbers = Vec::with_capacity(count);
        while numbers.len() < count {
            let n = (count - numbers.len()).min(READ_CHUNK_BYTES / N);
            let bytes = self.take(item, n * N)?;
            let (chunks, _) = bytes.as_chunks::<N>();
            numbers.extend(chunks.iter().map(|&chunk| decode(chunk)));
        }
        Ok(numbers.into_boxed_slice())
    }

    /// Appends a string, which is its length and as many bytes.
    pub(crate) fn append_string(&mut self, item: Item<'_>, out: &mut Vec<u8>) -> Result<(), Error> {
        let len = self.u64(item)?;
        self.check_left(item, len)?;
        let mut left = len as usize;
        out.reserve(left);
        while left > 0 {
            let bytes = self.take(item, left.min(READ_CHUNK_BYTES))?;
            out.extend_from_slice(bytes);
            left -= bytes.len();
        }
        Ok(())
    }
}
