// Decode attention, 3 query heads at a time.
#include "attention_decode.cuh"

ATTEND_KERNEL(3, 2)
ATTEND_KERNEL(3, 4)
ATTEND_KERNEL(3, 8)
