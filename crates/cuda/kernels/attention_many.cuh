// Decode attention where there are many blocks: four warps do a block for G query heads. See attention_decode.cuh.
//
// A warp owns a panel of 64 cells: its K, then its V. These bytes it streams through a ring of its own in shared memory by asynchronous
// copies, across blocks, so that memory is kept busy while others compute; the warps meet only for m, and to add o and l up. In scores a
// lane has 2 cells of every head, in weighted sums W values of every head: each value read serves all heads.
//
// What all lanes read at one place (q, weights) comes in fours: a vector of 4 takes as long to come back as 4 words, but is one instruction.
#pragma once

namespace decode {
namespace many {

constexpr int CODES = 2048, SCALES = 256, STAGE = CODES + SCALES, RING = 3;

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
struct Stream {
    uint8_t* mem;
    int slot;  // of the stage in work
    Place at;
    int step;
    const uint8_t *k, *k_scales, *v, *v_scales;  // where the lane goes on

    // From `at` on, the next item of which this warp's panel sees something.
    __device__ __forceinline__ void find(const Args& a, const Cut& cut, int position, int panel, int blocks, int groups) {
        for (step = 0; at.left > 0; at.advance(blocks, groups)) {
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
    __device__ __forceinline__ void issue(const Args& a, const Cut& cut, int position, int panel, int blocks, int groups, uint8_t* stage) {
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
            if (++step == cut.k_steps + cut.v_steps) at.advance(blocks, groups), find(a, cut, position, panel, blocks, groups);
        }
        asm volatile("cp.async.commit_group;");
    }

    __device__ __forceinline__ void start(const Args& a, const Cut& cut, int position, int panel, int blocks, int groups) {
        find(a, cut, position, panel, blocks, groups);
#pragma unroll 1
        for (int i = 0; i < RING - 1; i++) issue(a, cut, position, panel, blocks, groups, mem + i * STAGE);
    }

    // Waits for the next stage; starts the copy that takes the place of the last one.
    __device__ __forceinline__ const uint8_t* next(const Args& a, const Cut& cut, int position, int panel, int blocks, int groups) {
        asm volatile("cp.async.wait_group %0;" ::"n"(RING - 2) : "memory");
        __syncwarp();
        issue(a, cut, position, panel, blocks, groups, mem + (slot == 0 ? RING - 1 : slot - 1) * STAGE);
        const uint8_t* stage = mem + slot * STAGE;
        slot = slot == RING - 1 ? 0 : slot + 1;
        return stage;
    }
};

template <class T>
__device__ __forceinline__ void four(const T* from, T (&to)[4]) {
    const int4 x = *(const int4*)from;
    to[0] = *(const T*)&x.x, to[1] = *(const T*)&x.y, to[2] = *(const T*)&x.z, to[3] = *(const T*)&x.w;
}

// Query of G heads as scores read it, fours of values (or words of four codes) side by side: [C_k / 4][G][4]; of quantised K: [C_k / 16][G][4]
// words, then for each run of 32 its d [C_k / 32][G], and what sums begin with to make up for K's nibbles being raised by 8.
template <int G>
__device__ __forceinline__ void load_query(const Args& a, float* to, int head, int group) {
    const int c = threadIdx.x * 4, runs = a.c_k / 32;
    if (threadIdx.x / 32 * 128 >= a.c_k) return;
    const bool is_there = c < a.c_k;
    float* d = to + G * a.c_k / 4;
    int* start = (int*)d + G * runs;
    float4 x[G];
#pragma unroll
    for (int g = 0; g < G; g++) x[g] = is_there ? *(const float4*)(a.q + (size_t)(head * a.gqa + min(group * G + g, a.gqa - 1)) * a.c_k + c) : float4{};
    if (cache::is_float(a.type_k)) {
#pragma unroll
        for (int g = 0; g < G; g++)
            if (is_there) *(float4*)(to + (c / 4 * G + g) * 4) = x[g];
        return;
    }
#pragma unroll
    for (int g = 0; g < G; g++) {
        const Run r = quantised(x[g]);
        if (!is_there) continue;
        ((int*)to)[(c / 16 * G + g) * 4 + c / 4 % 4] = r.word;
        if (c % 32 == 0) d[c / 32 * G + g] = r.d, start[c / 32 * G + g] = a.type_k == cache::Q4_0 ? -8 * r.sum : 0;
    }
}

// 16 values of float K.
template <int G>
__device__ __forceinline__ void scores_float(const uint8_t* stage, bool is_bf16, const float* q, float (&acc)[G][2]) {
    const unsigned* k = (const unsigned*)stage + threadIdx.x % 32;
#pragma unroll
    for (int c = 0; c < 16; c += 4) {
        float qs[G][4];
#pragma unroll
        for (int g = 0; g < G; g++) four(q + (c / 4 * G + g) * 4, qs[g]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 x = halves(k[(c + j) * 32], is_bf16);
#pragma unroll
            for (int g = 0; g < G; g++) acc[g][0] = fmaf(qs[g][j], x.x, acc[g][0]), acc[g][1] = fmaf(qs[g][j], x.y, acc[g][1]);
        }
    }
}

// 32 values of quantised K.
template <int G, bool NIBBLES>
__device__ __forceinline__ void scores_quantised(const uint8_t* codes, const uint8_t* scales, const int* q, const float* d_q, const int* start, float (&acc)[G][2]) {
    const int lane = threadIdx.x % 32;
    int sums[G][2];
#pragma unroll
    for (int g = 0; g < G; g++) sums[g][0] = sums[g][1] = NIBBLES ? start[g] : 0;
#pragma unroll
    for (int words = 0; words < 8; words += 4) {
        int qs[G][4];
#pragma unroll
        for (int g = 0; g < G; g++) four(q + (words / 4 * G + g) * 4, qs[g]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int2 w = ((const int2*)codes)[(NIBBLES ? j : words + j) * 32 + lane];
            const int x = NIBBLES ? w.x >> words & 0x0f0f0f0f : w.x, y = NIBBLES ? w.y >> words & 0x0f0f0f0f : w.y;
#pragma unroll
            for (int g = 0; g < G; g++) sums[g][0] = __dp4a(x, qs[g][j], sums[g][0]), sums[g][1] = __dp4a(y, qs[g][j], sums[g][1]);
        }
    }
    const float2 d_k = __half22float2(((const __half2*)scales)[lane]);
#pragma unroll
    for (int g = 0; g < G; g++) {
        acc[g][0] = fmaf((float)sums[g][0], d_q[g] * d_k.x, acc[g][0]);
        acc[g][1] = fmaf((float)sums[g][1], d_q[g] * d_k.y, acc[g][1]);
    }
}

// Scores of a warp's panel against stage `s` of K.
template <int G>
__device__ __forceinline__ void scores(const Args& a, const uint8_t* stage, int s, const float* q, float (&acc)[G][2]) {
    if (a.type_k == cache::F16) {
        scores_float<G>(stage, false, q + s * 16 * G, acc);
    } else if (a.type_k == cache::BF16) {
        scores_float<G>(stage, true, q + s * 16 * G, acc);
    } else {
        const int runs = a.c_k / 32;
        const int* codes = (const int*)q;
        const float* d = q + G * a.c_k / 4;
        const int* start = (const int*)d + G * runs;
        if (a.type_k == cache::Q8_0) {
            scores_quantised<G, false>(stage, stage + CODES, codes + s * 8 * G, d + s * G, start + s * G, acc);
        } else {
#pragma unroll 1
            for (int i = 0; i < 2 && 2 * s + i < runs; i++) {
                const int run = 2 * s + i;
                scores_quantised<G, true>(stage + i * 1024, stage + CODES + i * 128, codes + run * 8 * G, d + run * G, start + run * G, acc);
            }
        }
    }
}

// Adds the weighted cells of a stage, which begins with the segment's cell `first`; of the segment lo .. hi are seen. p: the segment's
// weights [16][G][4].
template <int G, int W>
__device__ __forceinline__ void weighted(const Args& a, const uint8_t* stage, int first, int count, int lo, int hi, int column, const float* p, float (&o)[G][W]) {
    auto add = [&](auto&& values) {
        if (lo <= first && first + count <= hi) {
#pragma unroll 1
            for (int n = 0; n < count; n += 4) {
                float e[G][4];
#pragma unroll
                for (int g = 0; g < G; g++) four(p + ((first + n) / 4 * G + g) * 4, e[g]);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float x[W];
                    values(n + j, x);
#pragma unroll
                    for (int g = 0; g < G; g++)
#pragma unroll
                        for (int i = 0; i < W; i++) o[g][i] = fmaf(e[g][j], x[i], o[g][i]);
                }
            }
        } else {
#pragma unroll 1
            for (int n = max(lo - first, 0); n < min(hi - first, count); n++) {
                float x[W];
                values(n, x);
#pragma unroll
                for (int g = 0; g < G; g++) {
                    const float e = p[((first + n) / 4 * G + g) * 4 + (first + n) % 4];
#pragma unroll
                    for (int i = 0; i < W; i++) o[g][i] = fmaf(e, x[i], o[g][i]);
                }
            }
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

// Bytes of shared memory; the wrapper has the same sum.
__host__ __device__ constexpr int shared_bytes(int g, int c_k, int c_v) { return WARPS * RING * STAGE + 4 * (g * (c_k + CELLS + WARPS * c_v) + (WARPS + 1) * 8); }

template <int G, int W>
__device__ __forceinline__ void attend(const Args& a, uint8_t* shared) {
    const int panel = threadIdx.x / 32, lane = threadIdx.x % 32, heads = a.heads_kv * a.gqa;
    const int blocks = (int)*a.count, groups = (a.gqa + G - 1) / G;
    Place at = place(blockIdx.x, gridDim.x, blocks, groups, a.heads_kv);
    if (at.left == 0) return;
    float* q = (float*)(shared + WARPS * RING * STAGE);
    float* p = q + G * a.c_k;                    // [64][G][4]: scores, then weights
    float* parts = p + G * CELLS;                // [4][G][C_v]
    float* largest = parts + WARPS * G * a.c_v;  // [4][8], then of all [8]
    const Cut c = cut(a);
    Stream stream{shared + panel * RING * STAGE, 0, at, 0, nullptr, nullptr, nullptr, nullptr};
    // What is not the newest block was written long ago, and all of a whole one is seen where there is no window, wherever the token stands: of one with holes a warp
    // might have nothing, and go on to the newest.
    const cache::Block oldest = a.blocks[at.block];
    const bool is_whole = oldest.first == 0 && oldest.end == CELLS;
    const bool is_old = at.block < blocks - 1 && is_whole && a.window == 0 && c.k_steps + c.v_steps >= RING;
    if (!is_old) wait_for_previous();
    stream.start(a, c, is_old ? INT_MAX - CELLS : (int)*a.position, panel, blocks, groups);
    wait_for_previous();
    const int position = (int)*a.position;
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
        const float* weights = p + panel * PANEL * G;
        float* own = p + ((panel * PANEL + 2 * lane) / 4 * G) * 4 + 2 * lane % 4;  // of the lane's two cells, for head g at 4 g
        float s[G][2] = {}, o[G][W] = {};
#pragma unroll 1
        for (int step = 0; step < c.k_steps + c.v_steps; step++) {
            if (step == c.k_steps) {
                const bool sees[2] = {lo <= 2 * lane && 2 * lane < hi, lo <= 2 * lane + 1 && 2 * lane + 1 < hi};
#pragma unroll
                for (int g = 0; g < G; g++) s[g][0] = s[g][0] * a.scale, s[g][1] = s[g][1] * a.scale;
                if (a.soft_cap > 0.0f) {  // by way of memory: a loop over registers would be unrolled, and this is long
                    __syncthreads();      // the last block's weights have been added up
#pragma unroll
                    for (int g = 0; g < G; g++) own[4 * g] = s[g][0], own[4 * g + 1] = s[g][1];
#pragma unroll 1
                    for (int i = 0; i < 2 * G; i++) own[i / 2 * 4 + i % 2] = math::soft_cap(own[i / 2 * 4 + i % 2], a.soft_cap);
#pragma unroll
                    for (int g = 0; g < G; g++) s[g][0] = own[4 * g], s[g][1] = own[4 * g + 1];
                }
#pragma unroll
                for (int g = 0; g < G; g++) {
                    float m = fmaxf(sees[0] ? s[g][0] : -INFINITY, sees[1] ? s[g][1] : -INFINITY);
                    m = fmaxf(m, -INFINITY);
                    for (int i = 16; i > 0; i /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, i));
                    if (lane == 0) largest[panel * 8 + g] = m;
                }
                __syncthreads();
#pragma unroll
                for (int g = 0; g < G; g++) {
                    const float m = fmaxf(fmaxf(largest[g], largest[8 + g]), fmaxf(largest[16 + g], largest[24 + g]));
                    float e[2];
#pragma unroll
                    for (int i = 0; i < 2; i++) e[i] = sees[i] ? math::exp_weight(s[g][i] - m) : 0.0f;
                    *(float2*)(own + 4 * g) = {e[0], e[1]};
                    if (threadIdx.x == 0) largest[WARPS * 8 + g] = m;
                }
                __syncwarp();
            }
            if (lo >= hi) continue;
            const uint8_t* stage = stream.next(a, c, position, panel, blocks, groups);
            if (step < c.k_steps) {
                scores<G>(a, stage, step, q, s);
            } else {
                weighted<G, W>(a, stage, (step - c.k_steps) * c.v_cells, c.v_cells, lo, hi, column, weights, o);
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
            for (int i = threadIdx.x; i < a.c_v; i += THREADS)
                to[g * size + 2 + i] = part[i] + part[of_warp + i] + part[2 * of_warp + i] + part[3 * of_warp + i];
        }
        const int g = min((int)threadIdx.x / 16, G - 1), l_lane = threadIdx.x % 16;
        const float* of_lane = p + (l_lane / 4 * G + g) * 4 + l_lane % 4;
        float l = 0.0f;
#pragma unroll
        for (int i = 0; i < CELLS / 16; i++) l = l + of_lane[i * 16 * G];
        l = math::sum_lanes(l);
        if (l_lane == 0 && (int)threadIdx.x / 16 < rows) {
            to[g * size] = seen.lo < seen.hi ? largest[WARPS * 8 + g] : 0.0f;
            to[g * size + 1] = l;
        }
    }
}

}  // namespace many
}  // namespace decode
