// Products with weights that are floats: acc = fma(w[k], x[k], acc) over chunks of 512 values of K, the chunks added in order, bit for bit as
// quant/src/product.rs defines. One algorithm for every number of tokens; two shapes of kernel.
//
// Shapes: W [N, K] in tiles of 16 rows, [K][16 rows] in a tile; x [T, K] f32; y [T, N].
//
// gemv_1, gemv_4  few tokens: a half-warp takes a chunk of a tile through its own ring in shared memory, a lane a row
// gemm            more: tiles of 64 rows x 64 tokens through shared memory, 4 x 4 outputs a thread
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "begin.cuh"
#include "mma.cuh"

constexpr int CHUNK = 512;

__device__ __forceinline__ float2 two(const float* p) { return *(const float2*)p; }
__device__ __forceinline__ float2 two(const __half* p) { return __half22float2(*(const __half2*)p); }
__device__ __forceinline__ float2 two(const __nv_bfloat16* p) {
    const uint32_t v = *(const uint32_t*)p;
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

// What a half-warp's ring moves at once: PIECE values of K, of 16 rows and of T tokens.
constexpr int PIECE = 32, RING = 4;
template <class W, int T> constexpr int STAGE = PIECE * 16 * sizeof(W) + T * PIECE * 4;

__device__ __forceinline__ float one(const float* p) { return *p; }
__device__ __forceinline__ float one(const __half* p) { return __half2float(*p); }
__device__ __forceinline__ float one(const __nv_bfloat16* p) { return __uint_as_float((uint32_t) * (const uint16_t*)p << 16); }

// grid: (tiles, ceil(T / tokens of a block)); block: whole warps; dynamic shared memory: threads / 16 * RING * STAGE, then chunks * T * 64 bytes.
template <class W, int T> __device__ __forceinline__ void gemv_rows(const W* __restrict__ w, const float* x, float* y, int N, int K, int all_tokens) {
    extern __shared__ __align__(128) uint8_t smem[];
    let_next_start();
    const int chunks = (K + CHUNK - 1) / CHUNK, tile = blockIdx.x, halves = blockDim.x / 16, half = threadIdx.x / 16, r = threadIdx.x % 16;
    const int token0 = blockIdx.y * T, tokens = min(T, all_tokens - token0);
    uint8_t* ring = smem + half * (RING * STAGE<W, T>);
    float* part = (float*)(smem + halves * (RING * STAGE<W, T>));  // [chunk][T][16]
    const W* tile_w = w + (size_t)tile * K * 16;
    x += (size_t)token0 * K;

    // Pieces are counted through all chunks of this half-warp, 16 to a chunk; those past the end of K are empty.
    const int pieces = (chunks - half + halves - 1) / halves * (CHUNK / PIECE);
    auto first_k = [&](int piece) { return (half + piece / (CHUNK / PIECE) * halves) * CHUNK + piece % (CHUNK / PIECE) * PIECE; };
    auto fetch_w = [&](int piece) {
        const int k0 = first_k(piece), n = piece < pieces ? min(PIECE, K - k0) : 0;
        uint8_t* to = ring + piece % RING * STAGE<W, T> + r * 16;
        const uint8_t* from = (const uint8_t*)(tile_w + (size_t)k0 * 16) + r * 16;
#pragma unroll
        for (int i = 0; i < PIECE * (int)sizeof(W) / 16; i++)
            if (i * 256 + r * 16 < n * 16 * (int)sizeof(W)) copy16(to + i * 256, from + i * 256);
    };
    auto fetch_x = [&](int piece) {
        const int k0 = first_k(piece), n = piece < pieces ? min(PIECE, K - k0) : 0;
        float* to = (float*)(ring + piece % RING * STAGE<W, T> + PIECE * 16 * sizeof(W));
#pragma unroll
        for (int t = 0; t < T; t++)
#pragma unroll
            for (int i = 0; i < PIECE; i += 16)
                if (i + r < n) to[t * PIECE + i + r] = x[(size_t)min(t, tokens - 1) * K + k0 + i + r];
    };
    for (int p = 0; p < RING; p++) fetch_w(p), copy_commit();
    wait_for_previous();
    for (int p = 0; p < RING; p++) fetch_x(p);
    // Both halves of a warp go round as often as the one with more to do.
    const int rounds = __reduce_max_sync(~0u, pieces);
    float acc[T];
#pragma unroll 1
    for (int p = 0; p < rounds; p++) {
        if (p % (CHUNK / PIECE) == 0)
#pragma unroll
            for (int t = 0; t < T; t++) acc[t] = 0.0f;
        copy_wait<RING - 1>();
        __syncwarp();
        const int n = p < pieces ? min(PIECE, K - first_k(p)) : 0;
        const W* sw = (const W*)(ring + p % RING * STAGE<W, T>) + r;
        const float* sx = (const float*)(ring + p % RING * STAGE<W, T> + PIECE * 16 * sizeof(W));
        if (n == PIECE) {
#pragma unroll
            for (int k = 0; k < PIECE; k += 4) {
                const float v[4] = {one(sw + k * 16), one(sw + k * 16 + 16), one(sw + k * 16 + 32), one(sw + k * 16 + 48)};
#pragma unroll
                for (int t = 0; t < T; t++) {
                    const float4 a = *(const float4*)(sx + t * PIECE + k);
                    acc[t] = __fmaf_rn(v[3], a.w, __fmaf_rn(v[2], a.z, __fmaf_rn(v[1], a.y, __fmaf_rn(v[0], a.x, acc[t]))));
                }
            }
        } else {
            for (int k = 0; k < n; k++)
#pragma unroll
                for (int t = 0; t < T; t++) acc[t] = __fmaf_rn(one(sw + k * 16), sx[t * PIECE + k], acc[t]);
        }
        __syncwarp();
        fetch_w(p + RING);
        copy_commit();
        fetch_x(p + RING);
        if (p < pieces && (p + 1) % (CHUNK / PIECE) == 0)
#pragma unroll
            for (int t = 0; t < T; t++) part[((half + p / (CHUNK / PIECE) * halves) * T + t) * 16 + r] = acc[t];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < tokens * 16; i += blockDim.x) {
        const int t = i / 16, row = tile * 16 + i % 16;
        if (row >= N) continue;
        const float* from = part + t * 16 + i % 16;
        float sum = from[0];
#pragma unroll 8
        for (int c = 1; c < chunks; c++) sum = __fadd_rn(sum, from[c * T * 16]);
        y[(size_t)(token0 + t) * N + row] = sum;
    }
}

// 256 threads; grid: (ceil(N / 64), ceil(T / 64)).
template <class W> __device__ __forceinline__ void gemm_tiles(const W* __restrict__ w, const float* x, float* y, int N, int K, int tokens) {
    constexpr int KS = 16;
    __shared__ float sw[KS][64], sx[KS][65];
    let_next_start();
    wait_for_previous();
    const int tiles = (N + 15) / 16, tile0 = blockIdx.x * 4, t0 = blockIdx.y * 64, tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    float acc[4][4] = {}, total[4][4] = {};
    for (int k0 = 0; k0 < K; k0 += KS) {
        __syncthreads();
#pragma unroll
        for (int u = 0; u < 2; u++) {  // 4 tiles x 16 values of K x 8 pairs of rows
            const int i = u * 256 + threadIdx.x, pair = i % 8, k = i / 8 % KS, tile = i / (8 * KS);
            float2 v = make_float2(0.0f, 0.0f);
            if (k0 + k < K) v = two(w + ((size_t)min(tile0 + tile, tiles - 1) * K + k0 + k) * 16 + 2 * pair);
            sw[k][tile * 16 + 2 * pair] = v.x, sw[k][tile * 16 + 2 * pair + 1] = v.y;
        }
#pragma unroll
        for (int u = 0; u < 4; u++) {
            const int i = u * 256 + threadIdx.x, k = i % KS, t = i / KS;
            sx[k][t] = k0 + k < K ? x[(size_t)min(t0 + t, tokens - 1) * K + k0 + k] : 0.0f;
        }
        __syncthreads();
        const int n = min(KS, K - k0);
        for (int k = 0; k < n; k++) {
            float a[4], b[4];
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = sw[k][tx * 4 + i], b[i] = sx[k][ty * 4 + i];
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) acc[i][j] = __fmaf_rn(a[i], b[j], acc[i][j]);
        }
        if ((k0 + KS) % CHUNK == 0 || k0 + KS >= K) {
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    total[i][j] = k0 < CHUNK ? acc[i][j] : __fadd_rn(total[i][j], acc[i][j]);
                    acc[i][j] = 0.0f;
                }
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = tile0 * 16 + tx * 4 + i, t = t0 + ty * 4 + j;
            if (row < N && t < tokens) y[(size_t)t * N + row] = total[i][j];
        }
}

// Row ids[t] of W as f32; NaN for an id outside 0..N. grid: (ceil(K / blockDim), T).
template <class W> __device__ __forceinline__ void decode_rows(const W* __restrict__ w, const int* ids, float* y, int N, int K, float factor) {
    const int k = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    if (k >= K) return;
    const int id = *(const volatile int*)(ids + t);
    float v = __int_as_float(0x7fc00000);
    if (id >= 0 && id < N) {
        const float2 both = two(w + ((size_t)(id / 16) * K + k) * 16 + id % 16 / 2 * 2);
        v = id % 2 ? both.y : both.x;
    }
    y[(size_t)t * K + k] = __fmul_rn(v, factor);
}

#define FLOAT_KERNELS(NAME, W)                                                                                          \
    extern "C" __global__ void gemv_1_##NAME(const W* w, const float* x, float* y, int N, int K, int tokens) {          \
        gemv_rows<W, 1>(w, x, y, N, K, tokens);                                                                         \
    }                                                                                                                   \
    extern "C" __global__ void gemv_4_##NAME(const W* w, const float* x, float* y, int N, int K, int tokens) {          \
        gemv_rows<W, 4>(w, x, y, N, K, tokens);                                                                         \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256)                                                                   \
        gemm_##NAME(const W* w, const float* x, float* y, int N, int K, int tokens) {                                   \
        gemm_tiles<W>(w, x, y, N, K, tokens);                                                                           \
    }                                                                                                                   \
    extern "C" __global__ void decode_##NAME(const W* w, const int* ids, float* y, int N, int K) {                      \
        wait_for_previous();                                                                                            \
        decode_rows<W>(w, ids, y, N, K, 1.0f);                                                                          \
    }                                                                                                                   \
    extern "C" __global__ void begin_##NAME(const W* w, BEGIN_PARAMETERS, float* y, int N, int K, float factor) {       \
        wait_for_previous();                                                                                            \
        copy_step(BEGIN_ARGUMENTS);                                                                                     \
        decode_rows<W>(w, (const int*)step, y, N, K, factor);                                                           \
    }

FLOAT_KERNELS(f32, float)
FLOAT_KERNELS(f16, __half)
FLOAT_KERNELS(bf16, __nv_bfloat16)
