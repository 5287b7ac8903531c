// Experts of Q8_0.
#include "experts_few.cuh"
#include "experts_many.cuh"

EXPERTS_FEW_KERNELS(Q8_0)
EXPERTS_MANY_KERNELS(Q8_0)
