// Reads memory and does nothing with it: the limit that products are measured against.
#include <stdint.h>

// n16 pieces of 16 bytes; each thread reads 8 of them.
extern "C" __global__ void read_only(const uint4* __restrict__ p, unsigned long long n16, unsigned* out) {
    constexpr int U = 8;
    const size_t base = (size_t)blockIdx.x * blockDim.x * U + threadIdx.x;
    uint4 v[U];
#pragma unroll
    for (int u = 0; u < U; u++) {
        v[u] = make_uint4(0, 0, 0, 0);
        if (base + (size_t)u * blockDim.x < n16) v[u] = __ldcs(p + base + (size_t)u * blockDim.x);
    }
    unsigned s = 0;
#pragma unroll
    for (int u = 0; u < U; u++) s += v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    if (s == 0x12345678u) *out = s;
}
