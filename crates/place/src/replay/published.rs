//! What was published of another engine's gate, and what generated cases are made like.

use serde::Serialize;

/// A machine and a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Published {
    /// How experts got to the device, or what else was special.
    pub machine: &'static str,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// How much of the effect measured there was left.
    pub scale: f64,
    /// Time with the share in every layer, over time without.
    pub every: f64,
    /// With their gate.
    pub gate: f64,
    /// The worst of its runs, where it was told.
    pub worst: Option<f64>,
}

const fn case(
    (machine, tokens): (&'static str, u32),
    scale: f64,
    (every, gate): (f64, f64),
    worst: Option<f64>,
) -> Published {
    Published {
        machine,
        tokens,
        scale,
        every,
        gate,
        worst,
    }
}

/// The cases.
pub const PUBLISHED: [Published; 14] = [
    case(("DMA", 250), 1.0, (0.814, 0.822), None),
    case(("DMA", 600), 1.0, (0.821, 0.821), None),
    case(("DMA", 900), 1.0, (0.885, 0.883), None),
    case(("host copy", 900), 1.0, (0.807, 0.815), None),
    case(("one core", 250), 1.0, (1.184, 1.024), None),
    case(("one core", 600), 1.0, (1.151, 1.032), None),
    case(("one core", 900), 1.0, (1.201, 1.033), None),
    case(("DMA", 250), 0.3, (0.944, 0.948), None),
    case(("DMA", 600), 0.3, (0.946, 0.959), None),
    case(("DMA", 900), 0.3, (0.966, 0.970), Some(0.995)),
    case(("host copy", 900), 0.3, (0.942, 0.961), Some(0.996)),
    case(("one core", 250), 0.3, (1.055, 1.013), None),
    case(("one core", 600), 0.3, (1.045, 1.010), None),
    case(("one core", 900), 0.3, (1.060, 1.016), Some(1.048)),
];
