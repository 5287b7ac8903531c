//! Bounds on what a file may claim, so that no number from it is trusted with an allocation or a loop.

/// Layers: the deepest published models have under 200.
pub(super) const LAYERS_MAX: u32 = 2048;
/// Model or feed-forward width: 53248 is the largest published (Llama 405B).
pub(super) const WIDTH_MAX: u32 = 1 << 20;
/// Heads of a layer.
pub(super) const HEADS_MAX: u32 = 4096;
/// Values a head: what a cell's scratch holds.
pub(super) const HEAD_MAX: u32 = 1024;
/// Trained context: beyond any model, and far below where positions lose exactness.
pub(super) const CONTEXT_MAX: u32 = 1 << 28;
