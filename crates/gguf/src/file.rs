//! A model's files, open and checked.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use crate::error::{Error, Place};
use crate::header::{Header, sorted_by_name};
use crate::limits::TENSORS_MAX;
use crate::metadata::Metadata;
use crate::part::Part;
use crate::split::{COUNT_KEY, NO_KEY, SplitInfo, TENSORS_KEY};
use crate::tensor::TensorInfo;

/// How a file's bytes are reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MapMode {
    /// Mapped: tensors are given out without a copy. If another process cuts the file off while it is in use, this process ends
    /// with SIGBUS; if one changes it, tensors change.
    #[default]
    Mmap,
    /// Read: only the header is taken into memory, and tensors are read when asked for. A file that is cut off is an error.
    Read,
}

/// All parts of one model, open. The headers are checked; whether tensor data are there, [`check_data`](GgufFile::check_data)
/// says.
#[derive(Debug)]
pub struct GgufFile {
    version: u32,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    /// Positions in `tensors`, sorted by name.
    by_name: Vec<u32>,
    parts: Vec<Part>,
}

impl GgufFile {
    /// Opens a model: its file, or any part of it, to which the other parts are found by name. Reads and checks all headers.
    ///
    /// A file that ends where its tensor data begin can be opened, so that its memory can be planned.
    pub fn open(path: &Path, mode: MapMode) -> Result<GgufFile, Error> {
        let part = Part::open(path, mode).map_err(|source| Error::Io {
            file: path.to_owned(),
            doing: "open it",
            source,
        })?;
        let header = part.header()?;
        match SplitInfo::from_metadata(path, &header.metadata)? {
            None => GgufFile::from_parts(vec![(part, header)]),
            Some(split) => GgufFile::from_parts(open_parts(part, header, split, mode)?),
        }
    }

    /// A model of which there is a header alone, in memory: what its file would be, without tensor data. `name` stands for its path.
    pub fn from_header(name: &str, header: &[u8]) -> Result<GgufFile, Error> {
        let bytes = header.len() as u64;
        let read = Header::read(Path::new(name), header, bytes)?;
        GgufFile::from_parts(vec![(Part::header_alone(name, bytes), read)])
    }

    fn from_parts(opened: Vec<(Part, Header)>) -> Result<GgufFile, Error> {
        let mut parts = Vec::with_capacity(opened.len());
        let mut tensors = Vec::new();
        let mut first = None;
        for (i, (part, header)) in opened.into_iter().enumerate() {
            let n_tensors = (tensors.len() + header.tensors.len()) as u64;
            if n_tensors > TENSORS_MAX {
                return Err(Error::Limit {
                    at: Place::new(part.path(), 0),
                    item: "all parts up to this one".to_owned(),
                    what: "number of tensors",
                    found: n_tensors,
                    max: TENSORS_MAX,
                });
            }
            tensors.extend(header.tensors.into_iter().map(|mut tensor| {
                tensor.part = i;
                tensor
            }));
            first.get_or_insert((header.version, header.metadata));
            parts.push(part);
        }
        let (version, metadata) = first.expect("a model has at least one part");
        let by_name =
            sorted_by_name(&tensors).map_err(|(first, second)| Error::DuplicateTensor {
                tensor: tensors[first].name.clone(),
                first: parts[tensors[first].part].path().to_owned(),
                second: parts[tensors[second].part].path().to_owned(),
            })?;
        let n_tensors = tensors.len() as u64;
        if parts.len() > 1
            && let Some(stated) = metadata.u64(TENSORS_KEY)?
            && stated != n_tensors
        {
            return Err(Error::PartMismatch {
                file: parts[0].path().to_owned(),
                key: TENSORS_KEY,
                found: Some(stated),
                expected: n_tensors,
            });
        }
        Ok(GgufFile {
            version,
            metadata,
            tensors,
            by_name,
            parts,
        })
    }

    /// The format's version, of the first part.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Keys and values, of the first part: the others have none of their own.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors of all parts, in the order of the files.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let found = self
            .by_name
            .binary_search_by(|&i| self.tensors[i as usize].name.as_str().cmp(name));
        found
            .ok()
            .map(|at| &self.tensors[self.by_name[at] as usize])
    }

    /// Whether every tensor's bytes are in its file.
    pub fn has_data(&self) -> bool {
        self.check_data().is_ok()
    }

    /// Checks that every tensor's bytes are in its file; says which one's are not, and what the file would need.
    pub fn check_data(&self) -> Result<(), Error> {
        match self.tensors.iter().find(|tensor| !self.is_there(tensor)) {
            None => Ok(()),
            Some(tensor) => Err(self.truncated(tensor)),
        }
    }

    fn is_there(&self, tensor: &TensorInfo) -> bool {
        tensor.end() <= self.parts[tensor.part].file_bytes()
    }

    fn truncated(&self, tensor: &TensorInfo) -> Error {
        let of_part = || {
            self.tensors
                .iter()
                .filter(|other| other.part == tensor.part)
        };
        let part = &self.parts[tensor.part];
        Error::Truncated {
            file: part.path().to_owned(),
            tensor: tensor.name.clone(),
            needs: tensor.end(),
            has: part.file_bytes(),
            missing: of_part().filter(|other| !self.is_there(other)).count(),
            of: of_part().count(),
        }
    }

    /// The part that has a tensor, after checking that `len` bytes at `offset` are in the tensor and the tensor is in the file.
    fn part_of(&self, t: &TensorInfo, offset: u64, len: u64) -> Result<&Part, Error> {
        let outside = |bytes| Error::OutsideTensor {
            tensor: t.name.clone(),
            offset,
            len,
            bytes,
        };
        let part = self.parts.get(t.part).ok_or_else(|| outside(0))?;
        if offset.checked_add(len).is_none_or(|end| end > t.n_bytes()) {
            return Err(outside(t.n_bytes()));
        }
        if !self.is_there(t) {
            return Err(self.truncated(t));
        }
        Ok(part)
    }

    /// All bytes of a tensor: mapped ones in place, else as a copy.
    pub fn bytes(&self, t: &TensorInfo) -> Result<Cow<'_, [u8]>, Error> {
        self.part_of(t, 0, t.n_bytes())?
            .bytes(t.offset, t.n_bytes())
    }

    /// Fills `out` with a tensor's bytes from `offset` on. Always reads the file and never the mapping, so that loading a model
    /// leaves no mapped pages behind in this process.
    pub fn read_at(&self, t: &TensorInfo, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        let part = self.part_of(t, offset, out.len() as u64)?;
        // No overflow: the tensor is in the file, and the offset in the tensor.
        part.read_at(t.offset + offset, out)
    }

    /// Every part's path and size in bytes.
    pub fn parts(&self) -> impl ExactSizeIterator<Item = (&Path, u64)> {
        self.parts
            .iter()
            .map(|part| (part.path(), part.file_bytes()))
    }

    /// The size of all parts in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.parts.iter().map(Part::file_bytes).sum()
    }
}

/// Opens the parts beside the one that is open, and returns all in order.
fn open_parts(
    part: Part,
    header: Header,
    split: SplitInfo,
    mode: MapMode,
) -> Result<Vec<(Part, Header)>, Error> {
    let paths = split.part_paths(part.path())?;
    let mut given = Some((part, header));
    let mut opened: Vec<(Part, Header)> = Vec::with_capacity(paths.len());
    let mut seen = BTreeMap::new();
    for (no, path) in (0_u64..).zip(&paths) {
        let part = match given.take_if(|_| no == split.no) {
            Some(given) => given,
            None => open_part(path, no, split.count, mode)?,
        };
        let identity = part.0.identity().map_err(|source| Error::Io {
            file: path.clone(),
            doing: "tell it from the other parts",
            source,
        })?;
        if let Some(first) = seen.insert(identity, no) {
            return Err(Error::PartRepeated {
                first: paths[first as usize].clone(),
                second: path.clone(),
            });
        }
        check_part(&part, no, split.count)?;
        opened.push(part);
    }
    Ok(opened)
}

fn open_part(path: &Path, no: u64, count: u64, mode: MapMode) -> Result<(Part, Header), Error> {
    let part = Part::open(path, mode).map_err(|source| Error::PartMissing {
        file: path.to_owned(),
        no: no + 1,
        count,
        source,
    })?;
    let header = part.header()?;
    Ok((part, header))
}

fn check_part((part, header): &(Part, Header), no: u64, count: u64) -> Result<(), Error> {
    for (key, expected) in [(COUNT_KEY, count), (NO_KEY, no)] {
        let found = header.metadata.u64(key)?;
        if found != Some(expected) {
            return Err(Error::PartMismatch {
                file: part.path().to_owned(),
                key,
                found,
                expected,
            });
        }
    }
    Ok(())
}
