// Decode attention where there are few blocks: four warps do a block for one query head. See attention_decode.cuh.
//
// A warp owns a panel of 64 cells: its K, then its V. In scores a lane has 2 cells, in weighted sums W values. Warps meet for m, and to add
// o and l up.
#pragma once

namespace decode {
namespace few {

constexpr int CODES = 2048, SCALES = 256, STAGE = CODES + SCALES;

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
    r.k_steps = (r.k_codes + CODES - 1) / CODES;
    r.v_cells = PANEL;
    while (cache::code_bytes(a.type_v, r.v_cells * a.c_v) > CODES) r.v_cells /= 2;
    r.v_steps = PANEL / r.v_cells;
    r.v_codes = cache::code_bytes(a.type_v, r.v_cells * a.c_v), r.v_scales = cache::scale_bytes(a.type_v, r.v_cells * a.c_v);
    return r;
}

// A warp's walk over what it reads, ahead of the arithmetic by the ring's length, and the ring.
template <int RING>
struct Stream {
    uint8_t* mem;
    int slot;  // of the stage in work
    Place at;
    int step;
    const uint8_t *k, *k_scales, *v, *v_scales;  // where the lane goes on

    // From `at` on, the next item of which this warp's panel sees something.
    __device__ __forceinline__ void find(const Args& a, const Cut& cut, int position, int panel, int blocks) {
        for (step = 0; at.left > 0; at.advance(blocks, a.gqa)) {
            const cache::Block block = a.blocks[at.block];
            const cache::Range seen = cache::visible(block, position, a.window);
            if (max(seen.lo, panel * PANEL) >= min(seen.hi, (panel + 1) * PANEL)) continue;
            const int k_head = CELLS / PANEL * (cut.k_codes + cut.k_scales), v_head = CELLS / PANEL * cut.v_steps * (cut.v_codes + cut.v_scales);
            const uint8_t* of_k = (const uint8_t*)block.address + (size_t)at.head * k_head + threadIdx.x % 32 * 16;
            const uint8_t* of_v = (const uint8_t*)block.address + (size_t)a.heads_kv * k_head + (size_t)at.head * v_head + threadIdx.x % 32 * 16;
            k_scales = of_k + panel * cut.k_scales;
            k = of_k + CELLS / PANEL * cut.k_scales + panel * cut.k_codes;
            v_scales = of_v + panel * cut.v_steps * cut.v_scales;
            v = of_v + CELLS / PANEL * cut.v_steps * cut.v_scales + panel * cut.v_steps * cut.v_codes;
            return;
        }
    }

    // Starts the next copy, to a stage.
    __device__ __forceinline__ void issue(const Args& a, const Cut& cut, int position, int panel, int blocks, uint8_t* stage) {
        if (at.left > 0) {
            const int lane = threadIdx.x % 32 * 16;
            stage += lane;
            if (step < cut.k_steps) {  // 2048 bytes, or of the last run of an odd number 1024
                copy16(stage, k), copy16(stage + 512, k + 512);
                if (step * CODES + 1024 < cut.k_codes) copy16(stage + 1024, k + 1024), copy16(stage + 1536, k + 1536);
                if (lane < min(cut.k_step_scales, cut.k_scales - step * cut.k_step_scales)) copy16(stage + CODES, k_scales);
                k += CODES, k_scales += cut.k_step_scales;
            } else {
#pragma unroll
                for (int i = 0; i < CODES; i += 512)
                    if (i + lane < cut.v_codes) copy16(stage + i, v + i);
                if (lane < cut.v_scales) copy16(stage + CODES, v_scales);
                v += cut.v_codes, v_scales += cut.v_scales;
            }
            if (++step == cut.k_steps + cut.v_steps) at.advance(blocks, a.gqa), find(a, cut, position, panel, blocks);
        }
        asm volatile("cp.async.commit_group;");
    }

    __device__ __forceinline__ void start(const Args& a, const Cut& cut, int position, int panel, int blocks) {
        find(a, cut, position, panel, blocks);
#pragma unroll 1
        for (int i = 0; i < RING - 1; i++) issue(a, cut, position, panel, blocks, mem + i * STAGE);
    }

    // Waits for the next stage; starts the copy that takes the place of the last one.
    __device__ __forceinline__ const uint8_t* next(const Args& a, const Cut& cut, int position, int panel, int blocks) {
        asm volatile("cp.async.wait_group %0;" ::"n"(RING - 2) : "memory");
        __syncwarp();
        issue(a, cut, position, panel, blocks, mem + (slot == 0 ? RING - 1 : slot - 1) * STAGE);
        const uint8_t* stage = mem + slot * STAGE;
        slot = slot == RING - 1 ? 0 : slot + 1;
        return stage;
    }
};

// 16 values of float K.
__device__ __forceinline__ void scores_float(const uint8_t* stage, bool is_bf16, const float* q, float (&acc)[2]) {
    const unsigned* k = (const unsigned*)stage + threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < 16; c += 4) {
        const float4 four = *(const float4*)(q + c);
        const float qs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 x = halves(k[(c + i) * 32], is_bf16);
            acc[0] = fmaf(qs[i], x.x, acc[0]), acc[1] = fmaf(qs[i], x.y, acc[1]);
        }
    }
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

// 32 values of quantised K.
template <bool NIBBLES>
__device__ __forceinline__ void scores_quantised(const uint8_t* codes, const uint8_t* scales, const int* q, float d_q, int start, float (&acc)[2]) {
    const int lane = threadIdx.x % 32;
    int sums[2] = {start, start};
#pragma unroll
    for (int word = 0; word < (NIBBLES ? 4 : 8); word++) {
        const int2 k = ((const int2*)codes)[word * 32 + lane];
        sums[0] = __dp4a(NIBBLES ? k.x & 0x0f0f0f0f : k.x, q[word], sums[0]);
        sums[1] = __dp4a(NIBBLES ? k.y & 0x0f0f0f0f : k.y, q[word], sums[1]);
        if constexpr (NIBBLES) {
            sums[0] = __dp4a(k.x >> 4 & 0x0f0f0f0f, q[word + 4], sums[0]);
            sums[1] = __dp4a(k.y >> 4 & 0x0f0f0f0f, q[word + 4], sums[1]);
        }
    }
    const float2 d_k = __half22float2(((const __half2*)scales)[lane]);
    acc[0] = fmaf((float)sums[0], d_q * d_k.x, acc[0]);
    acc[1] = fmaf((float)sums[1], d_q * d_k.y, acc[1]);
}

// Scores of a warp's panel against stage `s` of K.
__device__ __forceinline__ void scores(const Args& a, const uint8_t* stage, int s, const Query& query, float (&acc)[2]) {
    if (a.type_k == cache::F16) {
        scores_float(stage, false, query.q + s * 16, acc);
    } else if (a.type_k == cache::BF16) {
        scores_float(stage, true, query.q + s * 16, acc);
    } else if (a.type_k == cache::Q8_0) {
        scores_quantised<false>(stage, stage + CODES, query.codes + s * 8, query.d[s], query.start[s], acc);
    } else {
#pragma unroll 1
        for (int i = 0; i < 2 && 2 * s + i < a.c_k / 32; i++) {
            const int run = 2 * s + i;
            scores_quantised<true>(stage + i * 1024, stage + CODES + i * 128, query.codes + run * 8, query.d[run], query.start[run], acc);
        }
    }
}

// Adds the weighted cells lo .. hi of a stage, which begins with the segment's cell `first`.
template <int W>
__device__ __forceinline__ void weighted(const Args& a, const uint8_t* stage, int first, int lo, int hi, int column, const float* p, float (&o)[W]) {
    auto add = [&](auto&& values) {
#pragma unroll 4
        for (int n = lo; n < hi; n++) {
            float x[W];
            values(n - first, x);
            const float e = p[n];
#pragma unroll
            for (int i = 0; i < W; i++) o[i] = fmaf(e, x[i], o[i]);
        }
    };
    if (a.type_v == cache::F16) {
        add([&](int n, float(&x)[W]) { values_float<W>(stage, n, a.c_v, column, false, x); });
    } else if (a.type_v == cache::BF16) {
        add([&](int n, float(&x)[W]) { values_float<W>(stage, n, a.c_v, column, true, x); });
    } else if (a.type_v == cache::Q8_0) {
        add([&](int n, float(&x)[W]) { values_quantised<W, false>(stage, stage + CODES, n, a.c_v, column, x); });
    } else {
        add([&](int n, float(&x)[W]) { values_quantised<W, true>(stage, stage + CODES, n, a.c_v, column, x); });
    }
}

// Bytes of shared memory beside the rings; the wrapper has the same sum.
__host__ __device__ constexpr int shared_bytes(int c_k, int c_v) { return 4 * (c_k + CELLS + WARPS * c_v + WARPS + 1); }

template <int W, int RING>
__device__ __forceinline__ void attend(const Args& a, uint8_t* shared) {
    const int panel = threadIdx.x / 32, lane = threadIdx.x % 32, position = (int)*a.position, heads = a.heads_kv * a.gqa;
    const int blocks = (int)*a.count;
    float* of_query = (float*)(shared + WARPS * RING * STAGE);
    float* p = of_query + a.c_k;             // [256]: scores, then weights
    float* parts = p + CELLS;                // [4][C_v]
    float* largest = parts + WARPS * a.c_v;  // of each warp
    const Query q{of_query, (int*)of_query, of_query + a.c_k / 4, (int*)of_query + a.c_k / 4 + a.c_k / 32};
    const Cut c = cut(a);
    Place at = place(blockIdx.x, gridDim.x, blocks, a.gqa, a.heads_kv);
    if (at.left == 0) return;
    Stream<RING> stream{shared + panel * RING * STAGE, 0, at, 0, nullptr, nullptr, nullptr, nullptr};
    stream.start(a, c, position, panel, blocks);
    const int column = min(lane * W, a.c_v - W);
    for (bool is_new = true; at.left > 0; is_new = at.block == blocks - 1, at.advance(blocks, a.gqa)) {
        const int h = at.head * a.gqa + at.group;
        if (is_new) {
            __syncthreads();
            load_query(a, q, h);
            __syncthreads();
        }
        const cache::Block block = a.blocks[at.block];
        const cache::Range seen = cache::visible(block, position, a.window);
        const int lo = max(seen.lo - panel * PANEL, 0), hi = min(seen.hi - panel * PANEL, PANEL);
        float s[2] = {}, o[W] = {}, m = 0.0f;
#pragma unroll 1
        for (int step = 0; step < c.k_steps + c.v_steps; step++) {
            if (step == c.k_steps) {
                float of_warp = -INFINITY;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    s[i] = s[i] * a.scale;
                    if (a.soft_cap > 0.0f) s[i] = math::soft_cap(s[i], a.soft_cap);
                    if (!(lo <= 2 * lane + i && 2 * lane + i < hi)) s[i] = -INFINITY;
                    of_warp = fmaxf(of_warp, s[i]);
                }
                for (int o = 16; o > 0; o /= 2) of_warp = fmaxf(of_warp, __shfl_xor_sync(~0u, of_warp, o));
                if (lane == 0) largest[panel] = of_warp;
                __syncthreads();
                m = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
                float e[2];
#pragma unroll
                for (int i = 0; i < 2; i++) e[i] = lo <= 2 * lane + i && 2 * lane + i < hi ? math::exp_weight(s[i] - m) : 0.0f;
                *(float2*)(p + panel * PANEL + 2 * lane) = {e[0], e[1]};
                __syncwarp();
            }
            if (lo >= hi) continue;
            const uint8_t* stage = stream.next(a, c, position, panel, blocks);
            if (step < c.k_steps) {
                scores(a, stage, step, q, s);
            } else {
                const int first = (step - c.k_steps) * c.v_cells;
                weighted<W>(a, stage, first, max(lo, first), min(hi, first + c.v_cells), column, p + panel * PANEL, o);
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
