// Products and rows of IQ2_XXS.
#include "gemm_many.cuh"

PRODUCT_KERNELS(IQ2_XXS)
MANY_KERNELS_256(IQ2_XXS)
