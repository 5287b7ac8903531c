// Products and rows of IQ2_XS.
#include "gemm_many.cuh"

PRODUCT_KERNELS(IQ2_XS)
MANY_KERNELS_256(IQ2_XS)
