// Words in mapped host memory that say how far one side is, to the other one: each grows by one, so that whoever waits for a number knows that all earlier
// ones are past.
#pragma once

__device__ __forceinline__ unsigned read_bell(const unsigned* bell) {
    unsigned value;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(bell) : "memory");
    return value;
}

__device__ __forceinline__ void ring_bell(unsigned* bell, unsigned value) {
    asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(bell), "r"(value) : "memory");
}
