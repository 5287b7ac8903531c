// Decode attention, 4 query heads at a time.
#include "attention_decode.cuh"

ATTEND_KERNEL(4, 2)
ATTEND_KERNEL(4, 4)
ATTEND_KERNEL(4, 8)
