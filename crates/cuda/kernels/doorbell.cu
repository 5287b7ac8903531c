// Handing work to the CPU in the midst of a step, and taking its results, through mapped host memory: a bell is a word there that grows by
// one with each hand-over (bells.cuh).
#include "bells.cuh"
#include "mma.cuh"

namespace {

constexpr int THREADS = 1024;

__device__ __forceinline__ float4 fresh(const float4* at) {
    float4 v;
    asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at) : "memory");
    return v;
}

}  // namespace

// Copies n values to host memory, then sets the bell to the number of this hand-over, which `count` counts. One thread block. What its other threads wrote is
// seen by who sees the bell: a barrier is between them and the thread that sets it, whose store releases.
extern "C" __global__ void __launch_bounds__(THREADS) hand_over(const float* values, int n, float* to, unsigned* bell, unsigned* count) {
    wait_for_previous();
    let_next_start();
    const int quads = n / 4;
    for (int i = threadIdx.x; i < quads; i += THREADS) ((float4*)to)[i] = ((const float4*)values)[i];
    for (int i = 4 * quads + threadIdx.x; i < n; i += THREADS) to[i] = values[i];
    __syncthreads();
    if (threadIdx.x == 0) ring_bell(bell, *count += 1);
}

// Waits until the bell has reached the number of the last hand-over, then copies n values from host memory, each thread's first two quads on their way at once.
// After `patience_ns` it gives up: `late` is set, and the values are zeros. One thread block.
extern "C" __global__ void __launch_bounds__(THREADS) take_back(const unsigned* bell, const unsigned* count, const float* from, float* values, int n,
                                                               unsigned long long patience_ns, unsigned* late) {
    __shared__ bool is_there;
    wait_for_previous();
    let_next_start();
    if (threadIdx.x == 0) is_there = await_bell(bell, *count, patience_ns, late);
    __syncthreads();
    const int quads = n / 4;
    if (!is_there) {
        for (int i = threadIdx.x; i < n; i += THREADS) values[i] = 0.0f;
        return;
    }
    for (int i = threadIdx.x; i < quads; i += 2 * THREADS) {
        const bool has_second = i + THREADS < quads;
        const float4 first = fresh((const float4*)from + i);
        const float4 second = fresh((const float4*)from + (has_second ? i + THREADS : i));
        ((float4*)values)[i] = first;
        if (has_second) ((float4*)values)[i + THREADS] = second;
    }
    const volatile float* there = from;
    for (int i = 4 * quads + threadIdx.x; i < n; i += THREADS) values[i] = there[i];
}
