// Products and rows of IQ4_XS.
#include "product.cuh"

PRODUCT_KERNELS(IQ4_XS)
