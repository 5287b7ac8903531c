// Products and rows of IQ2_S.
#include "product.cuh"

PRODUCT_KERNELS(IQ2_S)
