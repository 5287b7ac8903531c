//! Experts of a session: what is kept of them between processes, what is written down, and how they were served.

use std::fs::File;
use std::hint::black_box;
use std::io::{self, LineWriter, Write};
use std::path::Path;
use std::sync::Once;

use anyhow::{Context, Result};
use engine::experts::{Counts, ExpertPlacing, HitCurve, Kept, Layer, model_key, placed};
use engine::model::Contents;
use engine::plan::describe::describe;
use engine::plan::machine;
use engine::session::Session;
use gguf::GgufFile;
use serde::Serialize;

use crate::flags::RecordFlags;
use crate::settings;

/// What is known of the use of a file's experts.
pub fn hits(file: &GgufFile, contents: Contents) -> Option<HitCurve> {
    let layers = Layer::of_model(&describe(file).ok()?);
    if layers.is_empty() {
        return None;
    }
    let profile = Kept::open().ok()?;
    let profile = profile.profile(&model_key(file, contents), &layers)?;
    Some(HitCurve::new(&layers, &profile))
}

/// A model's experts, for what is kept of them.
pub struct Experts {
    /// What tells the model from others.
    key: String,
    layers: Vec<Layer>,
    threads: usize,
}

impl Experts {
    /// Those of a file that so many threads compute with.
    pub fn new(file: &GgufFile, contents: Contents, threads: usize) -> Self {
        Self {
            key: model_key(file, contents),
            layers: describe(file).map_or_else(|_| Vec::new(), |model| Layer::of_model(&model)),
            threads,
        }
    }

    fn placed(&self, device: engine::model::ComputeDevice, placing: &ExpertPlacing) -> String {
        let machine = machine::unmeasured(settings::gpu(device).as_ref());
        let cache_bytes = placing.settings.cache_bytes;
        placed(&machine.key, self.threads, &self.layers, cache_bytes)
    }

    /// Recalls what was learnt, for a session.
    pub fn recall(&self, device: engine::model::ComputeDevice, placing: &mut ExpertPlacing) {
        if let Ok(kept) = Kept::open() {
            let placed = self.placed(device, placing);
            placing.recalled = kept.recall(&self.key, &self.layers, &placed);
        }
    }

    /// Keeps what a session has learnt.
    pub fn keep(&self, session: &Session<'_>) {
        let options = session.options();
        let Some(((profile, verdicts), placing)) =
            session.expert_findings().zip(options.experts.as_ref())
        else {
            return;
        };
        let placed = self.placed(options.device, placing);
        let kept = Kept::open().map_err(|e| e.to_string()).and_then(|kept| {
            let written = kept.keep(&self.key, &placed, profile, verdicts);
            written.map_err(|e| e.to_string())
        });
        if let Err(error) = kept {
            tracing::warn!("what was learnt of the experts could not be kept: {error}");
        }
    }
}

/// Starts threads that copy memory for nothing, until the program ends.
pub fn start_hogs(n: usize) {
    /// Bytes that each copies: more than caches hold.
    const BYTES: usize = 64 << 20;
    static STARTED: Once = Once::new();
    if n == 0 {
        return;
    }
    STARTED.call_once(|| {
        for _ in 0..n {
            std::thread::spawn(|| {
                let (mut from, mut to) = (vec![1_u8; BYTES], vec![0_u8; BYTES]);
                loop {
                    to.copy_from_slice(black_box(&from));
                    std::mem::swap(&mut from, &mut to);
                }
            });
        }
    });
}

/// Begins the records that are asked for. A record is in its file once it is made.
pub fn record(session: &mut Session<'_>, flags: &RecordFlags) -> Result<()> {
    let create = |path: &Path| -> Result<Box<dyn Write + Send>> {
        let file = File::create(path);
        let file = file.with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Box::new(LineWriter::new(file)))
    };
    if let Some(path) = &flags.record_routing {
        session.record_routing(create(path)?)?;
    }
    if let Some(path) = &flags.record_windows {
        let machine = machine::unmeasured(settings::gpu(session.options().device).as_ref());
        session.record_windows(create(path)?, &machine.key.cpu)?;
    }
    Ok(())
}

/// Says that records are not whole, if they are not.
pub fn recorded(ended: io::Result<()>) -> Result<()> {
    ended.context("cannot write all of what was recorded")
}

/// How experts were served.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Report {
    prompt: Counts,
    generated: Counts,
}

impl Report {
    /// Of a session whose experts are not all where they are computed.
    pub fn of(session: &Session<'_>) -> Option<Self> {
        let [prompt, generated] = session.expert_counts()?;
        Some(Self { prompt, generated })
    }

    /// A line for each kind of step that there was.
    pub fn lines(&self) -> String {
        let line = |what: &str, counts: &Counts| {
            if counts.experts == 0 {
                return String::new();
            }
            let part = |n: u64| n as f64 / counts.experts as f64 * 100.0;
            format!(
                "experts, {what}: {:.1} % in the cache, {:.1} % streamed, {:.1} % by the CPU\n",
                part(counts.resident),
                part(counts.streamed),
                part(counts.host),
            )
        };
        line("prompts", &self.prompt) + &line("generated tokens", &self.generated)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_what_was_served_are_in_lines() {
        let report = Report {
            prompt: Counts::default(),
            generated: Counts {
                experts: 200,
                resident: 130,
                streamed: 20,
                host: 50,
                ..Counts::default()
            },
        };
        assert_eq!(
            report.lines(),
            "experts, generated tokens: 65.0 % in the cache, 10.0 % streamed, 25.0 % by the CPU\n"
        );
    }
}
