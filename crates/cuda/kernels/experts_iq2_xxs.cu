// Experts of IQ2_XXS.
#include "experts_few.cuh"
#include "experts_many.cuh"

EXPERTS_FEW_KERNELS(IQ2_XXS)
EXPERTS_MANY_KERNELS(IQ2_XXS)
