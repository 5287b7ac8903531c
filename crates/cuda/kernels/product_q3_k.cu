// Products and rows of Q3_K.
#include "gemm_many.cuh"

PRODUCT_KERNELS(Q3_K)
MANY_KERNELS_256(Q3_K)
