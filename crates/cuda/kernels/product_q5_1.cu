// Products and rows of Q5_1.
#include "product.cuh"

PRODUCT_KERNELS(Q5_1)
