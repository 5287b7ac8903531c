//! Writing model files, whole or split.
//!
//! What the reader refuses cannot be written: every header is read back before its first byte goes out.

use std::borrow::Cow;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::error::{Error, IN_MEMORY, Place};
use crate::header::{ALIGNMENT_KEY, Header, MAGIC, check_alignment, sorted_by_name};
use crate::limits::{ALIGNMENT_DEFAULT, SPLIT_PARTS_MAX};
use crate::metadata::Metadata;
use crate::split::{COUNT_KEY, NO_KEY, TENSORS_KEY, part_name};
use crate::tensor::TensorInfo;
use crate::types::TensorType;
use crate::value::{Array, Value};

/// The version that is written.
const VERSION: u32 = 3;
/// Keys that follow from what is written, so that nobody else sets them.
const RESERVED_KEYS: [&str; 4] = [ALIGNMENT_KEY, NO_KEY, COUNT_KEY, TENSORS_KEY];
/// Names that are tried for a temporary file: other writers to the same path, alive or not, may have taken some.
const TEMPORARY_NAMES_MAX: usize = 100;

/// Writes a tensor's bytes.
type Fill<'a> = Box<dyn FnOnce(&mut dyn Write) -> io::Result<()> + 'a>;

/// Collects keys and tensors, and writes them as one file or as the parts of a split model.
///
/// ```
/// use gguf::{TensorType, write::Writer};
///
/// let mut writer = Writer::new(32)?;
/// writer.set("general.architecture", "llama")?;
/// writer.tensor("output_norm.weight", TensorType::F32, &[2], &[0; 8])?;
/// let mut file = Vec::new();
/// writer.write_to(&mut file)?;
/// # Ok::<(), gguf::Error>(())
/// ```
pub struct Writer<'a> {
    alignment: u32,
    metadata: Metadata,
    tensors: Vec<(TensorInfo, Fill<'a>)>,
}

impl<'a> Writer<'a> {
    /// Nothing yet, for tensor data at multiples of `alignment`: a power of two from 8 on, 32 by custom.
    pub fn new(alignment: u32) -> Result<Writer<'a>, Error> {
        check_alignment(Path::new(IN_MEMORY), alignment)?;
        Ok(Writer {
            alignment,
            metadata: Metadata::new(),
            tensors: Vec::new(),
        })
    }

    /// Sets a key. Those of the alignment and of split models are refused, the writer sets them.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) -> Result<(), Error> {
        if RESERVED_KEYS.contains(&key) {
            return Err(Error::ReservedKey {
                key: key.to_owned(),
            });
        }
        self.metadata.set(key, value);
        Ok(())
    }

    /// Sets all keys of another model but those that the writer sets itself.
    pub fn set_all(&mut self, metadata: &Metadata) {
        for (key, value) in metadata.iter() {
            if !RESERVED_KEYS.contains(&key) {
                self.metadata.set(key, value.clone());
            }
        }
    }

    /// Adds a tensor with its bytes. Dimensions go from the innermost on.
    pub fn tensor(
        &mut self,
        name: &str,
        ty: TensorType,
        dims: &[u64],
        bytes: impl Into<Cow<'a, [u8]>>,
    ) -> Result<(), Error> {
        let bytes = bytes.into();
        let tensor = TensorInfo::new(name, ty, dims)?;
        let (found, expected) = (bytes.len() as u64, tensor.n_bytes());
        if found != expected {
            return Err(Error::WrongSize {
                tensor: name.to_owned(),
                found,
                expected,
            });
        }
        let fill: Fill<'a> = Box::new(move |out| out.write_all(&bytes));
        self.tensors.push((tensor, fill));
        Ok(())
    }

    /// Adds a tensor whose bytes `fill` writes when the file is written, so that they need not be in memory before.
    pub fn tensor_from(
        &mut self,
        name: &str,
        ty: TensorType,
        dims: &[u64],
        fill: impl FnOnce(&mut dyn Write) -> io::Result<()> + 'a,
    ) -> Result<(), Error> {
        let tensor = TensorInfo::new(name, ty, dims)?;
        self.tensors.push((tensor, Box::new(fill)));
        Ok(())
    }

    /// The bytes before the tensor data, and what readers make of them: for who puts tensor data there in another order, or nowhere.
    pub fn header(self) -> Result<(Vec<u8>, Header), Error> {
        let part = self.into_part();
        let path = Path::new(IN_MEMORY);
        let bytes = part.encode_header(path)?;
        let header = Header::read(path, bytes.as_slice(), bytes.len() as u64)?;
        Ok((bytes, header))
    }

    /// Writes everything as one file to `out`, and returns the number of bytes.
    pub fn write_to(self, out: impl Write) -> Result<u64, Error> {
        self.into_part().write(Path::new(IN_MEMORY), out)
    }

    /// Writes everything as one file, which is there complete or not at all: it is written under another name in the same
    /// directory and then renamed. Returns the number of bytes.
    pub fn write_file(self, path: &Path) -> Result<u64, Error> {
        self.into_part().write_file(path)
    }

    /// Writes the parts of a split model. `path` is what their names have before `-00001-of-00003.gguf`. Each has tensors of
    /// `part_bytes_max` bytes in all at most, or one that is larger; the first has the keys, too. Returns the parts' paths. Each
    /// part is there complete or not at all, and a model some of whose parts are missing cannot be opened.
    pub fn write_split(self, path: &Path, part_bytes_max: u64) -> Result<Vec<PathBuf>, Error> {
        sorted_by_name_of(path, &self.tensors)?;
        let parts = self.into_parts(path, part_bytes_max)?;
        let count = parts.len() as u64;
        let prefix = path.file_name().and_then(|name| name.to_str());
        let Some(prefix) = prefix else {
            return Err(Error::Io {
                file: path.to_owned(),
                doing: "name parts after it",
                source: io::ErrorKind::InvalidFilename.into(),
            });
        };
        let mut paths = Vec::with_capacity(parts.len());
        for (no, part) in (0..).zip(parts) {
            let path = path.with_file_name(part_name(prefix, no, count));
            part.write_file(&path)?;
            paths.push(path);
        }
        Ok(paths)
    }

    /// The key of the alignment, where it is not what readers take it for.
    fn alignment_key(&self) -> Metadata {
        let mut metadata = Metadata::new();
        if self.alignment != ALIGNMENT_DEFAULT {
            metadata.set(ALIGNMENT_KEY, self.alignment);
        }
        metadata
    }

    fn into_part(self) -> Part<'a> {
        let mut metadata = self.alignment_key();
        for (key, value) in self.metadata.into_entries() {
            metadata.set(&key, value);
        }
        Part {
            alignment: self.alignment,
            metadata,
            tensors: self.tensors,
        }
    }

    fn into_parts(self, path: &Path, part_bytes_max: u64) -> Result<Vec<Part<'a>>, Error> {
        let alignment = self.alignment;
        let other_metadata = self.alignment_key();
        let n_tensors = self.tensors.len();
        let Part {
            metadata, tensors, ..
        } = self.into_part();
        let mut parts = vec![Part {
            alignment,
            metadata,
            tensors: Vec::new(),
        }];
        let mut part_bytes = 0_u64;
        for (tensor, fill) in tensors {
            let mut part = parts.last_mut().expect("there is a first part");
            let padded = tensor.n_bytes().next_multiple_of(alignment.into());
            if !part.tensors.is_empty() && part_bytes.saturating_add(padded) > part_bytes_max {
                part = parts.push_mut(Part {
                    alignment,
                    metadata: other_metadata.clone(),
                    tensors: Vec::new(),
                });
                part_bytes = 0;
            }
            part_bytes = part_bytes.saturating_add(padded);
            part.tensors.push((tensor, fill));
        }
        let count = parts.len() as u64;
        if count > SPLIT_PARTS_MAX {
            return Err(Error::Limit {
                at: Place::new(path, 0),
                item: format!("key `{COUNT_KEY}`"),
                what: "number of parts",
                found: count,
                max: SPLIT_PARTS_MAX,
            });
        }
        for (no, part) in parts.iter_mut().enumerate() {
            // No loss: parts and tensors are within their bounds. The types are those that other readers expect.
            part.metadata.set(NO_KEY, no as u16);
            part.metadata.set(COUNT_KEY, count as u16);
            part.metadata.set(TENSORS_KEY, n_tensors as i32);
        }
        Ok(parts)
    }
}

/// One file that is to be written.
struct Part<'a> {
    alignment: u32,
    metadata: Metadata,
    tensors: Vec<(TensorInfo, Fill<'a>)>,
}

impl Part<'_> {
    fn write_file(self, path: &Path) -> Result<u64, Error> {
        let io_error = |source| Error::Io {
            file: path.to_owned(),
            doing: "write it",
            source,
        };
        let (temporary, file) = create_temporary(path).map_err(io_error)?;
        let finish = || {
            let mut out = BufWriter::new(&file);
            let bytes = self.write(path, &mut out)?;
            out.flush().map_err(io_error)?;
            drop(out);
            // Before the rename, or a crash could leave the new name with no content.
            file.sync_all().map_err(io_error)?;
            fs::rename(&temporary, path).map_err(io_error)?;
            Ok(bytes)
        };
        let result = finish();
        if result.is_err() {
            // The first error is the one to tell; what is left behind has a name that shows what it is.
            let _ = fs::remove_file(&temporary);
        }
        result
    }

    fn write(self, path: &Path, mut out: impl Write) -> Result<u64, Error> {
        let io_error = |source| Error::Io {
            file: path.to_owned(),
            doing: "write it",
            source,
        };
        let head = self.encode_header(path)?;
        let alignment = u64::from(self.alignment);
        let data_bytes = self.check_header(path, &head)?;
        out.write_all(&head).map_err(io_error)?;
        for (tensor, fill) in self.tensors {
            let mut counted = Counted {
                out: &mut out,
                bytes: 0,
                bytes_max: tensor.n_bytes(),
            };
            let filled = fill(&mut counted);
            let found = counted.bytes;
            match filled {
                // The error of a writer that was given too much is not the cause.
                Err(source) if found <= tensor.n_bytes() => return Err(io_error(source)),
                _ if found != tensor.n_bytes() => {
                    return Err(Error::WrongSize {
                        expected: tensor.n_bytes(),
                        tensor: tensor.name,
                        found,
                    });
                }
                _ => {}
            }
            write_padding(&mut out, found, alignment).map_err(io_error)?;
        }
        Ok(head.len() as u64 + data_bytes)
    }

    /// Everything before the tensor data, with the padding.
    fn encode_header(&self, path: &Path) -> Result<Vec<u8>, Error> {
        let alignment = u64::from(self.alignment);
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in self.metadata.iter() {
            put_string(&mut out, key.as_bytes());
            out.extend(value.value_type().id().to_le_bytes());
            put_value(&mut out, value);
        }
        let mut offset = 0_u64;
        for (tensor, _) in &self.tensors {
            put_string(&mut out, tensor.name.as_bytes());
            out.extend((tensor.dims.rank() as u32).to_le_bytes());
            for n in tensor.dims.as_slice() {
                out.extend(n.to_le_bytes());
            }
            out.extend(tensor.ty.id().to_le_bytes());
            out.extend(offset.to_le_bytes());
            // No overflow: a tensor's size is below half of the range.
            let padded = tensor.n_bytes().next_multiple_of(alignment);
            offset = offset
                .checked_add(padded)
                .ok_or_else(|| Error::OffsetOverflow {
                    at: Place::new(path, out.len() as u64 - 8),
                    tensor: tensor.name.clone(),
                    offset,
                    bytes: tensor.n_bytes(),
                })?;
        }
        out.resize(out.len().next_multiple_of(self.alignment as usize), 0);
        Ok(out)
    }

    /// Reads a header back, which refuses whatever a reader would refuse. Returns the bytes of tensor data with their padding.
    fn check_header(&self, path: &Path, head: &[u8]) -> Result<u64, Error> {
        let header = Header::read(path, head, head.len() as u64)?;
        let end = header
            .tensors
            .last()
            .map_or(header.data_start, TensorInfo::end);
        Ok(end.next_multiple_of(self.alignment.into()) - header.data_start)
    }
}

fn sorted_by_name_of<F>(path: &Path, tensors: &[(TensorInfo, F)]) -> Result<(), Error> {
    let infos: Vec<&TensorInfo> = tensors.iter().map(|(tensor, _)| tensor).collect();
    sorted_by_name(&infos)
        .map(|_| ())
        .map_err(|(first, _)| Error::DuplicateTensor {
            tensor: infos[first].name.clone(),
            first: path.to_owned(),
            second: path.to_owned(),
        })
}

/// Creates a file beside `path` under a name that no other writer uses.
fn create_temporary(path: &Path) -> io::Result<(PathBuf, File)> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidFilename)?;
    for i in 0..TEMPORARY_NAMES_MAX {
        let mut temporary = OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".{}-{i}.tmp", std::process::id()));
        let temporary = path.with_file_name(temporary);
        match File::create_new(&temporary) {
            Ok(file) => return Ok((temporary, file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

/// Zeros up to the next multiple of `alignment` after `written` bytes.
fn write_padding(out: &mut impl Write, written: u64, alignment: u64) -> io::Result<()> {
    let padding = written.next_multiple_of(alignment) - written;
    io::copy(&mut io::Read::take(io::repeat(0), padding), out).map(|_| ())
}

/// Counts a tensor's bytes, and lets no more through than it has.
struct Counted<W> {
    out: W,
    /// Bytes written; beyond the bound, what was tried.
    bytes: u64,
    bytes_max: u64,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let tried = self.bytes.saturating_add(buf.len() as u64);
        if tried > self.bytes_max {
            self.bytes = tried;
            return Err(io::Error::other("more bytes than the tensor has"));
        }
        let n = self.out.write(buf)?;
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn put_string(out: &mut Vec<u8>, string: &[u8]) {
    out.extend((string.len() as u64).to_le_bytes());
    out.extend(string);
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(n) => out.extend(n.to_le_bytes()),
        Value::I8(n) => out.extend(n.to_le_bytes()),
        Value::U16(n) => out.extend(n.to_le_bytes()),
        Value::I16(n) => out.extend(n.to_le_bytes()),
        Value::U32(n) => out.extend(n.to_le_bytes()),
        Value::I32(n) => out.extend(n.to_le_bytes()),
        Value::F32(n) => out.extend(n.to_le_bytes()),
        Value::Bool(b) => out.push((*b).into()),
        Value::String(string) => put_string(out, string.as_bytes()),
        Value::Array(array) => put_array(out, array),
        Value::U64(n) => out.extend(n.to_le_bytes()),
        Value::I64(n) => out.extend(n.to_le_bytes()),
        Value::F64(n) => out.extend(n.to_le_bytes()),
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    out.extend(array.value_type().id().to_le_bytes());
    out.extend((array.len() as u64).to_le_bytes());
    match array {
        Array::U8(items) => out.extend(items),
        Array::I8(items) => put_numbers(out, items, i8::to_le_bytes),
        Array::U16(items) => put_numbers(out, items, u16::to_le_bytes),
        Array::I16(items) => put_numbers(out, items, i16::to_le_bytes),
        Array::U32(items) => put_numbers(out, items, u32::to_le_bytes),
        Array::I32(items) => put_numbers(out, items, i32::to_le_bytes),
        Array::F32(items) => put_numbers(out, items, f32::to_le_bytes),
        Array::Bool(items) => put_numbers(out, items, |b| [b.into()]),
        Array::String(strings) => strings.iter().for_each(|string| put_string(out, string)),
        Array::Array(arrays) => arrays.iter().for_each(|array| put_array(out, array)),
        Array::U64(items) => put_numbers(out, items, u64::to_le_bytes),
        Array::I64(items) => put_numbers(out, items, i64::to_le_bytes),
        Array::F64(items) => put_numbers(out, items, f64::to_le_bytes),
    }
}

fn put_numbers<T: Copy, const N: usize>(out: &mut Vec<u8>, items: &[T], encode: fn(T) -> [u8; N]) {
    out.extend(items.iter().flat_map(|&item| encode(item)));
}
