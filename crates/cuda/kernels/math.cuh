// Elementary functions with the CPU's bits: docs/arithmetic.md, "Elementary functions". Compiled with --fmad=false, so that only
// what is written as fmaf is fused; `/` and sqrtf round to nearest.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace math {

constexpr float EXP_MIN = -80.0f, EXP_MAX = 88.0f, LOG2_E = 1.44269504088896340736f;
constexpr float LN2_HIGH = 355.0f / 512.0f, LN2_LOW = -2.1219444e-4f;

// Taylor polynomial of e^r, times `scale` (a power of two, so that nothing else changes).
__device__ __forceinline__ float exp_taylor(float r, float scale) {
    float p = scale * (1.0f / 5040.0f);
    p = fmaf(p, r, scale * (1.0f / 720.0f));
    p = fmaf(p, r, scale * (1.0f / 120.0f));
    p = fmaf(p, r, scale * (1.0f / 24.0f));
    p = fmaf(p, r, scale * (1.0f / 6.0f));
    p = fmaf(p, r, scale * 0.5f);
    p = fmaf(p, r, scale);
    return fmaf(p, r, scale);
}

// e^x: 0 below -80, e^88 above 88.
__device__ __forceinline__ float exp(float x) {
    float clamped = EXP_MAX < x ? EXP_MAX : x;
    clamped = clamped < EXP_MIN ? EXP_MIN : clamped;
    const float n = rintf(clamped * LOG2_E);
    float r = fmaf(n, -LN2_HIGH, clamped);
    r = fmaf(n, -LN2_LOW, r);
    const float y = exp_taylor(r, 1.0f) * __int_as_float((__float2int_rz(n) + 127) << 23);
    return x < EXP_MIN ? 0.0f : y;
}

// The same for x <= 0, in fewer operations. The sum with SHIFT rounds to an integer and has it, raised by one less than the
// exponent's bias, in its last bits; the doubled polynomial makes up for that one.
__device__ __forceinline__ float exp_weight(float x) {
    constexpr float SHIFT = 12582912.0f + 126.0f;
    const float shifted = x * LOG2_E + SHIFT, n = shifted - SHIFT;
    float r = fmaf(n, -LN2_HIGH, x);
    r = fmaf(n, -LN2_LOW, r);
    const float y = exp_taylor(r, 2.0f) * __int_as_float(__float_as_int(shifted) << 23);
    return x < EXP_MIN ? 0.0f : y;
}

__device__ __forceinline__ float tanh(float x) {
    const float a = fabsf(x), e = exp(a + a), big = 1.0f - 2.0f / (e + 1.0f), x2 = x * x;
    float p = -17.0f / 315.0f;
    p = fmaf(p, x2, 2.0f / 15.0f);
    p = fmaf(p, x2, -1.0f / 3.0f);
    p = fmaf(p, x2, 1.0f);
    const float value = x < 0.0f ? 0.0f - big : big;
    return a < 0.125f ? x * p : value;
}

__device__ __forceinline__ float silu(float x) { return x / (1.0f + exp(0.0f - x)); }

__device__ __forceinline__ float gelu(float x) {
    const float inner = fmaf(x * x, 0.044715f, 1.0f) * x * 0.7978846f;
    return x * 0.5f * (1.0f + tanh(inner));
}

__device__ __forceinline__ float soft_cap(float x, float cap) { return tanh(x / cap) * cap; }

// Lanes 0..15 (and 16..31) added by halves; the sum is in lane 0 (and 16).
__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
    for (int half = 8; half > 0; half /= 2) x = x + __shfl_down_sync(~0u, x, half, 16);
    return x;
}

}  // namespace math
