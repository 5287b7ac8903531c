//! Sixteen `f32` lanes, three ways: the same kernel source gives the same bits on every instruction set.
//!
//! A kernel is written once over [`F32x16`], with every rounding explicit (`fma` where an `fma` is meant). It is then
//! compiled for each instruction set by [`simd_kernel!`]. Rust never contracts or reorders floating-point operations,
//! so equality needs no further care.

/// An array of `$n` values, each made by an expression of its index. `std::array::from_fn` will not do in kernels: its
/// closure is compiled without the kernel's instruction set.
macro_rules! array {
    ([$init:expr; $n:expr], |$i:ident| $e:expr) => {{
        let mut array = [$init; $n];
        for ($i, slot) in array.iter_mut().enumerate() {
            *slot = $e;
        }
        array
    }};
}
pub(crate) use array;

/// Sixteen `f32` lanes.
///
/// Implementations for an instruction set must be used only inside functions compiled for it; [`simd_kernel!`] sees to
/// that, and the trait is private to the crate.
pub(crate) trait F32x16: Copy {
    /// Whether there are 32 registers that hold 16 lanes each (else 16 that hold 8).
    const WIDE: bool;
    fn splat(x: f32) -> Self;
    /// Loads 16 values. Panics if there are fewer.
    fn load(x: &[f32]) -> Self;
    /// Loads up to 16 values, the rest zero.
    fn load_part(x: &[f32]) -> Self {
        let mut all = [0.0; 16];
        all[..x.len()].copy_from_slice(x);
        Self::load(&all)
    }
    /// Converts 16 IEEE halves (32 bytes, little endian), exactly.
    fn load_f16(x: &[u8]) -> Self;
    /// Converts 16 bfloat16 (32 bytes, little endian), exactly.
    fn load_bf16(x: &[u8]) -> Self;
    fn store(self, out: &mut [f32]);
    /// Rounds to the nearest integer (ties to even) and stores as bytes. Lanes lie within -127..=127.
    fn store_i8(self, out: &mut [i8]);
    fn add(self, o: Self) -> Self;
    fn sub(self, o: Self) -> Self;
    fn mul(self, o: Self) -> Self;
    fn div(self, o: Self) -> Self;
    /// `self * b + c`, rounded once.
    fn fma(self, b: Self, c: Self) -> Self;
    /// The larger; `o` if either is NaN.
    fn max(self, o: Self) -> Self;
    /// `yes` where `self < o`, else `no` (also where either is NaN).
    fn select_lt(self, o: Self, yes: Self, no: Self) -> Self;
    /// The nearest integer, ties to even.
    fn round(self) -> Self;
    /// `2^self` for integers in -126..=127.
    fn exp2_int(self) -> Self;
    /// Clears the sign.
    fn abs(self) -> Self;

    fn to_array(self) -> [f32; 16] {
        let mut a = [0.0; 16];
        self.store(&mut a);
        a
    }
    /// Sum by halving: lanes `i` and `i + 8`, then 4, 2, 1.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut a = self.to_array();
        let mut half = 8;
        while half > 0 {
            for i in 0..half {
                a[i] += a[i + half];
            }
            half /= 2;
        }
        a[0]
    }
    /// Largest lane by halving, with the NaN rule of [`F32x16::max`].
    #[inline(always)]
    fn max_lane(self) -> f32 {
        let mut a = self.to_array();
        let mut half = 8;
        while half > 0 {
            for i in 0..half {
                a[i] = if a[i] > a[i + half] {
                    a[i]
                } else {
                    a[i + half]
                };
            }
            half /= 2;
        }
        a[0]
    }
}

/// Plain Rust.
#[derive(Clone, Copy)]
pub(crate) struct Scalar16([f32; 16]);

impl Scalar16 {
    fn zip(self, o: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], o.0[i])))
    }
}

impl F32x16 for Scalar16 {
    const WIDE: bool = false;
    fn splat(x: f32) -> Self {
        Self([x; 16])
    }
    fn load(x: &[f32]) -> Self {
        Self(std::array::from_fn(|i| x[i]))
    }
    fn load_f16(x: &[u8]) -> Self {
        Self(std::array::from_fn(|i| {
            quant::lanes::f16_to_f32(u16::from_le_bytes([x[2 * i], x[2 * i + 1]]))
        }))
    }
    fn load_bf16(x: &[u8]) -> Self {
        Self(std::array::from_fn(|i| {
            f32::from_bits(u32::from_le_bytes([0, 0, x[2 * i], x[2 * i + 1]]))
        }))
    }
    fn store(self, out: &mut [f32]) {
        out[..16].copy_from_slice(&self.0);
    }
    fn store_i8(self, out: &mut [i8]) {
        for (out, x) in out[..16].iter_mut().zip(self.0) {
            *out = x.round_ties_even() as i8;
        }
    }
    fn add(self, o: Self) -> Self {
        self.zip(o, |a, b| a + b)
    }
    fn sub(self, o: Self) -> Self {
        self.zip(o, |a, b| a - b)
    }
    fn mul(self, o: Self) -> Self {
        self.zip(o, |a, b| a * b)
    }
    fn div(self, o: Self) -> Self {
        self.zip(o, |a, b| a / b)
    }
    fn fma(self, b: Self, c: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
    }
    fn max(self, o: Self) -> Self {
        self.zip(o, |a, b| if a > b { a } else { b })
    }
    fn select_lt(self, o: Self, yes: Self, no: Self) -> Self {
        Self(std::array::from_fn(|i| {
            if self.0[i] < o.0[i] {
                yes.0[i]
            } else {
                no.0[i]
            }
        }))
    }
    fn round(self) -> Self {
        Self(self.0.map(f32::round_ties_even))
    }
    fn exp2_int(self) -> Self {
        Self(
            self.0
                .map(|x| f32::from_bits(((x as i32 + 127) as u32) << 23)),
        )
    }
    fn abs(self) -> Self {
        Self(self.0.map(f32::abs))
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2x16, Avx512x16};

#[cfg(target_arch = "x86_64")]
mod x86 {
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
        fn abs(self) -> Self {
            one!(_mm512_abs_ps(self.0))
        }
    }
}

/// Defines `pub(crate) fn name(isa, args...)` from a kernel `body::<V: F32x16>(args...)`, compiled for each instruction set.
macro_rules! simd_kernel {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident $(::<$($extra:ty),*>)?;) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments, reason = "shapes and strides of one operation")]
        $vis fn $name(isa: $crate::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            use $crate::isa::Isa;
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments, reason = "shapes and strides of one operation")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                $body::<$crate::simd::Avx2x16 $(, $($extra),*)?>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments, reason = "shapes and strides of one operation")]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                $body::<$crate::simd::Avx512x16 $(, $($extra),*)?>($($arg),*)
            }
            match isa {
                Isa::Scalar => $body::<$crate::simd::Scalar16 $(, $($extra),*)?>($($arg),*),
                // SAFETY: the token proves that the processor has the features.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2(_) => unsafe { avx2($($arg),*) },
                // SAFETY: the token proves that the processor has the features; AMX implies AVX-512.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512(_) | Isa::Amx(_) => unsafe { avx512($($arg),*) },
                #[cfg(not(target_arch = "x86_64"))]
                _ => unreachable!("tokens of other processors cannot be had"),
            }
        }
    };
}
pub(crate) use simd_kernel;
