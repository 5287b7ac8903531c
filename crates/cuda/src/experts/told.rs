//! What the device tells the host of a layer's routing, and is told in turn, without the driver: whoever places experts, or computes some, must know
//! who is used.
//!
//! Many tokens: how many use each expert ([`Mixer::group`] tells, [`Mixer::told_many`] waits). One token: the device asks ([`Mixer::ask`]), waits for
//! where each expert is ([`Mixer::answer`]), and at the end for the outputs of those that are with the host ([`Mixer::give`]). All of that goes through
//! mapped memory, each way with a bell (`kernels/bells.cuh`), so that it may be part of a graph.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use cpu::mixture::Routing;

use super::blob::Place;
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

/// Threads of `ask`: as in `kernels/experts.cu`.
const ASK_THREADS: usize = 256;

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

    /// Waits until the device has told `number`.
    ///
    /// # Errors
    /// If it does not: what failed there.
    fn wait(&self, stream: &Stream, number: u32) -> Result<(), Error> {
        let bell = self.of(Bell::Told);
        let is_told = || bell.load(Ordering::Acquire) == number;
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
    /// Chosen experts `[used]`, ascending.
    ids: Pinned<u32>,
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
    fn new(stream: &Stream, used: usize, width: usize) -> Result<Self, Error> {
        let device = stream.device();
        Ok(Self {
            bells: Bells::new(device)?,
            ids: Pinned::new(device, used)?,
            x: Pinned::new(device, width)?,
            places: Pinned::new(device, used)?,
            rows: Pinned::new(device, used * width)?,
            flag: Buffer::zeroed(stream, 1)?,
        })
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
    /// The layer's input `[D]`.
    pub x: &'a [f32],
    /// Where outputs of the host go, `[used, D]`.
    pub rows: &'a mut [f32],
}

impl Mixer {
    /// Whether the device has kernels for experts of many tokens.
    pub fn takes_many(&self) -> bool {
        self.formats.iter().all(|format| !format.many.is_empty())
    }

    /// From now on the host is told who is used: by [`Mixer::group`], and by [`Mixer::ask`] of one token. There is room for few tokens to be grouped,
    /// too.
    pub fn tell_host(&mut self, stream: &Stream) -> Result<(), Error> {
        let Shape { width, routing, .. } = self.shape;
        if self.many.is_none() {
            self.many = Some(Many::new(stream, &self.shape, self.tokens_max)?);
        }
        self.told = Some(Told::new(stream.device(), routing.experts)?);
        self.asked = Some(Asked::new(stream, routing.used, width)?);
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
        told.bells.wait(stream, told.number)?;
        Ok(&told.numbers)
    }

    /// Numbers of questions begin anew. For when nothing that asks is under way.
    pub fn begin_token(&mut self) {
        if let Some(asked) = &self.asked {
            for bell in [Bell::Told, Bell::Answered, Bell::Given] {
                asked.bells.ring(bell, 0);
            }
        }
    }

    /// Asks the host where one token's experts are, as number `number`, which grows from 1 on, and writes it to the layer's list. `x` `[D]` is the layer's
    /// input.
    #[allow(clippy::too_many_arguments, reason = "one operation's operands")]
    pub fn ask(
        &mut self,
        stream: &Stream,
        start: Start,
        number: u32,
        layer: &Layer<'_>,
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
        let args = [
            &choosing[..],
            &[
                x.into(),
                (width as i32).into(),
                asked.ids.address().into(),
                asked.x.address().into(),
                asked.bells.address(Bell::Told).into(),
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
        self.asked("a question about experts")?
            .bells
            .wait(stream, number)?;
        let asked = self.asked.as_mut().expect("it was just looked at");
        Ok(Question {
            ids: &asked.ids,
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
