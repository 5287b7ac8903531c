//! Bounds on what a header may claim, with the reason for each number.
//!
//! All other numbers of a header meet checked arithmetic only: they are multiplied, and neither looped over nor allocated.

/// Layers. The deepest published models have under 200; a layer costs a record here, so this also bounds memory.
pub const LAYERS_MAX: u64 = 4096;

/// Tensors that a description may list: the bound that the file format's reader has.
pub const TENSORS_MAX: usize = 1 << 18;

/// Bytes of a profile's text. A measured one has about 20 KB.
pub const PROFILE_TEXT_BYTES_MAX: usize = 1 << 20;

/// Entries of each list of a profile: formats times instruction sets stay under 100.
pub const PROFILE_LIST_MAX: usize = 256;

/// Figures of a profile that are to be doubted: it has no more than six for each entry of its lists.
pub const PROFILE_DOUBTS_MAX: usize = 2048;

/// Memory of a machine or device in a profile; leaves room for sums in 64 bits.
pub const MEMORY_BYTES_MAX: u64 = 1 << 50;

/// Heads, and values of a head, in a profile.
pub const HEADS_MAX: u64 = 1 << 16;

/// Left free on a device beside what a plan counts: kernels (2 MiB on an H200 for all that a model uses), streams, recorded work, work
/// buffers in whole pages (up to 30 MiB), and what other processes take meanwhile. The context is not in it: what is free is asked after
/// it was made.
pub const DEVICE_RESERVE_BYTES: u64 = 128 << 20;

/// The largest context that a plan looks for when it says what fits: beyond any trained length.
pub const CTX_SEARCH_MAX: u64 = 1 << 26;

/// Bytes of a recording of windows: a million lines, twenty thousand runs of a model with 48 layers.
pub const WINDOWS_TEXT_BYTES_MAX: usize = 128 << 20;

/// Experts of a layer: published models have up to 512, and routers take no more than this.
pub const EXPERTS_MAX: u32 = 1024;

/// Records of a recording of routing: ten thousand steps of a model with a hundred layers.
pub const ROUTED_LINES_MAX: usize = 1 << 20;
