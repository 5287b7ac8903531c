// Experts of many tokens: what is not a product, for all formats. docs/arithmetic.md, "Mixtures of experts".
//
// A pair is a token and one of its experts, number t * used + j. Each expert's pairs get places side by side, in blocks of PAD places of which the
// last may have some to spare; a place is a row of the products' outputs, and with one or two passes a column or two of their inputs.
//
//   scores    router [E, D], x [T, D] of a few tokens -> parts of scores, a chunk of 512 values each (experts_route.cuh)
//   normed_scores  the same of one token's norm(x + delta) * w, which is kept, as are its blocks
//   ask       scores [E], x [D] of one token -> where its experts are; ids [used], and x if not all are in slots, in host memory, for whoever places the others or computes some
//   route     scores [T, E] -> ids, weights [T, used]
//   group     ids -> place [pairs]; pair [places], -1 to spare; experts [blocks]; count of blocks; each expert's pairs, to host memory
//   gather    a token's blocks, as acts.cu leaves them -> columns of its places, as gemm_many.cuh reads them
//   gated     gate and up [places, 2 F] -> the same of f(gate) * up, biases added before
//   adopt     outputs that the CPU gives, in host memory -> their places
//   combine   outputs [places, D] -> y [T, D]
#include "acts.cuh"
#include "bells.cuh"
#include "experts_route.cuh"
#include "heads.cuh"
#include "mma.cuh"

namespace {

constexpr int ROUTE_WARPS = 8, GROUP_THREADS = 1024, ASK_THREADS = 256, EXPERTS_MAX = 1024;

// Exclusive sum over the threads of a full thread block; `total` of all.
__device__ __forceinline__ int sum_before(int value, int* of_warp, int& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = value;
    for (int s = 1; s < 32; s *= 2) {
        const int other = __shfl_up_sync(~0u, sum, s);
        if (lane >= s) sum += other;
    }
    if (lane == 31) of_warp[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        int all = of_warp[lane];
        for (int s = 1; s < 32; s *= 2) {
            const int other = __shfl_up_sync(~0u, all, s);
            if (lane >= s) all += other;
        }
        of_warp[lane] = all;
    }
    __syncthreads();
    total = of_warp[31];
    return sum - value + (warp > 0 ? of_warp[warp - 1] : 0);
}

// The piece of 16 bytes that holds half `half` of a run's codes of a column, where they are arranged (acts.cuh).
__device__ __forceinline__ uint4* piece_of(void* q, int column, int run, int half, int atoms) {
    const int n = arranged_row(column);
    return (uint4*)q + ((size_t)(run / 4) * atoms * 8 + n) * 8 + ((run % 4 * 2 + half) ^ n % 8);
}
// A run's codes of a token, in the order of K. from_atoms: how they are arranged, or 0.
__device__ __forceinline__ void run_of(uint4* q, int t, int run, int runs, int from_atoms, uint4 (&x)[2]) {
    if (from_atoms > 0) {
        x[0] = *piece_of(q, t, run, 0, from_atoms), x[1] = *piece_of(q, t, run, 1, from_atoms);
        return;
    }
    const uint4* from = q + ((size_t)(t / 8) * runs + run) * 16 + t % 8 * 2;
    const uint4 a = from[0], b = from[1];
    x[0] = make_uint4(a.x, a.z, b.x, b.z), x[1] = make_uint4(a.y, a.w, b.y, b.w);
}
__device__ __forceinline__ float bias_of(const uint64_t* blobs, int expert, uint32_t at, int i) { return ((const float*)(blobs[expert] + at))[i]; }

__device__ __forceinline__ float value(const float* p) { return *p; }
__device__ __forceinline__ float value(const __half* p) { return __half2float(*p); }
__device__ __forceinline__ float value(const __nv_bfloat16* p) { return __bfloat162float(*p); }

constexpr int SCORE_CHUNK = 512, SCORE_THREADS = 128;

// A chain of products of a row, 16 values apart, with n fours of x, all in shared memory; the next ones are read while those before are added.
template <class W> __device__ __forceinline__ float score_chain(const W* w, const float4* x, int n) {
    constexpr int AHEAD = 4;
    float acc = 0.0f, of_w[2][AHEAD][4];
    float4 of_x[2][AHEAD];
    auto read = [&](int set, int k) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            of_x[set][j] = x[k + j];
#pragma unroll
            for (int i = 0; i < 4; i++) of_w[set][j][i] = value(w + (k + j) * 64 + i * 16);
        }
    };
    auto add = [&](const float (&v)[4], const float4& a) { acc = __fmaf_rn(v[3], a.w, __fmaf_rn(v[2], a.z, __fmaf_rn(v[1], a.y, __fmaf_rn(v[0], a.x, acc)))); };
    const int whole = n / (2 * AHEAD) * (2 * AHEAD);
    if (whole > 0) read(0, 0);
#pragma unroll 1
    for (int k = 0; k < whole; k += 2 * AHEAD) {
        read(1, k + AHEAD);
#pragma unroll
        for (int j = 0; j < AHEAD; j++) add(of_w[0][j], of_x[0][j]);
        read(0, min(k + 2 * AHEAD, whole - AHEAD));
#pragma unroll
        for (int j = 0; j < AHEAD; j++) add(of_w[1][j], of_x[1][j]);
    }
#pragma unroll 1
    for (int k = whole; k < n; k++) {
        const W* v = w + k * 64;
        const float own[4] = {value(v), value(v + 16), value(v + 32), value(v + 48)};
        add(own, x[k]);
    }
    return acc;
}

// All weights of the thread block are under way before the kernel ahead has ended; what takes time is the chain of 512 additions.
template <class W> __device__ __forceinline__ void score_parts(const W* __restrict__ w, const float* x, float* y, int E, int K, int tokens) {
    extern __shared__ __align__(16) uint8_t room[];
    let_next_start();
    const int tile = blockIdx.x, chunk = blockIdx.y, k0 = chunk * SCORE_CHUNK, n = min(SCORE_CHUNK, K - k0), r = threadIdx.x % 16;
    const uint8_t* from = (const uint8_t*)(w + ((size_t)tile * K + k0) * 16);
#pragma unroll 4
    for (int i = threadIdx.x * 16; i < n * 16 * (int)sizeof(W); i += SCORE_THREADS * 16) copy16(room + i, from + i);
    float* sx = (float*)(room + SCORE_CHUNK * 16 * sizeof(W));
    wait_for_previous();
    for (int t = 0; t < tokens; t++)
        for (int i = threadIdx.x * 4; i < n; i += SCORE_THREADS * 4) copy16(sx + t * SCORE_CHUNK + i, x + (size_t)t * K + k0 + i);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    const int row = tile * 16 + r;
    const W* own = (const W*)room + r;
    for (int t = threadIdx.x / 16; t < tokens; t += SCORE_THREADS / 16) {
        const float acc = score_chain(own, (const float4*)(sx + t * SCORE_CHUNK), n / 4);
        if (row < E) y[((size_t)t * gridDim.y + chunk) * E + row] = acc;
    }
}

// What of a token is normed, and where everything that is made of it goes. x, delta, w, sum, normed [D]; delta, w, sum, normed and blocks may be null. Nobody
// writes what others read: sum, x + delta, is neither of the two.
struct Entry {
    const float *x, *delta, *w;
    float *sum, eps, *normed;
    ActsOut blocks32, blocks256;
};

// Every thread block norms all of the token, and keeps a chunk of it; those of the first tile write it.
template <class W> __device__ __forceinline__ void normed_score_parts(const W* __restrict__ w, const Entry& in, float* y, int E, int K) {
    extern __shared__ __align__(16) uint8_t room[];
    __shared__ float factor;
    let_next_start();
    const int tile = blockIdx.x, chunk = blockIdx.y, k0 = chunk * SCORE_CHUNK, n = min(SCORE_CHUNK, K - k0);
    const uint8_t* from = (const uint8_t*)(w + ((size_t)tile * K + k0) * 16);
#pragma unroll 4
    for (int i = threadIdx.x * 16; i < n * 16 * (int)sizeof(W); i += SCORE_THREADS * 16) copy16(room + i, from + i);
    copy_commit();
    float* row = (float*)(room + SCORE_CHUNK * 16 * sizeof(W));
    // The thread's own four values of the chunk.
    const int own = k0 / 4 + threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, e = tile * 16 + lane;
    const bool live = (int)threadIdx.x < n / 4;
    const float4 by = in.w != nullptr && live ? ((const float4*)in.w)[own] : make_float4(1, 1, 1, 1);
    // In a rehearsal the beginning of the chain, only.
#pragma unroll 1
    for (int turn = REHEARSAL; turn < 2; turn++) {
        const bool counts = turn == 1, writes = counts && tile == 0;
        if (counts) wait_for_previous();
#pragma unroll 4
        for (int i = threadIdx.x; i < K / 4; i += SCORE_THREADS) {
            float4 v = __ldcg((const float4*)in.x + i);
            if (in.delta != nullptr) {
                const float4 z = __ldcg((const float4*)in.delta + i);
                v = make_float4(v.x + z.x, v.y + z.y, v.z + z.z, v.w + z.w);
            }
            ((float4*)row)[i] = v;
        }
        const float g = block_inverse_rms(row, K, in.eps, &factor);
        float4 v = make_float4(0, 0, 0, 0);
        if (live) {
            v = ((float4*)row)[own];
            if (writes && in.sum != nullptr) ((float4*)in.sum)[own] = v;
            v = make_float4(v.x * g * by.x, v.y * g * by.y, v.z * g * by.z, v.w * g * by.w);
            ((float4*)row)[own] = v;
            if (writes && in.normed != nullptr) ((float4*)in.normed)[own] = v;
        }
        if (writes && in.blocks32.q != nullptr) emit_32(in.blocks32, v, 0, own / 8, own % 8, live);
        if (counts) copy_wait<0>();
        __syncthreads();
        if (warp == 0 && lane < 16 && e < E) {
            const float sum = score_chain((const W*)room + lane, (const float4*)(row + k0), counts ? n / 4 : min(n / 4, 8));
            *(counts ? y + chunk * E + e : &factor) = sum;
        }
        if (warp > 0 && writes && in.blocks256.q != nullptr)
            for (int block = k0 / 256 + warp - 1; block < (k0 + n) / 256; block += SCORE_THREADS / 32 - 1) {
                const float4* at = (const float4*)(row + block * 256);
                float4 x[2] = {at[lane], at[lane + 32]};
                emit_256(in.blocks256, x, 0, block);
            }
        __syncthreads();
    }
}

}  // namespace

// W [E, K] in tiles, K a multiple of 4; x [T, K]; y [T, chunks, E]. grid: (tiles, chunks). Dynamic shared memory: a chunk of a tile, and of each token.
extern "C" __global__ void __launch_bounds__(SCORE_THREADS) scores_f32(const float* w, const float* x, float* y, int E, int K, int tokens) { score_parts(w, x, y, E, K, tokens); }
extern "C" __global__ void __launch_bounds__(SCORE_THREADS) scores_f16(const __half* w, const float* x, float* y, int E, int K, int tokens) { score_parts(w, x, y, E, K, tokens); }
extern "C" __global__ void __launch_bounds__(SCORE_THREADS) scores_bf16(const __nv_bfloat16* w, const float* x, float* y, int E, int K, int tokens) {
    score_parts(w, x, y, E, K, tokens);
}

// One token's, of norm(x + delta) * w; y [chunks, E], the rest as Entry says. Dynamic shared memory: a chunk of a tile, and the token.
#define NORMED_SCORES(NAME, W)                                                                                                                                \
    extern "C" __global__ void __launch_bounds__(SCORE_THREADS) NAME(const W* router, const float* x, const float* delta, const float* w, float* sum, float eps, \
                                                                     float* normed, float* y, int E, int K, uint32_t* q32, int2* meta, uint32_t* q256,        \
                                                                     float* d256, __half* s16) {                                                             \
        normed_score_parts(router, Entry{x, delta, w, sum, eps, normed, {q32, meta, nullptr, nullptr, K, 1}, {q256, nullptr, d256, s16, K, 1}}, y, E, K);       \
    }
NORMED_SCORES(normed_scores_f32, float)
NORMED_SCORES(normed_scores_f16, __half)
NORMED_SCORES(normed_scores_bf16, __nv_bfloat16)

// grid: ceil(T / ROUTE_WARPS). Dynamic shared memory, for each warp: RouteRoom, and weights [used], or [groups_used] if those are more.
extern "C" __global__ void __launch_bounds__(32 * ROUTE_WARPS) route(const float* z, ROUTING_PARAMETERS, int tokens, int* ids, float* weights) {
    extern __shared__ float rooms[];
    wait_for_previous();
    let_next_start();
    const int warp = threadIdx.x / 32, t = blockIdx.x * ROUTE_WARPS + warp, own = max(used, groups_used);
    if (t >= tokens) return;
    float* room = rooms + warp * (RouteRoom::bytes(experts) / 4 + own);
    float* w = room + RouteRoom::bytes(experts) / 4;
    route(ROUTING, scores_of(ROUTING, z, t), RouteRoom(room, experts), ids + (size_t)t * used, w);
    for (int j = threadIdx.x % 32; j < used; j += 32) weights[(size_t)t * used + j] = w[j];
}

// One token: where each of the chosen experts is, to `blobs` [E], of the chosen alone. `held` [E] has the addresses of those that are in slots, else 0. If all chosen
// ones are, that is all, and the host hears of it: `told` [used + 1], in host memory, gets their ids, each plus 1, and GOES_ON. If not, `x_told` [D] is
// written there, too, before they are, and WAITS; then the host says in `answer` [used] where they are (0: with the host), and rings. `flag` becomes 0. One thread
// block. Dynamic shared memory: RouteRoom, weights as in `route`, ids [used].
constexpr unsigned GOES_ON = 1, WAITS = 2;
extern "C" __global__ void __launch_bounds__(ASK_THREADS) ask(const float* z, ROUTING_PARAMETERS, const float* x, int D, const uint64_t* held, unsigned* told, float* x_told, unsigned number,
                                                              const unsigned* answer_bell, const uint64_t* answer, uint64_t* blobs, unsigned* flag, unsigned long long patience_ns,
                                                              unsigned* late) {
    extern __shared__ __align__(16) uint8_t room[];
    __shared__ bool is_there;
    float* weights = (float*)(room + RouteRoom::bytes(experts));
    int* ids = (int*)(weights + max(used, groups_used));
#pragma unroll 1
    for (int turn = REHEARSAL; turn < 2; turn++) {
        if (turn == 1) {
            wait_for_previous();
            let_next_start();
        }
        note_scores(ROUTING, scores_of(ROUTING, z, 0), RouteRoom(room, experts));
        choose<Chosen::IDS>(ROUTING, scores_of(ROUTING, z, 0), RouteRoom(room, experts), ids, weights);
    }
    bool is_missing = false;
    for (int j = threadIdx.x; j < used; j += ASK_THREADS) {
        const uint64_t at = __ldcg(held + ids[j]);
        blobs[ids[j]] = at;
        is_missing |= at == 0;
    }
    if (threadIdx.x == 0) *flag = 0;
    const bool waits = __syncthreads_or(is_missing);
    if (waits) {
        for (int i = threadIdx.x; i < D / 4; i += ASK_THREADS) ((float4*)x_told)[i] = ((const float4*)x)[i];
        __threadfence_system();
        __syncthreads();
    }
    volatile unsigned* to = told;
    for (int j = threadIdx.x; j < used; j += ASK_THREADS) to[j] = ids[j] + 1;
    if (threadIdx.x == 0) to[used] = waits ? WAITS : GOES_ON;
    if (!waits) return;
    if (threadIdx.x == 0) is_there = await_bell(answer_bell, number, patience_ns, late);
    __syncthreads();
    const volatile uint64_t* from = answer;
    for (int j = threadIdx.x; j < used; j += ASK_THREADS) blobs[ids[j]] = is_there ? from[j] : 0;
}

// One thread block. `told` [E] is in host memory, or null; the bell there gets `number` when it is written.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS) group(const int* ids, int pairs, int experts, int pad, int* place, int* pair, int* block_experts, int* count, int* told,
                                                                  unsigned* bell, unsigned number) {
    __shared__ int n[EXPERTS_MAX], next[EXPERTS_MAX], of_warp[32];
    wait_for_previous();
    let_next_start();
    const int e = threadIdx.x;
    n[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += GROUP_THREADS) atomicAdd(n + ids[i], 1);
    __syncthreads();
    if (told != nullptr) {
        if (e < experts) told[e] = n[e];
        __threadfence_system();
        __syncthreads();
        if (e == 0) ring_bell(bell, number);
    }
    const int blocks = e < experts ? (n[e] + pad - 1) / pad : 0;
    int all;
    const int first = sum_before(blocks, of_warp, all);
    next[e] = first * pad;
    for (int b = 0; b < blocks; b++) block_experts[first + b] = e;
    if (e == 0) *count = all;
    for (int i = threadIdx.x; i < all * pad; i += GROUP_THREADS) pair[i] = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += GROUP_THREADS) {
        const int at = atomicAdd(next + ids[i], 1);
        place[i] = at, pair[at] = i;
    }
}

// A thread a run of 32 values of a place. grid: (ceil(runs filled up to 4 / 16), places / 16); 256 threads. `places` in all, of which count * pad are used.
// from_atoms: how the tokens' blocks are arranged, 0 where they are not. scale [2][K / 32][places]: d, then d * sum.
extern "C" __global__ void __launch_bounds__(256) gather_32(const int* pair, const int* count, int pad, int used, uint4* q, const float* meta, int from_atoms, uint8_t* image,
                                                            float* scale, int K, int places) {
    wait_for_previous();
    let_next_start();
    const int i = blockIdx.x * 256 + threadIdx.x, run = i / 64 * 4 + i % 4, runs = K / 32, at = blockIdx.y * 16 + i / 4 % 16;
    if (blockIdx.y * 16 >= *count * pad || run >= runs || pair[at] < 0) return;
    const int t = pair[at] / used;
    uint4 x[2];
    run_of(q, t, run, runs, from_atoms, x);
    *piece_of(image, at, run, 0, places / 8) = x[0], *piece_of(image, at, run, 1, places / 8) = x[1];
    float d, sum;
    if (from_atoms > 0) {
        const size_t from = (size_t)run * from_atoms * 8 + t;
        d = meta[from], sum = meta[(size_t)runs * from_atoms * 8 + from];
    } else {
        const int2 m = ((const int2*)meta)[((size_t)(t / 8) * runs + run) * 8 + t % 8];
        d = __int_as_float(m.y), sum = __fmul_rn(d, (float)m.x);
    }
    scale[(size_t)run * places + at] = d, scale[(size_t)(runs + run) * places + at] = sum;
}

extern "C" __global__ void __launch_bounds__(256) gather_256(const int* pair, const int* count, int pad, int used, uint4* q, const float* d, const uint4* s16, int from_atoms,
                                                             uint8_t* image, float* scale, uint4* sums, int K, int places) {
    wait_for_previous();
    let_next_start();
    const int i = blockIdx.x * 256 + threadIdx.x, run = i / 64 * 4 + i % 4, runs = K / 32, at = blockIdx.y * 16 + i / 4 % 16;
    if (blockIdx.y * 16 >= *count * pad || run >= runs || pair[at] < 0) return;
    const int t = pair[at] / used, block = run / 8;
    uint4 x[2];
    run_of(q, t, run, runs, from_atoms, x);
    *piece_of(image, at, run, 0, places / 8) = x[0], *piece_of(image, at, run, 1, places / 8) = x[1];
    if (run % 8 != 0) return;
    const size_t own = ((size_t)(t / 8) * (K / 256) + block) * 8 + t % 8;
    scale[(size_t)block * places + at] = d[from_atoms > 0 ? (size_t)block * from_atoms * 8 + t : own];
    const uint4* from = s16 + (from_atoms > 0 ? (size_t)block * from_atoms * 8 + arranged_row(t) : own) * 2;
    uint4* to = sums + ((size_t)block * places + arranged_row(at)) * 2;
    to[0] = from[0], to[1] = from[1];
}

// Four values of a place, gated; x [places, 2 F]: gates, then ups.
__device__ __forceinline__ float4 gated_four(const float* x, int at, int i, int FF, int f, const uint64_t* blobs, int expert, uint32_t gate_bias_at, uint32_t up_bias_at) {
    const float *gate = x + (size_t)at * 2 * FF + i, *up = gate + FF;
    float of[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float g = gate[k], u = up[k];
        if (gate_bias_at != 0) g = g + bias_of(blobs, expert, gate_bias_at, i + k), u = u + bias_of(blobs, expert, up_bias_at, i + k);
        of[k] = gated_value(f, g, u);
    }
    return make_float4(of[0], of[1], of[2], of[3]);
}

// A thread four values. grid: (ceil(F / 4 / 128), places); 128 threads. `columns` in all.
extern "C" __global__ void __launch_bounds__(128) gated_32(const int* pair, const int* count, int pad, const int* block_experts, const uint64_t* blobs, uint32_t gate_bias_at,
                                                           uint32_t up_bias_at, const float* x, int f, uint32_t* image, int2* scale, int FF, int columns) {
    wait_for_previous();
    let_next_start();
    const int i = blockIdx.x * 128 + threadIdx.x, at = blockIdx.y, run = i / 8;
    if (at >= *count * pad || pair[at] < 0) return;
    const int expert = block_experts[at / pad];
    const bool live = run < FF / 32 && blobs[expert] != 0;
    float4 v = make_float4(0, 0, 0, 0);
    if (live) v = gated_four(x, at, 4 * i, FF, f, blobs, expert, gate_bias_at, up_bias_at);
    emit_32({image, scale, nullptr, nullptr, FF, 1 + 4 * (columns / 8)}, v, at, run, i % 8, live);
}

// A warp a block of 256, in two passes. grid: (ceil(F / 256 / 4), places); 128 threads.
extern "C" __global__ void __launch_bounds__(128) gated_256(const int* pair, const int* count, int pad, const int* block_experts, const uint64_t* blobs, uint32_t gate_bias_at,
                                                            uint32_t up_bias_at, const float* x, int f, uint32_t* image, float* scale, __half* sums, int FF, int columns) {
    wait_for_previous();
    let_next_start();
    const int lane = threadIdx.x % 32, block = blockIdx.x * 4 + threadIdx.x / 32, at = blockIdx.y;
    if (at >= *count * pad || block >= FF / 256 || pair[at] < 0) return;
    const int expert = block_experts[at / pad];
    if (blobs[expert] == 0) return;
    float4 v[2];
#pragma unroll
    for (int w = 0; w < 2; w++) v[w] = gated_four(x, at, block * 256 + 128 * w + 4 * lane, FF, f, blobs, expert, gate_bias_at, up_bias_at);
    emit_256({image, nullptr, scale, sums, FF, 2 + 4 * (columns / 8)}, v, at, block);
}

// rows [n, D] and whose they are, pairs [n], are in host memory. grid: (ceil(D / 4 / 256), n).
extern "C" __global__ void __launch_bounds__(256) adopt(const int* pairs, const float* rows, const int* place, float* outputs, int D) {
    wait_for_previous();
    let_next_start();
    const int i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (i >= D / 4) return;
    ((float4*)(outputs + (size_t)place[pairs[row]] * D))[i] = ((const float4*)(rows + (size_t)row * D))[i];
}

// y = start; then y = fma(weight, output + bias, y) for each of a token's experts; the outputs of those that are not here (blob 0) have their biases. Start: what the shared expert gave, if there is one (is_shared),
// of which `taken` [T] says how much, or null; else 0. grid: (ceil(D / 4 / 256), T).
extern "C" __global__ void __launch_bounds__(256) combine(const int* ids, const float* weights, const int* place, int used, const uint64_t* blobs, uint32_t bias_at, const float* outputs,
                                                          const float* taken, int is_shared, float* y, int D) {
    wait_for_previous();
    let_next_start();
    const int i = (blockIdx.x * 256 + threadIdx.x) * 4, t = blockIdx.y;
    if (i >= D) return;
    float4* to = (float4*)(y + (size_t)t * D + i);
    float4 sum = is_shared ? *to : make_float4(0, 0, 0, 0);
    if (taken != nullptr) {
        const float s = sigmoid(taken[t]);
        sum = make_float4(sum.x * s, sum.y * s, sum.z * s, sum.w * s);
    }
#pragma unroll 4
    for (int j = t * used; j < (t + 1) * used; j++) {
        float4 o = *(const float4*)(outputs + (size_t)place[j] * D + i);
        const int e = ids[j];
        if (bias_at != 0 && blobs[e] != 0) {
            o = make_float4(o.x + bias_of(blobs, e, bias_at, i), o.y + bias_of(blobs, e, bias_at, i + 1), o.z + bias_of(blobs, e, bias_at, i + 2), o.w + bias_of(blobs, e, bias_at, i + 3));
        }
        const float w = weights[j];
        sum = make_float4(fmaf(w, o.x, sum.x), fmaf(w, o.y, sum.y), fmaf(w, o.z, sum.z), fmaf(w, o.w, sum.w));
    }
    *to = sum;
}
