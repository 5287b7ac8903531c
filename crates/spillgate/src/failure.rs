//! Errors as the user sees them: what, why, and where it is known, what to do.

use std::fmt;
use std::io;
use std::process::ExitCode;

use engine::fetch::FetchError;
use engine::probe;

use crate::output::{Paint, stderr_has_colour};

/// The exit status after an interruption, as shells count it: 128 + SIGINT.
const INTERRUPTED: u8 = 130;

/// A mistake of the user, with what to do about it.
#[derive(Debug)]
pub struct Advised {
    what: String,
    hint: String,
}

impl Advised {
    /// An error with a line of advice.
    pub fn new(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            hint: hint.into(),
        }
    }
}

impl fmt::Display for Advised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Advised {}

/// The user pressed Ctrl-C, and everything that matters was put away.
#[derive(Debug)]
pub struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Prints an error and says what the process ends with. A reader that closed stdout has what it wanted.
pub fn report(error: &anyhow::Error) -> ExitCode {
    if is_broken_pipe(error) {
        return ExitCode::SUCCESS;
    }
    let paint = Paint::new(stderr_has_colour());
    let mut message = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        // Many errors already end with what caused them.
        if !message.contains(&cause) {
            message = format!("{message}: {cause}");
        }
    }
    eprintln!("{} {message}", paint.bold_red("error:"));
    if let Some(hint) = hint(error) {
        eprintln!("{} {hint}", paint.bold("hint:"));
    }
    if is_interruption(error) {
        ExitCode::from(INTERRUPTED)
    } else {
        ExitCode::FAILURE
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let broken = |e: &io::Error| e.kind() == io::ErrorKind::BrokenPipe;
    // Only where it comes unwrapped, from writing to stdout: a pipe that breaks elsewhere is an error.
    error.downcast_ref::<io::Error>().is_some_and(broken)
}

fn is_interruption(error: &anyhow::Error) -> bool {
    error.is::<Interrupted>()
        || matches!(error.downcast_ref(), Some(FetchError::Interrupted))
        || matches!(error.downcast_ref(), Some(probe::Error::Interrupted))
}

fn hint(error: &anyhow::Error) -> Option<String> {
    error.chain().find_map(|cause| {
        let fetch = cause
            .downcast_ref::<FetchError>()
            .and_then(FetchError::hint)
            .map(str::to_owned);
        let advised = || cause.downcast_ref::<Advised>().map(|a| a.hint.clone());
        fetch.or_else(advised)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn advice_is_found_below_context() {
        let error = Err::<(), _>(Advised::new("no", "say yes"))
            .context("asking")
            .unwrap_err();
        assert_eq!(hint(&error).as_deref(), Some("say yes"));
        assert!(hint(&anyhow::anyhow!("plain")).is_none());
    }

    #[test]
    fn a_closed_stdout_is_no_error() {
        assert!(is_broken_pipe(
            &io::Error::from(io::ErrorKind::BrokenPipe).into()
        ));
        assert!(!is_broken_pipe(
            &io::Error::from(io::ErrorKind::NotFound).into()
        ));
    }
}
