//! Ctrl-C: the first asks the current work to stop, one that is not heard ends the process.

use std::process;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context, Result};

static ASKED: AtomicBool = AtomicBool::new(false);
static UNHEARD: AtomicUsize = AtomicUsize::new(0);

/// Presses without an answer after which the process ends, as if nobody had caught them.
const UNHEARD_MAX: usize = 2;

/// Catches Ctrl-C from now on. To be called once.
pub fn catch() -> Result<()> {
    ctrlc::set_handler(|| {
        ASKED.store(true, Ordering::Relaxed);
        if UNHEARD.fetch_add(1, Ordering::Relaxed) + 1 >= UNHEARD_MAX {
            process::exit(130);
        }
    })
    .context("cannot catch Ctrl-C")
}

/// Whether Ctrl-C was pressed since [`reset`].
pub fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}

/// Forgets what was pressed: new work begins.
pub fn reset() {
    ASKED.store(false, Ordering::Relaxed);
    UNHEARD.store(0, Ordering::Relaxed);
}
