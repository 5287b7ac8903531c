// Prompt attention: kernels by head size, with f16 as it lies in memory and with types that are converted, and the merge of spans.
#include "attention_append.cuh"
#include "attention_prefill.cuh"

#ifdef HAS_WGMMA
PREFILL_KERNEL(prefill_64, 64, 1, 8, true, true, 2)
PREFILL_KERNEL(prefill_128, 128, 1, 8, true, true, 2)
PREFILL_KERNEL(prefill_64_converted, 64, 1, 8, false, true, 2)
PREFILL_KERNEL(prefill_128_converted, 128, 1, 8, false, true, 2)
#else
PREFILL_KERNEL(prefill_64, 64, 2, 4, true, false, 2)
PREFILL_KERNEL(prefill_128, 128, 2, 4, true, false, 2)
PREFILL_KERNEL(prefill_64_converted, 64, 2, 4, false, false, 2)
PREFILL_KERNEL(prefill_128_converted, 128, 2, 4, false, false, 2)
#endif
PREFILL_KERNEL(prefill_96, 96, 2, 4, true, false, 2)
PREFILL_KERNEL(prefill_256, 256, 1, 8, true, false, 1)
PREFILL_KERNEL(prefill_96_converted, 96, 2, 4, false, false, 2)
PREFILL_KERNEL(prefill_256_converted, 256, 1, 8, false, false, 1)

// Where blocks of a sequence lie that follow one another (attention_cache.cuh).
struct Blocks {
    uint8_t* at[16];
};

// Stores `tokens` cells of some blocks, from cell `cell` of the first one on: k [.., K, C_k], v [.., K, C_v], of which they are rows `first` ...
//
// Grid: 8 x 32 cells of each block, KV heads, K or V. Block: 32 lanes x 4. Half-precision cells go through shared memory, so that both sides are whole lines.
extern "C" __global__ void __launch_bounds__(128) append_blocks(const float* k, const float* v, int cell, int first, int tokens, int heads, int c_k, int c_v, int type_k,
                                                                int type_v, const __grid_constant__ Blocks blocks) {
    wait_for_previous();
    let_next_start();
    constexpr int COLUMNS = 64;
    __shared__ float stage[32][COLUMNS + 1];
    const bool is_k = blockIdx.z == 0;
    const int c = is_k ? c_k : c_v, type = is_k ? type_k : type_v, head = blockIdx.y, n0 = blockIdx.x % (CELLS / 32) * 32, lane = threadIdx.x;
    uint8_t* block = blocks.at[blockIdx.x / (CELLS / 32)];
    cell -= blockIdx.x / (CELLS / 32) * CELLS;
    if (n0 >= cell + tokens || n0 + 32 <= cell) return;
    const float* x = is_k ? k : v;
    auto row = [&](int n) { return x + ((size_t)(first + n - cell) * heads + head) * c; };
    auto lives = [&](int n) { return n >= cell && n < cell + tokens; };
    uint8_t* to = block + (size_t)(is_k ? 0 : heads) * cache::head_bytes(type_k, c_k) + (size_t)head * cache::head_bytes(type, c);
    if (!cache::is_float(type)) {
        if (lives(n0 + lane)) append_cell(row(n0 + lane), to, is_k, type, c, n0 + lane);
        return;
    }
    unsigned short* halves = (unsigned short*)to;
    if (!is_k) {
        for (int j = threadIdx.y; j < 32; j += 4)
            if (lives(n0 + j))
                for (int i = lane; i < c; i += 32) halves[(n0 + j) * c + i] = half_bits(type, row(n0 + j)[i]);
        return;
    }
    for (int i0 = 0; i0 < c; i0 += COLUMNS) {
        const int columns = min(COLUMNS, c - i0);
        __syncthreads();
        for (int j = threadIdx.y; j < 32; j += 4)
            if (lives(n0 + j))
                for (int i = lane; i < columns; i += 32) stage[j][i] = row(n0 + j)[i0 + i];
        __syncthreads();
        if (lives(n0 + lane))
            for (int i = threadIdx.y; i < columns; i += 4) halves[(n0 / PANEL * c + i0 + i) * PANEL + (n0 + lane) % PANEL] = half_bits(type, stage[lane][i]);
    }
}

// Merges the states of spans first .. first + spans into slot `slots` (begun: there is something), or if `out` is not null divides:
// out [T, H, C]. A warp a row.
extern "C" __global__ void __launch_bounds__(256) merge_spans(float* states, float* out, const float* sinks, int rows, int heads, int c, int first, int spans,
                                                             int slots, int begun) {
    wait_for_previous();
    let_next_start();
    const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    auto state = [&](int slot) { return states + ((size_t)slot * rows + row) * (2 + c); };
    constexpr int MOST = 8;
    float m = -INFINITY, l = 0.0f, o[MOST] = {};
    auto add = [&](const float* from) {
        const float m_b = from[0], most = fmaxf(m, m_b);
        if (most == -INFINITY) return;
        const float f_a = prefill::exp2_fast(m - most), f_b = prefill::exp2_fast(m_b - most);
        m = most, l = fmaf(from[1], f_b, l * f_a);
#pragma unroll
        for (int i = 0; i < MOST; i++)
            if (i * 32 + lane < c) o[i] = fmaf(from[2 + i * 32 + lane], f_b, o[i] * f_a);
    };
    if (begun) add(state(slots));
    for (int span = first; span < first + spans; span++) add(state(span % slots));
    float scale = 1.0f;
    float* to = state(slots) + 2;
    if (out != nullptr) {
        if (sinks != nullptr) {
            const float sink = sinks[row % heads] * prefill::LOG2_E, most = fmaxf(m, sink), f = prefill::exp2_fast(m - most);
            scale = f / fmaf(l, f, prefill::exp2_fast(sink - most));
        } else {
            scale = 1.0f / l;
        }
        to = out + (size_t)row * c;
    } else if (lane == 0) {
        to[-2] = m, to[-1] = l;
    }
#pragma unroll
    for (int i = 0; i < MOST; i++)
        if (i * 32 + lane < c) to[i * 32 + lane] = o[i] * scale;
}
