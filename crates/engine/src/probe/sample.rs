//! Repeated measurements, and how much time they may take.

use super::busy::Ticks;
use super::{Error, Progress};
use place::profile::Figure;
use std::time::{Duration, Instant};

/// Repetitions of every figure, at least.
pub const REPETITIONS_MIN: usize = 3;

/// More add nothing to a median.
const REPETITIONS_MAX: usize = 9;

/// Repetitions that a figure's time is cut into; the first, half as long, warms up.
const PARTS: u32 = 6;

/// How often a figure is measured where others use the processor meanwhile.
const TRIES: usize = 2;

/// A figure is disturbed if others took more than this share of the machine.
const DISTURBED_SHARE: f64 = 0.08;

/// And more than so many ticks: the system counts its own by sampling, ours exactly.
const DISTURBED_TICKS: f64 = 3.0;

/// Shares out the time that all figures together may take, tells how far they are, and ends them when the user asks. Remembers which
/// figures are to be doubted.
pub(super) struct Clock<'a> {
    progress: &'a mut dyn Progress,
    end: Instant,
    /// The most that one figure takes, warm-up included.
    figure_max: Duration,
    done: usize,
    total: usize,
    ticks: Box<dyn FnMut() -> Option<Ticks> + 'a>,
    /// Paths of figures that were measured while others used the processor.
    pub(super) disturbed: Vec<String>,
    /// Paths of figures for which there was no time.
    pub(super) guessed: Vec<String>,
}

/// Which figure: its path in a profile, what progress calls it, and what it is if there is no time for it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Which<'a> {
    pub(super) path: &'a str,
    pub(super) what: &'a str,
    pub(super) guess: Figure,
}

impl<'a> Clock<'a> {
    pub(super) fn new(
        progress: &'a mut dyn Progress,
        total: usize,
        limit: Duration,
        figure_max: Duration,
    ) -> Self {
        Self {
            progress,
            end: Instant::now() + limit,
            figure_max,
            done: 0,
            total,
            ticks: Box::new(Ticks::now),
            disturbed: Vec::new(),
            guessed: Vec::new(),
        }
    }

    /// Announces the next figure and says how long it may take.
    pub(super) fn step(&mut self, what: &str) -> Result<Duration, Error> {
        self.check()?;
        self.progress.step(what, self.done, self.total);
        let left = self.end.saturating_duration_since(Instant::now());
        let share = left / u32::try_from(self.total.saturating_sub(self.done).max(1)).unwrap_or(1);
        self.done += 1;
        Ok(share.min(self.figure_max))
    }

    /// Whether the time for all figures has passed: what comes now is guessed.
    pub(super) fn is_over(&self) -> bool {
        Instant::now() >= self.end
    }

    /// Measures one figure, again if others used the processor meanwhile.
    pub(super) fn once(
        &mut self,
        which: Which<'_>,
        mut measure: impl FnMut(&Self, Duration) -> Result<Figure, Error>,
    ) -> Result<Figure, Error> {
        let time = self.step(which.what)?;
        let mut best: Option<(f64, Figure)> = None;
        for _ in 0..TRIES {
            if self.is_over() {
                break;
            }
            let before = (self.ticks)();
            let figure = measure(self, time)?;
            let others = before.zip((self.ticks)()).map_or(0.0, |(before, now)| {
                if before.of_others(&now) > DISTURBED_TICKS {
                    before.others(&now)
                } else {
                    0.0
                }
            });
            if others <= DISTURBED_SHARE {
                return Ok(figure);
            }
            if best.is_none_or(|(least, _)| others < least) {
                best = Some((others, figure));
            }
        }
        let doubts = match best {
            Some(_) => &mut self.disturbed,
            None => &mut self.guessed,
        };
        doubts.push(which.path.to_owned());
        Ok(best.map_or(which.guess, |(_, figure)| figure))
    }

    /// Measures one figure: `repeat` works for about the time it is given and returns a value.
    pub(super) fn sample(
        &mut self,
        which: Which<'_>,
        mut repeat: impl FnMut(Duration) -> Result<f64, Error>,
    ) -> Result<Figure, Error> {
        self.once(which, |clock, time| {
            let (begun, part) = (Instant::now(), time / PARTS);
            repeat(part / 2)?;
            let mut values = Vec::with_capacity(REPETITIONS_MAX);
            while values.len() < REPETITIONS_MIN
                || (values.len() < REPETITIONS_MAX && begun.elapsed() + part <= time)
            {
                clock.check()?;
                values.push(repeat(part)?);
                if clock.is_over() {
                    break;
                }
            }
            Ok(figure(&values))
        })
    }

    /// Fails if the user asks to stop.
    pub(super) fn check(&self) -> Result<(), Error> {
        if self.progress.interrupted() {
            return Err(Error::Interrupted);
        }
        Ok(())
    }

    /// A figure is to be doubted as much as the one that it was made of.
    pub(super) fn doubt_like(&mut self, of: &str, path: &str) {
        for doubts in [&mut self.disturbed, &mut self.guessed] {
            let has = |path: &str| doubts.iter().any(|p| p == path);
            if has(of) && !has(path) {
                doubts.push(path.to_owned());
            }
        }
    }

    /// Tells something worth a line.
    pub(super) fn note(&mut self, text: &str) {
        self.progress.note(text);
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

    const SECOND: Duration = Duration::from_secs(1);

    fn which(what: &str) -> Which<'_> {
        Which {
            path: what,
            what,
            guess: Figure::exact(-1.0),
        }
    }

    #[test]
    fn time_is_shared_out_and_an_interruption_heard() {
        let mut patience = Patience(100.into(), Vec::new());
        let limit = Duration::from_millis(200);
        let mut clock = Clock::new(&mut patience, 3, limit, Duration::from_millis(30));
        assert_eq!(clock.step("a").unwrap(), Duration::from_millis(30));
        clock.ticks = Box::new(|| None);
        let mut calls = 0;
        let mut count = |_| {
            calls += 1;
            Ok(f64::from(calls))
        };
        let most = clock.sample(which("b"), &mut count).unwrap();
        let middle = (2 + REPETITIONS_MAX + 1) as f64 / 2.0;
        assert_eq!(most.value, middle, "2, 3, ...: the first warms up");
        // No time is left: nothing is measured.
        (clock.end, calls) = (Instant::now(), 0);
        let mut count = |_| {
            calls += 1;
            Ok(f64::from(calls))
        };
        assert_eq!(clock.sample(which("c"), &mut count).unwrap().value, -1.0);
        assert_eq!(calls, 0);
        assert_eq!((clock.guessed.len(), clock.disturbed.len()), (1, 0));
        assert_eq!(clock.guessed[0], "c");
        drop(clock);
        assert_eq!(patience.1, [(0, 3), (1, 3), (2, 3)]);
        let mut patience = Patience(3.into(), Vec::new());
        let mut clock = Clock::new(&mut patience, 1, SECOND, SECOND);
        assert!(matches!(
            clock.sample(which("d"), |_| Ok(1.0)),
            Err(Error::Interrupted)
        ));
    }

    #[test]
    fn time_that_ends_meanwhile_cuts_repetitions() {
        let mut silent = ();
        let mut clock = Clock::new(&mut silent, 1, Duration::from_millis(5), SECOND);
        clock.ticks = Box::new(|| None);
        let mut calls = 0;
        let figure = clock.sample(which("a"), |_| {
            calls += 1;
            std::thread::sleep(Duration::from_millis(6));
            Ok(7.0)
        });
        assert_eq!((figure.unwrap().value, calls), (7.0, 2));
        assert_eq!(clock.guessed.len(), 0);
    }

    #[test]
    fn what_is_disturbed_is_measured_again_and_then_marked() {
        use super::super::busy::tests::ticks;
        let measure = |others: [f64; 4]| {
            let mut now = 0;
            let mut silent = ();
            let mut clock = Clock::new(&mut silent, 1, SECOND, SECOND);
            // Asked before and after each try.
            clock.ticks = Box::new(move || {
                now += 1;
                let all = 100.0 * f64::from(now);
                Some(ticks(all, 0.0, others[..now as usize].iter().sum()))
            });
            let mut tries = 0.0;
            let figure = clock.once(which("a"), |_, _| {
                tries += 1.0;
                Ok(Figure::exact(tries))
            });
            let disturbed = clock.disturbed.len();
            (figure.unwrap().value, tries, disturbed)
        };
        assert_eq!(measure([0.0, 5.0, 0.0, 0.0]), (1.0, 1.0, 0), "not much");
        assert_eq!(measure([0.0, 20.0, 0.0, 0.0]), (2.0, 2.0, 0));
        assert_eq!(
            measure([0.0, 20.0, 0.0, 30.0]),
            (1.0, 2.0, 1),
            "the less disturbed one"
        );
        assert_eq!(measure([0.0, 30.0, 0.0, 20.0]), (2.0, 2.0, 1));
    }
}
