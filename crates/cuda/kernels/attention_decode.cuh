// Attention of one token over a list of blocks: partial results (m, l, o) a block and query head, in the order that
// `cpu/src/attention/mod.rs` defines, to the bit.
//
// Shapes: q [H, C_k], partials [slot][H][2 + C_v]. Query heads of a KV head are attended together, G at a time.
//
//   scores   a[n] = fma(q[c], k[n][c], a[n]); quantised K: a[n] = fma(f32(sum q8 k), d_q d_k, a[n]); s = a * scale (soft-capped)
//   weights  m = max s, e = exp(s - m), l = sum of e in 16 lanes
//   o        four segments of 64 cells, each from +0, added in order
//
// Two ways, the same bits:
//
//   many   enough blocks: four warps do a block for G heads
//   few    else: four warps do a block for one head, so that latencies are short
//
// Measured on an H200 (40 query heads, 8 KV heads of 128, f16, 65536 cells): a warp a block instead of four, 8 cells and 8 values a lane, with
// half the reads of shared memory, was no faster there, and at 16384 cells much slower: too few warps, too long a chain each.
#pragma once
#include "attention_cache.cuh"
#include "math.cuh"

namespace decode {

using cache::CELLS;
using cache::PANEL;

constexpr int WARPS = 4, THREADS = 32 * WARPS;

// Thread blocks that a multiprocessor's registers are to hold; the wrapper has the same rule.
__host__ __device__ constexpr int blocks_a_multiprocessor(int g, int w) { return g * w <= 28 ? 4 : 3; }

struct Args {
    const float* q;
    const cache::Block* blocks;
    const unsigned* count;
    const unsigned* position;
    float* partials;
    unsigned capacity;
    int heads_kv, gqa, c_k, c_v, type_k, type_v;
    float scale, soft_cap;
    int window;
};

__device__ __forceinline__ void copy16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global));
}

__device__ __forceinline__ float2 halves(unsigned w, bool is_bf16) {
    if (is_bf16) return {__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u)};
    return __half22float2(*(const __half2*)&w);
}


// The exact value d * q: a code raised by `bias` goes into the mantissa of 32768 + code, and bias and 32768 are taken off again times d.
// (32768 + bias) * d has at most 24 bits.
__device__ __forceinline__ float decoded(unsigned codes, int i, float d, float off) {
    return fmaf(__uint_as_float(__byte_perm(codes, 0x47000000u, 0x7504 | i << 4)), d, off);
}
__device__ __forceinline__ float offset(float d, bool nibbles) { return d * (nibbles ? -32776.0f : -32896.0f); }

// W values of a cell's V, in shared memory, from `column` on.
template <int W>
__device__ __forceinline__ void words(const uint8_t* from, unsigned (&to)[W]) {
    if constexpr (W == 4) {
        const uint4 x = *(const uint4*)from;
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    } else if constexpr (W == 2) {
        const uint2 x = *(const uint2*)from;
        to[0] = x.x, to[1] = x.y;
    } else {
        to[0] = *(const unsigned*)from;
    }
}

template <int W>
__device__ __forceinline__ void values_float(const uint8_t* cells, int n, int c_v, int column, bool is_bf16, float (&x)[W]) {
    unsigned w[W / 2];
    words(cells + (n * c_v + column) * 2, w);
#pragma unroll
    for (int i = 0; i < W / 2; i++) {
        const float2 pair = halves(w[i], is_bf16);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
}

template <int W, bool NIBBLES>
__device__ __forceinline__ void values_quantised(const uint8_t* cells, const uint8_t* scales, int n, int c_v, int column, float (&x)[W]) {
    const float d = __half2float(((const __half*)scales)[n * (c_v / 32) + column / 32]);
    unsigned w[W <= 4 ? 1 : W / 4];
    const int at = NIBBLES ? n * (c_v / 2) + column / 32 * 16 + column % 16 : n * c_v + column;
    if constexpr (W == 2) {
        w[0] = *(const unsigned short*)(cells + at);
    } else {
        words(cells + at, w);
    }
    const int shift = column % 32 / 16 * 4;
    const float off = offset(d, NIBBLES);
#pragma unroll
    for (int i = 0; i < W; i++) x[i] = decoded(NIBBLES ? w[i / 4] >> shift & 0x0f0f0f0fu : w[i / 4] ^ 0x80808080u, i % 4, d, off);
}

// Four values of a query, 8 lanes a run of 32, by the rule of `quant::act`.
struct Run {
    float d;
    int word, sum;  // four codes; the sum of the run's codes
};

__device__ __forceinline__ Run quantised(float4 x) {
    const float v[4] = {x.x, x.y, x.z, x.w};
    unsigned largest = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) largest = max(largest, __float_as_uint(v[i]) & 0x7fffffffu);
#pragma unroll
    for (int o = 4; o > 0; o /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, o));
    const float amax = __uint_as_float(largest), inverse = 127.0f / amax;
    Run r{amax / 127.0f, 0, 0};
    const bool is_faulty = largest >= 0x7f800000u, is_tiny = amax < 0x1p-100f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int code = is_faulty || is_tiny ? 0 : __float2int_rn(v[i] * inverse);
        r.word |= (code & 255) << 8 * i, r.sum += code;
    }
#pragma unroll
    for (int o = 4; o > 0; o /= 2) r.sum += __shfl_xor_sync(~0u, r.sum, o);
    if (is_faulty) r.d = __uint_as_float(0x7fc00000u);
    if (is_tiny) r.d = 0.0f;
    return r;
}

// A place in the launch's work: blocks of the list times groups of query heads, the blocks of a group one after the other.
struct Place {
    int left;  // items, with this one
    int block, head, group;  // head: of K and V; group: of its query heads

    __device__ __forceinline__ void advance(int blocks, int groups) {
        left--;
        if (++block == blocks) {
            block = 0;
            if (++group == groups) group = 0, head++;
        }
    }
};

// The items of worker `number` of `workers`: neighbours, one more for the first ones.
__device__ __forceinline__ Place place(unsigned number, unsigned workers, int blocks, int groups, int heads) {
    const unsigned total = (unsigned)blocks * groups * heads, each = total / workers, more = total % workers;
    const unsigned begin = number * each + min(number, more), of_head = blocks > 0 ? begin / blocks : 0;
    return {(int)(each + (number < more)), (int)(begin - of_head * blocks), (int)(of_head / groups), (int)(of_head % groups)};
}

}  // namespace decode

#include "attention_few.cuh"
#include "attention_many.cuh"

namespace decode {

// Many blocks of whole heads of two types, without a window: what is known when this is compiled takes a fifth of the instructions and the registers that were spilled.
template <int G, int W, int K, int V>
__device__ __forceinline__ void attend_known(Args a, uint8_t* shared) {
    a.c_k = a.c_v = 32 * W, a.type_k = K, a.type_v = V, a.window = 0;
    many::attend<G, W>(a, shared);
}

template <int G, int W>
__device__ __forceinline__ void attend_any(const Args& a) {
    extern __shared__ __align__(16) uint8_t shared[];
    let_next_start();
    // The list is read before the kernel ahead has ended: it is the host that writes it. Who has nothing to do makes room for the kernels to come.
    const long long of_heads = (long long)*a.count * a.heads_kv * a.gqa;
    if (blockIdx.x > 0 && blockIdx.x >= of_heads) return;
#if __CUDA_ARCH__ >= 900
    const bool rehearses = of_heads * 4 <= gridDim.x;  // a multiprocessor has one of them
#else
    const bool rehearses = false;  // launches do not overlap
#endif
    if (of_heads <= gridDim.x) {
        few::attend<W>(a, shared, rehearses);
        return;
    }
    // The pairs of types that a cache is given.
    using namespace cache;
    const bool is_whole = a.c_k == 32 * W && a.c_v == 32 * W && a.window == 0;
    auto has = [&](int k, int v) { return is_whole && a.type_k == k && a.type_v == v; };
    if (has(F16, F16)) {
        attend_known<G, W, F16, F16>(a, shared);
    } else if (has(Q8_0, Q8_0)) {
        attend_known<G, W, Q8_0, Q8_0>(a, shared);
    } else if (has(Q8_0, Q4_0)) {
        attend_known<G, W, Q8_0, Q4_0>(a, shared);
    } else if (has(Q4_0, Q4_0)) {
        attend_known<G, W, Q4_0, Q4_0>(a, shared);
    } else {
        many::attend<G, W>(a, shared);
    }
}

}  // namespace decode

// Kernels for G query heads at a time, by the values a lane has of a cell's V: 2 up to C_v = 64, 4 up to 128, 8 up to 256 (there up to 4
// heads).
#define ATTEND_KERNEL(G, W)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(decode::THREADS, decode::blocks_a_multiprocessor(G, W))                         \
        attend(const float* q, const cache::Block* blocks, const unsigned* count, const unsigned* position, float* partials, \
                    unsigned capacity, int heads_kv, int gqa, int c_k, int c_v, int type_k, int type_v, float scale, float soft_cap, \
                    int window) {                                                                                                \
        decode::attend_any<G, W>({q, blocks, count, position, partials, capacity, heads_kv, gqa, c_k, c_v, type_k, type_v, scale, \
                                  soft_cap, window});                                                                            \
    }
