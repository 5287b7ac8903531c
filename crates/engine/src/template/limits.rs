//! Limits on what a template may cost, each with its reason.

/// Bytes of a template. The longest real ones, with tools, have some 30 kB.
pub const TEMPLATE_BYTES_MAX: usize = 1 << 20;

/// Work that any template may do, in the template engine's unit: an instruction, or 64 bytes of text made. It bounds the
/// memory as well (32 MB).
pub const FUEL_BASE: u64 = 500_000;

/// Work more for each byte of messages and tools. Real templates need about a tenth.
pub const FUEL_PER_BYTE: u64 = 2;

/// Depth of macros and loops within each other.
pub const DEPTH_MAX: usize = 100;

/// Characters of a template's line that are shown in a message.
pub const SHOWN_CHARS_MAX: usize = 120;
