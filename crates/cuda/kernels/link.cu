// What crosses the link beside large copies, which have the copy engine to themselves: a list that waited for it would wait for all that is
// queued there. And the pace of a slower link, for measurements.
#include "mma.cuh"
#include <stdint.h>

namespace {

constexpr int THREADS = 1024;

__device__ __forceinline__ unsigned long long now_ns() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// The host writes lists while kernels run that read others: so nothing is taken from the first-level cache.
__device__ __forceinline__ unsigned long long fresh(const unsigned long long* at) {
    return *(const volatile unsigned long long*)at;
}

}  // namespace

// Copies n words of 8 bytes from host memory, and stores the list's length. One thread block; the first words are on their way while the
// kernel ahead still reads the old list. The kernel behind reads the new one before it waits, so it does not start until this has ended.
extern "C" __global__ void __launch_bounds__(THREADS) send(const unsigned long long* from, unsigned long long* to, int n, uint32_t* length_to,
                                                          uint32_t length) {
    int i = threadIdx.x;
    unsigned long long first = 0;
    if (i < n) first = fresh(from + i);
    wait_for_previous();
    if (i == 0) *length_to = length;
    if (i < n) to[i] = first;
    for (i += THREADS; i < n; i += THREADS) to[i] = fresh(from + i);
}

// Before a copy: the link has rested if it was free for more than `slack_ns`. One thread.
extern "C" __global__ void pace_begin(unsigned long long* free_at, unsigned long long slack_ns) {
    const unsigned long long now = now_ns();
    if (now > *free_at + slack_ns) *free_at = now;
}

// After a copy that takes `ns` on the slower link: waits until it is over there. One thread.
extern "C" __global__ void pace_end(unsigned long long* free_at, unsigned long long ns) {
    *free_at += ns;
    while (now_ns() < *free_at) __nanosleep(500);
}
