//! Metadata values. Arrays are stored as compactly as the file has them: a vocabulary is two allocations, not 262,144.

use std::fmt;
use std::str::Utf8Error;

/// Bytes that are meant to be text. Most are UTF-8, but nothing in the format makes them so.
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct GgufString(Box<[u8]>);

impl GgufString {
    /// The bytes as they are in the file.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The bytes as text, if they are UTF-8.
    pub fn as_str(&self) -> Result<&str, Utf8Error> {
        std::str::from_utf8(&self.0)
    }
}

impl fmt::Debug for GgufString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

impl From<Vec<u8>> for GgufString {
    fn from(bytes: Vec<u8>) -> GgufString {
        GgufString(bytes.into_boxed_slice())
    }
}

impl From<&str> for GgufString {
    fn from(text: &str) -> GgufString {
        GgufString(text.as_bytes().into())
    }
}

/// A list of strings in one piece of memory.
#[derive(Clone, PartialEq, Eq)]
pub struct StringArray {
    bytes: Box<[u8]>,
    /// String `i` is `bytes[ends[i - 1]..ends[i]]`, the first one begins at 0. A header is below 4 GiB, so 32 bits are enough.
    ends: Box<[u32]>,
}

impl StringArray {
    /// `ends` must not decrease, and its last must be the number of bytes.
    pub(crate) fn from_parts(bytes: Vec<u8>, ends: Vec<u32>) -> StringArray {
        debug_assert!(ends.is_sorted());
        debug_assert_eq!(ends.last().map_or(0, |&end| end as usize), bytes.len());
        StringArray {
            bytes: bytes.into_boxed_slice(),
            ends: ends.into_boxed_slice(),
        }
    }

    /// The number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are no strings.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// String `i`, if there are as many.
    pub fn get(&self, i: usize) -> Option<&[u8]> {
        let end = *self.ends.get(i)?;
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        Some(&self.bytes[start as usize..end as usize])
    }

    /// All strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> + Clone {
        (0..self.len()).map(|i| self.get(i).expect("i is below len"))
    }
}

impl fmt::Debug for StringArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let strings = self.iter().map(|s| s.escape_ascii().to_string());
        f.debug_list().entries(strings).finish()
    }
}

impl<S: AsRef<[u8]>> FromIterator<S> for StringArray {
    /// # Panics
    ///
    /// If the strings have 4 GiB or more in all, of which no file can be made.
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> StringArray {
        let mut bytes = Vec::new();
        let mut ends = Vec::new();
        for string in strings {
            bytes.extend_from_slice(string.as_ref());
            ends.push(u32::try_from(bytes.len()).expect("strings of less than 4 GiB"));
        }
        StringArray::from_parts(bytes, ends)
    }
}

macro_rules! values {
    ($($(#[$doc:meta])* $name:ident = $id:literal, $label:literal, $scalar:ty, $array:ty;)*) => {
        /// A metadata value.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Value {
            $($(#[$doc])* $name($scalar),)*
        }

        /// A list of metadata values of one type.
        #[derive(Clone, Debug, PartialEq)]
        pub enum Array {
            $($(#[$doc])* $name($array),)*
        }

        /// The type of a metadata value.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum ValueType {
            $($name,)*
        }

        impl ValueType {
            pub(crate) fn from_id(id: u32) -> Option<ValueType> {
                match id {
                    $($id => Some(ValueType::$name),)*
                    _ => None,
                }
            }

            pub(crate) fn id(self) -> u32 {
                match self { $(ValueType::$name => $id,)* }
            }

            fn name(self) -> &'static str {
                match self { $(ValueType::$name => $label,)* }
            }
        }

        impl Value {
            pub(crate) fn value_type(&self) -> ValueType {
                match self { $(Value::$name(_) => ValueType::$name,)* }
            }
        }

        impl Array {
            pub(crate) fn value_type(&self) -> ValueType {
                match self { $(Array::$name(_) => ValueType::$name,)* }
            }

            /// The number of items.
            pub fn len(&self) -> usize {
                match self { $(Array::$name(items) => items.len(),)* }
            }

            /// Whether there are no items.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }
        }

        $(impl From<$scalar> for Value {
            fn from(value: $scalar) -> Value {
                Value::$name(value)
            }
        }

        impl From<$array> for Value {
            fn from(items: $array) -> Value {
                Value::Array(Array::$name(items))
            }
        })*
    };
}

values! {
    /// Unsigned, 8 bits.
    U8 = 0, "u8", u8, Box<[u8]>;
    /// Signed, 8 bits.
    I8 = 1, "i8", i8, Box<[i8]>;
    /// Unsigned, 16 bits.
    U16 = 2, "u16", u16, Box<[u16]>;
    /// Signed, 16 bits.
    I16 = 3, "i16", i16, Box<[i16]>;
    /// Unsigned, 32 bits.
    U32 = 4, "u32", u32, Box<[u32]>;
    /// Signed, 32 bits.
    I32 = 5, "i32", i32, Box<[i32]>;
    /// Single precision.
    F32 = 6, "f32", f32, Box<[f32]>;
    /// Truth value.
    Bool = 7, "bool", bool, Box<[bool]>;
    /// Text, or what is meant to be text.
    String = 8, "string", GgufString, StringArray;
    /// A list. Inside of a list, each may have a type of its own.
    Array = 9, "array", Array, Box<[Array]>;
    /// Unsigned, 64 bits.
    U64 = 10, "u64", u64, Box<[u64]>;
    /// Signed, 64 bits.
    I64 = 11, "i64", i64, Box<[i64]>;
    /// Double precision.
    F64 = 12, "f64", f64, Box<[f64]>;
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::String(text.into())
    }
}

impl Value {
    /// The value, if it is an integer of any type.
    pub fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(n) => n.into(),
            Value::I8(n) => n.into(),
            Value::U16(n) => n.into(),
            Value::I16(n) => n.into(),
            Value::U32(n) => n.into(),
            Value::I32(n) => n.into(),
            Value::U64(n) => n.into(),
            Value::I64(n) => n.into(),
            _ => return None,
        })
    }

    /// The type in words: `u32`, `array of string`.
    pub fn type_name(&self) -> String {
        match self {
            Value::Array(array) => format!("array of {}", array.value_type().name()),
            other => other.value_type().name().to_owned(),
        }
    }
}
