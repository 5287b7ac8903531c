// Experts of Q2_K.
#include "experts_few.cuh"
#include "experts_many.cuh"

EXPERTS_FEW_KERNELS(Q2_K)
EXPERTS_MANY_KERNELS(Q2_K)
