// Experts of Q4_K.
#include "experts_few.cuh"
#include "experts_many.cuh"

EXPERTS_FEW_KERNELS(Q4_K)
EXPERTS_MANY_KERNELS(Q4_K)
