// Decode attention, 6 query heads at a time, 2 values of V a lane.
#include "attention_decode.cuh"

ATTEND_KERNEL(6, 2)
