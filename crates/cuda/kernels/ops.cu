// Element-wise operations and small reductions, to the bit as `cpu/src/ops.rs` and `cpu/src/math.rs` define them.
//
// Shapes: rows are tokens, [T, D]; heads [T, H, C].
#include "math.cuh"
#include "mma.cuh"

namespace {

constexpr int THREADS = 256;

// 1 / sqrt(mean(x^2) + eps) of `n` values in shared memory: value i in lane i mod 16, lanes added by halves. By the first
// 16 lanes of a warp; the others' result is not used.
__device__ float inverse_rms(const float* x, int n, float eps) {
    const int lane = threadIdx.x % 16;
    float sum = 0.0f;
    int i = lane;
#pragma unroll 1
    for (; i + 7 * 16 < n; i += 8 * 16) {
        float y[8];
#pragma unroll
        for (int j = 0; j < 8; j++) y[j] = x[i + j * 16];
#pragma unroll
        for (int j = 0; j < 8; j++) sum = fmaf(y[j], y[j], sum);
    }
    for (; i < n; i += 16) sum = fmaf(x[i], x[i], sum);
    sum = math::sum_lanes(sum);
    return 1.0f / sqrtf(sum / (float)n + eps);
}

// The same for all threads of a block; `shared` is one float.
__device__ float block_inverse_rms(const float* x, int n, float eps, float* shared) {
    __syncthreads();
    if (threadIdx.x < 32) {
        const float g = inverse_rms(x, n, eps);
        if (threadIdx.x == 0) *shared = g;
    }
    __syncthreads();
    return *shared;
}

}  // namespace

// x += norm(delta + delta2 + bias) * post; normed = norm(x) * w. Everything but `x` may be null: no delta (x stays), one pass, no
// bias, no norm of the delta; no `normed` (without w: not scaled). A thread block a row; dynamic shared memory: D floats.
extern "C" __global__ void __launch_bounds__(THREADS) residual_norm(float* x, const float* delta, const float* delta2, const float* bias, const float* post,
                                                                   const float* w, float* normed, int d, float eps) {
    extern __shared__ float row[];
    wait_for_previous();
    let_next_start();
    __shared__ float factor;
    const size_t at = (size_t)blockIdx.x * d;
    if (delta != nullptr && post != nullptr) {
        for (int i = threadIdx.x; i < d; i += THREADS) {
            float y = delta[at + i];
            if (delta2 != nullptr) y = y + delta2[at + i];
            if (bias != nullptr) y = y + bias[i];
            row[i] = y;
        }
        const float g = block_inverse_rms(row, d, eps, &factor);
        for (int i = threadIdx.x; i < d; i += THREADS) row[i] = x[at + i] + row[i] * g * post[i];
    } else {
        for (int i = threadIdx.x; i < d; i += THREADS) {
            float y = x[at + i];
            if (delta != nullptr) {
                float z = delta[at + i];
                if (delta2 != nullptr) z = z + delta2[at + i];
                if (bias != nullptr) z = z + bias[i];
                y = y + z;
            }
            row[i] = y;
        }
    }
    if (delta != nullptr)
        for (int i = threadIdx.x; i < d; i += THREADS) x[at + i] = row[i];
    if (normed == nullptr) return;
    const float g = block_inverse_rms(row, d, eps, &factor);
    for (int i = threadIdx.x; i < d; i += THREADS) normed[at + i] = w != nullptr ? row[i] * g * w[i] : row[i] * g;
}

// In place, head by head of x [T, H, C]: bias [H, C] added, norm with weights [C], rope; each may be null. Then, if asked for and C is
// a power of two, the product with the normalised Hadamard matrix. A warp a head.
//
// Rope turns the first 2 * pairs values by the angles of row `position + t` (position null: row t) of cos, sin [.., pairs]:
// neighbours 2i, 2i + 1, or halves i, i + pairs. Dynamic shared memory: C floats a warp.
extern "C" __global__ void __launch_bounds__(THREADS) heads(float* x, const float* bias, const float* norm, const float* cos, const float* sin,
                                                           const unsigned* position, int tokens, int heads, int c, int pairs, int halves, float eps, int hadamard) {
    extern __shared__ float rows[];
    wait_for_previous();
    let_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, item = blockIdx.x * (THREADS / 32) + warp;
    if (item >= tokens * heads) return;
    float* row = rows + warp * c;
    float* from = x + (size_t)item * c;
    for (int i = lane; i < c; i += 32) row[i] = bias != nullptr ? from[i] + bias[item % heads * c + i] : from[i];
    __syncwarp();
    if (norm != nullptr) {
        const float g = __shfl_sync(~0u, inverse_rms(row, c, eps), 0);
        for (int i = lane; i < c; i += 32) row[i] = row[i] * g * norm[i];
        __syncwarp();
    }
    if (cos != nullptr) {
        const size_t angle = ((position != nullptr ? *position : 0u) + (size_t)(item / heads)) * pairs;
        for (int i = lane; i < pairs; i += 32) {
            const int first = halves ? i : 2 * i, second = halves ? i + pairs : 2 * i + 1;
            const float a = row[first], b = row[second], co = cos[angle + i], si = sin[angle + i];
            row[first] = fmaf(-b, si, a * co), row[second] = fmaf(a, si, b * co);
        }
        __syncwarp();
    }
    if (hadamard) {
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
    for (int i = lane; i < c; i += 32) from[i] = row[i];
}

// gate = f(gate) * up; f: 0 SiLU, 1 GELU (tanh form).
extern "C" __global__ void gated(float* gate, const float* up, int f, unsigned long long n) {
    wait_for_previous();
    let_next_start();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) gate[i] = (f == 0 ? math::silu(gate[i]) : math::gelu(gate[i])) * up[i];
}

// x += y, both [T, D]; `stride` 0: y is one row for all tokens, else D.
extern "C" __global__ void add(float* x, const float* y, int d, int stride, unsigned long long n) {
    wait_for_previous();
    let_next_start();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = x[i] + y[stride == 0 ? i % d : i];
}

// x = tanh(x / cap) * cap.
extern "C" __global__ void soft_cap(float* x, float cap, unsigned long long n) {
    wait_for_previous();
    let_next_start();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = math::soft_cap(x[i], cap);
}

// x *= factor.
extern "C" __global__ void scale(float* x, float factor, unsigned long long n) {
    wait_for_previous();
    let_next_start();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = x[i] * factor;
}
