// Activations as 8-bit blocks, bit for bit as quant/src/act.rs defines, laid out as product.cuh reads them.
//
// Columns C = T * passes. With two passes a token's second column holds the codes of what its first ones lose.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

// Codes of W words (4 values each, x) of a block whose largest magnitude has the bits `amax` (the same in all its lanes). Returns d.
template <int W> __device__ __forceinline__ float codes(const float4 (&x)[W], uint32_t amax, uint32_t (&q)[W], int (&sum)[W]) {
    constexpr uint32_t FINITE = 0x7f800000u, AMAX_MIN = (127u - 100u) << 23;
    const bool empty = amax >= FINITE || amax < AMAX_MIN;
    const float largest = __uint_as_float(amax), inverse = empty ? 0.0f : __fdiv_rn(127.0f, largest);
#pragma unroll
    for (int w = 0; w < W; w++) {
        const float v[4] = {x[w].x, x[w].y, x[w].z, x[w].w};
        q[w] = 0, sum[w] = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int code = empty ? 0 : __float2int_rn(__fmul_rn(v[i], inverse));
            q[w] |= ((uint32_t)code & 255) << (8 * i), sum[w] += code;
        }
    }
    return amax >= FINITE ? __uint_as_float(0x7fc00000u) : amax < AMAX_MIN ? 0.0f : __fdiv_rn(largest, 127.0f);
}

template <int W> __device__ __forceinline__ uint32_t largest_bits(const float4 (&x)[W]) {
    uint32_t m = 0;
#pragma unroll
    for (int w = 0; w < W; w++)
        m = max(m, max(max(__float_as_uint(x[w].x) & 0x7fffffffu, __float_as_uint(x[w].y) & 0x7fffffffu),
                       max(__float_as_uint(x[w].z) & 0x7fffffffu, __float_as_uint(x[w].w) & 0x7fffffffu)));
    return m;
}

// What the codes lose.
template <int W> __device__ __forceinline__ void lose(float4 (&x)[W], const uint32_t (&q)[W], float d) {
#pragma unroll
    for (int w = 0; w < W; w++) {
        x[w].x = __fmaf_rn(-d, (float)(int8_t)(q[w]), x[w].x), x[w].y = __fmaf_rn(-d, (float)(int8_t)(q[w] >> 8), x[w].y);
        x[w].z = __fmaf_rn(-d, (float)(int8_t)(q[w] >> 16), x[w].z), x[w].w = __fmaf_rn(-d, (float)(int8_t)(q[w] >> 24), x[w].w);
    }
}

// Where word `group` (of 8) of a run of a column lies, in words.
__device__ __forceinline__ size_t word_at(int column, int runs, int run, int group) {
    return (((size_t)(column / 8) * runs + run) * 32 + column % 8 * 4 + group % 4) * 2 + group / 4;
}

// Where the blocks of a launch's tokens are written. `d` and `s16` belong to blocks of 256, `meta` to blocks of 32.
struct ActsOut {
    uint32_t* q;
    int2* meta;
    float* d;
    __half* s16;
    int K, passes;
};

// A block of 32 of token t: 8 lanes, 4 values a lane. Called by whole warps; what is not `live` is not written.
__device__ __forceinline__ void emit_32(const ActsOut& to, float4 x, int t, int run, int group, bool live) {
    float4 v[1] = {x};
    const int runs = to.K / 32;
    for (int p = 0; p < to.passes; p++) {
        uint32_t amax = largest_bits(v), word[1];
        int sum[1];
        for (int s = 1; s < 8; s *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, s));
        const float d = codes(v, amax, word, sum);
        int all = sum[0];
        for (int s = 1; s < 8; s *= 2) all += __shfl_xor_sync(~0u, all, s);
        const int column = t * to.passes + p;
        if (live) {
            to.q[word_at(column, runs, run, group)] = word[0];
            if (group == 0) to.meta[((size_t)(column / 8) * runs + run) * 8 + column % 8] = make_int2(all, __float_as_int(d));
        }
        lose(v, word, d);
    }
}

// A block of 256 of token t: a warp, values 4 lane .. and 128 + 4 lane ...
__device__ __forceinline__ void emit_256(const ActsOut& to, float4 (&v)[2], int t, int block) {
    const int lane = threadIdx.x % 32, blocks = to.K / 256;
    for (int p = 0; p < to.passes; p++) {
        uint32_t amax = largest_bits(v), word[2];
        int sum[2];
        for (int s = 1; s < 32; s *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, s));
        const float d = codes(v, amax, word, sum);
        const int column = t * to.passes + p;
        const size_t at = (size_t)(column / 8) * blocks + block;
#pragma unroll
        for (int w = 0; w < 2; w++) {
            const int i = lane + 32 * w;
            to.q[word_at(column, to.K / 32, block * 8 + i / 8, i % 8)] = word[w];
            int all = sum[w];
            for (int s = 1; s < 4; s *= 2) all += __shfl_xor_sync(~0u, all, s);
            const int j = i / 4;
            if (i % 4 == 0) to.s16[(at * 32 + column % 8 * 4 + j / 4) * 4 + j % 4] = __int2half_rn(all);
        }
        if (lane == 0) to.d[at * 8 + column % 8] = d;
        lose(v, word, d);
    }
}

// Blocks of 256 of a token's K values that lie in memory (aligned to 16 bytes), by a whole thread block.
__device__ __forceinline__ void emit_256_row(const ActsOut& to, const float* row, int t) {
    const int lane = threadIdx.x % 32;
    for (int block = threadIdx.x / 32; block < to.K / 256; block += blockDim.x / 32) {
        const float4* from = (const float4*)(row + block * 256);
        float4 v[2] = {from[lane], from[lane + 32]};
        emit_256(to, v, t, block);
    }
}
