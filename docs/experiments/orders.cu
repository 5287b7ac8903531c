// Which accumulation order of quantised products can a GPU run at its limits? The order becomes part of the definition of every product
// (CPU and GPU must agree bit for bit), so it is measured before it is frozen. Results: orders-h200.md.
//
// Shapes: W [N rows, K] in 4- or 8-bit blocks, activations [T tokens, K] in int8 blocks, y [T, N].
//
//   A    block of 32:   acc = fma(f32(idot), d_w*d_a, acc)      Q8_0, Q4_0; d_a per 32
//   A2   block of 32:   acc = fma(f32(idot), d_w, acc)          Q8_0, Q4_0; d_a per 256 = per chunk: y = fma(acc, d_a, y)
//   B    block of 256:  acc = fma(f32(sum_j sc_j*dot_j), d_w*d_a, acc); acc = fma(f32(sum_j min_j*suma_j), -(dmin*d_a), acc)   Q4_K
//
// A and B: acc starts each chunk of C values at +0; y is the first chunk's acc, to which the others are added in order.
// Every kernel is compared bit for bit with the scalar loops in `reference` before it is timed, and sampled outputs of every timed shape are too.
//
// Layout of W: tiles of 16 rows, K-contiguous; in a tile's block the rows' fields are interleaved:
//   Q8_0   [d f16 x16] [8 groups][16 rows][4 bytes]
//   Q4_0   [d f16 x16] [4 groups][16 rows][4 bytes]     low nibbles: group g, high nibbles: group g+4; group g = values 4g..4g+3
//   Q4_K   [d f16 x16] [dmin f16 x16] [scale bytes: 12 x16 rows x1, or 3 x16 rows x4] 8 x [4 groups][16 rows][4 bytes]
// Activations: int8 [T, K] with the words of each 32 values in the order 0,4,1,5,2,6,3,7, so that a lane's two B registers are one 8-byte load.
#include <cuda_fp16.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#define CHECK(x)                                                                        \
    do {                                                                                \
        cudaError_t e_ = (x);                                                           \
        if (e_ != cudaSuccess) {                                                        \
            printf("%s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_));   \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

enum Fmt { Q8_0, Q4_0, Q4_K, Q4_KW };  // Q4_KW: Q4_K whose 12 scale bytes are 3 words a row
static const char* FMT_NAME[] = {"Q8_0", "Q4_0", "Q4_K", "Q4_K(3x4)"};
__host__ __device__ constexpr int block_len(int f) { return f >= Q4_K ? 256 : 32; }
__host__ __device__ constexpr int block_bytes(int f) { return f == Q8_0 ? 544 : f == Q4_0 ? 288 : 2304; }  // of 16 rows

// Activations of T tokens. `block` is 32 or 256: the values that share a scale.
struct Act {
    const int8_t* q;     // [T][K], words permuted
    const float* d;      // [K/block][T]
    const int* n8;       // [K/32][T]: -8 * sum of the 32 codes
    const int* sum32;    // [K/32][T]
    const __half* s16;   // [K/256][T][16]: sums of 16 codes, exact in f16
};

// ---------------------------------------------------------------------------------------------------- scalar definition (host)

static float f16(const uint8_t* p) {
    __half h;
    memcpy(&h, p, 2);
    return __half2float(h);
}

struct HostAct {
    int T, K, block;
    std::vector<int8_t> q;  // [T][K] in the order of K
    std::vector<float> d;   // [K/block][T]
};

static int weight_code(int fmt, const uint8_t* blk, int r, int k) {  // k within a block of 32; blk = the codes
    int g = k / 4, j = k % 4;
    if (fmt == Q8_0) return (int8_t)blk[g * 64 + r * 4 + j];
    int byte = blk[(g % 4) * 64 + r * 4 + j];
    int nib = g < 4 ? byte & 15 : byte >> 4;
    return fmt == Q4_0 ? nib - 8 : nib;
}

static float reference(int fmt, bool a2, const uint8_t* w, int row, int token, const HostAct& a, int C) {
    const int K = a.K, BL = block_len(fmt), KB = K / BL, BS = block_bytes(fmt), T = a.T;
    const uint8_t* tile = w + (size_t)(row / 16) * KB * BS;
    const int r = row % 16;
    const int8_t* q = a.q.data() + (size_t)token * K;
    float y = 0;
    for (int k0 = 0; k0 < K; k0 += C) {
        float acc = 0;
        int k1 = std::min(K, k0 + C);
        for (int b = k0 / BL; b < k1 / BL; b++) {
            const uint8_t* blk = tile + (size_t)b * BS;
            if (BL == 32) {
                int dot = 0;
                for (int k = 0; k < 32; k++) dot += weight_code(fmt, blk + 32, r, k) * q[b * 32 + k];
                float dw = f16(blk + 2 * r);
                acc = a2 ? fmaf((float)dot, dw, acc) : fmaf((float)dot, dw * a.d[(size_t)b * T + token], acc);
            } else {
                uint8_t s[12], sc[8], mn[8];
                for (int i = 0; i < 12; i++) s[i] = fmt == Q4_K ? blk[64 + i * 16 + r] : blk[64 + (i / 4) * 64 + r * 4 + i % 4];
                for (int j = 0; j < 4; j++) {
                    sc[j] = s[j] & 63, mn[j] = s[4 + j] & 63;
                    sc[4 + j] = (s[8 + j] & 15) | (s[j] >> 6) << 4, mn[4 + j] = s[8 + j] >> 4 | (s[4 + j] >> 6) << 4;
                }
                int I = 0, M = 0;
                for (int j = 0; j < 8; j++) {
                    int dot = 0, sum = 0;
                    for (int k = 0; k < 32; k++) {
                        int v = q[b * 256 + j * 32 + k];
                        dot += weight_code(fmt, blk + 256 + j * 256, r, k) * v, sum += v;
                    }
                    I += sc[j] * dot, M += mn[j] * sum;
                }
                float da = a.d[(size_t)b * T + token];
                acc = fmaf((float)I, f16(blk + 2 * r) * da, acc);
                acc = fmaf((float)M, -(f16(blk + 32 + 2 * r) * da), acc);
            }
        }
        if (a2) y = fmaf(acc, a.d[(size_t)(k0 / C) * T + token], y);
        else y = k0 == 0 ? acc : y + acc;
    }
    return y;
}

// ---------------------------------------------------------------------------------------------------- device helpers

// D = A*B + D, 16x8x32. Row `gid` of the fragment is row 2*gid of the tile, row gid+8 is row 2*gid+1: the two lie side by side.
template <bool U8>
__device__ __forceinline__ void mma(int (&d)[4], const uint32_t (&a)[4], uint2 b) {
    if (U8)
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
    else
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Unsigned bytes times signed bytes, summed into c.
__device__ __forceinline__ int dp4a_us(uint32_t a, uint32_t b, int c) {
    int d;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ __forceinline__ void cp16(void* smem, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(smem)), "l"(global) : "memory");
}
__device__ __forceinline__ void cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void cp_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// 4 codes q in 0..15 to q-8 as signed bytes; no borrow crosses a byte.
__device__ __forceinline__ uint32_t minus8(uint32_t v) { return (((v & 0x0f0f0f0fu) | 0x80808080u) - 0x08080808u) ^ 0x80808080u; }

// An integer |i| < 2^22 to f32 exactly, when the product's accumulator started at MAGIC: one addition instead of a conversion.
constexpr int MAGIC = 0x4b400000;
__device__ __forceinline__ float from_magic(int i) { return __fadd_rn(__int_as_float(i), -12582912.0f); }

// A row's 12 scale bytes as words: 6-bit scales of sub-blocks 0-3, 4-7, then minimums 0-3, 4-7.
struct Scales { uint32_t sc[2], mn[2]; };
template <int FMT> __device__ __forceinline__ Scales scales_of(const uint8_t* p, int r) {
    uint32_t w[3];
    if (FMT == Q4_KW) {
        for (int i = 0; i < 3; i++) w[i] = *(const uint32_t*)(p + i * 64 + r * 4);
    } else {
        for (int i = 0; i < 3; i++)
            w[i] = p[(i * 4) * 16 + r] | p[(i * 4 + 1) * 16 + r] << 8 | p[(i * 4 + 2) * 16 + r] << 16 | (uint32_t)p[(i * 4 + 3) * 16 + r] << 24;
    }
    Scales s;
    s.sc[0] = w[0] & 0x3f3f3f3fu;
    s.mn[0] = w[1] & 0x3f3f3f3fu;
    s.sc[1] = (w[2] & 0x0f0f0f0fu) | ((w[0] >> 2) & 0x30303030u);
    s.mn[1] = ((w[2] >> 4) & 0x0f0f0f0fu) | ((w[1] >> 2) & 0x30303030u);
    return s;
}

// ---------------------------------------------------------------------------------------------------- GEMV

// The block's partials [slot][T][16 rows] to y: slot = tile * chunks + chunk; chunks are added in order.
template <bool A2> __device__ __forceinline__ void add_chunks(const float* part, int T, int tiles, int chunks, int first_tile, int N, const float* d, float* y) {
    __syncthreads();
    for (int i = threadIdx.x; i < tiles * T * 16; i += blockDim.x) {
        int tile = i / (T * 16), t = i / 16 % T, row = (first_tile + tile) * 16 + i % 16;
        if (row >= N) continue;
        const float* p = part + ((size_t)tile * chunks * T + t) * 16 + i % 16;
        float sum = A2 ? __fmaf_rn(p[0], d[t], 0.0f) : p[0];
        for (int c = 1; c < chunks; c++) sum = A2 ? __fmaf_rn(p[c * T * 16], d[c * T + t], sum) : __fadd_rn(sum, p[c * T * 16]);
        y[(size_t)t * N + row] = sum;
    }
}

// Both kernels work in batches of U blocks: all loads of a batch are issued before the first use, the batch's activations go to shared memory
// that only these LANES lanes use, then the blocks follow one another in the order of K.
template <int FMT, int T, int U> struct Stage {
    static constexpr int BL = block_len(FMT), Q = T * U * BL, D = T * U * 4, SUM = T * U * (BL / 32) * 4;
    static constexpr int S16_AT = (Q + D + SUM + 15) / 16 * 16, S16 = BL == 256 ? T * U * 32 : 0;  // 16-byte copies
    static constexpr int BYTES = S16_AT + S16;
};
template <int FMT, int T, int U, int LANES>
__device__ __forceinline__ void stage(uint8_t* s, const Act& act, int K, int b, int nb, int lane, unsigned mask, bool scales) {
    using S = Stage<FMT, T, U>;
    constexpr int BL = S::BL, Q16 = U * BL / 16, ND = T * U, NS = T * U * (BL / 32);
    uint4 q[T * ((Q16 + LANES - 1) / LANES)];
    float d[(ND + LANES - 1) / LANES];
    int sum[(NS + LANES - 1) / LANES];
    const int* sums = BL == 32 ? act.n8 : act.sum32;
#pragma unroll
    for (int t = 0; t < T; t++)
#pragma unroll
        for (int i = 0; i < (Q16 + LANES - 1) / LANES; i++) {
            const int p = i * LANES + lane;
            q[t * ((Q16 + LANES - 1) / LANES) + i] = make_uint4(0, 0, 0, 0);
            if (p < nb * BL / 16) q[t * ((Q16 + LANES - 1) / LANES) + i] = *(const uint4*)(act.q + (size_t)t * K + (size_t)b * BL + p * 16);
        }
#pragma unroll
    for (int i = 0; i < (ND + LANES - 1) / LANES; i++) d[i] = scales && i * LANES + lane < nb * T ? act.d[b * T + i * LANES + lane] : 0.0f;
#pragma unroll
    for (int i = 0; i < (NS + LANES - 1) / LANES; i++) sum[i] = i * LANES + lane < nb * T * (BL / 32) ? sums[b * (BL / 32) * T + i * LANES + lane] : 0;
    __syncwarp(mask);
#pragma unroll
    for (int t = 0; t < T; t++)
#pragma unroll
        for (int i = 0; i < (Q16 + LANES - 1) / LANES; i++)
            if (i * LANES + lane < Q16) *(uint4*)(s + t * U * BL + (i * LANES + lane) * 16) = q[t * ((Q16 + LANES - 1) / LANES) + i];
#pragma unroll
    for (int i = 0; i < (ND + LANES - 1) / LANES; i++)
        if (i * LANES + lane < ND) ((float*)(s + S::Q))[i * LANES + lane] = d[i];
#pragma unroll
    for (int i = 0; i < (NS + LANES - 1) / LANES; i++)
        if (i * LANES + lane < NS) ((int*)(s + S::Q + S::D))[i * LANES + lane] = sum[i];
    if (BL == 256 && LANES == 32)
        for (int i = lane; i < nb * T * 2; i += LANES) *(uint4*)(s + S::S16_AT + i * 16) = *(const uint4*)(act.s16 + (size_t)b * T * 16 + i * 8);
    __syncwarp(mask);
}

// One half-warp a (tile, chunk), one lane a row: integers by dp4a, nothing crosses lanes.
template <int FMT, int T, bool A2, int U>
__global__ void gemv_dp4a(const uint8_t* __restrict__ w, Act act, float* __restrict__ y, int N, int K, int C, int tiles_per_block) {
    extern __shared__ __align__(16) float part[];
    using S = Stage<FMT, T, U>;
    constexpr int BL = block_len(FMT), BS = block_bytes(FMT), W = FMT == Q8_0 ? 8 : 4;
    const int KB = K / BL, CB = C / BL, chunks = (KB + CB - 1) / CB;
    const int r = threadIdx.x % 16, first_tile = blockIdx.x * tiles_per_block;
    const unsigned mask = 0xffffu << (threadIdx.x & 16);
    uint8_t* s = (uint8_t*)(part + tiles_per_block * chunks * T * 16) + threadIdx.x / 16 * S::BYTES;
    const float* sd = (const float*)(s + S::Q);
    const int* ss = (const int*)(s + S::Q + S::D);
    for (int slot = threadIdx.x / 16; slot < tiles_per_block * chunks; slot += blockDim.x / 16) {
        const int tile = first_tile + slot / chunks, chunk = slot % chunks;
        if (tile * 16 >= N) break;
        const int b1 = min(KB, (chunk + 1) * CB);
        float acc[T];
        for (int t = 0; t < T; t++) acc[t] = 0.0f;
#pragma unroll 1
        for (int b = chunk * CB; b < b1; b += U) {
            const int nb = min(U, b1 - b);
            const uint8_t* p = w + ((size_t)tile * KB + b) * BS;
            if constexpr (BL == 32) {
                uint32_t v[U][W];
                __half dh[U];
#pragma unroll
                for (int u = 0; u < U; u++) {
                    const uint8_t* pu = p + min(u, nb - 1) * BS;
                    dh[u] = *(const __half*)(pu + 2 * r);
#pragma unroll
                    for (int g = 0; g < W; g++) v[u][g] = __ldcs((const unsigned*)(pu + 32 + g * 64 + r * 4));
                }
                stage<FMT, T, U, 16>(s, act, K, b, nb, r, mask, !A2);
#pragma unroll
                for (int u = 0; u < U; u++) {
                    if (u >= nb) break;
                    const float dw = __half2float(dh[u]);
#pragma unroll
                    for (int t = 0; t < T; t++) {
                        const uint4 x = *(const uint4*)(s + (t * U + u) * 32), z = *(const uint4*)(s + (t * U + u) * 32 + 16);
                        const uint32_t a[8] = {x.x, x.y, x.z, x.w, z.x, z.y, z.z, z.w};
                        int dot = FMT == Q8_0 ? 0 : ss[u * T + t];
#pragma unroll
                        for (int g = 0; g < 4; g++) {
                            if (FMT == Q8_0) {
                                dot = __dp4a((int)v[u][g], (int)a[2 * g], dot);
                                dot = __dp4a((int)v[u][(g + 4) % W], (int)a[2 * g + 1], dot);
                            } else {
                                dot = dp4a_us(v[u][g] & 0x0f0f0f0fu, a[2 * g], dot);
                                dot = dp4a_us((v[u][g] >> 4) & 0x0f0f0f0fu, a[2 * g + 1], dot);
                            }
                        }
                        acc[t] = __fmaf_rn((float)dot, A2 ? dw : __fmul_rn(dw, sd[u * T + t]), acc[t]);
                    }
                }
            } else {
                uint32_t v[U][8][4];
                __half dh[U], mh[U];
                Scales sc[U];
#pragma unroll
                for (int u = 0; u < U; u++) {
                    const uint8_t* pu = p + min(u, nb - 1) * BS;
                    dh[u] = *(const __half*)(pu + 2 * r), mh[u] = *(const __half*)(pu + 32 + 2 * r);
#pragma unroll
                    for (int j = 0; j < 8; j++)
#pragma unroll
                        for (int g = 0; g < 4; g++) v[u][j][g] = __ldcs((const unsigned*)(pu + 256 + j * 256 + g * 64 + r * 4));
                    sc[u] = scales_of<FMT>(pu + 64, r);
                }
                stage<FMT, T, U, 16>(s, act, K, b, nb, r, mask, true);
#pragma unroll
                for (int u = 0; u < U; u++) {
                    if (u >= nb) break;
                    const float dw = __half2float(dh[u]), dmin = __half2float(mh[u]);
                    int I[T], M[T];
                    for (int t = 0; t < T; t++) I[t] = 0, M[t] = 0;
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        const int f = __byte_perm(sc[u].sc[j / 4], 0, 0x4440 + j % 4), mn = __byte_perm(sc[u].mn[j / 4], 0, 0x4440 + j % 4);
#pragma unroll
                        for (int t = 0; t < T; t++) {
                            const uint8_t* qt = s + (t * U + u) * 256 + j * 32;
                            const uint4 x = *(const uint4*)qt, z = *(const uint4*)(qt + 16);
                            const uint32_t a[8] = {x.x, x.y, x.z, x.w, z.x, z.y, z.z, z.w};
                            int dot = 0;
#pragma unroll
                            for (int g = 0; g < 4; g++) {
                                dot = dp4a_us(v[u][j][g] & 0x0f0f0f0fu, a[2 * g], dot);
                                dot = dp4a_us((v[u][j][g] >> 4) & 0x0f0f0f0fu, a[2 * g + 1], dot);
                            }
                            I[t] += f * dot;
                            M[t] += mn * ss[(u * 8 + j) * T + t];
                        }
                    }
#pragma unroll
                    for (int t = 0; t < T; t++) {
                        const float da = sd[u * T + t];
                        acc[t] = __fmaf_rn((float)I[t], __fmul_rn(dw, da), acc[t]);
                        acc[t] = __fmaf_rn((float)M[t], -__fmul_rn(dmin, da), acc[t]);
                    }
                }
            }
        }
        for (int t = 0; t < T; t++) part[(slot * T + t) * 16 + r] = acc[t];
    }
    add_chunks<A2>(part, T, tiles_per_block, chunks, first_tile, N, act.d, y);
}

// One warp a (tile, chunk): integers by mma with up to 8 tokens as columns; a lane ends with rows 2*gid, 2*gid+1 of tokens 2*tig, 2*tig+1.
template <int FMT, int T, bool A2, int U>
__global__ void gemv_mma(const uint8_t* __restrict__ w, Act act, float* __restrict__ y, int N, int K, int C, int tiles_per_block) {
    extern __shared__ __align__(16) float part[];
    using S = Stage<FMT, T, U>;
    constexpr int BL = block_len(FMT), BS = block_bytes(FMT), COLS = T == 1 ? 1 : 2;
    const int KB = K / BL, CB = C / BL, chunks = (KB + CB - 1) / CB;
    const int lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4, first_tile = blockIdx.x * tiles_per_block;
    const bool has_b = gid < T, has_c = 2 * tig < T;
    const int tb = has_b ? gid : 0, tc = has_c ? 2 * tig : 0;
    uint8_t* s = (uint8_t*)(part + tiles_per_block * chunks * T * 16) + threadIdx.x / 32 * S::BYTES;
    const uint8_t* sq = s + tb * U * BL + tig * 8;
    const float* sd = (const float*)(s + S::Q) + tc;
    for (int slot = threadIdx.x / 32; slot < tiles_per_block * chunks; slot += blockDim.x / 32) {
        const int tile = first_tile + slot / chunks, chunk = slot % chunks;
        if (tile * 16 >= N) break;
        const int b1 = min(KB, (chunk + 1) * CB);
        float acc[2 * COLS] = {};
#pragma unroll 1
        for (int b = chunk * CB; b < b1; b += U) {
            const int nb = min(U, b1 - b);
            const uint8_t* p = w + ((size_t)tile * KB + b) * BS;
            if constexpr (BL == 32) {
                uint2 v[U], v2[FMT == Q8_0 ? U : 1];
                __half2 dh[U];
#pragma unroll
                for (int u = 0; u < U; u++) {
                    const uint8_t* pu = p + min(u, nb - 1) * BS;
                    dh[u] = *(const __half2*)(pu + 4 * gid);
                    v[u] = __ldcs((const uint2*)(pu + 32 + tig * 64 + gid * 8));
                    if (FMT == Q8_0) v2[u % (FMT == Q8_0 ? U : 1)] = __ldcs((const uint2*)(pu + 32 + 256 + tig * 64 + gid * 8));
                }
                stage<FMT, T, U, 32>(s, act, K, b, nb, lane, ~0u, !A2);
#pragma unroll
                for (int u = 0; u < U; u++) {
                    if (u >= nb) break;
                    const uint2 bq = *(const uint2*)(sq + u * 32);  // columns without a token are computed and not stored
                    int d[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
                    if (FMT == Q8_0) {
                        const uint2 x = v2[u % (FMT == Q8_0 ? U : 1)];
                        const uint32_t a[4] = {v[u].x, v[u].y, x.x, x.y};
                        mma<false>(d, a, bq);
                    } else {
                        const uint32_t a[4] = {minus8(v[u].x), minus8(v[u].y), minus8(v[u].x >> 4), minus8(v[u].y >> 4)};
                        mma<false>(d, a, bq);
                    }
                    const float2 dw = __half22float2(dh[u]);
#pragma unroll
                    for (int c = 0; c < COLS; c++) {
                        const float da = A2 ? 1.0f : sd[u * T + c];
                        acc[c] = __fmaf_rn(from_magic(d[c]), A2 ? dw.x : __fmul_rn(dw.x, da), acc[c]);
                        acc[COLS + c] = __fmaf_rn(from_magic(d[2 + c]), A2 ? dw.y : __fmul_rn(dw.y, da), acc[COLS + c]);
                    }
                }
            } else {
                uint2 v[U][8];
                __half2 dh[U], mh[U];
                Scales sw[U];
#pragma unroll
                for (int u = 0; u < U; u++) {
                    const uint8_t* pu = p + min(u, nb - 1) * BS;
                    dh[u] = *(const __half2*)(pu + 4 * gid), mh[u] = *(const __half2*)(pu + 32 + 4 * gid);
#pragma unroll
                    for (int j = 0; j < 8; j++) v[u][j] = __ldcs((const uint2*)(pu + 256 + j * 256 + tig * 64 + gid * 8));
                    sw[u] = scales_of<FMT>(pu + 64, lane % 16);
                }
                stage<FMT, T, U, 32>(s, act, K, b, nb, lane, ~0u, true);
#pragma unroll
                for (int u = 0; u < U; u++) {
                    if (u >= nb) break;
                    uint32_t sc[2][2], am[4];
#pragma unroll
                    for (int r = 0; r < 2; r++)
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            sc[r][h] = __shfl_sync(~0u, sw[u].sc[h], 2 * gid + r);
                            const uint32_t mn = __shfl_sync(~0u, sw[u].mn[h], 2 * gid + r) >> (8 * tig) & 255;
                            const __half2 m2 = __half2half2(__ushort2half_rn((unsigned short)mn));
                            am[h * 2 + r] = *(const uint32_t*)&m2;
                        }
                    int I[2 * COLS] = {};
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        const uint2 bq = *(const uint2*)(sq + u * 256 + j * 32), x = v[u][j];
                        const uint32_t a[4] = {x.x & 0x0f0f0f0fu, x.y & 0x0f0f0f0fu, (x.x >> 4) & 0x0f0f0f0fu, (x.y >> 4) & 0x0f0f0f0fu};
                        int d[4] = {};
                        mma<true>(d, a, bq);
#pragma unroll
                        for (int r = 0; r < 2; r++)
#pragma unroll
                            for (int c = 0; c < COLS; c++) I[r * COLS + c] += (int)__byte_perm(sc[r][j / 4], 0, 0x4440 + j % 4) * d[r * 2 + c];
                    }
                    const uint32_t* sp = (const uint32_t*)(s + S::S16_AT) + (u * T + tb) * 8 + tig;
                    float M[4] = {};
                    mma_f16(M, am, sp[0], sp[4]);
                    const float2 dw = __half22float2(dh[u]), dm = __half22float2(mh[u]);
#pragma unroll
                    for (int c = 0; c < COLS; c++) {
                        const float da = sd[u * T + c];
#pragma unroll
                        for (int r = 0; r < 2; r++) {
                            float& x = acc[r * COLS + c];
                            x = __fmaf_rn((float)I[r * COLS + c], __fmul_rn(r ? dw.y : dw.x, da), x);
                            x = __fmaf_rn(M[r * 2 + c], -__fmul_rn(r ? dm.y : dm.x, da), x);
                        }
                    }
                }
            }
        }
        if (has_c)
            for (int c = 0; c < COLS; c++)
                for (int r = 0; r < 2; r++) part[(slot * T + tc + c) * 16 + 2 * gid + r] = acc[r * COLS + c];
    }
    add_chunks<A2>(part, T, tiles_per_block, chunks, first_tile, N, act.d, y);
}

// The limit: reads `n` bytes (a multiple of 16) with nothing else to do.
template <int U>
__global__ void read_only(const uint4* __restrict__ p, size_t n16, unsigned* out) {
    unsigned s = 0;
    const size_t base = (size_t)blockIdx.x * blockDim.x * U + threadIdx.x;
    uint4 v[U];
#pragma unroll
    for (int u = 0; u < U; u++) {
        v[u] = make_uint4(0, 0, 0, 0);
        if (base + (size_t)u * blockDim.x < n16) v[u] = __ldcs(p + base + (size_t)u * blockDim.x);
    }
#pragma unroll
    for (int u = 0; u < U; u++) s += v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    if (s == 0x12345678u) *out = s;
}

// ---------------------------------------------------------------------------------------------------- mma over many tokens

// A block computes 160 rows x 128 tokens (5120 x 512 is then 128 blocks for 132 SMs), each of 8 warps 80 x 32: FM x FN fragments, 80 outputs a lane.
// The chunk's acc is in registers, y in shared memory.
enum Mode { PER32, PER32_I2F, PER256, SUBSCALE, PLANES };
static const char* MODE_NAME[] = {"A per 32", "A per 32, I2F", "A2 per 256", "B1 integer sub-scale", "B2 two planes"};
constexpr int FM = 5, FN = 4, TILES_BLOCK = 2 * FM, ROWS_BLOCK = 16 * TILES_BLOCK, TOK_BLOCK = 128, THREADS = 256;

template <int FMT> struct Step {  // what one pipeline stage holds
    static constexpr int KS = block_len(FMT) == 256 ? 256 : 64, NB = KS / block_len(FMT);
    static constexpr int A = TILES_BLOCK * NB * block_bytes(FMT), TOK = KS + 32, B = TOK_BLOCK * TOK, D = NB * TOK_BLOCK * 4;
    static constexpr int S = block_len(FMT) == 256 ? TOK_BLOCK * 32 : 0, BYTES = A + B + D + S;
    static constexpr int STAGES = block_len(FMT) == 256 ? 2 : 4, TABLE = A / 16 * 8, SMEM = STAGES * BYTES + THREADS * FM * FN * 16 + TABLE;
};

// Where each 16-byte piece of a step's weights lies and goes: computed once, since the divisions would cost more than the copies.
template <int FMT> __device__ __forceinline__ void piece_table(uint2* table, int tile0, int tiles, int K) {
    using P = Step<FMT>;
    constexpr int BS = block_bytes(FMT), HDR = block_len(FMT) == 256 ? 16 : 2, PB = BS / 16, PT = P::NB * PB;
    for (int i = threadIdx.x; i < P::A / 16; i += THREADS) {
        const int tile = i / PT, p = i % PT, blk = p / PB, pb = p % PB;
        int c = pb - HDR;
        if (c >= 0) c ^= (c >> 3 & 1) << 1;  // so that the 8-byte reads of 16 lanes meet 32 different banks
        table[i] = make_uint2((min(tile0 + tile, tiles - 1) - tile0) * (K / block_len(FMT) * BS) + p * 16, (tile * P::NB + blk) * BS + (HDR + c) * 16);
    }
}

template <int FMT> __device__ __forceinline__ void load_step(uint8_t* st, const uint2* table, const uint8_t* w_step, const Act& act, int tok0, int T, int K, int step) {
    using P = Step<FMT>;
    constexpr int PT = P::KS / 16, TS = THREADS / PT;  // pieces a token; tokens a round
#pragma unroll
    for (int u = 0; u < (P::A / 16 + THREADS - 1) / THREADS; u++) {
        const int i = u * THREADS + threadIdx.x;
        if (P::A / 16 % THREADS == 0 || i < P::A / 16) cp16(st + table[i].y, w_step + table[i].x);
    }
    const int8_t* q = act.q + (size_t)(tok0 + threadIdx.x / PT) * K + step * P::KS + threadIdx.x % PT * 16;
    uint8_t* sb = st + P::A + threadIdx.x / PT * P::TOK + threadIdx.x % PT * 16;
#pragma unroll
    for (int u = 0; u < TOK_BLOCK / TS; u++) cp16(sb + u * TS * P::TOK, q + (size_t)u * TS * K);
    uint8_t* sd = st + P::A + P::B;
    const int i = threadIdx.x;
    if (i < P::NB * 32) cp16(sd + i * 16, act.d + ((size_t)step * P::NB + i / 32) * T + tok0 + i % 32 * 4);
    if (block_len(FMT) == 256) cp16(sd + P::D + i * 16, act.s16 + ((size_t)step * T + tok0) * 16 + i * 8);
}

template <int FMT, int MODE>
__global__ void __launch_bounds__(THREADS, 1) gemm(const uint8_t* __restrict__ w, Act act, float* __restrict__ y, int N, int K, int T, int C) {
    using P = Step<FMT>;
    constexpr int BS = block_bytes(FMT);
    extern __shared__ __align__(16) uint8_t smem[];
    float4* total = (float4*)(smem + P::STAGES * P::BYTES) + threadIdx.x;  // [fragment][THREADS]: only this thread's
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4;
    const int wm = warp / 4, wn = warp % 4, tile0 = blockIdx.x * TILES_BLOCK, tok0 = blockIdx.y * TOK_BLOCK, tiles = N / 16;
    const int steps = K / P::KS, chunk_steps = C / P::KS;
    float acc[FM][FN][4];
    for (int m = 0; m < FM; m++)
        for (int n = 0; n < FN; n++)
            for (int i = 0; i < 4; i++) acc[m][n][i] = 0.0f;

    const uint8_t* w0 = w + (size_t)tile0 * (K / block_len(FMT)) * BS;
    uint2* table = (uint2*)(smem + P::STAGES * P::BYTES + THREADS * FM * FN * 16);
    piece_table<FMT>(table, tile0, tiles, K);
    __syncthreads();
    for (int s = 0; s < P::STAGES - 1; s++) {
        if (s < steps) load_step<FMT>(smem + s * P::BYTES, table, w0 + (size_t)s * P::NB * BS, act, tok0, T, K, s);
        cp_commit();
    }
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        cp_wait<P::STAGES - 2>();
        __syncthreads();
        const int next = step + P::STAGES - 1;
        if (next < steps) load_step<FMT>(smem + next % P::STAGES * P::BYTES, table, w0 + (size_t)next * P::NB * BS, act, tok0, T, K, next);
        cp_commit();
        const uint8_t *st = smem + step % P::STAGES * P::BYTES, *sb = st + P::A + (wn * 32 + gid) * P::TOK + tig * 8;
        const float* sd = (const float*)(st + P::A + P::B) + wn * 32 + 2 * tig;
        const int at = ((tig * 4 + gid / 2) ^ (tig / 2 * 2)) * 16 + gid % 2 * 8;  // this lane's word pair among a run's codes
        if constexpr (block_len(FMT) == 32) {
#pragma unroll
            for (int k = 0; k < P::NB; k++) {
                uint2 b[FN];
                float2 da[FN];
#pragma unroll
                for (int n = 0; n < FN; n++) {
                    b[n] = *(const uint2*)(sb + n * 8 * P::TOK + k * 32);
                    if (MODE != PER256) da[n] = *(const float2*)(sd + k * TOK_BLOCK + n * 8);
                }
#pragma unroll
                for (int m = 0; m < FM; m++) {
                    const uint8_t* blk = st + ((wm * FM + m) * P::NB + k) * BS;
                    const float2 dw = __half22float2(*(const __half2*)(blk + 4 * gid));
                    const uint2 v = *(const uint2*)(blk + 32 + at);
                    uint32_t a[4];
                    if (FMT == Q8_0) {
                        const uint2 u = *(const uint2*)(blk + 32 + 256 + at);
                        a[0] = v.x, a[1] = v.y, a[2] = u.x, a[3] = u.y;
                    } else {
                        a[0] = minus8(v.x), a[1] = minus8(v.y), a[2] = minus8(v.x >> 4), a[3] = minus8(v.y >> 4);
                    }
#pragma unroll
                    for (int n = 0; n < FN; n++) {
                        constexpr int ZERO = MODE == PER32_I2F ? 0 : MAGIC;
                        int d[4] = {ZERO, ZERO, ZERO, ZERO};
                        mma<false>(d, a, b[n]);
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            const float f = MODE == PER32_I2F ? (float)d[i] : from_magic(d[i]), x = i < 2 ? dw.x : dw.y;
                            acc[m][n][i] = __fmaf_rn(f, MODE == PER256 ? x : __fmul_rn(x, i % 2 ? da[n].y : da[n].x), acc[m][n][i]);
                        }
                    }
                }
            }
        } else {
            uint32_t sc[FM][2][2];  // [m][row][half]
            Scales own[(FM + 1) / 2];
#pragma unroll
            for (int m0 = 0; m0 < FM; m0 += 2) {
                own[m0 / 2] = scales_of<FMT>(st + (wm * FM + min(m0 + lane / 16, FM - 1)) * BS + 64, lane % 16);
#pragma unroll
                for (int m = m0; m < min(m0 + 2, FM); m++)
#pragma unroll
                    for (int r = 0; r < 2; r++)
#pragma unroll
                        for (int h = 0; h < 2; h++) sc[m][r][h] = __shfl_sync(~0u, own[m0 / 2].sc[h], (m - m0) * 16 + 2 * gid + r);
            }
            int I[FM][FN][4];
#pragma unroll
            for (int m = 0; m < FM; m++)
#pragma unroll
                for (int n = 0; n < FN; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) I[m][n][i] = 0;
            // PLANES: sc*q = 64*hi + lo; first all hi, then times 64, then all lo into the same integers.
#pragma unroll 1
            for (int pass = MODE == PLANES ? 0 : 1; pass < 2; pass++) {
#pragma unroll 1
                for (int jh = 0; jh < 2; jh++)  // not unrolled: the compiler would load all of a step ahead and spill
#pragma unroll
                    for (int jl = 0; jl < 4; jl++) {
                        const int j = jh * 4 + jl;
                        uint2 b[FN];
#pragma unroll
                        for (int n = 0; n < FN; n++) b[n] = *(const uint2*)(sb + n * 8 * P::TOK + j * 32);
#pragma unroll
                        for (int m = 0; m < FM; m++) {
                            const uint2 v = *(const uint2*)(st + (wm * FM + m) * BS + 256 + j * 256 + at);
                            int f[2];
#pragma unroll
                            for (int r = 0; r < 2; r++) f[r] = __byte_perm(jh ? sc[m][r][1] : sc[m][r][0], 0, 0x4440 + jl);
                            uint32_t a[4] = {v.x & 0x0f0f0f0fu, v.y & 0x0f0f0f0fu, (v.x >> 4) & 0x0f0f0f0fu, (v.y >> 4) & 0x0f0f0f0fu};
                            if (MODE == PLANES)
#pragma unroll
                                for (int i = 0; i < 4; i++) {  // two products of 10 bits a word
                                    const uint32_t e = (a[i] & 0x000f000fu) * f[i % 2], o = (a[i] >> 8 & 0x000f000fu) * f[i % 2];
                                    a[i] = pass ? (e & 0x003f003fu) | (o & 0x003f003fu) << 8 : (e >> 6 & 0x000f000fu) | (o << 2 & 0x0f000f00u);
                                }
#pragma unroll
                            for (int n = 0; n < FN; n++) {
                                if (MODE == PLANES) {
                                    mma<true>(I[m][n], a, b[n]);
                                } else {
                                    int d[4] = {0, 0, 0, 0};
                                    mma<true>(d, a, b[n]);
#pragma unroll
                                    for (int i = 0; i < 4; i++) I[m][n][i] += f[i / 2] * d[i];
                                }
                            }
                        }
                    }
                if (MODE == PLANES && pass == 0)
#pragma unroll
                    for (int m = 0; m < FM; m++)
#pragma unroll
                        for (int n = 0; n < FN; n++)
#pragma unroll
                            for (int i = 0; i < 4; i++) I[m][n][i] *= 64;
            }
            const uint32_t* sp = (const uint32_t*)(st + P::A + P::B + P::D) + (wn * 32 + gid) * 8 + tig;
#pragma unroll
            for (int m = 0; m < FM; m++) {
                const uint8_t* blk = st + (wm * FM + m) * BS;
                const float2 dw = __half22float2(*(const __half2*)(blk + 4 * gid)), dm = __half22float2(*(const __half2*)(blk + 32 + 4 * gid));
                uint32_t am[4];
#pragma unroll
                for (int r = 0; r < 2; r++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const uint32_t mn = __shfl_sync(~0u, own[m / 2].mn[h], m % 2 * 16 + 2 * gid + r) >> (8 * tig) & 255;
                        const __half2 m2 = __half2half2(__ushort2half_rn((unsigned short)mn));
                        am[h * 2 + r] = *(const uint32_t*)&m2;
                    }
#pragma unroll
                for (int n = 0; n < FN; n++) {
                    const float2 da = *(const float2*)(sd + n * 8);
                    float M[4] = {0, 0, 0, 0};
                    mma_f16(M, am, sp[n * 64], sp[n * 64 + 4]);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float& x = acc[m][n][i];
                        const float d = i % 2 ? da.y : da.x;
                        x = __fmaf_rn((float)I[m][n][i], __fmul_rn(i < 2 ? dw.x : dw.y, d), x);
                        x = __fmaf_rn(M[i], -__fmul_rn(i < 2 ? dm.x : dm.y, d), x);
                    }
                }
            }
        }
        if ((step + 1) % chunk_steps == 0 || step + 1 == steps) {
            const bool first = step < chunk_steps;
#pragma unroll
            for (int n = 0; n < FN; n++) {
                const float2 da = MODE == PER256 ? *(const float2*)(act.d + (size_t)(step / chunk_steps) * T + tok0 + wn * 32 + 2 * tig + n * 8) : make_float2(0, 0);
#pragma unroll
                for (int m = 0; m < FM; m++) {
                    float4 t = first ? make_float4(0, 0, 0, 0) : total[(m * FN + n) * THREADS];
                    float* tf = &t.x;
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        if (MODE == PER256) tf[i] = __fmaf_rn(acc[m][n][i], i % 2 ? da.y : da.x, tf[i]);
                        else tf[i] = first ? acc[m][n][i] : __fadd_rn(tf[i], acc[m][n][i]);
                        acc[m][n][i] = 0.0f;
                    }
                    total[(m * FN + n) * THREADS] = t;
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < FM; m++) {
        const int tile = tile0 + wm * FM + m;
        if (tile >= tiles) continue;
#pragma unroll
        for (int n = 0; n < FN; n++) {
            const float4 t = total[(m * FN + n) * THREADS];
            float* o = y + (size_t)(tok0 + wn * 32 + n * 8 + 2 * tig) * N + tile * 16 + 2 * gid;
            *(float2*)o = make_float2(t.x, t.z);
            *(float2*)(o + N) = make_float2(t.y, t.w);
        }
    }
}

// ---------------------------------------------------------------------------------------------------- caps: the same instructions, registers only

enum Cap { CAP_MMA, CAP_PER32, CAP_PER32_I2F, CAP_PER256, CAP_SUBSCALE, CAP_PLANES };
static const char* CAP_NAME[] = {"mma alone", "A: mma + add, mul, fma", "A: mma + I2F, mul, fma", "A2: mma + add, fma", "B1: mma + imad, 5 ops a 256", "B2: 2 mma, 5 ops a 256"};

// The operands differ from one instruction to the next, or the compiler computes one product for all; scales come from shared memory, as in `gemm`.
template <int CAP>
__global__ void __launch_bounds__(THREADS, 1) cap(float* out, int iters, float scale, int sub) {
    __shared__ float2 da_of[8][32];
    da_of[threadIdx.x / 32][threadIdx.x % 32] = make_float2(scale * threadIdx.x, scale + threadIdx.x);
    __syncthreads();
    float acc[2][8][4] = {};
    uint32_t a[2][4];
    for (int m = 0; m < 2; m++)
        for (int i = 0; i < 4; i++) a[m][i] = threadIdx.x * 0x01010101u + i * 77 + m;
    const float dw[2][2] = {{scale, scale * 2}, {scale * 3, scale * 4}};
#pragma unroll 1
    for (int it = 0; it < iters; it++) {  // 256 values of K an iteration
        int I[2][8][4] = {};
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const uint2 b = make_uint2(threadIdx.x * (n + 1), it * 8 + j);
                float2 da = make_float2(0, 0);
                if (CAP == CAP_PER32 || CAP == CAP_PER32_I2F) da = da_of[j][(n * 4 + threadIdx.x % 4 + it) % 32];
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    if (CAP == CAP_MMA || CAP == CAP_PLANES) {
                        mma<false>(I[m][n], a[m], b);
                        if (CAP == CAP_PLANES) mma<false>(I[m][n], a[m ^ 1], b);
                    } else {
                        constexpr int ZERO = CAP == CAP_PER32 || CAP == CAP_PER256 ? MAGIC : 0;
                        int d[4] = {ZERO, ZERO, ZERO, ZERO};
                        mma<false>(d, a[m], b);
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            if (CAP == CAP_SUBSCALE) {
                                I[m][n][i] += (sub + j * 2 + i / 2) * d[i];
                            } else {
                                const float f = CAP == CAP_PER32_I2F ? (float)d[i] : from_magic(d[i]);
                                acc[m][n][i] = __fmaf_rn(f, CAP == CAP_PER256 ? dw[m][i / 2] : __fmul_rn(dw[m][i / 2], i % 2 ? da.y : da.x), acc[m][n][i]);
                            }
                        }
                    }
                }
            }
        }
        if (CAP == CAP_MMA || CAP == CAP_SUBSCALE || CAP == CAP_PLANES)
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int m = 0; m < 2; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float da = scale + n + i % 2, f = (float)I[m][n][i];
                        acc[m][n][i] = __fmaf_rn(f, CAP == CAP_MMA ? 1.0f : __fmul_rn(dw[m][i / 2], da), acc[m][n][i]);
                        if (CAP != CAP_MMA) acc[m][n][i] = __fmaf_rn(f, __fmul_rn(dw[m][1 - i / 2], da), acc[m][n][i]);
                    }
    }
    float s = 0;
    for (int m = 0; m < 2; m++)
        for (int n = 0; n < 8; n++)
            for (int i = 0; i < 4; i++) s += acc[m][n][i];
    out[blockIdx.x * blockDim.x + threadIdx.x] = s;
}

// ---------------------------------------------------------------------------------------------------- decode attention, one block of 256 cells

// K [head][block][C=128][256 cells], V [head][block][256 cells][C=128], both f16; G = 5 query heads a KV head. One thread block a (block, KV head).
//   s[n]   = fma over c in order from 0 of q[c] * K[c][n]          p[n] = exp(s[n] - max s)
//   o[c]   = 4 segments of 64 cells, each fma over n in order from 0 of p[n] * V[n][c]; segments added in order; l likewise
constexpr int G = 5, C = 128, CELLS = 256;

__host__ __device__ inline float exp_poly(float x) {  // x <= 0; below 2^-126 it is 0
#ifdef __CUDA_ARCH__
#define FMA __fmaf_rn
#define ADD __fadd_rn
#else
#define FMA fmaf
#define ADD(a, b) ((a) + (b))
#endif
    if (!(x > -87.0f)) return 0.0f;
    const float m = FMA(x, 1.44269504f, 12582912.0f), n = ADD(m, -12582912.0f);
    const float f = FMA(n, 1.42860677e-6f, FMA(n, -0.693145752f, x));
    float p = 1.0f / 720;
    p = FMA(p, f, 1.0f / 120);
    p = FMA(p, f, 1.0f / 24);
    p = FMA(p, f, 1.0f / 6);
    p = FMA(p, f, 0.5f);
    p = FMA(p, f, 1.0f);
    p = FMA(p, f, 1.0f);
    int bits;
    memcpy(&bits, &p, 4);
    bits += (int)n << 23;
    memcpy(&p, &bits, 4);
    return p;
}

__global__ void __launch_bounds__(64) attend(const __half* __restrict__ k, const __half* __restrict__ v, const float* __restrict__ q, float* __restrict__ out, int blocks) {
    __shared__ __align__(16) float mem[3 * 1024 + 16];  // q [128][8], p [256][8]; then segments [4][5][128]
    float(*sq)[8] = (float(*)[8])mem, (*sp)[8] = (float(*)[8])(mem + 1024);
    float* red = mem + 3072;
    const int t = threadIdx.x, block = blockIdx.x, head = blockIdx.y;
    const size_t at = ((size_t)head * blocks + block) * C * CELLS;
    for (int i = t; i < G * C; i += 64) sq[i % C][i / C] = q[(head * G + i / C) * C + i % C];
    __syncthreads();
    float s[G][4] = {};
    const uint2* kp = (const uint2*)(k + at) + t;
#pragma unroll 8
    for (int c = 0; c < C; c++) {
        const uint2 raw = __ldcs(kp + c * 64);
        const float2 x = __half22float2(*(const __half2*)&raw.x), z = __half22float2(*(const __half2*)&raw.y);
        const float4 qa = *(const float4*)sq[c];
        const float qq[G] = {qa.x, qa.y, qa.z, qa.w, sq[c][4]}, kk[4] = {x.x, x.y, z.x, z.y};
#pragma unroll
        for (int g = 0; g < G; g++)
#pragma unroll
            for (int n = 0; n < 4; n++) s[g][n] = __fmaf_rn(qq[g], kk[n], s[g][n]);
    }
    float mx[G];
#pragma unroll
    for (int g = 0; g < G; g++) {
        mx[g] = fmaxf(fmaxf(s[g][0], s[g][1]), fmaxf(s[g][2], s[g][3]));
        for (int o = 16; o > 0; o /= 2) mx[g] = fmaxf(mx[g], __shfl_xor_sync(~0u, mx[g], o));
        if (t % 32 == 0) red[t / 32 * 8 + g] = mx[g];
    }
    __syncthreads();
#pragma unroll
    for (int g = 0; g < G; g++) {
        mx[g] = fmaxf(red[g], red[8 + g]);
#pragma unroll
        for (int n = 0; n < 4; n++) sp[4 * t + n][g] = exp_poly(__fadd_rn(s[g][n], -mx[g]));
    }
    __syncthreads();
    const int seg = t / 16, lane = t % 16;
    float o[G][8] = {}, l[G] = {};
    const uint4* vp = (const uint4*)(v + at) + seg * 64 * 16 + lane;
#pragma unroll 8
    for (int n = 0; n < 64; n++) {
        const uint4 raw = __ldcs(vp + n * 16);
        const float2 x0 = __half22float2(*(const __half2*)&raw.x), x1 = __half22float2(*(const __half2*)&raw.y);
        const float2 x2 = __half22float2(*(const __half2*)&raw.z), x3 = __half22float2(*(const __half2*)&raw.w);
        const float4 pa = *(const float4*)sp[seg * 64 + n];
        const float pp[G] = {pa.x, pa.y, pa.z, pa.w, sp[seg * 64 + n][4]}, vv[8] = {x0.x, x0.y, x1.x, x1.y, x2.x, x2.y, x3.x, x3.y};
#pragma unroll
        for (int g = 0; g < G; g++) {
            l[g] = __fadd_rn(l[g], pp[g]);
#pragma unroll
            for (int i = 0; i < 8; i++) o[g][i] = __fmaf_rn(pp[g], vv[i], o[g][i]);
        }
    }
    __syncthreads();
    for (int g = 0; g < G; g++)
        for (int i = 0; i < 8; i++) mem[(seg * G + g) * C + lane * 8 + i] = o[g][i];
    __syncthreads();
    float* dst = out + ((size_t)head * blocks + block) * G * (C + 2);
    for (int i = t; i < G * C; i += 64)
        dst[i / C * (C + 2) + i % C] = __fadd_rn(__fadd_rn(__fadd_rn(mem[i], mem[G * C + i]), mem[2 * G * C + i]), mem[3 * G * C + i]);
    __syncthreads();
    if (lane == 0)
        for (int g = 0; g < G; g++) mem[seg * G + g] = l[g];
    __syncthreads();
    if (t < G) dst[t * (C + 2) + C] = fmaxf(red[t], red[8 + t]), dst[t * (C + 2) + C + 1] = __fadd_rn(__fadd_rn(__fadd_rn(mem[t], mem[G + t]), mem[2 * G + t]), mem[3 * G + t]);
}

// ---------------------------------------------------------------------------------------------------- data

__host__ __device__ inline uint32_t hash(uint64_t x) {
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull;
    return (uint32_t)(x >> 32);
}

// Random codes; random scales of both signs where the format has scales.
__global__ void fill_weights(uint16_t* w, size_t n, int bs, int scale_bytes, uint32_t seed) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        const uint32_t h = hash(i * 2 + (uint64_t)seed * 0x9e3779b97f4a7c15ull);
        if (i * 2 % bs < scale_bytes) {
            const float f = (0.001f + (h & 0xffff) * 1e-7f) * (h >> 31 ? -1.0f : 1.0f);
            w[i] = __half_as_ushort(__float2half_rn(f));
        } else {
            w[i] = (uint16_t)h;
        }
    }
}
__global__ void fill_f16(__half* p, size_t n, uint32_t seed) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        p[i] = __float2half_rn((hash(i + (uint64_t)seed * 0x9e3779b97f4a7c15ull) * 2.3283064e-10f - 0.5f) * 2.0f);
}

template <class X> static X* upload(const std::vector<X>& v) {
    X* p;
    CHECK(cudaMalloc(&p, v.size() * sizeof(X)));
    CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(X), cudaMemcpyHostToDevice));
    return p;
}

struct Activations {
    HostAct host;
    Act dev{};
    Activations(int T, int K, int block, uint32_t seed) {
        host.T = T, host.K = K, host.block = block;
        host.q.resize((size_t)T * K);
        const int KB = (K + block - 1) / block;
        host.d.assign((size_t)(K / 32) * T, 0.0f);  // the pipelines read scales per 32 in any case
        std::vector<int8_t> perm((size_t)T * K);
        std::vector<int> n8((size_t)K / 32 * T), s32((size_t)K / 32 * T);
        std::vector<__half> s16((size_t)(K + 255) / 256 * T * 16);
        std::vector<float> x(block);
        for (int t = 0; t < T; t++) {
            int8_t* q = host.q.data() + (size_t)t * K;
            for (int b = 0; b < KB; b++) {
                const int n = std::min(block, K - b * block);
                float amax = 0;
                for (int i = 0; i < n; i++) {
                    float s = 0;
                    for (int j = 0; j < 4; j++) s += hash(((uint64_t)seed << 40) + ((uint64_t)t * K + b * block + i) * 4 + j) * 2.3283064e-10f - 0.5f;
                    x[i] = s, amax = std::max(amax, std::fabs(s));
                }
                for (int i = 0; i < n; i++) q[b * block + i] = (int8_t)std::nearbyintf(x[i] * (127.0f / amax));
                host.d[(size_t)b * T + t] = amax / 127.0f;
            }
            for (int b = 0; b < K / 32; b++) {
                int sum = 0;
                for (int i = 0; i < 32; i++) {
                    const int g = i / 4, word = g < 4 ? 2 * g : 2 * (g - 4) + 1, v = q[b * 32 + i];
                    perm[(size_t)t * K + b * 32 + word * 4 + i % 4] = v;
                    sum += v;
                    if (i % 16 == 15) {
                        int s = 0;
                        for (int j = i - 15; j <= i; j++) s += q[b * 32 + j];
                        s16[((size_t)(b / 8) * T + t) * 16 + b % 8 * 2 + i / 16] = __float2half((float)s);
                    }
                }
                n8[(size_t)b * T + t] = -8 * sum, s32[(size_t)b * T + t] = sum;
            }
        }
        dev = Act{upload(perm), upload(host.d), upload(n8), upload(s32), upload(s16)};
    }
    ~Activations() {
        for (const void* p : {(const void*)dev.q, (const void*)dev.d, (const void*)dev.n8, (const void*)dev.sum32, (const void*)dev.s16}) cudaFree((void*)p);
    }
};

struct Weights {
    int fmt, N, K, copies;
    size_t bytes;
    uint8_t* dev;
    Weights(int fmt, int N, int K, int copies) : fmt(fmt), N(N), K(K), copies(copies) {
        bytes = (size_t)N / 16 * (K / block_len(fmt)) * block_bytes(fmt);
        CHECK(cudaMalloc(&dev, bytes * copies));
        fill_weights<<<2048, 256>>>((uint16_t*)dev, bytes * copies / 2, block_bytes(fmt), block_len(fmt) == 256 ? 64 : 32, fmt * 1000 + N + K);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
    }
    ~Weights() { cudaFree(dev); }
    const uint8_t* copy(int i) const { return dev + bytes * (i % copies); }
};

// Compares y with the scalar definition: all of it, or `samples` random places.
static int mismatches(const Weights& w, const HostAct& a, bool a2, int C, const float* y_dev, int samples) {
    std::vector<float> y((size_t)a.T * w.N);
    CHECK(cudaMemcpy(y.data(), y_dev, y.size() * 4, cudaMemcpyDeviceToHost));
    const size_t tile_bytes = w.bytes / (w.N / 16);
    std::vector<uint8_t> host(samples ? tile_bytes : w.bytes);
    if (!samples) CHECK(cudaMemcpy(host.data(), w.dev, w.bytes, cudaMemcpyDeviceToHost));
    int bad = 0;
    for (size_t i = 0; i < (samples ? samples : y.size()); i++) {
        const size_t at = samples ? hash(i + 77) % y.size() : i;
        const int row = at % w.N, t = at / w.N;
        if (samples) CHECK(cudaMemcpy(host.data(), w.dev + row / 16 * tile_bytes, tile_bytes, cudaMemcpyDeviceToHost));
        const float want = reference(w.fmt, a2, host.data(), samples ? row % 16 : row, t, a, C);
        if (memcmp(&want, &y[at], 4)) {
            if (bad++ < 3) printf("  MISMATCH %s row %d token %d: %.9g, want %.9g\n", FMT_NAME[w.fmt], row, t, y[at], want);
        }
    }
    return bad;
}

// Microseconds a launch: a graph of `n` launches of `launch(i, stream)`, median of 7 runs.
static double time_us(int n, const std::function<void(int, cudaStream_t)>& launch) {
    cudaStream_t s;
    cudaGraph_t g;
    cudaGraphExec_t e;
    cudaEvent_t a, b;
    CHECK(cudaStreamCreate(&s));
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < n; i++) launch(i, s);
    CHECK(cudaStreamEndCapture(s, &g));
    CHECK(cudaGraphInstantiate(&e, g, 0));
    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    std::vector<float> ms(7);
    CHECK(cudaGraphLaunch(e, s));
    for (float& m : ms) {
        CHECK(cudaEventRecord(a, s));
        CHECK(cudaGraphLaunch(e, s));
        CHECK(cudaEventRecord(b, s));
        CHECK(cudaEventSynchronize(b));
        CHECK(cudaEventElapsedTime(&m, a, b));
    }
    CHECK(cudaGetLastError());
    CHECK(cudaGraphExecDestroy(e));
    CHECK(cudaGraphDestroy(g));
    CHECK(cudaEventDestroy(a));
    CHECK(cudaEventDestroy(b));
    CHECK(cudaStreamDestroy(s));
    std::sort(ms.begin(), ms.end());
    return ms[3] * 1e3 / n;
}
static int bad_total = 0;

// ---------------------------------------------------------------------------------------------------- runs

using GemvKernel = void (*)(const uint8_t*, Act, float*, int, int, int, int);

static double read_us(const uint8_t* p, size_t bytes, int copies, unsigned* out) {
    double best = 1e30;
    const size_t n16 = bytes / 16;
    const int n = std::max(16, 2 * copies);
    for (int threads : {128, 256, 512}) {
        best = std::min(best, time_us(n, [&](int i, cudaStream_t s) { read_only<4><<<(n16 + threads * 4 - 1) / (threads * 4), threads, 0, s>>>((const uint4*)(p + bytes * (i % copies)), n16, out); }));
        best = std::min(best, time_us(n, [&](int i, cudaStream_t s) { read_only<8><<<(n16 + threads * 8 - 1) / (threads * 8), threads, 0, s>>>((const uint4*)(p + bytes * (i % copies)), n16, out); }));
    }
    return best;
}

struct GemvLaunch { int blocks, threads, smem; };
static bool gemv_config(GemvKernel k, int lanes, int stage_bytes, int fmt, int N, int K, int C, int T, int tpb, GemvLaunch& l) {
    cudaFuncAttributes fa;
    CHECK(cudaFuncGetAttributes(&fa, (const void*)k));
    const int slots = (K + C - 1) / C * tpb;
    l.threads = std::min((slots * lanes + 31) / 32 * 32, fa.maxThreadsPerBlock / 32 * 32);
    l.smem = slots * T * 64 + l.threads / lanes * stage_bytes;
    if (l.smem > 220 * 1024) return false;
    CHECK(cudaFuncSetAttribute((const void*)k, cudaFuncAttributeMaxDynamicSharedMemorySize, l.smem));
    l.blocks = (N / 16 + tpb - 1) / tpb;
    return (tpb == 1 || slots * lanes <= 1024) && C % block_len(fmt) == 0;
}

template <int FMT, int T, bool A2> static void gemv_one(const Weights& w, const Activations& a, float* y, double limit_us, bool check_all) {
    constexpr int UD = FMT == Q4_0 ? 16 : FMT == Q8_0 ? 8 : T == 4 ? 1 : 2, UM = A2 ? 8 : FMT >= Q4_K ? 2 : 16;
    struct { const char* name; GemvKernel k; int lanes, stage; } kernels[] = {
        {"dp4a", gemv_dp4a<FMT, T, A2, UD>, 16, Stage<FMT, T, UD>::BYTES}, {"mma", gemv_mma<FMT, T, A2, UM>, 32, Stage<FMT, T, UM>::BYTES}};
    const int N = w.N, K = w.K;
    std::vector<int> chunks = A2 ? std::vector<int>{256} : std::vector<int>{256, 512, 1024, K};
    for (auto& kn : kernels) {
        if (check_all) printf("check gemv %-5s %-9s %s T=%d N=%d K=%d:", kn.name, FMT_NAME[FMT], A2 ? "A2" : "", T, N, K);
        else printf("gemv %-5s %-9s %-2s T=%d %5dx%-5d ", kn.name, FMT_NAME[FMT], A2 ? "A2" : FMT >= Q4_K ? "B" : "A", T, N, K);
        for (int C : chunks) {
            double best = 1e30;
            int best_tpb = 0, bad = 0;
            for (int tpb : {1, 2, 4, 8}) {
                GemvLaunch l;
                if (!gemv_config(kn.k, kn.lanes, kn.stage, FMT, N, K, C, T, tpb, l)) continue;
                CHECK(cudaMemset(y, 0xff, (size_t)T * N * 4));
                kn.k<<<l.blocks, l.threads, l.smem>>>(w.copy(0), a.dev, y, N, K, C, tpb);
                CHECK(cudaGetLastError());
                CHECK(cudaDeviceSynchronize());
                if (check_all || tpb == 2) bad += mismatches(w, a.host, A2, C, y, check_all ? 0 : 24);
                if (check_all) continue;
                const double us = time_us(std::max(16, 2 * w.copies), [&](int i, cudaStream_t s) { kn.k<<<l.blocks, l.threads, l.smem, s>>>(w.copy(i), a.dev, y, N, K, C, tpb); });
                if (us < best) best = us, best_tpb = tpb;
            }
            bad_total += bad;
            if (check_all) printf(" C=%d bad=%d", C, bad);
            else printf("| C=%-5d %6.2f us %5.0f GB/s %3.0f%% tpb%d%s ", C, best, w.bytes / best / 1e3, 100 * limit_us / best, best_tpb, bad ? " BAD" : "");
        }
        printf("\n");
        fflush(stdout);
    }
}

template <int FMT> static void gemv_all(int N, int K, bool check_all, unsigned* out) {
    const size_t bytes = (size_t)N / 16 * (K / block_len(FMT)) * block_bytes(FMT);
    const int copies = check_all ? 1 : (int)(400e6 / bytes) + 2;
    Weights w(FMT, N, K, copies);
    double limit = 0;
    if (!check_all) {
        limit = read_us(w.dev, w.bytes, copies, out);
        printf("read only %-9s %dx%d: %.1f MB, %.2f us, %.0f GB/s\n", FMT_NAME[FMT], N, K, bytes / 1e6, limit, bytes / limit / 1e3);
    }
    float* y;
    CHECK(cudaMalloc(&y, (size_t)4 * N * 4));
    constexpr int BL = block_len(FMT);
    Activations a1(1, K, BL, 1), a2(2, K, BL, 2), a4(4, K, BL, 4);
    gemv_one<FMT, 1, false>(w, a1, y, limit, check_all);
    gemv_one<FMT, 2, false>(w, a2, y, limit, check_all);
    gemv_one<FMT, 4, false>(w, a4, y, limit, check_all);
    if constexpr (BL == 32) {
        Activations b1(1, K, 256, 1), b4(4, K, 256, 4);
        gemv_one<FMT, 1, true>(w, b1, y, limit, check_all);
        gemv_one<FMT, 4, true>(w, b4, y, limit, check_all);
    }
    CHECK(cudaFree(y));
}

template <int FMT, int MODE> static void gemm_one(const Weights& w, const Activations& a, float* y, bool check_all) {
    const int N = w.N, K = w.K, T = a.host.T;
    constexpr bool A2 = MODE == PER256;
    auto k = gemm<FMT, MODE>;
    CHECK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, Step<FMT>::SMEM));
    const dim3 grid((N + ROWS_BLOCK - 1) / ROWS_BLOCK, T / TOK_BLOCK);
    cudaFuncAttributes fa;
    CHECK(cudaFuncGetAttributes(&fa, (const void*)k));
    const std::vector<int> chunks = A2 ? std::vector<int>{256} : std::vector<int>{256, 512, 1024, (K + 255) / 256 * 256};
    printf("%sgemm %-22s %-9s T=%d %5dx%-5d (%d regs, %zu spill) ", check_all ? "check " : "", MODE_NAME[MODE], FMT_NAME[FMT], T, N, K, fa.numRegs, fa.localSizeBytes);
    for (int C : chunks) {
        CHECK(cudaMemset(y, 0xff, (size_t)T * N * 4));
        k<<<grid, THREADS, Step<FMT>::SMEM>>>(w.copy(0), a.dev, y, N, K, T, C);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        const int bad = mismatches(w, a.host, A2, C, y, check_all ? 0 : 48);
        bad_total += bad;
        if (check_all) {
            printf(" C=%d bad=%d", C, bad);
        } else {
            const double us = time_us(20, [&](int i, cudaStream_t s) { k<<<grid, THREADS, Step<FMT>::SMEM, s>>>(w.copy(i), a.dev, y, N, K, T, C); });
            printf("| C=%-5d %7.1f us %4.0f TOP/s%s ", C, us, 2.0 * N * K * T / us / 1e6, bad ? " BAD" : "");
        }
    }
    printf("\n");
    fflush(stdout);
}

template <int FMT> static void gemm_all(int N, int K, int T, bool check_all) {
    Weights w(FMT, N, K, check_all ? 1 : 4);
    float* y;
    CHECK(cudaMalloc(&y, (size_t)T * N * 4));
    if constexpr (block_len(FMT) == 32) {
        Activations a(T, K, 32, 9), b(T, K, 256, 10);
        gemm_one<FMT, PER32>(w, a, y, check_all);
        gemm_one<FMT, PER32_I2F>(w, a, y, check_all);
        gemm_one<FMT, PER256>(w, b, y, check_all);
    } else {
        Activations a(T, K, 256, 11);
        gemm_one<FMT, SUBSCALE>(w, a, y, check_all);
        gemm_one<FMT, PLANES>(w, a, y, check_all);
    }
    CHECK(cudaFree(y));
}

template <int CAP> static void cap_one(int sms, float* out) {
    const int iters = 200;
    cudaFuncAttributes fa;
    CHECK(cudaFuncGetAttributes(&fa, (const void*)cap<CAP>));
    const double us = time_us(2, [&](int, cudaStream_t s) { cap<CAP><<<sms, THREADS, 0, s>>>(out, iters, 0.5f, 3); });
    printf("cap %-36s %5.0f TOP/s (%d regs, %zu spill)\n", CAP_NAME[CAP], 2.0 * sms * (THREADS / 32) * 32 * 64 * 256 * iters / us / 1e6, fa.numRegs, fa.localSizeBytes);
    fflush(stdout);
}

static void attention(unsigned* out) {
    const int heads = 8, blocks = 65536 / CELLS;
    const size_t n = (size_t)heads * blocks * CELLS * C;
    __half *k, *v;
    float *po, *dq;
    CHECK(cudaMalloc(&k, n * 2 * 2));  // two copies of each, so that the 50 MB L2 holds none of it
    CHECK(cudaMalloc(&v, n * 2 * 2));
    fill_f16<<<2048, 256>>>(k, n * 2, 5);
    fill_f16<<<2048, 256>>>(v, n * 2, 6);
    std::vector<float> q(heads * G * C);
    for (size_t i = 0; i < q.size(); i++) q[i] = (hash(i + 991) * 2.3283064e-10f - 0.5f) * 2.0f;
    dq = upload(q);
    const size_t per = G * (C + 2);
    CHECK(cudaMalloc(&po, (size_t)heads * blocks * per * 4));
    attend<<<dim3(blocks, heads), 64>>>(k, v, dq, po, blocks);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    std::vector<__half> hk(C * CELLS), hv(C * CELLS);
    std::vector<float> got(per);
    int bad = 0;
    for (int item : {0, 1, 777, heads * blocks - 1}) {
        CHECK(cudaMemcpy(hk.data(), k + (size_t)item * C * CELLS, hk.size() * 2, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(hv.data(), v + (size_t)item * C * CELLS, hv.size() * 2, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(got.data(), po + item * per, per * 4, cudaMemcpyDeviceToHost));
        for (int g = 0; g < G; g++) {
            std::vector<float> s(CELLS, 0.0f), want(C + 2);
            for (int c = 0; c < C; c++)
                for (int i = 0; i < CELLS; i++) s[i] = fmaf(q[(item / blocks * G + g) * C + c], __half2float(hk[c * CELLS + i]), s[i]);
            const float m = *std::max_element(s.begin(), s.end());
            for (float& x : s) x = exp_poly(x - m);
            for (int c = 0; c <= C; c++) {
                float sum = 0;
                for (int seg = 0; seg < 4; seg++) {
                    float o = 0;
                    for (int i = seg * 64; i < seg * 64 + 64; i++) o = c < C ? fmaf(s[i], __half2float(hv[i * C + c]), o) : o + s[i];
                    sum = seg ? sum + o : o;
                }
                want[c < C ? c : C + 1] = sum;
            }
            want[C] = m;
            bad += memcmp(want.data(), got.data() + g * (C + 2), (C + 2) * 4) != 0;
        }
    }
    bad_total += bad;
    const double us = time_us(8, [&](int i, cudaStream_t s) { attend<<<dim3(blocks, heads), 64, 0, s>>>(k + i % 2 * n, v + i % 2 * n, dq, po, blocks); });
    const double limit = read_us((const uint8_t*)k, n * 4, 1, out);
    cudaFuncAttributes fa;
    CHECK(cudaFuncGetAttributes(&fa, (const void*)attend));
    printf("attention 65536 cells x 8 KV heads, G=5: bad=%d, %.1f us, %.0f GB/s, %.0f%% of reading the same bytes (%.1f us) (%d regs, %zu spill)\n", bad, us, n * 4 / us / 1e3, 100 * limit / us, limit, fa.numRegs, fa.localSizeBytes);
    fflush(stdout);
    for (void* p : {(void*)k, (void*)v, (void*)dq, (void*)po}) CHECK(cudaFree(p));
}

template <int FMT> static void checks(int K) {
    gemv_all<FMT>(48, K, true, nullptr);
    gemm_all<FMT>(336, K, 128, true);
}

int main() {
    cudaDeviceProp prop;
    int driver, runtime;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    CHECK(cudaDriverGetVersion(&driver));
    CHECK(cudaRuntimeGetVersion(&runtime));
    printf("%s, %d SMs, L2 %d MB, driver CUDA %d, runtime %d\n", prop.name, prop.multiProcessorCount, prop.l2CacheSize >> 20, driver, runtime);
    unsigned* out;
    float* fout;
    CHECK(cudaMalloc(&out, 4));
    CHECK(cudaMalloc(&fout, (size_t)prop.multiProcessorCount * THREADS * 4));
    cap_one<CAP_MMA>(prop.multiProcessorCount, fout);
    cap_one<CAP_PER32>(prop.multiProcessorCount, fout);
    cap_one<CAP_PER32_I2F>(prop.multiProcessorCount, fout);
    cap_one<CAP_PER256>(prop.multiProcessorCount, fout);
    cap_one<CAP_SUBSCALE>(prop.multiProcessorCount, fout);
    cap_one<CAP_PLANES>(prop.multiProcessorCount, fout);
    checks<Q8_0>(576), checks<Q8_0>(1536), checks<Q4_0>(576), checks<Q4_0>(1536), checks<Q4_K>(1536), checks<Q4_KW>(1536);
    attention(out);
    for (int N : {5120, 13824}) gemm_all<Q8_0>(N, 5120, 512, false), gemm_all<Q4_0>(N, 5120, 512, false), gemm_all<Q4_K>(N, 5120, 512, false), gemm_all<Q4_KW>(N, 5120, 512, false);
    {
        Weights big(Q8_0, 131072, 16384, 1);
        const double us = read_us(big.dev, big.bytes, 1, out);
        printf("read only, one launch of %.2f GB: %.0f GB/s\n", big.bytes / 1e9, big.bytes / us / 1e3);
    }
    const int shapes[][2] = {{5120, 5120}, {13824, 5120}, {5120, 13824}};
    for (auto& s : shapes) gemv_all<Q4_0>(s[0], s[1], false, out), gemv_all<Q8_0>(s[0], s[1], false, out), gemv_all<Q4_K>(s[0], s[1], false, out), gemv_all<Q4_KW>(s[0], s[1], false, out);
    printf("mismatches in all: %d\n", bad_total);
    return bad_total != 0;
}
