// Products and rows of Q2_K.
#include "product.cuh"

PRODUCT_KERNELS(Q2_K)
