//! Every bound that a file is held to beside its own size, with the reason for the number.
//!
//! A bound is there so that a hostile file costs little memory and time before it is refused. Each is
//! several times what the largest published models use.

/// Bytes before the tensor data in one file. The largest vocabularies (262,144 tokens with merges) take some 15 MiB, a
/// tokenizer kept as JSON beside them 35 MiB.
pub const HEADER_BYTES_MAX: u64 = 128 << 20;

/// Metadata keys in one file. Models have 20 to 60; every tool that adds its own history adds a dozen.
pub const METADATA_KEYS_MAX: u64 = 65_536;

/// Bytes of one metadata key: the format's own bound.
pub const KEY_BYTES_MAX: u64 = 65_535;

/// Items of one metadata array. The longest known lists (merges of a 262,144 token vocabulary) have some 515,000.
pub const ARRAY_ITEMS_MAX: u64 = 1 << 22;

/// Arrays inside arrays. The format allows any depth, no known model has a depth above 1, and reading recurses.
pub const ARRAY_DEPTH_MAX: usize = 4;

/// Inner arrays in one file, at all depths: each costs memory of its own, several times its 12 bytes in the file.
pub const INNER_ARRAYS_MAX: u64 = 65_536;

/// Tensors of one model. A model with 61 layers of 384 experts, each expert in tensors of its own, has some 71,000.
pub const TENSORS_MAX: u64 = 1 << 18;

/// Bytes of one tensor name. The format says 64; tools for image models write up to 127.
pub const TENSOR_NAME_BYTES_MAX: u64 = 127;

/// Dimensions of one tensor: the format's own bound.
pub const DIMS_MAX: usize = 4;

/// Bytes up to the end of any tensor in its file: file offsets are signed 64-bit numbers for the operating system.
pub const FILE_END_MAX: u64 = i64::MAX as u64;

/// Alignment of the tensor data. Files use 32; a page of 64 KiB is the largest that has a use, 1 MiB leaves room.
pub const ALIGNMENT_MAX: u32 = 1 << 20;

/// Alignment of the tensor data below which the format does not go.
pub const ALIGNMENT_MIN: u32 = 8;

/// Alignment of the tensor data in a file that does not state one: the format's own default.
pub const ALIGNMENT_DEFAULT: u32 = 32;

/// Parts of one split model. All stay open, and a process commonly may have 1,024 files open.
pub const SPLIT_PARTS_MAX: u64 = 512;

/// Bytes read at once where a file is not mapped.
pub(crate) const READ_CHUNK_BYTES: usize = 64 << 10;

// Names are read in one piece.
const _: () = assert!(KEY_BYTES_MAX as usize <= READ_CHUNK_BYTES);
const _: () = assert!(TENSOR_NAME_BYTES_MAX as usize <= READ_CHUNK_BYTES);
