//! Values handed to the CPU and taken back: the same bits in both directions, and an end to waiting.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::Row;
use super::data::Random;
use crate::doorbell::Doorbell;
use crate::error::Error;
use crate::kernel::Start;
use crate::memory::Buffer;
use crate::product::Target;
use crate::stream::Stream;

/// Values that are handed over, fewer than a thread block has threads, and more.
const SIZES: [usize; 3] = [1, 1000, 5121];

/// Hand-overs of each size, one after the other without a wait of the host.
const ROUNDS: u32 = 20;

/// How long the device waits for an answer that does not come.
const PATIENCE: Duration = Duration::from_millis(20);

/// What the host answers: all bits of a value change.
fn answer_to(value: f32, number: u32) -> f32 {
    f32::from_bits(!value.to_bits() ^ number)
}

/// Hands values over again and again; what comes back goes out with the next.
pub(super) fn round_trips(
    stream: &Stream,
    target: Target,
    random: &mut Random,
    report: &mut impl FnMut(Row),
) -> Result<(), Error> {
    let mut row = Row::new("hand over, take back", "f32", "1, 1000, 5121 values");
    for n in SIZES {
        let bits: Vec<f32> = (0..n)
            .map(|_| f32::from_bits(random.bits() as u32))
            .collect();
        let bell = Doorbell::new(stream.device(), target, n, n)?;
        let mut values = Buffer::from_slice(stream, &bits)?;
        let is_over = AtomicBool::new(false);
        let done = std::thread::scope(|scope| {
            scope.spawn(|| answer_all(&bell, n, &is_over));
            let given = (1..=ROUNDS).try_for_each(|_| {
                bell.hand_over(stream, Start::Overlapped, &values, n)?;
                bell.take_back(stream, Start::Overlapped, &mut values, n)
            });
            let done = given.and(stream.synchronise());
            is_over.store(true, Ordering::Release);
            done
        });
        done?;
        let found = values.to_vec(stream)?;
        for (i, (found, value)) in found.iter().zip(&bits).enumerate() {
            let wanted = (1..=ROUNDS).fold(*value, answer_to);
            let (found, wanted) = (found.to_bits() as i32, wanted.to_bits() as i32);
            row.compare_int(found, wanted, || format!("value {i} of {n}"));
        }
        row.compare_int(i32::from(bell.was_late()), 0, || {
            "an answer came late".to_owned()
        });
    }
    report(row);
    Ok(())
}

fn answer_all(bell: &Doorbell, n: usize, is_over: &AtomicBool) {
    for number in 1..=ROUNDS {
        while !bell.is_given(number) {
            if is_over.load(Ordering::Acquire) {
                return;
            }
            std::hint::spin_loop();
        }
        bell.answer(number, n, n, |given, answer| {
            for (to, value) in answer.iter_mut().zip(given) {
                *to = answer_to(*value, number);
            }
        });
    }
}

/// Takes an answer back that does not come, twice: zeros, and the second is not waited for.
pub(super) fn no_answer(
    stream: &Stream,
    target: Target,
    report: &mut impl FnMut(Row),
) -> Result<(), Error> {
    let mut row = Row::new("take back", "f32", "an answer that does not come");
    let bell = Doorbell::new(stream.device(), target, 4, 4)?.patient(PATIENCE);
    let mut values = Buffer::from_slice(stream, &[1.0f32, 2.0, 3.0, 4.0])?;
    for _ in 1..=2 {
        bell.hand_over(stream, Start::After, &values, 4)?;
        bell.take_back(stream, Start::After, &mut values, 3)?;
    }
    for (i, found) in values.to_vec(stream)?.into_iter().enumerate() {
        let wanted = if i < 3 { 0.0 } else { 4.0 };
        row.compare(found, wanted, || format!("value {i}"));
    }
    for (late, what) in [(true, "it is told"), (false, "it is told once")] {
        row.compare_int(i32::from(bell.was_late()), i32::from(late), || {
            what.to_owned()
        });
    }
    report(row);
    Ok(())
}
