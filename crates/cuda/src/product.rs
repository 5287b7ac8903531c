//! Products with weights in every format (`kernels/product*.cu`): `y[T, N] = x[T, K] . W[N, K]`, as `quant::product` defines them.
//!
//! A format's kernels are a module of their own, so that a model compiles only what it uses.

use gguf::TensorType;
use quant::formats::{self, Class};
use quant::product::{CHUNK, act_block};

use crate::acts::Acts;
use crate::device::Device;
use crate::error::{Error, length};
use crate::kernel::{Arg, Kernel, Launch, Module, Start};
use crate::memory::Buffer;
use crate::stream::Stream;
use crate::weights::Weights;

/// Columns that the kernels for few take.
pub const FEW_MAX: usize = 16;

/// Tokens that the float kernel for few takes.
const FLOAT_FEW_MAX: usize = 4;

/// Shared memory that every device gives a thread block without being asked.
const SHARED_BYTES_UNASKED: usize = 48 << 10;

/// The products of one format.
#[derive(Debug)]
pub struct Product {
    ty: TensorType,
    kernels: Kernels,
    decode: Kernel,
    many: Many,
    shared_bytes_max: usize,
}

#[derive(Debug)]
enum Kernels {
    Quantised {
        one: Kernel,
        few: Kernel,
        more: Kernel,
        many: Kernel,
    },
    Float {
        one: Kernel,
        few: Kernel,
        many: Kernel,
    },
}

/// How the kernel for many columns cuts its work: `struct Gemm` in `product.cuh`.
#[derive(Debug, Clone, Copy)]
struct Many {
    rows: usize,
    columns: usize,
    shared_bytes: usize,
}

/// Which compiled kernels are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The best for the device.
    Best,
    /// Those that every supported device runs.
    Portable,
}

impl Product {
    /// Loads the kernels of a format.
    pub fn new(device: &Device, ty: TensorType, target: Target) -> Result<Self, Error> {
        let class = formats::class(ty).ok_or(Error::Format {
            op: "product",
            format: ty.name(),
        })?;
        let compute = match target {
            Target::Best => device.properties().compute,
            Target::Portable => crate::device::COMPUTE_MIN,
        };
        let name = ty.name().to_ascii_lowercase();
        if class == Class::Float {
            let module = Module::load_for(device, "product_float", compute)?;
            let kernel = |kind: &str| module.kernel(&format!("{kind}_{name}"));
            return Ok(Self {
                ty,
                kernels: Kernels::Float {
                    one: kernel("gemv_1")?,
                    few: kernel("gemv_4")?,
                    many: kernel("gemm")?,
                },
                decode: kernel("decode")?,
                many: Many {
                    rows: 64,
                    columns: 64,
                    shared_bytes: 0,
                },
                shared_bytes_max: SHARED_BYTES_UNASKED,
            });
        }
        let module = Module::load_for(device, &format!("product_{name}"), compute)?;
        let (one, few, more) = (
            module.kernel("gemv_1")?,
            module.kernel("gemv_8")?,
            module.kernel("gemv_16")?,
        );
        let shared_bytes_max = device.properties().shared_bytes_block_max;
        for kernel in [&one, &few, &more] {
            kernel.allow_shared(shared_bytes_max)?;
        }
        let many = module.kernel("gemm_many")?;
        let shape = Many::of(ty, compute);
        many.allow_shared(shape.shared_bytes)?;
        Ok(Self {
            ty,
            kernels: Kernels::Quantised {
                one,
                few,
                more,
                many,
            },
            decode: module.kernel("decode")?,
            many: shape,
            shared_bytes_max,
        })
    }

    /// The format.
    pub fn ty(&self) -> TensorType {
        self.ty
    }

    /// `y[T, N]` of quantised activations.
    pub fn quantised(
        &self,
        stream: &Stream,
        start: Start,
        w: &Weights,
        acts: &Acts,
        y: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        const OP: &str = "product";
        let Kernels::Quantised {
            one,
            few,
            more,
            many,
        } = &self.kernels
        else {
            return Err(Error::Format {
                op: "product of quantised activations",
                format: self.ty.name(),
            });
        };
        self.check(OP, w)?;
        let shape = acts.shape();
        length(OP, "K of the activations", shape.k, w.k())?;
        length(
            OP,
            "block of the activations",
            shape.block,
            act_block(self.ty).unwrap_or(0),
        )?;
        length(OP, "values of y", y.len(), shape.tokens * w.n())?;
        let columns = shape.columns();
        if columns == 0 || w.n() == 0 {
            return Ok(());
        }
        let mut args = vec![
            Arg::from(w.data()),
            (&acts.q).into(),
            (&acts.meta).into(),
            (&acts.d).into(),
            (&acts.s16).into(),
            y.into(),
            (w.n() as i32).into(),
            (w.k() as i32).into(),
            (columns as i32).into(),
            (shape.passes.count() as i32).into(),
        ];
        if columns > FEW_MAX {
            let Many {
                rows,
                columns: wide,
                shared_bytes,
            } = self.many;
            let grid = [
                w.n().div_ceil(rows) as u32,
                columns.div_ceil(wide) as u32,
                1,
            ];
            let launch = Launch::grid(grid, [256, 1, 1])
                .shared(shared_bytes)
                .start(start);
            // SAFETY: the arguments are those of `gemm_many`; the lengths of all buffers were checked, and both operands have the
            // slack behind them that the kernel may read.
            return unsafe { many.launch(stream, launch, &args) };
        }
        let kernel = match columns {
            1 => one,
            2..=8 => few,
            _ => more,
        };
        let few = Few::of(self.ty, w.tiles(), w.k(), columns, self.shared_bytes_max);
        args.push((few.tiles_per_block as i32).into());
        let launch = Launch::new(w.tiles().div_ceil(few.tiles_per_block), few.warps * 32)
            .shared(few.shared_bytes)
            .start(start);
        // SAFETY: the arguments are those of `gemv_*`; the lengths of all buffers were checked.
        unsafe { kernel.launch(stream, launch, &args) }
    }

    /// `y[T, N]` of `tokens` rows of `x` and float weights.
    pub fn float(
        &self,
        stream: &Stream,
        start: Start,
        w: &Weights,
        x: &Buffer<f32>,
        tokens: usize,
        y: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        const OP: &str = "product";
        let Kernels::Float { one, few, many } = &self.kernels else {
            return Err(Error::Format {
                op: "product of float activations",
                format: self.ty.name(),
            });
        };
        self.check(OP, w)?;
        length(
            OP,
            "values of x over its length",
            (tokens * w.k()).saturating_sub(x.len()),
            0,
        )?;
        length(OP, "values of y", y.len(), tokens * w.n())?;
        if tokens == 0 || w.n() == 0 {
            return Ok(());
        }
        let mut args = vec![
            Arg::from(w.data()),
            x.into(),
            y.into(),
            (w.n() as i32).into(),
            (w.k() as i32).into(),
            (tokens as i32).into(),
        ];
        if tokens > FLOAT_FEW_MAX {
            let grid = [
                w.n().div_ceil(self.many.rows) as u32,
                tokens.div_ceil(self.many.columns) as u32,
                1,
            ];
            let launch = Launch::grid(grid, [256, 1, 1]).start(start);
            // SAFETY: the arguments are those of `gemm_*`; the lengths of all buffers were checked.
            return unsafe { many.launch(stream, launch, &args) };
        }
        let chunks = w.k().div_ceil(CHUNK);
        let tiles_per_block = (16 / chunks.max(1)).clamp(1, w.tiles());
        let slots = tiles_per_block * chunks;
        args.push((tiles_per_block as i32).into());
        let threads = (slots * 8).next_multiple_of(32).clamp(32, 256);
        let launch = Launch::new(w.tiles().div_ceil(tiles_per_block), threads)
            .shared(slots * tokens * 64)
            .start(start);
        length(
            OP,
            "bytes of partial sums over the limit",
            (slots * tokens * 64).saturating_sub(self.shared_bytes_max),
            0,
        )?;
        let kernel = if tokens == 1 { one } else { few };
        // SAFETY: the arguments are those of `gemv_*`; the lengths of all buffers were checked.
        unsafe { kernel.launch(stream, launch, &args) }
    }

    /// `y[T, K]`: rows `ids[T]` of the weights, decoded. An id that is not a row gives NaN.
    pub fn decode_rows(
        &self,
        stream: &Stream,
        start: Start,
        w: &Weights,
        ids: &Buffer<i32>,
        y: &mut Buffer<f32>,
    ) -> Result<(), Error> {
        const OP: &str = "rows";
        self.check(OP, w)?;
        length(OP, "values of y", y.len(), ids.len() * w.k())?;
        if ids.is_empty() || w.k() == 0 {
            return Ok(());
        }
        let threads = match self.kernels {
            Kernels::Quantised { .. } => w.k() / 8,
            Kernels::Float { .. } => w.k(),
        };
        let args = [
            Arg::from(w.data()),
            ids.into(),
            y.into(),
            (w.n() as i32).into(),
            (w.k() as i32).into(),
        ];
        let grid = [threads.div_ceil(128) as u32, ids.len() as u32, 1];
        let launch = Launch::grid(grid, [128, 1, 1]).start(start);
        // SAFETY: the arguments are those of `decode`; the lengths were checked, and the kernel checks the ids.
        unsafe { self.decode.launch(stream, launch, &args) }
    }

    /// Registers a thread and bytes of spills of each kernel, for reports.
    pub fn resources(&self) -> Result<Vec<(&'static str, usize, usize)>, Error> {
        let all: Vec<(&'static str, &Kernel)> = match &self.kernels {
            Kernels::Quantised {
                one,
                few,
                more,
                many,
            } => vec![("1", one), ("8", few), ("16", more), ("many", many)],
            Kernels::Float { one, few, many } => vec![("1", one), ("4", few), ("many", many)],
        };
        all.into_iter()
            .map(|(name, kernel)| Ok((name, kernel.registers()?, kernel.spilled_bytes()?)))
            .collect()
    }

    fn check(&self, op: &'static str, w: &Weights) -> Result<(), Error> {
        if w.ty() == self.ty {
            Ok(())
        } else {
            Err(Error::Format {
                op,
                format: w.ty().name(),
            })
        }
    }
}

/// How the kernels for few columns cut their work: `struct Piece` in `product.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Few {
    tiles_per_block: usize,
    warps: usize,
    shared_bytes: usize,
}

impl Few {
    /// Warps of a thread block at most.
    const WARPS_MAX: usize = 16;

    fn of(ty: TensorType, tiles: usize, k: usize, columns: usize, shared_bytes_max: usize) -> Self {
        let piece = 256 / ty.block_len() * ty.block_bytes() * 16;
        let ring = piece * if piece > 3000 { 2 } else { 3 };
        let chunks = k.div_ceil(CHUNK).max(1);
        // A thread block has eight chunks or more, if there are that many.
        let tiles_per_block = 8usize.div_ceil(chunks).clamp(1, tiles.max(1));
        let slots = tiles_per_block * chunks;
        let partial = slots * columns * 64;
        let room = shared_bytes_max.saturating_sub(partial) / ring;
        let warps_max = Self::WARPS_MAX.min(room).max(1);
        // Every warp gets as many chunks as the others, but for the last round.
        let warps = slots.div_ceil(slots.div_ceil(warps_max));
        Self {
            tiles_per_block,
            warps,
            shared_bytes: warps * ring + partial,
        }
    }
}

impl Many {
    fn of(ty: TensorType, compute: (u32, u32)) -> Self {
        let (fm, fn_) = if compute >= (9, 0) { (5, 4) } else { (2, 2) };
        let (tiles, groups) = (2 * fm, 4 * fn_);
        let (len, block) = (ty.block_len(), ty.block_bytes() * 16);
        let (ks, stages) = if len == 256 { (256, 2) } else { (64, 4) };
        let blocks = ks / len;
        let a = tiles * blocks * block;
        let b = groups * ks / 32 * 256;
        let d = if len == 256 {
            groups * 32
        } else {
            groups * blocks * 64
        };
        let sums = if len == 256 && meets_sums(ty) {
            groups * 256
        } else {
            0
        };
        let totals = 256 * fm * fn_ * 16;
        Self {
            rows: 16 * tiles,
            columns: 8 * groups,
            shared_bytes: stages * (a + b + d + sums) + totals + a / 16 * 4,
        }
    }
}

/// Whether a format of class `Block256` has minima or a bias, which meet sums of activations.
fn meets_sums(ty: TensorType) -> bool {
    use TensorType as T;
    matches!(ty, T::Q2_K | T::Q3_K | T::Q4_K | T::Q5_K | T::Q6_K)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shared memory of a block on devices of 9.0, and on the least of those from 8.0 on (8.6, 8.9).
    const SHARED_BYTES: [((u32, u32), usize); 2] = [((9, 0), 232_448), ((8, 0), 101_376)];

    #[test]
    fn every_format_fits_shared_memory() {
        for &ty in formats::supported() {
            if formats::class(ty) == Some(Class::Float) {
                continue;
            }
            for (compute, max) in SHARED_BYTES {
                let many = Many::of(ty, compute);
                assert!(many.shared_bytes <= max, "{}: {many:?}", ty.name());
                for k in [256, 512, 2048, 5120, 13824, 28672] {
                    for columns in 1..=FEW_MAX {
                        let few = Few::of(ty, 320, k, columns, max);
                        assert!(
                            few.shared_bytes <= max,
                            "{} {k} {columns}: {few:?}",
                            ty.name()
                        );
                        assert!(few.warps > 0 && few.warps <= Few::WARPS_MAX);
                    }
                }
            }
        }
    }
}
