// Experts of Q3_K.
#include "experts_few.cuh"
#include "experts_many.cuh"

EXPERTS_FEW_KERNELS(Q3_K)
EXPERTS_MANY_KERNELS(Q3_K)
