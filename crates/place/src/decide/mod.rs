//! From a request, a model and a machine to a plan: the tier, what goes where, and why.
//!
//! The ladder is walked from the least compressing tier, and the first one is taken whose KV has room in the budget, or is
//! over it by at most `T*`. Where several placements of a tier come into question (KV spilled, weights spilled, some of both),
//! they are compared in predicted milliseconds at several live depths.

mod chunk;
mod context;
mod memory;
mod plan;
mod request;
mod split;

pub use memory::Memory;
pub use plan::{Candidate, CurvePoint, Kind, Layout, Part, Plan, Predicted, Rates, TierPlan};
pub use request::{ExpertCache, Prefer, Request, Spill, SpillWeights};

use context::Kv;
use memory::Needs;
use split::{Given, Judge, Order};

use crate::bytes::{BLOCK_CELLS, kv_bytes};
use crate::cost::{Costs, Machine, Place, Placement, SpillModel, TierCost, Token, drop_between};
use crate::drop::{SPILL_MAX_MIB_ADDITIVE, amount, bw_eff_gb_s, part};
use crate::error::Error;
use crate::model::Model;
use crate::profile::Profile;
use crate::tier::{self, Tier};

/// Live depths that plans are compared at, beside the full context.
const DEPTHS: [u64; 3] = [2048, 8192, 32768];

/// Points of a tier's curve.
const CURVE_POINTS: u64 = 33;

const MIB: u64 = 1 << 20;

/// Whether a decision needs a machine's profile: not if all weights and the least compressed tier allowed have room, since
/// then nothing is decided. Asking for speed always is a decision, unless V is pinned.
///
/// # Errors
/// If the request cannot be met by any machine.
pub fn needs_profile(request: &Request, model: &Model, memory: &Memory) -> Result<bool, Error> {
    let tiers = tier::allowed(model, request.type_k, request.type_v)?;
    let needs = Needs::new(model, request, memory, tiers[0], request.n_ctx)?;
    let decides_speed = request.prefer == Prefer::Speed && tiers.len() > 1;
    Ok(decides_speed || !all_fits(request, memory, &needs))
}

fn all_fits(request: &Request, memory: &Memory, needs: &Needs) -> bool {
    split::window_blocks(request, needs) == needs.kv.full_blocks
        && needs.resident() <= memory.fast_bytes
        && needs.embedding_host <= memory.host_bytes
        // A smaller cache that was asked for is a decision to keep experts outside.
        && request.expert_cache.is_none_or(|cache| cache.bytes(needs.experts) >= needs.experts)
}

/// Makes a plan. It is a plan also if nothing fits: then [`Plan::fits`] is false, and it says what would.
///
/// # Errors
/// If the request itself cannot be met by any machine: a pinned type that does not fit the model's heads, a context of 0, or
/// one whose bytes are beyond 64 bits.
pub fn decide(request: &Request, model: &Model, profile: &Profile) -> Result<Plan, Error> {
    let plan = decide_for_chunk(request, model, profile)?;
    chunk::grow(request, model, profile, plan)
}

/// The same with chunks of just so many tokens.
fn decide_for_chunk(request: &Request, model: &Model, profile: &Profile) -> Result<Plan, Error> {
    let tiers = tier::allowed(model, request.type_k, request.type_v)?;
    let memory = Memory::of_profile(request, profile);
    let threads = request.threads.unwrap_or(profile.key.threads).max(1);
    let machine = Machine::new(profile, memory.place, threads);
    let costs = costs(request, model, machine);
    let planner = Planner {
        request,
        model,
        memory,
        costs: &costs,
        depths: depths(request.n_ctx),
    };
    let mut plans = Vec::new();
    for &tier in &tiers {
        plans.push(planner.tier(tier)?);
    }
    planner.choose(profile, threads, &tiers, plans)
}

/// What tokens cost of a request's model on a machine.
fn costs<'a>(request: &Request, model: &Model, machine: Machine<'a>) -> Costs<'a> {
    Costs::new(model, machine, request.spill_model, request.kv_share)
        .with_experts(request.expert_share, request.expert_hits)
}

fn depths(n_ctx: u64) -> Vec<u64> {
    let mut depths: Vec<u64> = DEPTHS.into_iter().filter(|&d| d < n_ctx).collect();
    depths.push(n_ctx);
    depths
}

struct Planner<'a> {
    request: &'a Request,
    model: &'a Model,
    memory: Memory,
    costs: &'a Costs<'a>,
    depths: Vec<u64>,
}

/// A tier with what its plan is made from.
struct Considered {
    plan: TierPlan,
    needs: Needs,
    cost: TierCost,
}

impl Planner<'_> {
    fn tier(&self, tier: Tier) -> Result<Considered, Error> {
        let request = self.request;
        let needs = Needs::new(self.model, request, &self.memory, tier, request.n_ctx)?;
        let cost = self.costs.tier(self.model, tier);
        let t_star = self.t_star(&cost);
        let over = self.over(&needs);
        let mut candidates = self.candidates(&needs, &cost, t_star, over);
        // Those that fit and are within the target first, then the fastest; the order of making breaks ties.
        candidates.sort_by(|a, b| {
            let key = |c: &Candidate| (!c.fits, !c.within_target);
            key(a).cmp(&key(b)).then(a.mean_ms.total_cmp(&b.mean_ms))
        });
        let best = candidates.first().filter(|c| c.fits);
        let full = best.and_then(|c| c.predicted.last());
        let max = |kv| context::max_ctx(self.model, request, &self.memory, tier, kv);
        let plan = TierPlan {
            type_k: tier.type_k,
            type_v: tier.type_v,
            kv_bytes: needs.kv_bytes,
            kv_alloc_bytes: needs.kv.total,
            over_bytes: over,
            spill_bytes: best.map_or(over.min(needs.kv.full), |c| c.spill_bytes),
            t_star_bytes: t_star,
            tok_s: full.map_or(0.0, |p| p.tok_s),
            drop: best.map_or(1.0, |c| c.drop),
            fits: best.is_some(),
            within_target: best.is_some_and(|c| c.within_target),
            max_ctx: max(Kv::Resident),
            max_ctx_spilled: max(Kv::Spilled),
            curve: self.curve(&needs, &cost),
            candidates,
        };
        Ok(Considered { plan, needs, cost })
    }

    /// The largest spill that is within the target, with `--spill` and `--spill-max-mib` applied.
    fn t_star(&self, cost: &TierCost) -> u64 {
        let request = self.request;
        let model = self
            .costs
            .t_star_bytes(cost, request.n_ctx, request.spill_drop);
        match request.spill {
            Spill::Off => 0,
            Spill::Mib(mib) => mib.saturating_mul(MIB),
            Spill::Auto => {
                let default = match request.spill_model {
                    SpillModel::Additive => Some(SPILL_MAX_MIB_ADDITIVE),
                    SpillModel::Overlapped => None,
                };
                let most = request.spill_max_mib.or(default);
                let most = most.map_or(u64::MAX, |mib| mib.saturating_mul(MIB));
                // As integers are made of floats: NaN is 0, what is too large the largest.
                (model as u64).min(most)
            }
        }
    }

    /// KV beyond what fast memory holds beside all weights and, since then something is streamed, the staging slots.
    fn over(&self, needs: &Needs) -> u64 {
        let window = split::window_blocks(self.request, needs);
        let outside = (needs.kv.full_blocks - window).saturating_mul(needs.kv.full_slab);
        if needs.resident() <= self.memory.fast_bytes {
            return outside;
        }
        let over = needs
            .resident()
            .saturating_add(needs.staging)
            .saturating_sub(self.memory.fast_bytes);
        over.max(outside).min(needs.kv.full)
    }

    fn candidates(&self, needs: &Needs, cost: &TierCost, t_star: u64, over: u64) -> Vec<Candidate> {
        let judge = Judge {
            costs: self.costs,
            tier: cost,
            depths: &self.depths,
        };
        let split =
            |needs: &Needs, order| split::split(self.request, &self.memory, needs, order, &judge);
        // What all is measured against: the same machine and weights, and KV that takes no room.
        let mut no_kv = *needs;
        no_kv.kv.full = 0;
        no_kv.kv.full_slab = 0;
        let baseline = split(&no_kv, Order::Worth).map(|given| {
            let placement = Placement {
                window_cells: u64::MAX,
                ..given.placement(&no_kv)
            };
            let n_ctx = self.request.n_ctx;
            self.costs.token(cost, &placement, n_ctx).t_ms
        });
        let mut candidates: Vec<Candidate> = Vec::new();
        for order in [Order::WeightsFirst, Order::KvFirst, Order::Worth] {
            let Some(given) = split(needs, order) else {
                continue;
            };
            let candidate = self.candidate(needs, &judge, order, &given, baseline, t_star, over);
            let same = |c: &Candidate| c.placement == candidate.placement;
            if !candidates.iter().any(same) {
                candidates.push(candidate);
            }
        }
        candidates
    }

    #[allow(clippy::too_many_arguments, reason = "all of one comparison")]
    fn candidate(
        &self,
        needs: &Needs,
        judge: &Judge<'_>,
        order: Order,
        given: &Given,
        baseline_ms: Option<f64>,
        t_star: u64,
        over: u64,
    ) -> Candidate {
        let placement = given.placement(needs);
        let predicted: Vec<Predicted> = self
            .depths
            .iter()
            .map(|&depth| {
                let token = self.costs.token(judge.tier, &placement, depth);
                Predicted {
                    depth,
                    tok_s: token.tok_s(),
                    token,
                }
            })
            .collect();
        let full_ms = predicted.last().map_or(f64::INFINITY, |p| p.token.t_ms);
        let drop = baseline_ms.map_or(1.0, |base| drop_between(base, full_ms));
        let spill_bytes = given.tail_bytes(needs);
        let kind = if given.all(needs) {
            Kind::Resident
        } else {
            match order {
                Order::WeightsFirst => Kind::KvSpilled,
                Order::KvFirst => Kind::WeightsSpilled,
                Order::Worth => Kind::Balanced,
            }
        };
        let within_target = if given.all(needs) {
            true
        } else if given.all_weights(needs) {
            over <= t_star
        } else {
            // Whole weights are not what `--spill MiB` is about.
            drop <= part(self.request.spill_drop)
        };
        let host_bytes = given.host_bytes(needs);
        Candidate {
            kind,
            placement,
            spill_bytes,
            fast_bytes: needs.fixed().saturating_add(given.bytes(needs)),
            host_bytes,
            fits: host_bytes <= self.memory.host_bytes,
            within_target,
            drop,
            mean_ms: judge.mean_ms(&placement),
            predicted,
        }
    }

    /// Tokens a second against spill at full context, with all weights in fast memory.
    fn curve(&self, needs: &Needs, cost: &TierCost) -> Vec<CurvePoint> {
        let blocks = needs.kv.full_blocks;
        if needs.kv.full_slab == 0 || self.memory.place == Place::Host {
            return Vec::new();
        }
        let points = CURVE_POINTS.min(blocks + 1);
        let point = |i: u64| {
            let spilled = (u128::from(blocks) * u128::from(i) / u128::from(points - 1)) as u64;
            let placement = Placement {
                dense_host_bytes: 0,
                expert_cache_bytes: u64::MAX,
                window_cells: (blocks - spilled).saturating_mul(BLOCK_CELLS),
                staging_bytes: u64::MAX,
            };
            let token = self.costs.token(cost, &placement, self.request.n_ctx);
            CurvePoint {
                spill_bytes: spilled.saturating_mul(needs.kv.full_slab),
                tok_s: token.tok_s(),
            }
        };
        (0..points).map(point).collect()
    }

    fn choose(
        &self,
        profile: &Profile,
        threads: u32,
        allowed: &[Tier],
        tiers: Vec<Considered>,
    ) -> Result<Plan, Error> {
        let (at, reason) = match self.request.prefer {
            Prefer::Quality => self.choose_quality(&tiers),
            Prefer::Speed => self.choose_speed(&tiers),
        };
        let fits = at.is_some();
        // Nothing fits: the tier with most room is what the figures are of.
        let at = at.unwrap_or(tiers.len() - 1);
        let Considered {
            plan: chosen,
            needs,
            cost,
        } = &tiers[at];
        let best = chosen.best().cloned();
        let hints = if fits {
            Vec::new()
        } else {
            context::hints(self.model, self.request, &self.memory, allowed)
        };
        let machine = self.costs.machine();
        let (bw_eff, binds) = bw_eff_gb_s(machine.link_gb_s, machine.host_read_gb_s);
        let predicted = best.as_ref().map_or_else(Vec::new, |c| c.predicted.clone());
        let full = predicted.last().map(|p| p.token);
        let cpu_share = full.map_or(0.0, |t| {
            let tail = t.streamed_bytes + t.cpu_bytes;
            match machine.place {
                _ if tail <= 0.0 => 0.0,
                // Of whole groups of blocks, which the rest of the tail does not make.
                Place::VirtualDevice => self.request.kv_share.map_or(1.0, part),
                Place::Device | Place::Host => t.cpu_bytes / tail,
            }
        });
        let beside = [needs.fixed(), needs.dense, needs.experts];
        let beside = beside.into_iter().fold(0, u64::saturating_add);
        let model = self.model;
        Ok(Plan {
            model: model.name.clone().unwrap_or_else(|| model.arch.clone()),
            profile: profile.name.clone(),
            profile_source: profile.source.label(),
            n_ctx: self.request.n_ctx,
            n_ctx_train: model.n_ctx_train,
            n_seq: self.request.n_seq,
            n_ubatch: self.request.n_ubatch,
            weight_bytes: model.weights.total(),
            expert_bytes: model.weights.expert_bytes(),
            active_bytes_per_token: model.active.bytes,
            kv_bytes: kv_bytes(
                model,
                &memory::cache(self.request, chosen.tier(), self.request.n_ctx),
            )?
            .total,
            kv_alloc_bytes: needs.kv.total,
            recurrent_bytes: needs.recurrent,
            work_bytes: needs.work,
            memory: self.memory,
            kv_budget_bytes: self.memory.fast_bytes.saturating_sub(beside),
            t_star_bytes: chosen.t_star_bytes,
            spill_drop: self.request.spill_drop,
            spill: self.request.spill,
            spill_model: self.request.spill_model,
            prefer: self.request.prefer,
            rates: Rates {
                link_gb_s: machine.link_gb_s,
                host_read_gb_s: machine.host_read_gb_s,
                bw_eff_gb_s: bw_eff,
                binds,
                fast_read_gb_s: machine.fast.read_gb_s(),
                cpu_attention_gb_s: cost.cpu_attention_gb_s(),
            },
            choice: chosen.tier().to_string(),
            type_k: chosen.type_k,
            type_v: chosen.type_v,
            reason,
            fits,
            hints,
            layout: best.as_ref().map_or_else(Layout::default, |c| {
                let hits = self.costs.expert_hits(c.placement.expert_cache_bytes);
                layout(needs, c, hits)
            }),
            expert_use_known: self.request.expert_hits.is_some(),
            predicted,
            threads,
            cpu_share,
            max_ctx: chosen.max_ctx,
            max_ctx_spilled: chosen.max_ctx_spilled,
            assumptions: model.assumptions.clone(),
            tiers: tiers.into_iter().map(|t| t.plan).collect(),
        })
    }

    fn choose_quality(&self, tiers: &[Considered]) -> (Option<usize>, String) {
        let first = &tiers[0];
        if all_fits(self.request, &self.memory, &first.needs) {
            let what = first.plan.tier();
            return (
                Some(0),
                format!("{what} and all weights fit: nothing to decide"),
            );
        }
        if let Some(at) = tiers
            .iter()
            .position(|t| t.plan.fits && t.plan.within_target)
        {
            let above = match at {
                0 => String::new(),
                _ => self.why_not(&tiers[at - 1].plan),
            };
            return (Some(at), format!("{}{above}", self.why(&tiers[at])));
        }
        // The lowest tier that fits, spilled as far as it must be.
        match tiers.iter().rposition(|t| t.plan.fits) {
            Some(at) => {
                let Considered { plan, needs, .. } = &tiers[at];
                let outside = plan.best().map_or_else(String::new, |c| outside(needs, c));
                let reason = format!(
                    "no tier is within the target of {:.0} % at {} cells: {}, the lowest, with {outside} in host memory",
                    part(self.request.spill_drop) * 100.0,
                    self.request.n_ctx,
                    plan.tier(),
                );
                (Some(at), reason)
            }
            None => (None, self.why_nothing(tiers)),
        }
    }

    fn choose_speed(&self, tiers: &[Considered]) -> (Option<usize>, String) {
        let floor = self.request.min_tier;
        let fitting = |t: &&(usize, &Considered)| t.1.plan.fits;
        let mean = |t: &Considered| t.plan.best().map_or(f64::INFINITY, |c| c.mean_ms);
        let all: Vec<(usize, &Considered)> = tiers.iter().enumerate().collect();
        let above: Vec<_> = all
            .iter()
            .filter(|(_, t)| !t.plan.tier().is_below(floor))
            .filter(fitting)
            .collect();
        // What is pinned below the floor is kept, and a plan below it is better than none.
        let (from, note) = if above.is_empty() {
            let below = all.iter().filter(fitting).collect();
            (
                below,
                format!(", though below {floor}, as nothing else fits"),
            )
        } else {
            (above, String::new())
        };
        let best = from
            .into_iter()
            .min_by(|a, b| mean(a.1).total_cmp(&mean(b.1)));
        match best {
            Some((at, t)) => {
                let reason = format!(
                    "{} is the fastest, {:.2} ms a token on average over the depths{note}",
                    t.plan.tier(),
                    mean(t),
                );
                (Some(*at), reason)
            }
            None => (None, self.why_nothing(tiers)),
        }
    }

    fn why(&self, tier: &Considered) -> String {
        let plan = &tier.plan;
        let name = plan.tier();
        let Some(c) = plan.best() else {
            return format!("{name} does not fit");
        };
        if c.kind == Kind::Resident {
            return format!("{name} fits whole");
        }
        let outside = outside(&tier.needs, c);
        let weights_resident = c.placement.dense_host_bytes == 0
            && c.placement.expert_cache_bytes >= tier.needs.experts;
        if weights_resident {
            return format!(
                "{name} fits with {outside} in host memory, within the target (T* {} MiB)",
                mib(plan.t_star_bytes),
            );
        }
        format!(
            "{name} fits with {outside} in host memory, where KV costs {:.1} % of the tokens a second (target {:.0} %)",
            c.drop * 100.0,
            part(self.request.spill_drop) * 100.0,
        )
    }

    fn why_not(&self, plan: &TierPlan) -> String {
        let tier = plan.tier();
        if !plan.fits {
            return format!("; {tier} does not fit");
        }
        let drop = plan.candidates.iter().filter(|c| c.fits).map(|c| c.drop);
        format!(
            "; {tier} would spill {} MiB against a T* of {} MiB, and cost at best {:.1} % (target {:.0} %)",
            mib(plan.over_bytes),
            mib(plan.t_star_bytes),
            drop.fold(f64::INFINITY, f64::min) * 100.0,
            part(self.request.spill_drop) * 100.0,
        )
    }

    fn why_nothing(&self, tiers: &[Considered]) -> String {
        let Considered { needs, plan, .. } = &tiers[tiers.len() - 1];
        let window = split::window_blocks(self.request, needs);
        let outside = (needs.kv.full_blocks - window).saturating_mul(needs.kv.full_slab);
        let allowed = match self.request.spill {
            Spill::Off => 0,
            Spill::Auto => u64::MAX,
            Spill::Mib(mib) => mib.saturating_mul(MIB),
        };
        if outside > allowed {
            return format!(
                "a window of {} cells leaves {} MiB of KV outside with {}, {} may be there",
                window * BLOCK_CELLS,
                mib(outside),
                plan.tier(),
                mib(allowed),
            );
        }
        // What must be in fast memory whatever is spilled.
        let weights = match self.request.spill_weights {
            SpillWeights::Experts => needs.dense.saturating_add(needs.expert_staging),
            SpillWeights::None | SpillWeights::All => needs.dense.saturating_add(needs.experts),
        };
        let least = needs
            .fixed()
            .saturating_add(weights)
            .saturating_add(needs.staging)
            .saturating_add(needs.blocks_min.saturating_mul(needs.kv.full_slab));
        let on_device = self.memory.place != Place::Host;
        if on_device
            && self.request.spill_weights != SpillWeights::All
            && least > self.memory.fast_bytes
        {
            return format!(
                "weights ({} MiB), work space and staging ({} MiB) and {} blocks of KV ({} MiB) need {} MiB of device memory with {}, {} available",
                mib(weights),
                mib(needs.fixed() + needs.staging),
                needs.blocks_min,
                mib(needs.blocks_min.saturating_mul(needs.kv.full_slab)),
                mib(least),
                plan.tier(),
                self.memory.fast_bytes / MIB,
            );
        }
        let needed = needs.resident().saturating_add(needs.embedding_host);
        // Where nothing may be spilled host memory is no help.
        let is_alone = on_device && self.request.spill == Spill::Off;
        let host = if is_alone { 0 } else { self.memory.host_bytes };
        let available = self.memory.fast_bytes.saturating_add(host);
        let is_large = needed >= 10 << 30;
        let unit = if is_large { "GiB" } else { "MiB" };
        let amount = |bytes: u64, whole: u64| match is_large {
            true => format!("{:.1}", bytes as f64 / (1u64 << 30) as f64),
            false => whole.to_string(),
        };
        let room = |bytes: u64| amount(bytes, bytes / MIB);
        let of = match (on_device, is_alone) {
            (false, _) => String::new(),
            (true, false) => " on device and host".to_owned(),
            (true, true) => {
                let host = room(self.memory.host_bytes);
                format!(" on the device, {host} in host memory")
            }
        };
        format!(
            "needs {} {unit} with {}, {} available{of}",
            amount(needed, mib(needed)),
            plan.tier(),
            room(available),
        )
    }
}

/// Whole MiB, rounded up: what would be spilled is never said to be less.
fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(MIB)
}

/// What a candidate leaves in host memory, in words.
fn outside(needs: &Needs, c: &Candidate) -> String {
    let experts = needs.experts - c.placement.expert_cache_bytes.min(needs.experts);
    let parts = [
        ("KV", c.spill_bytes),
        ("dense weights", c.placement.dense_host_bytes),
        ("experts", experts),
    ];
    let said = parts.iter().filter(|(_, bytes)| *bytes > 0);
    let said: Vec<String> = said
        .map(|(what, bytes)| format!("{} MiB of {what}", mib(*bytes)))
        .collect();
    if said.is_empty() {
        "nothing".to_owned()
    } else {
        said.join(", ")
    }
}

/// Where everything goes, part by part.
fn layout(needs: &Needs, c: &Candidate, hits: f64) -> Layout {
    let p = &c.placement;
    let dense_fast = needs.dense - p.dense_host_bytes.min(needs.dense);
    let experts_fast = p.expert_cache_bytes.min(needs.experts);
    let experts_host = if experts_fast < needs.experts {
        needs.experts
    } else {
        0
    };
    let expert_staging = if experts_host > 0 {
        needs.expert_staging
    } else {
        0
    };
    let window = needs.kv.full.saturating_sub(c.spill_bytes);
    let named = |parts: &[(&'static str, u64)]| -> Vec<Part> {
        let parts = parts.iter().filter(|(_, bytes)| *bytes > 0);
        parts.map(|&(what, bytes)| Part { what, bytes }).collect()
    };
    let slots = |bytes: u64, of: u64| bytes.checked_div(of).unwrap_or(0);
    let full_cells = needs.kv.full_blocks.saturating_mul(BLOCK_CELLS);
    let tail_cells = slots(c.spill_bytes, needs.kv.full_slab).saturating_mul(BLOCK_CELLS);
    Layout {
        fast: named(&[
            ("dense weights", dense_fast),
            ("experts", experts_fast),
            ("KV of layers that see everything", window),
            ("KV of layers with a window", needs.kv.windowed),
            ("recurrent state", needs.recurrent),
            ("work space", needs.work),
            ("staging", p.staging_bytes),
            ("slots for streamed experts", expert_staging),
            ("padding of allocations", needs.padding),
            ("reserve", needs.reserve),
        ]),
        host: named(&[
            ("embedding", needs.embedding_host),
            ("dense weights", p.dense_host_bytes),
            ("experts", experts_host),
            ("KV of layers that see everything", c.spill_bytes),
        ]),
        fast_bytes: c.fast_bytes,
        host_bytes: c.host_bytes,
        embedding_host_bytes: needs.embedding_host,
        window_cells: full_cells - tail_cells,
        tail_cells,
        spill_bytes: c.spill_bytes,
        expert_slots: slots(experts_fast, needs.slot),
        expert_cache_bytes: experts_fast,
        expert_staging_slots: slots(expert_staging, needs.slot),
        expert_staging_bytes: expert_staging,
        expert_hits: (needs.experts > 0).then_some(hits),
        staging_slots: slots(
            p.staging_bytes - needs.carried.min(p.staging_bytes),
            needs.piece,
        ),
        staging_bytes: p.staging_bytes,
        staging_slot_bytes: if p.staging_bytes > 0 { needs.piece } else { 0 },
    }
}

impl Plan {
    /// The share of tokens a second that the chosen plan costs at full context, against KV that takes no room.
    pub fn drop(&self) -> f64 {
        self.chosen().map_or(1.0, |t| amount(t.drop))
    }

    /// A token of the chosen plan at a live depth; `None` if nothing fits. Request, model and profile are those that the plan was made
    /// from.
    pub fn token_at(
        &self,
        request: &Request,
        model: &Model,
        profile: &Profile,
        depth: u64,
    ) -> Option<Token> {
        let best = self.chosen()?.best()?;
        let machine = Machine::new(profile, self.memory.place, self.threads);
        let costs = costs(request, model, machine);
        Some(costs.token(&costs.tier(model, self.tier()), &best.placement, depth))
    }

    /// What who computes an expert is decided by, on the machine that the plan was made for.
    pub fn expert_costs(
        &self,
        request: &Request,
        model: &Model,
        profile: &Profile,
    ) -> crate::experts::Costs {
        let machine = Machine::new(profile, self.memory.place, self.threads);
        costs(request, model, machine).of_experts(model)
    }
}
