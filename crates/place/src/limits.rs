//! Bounds on what a header may claim, with the reason for each number.
//!
//! All other numbers of a header meet checked arithmetic only: they are multiplied, and neither looped over nor allocated.

/// Layers. The deepest published models have under 200; a layer costs a record here, so this also bounds memory.
pub const LAYERS_MAX: u64 = 4096;

/// Tensors that a description may list: the bound that the file format's reader has.
pub const TENSORS_MAX: usize = 1 << 18;
