//! Progress on stderr: bars on a terminal, a few lines elsewhere.

use std::io::IsTerminal;
use std::time::Duration;

use engine::eval::tiers;
use engine::{fetch, probe};
use indicatif::{ProgressBar, ProgressStyle};

use crate::interrupt;
use crate::output::human_bytes;

/// A bar for bytes, of a download or of a model that is loaded.
pub struct Bar {
    verb: &'static str,
    bar: Option<ProgressBar>,
    on_terminal: bool,
    quiet: bool,
}

impl Bar {
    /// A bar that begins with a verb, as in "fetching".
    pub fn new(verb: &'static str) -> Self {
        Self {
            verb,
            bar: None,
            on_terminal: std::io::stderr().is_terminal(),
            quiet: false,
        }
    }

    /// A bar that says nothing where there is no terminal to draw on: for what takes a moment.
    pub fn on_terminal(verb: &'static str) -> Self {
        let mut bar = Self::new(verb);
        bar.quiet = true;
        bar
    }

    /// Shows the bar, or says once what goes on.
    pub fn start(&mut self, name: &str, done_bytes: u64, total_bytes: u64) {
        if !self.on_terminal && self.quiet {
            return;
        }
        if !self.on_terminal {
            let so_far = match done_bytes {
                0 => String::new(),
                n => format!(", {} already there", human_bytes(n)),
            };
            eprintln!(
                "{} {name} ({}{so_far})",
                self.verb,
                human_bytes(total_bytes)
            );
            return;
        }
        let style = ProgressStyle::with_template(
            "{prefix} {msg} [{wide_bar}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
        )
        .expect("the template is a constant")
        .progress_chars("=> ");
        let bar = ProgressBar::new(total_bytes)
            .with_style(style)
            .with_prefix(self.verb)
            .with_message(name.to_owned());
        bar.set_position(done_bytes);
        // What is there already says nothing about the speed.
        bar.reset_eta();
        self.bar = Some(bar);
    }

    /// Moves the bar.
    pub fn set(&self, done_bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(done_bytes);
        }
    }

    /// Takes the bar away.
    pub fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl fetch::Progress for Bar {
    fn begin(&mut self, file: &str, done_bytes: u64, total_bytes: u64) {
        self.start(file, done_bytes, total_bytes);
    }

    fn advance(&mut self, done_bytes: u64) {
        self.set(done_bytes);
    }

    fn finish(&mut self) {
        self.clear();
    }

    fn note(&mut self, text: &str) {
        note(self.bar.as_ref(), text);
    }

    fn interrupted(&self) -> bool {
        interrupt::asked()
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Says something beside a bar.
fn note(bar: Option<&ProgressBar>, text: &str) {
    match bar {
        Some(bar) => bar.suspend(|| eprintln!("note: {text}")),
        None => eprintln!("note: {text}"),
    }
}

/// How far the measurements of the machine are.
pub struct Steps {
    bar: Option<ProgressBar>,
    on_terminal: bool,
}

impl Steps {
    /// Nothing is shown before the first step.
    pub fn new() -> Self {
        Self {
            bar: None,
            on_terminal: std::io::stderr().is_terminal(),
        }
    }
}

impl probe::Progress for Steps {
    fn step(&mut self, what: &str, done: usize, total: usize) {
        if !self.on_terminal {
            if done == 0 {
                eprintln!("measuring this machine: {total} figures, up to 20 seconds");
            }
            return;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let style = ProgressStyle::with_template("measuring [{bar:24}] {pos}/{len} {wide_msg}")
                .expect("the template is a constant")
                .progress_chars("=> ");
            ProgressBar::new(total as u64).with_style(style)
        });
        bar.set_position(done as u64);
        bar.set_message(what.to_owned());
    }

    fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn note(&mut self, text: &str) {
        note(self.bar.as_ref(), text);
    }

    fn interrupted(&self) -> bool {
        interrupt::asked()
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        probe::Progress::finish(self);
    }
}

/// How far a long evaluation of several parts is.
pub struct Parts {
    bar: Option<ProgressBar>,
    on_terminal: bool,
}

impl Parts {
    /// Nothing is shown before the first part.
    pub fn new() -> Self {
        Self {
            bar: None,
            on_terminal: std::io::stderr().is_terminal(),
        }
    }

    /// Takes the bar away.
    pub fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl tiers::Progress for Parts {
    fn step(&mut self, what: &str, total: u64) {
        if !self.on_terminal {
            eprintln!("measuring {what}");
            return;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let template =
                "measuring {wide_msg} [{bar:24}] {percent} % after {elapsed}, {eta} left";
            let style = ProgressStyle::with_template(template)
                .expect("the template is a constant")
                .progress_chars("=> ");
            let bar = ProgressBar::new(total).with_style(style);
            bar.enable_steady_tick(Duration::from_secs(1));
            bar
        });
        bar.set_message(what.to_owned());
    }

    fn advance(&mut self, work: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(work);
        }
    }

    fn interrupted(&self) -> bool {
        interrupt::asked()
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        self.clear();
    }
}

/// How far an evaluation of several tasks is.
pub struct Samples {
    bar: Option<ProgressBar>,
    per_task: usize,
    task_done: usize,
    task_score: f64,
}

impl Samples {
    /// So many tasks of so many samples.
    pub fn new(tasks: usize, per_task: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template(
                "{wide_msg} [{bar:24}] {pos}/{len} after {elapsed}, {eta} left",
            )
            .expect("the template is a constant")
            .progress_chars("=> ");
            let total = tasks as u64 * per_task as u64;
            let bar = ProgressBar::new(total).with_style(style);
            // A sample may take minutes: a clock that goes on says that something does.
            bar.enable_steady_tick(Duration::from_secs(1));
            bar
        });
        Self {
            bar,
            per_task,
            task_done: 0,
            task_score: 0.0,
        }
    }

    /// A sample of this task is done. Where there is no bar, each task that is through gets a line.
    pub fn done(&mut self, task: &str, score: f64) {
        self.task_done += 1;
        self.task_score += score;
        let so_far = 100.0 * self.task_score / self.task_done as f64;
        let line = format!("{task}: {so_far:.1} %");
        match &self.bar {
            Some(bar) => {
                bar.set_message(line);
                bar.inc(1);
            }
            None if self.task_done == self.per_task => eprintln!("{line}"),
            None => {}
        }
        if self.task_done == self.per_task {
            (self.task_done, self.task_score) = (0, 0.0);
        }
    }

    /// Takes the bar away.
    pub fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Samples {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Which kernels have been tested.
pub struct Kernels(Option<ProgressBar>);

impl Kernels {
    /// Shows that testing has begun.
    pub fn new() -> Self {
        if !std::io::stderr().is_terminal() {
            eprintln!("testing every kernel: up to five minutes");
            return Self(None);
        }
        let style =
            ProgressStyle::with_template("testing {spinner} {elapsed} {pos} kernels, {wide_msg}")
                .expect("the template is a constant");
        let bar = ProgressBar::new_spinner().with_style(style);
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(Some(bar))
    }

    /// Says what was tested last.
    pub fn done(&self, what: String) {
        if let Some(bar) = &self.0 {
            bar.inc(1);
            bar.set_message(what);
        }
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}
