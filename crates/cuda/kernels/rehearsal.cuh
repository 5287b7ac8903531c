// Rehearsals: a small kernel of one token does its work before the kernel ahead has ended, too, for nothing but that its instructions are there when it
// counts: they come from the second-level cache, as a layer's kernels throw each other's out. What it reads and writes then is memory that nobody else
// uses: so nothing old is left in the first-level cache.
#pragma once

namespace rehearsal {

#if __CUDA_ARCH__ >= 900
constexpr bool PAYS = true;
#else
constexpr bool PAYS = false;  // launches do not overlap
#endif

constexpr int FLOATS = 16384;
__device__ __align__(16) float unused[FLOATS];

}  // namespace rehearsal
