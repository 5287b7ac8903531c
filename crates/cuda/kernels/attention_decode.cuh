// Attention of one token over a list of blocks: partial results (m, l, o) a block and query head, in the order that
// `cpu/src/attention/mod.rs` defines, to the bit.
//
// Shapes: q [H, C_k], partials [slot][H][2 + C_v]. Query heads of a KV head are attended together, G at a time.
//
//   scores   a[n] = fma(q[c], k[n][c], a[n]); quantised K: a[n] = fma(f32(sum q8 k), d_q d_k, a[n]); s = a * scale (soft-capped)
//   weights  m = max s, e = exp(s - m), l = sum of e in 16 lanes
//   o        four segments of 64 cells, each from +0, added in order
//
// A thread block has four warps and does one block of cells after another. A warp owns a panel of 64 cells: its K, then its
// V. These bytes it streams through a ring of its own in shared memory by asynchronous copies, across blocks of cells, so
// that memory is kept busy while others compute; the four warps meet only for m and to add o and l up. In scores a lane has
// 2 cells of every head, in weighted sums W values of every head: each value read serves all heads.
#pragma once
#include "attention_cache.cuh"
#include "math.cuh"

namespace decode {

using cache::CELLS;
using cache::PANEL;

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int STAGE_CODES = 2048, STAGE_SCALES = 256, STAGE = STAGE_CODES + STAGE_SCALES;
constexpr int RING = 3;
constexpr int C_MAX = 256;

// Floats a row of values of G heads takes, so that it can be read as vectors.
__host__ __device__ constexpr int padded(int g) { return g <= 2 ? g : g <= 4 ? 4 : 8; }

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

// N values that all lanes read at the same place.
template <int N, class T>
__device__ __forceinline__ void broadcast(const T* from, T (&to)[N]) {
    static_assert(sizeof(T) == 4, "words");
    if constexpr (N > 4) {
        const int4 a = *(const int4*)from;
        const int w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = *(const T*)&w[i];
        if constexpr (N == 5) {
            to[4] = from[4];
        } else if constexpr (N == 6) {
            const int2 b = *(const int2*)(from + 4);
            to[4] = *(const T*)&b.x, to[5] = *(const T*)&b.y;
        } else {
            const int4 b = *(const int4*)(from + 4);
            const int v[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 4; i < N; i++) to[i] = *(const T*)&v[i - 4];
        }
    } else if constexpr (N > 2) {
        const int4 a = *(const int4*)from;
        const int w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = *(const T*)&w[i];
    } else if constexpr (N == 2) {
        const int2 a = *(const int2*)from;
        to[0] = *(const T*)&a.x, to[1] = *(const T*)&a.y;
    } else {
        to[0] = from[0];
    }
}

__device__ __forceinline__ float2 halves(unsigned w, bool is_bf16) {
    if (is_bf16) return {__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u)};
    return __half22float2(*(const __half2*)&w);
}

// How one token's K and V of a head and panel are cut into stages of the ring.
struct Cut {
    int k_steps, v_steps, v_cells;             // steps of K and of V, cells a step of V
    int k_codes, k_scales, v_codes, v_scales;  // bytes of a panel of K, of a step of V
    int k_step_scales;                         // bytes of a step of K
};

__device__ __forceinline__ Cut cut(const Args& a) {
    Cut r;
    r.k_codes = cache::code_bytes(a.type_k, PANEL * a.c_k), r.k_scales = cache::scale_bytes(a.type_k, PANEL * a.c_k);
    r.k_step_scales = a.type_k == cache::Q8_0 ? 128 : a.type_k == cache::Q4_0 ? 256 : 0;  // one run of 32 values, two
    r.k_steps = (r.k_codes + STAGE_CODES - 1) / STAGE_CODES;
    r.v_cells = PANEL;
    while (cache::code_bytes(a.type_v, r.v_cells * a.c_v) > STAGE_CODES) r.v_cells /= 2;
    r.v_steps = PANEL / r.v_cells;
    r.v_codes = cache::code_bytes(a.type_v, r.v_cells * a.c_v), r.v_scales = cache::scale_bytes(a.type_v, r.v_cells * a.c_v);
    return r;
}

// A place in the launch's work: blocks of the list times groups of G query heads, the blocks of a group one after the other.
struct Place {
    int left;  // items, with this one
    int block, head, group;

    __device__ __forceinline__ void advance(int blocks, int groups) {
        left--;
        if (++block == blocks) {
            block = 0;
            if (++group == groups) group = 0, head++;
        }
    }
};

// A warp's walk over what it reads, ahead of the arithmetic by the ring's length, and the ring.
struct Stream {
    uint8_t* ring;
    int slot;   // of the stage in work
    int first;  // copies to start before the first stage is waited for
    Place at;
    int step;
    const uint8_t *k, *k_scales, *v, *v_scales;

    // From `at` on, the next item of which this warp's panel sees something.
    __device__ __forceinline__ void find(const Args& a, const Cut& cut, int position, int panel, int blocks, int groups) {
        for (step = 0; at.left > 0; at.advance(blocks, groups)) {
            const cache::Block block = a.blocks[at.block];
            const cache::Range seen = cache::visible(block, position, a.window);
            if (max(seen.lo, panel * PANEL) >= min(seen.hi, (panel + 1) * PANEL)) continue;
            const int k_head = CELLS / PANEL * (cut.k_codes + cut.k_scales), v_head = CELLS / PANEL * cut.v_steps * (cut.v_codes + cut.v_scales);
            const uint8_t* of_k = (const uint8_t*)block.address + (size_t)at.head * k_head;
            const uint8_t* of_v = (const uint8_t*)block.address + (size_t)a.heads_kv * k_head + (size_t)at.head * v_head;
            k_scales = of_k + panel * cut.k_scales;
            k = of_k + CELLS / PANEL * cut.k_scales + panel * cut.k_codes;
            v_scales = of_v + panel * cut.v_steps * cut.v_scales;
            v = of_v + CELLS / PANEL * cut.v_steps * cut.v_scales + panel * cut.v_steps * cut.v_codes;
            return;
        }
    }

    // Waits for the next stage; starts the copy that takes the place of the last one.
    __device__ __forceinline__ const uint8_t* next(const Args& a, const Cut& cut, int position, int panel, int blocks, int groups) {
        const int lane = threadIdx.x % 32;
        if (first == 0) {
            asm volatile("cp.async.wait_group %0;" ::"n"(RING - 2) : "memory");
            __syncwarp();
        }
#pragma unroll 1
        for (;;) {
            if (at.left > 0) {
                const bool of_k = step < cut.k_steps;
                const int v_step = step - cut.k_steps;
                const int codes = of_k ? min(STAGE_CODES, cut.k_codes - step * STAGE_CODES) : cut.v_codes;
                const int scales = of_k ? min(cut.k_step_scales, cut.k_scales - step * cut.k_step_scales) : cut.v_scales;
                const uint8_t* from = of_k ? k + step * STAGE_CODES : v + v_step * cut.v_codes;
                const uint8_t* from_scales = of_k ? k_scales + step * cut.k_step_scales : v_scales + v_step * cut.v_scales;
                const int to = slot == 0 ? RING - 1 : slot - 1;
                uint8_t* stage = ring + (first > 0 ? RING - 1 - first : to) * STAGE;
#pragma unroll
                for (int i = 0; i < STAGE_CODES; i += 512)
                    if (i + lane * 16 < codes) copy16(stage + i + lane * 16, from + i + lane * 16);
                if (lane * 16 < scales) copy16(stage + STAGE_CODES + lane * 16, from_scales + lane * 16);
                if (++step == cut.k_steps + cut.v_steps) at.advance(blocks, groups), find(a, cut, position, panel, blocks, groups);
            }
            asm volatile("cp.async.commit_group;");
            if (first == 0) break;
            if (--first == 0) {
                asm volatile("cp.async.wait_group %0;" ::"n"(RING - 2) : "memory");
                __syncwarp();
            }
        }
        const uint8_t* stage = ring + slot * STAGE;
        slot = slot == RING - 1 ? 0 : slot + 1;
        return stage;
    }
};

// Query of the heads in work, as scores read it.
struct Query {
    float* q;    // [C_k][P], float K
    int* codes;  // [C_k / 4][P], four codes a word
    float* d;    // [C_k / 32][P]
    int* start;  // [C_k / 32][P]: what a sum begins with, to make up for K's nibbles being raised by 8
};

template <int G>
__device__ __forceinline__ Query query(float* mem, int c_k) {
    constexpr int P = padded(G);
    return {mem, (int*)mem, mem + c_k / 4 * P, (int*)mem + (c_k / 4 + c_k / 32) * P};
}

template <int G>
__device__ __forceinline__ void load_query(const Args& a, const Query& to, int head, int group) {
    constexpr int P = padded(G);
    auto row = [&](int g) { return a.q + (size_t)(head * a.gqa + min(group * G + g, a.gqa - 1)) * a.c_k; };
    if (cache::is_float(a.type_k)) {
#pragma unroll 1
        for (int i = threadIdx.x; i < G * a.c_k; i += THREADS) to.q[i % a.c_k * P + i / a.c_k] = row(i / a.c_k)[i % a.c_k];
        return;
    }
    // The rule of `quant::act`, a run of 32 values a warp.
    const int lane = threadIdx.x % 32, runs = a.c_k / 32;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < G * runs; i += WARPS) {
        const int g = i / runs, run = i % runs;
        const float x = row(g)[run * 32 + lane];
        unsigned largest = __float_as_uint(x) & 0x7fffffffu;
        for (int o = 16; o > 0; o /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, o));
        const float amax = __uint_as_float(largest);
        float d = amax / 127.0f;
        int code = __float2int_rn(x * (127.0f / amax));
        if (largest >= 0x7f800000u) d = __uint_as_float(0x7fc00000u), code = 0;
        if (amax < 0x1p-100f) d = 0.0f, code = 0;
        int word = (code & 255) << 8 * (lane % 4), sum = code;
        word |= __shfl_xor_sync(~0u, word, 1);
        word |= __shfl_xor_sync(~0u, word, 2);
        for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
        if (lane % 4 == 0) to.codes[(run * 8 + lane / 4) * P + g] = word;
        if (lane == 0) to.d[run * P + g] = d, to.start[run * P + g] = a.type_k == cache::Q4_0 ? -8 * sum : 0;
    }
}

// 16 values of float K.
template <int G>
__device__ __forceinline__ void scores_float(const uint8_t* stage, bool is_bf16, const float* q, float (&acc)[G][2]) {
    constexpr int P = padded(G);
    const unsigned* k = (const unsigned*)stage + threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < 16; c++) {
        const float2 x = halves(k[c * 32], is_bf16);
        float qs[G];
        broadcast<G>(q + c * P, qs);
#pragma unroll
        for (int g = 0; g < G; g++) acc[g][0] = fmaf(qs[g], x.x, acc[g][0]), acc[g][1] = fmaf(qs[g], x.y, acc[g][1]);
    }
}

// 32 values of quantised K.
template <int G, bool NIBBLES>
__device__ __forceinline__ void scores_quantised(const uint8_t* codes, const uint8_t* scales, const int* q, const float* d_q, const int* start, float (&acc)[G][2]) {
    constexpr int P = padded(G);
    const int lane = threadIdx.x % 32;
    int first[G], sums[G][2];
    broadcast<G>(start, first);
#pragma unroll
    for (int g = 0; g < G; g++) sums[g][0] = sums[g][1] = NIBBLES ? first[g] : 0;
#pragma unroll
    for (int word = 0; word < (NIBBLES ? 4 : 8); word++) {
        const int2 k = ((const int2*)codes)[word * 32 + lane];
        int qs[G];
        broadcast<G>(q + word * P, qs);
#pragma unroll
        for (int g = 0; g < G; g++) {
            sums[g][0] = __dp4a(NIBBLES ? k.x & 0x0f0f0f0f : k.x, qs[g], sums[g][0]);
            sums[g][1] = __dp4a(NIBBLES ? k.y & 0x0f0f0f0f : k.y, qs[g], sums[g][1]);
        }
        if constexpr (NIBBLES) {
            broadcast<G>(q + (word + 4) * P, qs);
#pragma unroll
            for (int g = 0; g < G; g++) {
                sums[g][0] = __dp4a(k.x >> 4 & 0x0f0f0f0f, qs[g], sums[g][0]);
                sums[g][1] = __dp4a(k.y >> 4 & 0x0f0f0f0f, qs[g], sums[g][1]);
            }
        }
    }
    const float2 d_k = __half22float2(((const __half2*)scales)[lane]);
    float d[G];
    broadcast<G>(d_q, d);
#pragma unroll
    for (int g = 0; g < G; g++) {
        acc[g][0] = fmaf((float)sums[g][0], d[g] * d_k.x, acc[g][0]);
        acc[g][1] = fmaf((float)sums[g][1], d[g] * d_k.y, acc[g][1]);
    }
}

// Scores of a warp's panel against stage `s` of K.
template <int G>
__device__ __forceinline__ void scores(const Args& a, const uint8_t* stage, int s, const Query& query, float (&acc)[G][2]) {
    constexpr int P = padded(G);
    if (a.type_k == cache::F16) {
        scores_float<G>(stage, false, query.q + s * 16 * P, acc);
    } else if (a.type_k == cache::BF16) {
        scores_float<G>(stage, true, query.q + s * 16 * P, acc);
    } else if (a.type_k == cache::Q8_0) {
        scores_quantised<G, false>(stage, stage + STAGE_CODES, query.codes + s * 8 * P, query.d + s * P, query.start + s * P, acc);
    } else {
#pragma unroll 1
        for (int i = 0; i < 2 && 2 * s + i < a.c_k / 32; i++) {
            const int run = 2 * s + i;
            scores_quantised<G, true>(stage + i * 1024, stage + STAGE_CODES + i * 128, query.codes + run * 8 * P, query.d + run * P, query.start + run * P, acc);
        }
    }
}

// W values of V from `column` on.
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
__device__ __forceinline__ void values_float(const uint8_t* stage, int n, int c_v, int column, bool is_bf16, float (&x)[W]) {
    unsigned w[W / 2];
    words(stage + (n * c_v + column) * 2, w);
#pragma unroll
    for (int i = 0; i < W / 2; i++) {
        const float2 pair = halves(w[i], is_bf16);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
}

// d * q, exactly: a code raised by `bias` goes into the mantissa of 32768 + code, and bias and 32768 are taken off again times d.
// (32768 + bias) * d has at most 24 bits.
template <int W, bool NIBBLES>
__device__ __forceinline__ void values_quantised(const uint8_t* stage, int n, int c_v, int column, float (&x)[W]) {
    const float d = __half2float(((const __half*)(stage + STAGE_CODES))[n * (c_v / 32) + column / 32]);
    unsigned w[W <= 4 ? 1 : W / 4];
    const int at = NIBBLES ? n * (c_v / 2) + column / 32 * 16 + column % 16 : n * c_v + column;
    if constexpr (W == 2) {
        w[0] = *(const unsigned short*)(stage + at);
    } else {
        words(stage + at, w);
    }
    const int shift = column % 32 / 16 * 4;
    const float off = d * (NIBBLES ? -32776.0f : -32896.0f);
#pragma unroll
    for (int i = 0; i < W; i++) {
        const unsigned codes = NIBBLES ? w[i / 4] >> shift & 0x0f0f0f0fu : w[i / 4] ^ 0x80808080u;
        x[i] = fmaf(__uint_as_float(__byte_perm(codes, 0x47000000u, 0x7504 | i % 4 << 4)), d, off);
    }
}

// Adds the weighted cells lo .. hi of a stage, which begins with the segment's cell `first`.
template <int G, int W>
__device__ __forceinline__ void weighted(const Args& a, const uint8_t* stage, int first, int lo, int hi, int column, const float* p, float (&o)[G][W]) {
    constexpr int P = padded(G);
    auto add = [&](auto&& values) {
#pragma unroll 4
        for (int n = lo; n < hi; n++) {
            float x[W], ps[G];
            values(n - first, x);
            broadcast<G>(p + n * P, ps);
#pragma unroll
            for (int g = 0; g < G; g++)
#pragma unroll
                for (int i = 0; i < W; i++) o[g][i] = fmaf(ps[g], x[i], o[g][i]);
        }
    };
    if (a.type_v == cache::F16) {
        add([&](int n, float(&x)[W]) { values_float<W>(stage, n, a.c_v, column, false, x); });
    } else if (a.type_v == cache::BF16) {
        add([&](int n, float(&x)[W]) { values_float<W>(stage, n, a.c_v, column, true, x); });
    } else if (a.type_v == cache::Q8_0) {
        add([&](int n, float(&x)[W]) { values_quantised<W, false>(stage, n, a.c_v, column, x); });
    } else {
        add([&](int n, float(&x)[W]) { values_quantised<W, true>(stage, n, a.c_v, column, x); });
    }
}

// Thread blocks that a multiprocessor's registers are to hold; the wrapper has the same rule.
constexpr int blocks_a_multiprocessor(int g, int w) { return g * w <= 40 ? 4 : 3; }

// Bytes of shared memory; the wrapper has the same sum.
__host__ __device__ constexpr int shared_bytes(int g, int c_k, int c_v) {
    return WARPS * RING * STAGE + 4 * (padded(g) * (c_k + CELLS) + WARPS * g * c_v + (WARPS + 1) * 8);
}

template <int G, int W>
__device__ __forceinline__ void attend(const Args& a, uint8_t* shared) {
    constexpr int P = padded(G);
    const int panel = threadIdx.x / 32, lane = threadIdx.x % 32, position = (int)*a.position, heads = a.heads_kv * a.gqa;
    const int blocks = (int)*a.count, groups = (a.gqa + G - 1) / G;
    const long long total = (long long)blocks * groups * a.heads_kv;
    const int begin = (int)(total * blockIdx.x / gridDim.x), end = (int)(total * (blockIdx.x + 1) / gridDim.x);
    if (begin >= end) return;
    float* of_query = (float*)(shared + WARPS * RING * STAGE);
    float* p = of_query + P * a.c_k;             // [256][P]: scores, then weights
    float* parts = p + P * CELLS;                // [4][G][C_v]
    float* largest = parts + WARPS * G * a.c_v;  // [4][8], then of all [8]
    const Query q = query<G>(of_query, a.c_k);
    const Cut c = cut(a);
    Place at{end - begin, begin % blocks, begin / blocks / groups, begin / blocks % groups};
    Stream stream{shared + panel * RING * STAGE, 0, RING - 1, at, 0, nullptr, nullptr, nullptr, nullptr};
    stream.find(a, c, position, panel, blocks, groups);
    const int column = min(lane * W, a.c_v - W);
    for (bool is_new = true; at.left > 0; is_new = at.block == blocks - 1, at.advance(blocks, groups)) {
        if (is_new) {
            __syncthreads();
            load_query<G>(a, q, at.head, at.group);
            __syncthreads();
        }
        const cache::Block block = a.blocks[at.block];
        const cache::Range seen = cache::visible(block, position, a.window);
        const int lo = max(seen.lo - panel * PANEL, 0), hi = min(seen.hi - panel * PANEL, PANEL);
        float* own = p + (panel * PANEL + 2 * lane) * P;
        float s[G][2] = {}, o[G][W] = {};
#pragma unroll 1
        for (int step = 0; step < c.k_steps + c.v_steps; step++) {
            if (step == c.k_steps) {
                const bool sees[2] = {lo <= 2 * lane && 2 * lane < hi, lo <= 2 * lane + 1 && 2 * lane + 1 < hi};
#pragma unroll
                for (int g = 0; g < G; g++) s[g][0] = s[g][0] * a.scale, s[g][1] = s[g][1] * a.scale;
                if (a.soft_cap > 0.0f) {  // by way of memory: a loop over registers would be unrolled, and this is long
#pragma unroll
                    for (int i = 0; i < 2 * G; i++) own[i / G * P + i % G] = s[i % G][i / G];
#pragma unroll 1
                    for (int i = 0; i < 2 * P; i++) own[i] = math::soft_cap(own[i], a.soft_cap);
#pragma unroll
                    for (int i = 0; i < 2 * G; i++) s[i % G][i / G] = own[i / G * P + i % G];
                }
#pragma unroll
                for (int g = 0; g < G; g++) {
                    float m = fmaxf(sees[0] ? s[g][0] : -INFINITY, sees[1] ? s[g][1] : -INFINITY);
                    m = fmaxf(m, -INFINITY);
                    for (int o = 16; o > 0; o /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
                    if (lane == 0) largest[panel * 8 + g] = m;
                }
                __syncthreads();
                float weights[2][P] = {};
#pragma unroll
                for (int g = 0; g < G; g++) {
                    const float m = fmaxf(fmaxf(largest[g], largest[8 + g]), fmaxf(largest[16 + g], largest[24 + g]));
#pragma unroll
                    for (int i = 0; i < 2; i++) weights[i][g] = sees[i] ? math::exp_weight(s[g][i] - m) : 0.0f;
                    if (threadIdx.x == 0) largest[WARPS * 8 + g] = m;
                }
#pragma unroll
                for (int i = 0; i < 2 * P; i++) own[i] = weights[i / P][i % P];
                __syncwarp();
            }
            if (lo >= hi) continue;
            const uint8_t* stage = stream.next(a, c, position, panel, blocks, groups);
            if (step < c.k_steps) {
                scores<G>(a, stage, step, q, s);
            } else {
                const int first = (step - c.k_steps) * c.v_cells;
                weighted<G, W>(a, stage, first, max(lo, first), min(hi, first + c.v_cells), column, p + panel * PANEL * P, o);
            }
        }
        if (lane * W < a.c_v) {
#pragma unroll
            for (int g = 0; g < G; g++)
#pragma unroll
                for (int i = 0; i < W; i++) parts[(panel * G + g) * a.c_v + column + i] = o[g][i];
        }
        __syncthreads();
        if (block.slot >= a.capacity) continue;
        const int rows = min(G, a.gqa - at.group * G), size = 2 + a.c_v, of_warp = G * a.c_v;
        float* to = a.partials + ((size_t)block.slot * heads + at.head * a.gqa + at.group * G) * size;
#pragma unroll 1
        for (int g = 0; g < rows; g++) {
            const float* part = parts + g * a.c_v;
#pragma unroll 1
            for (int i = threadIdx.x; i < a.c_v; i += THREADS)
                to[g * size + 2 + i] = part[i] + part[of_warp + i] + part[2 * of_warp + i] + part[3 * of_warp + i];
        }
        const int g = min((int)threadIdx.x / 16, G - 1), l_lane = threadIdx.x % 16;
        float l = 0.0f;
#pragma unroll
        for (int i = 0; i < CELLS / 16; i++) l = l + p[(i * 16 + l_lane) * P + g];
        l = math::sum_lanes(l);
        if (l_lane == 0 && (int)threadIdx.x / 16 < rows) {
            to[g * size] = seen.lo < seen.hi ? largest[WARPS * 8 + g] : 0.0f;
            to[g * size + 1] = l;
        }
    }
}

// Few blocks: heads apart, so that more thread blocks work. A matter of speed: an item's arithmetic is the same.
template <int G, int W>
__device__ __forceinline__ void attend_any(const Args& a) {
    extern __shared__ __align__(16) uint8_t shared[];
    if (G > 1 && *a.count * a.heads_kv * a.gqa <= gridDim.x) {
        attend<1, W>(a, shared);
    } else {
        attend<G, W>(a, shared);
    }
}

}  // namespace decode

// Kernels for G query heads at a time, by the values a lane has of a cell's V: 2 up to C_v = 64, 4 up to 128, 8 up to 256.
#define ATTEND_KERNEL(G, W)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(decode::THREADS, decode::blocks_a_multiprocessor(G, W))                                                                \
        attend_w##W(const float* q, const cache::Block* blocks, const unsigned* count, const unsigned* position, float* partials, \
                    unsigned capacity, int heads_kv, int gqa, int c_k, int c_v, int type_k, int type_v, float scale, float soft_cap, \
                    int window) {                                                                                                \
        decode::attend_any<G, W>({q, blocks, count, position, partials, capacity, heads_kv, gqa, c_k, c_v, type_k, type_v, scale, \
                                  soft_cap, window});                                                                            \
    }
