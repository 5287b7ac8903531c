//! The types that a tensor's numbers can be stored in.

use std::fmt;

macro_rules! tensor_types {
    ($($(#[$doc:meta])* $name:ident = $id:literal: $len:literal in $bytes:literal;)*) => {
        /// How a tensor's numbers are stored: the numbers of a row in blocks of [`block_len`](TensorType::block_len), a
        /// block in [`block_bytes`](TensorType::block_bytes).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(non_camel_case_types, reason = "the names that the whole field uses")]
        #[non_exhaustive]
        pub enum TensorType {
            $($(#[$doc])* $name,)*
        }

        impl TensorType {
            /// Every type, by id.
            pub const ALL: &[TensorType] = &[$(TensorType::$name,)*];

            /// The type with this number in files; `None` for numbers never given or retired.
            pub const fn from_id(id: u32) -> Option<TensorType> {
                match id {
                    $($id => Some(TensorType::$name),)*
                    _ => None,
                }
            }

            /// The type's number in files.
            pub const fn id(self) -> u32 {
                match self { $(TensorType::$name => $id,)* }
            }

            /// The type's name, such as `Q4_K`.
            pub const fn name(self) -> &'static str {
                match self { $(TensorType::$name => stringify!($name),)* }
            }

            /// Numbers in a block.
            pub const fn block_len(self) -> usize {
                match self { $(TensorType::$name => $len,)* }
            }

            /// Bytes of a block.
            pub const fn block_bytes(self) -> usize {
                match self { $(TensorType::$name => $bytes,)* }
            }
        }
    };
}

tensor_types! {
    /// IEEE single precision.
    F32 = 0: 1 in 4;
    /// IEEE half precision.
    F16 = 1: 1 in 2;
    /// 4 bits, one scale.
    Q4_0 = 2: 32 in 18;
    /// 4 bits, scale and minimum.
    Q4_1 = 3: 32 in 20;
    /// 5 bits, one scale.
    Q5_0 = 6: 32 in 22;
    /// 5 bits, scale and minimum.
    Q5_1 = 7: 32 in 24;
    /// 8 bits, one scale.
    Q8_0 = 8: 32 in 34;
    /// 8 bits, scale and sum; used for activations, not in files.
    Q8_1 = 9: 32 in 36;
    /// 2 bits in 16 sub-blocks of 16.
    Q2_K = 10: 256 in 84;
    /// 3 bits in 16 sub-blocks of 16.
    Q3_K = 11: 256 in 110;
    /// 4 bits in 8 sub-blocks of 32.
    Q4_K = 12: 256 in 144;
    /// 5 bits in 8 sub-blocks of 32.
    Q5_K = 13: 256 in 176;
    /// 6 bits in 16 sub-blocks of 16.
    Q6_K = 14: 256 in 210;
    /// 8 bits with sums; used for activations, not in files.
    Q8_K = 15: 256 in 292;
    /// Grid of 8 values, 2.06 bits.
    IQ2_XXS = 16: 256 in 66;
    /// Grid of 8 values, 2.31 bits.
    IQ2_XS = 17: 256 in 74;
    /// Grid of 4 values, 3.06 bits.
    IQ3_XXS = 18: 256 in 98;
    /// Grid of 8 values, 1.56 bits.
    IQ1_S = 19: 256 in 50;
    /// 4 bits into a table, one scale.
    IQ4_NL = 20: 32 in 18;
    /// Grid of 4 values, 3.44 bits.
    IQ3_S = 21: 256 in 110;
    /// Grid of 8 values, 2.56 bits.
    IQ2_S = 22: 256 in 82;
    /// 4 bits into a table, 8 sub-blocks of 32.
    IQ4_XS = 23: 256 in 136;
    /// Signed 8-bit integer.
    I8 = 24: 1 in 1;
    /// Signed 16-bit integer.
    I16 = 25: 1 in 2;
    /// Signed 32-bit integer.
    I32 = 26: 1 in 4;
    /// Signed 64-bit integer.
    I64 = 27: 1 in 8;
    /// IEEE double precision.
    F64 = 28: 1 in 8;
    /// Grid of 8 values, 1.75 bits.
    IQ1_M = 29: 256 in 56;
    /// The upper half of single precision.
    BF16 = 30: 1 in 2;
    /// Ternary, 5 values in a byte.
    TQ1_0 = 34: 256 in 54;
    /// Ternary, 4 values in a byte.
    TQ2_0 = 35: 256 in 66;
    /// 4-bit floats (E2M1), one power of two (E8M0).
    MXFP4 = 39: 32 in 17;
    /// 4-bit floats (E2M1), four 8-bit float scales (E4M3) for 16 values each.
    NVFP4 = 40: 64 in 36;
    /// 1 bit, one scale.
    Q1_0 = 41: 128 in 18;
}

impl TensorType {
    /// The type with this name, in any case: `q4_K` is [`TensorType::Q4_K`].
    pub fn from_name(name: &str) -> Option<TensorType> {
        let same = |ty: &TensorType| ty.name().eq_ignore_ascii_case(name);
        TensorType::ALL.iter().copied().find(same)
    }

    /// The name of a type that files once had, and that can no longer be read anywhere.
    pub(crate) const fn retired_name(id: u32) -> Option<&'static str> {
        Some(match id {
            4 => "Q4_2",
            5 => "Q4_3",
            31 => "Q4_0_4_4",
            32 => "Q4_0_4_8",
            33 => "Q4_0_8_8",
            36 => "IQ4_NL_4_4",
            37 => "IQ4_NL_4_8",
            38 => "IQ4_NL_8_8",
            _ => return None,
        })
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_names_lead_back() {
        for &ty in TensorType::ALL {
            assert_eq!(TensorType::from_id(ty.id()), Some(ty));
            assert_eq!(TensorType::from_name(&ty.name().to_lowercase()), Some(ty));
            assert_eq!(TensorType::retired_name(ty.id()), None);
        }
        assert_eq!(TensorType::from_id(4), None);
        assert_eq!(TensorType::from_id(u32::MAX), None);
        assert_eq!(TensorType::from_name("Q4"), None);
    }

    #[test]
    fn block_sizes_follow_from_the_layouts() {
        // (type, fields of a block in bytes)
        let layouts: &[(TensorType, &[usize])] = &[
            (TensorType::Q4_0, &[2, 32 / 2]),
            (TensorType::Q4_1, &[2, 2, 32 / 2]),
            (TensorType::Q5_0, &[2, 32 / 8, 32 / 2]),
            (TensorType::Q5_1, &[2, 2, 32 / 8, 32 / 2]),
            (TensorType::Q8_0, &[2, 32]),
            (TensorType::Q8_1, &[2, 2, 32]),
            (TensorType::Q2_K, &[256 / 16, 256 / 4, 2, 2]),
            (TensorType::Q3_K, &[256 / 8, 256 / 4, 12, 2]),
            (TensorType::Q4_K, &[2, 2, 12, 256 / 2]),
            (TensorType::Q5_K, &[2, 2, 12, 256 / 8, 256 / 2]),
            (TensorType::Q6_K, &[256 / 2, 256 / 4, 256 / 16, 2]),
            (TensorType::Q8_K, &[4, 256, 2 * 256 / 16]),
            (TensorType::IQ2_XXS, &[2, 256 / 4]),
            (TensorType::IQ2_XS, &[2, 256 / 4, 256 / 32]),
            (TensorType::IQ2_S, &[2, 256 / 4, 256 / 32, 256 / 32]),
            (TensorType::IQ3_XXS, &[2, 3 * 256 / 8]),
            (
                TensorType::IQ3_S,
                &[2, 256 / 4, 256 / 32, 256 / 8, 256 / 64],
            ),
            (TensorType::IQ1_S, &[2, 256 / 8, 256 / 16]),
            (TensorType::IQ1_M, &[256 / 8, 256 / 16, 256 / 32]),
            (TensorType::IQ4_NL, &[2, 32 / 2]),
            (TensorType::IQ4_XS, &[2, 2, 256 / 64, 256 / 2]),
            (TensorType::TQ1_0, &[48, 4, 2]),
            (TensorType::TQ2_0, &[256 / 4, 2]),
            (TensorType::MXFP4, &[1, 32 / 2]),
            (TensorType::NVFP4, &[64 / 16, 64 / 2]),
            (TensorType::Q1_0, &[2, 128 / 8]),
        ];
        for (ty, fields) in layouts {
            assert_eq!(ty.block_bytes(), fields.iter().sum::<usize>(), "{ty}");
        }
    }
}
