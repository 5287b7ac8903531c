// Products and rows of IQ2_XXS.
#include "product.cuh"

PRODUCT_KERNELS(IQ2_XXS)
