//! The fields of a request's body, read one by one, so that an error says which one is wrong, and how.

use serde_json::{Map, Value};

use crate::error::ApiError;

/// An object of JSON.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a>(pub &'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// A field that is there and not null.
    pub fn get(self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn read<T>(
        self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let wrong = || {
            let found = match value {
                Value::Null => "null",
                Value::Bool(_) => "a boolean",
                Value::Number(_) => "a number",
                Value::String(_) => "a text",
                Value::Array(_) => "a list",
                Value::Object(_) => "an object",
            };
            ApiError::field(name, format!("'{name}' is {found}, expected {expected}"))
        };
        read(value).map(Some).ok_or_else(wrong)
    }

    pub fn text(self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, "a text", Value::as_str)
    }

    pub fn flag(self, name: &str) -> Result<bool, ApiError> {
        let flag = self.read(name, "true or false", Value::as_bool)?;
        Ok(flag.unwrap_or(false))
    }

    pub fn list(self, name: &str) -> Result<Option<&'a [Value]>, ApiError> {
        self.read(name, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    pub fn object(self, name: &str) -> Result<Option<Fields<'a>>, ApiError> {
        self.read(name, "an object", |value| value.as_object().map(Fields))
    }

    /// A number of single precision. Its range is checked by whoever knows it.
    pub fn number(self, name: &str) -> Result<Option<f32>, ApiError> {
        self.read(name, "a number of usual size", |value| {
            value.as_f64().map(|x| x as f32).filter(|x| x.is_finite())
        })
    }

    pub fn integer(self, name: &str, min: i64, max: i64) -> Result<Option<i64>, ApiError> {
        let integer = self.read(name, "an integer", Value::as_i64)?;
        match integer {
            Some(n) if !(min..=max).contains(&n) => {
                let range = if max == i64::MAX {
                    format!("{min} or more")
                } else {
                    format!("{min} to {max}")
                };
                let message = format!("'{name}' is {n}, expected {range}");
                Err(ApiError::field(name, message))
            }
            integer => Ok(integer),
        }
    }

    /// Text, or a list of texts.
    pub fn texts(self, name: &str) -> Result<Vec<String>, ApiError> {
        let texts = self.read(name, "a text or a list of texts", |value| match value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(items) => items
                .iter()
                .map(|item| item.as_str().map(str::to_owned))
                .collect(),
            _ => None,
        })?;
        Ok(texts.unwrap_or_default())
    }
}
