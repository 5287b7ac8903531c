// Products of one token (one column, or two of two passes) and of two tokens: weights stream through shared memory at the rate of the memory.
//
// One thread block a multiprocessor owns neighbouring tiles of up to three matrices. A unit is a chunk of a tile; a warp takes every so many units
// through a ring of its own, which is filled before the kernel ahead has ended: as many bytes as shared memory holds, so that memory has work while
// small kernels run. Activations are copied to shared memory once, sums of chunks wait there until their tile is complete.
//
// From 9.0 on the ring is filled by bulk copies, which one lane starts; before, by asynchronous copies of all lanes. Either way a barrier in shared
// memory says that a stage is there.
#pragma once

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
    uint32_t is_done = 0;
    while (!is_done) {
#if __CUDA_ARCH__ >= 900
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(is_done) : "r"(at_shared(barrier)), "r"(parity) : "memory");
#else
        asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(is_done) : "r"(at_shared(barrier)), "r"(parity) : "memory");
#endif
    }
}

// Starts to copy whole pieces of 16 bytes, by a warp. `barrier` completes its phase when they are there.
__device__ __forceinline__ void copy_stage(uint8_t* to, const uint8_t* from, int bytes, uint64_t* barrier) {
    const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
        uint64_t policy;  // weights are read once a token: what else is in the second-level cache stays
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at_shared(barrier)), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(at_shared(to)), "l"(from), "r"(bytes),
                     "r"(at_shared(barrier)), "l"(policy)
                     : "memory");
    }
#else
    for (int i = lane * 16; i < bytes; i += 512) copy16(to + i, from + i);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at_shared(barrier)) : "memory");
#endif
}

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

// C columns, 1 or 2. `stages` a warp's ring has; the sums of `round` tiles wait at a time.
template <class F, int C> __device__ __forceinline__ void gemv(const Few& few, const Acts& act, int K, int passes, int stages, int round) {
    using S = Stage<F>;
    constexpr bool SUMS = F::LEN == 256 && (F::MIN || F::BIAS != 0);
    extern __shared__ __align__(128) uint8_t smem[];
    let_next_start();
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4;
    const int runs = K / 32, blocks = K / F::LEN, chunks = (K + CHUNK - 1) / CHUNK, last = (few.N[0] + 15) / 16 + (few.N[1] + 15) / 16 + (few.N[2] + 15) / 16;
    const int first_tile = (int)((long long)blockIdx.x * last / gridDim.x), mine = (int)((blockIdx.x + 1LL) * last / gridDim.x) - first_tile;
    uint8_t* ring = smem + (size_t)warp * stages * S::BYTES;
    uint64_t* barriers = (uint64_t*)(smem + (size_t)warps * stages * S::BYTES) + warp * stages;
    uint8_t* q = smem + (size_t)warps * stages * (S::BYTES + 16);  // [K/32][C][32 bytes], then as Acts has them, of C columns
    uint8_t* meta = q + runs * C * 32;                              // of blocks of 32: [K/32][C]; of 256, their sums: [K/256][C][32 bytes]
    float* d = (float*)(meta + (F::LEN == 32 ? runs * C * 8 : SUMS ? blocks * C * 32 : 0));
    float* part = d + (F::LEN == 256 ? (blocks * C + 3) / 4 * 4 : 0);  // [2][round][chunks][C][16]

    int next_tile = 0, next_chunk = warp, next_block = 0;  // of the next copy
    auto settle = [&]() {
        while (next_chunk >= chunks) next_chunk -= chunks, next_tile++;
        next_block = next_chunk * S::PER;
    };
    settle();
    auto fetch = [&](int stage) {
        if (next_tile >= mine) return;
        const Place at = place(few, first_tile + next_tile);
        const uint8_t* from = pick(few.w, at.matrix) + ((size_t)at.tile * blocks + next_block) * S::BLOCK;
        const int end = min(blocks, (next_chunk + 1) * S::PER);
        copy_stage(ring + stage * S::BYTES, from, min(S::BLOCKS, end - next_block) * S::BLOCK, barriers + stage);
        next_block += S::BLOCKS;
        if (next_block >= end) next_chunk += warps, settle();
    };
    if (lane == 0)
        for (int s = 0; s < stages; s++) barrier_new(barriers + s);
    barriers_seen();
    __syncwarp();
    // Some of the first weights. With all that the rings hold on its way, what the kernels ahead still read would come later.
    const int early = min(EARLY, stages);
    for (int s = 0; s < early; s++) fetch(s);
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
    __syncthreads();

    const int at = tig * 64 + gid * 8, column = min(gid, C - 1);
    const uint8_t* own_q = q + column * 32 + tig * 8;
    const uint8_t* own_sums = meta + column * 32 + tig * 8;
    int stage = 0, unit = warp;
    uint32_t parity = 0;
    for (int from = 0, turn = 0; from < mine; from += round, turn ^= 1) {
        const int to = min(mine, from + round);
        float* sums = part + turn * round * chunks * C * 16;
#pragma unroll 1
        for (; unit < to * chunks; unit += warps) {
            const int first = unit % chunks * S::PER, end = min(blocks, first + S::PER);
            float acc[4] = {};
#pragma unroll 1
            for (int block = first; block < end; block += S::BLOCKS) {
                barrier_wait(barriers + stage, parity);
                const uint8_t* piece = ring + stage * S::BYTES;
                if constexpr (F::LEN == 32) {
                    auto of_32 = [&](int u) {
                        const uint8_t* b = piece + u * S::BLOCK;
                        const int run = block + u;
                        uint32_t a[4];
                        F::codes(b, 0, at, gid, tig, a);
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
                    int sum[4] = {};
#pragma unroll
                    for (int run = 0; run < 8; run++) {
                        uint32_t a[4];
                        int2 scale[2];
                        F::codes(piece, run, at, gid, tig, a);
                        scales256<F>(piece, run, gid, scale);
                        run256<F, C>(a, scale, *(const uint2*)(own_q + (block * 8 + run) * C * 32), sum);
                    }
                    uint32_t extra[4];
                    uint2 s16 = make_uint2(0, 0);
                    if constexpr (SUMS) extras<F>(piece, gid, tig, extra), s16 = *(const uint2*)(own_sums + block * C * 32);
                    end256<F, C>(extra, F::d(piece, gid), F::m(piece, gid), s16, d + block * C, sum, acc);
                }
                __syncwarp();
                fetch(stage);
                if (++stage == stages) stage = 0, parity ^= 1;
            }
            float* of_unit = sums + (size_t)(unit - from * chunks) * C * 16;
            if (tig == 0) {
#pragma unroll
                for (int c = 0; c < C; c++) *(float2*)(of_unit + c * 16 + 2 * gid) = make_float2(acc[c], acc[2 + c]);
            }
        }
        __syncthreads();
        const int tokens = C / passes;
        for (int i = threadIdx.x; i < (to - from) * tokens * 16; i += blockDim.x) {
            const int t = i / 16 % tokens, tile = i / 16 / tokens;
            const Place where = place(few, first_tile + from + tile);
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
