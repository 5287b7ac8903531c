// Products and rows of MXFP4.
#include "product.cuh"

PRODUCT_KERNELS(MXFP4)
