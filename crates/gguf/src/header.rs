//! Everything that a file has before its tensor data.
//!
//! ```text
//! "GGUF"  u32 version  u64 n_tensors  u64 n_keys
//! n_keys times:     string key  u32 type  value
//! n_tensors times:  string name  u32 rank  u64 dims[rank]  u32 type  u64 offset
//! padding up to the alignment
//! tensor data, from which the offsets count
//! ```
//!
//! A string is a `u64` length and its bytes; an array a `u32` type, a `u64` count and its items. All numbers are
//! little-endian.

use std::borrow::Borrow;
use std::path::Path;

use crate::cursor::{Cursor, Item, Source};
use crate::error::{Error, IN_MEMORY, NameFault, Place};
use crate::limits::{
    ALIGNMENT_DEFAULT, ALIGNMENT_MAX, ALIGNMENT_MIN, ARRAY_DEPTH_MAX, ARRAY_ITEMS_MAX, DIMS_MAX,
    FILE_END_MAX, INNER_ARRAYS_MAX, KEY_BYTES_MAX, METADATA_KEYS_MAX, TENSOR_NAME_BYTES_MAX,
    TENSORS_MAX,
};
use crate::metadata::Metadata;
use crate::tensor::{Dims, ShapeFault, TensorInfo};
use crate::types::TensorType;
use crate::value::{Array, GgufString, StringArray, Value, ValueType};

pub(crate) const MAGIC: [u8; 4] = *b"GGUF";
pub(crate) const ALIGNMENT_KEY: &str = "general.alignment";

/// The smallest key: the length of its name, one byte of name, a type, one byte of value.
const KEY_BYTES_MIN: u64 = 8 + 1 + 4 + 1;
/// The smallest tensor: the length of its name, one byte of name, rank, one dimension, type, offset.
const TENSOR_BYTES_MIN: u64 = 8 + 1 + 4 + 8 + 4 + 8;

/// The header of one file.
#[derive(Clone, Debug)]
pub struct Header {
    /// The format's version, 2 or 3.
    pub version: u32,
    /// What tensor offsets are multiples of.
    pub alignment: u32,
    /// Keys and values.
    pub metadata: Metadata,
    /// The tensors, in the file's order.
    pub tensors: Vec<TensorInfo>,
    /// Where tensor data begin. A file without tensors may end before.
    pub data_start: u64,
}

impl Header {
    /// Reads the header of a file that is in memory, or of which the first bytes are: tensor data need not be there.
    pub fn parse(bytes: &[u8]) -> Result<Header, Error> {
        Header::read(Path::new(IN_MEMORY), bytes, bytes.len() as u64)
    }

    /// Reads the header of `file` from its bytes, of which there are `file_bytes`.
    pub(crate) fn read(file: &Path, source: impl Source, file_bytes: u64) -> Result<Header, Error> {
        let cursor = &mut Cursor::new(file, source, file_bytes);
        let version = read_version(cursor)?;
        let item = Item::Header;
        let n_tensors = cursor.u64(item)?;
        cursor.check_limit(item, "number of tensors", n_tensors, TENSORS_MAX)?;
        let n_keys = cursor.u64(item)?;
        cursor.check_limit(item, "number of keys", n_keys, METADATA_KEYS_MAX)?;
        // No overflow: both counts are within their bounds.
        cursor.check_left(item, n_keys * KEY_BYTES_MIN + n_tensors * TENSOR_BYTES_MIN)?;

        let metadata = read_metadata(cursor, n_keys)?;
        let alignment = metadata.u32(ALIGNMENT_KEY)?.unwrap_or(ALIGNMENT_DEFAULT);
        check_alignment(file, alignment)?;
        let mut tensors = Vec::with_capacity(n_tensors as usize);
        for no in 0..n_tensors {
            tensors.push(read_tensor(cursor, no, alignment)?);
        }
        let data_start = cursor.pos().next_multiple_of(u64::from(alignment));
        for (tensor, offset_at) in &mut tensors {
            place_tensor(file, tensor, *offset_at, data_start)?;
        }
        let tensors: Vec<TensorInfo> = tensors.into_iter().map(|(tensor, _)| tensor).collect();
        sorted_by_name(&tensors).map_err(|(first, _)| Error::DuplicateTensor {
            tensor: tensors[first].name.clone(),
            first: file.to_owned(),
            second: file.to_owned(),
        })?;
        check_overlap(file, &tensors)?;
        Ok(Header {
            version,
            alignment,
            metadata,
            tensors,
            data_start,
        })
    }
}

/// Positions of the tensors, sorted by name; the positions of two with the same name are the error.
pub(crate) fn sorted_by_name<T: Borrow<TensorInfo>>(
    tensors: &[T],
) -> Result<Vec<u32>, (usize, usize)> {
    let name = |i: u32| &tensors[i as usize].borrow().name;
    let mut by_name: Vec<u32> = (0..tensors.len() as u32).collect();
    by_name.sort_unstable_by_key(|&i| (name(i), i));
    match by_name
        .windows(2)
        .find(|pair| name(pair[0]) == name(pair[1]))
    {
        Some(pair) => Err((pair[0] as usize, pair[1] as usize)),
        None => Ok(by_name),
    }
}

fn read_version<S: Source>(cursor: &mut Cursor<'_, S>) -> Result<u32, Error> {
    let not_gguf = |file: &Path, found: &[u8]| Error::NotGguf {
        file: file.to_owned(),
        found: found.to_owned(),
    };
    let file = cursor.file;
    if cursor.left() < 4 {
        let found = cursor.left() as usize;
        return Err(not_gguf(file, cursor.take(Item::Header, found)?));
    }
    let magic = cursor.take(Item::Header, 4)?;
    if *magic != MAGIC {
        return Err(not_gguf(file, magic));
    }
    match cursor.u32(Item::Header)? {
        version @ 2..=3 => Ok(version),
        found if (1..=3).contains(&found.swap_bytes()) => Err(Error::BigEndian {
            file: file.to_owned(),
            version: found.swap_bytes(),
        }),
        found => Err(Error::Version {
            file: file.to_owned(),
            found,
        }),
    }
}

/// Checks the bytes of a key or tensor name that began at `at`.
fn checked_name(file: &Path, at: u64, item: Item<'_>, bytes: Vec<u8>) -> Result<String, Error> {
    let bad = |fault, found| Error::BadName {
        at: Place::new(file, at),
        item: item.to_string(),
        fault,
        found,
    };
    if bytes.is_empty() {
        return Err(bad(NameFault::Empty, bytes));
    }
    String::from_utf8(bytes).map_err(|fault| bad(NameFault::NotUtf8, fault.into_bytes()))
}

/// A string of at most `max` bytes that has to be UTF-8.
fn read_name<S: Source>(
    cursor: &mut Cursor<'_, S>,
    item: Item<'_>,
    max: u64,
) -> Result<String, Error> {
    let at = cursor.place();
    let len = cursor.u64(item)?;
    if len > max {
        return Err(Error::Limit {
            at,
            item: item.to_string(),
            what: "length of the name",
            found: len,
            max,
        });
    }
    let file = cursor.file;
    let start = cursor.pos();
    let bytes = cursor.take(item, len as usize)?.to_vec();
    checked_name(file, start, item, bytes)
}

fn read_metadata<S: Source>(cursor: &mut Cursor<'_, S>, n_keys: u64) -> Result<Metadata, Error> {
    let mut entries = Vec::with_capacity(n_keys as usize);
    let mut starts = Vec::with_capacity(n_keys as usize);
    let mut n_inner = 0;
    for no in 0..n_keys {
        starts.push(cursor.pos());
        let key = read_name(cursor, Item::KeyNo(no), KEY_BYTES_MAX)?;
        let value = read_value(cursor, Item::Key(&key), &mut n_inner)?;
        entries.push((key, value));
    }
    Metadata::from_entries(cursor.file, entries).map_err(|(twice, key)| Error::DuplicateKey {
        at: Place::new(cursor.file, starts[twice]),
        key,
    })
}

fn read_value_type<S: Source>(
    cursor: &mut Cursor<'_, S>,
    item: Item<'_>,
) -> Result<ValueType, Error> {
    let at = cursor.place();
    let found = cursor.u32(item)?;
    ValueType::from_id(found).ok_or_else(|| Error::UnknownValueType {
        at,
        item: item.to_string(),
        found,
    })
}

fn read_value<S: Source>(
    cursor: &mut Cursor<'_, S>,
    item: Item<'_>,
    n_inner: &mut u64,
) -> Result<Value, Error> {
    Ok(match read_value_type(cursor, item)? {
        ValueType::U8 => Value::U8(cursor.u8(item)?),
        ValueType::I8 => Value::I8(cursor.number(item, i8::from_le_bytes)?),
        ValueType::U16 => Value::U16(cursor.number(item, u16::from_le_bytes)?),
        ValueType::I16 => Value::I16(cursor.number(item, i16::from_le_bytes)?),
        ValueType::U32 => Value::U32(cursor.u32(item)?),
        ValueType::I32 => Value::I32(cursor.number(item, i32::from_le_bytes)?),
        ValueType::F32 => Value::F32(cursor.number(item, f32::from_le_bytes)?),
        ValueType::Bool => Value::Bool(read_bool(cursor, item)?),
        ValueType::String => {
            let mut bytes = Vec::new();
            cursor.append_string(item, &mut bytes)?;
            Value::String(GgufString::from(bytes))
        }
        ValueType::Array => Value::Array(read_array(cursor, item, 1, n_inner)?),
        ValueType::U64 => Value::U64(cursor.u64(item)?),
        ValueType::I64 => Value::I64(cursor.number(item, i64::from_le_bytes)?),
        ValueType::F64 => Value::F64(cursor.number(item, f64::from_le_bytes)?),
    })
}

fn read_bool<S: Source>(cursor: &mut Cursor<'_, S>, item: Item<'_>) -> Result<bool, Error> {
    let at = cursor.place();
    match cursor.u8(item)? {
        0 => Ok(false),
        1 => Ok(true),
        found => Err(Error::BadBool {
            at,
            item: item.to_string(),
            found,
        }),
    }
}

fn read_array<S: Source>(
    cursor: &mut Cursor<'_, S>,
    item: Item<'_>,
    depth: usize,
    n_inner: &mut u64,
) -> Result<Array, Error> {
    cursor.check_limit(
        item,
        "depth of arrays",
        depth as u64,
        ARRAY_DEPTH_MAX as u64,
    )?;
    let item_type = read_value_type(cursor, item)?;
    let count = cursor.u64(item)?;
    cursor.check_limit(item, "number of items", count, ARRAY_ITEMS_MAX)?;
    Ok(match item_type {
        ValueType::U8 => Array::U8(cursor.numbers(item, count, u8::from_le_bytes)?),
        ValueType::I8 => Array::I8(cursor.numbers(item, count, i8::from_le_bytes)?),
        ValueType::U16 => Array::U16(cursor.numbers(item, count, u16::from_le_bytes)?),
        ValueType::I16 => Array::I16(cursor.numbers(item, count, i16::from_le_bytes)?),
        ValueType::U32 => Array::U32(cursor.numbers(item, count, u32::from_le_bytes)?),
        ValueType::I32 => Array::I32(cursor.numbers(item, count, i32::from_le_bytes)?),
        ValueType::F32 => Array::F32(cursor.numbers(item, count, f32::from_le_bytes)?),
        ValueType::Bool => {
            cursor.check_left(item, count)?;
            let bools = (0..count).map(|_| read_bool(cursor, item));
            Array::Bool(bools.collect::<Result<_, _>>()?)
        }
        ValueType::String => Array::String(read_strings(cursor, item, count)?),
        ValueType::Array => {
            *n_inner += count;
            cursor.check_limit(
                item,
                "number of arrays in arrays",
                *n_inner,
                INNER_ARRAYS_MAX,
            )?;
            cursor.check_left(item, count * 12)?;
            let arrays = (0..count).map(|_| read_array(cursor, item, depth + 1, n_inner));
            Array::Array(arrays.collect::<Result<_, _>>()?)
        }
        ValueType::U64 => Array::U64(cursor.numbers(item, count, u64::from_le_bytes)?),
        ValueType::I64 => Array::I64(cursor.numbers(item, count, i64::from_le_bytes)?),
        ValueType::F64 => Array::F64(cursor.numbers(item, count, f64::from_le_bytes)?),
    })
}

fn read_strings<S: Source>(
    cursor: &mut Cursor<'_, S>,
    item: Item<'_>,
    count: u64,
) -> Result<StringArray, Error> {
    cursor.check_left(item, count * 8)?;
    let mut bytes = Vec::new();
    let mut ends = Vec::with_capacity(count as usize);
    for _ in 0..count {
        cursor.append_string(item, &mut bytes)?;
        // No loss: the bytes are fewer than a header may have.
        ends.push(bytes.len() as u32);
    }
    Ok(StringArray::from_parts(bytes, ends))
}

pub(crate) fn check_alignment(file: &Path, found: u32) -> Result<(), Error> {
    if found.is_power_of_two() && (ALIGNMENT_MIN..=ALIGNMENT_MAX).contains(&found) {
        return Ok(());
    }
    Err(Error::Alignment {
        file: file.to_owned(),
        found,
    })
}

/// A tensor whose `offset` still counts from the start of the data, and where that offset stands in the file.
fn read_tensor<S: Source>(
    cursor: &mut Cursor<'_, S>,
    no: u64,
    alignment: u32,
) -> Result<(TensorInfo, u64), Error> {
    let name = read_name(cursor, Item::TensorNo(no), TENSOR_NAME_BYTES_MAX)?;
    let item = Item::Tensor(&name);
    let shape_at = cursor.place();
    let shape_error = |fault, tensor: String| Error::Shape {
        at: shape_at.clone(),
        tensor,
        fault,
    };
    let rank = cursor.u32(item)?;
    if !(1..=DIMS_MAX as u32).contains(&rank) {
        return Err(shape_error(ShapeFault::Rank(rank.into()), name));
    }
    let mut dims = [0; DIMS_MAX];
    let dims = &mut dims[..rank as usize];
    for dim in &mut *dims {
        *dim = cursor.u64(item)?;
    }
    let dims = match Dims::new(dims) {
        Ok(dims) => dims,
        Err(fault) => return Err(shape_error(fault, name)),
    };
    let type_at = cursor.place();
    let type_id = cursor.u32(item)?;
    let offset_at = cursor.place();
    let offset = cursor.u64(item)?;
    let Some(ty) = TensorType::from_id(type_id) else {
        return Err(Error::TensorType {
            at: type_at,
            tensor: name,
            found: type_id,
            retired: TensorType::retired_name(type_id),
        });
    };
    let mut tensor =
        TensorInfo::from_parts(name, ty, dims).map_err(|(name, fault)| shape_error(fault, name))?;
    if !offset.is_multiple_of(alignment.into()) {
        return Err(Error::Misaligned {
            at: offset_at,
            tensor: tensor.name,
            offset,
            alignment,
        });
    }
    tensor.offset = offset;
    Ok((tensor, offset_at.offset))
}

/// Makes a tensor's offset count from the start of the file, and checks that it ends where a file can end.
fn place_tensor(
    file: &Path,
    tensor: &mut TensorInfo,
    offset_at: u64,
    data_start: u64,
) -> Result<(), Error> {
    let offset = tensor.offset;
    let start = offset.checked_add(data_start);
    let end = start.and_then(|start| start.checked_add(tensor.n_bytes()));
    match (start, end) {
        (Some(start), Some(end)) if end <= FILE_END_MAX => {
            tensor.offset = start;
            Ok(())
        }
        _ => Err(Error::OffsetOverflow {
            at: Place::new(file, offset_at),
            tensor: tensor.name.clone(),
            offset,
            bytes: tensor.n_bytes(),
        }),
    }
}

fn check_overlap(file: &Path, tensors: &[TensorInfo]) -> Result<(), Error> {
    let mut by_offset: Vec<&TensorInfo> = tensors.iter().collect();
    by_offset.sort_unstable_by_key(|tensor| (tensor.offset, tensor.end()));
    for pair in by_offset.windows(2) {
        let (first, second) = (pair[0], pair[1]);
        if second.offset < first.end() {
            return Err(Error::Overlap {
                at: Place::new(file, second.offset),
                first: first.name.clone(),
                first_end: first.end(),
                second: second.name.clone(),
            });
        }
    }
    Ok(())
}
