// Activations, as acts.cu leaves them, laid out for the kernels of gemm_many.cuh.
//
// C columns, filled up to A = 2 ceil(C / 16) groups of 8 rows: column c of 16 is row n = 8 (c / 2 % 2) + 2 (c / 4) + c % 2, so that the 4 columns
// of a lane of the accumulators lie side by side in `scale`.
//   image   [K / 128, rounded up][A][8 rows][128 bytes] codes, pieces of 16 bytes swizzled: p of row r lies at p ^ r
//   scale   [K / LEN][8 A] float d
//   sums    blocks of 32:   [K / 32][8 A] float d * sum of the codes
//           blocks of 256:  [K / 256][A][8 rows][16 halves]: sums of 16 codes
#include <cuda_fp16.h>
#include <stdint.h>

#include "mma.cuh"

__device__ __forceinline__ int row_of(int c) { return 8 * (c / 2 % 2) + 2 * (c / 4) + c % 2; }
// Codes of a run of a column, in the order of K, to where they belong.
__device__ __forceinline__ void put_run(const uint4* q, uint8_t* image, int column, int n, int run, int runs, int atoms, bool live) {
    uint4 x = make_uint4(0, 0, 0, 0), z = x;
    if (live) {
        const size_t at = ((size_t)(column / 8) * runs + run) * 16 + column % 8 * 2;
        x = q[at], z = q[at + 1];
    }
    uint4* row = (uint4*)(image + ((size_t)(run / 4) * atoms + column / 16 * 2 + n / 8) * 1024 + n % 8 * 128);
    row[(run % 4 * 2) ^ (n % 8)] = make_uint4(x.x, x.z, z.x, z.z);
    row[(run % 4 * 2 + 1) ^ (n % 8)] = make_uint4(x.y, x.w, z.y, z.w);
}

// A thread a run of 32 values of a column. grid: (ceil(runs filled up to 4 / (blockDim / 16)), C filled up / 16).
extern "C" __global__ void arrange_32(const uint4* q, const int2* meta, uint8_t* image, float* scale, float* sums, int K, int columns) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, c = i / 4 % 16, run = i / 64 * 4 + i % 4, runs = K / 32, column = blockIdx.y * 16 + c, atoms = gridDim.y * 2;
    if (run >= runs) return;
    const bool live = column < columns;
    put_run(q, image, column, row_of(c), run, runs, atoms, live);
    const int2 m = live ? meta[((size_t)(column / 8) * runs + run) * 8 + column % 8] : make_int2(0, 0);
    const size_t at = (size_t)run * atoms * 8 + column;
    scale[at] = __int_as_float(m.y);
    sums[at] = __fmul_rn(__int_as_float(m.y), (float)m.x);
}

extern "C" __global__ void arrange_256(const uint4* q, const float* d, const uint4* s16, uint8_t* image, float* scale, uint4* sums, int K, int columns) {
    let_next_start();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x, c = i / 4 % 16, run = i / 64 * 4 + i % 4, runs = K / 32, column = blockIdx.y * 16 + c, atoms = gridDim.y * 2;
    if (run >= runs) return;
    const bool live = column < columns;
    const int n = row_of(c), blocks = K / 256, block = run / 8;
    put_run(q, image, column, n, run, runs, atoms, live);
    if (run % 8 != 0) return;
    const size_t from = ((size_t)(column / 8) * blocks + block) * 8 + column % 8, to = ((size_t)block * atoms + column / 16 * 2 + n / 8) * 8 + n % 8;
    scale[(size_t)block * atoms * 8 + column] = live ? d[from] : 0.0f;
    sums[to * 2] = live ? s16[from * 2] : make_uint4(0, 0, 0, 0);
    sums[to * 2 + 1] = live ? s16[from * 2 + 1] : make_uint4(0, 0, 0, 0);
}
