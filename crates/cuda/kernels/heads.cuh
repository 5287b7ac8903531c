// Norms of rows in shared memory, and what is done to heads, to the bit as `cpu/src/ops.rs` defines them.
#pragma once
#include "math.cuh"

// 1 / sqrt(mean(x^2) + eps) of `n` values in shared memory: value i in lane i mod 16, lanes added by halves. By the first
// 16 lanes of a warp; the others' result is not used.
__device__ __forceinline__ float inverse_rms(const float* x, int n, float eps) {
    constexpr int AHEAD = 8;  // read while the ones before are added: the sums are one chain
    const int lane = threadIdx.x % 16, whole = n / (AHEAD * 16);
    float sum = 0.0f, y[AHEAD], next[AHEAD];
    x += lane;
    if (whole > 0)
#pragma unroll
        for (int j = 0; j < AHEAD; j++) y[j] = x[j * 16];
#pragma unroll 2
    for (int g = 0; g < whole; g++) {
        x += AHEAD * 16;
        if (g + 1 < whole)
#pragma unroll
            for (int j = 0; j < AHEAD; j++) next[j] = x[j * 16];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) sum = fmaf(y[j], y[j], sum);
#pragma unroll
        for (int j = 0; j < AHEAD; j++) y[j] = next[j];
    }
    for (int i = whole * AHEAD * 16 + lane; i < n; i += 16, x += 16) sum = fmaf(*x, *x, sum);
    sum = math::sum_lanes(sum);
    return 1.0f / sqrtf(sum / (float)n + eps);
}

// The same for all threads of a block; `shared` is one float.
__device__ __forceinline__ float block_inverse_rms(const float* x, int n, float eps, float* shared) {
    __syncthreads();
    if (threadIdx.x < 32) {
        const float g = inverse_rms(x, n, eps);
        if (threadIdx.x == 0) *shared = g;
    }
    __syncthreads();
    return *shared;
}

// Norm with weights [C], rope, and the product with the normalised Hadamard matrix, of a head in shared memory, by a warp; norm and cos may be null.
// Rope turns the first 2 * pairs values: neighbours 2i, 2i + 1, or halves i, i + pairs.
//
// HELD angles of a lane are read before the head is: so their way is not waited for.
constexpr int HELD = 2;
struct Turn {
    const float *norm, *cos, *sin;
    int pairs, halves, hadamard;
    float eps;
    float held_cos[HELD], held_sin[HELD];

    __device__ __forceinline__ Turn(const float* norm, const float* cos, const float* sin, int pairs, int halves, int hadamard, float eps)
        : norm(norm), cos(cos), sin(sin), pairs(pairs), halves(halves), hadamard(hadamard), eps(eps) {
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            const int i = threadIdx.x % 32 + 32 * j;
            held_cos[j] = cos != nullptr && i < pairs ? cos[i] : 0.0f, held_sin[j] = cos != nullptr && i < pairs ? sin[i] : 0.0f;
        }
    }
};

__device__ __forceinline__ void turn_head(float* row, int c, const Turn& how) {
    const int lane = threadIdx.x % 32;
    if (how.norm != nullptr) {
        const float g = __shfl_sync(~0u, inverse_rms(row, c, how.eps), 0);
        for (int i = lane; i < c; i += 32) row[i] = row[i] * g * how.norm[i];
        __syncwarp();
    }
    if (how.cos != nullptr) {
#pragma unroll 1
        for (int i = lane, j = 0; i < how.pairs; i += 32, j++) {
            const int first = how.halves ? i : 2 * i, second = how.halves ? i + how.pairs : 2 * i + 1;
            const float a = row[first], b = row[second], co = j == 0 ? how.held_cos[0] : j == 1 ? how.held_cos[1] : how.cos[i];
            const float si = j == 0 ? how.held_sin[0] : j == 1 ? how.held_sin[1] : how.sin[i];
            row[first] = fmaf(-b, si, a * co), row[second] = fmaf(a, si, b * co);
        }
        __syncwarp();
    }
    if (how.hadamard && c == 128) {  // four values a lane: most steps are shuffles
        float4 x = ((const float4*)row)[lane];
        x = make_float4(x.x + x.y, x.x - x.y, x.z + x.w, x.z - x.w);
        x = make_float4(x.x + x.z, x.y + x.w, x.x - x.z, x.y - x.w);
        auto step = [&](float& own, int by) {
            const float other = __shfl_xor_sync(~0u, own, by);
            own = lane & by ? other - own : own + other;
        };
#pragma unroll
        for (int by = 1; by < 32; by *= 2) step(x.x, by), step(x.y, by), step(x.z, by), step(x.w, by);
        const float factor = 1.0f / sqrtf((float)c);
        ((float4*)row)[lane] = make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
        __syncwarp();
    } else if (how.hadamard) {
        for (int step = 1; step < c; step *= 2) {
            for (int i = lane; i < c / 2; i += 32) {
                const int low = i / step * 2 * step + i % step;
                const float a = row[low], b = row[low + step];
                row[low] = a + b, row[low + step] = a - b;
            }
            __syncwarp();
        }
        const float factor = 1.0f / sqrtf((float)c);
        for (int i = lane; i < c; i += 32) row[i] = row[i] * factor;
        __syncwarp();
    }
}
