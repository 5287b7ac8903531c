// Around decode attention: cells written into blocks, and the fold of partial results. Both to the bit as
// `cpu/src/attention` defines them.
#include "attention_cache.cuh"
#include "math.cuh"

using cache::CELLS;
using cache::PANEL;

namespace {

// Values a thread encodes.
constexpr int RUN = 32;

// The entry that holds a cell; tables are sorted and new cells belong to the last entries.
__device__ const cache::Block* find(const cache::Block* blocks, unsigned count, unsigned cell) {
    for (unsigned i = count; i-- > 0;)
        if (blocks[i].index == cell / CELLS && blocks[i].first <= cell % CELLS && cell % CELLS < blocks[i].end) return blocks + i;
    return nullptr;
}

// The value of largest magnitude, with its sign, the first of several; NaN if one is not finite.
__device__ float absmax(const float* x) {
    float most = 0.0f;
    bool is_finite = true;
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        is_finite = is_finite && fabsf(x[i]) < INFINITY;
        most = fabsf(x[i]) > fabsf(most) ? x[i] : most;
    }
    return is_finite ? most : NAN;
}

__device__ float divisor(int type) { return type == cache::Q8_0 ? 127.0f : -8.0f; }

__device__ float scale_of(int type, float most) { return (type == cache::Q8_0 ? fabsf(most) : most) / divisor(type); }

// Codes of 32 values by GGML's rules, four a word: value i in byte i; or low nibble i, high nibble i + 16.
__device__ void encode(int type, const float* x, float d, unsigned (&words)[8]) {
    const float inverse = d == 0.0f ? 0.0f : 1.0f / d;
    int codes[RUN];
#pragma unroll
    for (int i = 0; i < RUN; i++) {
        const float y = x[i] * inverse;
        if (type == cache::Q8_0) {
            codes[i] = y != y ? 0 : (int)roundf(fminf(fmaxf(y, -127.0f), 127.0f));
        } else {
            codes[i] = min(max(__float2int_rz(y + 8.5f), 0), 15);
        }
    }
#pragma unroll
    for (int w = 0; w < 8; w++) {
        words[w] = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (type == cache::Q8_0) {
                words[w] |= (unsigned)(codes[4 * w + j] & 255) << 8 * j;
            } else if (w < 4) {
                words[w] |= (unsigned)(codes[4 * w + j] | codes[4 * w + j + 16] << 4) << 8 * j;
            }
        }
    }
}

__device__ unsigned short half_bits(int type, float x) {
    return type == cache::F16 ? __half_as_ushort(__float2half_rn(x)) : __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

}  // namespace

// Stores T cells from `position` on: k [T, K, C_k], v [T, K, C_v]. A head with a value that is not finite, or too large for
// its scale, is NaN as a whole in 8 and 4 bits.
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
    const int n = cell % CELLS, panel = n / PANEL, lane = n % PANEL, runs = c / RUN;
    if (cache::is_float(type)) {
        for (int run = threadIdx.y; run * RUN < c; run += blockDim.y)
            for (int i = run * RUN; i < min(c, (run + 1) * RUN); i++)
                ((unsigned short*)to)[is_k ? (panel * c + i) * PANEL + lane : n * c + i] = half_bits(type, from[i]);
        return;
    }
    bool is_nan = false;
    for (int run = 0; run < runs; run++) is_nan = is_nan || !(fabsf(__half2float(__float2half_rn(scale_of(type, absmax(from + run * RUN))))) < INFINITY);
    uint8_t* codes = to + cache::scale_bytes(type, CELLS * c);
    const int words_a_run = type == cache::Q8_0 ? 8 : 4;
    for (int run = threadIdx.y; run < runs; run += blockDim.y) {
        const float d = scale_of(type, absmax(from + run * RUN));
        unsigned words[8] = {};
        if (!is_nan) encode(type, from + run * RUN, d, words);
        const unsigned short scale = is_nan ? 0x7e00 : __half_as_ushort(__float2half_rn(d));
        if (is_k) {
            ((unsigned short*)to)[(panel * runs + run) * PANEL + lane] = scale;
#pragma unroll
            for (int w = 0; w < 8; w++)
                if (w < words_a_run) ((unsigned*)codes)[((panel * runs + run) * words_a_run + w) * PANEL + lane] = words[w];
        } else {
            ((unsigned short*)to)[n * runs + run] = scale;
#pragma unroll
            for (int w = 0; w < 8; w++)
                if (w < words_a_run) ((unsigned*)codes)[(n * runs + run) * words_a_run + w] = words[w];
        }
    }
}

namespace {

// Entries of a batch, columns and workers of the fold.
constexpr int BATCH = 256, COLUMNS = 32, WORKERS = 16, FOLD_THREADS = COLUMNS * WORKERS;

// How many of a block's threads before this one say yes, of the first BATCH; and how many in all.
struct Rank {
    int before, all;
};

__device__ Rank rank(bool yes, int (&warps)[BATCH / 32]) {
    const unsigned ballot = __ballot_sync(~0u, yes);
    if (threadIdx.x % 32 == 0 && threadIdx.x < BATCH) warps[threadIdx.x / 32] = __popc(ballot);
    __syncthreads();
    Rank r{__popc(ballot & (1u << threadIdx.x % 32) - 1), 0};
    for (int w = 0; w < BATCH / 32; w++) r.before += w < (int)threadIdx.x / 32 ? warps[w] : 0, r.all += warps[w];
    __syncthreads();
    return r;
}

}  // namespace

// A part of a fold: a slot of `partials` and the group it belongs to; or, with the group's top bit set, a whole group's result,
// folded elsewhere, and its slot in `groups`.
struct Part {
    unsigned slot, group;
};

// Folds one token's partials: blocks inside groups of four, then groups, in the order of `parts`. Partials are [slot][H][2 + C].
// Merges sinks (null: none), divides: out [H, C].
//
// Grid: heads, values in 32s. In batches: partials without a cell are left out; factors, which need only m, are computed side by side; groups
// are folded by several workers; then a thread a column folds groups, two operations each.
extern "C" __global__ void __launch_bounds__(FOLD_THREADS) fold(const float* partials, const float* groups, const Part* parts, const unsigned* count, const float* sinks,
                                                               float* out, int heads, int c) {
    __shared__ float values[BATCH][COLUMNS + 1];  // of groups; in the last column l
    __shared__ Part listed[BATCH + 1], entries[BATCH];
    __shared__ float m_of[BATCH], l_of[BATCH], a_of[BATCH], b_of[BATCH], sum;
    __shared__ int group_at[BATCH + 1], warps[BATCH / 32];
    wait_for_previous();
    let_next_start();
    const int t = threadIdx.x, column = t % COLUMNS, worker = t / COLUMNS, head = blockIdx.x, size = 2 + c;
    const int at = blockIdx.y * COLUMNS + column, n = (int)*count;
    auto row = [&](const Part& part) { return (part.group >> 31 ? groups : partials) + ((size_t)part.slot * heads + head) * size; };
    float m_total = 0.0f, value = 0.0f;  // value: of thread 0 .. 31 a column's, of thread 32 l
    bool any = false;
    for (int start = 0, batch; start < n; start += batch) {
        batch = min(BATCH, n - start);
        if (t <= batch && start + t < n) listed[t] = parts[start + t];
        __syncthreads();
        if (start + batch < n)  // groups stay whole: the host sees to it that each has fewer parts than a batch
            while (batch > 1 && listed[batch - 1].group == listed[batch].group) batch--;
        float m = 0.0f, l = 0.0f;
        if (t < batch) m = row(listed[t])[0], l = row(listed[t])[1];
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
    __syncthreads();
    if (t < COLUMNS && at < c) {
        float l = sum;
        if (sinks != nullptr) {
            const float sink = sinks[head], m = m_total > sink ? m_total : sink, f = math::exp(m_total - m);
            l = math::exp(sink - m) + l * f;
            value = value * f;
        }
        out[(size_t)head * c + at] = value / l;
    }
}
