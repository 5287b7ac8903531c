// Handing work to the CPU in the midst of a step, and taking its results, through mapped host memory: a bell is a word there that grows by
// one with each hand-over (bells.cuh).
#include "bells.cuh"
#include "mma.cuh"

namespace {

constexpr int THREADS = 1024;

}  // namespace

// Copies n values to host memory, then sets the bell. One thread block.
extern "C" __global__ void __launch_bounds__(THREADS) hand_over(const float* values, int n, float* to, unsigned* bell, unsigned number) {
    wait_for_previous();
    let_next_start();
    for (int i = threadIdx.x; i < n; i += THREADS) to[i] = values[i];
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) ring_bell(bell, number);
}

// Waits until the bell has reached `number`, then copies n values from host memory. After `patience_ns` it gives up: `late` is set, and the
// values are zeros. One thread block.
extern "C" __global__ void __launch_bounds__(THREADS) take_back(const unsigned* bell, unsigned number, const float* from, float* values, int n,
                                                               unsigned long long patience_ns, unsigned* late) {
    __shared__ bool is_there;
    wait_for_previous();
    let_next_start();
    if (threadIdx.x == 0) is_there = await_bell(bell, number, patience_ns, late);
    __syncthreads();
    const volatile float* there = from;
    for (int i = threadIdx.x; i < n; i += THREADS) values[i] = is_there ? there[i] : 0.0f;
}
