// Experts of Q5_K.
#include "experts_few.cuh"
#include "experts_many.cuh"

EXPERTS_FEW_KERNELS(Q5_K)
EXPERTS_MANY_KERNELS(Q5_K)
