//! The configuration file: flags that hold where they are not typed.
//!
//! ```toml
//! [serve]
//! ctx = 16384
//! parallel = 4
//! cache-type-k = "q8_0"
//! ```
//!
//! A section is a command, a key one of its flags. What is typed comes later on the command line, and so wins; a flag that may be repeated
//! has both.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context, Result};
use clap::CommandFactory;
use toml::{Table, Value};

use crate::cli::Cli;
use crate::failure::Advised;

/// Where the file is looked for, instead of the usual place.
const VARIABLE: &str = "SPILLGATE_CONFIG";

/// The largest file that is read.
const BYTES_MAX: u64 = 1 << 20;

/// The command line with what the file says put in.
pub fn arguments(typed: Vec<OsString>) -> Result<Vec<OsString>> {
    let (path, is_asked) = match asked(&typed) {
        Some(path) => (path, true),
        None => match usual() {
            Some(path) => (path, false),
            None => return Ok(typed),
        },
    };
    if !is_asked && !path.exists() {
        return Ok(typed);
    }
    let size = fs::metadata(&path)
        .with_context(|| format!("cannot read {}", path.display()))?
        .len();
    if size > BYTES_MAX {
        let what = format!("{} has {size} bytes", path.display());
        return Err(Advised::new(what, "a configuration has a few lines").into());
    }
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    put_in(typed, &text, &path)
}

/// The file that `--config` names.
fn asked(typed: &[OsString]) -> Option<PathBuf> {
    let mut rest = typed.iter().skip(1);
    while let Some(word) = rest.next() {
        let Some(text) = word.to_str() else { continue };
        if text == "--" {
            return None;
        }
        if text == "--config" {
            return rest.next().map(PathBuf::from);
        }
        if let Some(path) = text.strip_prefix("--config=") {
            return Some(path.into());
        }
    }
    None
}

fn usual() -> Option<PathBuf> {
    match env::var_os(VARIABLE) {
        // Set to nothing: no file.
        Some(path) if path.is_empty() => None,
        Some(path) => Some(path.into()),
        None => Some(dirs::config_dir()?.join("spillgate").join("config.toml")),
    }
}

fn put_in(mut typed: Vec<OsString>, text: &str, path: &Path) -> Result<Vec<OsString>> {
    let table: Table = text
        .parse()
        .with_context(|| format!("cannot understand {}", path.display()))?;
    let cli = Cli::command();
    let at = command_at(&typed);
    for (section, keys) in &table {
        let wrong = |what: String| {
            let hint = "a section is a command, a key one of its flags: 'spillgate COMMAND --help'";
            Advised::new(format!("{}: {what}", path.display()), hint)
        };
        let Some(command) = cli.find_subcommand(section) else {
            return Err(wrong(format!("there is no command '{section}'")).into());
        };
        let Value::Table(keys) = keys else {
            return Err(wrong(format!("'{section}' is no section")).into());
        };
        let mut words = Vec::new();
        for (key, value) in keys {
            let flag = command
                .get_arguments()
                .find(|arg| arg.get_long() == Some(key));
            let Some(flag) = flag else {
                return Err(wrong(format!("'{section}' has no flag '--{key}'")).into());
            };
            let takes_value = flag.get_action().takes_values();
            said(key, value, takes_value, &mut words)
                .map_err(|what| wrong(format!("'{section}', '{key}': {what}")))?;
        }
        if let Some(at) = at.filter(|&at| typed[at] == section.as_str()) {
            typed.splice(at + 1..at + 1, words);
        }
    }
    Ok(typed)
}

/// Where the command's name is: the first word that is no flag, and no flag's value.
fn command_at(typed: &[OsString]) -> Option<usize> {
    let mut rest = typed.iter().enumerate().skip(1);
    while let Some((at, word)) = rest.next() {
        match word.to_str() {
            Some("--") => return None,
            // The only one that stands before a command and takes a value.
            Some("--config") => {
                rest.next();
            }
            Some(flag) if flag.starts_with('-') => {}
            _ => return Some(at),
        }
    }
    None
}

/// What one would type for a value.
fn said(
    key: &str,
    value: &Value,
    takes_value: bool,
    words: &mut Vec<OsString>,
) -> Result<(), &'static str> {
    let text = match value {
        Value::Array(values) => {
            for value in values {
                said(key, value, takes_value, words)?;
            }
            return Ok(());
        }
        Value::Boolean(is_on) if !takes_value => {
            if *is_on {
                words.push(format!("--{key}").into());
            }
            return Ok(());
        }
        _ if !takes_value => return Err("expected true or false"),
        Value::Boolean(is_on) => (if *is_on { "on" } else { "off" }).to_owned(),
        Value::String(text) => text.clone(),
        Value::Integer(n) => n.to_string(),
        Value::Float(x) => x.to_string(),
        Value::Datetime(_) | Value::Table(_) => return Err("expected a text or a number"),
    };
    words.push(format!("--{key}={text}").into());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn line(typed: &[&str], text: &str) -> Result<Vec<String>> {
        let typed = typed.iter().map(OsString::from).collect();
        let words = put_in(typed, text, Path::new("config.toml"))?;
        Ok(words
            .into_iter()
            .map(|word| word.into_string().unwrap())
            .collect())
    }

    const FILE: &str = "[serve]\nport = 9000\nkv-rotate = false\ninsecure = true\nprefix = ['a', 'b']\n[run]\ntemp = 0.5\n";

    #[test]
    fn flags_stand_before_those_that_are_typed() {
        let words = line(&["spillgate", "-v", "serve", "m", "--port", "1"], FILE).unwrap();
        let expected = [
            "spillgate",
            "-v",
            "serve",
            "--insecure",
            "--kv-rotate=off",
            "--port=9000",
            "--prefix=a",
            "--prefix=b",
            "m",
            "--port",
            "1",
        ];
        assert_eq!(words, expected);
        let cli = Cli::try_parse_from(&words).unwrap();
        let shown = format!("{cli:?}");
        assert!(shown.contains("port: 1,"), "what is typed wins: {shown}");
        // A section is of a command, not of a model, a prompt or a file of that name.
        for other in [
            &["spillgate", "info", "m"][..],
            &["spillgate", "info", "serve"],
            &["spillgate", "--config", "serve", "tokenize", "m", "run"],
        ] {
            assert_eq!(line(other, FILE).unwrap(), other);
        }
    }

    #[test]
    fn what_no_command_knows_is_told() {
        for (text, part) in [
            ("[server]\nport = 1", "no command 'server'"),
            ("[serve]\nprot = 1", "no flag '--prot'"),
            ("[serve]\ninsecure = 'yes'", "true or false"),
            ("[serve]\nport = {a = 1}", "a text or a number"),
            ("port = 1", "no command 'port'"),
            ("[serve", "cannot understand"),
        ] {
            let error = line(&["spillgate", "serve", "m"], text).unwrap_err();
            assert!(format!("{error:#}").contains(part), "{text}: {error:#}");
        }
    }

    #[test]
    fn the_file_is_named_on_the_command_line() {
        let typed = |words: &[&str]| asked(&words.iter().map(OsString::from).collect::<Vec<_>>());
        assert_eq!(typed(&["s", "serve", "--config", "a"]), Some("a".into()));
        assert_eq!(typed(&["s", "--config=b", "serve"]), Some("b".into()));
        assert_eq!(typed(&["s", "run", "--", "--config", "a"]), None);
    }
}
