//! How many tokens of a prompt go through the layers at a time on a device: what lies in host memory is copied to it for each chunk, so with more of
//! them less often, and products of many tokens are faster, too.

use super::{Plan, Request, decide_for_chunk};
use crate::cost::{Machine, Place};
use crate::drop::ms;
use crate::error::Error;
use crate::model::Model;
use crate::profile::Profile;

/// A larger chunk's work space takes room from cells and experts: a token may take so much longer for it, where copies are saved.
const TOKEN_MOST: f64 = 1.02;

/// Chunks that products are fast with, if nothing else suffers. An H200 takes prompts of 2048 tokens 8 % faster by as many than by 512, a shape of 14B in Q8_0.
const CHUNK_OF_ONE: u64 = 2048;

/// The plan with chunks twice as long, and again: as long as copies at full context take longer than what a chunk computes, and its tokens
/// hardly suffer, or as long as all else stays as it is.
pub(super) fn grow(
    request: &Request,
    model: &Model,
    profile: &Profile,
    plan: Plan,
) -> Result<Plan, Error> {
    let most_ms = token_ms(&plan) * TOKEN_MOST;
    let mut best = plan;
    while best.memory.place == Place::Device
        && best.n_ubatch < request.n_ubatch_max.min(request.n_ctx)
    {
        let n_ubatch = best.n_ubatch.saturating_mul(2).min(request.n_ubatch_max);
        let waits = waits_for_copies(&best, model, profile);
        // Sequences that are answered wait for each other's chunks.
        if !waits && (n_ubatch > CHUNK_OF_ONE || request.n_seq > 1) {
            break;
        }
        let longer = Request {
            n_ubatch,
            ..*request
        };
        let plan = decide_for_chunk(&longer, model, profile)?;
        let is_as_good = if waits {
            token_ms(&plan) <= most_ms
        } else {
            token_ms(&plan) <= token_ms(&best) && outside(&plan) <= outside(&best)
        };
        if !plan.fits || plan.tier() != best.tier() || !is_as_good {
            break;
        }
        best = plan;
    }
    Ok(best)
}

fn token_ms(plan: &Plan) -> f64 {
    let full = plan.predicted.last();
    full.map_or(f64::INFINITY, |p| p.token.t_ms)
}

/// Bytes in host memory that a chunk of many tokens needs on the device: cells, and weights but for the embedding.
fn outside(plan: &Plan) -> u64 {
    let layout = &plan.layout;
    // If some experts are in host memory all are, those in slots, too.
    let twice = match layout.expert_staging_bytes {
        0 => 0,
        _ => layout.expert_cache_bytes,
    };
    let elsewhere = layout.embedding_host_bytes.saturating_add(twice);
    layout.host_bytes.saturating_sub(elsewhere)
}

/// Whether copies of what is outside take longer than the products of a chunk.
fn waits_for_copies(plan: &Plan, model: &Model, profile: &Profile) -> bool {
    let machine = Machine::new(profile, plan.memory.place, plan.threads);
    let formats = model.active.by_type.keys().map(String::as_str);
    // All weights have about as many bytes a value.
    let values = model.n_params as f64 / model.weights.total() as f64;
    let g_macs = model.active.bytes as f64 * values / 1e9;
    let chunk_ms = plan.n_ubatch as f64 * g_macs / machine.fast.prefill_gmac_s(formats) * 1e3;
    ms(outside(plan) as f64, machine.link_gb_s) > chunk_ms
}
