// Products and rows of IQ4_NL.
#include "product.cuh"

PRODUCT_KERNELS(IQ4_NL)
