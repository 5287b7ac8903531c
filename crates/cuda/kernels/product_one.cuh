// Products of one token (one column, or two of two passes) and of two tokens: weights stream through shared memory at the rate of the memory.
//
// One thread block a multiprocessor owns neighbouring tiles of up to three matrices. A unit is a chunk of a tile; a warp takes every so many units
// through a ring of its own, which is filled before the kernel ahead has ended: as many bytes as shared memory holds, so that memory has work while
// small kernels run. Activations are copied to shared memory once (or made there, from what they are the norm of), sums of chunks wait there until their
// tile is complete.
//
// From 9.0 on the ring is filled by bulk copies, which one lane starts; before, by asynchronous copies of all lanes. Either way a barrier in shared
// memory says that a stage is there.
#pragma once
#include "acts.cuh"
#include "heads.cuh"

namespace one {

// What moves at once; the wrapper has the same rule.
template <class F> struct Stage {
    static constexpr int BLOCK = F::BYTES * 16, PER = CHUNK / F::LEN;
    static constexpr int BLOCKS = F::LEN == 256 ? 1 : BLOCK > 512 ? 4 : 8, BYTES = BLOCKS * BLOCK;
};

__device__ __forceinline__ uint32_t at_shared(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// A copy of BYTES (4 or 8) in the background.
template <int BYTES> __device__ __forceinline__ void copy_small(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at_shared(shared)), "l"(global), "n"(BYTES) : "memory");
}

__device__ __forceinline__ void barrier_new(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at_shared(barrier)) : "memory");
#else
    asm volatile("mbarrier.init.shared.b64 [%0], 32;" ::"r"(at_shared(barrier)) : "memory");
#endif
}
// New barriers are seen by copies.
__device__ __forceinline__ void barriers_seen() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra AGAIN;\n}" ::"r"(at_shared(barrier)), "r"(parity) : "memory");
#else
    asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n@!p bra AGAIN;\n}" ::"r"(at_shared(barrier)), "r"(parity) : "memory");
#endif
}

// How the second-level cache treats what is copied: weights are read once a token, so that what else is there stays.
__device__ __forceinline__ uint64_t once_policy() {
    uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}

// Starts to copy whole pieces of 16 bytes, by a whole warp. `barrier` completes its phase when they are there. That the elected lane is chosen in the
// same `asm` keeps operands in the warp's own registers: else the compiler loops over the lanes' values.
__device__ __forceinline__ void copy_stage(uint8_t* to, const uint8_t* from, int bytes, uint64_t* barrier, uint64_t policy) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\n@one mbarrier.arrive.expect_tx.shared.b64 _, [%3], %2;\n"
        "@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;\n}" ::"r"(at_shared(to)),
        "l"(from), "r"(bytes), "r"(at_shared(barrier)), "l"(policy)
        : "memory");
#else
    for (int i = threadIdx.x % 32 * 16; i < bytes; i += 512) copy16(to + i, from + i);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at_shared(barrier)) : "memory");
#endif
}
__device__ __forceinline__ void copy_stage(uint8_t* to, const uint8_t* from, int bytes, uint64_t* barrier) { copy_stage(to, from, bytes, barrier, once_policy()); }

// Stages of a ring that are filled before the kernel ahead has ended.
constexpr int EARLY = 2;

// Where a tile of all matrices is: its matrix, and its number there.
struct Place {
    int matrix, tile;
};
__device__ __forceinline__ Place place(const Few& few, int tile) {
    const int a = (few.N[0] + 15) / 16, b = (few.N[1] + 15) / 16;
    if (tile < a) return {0, tile};
    return tile < a + b ? Place{1, tile - a} : Place{2, tile - a - b};
}
template <class T> __device__ __forceinline__ T pick(const T (&of)[3], int matrix) { return matrix == 0 ? of[0] : matrix == 1 ? of[1] : of[2]; }

// ---- blocks of 256: columns of the mma are runs
//
// A token fills one of the eight columns of an mma, and its sums are in a quarter of the lanes. So columns are runs instead: a run's codes meet
// activations in that run's column, zeros in the others, and all lanes have sums to be scaled. Column n of one token is run n / 2 + 4 (n % 2); of two
// columns it is run n / 2 of column n % 2, and the runs from 4 on have sums of their own. Either way lane tig has those of runs tig and tig + 4, and
// reads the scales of these alone. Rows are added up over the four lanes of a gid, so that a lane ends with one: row 2 gid + tig % 2, column tig / 2.

// Codes of runs as they are multiplied: those of the second 16 values HIGH times as large.
template <class F> struct Raised {
    static constexpr int HIGH = 1;
    static __device__ __forceinline__ void codes(const uint8_t* b, int run, int at, int gid, int tig, uint32_t (&a)[4]) { F::codes(b, run, at, gid, tig, a); }
};
template <> struct Raised<Q4_K> {  // high nibbles where they are
    static constexpr int HIGH = 16;
    static __device__ __forceinline__ void codes(const uint8_t* b, int run, int at, int, int, uint32_t (&a)[4]) {
        const uint2 v = pair(b + Q4_K::PLANES + run * 256 + at);
        a[0] = v.x & 0x0f0f0f0fu, a[1] = v.y & 0x0f0f0f0fu, a[2] = v.x & 0xf0f0f0f0u, a[3] = v.y & 0xf0f0f0f0u;
    }
};
template <> struct Raised<Q6_K> {
    static constexpr int HIGH = 1;
    // Turned so that the two bits of group tig lie where they belong.
    static __device__ __forceinline__ uint32_t with_high(uint32_t low, uint32_t v, int tig) { return (low & 0x0f0f0f0fu) | (__funnelshift_r(v, v, 2 * tig + 28) & 0x30303030u); }
    static __device__ __forceinline__ void codes(const uint8_t* b, int run, int at, int gid, int tig, uint32_t (&a)[4]) {
        const uint8_t* p = b + Q6_K::PLANES + run * 384;
        const uint2 low = pair(p + 128 + at), v = pair(p + gid * 8), w = pair(p + 64 + gid * 8);
        a[0] = with_high(low.x, v.x, tig), a[1] = with_high(low.y, v.y, tig), a[2] = with_high(low.x >> 4, w.x, tig), a[3] = with_high(low.y >> 4, w.y, tig);
    }
};

// D += A*B.
template <bool SIGNED> __device__ __forceinline__ void mma_add(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    if constexpr (SIGNED)
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// What a lane keeps for it: which runs (of 4, or of 8 for one column) are its column's, all bits set or none.
template <int C> struct Mine {
    uint32_t of[8 / C];
    __device__ __forceinline__ explicit Mine(int gid) {
#pragma unroll
        for (int r = 0; r < 8 / C; r++) of[r] = r % 4 == gid / 2 && (C == 2 || r / 4 == gid % 2) ? ~0u : 0u;
    }
};

// Adds a block of a tile to a lane's row and column. `q`: where the block's activations lie in shared memory, [8 runs][C][32 bytes]; `s16`: sums of 16 codes,
// [C][16]; `d` [C].
template <class F, int C>
__device__ __forceinline__ void block256(const uint8_t* b, const uint8_t* q, const uint8_t* s16, const float* d, const Mine<C>& mine, int gid, int tig, float& acc) {
    using R = Raised<F>;
    constexpr bool HALVES = F::SUB == 16 || R::HIGH != 1;
    constexpr int PARTS = HALVES ? 2 : 1, SUBS = 32 / F::SUB;
    const int at = tig * 64 + gid * 8;
    uint2 x[C];
#pragma unroll
    for (int g = 0; g < C; g++) x[g] = *(const uint2*)(q + (C == 1 ? gid / 2 + gid % 2 * 4 : (gid / 2 + 4 * g) * 2 + gid % 2) * 32 + tig * 8);
    int sums[PARTS][C][4] = {};
#pragma unroll
    for (int run = 0; run < 8; run += 2) {
        const int g = C == 1 ? 0 : run / 4;
        const uint32_t m = mine.of[run % (8 / C)], n = mine.of[(run + 1) % (8 / C)];
        uint32_t a[4], e[4];
        R::codes(b, run, at, gid, tig, a);
        R::codes(b, run + 1, at, gid, tig, e);
        if constexpr (HALVES) {
            mma_add<F::SIGNED>(sums[0][g], a[0], a[1], e[0], e[1], x[g].x & m, x[g].x & n);
            mma_add<F::SIGNED>(sums[1][g], a[2], a[3], e[2], e[3], x[g].y & m, x[g].y & n);
        } else {
            mma_add<F::SIGNED>(sums[0][g], a[0], a[1], a[2], a[3], x[g].x & m, x[g].y & m);
            mma_add<F::SIGNED>(sums[0][g], e[0], e[1], e[2], e[3], x[g].x & n, x[g].y & n);
        }
    }
    int of[2][C] = {};  // [row][column]
#pragma unroll
    for (int g = 0; g < 2; g++)
#pragma unroll
        for (int h = 0; h < SUBS; h++) {
            const int2 scale = F::scale(b, (tig + 4 * g) * SUBS + h, gid);
#pragma unroll
            for (int c = 0; c < C; c++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int set = C == 1 ? 0 : g, i = 2 * r + (C == 1 ? g : c);
                    const int dot = R::HIGH == 1 ? sums[h * (PARTS - 1)][set][i] : sums[0][set][i] * R::HIGH + sums[PARTS - 1][set][i];
                    of[r][c] += (r ? scale.y : scale.x) * dot;
                }
        }
    const bool odd = tig % 2, high = tig / 2;
    int sum[C];
#pragma unroll
    for (int c = 0; c < C; c++) sum[c] = (odd ? of[1][c] : of[0][c]) + __shfl_xor_sync(~0u, odd ? of[0][c] : of[1][c], 1);
    int total;
    if constexpr (C == 1) {
        total = sum[0] + __shfl_xor_sync(~0u, sum[0], 2);
    } else {
        total = (high ? sum[1] : sum[0]) + __shfl_xor_sync(~0u, high ? sum[0] : sum[1], 2);
    }
    if constexpr (R::HIGH == 16) total >>= 4;
    const float da = d[C == 1 ? 0 : tig / 2];
    const float2 dw = F::d(b, gid);
    float less = 0.0f;  // minima, or scales times the bias
    if constexpr (F::MIN || F::BIAS != 0) {
        uint32_t j[2];
#pragma unroll
        for (int g = 0; g < 2; g++) j[g] = F::extra(b, (tig + 4 * g) * SUBS, gid) | F::extra(b, (tig + 4 * g) * SUBS + SUBS - 1, gid) << 16;
        uint32_t extra[4];
        extra_halves<F>(j[0], j[1], extra);
        float m[4];
        const uint8_t* of_column = s16 + (C == 1 ? 0 : gid / 4) * 32 + tig * 4;
        mma_f16(m, extra, make_uint2(*(const uint32_t*)of_column, *(const uint32_t*)(of_column + 16)));
        less = odd ? m[2] : m[0];
    }
    if constexpr (F::BIAS != 0) total -= F::BIAS * (int)less;
    acc = __fmaf_rn((float)total, __fmul_rn(odd ? dw.y : dw.x, da), acc);
    if constexpr (F::MIN) {
        const float2 mw = F::m(b, gid);
        acc = __fmaf_rn(less, -__fmul_rn(odd ? mw.y : mw.x, da), acc);
    }
}

// A warp's way through its units: chunks of the thread block's tiles, every so many.
struct Walk {
    int tile, chunk, warps, chunks;
    __device__ __forceinline__ Walk(int warp, int warps, int chunks) : tile(0), chunk(warp), warps(warps), chunks(chunks) { settle(); }
    __device__ __forceinline__ void settle() {
        while (chunk >= chunks) chunk -= chunks, tile++;
    }
    __device__ __forceinline__ void next() { chunk += warps, settle(); }
};

// A norm ahead of the product: the activations are blocks of norm(x + delta) * w. delta and w may be null; sum [K], which is neither x nor delta, is where
// x + delta goes if not null.
struct Norm {
    const float *x, *delta, *w;
    float *sum, eps;
};

// A thread block's own activations, as residual_norm in ops.cu makes them. `row` [K + 1] and the rest in shared memory, as in gemv; the first thread block keeps them for others, in `act`.
template <class F> struct Normed {
    static constexpr int HELD = 4;  // pieces of w that a thread reads before the wait
    float4 w[HELD];

    // Where the thread's piece j of 4 values lies; whole warps have one, or none.
    static __device__ __forceinline__ int at(int j) {
        if constexpr (F::LEN == 256) return (threadIdx.x / 32 + j / 2 * (blockDim.x / 32)) * 64 + j % 2 * 32 + threadIdx.x % 32;
        return threadIdx.x + j * blockDim.x;
    }
    __device__ __forceinline__ float4 weight(const Norm& norm, int i, int pieces) const {
        return norm.w != nullptr && i < pieces ? ((const float4*)norm.w)[i] : make_float4(1, 1, 1, 1);
    }
    __device__ __forceinline__ Normed(const Norm& norm, int K) {
#pragma unroll
        for (int j = 0; j < HELD; j++) w[j] = weight(norm, at(j), K / 4);
    }
    __device__ __forceinline__ void make(const Norm& norm, const Acts& act, int K, float* row, uint8_t* q, uint8_t* meta, float* d) const {
        const int pieces = K / 4, lane = threadIdx.x % 32;
        const float4 *x = (const float4*)norm.x, *delta = (const float4*)norm.delta;
#pragma unroll 2
        for (int i = threadIdx.x; i < pieces; i += blockDim.x) {
            float4 y = __ldcg(x + i);
            if (delta != nullptr) {
                const float4 z = __ldcg(delta + i);
                y = make_float4(y.x + z.x, y.y + z.y, y.z + z.z, y.w + z.w);
            }
            ((float4*)row)[i] = y;
            if (norm.sum != nullptr && blockIdx.x == 0) ((float4*)norm.sum)[i] = y;
        }
        const float g = block_inverse_rms(row, K, norm.eps, row + K);
        const bool keeps = blockIdx.x == 0;
        auto piece = [&](int j, int i) {
            const float4 by = j < HELD ? w[j] : weight(norm, i, pieces), y = ((const float4*)row)[i];
            return make_float4(y.x * g * by.x, y.y * g * by.y, y.z * g * by.z, y.w * g * by.w);
        };
        auto put = [&](int run, int group, uint32_t word) {
            const int to = run * 8 + group % 4 * 2 + group / 4;
            ((uint32_t*)q)[to] = word;
            if (keeps) ((uint32_t*)act.q)[run * 64 + to % 8] = word;
        };
        // Pieces that are held first, so that they have numbers the compiler knows.
        auto blocks = [&](auto&& of) {
#pragma unroll
            for (int j = 0; j < HELD; j += F::LEN == 256 ? 2 : 1)
                if (at(j) - lane < pieces) of(j);
#pragma unroll 1
            for (int j = HELD; at(j) - lane < pieces; j += F::LEN == 256 ? 2 : 1) of(j);
        };
        if constexpr (F::LEN == 256) {
            blocks([&](int j) {
                const int block = at(j) / 64;
                const float4 v[2] = {piece(j, at(j)), piece(j + 1, at(j + 1))};
                uint32_t amax = largest_bits(v), word[2];
                int sum[2];
#pragma unroll
                for (int s = 1; s < 32; s *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, s));
                const float scale = codes(v, amax, word, sum);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int i = lane + 32 * h;
                    put(block * 8 + i / 8, i % 8, word[h]);
                    int all = sum[h];
                    all += __shfl_xor_sync(~0u, all, 1), all += __shfl_xor_sync(~0u, all, 2);
                    if (i % 4 == 0) {
                        if constexpr (F::MIN || F::BIAS != 0) ((__half*)meta)[block * 16 + i / 4] = __int2half_rn(all);
                        if (keeps) ((__half*)act.s16)[block * 128 + i / 4] = __int2half_rn(all);
                    }
                }
                if (lane == 0) {
                    d[block] = scale;
                    if (keeps) const_cast<float*>(act.d)[block * 8] = scale;
                }
            });
        } else {
            blocks([&](int j) {
                const int i = at(j), run = i / 8;
                const bool live = i < pieces;
                const float4 v[1] = {live ? piece(j, i) : make_float4(0, 0, 0, 0)};
                uint32_t amax = largest_bits(v), word[1];
                int sum[1];
#pragma unroll
                for (int s = 1; s < 8; s *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, s));
                const float scale = codes(v, amax, word, sum);
                int all = sum[0];
#pragma unroll
                for (int s = 1; s < 8; s *= 2) all += __shfl_xor_sync(~0u, all, s);
                if (!live) return;
                put(run, i % 8, word[0]);
                if (i % 8 == 0) {
                    ((int2*)meta)[run] = make_int2(all, __float_as_int(scale));
                    if (keeps) const_cast<int2*>(act.meta)[run * 8] = make_int2(all, __float_as_int(scale));
                }
            });
        }
    }
};

// C columns, 1 or 2. `stages` a warp's ring has; the sums of `round` tiles wait at a time. With a norm the one column is made here.
template <class F, int C, bool NORMED = false>
__device__ __forceinline__ void gemv(const Few& few, const Acts& act, int K, int passes, int stages, int round, const Norm& norm = Norm{}) {
    using S = Stage<F>;
    constexpr bool SUMS = F::LEN == 256 && (F::MIN || F::BIAS != 0);
    extern __shared__ __align__(128) uint8_t smem[];
    let_next_start();
    const int warps = blockDim.x / 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    int gid = lane / 4, tig = lane % 4;
    const int runs = K / 32, blocks = K / F::LEN, chunks = (K + CHUNK - 1) / CHUNK, last = (few.N[0] + 15) / 16 + (few.N[1] + 15) / 16 + (few.N[2] + 15) / 16;
    const int first_tile = (int)((long long)blockIdx.x * last / gridDim.x), mine = (int)((blockIdx.x + 1LL) * last / gridDim.x) - first_tile;
    uint8_t* ring = smem + (size_t)warp * stages * S::BYTES;
    uint64_t* barriers = (uint64_t*)(smem + (size_t)warps * stages * S::BYTES) + warp * stages;
    uint8_t* q = smem + (size_t)warps * stages * (S::BYTES + 16);  // [K/32][C][32 bytes], then as Acts has them, of C columns
    uint8_t* meta = q + runs * C * 32;                              // of blocks of 32: [K/32][C]; of 256, their sums: [K/256][C][32 bytes]
    float* d = (float*)(meta + (F::LEN == 32 ? runs * C * 8 : SUMS ? blocks * C * 32 : 0));
    float* part = d + (F::LEN == 256 ? (blocks * C + 3) / 4 * 4 : 0);  // [2][round][chunks][C][16]

    const uint64_t policy = once_policy();
    Walk ahead(warp, warps, chunks);  // of the next copy
    const uint8_t* from = nullptr;
    int left = 0;  // blocks of its unit
    auto seek = [&]() {
        if (ahead.tile >= mine) return;
        const Place at = place(few, first_tile + ahead.tile);
        from = pick(few.w, at.matrix) + ((size_t)at.tile * blocks + ahead.chunk * S::PER) * S::BLOCK;
        left = min(S::PER, blocks - ahead.chunk * S::PER);
    };
    auto fetch = [&](int stage) {
        if (ahead.tile >= mine) return;
        copy_stage(ring + stage * S::BYTES, from, min(S::BLOCKS, left) * S::BLOCK, barriers + stage, policy);
        from += S::BLOCKS * S::BLOCK, left -= S::BLOCKS;
        if (left <= 0) ahead.next(), seek();
    };
    if (lane == 0)
        for (int s = 0; s < stages; s++) barrier_new(barriers + s);
    barriers_seen();
    __syncwarp();
    seek();
    // Some of the first weights. With all that the rings hold on its way, what the kernels ahead still read would come later.
    const int early = min(EARLY, stages);
    for (int s = 0; s < early; s++) fetch(s);
    if constexpr (NORMED) {
        const Normed<F> normed(norm, K);
        wait_for_previous();
        for (int s = early; s < stages; s++) fetch(s);
        normed.make(norm, act, K, (float*)(((uintptr_t)part + 15) & ~(uintptr_t)15), q, meta, d);
    } else {
        wait_for_previous();
        for (int i = threadIdx.x; i < runs * C * 2; i += blockDim.x) copy16(q + i * 16, (const uint8_t*)act.q + (size_t)(i / (2 * C)) * 256 + i % (2 * C) * 16);
        if constexpr (F::LEN == 32) {
            for (int i = threadIdx.x; i < runs; i += blockDim.x) {
                if constexpr (C == 1) copy_small<8>(meta + i * 8, act.meta + (size_t)i * 8);
                else copy16(meta + i * 16, act.meta + (size_t)i * 8);
            }
        } else {
            for (int i = threadIdx.x; i < blocks; i += blockDim.x) copy_small<4 * C>(d + i * C, act.d + (size_t)i * 8);
            if constexpr (SUMS)
                for (int i = threadIdx.x; i < blocks * C * 2; i += blockDim.x) copy16(meta + i * 16, (const uint8_t*)act.s16 + (size_t)(i / (2 * C)) * 256 + i % (2 * C) * 16);
        }
        copy_commit();
        for (int s = early; s < stages; s++) fetch(s);
        copy_wait<0>();
    }
    __syncthreads();

    asm volatile("" : "+r"(gid), "+r"(tig));  // else they are worked out again for every block
    const Mine<C> own(gid);
    const int column = min(gid, C - 1);
    const uint8_t* own_q = q + column * 32 + tig * 8;
    Walk unit(warp, warps, chunks);
    int stage = 0;
    uint32_t parity = 0;
    for (int first = 0, turn = 0; first < mine; first += round, turn ^= 1) {
        const int to = min(mine, first + round);
        float* sums = part + turn * round * chunks * C * 16;
#pragma unroll 1
        for (; unit.tile < to; unit.next()) {
            int block = unit.chunk * S::PER;
            const int end = min(blocks, block + S::PER);
            float* of_unit = sums + ((size_t)(unit.tile - first) * chunks + unit.chunk) * C * 16;
            float acc[4] = {};
#pragma unroll 1
            for (; block < end; block += S::BLOCKS) {
                barrier_wait(barriers + stage, parity);
                const uint8_t* piece = ring + stage * S::BYTES;
                if constexpr (F::LEN == 32) {
                    auto of_32 = [&](int u) {
                        const uint8_t* b = piece + u * S::BLOCK;
                        const int run = block + u;
                        uint32_t a[4];
                        F::codes(b, 0, tig * 64 + gid * 8, gid, tig, a);
                        block32<F, C>(a, F::d(b, gid), F::m(b, gid), *(const uint2*)(own_q + run * C * 32), (const int2*)meta + run * C, acc);
                    };
                    if (end - block >= S::BLOCKS) {
#pragma unroll
                        for (int u = 0; u < S::BLOCKS; u++) of_32(u);
                    } else {
#pragma unroll 1
                        for (int u = 0; u < end - block; u++) of_32(u);
                    }
                } else {
                    block256<F, C>(piece, q + block * C * 256, meta + block * C * 32, d + block * C, own, gid, tig, acc[0]);
                }
                __syncwarp();
                fetch(stage);
                if (++stage == stages) stage = 0, parity ^= 1;
            }
            if constexpr (F::LEN == 256) {
                if (C == 2 || tig < 2) of_unit[tig / 2 * 16 + 2 * gid + tig % 2] = acc[0];
            } else if (tig == 0) {
#pragma unroll
                for (int c = 0; c < C; c++) *(float2*)(of_unit + c * 16 + 2 * gid) = make_float2(acc[c], acc[2 + c]);
            }
        }
        __syncthreads();
        const int tokens = C / passes;
        for (int i = threadIdx.x; i < (to - first) * tokens * 16; i += blockDim.x) {
            const int t = i / 16 % tokens, tile = i / 16 / tokens;
            const Place where = place(few, first_tile + first + tile);
            const int row = where.tile * 16 + i % 16, N = pick(few.N, where.matrix);
            if (row >= N) continue;
            float both = 0.0f;
            for (int p = 0; p < passes; p++) {
                const float* of = sums + ((size_t)tile * chunks * C + t * passes + p) * 16 + i % 16;
                float sum = of[0];
#pragma unroll 8
                for (int c = 1; c < chunks; c++) sum = __fadd_rn(sum, of[c * C * 16]);
                both = p == 0 ? sum : __fadd_rn(both, sum);
            }
            const float* bias = pick(few.bias, where.matrix);
            pick(few.y, where.matrix)[(size_t)t * N + row] = bias != nullptr ? __fadd_rn(both, bias[row]) : both;
        }
    }
}

}  // namespace one
