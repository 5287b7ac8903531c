//! Where weights come from.

use crate::error::Error;
use crate::synth::Generator;
use gguf::{GgufFile, TensorInfo};

/// A file, or what a file of the same header would hold.
pub(in crate::model) enum Source<'a> {
    /// The file's own bytes.
    File(&'a GgufFile),
    /// Random ones.
    Synthetic(&'a GgufFile, Generator),
}

impl<'a> Source<'a> {
    fn header(&self) -> &'a GgufFile {
        match self {
            Self::File(file) | Self::Synthetic(file, _) => file,
        }
    }

    /// All tensors.
    pub(in crate::model) fn tensors(&self) -> &'a [TensorInfo] {
        self.header().tensors()
    }

    /// The tensor of this name.
    pub(super) fn tensor(&self, name: &str) -> Option<&'a TensorInfo> {
        self.header().tensor(name)
    }

    /// Fills `out` with a tensor's bytes from `offset` on: whole rows.
    pub(super) fn read(&self, t: &TensorInfo, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        match self {
            Self::File(file) => Ok(file.read_at(t, offset, out)?),
            Self::Synthetic(_, generator) => {
                generator.fill(t, offset, out);
                Ok(())
            }
        }
    }
}
