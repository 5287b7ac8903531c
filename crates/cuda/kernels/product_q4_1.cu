// Products and rows of Q4_1.
#include "product.cuh"

PRODUCT_KERNELS(Q4_1)
