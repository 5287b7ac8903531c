// Experts of Q6_K.
#include "experts_few.cuh"
#include "experts_many.cuh"

EXPERTS_FEW_KERNELS(Q6_K)
EXPERTS_MANY_KERNELS(Q6_K)
