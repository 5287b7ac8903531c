//! How many tokens of a prompt go through the layers at a time, where a tail is copied to a device for each chunk: with more of them it is copied less
//! often.

use super::{Plan, Request, decide_for_chunk};
use crate::cost::{Machine, Place};
use crate::drop::ms;
use crate::error::Error;
use crate::model::Model;
use crate::profile::Profile;

/// A larger chunk's work space takes room from cells: a token may take so much longer for it.
const TOKEN_MOST: f64 = 1.02;

/// The plan with chunks twice as long, and again, as long as copies of the tail at full context take longer than what a chunk computes, and its tokens
/// hardly suffer.
pub(super) fn grow(
    request: &Request,
    model: &Model,
    profile: &Profile,
    plan: Plan,
) -> Result<Plan, Error> {
    let token_ms = |plan: &Plan| {
        plan.predicted
            .last()
            .map_or(f64::INFINITY, |p| p.token.t_ms)
    };
    let most_ms = token_ms(&plan) * TOKEN_MOST;
    let mut best = plan;
    while best.n_ubatch < request.n_ubatch_max && waits_for_tail(&best, model, profile) {
        let n_ubatch = best.n_ubatch.saturating_mul(2).min(request.n_ubatch_max);
        let longer = Request {
            n_ubatch,
            ..*request
        };
        let plan = decide_for_chunk(&longer, model, profile)?;
        if !plan.fits || plan.tier() != best.tier() || token_ms(&plan) > most_ms {
            break;
        }
        best = plan;
    }
    Ok(best)
}

/// Whether copies of the tail take longer than the products of a chunk.
fn waits_for_tail(plan: &Plan, model: &Model, profile: &Profile) -> bool {
    if plan.memory.place != Place::Device || plan.layout.spill_bytes == 0 {
        return false;
    }
    let machine = Machine::new(profile, plan.memory.place, plan.threads);
    let formats = model.active.by_type.keys().map(String::as_str);
    // All weights have about as many bytes a value.
    let values = model.n_params as f64 / model.weights.total() as f64;
    let g_macs = model.active.bytes as f64 * values / 1e9;
    let chunk_ms = plan.n_ubatch as f64 * g_macs / machine.fast.prefill_gmac_s(formats) * 1e3;
    ms(plan.layout.spill_bytes as f64, machine.link_gb_s) > chunk_ms
}
