// Activations as 8-bit blocks, bit for bit as quant/src/act.rs defines, laid out as product.cuh reads them.
//
// Columns C = T * passes. With two passes a token's second column holds the codes of what its first ones lose.
//
// Or arranged, as gemm_many.cuh reads them: columns filled up to A = 2 ceil(C / 16) groups of 8 rows. Column c of 16 is row n = 8 (c / 2 % 2) + 2 (c / 4)
// + c % 2, so that the 4 columns of a lane of the accumulators lie side by side in scales and sums. What fills up is never written.
//   q      [K / 128, rounded up][A][8 rows][128 bytes] codes, pieces of 16 bytes swizzled: p of row r lies at p ^ r
//   meta   blocks of 32:    [2][K / 32][8 A] float d, then d * sum of the codes
//   d      blocks of 256:   [K / 256][8 A] float
//   s16    blocks of 256:   [K / 256][A][8 rows][16 halves]: sums of 16 codes
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

// Where the blocks of a launch's tokens are written. `d` and `s16` belong to blocks of 256, `meta` to blocks of 32. `how`: passes, and 4 A if they are
// to be arranged.
struct ActsOut {
    uint32_t* q;
    int2* meta;
    float* d;
    __half* s16;
    int K, how;
    __device__ __forceinline__ int passes() const { return how % 4; }
    __device__ __forceinline__ int atoms() const { return how / 4; }
};

// Which of A * 8 rows a column is when it is arranged.
__device__ __forceinline__ int arranged_row(int column) {
    const int c = column % 16;
    return column / 16 * 16 + 8 * (c / 2 % 2) + 2 * (c / 4) + c % 2;
}
__device__ __forceinline__ void put_word(const ActsOut& to, int column, int run, int group, uint32_t word) {
    size_t at = word_at(column, to.K / 32, run, group);
    if (to.how >= 4) {
        const int n = arranged_row(column);
        at = (((size_t)(run / 4) * to.atoms() * 8 + n) * 8 + ((run % 4 * 2 + group / 4) ^ n % 8)) * 4 + group % 4;
    }
    to.q[at] = word;
}

// A block of 32 of token t: 8 lanes, 4 values a lane. Called by whole warps; what is not `live` is not written.
__device__ __forceinline__ void emit_32(const ActsOut& to, float4 x, int t, int run, int group, bool live) {
    float4 v[1] = {x};
    const int runs = to.K / 32, passes = to.passes();
    for (int p = 0; p < passes; p++) {
        uint32_t amax = largest_bits(v), word[1];
        int sum[1];
        for (int s = 1; s < 8; s *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, s));
        const float d = codes(v, amax, word, sum);
        int all = sum[0];
        for (int s = 1; s < 8; s *= 2) all += __shfl_xor_sync(~0u, all, s);
        const int column = t * passes + p;
        if (live) put_word(to, column, run, group, word[0]);
        if (live && group == 0) {
            if (to.how >= 4) {
                float* scale = (float*)to.meta + (size_t)run * to.atoms() * 8 + column;
                scale[0] = d, scale[(size_t)runs * to.atoms() * 8] = __fmul_rn(d, (float)all);
            } else {
                to.meta[((size_t)(column / 8) * runs + run) * 8 + column % 8] = make_int2(all, __float_as_int(d));
            }
        }
        lose(v, word, d);
    }
}

// A block of 256 of token t: a warp, values 4 lane .. and 128 + 4 lane ...
__device__ __forceinline__ void emit_256(const ActsOut& to, float4 (&v)[2], int t, int block) {
    const int lane = threadIdx.x % 32, blocks = to.K / 256, passes = to.passes(), atoms = to.atoms();
    for (int p = 0; p < passes; p++) {
        uint32_t amax = largest_bits(v), word[2];
        int sum[2];
        for (int s = 1; s < 32; s *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, s));
        const float d = codes(v, amax, word, sum);
        const int column = t * passes + p;
        const size_t at = (size_t)(column / 8) * blocks + block, sums = atoms > 0 ? ((size_t)block * atoms * 8 + arranged_row(column)) * 16 : (at * 32 + column % 8 * 4) * 4;
#pragma unroll
        for (int w = 0; w < 2; w++) {
            const int i = lane + 32 * w;
            put_word(to, column, block * 8 + i / 8, i % 8, word[w]);
            int all = sum[w];
            for (int s = 1; s < 4; s *= 2) all += __shfl_xor_sync(~0u, all, s);
            if (i % 4 == 0) to.s16[sums + i / 4] = __int2half_rn(all);
        }
        if (lane == 0) to.d[atoms > 0 ? (size_t)block * atoms * 8 + column : at * 8 + column % 8] = d;
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
