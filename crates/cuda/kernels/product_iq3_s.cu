// Products and rows of IQ3_S.
#include "gemm_many.cuh"

PRODUCT_KERNELS(IQ3_S)
MANY_KERNELS_256(IQ3_S)
