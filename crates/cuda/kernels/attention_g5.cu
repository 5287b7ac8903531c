// Decode attention, 5 query heads at a time.
#include "attention_decode.cuh"

ATTEND_KERNEL(5, 2)
ATTEND_KERNEL(5, 4)
