//! Decisions have no clock, do no I/O and know no device: they are functions of what they are given.

use std::fs;
use std::path::Path;

/// Crates that only turn data into other data.
const DEPENDENCIES: [&str; 3] = ["serde", "serde_json", "thiserror"];

/// Modules of the standard library that reach outside.
const OUTSIDE: [&str; 9] = [
    "std::env",
    "std::fs",
    "std::io",
    "std::net",
    "std::os",
    "std::process",
    "std::thread",
    "std::time",
    "std::sync",
];

#[test]
fn nothing_that_reaches_outside_is_depended_on() {
    let manifest = include_str!("../Cargo.toml");
    let section = manifest
        .split("[dependencies]")
        .nth(1)
        .expect("there is one");
    let lines = section
        .lines()
        .skip(1)
        .take_while(|line| !line.starts_with('['));
    let names: Vec<&str> = lines
        .filter(|line| !line.trim().is_empty() && !line.starts_with('#'))
        .filter_map(|line| line.split(['.', ' ', '=']).next())
        .collect();
    assert_eq!(names, DEPENDENCIES);
    for other in ["[target.", "[build-dependencies]", "build ="] {
        assert!(!manifest.contains(other), "{other}");
    }
}

#[test]
fn nothing_that_reaches_outside_is_used() {
    let mut files = 0;
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("it can be read") {
            let path = entry.expect("it can be read").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = fs::read_to_string(&path).expect("source is text");
            for module in OUTSIDE {
                assert!(!text.contains(module), "{module} in {}", path.display());
            }
            // The modules cannot be brought in by a list or another name either.
            assert!(
                !text.contains("use std::{") && !text.contains("use std as"),
                "{}",
                path.display()
            );
            files += 1;
        }
    }
    assert!(files > 20, "{files} files");
}
