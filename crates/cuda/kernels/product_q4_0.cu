// Products and rows of Q4_0.
#include "gemm_many.cuh"

PRODUCT_KERNELS(Q4_0)
MANY_KERNELS_32(Q4_0)
