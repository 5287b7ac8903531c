// Products and rows of Q8_0.
#include "product.cuh"

PRODUCT_KERNELS(Q8_0)
