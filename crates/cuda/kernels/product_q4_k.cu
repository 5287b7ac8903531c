// Products and rows of Q4_K.
#include "gemm_many.cuh"

PRODUCT_KERNELS(Q4_K)
MANY_KERNELS_256(Q4_K)
