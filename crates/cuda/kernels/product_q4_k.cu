// Products and rows of Q4_K.
#include "product.cuh"

PRODUCT_KERNELS(Q4_K)
