// Decode attention, 6 query heads at a time.
#include "attention_decode.cuh"

ATTEND_KERNEL(6, 2)
ATTEND_KERNEL(6, 4)
