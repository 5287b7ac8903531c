// Activations quantised by themselves (acts.cuh).
//
// Shapes: x [T, K] f32.
#include "acts_many.cuh"
#include "mma.cuh"

// Blocks of 32. grid: (ceil(K / 4 / blockDim), T).
extern "C" __global__ void quantise_32(const float* __restrict__ x, uint32_t* q, int2* meta, int K, int how) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y, run = i / 8;
    const bool live = run < K / 32;
    const float4 v = live ? *(const float4*)(x + (size_t)t * K + i * 4) : make_float4(0, 0, 0, 0);
    emit_32({q, meta, nullptr, nullptr, K, how}, v, t, run, i % 8, live);
}

// Blocks of 256. grid: (ceil(K / 256 / warps), T).
extern "C" __global__ void quantise_256(const float* __restrict__ x, uint32_t* q, float* scale, __half* s16, int K, int how) {
    let_next_start();
    wait_for_previous();
    const int lane = threadIdx.x % 32, block = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, t = blockIdx.y;
    if (block >= K / 256) return;
    const float4* from = (const float4*)(x + (size_t)t * K + block * 256);
    float4 v[2] = {from[lane], from[lane + 32]};
    emit_256({q, nullptr, scale, s16, K, how}, v, t, block);
}

// The same of many tokens, arranged: 8 values a thread. grid: (ceil(K / 8 / blockDim), T).
extern "C" __global__ void quantise_32_many(const float* __restrict__ x, uint32_t* q, int2* meta, int K, int how) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    const bool live = i < K / 8;
    const float4* from = (const float4*)(x + (size_t)t * K) + 2 * i;
    float4 v[2] = {};
    if (live) v[0] = from[0], v[1] = from[1];
    many::emit_32({q, meta, nullptr, nullptr, K, how}, v, t, i / 4, i % 4, live);
}
extern "C" __global__ void quantise_256_many(const float* __restrict__ x, uint32_t* q, float* scale, __half* s16, int K, int how) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    if (i >= K / 8) return;
    const float4* from = (const float4*)(x + (size_t)t * K) + 2 * i;
    float4 v[2] = {from[0], from[1]};
    many::emit_256({q, nullptr, scale, s16, K, how}, v, t, i / 32);
}
