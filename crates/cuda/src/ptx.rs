//! The compiled kernels: `kernels/ptx/NAME.TARGET.ptx.gz`, made by `xtask ptx` and kept beside their sources. Compressed they are a
//! ninth as large, in the repository and in the program.

use flate2::read::GzDecoder;
use std::io::Read;

/// A source's name, and its PTX for devices of 8.0 and newer and for devices of 9.0.
struct Compiled {
    name: &'static str,
    sm_80: &'static [u8],
    sm_90a: &'static [u8],
}

macro_rules! compiled {
    ($($name:literal)*) => {
        &[$(Compiled {
            name: $name,
            sm_80: include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/ptx/", $name, ".sm_80.ptx.gz")),
            sm_90a: include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/ptx/", $name, ".sm_90a.ptx.gz")),
        }),*]
    };
}

include!("../kernels/ptx/index.rs");

/// The PTX of a source for a compute capability. `sm_90a` runs on 9.0 only, `sm_80` on everything newer.
pub fn of(name: &str, compute: (u32, u32)) -> Option<String> {
    let found = ALL.iter().find(|c| c.name == name)?;
    let compressed = if compute == crate::device::WGMMA_COMPUTE {
        found.sm_90a
    } else {
        found.sm_80
    };
    let mut text = String::new();
    // What the program carries was read by its tests.
    GzDecoder::new(compressed).read_to_string(&mut text).ok()?;
    Some(text)
}

/// Names of all sources.
pub fn names() -> impl Iterator<Item = &'static str> {
    ALL.iter().map(|c| c.name)
}
