// Products and rows of Q2_K.
#include "gemm_many.cuh"

PRODUCT_KERNELS(Q2_K)
MANY_KERNELS_256(Q2_K)
