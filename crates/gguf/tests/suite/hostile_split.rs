//! Split models whose parts are missing or contradict each other.

use std::fs;
use std::path::{Path, PathBuf};

use crate::raw::{Raw, value_type};
use gguf::{Error, GgufFile, MapMode};
use tempfile::TempDir;

/// A model of three parts with one tensor each, `t0` to `t2`.
struct Parts {
    dir: TempDir,
}

impl Parts {
    fn new() -> Parts {
        let parts = Parts {
            dir: tempfile::tempdir().unwrap(),
        };
        for no in 0..3 {
            parts.write(no, part(no as u16, 3, 3, &format!("t{no}")));
        }
        parts
    }

    fn path(&self, no: usize) -> PathBuf {
        self.dir
            .path()
            .join(format!("model-{:05}-of-00003.gguf", no + 1))
    }

    fn write(&self, no: usize, raw: Raw) {
        fs::write(self.path(no), raw.0).unwrap();
    }

    /// Opens the model by each of its parts in both ways; all must fail with errors that `is_it` knows and that name `fragments`.
    fn refused(&self, by: &[usize], fragments: &[&str], is_it: fn(&Error) -> bool) {
        for &no in by {
            for mode in [MapMode::Mmap, MapMode::Read] {
                refused(&self.path(no), mode, fragments, is_it);
            }
        }
    }
}

fn refused(path: &Path, mode: MapMode, fragments: &[&str], is_it: fn(&Error) -> bool) {
    let error = GgufFile::open(path, mode).expect_err("a broken split model was opened");
    assert!(is_it(&error), "{path:?}: {error:?}");
    let text = error.to_string();
    for fragment in fragments {
        assert!(text.contains(fragment), "`{fragment}` is not in: {text}");
    }
}

/// A part with one tensor and the keys of a split model.
fn part(no: u16, count: u16, n_tensors: u32, tensor: &str) -> Raw {
    Raw::new(1, 3)
        .key_u16("split.no", no)
        .key_u16("split.count", count)
        .key_u32("split.tensors.count", n_tensors)
        .tensor(tensor, &[8], 0, 0)
        .pad(32)
        .bytes(&[no as u8; 32])
}

const ALL: &[usize] = &[0, 1, 2];

#[test]
fn any_part_opens_the_model() {
    let parts = Parts::new();
    for no in 0..3 {
        for mode in [MapMode::Mmap, MapMode::Read] {
            let model = GgufFile::open(&parts.path(no), mode).unwrap();
            model.check_data().unwrap();
            let names: Vec<&str> = model.tensors().iter().map(|t| t.name.as_str()).collect();
            assert_eq!(names, ["t0", "t1", "t2"]);
            for (i, tensor) in model.tensors().iter().enumerate() {
                assert_eq!(tensor.part, i);
                assert_eq!(*model.bytes(tensor).unwrap(), [i as u8; 32]);
            }
            assert_eq!(model.metadata().u32("split.no").unwrap(), Some(0));
            let paths: Vec<PathBuf> = model.parts().map(|(path, _)| path.to_owned()).collect();
            assert_eq!(paths, [parts.path(0), parts.path(1), parts.path(2)]);
            assert_eq!(
                model.file_bytes(),
                model.parts().map(|(_, bytes)| bytes).sum()
            );
        }
    }
}

#[test]
fn a_part_is_missing() {
    for missing in 0..3 {
        let parts = Parts::new();
        fs::remove_file(parts.path(missing)).unwrap();
        let others: Vec<usize> = (0..3).filter(|&no| no != missing).collect();
        let name = format!("model-{:05}-of-00003.gguf", missing + 1);
        let part = format!("part {} of 3", missing + 1);
        parts.refused(&others, &[&name, &part], |e| {
            matches!(e, Error::PartMissing { count: 3, .. })
        });
    }
}

#[cfg(unix)]
#[test]
fn a_part_is_there_twice() {
    let parts = Parts::new();
    fs::remove_file(parts.path(2)).unwrap();
    fs::hard_link(parts.path(1), parts.path(2)).unwrap();
    parts.refused(&[0, 1], &["00002-of", "00003-of", "same file"], |e| {
        matches!(e, Error::PartRepeated { .. })
    });

    let parts = Parts::new();
    fs::remove_file(parts.path(2)).unwrap();
    std::os::unix::fs::symlink(parts.path(0), parts.path(2)).unwrap();
    parts.refused(&[0, 1], &["00001-of", "00003-of", "same file"], |e| {
        matches!(e, Error::PartRepeated { .. })
    });
}

#[cfg(unix)]
#[test]
fn parts_are_links_in_a_circle() {
    let parts = Parts::new();
    for (from, to) in [(1, 2), (2, 1)] {
        fs::remove_file(parts.path(from)).unwrap();
        std::os::unix::fs::symlink(parts.path(to), parts.path(from)).unwrap();
    }
    parts.refused(&[0], &["00002-of", "part 2 of 3"], |e| {
        matches!(e, Error::PartMissing { no: 2, .. })
    });
}

#[test]
fn parts_have_each_others_names() {
    let parts = Parts::new();
    parts.write(1, part(2, 3, 3, "t1"));
    parts.write(2, part(1, 3, 3, "t2"));
    parts.refused(
        &[0],
        &["00002-of", "`split.no`", "is 2", "expected 1"],
        |e| {
            matches!(
                e,
                Error::PartMismatch {
                    key: "split.no",
                    found: Some(2),
                    expected: 1,
                    ..
                }
            )
        },
    );
    // A part that denies its own name cannot lead to the others.
    parts.refused(&[1, 2], &["part"], |e| {
        matches!(e, Error::PartName { count: 3, .. })
    });
}

#[test]
fn a_part_of_another_model() {
    let parts = Parts::new();
    parts.write(1, part(1, 4, 3, "t1"));
    parts.refused(
        &[0, 2],
        &["00002-of", "`split.count`", "is 4", "expected 3"],
        |e| {
            matches!(
                e,
                Error::PartMismatch {
                    key: "split.count",
                    found: Some(4),
                    expected: 3,
                    ..
                }
            )
        },
    );

    let parts = Parts::new();
    parts.write(1, Raw::new(0, 0));
    parts.refused(&[0, 2], &["00002-of", "`split.count`", "missing"], |e| {
        matches!(
            e,
            Error::PartMismatch {
                key: "split.count",
                found: None,
                ..
            }
        )
    });

    let parts = Parts::new();
    parts.write(1, Raw::new(0, 1).key_u16("split.count", 3));
    parts.refused(&[0, 2], &["00002-of", "`split.no`", "missing"], |e| {
        matches!(
            e,
            Error::PartMismatch {
                key: "split.no",
                found: None,
                ..
            }
        )
    });

    let parts = Parts::new();
    parts.write(1, Raw::default().bytes(b"<!DOCTYPE html>"));
    parts.refused(ALL, &["00002-of", "<!DO"], |e| {
        matches!(e, Error::NotGguf { .. })
    });
}

#[test]
fn parts_have_the_wrong_tensors() {
    let parts = Parts::new();
    parts.write(0, part(0, 3, 4, "t0"));
    parts.refused(
        ALL,
        &["00001-of", "`split.tensors.count`", "is 4", "expected 3"],
        |e| {
            matches!(
                e,
                Error::PartMismatch {
                    key: "split.tensors.count",
                    found: Some(4),
                    expected: 3,
                    ..
                }
            )
        },
    );

    let parts = Parts::new();
    parts.write(2, part(2, 3, 3, "t0"));
    parts.refused(ALL, &["`t0`", "00001-of", "00003-of"], |e| {
        matches!(e, Error::DuplicateTensor { .. })
    });
}

#[test]
fn a_part_is_cut_off() {
    let parts = Parts::new();
    let raw = part(1, 3, 3, "t1");
    parts.write(1, Raw(raw.0[..raw.0.len() - 1].to_vec()));
    let model = GgufFile::open(&parts.path(0), MapMode::Mmap).unwrap();
    let error = model.check_data().unwrap_err();
    assert!(
        error.to_string().contains("model-00002-of-00003.gguf"),
        "{error}"
    );
    assert!(
        matches!(&error, Error::Truncated { tensor, missing: 1, of: 1, .. } if tensor == "t1"),
        "{error}"
    );
    assert!(model.bytes(model.tensor("t2").unwrap()).is_ok());
}

#[test]
fn keys_of_split_models_that_lead_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, raw: Raw| {
        let path = dir.path().join(name);
        fs::write(&path, raw.0).unwrap();
        path
    };
    let name = "model-00001-of-00003.gguf";
    let mode = MapMode::Mmap;

    let path = write("renamed.gguf", part(0, 3, 3, "t0"));
    refused(
        &path,
        mode,
        &["renamed.gguf", "part 1 of 3", "-00001-of-00003.gguf"],
        |e| matches!(e, Error::PartName { .. }),
    );
    let path = write(name, part(0, 60_000, 3, "t0"));
    refused(&path, mode, &["`split.count`", "60000"], |e| {
        matches!(e, Error::Limit { found: 60_000, .. })
    });
    let path = write(name, part(3, 3, 3, "t0"));
    refused(&path, mode, &["`split.no`", "is 3"], |e| {
        matches!(e, Error::PartMismatch { found: Some(3), .. })
    });
    let path = write(name, Raw::new(0, 1).key_u16("split.count", 3));
    refused(&path, mode, &["`split.no`", "missing"], |e| {
        matches!(e, Error::MissingKey { .. })
    });
    let path = write(
        name,
        Raw::new(0, 1)
            .key("split.count", value_type::STRING)
            .string("3"),
    );
    refused(&path, mode, &["`split.count`", "string"], |e| {
        matches!(e, Error::WrongType { .. })
    });
    let negative = Raw::new(0, 1)
        .key("split.count", value_type::I32)
        .u32(u32::MAX);
    let path = write(name, negative);
    refused(&path, mode, &["`split.count`", "-1"], |e| {
        matches!(e, Error::OutOfRange { found: -1, .. })
    });
}

#[test]
fn a_count_of_one_is_no_split() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    fs::write(&path, part(0, 1, 1, "t0").0).unwrap();
    GgufFile::open(&path, MapMode::Mmap)
        .unwrap()
        .check_data()
        .unwrap();
}
