//! A layer's way to the CPU and back, in the midst of a step: values handed over, as many taken back; between, the host looks at none of them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{START, Timer};
use crate::device::Device;
use crate::doorbell::Doorbell;
use crate::error::Error;
use crate::memory::Buffer;
use crate::product::Target;

/// Round trips between two looks at the time.
const ROUNDS: u32 = 64;

/// Values that go there and back.
#[derive(Debug)]
pub struct HandOver {
    timer: Timer,
    bell: Doorbell,
    values: Buffer<f32>,
    number: u32,
}

impl HandOver {
    /// Of so many values: as a layer has query heads times their size.
    pub fn new(device: &Device, values: usize) -> Result<Self, Error> {
        let timer = Timer::new(device)?;
        Ok(Self {
            bell: Doorbell::new(device, Target::Best, values, values)?,
            values: Buffer::zeroed(&timer.stream, values)?,
            timer,
            number: 0,
        })
    }

    /// Microseconds of a round trip.
    pub fn us(&mut self, time: Duration) -> Result<f64, Error> {
        let Self {
            timer,
            bell,
            values,
            number,
        } = self;
        let (n, first) = (values.len(), *number);
        let is_over = AtomicBool::new(false);
        let (seconds, rounds) = std::thread::scope(|scope| {
            scope.spawn(|| answer_all(bell, first, &is_over));
            let mut rounds = 0;
            let mut measure = || {
                let mut seconds = 0.0;
                while seconds < time.as_secs_f64() {
                    seconds += timer.seconds(|| {
                        (0..ROUNDS).try_for_each(|_| {
                            *number = number.wrapping_add(1);
                            bell.hand_over(&timer.stream, START, values, n)?;
                            bell.take_back(&timer.stream, START, values, n)
                        })
                    })?;
                    rounds += ROUNDS;
                }
                Ok::<f64, Error>(seconds)
            };
            let seconds = measure();
            is_over.store(true, Ordering::Release);
            seconds.map(|seconds| (seconds, rounds))
        })?;
        Ok(1e6 * seconds / f64::from(rounds))
    }
}

/// Answers every hand-over after number `first` with whatever is there.
fn answer_all(bell: &Doorbell, first: u32, is_over: &AtomicBool) {
    let mut number = first;
    loop {
        number = number.wrapping_add(1);
        while !bell.is_given(number) {
            if is_over.load(Ordering::Acquire) {
                return;
            }
            std::hint::spin_loop();
        }
        bell.answer(number, 0, 0, |_, _| ());
    }
}
