// Instructions of compute capability 9.0 alone: products of a warpgroup (4 warps), barriers in shared memory, copies by the copy engine.
#pragma once
#include <stdint.h>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_WGMMA 1

// ---- barriers in shared memory (addresses in its own window)

__device__ __forceinline__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory"); }
// By one thread of a warp that is whole (as copy_bulk): that keeps the operands in the warp's own registers.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\n@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n}" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra READY;\nbra AGAIN;\nREADY:\n}" ::"r"(barrier), "r"(parity)
        : "memory");
}
__device__ __forceinline__ void barriers_visible() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Bytes (a multiple of 16) from global to shared memory, counted by a barrier.
__device__ __forceinline__ void copy_bulk(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
    asm volatile(
        "{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\n@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}
// A word in global memory by which another thread block says that what it wrote before is there; who waits takes the flag down.
__device__ __forceinline__ void flag_set(int* flag) { asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory"); }
__device__ __forceinline__ void flag_take(int* flag) {
    int is_set;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(is_set) : "l"(flag) : "memory");
    } while (is_set == 0);
    *flag = 0;
}
template <int N> __device__ __forceinline__ void registers_more() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void registers_fewer() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// ---- products of a warpgroup: D[64][N] (+)= A[64][32] . B[N][32] of signed bytes, A in registers, B in shared memory

// B: rows of 128 bytes, 8 rows (1024 bytes, aligned) after 8 rows, 16-byte pieces swizzled: piece p of row r lies at p ^ r % 8.
__device__ __forceinline__ uint64_t operand_b(uint32_t address) {
    return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 16 | (address & 0x3ffff) >> 4;
}
// From its low word, which counts in 16 bytes.
__device__ __forceinline__ uint64_t operand_b_of(uint32_t low) { return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | low; }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Keeps uses of registers behind the wait ahead of it.
template <int N> __device__ __forceinline__ void settled(int (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(d[i])::"memory");
}

#define R0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define R1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define R2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define R3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define R4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define R5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define R6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define R7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define R16 R0 "," R1
#define R32 R0 "," R1 "," R2 "," R3
#define R64 R32 "," R4 "," R5 "," R6 "," R7
#define O8(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])
#define O16 O8(0), O8(8)
#define O32 O16, O8(16), O8(24)
#define O64 O32, O8(32), O8(40), O8(48), O8(56)
#define WGMMA_OF(N, HALF, A0, A1, A2, A3, B, S)                                                                                            \
    asm volatile("{\n.reg .pred more;\nsetp.ne.b32 more, " S ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" R##HALF "}, {" A0 "," A1 \
                 "," A2 "," A3 "}, " B ", more;\n}" : O##HALF : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)MORE))
template <bool MORE, int HALF> __device__ __forceinline__ void wgmma_s8(int (&d)[HALF], const uint32_t (&a)[4], uint64_t b) {
    static_assert(HALF == 16 || HALF == 32 || HALF == 64, "a width with an instruction below");
    if constexpr (HALF == 16) WGMMA_OF(32, 16, "%16", "%17", "%18", "%19", "%20", "%21");
    if constexpr (HALF == 32) WGMMA_OF(64, 32, "%32", "%33", "%34", "%35", "%36", "%37");
    if constexpr (HALF == 64) WGMMA_OF(128, 64, "%64", "%65", "%66", "%67", "%68", "%69");
}
#endif
