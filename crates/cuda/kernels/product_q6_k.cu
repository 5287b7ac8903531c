// Products and rows of Q6_K.
#include "product.cuh"

PRODUCT_KERNELS(Q6_K)
