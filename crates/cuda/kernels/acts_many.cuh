// Activations of many tokens as 8-bit blocks: the bits and the arranged layout of acts.cuh, in fewer instructions, which are what binds there. A lane has 8
// values, so that what is done a block is done for twice as many; integers come from adding 1.5 * 2^23.
#pragma once
#include "acts.cuh"

namespace many {

// The larger one, NaN if one is NaN.
__device__ __forceinline__ float larger(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

struct Codes {
    uint32_t word[2];
    float d;
};

// Codes of a block of which each lane has 8 values, over neighbouring lanes. `codes` of acts.cuh says what is computed.
template <int LANES> __device__ __forceinline__ Codes codes(const float4 (&x)[2]) {
    constexpr float TINY = 0x1p-100f, SHIFT = 12582912.0f;
    float amax = 0.0f;
#pragma unroll
    for (int w = 0; w < 2; w++) amax = larger(larger(larger(fabsf(x[w].x), fabsf(x[w].y)), larger(fabsf(x[w].z), fabsf(x[w].w))), amax);
#pragma unroll
    for (int s = 1; s < LANES; s *= 2) amax = larger(amax, __shfl_xor_sync(~0u, amax, s));
    const bool is_faulty = !(amax < INFINITY), is_tiny = amax < TINY;
    const float inverse = __fdiv_rn(127.0f, amax);
    Codes c;
#pragma unroll
    for (int w = 0; w < 2; w++) {
        auto code = [&](float v) { return __float_as_uint(__fadd_rn(__fmul_rn(v, inverse), SHIFT)); };
        const uint32_t low = __byte_perm(code(x[w].x), code(x[w].y), 0x0040), high = __byte_perm(code(x[w].z), code(x[w].w), 0x0040);
        c.word[w] = is_faulty || is_tiny ? 0 : __byte_perm(low, high, 0x5410);
    }
    c.d = is_faulty ? __uint_as_float(0x7fc00000u) : is_tiny ? 0.0f : __fdiv_rn(amax, 127.0f);
    return c;
}

__device__ __forceinline__ int sum(uint32_t word) { return __dp4a((int)word, 0x01010101, 0); }

// Where words 2 pair and 2 pair + 1 of a run of a column lie.
__device__ __forceinline__ uint2* words_at(const ActsOut& to, int column, int run, int pair) {
    const unsigned n = arranged_row(column), piece = (run % 4 * 2 + pair / 2) ^ n % 8;
    return (uint2*)to.q + ((size_t)(run / 4) * to.atoms() * 8 + n) * 16 + piece * 2 + pair % 2;
}

// A block of 32 of token t: 4 lanes. Called by whole warps; what is not `live` is not written.
__device__ __forceinline__ void emit_32(const ActsOut& to, float4 (&v)[2], int t, int run, int pair, bool live) {
    for (int p = 0; p < to.passes(); p++) {
        const Codes c = codes<4>(v);
        int all = sum(c.word[0]) + sum(c.word[1]);
        for (int s = 1; s < 4; s *= 2) all += __shfl_xor_sync(~0u, all, s);
        const int column = t * to.passes() + p;
        if (live) *words_at(to, column, run, pair) = make_uint2(c.word[0], c.word[1]);
        if (live && pair == 0) {
            float* scale = (float*)to.meta + (size_t)run * to.atoms() * 8 + column;
            scale[0] = c.d, scale[(size_t)(to.K / 32) * to.atoms() * 8] = __fmul_rn(c.d, (float)all);
        }
        lose(v, c.word, c.d);
    }
}

// A block of 256 of token t: a warp, values 8 lane ...
__device__ __forceinline__ void emit_256(const ActsOut& to, float4 (&v)[2], int t, int block) {
    const int lane = threadIdx.x % 32;
    for (int p = 0; p < to.passes(); p++) {
        const Codes c = codes<32>(v);
        const int column = t * to.passes() + p;
        *words_at(to, column, block * 8 + lane / 4, lane % 4) = make_uint2(c.word[0], c.word[1]);
        int all = sum(c.word[0]) + sum(c.word[1]);
        all += __shfl_xor_sync(~0u, all, 1);
        if (lane % 2 == 0) to.s16[((size_t)block * to.atoms() * 8 + arranged_row(column)) * 16 + lane / 2] = __int2half_rn(all);
        if (lane == 0) to.d[(size_t)block * to.atoms() * 8 + column] = c.d;
        lose(v, c.word, c.d);
    }
}

}  // namespace many
