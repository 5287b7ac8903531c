// Decode attention, 1 query head at a time, 4 values of V a lane.
#include "attention_decode.cuh"

ATTEND_KERNEL(1, 4)
