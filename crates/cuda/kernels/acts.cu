// Activations as 8-bit blocks, bit for bit as quant/src/act.rs defines, laid out as product.cuh reads them.
//
// Shapes: x [T, K] f32; columns C = T * passes. With two passes a token's second column holds the codes of what its first ones lose.
#include <cuda_fp16.h>
#include <stdint.h>

#include "mma.cuh"

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

// Blocks of 32: 8 lanes a block, 4 values a lane. grid: (ceil(K / 4 / blockDim), T).
extern "C" __global__ void quantise_32(const float* __restrict__ x, uint32_t* q, int2* meta, int K, int passes) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y, run = i / 8, group = i % 8, runs = K / 32;
    const bool live = run < runs;
    float4 v[1] = {live ? *(const float4*)(x + (size_t)t * K + i * 4) : make_float4(0, 0, 0, 0)};
    for (int p = 0; p < passes; p++) {
        uint32_t amax = largest_bits(v), word[1];
        int sum[1];
        for (int s = 1; s < 8; s *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, s));
        const float d = codes(v, amax, word, sum);
        int all = sum[0];
        for (int s = 1; s < 8; s *= 2) all += __shfl_xor_sync(~0u, all, s);
        const int column = t * passes + p;
        if (live) {
            q[word_at(column, runs, run, group)] = word[0];
            if (group == 0) meta[((size_t)(column / 8) * runs + run) * 8 + column % 8] = make_int2(all, __float_as_int(d));
        }
        lose(v, word, d);
    }
}

// Blocks of 256: a warp a block, words lane and lane + 32. grid: (ceil(K / 256 / warps), T).
extern "C" __global__ void quantise_256(const float* __restrict__ x, uint32_t* q, float* scale, __half* s16, int K, int passes) {
    let_next_start();
    wait_for_previous();
    const int lane = threadIdx.x % 32, block = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, t = blockIdx.y, blocks = K / 256;
    if (block >= blocks) return;
    const float4* from = (const float4*)(x + (size_t)t * K + block * 256);
    float4 v[2] = {from[lane], from[lane + 32]};
    for (int p = 0; p < passes; p++) {
        uint32_t amax = largest_bits(v), word[2];
        int sum[2];
        for (int s = 1; s < 32; s *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, s));
        const float d = codes(v, amax, word, sum);
        const int column = t * passes + p;
        const size_t at = (size_t)(column / 8) * blocks + block;
#pragma unroll
        for (int w = 0; w < 2; w++) {
            const int i = lane + 32 * w;
            q[word_at(column, K / 32, block * 8 + i / 8, i % 8)] = word[w];
            int all = sum[w];
            for (int s = 1; s < 4; s *= 2) all += __shfl_xor_sync(~0u, all, s);
            const int j = i / 4;
            if (i % 4 == 0) s16[(at * 32 + column % 8 * 4 + j / 4) * 4 + j % 4] = __int2half_rn(all);
        }
        if (lane == 0) scale[at * 8 + column % 8] = d;
        lose(v, word, d);
    }
}
