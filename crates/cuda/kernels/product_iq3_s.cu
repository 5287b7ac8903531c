// Products and rows of IQ3_S.
#include "product.cuh"

PRODUCT_KERNELS(IQ3_S)
