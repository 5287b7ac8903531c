//! Every kernel on the present device, over random and extreme inputs, against the scalar definition: bit for bit, NaN equal to NaN.
//!
//! Run by whoever doubts a driver, a card or a change of kernels.

mod acts;
mod attention;
mod data;
mod doorbell;
mod elementwise;
mod experts;
mod products;
mod prompts;
mod turn;

pub use acts::compare_acts;

use gguf::TensorType;
use quant::formats;

use crate::device::Device;
use crate::kernel::{Module, Start};
use crate::product::Target;
use crate::ptx;

/// What is tested.
#[derive(Debug, Clone)]
pub struct Options {
    /// Formats of weights.
    pub formats: Vec<TensorType>,
    /// Which compiled kernels.
    pub target: Target,
    /// Of the random inputs.
    pub seed: u64,
    /// Whether products are.
    pub products: bool,
    /// Whether mixtures of experts are.
    pub experts: bool,
    /// Whether all else is tested, too: attention, what is done to heads, element-wise operations, hand-overs.
    pub others: bool,
}

/// What keeps a test from being run: the device, or memory and threads of the host.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// All launches may overlap what is ahead of them: so that is tested, too.
const START: Start = Start::Overlapped;

impl Default for Options {
    fn default() -> Self {
        Self {
            formats: formats::supported().to_vec(),
            target: Target::Best,
            seed: 1,
            products: true,
            experts: true,
            others: true,
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
///
/// # Errors
/// If the device refuses, or the host has no memory or threads for the definition.
pub fn run(
    device: &Device,
    options: &Options,
    mut report: impl FnMut(&Row),
) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    let (stream, target) = (device.stream()?, options.target);
    compile(device, options);
    let mut done = |row: Row| {
        report(&row);
        rows.push(row);
    };
    if options.products {
        products::activations(&stream, options, &mut done)?;
    }
    for &ty in &options.formats {
        if options.products {
            products::format(&stream, options, ty, &mut done)?;
        }
        if options.experts {
            experts::format(&stream, options, ty, &mut done)?;
        }
    }
    if options.experts {
        experts::routes(&stream, target, &mut done)?;
    }
    if options.others {
        elementwise::rows(device, target, &mut done)?;
        turn::rows(&stream, target, &mut done)?;
        attention::rows(device, target, &mut done)?;
        prompts::rows(device, target, &mut done)?;
        let mut random = data::Random::new(options.seed);
        doorbell::round_trips(&stream, target, &mut random, &mut done)?;
        doorbell::no_answer(&stream, target, &mut done)?;
    }
    Ok(rows)
}

/// Has the driver compile what takes it long, side by side, and remember it. What fails is told when it is used.
fn compile(device: &Device, options: &Options) {
    let compute = options.target.compute(device);
    let parts = [(options.products, "product"), (options.experts, "experts")];
    let of_formats = parts.iter().filter(|(is_tested, _)| *is_tested);
    let of_formats = of_formats.flat_map(|(_, part)| {
        let name = move |ty: &TensorType| format!("{part}_{}", ty.name().to_ascii_lowercase());
        options.formats.iter().map(name)
    });
    let others = ptx::names().filter(|n| options.others && n.starts_with("attention"));
    std::thread::scope(|scope| {
        for name in of_formats.chain(others.map(str::to_owned)) {
            scope.spawn(move || Module::load_for(device, &name, compute).is_ok());
        }
    });
}

/// A row of all numbers of two lists.
fn row(kernel: &'static str, format: String, shapes: String, found: &[f32], wanted: &[f32]) -> Row {
    let mut row = Row::new(kernel, format, shapes);
    assert_eq!(found.len(), wanted.len(), "both have the same numbers");
    for (i, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        row.compare(*found, *wanted, || format!("number {i}"));
    }
    row
}

/// Seeded numbers between -2 and 2, some of them much larger or smaller.
fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        s = s
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (s >> 40) as f32 / (1 << 24) as f32
    };
    (0..n)
        .map(|_| {
            let x = next() * 4.0 - 2.0;
            match (next() * 64.0) as u32 {
                0 => x * 20.0,
                1 => x * 1e-3,
                2 => x * 1e-8,
                3 => -0.0,
                _ => x,
            }
        })
        .collect()
}
