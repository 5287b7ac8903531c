//! The compiled kernels: `kernels/ptx/NAME.TARGET.ptx`, made by `xtask ptx` and kept beside their sources.

/// A source's name, and its PTX for devices of 8.0 and newer and for devices of 9.0.
struct Compiled {
    name: &'static str,
    sm_80: &'static str,
    sm_90a: &'static str,
}

macro_rules! compiled {
    ($($name:literal)*) => {
        &[$(Compiled {
            name: $name,
            sm_80: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/ptx/", $name, ".sm_80.ptx")),
            sm_90a: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/ptx/", $name, ".sm_90a.ptx")),
        }),*]
    };
}

include!("../kernels/ptx/index.rs");

/// The PTX of a source for a compute capability. `sm_90a` runs on 9.0 only, `sm_80` on everything newer.
pub fn of(name: &str, compute: (u32, u32)) -> Option<&'static str> {
    let found = ALL.iter().find(|c| c.name == name)?;
    Some(if compute == (9, 0) {
        found.sm_90a
    } else {
        found.sm_80
    })
}

/// Names of all sources.
pub fn names() -> impl Iterator<Item = &'static str> {
    ALL.iter().map(|c| c.name)
}
