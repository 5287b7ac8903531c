// Products of a warpgroup with half-precision operands: D[64][64] (+)= A[64][16] . B[16][64]. A: registers, or rows of 128 bytes in shared memory, as those that wgmma.cuh
// reads B from; B: 16 rows of 64 values, swizzled alike, which the instruction transposes.
#pragma once
#include "wgmma.cuh"

#ifdef HAS_WGMMA

#define F8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_HALVES(A, B, MORE) "{\n.reg .pred more;\nsetp.ne.b32 more, " MORE ", 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" R32 "}, " A ", " B ", more, 1, 1, "

// A and B by operand_b.
template <bool MORE> __device__ __forceinline__ void wgmma_f16(float (&d)[32], uint64_t a, uint64_t b) {
    asm volatile(WGMMA_HALVES("%32", "%33", "%34") "0, 1;\n}" : F8(0), F8(8), F8(16), F8(24) : "l"(a), "l"(b), "n"((int)MORE));
}
// Adds.
__device__ __forceinline__ void wgmma_f16(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
    asm volatile(WGMMA_HALVES("{%32,%33,%34,%35}", "%36", "%37") "1;\n}" : F8(0), F8(8), F8(16), F8(24) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(1));
}
// Keeps uses of registers behind the wait ahead of it.
__device__ __forceinline__ void settled(float (&d)[32]) {
#pragma unroll
    for (int i = 0; i < 32; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#endif
