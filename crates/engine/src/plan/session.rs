//! The plan of a session, made before its model is loaded.

use super::describe::describe;
use super::machine;
use crate::session::{ComputeDevice, N_CTX_DEFAULT, Placing, Session, SessionOptions};
use gguf::GgufFile;
use place::bytes::{BLOCK_CELLS, GROUP_BLOCKS, KvType};
use place::cost::{Place, SpillModel, Token};
use place::decide::{Memory, Plan, Prefer, Request, decide, needs_profile};
use place::model::Model;
use place::profile::Profile;
use place::tier;
use serde::Serialize;

const _: () = assert!(
    BLOCK_CELLS == crate::session::BLOCK_CELLS as u64
        && GROUP_BLOCKS == crate::backend::GROUP as u64,
    "plans and sessions have the same blocks"
);

/// What is asked of a session.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Asked {
    /// Cells; `None`: the smaller of the trained length, [`N_CTX_DEFAULT`] and what has room at the types asked for, f16
    /// where none is.
    pub n_ctx: Option<u64>,
    /// All else that is asked. Its context does not count, and weights are never left in host memory: sessions cannot do that yet.
    pub request: Request,
    /// Whether what is stored in 4 bits is rotated first.
    pub rotate: bool,
    /// What computes.
    pub device: ComputeDevice,
}

impl Default for Asked {
    fn default() -> Self {
        Self {
            n_ctx: None,
            request: Request::default(),
            rotate: true,
            device: ComputeDevice::Cpu,
        }
    }
}

/// A session as it was planned.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionPlan {
    /// What goes where, and why. If it does not fit, nothing should be loaded.
    pub plan: Plan,
    /// What to make the session with.
    pub options: SessionOptions,
    /// The context that one would get in more memory, if it was cut.
    pub cut_from: Option<u64>,
}

/// Bytes by what they are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Bytes {
    /// The model's tensors.
    pub weight_bytes: u64,
    /// The cache when the context is full: its blocks are taken as it grows.
    pub kv_bytes: u64,
    /// Activations, scratch, logits.
    pub work_bytes: u64,
    /// What streaming of cells needs beside that.
    pub staging_bytes: u64,
}

/// What was planned, and what was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Taken {
    /// By the plan, before loading.
    pub planned: Bytes,
    /// By model and session.
    pub real: Bytes,
}

/// Plans a session from its model's header and the memory of a machine.
///
/// # Errors
/// If the header describes no model, or no machine could do what is asked: that it does not fit here is no error.
pub fn plan(
    file: &GgufFile,
    asked: &Asked,
    machine: &Profile,
) -> Result<SessionPlan, place::Error> {
    let model = describe(file)?;
    let request = Request {
        spill_weights: false,
        ..asked.request
    };
    let (plan, cut_from) = match asked.n_ctx {
        Some(n_ctx) => (
            decide(&Request { n_ctx, ..request }, &model, machine)?,
            None,
        ),
        None => default_context(&request, &model, machine)?,
    };
    let ty = |ty: KvType| {
        let known = ty.to_string().parse();
        known.expect("sessions store the ladder's types, and what is pinned is one of theirs")
    };
    let options = SessionOptions {
        n_ctx: usize::try_from(plan.n_ctx).unwrap_or(usize::MAX),
        type_k: ty(plan.type_k),
        type_v: ty(plan.type_v),
        ubatch: usize::try_from(request.n_ubatch).unwrap_or(usize::MAX),
        placing: placing(&plan),
        rotate: asked.rotate,
        device: asked.device,
    };
    Ok(SessionPlan {
        plan,
        options,
        cut_from,
    })
}

/// The predicted time of a token at some live depth; `None` if the plan does not fit. File, what was asked and machine are those of
/// [`plan`].
///
/// # Errors
/// If the header describes no model.
pub fn token_at(
    file: &GgufFile,
    asked: &Asked,
    machine: &Profile,
    planned: &SessionPlan,
    depth: u64,
) -> Result<Option<Token>, place::Error> {
    let model = describe(file)?;
    Ok(planned
        .plan
        .token_at(&asked.request, &model, machine, depth))
}

/// Whether the plan of a session depends on what the machine can do, and not on its memory alone.
///
/// # Errors
/// As [`plan`].
pub fn needs_rates(file: &GgufFile, asked: &Asked) -> Result<bool, place::Error> {
    let model = describe(file)?;
    let request = Request {
        n_ctx: asked.n_ctx.unwrap_or_else(|| usual_context(&model)),
        spill_weights: false,
        ..asked.request
    };
    if tier::allowed(&model, request.type_k, request.type_v)?.len() == 1 || asked.n_ctx.is_none() {
        // The tier is not chosen, and what has no room is in host memory.
        return Ok(false);
    }
    let memory = Memory::of_profile(&request, &machine::unmeasured());
    // Where main memory plays a device, cells cost the same on either side of the border, unless they are copied over it.
    let same = request.spill_model == SpillModel::Overlapped
        && request.kv_share.is_none_or(|share| share >= 1.0);
    let by_bytes = match memory.place {
        Place::Host => true,
        Place::VirtualDevice => same,
        Place::Device => false,
    };
    if by_bytes && request.prefer == Prefer::Quality {
        return Ok(false);
    }
    needs_profile(&request, &model, &memory)
}

/// Where a plan has the cells.
fn placing(plan: &Plan) -> Placing {
    let layout = &plan.layout;
    if layout.tail_cells == 0 {
        return Placing::RESIDENT;
    }
    let whole = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    Placing {
        window_blocks: Some(whole(layout.window_cells / BLOCK_CELLS)),
        tail_blocks: whole(layout.tail_cells / BLOCK_CELLS),
        staging_slots: whole(layout.staging_slots),
        kv_share: plan.cpu_share,
    }
}

/// The usual context, or as much of it as has room. A default is no reason to compress.
fn default_context(
    request: &Request,
    model: &Model,
    machine: &Profile,
) -> Result<(Plan, Option<u64>), place::Error> {
    let usual = usual_context(model);
    let request = Request {
        n_ctx: usual,
        type_k: request.type_k.or(Some(KvType::F16)),
        type_v: request.type_v.or(Some(KvType::F16)),
        ..*request
    };
    let plan = decide(&request, model, machine)?;
    if plan.fits || plan.max_ctx == 0 {
        return Ok((plan, None));
    }
    let n_ctx = plan.max_ctx.min(usual);
    Ok((
        decide(&Request { n_ctx, ..request }, model, machine)?,
        Some(usual),
    ))
}

/// The smaller of the trained length and [`N_CTX_DEFAULT`].
pub fn usual_context(model: &Model) -> u64 {
    let most = N_CTX_DEFAULT as u64;
    match model.n_ctx_train {
        0 => most,
        trained => trained.min(most),
    }
}

impl SessionPlan {
    /// Bytes that the session takes beside the model's weights, when its context is full.
    pub fn session_bytes(&self) -> u64 {
        let plan = &self.plan;
        let parts = [
            plan.kv_alloc_bytes,
            plan.work_bytes,
            plan.layout.staging_bytes,
        ];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

impl Taken {
    /// Compares a session with its plan.
    pub fn of(plan: &Plan, session: &Session<'_>) -> Self {
        Self {
            planned: Bytes {
                weight_bytes: plan.weight_bytes,
                kv_bytes: plan.kv_alloc_bytes,
                work_bytes: plan.work_bytes,
                staging_bytes: plan.layout.staging_bytes,
            },
            real: Bytes {
                weight_bytes: session.model().memory_bytes(),
                kv_bytes: session.kv_bytes(),
                work_bytes: session.work_bytes(),
                staging_bytes: session.staging_bytes(),
            },
        }
    }
}
