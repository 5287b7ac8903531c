// Prompt attention: kernels by head size, with f16 as it lies in memory and with types that are converted, and the merge of spans.
#include "attention_prefill.cuh"

PREFILL_KERNEL(prefill_64, 64, 2, 4, true)
PREFILL_KERNEL(prefill_96, 96, 2, 4, true)
PREFILL_KERNEL(prefill_128, 128, 2, 4, true)
PREFILL_KERNEL(prefill_256, 256, 1, 8, true)
PREFILL_KERNEL(prefill_64_converted, 64, 2, 4, false)
PREFILL_KERNEL(prefill_96_converted, 96, 2, 4, false)
PREFILL_KERNEL(prefill_128_converted, 128, 2, 4, false)
PREFILL_KERNEL(prefill_256_converted, 256, 1, 8, false)

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
