// Products and rows of IQ2_S.
#include "gemm_many.cuh"

PRODUCT_KERNELS(IQ2_S)
MANY_KERNELS_256(IQ2_S)
