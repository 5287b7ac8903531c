//! Models split over files: `NAME-00001-of-00003.gguf` and so on. Each part is a GGUF file with tensors of its own; the first
//! has the metadata of the model, and every part says in `split.no` and `split.count` which of how many it is.

use std::path::{Path, PathBuf};

use crate::error::{Error, Place};
use crate::limits::SPLIT_PARTS_MAX;
use crate::metadata::Metadata;

pub(crate) const NO_KEY: &str = "split.no";
pub(crate) const COUNT_KEY: &str = "split.count";
pub(crate) const TENSORS_KEY: &str = "split.tensors.count";

/// Which part of how many a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SplitInfo {
    /// From 0.
    pub(crate) no: u64,
    /// At least 2.
    pub(crate) count: u64,
}

impl SplitInfo {
    /// What a file's metadata say; `None` for a file that is a model by itself.
    pub(crate) fn from_metadata(
        file: &Path,
        metadata: &Metadata,
    ) -> Result<Option<SplitInfo>, Error> {
        let count = metadata.u64(COUNT_KEY)?.unwrap_or(0);
        if count <= 1 {
            return Ok(None);
        }
        if count > SPLIT_PARTS_MAX {
            return Err(Error::Limit {
                at: Place::new(file, 0),
                item: format!("key `{COUNT_KEY}`"),
                what: "number of parts",
                found: count,
                max: SPLIT_PARTS_MAX,
            });
        }
        let no = metadata.require_u64(NO_KEY)?;
        if no >= count {
            return Err(Error::PartMismatch {
                file: file.to_owned(),
                key: NO_KEY,
                found: Some(no),
                expected: count - 1,
            });
        }
        Ok(Some(SplitInfo { no, count }))
    }

    /// The names of all parts, found from the name of this one.
    pub(crate) fn part_paths(self, path: &Path) -> Result<Vec<PathBuf>, Error> {
        let name = path
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(parse_name);
        match name {
            Some((prefix, no, count)) if (no, count) == (self.no + 1, self.count) => {
                let names = (0..count).map(|i| path.with_file_name(part_name(prefix, i, count)));
                Ok(names.collect())
            }
            _ => Err(Error::PartName {
                file: path.to_owned(),
                no: self.no + 1,
                count: self.count,
            }),
        }
    }
}

/// The file name of part `i`, from 0.
pub(crate) fn part_name(prefix: &str, i: u64, count: u64) -> String {
    format!("{prefix}-{:05}-of-{count:05}.gguf", i + 1)
}

/// `NAME-00001-of-00003.gguf` as `NAME`, 1 and 3.
fn parse_name(name: &str) -> Option<(&str, u64, u64)> {
    let number = |digits: &str| {
        let plain = digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
        plain.then(|| digits.parse().ok()).flatten()
    };
    let (left, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (prefix, no) = left.rsplit_once('-')?;
    Some((prefix, number(no)?, number(count)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_to_names() {
        let info = SplitInfo { no: 1, count: 3 };
        let paths = info
            .part_paths(Path::new("dir/a-of-b-00002-of-00003.gguf"))
            .unwrap();
        let expected = ["00001", "00002", "00003"]
            .map(|no| PathBuf::from(format!("dir/a-of-b-{no}-of-00003.gguf")));
        assert_eq!(paths, expected);
    }

    #[test]
    fn names_that_lead_nowhere_are_refused() {
        let info = SplitInfo { no: 1, count: 3 };
        for name in [
            "model.gguf",
            "model-00001-of-00003.gguf",
            "model-00002-of-00004.gguf",
            "model-2-of-3.gguf",
            "model-+0002-of-00003.gguf",
            "00002-of-00003.gguf",
            "model-00002-of-00003.bin",
            "",
        ] {
            let refused = info.part_paths(Path::new(name));
            assert!(matches!(refused, Err(Error::PartName { .. })), "{name}");
        }
    }
}
