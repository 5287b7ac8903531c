// Products and rows of Q5_0.
#include "gemm_many.cuh"

PRODUCT_KERNELS(Q5_0)
MANY_KERNELS_32(Q5_0)
