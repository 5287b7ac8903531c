// Experts of a few tokens, one product a pair of token and expert. Two launches behind the router's product, both of which choose by themselves
// whom its scores mean (experts_route.cuh): no list goes to the host, and none is waited for.
//
//   gate_up   y[t][j][F] = f(gate . x + bias) * (up . x + bias) for the j-th chosen expert of token t
//   down      y[t][D] = shared + sum over j of w[j] * (down . y[t][j] + bias), in the order of ids
//
// An expert is a blob of tiles: gate, up, down, biases. `blobs` says where each one is; 0: elsewhere, and who has it gives its row of D values to
// `down` in `foreign`.
//
// A unit is a chunk of 512 values of a tile; a warp takes every so many units of its thread block through a ring of bulk copies. `gate_up`: a thread
// block owns pairs of tiles, of gate and of up. `down`: a tile, of all chosen experts, so that it adds their outputs itself; it begins to fetch
// weights while gate_up still runs, which therefore lets it start only after its own wait: then the scores are there.
#pragma once
#include "acts.cuh"
#include "bells.cuh"
#include "experts_route.cuh"
#include "product.cuh"

namespace experts {

using one::at_shared;
using one::barrier_new;
using one::barrier_wait;
using one::barriers_seen;
using one::copy_small;
using one::copy_stage;

template <class F> struct Unit {
    static constexpr int BLOCK = F::BYTES * 16, PER = CHUNK / F::LEN, BYTES = PER * BLOCK;
    static constexpr bool SUMS = F::LEN == 256 && (F::MIN || F::BIAS != 0);
    // Columns that `down` multiplies for each expert: super-blocks take two passes.
    static constexpr int DOWN = F::LEN == 256 ? 2 : 1;
};

// Activations of C columns in shared memory: q [K/32][C][32 bytes]; meta of blocks of 32: [K/32][C] {sum, d}, of 256: [K/256][C][32 bytes] of sums;
// d of blocks of 256: [K/256][C].
template <class F, int C> struct InShared {
    uint8_t* q;
    uint8_t* meta;
    float* d;
    uint8_t* end;

    __device__ __forceinline__ InShared(uint8_t* at, int K) {
        q = at;
        meta = q + K * C;
        d = (float*)(meta + (F::LEN == 32 ? (K / 32 * C * 8 + 15) / 16 * 16 : Unit<F>::SUMS ? K / 256 * C * 32 : 0));
        end = (uint8_t*)(d + (F::LEN == 256 ? (K / 256 * C + 3) / 4 * 4 : 0));
    }
};

// n blocks of a tile, from number `first` of K on, times C columns. acc as block32 and end256 have it.
template <class F, int C> __device__ __forceinline__ void multiply(const uint8_t* piece, int first, int n, const InShared<F, C>& act, float (&acc)[4]) {
    using U = Unit<F>;
    const int lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4, at = tig * 64 + gid * 8, column = min(gid, C - 1);
    const uint8_t* own_q = act.q + column * 32 + tig * 8;
    if constexpr (F::LEN == 32) {
#pragma unroll 4
        for (int u = 0; u < n; u++) {
            const uint8_t* b = piece + u * U::BLOCK;
            const int run = first + u;
            uint32_t a[4];
            F::codes(b, 0, at, gid, tig, a);
            block32<F, C>(a, F::d(b, gid), F::m(b, gid), *(const uint2*)(own_q + run * C * 32), (const int2*)act.meta + run * C, acc);
        }
    } else {
        const uint8_t* own_sums = act.meta + column * 32 + tig * 8;
#pragma unroll 1
        for (int u = 0; u < n; u++) {
            const uint8_t* b = piece + u * U::BLOCK;
            const int block = first + u;
            int sum[4] = {};
#pragma unroll
            for (int run = 0; run < 8; run++) {
                uint32_t a[4];
                int2 scale[2];
                F::codes(b, run, at, gid, tig, a);
                scales256<F>(b, run, gid, scale);
                run256<F, C>(a, scale, *(const uint2*)(own_q + (block * 8 + run) * C * 32), sum);
            }
            uint32_t extra[4];
            uint2 s16 = make_uint2(0, 0);
            if constexpr (U::SUMS) extras<F>(b, gid, tig, extra), s16 = *(const uint2*)(own_sums + block * C * 32);
            end256<F, C>(extra, F::d(b, gid), F::m(b, gid), s16, act.d + block * C, sum, acc);
        }
    }
}

// Whom a thread block's token chose, in shared memory.
struct Choice {
    uint64_t* blobs;  // [E], filled up to fours
    RouteRoom room;
    int* ids;        // [used]
    float* weights;  // [used], or [groups_used] if those are more
    uint8_t* end;    // a multiple of 8

    __device__ __forceinline__ Choice(void* at, const Routing& r)
        : blobs((uint64_t*)at), room(blobs + RouteRoom::fours(r.experts), r.experts),
          ids((int*)((uint8_t*)(blobs + RouteRoom::fours(r.experts)) + RouteRoom::bytes(r.experts))), weights((float*)(ids + r.used)),
          end((uint8_t*)(ids + (r.used + max(r.used, r.groups_used) + 1) / 2 * 2)) {}
    __device__ __forceinline__ const uint8_t* blob(int j) const { return (const uint8_t*)blobs[ids[j]]; }
};

__device__ __forceinline__ const float* floats(const uint8_t* blob, uint32_t at) { return (const float*)(blob + at); }

// A warp's ring of whole units.
template <class F> struct Ring {
    uint8_t* stages;
    uint64_t* barriers;
    int n;

    __device__ __forceinline__ Ring(uint8_t* smem, int n) : n(n) {
        const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
        stages = smem + (size_t)warp * n * Unit<F>::BYTES;
        barriers = (uint64_t*)(smem + (size_t)warps * n * Unit<F>::BYTES) + warp * n;
        if (threadIdx.x % 32 == 0)
            for (int s = 0; s < n; s++) barrier_new(barriers + s);
        barriers_seen();
        __syncwarp();
    }
    static __device__ __forceinline__ uint8_t* end(uint8_t* smem, int n) { return smem + (size_t)(blockDim.x / 32) * n * (Unit<F>::BYTES + 16); }
};

// A unit: whose it is, its chunk and blocks, and where it begins in its blob.
struct UnitAt {
    uint32_t at;
    uint16_t j;
    uint8_t chunk, blocks;
};

// Has every unit of this warp, `warp`, `warp + warps`, ..., of a list in shared memory multiplied; those of experts that are nowhere are passed over.
// use(unit, place of the unit, piece) is called when its bytes are there. begin() starts the first copies.
template <class F> struct Units {
    Ring<F> ring;
    const Choice& choice;
    const UnitAt* list;
    int units, next;

    __device__ __forceinline__ Units(const Ring<F>& ring, const Choice& choice, const UnitAt* list, int units)
        : ring(ring), choice(choice), list(list), units(units), next(threadIdx.x / 32) {}
    __device__ __forceinline__ void fetch(int stage) {
        while (next < units) {
            const UnitAt unit = list[next];
            const uint8_t* blob = choice.blob(unit.j);
            next += blockDim.x / 32;
            if (blob == nullptr) continue;
            copy_stage(ring.stages + stage * Unit<F>::BYTES, blob + unit.at, unit.blocks * Unit<F>::BLOCK, ring.barriers + stage);
            return;
        }
    }
    __device__ __forceinline__ void begin() {
        for (int s = 0; s < ring.n; s++) fetch(s);
    }
    template <class Use> __device__ __forceinline__ void all(Use use) {
        int stage = 0;
        uint32_t parity = 0;
#pragma unroll 1
        for (int u = threadIdx.x / 32; u < units; u += blockDim.x / 32) {
            const UnitAt unit = list[u];
            if (choice.blob(unit.j) == nullptr) continue;
            barrier_wait(ring.barriers + stage, parity);
            use(u, unit, ring.stages + stage * Unit<F>::BYTES);
            __syncwarp();
            fetch(stage);
            if (++stage == ring.n) stage = 0, parity ^= 1;
        }
    }
};

// grid: (ceil(used * F / 16 / per), T): `per` pairs of tiles a thread block. z as scores_of has them, y [T, used, F]. act: T columns of one pass. Dynamic
// shared memory: rings, activations, sums of chunks [per][2][chunks][16], Choice, list of units.
template <class F>
__device__ __forceinline__ void gate_up(const float* z, const Routing& r, const uint64_t* blobs, uint32_t up_at, uint32_t gate_bias_at, uint32_t up_bias_at,
                                        const Acts& act, int K, int FF, int f, float* y, int per, int stages) {
    using U = Unit<F>;
    extern __shared__ __align__(128) uint8_t smem[];
    const int lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4, t = blockIdx.y;
    const int runs = K / 32, blocks = K / F::LEN, chunks = (K + CHUNK - 1) / CHUNK, tiles = FF / 16;
    const int first = blockIdx.x * per, pairs = min(per, r.used * tiles - first), all = pairs * 2 * chunks;
    const Ring<F> ring(smem, stages);
    const InShared<F, 1> own(Ring<F>::end(smem, stages), K);
    float* part = (float*)own.end;
    const Choice choice(part + per * 2 * chunks * 16, r);
    UnitAt* list = (UnitAt*)choice.end;
    // All that can be known before it is known who is chosen.
    for (int u = threadIdx.x; u < all; u += blockDim.x) {
        const int chunk = u % chunks, pair = first + u / (2 * chunks), j = pair / tiles;
        const uint32_t tile_at = (uint32_t)((pair - j * tiles) * blocks + chunk * U::PER) * U::BLOCK;
        list[u] = {(u / chunks % 2 ? up_at : 0) + tile_at, (uint16_t)j, (uint8_t)chunk, (uint8_t)min(U::PER, blocks - chunk * U::PER)};
    }
    wait_for_previous();
    let_next_start();
    for (int e = threadIdx.x; e < r.experts; e += blockDim.x) choice.blobs[e] = blobs[e];
    const int group = t / 8, column = t % 8;
    for (int i = threadIdx.x; i < runs * 2; i += blockDim.x) copy16(own.q + i * 16, (const uint8_t*)act.q + ((size_t)group * runs + i / 2) * 256 + column * 32 + i % 2 * 16);
    if constexpr (F::LEN == 32) {
        for (int i = threadIdx.x; i < runs; i += blockDim.x) copy_small<8>(own.meta + i * 8, act.meta + ((size_t)group * runs + i) * 8 + column);
    } else {
        for (int i = threadIdx.x; i < blocks; i += blockDim.x) copy_small<4>(own.d + i, act.d + ((size_t)group * blocks + i) * 8 + column);
        if constexpr (U::SUMS)
            for (int i = threadIdx.x; i < blocks * 2; i += blockDim.x)
                copy16(own.meta + i * 16, (const uint8_t*)act.s16 + ((size_t)group * blocks + i / 2) * 256 + column * 32 + i % 2 * 16);
    }
    copy_commit();
    choose(r, scores_of(r, z, t), choice.room, choice.ids, choice.weights);
    Units<F> units(ring, choice, list, all);
    units.begin();
    copy_wait<0>();
    __syncthreads();
    units.all([&](int u, const UnitAt& unit, const uint8_t* piece) {
        float acc[4] = {};
        multiply<F, 1>(piece, unit.chunk * U::PER, unit.blocks, own, acc);
        if (tig == 0) *(float2*)(part + u * 16 + 2 * gid) = make_float2(acc[0], acc[2]);
    });
    __syncthreads();
    for (int i = threadIdx.x; i < pairs * 16; i += blockDim.x) {
        const int pair = first + i / 16, j = list[i / 16 * 2 * chunks].j;
        const uint8_t* blob = choice.blob(j);
        if (blob == nullptr) continue;
        float of[2];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const float* from = part + (i / 16 * 2 + m) * chunks * 16 + i % 16;
            of[m] = from[0];
#pragma unroll 4
            for (int c = 1; c < chunks; c++) of[m] = __fadd_rn(of[m], from[c * 16]);
        }
        const int row = (pair - j * tiles) * 16 + i % 16;
        if (gate_bias_at != 0) of[0] = __fadd_rn(of[0], floats(blob, gate_bias_at)[row]), of[1] = __fadd_rn(of[1], floats(blob, up_bias_at)[row]);
        y[((size_t)t * r.used + j) * FF + row] = gated_value(f, of[0], of[1]);
    }
}

// A block of the values of an expert's gated row, quantised to where `multiply` reads it; the codes are those of acts.cuh.
template <class F> __device__ __forceinline__ void quantise_block(const InShared<F, Unit<F>::DOWN>& to, const float* x, int i, bool live) {
    const int lane = threadIdx.x % 32;
    if constexpr (F::LEN == 32) {
        // 8 lanes a block, 4 values a lane: i counts fours.
        float4 v[1] = {live ? *(const float4*)(x + 4 * i) : make_float4(0, 0, 0, 0)};
        uint32_t amax = largest_bits(v), word[1];
        int sum[1];
        for (int s = 1; s < 8; s *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, s));
        const float d = codes(v, amax, word, sum);
        int all = sum[0];
        for (int s = 1; s < 8; s *= 2) all += __shfl_xor_sync(~0u, all, s);
        if (!live) return;
        const int run = i / 8, group = i % 8;
        *(uint32_t*)(to.q + run * 32 + group % 4 * 8 + group / 4 * 4) = word[0];
        if (group == 0) ((int2*)to.meta)[run] = make_int2(all, __float_as_int(d));
    } else {
        // A warp a block: i counts blocks.
        const float4* from = (const float4*)(x + i * 256);
        float4 v[2] = {from[lane], from[lane + 32]};
#pragma unroll
        for (int p = 0; p < 2; p++) {
            uint32_t amax = largest_bits(v), word[2];
            int sum[2];
            for (int s = 1; s < 32; s *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, s));
            const float d = codes(v, amax, word, sum);
#pragma unroll
            for (int w = 0; w < 2; w++) {
                const int at = lane + 32 * w, group = at % 8, j = at / 4;
                *(uint32_t*)(to.q + ((i * 8 + at / 8) * 2 + p) * 32 + group % 4 * 8 + group / 4 * 4) = word[w];
                if constexpr (Unit<F>::SUMS) {
                    int all = sum[w];
                    for (int s = 1; s < 4; s *= 2) all += __shfl_xor_sync(~0u, all, s);
                    if (at % 4 == 0) *(__half*)(to.meta + (i * 2 + p) * 32 + j / 4 * 8 + j % 4 * 2) = __int2half_rn(all);
                }
            }
            if (lane == 0) to.d[i * 2 + p] = d;
            lose(v, word, d);
        }
    }
}

// Outputs of experts that are elsewhere.
struct Foreign {
    const float* rows;     // [T, used, D], or null
    const unsigned* bell;  // in host memory, reaches `number` when they are there; null: they are
    unsigned number;
    unsigned* flag;  // in device memory
    unsigned long long patience_ns;
    unsigned* late;
};
// Waits for them; by one thread of each thread block. The first one asks over the link, the others ask it.
__device__ __forceinline__ void await_rows(const Foreign& foreign) {
    if (blockIdx.x == 0) {
        await_bell(foreign.bell, foreign.number, foreign.patience_ns, foreign.late);
        asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(foreign.flag), "r"(foreign.number) : "memory");
        return;
    }
    for (;;) {
        unsigned found;
        asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(found) : "l"(foreign.flag) : "memory");
        if (found == foreign.number) return;
        __nanosleep(200);
    }
}

// grid: (D / 16, T). x [T, used, F] of gate_up; y [T, D]: what the shared expert gave, if there is one (is_shared), of which `taken` [T] says how
// much, or null; then the result. Dynamic shared memory: rings, activations of every chosen expert, sums of chunks
// [used][chunks][columns][16], outputs [used][16], Choice, list of units. ids, weights [T, used] are written, too.
template <class F>
__device__ __forceinline__ void down(const float* z, const Routing& r, const uint64_t* blobs, uint32_t down_at, uint32_t bias_at, const float* x,
                                     const Foreign& foreign, const float* taken, int is_shared, float* y, int D, int FF, int* ids, float* weights,
                                     int stages) {
    using U = Unit<F>;
    constexpr int C = U::DOWN;
    extern __shared__ __align__(128) uint8_t smem[];
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4, tile = blockIdx.x, t = blockIdx.y;
    const int blocks = FF / F::LEN, chunks = (FF + CHUNK - 1) / CHUNK;
    const Ring<F> ring(smem, stages);
    uint8_t* acts = Ring<F>::end(smem, stages);
    const int acts_bytes = (int)(InShared<F, C>(acts, FF).end - acts);
    float* part = (float*)(acts + (size_t)r.used * acts_bytes);
    float* out = part + r.used * chunks * C * 16;
    const Choice choice(out + r.used * 16, r);
    for (int e = threadIdx.x; e < r.experts; e += blockDim.x) choice.blobs[e] = blobs[e];
    UnitAt* list = (UnitAt*)choice.end;
    for (int u = threadIdx.x; u < r.used * chunks; u += blockDim.x) {
        const int j = u / chunks, chunk = u - j * chunks;
        list[u] = {down_at + (uint32_t)(tile * blocks + chunk * U::PER) * U::BLOCK, (uint16_t)j, (uint8_t)chunk, (uint8_t)min(U::PER, blocks - chunk * U::PER)};
    }
    const bool is_weighed = choose(r, scores_of(r, z, t), choice.room, choice.ids, choice.weights);
    Units<F> units(ring, choice, list, r.used * chunks);
    units.begin();
    if (warp == 0) {
        if (!is_weighed) weigh(r, choice.room, choice.weights);
        if (tile == 0)
            for (int j = lane; j < r.used; j += 32) ids[t * r.used + j] = choice.ids[j], weights[t * r.used + j] = choice.weights[j];
    }
    wait_for_previous();
    let_next_start();
    const float* rows = x + (size_t)t * r.used * FF;
    if constexpr (F::LEN == 32) {
        const int fours = FF / 4, all = r.used * fours;
        for (int i = threadIdx.x; i < (all + 31) / 32 * 32; i += blockDim.x) {
            const int j = min(i / fours, r.used - 1);
            quantise_block<F>(InShared<F, C>(acts + j * acts_bytes, FF), rows + (size_t)j * FF, i - j * fours, i < all && choice.blob(j) != nullptr);
        }
    } else {
        for (int i = warp; i < r.used * blocks; i += warps) {
            const int j = i / blocks;
            if (choice.blob(j) != nullptr) quantise_block<F>(InShared<F, C>(acts + j * acts_bytes, FF), rows + (size_t)j * FF, i % blocks, true);
        }
    }
    __syncthreads();
    units.all([&](int u, const UnitAt& unit, const uint8_t* piece) {
        float acc[4] = {};
        multiply<F, C>(piece, unit.chunk * U::PER, unit.blocks, InShared<F, C>(acts + unit.j * acts_bytes, FF), acc);
        if (tig == 0) {
#pragma unroll
            for (int c = 0; c < C; c++) *(float2*)(part + (u * C + c) * 16 + 2 * gid) = make_float2(acc[c], acc[2 + c]);
        }
    });
    if (foreign.bell != nullptr && threadIdx.x == 0) {
        bool is_any = false;
        for (int j = 0; j < r.used; j++) is_any |= choice.blob(j) == nullptr;
        if (is_any) await_rows(foreign);
    }
    __syncthreads();
    const volatile float* given = foreign.rows;
    for (int i = threadIdx.x; i < r.used * 16; i += blockDim.x) {
        const int j = i / 16, row = tile * 16 + i % 16;
        const uint8_t* blob = choice.blob(j);
        float both = 0.0f;
        if (blob == nullptr) {
            both = given != nullptr ? given[((size_t)t * r.used + j) * D + row] : __int_as_float(0x7fc00000);
        } else {
#pragma unroll
            for (int c = 0; c < C; c++) {
                const float* from = part + (j * chunks * C + c) * 16 + i % 16;
                float sum = from[0];
#pragma unroll 4
                for (int k = 1; k < chunks; k++) sum = __fadd_rn(sum, from[k * C * 16]);
                both = c == 0 ? sum : __fadd_rn(both, sum);
            }
            if (bias_at != 0) both = __fadd_rn(both, floats(blob, bias_at)[row]);
        }
        out[i] = both;
    }
    __syncthreads();
    if (threadIdx.x < 16) {
        float* to = y + (size_t)t * D + tile * 16 + threadIdx.x;
        float sum = is_shared ? *to : 0.0f;
        if (taken != nullptr) sum = __fmul_rn(sum, sigmoid(taken[t]));
        for (int j = 0; j < r.used; j++) sum = __fmaf_rn(choice.weights[j], out[j * 16 + threadIdx.x], sum);
        *to = sum;
    }
}

}  // namespace experts

#define EXPERTS_FEW_KERNELS(F)                                                                                                                              \
    extern "C" __global__ void __launch_bounds__(512, 2) gate_up(const float* z, ROUTING_PARAMETERS, const uint64_t* blobs, uint32_t up_at,                 \
                                                                 uint32_t gate_bias_at, uint32_t up_bias_at, const uint2* q, const int2* meta,             \
                                                                 const float* d, const uint2* s16, int K, int FF, int f, float* y, int per,                \
                                                                 int stages) {                                                                            \
        experts::gate_up<F>(z, ROUTING, blobs, up_at, gate_bias_at, up_bias_at, Acts{q, meta, d, s16}, K, FF, f, y, per, stages);                           \
    }                                                                                                                                                       \
    extern "C" __global__ void __launch_bounds__(512, 2) down(const float* z, ROUTING_PARAMETERS, const uint64_t* blobs, uint32_t down_at,                  \
                                                              uint32_t bias_at, const float* x, const float* rows, const unsigned* bell, unsigned number,  \
                                                              unsigned* flag, unsigned long long patience_ns, unsigned* late, const float* taken,           \
                                                              int is_shared, float* y, int D, int FF, int* ids, float* weights, int stages) {              \
        experts::down<F>(z, ROUTING, blobs, down_at, bias_at, x, experts::Foreign{rows, bell, number, flag, patience_ns, late}, taken, is_shared, y, D, FF, \
                         ids, weights, stages);                                                                                                           \
    }
