// Quantised products of many columns on compute capability 9.0: y[t][n] = W[n][K] . x[t][K] (+ bias[n]), the bits of quant/src/product.rs.
//
// A tile is 128 rows x COLS columns of one of up to three matrices. Thread blocks, one a multiprocessor, take tiles (struct Items); steps of a tile are
// KS values of K. A warp has the copy engine bring a step's weights and arranged activations (acts.cuh) into a ring of STAGES. Two groups of 4
// warps calculate: a warp unpacks tiles of weights from shared memory into registers, A of wgmma; B are the activations. Each group has its half of
// the outputs, in two parts, and while it turns one part's integers into floats, the tensor cores work on the other's.
//
// Blocks of 32     a group: 128 rows x COLS / 2 columns; a part is 64 rows, so that the scales of columns serve both. One wgmma a block and part.
// Blocks of 256    a group: 64 rows x COLS columns. Code x sub-scale fits 16 bits: the parts are its planes of bytes, high and low. One conversion a block.
#pragma once
#include "formats.cuh"
#include "mma.cuh"
#include "product.cuh"
#include "wgmma.cuh"

template <class F, int COLS_> struct Many {
    static constexpr int COLS = COLS_, TILES = 8, THREADS = 384, HALF = COLS / 2, ATOMS = COLS / 8, KS = F::LEN == 256 ? 256 : 128, NB = KS / F::LEN, BLOCK = F::BYTES * 16;
    static constexpr int SLAB = ATOMS * 1024, SLABS = KS / 128, D = SLABS * SLAB, D_BYTES = NB * COLS * 4;
    static constexpr bool OFFSETS = F::LEN == 32 && F::MIN, MINIMA = F::LEN == 256 && F::MIN;
    static constexpr int SUMS = D + D_BYTES, SUMS_BYTES = OFFSETS ? D_BYTES : MINIMA ? ATOMS * 256 : 0, W = SUMS + SUMS_BYTES, W_BYTES = TILES * NB * BLOCK;
    static constexpr int BYTES = (W + W_BYTES + 1023) / 1024 * 1024;
    static constexpr int TOTALS = 256 * HALF * 4, FIT = (232448 - 1024 - 256 - TOTALS) / BYTES, STAGES = FIT > 4 ? 4 : FIT;
    static constexpr int SHARED = STAGES * BYTES + TOTALS + 1024 + 256;
    static constexpr int CHUNK_STEPS = CHUNK / KS;
    static_assert(STAGES >= 2, "a ring");
};

#ifdef HAS_WGMMA

struct ManyActs {
    const uint8_t *image, *scale, *sums;
};
// A tile's place.
struct Where {
    int matrix, row_block, column_block;
};
// Steps first .. end of a tile.
struct Item {
    int tile, first, end;
};
// What a thread block does, in this order: shares of the tiles that are no whole rounds, cut by steps, whose ranges are gone through from the last
// tile back to the first, so that the beginning of a tile is done long before the next thread block goes on with it; then whole rounds of tiles.
struct Items {
    int steps, tiles, rest, lo, hi, low, shared, at;
    __device__ __forceinline__ Items(int tiles, int steps) : steps(steps), tiles(tiles), at(0) {
        const int grid = gridDim.x, over = tiles % grid;
        rest = over == 0 ? 0 : over + grid;
        const long long all = (long long)rest * steps;
        lo = (int)(all * blockIdx.x / grid), hi = (int)(all * (blockIdx.x + 1) / grid);
        low = lo / steps, shared = rest == 0 ? 0 : (hi - 1) / steps - low + 1;
    }
    __device__ __forceinline__ bool next(Item& item) {
        const bool is_share = at < shared;
        item.tile = is_share ? low + shared - 1 - at : rest + (int)blockIdx.x + (at - shared) * (int)gridDim.x;
        item.first = is_share ? max(lo - item.tile * steps, 0) : 0, item.end = is_share ? min(hi - item.tile * steps, steps) : steps;
        at++;
        return item.tile < tiles;
    }
};
__device__ __forceinline__ int row_blocks(int n) { return (n + 127) / 128; }
__device__ __forceinline__ Where where(const Few& few, int tile, int column_blocks) {
    Where at{0, tile / column_blocks, 0};
    at.column_block = tile - at.row_block * column_blocks;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int before = row_blocks(few.N[m]);
        if (at.matrix != m || at.row_block < before) break;
        at.matrix++, at.row_block -= before;
    }
    return at;
}
template <class T> __device__ __forceinline__ T of(const T (&v)[3], int m) { return m == 0 ? v[0] : m == 1 ? v[1] : v[2]; }

// A warp brings the operands of all items.
template <class F, int COLS>
__device__ __forceinline__ void many_copies(uint32_t ring, uint32_t full, uint32_t empty, const Few& few, const ManyActs& act, int K, int columns, int tiles) {
    using G = Many<F, COLS>;
    const int blocks = K / F::LEN, all = (columns + 15) / 16 * 2, column_blocks = (columns + COLS - 1) / COLS;
    Items items(tiles, K / G::KS);
    Item item;
    int stage = 0, parity = 1;
    bool is_around = false;
#pragma unroll 1
    while (items.next(item)) {
        const Where at = where(few, item.tile, column_blocks);
        const int of_matrix = (of(few.N, at.matrix) + 15) / 16, atom0 = at.column_block * G::ATOMS, atoms = min(G::ATOMS, all - atom0);
        const uint8_t *w = of(few.w, at.matrix) + (size_t)item.first * G::NB * G::BLOCK, *from[G::TILES];
#pragma unroll
        for (int t = 0; t < G::TILES; t++) from[t] = w + (size_t)min(at.row_block * G::TILES + t, of_matrix - 1) * blocks * G::BLOCK;
        const int scales = G::NB * atoms * 32, sums = G::OFFSETS ? scales : G::MINIMA ? atoms * 256 : 0;
#pragma unroll 1
        for (int step = item.first; step < item.end; step++) {
            const uint32_t to = ring + stage * G::BYTES, barrier = full + 8 * stage;
            if (is_around) barrier_wait(empty + 8 * stage, parity);
            barrier_expect(barrier, G::W_BYTES + G::SLABS * atoms * 1024 + scales + sums);
#pragma unroll
            for (int s = 0; s < G::SLABS; s++) copy_bulk(to + s * G::SLAB, act.image + ((size_t)(step * G::SLABS + s) * all + atom0) * 1024, atoms * 1024, barrier);
#pragma unroll
            for (int t = 0; t < G::TILES; t++) {
                copy_bulk(to + G::W + t * G::NB * G::BLOCK, from[t], G::NB * G::BLOCK, barrier);
                from[t] += G::NB * G::BLOCK;
            }
#pragma unroll
            for (int b = 0; b < G::NB; b++) {
                const size_t at = ((size_t)(step * G::NB + b) * all + atom0) * 32;
                copy_bulk(to + G::D + b * COLS * 4, act.scale + at, atoms * 32, barrier);
                if constexpr (G::OFFSETS) copy_bulk(to + G::SUMS + b * COLS * 4, act.sums + at, atoms * 32, barrier);
            }
            if constexpr (G::MINIMA) copy_bulk(to + G::SUMS, act.sums + ((size_t)step * all + atom0) * 256, atoms * 256, barrier);
            if (++stage == G::STAGES) stage = 0, parity ^= 1, is_around = true;
        }
    }
}

// Adds a chunk's acc to the sum of chunks, which is each thread's own.
template <int HALF> __device__ __forceinline__ void add_chunk(float4* total, float (&acc)[HALF], bool is_first) {
#pragma unroll
    for (int i = 0; i < HALF / 4; i++) {
        float* x = acc + 4 * i;
        if (is_first) {
            total[i * 256] = make_float4(x[0], x[1], x[2], x[3]);
        } else {
            const float4 v = total[i * 256];
            total[i * 256] = make_float4(__fadd_rn(v.x, x[0]), __fadd_rn(v.y, x[1]), __fadd_rn(v.z, x[2]), __fadd_rn(v.w, x[3]));
        }
        x[0] = x[1] = x[2] = x[3] = 0.0f;
    }
}

// Between the thread blocks that share a tile: acc and total of each thread, and a flag of each warp, which the reader takes down again.
template <int HALF> __device__ __forceinline__ void hand_on(float4* shares, int* flags, const float4* total, float (&acc)[HALF]) {
    float4* to = shares + (size_t)blockIdx.x * (HALF / 2) * 256 + threadIdx.x;
#pragma unroll
    for (int i = 0; i < HALF / 4; i++) {
        float* x = acc + 4 * i;
        to[2 * i * 256] = make_float4(x[0], x[1], x[2], x[3]), to[(2 * i + 1) * 256] = total[i * 256];
        x[0] = x[1] = x[2] = x[3] = 0.0f;
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) flag_set(flags + blockIdx.x * 8 + threadIdx.x / 32);
}
template <int HALF> __device__ __forceinline__ void take_over(const float4* shares, int* flags, float4* total, float (&acc)[HALF]) {
    if (threadIdx.x % 32 == 0) flag_take(flags + (blockIdx.x - 1) * 8 + threadIdx.x / 32);
    __syncwarp();
    const float4* from = shares + (size_t)(blockIdx.x - 1) * (HALF / 2) * 256 + threadIdx.x;
#pragma unroll
    for (int i = 0; i < HALF / 4; i++) {
        const float4 x = __ldcg(from + 2 * i * 256);
        acc[4 * i] = x.x, acc[4 * i + 1] = x.y, acc[4 * i + 2] = x.z, acc[4 * i + 3] = x.w;
        total[i * 256] = __ldcg(from + (2 * i + 1) * 256);
    }
}

// Writes a tile, of which each thread has rows 2 gid, 2 gid + 1 of tiles of 16 and 4 neighbouring columns of 16.
template <class F, int COLS>
__device__ __forceinline__ void put_tile(const Few& few, const Where& at, const float4* total, int columns, int passes) {
    constexpr int HALF = COLS / 2, PARTS = F::LEN == 32 ? 2 : 1, OF_PART = HALF / 4 / PARTS;
    const int warp = threadIdx.x / 32, gid = threadIdx.x % 32 / 4, tig = threadIdx.x % 4, group = warp / 4, N = of(few.N, at.matrix);
    float* y = of(few.y, at.matrix);
    const float* bias = of(few.bias, at.matrix);
    const int column0 = at.column_block * COLS + (F::LEN == 32 ? group * HALF : 0) + 4 * tig;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int row = (at.row_block * 8 + (F::LEN == 32 ? part : group) * 4 + warp % 4) * 16 + 2 * gid;
        const bool live[2] = {row < N, row + 1 < N};
        const float b[2] = {bias != nullptr && live[0] ? bias[row] : 0.0f, bias != nullptr && live[1] ? bias[row + 1] : 0.0f};
#pragma unroll
        for (int j = 0; j < OF_PART; j++) {
            const float4 v = total[(part * OF_PART + j) * 256];
            const float out[2][2] = {{v.x, v.z}, {v.y, v.w}};
            const int column = column0 + 16 * (j / 2) + 2 * (j % 2);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float r[2] = {out[c][0], out[c][1]};
                if (passes == 2) r[0] = __fadd_rn(out[0][0], out[1][0]), r[1] = __fadd_rn(out[0][1], out[1][1]);
                if (bias != nullptr) r[0] = __fadd_rn(r[0], b[0]), r[1] = __fadd_rn(r[1], b[1]);
                if (column + c >= columns || (passes == 2 && c == 1)) continue;
                float* to = y + (size_t)(passes == 2 ? column / 2 : column + c) * N + row;
                if (N % 2 == 0) {
                    if (live[0]) *(float2*)to = make_float2(r[0], r[1]);
                } else {
                    if (live[0]) to[0] = r[0];
                    if (live[1]) to[1] = r[1];
                }
            }
        }
    }
}

// Where a group reads a step's operands: addresses of the first stage; of B the low word of its description.
struct Operands {
    const uint8_t *w, *floats, *sums;
    uint32_t b;
};

// The blocks of 32 of a stream of steps. wgmma of one part is always on its way while the other part's sums become floats; the first part's is so
// across blocks, steps and tiles.
template <class F, int COLS> struct Blocks32 {
    using G = Many<F, COLS>;
    static constexpr int HALF = G::HALF, PART = HALF / 2, SETS = COLS / 32;
    int sum[2][PART];
    uint32_t a[2][4];
    float2 dw[2][2], mw[2][2];
    float4 da[2][SETS];
    int gid, tig;
    Operands from;

    __device__ __forceinline__ Blocks32(const uint8_t* st0, uint32_t ring) {
        const int warp = threadIdx.x / 32, group = warp / 4;
        gid = threadIdx.x % 32 / 4, tig = threadIdx.x % 4;
        from.w = st0 + G::W + warp % 4 * G::NB * G::BLOCK;
        from.floats = st0 + G::D + group * HALF * 4 + tig * 16;
        from.sums = st0 + G::SUMS + group * HALF * 4 + tig * 16;
        from.b = (uint32_t)operand_b(ring + group * (HALF / 8) * 1024);
    }
    // A and factors of block k of a part; u: where the factors go.
    __device__ __forceinline__ void load(int u, int part, int stage, int k) {
        const uint8_t* b = from.w + stage * G::BYTES + (part * 4 * G::NB + k) * G::BLOCK;
        F::codes(b, 0, tig * 64 + gid * 8, gid, tig, a[part]);
        if constexpr (F::BIAS != 0) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[part][i] = (a[part][i] + (128 - F::BIAS) * 0x01010101u) ^ 0x80808080u;
        }
        dw[u][part] = F::d(b, gid), mw[u][part] = F::m(b, gid);
    }
    __device__ __forceinline__ void load_scales(int u, int stage, int k) {
#pragma unroll
        for (int j = 0; j < SETS; j++) da[u][j] = *(const float4*)(from.floats + stage * G::BYTES + k * COLS * 4 + j * 64);
    }
    __device__ __forceinline__ void begin(int part, int stage, int k) {
        wgmma_fence();
        wgmma_s8<false>(sum[part], a[part], operand_b_of(from.b + stage * (G::BYTES / 16) + 2 * k));
        wgmma_commit();
    }
    __device__ __forceinline__ void finish(int u, int part, int stage, int k, float (&acc)[HALF]) {
#pragma unroll
        for (int j = 0; j < SETS; j++) {
            float* x = acc + part * PART + 8 * j;
            const float d[4] = {da[u][j].x, da[u][j].y, da[u][j].z, da[u][j].w};
#pragma unroll
            for (int i = 0; i < 8; i++)
                x[i] = __fmaf_rn((float)sum[part][8 * j + i], __fmul_rn(i & 2 ? dw[u][part].y : dw[u][part].x, d[i / 4 * 2 + i % 2]), x[i]);
            if constexpr (F::MIN) {
                const float4 v = *(const float4*)(from.sums + stage * G::BYTES + k * COLS * 4 + j * 64);
                const float s[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int i = 0; i < 8; i++) x[i] = __fmaf_rn(i & 2 ? mw[u][part].y : mw[u][part].x, s[i / 4 * 2 + i % 2], x[i]);
            }
        }
    }
    // The first step has arrived.
    __device__ __forceinline__ void first() {
        load(0, 0, 0, 0), load(0, 1, 0, 0);
        load_scales(0, 0, 0);
        begin(0, 0, 0);
    }
    // A step in `stage`; the one after it, if there is one, arrives at `next`.
    template <class Wait> __device__ __forceinline__ void step(int stage, int next, Wait&& wait_for_next, float (&acc)[HALF]) {
#pragma unroll
        for (int k = 0; k < G::NB; k++) {
            const int u = k % 2, to = k + 1 == G::NB ? next : stage, k1 = (k + 1) % G::NB;
            if (k + 1 == G::NB) wait_for_next();
            load_scales(1 - u, to, k1);
            wgmma_wait<0>();
            settled(sum[0]);
            begin(1, stage, k);
            load(1 - u, 0, to, k1);
            finish(u, 0, stage, k, acc);
            begin(0, to, k1);
            wgmma_wait<1>();
            settled(sum[1]);
            load(1 - u, 1, to, k1);
            finish(u, 1, stage, k, acc);
        }
    }
    __device__ __forceinline__ void last() {
        wgmma_wait<0>();
        settled(sum[0]);
    }
};

// Codes times sub-scales as signed bytes: 256 high + low.
template <class F> __device__ __forceinline__ void to_planes(const uint32_t (&a)[4], const int2 (&scale)[2], uint32_t (&high)[4], uint32_t (&low)[4]) {
    constexpr bool POSITIVE = !F::SIGNED && F::BIAS == 0;
    constexpr uint32_t FLIP = F::SIGNED ? 0x00800080u : 0;
    constexpr int BIAS = POSITIVE ? 0 : F::SIGNED ? 128 : F::BIAS;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int s = i % 2 ? scale[i / 2].y : scale[i / 2].x;
        // Raised by 2^15, no product borrows from its neighbour; by 2^7 more, low becomes signed, too.
        const uint32_t add = (POSITIVE ? 0x00800080u : 0x80808080u) - (uint32_t)(BIAS * s) * 0x10001u;
        const uint32_t even = ((a[i] & 0x00ff00ffu) ^ FLIP) * (uint32_t)s + add, odd = (((a[i] >> 8) & 0x00ff00ffu) ^ FLIP) * (uint32_t)s + add;
        low[i] = __byte_perm(even, odd, 0x6240) ^ 0x80808080u, high[i] = __byte_perm(even, odd, 0x7351) ^ (POSITIVE ? 0 : 0x80808080u);
    }
}

// The blocks of 256: a step is a block. The next block's codes are ready before this one's sums become floats.
template <class F, int COLS> struct Blocks256 {
    using G = Many<F, COLS>;
    static constexpr int HALF = G::HALF;
    int high[HALF], low[HALF];
    int lane, gid, tig;
    Operands from;

    __device__ __forceinline__ Blocks256(const uint8_t* st0, uint32_t ring) {
        const int warp = threadIdx.x / 32;
        lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4;
        from.w = st0 + G::W + warp * G::BLOCK;
        from.floats = st0 + G::D + tig * 16;
        from.sums = st0 + G::SUMS + lane * 8;
        from.b = (uint32_t)operand_b(ring);
    }
    __device__ __forceinline__ void first() {}
    template <class Wait> __device__ __forceinline__ void step(int stage, int, Wait&&, float (&acc)[HALF]) {
        const uint8_t* b = from.w + stage * G::BYTES;
#pragma unroll
        for (int run = 0; run < 8; run++) {
            uint32_t a[4], h[4], l[4];
            int2 scale[2];
            F::codes(b, run, tig * 64 + gid * 8, gid, tig, a);
            scales256<F>(b, run, gid, scale);
            to_planes<F>(a, scale, h, l);
            const uint64_t operand = operand_b_of(from.b + (stage * G::BYTES + run / 4 * G::SLAB + run % 4 * 32) / 16);
            wgmma_fence();
            if (run == 0) {
                wgmma_s8<false>(high, h, operand);
                wgmma_s8<false>(low, l, operand);
            } else {
                wgmma_s8<true>(high, h, operand);
                wgmma_s8<true>(low, l, operand);
            }
            wgmma_commit();
            if (run > 0) wgmma_wait<1>();
        }
        const float2 dw = F::d(b, gid), mw = F::m(b, gid);
        uint32_t extra[4];
        if constexpr (G::MINIMA) extras<F>(b, gid, tig, extra);
        wgmma_wait<0>();
        settled(high);
        settled(low);
#pragma unroll
        for (int j = 0; j < HALF / 8; j++) {
            const float4 v = *(const float4*)(from.floats + stage * G::BYTES + j * 64);
            const float da[4] = {v.x, v.y, v.z, v.w};
            float* x = acc + 8 * j;
#pragma unroll
            for (int i = 0; i < 8; i++)
                x[i] = __fmaf_rn((float)(high[8 * j + i] * 256 + low[8 * j + i]), __fmul_rn(i & 2 ? dw.y : dw.x, da[i / 4 * 2 + i % 2]), x[i]);
            if constexpr (G::MINIMA) {
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    float m[4];
                    mma_f16(m, extra, *(const uint2*)(from.sums + stage * G::BYTES + (2 * j + u) * 256));
#pragma unroll
                    for (int i = 0; i < 4; i++) x[4 * u + i] = __fmaf_rn(m[i], -__fmul_rn(i & 2 ? mw.y : mw.x, da[2 * u + i % 2]), x[4 * u + i]);
                }
            }
        }
    }
    __device__ __forceinline__ void last() {}
};
template <class F, int COLS, int LEN = F::LEN> struct BlocksOf {
    using Type = Blocks32<F, COLS>;
};
template <class F, int COLS> struct BlocksOf<F, COLS, 256> {
    using Type = Blocks256<F, COLS>;
};

// grid: at most as many thread blocks as tiles, all of which the device holds at once. `shares`: 2 x HALF x 256 floats a thread block; `flags`: 8 a
// thread block, 0 before and after.
template <class F, int COLS>
__device__ __forceinline__ void gemm_many(const Few& few, const ManyActs& act, float4* shares, int* flags, int K, int columns, int passes) {
    using G = Many<F, COLS>;
    extern __shared__ __align__(128) uint8_t smem[];
    const uint32_t ring = (shared_address(smem) + 1023) / 1024 * 1024, full = ring + G::STAGES * G::BYTES + G::TOTALS, empty = full + 8 * G::STAGES;
    uint8_t* st0 = smem + (ring - shared_address(smem));
    if (threadIdx.x == 0) {
        for (int s = 0; s < G::STAGES; s++) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, 8);
        barriers_visible();
    }
    __syncthreads();
    wait_for_previous();
    const int column_blocks = (columns + COLS - 1) / COLS, tiles = (row_blocks(few.N[0]) + row_blocks(few.N[1]) + row_blocks(few.N[2])) * column_blocks, steps = K / G::KS;
    if (threadIdx.x >= 256) {
        registers_fewer<24>();
        if (__shfl_sync(0xffffffffu, threadIdx.x / 32, 0) == 8) many_copies<F, COLS>(ring, full, empty, few, act, K, columns, tiles);
        return;
    }
    registers_more<240>();
    float4* total = (float4*)(st0 + G::STAGES * G::BYTES) + threadIdx.x;
    float acc[G::HALF];
#pragma unroll
    for (int i = 0; i < G::HALF; i++) acc[i] = 0.0f;
    typename BlocksOf<F, COLS>::Type blocks(st0, ring);
    Items items(tiles, steps);
    Item item, next;
    if (!items.next(item)) return;
    int stage = 0, parity = 0;
    barrier_wait(full, 0);
    blocks.first();
#pragma unroll 1
    for (bool more = true; more; item = next) {
        more = items.next(next);
        if (item.first > 0) take_over(shares, flags, total, acc);
#pragma unroll 1
        for (int step = item.first; step < item.end; step++) {
            int stage1 = stage + 1, parity1 = parity;
            if (stage1 == G::STAGES) stage1 = 0, parity1 ^= 1;
            auto wait_for_next = [&]() {
                if (more || step + 1 < item.end) barrier_wait(full + 8 * stage1, parity1);
            };
            blocks.step(stage, stage1, wait_for_next, acc);
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * stage);
            if constexpr (F::LEN == 256) wait_for_next();
            stage = stage1, parity = parity1;
            if (step % G::CHUNK_STEPS == G::CHUNK_STEPS - 1 || step + 1 == steps) add_chunk(total, acc, step < G::CHUNK_STEPS);
        }
        if (item.end < steps) {
            hand_on(shares, flags, total, acc);
        } else {
            put_tile<F, COLS>(few, where(few, item.tile, column_blocks), total, columns, passes);
        }
    }
    blocks.last();
    let_next_start();
}

#define MANY_KERNEL(NAME, F, COLS)                                                                                                                          \
    extern "C" __global__ void __launch_bounds__(384, 1)                                                                                                    \
        NAME(const uint8_t* w0, const uint8_t* w1, const uint8_t* w2, float* y0, float* y1, float* y2, const float* b0, const float* b1, const float* b2,    \
             int n0, int n1, int n2, const uint8_t* image, const uint8_t* scale, const uint8_t* sums, float4* shares, int* flags, int K, int columns, int passes) { \
        gemm_many<F, COLS>(FEW, ManyActs{image, scale, sums}, shares, flags, K, columns, passes);                                                           \
    }
// cut.rs says which are worth it where.
#define MANY_KERNELS_32(F) WIDE_KERNEL(F) MANY_KERNEL(gemm_128, F, 128) MANY_KERNEL(gemm_64, F, 64)
#define MANY_KERNELS_256(F) MANY_KERNEL(gemm_128, F, 128) MANY_KERNEL(gemm_64, F, 64)
#else
#define MANY_KERNELS_32(F) WIDE_KERNEL(F)
#define MANY_KERNELS_256(F) WIDE_KERNEL(F)
#endif
