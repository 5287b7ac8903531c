//! Instruction sets: which of them this processor has, and the proof that a kernel may use one.
//!
//! A token such as [`Avx512`] can only be had from its `new`, which returns `None` unless the processor has every
//! feature that the kernels of that name are compiled with. Holding the token is the proof; the kernels' unsafe
//! wrappers are called only where one is at hand.

use std::fmt;
use std::str::FromStr;

/// AVX2 with FMA and F16C: Haswell, Zen and newer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avx2(());

/// AVX-512 F, BW, DQ, VL and VNNI: Cascade Lake, Ice Lake, Zen 4 and newer. The 256-bit features are implied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Avx512(());

/// AMX tiles with 8-bit integers, beside AVX-512: Sapphire Rapids and newer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Amx(());

impl Avx2 {
    /// The token, if the processor has AVX2, FMA and F16C.
    pub fn new() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
        {
            return Some(Self(()));
        }
        None
    }
}

impl Avx512 {
    /// The token, if the processor has AVX-512 F, BW, DQ, VL, VNNI and everything that [`Avx2`] stands for.
    pub fn new() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
        {
            return Avx2::new().map(|_| Self(()));
        }
        None
    }
}

impl Amx {
    /// The token, if the processor has AMX int8 beside [`Avx512`] and the kernel lets this process use tiles.
    pub fn new() -> Option<Self> {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if Avx512::new().is_some() && crate::amx::available() {
            return Some(Self(()));
        }
        None
    }
}

/// The instruction set that kernels are chosen by, from the plainest to the fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust: the definition. Runs everywhere.
    Scalar,
    /// 256-bit vectors.
    Avx2(Avx2),
    /// 512-bit vectors with 8-bit dot products.
    Avx512(Avx512),
    /// Tiles for many tokens, 512-bit vectors for few.
    Amx(Amx),
}

/// Every name that [`Isa::from_str`] knows.
pub const ISA_NAMES: [&str; 4] = ["scalar", "avx2", "avx512", "amx"];

/// An instruction set was asked for by a wrong name, or this processor lacks it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IsaError {
    /// No such name.
    #[error("unknown instruction set {0:?}: one of scalar, avx2, avx512, amx")]
    Unknown(String),
    /// The processor (or the kernel) does not offer it.
    #[error("this processor has no {asked}; it has {available}")]
    Missing {
        /// What was asked for.
        asked: &'static str,
        /// What there is, separated by commas.
        available: String,
    },
}

impl Isa {
    /// Everything this processor has, plainest first.
    pub fn available() -> Vec<Self> {
        let all = [
            Avx2::new().map(Self::Avx2),
            Avx512::new().map(Self::Avx512),
            Amx::new().map(Self::Amx),
        ];
        std::iter::once(Self::Scalar)
            .chain(all.into_iter().flatten())
            .collect()
    }

    /// The fastest that this processor has.
    pub fn best() -> Self {
        Self::available().pop().unwrap_or(Self::Scalar)
    }

    /// Its name, as flags and reports use it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2(_) => "avx2",
            Self::Avx512(_) => "avx512",
            Self::Amx(_) => "amx",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = IsaError;

    fn from_str(name: &str) -> Result<Self, IsaError> {
        let asked = ISA_NAMES
            .into_iter()
            .find(|n| *n == name)
            .ok_or_else(|| IsaError::Unknown(name.to_owned()))?;
        let available = Self::available();
        available
            .iter()
            .copied()
            .find(|isa| isa.name() == asked)
            .ok_or_else(|| IsaError::Missing {
                asked,
                available: available
                    .iter()
                    .map(|isa| isa.name())
                    .collect::<Vec<_>>()
                    .join(", "),
            })
    }
}
