// Decode attention where there are few blocks: four warps do a block for one query head. See attention_decode.cuh.
//
// A warp owns a panel of 64 cells: its K, then its V. In scores a lane has 2 cells, in weighted sums W values. Warps meet for m, and to add
// o and l up. All that counts is latency: the panel is fetched into the second-level cache at once, and goes from there to registers, many
// loads at a time.
#pragma once

namespace decode {
namespace few {

// Starts to fetch lines into the second-level cache.
__device__ __forceinline__ void fetch(const uint8_t* from, int bytes) {
    for (int i = threadIdx.x % 32 * 128; i < bytes; i += 32 * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
}

// A query as scores read it: values; or codes, four a word, and for each run of 32 its d, and what sums begin with to make up for K's
// nibbles being raised by 8.
struct Query {
    float* q;
    int* codes;
    float* d;
    int* start;
};

__device__ __forceinline__ void load_query(const Args& a, const Query& to, int h) {
    const int c = threadIdx.x * 4, lane = threadIdx.x % 32;
    if (threadIdx.x / 32 * 128 >= a.c_k) return;
    const float4 x = c < a.c_k ? *(const float4*)(a.q + (size_t)h * a.c_k + c) : float4{};
    if (cache::is_float(a.type_k)) {
        if (c < a.c_k) *(float4*)(to.q + c) = x;
        return;
    }
    const Run r = quantised(x);
    if (c >= a.c_k) return;
    to.codes[c / 4] = r.word;
    if (lane % 8 == 0) to.d[c / 32] = r.d, to.start[c / 32] = a.type_k == cache::Q4_0 ? -8 * r.sum : 0;
}

// Float K, AT_ONCE values at a time.
template <int AT_ONCE>
__device__ __forceinline__ void scores_float_from(const unsigned* k, int& first, int c_k, bool is_bf16, const float* q, float (&acc)[2]) {
#pragma unroll 1
    for (; first + AT_ONCE <= c_k; first += AT_ONCE) {
        unsigned w[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) w[i] = k[(first + i) * 32];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const float2 x = halves(w[i], is_bf16);
            acc[0] = fmaf(q[first + i], x.x, acc[0]), acc[1] = fmaf(q[first + i], x.y, acc[1]);
        }
    }
}
__device__ __forceinline__ void scores_float(const uint8_t* codes, int c_k, bool is_bf16, const float* q, float (&acc)[2]) {
    const unsigned* k = (const unsigned*)codes + threadIdx.x % 32;
    int first = 0;
    scores_float_from<64>(k, first, c_k, is_bf16, q, acc);
    scores_float_from<16>(k, first, c_k, is_bf16, q, acc);
}

// Quantised K, a run of 32 values at a time.
template <bool NIBBLES>
__device__ __forceinline__ void scores_quantised(const uint8_t* codes, const uint8_t* scales, int runs, const Query& query, float (&acc)[2]) {
    constexpr int WORDS = NIBBLES ? 4 : 8;
    const int2* k = (const int2*)codes + threadIdx.x % 32;
    const __half2* d = (const __half2*)scales + threadIdx.x % 32;
#pragma unroll 4
    for (int run = 0; run < runs; run++) {
        int2 w[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; i++) w[i] = k[(run * WORDS + i) * 32];
        const float2 d_k = __half22float2(d[run * 32]);
        const int* q = query.codes + run * 8;
        const int start = query.start[run];
        int sums[2] = {start, start};
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            sums[0] = __dp4a(NIBBLES ? w[i].x & 0x0f0f0f0f : w[i].x, q[i], sums[0]);
            sums[1] = __dp4a(NIBBLES ? w[i].y & 0x0f0f0f0f : w[i].y, q[i], sums[1]);
            if constexpr (NIBBLES) {
                sums[0] = __dp4a(w[i].x >> 4 & 0x0f0f0f0f, q[i + 4], sums[0]);
                sums[1] = __dp4a(w[i].y >> 4 & 0x0f0f0f0f, q[i + 4], sums[1]);
            }
        }
        const float d_q = query.d[run];
        acc[0] = fmaf((float)sums[0], d_q * d_k.x, acc[0]);
        acc[1] = fmaf((float)sums[1], d_q * d_k.y, acc[1]);
    }
}

// W values of a cell's V as they are stored.
template <int W, int TYPE>
struct Stored {
    static constexpr int WORDS = TYPE <= cache::BF16 ? W / 2 : W <= 4 ? 1 : W / 4;
    unsigned w[WORDS];
    __half d;

    __device__ __forceinline__ void load(const uint8_t* codes, const uint8_t* scales, int n, int c_v, int column) {
        const int at = TYPE <= cache::BF16 ? (n * c_v + column) * 2 : TYPE == cache::Q8_0 ? n * c_v + column : n * (c_v / 2) + column / 32 * 16 + column % 16;
        if constexpr (TYPE > cache::BF16 && W == 2) {
            w[0] = *(const unsigned short*)(codes + at);
        } else {
            words<WORDS>(codes + at, w);
        }
        if constexpr (TYPE > cache::BF16) d = ((const __half*)scales)[n * (c_v / 32) + column / 32];
    }

    __device__ __forceinline__ void values(int column, float (&x)[W]) const {
        if constexpr (TYPE <= cache::BF16) {
#pragma unroll
            for (int i = 0; i < W / 2; i++) {
                const float2 pair = halves(w[i], TYPE == cache::BF16);
                x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
            }
        } else {
            const float scale = __half2float(d), off = offset(scale, TYPE == cache::Q4_0);
            const int shift = column % 32 / 16 * 4;
#pragma unroll
            for (int i = 0; i < W; i++) x[i] = decoded(TYPE == cache::Q4_0 ? w[i / 4] >> shift & 0x0f0f0f0fu : w[i / 4] ^ 0x80808080u, i % 4, scale, off);
        }
    }
};

// Adds the weighted cells lo .. hi of a segment, many at a time, the last ones too: each round waits for memory.
template <int W, int TYPE>
__device__ __forceinline__ void weighted(const uint8_t* codes, const uint8_t* scales, int lo, int hi, int c_v, int column, const float* p, float (&o)[W]) {
    constexpr int BATCH = W == 8 ? 8 : 16;
#pragma unroll 1
    for (int n = lo; n < hi; n += BATCH) {
        Stored<W, TYPE> stored[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) stored[i].load(codes, scales, min(n + i, hi - 1), c_v, column);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (n + i >= hi) break;
            float x[W];
            stored[i].values(column, x);
#pragma unroll
            for (int j = 0; j < W; j++) o[j] = fmaf(p[n + i], x[j], o[j]);
        }
    }
}

// Bytes of shared memory; the wrapper has the same sum.
__host__ __device__ constexpr int shared_bytes(int c_k, int c_v) { return 4 * (c_k + CELLS + WARPS * c_v + WARPS + 1); }

template <int W>
__device__ __forceinline__ void attend(const Args& a, uint8_t* shared) {
    const int panel = threadIdx.x / 32, lane = threadIdx.x % 32, heads = a.heads_kv * a.gqa, blocks = (int)*a.count;
    Place at = place(blockIdx.x, gridDim.x, blocks, a.gqa, a.heads_kv);
    float* of_query = (float*)shared;
    float* p = of_query + a.c_k;             // [256]: weights
    float* parts = p + CELLS;                // [4][C_v]
    float* largest = parts + WARPS * a.c_v;  // of each warp
    const Query q{of_query, (int*)of_query, of_query + a.c_k / 4, (int*)of_query + a.c_k / 4 + a.c_k / 32};
    const int k_codes = cache::code_bytes(a.type_k, PANEL * a.c_k), k_scales = cache::scale_bytes(a.type_k, PANEL * a.c_k);
    const int v_codes = cache::code_bytes(a.type_v, PANEL * a.c_v), v_scales = cache::scale_bytes(a.type_v, PANEL * a.c_v);
    const int column = min(lane * W, a.c_v - W);
    struct Panel {
        const uint8_t *k, *k_scales, *v, *v_scales;
    };
    auto panel_of = [&](const cache::Block& block) -> Panel {
        const uint8_t* of_k = (const uint8_t*)block.address + (size_t)at.head * 4 * (k_codes + k_scales);
        const uint8_t* of_v = (const uint8_t*)block.address + (size_t)a.heads_kv * 4 * (k_codes + k_scales) + (size_t)at.head * 4 * (v_codes + v_scales);
        return {of_k + 4 * k_scales + panel * k_codes, of_k + panel * k_scales, of_v + 4 * v_scales + panel * v_codes, of_v + panel * v_scales};
    };
    auto fetch_panel = [&](const Panel& of) { fetch(of.k, k_codes), fetch(of.k_scales, k_scales), fetch(of.v, v_codes), fetch(of.v_scales, v_scales); };
    // The first block's cells, but for the newest, were written long ago, whether or not they are seen.
    if (at.left > 0) fetch_panel(panel_of(a.blocks[at.block]));
    wait_for_previous();
    const int position = (int)*a.position;
    for (bool is_new = true; at.left > 0; is_new = at.block == blocks - 1, at.advance(blocks, a.gqa)) {
        const int h = at.head * a.gqa + at.group;
        const cache::Block block = a.blocks[at.block];
        const cache::Range seen = cache::visible(block, position, a.window);
        const int lo = max(seen.lo - panel * PANEL, 0), hi = min(seen.hi - panel * PANEL, PANEL);
        const Panel of = panel_of(block);
        const uint8_t *k = of.k, *k_s = of.k_scales, *v = of.v, *v_s = of.v_scales;
        if (lo < hi) fetch_panel(of);
        if (is_new) {
            __syncthreads();
            load_query(a, q, h);
            __syncthreads();
        }
        float s[2] = {}, o[W] = {};
        if (lo < hi) {
            if (a.type_k == cache::F16) {
                scores_float(k, a.c_k, false, q.q, s);
            } else if (a.type_k == cache::BF16) {
                scores_float(k, a.c_k, true, q.q, s);
            } else if (a.type_k == cache::Q8_0) {
                scores_quantised<false>(k, k_s, a.c_k / 32, q, s);
            } else {
                scores_quantised<true>(k, k_s, a.c_k / 32, q, s);
            }
        }
        float of_warp = -INFINITY;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            s[i] = s[i] * a.scale;
            if (a.soft_cap > 0.0f) s[i] = math::soft_cap(s[i], a.soft_cap);
            if (!(lo <= 2 * lane + i && 2 * lane + i < hi)) s[i] = -INFINITY;
            of_warp = fmaxf(of_warp, s[i]);
        }
        for (int i = 16; i > 0; i /= 2) of_warp = fmaxf(of_warp, __shfl_xor_sync(~0u, of_warp, i));
        if (lane == 0) largest[panel] = of_warp;
        __syncthreads();
        const float m = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
        float e[2];
#pragma unroll
        for (int i = 0; i < 2; i++) e[i] = lo <= 2 * lane + i && 2 * lane + i < hi ? math::exp_weight(s[i] - m) : 0.0f;
        float* own = p + panel * PANEL;
        own[2 * lane] = e[0], own[2 * lane + 1] = e[1];
        __syncwarp();
        if (lo < hi) {
            if (a.type_v == cache::F16) {
                weighted<W, cache::F16>(v, v_s, lo, hi, a.c_v, column, own, o);
            } else if (a.type_v == cache::BF16) {
                weighted<W, cache::BF16>(v, v_s, lo, hi, a.c_v, column, own, o);
            } else if (a.type_v == cache::Q8_0) {
                weighted<W, cache::Q8_0>(v, v_s, lo, hi, a.c_v, column, own, o);
            } else {
                weighted<W, cache::Q4_0>(v, v_s, lo, hi, a.c_v, column, own, o);
            }
        }
        if (lane * W < a.c_v) {
#pragma unroll
            for (int i = 0; i < W; i++) parts[panel * a.c_v + column + i] = o[i];
        }
        __syncthreads();
        if (block.slot >= a.capacity) continue;
        float* to = a.partials + ((size_t)block.slot * heads + h) * (2 + a.c_v);
        for (int i = threadIdx.x; i < a.c_v; i += THREADS) to[2 + i] = parts[i] + parts[a.c_v + i] + parts[2 * a.c_v + i] + parts[3 * a.c_v + i];
        if (panel == 0) {
            float l = 0.0f;
#pragma unroll
            for (int i = 0; i < CELLS / 16; i++) l = l + p[i * 16 + lane % 16];
            l = math::sum_lanes(l);
            if (lane == 0) to[0] = seen.lo < seen.hi ? m : 0.0f, to[1] = l;
        }
    }
}

}  // namespace few
}  // namespace decode
