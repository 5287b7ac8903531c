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

__device__ __forceinline__ unsigned long long now_ns() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// Waits until the bell has reached `number`; by one thread. After `patience_ns` it gives up, and sets `late`: who was late once is not waited for again.
__device__ __forceinline__ bool await_bell(const unsigned* bell, unsigned number, unsigned long long patience_ns, unsigned* late) {
    if ((int)(read_bell(bell) - number) >= 0) return true;
    if (read_bell(late) != 0) return false;
    const unsigned long long end = now_ns() + patience_ns;
    while (now_ns() < end)
        if ((int)(read_bell(bell) - number) >= 0) return true;
    ring_bell(late, 1);
    return false;
}
