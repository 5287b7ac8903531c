//! Repeated measurements, and how much time they may take.

use super::{Error, Progress};
use place::profile::Figure;
use std::time::{Duration, Instant};

/// Repetitions of every figure, at least.
pub const REPETITIONS_MIN: usize = 3;

/// More add nothing to a median.
const REPETITIONS_MAX: usize = 9;

/// The most that one figure takes, warm-up included.
const FIGURE_MAX: Duration = Duration::from_millis(300);

/// Repetitions that a figure's time is cut into; the first, half as long, warms up.
const PARTS: u32 = 6;

/// Shares out the time that all figures together may take, tells how far they are, and ends them when the user asks.
pub(super) struct Clock<'a> {
    progress: &'a mut dyn Progress,
    end: Instant,
    done: usize,
    total: usize,
}

impl<'a> Clock<'a> {
    pub(super) fn new(progress: &'a mut dyn Progress, total: usize, limit: Duration) -> Self {
        Self {
            progress,
            end: Instant::now() + limit,
            done: 0,
            total,
        }
    }

    /// Announces the next figure and says how long it may take.
    pub(super) fn step(&mut self, what: &str) -> Result<Duration, Error> {
        self.check()?;
        self.progress.step(what, self.done, self.total);
        let left = self.end.saturating_duration_since(Instant::now());
        let share = left / u32::try_from(self.total.saturating_sub(self.done).max(1)).unwrap_or(1);
        self.done += 1;
        Ok(share.min(FIGURE_MAX))
    }

    /// Measures one figure: `repeat` works for about the time it is given and returns a value.
    pub(super) fn sample(
        &mut self,
        what: &str,
        mut repeat: impl FnMut(Duration) -> f64,
    ) -> Result<Figure, Error> {
        let time = self.step(what)?;
        let (begun, part) = (Instant::now(), time / PARTS);
        repeat(part / 2);
        let mut values = Vec::with_capacity(REPETITIONS_MAX);
        while values.len() < REPETITIONS_MIN
            || (values.len() < REPETITIONS_MAX && begun.elapsed() + part <= time)
        {
            self.check()?;
            values.push(repeat(part));
        }
        Ok(figure(&values))
    }

    /// Fails if the user asks to stop.
    pub(super) fn check(&self) -> Result<(), Error> {
        if self.progress.interrupted() {
            return Err(Error::Interrupted);
        }
        Ok(())
    }
}

/// Median and spread of readings, which are times or rates: numbers, and at least one.
pub(super) fn figure(readings: &[f64]) -> Figure {
    Figure::of_readings(readings).expect("there are readings, and clocks give numbers")
}

/// Calls `work` until `time` has passed, and says how long one call took, in seconds.
pub(super) fn seconds_a_call(time: Duration, mut work: impl FnMut()) -> f64 {
    let begun = Instant::now();
    let mut calls = 0_u32;
    loop {
        work();
        calls += 1;
        let spent = begun.elapsed();
        if spent >= time {
            return spent.as_secs_f64() / f64::from(calls);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stops after some questions.
    struct Patience(std::cell::Cell<usize>, Vec<(usize, usize)>);

    impl Progress for Patience {
        fn step(&mut self, _what: &str, done: usize, total: usize) {
            self.1.push((done, total));
        }
        fn interrupted(&self) -> bool {
            self.0.set(self.0.get().saturating_sub(1));
            self.0.get() == 0
        }
    }

    #[test]
    fn time_is_shared_out_and_an_interruption_heard() {
        let mut patience = Patience(100.into(), Vec::new());
        let mut clock = Clock::new(&mut patience, 2, Duration::from_millis(20));
        assert!(clock.step("a").unwrap() <= Duration::from_millis(10));
        let mut calls = 0;
        let mut count = |_| {
            calls += 1;
            f64::from(calls)
        };
        let most = clock.sample("b", &mut count).unwrap();
        let middle = (2 + REPETITIONS_MAX + 1) as f64 / 2.0;
        assert_eq!(most.value, middle, "2, 3, ...: the first warms up");
        // No time is left, and yet every figure has its repetitions.
        (clock.end, calls) = (Instant::now(), 0);
        let mut count = |_| {
            calls += 1;
            f64::from(calls)
        };
        assert_eq!(clock.sample("c", &mut count).unwrap().value, 3.0);
        assert_eq!(calls as usize, 1 + REPETITIONS_MIN);
        assert_eq!(patience.1, [(0, 2), (1, 2), (2, 2)]);
        let mut patience = Patience(3.into(), Vec::new());
        let mut clock = Clock::new(&mut patience, 1, Duration::from_secs(1));
        assert!(matches!(
            clock.sample("d", |_| 1.0),
            Err(Error::Interrupted)
        ));
    }
}
