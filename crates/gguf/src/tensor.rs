//! What a file says of a tensor: its name, type, dimensions, and where its bytes are.

use std::fmt;

use crate::error::{Error, NameFault, Place};
use crate::limits::{DIMS_MAX, FILE_END_MAX, TENSOR_NAME_BYTES_MAX};
use crate::types::TensorType;

/// A tensor's dimensions as the file has them: the innermost, along which numbers are neighbours, first. At least one, none
/// of them zero, and their product fits 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dims {
    rank: u8,
    ne: [u64; DIMS_MAX],
}

impl Dims {
    /// Checks dimensions, the innermost first.
    pub fn new(dims: &[u64]) -> Result<Dims, ShapeFault> {
        if dims.is_empty() || dims.len() > DIMS_MAX {
            return Err(ShapeFault::Rank(dims.len() as u64));
        }
        let mut ne = [1; DIMS_MAX];
        ne[..dims.len()].copy_from_slice(dims);
        if let Some(axis) = dims.iter().position(|&n| n == 0) {
            return Err(ShapeFault::Zero { axis });
        }
        if dims
            .iter()
            .try_fold(1_u64, |product, &n| product.checked_mul(n))
            .is_none()
        {
            return Err(ShapeFault::Overflow(ne));
        }
        Ok(Dims {
            rank: dims.len() as u8,
            ne,
        })
    }

    /// The number of dimensions, 1 to 4.
    pub fn rank(&self) -> usize {
        usize::from(self.rank)
    }

    /// The dimensions, the innermost first.
    pub fn as_slice(&self) -> &[u64] {
        &self.ne[..self.rank()]
    }

    /// Dimension `i`, 0 being the innermost; 1 beyond the rank.
    pub fn ne(&self, i: usize) -> u64 {
        self.ne.get(i).copied().unwrap_or(1)
    }

    /// The product of all dimensions.
    pub fn n_elements(&self) -> u64 {
        self.ne.iter().product()
    }
}

impl fmt::Display for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt_dims(self.as_slice(), f)
    }
}

fn fmt_dims(dims: &[u64], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for (i, n) in dims.iter().enumerate() {
        if i > 0 {
            f.write_str(" x ")?;
        }
        write!(f, "{n}")?;
    }
    Ok(())
}

/// What is wrong with a tensor's dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShapeFault {
    /// There are none, or more than four.
    Rank(u64),
    /// A dimension is zero.
    Zero {
        /// Which one, 0 being the innermost.
        axis: usize,
    },
    /// The number of elements, or of bytes, is beyond what a file can hold.
    Overflow([u64; DIMS_MAX]),
    /// The innermost dimension is not a whole number of blocks.
    PartialBlock {
        /// The innermost dimension.
        row_len: u64,
        /// The tensor's type.
        ty: TensorType,
    },
}

impl fmt::Display for ShapeFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ShapeFault::Rank(found) => {
                write!(f, "has {found} dimensions, expected 1 to {DIMS_MAX}")
            }
            ShapeFault::Zero { axis } => write!(f, "has dimension {axis} equal to zero"),
            ShapeFault::Overflow(dims) => {
                f.write_str("has dimensions ")?;
                fmt_dims(dims, f)?;
                f.write_str(", more than any file can hold")
            }
            ShapeFault::PartialBlock { row_len, ty } => {
                let block_len = ty.block_len();
                write!(
                    f,
                    "has rows of {row_len}, expected a multiple of {block_len} for type {ty}"
                )
            }
        }
    }
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The name, unique in the model.
    pub name: String,
    /// How the numbers are stored.
    pub ty: TensorType,
    /// The dimensions.
    pub dims: Dims,
    /// The part of a split model that has the bytes, from 0.
    pub part: usize,
    /// Where the bytes begin, from the start of that part.
    pub offset: u64,
    // Private, so that a tensor whose size was never checked cannot be made.
    n_bytes: u64,
}

impl TensorInfo {
    /// A tensor at the start of part 0, checked as one from a file is: its name, dimensions and size.
    pub fn new(name: &str, ty: TensorType, dims: &[u64]) -> Result<TensorInfo, Error> {
        let place = Place::in_memory;
        let item = || format!("tensor `{name}`");
        if name.is_empty() {
            return Err(Error::BadName {
                at: place(),
                item: "tensor name".to_owned(),
                fault: NameFault::Empty,
                found: Vec::new(),
            });
        }
        if name.len() as u64 > TENSOR_NAME_BYTES_MAX {
            return Err(Error::Limit {
                at: place(),
                item: item(),
                what: "length of the name",
                found: name.len() as u64,
                max: TENSOR_NAME_BYTES_MAX,
            });
        }
        let shape = |fault| Error::Shape {
            at: place(),
            tensor: name.to_owned(),
            fault,
        };
        let dims = Dims::new(dims).map_err(shape)?;
        TensorInfo::from_parts(name.to_owned(), ty, dims).map_err(|(_, fault)| shape(fault))
    }

    /// Checks that rows are whole blocks and that the size fits a file. The name comes back with the fault, for the message.
    pub(crate) fn from_parts(
        name: String,
        ty: TensorType,
        dims: Dims,
    ) -> Result<TensorInfo, (String, ShapeFault)> {
        let block_len = ty.block_len() as u64;
        if !dims.ne(0).is_multiple_of(block_len) {
            let row_len = dims.ne(0);
            return Err((name, ShapeFault::PartialBlock { row_len, ty }));
        }
        let n_blocks = dims.n_elements() / block_len;
        match n_blocks.checked_mul(ty.block_bytes() as u64) {
            Some(n_bytes) if n_bytes <= FILE_END_MAX => Ok(TensorInfo {
                name,
                ty,
                dims,
                part: 0,
                offset: 0,
                n_bytes,
            }),
            _ => Err((name, ShapeFault::Overflow(dims.ne))),
        }
    }

    /// The number of elements.
    pub fn n_elements(&self) -> u64 {
        self.dims.n_elements()
    }

    /// The number of bytes.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Dimension `i`, 0 being the innermost; 1 beyond the rank.
    pub fn ne(&self, i: usize) -> u64 {
        self.dims.ne(i)
    }

    /// Elements of a row: the innermost dimension.
    pub fn row_len(&self) -> u64 {
        self.dims.ne(0)
    }

    /// Rows: the product of all other dimensions.
    pub fn n_rows(&self) -> u64 {
        self.n_elements() / self.row_len()
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> u64 {
        self.n_bytes / self.n_rows()
    }

    /// Where the bytes end, from the start of the part.
    pub(crate) fn end(&self) -> u64 {
        self.offset.saturating_add(self.n_bytes)
    }
}
