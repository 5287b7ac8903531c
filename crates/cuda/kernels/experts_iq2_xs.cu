// Experts of IQ2_XS.
#include "experts_few.cuh"
#include "experts_many.cuh"

EXPERTS_FEW_KERNELS(IQ2_XS)
EXPERTS_MANY_KERNELS(IQ2_XS)
