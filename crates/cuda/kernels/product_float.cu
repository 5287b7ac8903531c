// Products with weights that are floats: acc = fma(w[k], x[k], acc) over chunks of 512 values of K, the chunks added in order, bit for bit as
// quant/src/product.rs defines. One algorithm for every number of tokens; two shapes of kernel.
//
// Shapes: W [N, K] in tiles of 16 rows, [K][16 rows] in a tile; x [T, K] f32; y [T, N].
//
// gemv_TYPE  up to 4 tokens: 8 lanes a tile's chunk, two rows a lane, so that 8 lanes read what lies together
// gemm_TYPE  more: tiles of 64 rows x 64 tokens through shared memory, 4 x 4 outputs a thread
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "mma.cuh"

constexpr int CHUNK = 512;

__device__ __forceinline__ float2 two(const float* p) { return *(const float2*)p; }
__device__ __forceinline__ float2 two(const __half* p) { return __half22float2(*(const __half2*)p); }
__device__ __forceinline__ float2 two(const __nv_bfloat16* p) {
    const uint32_t v = *(const uint32_t*)p;
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}

// grid: ceil(tiles / tiles_per_block); dynamic shared memory: tiles_per_block * ceil(K / 512) * T * 64 bytes.
template <class W, int T> __device__ __forceinline__ void gemv_rows(const W* __restrict__ w, const float* x, float* y, int N, int K, int tokens, int tiles_per_block) {
    extern __shared__ float part[];  // [slot][T][16]
    let_next_start();
    wait_for_previous();
    const int chunks = (K + CHUNK - 1) / CHUNK, tiles = (N + 15) / 16, first_tile = blockIdx.x * tiles_per_block;
    const int slots = min(tiles_per_block, tiles - first_tile) * chunks, pair = threadIdx.x % 8;
    for (int slot = threadIdx.x / 8; slot < slots; slot += blockDim.x / 8) {
        const int tile = first_tile + slot / chunks, k0 = slot % chunks * CHUNK, n = min(CHUNK, K - k0);
        const W* p = w + ((size_t)tile * K + k0) * 16 + 2 * pair;
        float2 acc[T];
        const float* xt[T];
#pragma unroll
        for (int t = 0; t < T; t++) acc[t] = make_float2(0.0f, 0.0f), xt[t] = x + (size_t)min(t, tokens - 1) * K + k0;
        int k = 0;
        constexpr int U = 16;
        for (; k + U <= n; k += U) {
            float2 v[U];
#pragma unroll
            for (int u = 0; u < U; u++) v[u] = two(p + (size_t)(k + u) * 16);
#pragma unroll
            for (int u = 0; u < U; u++)
#pragma unroll
                for (int t = 0; t < T; t++) {
                    const float a = xt[t][k + u];
                    acc[t].x = __fmaf_rn(v[u].x, a, acc[t].x), acc[t].y = __fmaf_rn(v[u].y, a, acc[t].y);
                }
        }
        for (; k < n; k++) {
            const float2 v = two(p + (size_t)k * 16);
#pragma unroll
            for (int t = 0; t < T; t++) acc[t].x = __fmaf_rn(v.x, xt[t][k], acc[t].x), acc[t].y = __fmaf_rn(v.y, xt[t][k], acc[t].y);
        }
#pragma unroll
        for (int t = 0; t < T; t++)
            if (t < tokens) *(float2*)(part + ((size_t)slot * tokens + t) * 16 + 2 * pair) = acc[t];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < slots / chunks * tokens * 16; i += blockDim.x) {
        const int tile = i / (tokens * 16), t = i / 16 % tokens, row = (first_tile + tile) * 16 + i % 16;
        if (row >= N) continue;
        const float* from = part + ((size_t)tile * chunks * tokens + t) * 16 + i % 16;
        float sum = from[0];
        for (int c = 1; c < chunks; c++) sum = __fadd_rn(sum, from[c * tokens * 16]);
        y[(size_t)t * N + row] = sum;
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
template <class W> __device__ __forceinline__ void decode_rows(const W* __restrict__ w, const int* ids, float* y, int N, int K) {
    wait_for_previous();
    const int k = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    if (k >= K) return;
    const int id = ids[t];
    float v = __int_as_float(0x7fc00000);
    if (id >= 0 && id < N) {
        const float2 both = two(w + ((size_t)(id / 16) * K + k) * 16 + id % 16 / 2 * 2);
        v = id % 2 ? both.y : both.x;
    }
    y[(size_t)t * K + k] = v;
}

#define FLOAT_KERNELS(NAME, W)                                                                                                                                            \
    extern "C" __global__ void gemv_1_##NAME(const W* w, const float* x, float* y, int N, int K, int tokens, int tpb) { gemv_rows<W, 1>(w, x, y, N, K, tokens, tpb); }    \
    extern "C" __global__ void gemv_4_##NAME(const W* w, const float* x, float* y, int N, int K, int tokens, int tpb) { gemv_rows<W, 4>(w, x, y, N, K, tokens, tpb); }    \
    extern "C" __global__ void __launch_bounds__(256) gemm_##NAME(const W* w, const float* x, float* y, int N, int K, int tokens) { gemm_tiles<W>(w, x, y, N, K, tokens); } \
    extern "C" __global__ void decode_##NAME(const W* w, const int* ids, float* y, int N, int K) { decode_rows<W>(w, ids, y, N, K); }

FLOAT_KERNELS(f32, float)
FLOAT_KERNELS(f16, __half)
FLOAT_KERNELS(bf16, __nv_bfloat16)
