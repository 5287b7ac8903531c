// Products and rows of Q3_K.
#include "product.cuh"

PRODUCT_KERNELS(Q3_K)
