// Decode attention, 4 query heads at a time, 8 values of V a lane.
#include "attention_decode.cuh"

ATTEND_KERNEL(4, 8)
