//! Who computes the experts that are not on the device: by cost, the same for a token and for a chunk of a prompt.
//!
//! All experts of a layer have the same bytes, so streaming one costs as much as streaming another, while the CPU is slower the more tokens
//! use one. Whatever number of experts the CPU takes, those with the fewest tokens are therefore the best ones, and the best number is found
//! by trying all of them:
//!
//! ```text
//! device   resident + streamed(n - k)          streamed: the slower of copies and products, which overlap
//! CPU      sync + sum of the k cheapest experts
//! time     the longer of both, or their sum where the same cores do both
//! ```

use serde::{Deserialize, Serialize};

/// Whether device and CPU work at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sides {
    /// They do: the slower one counts.
    Beside,
    /// The same cores play both.
    Same,
}

/// What serving one expert takes, in milliseconds, as it was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// Copying a MiB to the device.
    pub link_ms_mib: f64,
    /// The device's products, a MiB of weights at a few tokens.
    pub device_ms_mib: f64,
    /// The same for each token more.
    pub device_ms_mib_token: f64,
    /// The CPU's products, a MiB of weights at a few tokens: memory's bandwidth.
    pub host_ms_mib: f64,
    /// The same for each token more.
    pub host_ms_mib_token: f64,
    /// Handing a layer's work to the CPU and back.
    pub sync_ms: f64,
    /// Whether the two sides work at the same time.
    pub sides: Sides,
}

impl Costs {
    /// For tests, and where nothing is known: a CPU that is about as fast as the link.
    pub const UNKNOWN: Self = Self {
        link_ms_mib: 0.05,
        device_ms_mib: 0.001,
        device_ms_mib_token: 0.0,
        host_ms_mib: 0.05,
        host_ms_mib_token: 0.005,
        sync_ms: 0.01,
        sides: Sides::Beside,
    };

    /// The CPU's time for an expert of `mib` that `tokens` tokens use.
    pub fn host_ms(&self, mib: f64, tokens: u32) -> f64 {
        mib * (self.host_ms_mib + self.host_ms_mib_token * more(tokens))
    }

    /// The device's time for such an expert, once it is there.
    pub fn device_ms(&self, mib: f64, tokens: u32) -> f64 {
        mib * (self.device_ms_mib + self.device_ms_mib_token * more(tokens))
    }

    /// Copying such an expert.
    pub fn stream_ms(&self, mib: f64) -> f64 {
        mib * self.link_ms_mib
    }
}

/// Tokens that a processor does not get for nothing beside the first.
fn more(tokens: u32) -> f64 {
    f64::from(tokens.saturating_sub(1))
}

/// How many of the missing experts the CPU takes. `missing` are their tokens, fewest first; `resident_ms` what the device does
/// beside them. `factors` are what device and CPU really take of what `costs` say.
pub fn by_cost(
    costs: &Costs,
    factors: (f64, f64),
    blob_bytes: u64,
    missing: &[u32],
    resident_ms: f64,
) -> usize {
    let mib = blob_bytes as f64 / f64::from(1 << 20);
    let (of_device, of_host) = factors;
    let stream = of_device * costs.stream_ms(mib);
    let mut device_ms: f64 = missing
        .iter()
        .map(|&n| of_device * costs.device_ms(mib, n))
        .sum();
    let mut host_ms = 0.0;
    let time = |k: usize, device_ms: f64, host_ms: f64| {
        let copies = stream * (missing.len() - k) as f64;
        let host = if k > 0 { host_ms + costs.sync_ms } else { 0.0 };
        match costs.sides {
            Sides::Beside => (resident_ms + device_ms).max(copies).max(host),
            Sides::Same => resident_ms + device_ms + copies + host,
        }
    };
    let mut best = (time(0, device_ms, 0.0), 0);
    for (i, &n) in missing.iter().enumerate() {
        device_ms -= of_device * costs.device_ms(mib, n);
        host_ms += of_host * costs.host_ms(mib, n);
        let t = time(i + 1, device_ms, host_ms);
        // Of equal times the one with less work for the CPU.
        if t < best.0 {
            best = (t, i + 1);
        }
    }
    best.1
}

/// The same as a share of the missing ones that was asked for.
pub fn by_share(share: f64, missing: usize) -> usize {
    // As integers are made of floats: NaN is 0.
    ((share * missing as f64).round() as usize).min(missing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn costs(link: f64, host: f64, token: f64, sync: f64) -> Costs {
        Costs {
            link_ms_mib: link,
            device_ms_mib: 0.0,
            device_ms_mib_token: 0.0,
            host_ms_mib: host,
            host_ms_mib_token: token,
            sync_ms: sync,
            sides: Sides::Beside,
        }
    }

    #[test]
    fn both_sides_end_together() {
        // The CPU is as fast as the link: half.
        assert_eq!(
            by_cost(&costs(1.0, 1.0, 0.0, 0.0), (1.0, 1.0), MIB, &[1; 10], 0.0),
            5
        );
        // 3 times as slow: a quarter, as g / (c + g) says.
        assert_eq!(
            by_cost(&costs(1.0, 3.0, 0.0, 0.0), (1.0, 1.0), MIB, &[1; 8], 0.0),
            2
        );
        // What was measured counts, not what was thought.
        assert_eq!(
            by_cost(&costs(1.0, 1.0, 0.0, 0.0), (1.0, 3.0), MIB, &[1; 8], 0.0),
            2
        );
    }

    #[test]
    fn nothing_for_the_cpu_is_one_of_the_answers() {
        // Handing over takes longer than copying.
        assert_eq!(
            by_cost(&costs(1.0, 0.1, 0.0, 5.0), (1.0, 1.0), MIB, &[1; 4], 0.0),
            0
        );
        // Many tokens an expert.
        assert_eq!(
            by_cost(&costs(1.0, 1.0, 1.0, 0.0), (1.0, 1.0), MIB, &[64; 8], 0.0),
            0
        );
        // The device is busy with resident ones anyway, and copies run beside that.
        assert_eq!(
            by_cost(&costs(1.0, 1.0, 0.0, 0.0), (1.0, 1.0), MIB, &[1; 8], 20.0),
            0
        );
        assert_eq!(
            by_cost(&costs(1.0, 1.0, 0.0, 0.0), (1.0, 1.0), MIB, &[], 0.0),
            0
        );
    }

    #[test]
    fn the_same_cores_are_not_helped_by_copies() {
        let same = Costs {
            sides: Sides::Same,
            device_ms_mib: 1.0,
            ..costs(0.2, 1.0, 0.0, 0.0)
        };
        assert_eq!(by_cost(&same, (1.0, 1.0), MIB, &[1, 1, 5], 0.0), 3);
        // Unless the CPU where it lies is so much slower than over device memory.
        let slow = Costs {
            host_ms_mib: 3.0,
            ..same
        };
        assert_eq!(by_cost(&slow, (1.0, 1.0), MIB, &[1, 1, 5], 0.0), 0);
    }

    #[test]
    fn a_share_is_a_part_of_the_missing_ones() {
        let of_10 = [0.0, 0.3, 0.7, 1.0, f64::NAN, 7.0].map(|share| by_share(share, 10));
        assert_eq!(of_10, [0, 3, 7, 10, 0, 10]);
    }

    proptest! {
        /// No other set of experts for the CPU is faster.
        #[test]
        fn no_set_is_faster(
            mut tokens in prop::collection::vec(1_u32..40, 0..9),
            link in 0.01..2.0f64, host in 0.01..2.0f64, token in 0.0..0.2f64, sync in 0.0..1.0f64,
        ) {
            tokens.sort_unstable();
            let costs = costs(link, host, token, sync);
            let time = |set: u32| {
                let is_host = |i: usize| set >> i & 1 == 1;
                let host: f64 = (0..tokens.len())
                    .filter(|&i| is_host(i))
                    .map(|i| costs.host_ms(1.0, tokens[i]))
                    .sum();
                let copies = link * (0..tokens.len()).filter(|&i| !is_host(i)).count() as f64;
                copies.max(if set > 0 { host + sync } else { 0.0 })
            };
            let k = by_cost(&costs, (1.0, 1.0), MIB, &tokens, 0.0);
            let best = (0..1_u32 << tokens.len()).map(time).fold(f64::INFINITY, f64::min);
            prop_assert!(time((1 << k) - 1) <= best + 1e-9);
        }
    }
}
