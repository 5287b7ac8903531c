// Decode attention where there are few blocks: four warps do a block for one query head. See attention_decode.cuh.
//
// A warp owns a panel of 64 cells: its K, then its V. In scores a lane has 2 cells, in weighted sums W values. Warps meet for m, and to add
// o and l up. All that counts is latency: the panel is fetched into the second-level cache before the kernel ahead has ended, and goes from there to
// registers, dozens of loads ahead of the arithmetic; V's first ones are on their way while m is found. Loops are short, for instructions come from
// that cache, too.
#pragma once

namespace decode {
namespace few {

// Starts to fetch lines into the second-level cache.
__device__ __forceinline__ void fetch(const uint8_t* from, int bytes) {
#pragma unroll 1
    for (int i = threadIdx.x % 32 * 128; i < bytes; i += 32 * 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i));
}

// Loads that stay where they are written: the compiler moves others down to their use, past what should be done meanwhile.
__device__ __forceinline__ unsigned word(const void* from) {
    unsigned w;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(w) : "l"(from));
    return w;
}
__device__ __forceinline__ unsigned half_word(const void* from) {
    unsigned short w;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(w) : "l"(from));
    return w;
}
template <int N, int ALL>
__device__ __forceinline__ void words_to(const void* from, unsigned (&to)[ALL]) {
    if constexpr (N == 4) {
        asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
    } else if constexpr (N == 2) {
        asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    } else {
        to[0] = word(from);
    }
}

// Four values that all lanes read at one place.
__device__ __forceinline__ void four(const float* from, float (&to)[4]) {
    const float4 x = *(const float4*)from;
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}

// A query as scores read it: values; or codes, four a word, and for each run of 32 its d, and what sums begin with to make up for K's
// nibbles being raised by 8.
struct Query {
    float* q;
    int* codes;
    float* d;
    int* start;
};

// Four values of the query a thread, stored for all; the thread block meets.
__device__ __forceinline__ void store_query(const Args& a, const Query& to, float4 x) {
    const int c = threadIdx.x * 4;
    if (cache::is_float(a.type_k)) {
        if (c < a.c_k) *(float4*)(to.q + c) = x;
    } else if (threadIdx.x / 32 * 128 < a.c_k) {
        const Run r = quantised(x);
        if (c < a.c_k) {
            to.codes[c / 4] = r.word;
            if (threadIdx.x % 8 == 0) to.d[c / 32] = r.d, to.start[c / 32] = a.type_k == cache::Q4_0 ? -8 * r.sum : 0;
        }
    }
    __syncthreads();
}

// Float K: 64 loads ahead, in parts of 16.
template <bool IS_BF16>
__device__ __forceinline__ void scores_float(const uint8_t* codes, const Args& a, const Query& query, float4 x, float (&acc)[2]) {
    constexpr int AHEAD = 64, PART = 16, ROW = 2 * PANEL;
    const uint8_t* k = codes + threadIdx.x % 32 * 4;
    unsigned w[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) w[i] = 0;
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (i / PART * PART < a.c_k) w[i] = word(k + i * ROW);
    store_query(a, query, x);
    const float* q = query.q;
#pragma unroll 1
    for (int left = a.c_k; left > 0; left -= AHEAD, q += AHEAD) {
        k += AHEAD * ROW;
#pragma unroll
        for (int part = 0; part < AHEAD; part += PART) {
            if (part >= left) break;
#pragma unroll
            for (int i = part; i < part + PART; i += 4) {
                float of_q[4];
                four(q + i, of_q);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float2 y = halves(w[i + j], IS_BF16);
                    acc[0] = fmaf(of_q[j], y.x, acc[0]), acc[1] = fmaf(of_q[j], y.y, acc[1]);
                }
            }
            if (part + AHEAD < left)
#pragma unroll
                for (int i = part; i < part + PART; i++) w[i] = word(k + i * ROW);
        }
    }
}

// Quantised K: two runs of 32 values ahead (of nibbles four).
template <bool NIBBLES>
__device__ __forceinline__ void scores_quantised(const uint8_t* codes, const uint8_t* scales, const Args& a, const Query& query, float4 x, float (&acc)[2]) {
    constexpr int WORDS = NIBBLES ? 4 : 8, AHEAD = NIBBLES ? 4 : 3, ROW = 4 * PANEL;
    const uint8_t *k = codes + threadIdx.x % 32 * 8, *d = scales + threadIdx.x % 32 * 4;
    const int runs = a.c_k / 32;
    unsigned w[AHEAD][WORDS][2], d_k[AHEAD];
    auto load = [&](int i) {
#pragma unroll
        for (int j = 0; j < WORDS; j++) words_to<2>(k + j * ROW, w[i][j]);
        d_k[i] = word(d);
        k += WORDS * ROW, d += 2 * PANEL;
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        d_k[i] = 0;
#pragma unroll
        for (int j = 0; j < WORDS; j++) w[i][j][0] = w[i][j][1] = 0;
        if (i < runs) load(i);
    }
    store_query(a, query, x);
#pragma unroll 1
    for (int first = 0; first < runs; first += AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int run = first + i;
            if (run >= runs) break;
            const int *q = query.codes + run * 8, start = query.start[run];
            int sums[2] = {start, start};
#pragma unroll
            for (int j = 0; j < WORDS; j++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const unsigned codes_of = w[i][j][c];
                    sums[c] = __dp4a((int)(NIBBLES ? codes_of & 0x0f0f0f0f : codes_of), q[j], sums[c]);
                    if constexpr (NIBBLES) sums[c] = __dp4a((int)(codes_of >> 4 & 0x0f0f0f0f), q[j + 4], sums[c]);
                }
            const float2 of_cells = __half22float2(*(const __half2*)&d_k[i]);
            const float d_q = query.d[run];
            acc[0] = fmaf((float)sums[0], d_q * of_cells.x, acc[0]);
            acc[1] = fmaf((float)sums[1], d_q * of_cells.y, acc[1]);
            if (run + AHEAD < runs) load(i);
        }
    }
}

// Some cells of a panel's V on their way: W values of each as they are stored, and their scale.
template <int W>
struct Ahead {
    static constexpr int CELLS = W == 8 ? 16 : 32, WORDS = W == 8 ? 4 : 2;
    unsigned w[CELLS][WORDS];
};

// Where a lane finds its values of the cell that is loaded next, and how far it is to the one behind.
struct Column {
    const uint8_t *codes, *scales;
    unsigned step, step_scales;
};
__device__ __forceinline__ Column column_of(const Args& a, const uint8_t* codes, const uint8_t* scales, int first, int column) {
    const unsigned step = cache::code_bytes(a.type_v, a.c_v), step_scales = cache::scale_bytes(a.type_v, a.c_v);
    const int at = cache::is_float(a.type_v) ? 2 * column : a.type_v == cache::Q8_0 ? column : column / 32 * 16 + column % 16;
    return {codes + first * step + at, scales + first * step_scales + column / 32 * 2, step, step_scales};
}

template <int W, bool IS_FLOAT>
__device__ __forceinline__ void load_cell(Column& c, unsigned (&to)[Ahead<W>::WORDS]) {
    if constexpr (IS_FLOAT) {
        words_to<W / 2>(c.codes, to);
    } else {
        if constexpr (W == 2) {
            to[0] = half_word(c.codes);
        } else {
            words_to<W / 4>(c.codes, to);
        }
        to[Ahead<W>::WORDS - 1] = half_word(c.scales), c.scales += c.step_scales;
    }
    c.codes += c.step;
}
template <int W, bool IS_FLOAT>
__device__ __forceinline__ void load_cells(Column& c, Ahead<W>& to) {
#pragma unroll
    for (int i = 0; i < Ahead<W>::CELLS; i++) load_cell<W, IS_FLOAT>(c, to.w[i]);
}

template <int W, int TYPE>
__device__ __forceinline__ void values(const unsigned (&w)[Ahead<W>::WORDS], int shift, float (&x)[W]) {
    if constexpr (TYPE <= cache::BF16) {
#pragma unroll
        for (int i = 0; i < W / 2; i++) {
            const float2 pair = halves(w[i], TYPE == cache::BF16);
            x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
        }
    } else {
        const float d = __half2float(__ushort_as_half((unsigned short)w[Ahead<W>::WORDS - 1])), off = offset(d, TYPE == cache::Q4_0);
#pragma unroll
        for (int i = 0; i < W; i++) x[i] = decoded(TYPE == cache::Q4_0 ? w[i / 4] >> shift & 0x0f0f0f0fu : w[i / 4] ^ 0x80808080u, i % 4, d, off);
    }
}

// Adds the weighted cells of a panel that are seen, bits of `seen`; those from `first` on are on their way.
template <int W, int TYPE>
__device__ __forceinline__ void weighted(Column& c, unsigned long long seen, int first, int shift, const float* p, Ahead<W>& ahead, float (&o)[W]) {
    constexpr int AT_ONCE = Ahead<W>::CELLS;
#pragma unroll 1
    for (int n = first; n < PANEL; n += AT_ONCE) {
        const unsigned here = (unsigned)(seen >> n);
        const bool goes_on = n + AT_ONCE < PANEL && seen >> n >> AT_ONCE != 0;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i += 4) {
            float weights[4];
            four(p + n + i, weights);
#pragma unroll
            for (int cell = i; cell < i + 4; cell++) {
                float x[W];
                values<W, TYPE>(ahead.w[cell], shift, x);
#pragma unroll
                for (int j = 0; j < W; j++) {
                    const float sum = fmaf(weights[cell - i], x[j], o[j]);
                    o[j] = here >> cell & 1 ? sum : o[j];
                }
            }
            if (goes_on)
#pragma unroll
                for (int cell = i; cell < i + 4; cell++) load_cell<W, TYPE <= cache::BF16>(c, ahead.w[cell]);
        }
        if (!goes_on) break;
    }
}

// Bytes of shared memory; the wrapper has the same sum.
__host__ __device__ constexpr int shared_bytes(int c_k, int c_v) { return 4 * (c_k + CELLS + WARPS * c_v + WARPS + 1); }

// Where a warp's panel lies.
struct Panel {
    const uint8_t *k, *k_scales, *v, *v_scales;
};
__device__ __forceinline__ Panel panel_of(const Args& a, const cache::Block& block, int head, int panel) {
    const int k_codes = cache::code_bytes(a.type_k, PANEL * a.c_k), k_scales = cache::scale_bytes(a.type_k, PANEL * a.c_k);
    const int v_codes = cache::code_bytes(a.type_v, PANEL * a.c_v), v_scales = cache::scale_bytes(a.type_v, PANEL * a.c_v);
    const uint8_t* of_k = (const uint8_t*)block.address + (size_t)head * 4 * (k_codes + k_scales);
    const uint8_t* of_v = (const uint8_t*)block.address + (size_t)a.heads_kv * 4 * (k_codes + k_scales) + (size_t)head * 4 * (v_codes + v_scales);
    return {of_k + 4 * k_scales + panel * k_codes, of_k + panel * k_scales, of_v + 4 * v_scales + panel * v_codes, of_v + panel * v_scales};
}
__device__ __forceinline__ void fetch(const Args& a, const Panel& of) {
    fetch(of.k, cache::code_bytes(a.type_k, PANEL * a.c_k)), fetch(of.k_scales, cache::scale_bytes(a.type_k, PANEL * a.c_k));
    fetch(of.v, cache::code_bytes(a.type_v, PANEL * a.c_v)), fetch(of.v_scales, cache::scale_bytes(a.type_v, PANEL * a.c_v));
}

// One item. Who `rehearses` does it before the kernel ahead has ended, too, as if one cell were seen, for nothing but that its instructions are there: they
// come from the second-level cache, as a layer's kernels throw each other's out.
template <int W>
__device__ __forceinline__ void attend(const Args& a, uint8_t* shared, bool rehearses) {
    const int panel = threadIdx.x / 32, lane = threadIdx.x % 32, heads = a.heads_kv * a.gqa, blocks = (int)*a.count;
    const Place at = place(blockIdx.x, gridDim.x, blocks, a.gqa, a.heads_kv);
    if (at.left == 0) return wait_for_previous();  // an empty list: what follows relies on this kernel's end being that of those before it
    float* of_query = (float*)shared;
    float* p = of_query + a.c_k;             // [256]: weights
    float* parts = p + CELLS;                // [4][C_v]
    float* largest = parts + WARPS * a.c_v;  // of each warp
    const Query query{of_query, (int*)of_query, of_query + a.c_k / 4, (int*)of_query + a.c_k / 4 + a.c_k / 32};
    const int column = min(lane * W, a.c_v - W), h = at.head * a.gqa + at.group;
    const cache::Block block = a.blocks[at.block];
    const Panel of = panel_of(a, block, at.head, panel);
    // All cells but the newest were written long ago, whether or not they are seen.
    fetch(a, of);
#pragma unroll 1
    for (bool is_real = !rehearses;; is_real = true) {
        if (is_real) wait_for_previous();
        const int position = is_real ? (int)word(a.position) : (int)block.index * CELLS;
        const float4 x = threadIdx.x * 4 < a.c_k ? __ldcg((const float4*)(a.q + (size_t)h * a.c_k + threadIdx.x * 4)) : float4{};
        const cache::Range range = cache::visible(block, position, a.window);
        const int lo = max(range.lo - panel * PANEL, 0), hi = min(range.hi - panel * PANEL, PANEL);
        const unsigned long long seen = lo < hi ? ~0ull >> (PANEL - (hi - lo)) << lo : 0;
        float s[2] = {}, o[W] = {};
        if (seen == 0) {
            store_query(a, query, x);
        } else if (a.type_k == cache::F16) {
            scores_float<false>(of.k, a, query, x, s);
        } else if (a.type_k == cache::BF16) {
            scores_float<true>(of.k, a, query, x, s);
        } else if (a.type_k == cache::Q8_0) {
            scores_quantised<false>(of.k, of.k_scales, a, query, x, s);
        } else {
            scores_quantised<true>(of.k, of.k_scales, a, query, x, s);
        }
        const int first = lo & ~(Ahead<W>::CELLS - 1);
        Column of_cells = column_of(a, of.v, of.v_scales, first, column);
        Ahead<W> ahead;
#pragma unroll
        for (int i = 0; i < Ahead<W>::CELLS; i++)
#pragma unroll
            for (int j = 0; j < Ahead<W>::WORDS; j++) ahead.w[i][j] = 0;
        if (seen != 0) {
            if (cache::is_float(a.type_v)) {
                load_cells<W, true>(of_cells, ahead);
            } else {
                load_cells<W, false>(of_cells, ahead);
            }
        }
        const bool sees[2] = {(seen >> 2 * lane & 1) != 0, (seen >> 2 * lane & 2) != 0};
        float of_warp = -INFINITY;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            s[i] = s[i] * a.scale;
            if (a.soft_cap > 0.0f) s[i] = math::soft_cap(s[i], a.soft_cap);
            if (!sees[i]) s[i] = -INFINITY;
            of_warp = fmaxf(of_warp, s[i]);
        }
        for (int i = 16; i > 0; i /= 2) of_warp = fmaxf(of_warp, __shfl_xor_sync(~0u, of_warp, i));
        if (lane == 0) largest[panel] = of_warp;
        __syncthreads();
        const float m = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
        float* own = p + panel * PANEL;
        *(float2*)(own + 2 * lane) = make_float2(sees[0] ? math::exp_weight(s[0] - m) : 0.0f, sees[1] ? math::exp_weight(s[1] - m) : 0.0f);
        __syncwarp();
        if (seen != 0) {
            const int shift = column % 32 / 16 * 4;
            if (a.type_v == cache::F16) {
                weighted<W, cache::F16>(of_cells, seen, first, shift, own, ahead, o);
            } else if (a.type_v == cache::BF16) {
                weighted<W, cache::BF16>(of_cells, seen, first, shift, own, ahead, o);
            } else if (a.type_v == cache::Q8_0) {
                weighted<W, cache::Q8_0>(of_cells, seen, first, shift, own, ahead, o);
            } else {
                weighted<W, cache::Q4_0>(of_cells, seen, first, shift, own, ahead, o);
            }
        }
        if (lane * W < a.c_v) {
#pragma unroll
            for (int i = 0; i < W; i++) parts[panel * a.c_v + column + i] = o[i];
        }
        __syncthreads();
        if (!is_real) continue;
        if (block.slot >= a.capacity) return;
        float* to = a.partials + ((size_t)block.slot * heads + h) * (2 + a.c_v);
        for (int i = threadIdx.x; i < a.c_v; i += THREADS) to[2 + i] = parts[i] + parts[a.c_v + i] + parts[2 * a.c_v + i] + parts[3 * a.c_v + i];
        if (panel == 0) {
            float l = 0.0f;
#pragma unroll
            for (int i = 0; i < CELLS / 16; i++) l = l + p[i * 16 + lane % 16];
            l = math::sum_lanes(l);
            if (lane == 0) to[0] = range.lo < range.hi ? m : 0.0f, to[1] = l;
        }
        return;
    }
}

}  // namespace few
}  // namespace decode
