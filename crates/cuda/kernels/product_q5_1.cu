// Products and rows of Q5_1.
#include "gemm_many.cuh"

PRODUCT_KERNELS(Q5_1)
MANY_KERNELS_32(Q5_1)
