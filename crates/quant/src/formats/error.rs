//! What can go wrong with block formats.

use gguf::TensorType;

/// An error of this crate.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The crate has no code for this tensor type.
    #[error(
        "tensor type {ty} is not supported; supported are {}",
        names(super::supported())
    )]
    Unsupported {
        /// The type asked for.
        ty: TensorType,
    },
    /// The type can be read but not written.
    #[error(
        "there is no encoder to {ty}; there are encoders to {}",
        names(super::encodable())
    )]
    NoEncoder {
        /// The type asked for.
        ty: TensorType,
    },
    /// A row does not consist of whole blocks.
    #[error("a row of {values} values is not a whole number of {ty} blocks of {block_values}")]
    RowLength {
        /// The type of the row.
        ty: TensorType,
        /// Values in the row.
        values: usize,
        /// Values in a block.
        block_values: usize,
    },
    /// The bytes of a row are too few or too many.
    #[error(
        "a {ty} row of {values} values takes {expected_bytes} bytes, but {actual_bytes} were given"
    )]
    ByteLength {
        /// The type of the row.
        ty: TensorType,
        /// Values in the row.
        values: usize,
        /// Bytes that so many values take.
        expected_bytes: usize,
        /// Bytes that were there.
        actual_bytes: usize,
    },
    /// A value to be quantised is infinite or NaN.
    #[error(
        "value {index} of a row to be encoded as {ty} is {value}; only finite values can be quantised"
    )]
    NotFinite {
        /// The type to encode to.
        ty: TensorType,
        /// The value's index in the row.
        index: usize,
        /// The value.
        value: f32,
    },
    /// The values of a block are too large for a half-precision scale.
    #[error(
        "the {ty} block from value {index} needs a scale beyond half precision (its largest magnitude is {absmax})"
    )]
    ScaleRange {
        /// The type to encode to.
        ty: TensorType,
        /// Index in the row of the block's first value.
        index: usize,
        /// The largest magnitude in the block.
        absmax: f32,
    },
}

fn names(types: &[TensorType]) -> String {
    let names: Vec<_> = types.iter().copied().map(TensorType::name).collect();
    names.join(", ")
}
