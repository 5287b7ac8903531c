//! GGUF model files: reading, mapped or not, and writing.
//!
//! ```no_run
//! use std::path::Path;
//! use gguf::{GgufFile, MapMode};
//!
//! let model = GgufFile::open(Path::new("model.gguf"), MapMode::Mmap)?;
//! let layers = model.metadata().require_u32("llama.block_count")?;
//! for tensor in model.tensors() {
//!     println!("{} {} {}: {} bytes", tensor.name, tensor.ty, tensor.dims, tensor.n_bytes());
//! }
//! model.check_data()?;
//! # Ok::<(), gguf::Error>(())
//! ```
//!
//! A file is not trusted. Every length, count, offset and type is checked against the file's size and the bounds in [`limits`]
//! before it is used, and what cannot be used is refused with an [`Error`] that says where it stands. No file makes a reader
//! panic or take more memory than a small multiple of the bytes that its header really has.

#![deny(unsafe_code)]

mod cursor;
mod error;
mod file;
mod header;
pub mod limits;
mod map;
mod metadata;
mod part;
mod split;
mod tensor;
mod types;
mod value;
pub mod write;

pub use error::{Error, NameFault, Place};
pub use file::{GgufFile, MapMode};
pub use header::Header;
pub use metadata::Metadata;
pub use tensor::{Dims, ShapeFault, TensorInfo};
pub use types::TensorType;
pub use value::{Array, GgufString, StringArray, Value};
