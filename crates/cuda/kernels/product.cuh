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
// one   1 or 2 columns: product_one.cuh.
// gemv  3..16 columns. A warp takes a chunk of 512 values of a tile through its own ring in shared memory, so that many loads are under way;
//       a thread block holds all chunks of its tiles and adds them in order.
// gemm  more columns. See there.
#pragma once
#include "begin.cuh"
#include "formats.cuh"
#include "mma.cuh"

constexpr int CHUNK = 512;

struct Acts {
    const uint2* q;
    const int2* meta;  // blocks of 32
    const float* d;    // blocks of 256
    const uint2* s16;  // blocks of 256
};

// Operand of the half-precision mma from `extra` of two rows: bytes of row 0, row 1 of the first value, then of the second.
template <class F> __device__ __forceinline__ void extra_halves(uint32_t x, uint32_t z, uint32_t (&a)[4]) {
    // A byte under 0x64 is the half 1024 + byte.
    const uint32_t w[4] = {__byte_perm(x, 0x64646464u, 0x4240), __byte_perm(x, 0x64646464u, 0x4341), __byte_perm(z, 0x64646464u, 0x4240),
                           __byte_perm(z, 0x64646464u, 0x4341)};
    const __half2 off = __half2half2(__ushort_as_half(0x6400 + F::EXTRA));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __half2 h = __hsub2(*(const __half2*)&w[i], off);
        a[i] = *(const uint32_t*)&h;
    }
}

// The same of values 4 tig .. 4 tig + 3 (of 16).
template <class F> __device__ __forceinline__ void extras(const uint8_t* b, int gid, int tig, uint32_t (&a)[4]) {
    if constexpr (F::SUB == 32) {
        extra_halves<F>(F::extra(b, 2 * tig, gid) * 0x10001u, F::extra(b, 2 * tig + 1, gid) * 0x10001u, a);
    } else {
        extra_halves<F>(F::extra(b, 4 * tig, gid) | F::extra(b, 4 * tig + 1, gid) << 16, F::extra(b, 4 * tig + 2, gid) | F::extra(b, 4 * tig + 3, gid) << 16, a);
    }
}

// One block of 32 of a tile against 8 columns. acc: rows 2 gid, 2 gid + 1 of columns 2 tig, 2 tig + 1 (COLS of them).
template <class F, int COLS>
__device__ __forceinline__ void block32(const uint32_t (&a)[4], float2 dw, float2 mw, uint2 q, const int2* meta, float (&acc)[4]) {
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

// What a warp's ring moves at once: some blocks of a tile, 2 to 3 KB where there are as many. Two are on the way; more hold more shared memory and
// so fewer thread blocks (measured).
template <class F> struct Piece {
    static constexpr int BLOCK = F::BYTES * 16, BLOCKS = F::LEN == 256 ? 1 : F::BYTES > 32 ? 4 : 8, BYTES = BLOCKS * BLOCK, PER = CHUNK / F::LEN;
    static constexpr int RING = 2;
};

// Up to three matrices of one K that meet the same activations, the later ones with N = 0 if they are fewer. y[m] [T, N[m]]; bias [N[m]] or null.
struct Few {
    const uint8_t* w[3];
    float* y[3];
    const float* bias[3];
    int N[3];
};

// grid: tiles of all matrices; block: whole warps. Dynamic shared memory: for each warp its ring; then chunks * columns * 64 bytes. GROUPS of 8
// columns. Activations are read where they lie, from the first-level cache.
template <class F, int GROUPS>
__device__ __forceinline__ void gemv(const Few& few, const Acts& act, int K, int columns, int passes) {
    using P = Piece<F>;
    constexpr int RING = P::RING;
    extern __shared__ __align__(128) uint8_t smem[];
    let_next_start();
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4;
    const int blocks = K / F::LEN, chunks = (K + CHUNK - 1) / CHUNK;
    int tile = blockIdx.x, N = few.N[0];
    const uint8_t* w = few.w[0];
    float* y = few.y[0];
    const float* bias = few.bias[0];
#pragma unroll
    for (int m = 1; m < 3; m++) {
        const int before = (N + 15) / 16;
        if (tile < before) break;
        tile -= before, N = few.N[m], w = few.w[m], y = few.y[m], bias = few.bias[m];
    }
    uint8_t* ring = smem + warp * RING * P::BYTES;
    float* part = (float*)(smem + warps * RING * P::BYTES);
    const uint8_t* w0 = w + (size_t)tile * blocks * P::BLOCK;

    // The next piece to be fetched.
    int next_chunk = warp, next_block = warp * P::PER;
    auto fetch = [&](int stage) {
        if (next_chunk < chunks) {
            const int end = min(blocks, (next_chunk + 1) * P::PER);
            const uint8_t* from = w0 + (size_t)next_block * P::BLOCK + lane * 16;
            uint8_t* to = ring + stage * P::BYTES + lane * 16;
            const int bytes = min(P::BLOCKS, end - next_block) * P::BLOCK - lane * 16;
#pragma unroll
            for (int i = 0; i < (P::BYTES + 511) / 512; i++)
                if (i * 512 < bytes) copy16(to + i * 512, from + i * 512);
            next_block += P::BLOCKS;
            if (next_block >= end) {
                next_chunk += warps;
                next_block = next_chunk * P::PER;
            }
        }
        copy_commit();
    };
    for (int s = 0; s < RING; s++) fetch(s);
    wait_for_previous();

    const int at = tig * 64 + gid * 8;
    int stage = 0;
    for (int chunk = warp; chunk < chunks; chunk += warps) {
        const int first = chunk * P::PER, end = min(blocks, first + P::PER);
        // This lane's activations of the chunk: codes and sums of column gid, scales of columns 2 tig and 2 tig + 1.
        const uint8_t *aq[GROUPS], *am[GROUPS], *as[GROUPS];
        constexpr int Q_STRIDE = 256, M_STRIDE = F::LEN == 32 ? 64 : 32;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const int c = min(8, columns - 8 * g), column = min(gid, c - 1), both = 2 * tig < c ? tig : 0;
            aq[g] = (const uint8_t*)(act.q + ((size_t)g * (K / 32) + chunk * 16) * 32) + column * 32 + tig * 8;
            am[g] = F::LEN == 32 ? (const uint8_t*)(act.meta + ((size_t)g * blocks + first) * 8) + both * 16 : (const uint8_t*)(act.d + ((size_t)g * blocks + first) * 8) + both * 8;
            as[g] = F::LEN == 32 ? nullptr : (const uint8_t*)(act.s16 + ((size_t)g * blocks + first) * 32) + column * 32 + tig * 8;
        }
        float acc[GROUPS][4] = {};
#pragma unroll 1
        for (int block = first; block < end; block += P::BLOCKS) {
            copy_wait<RING - 1>();
            __syncwarp();
            const uint8_t* piece = ring + stage * P::BYTES;
            if constexpr (F::LEN == 32) {
                auto one = [&](int u) {
                    const uint8_t* b = piece + u * P::BLOCK;
                    const int run = block - first + u;
                    uint32_t a[4];
                    F::codes(b, 0, at, gid, tig, a);
                    const float2 dw = F::d(b, gid), mw = F::m(b, gid);
#pragma unroll
                    for (int g = 0; g < GROUPS; g++) {
                        const uint2 q = *(const uint2*)(aq[g] + run * Q_STRIDE);
                        block32<F, 2>(a, dw, mw, q, (const int2*)(am[g] + run * M_STRIDE), acc[g]);
                    }
                };
                if (end - block >= P::BLOCKS) {
#pragma unroll
                    for (int u = 0; u < P::BLOCKS; u++) one(u);
                } else {
#pragma unroll 1
                    for (int u = 0; u < end - block; u++) one(u);
                }
            } else {
                const int b = block - first;
                int sum[GROUPS][4] = {};
#pragma unroll
                for (int run = 0; run < 8; run++) {
                    uint32_t a[4];
                    int2 scale[2];
                    F::codes(piece, run, at, gid, tig, a);
                    scales256<F>(piece, run, gid, scale);
#pragma unroll
                    for (int g = 0; g < GROUPS; g++) run256<F, 2>(a, scale, *(const uint2*)(aq[g] + (b * 8 + run) * Q_STRIDE), sum[g]);
                }
                uint32_t extra[4];
                if constexpr (F::MIN || F::BIAS != 0) extras<F>(piece, gid, tig, extra);
                const float2 dw = F::d(piece, gid), mw = F::m(piece, gid);
#pragma unroll
                for (int g = 0; g < GROUPS; g++) {
                    uint2 s16 = make_uint2(0, 0);
                    if constexpr (F::MIN || F::BIAS != 0) s16 = *(const uint2*)(as[g] + b * Q_STRIDE);
                    end256<F, 2>(extra, dw, mw, s16, (const float*)(am[g] + b * M_STRIDE), sum[g], acc[g]);
                }
            }
            __syncwarp();
            fetch(stage);
            stage = stage + 1 == RING ? 0 : stage + 1;
        }
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int column = g * 8 + 2 * tig + c;
                if (column < columns) *(float2*)(part + ((size_t)chunk * columns + column) * 16 + 2 * gid) = make_float2(acc[g][c], acc[g][2 + c]);
            }
    }
    __syncthreads();
    const int tokens = columns / passes;
    for (int i = threadIdx.x; i < tokens * 16; i += blockDim.x) {
        const int t = i / 16, row = tile * 16 + i % 16;
        if (row >= N) continue;
        float both = 0.0f;
        for (int p = 0; p < passes; p++) {
            const float* from = part + (t * passes + p) * 16 + i % 16;
            float sum = from[0];
#pragma unroll 8
            for (int c = 1; c < chunks; c++) sum = __fadd_rn(sum, from[c * columns * 16]);
            both = p == 0 ? sum : __fadd_rn(both, sum);
        }
        y[(size_t)t * N + row] = bias != nullptr ? __fadd_rn(both, bias[row]) : both;
    }
}

#include "product_one.cuh"

// ---------------------------------------------------------------------------------------------------- many columns

// WM x WN warps, a warp 16 FM x 8 FN outputs. Wide thread blocks read least, and fill the device from a few hundred columns on; narrow ones
// are for fewer. A run's codes are unpacked by WN warps.
template <int M, int N, int WARP_M, int WARP_N> struct Shape {
    static constexpr int WM = M, WN = N, FM = WARP_M, FN = WARP_N;
};
#if __CUDA_ARCH__ >= 900
using Wide = Shape<2, 4, 5, 4>;
#else
using Wide = Shape<2, 4, 2, 2>;
#endif
using Narrow = Shape<4, 1, 1, 4>;

// The operands of KS values of K go through a ring of STAGES in shared memory. A chunk's acc is in registers, the sum of chunks in shared memory,
// each thread's own.
template <class F, class S> struct Gemm {
    static constexpr int THREADS = 32 * S::WM * S::WN, TILES = S::WM * S::FM, GROUPS = S::WN * S::FN;
    static constexpr int KS = F::LEN == 256 ? 256 : 64, NB = KS / F::LEN, RUNS = KS / 32, BLOCK = F::BYTES * 16;
    static constexpr bool SUMS = F::LEN == 256 && (F::MIN || F::BIAS != 0);
    static constexpr int A = TILES * NB * BLOCK, Q = GROUPS * RUNS * 256, D = F::LEN == 256 ? GROUPS * 32 : GROUPS * NB * 64, S16 = SUMS ? GROUPS * 256 : 0;
    static constexpr int BYTES = A + Q + D + S16, STAGES = F::LEN == 256 ? 2 : 4, TOTALS = THREADS * S::FM * S::FN * 16, PIECES = A / 16;
};

// Pieces of 16 bytes of what lies in rows of ROW bytes, one for each group of 8 columns: `from` is group 0's, `stride` bytes before group 1's.
template <int THREADS, int GROUPS, int ROW> __device__ __forceinline__ void copy_groups(uint8_t* to, const void* from, size_t stride, int group0, int groups) {
    constexpr int PER = ROW / 16, ALL = GROUPS * PER;
#pragma unroll
    for (int u = 0; u < (ALL + THREADS - 1) / THREADS; u++) {
        const int i = u * THREADS + threadIdx.x;
        if (ALL % THREADS == 0 || i < ALL) copy16(to + i * 16, (const uint8_t*)from + min(group0 + i / PER, groups - 1) * stride + i % PER * 16);
    }
}

template <class F, class S>
__device__ __forceinline__ void gemm_fetch(uint8_t* st, const uint32_t* table, const uint8_t* w, const Acts& act, int group0, int groups, int K, int step) {
    using G = Gemm<F, S>;
#pragma unroll
    for (int u = 0; u < (G::PIECES + G::THREADS - 1) / G::THREADS; u++) {
        const int i = u * G::THREADS + threadIdx.x;
        if (G::PIECES % G::THREADS == 0 || i < G::PIECES) {
            const uint32_t e = table[i];
            copy16(st + i * 16 + ((int)e >> 30) * 32, w + (size_t)(e & 0x3fffffffu) * 16);
        }
    }
    const size_t runs = K / 32, blocks = K / 256;
    copy_groups<G::THREADS, G::GROUPS, G::RUNS * 256>(st + G::A, act.q + (size_t)step * G::RUNS * 32, runs * 256, group0, groups);
    if constexpr (F::LEN == 32) {
        copy_groups<G::THREADS, G::GROUPS, G::NB * 64>(st + G::A + G::Q, act.meta + (size_t)step * G::NB * 8, runs * 64, group0, groups);
    } else {
        copy_groups<G::THREADS, G::GROUPS, 32>(st + G::A + G::Q, act.d + (size_t)step * 8, blocks * 32, group0, groups);
        if constexpr (G::SUMS) copy_groups<G::THREADS, G::GROUPS, 256>(st + G::A + G::Q + G::D, act.s16 + (size_t)step * 32, blocks * 256, group0, groups);
    }
}

// grid: (row blocks, column blocks). Reads up to a step past the end of W and of the activations, which have room for it.
template <class F, class S>
__device__ __forceinline__ void gemm(const uint8_t* __restrict__ w, const Acts& act, float* __restrict__ y, const float* bias, int N, int K, int columns, int passes) {
    using G = Gemm<F, S>;
    constexpr int FM = S::FM, FN = S::FN, BLOCK = G::BLOCK;
    extern __shared__ __align__(128) uint8_t smem[];
    float4* total = (float4*)(smem + G::STAGES * G::BYTES) + threadIdx.x;  // [fragment][THREADS]
    uint32_t* table = (uint32_t*)(smem + G::STAGES * G::BYTES + G::TOTALS);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4, wm = warp / S::WN, wn = warp % S::WN;
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
        if (s < steps) gemm_fetch<F, S>(smem + s * G::BYTES, table, w0 + (size_t)s * G::NB * BLOCK, act, group0, groups, K, s);
        copy_commit();
    }
    const int at = F::SWIZZLE ? ((tig * 4 + gid / 2) ^ (tig / 2 * 2)) * 16 + gid % 2 * 8 : tig * 64 + gid * 8;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        copy_wait<G::STAGES - 2>();
        __syncthreads();
        const int next = step + G::STAGES - 1;
        if (next < steps) gemm_fetch<F, S>(smem + next % G::STAGES * G::BYTES, table, w0 + (size_t)next * G::NB * BLOCK, act, group0, groups, K, next);
        copy_commit();
        const uint8_t* st = smem + step % G::STAGES * G::BYTES;
        const uint8_t* stb = st + G::A + (wn * FN) * G::RUNS * 256 + lane * 8;
        if constexpr (F::LEN == 32) {
#pragma unroll
            for (int k = 0; k < G::NB; k++) {
                if (k > 0 && step * G::NB + k >= blocks) break;
                uint2 q[FN];
                int4 meta[FN];
#pragma unroll
                for (int n = 0; n < FN; n++) {
                    q[n] = *(const uint2*)(stb + (n * G::RUNS + k) * 256);
                    meta[n] = *(const int4*)(st + G::A + G::Q + ((wn * FN + n) * G::NB + k) * 64 + tig * 16);
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
                        mma_k32<F::SIGNED>(d, a, q[n], F::BIAS ? -F::BIAS * meta[n].x : 0, F::BIAS ? -F::BIAS * meta[n].z : 0);
                        const float da[2] = {__int_as_float(meta[n].y), __int_as_float(meta[n].w)};
#pragma unroll
                        for (int i = 0; i < 4; i++) acc[m][n][i] = __fmaf_rn((float)d[i], __fmul_rn(i < 2 ? dw.x : dw.y, da[i % 2]), acc[m][n][i]);
                        if constexpr (F::MIN) {
                            const float sum[2] = {__fmul_rn(da[0], (float)meta[n].x), __fmul_rn(da[1], (float)meta[n].z)};
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
                    if constexpr (G::SUMS) s16 = *(const uint2*)(st + G::A + G::Q + G::D + (wn * FN + n) * 256 + lane * 8);
                    end256<F, 2>(extra, dw, mw, s16, (const float*)(st + G::A + G::Q) + (wn * FN + n) * 8 + 2 * tig, sum[m][n], acc[m][n]);
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
                auto put = [&](int t, float v) { y[(size_t)t * N + row + r] = bias != nullptr ? __fadd_rn(v, bias[row + r]) : v; };
                if (passes == 2) {
                    if (column < columns) put(column / 2, __fadd_rn(out[2 * r], out[2 * r + 1]));
                } else {
                    if (column < columns) put(column, out[2 * r]);
                    if (column + 1 < columns) put(column + 1, out[2 * r + 1]);
                }
            }
        }
}

// ---------------------------------------------------------------------------------------------------- rows of an embedding

// y[t] = row ids[t] of W, decoded. A thread takes 8 values of a run of 32: groups tig and tig + 4. grid: (ceil(K / 8 / blockDim), T).
// An id outside 0..N gives a row of NaN. Everything times `factor`.
template <class F> __device__ __forceinline__ void decode_rows(const uint8_t* __restrict__ w, const int* ids, float* y, int N, int K, float factor) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, tig = i % 4, run = i / 4, t = blockIdx.y;
    if (run * 32 >= K) return;
    float* out = y + (size_t)t * K + run * 32 + tig * 4;
    const int id = *(const volatile int*)(ids + t);
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
            out[16 * h + j] = __fmul_rn(v, factor);
        }
    }
}

// ---------------------------------------------------------------------------------------------------- the kernels of a format

#define PRODUCT_PARAMETERS \
    const uint8_t *w, const uint2 *q, const int2 *meta, const float *d, const uint2 *s16, float *y, const float *bias, int N, int K, int columns, int passes

// As Few has them: kernels' parameters are words of 8 bytes at most.
#define GEMV_PARAMETERS                                                                                                  \
    const uint8_t *w0, const uint8_t *w1, const uint8_t *w2, float *y0, float *y1, float *y2, const float *b0, const float *b1, const float *b2, int n0, \
        int n1, int n2, const uint2 *q, const int2 *meta, const float *d, const uint2 *s16, int K, int columns, int passes
#define FEW \
    Few { {w0, w1, w2}, {y0, y1, y2}, {b0, b1, b2}, {n0, n1, n2} }

#define WIDE_KERNEL(F)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(Gemm<F, Wide>::THREADS, 1) gemm_wide(PRODUCT_PARAMETERS) {               \
        gemm<F, Wide>(w, Acts{q, meta, d, s16}, y, bias, N, K, columns, passes);                                                \
    }

#define PRODUCT_KERNELS(F)                                                                                                \
    extern "C" __global__ void __launch_bounds__(512, 1) gemv_1(GEMV_PARAMETERS, int stages, int round) {                 \
        one::gemv<F, 1>(FEW, Acts{q, meta, d, s16}, K, passes, stages, round);                                            \
    }                                                                                                                     \
    extern "C" __global__ void __launch_bounds__(512, 1) gemv_normed(GEMV_PARAMETERS, int stages, int round, const float* x, const float* delta, \
                                                                     const float* weights, float* sum, float eps) {      \
        one::gemv<F, 1, true>(FEW, Acts{q, meta, d, s16}, K, passes, stages, round, one::Norm{x, delta, weights, sum, eps}); \
    }                                                                                                                     \
    extern "C" __global__ void __launch_bounds__(512, 1) gemv_2(GEMV_PARAMETERS, int stages, int round) {                 \
        one::gemv<F, 2>(FEW, Acts{q, meta, d, s16}, K, passes, stages, round);                                            \
    }                                                                                                                     \
    extern "C" __global__ void gemv_8(GEMV_PARAMETERS) { gemv<F, 1>(FEW, Acts{q, meta, d, s16}, K, columns, passes); } \
    extern "C" __global__ void gemv_16(GEMV_PARAMETERS) { gemv<F, 2>(FEW, Acts{q, meta, d, s16}, K, columns, passes); } \
    extern "C" __global__ void __launch_bounds__(Gemm<F, Narrow>::THREADS) gemm_narrow(PRODUCT_PARAMETERS) {              \
        gemm<F, Narrow>(w, Acts{q, meta, d, s16}, y, bias, N, K, columns, passes);                                              \
    }                                                                                                                     \
    extern "C" __global__ void decode(const uint8_t* w, const int* ids, float* y, int N, int K) {                         \
        wait_for_previous();                                                                                              \
        decode_rows<F>(w, ids, y, N, K, 1.0f);                                                                            \
    }                                                                                                                     \
    extern "C" __global__ void begin(const uint8_t* w, BEGIN_PARAMETERS, float* y, int N, int K, float factor) {          \
        wait_for_previous();                                                                                              \
        copy_step(BEGIN_ARGUMENTS);                                                                                       \
        decode_rows<F>(w, (const int*)step, y, N, K, factor);                                                             \
    }
