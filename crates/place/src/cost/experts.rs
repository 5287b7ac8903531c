//! What serving experts takes, from the rates of a machine.

use super::{Costs, Place};
use crate::drop::{amount, ms};
use crate::experts::{self, Sides};
use crate::model::Model;

const MIB: f64 = (1 << 20) as f64;

impl Costs<'_> {
    /// What who computes an expert is decided by. A product of an expert takes what a token's takes, and for each token more what
    /// its multiply-adds take in a product of many.
    pub fn of_experts(&self, model: &Model) -> experts::Costs {
        let (c, m) = (&self.common, &self.machine);
        let (used, ff) = model
            .experts
            .map_or((1, 0), |experts| (experts.used, experts.ff));
        let of_token_mib = c.expert_bytes / MIB;
        let one_mib = of_token_mib / (used.max(1) as f64 * c.expert_layers);
        // Gate, up and down.
        let g_macs = 3.0 * model.width as f64 * ff as f64 / 1e9;
        let by_type = model.active.by_type.iter();
        let formats = by_type
            .filter(|(_, bytes)| bytes.one_expert > 0)
            .map(|(format, _)| format.as_str());
        let token = |gmac_s: f64| amount(g_macs / gmac_s * 1e3 / one_mib);
        experts::Costs {
            link_ms_mib: amount(ms(MIB, m.link_gb_s)),
            device_ms_mib: amount(c.expert_fast_ms / of_token_mib),
            device_ms_mib_token: token(m.fast.prefill_gmac_s(formats.clone())),
            host_ms_mib: amount(c.expert_host_ms / of_token_mib),
            host_ms_mib_token: token(m.host.prefill_gmac_s(formats)),
            sync_ms: amount(m.t_sync_ms),
            sides: match m.place {
                Place::Device => Sides::Beside,
                Place::Host | Place::VirtualDevice => Sides::Same,
            },
        }
    }
}
