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
    /// Converts 16 signed bytes.
    fn load_i8(x: &[u8]) -> Self;
    /// Converts the low and the high nibbles of 16 bytes, each less 8.
    fn load_nibbles(x: &[u8]) -> (Self, Self);
    /// The same times `d`, which is exact if `d` is a half.
    #[inline(always)]
    fn load_scaled_nibbles(x: &[u8], d: f32) -> (Self, Self) {
        let ((low, high), d) = (Self::load_nibbles(x), Self::splat(d));
        (low.mul(d), high.mul(d))
    }
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
    /// The float whose exponent field is the low 9 bits of the bit pattern: `2^n` of what ends with `n + 127`.
    fn exp2_bits(self) -> Self;
    /// Clears the sign.
    fn abs(self) -> Self;

    /// Sixteen sums of products of 8-bit integers.
    type Dots: Copy;
    /// Four 8-bit integers a lane.
    type Bytes: Copy;
    /// What [`F32x16::dot_signed`] adds to each signed byte: sums start at `-SIGNED_BIAS` times the sum of their factors.
    const SIGNED_BIAS: i32;
    /// All lanes `start`.
    fn dots(start: i32) -> Self::Dots;
    /// Loads 64 signed bytes, four a lane.
    fn signed_bytes(x: &[u8]) -> Self::Bytes;
    /// The low and the high nibbles of 64 bytes, unsigned.
    fn nibbles(x: &[u8]) -> (Self::Bytes, Self::Bytes);
    /// Adds the products of a lane's bytes (raised by [`F32x16::SIGNED_BIAS`]) and `q`'s, which are -127..=127.
    fn dot_signed(acc: Self::Dots, x: Self::Bytes, q: i32) -> Self::Dots;
    /// Adds the products of a lane's nibbles and the bytes of `q`, which are -127..=127.
    fn dot_nibbles(acc: Self::Dots, x: Self::Bytes, q: i32) -> Self::Dots;
    /// What two sums add up to, as floats, exact below 2^24.
    fn from_dots(a: Self::Dots, b: Self::Dots) -> Self;

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
    /// Whether any lane is NaN.
    #[inline(always)]
    fn any_nan(self) -> bool {
        self.to_array().iter().any(|x| x.is_nan())
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

/// Fetches the cache line at `line` into the first-level cache.
#[inline(always)]
pub(crate) fn fetch(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch of any address is only a hint and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// Fetches the cache line at `line` into the second-level cache.
#[inline(always)]
pub(crate) fn fetch_far(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch of any address is only a hint and never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
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
    fn load_i8(x: &[u8]) -> Self {
        Self(std::array::from_fn(|i| f32::from(x[i] as i8)))
    }
    fn load_nibbles(x: &[u8]) -> (Self, Self) {
        let nibble = |code: u8| f32::from(code) - 8.0;
        (
            Self(std::array::from_fn(|i| nibble(x[i] & 15))),
            Self(std::array::from_fn(|i| nibble(x[i] >> 4))),
        )
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
    fn exp2_bits(self) -> Self {
        Self(self.0.map(|x| f32::from_bits(x.to_bits() << 23)))
    }
    fn abs(self) -> Self {
        Self(self.0.map(f32::abs))
    }

    type Dots = [i32; 16];
    type Bytes = [[i8; 4]; 16];
    const SIGNED_BIAS: i32 = 0;
    fn dots(start: i32) -> [i32; 16] {
        [start; 16]
    }
    fn signed_bytes(x: &[u8]) -> Self::Bytes {
        std::array::from_fn(|i| std::array::from_fn(|j| x[4 * i + j] as i8))
    }
    fn nibbles(x: &[u8]) -> (Self::Bytes, Self::Bytes) {
        let nibbles = |shift: u32| {
            std::array::from_fn(|i| {
                std::array::from_fn(|j| ((x[4 * i + j] >> shift) & 15).cast_signed())
            })
        };
        (nibbles(0), nibbles(4))
    }
    fn dot_signed(acc: [i32; 16], x: Self::Bytes, q: i32) -> [i32; 16] {
        let q = q.to_le_bytes();
        std::array::from_fn(|i| {
            (0..4).fold(acc[i], |sum, j| {
                sum + i32::from(x[i][j]) * i32::from(q[j] as i8)
            })
        })
    }
    fn dot_nibbles(acc: [i32; 16], x: Self::Bytes, q: i32) -> [i32; 16] {
        Self::dot_signed(acc, x, q)
    }
    fn from_dots(a: [i32; 16], b: [i32; 16]) -> Self {
        Self(std::array::from_fn(|i| (a[i] + b[i]) as f32))
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2x16, Avx512x16};

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests;

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
