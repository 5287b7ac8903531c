// Decode attention, 7 query heads at a time.
#include "attention_decode.cuh"

ATTEND_KERNEL(7, 2)
ATTEND_KERNEL(7, 4)
