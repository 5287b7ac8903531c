// Products and rows of Q5_0.
#include "product.cuh"

PRODUCT_KERNELS(Q5_0)
