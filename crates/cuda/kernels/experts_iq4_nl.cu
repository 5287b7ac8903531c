// Experts of IQ4_NL.
#include "experts_few.cuh"
#include "experts_many.cuh"

EXPERTS_FEW_KERNELS(IQ4_NL)
EXPERTS_MANY_KERNELS(IQ4_NL)
