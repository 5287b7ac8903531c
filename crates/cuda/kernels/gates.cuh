// What a gated feed-forward makes of a gate and an up: docs/arithmetic.md, "Elementary functions".
#pragma once
#include "math.cuh"

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + math::exp(0.0f - x)); }

// f: 0 SiLU, 1 GELU (tanh form), 2 clamped.
__device__ __forceinline__ float gated_value(int f, float gate, float up) {
    if (f == 2) {
        const float g = 7.0f < gate ? 7.0f : gate;
        float u = 7.0f < up ? 7.0f : up;
        u = u < -7.0f ? -7.0f : u;
        return g / (1.0f + math::exp(0.0f - g * 1.702f)) * (u + 1.0f);
    }
    return (f == 0 ? math::silu(gate) : math::gelu(gate)) * up;
}
