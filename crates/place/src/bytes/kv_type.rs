//! The types that K and V can be stored in.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// How the values of K or V are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of single precision.
    Bf16,
    /// 8 bits, one scale for 32 values.
    #[serde(rename = "q8_0")]
    Q8_0,
    /// 5 bits, scale and minimum for 32 values.
    #[serde(rename = "q5_1")]
    Q5_1,
    /// 5 bits, one scale for 32 values.
    #[serde(rename = "q5_0")]
    Q5_0,
    /// 4 bits, scale and minimum for 32 values.
    #[serde(rename = "q4_1")]
    Q4_1,
    /// 4 bits, one scale for 32 values.
    #[serde(rename = "q4_0")]
    Q4_0,
    /// 4 bits into a table, one scale for 32 values.
    #[serde(rename = "iq4_nl")]
    Iq4Nl,
}

impl KvType {
    /// Every type, the one with most bits first.
    pub const ALL: [KvType; 9] = [
        KvType::F32,
        KvType::F16,
        KvType::Bf16,
        KvType::Q8_0,
        KvType::Q5_1,
        KvType::Q5_0,
        KvType::Q4_1,
        KvType::Q4_0,
        KvType::Iq4Nl,
    ];

    /// The name that flags and logs use.
    pub const fn name(self) -> &'static str {
        match self {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::Bf16 => "bf16",
            KvType::Q8_0 => "q8_0",
            KvType::Q5_1 => "q5_1",
            KvType::Q5_0 => "q5_0",
            KvType::Q4_1 => "q4_1",
            KvType::Q4_0 => "q4_0",
            KvType::Iq4Nl => "iq4_nl",
        }
    }

    /// Values in a block.
    pub const fn block_len(self) -> u64 {
        match self {
            KvType::F32 | KvType::F16 | KvType::Bf16 => 1,
            _ => 32,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> u64 {
        match self {
            KvType::F32 => 4,
            KvType::F16 | KvType::Bf16 => 2,
            KvType::Q8_0 => 34,
            KvType::Q5_1 => 24,
            KvType::Q5_0 => 22,
            KvType::Q4_1 => 20,
            KvType::Q4_0 | KvType::Iq4Nl => 18,
        }
    }

    /// Bits a value, its share of the block's scales included.
    pub fn bits(self) -> f64 {
        (self.block_bytes() * 8) as f64 / self.block_len() as f64
    }

    /// Bytes of a row of `n` values; `None` if it is no whole number of blocks, or beyond 64 bits.
    pub fn row_bytes(self, n: u64) -> Option<u64> {
        if !n.is_multiple_of(self.block_len()) {
            return None;
        }
        (n / self.block_len()).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for KvType {
    type Err = Error;

    fn from_str(name: &str) -> Result<KvType, Error> {
        let same = |ty: &KvType| ty.name().eq_ignore_ascii_case(name);
        let found = KvType::ALL.into_iter().find(same);
        found.ok_or_else(|| Error::KvTypeName {
            found: name.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back() {
        for ty in KvType::ALL {
            assert_eq!(ty.name().parse(), Ok(ty));
            assert_eq!(ty.name().to_uppercase().parse(), Ok(ty));
        }
        let refused = "q3_K".parse::<KvType>().unwrap_err().to_string();
        assert!(
            refused.contains("q3_K") && refused.contains("q4_0"),
            "{refused}"
        );
    }

    #[test]
    fn rows_are_whole_blocks() {
        // Bytes of 64 values, by the layouts.
        let bytes = [256, 128, 128, 68, 48, 44, 40, 36, 36];
        for (ty, bytes) in KvType::ALL.into_iter().zip(bytes) {
            assert_eq!(ty.row_bytes(64), Some(bytes), "{ty}");
            assert_eq!(ty.bits() * 8.0, bytes as f64, "{ty}");
            assert_eq!(ty.row_bytes(0), Some(0), "{ty}");
            assert_eq!(ty.row_bytes(48).is_some(), ty.block_len() == 1, "{ty}");
        }
        assert_eq!(KvType::F16.row_bytes(u64::MAX), None);
        assert_eq!(KvType::Q8_0.row_bytes(u64::MAX - 31), None);
    }
}
