// Products and rows of IQ3_XXS.
#include "product.cuh"

PRODUCT_KERNELS(IQ3_XXS)
