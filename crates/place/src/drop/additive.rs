//! The additive model: what is spilled is read on top of everything else.
//!
//! ```text
//! t_resident = (W_active + KV_resident) / vram_bw
//! x(tail)    = (c_engage + tail / bw_eff) / t_resident
//! T*         = max(0, (target * t_resident - c_engage) * bw_eff)
//! bw_eff     = min(link, host memory)
//! ```

use serde::Serialize;

use super::{amount, bytes, drop_of_slow_down, ms};

/// `--spill-max-mib` where nothing else is said, in this model alone: it guards attention variants with a known cliff.
pub const SPILL_MAX_MIB_ADDITIVE: u64 = 800;

/// Which of two rates binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Binding {
    /// The link between host and device.
    Link,
    /// Host memory.
    HostMemory,
}

/// The slower of link and host memory, and which it is.
pub fn bw_eff_gb_s(link_gb_s: f64, host_memory_gb_s: f64) -> (f64, Binding) {
    let (link, host) = (amount(link_gb_s), amount(host_memory_gb_s));
    if link <= host {
        (link, Binding::Link)
    } else {
        (host, Binding::HostMemory)
    }
}

/// Time of a token with everything on the device.
pub fn t_resident_ms(active_bytes: f64, kv_resident_bytes: f64, vram_gb_s: f64) -> f64 {
    ms(amount(active_bytes) + amount(kv_resident_bytes), vram_gb_s)
}

/// The machine and model as this model sees them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Additive {
    /// A token with everything on the device.
    pub t_resident_ms: f64,
    /// `c_engage`: attending in windows at all, a token.
    pub engage_ms: f64,
    /// The slower of link and host memory.
    pub bw_eff_gb_s: f64,
}

impl Additive {
    /// The slow-down of a tail; 0 without one, since nothing is attended in windows then.
    pub fn slow_down(&self, tail_bytes: f64) -> f64 {
        if amount(tail_bytes) == 0.0 {
            return 0.0;
        }
        (amount(self.engage_ms) + ms(tail_bytes, self.bw_eff_gb_s)) / amount(self.t_resident_ms)
    }

    /// The share of tokens a second that a tail costs.
    pub fn drop(&self, tail_bytes: f64) -> f64 {
        drop_of_slow_down(self.slow_down(tail_bytes))
    }

    /// `T*`: the largest tail whose slow-down is at most `target`, before `--spill-max-mib`.
    pub fn t_star_bytes(&self, target: f64) -> f64 {
        let allowed = amount(target) * amount(self.t_resident_ms);
        bytes(allowed - amount(self.engage_ms), self.bw_eff_gb_s)
    }
}
