//! The plan of a session in main memory, made before its model is loaded.
//!
//! Without a device everything lies in one memory, so a decision is about bytes alone: the tiers are walked until one has room.
//! No rate of the machine can change it, and so none is measured for it.

use super::describe::describe;
use crate::session::{self, N_CTX_DEFAULT, Session, SessionOptions};
use gguf::GgufFile;
use place::bytes::KvType;
use place::decide::{Plan, Request, decide};
use place::model::{Keeps, Model};
use place::profile::Profile;
use serde::Serialize;

/// What is asked of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// Cells; `None`: the smaller of the trained length, [`N_CTX_DEFAULT`] and what has room at the types asked for, f16
    /// where none is.
    pub n_ctx: Option<u64>,
    /// K, if it is pinned.
    pub type_k: Option<session::KvType>,
    /// V, if it is pinned.
    pub type_v: Option<session::KvType>,
    /// Tokens a chunk.
    pub ubatch: u64,
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
    let mut model = describe(file)?;
    keep_all_cells(&mut model);
    let ty = |ty: session::KvType| ty.to_string().parse::<KvType>();
    let request = Request {
        n_ubatch: asked.ubatch,
        type_k: asked.type_k.map(ty).transpose()?,
        type_v: asked.type_v.map(ty).transpose()?,
        ..Request::default()
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
        ubatch: usize::try_from(asked.ubatch).unwrap_or(usize::MAX),
    };
    Ok(SessionPlan {
        plan,
        options,
        cut_from,
    })
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

/// Sessions keep every cell of a layer with a window, also those that no query sees again. Returns whether there were any.
pub fn keep_all_cells(model: &mut Model) -> bool {
    let mut found = false;
    for layer in &mut model.layers {
        if let Keeps::Cells(cells) = &mut layer.keeps {
            found |= cells.window.take().is_some();
        }
    }
    found
}

impl Taken {
    /// Compares a session with its plan.
    pub fn of(plan: &Plan, session: &Session<'_>) -> Self {
        Self {
            planned: Bytes {
                weight_bytes: plan.weight_bytes,
                kv_bytes: plan.kv_alloc_bytes,
                work_bytes: plan.work_bytes,
            },
            real: Bytes {
                weight_bytes: session.model().memory_bytes(),
                kv_bytes: session.kv_bytes(),
                work_bytes: session.work_bytes(),
            },
        }
    }
}
