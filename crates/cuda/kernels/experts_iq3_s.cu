// Experts of IQ3_S.
#include "experts_few.cuh"
#include "experts_many.cuh"

EXPERTS_FEW_KERNELS(IQ3_S)
EXPERTS_MANY_KERNELS(IQ3_S)
