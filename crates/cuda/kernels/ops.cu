// Element-wise operations and small reductions, to the bit as `cpu/src/ops.rs` and `cpu/src/math.rs` define them.
//
// Shapes: rows are tokens, [T, D]; heads [T, H, C].
#include "acts_many.cuh"
#include "heads.cuh"
#include "mma.cuh"

constexpr int THREADS = 256;

namespace {

// As kernels take them, but for what every row has of its own.
struct ResidualNorm {
    const float *delta, *delta2, *bias, *post, *w;
    float* normed;
    int d;
    float eps;
    ActsOut blocks32, blocks256;
};

__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
template <class V> __device__ __forceinline__ V ones();
template <> __device__ __forceinline__ float ones<float>() { return 1.0f; }
template <> __device__ __forceinline__ float4 ones<float4>() { return make_float4(1, 1, 1, 1); }
__device__ __forceinline__ float scaled(float a, float g, float b) { return a * g * b; }
__device__ __forceinline__ float4 scaled(float4 a, float g, float4 b) { return make_float4(a.x * g * b.x, a.y * g * b.y, a.z * g * b.z, a.w * g * b.w); }

// V: float4, or float where D is not whole fours. Dynamic shared memory: the row. Weights of the first HELD pieces of a thread are read before the
// wait, as nobody writes them.
template <class V> __device__ __forceinline__ void residual_norm_row(float* x, const ResidualNorm& a) {
    extern __shared__ __align__(16) float shared[];
    __shared__ float factor;
    constexpr int PER = sizeof(V) / 4, HELD = 2;
    const int n = a.d / PER, t = blockIdx.x;
    const size_t at = (size_t)t * n;
    V *row = (V*)shared, *of_x = (V*)x + at;
    const V *delta = (const V*)a.delta, *delta2 = (const V*)a.delta2, *bias = (const V*)a.bias, *post = (const V*)a.post, *w = (const V*)a.w;
    V weights[HELD];
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        const int i = threadIdx.x + j * blockDim.x;
        weights[j] = w != nullptr && i < n ? w[i] : ones<V>();
    }
    wait_for_previous();
    const bool is_normed_first = delta != nullptr && post != nullptr;
#pragma unroll 1
    for (int first = threadIdx.x; first < n; first += HELD * blockDim.x) {
        V y[HELD], z[HELD];
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            const int i = min(first + j * (int)blockDim.x, n - 1);
            y[j] = of_x[i], z[j] = delta != nullptr ? delta[at + i] : V{};
        }
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            const int i = first + j * blockDim.x;
            if (i >= n) break;
            if (delta2 != nullptr) z[j] = plus(z[j], delta2[at + i]);
            if (bias != nullptr) z[j] = plus(z[j], bias[i]);
            if (is_normed_first) {
                row[i] = z[j];
            } else {
                if (delta != nullptr) y[j] = plus(y[j], z[j]), of_x[i] = y[j];
                row[i] = y[j];
            }
        }
    }
    if (is_normed_first) {
        const float g = block_inverse_rms(shared, a.d, a.eps, &factor);
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            const V y = plus(of_x[i], scaled(row[i], g, post[i]));
            row[i] = of_x[i] = y;
        }
    }
    if (a.normed == nullptr && a.blocks32.q == nullptr && a.blocks256.q == nullptr) return;
    const float g = block_inverse_rms(shared, a.d, a.eps, &factor);
#pragma unroll 1
    for (int i = threadIdx.x, j = 0; i < (n + 31) / 32 * 32; i += blockDim.x, j++) {
        V y{};
        if (i < n) {
            const V by = j == 0 ? weights[0] : j == 1 ? weights[1] : w != nullptr ? w[i] : ones<V>();
            y = scaled(row[i], g, by);
            row[i] = y;
            if (a.normed != nullptr) ((V*)a.normed)[at + i] = y;
        }
        if constexpr (PER == 4)
            if (a.blocks32.q != nullptr) emit_32(a.blocks32, y, t, i / 8, i % 8, i < n);
    }
    if (a.blocks256.q == nullptr) return;
    __syncthreads();
    emit_256_row(a.blocks256, shared, t);
}

}  // namespace

// x += norm(delta + delta2 + bias) * post; normed = norm(x) * w, as f32 and as blocks of 32 and 256. Everything but `x` may be null: no delta (x
// stays), one pass, no bias, no norm of the delta; not scaled without w; no such result. A thread block a row; dynamic shared memory: D floats.
// Registers: what a thread block of the product behind it leaves (product_one.cuh), so that one holds both.
extern "C" __global__ void __launch_bounds__(640, 2) residual_norm(float* x, const float* delta, const float* delta2, const float* bias, const float* post,
                                                                const float* w, float* normed, int d, float eps, uint32_t* q32, int2* meta, int how32,
                                                                uint32_t* q256, float* d256, __half* s16, int how256) {
    let_next_start();
    const ResidualNorm a{delta, delta2, bias, post, w, normed, d, eps, {q32, meta, nullptr, nullptr, d, how32}, {q256, nullptr, d256, s16, d, how256}};
    if (d % 4 == 0) {
        residual_norm_row<float4>(x, a);
    } else {
        residual_norm_row<float>(x, a);
    }
}

// The same of many rows, whose blocks are arranged, without `post`: more rows are under way, as a thread block has fewer threads and registers; a thread
// has 8 values, a warp a block of 256.
extern "C" __global__ void __launch_bounds__(128, 8) residual_norm_many(float* x, const float* delta, const float* delta2, const float* bias, const float* w,
                                                                         float* normed, int d, float eps, uint32_t* q32, int2* meta, int how32, uint32_t* q256,
                                                                         float* d256, __half* s16, int how256) {
    extern __shared__ __align__(16) float shared[];
    __shared__ float factor;
    constexpr int AHEAD = 5;
    let_next_start();
    const int n = d / 4, t = blockIdx.x;
    const size_t at = (size_t)t * n;
    float4 *row = (float4*)shared, *of_x = (float4*)x + at;
    wait_for_previous();
#pragma unroll 1
    for (int first = threadIdx.x; first < n; first += AHEAD * blockDim.x) {
        float4 y[AHEAD], z[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int i = min(first + j * (int)blockDim.x, n - 1);
            y[j] = of_x[i], z[j] = delta != nullptr ? ((const float4*)delta)[at + i] : float4{};
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int i = first + j * blockDim.x;
            if (i >= n) break;
            if (delta2 != nullptr) z[j] = plus(z[j], ((const float4*)delta2)[at + i]);
            if (bias != nullptr) z[j] = plus(z[j], ((const float4*)bias)[i]);
            if (delta != nullptr) of_x[i] = y[j] = plus(y[j], z[j]);
            row[i] = y[j];
        }
    }
    const float g = block_inverse_rms(shared, d, eps, &factor);
#pragma unroll 1
    for (int i = threadIdx.x; i < (d / 8 + 31) / 32 * 32; i += blockDim.x) {
        const bool live = i < d / 8;
        float4 v[2] = {};
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (live) v[j] = scaled(row[2 * i + j], g, w != nullptr ? ((const float4*)w)[2 * i + j] : ones<float4>());
            if (live && normed != nullptr) ((float4*)normed)[at + 2 * i + j] = v[j];
        }
        float4 lost[2] = {v[0], v[1]};
        if (q32 != nullptr) many::emit_32({q32, meta, nullptr, nullptr, d, how32}, lost, t, i / 4, i % 4, live);
        if (q256 != nullptr) many::emit_256({q256, nullptr, d256, s16, d, how256}, v, t, i / 32);
    }
}

// In place, head by head of x [T, H, C]: bias [H, C] added, norm with weights [C], rope; each may be null. Then, if asked for and C is
// a power of two, the product with the normalised Hadamard matrix. A warp a head.
//
// Rope turns the first 2 * pairs values by the angles of row `position + t` (position null: row t) of cos, sin [.., pairs]:
// neighbours 2i, 2i + 1, or halves i, i + pairs. Dynamic shared memory: C floats a warp.
extern "C" __global__ void __launch_bounds__(THREADS) heads(float* x, const float* bias, const float* norm, const float* cos, const float* sin,
                                                           const unsigned* position, int tokens, int heads, int c, int pairs, int halves, float eps, int hadamard) {
    extern __shared__ __align__(16) float rows[];
    wait_for_previous();
    let_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, item = blockIdx.x * (THREADS / 32) + warp;
    if (item >= tokens * heads) return;
    float* row = rows + warp * c;
    float* from = x + (size_t)item * c;
    const size_t angle = cos != nullptr ? ((position != nullptr ? *position : 0u) + (size_t)(item / heads)) * pairs : 0;
    const Turn how(norm, cos != nullptr ? cos + angle : nullptr, sin + angle, pairs, halves, hadamard, eps);
    for (int i = lane; i < c; i += 32) row[i] = bias != nullptr ? from[i] + bias[item % heads * c + i] : from[i];
    __syncwarp();
    turn_head(row, c, how);
    for (int i = lane; i < c; i += 32) from[i] = row[i];
}

// f(gate) * up; f: 0 SiLU, 1 GELU (tanh form).
__device__ __forceinline__ float gated_1(int f, float gate, float up) { return (f == 0 ? math::silu(gate) : math::gelu(gate)) * up; }
__device__ __forceinline__ float4 gated_4(int f, float4 gate, float4 up) {
    return make_float4(gated_1(f, gate.x, up.x), gated_1(f, gate.y, up.y), gated_1(f, gate.z, up.z), gated_1(f, gate.w, up.w));
}

// gate = f(gate) * up.
extern "C" __global__ void gated(float* gate, const float* up, int f, unsigned long long n) {
    wait_for_previous();
    let_next_start();
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) gate[i] = gated_1(f, gate[i], up[i]);
}

// The same, its result in blocks; if asked for, as f32 as well. Blocks of 32: grid (ceil(K / 4 / blockDim), T).
extern "C" __global__ void gated_32(float* gate, const float* up, int f, int is_kept, uint32_t* q, int2* meta, int K, int how) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y, run = i / 8;
    const bool live = run < K / 32;
    const size_t at = (size_t)t * K + i * 4;
    float4 x = make_float4(0, 0, 0, 0);
    if (live) x = gated_4(f, *(const float4*)(gate + at), *(const float4*)(up + at));
    if (live && is_kept) *(float4*)(gate + at) = x;
    emit_32({q, meta, nullptr, nullptr, K, how}, x, t, run, i % 8, live);
}
// Blocks of 256: grid (ceil(K / 256 / warps), T).
extern "C" __global__ void gated_256(float* gate, const float* up, int f, int is_kept, uint32_t* q, float* d, __half* s16, int K, int how) {
    let_next_start();
    wait_for_previous();
    const int lane = threadIdx.x % 32, block = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, t = blockIdx.y;
    if (block >= K / 256) return;
    const size_t at = (size_t)t * K + block * 256 + lane * 4;
    float4 x[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        x[i] = gated_4(f, *(const float4*)(gate + at + 128 * i), *(const float4*)(up + at + 128 * i));
        if (is_kept) *(float4*)(gate + at + 128 * i) = x[i];
    }
    emit_256({q, nullptr, d, s16, K, how}, x, t, block);
}

// f(gate) * up of 8 values. SiLU of gates that are neither large nor tiny needs no limits.
__device__ __forceinline__ void gated_8(int f, const float4* gate, const float4* up, float4 (&x)[2]) {
    constexpr float LARGE = 40.0f, TINY = 0x1p-60f, SHIFT = 12582912.0f + 126.0f;
    float4 g[2] = {gate[0], gate[1]}, u[2] = {up[0], up[1]};
    float most = 0.0f, least = INFINITY;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        most = fmaxf(fmaxf(most, fmaxf(fabsf(g[i].x), fabsf(g[i].y))), fmaxf(fabsf(g[i].z), fabsf(g[i].w)));
        least = fminf(fminf(least, fminf(fabsf(g[i].x), fabsf(g[i].y))), fminf(fabsf(g[i].z), fabsf(g[i].w)));
    }
    auto usual = [&](float x, float by) {
        const float shifted = -x * math::LOG2_E + SHIFT, n = shifted - SHIFT;
        const float r = fmaf(n, -math::LN2_LOW, fmaf(n, -math::LN2_HIGH, -x));
        const float d = 1.0f + math::exp_taylor(r, 2.0f) * __int_as_float(__float_as_int(shifted) << 23);
        return x / d * by;
    };
    if (f == 0 && most <= LARGE && least >= TINY) {
#pragma unroll
        for (int i = 0; i < 2; i++) x[i] = make_float4(usual(g[i].x, u[i].x), usual(g[i].y, u[i].y), usual(g[i].z, u[i].z), usual(g[i].w, u[i].w));
    } else {
#pragma unroll 1
        for (int i = 0; i < 2; i++) {
            const float4 y = gated_4(f, g[0], u[0]);
            x[0] = x[1], x[1] = y, g[0] = g[1], u[0] = u[1];
        }
    }
}

// Of many tokens, their blocks arranged: 8 values a thread. Grid (ceil(K / 8 / blockDim), T).
extern "C" __global__ void gated_32_many(float* gate, const float* up, int f, int is_kept, uint32_t* q, int2* meta, int K, int how) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    const bool live = i < K / 8;
    float4 *of_gate = (float4*)(gate + (size_t)t * K) + 2 * i, x[2] = {};
    if (live) gated_8(f, of_gate, (const float4*)(up + (size_t)t * K) + 2 * i, x);
    if (live && is_kept) of_gate[0] = x[0], of_gate[1] = x[1];
    many::emit_32({q, meta, nullptr, nullptr, K, how}, x, t, i / 4, i % 4, live);
}
extern "C" __global__ void gated_256_many(float* gate, const float* up, int f, int is_kept, uint32_t* q, float* d, __half* s16, int K, int how) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    if (i >= K / 8) return;
    float4 *of_gate = (float4*)(gate + (size_t)t * K) + 2 * i, x[2] = {};
    gated_8(f, of_gate, (const float4*)(up + (size_t)t * K) + 2 * i, x);
    if (is_kept) of_gate[0] = x[0], of_gate[1] = x[1];
    many::emit_256({q, nullptr, d, s16, K, how}, x, t, i / 32);
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
