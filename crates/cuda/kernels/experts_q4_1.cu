// Experts of Q4_1.
#include "experts_few.cuh"
#include "experts_many.cuh"

EXPERTS_FEW_KERNELS(Q4_1)
EXPERTS_MANY_KERNELS(Q4_1)
