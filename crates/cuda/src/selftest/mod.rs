//! Every kernel on the present device, over random and extreme inputs, against the scalar definition: bit for bit, NaN equal to NaN.
//!
//! Run by whoever doubts a driver, a card or a change of kernels.

mod acts;
mod data;
mod doorbell;
mod products;

pub use acts::compare_acts;

use gguf::TensorType;
use quant::formats;

use crate::device::Device;
use crate::error::Error;
use crate::product::Target;

/// What is tested.
#[derive(Debug, Clone)]
pub struct Options {
    /// Formats of weights.
    pub formats: Vec<TensorType>,
    /// Which compiled kernels.
    pub target: Target,
    /// Of the random inputs.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            formats: formats::supported().to_vec(),
            target: Target::Best,
            seed: 1,
        }
    }
}

/// A kernel over the inputs of one format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// The kernel.
    pub kernel: &'static str,
    /// Of what.
    pub format: String,
    /// Over which shapes.
    pub shapes: String,
    /// Numbers compared.
    pub compared: usize,
    /// Numbers that differ.
    pub differing: usize,
    /// Of those that are equal, how many are NaN.
    pub nan: usize,
    /// The first difference.
    pub first: Option<String>,
}

impl Row {
    /// A row before anything was compared.
    pub fn new(kernel: &'static str, format: impl Into<String>, shapes: impl Into<String>) -> Self {
        Self {
            kernel,
            format: format.into(),
            shapes: shapes.into(),
            compared: 0,
            differing: 0,
            nan: 0,
            first: None,
        }
    }

    /// Counts a number of the device against that of the definition.
    pub fn compare(&mut self, found: f32, wanted: f32, place: impl FnOnce() -> String) {
        self.compared += 1;
        if found.is_nan() && wanted.is_nan() {
            self.nan += 1;
        } else if found.to_bits() != wanted.to_bits() {
            self.differing += 1;
            if self.first.is_none() {
                self.first = Some(format!("{}: {found:e} instead of {wanted:e}", place()));
            }
        }
    }

    /// Counts an integer of the device against that of the definition.
    pub fn compare_int(&mut self, found: i32, wanted: i32, place: impl FnOnce() -> String) {
        self.compared += 1;
        if found != wanted {
            self.differing += 1;
            if self.first.is_none() {
                self.first = Some(format!("{}: {found} instead of {wanted}", place()));
            }
        }
    }
}

/// Runs all tests; `report` sees each row as it is done.
pub fn run(
    device: &Device,
    options: &Options,
    mut report: impl FnMut(&Row),
) -> Result<Vec<Row>, Error> {
    let mut rows = Vec::new();
    let stream = device.stream()?;
    let mut done = |row: Row| {
        report(&row);
        rows.push(row);
    };
    products::activations(&stream, options, &mut done)?;
    let mut random = data::Random::new(options.seed);
    doorbell::round_trips(&stream, options.target, &mut random, &mut done)?;
    doorbell::no_answer(&stream, options.target, &mut done)?;
    for &ty in &options.formats {
        products::format(&stream, options, ty, &mut done)?;
    }
    Ok(rows)
}
