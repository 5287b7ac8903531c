// Experts of MXFP4.
#include "experts_few.cuh"
#include "experts_many.cuh"

EXPERTS_FEW_KERNELS(MXFP4)
EXPERTS_MANY_KERNELS(MXFP4)
