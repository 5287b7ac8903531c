// Experts of IQ2_S.
#include "experts_few.cuh"
#include "experts_many.cuh"

EXPERTS_FEW_KERNELS(IQ2_S)
EXPERTS_MANY_KERNELS(IQ2_S)
