// Decode attention, 1 query head at a time.
#include "attention_decode.cuh"

ATTEND_KERNEL(1, 2)
ATTEND_KERNEL(1, 4)
ATTEND_KERNEL(1, 8)
