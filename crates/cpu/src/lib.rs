//! Host compute: matrix products, attention partials, element-wise operations, and the worker pool.
//!
//! Every operation here has one scalar definition (in `quant` for products, in plain generic code here for the rest) and
//! gives the same bits on every instruction set, with any number of threads and any number of tokens at a time.
//!
//! | module | what it is |
//! |---|---|
//! | [`isa`] | which instruction sets there are, proofs of them |
//! | [`pool`] | fork and join in a microsecond |
//! | [`acts`] | activations as 8-bit blocks, laid out for the kernels |
//! | [`product`] | weights times activations |
//! | [`mixture`] | mixtures of experts: routing, grouped products, weighted sums |
//! | [`attention`] | partial attention over blocks of cells, and their merge |
//! | [`ops`] | norms, rope, gated activations, additions |
//! | [`mem`] | aligned buffers |

pub mod acts;
mod amx;
pub mod attention;
pub mod isa;
mod math;
pub mod mem;
pub mod mixture;
pub mod ops;
pub mod pool;
pub mod product;
mod simd;

pub use isa::Isa;
pub use pool::Pool;
