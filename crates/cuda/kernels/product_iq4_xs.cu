// Products and rows of IQ4_XS.
#include "gemm_many.cuh"

PRODUCT_KERNELS(IQ4_XS)
MANY_KERNELS_256(IQ4_XS)
