//! `ps`: servers that run on this machine.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;
use std::{env, fmt};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use serde_json::Value;

use super::serve::KEY_VARIABLE;
use crate::cli::Common;
use crate::output::{print_json, println};
use crate::running::{self, Note};

/// A server that does not answer in this time is said not to.
const PATIENCE: Duration = Duration::from_secs(2);

/// The largest answer that is read.
const BYTES_MAX: u64 = 1 << 20;

/// Lists the servers that run on this machine, and what they do
///
/// Servers with a key are asked with the one in SPILLGATE_API_KEY.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  spillgate ps
  spillgate ps --json")]
pub struct PsArgs {}

#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    note: Note,
    /// As `/v1/status` has it.
    status: Option<Value>,
    /// Why there is none.
    problem: Option<String>,
}

pub fn run(_: &PsArgs, common: &Common) -> Result<()> {
    let rows: Vec<Row> = running::all()
        .into_iter()
        .map(|note| match status(&note) {
            Ok(status) => Row {
                note,
                status: Some(status),
                problem: None,
            },
            Err(error) => Row {
                note,
                status: None,
                problem: Some(format!("{error:#}")),
            },
        })
        .collect();
    if common.json {
        return print_json(&rows);
    }
    if rows.is_empty() {
        eprintln!("no server runs here; 'spillgate serve MODEL' starts one");
        return Ok(());
    }
    println(&format!(
        "{:>8}  {:<24} {:<26} {:>7} {:>7} {:>9}  UP",
        "PID", "MODEL", "URL", "IN WORK", "WAITING", "TOKENS"
    ))?;
    for row in &rows {
        println(&row.to_string())?;
    }
    Ok(())
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Note { pid, url, model } = &self.note;
        write!(f, "{pid:>8}  {model:<24} {url:<26} ")?;
        match (&self.status, &self.problem) {
            (Some(status), _) => {
                let number = |path: &str| {
                    let value = status.pointer(path).and_then(Value::as_u64);
                    value.unwrap_or_default()
                };
                let minutes = number("/uptime_s") / 60;
                write!(
                    f,
                    "{:>7} {:>7} {:>9}  {}:{:02} h",
                    number("/requests/running"),
                    number("/requests/waiting"),
                    number("/tokens/generated"),
                    minutes / 60,
                    minutes % 60
                )
            }
            (None, problem) => write!(f, "{}", problem.as_deref().unwrap_or("no answer")),
        }
    }
}

/// Asks a server.
fn status(note: &Note) -> Result<Value> {
    let address = note
        .url
        .strip_prefix("http://")
        .context("no such address")?;
    let address: SocketAddr = address.parse().context("no such address")?;
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE).context("no answer")?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let key = match env::var(KEY_VARIABLE) {
        Ok(key) if !key.contains(['\r', '\n']) => format!("Authorization: Bearer {key}\r\n"),
        _ => String::new(),
    };
    write!(
        stream,
        "GET /v1/status HTTP/1.0\r\nHost: localhost\r\n{key}\r\n"
    )?;
    let mut answer = String::new();
    match stream.take(BYTES_MAX).read_to_string(&mut answer) {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            bail!("no answer within {} s", PATIENCE.as_secs())
        }
        read => read.context("no answer")?,
    };
    let (head, body) = answer.split_once("\r\n\r\n").context("no answer")?;
    match head.split(' ').nth(1) {
        Some("200") => Ok(serde_json::from_str(body)?),
        Some("401") => bail!("it wants its key, in {KEY_VARIABLE}"),
        status => bail!("status {}", status.unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_hangs_is_said_to() {
        let server = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let note = Note {
            pid: 1,
            url: format!("http://{}", server.local_addr().unwrap()),
            model: "m".to_owned(),
        };
        let error = status(&note).unwrap_err();
        assert_eq!(format!("{error:#}"), "no answer within 2 s");
    }
}
