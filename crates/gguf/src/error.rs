//! What can go wrong, where in which file, and what was expected.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::tensor::ShapeFault;

/// A byte of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file; `<memory>` for bytes that came from none.
    pub file: PathBuf,
    /// Bytes from the start of the file.
    pub offset: u64,
}

impl Place {
    pub(crate) fn new(file: &Path, offset: u64) -> Place {
        Place {
            file: file.to_owned(),
            offset,
        }
    }

    pub(crate) fn in_memory() -> Place {
        Place::new(Path::new(IN_MEMORY), 0)
    }
}

/// Stands for a file's name where the bytes are in no file.
pub(crate) const IN_MEMORY: &str = "<memory>";

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, byte {}", self.file.display(), self.offset)
    }
}

/// Every way in which reading or writing a model file fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("{}: cannot {doing}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What was tried, as in "cannot ...".
        doing: &'static str,
        /// The system's answer.
        source: io::Error,
    },

    /// The file does not begin with `GGUF`.
    #[error("{}: not a GGUF file: it begins with \"{}\", expected \"GGUF\"", file.display(), found.escape_ascii())]
    NotGguf {
        /// The file.
        file: PathBuf,
        /// Its first bytes, four at most.
        found: Vec<u8>,
    },

    /// The file was written for big-endian machines.
    #[error("{}: a big-endian GGUF file (version {version}); only little-endian files can be read", file.display())]
    BigEndian {
        /// The file.
        file: PathBuf,
        /// Its version.
        version: u32,
    },

    /// The file has a version that this reader does not know.
    #[error("{}: GGUF version {found}; versions 2 and 3 can be read{}", file.display(), if *found == 1 { ": convert the model again" } else { "" })]
    Version {
        /// The file.
        file: PathBuf,
        /// Its version.
        found: u32,
    },

    /// Something reaches beyond the end of the file.
    #[error("{at}: {item} needs at least {needs} more bytes, the file has {left} left")]
    UnexpectedEnd {
        /// Where it begins.
        at: Place,
        /// What reaches too far.
        item: String,
        /// Bytes that it needs from there, or at least so many.
        needs: u64,
        /// Bytes that the file has from there.
        left: u64,
    },

    /// A number exceeds a bound of [`crate::limits`].
    #[error("{at}: {item}: {what} is {found}, at most {max} can be read")]
    Limit {
        /// Where the number stands.
        at: Place,
        /// What it belongs to.
        item: String,
        /// What it counts.
        what: &'static str,
        /// The number.
        found: u64,
        /// The bound.
        max: u64,
    },

    /// A metadata value has a type that does not exist.
    #[error("{at}: {item} has value type {found}, expected 0 to 12")]
    UnknownValueType {
        /// Where the type stands.
        at: Place,
        /// What has it.
        item: String,
        /// The type's number.
        found: u32,
    },

    /// A truth value is neither 0 nor 1.
    #[error("{at}: {item} has {found} as a truth value, expected 0 or 1")]
    BadBool {
        /// Where the value stands.
        at: Place,
        /// What has it.
        item: String,
        /// The value.
        found: u8,
    },

    /// A key or tensor name is not UTF-8, or empty.
    #[error("{at}: {item} is {fault}: \"{}\"", found.escape_ascii())]
    BadName {
        /// Where the name's bytes stand.
        at: Place,
        /// What has the name.
        item: String,
        /// What is wrong with it.
        fault: NameFault,
        /// The name.
        found: Vec<u8>,
    },

    /// A metadata key is there twice.
    #[error("{at}: key `{key}` is there twice")]
    DuplicateKey {
        /// Where the second one stands.
        at: Place,
        /// The key.
        key: String,
    },

    /// `general.alignment` cannot be used.
    #[error("{}: `general.alignment` is {found}, expected a power of two from 8 to 1048576", file.display())]
    Alignment {
        /// The file.
        file: PathBuf,
        /// The alignment.
        found: u32,
    },

    /// A tensor has a type that is unknown or no longer exists.
    #[error("{at}: tensor `{tensor}` has type {found}, {}", match retired { Some(name) => format!("`{name}`, which was retired: convert the model again"), None => "which is unknown".to_owned() })]
    TensorType {
        /// Where the type stands.
        at: Place,
        /// The tensor.
        tensor: String,
        /// The type's number.
        found: u32,
        /// The name that the type had, if it had one.
        retired: Option<&'static str>,
    },

    /// A tensor's dimensions are not possible.
    #[error("{at}: tensor `{tensor}` {fault}")]
    Shape {
        /// Where the dimensions stand.
        at: Place,
        /// The tensor.
        tensor: String,
        /// What is wrong.
        fault: ShapeFault,
    },

    /// A tensor's offset is no multiple of the alignment.
    #[error(
        "{at}: tensor `{tensor}` begins at offset {offset} of the data, expected a multiple of {alignment}"
    )]
    Misaligned {
        /// Where the offset stands.
        at: Place,
        /// The tensor.
        tensor: String,
        /// Its offset from the start of the tensor data.
        offset: u64,
        /// The file's alignment.
        alignment: u32,
    },

    /// A tensor's offset is too large for any file.
    #[error(
        "{at}: tensor `{tensor}`, {bytes} bytes at offset {offset} of the data, would end beyond any file"
    )]
    OffsetOverflow {
        /// Where the offset stands.
        at: Place,
        /// The tensor.
        tensor: String,
        /// Its offset from the start of the tensor data.
        offset: u64,
        /// Its size.
        bytes: u64,
    },

    /// Two tensors share bytes.
    #[error(
        "{at}: tensor `{second}` begins inside of tensor `{first}`, which ends at byte {first_end}"
    )]
    Overlap {
        /// Where the second tensor's data begin.
        at: Place,
        /// The tensor that begins first.
        first: String,
        /// Where the first one ends.
        first_end: u64,
        /// The tensor that begins inside of it.
        second: String,
    },

    /// Two tensors have the same name.
    #[error("tensor `{tensor}` is there twice: in {} and in {}", first.display(), second.display())]
    DuplicateTensor {
        /// The name.
        tensor: String,
        /// The file that has it first.
        first: PathBuf,
        /// The file that has it again, perhaps the same.
        second: PathBuf,
    },

    /// A tensor's data are not in the file, which was cut off or holds a header only.
    #[error("{}: tensor `{tensor}` needs the file to have {needs} bytes, it has {has}: {missing} of {of} tensors are not in it in full", file.display())]
    Truncated {
        /// The file.
        file: PathBuf,
        /// The first tensor that is not there in full.
        tensor: String,
        /// Bytes that the file must have to hold it.
        needs: u64,
        /// Bytes that the file has.
        has: u64,
        /// Tensors that are not in the file in full.
        missing: usize,
        /// Tensors that the file's header lists.
        of: usize,
    },

    /// Bytes were asked for that the tensor, or the model, does not have.
    #[error("tensor `{tensor}`: {len} bytes at {offset} were asked for, it has {bytes}")]
    OutsideTensor {
        /// The tensor.
        tensor: String,
        /// The first byte asked for.
        offset: u64,
        /// The number of bytes asked for.
        len: u64,
        /// The tensor's size; 0 if it is of another model.
        bytes: u64,
    },

    /// A metadata key is needed and not there.
    #[error("{}: key `{key}` is missing, expected {wanted}", file.display())]
    MissingKey {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// What its value would be.
        wanted: &'static str,
    },

    /// A metadata value has another type than it must.
    #[error("{}: key `{key}` is {found}, expected {wanted}", file.display())]
    WrongType {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// The type that it has.
        found: String,
        /// The type that it must have.
        wanted: &'static str,
    },

    /// A metadata number does not fit where it is used.
    #[error("{}: key `{key}` is {found}, expected {wanted}", file.display())]
    OutOfRange {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// The number.
        found: i128,
        /// The range that it must be in.
        wanted: &'static str,
    },

    /// A split model's part does not have the name that leads to the others.
    #[error("{}: part {no} of {count} of a split model, but the name does not end in `-{no:05}-of-{count:05}.gguf`, so the other parts cannot be found", file.display())]
    PartName {
        /// The file.
        file: PathBuf,
        /// The part's number, from 1, as the file says.
        no: u64,
        /// The number of parts, as the file says.
        count: u64,
    },

    /// A part of a split model is not there.
    #[error("{}: part {no} of {count} of a split model cannot be opened: {source}", file.display())]
    PartMissing {
        /// The file.
        file: PathBuf,
        /// The part's number, from 1.
        no: u64,
        /// The number of parts.
        count: u64,
        /// The system's answer.
        source: io::Error,
    },

    /// A part of a split model contradicts its place or the other parts.
    #[error("{}: `{key}` is {}, expected {expected}", file.display(), match found { Some(found) => found.to_string(), None => "missing".to_owned() })]
    PartMismatch {
        /// The file.
        file: PathBuf,
        /// The key that contradicts.
        key: &'static str,
        /// Its value, if it is there.
        found: Option<u64>,
        /// The value that it must have.
        expected: u64,
    },

    /// Two parts of a split model are one and the same file.
    #[error("{} and {} are the same file, expected two parts of a split model", first.display(), second.display())]
    PartRepeated {
        /// One name.
        first: PathBuf,
        /// The other name.
        second: PathBuf,
    },

    /// A tensor was given more or fewer bytes than its type and dimensions make.
    #[error("tensor `{tensor}` was given {found} bytes to write, expected {expected}")]
    WrongSize {
        /// The tensor.
        tensor: String,
        /// The bytes that it was given, or the bytes until it was clear that there are too many.
        found: u64,
        /// Its size.
        expected: u64,
    },

    /// A metadata key was set that the writer sets itself.
    #[error("key `{key}` is set by the writer itself")]
    ReservedKey {
        /// The key.
        key: String,
    },
}

/// What is wrong with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NameFault {
    /// It has no bytes.
    Empty,
    /// Its bytes are not UTF-8.
    NotUtf8,
}

impl fmt::Display for NameFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NameFault::Empty => "empty",
            NameFault::NotUtf8 => "not UTF-8",
        })
    }
}
