//! A file's keys and values, as far as placement reads them.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::error::Error;

/// A file's keys and values. Whoever can read files implements this.
pub trait Metadata {
    /// The value of a key; `None` if the file does not have it.
    fn get(&self, key: &str) -> Option<Value<'_>>;
}

/// The value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<'a> {
    /// An integer of any type that is not negative.
    Unsigned(u64),
    /// A truth value.
    Bool(bool),
    /// Text.
    Text(Cow<'a, str>),
    /// A list of integers, none of them negative.
    Unsigneds(Cow<'a, [u64]>),
    /// A list of truth values.
    Bools(Cow<'a, [bool]>),
    /// Anything else, such as a float, in words.
    Other(String),
}

impl Value<'_> {
    fn kind(&self) -> &str {
        match self {
            Value::Unsigned(_) => "an integer",
            Value::Bool(_) => "a truth value",
            Value::Text(_) => "text",
            Value::Unsigneds(_) => "a list of integers",
            Value::Bools(_) => "a list of truth values",
            Value::Other(kind) => kind,
        }
    }
}

impl Metadata for BTreeMap<String, Value<'_>> {
    fn get(&self, key: &str) -> Option<Value<'_>> {
        BTreeMap::get(self, key).cloned()
    }
}

/// Reads an architecture's keys, `ARCH.key`.
pub(super) struct Keys<'a> {
    meta: &'a dyn Metadata,
    pub(super) arch: &'a str,
}

/// One number for all layers, or one a layer.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum PerLayer {
    Same(u64),
    Each(Vec<u64>),
}

impl PerLayer {
    /// The number of layer `i`. Lists may end where the layers that decoding runs end; the rest then have 0.
    pub(super) fn of(&self, i: usize) -> u64 {
        match self {
            PerLayer::Same(n) => *n,
            PerLayer::Each(list) => list.get(i).copied().unwrap_or(0),
        }
    }

    /// The largest number.
    pub(super) fn max(&self) -> u64 {
        match self {
            PerLayer::Same(n) => *n,
            PerLayer::Each(list) => list.iter().copied().max().unwrap_or(0),
        }
    }
}

impl<'a> Keys<'a> {
    pub(super) fn new(meta: &'a dyn Metadata, arch: &'a str) -> Self {
        Self { meta, arch }
    }

    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    fn get(&self, key: &str) -> Option<Value<'a>> {
        self.meta.get(&self.name(key))
    }

    pub(super) fn bad(&self, key: &str, problem: impl Into<String>) -> Error {
        Error::Key {
            key: self.name(key),
            problem: problem.into(),
        }
    }

    fn wrong_type(&self, key: &str, value: &Value<'_>, wanted: &str) -> Error {
        self.bad(key, format!("is {}, expected {wanted}", value.kind()))
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// An integer.
    pub(super) fn unsigned(&self, key: &str) -> Result<Option<u64>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(n)) => Ok(Some(n)),
            Some(other) => Err(self.wrong_type(key, &other, "an integer that is not negative")),
        }
    }

    pub(super) fn require(&self, key: &str) -> Result<u64, Error> {
        self.unsigned(key)?.ok_or_else(|| Error::Missing {
            key: self.name(key),
            wanted: "an integer",
        })
    }

    /// An integer for all layers, or a list that has one for each of the file's `layers`, of which decoding runs the first
    /// `running`: converters differ in whether lists cover the others.
    pub(super) fn per_layer(
        &self,
        key: &str,
        layers: usize,
        running: usize,
    ) -> Result<Option<PerLayer>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(n)) => Ok(Some(PerLayer::Same(n))),
            Some(Value::Unsigneds(list)) => {
                self.check_len(key, list.len(), layers, running)?;
                Ok(Some(PerLayer::Each(list.into_owned())))
            }
            Some(other) => Err(self.wrong_type(key, &other, "an integer or a list of them")),
        }
    }

    /// A truth value a layer, as truth values or as integers; `Err` with the integer where the key is one.
    pub(super) fn flags_or_number(
        &self,
        key: &str,
        layers: usize,
        running: usize,
    ) -> Result<Option<Result<Vec<bool>, u64>>, Error> {
        let flags = match self.get(key) {
            None => return Ok(None),
            Some(Value::Unsigned(n)) => return Ok(Some(Err(n))),
            Some(Value::Bools(list)) => list.into_owned(),
            Some(Value::Unsigneds(list)) => list.iter().map(|&n| n != 0).collect(),
            Some(other) => {
                return Err(self.wrong_type(key, &other, "an integer or a truth value a layer"));
            }
        };
        self.check_len(key, flags.len(), layers, running)?;
        Ok(Some(Ok(flags)))
    }

    fn check_len(
        &self,
        key: &str,
        found: usize,
        layers: usize,
        running: usize,
    ) -> Result<(), Error> {
        if found == layers || found == running {
            return Ok(());
        }
        Err(self.bad(key, format!("lists {found} layers, expected {layers}")))
    }
}
