//! Models in parts that do not belong together, and what is no model at all.

use std::fs;
use std::path::Path;

use super::{Files, Sketch, after, patched};

pub(super) fn add(files: &mut Files<'_>) {
    splits(files);
    others(files);
}

/// Models in parts that do not belong together.
fn splits(files: &mut Files<'_>) {
    let split = |files: &Files<'_>, name: &str| {
        let stem = files.dir.join(name);
        let bytes = Sketch::sound().bytes().len() as u64;
        let parts = Sketch::sound().writer().write_split(&stem, bytes / 3);
        let parts = parts.expect("it can be split");
        assert!(parts.len() >= 3, "{} parts", parts.len());
        parts
    };
    let patch = |path: &Path, key: &str, with: &[u8]| {
        let bytes = fs::read(path).expect("it was written");
        let at = after(&bytes, key) + 4;
        fs::write(path, patched(&bytes, at, with)).expect("it can be written");
    };
    let part_2 = |name: &str| format!("{name}-00002-of-");

    let parts = split(files, "part-missing");
    fs::remove_file(&parts[1]).expect("it was there");
    files.add(
        "part-missing",
        parts[0].clone(),
        &[&part_2("part-missing"), "part 2"],
    );

    let parts = split(files, "part-twice");
    fs::copy(&parts[0], &parts[1]).expect("a copy");
    files.add(
        "part-twice",
        parts[0].clone(),
        &[&part_2("part-twice"), "split.no"],
    );

    #[cfg(unix)]
    {
        let parts = split(files, "part-cyclic");
        fs::remove_file(&parts[1]).expect("it was there");
        std::os::unix::fs::symlink(&parts[0], &parts[1]).expect("a link");
        files.add(
            "part-cyclic",
            parts[0].clone(),
            &[&part_2("part-cyclic"), "same file"],
        );

        let parts = split(files, "part-endless");
        fs::remove_file(&parts[1]).expect("it was there");
        std::os::unix::fs::symlink(&parts[1], &parts[1]).expect("a link to itself");
        files.add(
            "part-endless",
            parts[0].clone(),
            &[&part_2("part-endless"), "part 2"],
        );
    }

    let parts = split(files, "part-cut");
    let bytes = fs::read(&parts[1]).expect("it was written");
    fs::write(&parts[1], &bytes[..bytes.len() - 100]).expect("it can be written");
    files.add(
        "part-cut",
        parts[0].clone(),
        &[&part_2("part-cut"), "needs the file"],
    );

    let parts = split(files, "part-of-another-model");
    fs::write(&parts[1], Sketch::sound().bytes()).expect("it can be written");
    files.add(
        "part-of-another-model",
        parts[0].clone(),
        &[&part_2("part-of-another-model"), "split."],
    );

    let parts = split(files, "parts-swapped");
    fs::rename(&parts[1], files.dir.join("aside")).expect("it was there");
    fs::rename(&parts[2], &parts[1]).expect("it was there");
    fs::rename(files.dir.join("aside"), &parts[2]).expect("it was there");
    files.add(
        "parts-swapped",
        parts[0].clone(),
        &[&part_2("parts-swapped"), "split.no"],
    );

    let parts = split(files, "part-renamed");
    let renamed = files.dir.join("part-renamed.gguf");
    fs::rename(&parts[0], &renamed).expect("it was there");
    files.add(
        "part-renamed",
        renamed,
        &["part-renamed.gguf", "-00001-of-"],
    );

    for (name, key, value, says) in [
        ("split-absurd", "split.count", u16::MAX, "number of parts"),
        ("split-beyond", "split.no", 9, "is 9"),
        ("split-other-total", "split.tensors.count", 3, "is 3"),
    ] {
        let parts = split(files, name);
        patch(&parts[0], key, &value.to_le_bytes());
        files.add(name, parts[0].clone(), &[key, says]);
    }
}

/// What is no file, or a file of something else.
fn others(files: &mut Files<'_>) {
    let folder = files.dir.join("folder.gguf");
    fs::create_dir(&folder).expect("a folder");
    files.add("folder", folder, &["folder.gguf", "not a file"]);
    let absent = files.dir.join("absent.gguf");
    files.add("absent", absent, &["absent.gguf", "cannot open"]);
    files.bytes(
        "zip",
        b"PK\x03\x04 and so on and so on",
        &["not a GGUF file", "PK"],
    );
    files.bytes("zeros", &[0; 1 << 16], &["not a GGUF file"]);
}
