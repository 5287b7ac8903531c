// Cells written into blocks: how values are stored (attention_cache.cuh), by GGML's rules.
//
// A head with a value that is not finite, or too large for its scale, is NaN as a whole in 8 and 4 bits.
#pragma once
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

// The code of one value, by GGML's rules.
__device__ int code_of(int type, float x, float inverse) {
    const float y = x * inverse;
    if (type == cache::Q8_0) return y != y ? 0 : (int)roundf(fminf(fmaxf(y, -127.0f), 127.0f));
    return min(max(__float2int_rz(y + 8.5f), 0), 15);
}

// Codes of 32 values, four a word: value i in byte i; or low nibble i, high nibble i + 16.
__device__ void encode(int type, const float* x, float d, unsigned (&words)[8]) {
    const float inverse = d == 0.0f ? 0.0f : 1.0f / d;
    int codes[RUN];
#pragma unroll
    for (int i = 0; i < RUN; i++) codes[i] = code_of(type, x[i], inverse);
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

// A cell's head of K or V by one lane; other lanes have other cells, rows of threads other runs.
__device__ __forceinline__ void append_cell(const float* from, uint8_t* to, bool is_k, int type, int c, int n) {
    const int panel = n / PANEL, lane = n % PANEL, runs = c / RUN;
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

// One cell's head of K or V, which lies in shared memory, by a warp. `to`: where the head's K or V begins in the block.
__device__ __forceinline__ void append_head(const float* from, uint8_t* to, bool is_k, int type, int c, int n) {
    const int panel = n / PANEL, at = n % PANEL, lane = threadIdx.x % 32, runs = c / RUN;
    if (cache::is_float(type)) {
        for (int i = lane; i < c; i += 32) ((unsigned short*)to)[is_k ? (panel * c + i) * PANEL + at : n * c + i] = half_bits(type, from[i]);
        return;
    }
    // 128 values at a time, four a lane, eight lanes a run. First all scales, as one bad run spoils the head.
    const bool is_q4 = type == cache::Q4_0;
    auto piece = [&](int first) { return first + 4 * lane < c ? *(const float4*)(from + first + 4 * lane) : make_float4(0, 0, 0, 0); };
    auto scale_of_run = [&](const float4& x) {
        const float v[4] = {x.x, x.y, x.z, x.w};
        float signed_most = 0.0f;
        unsigned most = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned bits = __float_as_uint(v[i]) & 0x7fffffffu;
            if (bits > most) most = bits, signed_most = v[i];
        }
        unsigned of_run = most;
#pragma unroll
        for (int s = 1; s < 8; s *= 2) of_run = max(of_run, __shfl_xor_sync(~0u, of_run, s));
        // The first lane of the run that has it.
        const unsigned having = __ballot_sync(~0u, most == of_run) & 255u << lane / 8 * 8;
        signed_most = __shfl_sync(~0u, signed_most, __ffs(having) - 1);
        return scale_of(type, of_run == 0 ? 0.0f : of_run < 0x7f800000u ? signed_most : NAN);
    };
    bool is_nan = false;
    for (int first = 0; first < c; first += 128) {
        const float d = scale_of_run(piece(first));
        is_nan = __any_sync(~0u, is_nan || !(fabsf(__half2float(__float2half_rn(d))) < INFINITY));
    }
    const int words_a_run = is_q4 ? 4 : 8, w = lane % 8;
    unsigned* codes = (unsigned*)(to + cache::scale_bytes(type, CELLS * c));
    for (int first = 0; first < c; first += 128) {
        const int run = first / RUN + lane / 8;
        const float4 x = piece(first);
        const float d = scale_of_run(x), inverse = d == 0.0f ? 0.0f : 1.0f / d, v[4] = {x.x, x.y, x.z, x.w};
        unsigned word = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) word |= (is_nan ? 0u : (unsigned)code_of(type, v[i], inverse) & 255) << 8 * i;
        const unsigned high = __shfl_down_sync(~0u, word, 4);
        if (is_q4) word |= high << 4;
        if (run >= runs) continue;
        if (w == 0) ((unsigned short*)to)[is_k ? (panel * runs + run) * PANEL + at : n * runs + run] = is_nan ? 0x7e00 : __half_as_ushort(__float2half_rn(d));
        if (w < words_a_run) codes[is_k ? ((panel * runs + run) * words_a_run + w) * PANEL + at : (n * runs + run) * words_a_run + w] = word;
    }
}

}  // namespace
