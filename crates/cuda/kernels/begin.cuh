// What a step of one token begins with: its record, in host memory that the device reads.
//
//   word 0 the token's id, 1 its position, then cosines and sines of the first list of angles (`first` each), of the second (`second` each)
#pragma once
#include <stdint.h>

#define BEGIN_PARAMETERS const uint32_t *step, uint32_t *position, uint32_t *cos0, uint32_t *sin0, uint32_t *cos1, uint32_t *sin1, int first, int second
#define BEGIN_ARGUMENTS step, position, cos0, sin0, cos1, sin1, first, second

// Copies the position and the angles to where the step's kernels read them. The host writes records while kernels run that read others: so
// nothing is taken from the first-level cache.
__device__ __forceinline__ void copy_step(BEGIN_PARAMETERS) {
    const int threads = gridDim.x * blockDim.x, words = 2 * (first + second);
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i <= words; i += threads) {
        const uint32_t x = *(const volatile uint32_t*)(step + 1 + i);
        int at = i - 1;
        if (i == 0) {
            *position = x;
        } else if (at < 2 * first) {
            (at < first ? cos0 : sin0)[at % first] = x;
        } else {
            at -= 2 * first;
            (at < second ? cos1 : sin1)[at % second] = x;
        }
    }
}
