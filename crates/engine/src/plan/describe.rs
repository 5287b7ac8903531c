//! What a plan must know of a model, from its file's header: tensor data need not be there.

use std::borrow::Cow;

use gguf::{Array, GgufFile, Metadata, Value};
use place::model::{self, Model, Tensor};

/// Describes a model, whole or split, with or without tensor data.
///
/// # Errors
/// If the header holds what no model can have. An architecture that nothing here runs is no error.
pub fn describe(file: &GgufFile) -> Result<Model, place::Error> {
    let tensors: Vec<Tensor<'_>> = file
        .tensors()
        .iter()
        .map(|tensor| Tensor {
            name: &tensor.name,
            ty: tensor.ty.name(),
            dims: tensor.dims.as_slice(),
            bytes: tensor.n_bytes(),
            elements: tensor.n_elements(),
        })
        .collect();
    Model::describe(&Keys(file.metadata()), &tensors)
}

/// A file's keys, as placement reads them.
struct Keys<'a>(&'a Metadata);

impl model::Metadata for Keys<'_> {
    fn get(&self, key: &str) -> Option<model::Value<'_>> {
        let value = self.0.get(key)?;
        let other = || model::Value::Other(value.type_name());
        Some(match value {
            Value::Bool(truth) => model::Value::Bool(*truth),
            Value::String(text) => match text.as_str() {
                Ok(text) => model::Value::Text(Cow::Borrowed(text)),
                Err(_) => model::Value::Other("text that is not UTF-8".to_owned()),
            },
            Value::Array(Array::Bool(flags)) => model::Value::Bools(Cow::Borrowed(flags)),
            Value::Array(_) => match self.0.ints(key) {
                Ok(Some(ints)) => match ints.into_iter().map(u64::try_from).collect() {
                    Ok(ints) => model::Value::Unsigneds(Cow::Owned(ints)),
                    Err(_) => model::Value::Other("a list with negative integers".to_owned()),
                },
                _ => other(),
            },
            // A negative integer is named by its type, like a float.
            _ => match self.0.u64(key) {
                Ok(Some(number)) => model::Value::Unsigned(number),
                _ => other(),
            },
        })
    }
}
