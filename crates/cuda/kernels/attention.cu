// Around decode attention: heads turned and cells written into blocks, and the fold of partial results. All to the bit as `cpu/src/attention` and
// `cpu/src/ops.rs` define them.
#include "acts.cuh"
#include "attention_append.cuh"
#include "heads.cuh"
#include "rehearsal.cuh"

// Stores T cells from `position` on: k [T, K, C_k], v [T, K, C_v].
//
// Grid: cells in 32s, KV heads, K or V. Block: 32 cells x runs of 32 values: lanes are cells, as in K's layout.
extern "C" __global__ void append(const float* k, const float* v, const cache::Block* blocks, const unsigned* count, const unsigned* position, int tokens,
                                  int heads, int c_k, int c_v, int type_k, int type_v) {
    wait_for_previous();
    let_next_start();
    const bool is_k = blockIdx.z == 0;
    const unsigned first = *position, cell = (first / 32 + blockIdx.x) * 32 + threadIdx.x;
    if (cell < first || cell >= first + (unsigned)tokens) return;
    const int c = is_k ? c_k : c_v, type = is_k ? type_k : type_v, head = blockIdx.y;
    const cache::Block* block = find(blocks, *count, cell);
    if (block == nullptr) return;
    const float* from = (is_k ? k : v) + ((size_t)(cell - first) * heads + head) * c;
    uint8_t* to = (uint8_t*)block->address + (size_t)(is_k ? 0 : heads) * cache::head_bytes(type_k, c_k) + (size_t)head * cache::head_bytes(type, c);
    append_cell(from, to, is_k, type, c, cell % CELLS);
}

// q [T, H, C_k], k [T, K, C_k], v [T, K, C_v], head by head: bias added; norm, rope (of q and k); rotation; each may be absent. In place, but for a
// list of blocks: then k and v of token t, at `position[t]`, go to its cell and nowhere else; a list of several tokens has token t's block in entry t,
// of one token's the cell is in the last block or one before it. A warp a head, for v where there is something to do. One token is rehearsed.
//
// `angle_row` null: token t has row t of cos, sin [.., pairs]; else row *angle_row + t. Dynamic shared memory: the larger C floats a warp. The list is
// read before the kernel ahead has ended: it is the host that writes it.
extern "C" __global__ void __launch_bounds__(128, 6) turn(float* q, float* k, float* v, const float* bias_q, const float* bias_k, const float* bias_v,
                                                       const float* norm_q, const float* norm_k, const float* cos, const float* sin, const unsigned* angle_row,
                                                       int tokens, int heads, int heads_kv, int c_k, int c_v, int pairs, int halves, float eps, int rotate_k,
                                                       int rotate_v, const cache::Block* blocks, const unsigned* count, const unsigned* position, int type_k, int type_v) {
    extern __shared__ __align__(16) float rows[];
    let_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, item = blockIdx.x * (blockDim.x / 32) + warp;
    const int all = heads + (blocks != nullptr || bias_v != nullptr || rotate_v ? 2 : 1) * heads_kv;
    const int t = item / all, of_token = item % all;
    const unsigned listed = blocks != nullptr ? *count : 0, at = tokens > 1 ? (unsigned)t : listed - 1;
    cache::Block own{};
    if (at < listed) own = blocks[at];
    if (item >= tokens * all) return wait_for_previous();
#pragma unroll 1
    for (bool is_real = !rehearsal::PAYS || tokens > 1, is_done = false; !is_done; is_done = is_real, is_real = true) {
        if (is_real) wait_for_previous();
        const int kind = of_token < heads ? 0 : of_token < heads + heads_kv ? 1 : 2;
        const int head = kind == 0 ? of_token : kind == 1 ? of_token - heads : of_token - heads - heads_kv, count_of = kind == 0 ? heads : heads_kv;
        const int c = kind == 2 ? c_v : c_k;
        const float* bias = kind == 0 ? bias_q : kind == 1 ? bias_k : bias_v;
        float* from = is_real ? (kind == 0 ? q : kind == 1 ? k : v) + ((size_t)t * count_of + head) * c : rehearsal::unused;
        float* row = rows + warp * max(c_k, c_v);
        const unsigned cell = is_real && position != nullptr ? position[t] : own.index * CELLS + own.first;
        const bool has_angles = kind < 2 && cos != nullptr;
        const size_t angle = has_angles && is_real ? ((angle_row != nullptr ? *angle_row : 0u) + (size_t)t) * pairs : 0;
        const float *of_cos = is_real ? cos : rehearsal::unused, *of_sin = is_real ? sin : rehearsal::unused;
        const Turn how(kind == 0 ? norm_q : kind == 1 ? norm_k : nullptr, has_angles ? of_cos + angle : nullptr, of_sin + angle, pairs, halves, kind == 2 ? rotate_v : rotate_k, eps);
        for (int i = lane; i < c; i += 32) row[i] = bias != nullptr ? from[i] + bias[head * c + i] : from[i];
        __syncwarp();
        turn_head(row, c, how);
        if (kind == 0 || blocks == nullptr) {
            for (int i = lane; i < c; i += 32) from[i] = row[i];
            continue;
        }
        const bool is_own = at < listed && own.index == cell / CELLS && own.first <= cell % CELLS && cell % CELLS < own.end;
        unsigned long long address = is_real ? own.address : (unsigned long long)rehearsal::unused;
        if (is_real && !is_own) {
            const cache::Block* found = tokens > 1 ? nullptr : find(blocks, listed, cell);
            if (found == nullptr) continue;
            address = found->address;
        }
        uint8_t* to = (uint8_t*)address + (is_real && kind == 2 ? (size_t)heads_kv * cache::head_bytes(type_k, c_k) : 0);
        const int type = kind == 1 ? type_k : type_v;
        append_head(row, to + (is_real ? (size_t)head * cache::head_bytes(type, c) : 0), kind == 1, type, c, is_real ? cell % CELLS : 0);
        __syncwarp();
    }
}

// The same of many tokens, in place: a warp has up to `each` heads of a token, so that angles are read once for them, and a head while the one before
// it is turned. Grid: warps of a token in fours, tokens.
extern "C" __global__ void __launch_bounds__(128, 8) turn_many(float* q, float* k, float* v, const float* bias_q, const float* bias_k, const float* bias_v,
                                                                const float* norm_q, const float* norm_k, const float* cos, const float* sin,
                                                                const unsigned* angle_row, int heads, int heads_kv, int c_k, int c_v, int pairs, int halves,
                                                                float eps, int rotate_k, int rotate_v, int each) {
    extern __shared__ __align__(16) float rows[];
    constexpr int PIECES = 2;  // of 128 values
    let_next_start();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = blockIdx.y;
    const int of_q = (heads + each - 1) / each, of_kv = (heads_kv + each - 1) / each, item = blockIdx.x * 4 + warp;
    const int kind = item < of_q ? 0 : item < of_q + of_kv ? 1 : 2, first = (kind == 0 ? item : kind == 1 ? item - of_q : item - of_q - of_kv) * each;
    const int count = kind == 0 ? heads : heads_kv, c = kind == 2 ? c_v : c_k, end = min(first + each, count);
    const float* bias = kind == 0 ? bias_q : kind == 1 ? bias_k : bias_v;
    float4* of_token = (float4*)((kind == 0 ? q : kind == 1 ? k : v) + (size_t)t * count * c);
    wait_for_previous();
    if (first >= end || (kind == 2 && bias_v == nullptr && !rotate_v)) return;
    const bool has_angles = kind < 2 && cos != nullptr;
    const size_t angle = has_angles ? ((angle_row != nullptr ? *angle_row : 0u) + (size_t)t) * pairs : 0;
    const Turn how(kind == 0 ? norm_q : kind == 1 ? norm_k : nullptr, has_angles ? cos + angle : nullptr, sin + angle, pairs, halves, kind == 2 ? rotate_v : rotate_k, eps);
    float4 *row = (float4*)(rows + warp * max(c_k, c_v)), next[PIECES];
    auto load = [&](int head) {
#pragma unroll
        for (int j = 0; j < PIECES; j++)
            if (lane + 32 * j < c / 4) next[j] = of_token[head * (c / 4) + lane + 32 * j];
    };
    load(first);
#pragma unroll 1
    for (int head = first; head < end; head++) {
#pragma unroll
        for (int j = 0; j < PIECES; j++) {
            const int i = lane + 32 * j;
            if (i >= c / 4) continue;
            float4 x = next[j];
            if (bias != nullptr) {
                const float4 b = ((const float4*)bias)[head * (c / 4) + i];
                x = make_float4(x.x + b.x, x.y + b.y, x.z + b.z, x.w + b.w);
            }
            row[i] = x;
        }
        if (head + 1 < end) load(head + 1);
        __syncwarp();
        turn_head((float*)row, c, how);
#pragma unroll
        for (int j = 0; j < PIECES; j++)
            if (lane + 32 * j < c / 4) of_token[head * (c / 4) + lane + 32 * j] = row[lane + 32 * j];
        __syncwarp();
    }
}

namespace {

// Entries of a batch, columns and workers of the fold.
// A batch holds 65536 cells and some more.
constexpr int BATCH = 272, COLUMNS = 32, WORKERS = 9, FOLD_THREADS = COLUMNS * WORKERS, GROUPS_ROOM = 96, BATCH_WARPS = (BATCH + 31) / 32;

// Blocks of a group; groups of a batch that a worker has.
constexpr int GROUP = 4, PER_WORKER = (BATCH / GROUP + WORKERS - 1) / WORKERS;

// Entries that workers read, whether there are as many or not: a thread looks up one.
constexpr int READ = PER_WORKER * WORKERS * GROUP;
static_assert(READ == FOLD_THREADS && READ > BATCH, "an entry a thread, and the one behind a batch");

// Parts up to which nothing is shared, and how many of them are on their way.
constexpr int FEW_PARTS = 12, FEW_AT_ONCE = 4;

// A load that stays where it is written, from the second-level cache.
__device__ __forceinline__ float loaded(const float* from) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from));
    return x;
}

// How many of a block's threads before this one say yes, of the first BATCH; and how many in all.
struct Rank {
    int before, all;
};

__device__ Rank rank(bool yes, int (&warps)[BATCH_WARPS]) {
    const unsigned ballot = __ballot_sync(~0u, yes);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = __popc(ballot);
    __syncthreads();
    Rank r{__popc(ballot & (1u << threadIdx.x % 32) - 1), 0};
    for (int w = 0; w < BATCH_WARPS; w++) r.before += w < (int)threadIdx.x / 32 ? warps[w] : 0, r.all += warps[w];
    __syncthreads();
    return r;
}

// A partial result, of one column.
struct Merged {
    float m = -INFINITY, l = 0.0f, o = 0.0f;
    bool any = false;

    __device__ __forceinline__ void merge(const Merged& b) {
        const float now = fmaxf(m, b.m);
        if (any) {
            const float of_a = math::exp_weight(m - now), of_b = math::exp_weight(b.m - now);
            l = fmaf(b.l, of_b, l * of_a), o = fmaf(b.o, of_b, o * of_a);
        } else {
            l = b.l, o = b.o;
        }
        m = now, any = true;
    }
};

}  // namespace

// A part of a fold: a slot of `partials` and the group it belongs to; or, with the group's top bit set, a whole group's result,
// folded elsewhere, and its slot in `groups`.
struct Part {
    unsigned slot, group;
};

// Folds one token's partials: blocks inside groups of four, then groups, in the order of `parts`. Partials are [slot][H][2 + C].
// Merges sinks (null: none), divides: out [H, C]; then, if asked for, the product of every head with the normalised Hadamard matrix, and blocks of 32 or
// 256 of it all (`block`; 0: none).
//
// Grid: heads, values in 32s. In batches: partials without a cell are left out; factors, which need only m, are computed side by side; groups
// are folded by several workers; then a thread a column folds groups, two operations each. A few parts a thread a column folds by itself. What needs
// more than 32 values is done by the last thread block of `unit` heads, whom `done` [H / unit] finds; all of it is zero again afterwards. Parts are
// read before the kernel ahead has ended: it is the host that writes them.
//
// What was folded elsewhere comes first, if there is such: it is merged by itself, so that those behind it are whole groups of four.
//
// Threads and registers: few enough that the product that follows is resident beside it. That one may start, and load the memory with its first
// weights, when the kernel ahead has ended; or at once where little is read here.
extern "C" __global__ void __launch_bounds__(FOLD_THREADS, 3) fold(const float* partials, const float* groups, const Part* parts, const unsigned* count, const float* sinks,
                                                               float* out, int heads, int c, int hadamard, int block, int unit, unsigned* done, uint32_t* q, int2* meta, float* d,
                                                               __half* s16, int how) {
    __shared__ __align__(16) float values[BATCH][COLUMNS + 1];  // of groups; in the last column l
    __shared__ Part listed[BATCH + 1], entries[BATCH];
    __shared__ const float* rows[READ];  // where listed entries lie; behind the last one as that
    __shared__ __align__(16) float a_of[READ], b_of[READ];
    __shared__ float m_of[BATCH], l_of[BATCH], m_all, sum;
    __shared__ float2 of_group[GROUPS_ROOM];
    __shared__ int group_at[BATCH + 1], warps[BATCH_WARPS];
    const int t = threadIdx.x, column = t % COLUMNS, worker = t / COLUMNS, head = blockIdx.x, size = 2 + c;
    const int at = blockIdx.y * COLUMNS + column, n = (int)*count;
    auto row = [&](const Part& part) { return (part.group >> 31 ? groups : partials) + ((size_t)part.slot * heads + head) * size; };
    // The result of a head's column, of a partial result of everything.
    auto divided = [&](int h, float m_total, float l, float value) {
        if (sinks != nullptr) {
            const float sink = sinks[h], m = m_total > sink ? m_total : sink, f = math::exp(m_total - m);
            l = math::exp(sink - m) + l * f;
            value = value * f;
        }
        return value / l;
    };
    float* all = &values[0][0];
    const int first = head / unit * unit * c, length = unit * c;
    const ActsOut to{q, meta, d, s16, heads * c, how};
    // With all results of `unit` heads in shared memory: rotates and quantises them.
    auto leave = [&](const ActsOut& to, float* out) {
        if (hadamard) {
            for (int h = t / 32; h < unit; h += FOLD_THREADS / 32) turn_head(all + h * c, c, Turn(nullptr, nullptr, nullptr, 0, 0, 1, 0.0f));
            __syncthreads();
            for (int i = t; i < length; i += FOLD_THREADS) out[first + i] = all[i];
        }
        if (block == 32) {
            for (int i = t; i / 32 * 128 < length; i += FOLD_THREADS) {
                const bool live = i * 4 < length;
                emit_32(to, live ? *(const float4*)(all + i * 4) : make_float4(0, 0, 0, 0), 0, first / 32 + i / 8, i % 8, live);
            }
        } else if (block == 256) {
            for (int b = t / 32; b < length / 256; b += FOLD_THREADS / 32) {
                float4 x[2] = {*(const float4*)(all + b * 256 + t % 32 * 4), *(const float4*)(all + b * 256 + 128 + t % 32 * 4)};
                emit_256(to, x, 0, first / 256 + b);
            }
        }
    };
    const bool needs_all = hadamard || block == 256 || (block == 32 && c % 32 != 0);
    float m_total = 0.0f, value = 0.0f;  // value: of thread 0 .. 31 a column's, of thread 32 l
    bool any = false;
    if (n <= FEW_PARTS) {
        let_next_start();
        // The first thread block of `unit` heads does all their columns, if they are needed together.
        if (needs_all && (blockIdx.y > 0 || head % unit != 0)) return;
        if (t < n) listed[t] = parts[t];
        __syncthreads();
        // Partial results of before do for a rehearsal: they are read from the second-level cache. Blocks of 8 columns are 8 bytes a value at most.
#pragma unroll 1
        for (bool is_real = !rehearsal::PAYS || heads * c > rehearsal::FLOATS / 2;; is_real = true) {
            if (is_real) wait_for_previous();
            auto folded = [&](int h, int column_of) {
                float m[FEW_AT_ONCE], l[FEW_AT_ONCE], o[FEW_AT_ONCE];
                auto load = [&](int i, const Part& part) {
                    const float* from = (part.group >> 31 ? groups : partials) + ((size_t)part.slot * heads + h) * size;
                    m[i] = loaded(from), l[i] = loaded(from + 1), o[i] = loaded(from + 2 + column_of);
                };
#pragma unroll
                for (int i = 0; i < FEW_AT_ONCE; i++) {
                    l[i] = 0.0f;
                    if (i < n) load(i, listed[i]);
                }
                Merged group, total;
                unsigned of = 0;
#pragma unroll 1
                for (int first = 0; first < n; first += FEW_AT_ONCE) {
#pragma unroll
                    for (int i = 0; i < FEW_AT_ONCE; i++) {
                        const unsigned own = listed[first + i].group;
                        const Merged part{m[i], l[i], o[i], true};
                        l[i] = 0.0f;
                        if (first + i + FEW_AT_ONCE < n) load(i, listed[first + i + FEW_AT_ONCE]);
                        if (part.l == 0.0f) continue;
                        if (group.any && own != of) total.merge(group), group = Merged();
                        of = own;
                        group.merge(part);
                    }
                }
                if (group.any) total.merge(group);
                return total;
            };
            if (needs_all) {
                for (int i = t; i < length; i += FOLD_THREADS) {
                    const int h = first / c + i / c;
                    const Merged total = folded(h, i % c);
                    all[i] = divided(h, total.m, total.l, total.o);
                    if (!hadamard && is_real) out[first + i] = all[i];
                }
                __syncthreads();
                float* unused = rehearsal::unused;  // one call for both, as it is its instructions that are to be there
                leave({is_real ? q : (uint32_t*)unused, is_real ? meta : (int2*)unused, is_real ? d : unused, is_real ? s16 : (__half*)unused, heads * c, how}, is_real ? out : unused);
                __syncthreads();
            } else if (t < COLUMNS && at < c) {
                const Merged total = folded(head, at);
                m_total = total.m, value = total.o;
                if (t == 0) sum = total.l;
            }
            if (is_real) break;
        }
        if (needs_all) return;
    } else {
        auto list = [&](int start) {
            const Part part = parts[min(start + t, n - 1)];
            rows[t] = row(part);
            if (t <= BATCH) listed[t] = part;
        };
        // One whole result at the beginning is nobody's neighbour.
        const int alone = parts[0].group >> 31;
        list(alone);
        wait_for_previous();
        let_next_start();
        if (alone) {
            const float* from = row(parts[0]);
            const float l = from[1];
            if (l != 0.0f) m_total = fmaxf(-INFINITY, from[0]), value = t == COLUMNS ? l : t < COLUMNS && at < c ? from[2 + at] : 0.0f, any = true;
        }
        for (int start = alone, batch; start < n; start += batch) {
            batch = min(BATCH, n - start);
            if (start > alone) list(start);
            __syncthreads();
            if (start + batch < n)  // groups stay whole: the host sees to it that each has fewer parts than a batch
                while (batch > 1 && listed[batch - 1].group == listed[batch].group) batch--;
            // All of this is on its way at once: nothing of it may be put aside, for that would wait for it.
            float m = loaded(rows[t]), l = loaded(rows[t] + 1);
            // Whole groups of four blocks, each with cells: nearly always. What follows then needs neither lists nor searches.
            float x[PER_WORKER][GROUP];
#pragma unroll
            for (int j = 0; j < PER_WORKER; j++)
#pragma unroll
                for (int i = 0; i < GROUP; i++) x[j][i] = loaded(rows[(worker + j * WORKERS) * GROUP + i] + 2 + min(at, c - 1));
            if (t >= batch) m = l = 0.0f;
            if (__syncthreads_and(t >= batch || (l != 0.0f && listed[t].group == listed[0].group + t / GROUP && listed[t].group >> 31 == 0))) {
                const int groups_here = (batch + GROUP - 1) / GROUP, in_group = t % GROUP, warp = t / 32, lane = t % 32;
                {
                    float before = -INFINITY;
#pragma unroll
                    for (int i = 1; i < GROUP; i++) {
                        const float other = __shfl_up_sync(~0u, m, i, GROUP);
                        before = in_group >= i ? fmaxf(before, other) : before;
                    }
                    const float now = fmaxf(before, m), of_a = math::exp_weight(before - now), of_b = math::exp_weight(m - now);
                    a_of[t] = of_a, b_of[t] = of_b;
                    float sum_l = l;
#pragma unroll
                    for (int i = 1; i < GROUP; i++) {
                        const float other = __shfl_up_sync(~0u, sum_l, 1, GROUP);
                        sum_l = in_group == i ? fmaf(l, of_b, other * of_a) : sum_l;
                    }
                    if (t < batch && (in_group == GROUP - 1 || t == batch - 1)) m_of[t / GROUP] = now, values[t / GROUP][COLUMNS] = sum_l;
                }
                __syncthreads();
#pragma unroll
                for (int j = 0; j < PER_WORKER; j++) {
                    const int g = worker + j * WORKERS;
                    const float4 a = ((const float4*)a_of)[g], b = ((const float4*)b_of)[g];
                    const float as[GROUP] = {a.x, a.y, a.z, a.w}, bs[GROUP] = {b.x, b.y, b.z, b.w};
                    float o = x[j][0];
#pragma unroll
                    for (int i = 1; i < GROUP; i++)
                        if (g * GROUP + i < batch) o = fmaf(x[j][i], bs[i], o * as[i]);
                    values[g][column] = o;
                }
                if (warp < GROUPS_ROOM / 32) {  // a lane a group
                    const float own = t < groups_here ? m_of[t] : -INFINITY;
                    float carry = any ? m_total : -INFINITY, scan = own;
                    for (int g = lane; g < warp * 32 && g < groups_here; g += 32) carry = fmaxf(carry, m_of[g]);
#pragma unroll
                    for (int i = 16; i > 0; i /= 2) carry = fmaxf(carry, __shfl_xor_sync(~0u, carry, i));
#pragma unroll
                    for (int i = 1; i < 32; i *= 2) {
                        const float other = __shfl_up_sync(~0u, scan, i);
                        scan = lane >= i ? fmaxf(scan, other) : scan;
                    }
                    const float up_to = __shfl_up_sync(~0u, scan, 1), before = lane > 0 ? fmaxf(carry, up_to) : carry, now = fmaxf(before, own);
                    of_group[t] = {math::exp_weight(before - now), math::exp_weight(own - now)};
                    if (t == BATCH / GROUP - 1) m_all = fmaxf(carry, scan);
                }
                __syncthreads();
                if (t <= COLUMNS) {
                    if (!any) value = values[0][t];
#pragma unroll 8
                    for (int g = any ? 0 : 1; g < groups_here; g++) value = fmaf(values[g][t], of_group[g].y, value * of_group[g].x);
                }
                m_total = m_all, any = true;
                __syncthreads();
                continue;
            }
            const Rank kept = rank(t < batch && l != 0.0f, warps);
            if (t < batch && l != 0.0f) entries[kept.before] = listed[t], m_of[kept.before] = m, l_of[kept.before] = l;
            __syncthreads();
            const bool is_start = t < kept.all && (t == 0 || entries[t].group != entries[t - 1].group);
            const Rank number = rank(is_start, warps);
            if (is_start) group_at[number.before] = t;
            if (t == 0) group_at[number.all] = kept.all;
            if (t < kept.all && !is_start) {
                float before = -INFINITY;
                for (int i = t - 1; i >= 0 && entries[i].group == entries[t].group; i--) before = fmaxf(before, m_of[i]);
                const float now = fmaxf(before, m_of[t]);
                a_of[t] = math::exp_weight(before - now), b_of[t] = math::exp_weight(m_of[t] - now);
            }
            __syncthreads();
            float m_group = -INFINITY, l_group = 0.0f;
            if (t < number.all) {
                for (int i = group_at[t]; i < group_at[t + 1]; i++) {
                    m_group = fmaxf(m_group, m_of[i]);
                    l_group = i == group_at[t] ? l_of[i] : fmaf(l_of[i], b_of[i], l_group * a_of[i]);
                }
            }
#pragma unroll 2
            for (int g = worker; g < number.all; g += WORKERS) {
                const int from = group_at[g], end = group_at[g + 1];
                float o = 0.0f;
                for (int first = from; first < end; first += 4) {
                    float x[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) x[i] = first + i < end && at < c ? row(entries[first + i])[2 + at] : 0.0f;
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        if (first + i < end) o = first + i == from ? x[i] : fmaf(x[i], b_of[first + i], o * a_of[first + i]);
                }
                values[g][column] = o;
            }
            __syncthreads();
            if (t < number.all) m_of[t] = m_group, values[t][COLUMNS] = l_group;
            __syncthreads();
            float before = any ? m_total : -INFINITY, all = before;
#pragma unroll 8
            for (int g = 0; g < number.all; g++) {
                before = g < t ? fmaxf(before, m_of[g]) : before;
                all = fmaxf(all, m_of[g]);
            }
            if (t < number.all) {
                const float now = fmaxf(before, m_group);
                a_of[t] = math::exp_weight(before - now), b_of[t] = math::exp_weight(m_group - now);
            }
            m_total = all;
            __syncthreads();
            if (t <= COLUMNS && number.all > 0) {
                if (!any) value = values[0][t];
#pragma unroll 8
                for (int g = any ? 0 : 1; g < number.all; g++) value = fmaf(values[g][t], b_of[g], value * a_of[g]);
            }
            any = any || number.all > 0;
            __syncthreads();
        }
        if (t == COLUMNS) sum = value;
    }
    __syncthreads();
    float result = 0.0f;
    if (t < COLUMNS && at < c) out[(size_t)head * c + at] = result = divided(head, m_total, sum, value);
    if (block == 0 && !hadamard) return;
    if (!needs_all) {
        if (t >= 32) return;
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = __shfl_sync(~0u, result, t % 8 * 4 + i);
        emit_32(to, make_float4(x[0], x[1], x[2], x[3]), 0, (head * c + blockIdx.y * COLUMNS) / 32, t % 8, t < 8);
        return;
    }
    // Whose results were the last of their heads goes on with all of them.
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (t == 0) {
        is_last = atomicAdd(done + head / unit, 1) == unit * gridDim.y - 1;
        if (is_last) done[head / unit] = 0;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
    for (int i = t; i < length; i += FOLD_THREADS) all[i] = __ldcg(out + first + i);
    __syncthreads();
    leave(to, out);
}
