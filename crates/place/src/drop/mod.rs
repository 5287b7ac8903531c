//! What leaving part of the KV cache in host memory costs, and how much of it costs next to nothing.
//!
//! Two figures, never mixed: the slow-down `x = dt / t_resident`, and the drop of tokens a second, `x / (1 + x)`. Only the
//! drop is shown. The [additive](Additive) model applies its target to the slow-down, as it was published; the
//! [overlapped](Overlapped) one applies it to the drop.
//!
//! All functions take any number: a rate that is no rate moves nothing, a time that is no time never ends.

mod additive;
mod overlapped;
#[cfg(test)]
mod tests;

pub use additive::{Additive, Binding, SPILL_MAX_MIB_ADDITIVE, bw_eff_gb_s, t_resident_ms};
pub use overlapped::{Overlapped, Split};

/// The share of tokens a second that is lost to a slow-down `x`.
pub fn drop_of_slow_down(x: f64) -> f64 {
    if x.is_infinite() && x > 0.0 {
        return 1.0;
    }
    x / (1.0 + x)
}

/// Bytes that a rate moves in a time.
const BYTES_MS: f64 = 1e6;

/// Milliseconds for `bytes` at `gb_s`; nothing takes no time, and without a rate it never ends.
pub(crate) fn ms(bytes: f64, gb_s: f64) -> f64 {
    if bytes.is_nan() || bytes <= 0.0 {
        0.0
    } else {
        bytes / (rate(gb_s) * BYTES_MS)
    }
}

/// Bytes in `ms` at `gb_s`, none in a time that is none.
fn bytes(ms: f64, gb_s: f64) -> f64 {
    let (ms, gb_s) = (amount(ms), rate(gb_s));
    if ms == 0.0 || gb_s == 0.0 {
        0.0
    } else {
        ms * gb_s * BYTES_MS
    }
}

/// A rate; what is none moves nothing.
fn rate(gb_s: f64) -> f64 {
    amount(gb_s)
}

/// A number from 0 to infinity; NaN and what is negative are 0.
pub(crate) fn amount(x: f64) -> f64 {
    // `max` takes the other number beside NaN.
    x.max(0.0)
}

/// A part from 0 to 1; NaN is 0.
pub(crate) fn part(x: f64) -> f64 {
    amount(x).min(1.0)
}
