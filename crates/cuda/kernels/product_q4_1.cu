// Products and rows of Q4_1.
#include "gemm_many.cuh"

PRODUCT_KERNELS(Q4_1)
MANY_KERNELS_32(Q4_1)
