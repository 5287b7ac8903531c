// Experts of IQ3_XXS.
#include "experts_few.cuh"
#include "experts_many.cuh"

EXPERTS_FEW_KERNELS(IQ3_XXS)
EXPERTS_MANY_KERNELS(IQ3_XXS)
