// Attention of many tokens on tensor cores: half-precision operands, single-precision sums, a softmax that goes on from tile to tile.
// Not the decode kernel's arithmetic, but a definition as well: a token's bits depend on its position and the cells alone.
//
// Shapes: q [T, H, C_k], out [T, H, C_v], states [slot][T][H][2 + C_v]. A thread block takes rows of one KV head, a row being a token
// and one of the G query heads: row r is token r / G, head r % G.
//
// For each row, over tiles of 64 cells (panels, at absolute positions), ascending:
//
//   s = q k (mma, q and k rounded to half), t = s * scale * log2(e), soft-capped; cells not seen: -inf
//   m' = max(m, max t);  p = 2^(t - m');  f = 2^(m - m')
//   l = l f + sum p;  o = o f + p v (mma, p rounded to half)
//
// A tile without a cell that a row sees changes nothing of the row: f is 1 and p is 0. So rows may share tiles, however a prompt was
// cut. (Except that 0 times an infinite V is NaN: infinities of later cells of the same tile show.) Every SPAN cells a row begins anew,
// at absolute positions, and the results of spans are merged in order: so spans can be done at the same time. A span can be left in
// the middle of a list of blocks, its state being what it goes on from.
//
// K as stored is [C][64] in a panel, V [64][C]: operand B of both products, transposed as it is loaded. f16 goes from memory to its
// tile by asynchronous copies; other types to a raw stage first, and are converted (d * q rounded to half; bf16 is held within
// +-65504) before the tile is used.
#pragma once
#include "attention_cache.cuh"
#include "math.cuh"
#include "wgmma_halves.cuh"

namespace prefill {

using cache::CELLS;
using cache::PANEL;

constexpr int SPAN = 4096;

struct Args {
    const float* q;
    const cache::Block* blocks;
    float* states;
    float* out;          // null: states are left
    const float* sinks;  // null: none
    int count, position, tokens, heads_kv, gqa, c_k, c_v, type_k, type_v;
    float scale, soft_cap;
    int window, first_span, slots;
    int resume;  // whether the first span goes on from its state
};

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

constexpr float LOG2_E = 1.44269504088896340736f;

// Half-precision 16x8x16.
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], const __half* from) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(from);
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
    }
}

__device__ __forceinline__ void copy16(void* shared, const void* global, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global), "r"(is_there ? 16 : 0));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
__device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// Where 8 values from `column` on lie in a matrix of rows of STRIDE halves: 16-byte chunks are permuted in every 8 rows, so that 8 rows
// of a column are in different banks.
template <int STRIDE>
__device__ __forceinline__ int chunk(int row, int column) {
    return row * STRIDE + ((column / 8) ^ (row & 7)) * 8;
}

// Cells of a tile, a panel of an entry: from `base` on; of them `from .. to` are there and seen by some row.
struct Cells {
    int base, from, to;
};

struct Tile {
    const uint8_t *k, *k_scales, *v, *v_scales;
    Cells cells;
};

// A walk over the tiles of a head. A span's entries are read once, to shared memory; those of a list with so many holes that they are more than LISTED, as they are wanted.
constexpr int LISTED = 24;
struct Tiles {
    uint4* listed;
    int first, at;  // the first entry, panels since

    // An entry in one load: address, first cell, which of its cells are there.
    static __device__ __forceinline__ uint4 packed(const cache::Block& b) {
        return {(unsigned)b.address, (unsigned)(b.address >> 32), b.index * CELLS, b.first | (unsigned)b.end << 16};
    }

    // Behind the next barrier the walk may begin.
    __device__ __forceinline__ void start(const Args& a, int lo) {
        const unsigned wanted = lo / CELLS, of_first = a.count > 0 ? a.blocks[0].index : 0;
        first = wanted > of_first ? min((int)(wanted - of_first), a.count) : 0, at = 0;
        while (first > 0 && a.blocks[first - 1].index >= wanted) first--;
        while (first < a.count && a.blocks[first].index < wanted) first++;
        if ((int)threadIdx.x < min(a.count - first, LISTED)) listed[threadIdx.x] = packed(a.blocks[first + threadIdx.x]);
    }

    __device__ __forceinline__ bool next(const Args& a, int head, int lo, int hi, Tile& tile) {
        for (; first + at / (CELLS / PANEL) < a.count; at++) {
            const int e = at / (CELLS / PANEL), panel = at % (CELLS / PANEL);
            const uint4 own = e < LISTED ? listed[e] : packed(a.blocks[first + e]);
            const int own_first = own.w & 0xffff, own_end = own.w >> 16;
            const uint8_t* address = (const uint8_t*)((unsigned long long)own.y << 32 | own.x);
            Cells& cells = tile.cells;
            cells.base = (int)own.z + panel * PANEL;
            if (cells.base >= hi) return false;
            cells.from = max(max(own_first - panel * PANEL, lo - cells.base), 0);
            cells.to = min(min(own_end - panel * PANEL, hi - cells.base), PANEL);
            if (cells.from >= cells.to) continue;
            const int k_codes = cache::code_bytes(a.type_k, PANEL * a.c_k), k_scales = cache::scale_bytes(a.type_k, PANEL * a.c_k);
            const int v_codes = cache::code_bytes(a.type_v, PANEL * a.c_v), v_scales = cache::scale_bytes(a.type_v, PANEL * a.c_v);
            const uint8_t* of_k = address + (size_t)head * 4 * (k_codes + k_scales);
            const uint8_t* of_v = address + (size_t)a.heads_kv * 4 * (k_codes + k_scales) + (size_t)head * 4 * (v_codes + v_scales);
            tile.k_scales = of_k + panel * k_scales, tile.k = of_k + 4 * k_scales + panel * k_codes;
            tile.v_scales = of_v + panel * v_scales, tile.v = of_v + 4 * v_scales + panel * v_codes;
            at++;
            return true;
        }
        return false;
    }
};

// C: values of a head, rounded up to what there are kernels for. MT: 16 rows that a warp has. GROUPS: four warps multiply together, their 64 rows at once (from 9.0 on).
template <int C, int MT, int WARPS, bool DIRECT, bool GROUPS>
struct Kernel {
    static constexpr int THREADS = 32 * WARPS, ROWS = 16 * MT * WARPS, STRIDE = (C + 63) / 64 * 64;
    static constexpr int CHUNKS = STRIDE / 8;        // 16-byte chunks of a row
    static constexpr int TILE = PANEL * STRIDE;      // halves of a tile of K or V
    static constexpr int RAW = PANEL * C * 2 + 512;  // bytes of a raw stage of K or V: as bf16, or codes and scales
    static constexpr int SHARED = 2 * (ROWS * STRIDE + (DIRECT ? 4 : 2) * TILE) + (DIRECT ? 0 : 2 * RAW);

    // Where 8 values of q and of V lie: groups read rows of 64 values, those of the first columns before those of the others.
    static __device__ __forceinline__ int at_q(int row, int column) {
        return GROUPS ? column / 64 * ROWS * 64 + chunk<64>(row, column % 64) : chunk<STRIDE>(row, column);
    }
    static __device__ __forceinline__ int at_v(int cell, int column) {
        return GROUPS ? column / 64 * PANEL * 64 + chunk<64>(cell, column % 64) : chunk<STRIDE>(cell, column);
    }

    // f16 to its place. Of heads of C values a thread's copies are the same distances apart, in memory and where they go.
    static __device__ __forceinline__ void load_direct(const Args& a, const Tile& tile, __half* k, __half* v) {
        const int at = threadIdx.x % CHUNKS * 8, first = threadIdx.x / CHUNKS;
        if (a.c_k == C && a.c_v == C && C == STRIDE) {
            const uint8_t *of_k = tile.k + threadIdx.x * 16, *of_v = tile.v + threadIdx.x * 16;
            __half *to_k = k + chunk<PANEL>(threadIdx.x / 8, threadIdx.x % 8 * 8), *to_v = v + at_v(first, at);
#pragma unroll
            for (int j = 0; j < C * 8 / THREADS; j++) copy16(to_k + j * (THREADS / 8 * PANEL), of_k + j * THREADS * 16, true);
#pragma unroll
            for (int j = 0; j < PANEL * CHUNKS / THREADS; j++) {
                const int cell = first + j * (THREADS / CHUNKS);
                copy16(to_v + j * (THREADS / CHUNKS * (GROUPS ? 64 : STRIDE)), of_v + j * THREADS * 16, tile.cells.from <= cell && cell < tile.cells.to);
            }
            return;
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < a.c_k * 8; i += THREADS) copy16(k + chunk<PANEL>(i / 8, i % 8 * 8), tile.k + i * 16, true);
        if (at < a.c_v)
#pragma unroll 1
            for (int cell = first; cell < PANEL; cell += THREADS / CHUNKS)
                copy16(v + at_v(cell, at), tile.v + (cell * a.c_v + at) * 2, tile.cells.from <= cell && cell < tile.cells.to);
    }

    // Anything to a raw stage: codes, then scales.
    static __device__ __forceinline__ void load_raw(const Args& a, const Tile& tile, uint8_t* k, uint8_t* v) {
        const int k_codes = cache::code_bytes(a.type_k, PANEL * a.c_k), k_scales = cache::scale_bytes(a.type_k, PANEL * a.c_k);
        const int v_codes = cache::code_bytes(a.type_v, PANEL * a.c_v), v_scales = cache::scale_bytes(a.type_v, PANEL * a.c_v);
        for (int i = threadIdx.x * 16; i < k_codes; i += THREADS * 16) copy16(k + i, tile.k + i, true);
        for (int i = threadIdx.x * 16; i < k_scales; i += THREADS * 16) copy16(k + k_codes + i, tile.k_scales + i, true);
        for (int i = threadIdx.x * 16; i < v_codes; i += THREADS * 16) copy16(v + i, tile.v + i, true);
        for (int i = threadIdx.x * 16; i < v_scales; i += THREADS * 16) copy16(v + v_codes + i, tile.v_scales + i, true);
    }

    static __device__ __forceinline__ __half2 from_bf16(unsigned w) {
        const float x = fminf(fmaxf(__uint_as_float(w << 16), -65504.0f), 65504.0f);
        const float y = fminf(fmaxf(__uint_as_float(w & 0xffff0000u), -65504.0f), 65504.0f);
        return __floats2half2_rn(x, y);
    }

    // Two codes, raised by `bias`, in bytes 0 and 2 of `w`: 1024 + code is a half with the code in its last bits.
    static __device__ __forceinline__ __half2 scaled(unsigned w, float bias, __half2 d) {
        const unsigned raised = w | 0x64006400u;
        return __hmul2(__hsub2(*(const __half2*)&raised, __float2half2_rn(1024.0f + bias)), d);
    }

    static __device__ __forceinline__ void convert_k(const Args& a, const uint8_t* raw, __half* k) {
        if (a.type_k == cache::F16 || a.type_k == cache::BF16) {
            for (int i = threadIdx.x; i < a.c_k * 8; i += THREADS) {
                uint4 x = ((const uint4*)raw)[i];
                if (a.type_k == cache::BF16) {
                    __half2 y[4] = {from_bf16(x.x), from_bf16(x.y), from_bf16(x.z), from_bf16(x.w)};
                    x = *(const uint4*)y;
                }
                *(uint4*)(k + chunk<PANEL>(i / 8, i % 8 * 8)) = x;
            }
            return;
        }
        const uint8_t* scales = raw + cache::code_bytes(a.type_k, PANEL * a.c_k);
        if (a.type_k == cache::Q4_0) {
            convert_words<true>(a, raw, scales, k);
        } else {
            convert_words<false>(a, raw, scales, k);
        }
    }

    // Quantised K: a thread takes a word of two cells, which is four rows (of nibbles four and four).
    template <bool NIBBLES>
    static __device__ __forceinline__ void convert_words(const Args& a, const uint8_t* raw, const uint8_t* scales, __half* k) {
        constexpr int WORDS = NIBBLES ? 4 : 8;  // of a run of 32 values
        const int pair = threadIdx.x % 32;
#pragma unroll 2
        for (int word = threadIdx.x / 32; word < a.c_k / 32 * WORDS; word += WARPS) {
            const int run = word / WORDS;
            const uint2 x = ((const uint2*)raw)[word * 32 + pair];
            const __half2 d = ((const __half2*)scales)[run * 32 + pair];
#pragma unroll
            for (int part = 0; part < (NIBBLES ? 2 : 1); part++) {
                const uint2 y = NIBBLES ? uint2{x.x >> 4 * part & 0x0f0f0f0fu, x.y >> 4 * part & 0x0f0f0f0fu} : uint2{x.x ^ 0x80808080u, x.y ^ 0x80808080u};
                const unsigned even = __byte_perm(y.x, y.y, 0x6240), odd = __byte_perm(y.x, y.y, 0x7351);  // x0 y0 x2 y2, x1 y1 x3 y3
                const unsigned rows[4] = {__byte_perm(even, 0, 0x4140), __byte_perm(odd, 0, 0x4140), __byte_perm(even, 0, 0x4342), __byte_perm(odd, 0, 0x4342)};
#pragma unroll
                for (int j = 0; j < 4; j++)
                    *(__half2*)(k + chunk<PANEL>(run * 32 + part * 16 + word % WORDS * 4 + j, 2 * pair) + 2 * pair % 8) = scaled(rows[j], NIBBLES ? 8.0f : 128.0f, d);
            }
        }
    }

    static __device__ __forceinline__ void convert_v(const Args& a, const Cells& tile, const uint8_t* raw, __half* v) {
        const uint8_t* scales = raw + cache::code_bytes(a.type_v, PANEL * a.c_v);
        const int runs = a.c_v / 32;
        if (a.type_v == cache::Q4_0) {
            const int unit = threadIdx.x % (CHUNKS / 2), run = unit / 2, half = unit % 2;  // 8 bytes: values of both halves of a run
            if (run >= runs) return;
#pragma unroll 2
            for (int cell = threadIdx.x / (CHUNKS / 2); cell < PANEL; cell += THREADS / (CHUNKS / 2)) {
                const uint2 x = *(const uint2*)(raw + (cell * runs + run) * 16 + half * 8);
                const __half2 d = __half2half2(((const __half*)scales)[cell * runs + run]);
                const bool is_there = tile.from <= cell && cell < tile.to;
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    const unsigned y[2] = {x.x >> 4 * part & 0x0f0f0f0fu, x.y >> 4 * part & 0x0f0f0f0fu};
                    __half2 z[4];
#pragma unroll
                    for (int j = 0; j < 4; j++) z[j] = scaled(__byte_perm(y[j / 2], 0, j % 2 ? 0x4342 : 0x4140), 8.0f, d);
                    *(uint4*)(v + at_v(cell, run * 32 + part * 16 + half * 8)) = is_there ? *(const uint4*)z : uint4{};
                }
            }
            return;
        }
        const int at = threadIdx.x % CHUNKS * 8;
        if (at >= a.c_v) return;
#pragma unroll 2
        for (int cell = threadIdx.x / CHUNKS; cell < PANEL; cell += THREADS / CHUNKS) {
            const bool is_there = tile.from <= cell && cell < tile.to;
            __half2 z[4];
            if (a.type_v == cache::Q8_0) {
                const uint2 x = *(const uint2*)(raw + cell * a.c_v + at);
                const unsigned y[2] = {x.x ^ 0x80808080u, x.y ^ 0x80808080u};
                const __half2 d = __half2half2(((const __half*)scales)[cell * runs + at / 32]);
#pragma unroll
                for (int j = 0; j < 4; j++) z[j] = scaled(__byte_perm(y[j / 2], 0, j % 2 ? 0x4342 : 0x4140), 128.0f, d);
            } else {
                const uint4 x = *(const uint4*)(raw + (cell * a.c_v + at) * 2);
                const unsigned y[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int j = 0; j < 4; j++) z[j] = a.type_v == cache::BF16 ? from_bf16(y[j]) : *(const __half2*)&y[j];
            }
            *(uint4*)(v + at_v(cell, at)) = is_there ? *(const uint4*)z : uint4{};
        }
    }

    // Rows of q, rounded to half, with zeros beyond C_k and behind the last row.
    static __device__ __forceinline__ void load_q(const Args& a, int first_row, int head, __half* q) {
        for (int i = threadIdx.x; i < ROWS * (C / 8); i += THREADS) {
            const int r = i / (C / 8), at = i % (C / 8) * 8, row = first_row + r;
            __half2 y[4] = {};
            if (row < a.tokens * a.gqa && at < a.c_k) {
                const float4* from = (const float4*)(a.q + ((size_t)(row / a.gqa) * a.heads_kv * a.gqa + head * a.gqa + row % a.gqa) * a.c_k + at);
                const float4 lo = from[0], hi = from[1];
                y[0] = __floats2half2_rn(lo.x, lo.y), y[1] = __floats2half2_rn(lo.z, lo.w);
                y[2] = __floats2half2_rn(hi.x, hi.y), y[3] = __floats2half2_rn(hi.z, hi.w);
            }
            *(uint4*)(q + at_q(r, at)) = *(const uint4*)y;
        }
    }

    // What threads wrote to shared memory is seen by products of groups, behind the next barrier.
    static __device__ __forceinline__ void seen_by_groups() {
#ifdef HAS_WGMMA
        if constexpr (GROUPS) barriers_visible();
#endif
    }

    // Scores of a group's rows. Operands begin at these low words.
    static __device__ __forceinline__ void multiply_k(uint32_t q, uint32_t k, float (&s)[PANEL / 2]) {
#ifdef HAS_WGMMA
        wgmma_fence();
#pragma unroll
        for (int ks = 0; ks < C / 16; ks++) {
            const uint64_t x = operand_b_of(q + (ks / 4 * ROWS * 128 + ks % 4 * 32) / 16), y = operand_b_of(k + ks * 16 * 128 / 16);
            if (ks == 0) wgmma_f16<false>(s, x, y);
            else wgmma_f16<true>(s, x, y);
        }
        wgmma_commit();
        wgmma_wait<0>();
        settled(s);
#endif
    }

    // Adds the weighted values of a tile.
    static __device__ __forceinline__ void multiply_v(const unsigned (&p)[PANEL / 16][4], uint32_t v, float (&o)[C / 8][4]) {
#ifdef HAS_WGMMA
        wgmma_fence();
#pragma unroll
        for (int ks = 0; ks < PANEL / 16; ks++)
#pragma unroll
            for (int column = 0; column < C; column += 64)
                wgmma_f16((float(&)[32])o[column / 8], p[ks], operand_b_of(v + (column / 64 * PANEL * 128 + ks * 16 * 128) / 16));
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int column = 0; column < C; column += 64) settled((float(&)[32])o[column / 8]);
#endif
    }

    // The low word of an operand of products of groups, known to be the same in all threads of a warp.
    static __device__ __forceinline__ uint32_t operand(const __half* from) {
#ifdef HAS_WGMMA
        return __shfl_sync(~0u, (uint32_t)operand_b(shared_address(from)), 0);
#else
        return 0;
#endif
    }

    static __device__ __forceinline__ void attend(const Args& a) {
        extern __shared__ __align__(1024) uint8_t shared[];
        wait_for_previous();
        let_next_start();
        __half* q = (__half*)shared;
        __half* tiles = q + ROWS * STRIDE;  // K, V; if direct, twice
        uint8_t* raw = (uint8_t*)(tiles + 2 * TILE);
        // Later rows see more: those of all heads go first.
        const int item = blockIdx.y * gridDim.x + blockIdx.x, head = item % gridDim.y, span = a.first_span + blockIdx.z, slot = span % a.slots;
        const int first_row = (gridDim.x - 1 - item / gridDim.y) * ROWS, rows = a.tokens * a.gqa;
        const int first_token = first_row / a.gqa, last_token = min(first_row + ROWS - 1, rows - 1) / a.gqa;
        const int seen_from = a.window > 0 ? max(a.position + first_token + 1 - a.window, 0) : 0;
        const int lo = max(seen_from, span * SPAN), hi = min(a.position + last_token + 1, (span + 1) * SPAN);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4;
        const bool resumes = a.resume && blockIdx.z == 0;

        load_q(a, first_row, head, q);
        if (a.c_k < C || a.c_v < C)  // what no copy writes is zero
            for (int i = threadIdx.x; i < (DIRECT ? 4 : 2) * TILE / 8; i += THREADS) ((uint4*)tiles)[i] = uint4{};

        int position[MT][2];
        float m[MT][2], l[MT][2], o[MT][C / 8][4];
        auto row_of = [&](int mt, int half) { return first_row + warp * 16 * MT + mt * 16 + half * 8 + lane / 4; };
        auto state = [&](int row) { return a.states + (((size_t)slot * a.tokens + row / a.gqa) * a.heads_kv * a.gqa + head * a.gqa + row % a.gqa) * (2 + a.c_v); };
#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                position[mt][half] = a.position + min(row_of(mt, half), rows - 1) / a.gqa;
                m[mt][half] = -INFINITY, l[mt][half] = 0.0f;
#pragma unroll
                for (int n = 0; n < C / 8; n++) o[mt][n][2 * half] = o[mt][n][2 * half + 1] = 0.0f;
                if (resumes && row_of(mt, half) < rows) {
                    const float* from = state(row_of(mt, half));
                    m[mt][half] = from[0], l[mt][half] = from[1];
#pragma unroll
                    for (int n = 0; n < C / 8; n++)
                        if (n * 8 < a.c_v) {
                            const float2 x = *(const float2*)(from + 2 + n * 8 + quad * 2);
                            o[mt][n][2 * half] = x.x, o[mt][n][2 * half + 1] = x.y;
                        }
                }
            }
        const int position_lo = a.position + min(first_row + warp * 16 * MT, rows - 1) / a.gqa;
        const int position_hi = a.position + min(first_row + (warp + 1) * 16 * MT - 1, rows - 1) / a.gqa;
        const float factor = a.scale * LOG2_E;

        __shared__ uint4 listed[LISTED];
        Tiles walk{listed};
        Cells next;
        const uint32_t of_q = operand(q + threadIdx.x / 128 * 64 * 64), of_tiles = operand(tiles);
        int stage = 0;
        bool has;
        auto load = [&] {  // the next tile, if there is one
            Tile tile;
            has = walk.next(a, head, lo, hi, tile);
            next = tile.cells;
            if (has) {
                if constexpr (DIRECT) {
                    load_direct(a, tile, tiles + 2 * stage * TILE, tiles + (2 * stage + 1) * TILE);
                } else {
                    load_raw(a, tile, raw, raw + RAW);
                }
            }
            commit();
        };
        walk.start(a, lo);
        __syncthreads();  // zeros, and the list, before copies
        load();
        while (has) {
            const Cells tile = next;
            const __half* k = tiles + (DIRECT ? 2 * stage * TILE : 0);
            const __half* v = k + TILE;
            const uint32_t of_k = of_tiles + (DIRECT ? stage * (2 * TILE / 8) : 0);
            wait();
            if constexpr (DIRECT) {
                seen_by_groups();
                __syncthreads();
                stage ^= 1;
            } else {
                __syncthreads();
                convert_k(a, raw, tiles), convert_v(a, tile, raw + RAW, tiles + TILE);
                seen_by_groups();
                __syncthreads();
            }
            load();

            float s[MT][PANEL / 8][4] = {};
            if constexpr (GROUPS) {
                multiply_k(of_q, of_k, (float(&)[PANEL / 2])s[0]);
            } else {
#pragma unroll
                for (int ks = 0; ks < C / 16; ks++) {
                    unsigned x[MT][4];
#pragma unroll
                    for (int mt = 0; mt < MT; mt++) load_matrices<false>(x[mt], q + at_q((warp * MT + mt) * 16 + lane % 16, ks * 16 + lane / 16 * 8));
#pragma unroll
                    for (int np = 0; np < PANEL / 16; np++) {
                        unsigned y[4];
                        load_matrices<true>(y, k + chunk<PANEL>(ks * 16 + lane % 16, np * 16 + lane / 16 * 8));
#pragma unroll
                        for (int mt = 0; mt < MT; mt++) mma(s[mt][2 * np], x[mt], y[0], y[1]), mma(s[mt][2 * np + 1], x[mt], y[2], y[3]);
                    }
                }
            }

            if (a.soft_cap > 0.0f) {
                const float inner = 2.0f * LOG2_E * a.scale / a.soft_cap;
#pragma unroll
                for (int mt = 0; mt < MT; mt++)
#pragma unroll
                    for (int i = 0; i < PANEL / 2; i++) {
                        float& x = s[mt][i / 4][i % 4];  // tanh(y) = 1 - 2 / (e^2y + 1)
                        x = (1.0f - __fdividef(2.0f, exp2_fast(x * inner) + 1.0f)) * (a.soft_cap / a.scale);
                    }
            }
            const bool is_whole = tile.from == 0 && tile.to == PANEL && tile.base + PANEL - 1 <= position_lo && (a.window <= 0 || tile.base > position_hi - a.window);
            if (!is_whole) {
#pragma unroll
                for (int mt = 0; mt < MT; mt++)
#pragma unroll
                    for (int i = 0; i < PANEL / 2; i++) {
                        const int cell = i / 4 * 8 + quad * 2 + i % 2, at = tile.base + cell, p = position[mt][i % 4 / 2];
                        const bool sees = tile.from <= cell && cell < tile.to && at <= p && (a.window <= 0 || at > p - a.window);
                        if (!sees) s[mt][i / 4][i % 4] = -INFINITY;
                    }
            }
            bool same = true;
            float factors[MT][2];
#pragma unroll
            for (int mt = 0; mt < MT; mt++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float most = -INFINITY;
#pragma unroll
                    for (int n = 0; n < PANEL / 8; n++) most = fmaxf(most, fmaxf(s[mt][n][2 * half], s[mt][n][2 * half + 1]));
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                    const float before = m[mt][half], now = fmaxf(before, most * factor);
                    const float base = now == -INFINITY ? 0.0f : now;
                    factors[mt][half] = exp2_fast(before - base);
                    same = same && before == now;
                    m[mt][half] = now;
                    float sum = 0.0f;
#pragma unroll
                    for (int n = 0; n < PANEL / 8; n++)
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            float& x = s[mt][n][2 * half + i];
                            x = exp2_fast(fmaf(x, factor, -base));
                            sum = sum + x;
                        }
                    sum = sum + __shfl_xor_sync(~0u, sum, 1);
                    sum = sum + __shfl_xor_sync(~0u, sum, 2);
                    l[mt][half] = fmaf(l[mt][half], factors[mt][half], sum);
                }
            if (!__all_sync(~0u, same)) {  // else factors are 1, or there is nothing yet
#pragma unroll
                for (int mt = 0; mt < MT; mt++)
#pragma unroll
                    for (int n = 0; n < C / 8; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) o[mt][n][i] = o[mt][n][i] * factors[mt][i / 2];
            }
            unsigned p[MT][PANEL / 16][4];
#pragma unroll
            for (int ks = 0; ks < PANEL / 16; ks++)
#pragma unroll
                for (int mt = 0; mt < MT; mt++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float* from = &s[mt][2 * ks + i / 2][i % 2 * 2];
                        const __half2 pair = __floats2half2_rn(from[0], from[1]);
                        p[mt][ks][i] = *(const unsigned*)&pair;
                    }
            if constexpr (GROUPS) {
                multiply_v(p[0], of_k + TILE / 8, o[0]);
            } else {
#pragma unroll
                for (int ks = 0; ks < PANEL / 16; ks++)
#pragma unroll
                    for (int np = 0; np < C / 16; np++) {
                        unsigned y[4];
                        load_matrices<true>(y, v + at_v(ks * 16 + lane % 16, np * 16 + lane / 16 * 8));
#pragma unroll
                        for (int mt = 0; mt < MT; mt++) mma(o[mt][2 * np], p[mt][ks], y[0], y[1]), mma(o[mt][2 * np + 1], p[mt][ks], y[2], y[3]);
                    }
            }
        }

#pragma unroll
        for (int mt = 0; mt < MT; mt++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float sum = l[mt][half];
                const int row = row_of(mt, half);
                if (row >= rows) continue;
                float scale = 1.0f;
                float* to;
                if (a.out != nullptr) {
                    const int h = head * a.gqa + row % a.gqa;
                    if (a.sinks != nullptr) {
                        const float sink = a.sinks[h] * LOG2_E, most = fmaxf(m[mt][half], sink), f = exp2_fast(m[mt][half] - most);
                        scale = f / fmaf(sum, f, exp2_fast(sink - most));
                    } else {
                        scale = 1.0f / sum;
                    }
                    to = a.out + ((size_t)(row / a.gqa) * a.heads_kv * a.gqa + h) * a.c_v;
                } else {
                    to = state(row);
                    if (quad == 0) to[0] = m[mt][half], to[1] = sum;
                    to += 2;
                }
#pragma unroll
                for (int n = 0; n < C / 8; n++)
                    if (n * 8 < a.c_v) *(float2*)(to + n * 8 + quad * 2) = {o[mt][n][2 * half] * scale, o[mt][n][2 * half + 1] * scale};
            }
    }
};

}  // namespace prefill

#define PREFILL_KERNEL(NAME, C, MT, WARPS, DIRECT, GROUPS, BLOCKS)                                                                    \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)                                                                   \
        NAME(const float* q, const cache::Block* blocks, float* states, float* out, const float* sinks, int count, int position,       \
             int tokens, int heads_kv, int gqa, int c_k, int c_v, int type_k, int type_v, float scale, float soft_cap, int window,     \
             int first_span, int slots, int resume) {                                                                                  \
        prefill::Kernel<C, MT, WARPS, DIRECT, GROUPS>::attend({q, blocks, states, out, sinks, count, position, tokens, heads_kv, gqa, c_k, c_v, \
                                                       DIRECT ? cache::F16 : type_k, DIRECT ? cache::F16 : type_v, scale, soft_cap, window, first_span, slots, resume});           \
    }
