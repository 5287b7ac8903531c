//! Sixteen lanes on x86: two 256-bit registers or one of 512 bits.

use super::F32x16;
use std::arch::x86_64::*;

// Rounding of conversions is spelled out, so that it does not depend on MXCSR.
const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// Two 256-bit registers.
#[derive(Clone, Copy)]
pub(crate) struct Avx2x16(__m256, __m256);

macro_rules! both {
    ($a:expr, $b:expr, $f:ident) => {
        // SAFETY: the type is used only inside functions compiled for AVX2, FMA and F16C (see the trait).
        unsafe { Avx2x16($f($a.0, $b.0), $f($a.1, $b.1)) }
    };
}

impl F32x16 for Avx2x16 {
    const WIDE: bool = false;
    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: only inside functions compiled for AVX2 (see the trait).
        unsafe { Self(_mm256_set1_ps(x), _mm256_set1_ps(x)) }
    }
    #[inline(always)]
    fn load(x: &[f32]) -> Self {
        let x: &[f32; 16] = x[..16].try_into().expect("16 values");
        // SAFETY: 16 values are there; only inside functions compiled for AVX2.
        unsafe {
            Self(
                _mm256_loadu_ps(x.as_ptr()),
                _mm256_loadu_ps(x.as_ptr().add(8)),
            )
        }
    }
    #[inline(always)]
    fn load_f16(x: &[u8]) -> Self {
        let x: &[u8; 32] = x[..32].try_into().expect("32 bytes");
        // SAFETY: 32 bytes are there; only inside functions compiled for F16C.
        unsafe {
            let p = x.as_ptr().cast::<__m128i>();
            Self(
                _mm256_cvtph_ps(_mm_loadu_si128(p)),
                _mm256_cvtph_ps(_mm_loadu_si128(p.add(1))),
            )
        }
    }
    #[inline(always)]
    fn load_bf16(x: &[u8]) -> Self {
        let x: &[u8; 32] = x[..32].try_into().expect("32 bytes");
        // SAFETY: 32 bytes are there; only inside functions compiled for AVX2.
        unsafe {
            let p = x.as_ptr().cast::<__m128i>();
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(p));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(1)));
            Self(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            )
        }
    }
    #[inline(always)]
    fn load_i8(x: &[u8]) -> Self {
        let x: &[u8; 16] = x[..16].try_into().expect("16 bytes");
        // SAFETY: 16 bytes are there; only inside functions compiled for AVX2.
        unsafe {
            let x = _mm_loadu_si128(x.as_ptr().cast());
            Self(
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(x))),
            )
        }
    }
    #[inline(always)]
    fn load_nibbles(x: &[u8]) -> (Self, Self) {
        let x: &[u8; 16] = x[..16].try_into().expect("16 bytes");
        // SAFETY: 16 bytes are there; only inside functions compiled for AVX2.
        unsafe {
            let x = _mm_loadu_si128(x.as_ptr().cast());
            let (mask, eight) = (_mm_set1_epi8(15), _mm_set1_epi8(8));
            let low = _mm_sub_epi8(_mm_and_si128(x, mask), eight);
            let high = _mm_sub_epi8(_mm_and_si128(_mm_srli_epi16::<4>(x), mask), eight);
            let low8 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low));
            let high8 = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high));
            (
                Self(
                    low8,
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(low))),
                ),
                Self(
                    high8,
                    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(high))),
                ),
            )
        }
    }
    #[inline(always)]
    fn store(self, out: &mut [f32]) {
        let out: &mut [f32; 16] = (&mut out[..16]).try_into().expect("16 values");
        // SAFETY: 16 values are there; only inside functions compiled for AVX2.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), self.0);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), self.1);
        }
    }
    #[inline(always)]
    fn store_i8(self, out: &mut [i8]) {
        let out: &mut [i8; 16] = (&mut out[..16]).try_into().expect("16 values");
        let r = self.round();
        // SAFETY: 16 bytes are there; only inside functions compiled for AVX2. Lanes are integers within 8 bits.
        unsafe {
            let words = _mm256_packs_epi32(_mm256_cvttps_epi32(r.0), _mm256_cvttps_epi32(r.1));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm_packs_epi16(
                _mm256_castsi256_si128(words),
                _mm256_extracti128_si256::<1>(words),
            );
            _mm_storeu_si128(out.as_mut_ptr().cast(), bytes);
        }
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        both!(self, o, _mm256_add_ps)
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        both!(self, o, _mm256_sub_ps)
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        both!(self, o, _mm256_mul_ps)
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        both!(self, o, _mm256_div_ps)
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        // SAFETY: only inside functions compiled for FMA.
        unsafe {
            Self(
                _mm256_fmadd_ps(self.0, b.0, c.0),
                _mm256_fmadd_ps(self.1, b.1, c.1),
            )
        }
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        both!(self, o, _mm256_max_ps)
    }
    #[inline(always)]
    fn select_lt(self, o: Self, yes: Self, no: Self) -> Self {
        // SAFETY: only inside functions compiled for AVX2.
        unsafe {
            let (low, high) = (
                _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, o.0),
                _mm256_cmp_ps::<_CMP_LT_OQ>(self.1, o.1),
            );
            Self(
                _mm256_blendv_ps(no.0, yes.0, low),
                _mm256_blendv_ps(no.1, yes.1, high),
            )
        }
    }
    #[inline(always)]
    fn round(self) -> Self {
        // SAFETY: only inside functions compiled for AVX2.
        unsafe {
            Self(
                _mm256_round_ps::<NEAREST>(self.0),
                _mm256_round_ps::<NEAREST>(self.1),
            )
        }
    }
    #[inline(always)]
    fn exp2_int(self) -> Self {
        // SAFETY: only inside functions compiled for AVX2. Lanes are integers, so truncation is exact.
        unsafe {
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_add_epi32(_mm256_cvttps_epi32(self.0), bias);
            let high = _mm256_add_epi32(_mm256_cvttps_epi32(self.1), bias);
            Self(
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(high)),
            )
        }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        // SAFETY: only inside functions compiled for AVX2.
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            Self(
                _mm256_andnot_ps(sign, self.0),
                _mm256_andnot_ps(sign, self.1),
            )
        }
    }
    #[inline(always)]
    fn exp2_bits(self) -> Self {
        // SAFETY: only inside functions compiled for AVX2.
        unsafe {
            let (low, high) = (_mm256_castps_si256(self.0), _mm256_castps_si256(self.1));
            Self(
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(high)),
            )
        }
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: only inside functions compiled for AVX2.
        unsafe { sum8(_mm256_add_ps(self.0, self.1)) }
    }
    #[inline(always)]
    fn any_nan(self) -> bool {
        // SAFETY: only inside functions compiled for AVX2.
        unsafe {
            let nan = |x| _mm256_cmp_ps::<_CMP_UNORD_Q>(x, x);
            _mm256_movemask_ps(_mm256_or_ps(nan(self.0), nan(self.1))) != 0
        }
    }
    #[inline(always)]
    fn max_lane(self) -> f32 {
        // SAFETY: only inside functions compiled for AVX2.
        unsafe { max8(_mm256_max_ps(self.0, self.1)) }
    }

    type Dots = (__m256i, __m256i);
    type Bytes = (__m256i, __m256i);
    const SIGNED_BIAS: i32 = 0;
    #[inline(always)]
    fn dots(start: i32) -> Self::Dots {
        // SAFETY: only inside functions compiled for AVX2.
        unsafe { (_mm256_set1_epi32(start), _mm256_set1_epi32(start)) }
    }
    #[inline(always)]
    fn signed_bytes(x: &[u8]) -> Self::Bytes {
        let x: &[u8; 64] = x[..64].try_into().expect("64 bytes");
        // SAFETY: 64 bytes are there; only inside functions compiled for AVX2.
        unsafe {
            let p = x.as_ptr().cast::<__m256i>();
            (_mm256_loadu_si256(p), _mm256_loadu_si256(p.add(1)))
        }
    }
    #[inline(always)]
    fn nibbles(x: &[u8]) -> (Self::Bytes, Self::Bytes) {
        let x = Self::signed_bytes(x);
        // SAFETY: only inside functions compiled for AVX2.
        unsafe {
            let mask = _mm256_set1_epi8(15);
            let low = (_mm256_and_si256(x.0, mask), _mm256_and_si256(x.1, mask));
            let high = (_mm256_srli_epi16::<4>(x.0), _mm256_srli_epi16::<4>(x.1));
            (
                low,
                (
                    _mm256_and_si256(high.0, mask),
                    _mm256_and_si256(high.1, mask),
                ),
            )
        }
    }
    #[inline(always)]
    fn dot_signed(acc: Self::Dots, x: Self::Bytes, q: i32) -> Self::Dots {
        // SAFETY: only inside functions compiled for AVX2. Magnitudes times signed factors: pairs stay below 2^15.
        unsafe {
            let q = _mm256_set1_epi32(q);
            let low = (_mm256_abs_epi8(x.0), _mm256_sign_epi8(q, x.0));
            let high = (_mm256_abs_epi8(x.1), _mm256_sign_epi8(q, x.1));
            (dot8(acc.0, low.0, low.1), dot8(acc.1, high.0, high.1))
        }
    }
    #[inline(always)]
    fn dot_nibbles(acc: Self::Dots, x: Self::Bytes, q: i32) -> Self::Dots {
        // SAFETY: only inside functions compiled for AVX2.
        unsafe {
            let q = _mm256_set1_epi32(q);
            (dot8(acc.0, x.0, q), dot8(acc.1, x.1, q))
        }
    }
    #[inline(always)]
    fn from_dots(a: Self::Dots, b: Self::Dots) -> Self {
        // SAFETY: only inside functions compiled for AVX2.
        unsafe {
            Self(
                _mm256_cvtepi32_ps(_mm256_add_epi32(a.0, b.0)),
                _mm256_cvtepi32_ps(_mm256_add_epi32(a.1, b.1)),
            )
        }
    }
}

/// Adds the products of unsigned `x` and signed `q`, four a lane; neighbouring pairs must stay below 2^15.
///
/// # Safety
/// Only inside functions compiled for AVX2.
#[inline(always)]
unsafe fn dot8(acc: __m256i, x: __m256i, q: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let pairs = _mm256_maddubs_epi16(x, q);
        _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    }
}

/// Sum by halving, from lanes `i` and `i + 4` on.
///
/// # Safety
/// Only inside functions compiled for AVX2.
#[inline(always)]
unsafe fn sum8(x: __m256) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
    }
}

/// Largest lane by halving, with the NaN rule of [`F32x16::max`].
///
/// # Safety
/// Only inside functions compiled for AVX2.
#[inline(always)]
unsafe fn max8(x: __m256) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
        let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
    }
}

/// What the sixteen nibbles stand for.
///
/// # Safety
/// Only inside functions compiled for AVX-512.
#[inline(always)]
unsafe fn nibble_values() -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        _mm512_setr_ps(
            -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0,
        )
    }
}

/// One 512-bit register.
#[derive(Clone, Copy)]
pub(crate) struct Avx512x16(pub(crate) __m512);

macro_rules! one {
    ($f:ident($($a:expr),*)) => {
        // SAFETY: the type is used only inside functions compiled for AVX-512 F, BW, DQ and VL (see the trait).
        unsafe { Avx512x16($f($($a),*)) }
    };
}

impl F32x16 for Avx512x16 {
    const WIDE: bool = true;
    #[inline(always)]
    fn splat(x: f32) -> Self {
        one!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(x: &[f32]) -> Self {
        let x: &[f32; 16] = x[..16].try_into().expect("16 values");
        one!(_mm512_loadu_ps(x.as_ptr()))
    }
    #[inline(always)]
    fn load_f16(x: &[u8]) -> Self {
        let x: &[u8; 32] = x[..32].try_into().expect("32 bytes");
        // SAFETY: 32 bytes are there; only inside functions compiled for AVX-512.
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn load_bf16(x: &[u8]) -> Self {
        let x: &[u8; 32] = x[..32].try_into().expect("32 bytes");
        // SAFETY: 32 bytes are there; only inside functions compiled for AVX-512.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }
    #[inline(always)]
    fn load_i8(x: &[u8]) -> Self {
        let x: &[u8; 16] = x[..16].try_into().expect("16 bytes");
        // SAFETY: 16 bytes are there; only inside functions compiled for AVX-512.
        unsafe {
            let x = _mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            Self(_mm512_cvtepi32_ps(x))
        }
    }
    #[inline(always)]
    fn load_nibbles(x: &[u8]) -> (Self, Self) {
        let x: &[u8; 16] = x[..16].try_into().expect("16 bytes");
        // SAFETY: 16 bytes are there; only inside functions compiled for AVX-512. A permutation reads the low 4 bits of
        // its indices.
        unsafe {
            let values = nibble_values();
            let x = _mm512_cvtepu8_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            (
                Self(_mm512_permutexvar_ps(x, values)),
                Self(_mm512_permutexvar_ps(_mm512_srli_epi32::<4>(x), values)),
            )
        }
    }
    /// Scales the sixteen values there are instead of those that are read.
    #[inline(always)]
    fn load_scaled_nibbles(x: &[u8], d: f32) -> (Self, Self) {
        let x: &[u8; 16] = x[..16].try_into().expect("16 bytes");
        // SAFETY: 16 bytes are there; only inside functions compiled for AVX-512. A permutation reads the low 4 bits of
        // its indices.
        unsafe {
            let values = _mm512_mul_ps(nibble_values(), _mm512_set1_ps(d));
            let x = _mm512_cvtepu8_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            (
                Self(_mm512_permutexvar_ps(x, values)),
                Self(_mm512_permutexvar_ps(_mm512_srli_epi32::<4>(x), values)),
            )
        }
    }
    #[inline(always)]
    fn store(self, out: &mut [f32]) {
        let out: &mut [f32; 16] = (&mut out[..16]).try_into().expect("16 values");
        // SAFETY: 16 values are there; only inside functions compiled for AVX-512.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn store_i8(self, out: &mut [i8]) {
        let out: &mut [i8; 16] = (&mut out[..16]).try_into().expect("16 values");
        // SAFETY: 16 bytes are there; only inside functions compiled for AVX-512.
        unsafe {
            let ints = _mm512_cvt_roundps_epi32::<NEAREST>(self.0);
            _mm_storeu_si128(out.as_mut_ptr().cast(), _mm512_cvtsepi32_epi8(ints));
        }
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        one!(_mm512_add_ps(self.0, o.0))
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        one!(_mm512_sub_ps(self.0, o.0))
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        one!(_mm512_mul_ps(self.0, o.0))
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        one!(_mm512_div_ps(self.0, o.0))
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        one!(_mm512_fmadd_ps(self.0, b.0, c.0))
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        one!(_mm512_max_ps(self.0, o.0))
    }
    #[inline(always)]
    fn select_lt(self, o: Self, yes: Self, no: Self) -> Self {
        // SAFETY: only inside functions compiled for AVX-512.
        unsafe {
            Self(_mm512_mask_blend_ps(
                _mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, o.0),
                no.0,
                yes.0,
            ))
        }
    }
    #[inline(always)]
    fn round(self) -> Self {
        // SAFETY: only inside functions compiled for AVX-512.
        unsafe { Self(_mm512_roundscale_ps::<NEAREST>(self.0)) }
    }
    #[inline(always)]
    fn exp2_int(self) -> Self {
        // SAFETY: only inside functions compiled for AVX-512. Lanes are integers, so truncation is exact.
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvttps_epi32(self.0), _mm512_set1_epi32(127));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased)))
        }
    }
    #[inline(always)]
    fn exp2_bits(self) -> Self {
        // SAFETY: only inside functions compiled for AVX-512.
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(bits)))
        }
    }
    #[inline(always)]
    fn abs(self) -> Self {
        one!(_mm512_abs_ps(self.0))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: only inside functions compiled for AVX-512.
        unsafe {
            let (low, high) = (
                _mm512_castps512_ps256(self.0),
                _mm512_extractf32x8_ps::<1>(self.0),
            );
            sum8(_mm256_add_ps(low, high))
        }
    }
    #[inline(always)]
    fn any_nan(self) -> bool {
        // SAFETY: only inside functions compiled for AVX-512.
        unsafe { _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0) != 0 }
    }
    #[inline(always)]
    fn max_lane(self) -> f32 {
        // SAFETY: only inside functions compiled for AVX-512.
        unsafe {
            let (low, high) = (
                _mm512_castps512_ps256(self.0),
                _mm512_extractf32x8_ps::<1>(self.0),
            );
            max8(_mm256_max_ps(low, high))
        }
    }

    type Dots = __m512i;
    type Bytes = __m512i;
    const SIGNED_BIAS: i32 = 128;
    #[inline(always)]
    fn dots(start: i32) -> __m512i {
        // SAFETY: only inside functions compiled for AVX-512.
        unsafe { _mm512_set1_epi32(start) }
    }
    #[inline(always)]
    fn signed_bytes(x: &[u8]) -> __m512i {
        let x: &[u8; 64] = x[..64].try_into().expect("64 bytes");
        // SAFETY: 64 bytes are there; only inside functions compiled for AVX-512. Turning the sign bit adds 128.
        unsafe {
            let x = _mm512_loadu_si512(x.as_ptr().cast());
            _mm512_xor_si512(x, _mm512_set1_epi8(-128))
        }
    }
    #[inline(always)]
    fn nibbles(x: &[u8]) -> (__m512i, __m512i) {
        let x: &[u8; 64] = x[..64].try_into().expect("64 bytes");
        // SAFETY: 64 bytes are there; only inside functions compiled for AVX-512.
        unsafe {
            let x = _mm512_loadu_si512(x.as_ptr().cast());
            let mask = _mm512_set1_epi8(15);
            (
                _mm512_and_si512(x, mask),
                _mm512_and_si512(_mm512_srli_epi16::<4>(x), mask),
            )
        }
    }
    #[inline(always)]
    fn dot_signed(acc: __m512i, x: __m512i, q: i32) -> __m512i {
        Self::dot_nibbles(acc, x, q)
    }
    #[inline(always)]
    fn dot_nibbles(acc: __m512i, x: __m512i, q: i32) -> __m512i {
        // SAFETY: only inside functions compiled for AVX-512 with VNNI.
        unsafe { _mm512_dpbusd_epi32(acc, x, _mm512_set1_epi32(q)) }
    }
    #[inline(always)]
    fn from_dots(a: __m512i, b: __m512i) -> Self {
        one!(_mm512_cvtepi32_ps(_mm512_add_epi32(a, b)))
    }
}
