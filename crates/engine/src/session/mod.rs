//! A session: sequences of tokens and their cells, and the calls that extend them.
//!
//! What a token's logits are depends on the tokens before it, the cache's types and the model alone: not on how the tokens
//! were cut into calls or chunks, nor on where their cells lie.

mod forward;
mod together;

pub use crate::backend::Transfers;
pub use crate::kv::file::{Restored, SessionFileError};
pub use crate::kv::{Gating, Placing, Spread};
pub use crate::model::ComputeDevice;
pub use cpu::attention::KvType;
pub use place::gate::{Finding, Verdict};

use crate::backend::{Backend, CELLS, Cpu, Cuda, KvShape, LOGIT_ROWS, Rotation, Stepped};
use crate::error::Error;
use crate::experts::{Counts, ExpertPlacing, Profile, Store, Verdicts};
use crate::kv::Cache;
use crate::kv::file::Origin;
use crate::model::{Config, Model};
use forward::{Tokens, Work};
use place::gate::Gate;
use std::io::{self, Write};
use std::ops::{ControlFlow, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::slice::from_ref;
use std::time::Instant;

/// The context that is taken when none is asked for, if the model was trained with at least as much.
pub const N_CTX_DEFAULT: usize = 8192;

/// Tokens of a prompt that go through the layers at a time unless told otherwise.
pub const UBATCH_DEFAULT: usize = 512;

/// The largest ubatch: beyond it work space outgrows what caches hold, for nothing.
pub const UBATCH_MAX: usize = 16_384;

/// How a session is set up.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionOptions {
    /// Cells: what one sequence may have, and all have together.
    pub n_ctx: usize,
    /// Sequences that memory is planned for.
    pub n_seq: usize,
    /// Type of K.
    pub type_k: KvType,
    /// Type of V.
    pub type_v: KvType,
    /// Tokens a chunk.
    pub ubatch: usize,
    /// Where cells may be.
    pub placing: Placing,
    /// Whether what is stored in 4 bits is rotated first, where heads allow it.
    pub rotate: bool,
    /// What computes: what the model was loaded for.
    pub device: ComputeDevice,
    /// Where experts may be; `None`: where the model is.
    pub experts: Option<ExpertPlacing>,
    /// How cells get to host memory and back.
    pub transfers: Transfers,
}

impl SessionOptions {
    /// The defaults for a model: its trained context up to [`N_CTX_DEFAULT`], f16.
    pub fn for_model(config: &Config) -> Self {
        Self {
            n_ctx: config.n_ctx_train.min(N_CTX_DEFAULT),
            n_seq: 1,
            type_k: KvType::F16,
            type_v: KvType::F16,
            ubatch: UBATCH_DEFAULT,
            placing: Placing::RESIDENT,
            rotate: true,
            device: ComputeDevice::Cpu,
            experts: None,
            transfers: Transfers::default(),
        }
    }

    fn rotation(&self, config: &Config) -> Rotation {
        let rotates =
            |ty: KvType, head: usize| self.rotate && ty == KvType::Q4_0 && head.is_power_of_two();
        Rotation {
            k: rotates(self.type_k, config.head_k),
            v: rotates(self.type_v, config.head_v),
        }
    }
}

/// What a prefill is for.
pub enum Wanted<'f> {
    /// That tokens are taken.
    None,
    /// The logits of the last token, afterwards in [`Session::logits`].
    Last,
    /// The logits of every token: the callback gets its position and `[V]` logits, and may end the prefill.
    All(&'f mut dyn FnMut(usize, &[f32]) -> ControlFlow<()>),
    /// What the last norm gives for each token, `[T, D]`, at the end of what is there.
    Outputs(&'f mut Vec<f32>),
}

impl std::fmt::Debug for Wanted<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Last => "Last",
            Self::All(_) => "All",
            Self::Outputs(_) => "Outputs",
        })
    }
}

/// Tokens of one sequence in a [step](Session::step) of several.
#[derive(Debug, Clone, Copy)]
pub struct Part<'t, I = SequenceId> {
    /// The sequence.
    pub sequence: I,
    /// What it takes, at least one token.
    pub tokens: &'t [u32],
    /// Where they come from.
    pub origin: TokenOrigin,
    /// What is wanted of them.
    pub wants: Wants,
}

/// What is wanted of a [part](Part) of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wants {
    /// That they are taken.
    Nothing,
    /// The logits `[V]` of the last one.
    Logits,
    /// The same, of which only the largest of the first so many is looked at: it is what it is among logits, and where it is there; others may
    /// be coarser.
    Largest(usize),
    /// What the last norm gives for each of them, `[T, D]`. They are taken as a prompt is.
    Outputs,
}

impl Wants {
    /// Whether logits are wanted.
    pub fn is_logits(self) -> bool {
        matches!(self, Self::Logits | Self::Largest(_))
    }
}

/// Where tokens come from. On a device that matters to the bits of what is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenOrigin {
    /// A prompt.
    Prompt,
    /// They were generated.
    Generated,
}

/// The number of a sequence of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SequenceId(usize);

/// Sequences in computation, one of which is selected: at first the only one, an empty one.
#[derive(Debug)]
pub struct Session<'m> {
    model: &'m Model,
    options: SessionOptions,
    run: On<'m>,
    /// Whether a thread has panicked that computed for it.
    has_panicked: bool,
}

/// Has work done that may panic: then an error, and from then on nothing but that, for nobody knows what was done.
fn guarded(has_panicked: &mut bool, work: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
    if *has_panicked {
        return Err(Error::Panicked);
    }
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        *has_panicked = true;
        Err(Error::Panicked)
    })
}

/// A session on one of the backends.
#[derive(Debug)]
enum On<'m> {
    Cpu(Box<Run<Cpu<'m>>>),
    Cuda(Box<Run<Cuda<'m>>>),
}

/// Evaluates an expression with the session on whatever backend it is.
macro_rules! on {
    ($session:expr, $run:ident => $e:expr) => {
        match $session {
            On::Cpu($run) => $e,
            On::Cuda($run) => $e,
        }
    };
}

/// A session on some backend.
#[derive(Debug)]
struct Run<B: Backend> {
    backend: B,
    cache: Cache<B>,
    work: Work<B>,
    /// Whether the CPU's share of the tail is worth having.
    gate: Option<Gate>,
    /// The share of the last generated token, how its step was done, and whether it was the first one with that share, or after something had moved.
    share: f64,
    stepped: Stepped,
    is_first: bool,
}

/// The least change of the CPU's share that is tried.
const SHARE_STEP: f64 = 0.05;

impl<B: Backend> Run<B> {
    fn new(
        mut backend: B,
        mut cache: Cache<B>,
        ubatch: usize,
        options: &SessionOptions,
    ) -> Result<Self, Error> {
        let placing = &options.placing;
        let slots = make_slots(&mut backend, &cache, &options.transfers)?;
        cache.set_slots(slots);
        let work = Work::new(&backend, ubatch)?;
        let gate = match &placing.gating {
            _ if cache.slots() == 0 || placing.kv_share <= 0.0 => None,
            Gating::Off => None,
            Gating::On => Some(Gate::of_tokens(placing.kv_share, SHARE_STEP)),
            Gating::Recalling(finding) => {
                Some(Gate::of_tokens(placing.kv_share, SHARE_STEP).recall(finding))
            }
        };
        Ok(Self {
            backend,
            cache,
            work,
            share: placing.kv_share,
            stepped: Stepped::Given,
            is_first: false,
            gate,
        })
    }

    fn prefill(
        &mut self,
        model: &Model,
        options: &SessionOptions,
        tokens: &[u32],
        wanted: &mut Wanted<'_>,
    ) -> Result<(), Error> {
        let rotation = options.rotation(model.config());
        let Self {
            backend,
            cache,
            work,
            ..
        } = self;
        if let Some(store) = backend.experts_mut() {
            store.begin_prompt(tokens.len());
        }
        let mut rest = tokens;
        while !rest.is_empty() {
            let (position, most) = (cache.n(), options.ubatch.min(cache.chunk_max()));
            let (chunk, later) = rest.split_at(most.min(rest.len()));
            rest = later;
            cache.begin(backend, chunk.len(), false)?;
            let of = match wanted {
                Wanted::Last if rest.is_empty() => Tokens::Last,
                Wanted::None | Wanted::Last => Tokens::None,
                Wanted::Outputs(_) | Wanted::All(_) => Tokens::All,
            };
            let last = work.forward(backend, model, cache, rotation, chunk, of);
            // What failed has left no cells.
            backend.finish()?;
            cache.advance();
            match wanted {
                Wanted::Last if rest.is_empty() => {
                    work.logits(backend, last..last + 1)?;
                }
                Wanted::None | Wanted::Last => {}
                Wanted::Outputs(values) => work.outputs(backend, 0..chunk.len(), values)?,
                Wanted::All(each) => {
                    let n_vocab = model.config().n_vocab;
                    for first in (0..chunk.len()).step_by(LOGIT_ROWS) {
                        let rows = first..chunk.len().min(first + LOGIT_ROWS);
                        let logits = work.logits(backend, rows)?;
                        for (t, logits) in logits.chunks_exact(n_vocab).enumerate() {
                            if each(position + first + t, logits).is_break() {
                                return Ok(());
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn decode(&mut self, model: &Model, options: &SessionOptions, token: u32) -> Result<(), Error> {
        let rotation = options.rotation(model.config());
        let Self {
            backend,
            cache,
            work,
            gate,
            share,
            stepped: stepped_before,
            is_first,
        } = self;
        let gate = gate.as_mut().filter(|_| cache.has_tail());
        let share_before = *share;
        if let Some(gate) = &gate {
            *share = gate.share();
            cache.set_share(*share);
        }
        let start = Instant::now();
        cache.begin(backend, 1, true)?;
        let (positions, again) = (cache.n()..cache.n() + 1, cache.again());
        let stepped = backend.step(from_ref(&positions), &[token], again, |backend| {
            work.forward(backend, model, cache, rotation, &[token], Tokens::All);
            work.compute_logits(backend, 1);
        });
        if stepped == Stepped::Repeated {
            cache.was_repeated();
        }
        backend.finish()?;
        cache.advance();
        let stepped_before = std::mem::replace(stepped_before, stepped);
        let (has_changed, is_unusual) = (*share != share_before, cache.is_unusual());
        let is_second = std::mem::replace(is_first, has_changed || is_unusual);
        let Some(gate) = gate else { return Ok(()) };
        let steps = [stepped_before, stepped];
        match said(has_changed, is_second, steps, is_unusual) {
            Said::Nothing => {}
            Said::Other => gate.skip(),
            Said::Time => {
                let reading = gate.read(start.elapsed().as_secs_f64() * 1e3);
                tracing::debug!(target: "gate", position = cache.n() - 1, ?reading);
            }
        }
        Ok(())
    }
}

/// What a generated token's time says to a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Said {
    /// What its share takes.
    Time,
    /// It paid for something that others do not.
    Other,
    /// It paid for the change of the share. The gate is asked again, and told about the next.
    Nothing,
}

/// After a change of the share what was copied ahead is of no use, the second token does by itself what others repeat, and the third is recorded. Only what comes
/// then is to be compared. Where each is recorded, that is what a token takes.
fn said(has_changed: bool, is_second: bool, steps: [Stepped; 2], is_unusual: bool) -> Said {
    let [before, now] = steps;
    let is_recorded = now == Stepped::Recorded && before != Stepped::Recorded;
    if has_changed {
        Said::Nothing
    } else if is_unusual {
        Said::Other
    } else if is_second || is_recorded {
        Said::Nothing
    } else {
        Said::Time
    }
}

/// Makes the staging ring; a smaller one if the device has no room for it, for what is streamed is the same. Returns its slots.
fn make_slots<B: Backend>(
    backend: &mut B,
    cache: &Cache<B>,
    transfers: &Transfers,
) -> Result<usize, Error> {
    let mut slots = cache.slots();
    loop {
        let is_refused = transfers.staging_fails && slots > 2;
        let why = match backend.make_slots(slots, cache.shape().block_bytes()) {
            Ok(()) if !is_refused => return Ok(slots),
            Ok(()) => "as was to be emulated".to_owned(),
            Err(error) if slots < 2 => return Err(error),
            Err(error) => error.to_string(),
        };
        tracing::warn!(
            "a staging ring of {slots} slots was refused ({why}): {} are tried, with which copies run less far ahead",
            slots / 2
        );
        slots /= 2;
    }
}

impl<'m> Session<'m> {
    /// An empty session.
    ///
    /// # Errors
    /// If the options are impossible or there is no memory for the work space. Cells are taken as the context grows.
    pub fn new(model: &'m Model, options: &SessionOptions) -> Result<Self, Error> {
        let mut options = options.clone();
        if options.n_ctx == 0 {
            return Err(Error::Options(
                "a context of 0 tokens holds nothing".to_owned(),
            ));
        }
        if options.n_seq == 0 {
            return Err(Error::Options("0 sequences hold nothing".to_owned()));
        }
        if options.ubatch == 0 || options.ubatch > UBATCH_MAX {
            return Err(Error::Options(format!(
                "a ubatch of {} tokens: expected 1 to {UBATCH_MAX}",
                options.ubatch
            )));
        }
        if options.device != model.device() {
            return Err(Error::Options(format!(
                "a session on {} of a model that was loaded for {}",
                options.device,
                model.device()
            )));
        }
        options.ubatch = options.ubatch.min(options.n_ctx);
        let SessionOptions {
            n_ctx,
            n_seq,
            ubatch,
            placing,
            transfers,
            ..
        } = options;
        let store = options.experts.as_ref();
        let store = store.map(|experts| Store::new(model, Some(experts)));
        let store = store.transpose()?;
        let c = model.config();
        let (type_k, type_v) = (options.type_k, options.type_v);
        let shape = KvShape::new(c.heads_kv, c.head_k, c.head_v, type_k, type_v)?;
        let memory = |source| Error::Memory {
            what: format!("work space for {ubatch} tokens"),
            source,
        };
        let run = match options.device {
            ComputeDevice::Cpu => {
                let cache = Cache::new(c, shape, n_ctx, n_seq, ubatch, placing);
                let in_parts = cache.slots() > 0;
                let backend = Cpu::new(model, &shape, ubatch, n_ctx, in_parts).map_err(memory)?;
                let backend = backend.with_link(transfers.link_gb_s);
                On::Cpu(Box::new(Run::new(backend, cache, ubatch, &options)?))
            }
            ComputeDevice::Cuda(ordinal) => {
                let cache = Cache::new(c, shape, n_ctx, n_seq, ubatch, placing);
                let cpu_shares = cache.slots() > 0 && placing.kv_share > 0.0;
                let backend = Cuda::new(
                    model, ordinal, &shape, ubatch, n_ctx, n_seq, cpu_shares, &transfers,
                )?;
                On::Cuda(Box::new(Run::new(backend, cache, ubatch, &options)?))
            }
        };
        let mut session = Self {
            model,
            options,
            run,
            has_panicked: false,
        };
        if let Some(store) = store {
            on!(&mut session.run, run => run.backend.place_experts(store)?);
        }
        Ok(session)
    }

    /// The model.
    pub fn model(&self) -> &'m Model {
        self.model
    }

    /// Cells.
    pub fn n_ctx(&self) -> usize {
        self.options.n_ctx
    }

    /// Positions of the selected sequence that are taken.
    pub fn n_past(&self) -> usize {
        on!(&self.run, run => run.cache.n())
    }

    /// Tokens a chunk.
    pub fn ubatch(&self) -> usize {
        self.options.ubatch
    }

    /// How it was set up.
    pub fn options(&self) -> &SessionOptions {
        &self.options
    }

    /// Bytes of the cache when the context is full, as the sequences that were planned for share it. Staging slots are not counted.
    pub fn kv_bytes(&self) -> u64 {
        on!(&self.run, run => run.cache.bytes())
    }

    /// Bytes of the work space.
    pub fn work_bytes(&self) -> u64 {
        on!(&self.run, run => run.backend.bytes() + run.work.bytes())
    }

    /// Bytes of what streaming needs beside that.
    pub fn staging_bytes(&self) -> u64 {
        on!(&self.run, run => run.backend.staging_bytes())
    }

    /// Bytes of slots for experts, those that streamed ones pass through among them.
    pub fn expert_bytes(&self) -> u64 {
        on!(&self.run, run => run.backend.expert_bytes())
    }

    /// How experts were served so far, in prompts and for generated tokens, where some are not where they are computed.
    pub fn expert_counts(&self) -> Option<[Counts; 2]> {
        let experts = on!(&self.run, run => run.backend.experts())?.experts()?;
        Some(experts.counts())
    }

    /// What was learnt of the use of experts, and what gates found of the CPU's share of them.
    pub fn expert_findings(&self) -> Option<(Profile, Verdicts)> {
        let experts = on!(&self.run, run => run.backend.experts())?.experts()?;
        Some((experts.profile(), experts.verdicts()))
    }

    /// Writes which experts are used from now on, as [`place::routing`] says.
    ///
    /// # Errors
    /// If the model has no experts.
    pub fn record_routing(&mut self, to: Box<dyn Write + Send>) -> Result<(), Error> {
        self.store()?.record_routing(to);
        Ok(())
    }

    /// Writes what layers take from now on whose experts are not all resident, as [`place::windows`] says. `machine` is what records call
    /// this one.
    ///
    /// # Errors
    /// If the model has no experts.
    pub fn record_windows(
        &mut self,
        to: Box<dyn Write + Send>,
        machine: &str,
    ) -> Result<(), Error> {
        self.store()?.record_windows(to, machine);
        Ok(())
    }

    /// What is asked of experts: where they are all where they are computed, for the sake of records.
    fn store(&mut self) -> Result<&mut Store, Error> {
        let model = self.model;
        on!(&mut self.run, run => {
            if run.backend.experts().is_none() {
                run.backend.place_experts(Store::new(model, None)?)?;
            }
            Ok(run.backend.experts_mut().expect("it is there now"))
        })
    }

    /// Ends all records.
    ///
    /// # Errors
    /// The first one of writing them.
    pub fn finish_records(&mut self) -> io::Result<()> {
        match on!(&mut self.run, run => run.backend.experts_mut()) {
            Some(store) => store.finish_records(),
            None => Ok(()),
        }
    }

    /// Whether the CPU's share of the tail is worth having, if the gate has decided.
    pub fn gate_verdict(&self) -> Option<Verdict> {
        on!(&self.run, run => run.gate.as_ref().and_then(Gate::verdict))
    }

    /// The same with what it rests on, for a later gate.
    pub fn gate_finding(&self) -> Option<Finding> {
        on!(&self.run, run => run.gate.as_ref().and_then(Gate::finding))
    }

    /// The CPU's share of the tail for the next generated token, where it is measured.
    pub fn gate_share(&self) -> Option<f64> {
        on!(&self.run, run => run.gate.as_ref().map(Gate::share))
    }

    /// Bytes of cells that were streamed to the device so far.
    pub fn streamed_bytes(&self) -> u64 {
        on!(&self.run, run => run.cache.streamed_bytes())
    }

    /// Where the cells that are there lie now.
    pub fn spread(&self) -> Spread {
        on!(&self.run, run => run.cache.spread())
    }

    /// Changes where cells may be: window, share and slots, these to no more than the session was made with; it must be one that spills.
    /// Cells beyond the window go to host memory at once, and come back with the next token where it has grown. No token changes.
    ///
    /// # Errors
    /// If host memory has no room, or is refused.
    pub fn place(&mut self, placing: &Placing) -> Result<(), Error> {
        on!(&mut self.run, run => {
            run.share = placing.kv_share;
            run.gate = None;
            run.cache.place(&mut run.backend, placing)?;
            run.backend.finish()
        })
    }

    /// Takes tokens of a prompt, a ubatch at a time.
    ///
    /// # Errors
    /// If they do not fit, one is not in the vocabulary, or memory for cells is refused. The session then holds the tokens
    /// of the chunks that were done.
    pub fn prefill(&mut self, tokens: &[u32], mut wanted: Wanted<'_>) -> Result<(), Error> {
        self.check(tokens)?;
        let (model, options) = (self.model, &self.options);
        guarded(
            &mut self.has_panicked,
            || on!(&mut self.run, run => run.prefill(model, options, tokens, &mut wanted)),
        )
    }

    /// Makes the selected sequence one of `n` positions whose cells are random: as if a prompt had been taken, for measurements that do
    /// not want to wait for one.
    ///
    /// # Errors
    /// If they do not fit, or memory for cells is refused.
    pub fn fill(&mut self, n: usize, seed: u64) -> Result<(), Error> {
        self.truncate(0);
        self.check_room(n)?;
        let pool = &self.model.pool;
        on!(&mut self.run, run => {
            run.cache.fill(&mut run.backend, pool, n, seed)?;
            run.backend.finish()
        })
    }

    /// Takes one generated token; its logits are in [`Session::logits`] afterwards. Where cells are in host memory the CPU takes its
    /// share of attending them.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn decode(&mut self, token: u32) -> Result<(), Error> {
        self.check(&[token])?;
        let (model, options) = (self.model, &self.options);
        guarded(
            &mut self.has_panicked,
            || on!(&mut self.run, run => run.decode(model, options, token)),
        )
    }

    /// Takes tokens of several sequences, each of which is there once, as many at a time as go together: what each would give alone.
    /// `each` gets a part's number and what it [wants](Part::wants), once. The selected sequence stays that.
    ///
    /// # Errors
    /// As [`Session::prefill`]. Some of the sequences may have taken what they were given.
    ///
    /// # Panics
    /// If there is no such sequence, or nothing to take.
    pub fn step(
        &mut self,
        parts: &[Part<'_>],
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), Error> {
        for part in parts {
            let n_past = self.n_past_of(part.sequence);
            let n_past = n_past.expect("a sequence of this session");
            assert!(!part.tokens.is_empty(), "something to take");
            self.check_tokens(part.tokens)?;
            self.check_room_after(n_past, part.tokens.len())?;
        }
        let (model, options) = (self.model, &self.options);
        guarded(
            &mut self.has_panicked,
            || on!(&mut self.run, run => run.step(model, options, parts, each)),
        )
    }

    /// Whether a token's bits are the same as a prompt's and as a generated one.
    pub fn computes_alike(&self) -> bool {
        fn alike<B: Backend>(_: &Run<B>) -> bool {
            B::ALIKE
        }
        on!(&self.run, run => alike(run))
    }

    /// The logits `[V]` of the last token that [`Wanted::Last`] or [`Session::decode`] was for.
    pub fn logits(&self) -> &[f32] {
        on!(&self.run, run => run.backend.logits(1))
    }

    /// Forgets the tokens of the selected sequence but the first `n`. Layers with a window keep only a ring of cells: where what a token
    /// at `n` would see is gone, all tokens are forgotten. Returns how many are kept.
    pub fn truncate(&mut self, n: usize) -> usize {
        on!(&mut self.run, run => run.cache.truncate(n))
    }

    /// Removes some tokens of the selected sequence: those after them keep their positions, and later ones no longer see them. Positions are
    /// never shifted, so removing tokens makes no room. A range that reaches the end is cut off. Returns how many positions are
    /// taken then.
    pub fn remove(&mut self, positions: Range<usize>) -> usize {
        on!(&mut self.run, run => run.cache.remove(positions))
    }

    /// Bytes that a sequence takes beside those that it has, for so many tokens more.
    pub fn growth_bytes(&self, sequence: SequenceId, tokens: usize) -> u64 {
        on!(&self.run, run => run.cache.growth_bytes(sequence.0, tokens))
    }

    /// Whether there is room for so many tokens more of some sequences at the same time.
    pub fn has_room(&self, growing: impl Iterator<Item = (SequenceId, usize)>) -> bool {
        let growing = growing.map(|(sequence, tokens)| (sequence.0, tokens));
        on!(&self.run, run => run.cache.has_room(growing))
    }

    /// Positions of a sequence that are taken; `None`: it does not exist.
    pub fn n_past_of(&self, sequence: SequenceId) -> Option<usize> {
        on!(&self.run, run => run.cache.n_of(sequence.0))
    }

    /// An empty sequence.
    pub fn create(&mut self) -> SequenceId {
        SequenceId(on!(&mut self.run, run => run.cache.create()))
    }

    /// A sequence that begins with the first `n` tokens of another, or with none where that is not possible: as
    /// [`truncate`](Self::truncate) has it. Returns how many it has.
    ///
    /// # Panics
    /// If there is no such sequence.
    pub fn branch(&mut self, of: SequenceId, n: usize) -> (SequenceId, usize) {
        let selected = self.selected();
        assert!(self.select(of), "a sequence of this session");
        let branch = self.fork();
        self.select(branch);
        let kept = self.truncate(n);
        self.select(selected);
        (branch, kept)
    }

    /// A sequence that begins as a copy of the selected one. The two share the memory of what they have in common.
    pub fn fork(&mut self) -> SequenceId {
        SequenceId(on!(&mut self.run, run => run.cache.fork()))
    }

    /// The selected sequence.
    pub fn selected(&self) -> SequenceId {
        SequenceId(on!(&self.run, run => run.cache.selected()))
    }

    /// Selects a sequence. Returns whether it exists.
    pub fn select(&mut self, sequence: SequenceId) -> bool {
        on!(&mut self.run, run => run.cache.select(sequence.0))
    }

    /// Forgets a sequence that is not the selected one. Returns whether it existed.
    pub fn forget(&mut self, sequence: SequenceId) -> bool {
        on!(&mut self.run, run => run.cache.forget(sequence.0))
    }

    /// Writes the selected sequence's cells, the tokens that they are of, and a note to a file. Whatever happens, the file is then the old or
    /// the new one.
    ///
    /// # Errors
    /// If it cannot be written.
    ///
    /// # Panics
    /// If there are not as many tokens as positions.
    pub fn save(&self, tokens: &[u32], note: &str, path: &Path) -> Result<(), SessionFileError> {
        assert_eq!(tokens.len(), self.n_past(), "tokens of all positions");
        let origin = self.origin();
        on!(&self.run, run => run.cache.save(&run.backend, &origin, tokens, note, path))
    }

    /// Replaces the selected sequence by one from a file. After an error the sequence is as it was, or empty if memory
    /// ran out.
    ///
    /// # Errors
    /// If the file cannot be read, is damaged, or of another model or other cache types, or has no room.
    pub fn restore(&mut self, path: &Path) -> Result<Restored, SessionFileError> {
        let origin = self.origin();
        on!(&mut self.run, run => run.cache.restore(&mut run.backend, &origin, path))
    }

    fn origin(&self) -> Origin {
        let rotation = self.options.rotation(self.model.config());
        Origin {
            model: self.model.fingerprint(),
            rotated: (rotation.k, rotation.v),
        }
    }

    fn check(&self, tokens: &[u32]) -> Result<(), Error> {
        self.check_tokens(tokens)?;
        self.check_room(tokens.len())
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), Error> {
        let n_vocab = self.model.config().n_vocab;
        match tokens.iter().find(|&&t| t as usize >= n_vocab) {
            Some(&token) => Err(Error::Token { token, n_vocab }),
            None => Ok(()),
        }
    }

    fn check_room(&self, tokens: usize) -> Result<(), Error> {
        self.check_room_after(self.n_past(), tokens)
    }

    fn check_room_after(&self, n_past: usize, tokens: usize) -> Result<(), Error> {
        let n_ctx = self.options.n_ctx;
        if tokens > n_ctx - n_past {
            return Err(Error::ContextFull {
                n_ctx,
                n_past,
                tokens,
            });
        }
        Ok(())
    }
}

/// Cells a block of the cache.
pub const BLOCK_CELLS: usize = CELLS;

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that gives two steps launch by launch after a change, records the next one, and repeats it then; with a share a token takes half the time.
    #[test]
    fn a_gate_gets_to_its_verdict_where_steps_are_recorded() {
        let mut gate = Gate::of_tokens(0.5, SHARE_STEP);
        let (mut share_before, mut same, mut alone) = (0.5, 0, 0);
        let mut before = Stepped::Given;
        for token in 0..600 {
            let share = gate.share();
            let has_changed = share != share_before;
            same = if has_changed { 0 } else { same + 1 };
            let (stepped, extra_ms) = match same {
                0 => (Stepped::Given, 25.0),
                1 => (Stepped::Given, 5.0),
                2 => (Stepped::Recorded, 20.0),
                _ => (Stepped::Repeated, 0.0),
            };
            share_before = share;
            alone += usize::from(share == 0.0);
            let ms = extra_ms + 60.0 * (1.0 - share);
            let steps = [std::mem::replace(&mut before, stepped), stepped];
            match said(has_changed, same == 1, steps, token == 0) {
                Said::Nothing => {}
                Said::Other => gate.skip(),
                Said::Time => drop(gate.read(ms)),
            }
            if token == 20 {
                let verdict = gate.verdict().expect("known by then");
                assert_eq!((verdict.shares, verdict.amount), (true, 0.5));
            }
        }
        assert!(alone < 30, "{alone} of 600 tokens without the share");
    }
}
