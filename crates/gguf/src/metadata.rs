//! A file's metadata: keys and values in the file's order, with access by type.

use std::path::{Path, PathBuf};

use crate::error::{Error, IN_MEMORY};
use crate::value::{Array, StringArray, Value};

/// Keys and their values, in the order of the file. Every key is there once.
///
/// For each type there are two ways to ask: `x(key)` is `None` where the key is missing, `require_x(key)` is an error. Both are
/// errors that name the key and the type found where the value has another type.
#[derive(Clone, Debug)]
pub struct Metadata {
    file: PathBuf,
    entries: Vec<(String, Value)>,
    /// Positions in `entries`, sorted by key.
    by_key: Vec<u32>,
}

impl Default for Metadata {
    fn default() -> Metadata {
        Metadata::new()
    }
}

impl PartialEq for Metadata {
    /// Same keys with the same values in the same order, whatever files they come from.
    fn eq(&self, other: &Metadata) -> bool {
        self.entries == other.entries
    }
}

impl Metadata {
    /// No keys, of no file.
    pub fn new() -> Metadata {
        Metadata {
            file: PathBuf::from(IN_MEMORY),
            entries: Vec::new(),
            by_key: Vec::new(),
        }
    }

    /// Takes the entries of a file over; the later of two entries with the same key is the error.
    pub(crate) fn from_entries(
        file: &Path,
        mut entries: Vec<(String, Value)>,
    ) -> Result<Metadata, (usize, String)> {
        let mut by_key: Vec<u32> = (0..entries.len() as u32).collect();
        by_key.sort_unstable_by_key(|&i| (&entries[i as usize].0, i));
        if let Some(twice) = by_key
            .windows(2)
            .find(|w| entries[w[0] as usize].0 == entries[w[1] as usize].0)
        {
            let later = twice[1] as usize;
            return Err((later, entries.swap_remove(later).0));
        }
        Ok(Metadata {
            file: file.to_owned(),
            entries,
            by_key,
        })
    }

    fn find(&self, key: &str) -> Result<usize, usize> {
        self.by_key
            .binary_search_by(|&i| self.entries[i as usize].0.as_str().cmp(key))
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let i = self.by_key[self.find(key).ok()?];
        Some(&self.entries[i as usize].1)
    }

    /// Sets a key: in its place if it is there, else as the last one.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        match self.find(key) {
            Ok(at) => self.entries[self.by_key[at] as usize].1 = value.into(),
            Err(at) => {
                self.by_key.insert(at, self.entries.len() as u32);
                self.entries.push((key.to_owned(), value.into()));
            }
        }
    }

    /// All keys and values in the order of the file.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.entries
            .iter()
            .map(|(key, value)| (key.as_str(), value))
    }

    pub(crate) fn into_entries(self) -> Vec<(String, Value)> {
        self.entries
    }

    /// The number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn wrong_type(&self, key: &str, value: &Value, wanted: &'static str) -> Error {
        Error::WrongType {
            file: self.file.clone(),
            key: key.to_owned(),
            found: value.type_name(),
            wanted,
        }
    }

    fn out_of_range(&self, key: &str, found: i128, wanted: &'static str) -> Error {
        Error::OutOfRange {
            file: self.file.clone(),
            key: key.to_owned(),
            found,
            wanted,
        }
    }

    fn required<T>(&self, key: &str, value: Option<T>, wanted: &'static str) -> Result<T, Error> {
        value.ok_or_else(|| Error::MissingKey {
            file: self.file.clone(),
            key: key.to_owned(),
            wanted,
        })
    }

    /// The value as `convert` has it; an error that says `wanted` where that is `None`.
    fn typed<'a, T>(
        &'a self,
        key: &str,
        wanted: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => Err(self.wrong_type(key, value, wanted)),
        }
    }

    fn integer<T: TryFrom<i128>>(
        &self,
        key: &str,
        wanted: &'static str,
    ) -> Result<Option<T>, Error> {
        let Some(number) = self.typed(key, wanted, Value::as_integer)? else {
            return Ok(None);
        };
        match T::try_from(number) {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(self.out_of_range(key, number, wanted)),
        }
    }
}

const U32: &str = "an integer from 0 to 4294967295";
const U64: &str = "an integer from 0 to 18446744073709551615";
const FLOAT: &str = "f32 or f64";
const BOOL: &str = "bool";
const TEXT: &str = "string (UTF-8)";
const STRINGS: &str = "array of string";
const INTS: &str = "array of integers of up to 64 bits with sign";
const FLOATS: &str = "array of f32 or f64";
const BOOLS: &str = "array of bool";

/// Access by type.
impl Metadata {
    /// An integer of any type whose value fits.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, Error> {
        self.integer(key, U32)
    }

    /// Like [`u32`](Metadata::u32); the key must be there.
    pub fn require_u32(&self, key: &str) -> Result<u32, Error> {
        self.required(key, self.u32(key)?, U32)
    }

    /// An integer of any type whose value fits.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, Error> {
        self.integer(key, U64)
    }

    /// Like [`u64`](Metadata::u64); the key must be there.
    pub fn require_u64(&self, key: &str) -> Result<u64, Error> {
        self.required(key, self.u64(key)?, U64)
    }

    /// A float; one of double precision is rounded.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, Error> {
        self.typed(key, FLOAT, |value| match *value {
            Value::F32(x) => Some(x),
            Value::F64(x) => Some(x as f32),
            _ => None,
        })
    }

    /// Like [`f32`](Metadata::f32); the key must be there.
    pub fn require_f32(&self, key: &str) -> Result<f32, Error> {
        self.required(key, self.f32(key)?, FLOAT)
    }

    /// A truth value.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, Error> {
        self.typed(key, BOOL, |value| match *value {
            Value::Bool(b) => Some(b),
            _ => None,
        })
    }

    /// Like [`bool`](Metadata::bool); the key must be there.
    pub fn require_bool(&self, key: &str) -> Result<bool, Error> {
        self.required(key, self.bool(key)?, BOOL)
    }

    /// A text, which must be UTF-8; for bytes that need not be, see [`get`](Metadata::get).
    pub fn str(&self, key: &str) -> Result<Option<&str>, Error> {
        let text = self.typed(key, TEXT, |value| match value {
            Value::String(text) => Some(text),
            _ => None,
        })?;
        let Some(text) = text else {
            return Ok(None);
        };
        match text.as_str() {
            Ok(text) => Ok(Some(text)),
            Err(fault) => Err(Error::WrongType {
                file: self.file.clone(),
                key: key.to_owned(),
                found: format!("a string that is not UTF-8 ({fault})"),
                wanted: TEXT,
            }),
        }
    }

    /// Like [`str`](Metadata::str); the key must be there.
    pub fn require_str(&self, key: &str) -> Result<&str, Error> {
        self.required(key, self.str(key)?, TEXT)
    }

    /// A list of strings.
    pub fn strings(&self, key: &str) -> Result<Option<&StringArray>, Error> {
        self.typed(key, STRINGS, |value| match value {
            Value::Array(Array::String(strings)) => Some(strings),
            _ => None,
        })
    }

    /// Like [`strings`](Metadata::strings); the key must be there.
    pub fn require_strings(&self, key: &str) -> Result<&StringArray, Error> {
        self.required(key, self.strings(key)?, STRINGS)
    }

    /// A list of integers of any type.
    pub fn ints(&self, key: &str) -> Result<Option<Vec<i64>>, Error> {
        fn widen<T: Copy + Into<i64>>(items: &[T]) -> Result<Vec<i64>, u64> {
            Ok(items.iter().map(|&n| n.into()).collect())
        }
        let ints = self.typed(key, INTS, |value| match value {
            Value::Array(Array::U8(items)) => Some(widen(items)),
            Value::Array(Array::I8(items)) => Some(widen(items)),
            Value::Array(Array::U16(items)) => Some(widen(items)),
            Value::Array(Array::I16(items)) => Some(widen(items)),
            Value::Array(Array::U32(items)) => Some(widen(items)),
            Value::Array(Array::I32(items)) => Some(widen(items)),
            Value::Array(Array::I64(items)) => Some(widen(items)),
            Value::Array(Array::U64(items)) => Some(
                items
                    .iter()
                    .map(|&n| i64::try_from(n).map_err(|_| n))
                    .collect(),
            ),
            _ => None,
        })?;
        ints.transpose()
            .map_err(|found| self.out_of_range(key, found.into(), INTS))
    }

    /// Like [`ints`](Metadata::ints); the key must be there.
    pub fn require_ints(&self, key: &str) -> Result<Vec<i64>, Error> {
        self.required(key, self.ints(key)?, INTS)
    }

    /// A list of floats; those of double precision are rounded.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, Error> {
        self.typed(key, FLOATS, |value| match value {
            Value::Array(Array::F32(items)) => Some(items.to_vec()),
            Value::Array(Array::F64(items)) => Some(items.iter().map(|&x| x as f32).collect()),
            _ => None,
        })
    }

    /// Like [`floats`](Metadata::floats); the key must be there.
    pub fn require_floats(&self, key: &str) -> Result<Vec<f32>, Error> {
        self.required(key, self.floats(key)?, FLOATS)
    }

    /// A list of truth values.
    pub fn bools(&self, key: &str) -> Result<Option<&[bool]>, Error> {
        self.typed(key, BOOLS, |value| match value {
            Value::Array(Array::Bool(items)) => Some(&items[..]),
            _ => None,
        })
    }

    /// Like [`bools`](Metadata::bools); the key must be there.
    pub fn require_bools(&self, key: &str) -> Result<&[bool], Error> {
        self.required(key, self.bools(key)?, BOOLS)
    }
}
