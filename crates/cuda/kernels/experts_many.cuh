// Experts of many tokens: y[place][n] = W[expert][n][K] . x[place][K], the bits of quant/src/product.rs. Each block of columns belongs to one expert
// (experts.cu says how tokens get there).
//
// A thread block makes 128 rows x COLS columns. Four warps have the copy engine bring weights and activations, as acts.cuh arranges them, into a ring of
// STAGES; two groups of 4 warps each make 64 x COLS outputs: a warp's 16 rows are a tile of weights, which it unpacks from shared memory into the A operand
// of wgmma. While one group turns integers into floats, the tensor cores work for the other. The arithmetic is that of gemm_many.cuh, whose thread
// blocks take shares of all tiles of one matrix.
#pragma once
#include "formats.cuh"
#include "mma.cuh"
#include "product.cuh"
#include "wgmma.cuh"

#ifdef HAS_WGMMA
namespace experts {

// What lies in the ring at once.
template <class F, int COLS> struct ManyStage {
    static constexpr int WGS = 2, TILES = 4 * WGS, ATOMS = COLS / 8, HALF = COLS / 2;
    static constexpr int KS = F::LEN == 256 ? 256 : 128, NB = KS / F::LEN, BLOCK = F::BYTES * 16;
    static constexpr int SLAB = ATOMS * 1024, SLABS = F::LEN == 256 ? 2 : 1;
    static constexpr bool OFFSETS = F::LEN == 32 && F::MIN, MINIMA = F::LEN == 256 && F::MIN;
    static constexpr int D = SLABS * SLAB, D_BYTES = NB * COLS * 4, SUMS = D + D_BYTES, SUMS_BYTES = OFFSETS ? D_BYTES : MINIMA ? ATOMS * 256 : 0;
    static constexpr int W = SUMS + SUMS_BYTES, W_BYTES = TILES * NB * BLOCK, BYTES = (W + W_BYTES + 1023) / 1024 * 1024;
    static constexpr int TOTALS = WGS * 128 * HALF * 4;
    static constexpr int FIT = (232448 - 1024 - 256 - TOTALS) / BYTES, STAGES = FIT > 8 ? 8 : FIT;
    static constexpr int SHARED = STAGES * BYTES + TOTALS + 1024 + 256;
    static_assert(STAGES >= 2, "a ring");
};

struct ManyActs {
    const uint8_t* image;
    const uint8_t* scale;
    const uint8_t* sums;
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

// Warp `part` of the 4 that copy: a quarter of the tiles, and slabs, scales or sums. A copy costs its warp dozens of clocks, so they share the work.
template <class F, int COLS>
__device__ __forceinline__ void many_copies(int part, uint32_t ring, uint32_t full, uint32_t empty, const uint8_t* w, const ManyActs& act, int N, int K, int columns) {
    using G = ManyStage<F, COLS>;
    constexpr int MINE = G::TILES / 4;
    const int tile0 = blockIdx.x * G::TILES + part * MINE, tiles = (N + 15) / 16, blocks = K / F::LEN, steps = (blocks + G::NB - 1) / G::NB;
    const int all = (columns + 15) / 16 * 2, atom0 = blockIdx.y * G::ATOMS, atoms = min(G::ATOMS, all - atom0);
    const uint8_t* from[MINE];
#pragma unroll
    for (int t = 0; t < MINE; t++) from[t] = w + (size_t)min(tile0 + t, tiles - 1) * blocks * G::BLOCK;
    int stage = 0, parity = 1;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        const int nb = min(G::NB, blocks - step * G::NB);
        const uint32_t to = ring + stage * G::BYTES, barrier = full + 8 * stage;
        if (step >= G::STAGES) ::barrier_wait(empty + 8 * stage, parity);
        // Part 0 has the slabs, part 1 the scales, part 2 the sums.
        const int scales = nb * atoms * 32, sums = G::OFFSETS ? scales : G::MINIMA ? atoms * 256 : 0;
        barrier_expect(barrier, MINE * nb * G::BLOCK + (part == 0 ? G::SLABS * atoms * 1024 : part == 1 ? scales : part == 2 ? sums : 0));
        if (part == 0) {
#pragma unroll
            for (int s = 0; s < G::SLABS; s++) copy_bulk(to + s * G::SLAB, act.image + ((size_t)(step * G::SLABS + s) * all + atom0) * 1024, atoms * 1024, barrier);
        }
#pragma unroll
        for (int t = 0; t < MINE; t++) {
            copy_bulk(to + G::W + (part * MINE + t) * G::NB * G::BLOCK, from[t], nb * G::BLOCK, barrier);
            from[t] += G::NB * G::BLOCK;
        }
        if (part == 1 || (G::OFFSETS && part == 2)) {
            const uint8_t* floats = part == 1 ? act.scale : act.sums;
#pragma unroll
            for (int b = 0; b < G::NB; b++)
                if (b < nb) copy_bulk(to + (part == 1 ? G::D : G::SUMS) + b * COLS * 4, floats + ((size_t)(step * G::NB + b) * all + atom0) * 32, atoms * 32, barrier);
        }
        if (G::MINIMA && part == 2) copy_bulk(to + G::SUMS, act.sums + ((size_t)step * all + atom0) * 256, atoms * 256, barrier);
        stage = stage + 1 == G::STAGES ? 0 : stage + 1, parity ^= stage == 0;
    }
}

// Adds a chunk's acc to the sum of chunks, which is each thread's own.
template <int HALF> __device__ __forceinline__ void add_chunk(float4* total, int stride, float (&acc)[HALF], bool first) {
#pragma unroll
    for (int i = 0; i < HALF / 4; i++) {
        float* x = acc + 4 * i;
        if (first) {
            total[i * stride] = make_float4(x[0], x[1], x[2], x[3]);
        } else {
            const float4 v = total[i * stride];
            total[i * stride] = make_float4(__fadd_rn(v.x, x[0]), __fadd_rn(v.y, x[1]), __fadd_rn(v.z, x[2]), __fadd_rn(v.w, x[3]));
        }
        x[0] = x[1] = x[2] = x[3] = 0.0f;
    }
}

// grid: (row blocks, column blocks).
template <class F, int COLS>
__device__ __forceinline__ void gemm_many(const uint8_t* __restrict__ w, const ManyActs& act, float* __restrict__ y, int N, int K, int columns, int passes) {
    using G = ManyStage<F, COLS>;
    constexpr int HALF = G::HALF;
    extern __shared__ __align__(128) uint8_t smem[];
    const uint32_t base = (shared_address(smem) + 1023) / 1024 * 1024, ring = base, full = base + G::STAGES * G::BYTES + G::TOTALS, empty = full + 8 * G::STAGES;
    uint8_t* st0 = smem + (base - shared_address(smem));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4, group = warp / 4;
    if (threadIdx.x == 0) {
        for (int s = 0; s < G::STAGES; s++) barrier_init(full + 8 * s, 4), barrier_init(empty + 8 * s, 4 * G::WGS);
        barriers_visible();
    }
    __syncthreads();
    wait_for_previous();
    if (group == G::WGS) {
        registers_fewer<24>();
        many_copies<F, COLS>(__shfl_sync(0xffffffffu, warp - 4 * G::WGS, 0), ring, full, empty, w, act, N, K, columns);
        return;
    }
    registers_more<240>();
    float4* total = (float4*)(st0 + G::STAGES * G::BYTES) + threadIdx.x;
    const int blocks = K / F::LEN, steps = (blocks + G::NB - 1) / G::NB, at = tig * 64 + gid * 8;
    float acc[HALF];
#pragma unroll
    for (int i = 0; i < HALF; i++) acc[i] = 0.0f;
    const uint8_t* mine = st0 + G::W + warp * G::NB * G::BLOCK;

    if constexpr (F::LEN == 32) {
        int sum[HALF];
        uint32_t a[2][4];
        float2 dw[2], mw[2];
        auto unpack = [&](int stage, int k, uint32_t (&a)[4], float2& dw, float2& mw) {
            const uint8_t* b = mine + stage * G::BYTES + k * G::BLOCK;
            F::codes(b, 0, at, gid, tig, a);
            if constexpr (F::BIAS != 0) {
#pragma unroll
                for (int i = 0; i < 4; i++) a[i] = (a[i] + (128 - F::BIAS) * 0x01010101u) ^ 0x80808080u;
            }
            dw = F::d(b, gid), mw = F::m(b, gid);
        };
        ::barrier_wait(full, 0);
        unpack(0, 0, a[0], dw[0], mw[0]);
        int stage = 0, parity = 0, k = 0;
#pragma unroll 1
        for (int block0 = 0; block0 < blocks; block0 += 2) {
#pragma unroll
            for (int u = 0; u < 2; u++) {
                const int block = block0 + u;
                if (u == 1 && block >= blocks) break;
                wgmma_fence();
                wgmma_s8<false>(sum, a[u], operand_b(ring + stage * G::BYTES + 32 * k));
                wgmma_commit();
                const uint8_t* stp = st0 + stage * G::BYTES + tig * 16 + k * COLS * 4;
                const int old = stage;
                const bool last = k + 1 == G::NB;
                if (last) {
                    k = 0, stage = stage + 1 == G::STAGES ? 0 : stage + 1, parity ^= stage == 0;
                } else {
                    k++;
                }
                if (block + 1 < blocks) {
                    if (last) ::barrier_wait(full + 8 * stage, parity);
                    unpack(stage, k, a[1 - u], dw[1 - u], mw[1 - u]);
                }
                wgmma_wait<0>();
                settled(sum);
#pragma unroll
                for (int j = 0; j < HALF / 8; j++) {
                    const float4 scale = *(const float4*)(stp + G::D + j * 64);
                    const float da[4] = {scale.x, scale.y, scale.z, scale.w};
                    float* x = acc + 8 * j;
#pragma unroll
                    for (int i = 0; i < 8; i++) x[i] = __fmaf_rn((float)sum[8 * j + i], __fmul_rn(i & 2 ? dw[u].y : dw[u].x, da[i / 4 * 2 + i % 2]), x[i]);
                    if constexpr (F::MIN) {
                        const float4 v = *(const float4*)(stp + G::SUMS + j * 64);
                        const float da_sum[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                        for (int i = 0; i < 8; i++) x[i] = __fmaf_rn(i & 2 ? mw[u].y : mw[u].x, da_sum[i / 4 * 2 + i % 2], x[i]);
                    }
                }
                if (last || block + 1 == blocks) {
                    __syncwarp();
                    if (lane == 0) barrier_arrive(empty + 8 * old);
                }
            }
            if ((block0 + 2) % (CHUNK / 32) == 0 || block0 + 2 >= blocks) add_chunk(total, 128 * G::WGS, acc, block0 < CHUNK / 32);
        }
    } else {
        int high[HALF], low[HALF];
        int stage = 0, parity = 0;
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            const uint32_t st = ring + stage * G::BYTES;
            const uint8_t* b = mine + stage * G::BYTES;
            ::barrier_wait(full + 8 * stage, parity);
#pragma unroll
            for (int run = 0; run < 8; run++) {
                uint32_t a[4], h[4], l[4];
                int2 scale[2];
                F::codes(b, run, at, gid, tig, a);
                scales256<F>(b, run, gid, scale);
                to_planes<F>(a, scale, h, l);
                const uint64_t operand = operand_b(st + run / 4 * G::SLAB + run % 4 * 32);
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
            const uint8_t* stp = st0 + stage * G::BYTES;
#pragma unroll
            for (int j = 0; j < HALF / 8; j++) {
                const float4 v = *(const float4*)(stp + G::D + j * 64 + tig * 16);
                const float da[4] = {v.x, v.y, v.z, v.w};
                float* x = acc + 8 * j;
#pragma unroll
                for (int i = 0; i < 8; i++)
                    x[i] = __fmaf_rn((float)(high[8 * j + i] * 256 + low[8 * j + i]), __fmul_rn(i & 2 ? dw.y : dw.x, da[i / 4 * 2 + i % 2]), x[i]);
                if constexpr (G::MINIMA) {
#pragma unroll
                    for (int u = 0; u < 2; u++) {
                        float m[4];
                        mma_f16(m, extra, *(const uint2*)(stp + G::SUMS + (2 * j + u) * 256 + lane * 8));
#pragma unroll
                        for (int i = 0; i < 4; i++) x[4 * u + i] = __fmaf_rn(m[i], -__fmul_rn(i & 2 ? mw.y : mw.x, da[2 * u + i % 2]), x[4 * u + i]);
                    }
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * stage);
            stage = stage + 1 == G::STAGES ? 0 : stage + 1, parity ^= stage == 0;
            if ((step + 1) % (CHUNK / G::KS) == 0 || step + 1 == steps) add_chunk(total, 128 * G::WGS, acc, step < CHUNK / G::KS);
        }
    }
    let_next_start();
#pragma unroll
    for (int i = 0; i < HALF / 4; i++) {
        const float4 v = total[i * 128 * G::WGS];
        const float out[4] = {v.x, v.y, v.z, v.w};
        const int row = (blockIdx.x * G::TILES + warp) * 16 + 2 * gid, column = blockIdx.y * COLS + 4 * tig + 16 * (i / 2) + 2 * (i % 2);
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

// grid: (row blocks, column blocks at most). Column block b belongs to place block b / per, whose expert's matrix begins at byte `at` of its blob.
// An expert that is not here (blob 0) is passed over.
template <class F, int COLS>
__device__ __forceinline__ void many(const int* experts, const int* count, int per, const uint64_t* blobs, uint32_t at, const ManyActs& act, float* y, int N, int K,
                                     int columns, int passes) {
    wait_for_previous();
    const int block = blockIdx.y / per;
    if (block >= *count) return;
    const uint64_t blob = blobs[experts[block]];
    if (blob == 0) return;
    gemm_many<F, COLS>((const uint8_t*)blob + at, act, y, N, K, columns, passes);
}

}  // namespace experts

#define EXPERTS_MANY_KERNEL(NAME, F, COLS)                                                                                                          \
    extern "C" __global__ void __launch_bounds__(384, 1) NAME(const int* experts, const int* count, int per, const uint64_t* blobs, uint32_t at,      \
                                                              const uint8_t* image, const uint8_t* scale, const uint8_t* sums, float* y, int N,      \
                                                              int K, int columns, int passes) {                                                     \
        experts::many<F, COLS>(experts, count, per, blobs, at, experts::ManyActs{image, scale, sums}, y, N, K, columns, passes);                     \
    }
#define EXPERTS_MANY_KERNELS(F) EXPERTS_MANY_KERNEL(many_32, F, 32) EXPERTS_MANY_KERNEL(many_64, F, 64) EXPERTS_MANY_KERNEL(many_128, F, 128)
#else
#define EXPERTS_MANY_KERNELS(F)
#endif
