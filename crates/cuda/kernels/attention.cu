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

// What becomes of a partial: left out, the first, or merged with factors.
enum Step : int { SKIP, FIRST, MERGE };

struct Factors {
    float a, b;
    int step;
};

// A running maximum of partials that count, and the factors of the next one.
struct Largest {
    float m;
    bool any;

    __device__ Factors add(float m_b, float l_b) {
        if (l_b == 0.0f) return {1.0f, 0.0f, SKIP};
        if (!any) {
            m = m_b, any = true;
            return {0.0f, 1.0f, FIRST};
        }
        const float m_a = m;
        m = m_a > m_b ? m_a : m_b;
        return {math::exp_weight(m_a - m), math::exp_weight(m_b - m), MERGE};
    }
};

__device__ void merge(float& a, float b, const Factors& f) {
    if (f.step == MERGE) a = fmaf(b, f.b, a * f.a);
    if (f.step == FIRST) a = b;
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
// Grid: heads, values in 32s. Factors first, which need only m and l; then the values' chains, which are two operations a part.
extern "C" __global__ void __launch_bounds__(FOLD_THREADS) fold(const float* partials, const float* groups, const Part* parts, const unsigned* count,
                                                               const float* sinks, float* out, int heads, int c) {
    __shared__ float values[BATCH][COLUMNS + 1];  // of groups; in the last column l
    __shared__ Factors in_group[BATCH], in_total[BATCH];
    __shared__ float m_of[BATCH], l_of[BATCH];
    __shared__ int group_at[BATCH + 1], warps[BATCH / 32];
    __shared__ Part entries[BATCH + 1];
    const int t = threadIdx.x, column = t % COLUMNS, worker = t / COLUMNS, head = blockIdx.x, size = 2 + c;
    const int at = blockIdx.y * COLUMNS + column, n = (int)*count;
    auto row = [&](const Part& part) { return (part.group >> 31 ? groups : partials) + ((size_t)part.slot * heads + head) * size; };
    Largest total{0.0f, false};
    float value = 0.0f;  // of thread 0 .. 31 a column's, of thread 32 l
    for (int start = 0, batch; start < n; start += batch) {
        batch = min(BATCH, n - start);
        if (t <= batch && start + t < n) entries[t] = parts[start + t];
        __syncthreads();
        if (start + batch < n)  // groups stay whole: the host sees to it that each has fewer parts than a batch
            while (batch > 1 && entries[batch - 1].group == entries[batch].group) batch--;
        const bool is_entry = t < batch, is_start = is_entry && (t == 0 || entries[t].group != entries[t - 1].group);
        if (is_entry) m_of[t] = row(entries[t])[0], l_of[t] = row(entries[t])[1];
        const unsigned starts = __ballot_sync(~0u, is_start);
        if (t % 32 == 0 && t < BATCH) warps[t / 32] = __popc(starts);
        __syncthreads();
        int number = __popc(starts & (1u << t % 32) - 1), count_groups = 0;
        for (int w = 0; w < BATCH / 32; w++) number += w < t / 32 ? warps[w] : 0, count_groups += warps[w];
        if (is_start) group_at[number] = t;
        if (t == 0) group_at[count_groups] = batch;
        if (is_entry) {
            Largest before{0.0f, false};
            int first = t;
            while (first > 0 && entries[first - 1].group == entries[t].group) first--;
            Factors f{};
            for (int i = first; i <= t; i++) f = before.add(m_of[i], l_of[i]);
            in_group[t] = f;
        }
        __syncthreads();
        // A group's m and l, and its values.
        float m_group = 0.0f, l_group = 0.0f;
        if (t < count_groups) {
            for (int i = group_at[t]; i < group_at[t + 1]; i++) {
                if (in_group[i].step == FIRST || (in_group[i].step == MERGE && !(m_group > m_of[i]))) m_group = m_of[i];
                merge(l_group, l_of[i], in_group[i]);
            }
        }
#pragma unroll 2
        for (int g = worker; g < count_groups; g += WORKERS) {
            const int from = group_at[g], end = group_at[g + 1];
            float o = 0.0f;
            for (int first = from; first < end; first += 4) {
                float x[4];
#pragma unroll
                for (int i = 0; i < 4; i++) x[i] = first + i < end && at < c ? row(entries[first + i])[2 + at] : 0.0f;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (first + i < end) merge(o, x[i], in_group[first + i]);
            }
            values[g][column] = o;
        }
        __syncthreads();
        if (t < count_groups) m_of[t] = m_group, l_of[t] = l_group, values[t][COLUMNS] = l_group;
        __syncthreads();
        Largest next = total;
        for (int g = 0; g < count_groups; g++) {
            const float m = m_of[g], l = l_of[g];
            if (g == t) {
                in_total[g] = next.add(m, l);
            } else if (l != 0.0f) {
                next.m = next.any && next.m > m ? next.m : m, next.any = true;
            }
        }
        total = next;
        __syncthreads();
        if (t <= COLUMNS)
            for (int g = 0; g < count_groups; g++) merge(value, values[g][t], in_total[g]);
        __syncthreads();
    }
    __shared__ float sum;
    if (t == COLUMNS) sum = value;
    __syncthreads();
    if (t < COLUMNS && at < c) {
        float l = sum;
        if (sinks != nullptr) {
            const float sink = sinks[head], m = total.m > sink ? total.m : sink, f = math::exp(total.m - m);
            l = math::exp(sink - m) + l * f;
            value = value * f;
        }
        out[(size_t)head * c + at] = value / l;
    }
}
