//! The plan of a session, made before its model is loaded.

use super::describe::describe;
use crate::experts::{Emulated, ExpertPlacing, Policy, Recalled, Settings, Share};
use crate::gpu::Gpu;
use crate::session::{
    ComputeDevice, Gating, N_CTX_DEFAULT, Placing, Session, SessionOptions, Transfers,
};
use gguf::GgufFile;
use place::bytes::{BLOCK_CELLS, GROUP_BLOCKS, KvType};
use place::cost::{Place, SpillModel, Token};
use place::decide::{Memory, Plan, Prefer, Request, SpillWeights, decide, needs_profile};
use place::limits::DEVICE_RESERVE_BYTES;
use place::model::Model;
use place::profile::Profile;
use place::tier;
use serde::Serialize;
use std::borrow::Cow;

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
    /// All else that is asked. Its context does not count, and what sessions cannot do yet is not planned ([`request`]).
    pub request: Request,
    /// Whether what is stored in 4 bits is rotated first.
    pub rotate: bool,
    /// What computes.
    pub device: ComputeDevice,
    /// The CPU's part in experts that are not on the device, in prompts and for generated tokens.
    pub expert_shares: [Share; 2],
    /// What is made worse than it is.
    pub emulated: Emulated,
    /// How cells get to host memory and back.
    pub transfers: Transfers,
}

impl Default for Asked {
    fn default() -> Self {
        Self {
            n_ctx: None,
            request: Request::default(),
            rotate: true,
            device: ComputeDevice::Cpu,
            expert_shares: [Share::Auto; 2],
            emulated: Emulated::default(),
            transfers: Transfers::default(),
        }
    }
}

/// Bytes of pinned memory to one of a GPU's tables: 8 a page of 4 KiB.
const PINNED_TO_TABLES: u64 = 512;

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
    /// Slots for experts beside the memory that has all of them.
    pub expert_slot_bytes: u64,
}

/// What a device's memory was planned to hold of what is there, and what is taken of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct DeviceTaken {
    /// As planned, with the cells that are there now, and what allocations are padded with. Without the reserve.
    pub planned_bytes: u64,
    /// What all buffers have.
    pub buffer_bytes: u64,
    /// How much less is free than when the device was opened.
    pub driver_bytes: u64,
    /// What was kept free beside the plan.
    pub reserve_bytes: u64,
}

/// What was planned, and what was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Taken {
    /// By the plan, before loading.
    pub planned: Bytes,
    /// By model and session.
    pub real: Bytes,
}

/// Plans a session from its model's header and the memory of a machine: its device's, if that is what computes.
///
/// # Errors
/// If the header describes no model, or no machine could do what is asked: that it does not fit here is no error.
pub fn plan(
    file: &GgufFile,
    asked: &Asked,
    machine: &Profile,
) -> Result<SessionPlan, place::Error> {
    let model = describe(file)?;
    let request = request(asked);
    let machine = &used(asked, machine);
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
        n_seq: usize::try_from(plan.n_seq).unwrap_or(usize::MAX),
        type_k: ty(plan.type_k),
        type_v: ty(plan.type_v),
        ubatch: usize::try_from(plan.n_ubatch).unwrap_or(usize::MAX),
        placing: placing(
            &plan,
            match request.kv_share {
                None => Gating::On,
                Some(_) => Gating::Off,
            },
        ),
        rotate: asked.rotate,
        device: asked.device,
        experts: experts(&plan, asked, &model, machine),
        transfers: asked.transfers,
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
    let machine = used(asked, machine);
    Ok(planned
        .plan
        .token_at(&request(asked), &model, &machine, depth))
}

/// What is asked of a plan: as much as sessions can do today, which is to have dense weights in fast memory.
pub fn request(asked: &Asked) -> Request {
    Request {
        spill_weights: SpillWeights::Experts,
        pin_max_bytes: asked.transfers.pin_max_bytes,
        expert_share: match asked.expert_shares[1] {
            Share::Off => Some(0.0),
            Share::Auto | Share::Always => None,
            Share::Fixed(share) => Some(share),
        },
        ..asked.request
    }
}

/// Where a plan has the experts: `None` if all are where they are computed.
fn experts(plan: &Plan, asked: &Asked, model: &Model, machine: &Profile) -> Option<ExpertPlacing> {
    let layout = &plan.layout;
    if layout.expert_staging_slots == 0 {
        return None;
    }
    let [prompt, generated] = asked.expert_shares;
    Some(ExpertPlacing {
        settings: Settings {
            cache_bytes: layout.expert_cache_bytes,
            staging_slots: u32::try_from(layout.expert_staging_slots).unwrap_or(u32::MAX),
            policy: Policy::Value,
            prompt,
            generated,
            costs: plan.expert_costs(&request(asked), model, machine),
            reads_in_place: asked.device != ComputeDevice::Cpu,
        },
        recalled: Recalled::default(),
        emulated: asked.emulated,
    })
}

/// The machine without a device that does not compute, and with the link that it is to have.
fn used<'m>(asked: &Asked, machine: &'m Profile) -> Cow<'m, Profile> {
    let mut machine = Cow::Borrowed(machine);
    if asked.device == ComputeDevice::Cpu && machine.device.is_some() {
        machine.to_mut().device = None;
    }
    if asked.transfers != Transfers::default() {
        slow_down(machine.to_mut(), &asked.transfers);
    }
    machine
}

/// Gives a machine the link that it is to have.
pub fn slow_down(machine: &mut Profile, transfers: &Transfers) {
    if let Some(gb_s) = transfers.link_gb_s {
        machine.slow_link(gb_s, "emulated link");
    }
    if transfers.host_copy {
        let one = machine.host.copy_gb_s.one.value;
        machine.slow_link(one, "emulated copies by the CPU");
    }
}

/// Whether the plan of a session depends on what the machine can do, and not on its memory alone. Of `machine` the memory counts.
///
/// # Errors
/// As [`plan`].
pub fn needs_rates(
    file: &GgufFile,
    asked: &Asked,
    machine: &Profile,
) -> Result<bool, place::Error> {
    let model = describe(file)?;
    let request = Request {
        n_ctx: asked.n_ctx.unwrap_or_else(|| usual_context(&model)),
        ..request(asked)
    };
    let memory = Memory::of_profile(&request, &used(asked, machine));
    if tier::allowed(&model, request.type_k, request.type_v)?.len() == 1 || asked.n_ctx.is_none() {
        // The tier is not chosen, and what has no room is in host memory; how that is divided between device and CPU is.
        let spills = asked.n_ctx.is_some() || request.window_cells.is_some();
        let is_divided = request.kv_share.is_none() || request.staging_slots.is_none();
        return Ok(memory.place == Place::Device
            && spills
            && is_divided
            && needs_profile(&request, &model, &memory)?);
    }
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
fn placing(plan: &Plan, gating: Gating) -> Placing {
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
        gating,
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

/// Fast memory that sessions of one model take together: a device's, or main memory.
pub fn together_bytes(plans: &[&SessionPlan]) -> u64 {
    let Some(first) = plans.first() else { return 0 };
    let sessions = plans.iter().map(|p| p.session_bytes());
    sessions.fold(first.shared_bytes(), u64::saturating_add)
}

/// What of it there is.
pub fn available_bytes(device: ComputeDevice, machine: &Profile) -> u64 {
    match (device, &machine.device) {
        (ComputeDevice::Cuda(_), Some(device)) => device.free_bytes,
        _ => machine.host.memory_available_bytes,
    }
}

impl SessionPlan {
    /// Fast memory that is taken once, however many sessions there are: weights, and what is kept free on a device.
    pub fn shared_bytes(&self) -> u64 {
        match (self.options.device, &self.options.experts) {
            (ComputeDevice::Cpu, _) => self.plan.weight_bytes,
            (ComputeDevice::Cuda(_), None) => {
                let beside = self.plan.layout.embedding_host_bytes;
                let weights = self.plan.weight_bytes.saturating_sub(beside);
                weights.saturating_add(DEVICE_RESERVE_BYTES)
            }
            // Experts are in host memory, and their slots the session's.
            (ComputeDevice::Cuda(_), Some(_)) => {
                let layout = &self.plan.layout;
                let kv = self.plan.kv_alloc_bytes.saturating_sub(layout.spill_bytes);
                let parts = [
                    kv,
                    self.plan.work_bytes,
                    layout.staging_bytes,
                    Bytes::expert_slots(&self.plan),
                ];
                let of_session = parts.into_iter().fold(0, u64::saturating_add);
                layout.fast_bytes.saturating_sub(of_session)
            }
        }
    }

    /// Fast memory that the session takes beside what is [shared](Self::shared_bytes), when its context is full; without a device cells in
    /// host memory, too.
    pub fn session_bytes(&self) -> u64 {
        let plan = &self.plan;
        if self.options.device != ComputeDevice::Cpu {
            return plan.layout.fast_bytes.saturating_sub(self.shared_bytes());
        }
        let parts = [
            plan.kv_alloc_bytes,
            plan.work_bytes,
            plan.layout.staging_bytes,
            Bytes::expert_slots(plan),
        ];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

impl DeviceTaken {
    /// Compares a GPU's memory with the plan of the only session there.
    ///
    /// # Errors
    /// If the driver does not say what is free.
    pub fn of(plan: &Plan, session: &Session<'_>, gpu: &Gpu) -> Result<Self, cuda::Error> {
        let layout = &plan.layout;
        let reserve_bytes = DEVICE_RESERVE_BYTES;
        let kv = plan.kv_alloc_bytes.saturating_sub(layout.spill_bytes);
        let there = session.spread().device_bytes;
        // What the driver keeps there to find pinned memory.
        let tables = match layout.expert_staging_slots {
            0 => 0,
            _ => session.model().memory_bytes() / PINNED_TO_TABLES,
        };
        let beside_kv = layout
            .fast_bytes
            .saturating_sub(reserve_bytes.saturating_add(kv))
            .saturating_add(tables);
        let free = gpu.memory()?.free_bytes;
        Ok(Self {
            planned_bytes: beside_kv.saturating_add(there),
            buffer_bytes: cuda::memory::taken_bytes(),
            driver_bytes: gpu.free_at_first_bytes().saturating_sub(free),
            reserve_bytes,
        })
    }

    /// Whether more is taken than was planned and kept free.
    pub fn is_over(&self) -> bool {
        self.driver_bytes > self.planned_bytes.saturating_add(self.reserve_bytes)
    }
}

impl Bytes {
    /// Slots for experts, where not all are where they are computed.
    fn expert_slots(plan: &Plan) -> u64 {
        let layout = &plan.layout;
        match layout.expert_staging_slots {
            0 => 0,
            _ => layout
                .expert_cache_bytes
                .saturating_add(layout.expert_staging_bytes),
        }
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
                expert_slot_bytes: Bytes::expert_slots(plan),
            },
            real: Bytes {
                weight_bytes: session.model().memory_bytes(),
                kv_bytes: session.kv_bytes(),
                work_bytes: session.work_bytes(),
                staging_bytes: session.staging_bytes(),
                expert_slot_bytes: session.expert_bytes(),
            },
        }
    }
}
