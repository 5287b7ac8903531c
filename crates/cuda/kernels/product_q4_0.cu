// Products and rows of Q4_0.
#include "product.cuh"

PRODUCT_KERNELS(Q4_0)
