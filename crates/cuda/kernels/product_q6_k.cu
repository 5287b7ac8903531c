// Products and rows of Q6_K.
#include "gemm_many.cuh"

PRODUCT_KERNELS(Q6_K)
MANY_KERNELS_256(Q6_K)
