// Experts of IQ4_XS.
#include "experts_few.cuh"
#include "experts_many.cuh"

EXPERTS_FEW_KERNELS(IQ4_XS)
EXPERTS_MANY_KERNELS(IQ4_XS)
