// Decode attention, 8 query heads at a time.
#include "attention_decode.cuh"

ATTEND_KERNEL(8, 2)
ATTEND_KERNEL(8, 4)
