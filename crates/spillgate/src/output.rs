//! What goes to stdout, and how numbers look.

use std::env;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

/// Whether stderr may be coloured: a terminal, and `NO_COLOR` is not set.
pub fn stderr_has_colour() -> bool {
    let no_color = env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
    io::stderr().is_terminal() && !no_color
}

/// Puts colour around words, or leaves them plain. Nothing is said by colour alone.
#[derive(Clone, Copy)]
pub struct Paint {
    on: bool,
}

impl Paint {
    pub fn new(on: bool) -> Self {
        Self { on }
    }

    pub fn bold(self, text: &str) -> String {
        self.wrap("1", text)
    }

    pub fn bold_red(self, text: &str) -> String {
        self.wrap("1;31", text)
    }

    fn wrap(self, code: &str, text: &str) -> String {
        if self.on {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

/// Writes text to stdout. Unlike `print!`, a closed pipe is an error and no panic.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    Ok(())
}

/// Writes a line to stdout.
pub fn println(line: &str) -> Result<()> {
    print(&format!("{line}\n"))
}

/// Writes a value to stdout as one line of JSON.
pub fn print_json(value: &impl Serialize) -> Result<()> {
    println(&serde_json::to_string(value)?)
}

/// Writes a file that is there whole or not at all. What is no plain file, such as a pipe, is written to directly.
pub fn write_file(path: &Path, text: &str) -> Result<()> {
    let write = || -> io::Result<()> {
        // A link stays one, and what it points to is replaced.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        if fs::metadata(&target).is_ok_and(|m| !m.is_file()) {
            return fs::write(&target, text);
        }
        let mut part = target.clone().into_os_string();
        // Another process may write the same file at the same time.
        part.push(format!(".{}.part", std::process::id()));
        let part = PathBuf::from(part);
        let whole = || {
            let mut file = File::create(&part)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&part, &target)
        };
        whole().inspect_err(|_| {
            // What failed is what counts; a file left behind harms nothing.
            let _ = fs::remove_file(&part);
        })
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// A number of bytes for people, in the binary units that memory is counted in.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ if value >= 100.0 => format!("{value:.0} {}", UNITS[unit]),
        _ => format!("{value:.1} {}", UNITS[unit]),
    }
}

/// A table of text: columns as wide as their widest cell; those in `right` hold numbers. Control characters, which a
/// file's names may hold, do not reach the terminal.
pub fn table(rows: &[Vec<String>], right: &[usize]) -> String {
    let plain = |cell: &String| cell.replace(char::is_control, "\u{FFFD}");
    let rows: Vec<Vec<String>> = rows
        .iter()
        .map(|row| row.iter().map(plain).collect())
        .collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter()
            .filter_map(|r| r.get(column))
            .map(|c| c.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.into_iter().enumerate() {
            let pad = " ".repeat(widths[column] - cell.chars().count());
            if column > 0 {
                line.push_str("  ");
            }
            if right.contains(&column) {
                line += &(pad + &cell);
            } else {
                line += &(cell + &pad);
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_rounded_for_people() {
        assert_eq!(human_bytes(0), "0 B");
        assert_eq!(human_bytes(1023), "1023 B");
        assert_eq!(human_bytes(1536), "1.5 KiB");
        assert_eq!(human_bytes(98_362_432), "93.8 MiB");
        assert_eq!(human_bytes(500 << 20), "500 MiB");
        assert_eq!(human_bytes(u64::MAX), "16777216 TiB");
    }

    #[test]
    fn tables_line_up() {
        let rows = [
            vec!["a".into(), "10".into()],
            vec!["long".into(), "9".into(), "x".into()],
        ];
        assert_eq!(table(&rows, &[1]), "a     10\nlong   9  x\n");
        assert_eq!(table(&[], &[]), "");
        assert_eq!(table(&[vec!["a\x1b[2J".into()]], &[]), "a\u{FFFD}[2J\n");
    }

    #[test]
    fn plain_paint_adds_nothing() {
        assert_eq!(Paint::new(false).bold_red("x"), "x");
        assert_ne!(Paint::new(true).bold("x"), "x");
    }
}
