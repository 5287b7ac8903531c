// Products and rows of MXFP4.
#include "gemm_many.cuh"

PRODUCT_KERNELS(MXFP4)
MANY_KERNELS_32(MXFP4)
