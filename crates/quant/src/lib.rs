//! Block formats of weights, the one memory layout that all kernels share, 8-bit activation blocks, and the scalar
//! definition of every product over them.
//!
//! | module | what it is |
//! |---|---|
//! | [`formats`] | the formats as files store them: unpack, decode, encode |
//! | [`tile`] | the layout of weights in memory: 16 rows interleaved |
//! | [`lanes`] | from a tile's block to integers in lanes, for vector kernels |
//! | [`act`] | activations as 8-bit blocks |
//! | [`product`] | the definition of a product |

#![forbid(unsafe_code)]

pub mod act;
pub mod formats;
pub mod lanes;
pub mod product;
pub mod tile;
