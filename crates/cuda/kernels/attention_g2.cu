// Decode attention, 2 query heads at a time.
#include "attention_decode.cuh"

ATTEND_KERNEL(2, 2)
ATTEND_KERNEL(2, 4)
ATTEND_KERNEL(2, 8)
