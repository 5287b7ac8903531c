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
        fetch.or_else(advised).or_else(|| memory_hint(cause))
    })
}

/// What to do where a GPU's memory ran out though a plan found room: another process has taken it since.
fn memory_hint(cause: &(dyn std::error::Error + 'static)) -> Option<String> {
    let of_engine = || match cause.downcast_ref() {
        Some(engine::Error::Device(error)) => Some(error),
        _ => None,
    };
    let error: &cuda::Error = cause.downcast_ref().or_else(of_engine)?;
    let hint = "something else has taken memory since this was planned; 'nvidia-smi' shows what, and --device-mem, a smaller --ctx or a lower --cache-type-k leave it room";
    error.is_out_of_memory().then(|| hint.to_owned())
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
    fn exhausted_device_memory_has_advice_wherever_it_comes_from() {
        let full = || cuda::Error::OutOfMemory {
            ordinal: 0,
            wanted_bytes: 2,
            free_bytes: 1,
            total_bytes: 3,
        };
        let room = engine::Error::DeviceRoom {
            what: "weights".to_owned(),
            all_bytes: 2,
            source: full(),
        };
        for error in [
            full().into(),
            engine::Error::Device(full()).into(),
            room.into(),
        ] {
            let error: anyhow::Error = error;
            let advice = hint(&error.context("a step")).unwrap();
            assert!(advice.contains("nvidia-smi"), "{advice}");
        }
        let other = cuda::Error::NoDevice {
            ordinal: 3,
            count: 1,
        };
        assert_eq!(hint(&engine::Error::Device(other).into()), None);
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
