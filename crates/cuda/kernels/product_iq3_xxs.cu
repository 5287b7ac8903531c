// Products and rows of IQ3_XXS.
#include "gemm_many.cuh"

PRODUCT_KERNELS(IQ3_XXS)
MANY_KERNELS_256(IQ3_XXS)
