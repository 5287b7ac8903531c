// Products and rows of Q8_0.
#include "gemm_many.cuh"

PRODUCT_KERNELS(Q8_0)
MANY_KERNELS_32(Q8_0)
