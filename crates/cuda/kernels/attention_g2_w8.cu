// Decode attention, 2 query heads at a time, 8 values of V a lane.
#include "attention_decode.cuh"

ATTEND_KERNEL(2, 8)
