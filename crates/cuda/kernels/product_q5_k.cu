// Products and rows of Q5_K.
#include "product.cuh"

PRODUCT_KERNELS(Q5_K)
