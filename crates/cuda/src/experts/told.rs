//! What the device tells the host of a layer's routing, and is told in turn, without the driver: whoever places experts, or computes some, must know
//! who is used.
//!
//! Many tokens: how many use each expert ([`Mixer::group`] tells, [`Mixer::told_many`] waits). One token: the device says who is used ([`Mixer::ask`]). If
//! all of them are in slots, as [`Slots::hold`](super::Slots::hold) said before the token began, it goes on by itself; else it waits for
//! where each expert is ([`Mixer::answer`]), and at the end for the outputs of those that are with the host ([`Mixer::give`]). All of that goes through
//! mapped memory (`kernels/bells.cuh`), so that it may be part of a graph.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use cpu::mixture::Routing;

use super::blob::{Held, Place};
use super::many::Many;
use super::{Layer, Mixer, Scores, Shape, cut};
use crate::device::Device;
use crate::doorbell::PATIENCE;
use crate::error::{Error, length};
use crate::kernel::{Arg, Launch, Start};
use crate::memory::{Buffer, Pinned};
use crate::stream::Stream;

/// Looks at the bell between two at the clock.
const LOOKS: u32 = 1000;

/// Words between two bells, so that each has a cache line, or two, of its own.
const BELL_WORDS: usize = 32;

/// Threads of `ask`, and what it tells if it waits: as in `kernels/experts.cu`.
const ASK_THREADS: usize = 256;
const WAITS: u32 = 2;

/// Outputs of experts that are not in a layer's list.
#[derive(Debug, Clone, Copy)]
pub enum Foreign<'a> {
    /// All are in it.
    None,
    /// `[T, used, D]`.
    Rows(&'a Pinned<f32>),
    /// What the host gives when it has answered this number ([`Mixer::ask`]).
    Asked(u32),
}

/// The bells, by their places.
#[derive(Debug, Clone, Copy)]
enum Bell {
    /// The device has told.
    Told,
    /// The host has said where experts are.
    Answered,
    /// The host's outputs are there.
    Given,
    /// The device has given up waiting.
    Late,
}

#[derive(Debug)]
struct Bells(Pinned<u32>);

impl Bells {
    fn new(device: &Device) -> Result<Self, Error> {
        Ok(Self(Pinned::new(device, 4 * BELL_WORDS)?))
    }

    fn address(&self, bell: Bell) -> u64 {
        self.0.address() + (bell as usize * BELL_WORDS * size_of::<u32>()) as u64
    }

    fn of(&self, bell: Bell) -> &AtomicU32 {
        // SAFETY: aligned, inside memory that lives as long as `self`, and the host's access to it is atomic.
        unsafe { AtomicU32::from_ptr(self.address(bell) as *mut u32) }
    }

    fn ring(&self, bell: Bell, number: u32) {
        self.of(bell).store(number, Ordering::Release);
    }
}

/// Waits until the device has told.
///
/// # Errors
/// If it does not: what failed there.
fn wait(stream: &Stream, is_told: impl Fn() -> bool) -> Result<(), Error> {
    let begun = Instant::now();
    loop {
        for _ in 0..LOOKS {
            if is_told() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        if begun.elapsed() > PATIENCE {
            stream.synchronise()?;
            return if is_told() { Ok(()) } else { Err(late()) };
        }
    }
}

fn late() -> Error {
    Error::Late {
        seconds: PATIENCE.as_secs(),
    }
}

/// What `group` tells of many tokens.
#[derive(Debug)]
pub(super) struct Told {
    bells: Bells,
    /// How many tokens use each expert.
    numbers: Pinned<u32>,
    /// Of what was told last, or is about to be.
    number: u32,
}

impl Told {
    fn new(device: &Device, experts: usize) -> Result<Self, Error> {
        Ok(Self {
            bells: Bells::new(device)?,
            numbers: Pinned::new(device, experts)?,
            number: 0,
        })
    }

    /// Where the next numbers go, their bell and what it is set to. Those before have been waited for.
    pub(super) fn next(&mut self) -> [Arg; 3] {
        self.number = self.number.wrapping_add(1);
        let bell = self.bells.address(Bell::Told);
        [
            self.numbers.address().into(),
            bell.into(),
            self.number.into(),
        ]
    }
}

/// What one token's layers ask, and the answers.
#[derive(Debug)]
pub(super) struct Asked {
    bells: Bells,
    /// Of each layer: the chosen experts, ascending, each plus 1, and whether it waits; 0: not known yet.
    told: Pinned<u32>,
    used: usize,
    /// The chosen experts of the layer that was asked about last.
    ids: Vec<u32>,
    /// The layer's input `[D]`.
    x: Pinned<f32>,
    /// Where each of the chosen is.
    places: Pinned<u64>,
    /// Outputs of the host `[used, D]`.
    rows: Pinned<f32>,
    /// By which the first thread block tells the others that those are there.
    flag: Buffer<u32>,
}

impl Asked {
    fn new(stream: &Stream, layers: usize, used: usize, width: usize) -> Result<Self, Error> {
        let device = stream.device();
        Ok(Self {
            bells: Bells::new(device)?,
            told: Pinned::new(device, layers * (used + 1))?,
            used,
            ids: Vec::with_capacity(used + 1),
            x: Pinned::new(device, width)?,
            places: Pinned::new(device, used)?,
            rows: Pinned::new(device, used * width)?,
            flag: Buffer::zeroed(stream, 1)?,
        })
    }

    /// What question `number`, from 1 on, tells.
    fn words(&self, op: &'static str, number: u32) -> Result<&[AtomicU32], Error> {
        let (n, all) = (self.used + 1, self.told.len());
        let at = (number as usize).wrapping_sub(1).saturating_mul(n);
        if at.saturating_add(n) > all {
            return length(op, "number", number as usize, all / n).map(|()| &[][..]);
        }
        let first = self.told[at..].as_ptr().cast::<AtomicU32>();
        // SAFETY: aligned, inside memory that lives as long as `self`, and the host's access to it is atomic.
        Ok(unsafe { std::slice::from_raw_parts(first, n) })
    }

    /// `rows` and all behind it that `down` has of them.
    fn args(&self, number: u32) -> [Arg; 6] {
        [
            self.rows.address().into(),
            self.bells.address(Bell::Given).into(),
            number.into(),
            (&self.flag).into(),
            (PATIENCE.as_nanos() as u64).into(),
            self.bells.address(Bell::Late).into(),
        ]
    }
}

/// A token's experts that a layer asks about.
#[derive(Debug)]
pub struct Question<'a> {
    /// The chosen ones `[used]`, ascending.
    pub ids: &'a [u32],
    /// Whether the device waits for an answer; else it knows them all to be in slots.
    pub waits: bool,
    /// The layer's input `[D]`, if it waits.
    pub x: &'a [f32],
    /// Where outputs of the host go, `[used, D]`.
    pub rows: &'a mut [f32],
}

impl Mixer {
    /// Whether the device has kernels for experts of many tokens.
    pub fn takes_many(&self) -> bool {
        self.formats.iter().all(|format| !format.many.is_empty())
    }

    /// From now on the host is told who is used: by [`Mixer::group`], and by [`Mixer::ask`] of one token, in up to `layers` layers. There is room for few tokens
    /// to be grouped, too.
    pub fn tell_host(&mut self, stream: &Stream, layers: usize) -> Result<(), Error> {
        let Shape { width, routing, .. } = self.shape;
        if self.many.is_none() {
            self.many = Some(Many::new(stream, &self.shape, self.tokens_max)?);
        }
        self.told = Some(Told::new(stream.device(), routing.experts)?);
        self.asked = Some(Asked::new(stream, layers, routing.used, width)?);
        Ok(())
    }

    fn asked(&self, op: &'static str) -> Result<&Asked, Error> {
        self.asked.as_ref().ok_or_else(|| Error::NoModule {
            module: format!("{op} without anybody to be told"),
        })
    }

    /// What `down` has of outputs that are elsewhere.
    pub(super) fn foreign(
        &self,
        op: &'static str,
        tokens: usize,
        foreign: Foreign<'_>,
    ) -> Result<[Arg; 6], Error> {
        let none = [0.into(), 0_u64.into()];
        let ready = |rows: Arg| [rows, Arg::NULL, none[0], Arg::NULL, none[1], Arg::NULL];
        Ok(match foreign {
            Foreign::None => ready(Arg::NULL),
            Foreign::Rows(rows) => {
                let wanted = tokens * self.shape.routing.used * self.shape.width;
                let short = wanted.saturating_sub(rows.len());
                length(op, "outputs that are missing", short, 0)?;
                ready(rows.address().into())
            }
            Foreign::Asked(number) => {
                length(op, "tokens that may ask", tokens, 1)?;
                self.asked(op)?.args(number)
            }
        })
    }

    /// Waits for what [`Mixer::group`] told last: how many tokens use each expert.
    pub fn told_many(&self, stream: &Stream) -> Result<&[u32], Error> {
        let Some(told) = &self.told else {
            return Ok(&[]);
        };
        let bell = told.bells.of(Bell::Told);
        wait(stream, || bell.load(Ordering::Acquire) == told.number)?;
        Ok(&told.numbers)
    }

    /// Numbers of questions begin anew. For when nothing that asks is under way.
    pub fn begin_token(&mut self) {
        if let Some(asked) = &mut self.asked {
            asked.told.fill(0);
            for bell in [Bell::Answered, Bell::Given] {
                asked.bells.ring(bell, 0);
            }
        }
    }

    /// Writes to the layer's list where one token's experts are: in slots, as `held` has them, or where the host says, which is asked as number `number`, which
    /// grows from 1 on. `x` `[D]` is the layer's input.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn ask(
        &mut self,
        stream: &Stream,
        start: Start,
        number: u32,
        layer: &Layer<'_>,
        held: Held<'_>,
        scores: Scores<'_>,
        x: &Buffer<f32>,
    ) -> Result<(), Error> {
        const OP: &str = "a question about experts";
        let list = self.check(OP, layer, 1)?;
        let Shape { width, routing, .. } = self.shape;
        let short = width.saturating_sub(x.len());
        length(OP, "inputs that are missing", short, 0)?;
        let choosing = self.choosing(OP, 1, scores)?;
        let asked = self.asked(OP)?;
        let told = asked.words(OP, number)?.as_ptr().addr() as u64;
        let args = [
            &choosing[..],
            &[
                x.into(),
                (width as i32).into(),
                held.list(OP, routing.experts)?.into(),
                told.into(),
                asked.x.address().into(),
                number.into(),
                asked.bells.address(Bell::Answered).into(),
                asked.places.address().into(),
                list.into(),
                (&asked.flag).into(),
                (PATIENCE.as_nanos() as u64).into(),
                asked.bells.address(Bell::Late).into(),
            ],
        ]
        .concat();
        let launch = Launch::new(1, ASK_THREADS)
            .shared(ask_bytes(&routing))
            .start(start);
        // SAFETY: the arguments are those of `ask`; lengths are checked, and answers are addresses of whole blobs of the layer's layout.
        unsafe { self.common.ask.launch(stream, launch, &args) }
    }

    /// Waits for a question.
    pub fn question(&mut self, stream: &Stream, number: u32) -> Result<Question<'_>, Error> {
        const OP: &str = "a question about experts";
        let words = self.asked(OP)?.words(OP, number)?;
        wait(stream, || {
            words.iter().all(|word| word.load(Ordering::Acquire) != 0)
        })?;
        let asked = self.asked.as_mut().expect("it was just looked at");
        let mut ids = std::mem::take(&mut asked.ids);
        ids.clear();
        let words = asked.words(OP, number)?.iter();
        ids.extend(words.map(|word| word.load(Ordering::Relaxed)));
        let waits = ids.pop() == Some(WAITS);
        ids.iter_mut().for_each(|id| *id -= 1);
        asked.ids = ids;
        Ok(Question {
            ids: &asked.ids,
            waits,
            x: &asked.x,
            rows: &mut asked.rows,
        })
    }

    /// Says where each of a token's experts is; `None`: with the host.
    pub fn answer(&mut self, number: u32, places: &[Option<Place>]) {
        if let Some(asked) = &mut self.asked {
            for (to, place) in asked.places.iter_mut().zip(places) {
                *to = place.map_or(0, Place::address);
            }
            asked.bells.ring(Bell::Answered, number);
        }
    }

    /// The outputs of the host are where they belong.
    pub fn give(&self, number: u32) {
        if let Some(asked) = &self.asked {
            asked.bells.ring(Bell::Given, number);
        }
    }

    /// Whether the device has ever given up waiting for the host.
    pub fn was_late(&self) -> bool {
        let asked = self.asked.as_ref();
        asked.is_some_and(|asked| asked.bells.of(Bell::Late).load(Ordering::Acquire) != 0)
    }
}

/// Shared memory of `ask`.
pub(super) fn ask_bytes(routing: &Routing) -> usize {
    cut::route_bytes(routing) + 4 * routing.used
}
