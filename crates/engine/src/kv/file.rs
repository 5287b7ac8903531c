//! A sequence in a file: saved as a whole or not at all, and refused unless it is whole, sound, and of the same model and types.
//!
//! ```text
//! 8 bytes   "SPILLKV" and a version
//! 8 bytes   length of the header, little endian
//! header    JSON: what the cells belong to, and which there are
//! blocks    the slabs that the header lists, one after another, as they are in memory
//! 32 bytes  SHA-256 of all before
//! ```

use super::Cache;
use super::sequence::Sequence;
use crate::backend::{Backend, CELLS};
use crate::error::Error;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::ops::Range;
use std::path::Path;

/// The last byte is the format's version.
const MAGIC: [u8; 8] = *b"SPILLKV\x01";

/// A header lists tokens and blocks: a few bytes for each of the most cells that a context can have.
const HEADER_BYTES_MAX: u64 = 1 << 30;

/// What a file of cells says of itself.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    /// Of the model's parameters and weights.
    model: String,
    type_k: String,
    type_v: String,
    rotated: (bool, bool),
    full_slab_bytes: u64,
    ring_slab_bytes: u64,
    tokens: Vec<u32>,
    holes: Vec<Range<usize>>,
    full: Blocks,
    ring: Blocks,
    /// What whoever wrote it wants to find beside the cells.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    note: String,
}

/// What a file held beside cells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restored {
    /// What the cells are of.
    pub tokens: Vec<u32>,
    /// What whoever wrote the file put beside them.
    pub note: String,
}

/// Which blocks are there.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Blocks {
    first: usize,
    there: Vec<bool>,
}

impl Blocks {
    fn count(&self) -> u64 {
        self.there.iter().filter(|there| **there).count() as u64
    }
}

/// Why a file of cells could not be written or is not taken.
#[derive(Debug, thiserror::Error)]
pub enum SessionFileError {
    /// It cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// It is no such file, or not whole.
    #[error("{path} is no sound session file: {problem}")]
    Damaged {
        /// The file.
        path: String,
        /// What is wrong.
        problem: String,
    },
    /// It belongs to something else.
    #[error("{path} is of another {what}")]
    Foreign {
        /// The file.
        path: String,
        /// What differs.
        what: &'static str,
    },
    /// Its cells cannot be taken.
    #[error(transparent)]
    Cache(#[from] Box<Error>),
}

/// What cells belong to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    /// Of the model's parameters and weights.
    pub(crate) model: String,
    /// Whether Q and K, and V, are rotated.
    pub(crate) rotated: (bool, bool),
}

impl<B: Backend> Cache<B> {
    /// Writes the sequence in work, which holds `tokens`, to a file, and a note beside it: whatever happens, the file is the old or the new one.
    pub(crate) fn save(
        &self,
        backend: &B,
        origin: &Origin,
        tokens: &[u32],
        note: &str,
        path: &Path,
    ) -> Result<(), SessionFileError> {
        let io = |source| SessionFileError::Io {
            path: path.display().to_string(),
            source,
        };
        let folder = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let temporary = tempfile::NamedTempFile::new_in(folder).map_err(io)?;
        let sequence = self.sequence();
        let blocks = |track: &super::sequence::Track| Blocks {
            first: track.first,
            there: track.slabs.iter().map(Option::is_some).collect(),
        };
        let header = Header {
            model: origin.model.clone(),
            type_k: self.shape.type_k.to_string(),
            type_v: self.shape.type_v.to_string(),
            rotated: origin.rotated,
            full_slab_bytes: self.full.slab_bytes() as u64,
            ring_slab_bytes: self.ring.slab_bytes() as u64,
            tokens: tokens.to_vec(),
            holes: sequence.holes.clone(),
            full: blocks(&sequence.full),
            ring: blocks(&sequence.ring),
            note: note.to_owned(),
        };
        let header = serde_json::to_vec(&header).expect("a header is texts and numbers");
        self.write(backend, &header, temporary.as_file(), &io)?;
        temporary.as_file().sync_all().map_err(io)?;
        temporary.persist(path).map_err(|e| io(e.error))?;
        // The name is on disk once its folder is.
        if let Ok(folder) = File::open(folder) {
            folder.sync_all().map_err(io)?;
        }
        Ok(())
    }

    fn write(
        &self,
        backend: &B,
        header: &[u8],
        file: &File,
        io: &impl Fn(std::io::Error) -> SessionFileError,
    ) -> Result<(), SessionFileError> {
        let mut out = Digested::new(BufWriter::new(file));
        out.put(&MAGIC).map_err(io)?;
        out.put(&(header.len() as u64).to_le_bytes()).map_err(io)?;
        out.put(header).map_err(io)?;
        let sequence = self.sequence();
        let mut bytes = Vec::new();
        for (track, store) in [(&sequence.full, &self.full), (&sequence.ring, &self.ring)] {
            for (_, id) in track.iter() {
                bytes.clear();
                store.save(backend, id, &mut bytes).map_err(Box::new)?;
                out.put(&bytes).map_err(io)?;
            }
        }
        let Digested { mut to, hash } = out;
        to.write_all(&hash.finalize()).map_err(io)?;
        to.flush().map_err(io)
    }

    /// Replaces the sequence in work by one from a file. Where it fails the sequence is as before, or empty if memory ran
    /// out.
    pub(crate) fn restore(
        &mut self,
        backend: &mut B,
        origin: &Origin,
        path: &Path,
    ) -> Result<Restored, SessionFileError> {
        let file = Checked::open(path)?;
        let Header {
            model,
            type_k,
            type_v,
            rotated,
            full_slab_bytes,
            ring_slab_bytes,
            tokens,
            holes,
            full,
            ring,
            note: _,
        } = &file.header;
        let foreign = |what| {
            Err(SessionFileError::Foreign {
                path: path.display().to_string(),
                what,
            })
        };
        if *model != origin.model {
            return foreign("model");
        }
        let types = (self.shape.type_k.to_string(), self.shape.type_v.to_string());
        if (type_k, type_v) != (&types.0, &types.1) || *rotated != origin.rotated {
            return foreign("cache type (see --cache-type-k, --cache-type-v and --kv-rotate)");
        }
        let slabs = (self.full.slab_bytes() as u64, self.ring.slab_bytes() as u64);
        if (*full_slab_bytes, *ring_slab_bytes) != slabs {
            return foreign("layout");
        }
        if tokens.len() > self.n_ctx {
            return Err(Box::new(Error::ContextFull {
                n_ctx: self.n_ctx,
                n_past: 0,
                tokens: tokens.len(),
            })
            .into());
        }
        self.check(&file, tokens.len(), holes, full, ring)?;
        self.truncate(0);
        let taken = self.take(backend, &file);
        if taken.is_err() {
            self.truncate(0);
        }
        taken?;
        let Header { tokens, note, .. } = file.header;
        Ok(Restored { tokens, note })
    }

    /// Whether the blocks are those that a sequence of `n` tokens has.
    fn check(
        &self,
        file: &Checked,
        n: usize,
        holes: &[Range<usize>],
        full: &Blocks,
        ring: &Blocks,
    ) -> Result<(), SessionFileError> {
        let apart = holes.windows(2).all(|w| w[0].end < w[1].start);
        let inside = holes.iter().all(|h| h.start < h.end && h.end <= n);
        let sequence = Sequence {
            n,
            holes: holes.to_vec(),
            ..Sequence::default()
        };
        let all = n.div_ceil(CELLS);
        // A block may be missing only if no cell of it is left.
        let kept = |blocks: &Blocks| {
            let mut blocks = (blocks.first..).zip(&blocks.there);
            blocks.all(|(block, there)| *there || sequence.parts(block, n).next().is_none())
        };
        let seen_from = self.window.map_or(0, |w| (n + 1).saturating_sub(w));
        let of_full = full.first == 0 && full.there.len() == all || self.full_layers.is_empty();
        let of_ring = ring.first * CELLS <= seen_from
            && ring.first.checked_add(ring.there.len()) == Some(all)
            || self.ring_blocks == 0;
        let none = |blocks: &Blocks| blocks.there.is_empty();
        let unused =
            (!self.full_layers.is_empty() || none(full)) && (self.ring_blocks > 0 || none(ring));
        if apart && inside && of_full && of_ring && unused && kept(full) && kept(ring) {
            return Ok(());
        }
        Err(file.damaged("its blocks are not those of its tokens"))
    }

    fn take(&mut self, backend: &mut B, file: &Checked) -> Result<(), SessionFileError> {
        let Header {
            tokens,
            holes,
            full,
            ring,
            ..
        } = &file.header;
        let mut reader = file.blocks()?;
        let mut bytes = Vec::new();
        for (is_ring, blocks) in [(false, full), (true, ring)] {
            if is_ring {
                self.parts().0.ring.first = ring.first;
            }
            for (i, &there) in blocks.there.iter().enumerate() {
                let block = blocks.first + i;
                if !is_ring && there {
                    self.make_room(backend, 1, &[]).map_err(Box::new)?;
                }
                let (sequence, full, ring) = self.parts();
                let (track, store) = if is_ring {
                    (&mut sequence.ring, ring)
                } else {
                    (&mut sequence.full, full)
                };
                track.slabs.push_back(None);
                if !there {
                    continue;
                }
                let id = store.add(backend).map_err(Box::new)?;
                track.set(block, Some(id));
                bytes.resize(store.slab_bytes(), 0);
                reader.read_exact(&mut bytes).map_err(|e| file.io(e))?;
                backend.restore(&bytes, store.device_mut(id));
            }
        }
        let sequence = self.parts().0;
        sequence.n = tokens.len();
        sequence.holes.clone_from(holes);
        Ok(())
    }
}

/// Bytes on their way into a file, and into a digest.
struct Digested<W> {
    to: W,
    hash: Sha256,
}

impl<W: Write> Digested<W> {
    fn new(to: W) -> Self {
        Self {
            to,
            hash: Sha256::new(),
        }
    }

    fn put(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.hash.update(bytes);
        self.to.write_all(bytes)
    }
}

/// A file that is whole and sound as far as one can tell without a cache.
struct Checked {
    path: String,
    file: File,
    header: Header,
}

impl Checked {
    fn open(path: &Path) -> Result<Self, SessionFileError> {
        let shown = path.display().to_string();
        let io = |source| SessionFileError::Io {
            path: shown.clone(),
            source,
        };
        let damaged = |problem: String| SessionFileError::Damaged {
            path: shown.clone(),
            problem,
        };
        let file = File::open(path).map_err(io)?;
        let total = file.metadata().map_err(io)?.len();
        let mut reader = BufReader::new(&file);
        let mut hash = Sha256::new();
        let mut start = [0; 16];
        if total < (start.len() + 32) as u64 {
            return Err(damaged(format!("it has {total} bytes")));
        }
        reader.read_exact(&mut start).map_err(io)?;
        hash.update(start);
        let (magic, len) = start.split_at(8);
        if magic[..7] != MAGIC[..7] {
            return Err(damaged("it begins with something else".to_owned()));
        }
        if magic != MAGIC {
            return Err(damaged(format!(
                "it has version {}, expected {}",
                magic[7], MAGIC[7]
            )));
        }
        let len = u64::from_le_bytes(len.try_into().expect("eight bytes"));
        let rest = total - (start.len() + 32) as u64;
        if len > rest.min(HEADER_BYTES_MAX) {
            return Err(damaged(format!("a header of {len} bytes")));
        }
        let mut header = vec![0; len as usize];
        reader.read_exact(&mut header).map_err(io)?;
        hash.update(&header);
        let mut left = rest - len;
        let mut piece = vec![0; 1 << 20];
        while left > 0 {
            let n = piece.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            reader.read_exact(&mut piece[..n]).map_err(io)?;
            hash.update(&piece[..n]);
            left -= n as u64;
        }
        let mut digest = [0; 32];
        reader.read_exact(&mut digest).map_err(io)?;
        if hash.finalize()[..] != digest[..] {
            return Err(damaged("its digest does not match".to_owned()));
        }
        let header: Header =
            serde_json::from_slice(&header).map_err(|e| damaged(format!("its header: {e}")))?;
        let of = |blocks: &Blocks, bytes: u64| blocks.count().checked_mul(bytes);
        let expected = of(&header.full, header.full_slab_bytes)
            .and_then(|full| full.checked_add(of(&header.ring, header.ring_slab_bytes)?));
        if expected != Some(rest - len) {
            return Err(damaged(
                "it is longer or shorter than its header says".to_owned(),
            ));
        }
        drop(reader);
        Ok(Self {
            path: shown,
            file,
            header,
        })
    }

    fn damaged(&self, problem: &str) -> SessionFileError {
        SessionFileError::Damaged {
            path: self.path.clone(),
            problem: problem.to_owned(),
        }
    }

    fn io(&self, source: std::io::Error) -> SessionFileError {
        SessionFileError::Io {
            path: self.path.clone(),
            source,
        }
    }

    /// Reads the blocks.
    fn blocks(&self) -> Result<BufReader<&File>, SessionFileError> {
        use std::io::Seek;
        let mut file = &self.file;
        let mut start = [0; 16];
        file.rewind().map_err(|e| self.io(e))?;
        file.read_exact(&mut start).map_err(|e| self.io(e))?;
        let len = u64::from_le_bytes(start[8..].try_into().expect("eight bytes"));
        file.seek(std::io::SeekFrom::Start(16 + len))
            .map_err(|e| self.io(e))?;
        Ok(BufReader::new(file))
    }
}
