// Products and rows of Q5_K.
#include "gemm_many.cuh"

PRODUCT_KERNELS(Q5_K)
MANY_KERNELS_256(Q5_K)
