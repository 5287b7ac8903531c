//! Products as a session computes them, in the shapes of a model: of one token those of one input together, their input quantised before;
//! of many tokens with the quantisation.

use std::time::Duration;

use gguf::TensorType;
use quant::act::Passes;
use quant::product::act_block;

use super::{START, Timer, pattern};
use crate::acts::{Acts, Quantiser, Shape};
use crate::device::Device;
use crate::error::Error;
use crate::graph::Graph;
use crate::kernel::Start;
use crate::memory::Buffer;
use crate::product::{Output, Product, TOGETHER_MAX, Target};
use crate::weights::Weights;

/// Products of one input.
#[derive(Debug, Clone)]
pub struct Fork {
    /// Values of the input.
    pub k: usize,
    /// Rows of each matrix.
    pub rows: Vec<usize>,
    /// How often the input is passed.
    pub passes: Passes,
}

/// The products of one format.
#[derive(Debug)]
pub struct Products {
    timer: Timer,
    decode: Graph,
    decode_bytes: usize,
    prefill: Graph,
    prefill_macs: f64,
    // What the graphs read and write.
    _operands: Operands,
}

#[derive(Debug)]
struct Operands {
    product: Product,
    quantiser: Quantiser,
    x: Buffer<f32>,
    /// The input of a prompt's products.
    acts: Acts,
    /// Inputs of one token, quantised: one for every length and number of passes.
    inputs: Vec<Acts>,
    /// Outputs of products that are done together, and a prompt's.
    ys: Vec<Buffer<f32>>,
    y: Buffer<f32>,
    /// Each fork's matrices.
    weights: Vec<Vec<Weights>>,
}

impl Products {
    /// Of all `forks` one after the other, again and again over new weights until `bytes_min` of them have passed; and of `tokens` tokens with
    /// the largest matrix.
    ///
    /// # Errors
    /// If the format has no kernels, a shape cannot be, there is no fork, or memory is refused.
    pub fn new(
        device: &Device,
        ty: TensorType,
        forks: &[Fork],
        bytes_min: usize,
        tokens: usize,
    ) -> Result<Self, Error> {
        let timer = Timer::new(device)?;
        let stream = &timer.stream;
        let matrix_bytes = |k: usize, n: usize| n * (k / ty.block_len()) * ty.block_bytes();
        let all = || forks.iter().flat_map(|f| f.rows.iter().map(|&n| (f.k, n)));
        let missing = Error::Length {
            op: "measuring products",
            what: "number of matrices",
            found: 0,
            wanted: 1,
        };
        let (k, n) = all()
            .max_by_key(|&(k, n)| matrix_bytes(k, n))
            .ok_or(missing)?;
        let k_max = forks.iter().map(|f| f.k).max().unwrap_or(k);
        let n_max = all().map(|(_, n)| n).max().unwrap_or(n);
        let bytes: usize = all().map(|(k, n)| matrix_bytes(k, n)).sum();
        let bytes_of_all = pattern(matrix_bytes(k, n));
        let mut weights = Vec::new();
        for _ in 0..bytes_min.div_ceil(bytes.max(1)).max(1) {
            for fork in forks {
                let mut of_fork = Vec::with_capacity(fork.rows.len());
                for &n in &fork.rows {
                    let mut matrix = Weights::new(device, ty, n, fork.k)?;
                    matrix.upload_tiles(stream, 0, &bytes_of_all[..matrix_bytes(fork.k, n)])?;
                    of_fork.push(matrix);
                }
                weights.push(of_fork);
            }
        }
        let x: Vec<f32> = (0..tokens.max(1) * k_max)
            .map(|i| ((i * 7919 % 2001) as f32 - 1000.0) / 1000.0)
            .collect();
        let mut o = Operands {
            product: Product::new(device, ty, Target::Best)?,
            quantiser: Quantiser::new(device)?,
            x: Buffer::from_slice(stream, &x)?,
            acts: Acts::new(stream, tokens.max(1), k_max)?,
            inputs: Vec::new(),
            ys: (0..TOGETHER_MAX)
                .map(|_| Buffer::zeroed(stream, n_max))
                .collect::<Result<_, _>>()?,
            y: Buffer::zeroed(stream, tokens.max(1) * n_max)?,
            weights,
        };
        // A session quantises in the operation before, so that it is no part of a product's time.
        if let Some(block) = act_block(ty) {
            for fork in forks {
                let shape = Shape {
                    tokens: 1,
                    k: fork.k,
                    block,
                    passes: fork.passes,
                };
                if o.inputs.iter().all(|acts| acts.shape() != shape) {
                    let mut acts = Acts::new(stream, 1, fork.k)?;
                    o.quantiser
                        .quantise(stream, Start::After, &o.x, shape, &mut acts)?;
                    o.inputs.push(acts);
                }
            }
        }
        stream.synchronise()?;
        let at = |i: usize| &forks[i % forks.len()];
        let decode = stream.capture(|| {
            (0..o.weights.len()).try_for_each(|i| o.decode(&timer, i, at(i).k, at(i).passes))
        })?;
        let of_fork = |i: &usize| matrix_bytes(at(*i).k, at(*i).rows.iter().sum());
        // Inputs that are passed once are what a prompt's tokens go through.
        let once = (0..forks.len()).filter(|&i| at(i).passes == Passes::One);
        let largest = once.max_by_key(of_fork).unwrap_or(0);
        let prefill = stream.capture(|| o.prefill(&timer, ty, largest, tokens, at(largest).k))?;
        let rows: usize = at(largest).rows.iter().sum();
        Ok(Self {
            decode,
            decode_bytes: bytes * (o.weights.len() / forks.len()),
            prefill,
            prefill_macs: (rows * at(largest).k) as f64 * tokens as f64,
            _operands: o,
            timer,
        })
    }

    /// GB/s of weights that one token passes.
    pub fn decode_gb_s(&mut self, time: Duration) -> Result<f64, Error> {
        let seconds = self.timer.seconds_a_replay(&mut self.decode, time)?;
        Ok(self.decode_bytes as f64 / seconds / 1e9)
    }

    /// GMAC/s of products of many tokens.
    pub fn prefill_gmac_s(&mut self, time: Duration) -> Result<f64, Error> {
        let seconds = self.timer.seconds_a_replay(&mut self.prefill, time)?;
        Ok(self.prefill_macs / seconds / 1e9)
    }
}

impl Operands {
    /// Gives one fork of one token to the stream, as many matrices together as can be.
    fn decode(&mut self, timer: &Timer, i: usize, k: usize, passes: Passes) -> Result<(), Error> {
        let stream = &timer.stream;
        let wanted = |acts: &&Acts| (acts.shape().k, acts.shape().passes) == (k, passes);
        let Some(acts) = self.inputs.iter().find(wanted) else {
            return self.weights[i].iter().try_for_each(|w| {
                let y = &mut self.y;
                self.product.float(stream, START, w, &self.x, 1, y)
            });
        };
        for weights in self.weights[i].chunks(TOGETHER_MAX) {
            let ys = self.ys.iter_mut().zip(weights);
            let mut outputs: Vec<Output<'_>> =
                ys.map(|(y, w)| Output { w, bias: None, y }).collect();
            self.product.together(stream, START, acts, &mut outputs)?;
        }
        Ok(())
    }

    /// Gives one fork of many tokens to the stream.
    fn prefill(
        &mut self,
        timer: &Timer,
        ty: TensorType,
        i: usize,
        tokens: usize,
        k: usize,
    ) -> Result<(), Error> {
        let (stream, start) = (&timer.stream, Start::After);
        let Some(block) = act_block(ty) else {
            return self.weights[i].iter().try_for_each(|w| {
                let y = &mut self.y;
                self.product.float(stream, start, w, &self.x, tokens, y)
            });
        };
        let shape = Shape {
            tokens,
            k,
            block,
            passes: Passes::One,
        };
        let acts = &mut self.acts;
        self.quantiser
            .quantise(stream, start, &self.x, shape, acts)?;
        self.weights[i].iter().try_for_each(|w| {
            let y = &mut self.y;
            self.product.quantised(stream, start, w, &self.acts, y)
        })
    }
}
