// Products and rows of IQ2_XS.
#include "product.cuh"

PRODUCT_KERNELS(IQ2_XS)
