// Decode attention where there are many blocks: a warp does a block for G query heads. See attention_decode.cuh.
//
// In scores a lane has 8 cells of a panel (lane / 8) for every head; in weighted sums 8 values of a segment for every head, S segments of 64
// cells side by side in the warp.
#pragma once

namespace decode {
namespace many {

// How K and V of a block and head are cut into stages: K by 8 rows of 64 cells of all four panels, float K 8 values; quantised K 8 words,
// but half the cells. V by some cells of S segments.
struct Cut {
    int k_steps, k_rows, k_panel, k_scales, k_stride;           // rows, bytes of a panel and of a row
    int v_steps, v_shift, v_cells, v_cell, v_scales, v_bytes;   // steps of S segments (2^shift), cells a step; bytes of a cell, of a step's segment
    int k_head, v_head, k_scales_head, v_scales_head;
};

template <int S>
__device__ __forceinline__ Cut cut(const Args& a) {
    Cut r;
    r.k_panel = cache::code_bytes(a.type_k, PANEL * a.c_k), r.k_scales = cache::scale_bytes(a.type_k, PANEL * a.c_k);
    const bool is_float = cache::is_float(a.type_k);
    r.k_stride = is_float ? 128 : 256;
    r.k_rows = is_float ? a.c_k : r.k_panel / (PANEL * 4);
    r.k_steps = (r.k_rows + 7) / 8 * (is_float ? 1 : 2);
    r.v_cell = cache::code_bytes(a.type_v, a.c_v), r.v_scales = cache::scale_bytes(a.type_v, a.c_v);
    r.v_shift = 0;
    while (S * (PANEL >> r.v_shift) * r.v_cell > STAGE_CODES) r.v_shift++;
    r.v_steps = 1 << r.v_shift, r.v_cells = PANEL >> r.v_shift, r.v_bytes = r.v_cells * r.v_cell;
    r.k_scales_head = 4 * r.k_scales, r.v_scales_head = CELLS * r.v_scales;
    r.k_head = 4 * r.k_panel + r.k_scales_head, r.v_head = CELLS * r.v_cell + r.v_scales_head;
    return r;
}

// A warp's walk over what it reads, ahead of the arithmetic by the ring's length, and the ring.
template <int G, int S>
struct Stream {
    static constexpr int RING = ring(G);
    uint8_t* mem;
    int slot;  // of the stage in work
    Place at;
    int step;
    const uint8_t *k, *k_scales, *v;  // k, k_scales: where the lane goes on; v: the lane's part of the first bytes

    __device__ __forceinline__ void find(const Args& a, const Cut& cut, int position, int blocks, int groups) {
        for (step = 0; at.left > 0; at.advance(blocks, groups)) {
            const cache::Block block = a.blocks[at.block];
            const cache::Range seen = cache::visible(block, position, a.window);
            if (seen.lo >= seen.hi) continue;
            const int lane = threadIdx.x % 32;
            k_scales = (const uint8_t*)block.address + (size_t)at.head * cut.k_head;
            k = k_scales + cut.k_scales_head + lane / 8 * cut.k_stride + lane % 8 * 16;
            k_scales += lane % 16 / 4 * cut.k_scales + lane / 16 * 128 + lane % 4 * 16;
            v = (const uint8_t*)block.address + (size_t)a.heads_kv * cut.k_head + (size_t)at.head * cut.v_head + lane * 16;
            return;
        }
    }

    // Rows of K: of each panel 8, four at a time, 8 lanes a row. The last of an odd number of runs of q4_0 has 4.
    __device__ __forceinline__ void copy_k(const Args& a, const Cut& cut, uint8_t* stage) {
        const int lane = threadIdx.x % 32;
        const bool is_float = cache::is_float(a.type_k);
        const int first = (is_float ? step : step / 2) * 8;
        const bool eight = first + 4 < cut.k_rows;
        stage += lane * 16;
#pragma unroll
        for (int panel = 0; panel < 4; panel++) {
            const uint8_t* from = k + panel * cut.k_panel;
            copy16(stage + panel * 1024, from);
            if (eight) copy16(stage + panel * 1024 + 512, from + 4 * cut.k_stride);
        }
        if (is_float) {
            k += 1024;
            return;
        }
        const int runs = a.type_k == cache::Q8_0 ? 1 : 2;  // of 32 values in a stage; half of the cells
        if (lane / 16 < runs && (eight || lane < 16)) copy16(stage + STAGE_CODES, k_scales);
        if (step % 2 == 0) {
            k += 128, k_scales += 64;
        } else {
            k += 2048 - 128, k_scales += runs * 128 - 64;
        }
    }

    __device__ __forceinline__ void copy_v(const Cut& cut, int v_step, uint8_t* stage) {
        const int lane = threadIdx.x % 32 * 16;
        const int cell = (v_step >> cut.v_shift) * S * PANEL + (v_step & cut.v_steps - 1) * cut.v_cells;
        const uint8_t *from = v + cut.v_scales_head + cell * cut.v_cell, *from_scales = v + cell * cut.v_scales;
        stage += lane;
#pragma unroll
        for (int s = 0; s < S; s++) {
#pragma unroll
            for (int i = 0; i < STAGE_CODES / S; i += 512)
                if (i + lane < cut.v_bytes) copy16(stage + i, from + i);
            stage += cut.v_bytes, from += PANEL * cut.v_cell;
        }
        if (cut.v_scales == 0) return;
        stage += STAGE_CODES - S * cut.v_bytes;
#pragma unroll
        for (int s = 0; s < S; s++) {
            if (lane < cut.v_cells * cut.v_scales) copy16(stage, from_scales);
            stage += cut.v_cells * cut.v_scales, from_scales += PANEL * cut.v_scales;
        }
    }

    // Starts the next copy, to a stage.
    __device__ __forceinline__ void issue(const Args& a, const Cut& cut, int position, int blocks, int groups, uint8_t* stage) {
        if (at.left > 0) {
            if (step < cut.k_steps) {
                copy_k(a, cut, stage);
            } else {
                copy_v(cut, step - cut.k_steps, stage);
            }
            if (++step == cut.k_steps + 4 / S * cut.v_steps) at.advance(blocks, groups), find(a, cut, position, blocks, groups);
        }
        asm volatile("cp.async.commit_group;");
    }

    __device__ __forceinline__ void start(const Args& a, const Cut& cut, int position, int blocks, int groups) {
        find(a, cut, position, blocks, groups);
#pragma unroll 1
        for (int i = 0; i < RING - 1; i++) issue(a, cut, position, blocks, groups, mem + i * STAGE);
    }

    // Waits for the next stage; starts the copy that takes the place of the last one.
    __device__ __forceinline__ const uint8_t* next(const Args& a, const Cut& cut, int position, int blocks, int groups) {
        asm volatile("cp.async.wait_group %0;" ::"n"(RING - 2) : "memory");
        __syncwarp();
        issue(a, cut, position, blocks, groups, mem + (slot == 0 ? RING - 1 : slot - 1) * STAGE);
        const uint8_t* stage = mem + slot * STAGE;
        slot = slot == RING - 1 ? 0 : slot + 1;
        return stage;
    }
};

// Query of G heads as scores read it, fours of values (or words of four codes) side by side: [C_k / 4][G][4]; of quantised K: [C_k / 16][G][4]
// words, then for each run of 32 its d [C_k / 32][G], and what sums begin with to make up for K's nibbles being raised by 8.
template <int G>
__device__ __forceinline__ void load_query(const Args& a, float* to, int head, int group) {
    const int runs = a.c_k / 32;
    float* d = to + G * a.c_k / 4;
    int* start = (int*)d + G * runs;
    for (int c = threadIdx.x % 32 * 4; c / 128 * 128 < a.c_k; c += 128) {
        const bool is_there = c < a.c_k;
        float4 x[G];
#pragma unroll
        for (int g = 0; g < G; g++) x[g] = is_there ? *(const float4*)(a.q + (size_t)(head * a.gqa + min(group * G + g, a.gqa - 1)) * a.c_k + c) : float4{};
        if (cache::is_float(a.type_k)) {
#pragma unroll
            for (int g = 0; g < G; g++)
                if (is_there) *(float4*)(to + (c / 4 * G + g) * 4) = x[g];
        } else {
#pragma unroll
            for (int g = 0; g < G; g++) {
                const Run r = quantised(x[g]);
                if (!is_there) continue;
                ((int*)to)[(c / 16 * G + g) * 4 + c / 4 % 4] = r.word;
                if (c % 32 == 0) d[c / 32 * G + g] = r.d, start[c / 32 * G + g] = a.type_k == cache::Q4_0 ? -8 * r.sum : 0;
            }
        }
    }
}

template <class T>
__device__ __forceinline__ void four(const T* from, T (&to)[4]) {
    const int4 x = *(const int4*)from;
    to[0] = *(const T*)&x.x, to[1] = *(const T*)&x.y, to[2] = *(const T*)&x.z, to[3] = *(const T*)&x.w;
}

// 8 values of float K. A lane's cells are 8 (lane % 8) .. of its panel.
template <int G>
__device__ __forceinline__ void scores_float(const uint8_t* stage, bool is_bf16, const float* q, float (&acc)[G][8]) {
    const int lane = threadIdx.x % 32;
    const uint8_t* k = stage + lane / 8 * 1024 + lane % 8 * 16;
#pragma unroll
    for (int c = 0; c < 8; c += 4) {
        float qs[G][4];
#pragma unroll
        for (int g = 0; g < G; g++) four(q + (c / 4 * G + g) * 4, qs[g]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint4 w = *(const uint4*)(k + (c + j) * 128);
            const float2 x[4] = {halves(w.x, is_bf16), halves(w.y, is_bf16), halves(w.z, is_bf16), halves(w.w, is_bf16)};
#pragma unroll
            for (int g = 0; g < G; g++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[g][2 * i] = fmaf(qs[g][j], x[i].x, acc[g][2 * i]), acc[g][2 * i + 1] = fmaf(qs[g][j], x[i].y, acc[g][2 * i + 1]);
        }
    }
}

// 32 values of quantised K against half of a lane's cells: 4 (lane % 8) .. of the panel's first or second 32.
template <int G, bool NIBBLES>
__device__ __forceinline__ void scores_quantised(const uint8_t* codes, const uint8_t* scales, int half, const int* q, const float* d_q, const int* start, float (&acc)[G][8]) {
    const int lane = threadIdx.x % 32;
    const uint8_t* k = codes + lane / 8 * 1024 + lane % 8 * 16;
    int sums[G][4];
#pragma unroll
    for (int g = 0; g < G; g++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[g][i] = NIBBLES ? start[g] : 0;
#pragma unroll
    for (int words = 0; words < 8; words += 4) {
        int qs[G][4];
#pragma unroll
        for (int g = 0; g < G; g++) four(q + (words / 4 * G + g) * 4, qs[g]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int w[4];
            four((const int*)(k + (NIBBLES ? j : words + j) * 128), w);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int x = NIBBLES ? w[i] >> words & 0x0f0f0f0f : w[i];
#pragma unroll
                for (int g = 0; g < G; g++) sums[g][i] = __dp4a(x, qs[g][j], sums[g][i]);
            }
        }
    }
    const uint2 w = *(const uint2*)(scales + lane / 8 * 64 + lane % 8 * 8);
    const float2 x = __half22float2(*(const __half2*)&w.x), y = __half22float2(*(const __half2*)&w.y);
    const float d_k[4] = {x.x, x.y, y.x, y.y};
    auto add = [&](int first) {
#pragma unroll
        for (int g = 0; g < G; g++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[g][first + i] = fmaf((float)sums[g][i], d_q[g] * d_k[i], acc[g][first + i]);
    };
    if (half == 0) {
        add(0);
    } else {
        add(4);
    }
}

template <int G>
__device__ __forceinline__ void scores(const Args& a, const uint8_t* stage, int step, const float* q, float (&acc)[G][8]) {
    if (a.type_k == cache::F16) {
        scores_float<G>(stage, false, q + step * 8 * G, acc);
    } else if (a.type_k == cache::BF16) {
        scores_float<G>(stage, true, q + step * 8 * G, acc);
    } else {
        const int runs = a.c_k / 32, eight = step / 2;
        const int* codes = (const int*)q;
        const float* d = q + G * a.c_k / 4;
        const int* start = (const int*)d + G * runs;
        if (a.type_k == cache::Q8_0) {
            scores_quantised<G, false>(stage, stage + STAGE_CODES, step % 2, codes + eight * 8 * G, d + eight * G, start, acc);
        } else {
#pragma unroll 1
            for (int i = 0; i < 2 && 2 * eight + i < runs; i++) {
                const int run = 2 * eight + i;
                scores_quantised<G, true>(stage + i * 512, stage + STAGE_CODES + i * 256, step % 2, codes + run * 8 * G, d + run * G, start + run * G, acc);
            }
        }
    }
}

// Adds weighted cells of a stage: cells `first ..` of each segment; a lane's segment begins with the block's cell `segment`, its stage with
// `cells`, of which `lo .. hi` are seen.
template <int G>
__device__ __forceinline__ void weighted(const Args& a, const uint8_t* cells, const uint8_t* scales, int count, int segment, int first, int lo, int hi, bool is_whole, int column,
                                         const float* p, float (&o)[G][8]) {
    auto add = [&](auto&& values) {
        if (is_whole) {
#pragma unroll 1
            for (int n = 0; n < count; n += 4) {
                float e[G][4];
#pragma unroll
                for (int g = 0; g < G; g++) four(p + ((segment + first + n) / 4 * G + g) * 4, e[g]);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float x[8];
                    values(n + j, x);
#pragma unroll
                    for (int g = 0; g < G; g++)
#pragma unroll
                        for (int i = 0; i < 8; i++) o[g][i] = fmaf(e[g][j], x[i], o[g][i]);
                }
            }
        } else {
#pragma unroll 1
            for (int n = 0; n < count; n++) {
                const int cell = segment + first + n;
                if (cell < lo || cell >= hi) continue;
                float x[8];
                values(n, x);
#pragma unroll
                for (int g = 0; g < G; g++) {
                    const float e = p[(cell / 4 * G + g) * 4 + cell % 4];
#pragma unroll
                    for (int i = 0; i < 8; i++) o[g][i] = fmaf(e, x[i], o[g][i]);
                }
            }
        }
    };
    if (a.type_v == cache::F16) {
        add([&](int n, float(&x)[8]) { values_float<8>(cells, n, a.c_v, column, false, x); });
    } else if (a.type_v == cache::BF16) {
        add([&](int n, float(&x)[8]) { values_float<8>(cells, n, a.c_v, column, true, x); });
    } else if (a.type_v == cache::Q8_0) {
        add([&](int n, float(&x)[8]) { values_quantised<8, false>(cells, scales, n, a.c_v, column, x); });
    } else {
        add([&](int n, float(&x)[8]) { values_quantised<8, true>(cells, scales, n, a.c_v, column, x); });
    }
}

template <int G, int S>
__device__ __forceinline__ void attend(const Args& a, uint8_t* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, position = (int)*a.position, heads = a.heads_kv * a.gqa;
    const int blocks = (int)*a.count, groups = (a.gqa + G - 1) / G;
    float* p = (float*)(shared + WARPS * ring(G) * STAGE) + warp * G * CELLS;  // the query; then scores and weights [64][G][4]
    const Cut c = cut<S>(a);
    // Warps of a thread block do not follow each other: those with an item more are spread over multiprocessors.
    Place at = place(warp * gridDim.x + blockIdx.x, gridDim.x * WARPS, blocks, groups, a.heads_kv);
    if (at.left == 0) return;
    Stream<G, S> stream{shared + warp * ring(G) * STAGE, 0, at, 0, nullptr, nullptr, nullptr};
    stream.start(a, c, position, blocks, groups);
    constexpr int LANES = 32 / S;  // of a segment
    const int segment = lane / LANES, column = min(lane % LANES * 8, a.c_v - 8);
    for (; at.left > 0; at.advance(blocks, groups)) {
        const cache::Block block = a.blocks[at.block];
        const cache::Range seen = cache::visible(block, position, a.window);
        const int rows = min(G, a.gqa - at.group * G), size = 2 + a.c_v;
        float* to = a.partials + ((size_t)block.slot * heads + at.head * a.gqa + at.group * G) * size;
        if (seen.lo >= seen.hi) {
            if (lane < rows && block.slot < a.capacity) to[lane * size] = to[lane * size + 1] = 0.0f;
            continue;
        }
        __syncwarp();
        load_query<G>(a, p, at.head, at.group);
        __syncwarp();
        float s[G][8] = {};
#pragma unroll 1
        for (int step = 0; step < c.k_steps; step++) scores<G>(a, stream.next(a, c, position, blocks, groups), step, p, s);
        __syncwarp();
        const bool is_whole = seen.lo == 0 && seen.hi == CELLS, is_float = cache::is_float(a.type_k);
        // The lane's cells: two fours.
        const int fours[2] = {lane / 8 * PANEL + (is_float ? lane % 8 * 8 : lane % 8 * 4), lane / 8 * PANEL + (is_float ? lane % 8 * 8 + 4 : 32 + lane % 8 * 4)};
#pragma unroll
        for (int g = 0; g < G; g++)
#pragma unroll
            for (int i = 0; i < 8; i++) s[g][i] = s[g][i] * a.scale;
        if (a.soft_cap > 0.0f) {  // by way of memory: a loop over registers would be unrolled, and this is long
#pragma unroll
            for (int i = 0; i < 8 * G; i++) p[(fours[i % 8 / 4] / 4 * G + i / 8) * 4 + i % 4] = s[i / 8][i % 8];
#pragma unroll 1
            for (int i = 0; i < 8 * G; i++) {
                float* x = p + ((i % 8 < 4 ? fours[0] : fours[1]) / 4 * G + i / 8) * 4 + i % 4;
                *x = math::soft_cap(*x, a.soft_cap);
            }
#pragma unroll
            for (int i = 0; i < 8 * G; i++) s[i / 8][i % 8] = p[(fours[i % 8 / 4] / 4 * G + i / 8) * 4 + i % 4];
        }
        if (!is_whole) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int cell = fours[i / 4] + i % 4;
                if (seen.lo <= cell && cell < seen.hi) continue;
#pragma unroll
                for (int g = 0; g < G; g++) s[g][i] = -INFINITY;
            }
        }
        float m[G];
#pragma unroll
        for (int g = 0; g < G; g++) {
            m[g] = -INFINITY;
#pragma unroll
            for (int i = 0; i < 8; i++) m[g] = fmaxf(m[g], s[g][i]);
            for (int o = 16; o > 0; o /= 2) m[g] = fmaxf(m[g], __shfl_xor_sync(~0u, m[g], o));
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int cell = fours[i / 4] + i % 4;
                const float e = math::exp_weight(s[g][i] - m[g]);
                s[g][i] = is_whole || (seen.lo <= cell && cell < seen.hi) ? e : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < 2; i++) *(float4*)(p + (fours[i] / 4 * G + g) * 4) = {s[g][4 * i], s[g][4 * i + 1], s[g][4 * i + 2], s[g][4 * i + 3]};
        }
        __syncwarp();
        if (block.slot < a.capacity) {
#pragma unroll
            for (int g = 0; g < G; g += 2) {  // a head for each half of the warp
                const int row = min(g + lane / 16, G - 1);
                float l = 0.0f;
#pragma unroll
                for (int i = 0; i < CELLS / 16; i++) l = l + p[((i * 4 + lane % 16 / 4) * G + row) * 4 + lane % 4];
                l = math::sum_lanes(l);
                const float of_row = g + 1 < G && lane / 16 ? m[g + 1 < G ? g + 1 : g] : m[g];
                if (lane % 16 == 0 && g + lane / 16 < rows) to[row * size] = of_row, to[row * size + 1] = l;
            }
        }
        constexpr int KEPT = S == 2 ? 4 : 8;  // sums of earlier segments that a lane keeps, of each head
        float sums[S == 4 ? 1 : G][KEPT];
#pragma unroll 1
        for (int first = 0; first < 4; first += S) {
            float o[G][8] = {};
#pragma unroll 1
            for (int v = 0; v < c.v_steps; v++) {
                const uint8_t* stage = stream.next(a, c, position, blocks, groups);
                weighted<G>(a, stage + segment * c.v_cells * c.v_cell, stage + STAGE_CODES + segment * c.v_cells * c.v_scales, c.v_cells, (first + segment) * PANEL,
                            v * c.v_cells, seen.lo, seen.hi, is_whole, column, p, o);
            }
            if constexpr (S == 1) {
#pragma unroll
                for (int g = 0; g < G; g++)
#pragma unroll
                    for (int i = 0; i < 8; i++) sums[g][i] = first == 0 ? o[g][i] : sums[g][i] + o[g][i];
            } else if constexpr (S == 2) {  // a lane keeps half of its columns, and half of those of the lane of the other segment
#pragma unroll
                for (int g = 0; g < G; g++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float other = __shfl_xor_sync(~0u, segment == 0 ? o[g][4 + i] : o[g][i], 16);
                        const float low = segment == 0 ? o[g][i] : other, high = segment == 0 ? other : o[g][4 + i];
                        sums[g][i] = first == 0 ? low + high : sums[g][i] + low + high;
                    }
            } else if (block.slot < a.capacity) {
#pragma unroll
                for (int g = 0; g < G; g++)
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        const float second = __shfl_down_sync(~0u, o[g][i], 8), third = __shfl_down_sync(~0u, o[g][i], 16), fourth = __shfl_down_sync(~0u, o[g][i], 24);
                        o[g][i] = o[g][i] + second + third + fourth;
                    }
                if (lane < LANES && lane * 8 < a.c_v) {
#pragma unroll
                    for (int g = 0; g < G; g++)
                        if (g < rows)
#pragma unroll
                            for (int i = 0; i < 8; i += 2) *(float2*)(to + g * size + 2 + column + i) = {o[g][i], o[g][i + 1]};
                }
            }
        }
        if constexpr (S < 4) {
            if (lane % LANES * 8 < a.c_v && block.slot < a.capacity) {
#pragma unroll
                for (int g = 0; g < G; g++)
                    if (g < rows)
#pragma unroll
                        for (int i = 0; i < KEPT; i += 2) *(float2*)(to + g * size + 2 + column + segment * 4 + i) = {sums[g][i], sums[g][i + 1]};
            }
        }
    }
}

}  // namespace many
}  // namespace decode
