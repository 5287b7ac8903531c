//! Bytes of random tensors, by seed, name and place.
//!
//! A matrix's values have mean 0 and standard deviation 1 / sqrt(K), K values a row, so that a product keeps the size of its input; that
//! of the output has three times as much, which spreads logits as trained models do, and the embedding's is 4. Codes of blocks are random bits as they come;
//! factors are set to what gives that deviation, with a random sign where the format's codes are not even about zero, or an offset that
//! makes them so. Norms and rope's factors are 1.
//!
//! **Skew.** With `--router-skew S` row `e` of a layer's router is multiplied with `(1 + rank(e)) ^ -S`, where `rank` shuffles the layer's
//! experts. Scores of experts then spread differently, and those of low rank are more often among the largest: with S = 0 all experts are used
//! alike, with a large S only twice as many as a token uses.

use super::SynthError;
use super::random::{fill, named, part, word};
use gguf::{TensorInfo, TensorType};
use half::{bf16, f16};
use quant::formats::{self, Class};
use std::collections::BTreeMap;

/// What makes one set of weights differ from another.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Recipe {
    /// Seed.
    pub seed: u64,
    /// How unevenly a mixture's experts are used.
    pub router_skew: f32,
}

/// What the output matrix has beyond 1 / sqrt(K): standard deviation of logits.
const LOGITS: f32 = 3.0;

/// Standard deviation of the embedding's values: what layers add to a token is small beside it, so that tokens stay different from each other, and so do the
/// experts that they choose. (128 tokens of OLMoE's shape use all 64 experts of every layer; with 1 they use 48 on average, with 1 / sqrt(K) 27.)
const EMBEDDING: f32 = 4.0;

/// Standard deviation of biases: small beside what they are added to.
const BIAS: f32 = 0.02;

/// Blocks that a format's deviation is measured over.
const MEASURED_BLOCKS: usize = 1024;

/// Makes tensors' bytes.
#[derive(Debug)]
pub struct Generator {
    recipe: Recipe,
    /// The tensor that makes logits.
    output: &'static str,
    /// Standard deviation of values of blocks with a factor of 1, for each block format.
    units: BTreeMap<u32, f32>,
}

/// What a tensor is for, as far as its values depend on it.
enum Role {
    /// All are this.
    Constant(f32),
    /// Deviation of all values.
    Random(f32),
    /// Deviation of a router's, before the skew.
    Router(f32),
}

impl Generator {
    /// For a model of these tensors.
    ///
    /// # Errors
    /// If a tensor has a type whose blocks cannot be made, or the skew is no positive number.
    pub fn new(recipe: Recipe, tensors: &[TensorInfo]) -> Result<Self, SynthError> {
        if !(recipe.router_skew >= 0.0 && recipe.router_skew.is_finite()) {
            return Err(SynthError::Skew(recipe.router_skew));
        }
        let mut units = BTreeMap::new();
        for tensor in tensors {
            let ty = tensor.ty;
            match formats::class(ty) {
                None => return Err(SynthError::ty(ty.name())),
                Some(Class::Float) => {}
                Some(_) => {
                    units.entry(ty.id()).or_insert_with(|| unit(ty));
                }
            }
        }
        let has_output = tensors.iter().any(|t| t.name == "output.weight");
        Ok(Self {
            recipe,
            output: if has_output {
                "output.weight"
            } else {
                "token_embd.weight"
            },
            units,
        })
    }

    /// Fills `out` with a tensor's bytes from `offset` on. Both are whole blocks.
    ///
    /// # Panics
    /// If they are not, or the tensor is not one of the model's.
    pub fn fill(&self, t: &TensorInfo, offset: u64, out: &mut [u8]) {
        let block = t.ty.block_bytes();
        assert!(
            offset.is_multiple_of(block as u64) && out.len().is_multiple_of(block),
            "{}: whole blocks",
            t.name
        );
        let key = named(self.recipe.seed, &t.name);
        match self.role(t) {
            Role::Constant(value) => put_floats(t.ty, out, |_| value),
            Role::Random(deviation) => match formats::class(t.ty) {
                Some(Class::Float) => {
                    let first = offset / block as u64;
                    put_floats(t.ty, out, |i| uniform(key, first + i) * deviation);
                }
                _ => self.put_blocks(t.ty, key, deviation, offset, out),
            },
            Role::Router(deviation) => {
                let width = t.row_len();
                let first = offset / block as u64;
                let mut row = None;
                put_floats(t.ty, out, |i| {
                    let at = first + i;
                    let (expert, factor) = match row {
                        Some((expert, factor)) if expert == at / width => (expert, factor),
                        _ => (at / width, self.skew(key, at / width, t.n_rows())),
                    };
                    row = Some((expert, factor));
                    uniform(key, at) * deviation * factor
                });
            }
        }
    }

    fn role(&self, t: &TensorInfo) -> Role {
        let name = t.name.as_str();
        let each = 1.0 / (t.row_len() as f32).sqrt();
        if t.dims.rank() > 1 {
            let is_float = formats::class(t.ty) == Some(Class::Float);
            return if name == self.output {
                Role::Random(LOGITS * each)
            } else if name == "token_embd.weight" {
                Role::Random(EMBEDDING)
            } else if name.ends_with("ffn_gate_inp.weight") && is_float {
                Role::Router(each)
            } else if name.ends_with(".bias") {
                Role::Random(BIAS)
            } else {
                Role::Random(each)
            };
        }
        if name.ends_with("norm.weight") || name == "rope_freqs.weight" {
            Role::Constant(1.0)
        } else if name.ends_with("attn_sinks.weight") {
            Role::Random(1.0)
        } else {
            Role::Random(BIAS)
        }
    }

    /// What an expert's row of a router is multiplied with.
    fn skew(&self, key: u64, expert: u64, experts: u64) -> f32 {
        if self.recipe.router_skew == 0.0 {
            return 1.0;
        }
        // An expert's rank is how many have a smaller random number than it has.
        let number = |e: u64| (word(part(key, 1), e), e);
        let own = number(expert);
        let rank = (0..experts).filter(|&e| number(e) < own).count();
        libm::powf(1.0 + rank as f32, -self.recipe.router_skew)
    }

    fn put_blocks(&self, ty: TensorType, key: u64, deviation: f32, offset: u64, out: &mut [u8]) {
        let factor = deviation / self.units[&ty.id()];
        // Few enough bytes that they are still in the first-level cache when factors are put over them.
        let stretch = ty.block_bytes() * (16 << 10 >> 8);
        let mut at = offset;
        for out in out.chunks_mut(stretch) {
            fill(key, at, out);
            put_factors(ty, factor, key, at, out);
            at += out.len() as u64;
        }
    }
}

/// Number `i` of a key, even over an interval about 0 with standard deviation 1.
fn uniform(key: u64, i: u64) -> f32 {
    // Halves of words, so that neighbours share one: 31 bits and a sign.
    let word = word(key, i / 2);
    let half = if i.is_multiple_of(2) {
        word as u32
    } else {
        (word >> 32) as u32
    };
    let sqrt_3 = 1.732_050_8;
    (half as i32 as f32) * (sqrt_3 / 2_147_483_648.0)
}

fn put_floats(ty: TensorType, out: &mut [u8], mut value: impl FnMut(u64) -> f32) {
    let bytes = ty.block_bytes();
    for (i, out) in (0..).zip(out.chunks_exact_mut(bytes)) {
        let x = value(i);
        match ty {
            TensorType::F16 => out.copy_from_slice(&f16::from_f32(x).to_le_bytes()),
            TensorType::BF16 => out.copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
            _ => out.copy_from_slice(&x.to_le_bytes()),
        }
    }
}

/// The standard deviation of a format's random blocks with a factor of 1.
fn unit(ty: TensorType) -> f32 {
    let (key, len) = (0, ty.block_len());
    let mut bytes = vec![0; MEASURED_BLOCKS * ty.block_bytes()];
    fill(key, 0, &mut bytes);
    put_factors(ty, 1.0, key, 0, &mut bytes);
    let mut values = vec![0.0; MEASURED_BLOCKS * len];
    formats::decode_row(ty, &bytes, &mut values).expect("whole blocks of a supported format");
    let squares: f64 = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    (squares / values.len() as f64).sqrt() as f32
}

/// Puts factors over random blocks, of which the first is at `offset`: see `quant::formats` for where they are.
fn put_factors(ty: TensorType, factor: f32, key: u64, offset: u64, out: &mut [u8]) {
    use TensorType as T;
    let blocks = out.chunks_exact_mut(ty.block_bytes());
    let half = |x: f32| f16::from_f32(x).to_bits();
    match ty {
        T::MXFP4 => put_powers(factor, key, offset, out),
        // Codes count from 0: an offset puts their mean at 0.
        T::Q4_1 | T::Q5_1 => {
            let middle = if ty == T::Q4_1 { 7.5 } else { 15.5 };
            let (d, m) = (half(factor), half(-middle * factor));
            for block in blocks {
                put_half(block, 0, d);
                put_half(block, 2, m);
            }
        }
        T::Q2_K => {
            let (d, dmin) = (half(factor), half(1.5 * factor));
            for block in blocks {
                for byte in &mut block[..16] {
                    // A scale of 8 to 15, and the same as minimum.
                    let scale = 8 | *byte & 7;
                    *byte = scale | scale << 4;
                }
                put_half(block, 80, d);
                put_half(block, 82, dmin);
            }
        }
        T::Q4_K | T::Q5_K => {
            let middle = if ty == T::Q4_K { 7.5 } else { 15.5 };
            let (d, dmin) = (half(factor), half(middle * factor));
            for block in blocks {
                for i in 4..8 {
                    // Scales of 32 to 63, and the same as minima: their fifth bits, here and in what goes on top of the later ones.
                    let scales = block[i] | 0xa0;
                    (block[i], block[i + 4]) = (scales, scales);
                }
                for byte in &mut block[12..16] {
                    let scale = *byte & 15;
                    *byte = scale | scale << 4;
                }
                put_half(block, 0, d);
                put_half(block, 2, dmin);
            }
        }
        _ => {
            // Codes whose mean is not quite 0, or is: a sign for each block makes it so.
            let at = match ty {
                T::Q3_K => 108,
                T::Q6_K => 208,
                _ => 0,
            };
            let d = half(factor);
            for block in blocks {
                let sign = u16::from(block[at + 1] & 0x80) << 8;
                put_half(block, at, d | sign);
            }
        }
    }
}

fn put_half(block: &mut [u8], at: usize, bits: u16) {
    block[at..at + 2].copy_from_slice(&bits.to_le_bytes());
}

/// Factors that are powers of two: of the two next to what is wanted, each as often as gives its square on average.
fn put_powers(factor: f32, key: u64, offset: u64, out: &mut [u8]) {
    const BYTES: usize = TensorType::MXFP4.block_bytes();
    // Byte 127 is 1.
    let (mut exponent, mut power) = (127_u8, 1.0_f32);
    while power > factor && exponent > 1 {
        (exponent, power) = (exponent - 1, power / 2.0);
    }
    while 2.0 * power <= factor && exponent < 253 {
        (exponent, power) = (exponent + 1, power * 2.0);
    }
    // factor^2 = (1 - p) power^2 + p (2 power)^2
    let ratio = factor / power;
    let larger = ((ratio * ratio - 1.0) / 3.0 * 65536.0) as u64;
    let first = offset / BYTES as u64;
    for (i, block) in (first..).zip(out.chunks_exact_mut(BYTES)) {
        let is_larger = word(part(key, 2), i) & 0xffff < larger;
        block[0] = exponent + u8::from(is_larger);
    }
}
