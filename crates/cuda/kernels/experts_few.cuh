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

// n blocks of a tile, from number `first` of K on, times C columns (one or two): to the 16 rows of each column, `to` [C][16].
template <class F, int C> __device__ __forceinline__ void multiply(const uint8_t* piece, int first, int n, const InShared<F, C>& act, float* to) {
    using U = Unit<F>;
    const int lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4;
    float acc[4] = {};
    if constexpr (F::LEN == 32) {
        const uint8_t* own_q = act.q + min(gid, C - 1) * 32 + tig * 8;
#pragma unroll 4
        for (int u = 0; u < n; u++) {
            const uint8_t* b = piece + u * U::BLOCK;
            const int run = first + u;
            uint32_t a[4];
            F::codes(b, 0, tig * 64 + gid * 8, gid, tig, a);
            block32<F, C>(a, F::d(b, gid), F::m(b, gid), *(const uint2*)(own_q + run * C * 32), (const int2*)act.meta + run * C, acc);
        }
        if (tig == 0) {
#pragma unroll
            for (int c = 0; c < C; c++) *(float2*)(to + c * 16 + 2 * gid) = make_float2(acc[c], acc[2 + c]);
        }
    } else {
        const one::Mine<C> mine(gid);
#pragma unroll 1
        for (int u = 0; u < n; u++) {
            const int block = first + u;
            one::block256<F, C>(piece + u * U::BLOCK, act.q + block * C * 256, act.meta + block * C * 32, act.d + block * C, mine, gid, tig, acc[0]);
        }
        if (C == 2 || tig < 2) to[tig / 2 * 16 + 2 * gid + tig % 2] = acc[0];
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

// Rings of whole units, n stages a warp: where no more units are than stages of all, each has its own.
template <class F> struct Ring {
    uint8_t* smem;
    uint64_t* barriers;
    int n;

    static __device__ __forceinline__ int places(int n, int units) { return min(units, (int)blockDim.x / 32 * n); }
    static __device__ __forceinline__ uint8_t* end(uint8_t* smem, int n, int units) { return smem + (size_t)places(n, units) * (Unit<F>::BYTES + 16); }

    __device__ __forceinline__ Ring(uint8_t* smem, int n, int units) : smem(smem), barriers((uint64_t*)(smem + (size_t)places(n, units) * Unit<F>::BYTES)), n(n) {
        for (int i = threadIdx.x; i < places(n, units); i += blockDim.x) barrier_new(barriers + i);
        barriers_seen();
        __syncthreads();
    }
    __device__ __forceinline__ int place(int stage) const { return stage * (blockDim.x / 32) + threadIdx.x / 32; }
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
            const int place = ring.place(stage);
            copy_stage(ring.smem + place * Unit<F>::BYTES, blob + unit.at, unit.blocks * Unit<F>::BLOCK, ring.barriers + place);
            return;
        }
    }
    __device__ __forceinline__ void begin() {
        for (int s = 0; s < ring.n; s++) fetch(s);
    }
    // In a rehearsal (experts_route.cuh) it is called for the first one, with whatever is there.
    template <class Use> __device__ __forceinline__ void all(bool counts, Use use) {
        int stage = 0;
        uint32_t parity = 0;
#pragma unroll 1
        for (int u = threadIdx.x / 32; u < units; u += blockDim.x / 32) {
            const UnitAt unit = list[u];
            if (choice.blob(unit.j) == nullptr) continue;
            const int place = ring.place(stage);
            if (counts) barrier_wait(ring.barriers + place, parity);
            use(u, unit, ring.smem + place * Unit<F>::BYTES);
            if (!counts) return;
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
    const int t = blockIdx.y;
    const int runs = K / 32, blocks = K / F::LEN, chunks = (K + CHUNK - 1) / CHUNK, tiles = FF / 16;
    const int first = blockIdx.x * per, pairs = min(per, r.used * tiles - first), all = pairs * 2 * chunks;
    const Ring<F> ring(smem, stages, all);
    const InShared<F, 1> own(Ring<F>::end(smem, stages, all), K);
    float* part = (float*)own.end;
    const Choice choice(part + per * 2 * chunks * 16, r);
    UnitAt* list = (UnitAt*)choice.end;
    // All that can be known before it is known who is chosen.
    for (int u = threadIdx.x; u < all; u += blockDim.x) {
        const int chunk = u % chunks, pair = first + u / (2 * chunks), j = pair / tiles;
        const uint32_t tile_at = (uint32_t)((pair - j * tiles) * blocks + chunk * U::PER) * U::BLOCK;
        list[u] = {(u / chunks % 2 ? up_at : 0) + tile_at, (uint16_t)j, (uint8_t)chunk, (uint8_t)min(U::PER, blocks - chunk * U::PER)};
    }
#pragma unroll 1
    for (int turn = gridDim.y == 1 ? REHEARSAL : 1; turn < 2; turn++) {
        const bool counts = turn == 1;
        if (counts) {
            wait_for_previous();
            let_next_start();
            const int group = t / 8, column = t % 8;
#pragma unroll 1
            for (int i = threadIdx.x; i < runs * 2; i += blockDim.x) copy16(own.q + i * 16, (const uint8_t*)act.q + ((size_t)group * runs + i / 2) * 256 + column * 32 + i % 2 * 16);
            if constexpr (F::LEN == 32) {
#pragma unroll 1
                for (int i = threadIdx.x; i < runs; i += blockDim.x) copy_small<8>(own.meta + i * 8, act.meta + ((size_t)group * runs + i) * 8 + column);
            } else {
#pragma unroll 1
                for (int i = threadIdx.x; i < blocks; i += blockDim.x) copy_small<4>(own.d + i, act.d + ((size_t)group * blocks + i) * 8 + column);
                if constexpr (U::SUMS)
#pragma unroll 1
                    for (int i = threadIdx.x; i < blocks * 2; i += blockDim.x)
                        copy16(own.meta + i * 16, (const uint8_t*)act.s16 + ((size_t)group * blocks + i / 2) * 256 + column * 32 + i % 2 * 16);
            }
            copy_commit();
        }
        note_scores(r, scores_of(r, z, t), choice.room, blobs, choice.blobs);
        choose<Chosen::IDS>(r, scores_of(r, z, t), choice.room, choice.ids, choice.weights);
        Units<F> units(ring, choice, list, all);
        if (counts) units.begin();
        copy_wait<0>();
        __syncthreads();
        units.all(counts, [&](int u, const UnitAt& unit, const uint8_t* piece) {
            multiply<F, 1>(piece, unit.chunk * U::PER, unit.blocks, own, part + u * 16);
        });
        __syncthreads();
#pragma unroll 1
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
            if (gate_bias_at != 0 && counts) of[0] = __fadd_rn(of[0], floats(blob, gate_bias_at)[row]), of[1] = __fadd_rn(of[1], floats(blob, up_bias_at)[row]);
            float* to = counts ? y + ((size_t)t * r.used + j) * FF + row : part + i;
            *to = gated_value(f, of[0], of[1]);
        }
    }
}

// A block of the values of an expert's gated row, quantised to where `multiply` reads it; the codes are those of acts.cuh.
//
// Values that a lane holds of it: of blocks of 32, which are 8 lanes each, i counts fours; of blocks of 256, a warp each, blocks.
template <class F> using Held = float4[F::LEN == 32 ? 1 : 2];
template <class F> __device__ __forceinline__ void hold(const float* x, int i, bool live, Held<F>& v) {
    const float4* from = (const float4*)x + (F::LEN == 32 ? i : i * 64 + (int)threadIdx.x % 32);
#pragma unroll
    for (int w = 0; w < (F::LEN == 32 ? 1 : 2); w++) v[w] = live ? from[32 * w] : make_float4(0, 0, 0, 0);
}
template <class F> __device__ __forceinline__ void quantise_block(const InShared<F, Unit<F>::DOWN>& to, Held<F>& v, int i, bool live) {
    const int lane = threadIdx.x % 32;
    if constexpr (F::LEN == 32) {
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
        if (!live) return;
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
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x, t = blockIdx.y;
    const int blocks = FF / F::LEN, chunks = (FF + CHUNK - 1) / CHUNK;
    uint8_t* acts = Ring<F>::end(smem, stages, r.used * chunks);
    const int acts_bytes = (int)(InShared<F, C>(acts, FF).end - acts);
    float* part = (float*)(acts + (size_t)r.used * acts_bytes);
    float* out = part + r.used * chunks * C * 16;
    const Choice choice(out + r.used * 16, r);
    // First of all, before gate_up has filled the memory's queues.
    note_scores(r, scores_of(r, z, t), choice.room, blobs, choice.blobs);
    const Ring<F> ring(smem, stages, r.used * chunks);
    UnitAt* list = (UnitAt*)choice.end;
    for (int u = threadIdx.x; u < r.used * chunks; u += blockDim.x) {
        const int j = u / chunks, chunk = u - j * chunks;
        list[u] = {down_at + (uint32_t)(tile * blocks + chunk * U::PER) * U::BLOCK, (uint16_t)j, (uint8_t)chunk, (uint8_t)min(U::PER, blocks - chunk * U::PER)};
    }
    const bool is_weighed = choose<Chosen::WEIGHTS>(r, scores_of(r, z, t), choice.room, choice.ids, choice.weights);
    Units<F> units(ring, choice, list, r.used * chunks);
    units.begin();
    if (warp == 0) {
        if (!is_weighed) weigh(r, choice.room, choice.ids, choice.weights);
        if (tile == 0)
            for (int j = lane; j < r.used; j += 32) ids[t * r.used + j] = choice.ids[j], weights[t * r.used + j] = choice.weights[j];
    }
    const float* rows = x + (size_t)t * r.used * FF;
    wait_for_previous();
    let_next_start();
    // Fours, or blocks, of all experts, one or two of a lane on their way together.
    constexpr int AHEAD = 2, PIECE = F::LEN == 32 ? 4 : 256;
    const int each = FF / PIECE, all = r.used * each, own = F::LEN == 32 ? threadIdx.x : warp, step = F::LEN == 32 ? blockDim.x : warps;
    const int end = F::LEN == 32 ? (all + 31) / 32 * 32 : all;
    for (int first = own; first < end; first += AHEAD * step) {
        Held<F> v[AHEAD];
        int j[AHEAD];
        bool live[AHEAD];
#pragma unroll
        for (int h = 0; h < AHEAD; h++) {
            const int i = first + h * step;
            j[h] = min(i / each, r.used - 1), live[h] = i < all && choice.blob(j[h]) != nullptr;
            hold<F>(rows, i, live[h], v[h]);
        }
#pragma unroll
        for (int h = 0; h < AHEAD; h++)
            if (first + h * step < end) quantise_block<F>(InShared<F, C>(acts + j[h] * acts_bytes, FF), v[h], first + h * step - j[h] * each, live[h]);
    }
    __syncthreads();
    units.all(true, [&](int u, const UnitAt& unit, const uint8_t* piece) {
        multiply<F, C>(piece, unit.chunk * U::PER, unit.blocks, InShared<F, C>(acts + unit.j * acts_bytes, FF), part + u * C * 16);
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
