// Which experts a token uses, and how much each counts: docs/arithmetic.md, "Mixtures of experts". By one warp.
//
// Scores are compared as integers, of which the largest of a warp is one instruction.
#pragma once
#include <stdint.h>

#include "gates.cuh"

// A rehearsal: a kernel of one token does what follows its wait for the kernel ahead before it, too, for nothing: with whatever lies there, without waiting
// for copies, and without results. Instructions are at hand then when it counts. What the kernel ahead writes may be read, past the first-level cache
// alone. `for (turn = REHEARSAL; turn < 2; turn++)`: the last one counts. Where kernels do not start ahead of their turn there is none.
#if __CUDA_ARCH__ >= 900
constexpr int REHEARSAL = 0;
#else
constexpr int REHEARSAL = 1;
#endif

struct Routing {
    int experts, used;
    int weighing;  // 0 softmax of all, 1 softmax of the chosen, 2 sigmoid, 3 sigmoid over its sum
    float scale;
    int groups, groups_used;  // of neighbours, 0: all may be chosen together
    int parts;                // of each score: they are added, then the bias [E], if there is one
    const float* bias;
};

#define ROUTING_PARAMETERS int experts, int used, int weighing, float scale, int groups, int groups_used, int parts, const float *score_bias
#define ROUTING \
    Routing { experts, used, weighing, scale, groups, groups_used, parts, score_bias }

// The parts of a token's scores: [T, parts, E].
__device__ __forceinline__ const float* scores_of(const Routing& r, const float* z, int t) { return z + (size_t)t * r.parts * r.experts; }
// Not taken from the first-level cache: a kernel may read scores before it has waited for the one ahead. Parts are on their way together.
__device__ __forceinline__ float score(const Routing& r, const float* z, int e) {
    constexpr int AHEAD = 8;
    float part[AHEAD];
#pragma unroll
    for (int p = 0; p < AHEAD; p++) part[p] = p < r.parts ? __ldcg(z + p * r.experts + e) : 0.0f;
    const float bias = r.bias != nullptr ? r.bias[e] : 0.0f;
    float sum = part[0];
#pragma unroll
    for (int p = 1; p < AHEAD; p++)
        if (p < r.parts) sum = __fadd_rn(sum, part[p]);
    for (int p = AHEAD; p < r.parts; p++) sum = __fadd_rn(sum, __ldcg(z + p * r.experts + e));
    return r.bias != nullptr ? __fadd_rn(sum, bias) : sum;
}

// The order of scores: NaN is below every number, both zeros are one. Never 0, which is what has been taken.
__device__ __forceinline__ uint32_t score_key(float z) {
    const uint32_t u = __float_as_uint(z + 0.0f);
    return z != z ? 1u : u & 0x80000000u ? ~u : u | 0x80000000u;
}

// The numbers of the n best of `keys` [items], of equal ones the lower first, to `best` [n], best first. Their keys become 0.
__device__ __forceinline__ void select_best(uint32_t* keys, int items, int n, int* best) {
    const int lane = threadIdx.x % 32;
    uint32_t own = 0;
    int at = 0;
    auto look = [&]() {
        own = 0;
#pragma unroll 4
        for (int i = lane; i < items; i += 32) {
            const uint32_t key = keys[i];
            if (key > own) own = key, at = i;
        }
    };
    look();
    for (int s = 0; s < n; s++) {
        const uint32_t top = __reduce_max_sync(~0u, own);
        const uint32_t number = __reduce_min_sync(~0u, own == top ? (uint32_t)at : ~0u);
        if (at == number && own == top) {
            best[s] = at, keys[at] = 0;
            look();
        }
    }
    __syncwarp();
}

__device__ __forceinline__ float warp_largest(float m) {
    for (int s = 1; s < 32; s *= 2) {
        const float other = __shfl_xor_sync(~0u, m, s);
        if (other > m) m = other;
    }
    return m;
}

// Work space of a token, in shared memory: for all experts, filled up to fours.
struct RouteRoom {
    uint32_t* keys;
    float* s;
    static __host__ __device__ constexpr int fours(int experts) { return (experts + 3) / 4 * 4; }
    static __host__ __device__ constexpr int bytes(int experts) { return 8 * fours(experts); }
    __device__ __forceinline__ RouteRoom(void* at, int experts) : keys((uint32_t*)at), s((float*)at + fours(experts)) {}
};

// Only the experts of the best groups stay. s: the exponentials, or sigmoids, of all experts, of which nothing is left; list [groups_used].
__device__ __forceinline__ void keep_best_groups(const Routing& r, const RouteRoom& room, int* list) {
    const int lane = threadIdx.x % 32, size = r.experts / r.groups;
    uint32_t* of_groups = (uint32_t*)room.s;
    for (int from = 0; from < r.groups; from += 32) {
        const int g = from + lane;
        uint32_t key = 0;
        if (g < r.groups) {
            int first = -1, second = -1;
            for (int e = g * size; e < (g + 1) * size; e++) {
                const uint32_t own = score_key(room.s[e]);
                if (first < 0 || own > score_key(room.s[first])) {
                    second = first, first = e;
                } else if (second < 0 || own > score_key(room.s[second])) {
                    second = e;
                }
            }
            float sum = 0.0f + room.s[first];
            if (second >= 0) sum = sum + room.s[second];
            key = score_key(sum);
        }
        // Groups before these have been looked at.
        __syncwarp();
        if (g < r.groups) of_groups[g] = key;
        __syncwarp();
    }
    select_best(of_groups, r.groups, r.groups_used, list);
    // Groups that were taken have no key any more.
    for (int e = lane; e < r.experts; e += 32)
        if (of_groups[e / size] != 0) room.keys[e] = 0;
    __syncwarp();
}

// From exponentials or sigmoids, of the chosen (`weights`) or, where all are summed, of all (room.s), to the weights of `ids`. By one warp.
__device__ __forceinline__ void weigh(const Routing& r, const RouteRoom& room, const int* ids, float* weights) {
    const int lane = threadIdx.x % 32;
    const bool is_of_all = r.weighing == 0;
    float sum = 0.0f;
    if (is_of_all) {
        if (lane < 16)
            for (int e = lane; e < r.experts; e += 16) sum = sum + room.s[e];
        sum = __shfl_sync(~0u, math::sum_lanes(sum), 0);
    } else {
#pragma unroll 8
        for (int j = 0; j < r.used; j++) sum = sum + weights[j];
    }
    __syncwarp();
    for (int j = lane; j < r.used; j += 32) {
        const float own = is_of_all ? room.s[ids[j]] : weights[j], w = r.weighing == 2 ? own : own / sum;
        weights[j] = w * r.scale;
    }
    __syncwarp();
}

// The experts of a token with scores z (scores_of), ascending, to ids [used] and weights [used], both with room for groups_used, too.
__device__ __forceinline__ void route(const Routing& r, const float* z, const RouteRoom& room, int* ids, float* weights) {
    const int lane = threadIdx.x % 32;
    const bool is_softmax = r.weighing < 2, is_of_all = r.weighing == 0;
    float m = -INFINITY;
#pragma unroll 4
    for (int e = lane; e < r.experts; e += 32) {
        const float x = score(r, z, e);
        room.s[e] = x, room.keys[e] = score_key(x);
        if (x > m) m = x;
    }
    m = warp_largest(m);
    __syncwarp();
    auto of = [&](float x) { return is_softmax ? math::exp(x - m) : sigmoid(x); };
    if (r.groups > 0) {
        for (int e = lane; e < r.experts; e += 32) room.s[e] = of(room.s[e]);
        __syncwarp();
        keep_best_groups(r, room, (int*)weights);
        for (int e = lane; e < r.experts; e += 32) room.s[e] = score(r, z, e);
        __syncwarp();
    }
    int* list = (int*)weights;
    select_best(room.keys, r.experts, r.used, list);
    for (int j = lane; j < r.used; j += 32) {
        int before = 0;
        for (int i = 0; i < r.used; i++) before += list[i] < list[j];
        ids[before] = list[j];
    }
    __syncwarp();
    if (is_of_all) {
        for (int e = lane; e < r.experts; e += 32) room.s[e] = of(room.s[e]);
    } else {
        if (is_softmax) {
            m = -INFINITY;
            for (int j = lane; j < r.used; j += 32)
                if (room.s[ids[j]] > m) m = room.s[ids[j]];
            m = warp_largest(m);
        }
        for (int j = lane; j < r.used; j += 32) weights[j] = of(room.s[ids[j]]);
    }
    __syncwarp();
    weigh(r, room, ids, weights);
}

// What `choose` is asked for besides ids: nothing, or what `weigh` makes weights of.
enum class Chosen { IDS, WEIGHTS };

// What `choose` goes by, read by a whole thread block: a token's scores, and `blobs` [experts] to `to`, if they are wanted.
__device__ __forceinline__ void note_scores(const Routing& r, const float* z, const RouteRoom& room, const uint64_t* blobs = nullptr, uint64_t* to = nullptr) {
#pragma unroll 1
    for (int e = threadIdx.x; e < RouteRoom::fours(r.experts); e += blockDim.x) {
        const bool is_one = e < r.experts;
        const uint64_t blob = blobs != nullptr && is_one ? __ldcg(blobs + e) : 0;
        const float x = is_one ? score(r, z, e) : 0.0f;
        room.s[e] = x, room.keys[e] = is_one ? score_key(x) : 0u;
        if (blobs != nullptr) to[e] = blob;
    }
}

// The experts of a token whose scores are noted to ids [used], by a whole thread block: SHARE threads look at an expert, and count those that come
// before it. Whether the weights are done, too; else `weigh` is still to follow. 16 bytes divide the room's place.
template <Chosen WHAT> __device__ __forceinline__ bool choose(const Routing& r, const float* z, const RouteRoom& room, int* ids, float* weights) {
    constexpr int SHARE = 4;
    __shared__ float largest;
    if (r.groups > 0) {
        __syncthreads();
        if (threadIdx.x < 32) route(r, z, room, ids, weights);
        __syncthreads();
        return true;
    }
    const int fours = RouteRoom::fours(r.experts) / 4;
    __syncthreads();
    // In the order of scores first, where the weights will be.
    int* order = (int*)weights;
    const int part = threadIdx.x % SHARE, step = blockDim.x / SHARE, rounds = (r.experts + step - 1) / step;
    for (int n = 0, e = threadIdx.x / SHARE; n < rounds; n++, e += step) {
        const bool is_one = e < r.experts;
        const uint32_t own = is_one ? room.keys[e] : ~0u;
        int before = 0;
#pragma unroll 4
        for (int i = part; i < fours; i += SHARE) {
            const uint4 k = ((const uint4*)room.keys)[i];
            // Of equal ones the lower numbers come before; no expert's key is 0.
            const uint32_t over = own - (4 * i + 3 < e);
            before += (k.x > over) + (k.y > over) + (k.z > over) + (k.w > over);
            if (i == e / 4) before += (e % 4 > 0 && k.x == own) + (e % 4 > 1 && k.y == own) + (e % 4 > 2 && k.z == own);
        }
        for (int s = 1; s < SHARE; s *= 2) before += __shfl_xor_sync(~0u, before, s);
        if (is_one && part == 0 && before < r.used) {
            order[before] = e;
            if (before == 0) largest = room.s[e];
        }
    }
    __syncthreads();
    const bool is_softmax = r.weighing < 2;
    const float m = largest;
    auto of = [&](float x) { return is_softmax ? math::exp(x - m) : sigmoid(x); };
    // By a warp, which has read the order before it writes weights there.
    if (threadIdx.x < 32) {
        for (int j = threadIdx.x; j < r.used; j += 32) {
            const int own = order[j];
            int at = 0;
            for (int i = 0; i < r.used; i++) at += order[i] < own;
            ids[at] = own;
        }
        __syncwarp();
        if (WHAT == Chosen::WEIGHTS && r.weighing != 0)
            for (int j = threadIdx.x; j < r.used; j += 32) weights[j] = of(room.s[ids[j]]);
    }
    if (WHAT == Chosen::WEIGHTS && r.weighing == 0) {
        for (int e = threadIdx.x; e < r.experts; e += blockDim.x) room.s[e] = of(room.s[e]);
    }
    __syncthreads();
    return false;
}
