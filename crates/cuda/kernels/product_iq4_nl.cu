// Products and rows of IQ4_NL.
#include "gemm_many.cuh"

PRODUCT_KERNELS(IQ4_NL)
MANY_KERNELS_32(IQ4_NL)
