// Quantised products: y[t][n] = W[n][K] . x[t][K], bit for bit as quant/src/product.rs defines.
//
// Shapes: W [N, K] in tiles of 16 rows (quant/src/tile.rs), the last tile filled up with zero rows; activations of C columns; y [T, N].
// A column is a token, or with two passes one of a token's two rows of codes: columns 2 t and 2 t + 1, whose products are added.
//
// Activations (written by acts.cu), G = C / 8 groups of 8 columns, laid out as operands of mma with gid = lane / 4, tig = lane % 4:
//   q     [G][K/32][32 lanes][2]   words tig and tig + 4 of column gid, of each run of 32 values
//   meta  blocks of 32:    [G][K/32][8 columns] {int sum of the codes, float d}
//   d     blocks of 256:   [G][K/256][8 columns] float
//   s16   blocks of 256:   [G][K/256][32 lanes][4 halves]   sums of the codes 4 tig .. 4 tig + 3 of 16 values each, of column gid
//
// Integers come from the tensor cores, exactly. Codes raised by a BIAS: blocks of 32 start at -BIAS times the sum of the activations.
// In blocks of 256 the minima, or the scales times BIAS, meet the sums of 16 codes in one half-precision mma: both are integers of at most
// 11 bits, and their sums stay below 2^24. Sub-scales multiply integers; one conversion and one fma follow for a block.
//
// gemv  1..16 columns. A warp takes a chunk of 512 values of a tile through its own ring in shared memory, so that many loads are under way;
//       a thread block holds all chunks of its tiles and adds them in order.
// gemm  more columns. See there.
#pragma once
#include "formats.cuh"
#include "mma.cuh"

constexpr int CHUNK = 512;

struct Acts {
    const uint2* q;
    const int2* meta;  // blocks of 32
    const float* d;    // blocks of 256
    const uint2* s16;  // blocks of 256
};

// Operand of the half-precision mma: `extra` of two rows, values 4 tig .. 4 tig + 3 (of 16).
template <class F> __device__ __forceinline__ void extras(const uint8_t* b, int gid, int tig, uint32_t (&a)[4]) {
    uint32_t x, z;  // bytes: row 0, row 1 of the first value, then of the second
    if constexpr (F::SUB == 32) {
        x = F::extra(b, 2 * tig, gid) * 0x10001u, z = F::extra(b, 2 * tig + 1, gid) * 0x10001u;
    } else {
        x = F::extra(b, 4 * tig, gid) | F::extra(b, 4 * tig + 1, gid) << 16;
        z = F::extra(b, 4 * tig + 2, gid) | F::extra(b, 4 * tig + 3, gid) << 16;
    }
    // A byte under 0x64 is the half 1024 + byte.
    const uint32_t w[4] = {__byte_perm(x, 0x64646464u, 0x4240), __byte_perm(x, 0x64646464u, 0x4341), __byte_perm(z, 0x64646464u, 0x4240),
                           __byte_perm(z, 0x64646464u, 0x4341)};
    const __half2 off = __half2half2(__int2half_rn(1024 + F::EXTRA));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __half2 h = __hsub2(*(const __half2*)&w[i], off);
        a[i] = *(const uint32_t*)&h;
    }
}

// One block of 32 of a tile against 8 columns. acc: rows 2 gid, 2 gid + 1 of columns 2 tig, 2 tig + 1 (COLS of them).
template <class F, int COLS>
__device__ __forceinline__ void block32(const uint8_t* b, int at, int gid, int tig, const uint32_t (&a)[4], float2 dw, float2 mw, uint2 q, const int2* meta, float (&acc)[4]) {
    int2 s[2];
    if constexpr (COLS == 2) {
        const int4 v = *(const int4*)meta;
        s[0] = make_int2(v.x, v.y), s[1] = make_int2(v.z, v.w);
    } else {
        s[0] = *meta, s[1] = make_int2(0, 0);
    }
    int d[4];
    mma_k32<F::SIGNED>(d, a, q, F::BIAS ? -F::BIAS * s[0].x : 0, F::BIAS ? -F::BIAS * s[1].x : 0);
#pragma unroll
    for (int c = 0; c < COLS; c++) {
        const float da = __int_as_float(s[c].y);
        acc[c] = __fmaf_rn((float)d[c], __fmul_rn(dw.x, da), acc[c]);
        acc[2 + c] = __fmaf_rn((float)d[2 + c], __fmul_rn(dw.y, da), acc[2 + c]);
        if constexpr (F::MIN) {
            const float sum = __fmul_rn(da, (float)s[c].x);
            acc[c] = __fmaf_rn(mw.x, sum, acc[c]);
            acc[2 + c] = __fmaf_rn(mw.y, sum, acc[2 + c]);
        }
    }
}

// Adds a run of 32 values under its sub-scales to the integers of a block of 256.
template <class F, int COLS>
__device__ __forceinline__ void run256(const uint32_t (&a)[4], const int2 (&scale)[2], uint2 q, int (&sum)[4]) {
    int d[4];
    if constexpr (F::SUB == 32) {
        mma_k32<F::SIGNED>(d, a, q, 0, 0);
#pragma unroll
        for (int c = 0; c < COLS; c++) sum[c] += scale[0].x * d[c], sum[2 + c] += scale[0].y * d[2 + c];
    } else {
        mma_k16<F::SIGNED>(d, a[0], a[1], q.x);
#pragma unroll
        for (int c = 0; c < COLS; c++) sum[c] += scale[0].x * d[c], sum[2 + c] += scale[0].y * d[2 + c];
        mma_k16<F::SIGNED>(d, a[2], a[3], q.y);
#pragma unroll
        for (int c = 0; c < COLS; c++) sum[c] += scale[1].x * d[c], sum[2 + c] += scale[1].y * d[2 + c];
    }
}
template <class F> __device__ __forceinline__ void scales256(const uint8_t* b, int run, int gid, int2 (&scale)[2]) {
    if constexpr (F::SUB == 32) {
        scale[0] = scale[1] = F::scale(b, run, gid);
    } else {
        scale[0] = F::scale(b, 2 * run, gid), scale[1] = F::scale(b, 2 * run + 1, gid);
    }
}

// What follows a block of 256: minima or bias, then floats.
template <class F, int COLS>
__device__ __forceinline__ void end256(const uint32_t (&extra)[4], float2 dw, float2 mw, uint2 s16, const float* d, int (&sum)[4], float (&acc)[4]) {
    float m[4];
    if constexpr (F::MIN || F::BIAS != 0) mma_f16(m, extra, s16);
#pragma unroll
    for (int c = 0; c < COLS; c++) {
        const float da = d[c];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int i = 2 * r + c;
            if constexpr (F::BIAS != 0) sum[i] -= F::BIAS * (int)m[i];
            acc[i] = __fmaf_rn((float)sum[i], __fmul_rn(r ? dw.y : dw.x, da), acc[i]);
            if constexpr (F::MIN) acc[i] = __fmaf_rn(m[i], -__fmul_rn(r ? mw.y : mw.x, da), acc[i]);
        }
    }
}

// ---------------------------------------------------------------------------------------------------- few columns

// What a warp's ring moves at once: 256 values of a tile.
template <class F> struct Piece {
    static constexpr int BLOCK = F::BYTES * 16, BLOCKS = 256 / F::LEN, BYTES = BLOCKS * BLOCK;
    static constexpr int RING = BYTES > 3000 ? 2 : 3;  // pieces on the way: about 9 KB a warp
};

// A warp's next piece: which slot (tile and chunk) and block.
struct Cursor {
    int slot, block, end;
};

template <class F> __device__ __forceinline__ void enter(Cursor& c, int chunks, int blocks) {
    constexpr int PER = CHUNK / F::LEN;
    c.block = c.slot % chunks * PER;
    c.end = min(blocks, c.block + PER);
}

// grid: ceil(tiles / tiles_per_block); block: whole warps; dynamic shared memory: warps * ring * Piece::BYTES + slots * columns * 64 bytes,
// slots = tiles_per_block * ceil(K / 512). GROUPS of 8 columns; COLS == 1 serves a single column.
template <class F, int GROUPS, int COLS>
__device__ __forceinline__ void gemv(const uint8_t* __restrict__ w, const Acts& act, float* y, int N, int K, int columns, int passes, int tiles_per_block) {
    using P = Piece<F>;
    constexpr int RING = P::RING;
    extern __shared__ __align__(128) uint8_t smem[];
    let_next_start();
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4;
    const int blocks = K / F::LEN, runs = K / 32, chunks = (K + CHUNK - 1) / CHUNK, tiles = (N + 15) / 16;
    const int first_tile = blockIdx.x * tiles_per_block, slots = min(tiles_per_block, tiles - first_tile) * chunks;
    uint8_t* ring = smem + warp * (RING * P::BYTES);
    float* part = (float*)(smem + warps * (RING * P::BYTES));
    const uint8_t* w0 = w + (size_t)first_tile * blocks * P::BLOCK;

    Cursor next = {warp, 0, 0};
    if (next.slot < slots) enter<F>(next, chunks, blocks);
    auto fetch = [&](int stage) {
        if (next.slot < slots) {
            const uint8_t* from = w0 + ((size_t)(next.slot / chunks) * blocks + next.block) * P::BLOCK;
            const int bytes = min(P::BLOCKS, next.end - next.block) * P::BLOCK;
            uint8_t* to = ring + stage * P::BYTES;
#pragma unroll
            for (int i = 0; i < (P::BYTES + 511) / 512; i++)
                if (i * 512 + lane * 16 < bytes) copy16(to + i * 512 + lane * 16, from + i * 512 + lane * 16);
            next.block += P::BLOCKS;
            if (next.block >= next.end) {
                next.slot += warps;
                if (next.slot < slots) enter<F>(next, chunks, blocks);
            }
        }
        copy_commit();
    };
    for (int s = 0; s < RING; s++) fetch(s);
    wait_for_previous();

    const int at = tig * 64 + gid * 8;
    bool has_q[GROUPS];
    for (int g = 0; g < GROUPS; g++) has_q[g] = g * 8 + gid < columns;
    int stage = 0;
    for (int slot = warp; slot < slots; slot += warps) {
        Cursor c = {slot, 0, 0};
        enter<F>(c, chunks, blocks);
        float acc[GROUPS][4] = {};
#pragma unroll 1
        for (; c.block < c.end; c.block += P::BLOCKS) {
            copy_wait<RING - 1>();
            __syncwarp();
            const uint8_t* piece = ring + stage * P::BYTES;
            if constexpr (F::LEN == 32) {
                auto one = [&](int u) {
                    const uint8_t* b = piece + u * P::BLOCK;
                    const int block = c.block + u;
                    uint32_t a[4];
                    F::codes(b, 0, at, gid, tig, a);
                    const float2 dw = F::d(b, gid), mw = F::m(b, gid);
#pragma unroll
                    for (int g = 0; g < GROUPS; g++) {
                        const size_t i = (size_t)g * runs + block;
                        const uint2 q = has_q[g] ? act.q[i * 32 + lane] : make_uint2(0, 0);
                        block32<F, COLS>(b, at, gid, tig, a, dw, mw, q, act.meta + i * 8 + 2 * tig * (COLS == 2), acc[g]);
                    }
                };
                if (c.end - c.block >= P::BLOCKS) {
#pragma unroll
                    for (int u = 0; u < P::BLOCKS; u++) one(u);
                } else {
#pragma unroll 1
                    for (int u = 0; u < c.end - c.block; u++) one(u);
                }
            } else {
                int sum[GROUPS][4] = {};
#pragma unroll
                for (int run = 0; run < 8; run++) {
                    uint32_t a[4];
                    int2 scale[2];
                    F::codes(piece, run, at, gid, tig, a);
                    scales256<F>(piece, run, gid, scale);
#pragma unroll
                    for (int g = 0; g < GROUPS; g++) {
                        const size_t i = (size_t)g * runs + c.block * 8 + run;
                        const uint2 q = has_q[g] ? act.q[i * 32 + lane] : make_uint2(0, 0);
                        run256<F, COLS>(a, scale, q, sum[g]);
                    }
                }
                uint32_t extra[4];
                if constexpr (F::MIN || F::BIAS != 0) extras<F>(piece, gid, tig, extra);
                const float2 dw = F::d(piece, gid), mw = F::m(piece, gid);
#pragma unroll
                for (int g = 0; g < GROUPS; g++) {
                    const size_t i = (size_t)g * blocks + c.block;
                    uint2 s16 = make_uint2(0, 0);
                    if constexpr (F::MIN || F::BIAS != 0)
                        if (has_q[g]) s16 = act.s16[i * 32 + lane];
                    end256<F, COLS>(extra, dw, mw, s16, act.d + i * 8 + 2 * tig * (COLS == 2), sum[g], acc[g]);
                }
            }
            __syncwarp();
            fetch(stage);
            stage = stage + 1 == RING ? 0 : stage + 1;
        }
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int c = 0; c < COLS; c++) {
                const int column = g * 8 + (COLS == 2 ? 2 * tig + c : tig);
                if (column < columns) *(float2*)(part + ((size_t)slot * columns + column) * 16 + 2 * gid) = make_float2(acc[g][c], acc[g][2 + c]);
            }
    }
    __syncthreads();
    const int tokens = columns / passes, per_tile = tokens * 16;
    for (int i = threadIdx.x; i < slots / chunks * per_tile; i += blockDim.x) {
        const int tile = i / per_tile, t = i % per_tile / 16, row = (first_tile + tile) * 16 + i % 16;
        if (row >= N) continue;
        float both = 0.0f;
        for (int p = 0; p < passes; p++) {
            const float* from = part + ((size_t)tile * chunks * columns + t * passes + p) * 16 + i % 16;
            float sum = from[0];
            for (int c = 1; c < chunks; c++) sum = __fadd_rn(sum, from[c * columns * 16]);
            both = p == 0 ? sum : __fadd_rn(both, sum);
        }
        y[(size_t)t * N + row] = both;
    }
}

// ---------------------------------------------------------------------------------------------------- many columns

// A thread block computes ROWS x COLUMNS outputs, 8 warps as 2 x 4, a warp 16 FM x 8 FN. The operands of KS values of K go through a ring of
// STAGES in shared memory. A chunk's acc is in registers, the sum of chunks in shared memory, each thread's own.
template <class F> struct Gemm {
#if __CUDA_ARCH__ >= 900
    static constexpr int FM = 5, FN = 4;
#else
    static constexpr int FM = 2, FN = 2;
#endif
    static constexpr int THREADS = 256, TILES = 2 * FM, ROWS = 16 * TILES, GROUPS = 4 * FN, COLUMNS = 8 * GROUPS;
    static constexpr int KS = F::LEN == 256 ? 256 : 64, NB = KS / F::LEN, RUNS = KS / 32, BLOCK = F::BYTES * 16;
    static constexpr int A = TILES * NB * BLOCK, B = GROUPS * RUNS * 256, D = F::LEN == 256 ? GROUPS * 32 : GROUPS * NB * 64;
    static constexpr bool SUMS = F::LEN == 256 && (F::MIN || F::BIAS != 0);
    static constexpr int S = SUMS ? GROUPS * 256 : 0, BYTES = A + B + D + S;
    static constexpr int STAGES = F::LEN == 256 ? 2 : 4, TOTALS = THREADS * FM * FN * 16, PIECES = A / 16;
};

template <class F> __device__ __forceinline__ void gemm_fetch(uint8_t* st, const uint32_t* table, const uint8_t* w, const Acts& act, int group0, int groups, int K, int step) {
    using G = Gemm<F>;
#pragma unroll
    for (int u = 0; u < (G::PIECES + G::THREADS - 1) / G::THREADS; u++) {
        const int i = u * G::THREADS + threadIdx.x;
        if (G::PIECES % G::THREADS == 0 || i < G::PIECES) {
            const uint32_t e = table[i];
            copy16(st + i * 16 + ((int)e >> 30) * 32, w + (size_t)(e & 0x3fffffffu) * 16);
        }
    }
    const int runs = K / 32;
    constexpr int PER = G::RUNS * 16;  // pieces of a group
#pragma unroll
    for (int u = 0; u < G::GROUPS * PER / G::THREADS; u++) {
        const int i = u * G::THREADS + threadIdx.x, g = i / PER;
        copy16(st + G::A + i * 16, (const uint8_t*)act.q + ((size_t)min(group0 + g, groups - 1) * runs + step * G::RUNS) * 256 + i % PER * 16);
    }
    if constexpr (F::LEN == 32) {
        constexpr int PD = G::NB * 4;
        const int i = threadIdx.x, g = i / PD;
        if (i < G::GROUPS * PD) copy16(st + G::A + G::B + i * 16, (const uint8_t*)act.meta + ((size_t)min(group0 + g, groups - 1) * runs + step * G::NB) * 64 + i % PD * 16);
    } else {
        const int i = threadIdx.x;
        if (i < G::GROUPS * 2) copy16(st + G::A + G::B + i * 16, (const uint8_t*)act.d + ((size_t)min(group0 + i / 2, groups - 1) * (K / 256) + step) * 32 + i % 2 * 16);
        if constexpr (G::SUMS)
#pragma unroll
            for (int u = 0; u < (G::GROUPS * 16 + G::THREADS - 1) / G::THREADS; u++) {
                const int i = u * G::THREADS + threadIdx.x;
                if (i < G::GROUPS * 16)
                    copy16(st + G::A + G::B + G::D + i * 16, (const uint8_t*)act.s16 + ((size_t)min(group0 + i / 16, groups - 1) * (K / 256) + step) * 256 + i % 16 * 16);
            }
    }
}

// grid: (row blocks, column blocks). Reads up to a step past the end of W and of the activations, which have room for it.
template <class F>
__device__ __forceinline__ void gemm(const uint8_t* __restrict__ w, const Acts& act, float* __restrict__ y, int N, int K, int columns, int passes) {
    using G = Gemm<F>;
    constexpr int FM = G::FM, FN = G::FN, BLOCK = G::BLOCK;
    extern __shared__ __align__(128) uint8_t smem[];
    float4* total = (float4*)(smem + G::STAGES * G::BYTES) + threadIdx.x;  // [fragment][THREADS]
    uint32_t* table = (uint32_t*)(smem + G::STAGES * G::BYTES + G::TOTALS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4, wm = warp / 4, wn = warp % 4;
    const int tile0 = blockIdx.x * G::TILES, group0 = blockIdx.y * G::GROUPS, tiles = (N + 15) / 16, groups = (columns + 7) / 8;
    const int blocks = K / F::LEN, steps = (blocks + G::NB - 1) / G::NB;
    float acc[FM][FN][4];
#pragma unroll
    for (int m = 0; m < FM; m++)
#pragma unroll
        for (int n = 0; n < FN; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[m][n][i] = 0.0f;

    // Where each 16 bytes of a step's weights come from, and by how many times 32 bytes they move so that the 8-byte reads of 16 lanes meet
    // 32 different banks. Computed once: the divisions would cost more than the copies.
    for (int i = threadIdx.x; i < G::PIECES; i += G::THREADS) {
        constexpr int PB = BLOCK / 16, PT = G::NB * PB;
        const int tile = i / PT, c = i % PB - F::PLANES / 16;
        int move = 0;
        if (F::SWIZZLE && c >= 0 && (c >> 3 & 1)) move = c & 2 ? -1 : 1;
        table[i] = (uint32_t)((min(tile0 + tile, tiles - 1) - tile0) * (blocks * PB) + i % PT) & 0x3fffffffu | (uint32_t)move << 30;
    }
    __syncthreads();
    wait_for_previous();
    const uint8_t* w0 = w + (size_t)tile0 * blocks * BLOCK;
    for (int s = 0; s < G::STAGES - 1; s++) {
        if (s < steps) gemm_fetch<F>(smem + s * G::BYTES, table, w0 + (size_t)s * G::NB * BLOCK, act, group0, groups, K, s);
        copy_commit();
    }
    const int at = F::SWIZZLE ? ((tig * 4 + gid / 2) ^ (tig / 2 * 2)) * 16 + gid % 2 * 8 : tig * 64 + gid * 8;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        copy_wait<G::STAGES - 2>();
        __syncthreads();
        const int next = step + G::STAGES - 1;
        if (next < steps) gemm_fetch<F>(smem + next % G::STAGES * G::BYTES, table, w0 + (size_t)next * G::NB * BLOCK, act, group0, groups, K, next);
        copy_commit();
        const uint8_t* st = smem + step % G::STAGES * G::BYTES;
        const uint8_t* stb = st + G::A + (wn * FN) * G::RUNS * 256 + lane * 8;
        if constexpr (F::LEN == 32) {
#pragma unroll
            for (int k = 0; k < G::NB; k++) {
                if (k > 0 && step * G::NB + k >= blocks) break;
                uint2 q[FN];
                int4 s[FN];
#pragma unroll
                for (int n = 0; n < FN; n++) {
                    q[n] = *(const uint2*)(stb + (n * G::RUNS + k) * 256);
                    s[n] = *(const int4*)(st + G::A + G::B + ((wn * FN + n) * G::NB + k) * 64 + tig * 16);
                }
#pragma unroll
                for (int m = 0; m < FM; m++) {
                    const uint8_t* b = st + ((wm * FM + m) * G::NB + k) * BLOCK;
                    uint32_t a[4];
                    F::codes(b, 0, at, gid, tig, a);
                    const float2 dw = F::d(b, gid), mw = F::m(b, gid);
#pragma unroll
                    for (int n = 0; n < FN; n++) {
                        int d[4];
                        mma_k32<F::SIGNED>(d, a, q[n], F::BIAS ? -F::BIAS * s[n].x : 0, F::BIAS ? -F::BIAS * s[n].z : 0);
                        const float da[2] = {__int_as_float(s[n].y), __int_as_float(s[n].w)};
#pragma unroll
                        for (int i = 0; i < 4; i++) acc[m][n][i] = __fmaf_rn((float)d[i], __fmul_rn(i < 2 ? dw.x : dw.y, da[i % 2]), acc[m][n][i]);
                        if constexpr (F::MIN) {
                            const float sum[2] = {__fmul_rn(da[0], (float)s[n].x), __fmul_rn(da[1], (float)s[n].z)};
#pragma unroll
                            for (int i = 0; i < 4; i++) acc[m][n][i] = __fmaf_rn(i < 2 ? mw.x : mw.y, sum[i % 2], acc[m][n][i]);
                        }
                    }
                }
            }
        } else {
            int sum[FM][FN][4];
#pragma unroll
            for (int m = 0; m < FM; m++)
#pragma unroll
                for (int n = 0; n < FN; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) sum[m][n][i] = 0;
#pragma unroll 1
            for (int run = 0; run < 8; run++) {  // not unrolled: the compiler would load all of a step ahead and spill
                    uint2 q[FN];
#pragma unroll
                    for (int n = 0; n < FN; n++) q[n] = *(const uint2*)(stb + (n * 8 + run) * 256);
#pragma unroll
                    for (int m = 0; m < FM; m++) {
                        const uint8_t* b = st + (wm * FM + m) * BLOCK;
                        uint32_t a[4];
                        int2 scale[2];
                        F::codes(b, run, at, gid, tig, a);
                        scales256<F>(b, run, gid, scale);
#pragma unroll
                        for (int n = 0; n < FN; n++) run256<F, 2>(a, scale, q[n], sum[m][n]);
                    }
                }
#pragma unroll
            for (int m = 0; m < FM; m++) {
                const uint8_t* b = st + (wm * FM + m) * BLOCK;
                uint32_t extra[4];
                if constexpr (G::SUMS) extras<F>(b, gid, tig, extra);
                const float2 dw = F::d(b, gid), mw = F::m(b, gid);
#pragma unroll
                for (int n = 0; n < FN; n++) {
                    uint2 s16 = make_uint2(0, 0);
                    if constexpr (G::SUMS) s16 = *(const uint2*)(st + G::A + G::B + G::D + (wn * FN + n) * 256 + lane * 8);
                    end256<F, 2>(extra, dw, mw, s16, (const float*)(st + G::A + G::B) + (wn * FN + n) * 8 + 2 * tig, sum[m][n], acc[m][n]);
                }
            }
        }
        constexpr int CHUNK_STEPS = CHUNK / G::KS;
        if ((step + 1) % CHUNK_STEPS == 0 || step + 1 == steps) {
            const bool first = step < CHUNK_STEPS;
#pragma unroll
            for (int m = 0; m < FM; m++)
#pragma unroll
                for (int n = 0; n < FN; n++) {
                    float4* t = total + (m * FN + n) * G::THREADS;
                    float(&x)[4] = acc[m][n];
                    if (first) {
                        *t = make_float4(x[0], x[1], x[2], x[3]);
                    } else {
                        const float4 v = *t;
                        *t = make_float4(__fadd_rn(v.x, x[0]), __fadd_rn(v.y, x[1]), __fadd_rn(v.z, x[2]), __fadd_rn(v.w, x[3]));
                    }
#pragma unroll
                    for (int i = 0; i < 4; i++) x[i] = 0.0f;
                }
        }
    }
    let_next_start();
#pragma unroll
    for (int m = 0; m < FM; m++)
#pragma unroll
        for (int n = 0; n < FN; n++) {
            const float4 v = total[(m * FN + n) * G::THREADS];
            const float out[4] = {v.x, v.y, v.z, v.w};
            const int row = (tile0 + wm * FM + m) * 16 + 2 * gid, column = (group0 + wn * FN + n) * 8 + 2 * tig;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                if (row + r >= N) continue;
                if (passes == 2) {
                    if (column < columns) y[(size_t)(column / 2) * N + row + r] = __fadd_rn(out[2 * r], out[2 * r + 1]);
                } else {
                    if (column < columns) y[(size_t)column * N + row + r] = out[2 * r];
                    if (column + 1 < columns) y[(size_t)(column + 1) * N + row + r] = out[2 * r + 1];
                }
            }
        }
}

// ---------------------------------------------------------------------------------------------------- rows of an embedding

// y[t] = row ids[t] of W, decoded. A thread takes 8 values of a run of 32: groups tig and tig + 4. grid: (ceil(K / 8 / blockDim), T).
// An id outside 0..N gives a row of NaN.
template <class F> __device__ __forceinline__ void decode_rows(const uint8_t* __restrict__ w, const int* ids, float* y, int N, int K) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, tig = i % 4, run = i / 4, t = blockIdx.y;
    wait_for_previous();
    if (run * 32 >= K) return;
    float* out = y + (size_t)t * K + run * 32 + tig * 4;
    const int id = ids[t];
    if (id < 0 || id >= N) {
        for (int j = 0; j < 4; j++) out[j] = out[16 + j] = __int_as_float(0x7fc00000);
        return;
    }
    const int r = id % 2, gid = id % 16 / 2, per = F::LEN / 32;
    const uint8_t* b = w + ((size_t)(id / 16) * (K / F::LEN) + run / per) * (F::BYTES * 16);
    uint32_t a[4];
    F::codes(b, run % per, tig * 64 + gid * 8, gid, tig, a);
    const float2 d2 = F::d(b, gid), m2 = F::m(b, gid);
    const float d = r ? d2.y : d2.x, m = r ? m2.y : m2.x;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t word = a[2 * h + r];
        float scale = d, less = 0.0f;
        if constexpr (F::LEN == 256) {
            const int j = run % 8 * (32 / F::SUB) + (F::SUB == 16 ? h : 0);
            const int2 s = F::scale(b, j, gid);
            scale = __fmul_rn(d, (float)(r ? s.y : s.x));
            if constexpr (F::MIN) less = __fmul_rn(m, (float)(F::extra(b, j, gid) >> (8 * r) & 255));
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t byte = word >> (8 * j) & 255;
            const int q = F::SIGNED ? (int)(int8_t)byte : (int)byte - F::BIAS;
            float v = __fmul_rn(scale, (float)q);
            if constexpr (F::LEN == 256) v = __fsub_rn(v, less);
            if constexpr (F::LEN == 32 && F::MIN) v = __fadd_rn(v, m);
            out[16 * h + j] = v;
        }
    }
}

// ---------------------------------------------------------------------------------------------------- the kernels of a format

#define PRODUCT_PARAMETERS \
    const uint8_t *w, const uint2 *q, const int2 *meta, const float *d, const uint2 *s16, float *y, int N, int K, int columns, int passes

#define PRODUCT_KERNELS(F)                                                                                                \
    extern "C" __global__ void gemv_1(PRODUCT_PARAMETERS, int tiles_per_block) {                                          \
        gemv<F, 1, 1>(w, Acts{q, meta, d, s16}, y, N, K, columns, passes, tiles_per_block);                               \
    }                                                                                                                     \
    extern "C" __global__ void gemv_8(PRODUCT_PARAMETERS, int tiles_per_block) {                                          \
        gemv<F, 1, 2>(w, Acts{q, meta, d, s16}, y, N, K, columns, passes, tiles_per_block);                               \
    }                                                                                                                     \
    extern "C" __global__ void gemv_16(PRODUCT_PARAMETERS, int tiles_per_block) {                                         \
        gemv<F, 2, 2>(w, Acts{q, meta, d, s16}, y, N, K, columns, passes, tiles_per_block);                               \
    }                                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 1) gemm_many(PRODUCT_PARAMETERS) {                                  \
        gemm<F>(w, Acts{q, meta, d, s16}, y, N, K, columns, passes);                                                      \
    }                                                                                                                     \
    extern "C" __global__ void decode(const uint8_t* w, const int* ids, float* y, int N, int K) { decode_rows<F>(w, ids, y, N, K); }
