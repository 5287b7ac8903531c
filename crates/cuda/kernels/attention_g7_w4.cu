// Decode attention, 7 query heads at a time, 4 values of V a lane.
#include "attention_decode.cuh"

ATTEND_KERNEL(7, 4)
